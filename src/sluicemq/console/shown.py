"""Values as they are read: numbers, sizes, times and spans as text, for the templates."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

from sluicemq.model.system_names import (
    is_dead_letter_topic,
    is_retry_topic,
    is_system_group,
    is_system_topic,
)
from sluicemq.model.topic import PERM_READ, PERM_WRITE
from sluicemq.numbers import format_duration

_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NONE: Final = "–"


def number(value: float | None) -> str:
    """With commas; of fractions one digit."""
    if value is None:
        return NONE
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def size(count_bytes: float | None) -> str:
    """In the largest unit that leaves a number above 1."""
    if count_bytes is None:
        return NONE
    for unit in _SIZES:
        if abs(count_bytes) < 1024 or unit == _SIZES[-1]:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return NONE


def time(time_ms: int | None) -> str:
    """UTC, to the second; nothing for 0, -1 and None."""
    if time_ms is None or time_ms <= 0:
        return NONE
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return NONE


def field_time(time_ms: int) -> str:
    """As a browser's field for a time has it."""
    return time(time_ms).replace(" ", "T")


def span(span_ms: float | None) -> str:
    """Return a duration in its two largest units."""
    return NONE if span_ms is None else format_duration(span_ms)


def permission(bits: int) -> str:
    """RocketMQ's bits as letters: RW, R–, –W."""
    return ("R" if bits & PERM_READ else NONE) + ("W" if bits & PERM_WRITE else NONE)


def topic_kind(name: str, own_names: Collection[str] = ()) -> str:
    """Return "retry", "dead", "system" or "normal". `own_names`: the clusters and brokers."""
    if is_retry_topic(name):
        return "retry"
    if is_dead_letter_topic(name):
        return "dead"
    return "system" if is_system_topic(name, own_names) else "normal"


def group_kind(name: str) -> str:
    """Return "system" or "normal"."""
    return "system" if is_system_group(name) else "normal"


FILTERS: Final = {
    "number": number, "size": size, "time": time, "span": span, "permission": permission,
    "field_time": field_time,
}  # fmt: skip
