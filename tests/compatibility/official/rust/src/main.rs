//! Drives the unmodified Rust client that speaks gRPC; the words are described in peer/official.py.
//!
//! The client has no push consumer, no recall and no change of the invisible time.

use std::collections::HashMap;
use std::error::Error;
use std::io::BufRead;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType, SendReceipt};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};
use tokio::sync::Semaphore;

const SETTLE: Duration = Duration::from_millis(400); // how long a surplus message may still show up

type Done = Result<(), Box<dyn Error>>;

fn emit(event: &str, mut members: Value) {
    members["event"] = json!(event);
    println!("{members}");
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.expect("a clock after 1970").as_millis() as i64
}

#[derive(Clone)]
struct Options(HashMap<String, String>);

impl Options {
    fn text<'a>(&'a self, key: &str, otherwise: &'a str) -> &'a str {
        self.0.get(key).map_or(otherwise, String::as_str)
    }

    fn number(&self, key: &str, otherwise: i64) -> i64 {
        self.0.get(key).and_then(|value| value.parse().ok()).unwrap_or(otherwise)
    }

    fn word(&self, key: &str, number: usize) -> &str {
        let words: Vec<&str> = self.text(key, "commit").split(',').collect();
        words[number % words.len()]
    }

    fn client(&self) -> ClientOption {
        let mut option = ClientOption::default();
        option.set_access_url(self.text("ep", ""));
        option.set_timeout(Duration::from_secs(10));
        if let (Some(access_key), Some(secret_key)) = (self.0.get("ak"), self.0.get("sk")) {
            option.set_access_key(access_key);
            option.set_secret_key(secret_key);
        }
        option
    }

    fn producer(&self) -> ProducerOption {
        let mut option = ProducerOption::default();
        option.set_topics(vec![self.text("topic", "")]);
        option
    }

    fn expression(&self) -> FilterExpression {
        match self.0.get("sql") {
            Some(sql) => FilterExpression::new(FilterType::Sql, sql),
            None => FilterExpression::new(FilterType::Tag, self.text("tag", "*")),
        }
    }

    /// The message with a number, and its body.
    fn message(&self, number: usize, is_in_transaction: bool) -> Result<(impl Message, String), String> {
        let body = format!("{}-{number}", self.text("prefix", "m"));
        let mut builder = MessageBuilder::builder()
            .set_topic(self.text("topic", ""))
            .set_body(body.clone().into_bytes())
            .set_keys(vec![body.clone()])
            .set_properties(HashMap::from([("n", number.to_string())]));
        if let Some(tags) = self.0.get("tags") {
            let words: Vec<&str> = tags.split(',').collect();
            builder = builder.set_tag(words[number % words.len()]);
        }
        if self.0.contains_key("keyed") {
            builder = builder.set_message_group(format!("group-{}", number as i64 % self.number("keyed", 1)));
        }
        if self.0.contains_key("delay_ms") {
            // this client has whole seconds
            builder = builder.set_delivery_timestamp((now_ms() + self.number("delay_ms", 0) + 999) / 1000);
        }
        if is_in_transaction {
            builder = builder.enable_transaction();
        }
        let message = builder.build().map_err(|error| format!("{error:?}"))?;
        Ok((message, body))
    }
}

fn sent(body: &str, message_id: &str) {
    emit("sent", json!({"body": body, "id": message_id, "handle": null, "ms": now_ms()}));
}

async fn send(o: &Options) -> Done {
    let mut producer = Producer::new(o.producer(), o.client())?;
    producer.start().await?;
    for number in 0..o.number("count", 1) as usize {
        let (message, body) = o.message(number, false)?;
        let receipt: SendReceipt = producer.send(message).await?;
        sent(&body, receipt.message_id());
    }
    producer.shutdown().await?;
    Ok(())
}

async fn transact(o: &Options) -> Done {
    let checks = Arc::new(Semaphore::new(0));
    let (asked, answers) = (checks.clone(), o.clone());
    let checker = move |_: String, view: MessageView| {
        let body = String::from_utf8_lossy(view.body()).to_string();
        emit("checked", json!({"body": body, "id": view.message_id()}));
        asked.add_permits(1);
        let number = view.properties()["n"].parse().expect("a number");
        match answers.word("checks", number) {
            "commit" => TransactionResolution::COMMIT,
            "rollback" => TransactionResolution::ROLLBACK,
            _ => TransactionResolution::UNKNOWN,
        }
    };
    let mut producer = Producer::new_transaction_producer(o.producer(), o.client(), Box::new(checker))?;
    producer.start().await?;
    for number in 0..o.number("count", 1) as usize {
        let (message, body) = o.message(number, true)?;
        let transaction = producer.send_transaction_message(message).await?;
        sent(&body, transaction.message_id());
        match o.word("outcomes", number) {
            "commit" => transaction.commit().await?,
            "rollback" => transaction.rollback().await?,
            _ => (),
        }
    }
    let expect = o.number("expect", 0);
    let end = Instant::now() + Duration::from_secs(o.number("timeout_s", 20) as u64);
    while (checks.available_permits() as i64) < expect && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let missing = expect - checks.available_permits() as i64;
    if missing > 0 {
        emit("incomplete", json!({"missing": missing}));
    }
    tokio::time::sleep(SETTLE).await;
    producer.shutdown().await?;
    Ok(())
}

/// A simple consumer, what it wants, and what it has got.
struct Session {
    consumer: SimpleConsumer,
    opened: Options,
    received: HashMap<String, MessageView>,
}

async fn open(o: &Options) -> Result<Session, Box<dyn Error>> {
    let mut option = SimpleConsumerOption::default();
    option.set_topics(vec![o.text("topic", "")]);
    option.set_consumer_group(o.text("group", ""));
    let mut consumer = SimpleConsumer::new(option, o.client())?;
    consumer.start().await?;
    Ok(Session { consumer, opened: o.clone(), received: HashMap::new() })
}

impl Session {
    async fn receive(&mut self, o: &Options) -> Done {
        let hidden = Duration::from_secs(o.number("hide_s", 30) as u64);
        let (topic, batch) = (self.opened.text("topic", ""), o.number("batch", 32) as i32);
        let views = self.consumer.receive_with(topic, &self.opened.expression(), batch, hidden).await?;
        for view in views {
            let body = String::from_utf8_lossy(view.body()).to_string();
            let members = json!({
                "body": body, "id": view.message_id(), "topic": view.topic(), "attempt": view.delivery_attempt(),
                "tag": view.tag(), "key": view.keys().join(" "), "n": view.properties().get("n"),
                "group": view.message_group(), "ms": now_ms(),
            });
            emit("got", members);
            self.received.insert(body, view);
        }
        Ok(())
    }

    async fn ack(&self, o: &Options) -> Done {
        for body in o.text("bodies", "").split(',') {
            self.consumer.ack(&self.received[body]).await?;
        }
        Ok(())
    }
}

async fn run(command: &str, o: &Options, sessions: &mut HashMap<String, Session>) -> Done {
    let name = o.text("name", "").to_string();
    match command {
        "send" => send(o).await?,
        "transact" => transact(o).await?,
        "open" => {
            sessions.insert(name, open(o).await?);
        }
        "receive" => sessions.get_mut(&name).ok_or("no such consumer")?.receive(o).await?,
        "ack" => sessions[&name].ack(o).await?,
        "close" => sessions.remove(&name).ok_or("no such consumer")?.consumer.shutdown().await?,
        _ => return Err(format!("this client has no {command}").into()),
    }
    Ok(())
}

/// The text of a value that came URL-encoded.
fn decoded(text: &str) -> String {
    let (mut found, mut rest) = (Vec::new(), text.bytes());
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits: String = rest.by_ref().take(2).map(char::from).collect();
            found.push(u8::from_str_radix(&digits, 16).expect("two hex digits"));
        } else {
            found.push(byte);
        }
    }
    String::from_utf8(found).expect("UTF-8")
}

#[tokio::main]
async fn main() {
    let mut sessions = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let mut words = line.split_whitespace();
        let command = words.next().expect("a command");
        let pairs = words.filter_map(|word| word.split_once('='));
        let options = Options(pairs.map(|(key, value)| (key.to_string(), decoded(value))).collect());
        match run(command, &options, &mut sessions).await {
            Ok(()) => emit("done", json!({})),
            Err(error) => emit("failed", json!({"error": error.to_string()})),
        }
    }
    std::process::exit(0);
}
