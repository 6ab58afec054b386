"""Checks of an expression before a consumer starts: errors that refuse it, and warnings.

An expression with an error does not compile (spec/filter.md §6). An expression with a warning
compiles in RocketMQ, but does something other than it seems to: NOT applies to one word only, and
a bare property is never true. Text after a complete expression is ignored by RocketMQ; SluiceMQ
refuses it where an expression is written for SluiceMQ (`subscriptions.compile_complete`).

Some warnings need the whole expression. A property is a string, and the literal that it is compared
with decides how it is converted: by Integer.valueOf, above 2,147,483,647 by Long.valueOf, and for a
float by Double.valueOf. A value that cannot be converted ends the evaluation, even if another
comparison would accept the message (§7).

The check replaces typographic look-alikes by plain characters and continues, so that one run
reports all of them and also the faults behind them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from sluicemq.filter.evaluate import TRY_PARSE_NUMBER, constant_number, try_parse_double
from sluicemq.filter.findings import (
    LOOK_ALIKE_CODE,
    LOOK_ALIKES,
    Finding,
    Rejected,
    Severity,
    ignored_text_warning,
    syntax_error,
)
from sluicemq.filter.nodes import (
    INTEGER_MAX,
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
    is_boolean,
    java_class,
    render,
    walk,
)
from sluicemq.filter.subscriptions import (
    SEPARATOR,
    compile_complete,
    is_tag_kind,
    parse_tags,
    unknown_kind_error,
)
from sluicemq.model.subscription import ALL, SQL92, Subscription


class PropertyUse(NamedTuple):
    """A comparison of a property.

    `name` is the property, `node` the comparison, and `read_as` the Java class to which the
    property is converted. `text` and `position` describe the operand that the property is compared
    with, and `text` is the operator with its string for CONTAINS, STARTSWITH and ENDSWITH.
    """

    name: str
    read_as: JavaClass
    node: Node
    text: str
    position: int

    @property
    def length(self) -> int:
        """The number of characters to mark in the expression, at least 1."""
        return max(1, len(self.text))


class TypeNote(NamedTuple):
    """How one property is read, and which of its values are errors.

    `name` is the property, `read_as` the Java class ("Integer"), `because` the comparison that
    decides this. `accepts` describes the values that can be converted. `errors` lists examples of
    values that are errors, and `instead` says what to write to accept fractions; both may be "".
    The fields are the keys of the JSON output of `sluice filter check`.
    """

    name: str
    read_as: str
    because: str
    accepts: str
    errors: str
    instead: str


# RocketMQ refuses 0.0 (spec/filter.md §6), so the neighbouring floats replace it.
_ZERO = (
    "There is no 0.0: write > 0 as >= 4.9e-324, >= 0 as > -4.9e-324, "
    "< 0 as <= -4.9e-324, <= 0 as < 4.9e-324."
)
# For each class, the values that can be converted, and examples of values that are errors.
_NOTES: dict[JavaClass, tuple[str, str]] = {
    JavaClass.INTEGER: (
        "whole numbers from -2147483648 to 2147483647",
        "'30.5', '1e3', '3000000000', ' 5' and text",
    ),
    JavaClass.LONG: (
        "whole numbers of 64 bits",
        "'30.5', '1e3', ' 5' and text",
    ),
    JavaClass.DOUBLE: ("any number: '5', '-0.5', '1e3'", "text"),
    JavaClass.BOOLEAN: ("'true' in any case is TRUE, everything else FALSE", ""),
    JavaClass.STRING: (
        "any value, character by character: '5' is not '5.0', 'a' is not 'A'",
        "",
    ),
}


def find_property_uses(tree: Node) -> list[PropertyUse]:
    """Return every comparison of a property in a tree, in the order of their positions.

    A PropertyUse has the name of the property, the Java class to which its value is converted, the
    comparison, and the text and position of the operand that it is compared with. For IN, this text
    is the first listed string.
    """
    uses: list[PropertyUse] = []
    for node in walk(tree):
        match node:
            case Equal(left=left, right=right) | Order(left=left, right=right):
                uses += _find_uses_in_pair(node, left, right)
            case Between(value=value_node, low=low, high=high):
                uses += _find_uses_in_pair(node, value_node, low)
                uses += _find_uses_in_pair(node, value_node, high)
            case In(operand=operand, values=strings):
                first_string = f"'{strings[0]}'"
                uses.append(
                    PropertyUse(operand.name, JavaClass.STRING, node, first_string, node.position)
                )
            case Match(operand=Property(name=name), operator=operator, search=search):
                operator_and_string = f"{operator} '{search}'"
                uses.append(
                    PropertyUse(name, JavaClass.STRING, node, operator_and_string, node.position)
                )
            case _:
                pass
    return sorted(uses, key=lambda use: use.position)


def float_fix(number_text: str) -> str:
    """Return the advice how to write a whole number so that values are compared as floats.

    `5` gives "Write 5.0.". 0 has its own advice, because RocketMQ refuses 0.0.
    """
    digits = number_text.rstrip("lL")
    is_zero = digits.lstrip("-") == "0"
    return _ZERO if is_zero else f"Write {digits}.0."


def literal_text(node: Node) -> str:
    """Return a constant as it was written, with its sign.

    A property returns its name. Every other node, such as an AND, returns "a condition".
    """
    if isinstance(node, Negate):
        return f"-{literal_text(node.operand)}"
    if isinstance(node, Literal):
        return node.text or str(node.value)
    return node.name if isinstance(node, Property) else "a condition"


def _find_uses_in_pair(node: Node, left: Node, right: Node) -> Iterator[PropertyUse]:
    """Yield a PropertyUse for each of the two operands that is a property.

    `node` is the comparison of the two operands. `a > b` gives two uses, and `a > 5` one. An
    operand is left out if the class to which its value is converted is not known.
    """
    for subject, compared_with in ((left, right), (right, left)):
        if not isinstance(subject, Property):
            continue
        read_as = _find_class_to_read_as(node, compared_with)
        if read_as is not None:
            compared_text = literal_text(compared_with)
            yield PropertyUse(subject.name, read_as, node, compared_text, compared_with.position)


def _find_class_to_read_as(node: Node, compared_with: Node) -> JavaClass | None:
    """Return the Java class to which `node` converts a property.

    `node` compares the property with `compared_with`. Two properties are compared as strings by `=`
    and `<>`, and as Doubles by other operators. A constant or condition decides the class itself.
    Return None for every other operand, such as the minus of a property, which is always null.
    """
    if isinstance(compared_with, Property):
        return JavaClass.STRING if isinstance(node, Equal) else JavaClass.DOUBLE
    is_constant = constant_number(compared_with) is not None or isinstance(compared_with, Literal)
    if is_constant or is_boolean(compared_with):
        return java_class(compared_with)
    return None


def find_node_warnings(tree: Node) -> Iterator[Finding]:
    """Yield the warnings that concern one node each, in the order of the tree.

    Each rule of `_RULES` is tried on each node. The operand of a misplaced NOT has no warnings of
    its own, because the warning about the NOT covers it.
    """
    nodes = list(walk(tree))
    covered_ids = set()
    for node in nodes:
        misplaced = _find_misplaced_not(node)
        if misplaced is not None:
            covered_ids.add(id(misplaced.operand))
    for node in nodes:
        if id(node) in covered_ids:
            continue
        for rule in _RULES:
            if isinstance(node, rule.kind) and rule.applies(node):
                yield rule.make_warning(node)


def _first_operand(node: Any) -> Node:
    """Return the left operand of an Equal, or the only operand of another comparison."""
    operand: Node = node.left if isinstance(node, Equal) else node.operand
    return operand


def _find_misplaced_not(node: Node) -> Not | None:
    """Return the NOT that is the first operand of a comparison, as in `NOT a = 5`.

    NOT applies only to the next operand, so this is `(NOT a) = 5`. Return None for any other node.
    """
    if not isinstance(node, Equal | IsNull | Match):
        return None
    operand = _first_operand(node)
    return operand if isinstance(operand, Not) else None


class _Rule(NamedTuple):
    """A warning about single nodes.

    It concerns nodes of the type `kind` for which `applies` returns True. `token` is the text that
    is marked, at the position of the node that `marked` returns. `token`, `what` and `fix` are
    format strings, in which `{n}` is the node. In `fix`, `{swapped}` is the text of an equality
    with its operands exchanged.
    """

    kind: type | tuple[type, ...]
    applies: Callable[[Any], bool]
    token: str
    code: str
    what: str
    fix: str
    marked: Callable[[Any], Node] = lambda node: node

    def make_warning(self, node: Node) -> Finding:
        """Return the warning of this rule about a node, with the node's text filled in."""
        position = self.marked(node).position
        length = len(self.token.format(n=node))
        what = self.what.format(n=node)
        swapped = ""
        if isinstance(node, Equal):
            swapped = render(replace(node, left=node.right, right=node.left))
        fix = self.fix.format(n=node, swapped=swapped)
        return _make_warning(position, length, self.code, what, fix)


_RULES = (
    _Rule(
        kind=BareProperty,
        applies=lambda n: isinstance(n.operand, Property),
        token="{n.operand.name}",
        code="bare-property",
        what="The bare property {n.operand.name} is never TRUE: a property is a string.",
        fix="Write {n.operand.name} = TRUE or {n.operand.name} IS NOT NULL.",
    ),
    _Rule(
        kind=(Equal, IsNull, Match),
        applies=lambda n: _find_misplaced_not(n) is not None,
        token="NOT",
        code="not-binds-tight",
        what="NOT applies to the next word only, not to the whole comparison.",
        fix="Put the comparison in parentheses, for example NOT (a = 5).",
        marked=_first_operand,
    ),
    _Rule(
        kind=Equal,
        applies=lambda n: (
            is_boolean(n.left)
            and not isinstance(n.left, Not)
            and java_class(n.right) is JavaClass.STRING
        ),
        token="=",
        code="boolean-on-left",
        what="A condition on the left of a string cannot be evaluated: no message matches.",
        fix="Exchange the operands: {swapped}.",
    ),
    _Rule(
        kind=Equal,
        applies=lambda n: (
            not isinstance(n.left, Not)
            and (is_boolean(n.left) or is_boolean(n.right))
            and (java_class(n.left).is_number or java_class(n.right).is_number)
        ),
        token="=",
        code="boolean-and-number",
        what="A condition never equals a number.",
        fix="Write = TRUE or = FALSE.",
    ),
    _Rule(
        kind=(Equal, Order),
        applies=lambda n: isinstance(n.left, Literal) and isinstance(n.right, Literal),
        token="=",
        code="constant",
        what="This compares two constants: the result is the same for every message.",
        fix="Compare with a property.",
    ),
    _Rule(
        kind=Equal,
        applies=lambda n: (
            n.negated and isinstance(n.left, Literal) and isinstance(n.right, Property)
        ),
        token="{n.left.text}",
        code="constant-on-left",
        what="With the constant on the left, <> also matches messages without {n.right.name}.",
        fix="Write {n.right.name} <> {n.left.text}.",
        marked=_first_operand,
    ),
    _Rule(
        kind=Negate,
        applies=lambda n: java_class(n) is JavaClass.NULL,
        token="-",
        code="minus",
        what="Minus works on numbers only; for any other operand the result is always null.",
        fix="Write the minus before the number.",
    ),
    _Rule(
        kind=Literal,
        applies=lambda n: (
            isinstance(n.value, int) and n.text[-1:] in ("l", "L") and n.value <= INTEGER_MAX
        ),
        token="{n.text}",
        code="long-suffix",
        what=f"The suffix of {{n.text}} has no effect: values above {INTEGER_MAX} do not match.",
        fix="For larger values compare with a float: {n.value}.0.",
    ),
    _Rule(
        kind=Match,
        applies=lambda n: not n.search,
        token="{n.operator}",
        code="empty-search",
        what="{n.operator} with an empty string is FALSE for every message, also with NOT.",
        fix="Write a IS NOT NULL.",
    ),
    _Rule(
        kind=Property,
        applies=lambda n: n.name != "TAGS" and n.name.upper() in ("TAGS", "TAG"),
        token="{n.name}",
        code="tag-name",
        what="The tag of a message is the property TAGS; {n.name} is another property.",
        fix="Write TAGS for the tag.",
    ),
)


def _make_warning(position: int, length: int, code: str, what: str, fix: str) -> Finding:
    """Return a finding that is a warning. `what` and `fix` are sentences."""
    return Finding(position, length, code, what, fix, Severity.WARNING)


# The classes of numbers, from the narrowest to the widest.
_WIDTH = [JavaClass.INTEGER, JavaClass.LONG, JavaClass.DOUBLE]


def find_mixed_type_warnings(tree: Node) -> Iterator[Finding]:
    """Yield the warnings about properties that are compared in several ways in one expression.

    - mixed-numbers: a property is compared with numbers of different classes.
    - number-in-quotes: a property is compared with numbers, and with a number in quotes.
    - string-behind-number: a comparison with a string is never reached, because a comparison with a
      number comes before it.
    """
    by_name: dict[str, list[PropertyUse]] = {}
    for use in find_property_uses(tree):
        by_name.setdefault(use.name, []).append(use)
    for uses in by_name.values():
        number_uses = [use for use in uses if use.read_as in _WIDTH]
        if number_uses:
            yield from _find_number_warnings(uses, number_uses)
    for node in walk(tree):
        if isinstance(node, Or):
            yield from _find_unreachable_strings(node)


def _find_number_warnings(
    uses: list[PropertyUse], number_uses: list[PropertyUse]
) -> Iterator[Finding]:
    """Yield the warnings mixed-numbers and number-in-quotes about one property.

    `uses` are all comparisons of the property, and `number_uses` those with a number.
    """
    # The first comparison with a number of the widest class.
    widest_use = max(number_uses, key=lambda use: _WIDTH.index(use.read_as))
    for use in uses:
        if use in number_uses and use.read_as is not widest_use.read_as:
            yield _warn_about_mixed_numbers(use, widest_use)
        elif _is_number_in_quotes(use):
            # `a = '5' OR a > 7`: the first compares characters.
            what = (
                f"{use.text} is a string: {use.name} is compared with it character by character"
                " ('5' is not '5.0'), and elsewhere as a number."
            )
            fix = f"Write {use.text[1:-1]} without quotes."
            yield _make_warning(use.position, use.length, "number-in-quotes", what, fix)


def _warn_about_mixed_numbers(use: PropertyUse, widest_use: PropertyUse) -> Finding:
    """Return the warning about a comparison that reads a property as a narrower class of numbers.

    In `price > 30 AND price < 99.5`, the value 30.5 is an error in the first comparison. The second
    one is `widest_use`.
    """
    failing_value = "30.5" if widest_use.read_as is JavaClass.DOUBLE else "3000000000"
    what = (
        f"{use.name} is read as {use.read_as.value} for {use.text} and as"
        f" {widest_use.read_as.value} for {widest_use.text}: a value such as {failing_value} is an"
        " error in the first comparison, and the message does not match."
    )
    fix = f"{float_fix(use.text)} A float accepts whole numbers too."
    return _make_warning(use.position, use.length, "mixed-numbers", what, fix)


def _is_number_in_quotes(use: PropertyUse) -> bool:
    """Return whether a property is tested for equality with a string that contains a number."""
    is_string = isinstance(use.node, Equal) and use.read_as is JavaClass.STRING
    is_quoted = use.text.startswith("'")
    return is_string and is_quoted and try_parse_double(use.text[1:-1]) is not None


class _AcceptedString(NamedTuple):
    """A string for which a condition is TRUE if property `name` has it as its value."""

    name: str
    string: str
    position: int


def _find_accepted_strings(condition: Node) -> list[_AcceptedString]:
    """Return the strings that make a condition `a = 'x'` or `a IN ('x', 'y')` TRUE.

    Return an empty list for every other condition, and for a negated one.
    """
    match condition:
        case Equal(
            left=Property(name=name), right=Literal(value=str(string)) as right, negated=False
        ):
            return [_AcceptedString(name, string, right.position)]
        case In(operand=operand, values=strings, negated=False):
            return [_AcceptedString(operand.name, string, condition.position) for string in strings]
        case _:
            return []


def _find_unreachable_strings(node: Or) -> Iterator[Finding]:
    """Yield a warning for each string of an OR that an earlier part of the OR cannot convert.

    In `a > 5 OR a = 'n/a'`, the value 'n/a' cannot be converted to a number in the first part. It
    ends the evaluation with an error there, so the second part never accepts it.
    """
    number_use_by_name: dict[str, PropertyUse] = {}  # the first one in the conditions so far
    for condition in node.parts:
        for name, string, position in _find_accepted_strings(condition):
            number_use = number_use_by_name.get(name)
            if number_use is None:
                continue
            is_error = TRY_PARSE_NUMBER[number_use.read_as](string) is None
            if is_error:
                what = (
                    f"{name} = '{string}' is never reached: the comparison of {name} with "
                    f"{number_use.text} comes before it, and '{string}' is an error there."
                )
                fix = f"Put {name} = '{string}' first; OR ends at the first TRUE."
                length = len(string) + 2  # with the quotes
                yield _make_warning(position, length, "string-behind-number", what, fix)
        for use in find_property_uses(condition):
            if use.read_as in _WIDTH:
                number_use_by_name.setdefault(use.name, use)


FINDINGS_MAX = 50
"""The maximum number of errors about look-alikes that one check reports, and of its parses."""


def check_sql92(text: str) -> list[Finding]:
    """Return the errors and warnings about a SQL92 expression, in the order of their positions.

    The list is empty if there are none. The parser stops at the first error, so there is at most
    one. Characters that only look like plain ones, such as typographic quotes, are an exception.
    Each is an error. It is replaced by the plain character, and the text is parsed again, until
    there are FINDINGS_MAX errors.
    """
    findings: list[Finding] = []
    corrected_text = text
    while len(findings) < FINDINGS_MAX:
        try:
            tree, ignored_start = _parse(corrected_text)
        except Rejected as rejected:
            findings.append(rejected.finding)
            if rejected.finding.code != LOOK_ALIKE_CODE:
                break
            corrected_text = _replace_look_alikes(corrected_text, rejected.finding)
        else:
            findings += _find_warnings(corrected_text, tree, ignored_start)
            break
    return sorted(findings, key=lambda finding: finding.position)


def _replace_look_alikes(text: str, finding: Finding) -> str:
    """Return the text with the characters that `finding` marks replaced by plain ones.

    The finding marks one character that only looks like a plain one, or a string in typographic
    quotes. In the string, only the quotes at both ends are replaced.
    """
    characters = list(text)
    first_index = finding.position
    last_index = finding.position + finding.length - 1
    for index in {first_index, last_index}:
        characters[index] = characters[index].translate(LOOK_ALIKES)
    return "".join(characters)


def _find_warnings(text: str, tree: Node, ignored_start: int | None) -> list[Finding]:
    """Return the warnings about an expression that compiles.

    `tree` and `ignored_start` are the results of parsing `text`. `ignored_start` is the index from
    which RocketMQ ignores the text; None means that it reads all of it.
    """
    warnings = [*find_node_warnings(tree), *find_mixed_type_warnings(tree)]
    if ignored_start is None:
        return warnings
    # A bare property at the end is what remains of a condition that RocketMQ did not read
    # completely. The warning about the ignored text covers it.
    read_end = len(text[:ignored_start].rstrip())
    warnings = [
        warning
        for warning in warnings
        if warning.code != "bare-property" or warning.position + warning.length < read_end
    ]
    return [*warnings, ignored_text_warning(text, ignored_start)]


def describe_types(text: str) -> tuple[TypeNote, ...]:
    """Return a note for each property of a SQL92 expression about how its value is converted.

    A property that is converted to several Java classes has one note for each. The notes are in the
    order of their positions. The tuple is empty if the expression does not compile.
    """
    try:
        tree, _ = _parse(text)
    except Rejected:
        return ()
    first_use_by_key: dict[tuple[str, JavaClass], PropertyUse] = {}
    for use in find_property_uses(tree):
        if use.read_as in _NOTES:
            first_use_by_key.setdefault((use.name, use.read_as), use)
    return tuple(map(_make_type_note, first_use_by_key.values()))


def _make_type_note(use: PropertyUse) -> TypeNote:
    """Return a note about how the value of a property is converted in a comparison.

    It says which values are accepted, and which are errors.
    """
    accepts, errors = _NOTES[use.read_as]
    instead = ""
    if use.read_as in (JavaClass.INTEGER, JavaClass.LONG):
        instead = f"For values with a fraction: {float_fix(use.text)}"
    return TypeNote(
        name=use.name,
        read_as=use.read_as.value,
        because=f"it is compared with {use.text}",
        accepts=accepts,
        errors=errors,
        instead=instead,
    )


def check_tags(expression: str | None) -> list[Finding]:
    """Return the warnings about a tag expression, such as `A|B`, which is one tag.

    None and "" mean all messages, and have no warnings. Raises FilterSyntaxError if the expression
    cannot be parsed.
    """
    tag_expression, tags, _ = parse_tags(expression)
    if tag_expression == ALL:
        return []
    if not tags:
        what = "The expression contains no tag: it matches no message."
        fix = "Write TagA || TagB, or *."
        return [_make_warning(0, len(tag_expression), "no-tag", what, fix)]

    findings = []
    if ALL in tags:
        what = "Among other tags, * is a tag of that name; it does not match all messages."
        position = tag_expression.index(ALL)
        findings.append(_make_warning(position, 1, "star-tag", what, "Write * alone."))
    for tag in sorted(tags):
        if "|" in tag:
            what = f"A single | is part of the tag: {tag!r} is one tag."
            fix = f"Tags are separated by {SEPARATOR}."
            position = tag_expression.index(tag)
            findings.append(_make_warning(position, len(tag), "single-bar", what, fix))
    return findings


def check_subscription(subscription: Subscription) -> list[Finding]:
    """Return the warnings about the expression of a subscription. Clients call it when they start.

    Raises FilterSyntaxError if the expression has errors or continues with text that RocketMQ
    ignores, or if the kind of the subscription is unknown. The error has the position and the fix.
    """
    if is_tag_kind(subscription.kind):
        return check_tags(subscription.expression)
    if subscription.kind != SQL92:
        raise unknown_kind_error(subscription.kind)
    findings = check_sql92(subscription.expression)
    for finding in findings:
        if finding.is_error:
            raise syntax_error(subscription.expression, finding)
    compile_complete(subscription.expression)
    return findings


def _parse(text: str) -> tuple[Node, int | None]:
    """Return the tree of an expression and the index of the ignored text, as `syntax.parse`."""
    from sluicemq.filter.syntax import parse  # noqa: PLC0415 - only users of SQL92 need lark

    return parse(text)
