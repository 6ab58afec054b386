"""Which predicates of a DataFrame the broker decides and which Spark.

Of our sources the option `predicates` of the load says what was offered, and the reader, made here
as Spark's planner makes it, what it takes. Of files, Spark's plan has `PushedFilters`. What the
broker decides Spark applies again (design/0010), but drops nothing by
it. `store_time`, and `keys` where brokers evaluate no SQL92, shorten a read and are Spark's still.
"""

import json
import re
from typing import Any, Final, NamedTuple

from pyspark.sql.types import StructType

from sluicemq.spark.classic import execution_of, explained
from sluicemq.spark.filters import told
from sluicemq.spark.references import kind_of, nodes, translator
from sluicemq.spark.source import RocketSource, StoreSource

_SCAN: Final = "DataSourceV2ScanRelation"
_SOURCES: Final = {one.name(): one for one in (RocketSource, StoreSource)}


class Pushdown(NamedTuple):
    """Predicates of a DataFrame's plan: those at the broker, and those that Spark decides."""

    broker: tuple[str, ...]
    spark: tuple[str, ...]

    def __str__(self) -> str:
        return f"broker: {', '.join(self.broker) or '-'}; Spark: {', '.join(self.spark) or '-'}"


def pushdown(frame: Any) -> Pushdown:
    """Return what the plan of a DataFrame says about its predicates; those of several reads are
    put together. No message is read. Raises ConfigurationError for a frame of Spark Connect."""
    execution = execution_of(frame)
    broker, spark = parse_plan(explained(frame, "formatted")), list[str]()
    translate = translator(frame.sparkSession)
    for node, conditions in nodes(execution.optimizedPlan()):
        known: list[dict[str, Any]] = []  # predicates that the reader of a scan takes
        source = (
            _SOURCES.get(str(node.relation().table().name())) if kind_of(node) == _SCAN else None
        )
        options = dict(node.relation().options().asCaseSensitiveMap()) if source else {}
        if source is not None and "predicates" in options:
            schema = StructType.fromJson(json.loads(node.relation().schema().json()))
            reader = source(options | {"reportPushdown": "false"}).reader(schema)
            both = zip(json.loads(options["predicates"]), reader.offered, strict=False)
            for said, one in both:  # fewer are offered when it was told to take none
                if one not in reader.left:
                    known.append(said)
                    broker.append(told(one))
        left = [str(one.toString()) for one in conditions if translate(one) not in known]
        spark += [" AND ".join(left)] if left else []
    return Pushdown(tuple(broker), tuple(spark))


def parse_plan(text: str) -> list[str]:
    """What files were offered, from the text of `explain("formatted")`."""
    found: list[str] = []
    for listed in re.findall(r"^PushedFilters: \[(.*)\]$", text, re.MULTILINE):
        found += [one for one in re.split(r", (?=[A-Z]\w*\()", listed) if one]
    return found
