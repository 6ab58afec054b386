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
        "`permissive` serves TLS and plain connections on the same port, `enforcing` closes plain "
        "ones, `disabled` those that speak TLS.", choices=("permissive", "enforcing", "disabled"))
    tls_certificate: str = setting("tls.server.certPath", "",
        "PEM file with the certificate and intermediate ones. Read again when it changes.",
        kind=PATH)
    tls_key: str = setting("tls.server.keyPath", "",
        "PEM file with its private key. Default: the file of the certificate.", kind=PATH)
    tls_key_password: str = setting("tls.server.keyPassword", "",
        "Password of that key. Shown to nobody.", is_secret=True)
    tls_client_auth: str = setting("tls.server.need.client.auth", "none",
        "`require` lets in clients with a certificate only (mutual TLS), `optional` verifies "
        "those that show one. Both need tls.server.trustCertPath, unlike RocketMQ's.",
        choices=("none", "optional", "require"))
    tls_auth_client: bool = setting("tls.server.authClient", False,
        "RocketMQ verifies certificates of clients only with this; here they always are.")
    tls_ca: str = setting("tls.server.trustCertPath", "",
        "PEM file with the authorities that sign certificates of clients.", kind=PATH)
    tls_test_mode: bool = setting("tls.test.mode.enable", True,
        "Without a certificate one is made when the first client speaks TLS; nobody can verify "
        "it. RocketMQ ignores the certificate in this mode, here it is used.")
    tls_config_file: str = setting("tls.config.file", "",
        "Properties file with these keys, which wins over this one. Default: "
        "/etc/rocketmq/tls.properties, if it is there.", kind=PATH)
    origin: Origin = field(default=Origin(), compare=False, repr=False)


class InnerAccount(NamedTuple):
    """An account that is in no file: the servers of one `sluice up` sign with it."""

    access_key: str
    secret_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(TlsConfig):
    """Where brokers and name servers listen, and to whom."""

    bind_address: str = setting("bindAddress", "",
        "Address to listen at. Default: every one, in protected mode; `sluice up` uses 127.0.0.1 "
        "unless this or --host says otherwise.", kind=HOST)
    listen_port: int = 0
    protected_mode: bool = setting("sluiceProtectedMode", True,
        "Without bindAddress (or --host), aclEnable and mutual TLS (tls.server.mode = enforcing, "
        "tls.server.need.client.auth = require) only clients on this machine are served, see "
        "[security](security.md).")
    acl_enable: bool = setting("aclEnable", False,
        "Access control: every request needs an account of plain_acl.yml, see "
        "[security](security.md).")
    acl_files: tuple[str, ...] = setting("plainAclFile", (),
        "The file of accounts and permissions; of several the first that is there. Default: "
        "`plain_acl.yml` beside the file of `-c`, else in `$ROCKETMQ_HOME/conf`, else in `conf` "
        "below storePathRootDir.")
    acl_compatible: bool = setting("sluiceAclCompatible", False,
        "plain_acl.yml means what it means to RocketMQ 5, see [security](security.md). Without it "
        "what RocketMQ reads in silence as something else than it says refuses the file.")
    idle_timeout_s: int = setting("serverChannelMaxIdleTimeSeconds", 120,
        "A connection without traffic is closed after so many seconds.", minimum=1, maximum=86_400)
    connections_max: int = setting("sluiceConnectionsMax", 16_384,
        "More connections are closed at once.", minimum=1)
    connections_per_address_max: int = setting("sluiceConnectionsPerAddressMax", 1000,
        "More connections of one address are closed at once; 0 is no limit. Loopback has none.")
    frame_timeout_s: int = setting("sluiceFrameTimeoutSeconds", 60,
        "A connection whose frame is not complete after so many seconds is closed.",
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
        "Address of `/metrics`. Default: bindAddress; 127.0.0.1 in protected mode.", kind=HOST)
    metrics_port: int = setting("metricsPromExporterPort", 5557,
        "Port of `/metrics`. 0 takes a free port.", maximum=65_535)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedConfig(MeasuredConfig):
    """Of servers whose metrics leave by OTLP too."""

    otlp_enable: bool = setting("sluiceOtlpEnable", False,
        "Metrics are pushed by OTLP over HTTP too (extra `otlp`), see [operation](operation.md). "
        "sluiceOtlpEndpoint means it as well.")
    otlp_endpoint: str = setting("sluiceOtlpEndpoint", "",
        "Base URL of the collector, `http://HOST:4318`. Default: the variable "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.")
    otlp_headers: str = setting("sluiceOtlpHeaders", "",
        "Headers of each push, `name:value,name:value`. Shown to nobody. Default: the variable "
        "OTEL_EXPORTER_OTLP_HEADERS.", is_secret=True, aliases=("metricsGrpcExporterHeader",))
    otlp_interval_ms: int = setting("sluiceOtlpIntervalMs", 0,
        "Every so many ms. 0: the variable OTEL_METRIC_EXPORT_INTERVAL, else 60000.",
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
