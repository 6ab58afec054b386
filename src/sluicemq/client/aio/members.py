"""One consumer group in this process: membership, balance, subscriptions.

A member tells every broker of its topics what it subscribes to (heartbeats, on the keeper's
thread), shares the queues of each topic with the other members by the average allocation, and
reads its share. It balances when the broker says that members changed (40), every 20 s, and every
second while it does not see itself in the list of members. With `retry`, the group's %RETRY% topic
belongs to every subscription, as in the Java client: messages that members sent back arrive under
their own topic's feed. An ordered group locks each queue before it reads it (`ordered`). Members of
a broadcasting group share nothing: each reads all queues and has no retries.

A group of one client is one `Member`, however many consumers use it; it lives from the first
consumer that enters to the last that leaves. A table of the whole process sees to it that two
clients in one program do not read a topic for one group with two expressions, but where all its
brokers say in their answer to a heartbeat that they serve that (design/0009).
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.ordered import OrderedReaders
from sluicemq.client.aio.prefetch import PrefetchBuffer, RetryRouter
from sluicemq.client.aio.queue_reader import ReaderContext, RetrySender
from sluicemq.client.aio.readers import Readers
from sluicemq.client.core import requests
from sluicemq.client.core.balance import allocate
from sluicemq.client.core.consuming import (
    DEAD_LETTER,
    ConsumeOptions,
    SubscriptionRegistry,
    make_subscription,
)
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import (
    GROUP_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUCCESS,
    SYSTEM_ERROR,
    is_access_denied,
    is_access_denied_remark,
    request_error,
)
from sluicemq.client.heartbeat_thread import HeartbeatThread
from sluicemq.client.tasks import Tasks, notify, run_to_end
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    FilterSyntaxError,
    PermissionDeniedError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
    SubscriptionConflictError,
)
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import MASTER_ID, RETRY_PREFIX, MessageQueue, TopicRoute, read_queues
from sluicemq.wire.bodies import (
    BROADCASTING,
    CLUSTERING,
    CONSUME_ACTIVELY,
    CONSUME_PASSIVELY,
    ConsumerData,
    Heartbeat,
    decode_consumer_list,
)
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import HeartbeatResponse

_log = logging.getLogger("sluicemq.client")
UNBALANCED_PERIOD_S = 1.0


class Member:
    """This process' membership in one consumer group."""

    def __init__(
        self,
        cluster: Cluster,
        heartbeat_thread: HeartbeatThread,
        group: str,
        options: ConsumeOptions,
        *,
        retry: bool = True,
    ) -> None:
        self.group = group
        self.options = options
        self._cluster = cluster
        self._heartbeat_thread = heartbeat_thread
        self.has_retries = retry
        self._has_retry_topic = retry and not options.broadcast
        self.assignment_listeners: list[
            Callable[[str, list[MessageQueue], list[MessageQueue]], None]
        ] = []
        """Called with a topic, all of its queues and those of this member when these change."""
        self._rebalance_due = asyncio.Event()
        self._rebalance_lock = asyncio.Lock()
        self._tasks = Tasks()
        self.subscriptions: dict[str, Subscription] = {}
        """By topic, also that of the retry topic."""
        self.buffers: dict[str, PrefetchBuffer] = {}
        """Where messages of a topic go."""
        self._known_queues: dict[str, set[MessageQueue]] = {}
        self._excluded_topics: set[str] = set()
        """Topics whose last balance found that this client is no member."""
        send_back = RetrySender(cluster, group, options.retry.retries_max)
        context = ReaderContext(
            cluster,
            group,
            options,
            self._request_heartbeats,
            is_lite_pull=not retry,
            retry_sender=send_back if self._has_retry_topic else None,
            dead_letter_sender=send_back if options.on_undecodable == DEAD_LETTER else None,
        )
        self.readers: Readers = (
            OrderedReaders(context, heartbeat_thread.client_id, self.schedule_rebalance)
            if retry and options.ordered
            else Readers(context)
        )
        self.readers.on_recreated = self._on_recreated
        self._started = False
        self._requested_heartbeats: Future[dict[str, SluiceError | None]] | None = None

    @property
    def topics(self) -> list[str]:
        """The topics subscribed to, without the retry topic."""
        return [topic for topic in self.subscriptions if topic != self._retry_topic]

    @property
    def _retry_topic(self) -> str:
        return RETRY_PREFIX + self.group

    def _on_recreated(self, topic: str) -> None:
        """The topic was deleted and created again, so every queue of it is new to the group: those
        that this member takes from now on are read from their first message."""
        self._known_queues[topic] = set()
        self.schedule_rebalance()

    def schedule_rebalance(self) -> None:
        """The broker says that the members changed: balance now. Loop thread only."""
        self._rebalance_due.set()

    async def add_subscription(self, subscription: Subscription, buffer: PrefetchBuffer) -> None:
        """Subscribe to a topic and return when the first balance is done. If it raises, or is
        cancelled, the caller has to `remove` the topic.

        Raises RouteNotFoundError (unknown topic), GroupNotFoundError (the group is missing and is
        not created automatically), FilterSyntaxError or ConfigurationError (the broker cannot serve
        the expression), RequestError (the group is strict and has another one), ConnectionLostError
        (no broker of the topic is reachable); of a group that broadcasts ConfigurationError and
        StoreDamagedError for its offsets file. PermissionDeniedError if access control refuses the
        topic or the group.
        """
        with self._explain_access_errors(subscription.topic):
            await self._add(subscription, buffer)

    async def _add(self, subscription: Subscription, buffer: PrefetchBuffer) -> None:
        topic = subscription.topic
        route = await self._cluster.route(topic)
        await self._check_subscription(subscription, route)
        self.subscriptions[topic] = subscription
        self.buffers[topic] = buffer
        if self._has_retry_topic and self._retry_topic not in self.subscriptions:
            self.subscriptions[self._retry_topic] = Subscription(
                self._retry_topic, version=subscription.version
            )
        queues = read_queues(topic, route)
        if self.options.broadcast and queues:
            # An offsets file that is not ours says so.
            await self.readers.find_start_offset(queues[0])
        self._heartbeat_thread.update_addresses(_addresses(route))
        await self._send_heartbeats(must_reach=_addresses(route))
        await self._check_group_exists(topic, route)
        if not await self.rebalance():
            self.schedule_rebalance()  # in a second, not in twenty
        if not self._started:
            self._started = True
            self._tasks.supervise(self._rebalance_forever, f"sluicemq balance {self.group}")
            if self.options.auto_commit:
                self._tasks.supervise(self.readers.commit_forever, f"sluicemq commit {self.group}")

    async def change_subscription(self, subscription: Subscription) -> None:
        """A topic of this member is read with another expression from now on, in all its queues.

        The brokers hear of it at once: what they filtered by the old one is asked for again. Where
        members want different things it may have other queues now: it balances before it reads on.
        Raises what `add` does; then the old expression stays.
        """
        with self._explain_access_errors(subscription.topic):
            await self._change(subscription)

    async def _change(self, subscription: Subscription) -> None:
        topic = subscription.topic
        route = await self._cluster.route(topic)
        await self._check_subscription(subscription, route)
        old, self.subscriptions[topic] = self.subscriptions[topic], subscription
        with self.readers.pulls_blocked(topic):
            try:
                await self._send_heartbeats(must_reach=_addresses(route))
            except BaseException:
                self.subscriptions[topic] = old
                self.readers.change_subscription(old)  # of a queue that was taken meanwhile
                self._heartbeat_thread.set_consumer_group(self._describe())
                self._heartbeat_thread.send_heartbeats()  # some may know the new one
                raise
            self.readers.change_subscription(subscription)
            if not await self.rebalance():
                self._rebalance_due.set()

    async def remove_subscription(self, topic: str) -> None:
        """End a subscription: its queues go to other members, and the brokers hear of it. Safe to
        call for a topic that is not subscribed to."""
        await self._drop_subscription(topic)
        if self.topics:
            with contextlib.suppress(SluiceError):
                await self._send_heartbeats()

    async def _drop_subscription(self, topic: str) -> None:
        async with self._rebalance_lock:  # A balance that runs still needs the tables.
            for queue in self.readers.queues_of_topic(topic):
                await self.readers.remove(queue)
            self.subscriptions.pop(topic, None)
            self.buffers.pop(topic, None)
            self._known_queues.pop(topic, None)

    async def close(self) -> None:
        """Commit, leave the group at every broker, stop. Safe to call twice; what of it fails does
        not keep the rest from being done."""
        try:
            await self._tasks.close()
            async with self._rebalance_lock:
                await self.readers.close()
        finally:
            self.subscriptions.clear()
            await run_to_end(self._leave_group())

    async def _leave_group(self) -> None:
        try:
            await asyncio.wrap_future(self._heartbeat_thread.remove_group(consumer=self.group))
        except SluiceError as error:
            _log.debug("leaving %s: %s", self.group, error)

    # -------------------------------------------------------------------- membership

    def _describe(self) -> ConsumerData:
        return ConsumerData(
            self.group,
            CONSUME_PASSIVELY if self.has_retries else CONSUME_ACTIVELY,
            BROADCASTING if self.options.broadcast else CLUSTERING,
            self.options.consume_from,
            tuple(self.subscriptions.values()),
        )

    @contextlib.contextmanager
    def _explain_access_errors(self, topic: str) -> Iterator[None]:
        """Let an error of access control in the block say which account may not do what, and what
        the account needs."""
        try:
            yield
        except PermissionDeniedError as error:
            if not is_access_denied_remark(error.remark):
                raise
            credentials = self._cluster.credentials
            account = "no account, as it has no credentials"
            advice = "Give the client credentials (access key, secret key) of an account with"
            if credentials is not None:
                account = f"account {credentials.access_key!r}"
                advice = "Check its secret key, and give the account"
            raise PermissionDeniedError(
                error.code,
                f"{error.remark.rstrip('.')}. The consumer of topic {topic} in group {self.group} "
                f"uses {account}.",
                address=error.address,
                fix=f"{advice} topicPerms {topic}=SUB and groupPerms {self.group}=SUB in "
                "plain_acl.yml of the server; sluice acl check says which rule decides.",
            ) from error

    async def _send_heartbeats(self, must_reach: Sequence[str] = ()) -> None:
        self._heartbeat_thread.set_consumer_group(self._describe())
        outcome = await asyncio.wrap_future(self._heartbeat_thread.send_heartbeats())
        refusal = self._heartbeat_thread.find_access_error(self.group, must_reach)
        if refusal is not None:
            raise refusal
        errors = [outcome.get(address) for address in must_reach]
        first = next(iter(errors), None)
        if first is not None and all(errors):
            raise ConnectionLostError(
                f"no broker of the group {self.group!r} can be reached [{first.fact}].",
                fix="See sluice cluster list, and whether this machine reaches those addresses.",
            ) from first

    def _request_heartbeats(self) -> None:
        """A broker does not know our subscription yet."""
        if self._requested_heartbeats is None or self._requested_heartbeats.done():
            self._heartbeat_thread.set_consumer_group(self._describe())
            self._requested_heartbeats = self._heartbeat_thread.send_heartbeats()

    async def _check_subscription(self, subscription: Subscription, route: TopicRoute) -> None:
        """Asks the brokers openly: of a heartbeat that they refuse only the log would tell."""
        command = requests.check_subscription(
            self._heartbeat_thread.client_id, self.group, subscription
        )
        for address in _addresses(route, masters_only=True):
            response = await self._call_if_reachable(address, command)
            if response is None:
                continue
            if is_access_denied(response):
                raise request_error(response, address)
            if subscription.kind != SQL92:
                if response.code == ResponseCode.NO_PERMISSION and not self.options.broadcast:
                    raise request_error(response, address)
                continue
            if response.code == SUBSCRIPTION_PARSE_FAILED:
                raise FilterSyntaxError(
                    f"{address} refuses the filter {subscription.expression!r}: {response.remark}",
                    fix="Check it: sluice filter check 'EXPRESSION'.",
                )
            if response.code == SYSTEM_ERROR:
                raise ConfigurationError(
                    f"{address} does not filter by SQL92: {response.remark}",
                    fix="Set enablePropertyFilter=true in its broker.conf, or use tags.",
                )
            if response.code != SUCCESS:
                raise request_error(response, address)

    async def _check_group_exists(self, topic: str, route: TopicRoute) -> None:
        """A broker silently skips a group it does not know (spec/remoting.md §15): ask openly."""
        for data in route.brokers:
            address = data.addresses.get(MASTER_ID)
            if address is None:
                continue
            members = await self._fetch_members_from(address)
            if members is None or self._heartbeat_thread.client_id in members:
                continue
            probe = requests.pull(
                self.group,
                MessageQueue(topic, data.broker, 0),
                0,
                count_max=1,
                bytes_max=1,
                subscription=Subscription(topic),
            )
            response = await self._call_if_reachable(address, probe)
            if response is not None and (
                response.code == GROUP_NOT_EXIST or is_access_denied(response)
            ):
                raise request_error(response, address)

    async def _call_if_reachable(self, address: str, command: Command) -> Command | None:
        """None when that broker is away: the others are enough to begin with."""
        try:
            return await self._cluster.call(address, command)
        except (ConnectionLostError, RequestTimeoutError) as error:
            _log.debug("group %s: %s", self.group, error)
            return None

    async def _fetch_members_from(self, address: str) -> tuple[str, ...] | None:
        """None when that broker is away."""
        response = await self._call_if_reachable(address, requests.consumer_list(group=self.group))
        if response is None:
            return None
        return tuple(decode_consumer_list(response.body)) if response.code == SUCCESS else ()

    # ----------------------------------------------------------------------- balance

    async def _rebalance_forever(self) -> None:
        balanced = True
        while True:
            period_s = self.options.balance_period_s if balanced else UNBALANCED_PERIOD_S
            # Not wait_for: in Python 3.11 it may swallow a cancellation that meets the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._rebalance_due.wait()
            self._rebalance_due.clear()
            balanced = await self.rebalance()

    async def rebalance(self) -> bool:
        """Takes and gives up queues; False when this client is not (yet) seen as a member."""
        complete = True
        async with self._rebalance_lock:
            for topic in list(self.subscriptions):
                try:
                    complete &= await self._rebalance_topic(topic)
                except RouteNotFoundError:
                    complete &= topic == self._retry_topic
                    if topic in self._known_queues:  # deleted: if it comes back, its queues are new
                        self._known_queues[topic] = set()
                except SluiceError as error:
                    self._log_rebalance_failure(error, topic, "balance of %s in %s failed: %s")
                    complete = False
                else:
                    self._log_rebalance_recovery(topic)
        return complete

    def _log_rebalance_failure(self, error: SluiceError, topic: str, text: str) -> None:
        own = f"the balance of {topic} in {self.group}"
        queue = self._queue_of_first_broker(topic)
        self._cluster.directory.log_failure(error, queue, own, text, topic, self.group, error)

    def _log_rebalance_recovery(self, topic: str) -> None:
        queue = self._queue_of_first_broker(topic)
        if queue is not None:
            own = f"the balance of {topic} in {self.group}"
            self._cluster.directory.log_recovery(queue, own)

    def _queue_of_first_broker(self, topic: str) -> MessageQueue | None:
        """A queue of the first broker of a topic: the one that is asked first."""
        route = self._cluster.routes.routes.get(topic)
        brokers = () if route is None else route.brokers
        return next((MessageQueue(topic, data.broker, 0) for data in brokers), None)

    async def _rebalance_topic(self, topic: str) -> bool:
        subscription = self.subscriptions[topic]
        route = await self._cluster.route(topic)
        queues = read_queues(topic, route)
        members = await self._fetch_members(route)
        if self._heartbeat_thread.client_id not in members:
            await self._handle_exclusion(topic, members)
            return False
        self._excluded_topics.discard(topic)
        own = queues
        if not self.options.broadcast:
            strategy = self.options.strategy
            own = allocate(strategy, self._heartbeat_thread.client_id, queues, members, self.group)
        before = self.readers.queues_of_topic(topic)
        for queue in before - set(own):
            await self.readers.remove(queue)
        known = self._known_queues.get(topic)
        self.readers.expected_queue_counts[topic] = len(own)
        complete = True
        for queue in own:
            if queue not in self.readers.queues:
                is_new = known is not None and queue not in known
                complete &= await self._start_reader(queue, subscription, is_new=is_new)
        self._known_queues[topic] = set(queues) | (known or set())
        after = self.readers.queues_of_topic(topic)
        for listener in self.assignment_listeners if after != before else ():
            notify(listener, topic, list(queues), sorted(after))
        return complete

    async def _handle_exclusion(self, topic: str, members: tuple[str, ...]) -> None:
        """The brokers do not count this client as a member. They may not have heard of it since
        they started; when they have and others are members, it is refused, and others read its
        queues: it gives them up, or it would go on one day from where it is now."""
        has_beaten = self._requested_heartbeats is not None and self._requested_heartbeats.done()
        if topic in self._excluded_topics and has_beaten and members and not self.options.broadcast:
            for queue in self.readers.queues_of_topic(topic):
                await self.readers.remove(queue)
        self._excluded_topics.add(topic)
        self._request_heartbeats()

    async def _start_reader(
        self, queue: MessageQueue, subscription: Subscription, *, is_new: bool
    ) -> bool:
        """Begins to read a queue; False when its broker is away, or another member is not done
        with it (the next balance tries again)."""
        is_retry = queue.topic == self._retry_topic
        sink = RetryRouter(self.buffers) if is_retry else self.buffers[queue.topic]
        try:
            has_begun = await self.readers.add(queue, subscription, sink, is_new=is_new)
        except SluiceError as error:
            self._cluster.directory.log_failure(
                error, queue, f"the start of {queue} in {self.group}",
                "%s cannot read %s yet: %s", self.group, queue, error,
            )  # fmt: skip
            return False
        wanted = self.subscriptions.get(queue.topic)
        if wanted is not None:  # it may have changed while brokers were asked
            self.readers.change_subscription(wanted)
        return has_begun

    async def _fetch_members(self, route: TopicRoute) -> tuple[str, ...]:
        """Asked of the first broker that answers: every consumer beats at all of them."""
        for address in _addresses(route):
            members = await self._fetch_members_from(address)
            if members is not None:
                return members
        raise ConnectionLostError(f"no broker tells the members of {self.group!r}.")


def _addresses(route: TopicRoute, *, masters_only: bool = False) -> list[str]:
    """Broker addresses of a route, masters first."""
    masters = [data.addresses[MASTER_ID] for data in route.brokers if MASTER_ID in data.addresses]
    if masters_only:
        return masters
    return list(
        dict.fromkeys(
            masters + [address for data in route.brokers for address in data.addresses.values()]
        )
    )


def check_compatible(
    member: Member, topic: str, buffer: PrefetchBuffer, options: ConsumeOptions, *, retry: bool
) -> None:
    """Only streams share a topic: a handler or a poll beside them would starve, or starve them.
    A group consumes in order or not, and has one rule for retries.
    Raises ConfigurationError."""
    known = member.buffers.get(topic)
    is_same = known is None or known is buffer or (known.is_shareable and buffer.is_shareable)
    if not is_same or member.has_retries != retry:
        raise ConfigurationError(
            f"the group {member.group!r} is already read by another kind of consumer, or by "
            "another handler, of this client.",
            fix="Use another group, or a Sluice of its own.",
        )
    if member.options.broadcast != options.broadcast:
        raise ConfigurationError(
            f"the group {member.group!r} of this client broadcasts for one of its consumers only.",
            fix="Give all consumers of a group the same.",
        )
    known_rule, rule = (
        (one.on_undecodable, one.body_bytes_max) for one in (member.options, options)
    )
    if known_rule != rule:
        raise ConfigurationError(
            f"the group {member.group!r} is read by this client already with on_undecodable="
            f"{known_rule[0]!r} and body_bytes_max={known_rule[1]:,}; now they are {rule[0]!r} and "
            f"{rule[1]:,}.",
            fix="Give all consumers of a group the same.",
        )
    own = (member.options.ordered, member.options.retry)
    if own != (options.ordered, options.retry):
        raise ConfigurationError(
            f"the group {member.group!r} is read by this client already with ordered={own[0]} and "
            f"{own[1]}; now it is ordered={options.ordered} and {options.retry}.",
            fix="Give all consumers of a group the same.",
        )


_registry: Final = SubscriptionRegistry()
_registry_lock: Final = threading.Lock()
"""One for the process: two clients in one program must not contradict each other either."""


class Memberships:
    """The groups of one client. `on_join` is called before a consumer enters."""

    def __init__(
        self, cluster: Cluster, heartbeat_thread: HeartbeatThread, on_join: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._heartbeat_thread = heartbeat_thread
        self._on_join = on_join
        self._members: dict[str, Member] = {}
        self._user_counts: dict[tuple[str, str], int] = {}
        self._lock = asyncio.Lock()

    @property
    def directory(self) -> Directory:
        """Routes and outages of the client."""
        return self._cluster.directory

    def check_loop(self) -> None:
        """Raises ConfigurationError in another event loop or process than the client's."""
        self._cluster.affinity.check_loop()

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
        buffer: PrefetchBuffer,
        options: ConsumeOptions,
        *,
        retry: bool = True,
    ) -> Member:
        """A consumer enters a group. Raises what `Member.add` does, SubscriptionConflictError and
        ConfigurationError."""
        self._on_join()
        try:
            self._update_registry(_registry.add_user, group, subscription)
        except SubscriptionConflictError:
            if not await self._has_lanes(subscription.topic):
                raise
            self._update_registry(_registry.add_user, group, subscription, shared=True)
        key = (group, subscription.topic)
        try:
            async with self._lock:
                member = self._members.get(group)
                if member is None:
                    member = Member(
                        self._cluster, self._heartbeat_thread, group, options, retry=retry
                    )
                    self._members[group] = member
                check_compatible(member, subscription.topic, buffer, options, retry=retry)
                if key not in self._user_counts:
                    try:
                        await member.add_subscription(subscription, buffer)
                    except BaseException:
                        await run_to_end(self._end_subscription(member, subscription.topic))
                        raise
                self._user_counts[key] = self._user_counts.get(key, 0) + 1
        except BaseException:
            self._update_registry(_registry.remove_user, group, subscription.topic)
            raise
        return member

    async def _end_subscription(self, member: Member, topic: str) -> None:
        """End a subscription of a member, and with its last one the membership."""
        try:
            await member.remove_subscription(topic)
        finally:
            if not member.topics:
                del self._members[member.group]
                await run_to_end(member.close())

    def _update_registry(
        self, change: Callable[..., None], *subscription: Any, shared: bool = False
    ) -> None:
        """Notes a change in the table of this process."""
        servers, client_id = self._cluster.name_servers, self._heartbeat_thread.client_id
        more = {"shared": True} if shared else {}
        with _registry_lock:
            change(servers, *subscription, client_id, **more)

    async def _has_lanes(self, topic: str) -> bool:
        """Does every broker of a topic serve members that want different things?"""
        command = requests.heartbeat(
            Heartbeat(self._heartbeat_thread.client_id, (), ()), asks_lanes=True
        )
        for data in (await self._cluster.route(topic)).brokers:
            address = data.addresses.get(MASTER_ID)
            try:
                response = await self._cluster.call(address, command) if address else None
            except (ConnectionLostError, RequestTimeoutError):
                return False
            if response is not None and not decode_header(HeartbeatResponse, response.fields).lanes:
                return False
        return True

    async def change_subscription(
        self, group: str, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> Subscription:
        """A group reads a topic with another expression from now on; see `Member.change`.

        A caller that is cancelled gets its CancelledError when the change is complete. Raises
        SubscriptionConflictError when another client of this process reads it too and a broker does
        not serve both.
        """
        return await run_to_end(self._change(group, topic, tags=tags, where=where))

    async def _change(
        self, group: str, topic: str, *, tags: str | None, where: str | None
    ) -> Subscription:
        async with self._lock:
            member = self._members.get(group)
            known = None if member is None else member.subscriptions.get(topic)
            if member is None or known is None:
                raise ConfigurationError(
                    f"the group {group!r} does not read {topic!r} here.", fix="Subscribe first."
                )
            version = max(known.version + 1, self._cluster.clock.now_ms())
            wanted = make_subscription(topic, tags=tags, where=where, version=version)
            if (wanted.kind, wanted.expression) == (known.kind, known.expression):
                return known
            try:
                self._update_registry(_registry.change_subscription, group, wanted)
            except SubscriptionConflictError:
                if not await self._has_lanes(topic):
                    raise
                self._update_registry(_registry.change_subscription, group, wanted, shared=True)
            try:
                await member.change_subscription(wanted)
            except BaseException:
                self._update_registry(_registry.change_subscription, group, known, shared=True)
                raise
            return wanted

    async def leave(self, group: str, topic: str) -> None:
        """Take a consumer out of a group; the last one ends the membership. A caller that is
        cancelled gets its CancelledError when the group is left."""
        await run_to_end(self._leave(group, topic))

    async def _leave(self, group: str, topic: str) -> None:
        key = (group, topic)
        async with self._lock:
            users = self._user_counts.pop(key, 0) - 1
            if users > 0:
                self._user_counts[key] = users
            member = self._members.get(group)
            try:
                if users == 0 and member is not None:
                    await self._end_subscription(member, topic)
            finally:
                if users >= 0:
                    self._update_registry(_registry.remove_user, group, topic)

    async def close(self) -> None:
        """Leave what consumers that were dropped without a close have left."""
        for group, topic in list(self._user_counts):
            self._user_counts[group, topic] = 1
            await self.leave(group, topic)
