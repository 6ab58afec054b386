"""Property columns of a store: making, reading, checking and removing them, and their files."""

import errno
import importlib.util
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.record.arrow import build_block
from sluicemq.record.codec import decode_records
from sluicemq.record.columns import ColumnBlock
from sluicemq.store.columns import blocks as columns_blocks
from sluicemq.store.columns import file as columns_file
from sluicemq.store.columns import file as columns_seal
from sluicemq.store.columns import scan as columns_scan
from sluicemq.store.gather import SpanLimit
from sluicemq.store.read import ReadResult
from sluicemq.store.store import Store

DIRECTORY = "/store/columns/T/0"
ROWS = 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that a test can fill them."""
    monkeypatch.setattr(columns_blocks, "BLOCK_ROWS", ROWS)
    monkeypatch.setattr(columns_blocks, "SLOT_ROWS", 8)
    monkeypatch.setattr(columns_file, "PROOF_ROWS", 8)
    monkeypatch.setattr(columns_scan, "ROWS_MIN", 4)
    monkeypatch.setattr(columns_scan, "CHUNK_ROWS_MIN", 8)
    for module in (columns_blocks, columns_scan):
        monkeypatch.setattr(module, "PART_ROWS", 8)


class Records:
    """A filter without an engine for columns, which reads every record."""

    tag_codes = None
    reads_properties = True

    def __init__(self, expression: str) -> None:
        self.by_commit_log = compile_sql92(expression).matches

    def by_consume_queue(self, tag_code: int) -> bool:
        return True


def by_columns(expression: str) -> Selector:
    return compile_sql92(expression)


def fill(bench: Any, count: int, *, topic: str = "T", start: int = 0) -> None:
    rng = random.Random(start)
    for number in range(start, start + count):
        properties = {"n": str(number % 10), "UNIQ_KEY": f"{number:032d}"}
        if rng.random() < 0.5:
            properties["city"] = rng.choice(["hz", "bj", "杭州"])
        bench.append(b"%06d" % number, topic=topic, properties=properties, tag=f"t{number % 3}")
    bench.store.commit()


def seal(store: Store) -> None:
    store.columns.scan_for("T")
    for step in store.columns.seal_blocks():
        if callable(step):
            step()


def drain(store: Store, message_filter: Any, start: int = 0, **limits: Any) -> list[int]:
    """Return the queue offsets of all matches from an offset on."""
    found: list[int] = []
    offset, end = start, store.queue_offsets("T", 0)[1]
    while offset < end:
        result: ReadResult = store.reader.read("T", 0, offset, 5, None, message_filter, **limits)
        data = b"".join(result.data)
        found += [message.queue_offset for message in decode_records(data)]
        assert result.next_offset > offset
        offset = result.next_offset
    return found


@pytest.fixture
def store(bench: Any) -> Iterator[Store]:
    """Yield a store with 100 messages on disk: three blocks and four more messages."""
    bench.files.clock = bench.clock
    bench.open(commit_log_file_bytes=8192)
    fill(bench, 100)
    bench.store.sync()
    yield bench.store
    bench.store.close()


def same(store: Store, expression: str) -> list[int]:
    expected = drain(store, Records(expression))
    assert drain(store, by_columns(expression)) == expected
    return expected


# ------------------------------------------------------------------------------------- reading


def test_a_filter_has_the_same_matches_by_columns_and_by_records(store: Store) -> None:
    assert len(same(store, "n > 7")) == 20
    assert len(same(store, "city = '杭州' AND n BETWEEN 2 AND 5")) > 0
    assert same(store, "nothing IS NULL") == list(range(100))
    assert same(store, "nothing = 'x'") == []
    assert store.columns.rows_decoded == 4 * 100, "each what it reads"
    assert not store.columns.rows_sealed


def test_only_matches_are_read_from_the_log(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    same(store, "n = 3")
    read: list[int] = []
    properties = store.reader._read_properties
    monkeypatch.setattr(
        store.reader, "_read_properties", lambda at, size: read.append(at) or properties(at, size)
    )
    assert len(drain(store, by_columns("n = 4"))) == 10
    assert len(read) == 0


def test_a_property_that_is_not_a_column_is_read_from_the_record(store: Store) -> None:
    seal(store)
    found = same(store, f"UNIQ_KEY = '{7:032d}' OR UNIQ_KEY = '{90:032d}'")
    assert found == [7, 90]


def test_records_read_to_decide_end_a_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_scan, "RECORDS_MAX", 10)
    seal(store)
    message_filter = by_columns("UNIQ_KEY = 'x'")
    result = store.reader.read("T", 0, 0, 32, None, message_filter)
    assert (result.next_offset, result.units_scanned) == (10, 10)
    assert drain(store, message_filter) == []


def test_a_call_ends_after_its_time_limit(
    bench: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(10_000))
    monkeypatch.setattr(bench.clock, "monotonic_s", lambda: next(times))
    ends = []
    for expression in ("n = 11", "n = 12"):
        ends.append(store.reader.read("T", 0, 0, 32, None, by_columns(expression)).next_offset)
        seal(store)
    assert ends == [8, ROWS]


def test_a_read_reports_whether_an_evaluation_failed(bench: Any, store: Store) -> None:
    bench.append(properties={"n": "word"})
    store.commit()
    for offset, is_sure in ((0, True), (96, False)):
        result = store.reader.read("T", 0, offset, 3, None, by_columns("n > 1"))
        assert (result.count, result.is_filter_reliable) == (3, is_sure)
    assert not store.reader.read("T", 0, 0, 3, None, Records("n > 1")).is_filter_reliable


def test_a_caller_limits_the_units_that_are_read(store: Store) -> None:
    result = store.reader.read("T", 0, 3, 32, None, by_columns("n = 11"), 21)
    assert (result.next_offset, result.units_scanned) == (24, 21)


def test_few_messages_at_the_end_are_read_one_by_one(bench: Any, store: Store) -> None:
    for count, decoded in ((3, 0), (30, 33)):
        before, end = store.columns.rows_decoded, store.queue_offsets("T", 0)[1]
        fill(bench, count, start=end)
        assert drain(store, by_columns("n > 1"), 100) == drain(store, Records("n > 1"), 100)
        assert store.columns.rows_decoded == before + decoded


def test_distant_matches_end_a_pull_as_without_columns(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open(commit_log_file_bytes=1 << 20)
    fill(bench, 3000)
    for expression in ("n = 3", "city = 'bj'"):
        for consumed in (0, 5, 500):
            args = ("T", 0, 900, 32, None)
            for reach in (SpanLimit(consumed), SpanLimit(consumed, 400, is_patient=True)):
                fast = bench.store.reader.read(*args, by_columns(expression), 1 << 20, reach)
                slow = bench.store.reader.read(*args, Records(expression), 2000, reach)
                assert fast.count == slow.count
                assert (fast.held_from, fast.span) == (slow.held_from, slow.span)
                assert bytes(b"".join(fast.data)) == bytes(b"".join(slow.data))


def test_nothing_is_made_while_columns_are_off(bench: Any) -> None:
    bench.open(columns_mode="off")
    fill(bench, 100)
    assert len(drain(bench.store, by_columns("n > 7"))) == 20
    seal(bench.store)
    assert bench.store.columns.iter_blocks("T", 0, 0, 100) is None
    assert (bench.store.columns.rows_decoded, bench.files.names("/store/columns")) == (0, [])


def test_without_pyarrow_records_are_read(
    bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, *rest: None if name == "pyarrow" else real(name, *rest),
    )  # fmt: skip
    bench.open()
    fill(bench, 100)
    assert len(drain(bench.store, by_columns("n > 7"))) == 20
    assert bench.store.columns.iter_blocks("T", 0, 0, 100) is None
    assert "pyarrow is missing" in caplog.text
    assert caplog.text.count("pyarrow is missing") == 1


def test_a_broker_reads_records_until_columns_are_loaded(bench: Any) -> None:
    bench.open()
    fill(bench, 50)
    columns = bench.store.columns
    columns.loads_on_first_use = False
    assert not columns.has_work
    assert len(drain(bench.store, by_columns("n > 7"))) == 10
    assert columns.has_work
    assert not columns.is_loaded
    assert columns.rows_decoded == 0
    columns.warm_up()
    assert len(drain(bench.store, by_columns("n > 7"))) == 10
    assert columns.rows_decoded == 48, "the last two are not worth it"


def test_blocks_cover_the_requested_rows(store: Store) -> None:
    seal(store)
    for start, end in ((0, 100), (5, 70), (40, 41), (95, 200), (100, 200), (50, 50)):
        blocks = list(store.columns.iter_blocks("T", 0, start, end) or ())
        rows = [block.first_offset + row for block in blocks for row in range(block.rows)]
        assert rows == list(range(start, min(end, 100)))
        for block in blocks:
            codes, values = block.columns["n"]
            shown = [values[code] for code in codes]
            assert shown == [str((block.first_offset + row) % 10) for row in range(block.rows)]
    assert list(store.columns.iter_blocks("Unknown", 0, 0, 10) or ()) == []


# --------------------------------------------------------------------------------------- files


def test_full_blocks_are_sealed_into_files_that_any_arrow_reader_opens(
    bench: Any, store: Store
) -> None:
    seal(store)
    names = bench.files.names(DIRECTORY)
    assert [int(name[:20]) for name in names] == [0, 32, 64]
    assert store.columns.rows_sealed == 96
    contents = [bench.files.content(f"{DIRECTORY}/{name}") for name in names]
    assert store.columns.size_bytes == sum(map(len, contents))
    table = pa.ipc.open_file(pa.BufferReader(contents[1])).read_all()
    assert table["n"].to_pylist() == [str(number % 10) for number in range(32, 64)]
    assert table["city"].null_count > 0
    assert "UNIQ_KEY" not in table.column_names


def test_a_reopened_store_reads_the_files_and_decodes_the_tail(bench: Any, store: Store) -> None:
    seal(store)
    reopened = bench.reopen()
    assert len(same(reopened, "n > 7")) == 20
    assert reopened.columns.rows_decoded == 4
    seal(reopened)
    assert reopened.columns.rows_sealed == 0, "they are there already"


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "name", "version"])
def test_a_damaged_file_is_logged_and_made_again(
    bench: Any, store: Store, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    seal(store)
    store.close()
    name = bench.files.names(DIRECTORY)[1]
    path = f"{DIRECTORY}/{name}"
    if damage == "bit":
        bench.files.rot(path, random.Random(1))
    elif damage == "name":
        bench.files.rename(path, f"{DIRECTORY}/{name[:21]}00000000.arrow")
    elif damage == "version":
        data = bench.files.content(path).replace(b'"version": 2', b'"version": 1')
        bench.files.remove(path)
        columns_file.write_file(bench.files, DIRECTORY, ROWS, data)
    else:
        bench.files.open(path).truncate(100 if damage == "cut" else 0)
    reopened = bench.open()
    assert len(same(reopened, "n > 7")) == 20
    assert "are made again" in caplog.text
    assert reopened.columns.rows_decoded == 32 + 4
    seal(reopened)
    assert bench.files.names(DIRECTORY)[1] == name, "the same content has the same name"
    assert len(bench.files.names(DIRECTORY)) == 3


def load_parts(store: Store, expression: str) -> list[Any]:
    """Run the loads of all parts and return the parts."""
    block_filter = by_columns(expression).vectorised
    store.columns.warm_up()
    found = []
    for part in store.columns.iter_parts("T", 0, 5, 99, block_filter) or ():
        if not isinstance(part, ColumnBlock):
            part.run()
            store.columns.accept_load(part)
        found.append(part)
    return found


def test_rows_that_are_not_in_memory_are_loaded_by_a_load_and_cached(
    bench: Any, store: Store
) -> None:
    seal(store)
    reopened = bench.reopen()
    loads = load_parts(reopened, "n > 7")
    assert [(load.start, load.end) for load in loads] == [(5, 32), (32, 64), (64, 96), (96, 99)]
    assert [load.run().rows for load in loads] == [27, 32, 32, 3]
    *blocks, rest = load_parts(reopened, "n > 7")
    assert [block.rows for block in blocks] == [27, 32, 32]
    assert rest.run().rows == 3, "these rows are decoded for one filter and not cached"
    assert reopened.columns.rows_decoded == 2 * 3


def test_a_file_that_cannot_match_is_not_read_by_a_load_either(bench: Any, store: Store) -> None:
    seal(store)
    reopened = bench.reopen()
    assert [load.has_no_match for load in load_parts(reopened, "n > 20")] == [
        True,
        True,
        True,
        False,
    ]
    assert [part.start for part in load_parts(reopened, "n > 20")] == [96], "now it is known"


def test_a_damaged_file_that_a_load_reads_is_forgotten(
    bench: Any, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    seal(store)
    store.close()
    bench.files.rot(f"{DIRECTORY}/{bench.files.names(DIRECTORY)[1]}", random.Random(1))
    reopened = bench.open()
    assert [load.error is None for load in load_parts(reopened, "n > 7")] == [
        True,
        False,
        True,
        True,
    ]
    assert "are made again" in caplog.text
    assert [part.end for part in load_parts(reopened, "n > 7")] == [32, 40, 48, 56, 64, 96, 99]


def test_files_of_other_messages_are_not_used(bench: Any, store: Store) -> None:
    seal(store)
    store.close()
    old = {name: bench.files.content(f"{DIRECTORY}/{name}")
           for name in bench.files.names(DIRECTORY)}  # fmt: skip
    bench.open()
    bench.store.delete_topic("T")
    assert not bench.files.exists("/store/columns/T")
    for number in range(100):  # of the same size and tags
        bench.append(b"%06d" % number, properties={"n": "x", "UNIQ_KEY": f"{number:032d}"})
    bench.store.commit()
    for name, data in old.items():
        columns_file.write_file(bench.files, DIRECTORY, int(name[:20]), data)
    reopened = bench.reopen()
    assert len(same(reopened, "n = 'x'")) == 100


def test_one_other_record_is_noticed(bench: Any, store: Store) -> None:
    """Even if the units are equal, the last record of each proof identifies the messages."""
    seal(store)
    unit = store._queues.by_key["T", 0].unit(39)
    store.close()
    file = bench.files.open(f"/store/commitlog/{unit.physical_offset // 8192 * 8192:020d}")
    place = unit.physical_offset % 8192
    record = file.pread(unit.size_bytes, place)
    file.pwrite(record.replace(b"n\x019", b"n\x018"), place)
    bench.open()
    block = next(bench.store.columns.iter_blocks("T", 0, 32, 64))
    assert block.rows == 8, "decoded, not from the file"


def test_nothing_is_sealed_before_it_is_on_disk(bench: Any) -> None:
    bench.open(commit_log_file_bytes=8192)
    fill(bench, 40)
    seal(bench.store)
    assert bench.files.names(DIRECTORY) == []
    bench.store.sync()
    seal(bench.store)
    assert len(bench.files.names(DIRECTORY)) == 1


def test_files_are_limited_to_a_share_of_the_log_without_the_largest_columns(bench: Any) -> None:
    bench.open(commit_log_file_bytes=1 << 16, columns_disk_percent=2)
    for number in range(64):
        bench.append(properties={"big": f"{number * 7919:012d}", "small": str(number % 2)})
    bench.store.commit()
    bench.store.sync()
    seal(bench.store)
    block = next(bench.store.columns.iter_blocks("T", 0, 0, 64))
    assert (set(block.columns), block.excluded) == ({"small"}, {"big"})
    assert drain(bench.store, by_columns(f"big = '{63 * 7919:012d}'")) == [63]


def test_always_makes_columns_of_every_topic(bench: Any) -> None:
    bench.open(columns_mode="always")
    fill(bench, 40, topic="U")
    bench.store.sync()
    bench.store.columns.warm_up()
    for step in bench.store.columns.seal_blocks():
        if callable(step):
            step()
    assert len(bench.files.names("/store/columns/U/0")) == 1


def test_auto_makes_columns_only_of_filtered_topics(bench: Any, store: Store) -> None:
    fill(bench, 40, topic="U")
    store.sync()
    seal(store)
    assert bench.files.names("/store/columns") == ["T"]


def test_files_wait_until_a_topic_has_been_filtered_for_some_time(bench: Any, store: Store) -> None:
    for passed_ms, count in ((0, 0), (2_999, 0), (1, 3)):
        bench.clock.ms += passed_ms
        store.columns.scan_for("T")
        for step in store.columns.seal_blocks(3.0):
            if callable(step):
                step()
        assert len(bench.files.names(DIRECTORY)) == count


def test_cached_blocks_are_dropped_with_the_log(bench: Any, store: Store) -> None:
    """That is also so if no file exists yet, because a block may take long to fill."""
    assert sum(block.rows for block in store.columns.iter_blocks("T", 0, 0, 100) or ()) == 100
    kept = store.columns._blocks._cache._blocks
    before = len(kept)
    retain(bench, store)
    for step in store.columns.seal_blocks(1e9):
        assert not callable(step), "nothing is sealed"
    low = store.queue_offsets("T", 0)[0]
    assert low > 32
    assert len(kept) <= (100 - low) // 8 + 1 < before
    assert drain(store, by_columns("n > 7"), low) == drain(store, Records("n > 7"), low)


def retain(bench: Any, store: Store) -> None:
    """Let retention remove all files of the log but the last one."""
    bench.clock.ms += 600_000
    store.tick()
    store.sync()
    bench.clock.ms += 400 * 3_600_000
    store.retention.config = store.retention.config.__class__(
        root="/store", delete_hours=tuple(f"{hour:02d}" for hour in range(24))
    )
    for step in store.retention.clean():
        if callable(step):
            step()


def test_files_are_removed_with_the_log(bench: Any, store: Store) -> None:
    seal(store)
    same(store, "n > 7")
    retain(bench, store)
    low = store.queue_offsets("T", 0)[0]
    assert low > 32
    seal(store)
    assert all(int(name[:20]) + ROWS > low for name in bench.files.names(DIRECTORY))
    assert drain(store, by_columns("n > 7"), low) == drain(store, Records("n > 7"), low)
    reopened = bench.reopen()
    assert drain(reopened, by_columns("n > 7"), low) == drain(reopened, Records("n > 7"), low)


def test_columns_of_a_deleted_topic_are_removed(bench: Any, store: Store) -> None:
    same(store, "n > 7")
    seal(store)
    store.delete_topic("T")
    assert not bench.files.exists("/store/columns/T")
    for number in range(20):
        bench.append(properties={"n": str(number + 1000)})
    store.commit()
    assert same(store, "n >= 1000") == list(range(*store.queue_offsets("T", 0)))
    assert len(same(store, "n < 1000")) == 0


def test_a_topic_deleted_while_its_block_is_built_keeps_no_file(bench: Any, store: Store) -> None:
    store.columns.scan_for("T")
    steps = store.columns.seal_blocks()
    for step in steps:
        if callable(step):
            step()
            if bench.files.names(DIRECTORY):
                break
    store.delete_topic("T")
    for step in steps:
        if callable(step):
            step()
    fill(bench, 40)
    seal(store)
    assert len(same(store, "n > 7")) == 8


def test_a_full_disk_stops_only_sealing(bench: Any, store: Store) -> None:
    store.columns.scan_for("T")
    bench.files.fail_next("write", errno.ENOSPC, path_part="/columns/")
    with pytest.raises(OSError, match="No space"):
        seal(store)
    assert len(same(store, "n > 7")) == 20
    before = bench.files.names(DIRECTORY)
    seal(store)
    assert bench.files.names(DIRECTORY) == before, "not at once again"
    bench.clock.ms += 30_000
    seal(store)
    assert len(bench.files.names(DIRECTORY)) == 3, "and what was left is gone"


def test_invalid_files_are_removed_only_by_sealing(
    bench: Any, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    bench.files.make_directory(DIRECTORY)
    bench.files.open(f"{DIRECTORY}/notes.txt", create=True)
    with caplog.at_level(logging.WARNING):
        same(store, "n > 7")
    assert bench.files.names(DIRECTORY) == ["notes.txt"]
    seal(store)
    assert "notes.txt" not in bench.files.names(DIRECTORY)


def test_memory_is_limited_and_the_oldest_blocks_are_evicted(bench: Any) -> None:
    bench.open(columns_memory_bytes=2000)
    fill(bench, 100)
    for _ in range(2):
        assert sum(block.rows for block in bench.store.columns.iter_blocks("T", 0, 0, 100)) == 100
    assert bench.store.columns.rows_decoded > 100
    cache = bench.store.columns._blocks._cache
    assert cache.size_bytes <= 2000


def test_ranges_of_a_filter_are_cached_for_other_readers_up_to_a_limit(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open()
    fill(bench, 100)
    for _ in range(2):
        assert len(same(bench.store, "n > 7")) == 20
    assert bench.store.columns.rows_decoded == 96 + 4
    monkeypatch.setattr(columns_scan, "_PARTS_ROWS_MAX", 200)
    for number in range(9):
        same(bench.store, f"n > {number}")
    scan = bench.store.columns.scan
    assert scan._parts_rows == sum(map(columns_scan._estimate_weight, scan._parts.values())) <= 200
    bench.store.delete_topic("T")
    assert (len(scan._parts), scan._parts_rows) == (0, 0)


def test_odd_rows_keep_their_numbers_when_blocks_are_merged() -> None:
    pieces = [
        build_block(start, np.zeros(3, np.int64), np.zeros(3, np.int64), ())._replace(
            odd=np.array(odd, np.int64)
        )
        for start, odd in ((10, [2]), (13, []), (16, [0, 1]))
    ]
    block = columns_seal.merge_blocks(pieces, 64)
    assert (block.first_offset, block.rows, block.odd.tolist()) == (10, 9, [2, 6, 7])


@pytest.mark.parametrize("is_sealed", [False, True])
def test_damaged_records_are_skipped_as_without_columns(
    bench: Any, store: Store, is_sealed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if is_sealed:
        seal(store)
    units = [store._queues.by_key["T", 0].unit(offset) for offset in (3, 40, 60)]
    store.close()
    for unit, at in zip(units, (0, 86, 88), strict=True):  # its size, the body's size, the body
        file = bench.files.open(f"/store/commitlog/{unit.physical_offset // 8192 * 8192:020d}")
        place = unit.physical_offset % 8192 + at
        file.pwrite(bytes([file.pread(1, place)[0] ^ 0x20]), place)
    reopened = bench.open()
    found = same(reopened, "n IS NULL OR n >= 0")
    assert found == [offset for offset in range(100) if offset not in (3, 40, 60)]
    assert same(reopened, "n IS NULL") == []
    assert "is damaged" in caplog.text


def test_a_block_that_cannot_match_is_not_even_read(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open()
    for number in range(6 * ROWS):
        bench.append(properties={"n": str(number // ROWS), "city": "hz"})
    bench.store.commit()
    bench.store.sync()
    seal(bench.store)
    bench.reopen()
    read: list[str] = []
    whole = columns_file.read_block

    def noted(files: Any, directory: str, name: str) -> columns_file.SealedBlock:
        read.append(name)
        return whole(files, directory, name)

    monkeypatch.setattr(columns_file, "read_block", noted)
    expected = list(range(2 * ROWS, 3 * ROWS))
    assert drain(bench.store, by_columns("n = 2 AND city = 'hz'")) == expected
    assert [columns_file.parse_first_offset(name) for name in read] == [2 * ROWS]
    assert drain(bench.store, by_columns("n > 7")) == []
    assert len(read) == 1
    pruning = by_columns("n >= 4").vectorised
    found = bench.store.columns.iter_blocks("T", 0, 0, 6 * ROWS, pruning)
    assert [block.first_offset for block in found] == [4 * ROWS, 5 * ROWS]
    assert bench.store.columns.rows_decoded == 0


def test_statistics_of_other_messages_exclude_nothing(bench: Any) -> None:
    bench.open()
    fill(bench, 2 * ROWS)
    bench.store.sync()
    seal(bench.store)
    names = bench.files.names(DIRECTORY)
    head = columns_file.read_block_head(bench.files, DIRECTORY, names[0])
    assert (head.first_offset, head.rows) == (0, ROWS)
    file = bench.files.open(f"{DIRECTORY}/{names[0]}")
    data = bytearray(file.pread(file.size(), 0))
    at = data.index(b'"n": [false, ["')
    data[at + 15 : at + 16] = b"z"
    with pytest.raises(columns_file.UntrueFileError):
        columns_file.decode_block_head(bytes(data))
    file.pwrite(data, 0)
    file.close()
    bench.reopen()
    assert drain(bench.store, by_columns("n = 0"))[:2] == [0, 10]
