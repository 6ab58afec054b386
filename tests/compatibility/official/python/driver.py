"""Drives the unmodified Python client that speaks gRPC; the words are described in
peer/official.py.

It runs in a virtual environment of its own, without anything of ours.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from rocketmq import (  # type: ignore[import-not-found]
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType  # type: ignore[import-not-found]

SETTLE_S = 0.4  # how long a surplus message may still show up
CONSUMERS: dict[str, Any] = {}
CLOSERS: dict[str, Callable[[], object]] = {}
RECEIVED: dict[tuple[str, str], Any] = {}
OUTPUT = threading.Lock()
Options = dict[str, str]


def emit(event: str, **members: object) -> None:
    with OUTPUT:
        print(json.dumps({"event": event, **members}), flush=True)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def configuration(o: Options) -> Any:
    signer = Credentials(o.get("ak", ""), o.get("sk", ""))
    return ClientConfiguration(o["ep"], signer, request_timeout=10)


class Expected:
    """Waits until so many calls of `one` have come."""

    def __init__(self, count: int) -> None:
        self._missing, self._news = count, threading.Condition()

    def one(self) -> None:
        with self._news:
            self._missing -= 1
            self._news.notify_all()

    def wait(self, o: Options) -> None:
        with self._news:
            if not self._news.wait_for(lambda: self._missing <= 0, float(o.get("timeout_s", "20"))):
                emit("incomplete", missing=self._missing)
        time.sleep(SETTLE_S)


# ---- producing


def with_producer(o: Options, checker: Any, work: Callable[[Any], None]) -> None:
    producer = Producer(configuration(o), (o["topic"],), checker)
    producer.startup()
    try:
        work(producer)
    finally:
        producer.shutdown()


def message(o: Options, number: int) -> Any:
    made, body = Message(), f"{o.get('prefix', 'm')}-{number}"
    made.topic, made.body, made.keys = o["topic"], body.encode(), body
    made.add_property("n", str(number))
    if "tags" in o:
        tags = o["tags"].split(",")
        made.tag = tags[number % len(tags)]
    if "keyed" in o:
        made.message_group = f"group-{number % int(o['keyed'])}"
    if "delay_ms" in o:  # this client has whole seconds
        made.delivery_timestamp = (now_ms() + int(o["delay_ms"]) + 999) // 1000
    return made


def sent(made: Any, receipt: Any) -> None:
    emit(
        "sent", body=made.body.decode(), id=receipt.message_id, handle=receipt.recall_handle,
        ms=now_ms(),
    )  # fmt: skip


def send(o: Options) -> None:
    def work(producer: Any) -> None:
        for number in range(int(o.get("count", "1"))):
            made = message(o, number)
            sent(made, producer.send(made))

    with_producer(o, None, work)


def recall(o: Options) -> None:
    with_producer(
        o, None, lambda it: emit("recalled", id=it.recall_message(o["topic"], o["handle"]))
    )


class Checker(TransactionChecker):  # type: ignore[misc]
    def __init__(self, o: Options, expected: Expected) -> None:
        self._options, self._expected = o, expected

    def check(self, view: Any) -> Any:
        emit("checked", body=view.body.decode(), id=view.message_id)
        self._expected.one()
        word = ending(self._options, "checks", int(view.properties["n"]))
        if word == "unknown":
            return TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED
        return getattr(TransactionResolution, word.upper())


def ending(o: Options, option: str, number: int) -> str:
    words = o.get(option, "commit").split(",")
    return words[number % len(words)]


def transact(o: Options) -> None:
    expected = Expected(int(o.get("expect", "0")))

    def work(producer: Any) -> None:
        for number in range(int(o.get("count", "1"))):
            made, transaction = message(o, number), producer.begin_transaction()
            sent(made, producer.send(made, transaction))
            outcome = ending(o, "outcomes", number)
            if outcome != "unknown":
                getattr(transaction, outcome)()
        expected.wait(o)

    with_producer(o, Checker(o, expected), work)


# ---- consuming


def subscription(o: Options) -> dict[str, Any]:
    if "sql" in o:
        return {o["topic"]: FilterExpression(o["sql"], FilterType.SQL)}
    return {o["topic"]: FilterExpression(o.get("tag", "*"))}


def open_(o: Options) -> None:
    consumer = SimpleConsumer(
        configuration(o), o["group"], subscription(o), int(o.get("await_s", "5"))
    )
    consumer.startup()
    time.sleep(SETTLE_S)  # it does not wait until the proxy knows its settings
    CONSUMERS[o["name"]] = consumer
    CLOSERS[o["name"]] = consumer.shutdown


def receive(o: Options) -> None:
    consumer = CONSUMERS[o["name"]]
    for view in consumer.receive(int(o.get("batch", "32")), int(o.get("hide_s", "30"))) or ():
        RECEIVED[o["name"], view.body.decode()] = view
        got(view)


def ack(o: Options) -> None:
    for body in o["bodies"].split(","):
        CONSUMERS[o["name"]].ack(RECEIVED[o["name"], body])


def hide(o: Options) -> None:
    view = RECEIVED[o["name"], o["body"]]
    CONSUMERS[o["name"]].change_invisible_duration(view, int(o.get("hide_s", "30")))


def close(o: Options) -> None:
    CLOSERS[o["name"]]()


class Listener(MessageListener):  # type: ignore[misc]
    """The first `fail` deliveries of each message fail."""

    def __init__(self, o: Options, expected: Expected) -> None:
        self._fail, self._expected = int(o.get("fail", "0")), expected
        self._deliveries: Counter[bytes] = Counter()

    def consume(self, view: Any) -> Any:
        got(view)
        self._expected.one()
        self._deliveries[view.body] += 1
        is_good = self._deliveries[view.body] > self._fail
        return ConsumeResult.SUCCESS if is_good else ConsumeResult.FAILURE


def push(o: Options) -> None:
    expected = Expected(int(o.get("expect", "1")))
    consumer = PushConsumer(configuration(o), o["group"], Listener(o, expected), subscription(o))
    consumer.startup()
    closing = threading.Thread(target=consumer.shutdown, daemon=True)  # it waits for its long polls
    CLOSERS[o["name"]] = closing.start
    expected.wait(o)


def got(view: Any) -> None:
    emit(
        "got", body=view.body.decode(), id=view.message_id, topic=view.topic,
        attempt=view.delivery_attempt, tag=view.tag or None, key=" ".join(view.keys),
        n=view.properties.get("n"), group=view.message_group or None, ms=now_ms(),
    )  # fmt: skip


COMMANDS = {
    "send": send, "recall": recall, "transact": transact, "open": open_, "receive": receive,
    "ack": ack, "hide": hide, "close": close, "push": push,
}  # fmt: skip


def main() -> None:
    for line in sys.stdin:
        command, *words = line.split()
        pairs = (word.split("=", 1) for word in words)
        options = {key: unquote(value) for key, value in pairs}
        try:
            COMMANDS[command](options)
            emit("done")
        except Exception as error:
            emit("failed", error=f"{type(error).__name__}: {error}")
    os._exit(0)  # its threads are no daemons


if __name__ == "__main__":
    main()
