import pytest

from sluicemq.filter.nodes import Equal, Literal, Negate, Property, render
from sluicemq.filter.subscriptions import compile_sql92


@pytest.mark.parametrize(
    "text",
    [
        "a = 5", "a <> 'it''s'", "a > 1.50", "5L <= b", "a AND (b OR c) AND NOT (a = b)",
        "a BETWEEN 1 AND - 2", "a NOT BETWEEN b AND c", "a IN ('x', '''')", "a NOT IN ('x')",
        "NOT a CONTAINS 'x'", "(a AND b) NOT ENDSWITH ''", "a = (b IS NULL)", "a = b IS NOT NULL",
        "a = 1 = TRUE", "NULL", "- (a = b) = 1", "NOT NOT a",
    ],
)  # fmt: skip
def test_canonical_text_stays_as_it_is(text: str) -> None:
    assert render(compile_sql92(text).tree) == text


def test_needless_parentheses_are_removed() -> None:
    assert render(compile_sql92("((a) = (5)) AND ((b))").tree) == "a = 5 AND b"


def test_literals_without_text_are_rendered_from_their_value() -> None:
    a = Property("a")
    assert render(Equal(a, Literal("it's"))) == "a = 'it''s'"
    assert render(Equal(a, Literal(value=True))) == "a = TRUE"
    assert render(Equal(a, Negate(Literal(1e22)))) == "a = - 1E+22"
