"""Whatever happens to three replicas, each slave ends with the log of its master, byte for byte.

Real stores, files of terms, log senders and log receivers use files that crash. Bytes that are
written to a connection arrive in any pieces or never. Each replica may become master at any moment,
in a new term each time, so that logs diverge as badly as possible. In-sync sets and majorities are
ignored here.
"""

import os
import random
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.broker.replication.log_receiver import LogReceiver
from sluicemq.broker.replication.log_sender import LogSender
from sluicemq.broker.replication.terms import LogTerms
from sluicemq.broker.settings import Settings
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.model.ids import Host
from sluicemq.net.work.background import offload_inline
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles, PowerLost

pytestmark = pytest.mark.slow

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
EXAMPLES = int(os.environ.get("SLUICEMQ_EXAMPLES", "100"))
CONFIG = StoreConfig(root="/store", commit_log_file_bytes=4096, consume_queue_file_bytes=400)


class Clock:
    ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return self.ms / 1000


class Wire:
    """One end of a connection: what is written waits to be delivered to the user at the other."""

    def __init__(self) -> None:
        self.remote = self.local = Host("127.0.0.1", 1)
        self.closed = False
        self.unsent_bytes = 0
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True


class Gate:
    def __init__(self) -> None:
        self.confirmed = 0

    def add_slave(self, link: LogSender) -> None: ...

    def remove_slave(self, link: LogSender) -> None: ...

    def record_ack(self, link: LogSender, position: int) -> None: ...


class Replica:
    """A disk, and what runs on it. `sender` is the master's side of its connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.files = CrashableFiles()
        self.clock = Clock()
        self.sender: LogSender | None = None
        self.open()

    def open(self) -> None:
        self.store = Store.open(CONFIG, files=self.files, clock=self.clock, is_gated=True)
        end = self.store.written_offset
        self.log_terms = LogTerms(self.files, "/store/epochFileCheckpoint", end)
        self.receiver: LogReceiver | None = None
        self.sender = None

    def stop(self, power: int | None) -> None:
        """Orderly, or as kill -9 (0) or a lost power supply leave it (a seed)."""
        if power is None:
            self.store.close()
        else:
            self.files = self.files.kill() if power == 0 else self.files.crash(random.Random(power))
        self.open()

    def log(self) -> bytes:
        store = self.store
        data, at = b"", store.log_start
        while piece := store.view_log(at, 4096):
            data, at = data + bytes(piece), at + len(piece)
        return data


class World:
    def __init__(self) -> None:
        self.settings = Settings(BrokerConfig(), CONFIG)
        self.replicas = [Replica(number) for number in range(3)]
        self.ends: dict[int, tuple[Wire, Wire]] = {}
        self.term = 0
        self.sent = 0
        self.elect(0)

    def elect(self, number: int) -> None:
        for replica in self.replicas:
            if replica.receiver is not None or replica.number == number:
                replica.stop(None)
        self.master, self.gate, self.term = self.replicas[number], Gate(), self.term + 1
        store = self.master.store
        self.master.log_terms.start_term(self.term, store.log_start, store.written_offset)

    def connect(self, number: int) -> None:
        replica, master = self.replicas[number], self.master
        if replica is master:
            return
        if replica.receiver is None:
            replica.receiver = LogReceiver(
                replica.store, replica.store.start_following(), replica.log_terms, self.settings,
                replica.clock,
            )  # fmt: skip
            replica.receiver.is_unclean = True
        else:
            replica.receiver.connection_lost()
        here, there = Wire(), Wire()
        self.ends: dict[int, tuple[Wire, Wire]] = {
            **getattr(self, "ends", {}),
            number: (here, there),
        }
        stream: Any = there
        replica.sender = LogSender(
            stream, master.store, self.gate, master.log_terms, self.settings, master.clock,
            call_soon=lambda run: None, offload=offload_inline,
        )  # fmt: skip
        dialled: Any = here
        replica.receiver.start(dialled)

    def send(self, count: int) -> None:
        store = self.master.store
        for _ in range(count):
            self.sent += 1
            body = b"%d-%d " % (self.term, self.sent) * (self.sent % 60)
            store.writer.append("T", 0, body, b"", 0, 0, 0, 1, HOST, HOST)
        store.commit()

    def confirm(self) -> None:
        self.gate.confirmed = self.master.store.written_offset
        self.master.store.confirm(self.gate.confirmed)

    def deliver(self, number: int, up: int, down: int) -> bool:
        """So many bytes of each direction; whether there were any."""
        replica = self.replicas[number]
        if replica.sender is None or replica.receiver is None:
            return False
        here, there = self.ends[number]
        to_master, to_slave = bytes(here.written[:up]), bytes(there.written[:down])
        del here.written[:up], there.written[:down]
        if to_master:
            replica.sender.data_received(to_master)
        if to_slave:
            replica.receiver.data_received(to_slave)
        assert not here.closed, replica.receiver.last_error
        replica.sender.send_pending()
        return bool(to_master or to_slave)

    def reign(self, number: int, count: int) -> None:
        """Another master, which writes."""
        self.elect(number)
        self.send(count)

    def follow(self, number: int, size: int) -> None:
        """A slave connects anew and gets so many bytes."""
        self.connect(number)
        for _ in range(3):  # greeting, welcome, report
            self.deliver(number, 1 << 30, 1 << 30)
        self.deliver(number, 1 << 30, size)

    def die(self, number: int, after: int, power: int) -> None:
        """A slave ends at some operation on its files, while it takes what its master has."""
        replica = self.replicas[number]
        if replica is self.master:
            return
        replica.files.power_fails_after = after
        with suppress(PowerLost):
            self.connect(number)
            while self.deliver(number, 1 << 30, 3000):
                pass
        replica.files.power_fails_after = None
        replica.stop(power)


def agree(world: World) -> None:
    """Whoever follows the master now has its log."""
    world.send(1)
    world.confirm()
    master = world.master
    for replica in world.replicas:
        if replica is master:
            continue
        world.connect(replica.number)
        while world.deliver(replica.number, 1 << 30, 1 << 30):
            pass
        assert replica.log() == master.log()
        assert replica.store.log_start == master.store.log_start
        assert replica.store.queue_offsets("T", 0) == master.store.queue_offsets("T", 0)
        shared = [term for term in master.log_terms.entries if term in replica.log_terms.entries]
        assert list(replica.log_terms.entries) == shared


NUMBERS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("reign"), NUMBERS, st.integers(0, 9)),
    st.tuples(st.just("follow"), NUMBERS, st.integers(0, 3000)),
    st.tuples(st.just("die"), NUMBERS, st.integers(0, 14), st.sampled_from([0, 0, 1, 2])),
    st.tuples(st.just("send"), st.integers(1, 12)),
    st.tuples(st.just("confirm")),
    st.tuples(st.just("deliver"), NUMBERS, st.integers(0, 40), st.integers(0, 9000)),
    st.tuples(st.just("sync"), NUMBERS),
    st.tuples(st.just("stop"), NUMBERS, st.none() | st.integers(0, 5)),
)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.lists(STEPS, min_size=4, max_size=20))
def test_who_follows_has_its_masters_log(steps: list[Any]) -> None:
    world = World()
    for name, *rest in steps:
        if name == "sync":
            world.replicas[rest[0]].store.sync()
        elif name == "stop":
            world.replicas[rest[0]].stop(rest[1])
            if world.replicas[rest[0]] is world.master:
                world.elect(rest[0])
        else:
            getattr(world, name)(*rest)
    agree(world)


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("dies_behind", [0, 1])
def test_a_slave_that_ends_at_any_step_of_following(power: int, dies_behind: int) -> None:
    """Epoch 2 forks from within epoch 1, which replica 0 has whole, and is master with again; who
    dies has been behind one of them, and has a tail of epoch 2 or gets one."""
    for after in range(45):
        world = World()
        world.send(10)
        for slave in (1, 2):
            world.follow(slave, 300)
            world.replicas[slave].store.sync()
            assert (
                0 < world.replicas[slave].store.written_offset < world.master.store.written_offset
            )
        world.reign(1, 5)
        if dies_behind == 1:
            world.die(2, after, power)
        else:
            world.follow(2, 1 << 30)
        for replica in world.replicas:
            replica.store.sync()
        world.reign(0, 3)
        if dies_behind == 0:
            world.die(2, after, power)
        agree(world)
