import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.impl.consumer.DefaultMQPushConsumerImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/**
 * Drives what the unmodified Java client 5.3 does with retries, order and transactions when things go wrong.
 *
 * <p>The same lines in and out as Driver.java. Commands:
 *
 * <pre>
 * fallback  topic group expect fail level max timeout_s: a consumer none of whose send-backs (36) reaches the broker
 * handover  topic group keyed count leave: two orderly consumers of the group; the first leaves after `leave` messages
 * pop       topic group tag instances expect fail max timeout_s: consumers that do not balance by themselves
 *           (clientRebalance=false) and pop when 401 has said so; with `count` messages sent when they are there.
 *           step=N: what fails comes again after N s; hide=MS: so long a message is a consumer's, slow=MS it takes
 * keyed     topic count prefix: message i by the hash of key-i; what cannot be sent is an event `refused`
 * transact  topic group count prefix outcomes checks expect timeout_s, and
 *           property=NAME:VALUE on every message, again=commit|rollback: each is ended once more, that way,
 *           keep=1: the producer goes on living when the command is done
 * </pre>
 */
public final class Delivery {
    private static final PrintStream OUT = System.out;
    private static final int SEND_BACK = 36;
    private static final long SETTLE_MS = 400;
    private static final long BALANCE_MS = 2500;

    private final Map<String, String> options = new HashMap<>();

    private Delivery(String[] words) throws Exception {
        for (int i = 1; i < words.length; i++) {
            int equals = words[i].indexOf('=');
            options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            try {
                new Delivery(words).run(words[0]);
                emit("done");
            } catch (Throwable error) {
                emit("failed", "error", String.valueOf(error));
            }
        }
        System.exit(0);
    }

    private void run(String command) throws Exception {
        switch (command) {
            case "fallback": fallback(); break;
            case "handover": handover(); break;
            case "pop": pop(); break;
            case "keyed": keyed(); break;
            case "transact": transact(); break;
            default: throw new IllegalArgumentException(command);
        }
    }

    // ---- consumers

    /** The client's own way out: it sends the copy itself when 36 fails. */
    private void fallback() throws Exception {
        RPCHook hook = new RPCHook() {
            @Override public void doBeforeRequest(String address, RemotingCommand request) {
                if (request.getCode() == SEND_BACK) {
                    emit("blocked", "address", address);
                    throw new IllegalStateException("no send-back in this test");
                }
            }

            @Override public void doAfterResponse(String address, RemotingCommand request, RemotingCommand response) {
            }
        };
        DefaultMQPushConsumer consumer = configured(new DefaultMQPushConsumer(options.get("group"), hook));
        CountDownLatch open = new CountDownLatch(number("expect", 1));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMaxReconsumeTimes(number("max", -1));
        consumer.subscribe(options.get("topic"), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            got(0, message);
            open.countDown();
            context.setDelayLevelWhenNextConsume(number("level", 0));
            return message.getReconsumeTimes() < number("fail", 0)
                ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        try {
            await(open);
        } finally {
            consumer.shutdown();
        }
    }

    private void pop() throws Exception {
        CountDownLatch open = new CountDownLatch(number("expect", 1));
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (int i = 0; i < number("instances", 1); i++) {
            DefaultMQPushConsumer consumer = configured(new DefaultMQPushConsumer(options.get("group")));
            consumer.setClientRebalance(false);
            consumer.setPopInvisibleTime(number("hide", 60_000));
            consumer.setMaxReconsumeTimes(number("max", -1));
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            if (options.containsKey("sql")) consumer.subscribe(options.get("topic"), MessageSelector.bySql(options.get("sql")));
            else consumer.subscribe(options.get("topic"), text("tag", "*"));
            int number = i;
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                MessageExt message = messages.get(0);
                got(number, message);
                pause(number("slow", 0));
                open.countDown();
                return message.getReconsumeTimes() < number("fail", 0)
                    ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumers.add(consumer);
        }
        try {
            for (DefaultMQPushConsumer consumer : consumers) {
                consumer.start();
                if (options.containsKey("step")) quicken(consumer);
            }
            if (options.containsKey("count")) {
                Thread.sleep(BALANCE_MS);
                keyed();
            }
            await(open);
        } finally {
            for (DefaultMQPushConsumer consumer : consumers) consumer.shutdown();
        }
    }

    /** The ladder of a client that pops is fixed, and begins with ten seconds. */
    private void quicken(DefaultMQPushConsumer consumer) throws Exception {
        Field ladder = DefaultMQPushConsumerImpl.class.getDeclaredField("popDelayLevel");
        ladder.setAccessible(true);
        Arrays.fill((int[]) ladder.get(consumer.getDefaultMQPushConsumerImpl()), number("step", 1));
    }

    private static void pause(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
        }
    }

    private void handover() throws Exception {
        int count = number("count", 1);
        CountDownLatch open = new CountDownLatch(count), leave = new CountDownLatch(number("leave", 1));
        CountDownLatch left = new CountDownLatch(1);
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (int i = 0; i < 2; i++) consumers.add(orderly(i, open, leave));
        for (DefaultMQPushConsumer consumer : consumers) consumer.start();
        Thread.sleep(BALANCE_MS);
        Thread sender = new Thread(() -> sendKeyed(number("keyed", 1), 10, left));
        sender.start();
        try {
            leave.await(number("timeout_s", 20), TimeUnit.SECONDS);
            consumers.get(0).shutdown();
            emit("left");
            left.countDown();
            await(open);
            sender.join();
        } finally {
            for (DefaultMQPushConsumer consumer : consumers) consumer.shutdown();
        }
    }

    private DefaultMQPushConsumer orderly(int number, CountDownLatch open, CountDownLatch leave) throws Exception {
        DefaultMQPushConsumer consumer = configured(new DefaultMQPushConsumer(options.get("group")));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(options.get("topic"), "kept");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt message : messages) {
                got(number, message);
                open.countDown();
                if (number == 0) leave.countDown();
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        return consumer;
    }

    // ---- producers

    private void keyed() {
        sendKeyed(number("count", 1), 0, new CountDownLatch(0));
    }

    /** The last quarter is sent after `left`, however slow the machine is to let a consumer go. */
    private void sendKeyed(int keys, long pauseMs, CountDownLatch left) {
        DefaultMQProducer producer = configured(new DefaultMQProducer("delivery-producer"));
        producer.setSendMsgTimeout(5_000);
        try {
            producer.start();
            int count = number("count", 1);
            for (int i = 0; i < count; i++) {
                if (i == count * 3 / 4) left.await();
                String key = "key-" + i % keys;
                try {
                    sent(message(i), producer.send(message(i), new SelectMessageQueueByHash(), key));
                } catch (Exception refusal) {
                    emit("refused", "body", body(i), "error", String.valueOf(refusal));
                }
                Thread.sleep(pauseMs);
            }
        } catch (Exception error) {
            emit("refused", "body", "", "error", String.valueOf(error));
        } finally {
            producer.shutdown();
        }
    }

    private void transact() throws Exception {
        TransactionMQProducer producer = configured(new TransactionMQProducer(options.get("group")));
        CountDownLatch open = new CountDownLatch(number("expect", 0));
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return ending("outcomes", message);
            }

            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                emit("checked", "body", new String(message.getBody(), StandardCharsets.UTF_8),
                    "age_ms", System.currentTimeMillis() - message.getBornTimestamp());
                open.countDown();
                return ending("checks", message);
            }
        });
        producer.setSendMsgTimeout(10_000);
        producer.start();
        try {
            for (int i = 0; i < number("count", 1); i++) transact(producer, message(i), i);
            await(open);
        } finally {
            if (!options.containsKey("keep")) producer.shutdown();
        }
    }

    private void transact(TransactionMQProducer producer, Message message, int i) throws Exception {
        try {
            SendResult result = producer.sendMessageInTransaction(message, null);
            sent(message, result);
            if (options.containsKey("again")) {
                Thread.sleep(200); // the first end is one-way
                producer.getDefaultMQProducerImpl().endTransaction(message, result, state(options.get("again")), null);
            }
        } catch (Exception refusal) {
            emit("refused", "body", body(i), "error", String.valueOf(refusal.getCause() == null ? refusal : refusal.getCause()));
        }
    }

    private LocalTransactionState ending(String name, Message message) {
        String[] words = text(name, "commit").split(",");
        return state(words[Integer.parseInt(message.getUserProperty("n")) % words.length]);
    }

    private static LocalTransactionState state(String word) {
        switch (word) {
            case "commit": return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback": return LocalTransactionState.ROLLBACK_MESSAGE;
            default: return LocalTransactionState.UNKNOW;
        }
    }

    private Message message(int i) {
        Message message = new Message(options.get("topic"), "kept", "k-" + i, body(i).getBytes(StandardCharsets.UTF_8));
        message.putUserProperty("n", String.valueOf(i));
        if (options.containsKey("property")) {
            String[] pair = options.get("property").split(":");
            MessageAccessor.putProperty(message, pair[0], pair[1]);
        }
        return message;
    }

    private String body(int i) {
        return text("prefix", "m") + "-" + i;
    }

    // ---- odds and ends

    private void await(CountDownLatch open) throws InterruptedException {
        if (!open.await(number("timeout_s", 20), TimeUnit.SECONDS)) emit("incomplete", "missing", open.getCount());
        Thread.sleep(SETTLE_MS);
    }

    private <T extends ClientConfig> T configured(T client) {
        client.setNamesrvAddr(options.get("ns"));
        client.setClientIP("127.0.0.1");
        client.setInstanceName("delivery-" + System.nanoTime());
        client.setHeartbeatBrokerInterval(2_000); // see Driver.java
        client.setPollNameServerInterval(2_000); // else a topic that is made later is seen after up to 30 s
        return client;
    }

    private static void sent(Message message, SendResult result) {
        emit("sent", "body", new String(message.getBody(), StandardCharsets.UTF_8), "status", result.getSendStatus(),
            "msg_id", result.getMsgId(), "broker", result.getMessageQueue().getBrokerName(),
            "queue", result.getMessageQueue().getQueueId());
    }

    private static void got(int consumer, MessageExt message) {
        emit("got", "consumer", consumer, "topic", message.getTopic(),
            "body", new String(message.getBody(), StandardCharsets.UTF_8), "queue", message.getQueueId(),
            "reconsumed", message.getReconsumeTimes(), "level", message.getProperty("DELAY"));
    }

    private String text(String key, String otherwise) {
        return options.getOrDefault(key, otherwise);
    }

    private int number(String key, int otherwise) {
        return Integer.parseInt(text(key, String.valueOf(otherwise)));
    }

    private static void emit(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"event\": ").append(json(event));
        for (int i = 0; i < pairs.length; i += 2) {
            line.append(", ").append(json(pairs[i])).append(": ").append(json(pairs[i + 1]));
        }
        synchronized (OUT) {
            OUT.println(line.append('}'));
            OUT.flush();
        }
    }

    private static String json(Object value) {
        if (value == null || value instanceof Number) return String.valueOf(value);
        StringBuilder text = new StringBuilder("\"");
        for (char letter : String.valueOf(value).toCharArray()) {
            boolean plain = letter >= ' ' && letter < 127 && letter != '"' && letter != '\\';
            text.append(plain ? String.valueOf(letter) : String.format("\\u%04x", (int) letter));
        }
        return text.append('"').toString();
    }
}
