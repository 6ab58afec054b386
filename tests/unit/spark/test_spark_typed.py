"""Texts of properties become typed columns exactly as Java reads them."""

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import parse_double, parse_integer, parse_long
from sluicemq.spark.sources.conversion import ARROW_TYPES, convert_property_column

NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65).map(str),
    st.floats().map(repr),
    st.sampled_from([
        "+5", "-0", "007", "٣", " 5", "5 ", "0x10", "0x1p3", "1e5", "5d", "NaN", "nan", "inf",
        "Infinity", "-Infinity", "1_0", "", "-", "5.", ".5", "1.0f", "\t5\n", "1" * 25, "-9" * 3,
    ]),
    st.text("0123456789+-.eExXdDfF ", max_size=8),
)  # fmt: skip


def java(kind: str, text: str | None) -> Any:
    read = {"int": parse_integer, "bigint": parse_long, "double": parse_double}[kind]
    try:
        return None if text is None else read(text, "p")
    except FilterEvaluationError:
        return None


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    return bool(left == right)


@given(st.lists(st.one_of(st.none(), NUMBERS), max_size=20))
@settings(max_examples=100, deadline=None)
def test_numbers_are_read_as_java_reads_them(texts: list[str | None]) -> None:
    for kind in ("int", "bigint", "double"):
        column, bad, example = convert_property_column(pa.array(texts, pa.string()), kind, "p")
        expected = [java(kind, text) for text in texts]
        assert column.type == ARROW_TYPES[kind]
        assert all(map(same, column.to_pylist(), expected)), (texts, column.to_pylist())
        wrong = [text for text, value in zip(texts, expected, strict=True)
                 if text is not None and value is None]  # fmt: skip
        assert bad == len(wrong)
        assert example in (wrong or [""])


def test_booleans_are_true_and_false_in_any_case_and_nothing_else() -> None:
    texts = pa.array(["true", "FALSE", "True", "yes", None, "1"])
    column, bad, example = convert_property_column(texts, "boolean", "p")
    assert column.to_pylist() == [True, False, True, None, None, None]
    assert (bad, example) in ((2, "yes"), (2, "1"))


@pytest.mark.parametrize("kind", ARROW_TYPES)
def test_no_rows_and_no_values_keep_the_type(kind: str) -> None:
    for texts in ([], [None, None]):
        column, bad, _ = convert_property_column(pa.array(texts, pa.string()), kind, "p")
        assert column.type == ARROW_TYPES[kind]
        assert (len(column), bad) == (len(texts), 0)
