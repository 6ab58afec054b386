"""`sluice console`: the console in the browser, and its accounts."""

import contextlib
import os
import sys
from typing import Any

import click

from sluicemq.cli.output import Access, client_options, json_option, print_records
from sluicemq.cli.servers.logs import log_options
from sluicemq.cli.servers.serve import run_servers
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.console.accounts import Accounts, Role
from sluicemq.errors import ConfigurationError, install_extra

PORT = 8082


def default_path() -> str:
    """Where the accounts are when nobody says otherwise."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return f"{base}/sluicemq/console.json"


accounts_option = click.option(
    "--accounts", "path", type=click.Path(dir_okay=False),
    help="File of the console's accounts (~/.config/sluicemq/console.json).",
)  # fmt: skip


@click.group(invoke_without_command=True)
@client_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=PORT, show_default=True,
    help="Port to listen at; 0 takes a free one.",
)  # fmt: skip
@click.option("--read-only", is_flag=True, help="Nobody changes anything, whatever the role.")
@accounts_option
@click.option(
    "--audit", type=click.Path(dir_okay=False), help="File for the audit log (else the log)."
)
@click.option(
    "--pipelines", multiple=True, type=click.Path(file_okay=False), envvar="SLUICE_PIPELINES",
    help="Directory of `sluice pipeline run --progress`; repeatable.",
)  # fmt: skip
@click.option(
    "--proxy", "proxies", multiple=True,
    help="Show which members came to the proxy at host:port; repeat for more.",
)  # fmt: skip
@log_options("console")
def console(
    access: Access,
    host: str,
    port: int,
    read_only: bool,
    path: str | None,
    audit: str | None,
    pipelines: tuple[str, ...],
    proxies: tuple[str, ...],
) -> None:
    """Show a cluster, ours or RocketMQ's, in the browser, until SIGTERM or Ctrl-C.

    It listens at 127.0.0.1; another address needs accounts. Without any, a link with a token that
    works once is printed. Options of the account are for what an account of the console asks.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    try:
        from sluicemq.console import app, serve  # noqa: PLC0415 - the extra may be missing
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the console needs the package {error.name}.", fix=install_extra("console")
        ) from error
    from sluicemq.client.aio.sluice import Sluice  # noqa: PLC0415 - not for `--help`
    from sluicemq.console.audit import AuditLog  # noqa: PLC0415

    def connect(credentials: tuple[str, str] | None) -> Sluice:
        return Sluice(
            access.name_servers,
            credentials=credentials or access.credentials,
            producer_group="CONSOLE_PRODUCER",
        )

    async def start(stack: contextlib.AsyncExitStack) -> str:
        made = app.Console(
            connect,
            Accounts(path or default_path()),
            audit=AuditLog(SYSTEM_CLOCK, audit or ""),
            is_read_only=read_only,
            pipelines=pipelines,
            proxies=proxies,
        )
        return f"console={await stack.enter_async_context(serve.run_server(made, host, port))}"

    run_servers(start)


@console.group("account")
def account() -> None:
    """Say who may sign in to the console, and what they may do."""


@account.command("add")
@click.argument("name")
@click.option(
    "--role", type=click.Choice([role.name.lower() for role in Role]), default="read",
    show_default=True, help="What it may do: look; also reset and resend; also create and delete.",
)  # fmt: skip
@click.option("--secret-stdin", is_flag=True, help="Read the secret from standard input.")
@accounts_option
def add(name: str, role: str, secret_stdin: bool, path: str | None) -> None:
    """Add the account NAME, or change its secret and role."""
    secret = (
        sys.stdin.readline().rstrip("\r\n")
        if secret_stdin
        else click.prompt("Secret", hide_input=True, confirmation_prompt=True)
    )
    accounts = Accounts(path or default_path())
    accounts.add(name, secret, Role.parse(role))
    click.echo(f"Account {name} may {role}; it is in {accounts.path}.")


@account.command("list")
@accounts_option
@json_option
def list_accounts(path: str | None, as_json: bool) -> None:
    """List names and roles."""
    known = Accounts(path or default_path()).load().values()
    records: list[dict[str, Any]] = [
        {"name": one.name, "role": one.role.name.lower()} for one in known
    ]
    print_records(records, as_json=as_json, empty="There is no account.")


@account.command("remove")
@click.argument("name")
@accounts_option
def remove(name: str, path: str | None) -> None:
    """Remove the account NAME; who is signed in with it is signed out."""
    Accounts(path or default_path()).remove(name)
    click.echo(f"Account {name} is removed.")
