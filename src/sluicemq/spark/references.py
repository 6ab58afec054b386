"""What a query asks of each table that it refers to, for a load of each.

Spark would hand a Python source the predicates of a query itself, but it keeps the read that comes
of it in the table object, for every later or other use of the same DataFrame: wrong rows
(design/0010). And it asks a Python source for all its columns
(spec/spark.md). So our readers take none from Spark. Who knows the whole query plans it over
stand-ins first, tables that have the columns and no rows, of which no two are one:

    Project [keys]
    +- Filter (tags = UA AND length(keys) > 3)
       +- stand-in [tags, keys …]

**Predicates.** A condition of a filter on a stand-in says which rows the result depends on, so a
read may leave out the others. Conditions that the stand-in is under wherever the plan has it (a
`with` may be used twice) become the option `predicates` of that reference's own load (`named_apart`
gives each place of a text a table of its own). Spark applies the whole query to what is read: the
source can only leave out what Spark would have dropped.

**Columns.** What the query needs is what is left of the stand-ins in the optimized plan: names that
are referenced anywhere above one, and of the map `properties` the keys, when every use of it is
`properties['KEY']`. Where the plan does not show it by names (UNION ALL goes by position,
subqueries stand inside of expressions) the answer is "all of them": always right, only slower.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from sluicemq.errors import ConfigurationError
from sluicemq.spark.classic import (
    context_of,
    execution_of,
    is_classic,
    jvm_of,
    session_state_of,
)
from sluicemq.spark.filters import COMPARED, PRESENT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)
REFERENCES_MAX: Final = 256
_MISSING: Final = "TABLE_OR_VIEW_NOT_FOUND"
_PART: Final = re.compile(r"`((?:[^`]|``)*)`|([^.`\s]+)")
_SAMPLE: Final = re.compile(
    r"\s*tablesample\s*\([^()]*\)(\s*repeatable\s*\([^()]*\))?", re.IGNORECASE
)


def load_where(
    spark: "SparkSession",
    condition: str,
    *,
    format: str = "rocketmq",  # noqa: A002 - Spark's name
    **options: str,
) -> "DataFrame":
    """Return the messages for which `condition`, Spark SQL on the columns, is true. The broker
    decides those parts of it that it decides exactly. `options` are those of the source.

    A session of Spark Connect does not show how Spark reads the condition. There Spark decides all
    of it, and a warning is logged that every message is read.
    """
    reader = spark.read.format(format).options(**options)
    frame = reader.load()
    if not is_classic(spark):
        logger.warning(
            "load_where: with Spark Connect the broker decides nothing of %r, and every message is "
            "read. Set filter.tags or filter.sql to read fewer.", condition,
        )  # fmt: skip
        return frame.where(condition)
    stand_in = StandIn.of(spark, frame.schema)
    (found,) = predicates_in(stand_in.frame.where(condition), [stand_in])
    if found:
        frame = reader.schema(frame.schema).option("predicates", found).load()
    return frame.where(condition)


@dataclass(frozen=True, slots=True)
class StandIn:
    """A table without rows; Spark knows it by its RDD, whatever a plan makes of its columns."""

    frame: "DataFrame"
    rdd: int

    @classmethod
    def of(cls, spark: "SparkSession", schema: "StructType") -> Self:
        frame = spark.createDataFrame(context_of(spark).emptyRDD(), schema)
        return cls(frame, execution_of(frame).analyzed().rdd().id())


def predicates_in(query: "DataFrame", stand_ins: Sequence[StandIn]) -> list[str]:
    """The option `predicates` for the load of each stand-in; "" where all of it is needed."""
    translate = translator(query.sparkSession)
    found: dict[int, list[dict[str, Any]]] = {}
    for node, conditions in nodes(execution_of(query).optimizedPlan()):
        if kind_of(node) == "LogicalRDD":
            here = [one for one in map(translate, conditions) if one is not None]
            known = found.setdefault(node.rdd().id(), here)
            known[:] = [one for one in known if one in here]
    return [json.dumps(found[one.rdd]) if found.get(one.rdd) else "" for one in stand_ins]


def nodes(plan: Any, conditions: Sequence[Any] = ()) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The nodes of a plan of the JVM and of its subqueries, each with the conjuncts of the filter
    that stands on it."""
    yield plan, conditions
    for inner in elements(plan.subqueries()):
        yield from nodes(inner)
    on_it = conjuncts(plan.condition()) if kind_of(plan) == "Filter" else ()
    for child in elements(plan.children()):
        yield from nodes(child, on_it)


def conjuncts(condition: Any) -> list[Any]:
    if kind_of(condition) != "And":
        return [condition]
    return conjuncts(condition.left()) + conjuncts(condition.right())


def elements(sequence: Any) -> list[Any]:
    """Those of a sequence of Scala's."""
    return [sequence.apply(at) for at in range(sequence.length())]


def kind_of(value: Any) -> str:
    """The name of a Java object's class."""
    return str(value.getClass().getSimpleName())


def translator(spark: "SparkSession") -> Callable[[Any], dict[str, Any] | None]:
    """A function from an expression of the JVM to a predicate as in the option; None: there is
    none. Spark's own translation for sources, so what types and collations mean is its word."""
    package = jvm_of(spark).org.apache.spark.sql.execution.datasources
    strategy = getattr(getattr(package, "DataSourceStrategy$"), "MODULE$")

    def translate(expression: Any) -> dict[str, Any] | None:
        found = strategy.translateFilter(expression, False)
        return _predicate(found.get()) if found.isDefined() else None

    return translate


def _predicate(found: Any) -> dict[str, Any] | None:
    kind = kind_of(found)
    if kind == "Not":
        inner = _predicate(found.child())
        return None if inner is None or "not" in inner else {**inner, "not": True}
    if kind in PRESENT:
        return {"is": kind, "column": found.attribute()}
    if kind not in COMPARED:
        return None
    values: list[Any] = []
    for one in found.values() if kind == "In" else [found.value()]:
        java = kind_of(one) if hasattr(one, "getClass") else ""
        if java in ("Timestamp", "Instant"):
            instant = one.toInstant() if java == "Timestamp" else one
            micros = instant.getEpochSecond() * 1_000_000 + instant.getNano() // 1000
            values.append({"us": micros})
        elif isinstance(one, (str, int, float)):
            values.append(one)
        else:
            return None
    return {"is": kind, "column": found.attribute(), "value": values if kind == "In" else values[0]}


# ---- places of a text


def named_apart(
    spark: "SparkSession", text: str, view_of: Callable[[str], str]
) -> tuple[str, "DataFrame"]:
    """The query with a view in each place that names a table which Spark does not know, and what
    it means. `view_of` makes the view of a name and returns the view's own name. Raises Spark's
    errors but this one, and ConfigurationError for too many places."""
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - heavy
    from pyspark.logger import PySparkLogger  # noqa: PLC0415

    # pyspark logs every error of an analysis, whole stack and all, before it raises it. The logger
    # is of a class of its own: one that `logging` makes fails on pyspark's arguments.
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    before = logger.disabled
    for _ in range(REFERENCES_MAX + 1):
        logger.disabled = True
        try:
            return text, spark.sql(text)
        except AnalysisException as error:
            if error.getCondition() != _MISSING:
                raise
            view = view_of(error.getMessageParameters()["relationName"])
            context = error.getQueryContext()[0]
            start, end = context.startIndex(), context.stopIndex() + 1
        finally:
            logger.disabled = before
        # The last part of the name stays as alias where the query gives no other; a sample stands
        # before it.
        sampled = _SAMPLE.match(text, end)
        after = end if sampled is None else sampled.end()
        alias = quoted(name_parts(text[start:end])[-1])
        named = f"{text[:start]}{quoted(view)}{text[end:after]} AS {alias}{text[after:]}"
        plain = f"{text[:start]}{quoted(view)}{text[end:]}"
        text = named if parses(spark, named) else plain
    raise ConfigurationError(f"the query names tables in more than {REFERENCES_MAX} places.")


def parses(spark: "SparkSession", text: str) -> bool:
    from pyspark.errors import ParseException  # noqa: PLC0415 - heavy

    try:
        session_state_of(spark).sqlParser().parsePlan(text)
    except ParseException:
        return False
    return True


def name_parts(name: str) -> list[str]:
    """`a`.`b``c`, with or without backquotes, as its parts."""
    return [
        found[1].replace("``", "`") if found[1] is not None else found[2]
        for found in _PART.finditer(name)
    ]


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


# ---- columns

_NARROWING: Final = ("Project", "Aggregate")
_PASSING: Final = ("Filter", "Join", "Sort", "GlobalLimit", "LocalLimit")
"""Nodes whose own output is not the query's need: what they read stands in them."""
_STAND_IN: Final = "LogicalRDD"


@dataclass(frozen=True, slots=True)
class Used:
    """Names of columns, and the keys of the map when only single values of it are used."""

    columns: frozenset[str]
    keys: frozenset[str] = frozenset()


def used_columns(frame: Any, map_name: str) -> Used | None:
    """What the query of a DataFrame over stand-ins uses of them; None: all of it."""
    nodes = json.loads(execution_of(frame).optimizedPlan().toJSON())
    kinds = {_kind(one) for sequence in _sequences(nodes) for one in sequence}
    # A plan inside of an expression stands somewhere else, or nowhere.
    hidden = {"Exists", "InMemoryRelation"} | {
        kind for kind in kinds if "Subquery" in kind or "CTE" in kind
    }
    if kinds & hidden or not _are_narrowed(nodes):
        return None
    own = {
        _attribute(one)
        for node in nodes
        if _kind(node) == _STAND_IN
        for sequence in _sequences(node["output"])
        for one in sequence
        if _kind(one) == "AttributeReference"
    }
    uses = {
        use
        for node in nodes
        if _kind(node) != _STAND_IN
        for value in node.values()
        for sequence in _sequences(value)
        for use in _uses(sequence)
        if use[0] in own
    }
    keys = frozenset(key for (name, _), key in uses if key and name == map_name)
    # Spark adds `IS NOT NULL` to a condition on an element; the map is never null.
    names = frozenset(
        name
        for (name, _), key in uses
        if key is None or (key == "" and (name != map_name or not keys))
    )
    return Used(names, frozenset() if map_name in names else keys)


def _uses(sequence: Sequence[Any]) -> Iterator[tuple[tuple[str, Any], str | None]]:
    """Attributes in a sequence, each with the key of `attribute['KEY']`, "" of `attribute IS NOT
    NULL`, or None."""
    skipped = 0
    for at, node in enumerate(sequence):
        chain = [_kind(one) for one in sequence[at : at + 3]]
        is_element = chain == ["GetMapValue", "AttributeReference", "Literal"]
        key = sequence[at + 2].get("value") if is_element else None
        if skipped:
            skipped -= 1
        elif key and sequence[at + 2].get("dataType") == "string":
            yield _attribute(sequence[at + 1]), key
            skipped = 2
        elif chain[:2] == ["IsNotNull", "AttributeReference"]:
            yield _attribute(sequence[at + 1]), ""
            skipped = 1
        elif chain[0] == "AttributeReference":
            yield _attribute(node), None


def _are_narrowed(nodes: Sequence[dict[str, Any]]) -> bool:
    """Whether above each stand-in comes a node that names what it takes, before one that does not.

    The nodes are a tree in pre-order, each with the number of its children.
    """
    path: list[tuple[str, int]] = []
    for node in nodes:
        while path and path[-1][1] == 0:
            path.pop()
        if path:
            path[-1] = (path[-1][0], path[-1][1] - 1)
        if _kind(node) == _STAND_IN:
            above = next((kind for kind, _ in reversed(path) if kind not in _PASSING), None)
            if above not in _NARROWING:
                return False
        path.append((_kind(node), node["num-children"]))
    return True


def _sequences(value: Any) -> Iterator[list[Any]]:
    """All lists in a plan's JSON: an expression is a list of nodes, the parent before its children.
    A node that stands alone is a list of one."""
    listed = [value] if isinstance(value, dict) else value
    if isinstance(listed, list):
        yield listed
        for one in listed:
            for inner in one.values() if isinstance(one, dict) else [one]:
                yield from _sequences(inner)


def _kind(node: Any) -> str:
    name = node.get("class", "") if isinstance(node, dict) else ""
    return str(name).rpartition(".")[2]


def _attribute(node: dict[str, Any]) -> tuple[str, Any]:
    return node["name"], node["exprId"]["id"]
