"""Report which predicates of a DataFrame the broker evaluates, and which Spark does.

For the sources of this package, the option `predicates` of the load contains the predicates that
were offered. The report creates a reader as Spark's planner does, and sees which predicates it
pushes. The filters of the options `filter.tags` and `filter.sql` are evaluated by the broker in any
case. For files, Spark's plan contains `PushedFilters`.

Spark applies the broker's predicates again (design/0010), but they drop no rows there. Predicates
on `store_time`, and on `keys` if the brokers do not evaluate SQL92, shorten a read but count as
Spark's.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from pyspark.sql.types import StructType

from sluicemq.spark.classic import explain_plan, get_query_execution
from sluicemq.spark.filters import format_predicate
from sluicemq.spark.references import (
    GENERATED_PREFIX,
    class_name,
    iterate_nodes,
    make_translator,
)
from sluicemq.spark.schema import Column
from sluicemq.spark.source import RocketSource, StoreSource

_SCAN: Final = "DataSourceV2ScanRelation"
_FILTER_OPTIONS: Final = ("filter.tags", "filter.sql")
_SOURCES: Final = {source.name(): source for source in (RocketSource, StoreSource)}


class PushdownReport(NamedTuple):
    """The filters of a DataFrame, as texts for users.

    `broker` are those that a broker or a file's reader evaluates: the filters that options of the
    read contain, such as `filter.sql='delay > 60'`, and predicates. `spark` has one text for each
    filter of the plan: the conditions that only Spark evaluates, joined by AND.
    """

    broker: tuple[str, ...]
    spark: tuple[str, ...]

    def __str__(self) -> str:
        return f"broker: {', '.join(self.broker) or '-'}; Spark: {', '.join(self.spark) or '-'}"


def pushdown(frame: Any, *, with_options: bool = True) -> PushdownReport:
    """Return which filters of a DataFrame the broker evaluates, and which are left to Spark.

    The filters of all sources that the DataFrame reads are combined. With `with_options=False`, the
    options `filter.tags` and `filter.sql` are left out. No message is read. Raises
    ConfigurationError for a DataFrame of Spark Connect.
    """
    execution = get_query_execution(frame)
    broker = parse_pushed_filters(explain_plan(frame, "formatted"))
    spark = list[str]()
    translate = make_translator(frame.sparkSession)
    for node, conditions in iterate_nodes(execution.optimizedPlan()):
        if with_options:
            broker += _find_filter_options(node)
        pushed = _find_pushed_predicates(node)
        broker += [text for _, text in pushed]
        # Conditions are compared in the form that the option `predicates` has.
        pushed_items = [described for described, _ in pushed]
        remaining = [
            str(condition.toString())
            for condition in conditions
            if translate(condition) not in pushed_items
        ]
        if remaining:
            spark.append(" AND ".join(remaining))
    return PushdownReport(tuple(broker), tuple(spark))


def _find_source(node: Any) -> type[RocketSource | StoreSource] | None:
    """Return the source of this package that a node of Spark's plan scans; None for other nodes."""
    if class_name(node) != _SCAN:
        return None
    return _SOURCES.get(str(node.relation().table().name()))


def _find_filter_options(node: Any) -> list[str]:
    """Return the filters in the options of the read that a node of Spark's plan scans, as texts."""
    if _find_source(node) is None:
        return []
    options = node.relation().options()  # Their names may be in upper or lower case.
    return [f"{name}={options.get(name)!r}" for name in _FILTER_OPTIONS if options.get(name)]


def _find_pushed_predicates(node: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the predicates that a node of Spark's plan pushes to a source of this package.

    Each is a pair: the predicate as an item of the option `predicates`, a JSON object, and as a
    text for users. The result is empty if the node does not scan such a source, or has no
    predicates.
    """
    source = _find_source(node)
    if source is None:
        return []
    options = dict(node.relation().options().asCaseSensitiveMap())
    if "predicates" not in options:
        return []
    schema = StructType.fromJson(json.loads(node.relation().schema().json()))
    reader = source(options | {"reportPushdown": "false"}).reader(schema)
    items = json.loads(options["predicates"])
    # With pushFilters=false the reader offers no predicates, so the lengths may differ.
    return [
        (described, _name_properties(format_predicate(predicate), reader.plan.columns))
        for described, predicate in zip(items, reader.offered_predicates, strict=False)
        if predicate not in reader.remaining_predicates
    ]


def _name_properties(predicate: str, columns: Iterable[Column]) -> str:
    """Return the text of a predicate with `properties['NAME']` for the columns of a SQL query.

    Queries of `sluice sql` and pipelines read an element of the map `properties` as a column whose
    name is generated.
    """
    for column in columns:
        if column.property_name is not None and column.name.startswith(GENERATED_PREFIX):
            element = f"properties[{column.property_name!r}]".replace("\\", r"\\")
            predicate = re.sub(rf"\b{column.name}\b", element, predicate)
    return predicate


def parse_pushed_filters(plan: str) -> list[str]:
    """Return the predicates that were pushed to files, from the text of `explain("formatted")`."""
    predicates: list[str] = []
    for listed in re.findall(r"^PushedFilters: \[(.*)\]$", plan, re.MULTILINE):
        # Split at a comma that the name of a predicate follows, such as `, EqualTo(`.
        predicates += filter(None, re.split(r", (?=[A-Z]\w*\()", listed))
    return predicates
