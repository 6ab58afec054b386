"""Expressions that nearly are SQL92: tokens of the grammar in any order, and bombs."""

from random import Random
from typing import Final

_TOKENS: Final = (
    "a", "b", "color", "a.b", "$x", "_", "TRUE", "FALSE", "NULL", "NOT", "AND", "OR", "IS",
    "IS NULL", "IS NOT NULL", "IN", "IN ('x','y')", "NOT IN ('x')", "BETWEEN", "BETWEEN 1 AND 5",
    "CONTAINS 'x'", "STARTSWITH 'x'", "ENDSWITH", "=", "<>", "<", "<=", ">", ">=", "+", "-", "(",
    ")", ",", "1", "0", "-1", "9223372036854775807", "9223372036854775808", "1.5", "1e400", ".5",
    "0x10", "1L", "'x'", "''", "'it''s'", "'", '"x"', "--", "-- c\n", "/* c */", "/*", "*/",
    "а", "“x”", "\0", "😀", "\ud800", "\n", "\t", "LIKE", "%", "a = 1", "b = 'x'", "a > b",
)  # fmt: skip
_BOMBS: Final = ("(", "NOT ", "-", "- ", "+-", "a=1 OR ", "'x',", "'", "''", "--", "/*", "a", "9")


def expression(rng: Random) -> str:
    """One."""
    kind = rng.random()
    if kind < 0.45:
        words = rng.choices(_TOKENS, k=1 + int(rng.random() * 14))
        return (" " if kind < 0.4 else "").join(words)
    if kind < 0.98:
        parts = rng.randint(1, 6)
        return rng.choice((" AND ", " OR ", ")OR(")).join(_condition(rng) for _ in range(parts))
    begin, end = rng.choice((("", "1"), ("a IN (", ")"), ("a = ", ""), ("(", "a = 1")))
    return begin + rng.choice(_BOMBS) * rng.choice((10, 201, 1000, 3000)) + end


def _condition(rng: Random) -> str:
    left, right = rng.choices(_TOKENS, k=2)
    return f"{left} {rng.choice(('=', '<>', '>', 'BETWEEN 1 AND', 'IS NOT', 'IN'))} {right}"
