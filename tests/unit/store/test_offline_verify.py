"""`verify` reports what is wrong with a damaged store, where and how severe; and nothing else."""

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError
from sluicemq.files import SYSTEM_FILES, replace_text
from sluicemq.files.identity import (
    NO_RECORD,
    TEXT_BEFORE,
    IdentityFile,
    RecordSource,
    text_checksum,
)
from sluicemq.model.ids import tag_code
from sluicemq.record.codec import encode_properties
from sluicemq.store.directory import read_checkpoint, write_checkpoint
from sluicemq.store.index.file import ENTRY, Geometry
from sluicemq.store.store import Store
from sluicemq.store.tools.dump import Selection, dump_queues, list_queues
from sluicemq.store.tools.index_check import expected_entries
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.repair import repair
from sluicemq.store.tools.verify import VerifyReport, verify
from sluicemq.store.tools.walk import LogWalk, Run

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
HOST_IPV6 = bytes(15) + b"\x01" + struct.pack(">i", 10911)
LOG, QUEUE = 4096, 400
BODY = 300


class HandClock:
    """A clock that a test advances."""

    ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return self.ms / 1000


def config(root: Path) -> StoreConfig:
    return StoreConfig(root=str(root), commit_log_file_bytes=LOG, consume_queue_file_bytes=QUEUE)


def fill(store: Store, count: int = 40, topics: str = "AB") -> list[tuple[str, int, int]]:
    """Append messages with tags, keys and IPv6 hosts.

    Return (topic, physical offset, queue offset) of each.
    """
    sent = []
    for number in range(count):
        topic = topics[number % len(topics)]
        tag = ["", "red", "grün"][number % 3]
        properties = {"UNIQ_KEY": f"{number:032X}", "KEYS": f"k{number} all ä{number}", "n": "1"}
        properties |= {"TAGS": tag} if tag else {}
        host = HOST_IPV6 if number % 5 == 0 else HOST
        place, offset = store.writer.append(
            topic, 0, bytes([number]) * BODY, encode_properties(properties), tag_code(tag), 0, 0,
            1, host, HOST,
        )  # fmt: skip
        sent.append((topic, place, offset))
    store.commit()
    return sent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def sent(root: Path) -> list[tuple[str, int, int]]:
    store = Store.open(config(root))
    try:
        return fill(store)
    finally:
        store.close()


def check(root: Path) -> VerifyReport:
    layout = StoreLayout.find(str(root))
    try:
        return verify(layout)
    finally:
        layout.close()


def kinds(result: VerifyReport, *severities: str) -> set[str]:
    return {kind for severity, kind in result.findings.by_kind if severity in severities}


def bad(result: VerifyReport) -> set[str]:
    return kinds(result, "error", "warning")


def change(root: Path, position: int, data: bytes, directory: str = "commitlog") -> None:
    size = LOG if directory == "commitlog" else QUEUE
    path = root / directory / f"{position - position % size:020d}"
    content = bytearray(path.read_bytes())
    content[position % size : position % size + len(data)] = data
    path.write_bytes(content)


Places = list[tuple[str, int, int]]


def test_keys_behind_entries_that_rocketmq_repeated_are_a_note(root: Path) -> None:
    """RocketMQ was killed after it had continued at an older header, with the second message again.

    The entries that our checkpoint counts end before the last message. A start adds its key.
    """
    settings = config(root)
    store = Store.open(settings)
    for number in range(6):
        properties = encode_properties({"UNIQ_KEY": f"{number:032X}"})
        store.writer.append("A", 0, b"x", properties, 0, 0, 0, 1, HOST, HOST)
    store.commit()
    store.close()
    (path,) = (root / "index").iterdir()
    entries_at = Geometry(settings.index_slots, settings.index_entries).entries_start
    content = bytearray(path.read_bytes())
    second = entries_at + 2 * ENTRY.size
    content[second + ENTRY.size : second + 6 * ENTRY.size] = content[
        second : second + 5 * ENTRY.size
    ]
    path.write_bytes(content)
    (root / "abort").write_text("1")
    result = check(root)
    assert "not-indexed" in kinds(result, "note")
    assert "not-indexed" not in bad(result)


def test_an_undamaged_store_is_clean_and_all_of_it_is_counted(root: Path, sent: Places) -> None:
    result = check(root)
    assert result.findings.is_clean, result.findings.listed
    assert (result.records, result.units) == (40, 40)
    assert result.log_start == 0
    assert result.log_end > sent[-1][1]
    assert len(list((root / "commitlog").iterdir())) > 3


def test_a_changed_body_is_reported_by_its_position(root: Path, sent: Places) -> None:
    _, place, _ = sent[7]
    change(root, place + 150, b"x")
    result = check(root)
    assert [(f.kind, f.place) for f in result.findings.listed if f.severity != "note"] == [
        ("body-crc", f"commitlog {place}")
    ]


@pytest.mark.parametrize("seed", range(12))
def test_repair_finds_damage_where_verify_does(root: Path, sent: Places, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 4)):
        start = sent[rng.randrange(len(sent) - 6)][1] + rng.randrange(400)
        size = rng.choice([1, 1, 4, 40, 900])
        size = min(size, LOG - start % LOG)
        change(root, start, rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)]))
    verified = check(root).findings
    log_kinds = ("damage", "body-crc", "torn-record")
    places = {f.place for f in verified.listed if f.kind in log_kinds and f.severity == "error"}
    repaired = repair(str(root))
    assert {f"commitlog {damaged.start}" for damaged in repaired.damaged} <= places
    assert bool(repaired.damaged) is bool(places)


def test_the_walk_continues_behind_damage_and_lost_messages_are_reported(
    root: Path, sent: Places
) -> None:
    first, last = sent[6], sent[8]
    change(root, first[1], b"\xff" * (last[1] - first[1]))
    result = check(root)
    found = {f.kind: f for f in result.findings.listed if f.severity == "error"}
    assert set(found) == {"damage", "lost-message"}
    assert found["damage"].place == f"commitlog {first[1]}"
    assert f"up to {last[1]}" in found["damage"].text
    assert result.findings.by_kind["error", "lost-message"] == 2
    assert result.records == 38


def test_damage_up_to_the_end_of_a_file_ends_there(root: Path, sent: Places) -> None:
    second = next(place for _, place, _ in sent if place >= LOG)
    before = [place for _, place, _ in sent if place < LOG][-1]
    change(root, before, bytes(LOG - before))
    result = check(root)
    damage = next(f for f in result.findings.listed if f.kind == "damage")
    assert f"up to {second}" in damage.text
    assert result.records == 39


def test_a_missing_file_of_the_log_is_reported(root: Path, sent: Places) -> None:
    (root / "commitlog" / f"{LOG:020d}").unlink()
    result = check(root)
    assert any("a file is missing" in f.text and f.kind == "damage" for f in result.findings.listed)
    assert "lost-message" in bad(result)


def test_a_file_of_another_size_is_reported(root: Path, sent: Places) -> None:
    path = root / "commitlog" / f"{LOG:020d}"
    path.write_bytes(path.read_bytes()[:-1])
    result = check(root)
    assert any(
        f.kind == "file-size" and f.place.endswith(path.name) for f in result.findings.listed
    )


def test_a_copy_of_a_record_at_another_position_is_not_valid(root: Path, sent: Places) -> None:
    place, following = sent[4][1], sent[5][1]
    data = b"".join(p.read_bytes() for p in sorted((root / "commitlog").iterdir()))
    change(root, following, data[place:following][: sent[6][1] - following])
    result = check(root)
    assert any(f"stored position is {place}" in f.text for f in result.findings.listed), (
        result.findings.listed
    )


@pytest.mark.parametrize(
    ("at", "data", "kind"),
    [
        (0, struct.pack(">q", 77), "unit"),
        (8, struct.pack(">i", 9), "unit"),
        (12, struct.pack(">q", 99), "tag-code"),
        (0, bytes(20), "unit"),
        (0, struct.pack(">qiq", 0, 0x7FFFFFFF, 0), "blank-unit"),
        (0, struct.pack(">q", 1 << 40), "unit-behind-log"),
        (12, struct.pack(">q", -(1 << 63)), "extension"),
    ],
)
def test_each_wrong_field_of_a_unit_is_found(
    root: Path, sent: Places, at: int, data: bytes, kind: str
) -> None:
    change(root, 5 * 20 + at, data, "consumequeue/A/0")
    result = check(root)
    assert kind in bad(result), result.findings.listed
    assert any(f.place == "A/0 offset 5" for f in result.findings.listed if f.kind == kind)


def test_a_missing_last_unit_is_an_error_unless_a_broker_may_run(root: Path, sent: Places) -> None:
    change(root, 19 * 20, bytes(20), "consumequeue/A/0")
    assert bad(check(root)) == {"record-without-unit"}
    (root / "abort").write_text("1")
    result = check(root)
    assert result.findings.is_clean
    assert "not-queued-yet" in kinds(result, "note")


def test_bytes_behind_the_last_unit_are_reported(root: Path) -> None:
    store = Store.open(config(root))
    fill(store, 10, "A")
    store.close()
    change(root, 15 * 20 + 3, b"\x05", "consumequeue/A/0")
    assert bad(check(root)) == {"queue-tail"}


def test_records_of_a_deleted_topic_are_a_note(root: Path, sent: Places) -> None:
    store = Store.open(config(root))
    store.delete_topic("A")
    fill(store, 6, "A")
    store.close()
    result = check(root)
    assert result.findings.is_clean, result.findings.listed
    assert result.findings.by_kind["note", "deleted-topic"] == 20


def test_a_queue_without_files_is_reported_if_its_topic_exists(root: Path, sent: Places) -> None:
    for path in (root / "consumequeue" / "B" / "0").iterdir():
        path.unlink()
    (root / "consumequeue" / "B" / "0").rmdir()
    assert check(root).findings.by_kind["error", "record-without-unit"] == 20
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text('{"topicConfigTable":{"A":{}}}')
    assert check(root).findings.is_clean


def test_a_store_that_a_broker_is_writing_is_clean_at_every_moment(root: Path) -> None:
    clock = HandClock()
    small = replace(config(root), commit_log_file_bytes=1 << 16)
    store = Store.open(small, clock=clock)
    for number in range(40):
        fill(store, 12)
        clock.ms += 300
        store.sync()
        store.tick()
        if number % 4 == 0:
            result = check(root)
            assert result.findings.is_clean, result.findings.listed
            assert result.records == 12 * (number + 1)
    store.close()
    assert check(root).findings.is_clean


def test_a_torn_tail_is_a_warning_after_a_crash(root: Path, sent: Places) -> None:
    end = check(root).log_end
    change(root, end, b"\x00\x00\x02\x00\xda\xa3\x20\xa7torn")
    (root / "abort").write_text("1")
    result = check(root)
    assert bad(result) == kinds(result, "warning") == {"tail"}
    assert result.log_end == end


def test_missing_first_file_of_the_log_is_an_error(root: Path, sent: Places) -> None:
    (root / "commitlog" / f"{0:020d}").unlink()
    assert "no retention has deleted" in str(check(root).findings.listed)


def test_a_store_whose_first_files_expired_is_clean(root: Path, sent: Places) -> None:
    checkpoint = str(root / "checkpoint")
    mark = read_checkpoint(SYSTEM_FILES, checkpoint).latest
    assert mark is not None
    write_checkpoint(SYSTEM_FILES, checkpoint, mark._replace(sequence=99, log_start=4096))
    (root / "commitlog" / f"{0:020d}").unlink()
    result = check(root)
    assert result.findings.is_clean, result.findings.listed
    assert result.log_start == LOG


def test_a_missing_queue_file_is_reported(root: Path) -> None:
    store = Store.open(config(root))
    fill(store, 70, "A")
    store.close()
    (root / "consumequeue" / "A" / "0" / f"{QUEUE:020d}").unlink()
    assert {"missing-file", "record-without-unit"} <= bad(check(root))


def test_a_checkpoint_behind_the_end_of_the_log_is_reported(root: Path, sent: Places) -> None:
    for path in sorted((root / "commitlog").iterdir())[-2:]:
        path.write_bytes(bytes(LOG))
    assert {"checkpoint", "unit-behind-log"} <= bad(check(root))


@pytest.mark.parametrize("has_backup", [True, False])
def test_an_unreadable_document_is_reported(root: Path, sent: Places, has_backup: bool) -> None:
    directory = root / "config"
    directory.mkdir(exist_ok=True)
    (directory / "topics.json").write_text('{"topic')
    if has_backup:
        (directory / "topics.json.bak").write_text('{"topicConfigTable":{"A":{},"B":{}}}')
    result = check(root)
    assert ("document" in kinds(result, "error")) is not has_backup
    assert "document" in bad(result)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_document_that_the_broker_has_not_written_is_reported(
    root: Path, sent: Places, is_replaced: bool
) -> None:
    path, text = root / "config" / "consumerOffset.json", '{"offsetTable":{"A@g":{0:2}}}'
    replace_text(SYSTEM_FILES, str(path), text)
    IdentityFile(SYSTEM_FILES, str(path), "").mark_sealed(
        RecordSource(0, lambda *_: b""), NO_RECORD, text_checksum(text), {TEXT_BEFORE: 0}
    )
    if is_replaced:
        path.write_text('{"offsetTable":{"A@g":{0:9}}}')
    texts = [f.text for f in check(root).findings.listed if f.kind == "document"]
    assert ["not what SluiceMQ wrote last" in text for text in texts] == [True] * is_replaced


def test_a_committed_offset_behind_the_end_of_a_queue_is_reported(root: Path, sent: Places) -> None:
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "consumerOffset.json").write_text('{"offsetTable":{"A@g":{0:21}}}')
    result = check(root)
    assert [f.text for f in result.findings.listed if f.kind == "progress"] == [
        "group g is at 21 of A/0, which ends at 20"
    ]


def test_findings_that_are_not_listed_are_counted(root: Path, sent: Places) -> None:
    for _, place, _ in sent:
        change(root, place + 150, b"\xff")
    layout = StoreLayout.find(str(root))
    result = verify(layout, listed_per_kind_max=3)
    layout.close()
    assert result.findings.by_kind["error", "body-crc"] == 40
    assert len([f for f in result.findings.listed if f.kind == "body-crc"]) == 3
    assert result.findings.unlisted_by_kind["body-crc"] == 37


def test_keys_of_many_records_are_hashed_as_java_does(root: Path, sent: Places) -> None:
    def java(text: str) -> int:
        value = 0
        data = text.encode("utf-16-be")
        for at in range(0, len(data), 2):
            value = (value * 31 + int.from_bytes(data[at : at + 2], "big")) & 0xFFFFFFFF
        return abs(value - (1 << 32) if value >> 31 else value)

    layout = StoreLayout.find(str(root))
    found = []
    for run in LogWalk(layout.log):
        if isinstance(run, Run):
            keys = expected_entries(run)
            found += list(zip(keys.positions.tolist(), keys.hashes.tolist(), strict=True))
    layout.close()
    wanted = [
        (place, java(f"{topic}#{key}"))
        for number, (topic, place, _) in enumerate(sent)
        for key in (f"{number:032X}", f"k{number}", "all", f"ä{number}")
    ]
    assert found == wanted


NO_STORES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda p: p / "nowhere", "does not exist"),
    "empty": (lambda p: p, "contains no commit log"),
    "above": (lambda p: _make(p, "store/commitlog"), "Specify "),
    "inside": (lambda p: _make(p, "commitlog") / "commitlog", "the directory above it"),
    "rocksdb": (lambda p: _make(p, "consumequeue_r", "x"), "RocksDB"),
}


def _make(path: Path, directory: str, name: str = f"{0:020d}") -> Path:
    (path / directory).mkdir(parents=True)
    (path / directory / name).write_bytes(b"\0")
    return path


@pytest.mark.parametrize("name", NO_STORES)
def test_a_directory_without_a_store_is_refused_with_a_fix(name: str, tmp_path: Path) -> None:
    make, text = NO_STORES[name]
    with pytest.raises(StoreError, match=text) as caught:
        StoreLayout.find(str(make(tmp_path)))
    assert caught.value.fix


def batch_unit(place: int, size: int, first: int, count: int) -> bytes:
    return struct.pack(">qiqqqhii", place, size, 0, 1_700_000_000_000, first, count, -1, 0)


def test_units_of_batch_queues_are_listed_and_checked(root: Path, sent: Places) -> None:
    data = (root / "commitlog" / f"{0:020d}").read_bytes()
    directory = root / "batchconsumequeue" / "C" / "0"
    directory.mkdir(parents=True)
    units = b"".join(
        batch_unit(place, struct.unpack_from(">i", data, place)[0], 10 * number, 10)
        for number, (_, place, _) in enumerate(sent[:3])
    )
    file = directory / f"{0:020d}"
    file.write_bytes(units.ljust(460, b"\0"))
    assert check(root).findings.is_clean
    layout = StoreLayout.find(str(root))
    (queue,) = list_queues(layout, "C")
    assert (queue.kind, queue.offset_min, queue.offset_max, queue.messages) == ("batch", 0, 30, 30)
    assert [v["offset"] for v in dump_queues(layout, Selection(topic="C", offset_min=15))] == [
        10, 20,
    ]  # fmt: skip
    layout.close()
    file.write_bytes(batch_unit(3, 99, 0, 10).ljust(460, b"\0"))
    assert [f.place for f in check(root).findings.listed if f.severity == "error"] == [
        "C/0 batch 0"
    ]


@pytest.mark.parametrize(
    ("delays", "is_clean"), [((10, 10), True), ((7, 7), True), ((7, 8), False)]
)
def test_delayed_messages_are_due_after_the_time_of_their_level(
    root: Path, delays: tuple[int, int], is_clean: bool
) -> None:
    clock = HandClock()
    store = Store.open(config(root), clock=clock)
    for delay_s in delays:
        properties = encode_properties({"DELAY": "3", "TAGS": "red", "REAL_TOPIC": "A"})
        due_ms = clock.ms + delay_s * 1000
        store.writer.append(
            "SCHEDULE_TOPIC_XXXX", 2, b"body", properties, due_ms, 0, 0, 1, HOST, HOST
        )  # fmt: skip
    store.commit()
    store.close()
    result = check(root)
    assert result.findings.is_clean is is_clean, result.findings.listed
    assert bad(result) <= {"tag-code"}


def test_a_light_queue_that_lacks_a_message_is_reported(root: Path) -> None:
    store = Store.open(config(root))
    multi = {"INNER_MULTI_DISPATCH": "%LMQ%x", "INNER_MULTI_QUEUE_OFFSET": "0"}
    store.writer.append("A", 0, b"body", encode_properties(multi), 0, 0, 0, 1, HOST, HOST)
    store.commit()
    store.close()
    result = check(root)
    assert bad(result) == {"record-without-unit"}
    assert "%LMQ%x/0 offset 0" in {f.place for f in result.findings.listed}
