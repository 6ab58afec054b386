"""The sender and the receiver of the log, joined in memory: what a slave receives and reports.

In both protocols, plain and failover.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sluicemq.broker.replication.admission import AddressCheck
from sluicemq.broker.replication.log_receiver import (
    BEHIND_BYTES,
    COMPARED_BYTES,
    LONG_BYTES,
    READS,
    LogReceiver,
    keep_connected,
)
from sluicemq.broker.replication.log_sender import LogSender, LogSenders
from sluicemq.broker.replication.terms import LogTerms
from sluicemq.broker.settings import Settings
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import ConfigurationError, StoreError
from sluicemq.model.ids import Host
from sluicemq.net.network import MemoryNetwork
from sluicemq.net.work.background import Offload, offload_inline
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.ha import LogTerm
from waiting import limit

pytestmark = pytest.mark.slow

FILE_BYTES = 64 * 1024


class Log:
    """A log in memory. It is the store of a master, or the store and received log of a slave."""

    def __init__(self, start: int = 0, data: bytes = b"") -> None:
        self.log_start = start
        self.data = bytearray(data)
        self.shown: int | None = 0
        self.synced_offset = start + len(data)

    @property
    def end(self) -> int:
        return self.log_start + len(self.data)

    written_offset = end

    def sync(self) -> int:
        self.synced_offset = self.end
        return self.end

    def view_log(self, position: int, size_max: int) -> memoryview:
        file_end = position - position % FILE_BYTES + FILE_BYTES
        at = position - self.log_start
        return memoryview(bytes(self.data[at : at + min(size_max, file_end - position)]))

    def read_log(self, position: int, size_max: int) -> bytes:
        return bytes(self.view_log(position, size_max))

    def append(self, position: int, data: bytes | memoryview) -> None:
        if position != self.end:
            assert not self.data, "a gap"
            if position % FILE_BYTES:
                raise StoreError(f"{position} is no begin of a file.")
            self.log_start = position
        self.data += data

    def dispatch(self, confirmed: int | None) -> None:
        self.shown = self.end if confirmed is None else confirmed

    def truncate(self, end: int) -> None:
        del self.data[end - self.log_start :]


class Gate:
    """What a master knows about its slaves."""

    def __init__(self) -> None:
        self.confirmed = 0
        self.ends: dict[LogSender, int] = {}

    def add_slave(self, link: LogSender) -> None:
        self.ends[link] = -1

    def remove_slave(self, link: LogSender) -> None:
        self.ends.pop(link, None)

    def record_ack(self, link: LogSender, position: int) -> None:
        self.ends[link] = position


class Pair:
    """A master and a slave, on one event loop and with a clock that the test advances."""

    def __init__(
        self,
        master: Log,
        slave: Log,
        *,
        terms: Any = None,
        offload: Offload = offload_inline,
        **keys: Any,
    ) -> None:
        """`terms`: the log_terms of both, in failover."""
        self.now_s = 100.0
        clock: Any = SimpleNamespace(monotonic_s=lambda: self.now_s, now_ms=lambda: 1)
        sync = keys.pop("flush_sync", False)
        settings = Settings(
            BrokerConfig(**keys),
            StoreConfig(commit_log_file_bytes=FILE_BYTES, flush_sync=sync),
        )
        self.master, self.slave, self.gate = master, slave, Gate()
        files = CrashableFiles()
        log_terms = [None, None] if terms is None else [
            LogTerms(files, f"/{at}/epochFileCheckpoint", log.end)
            for at, log in enumerate((master, slave))
        ]  # fmt: skip
        for place, entries in zip(log_terms, terms or [(), ()], strict=True):
            for entry in entries:
                assert place is not None
                place.append(LogTerm(*entry))
        self.log_terms = log_terms
        self.address_check = AddressCheck(settings)
        self.log_senders = LogSenders(
            master, self.gate, log_terms[0], settings, clock,
            call_soon=lambda run: asyncio.get_running_loop().call_soon(run),
            offload=offload, address_check=self.address_check,
        )  # fmt: skip
        self.receiver = LogReceiver(slave, slave, log_terms[1], settings, clock)
        self.receiver.replica_id = 7
        self.network = MemoryNetwork()

    async def start(self) -> None:
        self.listener = self.network.stream_listener(self.log_senders.accept)
        await self.listener.start("h", [1])
        await self.connect()

    async def connect(self) -> None:
        self.receiver.start(await self.network.dial_stream("h:1", self.receiver))
        await settle()

    async def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.log_senders.tick()
        self.receiver.tick()
        await settle()


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def filled(size: int, start: int = 0) -> Log:
    return Log(start, bytes((start + at) * 2654435761 >> 8 & 255 for at in range(size)))


async def test_a_sluicemq_slave_gets_the_whole_log_and_later_bytes() -> None:
    pair = Pair(filled(150_000, FILE_BYTES), Log())
    pair.receiver.is_sluicemq_master = True
    await pair.start()
    assert (pair.slave.log_start, pair.slave.data) == (FILE_BYTES, pair.master.data)
    pair.master.data += b"more"
    pair.log_senders.send_pending()
    await settle()
    assert pair.slave.data.endswith(b"more")
    assert list(pair.gate.ends.values()) == [pair.master.end]
    assert pair.slave.shown == pair.master.end
    assert pair.receiver.status().end == pair.master.end


async def test_old_bytes_are_read_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluicemq.broker.replication.log_sender.NEAR_BYTES", 10_000)
    monkeypatch.setattr("sluicemq.broker.replication.log_sender.READ_BYTES", 20_000)
    master, slave = filled(FILE_BYTES + 5_000), Log()
    jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
    pair = Pair(master, slave, offload=lambda *job: jobs.append(job))
    pair.receiver.is_sluicemq_master = True
    await pair.start()
    for rounds in range(1, 5):
        assert slave.end == (rounds - 1) * 20_000
        ((work, done),) = jobs
        jobs.clear()
        done(work())
        await settle()
    assert not jobs
    assert slave.data == master.data


async def test_bytes_that_were_read_too_late_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluicemq.broker.replication.log_sender.NEAR_BYTES", 10_000)
    master, slave = filled(FILE_BYTES), Log()
    jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
    pair = Pair(master, slave, offload=lambda *job: jobs.append(job))
    pair.receiver.is_sluicemq_master = True
    await pair.start()
    ((work, done),) = jobs
    monkeypatch.setattr("sluicemq.broker.replication.log_sender.NEAR_BYTES", 2 * FILE_BYTES)
    pair.log_senders.send_pending()
    await settle()
    assert slave.data == master.data
    done(work())
    await settle()
    assert slave.data == master.data


async def test_a_log_that_cannot_be_read_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluicemq.broker.replication.log_sender.NEAR_BYTES", 10_000)
    master = filled(FILE_BYTES)

    def read_log(position: int, size_max: int) -> bytes:
        raise OSError("input/output error")

    master.read_log = read_log  # type: ignore[method-assign]
    pair = Pair(master, Log())
    pair.receiver.is_sluicemq_master = True
    await pair.start()
    assert not pair.gate.ends


async def test_a_slave_reports_when_it_starts_and_ends_catching_up() -> None:
    pair = Pair(filled(50_000), Log())
    told: list[bool] = []
    pair.receiver.on_catch_up = told.append
    pair.receiver.is_sluicemq_master = True
    await pair.start()
    assert told == []
    pace = pair.receiver._catch_up
    pace.add_read(4 * BEHIND_BYTES)
    assert not pace.is_behind, "one says nothing"
    for size in (4 * BEHIND_BYTES, 4 * BEHIND_BYTES, 1000, 4 * BEHIND_BYTES):
        pace.add_read(size)
    assert (pace.is_behind, pace.is_far_behind) == (True, False)
    for _ in range(LONG_BYTES // BEHIND_BYTES):
        pair.receiver._count_read(BEHIND_BYTES)
    assert told == [True]
    for _ in range(4 * READS):
        pair.receiver._count_read(1000)
    assert (told, pace.is_behind) == ([True, False], False)
    for _ in range(LONG_BYTES // BEHIND_BYTES):
        pair.receiver._count_read(2 * BEHIND_BYTES)
    await pair.pass_time(1.0)
    assert told == [True, False, True, False], "nothing more came"


async def test_an_empty_slave_gets_only_the_last_file_as_in_rocketmq() -> None:
    pair = Pair(filled(150_000), Log())
    await pair.start()
    assert pair.slave.log_start == 2 * FILE_BYTES
    assert pair.slave.data == pair.master.data[2 * FILE_BYTES :]


async def test_a_slave_continues_where_it_stopped() -> None:
    master = filled(150_000)
    pair = Pair(master, Log(0, bytes(master.data[:777])))
    await pair.start()
    assert pair.slave.data == master.data
    (sender,) = pair.log_senders.senders
    sender.close()
    await settle()
    assert not pair.gate.ends
    assert not pair.log_senders.senders
    master.data += b"later"
    await pair.connect()
    assert pair.slave.data == master.data


async def test_heartbeats_keep_a_quiet_connection_and_silence_ends_it() -> None:
    pair = Pair(filled(10), filled(10))
    await pair.start()
    for _ in range(10):
        await pair.pass_time(4.9)
        await pair.pass_time(0.2)
    assert pair.log_senders.senders
    assert pair.receiver.is_caught_up
    pair.now_s += 20.1
    pair.log_senders.tick()
    await settle()
    assert not pair.log_senders.senders
    assert pair.receiver.state == 0


async def test_a_slave_that_has_more_than_its_master_is_closed_and_never_counted() -> None:
    pair = Pair(filled(10), filled(11))
    await pair.start()
    assert not pair.gate.ends
    assert pair.receiver.state == 0


async def test_a_slave_whose_log_ends_before_the_masters_begins_is_emptied() -> None:
    cut: list[int] = []
    pair = Pair(filled(1000, FILE_BYTES), filled(10))
    pair.receiver.is_sluicemq_master = True
    pair.receiver.on_truncation = lambda: cut.append(1)
    await pair.start()
    assert (pair.slave.log_start, pair.slave.data) == (FILE_BYTES, pair.master.data)
    assert cut == [1]


async def test_a_gap_in_the_log_of_a_java_master_is_an_error() -> None:
    pair = Pair(filled(1000, FILE_BYTES), filled(10))
    await pair.start()
    assert len(pair.slave.data) == 10
    assert "ends at 10" in pair.receiver.status().last_error


async def test_only_synced_bytes_are_sent_in_the_plain_protocol_under_sync_flush() -> None:
    pair = Pair(filled(1000), Log(), flush_sync=True)
    await pair.start()
    pair.master.data += bytes(10)
    pair.log_senders.send_pending()
    await settle()
    assert pair.slave.end == 1000
    assert list(pair.gate.ends.values()) == [0], "it is not on the slave's disk"
    pair.slave.sync()
    pair.receiver.report_synced()
    pair.master.sync()
    pair.log_senders.send_pending()
    await settle()
    assert pair.slave.end == 1010
    assert list(pair.gate.ends.values()) == [1000]


async def test_flow_control_limits_the_bytes_of_a_second() -> None:
    pair = Pair(filled(10_000), Log(), ha_flow_control=True, ha_bytes_per_s=1024)
    pair.receiver.is_sluicemq_master = True
    await pair.start()
    for seconds in range(1, 4):
        assert pair.slave.end == 1024 * seconds
        await pair.pass_time(1)


async def test_failover_truncates_a_diverged_tail_and_dispatches_what_is_confirmed() -> None:
    master = filled(100_000)
    slave = Log(0, bytes(master.data[:70_000]) + b"another's")
    pair = Pair(master, slave, terms=[[(1, 0), (3, 70_000)], [(1, 0), (2, 70_000)]])
    pair.gate.confirmed = 60_000
    await pair.start()
    assert slave.data == master.data
    assert slave.shown == 60_000
    assert pair.log_terms[1].entries == ((1, 0), (3, 70_000))
    (sender,) = pair.log_senders.senders
    assert sender.replica_id == 7
    pair.gate.confirmed = 100_000
    pair.log_senders.send_pending()
    await settle()
    assert slave.shown == 100_000, "told at once, though nothing else was to be said"


async def test_confirmed_bytes_are_truncated_only_after_an_unclean_election() -> None:
    master, slave = filled(1000), filled(1500)
    pair = Pair(master, slave, terms=[[(1, 0), (3, 900)], [(1, 0), (2, 1200)]])
    pair.receiver.confirmed = 901
    await pair.start()
    assert slave.end == 1500
    assert "901 is known to be confirmed" in pair.receiver.last_error
    pair.receiver.is_unclean = True
    await pair.connect()
    assert slave.data == master.data


async def test_a_master_of_an_older_term_is_not_followed() -> None:
    pair = Pair(filled(10), filled(5), terms=[[(1, 0)], [(1, 0), (2, 5)]])
    await pair.start()
    assert pair.slave.end == 5
    assert "is in term 1" in pair.receiver.last_error


@pytest.mark.parametrize("size", [100, 9_000, 20_000, 30_000])
async def test_a_log_that_another_master_wrote_in_the_same_term_is_not_followed(size: int) -> None:
    """The consensus service has lost its data, and two masters had the first term."""
    master = filled(20_000)
    slave = Log(0, bytes(byte ^ 1 for byte in filled(size).data))
    before = bytes(slave.data)
    pair = Pair(master, slave, terms=[[(1, 0)], [(1, 0)]])
    pair.gate.confirmed = 15_000
    await pair.start()
    assert slave.data == before[:20_000]
    assert "both were written in the same term" in pair.receiver.last_error
    assert slave.shown == 0
    assert not pair.gate.ends


@pytest.mark.parametrize("size", [1, 500, 65_536, 66_000, 69_999, 70_000])
async def test_the_end_of_the_log_is_compared_in_all_its_files_and_terms(size: int) -> None:
    master = filled(70_000)
    slave = Log(0, bytes(master.data[:size]))
    terms = [(1, 0), (2, 64_000), (4, 65_000)]
    own_terms = [term for term in terms if term[1] < size]
    pair = Pair(master, slave, terms=[terms, own_terms])
    pair.gate.confirmed = 70_000
    await pair.start()
    assert not pair.receiver.last_error
    assert slave.data == master.data
    assert pair.log_terms[1].entries == tuple(terms)
    assert list(pair.gate.ends.values()) == [70_000]
    assert slave.shown == 70_000


async def test_what_was_not_compared_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(filled(20_000), filled(20_000), terms=[[(1, 0)], [(1, 0)]])
    monkeypatch.setattr(LogSender, "send_pending", lambda self: None)
    await pair.start()
    await pair.pass_time(10)
    assert list(pair.gate.ends.values()) == [20_000 - COMPARED_BYTES]
    assert not pair.receiver.is_caught_up


async def test_a_plain_slave_of_a_failover_master_is_refused() -> None:
    pair = Pair(filled(10), Log(), terms=[[(1, 0)], []])
    pair.receiver._terms = None
    await pair.start()
    assert not pair.slave.data
    assert not pair.log_senders.senders


@pytest.mark.parametrize(
    ("peers", "admits"), [((), True), (("10.0.0.*",), True), (("10.0.1.*",), False)]
)
def test_who_may_connect(peers: Any, admits: bool) -> None:
    address_check = AddressCheck(Settings(BrokerConfig(ha_peers=peers), StoreConfig()))
    check: Callable[[], None] = lambda: address_check.check(Host("10.0.0.7", 1))  # noqa: E731
    if admits:
        check()
    else:
        with pytest.raises(ConfigurationError, match="sluiceReplicaPeers"):
            check()


async def test_a_receiver_reconnects_also_to_another_address() -> None:
    pair = Pair(filled(10), Log())
    target = [""]
    await pair.start()
    pair.receiver.connection_lost()
    following = asyncio.create_task(keep_connected(pair.network, pair.receiver, lambda: target[0]))
    await asyncio.sleep(0)
    target[0] = "h:1"
    async with asyncio.timeout(limit(5)):
        while pair.receiver.state == 0:
            await asyncio.sleep(0.05)
        target[0] = "h:2"
        while "h:2" not in pair.receiver.last_error:
            await asyncio.sleep(0.05)
    following.cancel()
