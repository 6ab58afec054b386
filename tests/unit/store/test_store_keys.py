"""Messages by their keys, as the store finds them; and what the index does on its way."""

import errno
import logging
import struct
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sluicemq.errors import StoreDamagedError
from sluicemq.record.codec import decode_record, encode_properties
from sluicemq.store.index.file import ENTRY, Geometry, IndexFile
from sluicemq.store.index.index import QUERY_BACKLOG_MAX
from waiting import limit

FOREVER = (1 << 63) - 1
INDEX = "/store/index"


def send(bench: Any, body: bytes, keys: str = "", unique: str = "", **options: Any) -> int:
    properties = {}
    if keys:
        properties["KEYS"] = keys
    if unique:
        properties["UNIQ_KEY"] = unique
    ((place, _),) = bench.send(body, properties=properties, **options)
    return int(place)


def bodies(bench: Any, key: str, topic: str = "T", count: int = 64, **options: Any) -> list[bytes]:
    begin, end = options.pop("begin", 0), options.pop("end", FOREVER)
    found = bench.store.keys.find(topic, key, count, begin, end, **options)
    assert found is not None
    assert not found.behind_bytes
    return [decode_record(record).body for record in found.records]


def test_messages_are_found_newest_first_up_to_a_number(bench: Any) -> None:
    bench.open()
    for number in range(5):
        send(bench, b"%d" % number, keys="k")
    assert bodies(bench, "k") == [b"4", b"3", b"2", b"1", b"0"]
    assert bodies(bench, "k", count=2) == [b"4", b"3"]
    assert bodies(bench, "K") == []


def test_a_unique_key_is_not_a_word_of_keys(bench: Any) -> None:
    bench.open()
    send(bench, b"unique", unique="id", keys="other")
    send(bench, b"word", unique="x", keys="a id b")
    assert bodies(bench, "id") == [b"word", b"unique"]
    assert bodies(bench, "id", is_unique=True) == [b"unique"]


def test_a_message_that_bears_a_key_twice_is_found_once(bench: Any) -> None:
    bench.open()
    send(bench, b"x", unique="k", keys="k k")
    assert bodies(bench, "k") == [b"x"]


def test_keys_of_the_same_hash_and_of_other_topics_are_not_mixed_up(bench: Any) -> None:
    bench.open()
    for topic in ("T", "U"):
        for key in ("AaAa", "BBBB", "AaBB"):  # one hash in Java
            send(bench, f"{topic} {key}".encode(), keys=key, topic=topic)
    assert bodies(bench, "BBBB") == [b"T BBBB"]
    assert bodies(bench, "AaBB", topic="U") == [b"U AaBB"]


def test_a_range_of_time_includes_both_its_ends(bench: Any) -> None:
    bench.open()
    start = bench.clock.ms
    for _ in range(4):
        send(bench, str(bench.clock.ms - start).encode(), keys="k")
        bench.clock.ms += 700
    for begin, end, expected in [
        (0, 2100, [b"2100", b"1400", b"700", b"0"]),
        (1, 1400, [b"1400", b"700"]),
        (700, 700, [b"700"]),
        (701, 1399, []),
        (2101, 9000, []),
        (-5, -1, []),
    ]:
        assert bodies(bench, "k", begin=start + begin, end=start + end) == expected


def test_what_readers_do_not_see_yet_is_not_found(bench: Any) -> None:
    store = bench.open(flush_sync=True)
    send(bench, b"x", keys="k")
    assert bodies(bench, "k") == []
    store.publish(store.sync())
    assert bodies(bench, "k") == [b"x"]


def test_rolled_back_messages_have_no_keys_and_prepared_ones_do(bench: Any) -> None:
    bench.open()
    send(bench, b"half", keys="k", topic="HALF", sys_flag=4)
    send(bench, b"gone", keys="k", topic="HALF", sys_flag=12)
    assert bodies(bench, "k", topic="HALF") == [b"half"]


def test_without_an_index_there_is_no_answer_and_no_file(bench: Any) -> None:
    store = bench.open(index_enable=False)
    send(bench, b"x", keys="k")
    assert store.keys.find("T", "k", 1, 0, FOREVER) is None
    store.close()
    assert bench.files.names(INDEX) == []
    bench.open(index_enable=True)
    assert bodies(bench, "k") == [b"x"], "it is built when it is switched on"


def test_an_index_that_was_switched_off_for_a_while_goes_on_where_it_was(bench: Any) -> None:
    bench.open()
    send(bench, b"1", keys="k")
    bench.reopen(index_enable=False)
    send(bench, b"2", keys="k")
    bench.reopen(index_enable=True)
    send(bench, b"3", keys="k")
    assert bodies(bench, "k") == [b"3", b"2", b"1"]
    assert len(bench.files.names(INDEX)) == 1


@pytest.mark.parametrize("kill", [False, True])
def test_missing_index_files_are_built_again(bench: Any, kill: bool) -> None:
    store = bench.open(index_entries=10)
    for number in range(30):
        send(bench, b"%d" % number, keys="k")
    store.tick()
    store.close()
    for name in bench.files.names(INDEX):
        bench.files.remove(f"{INDEX}/{name}")
    if kill:
        bench.files.put("/store/abort", b"1")
    bench.open()
    assert bodies(bench, "k")[0] == b"29"
    assert len(bodies(bench, "k")) == 30


def test_an_index_with_a_hole_is_built_anew(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A Java broker that was killed throws its newest file away, and does not read the whole log
    again: the checkpoint then has no mark of ours that agrees."""
    store = bench.open(index_entries=10)
    for number in range(30):
        send(bench, b"%d" % number, keys="k")
    store.close()
    names = bench.files.names(INDEX)
    assert len(names) == 4
    bench.files.remove(f"{INDEX}/{names[1]}")
    bench.files.remove("/store/checkpoint")
    bench.open()
    with caplog.at_level(logging.WARNING):
        while not bench.store.keys.catch_up():
            pass
    assert "building it again" in caplog.text
    assert len(bodies(bench, "k")) == 30


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_an_older_index_file_that_is_missing_is_noticed_at_the_start(
    bench: Any, lost: int, kill: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.open(index_entries=10)
    for number in range(30):
        send(bench, b"%d" % number, keys="k")
    store.close()
    bench.files.remove(f"{INDEX}/{bench.files.names(INDEX)[lost]}")
    if kill:
        bench.files.put("/store/abort", b"1")
    store = bench.open()
    with caplog.at_level(logging.WARNING):
        while not store.keys.catch_up():
            pass
    assert "building it again" in caplog.text
    assert len(bodies(bench, "k")) == 30
    caplog.clear()
    store = bench.reopen(kill=kill)
    while not store.keys.catch_up():
        pass
    assert "building it again" not in caplog.text
    assert len(bodies(bench, "k")) == 30


@pytest.mark.parametrize("kill", [False, True])
def test_index_files_that_retention_removed_are_not_missed(
    bench: Any, kill: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench.files.clock = bench.clock
    store = bench.open(index_entries=10, delete_files_max=1)
    for number in range(60):
        send(bench, b"%d" % number + bytes(200), keys="k")
    store.keys.catch_up()
    bench.clock.ms += 20_000
    store.tick()
    store.sync()
    names = bench.files.names(INDEX)
    bench.clock.ms += 100 * 3_600_000
    store.retention.request_manual_run()
    for step in store.retention.clean():
        step() if callable(step) else None
    assert bench.files.names(INDEX) == names[1:]
    bench.reopen(kill=kill)
    while not bench.store.keys.catch_up():
        pass
    assert "building it again" not in caplog.text
    assert bench.files.names(INDEX) == names[1:]
    assert bodies(bench, "k")


def test_an_index_of_others_that_is_complete_is_kept(bench: Any) -> None:
    store = bench.open(index_entries=10)
    for number in range(30):
        send(bench, b"%d" % number, keys="k" if number % 3 else "")
    store.close()
    before = {name: bench.files.content(f"{INDEX}/{name}") for name in bench.files.names(INDEX)}
    bench.files.remove("/store/checkpoint")
    store = bench.open()
    while not store.keys.catch_up():
        pass
    store.close()
    after = {name: bench.files.content(f"{INDEX}/{name}") for name in bench.files.names(INDEX)}
    assert after == before


def test_a_log_that_is_shorter_than_its_index_is_followed(bench: Any) -> None:
    """A log brought back from a copy."""
    bench.open()
    send(bench, b"1", keys="k")
    bench.store.close()
    log = bench.files.content("/store/commitlog/00000000000000000000")
    bench.open()
    for number in (2, 3):
        send(bench, b"%d" % number, keys="k")
    bench.store.close()
    bench.files.put("/store/commitlog/00000000000000000000", log)
    for path in ("/store/checkpoint", "/store/consumequeue/T/0/00000000000000000000"):
        bench.files.remove(path)
    bench.open()
    assert bodies(bench, "k") == [b"1"]
    send(bench, b"4", keys="k")
    assert bodies(bench, "k") == [b"4", b"1"]


def test_files_go_when_the_log_before_them_is_gone(bench: Any) -> None:
    store = bench.open(index_entries=10)
    places = [send(bench, b"%d" % number, keys="k") for number in range(30)]
    assert len(bodies(bench, "k")) == 30
    assert len(bench.files.names(INDEX)) == 4
    for start, left in ((places[8], 4), (places[9], 3), (1 << 40, 1)):
        store.keys.drop_files_before(start)
        assert len(bench.files.names(INDEX)) == left, "the last one stays"
    assert bodies(bench, "k") == [b"29", b"28", b"27"]


def test_a_name_is_later_than_the_last_one_when_the_clock_goes_back(bench: Any) -> None:
    bench.open(index_entries=3)
    for _ in range(6):
        send(bench, b"x", keys="k")
        assert bodies(bench, "k")
        bench.clock.ms -= 3_600_000
    names = bench.files.names(INDEX)
    assert names == sorted(set(names))
    assert all(len(name) == 17 for name in names)
    assert len(bodies(bench, "k")) == 6


@pytest.mark.parametrize("kill", [False, True])
def test_a_new_file_never_bears_the_name_in_the_mark(bench: Any, kill: bool) -> None:
    """After a crash the mark would vouch for a file that it does not know. Only one history in
    some thousands notices it: hence by itself."""
    bench.open()
    send(bench, b"x", keys="k")
    bench.store.close()
    (marked,) = bench.files.names(INDEX)
    bench.files.remove(f"{INDEX}/{marked}")
    if kill:
        bench.files.put("/store/abort", b"1")
    bench.open()
    assert bodies(bench, "k") == [b"x"]
    (name,) = bench.files.names(INDEX)
    assert int(name) > int(marked)


def test_what_rocketmq_wrote_again_before_it_was_killed_takes_no_key_away(bench: Any) -> None:
    """Its header, flushed once a minute, is older than our mark: RocketMQ goes on there, with the
    last record of the header once more. The mark, which it leaves, counts other entries."""
    bench.open()
    for number in range(6):
        send(bench, b"%d" % number, unique=f"u{number}", keys="k")
    bench.store.close()
    at = Geometry(bench.config.index_slots, bench.config.index_entries).entries_start
    (name,) = bench.files.names(INDEX)
    with closing(bench.files.open(f"{INDEX}/{name}")) as file:
        # From the third entry, the first one of the second message, on: two places further.
        for number in range(12, 2, -1):
            *entry, before = ENTRY.unpack(file.pread(ENTRY.size, at + number * ENTRY.size))
            before = before + 2 if before else 3 if number == 3 else 0
            file.pwrite(ENTRY.pack(*entry, before), at + (number + 2) * ENTRY.size)
    bench.files.put("/store/abort", b"1")
    bench.open()
    assert bodies(bench, "k") == [b"5", b"4", b"3", b"2", b"1", b"0"]
    assert bodies(bench, "u5", is_unique=True) == [b"5"]


def test_a_file_of_another_size_is_read_when_its_sizes_can_be_told(bench: Any) -> None:
    bench.open(index_slots=7, index_entries=28)
    send(bench, b"x", keys="k")
    bench.reopen(index_slots=100, index_entries=400)
    assert bodies(bench, "k") == [b"x"]
    send(bench, b"y", keys="k")
    assert bodies(bench, "k") == [b"y", b"x"]


def test_a_file_of_unknown_sizes_is_said_with_the_settings_to_change(bench: Any) -> None:
    bench.open(index_slots=7, index_entries=30)
    send(bench, b"x", keys="k")
    bench.store.close()
    with pytest.raises(StoreDamagedError, match="maxHashSlotNum=7 and maxIndexNum=28 require 628"):
        bench.open(index_slots=7, index_entries=28)
    bench.open(index_slots=7, index_entries=30)
    assert bodies(bench, "k") == [b"x"]


def test_a_query_does_not_wait_for_an_index_that_is_far_behind(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 25, index_slots=100, index_entries=400)
    for _ in range(5):
        bench.send(bytes(4 << 20), properties={"KEYS": "k"})
    assert store.keys.backlog_bytes > QUERY_BACKLOG_MAX
    assert not store.keys.is_nearly_current
    found = store.keys.find("T", "k", 1, 0, FOREVER)
    assert found.records == []
    assert found.behind_bytes == store.keys.backlog_bytes
    while not store.keys.catch_up():
        pass
    assert len(bodies(bench, "k")) == 5


def test_work_is_done_in_slices(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 24, index_slots=100, index_entries=400)
    for _ in range(40):
        bench.send(bytes(100_000), properties={"KEYS": "k"})
    before = store.keys.backlog_bytes
    assert not store.keys.catch_up(200_000)
    assert 100_000 < before - store.keys.backlog_bytes <= 300_100


def test_rocketmq_finds_a_file_that_it_may_go_on_with_after_a_kill(bench: Any) -> None:
    """spec/store.md §4, §7: it keeps files up to the checkpoint's time of the index, and reads the
    log again from the checkpoint's other times on."""
    store = bench.open()
    send(bench, b"1", keys="k")
    for _ in range(3):
        bench.clock.ms += 11_000
        store.tick()
        store.sync()
    flushed = struct.unpack_from(">3q", bench.files.content("/store/checkpoint"))
    (name,) = bench.files.names(INDEX)
    header = struct.unpack_from(">qqqqii", bench.files.content(f"{INDEX}/{name}"))
    assert header[5] == 2
    assert header[1] <= flushed[2]
    assert min(flushed[:2]) <= flushed[2]
    send(bench, b"2", keys="k")
    bench.clock.ms += 11_000
    store.tick()
    store.sync()
    later = struct.unpack_from(">3q", bench.files.content("/store/checkpoint"))
    assert min(later[:2]) <= flushed[2], "what the file lacks is read again"


def test_an_index_that_is_being_flushed_elsewhere_stands_still_until_it_is_done(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile: it indexes nothing, and what it wrote is found afterwards."""
    store = bench.open()
    send(bench, b"1", keys="k")
    assert bodies(bench, "k") == [b"1"]
    bench.clock.ms += 61_000
    store.tick()
    assert store.keys.is_flush_due
    flush, began, may_end = IndexFile.flush, threading.Event(), threading.Event()

    def slow_flush(file: IndexFile) -> bool:
        began.set()
        assert may_end.wait(limit(10))
        return flush(file)

    monkeypatch.setattr(IndexFile, "flush", slow_flush)
    thread = threading.Thread(target=store.keys.flush_due)
    thread.start()
    assert began.wait(limit(10))
    send(bench, b"2", keys="k")
    assert store.keys.catch_up(), "nothing to be done now"
    assert store.keys.backlog_bytes > 0
    may_end.set()
    thread.join(limit(10))
    (name,) = bench.files.names(INDEX)
    header = struct.unpack_from(">qqqqii", bench.files.content(f"{INDEX}/{name}"))
    assert header[5] == 2, "one entry: the second message is not in it"
    assert bodies(bench, "k") == [b"2", b"1"]


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("written", [0, 4, 100])
def test_a_flush_that_fails_at_the_stop_loses_no_key(bench: Any, after: int, written: int) -> None:
    """What arrived of slots and header does not matter: the entries do."""
    bench.open(index_slots=100, index_entries=400)
    for number in range(3):
        send(bench, b"%d" % number, keys=f"k{number} k")
    bench.reopen()
    for number in range(3, 9):
        send(bench, b"%d" % number, keys=f"k{number} k")
    bench.store.keys.catch_up()
    bench.files.fail_next("write", errno.EIO, path_part="index", after=after, written=written)
    bench.store.close()
    bench.files.clear_faults()
    bench.open()
    assert bodies(bench, "k") == [b"%d" % number for number in reversed(range(9))]
    assert [bodies(bench, f"k{number}") for number in range(9)] == [[b"%d" % n] for n in range(9)]


def test_a_store_that_rocketmq_stopped_is_not_lost_to_it_by_a_kill_at_once(bench: Any) -> None:
    """RocketMQ's own checkpoint says the time of the index only when a file is full."""
    bench.open()
    send(bench, b"1", keys="k")
    bench.store.close()
    times = struct.unpack_from(">q", bench.files.content("/store/checkpoint"))
    bench.files.put("/store/checkpoint", struct.pack(">3q", *times, *times, 0) + bytes(4072))
    bench.open()
    bench.files = bench.files.kill()
    (name,) = bench.files.names(INDEX)
    header = struct.unpack_from(">qqqqii", bench.files.content(f"{INDEX}/{name}"))
    index_time = struct.unpack_from(">q", bench.files.content("/store/checkpoint"), 16)[0]
    assert 0 < header[1] <= index_time
    bench.open()
    assert bodies(bench, "k") == [b"1"]


def test_an_index_file_that_cannot_be_removed_stops_nothing(bench: Any) -> None:
    store = bench.open(index_entries=10)
    for number in range(30):
        send(bench, b"%d" % number, keys="k")
    assert len(bodies(bench, "k")) == 30
    bench.files.fail_next("remove", path_part="/index/")
    for tell in store.retention.on_start_moved:
        tell(1 << 40)
    assert len(bench.files.names(INDEX)) == 4
    for tell in store.retention.on_start_moved:
        tell(1 << 40)
    assert len(bench.files.names(INDEX)) == 1


def test_times_of_many_messages_of_one_moment_are_searched_to_the_millisecond(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1 << 20, consume_queue_file_bytes=20_000)
    start = bench.clock.ms
    for _ in range(5):
        bench.send(*[b"x"] * 100)
        bench.clock.ms += 10
    for turn in range(5):
        at = start + 10 * turn
        assert store.reader.offset_by_time("T", 0, at, "lower") == 100 * turn
        assert store.reader.offset_by_time("T", 0, at, "upper") == 100 * turn + 99
        assert store.reader.offset_by_time("T", 0, at + 1, "lower") == 100 * (turn + 1)
        assert store.reader.offset_by_time("T", 0, at - 1, "upper") == max(100 * turn - 1, 0)
    assert store.reader.earliest_time_ms("T", 0) == store.reader.earliest_time_ms() == start
    assert store.reader.latest_time_ms("T", 0) == store.reader.latest_time_ms() == start + 40
    assert (store.reader.latest_time_ms("T", 1), store.reader.latest_time_ms("U", 0)) == (-1, -1)


NO_NUMPY = """
import sys
from sluicemq.config import StoreConfig
from sluicemq.store.store import Store
store = Store.open(StoreConfig(root=sys.argv[1], commit_log_file_bytes=1 << 20))
for _ in range(3):
    store.tick()
    store.keys.catch_up()
assert store.keys.find("T", "k", 1, 0, 1 << 62).records == []
store.close()
assert "numpy" not in sys.modules
"""


def test_a_store_without_new_messages_does_not_load_numpy(tmp_path: Path) -> None:
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", NO_NUMPY, str(tmp_path)], check=True, timeout=limit(60)
        )


def test_properties_are_as_the_codec_writes_them() -> None:
    """The tests above rely on it."""
    assert encode_properties({"KEYS": "a b"}) == b"KEYS\x01a b\x02"
