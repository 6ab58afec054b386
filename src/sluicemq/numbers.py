"""Parse numbers, times and durations in text that comes from outside, and format durations.

The texts are fields of requests, properties of messages, settings, and options of commands. All
functions accept any text and report a text of another form by returning None; they never raise.
"""

import re
from typing import Final

LONG_MAX: Final = (1 << 63) - 1
"""The largest signed number of 64 bits: the largest `long` of Java."""
_DIGITS_MAX: Final = 64
"""Longer texts are refused, zeros in front included: `int` raises from 4,301 digits on."""

_TIME_UNITS: Final = (
    ("seconds", range(10**9, 10**10), 1_000, 1),
    ("microseconds", range(10**15, 10**16), 1, 1_000),
    ("nanoseconds", range(10**18, 5 * 10**18), 1, 1_000_000),
)
"""For each unit: its name, the numbers that times from 2001 on have in it, and the factor and
divisor that make milliseconds of them. Read as milliseconds, these numbers would be in the first
months of 1970 or after the year 33,000."""

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"([0-9]{1,64}(?:\.[0-9]{1,64})?) *(ms|s|m|h|d)")
_UNITS_SHOWN: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def natural(digits: str | bytes, maximum: int = LONG_MAX) -> int | None:
    """Return the whole number from 0 to `maximum` that the ASCII digits in `digits` mean, or None.

    A text with a sign, a space, an underscore or more than 64 digits gives None.
    """
    if len(digits) > _DIGITS_MAX or not digits.isascii() or not digits.isdigit():
        return None
    number = int(digits)
    return number if number <= maximum else None


def other_unit(number: int) -> tuple[str, int] | None:
    """Return (unit, milliseconds) if `number` is probably a time in another unit than milliseconds.

    `number` counts from 1970. The unit is "seconds", "microseconds" or "nanoseconds", in which the
    number is a time since 2001. The second item is this time in milliseconds. Return None if the
    number may be in milliseconds already.
    """
    for unit, numbers_since_2001, factor, divisor in _TIME_UNITS:
        if number in numbers_since_2001:
            return unit, number * factor // divisor
    return None


def parse_duration_ms(duration: str) -> int | float | None:
    """Return the milliseconds that a text such as "500ms", "90s", "1.5h" or "7d" means, or None.

    The text is a number without a sign, then ms, s, m (minutes), h or d, with or without spaces
    between them. The result is an int if the number is whole. A duration above `LONG_MAX` gives
    None.
    """
    match = _DURATION.fullmatch(duration)
    if match is None:
        return None
    digits = match[1]
    number = float(digits) if "." in digits else int(digits)
    unit = match[2]
    duration_ms = number * _UNITS_MS[unit]
    return duration_ms if duration_ms <= LONG_MAX else None


def format_duration(duration_ms: float) -> str:
    """Return a duration in its two largest units: "1 d 3 h", "12 min", "500 ms", "0 s".

    Smaller units are cut off, not rounded. A negative duration is shown in milliseconds.
    """
    remaining_ms = int(duration_ms)
    amounts = []
    for unit_ms, unit in _UNITS_SHOWN:
        if remaining_ms >= unit_ms:
            amounts.append(f"{remaining_ms // unit_ms} {unit}")
            remaining_ms %= unit_ms
    if amounts:
        return " ".join(amounts[:2])
    return f"{remaining_ms} ms" if remaining_ms else "0 s"
