"""Texts of options -> values. Each function raises ValueError saying what the text must be."""

import contextlib
import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.client.core.names import check_topic_to_send
from sluicemq.errors import ConfigurationError


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def expression(value: str) -> str:
    return value


def boolean(value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise ValueError("it must be true or false")
    return value.strip().lower() == "true"


def count(least: int, most: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        number = int(value) if value.strip().lstrip("-").isdecimal() else None
        if number is None or not least <= number <= most:
            raise ValueError(f"it must be a whole number from {least:,} to {most:,}")
        return number

    return parse


def choice(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.strip().lower() not in words:
            raise ValueError(f"it must be {' or '.join(words)}")
        return value.strip().lower()

    return parse


def bad_rows(value: str) -> str:
    """`fail`, `skip` or `topic:NAME`."""
    word, _, topic = value.strip().partition(":")
    if word.lower() in ("fail", "skip") and not topic:
        return word.lower()
    if word.lower() != "topic":
        raise ValueError("it must be fail, skip or topic:NAME")
    try:
        return f"topic:{check_topic_to_send(topic.strip())}"
    except ConfigurationError as error:
        raise ValueError(f"{error.fact}") from None


def addresses(value: str) -> str:
    return ";".join(part.strip() for part in text(value).replace(",", ";").split(";") if part)


def names(value: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in value.replace(";", ",").split(",") if part.strip())
    if not names:
        raise ValueError("it is empty")
    return tuple(dict.fromkeys(names))


def pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    return text(value)


@dataclass(frozen=True, slots=True)
class Moment:
    """A time where an offset is asked for: the first message stored then or later."""

    time_ms: int


OffsetChoice = int | str | Moment
OffsetTable = dict[str, dict[int, OffsetChoice]]
"""By broker and queue."""


def offsets(value: str) -> str | OffsetTable | dict[str, OffsetTable]:
    """`earliest`, `latest`, or JSON {"broker": {"queue id": offset, word or time}}, for several
    topics {"topic": {"broker": …}}."""
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        found = json.loads(value)
        if any(isinstance(inner, dict) for one in found.values() for inner in one.values()):
            return {topic: _offset_table(table) for topic, table in found.items()}
        return _offset_table(found)
    except (json.JSONDecodeError, TypeError, AttributeError):
        raise ValueError(
            'it must be earliest, latest or JSON such as {"broker-a": {"0": 120, "1": "earliest"}}'
        ) from None


def _offset_table(found: Any) -> OffsetTable:
    return {
        broker: {_queue_id(queue): _offset(offset, queue, broker) for queue, offset in one.items()}
        for broker, one in found.items()
    }


def _queue_id(queue: str) -> int:
    if not queue.isdecimal():
        raise ValueError(f"{queue!r} is no queue; write a queue id, a whole number")
    return int(queue)


def _offset(offset: Any, queue: str, broker: str) -> OffsetChoice:
    if offset in ("earliest", "latest"):
        return str(offset)
    if isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0:
        return offset
    if isinstance(offset, str) and not offset.strip().lstrip("-").isdecimal():
        with contextlib.suppress(ValueError):
            return Moment(moment(offset))
    raise ValueError(
        f"queue {queue!r} of {broker!r} has the offset {offset!r}; write a whole number,"
        " earliest, latest or a time like 2026-11-21T12:00:00Z"
    )


def moment(value: str) -> int:
    """Milliseconds since 1970, or ISO 8601 (without a zone: UTC)."""
    if value.strip().lstrip("-").isdecimal():
        return int(value)
    try:
        found = datetime.datetime.fromisoformat(value.strip())
    except ValueError:
        raise ValueError(
            "it must be milliseconds since 1970 or a time like 2026-11-21T12:00:00Z"
        ) from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    return (found - _EPOCH) // datetime.timedelta(milliseconds=1)


_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
