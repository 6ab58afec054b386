"""Which messages belong to a lane: rules over expressions.

An *atom* is one expression: of tags, of SQL92; on a retry topic the whole subscription of a lane
(asked about the topic a message came from) or the name of a lane (a message says by whom it was
sent back). A *clause* says which atoms must match and which must not; a *rule* is a set of
clauses, one of which has to hold. Rules are closed under what lanes do to each other: hand over
(`both`) and take up (`|`).

What must not match is what older lanes want: *orders* of atoms, the oldest first. A lane's order is
that of the lane before it with one atom more, so a thousand lanes share one chain, and their rules
are as small as those of two. Tags and names of lanes in an order are looked up, not compared.

Whether an atom matches depends on the message alone, so lanes whose rules exclude each other never
get the same message, whatever they read when.

What is made of the texts that clients name is kept while it fits into so many bytes (`kept`): a
client may name any expression, of any length, so a number of entries bounds nothing.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import orjson

from sluicemq.errors import FilterError
from sluicemq.filter.nodes import render
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind, parse_tags, split_tags
from sluicemq.model import properties as reserved
from sluicemq.model.ids import java_hash
from sluicemq.model.message import RETRY_TOPIC, TAGS
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription
from sluicemq.model.topic import RETRY_PREFIX

T = TypeVar("T")
BYTES_MAX: Final = 4 << 20
ENTRY_BYTES: Final = 512


class ByteCache(Generic[T]):
    """A function that keeps what it found; the one that was not asked for longest goes first."""

    def __init__(
        self, function: Callable[..., T], size_of: Callable[..., int], bytes_max: int
    ) -> None:
        self._function = function
        self._size_of = size_of
        self._bytes_max = bytes_max
        self._found: OrderedDict[tuple[object, ...], tuple[T, int]] = OrderedDict()
        self.size_bytes = 0
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> T:
        known = self._found.get(arguments)
        if known is not None:
            self._found.move_to_end(arguments)
            return known[0]
        made = self._function(*arguments)
        size_bytes = ENTRY_BYTES + self._size_of(*arguments)
        if size_bytes <= self._bytes_max:
            self._found[arguments] = (made, size_bytes)
            self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            _, (_, gone_bytes) = self._found.popitem(last=False)
            self.size_bytes -= gone_bytes
        return made

    def __len__(self) -> int:
        return len(self._found)


def kept(
    size_of: Callable[..., int], bytes_max: int = BYTES_MAX
) -> Callable[[Callable[..., T]], ByteCache[T]]:
    """Keeps what a function finds; `size_of` its arguments: about so many bytes is it."""

    def decorate(function: Callable[..., T]) -> ByteCache[T]:
        return ByteCache(function, size_of, bytes_max)

    return decorate


LANE_PROPERTY: Final = reserved.LANE
"""Of a message that was sent back: the lane that it returns to."""
LANE: Final = "LANE"
WHOLE: Final = "WHOLE"

Match = Callable[[Mapping[str, str]], bool]


class Atom(NamedTuple):
    """`kind`: TAG, SQL92, LANE (text: a lane's id) or WHOLE (text: a subscription's key)."""

    kind: str
    text: str


class _Index:
    """Where in an order its atoms, and the values they name, come first."""

    __slots__ = ("atoms", "codes", "others", "size", "values")

    def __init__(self, atoms: Iterable[Atom]) -> None:
        self.size = 0
        self.atoms: dict[Atom, int] = {}
        self.codes: dict[int, int] = {}
        self.values: dict[tuple[str, str | None], int] = {}
        """(property, value) of the atoms that a value decides."""
        self.others: list[tuple[int, Atom]] = []
        for atom in atoms:
            self.add(atom)

    def add(self, atom: Atom) -> None:
        at, self.size = self.size, self.size + 1
        self.atoms[atom] = at
        if atom.kind == LANE:
            self.values[LANE_PROPERTY, atom.text] = at
        elif atom.kind == TAG and (tags := tags_of(atom)) is not None:
            for tag in tags:
                self.values.setdefault((TAGS, tag), at)
            for code in codes_of(atom) or ():
                self.codes.setdefault(code, at)
        else:
            self.others.append((at, atom))


class Order:
    """Atoms one after another; made by `after`, so that equal orders are one object. Orders that
    grow from each other share one index, of which each sees its own length."""

    __slots__ = ("__weakref__", "_index", "atom", "before", "length")

    def __init__(self, before: "Order | None", atom: Atom) -> None:
        self.before: Order | None = before
        self.atom = atom
        self.length: int = 1 if before is None else before.length + 1
        self._index: _Index
        if before is not None and before._index.size == before.length:
            self._index = before._index
            self._index.add(atom)
        else:
            self._index = _Index((*(before.atoms() if before is not None else ()), atom))

    def atoms(self) -> list[Atom]:
        found = []
        node: Order | None = self
        while node is not None:
            found.append(node.atom)
            node = node.before
        return found[::-1]

    def __contains__(self, atom: Atom) -> bool:
        return self._index.atoms.get(atom, self.length) < self.length

    def has_value(self, name: str, value: str | None) -> bool:
        """Does an atom want a property's value?"""
        return self._index.values.get((name, value), self.length) < self.length

    def others(self) -> Iterator[Atom]:
        """The atoms that are no mere values."""
        for at, atom in self._index.others:
            if at >= self.length:
                return
            yield atom

    def takes(self, properties: Mapping[str, str]) -> bool:
        """Does one of the atoms match?"""
        return (
            self.has_value(TAGS, properties.get(TAGS))
            or self.has_value(LANE_PROPERTY, properties.get(LANE_PROPERTY))
            or any(matcher(atom)(properties) for atom in self.others())
        )

    def may_take(self, codes: frozenset[int]) -> bool:
        """May an atom match a message whose tag has one of these codes?"""
        known = self._index.codes
        return any(known.get(code, self.length) < self.length for code in codes) or (
            next(self.others(), None) is not None
        )

    def begins(self, other: "Order") -> bool:
        """Has the other all of this one's atoms before its own?"""
        node: Order | None = other
        while node is not None and node.length > self.length:
            node = node.before
        return node is self


_orders: Final[WeakValueDictionary[tuple[Order | None, Atom], Order]] = WeakValueDictionary()


def after(order: Order | None, *atoms: Atom) -> Order | None:
    """An order with more atoms at its end, those it has not."""
    for atom in atoms:
        known = _orders.get((order, atom))
        if known is None:
            if order is not None and atom in order:
                continue
            known = _orders[order, atom] = Order(order, atom)
        order = known
    return order


class Clause(NamedTuple):
    """`must` all match, and no atom of the orders `none`."""

    must: frozenset[Atom]
    none: frozenset[Order]


Rule = frozenset[Clause]
NOTHING: Final[Rule] = frozenset()
EVERYTHING: Final = Atom(TAG, ALL)


def atom_bytes(atom: Atom) -> int:
    """About as much is made of an atom: compiled SQL92 is large."""
    return (32 if atom.kind in {SQL92, WHOLE} else 4) * len(atom.text)


def rule_bytes(*rules: Rule) -> int:
    """Orders belong to all."""
    return sum(
        256 + 32 * len(item.none) + sum(map(atom_bytes, item.must))
        for rule in rules
        for item in rule
    )


def _text_bytes(*texts: str) -> int:
    return 4 * sum(map(len, texts))


def clause(must: Iterable[Atom], *none: Order | None) -> Rule:
    """A rule of one clause, without orders that say nothing; of none when it contradicts itself."""
    wanted = frozenset(must)
    orders = [order for order in none if order is not None]
    if any(EVERYTHING in order or any(atom in order for atom in wanted) for order in orders):
        return NOTHING
    if sum(atom.kind == LANE for atom in wanted) > 1:
        return NOTHING
    sets = [tags for atom in wanted if atom.kind == TAG and (tags := tags_of(atom)) is not None]
    if sets:
        tags = frozenset.intersection(*sets)
        if all(any(order.has_value(TAGS, tag) for order in orders) for tag in tags):
            return NOTHING
        codes = frozenset(map(java_hash, tags))
        orders = [order for order in orders if order.may_take(codes)]
    return frozenset([Clause(wanted, frozenset(orders))])


@kept(rule_bytes)
def both(one: Rule, other: Rule) -> Rule:
    """What both rules want."""
    found: set[Clause] = set()
    for left in one:
        for right in other:
            none = [order for order in left.none if not _begins_one(order, right.none)]
            none += [order for order in right.none - left.none if not _begins_one(order, none)]
            found |= clause(left.must | right.must, *none)
    return frozenset(found)


def _begins_one(order: Order, others: Iterable[Order]) -> bool:
    return any(order is not other and order.begins(other) for other in others)


# ------------------------------------------------------------------------------ subscriptions


def subscription_key(group: str, subscriptions: Iterable[Subscription]) -> str:
    """Return topics and expressions, without the group's own retry topic, as text; "" if none are
    left."""
    return key_of(named_atoms(group, subscriptions))


def named_atoms(group: str, subscriptions: Iterable[Subscription]) -> Iterator[tuple[str, Atom]]:
    """Yield the topic and the normal atom of each subscription but that to the group's own retry
    topic."""
    own = RETRY_PREFIX + group
    for item in subscriptions:
        if item.topic != own:
            yield item.topic, normal_atom(item.kind, item.expression)


def key_of(atoms: Iterable[tuple[str, Atom]]) -> str:
    """Return the key of subscriptions that are given as `named_atoms` does; "" without any."""
    ordered = sorted(atoms)
    return orjson.dumps([(topic, *atom) for topic, atom in ordered]).decode() if ordered else ""


@kept(_text_bytes)
def normal_atom(kind: str, expression: str) -> Atom:
    """An expression as lanes compare it: two spellings of the same are equal."""
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
    return Atom(f"?{kind}", expression)  # nobody's: it must not be taken for a kind of our own


def _key_bytes(key: str) -> int:
    """A topic of 20 characters with `*` takes 400 bytes."""
    return 24 * len(key)


@kept(_key_bytes)
def parse_key(key: str) -> dict[str, Atom]:
    """A subscription's key -> topic -> expression."""
    return {topic: Atom(kind, text) for topic, kind, text in orjson.loads(key)}


def difference(old: str, new: str) -> str:
    """Two subscriptions, topic by topic where they differ."""
    before, after = parse_key(old), parse_key(new)

    def show(atom: Atom | None) -> str:
        kind, text = atom or ("", "")
        return f"{kind} {text!r}" if kind else "nothing"

    return "; ".join(
        f"{topic}: {show(before.get(topic))} -> {show(after.get(topic))}"
        for topic in sorted({*before, *after})
        if before.get(topic) != after.get(topic)
    )


@kept(_text_bytes)
def lane_id(key: str) -> str:
    """A short name of a subscription, the same at every broker and after every restart."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def merged_key(keys: Iterable[str]) -> str:
    """The key of a lane that several subscriptions share; no client can name it."""
    return "+" + orjson.dumps(sorted(keys)).decode()


@kept(_text_bytes)
def parts_of(key: str) -> tuple[str, ...]:
    """The subscriptions of a lane, the one that it is or those that share it."""
    return tuple(orjson.loads(key[1:])) if key.startswith("+") else (key,)


@kept(_key_bytes)
def atoms_of(key: str) -> dict[str, tuple[Atom, ...]]:
    """A lane's key -> topic -> expressions, one of which has to match."""
    found: dict[str, dict[Atom, None]] = {}
    for part in parts_of(key):
        for topic, atom in parse_key(part).items():
            found.setdefault(topic, {})[atom] = None
    return {topic: tuple(atoms) for topic, atoms in found.items()}


def own_atoms(topic: str, key: str) -> frozenset[Atom]:
    """One of these must match in each clause of a lane on a topic, but in one on a retry topic
    that is for what is nobody's."""
    if not topic.startswith(RETRY_PREFIX):
        return frozenset(atoms_of(key).get(topic, ()))
    return frozenset(atom for part in parts_of(key) for atom in (_name(part), Atom(WHOLE, part)))


def _name(part: str) -> Atom:
    return Atom(LANE, lane_id(part))


# ------------------------------------------------------------------------------------ claims


def claims(
    topic: str, live: Sequence[str], idle: Sequence[str], known: Mapping[str, Rule] | None = None
) -> dict[str, Rule]:
    """Who gets which messages of a topic, from now on: a lane's key -> rule.

    `live` from the oldest on, then `idle` lanes, which get what no live one matches. The rules
    exclude each other. `known`: those of before, which still hold where all older ones do.
    """
    if topic.startswith(RETRY_PREFIX):
        return _retry_claims(live, idle)
    found: dict[str, Rule] = {}
    order: Order | None = None
    before = iter(known or ())
    for key in (*live, *idle):
        atoms = atoms_of(key).get(topic, ())
        if atoms:
            if known is not None and next(before, None) == key:
                found[key] = known[key]
            else:
                known = None
                found[key] = NOTHING.union(*(clause([atom], order) for atom in atoms))
            order = after(order, *atoms)
    return found


def claimed(topic: str, keys: Sequence[str]) -> tuple[Order | None, ...]:
    """What these lanes want of a topic; on a retry topic besides what is nobody's."""
    if topic.startswith(RETRY_PREFIX):
        return _names_and_wholes(keys)
    return (after(None, *(atom for key in keys for atom in atoms_of(key).get(topic, ()))),)


def _names_and_wholes(keys: Sequence[str]) -> tuple[Order | None, Order | None]:
    parts = [part for key in keys for part in parts_of(key)]
    return after(None, *map(_name, parts)), after(None, *(Atom(WHOLE, part) for part in parts))


def _retry_claims(live: Sequence[str], idle: Sequence[str]) -> dict[str, Rule]:
    """A message returns to the lane it names; to the oldest one whose expression for its first
    topic matches when that lane is away; to the oldest of all when nobody's does."""
    live_names, live_wholes = _names_and_wholes(live)
    names, wholes = _names_and_wholes(idle)
    found: dict[str, Rule] = {}
    older: Order | None = None
    for key in live:
        whole = Atom(WHOLE, key)
        none = frozenset(order for order in (live_names, older) if order is not None)
        found[key] = clause([_name(key)]) | {Clause(frozenset([whole]), none)}
        older = after(older, whole)
    older = None
    for key in idle:
        found[key] = NOTHING
        for part in parts_of(key):
            whole = Atom(WHOLE, part)
            found[key] |= clause([_name(part)], live_wholes)
            found[key] |= clause([whole], live_names, names, live_wholes, older)
            older = after(older, whole)
    if found:
        found[next(iter(found))] |= clause([], live_names, names, live_wholes, wholes)
    return found


def own_claim(topic: str, key: str) -> Rule:
    """What a lane gets that is alone."""
    return claims(topic, [key], []).get(key, NOTHING)


# ----------------------------------------------------------------------------------- filters


@kept(atom_bytes)
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


@kept(atom_bytes)
def tags_of(atom: Atom) -> frozenset[str] | None:
    """None: every tag."""
    try:
        text, tags, _ = parse_tags(atom.text)
    except FilterError:
        return frozenset()
    return None if text == ALL else tags


@kept(atom_bytes)
def codes_of(atom: Atom) -> frozenset[int] | None:
    """The hash codes of a tag expression; None when it wants everything or is of another kind."""
    if atom.kind != TAG or tags_of(atom) is None:
        return None
    try:
        return parse_tags(atom.text)[2]
    except FilterError:
        return frozenset()


def rule_weight(rule: Rule) -> int:
    """The length of all that a message may be compared with."""
    orders = {order for item in rule for order in item.none}
    atoms = [
        *(atom for item in rule for atom in item.must),
        *(a for o in orders for a in o.others()),
    ]
    return sum(len(atom.text) for atom in atoms)
