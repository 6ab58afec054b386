"""How a broker makes itself known to its name servers: 103 and 104.

Pure decisions; `server.py` does the calls. Every name server hears of the broker at the start,
every registerNameServerPeriod, and at once when topics change. One that is not there is tried again
with growing pauses: said once in the log, and again when it is back (spec/namesrv.md §2, §3).
"""

import dataclasses
import json
import logging
import zlib
from typing import Final

from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import PERM_READ, PERM_WRITE, TopicConfig
from sluicemq.protocol import bodies
from sluicemq.protocol.codes import RequestCode
from sluicemq.protocol.command import Command
from sluicemq.protocol.headers import RegisterBrokerRequest, UnregisterBrokerRequest, encode_header
from sluicemq.protocol.signature import sign_command

log = logging.getLogger(__name__)

PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 10.0
READ_WRITE: Final = PERM_READ | PERM_WRITE


@dataclasses.dataclass(slots=True)
class NameServer:
    """What is known of one name server. `failures` counts those since it last answered."""

    address: str
    failures: int = 0
    is_known: bool = False
    next_try_s: float = 0.0


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

    def request(self) -> Command:
        """103 with every topic."""
        config = self._settings.broker
        body = bodies.encode_register_body(
            bodies.RegisterBody(bodies.TopicTable(self._registered(), self._topics.version))
        )
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
        header = UnregisterBrokerRequest(
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

    def _registered(self) -> dict[str, TopicConfig]:
        """A broker without read or write permission takes it from every topic of its routes."""
        allowed = self._settings.broker.broker_permission
        configs = self._topics.configs()
        if allowed & READ_WRITE == READ_WRITE:
            return configs
        return {
            name: dataclasses.replace(config, perm=config.perm & (allowed | ~READ_WRITE))
            for name, config in configs.items()
        }

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
        """Whom to tell now."""
        return [server for server in self.name_servers if server.next_try_s <= now_s]

    def wait_s(self, now_s: float) -> float:
        """How long nothing is due."""
        times = [server.next_try_s for server in self.name_servers]
        return max(min(times, default=now_s + 3600.0) - now_s, 0.0)
