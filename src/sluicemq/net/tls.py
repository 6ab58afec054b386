"""The TLS settings of a client, as plain values, without importing OpenSSL.

They say which authorities a client trusts, which certificate it shows, and what it verifies.
Programs that cannot be changed take them from the environment (SLUICE_TLS and the variables that
begin with it), and the command line sets them for the duration of one command (`default_tls`). The
settings of a server are in `config.settings.TlsConfig`.
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

TLS_HINT: Final = (
    "If the server requires TLS (tls.server.mode = enforcing), set tls=True (on the command line: "
    "--tls, or --tls-ca FILE)."
)
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"", "0", "false", "no", "off"})
VERIFY_MODES: Final[Mapping[str, "Verify"]] = {"full": True, "ca": "ca", "none": False}

Verify = Literal[True, False, "ca"]


@with_hints
@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings of a client. All paths name PEM files.

    The files are read again when they change. `ca` contains the certificates of the authorities
    that are trusted; None means those of the system. `certificate`, `key` (None if the
    certificate's file contains it) and `key_password` are for servers that require a client
    certificate.

    `verify` is True, "ca" or False. True verifies the certificate chain and the host name. "ca"
    verifies only the chain, for brokers that register with addresses that are not in their
    certificates. False verifies nothing, so an attacker may intercept the connection.
    `server_name` is the name that the server's certificate must contain, instead of the host that
    the client connects to.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    key_password: str | None = field(default=None, repr=False)
    verify: Verify = True
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, os.fspath(path))  # the class is frozen
        if self.verify not in (True, False, "ca"):
            raise ConfigurationError(
                f'verify must be True, "ca" or False, got {self.verify!r}.',
                fix="Set it to one of these values.",
            )
        has_key = self.key is not None or self.key_password is not None
        if has_key and self.certificate is None:
            raise ConfigurationError(
                "A TLS key is given without its certificate.", fix="Set certificate too."
            )

    @classmethod
    def resolve(cls, tls: "Tls | bool | None") -> "Tls | None":
        """Return the settings that the `tls` argument of a client means; None for no TLS.

        - True means TLS with the settings of the environment, or with the authorities of the
          system.
        - False means no TLS.
        - None means what the block of `default_tls` says, or else the environment.

        Raise ConfigurationError for another value, or for an invalid environment variable.
        """
        if isinstance(tls, Tls):
            return tls
        if tls is None:
            default = _DEFAULT.get()
            if default is None:
                return tls_from_environment()
            (default_settings,) = default
            return default_settings
        if not isinstance(tls, bool):
            raise ConfigurationError(
                f"tls must be True, False or a Tls, got {tls!r}.",
                fix="Set True, False or Tls(ca=…).",
            )
        if not tls:
            return None
        return tls_from_environment() or cls()

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of all files that the settings name."""
        names = (self.ca, self.certificate, self.key)
        return tuple(str(name) for name in names if name is not None)


_DEFAULT: ContextVar[tuple[Tls | None] | None] = ContextVar("tls", default=None)
"""The settings of `default_tls`, in a tuple; None outside of its blocks."""


@contextmanager
def default_tls(tls: Tls | None) -> Iterator[None]:
    """Use `tls` for clients that are created with `tls=None` inside the block.

    None means that they use no TLS.
    """
    token = _DEFAULT.set((tls,))
    try:
        yield
    finally:
        _DEFAULT.reset(token)


def tls_from_environment(environment: Mapping[str, str] | None = None) -> Tls | None:
    """Return the TLS settings in environment variables; None if they ask for no TLS.

    `environment` None means the variables of the process. SLUICE_TLS is true or false; if it is not
    set, a SLUICE_TLS_CA or SLUICE_TLS_CERTIFICATE means true. The others are SLUICE_TLS_KEY,
    SLUICE_TLS_KEY_PASSWORD, SLUICE_TLS_VERIFY (full, ca or none) and SLUICE_TLS_SERVER_NAME. Raise
    ConfigurationError if a value is invalid.
    """
    variables = os.environ if environment is None else environment
    if not _is_tls_on(variables):
        return None
    verify = variables.get("SLUICE_TLS_VERIFY") or "full"
    if verify not in VERIFY_MODES:
        raise ConfigurationError(
            f"SLUICE_TLS_VERIFY must be full, ca or none, got {verify}.",
            fix="Set it to one of these values.",
        )
    return Tls(
        ca=variables.get("SLUICE_TLS_CA") or None,
        certificate=variables.get("SLUICE_TLS_CERTIFICATE") or None,
        key=variables.get("SLUICE_TLS_KEY") or None,
        key_password=variables.get("SLUICE_TLS_KEY_PASSWORD") or None,
        verify=VERIFY_MODES[verify],
        server_name=variables.get("SLUICE_TLS_SERVER_NAME") or None,
    )


def _is_tls_on(variables: Mapping[str, str]) -> bool:
    """Return whether the environment variables ask for TLS.

    If SLUICE_TLS is not set, a file of authorities or a certificate means TLS. Raise
    ConfigurationError if SLUICE_TLS is invalid.
    """
    switch = variables.get("SLUICE_TLS", "").lower()
    if switch not in _YES | _NO:
        raise ConfigurationError(
            f"SLUICE_TLS must be true or false, got {switch}.", fix="Set it to true or false."
        )
    if switch in _YES:
        return True
    if "SLUICE_TLS" in variables:
        return False
    return bool(variables.get("SLUICE_TLS_CA") or variables.get("SLUICE_TLS_CERTIFICATE"))


def broker_client_tls(config: BrokerConfig) -> Tls | None:
    """Return the TLS settings for the connections that a broker opens, for example to name servers.

    Return None if they use no TLS. Host names are not verified, as in RocketMQ.
    """
    is_wanted = config.tls_dials == "true" or (
        config.tls_dials == "auto" and config.tls_mode == "enforcing"
    )
    if not is_wanted:
        return None
    return Tls(
        ca=config.tls_client_ca or None,
        certificate=config.tls_client_certificate or None,
        key=config.tls_client_key or None,
        key_password=config.tls_client_key_password or None,
        verify="ca" if config.tls_auth_server else False,
    )
