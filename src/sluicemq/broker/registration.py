"""How a broker makes itself known to its name servers: 103 and 104.

Pure decisions; `server.py` does the calls. Every name server hears of all topics (103) at the start
and every registerNameServerPeriod, and at once of those that change (217). RocketMQ says those in a
103 that holds nothing else; a name server with deleteTopicWithBrokerRegistration then forgets all
others. One that is not there is tried again with growing pauses: said once in the log, and again
when it is back (spec/namesrv.md §2, §3).
"""

import dataclasses
import json
import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import Final

from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import (
    PERM_READ,
    PERM_WRITE,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import BrokerRequest, RegisterBrokerRequest, TopicRequest
from sluicemq.wire.signature import sign_command

log = logging.getLogger(__name__)

PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 10.0
CHANGES_MAX: Final = 16
"""Of more topics at once all are told."""
READ_WRITE: Final = PERM_READ | PERM_WRITE


@dataclasses.dataclass(slots=True)
class NameServer:
    """What is known of one name server. `failures` counts those since it last answered."""

    address: str
    failures: int = 0
    is_known: bool = False
    next_try_s: float = 0.0
    changes: set[str] = dataclasses.field(default_factory=set)
    """Topics that have changed since it was last told."""
    takes_topics: bool = True
    """Whether it knows 217, as those of 5.x and ours."""


def credentials_of(text: str) -> tuple[str, str] | None:
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
            cure='Write {"accessKey":"…","secretKey":"…"}.',
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
        self._fields = fields
        self._credentials = credentials_of(settings.broker.inner_credentials)
        self.name_servers = [NameServer(name) for name in settings.broker.name_server_addresses]

    def begin(self, server: NameServer) -> Callable[[], Command]:
        """What makes the request (103) with every topic of now, in whatever thread."""
        server.changes = set()
        return partial(self._request, self._topics.configs(), self._topics.version)

    def _request(self, configs: dict[str, TopicConfig], version: DataVersion) -> Command:
        config = self._settings.broker
        topics = {name: self._registered(topic) for name, topic in configs.items()}
        body = bodies.encode_register_body(bodies.RegisterBody(bodies.TopicTable(topics, version)))
        header = RegisterBrokerRequest(
            broker=config.broker_name,
            address=self.address,
            cluster=config.cluster_name,
            ha_address=self._ha_address(),
            broker_id=config.broker_id,
            acting_master_enable=False,
            compressed=False,
            body_crc32=zlib.crc32(body) & 0x7FFFFFFF,
        )
        fields = encode_header(header) | self._fields
        return self._signed(Command(RequestCode.REGISTER_BROKER, fields, body))

    def farewell(self) -> Command:
        """104."""
        config = self._settings.broker
        header = BrokerRequest(
            broker=config.broker_name,
            address=self.address,
            cluster=config.cluster_name,
            broker_id=config.broker_id,
        )
        return self._signed(Command(RequestCode.UNREGISTER_BROKER, encode_header(header)))

    def _signed(self, command: Command) -> Command:
        """For name servers with access control."""
        if self._credentials is not None:
            sign_command(command, *self._credentials)
        return command

    def _ha_address(self) -> str:
        host, _, port = self.address.rpartition(":")
        return f"{self._settings.broker.broker_ip2 or host}:{int(port) + 1}"

    def _registered(self, config: TopicConfig) -> TopicConfig:
        """A broker without read or write permission takes it from every topic of its routes."""
        allowed = self._settings.broker.broker_permission
        if allowed & READ_WRITE == READ_WRITE:
            return config
        return dataclasses.replace(config, perm=config.perm & (allowed | ~READ_WRITE))

    # ---------------------------------------------------------------------------- what changes

    def topic_changed(self, name: str) -> None:
        for server in self.name_servers:
            server.changes.add(name)

    def all_due(self) -> None:
        """What stands in all routes has changed."""
        for server in self.name_servers:
            if not server.failures:
                server.next_try_s = 0.0

    @property
    def changed(self) -> list[NameServer]:
        """Who does not know of the last changes. One that is not there is told when it is."""
        return [server for server in self.name_servers if server.changes and not server.failures]

    def take_changes(self, server: NameServer) -> list[Command]:
        """217 of each topic that has changed. One that is deleted stays in the routes until the
        tool takes it out there (216), as with RocketMQ."""
        names, server.changes = server.changes, set()
        return [
            self._topic_request(topic.config) for topic in map(self._topics.get, names) if topic
        ]

    def _topic_request(self, config: TopicConfig) -> Command:
        known = self._registered(config)
        queues = QueueData(
            self._settings.broker.broker_name, known.read_queues, known.write_queues, known.perm,
            known.sys_flag,
        )  # fmt: skip
        fields = encode_header(TopicRequest(topic=config.name))
        body = bodies.encode_topic_route(TopicRoute((), (queues,)))
        return self._signed(Command(RequestCode.REGISTER_TOPIC_IN_NAMESRV, fields, body))

    # ------------------------------------------------------------------------ what came of it

    def answered(self, server: NameServer, answer: Command, now_s: float) -> None:
        """The name server took it."""
        if server.failures:
            log.info("name server %s is there again; registered", server.address)
        elif not server.is_known:
            log.info("registered with name server %s as %s", server.address, self.address)
        server.is_known = True
        server.failures = 0
        server.next_try_s = now_s + self._settings.broker.register_period_ms / 1000
        if answer.body:
            self._topics.mark_order(bodies.decode_kv_table(answer.body))

    def failed(self, server: NameServer, error: Exception, now_s: float) -> None:
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

    def due(self, now_s: float) -> list[NameServer]:
        """Whom to tell of all topics now."""
        return [
            server for server in self.name_servers
            if server.next_try_s <= now_s
            or (len(server.changes) > CHANGES_MAX and not server.failures)
        ]  # fmt: skip

    def wait_s(self, now_s: float) -> float:
        """How long nothing is due."""
        times = [server.next_try_s for server in self.name_servers]
        return max(min(times, default=now_s + 3600.0) - now_s, 0.0)
