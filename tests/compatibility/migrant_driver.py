"""Drives our client under RocketMQ's own names (`sluicemq.rocketmq`); words as java/Driver.java.

It is what somebody writes who comes from the Java client, so it uses nothing but that vocabulary.
"""

import json
import sys
import threading
import time
from typing import Any
from urllib.parse import unquote

from sluicemq import rocketmq as mq

SETTLE_S = 0.4
LEAVE_S = 0.5
BALANCE_S = 2.5

Options = dict[str, str]
output = threading.Lock()


def main() -> None:
    for line in sys.stdin:
        command, *words = line.split()
        options = {key: unquote(value) for key, _, value in (word.partition("=") for word in words)}
        try:
            {"send": send, "push": push, "lite": lite, "transact": transact}[command](options)
        except Exception as error:
            emit("failed", error=f"{type(error).__name__}: {error}")
        else:
            emit("done")


def emit(event: str, **members: Any) -> None:
    with output:
        print(json.dumps({"event": event, **members}), flush=True)


def make_message(options: Options, i: int) -> mq.Message:
    tags = options.get("tags", "A").split(",")
    body = f"{options.get('prefix', 'm')}-{i}".ljust(int(options.get("size", 0)), ".")
    message = mq.Message(options["topic"], body, tags=tags[i % len(tags)], keys=f"k-{i}")
    message.put_user_property("n", str(i))
    message.put_user_property("parity", ("even", "odd")[i % 2])
    message.put_user_property("name", "h\u00e9\u4e2d")
    return message


def send(options: Options) -> None:
    producer = mq.DefaultMQProducer("migrant", namesrv_addr=options["ns"])
    producer.start()
    messages = [make_message(options, i) for i in range(int(options.get("count", 1)))]
    mode = options.get("mode", "sync")
    try:
        if mode == "sync":
            keyed = int(options.get("keyed", 0))
            selector = mq.SelectMessageQueueByHash() if keyed else None
            for i, message in enumerate(messages):
                arg = f"key-{i % keyed}" if keyed else None
                sent(message, producer.send(message, selector=selector, arg=arg))
        elif mode == "batch":
            for start in range(0, len(messages), 10):
                batch = messages[start : start + 10]
                result = producer.send(batch)
                for message in batch:
                    sent(message, result)
        elif mode == "oneway":
            for message in messages:
                producer.send_oneway(message)
                sent(message, None)
            time.sleep(LEAVE_S)
        else:
            send_async(producer, messages)
    finally:
        producer.shutdown()


class Callback(mq.SendCallback):
    def __init__(self, message: mq.Message, open_: threading.Semaphore) -> None:
        self._message = message
        self._open = open_

    def on_success(self, send_result: mq.SendResult) -> None:
        sent(self._message, send_result)
        self._open.release()

    def on_exception(self, e: Exception) -> None:
        emit("error", error=str(e))
        self._open.release()


def send_async(producer: mq.DefaultMQProducer, messages: list[mq.Message]) -> None:
    open_ = threading.Semaphore(0)
    for message in messages:
        producer.send(message, Callback(message, open_))
    for _ in messages:
        assert open_.acquire(timeout=20), "a send is unanswered"


def sent(message: mq.Message, result: mq.SendResult | None) -> None:
    if result is None:
        emit("sent", body=message.body.decode())
        return
    emit(
        "sent",
        body=message.body.decode(),
        status=result.send_status.name,
        msg_id=result.msg_id,
        offset_msg_id=result.offset_msg_id,
        queue=result.message_queue.queue_id,
        offset=result.queue_offset,
    )


def got(consumer: int, message: mq.MessageExt) -> None:
    emit(
        "got",
        consumer=consumer,
        topic=message.topic,
        body=message.body.decode(),
        tag=message.tags,
        keys=message.keys,
        properties=message.properties,
        msg_id=message.msg_id,
        queue=message.queue_id,
        offset=message.queue_offset,
        reconsumed=message.reconsume_times,
    )


class Ledger(mq.TransactionListener):
    """The local transaction of message i ends as the i-th of `outcomes` says, its check as the i-th
    of `checks`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.asked = threading.Semaphore(0)

    def _ending(self, name: str, number: str | None) -> mq.LocalTransactionState:
        words = self._options.get(name, "commit").split(",")
        return {
            "commit": mq.LocalTransactionState.COMMIT_MESSAGE,
            "rollback": mq.LocalTransactionState.ROLLBACK_MESSAGE,
            "unknown": mq.LocalTransactionState.UNKNOW,
        }[words[int(number or 0) % len(words)]]

    def execute_local_transaction(self, msg: mq.Message, arg: Any) -> mq.LocalTransactionState:
        return self._ending("outcomes", msg.properties["n"])

    def check_local_transaction(self, msg: mq.MessageExt) -> mq.LocalTransactionState:
        body, identity = msg.body.decode(), msg.transaction_id
        emit("checked", body=body, topic=msg.topic, msg_id=identity)
        self.asked.release()
        return self._ending("checks", msg.get_user_property("n"))


def transact(options: Options) -> None:
    ledger = Ledger(options)
    producer = mq.TransactionMQProducer(options["group"], namesrv_addr=options["ns"])
    producer.set_transaction_listener(ledger)
    producer.start()
    try:
        for i in range(int(options.get("count", 1))):
            message = make_message(options, i)
            sent(message, producer.send_message_in_transaction(message))
        for missing in range(int(options.get("expect", 0)), 0, -1):
            if not ledger.asked.acquire(timeout=float(options.get("timeout_s", 20))):
                emit("incomplete", missing=missing)
                break
        time.sleep(SETTLE_S)
    finally:
        producer.shutdown()


def expression(options: Options) -> str | mq.MessageSelector:
    if "sql" in options:
        return mq.MessageSelector.by_sql(options["sql"])
    return options.get("tag", "*")


def verdict(options: Options, message: mq.MessageExt, context: Any) -> Any:
    """The first `fail` deliveries of each message fail."""
    if message.reconsume_times >= int(options.get("fail", 0)):
        return None
    if "orderly" in options:
        return mq.ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
    context.delay_level_when_next_consume = int(options.get("level", 0))
    return mq.ConsumeConcurrentlyStatus.RECONSUME_LATER


def push(options: Options) -> None:
    left = int(options.get("expect", 1))
    complete = threading.Event()

    def listener_of(number: int) -> Any:
        def listen(messages: list[mq.MessageExt], context: Any) -> Any:
            nonlocal left
            for message in messages:
                got(number, message)
                with output:
                    left -= 1
                    done = left <= 0
                if done:
                    complete.set()
            return verdict(options, messages[0], context)

        return listen

    consumers = []
    try:
        for number in range(int(options.get("instances", 1))):
            consumer = mq.DefaultMQPushConsumer(options["group"], namesrv_addr=options["ns"])
            consumer.set_consume_from_where(mq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
            consumer.subscribe(options["topic"], expression(options))
            consumer.set_max_reconsume_times(int(options.get("max", -1)))
            consumer.set_suspend_current_queue_time_millis(50)
            consumer.register_message_listener(listener_of(number), orderly="orderly" in options)
            consumer.start()
            consumers.append(consumer)
        if "count" in options:
            time.sleep(BALANCE_S)
            send(options)
        if not complete.wait(float(options.get("timeout_s", 20))):
            emit("incomplete", missing=left)
        time.sleep(SETTLE_S)
    finally:
        for consumer in consumers:
            consumer.shutdown()


def lite(options: Options) -> None:
    left = int(options.get("expect", 1))
    consumer = mq.DefaultLitePullConsumer(options["group"], namesrv_addr=options["ns"])
    consumer.consume_from_where = mq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    consumer.set_auto_commit(False)
    assign = options.get("mode") == "assign"
    if not assign:
        consumer.subscribe(options["topic"], expression(options))
    consumer.start()
    try:
        queues = consumer.fetch_message_queues(options["topic"]) if assign else []
        if assign:
            consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        end, settled = time.monotonic() + float(options.get("timeout_s", 20)), False
        while time.monotonic() < end:
            for message in consumer.poll(100):
                got(0, message)
                left -= 1
            if left <= 0 and not settled:
                end, settled = time.monotonic() + SETTLE_S, True
        if left > 0:
            emit("incomplete", missing=left)
        consumer.commit()
        for queue in queues:
            emit("committed", queue=queue.queue_id, offset=consumer.committed(queue))
    finally:
        consumer.shutdown()


if __name__ == "__main__":
    main()
