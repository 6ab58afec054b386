"""The filter a broker applies for a subscription.

A tag filter is decided in the consume queue; SQL92 needs the properties from the commit log. An
expression that is null or cannot be evaluated on a message does not match it
(spec/filter.md §5).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from sluicemq.errors import FilterError
from sluicemq.filter.parser import QUICK_CHARACTERS, compile_sql92, is_quick
from sluicemq.filter.tags import TagFilter, is_tag_kind, unknown_kind
from sluicemq.model.subscription import ALL, SQL92, MessageFilter, Subscription

if TYPE_CHECKING:
    from sluicemq.filter.selector import Selector
    from sluicemq.filter.vectorised import Vectorised

# The first sentence is RocketMQ's own answer, which clients search for; the second is the cure.
SQL92_IS_OFF = (
    "The broker does not support consumer to filter message by SQL92. "
    "Set enablePropertyFilter=true in broker.conf and restart the broker, or subscribe by tags."
)


class Sql92Filter:
    """The second stage decides; the first lets everything through."""

    __slots__ = ("by_commit_log", "selector", "weight")

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def __init__(self, selector: "Selector") -> None:
        self.selector = selector
        self.weight = len(selector.text)
        self.by_commit_log: Callable[[Mapping[str, str]], bool] = selector.matches

    @property
    def vectorised(self) -> "Vectorised":
        """The same verdicts on a block of columns."""
        return self.selector.vectorised

    def by_consume_queue(self, tag_code: int) -> bool:
        return True


def preparation(expression: str, kind: str = SQL92) -> Iterator[Callable[[], None]]:
    """What takes long of an expression, as a job for any thread; none when nothing does."""
    if kind == SQL92 and not is_quick(expression):
        yield partial(_prepare, expression)


def _prepare(expression: str) -> None:
    with suppress(FilterError):
        selector = compile_sql92(expression)
        if len(expression) > QUICK_CHARACTERS:
            _ = selector.vectorised


def make_filter(subscription: Subscription) -> MessageFilter | None:
    """The filter of a subscription; None when every message matches.

    Raises FilterSyntaxError when its SQL92 does not compile or its kind is unknown.
    """
    if is_tag_kind(subscription.kind):
        return None if subscription.expression == ALL else TagFilter(subscription)
    if subscription.kind != SQL92:
        raise unknown_kind(subscription.kind)
    return Sql92Filter(compile_sql92(subscription.expression))
