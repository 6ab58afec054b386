"""Whole numbers in texts that somebody else wrote: requests, properties of messages, settings."""

from typing import Final

LONG_MAX: Final = (1 << 63) - 1
"""The largest number of 64 bits, which is what Java calls a long."""
_DIGITS_MAX: Final = 64  # leading zeros included; `int` raises ValueError from 4,301 digits on


def natural(text: str | bytes, maximum: int = LONG_MAX) -> int | None:
    """Return the number from 0 to `maximum` that the text writes in ASCII digits; None for any
    other text, also for one with a sign, with spaces, or with more digits than `int` reads."""
    if len(text) > _DIGITS_MAX or not text.isascii() or not text.isdigit():
        return None
    number = int(text)
    return number if number <= maximum else None
