"""Rules: which messages of a queue belong to a lane.

An *atom* is one expression: of tags, or of SQL92. On a retry topic, an atom is the whole
subscription of a lane, evaluated for the topic from which a message came, or the id of a lane,
which a message that was sent back names. A *clause* has atoms that must match, and atoms that must
not match. A *rule* is a set of clauses. It matches a message if one of its clauses does. The
operations that lanes need, intersection (`intersect_rules`) and union (`|`), have rules as result.

The atoms that must not match are those of older lanes. They are *chains* of atoms, the oldest
first. The chain of a lane is that of the lane before it with one more atom, so a thousand lanes
share one chain, and their rules are as small as those of two. Tags and ids of lanes in a chain are
looked up in a table, not compared one by one.

Whether an atom matches depends on the message alone. So lanes whose rules exclude each other never
get the same message, whenever they read. design/0009 has the theory.

The *key* of a lane is its subscription as JSON text: [topic, kind, expression] for each topic. The
key of a lane that several subscriptions share is "+" and a JSON list of their keys. Both are
compared as text. Results that are derived from keys and expressions are cached.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import orjson

from sluicemq.broker.lanes.cache import cache_by_size
from sluicemq.errors import FilterError
from sluicemq.filter.nodes import render
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind, parse_tags, split_tags
from sluicemq.model import properties as reserved
from sluicemq.model.ids import java_hash
from sluicemq.model.message import RETRY_TOPIC, TAGS
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription
from sluicemq.model.topic import RETRY_PREFIX

LANE_PROPERTY: Final = reserved.LANE
"""The property of a message that was sent back with the id of the lane to which it returns."""
LANE_KIND: Final = "LANE"
"""The kind of an atom that matches messages which name a lane."""
SUBSCRIPTION_KIND: Final = "WHOLE"
"""The kind of an atom that matches messages by a subscription to the topic of their origin."""

PropertyMatcher = Callable[[Mapping[str, str]], bool]
"""Returns whether a message with the given properties matches."""


class Atom(NamedTuple):
    """One expression that a message matches or not."""

    kind: str
    """TAG, SQL92, LANE_KIND or SUBSCRIPTION_KIND."""
    text: str
    """The expression. For LANE_KIND the id of a lane, for SUBSCRIPTION_KIND a subscription key."""


class _ChainIndex:
    """The index in a chain at which each atom, tag code and property value is first.

    Chains that extend each other share one index, and each chain ignores what is behind its end.
    """

    __slots__ = ("atoms", "codes", "general_atoms", "size", "values")

    def __init__(self, atoms: Iterable[Atom]) -> None:
        self.size = 0
        self.atoms: dict[Atom, int] = {}
        self.codes: dict[int, int] = {}
        """By the hash code of a tag."""
        self.values: dict[tuple[str, str | None], int] = {}
        """By property and value, for atoms that match if a property has one of some values."""
        self.general_atoms: list[tuple[int, Atom]] = []
        """The other atoms, which must be evaluated."""
        for atom in atoms:
            self.append(atom)

    def append(self, atom: Atom) -> None:
        """Add an atom at the end of the chain."""
        index, self.size = self.size, self.size + 1
        self.atoms[atom] = index
        if atom.kind == LANE_KIND:
            self.values[LANE_PROPERTY, atom.text] = index
        elif atom.kind == TAG and (tags := get_tags(atom)) is not None:
            for tag in tags:
                self.values.setdefault((TAGS, tag), index)
            for code in get_tag_codes(atom) or ():
                self.codes.setdefault(code, index)
        else:
            self.general_atoms.append((index, atom))


class AtomChain:
    """A sequence of atoms, created by `extend_chain` only, so that equal chains are one object."""

    __slots__ = ("__weakref__", "_index", "atom", "length", "parent")

    def __init__(self, parent: "AtomChain | None", atom: Atom) -> None:
        self.parent: AtomChain | None = parent
        """The chain of all atoms but the last one; None if there is only one atom."""
        self.atom = atom
        """The last atom."""
        self.length: int = 1 if parent is None else parent.length + 1
        self._index: _ChainIndex
        if parent is not None and parent._index.size == parent.length:
            self._index = parent._index
            self._index.append(atom)
        else:
            self._index = _ChainIndex((*(parent.atoms() if parent is not None else ()), atom))

    def atoms(self) -> list[Atom]:
        """Return the atoms in order."""
        found = []
        node: AtomChain | None = self
        while node is not None:
            found.append(node.atom)
            node = node.parent
        return found[::-1]

    def __contains__(self, atom: Atom) -> bool:
        return self._index.atoms.get(atom, self.length) < self.length

    def has_value(self, name: str, value: str | None) -> bool:
        """Return whether an atom matches all messages with this value of property `name`."""
        return self._index.values.get((name, value), self.length) < self.length

    def iter_general_atoms(self) -> Iterator[Atom]:
        """Yield the atoms that cannot be looked up by the value of a property."""
        for index, atom in self._index.general_atoms:
            if index >= self.length:
                return
            yield atom

    def matches_any(self, properties: Mapping[str, str]) -> bool:
        """Return whether one of the atoms matches a message with these properties."""
        return (
            self.has_value(TAGS, properties.get(TAGS))
            or self.has_value(LANE_PROPERTY, properties.get(LANE_PROPERTY))
            or any(get_matcher(atom)(properties) for atom in self.iter_general_atoms())
        )

    def may_match_codes(self, codes: frozenset[int]) -> bool:
        """Return whether an atom may match a message whose tag has one of these hash codes."""
        known = self._index.codes
        return any(known.get(code, self.length) < self.length for code in codes) or (
            next(self.iter_general_atoms(), None) is not None
        )

    def is_prefix_of(self, other: "AtomChain") -> bool:
        """Return whether the other chain begins with all atoms of this one."""
        node: AtomChain | None = other
        while node is not None and node.length > self.length:
            node = node.parent
        return node is self


_chains: Final[WeakValueDictionary[tuple[AtomChain | None, Atom], AtomChain]] = (
    WeakValueDictionary()
)
"""All chains in use, by their parent and last atom."""


def extend_chain(chain: AtomChain | None, *atoms: Atom) -> AtomChain | None:
    """Return a chain with more atoms at its end. Atoms that it contains already are left out.

    None is the chain without atoms.
    """
    for atom in atoms:
        known = _chains.get((chain, atom))
        if known is None:
            if chain is not None and atom in chain:
                continue
            known = _chains[chain, atom] = AtomChain(chain, atom)
        chain = known
    return chain


class Clause(NamedTuple):
    """A condition on messages: all of some atoms match, and none of some others."""

    required: frozenset[Atom]
    """The atoms that must match."""
    excluded: frozenset[AtomChain]
    """The chains of which no atom may match."""


LaneRule = frozenset[Clause]
"""A rule matches a message if one of its clauses does."""
MATCH_NOTHING: Final[LaneRule] = frozenset()
"""The rule that matches no message."""
MATCH_ALL: Final = Atom(TAG, ALL)
"""The atom that matches all messages."""


def estimate_atom_bytes(atom: Atom) -> int:
    """Estimate the memory of the results that are derived from an atom, in bytes.

    Compiled SQL92 expressions are large.
    """
    return (32 if atom.kind in {SQL92, SUBSCRIPTION_KIND} else 4) * len(atom.text)


def estimate_rule_bytes(*rules: LaneRule) -> int:
    """Estimate the memory of rules in bytes, without their chains, which are shared."""
    return sum(
        256 + 32 * len(clause.excluded) + sum(map(estimate_atom_bytes, clause.required))
        for rule in rules
        for clause in rule
    )


def _estimate_text_bytes(*texts: str) -> int:
    """Estimate the memory of results that are derived from short texts."""
    return 4 * sum(map(len, texts))


def create_rule(required: Iterable[Atom], *excluded: AtomChain | None) -> LaneRule:
    """Return the rule of one clause: all atoms `required`, and no atom of the chains `excluded`.

    Chains that cannot match a message with the required tags are left out. Return MATCH_NOTHING if
    the clause can match no message.
    """
    atoms = frozenset(required)
    chains = [chain for chain in excluded if chain is not None]
    if any(MATCH_ALL in chain or any(atom in chain for atom in atoms) for chain in chains):
        return MATCH_NOTHING
    if sum(atom.kind == LANE_KIND for atom in atoms) > 1:
        return MATCH_NOTHING

    tag_sets = [tags for atom in atoms if atom.kind == TAG and (tags := get_tags(atom)) is not None]
    if tag_sets:
        tags = frozenset.intersection(*tag_sets)
        if all(any(chain.has_value(TAGS, tag) for chain in chains) for tag in tags):
            return MATCH_NOTHING
        codes = frozenset(map(java_hash, tags))
        chains = [chain for chain in chains if chain.may_match_codes(codes)]
    return frozenset([Clause(atoms, frozenset(chains))])


@cache_by_size(estimate_rule_bytes)
def intersect_rules(one: LaneRule, other: LaneRule) -> LaneRule:
    """Return the rule that matches the messages which both rules match."""
    found: set[Clause] = set()
    for left in one:
        for right in other:
            chains = [
                chain for chain in left.excluded if not _is_prefix_of_any(chain, right.excluded)
            ]
            chains += [
                chain
                for chain in right.excluded - left.excluded
                if not _is_prefix_of_any(chain, chains)
            ]
            found |= create_rule(left.required | right.required, *chains)
    return frozenset(found)


def _is_prefix_of_any(chain: AtomChain, others: Iterable[AtomChain]) -> bool:
    """Return whether another chain begins with all atoms of this one."""
    return any(chain is not other and chain.is_prefix_of(other) for other in others)


# ------------------------------------------------------------------------------ subscriptions


def subscription_key(group: str, subscriptions: Iterable[Subscription]) -> str:
    """Return the key of subscriptions, without the one to the group's retry topic.

    Return "" if there are no others.
    """
    return encode_key(iter_topic_atoms(group, subscriptions))


def iter_topic_atoms(
    group: str, subscriptions: Iterable[Subscription]
) -> Iterator[tuple[str, Atom]]:
    """Yield the topic and the normalized expression of each subscription.

    The subscription to the group's retry topic is left out.
    """
    retry_topic = RETRY_PREFIX + group
    for item in subscriptions:
        if item.topic != retry_topic:
            yield item.topic, normalize_atom(item.kind, item.expression)


def encode_key(atoms: Iterable[tuple[str, Atom]]) -> str:
    """Return the key of the topics and expressions that `iter_topic_atoms` yields; "" for none."""
    ordered = sorted(atoms)
    return orjson.dumps([(topic, *atom) for topic, atom in ordered]).decode() if ordered else ""


@cache_by_size(_estimate_text_bytes)
def normalize_atom(kind: str, expression: str) -> Atom:
    """Return an expression as an atom. Two spellings of the same expression have equal atoms.

    An expression that cannot be compiled is an atom of its own, which matches no message.
    """
    try:
        if is_tag_kind(kind):
            if not expression or expression == ALL:
                return Atom(TAG, ALL)
            tags = split_tags(expression)
            return Atom(TAG, "||".join(sorted(tags)) if tags else expression)
        if kind == SQL92:
            return Atom(kind, render(compile_sql92(expression).tree))
    except FilterError:
        return Atom(TAG, expression) if is_tag_kind(kind) else Atom(kind, expression.strip())
    # An unknown kind must not be mistaken for LANE_KIND or SUBSCRIPTION_KIND.
    return Atom(f"?{kind}", expression)


def _estimate_key_bytes(key: str) -> int:
    """Estimate the memory of a parsed key: a topic of 20 characters with `*` takes 400 bytes."""
    return 24 * len(key)


@cache_by_size(_estimate_key_bytes)
def parse_key(key: str) -> dict[str, Atom]:
    """Return the expression of each topic of a subscription key."""
    return {topic: Atom(kind, text) for topic, kind, text in orjson.loads(key)}


def describe_difference(old: str, new: str) -> str:
    """Return a text that lists the topics in which two subscription keys differ."""
    before, after = parse_key(old), parse_key(new)

    def describe(atom: Atom | None) -> str:
        kind, text = atom or ("", "")
        return f"{kind} {text!r}" if kind else "nothing"

    return "; ".join(
        f"{topic}: {describe(before.get(topic))} -> {describe(after.get(topic))}"
        for topic in sorted({*before, *after})
        if before.get(topic) != after.get(topic)
    )


@cache_by_size(_estimate_text_bytes)
def compute_lane_id(key: str) -> str:
    """Return the id of the lane with this key, the same on all brokers and after each restart."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def merge_keys(keys: Iterable[str]) -> str:
    """Return the key of a lane that several subscriptions share. No client can have this key."""
    return "+" + orjson.dumps(sorted(keys)).decode()


@cache_by_size(_estimate_text_bytes)
def split_key(key: str) -> tuple[str, ...]:
    """Return the subscription keys of a lane: its own key, or the keys that share the lane."""
    return tuple(orjson.loads(key[1:])) if key.startswith("+") else (key,)


@cache_by_size(_estimate_key_bytes)
def get_atoms_by_topic(key: str) -> dict[str, tuple[Atom, ...]]:
    """Return the expressions of each topic of a lane. A message must match one of them."""
    found: dict[str, dict[Atom, None]] = {}
    for part in split_key(key):
        for topic, atom in parse_key(part).items():
            found.setdefault(topic, {})[atom] = None
    return {topic: tuple(atoms) for topic, atoms in found.items()}


def get_required_atoms(topic: str, key: str) -> frozenset[Atom]:
    """Return the atoms of which each clause of a lane requires one, for a topic.

    On a retry topic, the clause for messages that no lane matches is an exception: it requires no
    atom.
    """
    if not topic.startswith(RETRY_PREFIX):
        return frozenset(get_atoms_by_topic(key).get(topic, ()))
    return frozenset(
        atom
        for part in split_key(key)
        for atom in (_lane_atom(part), Atom(SUBSCRIPTION_KIND, part))
    )


def _lane_atom(key: str) -> Atom:
    """Return the atom that matches messages which name the lane of a subscription key."""
    return Atom(LANE_KIND, compute_lane_id(key))


# --------------------------------------------------------------------------- rules of all lanes


def compute_rules(
    topic: str,
    live: Sequence[str],
    idle: Sequence[str],
    known: Mapping[str, LaneRule] | None = None,
) -> dict[str, LaneRule]:
    """Return the rule of each lane for messages of a topic that are stored from now on, by key.

    The rules exclude each other: a message belongs to the first lane that it matches. `live` are
    the keys of lanes, the oldest first. `idle` are those of lanes that get only messages which no
    live lane matches. `known` are the rules that this function returned before; the rule of a lane
    is reused as long as all lanes before it are the same. Lanes that do not subscribe to the topic
    are left out.
    """
    if topic.startswith(RETRY_PREFIX):
        return _compute_retry_rules(live, idle)
    found: dict[str, LaneRule] = {}
    chain: AtomChain | None = None
    known_keys = iter(known or ())
    for key in (*live, *idle):
        atoms = get_atoms_by_topic(key).get(topic, ())
        if atoms:
            if known is not None and next(known_keys, None) == key:
                found[key] = known[key]
            else:
                known = None
                found[key] = MATCH_NOTHING.union(*(create_rule([atom], chain) for atom in atoms))
            chain = extend_chain(chain, *atoms)
    return found


def compute_wanted_chains(topic: str, keys: Sequence[str]) -> tuple[AtomChain | None, ...]:
    """Return chains of the atoms by which some lanes match messages of a topic.

    On a retry topic, these are a chain of lane ids and one of subscriptions.
    """
    if topic.startswith(RETRY_PREFIX):
        return _create_retry_chains(keys)
    atoms = (atom for key in keys for atom in get_atoms_by_topic(key).get(topic, ()))
    return (extend_chain(None, *atoms),)


def _create_retry_chains(keys: Sequence[str]) -> tuple[AtomChain | None, AtomChain | None]:
    """Return the chain of lane ids, and that of subscriptions, of some lanes."""
    parts = [part for key in keys for part in split_key(key)]
    subscriptions = (Atom(SUBSCRIPTION_KIND, part) for part in parts)
    return extend_chain(None, *map(_lane_atom, parts)), extend_chain(None, *subscriptions)


def _compute_retry_rules(live: Sequence[str], idle: Sequence[str]) -> dict[str, LaneRule]:
    """Return the rule of each lane for messages of the retry topic, by key.

    A message returns to the lane that it names. If that lane is idle, it goes to the oldest lane
    whose expression for the original topic matches, and if none matches, to the oldest lane.
    """
    live_names, live_subscriptions = _create_retry_chains(live)
    idle_names, idle_subscriptions = _create_retry_chains(idle)
    found: dict[str, LaneRule] = {}
    older: AtomChain | None = None
    for key in live:
        subscription = Atom(SUBSCRIPTION_KIND, key)
        excluded = frozenset(chain for chain in (live_names, older) if chain is not None)
        found[key] = create_rule([_lane_atom(key)])
        found[key] |= {Clause(frozenset([subscription]), excluded)}
        older = extend_chain(older, subscription)

    older = None
    for key in idle:
        found[key] = MATCH_NOTHING
        for part in split_key(key):
            subscription = Atom(SUBSCRIPTION_KIND, part)
            found[key] |= create_rule([_lane_atom(part)], live_subscriptions)
            found[key] |= create_rule(
                [subscription], live_names, idle_names, live_subscriptions, older
            )
            older = extend_chain(older, subscription)
    if found:
        found[next(iter(found))] |= create_rule(
            [], live_names, idle_names, live_subscriptions, idle_subscriptions
        )
    return found


def compute_sole_rule(topic: str, key: str) -> LaneRule:
    """Return the rule for messages of a topic that a lane has if it is the group's only one."""
    return compute_rules(topic, [key], []).get(key, MATCH_NOTHING)


# ----------------------------------------------------------------------------------- matching


@cache_by_size(estimate_atom_bytes)
def get_matcher(atom: Atom) -> PropertyMatcher:
    """Return a function that tells whether a message with given properties matches the atom.

    An expression that cannot be compiled or evaluated does not match.
    """
    if atom.kind == TAG:
        tags = get_tags(atom)
        if tags is None:
            return lambda properties: True
        return lambda properties: properties.get(TAGS) in tags
    if atom.kind == SQL92:
        try:
            return compile_sql92(atom.text).matches
        except FilterError:
            return lambda properties: False
    if atom.kind == LANE_KIND:
        return lambda properties: properties.get(LANE_PROPERTY) == atom.text
    if atom.kind != SUBSCRIPTION_KIND:
        return lambda properties: False

    by_topic = {topic: get_matcher(one) for topic, one in parse_key(atom.text).items()}

    def matches_by_origin(properties: Mapping[str, str]) -> bool:
        match = by_topic.get(properties.get(RETRY_TOPIC, ""))
        return match is not None and match(properties)

    return matches_by_origin


@cache_by_size(estimate_atom_bytes)
def get_tags(atom: Atom) -> frozenset[str] | None:
    """Return the tags that a tag expression matches. None means all messages."""
    try:
        text, tags, _ = parse_tags(atom.text)
    except FilterError:
        return frozenset()
    return None if text == ALL else tags


@cache_by_size(estimate_atom_bytes)
def get_tag_codes(atom: Atom) -> frozenset[int] | None:
    """Return the hash codes of the tags that an atom matches.

    Return None if the atom is not a tag expression, or matches all messages.
    """
    if atom.kind != TAG or get_tags(atom) is None:
        return None
    try:
        return parse_tags(atom.text)[2]
    except FilterError:
        return frozenset()


def compute_rule_weight(rule: LaneRule) -> int:
    """Return the total length of the expressions that may be evaluated for one message."""
    chains = {chain for clause in rule for chain in clause.excluded}
    required = (atom for clause in rule for atom in clause.required)
    excluded = (atom for chain in chains for atom in chain.iter_general_atoms())
    return sum(len(atom.text) for atoms in (required, excluded) for atom in atoms)
