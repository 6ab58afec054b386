"""Which predicates the broker decides and which Spark: a line of the log, and of a DataFrame.

Two places say it. While Spark plans a read with push-down on, `report_pushdown` logs one line at
level INFO; the planner is a process of its own without any logging set up, so the line is written
to stderr, where Spark's driver shows it (the option `reportPushdown` switches it off):

    rocketmq 'flights': the broker decides tags in ['UA']; SQL92 delay > 60; left to Spark of what
    it offered: StringContains(origin, 'J')

What Spark cannot offer a source at all (OR, functions, map elements) is not in that line. And
Spark's own plan has `PushedFilters` in `df.explain("formatted")` and on the SQL page of its UI;
`pushdown(df)` reads both lists out of it. `store_time`, and `keys` where brokers evaluate no SQL92,
shorten a read without being in that list, as Spark compares them again.
"""

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sluicemq.spark.filters import Pushed

logger = logging.getLogger(__name__)
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Pushdown(NamedTuple):
    """Predicates of a DataFrame's plan as Spark writes them: at the broker, and by Spark."""

    broker: tuple[str, ...]
    spark: tuple[str, ...]

    def __str__(self) -> str:
        return f"broker: {', '.join(self.broker) or '-'}; Spark: {', '.join(self.spark) or '-'}"


def pushdown(frame: Any) -> Pushdown:
    """What Spark's plan says of a DataFrame (nothing is read); several reads are put together."""
    execution = frame._jdf.queryExecution()
    text = frame.sparkSession._jvm.PythonSQLUtils.explainString(execution, "formatted")
    return parse_plan(text)


def parse_plan(text: str) -> Pushdown:
    """The same from the text of `explain("formatted")`."""
    broker: list[str] = []
    for listed in re.findall(r"^PushedFilters: \[(.*)\]$", text, re.MULTILINE):
        broker += [one for one in re.split(r", (?=[A-Z]\w*\()", listed) if one]
    spark = re.findall(r"^Condition : (.*)$", text, re.MULTILINE)
    return Pushdown(tuple(broker), tuple(spark))


def report_pushdown(
    label: str,
    pushed: Pushed,
    filters: Sequence[Any],
    rest: Sequence[Any],
    *,
    decider: str = "the broker",
) -> None:
    """One line for one read; nothing without predicates. `decider` looks at what was pushed."""
    if not filters:
        return
    _to_stderr()
    left = ", ".join(map(_told, rest)) or "nothing"
    logger.info(
        "rocketmq %r: %s decides %s; left to Spark of what it offered: %s",
        label, decider, pushed.told(), left,
    )  # fmt: skip


def _told(predicate: Any) -> str:
    if type(predicate).__name__ == "Not":
        return f"Not({_told(predicate.child)})"
    values = [getattr(predicate, "value", None)] if hasattr(predicate, "value") else []
    inner = ", ".join([".".join(predicate.attribute), *map(repr, values)])
    return f"{type(predicate).__name__}({inner})"


def _to_stderr() -> None:
    """Once a process, unless somebody has set logging up."""
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
