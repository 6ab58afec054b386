"""SQL92 selectors as Spark columns: the broker's filter, on any DataFrame of messages.

    df.where(column("dep_delay > 60 AND origin = 'JFK'"))       rows that the broker would deliver
    df.select(verdict("dep_delay > 60"))                        TRUE, FALSE, NULL or ERROR, and why

Exactly RocketMQ's semantics (spec/filter.md §6, §7): strings become numbers of the literal's class
as Java reads them, what cannot be read is an error and no match, nulls are three-valued. The column
is pure Spark SQL (`selector_sql`). The rare selector that Spark SQL cannot say exactly (half a
character in a string, hundreds of conditions, deep nesting) goes through Python, in Arrow batches
and with the broker's own evaluator; `compiled(…).python` says why, and a line of the log.

Where the properties are: by default in the columns that the source `rocketmq` has, which keeps TAGS
and KEYS in columns of their own. `columns` is what the source's option of that name said: a
property that was promoted as a string is taken from its column, and so are numbers of the same
class as the literal, where only TRUE counts. UNIQ_KEY, WAIT, MSG_REGION, TRACE_ON and CLUSTER are
in the map only with the source's option `properties=all`.

The other direction, Spark's predicates as SQL92, is `filters.to_selector`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions

from sluicemq.filter.nodes import JavaClass
from sluicemq.filter.parser import compile_sql92, compile_whole
from sluicemq.filter.plan import TRUE, verdict_of
from sluicemq.filter.selector import Selector
from sluicemq.spark.schema import Column, parse_columns
from sluicemq.spark.selector_sql import (
    Condition,
    Fields,
    Inexpressible,
    column_name,
    translated,
)

VERDICTS: Final = ("FALSE", "TRUE", "NULL", "ERROR")
"""What `verdict` says, by the number that the engines use."""
_OWN_COLUMNS: Final = {"tags": "TAGS", "keys": "KEYS"}
_CLASSES: Final = {"int": JavaClass.INTEGER, "bigint": JavaClass.LONG, "double": JavaClass.DOUBLE}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SparkSelector:
    """`match`: a boolean column, never null. `verdict`: one of `VERDICTS`. `python`: why the
    evaluation goes through Python workers; None, as nearly always: it does not."""

    text: str
    match: SparkColumn
    verdict: SparkColumn
    python: str | None = None


def column(
    selector: str, properties: str = "properties", *, columns: str | None = None
) -> SparkColumn:
    """True for the rows that a broker would deliver, else false; never null.

    `properties` is the map of properties: a column, or any SQL expression. `columns` are the other
    columns, as the source's option names them (default: its whole schema; "": there is only the
    map). Raises FilterSyntaxError, and ConfigurationError when a property is in no column.
    """
    return compiled(selector, properties, columns=columns).match


def verdict(
    selector: str, properties: str = "properties", *, columns: str | None = None
) -> SparkColumn:
    """TRUE, FALSE, NULL or ERROR as a string; arguments and errors as for `column`."""
    return compiled(selector, properties, columns=columns).verdict


def compiled(
    selector: str | Selector, properties: str = "properties", *, columns: str | None = None
) -> SparkSelector:
    """Both columns, and whether they need Python; arguments and errors as for `column`. An
    expression that a consumer has subscribed with comes as a `Selector`: RocketMQ ignores what may
    stand behind it."""
    fields = fields_of(properties, columns)
    parsed = compile_whole(selector) if isinstance(selector, str) else selector
    try:
        condition = translated(parsed.tree, fields)
    except Inexpressible as reason:
        logger.warning("the selector %r is evaluated by Python: %s", parsed.text, reason)
        code = _by_python(parsed, fields)
        return SparkSelector(parsed.text, code == TRUE, _named(code), str(reason))
    code = functions.expr(condition.code)
    return SparkSelector(parsed.text, functions.expr(condition.match), _named(code))


def selector_sql(
    selector: str, properties: str = "properties", *, columns: str | None = None
) -> str:
    """The text of `column` for a query: `select … where <text>`. Raises FilterSyntaxError, and
    ConfigurationError also when Spark SQL cannot say it exactly."""
    return _condition(selector, fields_of(properties, columns)).match


def _condition(selector: str, fields: Fields) -> Condition:
    from sluicemq.errors import ConfigurationError  # noqa: PLC0415 - rarely raised

    try:
        return translated(compile_whole(selector).tree, fields)
    except Inexpressible as reason:
        raise ConfigurationError(
            f"Spark SQL cannot say {selector[:80]!r}: {reason}.", cure="Use column() instead."
        ) from None


def fields_of(properties: str, columns: str | None) -> Fields:
    """Where the properties are, by the text of the source's option `columns`."""
    known = parse_columns(columns) if columns != "" else ()
    has_map = columns == "" or properties != "properties" or _has(known, "properties")
    texts = {
        own: column_name(base) for base, own in _OWN_COLUMNS.items() if _has(known, base)
    }  # fmt: skip
    typed = {}
    for one in known:
        if one.property_name is not None and one.kind == "string":
            texts[one.property_name] = column_name(one.name)
        elif one.property_name is not None and one.kind in _CLASSES:
            typed[one.property_name, _CLASSES[one.kind]] = column_name(one.name)
    return Fields(properties if has_map else None, texts, typed)


def _has(columns: Sequence[Column], name: str) -> bool:
    return any(one.name == name and one.property_name is None for one in columns)


def _named(code: SparkColumn) -> SparkColumn:
    names = functions.array(*map(functions.lit, VERDICTS))
    return functions.get(names, code)


def _by_python(selector: Selector, fields: Fields) -> SparkColumn:
    names = sorted(selector.property_names)
    texts = [functions.expr(fields.text(name)) for name in names]
    return functions.arrow_udf(_evaluator(selector.text, names), "int")(*texts)


def _evaluator(text: str, names: list[str]) -> Callable[..., Any]:
    """Columns of texts -> codes. Compiled where it runs; equal rows of a batch once."""

    def codes(*columns: pa.Array) -> pa.Array:
        evaluate = compile_sql92(text).evaluate
        known: dict[tuple[str | None, ...], int] = {}
        found = []
        for row in zip(*(one.to_pylist() for one in columns), strict=True):
            if row not in known:
                present = {
                    n: value for n, value in zip(names, row, strict=True) if value is not None
                }
                known[row] = verdict_of(evaluate, present)
            found.append(known[row])
        return pa.array(found, pa.int32())

    return codes
