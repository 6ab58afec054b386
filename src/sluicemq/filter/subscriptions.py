"""Subscriptions by tags or SQL92, and the filter that a broker applies for each.

A broker knows a tag only by Java's 32-bit hash of it, which stands in the consume queue: the first
stage compares hashes and the second has nothing to add (spec/filter.md §1). Two tags may share a
hash, so a client compares the tags themselves again (`tag_matches`). SQL92 needs the properties
from the commit log; an expression that is null or cannot be evaluated on a message does not match
(§5).

A message without a tag has code 0. `*` alone means everything; among other tags it is a tag of
that name. One `|` is part of a tag.

A broker sees the same few expressions with every pull, so the outcome of a compilation is kept,
failures too, as RocketMQ does (its cache has 100 places); as much as `KEPT_CHARACTERS` of text. A
long one takes tens of milliseconds: who has others to serve asks `is_quick` before. Whatever else
SQL92 takes is loaded at the first expression: lark costs 50 ms and 11 MiB, which users of tags do
not pay.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from sluicemq.errors import FilterError, FilterSyntaxError
from sluicemq.filter.nodes import BLANKS, In, Literal, Node, Property
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import ALL, SQL92, TAG, MessageFilter, Subscription

if TYPE_CHECKING:
    from sluicemq.filter.selector import Selector

KEPT_CHARACTERS: Final = 1 << 19
"""Keep the outcomes of so many characters of long expressions, and of as many of short ones: long
expressions do not displace short ones. Compiled, a character takes 85 to 280 bytes."""
QUICK_CHARACTERS: Final = 512
"""As many are compiled in half a millisecond."""
_TIDY_EVERY: Final = 64


def compile_sql92(text: str) -> "Selector":
    """Raises FilterSyntaxError, with position and cure, where RocketMQ would not compile it."""
    outcome = (_quick if len(text) <= QUICK_CHARACTERS else _long).outcome(text)
    if isinstance(outcome, FilterSyntaxError):
        # A copy: one that was raised holds what its callers held, 250 kB of a read each.
        raise copy.copy(outcome)
    return outcome


def compile_whole(text: str) -> "Selector":
    """The same for an expression that somebody writes for SluiceMQ: text behind a complete one,
    which RocketMQ ignores, raises FilterSyntaxError as well."""
    selector = compile_sql92(text)
    if selector.ignored and selector.rest is not None:
        from sluicemq.filter.findings import rest_warning, syntax_error  # noqa: PLC0415 - as above

        raise syntax_error(text, rest_warning(text, selector.rest))
    return selector


def is_quick(text: str) -> bool:
    """Is it compiled already, or in no time? The first one of all is not."""
    return text in _long or (len(text) <= QUICK_CHARACTERS and bool(_quick or _long))


class _Kept(dict[str, "Selector | FilterSyntaxError"]):
    """Outcomes, the one that was asked for last behind the others. Threads share it: what one of
    them does not see is compiled once more."""

    __slots__ = ()

    def outcome(self, text: str) -> "Selector | FilterSyntaxError":
        outcome = self.pop(text, None)
        if outcome is not None:
            self[text] = outcome
            return outcome
        self[text] = outcome = try_compile(text)
        if len(text) > QUICK_CHARACTERS or len(self) % _TIDY_EVERY == 0:
            size = sum(map(len, texts := list(self)))
            for oldest in texts[:-1]:  # the request that waits asks for the newest
                if size <= KEPT_CHARACTERS:
                    break
                self.pop(oldest, None)
                size -= len(oldest)
        return outcome


def try_compile(text: str) -> "Selector | FilterSyntaxError":
    """The selector, or the error that says why there is none (returned, so that it can be kept)."""
    from sluicemq.filter.findings import Rejected, syntax_error  # noqa: PLC0415 - see the docstring
    from sluicemq.filter.selector import Selector  # noqa: PLC0415
    from sluicemq.filter.syntax import parse  # noqa: PLC0415

    try:
        tree, rest = parse(text)
    except Rejected as rejected:
        return syntax_error(text, rejected.finding)
    return Selector(text, tree, rest)


_quick, _long = _Kept(), _Kept()

SEPARATOR = "||"
QUICK_TAGS: Final = 2048
"""Characters of a tag expression that is parsed in a fraction of a millisecond."""
LONG_TAGS_MAX: Final = 32
_LONG_TAGS: Final[dict[str, tuple[frozenset[str], frozenset[int]]]] = {}
"""Tags and codes of long expressions that were parsed lately, perhaps by another thread."""
TAGS_LENGTH_MAX: Final = 65_536
"""The most characters of a tag expression. Their hashes take 3 ms."""


def parse_tags(expression: str | None) -> tuple[str, frozenset[str], frozenset[int]]:
    """Expression -> (expression to send, tags, their hash codes); both empty for everything.

    A text of blanks and separators has no tags and is not `*`: it matches nothing, as in RocketMQ.
    Raises FilterSyntaxError when there is nothing but separators.
    """
    if not expression or expression == ALL:
        return ALL, frozenset(), frozenset()
    tags, codes = _LONG_TAGS.get(expression) or _tags_and_codes(expression)
    return expression, tags, codes


def _tags_and_codes(expression: str) -> tuple[frozenset[str], frozenset[int]]:
    tags = split_tags(expression)
    return tags, frozenset(map(tag_code, tags))


def _keep_tags(expression: str) -> None:
    """Parse a long tag expression and keep what was found for a while."""
    with suppress(FilterError):
        found = _tags_and_codes(expression)
        while len(_LONG_TAGS) >= LONG_TAGS_MAX:
            with suppress(StopIteration, KeyError):  # another thread has been here
                del _LONG_TAGS[next(iter(_LONG_TAGS))]
        _LONG_TAGS[expression] = found


def split_tags(expression: str) -> frozenset[str]:
    """Return the tags of an expression that has some. Raises FilterSyntaxError when there is
    nothing but separators, or too much."""
    if len(expression) > TAGS_LENGTH_MAX:
        raise FilterSyntaxError(
            f"The tag expression has {len(expression)} characters, the limit is {TAGS_LENGTH_MAX}.",
            fix="Subscribe to fewer tags, or to * and filter by a property.",
        )
    parts = expression.split(SEPARATOR)
    if not any(parts):
        raise FilterSyntaxError(
            f"The tag expression {expression!r} has separators but no tag.",
            fix="Write TagA || TagB, or * for all messages.",
        )
    return frozenset(tag for part in parts if (tag := part.strip(BLANKS)))


def is_tag_kind(kind: str | None) -> bool:
    """Without a kind an expression is of tags."""
    return not kind or kind == TAG


def subscribe(
    topic: str, expression: str | None = ALL, kind: str | None = TAG, version: int = 0
) -> Subscription:
    """A topic and an expression as a subscription; `version` is the time of subscribing in ms.

    Raises FilterSyntaxError when the expression does not parse or the kind is unknown.
    """
    if is_tag_kind(kind):
        text, tags, codes = parse_tags(expression)
        return Subscription(topic, text, TAG, tags, codes, version)
    if kind != SQL92:
        raise unknown_kind(kind)
    compile_sql92(expression or "")
    return Subscription(topic, expression or "", SQL92, version=version)


def unknown_kind(kind: str | None) -> FilterSyntaxError:
    return FilterSyntaxError(f"{kind!r} is not a kind of filter.", fix="Use TAG or SQL92.")


def tag_matches(subscription: Subscription, tag: str | None) -> bool:
    """What a client asks again of a delivered message: is its tag one of those subscribed to?

    True for everything and for SQL92, which the broker has decided exactly.
    """
    return not subscription.tags or tag in subscription.tags


class TagFilter:
    """The first stage decides by the hash code alone: the commit log is not read."""

    __slots__ = ("tag_codes",)

    reads_properties = False

    def __init__(self, subscription: Subscription) -> None:
        self.tag_codes: frozenset[int] | None = (
            None if subscription.is_everything else subscription.codes
        )

    def by_consume_queue(self, tag_code: int) -> bool:
        return self.tag_codes is None or tag_code in self.tag_codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        return True


# The first sentence is RocketMQ's own answer, which clients search for; the second is the cure.
SQL92_IS_OFF = (
    "The broker does not support consumer to filter message by SQL92. "
    "Set enablePropertyFilter=true in broker.conf and restart the broker, or subscribe by tags."
)


def preparation(expression: str, kind: str = SQL92) -> Iterator[Callable[[], None]]:
    """What takes long of an expression, as a job for any thread; none when nothing does."""

    def prepare() -> None:
        with suppress(FilterError):
            selector = compile_sql92(expression)
            if len(expression) > QUICK_CHARACTERS:
                _ = selector.vectorised

    if kind == SQL92 and not is_quick(expression):
        yield prepare
    elif (
        is_tag_kind(kind)
        and QUICK_TAGS < len(expression) <= TAGS_LENGTH_MAX
        and expression not in _LONG_TAGS
    ):
        yield partial(_keep_tags, expression)


def make_filter(subscription: Subscription) -> MessageFilter | None:
    """The filter of a subscription; None when every message matches.

    Raises FilterSyntaxError when its SQL92 does not compile or its kind is unknown.
    """
    if is_tag_kind(subscription.kind):
        return None if subscription.expression == ALL else TagFilter(subscription)
    if subscription.kind != SQL92:
        raise unknown_kind(subscription.kind)
    return compile_sql92(subscription.expression)


Expression: TypeAlias = "Node | Selector | Subscription | str"

TAGS = "TAGS"


def tree_of(expression: Expression) -> Node:
    """The tree; a string is SQL92.

    Raises FilterSyntaxError when it does not compile, its kind is unknown, or a string goes on with
    text that would be ignored.
    """
    if isinstance(expression, str):
        return compile_whole(expression).tree
    if not isinstance(expression, Subscription):
        tree: Node = getattr(expression, "tree", expression)  # type: ignore[arg-type]
        return tree
    if is_tag_kind(expression.kind):
        if expression.is_everything:
            return Literal(True)
        tags = tuple(sorted(expression.tags))
        return In(Property(TAGS), tags) if tags else Literal(False)
    if expression.kind != SQL92:
        raise unknown_kind(expression.kind)
    return compile_sql92(expression.expression).tree
