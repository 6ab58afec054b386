"""What a ready pipeline is: declared fields, a plan that changes nothing, and a run.

A ready pipeline (archive, dead letters, trace, audit, dedup …) is a value `Ready`, made by its
module. The fields under `with:` of a file, and the options of a Python call, are checked against
the declared ones, so a ready pipeline gets values of the declared kinds, defaults filled in, and
nothing else. It talks to the user through `Task.say` alone, looks at `Task.stopping` between steps,
and ends with a `Report`. The sinks of a file declare their fields in the same way.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sluicemq.errors import ConfigurationError
from sluicemq.spark.errors import did_you_mean
from sluicemq.spark.pipelines.document import Entry, nearest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEXT, INTEGER, NUMBER, FLAG, LIST, DURATION, MAPPING = (
    "text", "integer", "number", "flag", "list", "duration", "mapping",
)  # fmt: skip
"""Kinds of a field. A list is of texts, a duration (`90s`, `15m`, `6h`, `7d`) is seconds (float),
a mapping goes from text to text."""
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_WIDTH_MAX: Final = 60


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

    def tell(self, report: Report, *lines: str) -> None:
        """Says the lines now, and reports them."""
        for line in lines:
            self.say(line)
        report.lines += lines


@dataclass(frozen=True, slots=True)
class Ready:
    """A ready pipeline. `plan` reads at most and says what `run` would do, a line each."""

    name: str
    what: str
    fields: tuple[Field, ...]
    plan: Callable[[Task], list[str]]
    run: Callable[[Task], Report]

    def task(
        self,
        spark: Any,
        connection: Mapping[str, str],
        options: Mapping[str, Any],
        *,
        say: Callable[[str], None] = print,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Task:
        """A run with these options by name, defaults filled in. Raises ConfigurationError for one
        that is unknown, missing, or says what it may not."""
        known = {field.name: field for field in self.fields}
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"there is no option {name!r}.",
                    cure=f"{did_you_mean(name, known)}There are: {', '.join(known)}.",
                )
        values = {}
        for name, one in known.items():
            value = options.get(name, one.default)
            if value is REQUIRED:
                raise ConfigurationError(f"the option {name!r} is missing.", cure=one.what)
            if one.words and value not in one.words:
                raise ConfigurationError(
                    f"the option {name!r} is {value!r}.", cure=f"It is {' or '.join(one.words)}."
                )
            values[name] = [value] if one.kind == LIST and isinstance(value, str) else value
        return Task(spark, values, connection, say, stopping)

    def call(
        self,
        spark: Any,
        connection: Mapping[str, str],
        *,
        say: Callable[[str], None] = print,
        stopping: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Report:
        """Runs it as a Python function. `options` are the pipeline's fields by name. Raises as
        `task`, and what the pipeline raises."""
        return self.run(self.task(spark, connection, options, say=say, stopping=stopping))


_HOME: Final = {
    "archive": "archive:ARCHIVE",
    "replay": "archive:REPLAY",
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


def load_messages(
    spark: "SparkSession", connection: Mapping[str, str], **options: str
) -> "DataFrame":
    """Messages of topics, by the batch source. What the options mean: docs/spark.md."""
    given = {"reportPushdown": "false", **connection, **options}
    return spark.read.format("rocketmq").options(**given).load()


# ---- fields of a file


def duration_s(text: str) -> float:
    """`90s`, `15m`, `6h`, `7d`, `500ms` -> seconds. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", text.strip())
    if found is None:
        raise ValueError("write a number with a unit: 500ms, 90s, 15m, 6h or 7d")
    return float(found[1]) * _UNIT_S[found[2]]


_SCALARS: Final[Mapping[str, tuple[str, Callable[[str], Any], str]]] = {
    TEXT: (r"(?s).*\S.*", str, "it is empty"),
    INTEGER: (r"\s*[+-]?\d[\d_]*\s*", int, "write a whole number"),
    NUMBER: (r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", float, "write a number"),
    FLAG: (r"(?i)\s*(true|false)\s*", lambda text: text.strip().lower() == "true",
           "write true or false"),
    DURATION: (r"(?s).*", duration_s, ""),
}  # fmt: skip
"""Kind -> what its texts look like, how they are read, and what to do about others."""


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
    """The value, or None with a problem. A single text is a list of one."""
    if one.kind == LIST:
        entries = [entry] if isinstance(entry.node.value, str) else entry.items()
        texts = [read_field(inner, Field("", TEXT, "", words=one.words)) for inner in entries or ()]
        return [text for text in texts if text is not None]
    if one.kind == MAPPING:
        found = {name: inner.scalar() for name, inner in (entry.mapping() or {}).items()}
        return {name: text for name, text in found.items() if text is not None}
    text = entry.scalar()
    if text is None:
        return None
    pattern, parse, cure = _SCALARS[one.kind]
    try:
        if not re.fullmatch(pattern, text):
            raise ValueError(cure)  # noqa: TRY301 - as the parsers do
        value = parse(text)
    except ValueError as error:
        entry.problem(f"it is {text!r}: {error}.")
        return None
    if one.words and value not in one.words:
        entry.problem(f"it is {value!r}.", f"It can be {' or '.join(one.words)}.")
        return None
    return value


# ---- tables


def table_lines(
    title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], empty: str = "none"
) -> list[str]:
    """A title, the names and the rows in columns; numbers stand to the right."""
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415

    rows = [list(row) for row in rows]
    if not rows:
        return [f"{title}: {empty}"]
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        is_number = all(value is None or type(value) in (int, float) for value in column)
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_shown, row))
    console = Console(width=10_000, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as printed:
        console.print(table)
    return [title, *(line.rstrip() for line in printed.get().splitlines())]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    if type(value) in (int, float):
        return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    text = " ".join(str(value).splitlines())
    return text if len(text) <= _WIDTH_MAX else text[: _WIDTH_MAX - 1] + "…"
