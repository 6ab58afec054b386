// Drives the unmodified Node client that speaks gRPC; the words are described in peer/official.py.
'use strict';

const readline = require('node:readline');
const { Producer, PushConsumer, SimpleConsumer, FilterExpression, ConsumeResult } = require('rocketmq-client-nodejs');
const { FilterType, TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const SETTLE_MS = 400; // how long a surplus message may still show up
const consumers = new Map();
const received = new Map();
const closers = new Map();
const quiet = { debug() {}, info() {}, warn: console.error, error: console.error, close() {} };

const emit = (event, members) => process.stdout.write(JSON.stringify({ event, ...members }) + '\n');
const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));

function configuration(o) {
  const sessionCredentials = o.ak ? { accessKey: o.ak, accessSecret: o.sk } : undefined;
  return { endpoints: o.ep, namespace: '', requestTimeout: 10000, logger: quiet, sessionCredentials };
}

// ---- producing

async function withProducer(o, checker, work) {
  const producer = new Producer({ ...configuration(o), topic: o.topic, checker });
  await producer.startup();
  try {
    await work(producer);
  } finally {
    await producer.shutdown();
  }
}

function message(o, i) {
  const body = `${o.prefix ?? 'm'}-${i}`;
  const made = { topic: o.topic, body: Buffer.from(body), keys: [ body ], properties: new Map([[ 'n', String(i) ]]) };
  const tags = (o.tags ?? '').split(',');
  if (o.tags) made.tag = tags[i % tags.length];
  if (o.keyed) made.messageGroup = `group-${i % Number(o.keyed)}`;
  if (o.delay_ms) made.delay = Number(o.delay_ms);
  return made;
}

function sent(made, receipt) {
  emit('sent', { body: made.body.toString(), id: receipt.messageId, handle: receipt.recallHandle, ms: Date.now() });
}

async function send(o) {
  await withProducer(o, undefined, async producer => {
    for (let i = 0; i < Number(o.count ?? 1); i++) {
      const made = message(o, i);
      sent(made, await producer.send(made));
    }
  });
}

async function recall(o) {
  await withProducer(o, undefined, async producer => {
    emit('recalled', { id: (await producer.recallMessage(o.topic, o.handle)).messageId });
  });
}

function ending(o, option, i) {
  const words = (o[option] ?? 'commit').split(',');
  return words[i % words.length];
}

async function transact(o) {
  const state = { missing: Number(o.expect ?? 0) };
  const checker = {
    async check(view) {
      emit('checked', { body: view.body.toString(), id: view.messageId });
      state.missing--;
      const word = ending(o, 'checks', Number(view.properties.get('n')));
      return word === 'unknown' ? TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED
        : TransactionResolution[word.toUpperCase()];
    },
  };
  await withProducer(o, checker, async producer => {
    for (let i = 0; i < Number(o.count ?? 1); i++) {
      const made = message(o, i);
      const transaction = producer.beginTransaction();
      sent(made, await producer.send(made, transaction));
      const outcome = ending(o, 'outcomes', i);
      if (outcome !== 'unknown') await transaction[outcome]();
    }
    await complete(o, state);
  });
}

async function complete(o, state) {
  const end = Date.now() + Number(o.timeout_s ?? 20) * 1000;
  while (state.missing > 0 && Date.now() < end) await sleep(10);
  if (state.missing > 0) emit('incomplete', { missing: state.missing });
  await sleep(SETTLE_MS);
}

// ---- consuming

function subscriptions(o) {
  const expression = o.sql ? new FilterExpression(o.sql, FilterType.SQL) : new FilterExpression(o.tag ?? '*');
  return new Map([[ o.topic, expression ]]);
}

async function open(o) {
  const consumer = new SimpleConsumer({
    ...configuration(o), consumerGroup: o.group, subscriptions: subscriptions(o),
    awaitDuration: Number(o.await_s ?? 5) * 1000,
  });
  await consumer.startup();
  consumers.set(o.name, consumer);
  closers.set(o.name, () => consumer.shutdown());
}

async function receive(o) {
  const views = await consumers.get(o.name).receive(Number(o.batch ?? 32), Number(o.hide_s ?? 30) * 1000);
  for (const view of views) {
    received.set(o.name + view.body.toString(), view);
    got(view);
  }
}

async function ack(o) {
  for (const body of o.bodies.split(',')) await consumers.get(o.name).ack(received.get(o.name + body));
}

async function hide(o) {
  await consumers.get(o.name).changeInvisibleDuration(received.get(o.name + o.body), Number(o.hide_s ?? 30) * 1000);
}

async function close(o) {
  await closers.get(o.name)();
}

async function push(o) {
  const deliveries = new Map();
  const state = { missing: Number(o.expect ?? 1) };
  const consumer = new PushConsumer({
    ...configuration(o), consumerGroup: o.group, subscriptions: subscriptions(o),
    messageListener: {
      async consume(view) {
        got(view);
        state.missing--;
        const body = view.body.toString();
        deliveries.set(body, (deliveries.get(body) ?? 0) + 1);
        return deliveries.get(body) > Number(o.fail ?? 0) ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
      },
    },
  });
  await consumer.startup();
  closers.set(o.name, () => { consumer.shutdown().catch(console.error); }); // it waits for its long polls
  await complete(o, state);
}

function got(view) {
  emit('got', {
    body: view.body.toString(), id: view.messageId, topic: view.topic, attempt: view.deliveryAttempt,
    tag: view.tag || null, key: view.keys.join(' '), n: view.properties.get('n'), group: view.messageGroup || null,
    ms: Date.now(),
  });
}

const COMMANDS = { send, recall, transact, open, receive, ack, hide, close, push };

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [ command, ...words ] = line.trim().split(' ');
    const pairs = words.map(word => word.split('='));
    const o = Object.fromEntries(pairs.map(([ key, value ]) => [ key, decodeURIComponent(value) ]));
    try {
      await COMMANDS[command](o);
      emit('done');
    } catch (error) {
      console.error(error);
      emit('failed', { error: String(error) });
    }
  }
  process.exit(0);
}

main();
