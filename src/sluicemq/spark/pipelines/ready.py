"""What a ready pipeline is: declared fields, a plan that changes nothing, and a run.

A ready pipeline (archive, dead letters, trace, audit, dedup …) is a value `Ready`, made by its
module. The file's reader checks the fields under `with:` against the declared ones, so a ready
pipeline gets values of the declared kinds, defaults filled in, and nothing else. It talks to the
user through `Task.say` alone, looks at `Task.stopping` between steps, and ends with a `Report`.

Declared fields of a mapping: their texts become values of the declared kinds, or problems.

The sinks of a file and the ready pipelines' `with:` declare their fields alike (`ready.Field`), so
they are checked by the same hand: unknown names with the nearest one, missing ones, bad values.

Ready pipelines as Python functions: options by name, checked against the declared fields.

Small tables as lines of text: what ready pipelines show beside what they write.
"""

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sluicemq.errors import ConfigurationError
from sluicemq.spark.pipelines.document import Entry, nearest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT, INTEGER, NUMBER, FLAG, LIST, DURATION, MAPPING = (
    "text", "integer", "number", "flag", "list", "duration", "mapping",
)  # fmt: skip
"""Kinds of a field. A list is of texts, a duration (`90s`, `15m`, `6h`, `7d`) is seconds (float),
a mapping goes from text to text."""


class _Required:
    """The default of a field that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True, slots=True)
class Field:
    """One declared field of a ready pipeline; `words`: all it may say, when there are few."""

    name: str
    kind: str
    what: str
    default: Any = REQUIRED
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """What a run did: numbers by name, files it wrote, lines for the user. `is_failure`: it came to
    its end, and what it found is to be the exit code 1."""

    figures: dict[str, int | float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One run. `options`: every declared field by name. `connection`: options of the `rocketmq`
    source and sink that say where the cluster is and who asks (`nameServers`, `accessKey` …)."""

    spark: "SparkSession"
    options: Mapping[str, Any]
    connection: Mapping[str, str]
    say: Callable[[str], None] = print
    stopping: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Ready:
    """A ready pipeline. `plan` reads at most and says what `run` would do, a line each."""

    name: str
    what: str
    fields: tuple[Field, ...]
    plan: Callable[[Task], list[str]]
    run: Callable[[Task], Report]


_HOME: Final = {
    "archive": "archive:ARCHIVE",
    "replay": "replay:REPLAY",
    "dead-letters": "deadletters:DEAD_LETTERS",
    "trace": "trace:TRACE",
    "audit": "audit:AUDIT",
    "dedup": "dedup:DEDUP",
}
NAMES: Final = tuple(_HOME)


def ready(name: str) -> Ready:
    """The ready pipeline of a name out of `NAMES`; imported when asked for. Raises KeyError."""
    module, _, attribute = _HOME[name].partition(":")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    assert isinstance(found, Ready)
    return found


_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def duration_s(text: str) -> float:
    """`90s`, `15m`, `6h`, `7d`, `500ms` -> seconds. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError("write a number with a unit: 500ms, 90s, 15m, 6h or 7d")
    return float(found[1]) * _UNIT_S[found[2]]


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d[\d_]*", text.strip()):
        raise ValueError("write a whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("write a number") from None


def _flag(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return text.strip().lower() == "true"


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


_SCALARS: Final[Mapping[str, Callable[[str], Any]]] = {
    TEXT: _text, INTEGER: _integer, NUMBER: _number, FLAG: _flag, DURATION: duration_s,
}  # fmt: skip


def read_fields(
    entries: Mapping[str, Entry], fields: Sequence[Field], owner: Entry, what: str
) -> dict[str, Any]:
    """Every declared field by name, defaults filled in. `what` says whose fields they are; a
    missing one is a problem of the owner's line."""
    by_name = {one.name: one for one in fields}
    values = {one.name: one.default for one in fields if one.default is not REQUIRED}
    for name, entry in entries.items():
        if name not in by_name:
            entry.problem(f"{what} has no such key.", nearest(name, by_name))
        else:
            value = read_field(entry, by_name[name])
            if value is not None:
                values[name] = value
    for one in fields:
        if one.default is REQUIRED and one.name not in entries:
            owner.problem(f"{what} needs the key {one.name!r}.", one.what)
    return values


def read_field(entry: Entry, one: Field) -> Any:
    """The value, or None with a problem."""
    if one.kind == LIST:
        return _listed(entry, one)
    if one.kind == MAPPING:
        found = {name: inner.scalar() for name, inner in (entry.mapping() or {}).items()}
        return {name: text for name, text in found.items() if text is not None}
    text = entry.scalar()
    if text is None:
        return None
    try:
        value = _SCALARS[one.kind](text)
    except ValueError as error:
        entry.problem(f"it is {text!r}: {error}.")
        return None
    return _said(entry, one, value)


def _listed(entry: Entry, one: Field) -> list[str] | None:
    """A list of texts; a single text is a list of one."""
    entries = [entry] if isinstance(entry.node.value, str) else entry.items()
    texts = [inner.scalar() for inner in entries or ()]
    return [text for text in texts if text is not None and _said(entry, one, text) is not None]


def _said(entry: Entry, one: Field, value: Any) -> Any:
    if one.words and value not in one.words:
        entry.problem(f"it is {value!r}.", f"It can be {' or '.join(one.words)}.")
        return None
    return value


def task_of(
    fields: Sequence[Field],
    spark: Any,
    connection: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    say: Callable[[str], None] = print,
    stopping: Callable[[], bool] = lambda: False,
) -> Task:
    """A task with defaults filled in. Raises ConfigurationError for an option that is unknown,
    missing, or says what it may not."""
    known = {field.name: field for field in fields}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(known)
            raise ConfigurationError(
                f"there is no option {name!r}.", cure=f"{hint}There are: {listed}."
            )
    values = {field.name: _value(field, options) for field in fields}
    return Task(spark, values, connection, say, stopping)


def _value(field: Field, options: Mapping[str, Any]) -> Any:
    value = options.get(field.name, field.default)
    if value is REQUIRED:
        raise ConfigurationError(f"the option {field.name!r} is missing.", cure=field.what)
    if field.kind == LIST and isinstance(value, str):
        value = [value]
    if field.words and value not in field.words:
        raise ConfigurationError(
            f"the option {field.name!r} is {value!r}.", cure=f"It is {' or '.join(field.words)}."
        )
    return value


_WIDTH_MAX: Final = 60


def table_lines(
    title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], empty: str = "none"
) -> list[str]:
    """A title, the names and the rows in columns; numbers stand to the right."""
    rows = [list(row) for row in rows]
    if not rows:
        return [f"{title}: {empty}"]
    texts = [[_shown(value) for value in row] for row in rows]
    right = [
        all(value is None or _is_number(value) for value in column)
        for column in zip(*rows, strict=True)
    ]
    widths = [
        max(len(name), *(len(text) for text in column))
        for name, column in zip(names, zip(*texts, strict=True), strict=True)
    ]

    def line(values: Sequence[str]) -> str:
        parts = [
            value.rjust(width) if is_right else value.ljust(width)
            for value, width, is_right in zip(values, widths, right, strict=True)
        ]
        return "  " + "  ".join(parts).rstrip()

    return [title, line(names), *map(line, texts)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if _is_number(value):
        return f"{value:,}"
    text = str(value)
    return text if len(text) <= _WIDTH_MAX else text[: _WIDTH_MAX - 1] + "…"
