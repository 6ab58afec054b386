"""kill -9 of the real process while it is popped from: what was acknowledged with an answer does
not come again, what was not comes again when it was told to, and nothing is lost.

Producers send, consumers pop over remoting: they acknowledge, give back early (nack), ask for more
time, or say nothing. Each kill is followed by a start over the same store. Judged are the answers
that clients have: a request under way at the kill may have happened or not.

SLUICEMQ_SEEDS says how many kills (default 4).
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from simulation.pops import ACK, POP, handles
from simulation.stepped import send_fields
from sluicemq.errors import SluiceError
from sluicemq.model.topic import pop_topic
from sluicemq.net.blocking import BlockingChannel
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import ReceiptHandle
from thorough import seeds
from waiting import limit, slowness

KILLS = seeds(4)
CHANGE = 200053
OK = 0
QUEUES = 4
PRODUCERS, CONSUMERS = 2, 3
SEND_PAUSE_S = 0.004
INVISIBLE_MS = 1_500
LATE_S = 4.0
"""On a machine at rest, and with others that are given at the same time: a thread of this process
has to be there to pop."""
CONFIGURATION = """
brokerName=broker-a
mappedFileSizeCommitLog=1048576
metricsExporterType=DISABLE
"""


def now_s() -> float:
    return time.time()


class Server:
    """`sluice up` as a process of its own."""

    def __init__(self, directory: Path) -> None:
        (directory / "broker.conf").write_text(CONFIGURATION)
        with (directory / "log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0",
                 "--broker-port", "0", "--no-proxy", "--store", str(directory / "store"), "-c",
                 str(directory / "broker.conf")],
                stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line
        self.address = dict(part.split("=", 1) for part in line.split()[1:])["broker"]
        self.ready_s = now_s()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(limit(20))
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Story:
    """What clients know of one message."""

    sent_s: float = 0.0  # its send was answered; 0: that is not known
    acked_s: float = 0.0  # its acknowledgement was answered
    due_s: float = 0.0  # it was told to come again then; 0: not known exactly
    handle: ReceiptHandle | None = None  # by which it was given last
    is_perhaps_done: bool = False  # somebody asked to acknowledge it by that handle
    given: int = 0


@dataclass
class Ledger:
    """All messages by their number, and what broke a promise."""

    stories: defaultdict[int, Story] = field(default_factory=lambda: defaultdict(Story))
    wrong: list[str] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)
    up_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def was_given(self, number: int, handle: ReceiptHandle, asked_s: float) -> None:
        with self.lock:
            story, at_s = self.stories[number], now_s()
            if story.acked_s and asked_s > story.acked_s:
                self.wrong.append(f"{number} was acknowledged, and came again by {handle}")
            if story.due_s:
                self.lateness_s.append(at_s - max(story.due_s, self.up_s))
            story.given += 1
            story.handle, story.is_perhaps_done = handle, False
            story.due_s = handle.deadline_ms / 1000

    @property
    def waiting(self) -> list[int]:
        """Sent, and not done: what was asked at a kill may have happened."""
        return [
            n
            for n, it in list(self.stories.items())
            if it.sent_s and not it.acked_s and not it.is_perhaps_done
        ]


class Client(threading.Thread):
    """Works at an address until the connection breaks, or `over` is set."""

    def __init__(self, address: str, ledger: Ledger, seed: str, over: threading.Event) -> None:
        super().__init__()
        self.address, self.ledger, self.over = address, ledger, over
        self.random = random.Random(seed)
        self.failure = ""

    def run(self) -> None:
        try:
            with closing(BlockingChannel(self.address, 30.0)) as channel:
                while not self.over.is_set():
                    self.work(channel)
        except (SluiceError, OSError):
            pass
        except Exception as error:
            self.failure = repr(error)

    def work(self, channel: BlockingChannel) -> None:
        raise NotImplementedError


def call(
    channel: BlockingChannel, code: int, fields: dict[str, object], body: bytes = b""
) -> Command:
    return channel.call(Command(code, {name: str(it) for name, it in fields.items()}, body))


class Sender(Client):
    """Messages with numbers of their own, one after the other."""

    numbers: Iterator[int]

    def work(self, channel: BlockingChannel) -> None:
        number = next(self.numbers)
        text = f"UNIQ_KEY\x01AB{number}\x02n\x01{number}\x02"
        queue = self.random.randrange(QUEUES)
        answer = call(channel, 310, send_fields(properties=text, e=queue), b"%d" % number)
        assert answer.code == OK, answer.remark
        with self.ledger.lock:
            self.ledger.stories[number].sent_s = now_s()
        self.over.wait(SEND_PAUSE_S)


class Popper(Client):
    """Pops, and does one of four things with each message. `share`: how often it acknowledges."""

    share = 0.7

    def work(self, channel: BlockingChannel) -> None:
        asked_s = now_s()
        fields = {
            "consumerGroup": "G", "topic": "T", "queueId": -1, "maxMsgNums": 8,
            "invisibleTime": INVISIBLE_MS, "pollTime": 1000, "bornTime": int(asked_s * 1000),
            "initMode": 0, "order": "false",
        }  # fmt: skip
        answer = call(channel, POP, fields)
        if answer.code != OK:
            return
        found = handles(answer)
        for number, handle in found.items():
            self.ledger.was_given(number, handle, asked_s)
        for number, handle in found.items():
            self.see_to(channel, number, handle)

    def see_to(self, channel: BlockingChannel, number: int, handle: ReceiptHandle) -> None:
        kind = self.random.random()
        if kind < self.share:
            self.acknowledge(channel, number, handle)
        elif kind < self.share + 0.1:
            self.change(channel, number, handle, self.random.choice((1, 50, 300)))
        elif kind < self.share + 0.2:
            self.change(channel, number, handle, self.random.choice((2000, 3000)))

    def fields(self, handle: ReceiptHandle) -> dict[str, object]:
        return {
            "consumerGroup": "G", "topic": pop_topic("T", "G", handle.kind),
            "queueId": handle.queue_id, "offset": handle.offset, "extraInfo": handle.encode(),
        }  # fmt: skip

    def acknowledge(self, channel: BlockingChannel, number: int, handle: ReceiptHandle) -> None:
        story = self.ledger.stories[number]
        self.unsure(story)
        with self.ledger.lock:
            story.is_perhaps_done = story.handle == handle
        answer = call(channel, ACK, self.fields(handle))
        with self.ledger.lock:
            # One that is late changes nothing: the message is on its way to somebody else.
            if answer.code == OK and now_s() < handle.deadline_ms / 1000:
                story.acked_s = now_s()

    def change(
        self, channel: BlockingChannel, number: int, handle: ReceiptHandle, hidden_ms: int
    ) -> None:
        story = self.ledger.stories[number]
        self.unsure(story)
        answer = call(channel, CHANGE, self.fields(handle) | {"invisibleTime": hidden_ms})
        with self.ledger.lock:
            if answer.code == OK and now_s() < handle.deadline_ms / 1000 and story.due_s == 0.0:
                given = answer.fields or {}
                story.due_s = (int(given["popTime"]) + int(given["invisibleTime"])) / 1000

    def unsure(self, story: Story) -> None:
        """Until the answer is here nobody knows when the message comes again, if ever."""
        with self.ledger.lock:
            story.due_s = 0.0


class Finisher(Popper):
    """Acknowledges all."""

    share = 1.0


@dataclass
class World:
    """The store, the ledger, and the clients of the server that runs."""

    directory: Path
    ledger: Ledger = field(default_factory=Ledger)
    servers: list[Server] = field(default_factory=list)

    def start(self) -> Server:
        server = Server(self.directory)
        self.servers.append(server)
        self.ledger.up_s = server.ready_s
        return server

    def blow(self, number: int, numbers: Iterator[int]) -> None:
        """Clients at work, and a kill amid it."""
        rng = random.Random(f"kill {number}")
        server, over = self.start(), threading.Event()
        kinds: list[type[Client]] = [Sender] * PRODUCERS + [Popper] * CONSUMERS
        clients = [
            kind(server.address, self.ledger, f"{number} {at}", over)
            for at, kind in enumerate(kinds)
        ]
        for client in clients:
            client.start()
        over.wait(rng.uniform(0.1, 4.0))
        server.kill()
        over.set()
        for client in clients:
            client.join(limit(60))
            assert not client.failure, client.failure

    def finish(self) -> None:
        """All that was sent is popped and acknowledged, and what was is not there any more."""
        server, over = self.start(), threading.Event()
        clients = [Finisher(server.address, self.ledger, f"end {at}", over) for at in range(3)]
        for client in clients:
            client.start()
        end_s = now_s() + 60 * slowness()
        while self.ledger.waiting and now_s() < end_s:
            time.sleep(0.1)
        time.sleep(2 * INVISIBLE_MS / 1000)  # what should not come has time to
        over.set()
        for client in clients:
            client.join(limit(60))
            assert not client.failure, client.failure
        server.kill()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for server in made.servers:
        if server.process.poll() is None:
            server.kill()


@pytest.mark.timeout(240 + 30 * KILLS)
def test_what_pops_promise_holds_over_kills(world: World) -> None:
    server = world.start()
    with closing(BlockingChannel(server.address, 20.0)) as channel:
        topic = {"topic": "T", "defaultTopic": "TBW102", "readQueueNums": QUEUES,
                 "writeQueueNums": QUEUES, "perm": 6, "order": "false"}  # fmt: skip
        assert call(channel, 17, topic).code == OK
        group = b'{"groupName":"G","consumeEnable":true}'
        assert call(channel, 200, {}, group).code == OK
    server.kill()
    Sender.numbers = iter(range(10**9))
    for number in range(KILLS):
        world.blow(number, Sender.numbers)
        assert not world.ledger.wrong, (number, world.ledger.wrong[:5])
    world.finish()
    ledger = world.ledger
    assert not ledger.wrong, ledger.wrong[:5]
    assert not ledger.waiting, (len(ledger.waiting), ledger.waiting[:5])
    stories = ledger.stories.values()
    late_s = sorted(ledger.lateness_s)
    unsure = sum(it.is_perhaps_done and not it.acked_s for it in stories)
    print(
        f"{KILLS} kills: {len(ledger.stories)} messages ({unsure} perhaps acknowledged),"
        f" {sum(it.given for it in stories)} times"
        f" given, {len(late_s)} again; later than told: median {late_s[len(late_s) // 2]:.3f} s,"
        f" longest {late_s[-1]:.3f} s; earliest {late_s[0]:.3f} s"
    )
    assert all(it.given for it in stories if it.sent_s)
    assert unsure <= 10 * (KILLS + 1) * CONSUMERS
    assert late_s[-1] < LATE_S * slowness()
    assert late_s[0] > -0.002, "it came before its time"
