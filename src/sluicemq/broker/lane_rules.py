"""Which messages belong to a lane: rules over expressions, and the filter a rule makes.

An *atom* is one expression: of tags, of SQL92; on a retry topic the whole subscription of a lane
(asked about the topic a message came from) or the name of a lane (a message says by whom it was
sent back). A *clause* says which atoms must match and which must not; a *rule* is a set of
clauses, one of which has to hold. Rules are closed under what lanes do to each other: hand over
(`both`) and take up (`|`).

Whether an atom matches depends on the message alone, so lanes whose rules exclude each other never
get the same message, whatever they read when.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import orjson

from sluicemq.errors import FilterError
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.render import render
from sluicemq.filter.sql import Sql92Filter
from sluicemq.filter.tags import TagFilter, is_tag_kind, parse_tags
from sluicemq.model.message import RETRY_TOPIC, TAGS
from sluicemq.model.subscription import ALL, SQL92, TAG, MessageFilter, Subscription
from sluicemq.model.topic import RETRY_PREFIX

LANE_PROPERTY: Final = "SLUICE_LANE"
"""Of a message that was sent back: the lane that it returns to."""
_LANE: Final = "LANE"
_WHOLE: Final = "WHOLE"

Match = Callable[[Mapping[str, str]], bool]


class Atom(NamedTuple):
    """`kind`: TAG, SQL92, LANE (text: a lane's id) or WHOLE (text: a subscription's key)."""

    kind: str
    text: str


class Clause(NamedTuple):
    must: frozenset[Atom]
    none: frozenset[Atom]


Rule = frozenset[Clause]
NOTHING: Final[Rule] = frozenset()
EVERYTHING: Final = Atom(TAG, ALL)


def clause(must: Iterable[Atom], none: Iterable[Atom] = ()) -> Rule:
    """A rule of one clause; of none when it contradicts itself."""
    wanted, unwanted = frozenset(must), frozenset(none)
    if wanted & unwanted or EVERYTHING in unwanted or _has_no_tag_left(wanted, unwanted):
        return NOTHING
    return frozenset([Clause(wanted, unwanted)])


def _has_no_tag_left(wanted: frozenset[Atom], unwanted: frozenset[Atom]) -> bool:
    """Is every tag that is wanted unwanted too?"""
    sets = [tags for atom in wanted if atom.kind == TAG and (tags := _tags(atom)) is not None]
    if not sets:
        return False
    left = frozenset.intersection(*sets)
    for atom in unwanted:
        if atom.kind == TAG:
            left -= _tags(atom) or frozenset()
    return not left


def both(one: Rule, other: Rule) -> Rule:
    """What both rules want."""
    found: set[Clause] = set()
    for left in one:
        for right in other:
            found |= clause(left.must | right.must, left.none | right.none)
    return _without_special_cases(found)


def either(one: Rule, other: Rule) -> Rule:
    """What at least one of them wants."""
    return _without_special_cases(one | other)


def _without_special_cases(clauses: Iterable[Clause]) -> Rule:
    """A clause that another one covers says nothing."""
    all_ = set(clauses)
    return frozenset(
        item
        for item in all_
        if not any(
            other != item and other.must <= item.must and other.none <= item.none for other in all_
        )
    )


# ------------------------------------------------------------------------------ subscriptions


def normal_expression(subscription: Subscription) -> tuple[str, str]:
    """(kind, expression) so that two spellings of the same are equal."""
    if is_tag_kind(subscription.kind):
        try:
            text, tags, _ = parse_tags(subscription.expression)
        except FilterError:
            return TAG, subscription.expression
        return TAG, "||".join(sorted(tags)) if tags else text
    if subscription.kind != SQL92:  # nobody's: it must not be taken for a kind of our own
        return f"?{subscription.kind}", subscription.expression
    try:
        return subscription.kind, render(compile_sql92(subscription.expression).tree)
    except FilterError:
        return subscription.kind, subscription.expression.strip()


def subscription_key(group: str, subscriptions: Iterable[Subscription]) -> str:
    """All topics and expressions but the group's own retry topic, as text; "" without any."""
    own = RETRY_PREFIX + group
    wanted = sorted(
        (item.topic, *_normal(item.topic, item.kind, item.expression))
        for item in subscriptions
        if item.topic != own
    )
    return orjson.dumps(wanted).decode() if wanted else ""


def normal_atom(subscription: Subscription) -> Atom:
    """A topic's expression as lanes compare it."""
    return Atom(*_normal(subscription.topic, subscription.kind, subscription.expression))


@lru_cache(maxsize=4096)
def _normal(topic: str, kind: str, expression: str) -> tuple[str, str]:
    return normal_expression(Subscription(topic, expression, kind or TAG))


@lru_cache(maxsize=4096)
def parse_key(key: str) -> dict[str, Atom]:
    """A subscription's key -> topic -> expression."""
    return {topic: Atom(kind, text) for topic, kind, text in orjson.loads(key)}


@lru_cache(maxsize=4096)
def lane_id(key: str) -> str:
    """A short name of a subscription, the same at every broker and after every restart."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


# ------------------------------------------------------------------------------------ claims


def claims(topic: str, live: Sequence[str], idle: Sequence[str]) -> dict[str, Rule]:
    """Who gets which messages of a topic, from now on: subscription key -> rule.

    `live` from the oldest on, then `idle` lanes, which get what no live one matches. The rules
    exclude each other.
    """
    if topic.startswith(RETRY_PREFIX):
        return _retry_claims(live, idle)
    found: dict[str, Rule] = {}
    before: list[Atom] = []
    for key in (*live, *idle):
        atom = parse_key(key).get(topic)
        if atom is not None:
            found[key] = clause([atom], before)
            before.append(atom)
    return found


def _retry_claims(live: Sequence[str], idle: Sequence[str]) -> dict[str, Rule]:
    """A message returns to the lane it names; to the oldest one whose expression for its first
    topic matches when that lane is away; to the oldest of all when nobody's does."""
    keys = [*live, *idle]
    lane = {key: Atom(_LANE, lane_id(key)) for key in keys}
    whole = {key: Atom(_WHOLE, key) for key in keys}
    found: dict[str, Rule] = {}
    for index, key in enumerate(live):
        others = [lane[other] for other in live if other != key]
        found[key] = clause([lane[key]]) | clause(
            [whole[key]], [*others, *(whole[other] for other in live[:index])]
        )
    for index, key in enumerate(idle):
        alive = [whole[other] for other in live]
        named = [lane[other] for other in keys if other != key]
        found[key] = clause([lane[key]], alive) | clause(
            [whole[key]], [*named, *alive, *(whole[other] for other in idle[:index])]
        )
    first = keys[0]
    rest = clause([], [*lane.values(), *whole.values()])
    found[first] = either(found[first], rest)
    return found


def own_claim(topic: str, key: str) -> Rule:
    """What a lane gets that is alone."""
    return claims(topic, [key], []).get(key, NOTHING)


# ----------------------------------------------------------------------------------- filters


@lru_cache(maxsize=4096)
def matcher(atom: Atom) -> Match:
    """Does a message with these properties match? An expression that does not compile or cannot be
    evaluated does not."""
    if atom.kind == TAG:
        tags = _tags(atom)
        return (lambda properties: True) if tags is None else (
            lambda properties: properties.get(TAGS) in tags
        )  # fmt: skip
    if atom.kind == SQL92:
        try:
            return compile_sql92(atom.text).matches
        except FilterError:
            return lambda properties: False
    if atom.kind == _LANE:
        return lambda properties: properties.get(LANE_PROPERTY) == atom.text
    if atom.kind != _WHOLE:
        return lambda properties: False
    by_topic = {topic: matcher(own) for topic, own in parse_key(atom.text).items()}

    def of_origin(properties: Mapping[str, str]) -> bool:
        match = by_topic.get(properties.get(RETRY_TOPIC, ""))
        return match is not None and match(properties)

    return of_origin


@lru_cache(maxsize=4096)
def _tags(atom: Atom) -> frozenset[str] | None:
    """None: every tag."""
    try:
        text, tags, _ = parse_tags(atom.text)
    except FilterError:
        return frozenset()
    return None if text == ALL else tags


@lru_cache(maxsize=4096)
def _codes(atom: Atom) -> frozenset[int] | None:
    """The hash codes of a tag expression; None when it wants everything or is of another kind."""
    if atom.kind != TAG or _tags(atom) is None:
        return None
    try:
        return parse_tags(atom.text)[2]
    except FilterError:
        return frozenset()


def rule_matches(rule: Rule, properties: Mapping[str, str]) -> bool:
    """Is a message with these properties the rule's?"""
    return any(
        all(matcher(atom)(properties) for atom in item.must)
        and not any(matcher(atom)(properties) for atom in item.none)
        for item in rule
    )


class RuleFilter:
    """Decides by the properties; the tag code rules out what it can."""

    __slots__ = ("_codes", "_rule")

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        codes = [_clause_codes(item) for item in rule]
        self._codes = None if None in codes else frozenset().union(*(c or () for c in codes))

    def by_consume_queue(self, tag_code: int) -> bool:
        return self._codes is None or tag_code in self._codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        return rule_matches(self._rule, properties)


def _clause_codes(item: Clause) -> frozenset[int] | None:
    """The codes a message must have one of; None when any will do."""
    sets = [codes for atom in item.must if (codes := _codes(atom)) is not None]
    return frozenset.intersection(*sets) if sets else None


@lru_cache(maxsize=4096)
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
        codes = [_codes(atom) for atom in atoms]
        if None not in codes:
            union = frozenset[int]().union(*(item or () for item in codes))
            return TagFilter(Subscription("", "-", TAG, codes=union))
    return RuleFilter(frozenset(simple))


def _simple(item: Clause) -> Clause:
    """Without what says nothing: everything must match, tags with other codes must not."""
    codes = _clause_codes(item)
    must = item.must - {EVERYTHING}
    if codes is None:
        return Clause(must, item.none)
    return Clause(
        must,
        frozenset(
            atom
            for atom in item.none
            if (other := _codes(atom)) is None or other & codes
        ),
    )  # fmt: skip


def _sql_filter(atom: Atom) -> MessageFilter:
    try:
        return Sql92Filter(compile_sql92(atom.text))
    except FilterError:
        return TagFilter(Subscription("", "-", TAG, codes=frozenset()))
