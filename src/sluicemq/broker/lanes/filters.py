"""The filter that a lane's rule makes for the store: by tag codes where they decide, by property
columns where there are any, else by the properties of each record.

On a whole block of columns it finds exactly the messages that their records would give. An atom is
an expression on properties: tags are `TAGS IN ('a', 'b')`, a lane's name is `SLUICE_LANE = '…'`, a
subscription on a retry topic is "for the topic it came from, its expression". Each is judged by the
column engine on its own, because an error in one of them means "does not match" here and does not
end the others. Then the clauses are put together row by row, with a third value for rows that only
the record can tell.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluicemq.broker.lanes.rules import (
    EVERYTHING,
    LANE,
    LANE_PROPERTY,
    WHOLE,
    Atom,
    Clause,
    Order,
    Rule,
    atom_bytes,
    codes_of,
    kept,
    matcher,
    parse_key,
    rule_bytes,
    rule_weight,
    tags_of,
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

    Rows = NDArray[np.bool_]

FEW_ROWS: Final = 32
"""So few are faster asked one by one, by their records, until the first atom takes them."""


def among(name: str, texts: list[str]) -> str:
    """An expression that holds where a property is one of the texts."""
    quoted = ", ".join("'{}'".format(text.replace("'", "''")) for text in texts)
    return f"{name} IN ({quoted})" if texts else "FALSE"


class Known(NamedTuple):
    """Rows that surely match, and rows that surely do not; what is neither asks its record."""

    yes: "Rows"
    no: "Rows"


def _all_rows(block: ColumnBlock) -> Known:
    import numpy as np  # noqa: PLC0415 - only when somebody filters

    return Known(np.ones(block.rows, np.bool_), np.zeros(block.rows, np.bool_))


def _expressions(atom: Atom) -> list[list[str]]:
    """Lists of expressions: of one list all must match."""
    if atom.kind == SQL92:
        return [[atom.text]]
    if atom.kind == TAG:
        return [[among(TAGS, sorted(tags_of(atom) or ()))]]
    if atom.kind == LANE:
        return [[among(LANE_PROPERTY, [atom.text])]]
    found: list[list[str]] = []
    for topic, own in parse_key(atom.text).items() if atom.kind == WHOLE else ():
        origin = among(RETRY_TOPIC, [topic])
        is_everything = own.kind == TAG and tags_of(own) is None
        found += [[origin]] if is_everything else [[origin, *rest] for rest in _expressions(own)]
    return found


class AtomColumns:
    """An atom on blocks of columns."""

    __slots__ = ("is_everything", "lists", "names")

    def __init__(self, atom: Atom) -> None:
        self.is_everything = atom.kind == TAG and tags_of(atom) is None
        self.lists: list[list[Vectorised]] = []
        for texts in () if self.is_everything else _expressions(atom):
            with suppress(FilterError):  # it matches nothing
                self.lists.append([compile_sql92(text).vectorised for text in texts])
        self.names = frozenset[str]().union(*(v.names for some in self.lists for v in some))

    def known(self, block: ColumnBlock) -> Known:
        if self.is_everything:
            return _all_rows(block)
        no, yes = _all_rows(block)
        for vectorised in self.lists:
            all_yes, all_no = _all_rows(block)
            for one in vectorised:
                verdicts = one.verdicts(block)
                matches = verdicts == TRUE
                all_yes &= matches
                all_no |= ~matches & (verdicts != NEEDS_RECORD)
            yes |= all_yes
            no &= all_no
        return Known(yes, no)

    def can_match(self, stats: BlockStats) -> bool:
        return self.is_everything or any(
            all(one.can_match(stats) for one in vectorised) for vectorised in self.lists
        )


@kept(atom_bytes)
def atom_columns(atom: Atom) -> AtomColumns:
    return AtomColumns(atom)


Unwanted = list[tuple[Order, list[AtomColumns]]]
"""Orders, with those of their atoms that are no mere values."""


class RuleColumns:
    """A rule for blocks: a `model.subscription.BlockFilter`."""

    __slots__ = ("_clauses",)

    def __init__(self, rule: Rule) -> None:
        self._clauses: list[tuple[list[AtomColumns], Unwanted]] = [
            (
                [atom_columns(atom) for atom in must],
                [(order, [atom_columns(atom) for atom in order.others()]) for order in none],
            )
            for must, none in rule
        ]

    @property
    def names(self) -> frozenset[str]:
        """The properties that it reads."""
        found = {TAGS, LANE_PROPERTY} if any(none for _, none in self._clauses) else set()
        for must, none in self._clauses:
            for item in (*must, *(other for _, others in none for other in others)):
                found |= item.names
        return frozenset(found)

    def verdicts(self, block: ColumnBlock) -> "NDArray[np.uint8]":
        """FALSE, TRUE, NEEDS_RECORD: one a row."""
        import numpy as np  # noqa: PLC0415 - only when somebody filters

        no, yes = _all_rows(block)
        for must, none in self._clauses:
            wants, refuses = _all_rows(block)
            for atom in must:
                known = atom.known(block)
                wants &= known.yes
                refuses |= known.no
            if none:
                rows = (~refuses).nonzero()[0]
                rows = rows[~_is_in(rows, block.odd)]
                # What must not match is asked of the rows alone that are left, and of ever fewer:
                # first by a property's value, then atom by atom.
                takers: list[tuple[Order, str | AtomColumns]] = []
                for order, others in none:
                    takers += [(order, TAGS), (order, LANE_PROPERTY)]
                    takers += [(order, other) for other in others]
                for order, taker in takers:
                    if len(rows) <= FEW_ROWS:
                        wants[rows] = False
                        break
                    some = block.some(rows)
                    if isinstance(taker, AtomColumns):
                        taken = taker.known(some)
                    else:
                        taken = _by_value(taker, order, some)
                    wants[rows[~taken.no]] = False
                    refuses[rows[taken.yes]] = True
                    rows = rows[~taken.yes]
                wants[block.odd] = False
            yes |= wants
            no &= refuses
        found = np.full(block.rows, NEEDS_RECORD, np.uint8)
        found[yes] = TRUE
        found[no] = FALSE
        return found

    def count(self, block: ColumnBlock) -> int | None:
        """How many rows are TRUE; None when some record has to be asked."""
        verdicts = self.verdicts(block)
        return None if NEEDS_RECORD in verdicts else int((verdicts == TRUE).sum())

    def can_match(self, stats: BlockStats) -> bool:
        """False when no row of such a block is the rule's."""
        return any(all(item.can_match(stats) for item in must) for must, _ in self._clauses)


def _by_value(name: str, order: Order, block: ColumnBlock) -> Known:
    """The rows whose value of a property an order has."""
    everybody, nobody = _all_rows(block)
    if name in block.excluded:
        return Known(nobody, nobody)
    column = block.columns.get(name)
    if column is None:
        return Known(nobody, everybody)
    yes = _is_in(
        column.codes,
        [at for at, value in enumerate(column.values) if order.has_value(name, value)],
    )
    return Known(yes, ~yes)


def _is_in(rows: "NDArray[np.signedinteger[Any]]", some: Any) -> "Rows":
    import numpy as np  # noqa: PLC0415 - only when somebody filters

    return np.isin(rows, some)


# ---------------------------------------------------------------------------------- records


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
    simple = [
        Clause(must - {EVERYTHING}, none)
        for must, none in rule
        if _clause_codes(Clause(must, none)) != frozenset()
    ]
    if any(not item.must and not item.none for item in simple):
        return None
    atoms = [next(iter(item.must)) for item in simple if len(item.must) == 1 and not item.none]
    if len(atoms) == len(simple):
        if len(atoms) == 1 and atoms[0].kind == SQL92:
            try:
                return compile_sql92(atoms[0].text)
            except FilterError:
                return TagFilter(Subscription("", "-", TAG, codes=frozenset()))
        codes = [codes_of(atom) for atom in atoms]
        if None not in codes:
            union = frozenset[int]().union(*(item or () for item in codes))
            return TagFilter(Subscription("", "-", TAG, codes=union))
    return RuleFilter(frozenset(simple))
