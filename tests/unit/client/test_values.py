"""What cannot be meant is refused at the call, in a sentence with the value and the cure."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from sluicemq import (
    Admin,
    ConfigurationError,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    Sluice,
    idempotent,
)
from sluicemq.testing.embedded import embedded

Q = MessageQueue("t", "broker-a", 0)


def handler(message: object) -> None: ...


BAD: list[tuple[Callable[[Any], object], str]] = [
    (lambda mq: mq.send("t", 5), "got 5 (int)"),
    (lambda mq: mq.send("t"), "be bytes or a string, got None"),
    (lambda mq: mq.send("t", {"a": 1}), "json.dumps"),
    (lambda mq: mq.send("t", b""), "the body is empty"),
    (lambda mq: mq.send(5, b"x"), "topic must be a string, got 5"),
    (lambda mq: mq.send(["t"], b"x"), "topic must be a string, got ['t']"),
    (lambda mq: mq.send("t", b"x", tag=["A"]), "the tag must be a string, got ['A']"),
    (lambda mq: mq.send("t", b"x", keys=5), "or a list of strings, got 5"),
    (lambda mq: mq.send("t", b"x", keys=[5]), "a key must be a string, got 5. Convert it"),
    (lambda mq: mq.send("t", b"x", keys="a b"), "the key 'a b' is empty or contains white space"),
    (lambda mq: mq.send("t", b"x", keys={"a": 1}), "got {'a': 1}"),
    (lambda mq: mq.send("t", b"x", properties=["a"]), "be a dict of strings, got ['a']"),
    (lambda mq: mq.send("t", b"x", properties={"a": 1}), "got 1 (int) for 'a'"),
    (lambda mq: mq.send("t", b"x", flag="a"), "the flag cannot be 'a'"),
    (lambda mq: mq.send("t", b"x", flag=2**31), "the flag cannot be 2147483648"),
    (lambda mq: mq.send("t", b"x", sharding_key=5), "got 5 (int) for"),
    (
        lambda mq: mq.send("t", b"x", delay_level="3"),
        "the delay level must be a whole number from 0 to 18, got '3'",
    ),
    (lambda mq: mq.send("t", b"x", delay="5s"), "of seconds or a timedelta, got '5s'"),
    (lambda mq: mq.send("t", b"x", deliver_at="2026"), "be a datetime or milliseconds, got '2026'"),
    (lambda mq: mq.send("t", b"x", queue=3), "be a MessageQueue, got 3"),
    (lambda mq: mq.send("u", b"x", queue=Q), "queue belongs to the topic 't', the message to 'u'"),
    (lambda mq: mq.send("t", b"x", selector=4), "selector must be a callable"),
    (lambda mq: mq.send("t", b"x", timeout_ms=-4), "timeout_ms cannot be -4. Use a whole number"),
    (lambda mq: mq.send("t", b"x", timeout_ms="4"), "timeout_ms cannot be '4'"),
    (lambda mq: mq.send(Message("t", b"x"), tag="A"), "cannot be combined with a body or options"),
    (lambda mq: mq.send(Message("t", b"x"), b"y"), "cannot be combined with a body or options"),
    (lambda mq: mq.send(Message("t", 5)), "be bytes or a string, got 5"),
    (lambda mq: mq.send(Message("t", b"x", tag=["A"])), "the tag must be a string, got ['A']"),
    (lambda mq: mq.send(Message("t", b"x", keys=5)), "or a list of strings, got 5"),
    (lambda mq: mq.send(Message("t", b"x", delay="5s")), "delay must be a number of seconds"),
    (
        lambda mq: mq.send(Message("t", b"x", delay=1, delay_ms=1)),
        "delay and delay_ms cannot be combined",
    ),
    (lambda mq: mq.send(Message("t", b"x", properties=5)), "be a dict of strings, got 5"),
    (lambda mq: mq.send_oneway("t", b"x", queue=3), "be a MessageQueue, got 3"),
    (lambda mq: mq.send_batch(Message("t", b"x")), "Write send_batch([Message("),
    (lambda mq: mq.send_batch([b"x"]), "be a list of messages, got b'x'"),
    (
        lambda mq: mq.send_soon(None, "t", b"x"),
        "on_done must be a function (result, error), got None",
    ),
    (lambda mq: mq.send_soon(handler, "t", b"x", queue=3), "be a MessageQueue, got 3"),
    (lambda mq: mq.request("t", b"x", timeout_s=-1), "timeout_s cannot be -1"),
    (lambda mq: mq.transaction("t", b"x", queue=3), "be a MessageQueue, got 3"),
    (
        lambda mq: mq.transaction("t", b"x", check_after_s="3").__aenter__(),
        "check_after_s cannot be '3'",
    ),
    (lambda mq: mq.recall(5), "5 is not a valid recall handle"),
    (lambda mq: mq.subscribe(5, group="g"), "topic must be a string, got 5"),
    (lambda mq: mq.subscribe("t", group=5), "the group must be a string, got 5"),
    (lambda mq: mq.subscribe("t", group="g", tags=["A"]), "tags must be a string, got ['A']"),
    (lambda mq: mq.subscribe("t", group="g", where=3), "where must be a string, got 3"),
    (lambda mq: mq.subscribe("t", group="g", start="begin"), "start cannot be 'begin'"),
    (lambda mq: mq.subscribe("t", group="g", prefetch_count="3"), "of messages cannot be '3'"),
    (lambda mq: mq.subscribe("t", group="g", suspend_s="3"), "suspend_s cannot be '3'"),
    (lambda mq: mq.subscribe("t", group="g", span_max=0), "span_max cannot be 0"),
    (lambda mq: mq.subscribe("t", group="g", allocate=3), "strategy 3"),
    (lambda mq: mq.subscribe("t", group="g").receive_many(0), "count_max cannot be 0"),
    (lambda mq: mq.subscribe("t", group="g").receive_many(1, "3"), "timeout_s cannot be '3'"),
    (lambda mq: mq.consumer("g", "h"), "handler must be a function, got 'h'"),
    (lambda mq: mq.consumer("g", handler, concurrency=0), "concurrency cannot be 0"),
    (lambda mq: mq.consumer("g", handler, batch_max=2000), "Use a whole number, 1 to 1,024"),
    (lambda mq: mq.consumer("g", handler).subscribe(["t"]), "topic must be a string, got ['t']"),
    (lambda mq: mq.lite_pull("g", count_max=0), "of messages cannot be 0"),
    (lambda mq: mq.lite_pull("g").poll("5"), "timeout_s cannot be '5'"),
    (lambda mq: mq.lite_pull("g").assign("t"), "be a MessageQueue, got 't'"),
    (lambda mq: mq.pull_consumer().pull(Q, -1), "offset cannot be -1"),
    (lambda mq: mq.pull_consumer().pull("t", 0), "be a MessageQueue, got 't'"),
    (lambda mq: mq.producer("p", retries=-1), "retries cannot be -1"),
    (lambda mq: mq.producer("p", listener=5), "be a TransactionListener, got 5"),
    (lambda mq: Producer("127.0.0.1:9876"), "Use Sluice(…).producer(…). Without asyncio, use"),
    (Producer, "a Sluice creates it"),
    (lambda mq: PullConsumer("127.0.0.1:9876"), "Use Sluice(…).pull_consumer(…)"),
    (lambda mq: Admin("127.0.0.1:9876"), "Use Sluice(…).admin."),
    (lambda mq: Sluice(5), "or a list of strings, got 5"),
    (lambda mq: Sluice("a", credentials="ab"), "credentials must be a pair"),
    (lambda mq: Sluice("a", trace=5), "trace must be a bool or a string, got 5"),
    (lambda mq: Sluice("a", client_id=5), "client_id must be a string, got 5"),
    (lambda mq: Sluice("a", on_moved=5), "on_moved must be a function, got 5"),
    (lambda mq: idempotent(handler), "with the database in parentheses"),
]


async def done(found: object) -> None:
    if inspect.isawaitable(found):
        await found


async def test_what_cannot_be_meant_is_refused_in_one_sentence() -> None:
    async with embedded() as mq:
        await mq.send("t", b"x")
        for call, words in BAD:
            with pytest.raises(ConfigurationError) as caught:
                await done(call(mq))
            assert words in str(caught.value)
            assert caught.value.fix
            assert "\n" not in str(caught.value)


async def test_what_can_be_meant_is_sent() -> None:
    async with embedded() as mq:
        await mq.send("t", bytearray(b"a"), keys={"k1"}, properties={})
        await mq.send("t", memoryview(b"b"), keys="k1")
        await mq.send(Message("t", b"c", keys="k1"))
        await mq.send("t", "d", keys=["k1", "k2"])
        found = await mq.admin.messages_by_key("t", "k1")
        assert sorted(message.body for message in found) == [b"a", b"b", b"c", b"d"]
        assert {message.keys for message in found} == {("k1",), ("k1", "k2")}
