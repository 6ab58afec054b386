"""The backend of a proxy that serves a cluster behind name servers.

    client --gRPC--> proxy --one connection per client and broker--> brokers
                           --one connection for the proxy itself---> name servers, topic settings

A broker keeps group members, producers, long polls and its requests to a client by connection. Each
client of the proxy therefore has its own connections to brokers. They are opened with the first
request to a broker. Closing them has the same effect as if the client had connected to the broker
directly and had disconnected. A broker sees the proxy's address on all of them.

Routes and settings that the proxy fetches for itself are cached for `FRESHNESS_S` (`LookupCache`),
so that a call mostly finds its route in memory. Several proxies of one cluster do not communicate:
everything that a client may bring from one proxy to another is contained in the strings that it
gets (receipt handles, transaction ids).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sluicemq.acl.guard import Guard
from sluicemq.broker.lanes.rules import describe_difference, subscription_key
from sluicemq.client.admin.topics import masters
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import (
    CALL_TIMEOUT_S,
    AsyncioShell,
    Await,
    Call,
    Conversation,
)
from sluicemq.client.core.directory import Directory, route_not_found_error
from sluicemq.client.core.names import Credentials, sign_request
from sluicemq.client.core.requests import GROUP_NOT_EXIST, SUCCESS, TOPIC_NOT_EXIST, request_error
from sluicemq.client.tasks import Tasks
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config.settings import ProxyConfig, host_name
from sluicemq.errors import (
    ClosedError,
    ConnectionLostError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.files import SYSTEM_FILES
from sluicemq.model.ids import Host
from sluicemq.model.topic import GroupConfig, TopicConfig, TopicRoute
from sluicemq.net.accept import log_protected_mode
from sluicemq.net.channel import Channel, ChannelPool, Dialer
from sluicemq.net.limits import FairScheduler
from sluicemq.net.network import SOCKET_NETWORK, with_tls
from sluicemq.net.tls import Tls
from sluicemq.proxy.backend import OnRequest, OnResponse, master_addresses
from sluicemq.proxy.server import Proxy, ProxyCollector
from sluicemq.supervision import Supervisor, start_shared
from sluicemq.telemetry.metrics import serve_metrics
from sluicemq.telemetry.otlp import MetricsPusher
from sluicemq.wire.bodies import decode_consumer_connections, decode_heartbeat
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import HeartbeatResponse
from sluicemq.wire.tables import decode_group_config, decode_topic_config

log = logging.getLogger(__name__)

T = TypeVar("T")
FRESHNESS_S: Final = 5.0
"""The age in seconds up to which a cached lookup is used. RocketMQ's proxy refreshes after 20 s."""
MISSING_ROUTE_GRACE_S: Final = 60.0
"""The time in seconds for which a cached route is used although no name server has the topic.

A broker that restarts is absent for less.
"""
CACHED_NAMES_MAX: Final = 20_000
"""The number of names in one cache at which the cache is cleared."""
ACCESS_RULES_CHECK_S: Final = 0.5
"""The interval in seconds in which plain_acl.yml is checked for changes."""
GROUP_CHECK_S: Final = 30.0
"""The minimum interval in seconds between two checks of the subscriptions of one group."""


class _CachedValue(NamedTuple, Generic[T]):
    """A result with the monotonic times until which it is fresh, and at which it was fetched."""

    value: T
    fresh_until_s: float
    fetched_s: float


class LookupCache(Generic[T]):
    """A cache of lookups in the cluster, by name.

    Concurrent lookups of one name share one request. If a refresh fails, the previous value stays
    in use; without a previous value, the error is raised to all callers that wait.
    """

    def __init__(
        self, shell: AsyncioShell, fetch: Callable[[str], Conversation[T]], clock: Clock
    ) -> None:
        """Create an empty cache of the values that `fetch(name)` returns.

        `shell` runs `fetch`, and `clock` says when values are too old.
        """
        self._shell = shell
        self._fetch = fetch
        self._clock = clock
        self._cached: dict[str, _CachedValue[T]] = {}
        self._running: dict[str, asyncio.Task[T]] = {}

    def get(self, name: str) -> Conversation[T]:
        """Return the value for a name from the cache, or fetch it if it is too old.

        Concurrent calls for one name share one fetch. Raises the error of the fetch if it fails and
        there is no earlier value.
        """
        cached = self._cached.get(name)
        if cached is not None and self._clock.monotonic_s() < cached.fresh_until_s:
            return cached.value
        task = self._running.get(name)
        if task is None:
            task = self._running[name] = start_shared(self._refresh(name))
            task.add_done_callback(lambda _task: self._running.pop(name))
        step = Await(task)
        yield step
        result: T = step.value
        return result

    async def _refresh(self, name: str) -> T:
        """Fetch the value for a name, store it in the cache, and return it.

        If the fetch fails, the earlier value is returned and stored again as fresh for
        `FRESHNESS_S` seconds. But a route that no name server has had for `MISSING_ROUTE_GRACE_S`
        seconds is removed. Raises the error of the fetch if there is no value to return.

        The whole cache is cleared when it has `CACHED_NAMES_MAX` names.
        """
        cached = self._cached.get(name)
        try:
            fetched = await self._shell.run(self._fetch(name))
            fetched_s = self._clock.monotonic_s()
        except SluiceError as error:
            if cached is None or self._is_gone_for_long(cached, error):
                self._cached.pop(name, None)
                raise
            fetched = cached.value
            fetched_s = cached.fetched_s
        if cached is not None and cached.value == fetched:
            # Callers compare values by identity, to keep what they derived from them.
            fetched = cached.value

        if len(self._cached) >= CACHED_NAMES_MAX:
            self._cached.clear()
        fresh_until_s = self._clock.monotonic_s() + FRESHNESS_S
        self._cached[name] = _CachedValue(fetched, fresh_until_s, fetched_s)
        return fetched

    def _is_gone_for_long(self, cached: _CachedValue[T], error: SluiceError) -> bool:
        """Return whether `error` says that a cached route is missing, and its grace time is over.

        The grace time, `MISSING_ROUTE_GRACE_S`, begins when the cached value was fetched.
        """
        if not isinstance(error, RouteNotFoundError):
            return False
        return self._clock.monotonic_s() - cached.fetched_s > MISSING_ROUTE_GRACE_S

    async def close(self) -> None:
        """Cancel the running lookups. Their callers get CancelledError."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


class ClusterBackend(AsyncioShell):
    """A backend with the brokers of the given name servers, or only those of one cluster."""

    directory: Directory

    def __init__(
        self,
        name_servers: str | list[str] | tuple[str, ...],
        credentials: Credentials | None,
        clock: Clock,
        connect: Dialer | None = None,
        *,
        cluster: str | None = None,
    ) -> None:
        """Create a backend of a cluster, without connections.

        `credentials` are the proxy's own account, which signs the requests to brokers. `connect`
        opens a connection; None means the default. `cluster` is the name of the cluster whose
        brokers are asked for groups; None means all clusters. Raises ConfigurationError if no name
        server is given.
        """
        self.clock = clock
        self.credentials = credentials
        self.connect = connect
        self.directory = Directory(name_servers, clock)
        self.subscription_conflicts = SubscriptionConflicts()
        self._cluster = cluster
        self._tasks = Tasks()
        self._sessions: dict[ClusterClientSession, None] = {}  # in the order of opening
        nowhere = Host("0.0.0.0", 0)
        self._proxy_session = self.open_session(nowhere, nowhere, lambda _command, _answer: None)
        self._routes = LookupCache(self, self._request_route, clock)
        self._topics = LookupCache(self, self._request_topic_config, clock)
        self._groups = LookupCache(self, self._request_group_config, clock)

    def open_session(
        self, remote: Host, local: Host, on_request: OnRequest
    ) -> "ClusterClientSession":
        """Return a new session for a client, with its own connections to brokers."""
        session = ClusterClientSession(self, on_request)
        self._sessions[session] = None
        return session

    def fetch_route(self, topic: str) -> Conversation[TopicRoute]:
        """Return the route of a topic, from the cache or the name server.

        Raises RouteNotFoundError if the topic does not exist.
        """
        return self._routes.get(topic)

    def fetch_topic_config(self, name: str) -> Conversation[TopicConfig | None]:
        """Return the settings of a topic, or None if no broker has it."""
        return self._topics.get(name)

    def fetch_group_config(self, name: str) -> Conversation[GroupConfig | None]:
        """Return the settings of a consumer group, or None if no broker has it."""
        return self._groups.get(name)

    def list_warnings(self) -> list[str]:
        """Return the warnings about groups with conflicting subscriptions, sorted by group."""
        return [warning for _, warning in sorted(self.subscription_conflicts.warnings.items())]

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` without blocking other work."""
        await asyncio.sleep(seconds)

    async def send_request(self, call: Call) -> Command:
        """Send a request of the proxy itself, and return the response with any response code."""
        return await self._proxy_session.send_request(call)

    def exclusive(self, key: str) -> contextlib.nullcontext[None]:
        """Return a context manager that does nothing.

        `LookupCache` never runs two lookups of one name at the same time.
        """
        return contextlib.nullcontext()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a task. It must end at the latest when all sessions are closed.

        Its errors are logged.
        """
        self._tasks.spawn(work, "sluicemq proxy request")

    def session_closed(self, session: "ClusterClientSession") -> None:
        """Forget a session that has been closed, and its subscriptions."""
        self._sessions.pop(session, None)
        self.subscription_conflicts.remove_session(session)

    async def check_group(self, address: str, group: str) -> None:
        """Ask a broker which subscription it uses for a group, and compare it with known ones.

        The broker may have it from a member of the group that does not use this proxy. A difference
        gives a warning (`SubscriptionConflicts`). Errors are ignored.
        """
        command = requests.consumer_connections(group=group)
        with contextlib.suppress(SluiceError):
            response = await self.send_request(Call(address, command))
            if response.code == SUCCESS:
                subscriptions = decode_consumer_connections(response.body).subscriptions.values()
                key = subscription_key(group, subscriptions)
                source_name = f"a member at {address}"
                self.subscription_conflicts.record(group, address, source_name, key)

    async def close(self) -> None:
        """Close all connections, and wait until they are closed."""
        for cache in (self._routes, self._topics, self._groups):
            await cache.close()
        for session in list(self._sessions):
            session.close()
        await self._tasks.wait()

    def _request_route(self, topic: str) -> Conversation[TopicRoute]:
        """Return the route of a topic from a name server.

        Raises RouteNotFoundError if the topic does not exist.
        """
        route = yield from self.directory.fetch_route(topic)
        if route is None:
            raise route_not_found_error(
                topic, self.directory.name_servers, None, auto_create_tried=False
            )
        return route

    def _request_topic_config(self, name: str) -> Conversation[TopicConfig | None]:
        """Return the settings of a topic from the first master that has it.

        Return None if the topic does not exist.
        """
        try:
            route = yield from self.fetch_route(name)
        except RouteNotFoundError:
            return None
        command = requests.topic_config(topic=name)
        addresses = master_addresses(route).values()
        response = yield from _request_first_success(addresses, command, TOPIC_NOT_EXIST)
        return None if response is None else decode_topic_config(response.body)

    def _request_group_config(self, name: str) -> Conversation[GroupConfig | None]:
        """Return the settings of a group from the first broker that has it, or None if none has it.

        A group has no route, so every broker may have it.
        """
        brokers = yield from masters(self.directory, self._cluster)
        command = requests.group_config(group=name)
        response = yield from _request_first_success(brokers.values(), command, GROUP_NOT_EXIST)
        return None if response is None else decode_group_config(response.body)


@contextlib.asynccontextmanager
async def serve_cluster_proxy(
    config: ProxyConfig, name_servers: str, credentials: tuple[str, str] | None
) -> AsyncIterator[Proxy]:
    """Serve a cluster by a standalone proxy while the context is open; yield the proxy.

    `name_servers` are the addresses of the cluster. `credentials` are (access key, secret key) of
    the proxy's account at the brokers, or None. If access control is enabled in `config`, the proxy
    checks each client by its own rules. Otherwise every client may do what the proxy's account may
    do. TLS towards the cluster is set by environment variables. Raises ConfigurationError for
    invalid settings.
    """
    guard = Guard.from_config(SYSTEM_FILES, SYSTEM_CLOCK, config)
    backend = ClusterBackend(
        name_servers,
        Credentials.from_value(credentials),
        SYSTEM_CLOCK,
        with_tls(SOCKET_NETWORK, Tls.resolve(None)).dial,
        cluster=config.cluster,
    )
    shares = FairScheduler(SYSTEM_CLOCK.monotonic_s, asyncio.get_running_loop().call_soon)
    proxy = Proxy(backend, guard, shares, config, limits=config)
    # Leaving the context closes everything in the reverse order.
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        if guard is not None:
            guard.load()
            stack.callback(_watch_access_rules(guard).cancel)
        await proxy.start(config.listen_address, config.listen_port)
        stack.push_async_callback(proxy.close)
        log_protected_mode(config)
        await _publish_metrics(proxy, config, stack)
        yield proxy


def _watch_access_rules(guard: Guard) -> asyncio.Task[None]:
    """Start and return a task that applies changes of plain_acl.yml, until it is cancelled."""
    jobs = Supervisor(SYSTEM_CLOCK, log)
    watch = jobs.repeat(
        "access rules", lambda: ACCESS_RULES_CHECK_S, partial(_reload_access_rules, guard)
    )
    return asyncio.get_running_loop().create_task(watch)


async def _reload_access_rules(guard: Guard) -> None:
    """Apply the current content of plain_acl.yml between two calls, if all of it is valid."""
    guard.apply_checked_files(await asyncio.to_thread(guard.check_files))


async def _publish_metrics(
    proxy: Proxy, config: ProxyConfig, stack: contextlib.AsyncExitStack
) -> None:
    """Start to push the proxy's metrics and to serve them, each if `config` enables it.

    `proxy.metrics_port` is set to the port on which they are served. Both end when `stack` is
    closed.
    """
    if config.is_pushed:
        collect = ProxyCollector(proxy).collect
        pusher = await asyncio.to_thread(MetricsPusher, collect, config, "proxy", host_name())
        pusher.start()
        stack.push_async_callback(asyncio.to_thread, pusher.close)
    if config.metrics_enable:
        served = await asyncio.to_thread(serve_metrics, ProxyCollector(proxy), config)
        if served is not None:
            port, close_server = served
            proxy.metrics_port = port
            stack.callback(close_server)


def _request_first_success(
    addresses: Iterable[str], command: Command, absent: int
) -> Conversation[Command | None]:
    """Send a request to one broker after another, and return the first successful response.

    `absent` is the response code of a broker that does not have the requested topic or group.
    Return None if all brokers respond with it. A broker that is not reachable is skipped. If no
    later broker succeeds, the error of the last such broker is raised. Any other response code
    raises RequestError, and no further broker is asked.
    """
    failure: SluiceError | None = None
    for address in addresses:
        try:
            response = yield Call(address, command)
        except (ConnectionLostError, RequestTimeoutError) as error:
            failure = error
            continue
        if response.code == SUCCESS:
            return response
        if response.code != absent:
            raise request_error(response, address)
    if failure is not None:
        raise failure
    return None


class ClusterClientSession:
    """A client of the proxy, with its own connections to the brokers that it uses."""

    def __init__(self, backend: ClusterBackend, on_request: OnRequest) -> None:
        """Create a session without connections. `on_request` handles requests of brokers."""
        self._backend = backend
        self._on_request = on_request
        self._pool = ChannelPool(
            on_request=self._handle_request, clock=backend.clock, connect=backend.connect
        )
        self._is_closed = False

    def send(self, call: Call, on_response: OnResponse) -> None:
        """Send a request in a new task, which calls `on_response` with the response or an error.

        If the session is closed, `on_response` is called at once with ConnectionLostError.
        """
        if self._is_closed:
            on_response(ConnectionLostError("The client has disconnected."))
        else:
            self._backend.spawn(self._send_and_respond(call, on_response))

    def close(self) -> None:
        """Close the connections to brokers in a new task, and remove the session from the backend.

        This is called when the client has disconnected. A second call does nothing.
        """
        if not self._is_closed:
            self._is_closed = True
            self._backend.session_closed(self)
            self._backend.spawn(self._pool.close())

    async def send_request(self, call: Call) -> Command:
        """Sign and send a request, and return the response, whatever its response code.

        A one-way request has no response, so the request itself is returned. `call.is_written`
        becomes True when the connection is open. Raises ConnectionLostError, RequestTimeoutError,
        or ClosedError if the session is closed.
        """
        channel = await self._pool.get(call.address)
        command = call.command
        sign_request(command, self._backend.credentials)
        call.is_written = True
        if command.flag & FLAG_ONEWAY:
            channel.send_oneway(command)
            return command
        timeout_s = CALL_TIMEOUT_S if call.timeout_s is None else call.timeout_s
        return await channel.call(command, timeout_s)

    async def _send_and_respond(self, call: Call, on_response: OnResponse) -> None:
        """Send a request, and call `on_response` once with the response or the error.

        If the session is closed meanwhile, the error is ConnectionLostError. A heartbeat is sent
        with the field sluiceLanes = "true". Its subscriptions are then compared with those of other
        members of the group, unless the session is closed.
        """
        is_heartbeat = call.command.code == RequestCode.HEART_BEAT
        if is_heartbeat:
            # A SluiceMQ broker then says in its response whether it checks subscriptions itself.
            call.command.fields = {**(call.command.fields or {}), "sluiceLanes": "true"}
        try:
            response: Command | SluiceError = await self.send_request(call)
        except ClosedError:
            response = ConnectionLostError("The client has disconnected.")
        except SluiceError as error:
            response = error
        if is_heartbeat and isinstance(response, Command) and not self._is_closed:
            self._check_subscriptions(call, response)
        on_response(response)

    def _check_subscriptions(self, call: Call, response: Command) -> None:
        """Record the subscriptions of a heartbeat, so that conflicts within a group are found.

        `call` is the heartbeat, and `response` the broker's response. Do nothing if the response is
        an error, or if it says that the broker finds such conflicts itself (`lanes`).

        A task also asks the broker for the subscription of each group of the client, at most once
        in `GROUP_CHECK_S` seconds for a group.
        """
        if response.code == SUCCESS and not decode_header(HeartbeatResponse, response.fields).lanes:
            conflicts = self._backend.subscription_conflicts
            heartbeat = decode_heartbeat(call.command.body)
            now_s = self._backend.clock.monotonic_s()
            for consumer in heartbeat.consumers:
                key = subscription_key(consumer.group, consumer.subscriptions)
                conflicts.record(consumer.group, self, heartbeat.client_id, key)
                if conflicts.start_check_if_due(consumer.group, now_s):
                    self._backend.spawn(self._backend.check_group(call.address, consumer.group))

    def _handle_request(self, command: Command, channel: Channel) -> None:
        """Pass a request of a broker to `on_request`, with the function that sends the response."""
        self._on_request(command, partial(channel.send_response, command.opaque))


class SubscriptionConflicts:
    """The groups whose members have different subscriptions, at brokers that do not check this.

    A RocketMQ broker applies the last subscription that it received to the whole group. Messages
    that match only another member's subscription are skipped, without any error. Compared are the
    members that use this proxy, and the subscription that each broker applies, which may come from
    a member elsewhere.
    """

    def __init__(self) -> None:
        """Create an object without groups and warnings."""
        self.warnings: dict[str, str] = {}
        """The warning about each group that has a conflict, by group."""
        # For each group, (name, subscription key) of each member and each broker; see `record`.
        self._members: dict[str, dict[ClusterClientSession | str, tuple[str, str]]] = {}
        # The monotonic time of the last check of each group.
        self._checked_s: dict[str, float] = {}

    def record(self, group: str, source: "ClusterClientSession | str", name: str, key: str) -> None:
        """Record a subscription of a group, and update the warning of the group.

        `source` is where the subscription comes from: the session of a member, or the address of a
        broker. `name` names the source in warnings, and `key` is a text that describes the
        subscription. A subscription from a broker is ignored if no member of the group uses this
        proxy.
        """
        members = self._members.setdefault(group, {})
        is_broker = isinstance(source, str)
        if members.get(source) != (name, key) and (members or not is_broker):
            members[source] = (name, key)
            self._update_warning(group)

    def start_check_if_due(self, group: str, now_s: float) -> bool:
        """Return whether a broker should now be asked for the group's subscription.

        If the result is True, `now_s`, the monotonic time, is stored as the time of the check. The
        next check is due `GROUP_CHECK_S` seconds later.
        """
        is_due = now_s - self._checked_s.get(group, -GROUP_CHECK_S) >= GROUP_CHECK_S
        if is_due:
            self._checked_s[group] = now_s
        return is_due

    def remove_session(self, session: ClusterClientSession) -> None:
        """Remove the subscriptions of a session, and update the warnings of its groups."""
        groups = [group for group, members in self._members.items() if session in members]
        for group in groups:
            del self._members[group][session]
            self._update_warning(group)

    def _update_warning(self, group: str) -> None:
        """Set, replace or remove the warning of a group. A new text is also logged.

        The warning names the first source and another one with a different subscription. If no
        member of the group uses this proxy, everything about the group is removed.
        """
        members = self._members[group]
        has_only_brokers = all(isinstance(source, str) for source in members)
        if has_only_brokers:
            del self._members[group]
            self._checked_s.pop(group, None)
            self.warnings.pop(group, None)
            return

        warning = _describe_conflict(group, list(members.values()))
        if warning is None:
            self.warnings.pop(group, None)
        elif self.warnings.get(group) != warning:
            self.warnings[group] = warning
            log.warning("%s", warning)


def _describe_conflict(group: str, subscriptions: list[tuple[str, str]]) -> str | None:
    """Return the warning that two sources of a group have different subscriptions, or None.

    `subscriptions` has (name of the source, text of its subscription) for each source of the group.
    The warning names the first source and the first one that differs from it.
    """
    first_name, first_key = subscriptions[0]
    for name, key in subscriptions:
        if key != first_key:
            return (
                f"{first_name} and {name} of the group {group} have different subscriptions: "
                f"{describe_difference(first_key, key)}. Their broker does not check this, so "
                "some messages are not delivered. Give one of them another group, or the same "
                "subscription."
            )
    return None
