"""Who subscribes to what: each member's own word, the brokers' view, what is kept of those away.

All of it but the last is asked in RocketMQ's own requests (203, 307), so it works on a Java cluster
too. A broker keeps one subscription for a group and topic, that of the heartbeat that came last;
what the members themselves say shows whether they agree. A group that is away has told nobody;
a SluiceMQ broker remembers its SQL92 expressions for a day (900131).
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import SUCCESS
from sluicemq.client.core.operations.filters import TopicMatching
from sluicemq.client.sync.admin import Admin
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
SYSTEM_PREFIXES: Final = (
    "CID_ONS", "CID_RMQ_SYS_", "CID_SYS_", "CID_DefaultHeartBeatSyncerTopic", "FILTERSRV_CONSUMER",
    "SELF_TEST_", "TOOLS_CONSUMER", "__MONITOR_", "LOCK_CONSUMER",
)  # fmt: skip
"""Groups of the system itself."""
_NO_ANSWER: Final = (RequestError, RequestTimeoutError, ConnectionLostError, ProtocolError)


@dataclass(frozen=True, slots=True)
class GroupSubscriptions:
    """A group's subscriptions by topic. `members`: client id -> what it says itself, None when it
    did not answer; `brokers` the brokers' view; `kept` of a group that is away."""

    group: str
    members: Mapping[str, Mapping[str, Subscription] | None] = field(default_factory=dict)
    brokers: Mapping[str, Subscription] = field(default_factory=dict)
    kept: Mapping[str, Subscription] = field(default_factory=dict)

    @property
    def is_online(self) -> bool:
        return bool(self.members)

    @property
    def topics(self) -> frozenset[str]:
        """Subscribed topics, without the group's own retry topic."""
        names = set(self.brokers) | set(self.kept)
        for said in self.members.values():
            names |= set(said or ())
        return frozenset(name for name in names if not name.startswith(RETRY_PREFIX))

    def said(self, topic: str) -> dict[str, Subscription | None]:
        """Client id -> its subscription of a topic, None when it has none; only those that told."""
        return {
            client_id: own.get(topic) for client_id, own in self.members.items() if own is not None
        }

    def wanted(self, topic: str) -> list[Subscription]:
        """All that anybody says of a topic, each expression once."""
        known = [self.brokers.get(topic), self.kept.get(topic), *self.said(topic).values()]
        found = {(one.kind, one.expression): one for one in known if one is not None}
        return [found[key] for key in sorted(found)]


def known_groups(admin: Admin) -> list[str]:
    """Every consumer group that any master knows, without the system's."""
    return sorted(name for name in admin.groups() if not name.startswith(SYSTEM_PREFIXES))


def subscriptions_of(admin: Admin, groups: Iterable[str]) -> list[GroupSubscriptions]:
    """Asks brokers and members. A member that does not answer is not known, never an error."""
    masters = admin.masters()
    return [_group(admin, group, masters) for group in groups]


def kept_of(told: Iterable[TopicMatching]) -> dict[str, Subscription]:
    """Topic -> the subscription by which brokers of ours judge a group."""
    return {
        item.topic: Subscription(item.topic, item.expression, item.kind)
        for broker in told
        for item in broker.topics
        if item.expression is not None
    }


def _group(admin: Admin, group: str, masters: Mapping[str, str]) -> GroupSubscriptions:
    clients: dict[str, str] = {}
    brokers: dict[str, Subscription] = {}
    for address in masters.values():
        answer = admin.call(address, requests.consumer_connections(group))
        if answer.code == SUCCESS:
            told = bodies.decode_consumer_connections(answer.body)
            clients |= {one.client_id: address for one in told.connections}
            brokers |= told.subscriptions
    members = {
        client_id: _said(admin, group, client_id, address) if index < MEMBERS_ASKED_MAX else None
        for index, (client_id, address) in enumerate(sorted(clients.items()))
    }
    kept: dict[str, Subscription] = {}
    if not members:
        with contextlib.suppress(*_NO_ANSWER):
            kept = kept_of(admin.matching(group))
    return GroupSubscriptions(group, members, brokers, kept)


def _said(admin: Admin, group: str, client_id: str, address: str) -> dict[str, Subscription] | None:
    try:
        answer = admin.call(address, requests.running_info(group, client_id, stack=False))
        if answer.code != SUCCESS:
            return None
        info = bodies.decode_running_info(answer.body)
    except _NO_ANSWER:
        return None
    return {item.topic: item for item in info.subscriptions}
