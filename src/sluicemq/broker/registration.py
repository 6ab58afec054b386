"""How a broker makes itself known to its name servers: 103, 104 and 217.

`Registration` decides what to tell whom, without waiting. Every name server hears of all topics
(103) at the start and every registerNameServerPeriod, and at once of those that change (217). The
answer tells a slave where its master is; while it does not, the slave registers every second.
RocketMQ sends those in a 103 that holds nothing else; a name server with
deleteTopicWithBrokerRegistration then forgets all others. One that is not there is tried again with
growing pauses: logged once, and again when it is back (spec/namesrv.md §2, §3).

`Announcements` does the calls: a change of topics or groups is on disk, then the name servers know
it, then its answer leaves. All changes of a moment share one round.

At the end stands what this machine knows of its own addresses; model/addresses.py decides what to
do with it.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from sluicemq.broker.group_commit import encode_error_answer, encode_unconfirmed_answer
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import READ_WRITE, Groups, Topics
from sluicemq.clock import Clock
from sluicemq.config import BrokerConfig
from sluicemq.errors import (
    ConfigurationError,
    RequestError,
    RequestTimeoutError,
    SluiceError,
    StoreError,
)
from sluicemq.model.addresses import AdvertisedAddress, choose_address, is_wildcard
from sluicemq.model.ids import Host, encode_host, parse_host
from sluicemq.model.topic import (
    QueueData,
    TopicConfig,
    TopicRoute,
)
from sluicemq.net.channel import Channel, ChannelPool
from sluicemq.net.dispatch import Peer
from sluicemq.net.network import Network
from sluicemq.net.work.background import quick_switches
from sluicemq.wire import bodies, tables
from sluicemq.wire import registration as registered
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    BrokerRequest,
    GetRouteRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    TopicRequest,
)
from sluicemq.wire.replicas import BrokerHeartbeatRequest
from sluicemq.wire.signature import sign_command

log = logging.getLogger(__name__)

SILENCE_MS: Final = 10_000
"""After so long name servers forget a broker that beats, as RocketMQ's brokerNotActiveTimeoutMillis
says."""
MASTER_LOOK_S: Final = 1.0
"""The period at which a slave asks a name server that knows no master of its name."""
PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 10.0
CHANGES_MAX: Final = 16
"""Of more topics at once all are told."""


@dataclasses.dataclass(slots=True)
class NameServerState:
    """What is known of one name server. `failures` counts those since it last answered."""

    address: str
    failures: int = 0
    is_registered: bool = False
    next_try_s: float = 0.0
    changes: set[str] = dataclasses.field(default_factory=set)
    """Topics that have changed since it was last told."""
    supports_topic_registration: bool = True
    """Whether it knows 217, as those of 5.x and ours."""


def parse_credentials(text: str) -> tuple[str, str] | None:
    """Access key and secret of innerClientAuthenticationCredentials; None for "".

    Raises ConfigurationError, which does not show the text.
    """
    if not text:
        return None
    try:
        found = json.loads(text)
        pair = found["accessKey"], found["secretKey"]
    except (ValueError, TypeError, KeyError):
        pair = ("", "")
    if not all(isinstance(part, str) and part for part in pair):
        raise ConfigurationError(
            "innerClientAuthenticationCredentials is no JSON object with accessKey and secretKey.",
            fix='Write {"accessKey":"…","secretKey":"…"}.',
        )
    return pair


class Registration:
    """What to tell the name servers, and when.

    `fields` are the extra header fields by which our name server chooses the address that a client
    can reach (model/addresses.py); others ignore them.
    """

    def __init__(
        self, settings: Settings, topics: Topics, address: str, fields: dict[str, str]
    ) -> None:
        self._settings = settings
        self._topics = topics
        self.address = address
        self.ha_port = 0
        """Where slaves connect; 0 is one above the port."""
        self.on_master: Callable[[str, str], None] = lambda address, ha_address: None
        """A slave is told by each name server where its master is."""
        self.epoch = 0
        """Of the term, with failover: of two that say they are the master name servers believe the
        later one (spec/namesrv.md §2)."""
        self._fields = fields
        config = settings.broker
        self._credentials = parse_credentials(config.inner_credentials) or config.inner_account
        self.name_servers = [
            NameServerState(name) for name in settings.broker.name_server_addresses
        ]

    def prepare_registration(self, server: NameServerState) -> Callable[[], Command]:
        """What makes the request (103) with every topic of now, in whatever thread."""
        server.changes = set()
        configs, config = self._topics.configs(), self._settings.broker
        version = dataclasses.replace(self._topics.version, state_version=self.epoch)

        def request() -> Command:
            topics = {name: self._registered(topic) for name, topic in configs.items()}
            body = registered.encode_register_body(
                registered.RegisterBody(tables.TopicTable(topics, version))
            )
            header = RegisterBrokerRequest(
                broker=config.broker_name,
                address=self.address,
                cluster=config.cluster_name,
                ha_address=self.ha_address,
                broker_id=self._settings.registered_id,
                heartbeat_timeout_ms=SILENCE_MS if self.sends_heartbeats else None,
                acting_master_enable=config.acting_master,
                compressed=False,
                body_crc32=zlib.crc32(body) & 0x7FFFFFFF,
            )
            fields = encode_header(header) | self._fields
            return self.sign(Command(RequestCode.REGISTER_BROKER, fields, body))

        return request

    @property
    def ha_address(self) -> str:
        """host:port that slaves are told."""
        host, _, port = self.address.rpartition(":")
        ha_port = self.ha_port or int(port) + 1
        return f"{self._settings.broker.broker_ip2 or host}:{ha_port}"

    @property
    def sends_heartbeats(self) -> bool:
        """Are there replicas that wait to hear that this one is gone?"""
        config = self._settings.broker
        return config.acting_master or bool(config.consensus)

    def make_heartbeat(self) -> Command:
        """904."""
        config = self._settings.broker
        header = BrokerHeartbeatRequest(
            cluster=config.cluster_name, address=self.address, broker=config.broker_name,
            broker_id=self._settings.registered_id,
        )  # fmt: skip
        return self.sign(Command(RequestCode.BROKER_HEARTBEAT, encode_header(header)))

    def make_unregistration(self) -> Command:
        """104."""
        config = self._settings.broker
        header = BrokerRequest(
            broker=config.broker_name,
            address=self.address,
            cluster=config.cluster_name,
            broker_id=self._settings.registered_id,
        )
        return self.sign(Command(RequestCode.UNREGISTER_BROKER, encode_header(header)))

    def sign(self, command: Command) -> Command:
        """For name servers and masters with access control."""
        if self._credentials is not None:
            sign_command(command, *self._credentials)
        return command

    def _registered(self, config: TopicConfig) -> TopicConfig:
        """A broker without read or write permission takes it from every topic of its routes."""
        allowed = self._settings.broker.broker_permission
        if allowed & READ_WRITE == READ_WRITE:
            return config
        return dataclasses.replace(config, perm=config.perm & (allowed | ~READ_WRITE))

    # ---------------------------------------------------------------------------- what changes

    def make_route_request(self, topic: str) -> Command:
        """105: which queues does it have, on all brokers?"""
        return self.sign(
            Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, encode_header(GetRouteRequest(topic=topic)))
        )

    def mark_topic_changed(self, name: str) -> None:
        for server in self.name_servers:
            server.changes.add(name)

    def make_all_due(self) -> None:
        """What stands in all routes has changed."""
        for server in self.name_servers:
            if not server.failures:
                server.next_try_s = 0.0

    @property
    def servers_with_changes(self) -> list[NameServerState]:
        """Who does not know of the last changes. One that is not there is told when it is."""
        return [server for server in self.name_servers if server.changes and not server.failures]

    def take_change_requests(self, server: NameServerState) -> list[Command]:
        """217 of each topic that has changed. One that is deleted stays in the routes until the
        tool takes it out there (216), as with RocketMQ."""
        names, server.changes = server.changes, set()
        requests = []
        for topic in filter(None, map(self._topics.get, names)):
            known = self._registered(topic.config)
            queues = QueueData(
                self._settings.broker.broker_name, known.read_queues, known.write_queues,
                known.perm, known.sys_flag,
            )  # fmt: skip
            fields = encode_header(TopicRequest(topic=known.name))
            body = bodies.encode_topic_route(TopicRoute((), (queues,)))
            request = Command(RequestCode.REGISTER_TOPIC_IN_NAMESRV, fields, body)
            requests.append(self.sign(request))
        return requests

    # ------------------------------------------------------------------------ what came of it

    def on_registered(self, server: NameServerState, answer: Command, now_s: float) -> None:
        """The name server took it."""
        if server.failures:
            log.info("name server %s is there again; registered", server.address)
        elif not server.is_registered:
            log.info("registered with name server %s as %s", server.address, self.address)
        server.is_registered = True
        server.failures = 0
        server.next_try_s = now_s + self._settings.broker.register_period_ms / 1000
        if self._settings.is_slave:
            told = decode_header(RegisterBrokerResponse, answer.fields)
            self.on_master(told.master_address or "", told.ha_address or "")
            if not told.ha_address and not self._settings.is_failover:
                server.next_try_s = now_s + MASTER_LOOK_S
        if answer.body:
            self._topics.set_ordered_topics(bodies.decode_kv_table(answer.body))

    def on_failure(self, server: NameServerState, error: Exception, now_s: float) -> None:
        """It is not there or refuses: try again later."""
        if not server.failures:
            log.warning(
                "name server %s does not take the registration (%s). Clients that ask it will not "
                "find this broker. Start it, or correct namesrvAddr; trying again.",
                server.address, error,
            )  # fmt: skip
        server.failures += 1
        pause_s = min(PAUSE_S_MIN * 2 ** min(server.failures - 1, 10), PAUSE_S_MAX)
        server.next_try_s = now_s + pause_s

    def due_servers(self, now_s: float) -> list[NameServerState]:
        """Whom to tell of all topics now."""
        return [
            server for server in self.name_servers
            if server.next_try_s <= now_s
            or (len(server.changes) > CHANGES_MAX and not server.failures)
        ]  # fmt: skip

    def seconds_until_due(self, now_s: float) -> float:
        """How long nothing is due."""
        times = [server.next_try_s for server in self.name_servers]
        return max(min(times, default=now_s + 3600.0) - now_s, 0.0)


# Together less than the 5 s after which RocketMQ's tools give up a change of a topic.
DIAL_WAIT_S: Final = 1.5
REGISTER_WAIT_S: Final = 3.0
TOPIC_WAIT_S: Final = 0.5
ROUTE_WAIT_S: Final = 1.0
FAREWELL_WAIT_S: Final = 1.0


async def _at_once() -> None:
    """There are no replicas."""


class Announcements:
    """What waits to be announced, and the connections to the name servers."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        registration: Registration,
        *,
        clock: Clock,
        network: Network,
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        save_offsets: Callable[[], Awaitable[None]],
    ) -> None:
        self.registration = registration
        self.first_round_done = asyncio.Event()
        """Set when the first round is over."""
        self._topics, self._groups, self._offsets = topics, groups, offsets
        self._clock = clock
        self._in_executor = in_executor
        self._save_offsets = save_offsets
        self._waiting: list[tuple[Peer, bytes]] = []
        self.wait_for_replicas: Callable[[], Awaitable[None]] = _at_once
        """Waits until replicas have the changes too. Raises StoreError."""
        self._questions: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

        def lost(channel: Channel) -> None:
            """A name server forgets us with the connection: tell it as soon as it is back."""
            for server in registration.name_servers:
                if server.address == channel.address:
                    server.supports_topic_registration = True  # another one may come back
                    server.next_try_s = 0.0
                    self._news.set()

        self.pool = ChannelPool(
            timeout_s=DIAL_WAIT_S, on_close=lost, clock=clock, connect=network.dial
        )

        def topic_changed(name: str) -> None:
            registration.mark_topic_changed(name)
            self._news.set()

        def settings_changed() -> None:  # permissions stand in routes
            registration.make_all_due()
            self._news.set()

        topics.on_change = topic_changed
        groups.on_change = lambda _name: self._news.set()
        settings.add_listener(settings_changed)

    def announce(self, peer: Peer, answer: bytes) -> None:
        """The answer leaves when every change so far is announced."""
        self._waiting.append((peer, answer))
        self._news.set()

    def release(self, error: StoreError | None = None) -> None:
        """Write the held answers now. With `error`, which says why replicas may lack the changes,
        each answer becomes a failure with the text of the error."""
        waiting, self._waiting = self._waiting, []
        if error is not None:
            waiting = [
                (peer, a and encode_error_answer(a, error, str(error))) for peer, a in waiting
            ]
        for peer, answer in waiting:
            peer.write(answer)

    async def close(self) -> None:
        for question in self._questions:
            question.cancel()
        await self.pool.close()

    def look_up(self, topic: str, done: Callable[[Command | None], None]) -> None:
        """Asks the name servers for the route of a topic, one after the other until one answers;
        `done` gets the answer, None without one."""

        async def ask() -> None:
            answer = None
            for server in sorted(self.registration.name_servers, key=lambda it: it.failures):
                with contextlib.suppress(SluiceError, OSError):
                    channel = await self.pool.get(server.address)
                    answer = await channel.call(
                        self.registration.make_route_request(topic), ROUTE_WAIT_S
                    )
                    break
            done(answer)

        question = asyncio.get_running_loop().create_task(ask())
        self._questions.add(question)
        question.add_done_callback(self._questions.discard)

    async def run(self) -> None:
        """Round after round, until it is cancelled."""
        while True:
            try:
                await self._round()
            except Exception:
                log.exception("telling the name servers failed")
                await asyncio.sleep(1.0)
            self.first_round_done.set()
            wait_s = self.registration.seconds_until_due(self._clock.monotonic_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            self._news.clear()

    async def send_heartbeats(self) -> None:
        """Tells the name servers that know the broker that it lives."""
        for server in self.registration.name_servers:
            if server.is_registered and not server.failures:
                with contextlib.suppress(SluiceError, OSError):
                    channel = await self.pool.get(server.address)
                    channel.oneway(self.registration.make_heartbeat())

    async def unregister(self) -> None:
        """Tell the name servers that know the broker that it goes."""

        async def tell(server: NameServerState) -> None:
            with contextlib.suppress(SluiceError, OSError):
                channel = await self.pool.get(server.address)
                await channel.call(self.registration.make_unregistration(), FAREWELL_WAIT_S)

        known = [server for server in self.registration.name_servers if server.is_registered]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_WAIT_S):
                await asyncio.gather(*map(tell, known))

    async def _round(self) -> None:
        waiting, self._waiting = self._waiting, []
        syncs = filter(
            None, [table.document.prepare_sync() for table in (self._topics, self._groups)]
        )
        if self._offsets.must_save_now:
            self._offsets.must_save_now = False
            await self._save_offsets()
        for sync in syncs:
            try:
                await self._in_executor(sync)
            except StoreError as error:
                log.error("%s", error)
                waiting = [(peer, a and encode_unconfirmed_answer(a, error)) for peer, a in waiting]
        if waiting:
            try:
                await self.wait_for_replicas()
            except StoreError as error:
                log.error("%s", error)
                waiting = [
                    (peer, a and encode_error_answer(a, error, str(error))) for peer, a in waiting
                ]
        due = self.registration.due_servers(self._clock.monotonic_s())
        changed = [server for server in self.registration.servers_with_changes if server not in due]
        await asyncio.gather(*map(self._tell_all, due), *map(self._tell_changes, changed))
        for peer, answer in waiting:
            peer.write(answer)

    async def _tell_all(self, server: NameServerState) -> None:
        try:
            make_request = self.registration.prepare_registration(server)
            channel = await self.pool.get(server.address)
            with quick_switches():
                request = await self._in_executor(make_request)
            answer = await channel.call(request, REGISTER_WAIT_S)
            if answer.code != 0:
                raise RequestError(answer.code, answer.remark or "", address=server.address)
            self.registration.on_registered(server, answer, self._clock.monotonic_s())
        except (SluiceError, OSError) as error:
            self.registration.on_failure(server, error, self._clock.monotonic_s())

    async def _tell_changes(self, server: NameServerState) -> None:
        """Of the topics that changed; of all when the name server does not take that: one of 4.9
        does not even answer."""
        if not server.supports_topic_registration:
            await self._tell_all(server)
            return
        try:
            channel = await self.pool.get(server.address)
            for request in self.registration.take_change_requests(server):
                answer = await channel.call(request, TOPIC_WAIT_S)
                if answer.code != 0:
                    server.supports_topic_registration = False
                    await self._tell_all(server)
                    return
        except RequestTimeoutError:
            server.supports_topic_registration = False
            await self._tell_all(server)
        except (SluiceError, OSError) as error:
            self.registration.on_failure(server, error, self._clock.monotonic_s())


_SOMEWHERE = Host("192.0.2.1", 9)  # of a network for documentation: nothing is sent there


def choose_advertised_address(config: BrokerConfig) -> AdvertisedAddress:
    """The address that name servers and clients are told, and why."""
    towards = None
    for address in config.name_server_addresses:
        towards = towards or find_local_address(parse_host(address))
    return choose_address(
        config.broker_ip1, config.bind_address, find_interface_addresses(), towards
    )


def find_local_address(host: Host) -> str | None:
    """The local address of the way to a host; nothing is sent."""
    family = socket.AF_INET6 if ":" in host.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.address, host.port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def find_interface_addresses() -> list[str]:
    """Addresses of this machine, as far as the system tells without asking for more."""
    found = dict.fromkeys(filter(None, [find_local_address(_SOMEWHERE)]))
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.setdefault(str(entry[4][0]))
    return list(found)


def find_listening_addresses(bind_address: str) -> list[str]:
    """Where a broker that binds to this address can be reached."""
    if not is_wildcard(bind_address):
        return [bind_address]
    return list(dict.fromkeys([*find_interface_addresses(), "127.0.0.1"]))


def resolve_stored_host(address: str, port: int) -> Host:
    """The host that stands in records and message ids: an address, also when brokerIP1 is a name.

    Raises ConfigurationError when the name is not known.
    """
    try:
        encode_host(Host(address, port))
    except ValueError:
        try:
            address = socket.gethostbyname(address)
        except OSError as error:
            raise ConfigurationError(
                f"brokerIP1 = {address} is not an address and its name is not known ({error}).",
                fix="Write an IP address of this machine.",
            ) from error
    return Host(address, port)
