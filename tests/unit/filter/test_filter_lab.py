"""Trials of expressions: counts equal those of a loop over the messages, and findings."""

import random

import orjson
import pytest

from blocks import block_of
from sluicemq.errors import FilterEvaluationError, FilterSyntaxError
from sluicemq.filter.lab import CostClass, Report, Sample, Trial, equivalent_tags
from sluicemq.filter.subscriptions import compile_sql92, parse_subscription, to_tree
from sluicemq.model.subscription import Subscription

Rows = list[dict[str, str]]


def flights(count: int, seed: int = 6) -> Rows:
    rng = random.Random(seed)
    choices = {
        "origin": ["JFK", "EWR", "LGA"],
        "delay": ["-5", "0", "12", "61", "NA", "30.5"],
        "TAGS": ["UA", "AA"],
        "KEYS": [f"k{number}" for number in range(50)],
    }
    return [
        {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.9}
        for _ in range(count)
    ]


def tried(expression: str, rows: Rows, against: str | Subscription | None = None) -> Report:
    trial = Trial(expression, against)
    half = len(rows) // 2
    trial.add_rows(rows[:half], source="q0")
    trial.add_rows(rows[half:], first_offset=half, source="q0")
    return trial.report()


def loop(expression: str, rows: Rows) -> list[str]:
    """Return the result for each message as text, or the reason of its error."""
    selector, found = compile_sql92(expression), []
    for row in rows:
        try:
            found.append(str(selector.evaluate(row)))
        except FilterEvaluationError as error:
            found.append(error.reason)
    return found


@pytest.mark.parametrize(
    "expression",
    ["origin = 'JFK' AND delay > 10", "delay > 10 OR origin = 'JFK'", "delay > 10.0 OR TRUE = TAGS",
     "NOT (origin IN ('JFK', 'EWR')) AND delay BETWEEN 0 AND 60.5", "delay > origin", "TRUE",
     "(origin = 'JFK' OR TAGS = 'AA') = TRUE"],
)  # fmt: skip
def test_counts_and_causes_equal_those_of_a_loop_over_the_messages(expression: str) -> None:
    rows = flights(500)
    report, wanted = tried(expression, rows), loop(expression, rows)
    assert report.rows == 500
    assert report.matched == wanted.count("True")
    assert report.false == wanted.count("False")
    assert report.null == wanted.count("None")
    errors = [found for found in wanted if found not in ("True", "False", "None")]
    assert report.errors == len(errors)
    assert {cause.reason: cause.count for cause in report.causes} == {
        reason: errors.count(reason) for reason in errors
    }
    assert report.unknown == 0
    assert all(wanted[sample.offset] == "True" for sample in report.samples)
    assert len(report.samples) == min(10, report.matched)


def test_samples_are_spread_over_the_history() -> None:
    report = tried("TRUE", flights(1000))
    assert [sample.offset for sample in report.samples] == list(range(0, 1000, 100))
    assert report.samples[0] == Sample("q0", 0)
    assert report.match_rate == 1


def test_atoms_are_counted_by_themselves() -> None:
    rows = [{"a": "1"}, {"a": "9"}, {"a": "x"}, {}]
    report = tried("a > 5 AND NOT (b IS NULL)", rows)
    order, is_null = report.atoms
    assert order.text == "a > 5"
    assert (order.true, order.false, order.null, order.error) == (1, 1, 1, 1)
    assert order.selectivity == 0.25
    assert (is_null.text, is_null.true) == ("b IS NULL", 4)


def test_causes_contain_an_example_and_its_message() -> None:
    (cause,) = tried("a > 5", [{"a": "9"}, {"a": "x"}, {"a": "y"}]).causes
    assert cause.reason == "a is not a whole number of 32 bits (Integer)"
    assert cause.count == 2
    assert "'x'" in cause.example
    assert cause.sample == Sample("q0", 1)


def test_difference_counts_messages_that_only_one_filter_accepts() -> None:
    rows = [{"TAGS": "A"}, {"TAGS": "B"}, {"TAGS": "C"}, {}]
    difference = tried(
        "TAGS = 'A' OR TAGS = 'C'", rows, parse_subscription("T", "A || B")
    ).difference
    assert difference is not None
    assert difference.other == "TAGS IN ('A', 'B')"
    found = (difference.both, difference.only_here, difference.only_there, difference.neither)
    assert found == (1, 1, 1, 1)
    assert [sample.offset for sample in difference.samples_here] == [2]
    assert [sample.offset for sample in difference.samples_there] == [1]


def test_subscriptions_of_all_kinds_can_be_compared() -> None:
    assert to_tree(parse_subscription("T", "*")) == to_tree("TRUE")
    assert to_tree(Subscription("T", "||", "TAG")) == to_tree("FALSE")
    assert to_tree(Subscription("T", "a = 1", "SQL92")) == to_tree("a = 1")
    with pytest.raises(FilterSyntaxError):
        to_tree(Subscription("T", "a", "XPATH"))
    with pytest.raises(FilterSyntaxError):
        Trial("a >")
    with pytest.raises(FilterSyntaxError):
        Trial("a > 5 garbage")


def test_records_are_read_only_where_they_decide() -> None:
    rows = [
        {"a": "9", "KEYS": "x"},
        {"a": "1", "KEYS": "x"},
        {"a": "9", "KEYS": "y"},
        {"KEYS": "z"},
    ]
    block = block_of(rows, first_offset=70, excluded={"KEYS"}, odd=[3])
    asked: list[int] = []

    def properties_of(row: int) -> dict[str, str]:
        asked.append(row)
        return rows[row]

    trial = Trial("a > 5 AND KEYS = 'x'", "KEYS = 'x' AND a > 5")
    trial.add_block(block, "q", properties_of)
    report = trial.report()
    assert asked == [0, 2, 3]
    assert (report.matched, report.false, report.null, report.unknown) == (1, 3, 0, 0)
    assert report.samples == (Sample("q", 70),)
    assert report.cost.cost_class is CostClass.RECORDS
    assert report.cost.records_share == 0.75
    assert report.atoms[1].unknown == 4
    assert report.difference is not None
    assert report.difference.only_here == report.difference.only_there == 0

    without = Trial("a > 5 AND KEYS = 'x'")
    without.add_block(block)
    assert without.report().unknown == 3


def test_an_error_in_a_record_is_a_cause() -> None:
    block = block_of([{"KEYS": "x"}], first_offset=7, excluded={"KEYS"})
    trial = Trial("KEYS > 5")
    trial.add_block(block, "q", lambda row: {"KEYS": "x"})
    (cause,) = trial.report().causes
    assert (cause.count, cause.sample) == (1, Sample("q", 7))


@pytest.mark.parametrize(
    ("expression", "wanted", "tags"),
    [("TRUE OR FALSE", CostClass.CONSTANT, None), ("TAGS = 'A'", CostClass.TAGS, ("A",)),
     ("TAGS = 'A' OR TAGS IN ('B', 'C')", CostClass.TAGS, ("A", "B", "C")),
     ("TAGS <> 'A'", CostClass.COLUMNS, None),
     ("TAGS = 'A' OR TAGS IS NULL", CostClass.COLUMNS, None),
     ("a = 5", CostClass.COLUMNS, None)],
)  # fmt: skip
def test_cost_class_is_the_stage_that_decides(
    expression: str, wanted: CostClass, tags: tuple[str, ...] | None
) -> None:
    cost = tried(expression, flights(10)).cost
    assert cost.cost_class is wanted
    assert equivalent_tags(to_tree(expression)) == tags
    if tags:
        assert " || ".join(tags) in cost.instead


@pytest.mark.parametrize(
    ("expression", "values", "code", "fix"),
    [("a > 30", ["30.5", "31"], "whole-against-fraction", "30.0"),
     ("a >= 0", ["0.5"], "whole-against-fraction", ">= 0 as > -4.9e-324"),
     ("a > 30", ["30.5", "NA"], "text-against-number", "joined by OR"),
     ("a > 30.5", ["NA", "31"], "text-against-number", "strings"),
     ("a = '5'", ["5.0"], "other-spelling", "a = '5.0'"),
     ("a IN ('hz', 'sh')", ["HZ", "sh"], "other-spelling", "a = 'HZ'"),
     ("A > 30", ["31"], "never-there", "Did you mean 'a'?")],
)  # fmt: skip
def test_values_that_cannot_be_compared_get_a_finding_with_a_fix(
    expression: str, values: list[str], code: str, fix: str
) -> None:
    (found,) = tried(expression, [{"a": value} for value in values]).properties
    (finding,) = found.findings
    assert finding.code == code
    assert fix in finding.instead


def test_values_that_can_be_compared_have_no_findings() -> None:
    report = tried("a > 30 AND b = 'x' AND c IS NULL", [{"a": "31", "b": "x", "c": "1"}, {}])
    assert [found.findings for found in report.properties] == [(), (), ()]
    assert [(found.present, found.absent) for found in report.properties] == [(1, 1)] * 3
    assert report.properties[0].examples == ("31",)


def test_a_report_can_be_written_as_json() -> None:
    report = tried("delay > 10", flights(50), parse_subscription("T", "UA"))
    written = orjson.loads(orjson.dumps(report))
    assert written["matched"] == report.matched
    assert written["cost"]["cost_class"] == "columns"
    assert written["difference"]["other"] == "TAGS IN ('UA')"


def test_a_trial_without_messages_divides_nothing_by_zero() -> None:
    report = Trial("a = 1", "b = 1").report()
    assert (report.rows, report.match_rate, report.atoms[0].selectivity) == (0, 0, 0)
    assert report.cost.cost_class is CostClass.COLUMNS
