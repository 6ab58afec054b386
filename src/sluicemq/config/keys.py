"""How a setting is declared, and what all servers have: where they listen, TLS, metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sluicemq.errors import ConfigurationError

INT_MAX: Final = 2**31 - 1


class Kind(StrEnum):
    """How the text of a value is read."""

    BOOLEAN = "true or false"
    INTEGER = "whole number"
    TEXT = "text"
    NAME = "letters, digits and _ - . %"
    HOST = "address or host name"
    SERVERS = "host:port, separated by ;"
    PATH = "path"
    LIST = "list separated by ;"
    CHOICE = "one of a few words"


class Part(StrEnum):
    """Which settings a key belongs to."""

    BROKER = "broker"
    STORE = "store"
    NAME_SERVER = "name server"
    PROXY = "proxy"


class Key(NamedTuple):
    """One key. `choices` maps the words of a file to the value of the field."""

    part: Part
    name: str
    field: str
    kind: Kind
    doc: str
    default: Any
    """The value, or a function that finds it."""
    minimum: int = 0
    maximum: int = INT_MAX
    aliases: tuple[str, ...] = ()
    choices: tuple[tuple[str, object], ...] = ()
    live: bool = False
    is_secret: bool = False
    """Shown to nobody: request 26 answers it empty."""
    refused: tuple[tuple[str, str], ...] = ()
    """Words of RocketMQ's that mean nothing here, with what to write instead."""
    taken_as: tuple[int, int] | None = None
    """Limits that the value is brought into, as the real broker does (spec/store.md §9)."""


BOOLEAN, INTEGER, TEXT, PATH = Kind.BOOLEAN, Kind.INTEGER, Kind.TEXT, Kind.PATH
NAME, HOST, SERVERS = Kind.NAME, Kind.HOST, Kind.SERVERS
_KINDS: Final = {bool: BOOLEAN, int: INTEGER, tuple: Kind.LIST}


def setting(
    name: str,
    default: Any,
    doc: str,
    *,
    choices: Mapping[str, object] | tuple[str, ...] = (),
    kind: Kind | None = None,
    **rest: Any,
) -> Any:
    """A field with its key. The kind follows from the default where it is not given; a default that
    can be called makes it. `rest`: further fields of `Key`."""
    if kind is None:
        kind = Kind.CHOICE if choices else _KINDS.get(type(default), TEXT)
    pairs = choices if isinstance(choices, Mapping) else {word: word for word in choices}
    key = Key(Part.BROKER, name, "", kind, doc, default, choices=tuple(pairs.items()), **rest)
    how = {"default_factory" if callable(default) else "default": default}
    return field(**how, metadata={"key": key}, repr=not key.is_secret)


class Origin(NamedTuple):
    """Where settings come from: nothing that the settings themselves depend on."""

    written: Mapping[str, str] = MappingProxyType({})
    """Path with its variables replaced -> as the file writes it, which is what answers show."""
    command_line: frozenset[str] = frozenset()
    """Keys that the command line set, which wins over the file."""


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """What brokers and name servers serve TLS with. RocketMQ takes it as system properties of Java,
    most of it from tls.config.file too."""

    tls_mode: str = setting("tls.server.mode", "permissive",
        "`permissive` serves TLS and plaintext connections on the same port, `enforcing` closes "
        "plaintext connections, `disabled` closes TLS connections.",
        choices=("permissive", "enforcing", "disabled"))
    tls_certificate: str = setting("tls.server.certPath", "",
        "PEM file with the certificate of the server and intermediate certificates. Read again "
        "when it changes.",
        kind=PATH)
    tls_key: str = setting("tls.server.keyPath", "",
        "PEM file with the private key for tls.server.certPath. Default: the same file.", kind=PATH)
    tls_key_password: str = setting("tls.server.keyPassword", "",
        "Password of tls.server.keyPath. Never shown.", is_secret=True)
    tls_client_auth: str = setting("tls.server.need.client.auth", "none",
        "`require` accepts only clients with a certificate (mutual TLS), `optional` verifies the "
        "certificates of clients that present one. Unlike in RocketMQ, both need "
        "tls.server.trustCertPath.",
        choices=("none", "optional", "require"))
    tls_auth_client: bool = setting("tls.server.authClient", False,
        "RocketMQ verifies certificates of clients only if this is true. SluiceMQ always verifies "
        "them.")
    tls_ca: str = setting("tls.server.trustCertPath", "",
        "PEM file with the authorities that sign the certificates of clients.", kind=PATH)
    tls_test_mode: bool = setting("tls.test.mode.enable", True,
        "If there is no certificate, the server creates one when the first client uses TLS. "
        "Clients cannot verify it. RocketMQ ignores a configured certificate in this mode, "
        "SluiceMQ uses it.")
    tls_config_file: str = setting("tls.config.file", "",
        "Properties file with the tls.* keys, which takes precedence over this file. Default: "
        "/etc/rocketmq/tls.properties, if it exists.", kind=PATH)
    origin: Origin = field(default=Origin(), compare=False, repr=False)


class InnerAccount(NamedTuple):
    """An account that is in no file: the servers of one `sluice up` sign with it."""

    access_key: str
    secret_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(TlsConfig):
    """Where brokers and name servers listen, and to whom."""

    bind_address: str = setting("bindAddress", "",
        "Address to listen on. Default: all addresses, in protected mode. `sluice up` uses "
        "127.0.0.1 unless this or --host is set.", kind=HOST)
    listen_port: int = 0
    protected_mode: bool = setting("sluiceProtectedMode", True,
        "Only clients on the same machine are served, unless one of these is set: bindAddress (or "
        "--host), aclEnable, or mutual TLS (tls.server.mode = enforcing and "
        "tls.server.need.client.auth = require). See [security](security.md).")
    acl_enable: bool = setting("aclEnable", False,
        "Access control: every request needs an account of plain_acl.yml. See "
        "[security](security.md).")
    acl_files: tuple[str, ...] = setting("plainAclFile", (),
        "Files with accounts and permissions, of which the first that exists is used. Default: "
        "`plain_acl.yml` in the directory of the file given by `-c`, then in "
        "`$ROCKETMQ_HOME/conf`, then in `conf` below storePathRootDir.")
    acl_compatible: bool = setting("sluiceAclCompatible", False,
        "plain_acl.yml means exactly what it means to RocketMQ 5, see [security](security.md). If "
        "false, a file that RocketMQ would silently understand in another way than it reads is "
        "refused.")
    idle_timeout_s: int = setting("serverChannelMaxIdleTimeSeconds", 120,
        "Time after which a connection without traffic is closed, in seconds.",
        minimum=1, maximum=86_400)
    connections_max: int = setting("sluiceConnectionsMax", 16_384,
        "Maximum number of connections. Further connections are closed at once.", minimum=1)
    connections_per_address_max: int = setting("sluiceConnectionsPerAddressMax", 1000,
        "Maximum number of connections from one address. Further connections are closed at once. "
        "0 means no limit. Loopback addresses have no limit.")
    frame_timeout_s: int = setting("sluiceFrameTimeoutSeconds", 60,
        "Time after which a connection is closed if its current frame is still incomplete, in "
        "seconds.",
        minimum=1, maximum=86_400)

    inner_account: InnerAccount | None = field(default=None, compare=False, repr=False)
    """Accepted beside the accounts of plain_acl.yml; no setting."""

    @property
    def listen_address(self) -> str:
        return self.bind_address or "0.0.0.0"

    @property
    def is_protected(self) -> bool:
        """Serves this machine alone: nobody has said who else may come."""
        is_mutual = self.tls_mode == "enforcing" and self.tls_client_auth == "require"
        return self.protected_mode and not (self.bind_address or self.acl_enable or is_mutual)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredConfig(ServerConfig):
    """Of servers with metrics."""

    metrics_enable: bool = setting("metricsExporterType", True,
        "PROM serves `/metrics`. **Differs from RocketMQ, where the default is DISABLE.**",
        choices={"PROM": True, "DISABLE": False}, refused=(
            ("OTLP_GRPC", "Write sluiceOtlpEndpoint = http://HOST:4318 instead: OTLP leaves by "
             "HTTP, beside PROM or DISABLE; gRPC is not offered."),))
    metrics_host: str = setting("metricsPromExporterHost", "",
        "Address of `/metrics`. Default: bindAddress, or 127.0.0.1 in protected mode.", kind=HOST)
    metrics_port: int = setting("metricsPromExporterPort", 5557,
        "Port of `/metrics`. 0 takes a free port.", maximum=65_535)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedConfig(MeasuredConfig):
    """Of servers whose metrics leave by OTLP too."""

    otlp_enable: bool = setting("sluiceOtlpEnable", False,
        "Metrics are also pushed by OTLP over HTTP (extra `otlp`), see [operation](operation.md). "
        "Setting sluiceOtlpEndpoint has the same effect.")
    otlp_endpoint: str = setting("sluiceOtlpEndpoint", "",
        "Base URL of the OTLP collector, `http://HOST:4318`. Default: the environment variable "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.")
    otlp_headers: str = setting("sluiceOtlpHeaders", "",
        "Headers of each OTLP push, `name:value,name:value`. Never shown. Default: the "
        "environment variable OTEL_EXPORTER_OTLP_HEADERS.",
        is_secret=True, aliases=("metricsGrpcExporterHeader",))
    otlp_interval_ms: int = setting("sluiceOtlpIntervalMs", 0,
        "Interval of OTLP pushes, in ms. 0 means the environment variable "
        "OTEL_METRIC_EXPORT_INTERVAL, else 60000.",
        aliases=("metricGrpcExporterIntervalInMills",))

    @property
    def is_pushed(self) -> bool:
        return self.otlp_enable or bool(self.otlp_endpoint)

    @property
    def otlp_headers_parsed(self) -> dict[str, str] | None:
        """By name. Raises ConfigurationError."""
        found = {}
        for pair in filter(None, self.otlp_headers.split(",")):
            name, colon, value = pair.partition(":")
            if not (colon and name.strip()):
                raise ConfigurationError(
                    "sluiceOtlpHeaders has a header without a colon.",
                    fix="Write name:value,name:value.",
                )
            found[name.strip()] = value.strip()
        return found or None
# fmt: on
