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
        sets = (
            ("topic", self.topics),
            ("broker", self.brokers),
            ("queue_id", self.queue_ids),
            ("tags", self.tags),
            ("keys", self.keys),
        )
        parts = [f"{name} in {sorted(values)}" for name, values in sets if values is not None]
        if self.offset_min or self.offset_end != _OFFSET_END_MAX:
            end = "" if self.offset_end == _OFFSET_END_MAX else str(self.offset_end)
            parts.append(f"queue_offset {self.offset_min}..{end}")
        if self.time_min_ms is not None or self.time_max_ms is not None:
            times = f"{self.time_min_ms or ''}..{self.time_max_ms or ''}"
            parts.append(f"store_time {times} ms (approximately)")
        parts += [f"SQL92 {selector}" for selector in self.selectors]
        return "; ".join(parts) or "nothing"


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
        """Push as many of `predicates` as possible, and return the others, which Spark must decide.

        The result is in the order of `predicates`.
        """
        # IS NOT NULL comes last: it needs no condition of its own if a comparison of the same
        # column was pushed before.
        not_null_last = sorted(predicates, key=lambda one: type(one).__name__ == "IsNotNull")
        pushed_ids = {id(predicate) for predicate in not_null_last if self.push(predicate)}
        return [predicate for predicate in predicates if id(predicate) not in pushed_ids]

    def push(self, predicate: Any) -> bool:
        """Push one predicate if possible, and return whether that is exact.

        True means that the source delivers no row for which the predicate is not true. False means
        that Spark must apply the predicate; `pushed` may have become narrower all the same, as for
        a comparison of `store_time`.
        """
        path = column_path(predicate)
        negated = type(predicate).__name__ == "Not"
        predicate = predicate.child if negated else predicate
        # The name of Spark's class (`EqualTo` …); IsNull and IsNotNull have no value.
        kind = type(predicate).__name__
        literal = getattr(predicate, "value", None)
        column = next((one for one in self.columns if (one.name,) == path), None)
        if column is None:
            return False
        property_name = column.property_name
        is_never_null = column.name in self.pushed.compared_columns or (
            property_name is None and column.name in NON_NULL_COLUMNS
        )
        if kind == "IsNotNull" and not negated and is_never_null:
            return True
        if property_name is None:
            return not negated and self._push_base_column(column.name, kind, literal)
        is_pushed = is_identifier(property_name) and self._push_selector(
            _to_sql92(property_name, column.type_name, kind, literal, negated=negated)
        )
        if is_pushed and kind != "IsNull":
            self._mark_compared(column.name)
        return is_pushed

    def _push_base_column(self, name: str, kind: str, literal: Any) -> bool:
        """Push a predicate on a column that is not a property, and return whether that is exact.

        `name` is the column, `kind` is the name of the predicate's class, and `literal` is its
        value. `queue_offset` cuts the range of offsets exactly. `store_time` cuts the range of
        store times, but the result is False, because Spark has to compare again.
        """
        if kind in ("EqualTo", "In") and name in ("topic", "broker", "queue_id", "tags", "keys"):
            return self._push_membership(name, literal if kind == "In" else (literal,))
        operator = _OPERATORS.get(kind)
        if operator is not None and name == "queue_offset" and isinstance(literal, int):
            # The bound after the literal: inclusive for the start, exclusive for the end.
            low = literal + (operator == ">") if operator in ("=", ">", ">=") else 0
            end = literal + (operator != "<") if operator in ("=", "<", "<=") else _OFFSET_END_MAX
            low = max(low, self.pushed.offset_min)
            end = min(end, self.pushed.offset_end)
            self.pushed = replace(self.pushed, offset_min=low, offset_end=end)
            return True
        if name == "store_time" and isinstance(literal, datetime.datetime) and literal.tzinfo:
            # The literal is rounded outwards to whole milliseconds, as store times are.
            since = literal - _EPOCH
            if operator in (">", ">=", "="):
                low = since // _MILLISECOND
                pushed_low = self.pushed.time_min_ms
                low = low if pushed_low is None else max(pushed_low, low)
                self.pushed = replace(self.pushed, time_min_ms=low)
            if operator in ("<", "<=", "="):
                high = -(-since // _MILLISECOND)
                pushed_high = self.pushed.time_max_ms
                high = high if pushed_high is None else min(pushed_high, high)
                self.pushed = replace(self.pushed, time_max_ms=high)
        return False

    def _push_membership(self, name: str, literals: Iterable[Any]) -> bool:
        """Push the condition that a column has one of the values, and return whether that is exact.

        `name` is topic, broker, queue_id, tags or keys. Nulls among `literals` are left out. Tags
        that a subscription cannot name are not pushed. Keys always narrow the read by the key
        index; that is exact only if their SQL92 condition could be pushed too.
        """
        if name == "keys":
            values = frozenset(literals) - {None, ""}
        else:
            values = frozenset(literals) - {None}
        if name == "tags" and not _are_tags(values):
            return False
        attribute = {"topic": "topics", "broker": "brokers", "queue_id": "queue_ids"}.get(
            name, name
        )
        pushed_values = getattr(self.pushed, attribute)
        both = values if pushed_values is None else pushed_values & values
        changes: dict[str, Any] = {attribute: both}
        self.pushed = replace(self.pushed, **changes)
        if name == "keys" and not self._push_selector(
            _in_condition("KEYS", "string", sorted(values), negated=False)
        ):
            return False
        self._mark_compared(name)
        return True

    def _mark_compared(self, name: str) -> None:
        """Add a column to `pushed.compared_columns`, because a comparison with it was pushed."""
        compared_columns = self.pushed.compared_columns | {name}
        self.pushed = replace(self.pushed, compared_columns=compared_columns)

    def _push_selector(self, selector: str | None) -> bool:
        """Add a SQL92 condition to `pushed.selectors` if possible. Return whether it was added.

        It is not added if `selector` is None or does not compile, if selectors are not allowed, or
        if the conditions together would be longer than `EXPRESSION_LENGTH_MAX`.
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
    """Return whether every value is a string that a tag expression can name as one tag.

    A value such as `UA||AA` is not: in a tag expression it names two tags.
    """
    try:
        return all(isinstance(one, str) and parse_tags(one)[1] == {one} for one in values)
    except FilterSyntaxError:
        return False


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
    """Return the SQL92 condition that is true exactly when a predicate on a property is true.

    Return None if there is no such condition. `name` and `type_name` describe the promoted
    property. `predicate` is the name of Spark's class, such as `EqualTo`, and `literal` is its
    value. `negated` says that a Not is around it.
    """
    if predicate in NULL_CHECKS:
        if type_name != "string" or negated:
            return None
        return f"{name} IS NULL" if predicate == "IsNull" else f"{name} IS NOT NULL"
    if predicate == "In":
        return _in_condition(name, type_name, literal, negated=negated)
    operator = _OPERATORS.get(predicate)
    if negated:
        operator = "<>" if operator == "=" else None
    text = None if operator is None else _sql92_literal(type_name, literal, operator)
    return None if text is None else f"{name} {operator} {text}"


def _in_condition(name: str, type_name: str, values: Sequence[Any], *, negated: bool) -> str | None:
    """Return the SQL92 condition for [NOT] IN.

    Return None if `values` is empty, if one of the values cannot be compared exactly, or if
    `type_name` is neither string nor int.
    """
    operator = "<>" if negated else "="
    texts = [_sql92_literal(type_name, value, operator) for value in values]
    literals = [text for text in texts if text is not None]
    if not literals or len(literals) < len(texts):
        return None
    if type_name == "string":
        return f"{name} {'NOT IN' if negated else 'IN'} ({', '.join(literals)})"
    if type_name != "int":
        return None  # conversions of different Java classes may fail on different values
    conjunction = " AND " if negated else " OR "
    joined = conjunction.join(f"{name} {operator} {text}" for text in literals)
    return f"({joined})"


def _sql92_literal(type_name: str, literal: Any, operator: str) -> str | None:
    """Return the literal in SQL92, or None if a comparison with it would not be exact.

    `type_name` is the type of the property that is compared, and `operator` is the SQL92 operator.
    Some literals are exact for `=` only.
    """
    text: str | None = None
    is_whole = type(literal) is int
    match type_name:
        case "string" if isinstance(literal, str) and literal and operator in ("=", "<>"):
            text = None if has_surrogate(literal) else "'" + literal.replace("'", "''") + "'"
        case "int" if is_whole and abs(literal) <= _INTEGER_MAX:
            # The literal is an Integer, so the broker reads the property by Integer.valueOf, as the
            # column is. -2^31 is excluded: it is not a literal, but a minus sign and 2147483648,
            # which is a Long.
            text = str(literal)
        case "bigint" if is_whole and abs(literal) < 1 << 63:
            # The literal must be a Long. `x > 5` would make the broker use Integer.valueOf, which
            # fails on 3000000000, where the comparison is true. `x = 5` is not true there either
            # way.
            is_long = abs(literal) > _INTEGER_MAX
            text = str(literal) if is_long or operator == "=" else None
        case "double" if isinstance(literal, float) and math.isfinite(literal):
            # Zero does not compile as a float (spec/filter.md §6), so it stays with Spark.
            mantissa, _, exponent = repr(literal).partition("e")
            has_point = "." in mantissa or not exponent
            text = repr(literal) if has_point else f"{mantissa}.0e{exponent}"
        case "boolean" if literal is True and operator == "=":
            # Boolean.valueOf reads every string but "true" as false, where the column is null.
            text = "TRUE"
    return text


def build_subscription(
    topic: str, tags: str | None, sql: str | None, pushed: PushedFilters
) -> tuple[Subscription, frozenset[str] | None] | None:
    """Return the subscription for a user's filter and the pushed conditions, with tags to compare.

    `tags` and `sql` are the options `filter.tags` and `filter.sql`. The result is None if the
    conditions contradict each other, so that nothing can match. In (subscription, tags), the tags
    are those that the reader must compare again, because a broker compares only hashes of tags;
    they are None if the broker's result is exact.

    Tags alone become a tag subscription, for which the broker scans only the consume queue. Tags
    together with a SQL92 condition become `TAGS IN (…)`, which is exact by itself. Raises
    FilterSyntaxError if an expression does not compile, or is followed by text that RocketMQ
    ignores.
    """
    text, tag_set, _ = parse_tags(tags)
    # None means that every tag is wanted; an empty set means that no message can match.
    wanted = pushed.tags if text == ALL else tag_set
    if text != ALL and pushed.tags is not None:
        wanted = tag_set & pushed.tags
    if wanted is not None and not wanted:
        return None
    if sql is not None:
        compile_complete(sql)
    conditions = [*([sql] if sql is not None else []), *pushed.selectors]
    if not conditions:
        if wanted is None:
            return Subscription(topic, ALL, TAG), None
        text, tag_set, codes = parse_tags(SEPARATOR.join(sorted(wanted)))
        return Subscription(topic, text, TAG, tag_set, codes), wanted
    if wanted is not None:
        conditions.append(_tags_condition(wanted))
    if len(conditions) == 1:
        return Subscription(topic, conditions[0], SQL92), None
    # Conditions are joined as trees. In a joined text, a parenthesis or a comment of one condition
    # would change the meaning of the others.
    expression = render(And(tuple(compile_sql92(condition).tree for condition in conditions)))
    compile_complete(expression)
    return Subscription(topic, expression, SQL92), None


def _tags_condition(tags: frozenset[str]) -> str:
    """Return the SQL92 condition that the tag is one of `tags`."""
    return f"TAGS IN ({', '.join(str(_sql92_literal('string', tag, '=')) for tag in sorted(tags))})"


def to_selector(filters: Sequence[Any], columns: Sequence[Column]) -> tuple[str | None, list[Any]]:
    """Return one SQL92 selector for Spark's predicates, and the predicates that it does not cover.

    `filters` are objects of `pyspark.sql.datasource` (`EqualTo` …) about `columns`. Only predicates
    on promoted properties, `tags` and `keys` become part of the selector. The selector is None if
    there are no conditions, and `FALSE` if nothing can match. `selectors.column` is the opposite
    direction.
    """
    selectable = [one for one in columns if one.property_name or one.name in ("tags", "keys")]
    pushdown = FilterPushdown(selectable)
    remaining = pushdown.push_all(filters)
    subscription_and_tags = build_subscription("", None, None, pushdown.pushed)
    if subscription_and_tags is None:
        return "FALSE", remaining
    subscription, tags = subscription_and_tags
    if tags is not None:
        return _tags_condition(tags), remaining
    return (subscription.expression if subscription.kind == SQL92 else None), remaining


# ---- the option `predicates`


def parse_predicates(text: str | None) -> list[Any]:
    """Return the predicates of the option `predicates` as objects of `pyspark.sql.datasource`.

    `text` is JSON in the format of the module's docstring; None means no predicates. Raises
    ConfigurationError if the text is not in that format.
    """

    def to_value(given: Any) -> Any:
        """Return the Python value of a JSON value: {"us": …} is a time, a list is of IN."""
        if isinstance(given, list):
            return [to_value(one) for one in given]
        if isinstance(given, dict):
            return _EPOCH + datetime.timedelta(microseconds=given["us"])
        return given

    def to_predicate(given: Mapping[str, Any]) -> Any:
        kind = given["is"]
        path = (given["column"],)
        if kind not in (*NULL_CHECKS, *COMPARISONS):
            raise ValueError(kind)
        values = () if kind in NULL_CHECKS else (to_value(given["value"]),)
        predicate = getattr(datasource, kind)(path, *values)
        return datasource.Not(predicate) if given.get("not") else predicate

    try:
        return [to_predicate(given) for given in json.loads(text or "[]")]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"the option 'predicates' has an invalid value: {error!r}.",
            fix="Remove it; load_where, sluice sql and pipelines write it.",
        ) from None


def log_pushdown(
    label: str,
    pushed: PushedFilters,
    offered: Sequence[Any],
    remaining: Sequence[Any],
    evaluator: str,
) -> None:
    """Log one line about the predicates of one read. Does nothing if there are no predicates.

    `label` names the topics, and `evaluator` names what evaluates the pushed predicates. `offered`
    are all predicates, `remaining` those that Spark decides.

    Spark's planner is a process of its own without configured logging. So if no handler is
    configured, one that writes to stderr is added; Spark's driver shows that text. The option
    `reportPushdown` switches the line off:

        rocketmq 'flights': the broker evaluates tags in ['UA']; SQL92 delay > 60; remaining for
        Spark: GreaterThan(origin, 'J')
    """
    if not offered:
        return
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TextLines())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info(
        "rocketmq %r: %s evaluates %s; remaining for Spark: %s",
        label,
        evaluator,
        pushed.describe(),
        ", ".join(map(format_predicate, remaining)) or "nothing",
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
    """Return the result of an expression on messages, in a list of one.

    `rows` are the properties of each message. The result is a `filter.lab.Report` as a mapping.
    """
    from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy

    trial = Trial(expression)
    trial.add_rows(rows)
    return [asdict(trial.report())]


def collect_findings(expression: str, run_trial: Callable[[str], TrialReports]) -> list[str]:
    """Return distinct texts about what is surprising in a SQL92 expression.

    First come warnings about the expression itself, such as a text that is compared with a number.
    Then come the findings of `run_trial(expression)`, which evaluates the expression on the newest
    messages: the messages that it loses by mistake. Most of these are left out if the expression
    matches any message (see `_ALWAYS_LOGGED`). A SluiceError of `run_trial` is logged and otherwise
    ignored, because it must not make a read fail.
    """
    findings = [f"{one.what} {one.instead}" for one in check_sql92(expression) if not one.is_error]
    try:
        for report in run_trial(expression):
            newest = f"Of the newest {report['rows']} messages {report['matched']} match."
            findings += [
                f"{newest} {one['what']} {one['instead']}"
                for item in report["properties"]
                for one in item["findings"]
                if one["code"] in _ALWAYS_LOGGED or not report["matched"]
            ]
    except SluiceError as error:
        logger.debug("filter.sql %r could not be tried: %s", expression, error)
    return list(dict.fromkeys(findings))


def log_filter_findings(expression: str | None, run_trial: Callable[[str], TrialReports]) -> None:
    """Log a warning for each finding of `collect_findings` about the option `filter.sql`.

    None means that the option is not set; nothing is logged then.
    """
    for finding in collect_findings(expression, run_trial) if expression is not None else ():
        logger.warning("filter.sql %r: %s", expression, finding)
