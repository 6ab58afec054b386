"""What the source keeps of Spark's predicates decides every message as Spark would.

Random predicates on promoted columns are pushed; the selector that comes out is evaluated by the
broker's own evaluator on random properties, and must say what Spark says of the typed column.
"""

import math
from typing import Any

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.model.subscription import SQL92
from sluicemq.spark.filters import FilterPushdown, build_subscription
from sluicemq.spark.schema import Column
from sluicemq.spark.sources.conversion import convert_property_column

KINDS = ("string", "int", "bigint", "double", "boolean")
COLUMNS = [Column(f"c_{kind}", f"p_{kind}", kind) for kind in KINDS]
BIG = st.sampled_from([
    0, 1, -1, 5, 2**31 - 1, -(2**31) + 1, -(2**31), 2**31, 3_000_000_000, -3_000_000_000,
    2**63 - 1, -(2**63),
])  # fmt: skip
LITERALS = {
    "string": st.sampled_from(["a", "b", "5", "it's", "", "ü"]),
    "int": BIG.filter(lambda value: -(2**31) <= value < 2**31),
    "bigint": BIG,
    "double": st.one_of(
        st.floats(), st.sampled_from([0.0, -0.0, 5.0, 1e16, 1e-5, -2.5, math.inf, math.nan])
    ),
    "boolean": st.booleans(),
}
TEXTS = st.one_of(
    st.none(),
    BIG.map(str),
    st.floats().map(repr),
    st.sampled_from(
        ["a", "b", "it's", "ü", "5.0", "+5", " 5", "true", "TRUE", "false", "yes", "NaN", "-0.0"]
    ),
)


@st.composite
def predicates(draw: st.DrawFn) -> Filter:
    kind = draw(st.sampled_from(KINDS))
    column, literal = (f"c_{kind}",), LITERALS[kind]
    shape = draw(st.sampled_from([
        EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, In, IsNull, IsNotNull,
    ]))  # fmt: skip
    if shape in (IsNull, IsNotNull):
        one: Filter = shape(column)
    elif shape is In:
        one = In(column, tuple(draw(st.lists(literal, min_size=1, max_size=3))))
    else:
        one = shape(column, draw(literal))
    return Not(one) if draw(st.booleans()) else one


def spark_says(predicate: Filter, row: dict[str, Any]) -> bool | None:
    """Spark's three-valued answer on a typed column; NaN equals itself and is the greatest."""
    if isinstance(predicate, Not):
        inner = spark_says(predicate.child, row)
        return None if inner is None else not inner
    value = row[predicate.attribute[0]]  # type: ignore[attr-defined]
    if isinstance(predicate, IsNull):
        return value is None
    if isinstance(predicate, IsNotNull):
        return value is not None
    if value is None:
        return None
    if isinstance(predicate, In):
        return any(ranked(value) == ranked(one) for one in predicate.value)
    left, right = ranked(value), ranked(predicate.value)  # type: ignore[attr-defined]
    return {
        "EqualTo": left == right, "GreaterThan": left > right, "LessThan": left < right,
        "GreaterThanOrEqual": left >= right, "LessThanOrEqual": left <= right,
    }[type(predicate).__name__]  # fmt: skip


def ranked(value: Any) -> Any:
    """Something Python orders as Spark orders the value."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return value


def typed_row(properties: dict[str, str]) -> dict[str, Any]:
    row = {}
    for column in COLUMNS:
        texts = pa.array([properties.get(column.property_name or "")], pa.string())
        row[column.name] = convert_property_column(texts, column.type_name, "p")[0][0].as_py()
    return row


@given(
    st.lists(predicates(), min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({f"p_{kind}": TEXTS for kind in KINDS}), min_size=1, max_size=6),
)
@example([GreaterThan(("c_int",), -(2**31))], [{"p_int": "3000000000"}])
@example([EqualTo(("c_boolean",), False)], [{"p_boolean": "yes"}])
@example([GreaterThan(("c_bigint",), 5)], [{"p_bigint": "3000000000"}])
@example([LessThanOrEqual(("c_double",), 0.0)], [{"p_double": "-0.0"}])
@settings(max_examples=300, deadline=None)
def test_kept_predicates_mean_the_same_at_the_broker(
    asked: list[Filter], messages: list[dict[str, str | None]]
) -> None:
    pushdown = FilterPushdown(COLUMNS)
    rest = pushdown.push_all(asked)
    kept = [one for one in asked if not any(one is other for other in rest)]
    found = build_subscription("t", None, None, pushdown.pushed)
    assert found is not None
    subscription, tags = found
    assert tags is None
    selector = compile_sql92(subscription.expression) if subscription.kind == SQL92 else None
    for message in messages:
        properties = {name: value for name, value in message.items() if value}
        row = typed_row(properties)
        delivered = selector is None or selector.matches(properties)
        wanted = all(spark_says(one, row) is True for one in kept)
        assert delivered == wanted, (subscription.expression, properties, row, kept)
