"""A cluster behind its name servers as the proxy's backend.

    client --gRPC--> proxy --a connection a client and broker--> brokers
                           --one connection for the proxy------> name servers, settings of topics

What a broker keeps by connection (members of groups, producers, long polls, what it asks of a
client) is kept for each client of the proxy apart: so each has connections of its own, opened when
the first request goes there, and closing them ends all of it, as if the client itself had gone. A
broker sees the proxy's address on all of them.

What the proxy asks for itself is kept for some seconds (`Answers`), so that a call mostly finds
its route. Several proxies before a cluster know nothing of each other: what a client has to bring
from one to the other stands in the texts that it is given (receipt handles, transaction ids).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sluicemq.acl.guard import Guard
from sluicemq.broker.lanes.rules import difference, subscription_key
from sluicemq.broker.metrics import serve_metrics
from sluicemq.broker.otlp import MetricsPusher
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
from sluicemq.proxy.backend import Answered, OnRequest, masters_of
from sluicemq.proxy.server import Proxy, ProxyCollector
from sluicemq.supervision import Supervisor, start_shared
from sluicemq.wire.bodies import decode_consumer_connections, decode_heartbeat
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import HeartbeatResponse
from sluicemq.wire.tables import decode_group_config, decode_topic_config

log = logging.getLogger(__name__)

T = TypeVar("T")
FRESH_S: Final = 5.0
"""How old an answer may be that a call goes by. RocketMQ's proxy asks again after 20 s."""
GONE_S: Final = 60.0
"""So long a topic stands of which no name server knows: a broker that restarts is away for less."""
NAMES_MAX: Final = 20_000
LOOK_S: Final = 0.5
LOOK_GROUP_S: Final = 30.0


class _Answer(NamedTuple, Generic[T]):
    value: T
    until_s: float
    found_s: float


class Answers(Generic[T]):
    """What the cluster answered, by the name that was asked for. Who asks at the same time waits
    for one answer. While nobody answers the old one stands; an error is raised to all who wait."""

    def __init__(
        self, shell: AsyncioShell, find: Callable[[str], Conversation[T]], clock: Clock
    ) -> None:
        self._shell = shell
        self._find = find
        self._clock = clock
        self._known: dict[str, _Answer[T]] = {}
        self._asked: dict[str, asyncio.Task[T]] = {}

    def get(self, name: str) -> Conversation[T]:
        """Raises what the search raises."""
        known = self._known.get(name)
        if known is not None and self._clock.monotonic_s() < known.until_s:
            return known.value
        task = self._asked.get(name)
        if task is None:
            task = self._asked[name] = start_shared(self._ask(name))
            task.add_done_callback(lambda _task: self._asked.pop(name))
        waits = Await(task)
        yield waits
        value: T = waits.value
        return value

    async def _ask(self, name: str) -> T:
        known = self._known.get(name)
        try:
            value, found_s = await self._shell.run(self._find(name)), self._clock.monotonic_s()
        except SluiceError as error:
            is_gone = isinstance(error, RouteNotFoundError)
            if known is None or (is_gone and self._clock.monotonic_s() - known.found_s > GONE_S):
                self._known.pop(name, None)
                raise
            value, found_s = known.value, known.found_s
        if known is not None and known.value == value:  # what was made of it stays as well
            value = known.value
        if len(self._known) >= NAMES_MAX:
            self._known.clear()
        until_s = self._clock.monotonic_s() + FRESH_S
        self._known[name] = _Answer(value, until_s, found_s)
        return value

    async def close(self) -> None:
        """Who still waits gets CancelledError."""
        for task in list(self._asked.values()):
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)


class ClusterBackend(AsyncioShell):
    """The brokers of name servers; of one cluster alone when it is named."""

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
        """`credentials`: the proxy's own account, which signs what goes to brokers. Raises
        ConfigurationError when no name server is given."""
        self.clock = clock
        self.credentials = credentials
        self.connect = connect
        self.directory = Directory(name_servers, clock)
        self.disagreements = Disagreements()
        self._cluster = cluster
        self._tasks = Tasks()
        self._links: set[ClusterLink] = set()
        nowhere = Host("0.0.0.0", 0)
        self._own = self.link(nowhere, nowhere, lambda _command, _answer: None)
        self._routes = Answers(self, self._find_route, clock)
        self._topics = Answers(self, self._find_topic, clock)
        self._groups = Answers(self, self._find_group, clock)

    def link(self, remote: Host, local: Host, on_request: OnRequest) -> "ClusterLink":
        link = ClusterLink(self, on_request)
        self._links.add(link)
        return link

    def route(self, topic: str) -> Conversation[TopicRoute]:
        return self._routes.get(topic)

    def topic(self, name: str) -> Conversation[TopicConfig | None]:
        return self._topics.get(name)

    def group(self, name: str) -> Conversation[GroupConfig | None]:
        return self._groups.get(name)

    def warnings(self) -> list[str]:
        return [text for _, text in sorted(self.disagreements.found.items())]

    async def sleep(self, seconds: float) -> None:
        """Beside everything else."""
        await asyncio.sleep(seconds)

    async def send_request(self, call: Call) -> Command:
        """A question of the proxy's own."""
        return await self._own.send_request(call)

    def exclusive(self, key: str) -> contextlib.nullcontext[None]:
        """`Answers` has only one asker for a name."""
        return contextlib.nullcontext()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that ends by itself, at the latest when the backend closes. What it raises
        is logged."""
        self._tasks.spawn(work, "sluicemq proxy request")

    def closed(self, link: "ClusterLink") -> None:
        """A client is gone."""
        self._links.discard(link)
        self.disagreements.gone(link)

    async def look(self, address: str, group: str) -> None:
        """What a broker has heard of a group last, from whomever."""
        command = requests.consumer_connections(group=group)
        with contextlib.suppress(SluiceError):
            answer = await self.send_request(Call(address, command))
            if answer.code == SUCCESS:
                wants = decode_consumer_connections(answer.body).subscriptions.values()
                key = subscription_key(group, wants)
                self.disagreements.heard(group, address, f"a member at {address}", key)

    async def close(self) -> None:
        """All connections are gone when it returns."""
        for answers in (self._routes, self._topics, self._groups):
            await answers.close()
        for link in list(self._links):
            link.close()
        await self._tasks.wait()

    def _find_route(self, topic: str) -> Conversation[TopicRoute]:
        found = yield from self.directory.fetch_route(topic)
        if found is None:
            raise route_not_found_error(
                topic, self.directory.name_servers, None, auto_create_tried=False
            )
        return found

    def _find_topic(self, name: str) -> Conversation[TopicConfig | None]:
        try:
            route = yield from self.route(name)
        except RouteNotFoundError:
            return None
        command = requests.topic_config(topic=name)
        found = yield from _first(masters_of(route).values(), command, TOPIC_NOT_EXIST)
        return None if found is None else decode_topic_config(found.body)

    def _find_group(self, name: str) -> Conversation[GroupConfig | None]:
        """A group has no route: each broker may be the one that has it."""
        brokers = yield from masters(self.directory, self._cluster)
        found = yield from _first(
            brokers.values(), requests.group_config(group=name), GROUP_NOT_EXIST
        )
        return None if found is None else decode_group_config(found.body)


@contextlib.asynccontextmanager
async def stand_alone(
    config: ProxyConfig, name_servers: str, credentials: tuple[str, str] | None
) -> AsyncIterator[Proxy]:
    """A proxy that serves a cluster for the time of the block. With access control it has rules of
    its own; without it everybody does what the account of `credentials` may. TLS towards the
    cluster is as the environment says. Raises ConfigurationError."""
    loop = asyncio.get_running_loop()
    guard = Guard.from_config(SYSTEM_FILES, SYSTEM_CLOCK, config)
    backend = ClusterBackend(
        name_servers, Credentials.from_value(credentials), SYSTEM_CLOCK,
        with_tls(SOCKET_NETWORK, Tls.resolve(None)).dial, cluster=config.cluster,
    )  # fmt: skip
    shares = FairScheduler(SYSTEM_CLOCK.monotonic_s, loop.call_soon)
    proxy = Proxy(backend, guard, shares, config, limits=config)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        if guard is not None:
            guard.load()
            jobs = Supervisor(SYSTEM_CLOCK, log)
            watch = jobs.repeat("access rules", lambda: LOOK_S, partial(_look_at_rules, guard))
            stack.callback(loop.create_task(watch).cancel)
        await proxy.start(config.listen_address, config.listen_port)
        stack.push_async_callback(proxy.close)
        log_protected_mode(config)
        if config.is_pushed:
            collect = ProxyCollector(proxy).collect
            push = await asyncio.to_thread(MetricsPusher, collect, config, "proxy", host_name())
            push.start()
            stack.push_async_callback(asyncio.to_thread, push.close)
        if config.metrics_enable:
            opened = await asyncio.to_thread(serve_metrics, ProxyCollector(proxy), config)
            if opened is not None:
                proxy.metrics_port = opened[0]
                stack.callback(opened[1])
        yield proxy


async def _look_at_rules(guard: Guard) -> None:
    """Take up an edit of plain_acl.yml as a whole, between two calls."""
    guard.apply_checked_files(await asyncio.to_thread(guard.check_files))


def _first(addresses: Iterable[str], command: Command, absent: int) -> Conversation[Command | None]:
    """The answer of the first broker that has something; None when all say that they have not.
    Raises RequestError, and when nobody has it the error of one that could not be asked."""
    failure: SluiceError | None = None
    for address in addresses:
        try:
            answer = yield Call(address, command)
        except (ConnectionLostError, RequestTimeoutError) as error:
            failure = error
            continue
        if answer.code == SUCCESS:
            return answer
        if answer.code != absent:
            raise request_error(answer, address)
    if failure is not None:
        raise failure
    return None


class ClusterLink:
    """A client of the proxy, with connections of its own to the brokers that it uses."""

    def __init__(self, backend: ClusterBackend, on_request: OnRequest) -> None:
        self._backend = backend
        self._on_request = on_request
        self._pool = ChannelPool(
            on_request=self._requested, clock=backend.clock, connect=backend.connect
        )
        self._is_closed = False

    def ask(self, call: Call, answered: Answered) -> None:
        if self._is_closed:
            answered(ConnectionLostError("The client is gone."))
        else:
            self._backend.spawn(self._ask(call, answered))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._backend.closed(self)
            self._backend.spawn(self._pool.close())

    async def send_request(self, call: Call) -> Command:
        """One request, one answer, whatever its code. Raises ConnectionLostError,
        RequestTimeoutError, ClosedError."""
        channel, command = await self._pool.get(call.address), call.command
        sign_request(command, self._backend.credentials)
        call.is_written = True
        if command.flag & FLAG_ONEWAY:
            channel.send_oneway(command)
            return command
        timeout_s = CALL_TIMEOUT_S if call.timeout_s is None else call.timeout_s
        return await channel.call(command, timeout_s)

    async def _ask(self, call: Call, answered: Answered) -> None:
        is_heartbeat = call.command.code == RequestCode.HEART_BEAT
        if is_heartbeat:
            call.command.fields = {**(call.command.fields or {}), "sluiceLanes": "true"}
        try:
            answer: Command | SluiceError = await self.send_request(call)
        except ClosedError:
            answer = ConnectionLostError("The client is gone.")
        except SluiceError as error:
            answer = error
        if is_heartbeat and isinstance(answer, Command) and not self._is_closed:
            self._beat(call, answer)
        answered(answer)

    def _beat(self, call: Call, answer: Command) -> None:
        """A broker of ours looks itself at what members want, and says so."""
        if answer.code == SUCCESS and not decode_header(HeartbeatResponse, answer.fields).lanes:
            heartbeat, now_s = (
                decode_heartbeat(call.command.body),
                self._backend.clock.monotonic_s(),
            )
            for consumer in heartbeat.consumers:
                key = subscription_key(consumer.group, consumer.subscriptions)
                disagreements = self._backend.disagreements
                disagreements.heard(consumer.group, self, heartbeat.client_id, key)
                if disagreements.is_due(consumer.group, now_s):
                    self._backend.spawn(self._backend.look(call.address, consumer.group))

    def _requested(self, command: Command, channel: Channel) -> None:
        """A broker asks something of the client."""
        self._on_request(command, partial(channel.send_response, command.opaque))


class Disagreements:
    """Groups whose members subscribe to different things, at brokers that do not look.

    RocketMQ takes for a group what the member said that came last, and what one member does not
    want is over for all: some messages reach nobody, and nothing says so. Compared are the members
    that came in by this proxy, and what the brokers take for the group: others may have said it.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        """By group: what differs."""
        self._members: dict[str, dict[ClusterLink | str, tuple[str, str]]] = {}
        self._looked_s: dict[str, float] = {}

    def heard(self, group: str, who: "ClusterLink | str", name: str, key: str) -> None:
        """What a member wants, or what a broker has heard: then `who` is its address."""
        members = self._members.setdefault(group, {})
        if members.get(who) != (name, key) and (members or not isinstance(who, str)):
            members[who] = (name, key)
            self._compare(group)

    def is_due(self, group: str, now_s: float) -> bool:
        """Is it time to ask a broker what it takes for the group?"""
        is_due = now_s - self._looked_s.get(group, -LOOK_GROUP_S) >= LOOK_GROUP_S
        if is_due:
            self._looked_s[group] = now_s
        return is_due

    def gone(self, link: ClusterLink) -> None:
        """A client has left all its groups."""
        for group in [name for name, members in self._members.items() if link in members]:
            del self._members[group][link]
            self._compare(group)

    def _compare(self, group: str) -> None:
        members = self._members[group]
        if all(isinstance(who, str) for who in members):
            del self._members[group]
            self._looked_s.pop(group, None)
            self.found.pop(group, None)
            return
        first, *others = members.values()
        other = next((it for it in others if it[1] != first[1]), None)
        if other is None:
            self.found.pop(group, None)
            return
        text = (
            f"{first[0]} and {other[0]} of the group {group} subscribe to different things: "
            f"{difference(first[1], other[1])}. Their broker does not look at it, so some messages "
            "reach nobody: give one of them another group, or the same subscription."
        )
        if self.found.get(group) != text:
            self.found[group] = text
            log.warning("%s", text)
