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
from typing import Final, NamedTuple

import orjson

from sluicemq.broker.byte_cache import kept
from sluicemq.errors import FilterError
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.render import render
from sluicemq.filter.tags import is_tag_kind, parse_tags
from sluicemq.model.message import RETRY_TOPIC, TAGS
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription
from sluicemq.model.topic import RETRY_PREFIX

LANE_PROPERTY: Final = "SLUICE_LANE"
"""Of a message that was sent back: the lane that it returns to."""
LANE: Final = "LANE"
WHOLE: Final = "WHOLE"

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


def _atom_bytes(atom: Atom) -> int:
    """About as much is made of an atom: compiled SQL92 is large."""
    return (32 if atom.kind in {SQL92, WHOLE} else 4) * len(atom.text)


def rule_bytes(rule: Rule) -> int:
    return sum(256 + _atom_bytes(atom) for item in rule for atom in item.must | item.none)


def _text_bytes(*texts: str) -> int:
    return 4 * sum(map(len, texts))


def clause(must: Iterable[Atom], none: Iterable[Atom] = ()) -> Rule:
    """A rule of one clause; of none when it contradicts itself."""
    wanted, unwanted = frozenset(must), frozenset(none)
    if wanted & unwanted or EVERYTHING in unwanted or _has_no_tag_left(wanted, unwanted):
        return NOTHING
    return frozenset([Clause(wanted, unwanted)])


def _has_no_tag_left(wanted: frozenset[Atom], unwanted: frozenset[Atom]) -> bool:
    """Is every tag that is wanted unwanted too?"""
    sets = [tags for atom in wanted if atom.kind == TAG and (tags := tags_of(atom)) is not None]
    if not sets:
        return False
    left = frozenset.intersection(*sets)
    for atom in unwanted:
        if atom.kind == TAG:
            left -= tags_of(atom) or frozenset()
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


@kept(_text_bytes)
def _normal(topic: str, kind: str, expression: str) -> tuple[str, str]:
    return normal_expression(Subscription(topic, expression, kind or TAG))


@kept(_text_bytes)
def parse_key(key: str) -> dict[str, Atom]:
    """A subscription's key -> topic -> expression."""
    return {topic: Atom(kind, text) for topic, kind, text in orjson.loads(key)}


@kept(_text_bytes)
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
    lane = {key: Atom(LANE, lane_id(key)) for key in keys}
    whole = {key: Atom(WHOLE, key) for key in keys}
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


@kept(_atom_bytes)
def matcher(atom: Atom) -> Match:
    """Does a message with these properties match? An expression that does not compile or cannot be
    evaluated does not."""
    if atom.kind == TAG:
        tags = tags_of(atom)
        return (lambda properties: True) if tags is None else (
            lambda properties: properties.get(TAGS) in tags
        )  # fmt: skip
    if atom.kind == SQL92:
        try:
            return compile_sql92(atom.text).matches
        except FilterError:
            return lambda properties: False
    if atom.kind == LANE:
        return lambda properties: properties.get(LANE_PROPERTY) == atom.text
    if atom.kind != WHOLE:
        return lambda properties: False
    by_topic = {topic: matcher(own) for topic, own in parse_key(atom.text).items()}

    def of_origin(properties: Mapping[str, str]) -> bool:
        match = by_topic.get(properties.get(RETRY_TOPIC, ""))
        return match is not None and match(properties)

    return of_origin


@kept(_atom_bytes)
def tags_of(atom: Atom) -> frozenset[str] | None:
    """None: every tag."""
    try:
        text, tags, _ = parse_tags(atom.text)
    except FilterError:
        return frozenset()
    return None if text == ALL else tags


@kept(_atom_bytes)
def codes_of(atom: Atom) -> frozenset[int] | None:
    """The hash codes of a tag expression; None when it wants everything or is of another kind."""
    if atom.kind != TAG or tags_of(atom) is None:
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
