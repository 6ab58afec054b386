"""One group, one expression for each topic: conflicts are found before they lose messages.

RocketMQ keeps one subscription for a (group, topic); two members with different expressions
overwrite each other silently and messages are lost (spec/filter.md §2). Inside one process we can
see both, so the second one is refused with both expressions in the error, but where the brokers
serve two clients that want different things: a client of its own is a member of its own.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from sluicemq.client.core.names import check_topic
from sluicemq.errors import ConfigurationError, SubscriptionConflictError
from sluicemq.filter.check import check_subscription
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.tags import subscribe, tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription

_log = logging.getLogger("sluicemq.client")


def make_subscription(
    topic: str, *, tags: str | None = None, where: str | None = None, version: int = 0
) -> Subscription:
    """`tags` ("A||B") or `where` (SQL92), or neither for everything.

    Raises ConfigurationError when both are given, FilterSyntaxError naming the place and the cure
    when the expression cannot work. What compiles and does something else than it seems to is
    logged as a warning.
    """
    if tags is not None and where is not None:
        raise ConfigurationError(
            "both tags= and where= are given.",
            cure="Use one; in SQL92 the tag is the property TAGS: TAGS = 'A' AND price > 3.",
        )
    kind = TAG if where is None else SQL92
    expression = tags if where is None else where
    check_topic(topic)
    for finding in check_subscription(Subscription(topic, expression or ALL, kind)):
        _log.warning("filter %r of %s: %s %s", expression, topic, finding.what, finding.instead)
    return subscribe(topic, expression, kind, version)


def exact_match(subscription: Subscription) -> Callable[[StoredMessage], bool]:
    """Does a stored message belong to a subscription? By the tag itself and the properties, not by
    hashes."""
    if subscription.kind == SQL92:
        selector = compile_sql92(subscription.expression)
        return lambda record: selector.matches(record.properties)
    return lambda record: tag_matches(subscription, record.tag)


@dataclass(slots=True)
class _Entry:
    subscription: Subscription
    users: int


class SubscriptionRegistry:
    """(cluster, group, topic) -> the expression of each client, with a count of its users. With
    `shared` the brokers serve clients that differ. Not locked: callers lock."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[tuple[Hashable, str, str], dict[Hashable, _Entry]] = {}

    def enter(
        self,
        cluster: Hashable,
        group: str,
        subscription: Subscription,
        client: Hashable = None,
        *,
        shared: bool = False,
    ) -> None:
        """Notes a user of a subscription. Raises SubscriptionConflictError."""
        clients = self._entries.setdefault((cluster, group, subscription.topic), {})
        own = clients.get(client)
        for entry in [own] if shared else clients.values():
            if entry is not None and _differ(entry.subscription, subscription):
                raise SubscriptionConflictError(
                    f"the group {group!r} already reads {subscription.topic!r} in this process "
                    f"with {_show(entry.subscription)}; now {_show(subscription)} is asked for. "
                    + (
                        "A client has one expression for a topic."
                        if entry is own
                        else "With RocketMQ's brokers messages of one of them would be lost."
                    ),
                    cure="Use the same expression, or another group.",
                )
        clients.setdefault(client, _Entry(subscription, 0)).users += 1

    def change(
        self,
        cluster: Hashable,
        group: str,
        subscription: Subscription,
        client: Hashable = None,
        *,
        shared: bool = False,
    ) -> None:
        """All users of one client go over to another expression. Raises SubscriptionConflictError
        when there are other clients, who would lose messages."""
        clients = self._entries.get((cluster, group, subscription.topic), {})
        for other, entry in clients.items():
            if other != client and not shared and _differ(entry.subscription, subscription):
                raise SubscriptionConflictError(
                    f"the group {group!r} is read by another client of this process too, with "
                    f"{_show(entry.subscription)}; {_show(subscription)} would take messages from "
                    "it.",
                    cure="Close the other one first, or give it another group.",
                )
        if client in clients:
            clients[client].subscription = subscription

    def leave(self, cluster: Hashable, group: str, topic: str, client: Hashable = None) -> None:
        """One user less; the last one frees the group for another expression."""
        clients = self._entries.get((cluster, group, topic), {})
        entry = clients.get(client)
        if entry is not None:
            entry.users -= 1
            if entry.users <= 0:
                del clients[client]
            if not clients:
                del self._entries[cluster, group, topic]


def _differ(one: Subscription, other: Subscription) -> bool:
    return (one.kind, one.expression) != (other.kind, other.expression)


def _show(subscription: Subscription) -> str:
    name = "where=" if subscription.kind == SQL92 else "tags="
    return f"{name}{subscription.expression!r}"
