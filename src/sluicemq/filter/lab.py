"""Trials of an expression on stored messages, for `sluice filter test` and the filter lab.

A `Trial` receives any number of blocks of columns, or of rows of properties, and counts: how many
messages match, the results of each atom by itself, the causes of failed evaluations, the values
that cannot be converted as the expression requires, and, in comparison with another filter, the
messages that only one of them accepts. A trial consumes no messages, and its memory does not grow
with their number.

A trial finds what no check of the expression alone can find, and what loses the most messages:
`price > 30` is an error for values such as '30.5', and `Price` is another property than `price`.
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
from sluicemq.filter.check import PropertyUse, find_property_uses, float_fix
from sluicemq.filter.evaluate import TRY_PARSE_NUMBER, try_parse_double
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
from sluicemq.filter.plan import ERROR, FALSE, NEEDS_RECORD, NULL, TRUE, evaluate_verdict
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import Expression, to_tree
from sluicemq.hints import nearest_name
from sluicemq.record.columns import Column, ColumnBlock, Values


def build_block(rows: Sequence[Mapping[str, str]], first_offset: int = 0) -> ColumnBlock:
    """Return a block of columns with the properties of some messages.

    The first message gets the queue offset `first_offset`.
    """
    numbers: dict[str, dict[str, int]] = {}
    codes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            known = numbers.setdefault(name, {})
            column = codes.setdefault(name, [-1] * len(rows))
            column[index] = known.setdefault(value, len(known))
    columns = {
        name: Column(
            np.array(column, np.min_scalar_type(-len(numbers[name]))), Values(numbers[name])
        )
        for name, column in codes.items()
    }
    return ColumnBlock(first_offset, len(rows), columns, frozenset(), np.empty(0, np.int64))


class CostClass(Enum):
    """The data that a broker must read to evaluate an expression.

    CONSTANT: nothing. TAGS: only the consume queue, 20 bytes per message. COLUMNS: property
    columns, and the log only for messages that match. RECORDS: also the records of some messages
    that may not match, because a property is not a column.
    """

    CONSTANT = "constant"
    TAGS = "tags"
    COLUMNS = "columns"
    RECORDS = "records"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an expression for a broker.

    `why` gives the reason for the class, and `instead` a cheaper alternative, "" if there is none.
    `records_share` is the share of the messages, from 0 to 1, whose record must be read from the
    log to decide.
    """

    cost_class: CostClass
    why: str
    instead: str = ""
    records_share: float = 0.0


def estimate_cost(
    tree: Node, rows: int, records_asked: int, excluded: frozenset[str] = frozenset()
) -> Cost:
    """Return the cost of an expression that was tried on `rows` messages.

    `records_asked` of the messages needed their record. `excluded` contains the properties that
    have too many values to be columns.
    """
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
        fix = "Add conditions on other properties with AND: they reduce the records to read."
        return Cost(CostClass.RECORDS, why, fix, share)
    if names == {"TAGS"} and (tags := equivalent_tags(tree)) is not None:
        why = "It only compares tags."
        fix = f"Subscribe by tags, {' || '.join(tags)}: the consume queue alone decides."
        return Cost(CostClass.TAGS, why, fix, share)
    why = f"Decided in the columns of {', '.join(sorted(names))}; only matches are read."
    return Cost(CostClass.COLUMNS, why, "", share)


def equivalent_tags(tree: Node) -> tuple[str, ...] | None:
    """Return the tags of the tag subscription that selects the same messages, None if none does."""
    match tree:
        case Equal(left=Property(name="TAGS"), right=Literal(value=str(tag)), negated=False):
            return (tag,)
        case In(operand=Property(name="TAGS"), values=values, negated=False):
            return values
        case Or(parts=parts):
            found = [equivalent_tags(part) for part in parts]
            if None in found:
                return None
            return tuple(tag for tags in found if tags for tag in tags)
        case _:
            return None


EXAMPLES_MAX = 3
"""The maximum number of example values in a report or finding."""
NAMES_MAX = 1000
"""The number of property names after which a trial stops collecting names for suggestions."""
VALUES_COUNTED_MAX = 1000
"""The number of values of a property after which a trial stops counting values."""


@dataclass(frozen=True, slots=True)
class ValueFinding:
    """A problem with the values of a property: a stable code, the fact, and what to write."""

    code: str
    what: str
    instead: str


@dataclass(frozen=True, slots=True)
class PropertyReport:
    """What a trial found out about one property of the expression.

    `present` and `absent` are the numbers of messages with and without the property. If
    `is_excluded`, the property is not a column in some block, and `present` does not count those
    messages. `examples` contains the most frequent values.
    """

    name: str
    present: int
    absent: int
    is_excluded: bool
    examples: tuple[str, ...]
    findings: tuple[ValueFinding, ...]


class _ConversionFailures:
    """Counts the values of a property that cannot be converted for one of its comparisons."""

    def __init__(self, use: PropertyUse) -> None:
        self.use = use
        self.failing = 0
        """The number of messages whose value cannot be converted."""
        self.fractional = 0
        """The number of those whose value is a number of another class, such as '30.5'."""
        self.examples: list[str] = []

    def add(self, value: str, count: int) -> None:
        """Count a value that `count` messages have."""
        if TRY_PARSE_NUMBER[self.use.read_as](value) is not None:
            return
        self.failing += count
        self.fractional += count if try_parse_double(value) is not None else 0
        if len(self.examples) < EXAMPLES_MAX and value not in self.examples:
            self.examples.append(value)

    def finding(self, present: int) -> ValueFinding:
        """Return the finding about these values; `present` messages have the property."""
        use = self.use
        what = (
            f"{self.failing} of {present} values of {use.name} cannot be read as"
            f" {use.read_as.value} ({', '.join(map(repr, self.examples))}): in the comparison with"
            f" {use.text} they are errors, and the messages do not match."
        )
        if self.fractional == self.failing:
            return ValueFinding("whole-against-fraction", what, float_fix(use.text))
        fix = f"Compare text as strings ({use.name} = 'x') before it, joined by OR."
        if self.fractional:
            fix = f"For values that are numbers: {float_fix(use.text)} {fix}"
        return ValueFinding("text-against-number", what, fix)


class _PropertyStatistics:
    """Collects the values of one property of the expression."""

    def __init__(self, tree: Node, name: str) -> None:
        self.name = name
        self.present = 0
        self.is_excluded = False
        self.values: Counter[str] = Counter()
        uses = [use for use in find_property_uses(tree) if use.name == name]
        first = {use.read_as: use for use in reversed(uses) if use.read_as in TRY_PARSE_NUMBER}
        self._failures = list(map(_ConversionFailures, first.values()))
        self._compared_strings: list[str] = []
        """The strings with which the expression compares the property."""
        for node in walk(tree):
            match node:
                case Equal(left=Property(name=left), right=Literal(value=str(text))):
                    self._compared_strings += [text] if left == name else []
                case In(operand=operand, values=values):
                    self._compared_strings += values if operand.name == name else ()
                case _:
                    pass

    def add(self, column: Column) -> None:
        """Count the values of the property in one block."""
        counts = np.bincount(column.codes + 1, minlength=len(column.values) + 1)[1:].tolist()
        self.present += sum(counts)
        if len(self.values) < VALUES_COUNTED_MAX:
            for value, count in zip(column.values[:VALUES_COUNTED_MAX], counts, strict=False):
                self.values[value] += count
        for failures in self._failures:
            for value, count in zip(column.values, counts, strict=True):
                failures.add(value, count)

    def report(self, rows: int, names: set[str]) -> PropertyReport:
        """Return the report on the property after `rows` messages.

        `names` contains the names of the properties that the messages have.
        """
        findings = [one.finding(self.present) for one in self._failures if one.failing]
        if not self.present and not self.is_excluded and rows:
            near = nearest_name(self.name, sorted(names))
            what = f"None of the {rows} messages has a property {self.name}."
            fix = "Let the producer set it."
            if near is not None:
                fix = f"Did you mean {near!r}? Names are case-sensitive."
            findings = [ValueFinding("never-there", what, fix)]
        elif not self.is_excluded and len(self.values) < VALUES_COUNTED_MAX:
            findings += filter(None, map(self._other_spelling, self._compared_strings))
        examples = tuple(value for value, _ in self.values.most_common(EXAMPLES_MAX))
        absent = rows - self.present
        return PropertyReport(
            self.name, self.present, absent, self.is_excluded, examples, tuple(findings)
        )

    def _other_spelling(self, text: str) -> ValueFinding | None:
        """Return a finding if `text` does not occur, but a value that only differs in spelling."""
        if text in self.values:
            return None
        name, number = self.name, try_parse_double(text)
        for value in self.values:
            same = value.strip().casefold() == text.strip().casefold()
            if same or (number is not None and try_parse_double(value) == number):
                what = (
                    f"No {name} is '{text}', but there is '{value}': strings are compared exactly."
                )
                return ValueFinding("other-spelling", what, f"Write {name} = '{value}'.")
        return None


SAMPLES_MAX = 10
"""The maximum number of samples in a report."""
ROWS_PER_BLOCK = 65_536
"""The maximum number of rows that `Trial.add_rows` makes into one block."""

Properties = Mapping[str, str]
RecordReader = Callable[[int], Properties]
"""A function that returns the properties in the record of a row of a block."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A message: `source` is the name that the caller gave the block, `offset` its queue offset."""

    source: Hashable
    offset: int


@dataclass(frozen=True, slots=True)
class AtomReport:
    """The results of one atom by itself on all messages, whether or not it would be reached.

    The numbers count messages. `unknown` counts those whose record must be read to decide.
    """

    text: str
    true: int
    false: int
    null: int
    error: int
    unknown: int

    @property
    def selectivity(self) -> float:
        """The share of TRUE among the decided messages, from 0 to 1; 0 if none is decided."""
        decided = self.true + self.false + self.null + self.error
        return self.true / decided if decided else 0.0


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """A cause of failed evaluations, with the number of messages that it concerns.

    `reason` describes it without a value. `example` is the error of the message `sample`, with its
    value.
    """

    reason: str
    count: int
    example: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison with another filter, whose text is `other`.

    The numbers count the messages that both filters accept, that only this one (`only_here`) or
    only the other one (`only_there`) accepts, and that neither accepts.
    """

    other: str
    both: int
    only_here: int
    only_there: int
    neither: int
    samples_here: tuple[Sample, ...]
    samples_there: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a trial. Its fields are the keys of the JSON output.

    `rows` is the number of messages: matched + false + null + errors + unknown. `unknown` counts
    messages whose record was needed but could not be read; it is 0 if the trial could read records.
    """

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
        """The share of messages that match, from 0 to 1; 0 without messages."""
        return self.matched / self.rows if self.rows else 0.0


class Trial:
    """A trial of an expression on messages, optionally in comparison with another filter.

    Add the messages with `add_block` or `add_rows`, then call `report`. Both filters can be
    expressions in any form, including tag subscriptions. Raises FilterSyntaxError if one of them
    does not compile.
    """

    def __init__(self, expression: Expression, against: "Expression | None" = None) -> None:
        self.tree = to_tree(expression)
        self._whole = Selector("", self.tree)
        self._other = None if against is None else Selector("", to_tree(against))
        self._atoms = [
            (Selector(render(node), node), Counter[int]()) for node in iter_atoms(self.tree)
        ]
        self._properties = [
            _PropertyStatistics(self.tree, name) for name in sorted(property_names(self.tree))
        ]
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
        """Add messages, given as their properties. Their offsets count from `first_offset`."""
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            part = rows[start : start + ROWS_PER_BLOCK]
            self.add_block(build_block(part, first_offset + start), source)

    def add_block(
        self,
        block: ColumnBlock,
        source: Hashable = None,
        properties_of: RecordReader | None = None,
    ) -> None:
        """Add a block of columns. Samples from it carry `source`.

        Rows that need a property that is not a column are evaluated with `properties_of(row)`.
        Without that function, they are counted as unknown.
        """
        records = None if properties_of is None else cache(properties_of)  # read each record once
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
        for statistics in self._properties:
            statistics.is_excluded |= statistics.name in block.excluded
            if column := block.columns.get(statistics.name):
                statistics.add(column)
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
        """Return the result for the messages that were added so far."""
        counts = self._counts
        return Report(
            expression=render(self.tree),
            rows=counts.total(),
            matched=counts[TRUE],
            false=counts[FALSE],
            null=counts[NULL],
            errors=counts[ERROR],
            unknown=counts[NEEDS_RECORD],
            samples=self._samples.selection(),
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
            properties=tuple(
                statistics.report(counts.total(), self._names) for statistics in self._properties
            ),
            cost=estimate_cost(self.tree, counts.total(), self._asked_records, self._excluded),
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
            samples_here=self._here.selection(),
            samples_there=self._there.selection(),
        )

    def _failing(
        self, block: ColumnBlock, verdicts: NDArray[np.uint8], atoms: list[NDArray[np.uint8]]
    ) -> Iterator[tuple[int, Properties, int]]:
        """Yield (row, properties, count) for an example of each group of failed evaluations.

        Rows for which all atoms have the same verdicts fail for the same reason, so they form a
        group of `count` rows. If an atom reads several properties, rows are grouped by their values
        instead, because its verdict does not say which property failed.
        """
        rows = np.flatnonzero(verdicts == ERROR)
        if not len(rows):
            return
        if any(len(atom.property_names) > 1 for atom, _ in self._atoms):
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
        """Count the reason why the evaluation of these properties fails."""
        try:
            self._whole.evaluate(properties)
        except FilterEvaluationError as error:
            known, example, first = self._causes.get(error.reason, (0, str(error), sample))
            self._causes[error.reason] = (known + count, example, first)


def iter_atoms(tree: Node) -> Iterator[Node]:
    """Yield the conditions that AND, OR and NOT join, from left to right."""
    if isinstance(tree, And | Or | Not):
        for child in children(tree):
            yield from iter_atoms(child)
    else:
        yield tree


class _Samples:
    """Collects a bounded number of samples, spread evenly over the messages that were added."""

    def __init__(self) -> None:
        self._found: list[Sample] = []

    def add(self, source: Hashable, first_offset: int, chosen: NDArray[np.bool_]) -> None:
        """Add samples of the chosen rows of a block."""
        rows = _spread(np.flatnonzero(chosen).tolist(), SAMPLES_MAX)
        self._found += [Sample(source, first_offset + row) for row in rows]
        if len(self._found) > 64 * SAMPLES_MAX:
            self._found = _spread(self._found, 32 * SAMPLES_MAX)

    def selection(self) -> tuple[Sample, ...]:
        """Return at most SAMPLES_MAX of the samples."""
        return tuple(_spread(self._found, SAMPLES_MAX))


def _spread(found: list[Any], count: int) -> list[Any]:
    """Return at most `count` elements of a list at even distances."""
    if len(found) <= count:
        return found
    return [found[index * len(found) // count] for index in range(count)]


def _counts(verdicts: NDArray[np.uint8]) -> dict[int, int]:
    """Return the number of rows of each verdict."""
    return dict(enumerate(np.bincount(verdicts, minlength=NEEDS_RECORD + 1).tolist()))


def _decide(selector: Selector, verdicts: NDArray[np.uint8], records: RecordReader) -> list[int]:
    """Replace each NEEDS_RECORD in `verdicts` by the verdict on the row's record.

    Return the rows for which that is ERROR.
    """
    rows: list[int] = np.flatnonzero(verdicts == NEEDS_RECORD).tolist()
    for row in rows:
        verdicts[row] = evaluate_verdict(selector.evaluate, records(row))
    return [row for row in rows if verdicts[row] == ERROR]
