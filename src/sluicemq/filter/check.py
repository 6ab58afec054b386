"""What a consumer is told before it starts: errors that refuse the expression, and warnings.

An error does not compile (spec/filter.md §6). A warning compiles in RocketMQ and does something
else than it seems to: text after a complete expression is ignored (so it is refused where somebody
writes an expression for us, see `parser.compile_whole`), NOT binds to one word, a bare property is
never true. Look-alike characters of other alphabets are mended in place and the check
goes on, so that one run names all of them and what lies behind them.
"""

from sluicemq.filter.diagnose import LOOK_ALIKE_CODE, LOOK_ALIKES
from sluicemq.filter.findings import Finding, Rejected, Severity, rest_warning, syntax_error
from sluicemq.filter.mixed import mixed_warnings
from sluicemq.filter.nodes import Node
from sluicemq.filter.parser import compile_whole
from sluicemq.filter.tags import SEPARATOR, is_tag_kind, parse_tags, unknown_kind
from sluicemq.filter.uses import TypeNote, type_notes
from sluicemq.filter.warn import tree_warnings
from sluicemq.model.subscription import ALL, SQL92, Subscription

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
