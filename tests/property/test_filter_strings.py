"""Arbitrary text raises only FilterSyntaxError, and the check agrees with the compilation."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluicemq.errors import FilterEvaluationError, FilterSyntaxError
from sluicemq.filter.check import check_sql92, check_tags
from sluicemq.filter.findings import caret_lines
from sluicemq.filter.subscriptions import (
    TagFilter,
    compile_sql92,
    parse_subscription,
    parse_tags,
    tag_matches,
)
from sluicemq.model.ids import tag_code

PIECES = [
    "a", "b", "NOT", "AND", "OR", "BETWEEN", "IN", "IS", "NULL", "TRUE", "CONTAINS", "LIKE", "=",
    "<>", ">", "<=", "(", ")", ",", "+", "-", "5", "0", "1.5", "0.0", "'x'", "''", "'", '"', "‘x’",
    "（", "）", "，", "＝", "--", "\n", "/*", "*/", "#", "!=", "==", "&&", "||", ".", "\u00a0",
    "5L", "9223372036854775808", "1e400", "\ud83d", "\x00", "é",
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES), max_size=12).flatmap(
    lambda found: st.sampled_from([" ", ""]).map(lambda joint: joint.join(found))
)
texts = st.text(max_size=40) | pieces
tags = st.text(st.characters(blacklist_characters="|"), min_size=1).filter(
    lambda tag: tag.strip("".join(map(chr, range(33)))) == tag and tag != "*"
)


@settings(max_examples=100, deadline=None)
@given(texts, st.dictionaries(st.sampled_from(["a", "b"]), st.text(max_size=5)))
@example("", {})
@example("\ud83d", {})
def test_arbitrary_text_raises_only_filter_errors(text: str, properties: dict[str, str]) -> None:
    try:
        selector = compile_sql92(text)
    except FilterSyntaxError:
        return
    try:
        assert selector.evaluate(properties) in (True, False, None)
    except FilterEvaluationError:
        assert selector.matches(properties) is False


@settings(max_examples=100, deadline=None)
@given(texts)
def test_check_has_an_error_exactly_when_it_does_not_compile(text: str) -> None:
    findings = check_sql92(text)
    try:
        compile_sql92(text)
        compiles = True
    except FilterSyntaxError:
        compiles = False
    assert compiles is not any(finding.is_error for finding in findings)
    for finding in findings:
        assert 0 <= finding.position <= len(text)
        assert finding.length >= 1
        assert finding.what
        line, carets = caret_lines(text, finding.position, finding.length)
        assert "^" in carets
        assert "\n" not in line


@settings(max_examples=100, deadline=None)
@given(st.lists(tags, min_size=1, max_size=5), tags)
def test_a_filter_passes_its_tags_and_the_client_only_them(wanted: list[str], other: str) -> None:
    subscription = parse_subscription("T", " || ".join(wanted))
    passes = TagFilter(subscription).by_consume_queue
    assert subscription.tags == set(wanted)
    assert all(passes(tag_code(tag)) and tag_matches(subscription, tag) for tag in wanted)
    assert tag_matches(subscription, other) is (other in wanted)
    assert passes(tag_code(other)) is (tag_code(other) in map(tag_code, wanted))


@settings(max_examples=100, deadline=None)
@given(texts)
def test_arbitrary_tag_expressions_raise_only_filter_syntax_errors(text: str) -> None:
    try:
        expression, found, codes = parse_tags(text)
    except FilterSyntaxError:
        assert set(text) == {"|"}
        return
    assert len(codes) <= len(found)
    assert expression == (text or "*")
    assert all(finding.position < max(1, len(text)) for finding in check_tags(text))
