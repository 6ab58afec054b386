"""Stores that the real broker wrote open in ours; ours have the same layout, byte for byte.

The oracle is a small parser of its own below: it knows the layouts of spec/store.md and shares no
code with the product. It reads a directory and checks every agreement that a store has to keep.
"""

import shutil
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sluicemq.config import StoreConfig
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import MessageFilter
from sluicemq.record.codec import decode_records, encode_properties
from sluicemq.store.readonly import StoreReader
from sluicemq.store.store import Store

STORES = Path(__file__).parent / "store"
SIZES = {"commit_log_file_bytes": 16384, "consume_queue_file_bytes": 2000}
GOLDEN = {
    "golden1": ("golden1.tar.gz", "golden1/store"),
    "golden2": ("golden2.tar.gz", "golden2/store"),
    "golden3": ("golden3_trans.tar.gz", "golden3/store"),
}
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
CHECKSUM_BYTES = 20
IPV6 = bytes(15) + b"\x01" + struct.pack(">i", 9)


# --- the independent parser


class Parsed(NamedTuple):
    """A record as the parser finds it; `codes` is its tag's Java hash."""

    place: int
    size: int
    topic: str
    queue: int
    offset: int
    flag: int
    body: bytes
    properties: dict[str, str]
    time: int


def java_string_hash(text: str) -> int:
    value = 0
    units = text.encode("utf-16-be")
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (value * 31 + high * 256 + low) % (1 << 32)
    return value if value < 1 << 31 else value - (1 << 32)


def parse_log(root: Path) -> list[Parsed]:
    """Every record, with all its lengths, its CRC and its position checked."""
    found: list[Parsed] = []
    for path in sorted((root / "commitlog").iterdir()):
        data, base, at = path.read_bytes(), int(path.name), 0
        assert len(data) == SIZES["commit_log_file_bytes"]
        while at + 8 <= len(data):
            size, magic = struct.unpack_from(">II", data, at)
            if magic == 0xCBD43194:
                assert size == len(data) - at, "a blank record reaches to the end of the file"
                break
            if magic not in (0xDAA320A7, 0xDAA320AB):
                break
            found.append(parse_record(data[at : at + size], base + at, magic == 0xDAA320AB))
            at += size
    return found


def parse_record(data: bytes, place: int, is_second_version: bool) -> Parsed:
    at = 8

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(">" + form, data, at)
        at += struct.calcsize(">" + form)
        return int(value)

    def skip(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    crc, queue, _, offset, position, flag, _ = (take(form) for form in "iiiqqiq")
    skip(20 if flag & 0x10 else 8)
    time = take("q")
    skip(20 if flag & 0x20 else 8)
    take("i")
    take("q")
    body = skip(take("i"))
    topic = skip(take("h") if is_second_version else take("B")).decode()
    raw = skip(take("h")).decode()
    assert at == len(data), "the lengths make up the size"
    assert position == place, "the record knows where it lies"
    assert crc == zlib.crc32(body) & 0x7FFFFFFF
    properties = dict(piece.split("\x01", 1) for piece in raw.split("\x02") if "\x01" in piece)
    return Parsed(place, len(data), topic, queue, offset, flag, body, properties, time)


def parse_queues(root: Path) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    """(topic, queue, offset) -> unit; behind the last unit of a file there are zeros only."""
    units = {}
    for path in sorted((root / "consumequeue").glob("*/*/*")):
        data = path.read_bytes()
        assert len(data) == SIZES["consume_queue_file_bytes"]
        for at in range(0, len(data), 20):
            unit = struct.unpack_from(">qiq", data, at)
            if unit[1] <= 0:
                assert not any(data[at:])
                break
            if unit[:2] != (0, 0x7FFFFFFF):
                key = (path.parts[-3], int(path.parts[-2]), (int(path.name) + at) // 20)
                units[key] = unit
    return units


def check_agreement(root: Path) -> list[Parsed]:
    """Each queued record has its unit with the right code, and there is no other unit."""
    records, units = parse_log(root), parse_queues(root)
    queued = {(r.topic, r.queue, r.offset): r for r in records if not r.flag & 4}
    for key, record in queued.items():
        tag = record.properties.get("TAGS", "")
        assert units.pop(key) == (record.place, record.size, java_string_hash(tag)), key
    assert not units
    return records


# --- Java's stores in ours


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(request.param, tmp_path)


def unpack(name: str, target: Path) -> Path:
    archive, root = GOLDEN[name]
    with tarfile.open(STORES / archive) as tar:
        wanted = [m for m in tar.getmembers() if not m.name.endswith("timerwheel")]
        tar.extractall(target, wanted, filter="data")
    return target / root


def open_store(root: Path) -> Store:
    return Store.open(StoreConfig(root=str(root), **SIZES))  # type: ignore[arg-type]


def read_all(store: Store) -> dict[tuple[str, int, int], Any]:
    found = {}
    for topic, queue in store.queues():
        low, high = store.queue_offsets(topic, queue)
        result = store.reader.read(topic, queue, low, 1000, 1 << 20)
        messages = decode_records(b"".join(result.data))
        assert result.count == high - low
        found |= {(topic, queue, low + i): m for i, m in enumerate(messages)}
    return found


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def written(root: Path) -> dict[str, bytes]:
    """The files that hold something: Java makes the next one ahead of time."""
    return {path: data for path, data in snapshot(root).items() if any(data)}


def test_every_message_of_a_java_store_is_read(golden: Path) -> None:
    expected = {(r.topic, r.queue, r.offset): r for r in parse_log(golden) if not r.flag & 4}
    store = open_store(golden)
    found = read_all(store)
    light = {key for key in found if key[0].startswith("%LMQ%")}
    assert found.keys() - light == expected.keys()
    for key, record in expected.items():
        message = found[key]
        assert (message.topic, message.queue_id) == key[:2]
        assert (message.body, message.store_time_ms) == (record.body, record.time)
        assert message.properties == record.properties
        assert message.physical_offset == record.place
        assert store.reader.record_at(record.place) is not None
        lower = store.reader.offset_by_time(*key[:2], record.time, "lower")
        upper = store.reader.offset_by_time(*key[:2], record.time, "upper")
        assert lower <= key[2] <= upper
    store.close()


@pytest.mark.parametrize("name", ["golden1", "golden2"])
def test_opening_and_closing_keeps_every_file_but_the_checkpoint(name: str, tmp_path: Path) -> None:
    root = unpack(name, tmp_path)
    before = snapshot(root)
    open_store(root).close()
    after = snapshot(root)
    changed = {path for path in before if before[path] != after.get(path)}
    assert changed == {"checkpoint"}
    assert after.keys() == {*before.keys(), "replica.json"}
    assert after["checkpoint"][40:1024] == bytes(984)


def test_reader_changes_not_one_byte(golden: Path) -> None:
    before = snapshot(golden)
    reader = StoreReader.open(str(golden))
    assert [r.position for r in reader.scan()] == [r.place for r in parse_log(golden)]
    assert snapshot(golden) == before


@pytest.mark.parametrize("lost", [True, False], ids=["queues lost", "queues there"])
def test_crashed_java_store_gets_the_same_queues(golden: Path, tmp_path: Path, lost: bool) -> None:
    """All units, those of delayed messages and light queues too, as Java itself had made them."""
    (golden / "abort").write_text("1")
    before = parse_queues(golden)
    if lost:
        shutil.rmtree(golden / "consumequeue")
    open_store(golden).close()
    after = parse_queues(golden)
    if "golden2" in str(golden):  # Java's units hold addresses in ConsumeQueueExt files
        assert {key: unit[:2] for key, unit in after.items()} == {
            key: unit[:2] for key, unit in before.items()
        }
    else:
        assert after == before


def test_java_store_can_be_written_on(golden: Path) -> None:
    store = open_store(golden)
    before = read_all(store)
    for number in range(40):
        properties = encode_properties({"TAGS": "new", "n": str(number)})
        store.writer.append(
            "TopicA", 1, b"x" * 900, properties, tag_code("new"), 0, 0, 1, HOST, HOST
        )
        store.commit()
    store.close()
    records = parse_log(golden)
    assert [r.properties["n"] for r in records if r.properties.get("TAGS") == "new"] == [
        str(number) for number in range(40)
    ]
    store = open_store(golden)
    found = read_all(store)
    assert len(found) == len(before) + 40
    assert all(found[key] == message for key, message in before.items())
    store.close()


class TagA(MessageFilter):
    """The tag filter of a consumer of TagA."""

    tag_codes = frozenset({java_string_hash("TagA")})
    reads_properties = False

    def by_consume_queue(self, tag_code: int) -> bool:
        return tag_code in self.tag_codes

    def by_commit_log(self, properties: Any) -> bool:
        return True


@pytest.mark.parametrize("name", ["golden1", "golden2"])
def test_tags_are_found_also_where_units_hold_extension_addresses(
    name: str, tmp_path: Path
) -> None:
    root = unpack(name, tmp_path)
    expected = [
        r.place for r in parse_log(root) if (r.topic, r.queue) == ("TopicA", 0)
        and r.properties.get("TAGS") == "TagA"
    ]  # fmt: skip
    store = open_store(root)
    found, offset, end = [], 0, store.queue_offsets("TopicA", 0)[1]
    while offset < end:  # a read looks for a limited time
        result = store.reader.read("TopicA", 0, offset, 32, None, TagA())
        found += [m.physical_offset for m in decode_records(b"".join(result.data))]
        offset = result.next_offset
    assert found == expected
    assert expected
    store.close()


# --- ours, by the same rules


def test_our_store_keeps_every_rule_of_the_layout(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_store(root)
    sent = []
    for number in range(150):
        topic = ["TopicA", "主题", "%RETRY%" + "g" * 190][number % 3]
        host = IPV6 if number % 7 == 0 else HOST
        tag = ["", "TagA", "标签", "x" * 40][number % 4]
        properties = {"n": str(number), **({"TAGS": tag} if tag else {})}
        flag = 4 if number % 50 == 49 else 0
        body = bytes([number]) * (number * 13 % 700)
        encoded = encode_properties(properties)
        store.writer.append(
            topic, number % 2, body, encoded, tag_code(tag), number, flag, 5, host, HOST
        )  # fmt: skip
        sent.append((topic, number % 2, body, properties))
        if number % 4 == 3:
            store.commit()
    store.close()
    records = check_agreement(root)
    assert [(r.topic, r.queue, r.body, r.properties) for r in records] == sent
    assert len(list((root / "commitlog").iterdir())) > 2
    assert (root / "lock").read_bytes() == b"lock"
    assert (root / "checkpoint").stat().st_size == 4096


@pytest.mark.parametrize("name", GOLDEN)
def test_same_inputs_give_the_same_bytes_as_java(name: str, tmp_path: Path) -> None:
    """Each record of a golden store, appended again with its own clock and hosts."""
    golden = unpack(name, tmp_path)
    replay(golden, tmp_path / "ours", adds_checksum=name == "golden2")
    assert written(tmp_path / "ours" / "commitlog") == written(golden / "commitlog")
    ours, java = parse_queues(tmp_path / "ours"), parse_queues(golden)
    if name != "golden2":
        queues = snapshot(tmp_path / "ours" / "consumequeue")
        assert queues == snapshot(golden / "consumequeue")
    else:  # the units of Java hold addresses in ConsumeQueueExt files; we write no light queues
        java = {key: unit for key, unit in java.items() if not key[0].startswith("%LMQ%")}
        assert {key: unit[:2] for key, unit in ours.items()} == {
            key: unit[:2] for key, unit in java.items()
        }


@pytest.mark.parametrize("name", ["golden2"])
def test_recovery_that_demands_checksums_takes_the_records_of_java(
    name: str, tmp_path: Path
) -> None:
    root = unpack(name, tmp_path)
    (root / "abort").write_text("1")
    records = parse_log(root)
    settings = {"checksum_property": True, "checksum_property_required": True, **SIZES}
    store = Store.open(StoreConfig(root=str(root), **settings))  # type: ignore[arg-type]
    assert store.written_offset == records[-1].place + records[-1].size
    store.close()


def replay(golden: Path, root: Path, *, adds_checksum: bool) -> None:
    clock = Replayed()
    settings = {"root": str(root), "checksum_property": adds_checksum, **SIZES}
    store = Store.open(StoreConfig(**settings), clock=clock)  # type: ignore[arg-type]
    log = b"".join(p.read_bytes() for p in sorted((golden / "commitlog").iterdir()))
    units = parse_queues(golden)
    for record in parse_log(golden):
        raw = log[record.place : record.place + record.size]
        clock.ms = record.time
        born_end = 48 + (20 if record.flag & 0x10 else 8)
        stored_end = born_end + 8 + (20 if record.flag & 0x20 else 8)
        (flag,) = struct.unpack_from(">i", raw, 16)
        (born,) = struct.unpack_from(">q", raw, 40)
        reconsumed, prepared = struct.unpack_from(">iq", raw, stored_end)
        properties = raw[properties_start(raw, stored_end + 12) :]
        unit = units.get((record.topic, record.queue, record.offset))
        store.writer.append(
            record.topic,
            record.queue,
            record.body,
            properties[: -CHECKSUM_BYTES if adds_checksum else None],
            unit[2] if unit is not None and not record.flag & 4 else 0,
            flag,
            record.flag,
            born,
            raw[48:born_end],
            raw[born_end + 8 : stored_end],
            reconsumed,
            prepared,
        )
        store.commit()
    store.close()


def properties_start(raw: bytes, body_length_at: int) -> int:
    (body,) = struct.unpack_from(">i", raw, body_length_at)
    at = body_length_at + 4 + body
    topic = raw[at] if raw[7] == 0xA7 else struct.unpack_from(">h", raw, at)[0] + 1
    return int(at + 1 + topic + 2)


class Replayed:
    """A clock that says what a golden record says."""

    ms = 0

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return 0.0
