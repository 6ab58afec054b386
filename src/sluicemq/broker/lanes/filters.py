"""Filters that evaluate the rules of lanes in the store.

A rule is evaluated by tag codes if these decide, otherwise by property columns if the block has
them, otherwise by the properties of each record.

On a block of columns, the result is exactly that of the records. Each atom is an expression on
properties: tags are `TAGS IN ('a', 'b')`, the id of a lane is `SLUICE_LANE = '…'`, and a
subscription on a retry topic is the topic of origin together with its expression. The column engine
evaluates each atom separately, because an error in one of them only means that this atom does not
match. Then the clauses are combined row by row. A row that only its record can decide has the third
value NEEDS_RECORD.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluicemq.broker.lanes.cache import cache_by_size
from sluicemq.broker.lanes.rules import (
    LANE_KIND,
    LANE_PROPERTY,
    MATCH_ALL,
    SUBSCRIPTION_KIND,
    Atom,
    AtomChain,
    Clause,
    LaneRule,
    compute_rule_weight,
    estimate_atom_bytes,
    estimate_rule_bytes,
    get_matcher,
    get_tag_codes,
    get_tags,
    parse_key,
)
from sluicemq.errors import FilterError
from sluicemq.filter.plan import FALSE, NEEDS_RECORD, TRUE
from sluicemq.filter.selector import Vectorised
from sluicemq.filter.subscriptions import TagFilter, compile_sql92
from sluicemq.model.message import RETRY_TOPIC, TAGS
from sluicemq.model.subscription import SQL92, TAG, MessageFilter, Subscription
from sluicemq.record.columns import BlockStats, ColumnBlock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    RowMask = NDArray[np.bool_]

FEW_ROWS_MAX: Final = 32
"""At most this many undecided rows are left to their records, which is faster than the columns."""


def format_in_expression(name: str, texts: list[str]) -> str:
    """Return a SQL92 expression that matches if property `name` is one of the texts."""
    quoted = ", ".join("'{}'".format(text.replace("'", "''")) for text in texts)
    return f"{name} IN ({quoted})" if texts else "FALSE"


class DecidedRows(NamedTuple):
    """The rows of a block that match for certain, and those that do not match for certain.

    A row that is in neither mask must be decided by its record.
    """

    matching: "RowMask"
    rejected: "RowMask"


def _decide_all(block: ColumnBlock) -> DecidedRows:
    """Return masks by which all rows of a block match."""
    import numpy as np  # noqa: PLC0415 - imported only if a filter is used

    return DecidedRows(np.ones(block.rows, np.bool_), np.zeros(block.rows, np.bool_))


def _find_expressions(atom: Atom) -> list[list[str]]:
    """Return lists of SQL92 expressions. The atom matches if all expressions of one list do."""
    if atom.kind == SQL92:
        return [[atom.text]]
    if atom.kind == TAG:
        return [[format_in_expression(TAGS, sorted(get_tags(atom) or ()))]]
    if atom.kind == LANE_KIND:
        return [[format_in_expression(LANE_PROPERTY, [atom.text])]]
    found: list[list[str]] = []
    by_topic = parse_key(atom.text) if atom.kind == SUBSCRIPTION_KIND else {}
    for topic, expression in by_topic.items():
        origin = format_in_expression(RETRY_TOPIC, [topic])
        matches_all = expression.kind == TAG and get_tags(expression) is None
        found += (
            [[origin]]
            if matches_all
            else [[origin, *rest] for rest in _find_expressions(expression)]
        )
    return found


class AtomColumnFilter:
    """Evaluates an atom on blocks of columns."""

    __slots__ = ("_expression_lists", "_matches_all", "names")

    def __init__(self, atom: Atom) -> None:
        self._matches_all = atom.kind == TAG and get_tags(atom) is None
        self._expression_lists: list[list[Vectorised]] = []
        for texts in () if self._matches_all else _find_expressions(atom):
            with suppress(FilterError):  # an invalid expression matches nothing
                compiled = [compile_sql92(text).vectorised for text in texts]
                self._expression_lists.append(compiled)
        names = (one.names for expressions in self._expression_lists for one in expressions)
        self.names = frozenset[str]().union(*names)
        """The properties that the atom reads."""

    def evaluate(self, block: ColumnBlock) -> DecidedRows:
        """Return which rows of a block match and which do not."""
        if self._matches_all:
            return _decide_all(block)
        rejected, matching = _decide_all(block)
        for expressions in self._expression_lists:
            all_match, any_rejects = _decide_all(block)
            for one in expressions:
                verdicts = one.verdicts(block)
                matches = verdicts == TRUE
                all_match &= matches
                any_rejects |= ~matches & (verdicts != NEEDS_RECORD)
            matching |= all_match
            rejected &= any_rejects
        return DecidedRows(matching, rejected)

    def can_match(self, stats: BlockStats) -> bool:
        """Return False if no row of a block with these statistics matches."""
        return self._matches_all or any(
            all(one.can_match(stats) for one in expressions)
            for expressions in self._expression_lists
        )


@cache_by_size(estimate_atom_bytes)
def _get_atom_filter(atom: Atom) -> AtomColumnFilter:
    """Return the column filter of an atom."""
    return AtomColumnFilter(atom)


ExcludedChains = list[tuple[AtomChain, list[AtomColumnFilter]]]
"""Chains, each with the filters of its general atoms."""


class RuleColumnFilter:
    """Evaluates a rule on blocks of columns. It is a `model.subscription.BlockFilter`."""

    __slots__ = ("_clauses",)

    def __init__(self, rule: LaneRule) -> None:
        self._clauses: list[tuple[list[AtomColumnFilter], ExcludedChains]] = [
            (
                [_get_atom_filter(atom) for atom in required],
                [
                    (chain, [_get_atom_filter(atom) for atom in chain.iter_general_atoms()])
                    for chain in excluded
                ],
            )
            for required, excluded in rule
        ]

    @property
    def names(self) -> frozenset[str]:
        """The properties that the rule reads."""
        has_chains = any(excluded for _, excluded in self._clauses)
        found = {TAGS, LANE_PROPERTY} if has_chains else set()
        for required, excluded in self._clauses:
            for item in (*required, *(one for _, atoms in excluded for one in atoms)):
                found |= item.names
        return frozenset(found)

    def verdicts(self, block: ColumnBlock) -> "NDArray[np.uint8]":
        """Return FALSE, TRUE or NEEDS_RECORD for each row of a block."""
        import numpy as np  # noqa: PLC0415 - imported only if a filter is used

        rejected, matching = _decide_all(block)
        for required, excluded in self._clauses:
            clause_matches, clause_rejects = _decide_all(block)
            for atom in required:
                decided = atom.evaluate(block)
                clause_matches &= decided.matching
                clause_rejects |= decided.rejected
            if excluded:
                self._apply_excluded(block, excluded, clause_matches, clause_rejects)
            matching |= clause_matches
            rejected &= clause_rejects
        found = np.full(block.rows, NEEDS_RECORD, np.uint8)
        found[matching] = TRUE
        found[rejected] = FALSE
        return found

    @staticmethod
    def _apply_excluded(
        block: ColumnBlock, excluded: ExcludedChains, matching: "RowMask", rejected: "RowMask"
    ) -> None:
        """Reject the rows that an excluded chain matches, in the masks of a clause.

        Only rows that the required atoms leave are examined, and ever fewer of them: first by the
        value of a property, then atom by atom.
        """
        rows = (~rejected).nonzero()[0]
        rows = rows[~_is_in(rows, block.odd)]
        tests: list[tuple[AtomChain, str | AtomColumnFilter]] = []
        for chain, atoms in excluded:
            tests += [(chain, TAGS), (chain, LANE_PROPERTY)]
            tests += [(chain, atom) for atom in atoms]
        for chain, test in tests:
            if len(rows) <= FEW_ROWS_MAX:
                matching[rows] = False
                break
            some = block.take_rows(rows)
            if isinstance(test, AtomColumnFilter):
                taken = test.evaluate(some)
            else:
                taken = _evaluate_values(test, chain, some)
            matching[rows[~taken.rejected]] = False
            rejected[rows[taken.matching]] = True
            rows = rows[~taken.matching]
        matching[block.odd] = False

    def count(self, block: ColumnBlock) -> int | None:
        """Return how many rows match; None if records are needed to know that."""
        verdicts = self.verdicts(block)
        return None if NEEDS_RECORD in verdicts else int((verdicts == TRUE).sum())

    def can_match(self, stats: BlockStats) -> bool:
        """Return False if no row of a block with these statistics matches."""
        return any(all(item.can_match(stats) for item in required) for required, _ in self._clauses)


def _evaluate_values(name: str, chain: AtomChain, block: ColumnBlock) -> DecidedRows:
    """Return the rows whose value of property `name` an atom of the chain matches."""
    all_rows, no_rows = _decide_all(block)
    if name in block.excluded:
        return DecidedRows(no_rows, no_rows)
    column = block.columns.get(name)
    if column is None:
        return DecidedRows(no_rows, all_rows)
    codes = [code for code, value in enumerate(column.values) if chain.has_value(name, value)]
    matching = _is_in(column.codes, codes)
    return DecidedRows(matching, ~matching)


def _is_in(rows: "NDArray[np.signedinteger[Any]]", some: Any) -> "RowMask":
    """Return a mask of the elements of `rows` that are in `some`."""
    import numpy as np  # noqa: PLC0415 - imported only if a filter is used

    return np.isin(rows, some)


# ---------------------------------------------------------------------------------- records


class RuleFilter:
    """Evaluates a rule on records or columns. It is a `model.subscription.MessageFilter`.

    Tag codes exclude messages before their properties are read.
    """

    __slots__ = ("_clauses", "_codes", "_vectorised", "rule", "weight")

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def __init__(self, rule: LaneRule) -> None:
        self.rule = rule
        self.weight = compute_rule_weight(rule)
        self._vectorised: RuleColumnFilter | None = None
        self._clauses = [
            ([get_matcher(atom) for atom in required], excluded) for required, excluded in rule
        ]
        codes = [_find_clause_codes(clause) for clause in rule]
        self._codes = None if None in codes else frozenset().union(*(c or () for c in codes))

    def by_consume_queue(self, tag_code: int) -> bool:
        """Return False if no message with this hash code of its tag matches."""
        return self._codes is None or tag_code in self._codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        """Return whether a message with these properties matches."""
        for required, excluded in self._clauses:
            if all(match(properties) for match in required) and not any(
                chain.matches_any(properties) for chain in excluded
            ):
                return True
        return False

    @property
    def vectorised(self) -> "RuleColumnFilter":
        """The filter for blocks of columns, created when it is first used."""
        if self._vectorised is None:
            self._vectorised = RuleColumnFilter(self.rule)
        return self._vectorised


def _find_clause_codes(clause: Clause) -> frozenset[int] | None:
    """Return the tag codes of messages that may match a clause. None means any code."""
    sets = [codes for atom in clause.required if (codes := get_tag_codes(atom)) is not None]
    return frozenset.intersection(*sets) if sets else None


@cache_by_size(estimate_rule_bytes)
def get_rule_filter(rule: LaneRule) -> MessageFilter | None:
    """Return the filter of a rule for the store; None if the rule matches all messages.

    If tags decide alone, and their codes cannot be confused, the filter is a `TagFilter`, which is
    as fast as that of an ordinary subscription.
    """
    clauses = [
        Clause(required - {MATCH_ALL}, excluded)
        for required, excluded in rule
        if _find_clause_codes(Clause(required, excluded)) != frozenset()
    ]
    if any(not clause.required and not clause.excluded for clause in clauses):
        return None
    atoms = [
        next(iter(clause.required))
        for clause in clauses
        if len(clause.required) == 1 and not clause.excluded
    ]
    if len(atoms) == len(clauses):
        if len(atoms) == 1 and atoms[0].kind == SQL92:
            try:
                return compile_sql92(atoms[0].text)
            except FilterError:
                return TagFilter(Subscription("", "-", TAG, codes=frozenset()))
        codes = [get_tag_codes(atom) for atom in atoms]
        if None not in codes:
            union = frozenset[int]().union(*(item or () for item in codes))
            return TagFilter(Subscription("", "-", TAG, codes=union))
    return RuleFilter(frozenset(clauses))
