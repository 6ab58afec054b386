"""Results of the real rocketmq-filter 5.3.2, and ours on the same expressions and properties.

`sql92_cases.jsonl`: 252 cases written by hand, one a rule of the language.
`sql92_random_cases.jsonl`: 1,564 expressions made at random (grammatical ones, loose tokens,
mutations, odd values of properties), with what the Java classes made of them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from sluicemq.errors import FilterEvaluationError, FilterSyntaxError
from sluicemq.filter.subscriptions import compile_sql92

HERE = Path(__file__).parent
NAMES = {True: "true", False: "false", None: "null"}


def cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def result(expression: str, properties: dict[str, str]) -> str:
    try:
        selector = compile_sql92(expression)
    except FilterSyntaxError:
        return "compile_error"
    try:
        return NAMES[selector.evaluate(properties)]
    except FilterEvaluationError:
        return "eval_error"


def delivered(expression: str, properties: dict[str, str]) -> bool:
    try:
        return compile_sql92(expression).matches(properties)
    except FilterSyntaxError:
        return False


def test_all_252_written_cases_are_there() -> None:
    assert len(cases("sql92_cases.jsonl")) == 252


@pytest.mark.parametrize("case", cases("sql92_cases.jsonl"), ids=lambda case: repr(case["expr"]))
def test_written_case_has_the_result_of_java(case: dict[str, Any]) -> None:
    assert result(case["expr"], case["props"]) == case["result"]
    assert delivered(case["expr"], case["props"]) is case["match"]


def test_random_cases_have_the_results_of_java() -> None:
    random_cases = cases("sql92_random_cases.jsonl")
    differing = [
        (case, ours)
        for case in random_cases
        if (ours := result(case["expr"], case["props"])) != case["result"]
    ]
    assert len(random_cases) == 1564
    assert not differing
