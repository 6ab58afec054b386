"""What can come of a condition, and what AND, OR, NOT and `=` make of it: sets of verdicts.

A verdict is FALSE, TRUE, NULL or ERROR. Where a property is not known (it is no column, or only the
range of its values is), the outcome is the *set* of verdicts that are possible: four bits, 1 to 15.
A join of conditions is then one look-up: `table[left << 4 | right]`, or `table[operand]`.

The tables are not written down: they are asked of the scalar engine, with a comparison that comes
out as wanted in the place of each operand. So short circuit and errors are what they are there.
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import product

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import Verdict, compile_verdict
from sluicemq.filter.nodes import And, Equal, Literal, Node, Not, Or, Property

FALSE, TRUE, NULL, ERROR, NEEDS_RECORD = range(5)
ALL = 0b1111
IS_TRUE = 1 << TRUE

# A verdict where the set has one member, NEEDS_RECORD where it has more.
VERDICT_OF = bytes([NEEDS_RECORD, *(
    members.bit_length() - 1 if members.bit_count() == 1 else NEEDS_RECORD
    for members in range(1, 16)
)])  # fmt: skip

# `stub = 1` comes out as each verdict with these values of the stub.
_STUB_VALUES: dict[int, str] = {FALSE: "0", TRUE: "1", ERROR: "x"}


def verdict_of(verdict: Verdict, properties: Mapping[str, str]) -> int:
    """The scalar engine's verdict on one message as a number. Never raises."""
    try:
        result = verdict(properties)
    except FilterEvaluationError:
        return ERROR
    return NULL if result is None else int(result)


def stub(number: int) -> Node:
    """An operand that can come out as each of the four verdicts."""
    return Equal(Property(f"stub{number}"), Literal(1))


def lookup_table(node: Node, operands: int) -> bytes:
    """The outcomes of a node whose conditions are `stub(0)` (and `stub(1)`), for all their sets."""
    verdict = compile_verdict(node)
    single = {
        chosen: 1 << verdict_of(verdict, _stub_properties(chosen))
        for chosen in product(range(4), repeat=operands)
    }
    return bytes(_united(single, sets) for sets in product(range(16), repeat=operands))


def _stub_properties(chosen: tuple[int, ...]) -> dict[str, str]:
    return {
        f"stub{number}": _STUB_VALUES[verdict]
        for number, verdict in enumerate(chosen)
        if verdict != NULL
    }


def _united(single: dict[tuple[int, ...], int], sets: tuple[int, ...]) -> int:
    united = 0
    for chosen, outcome in single.items():
        if all(members >> verdict & 1 for members, verdict in zip(sets, chosen, strict=True)):
            united |= outcome
    return united


@cache
def and_table() -> bytes:
    return lookup_table(And((stub(0), stub(1))), 2)


@cache
def or_table() -> bytes:
    return lookup_table(Or((stub(0), stub(1))), 2)


@cache
def not_table() -> bytes:
    return lookup_table(Not(stub(0)), 1)


@cache
def settled(table: bytes) -> frozenset[int]:
    """The left sets of a join that no right side changes: short circuit, and errors."""
    return frozenset(
        left for left in range(1, 16) if set(table[left << 4 | 1 : left + 1 << 4]) == {left}
    )


def union(outcomes: Callable[[str], int], values: tuple[str, ...]) -> int:
    """The set of what comes of some values. Stops when nothing more can be added."""
    united = 0
    for value in values:
        united |= outcomes(value)
        if united == ALL:
            break
    return united
