"""Find what a query needs of each table that it refers to, so that each load reads only that.

Spark could hand the predicates of a query to a Python source itself. But it keeps the resulting
read in the table object, for every later or other use of the same DataFrame, which gives wrong rows
(design/0010). And it asks a Python source for all its columns (spec/spark.md). So our readers take
no predicates from Spark. A caller that knows the whole query first plans it over placeholder
tables. They have the columns of the sources, but no rows, and no two of them are the same table:

    Project [keys]
    +- Filter (tags = UA AND length(keys) > 3)
       +- placeholder table [tags, keys …]

**Predicates.** A condition of a filter directly above a placeholder says which rows the result
depends on, so a read may leave out the others. If a plan contains a placeholder several times (a
`with` clause may be used twice), only conditions that hold in every place count. They become the
option `predicates` of the load for that reference. `replace_unknown_tables` gives each reference in
a text a table of its own. Spark applies the whole query to what is read, so the source only leaves
out rows that Spark would drop.

**Columns.** The needed columns are those of the placeholders that are referenced anywhere else in
the optimized plan. Of the map `properties`, the needed keys are known if it is used only as
`properties['KEY']`. If names in the plan do not show what is needed (UNION ALL matches columns by
position, subqueries are inside expressions), the answer is "all columns": always correct, only
slower.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from sluicemq.errors import ConfigurationError
from sluicemq.spark.classic import (
    get_jvm,
    get_query_execution,
    get_session_state,
    get_spark_context,
    is_classic,
)
from sluicemq.spark.filters import COMPARISONS, NULL_CHECKS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)
REFERENCES_MAX: Final = 256
GENERATED_PREFIX: Final = "__property_"
"""Begins the names of columns that stand for single elements of the map `properties`."""
_UNKNOWN_TABLE: Final = "TABLE_OR_VIEW_NOT_FOUND"
_NAME_PART: Final = re.compile(r"`((?:[^`]|``)*)`|([^.`\s]+)")
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
    """Return the messages for which `condition` is true, a text of Spark SQL about the columns.

    The broker evaluates the parts of the condition that it can evaluate exactly. Spark evaluates
    the whole condition again on the messages that are read. `format` and `options` are the source
    and its options.

    In a session of Spark Connect, the client cannot see how Spark parses the condition. There the
    broker evaluates nothing, every message is read, and a warning says so.
    """
    reader = spark.read.format(format).options(**options)
    frame = reader.load()
    if not is_classic(spark):
        logger.warning(
            "load_where: with Spark Connect the broker evaluates nothing of %r, and every message"
            " is read. Set filter.tags or filter.sql to read fewer.",
            condition,
        )
        return frame.where(condition)
    placeholder = PlaceholderTable.create(spark, frame.schema)
    (predicates,) = extract_predicates(placeholder.frame.where(condition), [placeholder])
    if predicates:
        frame = reader.schema(frame.schema).option("predicates", predicates).load()
    return frame.where(condition)


@dataclass(frozen=True, slots=True)
class PlaceholderTable:
    """A table without rows that stands for a source while a query is planned.

    `rdd_id` is the id of its RDD, which identifies it in a plan even if its columns are renamed.
    """

    frame: "DataFrame"
    rdd_id: int

    @classmethod
    def create(cls, spark: "SparkSession", schema: "StructType") -> Self:
        """Return a new table with the columns of `schema`.

        Raises ConfigurationError for a session of Spark Connect.
        """
        frame = spark.createDataFrame(get_spark_context(spark).emptyRDD(), schema)
        return cls(frame, get_query_execution(frame).analyzed().rdd().id())


# ---- predicates


def extract_predicates(query: "DataFrame", tables: Sequence[PlaceholderTable]) -> list[str]:
    """Return the predicates of a query that can be pushed to the source of each of `tables`.

    They are returned as values of the option `predicates`, JSON texts, in the order of the tables.
    `query` is a DataFrame over placeholders for the tables. If the query scans a table in several
    places, only the predicates that all these scans share are returned. "" means that there are
    none.
    """
    translate = make_translator(query.sparkSession)
    shared_by_rdd: dict[int, list[dict[str, Any]]] = {}
    for node, conditions in iterate_nodes(get_query_execution(query).optimizedPlan()):
        if class_name(node) == _PLACEHOLDER_NODE:
            translated = [translate(condition) for condition in conditions]
            scan_predicates = [predicate for predicate in translated if predicate is not None]
            rdd_id = node.rdd().id()
            earlier_predicates = shared_by_rdd.get(rdd_id, scan_predicates)
            shared_by_rdd[rdd_id] = [
                predicate for predicate in earlier_predicates if predicate in scan_predicates
            ]

    options = []
    for table in tables:
        shared_predicates = shared_by_rdd.get(table.rdd_id)
        options.append(json.dumps(shared_predicates) if shared_predicates else "")
    return options


def iterate_nodes(plan: Any, conditions: Sequence[Any] = ()) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield (node, conditions) for each node of a plan and of its subqueries, parents first.

    `plan` is a plan of Spark's JVM. If a filter is directly above the node, the conditions are the
    parts of its condition that AND joins. Otherwise they are empty. `conditions` is given for the
    first node, `plan` itself.
    """
    yield plan, conditions
    for subquery in scala_elements(plan.subqueries()):
        yield from iterate_nodes(subquery)
    child_conditions = split_conjuncts(plan.condition()) if class_name(plan) == "Filter" else ()
    for child in scala_elements(plan.children()):
        yield from iterate_nodes(child, child_conditions)


def split_conjuncts(condition: Any) -> list[Any]:
    """Return the operands of nested ANDs; the condition itself if it is not an AND."""
    if class_name(condition) != "And":
        return [condition]
    return split_conjuncts(condition.left()) + split_conjuncts(condition.right())


def scala_elements(sequence: Any) -> list[Any]:
    """Return the elements of a Scala sequence as a list."""
    return [sequence.apply(index) for index in range(sequence.length())]


def class_name(java_object: Any) -> str:
    """Return the simple name of a Java object's class, such as "Filter"."""
    return str(java_object.getClass().getSimpleName())


def make_translator(spark: "SparkSession") -> Callable[[Any], dict[str, Any] | None]:
    """Return a function that translates an expression of Spark's JVM into a predicate.

    The function returns an item of the option `predicates`, such as {"is": "EqualTo", "column":
    "tags", "value": "UA"}. It returns None for an expression that the option cannot contain, which
    Spark alone must evaluate. Spark itself translates the expression first, so types and collations
    have Spark's meaning.
    """
    package = get_jvm(spark).org.apache.spark.sql.execution.datasources
    strategy = getattr(getattr(package, "DataSourceStrategy$"), "MODULE$")

    def translate(expression: Any) -> dict[str, Any] | None:
        translated = strategy.translateFilter(expression, False)
        return _to_predicate(translated.get()) if translated.isDefined() else None

    return translate


def _to_predicate(source_filter: Any) -> dict[str, Any] | None:
    """Return the item of the option `predicates` for a filter object of Spark's JVM.

    Comparisons, null checks, and one Not around these are supported. Return None for any other
    filter, and for a value that is not a string, number, boolean or time.
    """
    filter_class = class_name(source_filter)
    if filter_class == "Not":
        negated = _to_predicate(source_filter.child())
        if negated is None or "not" in negated:
            return None
        return {**negated, "not": True}
    if filter_class in NULL_CHECKS:
        return {"is": filter_class, "column": source_filter.attribute()}
    if filter_class not in COMPARISONS:
        return None

    if filter_class == "In":
        literal: Any = [_to_literal(java_value) for java_value in source_filter.values()]
        is_supported = None not in literal
    else:
        literal = _to_literal(source_filter.value())
        is_supported = literal is not None
    if not is_supported:
        return None
    return {"is": filter_class, "column": source_filter.attribute(), "value": literal}


def _to_literal(java_value: Any) -> Any:
    """Return a value of a data source filter as JSON: a time becomes {"us": microseconds}.

    Return None for a value that is not a string, number, boolean or time.
    """
    java_class = class_name(java_value) if hasattr(java_value, "getClass") else ""
    if java_class in ("Timestamp", "Instant"):
        instant = java_value.toInstant() if java_class == "Timestamp" else java_value
        micros = instant.getEpochSecond() * 1_000_000 + instant.getNano() // 1000
        return {"us": micros}
    return java_value if isinstance(java_value, (str, int, float)) else None


# ---- references in a text


def replace_unknown_tables(
    spark: "SparkSession", query: str, make_view: Callable[[str], str]
) -> tuple[str, "DataFrame"]:
    """Replace each table in a query that Spark does not know by a view, and plan the query.

    `make_view(name)` gets the name of a table, creates a view, and returns the view's name. It is
    called for each place, so two places with one table get two views. Return the changed text and
    its DataFrame. Raises Spark's errors for other mistakes in the query, and ConfigurationError for
    more than `REFERENCES_MAX` places.
    """
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - heavy
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 - heavy

    # pyspark logs every error of an analysis with its stack before it raises the error. Its logger
    # must be created by PySparkLogger: a logger that `logging` creates fails on its arguments.
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    was_disabled = logger.disabled
    # Spark reports one unknown table at a time, so the query is planned once for each reference.
    for _ in range(REFERENCES_MAX + 1):
        logger.disabled = True
        try:
            return query, spark.sql(query)
        except AnalysisException as error:
            if error.getCondition() != _UNKNOWN_TABLE:
                raise
            view = make_view(error.getMessageParameters()["relationName"])
            context = error.getQueryContext()[0]
            reference = slice(context.startIndex(), context.stopIndex() + 1)
        finally:
            logger.disabled = was_disabled
        query = _replace_reference(spark, query, reference, view)
    raise ConfigurationError(f"the query refers to tables in more than {REFERENCES_MAX} places.")


def _replace_reference(spark: "SparkSession", query: str, reference: slice, view: str) -> str:
    """Return a query in which a view replaces the name of a table.

    `reference` is the slice of the text with this name. The last part of the name becomes an alias
    of the view, so that the rest of the query can use it. If that makes the query invalid, because
    it has an alias already, there is no alias.
    """
    before = query[: reference.start]
    after = query[reference.stop :]
    # The alias has to follow a TABLESAMPLE clause.
    sample = _SAMPLE.match(query, reference.stop)
    sample_clause = "" if sample is None else query[reference.stop : sample.end()]
    alias = quote_name(split_name(query[reference])[-1])
    with_alias = (
        f"{before}{quote_name(view)}{sample_clause} AS {alias}{after[len(sample_clause) :]}"
    )
    if can_parse(spark, with_alias):
        return with_alias
    return f"{before}{quote_name(view)}{after}"


def can_parse(spark: "SparkSession", query: str) -> bool:
    """Return whether the text is a syntactically valid query."""
    from pyspark.errors import ParseException  # noqa: PLC0415 - heavy

    try:
        get_session_state(spark).sqlParser().parsePlan(query)
    except ParseException:
        return False
    return True


def split_name(name: str) -> list[str]:
    """Return the parts of a qualified name such as `a`.`b``c`, with or without backquotes."""
    return [
        match[1].replace("``", "`") if match[1] is not None else match[2]
        for match in _NAME_PART.finditer(name)
    ]


def quote_name(name: str) -> str:
    """Return the name in backquotes."""
    return "`" + name.replace("`", "``") + "`"


# ---- columns

_SELECTING_NODES: Final = ("Project", "Aggregate")
_PASSING_NODES: Final = ("Filter", "Join", "Sort", "GlobalLimit", "LocalLimit")
"""Nodes that pass all columns of their input on. The columns that they use themselves are named in
them."""
_PLACEHOLDER_NODE: Final = "LogicalRDD"


@dataclass(frozen=True, slots=True)
class UsedColumns:
    """The columns that a query uses of its placeholder tables.

    `names` are columns that are used as a whole. `map_keys` are keys of the map column, if the
    query uses only single values of the map; then the map column is not in `names`. If the map
    column is in `names`, `map_keys` is empty.
    """

    names: frozenset[str]
    map_keys: frozenset[str] = frozenset()


def find_used_columns(frame: Any, map_name: str) -> UsedColumns | None:
    """Return the columns of placeholder tables that a query uses, or None if it may use all.

    `frame` is the query's DataFrame. `map_name` is the name of the column that is a map; for it,
    the result contains the keys that the query uses, if it uses nothing else of the map.
    """
    plan_nodes = json.loads(get_query_execution(frame).optimizedPlan().toJSON())
    if _hides_uses(plan_nodes) or not _are_all_narrowed(plan_nodes):
        return None
    placeholder_attributes = _find_placeholder_attributes(plan_nodes)
    used_names = set()
    compared_with_null = set()
    map_keys = set()
    for (name, expression_id), key in _iterate_uses(plan_nodes):
        if (name, expression_id) not in placeholder_attributes:
            continue
        if key is None:
            used_names.add(name)
        elif key == "":
            compared_with_null.add(name)
        elif name == map_name:
            map_keys.add(key)

    # Spark adds `IS NOT NULL` of the map to a condition on one of its elements. It does not mean
    # that the whole map is used, because the map is never null.
    if map_keys:
        compared_with_null.discard(map_name)
    used_names |= compared_with_null
    if map_name in used_names:
        map_keys.clear()
    return UsedColumns(frozenset(used_names), frozenset(map_keys))


def _hides_uses(plan_nodes: Sequence[dict[str, Any]]) -> bool:
    """Return True if the JSON of a plan does not show all uses of columns.

    That is so if an expression contains a plan, such as a subquery. Such a plan is somewhere else
    in the JSON, or missing.
    """
    for sequence in _iterate_lists(plan_nodes):
        for node in sequence:
            node_class = _class_of(node)
            if node_class in ("Exists", "InMemoryRelation"):
                return True
            if "Subquery" in node_class or "CTE" in node_class:
                return True
    return False


def _find_placeholder_attributes(plan_nodes: Sequence[dict[str, Any]]) -> set[tuple[str, Any]]:
    """Return (name, expression id) of each column of the placeholder tables in a plan."""
    attributes = set()
    for plan_node in plan_nodes:
        if _class_of(plan_node) != _PLACEHOLDER_NODE:
            continue
        for sequence in _iterate_lists(plan_node["output"]):
            for node in sequence:
                if _class_of(node) == "AttributeReference":
                    attributes.add(_attribute_id(node))
    return attributes


def _iterate_uses(
    plan_nodes: Sequence[dict[str, Any]],
) -> Iterator[tuple[tuple[str, Any], str | None]]:
    """Yield (attribute, key) for each use of a column in a plan.

    The attribute is (name, expression id). The key is KEY for `attribute['KEY']`, "" for `attribute
    IS NOT NULL`, and None for any other use.
    """
    for plan_node in plan_nodes:
        if _class_of(plan_node) != _PLACEHOLDER_NODE:
            for field in plan_node.values():
                for sequence in _iterate_lists(field):
                    yield from _find_uses(sequence)


def _find_uses(sequence: Sequence[Any]) -> Iterator[tuple[tuple[str, Any], str | None]]:
    """Yield (attribute, key) for each attribute in one expression.

    `sequence` contains the nodes of the expression in pre-order: each operator before its operands.
    The attribute is (name, expression id). The key is KEY for `attribute['KEY']`, "" for `attribute
    IS NOT NULL`, and None for any other use.
    """
    nodes_to_skip = 0
    for index, node in enumerate(sequence):
        if nodes_to_skip:
            nodes_to_skip -= 1
            continue
        # The operands of an operator follow it in pre-order.
        operands = sequence[index + 1 : index + 3]
        operand_classes = [_class_of(operand) for operand in operands]
        node_class = _class_of(node)
        key = _find_map_key(operands) if node_class == "GetMapValue" else None
        if key is not None:
            yield _attribute_id(operands[0]), key
            nodes_to_skip = 2
        elif node_class == "IsNotNull" and operand_classes[:1] == ["AttributeReference"]:
            yield _attribute_id(operands[0]), ""
            nodes_to_skip = 1
        elif node_class == "AttributeReference":
            yield _attribute_id(node), None


def _find_map_key(operands: Sequence[Any]) -> str | None:
    """Return the key of `attribute['KEY']` from its two operands.

    Return None if the map is not an attribute, or if the key is not a literal string or is "".
    """
    if [_class_of(operand) for operand in operands] != ["AttributeReference", "Literal"]:
        return None
    literal = operands[1]
    if literal.get("dataType") != "string":
        return None
    return literal.get("value") or None


def _are_all_narrowed(nodes: Sequence[dict[str, Any]]) -> bool:
    """Return whether the plan selects the columns of every placeholder table by their names.

    That is so if each placeholder is below a node that selects columns, one of `_SELECTING_NODES`,
    with only `_PASSING_NODES` between them. `nodes` is the plan as a list in pre-order, in which
    each node has the number of its children.
    """
    # The ancestors of the current node: class name, and number of children that still follow.
    ancestors: list[tuple[str, int]] = []
    for node in nodes:
        while ancestors and ancestors[-1][1] == 0:
            ancestors.pop()
        if ancestors:
            parent_class, remaining_children = ancestors[-1]
            ancestors[-1] = (parent_class, remaining_children - 1)
        if _class_of(node) == _PLACEHOLDER_NODE:
            deciding_classes = [name for name, _ in ancestors if name not in _PASSING_NODES]
            if not deciding_classes or deciding_classes[-1] not in _SELECTING_NODES:
                return False
        ancestors.append((_class_of(node), node["num-children"]))
    return True


def _iterate_lists(json_value: Any) -> Iterator[list[Any]]:
    """Yield all lists within a value of a plan's JSON, outer lists before inner ones.

    In this JSON, an expression is a list of nodes in pre-order. A single node is yielded as a list
    of one. A value that is neither a list nor a node yields nothing.
    """
    if isinstance(json_value, dict):
        json_value = [json_value]
    if not isinstance(json_value, list):
        return
    yield json_value
    for element in json_value:
        if isinstance(element, dict):
            for member in element.values():
                yield from _iterate_lists(member)
        else:
            yield from _iterate_lists(element)


def _class_of(node: Any) -> str:
    """Return the simple class name of a node in a plan's JSON; "" if it is not a node."""
    name = node.get("class", "") if isinstance(node, dict) else ""
    return str(name).rpartition(".")[2]


def _attribute_id(node: dict[str, Any]) -> tuple[str, Any]:
    """Return (name, expression id) of an AttributeReference."""
    return node["name"], node["exprId"]["id"]
