"""What a client wants of TLS, as plain values, without OpenSSL: which authority it trusts, which
certificate it shows, what it verifies. The environment says it for programs that cannot be changed
(SLUICE_TLS and its relatives), and the command line for the length of one command (`preset`). What
a server wants is in its settings (`config.settings.TlsConfig`).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Literal

from sluicemq.config.settings import BrokerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.hints import with_hints

TLS_HINT: Final = "If the server demands TLS (tls.server.mode = enforcing): tls=True."
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"", "0", "false", "no", "off"})
VERIFY_WORDS: Final[Mapping[str, "Verify"]] = {"full": True, "ca": "ca", "none": False}

Verify = Literal[True, False, "ca"]


@with_hints
@dataclass(frozen=True, slots=True)
class Tls:
    """TLS of a client. All paths name PEM files.

    `ca`: certificates of the authorities that are trusted; None: those of the system.
    `certificate`, `key` (None: it is in the same file), `key_password`: for servers that want to
    know the client. `verify`: True checks chain and host name; "ca" the chain only, for brokers
    that register under addresses which their certificates do not name; False nothing, so that
    anybody may stand in between. `server_name`: the name that certificates must bear instead of
    the host that is dialled. Files are read again when they change.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    key_password: str | None = field(default=None, repr=False)
    verify: Verify = True
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else os.fspath(value))
        if self.verify not in (True, False, "ca"):
            raise ConfigurationError(
                f"verify = {self.verify!r} is not known.", fix='Give True, "ca" or False.'
            )
        if self.certificate is None and (self.key is not None or self.key_password is not None):
            raise ConfigurationError(
                "a TLS key is given without its certificate.", fix="Give certificate= too."
            )

    @classmethod
    def of(cls, value: "Tls | bool | None") -> "Tls | None":
        """True: TLS with the system's authorities; False: none; None: as the command line or the
        environment says. Raises ConfigurationError."""
        if isinstance(value, Tls):
            return value
        if value is None:
            chosen = _PRESET.get()
            return tls_of_environment() if chosen is None else chosen[0]
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"tls = {value!r} is not known.", fix="Give True, False or Tls(ca=…)."
            )
        return (tls_of_environment() or cls()) if value else None

    @property
    def files(self) -> tuple[str, ...]:
        """What it is read from."""
        names = (self.ca, self.certificate, self.key)
        return tuple(str(name) for name in names if name is not None)


_PRESET: ContextVar[tuple[Tls | None] | None] = ContextVar("tls", default=None)


@contextmanager
def preset(tls: Tls | None) -> Iterator[None]:
    """What `tls=None` means to clients that are made inside; for command lines."""
    token = _PRESET.set((tls,))
    try:
        yield
    finally:
        _PRESET.reset(token)


def tls_of_environment(environment: Mapping[str, str] | None = None) -> Tls | None:
    """SLUICE_TLS (true or false; naming a file below means true), SLUICE_TLS_CA,
    SLUICE_TLS_CERTIFICATE, SLUICE_TLS_KEY, SLUICE_TLS_KEY_PASSWORD, SLUICE_TLS_VERIFY (full, ca,
    none), SLUICE_TLS_SERVER_NAME. Raises ConfigurationError."""
    given = os.environ if environment is None else environment
    wanted = given.get("SLUICE_TLS", "").lower()
    if wanted not in _YES | _NO:
        raise ConfigurationError(f"SLUICE_TLS = {wanted} is not valid.", fix="Write true or false.")
    ca, certificate = given.get("SLUICE_TLS_CA"), given.get("SLUICE_TLS_CERTIFICATE")
    is_off = wanted in _NO and "SLUICE_TLS" in given
    if is_off or not (wanted in _YES or ca or certificate):
        return None
    verify = given.get("SLUICE_TLS_VERIFY") or "full"
    if verify not in VERIFY_WORDS:
        raise ConfigurationError(
            f"SLUICE_TLS_VERIFY = {verify} is not valid.", fix="Write full, ca or none."
        )
    return Tls(
        ca=ca or None,
        certificate=certificate or None,
        key=given.get("SLUICE_TLS_KEY") or None,
        key_password=given.get("SLUICE_TLS_KEY_PASSWORD") or None,
        verify=VERIFY_WORDS[verify],
        server_name=given.get("SLUICE_TLS_SERVER_NAME") or None,
    )


def broker_tls(config: BrokerConfig) -> Tls | None:
    """What a broker's settings say about its connections to name servers. As in Java, host names
    are not compared."""
    wanted = config.tls_dials == "true" or (
        config.tls_dials == "auto" and config.tls_mode == "enforcing"
    )
    if not wanted:
        return None
    return Tls(
        ca=config.tls_client_ca or None,
        certificate=config.tls_client_certificate or None,
        key=config.tls_client_key or None,
        key_password=config.tls_client_key_password or None,
        verify="ca" if config.tls_auth_server else False,
    )
