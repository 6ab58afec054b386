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
    """For each atom, tag code and property value: the index of its first atom in a chain.

    Chains that extend each other share one object of this class. A chain ignores the entries whose
    index is not less than its own length.
    """

    __slots__ = ("atoms", "codes", "general_atoms", "size", "values")

    def __init__(self, atoms: Iterable[Atom]) -> None:
        """Create the index of a chain of these atoms. An index is a number from 0 in the chain."""
        self.size = 0
        """The number of atoms: the length of the longest chain that uses this index."""
        self.atoms: dict[Atom, int] = {}
        self.codes: dict[int, int] = {}
        """By the hash code of a tag."""
        self.values: dict[tuple[str, str | None], int] = {}
        """By property and value, for atoms that match if a property has one of some values."""
        self.general_atoms: list[tuple[int, Atom]] = []
        """The other atoms, each with its index. They must be evaluated one by one."""
        for atom in atoms:
            self.append(atom)

    def append(self, atom: Atom) -> None:
        """Add an atom, one filter expression, at the end of the chain.

        Tags and lane ids are added to the dicts by which they are looked up. Other atoms are added
        to `general_atoms`.
        """
        index = self.size
        self.size = self.size + 1
        self.atoms[atom] = index
        if atom.kind == LANE_KIND:
            self.values[LANE_PROPERTY, atom.text] = index
        elif atom.kind == TAG and (tags := get_matched_tags(atom)) is not None:
            for tag in tags:
                self.values.setdefault((TAGS, tag), index)
            for code in get_tag_codes(atom) or ():
                self.codes.setdefault(code, index)
        else:
            self.general_atoms.append((index, atom))


class AtomChain:
    """A sequence of atoms, none of which occurs twice.

    Chains are created by `extend_chain` only, so equal chains are one object. They are compared by
    identity.
    """

    __slots__ = ("__weakref__", "_index", "atom", "length", "parent")

    def __init__(self, parent: "AtomChain | None", atom: Atom) -> None:
        """Create the chain that has the atoms of `parent` (None for no atoms), and then `atom`."""
        self.parent: AtomChain | None = parent
        """The chain of all atoms but the last one; None if there is only one atom."""
        self.atom = atom
        """The last atom."""
        self.length: int = 1 if parent is None else parent.length + 1
        self._index: _ChainIndex
        # If no other chain has extended the parent, its index is extended and shared.
        if parent is not None and parent._index.size == parent.length:
            self._index = parent._index
            self._index.append(atom)
        else:
            self._index = _ChainIndex((*(parent.atoms() if parent is not None else ()), atom))

    def atoms(self) -> list[Atom]:
        """Return the atoms of the chain, the first one first."""
        last_to_first = []
        node: AtomChain | None = self
        while node is not None:
            last_to_first.append(node.atom)
            node = node.parent
        return last_to_first[::-1]

    def __contains__(self, atom: Atom) -> bool:
        """Return whether the chain contains the atom."""
        # The index may be shared with longer chains, so it may have atoms beyond this chain's end.
        return self._index.atoms.get(atom, self.length) < self.length

    def has_value(self, name: str, property_value: str | None) -> bool:
        """Return whether an atom of the chain matches each message with this property value.

        Only tag expressions and lane ids count, that is, properties TAGS and LANE_PROPERTY.
        `property_value` None means a message without the property.
        """
        return self._index.values.get((name, property_value), self.length) < self.length

    def iter_general_atoms(self) -> Iterator[Atom]:
        """Yield the atoms that must be evaluated one by one.

        All others match by the value of a property, which `has_value` looks up.
        """
        for index, atom in self._index.general_atoms:
            if index >= self.length:  # this atom, and the later ones, are only in longer chains
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
        """Return False if it is certain that no atom matches a message with one of these tag codes.

        A tag code is the hash code of a tag. Return True if an atom may match: other tags may have
        the same code, and atoms that are not tag expressions are not evaluated.
        """
        index_by_code = self._index.codes
        return any(index_by_code.get(code, self.length) < self.length for code in codes) or (
            next(self.iter_general_atoms(), None) is not None
        )

    def is_prefix_of(self, longer: "AtomChain") -> bool:
        """Return whether `longer` begins with all atoms of this chain, or is this chain."""
        node: AtomChain | None = longer
        while node is not None and node.length > self.length:
            node = node.parent
        return node is self


_chains: Final[WeakValueDictionary[tuple[AtomChain | None, Atom], AtomChain]] = (
    WeakValueDictionary()
)
"""All chains in use, by their parent and last atom."""


def extend_chain(chain: AtomChain | None, *atoms: Atom) -> AtomChain | None:
    """Return a chain that has the atoms of `chain`, followed by `atoms`.

    Atoms that the chain contains already are not added again. None stands for the chain without
    atoms, as argument and as result. Calls with equal arguments return the same object.
    """
    for atom in atoms:
        extended = _chains.get((chain, atom))
        if extended is None:
            if chain is not None and atom in chain:
                continue
            extended = _chains[chain, atom] = AtomChain(chain, atom)
        chain = extended
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
    """Estimate the memory of a result that is derived from an atom, in bytes.

    32 bytes per character are assumed for a SQL92 expression or a subscription, because compiled
    expressions are large, and 4 for other atoms.
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
    """Estimate the memory of a result that is derived from short texts, in bytes."""
    return 4 * sum(map(len, texts))


def create_rule(required: Iterable[Atom], *excluded: AtomChain | None) -> LaneRule:
    """Return the rule of one clause: all atoms `required` match, no atom of `excluded` matches.

    An atom is one filter expression, and a chain a sequence of atoms; None is the chain without
    atoms. Chains that cannot match a message with the required tags are left out of the clause.
    Return MATCH_NOTHING if it is certain, without evaluating SQL92 expressions, that the clause
    matches no message.
    """
    atoms = frozenset(required)
    chains = [chain for chain in excluded if chain is not None]
    if any(_excludes_any(chain, atoms) for chain in chains):
        return MATCH_NOTHING
    lane_ids = [atom for atom in atoms if atom.kind == LANE_KIND]
    if len(lane_ids) > 1:  # a message names only one lane
        return MATCH_NOTHING

    tags = _find_common_tags(atoms)
    if tags is not None:
        remaining_tags = [tag for tag in tags if not _is_tag_excluded(tag, chains)]
        if not remaining_tags:
            return MATCH_NOTHING
        codes = frozenset(map(java_hash, tags))
        chains = [chain for chain in chains if chain.may_match_codes(codes)]
    return frozenset([Clause(atoms, frozenset(chains))])


def _excludes_any(chain: AtomChain, atoms: Iterable[Atom]) -> bool:
    """Return whether a chain contains one of `atoms`, or the atom that matches all messages."""
    return MATCH_ALL in chain or any(atom in chain for atom in atoms)


def _is_tag_excluded(tag: str, chains: Iterable[AtomChain]) -> bool:
    """Return whether an atom of `chains` matches each message with this tag."""
    return any(chain.has_value(TAGS, tag) for chain in chains)


def _find_common_tags(atoms: Iterable[Atom]) -> frozenset[str] | None:
    """Return the tags that all tag expressions in `atoms` match; None if they match all messages.

    Other atoms are ignored.
    """
    common_tags: frozenset[str] | None = None
    for atom in atoms:
        if atom.kind != TAG:
            continue
        tags = get_matched_tags(atom)
        if tags is not None:
            common_tags = tags if common_tags is None else common_tags & tags
    return common_tags


@cache_by_size(estimate_rule_bytes)
def intersect_rules(first_rule: LaneRule, second_rule: LaneRule) -> LaneRule:
    """Return the rule that matches the messages which both rules match.

    A rule is a set of clauses, of which one must match. A clause has atoms (filter expressions)
    that must match, and chains of atoms that must not match.
    """
    clauses: set[Clause] = set()
    for first in first_rule:
        for second in second_rule:
            chains = _unite_excluded(first.excluded, second.excluded)
            clauses |= create_rule(first.required | second.required, *chains)
    return frozenset(clauses)


def _unite_excluded(first: frozenset[AtomChain], second: frozenset[AtomChain]) -> list[AtomChain]:
    """Return chains that together contain all atoms of the chains in two sets.

    If a chain of one set is the beginning of a chain in the other set, it is left out.
    """
    chains_of_first = [chain for chain in first if not _is_prefix_of_any(chain, second)]
    chains_of_second = [
        chain for chain in second - first if not _is_prefix_of_any(chain, chains_of_first)
    ]
    return chains_of_first + chains_of_second


def _is_prefix_of_any(chain: AtomChain, candidates: Iterable[AtomChain]) -> bool:
    """Return whether one of `candidates` is longer than the chain and begins with its atoms."""
    return any(chain is not candidate and chain.is_prefix_of(candidate) for candidate in candidates)


# ------------------------------------------------------------------------------ subscriptions


def subscription_key(group: str, subscriptions: Iterable[Subscription]) -> str:
    """Return the subscription key of a member of `group` with these subscriptions.

    The subscription to the group's retry topic is left out. Return "" if there is no other one.
    """
    return encode_key(iter_topic_atoms(group, subscriptions))


def iter_topic_atoms(
    group: str, subscriptions: Iterable[Subscription]
) -> Iterator[tuple[str, Atom]]:
    """Yield the topic and the atom of each subscription of a member of `group`.

    The subscription to the group's retry topic is left out.
    """
    retry_topic = RETRY_PREFIX + group
    for subscription in subscriptions:
        if subscription.topic != retry_topic:
            yield subscription.topic, normalize_atom(subscription.kind, subscription.expression)


def encode_key(atoms: Iterable[tuple[str, Atom]]) -> str:
    """Return the subscription key of the (topic, atom) pairs that `iter_topic_atoms` yields.

    It does not depend on their order. Return "" if there are none.
    """
    ordered = sorted(atoms)
    return orjson.dumps([(topic, *atom) for topic, atom in ordered]).decode() if ordered else ""


@cache_by_size(_estimate_text_bytes)
def normalize_atom(kind: str, expression: str) -> Atom:
    """Return the atom, that is the normalized form, of a filter expression.

    `kind` is the kind of the expression, such as TAG or SQL92. Two spellings of the same expression
    give equal atoms: the tags `b || a` and `a||b` both become `a||b`. The atom of an expression
    that cannot be compiled, or whose kind is unknown, matches no message.
    """
    if is_tag_kind(kind):
        return Atom(TAG, _normalize_tags(expression))
    if kind == SQL92:
        try:
            return Atom(SQL92, render(compile_sql92(expression).tree))
        except FilterError:
            return Atom(SQL92, expression.strip())
    # An unknown kind must not be mistaken for LANE_KIND or SUBSCRIPTION_KIND.
    return Atom(f"?{kind}", expression)


def _normalize_tags(expression: str) -> str:
    """Return a tag expression with its tags sorted: `b || a` becomes `a||b`.

    An empty expression becomes `*`, which matches all messages. An invalid expression, or one
    without a tag, is returned unchanged.
    """
    if not expression or expression == ALL:
        return ALL
    try:
        tags = split_tags(expression)
    except FilterError:
        return expression
    return "||".join(sorted(tags)) if tags else expression


def _estimate_key_bytes(key: str) -> int:
    """Estimate the memory of a parsed key in bytes: 20 characters and `*` take 400 bytes."""
    return 24 * len(key)


@cache_by_size(_estimate_key_bytes)
def parse_key(key: str) -> dict[str, Atom]:
    """Return the atoms of a subscription key by topic. The key must be of one subscription."""
    return {topic: Atom(kind, expression) for topic, kind, expression in orjson.loads(key)}


def describe_difference(old_key: str, new_key: str) -> str:
    """Return a text that lists the topics in which two subscription keys differ.

    For example, `orders: TAG 'a' -> SQL92 'x > 1'; returns: TAG '*' -> nothing`.
    """
    old_atoms = parse_key(old_key)
    new_atoms = parse_key(new_key)
    differences = []
    for topic in sorted({*old_atoms, *new_atoms}):
        old_atom = old_atoms.get(topic)
        new_atom = new_atoms.get(topic)
        if old_atom != new_atom:
            differences.append(f"{topic}: {_describe_atom(old_atom)} -> {_describe_atom(new_atom)}")
    return "; ".join(differences)


def _describe_atom(atom: Atom | None) -> str:
    """Return kind and expression of an atom as text; "nothing" for None."""
    if atom is None or not atom.kind:
        return "nothing"
    return f"{atom.kind} {atom.text!r}"


@cache_by_size(_estimate_text_bytes)
def compute_lane_id(key: str) -> str:
    """Return the id of the lane with this key, the same on all brokers and after each restart."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def merge_keys(keys: Iterable[str]) -> str:
    """Return the key of a lane that several subscriptions share.

    `keys` are the subscription keys. Their order does not matter. The result begins with "+", so it
    differs from each subscription key.
    """
    return "+" + orjson.dumps(sorted(keys)).decode()


@cache_by_size(_estimate_text_bytes)
def split_key(key: str) -> tuple[str, ...]:
    """Return the subscription keys of a lane with this key, the inverse of `merge_keys`.

    That is the key itself if the lane has one subscription.
    """
    return tuple(orjson.loads(key[1:])) if key.startswith("+") else (key,)


@cache_by_size(_estimate_key_bytes)
def get_atoms_by_topic(key: str) -> dict[str, tuple[Atom, ...]]:
    """Return, for each topic, the atoms (filter expressions) of the lane with this key.

    The lane wants a message of the topic if one of the atoms matches it. A topic has several atoms
    only if several subscriptions share the lane. The retry topic of the group is not included.
    """
    by_topic: dict[str, dict[Atom, None]] = {}  # the inner dict is an ordered set
    for subscription in split_key(key):
        for topic, atom in parse_key(subscription).items():
            by_topic.setdefault(topic, {})[atom] = None
    return {topic: tuple(atoms) for topic, atoms in by_topic.items()}


def get_required_atoms(topic: str, key: str) -> frozenset[Atom]:
    """Return the atoms of the lane `key` for a topic.

    Each clause of the lane's rule requires one of them. For a retry topic, they are the lane ids
    and the whole subscriptions of the lane. A retry topic also has a clause for messages that no
    lane asks for, which requires no atom.
    """
    if not topic.startswith(RETRY_PREFIX):
        return frozenset(get_atoms_by_topic(key).get(topic, ()))
    atoms: set[Atom] = set()
    for subscription_key in split_key(key):
        atoms.add(_lane_atom(subscription_key))
        atoms.add(Atom(SUBSCRIPTION_KIND, subscription_key))
    return frozenset(atoms)


def _lane_atom(key: str) -> Atom:
    """Return the atom that matches messages which name the lane of a subscription key."""
    return Atom(LANE_KIND, compute_lane_id(key))


# --------------------------------------------------------------------------- rules of all lanes


def compute_rules(
    topic: str,
    live_keys: Sequence[str],
    idle_keys: Sequence[str],
    previous_rules: Mapping[str, LaneRule] | None = None,
) -> dict[str, LaneRule]:
    """Return the rule of each lane for messages of a topic, by key of the lane.

    A lane is the members of a group with the same subscription, and its rule says which messages it
    gets. The rules exclude each other: a message belongs to the first lane that matches it.
    `live_keys` and `idle_keys` are the keys of the lanes, as `GroupLanes.get_live_and_idle_keys`
    orders them. Lanes that do not subscribe to the topic are left out of the result, whose order is
    that of the keys.

    `previous_rules` are the rules that an earlier call returned for the topic. The rule of a lane
    is reused if the lanes before it are the same as in that call. For a retry topic,
    `previous_rules` are not used.
    """
    if topic.startswith(RETRY_PREFIX):
        return _compute_retry_rules(live_keys, idle_keys)
    rules: dict[str, LaneRule] = {}
    earlier_atoms: AtomChain | None = None  # the atoms of all lanes before
    previous_keys = iter(previous_rules or ())
    for key in (*live_keys, *idle_keys):
        atoms = get_atoms_by_topic(key).get(topic, ())
        if not atoms:
            continue
        if previous_rules is not None and next(previous_keys, None) == key:
            rules[key] = previous_rules[key]
        else:
            previous_rules = None  # the rules of all later lanes depend on this lane
            rules[key] = MATCH_NOTHING
            for atom in atoms:
                rules[key] |= create_rule([atom], earlier_atoms)
        earlier_atoms = extend_chain(earlier_atoms, *atoms)
    return rules


def compute_wanted_chains(topic: str, keys: Sequence[str]) -> tuple[AtomChain | None, ...]:
    """Return chains of all atoms by which the lanes with the keys `keys` match messages of a topic.

    An atom is one filter expression, and a chain is a sequence of atoms. None of the lanes wants a
    message that no atom of these chains matches. The result is a tuple of one chain. For a retry
    topic, it is a tuple of two chains: lane ids, and whole subscriptions. A chain without atoms is
    None.
    """
    if topic.startswith(RETRY_PREFIX):
        return _create_retry_chains(keys)
    atoms = (atom for key in keys for atom in get_atoms_by_topic(key).get(topic, ()))
    return (extend_chain(None, *atoms),)


RetryChains = tuple[AtomChain | None, AtomChain | None]
"""The chain of the ids of some lanes, and that of their whole subscriptions."""


def _create_retry_chains(keys: Sequence[str]) -> RetryChains:
    """Return (chain of lane ids, chain of whole subscriptions) of the lanes with the keys `keys`.

    A chain without atoms is None.
    """
    lane_ids: list[Atom] = []
    subscriptions: list[Atom] = []
    for key in keys:
        for subscription_key in split_key(key):
            lane_ids.append(_lane_atom(subscription_key))
            subscriptions.append(Atom(SUBSCRIPTION_KIND, subscription_key))
    return extend_chain(None, *lane_ids), extend_chain(None, *subscriptions)


def _compute_retry_rules(live_keys: Sequence[str], idle_keys: Sequence[str]) -> dict[str, LaneRule]:
    """Return the rule of each lane for messages of the retry topic, by key of the lane.

    A message of a retry topic names the lane from which it was sent back. It goes to the first of
    these lanes that exists:

    1. the lane that it names, if that lane is live;
    2. the oldest live lane whose subscription to the topic of origin matches it;
    3. the lane that it names, if that lane is idle;
    4. the first idle lane whose subscription to the topic of origin matches it;
    5. the oldest live lane, or the first idle one if no lane is live.
    """
    live_chains = _create_retry_chains(live_keys)
    idle_chains = _create_retry_chains(idle_keys)
    rules = _compute_live_retry_rules(live_keys, live_chains)
    rules |= _compute_idle_retry_rules(idle_keys, idle_chains, live_chains)

    # Case 5: what no lane asks for.
    if rules:
        first_key = next(iter(rules))
        rules[first_key] |= create_rule([], *live_chains, *idle_chains)
    return rules


def _compute_live_retry_rules(
    live_keys: Sequence[str], live_chains: RetryChains
) -> dict[str, LaneRule]:
    """Return the rules of the live lanes for messages of a retry topic, by the key of the lane.

    A lane gets a message that names it. It also gets a message that names no live lane, if its
    subscription to the topic of origin matches and that of no older live lane does. `live_chains`
    are the two chains of all live lanes: lane ids, and whole subscriptions.
    """
    live_ids, _ = live_chains
    rules: dict[str, LaneRule] = {}
    older_subscriptions: AtomChain | None = None  # those of the lanes before
    for key in live_keys:
        subscription = Atom(SUBSCRIPTION_KIND, key)
        excluded = frozenset(
            chain for chain in (live_ids, older_subscriptions) if chain is not None
        )
        by_subscription = Clause(frozenset([subscription]), excluded)
        rules[key] = create_rule([_lane_atom(key)]) | {by_subscription}
        older_subscriptions = extend_chain(older_subscriptions, subscription)
    return rules


def _compute_idle_retry_rules(
    idle_keys: Sequence[str], idle_chains: RetryChains, live_chains: RetryChains
) -> dict[str, LaneRule]:
    """Return the rules of the idle lanes for messages of a retry topic, by the key of the lane.

    Messages that a live lane wants are excluded. Of the others, a lane gets a message that names
    it. It also gets a message that names no existing lane, if its subscription to the topic of
    origin matches and that of no earlier idle lane does. `idle_chains` and `live_chains` are the
    chains of all idle and all live lanes: lane ids, and whole subscriptions.
    """
    live_ids, live_subscriptions = live_chains
    idle_ids, _ = idle_chains
    rules: dict[str, LaneRule] = {}
    earlier_subscriptions: AtomChain | None = None  # those of the lanes before
    for key in idle_keys:
        rules[key] = MATCH_NOTHING
        for subscription_key in split_key(key):  # an idle lane may have several subscriptions
            subscription = Atom(SUBSCRIPTION_KIND, subscription_key)
            rules[key] |= create_rule([_lane_atom(subscription_key)], live_subscriptions)
            rules[key] |= create_rule(
                [subscription], live_ids, idle_ids, live_subscriptions, earlier_subscriptions
            )
            earlier_subscriptions = extend_chain(earlier_subscriptions, subscription)
    return rules


def compute_sole_rule(topic: str, key: str) -> LaneRule:
    """Return the rule that the lane `key` has for a topic if it is the only lane of the group.

    Return MATCH_NOTHING if the lane does not subscribe to the topic.
    """
    return compute_rules(topic, [key], []).get(key, MATCH_NOTHING)


# ----------------------------------------------------------------------------------- matching


@cache_by_size(estimate_atom_bytes)
def get_matcher(atom: Atom) -> PropertyMatcher:
    """Return a function that returns whether the atom matches a message with given properties.

    An atom is one filter expression, of tags or of SQL92. An expression that cannot be compiled or
    evaluated matches no message. A SUBSCRIPTION_KIND atom matches if its expression for the topic
    of origin does.
    """
    if atom.kind == TAG:
        tags = get_matched_tags(atom)
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
    if atom.kind == SUBSCRIPTION_KIND:
        return _create_origin_matcher(atom.text)
    return lambda properties: False  # an unknown kind of expression


def _create_origin_matcher(key: str) -> PropertyMatcher:
    """Return a function that evaluates a whole subscription for a message of a retry topic.

    `key` is the subscription key. The function gets the properties of the message. It returns True
    if the subscription has the topic from which the message came originally, and the expression for
    that topic matches.
    """
    matchers = {topic: get_matcher(atom) for topic, atom in parse_key(key).items()}

    def matches_by_origin(properties: Mapping[str, str]) -> bool:
        match = matchers.get(properties.get(RETRY_TOPIC, ""))
        return match is not None and match(properties)

    return matches_by_origin


@cache_by_size(estimate_atom_bytes)
def get_matched_tags(atom: Atom) -> frozenset[str] | None:
    """Return the tags that a tag expression matches.

    Return None if it matches all messages, with or without a tag, and an empty set if it is
    invalid. The atom's kind must be TAG.
    """
    try:
        expression, tags, _ = parse_tags(atom.text)
    except FilterError:
        return frozenset()
    return None if expression == ALL else tags


@cache_by_size(estimate_atom_bytes)
def get_tag_codes(atom: Atom) -> frozenset[int] | None:
    """Return the hash codes of the tags that an atom matches.

    Return None if the codes do not restrict the messages: the atom is not a tag expression, or
    matches all messages. Return an empty set if the tag expression is invalid.
    """
    if atom.kind != TAG or get_matched_tags(atom) is None:
        return None
    try:
        _, _, codes = parse_tags(atom.text)
    except FilterError:
        return frozenset()
    return codes


def compute_rule_weight(rule: LaneRule) -> int:
    """Return the total length, in characters, of the expressions to evaluate for one message.

    All required atoms of the rule count. In excluded chains, tags and lane ids do not count,
    because they are looked up.
    """
    weight = 0
    excluded_chains: set[AtomChain] = set()
    for clause in rule:
        weight += sum(len(atom.text) for atom in clause.required)
        excluded_chains |= clause.excluded
    for chain in excluded_chains:
        weight += sum(len(atom.text) for atom in chain.iter_general_atoms())
    return weight
