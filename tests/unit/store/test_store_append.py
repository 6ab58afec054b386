"""Appending and committing: bytes, limits, files rolled over, failed turns undone."""

import errno
import struct
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import MessageIllegalError, StoreError, StoreFullError
from sluicemq.model.ids import tag_code
from sluicemq.record.codec import decode_record, encode_record
from sluicemq.store.store import Store

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
IPV6 = bytes(15) + b"\x01" + struct.pack(">i", 9)
LOG = "/store/commitlog/" + "0" * 20


@pytest.mark.parametrize("topic", ["T", "%RETRY%" + "g" * 200])
@pytest.mark.parametrize("hosts", [(HOST, HOST), (HOST, IPV6), (IPV6, HOST), (IPV6, IPV6)])
def test_record_is_byte_for_byte_that_of_the_codec(
    bench: Any, topic: str, hosts: tuple[bytes, bytes]
) -> None:
    store = bench.open()
    store.writer.append(topic, 3, b"first", b"", 0, 0, 0, 1, *hosts)
    place = store.writer.append(topic, 3, b"body", b"a\x01b\x02", 5, -9, 0x100, 12, *hosts, 4, 0)
    store.commit()
    expected = encode_record(
        topic=topic,
        queue_id=3,
        queue_offset=1,
        physical_offset=place[0],
        body=b"body",
        properties=b"a\x01b\x02",
        flag=-9,
        sys_flag=0x100,
        born_time_ms=12,
        born_host=hosts[0],
        store_time_ms=bench.clock.ms,
        store_host=hosts[1],
        reconsume_times=4,
    )
    assert place[1] == 1
    assert bench.files.content(LOG)[place[0] : place[0] + len(expected)] == expected
    assert store.reader.record_at(place[0]) == expected


def test_host_bits_that_lie_are_corrected(bench: Any) -> None:
    store = bench.open()
    place, _ = store.writer.append("T", 0, b"body", b"", 0, 0, 0x30, 1, HOST, HOST)
    store.commit()
    assert decode_record(store.reader.record_at(place)).sys_flag == 0


def test_body_may_be_a_view(bench: Any) -> None:
    bench.open()
    bench.send(memoryview(b"xxbodyxx")[2:6])
    assert bench.bodies() == [b"body"]


def test_offsets_count_for_each_queue_of_its_own(bench: Any) -> None:
    store = bench.open()
    offsets = [bench.append(topic=t, queue_id=q)[1] for t, q in [("A", 0), ("A", 1), ("A", 0)]]
    offsets += [bench.append(topic="B")[1]]
    assert offsets == [0, 0, 1, 0]
    store.commit()
    assert [bench.append(topic="A")[1], bench.append(topic="A", queue_id=1)[1]] == [2, 1]


def test_physical_offsets_follow_each_other(bench: Any) -> None:
    store = bench.open()
    first, _ = bench.append(b"x" * 10)
    second, _ = bench.append(b"x" * 20)
    assert (first, second) == (0, 91 + 1 + 10)
    assert store.commit() == second + 91 + 1 + 20 == store.written_offset


def test_turn_is_one_write(bench: Any) -> None:
    bench.open()
    bench.send(b"first")
    bench.files.operations.clear()
    bench.send(*[b"x"] * 20)
    assert [(op.kind, op.path) for op in bench.files.operations] == [("write", LOG)]


def test_empty_turn_writes_nothing(bench: Any) -> None:
    store = bench.open()
    bench.files.operations.clear()
    assert store.commit() == 0
    assert bench.files.operations == []


def test_full_file_ends_with_a_blank_record_and_the_next_begins(bench: Any) -> None:
    bench.open(commit_log_file_bytes=1000)
    places = [bench.append(b"x" * 200)[0] for _ in range(4)]  # 292 bytes each
    bench.store.commit()
    assert places == [0, 292, 584, 1000]
    assert bench.files.content(LOG)[876:] == struct.pack(">iI", 124, 0xCBD43194) + bytes(116)
    assert bench.bodies() == [b"x" * 200] * 4
    assert bench.files.names("/store/commitlog") == ["0" * 20, f"{1000:020d}"]


@pytest.mark.parametrize(("room", "fits"), [(8, True), (7, False)])
def test_record_needs_eight_bytes_behind_it(bench: Any, room: int, fits: bool) -> None:
    bench.open(commit_log_file_bytes=400)
    place, _ = bench.append(b"x" * (400 - 92 - room - 150))
    rest = 400 - (place + 92 + 400 - 92 - room - 150)
    second, _ = bench.append(b"y" * (rest - 92 - room))
    bench.store.commit()
    assert (second < 400) is fits
    assert bench.reopen().written_offset > 300
    assert len(bench.bodies()) == 2


@pytest.mark.parametrize("room", [8, 9, 64, 65])
def test_a_file_with_little_room_left_ends_with_a_blank_record_too(bench: Any, room: int) -> None:
    """Without it RocketMQ and our own recovery would take that place for the end of the log."""
    bench.open(commit_log_file_bytes=1000)
    place, _ = bench.append(b"x")
    at, _ = bench.append(b"y")
    size = at - place
    bench.append(b"z" * (1000 - room - 3 * size + 1))
    assert bench.append(b"next") == (1000, 3)
    bench.store.commit()
    blank = struct.pack(">iI", room, 0xCBD43194)
    assert bench.files.content(LOG)[-room:] == blank + bytes(room - 8)
    bench.reopen(kill=True)
    assert [body[:4] for body in bench.bodies()] == [b"x", b"y", b"zzzz", b"next"]


def test_turn_over_several_files_is_written_to_each_once(bench: Any) -> None:
    bench.open(commit_log_file_bytes=1000)
    bench.files.operations.clear()
    bench.send(*[b"x" * 200] * 8)
    writes = [op.path[-4:] for op in bench.files.operations if op.kind == "write"]
    assert writes == ["0000", "1000", "2000"]
    assert len(bench.bodies()) == 8


def test_new_log_file_is_durable_before_it_is_written(bench: Any) -> None:
    bench.open()
    bench.files.operations.clear()
    bench.send(b"x")
    kinds = [op.kind for op in bench.files.operations if "commitlog" in op.path]
    assert kinds[-5:] == ["create", "truncate", "sync", "sync_directory", "write"]


def test_next_file_is_made_ahead_of_need(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1000)
    bench.send(*[b"x" * 200] * 2)
    bench.clock.ms += 1000
    store.tick()
    assert len(bench.files.names("/store/commitlog")) == 1
    bench.send(b"x" * 200)
    bench.clock.ms += 1000
    store.tick()
    assert len(bench.files.names("/store/commitlog")) == 2
    bench.clock.ms += 1000
    store.tick()
    assert len(bench.files.names("/store/commitlog")) == 2
    bench.files.operations.clear()
    bench.send(b"x" * 200)
    assert "create" not in [op.kind for op in bench.files.operations]
    assert len(bench.bodies()) == 4
    assert len(bench.reopen().recovered) > 0
    assert len(bench.bodies()) == 4


# --- batches


def batch(bench: Any, *bodies: bytes, host: bytes = HOST) -> tuple[list[int], int]:
    parts = [(7, body, b"TAGS\x01b\x02", tag_code("b")) for body in bodies]
    result: tuple[list[int], int] = bench.store.writer.append_batch("T", 0, parts, 0, 1, host, host)
    return result


def test_batch_becomes_ordinary_messages_in_a_row(bench: Any) -> None:
    bench.open()
    bench.append(b"before")
    places, first = batch(bench, b"a", b"b", b"c")
    bench.store.commit()
    assert first == 1
    assert len(places) == 3
    assert bench.bodies() == [b"before", b"a", b"b", b"c"]
    assert [m.physical_offset for m in bench.messages()][1:] == places
    assert {(m.flag, m.tag, m.prepared_offset) for m in bench.messages()[1:]} == {(7, "b", 0)}


@pytest.mark.parametrize("host", [HOST, IPV6])
def test_batch_that_does_not_fit_moves_to_the_next_file_as_a_whole(bench: Any, host: bytes) -> None:
    bench.open(commit_log_file_bytes=1000)
    bench.append(b"x" * 500)
    places, _ = batch(bench, b"a" * 100, b"b" * 100, b"c" * 100, host=host)
    bench.store.commit()
    assert places[0] == 1000
    assert bench.bodies() == [b"x" * 500, b"a" * 100, b"b" * 100, b"c" * 100]


def test_batch_larger_than_a_file_is_refused_and_changes_nothing(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1000)
    bench.append(b"before")
    with pytest.raises(MessageIllegalError, match="mappedFileSizeCommitLog"):
        batch(bench, *[b"x" * 100] * 10)
    store.commit()
    assert bench.bodies() == [b"before"]


def test_batch_with_a_bad_message_is_refused_as_a_whole(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 17)
    bench.append(b"before")
    parts = [(0, b"good", b"", 0), (1 << 40, b"bad", b"", 0)]
    with pytest.raises(MessageIllegalError, match="does not fit"):
        store.writer.append_batch("T", 0, parts, 0, 1, HOST, HOST)
    with pytest.raises(MessageIllegalError, match="32767"):
        store.writer.append_batch(
            "T", 0, [(0, b"good", b"", 0), (0, b"", bytes(32768), 0)], 0, 1, HOST, HOST
        )
    bench.append(b"after")
    store.commit()
    assert bench.bodies() == [b"before", b"after"]


def test_batch_over_the_message_limit_is_refused(bench: Any) -> None:
    bench.open(message_bytes_max=100)
    with pytest.raises(MessageIllegalError, match="101 bytes, the limit is 100"):
        batch(bench, b"x" * 50, b"x" * 51)


# --- limits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": b"x" * 1001}, "1001 bytes, the limit is 1000.*maxMessageSize"),
        ({"topic": ""}, "0 bytes, the limit is 127"),
        ({"topic": "t" * 128}, "128 bytes, the limit is 127"),
        ({"topic": "%RETRY%" + "g" * 249}, "256 bytes, the limit is 255"),
        ({"topic": "a/b"}, "is not a valid directory name"),
        ({"topic": ".."}, "is not a valid directory name"),
        ({"topic": "a\0"}, "is not a valid directory name"),
        ({"queue_id": -1}, "-1 is negative"),
        ({"queue_id": 1 << 31}, "does not fit"),
        ({"properties": {"a": "x" * 32766}}, "the limit is 32767"),
        ({"properties": {"a": "x" + "\0" * 16}}, "zero byte"),
        ({"properties": {"a": "x" + "\0" * 16}, "host": IPV6}, "zero byte"),
        ({"sys_flag": 1 << 31}, "does not fit"),
        ({"body": b"x" * 1001, "host": IPV6}, "1001 bytes, the limit is 1000"),
        ({"sys_flag": 1 << 31, "host": IPV6}, "does not fit"),
    ],
)
def test_message_over_a_limit_is_refused_and_changes_nothing(
    bench: Any, change: dict[str, Any], message: str
) -> None:
    store = bench.open(message_bytes_max=1000)
    with pytest.raises(MessageIllegalError, match=message):
        bench.append(**change)
    assert store.commit() == 0
    bench.send(b"x" * 1000)
    assert bench.bodies() == [b"x" * 1000]


def test_zeros_inside_properties_are_stored_and_survive_a_crash(bench: Any) -> None:
    bench.open()
    bench.send(b"x", properties={"a": "x" + "\0" * 15 + "y", "b": "\0"})
    bench.reopen(kill=True)
    assert bench.messages()[0].properties == {"a": "x" + "\0" * 15 + "y", "b": "\0"}
    with pytest.raises(MessageIllegalError, match="end with a zero byte"):
        bench.store.writer.append("T", 0, b"", b"a\x01b\0", 0, 0, 0, 1, HOST, HOST)


def test_record_larger_than_a_log_file_is_refused(bench: Any) -> None:
    bench.open(commit_log_file_bytes=1000)
    for host in (HOST, IPV6):
        with pytest.raises(MessageIllegalError, match="the limit is 992"):
            bench.append(b"x" * 950, host=host)
    bench.send(b"x" * 900)
    assert bench.bodies() == [b"x" * 900]


def test_long_topics_can_be_switched_off(bench: Any) -> None:
    bench.open(version_by_topic_length=False)
    with pytest.raises(MessageIllegalError, match="limit is 127"):
        bench.append(topic="%RETRY%" + "g" * 150)


@pytest.mark.parametrize("sys_flag", [0x4, 0xC])
def test_prepared_and_rolled_back_messages_stand_in_no_queue(bench: Any, sys_flag: int) -> None:
    store = bench.open()
    bench.append(b"before")
    place, offset = bench.append(b"half", sys_flag=sys_flag)
    bench.append(b"after")
    store.commit()
    assert offset == 0
    assert decode_record(store.reader.record_at(place)).queue_offset == 0
    assert bench.bodies() == [b"before", b"after"]
    store = bench.reopen(kill=True)
    assert bench.bodies() == [b"before", b"after"]
    assert store.reader.record_at(place) is not None


# --- failed turns


def full_disk(bench: Any) -> None:
    bench.files.free_bytes = 0


@pytest.mark.parametrize("written", [0, 1, 50, 300, 650])
def test_failed_write_undoes_the_whole_turn(bench: Any, written: int) -> None:
    store = bench.open(commit_log_file_bytes=1000)
    bench.send(b"before" * 20, topic="A")
    end = store.written_offset
    for _ in range(4):
        bench.append(b"lost" * 50, topic="A")
    bench.append(b"lost", topic="B")
    bench.files.fail_next("write", errno.ENOSPC, path_part="commitlog", written=written)
    with pytest.raises(
        StoreFullError, match=r"no room .* bytes are used, .* are free.*Free disk space"
    ):
        store.commit()
    assert store.written_offset == end
    assert not any(bench.files.content(LOG)[end:])
    assert store.queue_offsets("A", 0) == (0, 1)
    assert bench.send(b"later", topic="A") == [(end, 1)]
    assert bench.send(b"later", topic="B")[0][1] == 0
    for kill in (False, True):
        bench.reopen(kill=kill)
        assert bench.bodies("A") == [b"before" * 20, b"later"]
        assert bench.bodies("B") == [b"later"]


def test_failure_at_a_new_file_undoes_the_blank_record_too(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1000)
    bench.send(b"x" * 500)
    end = store.written_offset
    bench.append(b"y" * 800)
    bench.files.fail_next("truncate", errno.ENOSPC, path_part="commitlog")
    with pytest.raises(StoreFullError):
        store.commit()
    assert not any(bench.files.content(LOG)[end:])
    bench.send(b"short")
    bench.send(b"y" * 800)
    bench.reopen(kill=True)
    assert bench.bodies() == [b"x" * 500, b"short", b"y" * 800]


def test_full_disk_refuses_writes_serves_reads_and_recovers_when_there_is_room(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 20)
    bench.send(*[b"x" * 900] * 4)
    full_disk(bench)
    for _ in range(3):
        with pytest.raises(StoreFullError):
            bench.send(b"y" * 5000)
    assert len(bench.bodies()) == 4
    bench.clock.ms += 60_000
    store.tick()  # queue files cannot grow either: no harm
    bench.files.free_bytes = None
    bench.send(b"y" * 5000)
    assert [len(body) for body in bench.bodies()] == [900] * 4 + [5000]
    bench.reopen(kill=True)
    assert [len(body) for body in bench.bodies()] == [900] * 4 + [5000]


def test_other_write_error_is_told_as_such_and_undone(bench: Any) -> None:
    store = bench.open()
    bench.append(b"lost")
    bench.files.fail_next("write", errno.EIO, path_part="commitlog", written=10)
    with pytest.raises(StoreError, match="Input/output error"):
        store.commit()
    bench.send(b"later")
    assert bench.bodies() == [b"later"]


def test_failed_turn_that_cannot_be_wiped_closes_the_store_for_writing(bench: Any) -> None:
    store = bench.open()
    bench.send(b"before")
    bench.append(b"lost")
    bench.files.fail_next("write", errno.EIO, path_part="commitlog", written=60)
    bench.files.fail_next("sync", errno.EIO, path_part="commitlog")
    with pytest.raises(StoreError):
        store.commit()
    with pytest.raises(StoreError, match=r"refuses writes: .*Input/output.*restart the broker"):
        bench.append(b"later")
    assert bench.bodies() == [b"before"]


# --- time


def test_all_messages_of_a_turn_bear_one_time_and_the_next_turn_another(bench: Any) -> None:
    bench.open()
    bench.append()
    bench.clock.ms += 5
    bench.append()
    bench.store.commit()
    bench.send(b"x")
    start = bench.clock.ms - 5
    assert [m.store_time_ms for m in bench.messages()] == [start, start, start + 5]


def test_small_step_back_of_the_clock_is_waited_for(bench: Any, caplog: Any) -> None:
    bench.open()
    bench.send(b"x")
    bench.clock.ms -= 50_000
    bench.send(b"x")
    first, second = (m.store_time_ms for m in bench.messages())
    assert first == second
    assert not caplog.records


def test_large_step_back_of_the_clock_is_followed_and_told(bench: Any, caplog: Any) -> None:
    bench.open()
    bench.send(b"x")
    bench.clock.ms -= 90_000
    bench.send(b"x")
    first, second = (m.store_time_ms for m in bench.messages())
    assert second == first - 90_000
    assert (
        f"went back to {second} ms, but the newest message was stored at {first} ms" in caplog.text
    )


def test_a_turn_ends_where_the_log_does(bench: Any) -> None:
    store = bench.open()
    ends = []
    for bodies in ((b"x",), (b"y", b"z"), ()):
        bench.send(*bodies)
        ends.append((store.commit(), store.written_offset))
    assert ends == [(93, 93), (279, 279), (279, 279)]


def test_default_config_opens_on_the_real_file_system(tmp_path: Any) -> None:
    store = Store.open(StoreConfig(root=str(tmp_path)))
    place = store.writer.append("T", 0, b"body", b"", 0, 0, 0, 1, HOST, HOST)
    store.commit()
    store.sync()
    record = store.reader.record_at(place[0])
    assert record is not None
    assert decode_record(record).body == b"body"
    store.close()
    log = tmp_path / "commitlog" / ("0" * 20)
    assert log.stat().st_size == 1 << 30
    assert log.stat().st_blocks * 512 < 1 << 20, "files are sparse"
