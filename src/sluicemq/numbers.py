"""Whole numbers in texts that somebody else wrote: requests, properties of messages, settings."""

from typing import Final

LONG_MAX: Final = (1 << 63) - 1
"""The largest number of 64 bits, which is what Java calls a long."""
_DIGITS_MAX: Final = 64  # leading zeros included; `int` raises ValueError from 4,301 digits on


_UNITS: Final = (
    ("seconds", range(10**9, 10**10), 1_000, 1),
    ("microseconds", range(10**15, 10**16), 1, 1_000),
    ("nanoseconds", range(10**18, 5 * 10**18), 1, 1_000_000),
)
"""Units of time since 1970, and the numbers that times from 2001 on have in them. As milliseconds
those numbers are in the first months of 1970, or after the year 33,000."""


def other_unit(number: int) -> tuple[str, int] | None:
    """Return the unit in which a number is a time of today, and that time in milliseconds since
    1970; None when the number may be milliseconds."""
    for unit, numbers, factor, divisor in _UNITS:
        if number in numbers:
            return unit, number * factor // divisor
    return None


def natural(text: str | bytes, maximum: int = LONG_MAX) -> int | None:
    """Return the number from 0 to `maximum` that the text writes in ASCII digits; None for any
    other text, also for one with a sign, with spaces, or with more digits than `int` reads."""
    if len(text) > _DIGITS_MAX or not text.isascii() or not text.isdigit():
        return None
    number = int(text)
    return number if number <= maximum else None
