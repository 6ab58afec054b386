"""Report which predicates of a DataFrame the broker evaluates, and which Spark does.

For the sources of this package, the option `predicates` of the load contains the predicates that
were offered. The report creates a reader as Spark's planner does, and sees which predicates it
pushes. For files, Spark's plan contains `PushedFilters`.

Spark applies the broker's predicates again (design/0010), but they drop no rows there. Predicates
on `store_time`, and on `keys` if the brokers do not evaluate SQL92, shorten a read but count as
Spark's.
"""

import json
import re
from typing import Any, Final, NamedTuple

from pyspark.sql.types import StructType

from sluicemq.spark.classic import explain_plan, get_query_execution
from sluicemq.spark.filters import format_predicate
from sluicemq.spark.references import class_name, iterate_nodes, make_translator
from sluicemq.spark.source import RocketSource, StoreSource

_SCAN: Final = "DataSourceV2ScanRelation"
_SOURCES: Final = {source.name(): source for source in (RocketSource, StoreSource)}


class PushdownReport(NamedTuple):
    """The predicates in a DataFrame's plan, as texts for users.

    `broker` are those that a broker or a file's reader evaluates. `spark` has one text for each
    filter of the plan: the conditions that only Spark evaluates, joined by AND.
    """

    broker: tuple[str, ...]
    spark: tuple[str, ...]

    def __str__(self) -> str:
        return f"broker: {', '.join(self.broker) or '-'}; Spark: {', '.join(self.spark) or '-'}"


def pushdown(frame: Any) -> PushdownReport:
    """Return which predicates of a DataFrame the broker evaluates, and which Spark does.

    The predicates of several reads are combined. No message is read. Raises ConfigurationError for
    a DataFrame of Spark Connect.
    """
    execution = get_query_execution(frame)
    broker = parse_pushed_filters(explain_plan(frame, "formatted"))
    spark = list[str]()
    translate = make_translator(frame.sparkSession)
    for node, conditions in iterate_nodes(execution.optimizedPlan()):
        pushed: list[dict[str, Any]] = []  # in the form in which `translate` returns conditions
        source = None
        if class_name(node) == _SCAN:
            source = _SOURCES.get(str(node.relation().table().name()))
        options = dict(node.relation().options().asCaseSensitiveMap()) if source else {}
        if source is not None and "predicates" in options:
            schema = StructType.fromJson(json.loads(node.relation().schema().json()))
            reader = source(options | {"reportPushdown": "false"}).reader(schema)
            given = json.loads(options["predicates"])
            # With pushFilters=false the reader offers no predicates, so the lengths may differ.
            for described, predicate in zip(given, reader.offered_predicates, strict=False):
                if predicate not in reader.remaining_predicates:
                    pushed.append(described)
                    broker.append(format_predicate(predicate))
        remaining = [str(one.toString()) for one in conditions if translate(one) not in pushed]
        if remaining:
            spark.append(" AND ".join(remaining))
    return PushdownReport(tuple(broker), tuple(spark))


def parse_pushed_filters(plan: str) -> list[str]:
    """Return the predicates that were pushed to files, from the text of `explain("formatted")`."""
    predicates: list[str] = []
    for listed in re.findall(r"^PushedFilters: \[(.*)\]$", plan, re.MULTILINE):
        predicates += [one for one in re.split(r", (?=[A-Z]\w*\()", listed) if one]
    return predicates
