"""The consumer groups that one client belongs to, and who may share them.

A client has one `Member` for a group, however many of its consumers belong to the group. The
membership begins with the first of these consumers and ends with the last. `Memberships` counts
them, and checks that they agree on their options.

RocketMQ's brokers keep one filter for each group and topic. So a registry of the whole process
prevents that two clients in one program read a topic for one group with different filters, unless
all brokers of the topic support lanes (design/0009).
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.members import Member
from sluicemq.client.aio.prefetch import PrefetchBuffer
from sluicemq.client.core import requests
from sluicemq.client.core.consuming import (
    ConsumeOptions,
    SubscriptionRegistry,
    make_subscription,
)
from sluicemq.client.core.directory import Directory
from sluicemq.client.heartbeat_thread import HeartbeatThread
from sluicemq.client.tasks import run_to_end
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    RequestTimeoutError,
    SubscriptionConflictError,
)
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MASTER_ID
from sluicemq.wire.bodies import Heartbeat
from sluicemq.wire.declare import decode_header
from sluicemq.wire.headers import HeartbeatResponse

_registry: Final = SubscriptionRegistry()
"""The subscriptions of all clients of this process."""
_registry_lock: Final = threading.Lock()
"""Guards `_registry`, which all clients of the process share."""


def check_compatible(
    member: Member,
    topic: str,
    buffer: PrefetchBuffer,
    options: ConsumeOptions,
    *,
    has_retries: bool,
) -> None:
    """Raise ConfigurationError if a new consumer does not fit the other ones of its group.

    All consumers of a group in one client share the membership `member`. Only streams can share a
    topic: two handlers would take messages from each other. `buffer` is the new consumer's buffer
    for `topic`. The options of all must be equal in order, retries, broadcasting and the treatment
    of undecodable messages.
    """
    # A topic has one buffer, so a second consumer of it must be able to share the buffer.
    present_buffer = member.buffers.get(topic)
    can_share = (
        present_buffer is None
        or present_buffer is buffer
        or (present_buffer.is_shareable and buffer.is_shareable)
    )
    if not can_share or member.has_retries != has_retries:
        raise ConfigurationError(
            f"this client already reads the group {member.group!r} with another kind of consumer "
            "or another handler.",
            fix="Use another group, or another Sluice.",
        )

    # The options of the first consumer hold for the whole group.
    present = member.options
    if present.broadcast != options.broadcast:
        raise _options_differ_error(
            member.group, f"broadcast={present.broadcast}", f"broadcast={options.broadcast}"
        )
    has_same_bytes_max = present.body_bytes_max == options.body_bytes_max
    if present.on_undecodable != options.on_undecodable or not has_same_bytes_max:
        raise _options_differ_error(
            member.group,
            f"on_undecodable={present.on_undecodable!r} and "
            f"body_bytes_max={present.body_bytes_max:,}",
            f"{options.on_undecodable!r} and {options.body_bytes_max:,}",
        )
    if present.ordered != options.ordered or present.retry != options.retry:
        raise _options_differ_error(
            member.group,
            f"ordered={present.ordered} and {present.retry}",
            f"ordered={options.ordered} and {options.retry}",
        )


def _options_differ_error(group: str, present: str, requested: str) -> ConfigurationError:
    """Return the error for a consumer whose options differ from those of its group.

    `present` and `requested` are texts with the options of the group and of the new consumer.
    """
    return ConfigurationError(
        f"this client already reads the group {group!r} with {present}, and the new consumer has "
        f"{requested}.",
        fix="Use the same options for all consumers of a group.",
    )


class Memberships:
    """The consumer groups that one client belongs to.

    `on_join()` is called before a consumer joins a group, and may raise an error to prevent that.
    `len()` is the number of groups.
    """

    def __init__(
        self, cluster: Cluster, heartbeat_thread: HeartbeatThread, on_join: Callable[[], None]
    ) -> None:
        """Begin without memberships.

        `cluster` sends requests, and `heartbeat_thread` keeps memberships registered at brokers.
        `on_join()` is called before a consumer joins a group.
        """
        self._cluster = cluster
        self._heartbeat_thread = heartbeat_thread
        self._on_join = on_join
        self._members: dict[str, Member] = {}
        self._user_counts: dict[tuple[str, str], int] = {}
        """Maps (group, topic) to the number of consumers of this client."""
        self._lock = asyncio.Lock()

    @property
    def directory(self) -> Directory:
        """The routes and outages of the client."""
        return self._cluster.directory

    def check_loop(self) -> None:
        """Raise ConfigurationError in another event loop or process than the client's."""
        self._cluster.affinity.check_loop()

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, group: str) -> Member:
        return self._members[group]

    def get(self, group: str) -> Member | None:
        """Return this client's membership in a group, or None."""
        return self._members.get(group)

    async def join(
        self,
        group: str,
        subscription: Subscription,
        buffer: PrefetchBuffer,
        options: ConsumeOptions,
        *,
        has_retries: bool = True,
    ) -> Member:
        """Let a consumer join a group for a topic, and return the group's membership.

        The first consumer of a group creates the membership, and later ones share it. `buffer`
        receives the messages of the topic.

        Raises what `Member.add_subscription` raises. Raises SubscriptionConflictError if another
        client of this process has a different filter and the brokers cannot serve both. Raises
        ConfigurationError if the consumer does not fit the other ones of the group.
        """
        self._on_join()
        await self._register(_registry.add_user, group, subscription)
        topic = subscription.topic
        try:
            async with self._lock:
                member = self._members.get(group)
                if member is None:
                    member = self._create_member(group, options, has_retries=has_retries)
                check_compatible(member, topic, buffer, options, has_retries=has_retries)
                if (group, topic) not in self._user_counts:
                    await self._begin_subscription(member, subscription, buffer)
                    self._user_counts[group, topic] = 0
                self._user_counts[group, topic] += 1
        except BaseException:
            self._update_registry(_registry.remove_user, group, topic)
            raise
        return member

    def _create_member(self, group: str, options: ConsumeOptions, *, has_retries: bool) -> Member:
        """Create the membership in a group, without a subscription, and return it.

        `has_retries` is False for consumers that are polled: they have no retry topic.
        """
        member = Member(
            self._cluster, self._heartbeat_thread, group, options, has_retries=has_retries
        )
        self._members[group] = member
        return member

    async def _begin_subscription(
        self, member: Member, subscription: Subscription, buffer: PrefetchBuffer
    ) -> None:
        """Subscribe a member to a topic; `buffer` receives its messages.

        If that fails or is cancelled, the subscription is ended and the error is raised.
        """
        try:
            await member.add_subscription(subscription, buffer)
        except BaseException:
            await run_to_end(self._end_subscription(member, subscription.topic))
            raise

    async def _end_subscription(self, member: Member, topic: str) -> None:
        """Unsubscribe a member from a topic; after the last topic, close and remove it."""
        try:
            await member.remove_subscription(topic)
        finally:
            if not member.topics:
                del self._members[member.group]
                await run_to_end(member.close())

    async def _register(
        self, change: Callable[..., None], group: str, subscription: Subscription
    ) -> None:
        """Record a subscription in the registry of this process, which finds conflicts.

        `change` is a method of the registry: it adds or changes the subscription. Raises
        SubscriptionConflictError if another client of this process has a different filter, unless
        all brokers of the topic have lanes, which serve different filters in one group.
        """
        try:
            self._update_registry(change, group, subscription)
        except SubscriptionConflictError:
            if not await self._has_lanes(subscription.topic):
                raise
            self._update_registry(change, group, subscription, shared=True)

    def _update_registry(
        self, change: Callable[..., None], *subscription: Any, shared: bool = False
    ) -> None:
        """Call `change`, a method of the process's registry of subscriptions, under its lock.

        `subscription` are the arguments of `change` between the cluster and the client. `shared`
        says that the brokers serve different filters in one group. Raises
        SubscriptionConflictError.
        """
        servers = self._cluster.name_servers
        client_id = self._heartbeat_thread.client_id
        options = {"shared": True} if shared else {}  # `remove_user` does not have this option
        with _registry_lock:
            change(servers, *subscription, client_id, **options)

    async def _has_lanes(self, topic: str) -> bool:
        """Return whether every master of a topic can serve different filters in one group.

        Such a master has lanes, subgroups of members with the same filter. Returns False if a
        master does not respond. Raises RouteNotFoundError if the topic does not exist.
        """
        command = requests.heartbeat(
            Heartbeat(self._heartbeat_thread.client_id, (), ()), asks_lanes=True
        )
        route = await self._cluster.route(topic)
        for broker_data in route.brokers:
            master_address = broker_data.addresses.get(MASTER_ID)
            if not master_address:
                continue
            try:
                response = await self._cluster.call(master_address, command)
            except (ConnectionLostError, RequestTimeoutError):
                return False
            if not decode_header(HeartbeatResponse, response.fields).lanes:
                return False
        return True

    async def change_subscription(
        self, group: str, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> Subscription:
        """Change the filter of a topic of a group, and return the new subscription.

        See `Member.change_subscription`. Raises what that raises, ConfigurationError if this client
        does not read the topic for the group, and SubscriptionConflictError if another client of
        this process has a different filter that the brokers cannot serve as well. If the caller is
        cancelled, the change is completed before CancelledError is raised.
        """
        return await run_to_end(self._change_subscription(group, topic, tags=tags, where=where))

    async def _change_subscription(
        self, group: str, topic: str, *, tags: str | None, where: str | None
    ) -> Subscription:
        """Change the filter of a topic, and return the new subscription.

        Nothing is sent if the filter is the same. The registry of the process is changed first, and
        restored if the brokers refuse the filter. Raises ConfigurationError if this client does not
        read the topic for the group.
        """
        async with self._lock:
            member = self._members.get(group)
            old_subscription = None if member is None else member.subscriptions.get(topic)
            if member is None or old_subscription is None:
                raise ConfigurationError(
                    f"this client does not read {topic!r} for the group {group!r}.",
                    fix="Subscribe to the topic before you change its filter.",
                )
            version = max(old_subscription.version + 1, self._cluster.clock.now_ms())
            new_subscription = make_subscription(topic, tags=tags, where=where, version=version)
            if (new_subscription.kind, new_subscription.expression) == (
                old_subscription.kind,
                old_subscription.expression,
            ):
                return old_subscription
            await self._register(_registry.change_subscription, group, new_subscription)
            try:
                await member.change_subscription(new_subscription)
            except BaseException:
                self._update_registry(
                    _registry.change_subscription, group, old_subscription, shared=True
                )
                raise
            return new_subscription

    async def leave(self, group: str, topic: str) -> None:
        """Remove one consumer of this client from a group's topic.

        After the last consumer of the topic, the client unsubscribes from it; after the last topic,
        it leaves the group. If the caller is cancelled, that is completed before CancelledError is
        raised.
        """
        await run_to_end(self._leave(group, topic))

    async def _leave(self, group: str, topic: str) -> None:
        """Count one consumer less of a group's topic, and unsubscribe after the last one.

        Does nothing if there is no such consumer.
        """
        key = (group, topic)
        async with self._lock:
            remaining_users = self._user_counts.pop(key, 0) - 1  # -1 if there was none
            if remaining_users > 0:
                self._user_counts[key] = remaining_users
            member = self._members.get(group)
            try:
                if remaining_users == 0 and member is not None:
                    await self._end_subscription(member, topic)
            finally:
                if remaining_users >= 0:
                    self._update_registry(_registry.remove_user, group, topic)

    async def close(self) -> None:
        """Leave all groups, also those whose consumers were dropped without `close`."""
        for group, topic in list(self._user_counts):
            self._user_counts[group, topic] = 1  # so that `leave` removes the last consumer
            await self.leave(group, topic)
