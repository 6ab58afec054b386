"""What a consumer is told before it starts: errors that refuse the expression, and warnings.

An error does not compile (spec/filter.md §6). A warning compiles in RocketMQ and does something
else than it seems to: text after a complete expression is ignored (so it is refused where somebody
writes an expression for us, see `subscriptions.compile_whole`), NOT binds to one word, a bare
property is never true. Some need the whole expression: a property is a string, and the literal
beside it decides as what it is read (Integer.valueOf, above 2,147,483,647 Long.valueOf, beside a
float Double.valueOf). A value that cannot be converted ends the evaluation, also where another
comparison would take the message (§7).

Look-alike characters of other alphabets are mended in place and the check goes on, so that one run
names all of them and what lies behind them.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sluicemq.filter.evaluate import NUMBER_OR_NONE, constant_of, double_or_none
from sluicemq.filter.findings import (
    LOOK_ALIKE_CODE,
    LOOK_ALIKES,
    Finding,
    Rejected,
    Severity,
    rest_warning,
    syntax_error,
)
from sluicemq.filter.nodes import (
    INTEGER_MAX,
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
    is_boolean,
    java_class,
    walk,
)
from sluicemq.filter.subscriptions import (
    SEPARATOR,
    compile_whole,
    is_tag_kind,
    parse_tags,
    unknown_kind,
)
from sluicemq.model.subscription import ALL, SQL92, Subscription


class Use(NamedTuple):
    """A property beside something: `node` is the comparison, `other` what it is compared with, in
    `read_as` as which class. `text` and `position` are those of the other side."""

    name: str
    read_as: JavaClass
    node: Node
    text: str
    position: int

    @property
    def length(self) -> int:
        return max(1, len(self.text))


class TypeNote(NamedTuple):
    """What a user should know of a property: as what it is read and which values are errors."""

    name: str
    read_as: str
    because: str
    accepts: str
    errors: str
    instead: str


# 0.0 itself is refused (spec/filter.md §6), so its neighbours stand for it.
_ZERO = (
    "There is no 0.0: write > 0 as >= 4.9e-324, >= 0 as > -4.9e-324, "
    "< 0 as <= -4.9e-324, <= 0 as < 4.9e-324."
)
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


def property_uses(tree: Node) -> list[Use]:
    """Every comparison of a property, in the order of their places."""
    found: list[Use] = []
    for node in walk(tree):
        match node:
            case Equal(left=left, right=right) | Order(left=left, right=right):
                found += (*_beside(node, left, right), *_beside(node, right, left))
            case Between(value=value, low=low, high=high):
                for bound in (low, high):
                    found += (*_beside(node, value, bound), *_beside(node, bound, value))
            case In(operand=operand, values=values):
                shown = f"'{values[0]}'"
                found.append(Use(operand.name, JavaClass.STRING, node, shown, node.position))
            case Match(operand=Property(name=name), operator=operator, search=search):
                shown = f"{operator} '{search}'"
                found.append(Use(name, JavaClass.STRING, node, shown, node.position))
            case _:
                pass
    return sorted(found, key=lambda use: use.position)


def float_fix(text: str) -> str:
    """What to write for a whole number to compare as floats."""
    digits = text.rstrip("lL")
    return _ZERO if digits.lstrip("-") == "0" else f"Write {digits}.0."


def literal_text(node: Node) -> str:
    """A constant as it was written, with its sign."""
    if isinstance(node, Negate):
        return f"-{literal_text(node.operand)}"
    if isinstance(node, Literal):
        return node.text or str(node.value)
    return node.name if isinstance(node, Property) else "a condition"


def _beside(node: Node, subject: Node, other: Node) -> Iterator[Use]:
    if not isinstance(subject, Property):
        return
    if isinstance(other, Property):
        read_as = JavaClass.STRING if isinstance(node, Equal) else JavaClass.DOUBLE
    elif constant_of(other) is not None or isinstance(other, Literal) or is_boolean(other):
        read_as = java_class(other)
    else:
        return
    yield Use(subject.name, read_as, node, literal_text(other), other.position)


def node_warnings(tree: Node) -> Iterator[Finding]:
    """The warnings about single nodes."""
    nodes = list(walk(tree))
    # What stands under a misplaced NOT has its warning already.
    told = {id(found.operand) for node in nodes if (found := _misplaced_not(node))}
    for node in nodes:
        for rule in _RULES:
            if id(node) in told or not isinstance(node, rule.kind) or not rule.applies(node):
                continue
            token = rule.token.format(n=node)
            what, instead = rule.what.format(n=node), rule.instead.format(n=node)
            yield _warning(rule.at(node).position, len(token), rule.code, what, instead)


def _first_operand(node: Any) -> Node:
    found: Node = node.left if isinstance(node, Equal) else node.operand
    return found


def _misplaced_not(node: Node) -> Not | None:
    left = _first_operand(node) if isinstance(node, Equal | IsNull | Match) else None
    return left if isinstance(left, Not) else None


class _Rule(NamedTuple):
    """A warning about one node. `token` is what the carets stand under; texts may name `{n}`."""

    kind: type | tuple[type, ...]
    applies: Callable[[Any], bool]
    token: str
    code: str
    what: str
    instead: str
    at: Callable[[Any], Node] = lambda node: node


_RULES = (
    _Rule(
        Truth, lambda n: isinstance(n.operand, Property), "{n.operand.name}", "bare-property",
        "The bare property {n.operand.name} is never TRUE: a property is a string.",
        "Write {n.operand.name} = TRUE or {n.operand.name} IS NOT NULL.",
    ),
    _Rule(
        (Equal, IsNull, Match), lambda n: _misplaced_not(n) is not None, "NOT", "not-binds-tight",
        "NOT belongs to the one word after it, not to the whole comparison.",
        "Put the comparison in parentheses, for example NOT (a = 5).",
        _first_operand,
    ),
    _Rule(
        Equal,
        lambda n: (
            is_boolean(n.left)
            and not isinstance(n.left, Not)
            and java_class(n.right) is JavaClass.STRING
        ),
        "=", "boolean-on-left",
        "A condition on the left of a string cannot be evaluated: no message matches.",
        "Write it the other way: a = TRUE.",
    ),
    _Rule(
        Equal,
        lambda n: (
            not isinstance(n.left, Not)
            and (is_boolean(n.left) or is_boolean(n.right))
            and (java_class(n.left).is_number or java_class(n.right).is_number)
        ),
        "=", "boolean-and-number", "A condition never equals a number.",
        "Write = TRUE or = FALSE.",
    ),
    _Rule(
        (Equal, Order), lambda n: isinstance(n.left, Literal) and isinstance(n.right, Literal),
        "=", "constant", "This compares two constants: it is the same for every message.",
        "Compare with a property.",
    ),
    _Rule(
        Equal,
        lambda n: n.negated and isinstance(n.left, Literal) and isinstance(n.right, Property),
        "{n.left.text}", "constant-on-left",
        "With the constant on the left <> matches messages without {n.right.name} too.",
        "Write {n.right.name} <> {n.left.text}.", _first_operand,
    ),
    _Rule(
        Negate, lambda n: java_class(n) is JavaClass.NULL, "-", "minus",
        "Minus works on numbers only; of anything else the result is always null.",
        "Write the minus before the number.",
    ),
    _Rule(
        Literal,
        lambda n: isinstance(n.value, int) and n.text[-1:] in ("l", "L") and n.value <= INTEGER_MAX,
        "{n.text}", "long-suffix",
        f"The suffix of {{n.text}} changes nothing: values above {INTEGER_MAX} do not match.",
        "For larger values compare with a float: {n.value}.0.",
    ),
    _Rule(
        Match, lambda n: not n.search, "{n.operator}", "empty-search",
        "{n.operator} with an empty string is FALSE for every message, with NOT too.",
        "Write a IS NOT NULL.",
    ),
    _Rule(
        Property, lambda n: n.name != "TAGS" and n.name.upper() in ("TAGS", "TAG"), "{n.name}",
        "tag-name", "A message's tag is the property TAGS; {n.name} is another property.",
        "Write TAGS for the tag.",
    ),
)  # fmt: skip


def _warning(position: int, length: int, code: str, what: str, instead: str) -> Finding:
    return Finding(position, length, code, what, instead, Severity.WARNING)


_WIDTH = [JavaClass.INTEGER, JavaClass.LONG, JavaClass.DOUBLE]


def mixed_warnings(tree: Node) -> Iterator[Finding]:
    """The warnings about a property's several uses."""
    by_name: dict[str, list[Use]] = {}
    for use in property_uses(tree):
        by_name.setdefault(use.name, []).append(use)
    for uses in by_name.values():
        numbers = [use for use in uses if use.read_as in _WIDTH]
        if not numbers:
            continue
        widest = max((use.read_as for use in numbers), key=_WIDTH.index)
        other = next(use for use in numbers if use.read_as is widest)
        lost = "30.5" if widest is JavaClass.DOUBLE else "3000000000"
        for use in uses:
            text = use.text[1:-1]
            is_text = isinstance(use.node, Equal) and use.read_as is JavaClass.STRING
            if use in numbers and use.read_as is not widest:
                # `price > 30 AND price < 99.5`: 30.5 is an error for the first.
                what = (
                    f"{use.name} is read as {use.read_as.value} beside {use.text} and as"
                    f" {widest.value} beside {other.text}: a value such as {lost} is an error for"
                    " the first, and the message does not match."
                )
                fix = f"{float_fix(use.text)} A float takes whole numbers too."
                yield _warning(use.position, use.length, "mixed-numbers", what, fix)
            elif is_text and use.text[:1] == "'" and double_or_none(text) is not None:
                # `a = '5' OR a > 7`: the first compares characters.
                what = (
                    f"{use.text} is a string: {use.name} is compared with it character by character"
                    " ('5' is not '5.0'), and elsewhere as a number."
                )
                fix = f"Write {text} without quotes."
                yield _warning(use.position, use.length, "number-in-quotes", what, fix)
    for node in walk(tree):
        if isinstance(node, Or):
            yield from _text_behind_number(node)


def _text_behind_number(node: Or) -> Iterator[Finding]:
    """`a > 5 OR a = 'n/a'`: 'n/a' ends the evaluation in the first part."""
    numbers: dict[str, Use] = {}
    for part in node.parts:
        wanted: list[tuple[str, str, int]] = []  # strings that it would accept for a property
        match part:
            case Equal(left=Property(name=name), right=Literal(value=str(text)) as right):
                wanted += [] if part.negated else [(name, text, right.position)]
            case In(operand=operand, values=values, negated=False):
                wanted += [(operand.name, text, part.position) for text in values]
            case _:
                pass
        for name, text, position in wanted:
            use = numbers.get(name)
            if use is not None and NUMBER_OR_NONE[use.read_as](text) is None:
                what = (
                    f"{name} = '{text}' is never reached: the comparison of {name} with "
                    f"{use.text} stands before it, and '{text}' is an error there."
                )
                fix = f"Put {name} = '{text}' first; OR ends at the first TRUE."
                yield _warning(position, len(text) + 2, "string-behind-number", what, fix)
        for use in property_uses(part):
            if use.read_as in _WIDTH:
                numbers.setdefault(use.name, use)


FINDINGS_MAX = 50


def check(text: str) -> list[Finding]:
    """All findings about a SQL92 expression, in the order of their places; [] when it is fine."""
    findings: list[Finding] = []
    while len(findings) < FINDINGS_MAX:
        try:
            tree, rest = _parse(text)
        except Rejected as rejected:
            found = rejected.finding
            findings.append(found)
            if found.code != LOOK_ALIKE_CODE:
                break
            # Only the marks at the ends: a quoted text keeps what stands between its quotes.
            marks = list(text)
            for at in (found.position, found.position + found.length - 1):
                marks[at] = marks[at].translate(LOOK_ALIKES)
            text = "".join(marks)
            continue
        findings += node_warnings(tree)
        findings += mixed_warnings(tree)
        if rest is not None:
            # The last bare property is what remains of a condition that RocketMQ could not read on.
            read = len(text[:rest].rstrip())
            findings = [
                one for one in findings
                if one.code != "bare-property" or one.position + one.length < read
            ] + [rest_warning(text, rest)]  # fmt: skip
        break
    return sorted(findings, key=lambda finding: finding.position)


def check_types(text: str) -> tuple[TypeNote, ...]:
    """As what each property of a SQL92 expression is read: a note for each property and class, in
    the order of their places; () when it does not compile."""
    try:
        uses = property_uses(_parse(text)[0])
    except Rejected:
        return ()
    notes: dict[tuple[str, JavaClass], TypeNote] = {}
    for use in uses:
        if (use.name, use.read_as) in notes or use.read_as not in _NOTES:
            continue
        accepts, errors = _NOTES[use.read_as]
        because = f"it is compared with {use.text}"
        is_whole = use.read_as in (JavaClass.INTEGER, JavaClass.LONG)
        fix = f"For values with a fraction: {float_fix(use.text)}" if is_whole else ""
        notes[use.name, use.read_as] = TypeNote(
            use.name, use.read_as.value, because, accepts, errors, fix
        )
    return tuple(notes.values())


def check_tags(expression: str | None) -> list[Finding]:
    """Warnings about a tag expression. Raises FilterSyntaxError when it does not parse."""
    text, tags, _ = parse_tags(expression)
    if text == ALL:
        return []
    if not tags:
        what = "There is no tag in it: it matches no message."
        return [_warning(0, len(text), "no-tag", what, "Write TagA || TagB, or *.")]
    findings = []
    if ALL in tags:
        what = "Among other tags * is a tag of that name; it does not mean everything."
        findings.append(_warning(text.index(ALL), 1, "star-tag", what, "Write * alone."))
    for tag in sorted(tags):
        if "|" in tag:
            what = f"A single | belongs to the tag: {tag!r} is one tag."
            fix = f"Tags are separated by {SEPARATOR}."
            findings.append(_warning(text.index(tag), len(tag), "single-bar", what, fix))
    return findings


def check_subscription(subscription: Subscription) -> list[Finding]:
    """At consumer start: the warnings of a subscription's expression.

    Raises FilterSyntaxError, with place and cure, when the expression has errors or goes on with
    text that RocketMQ ignores.
    """
    if is_tag_kind(subscription.kind):
        return check_tags(subscription.expression)
    if subscription.kind != SQL92:
        raise unknown_kind(subscription.kind)
    findings = check(subscription.expression)
    for finding in findings:
        if finding.is_error:
            raise syntax_error(subscription.expression, finding)
    compile_whole(subscription.expression)
    return findings


def _parse(text: str) -> tuple[Node, int | None]:
    from sluicemq.filter.syntax import parse  # noqa: PLC0415 - lark: only SQL92 users pay for it

    return parse(text)
