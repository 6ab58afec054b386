"""The block engine compared with the scalar engine: random expressions on random blocks.

tests/golden compares the scalar engine with results of Java. Here every row of a block must have
the verdict of the scalar engine, on each path through the code (small and large dictionaries, dense
and sparse combinations). A block that is excluded by its statistics must not contain a match.
SLUICEMQ_EXAMPLES sets the number of random expressions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest import mock

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from blocks import block_of
from sluicemq.errors import FilterSyntaxError
from sluicemq.filter import blocks
from sluicemq.filter.nodes import And, Node, Or
from sluicemq.filter.plan import NEEDS_RECORD, TRUE, evaluate_verdict, verdict_tables
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.record import columns as column_stats
from sluicemq.record.columns import compute_block_stats

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("SLUICEMQ_EXAMPLES", "300"))
NAMES = ["a", "b", "c", "TAGS", "KEYS"]
NUMBERS = [
    "0", "5", "-5", "+5", "007", "10", "-10", "42", "99", "2147483647", "2147483648",
    "-2147483648", "-2147483649", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "-9223372036854775809", "000000000000000000000000000005",
]  # fmt: skip
FLOATS = [
    "5.0", "-5.0", "-0.0", "0.0", ".5", "5.", "1e3", "1E-3", "1e400", "-1e400", "5d", "5f", "5L",
    "0x1p3", "NaN", "-NaN", "Infinity", "-Infinity", " 5", "5 ", "\t5.5\n", "4.9e-324", "2e-324",
    "9007199254740993", "9223372036854775807.0", "30.5",
]  # fmt: skip
WORDS = [
    "", " ", "abc", "ABC", "true", "TRUE", "false", "it's", "hz", "Hangzhou", "杭州", "é", "٥", "𝟓",
    "😀", "1_0", "--5", "+", "-", ".", "e", "0x", "1,2", ",", "5,", "null", "NULL", "a b",
]  # fmt: skip
TEXTS = NUMBERS + FLOATS + WORDS

rows_of = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS), max_size=5),
    min_size=1,
    max_size=25,
)
plain_rows_of = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "a": st.integers(-60, 60).map(str),
            "b": st.sampled_from(["x", "y", "5"]),
            "c": st.decimals(-60, 60, places=1, allow_nan=False).map(str),
        },
    ),
    min_size=1,
    max_size=25,
)
literals = st.sampled_from(
    ["0", "5", "10", "42", "5L", "2147483647", "2147483648", "9223372036854775807", "5.0", "0.5",
     "1e3", ".5", "4.9e-324", "30.5", "9223372036854775807.0", "99"]
)  # fmt: skip
strings = st.sampled_from([*TEXTS, "5", "a", "z"]).map(
    lambda text: f"'{text.replace(chr(39), chr(39) * 2)}'"
)
names = st.sampled_from([*NAMES, "a", "a", "b"])
constants = st.sampled_from(["TRUE", "FALSE", "NULL", "true"])
operands = st.one_of(
    names, names, literals, literals.map("-{}".format), literals.map("- -{}".format),
    names.map("-{}".format), literals.map("+{}".format),
)  # fmt: skip
negations = st.sampled_from(["", "NOT "])
matches = st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"])
lists = st.lists(strings, min_size=1, max_size=4).map(", ".join)
orders = st.sampled_from([">", ">=", "<", "<="])
equals = st.sampled_from(["=", "<>"])

atoms = st.one_of(
    st.builds("{} {} {}".format, names, orders, literals),
    st.builds("{} {} {}".format, names, equals, st.one_of(strings, literals, constants)),
    st.builds("{} {} {}".format, operands, orders, operands),
    st.builds("{} {} {}".format, st.one_of(operands, strings, constants), equals,
              st.one_of(operands, strings, constants)),
    st.builds("{} {}BETWEEN {} AND {}".format, operands, negations, operands, operands),
    st.builds("{} {}IN ({})".format, names, negations, lists),
    st.builds("{} {}{} {}".format, st.one_of(names, names, strings), negations, matches, strings),
    st.builds("{} IS {}NULL".format, st.one_of(names, operands), negations),
    constants,
    names,
)  # fmt: skip


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    grouped = inner.map("({})".format)
    return st.one_of(
        st.builds("{} AND {}".format, inner, inner),
        st.builds("{} OR {}".format, inner, inner),
        st.builds("{} AND {}".format, grouped, grouped),
        st.builds("NOT {}".format, grouped),
        st.builds("NOT {}".format, inner),
        st.builds(
            "{} {} {}".format, grouped, equals, st.one_of(grouped, constants, names, literals)
        ),
        st.builds("{} {} {}".format, st.one_of(constants, names), equals, grouped),
        st.builds("{} IS {}NULL".format, grouped, negations),
        st.builds("{} {}{} {}".format, grouped, negations, matches, strings),
    )


expressions = st.recursive(atoms, joined, max_leaves=6)


@contextmanager
def ways(*, small: bool, few: bool) -> Iterator[None]:
    """Use the code for large dictionaries on small ones, and ranges instead of values."""
    with (
        mock.patch.object(blocks, "SCALAR_VALUES_MAX", 48 if small else 0),
        mock.patch.object(blocks, "PAIRS_SCALAR_MAX", 2048 if small else 0),
        mock.patch.object(blocks, "COMBINATIONS_DENSE_MAX", 1 << 20 if small else 0),
        mock.patch.object(blocks, "FEW", 3 if small else 0),
        mock.patch.object(column_stats, "VALUES_MAX", 64 if few else 0),
    ):
        yield


def check(
    selector: Selector, rows: list[dict[str, str]], excluded: frozenset[str], odd: list[int]
) -> None:
    block = block_of(rows, excluded=excluded, odd=odd)
    vectorised = selector.vectorised
    wanted = [evaluate_verdict(selector.evaluate, row) for row in rows]
    unknown = vectorised.names & block.excluded
    for small, few in ((True, True), (False, False)):
        with ways(small=small, few=few):
            found = vectorised.verdicts(block).tolist()
            assert len(found) == len(rows)
            counted = vectorised.count(block)
            assert counted == found.count(TRUE) or (counted is None and (odd or unknown))
            for at, (ours, scalar) in enumerate(zip(found, wanted, strict=True)):
                if ours == NEEDS_RECORD:
                    assert at in odd or unknown, (selector.text, rows[at])
                else:
                    assert ours == scalar, (selector.text, rows[at])
                    assert at not in odd
            if TRUE in wanted:
                assert vectorised.can_match(compute_block_stats(block)), (selector.text, rows)


@pytest.mark.timeout(3600)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(
    expressions,
    rows_of | plain_rows_of,
    st.sampled_from(
        [frozenset[str](), frozenset[str](), frozenset({"KEYS"}), frozenset({"a", "b"})]
    ),
    st.sampled_from([[], [], [0]]),
)
def test_every_row_has_the_verdict_of_the_scalar_engine(
    text: str, rows: list[dict[str, str]], excluded: frozenset[str], odd: list[int]
) -> None:
    try:
        selector = compile_sql92(text)
    except FilterSyntaxError:
        assume(False)
    check(selector, rows, excluded, odd)


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_each_value_against_each_literal(text: str) -> None:
    """Test all values in one dictionary, which needs the slow parser, and each value alone."""
    literals = ["5", "-5", "2147483647", "2147483648", "-2147483649", "5.0", "-5.0", "4.9e-324"]
    symbols = ["=", "<>", ">", ">=", "<", "<="]
    alone, among = [{"a": text}, {}], [{"a": value} for value in [text, *TEXTS]]
    for symbol, literal in product(symbols, literals):
        for expression in (f"a {symbol} {literal}", f"{literal} {symbol} a"):
            selector = compile_sql92(expression)
            check(selector, alone, frozenset(), [])
            check(selector, among[:8], frozenset(), [])


@pytest.mark.parametrize("symbol", ["=", "<>", ">", ">=", "<", "<="])
def test_each_value_against_each_other(symbol: str) -> None:
    rows = [{"a": first, "b": second} for first in TEXTS for second in TEXTS]
    rows += [{}, *({name: text} for name in "ab" for text in TEXTS)]
    check(compile_sql92(f"a {symbol} b"), rows, frozenset(), [])


@pytest.mark.parametrize("kind", [And, Or])
def test_joins_may_be_grouped_in_any_way(kind: type[And] | type[Or]) -> None:
    """Check (p q) r = p (q r) for all verdict sets, because `plan` groups neighbouring parts."""
    look_up = verdict_tables()[kind]
    for p, q, r in product(range(1, 16), repeat=3):
        assert look_up[look_up[p << 4 | q] << 4 | r] == look_up[p << 4 | look_up[q << 4 | r]]


@pytest.mark.slow
def test_a_chain_of_thousands_of_parts_does_not_recurse() -> None:
    text = " OR ".join(
        f"a = {number}" if number % 2 else f"b = '{number}'" for number in range(2400)
    )
    selector = compile_sql92(text)
    check(selector, [{"a": "2399"}, {"b": "2398"}, {"a": "x"}, {}], frozenset(), [])
    tree: Node = selector.tree
    assert isinstance(tree, Or)
