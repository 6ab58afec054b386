"""Errors of expressions that do not compile: position, fact and fix (issue 3, section 5)."""

import re

import pytest
from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.subscriptions import compile_complete, compile_sql92

# expression, the text at which the error is marked, words of the fact, words of the fix
REFUSED = [
    # Order operators and BETWEEN compare numbers, IN accepts strings.
    ("a > 'abc'", "'abc'", "numbers only", "STARTSWITH"),
    ("a > '100'", "'100'", "is a string", "without quotes: 100"),
    ("'x' < a", "'x'", "numbers only", "="),
    ("a BETWEEN 'x' AND 'y'", "'x'", "BETWEEN compares numbers only", "IN"),
    ("a NOT BETWEEN 1 AND '9'", "'9'", "NOT BETWEEN compares numbers only", "without quotes: 9"),
    ("a BETWEEN 9 AND 1", "1", "below the first", "BETWEEN 1 AND 9"),
    ("a BETWEEN 1, 9", ",", "comma", "BETWEEN 1 AND 10"),
    ("a BETWEEN 1", "", "Unexpected end", "Add AND and an upper bound"),
    ("a BETWEEN 1 OR 2", "OR", "not allowed", "Write AND and an upper bound"),
    ("a IN (5)", "5", "only strings, and 5 is a number", "'5'"),
    (
        "a IN ('x', b)",
        "b",
        "only strings, and b is the name",
        "every value in single quotes: IN ('x', 'b').",
    ),
    ("a IN (1, 2.5)", "1", "only strings, and 1 is a number", "IN ('1', '2.5')."),
    (
        "a IN (1, 'it''s')",
        "1",
        "only strings",
        "every value in single quotes, as in IN ('x', 'y').",
    ),
    ("a IN ()", ")", "missing", "IN ('x', 'y')"),
    ("a IN ('x',)", ")", "missing", "IN ('x', 'y')"),
    ("a IN 'x'", "'x'", "parentheses", "IN ('x', 'y')"),
    ("5 IN ('5')", "5", "property on its left", "IN ('x', 'y')"),
    ("NOT a IN ('x')", "NOT", "next word only", "a NOT IN"),
    # Copied from an article.
    ("a IS NOT NULL AND a = ‘abc’", "‘abc’", "typographic", "'abc'"),
    ("a = “杭州”", "“杭州”", "typographic", "'杭州'"),
    ("（a = 5）", "（", "U+FF08", "plain ("),
    ("a IN ('x'，'y')", "，", "U+FF0C", "plain ,"),
    ("a ＝ 5", "＝", "U+FF1D", "plain ="),
    ("a ＞ 5", "＞", "U+FF1E", "plain >"),
    ("a ＜ 5", "＜", "U+FF1C", "plain <"),
    ("a\u00a0= 5", "\u00a0", "U+00A0", "plain space"),
    ("a ≠ 5", "≠", "not an SQL92 operator", "<>"),
    # Habits of other languages.
    ('a = "x y"', '"x y"', "single quotes", "'x y'"),
    ("`a` = 5", "`", "must not be in quotes", "without quotes"),
    ("a != 5", "!=", "not an SQL92 operator", "<>"),
    ("a == 5", "== 5", "==", "Use = instead, as in a = 3."),
    ("a => 5", "=>", "=>", "Use >= instead"),
    ("a =< 5", "=<", "=<", "Use <= instead"),
    ("a = 5 && b = 6", "&&", "not an SQL92 operator", "AND"),
    ("a = 5 || b = 6", "||", "not an SQL92 operator", "OR"),
    ("!a", "!", "not an SQL92 operator", "NOT"),
    ("a.b = 5", ".", "cannot contain dots", "order_id"),
    ("a = 5;", ";", "semicolon", "Remove"),
    ("a % 2 = 1", "%", "arithmetic", "computed"),
    ("(a LIKE 'x%')", "LIKE", "do not support LIKE", "CONTAINS"),
    ("a NOT LIKE 'x%'", "LIKE", "do not support LIKE", "CONTAINS"),
    ("a CONTAINS b", "b", "string in quotes", "CONTAINS 'x'"),
    ("属性 = 5", "属", "property name", "Rename"),
    ("1a = 5", "1a", "begin with a digit", "Rename"),
    ("between = 5", "between", "reserved word", "Rename"),
    # Left open.
    ("a = 'x", "'x", "not closed", "Add a single quote"),
    ("a = 5 /* x", "/* x", "not closed", "*/"),
    ("(a = 5", "(", "not closed", "closing parenthesis"),
    ("(a = ')' AND b = 5", "(", "not closed", "closing parenthesis"),
    ("(a = 5 b = 6)", "b", "character 1 is open", "closing parenthesis"),
    ("a = 5 AND ", "", "Unexpected end", "Add a condition after AND"),
    ("", "", "The SQL92 expression is empty", "TRUE"),
    ("/* a */", "", "Unexpected end", "Add a condition, as in price > 3"),
    # What can follow the last token.
    ("b >", "", "Unexpected end", "Add a number or the name of a property after >, as in b > 3."),
    ("b > )", ")", "not allowed", "Write a number or the name of a property after >, as in b > 3."),
    ("b <>", "", "Unexpected end", "a value after <>, as in b <> 3 or b <> 'red'"),
    ("b =", "", "Unexpected end", "a value after =, as in b = 3 or b = 'red'"),
    ("b BETWEEN", "", "Unexpected end", "two bounds after BETWEEN, as in b BETWEEN 1 AND 10"),
    (
        "b NOT BETWEEN 1 AND",
        "",
        "Unexpected end",
        "an upper bound after AND, as in b BETWEEN 1 AND",
    ),
    ("b > 1 OR", "", "Unexpected end", "a condition after OR"),
    ("b IN", "", "Unexpected end", "a list of strings after IN, as in b IN ('x', 'y')"),
    ("b IN ('x',", "", "Unexpected end", "and a closing parenthesis, as in b IN ('x', 'y')"),
    ("b NOT CONTAINS", "", "Unexpected end", "a string in single quotes after CONTAINS"),
    ("b NOT", "", "Unexpected end", "as in b NOT IN ('x', 'y')"),
    ("b NOT 5", "5", "not allowed", "Write IN, BETWEEN, CONTAINS"),
    ("NOT", "", "Unexpected end", "NOT (price > 3)"),
    ("b IS", "", "Unexpected end", "NULL or NOT NULL after IS, as in b IS NULL"),
    ("b IS NOT", "", "Unexpected end", "NULL after NOT, as in b IS NOT NULL"),
    ("b > -", "", "Unexpected end", "a number after -"),
    ("(", "", "Unexpected end", "a condition and a closing parenthesis"),
    ("(a = 5 /* ) */ b", "b", "not allowed", "Write a closing parenthesis."),
    # Classes.
    ("a = NULL", "NULL", "cannot be compared", "IS NULL"),
    ("a > NULL", "NULL", "numbers only", "IS NULL"),
    ("a > TRUE", "TRUE", "numbers only", "= TRUE"),
    ("TRUE = 1", "TRUE", "constant 1", "no property"),
    ("a > 1 > 0", ">", "condition", "AND"),
    ("NOT a > 5", "NOT", "next word only", "NOT (a > 5)"),
    ("a = 5 AND 7", "7", "not a condition", "Compare"),
    ("a = 0.0", "0.0", "at least 4.9e-324", "write 0"),
    ("a = 1e400", "1e400", "too large", "1.797"),
    ("a = 9223372036854775808", "9223372036854775808", "64 bits", "9223372036854775808.0"),
    ("a IS 5", "5", "NULL or NOT NULL", "="),
]


@pytest.mark.parametrize(("text", "fault", "what", "fix"), REFUSED, ids=[row[0] for row in REFUSED])
def test_error_marks_the_fault_and_says_the_fix(text: str, fault: str, what: str, fix: str) -> None:
    with pytest.raises(FilterSyntaxError) as caught:
        compile_sql92(text)
    error = caught.value
    assert text[error.position :].startswith(fault)
    assert what in str(error).split("^\n")[-1]
    assert fix in error.fix


@pytest.mark.parametrize(
    ("text", "name", "position"),
    [
        ("lower(a) = 'x'", "lower", 0),
        ("$lower (a) = 'x'", "$lower", 0),
        ("a = 1 AND f(b)", "f", 10),
    ],
)
def test_a_function_is_refused_with_the_rule(text: str, name: str, position: int) -> None:
    rule = f"do not support functions: RocketMQ reads {re.escape(name)} as a property name and"
    with pytest.raises(FilterSyntaxError, match=rule) as refused:
        compile_complete(text)
    assert refused.value.position == position


def test_an_empty_expression_is_refused_without_a_line_of_carets() -> None:
    with pytest.raises(FilterSyntaxError) as refused:
        compile_sql92(" ")
    text = "The SQL92 expression is empty. Write TRUE to match all messages."
    assert str(refused.value) == text
    assert CliRunner().invoke(main, ["filter", "check", " "]).output == f"{text}\n"


@pytest.mark.parametrize("text", ["a IS NULL (b)", "a = TRUE (b)", "a = 5 (b)", "a = 'x' (b)"])
def test_a_parenthesis_after_a_value_is_no_function(text: str) -> None:
    with pytest.raises(FilterSyntaxError, match="because the condition before it is complete"):
        compile_complete(text)


def test_error_shows_the_expression_with_carets() -> None:
    with pytest.raises(FilterSyntaxError) as caught:
        compile_sql92("price > 'abc'")
    assert str(caught.value).splitlines() == [
        "The SQL92 expression does not compile at character 9:",
        "    price > 'abc'",
        "            ^^^^^",
        "> compares numbers only, and 'abc' is a string. "
        "Strings can be compared with =, <>, IN, STARTSWITH, ENDSWITH and CONTAINS.",
    ]
