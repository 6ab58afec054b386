"""Every kind of filter as a tree: what is compared with what in the filter lab and in lag.

A tag subscription is `TAGS IN (...)`: the client's exact check, not the broker's by hash code.
"""

from typing import TYPE_CHECKING, TypeAlias

from sluicemq.filter.nodes import In, Literal, Node, Property
from sluicemq.filter.parser import compile_sql92, compile_whole
from sluicemq.filter.tags import is_tag_kind, unknown_kind
from sluicemq.model.subscription import SQL92, Subscription

if TYPE_CHECKING:
    from sluicemq.filter.selector import Selector

Expression: TypeAlias = "Node | Selector | Subscription | str"

TAGS = "TAGS"


def tree_of(expression: Expression) -> Node:
    """The tree; a string is SQL92.

    Raises FilterSyntaxError when it does not compile, its kind is unknown, or a string goes on with
    text that would be ignored.
    """
    if isinstance(expression, str):
        return compile_whole(expression).tree
    if isinstance(expression, Subscription):
        return _tree_of_subscription(expression)
    tree: Node = getattr(expression, "tree", expression)  # type: ignore[arg-type]
    return tree


def _tree_of_subscription(subscription: Subscription) -> Node:
    if not is_tag_kind(subscription.kind):
        if subscription.kind != SQL92:
            raise unknown_kind(subscription.kind)
        return compile_sql92(subscription.expression).tree
    if subscription.is_everything:
        return Literal(True)
    if not subscription.tags:
        return Literal(False)
    return In(Property(TAGS), tuple(sorted(subscription.tags)))
