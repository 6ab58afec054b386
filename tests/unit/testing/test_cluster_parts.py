"""The parts of the cluster simulation: processes that die at once, and a network that fails."""

import asyncio
import random

import pytest

from simulation.cluster.ledger import Fate, Ledger
from simulation.cluster.network import FaultyNetwork, Link
from simulation.cluster.processes import NodeClock, Process, task_factory
from simulation.crashes.plan import Violation
from sluicemq.errors import ConnectionLostError, RequestTimeoutError
from sluicemq.model.message import StoredMessage
from sluicemq.net.dispatch import Dispatcher
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.frames import Command

ADDRESS = "127.0.0.1:10911"


@pytest.fixture
async def clock():
    clock = VirtualClock()
    clock.drive()
    loop = asyncio.get_running_loop()
    loop.set_task_factory(task_factory)
    yield clock
    loop.set_task_factory(None)
    clock.release()


class Pair:
    """A server that answers after being asked, and a client of it."""

    def __init__(self, clock: VirtualClock) -> None:
        self.network = FaultyNetwork(clock, random.Random(1))
        self.server = Process("server", NodeClock(clock))
        self.client = Process("client", NodeClock(clock))
        self.asked: list[bytes] = []
        self.lost: list[str] = []

    def _answer(self, command: Command, peer: object) -> Command:
        self.asked.append(bytes(command.body))
        return Command(0, body=command.body)

    async def start(self):
        dispatcher = Dispatcher({1: self._answer})
        listener = self.network.of(self.server).listener(
            dispatcher, on_disconnect=lambda peer: self.lost.append("server")
        )
        await self.server.run(listener.start("127.0.0.1", [10911]))
        self.channel = await self.client.run(
            self.network.of(self.client).dial(
                ADDRESS, on_close=lambda channel: self.lost.append("client")
            )
        )
        return self

    @property
    def link(self) -> Link:
        return next(iter(self.network.links))

    async def call(self, body: bytes, timeout_s: float = 5.0) -> bytes:
        answer = await self.client.run(self.channel.call(Command(1, body=body), timeout_s))
        return bytes(answer.body)


@pytest.fixture
async def pair(clock):
    return await Pair(clock).start()


async def test_frames_take_their_time_and_keep_their_order(pair, clock) -> None:
    pair.network.slow(60, 5.0)
    began_s = clock.monotonic_s()
    bodies = [b"%d" % number for number in range(40)]
    calls = []
    for body in bodies:
        calls.append(asyncio.create_task(pair.call(body, 60)))
        await asyncio.sleep(0.001)
    assert await asyncio.gather(*calls) == bodies
    assert pair.asked == bodies
    assert clock.monotonic_s() - began_s > 0.5


async def test_a_cut_in_the_middle_of_a_frame_is_no_frame(pair, clock) -> None:
    for seed in range(20):
        pair = await Pair(clock).start()
        call = asyncio.create_task(pair.call(b"x" * 1000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pair.link.cut(random.Random(seed))
        with pytest.raises(ConnectionLostError):
            await call
        await clock.advance(10)
        assert pair.asked == []
        assert sorted(pair.lost) == ["client", "server"]


async def test_an_answer_may_be_lost_when_its_request_was_not(pair, clock) -> None:
    call = asyncio.create_task(pair.call(b"1"))
    while not pair.asked:
        await asyncio.sleep(0.0001)
    pair.link.cut(random.Random(1))
    with pytest.raises(ConnectionLostError):
        await call
    assert pair.asked == [b"1"]


async def test_silence_is_noticed_late(pair, clock) -> None:
    pair.link.fall_silent(random.Random(1))
    with pytest.raises(RequestTimeoutError):
        await pair.call(b"1", 3.0)
    assert pair.lost == []
    await clock.advance(100)
    assert sorted(pair.lost) == ["client", "server"]
    assert pair.asked == []


async def test_what_is_sent_to_a_paused_process_arrives_when_it_goes_on(pair, clock) -> None:
    pair.network.pause(pair.server, 30)
    began_s = clock.monotonic_s()
    assert await pair.call(b"1", 60) == b"1"
    assert clock.monotonic_s() - began_s == pytest.approx(30, abs=0.1)
    pair.network.part("client", "server", 10)
    with pytest.raises(RequestTimeoutError):
        await pair.client.run(pair.network.of(pair.client).dial(ADDRESS, timeout_s=3))


async def test_a_process_that_is_killed_does_nothing_more(pair, clock) -> None:
    done: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_later(5, done.append, "timer")
        try:
            await asyncio.sleep(5)
            done.append("task")
        finally:
            with pytest.raises(ConnectionLostError):
                await pair.network.of(pair.client).dial(ADDRESS)

    pair.client.spawn(work())
    await clock.advance(1)
    await pair.client.kill()
    pair.network.died(pair.client, random.Random(1), is_silent=False)
    await clock.advance(60)
    assert done == []
    assert pair.lost == ["server"]


async def test_a_jump_of_the_wall_clock_leaves_the_other_one(clock) -> None:
    node = NodeClock(clock)
    before_s, before_ms = node.monotonic_s(), node.now_ms()
    node.wrong_ms = -600_000
    assert (node.monotonic_s(), node.now_ms()) == (before_s, before_ms - 600_000)


def stored(body: bytes, offset: int = 0, topic: str = "t") -> StoredMessage:
    return StoredMessage(
        topic,
        0,
        offset,
        0,
        0,
        body,
        {},
        0,
        0,
        0,
        None,
        0,
        None,
        0,
        0,
        0,
        "b",  # type: ignore[arg-type]
    )


class Story:
    """A ledger with one group."""

    def __init__(self, *, ordered: bool = False) -> None:
        self.ledger = Ledger()
        self.group = self.ledger.group("g", "t", ordered=ordered)
        self.place = ("t", "b", 0)

    def gives(self, number: int, offset: int, client: str = "one") -> StoredMessage:
        message = stored(b"%d" % number, offset)
        self.ledger.note_given(self.group, message, self.place)
        self.ledger.begins(self.group, client, message, 0.0)
        return message

    def says(self, text: str) -> None:
        with pytest.raises(Violation, match=text):
            self.ledger.check()


def test_the_ledger_finds_a_phantom() -> None:
    story = Story()
    story.gives(3, 0)
    story.says("phantom")


def test_the_ledger_finds_a_half_message_that_is_seen() -> None:
    for fate in (Fate.OPEN, Fate.ROLLED_BACK):
        story = Story()
        story.ledger.send("t", "commit", is_transaction=True).fate = fate
        story.gives(0, 0)
        story.says(f"it is {fate.value}")


def test_the_ledger_finds_what_comes_too_soon() -> None:
    story = Story()
    story.ledger.send("t", "delayed").due_s = 10.0
    story.gives(0, 0)
    story.says("is due in 10.0 s")


def test_the_ledger_finds_messages_out_of_order_and_redelivery_is_none() -> None:
    story = Story(ordered=True)
    for _ in range(3):
        story.ledger.send("t", "row")
    story.ledger.ends(story.group, "one", story.gives(0, 0), well=True)
    story.ledger.ends(story.group, "one", story.gives(1, 1), well=False)
    story.ledger.ends(story.group, "one", story.gives(0, 0), well=True)
    story.ledger.check()
    story.gives(2, 2)
    story.says("2 of .* is begun, 1 is not done")


def test_the_ledger_finds_two_clients_with_one_queue() -> None:
    story = Story(ordered=True)
    story.ledger.send("t", "row")
    story.gives(0, 0, "one")
    story.gives(0, 0, "two")
    story.says("together: two and one")


def test_the_ledger_finds_an_offset_that_skips_and_one_that_falls() -> None:
    story = Story()
    story.ledger.send("t", "message")
    story.gives(0, 0)
    story.ledger.commits(story.group, story.place, 1, is_calm=True)
    story.ledger.commits(story.group, story.place, 0, is_calm=False)
    story.ledger.check()
    story.ledger.commits(story.group, story.place, 2, is_calm=True)
    story.says("no handler was given")
    story = Story()
    story.gives(0, 0)
    story.ledger.wrong.clear()
    story.ledger.commits(story.group, story.place, 1, is_calm=True)
    story.ledger.commits(story.group, story.place, 0, is_calm=True)
    story.says("backwards")


def test_the_ledger_misses_only_what_was_acknowledged() -> None:
    story = Story()
    for fate in Fate:
        story.ledger.send("t", "message").fate = fate
    assert [sent.fate for sent in story.ledger.missing(story.group)] == [Fate.STORED]
