"""The filter that a lane's rule makes for the store: by tag codes where they decide, by property
columns where there are any, else by the properties of each record.
"""

from collections.abc import Mapping

from sluicemq.broker.byte_cache import kept
from sluicemq.broker.lane_columns import RuleColumns
from sluicemq.broker.lane_rules import (
    EVERYTHING,
    Atom,
    Clause,
    Rule,
    codes_of,
    matcher,
    rule_bytes,
    rule_weight,
)
from sluicemq.errors import FilterError
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.sql import Sql92Filter
from sluicemq.filter.tags import TagFilter
from sluicemq.model.subscription import SQL92, TAG, MessageFilter, Subscription


class RuleFilter:
    """Decides by the properties, or by their columns; the tag code rules out what it can."""

    __slots__ = ("_clauses", "_codes", "_vectorised", "rule", "weight")

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.weight = rule_weight(rule)
        self._vectorised: RuleColumns | None = None
        self._clauses = [([matcher(atom) for atom in must], none) for must, none in rule]
        codes = [_clause_codes(item) for item in rule]
        self._codes = None if None in codes else frozenset().union(*(c or () for c in codes))

    def by_consume_queue(self, tag_code: int) -> bool:
        return self._codes is None or tag_code in self._codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        for must, none in self._clauses:
            if all(match(properties) for match in must) and not any(
                order.takes(properties) for order in none
            ):
                return True
        return False

    @property
    def vectorised(self) -> "RuleColumns":
        """The same on a block of columns; made when it is first asked for."""
        if self._vectorised is None:
            self._vectorised = RuleColumns(self.rule)
        return self._vectorised


def _clause_codes(item: Clause) -> frozenset[int] | None:
    """The codes a message must have one of; None when any will do."""
    sets = [codes for atom in item.must if (codes := codes_of(atom)) is not None]
    return frozenset.intersection(*sets) if sets else None


@kept(rule_bytes)
def rule_filter(rule: Rule) -> MessageFilter | None:
    """The filter for the store; None lets everything through. Where tags alone decide and cannot
    be mistaken for each other, it is as fast as a filter of tags."""
    simple = [_simple(item) for item in rule if _clause_codes(item) != frozenset()]
    if any(not item.must and not item.none for item in simple):
        return None
    atoms = [next(iter(item.must)) for item in simple if len(item.must) == 1 and not item.none]
    if len(atoms) == len(simple):
        if len(atoms) == 1 and atoms[0].kind == SQL92:
            return _sql_filter(atoms[0])
        codes = [codes_of(atom) for atom in atoms]
        if None not in codes:
            union = frozenset[int]().union(*(item or () for item in codes))
            return TagFilter(Subscription("", "-", TAG, codes=union))
    return RuleFilter(frozenset(simple))


def _simple(item: Clause) -> Clause:
    """Without what says nothing."""
    return Clause(item.must - {EVERYTHING}, item.none)


def _sql_filter(atom: Atom) -> MessageFilter:
    try:
        return Sql92Filter(compile_sql92(atom.text))
    except FilterError:
        return TagFilter(Subscription("", "-", TAG, codes=frozenset()))
