"""The 252 written cases and the 1,564 random ones, with the results of the real RocketMQ filter.

Each is evaluated as a block of one row, and with its row among others that have the same properties
with other values, spread over several blocks.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from blocks import block_of
from sluicemq.errors import FilterSyntaxError
from sluicemq.filter import blocks
from sluicemq.filter.plan import NEEDS_RECORD, TRUE, evaluate_verdict
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.record.columns import compute_block_stats

GOLDEN = Path(__file__).parents[1] / "golden"
RESULTS = ["false", "true", "null", "eval_error"]
OTHERS = ["5", "-7", "5.0", "abc", "", "true", "2147483648", "x y", "0", "hz", "it's", "NaN"]


def cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def selector_of(case: dict[str, Any]) -> Selector | None:
    try:
        return compile_sql92(case["expr"])
    except FilterSyntaxError:
        return None


def properties_of(case: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in (case["props"] or {}).items() if value is not None}


def differing(case: dict[str, Any], rng: random.Random) -> list[str]:
    """Return the differences between the blocks and Java for a case that compiles."""
    selector = selector_of(case)
    if selector is None:
        return []
    properties = properties_of(case)
    vectorised = selector.vectorised
    names = sorted(vectorised.names | properties.keys())
    found = []
    for others in (0, 3, 30):
        rows = [
            {name: rng.choice(OTHERS) for name in names if rng.random() < 0.7}
            for _ in range(others)
        ]
        at = rng.randrange(others + 1)
        rows.insert(at, properties)
        block = block_of(rows)
        verdicts = vectorised.verdicts(block).tolist()
        if RESULTS[verdicts[at]] != case["result"]:
            found.append(f"{case['expr']} on {properties}: {RESULTS[verdicts[at]]}")
        if verdicts != [evaluate_verdict(selector.evaluate, row) for row in rows]:
            found.append(f"{case['expr']}: not what the scalar engine says on {rows}")
        if case["result"] == "true" and not vectorised.can_match(compute_block_stats(block)):
            found.append(f"{case['expr']}: a block with a match would be left out")
    return found


@pytest.mark.parametrize("values_max", [0, 48], ids=["large dictionaries", "small dictionaries"])
@pytest.mark.parametrize("name", ["sql92_cases.jsonl", "sql92_random_cases.jsonl"])
def test_blocks_have_the_results_of_java(
    name: str, values_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SCALAR_VALUES_MAX", values_max)
    rng = random.Random(6)
    wrong = [text for case in cases(name) for text in differing(case, rng)]
    assert not wrong, "\n".join(wrong)
    compiled = sum(selector_of(case) is not None for case in cases(name))
    assert compiled == sum(case["result"] != "compile_error" for case in cases(name))


def test_an_excluded_property_needs_the_record_only_where_it_decides() -> None:
    rows = [{"a": "1", "KEYS": "x"}, {"a": "9", "KEYS": "x"}, {"KEYS": "x"}, {"a": "y"}]
    block = block_of(rows, excluded={"KEYS"})
    for text, wanted in (
        ("KEYS = 'x' AND a > 5", [0, NEEDS_RECORD, NEEDS_RECORD, NEEDS_RECORD]),
        ("a > 5 AND KEYS = 'x'", [0, NEEDS_RECORD, NEEDS_RECORD, 3]),
        ("a > 5 OR KEYS = 'x'", [NEEDS_RECORD, TRUE, NEEDS_RECORD, 3]),
        ("a = KEYS", [NEEDS_RECORD] * 4),
    ):
        verdicts = compile_sql92(text).vectorised.verdicts(block)
        assert verdicts.tolist() == wanted, text
