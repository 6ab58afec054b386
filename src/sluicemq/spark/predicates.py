"""Predicates as Spark's Python sources know them, as the text of an option, and in the log.

Found in the plan of a query by `references`, they are the option `predicates` of one load, as JSON:

    [{"is": "EqualTo", "column": "tags", "value": "UA"}, {"is": "IsNull", "column": "delay",
      "not": true}]

`source` makes `pyspark.sql.datasource` objects of them again and lets `filters.Pushdown` take what
the broker decides exactly. A value is a text, a number, true or false, a list of these, or a time,
written {"us": microseconds since 1970}.
"""

import datetime
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import datasource

from sluicemq.errors import ConfigurationError
from sluicemq.spark.filters import Pushed

COMPARED: Final = (
    "EqualTo", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual", "In",
)  # fmt: skip
PRESENT: Final = ("IsNull", "IsNotNull")
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
logger = logging.getLogger(__name__)
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def predicates_of(text: str | None) -> list[Any]:
    """The option's predicates as Spark's objects. Raises ConfigurationError."""
    try:
        return [_predicate(one) for one in json.loads(text or "[]")]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"the option 'predicates' cannot be read: {error!r}.",
            cure="load_where, sluice sql and pipelines write it; leave it out.",
        ) from None


def _predicate(given: Mapping[str, Any]) -> Any:
    kind, path = given["is"], (given["column"],)
    if kind in PRESENT:
        found = getattr(datasource, kind)(path)
    elif kind in COMPARED:
        found = getattr(datasource, kind)(path, _value(given["value"]))
    else:
        raise ValueError(kind)
    return datasource.Not(found) if given.get("not") else found


def _value(given: Any) -> Any:
    if isinstance(given, list):
        return [_value(one) for one in given]
    if isinstance(given, dict):
        return _EPOCH + datetime.timedelta(microseconds=given["us"])
    return given


def report_pushdown(
    label: str, pushed: Pushed, offered: Sequence[Any], left: Sequence[Any], decider: str
) -> None:
    """Logs one line for one read; nothing without predicates. `decider` looks at what was pushed.

    The planner is a process of its own without any logging set up, so the line goes to stderr,
    where Spark's driver shows it (the option `reportPushdown` switches it off):

        rocketmq 'flights': the broker decides tags in ['UA']; SQL92 delay > 60; left to Spark of
        what it offered: GreaterThan(origin, 'J')
    """
    if not offered:
        return
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info(
        "rocketmq %r: %s decides %s; left to Spark of what it offered: %s",
        label, decider, pushed.told(), ", ".join(map(told, left)) or "nothing",
    )  # fmt: skip


def told(predicate: Any) -> str:
    """`EqualTo(tags, 'UA')`."""
    if type(predicate).__name__ == "Not":
        return f"Not({told(predicate.child)})"
    values = [getattr(predicate, "value", None)] if hasattr(predicate, "value") else []
    inner = ", ".join([".".join(predicate.attribute), *map(repr, values)])
    return f"{type(predicate).__name__}({inner})"
