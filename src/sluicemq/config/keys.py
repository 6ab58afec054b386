"""The declaration of a setting, and the settings that all servers share: address, TLS, metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sluicemq.errors import ConfigurationError

INT_MAX: Final = 2**31 - 1


class Kind(StrEnum):
    """How the text of a value is parsed. The values describe the kinds in the documentation."""

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
    """The group of settings to which a key belongs."""

    BROKER = "broker"
    STORE = "store"
    NAME_SERVER = "name server"
    PROXY = "proxy"


class Key(NamedTuple):
    """A key of a configuration file, and the field of a dataclass that has its value.

    `choices` maps the words that a file may use to values of the field. `doc` is the text of the
    page on configuration. A key that is `live` can be changed while the server runs.
    """

    part: Part
    name: str
    field: str
    kind: Kind
    doc: str
    default: Any
    """The default value, or a function that returns it."""
    minimum: int = 0
    maximum: int = INT_MAX
    aliases: tuple[str, ...] = ()
    choices: tuple[tuple[str, object], ...] = ()
    live: bool = False
    is_secret: bool = False
    """Never shown: the response to GET_BROKER_CONFIG (26) has an empty value."""
    refused: tuple[tuple[str, str], ...] = ()
    """Words that RocketMQ accepts and SluiceMQ refuses, each with the fix."""
    clamped_to: tuple[int, int] | None = None
    """The range to which the value is clamped, as RocketMQ does (spec/store.md §9)."""


BOOLEAN = Kind.BOOLEAN
INTEGER = Kind.INTEGER
TEXT = Kind.TEXT
PATH = Kind.PATH
NAME = Kind.NAME
HOST = Kind.HOST
SERVERS = Kind.SERVERS
_KINDS: Final = {bool: BOOLEAN, int: INTEGER, tuple: Kind.LIST}


def setting(
    name: str,
    default: Any,
    doc: str,
    *,
    choices: Mapping[str, object] | tuple[str, ...] = (),
    kind: Kind | None = None,
    **key_fields: Any,
) -> Any:
    """Declare a field of a dataclass together with the key of the configuration file that sets it.

    `name` is the key. A `default` that is a function is called for each new object. `choices` are
    the valid words, or a dict from words to values. If `kind` is None, the kind follows from
    `choices` and the type of the default. `key_fields` are further fields of `Key`.
    """
    if kind is None:
        kind = Kind.CHOICE if choices else _KINDS.get(type(default), TEXT)
    meanings = choices if isinstance(choices, Mapping) else {word: word for word in choices}
    key = Key(
        Part.BROKER, name, "", kind, doc, default, choices=tuple(meanings.items()), **key_fields
    )
    metadata = {"key": key}
    is_shown = not key.is_secret
    if callable(default):
        return field(default_factory=default, metadata=metadata, repr=is_shown)
    return field(default=default, metadata=metadata, repr=is_shown)


class Origin(NamedTuple):
    """The source of settings. It does not take part in comparisons of settings."""

    written: Mapping[str, str] = MappingProxyType({})
    """Maps a path in which variables were replaced to the text of the file, which is shown."""
    command_line: frozenset[str] = frozenset()
    """Keys that the command line has set. It takes precedence over the file."""


def value_text(key: Key, value: Any, written: Mapping[str, str] = {}) -> str:
    """Return the text in a configuration file that is parsed as `value`; "" for None.

    `written` maps paths to the text of the file, for paths whose text contains variables.
    """
    if key.kind is Kind.CHOICE:
        return next(word for word, meaning in key.choices if meaning == value)
    if isinstance(value, tuple):
        return ";".join(written.get(item, item) for item in value)
    if key.kind is Kind.BOOLEAN:
        return "true" if value else "false"
    if value is None:
        return ""
    return written.get(str(value), str(value))


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """The TLS settings of a server.

    RocketMQ reads them from system properties of Java, and most of them from tls.config.file too.
    """

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
    """An account without an entry in a file. The servers of one `sluice up` sign with it."""

    access_key: str
    secret_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(TlsConfig):
    """The settings of every server: where it listens, who may connect, limits of connections."""

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
    """An account that is accepted in addition to those of plain_acl.yml. It has no key."""

    @property
    def listen_address(self) -> str:
        """The address to listen on: `bind_address`, or every address."""
        return self.bind_address or "0.0.0.0"

    @property
    def is_protected(self) -> bool:
        """Whether the server is in protected mode: it serves only clients on its machine."""
        is_mutual = self.tls_mode == "enforcing" and self.tls_client_auth == "require"
        return self.protected_mode and not (self.bind_address or self.acl_enable or is_mutual)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredConfig(ServerConfig):
    """The settings of servers that serve metrics or probes over HTTP."""

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
    """The settings of servers that can also push metrics by OTLP."""

    otlp_enable: bool = setting("sluiceOtlpEnable", False,
        "Metrics are also pushed by OTLP over HTTP (extra `otlp`), see "
        "[monitor](operate/monitor.md). Setting sluiceOtlpEndpoint has the same effect.")
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
        """Whether metrics are pushed by OTLP."""
        return self.otlp_enable or bool(self.otlp_endpoint)

    @property
    def otlp_headers_parsed(self) -> dict[str, str] | None:
        """The headers of OTLP pushes by name, or None if there are none.

        The setting has the form `name:value,name:value`. Raises ConfigurationError for a header
        without a colon or name.
        """
        headers = {}
        for pair in filter(None, self.otlp_headers.split(",")):
            name, colon, content = pair.partition(":")
            if not (colon and name.strip()):
                raise ConfigurationError(
                    "sluiceOtlpHeaders has a header without a colon.",
                    fix="Write name:value,name:value.",
                )
            headers[name.strip()] = content.strip()
        return headers or None
# fmt: on
