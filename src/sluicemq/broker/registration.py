"""Registration of a broker with its name servers.

`Registration` decides, without waiting, what to send to which name server and when:

- REGISTER_BROKER (103) with all topics: at the start, and every registerNameServerPeriod. The
  answer tells a slave the address of its master. While it does not, the slave registers every
  second.
- REGISTER_TOPIC_IN_NAMESRV (217) for a topic that has changed, at once. RocketMQ sends a 103 with
  only the changed topics instead. A name server with deleteTopicWithBrokerRegistration then forgets
  all other topics.
- A name server that does not answer is asked again after growing pauses. That is logged once, and
  again when it answers (spec/namesrv.md §2, §3).

`Announcements` makes the calls. After a change of topics or groups it first waits until the change
is on disk, then until the name servers know it, and then sends the answer. Changes that arrive
together share one round.

The functions at the end find the addresses of this machine. `model/addresses.py` decides which one
to advertise.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import zlib
from collections.abc import Awaitable, Callable
from operator import attrgetter
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
    StoreUncertainError,
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
from sluicemq.net.work.background import fast_thread_switching
from sluicemq.wire import bodies, tables
from sluicemq.wire import registration as registered
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    GetRouteRequest,
    TopicRequest,
)
from sluicemq.wire.registration import BrokerRequest, RegisterBrokerRequest, RegisterBrokerResponse
from sluicemq.wire.replicas import BrokerHeartbeatRequest
from sluicemq.wire.signature import sign_command

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_MS: Final = 10_000
"""The time without a heartbeat after which name servers forget a broker that sends them, as with
RocketMQ's brokerNotActiveTimeoutMillis."""
MASTER_POLL_S: Final = 1.0
"""The period at which a slave registers while the name server knows no master."""
PAUSE_S_MIN: Final = 0.5
"""The first pause after a failed registration. It doubles with each failure."""
PAUSE_S_MAX: Final = 10.0
CHANGES_MAX: Final = 16
"""If more topics than this have changed, all topics are registered instead."""


@dataclasses.dataclass(slots=True)
class NameServerState:
    """What the broker knows about one name server."""

    address: str
    failures: int = 0
    """The number of failed registrations since the last success."""
    is_registered: bool = False
    """Whether the broker was ever registered there."""
    next_try_s: float = 0.0
    """The monotonic time at which all topics are registered again."""
    changes: set[str] = dataclasses.field(default_factory=set)
    """Topics that have changed since the last registration."""
    supports_topic_registration: bool = True
    """Whether it answers REGISTER_TOPIC_IN_NAMESRV (217). RocketMQ 4.9 does not."""


def parse_credentials(setting: str) -> tuple[str, str] | None:
    """Parse the value of the setting innerClientAuthenticationCredentials.

    `{"accessKey": "a", "secretKey": "s"}` becomes ("a", "s"). Return None if the value is empty.
    Raises ConfigurationError if the value is not a JSON object with both keys. The text of the
    error does not contain the value, which is secret.
    """
    if not setting:
        return None
    try:
        credentials = json.loads(setting)
        access_key = credentials["accessKey"]
        secret_key = credentials["secretKey"]
    except (ValueError, TypeError, KeyError):
        access_key = secret_key = ""
    are_strings = isinstance(access_key, str) and isinstance(secret_key, str)
    if not are_strings or not access_key or not secret_key:
        raise ConfigurationError(
            "innerClientAuthenticationCredentials must be a JSON object with accessKey and "
            "secretKey.",
            fix='Write {"accessKey":"…","secretKey":"…"}.',
        )
    return access_key, secret_key


class Registration:
    """The requests to the name servers and the state of each name server. It does no I/O."""

    def __init__(
        self, settings: Settings, topics: Topics, address: str, fields: dict[str, str]
    ) -> None:
        """Create the registration of a broker at `address`, as "host:port".

        `topics` are the topics to register. `fields` are further header fields of the registration
        request. They tell SluiceMQ's name server which addresses the broker has, so that it gives
        each client one that the client can reach (`model/addresses.py`). RocketMQ's name server
        ignores them. Raises ConfigurationError if the configured credentials are invalid.
        """
        self._settings = settings
        self._topics = topics
        self.address = address
        self.ha_port = 0
        """The port to which slaves connect; 0 means the broker's port plus 1."""
        self.on_master: Callable[[str, str], None] = lambda address, ha_address: None
        """Called on a slave with the addresses of its master that a name server returned, or ""."""
        self.term_number = 0
        """The number of the term, with failover. If two brokers claim to be the master, name
        servers believe the one with the later term (spec/namesrv.md §2)."""
        self._fields = fields
        config = settings.broker
        self._credentials = parse_credentials(config.inner_credentials) or config.inner_account
        self.name_servers = [
            NameServerState(name) for name in settings.broker.name_server_addresses
        ]

    def prepare_registration(self, server: NameServerState) -> Callable[[], Command]:
        """Return a function that makes a REGISTER_BROKER request (103) with the present topics.

        The request is signed. The function encodes all topics, so it takes long and may run on
        another thread. `server.changes` is emptied, because the request contains these changes.
        """
        server.changes = set()
        # Copied here, because the function may run on another thread.
        topic_configs = self._topics.configs()
        broker_config = self._settings.broker
        version = dataclasses.replace(self._topics.version, state_version=self.term_number)

        def make_request() -> Command:
            registered_topics = {
                name: self._limit_permissions(topic_config)
                for name, topic_config in topic_configs.items()
            }
            topic_table = tables.TopicTable(registered_topics, version)
            body = registered.encode_register_body(registered.RegisterBody(topic_table))
            return self._make_registration_request(broker_config, body)

        return make_request

    def _make_registration_request(self, config: BrokerConfig, body: bytes) -> Command:
        """Return a signed REGISTER_BROKER request (103).

        `body` is the encoded table of topics. `config` is the configuration of the broker.
        """
        heartbeat_timeout_ms = HEARTBEAT_TIMEOUT_MS if self.sends_heartbeats else None
        header = RegisterBrokerRequest(
            broker=config.broker_name,
            address=self.address,
            cluster=config.cluster_name,
            ha_address=self.ha_address,
            broker_id=self._settings.registered_id,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            acting_master_enable=config.acting_master,
            compressed=False,
            body_crc32=zlib.crc32(body) & 0x7FFFFFFF,
        )
        fields = encode_header(header) | self._fields
        return self.sign(Command(RequestCode.REGISTER_BROKER, fields, body))

    @property
    def ha_address(self) -> str:
        """The address to which slaves connect, as "host:port"."""
        host, _, port = self.address.rpartition(":")
        ha_port = self.ha_port or int(port) + 1
        return f"{self._settings.broker.broker_ip2 or host}:{ha_port}"

    @property
    def sends_heartbeats(self) -> bool:
        """Whether the broker sends heartbeats to name servers.

        It does if replicas replace it, because name servers must notice quickly that it stopped.
        """
        config = self._settings.broker
        return config.acting_master or bool(config.consensus)

    def make_heartbeat(self) -> Command:
        """Return a signed BROKER_HEARTBEAT request (904), which says that the broker is alive."""
        config = self._settings.broker
        header = BrokerHeartbeatRequest(
            cluster=config.cluster_name,
            address=self.address,
            broker=config.broker_name,
            broker_id=self._settings.registered_id,
        )
        return self.sign(Command(RequestCode.BROKER_HEARTBEAT, encode_header(header)))

    def make_unregistration(self) -> Command:
        """Return a signed UNREGISTER_BROKER request (104), after which routes omit the broker."""
        config = self._settings.broker
        header = BrokerRequest(
            broker=config.broker_name,
            address=self.address,
            cluster=config.cluster_name,
            broker_id=self._settings.registered_id,
        )
        return self.sign(Command(RequestCode.UNREGISTER_BROKER, encode_header(header)))

    def sign(self, command: Command) -> Command:
        """Sign a request in place, if credentials are configured, and return it.

        Name servers and masters with access control require it.
        """
        if self._credentials is not None:
            sign_command(command, *self._credentials)
        return command

    def _limit_permissions(self, config: TopicConfig) -> TopicConfig:
        """Return `config`, the settings of a topic, with the permissions that the broker has too.

        Reading or writing is removed from `perm` if the setting brokerPermission does not allow it.
        Other bits of `perm`, such as inheriting, stay.
        """
        allowed = self._settings.broker.broker_permission
        if allowed & READ_WRITE == READ_WRITE:
            return config
        perm_mask = allowed | ~READ_WRITE
        return dataclasses.replace(config, perm=config.perm & perm_mask)

    def make_route_request(self, topic: str) -> Command:
        """Return a GET_ROUTEINFO_BY_TOPIC request (105)."""
        return self.sign(
            Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, encode_header(GetRouteRequest(topic=topic)))
        )

    def mark_topic_changed(self, name: str) -> None:
        """Note for each name server that the topic has changed."""
        for server in self.name_servers:
            server.changes.add(name)

    def make_all_due(self) -> None:
        """Register all topics again soon, because settings in all routes have changed.

        A name server that does not answer keeps its pause.
        """
        for server in self.name_servers:
            if not server.failures:
                server.next_try_s = 0.0

    @property
    def servers_with_changes(self) -> list[NameServerState]:
        """The name servers that answer and do not know the latest changes."""
        return [server for server in self.name_servers if server.changes and not server.failures]

    def take_change_requests(self, server: NameServerState) -> list[Command]:
        """Return requests that register the topics which have changed since the last registration.

        There is one signed REGISTER_TOPIC_IN_NAMESRV request (217) for each topic in
        `server.changes`, which is emptied. A deleted topic gets no request: it stays in the routes
        of the name server until a tool deletes it there (DELETE_TOPIC_IN_NAMESRV, 216), as with
        RocketMQ.
        """
        changed_names = server.changes
        server.changes = set()
        requests = []
        for name in changed_names:
            topic = self._topics.get(name)
            if topic is None:
                continue
            config = self._limit_permissions(topic.config)
            queues = QueueData(
                self._settings.broker.broker_name,
                config.read_queues,
                config.write_queues,
                config.perm,
                config.sys_flag,
            )
            fields = encode_header(TopicRequest(topic=config.name))
            body = bodies.encode_topic_route(TopicRoute((), (queues,)))
            request = Command(RequestCode.REGISTER_TOPIC_IN_NAMESRV, fields, body)
            requests.append(self.sign(request))
        return requests

    def on_registered(self, server: NameServerState, answer: Command, now_s: float) -> None:
        """Note that `server` has accepted a REGISTER_BROKER request at the monotonic time `now_s`.

        The failures of `server` are forgotten, and the next registration is due after the usual
        period. On a slave, `on_master` is called with the addresses of its master in `answer`. If
        the answer has none, the next registration is due after MASTER_POLL_S seconds. The body of
        `answer`, if it has one, says which topics are ordered; they are marked so.
        """
        if server.failures:
            log.info("Name server %s answers again. Registered with it.", server.address)
        elif not server.is_registered:
            log.info("Registered with name server %s as %s.", server.address, self.address)
        server.is_registered = True
        server.failures = 0
        server.next_try_s = now_s + self._settings.broker.register_period_ms / 1000
        if self._settings.is_slave:
            response = decode_header(RegisterBrokerResponse, answer.fields)
            self.on_master(response.master_address or "", response.ha_address or "")
            if not response.ha_address and not self._settings.is_failover:
                server.next_try_s = now_s + MASTER_POLL_S
        if answer.body:
            self._topics.set_ordered_topics(bodies.decode_kv_table(answer.body))

    def on_failure(self, server: NameServerState, error: Exception, now_s: float) -> None:
        """Note that a request to `server` failed with `error` at the monotonic time `now_s`.

        The first failure after a success is logged. The next try is due after a pause. The pause is
        PAUSE_S_MIN seconds at first, and doubles with each further failure up to PAUSE_S_MAX.
        """
        if not server.failures:
            log.warning(
                "Registration with name server %s failed (%s). Clients that use this name server "
                "will not find the broker. Start the name server, or correct namesrvAddr. "
                "Retrying.",
                server.address,
                error,
            )
        server.failures += 1
        pause_s = min(PAUSE_S_MIN * 2 ** min(server.failures - 1, 10), PAUSE_S_MAX)
        server.next_try_s = now_s + pause_s

    def find_due_servers(self, now_s: float) -> list[NameServerState]:
        """Return the name servers with which all topics must be registered now.

        These are the servers whose time of the next try has come, and the servers that answer and
        miss more than CHANGES_MAX changed topics. `now_s` is the monotonic time.
        """
        return [
            server
            for server in self.name_servers
            if server.next_try_s <= now_s
            or (len(server.changes) > CHANGES_MAX and not server.failures)
        ]

    def seconds_until_due(self, now_s: float) -> float:
        """Return the time in seconds until a registration is due; 3600 without name servers."""
        times = [server.next_try_s for server in self.name_servers]
        return max(min(times, default=now_s + 3600.0) - now_s, 0.0)


# Together these are less than 5 s, the timeout of RocketMQ's tools for a change of a topic.
DIAL_WAIT_S: Final = 1.5
REGISTER_WAIT_S: Final = 3.0
TOPIC_WAIT_S: Final = 0.5
ROUTE_WAIT_S: Final = 1.0
UNREGISTER_WAIT_S: Final = 1.0


async def _no_replicas() -> None:
    """Return at once: no replica has to have the changes."""


def make_unreplicated_error() -> StoreUncertainError:
    """Return the error for a change that a master may lose, because it was replaced too early.

    The master was replaced before all replicas had the change.
    """
    return StoreUncertainError(
        "The change was made on this replica, but it stopped being the master before all replicas "
        "had the change. The next master may not know it.",
        fix="Check the change on the new master.",
    )


WaitingAnswers = list[tuple[Peer, bytes]]
"""Encoded answers with their connections. An answer b"" belongs to a one-way request."""


def _replace_by_errors(waiting: WaitingAnswers, error: StoreError) -> WaitingAnswers:
    """Return `waiting` with each answer replaced by an error answer with the text of `error`.

    An answer b"", which belongs to a one-way request, stays b"".
    """
    return [
        (peer, encode_error_answer(answer, error, str(error)) if answer else b"")
        for peer, answer in waiting
    ]


class Announcements:
    """The answers that wait for an announcement, and the connections to the name servers."""

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
        """Listen to changes of `topics`, `groups` and `settings`, to announce them to name servers.

        The method `run` announces them. `registration` makes the requests and has the state of each
        name server. `in_executor` runs blocking work on another thread. `save_offsets` writes the
        committed offsets to disk. It is called when an operator has reset an offset, because the
        reset must be on disk before the operator gets an answer.
        """
        self.registration = registration
        self.first_round_done = asyncio.Event()
        """Set when every name server has been tried once."""
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._clock = clock
        self._in_executor = in_executor
        self._save_offsets = save_offsets
        self._waiting: WaitingAnswers = []
        self.wait_for_replicas: Callable[[], Awaitable[None]] = _no_replicas
        """Waits until the replicas have the changes so far. Raises StoreError."""
        self._lookups: set[asyncio.Task[None]] = set()
        self._wakeup = asyncio.Event()
        """Set when `run` must do a round."""
        self.pool = ChannelPool(
            timeout_s=DIAL_WAIT_S,
            on_close=self._handle_lost_connection,
            clock=clock,
            connect=network.dial,
        )
        topics.on_change = self._handle_topic_change
        groups.on_change = lambda _name: self._wakeup.set()
        settings.add_listener(self._handle_settings_change)

    def _handle_lost_connection(self, channel: Channel) -> None:
        """Let the next round register all topics with the name server of a lost connection.

        The round starts now. A name server forgets a broker whose connection is lost. It may also
        run another version now, so it is assumed again that it can register single topics.
        """
        for server in self.registration.name_servers:
            if server.address == channel.address:
                server.supports_topic_registration = True
                server.next_try_s = 0.0
                self._wakeup.set()

    def _handle_topic_change(self, name: str) -> None:
        """Register a changed topic in the next round, which starts now."""
        self.registration.mark_topic_changed(name)
        self._wakeup.set()

    def _handle_settings_change(self) -> None:
        """Register all topics again: the broker's permissions are part of their routes."""
        self.registration.make_all_due()
        self._wakeup.set()

    def announce(self, peer: Peer, answer: bytes) -> None:
        """Send the encoded `answer` to `peer` once every change so far is saved and registered."""
        self._waiting.append((peer, answer))
        self._wakeup.set()

    def release(self, error: StoreError | None = None) -> None:
        """Send the answers that wait in this object now, without waiting for the name servers.

        If `error` is given, an error answer with its text is sent in place of each answer.
        """
        waiting = self._waiting
        self._waiting = []
        if error is not None:
            waiting = _replace_by_errors(waiting, error)
        for peer, answer in waiting:
            peer.write(answer)

    async def close(self) -> None:
        """Cancel pending route requests, and close the connections."""
        for lookup in self._lookups:
            lookup.cancel()
        await self.pool.close()

    def look_up(self, topic: str, on_answer: Callable[[Command | None], None]) -> None:
        """Start to ask the name servers for the route of a topic, and return at once.

        The name servers are asked one after the other until one answers. `on_answer` is called
        later with its answer, whatever its code is, or with None if no name server answers.
        """

        async def ask_and_report() -> None:
            on_answer(await self._fetch_route(topic))

        lookup = asyncio.get_running_loop().create_task(ask_and_report())
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)

    async def _fetch_route(self, topic: str) -> Command | None:
        """Return the answer of the first name server that answers a route request for the topic.

        The answer may have any code. The servers with the fewest failures are asked first. Return
        None if none answers.
        """
        reliable_first = sorted(self.registration.name_servers, key=attrgetter("failures"))
        for server in reliable_first:
            with contextlib.suppress(SluiceError, OSError):
                channel = await self.pool.get(server.address)
                request = self.registration.make_route_request(topic)
                return await channel.call(request, ROUTE_WAIT_S)
        return None

    async def run(self) -> None:
        """Register the broker and its changes with the name servers in rounds, until cancelled.

        A round starts when a registration is due or when something has changed. It also sends the
        answers that waited. An unexpected error of a round is logged, and the next round starts
        after at least a second. `first_round_done` is set after the first round.
        """
        while True:
            try:
                await self._run_round()
            except Exception:
                log.exception("Registering with the name servers failed.")
                await asyncio.sleep(1.0)
            self.first_round_done.set()
            wait_s = self.registration.seconds_until_due(self._clock.monotonic_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wakeup.wait()
            self._wakeup.clear()

    async def send_heartbeats(self) -> None:
        """Send a heartbeat to each name server with which the broker is registered.

        Name servers whose last registration failed get none. No answer is awaited, and errors are
        ignored.
        """
        for server in self.registration.name_servers:
            if server.is_registered and not server.failures:
                with contextlib.suppress(SluiceError, OSError):
                    channel = await self.pool.get(server.address)
                    channel.send_oneway(self.registration.make_heartbeat())

    async def unregister(self) -> None:
        """Unregister from the name servers with which the broker is registered.

        Errors are ignored. Returns after `UNREGISTER_WAIT_S` at the latest.
        """

        async def unregister_from(server: NameServerState) -> None:
            with contextlib.suppress(SluiceError, OSError):
                channel = await self.pool.get(server.address)
                await channel.call(self.registration.make_unregistration(), UNREGISTER_WAIT_S)

        servers = [server for server in self.registration.name_servers if server.is_registered]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNREGISTER_WAIT_S):
                await asyncio.gather(*map(unregister_from, servers))

    async def _run_round(self) -> None:
        """Make the changes so far durable, register them, and send the answers that waited.

        The changes are synced to disk, then the replicas must have them, then the name servers get
        them. If the sync fails or the replicas do not get them, error answers are sent instead. A
        failure of a name server changes no answer.
        """
        waiting = self._waiting
        self._waiting = []
        waiting = await self._make_durable(waiting)
        if waiting:
            try:
                await self.wait_for_replicas()
            except StoreError as error:
                log.error("%s", error)
                waiting = _replace_by_errors(waiting, error)

        due = self.registration.find_due_servers(self._clock.monotonic_s())
        changed = [server for server in self.registration.servers_with_changes if server not in due]
        await asyncio.gather(*map(self._register, due), *map(self._register_changes, changed))
        for peer, answer in waiting:
            peer.write(answer)

    async def _make_durable(self, waiting: WaitingAnswers) -> WaitingAnswers:
        """Sync the changes so far to the disk of this replica, and return the answers to send.

        `waiting` are the answers about these changes. They are returned as they are, or each
        replaced by an error answer if a sync failed. That is also logged.
        """
        # Prepared first: changes that are made meanwhile belong to the next round.
        syncs = [self._topics.document.prepare_sync(), self._groups.document.prepare_sync()]
        if self._offsets.must_save_now:
            self._offsets.must_save_now = False
            await self._save_offsets()
        for sync in syncs:
            if sync is None:  # nothing has changed
                continue
            try:
                await self._in_executor(sync)
            except StoreError as error:
                log.error("%s", error)
                waiting = [
                    (peer, encode_unconfirmed_answer(answer, error) if answer else b"")
                    for peer, answer in waiting
                ]
        return waiting

    async def _register(self, server: NameServerState) -> None:
        """Send a registration with all topics to one name server, and handle its answer.

        An error, or an answer with a code other than 0, counts as a failure of `server` and delays
        the next try. Nothing is raised.
        """
        try:
            make_request = self.registration.prepare_registration(server)
            channel = await self.pool.get(server.address)
            with fast_thread_switching():
                request = await self._in_executor(make_request)
            answer = await channel.call(request, REGISTER_WAIT_S)
            if answer.code != 0:
                raise RequestError(answer.code, answer.remark or "", address=server.address)
            self.registration.on_registered(server, answer, self._clock.monotonic_s())
        except (SluiceError, OSError) as error:
            self.registration.on_failure(server, error, self._clock.monotonic_s())

    async def _register_changes(self, server: NameServerState) -> None:
        """Register the topics that have changed with one name server, one request for each.

        If the name server refuses such a request or does not answer it, as RocketMQ 4.9, all topics
        are registered instead, now and in the future. Other errors count as a failure of `server`.
        """
        if not server.supports_topic_registration:
            await self._register(server)
            return
        try:
            channel = await self.pool.get(server.address)
            for request in self.registration.take_change_requests(server):
                answer = await channel.call(request, TOPIC_WAIT_S)
                if answer.code != 0:
                    server.supports_topic_registration = False
                    await self._register(server)
                    return
        except RequestTimeoutError:
            server.supports_topic_registration = False
            await self._register(server)
        except (SluiceError, OSError) as error:
            self.registration.on_failure(server, error, self._clock.monotonic_s())


_ANY_REMOTE = Host("192.0.2.1", 9)  # an address for documentation; nothing is sent there


def choose_advertised_address(config: BrokerConfig) -> AdvertisedAddress:
    """Choose the address of this broker that name servers and clients get.

    It is the first of these that exists: the setting brokerIP1, the address at which the broker
    listens if that is one address, the local address of a connection to a name server, an address
    of this machine that other machines can reach, and 127.0.0.1.
    """
    towards_name_server = None
    for address in config.name_server_addresses:
        towards_name_server = towards_name_server or find_local_address(parse_host(address))
    return choose_address(
        config.broker_ip1, config.bind_address, find_interface_addresses(), towards_name_server
    )


def find_local_address(host: Host) -> str | None:
    """Return the local IP address from which a connection to `host` would come.

    Return None if this machine has no route to `host`. No packet is sent.
    """
    family = socket.AF_INET6 if ":" in host.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.address, host.port))  # UDP: this only chooses the local address
            return str(probe.getsockname()[0])
    except OSError:
        return None


def find_interface_addresses() -> list[str]:
    """Return the IP addresses of this machine that can be found, without duplicates.

    First comes the local address of the default route, then the addresses to which the host name
    resolves. The machine may have further addresses. The list may be empty.
    """
    addresses: dict[str, None] = {}  # an ordered set
    default_address = find_local_address(_ANY_REMOTE)
    if default_address:
        addresses[default_address] = None
    with contextlib.suppress(OSError):
        for resolved in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            _, _, _, _, socket_address = resolved
            addresses.setdefault(str(socket_address[0]))
    return list(addresses)


def find_listening_addresses(bind_address: str) -> list[str]:
    """Return the addresses at which a server that is bound to `bind_address` can be reached."""
    if not is_wildcard(bind_address):
        return [bind_address]
    return list(dict.fromkeys([*find_interface_addresses(), "127.0.0.1"]))


def resolve_stored_host(address: str, port: int) -> Host:
    """Return the address and port that the broker writes into records and message ids.

    If `address` is a name, it is resolved to an IPv4 address first. Raises ConfigurationError if
    the name cannot be resolved.
    """
    try:
        encode_host(Host(address, port))
    except ValueError:
        try:
            address = socket.gethostbyname(address)
        except OSError as error:
            raise ConfigurationError(
                f"brokerIP1 = {address} is not an IP address and cannot be resolved ({error}).",
                fix="Set brokerIP1 to an IP address of this machine.",
            ) from error
    return Host(address, port)
