"""The tables of docs/filtering.md are correct: both engines evaluate every line."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocks import block_of
from sluicemq.filter.check import check_sql92
from sluicemq.filter.plan import evaluate_verdict
from sluicemq.filter.subscriptions import (
    compile_sql92,
    make_filter,
    parse_subscription,
    tag_matches,
)
from sluicemq.model.ids import tag_code

PAGE = Path(__file__).parents[3] / "docs" / "filtering.md"
VERDICTS = ["false", "true", "null", "error"]


def rows(*headings: str) -> list[tuple[str, ...]]:
    """Return the rows of all tables with these headings, without code marks and escapes."""
    return list(_rows(list(headings)))


def _rows(headings: list[str]) -> Iterator[tuple[str, ...]]:
    inside = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells == headings:
            inside = True
        elif not cells:
            inside = False
        elif inside and not set("".join(cells)) <= set("-"):
            yield tuple(
                cell.removeprefix("`").removesuffix("`").replace("\\|", "|") for cell in cells
            )


EVALUATED = rows("expression", "properties", "verdict")
TAGS = rows("subscription", "tag of the message", "delivered")
PITFALLS = rows("you write", "finding", "write")


def properties_of(cell: str) -> dict[str, str]:
    if cell == "none":
        return {}
    return dict(part.split("=", 1) for part in cell.split(", "))  # type: ignore[misc]


def test_the_tables_were_found() -> None:
    assert len(EVALUATED) == 55
    assert len(TAGS) == 10
    assert len(PITFALLS) == 22


@pytest.mark.parametrize(("expression", "cell", "verdict"), EVALUATED)
def test_expression_has_the_verdict_that_the_page_states(
    expression: str, cell: str, verdict: str
) -> None:
    selector, properties = compile_sql92(expression), properties_of(cell)
    assert VERDICTS[evaluate_verdict(selector.evaluate, properties)] == verdict
    block = block_of([{"a": "x"}, properties, {"price": "1"}])
    assert VERDICTS[selector.vectorised.verdicts(block)[1]] == verdict
    assert selector.ignored_start is None


@pytest.mark.parametrize(("expression", "tag", "delivered"), TAGS)
def test_tag_subscription_delivers_what_the_page_states(
    expression: str, tag: str, delivered: str
) -> None:
    subscription = parse_subscription("T", expression)
    text = None if tag == "none" else tag
    made = make_filter(subscription)
    by_broker = made is None or made.by_consume_queue(tag_code(text or ""))
    assert (by_broker and tag_matches(subscription, text)) is (delivered == "yes")


@pytest.mark.parametrize(("wrong", "code", "right"), PITFALLS)
def test_pitfall_is_found_and_its_fix_has_no_findings(wrong: str, code: str, right: str) -> None:
    assert code in [finding.code for finding in check_sql92(wrong)]
    assert check_sql92(right) == []
