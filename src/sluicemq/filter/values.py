"""The values that the properties of an expression really have, beside how it reads them.

`price > 30` on values such as '30.5' is an error for each of them, and `Price` is no `price`: what
no check of the expression alone can know, and what loses the most messages.
"""

from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches

from sluicemq.filter.java import double_or_none, integer_or_none, long_or_none
from sluicemq.filter.nodes import Equal, In, JavaClass, Literal, Node, levels, property_names
from sluicemq.filter.uses import Use, float_cure, property_uses
from sluicemq.record.columns import Column, ColumnBlock

EXAMPLES_MAX = 3
NAMES_MAX = 1000
VALUES_KEPT_MAX = 1000
_OR_NONE = {
    JavaClass.INTEGER: integer_or_none,
    JavaClass.LONG: long_or_none,
    JavaClass.DOUBLE: double_or_none,
}


@dataclass(frozen=True, slots=True)
class ValueFinding:
    """What the values tell: the fact, and what to write instead."""

    code: str
    what: str
    instead: str


@dataclass(frozen=True, slots=True)
class PropertyReport:
    """A property of the expression: how many messages have it, how many values it has (at least,
    when `is_excluded`: it is no column), and what is wrong with them."""

    name: str
    present: int
    absent: int
    is_excluded: bool
    examples: tuple[str, ...]
    findings: tuple[ValueFinding, ...]


@dataclass(slots=True)
class _Seen:
    present: int = 0
    excluded: bool = False
    values: Counter[str] = field(default_factory=Counter)
    failing: dict[JavaClass, int] = field(default_factory=dict)
    fractional: dict[JavaClass, int] = field(default_factory=dict)
    examples: dict[JavaClass, list[str]] = field(default_factory=dict)


class ValueCounts:
    """Counts over any number of blocks."""

    def __init__(self, tree: Node) -> None:
        self._tree = tree
        self._seen = {name: _Seen() for name in sorted(property_names(tree))}
        self._uses = property_uses(tree)
        self._names: set[str] = set()
        self._rows = 0
        self.excluded: frozenset[str] = frozenset()

    def add(self, block: ColumnBlock) -> None:
        """Another block."""
        self._rows += block.rows
        self.excluded |= block.excluded
        if len(self._names) < NAMES_MAX:
            self._names |= block.columns.keys() | block.excluded
        for name, seen in self._seen.items():
            seen.excluded |= name in block.excluded
            if column := block.columns.get(name):
                self._add_column(name, seen, column)

    def report(self) -> tuple[PropertyReport, ...]:
        """One for each property of the expression, by name."""
        return tuple(
            PropertyReport(
                name,
                seen.present,
                self._rows - seen.present,
                seen.excluded,
                tuple(value for value, _ in seen.values.most_common(EXAMPLES_MAX)),
                tuple(self._findings(name, seen)),
            )
            for name, seen in self._seen.items()
        )

    def _add_column(self, name: str, seen: _Seen, column: Column) -> None:
        import numpy as np  # noqa: PLC0415 - with the first block

        counts = np.bincount(column.codes + 1, minlength=len(column.values) + 1)[1:].tolist()
        seen.present += sum(counts)
        if len(seen.values) < VALUES_KEPT_MAX:
            for value, count in zip(column.values[:VALUES_KEPT_MAX], counts, strict=False):
                seen.values[value] += count
        for read_as in {use.read_as for use in self._uses if use.name == name}:
            if or_none := _OR_NONE.get(read_as):
                for value, count in zip(column.values, counts, strict=True):
                    if or_none(value) is None:
                        self._add_failing(seen, read_as, value, count)

    def _add_failing(self, seen: _Seen, read_as: JavaClass, value: str, count: int) -> None:
        seen.failing[read_as] = seen.failing.get(read_as, 0) + count
        if double_or_none(value) is not None:
            seen.fractional[read_as] = seen.fractional.get(read_as, 0) + count
        examples = seen.examples.setdefault(read_as, [])
        if len(examples) < EXAMPLES_MAX and value not in examples:
            examples.append(value)

    def _findings(self, name: str, seen: _Seen) -> list[ValueFinding]:
        if not seen.present and not seen.excluded and self._rows:
            return [self._never_there(name)]
        findings = [
            _not_convertible(use, seen)
            for use in {
                use.read_as: use for use in reversed(self._uses) if use.name == name
            }.values()
            if seen.failing.get(use.read_as)
        ]
        if not seen.excluded and len(seen.values) < VALUES_KEPT_MAX:
            findings += [
                finding
                for text in _wanted_strings(self._tree, name)
                if (finding := _other_spelling(name, text, seen.values))
            ]
        return findings

    def _never_there(self, name: str) -> ValueFinding:
        lower = {known.lower(): known for known in self._names}
        near = lower.get(name.lower()) or next(iter(get_close_matches(name, self._names, 1)), "")
        what = f"None of the {self._rows} messages has a property {name}."
        cure = f"Is it {near}? Names are case-sensitive." if near else "Ask the producer for it."
        return ValueFinding("never-there", what, cure)


def _not_convertible(use: Use, seen: _Seen) -> ValueFinding:
    failing, shown = seen.failing[use.read_as], ", ".join(map(repr, seen.examples[use.read_as]))
    what = (
        f"{failing} of {seen.present} values of {use.name} are no {use.read_as.value} "
        f"({shown}): beside {use.text} they are errors, and the messages do not match."
    )
    if seen.fractional.get(use.read_as) == failing:
        return ValueFinding("whole-against-fraction", what, float_cure(use.text))
    cure = f"Compare text as strings ({use.name} = 'x') before it, joined by OR."
    if seen.fractional.get(use.read_as):
        cure = f"For those that are numbers: {float_cure(use.text)} {cure}"
    return ValueFinding("text-against-number", what, cure)


def _wanted_strings(tree: Node, name: str) -> list[str]:
    """The strings that the expression compares the property with."""
    wanted: list[str] = []
    for level in levels(tree):
        for node in level:
            match node:
                case Equal(left=left, right=Literal(value=str(text))):
                    if getattr(left, "name", None) == name:
                        wanted.append(text)
                case In(operand=operand, values=values) if operand.name == name:
                    wanted += values
                case _:
                    pass
    return wanted


def _other_spelling(name: str, text: str, values: Counter[str]) -> ValueFinding | None:
    """A string that no message has, while one has it spelt in another way."""
    if text in values:
        return None
    number = double_or_none(text)
    for value in values:
        same = value.strip().casefold() == text.strip().casefold()
        if same or (number is not None and double_or_none(value) == number):
            what = f"No {name} is '{text}', but there is '{value}': strings are compared exactly."
            return ValueFinding("other-spelling", what, f"Write {name} = '{value}'.")
    return None
