"""Spans, copied many at a time, are equal to plain slices."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.record.batch_columns import PropertyTable, Spans, make_property_table

PIECES = st.lists(st.binary(max_size=12), min_size=1, max_size=20)
NAMES = st.lists(st.sampled_from([b"TAGS", b"a", b"eight___", b"a long name"]), max_size=4)
VALUES = st.sampled_from([b"", b"1", b"12345678", b"123456789", "ü".encode(), b"x" * 40])


def spans(pieces: list[bytes], gap: bytes = b"--", end: bytes = b"") -> Spans:
    """Return the pieces as spans, with a gap before each."""
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    starts = np.cumsum(sizes + len(gap)) - sizes
    return Spans(b"".join(gap + piece for piece in pieces) + end, starts, sizes)


@settings(max_examples=60)
@given(PIECES, st.binary(max_size=3))
def test_spans_are_equal_to_slices(pieces: list[bytes], end: bytes) -> None:
    some = spans(pieces, end=end)
    assert [bytes(piece) for piece in some.slices()] == pieces
    assert [some[index] for index in range(len(some))] == pieces
    assert bytes(some.join()) == b"".join(pieces)
    for start in (b"", pieces[0], pieces[0][:1]):
        assert some.all_begin_with(start) == all(piece.startswith(start) for piece in pieces)


@settings(max_examples=60)
@given(PIECES)
def test_copied_spans_are_complete_if_gaps_are_written_last(
    pieces: list[bytes],
) -> None:
    some = spans(pieces)
    target = np.full(len(some.data) + 12, ord("."), np.uint8)
    some.copy_to(target, some.starts)
    for start in (some.starts - 2).tolist():
        target[start : start + 2] = ord("-")
    width = int(some.sizes.max())
    last = int(some.starts[-1] + some.sizes[-1])
    if width - int(some.sizes.min()) <= 2:  # else a gap does not hold what came too much
        assert target[:last].tobytes() == some.data[:last]
    assert target[last + width :].tobytes() == b"." * (len(target) - last - width)


def test_pieces_of_large_data_are_views() -> None:
    (piece,) = spans([b"x" * 5000]).slices()
    assert isinstance(piece, memoryview)
    assert piece == b"x" * 5000


def read(table: PropertyTable) -> list[list[tuple[bytes, bytes]]]:
    """Return name and value of each property, row by row."""
    rows: list[list[tuple[bytes, bytes]]] = [[] for _ in range(len(table))]
    for turn, name in enumerate(table.names):
        for row, start, end in zip(rows, *table.value_bounds(turn), strict=True):
            row.append((name, table.flat[start:end].tobytes()))
    return rows


@settings(max_examples=100)
@given(NAMES, st.data())
def test_a_table_has_the_properties_of_each_message(
    names: list[bytes], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 8))
    rows = [[(name, data.draw(VALUES)) for name in names] for _ in range(count)]
    pieces = [b"".join(name + b"\1" + value + b"\2" for name, value in row) for row in rows]
    some = spans(pieces, gap=b"\0\1\2")
    table = make_property_table(some)
    if not names or not some.is_nearly_even():
        assert table is None
        return
    assert table is not None
    assert read(table) == rows
    for turn in range(len(names)):
        codes = table.map_values(turn, lambda value: len(value) * 1000 + sum(value))
        assert codes.tolist() == [len(row[turn][1]) * 1000 + sum(row[turn][1]) for row in rows]


def test_properties_with_different_names_give_no_table() -> None:
    good = b"ab\1v\2c\1v\2"
    assert make_property_table(spans([good] * 3)) is not None
    for bad in (
        b"ab\1v\2d\1v\2", b"ax\1v\2c\1v\2", b"a\1vv\2c\1v\2", b"ab\1v\2c\1v", b"ab\1v\2c\1\0\2",
        b"ab\1\1\2c\1\2", b"ab\1v\2c\1\1\2", b"ab\1v\2cvv\2", b"ab\2v\1c\1v\2", b"\1ab\2c\1v\2",
        b"ab\1v\2", b"ab\1v\2c\1v\2d\1v\2", b"", b"\2", b"ab\1v\2c\1v\2" + b"x\1y\2" * 400,
    ):  # fmt: skip
        for pieces in ([good, bad, good], [bad, good, good], [good, good, bad]):
            assert make_property_table(spans(pieces)) is None
    long, other = b"a name of 20 letters\1v\2", b"a name of 2O letters\1v\2"
    assert make_property_table(spans([long, long])) is not None
    assert make_property_table(spans([long, other])) is None


def test_values_beyond_the_distinct_limit_have_their_codes() -> None:
    values = [b"%d" % number for number in range(50)] * 2
    table = make_property_table(spans([b"TAGS\1" + value + b"\2" for value in values]))
    assert table is not None
    assert table.map_values(0, int).tolist() == [int(value) for value in values]
