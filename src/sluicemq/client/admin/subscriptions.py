"""What a consumer group subscribes: as its brokers report it, and as its members report it.

A broker keeps one subscription per group and topic, that of the newest heartbeat. Whether the
members of a group agree can only be learned from the members themselves
(GET_CONSUMER_RUNNING_INFO (307)).
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sluicemq.client.admin.groups import matching
from sluicemq.client.admin.topics import ask_each, masters
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import SUCCESS
from sluicemq.errors import (
    ConnectionLostError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
)
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.wire import bodies

MEMBERS_ASKED_MAX: Final = 64
SILENT_MEMBERS_MAX: Final = 3
"""After this many members that did not answer, each until its timeout, no other one is asked."""
NO_ANSWER: Final = (RequestError, RequestTimeoutError, ConnectionLostError, ProtocolError)
"""The errors of a request to a member that does not answer, or not intelligibly."""
Brokers = Mapping[str, str]
"""Broker name -> address of its master."""


@dataclass(frozen=True, slots=True)
class GroupSubscriptions:
    """The subscriptions of a consumer group, each mapping by topic.

    `members` contains, by client id, what each member reported, None if it did not answer.
    `brokers` is the brokers' view. `remembered` are the subscriptions that SluiceMQ brokers
    remember of a group without members.
    """

    group: str
    members: Mapping[str, Mapping[str, Subscription] | None] = field(default_factory=dict)
    brokers: Mapping[str, Subscription] = field(default_factory=dict)
    remembered: Mapping[str, Subscription] = field(default_factory=dict)

    @property
    def is_online(self) -> bool:
        """Whether the group has a member."""
        return bool(self.members)

    @property
    def topics(self) -> frozenset[str]:
        """The subscribed topics, without the retry topic of the group."""
        reported = (subscriptions or () for subscriptions in self.members.values())
        names = set(self.brokers).union(self.remembered, *reported)
        return frozenset(name for name in names if not name.startswith(RETRY_PREFIX))

    def by_member(self, topic: str) -> dict[str, Subscription | None]:
        """Return client id -> subscription to `topic`, for each member that answered.

        The subscription is None if the member does not subscribe to the topic.
        """
        return {
            client_id: subscriptions.get(topic)
            for client_id, subscriptions in self.members.items()
            if subscriptions is not None
        }

    def all_of(self, topic: str) -> list[Subscription]:
        """Return each different subscription to a topic that brokers or members report.

        Two subscriptions with the same kind and expression count as one. The result is sorted by
        kind and expression.
        """
        known_subscriptions = [
            self.brokers.get(topic),
            self.remembered.get(topic),
            *self.by_member(topic).values(),
        ]
        by_expression = {}
        for subscription in known_subscriptions:
            if subscription is not None:
                by_expression[subscription.kind, subscription.expression] = subscription
        return [by_expression[key] for key in sorted(by_expression)]


def subscriptions(
    directory: Directory, group: str, *, brokers: Brokers | None = None
) -> Conversation[GroupSubscriptions]:
    """Return the subscriptions of a group, as masters and members report them.

    `brokers` maps the names of the masters to ask to addresses; None means all masters. The
    subscriptions of a member that does not answer are None. If no member is online, the result also
    has the subscriptions that SluiceMQ brokers remember.
    """
    if brokers is None:
        brokers = yield from masters(directory)
    clients, subscriptions_by_broker = yield from connections_at(brokers, group)
    reported_by_brokers: dict[str, Subscription] = {}
    for subscriptions_at_broker in subscriptions_by_broker.values():
        reported_by_brokers |= subscriptions_at_broker

    members = yield from _ask_members(group, clients)
    remembered: dict[str, Subscription] = {}
    if not members:
        with contextlib.suppress(*NO_ANSWER):
            remembered = yield from _fetch_remembered_subscriptions(directory, group)
    return GroupSubscriptions(group, members, reported_by_brokers, remembered)


def _ask_members(
    group: str, clients: Mapping[str, str]
) -> Conversation[dict[str, Mapping[str, Subscription] | None]]:
    """Ask members for their subscriptions, and return client id -> topic -> subscription.

    A client id maps to None if the member did not answer or was not asked. At most
    `MEMBERS_ASKED_MAX` members are asked, and asking ends when `SILENT_MEMBERS_MAX` of them did not
    answer. `clients` maps each client id to the address of a broker that forwards the question.
    """
    members: dict[str, Mapping[str, Subscription] | None] = {}
    silent_count = 0
    for client_id, address in sorted(clients.items()):
        members[client_id] = None
        if len(members) <= MEMBERS_ASKED_MAX and silent_count < SILENT_MEMBERS_MAX:
            running_info = yield from ask_member(group, client_id, address)
            if running_info is None:
                silent_count += 1
            else:
                members[client_id] = {
                    subscription.topic: subscription for subscription in running_info.subscriptions
                }
    return members


def _fetch_remembered_subscriptions(
    directory: Directory, group: str
) -> Conversation[dict[str, Subscription]]:
    """Return topic -> subscription that SluiceMQ brokers remember of a group without members."""
    remembered = {}
    for broker_counts in (yield from matching(directory, group)):
        for counts in broker_counts.topics:
            if counts.expression is not None:
                subscription = Subscription(counts.topic, counts.expression, counts.kind)
                remembered[counts.topic] = subscription
    return remembered


def connections_at(
    brokers: Brokers, group: str
) -> Conversation[tuple[dict[str, str], dict[str, Mapping[str, Subscription]]]]:
    """Return which members of a group are connected to some brokers, and what the brokers report.

    Returns two dictionaries: client id -> address of a broker to which the client is connected, and
    broker name -> topic -> subscription. `brokers` maps names to addresses. Brokers that do not
    know the group are left out.
    """
    clients: dict[str, str] = {}
    subscriptions: dict[str, Mapping[str, Subscription]] = {}
    command = requests.consumer_connections(group=group)
    for name, address, answer in (yield from ask_each(brokers, command, ignored_codes=None)):
        connected = bodies.decode_consumer_connections(answer.body)
        clients |= {connection.client_id: address for connection in connected.connections}
        subscriptions[name] = connected.subscriptions
    return clients, subscriptions


def ask_member(group: str, client_id: str, address: str) -> Conversation[bodies.RunningInfo | None]:
    """Ask a member for a report about itself; return None if it does not answer.

    `address` is the address of a broker to which the member is connected. The broker forwards the
    request.
    """
    command = requests.running_info(group=group, client_id=client_id, stack_enable=False)
    with contextlib.suppress(*NO_ANSWER):
        answer = yield Call(address, command)
        if answer.code == SUCCESS:
            return bodies.decode_running_info(answer.body)
    return None
