"""Reading by offset: statuses, limits, slices, the two filter stages."""

import struct
from collections.abc import Mapping
from typing import Any

import pytest

from sluicemq.model.ids import tag_code
from sluicemq.record.codec import decode_records
from sluicemq.store.gather import SpanLimit
from sluicemq.store.read import ReadResult, ReadStatus


class Filter:
    """Both stages, counting how often each was asked."""

    def __init__(self, *tags: str, origin: str | None = None, as_set: bool = True) -> None:
        self.codes = frozenset(tag_code(tag) for tag in tags)
        self.origin = origin
        self.as_set = as_set
        self.asked: list[str] = []

    @property
    def tag_codes(self) -> frozenset[int] | None:
        return self.codes if self.as_set else None

    @property
    def reads_properties(self) -> bool:
        return self.origin is not None

    def by_consume_queue(self, tag_code: int) -> bool:
        self.asked.append("queue")
        return not self.codes or tag_code in self.codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        self.asked.append("log")
        return properties.get("origin") == self.origin


def found(result: ReadResult) -> list[int]:
    """Queue offsets of what a read gave; the counts are checked."""
    data = b"".join(result.data)
    messages = decode_records(data)
    assert result.count == len(messages)
    assert result.size_bytes == len(data)
    return [message.queue_offset for message in messages]


# --- statuses (spec/store.md §10)


def test_queue_that_does_not_exist(bench: Any) -> None:
    store = bench.open()
    result = store.reader.read("T", 0, 5, 32)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_LOGIC_QUEUE, 0)
    assert store.queue_offsets("T", 0) == (0, 0)
    assert not store.queue_exists("T", 0)


def test_queue_without_messages(bench: Any) -> None:
    store = bench.open(flush_sync=True)
    bench.send(b"not yet visible")
    result = store.reader.read("T", 0, 5, 32)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MESSAGE_IN_QUEUE, 0)


@pytest.mark.parametrize(
    ("offset", "status", "next_offset"),
    [
        (-1, ReadStatus.OFFSET_TOO_SMALL, 0),
        (3, ReadStatus.OFFSET_OVERFLOW_ONE, 3),
        (4, ReadStatus.OFFSET_OVERFLOW_BADLY, 3),
        (1 << 40, ReadStatus.OFFSET_OVERFLOW_BADLY, 3),
        (2, ReadStatus.FOUND, 3),
        (0, ReadStatus.FOUND, 3),
    ],
)
def test_offset_inside_and_outside_the_queue(
    bench: Any, offset: int, status: ReadStatus, next_offset: int
) -> None:
    store = bench.open()
    bench.send(b"0", b"1", b"2")
    result = store.reader.read("T", 0, offset, 32)
    assert (result.status, result.next_offset) == (status, next_offset)
    assert (result.offset_min, result.offset_max) == (0, 3)


# --- slices and limits


def test_adjacent_records_are_one_slice_and_others_are_not(bench: Any) -> None:
    store = bench.open()
    bench.send(b"0", b"1")
    bench.send(b"other", topic="A")
    bench.send(b"2")
    adjacent = store.reader.read("T", 0, 0, 2, 1 << 20)
    result = store.reader.read("T", 0, 0, 32, 1 << 20)
    assert found(adjacent) == [0, 1]
    assert len(adjacent.data) == 1
    assert found(result) == [0, 1, 2]
    assert len(result.data) > 1
    assert all(isinstance(piece, memoryview) for piece in result.data)


def test_slices_end_at_a_log_file(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1000)
    bench.send(*[b"x" * 200] * 8)
    result = store.reader.read("T", 0, 0, 32)
    assert found(result) == list(range(8))
    assert len(result.data) == 3


def test_count_limit(bench: Any) -> None:
    store = bench.open()
    bench.send(*[b"x"] * 40)
    result = store.reader.read("T", 0, 3, 5)
    assert found(result) == [3, 4, 5, 6, 7]
    assert result.next_offset == 8


def test_ordinary_pull_of_what_is_in_memory_gets_32_messages_or_256_kib(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 24)
    bench.send(*[b"x"] * 40)
    assert found(store.reader.read("T", 0, 0, 32)) == list(range(32))
    bench.send(*[b"x" * 100_000] * 4, topic="A")
    assert found(store.reader.read("A", 0, 0, 32)) == [0, 1]


@pytest.mark.parametrize(
    ("settings", "is_ours", "count"),
    [
        ({}, False, 32),
        ({}, True, 256),
        ({"max_transfer_count_memory": 16}, False, 16),
        ({"max_transfer_count_memory": 16}, True, 256),
        ({"max_transfer_count_memory": 280}, False, 280),
        ({"max_transfer_count_memory": 280}, True, 280),
        ({"pull_count_max": 0}, True, 32),
        ({"pull_count_max": 40}, True, 40),
        ({"memory_ratio": 0}, False, 8),
        ({"memory_ratio": 0}, True, 8),
    ],
)
def test_the_reader_and_not_the_number_asked_for_decides_the_count_of_an_answer(
    bench: Any, settings: dict[str, int], is_ours: bool, count: int
) -> None:
    store = bench.open(commit_log_file_bytes=1 << 24, **settings)
    bench.send(*[b"x"] * 300)
    for asked in (1, count - 1, count, count + 1, 1000):
        result = store.reader.read("T", 0, 0, asked, is_sluice_client=is_ours)
        assert found(result) == list(range(min(asked, count))), asked


def test_a_pull_of_ours_keeps_to_256_kib(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 24)
    bench.send(*[b"x" * 2000] * 256)
    assert len(found(store.reader.read("T", 0, 0, 1000, is_sluice_client=True))) == 262_144 // 2092


def test_ordinary_pull_of_what_is_on_disk_gets_8_messages_or_64_kib(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 24, memory_ratio=0)
    bench.send(*[b"x"] * 40)
    assert found(store.reader.read("T", 0, 0, 1000)) == list(range(8))
    bench.send(*[b"x" * 30_000] * 4, topic="A")
    bench.send(b"newest")
    assert found(store.reader.read("A", 0, 0, 1000)) == [0, 1]


def test_bulk_read_has_the_limits_it_names(bench: Any) -> None:
    store = bench.open()
    bench.send(*[b"x" * 8] * 40)  # 100 bytes each
    assert found(store.reader.read("T", 0, 0, 1000, 1 << 20)) == list(range(40))
    assert found(store.reader.read("T", 0, 0, 1000, 1000)) == list(range(10))
    assert found(store.reader.read("T", 0, 0, 1000, 999)) == list(range(9))


def test_first_message_passes_every_limit(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 24)
    bench.send(b"x" * 500_000, b"y")
    assert found(store.reader.read("T", 0, 0, 32)) == [0]
    assert found(store.reader.read("T", 0, 0, 32, 1)) == [0]
    bench.send(b"z" * 100, tag="t", topic="A")
    assert found(store.reader.read("A", 0, 0, 32, 1, Filter("t"))) == [0]


def test_units_in_files_and_in_memory_are_read_as_one(bench: Any) -> None:
    store = bench.open(consume_queue_file_bytes=100)  # five units
    bench.send(*[b"x"] * 13)
    bench.clock.ms += 1000
    store.tick()
    assert len(bench.files.names("/store/consumequeue/T/0")) == 3
    bench.send(*[b"x"] * 4)
    assert found(store.reader.read("T", 0, 0, 32)) == list(range(17))
    assert found(store.reader.read("T", 0, 4, 3)) == [4, 5, 6]
    assert found(store.reader.read("T", 0, 12, 32)) == [12, 13, 14, 15, 16]


def test_slices_stay_valid_when_the_store_is_closed(bench: Any) -> None:
    store = bench.open()
    bench.send(b"0")
    result = store.reader.read("T", 0, 0, 32)
    store.close()
    assert found(result) == [0]


# --- the first stage: tag codes

TAGS = ["a", "b", "c"]


def three_tags(bench: Any, count: int) -> None:
    for number in range(count):
        bench.append(b"x", tag=TAGS[number % 3])
    bench.store.commit()


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize(("tags", "rest"), [(["a"], [0]), (["a", "c"], [0, 2]), (["d"], [])])
def test_tags_select_by_code(bench: Any, flushed: bool, tags: list[str], rest: list[int]) -> None:
    store = bench.open()
    three_tags(bench, 60)
    if flushed:
        bench.clock.ms += 1000
        store.tick()
    chooser = Filter(*tags)
    result = store.reader.read("T", 0, 0, 100, 1 << 20, chooser)
    assert found(result) == [n for n in range(60) if n % 3 in rest]
    assert result.status is (ReadStatus.FOUND if rest else ReadStatus.NO_MATCHED_MESSAGE)
    assert result.next_offset == 60
    assert chooser.asked == [], "a set of codes is compared at once"


def test_next_offset_is_the_first_match_not_delivered(bench: Any) -> None:
    store = bench.open()
    three_tags(bench, 60)
    result = store.reader.read("T", 0, 0, 2, 1 << 20, Filter("b"))
    assert found(result) == [1, 4]
    assert result.next_offset == 7, "5 and 6 do not match and need not be looked at again"
    assert result.units_scanned == 7


@pytest.fixture
def rare(bench: Any) -> Any:
    """7,000 messages, each hundredth with the tag `wanted`: 0, 100, 200, …"""
    store = bench.open(consume_queue_file_bytes=200_000, commit_log_file_bytes=1 << 20)
    for number in range(7000):
        bench.append(tag="wanted" if number % 100 == 0 else "other")
    store.commit()
    return store


def pulled(store: Any, offset: int, consumed: int | None) -> list[int]:
    """By an ordinary pull of a consumer that has consumed everything below `consumed`."""
    reach = None if consumed is None else SpanLimit(consumed)
    result = store.reader.read("T", 0, offset, 32, None, Filter("wanted"), None, reach)
    assert result.next_offset % 100 == 0, "the first match that was not delivered"
    return found(result)


def test_an_ordinary_pull_does_not_span_more_than_a_java_consumer_holds(rare: Any) -> None:
    assert pulled(rare, 1, None) == list(range(100, 2101, 100)), "as far as 2,000 from the first"
    nothing = rare.reader.read("T", 0, 0, 32, None, Filter("absent"))
    assert nothing.next_offset == 7000, "misses are passed in one go"


def test_what_the_consumer_holds_still_counts_in_the_span(rare: Any) -> None:
    assert pulled(rare, 3000, 1700) == list(range(3000, 3701, 100)), "it holds 1700 to 2900"
    assert pulled(rare, 3000, 2901) == list(range(3000, 5001, 100)), "it holds nothing"
    assert pulled(rare, 3000, 900) == list(range(3000, 5001, 100)), "it does not count as Java"


def test_a_patient_consumer_asks_once_more_for_what_is_out_of_its_reach(rare: Any) -> None:
    reach = SpanLimit(900, 3000, is_patient=True)
    within = rare.reader.read("T", 0, 3000, 32, None, Filter("wanted"), None, reach)
    assert found(within) == list(range(3000, 3901, 100))
    assert (within.held_from, within.span, within.is_out_of_reach) == (900, 3000, False)
    beyond = rare.reader.read("T", 0, 3901, 32, None, Filter("wanted"), None, reach)
    assert (found(beyond), beyond.next_offset, beyond.is_out_of_reach) == ([], 4000, True)
    fresh = rare.reader.read(
        "T", 0, 3901, 32, None, Filter("wanted"), None, reach._replace(consumed=3901)
    )
    assert found(fresh) == list(range(4000, 7000, 100)), "it holds nothing"


def test_bulk_reads_are_free_of_the_span(rare: Any) -> None:
    assert len(found(rare.reader.read("T", 0, 0, 100, 1 << 20, Filter("wanted")))) == 70


def test_scan_limit_ends_a_call_without_matches(bench: Any) -> None:
    store = bench.open()
    three_tags(bench, 60)
    result = store.reader.read("T", 0, 5, 32, None, Filter("d"), 10)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, 15)
    assert result.units_scanned == 10


def test_whole_queue_is_seen_by_repeated_reads_with_any_limits(bench: Any) -> None:
    store = bench.open()
    three_tags(bench, 60)
    for scan_max in (1, 7, 100):
        for count in (1, 3, 100):
            seen, offset = [], 0
            while offset < 60:
                result = store.reader.read("T", 0, offset, count, None, Filter("c"), scan_max)
                assert result.next_offset > offset
                seen += found(result)
                offset = result.next_offset
            assert seen == list(range(2, 60, 3))


# --- the second stage: properties


def test_properties_are_read_only_for_candidates(bench: Any) -> None:
    store = bench.open()
    for number in range(30):
        origin = "JFK" if number % 2 else "EWR"
        bench.append(b"x", tag=TAGS[number % 3], properties={"origin": origin})
    store.commit()
    chooser = Filter("a", origin="JFK", as_set=False)
    result = store.reader.read("T", 0, 0, 100, 1 << 20, chooser)
    assert found(result) == [3, 9, 15, 21, 27]
    assert chooser.asked.count("queue") == 30
    assert chooser.asked.count("log") == 10


@pytest.mark.parametrize("sys_flag", [0, 0x100])
@pytest.mark.parametrize("host_bytes", [8, 20])
def test_properties_are_found_in_every_kind_of_record(
    bench: Any, sys_flag: int, host_bytes: int
) -> None:
    store = bench.open()
    host = bytes(host_bytes - 4) + struct.pack(">i", 1)
    for topic in ("T", "%RETRY%" + "g" * 150):
        bench.send(b"x", topic=topic, properties={"origin": "JFK"}, sys_flag=sys_flag, host=host)
        assert found(
            store.reader.read(topic, 0, 0, 9, None, Filter(origin="JFK", as_set=False))
        ) == [0]
        assert (
            found(store.reader.read(topic, 0, 0, 9, None, Filter(origin="EWR", as_set=False))) == []
        )


def test_filter_of_a_user_without_a_set_and_without_properties(bench: Any) -> None:
    store = bench.open()
    three_tags(bench, 9)
    chooser = Filter("b", as_set=False)
    assert found(store.reader.read("T", 0, 0, 100, 1 << 20, chooser)) == [1, 4, 7]
    assert set(chooser.asked) == {"queue"}


def test_call_that_reads_records_looks_at_two_thousand_at_most(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 20, consume_queue_file_bytes=1 << 20)
    bench.send(*[b""] * 2500)
    chooser = Filter(origin="JFK", as_set=False)
    result = store.reader.read("T", 0, 0, 32, None, chooser, 1_000_000)
    assert (result.units_scanned, result.next_offset) == (2000, 2000)


# --- places and times


def test_record_is_found_only_where_one_begins(bench: Any) -> None:
    store = bench.open()
    (first, _), (second, _) = bench.send(b"0", b"1")
    assert decode_records(store.reader.record_at(first))[0].body == b"0"
    assert decode_records(store.reader.record_at(second))[0].body == b"1"
    for place in (-1, 1, first + 5, second + 1, store.written_offset, 1 << 40):
        assert store.reader.record_at(place) is None


def test_record_inside_the_body_of_another_is_not_taken_for_one(bench: Any) -> None:
    store = bench.open()
    (place, _) = bench.send(b"0")[0]
    inner = store.reader.record_at(place)
    outer, _ = bench.send(inner)[0]
    assert store.reader.record_at(outer + 88) is None


def timed(bench: Any, *times: int) -> None:
    start = bench.clock.ms
    for time in times:
        bench.clock.ms = start + time
        bench.append()
        bench.store.commit()
    bench.clock.ms = start


@pytest.mark.parametrize(
    ("time", "lower", "upper"),
    [(-1, 0, 0), (0, 0, 0), (5, 1, 0), (10, 1, 3), (11, 4, 3), (20, 4, 4), (21, 5, 4)],
)
def test_offset_by_time_with_both_boundaries(bench: Any, time: int, lower: int, upper: int) -> None:
    store = bench.open(consume_queue_file_bytes=40)
    start = bench.clock.ms
    timed(bench, 0, 10, 10, 10, 20)
    assert store.reader.offset_by_time("T", 0, start + time, "lower") == lower
    assert store.reader.offset_by_time("T", 0, start + time, "upper") == upper


@pytest.mark.parametrize("bad", [(0,), (4,), (3, 4, 5), (8, 9), (9,), tuple(range(10))])
def test_a_search_by_time_passes_over_no_message_for_those_that_cannot_be_read(
    bench: Any, bad: tuple[int, ...]
) -> None:
    bench.open(commit_log_file_bytes=1 << 16)
    start = bench.clock.ms
    places = []
    for number in range(10):
        bench.clock.ms = start + 10 * number
        places.append(bench.send(b"%d" % number * 50)[0][0])
    bench.store.close()
    path = f"{bench.config.root}/commitlog/{0:020d}"
    data = bytearray(bench.files.content(path))
    for number in bad:
        data[places[number] + 100] ^= 1
    bench.files.put(path, bytes(data))
    store = bench.open()  # what an earlier process wrote is checked when it is read
    good = [number for number in range(10) if number not in bad]
    assert [n for n in range(10) if store.reader.store_time_ms("T", 0, n) >= 0] == good
    for time in range(-5, 100, 5):
        first = next((number for number in good if 10 * number >= time), None)
        found = store.reader.offset_by_time("T", 0, start + time, "lower")
        if first is not None:  # unreadable ones just before it may be found too
            assert found <= first
            assert not [number for number in good if found <= number < first]
        else:
            assert found > max(good, default=-1)


def test_times_of_messages(bench: Any) -> None:
    store = bench.open()
    start = bench.clock.ms
    assert store.reader.earliest_time_ms() == -1
    assert store.reader.offset_by_time("T", 0, start, "lower") == 0
    timed(bench, 0, 10)
    bench.clock.ms = start + 20
    bench.send(b"x", topic="A", host=bytes(16) + struct.pack(">i", 1))
    assert store.reader.earliest_time_ms() == start
    assert store.reader.earliest_time_ms("A", 0) == start + 20
    assert store.reader.earliest_time_ms("B", 0) == -1
    assert store.reader.store_time_ms("T", 0, 1) == start + 10
    assert store.reader.store_time_ms("T", 0, 2) == -1
    assert store.reader.store_time_ms("B", 0, 0) == -1
