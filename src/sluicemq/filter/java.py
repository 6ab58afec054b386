"""Strings and numbers exactly as Java sees them.

A property is a string; RocketMQ turns it into the class of what it is compared with by
Integer.valueOf, Long.valueOf, Double.valueOf or Boolean.valueOf (spec/filter.md §7), and the
syntax those accept is not Python's: no blanks and no underscores in whole numbers but any Unicode
decimal digit of one UTF-16 unit; in floats blanks around, `5d`, `0x1p3`, `NaN`, but ASCII digits.

A failed conversion ends the evaluation of the whole expression: the functions named `..._of` raise
FilterEvaluationError with the property's name and value, `..._or_none` are for whole columns.
"""

import re
from math import copysign, inf, nan

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.nodes import INTEGER_MAX, LONG_MAX

# What String.trim() of Java removes: everything up to the space.
BLANKS = "".join(map(chr, range(0x21)))


def has_surrogate(text: str) -> bool:
    """Does it hold half a character (possible in Java strings and in JSON, not in UTF-8)?"""
    return any("\ud800" <= character <= "\udfff" for character in text)


def utf16_units(text: str) -> str:
    """One character a UTF-16 unit: what lies above U+FFFF becomes its two surrogates."""
    data = text.encode("utf-16-be", "surrogatepass")
    return "".join(chr(data[at] << 8 | data[at + 1]) for at in range(0, len(data), 2))


_FLOAT = re.compile(
    r"""(?P<sign>[+-]?)(?:
        (?P<name>NaN|Infinity)
      | (?:(?P<hexadecimal>0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)
         | (?P<decimal>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
        )[fFdD]?
    )""",
    re.VERBOSE,
)


def integer_of(text: str, name: str) -> int:
    """Integer.valueOf: 32 bits."""
    # Hot: the plain case first. Nine digits always fit.
    if len(text) < 10 and text.isdigit() and text.isascii():
        return int(text)
    value = integer_or_none(text)
    if value is None:
        raise _not_a("whole number of 32 bits (Integer)", text, name)
    return value


def long_of(text: str, name: str) -> int:
    """Long.valueOf: 64 bits."""
    if len(text) < 19 and text.isdigit() and text.isascii():
        return int(text)
    value = long_or_none(text)
    if value is None:
        raise _not_a("whole number of 64 bits (Long)", text, name)
    return value


def double_of(text: str, name: str) -> float:
    """Double.valueOf: decimal, hexadecimal, NaN, Infinity; too large becomes Infinity."""
    value = double_or_none(text)
    if value is None:
        raise _not_a("number (Double)", text, name)
    return value


def integer_or_none(text: str) -> int | None:
    """Integer.valueOf, None where it throws."""
    value = _whole_number(text)
    return value if value is None or -INTEGER_MAX - 1 <= value <= INTEGER_MAX else None


def long_or_none(text: str) -> int | None:
    """Long.valueOf, None where it throws."""
    value = _whole_number(text)
    return value if value is None or -LONG_MAX - 1 <= value <= LONG_MAX else None


def double_or_none(text: str) -> float | None:
    """Double.valueOf, None where it throws."""
    # Hot: digits with a dot or without, which Java and Python read alike.
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text)
    found = _FLOAT.fullmatch(text.strip(BLANKS))
    if found is None:
        return None
    if name := found["name"]:
        size = nan if name == "NaN" else inf
    elif found["decimal"]:
        size = float(found["decimal"])
    else:
        try:
            size = float.fromhex(found["hexadecimal"])
        except OverflowError:
            size = inf
    return -size if found["sign"] == "-" else size


def boolean_of(text: str) -> bool:
    """Boolean.valueOf: "true" in any case, everything else is FALSE."""
    return text.lower() == "true"


def compare_whole_numbers(left: int, right: int) -> int:
    """Integer.compareTo, Long.compareTo."""
    return (left > right) - (left < right)


def compare_doubles(left: float, right: float) -> int:
    """Double.compareTo: NaN is the greatest and equals itself, -0.0 is below 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right and left != 0:
        return 0
    return _rank(left) - _rank(right)


def _rank(value: float) -> int:
    """Orders what `<` and `>` cannot: -0.0, then 0.0 and all numbers, then NaN."""
    if value != value:  # noqa: PLR0124 - NaN is the one number that differs from itself
        return 2
    return 0 if value == 0 and copysign(1, value) < 0 else 1


def _whole_number(text: str) -> int | None:
    digits = text[1:] if text[:1] in ("+", "-") else text
    # isdecimal() is Java's Character.digit, but Java looks at UTF-16 units: no digit above U+FFFF.
    if not digits.isdecimal() or max(digits) > "\uffff":
        return None
    if len(digits) > 20:  # leading zeros are fine at any length; Python refuses above 4,300 digits
        if any(map(int, digits[:-20])):
            return None
        digits = digits[-20:]
    value = int(digits)
    return -value if text[0] == "-" else value


def _not_a(wanted: str, text: str, name: str) -> FilterEvaluationError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    owner = f"property {name} is" if name else "the string is"
    return FilterEvaluationError(
        f"{owner} {shown!r}, which is no {wanted}.",
        reason=f"{name or 'a string'} is no {wanted}",
    )
