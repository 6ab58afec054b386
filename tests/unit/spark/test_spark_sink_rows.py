"""Rows as batch bytes by columns: the same bytes that the client makes of a message."""

import datetime
from typing import Any

import pyarrow as pa
import pytest

from sluicemq.client.core.messages import make_outgoing
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import Message
from sluicemq.record.codec import decode_batch
from sluicemq.spark.rows import (
    UniqueIdColumns,
    convert_bodies,
    encode_delays,
    encode_ids,
    encode_properties,
    encode_rows,
    split_batch,
)
from sluicemq.spark.senders import PreparedRows

MAP = pa.map_(pa.string(), pa.string())
KEYS = pa.list_(pa.field("element", pa.string(), nullable=False))
ROWS: list[dict[str, Any]] = [
    {"body": b"a", "tags": "t", "keys": ["k1", "k2"], "properties": {"x": "1", "y": "2"}},
    {"body": b"bb", "tags": None, "keys": [], "properties": {}},
    {"body": b"ccc", "tags": "täg", "keys": ["k"], "properties": {"x": "Ω"}},
    {"body": b"d" * 300, "tags": "", "keys": None, "properties": None},
]


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "body": pa.array([row["body"] for row in rows], pa.binary()),
        "tags": pa.array([row["tags"] for row in rows], pa.string()),
        "keys": pa.array([row["keys"] for row in rows], KEYS),
        "properties": pa.array(
            [
                None if row["properties"] is None else list(row["properties"].items())
                for row in rows
            ],
            MAP,
        ),
    }


def parsed(properties: bytes) -> dict[str, str]:
    return dict(part.split("\x01") for part in properties.decode().split("\x02") if part)


def by_columns(values: dict[str, Any]) -> list[tuple[bytes, dict[str, str]]]:
    made = encode_rows(
        convert_bodies(values["body"]), encode_properties(values, len(values["body"]))
    )
    batch = decode_batch(made.request_body(0, len(made)))
    return [(bytes(body), parsed(properties)) for _, body, properties, _ in batch]


def by_messages(rows: list[dict[str, Any]]) -> list[tuple[bytes, dict[str, str]]]:
    found = []
    for row in rows:
        message = Message(
            "T", row["body"], row["tags"] or None, tuple(row["keys"] or ()),
            {name: text for name, text in (row["properties"] or {}).items() if text is not None},
        )  # fmt: skip
        properties = parsed(make_outgoing(message, "ID", compress_from_bytes=0).properties.encode())
        del properties["UNIQ_KEY"]
        found.append((row["body"], properties))
    return found


@pytest.mark.parametrize("rows", [ROWS, ROWS[1:2], ROWS[3:]])
def test_columns_say_what_messages_say(rows: list[dict[str, Any]]) -> None:
    assert by_columns(columns(rows)) == by_messages(rows)


SAME_NAMES: list[dict[str, Any]] = [
    {
        "body": b"%d" % number,
        "tags": "t",
        "keys": None,
        "properties": {"x": f"{number}", "y": "Ω"},
    }
    for number in range(5)
]


@pytest.mark.parametrize(
    "properties",
    [
        {"x": "1", "y": "2"}, {"x": "1", "z": "2"}, {"y": "1", "x": "2"}, {"x": "1"}, {}, None,
        {"x": "1", "y": None}, {"x": "1", "y": ""}, {"xy": "1", "": "2"},
        {"x": "1", "y": "2", "z": "3"},
        {"a": "1", "b": "2", "c": "3", "d": "4"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 2, 5])
def test_rows_with_the_same_names_are_as_any_others(at: int, properties: Any) -> None:
    row = {"body": b"o", "tags": "t", "keys": ["k"], "properties": properties}
    rows = [*SAME_NAMES[:at], row, *SAME_NAMES[at:]]
    values = columns(rows)
    if "" in {*(properties or {}), *(properties or {}).values()}:
        with pytest.raises(ConfigurationError):
            by_columns(values)
        return
    assert by_columns(values) == by_messages(rows)
    part = {name: column[1:5] for name, column in values.items()}
    assert by_columns(part) == by_messages(rows[1:5])


@pytest.mark.parametrize("value", ["a\x01b", "\x02"])
def test_a_separator_in_one_of_many_values_is_refused(value: str) -> None:
    rows = [*SAME_NAMES, SAME_NAMES[0] | {"properties": {"x": value, "y": "1"}}, SAME_NAMES[0]]
    with pytest.raises(ConfigurationError, match=r"U\+0001"):
        by_columns(columns(rows))
    others = {name: column[:5] for name, column in columns(rows).items()}
    assert by_columns(others) == by_messages(rows[:5]), "it lies in the buffer, not in these rows"


LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
LARGE |= {
    MAP: pa.map_(pa.large_string(), pa.large_string()),
    KEYS: pa.list_(pa.field("element", pa.large_string(), nullable=False)),
}
"""What Spark makes of a type when spark.sql.execution.arrow.useLargeVarTypes is set."""
EVERY_ROLE: dict[str, tuple[pa.DataType, list[Any]]] = {
    "body": (pa.binary(), [b"a", b"bb", b"", b"d"]),
    "topic": (pa.string(), ["T", "U", "T", "T"]),
    "tags": (pa.string(), ["t", None, "", "u"]),
    "keys": (KEYS, [["k1", "k2"], [], None, ["k"]]),
    "properties": (MAP, [[("x", "1")], [("x", "Ω"), ("y", "2")], None, []]),
    "queue_id": (pa.int32(), [0, None, 1, None]),
    "broker": (pa.string(), ["a", "b", None, ""]),
    "flag": (pa.int32(), [1, None, 0, -1]),
    "sharding_key": (pa.string(), [None, "s", "", "é"]),
    "delay_level": (pa.int32(), [0, 3, None, None]),
    "message_id": (pa.string(), ["ID0", "ID1", "ID2", "ID3"]),
    "system_properties": (MAP, [[("INSTANCE_ID", "i")], None, [], [("INSTANCE_ID", "j")]]),
}


def made_of(columns: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that a sender takes from the rows of a batch."""
    roles = {name: name for name in columns}
    rows = PreparedRows(pa.record_batch(columns), roles, None if "topic" in roles else "T")
    rows.check_sizes(64)
    ids = rows.ids if rows.ids is not None else pa.array([f"ID{n}" for n in range(rows.row_count)])
    made = encode_rows(
        rows.bodies, encode_ids(ids, UniqueIdColumns(), rows.row_count), rows.properties,
        flags=rows.flags,
    )  # fmt: skip
    delays = None if rows.delays is None else rows.delays.to_pylist()
    return (
        bytes(made.request_body(0, len(made))),
        bytes(made.message_bodies(0, len(made))),
        rows.list_destinations(),
        delays,
    )


@pytest.mark.parametrize("role", [*EVERY_ROLE, "all"])
def test_columns_with_64_bit_offsets_make_the_same_messages(role: str) -> None:
    names = EVERY_ROLE if role == "all" else {"body", role}
    plain = {name: pa.array(EVERY_ROLE[name][1], EVERY_ROLE[name][0]) for name in sorted(names)}
    large = {name: it.cast(LARGE.get(it.type, it.type)) for name, it in plain.items()}
    assert made_of(large) == made_of(plain)
    text = {name: it for name, it in plain.items() if name != "body"}
    text["body"] = pa.array(["a", "bb", "", "d"], pa.large_string())
    assert made_of(text) == made_of({name: text[name] for name in text} | {"body": plain["body"]})


def test_a_batch_beyond_32_bit_offsets_is_taken_in_parts() -> None:
    batch = pa.record_batch({"body": [b"%03d" % n * 100 for n in range(40)]})
    parts = list(split_batch(batch, 2_000))
    assert [row for part in parts for row in part.to_pylist()] == batch.to_pylist()
    assert all(part.nbytes <= 2_000 for part in parts)
    assert list(split_batch(batch)) == [batch]
    assert [part.num_rows for part in split_batch(batch.slice(3, 2), 1)] == [1, 1], "never none"
    assert [part.num_rows for part in split_batch(batch.slice(0, 0), 1)] == [0]


def test_slices_of_columns_are_taken_as_slices() -> None:
    sliced = {name: column[1:3] for name, column in columns(ROWS).items()}
    assert by_columns(sliced) == by_messages(ROWS[1:3])


def test_keys_as_text_are_joined_by_one_space() -> None:
    values = columns(ROWS) | {"keys": pa.array(["a b", " a  b ", "", None])}
    assert [own.get("KEYS") for _, own in by_columns(values)] == ["a b", "a b", None, None]


def test_a_row_without_columns_has_the_least_properties() -> None:
    assert by_columns({"body": pa.array(["x"])}) == [(b"x", {"WAIT": "true"})]


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("tags", "a|b", "contains '|'"),
        ("properties", {"DELAY": "3"}, "reserved"),
        ("properties", {"x": "a\x01b"}, r"U\+0001"),
        ("properties", {"x": "y" * 40_000}, "properties have 40,0.. bytes"),
        ("keys", ["a b"], "white space"),
        ("body", None, "a row has no body"),
    ],
)
def test_what_no_message_may_have_is_refused(column: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        by_columns(columns([*ROWS, ROWS[0] | {column: value}]))


def test_requests_hold_as_many_rows_as_fit_and_a_larger_row_alone() -> None:
    bodies = pa.array([b"x" * size for size in (10, 10, 500, 10, 10, 10)], pa.binary())
    properties = pa.array([b""] * 6, pa.binary())
    made = encode_rows(bodies, properties)
    assert list(made.split_requests(2, 200)) == [(0, 2), (2, 3), (3, 5), (5, 6)]
    rows = [
        body
        for run in made.split_requests(2, 200)
        for _, body, _, _ in decode_batch(made.request_body(*run))
    ]
    assert [bytes(body) for body in rows] == bodies.to_pylist()
    assert bytes(made.message_bodies(1, 3)) == b"x" * 510


def test_ids_differ_over_many_batches() -> None:
    ids = UniqueIdColumns()
    found = [one for count in (3, 65_536, 70_000, 1) for one in ids.generate(count).to_pylist()]
    assert len(set(found)) == len(found) == 135_540
    assert found[0].startswith(b"UNIQ_KEY\x01")
    assert len(found[0]) == len(b"UNIQ_KEY\x01\x02") + 32


def test_a_delay_is_a_level_a_time_from_now_or_a_time() -> None:
    moment = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    values = {
        "delay_level": pa.array([3, 0, None, None], pa.int32()),
        "delay_ms": pa.array([None, 500, None, None], pa.int64()),
        "deliver_at": pa.array([None, None, moment, None], pa.timestamp("us", tz="UTC")),
    }
    expected = ["L3", "M500", f"T{int(moment.timestamp() * 1000)}", None]
    assert encode_delays(values).to_pylist() == expected
    assert encode_delays({"delay_level": pa.array([0, None], pa.int32())}) is None
    with pytest.raises(ConfigurationError, match="more than one way"):
        encode_delays({"delay_level": pa.array([1]), "delay_ms": pa.array([1])})
    with pytest.raises(ConfigurationError, match="negative"):
        encode_delays({"delay_ms": pa.array([-1])})
