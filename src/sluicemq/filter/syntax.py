"""The parser of SQL92 expressions: it turns text into a tree of nodes.

RocketMQ does not require an expression to extend to the end of the text. Its parser stops at the
first token that cannot continue the expression and ignores the rest; of the ignored text, only that
one token has to be lexically valid (spec/filter.md §6). This parser does the same. If no action
exists for a token, it tries the end of the text instead. If there is no action for the end either,
the token is the error. A token that can continue a rule commits the parse: `a = 5 AND` does not
compile.

The parser also rejects what RocketMQ rejects at compile time (spec/filter.md, "Compile-time
rejections"). Each rejection is a `Finding` with the position of the fault and the fix.

lark generates the tables from grammar.lark: the regular expression of the lexer, and the actions of
every state of an LALR parser. That takes 50 ms, once per process, so this module is imported when
the first SQL92 expression is compiled.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from sys import float_info, intern
from typing import Any, NamedTuple, TypeAlias, cast

from lark import Lark
from lark.parsers.lalr_analysis import Reduce

from sluicemq.filter.findings import (
    END,
    Finding,
    Rejected,
    Token,
    explain_name_with_digit,
    lexical_finding,
    parse_finding,
)
from sluicemq.filter.nodes import (
    And,
    BareProperty,
    Between,
    Equal,
    In,
    IsNull,
    Literal,
    Match,
    MatchOperator,
    Negate,
    Node,
    Not,
    Or,
    Order,
    OrderOperator,
    Property,
    is_boolean,
    levels,
)
from sluicemq.numbers import LONG_MAX

FLOAT_MIN = 5e-324
"""The smallest float of an expression: Java's Double.MIN_VALUE, which Java writes as 4.9E-324."""
FLOAT_MAX = float_info.max
"""The largest float of an expression: Java's Double.MAX_VALUE."""
_CONSTANTS = {"TRUE": True, "FALSE": False, "NULL": None}


class TreeBuilder:
    """The actions of the grammar: one method for each name behind an arrow in grammar.lark.

    The parser calls a method with the parts of its rule in order: a `Token` for each terminal, and
    for each other symbol what its own method returned. A method returns the node of its rule, or
    the list of strings of IN. It raises Rejected if RocketMQ refuses the construct at compile time.
    The finding of Rejected marks the wrong operand and says what to write instead.
    """

    def expression(self, node: Node) -> Node:
        """Return a complete expression, which must be a condition."""
        return as_condition(node)

    def disjunction(self, left: Node, token: Token, right: Node) -> Node:
        """Join two conditions by OR. If `left` is a chain of ORs, extend the chain."""
        # A chain is one flat node: the three-valued result is the same, without deep recursion.
        left_conditions = left.parts if isinstance(left, Or) else (as_condition(left),)
        return Or((*left_conditions, as_condition(right)), token.position)

    def conjunction(self, left: Node, token: Token, right: Node) -> Node:
        """Join two conditions by AND. If `left` is a chain of ANDs, extend the chain."""
        left_conditions = left.parts if isinstance(left, And) else (as_condition(left),)
        return And((*left_conditions, as_condition(right)), token.position)

    def equal(self, left: Node, token: Token, right: Node) -> Node:
        """Make the node of a comparison with `=` or `<>`.

        Raises Rejected if an operand is NULL, or if TRUE or FALSE is compared with a constant of
        another type on its right.
        """
        for operand in (left, right):
            if isinstance(operand, Literal) and operand.value is None:
                what = "NULL cannot be compared with = or <>."
                raise _rejected(operand, "equal-null", what, "Write a IS NULL or a IS NOT NULL.")
        if isinstance(left, Literal) and isinstance(right, Literal):
            is_left_boolean = isinstance(left.value, bool)
            is_right_boolean = isinstance(right.value, bool)
            if is_left_boolean and not is_right_boolean:
                what = f"{left.text} cannot be compared with the constant {right.text}."
                fix = "TRUE and FALSE are reserved words: no property can have such a name."
                raise _rejected(left, "boolean-against-constant", what, fix)
        return Equal(left, right, token.kind == "UNEQUAL", token.position)

    def is_null(self, operand: Node, token: Token, *rest: Token) -> Node:
        """Make IS NULL or IS NOT NULL. `rest` is NULL, or NOT and NULL."""
        return IsNull(operand, len(rest) > 1, token.position)

    def order(self, left: Node, token: Token, right: Node) -> Node:
        """Make the node of a comparison with `<`, `<=`, `>` or `>=`.

        Raises Rejected if an operand cannot be a number, such as a string or a condition.
        """
        _check_number(left, token.text)
        _check_number(right, token.text)
        return Order(cast("OrderOperator", token.text), left, right, token.position)

    def match(self, operand: Node, *tokens: Token) -> Node:
        """Make CONTAINS, STARTSWITH or ENDSWITH. The tokens are [NOT,] operator and string."""
        *negation, token, search = tokens
        operator = cast("MatchOperator", token.text.upper())
        return Match(operator, operand, _unquote(search), bool(negation), token.position)

    def between(self, value: Node, token: Token, *rest: Any) -> Node:
        """Make the node of a BETWEEN or NOT BETWEEN.

        `token` is BETWEEN or NOT. The last three items of `rest` are the low bound, AND and the
        high bound.

        Raises Rejected if the value or a bound cannot be a number, such as a string or a condition.
        Also raises it if the high bound of a BETWEEN is below the low bound. RocketMQ compares the
        bounds only if both are literals without a minus sign, and not for NOT BETWEEN
        (spec/filter.md §6).
        """
        low, _, high = rest[-3:]
        negated = token.kind == "NOT"
        operator = "NOT BETWEEN" if negated else "BETWEEN"
        for operand in (value, low, high):
            _check_number(operand, operator)
        if not negated and isinstance(low, Literal) and isinstance(high, Literal):
            _check_order_of_bounds(low, high)
        return Between(value, low, high, negated, token.position)

    def in_list(self, operand: Node, token: Token, *rest: Any) -> Node:
        """Make the node of an IN or NOT IN.

        `token` is IN or NOT. The last two items of `rest` are the list of strings and the closing
        parenthesis. Raises Rejected if the operand is not a property.
        """
        if isinstance(operand, Property):
            return In(operand, tuple(rest[-2]), token.kind == "NOT", token.position)
        what = "IN needs a property on its left."
        fix = "Write a IN ('x', 'y')."
        if isinstance(operand, Not):
            what = "NOT applies to the next word only, and IN needs a property on its left."
            fix = "Write a NOT IN ('x', 'y') or NOT (a IN ('x', 'y'))."
        raise _rejected(operand, "in-operand", what, fix)

    def first_string(self, token: Token) -> list[str]:
        """Begin the list of IN with its first string."""
        return [_unquote(token)]

    def next_string(self, values: list[str], _comma: Token, token: Token) -> list[str]:
        """Append a string to the list of IN."""
        values.append(_unquote(token))
        return values

    def plus(self, _token: Token, operand: Node) -> Node:
        """Return the operand: a plus sign has no effect in RocketMQ."""
        return operand

    def minus(self, token: Token, operand: Node) -> Node:
        """Negate an operand, which need not be a number."""
        return Negate(operand, token.position)

    def negation(self, token: Token, operand: Node) -> Node:
        """Apply NOT to a condition."""
        return Not(as_condition(operand), token.position)

    def parentheses(self, _open: Token, node: Node, _close: Token) -> Node:
        """Return the node between two parentheses: parentheses make no node of their own."""
        return node

    def property_name(self, token: Token) -> Node:
        """Make a property."""
        return Property(token.text, token.position)

    def string(self, token: Token) -> Node:
        """Make a string literal."""
        return Literal(_unquote(token), token.position, token.text)

    def constant(self, token: Token) -> Node:
        """Make the literal TRUE, FALSE or NULL."""
        return Literal(_CONSTANTS[token.kind], token.position, token.text)

    def whole_number(self, token: Token) -> Node:
        """Make a literal of a whole number. Raises Rejected if it does not fit in 64 bits."""
        digits = token.text.rstrip("lL")
        if len(digits) <= len(str(LONG_MAX)) and int(digits) <= LONG_MAX:
            return Literal(int(digits), token.position, token.text)
        what = f"{token.text} does not fit in 64 bits; the largest integer is {LONG_MAX}."
        fix = "Use a smaller number."
        if float(digits) <= FLOAT_MAX:
            fix = f"Use a smaller number, or write it as a float (less precise): {digits}.0."
        raise _rejected(Literal(0, token.position, token.text), "number-too-large", what, fix)

    def float_number(self, token: Token) -> Node:
        """Make a literal of a float.

        Raises Rejected if the float is above FLOAT_MAX or below FLOAT_MIN. RocketMQ refuses 0.0.
        """
        literal = Literal(float(token.text), token.position, token.text)
        if FLOAT_MIN <= float(token.text) <= FLOAT_MAX:
            return literal
        if float(token.text) > FLOAT_MAX:
            what = f"The float {token.text} is too large."
            fix = f"The largest is {FLOAT_MAX}."
            raise _rejected(literal, "float-too-large", what, fix)
        what = f"RocketMQ refuses the float {token.text}: it must be at least 4.9e-324."
        fix = (
            "For whole numbers write 0. For floats write > 0.0 as >= 4.9e-324, "
            ">= 0.0 as > -4.9e-324, < 0.0 as <= -4.9e-324, <= 0.0 as < 4.9e-324."
        )
        raise _rejected(literal, "float-zero", what, fix)


def as_condition(node: Node) -> Node:
    """Return a node as a condition: a condition unchanged, and a property as a `BareProperty`.

    Raises Rejected for any other value, such as a number.
    """
    if is_boolean(node):
        return node
    if isinstance(node, Property):
        return BareProperty(node, node.position)
    what = f"{_get_token_text(node)} is a value, not a condition."
    fix = "Compare it with a property, for example a = 5."
    raise _rejected(node, "not-a-condition", what, fix)


def _unquote(token: Token) -> str:
    """Return the value of a string token: without its quotes, with doubled quotes made single."""
    return token.text[1:-1].replace("''", "'")


def _check_number(node: Node, operator: str) -> None:
    """Raise Rejected if a node cannot be an operand of `operator`, which compares numbers.

    Numbers, properties and operands with a minus sign are accepted. Strings, TRUE, FALSE, NULL and
    conditions are rejected.
    """
    if isinstance(node, Literal) and isinstance(node.value, str):
        what = f"{operator} compares numbers only, and {node.text} is a string."
        fix = "Strings can be compared with =, <>, IN, STARTSWITH, ENDSWITH and CONTAINS."
        with suppress(ValueError):
            float(node.value)  # raises ValueError if the string does not contain a number
            fix = f"Write the number without quotes: {node.value}."
        raise _rejected(node, "order-string", what, fix)
    if isinstance(node, Literal) and is_boolean(node):
        what = (
            f"{operator} compares numbers only, and {node.text} is a constant that is not a number."
        )
        fix = "Write a number, or use = TRUE, = FALSE, IS NULL."
        raise _rejected(node, "order-constant", what, fix)
    if isinstance(node, Not):
        what = f"NOT applies to the next word only, not to the comparison with {operator}."
        fix = "Put the comparison in parentheses: NOT (a > 5)."
        raise _rejected(node, "not-binds-tight", what, fix)
    if is_boolean(node):
        what = f"{operator} compares numbers only, and one side is a condition (TRUE or FALSE)."
        raise _rejected(node, "order-condition", what, "Join conditions: a > 1 AND b > 0.")


def _check_order_of_bounds(low: Literal, high: Literal) -> None:
    """Raise Rejected if the second bound of a BETWEEN is below the first."""
    low_number = cast("float", low.value)
    high_number = cast("float", high.value)
    if float in (type(low_number), type(high_number)):
        # Java widens a Long to a Double and rounds it.
        low_number = float(low_number)
        high_number = float(high_number)
    if high_number < low_number:
        what = f"BETWEEN {low.text} AND {high.text}: the second bound is below the first."
        fix = f"Write BETWEEN {high.text} AND {low.text}."
        raise _rejected(high, "between-order", what, fix)


def _get_token_text(node: Node) -> str:
    """Return the text of the token at which errors about a node are marked; "" if it is unknown."""
    match node:
        case Property(name=name):
            return name
        case Literal(text=text):
            return text
        case Negate():
            return "-"
        case Not():
            return "NOT"
        case _:
            return ""


def _rejected(node: Node, code: str, what: str, fix: str) -> Rejected:
    """Return the exception with a finding about the token of a node.

    The finding gets `code`, its name, such as "float-zero", `what`, the problem, and `fix`. It
    marks the node's token, or one character if the token is empty.
    """
    return Rejected(Finding(node.position, max(1, len(_get_token_text(node))), code, what, fix))


LINE_COMMENT = "LINE_COMMENT"


class Reduction(NamedTuple):
    """An action of the parser: replace the last `size` parts by one part of the rule `origin`.

    `make` is the method of `TreeBuilder` that makes the new part. None means that the only part is
    passed on unchanged.
    """

    size: int
    origin: str
    make: Callable[..., Any] | None


Action: TypeAlias = int | Reduction
"""What the parser does with a token: shift it and go to this state, or reduce first."""


class ParseTables(NamedTuple):
    """The tables of the lexer and of the LALR parser.

    `token` matches one token; the name of the matching group is the terminal. Terminals in
    `ignored` are skipped. `actions[state][terminal]` is the next action of the parser, and
    `gotos[state][rule]` is the state after a reduction to `rule`. `start` and `end` are the first
    state and the state of a complete parse.

    `token_without_line_comment` matches tokens behind the last line end, where no line comment can
    end. With `token`, each -- there would be searched to the end of the text: 64,000 of them took
    a minute.
    """

    token: re.Pattern[str]
    ignored: frozenset[str]
    actions: dict[int, dict[str, Action]]
    gotos: dict[int, dict[str, int]]
    start: int
    end: int
    token_without_line_comment: re.Pattern[str]


@cache
def parse_tables() -> ParseTables:
    """Return the tables of the LALR parser, generated from grammar.lark.

    They are generated once per process, in 50 ms.
    """
    lark = Lark.open_from_package(__package__, "grammar.lark", parser="lalr", lexer="basic")
    # lark gives public access to its tables only through a parser, here one without input.
    lark_table = lark.parse_interactive("").parser_state.parse_conf
    builder = TreeBuilder()
    actions: dict[int, dict[str, Action]] = {}
    gotos: dict[int, dict[str, int]] = {}
    for state, entry_by_symbol in lark_table.states.items():
        actions[state] = {}
        gotos[state] = {}
        for symbol, lark_action in entry_by_symbol.items():
            # The symbols of lark are a subclass of str with a slow __eq__. Look-ups of plain
            # strings are faster.
            name = intern(str(symbol))
            action = _convert_action(builder, *lark_action)
            # Terminals have names in capital letters, rules in small ones.
            if name.isupper():
                actions[state][name] = action
            if isinstance(action, int):
                gotos[state][name] = action
    return ParseTables(
        token=_build_token_pattern(lark),
        ignored=frozenset(map(str, lark.ignore_tokens)),
        actions=actions,
        gotos=gotos,
        start=lark_table.start_state,
        end=lark_table.end_state,
        token_without_line_comment=_build_token_pattern(lark, without=LINE_COMMENT),
    )


def _convert_action(builder: TreeBuilder, lark_action: Any, rule_or_state: Any) -> Action:
    """Return an entry of lark's parse table in our format.

    lark gives the entry as a pair. `lark_action` is Shift or Reduce. `rule_or_state` is the next
    state of a shift, and the rule of a reduction. Return the state as an int, or a Reduction.
    """
    if lark_action is not Reduce:
        return int(rule_or_state)
    rule = rule_or_state
    make = getattr(builder, rule.alias) if rule.alias else None
    return Reduction(len(rule.expansion), intern(str(rule.origin.name)), make)


def _build_token_pattern(lark: Any, without: str = "") -> re.Pattern[str]:
    """Return a regular expression with a named group for each kind of token, by priority.

    The kind `without` is left out.
    """
    terminals = sorted(lark.terminals, key=lambda terminal: -terminal.priority)
    terminals = [terminal for terminal in terminals if terminal.name != without]
    return re.compile(
        "|".join(f"(?P<{each.name}>{each.pattern.to_regexp()})" for each in terminals)
    )


NESTING_MAX = 200
"""The maximum depth of a tree. It keeps recursion in the engines below Python's 1,000 frames."""
LENGTH_MAX = 32_768
"""The maximum characters of an expression. The broker's event loop parses some µs per token."""


class Parsed(NamedTuple):
    """The result of a parse.

    `ignored_start` is the index of the first token that RocketMQ ignores, None if the expression
    extends to the end of the text.
    """

    tree: Node
    ignored_start: int | None


def parse(text: str) -> Parsed:
    """Parse a SQL92 expression. Return its tree and the index from which RocketMQ ignores the text.

    The index is None if RocketMQ reads all of the text.

    Raises Rejected if RocketMQ would not compile the expression, or if it is longer than LENGTH_MAX
    or nested deeper than NESTING_MAX. `Rejected.finding` says where and why.
    """
    if len(text) > LENGTH_MAX:
        what = f"The expression has {len(text)} characters, the limit is {LENGTH_MAX}."
        fix = "Give the messages a property or tag that a shorter expression can select."
        raise Rejected(Finding(LENGTH_MAX, 1, "too-long", what, fix))
    tree, ignored_start = _run_parser(text)
    # Each level needs at least one character, so a short text need not be checked.
    if len(text) > NESTING_MAX and len(levels(tree)) > NESTING_MAX:
        what = f"Conditions are nested deeper than {NESTING_MAX} levels."
        fix = "Reduce the nesting: chains of AND and OR need no parentheses."
        raise Rejected(Finding(0, len(text), "too-deep", what, fix))
    return Parsed(tree, ignored_start)


def _run_parser(text: str) -> tuple[Node, int | None]:
    """Parse an expression, and return its tree and the index of the first token that is ignored.

    The index is None if no token is ignored. Like RocketMQ, the parser ignores the rest of the text
    if the tokens before it are a complete expression.

    This is an LALR parser, whose stack is in two lists. `states` contains the states. `values`
    contains the token or node of each state except the first. Raises Rejected if RocketMQ would not
    compile the expression.
    """
    tables = parse_tables()
    actions = tables.actions
    gotos = tables.gotos
    end_state = tables.end
    states: list[int] = [tables.start]
    values: list[Any] = []
    tokens = _iterate_tokens(text)
    first_ignored: Token | None = None  # the first token that cannot continue the expression
    token = next(tokens)
    while states[-1] != end_state:
        action = actions[states[-1]].get(END if first_ignored else token.kind)
        if action is None:
            if first_ignored or token.kind == END:
                expected = frozenset(actions[states[-1]])
                raise Rejected(parse_finding(text, token, expected, values))
            first_ignored = token  # try the end of the text instead
        elif isinstance(action, int):  # shift: the token becomes the top of the stack
            states.append(action)
            values.append(token)
            token = next(tokens)
        else:  # reduce: one node replaces the parts of a rule at the top of the stack
            size, origin, make = action
            if make:
                try:
                    values[-size:] = [make(*values[-size:])]
                except Rejected as rejected:
                    raise Rejected(explain_name_with_digit(text, rejected.finding)) from None
            del states[-size:]
            states.append(gotos[states[-1]][origin])
    return values[-1], first_ignored.position if first_ignored else None


def _iterate_tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a text, then an endless number of END tokens.

    Raises Rejected at the first character that begins no token.
    """
    tables = parse_tables()
    last_line_start = max(text.rfind("\n"), text.rfind("\r")) + 1
    position = 0
    # The second pattern is used for the last line, where no line comment can end.
    for pattern, stop in (
        (tables.token, last_line_start),
        (tables.token_without_line_comment, len(text)),
    ):
        if position >= stop:
            continue
        for token_match in pattern.finditer(text, position):
            if token_match.start() != position:
                break  # no token begins at `position`
            position = token_match.end()
            if token_match.lastgroup not in tables.ignored:
                yield Token(str(token_match.lastgroup), token_match[0], token_match.start())
            if position >= stop:
                break
    if position < len(text):
        raise Rejected(lexical_finding(text, position))
    while True:
        yield Token(END, "", len(text))
