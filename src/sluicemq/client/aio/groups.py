"""The consumer groups that one client is in: who entered, who left, who changed a subscription.

A group of one client is one `Member`, however many consumers use it; it lives from the first
consumer that enters to the last that leaves. A table of the whole process sees to it that two
clients in one program do not read a topic for one group with two expressions, but where all its
brokers say in their answer to a heartbeat that they serve that (docs/design/0009-lanes.md).
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.member import Member
from sluicemq.client.aio.received import Feed
from sluicemq.client.aio.sharing import check_sharing
from sluicemq.client.core import requests
from sluicemq.client.core.consuming import ConsumeOptions
from sluicemq.client.core.subscriptions import SubscriptionRegistry, make_subscription
from sluicemq.client.keeper import Keeper
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    RequestTimeoutError,
    SubscriptionConflictError,
)
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MASTER_ID
from sluicemq.protocol.bodies import Heartbeat
from sluicemq.protocol.headers import HeartbeatResponse, decode_header

_registry: Final = SubscriptionRegistry()
_registry_lock: Final = threading.Lock()
"""One for the process: two clients in one program must not contradict each other either."""


class Memberships:
    """The groups of one client. `on_join` is called before a consumer enters."""

    def __init__(self, cluster: Cluster, keeper: Keeper, on_join: Callable[[], None]) -> None:
        self._cluster = cluster
        self._keeper = keeper
        self._on_join = on_join
        self._members: dict[str, Member] = {}
        self._users: dict[tuple[str, str], int] = {}
        self._joining = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, group: str) -> Member:
        return self._members[group]

    def get(self, group: str) -> Member | None:
        """This client's membership in a group."""
        return self._members.get(group)

    async def join(
        self,
        group: str,
        subscription: Subscription,
        feed: Feed,
        options: ConsumeOptions,
        *,
        retry: bool,
    ) -> Member:
        """A consumer enters a group. Raises what `Member.add` does, SubscriptionConflictError and
        ConfigurationError."""
        self._on_join()
        try:
            self._enter(group, subscription)
        except SubscriptionConflictError:
            if not await self._is_shared(subscription.topic):
                raise
            self._enter(group, subscription, shared=True)
        key = (group, subscription.topic)
        try:
            async with self._joining:
                member = self._members.get(group)
                if member is None:
                    member = Member(self._cluster, self._keeper, group, options, retry=retry)
                    self._members[group] = member
                check_sharing(member, subscription.topic, feed, options, retry=retry)
                if key not in self._users:
                    await self._add(member, subscription, feed)
                self._users[key] = self._users.get(key, 0) + 1
        except BaseException:
            self._leave(group, subscription.topic)
            raise
        return member

    def _enter(self, group: str, subscription: Subscription, *, shared: bool = False) -> None:
        with _registry_lock:
            _registry.enter(
                self._cluster.name_servers,
                group,
                subscription,
                self._keeper.client_id,
                shared=shared,
            )

    def _leave(self, group: str, topic: str) -> None:
        with _registry_lock:
            _registry.leave(self._cluster.name_servers, group, topic, self._keeper.client_id)

    async def _is_shared(self, topic: str) -> bool:
        """Does every broker of a topic serve members that want different things?"""
        command = requests.heartbeat(Heartbeat(self._keeper.client_id, (), ()), asks_lanes=True)
        for data in (await self._cluster.route(topic)).brokers:
            address = data.addresses.get(MASTER_ID)
            try:
                answer = await self._cluster.call(address, command) if address else None
            except (ConnectionLostError, RequestTimeoutError):
                return False
            if answer is not None and not decode_header(HeartbeatResponse, answer.fields).lanes:
                return False
        return True

    async def _add(self, member: Member, subscription: Subscription, feed: Feed) -> None:
        try:
            await member.add(subscription, feed)
        except BaseException:
            if not member.topics:
                del self._members[member.group]
                await member.close()
            raise

    async def change(
        self, group: str, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> Subscription:
        """A group reads a topic with another expression from now on; see `Member.change`.

        Raises SubscriptionConflictError when another client of this process reads it too and a
        broker does not serve both.
        """
        async with self._joining:
            member = self._members.get(group)
            known = None if member is None else member.subscription_of(topic)
            if member is None or known is None:
                raise ConfigurationError(
                    f"the group {group!r} does not read {topic!r} here.", cure="Subscribe first."
                )
            version = max(known.version + 1, self._cluster.clock.now_ms())
            wanted = make_subscription(topic, tags=tags, where=where, version=version)
            if (wanted.kind, wanted.expression) == (known.kind, known.expression):
                return known
            try:
                self._change(group, wanted)
            except SubscriptionConflictError:
                if not await self._is_shared(topic):
                    raise
                self._change(group, wanted, shared=True)
            try:
                await member.change(wanted)
            except BaseException:
                self._change(group, known, shared=True)
                raise
            return wanted

    def _change(self, group: str, subscription: Subscription, *, shared: bool = False) -> None:
        with _registry_lock:
            _registry.change(
                self._cluster.name_servers,
                group,
                subscription,
                self._keeper.client_id,
                shared=shared,
            )

    async def leave(self, group: str, topic: str) -> None:
        """A consumer leaves a group; the last one ends the membership."""
        key = (group, topic)
        async with self._joining:
            users = self._users.pop(key, 0) - 1
            if users > 0:
                self._users[key] = users
            member = self._members.get(group)
            if users == 0 and member is not None:
                await member.remove(topic)
                if not member.topics:
                    del self._members[group]
                    await member.close()
        if users >= 0:
            self._leave(group, topic)

    async def close(self) -> None:
        """Leaves what consumers that were dropped without a close have left."""
        for group, topic in list(self._users):
            self._users[group, topic] = 1
            await self.leave(group, topic)


class Joiner:
    """How one consumer enters groups: with its options."""

    __slots__ = ("_memberships", "_options", "_retry")

    def __init__(
        self, memberships: Memberships, options: ConsumeOptions, *, retry: bool = True
    ) -> None:
        self._memberships = memberships
        self._options = options
        self._retry = retry

    async def join(self, group: str, subscription: Subscription, feed: Feed) -> Member:
        """See `Memberships.join`."""
        return await self._memberships.join(
            group, subscription, feed, self._options, retry=self._retry
        )

    async def change(
        self, group: str, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> Subscription:
        """See `Memberships.change`."""
        return await self._memberships.change(group, topic, tags=tags, where=where)

    async def leave(self, group: str, topic: str) -> None:
        """See `Memberships.leave`."""
        await self._memberships.leave(group, topic)
