"""The key index of the stores that the real broker wrote: ours finds what is in it, goes on with
it, and makes the same bytes from the same log."""

import shutil
import struct
import tarfile
from datetime import datetime
from pathlib import Path

import pytest

from sluicemq.config import StoreConfig
from sluicemq.record.codec import decode_record
from sluicemq.store.store import Store

STORES = Path(__file__).parent / "store"
GOLDEN = {
    "golden1": ("golden1.tar.gz", "golden1/store"),
    "golden2": ("golden2.tar.gz", "golden2/store"),
    "golden3": ("golden3_trans.tar.gz", "golden3/store"),
}
FOREVER = (1 << 63) - 1
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)


class FixedClock:
    """The moment at which the real broker made its index file."""

    def __init__(self, name: str) -> None:
        moment = datetime.strptime(name + "000", "%Y%m%d%H%M%S%f").astimezone()
        self.ms = int(moment.timestamp() * 1000)

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return 0.0


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    archive, root = GOLDEN[request.param]
    with tarfile.open(STORES / archive) as tar:
        wanted = [m for m in tar.getmembers() if not m.name.endswith("timerwheel")]
        tar.extractall(tmp_path, wanted, filter="data")
    return tmp_path / root


def only_index_file(root: Path) -> Path:
    (path,) = (root / "index").iterdir()
    return path


def open_store(root: Path, clock: FixedClock) -> Store:
    config = StoreConfig(
        root=str(root), commit_log_file_bytes=16384, consume_queue_file_bytes=2000,
        index_slots=100, index_entries=400,
    )  # fmt: skip
    return Store.open(config, clock=clock)


def test_the_same_log_makes_the_same_bytes(golden: Path) -> None:
    theirs = only_index_file(golden)
    name, expected = theirs.name, theirs.read_bytes()
    shutil.rmtree(golden / "index")
    open_store(golden, FixedClock(name)).close()
    ours = only_index_file(golden)
    assert ours.name == name
    assert ours.read_bytes() == expected


def test_a_store_that_is_only_opened_and_closed_keeps_its_index(golden: Path) -> None:
    (golden / "abort").unlink(missing_ok=True)
    theirs = only_index_file(golden)
    expected = theirs.read_bytes()
    for _ in range(2):
        store = open_store(golden, FixedClock(theirs.name))
        assert store.keys.catch_up(1 << 30)
        store.close()
        assert only_index_file(golden) == theirs
        assert theirs.read_bytes() == expected


def test_every_key_of_the_log_is_found(golden: Path) -> None:
    store = open_store(golden, FixedClock(only_index_file(golden).name))
    try:
        found = 0
        for topic, queue_id in store.queues():
            low, high = store.queue_offsets(topic, queue_id)
            for offset in range(low, high):
                record = bytes(store.reader.read(topic, queue_id, offset, 1).data[0])
                message = decode_record(record)
                if message.topic != topic:
                    continue  # a light queue: the message lies under its own topic
                unique_key = message.properties.get("UNIQ_KEY")
                for key in [
                    *message.properties.get("KEYS", "").split(),
                    *filter(None, [unique_key]),
                ]:
                    answer = store.keys.find(topic, key, 64, 0, FOREVER)
                    assert answer is not None
                    assert record in answer.records
                    found += 1
        assert found >= 5
        answer = store.keys.find("TopicA", "no such key", 64, 0, FOREVER)
        assert answer is not None
        assert (answer.records, answer.last_offset) == ([], 0)
    finally:
        store.close()


def test_ours_goes_on_in_the_file_that_java_began(golden: Path) -> None:
    (golden / "abort").unlink(missing_ok=True)
    theirs = only_index_file(golden)
    before = theirs.read_bytes()
    count = struct.unpack_from(">i", before, 36)[0]
    clock = FixedClock(theirs.name)
    clock.ms += 3_600_000
    store = open_store(golden, clock)
    place, _ = store.writer.append("TopicA", 0, b"new", b"KEYS\x01k1\x02", 0, 0, 0, 1, HOST, HOST)
    store.commit()
    answer = store.keys.find("TopicA", "k1", 64, 0, FOREVER)
    assert answer is not None
    assert decode_record(answer.records[0]).body == b"new"
    store.close()
    assert only_index_file(golden) == theirs
    after = theirs.read_bytes()
    entries_at = 40 + 4 * 100 + 20
    assert (
        after[entries_at : entries_at + 20 * (count - 1)]
        == (before[entries_at : entries_at + 20 * (count - 1)])
    )
    assert struct.unpack_from(">i", after, 36)[0] == count + 1
    assert struct.unpack_from(">q", after, 24)[0] == place
