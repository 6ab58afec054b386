"""The timer files of the real broker open in ours, and ours have the same bytes.

golden1.tar.gz holds one timed message (an hour ahead) and one delayed one (level 3), written by
RocketMQ 5.3.2; see tests/golden/store/README.md.
"""

import struct
import tarfile
from pathlib import Path

import pytest

from simulation.stepped import ManualClock, SteppedBroker
from sluicemq.broker.waiting.timer_metrics import TimerMetrics
from sluicemq.clock import SteadyClock
from sluicemq.config import StoreConfig
from sluicemq.files import SYSTEM_FILES
from sluicemq.record.codec import decode_records
from sluicemq.store.timers.files import read_timer_checkpoint
from sluicemq.testing.files import CrashableFiles

ARCHIVE = Path(__file__).parent / "store" / "golden1.tar.gz"
WRITTEN_MS = 1_795_226_591_000
SLOT_MS = 1_795_230_191_000
STOPPED_MS = 1_795_226_608_271
CONFIG = StoreConfig(
    root="/store", commit_log_file_bytes=16_384, consume_queue_file_bytes=2000,
    timer_log_file_bytes=5200,
)  # fmt: skip


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(target, filter="data")
    return target / "golden1" / "store"


def in_memory(root: Path) -> CrashableFiles:
    """The same store on files in memory; nothing of the original changes."""
    files = CrashableFiles()
    for path in sorted(root.rglob("*")):
        name = f"/store/{path.relative_to(root)}"
        if path.is_dir():
            files.make_directory(name)
        elif not name.startswith("/store/index/"):
            files.make_directory(name.rpartition("/")[0])
            file = files.open(name, create=True)
            file.pwrite(path.read_bytes(), 0)
            file.sync()
    return files


def opened(golden: Path) -> SteppedBroker:
    return SteppedBroker(
        files=in_memory(golden), clock=ManualClock(STOPPED_MS), store_config=CONFIG
    )


def delivered(broker: SteppedBroker, queue_id: int) -> list[object]:
    result = broker.store.reader.read("TopicA", queue_id, 0, 100, 1 << 20)
    return [message.body for message in decode_records(b"".join(result.data))]


def test_the_real_brokers_pending_messages_are_found(golden: Path) -> None:
    broker = opened(golden)
    broker.run(0.1)
    delayed = broker.core.delayed
    timers = delayed.timers
    (slot_ms,) = timers.files.wheel.iter_occupied_ms(timers.read_ms, timers.read_ms + 86_400_000)
    assert slot_ms == SLOT_MS
    assert timers.unindexed_count == 0, "its files have no identity: the queue is taken in again"
    assert delayed.metrics.counts == {"TopicA": 1}
    unit = timers.files.log.unit_at(0)
    assert unit is not None
    assert (unit.due_ms, unit.topic_hash) == (SLOT_MS, -1_784_167_150)


def test_they_are_delivered_when_they_are_due(golden: Path) -> None:
    broker = opened(golden)
    before = delivered(broker, 3)
    broker.advance((SLOT_MS - STOPPED_MS) / 1000)
    broker.settle()
    assert delivered(broker, 3) == before
    broker.run(1.2)
    assert delivered(broker, 3) == [*before, b"timer"]


def test_what_the_real_broker_delivered_is_not_delivered_again(golden: Path) -> None:
    broker = opened(golden)
    before = delivered(broker, 2)
    broker.run(15.0, step_s=0.5)
    assert delivered(broker, 2) == before
    assert before.count(b"delay") == 1


def test_the_same_message_gives_the_same_bytes_in_ours(golden: Path) -> None:
    files = in_memory(golden)
    for name in ("timerwheel", "timerlog/00000000000000000000", "config/timercheck"):
        files.remove(f"/store/{name}")
    broker = SteppedBroker(files=files, clock=ManualClock(WRITTEN_MS + 300), store_config=CONFIG)
    broker.advance(0)
    broker.settle()
    broker.core.delayed.save()
    ours = files.open("/store/timerlog/00000000000000000000").pread(5200, 0)
    assert ours == (golden / "timerlog" / "00000000000000000000").read_bytes()
    assert files.open("/store/timerwheel").pread(1 << 26, 0) == (golden / "timerwheel").read_bytes()


def test_the_checkpoint_has_the_real_brokers_fields(golden: Path) -> None:
    theirs = read_timer_checkpoint(SYSTEM_FILES, str(golden / "config" / "timercheck"))
    assert theirs is not None
    assert theirs[:7] == (1_795_226_608_000, 52, 1, 1, 0, STOPPED_MS, 17)
    broker = opened(golden)
    broker.run(2.0)
    broker.close()
    data = broker.files.open("/store/config/timercheck").pread(56, 0)
    read_ms, log_end, offset, master_offset, *_ = struct.unpack(">7q", data)
    assert (log_end, offset, master_offset) == (52, 1, 1)
    assert read_ms == (STOPPED_MS + 2000) // 1000 * 1000


def test_the_tables_are_written_as_the_real_broker_writes_them(golden: Path) -> None:
    broker = opened(golden)
    offsets, *_ = broker.core.delayed.documents
    offsets.changed = True
    written = golden / "config" / "delayOffset.json"
    theirs = written.read_text()
    offsets.save()
    assert written.read_text() == theirs
    metrics = TimerMetrics(in_memory(golden), "/store", SteadyClock(ManualClock(STOPPED_MS)))
    metrics.load()
    assert metrics.encode() == (golden / "config" / "timermetrics").read_text()
