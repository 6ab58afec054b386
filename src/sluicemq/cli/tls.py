"""--tls and its relatives. Commands do not see them: the clients that a command makes take them up
by themselves (`net.tls.preset`), as they do the environment.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import click

from sluicemq.net.tls import VERIFY_WORDS, Tls, preset, tls_of_environment

F = TypeVar("F", bound=Callable[..., Any])
_FILE: Final = click.Path(exists=True, dir_okay=False)
_OPTIONS: Final = (
    click.option(
        "--tls-verify", type=click.Choice(list(VERIFY_WORDS)),
        help="What of a server's certificate is checked: full, ca (not the host name), none.",
    ),
    click.option("--tls-key", type=_FILE, help="PEM file of the key of --tls-certificate."),
    click.option(
        "--tls-certificate", type=_FILE,
        help="PEM file of the certificate to show to servers that want one.",
    ),
    click.option(
        "--tls-ca", type=_FILE,
        help="PEM file of the authorities to trust; without it those of the system.",
    ),
    click.option(
        "--tls/--no-tls", default=None,
        help="Speak TLS (SLUICE_TLS=true); also on with --tls-ca or --tls-certificate.",
    ),
)  # fmt: skip


def tls_options(function: F) -> F:
    """The options of TLS for a command that makes clients."""

    @functools.wraps(function)
    def with_tls(
        *args: Any,
        tls: bool | None,
        tls_ca: str | None,
        tls_certificate: str | None,
        tls_key: str | None,
        tls_verify: str | None,
        **options: Any,
    ) -> Any:
        given = {"ca": tls_ca, "certificate": tls_certificate, "key": tls_key}
        with preset(chosen_tls(tls, {k: v for k, v in given.items() if v}, tls_verify)):
            return function(*args, **options)

    decorated: Any = with_tls
    for option in _OPTIONS:
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def chosen_tls(wanted: bool | None, files: dict[str, str], verify: str | None) -> Tls | None:
    """What the options say, on top of the environment. Raises ConfigurationError."""
    base = tls_of_environment()
    if wanted is False or (wanted is None and base is None and not files.keys() - {"key"}):
        return None
    changes: dict[str, Any] = dict(files)
    if verify is not None:
        changes["verify"] = VERIFY_WORDS[verify]
    return replace(base or Tls(), **changes)
