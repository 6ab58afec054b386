"""Spark's predicates -> what the broker and the offsets can decide exactly.

Spark hands over simple predicates (column, operator, literal), all of which must hold, and does not
apply again what the source keeps (spec/spark.md). So a predicate is *kept* only when the source
leaves out precisely the rows for which it is not true:

| column | kept | how |
|---|---|---|
| topic, broker, queue_id | = and IN | queues are left out |
| queue_offset | = < <= > >= | the range of offsets is cut |
| tags | = and IN | tag subscription; the reader compares tags again, a broker only hashes |
| keys | = and IN, where brokers evaluate SQL92 | SQL92 selector, and the index (`offsets`) |
| string property | = <> IN, NOT IN, IS [NOT] NULL | SQL92 selector |
| int property | = <> < <= > >= IN, NOT IN | SQL92 selector |
| bigint, double property | where Java's conversion and Spark's agree | SQL92 selector |
| boolean property | = true | SQL92 selector |
| IS NOT NULL of a column that never is null, or has a kept comparison | always | nothing to do |

Store time is used but not kept: `store_time >= t` cuts the range by the broker's time index, with a
millisecond to spare, and Spark looks at every row again.

Why a comparison in SQL92 is exact: a promoted column is null where Java's conversion fails, and
there the selector raises, which is "no match" (spec/filter.md §5, §7); an absent property is null
in both. The literal's class decides the conversion: a whole number of 32 bits makes it
Integer.valueOf, a larger one Long.valueOf, one with a point Double.valueOf.

Found in the plan of a query by `references`, predicates are the option `predicates` of one load:

    [{"is": "EqualTo", "column": "tags", "value": "UA"}, {"is": "IsNull", "column": "delay",
      "not": true}]

A value is a text, a number, true or false, a list of these, or a time, written {"us": microseconds
since 1970}. `predicates_of` makes `pyspark.sql.datasource` objects of them again.

`filter.sql` may lose messages without a word. A consumer is told of its expression when it
subscribes (`filter.check`); a DataFrame is told while Spark plans (`warn_of_filter`). An expression
alone does not show the trap that loses most: beside a whole number '40.7' is an error and its
message no match , so the newest messages are looked at too. A SluiceMQ broker
does that in its property columns; of a RocketMQ broker, and of a store, so many are read.
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
from sluicemq.filter.check import check
from sluicemq.filter.evaluate import has_surrogate
from sluicemq.filter.nodes import And, render
from sluicemq.filter.subscriptions import SEPARATOR, compile_sql92, compile_whole, parse_tags
from sluicemq.log_lines import TextLines
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription
from sluicemq.spark.schema import Column

NEVER_NULL: Final = frozenset({
    "topic", "broker", "queue_id", "queue_offset", "msg_id", "properties", "body",
    "reconsume_times",
})  # fmt: skip
EXPRESSION_LENGTH_MAX: Final = 4_000
"""Longer selectors are left to Spark: the request header has to hold them."""
COMPARED: Final = (
    "EqualTo", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual", "In",
)  # fmt: skip
PRESENT: Final = ("IsNull", "IsNotNull")
MESSAGES_MAX: Final = 256
TOPICS_MAX: Final = 16
"""So many of a pattern's topics are looked at."""
_INTEGER_MAX: Final = (1 << 31) - 1
_OFFSET_END: Final = (1 << 63) - 1
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND: Final = datetime.timedelta(milliseconds=1)
_IDENTIFIER: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_KEYWORDS: Final = frozenset({
    "NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS",
    "CONTAINS", "STARTSWITH", "ENDSWITH",
})  # fmt: skip
_OPERATORS: Final = {
    "EqualTo": "=", "GreaterThan": ">", "GreaterThanOrEqual": ">=",
    "LessThan": "<", "LessThanOrEqual": "<=",
}  # fmt: skip
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was taken over. All of it must hold; None and empty mean no condition.

    `offset_min`/`offset_end` bound queue offsets, times are milliseconds (both inclusive, exact
    only with Spark's second look), `selectors` are SQL92 conditions. `compared` are the columns of
    kept comparisons.
    """

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    offset_min: int = 0
    offset_end: int = _OFFSET_END
    time_min_ms: int | None = None
    time_max_ms: int | None = None
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    selectors: tuple[str, ...] = ()
    compared: frozenset[str] = frozenset()

    def told(self) -> str:
        """What was taken over, in words; "nothing" when there is none."""
        sets = (
            ("topic", self.topics), ("broker", self.brokers), ("queue_id", self.queue_ids),
            ("tags", self.tags), ("keys", self.keys),
        )  # fmt: skip
        said = [f"{name} in {sorted(values)}" for name, values in sets if values is not None]
        if self.offset_min or self.offset_end != _OFFSET_END:
            end = "" if self.offset_end == _OFFSET_END else str(self.offset_end)
            said.append(f"queue_offset {self.offset_min}..{end}")
        if self.time_min_ms is not None or self.time_max_ms is not None:
            said.append(f"store_time {self.time_min_ms or ''}..{self.time_max_ms or ''} ms (about)")
        said += [f"SQL92 {selector}" for selector in self.selectors]
        return "; ".join(said) or "nothing"


@dataclass(slots=True)
class FilterPushdown:
    """Takes predicates one by one: `take` returns whether the predicate is kept.

    `columns` are those of the reader; `selectors_allowed` is False when the brokers do not evaluate
    SQL92 or the user forbids it.
    """

    columns: Sequence[Column]
    selectors_allowed: bool = True
    pushed: Pushed = field(default_factory=Pushed)

    def take_all(self, predicates: Sequence[Any]) -> list[Any]:
        """The predicates that Spark still has to apply."""
        nulls_last = sorted(predicates, key=lambda one: type(one).__name__ == "IsNotNull")
        kept = {id(one) for one in nulls_last if self.take(one)}
        return [one for one in predicates if id(one) not in kept]

    def take(self, predicate: Any) -> bool:
        """True when rows for which the predicate is not true will not be delivered."""
        path = attribute_of(predicate)
        negated = type(predicate).__name__ == "Not"
        predicate = predicate.child if negated else predicate
        kind, literal = type(predicate).__name__, getattr(predicate, "value", None)
        column = next((one for one in self.columns if (one.name,) == path), None)
        if column is None:
            return False
        own = column.property_name
        if kind == "IsNotNull" and not negated and (
            column.name in self.pushed.compared or (own is None and column.name in NEVER_NULL)
        ):  # fmt: skip
            return True
        if own is None:
            return not negated and self._take_base(column.name, kind, literal)
        is_kept = is_identifier(own) and self._take_selector(
            _selector(own, column.kind, kind, literal, negated=negated)
        )
        if is_kept and kind != "IsNull":
            self._mark(column.name)
        return is_kept

    def _take_base(self, name: str, kind: str, literal: Any) -> bool:
        if kind in ("EqualTo", "In") and name in ("topic", "broker", "queue_id", "tags", "keys"):
            return self._take_set(name, literal if kind == "In" else (literal,))
        operator = _OPERATORS.get(kind)
        if operator is not None and name == "queue_offset" and isinstance(literal, int):
            low = literal + (operator == ">") if operator in ("=", ">", ">=") else 0
            end = literal + (operator != "<") if operator in ("=", "<", "<=") else _OFFSET_END
            low, end = max(low, self.pushed.offset_min), min(end, self.pushed.offset_end)
            self.pushed = replace(self.pushed, offset_min=low, offset_end=end)
            return True
        if name == "store_time" and isinstance(literal, datetime.datetime) and literal.tzinfo:
            # Milliseconds around the literal; a message's time is whole milliseconds.
            since = literal - _EPOCH
            if operator in (">", ">=", "="):
                low, known = since // _MILLISECOND, self.pushed.time_min_ms
                low = low if known is None else max(known, low)
                self.pushed = replace(self.pushed, time_min_ms=low)
            if operator in ("<", "<=", "="):
                high, known = -(-since // _MILLISECOND), self.pushed.time_max_ms
                high = high if known is None else min(known, high)
                self.pushed = replace(self.pushed, time_max_ms=high)
        return False

    def _take_set(self, name: str, literals: Iterable[Any]) -> bool:
        """Equality with one of some values. Of keys the index narrows in any case; with the
        selector as well Spark need not look again."""
        values = (
            frozenset(literals) - {None, ""} if name == "keys" else frozenset(literals) - {None}
        )
        if name == "tags":  # can a subscription name exactly these?
            try:
                if any(not isinstance(one, str) or parse_tags(one)[1] != {one} for one in values):
                    return False
            except FilterSyntaxError:
                return False
        member = {"topic": "topics", "broker": "brokers", "queue_id": "queue_ids"}.get(name, name)
        known = getattr(self.pushed, member)
        changes: dict[str, Any] = {member: values if known is None else known & values}
        self.pushed = replace(self.pushed, **changes)
        if name == "keys" and not self._take_selector(
            _membership("KEYS", "string", sorted(values), negated=False)
        ):
            return False
        self._mark(name)
        return True

    def _mark(self, name: str) -> None:
        self.pushed = replace(self.pushed, compared=self.pushed.compared | {name})

    def _take_selector(self, selector: str | None) -> bool:
        """Adds a condition, if there is one that compiles and is not too long."""
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


def attribute_of(predicate: Any) -> tuple[str, ...]:
    """The column, and field of a struct, that a predicate is on."""
    inner = predicate.child if type(predicate).__name__ == "Not" else predicate
    return tuple(inner.attribute)


def is_identifier(name: str) -> bool:
    """Whether SQL92 can name the property (spec/filter.md §6)."""
    return _IDENTIFIER.fullmatch(name) is not None and name.upper() not in _KEYWORDS


# ---- predicates as SQL92


def _selector(name: str, kind: str, predicate: str, literal: Any, *, negated: bool) -> str | None:
    """The SQL92 condition that is true exactly when the predicate is; None when there is none."""
    if predicate in PRESENT:
        if kind != "string" or negated:
            return None
        return f"{name} IS NULL" if predicate == "IsNull" else f"{name} IS NOT NULL"
    if predicate == "In":
        return _membership(name, kind, literal, negated=negated)
    operator = _OPERATORS.get(predicate)
    if negated:
        operator = "<>" if operator == "=" else None
    text = None if operator is None else _literal(kind, literal, operator)
    return None if text is None else f"{name} {operator} {text}"


def _membership(name: str, kind: str, values: Sequence[Any], *, negated: bool) -> str | None:
    operator = "<>" if negated else "="
    texts = [_literal(kind, value, operator) for value in values]
    listed = [text for text in texts if text is not None]
    if not listed or len(listed) < len(texts):
        return None
    if kind == "string":
        return f"{name} {'NOT IN' if negated else 'IN'} ({', '.join(listed)})"
    if kind != "int":
        return None  # conversions of different classes may fail on different texts
    joined = (" AND " if negated else " OR ").join(f"{name} {operator} {text}" for text in listed)
    return f"({joined})"


def _literal(kind: str, literal: Any, operator: str) -> str | None:
    """A literal in SQL92, where the comparison of a property of the kind with it is exact.

    Not of an empty string. Of int those of 32 bits: such a literal is an Integer, so the text is
    read by Integer.valueOf, as the column is; but -2^31, which is no negative literal: 2147483648
    is a Long. Of bigint those that are a Long: `x > 5` makes the broker read the text by
    Integer.valueOf, which fails on 3000000000, where the column is a number and the comparison
    true; `x = 5` is not true there either way. Of double finite ones; zero does not compile as a
    float (spec/filter.md §6) and is Spark's. Of boolean `= TRUE`: Boolean.valueOf reads every text
    but "true" as false, where the column is null.
    """
    found: str | None = None
    is_whole = type(literal) is int
    match kind:
        case "string" if isinstance(literal, str) and literal and operator in ("=", "<>"):
            found = None if has_surrogate(literal) else "'" + literal.replace("'", "''") + "'"
        case "int" if is_whole and abs(literal) <= _INTEGER_MAX:
            found = str(literal)
        case "bigint" if is_whole and abs(literal) < 1 << 63:
            is_long = abs(literal) > _INTEGER_MAX
            found = str(literal) if is_long or operator == "=" else None
        case "double" if isinstance(literal, float) and math.isfinite(literal):
            mantissa, _, exponent = repr(literal).partition("e")
            is_plain = "." in mantissa or not exponent
            found = repr(literal) if is_plain else f"{mantissa}.0e{exponent}"
        case "boolean" if literal is True and operator == "=":
            found = "TRUE"
    return found


def subscription_of(
    topic: str, tags: str | None, sql: str | None, pushed: Pushed
) -> tuple[Subscription, frozenset[str] | None] | None:
    """One subscription for a user's filters and what was pushed, and the tags to compare again.

    None when nothing can match. Tags alone stay a tag subscription (the broker scans only the
    consume queue); with a selector they become `TAGS IN (…)`, which is exact by itself.
    Raises FilterSyntaxError when a user's expression does not compile, or goes on with text that
    RocketMQ ignores. Conditions are joined as trees: as texts, a parenthesis or a comment of one
    would change what the others mean.
    """
    text, known, _ = parse_tags(tags)
    wanted = pushed.tags if text == ALL else known
    if text != ALL and pushed.tags is not None:
        wanted = known & pushed.tags
    if wanted is not None and not wanted:
        return None
    if sql is not None:
        compile_whole(sql)
    conditions = [*([sql] if sql is not None else []), *pushed.selectors]
    if not conditions:
        if wanted is None:
            return Subscription(topic, ALL, TAG), None
        text, known, codes = parse_tags(SEPARATOR.join(sorted(wanted)))
        return Subscription(topic, text, TAG, known, codes), wanted
    if wanted is not None:
        conditions.append(_tags_condition(wanted))
    if len(conditions) == 1:
        return Subscription(topic, conditions[0], SQL92), None
    expression = render(And(tuple(compile_sql92(condition).tree for condition in conditions)))
    compile_whole(expression)
    return Subscription(topic, expression, SQL92), None


def _tags_condition(tags: frozenset[str]) -> str:
    return f"TAGS IN ({', '.join(str(_literal('string', tag, '=')) for tag in sorted(tags))})"


def to_selector(filters: Sequence[Any], columns: Sequence[Column]) -> tuple[str | None, list[Any]]:
    """Spark's predicates on these columns as one SQL92 selector, and those that it cannot say.

    `filters` are what Spark hands to a data source (`pyspark.sql.datasource.EqualTo` …). None: no
    condition at all; `FALSE` when nothing can match. The other direction is `selectors.column`.
    """
    selectable = [one for one in columns if one.property_name or one.name in ("tags", "keys")]
    pushdown = FilterPushdown(selectable)
    rest = pushdown.take_all(filters)
    found = subscription_of("", None, None, pushdown.pushed)
    if found is None:
        return "FALSE", rest
    subscription, tags = found
    if tags is not None:
        return _tags_condition(tags), rest
    return (subscription.expression if subscription.kind == SQL92 else None), rest


# ---- the option `predicates`


def predicates_of(text: str | None) -> list[Any]:
    """The option's predicates as Spark's objects. Raises ConfigurationError."""

    def value_of(given: Any) -> Any:
        if isinstance(given, list):
            return [value_of(one) for one in given]
        if isinstance(given, dict):
            return _EPOCH + datetime.timedelta(microseconds=given["us"])
        return given

    def predicate_of(given: Mapping[str, Any]) -> Any:
        kind, path = given["is"], (given["column"],)
        if kind not in (*PRESENT, *COMPARED):
            raise ValueError(kind)
        values = () if kind in PRESENT else (value_of(given["value"]),)
        found = getattr(datasource, kind)(path, *values)
        return datasource.Not(found) if given.get("not") else found

    try:
        return [predicate_of(given) for given in json.loads(text or "[]")]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"the option 'predicates' cannot be read: {error!r}.",
            fix="load_where, sluice sql and pipelines write it; leave it out.",
        ) from None


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
        handler.setFormatter(TextLines())
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
    values = [repr(predicate.value)] if hasattr(predicate, "value") else []
    return f"{type(predicate).__name__}({', '.join(['.'.join(predicate.attribute), *values])})"


# ---- what `filter.sql` loses

Reports = Iterable[Mapping[str, Any]]
"""`filter.lab.Report` as mappings."""
_ALWAYS: Final = frozenset({"whole-against-fraction", "text-against-number"})
"""The other findings (a name or a spelling that no message has) count where nothing matches."""


def tried_at_brokers(admin: Admin, topics: Sequence[str], expression: str) -> Reports:
    """The expression on the newest messages of each topic. Raises the client's errors."""
    for topic in topics[:TOPICS_MAX]:
        for trial in admin.try_filter(topic, expression, count_max=MESSAGES_MAX):
            yield trial.report


def tried_here(rows: Sequence[Mapping[str, str]], expression: str) -> Reports:
    """The same on these messages' properties."""
    from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy

    trial = Trial(expression)
    trial.add_rows(rows)
    return [asdict(trial.report())]


def filter_findings(expression: str, try_it: Callable[[str], Reports]) -> list[str]:
    """What surprises in an expression, and what of the newest messages it loses by mistake; each
    once. Nobody is refused a read because this look failed."""
    found = [f"{one.what} {one.instead}" for one in check(expression) if not one.is_error]
    try:
        for report in try_it(expression):
            newest = f"Of the newest {report['rows']} messages {report['matched']} match."
            found += [
                f"{newest} {one['what']} {one['instead']}"
                for item in report["properties"]
                for one in item["findings"]
                if one["code"] in _ALWAYS or not report["matched"]
            ]
    except SluiceError as error:
        logger.debug("filter.sql %r is not tried: %s", expression, error)
    return list(dict.fromkeys(found))


def warn_of_filter(expression: str | None, try_it: Callable[[str], Reports]) -> None:
    """Logs `filter_findings` of the option `filter.sql`, when there is one."""
    for one in filter_findings(expression, try_it) if expression is not None else ():
        logger.warning("filter.sql %r: %s", expression, one)
