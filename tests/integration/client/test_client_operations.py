"""Operators and consumers: resets while a consumer works, running information, one message handled
on request, request and reply. Our client against our broker, on virtual time."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluicemq.errors import (
    ConfigurationError,
    GroupNotFoundError,
    RequestError,
    RequestTimeoutError,
    RetryLaterError,
)
from sluicemq.files import read_text
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.files import CrashableFiles
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.tables import decode_consumer_offsets_file

QUEUE = MessageQueue("T", "broker-a", 0)
COUNT = 40
MODES = {"by the broker": "true", "by the consumers": "false"}


@pytest.fixture(params=MODES)
async def mq(request: pytest.FixtureRequest) -> AsyncIterator[EmbeddedSluice]:
    settings = {"useServerSideResetOffset": MODES[request.param]}
    async with embedded(clock=VirtualClock(), settings=settings) as made:
        await made.admin.create_topic("T", queues=1)
        yield made


@pytest.fixture
async def plain() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(clock=VirtualClock()) as made:
        await made.admin.create_topic("T", queues=1)
        yield made


async def fill(mq: EmbeddedSluice, count: int = COUNT) -> None:
    for number in range(count):
        await mq.send("T", str(number))


class Handler:
    """Handles one message at a time; holds at `hold_at` until it is let go."""

    def __init__(self, hold_at: str | None = None) -> None:
        self.seen: list[str] = []
        self.hold_at = hold_at
        self.is_holding = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, message: Any) -> None:
        text = message.body.decode()
        self.seen.append(text)
        if text == self.hold_at:
            self.hold_at = None
            self.is_holding.set()
            await self.go.wait()


async def until(mq: EmbeddedSluice, condition: Any, seconds: float = 30) -> None:
    for _ in range(round(seconds * 10)):
        if condition():
            return
        await mq.clock.advance(seconds=0.1)
    raise AssertionError("it has not come to that")


# --- resets


@pytest.mark.parametrize("to", [0, 10, COUNT])
async def test_a_reset_in_the_middle_of_work_is_never_off_by_a_batch(
    mq: EmbeddedSluice, to: int
) -> None:
    """Everything is prefetched, one message is in the handler's hands, five are done."""
    start_ms = mq.clock.now_ms()
    for number in range(COUNT):
        await mq.send("T", str(number))
        await mq.clock.advance(seconds=1)
    handler = Handler("5")
    consumer = mq.consumer("G", handler, concurrency=1).subscribe("T")
    async with consumer:
        await until(mq, handler.is_holding.is_set)
        time_ms = -1 if to == COUNT else start_ms + to * 1000
        (change,) = await mq.admin.reset_offsets("G", "T", time_ms)
        assert change.new == to
        handler.go.set()
        await mq.clock.advance(seconds=12)  # two periods of commits
        expected = [str(number) for number in range(6)]
        assert handler.seen == expected + [str(number) for number in range(to, COUNT)]
        await mq.send("T", "new")
        await until(mq, lambda: handler.seen[-1] == "new")
    assert await mq.admin.committed_offset("G", QUEUE) == COUNT + 1


async def test_a_handler_that_ends_after_the_reset_commits_nothing(mq: EmbeddedSluice) -> None:
    await fill(mq)
    handler = Handler("5")
    async with mq.consumer("G", handler, concurrency=1).subscribe("T"):
        await until(mq, handler.is_holding.is_set)
        await mq.admin.reset_offsets("G", "T", 0)
        await mq.clock.advance(seconds=6)
        handler.hold_at = "0"  # the first one again: nothing can be committed above it
        handler.is_holding.clear()
        handler.go.set()
        handler.go = asyncio.Event()
        await until(mq, handler.is_holding.is_set)
        await mq.clock.advance(seconds=12)
        assert await mq.admin.committed_offset("G", QUEUE) == 0
        handler.go.set()
        await until(mq, lambda: len(handler.seen) == 6 + COUNT)


async def test_an_ordered_consumer_obeys_too(mq: EmbeddedSluice) -> None:
    await fill(mq, 10)
    handler = Handler("4")
    async with mq.consumer("G", handler, ordered=True).subscribe("T"):
        await until(mq, handler.is_holding.is_set)
        await mq.admin.reset_offsets("G", "T", 0)
        await mq.clock.advance(seconds=1)
        handler.go.set()
        await until(mq, lambda: len(handler.seen) == 15)
        await mq.clock.advance(seconds=10)
    assert handler.seen == [*"01234", *"0123456789"]


async def test_a_stream_goes_on_at_the_new_place(mq: EmbeddedSluice) -> None:
    await fill(mq, 10)
    async with mq.subscribe("T", group="G") as messages:
        first = [await messages.receive() for _ in range(4)]
        await mq.admin.reset_offsets("G", "T", -1)
        await mq.clock.advance(seconds=1)
        assert [await message.ack() for message in first] == [False] * 4
        await mq.send("T", "new")
        assert (await messages.receive()).body == b"new"


async def test_a_group_that_is_away_begins_at_the_new_place(mq: EmbeddedSluice) -> None:
    await fill(mq, 10)
    handler = Handler()
    async with mq.consumer("G", handler).subscribe("T"):
        await until(mq, lambda: len(handler.seen) == 10)
    (change,) = await mq.admin.reset_offsets("G", "T", 0)
    assert (change.old, change.new, change.again, change.skipped) == (10, 0, 10, 0)
    again = Handler()
    async with mq.consumer("G", again, concurrency=1).subscribe("T"):
        await until(mq, lambda: len(again.seen) == 10)
        await mq.clock.advance(seconds=10)
    assert again.seen == sorted(handler.seen)  # the first handled several at once
    assert await mq.admin.committed_offset("G", QUEUE) == 10


async def test_a_reset_is_on_disk_before_it_is_answered(plain: EmbeddedSluice) -> None:
    await fill(plain, 10)
    await plain.admin.commit_offset("TOOLS_CONSUMER", QUEUE, 9)
    await plain.admin.reset_offsets("TOOLS_CONSUMER", "T", -1)
    files = plain.servers.files["broker-a"]
    assert isinstance(files, CrashableFiles)
    left = files.crash(random.Random(1))
    config = "/sluicemq/broker-a/config"
    offsets = read_text(left, f"{config}/consumerOffset.json") or ""
    assert decode_consumer_offsets_file(offsets).offsets["T@TOOLS_CONSUMER"] == {0: 10}
    assert '"offset":10' in (read_text(left, f"{config}/sluiceOffsetResets.json") or "")


async def test_a_plan_changes_nothing(plain: EmbeddedSluice) -> None:
    await fill(plain, 10)
    await plain.admin.commit_offset("TOOLS_CONSUMER", QUEUE, 4)
    (change,) = await plain.admin.plan_reset("TOOLS_CONSUMER", "T", -1)
    assert (change.old, change.new, change.skipped) == (4, 10, 6)
    assert await plain.admin.committed_offset("TOOLS_CONSUMER", QUEUE) == 4


async def test_an_unknown_group_is_named_with_those_that_are_known(plain: EmbeddedSluice) -> None:
    await plain.admin.create_group(GroupConfig("billing"))
    with pytest.raises(GroupNotFoundError, match=r"'none'.* There are: billing\. `sluice"):
        await plain.admin.reset_offsets("none", "T", 0)


async def test_a_clone_goes_on_where_its_source_stands(plain: EmbeddedSluice) -> None:
    await fill(plain, 10)
    await plain.admin.commit_offset("TOOLS_CONSUMER", QUEUE, 7)
    (change,) = await plain.admin.clone_offsets("TOOLS_CONSUMER", "copy")
    assert (change.old, change.new) == (None, 7)
    handler = Handler()
    async with plain.consumer("copy", handler).subscribe("T"):
        await until(plain, lambda: len(handler.seen) == 3)
        await plain.clock.advance(seconds=10)
    assert sorted(handler.seen) == ["7", "8", "9"]


# --- running information, one message


async def test_a_consumer_says_what_it_does(plain: EmbeddedSluice) -> None:
    await fill(plain, 10)
    handler = Handler("5")
    async with plain.consumer("G", handler, concurrency=1).subscribe("T", tags="*"):
        await until(plain, handler.is_holding.is_set)
        await plain.clock.advance(seconds=6)
        (client,) = await plain.admin.consumers("G")
        assert client.client_id == plain.client_id
        info = await plain.admin.running_info("G", client.client_id, stack=True)
        handler.go.set()
    assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
    assert {item.topic for item in info.subscriptions} == {"T", "%RETRY%G"}
    state = info.queues[QUEUE]
    assert (state.commit_offset, state.cached_count, state.cached_min) == (5, 5, 5)
    assert info.rates["T"].done_per_second == pytest.approx(5 / 60)
    assert "of T queue 0 offset 5, for 6." in info.notes["out00"]
    assert info.stack is not None
    assert "Handler.__call__" in info.stack, "where the handler waits"
    assert "sluicemq handler G 0" in info.stack


async def test_who_is_not_online_is_said_with_who_is(plain: EmbeddedSluice) -> None:
    async with plain.subscribe("T", group="G"):
        with pytest.raises(ConfigurationError, match=plain.client_id.replace("#", ".")):
            await plain.admin.running_info("G", "nobody")


@pytest.mark.parametrize(
    ("raised", "result"),
    [
        (None, "CR_SUCCESS"),
        (RetryLaterError("later"), "CR_LATER"),
        (KeyError("x"), "CR_THROW_EXCEPTION"),
    ],
)
async def test_a_message_is_handled_on_request(
    plain: EmbeddedSluice, raised: Exception | None, result: str
) -> None:
    seen: list[bytes] = []
    sent = await plain.send("T", "again")

    async def handler(message: Any) -> None:
        seen.append(message.body)
        if raised is not None and len(seen) > 1:
            raise raised

    async with plain.consumer("G", handler).subscribe("T"):
        await until(plain, lambda: len(seen) == 1)
        await plain.clock.advance(seconds=6)
        message, made = await plain.admin.consume_directly(sent.message_id, "G")
        await plain.clock.advance(seconds=60)
    assert (made.result, message.body, seen) == (result, b"again", [b"again"] * 2)
    assert await plain.admin.committed_offset("G", QUEUE) == 1


async def test_a_stream_cannot_handle_on_request(plain: EmbeddedSluice) -> None:
    sent = await plain.send("T", "again")
    async with plain.subscribe("T", group="G"):
        with pytest.raises(RequestError, match="no handler"):
            await plain.admin.consume_directly(sent.message_id, "G")


# --- request and reply


async def test_a_request_gets_its_reply(plain: EmbeddedSluice) -> None:
    async def handler(message: Any) -> None:
        assert message.wants_reply
        await message.reply(b"pong " + message.body)

    other = plain.servers.client()
    async with other.consumer("G", handler).subscribe("T"):
        replies = await asyncio.gather(
            *(plain.request("T", f"ping {number}") for number in range(20))
        )
    assert [reply.body for reply in replies] == [b"pong ping %d" % n for n in range(20)]
    assert replies[0].properties["MSG_TYPE"] == "reply"


async def test_a_request_without_a_reply_says_that_it_is_stored(plain: EmbeddedSluice) -> None:
    task = asyncio.create_task(plain.request("T", "ping", timeout_s=3))
    await plain.clock.advance(seconds=4)
    with pytest.raises(RequestTimeoutError, match=r"stored in queue 0 of broker-a.*within 3 s"):
        await task


async def test_a_reply_that_comes_too_late_harms_nobody(plain: EmbeddedSluice) -> None:
    late: list[Any] = []
    async with plain.consumer("G", late.append).subscribe("T"):
        task = asyncio.create_task(plain.request("T", "ping", timeout_s=3))
        await plain.clock.advance(seconds=4)
        with pytest.raises(RequestTimeoutError):
            await task
        await late[0].reply(b"too late")
        await plain.send("T", "goes on")
        await until(plain, lambda: len(late) == 2)


async def test_who_has_left_gets_no_reply(plain: EmbeddedSluice) -> None:
    asked: list[Any] = []
    async with plain.consumer("G", asked.append).subscribe("T"):
        other = plain.servers.client()
        task = asyncio.create_task(other.request("T", "ping", timeout_s=30))
        await until(plain, lambda: len(asked) == 1)
        task.cancel()
        await other.close()
        with pytest.raises(RequestError, match=r"not found.* catch this error"):
            await asked[0].reply(b"to nobody")


async def test_an_ordinary_message_cannot_be_answered(plain: EmbeddedSluice) -> None:
    await plain.send("T", "no question")
    async with plain.subscribe("T", group="G") as messages:
        message = await messages.receive()
        assert not message.wants_reply
        with pytest.raises(ConfigurationError, match="does not ask for a reply"):
            await message.reply(b"?")
