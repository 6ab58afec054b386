"""Small tables as lines of text: what ready pipelines show beside what they write."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

_WIDTH_MAX: Final = 60


def table_lines(
    title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], empty: str = "none"
) -> list[str]:
    """A title, the names and the rows in columns; numbers stand to the right."""
    rows = [list(row) for row in rows]
    if not rows:
        return [f"{title}: {empty}"]
    texts = [[_shown(value) for value in row] for row in rows]
    right = [
        all(value is None or _is_number(value) for value in column)
        for column in zip(*rows, strict=True)
    ]
    widths = [
        max(len(name), *(len(text) for text in column))
        for name, column in zip(names, zip(*texts, strict=True), strict=True)
    ]

    def line(values: Sequence[str]) -> str:
        parts = [
            value.rjust(width) if is_right else value.ljust(width)
            for value, width, is_right in zip(values, widths, right, strict=True)
        ]
        return "  " + "  ".join(parts).rstrip()

    return [title, line(names), *map(line, texts)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if _is_number(value):
        return f"{value:,}"
    text = str(value)
    return text if len(text) <= _WIDTH_MAX else text[: _WIDTH_MAX - 1] + "…"
