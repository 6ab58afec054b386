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
    JavaClass,
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

    Each row is one message, and each property gets a column: an array of codes and a list of the
    distinct values, which the codes index. The code -1 means that the message lacks the property.
    The first message gets the queue offset `first_offset`.
    """
    code_by_value_by_name: dict[str, dict[str, int]] = {}
    codes_by_name: dict[str, list[int]] = {}  # the code of each row; -1 without the property
    for row_index, properties in enumerate(rows):
        for name, value in properties.items():
            code_by_value = code_by_value_by_name.setdefault(name, {})
            codes = codes_by_name.get(name)
            if codes is None:
                codes = codes_by_name[name] = [-1] * len(rows)
            codes[row_index] = code_by_value.setdefault(value, len(code_by_value))
    columns = {}
    for name, codes in codes_by_name.items():
        values = Values(code_by_value_by_name[name])
        smallest_type = np.min_scalar_type(-len(values))
        columns[name] = Column(np.array(codes, smallest_type), values)
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
    """Return how expensive a filter is for the broker, with the reason and a fix.

    `rows` is the number of messages on which the filter was tried. For `records_asked` of these,
    the record had to be read to decide. `excluded` contains the properties that have too many
    values to be columns.
    """
    names = property_names(tree)
    if not names:
        return Cost(CostClass.CONSTANT, "It reads no property: all messages or none.")
    records_share = records_asked / rows if rows else 0.0

    names_without_column = sorted(names & excluded)
    if names_without_column:
        why = (
            f"{', '.join(names_without_column)} has too many values for a column: the records of "
            f"{records_share:.1%} of the messages are read."
        )
        fix = "Add conditions on other properties with AND: they reduce the records to read."
        return Cost(CostClass.RECORDS, why, fix, records_share)

    tags = equivalent_tags(tree) if names == {"TAGS"} else None
    if tags is not None:
        why = "It only compares tags."
        fix = f"Subscribe by tags, {' || '.join(tags)}: the consume queue alone decides."
        return Cost(CostClass.TAGS, why, fix, records_share)
    why = f"Decided in the columns of {', '.join(sorted(names))}; only matches are read."
    return Cost(CostClass.COLUMNS, why, "", records_share)


def equivalent_tags(tree: Node) -> tuple[str, ...] | None:
    """Return the tags of the tag subscription that selects the same messages as an expression.

    `TAGS = 'A' OR TAGS IN ('B', 'C')` returns ("A", "B", "C"). Return None if the expression
    contains anything else than comparisons of TAGS by `=` or IN, joined by OR.
    """
    match tree:
        case Equal(left=Property(name="TAGS"), right=Literal(value=str(tag)), negated=False):
            return (tag,)
        case In(operand=Property(name="TAGS"), values=listed_tags, negated=False):
            return listed_tags
        case Or(parts=conditions):
            all_tags: list[str] = []
            for condition in conditions:
                tags = equivalent_tags(condition)
                if tags is None:
                    return None
                all_tags += tags
            return tuple(all_tags)
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
    """Counts the values of a property that cannot be converted for one of its comparisons.

    `use` is the comparison, which converts the property to a number.
    """

    def __init__(self, use: PropertyUse) -> None:
        """Count nothing yet. `use` is the comparison that converts the property to a number."""
        self.use = use
        self.failing = 0
        """The number of messages whose value cannot be converted."""
        self.fractional = 0
        """The number of those whose value is a number of another class, such as '30.5'."""
        self.examples: list[str] = []

    def add(self, value: str, message_count: int) -> None:
        """Count a value that cannot be converted. Do nothing if it can.

        `message_count` is the number of messages with this value.
        """
        if TRY_PARSE_NUMBER[self.use.read_as](value) is not None:
            return
        self.failing += message_count
        if try_parse_double(value) is not None:
            self.fractional += message_count
        if len(self.examples) < EXAMPLES_MAX and value not in self.examples:
            self.examples.append(value)

    def make_finding(self, present: int) -> ValueFinding:
        """Return the finding about the values that cannot be converted.

        At least one value must have been counted. `present` is the number of messages that have the
        property. If all counted values are numbers of another class, such as '30.5' for a
        comparison with 30, the code of the finding is whole-against-fraction. Otherwise some values
        are not numbers at all, and the code is text-against-number.
        """
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
    """Collects the values of one property of the expression.

    `tree` is the whole expression, and `name` the property.
    """

    def __init__(self, tree: Node, name: str) -> None:
        """Count nothing yet for the property `name`, which the expression `tree` reads."""
        self.name = name
        self.present = 0
        """The number of messages that have the property as a column."""
        self.is_excluded = False
        """Whether the property has too many values to be a column in one of the blocks."""
        self.values: Counter[str] = Counter()
        """The number of messages with each value, for at least VALUES_COUNTED_MAX values."""
        self._failures = _make_failure_counters(tree, name)
        self._compared_strings = list(_iterate_compared_strings(tree, name))
        """The strings with which the expression compares the property."""

    def add(self, column: Column) -> None:
        """Count the values of the property in one block, and those that cannot be converted."""
        # A code is an index into `values`, or -1 for a message without the property. bincount
        # needs numbers from 0, so the first count is that of the messages without it.
        counts_with_absent = np.bincount(column.codes + 1, minlength=len(column.values) + 1)
        count_of_each_value = counts_with_absent[1:].tolist()
        self.present += sum(count_of_each_value)
        if len(self.values) < VALUES_COUNTED_MAX:
            first_values = column.values[:VALUES_COUNTED_MAX]
            for value, count in zip(first_values, count_of_each_value, strict=False):
                self.values[value] += count
        for failures in self._failures:
            for value, count in zip(column.values, count_of_each_value, strict=True):
                failures.add(value, count)

    def report(self, rows: int, names: set[str]) -> PropertyReport:
        """Return the report on the property after `rows` messages were added.

        `names` contains the names of all properties that occur in the messages.
        """
        examples = tuple(value for value, _ in self.values.most_common(EXAMPLES_MAX))
        return PropertyReport(
            name=self.name,
            present=self.present,
            absent=rows - self.present,
            is_excluded=self.is_excluded,
            examples=examples,
            findings=tuple(self._find_problems(rows, names)),
        )

    def _find_problems(self, rows: int, names: set[str]) -> Iterator[ValueFinding]:
        """Yield a finding for each problem of the property that the messages show.

        `rows` is the number of messages, and `names` contains the names of all their properties.

        - If no message has the property, that is the only finding.
        - Otherwise there is a finding for each class of numbers to which some value cannot be
          converted.
        - There is a finding for each compared string that occurs only in another spelling. This is
          skipped if there are too many values to count.
        """
        is_never_present = not self.present and not self.is_excluded and rows > 0
        if is_never_present:
            yield self._make_never_there_finding(rows, names)
            return
        for failures in self._failures:
            if failures.failing:
                yield failures.make_finding(self.present)
        has_all_values = not self.is_excluded and len(self.values) < VALUES_COUNTED_MAX
        if has_all_values:
            for compared_string in self._compared_strings:
                finding = self._find_other_spelling(compared_string)
                if finding is not None:
                    yield finding

    def _make_never_there_finding(self, rows: int, names: set[str]) -> ValueFinding:
        """Return the finding that none of `rows` messages has the property.

        It suggests the most similar of `names`, if one is similar.
        """
        similar_name = nearest_name(self.name, sorted(names))
        fix = "Let the producer set it."
        if similar_name is not None:
            fix = f"Did you mean {similar_name!r}? Names are case-sensitive."
        what = f"None of the {rows} messages has a property {self.name}."
        return ValueFinding("never-there", what, fix)

    def _find_other_spelling(self, compared_string: str) -> ValueFinding | None:
        """Return a finding if a compared string does not occur, but a similar value does.

        A value is similar if only case or surrounding spaces differ, or if it is the same number,
        as '5.0' for '5'. Return None if no value is similar, or if `compared_string` occurs itself.
        """
        if compared_string in self.values:
            return None
        for value in self.values:
            if _are_similar(value, compared_string):
                what = (
                    f"No {self.name} is '{compared_string}', but there is '{value}': strings are"
                    " compared exactly."
                )
                return ValueFinding("other-spelling", what, f"Write {self.name} = '{value}'.")
        return None


def _make_failure_counters(tree: Node, name: str) -> list[_ConversionFailures]:
    """Return an empty counter for each class of numbers to which a property is converted.

    A counter counts the values that cannot be converted to its class. It belongs to the first
    comparison of property `name` in `tree` with a number of this class.
    """
    first_uses: dict[JavaClass, PropertyUse] = {}
    for use in reversed(find_property_uses(tree)):  # an earlier use replaces a later one
        if use.name == name and use.read_as in TRY_PARSE_NUMBER:
            first_uses[use.read_as] = use
    return list(map(_ConversionFailures, first_uses.values()))


def _iterate_compared_strings(tree: Node, name: str) -> Iterator[str]:
    """Yield the strings with which the expression compares property `name` by `=`, `<>` or IN."""
    for node in walk(tree):
        match node:
            case Equal(left=Property(name=left_name), right=Literal(value=str(string))):
                if left_name == name:
                    yield string
            case In(operand=operand, values=strings):
                if operand.name == name:
                    yield from strings
            case _:
                pass


def _are_similar(left: str, right: str) -> bool:
    """Return whether only case or surrounding spaces differ, or both are the same number."""
    if left.strip().casefold() == right.strip().casefold():
        return True
    right_number = try_parse_double(right)
    return right_number is not None and try_parse_double(left) == right_number


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

    Add the messages with `add_block` or `add_rows`, then call `report`. `expression` is the tried
    filter, and `against` the other filter with which it is compared; None means no comparison. Both
    can be expressions in any form, including tag subscriptions. Raises FilterSyntaxError if one of
    them does not compile.
    """

    def __init__(self, expression: Expression, against: "Expression | None" = None) -> None:
        """Start a trial of `expression` without messages.

        `against` is a second filter whose matches are compared with the matches of the first. None
        means that there is no comparison.
        """
        self.tree = to_tree(expression)
        self._selector = Selector("", self.tree)
        self._comparison = None
        if against is not None:
            self._comparison = _Comparison(to_tree(against))
        self._verdict_counts: Counter[int] = Counter()
        """The number of messages with each verdict of the whole expression."""
        self._atoms = [
            (Selector(render(node), node), Counter[int]()) for node in iter_atoms(self.tree)
        ]
        """Each atom with the number of messages with each of its verdicts."""
        self._properties = [
            _PropertyStatistics(self.tree, name) for name in sorted(property_names(self.tree))
        ]
        self._names: set[str] = set()
        """The names of the properties of the messages, about NAMES_MAX at most."""
        self._excluded: frozenset[str] = frozenset()
        """The names of the properties that are not columns in one of the blocks."""
        self._causes: dict[str, _Cause] = {}
        """The causes of failed evaluations by their reason."""
        self._matched_samples = _Samples()
        self._records_asked = 0
        """The number of messages whose record had to be read to decide."""

    def add_rows(
        self, rows: Sequence[Properties], *, first_offset: int = 0, source: Hashable = None
    ) -> None:
        """Add messages, given as their properties. Their offsets count from `first_offset`."""
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            block_rows = rows[start : start + ROWS_PER_BLOCK]
            self.add_block(build_block(block_rows, first_offset + start), source)

    def add_block(
        self,
        block: ColumnBlock,
        source: Hashable = None,
        properties_of: RecordReader | None = None,
    ) -> None:
        """Evaluate the filters for all rows of a block of columns, and count the results.

        `source` is stored in the samples that are taken from this block. `properties_of(row)`
        returns the properties in the record of a message. It is called for each row that the
        columns do not decide. If it is None, such rows are counted as unknown.
        """
        # Both filters may need the same record: read each one once.
        read_record = None if properties_of is None else cache(properties_of)
        verdicts = self._selector.vectorised.verdicts(block)
        self._records_asked += int((verdicts == NEEDS_RECORD).sum())
        atom_verdicts = self._count_atom_verdicts(block)

        for row, properties, count in self._iter_failures(block, verdicts, atom_verdicts):
            self._add_cause(properties, Sample(source, block.first_offset + row), count)
        if read_record is not None:
            for row in _decide_by_records(self._selector, verdicts, read_record):
                self._add_cause(read_record(row), Sample(source, block.first_offset + row))

        # From here on, `verdicts` also contains the verdicts that the records decided.
        is_match = verdicts == TRUE
        self._verdict_counts.update(_count_verdicts(verdicts))
        self._matched_samples.add(source, block.first_offset, is_match)
        self._add_statistics(block)
        if self._comparison is not None:
            self._comparison.add(block, is_match, source, read_record)

    def _count_atom_verdicts(self, block: ColumnBlock) -> list[NDArray[np.uint8]]:
        """Evaluate each atom for all rows of a block, and count the verdicts of each atom.

        An atom is a condition without AND, OR and NOT. Return a list with the verdicts of each
        atom: an array with one entry (FALSE, TRUE, NULL, ERROR or NEEDS_RECORD) for each row.
        """
        verdicts_by_atom = []
        for atom, verdict_counts in self._atoms:
            verdicts = atom.vectorised.verdicts(block)
            verdict_counts.update(_count_verdicts(verdicts))
            verdicts_by_atom.append(verdicts)
        return verdicts_by_atom

    def _add_statistics(self, block: ColumnBlock) -> None:
        """Add the properties in a block to the statistics: all names, and the values that count."""
        self._excluded |= block.excluded
        if len(self._names) < NAMES_MAX:
            self._names |= block.columns.keys() | block.excluded
        for statistics in self._properties:
            statistics.is_excluded |= statistics.name in block.excluded
            column = block.columns.get(statistics.name)
            if column:
                statistics.add(column)

    def report(self) -> Report:
        """Return the report on all messages that were added so far."""
        counts = self._verdict_counts
        row_count = counts.total()
        difference = None
        if self._comparison is not None:
            difference = self._comparison.report(row_count)
        return Report(
            expression=render(self.tree),
            rows=row_count,
            matched=counts[TRUE],
            false=counts[FALSE],
            null=counts[NULL],
            errors=counts[ERROR],
            unknown=counts[NEEDS_RECORD],
            samples=self._matched_samples.select(),
            atoms=tuple(_report_atom(atom.text, atom_counts) for atom, atom_counts in self._atoms),
            causes=self._report_causes(),
            properties=tuple(
                statistics.report(row_count, self._names) for statistics in self._properties
            ),
            cost=estimate_cost(self.tree, row_count, self._records_asked, self._excluded),
            difference=difference,
        )

    def _report_causes(self) -> tuple[ErrorReport, ...]:
        """Return the causes of failed evaluations, the most frequent first."""
        reports = [
            ErrorReport(reason, cause.count, cause.example, cause.sample)
            for reason, cause in self._causes.items()
        ]
        return tuple(sorted(reports, key=lambda report: -report.count))

    def _iter_failures(
        self,
        block: ColumnBlock,
        verdicts: NDArray[np.uint8],
        atom_verdicts: list[NDArray[np.uint8]],
    ) -> Iterator[tuple[int, Properties, int]]:
        """Yield (row, properties, count) for one example of each group of failed evaluations.

        `verdicts` has the verdict of the whole expression for each row of the block, and
        `atom_verdicts` has such an array for each atom. Rows in which all atoms have the same
        verdicts fail for the same reason. They form one group, and `count` is the number of its
        rows. If an atom reads several properties, its verdict does not show which property failed.
        Then the rows are grouped by their values instead.
        """
        failed_rows = np.flatnonzero(verdicts == ERROR)
        if not len(failed_rows):
            return
        group_keys: list[NDArray[Any]]
        if any(len(atom.property_names) > 1 for atom, _ in self._atoms):
            names = sorted(self._selector.property_names & block.columns.keys())
            group_keys = [block.columns[name].codes[failed_rows] for name in names]
        else:
            group_keys = [verdicts_of_atom[failed_rows] for verdicts_of_atom in atom_verdicts]
        _, example_indices, counts = np.unique(
            np.stack(group_keys), axis=1, return_index=True, return_counts=True
        )
        example_rows = failed_rows[example_indices].tolist()
        for row, count in zip(example_rows, counts.tolist(), strict=True):
            yield row, _properties_of_row(block, row), count

    def _add_cause(self, properties: Properties, sample: Sample, count: int = 1) -> None:
        """Evaluate a message that is expected to fail, and add `count` to the cause of the failure.

        `properties` are the properties of the message, and `sample` says where it is. Do nothing if
        the evaluation does not fail.
        """
        try:
            self._selector.evaluate(properties)
        except FilterEvaluationError as error:
            cause = self._causes.setdefault(error.reason, _Cause(str(error), sample))
            cause.count += count


def _properties_of_row(block: ColumnBlock, row: int) -> dict[str, str]:
    """Return the properties of a row from the columns of its block, by name."""
    return {
        name: column.values[column.codes[row]]
        for name, column in block.columns.items()
        if column.codes[row] >= 0
    }


def _report_atom(text: str, verdict_counts: Counter[int]) -> AtomReport:
    """Return the report on one condition of the filter.

    `verdict_counts` has the number of messages with each of its verdicts.
    """
    return AtomReport(
        text=text,
        true=verdict_counts[TRUE],
        false=verdict_counts[FALSE],
        null=verdict_counts[NULL],
        error=verdict_counts[ERROR],
        unknown=verdict_counts[NEEDS_RECORD],
    )


@dataclass(slots=True)
class _Cause:
    """A cause of failed evaluations: its first error and message, and its number of messages."""

    example: str
    sample: Sample
    count: int = 0


class _Comparison:
    """Counts the messages that the tried filter, another filter, both or neither accepts.

    `tree` is the other filter.
    """

    def __init__(self, tree: Node) -> None:
        """Compare with the filter that has this tree; nothing is counted yet."""
        self._other = Selector("", tree)
        self._matched_by_both = 0
        self._matched_only_by_this = 0
        self._matched_only_by_other = 0
        self._samples_of_this = _Samples()
        self._samples_of_other = _Samples()

    def add(
        self,
        block: ColumnBlock,
        matched_by_this: NDArray[np.bool_],
        source: Hashable,
        read_record: RecordReader | None,
    ) -> None:
        """Evaluate the other filter for all rows of a block, and count which of the filters match.

        `matched_by_this` has True for each row that the tried filter matches. `source` is stored in
        the samples. `read_record(row)` returns the properties in the record of a row that the
        columns do not decide. None means that no records can be read.
        """
        other_verdicts = self._other.vectorised.verdicts(block)
        if read_record is not None:
            _decide_by_records(self._other, other_verdicts, read_record)
        matched_by_other = other_verdicts == TRUE
        only_by_this = matched_by_this & ~matched_by_other
        only_by_other = matched_by_other & ~matched_by_this
        self._matched_by_both += int((matched_by_this & matched_by_other).sum())
        self._matched_only_by_this += int(only_by_this.sum())
        self._matched_only_by_other += int(only_by_other.sum())
        self._samples_of_this.add(source, block.first_offset, only_by_this)
        self._samples_of_other.add(source, block.first_offset, only_by_other)

    def report(self, rows: int) -> Difference:
        """Return the result of the comparison for all `rows` messages that were added."""
        matched = self._matched_by_both + self._matched_only_by_this + self._matched_only_by_other
        return Difference(
            other=render(self._other.tree),
            both=self._matched_by_both,
            only_here=self._matched_only_by_this,
            only_there=self._matched_only_by_other,
            neither=rows - matched,
            samples_here=self._samples_of_this.select(),
            samples_there=self._samples_of_other.select(),
        )


def iter_atoms(tree: Node) -> Iterator[Node]:
    """Yield the conditions that AND, OR and NOT join, from left to right.

    `a = 1 AND NOT (b = 2 OR c)` yields `a = 1`, `b = 2` and `c`.
    """
    if isinstance(tree, And | Or | Not):
        for child in children(tree):
            yield from iter_atoms(child)
    else:
        yield tree


class _Samples:
    """Collects a bounded number of samples, spread evenly over the messages that were added."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def add(self, source: Hashable, first_offset: int, is_selected: NDArray[np.bool_]) -> None:
        """Add up to SAMPLES_MAX samples of a block, from the rows for which `is_selected` is true.

        The samples are spread over these rows. Row 0 has the queue offset `first_offset`. If there
        are too many samples in total, half of them are removed, spread over all.
        """
        rows = _spread(np.flatnonzero(is_selected).tolist(), SAMPLES_MAX)
        self._samples += [Sample(source, first_offset + row) for row in rows]
        if len(self._samples) > 64 * SAMPLES_MAX:
            self._samples = _spread(self._samples, 32 * SAMPLES_MAX)

    def select(self) -> tuple[Sample, ...]:
        """Return at most SAMPLES_MAX of the samples."""
        return tuple(_spread(self._samples, SAMPLES_MAX))


def _spread(elements: list[Any], count: int) -> list[Any]:
    """Return at most `count` elements of a list, at even distances."""
    if len(elements) <= count:
        return elements
    return [elements[index * len(elements) // count] for index in range(count)]


def _count_verdicts(verdicts: NDArray[np.uint8]) -> dict[int, int]:
    """Return the number of rows with each verdict, from FALSE to NEEDS_RECORD."""
    return dict(enumerate(np.bincount(verdicts, minlength=NEEDS_RECORD + 1).tolist()))


def _decide_by_records(
    selector: Selector, verdicts: NDArray[np.uint8], read_record: RecordReader
) -> list[int]:
    """Replace each NEEDS_RECORD in `verdicts` by the verdict for the properties in the record.

    `verdicts` is changed in place. Return the rows for which the new verdict is ERROR.
    """
    rows: list[int] = np.flatnonzero(verdicts == NEEDS_RECORD).tolist()
    for row in rows:
        verdicts[row] = evaluate_verdict(selector.evaluate, read_record(row))
    return [row for row in rows if verdicts[row] == ERROR]
