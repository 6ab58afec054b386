"""The read-only face: sees what is there, takes no lock, changes not one byte."""

import struct
from typing import Any

import pytest

from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.record.codec import decode_records
from sluicemq.store.readonly import StoreReader


def open_reader(bench: Any) -> StoreReader:
    return StoreReader.open("/store", files=bench.files)


def fill(bench: Any) -> None:
    bench.open(consume_queue_file_bytes=100)
    for number in range(12):
        bench.append(b"%d" % number + b"x" * 700, topic="AB"[number % 2], tag="t")
    bench.store.commit()


def test_reader_finds_sizes_queues_and_messages_by_itself(bench: Any) -> None:
    fill(bench)
    bench.store.close()
    reader = open_reader(bench)
    assert reader.queues() == [("A", 0), ("B", 0)]
    assert reader.queue_offsets("A", 0) == (0, 6)
    assert reader.queue_offsets("X", 0) == (0, 0)
    assert (reader.log_start, reader.log_end) == (0, bench.store.written_offset)
    result = reader.read("B", 0, 1, 100, 1 << 20)
    messages = decode_records(b"".join(result.data))
    assert [m.body[:2].rstrip(b"x") for m in messages] == [b"3", b"5", b"7", b"9", b"11"]
    assert reader.record_at(messages[0].physical_offset) is not None
    reader.close()


def test_units_are_given_as_they_lie(bench: Any) -> None:
    fill(bench)
    bench.store.close()
    reader = open_reader(bench)
    assert struct.unpack(">qiq", reader.units("A", 0, 0, 1)) == (0, 800, 116)
    assert len(reader.units("A", 0, 0, 100)) == 100, "up to the end of a file"
    assert len(reader.units("A", 0, 5, 100)) == 20
    assert reader.units("A", 0, 6, 1) == reader.units("X", 0, 0, 1) == b""


def test_scan_walks_the_log(bench: Any) -> None:
    fill(bench)
    places = [m.physical_offset for m in bench.messages("A") + bench.messages("B")]
    bench.store.close()
    reader = open_reader(bench)
    assert [record.position for record in reader.scan()] == sorted(places)
    assert [record.position for record in reader.scan(sorted(places)[9])] == sorted(places)[9:]


def test_reader_of_a_running_store_changes_nothing(bench: Any) -> None:
    fill(bench)
    bench.clock.ms += 1000
    bench.store.tick()
    bench.files.put("/store/commitlog/" + f"{12288:020d}", b"")  # as if just being made
    bench.files.operations.clear()
    reader = open_reader(bench)
    assert reader.queue_offsets("A", 0) == (0, 6)
    assert len(list(reader.scan())) == 12
    assert bench.files.operations == []


def test_log_behind_the_queues_is_seen_up_to_the_first_bad_record(bench: Any) -> None:
    fill(bench)  # no queue file is written yet
    end = bench.store.written_offset
    segment = end - end % 4096
    bench.files.open(f"/store/commitlog/{segment:020d}").pwrite(b"\xff" * 30, end - segment)
    reader = open_reader(bench)
    assert reader.queues() == []
    assert reader.log_end == end


def test_directory_without_a_log_is_refused(bench: Any) -> None:
    with pytest.raises(StoreError, match=r"/store. does not exist"):
        open_reader(bench)
    bench.files.put("/store/config/topics.json", b"{}")
    with pytest.raises(StoreError, match=r"contains no commit log.*storePathRootDir"):
        open_reader(bench)


def test_file_of_another_size_than_the_first_is_damage(bench: Any) -> None:
    fill(bench)
    bench.files.put(f"/store/commitlog/{4096:020d}", bytes(100))
    with pytest.raises(StoreDamagedError, match="has 100 bytes"):
        open_reader(bench)


def wanted(topic: str, _queue_id: int) -> bool:
    return topic == "A"


def test_only_wanted_queues_are_loaded_and_end_where_the_log_does(bench: Any) -> None:
    fill(bench)  # no queue file is written yet
    reader = StoreReader.open("/store", files=bench.files, is_wanted=wanted)
    assert reader.queues() == [("A", 0)]
    assert reader.queue_offsets("A", 0) == (0, 6)
    assert reader.verified_end("A", 0) == 6
    start, units = reader.unflushed_units("A", 0)
    other = StoreReader.open("/store", files=bench.files, is_wanted=lambda *_: False)
    other.add_units("A", 0, start, units)
    assert other.queue_offsets("A", 0) == (0, 6)
    assert other.units("A", 0, 5, 9) == reader.units("A", 0, 5, 9) != b""


def test_topic_that_was_deleted_does_not_come_back_from_the_log(bench: Any) -> None:
    fill(bench)
    bench.store.sync()
    bench.store.delete_topic("A")
    assert StoreReader.open("/store", files=bench.files, is_wanted=wanted).queues() == []


def test_queue_ends_behind_its_last_whole_message(bench: Any) -> None:
    fill(bench)
    places = [message.physical_offset for message in bench.messages("A")]
    bench.store.close()
    for lost in (5, 4, 2):
        name = f"/store/commitlog/{places[lost] - places[lost] % 4096:020d}"
        bench.files.open(name).pwrite(bytes(60), places[lost] % 4096)
        later = [place for place in places[lost + 1 :] if place // 4096 != places[lost] // 4096]
        for place in later:
            bench.files.open(f"/store/commitlog/{place - place % 4096:020d}").pwrite(
                bytes(60), place % 4096
            )
        reader = StoreReader.open("/store", files=bench.files, is_wanted=wanted)
        assert reader.queue_offsets("A", 0) == (0, 6)
        assert reader.verified_end("A", 0) == lost
