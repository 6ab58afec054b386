"""Start-up after an orderly stop, after a kill, with torn tails, with queues missing or short."""

import struct
from typing import Any

import pytest

from sluicemq.errors import StoreDamagedError
from sluicemq.record.codec import encode_record
from sluicemq.store import dispatch
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.log import DELAYS_MS, parse_log_record

LOG = "/store/commitlog/" + "0" * 20
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)


def fill(bench: Any, count: int = 30) -> None:
    """Three queues, files rolled over, some of it in queue files."""
    for number in range(count):
        bench.append(b"%d" % number + b"x" * 200, topic="AB"[number % 2], tag="t")
        bench.append(b"%d" % number, queue_id=7)
    bench.store.commit()


def everything(bench: Any) -> dict[tuple[str, int], list[bytes]]:
    return {key: bench.bodies(*key) for key in sorted(bench.store.queues())}


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("flush", ["never", "queues", "checkpoint"])
def test_restart_finds_everything_again(bench: Any, kill: bool, flush: str) -> None:
    store = bench.open()
    fill(bench)
    if flush != "never":
        bench.clock.ms += 2000 if flush == "queues" else 20_000
        store.tick()
        store.sync()
    fill(bench, 10)
    before, end = everything(bench), store.written_offset
    store = bench.reopen(kill=kill)
    assert everything(bench) == before
    assert store.written_offset == store.synced_offset == end
    assert bench.append(b"next", topic="A")[1] == 20
    store.commit()
    assert bench.bodies("A")[-1] == b"next"
    bench.reopen(kill=not kill)
    assert bench.bodies("A")[-1] == b"next"


def test_orderly_stop_leaves_no_abort_and_a_running_store_has_one(bench: Any) -> None:
    store = bench.open()
    assert bench.files.content("/store/abort").isdigit()
    store.close()
    assert not bench.files.exists("/store/abort")
    assert bench.files.exists("/store/lock")
    store.close()  # twice does no harm


def test_orderly_start_does_not_walk_the_log(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open()
    fill(bench)
    walked: list[int] = []
    original = dispatch.sweep_records

    def counting(*args: Any, **options: Any) -> Any:
        for scanned in original(*args, **options):
            walked.append(scanned.position)
            yield scanned

    monkeypatch.setattr(dispatch, "sweep_records", counting)
    store = bench.reopen()
    assert walked == []
    assert (store.recovered.units_added, store.recovered.is_rebuilt) == (0, False)


def test_start_after_a_kill_walks_only_what_lies_behind_the_mark(bench: Any) -> None:
    store = bench.open()
    fill(bench)
    bench.clock.ms += 20_000
    store.tick()
    store.sync()
    bench.send(b"1", b"2", b"3")
    store = bench.reopen(kill=True)
    assert store.recovered.units_added == 3
    assert store.recovered.is_rebuilt is False
    assert bench.reopen(kill=True).recovered.units_added == 3, "nobody waits for a mark"
    bench.store.tick()
    bench.store.sync()
    assert bench.reopen(kill=True).recovered.units_added == 0, "the first tick made one"


def test_units_behind_the_mark_do_not_make_a_start_rebuild_all(bench: Any) -> None:
    """Queue files are written more often than marks are made, so a kill leaves such units. They are
    dropped and put again by the walk; the mark counts only those before it."""
    store = bench.open()
    fill(bench)
    bench.clock.ms += 20_000
    store.tick()
    store.sync()
    mark = read_checkpoint(bench.files, "/store/checkpoint").latest
    bench.send(b"1", b"2", b"3", topic="New")
    bench.clock.ms += 1500
    store.tick()
    assert bench.files.content("/store/consumequeue/New/0/" + "0" * 20).strip(b"\0"), "written"
    assert read_checkpoint(bench.files, "/store/checkpoint").latest == mark
    store = bench.reopen(kill=True)
    assert (store.recovered.units_added, store.recovered.is_rebuilt) == (3, False)
    assert bench.bodies("New") == [b"1", b"2", b"3"]


def test_mark_is_made_after_log_and_queues_are_synced(bench: Any) -> None:
    store = bench.open()
    fill(bench)
    bench.clock.ms += 20_000
    store.tick()
    bench.files.operations.clear()
    store.sync()
    synced = [op.path for op in bench.files.operations if op.kind == "sync"]
    assert synced[-1] == "/store/checkpoint"
    first_queue = next(n for n, path in enumerate(synced) if "consumequeue" in path)
    assert all("commitlog" in path for path in synced[:first_queue])
    mark = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert mark is not None
    assert (mark.log_offset, mark.queues, mark.units) == (store.written_offset, 3, 60)


# --- the tail of the log


def tail(bench: Any, data: bytes) -> None:
    """Write behind the end of the log, as a crash may leave it."""
    end = bench.store.written_offset
    bench.files.open(f"/store/commitlog/{end - end % 4096:020d}").pwrite(data, end % 4096)


def record(bench: Any, place: int, body: bytes = b"phantom") -> bytes:
    return encode_record(
        topic="T",
        queue_id=0,
        queue_offset=2,
        physical_offset=place,
        body=body,
        properties=b"",
        flag=0,
        sys_flag=0,
        born_time_ms=1,
        born_host=HOST,
        store_time_ms=bench.clock.ms,
        store_host=HOST,
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\xff" * 50,
        lambda data: data[:40],
        lambda data: data[:-1],
        lambda data: data[:90] + b"?" + data[91:],
        lambda data: struct.pack(">i", len(data) + 1) + data[4:],
        lambda data: data[:28] + struct.pack(">q", 12345) + data[36:],
        lambda data: data[:56] + bytes(8) + data[64:],
        lambda data: data[:84] + struct.pack(">i", -1) + data[88:],
        lambda data: data[:84] + struct.pack(">i", 1 << 30) + data[88:],
        lambda data: struct.pack(">iI", 17, 0xCBD43194),
        lambda data: b"\0\0\0\x10",
    ],
    ids=[
        "garbage", "cut in the head", "cut at the end", "body", "size", "position", "no time",
        "body length", "long body", "blank of a wrong size", "four bytes",
    ],
)  # fmt: skip
def test_torn_tail_is_cut_and_zeroed(bench: Any, damage: Any) -> None:
    store = bench.open()
    bench.send(b"0", b"1")
    end = store.written_offset
    tail(bench, damage(record(bench, end)) + b"stale" * 20)
    store = bench.reopen(kill=True)
    assert bench.bodies() == [b"0", b"1"]
    assert store.written_offset == end
    assert not any(bench.files.content(LOG)[end:]), "nothing may come back behind a new record"
    bench.send(b"2")
    bench.reopen(kill=True)
    assert bench.bodies() == [b"0", b"1", b"2"]


@pytest.mark.parametrize("topic", ["T", "%RETRY%" + "g" * 150])
@pytest.mark.parametrize("properties", [b"TAGS\x01t\x02", b"n\x01" + b"v" * 253 + b"\x02", b""])
@pytest.mark.parametrize("host", [HOST, bytes(15) + b"\x01" + HOST[4:]])
def test_record_cut_at_any_byte_is_torn(topic: str, properties: bytes, host: bytes) -> None:
    """Also where lengths and CRC agree by chance: behind the body there is no checksum."""
    whole = encode_record(
        topic=topic, queue_id=0, queue_offset=2, physical_offset=100, body=b"body\0\0",
        properties=properties, flag=0, sys_flag=0, born_time_ms=1, born_host=host,
        store_time_ms=256, store_host=host,
    )  # fmt: skip
    assert parse_log_record(memoryview(whole), 0, 100, check_crc=True) is not None
    for size in range(len(whole)):
        cut = whole[:size] + bytes(len(whole) - size)
        if cut != whole:
            assert parse_log_record(memoryview(cut), 0, 100, check_crc=True) is None, size


def test_record_that_lacks_any_sector_is_torn() -> None:
    whole = encode_record(
        topic="T" * 40, queue_id=0, queue_offset=2, physical_offset=0, body=b"b" * 600,
        properties=b"n\x01" + b"v" * 2000 + b"\x02", flag=0, sys_flag=0, born_time_ms=1,
        born_host=HOST, store_time_ms=1, store_host=HOST,
    )  # fmt: skip
    for shift in range(512):  # where in a sector the record begins
        for start in range(-shift, len(whole), 512):
            begin, end = max(start, 0), min(start + 512, len(whole))
            lost = whole[:begin] + bytes(end - begin) + whole[end:]
            if lost != whole:
                found = parse_log_record(memoryview(lost), 0, 0, check_crc=True)
                assert found is None, (shift, start)


def test_stale_bytes_behind_the_end_are_zeroed_after_an_orderly_stop_too(bench: Any) -> None:
    """A torn write over them could mix both to a record that looks whole."""
    store = bench.open()
    bench.send(b"x")
    store.close()
    end = store.written_offset
    bench.files.open(LOG).pwrite(b"\xff" * 300, end + 200)
    bench.open()
    assert bench.files.content(LOG)[end:] == bytes(4096 - end)
    assert bench.bodies() == [b"x"]


def test_whole_record_behind_the_queues_counts(bench: Any) -> None:
    bench.open()
    bench.send(b"0", b"1")
    tail(bench, record(bench, bench.store.written_offset))
    bench.reopen(kill=True)
    assert bench.bodies() == [b"0", b"1", b"phantom"]


def test_stale_record_of_another_place_never_comes_back(bench: Any) -> None:
    """It is whole, and stands exactly where the next record would begin."""
    bench.open()
    bench.send(b"0", b"1")
    tail(bench, record(bench, 0))
    bench.reopen(kill=True)
    assert bench.bodies() == [b"0", b"1"]


def test_files_behind_the_torn_place_are_removed(bench: Any) -> None:
    bench.open()
    fill(bench)
    log_files = bench.files.names("/store/commitlog")
    assert len(log_files) > 2
    bench.files.remove("/store/checkpoint") if bench.files.exists("/store/checkpoint") else None
    bench.files.open(f"/store/commitlog/{log_files[1]}").pwrite(bytes(1024), 1024)
    store = bench.reopen(kill=True)
    assert bench.files.names("/store/commitlog") == log_files[:2]
    assert store.written_offset < int(log_files[1]) + 1024
    assert all(len(bodies) < 30 for bodies in everything(bench).values())


@pytest.mark.parametrize("kill", [True, False])
def test_damage_before_the_mark_stops_the_start_with_a_report(bench: Any, kill: bool) -> None:
    bench.open()
    fill(bench)
    end = bench.store.written_offset
    last = f"/store/commitlog/{end - end % 4096:020d}"
    bench.store.close()
    bench.files.open(last).pwrite(b"\xff" * (end % 4096), 0)
    if kill:
        bench.files.put("/store/abort", b"1")
    before = {path: bench.files.content(path) for path in all_files(bench)}
    with pytest.raises(StoreDamagedError, match=rf"damaged at \d+ .* before {end} was safely"):
        bench.open()
    after = {path: bench.files.content(path) for path in all_files(bench)}
    del after["/store/abort"]  # it holds the process
    before.pop("/store/abort", None)
    assert after == before, "a refused start changes nothing"
    bench.files.remove("/store/checkpoint")  # the cure that it names
    bench.open()
    assert 0 < bench.store.written_offset < end


def all_files(bench: Any, directory: str = "/store") -> list[str]:
    found = []
    for name in bench.files.names(directory):
        path = f"{directory}/{name}"
        found += all_files(bench, path) or [path]
    return found


# --- queues


def lose(bench: Any, path: str) -> None:
    for name in bench.files.names(path):
        lose(bench, f"{path}/{name}")
    bench.files.remove(path)


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize(
    "lost",
    ["consumequeue", "consumequeue/A", "consumequeue/T/7", "consumequeue/T/7/" + "0" * 17 + "400"],
)
def test_missing_or_short_queues_are_built_from_the_log(bench: Any, kill: bool, lost: str) -> None:
    bench.open()
    fill(bench)
    before = everything(bench)
    bench.store.close()
    if kill:
        bench.open()
        bench.files = bench.files.kill()
    lose(bench, f"/store/{lost}")
    store = bench.open()
    assert everything(bench) == before
    assert store.recovered.is_rebuilt
    bench.reopen(kill=kill)
    assert everything(bench) == before


def test_queues_that_claim_more_than_the_log_holds_are_cut(bench: Any) -> None:
    bench.open()
    bench.send(*[b"x"] * 5)
    bench.store.close()
    queue = bench.files.open("/store/consumequeue/T/0/" + "0" * 20)
    queue.pwrite(struct.pack(">qiq", 3000, 93, 0) + struct.pack(">qiq", 1 << 40, 93, 0), 100)
    bench.open()
    assert bench.bodies() == [b"x"] * 5
    assert bench.append()[1] == 5


def test_lost_log_takes_its_queues_along(bench: Any) -> None:
    bench.open()
    bench.send(*[b"x"] * 5)
    bench.store.close()
    lose(bench, "/store/commitlog")
    with pytest.raises(StoreDamagedError, match=r"no file in /store/commitlog.*mounted"):
        bench.open()
    bench.files.remove("/store/checkpoint")  # as with a store of RocketMQ's, or by intent
    store = bench.open()
    assert store.queue_offsets("T", 0) == (0, 0)
    assert bench.send(b"new") == [(0, 0)]
    assert bench.bodies() == [b"new"]


def test_queue_that_begins_late_has_blank_units_before(bench: Any) -> None:
    """As after retention: the log's first record of the queue has offset 27."""
    bench.open()
    data = bytearray(4096)
    first = record(bench, 4096, b"first")
    first = first[:20] + struct.pack(">q", 27) + first[28:]
    data[: len(first)] = first
    bench.store.close()
    bench.files.put(f"/store/commitlog/{4096:020d}", bytes(data))
    bench.files.put("/store/abort", b"1")
    bench.files.remove("/store/checkpoint") if bench.files.exists("/store/checkpoint") else None
    for kill in (True, False):
        bench.open()
        assert bench.store.queue_offsets("T", 0) == (27, 28)
        assert bench.bodies() == [b"first"]
        bench.files = bench.files.kill() if kill else bench.files
        bench.store.close() if not kill else None
    content = bench.files.content(f"/store/consumequeue/T/0/{400:020d}")
    assert content[: 7 * 20] == struct.pack(">qiq", 0, 0x7FFFFFFF, 0) * 7
    assert content[140:160] == struct.pack(">qiq", 4096, len(first), 0)


def test_record_of_a_whole_log_that_claims_too_large_an_offset_is_passed_over(bench: Any) -> None:
    """So many messages cannot have been before it: its offset is damaged, its queue has none."""
    bench.open()
    first = record(bench, 0, b"first")
    first = first[:20] + struct.pack(">q", 1 << 40) + first[28:]
    second = record(bench, len(first), b"second")
    second = second[:20] + struct.pack(">q", 0) + second[28:]
    bench.store.close()
    bench.files.put(LOG, (first + second).ljust(4096, b"\0"))
    bench.files.put("/store/abort", b"1")
    bench.open()
    assert bench.store.queue_offsets("T", 0) == (0, 1)
    assert bench.bodies() == [b"second"]


@pytest.mark.parametrize("singles", [1, 2000])
@pytest.mark.parametrize("topic", ["a/b", "..", "../../elsewhere", "/", "."])
def test_record_whose_topic_can_be_no_directory_is_passed_over(
    bench: Any, topic: str, singles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing covers the topic: a damaged one must not lead out of the store."""
    monkeypatch.setattr(dispatch, "SINGLE_RECORDS_FIRST", singles)
    told: list[str] = []  # not caplog: other tests of a process switch logging off
    monkeypatch.setattr(dispatch.logger, "error", lambda text, *_: told.append(text))
    bench.open()
    bench.send(b"x")
    bench.store.close()
    end = bench.store.written_offset
    for number in range(6):
        data = encode_record(
            topic=topic, queue_id=0, queue_offset=number, physical_offset=end, body=b"b",
            properties=b"", flag=0, sys_flag=0, born_time_ms=1, born_host=HOST,
            store_time_ms=bench.clock.ms, store_host=HOST,
        )  # fmt: skip
        bench.files.open(LOG).pwrite(data, end)
        end += len(data)
    bench.files.put("/store/abort", b"1")
    bench.open()
    bench.send(b"y")
    bench.store.close()
    assert any("is skipped" in text for text in told)
    assert bench.files.names("/store/consumequeue") == ["T"]
    assert not any("elsewhere" in path or "/a/b" in path for path in paths(bench))


def paths(bench: Any, directory: str = "") -> list[str]:
    names = [f"{directory}/{name}" for name in bench.files.names(directory or "/")]
    return names + [path for name in names for path in paths(bench, name)]


def test_topic_that_was_deleted_and_made_again_keeps_its_new_messages(bench: Any) -> None:
    store = bench.open()
    bench.send(b"old 0", b"old 1", b"old 2")
    store.delete_topic("T")
    assert store.queue_offsets("T", 0) == (0, 0)
    assert list(store.queues()) == []
    assert not bench.files.exists("/store/consumequeue/T")
    assert bench.send(b"new 0", b"new 1")[0][1] == 0
    bench.reopen(kill=True)
    assert bench.bodies() == [b"new 0", b"new 1"]
    bench.store.tick()
    bench.store.sync()
    lose(bench, "/store/consumequeue")
    bench.reopen(kill=True)
    assert bench.bodies() == [b"new 0", b"new 1"]


def test_deleting_an_unknown_topic_does_nothing(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    store.delete_topic("nobody")
    assert bench.bodies() == [b"x"]


def codes(bench: Any, topic: str) -> list[int]:
    low, high = bench.store.queue_offsets(topic, 0)
    queue = bench.store._queues.by_key[topic, 0]
    return [queue.unit(offset).tag_code for offset in range(low, high)]


def test_rebuilt_units_are_the_ones_that_were_written(bench: Any) -> None:
    bench.open()
    cases = [
        {"TAGS": "a"},
        {},
        {"XTAGS": "b"},
        {"KEYS": "TAGS", "TAGS": "用户"},
        {"A": "1", "TAGS": "z"},
    ]
    for properties in cases:
        bench.append(tag=properties.get("TAGS", ""), properties=properties)
    # A second TAGS: Java's map keeps the last one.
    bench.store.writer.append("T", 0, b"", b"TAGS\x01a\x02TAGS\x01b", 98, 0, 0, 1, HOST, HOST)
    bench.store.commit()
    before = codes(bench, "T")
    assert before == [97, 0, 0, 954895, 122, 98]
    lose(bench, "/store/consumequeue") if bench.files.exists("/store/consumequeue") else None
    bench.reopen(kill=True)
    assert codes(bench, "T") == before


@pytest.mark.parametrize(("level", "seconds"), [("3", 10), ("18", 7200), ("99", 7200)])
def test_rebuilt_units_of_delayed_messages_hold_their_time(
    bench: Any, level: str, seconds: int
) -> None:
    bench.open()
    bench.send(b"x", topic="SCHEDULE_TOPIC_XXXX", properties={"DELAY": level})
    bench.send(b"y", topic="SCHEDULE_TOPIC_XXXX", properties={"DELAY": "x", "TAGS": "a"})
    bench.reopen(kill=True)
    assert codes(bench, "SCHEDULE_TOPIC_XXXX") == [bench.clock.ms + seconds * 1000, 97]
    assert len(DELAYS_MS) == 18


@pytest.mark.parametrize("singles", [1, 2000])
def test_rebuilt_units_of_delayed_messages_follow_the_configured_levels(
    bench: Any, singles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Singly and in columns: the walk of recovery has both."""
    monkeypatch.setattr(dispatch, "SINGLE_RECORDS_FIRST", singles)
    bench.open(delay_levels="7s 90m")
    for number in range(40):
        level = str(1 + number % 3)
        bench.send(b"x", topic="SCHEDULE_TOPIC_XXXX", properties={"DELAY": level})
    bench.store.close()
    lose(bench, "/store/consumequeue")
    bench.open()
    assert bench.store.recovered.is_rebuilt
    seconds = [7, 5400, 5400] * 13 + [7]
    assert codes(bench, "SCHEDULE_TOPIC_XXXX") == [bench.clock.ms + s * 1000 for s in seconds]


# --- checkpoint


def test_torn_slot_of_the_checkpoint_leaves_the_other(bench: Any) -> None:
    store = bench.open()
    for _ in range(2):
        bench.send(b"x")
        bench.clock.ms += 20_000
        store.tick()
        store.sync()
    newest = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert newest is not None
    at = (1024, 2048)[newest.sequence % 2]
    bench.files.open("/store/checkpoint").pwrite(b"?", at + 30)
    older = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert older is not None
    assert older.sequence == newest.sequence - 1
    bench.reopen(kill=True)
    assert bench.bodies() == [b"x", b"x"]


def test_java_finds_its_times_in_the_checkpoint(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    time = bench.clock.ms
    store.close()
    data = bench.files.content("/store/checkpoint")
    assert len(data) == 4096
    assert struct.unpack_from(">3q", data) == (time, time, time)
    assert read_checkpoint(bench.files, "/store/checkpoint").java_time_ms == time - 3000


def test_store_without_changes_is_not_marked_again(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    for _ in range(3):
        bench.clock.ms += 20_000
        store.tick()
        store.sync()
    bench.files.operations.clear()
    bench.clock.ms += 20_000
    store.tick()
    store.sync()
    assert bench.files.operations == []
