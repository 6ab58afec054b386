"""What a ready pipeline is: declared fields, a plan that changes nothing, and a run.

A ready pipeline (archive, dead letters, trace, audit, dedup …) is a value `Ready`, made by its
module. The file's reader checks the fields under `with:` against the declared ones, so a ready
pipeline gets values of the declared kinds, defaults filled in, and nothing else. It talks to the
user through `Task.say` alone, looks at `Task.stopping` between steps, and ends with a `Report`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

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
