"""Repair keeps valid records at their positions and reports lost messages; readers read on."""

import json
import random
import struct
from typing import Any

import pytest

from sluicemq.errors import StoreDamagedError, StoreError, StoreLockedError
from sluicemq.files import read_text, replace_text
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.log import PLACEHOLDER_CODE, PLACEHOLDER_NAME, CommitLog
from sluicemq.store.tools.repair import LostRange, RepairReport, repair

LOG = "/store/commitlog/"
QUEUES = (("A", 0), ("A", 1), ("B", 0))
DELAYED = "SCHEDULE_TOPIC_XXXX"


def fill(bench: Any, count: int = 40, size: int = 200) -> list[tuple[str, int, int, int, bytes]]:
    """Append messages to three queues. Return (topic, queue, offset, position, body) of each."""
    bench.open()
    sent = []
    for number in range(count):
        topic, queue_id = QUEUES[number % 3]
        body = b"%04d" % number + bytes([number % 251]) * (number % size)
        position, offset = bench.append(body, topic=topic, queue_id=queue_id, tag="t")
        sent.append((topic, queue_id, offset, position, body))
        if number % 5 == 4:
            bench.store.commit()
    bench.store.close()
    return sent


def run(bench: Any, **options: Any) -> RepairReport:
    return repair("/store", files=bench.files, stamp="now", **options)


def overwrite(bench: Any, position: int, data: bytes) -> None:
    for at, byte in enumerate(data, position):
        base = at - at % 4096
        bench.files.open(f"{LOG}{base:020d}").pwrite(bytes([byte]), at % 4096)


def read_all(bench: Any, key: tuple[str, int]) -> dict[int, bytes]:
    """Read a queue to its end. Return offset -> body of the messages."""
    low, high = bench.store.queue_offsets(*key)
    found: dict[int, bytes] = {}
    offset = low
    while offset < high:
        result = bench.store.reader.read(*key, offset, 32)
        assert result.next_offset > offset, "the reader makes no progress"
        for message in _decode(b"".join(result.data)):
            assert (message.topic, message.queue_id) == key
            found[message.queue_offset] = message.body
        offset = result.next_offset
    return found


def _decode(data: bytes) -> list[Any]:
    from sluicemq.record.codec import decode_records

    return decode_records(data)


def log_positions(bench: Any) -> set[int]:
    log = CommitLog(bench.files, "/store/commitlog", 4096)
    log.segments.load(removes=False)
    return {record.position for record in log.scan(0)}


def all_files(bench: Any, directory: str = "/store") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in bench.files.names(directory):
        path = f"{directory}/{name}"
        inside = all_files(bench, path)
        found |= inside or {path: bench.files.content(path)}
    return found


def test_an_undamaged_store_is_not_changed(bench: Any) -> None:
    fill(bench)
    before = all_files(bench)
    for write in (False, True):
        report = run(bench, write=write)
        assert report.is_sound
        assert (report.records, report.messages_lost, report.is_written) == (40, 0, False)
        after = all_files(bench)
        after.pop("/store/lock"), before.pop("/store/lock", None)
        assert after == before


def test_a_damaged_body_loses_only_that_message(bench: Any) -> None:
    sent = fill(bench)
    topic, queue_id, offset, position, _ = sent[17]
    overwrite(bench, position + 90, b"??")
    before = all_files(bench)
    report = run(bench)
    assert all_files(bench) == before, "without write nothing changes"
    assert [(d.start, d.messages_lost) for d in report.damaged] == [(position, 1)]
    assert "CRC" in report.damaged[0].reason
    assert report.lost == [LostRange(topic, queue_id, offset, offset)]
    report = run(bench, write=True)
    assert report.is_written
    assert report.not_placed == []
    for kill in (False, True):
        bench.open()
        for key in QUEUES:
            expected = {
                o: b
                for t, q, o, _, b in sent
                if (t, q) == key and (t, q, o) != (topic, queue_id, offset)
            }
            assert read_all(bench, key) == expected
        assert bench.store.recovered.is_rebuilt is False
        if kill:
            bench.files = bench.files.kill()
        else:
            bench.store.close()
    assert run(bench).is_sound
    places = log_positions(bench)
    assert all(position in places for *_, position, _ in sent), "every record is at its position"


def test_repair_moves_the_files_of_a_replica_to_the_backup(bench: Any) -> None:
    sent = fill(bench)
    bench.files.make_directory("/store/config")
    names = ("replica.json", "epochFileCheckpoint", "config/sluiceReplicas.json")
    for name in names:
        replace_text(bench.files, f"/store/{name}", name)
    run(bench, write=True)
    assert all(bench.files.exists(f"/store/{name}") for name in names), "nothing was changed"
    overwrite(bench, sent[5][3] + 4, b"\xff" * 30)
    run(bench)
    assert all(bench.files.exists(f"/store/{name}") for name in names)
    run(bench, write=True)
    assert not any(bench.files.exists(f"/store/{name}") for name in names)
    files = bench.files.kill()
    for name in names:
        moved = f"/store/repair-now/{name.rpartition('/')[2]}"
        assert read_text(files, moved) == name


def test_the_backup_contains_the_overwritten_bytes(bench: Any) -> None:
    sent = fill(bench)
    overwrite(bench, sent[5][3] + 4, b"\xff" * 30)
    before = all_files(bench)
    report = run(bench, write=True)
    assert report.backup == "/store/repair-now"
    lines = bench.files.content("/store/repair-now/manifest.jsonl").decode().splitlines()
    saved = bench.files.content("/store/repair-now/overwritten.bin")
    after = all_files(bench)
    for line in reversed(lines):
        fact = json.loads(line)
        path = f"/store/{fact['file']}"
        content = bytearray(after[path])
        start = fact["backup_offset"]
        old = saved[start : start + fact["size_bytes"]]
        content[fact["offset"] : fact["offset"] + len(old)] = old
        after[path] = bytes(content)
    for path, content in before.items():
        if path not in ("/store/checkpoint", "/store/lock", "/store/replica.json"):
            assert after[path] == content, path
    report_file = json.loads(bench.files.content("/store/repair-now/report.json"))
    assert report_file["lost"] == [r._asdict() for r in report.lost]


def test_placeholders_keep_offsets_when_queues_are_built_again(bench: Any) -> None:
    sent = fill(bench)
    for number in (3, 4, 5, 20):
        overwrite(bench, sent[number][3], bytes(60))
    assert run(bench, write=True).messages_lost == 4
    bench.open()
    bench.store.close()
    for topic in bench.files.names("/store/consumequeue"):
        for queue_id in bench.files.names(f"/store/consumequeue/{topic}"):
            for name in bench.files.names(f"/store/consumequeue/{topic}/{queue_id}"):
                bench.files.remove(f"/store/consumequeue/{topic}/{queue_id}/{name}")
    bench.open()
    assert bench.store.recovered.is_rebuilt
    lost = {sent[number][:3] for number in (3, 4, 5, 20)}
    for key in QUEUES:
        expected = {o: b for t, q, o, _, b in sent if (t, q) == key and (t, q, o) not in lost}
        assert read_all(bench, key) == expected


def test_a_placeholder_is_marked_as_one(bench: Any) -> None:
    sent = fill(bench)
    overwrite(bench, sent[9][3], bytes(60))
    run(bench, write=True)
    log = CommitLog(bench.files, "/store/commitlog", 4096)
    log.segments.load()
    record = next(r for r in log.scan(sent[9][3]))
    assert (record.topic, record.queue_id, record.queue_offset) == (b"A", 0, sent[9][2])
    assert record.properties == f"{PLACEHOLDER_NAME}\x011\x02".encode()
    assert record.is_placeholder
    assert record.tag_code() == PLACEHOLDER_CODE


@pytest.mark.parametrize("cut", [0, 1, 100, 4095])
def test_a_missing_or_short_file_is_filled(bench: Any, cut: int) -> None:
    sent = fill(bench, 150)
    names = bench.files.names(LOG[:-1])
    assert len(names) > 2
    path = LOG + names[1]
    data = bench.files.content(path)
    bench.files.remove(path)
    if cut:
        bench.files.put(path, data[:cut])
    with pytest.raises(StoreDamagedError):
        bench.open()
    bench.files.remove("/store/lock")
    report = run(bench, write=True)
    assert report.bad_files
    assert bool(report.damaged) == (cut < 4095), "the last byte of that file was not in use"
    bench.open()
    for key in QUEUES:
        found = read_all(bench, key)
        for topic, queue_id, offset, position, body in sent:
            if (topic, queue_id) == key and (position + 95 + len(body) <= 4096 or position >= 8192):
                assert found[offset] == body
        assert (
            bench.store.queue_offsets(*key)[1]
            == max(o for t, q, o, *_ in sent if (t, q) == key) + 1
        )


def test_a_damaged_end_that_was_durable_keeps_its_offsets(bench: Any) -> None:
    sent = fill(bench)
    overwrite(bench, sent[-2][3], b"\xff" * 100)
    overwrite(bench, sent[-1][3], b"\xff" * 100)
    with pytest.raises(StoreDamagedError, match="sluice store repair"):
        bench.open()
    report = run(bench, write=True)
    assert {(r.topic, r.queue_id, r.first) for r in report.lost} == {s[:3] for s in sent[-2:]}
    bench.open()
    for topic, queue_id, offset, *_ in sent[-2:]:
        assert bench.store.queue_offsets(topic, queue_id)[1] == offset + 1
        assert bench.append(b"new", topic=topic, queue_id=queue_id)[1] == offset + 1
    bench.store.commit()
    assert read_all(bench, ("A", 0))[14] == b"new"
    bench.reopen(kill=True)
    assert read_all(bench, ("A", 0))[14] == b"new"


def test_a_missing_last_file_is_created_again(bench: Any) -> None:
    sent = fill(bench, 60)
    names = bench.files.names(LOG[:-1])
    end = bench.store.written_offset
    for name in names:
        if int(name) >= end - end % 4096:
            bench.files.remove(LOG + name)
    with pytest.raises(StoreDamagedError):
        bench.open()
    run(bench, write=True)
    bench.open()
    for key in QUEUES:
        assert (
            bench.store.queue_offsets(*key)[1]
            == max(o for t, q, o, *_ in sent if (t, q) == key) + 1
        )
        read_all(bench, key)


def test_a_torn_tail_is_not_damage(bench: Any) -> None:
    fill(bench)
    end = bench.store.written_offset
    overwrite(bench, end, b"\xff" * 20)
    report = run(bench)
    assert report.is_sound
    assert report.tail_bytes == 20
    assert report.log_end == end


def test_wrong_and_missing_units_are_repaired(bench: Any) -> None:
    sent = fill(bench)
    path = "/store/consumequeue/A/0/" + "0" * 20
    bench.files.open(path).pwrite(struct.pack(">qiq", 77, 99, 1), 40)
    for name in bench.files.names("/store/consumequeue/B/0"):
        bench.files.remove(f"/store/consumequeue/B/0/{name}")
    bench.files.remove("/store/consumequeue/B/0")
    report = run(bench)
    assert (report.wrong_units, report.missing_queues, report.messages_lost) == (1 + 13, 1, 0)
    run(bench, write=True)
    bench.open()
    assert not bench.store.recovered.is_rebuilt
    for key in QUEUES:
        assert read_all(bench, key) == {o: b for t, q, o, _, b in sent if (t, q) == key}


def fill_delayed(bench: Any) -> list[tuple[int, int, int]]:
    """Append delayed messages with other delay levels than the default. Return their units."""
    bench.open(delay_levels="7s 90m")
    for number in range(6):
        bench.append(b"%d" % number, topic=DELAYED, properties={"DELAY": str(1 + number % 2)})
        bench.store.writer.delay_last_message(DELAYED, 0, (7_000, 5_400_000)[number % 2])
    bench.store.commit()
    bench.store.close()
    return delayed_units(bench)


def delayed_units(bench: Any) -> list[tuple[int, int, int]]:
    content = bench.files.content(f"/store/consumequeue/{DELAYED}/0/" + "0" * 20)
    return list(struct.iter_unpack(">qiq", content))[:6]


def test_due_times_of_other_delay_levels_are_not_changed(bench: Any) -> None:
    units = fill_delayed(bench)
    assert run(bench).is_sound
    bench.files.open(f"/store/consumequeue/{DELAYED}/0/" + "0" * 20).pwrite(b"\xff" * 20, 40)
    assert run(bench, write=True, delay_levels_ms=(7_000, 5_400_000)).wrong_units == 1
    assert delayed_units(bench) == units


def test_a_code_that_is_not_a_due_time_is_repaired(bench: Any) -> None:
    units = fill_delayed(bench)
    path = f"/store/consumequeue/{DELAYED}/0/" + "0" * 20
    bench.files.open(path).pwrite(struct.pack(">q", 97), 32)
    assert run(bench, write=True, delay_levels_ms=(7_000, 5_400_000)).wrong_units == 1
    assert delayed_units(bench) == units


def test_first_messages_of_a_queue_are_lost_even_without_units(bench: Any) -> None:
    """The log is complete from its beginning, so it contained what the queue lacks at its front."""
    sent = [item for item in fill(bench) if item[:2] == ("A", 0)]
    for item in sent[:2]:
        overwrite(bench, item[3], b"\xff" * 50)
    path = "/store/consumequeue/A/0/" + "0" * 20
    bench.files.open(path).pwrite(bytes(40), 0)
    report = run(bench, write=True)
    assert report.lost == [LostRange("A", 0, 0, 1)]
    assert run(bench).is_sound
    bench.open()
    assert not bench.store.recovered.is_rebuilt
    assert read_all(bench, ("A", 0)) == {item[2]: item[4] for item in sent[2:]}


def test_units_before_a_queue_that_begins_late_are_blank_after_a_repair(bench: Any) -> None:
    """The first files of the log are missing, and the queue files are zeros there."""
    sent = fill(bench)
    bench.files.remove(LOG + "0" * 20)
    left = [item for item in sent if item[:2] == ("A", 0) and item[3] >= 4096]
    path = "/store/consumequeue/A/0/" + "0" * 20
    bench.files.open(path).pwrite(bytes(20 * left[0][2]), 0)
    report = run(bench, write=True)
    assert (report.lost, report.wrong_units) == ([], left[0][2])
    bench.open()
    assert bench.store.queue_offsets("A", 0) == (left[0][2], left[-1][2] + 1)
    assert read_all(bench, ("A", 0)) == {item[2]: item[4] for item in left}


def test_damaged_unit_does_not_make_a_message_lost(bench: Any) -> None:
    sent = fill(bench)
    overwrite(bench, sent[20][3], b"\xff" * 50)
    unit = struct.pack(">qiq", sent[20][3], 100, 1)
    bench.files.open("/store/consumequeue/A/0/" + "0" * 20).pwrite(unit, 40)
    report = run(bench, write=True)
    assert report.lost == [LostRange(*sent[20][:2], sent[20][2], sent[20][2])]
    bench.open()
    assert read_all(bench, ("A", 0))[2] == next(
        b for t, q, o, _, b in sent if (t, q, o) == ("A", 0, 2)
    )


def test_repair_refuses_a_running_broker_and_a_wrong_directory(bench: Any) -> None:
    fill(bench)
    bench.open()
    with pytest.raises(StoreLockedError):
        run(bench, write=True)
    assert run(bench).is_sound, "finding damage needs no lock"
    with pytest.raises(StoreError, match="does not exist"):
        repair("/elsewhere", files=bench.files)


def test_an_interrupted_repair_is_completed_by_the_next(bench: Any) -> None:
    sent = fill(bench)
    overwrite(bench, sent[9][3], b"\xff" * 50)
    overwrite(bench, sent[30][3], b"\xff" * 50)
    damaged = bench.files
    rng = random.Random(1)
    for step in range(1, 12):
        bench.files = damaged.kill()
        bench.files.fail_next(
            "sync", 5, path_part=["repair", "commitlog", "consumequeue"][step % 3]
        )
        try:
            run(bench, write=True)
        except OSError:
            bench.files = bench.files.crash(rng)
            run(bench, write=True)
        bench.open()
        for key in QUEUES:
            found = read_all(bench, key)
            expected = {o: b for t, q, o, _, b in sent if (t, q) == key}
            missing = expected.keys() - found.keys()
            assert missing <= {sent[9][2], sent[30][2]}
            assert all(found[o] == expected[o] for o in found)


def test_the_checkpoint_after_a_repair_is_new_and_keeps_the_index(bench: Any) -> None:
    sent = fill(bench)
    before = read_checkpoint(bench.files, "/store/checkpoint").latest
    overwrite(bench, sent[9][3], b"\xff" * 50)
    run(bench, write=True)
    after = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert before is not None
    assert after is not None
    assert after.sequence == before.sequence + 1
    assert after._replace(sequence=0) == before._replace(sequence=0)
