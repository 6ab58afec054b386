"""SQL92 selectors as Spark columns: the broker's filter, on any DataFrame of messages.

    df.where(column("dep_delay > 60 AND origin = 'JFK'"))       rows that the broker would deliver
    df.select(verdict("dep_delay > 60"))                        TRUE, FALSE, NULL or ERROR, and why

Exactly RocketMQ's semantics (spec/filter.md §6, §7): strings become numbers of the literal's class
as Java reads them, what cannot be read is an error and no match, nulls are three-valued. The column
is pure Spark SQL. The rare selector that Spark SQL cannot say exactly (half a character in a
string, hundreds of conditions, deep nesting) goes through Python, in Arrow batches and with the
broker's own evaluator; `compiled(…).python` says why, and a line of the log. Why it is no Arrow
function for all: design/0018.

Where the properties are: by default in the columns that the source `rocketmq` has, which keeps TAGS
and KEYS in columns of their own. `columns` is what the source's option of that name said: a
property that was promoted as a string is taken from its column, and so are numbers of the same
class as the literal, where only TRUE counts. UNIQ_KEY, WAIT, MSG_REGION, TRACE_ON and CLUSTER are
in the map only with the source's option `properties=all`. The other direction, Spark's predicates
as SQL92, is `filters.to_selector`.

RocketMQ knows four outcomes of a condition, Spark three: an evaluation can fail, and then the
message does not match whatever the other conditions say, if only the failing one is reached
(spec/filter.md §7). So a condition is translated in up to three ways, and whoever joins it takes
the plainest that is exact:

    plain   a Spark boolean with Spark's own null, for what cannot fail: strings, IN, IS NULL …;
            AND, OR and NOT on these are Spark's
    match   a boolean that is never null: is the outcome TRUE? An AND is TRUE when all its parts
            are, failing or not, so its parts stay apart, where Spark can push them down
    code    an int: FALSE 0, TRUE 1, null 2, error 3. Joins are look-ups in a table of two bits an
            entry, inside one number: each operand stands there once, and short circuit needs no
            CASE. The tables are asked of the scalar engine (as in `filter.plan`)

Texts become numbers as Java reads them: a regular expression keeps what Integer.valueOf,
Long.valueOf or Double.valueOf accept, the cast is Java's own parser, null is the error. All is
built as text, since one call to the JVM then makes the column, whatever its size.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Final

from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions

from sluicemq.errors import ConfigurationError
from sluicemq.filter.evaluate import compile_value, constant_of
from sluicemq.filter.nodes import (
    And,
    Between,
    Equal,
    In,
    IsNull,
    JavaClass,
    Literal,
    Match,
    Negate,
    Node,
    Not,
    Or,
    Order,
    Property,
    Truth,
    java_class,
    levels,
    property_names,
)
from sluicemq.filter.plan import ERROR, FALSE, NULL, TRUE, stub, verdict_of
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import compile_sql92, compile_whole
from sluicemq.spark.references import quoted
from sluicemq.spark.schema import parse_columns

DEPTH_MAX: Final = 24
"""Levels of a tree; Spark parses and optimizes nested expressions by recursion."""
CONDITIONS_MAX: Final = 400
"""More make one expression that Spark compiles for seconds."""
VERDICTS: Final = ("FALSE", "TRUE", "NULL", "ERROR")
"""What `verdict` says, by the number that the engines use."""
_CLASSES: Final = {"int": JavaClass.INTEGER, "bigint": JavaClass.LONG, "double": JavaClass.DOUBLE}
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
logger = logging.getLogger(__name__)


class Inexpressible(Exception):  # noqa: N818 - no error: Python evaluates it instead
    """Spark SQL cannot say it exactly, for the reason in the text."""


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
    fields = Fields.of(properties, columns)
    parsed = compile_whole(selector) if isinstance(selector, str) else selector
    names = functions.array(*map(functions.lit, VERDICTS))
    try:
        condition = translated(parsed.tree, fields)
    except Inexpressible as reason:
        logger.warning("the selector %r is evaluated by Python: %s", parsed.text, reason)
        code = _by_python(parsed, fields)
        return SparkSelector(parsed.text, code == TRUE, functions.get(names, code), str(reason))
    code = functions.expr(condition.code)
    return SparkSelector(parsed.text, functions.expr(condition.match), functions.get(names, code))


def selector_sql(
    selector: str, properties: str = "properties", *, columns: str | None = None
) -> str:
    """The text of `column` for a query: `select … where <text>`. Raises FilterSyntaxError, and
    ConfigurationError also when Spark SQL cannot say it exactly."""
    try:
        return translated(compile_whole(selector).tree, Fields.of(properties, columns)).match
    except Inexpressible as reason:
        raise ConfigurationError(
            f"Spark SQL cannot say {selector[:80]!r}: {reason}.", fix="Use column() instead."
        ) from None


@dataclass(frozen=True, slots=True)
class Fields:
    """Where properties are found: `texts` are string columns by property name, all others are in
    the map `properties` (an SQL expression; None: there is no map); `typed` are columns of a number
    by name and class, null where the text is no such number."""

    properties: str | None = "properties"
    texts: Mapping[str, str] = field(default_factory=dict)
    typed: Mapping[tuple[str, JavaClass], str] = field(default_factory=dict)

    @classmethod
    def of(cls, properties: str, columns: str | None) -> "Fields":
        """By the text of the source's option `columns`."""
        texts, typed = {}, {}
        has_map = columns == "" or properties != "properties"
        for one in parse_columns(columns) if columns != "" else ():
            name = one.name if _IDENTIFIER.fullmatch(one.name) else quoted(one.name)
            own = one.property_name
            if own is None and one.name in ("tags", "keys"):
                texts[one.name.upper()] = name
            has_map |= own is None and one.name == "properties"
            if own is not None and one.kind == "string":
                texts[own] = name
            elif own is not None and one.kind in _CLASSES:
                typed[own, _CLASSES[one.kind]] = name
        return cls(properties if has_map else None, texts, typed)

    def text(self, name: str) -> str:
        """The property as a Spark string, null when absent. Raises ConfigurationError."""
        if name in self.texts:
            return self.texts[name]
        if self.properties is None:
            raise ConfigurationError(
                f"the selector reads the property {name!r}, and no column has its text.",
                fix=f"Read properties, or prop:{name}, as well.",
            )
        return f"{self.properties}[{string_literal(name)}]"


def _by_python(selector: Selector, fields: Fields) -> SparkColumn:
    """The codes by the scalar engine. Compiled where it runs; equal rows of a batch once."""
    import pyarrow as pa  # noqa: PLC0415 - heavy, and rarely asked for

    text, names = selector.text, sorted(selector.property_names)

    def codes(*columns: pa.Array) -> pa.Array:
        evaluate = compile_sql92(text).evaluate
        known: dict[tuple[str | None, ...], int] = {}
        found = []
        for row in zip(*(one.to_pylist() for one in columns), strict=True):
            if row not in known:
                pairs = zip(names, row, strict=True)
                present = {name: value for name, value in pairs if value is not None}
                known[row] = verdict_of(evaluate, present)
            found.append(known[row])
        return pa.array(found, pa.int32())

    texts = [functions.expr(fields.text(name)) for name in names]
    return functions.arrow_udf(codes, "int")(*texts)


# ---- the text


@dataclass(frozen=True, slots=True)
class Condition:
    """The same condition in three ways; see the module's text."""

    code: str
    match: str
    plain: str | None = None


def translated(tree: Node, fields: Fields) -> Condition:
    """Raises Inexpressible, and ConfigurationError for a property that is nowhere."""
    depth = levels(tree)
    if not property_names(tree):
        return _constant(verdict_of(compile_value(tree), {}))
    if len(depth) > DEPTH_MAX:
        raise Inexpressible(f"it is nested {len(depth)} levels deep (limit {DEPTH_MAX})")
    nodes = [node for level in depth for node in level]
    if sum(not isinstance(node, Property | Literal) for node in nodes) > CONDITIONS_MAX:
        raise Inexpressible(f"it has more than {CONDITIONS_MAX} conditions")
    return _Translator(fields).condition(tree)


def string_literal(text: str) -> str:
    """A Spark string, the same under every setting of its parser (quotes, escapes, `${…}`). Raises
    Inexpressible."""
    if text.isprintable() and not set(text) & set("'\\$"):
        return f"'{text}'"
    try:
        return f"CAST(X'{text.encode().hex()}' AS STRING)"
    except UnicodeEncodeError:
        what = "a string in it has half a character (UTF-16), which Spark has not"
        raise Inexpressible(what) from None


def number_literal(value: float, java: JavaClass) -> str:
    """A Spark number of the Java class."""
    suffix = {JavaClass.INTEGER: "", JavaClass.LONG: "L", JavaClass.DOUBLE: "D"}[java]
    text = f"{value!r}{suffix}"
    return f"({text})" if value < 0 else text


# ---- texts to numbers (filter/evaluate.py has the same rules)

_DIGITS: Final = "".join(
    character
    for character in map(chr, range(0x80, 0x10000))
    if character.isdecimal()  # what Java's Character.digit takes in one UTF-16 unit
)
_ASCII_TWINS: Final = "".join(str(int(digit)) for digit in _DIGITS)
_WHOLE: Final = string_literal("(?s)^[+-]?[0-9]+(?!.)")  # `$` would allow a line end behind it
_FLOAT: Final = string_literal(
    "(?s)^[\x00-\x20]*([+-]?(?:NaN|Infinity|(?:"
    "0[xX](?:[0-9a-fA-F]+[.]?|[0-9a-fA-F]*[.][0-9a-fA-F]+)[pP][+-]?[0-9]+"
    "|(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?))[\x00-\x20]*(?!.)"
)


def as_number(text: str, java: JavaClass) -> str:
    """The number that Java reads, null where it throws (and where the text is null)."""
    if java is JavaClass.DOUBLE:
        return f"try_cast(regexp_extract({text}, {_FLOAT}, 1) AS DOUBLE)"
    kind = "INT" if java is JavaClass.INTEGER else "BIGINT"
    plain, other = (
        f"try_cast(regexp_extract({one}, {_WHOLE}, 0) AS {kind})"
        for one in (text, f"translate({text}, '{_DIGITS}', '{_ASCII_TWINS}')")
    )
    return f"coalesce({plain}, {other})"


def _in_order(one: str, symbol: str, other: str) -> str:
    """Double.compareTo: as Spark orders them, but -0.0, which Spark takes for 0.0, is below it."""
    if symbol in ("<", "<="):
        return _in_order(other, {"<": ">", "<=": ">="}[symbol], one)
    first, second = (f"CAST({number} AS STRING) = '-0.0'" for number in (one, other))
    tie = f"{second} AND NOT {first}" if symbol == ">" else f"NOT ({first} AND NOT {second})"
    return f"({one} > {other} OR ({one} = {other} AND {tie}))"


# ---- conditions

_MIRRORED: Final = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "=": "="}


class _Translator:
    """Translates the nodes of one tree."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def condition(self, node: Node) -> Condition:
        """Raises ConfigurationError for a property that is nowhere."""
        if not property_names(node):
            return _constant(verdict_of(compile_value(node), {}))
        match node:
            case And(parts=parts):
                return _joined("AND", list(map(self.condition, parts)))
            case Or(parts=parts):
                return _joined("OR", list(map(self.condition, parts)))
            case Not(operand=operand):
                return _negated(self.condition(operand))
            case Equal():
                return self._equal(node)
            case Order():
                return self._order(node)
            case Between():
                return self._between(node)
            case _:
                return self._on_text(node)

    def _on_text(self, node: Node) -> Condition:
        match node:
            case In(operand=operand, values=values, negated=negated):
                listed = ", ".join(map(string_literal, values))
                symbol = "NOT IN" if negated else "IN"
                text = self._text(operand)
                return _plain(f"{text} {symbol} ({listed})", text)
            case Match(operator=operator, operand=Property() as operand, search=search):
                if not search:
                    return _constant(FALSE)
                call = f"{operator.lower()}({self._text(operand)}, {string_literal(search)})"
                return _certain(f"coalesce({'NOT ' if node.negated else ''}{call}, FALSE)")
            case IsNull(operand=Property() as operand, negated=negated):
                return _certain(f"{self._text(operand)} IS {'NOT ' if negated else ''}NULL")
            case Truth(operand=Property() as operand):
                return _plain(f"CASE WHEN {self._text(operand)} IS NOT NULL THEN FALSE END")
            case _:
                return self._by_table(node)

    def _text(self, node: Node) -> str:
        """A property or a string literal."""
        if isinstance(node, Property):
            return self._fields.text(node.name)
        assert isinstance(node, Literal)
        assert isinstance(node.value, str)
        return string_literal(node.value)

    def _equal(self, node: Equal) -> Condition:
        classes = {java_class(node.left), java_class(node.right)}
        if classes == {JavaClass.STRING}:
            one, other = self._text(node.left), self._text(node.right)
            # Null on the left is null, unless it is on the right as well; on the right it is FALSE.
            if isinstance(node.right, Literal):
                found = _plain(f"{one} = {other}", one)
            elif isinstance(node.left, Literal):
                found = _certain(f"coalesce({one} = {other}, FALSE)")
            else:
                found = _plain(
                    f"CASE WHEN {one} IS NOT NULL THEN coalesce({one} = {other}, FALSE)"
                    f" WHEN {other} IS NULL THEN TRUE END"
                )
        elif classes & {JavaClass.BOOLEAN, JavaClass.NULL}:
            return self._by_table(node)
        elif isinstance(node.left, Property):
            return self._number_test(node.left, "<>" if node.negated else "=", node.right)
        else:
            assert isinstance(node.right, Property)
            found = self._number_test(node.right, "=", node.left, absent=FALSE)
        return _negated(found) if node.negated else found

    def _order(self, node: Order) -> Condition:
        left, right = node.left, node.right
        if isinstance(left, Property) and constant_of(right) is not None:
            return self._number_test(left, node.operator, right)
        if isinstance(right, Property) and constant_of(left) is not None:
            return self._number_test(right, _MIRRORED[node.operator], left)
        if java_class(left) is java_class(right) is JavaClass.STRING:
            one, other = self._text(left), self._text(right)
            numbers = [as_number(text, JavaClass.DOUBLE) for text in (one, other)]
            test = _in_order(numbers[0], node.operator, numbers[1])
            return _fallible(test, f"{one} IS NULL OR {other} IS NULL", NULL)
        return self._by_table(node)

    def _between(self, node: Between) -> Condition:
        wanted = java_class(node.low)
        low, high = constant_of(node.low), constant_of(node.high)
        same = wanted is java_class(node.high) and isinstance(node.value, Property)
        if not same or low is None or high is None:
            if node.negated:
                parts = Order("<", node.value, node.low), Order(">", node.value, node.high)
                return self.condition(Or(parts))
            parts = Order(">=", node.value, node.low), Order("<=", node.value, node.high)
            return self.condition(And(parts))
        symbol = "NOT BETWEEN" if node.negated else "BETWEEN"
        bounds = f"{number_literal(low, wanted)} AND {number_literal(high, wanted)}"
        assert isinstance(node.value, Property)
        return self._number_tested(node.value.name, wanted, f"{symbol} {bounds}", NULL)

    def _number_test(
        self, subject: Property, symbol: str, bound: Node, absent: int = NULL
    ) -> Condition:
        constant, wanted = constant_of(bound), java_class(bound)
        assert constant is not None
        test = f"{symbol} {number_literal(constant, wanted)}"
        return self._number_tested(subject.name, wanted, test, absent)

    def _number_tested(self, name: str, wanted: JavaClass, test: str, absent: int) -> Condition:
        """A test of a property as a number of a class. A typed column cannot tell an error from an
        absent property, so it serves for the match alone."""
        column = self._fields.typed.get((name, wanted))
        match = None if column is None else f"({column} IS NOT NULL AND {column} {test})"
        try:
            text = self._fields.text(name)
        except ConfigurationError:
            if match is None:
                raise
            return Condition(f"raise_error('the text of {name} is no column')", match)
        found = _fallible(f"{as_number(text, wanted)} {test}", f"{text} IS NULL", absent)
        return found if match is None else Condition(found.code, match)

    def _by_table(self, node: Node) -> Condition:
        """Conditions, and properties beside conditions: few values each, so all are tried."""
        forms: list[_Form] = []
        match node:
            case Equal(left=left, right=right, negated=negated):
                node = Equal(self._stub(left, forms), self._stub(right, forms), negated)
            case Order(operator=operator, left=left, right=right):
                node = Order(operator, self._stub(left, forms), self._stub(right, forms))
            case Match(operand=operand) | IsNull(operand=operand) | Truth(operand=operand):
                node = replace(node, operand=self._stub(operand, forms))
            case _:
                raise Inexpressible(f"{type(node).__name__} stands in an unusual place")
        return _looked_up(node, forms)

    def _stub(self, node: Node, forms: list["_Form"]) -> Node:
        if not property_names(node):
            return node
        if isinstance(node, Negate):
            return Negate(self._stub(node.operand, forms))
        name = f"stub{len(forms)}"
        if isinstance(node, Property):
            text = self._text(node)
            code = f"CASE WHEN {text} IS NULL THEN 2 WHEN lower({text}) = 'true' THEN 1 ELSE 0 END"
            forms.append(_Form(code, {FALSE: "x", TRUE: "true"}))
            return Property(name)
        forms.append(_Form(self.condition(node).code, {FALSE: "0", TRUE: "1", ERROR: "x"}))
        return stub(len(forms) - 1)


@dataclass(frozen=True, slots=True)
class _Form:
    """An operand as a code, and the value that its stub has for each code (none for null)."""

    code: str
    values: Mapping[int, str]


# ---- joins


def _constant(verdict: int) -> Condition:
    plain = {FALSE: "FALSE", TRUE: "TRUE", NULL: "CAST(NULL AS BOOLEAN)", ERROR: None}[verdict]
    return Condition(str(verdict), "TRUE" if verdict == TRUE else "FALSE", plain)


def _plain(text: str, subject: str | None = None) -> Condition:
    """A boolean that cannot fail. `subject`: it is null exactly where this text is; a column says
    so in a form that Spark hands to sources and files."""
    match = f"coalesce({text}, FALSE)"
    if subject is not None and "[" not in subject:
        match = f"({subject} IS NOT NULL AND {text})"
    return Condition(f"coalesce(CAST(({text}) AS INT), 2)", match, f"({text})")


def _certain(text: str) -> Condition:
    """A boolean that is never null."""
    return Condition(f"CAST(({text}) AS INT)", f"({text})", f"({text})")


def _fallible(test: str, is_absent: str, absent: int) -> Condition:
    """A boolean that is null where a property is absent, and where it is no number."""
    code = f"coalesce(CAST(({test}) AS INT), CASE WHEN {is_absent} THEN {absent} ELSE {ERROR} END)"
    return Condition(code, f"coalesce({test}, FALSE)")


def _negated(inner: Condition) -> Condition:
    if inner.plain is not None:
        return _plain(f"NOT {inner.plain}")
    return _looked_up(Not(stub(0)), [_Form(inner.code, _STUB_VALUES)])


_STUB_VALUES: Final = {FALSE: "0", TRUE: "1", ERROR: "x"}


def _joined(word: str, parts: Sequence[Condition]) -> Condition:
    """AND, or OR. An OR is TRUE when one part is and none before it failed: only the last may
    fail, for it to be the OR of the matches."""
    plain: str | None = None
    if all(part.plain is not None for part in parts):
        plain = f"({f' {word} '.join(str(part.plain) for part in parts)})"
        code = _plain(plain).code
    else:
        node: Node = And((stub(0), stub(1))) if word == "AND" else Or((stub(0), stub(1)))
        code = _folded(parts, node)
    match = f"({code} = {TRUE})"
    if word == "AND" or all(part.plain is not None for part in parts[:-1]):
        match = f"({f' {word} '.join(part.match for part in parts)})"
    return Condition(code, match, plain)


def _folded(parts: Sequence[Condition], join: Node) -> str:
    """Halves of halves: joins may be grouped in any way, and a chain is no deep nesting then."""
    if len(parts) == 1:
        return parts[0].code
    middle = len(parts) // 2
    halves = (_folded(parts[:middle], join), _folded(parts[middle:], join))
    return _looked_up(join, [_Form(half, _STUB_VALUES) for half in halves]).code


def _looked_up(node: Node, forms: Sequence[_Form]) -> Condition:
    """The scalar engine's verdict on every combination of operands, as one number."""
    verdicts = _verdicts(node, tuple(tuple(form.values.items()) for form in forms))
    if len(set(verdicts)) == 1:
        return _constant(verdicts[0])
    table = sum(one << 2 * at for at, one in enumerate(verdicts))
    index = " + ".join(f"{2 * 4**at} * {form.code}" for at, form in enumerate(forms))
    code = f"CAST((shiftright({table}L, {index}) & 3L) AS INT)"
    return Condition(code, f"({code} = {TRUE})")


@cache
def _verdicts(node: Node, values: tuple[tuple[tuple[int, str], ...], ...]) -> list[int]:
    """By the operands' codes; the first operand's changes fastest."""
    verdict: Callable[[Mapping[str, str]], bool | None] = compile_value(node)
    by_operand = [dict(one) for one in values]
    found = []
    for codes in product(range(4), repeat=len(values)):
        chosen = zip(codes[::-1], by_operand, strict=True)
        properties = {
            f"stub{at}": known[code] for at, (code, known) in enumerate(chosen) if code in known
        }
        found.append(verdict_of(verdict, properties))
    return found
