"""What an expression would do, tried on stored messages: `sluice filter test`.

A `Trial` is given blocks of columns (or rows of properties), any number of them, and keeps counts:
how many match, what came of each atom by itself, why evaluations failed, which values cannot be
read as the expression reads them, and, beside another filter, which messages only one of them
takes. Nothing is consumed, and memory does not grow with the messages.

What the values tell no check of the expression alone can know, and it loses the most messages:
`price > 30` on values such as '30.5' is an error for each of them, and `Price` is no `price`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.check import Use, float_fix, property_uses
from sluicemq.filter.evaluate import NUMBER_OR_NONE, double_or_none
from sluicemq.filter.nodes import (
    And,
    Equal,
    In,
    Literal,
    Node,
    Not,
    Or,
    Property,
    children,
    property_names,
    render,
    walk,
)
from sluicemq.filter.plan import ERROR, FALSE, NEEDS_RECORD, NULL, TRUE, verdict_of
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import Expression, tree_of
from sluicemq.hints import nearest_name
from sluicemq.record.columns import Column, ColumnBlock, Values


def block_of(rows: Sequence[Mapping[str, str]], first_offset: int = 0) -> ColumnBlock:
    """A block of these messages."""
    numbers: dict[str, dict[str, int]] = {}
    codes: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        for name, value in row.items():
            known = numbers.setdefault(name, {})
            column = codes.setdefault(name, [-1] * len(rows))
            column[at] = known.setdefault(value, len(known))
    columns = {
        name: Column(
            np.array(column, np.min_scalar_type(-len(numbers[name]))), Values(numbers[name])
        )
        for name, column in codes.items()
    }
    return ColumnBlock(first_offset, len(rows), columns, frozenset(), np.empty(0, np.int64))


class CostClass(Enum):
    """Which stage of a broker decides. CONSTANT: nothing is read. TAGS: the consume queue alone, 20
    bytes a message. COLUMNS: the log is read for the messages that match. RECORDS: some messages'
    records are read to decide, because of a property that is no column."""

    CONSTANT = "constant"
    TAGS = "tags"
    COLUMNS = "columns"
    RECORDS = "records"


@dataclass(frozen=True, slots=True)
class Cost:
    """The class, why, and what would be cheaper ("" for nothing). `records_share` of the messages
    have to be read from the log to decide."""

    cost_class: CostClass
    why: str
    instead: str = ""
    records_share: float = 0.0


def cost_of(
    tree: Node, rows: int, records_asked: int, excluded: frozenset[str] = frozenset()
) -> Cost:
    """Of an expression on `rows` messages, of which `records_asked` needed their record."""
    names = property_names(tree)
    if not names:
        return Cost(CostClass.CONSTANT, "It reads no property: all messages or none.")
    unique = sorted(names & excluded)
    share = records_asked / rows if rows else 0.0
    if unique:
        why = (
            f"{', '.join(unique)} has too many values for a column: the records of "
            f"{share:.1%} of the messages are read."
        )
        fix = "Put conditions on other properties beside it (AND): they spare the reading."
        return Cost(CostClass.RECORDS, why, fix, share)
    if names == {"TAGS"} and (tags := tags_of(tree)) is not None:
        why = "It only asks for tags."
        fix = f"Subscribe by tags, {' || '.join(tags)}: the consume queue alone decides."
        return Cost(CostClass.TAGS, why, fix, share)
    why = f"Decided in the columns of {', '.join(sorted(names))}; only what matches is read."
    return Cost(CostClass.COLUMNS, why, "", share)


def tags_of(tree: Node) -> tuple[str, ...] | None:
    """The tags when the expression is the same as a tag subscription, else None."""
    match tree:
        case Equal(left=Property(name="TAGS"), right=Literal(value=str(tag)), negated=False):
            return (tag,)
        case In(operand=Property(name="TAGS"), values=values, negated=False):
            return values
        case Or(parts=parts):
            found = [tags_of(part) for part in parts]
            if None in found:
                return None
            return tuple(tag for tags in found if tags for tag in tags)
        case _:
            return None


EXAMPLES_MAX = 3
NAMES_MAX = 1000
VALUES_KEPT_MAX = 1000


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


class _ReadAs:
    """The values of a property that are no number of the class as which it is read."""

    def __init__(self, use: Use) -> None:
        self.use = use
        self.failing = self.fractional = 0
        self.examples: list[str] = []

    def add(self, value: str, count: int) -> None:
        if NUMBER_OR_NONE[self.use.read_as](value) is not None:
            return
        self.failing += count
        self.fractional += count if double_or_none(value) is not None else 0
        if len(self.examples) < EXAMPLES_MAX and value not in self.examples:
            self.examples.append(value)

    def finding(self, present: int) -> ValueFinding:
        use = self.use
        what = (
            f"{self.failing} of {present} values of {use.name} are no {use.read_as.value} "
            f"({', '.join(map(repr, self.examples))}): beside {use.text} they are errors, and the"
            " messages do not match."
        )
        if self.fractional == self.failing:
            return ValueFinding("whole-against-fraction", what, float_fix(use.text))
        fix = f"Compare text as strings ({use.name} = 'x') before it, joined by OR."
        if self.fractional:
            fix = f"For those that are numbers: {float_fix(use.text)} {fix}"
        return ValueFinding("text-against-number", what, fix)


class _Seen:
    """A property of the expression, and what is known of its values."""

    def __init__(self, tree: Node, name: str) -> None:
        self.name = name
        self.present = 0
        self.is_excluded = False
        self.values: Counter[str] = Counter()
        uses = [use for use in property_uses(tree) if use.name == name]
        first = {use.read_as: use for use in reversed(uses) if use.read_as in NUMBER_OR_NONE}
        self._read_as = list(map(_ReadAs, first.values()))
        self._wanted: list[str] = []
        """The strings that the expression compares it with."""
        for node in walk(tree):
            match node:
                case Equal(left=Property(name=left), right=Literal(value=str(text))):
                    self._wanted += [text] if left == name else []
                case In(operand=operand, values=values):
                    self._wanted += values if operand.name == name else ()
                case _:
                    pass

    def add(self, column: Column) -> None:
        counts = np.bincount(column.codes + 1, minlength=len(column.values) + 1)[1:].tolist()
        self.present += sum(counts)
        if len(self.values) < VALUES_KEPT_MAX:
            for value, count in zip(column.values[:VALUES_KEPT_MAX], counts, strict=False):
                self.values[value] += count
        for read_as in self._read_as:
            for value, count in zip(column.values, counts, strict=True):
                read_as.add(value, count)

    def report(self, rows: int, names: set[str]) -> PropertyReport:
        findings = [one.finding(self.present) for one in self._read_as if one.failing]
        if not self.present and not self.is_excluded and rows:
            near = nearest_name(self.name, sorted(names))
            what = f"None of the {rows} messages has a property {self.name}."
            fix = "Ask the producer for it."
            if near is not None:
                fix = f"Did you mean {near!r}? Names are case-sensitive."
            findings = [ValueFinding("never-there", what, fix)]
        elif not self.is_excluded and len(self.values) < VALUES_KEPT_MAX:
            findings += filter(None, map(self._other_spelling, self._wanted))
        examples = tuple(value for value, _ in self.values.most_common(EXAMPLES_MAX))
        absent = rows - self.present
        return PropertyReport(
            self.name, self.present, absent, self.is_excluded, examples, tuple(findings)
        )

    def _other_spelling(self, text: str) -> ValueFinding | None:
        """A string that no message has, while one has it spelt in another way."""
        if text in self.values:
            return None
        name, number = self.name, double_or_none(text)
        for value in self.values:
            same = value.strip().casefold() == text.strip().casefold()
            if same or (number is not None and double_or_none(value) == number):
                what = (
                    f"No {name} is '{text}', but there is '{value}': strings are compared exactly."
                )
                return ValueFinding("other-spelling", what, f"Write {name} = '{value}'.")
        return None


SAMPLES_MAX = 10
ROWS_A_BLOCK = 65_536

Properties = Mapping[str, str]
RecordReader = Callable[[int], Properties]  # row of the block -> the properties in its record


@dataclass(frozen=True, slots=True)
class Sample:
    """A message: `source` is what the caller called the block (a queue), `offset` its place."""

    source: Hashable
    offset: int


@dataclass(frozen=True, slots=True)
class AtomReport:
    """One condition by itself, on all messages, whether or not it would have been reached.

    `unknown`: messages whose record would have to be read to tell."""

    text: str
    true: int
    false: int
    null: int
    error: int
    unknown: int

    @property
    def selectivity(self) -> float:
        """The share of messages that it takes, of those it could tell; 0 for none."""
        told = self.true + self.false + self.null + self.error
        return self.true / told if told else 0.0


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """One cause of failed evaluations: `reason` without, `example` with a message's value."""

    reason: str
    count: int
    example: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class Difference:
    """Beside another filter: messages that both take, and that only one takes, with samples."""

    other: str
    both: int
    only_here: int
    only_there: int
    neither: int
    samples_here: tuple[Sample, ...]
    samples_there: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a trial found; orjson writes it as it is.

    `rows` = matched + false + null + errors + unknown; `unknown` is 0 when the records could be
    read."""

    expression: str
    rows: int
    matched: int
    false: int
    null: int
    errors: int
    unknown: int
    samples: tuple[Sample, ...]
    atoms: tuple[AtomReport, ...]
    causes: tuple[ErrorReport, ...]
    properties: tuple[PropertyReport, ...]
    cost: Cost
    difference: Difference | None

    @property
    def match_rate(self) -> float:
        """The share of messages that match; 0 without messages."""
        return self.matched / self.rows if self.rows else 0.0


class Trial:
    """An expression on trial, `against` another one (a selector, tree or subscription, tags too).

    `add` blocks, or rows with `add_rows`, then ask for the `report`. Rows whose verdict hangs on a
    property that is no column are decided by `properties_of(row)`, or counted as unknown.
    """

    def __init__(self, expression: Expression, against: "Expression | None" = None) -> None:
        self.tree = tree_of(expression)
        self._whole = Selector("", self.tree)
        self._other = None if against is None else Selector("", tree_of(against))
        self._atoms = [
            (Selector(render(node), node), Counter[int]()) for node in atoms_of(self.tree)
        ]
        self._seen = [_Seen(self.tree, name) for name in sorted(property_names(self.tree))]
        self._names: set[str] = set()
        self._excluded: frozenset[str] = frozenset()
        self._counts: Counter[int] = Counter()
        self._causes: dict[str, tuple[int, str, Sample]] = {}
        self._samples = _Samples()
        self._both: Counter[tuple[bool, bool]] = Counter()
        self._here, self._there = _Samples(), _Samples()
        self._asked_records = 0

    def add_rows(
        self, rows: Sequence[Properties], *, first_offset: int = 0, source: Hashable = None
    ) -> None:
        """Messages as their properties; the offsets count from `first_offset`."""
        for start in range(0, len(rows), ROWS_A_BLOCK):
            part = rows[start : start + ROWS_A_BLOCK]
            self.add(block_of(part, first_offset + start), source)

    def add(
        self,
        block: ColumnBlock,
        source: Hashable = None,
        properties_of: RecordReader | None = None,
    ) -> None:
        """A block of columns; `source` names it in the samples."""
        records = None if properties_of is None else cache(properties_of)  # each is read once
        verdicts = self._whole.vectorised.verdicts(block)
        self._asked_records += int((verdicts == NEEDS_RECORD).sum())
        atoms = [atom.vectorised.verdicts(block) for atom, _ in self._atoms]
        for (_, found), verdicts_of_atom in zip(self._atoms, atoms, strict=True):
            found.update(_counts(verdicts_of_atom))
        for row, properties, count in self._failing(block, verdicts, atoms):
            self._add_cause(properties, Sample(source, block.first_offset + row), count)
        if records is not None:
            for row in _decide(self._whole, verdicts, records):
                self._add_cause(records(row), Sample(source, block.first_offset + row))
        self._counts.update(_counts(verdicts))
        self._samples.add(source, block.first_offset, verdicts == TRUE)
        self._excluded |= block.excluded
        if len(self._names) < NAMES_MAX:
            self._names |= block.columns.keys() | block.excluded
        for seen in self._seen:
            seen.is_excluded |= seen.name in block.excluded
            if column := block.columns.get(seen.name):
                seen.add(column)
        if self._other is not None:
            others = self._other.vectorised.verdicts(block)
            if records is not None:
                _decide(self._other, others, records)
            here, there = verdicts == TRUE, others == TRUE
            self._both.update(
                {
                    (True, True): int((here & there).sum()),
                    (True, False): int((here & ~there).sum()),
                    (False, True): int((there & ~here).sum()),
                }
            )
            self._here.add(source, block.first_offset, here & ~there)
            self._there.add(source, block.first_offset, there & ~here)

    def report(self) -> Report:
        """What was found so far."""
        counts = self._counts
        return Report(
            expression=render(self.tree),
            rows=counts.total(),
            matched=counts[TRUE],
            false=counts[FALSE],
            null=counts[NULL],
            errors=counts[ERROR],
            unknown=counts[NEEDS_RECORD],
            samples=self._samples.taken(),
            atoms=tuple(
                AtomReport(
                    atom.text, *(found[one] for one in (TRUE, FALSE, NULL, ERROR, NEEDS_RECORD))
                )
                for atom, found in self._atoms
            ),
            causes=tuple(
                ErrorReport(reason, count, example, sample)
                for reason, (count, example, sample) in sorted(
                    self._causes.items(), key=lambda item: -item[1][0]
                )
            ),
            properties=tuple(seen.report(counts.total(), self._names) for seen in self._seen),
            cost=cost_of(self.tree, counts.total(), self._asked_records, self._excluded),
            difference=self._difference(),
        )

    def _difference(self) -> Difference | None:
        if self._other is None:
            return None
        found = self._both
        return Difference(
            other=render(self._other.tree),
            both=found[True, True],
            only_here=found[True, False],
            only_there=found[False, True],
            neither=self._counts.total() - found.total(),
            samples_here=self._here.taken(),
            samples_there=self._there.taken(),
        )

    def _failing(
        self, block: ColumnBlock, verdicts: NDArray[np.uint8], atoms: list[NDArray[np.uint8]]
    ) -> Iterator[tuple[int, Properties, int]]:
        """Which atom ends an evaluation is decided by what comes of the atoms: one message for
        each combination of those is asked of the scalar engine for its reason. Gives its row, its
        properties, and how many there are."""
        rows = np.flatnonzero(verdicts == ERROR)
        if not len(rows):
            return
        if any(len(atom.property_names) > 1 for atom, _ in self._atoms):  # which is the culprit?
            names = sorted(self._whole.property_names & block.columns.keys())
            keys: list[NDArray[Any]] = [block.columns[name].codes[rows] for name in names]
        else:
            keys = [found[rows] for found in atoms]
        _, first, counts = np.unique(np.stack(keys), axis=1, return_index=True, return_counts=True)
        for row, count in zip(rows[first].tolist(), counts.tolist(), strict=True):
            properties = {
                name: column.values[column.codes[row]]
                for name, column in block.columns.items()
                if column.codes[row] >= 0
            }
            yield row, properties, count

    def _add_cause(self, properties: Properties, sample: Sample, count: int = 1) -> None:
        try:
            self._whole.evaluate(properties)
        except FilterEvaluationError as error:
            known, example, first = self._causes.get(error.reason, (0, str(error), sample))
            self._causes[error.reason] = (known + count, example, first)


def atoms_of(tree: Node) -> Iterator[Node]:
    """The conditions that AND, OR and NOT join, from left to right."""
    if isinstance(tree, And | Or | Not):
        for child in children(tree):
            yield from atoms_of(child)
    else:
        yield tree


class _Samples:
    """Some of many, evenly spread over what was given."""

    def __init__(self) -> None:
        self._found: list[Sample] = []

    def add(self, source: Hashable, first_offset: int, chosen: NDArray[np.bool_]) -> None:
        rows = _spread(np.flatnonzero(chosen).tolist(), SAMPLES_MAX)
        self._found += [Sample(source, first_offset + row) for row in rows]
        if len(self._found) > 64 * SAMPLES_MAX:
            self._found = _spread(self._found, 32 * SAMPLES_MAX)

    def taken(self) -> tuple[Sample, ...]:
        return tuple(_spread(self._found, SAMPLES_MAX))


def _spread(found: list[Any], count: int) -> list[Any]:
    if len(found) <= count:
        return found
    return [found[at * len(found) // count] for at in range(count)]


def _counts(verdicts: NDArray[np.uint8]) -> dict[int, int]:
    return dict(enumerate(np.bincount(verdicts, minlength=NEEDS_RECORD + 1).tolist()))


def _decide(engine: Selector, verdicts: NDArray[np.uint8], records: RecordReader) -> list[int]:
    """Decides in place what needs the record; gives the rows that come out as errors."""
    rows: list[int] = np.flatnonzero(verdicts == NEEDS_RECORD).tolist()
    for row in rows:
        verdicts[row] = verdict_of(engine.evaluate, records(row))
    return [row for row in rows if verdicts[row] == ERROR]
