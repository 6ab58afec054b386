"""Tag expressions: `TagA || TagB`, `*`; the subscription they make; the filter on tag codes.

A broker knows a tag only by Java's 32-bit hash of it, which stands in the consume queue: the first
stage compares hashes and the second has nothing to add (spec/filter.md §1). Two tags may share a
hash, so a client compares the tags themselves again (`tag_matches`).

A message without a tag has code 0. `*` alone means everything; among other tags it is a tag of
that name. One `|` is part of a tag.
"""

from collections.abc import Mapping

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.text import BLANKS
from sluicemq.model.ids import java_hash
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription

SEPARATOR = "||"


def parse_tags(expression: str | None) -> tuple[str, frozenset[str], frozenset[int]]:
    """Expression -> (expression to send, tags, their hash codes); both empty for everything.

    A text of blanks and separators has no tags and is not `*`: it matches nothing, as in RocketMQ.
    Raises FilterSyntaxError when there is nothing but separators.
    """
    if not expression or expression == ALL:
        return ALL, frozenset(), frozenset()
    parts = expression.split(SEPARATOR)
    if not any(parts):
        raise FilterSyntaxError(
            f"The tag expression {expression!r} has separators but no tag.",
            cure="Write TagA || TagB, or * for all messages.",
        )
    tags = frozenset(tag for part in parts if (tag := part.strip(BLANKS)))
    return expression, tags, frozenset(map(java_hash, tags))


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
    return FilterSyntaxError(f"{kind!r} is not a kind of filter.", cure="Use TAG or SQL92.")


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
