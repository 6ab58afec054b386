"""Format values as text for the templates: numbers, sizes, times and durations.

A value that is missing is shown as `NONE`.
"""

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

_SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NONE: Final = "–"


def format_number(number: float | None) -> str:
    """Return a number with commas, and one decimal place if it is a float."""
    if number is None:
        return NONE
    return f"{number:,.1f}" if isinstance(number, float) else f"{number:,}"


def format_size(count_bytes: float | None) -> str:
    """Return a number of bytes in the largest fitting unit, such as "1.5 MiB"; `NONE` for None."""
    if count_bytes is None:
        return NONE
    for unit in _SIZE_UNITS:
        if abs(count_bytes) < 1024 or unit == _SIZE_UNITS[-1]:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return NONE


def format_time(time_ms: int | None) -> str:
    """Return a time in milliseconds since 1970 as UTC, to the second.

    Return `NONE` for None, for values below 1, and for years beyond 9999.
    """
    if time_ms is None or time_ms <= 0:
        return NONE
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return NONE


def format_field_time(time_ms: int) -> str:
    """Return a time as the value of a `datetime-local` field."""
    return format_time(time_ms).replace(" ", "T")


def format_span(span_ms: float | None) -> str:
    """Return a duration in its two largest units."""
    return NONE if span_ms is None else format_duration(span_ms)


def format_permission(bits: int) -> str:
    """Return RocketMQ's permission bits as letters: RW, R–, –W or ––."""
    return ("R" if bits & PERM_READ else NONE) + ("W" if bits & PERM_WRITE else NONE)


def topic_kind(name: str, own_names: Collection[str] = ()) -> str:
    """Return the kind of a topic: "retry", "dead", "system" or "normal".

    `own_names` are the names of the clusters and brokers, each of which has a system topic of its
    name.
    """
    if is_retry_topic(name):
        return "retry"
    if is_dead_letter_topic(name):
        return "dead"
    return "system" if is_system_topic(name, own_names) else "normal"


def group_kind(name: str) -> str:
    """Return "system" or "normal"."""
    return "system" if is_system_group(name) else "normal"


FILTERS: Final = {
    "number": format_number,
    "size": format_size,
    "time": format_time,
    "span": format_span,
    "permission": format_permission,
    "field_time": format_field_time,
}
"""The filters of the templates by name."""
