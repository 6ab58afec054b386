"""Filters that evaluate the rules of lanes in the store.

A lane is the members of one group that have the same subscription. The rule of a lane says which
messages of a queue it gets (`rules.py`): an atom is one expression, a clause has atoms that must
match and chains of atoms that must not match, and a rule matches if one of its clauses does.

A rule is evaluated by tag codes (the hash codes of tags) if these decide, otherwise by property
columns if the block has them, otherwise by the properties of each record. A block of columns has a
row for each message of some offsets of a queue, and a column for each property.

On a block of columns, the result is exactly that of the records. Each atom is an expression on
properties: tags are `TAGS IN ('a', 'b')`, the id of a lane is `SLUICE_LANE = '…'`, and a
subscription on a retry topic is the topic of origin together with its expression. The column engine
evaluates each atom separately, because an error in one of them only means that this atom does not
match. Then the clauses are combined row by row. The result is a verdict for each row: TRUE, FALSE,
or NEEDS_RECORD if only the record of the message can decide.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
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


def format_in_expression(name: str, values: list[str]) -> str:
    """Return a SQL92 expression that matches if the value of property `name` is one of `values`.

    It matches nothing if `values` is empty.
    """
    if not values:
        return "FALSE"
    escaped_values = [value.replace("'", "''") for value in values]
    quoted_values = ", ".join([f"'{escaped}'" for escaped in escaped_values])
    return f"{name} IN ({quoted_values})"


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
    """Translate an atom, one filter expression, to lists of SQL92 expressions.

    The atom matches a message if all expressions of at least one list match. For example, the tag
    expression `a || b` becomes [["TAGS IN ('a', 'b')"]]. An empty result matches nothing. The atom
    must not be a tag expression that matches all messages.
    """
    if atom.kind == SQL92:
        return [[atom.text]]
    if atom.kind == TAG:
        matched_tags = sorted(get_matched_tags(atom) or ())
        return [[format_in_expression(TAGS, matched_tags)]]
    if atom.kind == LANE_KIND:
        return [[format_in_expression(LANE_PROPERTY, [atom.text])]]
    if atom.kind == SUBSCRIPTION_KIND:
        return _translate_subscription(atom.text)
    return []


def _translate_subscription(key: str) -> list[list[str]]:
    """Translate a whole subscription to lists of SQL92 expressions, for messages of a retry topic.

    The subscription matches a message if all expressions of at least one list match. Each topic of
    the subscription key `key` gives one or more lists. They begin with the expression that the
    message came from this topic originally; the other expressions are those of the subscription.
    """
    expression_lists: list[list[str]] = []
    for topic, atom in parse_key(key).items():
        is_from_topic = format_in_expression(RETRY_TOPIC, [topic])
        if _matches_all(atom):
            expression_lists.append([is_from_topic])
            continue
        expression_lists += [
            [is_from_topic, *expressions] for expressions in _translate_to_sql92(atom)
        ]
    return expression_lists


def _matches_all(atom: Atom) -> bool:
    """Return whether an atom is a tag expression that matches all messages."""
    return atom.kind == TAG and get_matched_tags(atom) is None


class AtomColumnFilter:
    """Evaluates an atom on blocks of columns."""

    __slots__ = ("_expression_lists", "_matches_all", "names")

    def __init__(self, atom: Atom) -> None:
        """Compile the filter expression `atom`. If it cannot be compiled, it matches nothing."""
        self._matches_all = _matches_all(atom)
        self._expression_lists: list[list[Vectorised]] = []
        """The atom matches if, for one of the lists, all expressions of the list match."""
        if not self._matches_all:
            for sql92_list in _translate_to_sql92(atom):
                with suppress(FilterError):  # an invalid expression matches nothing
                    compiled_list = [compile_sql92(sql92).vectorised for sql92 in sql92_list]
                    self._expression_lists.append(compiled_list)

        names: set[str] = set()
        for expressions in self._expression_lists:
            for expression in expressions:
                names |= expression.names
        self.names = frozenset(names)
        """The properties that the atom reads."""

    def evaluate(self, block: ColumnBlock) -> DecidedRows:
        """Return two masks of the rows of `block`: the rows that match, and those that do not.

        A row that is False in both masks is undecided: its record must be read.
        """
        if self._matches_all:
            return _decide_all(block)
        # `_decide_all` returns (a mask of True, a mask of False). At first all rows are rejected
        # and none matches. Each list may let some rows match.
        rejected, matching = _decide_all(block)
        for expressions in self._expression_lists:
            # A list matches a row if all its expressions do, and rejects it if one of them does.
            all_match, any_rejects = _decide_all(block)
            for expression in expressions:
                verdicts = expression.verdicts(block)
                matches = verdicts == TRUE
                all_match &= matches
                any_rejects |= ~matches & (verdicts != NEEDS_RECORD)
            matching |= all_match
            rejected &= any_rejects
        return DecidedRows(matching, rejected)

    def can_match(self, stats: BlockStats) -> bool:
        """Return False if no row of a block with these statistics matches."""
        if self._matches_all:
            return True
        return any(
            all(expression.can_match(stats) for expression in expressions)
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
        """Create the filters of all atoms (filter expressions) of `rule`.

        Filters of equal atoms are shared with other rules.
        """
        self._clauses: list[tuple[list[AtomColumnFilter], ExcludedChains]] = []
        """For each clause: the filters of its required atoms, and its excluded chains."""
        for required, excluded in rule:
            required_filters = [_get_atom_filter(atom) for atom in required]
            excluded_chains: ExcludedChains = []
            for chain in excluded:
                general_filters = [_get_atom_filter(atom) for atom in chain.iter_general_atoms()]
                excluded_chains.append((chain, general_filters))
            self._clauses.append((required_filters, excluded_chains))

    @property
    def names(self) -> frozenset[str]:
        """The properties that the rule reads."""
        names: set[str] = set()
        for required_filters, excluded_chains in self._clauses:
            for atom_filter in required_filters:
                names |= atom_filter.names
            for _, general_filters in excluded_chains:
                # The other atoms of a chain are looked up by the values of these properties.
                names |= {TAGS, LANE_PROPERTY}
                for atom_filter in general_filters:
                    names |= atom_filter.names
        return frozenset(names)

    def verdicts(self, block: ColumnBlock) -> "NDArray[np.uint8]":
        """Return an array with FALSE, TRUE or NEEDS_RECORD for each row of `block`.

        The rule matches a row if one of its clauses does. NEEDS_RECORD means that the columns do
        not decide whether the row matches.
        """
        import numpy as np  # noqa: PLC0415 - imported only if a filter is used

        # `_decide_all` returns (a mask of True, a mask of False). At first all rows are rejected
        # and none matches. Each clause may let some rows match.
        rejected, matching = _decide_all(block)
        for required_filters, excluded_chains in self._clauses:
            clause_matches, clause_rejects = _decide_all(block)
            for atom_filter in required_filters:
                decided = atom_filter.evaluate(block)
                clause_matches &= decided.matching
                clause_rejects |= decided.rejected
            if excluded_chains:
                self._reject_excluded(block, excluded_chains, clause_matches, clause_rejects)
            matching |= clause_matches
            rejected &= clause_rejects

        verdicts = np.full(block.rows, NEEDS_RECORD, np.uint8)
        verdicts[matching] = TRUE
        verdicts[rejected] = FALSE
        return verdicts

    @staticmethod
    def _reject_excluded(
        block: ColumnBlock,
        excluded_chains: ExcludedChains,
        matching: "RowMask",
        rejected: "RowMask",
    ) -> None:
        """Reject the rows that the excluded chains of a clause match, by changing the masks.

        On entry, `matching` and `rejected` say which rows the required atoms of the clause match
        and reject. A row that a chain matches becomes rejected. A row for which this is uncertain
        becomes undecided, that is False in both masks. Rows that are rejected already are not
        examined.
        """
        # The rows to examine. Those in `block.odd` can only be decided by their records.
        rows = (~rejected).nonzero()[0]
        rows = rows[~_is_in(rows, block.odd)]

        for find_excluded in _list_tests(excluded_chains):
            if len(rows) <= FEW_ROWS_MAX:
                matching[rows] = False  # undecided
                break
            excluded = find_excluded(block.take_rows(rows))
            is_maybe_excluded = ~excluded.rejected
            matching[rows[is_maybe_excluded]] = False
            rejected[rows[excluded.matching]] = True
            rows = rows[~excluded.matching]
        matching[block.odd] = False

    def count(self, block: ColumnBlock) -> int | None:
        """Return how many rows of a block match; None if some must be decided by their records."""
        verdicts = self.verdicts(block)
        return None if NEEDS_RECORD in verdicts else int((verdicts == TRUE).sum())

    def can_match(self, stats: BlockStats) -> bool:
        """Return False if no row of a block with these statistics matches."""
        return any(
            all(atom_filter.can_match(stats) for atom_filter in required_filters)
            for required_filters, _ in self._clauses
        )


def _list_tests(excluded_chains: ExcludedChains) -> list[Callable[[ColumnBlock], DecidedRows]]:
    """Return the tests by which rows are excluded.

    A test is a function that gets a block and returns which of its rows are matched, so excluded,
    and which are not. Each chain has two tests that look up the value of a property, which is fast,
    and one test for each atom that must be evaluated.
    """
    tests: list[Callable[[ColumnBlock], DecidedRows]] = []
    for chain, general_filters in excluded_chains:
        tests.append(partial(_look_up_values, TAGS, chain))
        tests.append(partial(_look_up_values, LANE_PROPERTY, chain))
        tests += [atom_filter.evaluate for atom_filter in general_filters]
    return tests


def _look_up_values(name: str, chain: AtomChain, block: ColumnBlock) -> DecidedRows:
    """Return which rows of `block` the chain matches by the value of the property `name`.

    A row is matched if an atom of the chain has the value of its property. All other rows are
    rejected. If the block has no column of the property because it is excluded, no row is decided.
    """
    all_rows, no_rows = _decide_all(block)
    if name in block.excluded:
        return DecidedRows(no_rows, no_rows)
    column = block.columns.get(name)
    if column is None:
        return DecidedRows(no_rows, all_rows)
    # A column contains for each row the index of its value in `column.values`: its code.
    matching_codes = []
    for code, property_value in enumerate(column.values):
        if chain.has_value(name, property_value):
            matching_codes.append(code)
    matching = _is_in(column.codes, matching_codes)
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
        """Create the functions that evaluate the required atoms (filter expressions) of `rule`."""
        self.rule = rule
        self.weight = compute_rule_weight(rule)
        self._vectorised: RuleColumnFilter | None = None
        self._clauses = [
            ([get_matcher(atom) for atom in required], excluded) for required, excluded in rule
        ]
        """For each clause: the matchers of its required atoms, and its excluded chains."""
        self._codes = _unite_codes([_find_clause_codes(clause) for clause in rule])
        """The tag codes of messages that may match; None means any code."""

    def by_consume_queue(self, tag_code: int) -> bool:
        """Return False if no message whose tag has this hash code matches. Called per message."""
        return self._codes is None or tag_code in self._codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        """Return whether the rule matches a message with these properties.

        One clause must match: all its required atoms match, and none of its excluded chains does.
        The name is RocketMQ's (isMatchedByCommitLog), because properties are in the commit log.
        Called for each message.
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
    """Return the tag codes (hash codes of tags) of the messages that a clause may match.

    None means any code. An empty set means that the clause matches no message.
    """
    all_code_sets = [get_tag_codes(atom) for atom in clause.required]
    code_sets = [codes for codes in all_code_sets if codes is not None]
    if not code_sets:
        return None
    return frozenset.intersection(*code_sets)


def _unite_codes(code_sets: Iterable[frozenset[int] | None]) -> frozenset[int] | None:
    """Return the union of sets of tag codes.

    None stands for any code. If one of the sets is None, the result is None.
    """
    united_codes: set[int] = set()
    for codes in code_sets:
        if codes is None:
            return None
        united_codes |= codes
    return frozenset(united_codes)


@cache_by_size(estimate_rule_bytes)
def get_rule_filter(rule: LaneRule) -> MessageFilter | None:
    """Return the fastest filter by which the store can evaluate `rule`.

    Return None if the rule matches all messages. The filter is one of these:

    - A compiled SQL92 filter, if the rule is one SQL92 expression without exclusions.
    - A TagFilter, if the rule consists of tag expressions without exclusions. A TagFilter without
      codes matches no message.
    - A RuleFilter in all other cases.
    """
    clauses = _simplify_clauses(rule)
    sole_atoms: list[Atom] = []  # of the clauses that have one atom and no exclusions
    for required, excluded in clauses:
        if not required and not excluded:
            return None  # the clause matches all messages
        if len(required) == 1 and not excluded:
            sole_atoms += required

    if len(sole_atoms) == len(clauses):
        subscription_filter = _find_subscription_filter(sole_atoms)
        if subscription_filter is not None:
            return subscription_filter
    return RuleFilter(frozenset(clauses))


def _find_subscription_filter(atoms: list[Atom]) -> MessageFilter | None:
    """Return the filter of an ordinary subscription that matches if one of `atoms` matches.

    Only one SQL92 atom, or any number of tag atoms, have such a filter. Otherwise, return None.
    Without atoms, and for an invalid SQL92 expression, the filter matches nothing.
    """
    if len(atoms) == 1 and atoms[0].kind == SQL92:
        try:
            return compile_sql92(atoms[0].text)
        except FilterError:  # an invalid expression matches nothing
            return _create_tag_filter(frozenset())
    codes = _unite_codes([get_tag_codes(atom) for atom in atoms])
    return _create_tag_filter(codes) if codes is not None else None


def _simplify_clauses(rule: LaneRule) -> list[Clause]:
    """Return the clauses of a rule that can match a message.

    A clause is left out if its tag expressions have no tag code in common. The atom MATCH_ALL,
    which matches every message, is removed from the other clauses.
    """
    clauses = []
    for clause in rule:
        can_match = _find_clause_codes(clause) != frozenset()
        if can_match:
            clauses.append(Clause(clause.required - {MATCH_ALL}, clause.excluded))
    return clauses


def _create_tag_filter(codes: frozenset[int]) -> TagFilter:
    """Return a filter that matches the messages whose tag has one of these hash codes."""
    return TagFilter(Subscription("", "-", TAG, codes=codes))
