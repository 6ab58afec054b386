"""Columns find exactly what the scalar scan finds, and end no later than it does."""

import random
import struct
from typing import Any

import pytest

from sluicemq.record.codec import encode_record
from sluicemq.record.layout import MAGIC_BLANK
from sluicemq.store import dispatch
from sluicemq.store import log as scan
from sluicemq.store.bulk import Sweep, unverified_heads
from sluicemq.store.dispatch import sweep_records
from sluicemq.store.log import CommitLog, LogRecord
from sluicemq.testing.files import CrashableFiles

pytestmark = pytest.mark.slow

FILE_BYTES = 1 << 17
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
HOST_IPV6 = bytes(range(16)) + struct.pack(">i", 10911)
PROPERTIES = (
    b"TAGS\x01blue\x02KEYS\x01k\x02",
    b"KEYS\x01TAGS\x02TAGS\x01a",
    b"A\x011\x02TAGS\x01" + b"t" * 30 + b"\x02",
    b"",
    b"XTAGS\x01no\x02",
    "TAGS\x01用户\x02".encode(),
    b"TAGS\x01a\x02TAGS\x01b\x02",
    b"TAGS\x01\x02",
    b"TAGS\x01x\x01y\x02",
    b"binary\x01\0\0\x02TAGS\x01z\x02",
    b"INNER_MULTI_DISPATCH\x01%LMQ%q,Other\x02INNER_MULTI_QUEUE_OFFSET\x017,9\x02TAGS\x01m\x02",
    b"ICE_LOST\x011\x02",
)
TOPICS = ["A", "B", *(f"Topic{n}" for n in range(12)), "SCHEDULE_TOPIC_XXXX", "%RETRY%" + "g" * 150]


@pytest.fixture(autouse=True)
def columns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SINGLE_RECORDS_FIRST", 20)
    monkeypatch.setattr(dispatch, "SINGLE_RECORDS_BETWEEN", 5)


def record(rng: random.Random, position: int, offset: int, kind: str) -> bytes:
    plain = kind == "plain"
    return encode_record(
        topic="A" if plain else rng.choice(TOPICS),
        queue_id=rng.randrange(4),
        queue_offset=offset,
        physical_offset=position,
        body=rng.randbytes(100 if kind != "sizes" else rng.randrange(300)),
        properties=PROPERTIES[0]
        if plain
        else rng.choice(PROPERTIES[: 9 if kind == "sizes" else 12]),
        flag=0,
        sys_flag=0 if plain else rng.choice([0, 0, 0, 4, 8, 12]),
        born_time_ms=1,
        born_host=HOST if kind != "all" else rng.choice([HOST, HOST_IPV6]),
        store_time_ms=1_700_000_000_000 + offset,
        store_host=HOST if kind != "all" else rng.choice([HOST, HOST_IPV6]),
        prepared_offset=0 if plain else rng.choice([0, 5, scan.PLACEHOLDER_PREPARED_OFFSET]),
    )


def make_log(rng: random.Random, kind: str) -> tuple[CrashableFiles, int]:
    """Two files full and one begun."""
    files = CrashableFiles()
    offset = position = 0
    for number in range(3):
        data = bytearray()
        while len(data) < FILE_BYTES // (1 if number < 2 else 3):
            piece = record(rng, number * FILE_BYTES + len(data), offset, kind)
            if len(data) + len(piece) + 8 > FILE_BYTES:
                data += struct.pack(">ii", FILE_BYTES - len(data), MAGIC_BLANK)
                break
            data += piece
            offset += 1
        position = number * FILE_BYTES + len(data)
        data += bytes(FILE_BYTES - len(data))
        files.put(f"/log/{number * FILE_BYTES:020d}", bytes(data))
    return files, position


def open_log(files: CrashableFiles) -> CommitLog:
    log = CommitLog(files, "/log", FILE_BYTES)
    log.segments.load()
    return log


def singly(log: CommitLog, **options: Any) -> list[tuple[Any, ...]]:
    return [
        (r.topic, r.queue_id, r.queue_offset, r.position, r.size_bytes, r.tag_code())
        for r in log.scan(0, **options)
        if r.is_queued
    ]


def swept(log: CommitLog, **options: Any) -> tuple[list[tuple[Any, ...]], int]:
    """The same by columns, in the order of the log, and how many came in columns."""
    found, columns, end = [], 0, 0
    for part in sweep_records(log, 0, **options):
        if isinstance(part, LogRecord):
            rows = [(part, part.queue_offset, part.position, part.size_bytes, part.tag_code())]
            found += [(s.topic, s.queue_id, *rest) for s, *rest in rows if s.is_queued]
        else:
            assert isinstance(part, Sweep)
            assert part.start >= end
            columns += part.count
            for group in part.groups:
                found += [(group.topic, group.queue_id, o, *unit) for o, unit in group.rows()]
                assert group.is_consecutive == (
                    [o for o, _ in group.rows()]
                    == list(range(group.rows()[0][0], group.rows()[0][0] + len(group.rows())))
                )
        end = part.end
    return sorted(found, key=lambda row: row[3]), columns


@pytest.mark.parametrize("kind", ["plain", "sizes", "mixed", "all"])
def test_columns_find_what_the_scan_finds(kind: str) -> None:
    files, _ = make_log(random.Random(kind), kind)
    log = open_log(files)
    found, columns = swept(log)
    assert found == singly(log)
    assert columns > (100 if kind in ("mixed", "all") else len(found) // 2)


@pytest.mark.parametrize("seed", range(40))
def test_columns_end_where_the_scan_ends(seed: int) -> None:
    rng = random.Random(seed)
    files, end = make_log(rng, rng.choice(["plain", "sizes", "mixed"]))
    size = rng.choice([1, 2, 8, 40, 512, 5000])
    at = rng.randrange(end - size)
    file = files.open(f"/log/{at - at % FILE_BYTES:020d}")
    damage = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)])
    file.pwrite(damage[: FILE_BYTES - at % FILE_BYTES], at % FILE_BYTES)
    log = open_log(files)
    for check_crc in (True, False):
        assert swept(log, check_crc=check_crc)[0] == singly(log, check_crc=check_crc)


@pytest.mark.parametrize("number", [21, 200, 400])
def test_a_wrong_magic_number_among_good_records_ends_the_columns(number: int) -> None:
    files, _ = make_log(random.Random(3), "sizes")
    place = singly(open_log(files))[number][3]
    name = f"/log/{place - place % FILE_BYTES:020d}"
    files.open(name).pwrite(b"\xdb", place % FILE_BYTES + 4)
    log = open_log(files)
    assert swept(log)[0] == singly(log)
    assert singly(log)[-1][3] < place


def test_log_that_requires_checksums_ends_at_the_first_record_without() -> None:
    files, _ = make_log(random.Random(1), "plain")
    log = open_log(files)
    log.requires_checksum = True
    assert swept(log)[0] == singly(log) == []
    assert singly(log, check_crc=False)


@pytest.mark.parametrize("field_at", [0, 7, 12, 20, 28])
def test_heads_are_proved_by_size_magic_position_queue_and_offset(field_at: int) -> None:
    base, count, bad = 1 << 20, 40, 17
    log, units = bytearray(b"between"), []
    for offset in range(count):
        units.append((base + len(log), 0, 7))
        log += encode_record(
            topic="A", queue_id=3, queue_offset=offset, physical_offset=units[-1][0], body=b"x",
            properties=b"", flag=0, sys_flag=0, born_time_ms=1, born_host=HOST, store_time_ms=1,
            store_host=HOST,
        )  # fmt: skip
    size = (len(log) - 7) // count
    rows = [struct.pack(">qiq", position, size, code) for position, _, code in units]
    offsets = range(count)
    assert unverified_heads(memoryview(log), base, b"".join(rows), 3, offsets) == []
    rows[5] = struct.pack(">qiq", base - 8, size, 7)
    rows[6] = struct.pack(">qiq", units[6][0], size, scan.PLACEHOLDER_CODE)
    rows[-1] = struct.pack(">qiq", units[-1][0], size + 1, 7)
    log[units[bad][0] - base + field_at] ^= 1
    found = unverified_heads(memoryview(log), base, b"".join(rows), 3, offsets)
    assert found == [5, 6, bad, count - 1]
