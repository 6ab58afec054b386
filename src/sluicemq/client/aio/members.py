"""The membership of this client in a consumer group: heartbeats, rebalances, subscriptions.

A `Member` sends its subscriptions to every broker of its topics, in the heartbeats of the heartbeat
thread. It distributes the queues of each topic over the members of the group by the allocation
strategy, and reads its own share. It rebalances when a broker reports changed members
(NOTIFY_CONSUMER_IDS_CHANGED, 40), every 20 seconds, and every second while a broker does not list
this client as a member.

A group with retries also subscribes to its retry topic, %RETRY%group, as the Java client does. Its
messages go to the buffers of the topics that they were first sent to. An ordered group locks each
queue before it reads it (`ordered`). The members of a broadcasting group do not share queues: each
reads all of them, and has no retries.

A client has one `Member` for a group, however many of its consumers belong to the group
(`memberships`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.ordered import OrderedReaders
from sluicemq.client.aio.prefetch import PrefetchBuffer, RetryRouter
from sluicemq.client.aio.queue_reader import MessageBuffer, ReaderContext, RetrySender
from sluicemq.client.aio.readers import Readers
from sluicemq.client.core import requests
from sluicemq.client.core.balance import allocate
from sluicemq.client.core.consuming import (
    DEAD_LETTER,
    ConsumeOptions,
)
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
)
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import MASTER_ID, RETRY_PREFIX, MessageQueue, TopicRoute, readable_queues
from sluicemq.wire.bodies import (
    BROADCASTING,
    CLUSTERING,
    CONSUME_ACTIVELY,
    CONSUME_PASSIVELY,
    ConsumerData,
    decode_consumer_list,
)
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
UNBALANCED_PERIOD_S = 1.0
"""The interval in seconds between rebalances while the last one was incomplete."""


class Member:
    """The membership of this client in one consumer group."""

    def __init__(
        self,
        cluster: Cluster,
        heartbeat_thread: HeartbeatThread,
        group: str,
        options: ConsumeOptions,
        *,
        has_retries: bool = True,
    ) -> None:
        """Create a member of a group; it joins the group with its first subscription.

        `cluster` sends its requests, and `heartbeat_thread` keeps it registered at the brokers.
        `options` apply to all consumers of the group in this client. `has_retries` is False for a
        consumer that is polled: it has no retry topic, and each of its pulls contains the filter.
        """
        self.group = group
        self.options = options
        self._cluster = cluster
        self._heartbeat_thread = heartbeat_thread
        self.has_retries = has_retries
        self._has_retry_topic = has_retries and not options.broadcast
        self.assignment_listeners: list[
            Callable[[str, list[MessageQueue], list[MessageQueue]], None]
        ] = []
        """Called with (topic, all queues, queues of this member) after a rebalance.

        Only changes of the queues of this member are reported.
        """
        self._rebalance_due = asyncio.Event()
        self._rebalance_lock = asyncio.Lock()
        self._tasks = Tasks()
        self.subscriptions: dict[str, Subscription] = {}
        """Maps a topic, or the retry topic, to its subscription."""
        self.buffers: dict[str, PrefetchBuffer] = {}
        """Maps a topic to the buffer that receives its messages."""
        self._known_queues: dict[str, set[MessageQueue]] = {}
        """Maps a topic to the queues that were seen in its routes.

        A queue that is not among them is new.
        """
        self._excluded_topics: set[str] = set()
        """The topics for which the last rebalance did not find this client among the members."""
        self.readers: Readers = self._make_readers()
        self.readers.on_recreated = self._on_recreated
        self._started = False
        self._requested_heartbeats: Future[dict[str, SluiceError | None]] | None = None
        """The heartbeats that `_request_heartbeats` has requested last."""

    def _make_readers(self) -> Readers:
        """Return the object that will read the group's queues; it has no queue yet.

        It is an OrderedReaders, which locks queues at their brokers, if the group consumes in
        order.
        """
        options = self.options
        retry_sender = RetrySender(self._cluster, self.group, options.retry.retries_max)
        context = ReaderContext(
            self._cluster,
            self.group,
            options,
            self._request_heartbeats,
            is_lite_pull=not self.has_retries,
            retry_sender=retry_sender if self._has_retry_topic else None,
            dead_letter_sender=retry_sender if options.on_undecodable == DEAD_LETTER else None,
        )
        if self.has_retries and options.ordered:
            client_id = self._heartbeat_thread.client_id
            return OrderedReaders(context, client_id, self.schedule_rebalance)
        return Readers(context)

    @property
    def topics(self) -> list[str]:
        """The topics that are subscribed to, without the retry topic."""
        return [topic for topic in self.subscriptions if topic != self._retry_topic]

    @property
    def _retry_topic(self) -> str:
        """The name of the group's retry topic."""
        return RETRY_PREFIX + self.group

    def _on_recreated(self, topic: str) -> None:
        """Treat all queues of a topic as new, because the topic was deleted and created again.

        This member reads queues that it receives from now on from their first message.
        """
        self._known_queues[topic] = set()
        self.schedule_rebalance()

    def schedule_rebalance(self) -> None:
        """Rebalance as soon as possible. Call it on the event loop of the client."""
        self._rebalance_due.set()

    async def add_subscription(self, subscription: Subscription, buffer: PrefetchBuffer) -> None:
        """Subscribe to a topic, and return after the first rebalance.

        `buffer` receives its messages. If this raises or is cancelled, the caller must call
        `remove_subscription`. It raises:

        - RouteNotFoundError if the topic does not exist, NameServerUnreachableError.
        - GroupNotFoundError if the group does not exist and is not created automatically.
        - FilterSyntaxError or ConfigurationError if a broker cannot evaluate the filter.
        - PermissionDeniedError if access control refuses the topic or the group, or if the group is
          strict and its contract has another filter.
        - ConnectionLostError if no broker of the topic can be reached.
        - ConfigurationError and StoreDamagedError for the offsets file of a broadcasting group.
        """
        with self._explain_access_errors(subscription.topic):
            await self._add_subscription(subscription, buffer)

    async def _add_subscription(self, subscription: Subscription, buffer: PrefetchBuffer) -> None:
        """Subscribe to a topic whose messages go to `buffer`, and rebalance.

        The brokers are asked first whether they accept the subscription. When this returns, the
        member has its share of the queues, unless brokers were unreachable. The first subscription
        also starts the periodic rebalances and commits.
        """
        topic = subscription.topic
        route = await self._cluster.route(topic)
        await self._check_subscription(subscription, route)
        self.subscriptions[topic] = subscription
        self.buffers[topic] = buffer
        if self._has_retry_topic and self._retry_topic not in self.subscriptions:
            self.subscriptions[self._retry_topic] = Subscription(
                self._retry_topic, version=subscription.version
            )
        queues = readable_queues(topic, route)
        if self.options.broadcast and queues:
            # This raises an error if another consumer uses the offsets file.
            await self.readers.find_start_offset(queues[0])
        self._heartbeat_thread.update_addresses(_list_broker_addresses(route))
        await self._send_heartbeats(must_reach=_list_broker_addresses(route))
        await self._check_group_exists(topic, route)
        if not await self.rebalance():
            self.schedule_rebalance()  # a rebalance that was incomplete is repeated soon
        if not self._started:
            self._started = True
            self._tasks.supervise(self._rebalance_forever, f"sluicemq balance {self.group}")
            if self.options.auto_commit:
                self._tasks.supervise(self.readers.commit_forever, f"sluicemq commit {self.group}")

    async def change_subscription(self, subscription: Subscription) -> None:
        """Read a topic with another filter from now on, in all its queues.

        Send the new filter to the brokers at once, and pull messages again that were filtered by
        the old one. If members with different filters have lanes, this member may have other queues
        afterwards, so it rebalances before it reads on. Raises what `add_subscription` raises; then
        the old filter stays.
        """
        with self._explain_access_errors(subscription.topic):
            await self._change_subscription(subscription)

    async def _change_subscription(self, subscription: Subscription) -> None:
        """Change the filter of a topic at the brokers and in the readers.

        The topic is not read while the brokers learn the new filter. If that fails, the old filter
        is restored here and at the brokers, and the error is raised.
        """
        topic = subscription.topic
        route = await self._cluster.route(topic)
        await self._check_subscription(subscription, route)
        old_subscription = self.subscriptions[topic]
        self.subscriptions[topic] = subscription
        with self.readers.pulls_blocked(topic):
            try:
                await self._send_heartbeats(must_reach=_list_broker_addresses(route))
            except BaseException:
                self.subscriptions[topic] = old_subscription
                # A rebalance may have added queues with the new subscription meanwhile.
                self.readers.change_subscription(old_subscription)
                self._heartbeat_thread.set_consumer_group(self._describe())
                # Some brokers may have received the new subscription.
                self._heartbeat_thread.send_heartbeats()
                raise
            self.readers.change_subscription(subscription)
            if not await self.rebalance():
                self._rebalance_due.set()

    async def remove_subscription(self, topic: str) -> None:
        """Unsubscribe from a topic, so that other members of the group read its queues.

        Does nothing if the member is not subscribed to the topic.
        """
        await self._drop_subscription(topic)
        if self.topics:
            with contextlib.suppress(SluiceError):
                await self._send_heartbeats()

    async def _drop_subscription(self, topic: str) -> None:
        """Stop reading the queues of a topic, and forget its subscription, buffer and queues."""
        async with self._rebalance_lock:  # A running rebalance still needs the tables.
            for queue in self.readers.queues_of_topic(topic):
                await self.readers.remove(queue)
            self.subscriptions.pop(topic, None)
            self.buffers.pop(topic, None)
            self._known_queues.pop(topic, None)

    async def close(self) -> None:
        """Commit the offsets, leave the group at every broker and stop. A second call is harmless.

        All steps are done even if one of them fails.
        """
        try:
            await self._tasks.close()
            async with self._rebalance_lock:
                await self.readers.close()
        finally:
            self.subscriptions.clear()
            await run_to_end(self._leave_group())

    async def _leave_group(self) -> None:
        """Unregister the group at every broker, and wait for that.

        Errors are only logged, at level DEBUG.
        """
        try:
            await asyncio.wrap_future(self._heartbeat_thread.remove_group(consumer=self.group))
        except SluiceError as error:
            _log.debug("leaving %s: %s", self.group, error)

    # -------------------------------------------------------------------- membership

    def _describe(self) -> ConsumerData:
        """Return the group with its subscriptions, in the form that heartbeats contain."""
        return ConsumerData(
            self.group,
            CONSUME_PASSIVELY if self.has_retries else CONSUME_ACTIVELY,
            BROADCASTING if self.options.broadcast else CLUSTERING,
            self.options.consume_from,
            tuple(self.subscriptions.values()),
        )

    @contextlib.contextmanager
    def _explain_access_errors(self, topic: str) -> Iterator[None]:
        """Return a context manager that adds advice to a PermissionDeniedError of access control.

        The new error names the account of the client and the permissions that the consumer of
        `topic` needs. All other errors pass unchanged.
        """
        try:
            yield
        except PermissionDeniedError as error:
            if not is_access_denied_remark(error.remark):
                raise
            credentials = self._cluster.credentials
            account = "no account, because the client has no credentials"
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
                "plain_acl.yml of the server; sluice acl check shows which rule decides.",
            ) from error

    async def _send_heartbeats(self, must_reach: Sequence[str] = ()) -> None:
        """Send heartbeats with the current subscriptions to all brokers, and wait for the results.

        `must_reach` are addresses of brokers. Raises PermissionDeniedError if one of them refuses
        the group, and ConnectionLostError if all of them fail. Failures at other brokers are
        ignored.
        """
        self._heartbeat_thread.set_consumer_group(self._describe())
        outcome_by_address = await asyncio.wrap_future(self._heartbeat_thread.send_heartbeats())
        refusal = self._heartbeat_thread.find_access_error(self.group, must_reach)
        if refusal is not None:
            raise refusal

        errors = [outcome_by_address.get(address) for address in must_reach]
        first_error = errors[0] if errors else None
        if first_error is not None and all(errors):
            raise ConnectionLostError(
                f"no broker of the group {self.group!r} can be reached [{first_error.fact}].",
                fix="Check sluice cluster list, and that this machine can reach the addresses.",
            ) from first_error

    def _request_heartbeats(self) -> None:
        """Start to send heartbeats with the current subscriptions, and return at once.

        Does nothing while the heartbeats of the last call are still being sent.
        """
        if self._requested_heartbeats is None or self._requested_heartbeats.done():
            self._heartbeat_thread.set_consumer_group(self._describe())
            self._requested_heartbeats = self._heartbeat_thread.send_heartbeats()

    async def _check_subscription(self, subscription: Subscription, route: TopicRoute) -> None:
        """Raise an error if a master of the route does not accept the subscription.

        The error is a PermissionDeniedError, FilterSyntaxError, ConfigurationError or RequestError.
        Masters that do not respond are skipped. A broker also checks the subscription in a
        heartbeat, but its refusal would be visible only in the log.
        """
        command = requests.check_subscription(
            self._heartbeat_thread.client_id, self.group, subscription
        )
        for address in _list_broker_addresses(route, masters_only=True):
            response = await self._call_if_reachable(address, command)
            if response is None:
                continue
            if is_access_denied(response):
                raise request_error(response, address)
            if subscription.kind == SQL92:
                if response.code != SUCCESS:
                    raise _make_filter_refusal(subscription, response, address)
            elif response.code == ResponseCode.NO_PERMISSION and not self.options.broadcast:
                raise request_error(response, address)

    async def _check_group_exists(self, topic: str, route: TopicRoute) -> None:
        """Raise GroupNotFoundError if a master does not know the group.

        A broker silently ignores a heartbeat of an unknown group (spec/remoting.md §15), and then
        does not list this client as a member. Such a broker is sent one pull, which fails for an
        unknown group. Raises PermissionDeniedError if access control refuses the pull. Masters that
        do not respond are skipped.
        """
        for broker_data in route.brokers:
            address = broker_data.addresses.get(MASTER_ID)
            if address is None:
                continue
            members = await self._fetch_members_from(address)
            if members is None or self._heartbeat_thread.client_id in members:
                continue
            # Queue 0 may not exist at this broker: only the response code matters.
            probe = requests.pull(
                self.group,
                MessageQueue(topic, broker_data.broker, 0),
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
        """Send a request to a broker, and return the response, whatever its code.

        Returns None if the broker cannot be reached or does not respond, which is logged at level
        DEBUG.
        """
        try:
            return await self._cluster.call(address, command)
        except (ConnectionLostError, RequestTimeoutError) as error:
            _log.debug("group %s: %s", self.group, error)
            return None

    async def _fetch_members_from(self, address: str) -> tuple[str, ...] | None:
        """Return the client ids of the group's members, as the broker at `address` knows them.

        Returns None if the broker does not respond, and () if it does not know the group.
        """
        response = await self._call_if_reachable(address, requests.consumer_list(group=self.group))
        if response is None:
            return None
        if response.code != SUCCESS:
            return ()
        return tuple(decode_consumer_list(response.body))

    # --------------------------------------------------------------------- rebalance

    async def _rebalance_forever(self) -> None:
        """Rebalance in a loop until the task is cancelled.

        This happens every `balance_period_s` seconds, earlier after an incomplete rebalance, and at
        once when `_rebalance_due` is set.
        """
        is_complete = True
        while True:
            period_s = self.options.balance_period_s if is_complete else UNBALANCED_PERIOD_S
            # Not asyncio.wait_for: in Python 3.11 it can lose a cancellation that comes together
            # with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._rebalance_due.wait()
            self._rebalance_due.clear()
            is_complete = await self.rebalance()

    async def rebalance(self) -> bool:
        """Divide the queues of all topics among the members again, and start or stop reading them.

        Returns False if another rebalance is needed soon: a request failed, a queue could not be
        started, or the brokers do not list this client as a member yet. A missing retry topic does
        not count. Errors are logged.
        """
        is_complete = True
        async with self._rebalance_lock:
            for topic in list(self.subscriptions):
                try:
                    is_complete &= await self._rebalance_topic(topic)
                except RouteNotFoundError:
                    is_complete &= topic == self._retry_topic
                    if topic in self._known_queues:
                        # The topic was deleted: its next queues are new.
                        self._known_queues[topic] = set()
                except SluiceError as error:
                    self._log_rebalance_failure(error, topic)
                    is_complete = False
                else:
                    self._log_rebalance_recovery(topic)
        return is_complete

    def _log_rebalance_failure(self, error: SluiceError, topic: str) -> None:
        """Log that the rebalance of `topic` failed with `error`, once for each outage."""
        self._cluster.directory.log_failure(
            error,
            self._get_queue_of_first_broker(topic),
            self._rebalance_activity(topic),
            "the rebalance of topic %s in group %s failed: %s",
            topic,
            self.group,
            error,
        )

    def _log_rebalance_recovery(self, topic: str) -> None:
        """Log that the rebalance of a topic works again, if it had failed."""
        queue = self._get_queue_of_first_broker(topic)
        if queue is not None:
            self._cluster.directory.log_recovery(queue, self._rebalance_activity(topic))

    def _rebalance_activity(self, topic: str) -> str:
        """Return the name of the rebalance of a topic, by which its outages are logged."""
        return f"the rebalance of {topic} in {self.group}"

    def _get_queue_of_first_broker(self, topic: str) -> MessageQueue | None:
        """Return queue 0 of the first broker in the topic's route, None if no route is known.

        It tells the log which broker failed: the members of the group are requested from this
        broker first.
        """
        route = self._cluster.routes.routes.get(topic)
        if route is None or not route.brokers:
            return None
        return MessageQueue(topic, route.brokers[0].broker, 0)

    async def _rebalance_topic(self, topic: str) -> bool:
        """Read those queues of one topic that belong to this member, and stop reading others.

        The members of the group are fetched, and the allocation strategy divides the queues among
        them. In a broadcasting group, each member reads all queues. If the queues of this member
        have changed, the `assignment_listeners` are called.

        Returns False if the brokers do not list this client as a member, or if a queue could not be
        started yet, for example because another member still has its lock. Raises
        RouteNotFoundError if the topic does not exist, and SluiceError if a request fails.
        """
        subscription = self.subscriptions[topic]
        route = await self._cluster.route(topic)
        queues = readable_queues(topic, route)
        members = await self._fetch_members(route)
        if self._heartbeat_thread.client_id not in members:
            await self._handle_exclusion(topic, members)
            return False
        self._excluded_topics.discard(topic)

        assigned_queues = self._allocate(queues, members)
        queues_before = self.readers.queues_of_topic(topic)
        for queue in queues_before - set(assigned_queues):
            await self.readers.remove(queue)

        self.readers.expected_queue_counts[topic] = len(assigned_queues)
        is_complete = await self._start_missing_readers(assigned_queues, subscription)
        self._known_queues[topic] = self._known_queues.get(topic, set()) | set(queues)

        queues_after = self.readers.queues_of_topic(topic)
        if queues_after != queues_before:
            for listener in self.assignment_listeners:
                notify(listener, topic, list(queues), sorted(queues_after))
        return is_complete

    def _allocate(self, queues: list[MessageQueue], members: tuple[str, ...]) -> list[MessageQueue]:
        """Return the queues of a topic that this member has to read.

        These are all queues in a broadcasting group, else those that the allocation strategy gives
        it.
        """
        if self.options.broadcast:
            return queues
        client_id = self._heartbeat_thread.client_id
        return allocate(self.options.strategy, client_id, queues, members, self.group)

    async def _start_missing_readers(
        self, assigned_queues: list[MessageQueue], subscription: Subscription
    ) -> bool:
        """Start to read the queues in `assigned_queues` that are not read yet.

        Returns False if one of them could not be started.
        """
        known_queues = self._known_queues.get(subscription.topic)
        is_complete = True
        for queue in assigned_queues:
            if queue not in self.readers.queues:
                # In the first rebalance no queue is new: the start option of the group applies.
                is_new = known_queues is not None and queue not in known_queues
                is_complete &= await self._start_reader(queue, subscription, is_new=is_new)
        return is_complete

    async def _handle_exclusion(self, topic: str, members: tuple[str, ...]) -> None:
        """React to a list of the group's members that does not contain this client.

        The broker may have restarted and forgotten the client, so heartbeats are sent. If the
        client is still missing in the next rebalance, the broker refuses it, and other members read
        its queues. It then stops reading them: otherwise it would go on at old offsets when the
        broker accepts it again.
        """
        heartbeats = self._requested_heartbeats
        has_sent_heartbeats = heartbeats is not None and heartbeats.done()
        is_refused = topic in self._excluded_topics and has_sent_heartbeats
        others_read_queues = bool(members) and not self.options.broadcast
        if is_refused and others_read_queues:
            for queue in self.readers.queues_of_topic(topic):
                await self.readers.remove(queue)
        self._excluded_topics.add(topic)
        self._request_heartbeats()

    async def _start_reader(
        self, queue: MessageQueue, subscription: Subscription, *, is_new: bool
    ) -> bool:
        """Start to read a queue, and return whether that was possible.

        If the broker is unreachable or another member still has the lock of the queue, the result
        is False and the next rebalance tries again. `is_new` says that the queue has appeared since
        the first rebalance; such a queue is read from its beginning.
        """
        buffer: MessageBuffer
        if queue.topic == self._retry_topic:
            # The messages of the retry topic go to the buffers of their first topics.
            buffer = RetryRouter(self.buffers)
        else:
            buffer = self.buffers[queue.topic]
        try:
            has_started = await self.readers.add(queue, subscription, buffer, is_new=is_new)
        except SluiceError as error:
            self._cluster.directory.log_failure(
                error,
                queue,
                f"the start of {queue} in {self.group}",
                "group %s cannot read %s yet: %s",
                self.group,
                queue,
                error,
            )
            return False
        # The subscription may have changed while the start offset was requested.
        current_subscription = self.subscriptions.get(queue.topic)
        if current_subscription is not None:
            self.readers.change_subscription(current_subscription)
        return has_started

    async def _fetch_members(self, route: TopicRoute) -> tuple[str, ...]:
        """Return the client ids of the group's members, from the first broker that responds.

        One broker is enough, because every consumer sends heartbeats to all of them. Raises
        ConnectionLostError if none responds.
        """
        for address in _list_broker_addresses(route):
            members = await self._fetch_members_from(address)
            if members is not None:
                return members
        raise ConnectionLostError(
            f"no broker returned the members of group {self.group!r}.",
            fix="Check sluice cluster list, and that this machine can reach the addresses.",
        )


def _make_filter_refusal(
    subscription: Subscription, response: Command, address: str
) -> SluiceError:
    """Return the error for a broker's response that refuses an SQL92 filter.

    `address` is the broker. The error is a FilterSyntaxError if the filter is invalid, a
    ConfigurationError if the broker does not support SQL92 filters.
    """
    if response.code == SUBSCRIPTION_PARSE_FAILED:
        return FilterSyntaxError(
            f"{address} refused the filter {subscription.expression!r}: {response.remark}",
            fix="Check the filter with: sluice filter check 'EXPRESSION'.",
        )
    if response.code == SYSTEM_ERROR:
        return ConfigurationError(
            f"{address} does not support SQL92 filters: {response.remark}",
            fix="Set enablePropertyFilter=true in its broker.conf, or use tags.",
        )
    return request_error(response, address)


def _list_broker_addresses(route: TopicRoute, *, masters_only: bool = False) -> list[str]:
    """Return the addresses of all brokers in a route, masters first, each once.

    With `masters_only`, return only the addresses of masters.
    """
    master_addresses: list[str] = []
    all_addresses: list[str] = []
    for broker_data in route.brokers:
        if MASTER_ID in broker_data.addresses:
            master_addresses.append(broker_data.addresses[MASTER_ID])
        all_addresses.extend(broker_data.addresses.values())

    if masters_only:
        return master_addresses
    without_repetitions = dict.fromkeys(master_addresses + all_addresses)
    return list(without_repetitions)
