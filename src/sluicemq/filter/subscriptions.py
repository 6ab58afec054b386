"""Subscriptions by tags or SQL92, and the filter that a broker applies for each of them.

A broker knows a tag only by Java's 32-bit hash of it, which is in the consume queue. The first
stage of a filter compares these hashes, and for tags there is no second stage (spec/filter.md §1).
Two tags may have the same hash, so a client compares the tags themselves again (`tag_matches`). A
SQL92 filter needs the properties from the commit log. A message does not match if the expression is
null or cannot be evaluated (§5).

A message without a tag has the code 0. `*` alone means all messages; among other tags it is a tag
of that name. A single `|` is part of a tag.

A broker receives the same few expressions with every pull, so it caches the results of
compilations, failures included, as RocketMQ does in its cache of 100 expressions. Here the cache
is limited by the length of the expressions, `CACHED_CHARACTERS_MAX`. Compiling a long expression
takes tens of milliseconds, so a broker asks `is_quick_to_compile` first and moves a long
compilation to another thread (`preparation_jobs`).

What only SQL92 needs is imported when the first expression is compiled: lark takes 50 ms and
11 MiB, which users of tags should not pay for.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from sluicemq.errors import FilterError, FilterSyntaxError
from sluicemq.filter.nodes import JAVA_TRIM_CHARACTERS, In, Literal, Node, Property
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import ALL, SQL92, TAG, MessageFilter, Subscription

if TYPE_CHECKING:
    from sluicemq.filter.selector import Selector

CACHED_CHARACTERS_MAX: Final = 1 << 19
"""The maximum total length of the long expressions in the cache, and of the short ones.

Long and short expressions have separate caches, so that long ones do not displace short ones. A
compiled expression takes 85 to 280 bytes per character.
"""
SHORT_EXPRESSION_MAX: Final = 512
"""The maximum length of a short expression. It compiles within half a millisecond."""
_EVICTION_INTERVAL: Final = 64
"""The cache of short expressions is checked for eviction after this many insertions."""


def compile_sql92(text: str) -> "Selector":
    """Return the compiled filter of a SQL92 expression, a selector, from a cache if possible.

    Raises FilterSyntaxError, with the position and the fix, if RocketMQ would not compile it.
    """
    is_short = len(text) <= SHORT_EXPRESSION_MAX
    cache = _short_expressions if is_short else _long_expressions
    selector_or_error = cache.compile(text)
    if isinstance(selector_or_error, FilterSyntaxError):
        # Raise a copy: an exception that was raised refers to the frames of its callers and so
        # keeps their data alive, 250 kB for each read.
        raise copy.copy(selector_or_error)
    return selector_or_error


def compile_complete(text: str) -> "Selector":
    """Return the selector of a SQL92 expression in which RocketMQ must read all of the text.

    RocketMQ ignores text that follows a complete expression. This function raises FilterSyntaxError
    for such text, and for an expression that RocketMQ would not compile. A comment at the end is
    permitted.
    """
    selector = compile_sql92(text)
    if selector.ignored_text and selector.ignored_start is not None:
        from sluicemq.filter.findings import (  # noqa: PLC0415 - only SQL92 needs it
            ignored_text_warning,
            syntax_error,
        )

        raise syntax_error(text, ignored_text_warning(text, selector.ignored_start))
    return selector


def is_quick_to_compile(text: str) -> bool:
    """Return whether a SQL92 expression is in the cache or compiles within half a millisecond.

    A short expression compiles so quickly, except the first expression of a process, whose
    compilation imports lark.
    """
    if text in _long_expressions:
        return True
    # Both caches are empty until the first compilation, which imports lark.
    has_lark = bool(_short_expressions or _long_expressions)
    return len(text) <= SHORT_EXPRESSION_MAX and has_lark


class _CompilationCache(dict[str, "Selector | FilterSyntaxError"]):
    """The results of compilations by expression, the one that was used last at the end.

    Several threads may use it. If one of them does not see a result of another, it compiles the
    expression again.
    """

    __slots__ = ()

    def compile(self, text: str) -> "Selector | FilterSyntaxError":
        """Return the result of `try_compile`, from the cache if it is there.

        A new result may evict the results that were not used for the longest time.
        """
        # Remove and insert, so that the results that were used last are at the end of the dict.
        compiled = self.pop(text, None)
        if compiled is not None:
            self[text] = compiled
            return compiled
        self[text] = compiled = try_compile(text)
        if len(text) > SHORT_EXPRESSION_MAX or len(self) % _EVICTION_INTERVAL == 0:
            self._evict()
        return compiled

    def _evict(self) -> None:
        """Remove the results that were not used for the longest time.

        This ends when the total length of the expressions is at most CACHED_CHARACTERS_MAX.
        """
        texts = list(self)
        size = sum(map(len, texts))
        for oldest in texts[:-1]:  # a waiting request needs the newest one
            if size <= CACHED_CHARACTERS_MAX:
                break
            self.pop(oldest, None)
            size -= len(oldest)


def try_compile(text: str) -> "Selector | FilterSyntaxError":
    """Compile a SQL92 expression without the cache.

    Return the selector, or the error if RocketMQ would not compile the expression. The error is
    returned, not raised, so that it can be cached.
    """
    from sluicemq.filter.findings import (  # noqa: PLC0415 - only SQL92 needs it
        Rejected,
        syntax_error,
    )
    from sluicemq.filter.selector import Selector  # noqa: PLC0415 - only SQL92 needs it
    from sluicemq.filter.syntax import parse  # noqa: PLC0415 - it imports lark

    try:
        tree, ignored_start = parse(text)
    except Rejected as rejected:
        return syntax_error(text, rejected.finding)
    return Selector(text, tree, ignored_start)


_short_expressions = _CompilationCache()
_long_expressions = _CompilationCache()

SEPARATOR = "||"
"""The text between two tags of a tag expression."""
SHORT_TAGS_MAX: Final = 2048
"""The maximum length of a short tag expression. It is parsed in a fraction of a millisecond."""
PARSED_TAGS_MAX: Final = 32
"""The maximum number of long tag expressions in the cache."""
_PARSED_TAGS: Final[dict[str, tuple[frozenset[str], frozenset[int]]]] = {}
"""The cache of long tag expressions: the tags and their codes. Another thread may fill it."""
TAGS_LENGTH_MAX: Final = 65_536
"""The maximum length of a tag expression. Computing the hashes of its tags takes 3 ms."""


def parse_tags(expression: str | None) -> tuple[str, frozenset[str], frozenset[int]]:
    """Return (expression to send to a broker, tags, hash codes of the tags) of a tag expression.

    `"A || B"` returns ("A || B", the set of "A" and "B", their codes). None, "" and "*" mean all
    messages: the result is ("*", empty set, empty set). An expression of spaces and separators,
    such as `" || "`, has empty sets too, but its first member is not "*", and it matches no
    message.

    Raises FilterSyntaxError if the expression consists only of separators, without a space, or has
    more than TAGS_LENGTH_MAX characters.
    """
    if not expression or expression == ALL:
        return ALL, frozenset(), frozenset()
    tags, codes = _PARSED_TAGS.get(expression) or _parse_tags_and_codes(expression)
    return expression, tags, codes


def _parse_tags_and_codes(expression: str) -> tuple[frozenset[str], frozenset[int]]:
    """Return (tags, their codes) of an expression. A code is the hash of a tag.

    Raises FilterSyntaxError if the expression is empty, has only separators, or is too long.
    """
    tags = split_tags(expression)
    return tags, frozenset(map(tag_code, tags))


def _cache_tags(expression: str) -> None:
    """Parse a long tag expression and store the result in `_PARSED_TAGS`.

    If the cache is full, the oldest result is removed. An invalid expression is ignored, because
    the caller's `parse_tags` raises its error later.
    """
    with suppress(FilterError):
        tags_and_codes = _parse_tags_and_codes(expression)
        while len(_PARSED_TAGS) >= PARSED_TAGS_MAX:
            with suppress(StopIteration, KeyError):  # another thread removed it
                del _PARSED_TAGS[next(iter(_PARSED_TAGS))]
        _PARSED_TAGS[expression] = tags_and_codes


def split_tags(expression: str) -> frozenset[str]:
    """Return the tags of an expression, without the spaces around them.

    Empty tags are left out, so the set is empty if there are only spaces between the separators.
    Raises FilterSyntaxError if the expression is empty, consists only of separators, or is longer
    than TAGS_LENGTH_MAX.
    """
    if len(expression) > TAGS_LENGTH_MAX:
        raise FilterSyntaxError(
            f"The tag expression has {len(expression)} characters, the limit is {TAGS_LENGTH_MAX}.",
            fix="Subscribe to fewer tags, or to * and filter by a property.",
        )
    padded_tags = expression.split(SEPARATOR)
    if not any(padded_tags):
        raise FilterSyntaxError(
            f"The tag expression {expression!r} has separators but no tag.",
            fix="Write TagA || TagB, or * for all messages.",
        )
    tags = {padded_tag.strip(JAVA_TRIM_CHARACTERS) for padded_tag in padded_tags}
    tags.discard("")
    return frozenset(tags)


def is_tag_kind(kind: str | None) -> bool:
    """Return whether a subscription of this kind is by tags: TAG, None and "" are."""
    return not kind or kind == TAG


def parse_subscription(
    topic: str, expression: str | None = ALL, kind: str | None = TAG, version: int = 0
) -> Subscription:
    """Return the value that describes a subscription to a topic. Nothing is sent to a broker.

    - `expression` is a tag expression or SQL92, according to `kind`. None and "*" mean all messages
      for tags.
    - `kind` is TAG or SQL92; None and "" mean TAG.
    - `version` is the time at which the client subscribed, in milliseconds since 1970.

    Raises FilterSyntaxError if the expression cannot be parsed or the kind is unknown.
    """
    if is_tag_kind(kind):
        tag_expression, tags, codes = parse_tags(expression)
        return Subscription(topic, tag_expression, TAG, tags, codes, version)
    if kind != SQL92:
        raise unknown_kind_error(kind)
    sql = expression or ""
    compile_sql92(sql)
    return Subscription(topic, sql, SQL92, version=version)


def unknown_kind_error(kind: str | None) -> FilterSyntaxError:
    """Return the error for a subscription whose kind is not TAG or SQL92."""
    return FilterSyntaxError(f"{kind!r} is not a kind of filter.", fix="Use TAG or SQL92.")


def tag_matches(subscription: Subscription, tag: str | None) -> bool:
    """Return whether a delivered message has a tag that the client subscribed to.

    A client checks this because a broker compares only hashes of tags. The result is always True
    for a subscription to all messages, and for SQL92, which the broker evaluates exactly.
    """
    return not subscription.tags or tag in subscription.tags


class TagFilter:
    """The filter of a tag subscription, a `MessageFilter`.

    It decides by the tag codes in the consume queue and never reads the commit log. `tag_codes` is
    None if the subscription matches all messages.
    """

    __slots__ = ("tag_codes",)

    reads_properties = False

    def __init__(self, subscription: Subscription) -> None:
        self.tag_codes: frozenset[int] | None = (
            None if subscription.is_everything else subscription.codes
        )

    def by_consume_queue(self, tag_code: int) -> bool:
        """Return whether the subscription has a tag with this code."""
        return self.tag_codes is None or tag_code in self.tag_codes

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        """Return True: there is no second stage."""
        return True


# The first sentence is the response of RocketMQ, which clients search for. The second is the fix.
SQL92_DISABLED = (
    "The broker does not support consumer to filter message by SQL92. "
    "Set enablePropertyFilter=true in broker.conf and restart the broker, or subscribe by tags."
)


def preparation_jobs(expression: str, kind: str = SQL92) -> Iterator[Callable[[], None]]:
    """Yield a function that compiles an expression in advance, or nothing if that is not worth it.

    The caller runs the yielded function in another thread. The function stores its result in the
    cache, so that the caller can then compile the expression quickly. For a long SQL92 expression
    it also makes the plan for the evaluation of blocks. It ignores errors, because the later
    compilation raises them.

    Nothing is yielded if the expression compiles quickly, if its result is cached, or if `kind` is
    neither SQL92 nor a kind of tags.
    """
    if kind == SQL92:
        if not is_quick_to_compile(expression):
            yield partial(_cache_selector, expression)
    elif is_tag_kind(kind):
        is_long = SHORT_TAGS_MAX < len(expression) <= TAGS_LENGTH_MAX
        if is_long and expression not in _PARSED_TAGS:
            yield partial(_cache_tags, expression)


def _cache_selector(expression: str) -> None:
    """Compile a SQL92 expression and store the result in the cache.

    For a long expression, the plan for the evaluation of blocks is made too. An invalid expression
    is ignored, because the caller's `compile_sql92` raises its error later.
    """
    with suppress(FilterError):
        selector = compile_sql92(expression)
        if len(expression) > SHORT_EXPRESSION_MAX:
            _ = selector.vectorised  # the first access makes the plan


def make_filter(subscription: Subscription) -> MessageFilter | None:
    """Return the filter of a subscription, None if it matches all messages.

    Raises FilterSyntaxError if its SQL92 expression does not compile or its kind is unknown.
    """
    if is_tag_kind(subscription.kind):
        return None if subscription.expression == ALL else TagFilter(subscription)
    if subscription.kind != SQL92:
        raise unknown_kind_error(subscription.kind)
    return compile_sql92(subscription.expression)


Expression: TypeAlias = "Node | Selector | Subscription | str"
"""A filter expression in any form: its tree, compiled, as a subscription, or as SQL92 text."""

TAGS = "TAGS"
"""The property that contains the tag of a message."""


def to_tree(expression: Expression) -> Node:
    """Return the syntax tree of an expression, a subscription or an object with a tree.

    A string is parsed as SQL92. A tag subscription becomes `TAGS IN (...)`. It becomes TRUE if it
    matches all messages, and FALSE if it has no tags. Raises FilterSyntaxError if the expression
    does not compile, if its kind is unknown, or if a string contains text behind a complete
    expression.
    """
    if isinstance(expression, str):
        return compile_complete(expression).tree
    if not isinstance(expression, Subscription):
        tree: Node = getattr(expression, "tree", expression)  # type: ignore[arg-type]
        return tree
    if is_tag_kind(expression.kind):
        if expression.is_everything:
            return Literal(True)
        tags = tuple(sorted(expression.tags))
        return In(Property(TAGS), tags) if tags else Literal(False)
    if expression.kind != SQL92:
        raise unknown_kind_error(expression.kind)
    return compile_sql92(expression.expression).tree
