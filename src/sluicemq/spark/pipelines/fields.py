"""Declared fields of a mapping: their texts become values of the declared kinds, or problems.

The sinks of a file and the ready pipelines' `with:` declare their fields alike (`ready.Field`), so
they are checked by the same hand: unknown names with the nearest one, missing ones, bad values.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sluicemq.spark.pipelines.document import Entry, nearest
from sluicemq.spark.pipelines.ready import (
    DURATION,
    FLAG,
    INTEGER,
    LIST,
    MAPPING,
    NUMBER,
    REQUIRED,
    TEXT,
    Field,
)

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def duration_s(text: str) -> float:
    """`90s`, `15m`, `6h`, `7d`, `500ms` -> seconds. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError("write a number with a unit: 500ms, 90s, 15m, 6h or 7d")
    return float(found[1]) * _UNIT_S[found[2]]


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d[\d_]*", text.strip()):
        raise ValueError("write a whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("write a number") from None


def _flag(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return text.strip().lower() == "true"


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


_SCALARS: Final[Mapping[str, Callable[[str], Any]]] = {
    TEXT: _text, INTEGER: _integer, NUMBER: _number, FLAG: _flag, DURATION: duration_s,
}  # fmt: skip


def read_fields(
    entries: Mapping[str, Entry], fields: Sequence[Field], owner: Entry, what: str
) -> dict[str, Any]:
    """Every declared field by name, defaults filled in. `what` says whose fields they are; a
    missing one is a problem of the owner's line."""
    by_name = {one.name: one for one in fields}
    values = {one.name: one.default for one in fields if one.default is not REQUIRED}
    for name, entry in entries.items():
        if name not in by_name:
            entry.problem(f"{what} has no such key.", nearest(name, by_name))
        else:
            value = read_field(entry, by_name[name])
            if value is not None:
                values[name] = value
    for one in fields:
        if one.default is REQUIRED and one.name not in entries:
            owner.problem(f"{what} needs the key {one.name!r}.", one.what)
    return values


def read_field(entry: Entry, one: Field) -> Any:
    """The value, or None with a problem."""
    if one.kind == LIST:
        return _listed(entry, one)
    if one.kind == MAPPING:
        found = {name: inner.scalar() for name, inner in (entry.mapping() or {}).items()}
        return {name: text for name, text in found.items() if text is not None}
    text = entry.scalar()
    if text is None:
        return None
    try:
        value = _SCALARS[one.kind](text)
    except ValueError as error:
        entry.problem(f"it is {text!r}: {error}.")
        return None
    return _said(entry, one, value)


def _listed(entry: Entry, one: Field) -> list[str] | None:
    """A list of texts; a single text is a list of one."""
    entries = [entry] if isinstance(entry.node.value, str) else entry.items()
    texts = [inner.scalar() for inner in entries or ()]
    return [text for text in texts if text is not None and _said(entry, one, text) is not None]


def _said(entry: Entry, one: Field, value: Any) -> Any:
    if one.words and value not in one.words:
        entry.problem(f"it is {value!r}.", f"It can be {' or '.join(one.words)}.")
        return None
    return value
