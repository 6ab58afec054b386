"""SQL92 selectors as Spark columns: the broker's filter on any DataFrame of messages.

    df.where(column("dep_delay > 60 AND origin = 'JFK'"))       rows that the broker would deliver
    df.select(verdict("dep_delay > 60"))                        TRUE, FALSE, NULL or ERROR

The columns have exactly RocketMQ's semantics (spec/filter.md §6, §7). Strings become numbers of the
literal's class as Java reads them. A string that cannot be read is an error and no match. Nulls
have three-valued logic. The column is pure Spark SQL. A few selectors cannot be expressed exactly
in Spark SQL (half a surrogate pair in a string, hundreds of conditions, deep nesting). They are
evaluated in Python, in Arrow batches, with the broker's own evaluator; `compiled(…).python` and a
log line give the reason. design/0018 explains why not all selectors are evaluated like that.

By default, properties are looked up in the columns of the source `rocketmq`, which has TAGS and
KEYS in columns of their own. The argument `columns` is the value of the source's option of that
name. A property that was promoted as a string is taken from its column. So is a number of the same
class as the literal, if only the outcome TRUE matters. UNIQ_KEY, WAIT, MSG_REGION, TRACE_ON and
CLUSTER are in the map only with the source's option `properties=all`. `filters.to_selector` is the
opposite direction: Spark's predicates as SQL92.

A condition of RocketMQ has four outcomes, a boolean of Spark three. The fourth outcome is an error.
A message with an error does not match, whatever the other conditions say, if the failing condition
is reached (spec/filter.md §7). So a condition is translated into up to three Spark expressions, and
an enclosing condition uses the simplest one that is exact:

    nullable_boolean   a Spark boolean that may be null, for conditions that cannot fail: strings,
                       IN, IS NULL …; AND, OR and NOT of these are Spark's
    match              a boolean that is never null: whether the outcome is TRUE. An AND is TRUE if
                       all its parts are, whether others fail or not; so its parts stay separate
                       booleans, which Spark can push down
    verdict_code       an integer: FALSE 0, TRUE 1, null 2, error 3. AND, OR and NOT are look-ups in
                       a table with two bits for each entry, inside one number. Each operand occurs
                       once, and short circuit needs no CASE. The scalar engine computes the tables
                       (as in `filter.plan`)

Strings become numbers as in Java. A regular expression selects what Integer.valueOf, Long.valueOf
or Double.valueOf accepts, and Spark's cast is Java's own parser. Null means an error. All
expressions are built as text, because then one call to the JVM makes the column, whatever its size.
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
from sluicemq.filter.evaluate import compile_node, constant_number
from sluicemq.filter.nodes import (
    And,
    BareProperty,
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
    java_class,
    levels,
    property_names,
)
from sluicemq.filter.plan import ERROR, FALSE, NULL, TRUE, evaluate_verdict, stub_condition
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import compile_complete, compile_sql92
from sluicemq.spark.references import quote_name
from sluicemq.spark.schema import parse_columns

DEPTH_MAX: Final = 24
"""Levels of a tree. Spark parses and optimizes nested expressions by recursion."""
CONDITIONS_MAX: Final = 400
"""Conditions of a tree. Spark would compile a larger expression for seconds."""
VERDICTS: Final = ("FALSE", "TRUE", "NULL", "ERROR")
"""The results of `verdict`; the index of each is its verdict code."""
_CLASSES: Final = {"int": JavaClass.INTEGER, "bigint": JavaClass.LONG, "double": JavaClass.DOUBLE}
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
logger = logging.getLogger(__name__)


class Inexpressible(Exception):  # noqa: N818 - no error: Python evaluates the selector instead
    """Spark SQL cannot express the selector exactly; the text is the reason."""


@dataclass(frozen=True, slots=True)
class SparkSelector:
    """A selector as Spark columns.

    `text` is the selector's SQL92 text. `match` is a boolean column that is never null. `verdict`
    is a string column with one of `VERDICTS`. `python` is None if Spark SQL evaluates the selector;
    otherwise it is the reason why Python workers do.
    """

    text: str
    match: SparkColumn
    verdict: SparkColumn
    python: str | None = None


def column(
    selector: str, properties: str = "properties", *, columns: str | None = None
) -> SparkColumn:
    """Return a boolean column that is true for the rows that a broker would deliver.

    The column is false for all other rows, and never null. `properties` is the map of properties: a
    column name, or any SQL expression. `columns` is the value of the source's option `columns`:
    None means its default schema, and "" means that there is only the map. Raises FilterSyntaxError
    if the selector does not compile, and ConfigurationError if no column contains one of its
    properties.
    """
    return compiled(selector, properties, columns=columns).match


def verdict(
    selector: str, properties: str = "properties", *, columns: str | None = None
) -> SparkColumn:
    """Return a string column `verdict` with TRUE, FALSE, NULL or ERROR for each row.

    Arguments and errors are the same as for `column`.
    """
    return compiled(selector, properties, columns=columns).verdict.alias("verdict")


def compiled(
    selector: str | Selector, properties: str = "properties", *, columns: str | None = None
) -> SparkSelector:
    """Return a selector as Spark columns: whether each row matches, and its verdict.

    The columns are computed by Spark SQL. If it cannot express the selector, Python workers compute
    them. The result then has the reason, which is logged too. The arguments and errors are the same
    as for `column`. An expression with which a consumer has subscribed is passed as a `Selector`,
    because a string with text that RocketMQ ignores is an error here.
    """
    fields = PropertyExpressions.from_columns_option(properties, columns)
    parsed = compile_complete(selector) if isinstance(selector, str) else selector
    names = functions.array(*map(functions.lit, VERDICTS))
    try:
        condition = translate(parsed.tree, fields)
    except Inexpressible as reason:
        logger.warning("the selector %r is evaluated by Python: %s", parsed.text, reason)
        code = _evaluate_in_python(parsed, fields)
        return SparkSelector(parsed.text, code == TRUE, functions.get(names, code), str(reason))
    code = functions.expr(condition.verdict_code)
    return SparkSelector(parsed.text, functions.expr(condition.match), functions.get(names, code))


def selector_sql(
    selector: str, properties: str = "properties", *, columns: str | None = None
) -> str:
    """Return a selector as a Spark SQL expression, for a query `select … where <text>`.

    `properties` and `columns` have the meaning that they have for `column`. Raises
    FilterSyntaxError if the selector does not compile. Raises ConfigurationError if no column
    contains a property, or if Spark SQL cannot express the selector exactly.
    """
    fields = PropertyExpressions.from_columns_option(properties, columns)
    try:
        return translate(compile_complete(selector).tree, fields).match
    except Inexpressible as reason:
        raise ConfigurationError(
            f"Spark SQL cannot express {selector[:80]!r}: {reason}.", fix="Use column() instead."
        ) from None


@dataclass(frozen=True, slots=True)
class PropertyExpressions:
    """The Spark SQL expressions for the properties of a message.

    `text_columns` are string columns, by property name. All other properties are elements of
    `map_expression`, an SQL expression for the map; None means that the map is not read.
    `number_columns` are promoted number columns by property name and Java class; they are null if
    the property is not such a number.
    """

    map_expression: str | None = "properties"
    text_columns: Mapping[str, str] = field(default_factory=dict)
    number_columns: Mapping[tuple[str, JavaClass], str] = field(default_factory=dict)

    @classmethod
    def from_columns_option(cls, properties: str, columns: str | None) -> "PropertyExpressions":
        """Return the Spark expressions for properties, from the arguments of `column`.

        `properties` is the column with the map of all properties. `columns` is the option of the
        source that lists its columns, some of which contain one property each. "" means that no
        property has a column of its own.

        The map is used if the option lists the column `properties`, if `columns` is "", or if
        `properties` is not the name "properties".
        """
        if columns == "":
            return cls(properties)
        text_columns = {}
        number_columns = {}
        has_map = properties != "properties"
        for column in parse_columns(columns):
            is_identifier = _IDENTIFIER.fullmatch(column.name) is not None
            expression = column.name if is_identifier else quote_name(column.name)
            property_name = column.property_name
            if property_name is None:
                if column.name in ("tags", "keys"):
                    text_columns[column.name.upper()] = expression
                elif column.name == "properties":
                    has_map = True
            elif column.type_name == "string":
                text_columns[property_name] = expression
            elif column.type_name in _CLASSES:
                number_columns[property_name, _CLASSES[column.type_name]] = expression
        return cls(properties if has_map else None, text_columns, number_columns)

    def text_expression(self, name: str) -> str:
        """Return the Spark expression of a property as a string. It is null in rows without it.

        Raises ConfigurationError if no column contains the property.
        """
        if name in self.text_columns:
            return self.text_columns[name]
        if self.map_expression is None:
            raise ConfigurationError(
                f"the selector uses the property {name!r}, and no column contains its text.",
                fix=f"Read properties, or prop:{name}, as well.",
            )
        return f"{self.map_expression}[{string_literal(name)}]"


def _evaluate_in_python(selector: Selector, fields: PropertyExpressions) -> SparkColumn:
    """Return a column of verdict codes that Python workers compute.

    The selector is compiled in the worker, once for each batch. Equal rows of a batch are evaluated
    only once.
    """
    import pyarrow as pa  # noqa: PLC0415 - heavy, and rarely needed

    # Strings instead of the selector, because the function is pickled for the workers.
    expression = selector.text
    names = sorted(selector.property_names)

    def evaluate_batch(*columns: pa.Array) -> pa.Array:
        """Return the verdict code of each row: 0 FALSE, 1 TRUE, 2 null, 3 error.

        Each column is a property, in the order of `names`. A null in a column means that the
        message does not have the property.
        """
        evaluate = compile_sql92(expression).evaluate
        code_by_row: dict[tuple[str | None, ...], int] = {}
        codes = []
        for row in zip(*(column.to_pylist() for column in columns), strict=True):
            if row not in code_by_row:
                properties = dict(zip(names, row, strict=True))
                present = {name: text for name, text in properties.items() if text is not None}
                code_by_row[row] = evaluate_verdict(evaluate, present)
            codes.append(code_by_row[row])
        return pa.array(codes, pa.int32())

    property_columns = [functions.expr(fields.text_expression(name)) for name in names]
    return functions.arrow_udf(evaluate_batch, "int")(*property_columns)


# ---- translation


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition as Spark SQL text in up to three forms, which the module's docstring explains.

    `nullable_boolean` is None if the condition can fail: then no Spark boolean has all its
    outcomes.
    """

    verdict_code: str
    match: str
    nullable_boolean: str | None = None


def translate(tree: Node, fields: PropertyExpressions) -> Condition:
    """Return the Spark condition for the tree of a selector.

    Raises Inexpressible if the tree is too deep, has too many conditions, or contains something
    that Spark SQL cannot express. Raises ConfigurationError if no column contains a property.
    """
    nodes_by_level = levels(tree)
    if not property_names(tree):
        return _constant_condition(evaluate_verdict(compile_node(tree), {}))
    if len(nodes_by_level) > DEPTH_MAX:
        raise Inexpressible(f"it is nested {len(nodes_by_level)} levels deep (limit {DEPTH_MAX})")
    condition_count = 0
    for nodes in nodes_by_level:
        condition_count += sum(not isinstance(node, Property | Literal) for node in nodes)
    if condition_count > CONDITIONS_MAX:
        raise Inexpressible(f"it has more than {CONDITIONS_MAX} conditions")
    return _Translator(fields).translate(tree)


def string_literal(string: str) -> str:
    """Return a Spark string literal that does not depend on settings of Spark's parser.

    These settings change the meaning of quotes, escapes and `${…}`. Raises Inexpressible for a
    string with half a surrogate pair.
    """
    if string.isprintable() and not set(string) & set("'\\$"):
        return f"'{string}'"
    try:
        return f"CAST(X'{string.encode().hex()}' AS STRING)"
    except UnicodeEncodeError:
        reason = "a string in it contains half a surrogate pair, which a Spark string cannot"
        raise Inexpressible(reason) from None


def number_literal(number: float, java: JavaClass) -> str:
    """Return a Spark literal for a number of the Java class, such as `60`, `60L` or `(-1.5D)`."""
    suffix = {JavaClass.INTEGER: "", JavaClass.LONG: "L", JavaClass.DOUBLE: "D"}[java]
    literal = f"{number!r}{suffix}"
    return f"({literal})" if number < 0 else literal


# ---- strings as numbers (filter/evaluate.py has the same rules)

_UNICODE_DIGITS: Final = "".join(
    character for character in map(chr, range(0x80, 0x10000)) if character.isdecimal()
)
"""Digits other than 0-9 that Java's Character.digit accepts in one UTF-16 unit."""
_ASCII_DIGITS: Final = "".join(str(int(digit)) for digit in _UNICODE_DIGITS)
"""The ASCII digit for each of `_UNICODE_DIGITS`."""
_INTEGER: Final = string_literal("(?s)^[+-]?[0-9]+(?!.)")  # `$` would allow a newline at the end
_DOUBLE: Final = string_literal(
    "(?s)^[\x00-\x20]*([+-]?(?:NaN|Infinity|(?:"
    "0[xX](?:[0-9a-fA-F]+[.]?|[0-9a-fA-F]*[.][0-9a-fA-F]+)[pP][+-]?[0-9]+"
    "|(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?))[\x00-\x20]*(?!.)"
)


def number_expression(string_expression: str, java: JavaClass) -> str:
    """Return the Spark expression that converts a string to a number as Java does.

    `string_expression` is a Spark expression of type string. The result is null if Java would throw
    an exception, and if the string is null.
    """
    if java is JavaClass.DOUBLE:
        return f"try_cast(regexp_extract({string_expression}, {_DOUBLE}, 1) AS DOUBLE)"
    spark_type = "INT" if java is JavaClass.INTEGER else "BIGINT"
    ascii_expression = f"translate({string_expression}, '{_UNICODE_DIGITS}', '{_ASCII_DIGITS}')"
    plain = f"try_cast(regexp_extract({string_expression}, {_INTEGER}, 0) AS {spark_type})"
    translated = f"try_cast(regexp_extract({ascii_expression}, {_INTEGER}, 0) AS {spark_type})"
    return f"coalesce({plain}, {translated})"


def _compare_doubles(left: str, operator: str, right: str) -> str:
    """Return the Spark expression that compares two doubles in the order of Java.

    That is the order of Double.compareTo. It differs from Spark's in one case: -0.0 is less than
    0.0. `left` and `right` are expressions of doubles. The result is null if one of them is null.
    """
    if operator in ("<", "<="):
        return _compare_doubles(right, _SWAPPED_OPERATORS[operator], left)
    left_is_negative_zero = f"CAST({left} AS STRING) = '-0.0'"
    right_is_negative_zero = f"CAST({right} AS STRING) = '-0.0'"
    if operator == ">":
        tie = f"{right_is_negative_zero} AND NOT {left_is_negative_zero}"
    else:
        tie = f"NOT ({left_is_negative_zero} AND NOT {right_is_negative_zero})"
    return f"({left} > {right} OR ({left} = {right} AND {tie}))"


# ---- conditions

_SWAPPED_OPERATORS: Final = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "=": "="}


class _Translator:
    """Translates the nodes of one tree into conditions.

    `fields` are the expressions for the properties. Every method may raise Inexpressible if Spark
    SQL cannot express a node, and ConfigurationError if no column contains a property.
    """

    def __init__(self, fields: PropertyExpressions) -> None:
        self._fields = fields

    def translate(self, node: Node) -> Condition:
        """Return the Spark expressions for a node: whether a row matches, and its verdict code.

        The verdict codes are 0 for FALSE, 1 for TRUE, 2 for null and 3 for an error. A node without
        properties has the same verdict in every row, so its expressions are constants.
        """
        if not property_names(node):
            return _constant_condition(evaluate_verdict(compile_node(node), {}))
        match node:
            case And(parts=parts):
                return _join_conditions("AND", [self.translate(part) for part in parts])
            case Or(parts=parts):
                return _join_conditions("OR", [self.translate(part) for part in parts])
            case Not(operand=operand):
                return _negate(self.translate(operand))
            case Equal():
                return self._translate_equal(node)
            case Order():
                return self._translate_order(node)
            case Between():
                return self._translate_between(node)
            case _:
                return self._translate_string_condition(node)

    def _translate_string_condition(self, node: Node) -> Condition:
        """Return the condition for IN, IS NULL, CONTAINS, STARTSWITH, ENDSWITH or a property alone.

        If its operand is not a property, and for every other class of node, the verdict is looked
        up in a table of all possible operands.
        """
        match node:
            case In(operand=operand, values=values, negated=negated):
                literals = ", ".join(map(string_literal, values))
                operator = "NOT IN" if negated else "IN"
                subject = self._string_expression(operand)
                return _nullable_condition(f"{subject} {operator} ({literals})", subject)
            case Match(operand=Property()):
                return self._translate_match(node)
            case IsNull(operand=Property() as operand, negated=negated):
                operator = "IS NOT NULL" if negated else "IS NULL"
                return _non_null_condition(f"{self._string_expression(operand)} {operator}")
            case BareProperty(operand=Property() as operand):
                subject = self._string_expression(operand)
                return _nullable_condition(f"CASE WHEN {subject} IS NOT NULL THEN FALSE END")
            case _:
                return self._translate_by_table(node)

    def _translate_match(self, node: Match) -> Condition:
        """Return the condition for CONTAINS, STARTSWITH or ENDSWITH, with or without NOT.

        If the searched string is empty, the condition is FALSE, also with NOT.
        """
        if not node.search:
            return _constant_condition(FALSE)
        function = node.operator.lower()
        subject = self._string_expression(node.operand)
        negation = "NOT " if node.negated else ""
        call = f"{function}({subject}, {string_literal(node.search)})"
        return _non_null_condition(f"coalesce({negation}{call}, FALSE)")

    def _string_expression(self, node: Node) -> str:
        """Return the Spark expression for a property or a string literal.

        A property is null in rows without it. Raises AssertionError for any other node.
        """
        if isinstance(node, Property):
            return self._fields.text_expression(node.name)
        assert isinstance(node, Literal)
        assert isinstance(node.value, str)
        return string_literal(node.value)

    def _translate_equal(self, node: Equal) -> Condition:
        """Return the condition for = or <>.

        Two strings are compared as strings. A property and a number are compared as numbers. For
        TRUE, FALSE, NULL and other conditions as operands, the verdict is looked up in a table.
        """
        classes = {java_class(node.left), java_class(node.right)}
        if classes == {JavaClass.STRING}:
            condition = self._compare_strings(node)
        elif classes & {JavaClass.BOOLEAN, JavaClass.NULL}:
            return self._translate_by_table(node)
        elif isinstance(node.left, Property):
            return self._compare_number(node.left, "<>" if node.negated else "=", node.right)
        else:
            assert isinstance(node.right, Property)
            condition = self._compare_number(node.right, "=", node.left, absent_verdict_code=FALSE)
        return _negate(condition) if node.negated else condition

    def _compare_strings(self, node: Equal) -> Condition:
        """Return the condition that two strings are equal, even if `node` is negated.

        As in RocketMQ, it is TRUE if both sides are null, null if only the left side is null, and
        FALSE if only the right side is null.
        """
        left_string = self._string_expression(node.left)
        right_string = self._string_expression(node.right)
        is_equal = f"{left_string} = {right_string}"
        if isinstance(node.right, Literal):
            return _nullable_condition(is_equal, left_string)
        if isinstance(node.left, Literal):
            return _non_null_condition(f"coalesce({is_equal}, FALSE)")
        return _nullable_condition(
            f"CASE WHEN {left_string} IS NOT NULL THEN coalesce({is_equal}, FALSE)"
            f" WHEN {right_string} IS NULL THEN TRUE END"
        )

    def _translate_order(self, node: Order) -> Condition:
        """Return the condition for <, <=, > or >=.

        A property and a constant number are compared in the class of the number, and two strings as
        doubles. For all other operands, the verdict is looked up in a table.
        """
        left = node.left
        right = node.right
        if isinstance(left, Property) and constant_number(right) is not None:
            return self._compare_number(left, node.operator, right)
        if isinstance(right, Property) and constant_number(left) is not None:
            return self._compare_number(right, _SWAPPED_OPERATORS[node.operator], left)
        if java_class(left) is java_class(right) is JavaClass.STRING:
            left_string = self._string_expression(left)
            right_string = self._string_expression(right)
            left_double = number_expression(left_string, JavaClass.DOUBLE)
            right_double = number_expression(right_string, JavaClass.DOUBLE)
            test = _compare_doubles(left_double, node.operator, right_double)
            is_absent = f"{left_string} IS NULL OR {right_string} IS NULL"
            return _fallible_condition(test, is_absent, NULL)
        return self._translate_by_table(node)

    def _translate_between(self, node: Between) -> Condition:
        """Return the condition for BETWEEN or NOT BETWEEN.

        A property between two constants of one number class becomes Spark's BETWEEN. In all other
        cases the condition is translated as two comparisons, joined by AND, or by OR for NOT
        BETWEEN.
        """
        number_class = java_class(node.low)
        low = constant_number(node.low)
        high = constant_number(node.high)
        is_simple = number_class is java_class(node.high) and isinstance(node.value, Property)
        if not is_simple or low is None or high is None:
            return self.translate(_split_between(node))
        operator = "NOT BETWEEN" if node.negated else "BETWEEN"
        bounds = f"{number_literal(low, number_class)} AND {number_literal(high, number_class)}"
        assert isinstance(node.value, Property)
        return self._test_number(node.value.name, number_class, f"{operator} {bounds}", NULL)

    def _compare_number(
        self, subject: Property, operator: str, bound: Node, absent_verdict_code: int = NULL
    ) -> Condition:
        """Return the condition that compares the property `subject` with the number `bound`.

        `operator` is Spark's operator, with the property on its left. `absent_verdict_code` is the
        verdict code of a message without the property.
        """
        constant = constant_number(bound)
        number_class = java_class(bound)
        assert constant is not None
        test = f"{operator} {number_literal(constant, number_class)}"
        return self._test_number(subject.name, number_class, test, absent_verdict_code)

    def _test_number(
        self, name: str, number_class: JavaClass, test: str, absent_verdict_code: int
    ) -> Condition:
        """Return the condition that applies `test` to the property `name`, read as a number.

        `number_class` is the Java class to which the string is converted. `test` is an operator
        with its right operand, such as `> 60`. `absent_verdict_code` is the verdict code of a
        message without the property.

        If the number has a column of its own, this column decides whether a row matches. The
        verdict needs the text of the property, because the column is null both for an absent
        property and for one that is not a number. If no column contains the text, the expression of
        the verdict raises an error when Spark evaluates it. Raises ConfigurationError if neither
        the number nor the text is in a column.
        """
        number_column = self._fields.number_columns.get((name, number_class))
        match = None
        if number_column is not None:
            match = f"({number_column} IS NOT NULL AND {number_column} {test})"
        try:
            string = self._fields.text_expression(name)
        except ConfigurationError:
            if match is None:
                raise
            return Condition(f"raise_error('the text of {name} is in no column')", match)
        number_test = f"{number_expression(string, number_class)} {test}"
        condition = _fallible_condition(number_test, f"{string} IS NULL", absent_verdict_code)
        return condition if match is None else Condition(condition.verdict_code, match)

    def _translate_by_table(self, node: Node) -> Condition:
        """Return the condition for a node with a condition as an operand, such as `(a = 1) = b`.

        Each operand has at most four possible values: true, false, null or an error. So the verdict
        of the node is computed in advance for all combinations of values, and the Spark expression
        looks it up in this table. TRUE, FALSE and NULL count as conditions. Raises Inexpressible
        for a node that is not Equal, Order, Match, IsNull or BareProperty.
        """
        operands: list[_TableOperand] = []
        match node:
            case Equal(left=left, right=right, negated=negated):
                node = Equal(self._to_stub(left, operands), self._to_stub(right, operands), negated)
            case Order(operator=operator, left=left, right=right):
                node = Order(
                    operator, self._to_stub(left, operands), self._to_stub(right, operands)
                )
            case Match(operand=operand) | IsNull(operand=operand) | BareProperty(operand=operand):
                node = replace(node, operand=self._to_stub(operand, operands))
            case _:
                raise Inexpressible(f"{type(node).__name__} occurs in an unusual place")
        return _lookup_condition(node, operands)

    def _to_stub(self, node: Node, operands: list["_TableOperand"]) -> Node:
        """Return the node that represents an operand while the table is computed.

        It is a stub, a property named `stub0`, `stub1` and so on, or a condition about a stub. The
        operand itself is appended to `operands`, and its index there is the number of the stub. An
        operand without properties is a constant. It is returned unchanged, and nothing is appended.
        Under a minus only the inner operand is replaced.
        """
        if not property_names(node):
            return node
        if isinstance(node, Negate):
            return Negate(self._to_stub(node.operand, operands))
        name = f"stub{len(operands)}"
        if isinstance(node, Property):
            string = self._string_expression(node)
            # A property beside a condition is read by Boolean.valueOf, so it has three values.
            code = (
                f"CASE WHEN {string} IS NULL THEN 2 WHEN lower({string}) = 'true' THEN 1 ELSE 0 END"
            )
            operands.append(_TableOperand(code, {FALSE: "x", TRUE: "true"}))
            return Property(name)
        operands.append(_TableOperand(self.translate(node).verdict_code, _STUB_VALUES))
        return stub_condition(len(operands) - 1)


def _split_between(node: Between) -> Node:
    """Return the two comparisons that a BETWEEN stands for, joined by AND.

    For NOT BETWEEN, they are the negated comparisons, joined by OR.
    """
    if node.negated:
        is_below = Order("<", node.value, node.low)
        is_above = Order(">", node.value, node.high)
        return Or((is_below, is_above))
    is_not_below = Order(">=", node.value, node.low)
    is_not_above = Order("<=", node.value, node.high)
    return And((is_not_below, is_not_above))


@dataclass(frozen=True, slots=True)
class _TableOperand:
    """An operand of a look-up in a table.

    `code` is the SQL expression whose value, 0 to 3, is the verdict code of the operand in a row.
    `stub_values` is the value that the stub property has for each code while the table is filled.
    For a code that is not in it, the stub property is absent.
    """

    code: str
    stub_values: Mapping[int, str]


_STUB_VALUES: Final = {FALSE: "0", TRUE: "1", ERROR: "x"}
"""The stub values for the verdict codes of a condition."""


# ---- building conditions


def _constant_condition(code: int) -> Condition:
    """Return the condition of a constant verdict code. An error has no `nullable_boolean`."""
    boolean = {FALSE: "FALSE", TRUE: "TRUE", NULL: "CAST(NULL AS BOOLEAN)", ERROR: None}[code]
    return Condition(str(code), "TRUE" if code == TRUE else "FALSE", boolean)


def _nullable_condition(boolean: str, subject: str | None = None) -> Condition:
    """Return the condition for a boolean Spark expression that may be null but never fails.

    `subject` is an expression that is null in exactly those rows in which the boolean is null. If
    it is a plain column, a row matches if `subject IS NOT NULL AND boolean`. Spark can push this
    form down to sources and files. In all other cases, a row matches if `coalesce(boolean, FALSE)`.
    """
    match = f"coalesce({boolean}, FALSE)"
    if subject is not None and "[" not in subject:  # not an element of the map of properties
        match = f"({subject} IS NOT NULL AND {boolean})"
    verdict_code = f"coalesce(CAST(({boolean}) AS INT), 2)"  # 0, 1, or 2 for null
    return Condition(verdict_code, match, f"({boolean})")


def _non_null_condition(boolean: str) -> Condition:
    """Return the condition for a boolean expression that is never null and cannot fail."""
    return Condition(f"CAST(({boolean}) AS INT)", f"({boolean})", f"({boolean})")


def _fallible_condition(test: str, is_absent: str, absent_verdict_code: int) -> Condition:
    """Return the condition for a test on numbers, which fails for a string that is not a number.

    `test` is a boolean expression that is null in two cases: the string is not a number, or the
    property is absent. `is_absent` is a boolean expression that is true in the second case only.
    `absent_verdict_code` is the verdict code in that case; it is ERROR in the first.
    """
    if_null = f"CASE WHEN {is_absent} THEN {absent_verdict_code} ELSE {ERROR} END"
    code = f"coalesce(CAST(({test}) AS INT), {if_null})"
    return Condition(code, f"coalesce({test}, FALSE)")


def _negate(inner: Condition) -> Condition:
    """Return NOT of a condition.

    A condition that cannot fail is negated by Spark. Otherwise the verdict is looked up in a table,
    because NOT of an error is an error.
    """
    if inner.nullable_boolean is not None:
        return _nullable_condition(f"NOT {inner.nullable_boolean}")
    return _lookup_condition(
        Not(stub_condition(0)), [_TableOperand(inner.verdict_code, _STUB_VALUES)]
    )


def _join_conditions(operator: str, conditions: Sequence[Condition]) -> Condition:
    """Return AND or OR of conditions. `operator` is "AND" or "OR".

    If no condition can fail with an error, they are joined by Spark's AND or OR. Otherwise the
    verdict is looked up in tables, because Spark's AND and OR do not know a verdict for errors.
    """
    infix = f" {operator} "
    booleans = [
        condition.nullable_boolean
        for condition in conditions
        if condition.nullable_boolean is not None
    ]
    can_fail = len(booleans) < len(conditions)
    if can_fail:
        boolean = None
        stubs = (stub_condition(0), stub_condition(1))
        join: Node = And(stubs) if operator == "AND" else Or(stubs)
        code = _fold_codes(conditions, join)
    else:
        boolean = f"({infix.join(booleans)})"
        code = _nullable_condition(boolean).verdict_code

    # An OR is TRUE if a condition is TRUE and no condition before it fails. So it is the OR of
    # their matches only if no condition but the last can fail.
    can_fail_early = any(condition.nullable_boolean is None for condition in conditions[:-1])
    if operator == "OR" and can_fail_early:
        match = f"({code} = {TRUE})"
    else:
        match = f"({infix.join(condition.match for condition in conditions)})"
    return Condition(code, match, boolean)


def _fold_codes(conditions: Sequence[Condition], join: Node) -> str:
    """Return the Spark expression for the verdict code of `conditions`, joined by AND or OR.

    The verdict codes are 0 for FALSE, 1 for TRUE, 2 for null and 3 for an error. `join` is the AND
    or OR of `stub_condition(0)` and `stub_condition(1)`. Each half of `conditions` is joined first,
    and then the two results, so that a long chain does not become a deep expression.
    """
    if len(conditions) == 1:
        return conditions[0].verdict_code
    middle = len(conditions) // 2
    halves = (_fold_codes(conditions[:middle], join), _fold_codes(conditions[middle:], join))
    operands = [_TableOperand(half, _STUB_VALUES) for half in halves]
    return _lookup_condition(join, operands).verdict_code


def _lookup_condition(node: Node, operands: Sequence[_TableOperand]) -> Condition:
    """Return a condition whose verdict Spark looks up in a table.

    `node` contains one stub for each of `operands`. A stub is a placeholder that can have any
    verdict. The verdict of `node` is computed for each combination of the operands' verdict codes,
    0 to 3. The table is one large integer with two bits for each combination. If all verdicts are
    the same, the result is a constant.
    """
    # Tuples instead of mappings, because the arguments of a cached function must be hashable.
    stub_values = tuple(tuple(operand.stub_values.items()) for operand in operands)
    codes = _evaluate_combinations(node, stub_values)
    if len(set(codes)) == 1:
        return _constant_condition(codes[0])
    table = 0
    for index, code in enumerate(codes):
        table |= code << 2 * index
    # The number of bits by which the table is shifted right: twice the index of the combination.
    summands = [f"{2 * 4**index} * {operand.code}" for index, operand in enumerate(operands)]
    lookup = f"CAST((shiftright({table}L, {' + '.join(summands)}) & 3L) AS INT)"
    return Condition(lookup, f"({lookup} = {TRUE})")


@cache
def _evaluate_combinations(
    node: Node, stub_values: tuple[tuple[tuple[int, str], ...], ...]
) -> list[int]:
    """Return the verdict code of `node` for every combination of its operands' codes, 0 to 3.

    `stub_values` has, for each operand, the pairs (code, value of the stub property). A code
    without a pair means that the property is absent. The result has 4 ** len(stub_values) items.
    The code of the first operand changes fastest: item 0 is for the codes (0, 0), item 1 for (1,
    0), item 4 for (0, 1).
    """
    evaluate: Callable[[Mapping[str, str]], bool | None] = compile_node(node)
    values_by_code = [dict(pairs) for pairs in stub_values]
    verdict_codes = []
    for reversed_codes in product(range(4), repeat=len(stub_values)):
        # `product` changes its last item fastest, the table its first.
        codes = reversed_codes[::-1]
        properties = {}
        for index, code in enumerate(codes):
            if code in values_by_code[index]:
                properties[f"stub{index}"] = values_by_code[index][code]
        verdict_codes.append(evaluate_verdict(evaluate, properties))
    return verdict_codes
