"""Errors and warnings of the subscription check (issue 3, section 5)."""

import pytest

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.check import FINDINGS_MAX, check_sql92, check_subscription, check_tags
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.subscription import SQL92, Subscription

# expression, the text that the warning marks, its code, words of its fix
SURPRISING = [
    ("a = 5 garbage", "garbage", "ignored-text", "AND or OR"),
    ("a = 5)", ")", "ignored-text", "Remove the parenthesis"),
    ("a = 2 + 3", "+ 3", "ignored-text", "computed number"),
    ("a LIKE 'x%'", "LIKE 'x%'", "ignored-text", "STARTSWITH"),
    ("b = 1 AND a like 'x%'", "like 'x%'", "ignored-text", "STARTSWITH"),
    ("order-id = 5", "-id = 5", "ignored-text", "order_id"),
    ("a = 0x5", "x5", "ignored-text", "no 0x"),
    ("a = 010", "10", "ignored-text", "no leading zero"),
    ("a = 1_000", "_000", "ignored-text", "1_000"),
    ("a = 5 -- note", "-- note", "open-comment", "line break"),
    ("NOT a = 5", "NOT", "not-binds-tight", "NOT (a = 5)"),
    ("NOT a IS NULL", "NOT", "not-binds-tight", "parentheses"),
    ("NOT a CONTAINS 'x'", "NOT", "not-binds-tight", "parentheses"),
    ("a = 1 AND vip", "vip", "bare-property", "vip = TRUE"),
    ("NOT vip", "vip", "bare-property", "IS NOT NULL"),
    ("TRUE = vip", "=", "boolean-on-left", "vip = TRUE."),
    ("(a = 1) = 5", "=", "boolean-and-number", "= TRUE"),
    ("1 = 2", "=", "constant", "property"),
    ("5 <> a", "5", "constant-on-left", "a <> 5"),
    ("a = -b", "-", "minus", "before the number"),
    ("a > 5L", "5L", "long-suffix", "5.0"),
    ("a CONTAINS ''", "CONTAINS", "empty-search", "IS NOT NULL"),
]


@pytest.mark.parametrize(
    ("text", "place", "code", "fix"), SURPRISING, ids=[row[0] for row in SURPRISING]
)
def test_a_surprising_expression_gets_one_warning(
    text: str, place: str, code: str, fix: str
) -> None:
    (finding,) = check_sql92(text)
    assert not finding.is_error
    assert text[finding.position : finding.position + finding.length] == place
    assert finding.code == code
    assert fix in finding.instead


@pytest.mark.parametrize(
    "text",
    ["a = 5", "a IS NOT NULL AND (a = 'abc' OR a <> 'def')", "a BETWEEN -5 AND 100", "TRUE",
     "NOT (a = 5)", "a = TRUE", "TAGS IN ('A', 'B') OR a > 2147483648L", "a = '“”（'",
     "a = 5 -- note\n", "origin = 'JFK' AND dep_delay BETWEEN 60 AND 2000"],
)  # fmt: skip
def test_good_expressions_have_no_findings(text: str) -> None:
    assert check_sql92(text) == []


def test_typographic_quotes_and_the_fault_behind_them_are_both_reported() -> None:
    findings = check_sql92("a IS NOT NULL AND a > ‘abc’")
    assert [finding.code for finding in findings] == ["look-alike", "order-string"]
    assert all(finding.is_error for finding in findings)


def test_every_look_alike_is_reported_and_also_the_faults_behind_them() -> None:
    text = "（a ＝ 5）AND NOT b = “x”"
    findings = check_sql92(text)
    assert [text[finding.position] for finding in findings] == ["（", "＝", "）", "N", "“"]
    assert [finding.is_error for finding in findings] == [True, True, True, False, True]


def test_number_of_findings_is_limited() -> None:
    assert len(check_sql92("（" * 1000)) == FINDINGS_MAX


def test_check_of_a_subscription_raises_errors_and_returns_warnings() -> None:
    with pytest.raises(FilterSyntaxError, match="numbers only"):
        check_subscription(Subscription("T", "a > 'x'", SQL92))
    (finding,) = check_subscription(Subscription("T", "NOT a = 5", SQL92))
    assert finding.code == "not-binds-tight"
    with pytest.raises(FilterSyntaxError, match=r"(?s)not valid at character 7.*ignore") as refused:
        check_subscription(Subscription("T", "a = 5 garbage", SQL92))
    assert "AND or OR" in str(refused.value)
    with pytest.raises(FilterSyntaxError, match="kind of filter"):
        check_subscription(Subscription("T", "x", "XPATH"))


def test_surprising_tag_expressions_get_warnings() -> None:
    assert check_subscription(parse_subscription("T", "A || B")) == []
    assert check_tags("*") == []
    assert [finding.code for finding in check_tags(" || ")] == ["no-tag"]
    assert [finding.code for finding in check_tags("A||*")] == ["star-tag"]
    (finding,) = check_tags("A||B|C")
    assert (finding.code, finding.position, finding.length) == ("single-bar", 3, 3)
    with pytest.raises(FilterSyntaxError):
        check_tags("||")
