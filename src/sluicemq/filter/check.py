"""As what each property is read: the literal beside it decides, not the message.

A property is a string. Beside a whole number it is converted by Integer.valueOf (Long.valueOf above
2,147,483,647), beside a float by Double.valueOf; a value that cannot be converted ends the
evaluation and the message is not delivered (spec/filter.md §7).

What compiles and surprises: one rule a function, each looks at one node.

Facts: spec/filter.md §6 "Consequences" and §7.

Warnings that need the whole expression: one property read in two ways, and misspelt names.

Each is a message that is lost although one of the comparisons would take it: the conversion that
fails in the other ends the evaluation (spec/filter.md §7).

What a consumer is told before it starts: errors that refuse the expression, and warnings.

An error does not compile (spec/filter.md §6). A warning compiles in RocketMQ and does something
else than it seems to: text after a complete expression is ignored (so it is refused where somebody
writes an expression for us, see `parser.compile_whole`), NOT binds to one word, a bare property is
never true. Look-alike characters of other alphabets are mended in place and the check
goes on, so that one run names all of them and what lies behind them.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

from sluicemq.filter.evaluate import constant_of
from sluicemq.filter.findings import (
    LOOK_ALIKE_CODE,
    LOOK_ALIKES,
    Finding,
    Rejected,
    Severity,
    rest_warning,
    syntax_error,
)
from sluicemq.filter.java import double_or_none, integer_or_none, long_or_none
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
    levels,
)
from sluicemq.filter.parser import compile_whole
from sluicemq.filter.subscriptions import SEPARATOR, is_tag_kind, parse_tags, unknown_kind
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


def property_uses(tree: Node) -> tuple[Use, ...]:
    """Every comparison of a property, in the order of their places."""
    found = [use for level in levels(tree) for node in level for use in _uses(node)]
    return tuple(sorted(found, key=lambda use: use.position))


def type_notes(tree: Node) -> tuple[TypeNote, ...]:
    """One note for each property and class, in the order of their places."""
    notes: dict[tuple[str, JavaClass], TypeNote] = {}
    for use in property_uses(tree):
        if use.read_as not in _NOTES or (use.name, use.read_as) in notes:
            continue
        accepts, errors = _NOTES[use.read_as]
        because = f"it is compared with {use.text}"
        is_whole = use.read_as in (JavaClass.INTEGER, JavaClass.LONG)
        cure = f"For values with a fraction: {float_cure(use.text)}" if is_whole else ""
        notes[use.name, use.read_as] = TypeNote(
            use.name, use.read_as.value, because, accepts, errors, cure
        )
    return tuple(notes.values())


def float_cure(text: str) -> str:
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


def _uses(node: Node) -> Iterator[Use]:
    match node:
        case Equal(left=left, right=right) | Order(left=left, right=right):
            yield from _beside(node, left, right)
            yield from _beside(node, right, left)
        case Between(value=value, low=low, high=high):
            for bound in (low, high):
                yield from _beside(node, value, bound)
                yield from _beside(node, bound, value)
        case In(operand=operand, values=values):
            shown = f"'{values[0]}'"
            yield Use(operand.name, JavaClass.STRING, node, shown, node.position)
        case Match(operand=Property(name=name), operator=operator, search=search):
            yield Use(name, JavaClass.STRING, node, f"{operator} '{search}'", node.position)
        case _:
            return


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


def tree_warnings(tree: Node) -> Iterator[Finding]:
    """The warnings of a whole tree."""
    nodes = [node for level in levels(tree) for node in level]
    # What stands under a misplaced NOT has its warning already.
    told = {id(found.operand) for node in nodes if (found := _misplaced_not(node))}
    for node in nodes:
        for rule in _RULES:
            if id(node) not in told and (finding := rule(node)):
                yield finding


def _bare_property(node: Node) -> Finding | None:
    if not isinstance(node, Truth) or not isinstance(node.operand, Property):
        return None
    name = node.operand.name
    what = f"The bare property {name} is never TRUE: a property is a string."
    cure = f"Write {name} = TRUE or {name} IS NOT NULL."
    return _warning(node.position, name, "bare-property", what, cure)


def _misplaced_not(node: Node) -> Not | None:
    left = node.left if isinstance(node, Equal) else None
    if isinstance(node, IsNull | Match):
        left = node.operand
    return left if isinstance(left, Not) else None


def _not_binds_tight(node: Node) -> Finding | None:
    found = _misplaced_not(node)
    if found is None:
        return None
    what = "NOT belongs to the one word after it, not to the whole comparison."
    cure = "Put the comparison in parentheses, for example NOT (a = 5)."
    return _warning(found.position, "NOT", "not-binds-tight", what, cure)


def _condition_against_string(node: Node) -> Finding | None:
    if not isinstance(node, Equal) or not is_boolean(node.left) or isinstance(node.left, Not):
        return None
    if java_class(node.right) is not JavaClass.STRING:
        return None
    what = "A condition on the left of a string cannot be evaluated: no message matches."
    return _warning(
        node.position, "=", "boolean-on-left", what, "Write it the other way: a = TRUE."
    )


def _always_unequal(node: Node) -> Finding | None:
    if not isinstance(node, Equal) or isinstance(node.left, Not):
        return None
    classes = [java_class(node.left), java_class(node.right)]
    if JavaClass.BOOLEAN not in classes or not any(found.is_number for found in classes):
        return None
    what = "A condition never equals a number."
    return _warning(node.position, "=", "boolean-and-number", what, "Write = TRUE or = FALSE.")


def _constant(node: Node) -> Finding | None:
    if not isinstance(node, Equal | Order) or not isinstance(node.left, Literal):
        return None
    if not isinstance(node.right, Literal):
        return None
    what = "This compares two constants: it is the same for every message."
    return _warning(node.position, "=", "constant", what, "Compare with a property.")


def _constant_on_left(node: Node) -> Finding | None:
    if not isinstance(node, Equal) or not node.negated or not isinstance(node.left, Literal):
        return None
    if not isinstance(node.right, Property):
        return None
    what = f"With the constant on the left <> matches messages without {node.right.name} too."
    cure = f"Write {node.right.name} <> {node.left.text}."
    return _warning(node.left.position, node.left.text, "constant-on-left", what, cure)


def _negated_no_number(node: Node) -> Finding | None:
    if not isinstance(node, Negate) or java_class(node) is not JavaClass.NULL:
        return None
    what = "Minus works on numbers only; of anything else the result is always null."
    return _warning(node.position, "-", "minus", what, "Write the minus before the number.")


def _suffix_does_not_widen(node: Node) -> Finding | None:
    if not isinstance(node, Literal) or not isinstance(node.value, int):
        return None
    if node.text[-1:] not in ("l", "L") or node.value > INTEGER_MAX:
        return None
    what = f"The suffix of {node.text} changes nothing: values above {INTEGER_MAX} do not match."
    cure = f"For larger values compare with a float: {node.value}.0."
    return _warning(node.position, node.text, "long-suffix", what, cure)


def _empty_search(node: Node) -> Finding | None:
    if not isinstance(node, Match) or node.search:
        return None
    what = f"{node.operator} with an empty string is FALSE for every message, with NOT too."
    return _warning(node.position, node.operator, "empty-search", what, "Write a IS NOT NULL.")


_RULES: tuple[Callable[[Node], Finding | None], ...] = (
    _bare_property,
    _not_binds_tight,
    _condition_against_string,
    _always_unequal,
    _constant,
    _constant_on_left,
    _negated_no_number,
    _suffix_does_not_widen,
    _empty_search,
)


def _warning(position: int, token: str, code: str, what: str, instead: str) -> Finding:
    return Finding(position, len(token), code, what, instead, Severity.WARNING)


_OR_NONE = {
    JavaClass.INTEGER: integer_or_none,
    JavaClass.LONG: long_or_none,
    JavaClass.DOUBLE: double_or_none,
}
_WIDTH = [JavaClass.INTEGER, JavaClass.LONG, JavaClass.DOUBLE]


def mixed_warnings(tree: Node) -> Iterator[Finding]:
    """The warnings about a property's several uses, and about names."""
    uses = sorted(property_uses(tree), key=lambda use: use.name)
    for _, group in groupby(uses, key=lambda use: use.name):
        alike = sorted(group, key=lambda use: use.position)
        yield from _two_number_classes(alike)
        yield from _number_in_quotes(alike)
    for level in levels(tree):
        for node in level:
            if isinstance(node, Or):
                yield from _text_behind_number(node)
            if isinstance(node, Property):
                yield from _tag_name(node)


def _two_number_classes(uses: list[Use]) -> Iterator[Finding]:
    """`price > 30 AND price < 99.5`: 30.5 is an error for the first."""
    numbers = [use for use in uses if use.read_as in _WIDTH]
    widest = max((use.read_as for use in numbers), key=_WIDTH.index, default=None)
    for use in numbers:
        if use.read_as is widest or widest is None:
            continue
        other = next(other for other in numbers if other.read_as is widest)
        lost = "30.5" if widest is JavaClass.DOUBLE else "3000000000"
        what = (
            f"{use.name} is read as {use.read_as.value} beside {use.text} and as {widest.value} "
            f"beside {other.text}: a value such as {lost} is an error for the first, and the "
            "message does not match."
        )
        cure = f"{float_cure(use.text)} A float takes whole numbers too."
        yield _warning_at(use.position, use.length, "mixed-numbers", what, cure)


def _number_in_quotes(uses: list[Use]) -> Iterator[Finding]:
    """`a = '5' OR a > 7`: the first compares characters."""
    if not any(use.read_as in _WIDTH for use in uses):
        return
    for use in uses:
        text = use.text[1:-1]
        if not isinstance(use.node, Equal) or use.read_as is not JavaClass.STRING:
            continue
        if use.text[:1] == "'" and double_or_none(text) is not None:
            what = (
                f"{use.text} is a string: {use.name} is compared with it character by character "
                "('5' is not '5.0'), and elsewhere as a number."
            )
            yield _warning_at(
                use.position, use.length, "number-in-quotes", what, f"Write {text} without quotes."
            )


def _text_behind_number(node: Or) -> Iterator[Finding]:
    """`a > 5 OR a = 'n/a'`: 'n/a' ends the evaluation in the first part."""
    numbers: dict[str, Use] = {}
    for part in node.parts:
        for name, text, position in _texts(part):
            use = numbers.get(name)
            if use is not None and _OR_NONE[use.read_as](text) is None:
                what = (
                    f"{name} = '{text}' is never reached: the comparison of {name} with "
                    f"{use.text} stands before it, and '{text}' is an error there."
                )
                cure = f"Put {name} = '{text}' first; OR ends at the first TRUE."
                yield _warning_at(position, len(text) + 2, "string-behind-number", what, cure)
        for use in property_uses(part):
            if use.read_as in _WIDTH:
                numbers.setdefault(use.name, use)


def _texts(part: Node) -> Iterator[tuple[str, str, int]]:
    """The strings that a part of OR would accept for a property."""
    match part:
        case Equal(left=Property(name=name), right=Literal(value=str(text)) as right):
            if not part.negated:
                yield name, text, right.position
        case In(operand=operand, values=values, negated=False):
            for text in values:
                yield operand.name, text, part.position
        case _:
            return


def _tag_name(node: Property) -> Iterator[Finding]:
    if node.name != "TAGS" and node.name.upper() in ("TAGS", "TAG"):
        what = f"A message's tag is the property TAGS; {node.name} is another property."
        yield _warning_at(
            node.position, len(node.name), "tag-name", what, "Write TAGS for the tag."
        )


def _warning_at(position: int, length: int, code: str, what: str, instead: str) -> Finding:
    return Finding(position, length, code, what, instead, Severity.WARNING)


FINDINGS_MAX = 50


def check(text: str) -> list[Finding]:
    """All findings about a SQL92 expression, in the order of their places; [] when it is fine."""
    findings: list[Finding] = []
    mended = text
    while len(findings) < FINDINGS_MAX:
        try:
            tree, rest = _parse(mended)
        except Rejected as rejected:
            findings.append(rejected.finding)
            if rejected.finding.code != LOOK_ALIKE_CODE:
                break
            mended = _mend(mended, rejected.finding)
        else:
            findings += _warnings(mended, tree, rest)
            break
    return sorted(findings, key=lambda finding: finding.position)


def check_types(text: str) -> tuple[TypeNote, ...]:
    """As what each property of a SQL92 expression is read; () when it does not compile."""
    try:
        return type_notes(_parse(text)[0])
    except Rejected:
        return ()


def check_tags(expression: str | None) -> list[Finding]:
    """Warnings about a tag expression. Raises FilterSyntaxError when it does not parse."""
    text, tags, _ = parse_tags(expression)
    if text == ALL:
        return []
    if not tags:
        what = "There is no tag in it: it matches no message."
        return [_tag_warning(0, len(text), "no-tag", what, "Write TagA || TagB, or *.")]
    findings = []
    if ALL in tags:
        what = "Among other tags * is a tag of that name; it does not mean everything."
        findings.append(_tag_warning(text.index(ALL), 1, "star-tag", what, "Write * alone."))
    for tag in sorted(tags):
        if "|" in tag:
            what = f"A single | belongs to the tag: {tag!r} is one tag."
            cure = f"Tags are separated by {SEPARATOR}."
            findings.append(_tag_warning(text.index(tag), len(tag), "single-bar", what, cure))
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


def _mend(text: str, finding: Finding) -> str:
    end = finding.position + finding.length
    # Only the marks at the ends: a quoted text keeps what stands between its quotes.
    ends = {finding.position, end - 1}
    return "".join(
        character.translate(LOOK_ALIKES) if at in ends else character
        for at, character in enumerate(text)
    )


def _warnings(text: str, tree: Node, rest: int | None) -> list[Finding]:
    warnings = [*tree_warnings(tree), *mixed_warnings(tree)]
    if rest is None:
        return warnings
    # The last bare property is what remains of a condition that RocketMQ could not read on.
    read = text[:rest].rstrip()
    kept = [
        warning
        for warning in warnings
        if warning.code != "bare-property" or warning.position + warning.length < len(read)
    ]
    return [*kept, rest_warning(text, rest)]


def _tag_warning(position: int, length: int, code: str, what: str, instead: str) -> Finding:
    return Finding(position, length, code, what, instead, Severity.WARNING)
