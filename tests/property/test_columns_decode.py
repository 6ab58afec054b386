"""Columns against the scalar decoder, on any bytes that may stand where properties do."""

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.record.arrow import (
    NEVER_COLUMNS,
    ArrowColumns,
    LogPiece,
    build_block,
    merge_block_arrays,
)
from sluicemq.record.codec import decode_properties, encode_record
from sluicemq.record.columns import ColumnBlock

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
words = st.sampled_from(
    ["a", "b", "TAGS", "UNIQ_KEY", "价", "é", "1", "xyz", "", "long value " * 3]
)
ends = st.sampled_from([b"\x02", b"\x02", b"\x02", b"", b"\x01", b"\x02\x02"])
pairs = st.builds(lambda k, v, e: k.encode() + b"\x01" + v.encode() + e, words, words, ends)
regular = st.lists(pairs, max_size=5).map(b"".join)
anything = st.lists(st.sampled_from([b"\x01", b"\x02", b"a", b"b", b"\xe4", b"\xff", b"\0"])).map(
    b"".join
)
rows_of = st.lists(regular | regular | anything, min_size=1, max_size=30)


def row_of(block: ColumnBlock, row: int) -> dict[str, str]:
    found = {}
    for name in block.columns:
        codes, values = block.columns[name]
        if codes[row] >= 0:
            found[name] = values[codes[row]]
    return found


@given(rows_of, st.integers(1, 3), st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_columns_hold_what_the_scalar_decoder_gives(
    rows: list[bytes], files: int, cut: int
) -> None:
    data = [b""] * files
    positions, sizes = [], []
    for number, properties in enumerate(rows):
        file = number * files // len(rows)
        position = (file << 20) + len(data[file])
        made = encode_record(
            topic="T", queue_id=0, queue_offset=number, physical_offset=position,
            body=b"b" * number, properties=properties, flag=0, sys_flag=0,
            born_time_ms=1, born_host=HOST,
            store_time_ms=1, store_host=HOST,
        )  # fmt: skip
        data[file] += made
        positions.append(position)
        sizes.append(len(made))
    pieces = [
        LogPiece(number << 20, np.frombuffer(part, np.uint8)) for number, part in enumerate(data)
    ]
    blocks = [
        build_block(start, np.array(positions[start : start + cut]),
                    np.array(sizes[start : start + cut]), pieces)
        for start in range(0, len(rows), cut)
    ]  # fmt: skip
    arrays, excluded = merge_block_arrays(blocks)
    whole = ColumnBlock(0, len(rows), ArrowColumns(arrays), excluded, np.empty(0, np.int64))
    decoded = list(map(decode_properties, rows))
    for block in (*blocks, whole):
        for row in range(block.rows):
            expected = decoded[block.first_offset + row]
            shown = {name: v for name, v in expected.items() if name not in NEVER_COLUMNS}
            assert row_of(block, row) == shown
            assert expected.keys() - shown.keys() <= block.excluded
