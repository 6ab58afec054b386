"""Conversion of strings as in Java (spec/filter.md §7). A JVM confirmed the expectations."""

import math

import pytest

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import (
    compare_doubles,
    compare_whole_numbers,
    parse_boolean,
    parse_double,
    parse_integer,
    parse_long,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5), ("-5", -5), ("+5", 5), ("005", 5), ("-0", 0), ("2147483647", 2147483647),
        ("-2147483648", -2147483648), ("٥", 5), ("５", 5), ("1٥", 15), ("0" * 5000 + "7", 7),
    ],
)  # fmt: skip
def test_integer_accepts(text: str, value: int) -> None:
    assert parse_integer(text, "a") == value
    assert parse_long(text, "a") == value


@pytest.mark.parametrize(
    "text",
    ["", "+", "-", " 5", "5 ", "5.0", "1_0", "0x5", "5L", "abc", "--5", "²", "𝟘", "1" + "0" * 5000],
)
def test_whole_number_refuses(text: str) -> None:
    with pytest.raises(FilterEvaluationError):
        parse_integer(text, "a")
    with pytest.raises(FilterEvaluationError):
        parse_long(text, "a")


@pytest.mark.parametrize("text", ["2147483648", "-2147483649", "3000000000"])
def test_integer_has_32_bits(text: str) -> None:
    assert parse_long(text, "a") == int(text)
    with pytest.raises(FilterEvaluationError, match="32 bits"):
        parse_integer(text, "a")


def test_long_has_64_bits() -> None:
    assert parse_long("9223372036854775807", "a") == 2**63 - 1
    assert parse_long("-9223372036854775808", "a") == -(2**63)
    for text in ("9223372036854775808", "-9223372036854775809"):
        with pytest.raises(FilterEvaluationError, match="64 bits"):
            parse_long(text, "a")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0), (" 5 ", 5.0), ("\x005\x1f", 5.0), ("5.", 5.0), (".5", 0.5), ("5e0", 5.0),
        ("5E+1", 50.0), ("5d", 5.0), ("5F", 5.0), ("5.0D ", 5.0), ("0x1.4p2", 5.0), ("0x.8p1", 1.0),
        ("0x1.p1", 2.0), ("-0X1P3f", -8.0), ("Infinity", math.inf), ("-Infinity", -math.inf),
        ("1e400", math.inf), ("-1e400", -math.inf), ("1e-400", 0.0), ("0x1p99999", math.inf),
        ("-0x1p99999", -math.inf), ("0x1p-99999", 0.0), ("4.9e-324", 5e-324),
    ],
)  # fmt: skip
def test_double_accepts(text: str, value: float) -> None:
    assert parse_double(text, "a") == value


@pytest.mark.parametrize("text", ["NaN", "+NaN", "-NaN", " NaN"])
def test_double_accepts_nan(text: str) -> None:
    assert math.isnan(parse_double(text, "a"))


@pytest.mark.parametrize(
    "text",
    ["", " ", "abc", "nan", "inf", "infinity", "NaNd", "1_0", "٥", "5L", "0x5", "0x1p", "0xp1", ".",
     "e5", "5e", "+", "- 5", "5 5", "\u00a05", "1,5", "Infinityd", "0x1p1.0"],
)  # fmt: skip
def test_double_refuses(text: str) -> None:
    with pytest.raises(FilterEvaluationError):
        parse_double(text, "a")


def test_sign_of_zero_is_preserved() -> None:
    assert math.copysign(1, parse_double("-0.0", "a")) == -1


def test_boolean_is_true_in_any_case_and_false_otherwise() -> None:
    assert parse_boolean("true")
    assert parse_boolean("TrUe")
    assert not any(map(parse_boolean, ["", "yes", "1", " true"]))


def test_order_of_doubles_is_total() -> None:
    ascending = [-math.inf, -1.0, -0.0, 0.0, 5e-324, 1.0, math.inf, math.nan]
    for at, left in enumerate(ascending):
        for other, right in enumerate(ascending):
            sign = compare_doubles(left, right)
            assert (sign > 0) - (sign < 0) == (at > other) - (at < other), (left, right)


def test_order_of_whole_numbers() -> None:
    pairs = [(1, 2), (2, 2), (3, 2)]
    assert [compare_whole_numbers(left, right) for left, right in pairs] == [-1, 0, 1]


def test_error_names_the_property_its_value_and_the_class() -> None:
    with pytest.raises(FilterEvaluationError, match=r"property price is 'abc', .* \(Integer\)"):
        parse_integer("abc", "price")
    with pytest.raises(FilterEvaluationError, match=r"the string is 'x', .* \(Double\)"):
        parse_double("x", "")


def test_error_cuts_a_long_value() -> None:
    with pytest.raises(FilterEvaluationError) as caught:
        parse_integer("x" * 10_000, "price")
    assert len(str(caught.value)) < 200
