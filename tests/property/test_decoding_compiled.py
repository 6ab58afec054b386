"""The compiled decoder makes the columns of the reference, of good and of damaged properties."""

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings

from sluicemq import engine
from sluicemq.record.properties import RepeatedTexts, make_value_array, read_properties
from sluicemq.record.property_columns import (
    PropertyRequest,
    RequestedProperties,
    ScannedColumns,
    ShapeColumns,
    make_binary_column,
)
from sluicemq.spark.sources import conversion
from sluicemq.spark.sources.conversion import convert_property_column

pytestmark = pytest.mark.skipif(engine.decoding is None, reason="`make native` has not built it")

NAMES = ["a", "city", "seven77", "eight888", "a_rather_long_name", "名", "\ufffd"]
TEXTS = st.sampled_from([
    b"", b"1", b"hz", b"12345678", b"123456789", b"x" * 16, b"x" * 17, b"y" * 40, b"\xff", b"\xfe",
    "杭州".encode(), b"\xe6\x9d", b"1\x011", b"\x01",
]) | st.binary(max_size=20).map(lambda text: text.replace(b"\2", b""))  # fmt: skip
PIECES = st.tuples(
    st.sampled_from([name.encode() for name in NAMES]) | st.binary(max_size=3), TEXTS
)
REGULAR = st.lists(st.sampled_from(NAMES), unique=True).map(
    lambda names: b"".join(name.encode() + b"\1v" + name.encode() + b"\2" for name in names)
)
ROWS = st.lists(
    REGULAR
    | REGULAR.map(lambda row: row[:-1])
    | st.lists(PIECES, max_size=6).map(
        lambda pieces: b"".join(name + b"\1" + text + b"\2" for name, text in pieces)
    )
    | st.binary(max_size=40),
    max_size=12,
)
REQUESTS = st.builds(
    PropertyRequest,
    st.lists(st.sampled_from([*NAMES, "absent"]), unique=True).map(tuple),
    st.booleans(),
    st.frozensets(st.sampled_from(NAMES)),
)


def place(rows: list[bytes], gap: int) -> tuple[Any, Any, Any]:
    """Rows in one buffer, with `gap` bytes between them, and none behind the last."""
    lengths = np.array([len(row) for row in rows], np.int64)
    starts = np.cumsum(lengths + gap) - lengths - gap
    return np.frombuffer((b"\2" * gap).join(rows) or b"\0", np.uint8), starts, lengths


def columns_of(columns: RequestedProperties, request: PropertyRequest) -> list[Any]:
    made = [columns.make_text_column(name) for name in request.names]
    if request.with_map:
        made.append(columns.make_map_column())
    for column in made:
        column.validate(full=True)
    return [column.to_pylist() for column in made]


@settings(max_examples=500, deadline=None)
@given(ROWS, REQUESTS, st.sampled_from([0, 1, 30]))
@example([b"a\x01\xff\x02", b"a\x011\x02"], PropertyRequest(("a",), True), 0)
def test_columns_equal_those_of_the_reference(
    rows: list[bytes], request: PropertyRequest, gap: int
) -> None:
    raw, starts, lengths = place(rows, gap)
    scanned = ScannedColumns(raw, starts, lengths, request)
    # The reference reads one byte behind the last row.
    padded = np.append(raw, np.uint8(0))
    properties = read_properties(padded, starts, lengths)
    expected = ShapeColumns(properties, request, RepeatedTexts())
    assert columns_of(scanned, request) == columns_of(expected, request)


def test_rows_of_more_names_than_the_table_has_room_for_are_odd_and_correct() -> None:
    rows = [f"name{row}\x01{row}\x02a\x01b\x02".encode() for row in range(600)]
    raw, starts, lengths = place(rows, 0)
    request = PropertyRequest(("a", "name7", "name599"), with_map=True)
    texts = columns_of(ScannedColumns(raw, starts, lengths, request), request)
    assert texts[0] == ["b"] * 600
    assert texts[1] == [None] * 7 + ["7"] + [None] * 592
    assert texts[2] == [None] * 599 + ["599"]
    assert texts[3] == [[(f"name{row}", str(row)), ("a", "b")] for row in range(600)]


@pytest.mark.parametrize(
    ("starts", "lengths"), [([-1], [1]), ([0], [5]), ([4], [1]), ([0], [-1]), ([2**62], [2**62])]
)
def test_rows_outside_of_the_buffer_are_refused(starts: list[int], lengths: list[int]) -> None:
    places = np.array(starts, np.int64), np.array(lengths, np.int64)
    with pytest.raises(ValueError, match="not inside"):
        engine.decoding.scan(b"abcd", *places, (), True, frozenset())


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_bodies_equal_those_of_the_reference(bodies: list[bytes]) -> None:
    raw, starts, lengths = place(bodies, 3)
    expected = make_value_array(raw, starts, lengths, pa.binary())
    assert make_binary_column(raw, starts, lengths).equals(expected)


DIGITS = st.text("0123456789", min_size=1, max_size=22)
NUMBERS = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.floats().map(repr),
    DIGITS,
    st.tuples(DIGITS, DIGITS).map(".".join),
    st.tuples(DIGITS, DIGITS, st.integers(-400, 400)).map(lambda it: f"-{it[0]}.{it[1]}e{it[2]}"),
    st.text("0123456789.+-eEdDfFxX _", max_size=8),
    st.text(max_size=5),
    st.sampled_from(["-0", "-0.0", "+1", "1.", ".5", "2147483648", "-2147483648", "1e5", "0x10"]),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.none() | NUMBERS, max_size=8), st.sampled_from(["int", "bigint", "double"]))
def test_numbers_equal_those_of_the_reference(texts: list[str | None], type_name: str) -> None:
    column = pa.array(texts, pa.string())
    converted, bad_count, _ = convert_property_column(column, type_name, "p")
    expected, expected_bad_count, _ = conversion._convert_texts(column, type_name, "p")
    assert [*map(exact, converted.to_pylist())] == [*map(exact, expected.to_pylist())]
    assert (converted.type, bad_count) == (expected.type, expected_bad_count)


def exact(value: int | float | None) -> Any:
    """A value that equals only the same number: NaN equals NaN, and -0.0 is not 0.0."""
    if not isinstance(value, float):
        return value
    return "nan" if math.isnan(value) else value.hex()
