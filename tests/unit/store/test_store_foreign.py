"""What RocketMQ keeps in a store and we do not write; what it finds out about ours."""

import struct
from typing import Any

import pytest

from sluicemq.errors import MessageIllegalError
from sluicemq.model.message import INNER_BATCH
from sluicemq.record.codec import encode_record

LOG = "/store/commitlog/" + "0" * 20
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
FOREIGN = {
    "compaction/position-checkpoint": b"{}",
    "compaction/compactionLog/T/0/00000000000000000000": b"compacted" * 50,
    "consumequeue_ext/T/0/00000000000000000000": b"ext" * 100,
    "batchconsumequeue/B/0/00000000000000000000": bytes(460),
    "timerlog/00000000000000000000": b"timer",
    "timerwheel": b"wheel",
    "config/timercheck": bytes(56),
    "epochFileCheckpoint": b"1-0",
    "something-new/of-a-later-release": b"?",
}


@pytest.mark.parametrize("kill", [False, True])
def test_every_foreign_file_is_kept_as_found(bench: Any, kill: bool) -> None:
    for name, data in FOREIGN.items():
        path = f"/store/{name}"
        bench.files.make_directory(path.rpartition("/")[0])
        bench.files.open(path, create=True).pwrite(data, 0)
    bench.open()
    bench.send(*[b"x" * 300] * 40)
    bench.store.delete_topic("T")
    bench.reopen(kill=kill)
    bench.send(b"more")
    bench.store.close()
    assert {name: bench.files.content(f"/store/{name}") for name in FOREIGN} == FOREIGN


def test_records_of_several_messages_stand_in_no_queue(bench: Any) -> None:
    """RocketMQ has files of their own for them; a second one's offset is not the next."""
    bench.open()
    bench.send(b"before", topic="B")
    end = bench.store.written_offset
    bench.files = bench.files.kill()
    log = bench.files.open(LOG)
    for offset in (0, 5):
        record = encode_record(
            topic="Batches", queue_id=0, queue_offset=offset, physical_offset=end, body=b"five",
            properties=b"INNER_NUM\x015\x02", flag=0, sys_flag=INNER_BATCH, born_time_ms=1,
            born_host=HOST, store_time_ms=bench.clock.ms, store_host=HOST,
        )  # fmt: skip
        log.pwrite(record, end)
        end += len(record)
    store = bench.open()
    assert (store.written_offset, store.recovered.is_rebuilt) == (end, False)
    assert set(store.queues()) == {("B", 0)}
    bench.send(b"after", topic="B")
    bench.reopen(kill=True)
    assert bench.bodies("B") == [b"before", b"after"]


def test_a_message_that_says_it_is_several_is_refused(bench: Any) -> None:
    store = bench.open()
    with pytest.raises(MessageIllegalError, match="BatchCQ"):
        bench.append(b"body", sys_flag=INNER_BATCH)
    with pytest.raises(MessageIllegalError, match="BatchCQ"):
        store.writer.append_batch("T", 0, [(0, b"body", b"", 0)], INNER_BATCH, 1, HOST, HOST)
    bench.send(b"plain")
    assert bench.bodies() == [b"plain"]


def test_rocketmq_keeps_every_full_index_file_after_a_kill(bench: Any) -> None:
    """It throws away those whose end is later than what the checkpoint says of the index."""
    bench.open(index_slots=10, index_entries=40)
    bench.send(b"first", properties={"UNIQ_KEY": "first"})
    bench.clock.ms += 120_000
    bench.store.tick()
    bench.store.sync()
    for number in range(100):
        bench.clock.ms += 1000
        bench.send(b"x", properties={"UNIQ_KEY": f"U{number}"})
        bench.store.keys.catch_up()
    files = bench.files.kill()
    (vouched,) = struct.unpack_from(">q", files.open("/store/checkpoint").pread(24, 0), 16)
    names = files.names("/store/index")
    ends = [struct.unpack(">q", files.open(f"/store/index/{n}").pread(8, 8))[0] for n in names]
    assert len(names) > 2
    assert 0 < max(ends[:-1]) <= vouched
