"""How commands speak: tables for people, JSON lines for scripts; shared options of the clients.

With --json a command prints one JSON value a line on stdout and nothing else there. Errors go to
stderr as one sentence with its cure, exit code 1 (root group); wrong usage is click's 2.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import orjson

from sluicemq.cli.tls import tls_options
from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES, exposure, read_text

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_NAME_SERVER = "127.0.0.1:9876"


def client_options(function: F) -> F:
    """-n/--nameserver, credentials and TLS, for every command that talks to a cluster."""
    for option in (
        click.option(
            "--secret-key",
            envvar=["SLUICE_SECRET_KEY", "ROCKETMQ_SECRET_KEY"],
            help="Secret key; better from the environment (SLUICE_SECRET_KEY) or from tools.yml.",
        ),
        click.option(
            "--access-key",
            envvar=["SLUICE_ACCESS_KEY", "ROCKETMQ_ACCESS_KEY"],
            help="Access key; without it that of $ROCKETMQ_HOME/conf/tools.yml, as mqadmin does.",
        ),
        click.option(
            "-n",
            "--nameserver",
            "name_servers",
            envvar="NAMESRV_ADDR",
            default=DEFAULT_NAME_SERVER,
            show_default=True,
            help="Name servers, host:port;host:port.",
        ),
        tls_options,
    ):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")


def credentials(access_key: str | None, secret_key: str | None) -> tuple[str, str] | None:
    """The pair, or that of tools.yml, or None. Raises ConfigurationError when one half is
    missing."""
    if not access_key and not secret_key:
        return _tools_file()
    if bool(access_key) != bool(secret_key):
        raise ConfigurationError(
            "only one of access key and secret key is given.",
            cure="Give both: SLUICE_ACCESS_KEY and SLUICE_SECRET_KEY.",
        )
    return (access_key, secret_key) if access_key and secret_key else None


def _tools_file() -> tuple[str, str] | None:
    """What mqadmin signs with: accessKey and secretKey of $ROCKETMQ_HOME/conf/tools.yml."""
    home = os.environ.get("ROCKETMQ_HOME")
    path = f"{home}/conf/tools.yml"
    text = read_text(SYSTEM_FILES, path) if home else None
    if text is None:
        return None
    from sluicemq.acl.loading import load_credentials  # noqa: PLC0415 - rarely there

    warning = exposure(SYSTEM_FILES, path)
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    return load_credentials(text, path)


def print_json(value: Any) -> None:
    """One line."""
    sys.stdout.buffer.write(orjson.dumps(value, default=str, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A rich table on a terminal; without colour and full width when stdout is a pipe."""
    from rich.console import Console  # noqa: PLC0415 - 40 ms that other commands do not pay
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=title or None, title_justify="left")
    shown = [[_text(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        is_number = bool(shown) and all(_is_number(row[index]) for row in shown)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in shown:
        table.add_row(*map(escape, row))
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "0")) or 160
    Console(width=width, highlight=False).print(table)


def print_records(
    title: str, records: Sequence[Mapping[str, object]], *, as_json: bool, empty: str
) -> None:
    """Equal records as a table, or one JSON line each; `empty` is said when there is none."""
    if as_json:
        for record in records:
            print_json(dict(record))
    elif records:
        print_table(title, list(records[0]), [list(record.values()) for record in records])
    else:
        click.echo(empty, err=True)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace("-", "", 1).isdigit() or not text


def show_time(time_ms: int) -> str:
    """Milliseconds since 1970 as local time; empty for 0 and below."""
    if time_ms <= 0:
        return ""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).astimezone()
    return moment.isoformat(sep=" ", timespec="milliseconds")[:23]


def show_permission(perm: int) -> str:
    """Bits as text: `read, write`."""
    names = [name for bit, name in ((4, "read"), (2, "write"), (1, "inherit")) if perm & bit]
    return "+".join(names) or "none"
