"""Blocks are skipped if the values and ranges of their columns exclude a match."""

import subprocess
import sys

import pytest

from blocks import block_of
from sluicemq.filter.selector import Vectorised
from sluicemq.filter.subscriptions import compile_sql92, make_filter
from sluicemq.model.subscription import SQL92, ColumnFilter, Subscription
from sluicemq.record.columns import VALUES_MAX, BlockStats, ColumnStats, compute_block_stats
from waiting import limit

MANY = [{"n": str(number), "f": f"{number / 10}", "r": "hz"} for number in range(100, 300)]
STATS = compute_block_stats(block_of(MANY))


def can_match(text: str, stats: BlockStats = STATS) -> bool:
    return compile_sql92(text).vectorised.can_match(stats)


def test_statistics_are_values_if_few_and_ranges_if_many() -> None:
    assert STATS.columns["r"] == ColumnStats(False, ("hz",))
    assert STATS.columns["n"] == ColumnStats(False, None, 100, 299)
    assert STATS.columns["f"] == ColumnStats(False, None, 10.0, 29.9)
    mixed = compute_block_stats(block_of([*MANY, {"n": "x,1", "f": "NaN"}, {"r": "a" * 3000}]))
    assert mixed.columns["n"] == ColumnStats(True, None)
    assert mixed.columns["f"] == ColumnStats(True, None)
    assert mixed.columns["r"].values is None
    assert len(MANY) > VALUES_MAX


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("r = 'sh'", False), ("r = 'hz'", True), ("r IN ('sh', 'bj')", False), ("r IS NULL", False),
     ("r <> 'hz'", False), ("r CONTAINS 'h'", True), ("x = 1", False), ("x IS NULL", True),
     ("n > 299", False), ("n >= 299", True), ("n < 100", False), ("n <= 100", True),
     ("300 > n", True), ("99 > n", False), ("n = 99", False), ("n = 150", True), ("n <> 150", True),
     ("n BETWEEN 300 AND 400", False), ("n BETWEEN 50 AND 100", True),
     ("n NOT BETWEEN 0 AND 999", False),
     ("n > 298.5", True), ("n > 299.0", False), ("n > 3000000000", False), ("f > 29.9", False),
     ("f > 29.8", True), ("f > 30", False), ("f > 20", True), ("NOT (n > 50)", False),
     ("r = 'hz' AND n > 299", False), ("r = 'sh' OR n > 298", True), ("n > f", True),
     ("n = '99'", True), ("(n > 299) = TRUE", False), ("(n > 299) IS NULL", False),
     ("n IS NULL", False), ("n IS NOT NULL", True), ("n", False)],
)  # fmt: skip
def test_a_block_is_read_only_when_it_can_match(text: str, wanted: bool) -> None:
    # A column of many values has statistics for numbers only, so `n = '99'` cannot be excluded.
    assert can_match(text) is wanted


def test_whole_numbers_among_decimals_keep_their_exact_size() -> None:
    rows = [*MANY, {"f": "9007199254740993"}]
    stats = compute_block_stats(block_of(rows))
    assert can_match("f > 9007199254740992", stats)
    assert not can_match("f > 99999", compute_block_stats(block_of([*MANY, {"f": "99999"}])))


def test_a_block_with_unknown_values_can_match() -> None:
    assert can_match("KEYS = 'x'", BlockStats({}, frozenset({"KEYS"})))
    assert not can_match("KEYS = 'x'", BlockStats({}))
    assert not can_match("KEYS = 'x' AND r = 'sh'", BlockStats(STATS.columns, frozenset({"KEYS"})))
    assert can_match("x = 1", BlockStats({}, has_odd=True))
    assert can_match("n = 5", BlockStats({"n": ColumnStats(True, None)}))


def test_the_filter_of_a_sql92_subscription_is_a_column_filter() -> None:
    made = make_filter(Subscription("T", "a > 5 AND b = 'x'", SQL92))
    assert isinstance(made, ColumnFilter)
    assert isinstance(made.vectorised, Vectorised)
    assert made.vectorised is made.vectorised
    assert made.vectorised.names == {"a", "b"}
    assert not isinstance(
        make_filter(Subscription("T", "A", "TAG", frozenset({"A"}))), ColumnFilter
    )


def test_numpy_is_loaded_by_the_first_block() -> None:
    script = (
        "import sys; from sluicemq.filter.subscriptions import make_filter\n"
        "from sluicemq.model.subscription import Subscription\n"
        "from sluicemq.record.columns import BlockStats\n"
        "made = make_filter(Subscription('T', 'a > 5', 'SQL92')).vectorised\n"
        "assert not made.can_match(BlockStats({}))\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=limit(60))
