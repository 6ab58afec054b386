"""Push Spark's predicates down: decide them by broker, by queue and by offset, where that is exact.

A predicate is a column, an operator and a literal; all predicates of a filter must hold. A
predicate is *pushed* only if the source leaves out precisely the rows for which it is not true:

| column | pushed | how |
|---|---|---|
| topic, broker, queue_id | = and IN | queues are left out |
| queue_offset | = < <= > >= | the range of offsets is cut |
| tags | = and IN | tag subscription; brokers compare hashes, the reader compares tags |
| keys | = and IN, if brokers evaluate SQL92 | SQL92 selector, and the key index (`offsets`) |
| string property | = <> IN, NOT IN, IS [NOT] NULL | SQL92 selector |
| int property | = <> < <= > >= IN, NOT IN | SQL92 selector |
| bigint, double property | where Java's conversion and Spark's agree | SQL92 selector |
| boolean property | = true | SQL92 selector |
| IS NOT NULL of a column that is never null, or has a pushed comparison | always | nothing to do |

Store time is used, but not pushed: `store_time >= t` cuts the range of offsets by the broker's time
index, with a margin of a millisecond, and Spark has to look at every row again.

A comparison in SQL92 is exact for the following reason. A promoted column is null where Java's
conversion fails; there the selector fails, which means "no match" (spec/filter.md §5, §7). An
absent property is null in both. The literal determines the conversion: a whole number of 32 bits
makes the broker use Integer.valueOf, a larger one Long.valueOf, one with a decimal point
Double.valueOf.

`references` finds predicates in the plan of a query. They are the option `predicates` of one load:

    [{"is": "EqualTo", "column": "tags", "value": "UA"}, {"is": "IsNull", "column": "delay",
      "not": true}]

A value is a string, a number, true or false, a list of these, or a time, written {"us":
microseconds since 1970}. `parse_predicates` turns them into `pyspark.sql.datasource` objects.

The option `filter.sql` can lose messages silently. A consumer gets findings about its expression
when it subscribes (`filter.check`). For a DataFrame they are logged while Spark plans
(`log_filter_findings`). The expression alone does not show the most frequent mistake: compared with
a whole number, '40.7' is an error and its message no match. So the newest messages are examined
too. A SluiceMQ broker does that in its property columns; from a RocketMQ broker or a store,
`SAMPLE_MESSAGES_MAX` messages are read.
"""

import datetime
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pyspark.sql import datasource

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError, FilterSyntaxError, SluiceError
from sluicemq.filter.check import check_sql92
from sluicemq.filter.evaluate import has_surrogate
from sluicemq.filter.nodes import And, render
from sluicemq.filter.subscriptions import SEPARATOR, compile_complete, compile_sql92, parse_tags
from sluicemq.log_lines import TextLines
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription
from sluicemq.spark.schema import Column

NON_NULL_COLUMNS: Final = frozenset(
    {
        "topic",
        "broker",
        "queue_id",
        "queue_offset",
        "msg_id",
        "properties",
        "body",
        "reconsume_times",
    }
)
EXPRESSION_LENGTH_MAX: Final = 4_000
"""Characters of all selectors together. The header of a request has to hold them."""
COMPARISONS: Final = (
    "EqualTo",
    "GreaterThan",
    "GreaterThanOrEqual",
    "LessThan",
    "LessThanOrEqual",
    "In",
)
"""The predicates with a value, by the names of Spark's classes."""
NULL_CHECKS: Final = ("IsNull", "IsNotNull")
SAMPLE_MESSAGES_MAX: Final = 256
SAMPLE_TOPICS_MAX: Final = 16
_INTEGER_MAX: Final = (1 << 31) - 1
_OFFSET_END_MAX: Final = (1 << 63) - 1
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND: Final = datetime.timedelta(milliseconds=1)
_IDENTIFIER: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_KEYWORDS: Final = frozenset(
    {
        "NOT",
        "AND",
        "OR",
        "BETWEEN",
        "IN",
        "TRUE",
        "FALSE",
        "NULL",
        "IS",
        "CONTAINS",
        "STARTSWITH",
        "ENDSWITH",
    }
)
_OPERATORS: Final = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}
_MEMBERSHIP_FIELDS: Final = {
    "topic": "topics",
    "broker": "brokers",
    "queue_id": "queue_ids",
    "tags": "tags",
    "keys": "keys",
}
"""The field of `PushedFilters` with the accepted values of a column, by the column's name."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The conditions that were pushed. All of them must hold; None and empty mean no condition.

    Queue offsets must be in [`offset_min`, `offset_end`). The store times are milliseconds since
    1970, both inclusive; they are approximate, and Spark compares again. `selectors` are SQL92
    conditions. `compared_columns` are the names of columns with a pushed comparison.
    """

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    offset_min: int = 0
    offset_end: int = _OFFSET_END_MAX
    time_min_ms: int | None = None
    time_max_ms: int | None = None
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    selectors: tuple[str, ...] = ()
    compared_columns: frozenset[str] = frozenset()

    def describe(self) -> str:
        """Return the conditions as one text for users, separated by "; ".

        An example is `tags in ['UA']; SQL92 delay > 60`. Return "nothing" if there are no
        conditions.
        """
        memberships = (
            ("topic", self.topics),
            ("broker", self.brokers),
            ("queue_id", self.queue_ids),
            ("tags", self.tags),
            ("keys", self.keys),
        )
        conditions = [
            f"{column_name} in {sorted(accepted)}"
            for column_name, accepted in memberships
            if accepted is not None
        ]
        if self.offset_min or self.offset_end != _OFFSET_END_MAX:
            end = "" if self.offset_end == _OFFSET_END_MAX else str(self.offset_end)
            conditions.append(f"queue_offset {self.offset_min}..{end}")
        if self.time_min_ms is not None or self.time_max_ms is not None:
            times = f"{self.time_min_ms or ''}..{self.time_max_ms or ''}"
            conditions.append(f"store_time {times} ms (approximately)")
        conditions += [f"SQL92 {selector}" for selector in self.selectors]
        return "; ".join(conditions) or "nothing"


@dataclass(slots=True)
class FilterPushdown:
    """Decides which predicates of one read are pushed, and collects their conditions in `pushed`.

    `columns` are the reader's columns. `selectors_allowed` is False if the brokers do not evaluate
    SQL92; then no predicate becomes a SQL92 condition.
    """

    columns: Sequence[Column]
    selectors_allowed: bool = True
    pushed: PushedFilters = field(default_factory=PushedFilters)

    def push_all(self, predicates: Sequence[Any]) -> list[Any]:
        """Let the broker evaluate as many of `predicates` as possible, and return the others.

        Spark must evaluate the returned predicates itself. They are in the order of `predicates`.
        """
        # IS NOT NULL comes last: it needs no condition of its own if a comparison of the same
        # column was pushed before.
        not_null_last = sorted(
            predicates, key=lambda predicate: type(predicate).__name__ == "IsNotNull"
        )
        pushed_ids = {id(predicate) for predicate in not_null_last if self.push(predicate)}
        return [predicate for predicate in predicates if id(predicate) not in pushed_ids]

    def push(self, predicate: Any) -> bool:
        """Push one predicate to the source if possible, and return whether that is exact.

        True means that the source delivers only rows for which the predicate is true. False means
        that Spark must apply the predicate too. Even then, the conditions in `pushed` may have
        become narrower, as for a comparison of `store_time`.
        """
        column = self._find_column(predicate)
        if column is None:
            return False
        negated = type(predicate).__name__ == "Not"
        if negated:
            predicate = predicate.child
        # The name of Spark's class, such as `EqualTo`. IsNull and IsNotNull have no value.
        predicate_class = type(predicate).__name__
        literal = getattr(predicate, "value", None)

        if predicate_class == "IsNotNull" and not negated and self._is_never_null(column):
            return True
        if column.property_name is None:
            return not negated and self._push_base_column(column.name, predicate_class, literal)
        if not is_identifier(column.property_name):
            return False
        selector = _to_sql92(
            column.property_name, column.type_name, predicate_class, literal, negated=negated
        )
        is_pushed = self._push_selector(selector)
        if is_pushed and predicate_class != "IsNull":
            self._mark_compared(column.name)
        return is_pushed

    def _find_column(self, predicate: Any) -> Column | None:
        """Return the column that a predicate is about, or None for a field inside a struct."""
        path = column_path(predicate)
        for column in self.columns:
            if (column.name,) == path:
                return column
        return None

    def _is_never_null(self, column: Column) -> bool:
        """Return whether the rows that the source delivers have no null in the column."""
        if column.name in self.pushed.compared_columns:
            return True
        return column.property_name is None and column.name in NON_NULL_COLUMNS

    def _push_base_column(self, name: str, predicate_class: str, literal: Any) -> bool:
        """Push a predicate on a column that is not a property, and return whether that is exact.

        `name` is the column, `predicate_class` the name of the predicate's class, and `literal` its
        value. Equality and In narrow the accepted values of some columns. A comparison narrows the
        range of `queue_offset` exactly. It also narrows the range of `store_time`, but the result
        is then False, because Spark has to compare more precisely.
        """
        if name in _MEMBERSHIP_FIELDS:
            if predicate_class == "In":
                return self._push_membership(name, literal)
            if predicate_class == "EqualTo":
                return self._push_membership(name, (literal,))
        operator = _OPERATORS.get(predicate_class)
        if operator is None:
            return False
        if name == "queue_offset" and isinstance(literal, int):
            self._narrow_offsets(operator, literal)
            return True
        if name == "store_time" and isinstance(literal, datetime.datetime) and literal.tzinfo:
            self._narrow_times(operator, literal)
        return False

    def _narrow_offsets(self, operator: str, literal: int) -> None:
        """Narrow the pushed range of queue offsets by a comparison with `literal`.

        `operator` is =, <, <=, > or >=, with the offset on its left. The start of the range is
        inclusive, its end exclusive.
        """
        offset_min = self.pushed.offset_min
        offset_end = self.pushed.offset_end
        if operator in ("=", ">="):
            offset_min = max(offset_min, literal)
        if operator == ">":
            offset_min = max(offset_min, literal + 1)
        if operator in ("=", "<="):
            offset_end = min(offset_end, literal + 1)
        if operator == "<":
            offset_end = min(offset_end, literal)
        self.pushed = replace(self.pushed, offset_min=offset_min, offset_end=offset_end)

    def _narrow_times(self, operator: str, literal: datetime.datetime) -> None:
        """Narrow the pushed range of store times by the comparison `store_time operator literal`.

        `operator` is =, <, <=, > or >=. Store times are whole milliseconds, so the bound is rounded
        to a whole millisecond, in the direction that accepts more rows.
        """
        since_epoch = literal - _EPOCH
        if operator in (">", ">=", "="):
            time_min_ms = since_epoch // _MILLISECOND
            if self.pushed.time_min_ms is not None:
                time_min_ms = max(self.pushed.time_min_ms, time_min_ms)
            self.pushed = replace(self.pushed, time_min_ms=time_min_ms)
        if operator in ("<", "<=", "="):
            time_max_ms = -(-since_epoch // _MILLISECOND)  # rounded up
            if self.pushed.time_max_ms is not None:
                time_max_ms = min(self.pushed.time_max_ms, time_max_ms)
            self.pushed = replace(self.pushed, time_max_ms=time_max_ms)

    def _push_membership(self, name: str, literals: Iterable[Any]) -> bool:
        """Push the condition that a column has one of the values, and return whether that is exact.

        `name` is a key of `_MEMBERSHIP_FIELDS`. Nulls in `literals` are ignored. Tags are not
        pushed if a subscription cannot name them. Keys always narrow the read by the index of keys.
        That is exact only if they could also be pushed as a SQL92 condition.
        """
        accepted = frozenset(literals) - {None}
        if name == "keys":
            accepted -= {""}
        if name == "tags" and not _are_tags(accepted):
            return False

        field_name = _MEMBERSHIP_FIELDS[name]
        accepted_before = getattr(self.pushed, field_name)  # None accepts every value
        accepted_by_all = accepted if accepted_before is None else accepted_before & accepted
        changes: dict[str, Any] = {field_name: accepted_by_all}
        self.pushed = replace(self.pushed, **changes)

        if name == "keys":
            selector = _build_in_condition("KEYS", "string", sorted(accepted), negated=False)
            if not self._push_selector(selector):
                return False
        self._mark_compared(name)
        return True

    def _mark_compared(self, name: str) -> None:
        """Add a column to `pushed.compared_columns`, because a comparison with it was pushed."""
        compared_columns = self.pushed.compared_columns | {name}
        self.pushed = replace(self.pushed, compared_columns=compared_columns)

    def _push_selector(self, selector: str | None) -> bool:
        """Add a SQL92 condition to `pushed.selectors` if possible, and return whether it was added.

        It is not added if it is None or does not compile, if selectors are not allowed, or if all
        conditions together would be longer than `EXPRESSION_LENGTH_MAX`.
        """
        if selector is None or not self.selectors_allowed:
            return False
        try:
            compile_sql92(selector)
        except FilterSyntaxError:
            return False
        if sum(map(len, self.pushed.selectors)) + len(selector) > EXPRESSION_LENGTH_MAX:
            return False
        self.pushed = replace(self.pushed, selectors=(*self.pushed.selectors, selector))
        return True


def _are_tags(values: Iterable[Any]) -> bool:
    """Return whether each value is a string that means exactly one tag in a tag expression.

    `UA||AA` is not such a value, because it means two tags.
    """
    for value in values:
        if not isinstance(value, str):
            return False
        try:
            _, named_tags, _ = parse_tags(value)
        except FilterSyntaxError:
            return False
        if named_tags != {value}:
            return False
    return True


def column_path(predicate: Any) -> tuple[str, ...]:
    """Return the names that lead to a predicate's column: (column, field of a struct, …).

    The path of a top-level column has one item. The predicate may be a Not around another one.
    """
    inner = predicate.child if type(predicate).__name__ == "Not" else predicate
    return tuple(inner.attribute)


def is_identifier(name: str) -> bool:
    """Return whether SQL92 can name the property (spec/filter.md §6)."""
    return _IDENTIFIER.fullmatch(name) is not None and name.upper() not in _KEYWORDS


# ---- predicates as SQL92


def _to_sql92(
    name: str, type_name: str, predicate: str, literal: Any, *, negated: bool
) -> str | None:
    """Return the SQL92 condition that is true exactly when a predicate of Spark is true.

    `name` and `type_name` are the name and the type of the property that the predicate is about.
    `predicate` is the name of its class, such as `EqualTo`, and `literal` its value. `negated`
    means that it is inside of a Not. Return None if there is no such condition.
    """
    if predicate in NULL_CHECKS:
        if type_name != "string" or negated:
            return None
        return f"{name} IS NULL" if predicate == "IsNull" else f"{name} IS NOT NULL"
    if predicate == "In":
        return _build_in_condition(name, type_name, literal, negated=negated)
    operator = _OPERATORS.get(predicate)
    if negated:  # only an equality has a negated operator that is exact
        operator = "<>" if operator == "=" else None
    if operator is None:
        return None
    sql_literal = _to_sql92_literal(type_name, literal, operator)
    return None if sql_literal is None else f"{name} {operator} {sql_literal}"


def _build_in_condition(
    name: str, type_name: str, literals: Sequence[Any], *, negated: bool
) -> str | None:
    """Return the SQL92 condition for IN, or for NOT IN if `negated` is set.

    Strings give `color IN ('a', 'b')`, and integers give `(n = 1 OR n = 2)`. Return None if
    `literals` is empty, if one of the values cannot be compared exactly, or if `type_name` is
    neither string nor int.
    """
    operator = "<>" if negated else "="
    sql_literals = []
    for literal in literals:
        sql_literal = _to_sql92_literal(type_name, literal, operator)
        if sql_literal is None:
            return None
        sql_literals.append(sql_literal)
    if not sql_literals:
        return None

    if type_name == "string":
        in_operator = "NOT IN" if negated else "IN"
        return f"{name} {in_operator} ({', '.join(sql_literals)})"
    if type_name != "int":
        return None  # conversions of different Java classes may fail on different values
    # SQL92 has no IN for numbers.
    comparisons = [f"{name} {operator} {sql_literal}" for sql_literal in sql_literals]
    conjunction = " AND " if negated else " OR "
    return f"({conjunction.join(comparisons)})"


def _to_sql92_literal(type_name: str, literal: Any, operator: str) -> str | None:
    """Return a value as SQL92 text, or None if the broker would compare it otherwise than Spark.

    `type_name` is the type of the property that is compared, and `operator` is the SQL92 operator.
    Some values are exact for `=` only.
    """
    is_whole = type(literal) is int
    match type_name:
        case "string" if isinstance(literal, str) and literal and operator in ("=", "<>"):
            if not has_surrogate(literal):
                return "'" + literal.replace("'", "''") + "'"
        case "int" if is_whole and abs(literal) <= _INTEGER_MAX:
            # The literal is an Integer, so the broker reads the property by Integer.valueOf, as the
            # column is. -2^31 is excluded: it is not a literal, but a minus sign and 2147483648,
            # which is a Long.
            return str(literal)
        case "bigint" if is_whole and abs(literal) < 1 << 63:
            # The literal must be a Long. `x > 5` would make the broker use Integer.valueOf, which
            # fails on 3000000000, where the comparison is true. `x = 5` is not true there either
            # way.
            is_long = abs(literal) > _INTEGER_MAX
            if is_long or operator == "=":
                return str(literal)
        case "double" if isinstance(literal, float) and math.isfinite(literal):
            # Zero does not compile as a float (spec/filter.md §6), so it stays with Spark.
            return _format_float(literal)
        case "boolean" if literal is True and operator == "=":
            # Boolean.valueOf reads every string but "true" as false, where the column is null.
            return "TRUE"
    return None


def _format_float(number: float) -> str:
    """Return a number with a point in it, as SQL92 requires: `1.0e+20` for Python's `1e+20`."""
    mantissa, _, exponent = repr(number).partition("e")
    if exponent and "." not in mantissa:
        return f"{mantissa}.0e{exponent}"
    return repr(number)


def build_subscription(
    topic: str, tags: str | None, sql: str | None, pushed: PushedFilters
) -> tuple[Subscription, frozenset[str] | None] | None:
    """Return (subscription, tags to compare) for a user's filter and the pushed conditions.

    `tags` and `sql` are the options `filter.tags` and `filter.sql`. The reader must compare the
    tags of messages with the returned tags, because a broker compares only hashes of tags. The
    returned tags are None if the broker's result is exact. The whole result is None if the
    conditions contradict each other, so that nothing can match.

    Tags alone become a tag subscription, for which the broker scans only the consume queue. Tags
    together with a SQL92 condition become `TAGS IN (…)`, which is exact by itself. Raises
    FilterSyntaxError if an expression does not compile, or is followed by text that RocketMQ
    ignores.
    """
    matching_tags = _intersect_tags(tags, pushed.tags)
    if matching_tags is not None and not matching_tags:
        return None
    conditions = list(pushed.selectors)
    if sql is not None:
        compile_complete(sql)
        conditions.insert(0, sql)

    if not conditions:
        return _build_tag_subscription(topic, matching_tags), matching_tags
    if matching_tags is not None:
        conditions.append(_build_tags_condition(matching_tags))
    if len(conditions) == 1:
        return Subscription(topic, conditions[0], SQL92), None
    # Conditions are joined as trees. In a joined text, a parenthesis or a comment of one condition
    # would change the meaning of the others.
    expression = render(And(tuple(compile_sql92(condition).tree for condition in conditions)))
    compile_complete(expression)
    return Subscription(topic, expression, SQL92), None


def _intersect_tags(
    tag_expression: str | None, pushed_tags: frozenset[str] | None
) -> frozenset[str] | None:
    """Return the tags that both a tag expression and a pushed condition accept.

    None means all tags, and an empty set means that no tag matches. A `pushed_tags` of None accepts
    all tags. Raises FilterSyntaxError if the expression does not compile.
    """
    canonical_expression, expression_tags, _ = parse_tags(tag_expression)
    if canonical_expression == ALL:
        return pushed_tags
    if pushed_tags is None:
        return expression_tags
    return expression_tags & pushed_tags


def _build_tag_subscription(topic: str, tags: frozenset[str] | None) -> Subscription:
    """Return the subscription that matches any of `tags`; None means all messages."""
    if tags is None:
        return Subscription(topic, ALL, TAG)
    expression, tag_set, codes = parse_tags(SEPARATOR.join(sorted(tags)))
    return Subscription(topic, expression, TAG, tag_set, codes)


def _build_tags_condition(tags: frozenset[str]) -> str:
    """Return the SQL92 condition that the tag is one of `tags`."""
    sql_literals = [str(_to_sql92_literal("string", tag, "=")) for tag in sorted(tags)]
    return f"TAGS IN ({', '.join(sql_literals)})"


def to_selector(filters: Sequence[Any], columns: Sequence[Column]) -> tuple[str | None, list[Any]]:
    """Return (SQL92 selector, remaining predicates) for the predicates of Spark.

    `filters` are objects of `pyspark.sql.datasource`, such as `EqualTo`, about `columns`. The
    selector covers predicates on `tags`, `keys` and columns that contain a property. It is None if
    there are no such predicates, and `FALSE` if nothing can match. The remaining predicates are
    those that it does not cover exactly.
    """
    selectable_columns = [
        column for column in columns if column.property_name or column.name in ("tags", "keys")
    ]
    pushdown = FilterPushdown(selectable_columns)
    remaining = pushdown.push_all(filters)
    subscription_and_tags = build_subscription("", None, None, pushdown.pushed)
    if subscription_and_tags is None:
        return "FALSE", remaining
    subscription, tags = subscription_and_tags
    if tags is not None:
        return _build_tags_condition(tags), remaining
    if subscription.kind == SQL92:
        return subscription.expression, remaining
    return None, remaining


# ---- the option `predicates`


def parse_predicates(predicates_json: str | None) -> list[Any]:
    """Return the predicates in the option `predicates`, as objects of `pyspark.sql.datasource`.

    `predicates_json` is a JSON list, such as `[{"is": "EqualTo", "column": "tags", "value":
    "UA"}]`. None means no predicates. Raises ConfigurationError if it has another form.
    """
    try:
        return [_parse_predicate(described) for described in json.loads(predicates_json or "[]")]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"the option 'predicates' has an invalid value: {error!r}.",
            fix="Remove it; load_where, sluice sql and pipelines write it.",
        ) from None


def _parse_predicate(described: Mapping[str, Any]) -> Any:
    """Return one item of the option `predicates` as an object of `pyspark.sql.datasource`.

    Raises ValueError, KeyError or TypeError if the item does not have the form of a predicate.
    """
    class_name = described["is"]
    path = (described["column"],)
    if class_name in NULL_CHECKS:
        predicate = getattr(datasource, class_name)(path)
    elif class_name in COMPARISONS:
        predicate = getattr(datasource, class_name)(path, _parse_literal(described["value"]))
    else:
        raise ValueError(class_name)
    return datasource.Not(predicate) if described.get("not") else predicate


def _parse_literal(json_value: Any) -> Any:
    """Return the Python value of a literal in the option `predicates`.

    `{"us": 5}` is the time 5 microseconds after 1970. A list is the values of IN.
    """
    if isinstance(json_value, list):
        return [_parse_literal(element) for element in json_value]
    if isinstance(json_value, dict):
        return _EPOCH + datetime.timedelta(microseconds=json_value["us"])
    return json_value


def log_pushdown(
    label: str,
    pushed: PushedFilters,
    offered: Sequence[Any],
    remaining: Sequence[Any],
    evaluator: str,
) -> None:
    """Log one line that says which filters of a read are pushed, unless there are no filters.

    `label` names the topics, and `evaluator` names what evaluates the pushed filters. `offered` are
    all predicates, and `remaining` those that Spark evaluates. An example of the line:

        rocketmq 'flights': the broker evaluates tags in ['UA']; SQL92 delay > 60; of the predicates
        that Spark offered, it evaluates: GreaterThan(origin, 'J')

    Spark offers only simple predicates: it evaluates others without asking.
    """
    if not offered:
        return
    if not logger.hasHandlers():
        # Spark plans in a process of its own without logging, but shows the text of its stderr.
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TextLines())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info(
        "rocketmq %r: %s evaluates %s; of the predicates that Spark offered, it evaluates: %s",
        label,
        evaluator,
        pushed.describe(),
        ", ".join(map(format_predicate, remaining)) or "none",
    )


def format_predicate(predicate: Any) -> str:
    """Return a predicate as a text for users, such as `EqualTo(tags, 'UA')`."""
    if type(predicate).__name__ == "Not":
        return f"Not({format_predicate(predicate.child)})"
    values = [repr(predicate.value)] if hasattr(predicate, "value") else []
    return f"{type(predicate).__name__}({', '.join(['.'.join(predicate.attribute), *values])})"


# ---- findings about `filter.sql`

TrialReports = Iterable[Mapping[str, Any]]
"""Results of a filter on the newest messages: `filter.lab.Report` objects as mappings."""
_ALWAYS_LOGGED: Final = frozenset({"whole-against-fraction", "text-against-number"})
"""Codes of findings that are logged in any case; others only if the filter matches no message."""


def try_at_brokers(admin: Admin, topics: Sequence[str], expression: str) -> TrialReports:
    """Let each broker of the topics evaluate an expression on its newest messages.

    At most `SAMPLE_TOPICS_MAX` topics are tried, with `SAMPLE_MESSAGES_MAX` messages of each
    broker. Yield one result for each broker: a `filter.lab.Report` as a mapping. Raises the
    client's errors.
    """
    for topic in topics[:SAMPLE_TOPICS_MAX]:
        for trial in admin.try_filter(topic, expression, count_max=SAMPLE_MESSAGES_MAX):
            yield trial.report


def try_on_properties(rows: Sequence[Mapping[str, str]], expression: str) -> TrialReports:
    """Evaluate a SQL92 expression on messages, and return the report in a list of one.

    `rows` are the properties of each message. The report is a `filter.lab.Report` as a dict.
    """
    from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy

    trial = Trial(expression)
    trial.add_rows(rows)
    return [asdict(trial.report())]


def collect_findings(expression: str, run_trial: Callable[[str], TrialReports]) -> list[str]:
    """Return distinct texts about what is surprising in a SQL92 expression.

    First come warnings about the expression itself, such as a text that is compared with a number.
    Then come findings of `run_trial(expression)`, which evaluates the expression on the newest
    messages. They say which messages it loses by mistake. If it matches any message, only the most
    important ones (`_ALWAYS_LOGGED`) are returned.

    A SluiceError of `run_trial` is logged and otherwise ignored, because it must not make a read
    fail.
    """
    texts = [
        f"{finding.what} {finding.instead}"
        for finding in check_sql92(expression)
        if not finding.is_error
    ]
    try:
        for report in run_trial(expression):
            texts += _describe_trial(report)
    except SluiceError as error:
        logger.debug("filter.sql %r could not be tried: %s", expression, error)
    return list(dict.fromkeys(texts))


def _describe_trial(report: Mapping[str, Any]) -> list[str]:
    """Return a text for each finding in the report of a trial.

    If the expression matches any message, only the most important findings (`_ALWAYS_LOGGED`) are
    returned.
    """
    matches = f"Of the newest {report['rows']} messages {report['matched']} match."
    texts = []
    for property_report in report["properties"]:
        for finding in property_report["findings"]:
            is_logged = finding["code"] in _ALWAYS_LOGGED or not report["matched"]
            if is_logged:
                texts.append(f"{matches} {finding['what']} {finding['instead']}")
    return texts


def log_filter_findings(expression: str | None, run_trial: Callable[[str], TrialReports]) -> None:
    """Log a warning for each surprising fact about the option `filter.sql`.

    `run_trial(expression)` evaluates the expression on the newest messages. If `expression` is
    None, the option is not set, and nothing is logged.
    """
    if expression is None:
        return
    for finding in collect_findings(expression, run_trial):
        logger.warning("filter.sql %r: %s", expression, finding)
