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
    get_matched_tags,
    get_matcher,
    get_tag_codes,
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
    """Return a SQL92 expression that matches if the value of property `name` is one of `texts`.

    It matches nothing if `texts` is empty.
    """
    quoted = ", ".join("'{}'".format(text.replace("'", "''")) for text in texts)
    return f"{name} IN ({quoted})" if texts else "FALSE"


class DecidedRows(NamedTuple):
    """The rows of a block that match for certain, and those that do not match for certain.

    A row that is in neither mask must be decided by its record.
    """

    matching: "RowMask"
    rejected: "RowMask"


def _decide_all(block: ColumnBlock) -> DecidedRows:
    """Return masks by which all rows of a block match and none is rejected.

    The masks are new arrays, which the caller may change.
    """
    import numpy as np  # noqa: PLC0415 - imported only if a filter is used

    return DecidedRows(np.ones(block.rows, np.bool_), np.zeros(block.rows, np.bool_))


def _translate_to_sql92(atom: Atom) -> list[list[str]]:
    """Return an atom as lists of SQL92 expressions.

    The atom matches if, for one of the lists, all expressions of the list match. An empty result
    matches nothing. The atom must not be a tag expression that matches all messages.
    """
    if atom.kind == SQL92:
        return [[atom.text]]
    if atom.kind == TAG:
        return [[format_in_expression(TAGS, sorted(get_matched_tags(atom) or ()))]]
    if atom.kind == LANE_KIND:
        return [[format_in_expression(LANE_PROPERTY, [atom.text])]]
    expression_lists: list[list[str]] = []
    atoms_by_topic = parse_key(atom.text) if atom.kind == SUBSCRIPTION_KIND else {}
    for topic, topic_atom in atoms_by_topic.items():
        origin = format_in_expression(RETRY_TOPIC, [topic])
        matches_all = topic_atom.kind == TAG and get_matched_tags(topic_atom) is None
        if matches_all:
            expression_lists.append([origin])
        else:
            expression_lists += [[origin, *rest] for rest in _translate_to_sql92(topic_atom)]
    return expression_lists


class AtomColumnFilter:
    """Evaluates an atom on blocks of columns."""

    __slots__ = ("_expression_lists", "_matches_all", "names")

    def __init__(self, atom: Atom) -> None:
        self._matches_all = atom.kind == TAG and get_matched_tags(atom) is None
        self._expression_lists: list[list[Vectorised]] = []
        for texts in () if self._matches_all else _translate_to_sql92(atom):
            with suppress(FilterError):  # an invalid expression matches nothing
                compiled = [compile_sql92(text).vectorised for text in texts]
                self._expression_lists.append(compiled)
        names = (one.names for expressions in self._expression_lists for one in expressions)
        self.names = frozenset[str]().union(*names)
        """The properties that the atom reads."""

    def evaluate(self, block: ColumnBlock) -> DecidedRows:
        """Return which rows of a block match, which do not, and implicitly which are undecided."""
        if self._matches_all:
            return _decide_all(block)
        rejected, matching = _decide_all(block)  # exchanged: all rows are rejected at first
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
        names = {TAGS, LANE_PROPERTY} if has_chains else set()
        for required, excluded in self._clauses:
            for item in (*required, *(one for _, atoms in excluded for one in atoms)):
                names |= item.names
        return frozenset(names)

    def verdicts(self, block: ColumnBlock) -> "NDArray[np.uint8]":
        """Return FALSE, TRUE or NEEDS_RECORD for each row of a block."""
        import numpy as np  # noqa: PLC0415 - imported only if a filter is used

        rejected, matching = _decide_all(block)  # exchanged: all rows are rejected at first
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
        verdicts = np.full(block.rows, NEEDS_RECORD, np.uint8)
        verdicts[matching] = TRUE
        verdicts[rejected] = FALSE
        return verdicts

    @staticmethod
    def _apply_excluded(
        block: ColumnBlock, excluded: ExcludedChains, matching: "RowMask", rejected: "RowMask"
    ) -> None:
        """Apply the excluded chains of a clause to its masks `matching` and `rejected`, in place.

        On entry, the masks say which rows the required atoms match and reject. A row that a chain
        matches becomes rejected. A row for which that is uncertain becomes undecided, that is,
        False in both masks. Each test only examines the rows that are not rejected yet: first by
        the value of a property, then atom by atom.
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
            remaining = block.take_rows(rows)
            if isinstance(test, AtomColumnFilter):
                excluding = test.evaluate(remaining)
            else:
                excluding = _evaluate_values(test, chain, remaining)
            matching[rows[~excluding.rejected]] = False
            rejected[rows[excluding.matching]] = True
            rows = rows[~excluding.matching]
        matching[block.odd] = False

    def count(self, block: ColumnBlock) -> int | None:
        """Return how many rows of a block match; None if some must be decided by their records."""
        verdicts = self.verdicts(block)
        return None if NEEDS_RECORD in verdicts else int((verdicts == TRUE).sum())

    def can_match(self, stats: BlockStats) -> bool:
        """Return False if no row of a block with these statistics matches."""
        return any(all(item.can_match(stats) for item in required) for required, _ in self._clauses)


def _evaluate_values(name: str, chain: AtomChain, block: ColumnBlock) -> DecidedRows:
    """Return the rows that an atom of the chain matches by the value of property `name`.

    No row is decided if the block excludes the property. See `AtomChain.has_value`.
    """
    all_rows, no_rows = _decide_all(block)
    if name in block.excluded:
        return DecidedRows(no_rows, no_rows)
    column = block.columns.get(name)
    if column is None:
        return DecidedRows(no_rows, all_rows)
    codes = [code for code, value in enumerate(column.values) if chain.has_value(name, value)]
    matching = _is_in(column.codes, codes)
    return DecidedRows(matching, ~matching)


def _is_in(elements: "NDArray[np.signedinteger[Any]]", values: Any) -> "RowMask":
    """Return a mask that is True where an element is one of `values`."""
    import numpy as np  # noqa: PLC0415 - imported only if a filter is used

    return np.isin(elements, values)


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
        clause_codes = [_find_clause_codes(clause) for clause in rule]
        self._codes = (  # None if any tag code may match
            None if None in clause_codes else frozenset().union(*(c or () for c in clause_codes))
        )

    def by_consume_queue(self, tag_code: int) -> bool:
        """Return False if no message whose tag has this hash code matches. Called per message."""
        return self._codes is None or tag_code in self._codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        """Return whether a message with these properties matches. Called per message.

        The name is that of RocketMQ (isMatchedByCommitLog): properties are in the commit log.
        """
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
    """Return the tag codes of messages that may match a clause.

    None means any code, and an empty set that no message matches.
    """
    code_sets = [codes for atom in clause.required if (codes := get_tag_codes(atom)) is not None]
    return frozenset.intersection(*code_sets) if code_sets else None


@cache_by_size(estimate_rule_bytes)
def get_rule_filter(rule: LaneRule) -> MessageFilter | None:
    """Return the filter by which the store evaluates a rule; None if it matches all messages.

    The result is the fastest filter for the rule: the filter of an ordinary subscription if the
    rule is one SQL92 expression without exclusions (`compile_sql92`), or only consists of tag
    expressions without exclusions (`TagFilter`), otherwise a `RuleFilter`. A `TagFilter` without
    codes matches nothing.
    """
    clauses = [
        Clause(required - {MATCH_ALL}, excluded)
        for required, excluded in rule
        if _find_clause_codes(Clause(required, excluded)) != frozenset()  # it can match
    ]
    matches_all = any(not clause.required and not clause.excluded for clause in clauses)
    if matches_all:
        return None
    sole_atoms = [
        next(iter(clause.required))
        for clause in clauses
        if len(clause.required) == 1 and not clause.excluded
    ]
    is_each_clause_one_atom = len(sole_atoms) == len(clauses)
    if is_each_clause_one_atom:
        if len(sole_atoms) == 1 and sole_atoms[0].kind == SQL92:
            try:
                return compile_sql92(sole_atoms[0].text)
            except FilterError:
                return TagFilter(Subscription("", "-", TAG, codes=frozenset()))
        code_sets = [get_tag_codes(atom) for atom in sole_atoms]
        if None not in code_sets:
            codes = frozenset[int]().union(*(item or () for item in code_sets))
            return TagFilter(Subscription("", "-", TAG, codes=codes))
    return RuleFilter(frozenset(clauses))
