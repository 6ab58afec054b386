"""What `dump` says of stores that the real broker wrote agrees with a parser of its own.

The parser below knows the layouts (spec/store.md §2–§5) and shares no code with the product: every
message, unit, index entry and checkpoint field has to be the same, in the same order.
"""

import json
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from sluicemq.store.tools.dump import (
    BODY_BASE64,
    BODY_NONE,
    Selection,
    describe,
    dump_checkpoint,
    dump_documents,
    dump_index,
    dump_log,
    dump_queues,
    list_queues,
)
from sluicemq.store.tools.layout import StoreLayout

pytestmark = pytest.mark.slow

STORES = Path(__file__).parent / "store"
ROOTS = {"golden1": "golden1/store", "golden2": "golden2/store", "golden3_trans": "golden3/store"}
SLOTS = 100


@pytest.fixture(params=ROOTS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(STORES / f"{request.param}.tar.gz") as tar:
        wanted = [m for m in tar.getmembers() if not m.name.endswith("timerwheel")]
        tar.extractall(tmp_path, wanted, filter="data")
    return tmp_path / ROOTS[request.param]


@pytest.fixture
def layout(root: Path) -> Any:
    layout = StoreLayout.find(str(root))
    yield layout
    layout.close()


def host(data: bytes) -> str:
    address, port = data[:-4], int.from_bytes(data[-4:], "big")
    if len(address) == 4:
        return f"{'.'.join(map(str, address))}:{port}"
    assert address == bytes(15) + b"\x01"
    return f"[::1]:{port}"


def reference_log(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted((root / "commitlog").iterdir()):
        data, at, base = path.read_bytes(), 0, int(path.name)
        while at + 8 <= len(data):
            size, magic = struct.unpack_from(">II", data, at)
            if magic == 0xCBD43194:
                found.append({"kind": "blank", "position": base + at, "end": base + len(data)})
            if magic not in (0xDAA320A7, 0xDAA320AB):
                break
            found.append(reference_record(data[at : at + size], base + at))
            at += size
    return found


def reference_record(data: bytes, position: int) -> dict[str, Any]:
    crc, queue, flag, offset, physical, sys_flag, born = struct.unpack_from(">iiiqqiq", data, 8)
    assert physical == position
    at = 48
    size = 20 if sys_flag & 16 else 8
    born_host = host(data[at : at + size])
    at += size
    (stored,) = struct.unpack_from(">q", data, at)
    at += 8
    size = 20 if sys_flag & 32 else 8
    store_host = host(data[at : at + size])
    at += size
    reconsumed, prepared, length = struct.unpack_from(">iqi", data, at)
    at += 16
    body = data[at : at + length]
    assert zlib.crc32(body) & 0x7FFFFFFF == crc
    at += length
    if data[7] == 0xAB:
        (length,) = struct.unpack_from(">h", data, at)
        at += 2
    else:
        length = data[at]
        at += 1
    topic = data[at : at + length].decode()
    at += length + 2
    pieces = [piece for piece in data[at:].decode().split("\x02") if piece]
    return {
        "kind": "message", "position": position, "size": len(data), "topic": topic,
        "version": 2 if data[7] == 0xAB else 1, "queue_id": queue, "queue_offset": offset,
        "flag": flag, "sys_flag": sys_flag, "born_time_ms": born, "born_host": born_host,
        "store_time_ms": stored, "store_host": store_host, "reconsume_times": reconsumed,
        "prepared_offset": prepared, "body_crc": crc, "body_crc_agrees": True,
        "properties": dict(piece.split("\x01", 1) for piece in pieces), "body_bytes": len(body),
        "transaction": {0: None, 4: "prepared", 8: "commit", 12: "rollback"}[sys_flag & 12],
    }  # fmt: skip


def test_every_message_and_blank_is_dumped_in_the_order_of_the_log(
    root: Path, layout: StoreLayout
) -> None:
    found = list(dump_log(layout, Selection(), BODY_NONE))
    for value in found:
        if value["kind"] == "message":
            assert len(value.pop("offset_message_id")) in (32, 56)
            assert value.pop("message_id")
    assert found == reference_log(root)


def test_bodies_are_dumped_as_their_senders_knew_them(layout: StoreLayout) -> None:
    texts = list(dump_log(layout, Selection()))
    encoded = list(dump_log(layout, Selection(), BODY_BASE64))
    assert any("body" in value for value in texts)
    for text, value in zip(texts, encoded, strict=True):
        if text["kind"] == "message":
            assert ("body" in text) or text["body_base64"] == value["body_base64"]
            assert "body_problem" not in value


def test_every_unit_is_dumped(root: Path, layout: StoreLayout) -> None:
    found = list(dump_queues(layout, Selection()))
    wanted = []
    for path in sorted((root / "consumequeue").glob("*/*/*")):
        data = path.read_bytes()
        for at in range(0, len(data), 20):
            position, size, code = struct.unpack_from(">qiq", data, at)
            if size > 0:
                wanted.append((path.parts[-3], int(path.parts[-2]), at // 20, position, size, code))
    names = ("topic", "queue_id", "offset", "position", "size")
    assert [tuple(value[name] for name in names) for value in found] == [w[:5] for w in wanted]
    for value, unit in zip(found, wanted, strict=True):
        raw = value.get("extension_address", value.get("due_time_ms", value.get("tag_code")))
        assert raw == unit[5]
        if "extension_address" in value:
            data = next((root / "consumequeue_ext" / unit[0] / str(unit[1])).iterdir()).read_bytes()
            size, code, time, bits = struct.unpack_from(">hqqh", data, unit[5] + (1 << 63))
            extension = value["extension"]
            assert (extension["tag_code"], extension["store_time_ms"]) == (code, time)
            assert len(extension["bitmap"]) == 2 * bits == 2 * (size - 20)


def test_every_index_entry_and_header_is_dumped(root: Path, layout: StoreLayout) -> None:
    (path,) = (root / "index").iterdir()
    data = path.read_bytes()
    header = struct.unpack_from(">qqqqii", data)
    found = list(dump_index(layout, Selection()))
    assert found[0]["slots"] == SLOTS
    assert tuple(found[0][name] for name in (
        "begin_time_ms", "end_time_ms", "begin_position", "end_position", "slots_used",
        "entry_limit",
    )) == header  # fmt: skip
    names = ("hash", "position", "seconds", "previous")
    assert [tuple(value[name] for name in names) for value in found[1:]] == [
        struct.unpack_from(">iqii", data, 40 + 4 * SLOTS + 20 * n) for n in range(1, header[5])
    ]


def test_checkpoint_and_documents_are_dumped(root: Path, layout: StoreLayout) -> None:
    (checkpoint,) = dump_checkpoint(layout)
    fields = struct.unpack_from(">5q", (root / "checkpoint").read_bytes())
    assert list(checkpoint.values())[1:] == [*fields, []]
    documents = {value["file"]: value for value in dump_documents(layout)}
    assert "SELF_TEST_TOPIC" in documents["config/topics.json"]["value"]["topicConfigTable"]
    timer = struct.unpack_from(">7q", (root / "config" / "timercheck").read_bytes())
    assert tuple(documents["config/timercheck"]["value"].values()) == timer
    json.dumps(list(documents.values()))


def test_a_selection_leaves_what_its_fields_say(root: Path, layout: StoreLayout) -> None:
    messages = [value for value in reference_log(root) if value["kind"] == "message"]
    times = [value["store_time_ms"] for value in messages]
    middle = sorted(times)[len(times) // 2]

    def places(selection: Selection) -> list[int]:
        return [value["position"] for value in dump_log(layout, selection, BODY_NONE)]

    assert places(Selection(topic="TopicA", offset_max=1)) == [
        m["position"] for m in messages if m["topic"] == "TopicA" and m["queue_offset"] <= 1
    ]
    assert places(Selection(queue_id=1)) == [m["position"] for m in messages if m["queue_id"] == 1]
    assert places(Selection(time_min_ms=middle)) == [
        m["position"] for m in messages if m["store_time_ms"] >= middle
    ]
    assert places(Selection(time_max_ms=middle - 1)) == [
        m["position"] for m in messages if m["store_time_ms"] < middle
    ]
    key = messages[0]["properties"]["UNIQ_KEY"]
    by_key = [m["position"] for m in messages if m["properties"].get("UNIQ_KEY") == key]
    assert places(Selection(key=key)) == by_key
    entries = [v for v in dump_index(layout, Selection(key=key)) if v["kind"] == "entry"]
    topics = {topic for topic, _ in layout.queues}
    known = [m["position"] for m in messages if m["position"] in by_key and m["topic"] in topics]
    assert sorted(value["position"] for value in entries) == known
    assert places(Selection(matches=lambda p: p.get("TAGS") == "TagA")) == [
        m["position"] for m in messages if m["properties"].get("TAGS") == "TagA"
    ]


def test_info_and_ls_count_what_is_there(root: Path, layout: StoreLayout) -> None:
    messages = [v for v in reference_log(root) if v["kind"] == "message" and not v["sys_flag"] & 4]
    queues = list(list_queues(layout))
    assert sum(queue.messages for queue in queues if queue.kind == "plain") == len(messages)
    for queue in queues:
        assert queue.offset_min == 0
        assert queue.offset_max == queue.messages
        own = [m for m in messages if (m["topic"], m["queue_id"]) == queue[:2]]
        if queue.kind == "plain":
            assert queue.size_bytes == sum(m["size"] for m in own)
            assert queue.first_time_ms == own[0]["store_time_ms"]
            assert queue.last_time_ms == own[-1]["store_time_ms"]
    found = describe(layout)
    assert found["log"]["files"] == 2
    assert found["queues"]["messages"] == len(messages)
    assert found["interrupted"] is (root.parent.name == "golden3")
    assert not any("problem" in document for document in found["documents"])
