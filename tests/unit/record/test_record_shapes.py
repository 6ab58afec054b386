"""Properties that nearly match a template are read as the scalar codec reads them."""

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.model.ids import Host, encode_host
from sluicemq.record import properties as buffers
from sluicemq.record import properties as shapes
from sluicemq.record.arrow import RecordDecoder
from sluicemq.record.codec import decode_record, encode_record
from sluicemq.record.properties import (
    Properties,
    ValueSpans,
    all_begin_with,
    first_separators,
    make_text_array,
    read_properties,
)

HOST = encode_host(Host("127.0.0.1", 10911))
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 32, 33, 87, 88, 89, 300)
NAMES = (b"TAGS", b"KEYS", b"UNIQ_KEY", b"price", b"a", "ö".encode(), b"name-of-a-property-" * 3)
LETTERS = b"abc0123456789 \x00\x03"
ODDITIES = (
    "separator inside", "separator instead", "name ends twice", "not UTF-8", "beyond ASCII",
    "a torn character", "empty value", "open end", "another name", "name twice", "one name less",
    "two ends", "nothing",
)  # fmt: skip


def text_of(chance: random.Random, length: int) -> bytes:
    return bytes(chance.choices(LETTERS, k=length))


def value_of(chance: random.Random, kind: str, length: int) -> bytes:
    if kind == "same":
        return b"x" * length
    return text_of(chance, length if kind == "length" else chance.choice(LENGTHS))


def spoilt(chance: random.Random, pairs: list[list[bytes]], oddity: str) -> bytes:
    """Return the row with something that does not match a template."""
    pair = chance.choice(pairs) if pairs else [b"", b""]
    at = chance.randrange(len(pair[1]) + 1)
    inside = {
        "separator inside": b"\x02", "name ends twice": b"\x01", "not UTF-8": b"\xff",
        "beyond ASCII": "ü".encode(), "a torn character": b"\xc3",
    }  # fmt: skip
    if oddity == "separator instead":
        pair[1] = pair[1][: at - 1] + b"\x02" + pair[1][at:]
    elif oddity in inside:
        pair[1] = pair[1][:at] + inside[oddity] + pair[1][at:]
    elif oddity == "empty value":
        pair[1] = b""
    elif oddity == "another name":
        pair[0] = chance.choice([b"other", b"\xc3", pair[0][:-1], b""])
    elif oddity == "name twice":
        pairs.append([pair[0], b"again"])
    elif oddity == "one name less" and pairs:
        pairs.remove(pair)
    data = b"".join(name + b"\x01" + value + b"\x02" for name, value in pairs)
    if oddity == "nothing":
        return b""
    return data[:-1] if oddity == "open end" else data + b"\x02" * (oddity == "two ends")


@st.composite
def rows_near_a_template(draw: st.DrawFn) -> list[bytes]:
    """Draw the properties of some rows, nearly all of one kind."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    kinds = [
        (draw(st.sampled_from(("same", "length", "any"))), chance.choice(LENGTHS)) for _ in names
    ]
    oddities = chance.sample(ODDITIES, draw(st.integers(0, 3)))
    share = draw(st.sampled_from((0.1, 0.5)))
    rows = []
    for _ in range(chance.randrange(1, 40)):
        pairs = [[name, value_of(chance, *kind)] for name, kind in zip(names, kinds, strict=True)]
        odd = oddities and chance.random() < share
        rows.append(spoilt(chance, pairs, chance.choice(oddities) if odd else ""))
    return rows if draw(st.booleans()) else [row[:-1] for row in rows]


def record(offset: int, properties: bytes) -> bytes:
    return encode_record(
        topic="t", queue_id=0, queue_offset=offset, physical_offset=0, body=b"\x02" * (offset % 5),
        properties=properties, flag=0, sys_flag=0, born_time_ms=1, born_host=HOST,
        store_time_ms=1, store_host=HOST,
    )  # fmt: skip


def decoder() -> RecordDecoder:
    columns = ("queue_offset", "msg_id", "keys", "tags", "properties")
    return RecordDecoder(columns, promoted={"p": "price", "o": "ö"}, hidden=frozenset({"KEYS"}))


def rows_of(batches: Any) -> list[dict[str, Any]]:
    found = []
    for batch in batches:
        batch.validate(full=True)
        found += [row | {"properties": dict(row["properties"])} for row in batch.to_pylist()]
    return found


def expected(data: bytes, starts: list[int]) -> list[dict[str, Any]]:
    stored = [decode_record(data, start) for start in starts]
    return [
        {
            "queue_offset": one.queue_offset, "msg_id": one.message_id,
            "keys": one.properties.get("KEYS"), "tags": one.tag,
            "properties": {n: value for n, value in one.properties.items() if n != "KEYS"},
            "p": one.properties.get("price"), "o": one.properties.get("ö"),
        }
        for one in stored
    ]  # fmt: skip


@given(rows_near_a_template(), st.sampled_from((b"", b"\x02", b"\xff" * 9, b"\x02a\x01b\x02")))
@settings(max_examples=100, deadline=None)
def test_rows_near_a_template_read_as_the_scalar_codec_reads_them(
    rows: list[bytes], between: bytes
) -> None:
    data, starts = b"", []
    for offset, properties in enumerate(rows):
        starts.append(len(data))
        data += record(offset, properties) + (between if offset + 1 < len(rows) else b"")
    wanted = expected(data, starts)
    places = np.array(starts, np.int64)
    assert rows_of(decoder().decode_at(data, places)) == wanted
    if not between:
        assert rows_of(decoder().decode(data)) == wanted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SHAPES_MAX", 0)  # every row alone
        assert rows_of(decoder().decode_at(data, places)) == wanted


def found_in(rows: list[bytes]) -> Properties:
    lengths = np.array([len(row) for row in rows], np.int64)
    raw = np.frombuffer(b"".join(rows), np.uint8)
    return read_properties(raw, np.cumsum(lengths) - lengths, lengths)


def regular(tag: bytes, number: int, *, region: bytes = b"hz") -> bytes:
    return b"UNIQ_KEY\x01%032d\x02TAGS\x01%b\x02n\x01%d\x02R\x01%b\x02" % (
        number,
        tag,
        number,
        region,
    )


def test_rows_that_disprove_a_guess_stay_in_the_shape() -> None:
    rows = [
        regular(b"hit" if n == 77 else b"miss", n, region=b"h" * (n % 60 + 1)) for n in range(99)
    ]
    found = found_in(rows)
    assert [shape.names for shape in found.shapes] == [(b"UNIQ_KEY", b"TAGS", b"n", b"R")]
    assert found.shapes[0].rows is None
    assert not found.odd


def test_guessed_values_are_one_text_and_guessed_lengths_one_block() -> None:
    (shape,) = found_in([regular(b"miss", number) for number in range(99)]).shapes
    identity, tag, number, region = shape.values
    assert (tag.text, region.text) == (b"miss", b"hz")
    assert identity.lengths == 32
    assert identity.block is not None
    assert number.words is not None


def test_a_sample_is_not_in_step_with_repetitions() -> None:
    (shape,) = found_in([regular(b"abcdefgh"[n % 8 : n % 8 + 1], n) for n in range(4096)]).shapes
    assert shape.values[1].text is None


def test_a_separator_inside_a_value_of_the_guessed_length_is_found() -> None:
    rows = [regular(b"A", number) for number in range(30)]
    rows[5] = rows[5][:20] + b"\x02" + rows[5][21:]
    assert found_in(rows).odd_rows.tolist() == [5]


def test_names_that_are_utf8_only_together_are_odd() -> None:
    assert found_in([b"\xc3\x011\x02\xa4\x012\x02"] * 3).odd_rows.tolist() == [0, 1, 2]


def test_rows_of_two_shapes_are_separated() -> None:
    other = b"TAGS\x01A\x02n\x017\x02"
    rows = [other if number % 3 == 1 else regular(b"A", number) for number in range(60)]
    first, second = found_in(rows).shapes
    assert first.names == (b"UNIQ_KEY", b"TAGS", b"n", b"R")
    assert second.rows is not None
    assert second.rows.tolist() == list(range(1, 60, 3))
    assert not found_in(rows).odd


def test_only_the_irregular_rows_are_odd() -> None:
    rows = [regular(b"A", number) for number in range(30)]
    rows[0] = b"a\x011\x02a\x012\x02"
    rows[17] = b"no value\x02"
    rows[29] = regular(b"A", 29) + b"\x02"
    assert found_in(rows).odd_rows.tolist() == [0, 17, 29]


PIECES = st.lists(
    st.sampled_from([b"\x02", b"\x01", b"\x03", b"\x82", b"a" * 7, b"b" * 50]), max_size=9
)


@given(
    PIECES.map(b"".join), st.lists(st.tuples(st.integers(0, 400), st.integers(-2, 400)), max_size=9)
)
@settings(max_examples=100, deadline=None)
def test_separators_are_found_where_bytes_find_them(
    data: bytes, rows: list[tuple[int, int]]
) -> None:
    data += b"c"
    begins = [min(start, len(data) - 1) for start, _ in rows]
    room = [min(size, len(data) - start) for start, (_, size) in zip(begins, rows, strict=True)]
    raw, starts = np.frombuffer(data, np.uint8), np.array(begins, np.int64)
    words = buffers.read_words(raw, starts)
    found = first_separators(raw, starts, words, np.array(room, np.int64)).tolist()
    assert found == [
        min((data + b"\x02").index(b"\x02", start) - start, size)
        for start, size in zip(begins, room, strict=True)
    ]


@given(st.integers(0, 2**32), st.sampled_from((3, 8, 17, 32, 40)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_texts_of_any_lengths_are_written_whole(seed: int, longest: int, is_same: bool) -> None:
    chance = random.Random(seed)
    rows = [
        [chance.randbytes(chance.randrange(longest + 1)) for _ in range(3)]
        for _ in range(chance.randrange(1, 30))
    ]
    raw = np.frombuffer(b"".join(map(b"".join, rows)) + b"constant!", np.uint8)
    lengths = np.array([[len(value) for value in row] for row in rows], np.int64)
    starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    columns = [ValueSpans(raw, starts[:, turn], lengths[:, turn]) for turn in range(3)]
    if is_same:
        rows = [[row[0], b"constant!", row[2]] for row in rows]
        columns[1] = ValueSpans(raw, np.full(len(rows), len(raw) - 9), 9, text=b"constant!")
    found = make_text_array(columns, len(rows))
    found.validate(full=True)
    assert found.to_pylist() == [value.decode(errors="replace") for row in rows for value in row]
    alone = make_text_array(columns[1:2], len(rows)).to_pylist()
    assert alone == [row[1].decode(errors="replace") for row in rows]


def test_all_begin_with_compares_every_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "_PIECE_BYTES", 8)
    data = b"name" * 50
    starts = np.arange(0, 200, 4)
    assert all_begin_with(np.frombuffer(data, np.uint8), starts, b"name")
    for place in (0, 3, 7, 101, 199):
        other = data[:place] + b"X" + data[place + 1 :]
        assert not all_begin_with(np.frombuffer(other, np.uint8), starts, b"name")
    assert not all_begin_with(np.frombuffer(data, np.uint8), starts + 1, b"name")


def test_values_that_are_not_utf8_are_replaced_in_any_column() -> None:
    rows = [b"a\x01\xff\x02TAGS\x01b\xc3\x02", b"a\x01\xa4\x02TAGS\x01c\x02"] * 3
    data = b"".join(record(offset, row) for offset, row in enumerate(rows))
    found = rows_of(decoder().decode(data))
    assert [row["tags"] for row in found] == ["b\N{REPLACEMENT CHARACTER}", "c"] * 3
    assert found[0]["properties"]["a"] == "\N{REPLACEMENT CHARACTER}"
    assert pa.types.is_string(decoder().schema.field("tags").type)
