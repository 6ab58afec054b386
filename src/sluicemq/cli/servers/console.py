"""`sluice console`: the web console, and its accounts."""

import contextlib
import os
import sys

import click

from sluicemq.cli.output import Access, client_options, json_option, print_records
from sluicemq.cli.servers.logs import log_options
from sluicemq.cli.servers.running import run_servers
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.console.accounts import Accounts, Role
from sluicemq.errors import ConfigurationError, install_extra

PORT = 8082


def default_accounts_path() -> str:
    """Return the path of the accounts file that is used without `--accounts`.

    It is sluicemq/console.json below $XDG_CONFIG_HOME, or below ~/.config.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 - the result is text
    return f"{base}/sluicemq/console.json"


accounts_option = click.option(
    "--accounts",
    "path",
    type=click.Path(dir_okay=False),
    help="File with the accounts of the console. Default: ~/.config/sluicemq/console.json.",
)


@click.group(invoke_without_command=True)
@client_options
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="IP address at which the console listens.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port at which the console listens. 0 takes a free port.",
)
@click.option(
    "--read-only", is_flag=True, help="Refuse all changes, whatever the role of an account."
)
@accounts_option
@click.option(
    "--audit",
    type=click.Path(dir_okay=False),
    help="File for the audit log. Default: the server's log.",
)
@click.option(
    "--pipelines",
    multiple=True,
    type=click.Path(file_okay=False),
    envvar="SLUICE_PIPELINES",
    help="Directory in which `sluice pipeline run --progress` records pipelines, which are shown. "
    "Repeat for more directories.",
)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    help="Also show the clients that are connected to the proxy at host:port. Repeat for more "
    "proxies.",
)
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
    """Serve a web console for a cluster of SluiceMQ or RocketMQ, until SIGTERM or Ctrl-C.

    Any address other than 127.0.0.1 requires accounts. Without accounts, a link is printed whose
    token can be used once. --access-key and --secret-key are the account with which the console
    sends its own requests to the cluster.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return  # this group is also the parent of `console account`
    try:
        from sluicemq.console import app, serve  # noqa: PLC0415 - optional packages
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the console needs the package {error.name}, which is not installed.",
            fix=install_extra("console"),
        ) from error
    from sluicemq.client.aio.sluice import Sluice  # noqa: PLC0415 - not for `--help`
    from sluicemq.console.audit import AuditLog  # noqa: PLC0415 - as above

    def connect(user_credentials: tuple[str, str] | None) -> Sluice:
        """Return a client of the cluster for a user, or for the console itself (None)."""
        return Sluice(
            access.name_servers,
            credentials=user_credentials or access.credentials,
            producer_group="CONSOLE_PRODUCER",
        )

    async def start(stack: contextlib.AsyncExitStack) -> str:
        """Serve the console until `stack` is closed, and return the line that says where."""
        web_console = app.Console(
            connect,
            Accounts(path or default_accounts_path()),
            audit=AuditLog(SYSTEM_CLOCK, audit or ""),
            is_read_only=read_only,
            pipelines=pipelines,
            proxies=proxies,
        )
        link = await stack.enter_async_context(serve.run_server(web_console, host, port))
        return f"console={link}"

    run_servers(start)


@console.group("account")
def account() -> None:
    """Manage the accounts that may sign in to the console."""


@account.command("add")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([role.name.lower() for role in Role]),
    default="read",
    show_default=True,
    help="What the account may do: read; operate, which includes resetting offsets and resending "
    "messages; admin, which includes creating and deleting.",
)
@click.option(
    "--secret-stdin",
    is_flag=True,
    help="Read the secret from standard input. Default: ask for it on the terminal.",
)
@accounts_option
def add(name: str, role: str, secret_stdin: bool, path: str | None) -> None:
    """Add the account NAME, or change its secret and role."""
    if secret_stdin:
        secret = sys.stdin.readline().rstrip("\r\n")
    else:
        secret = click.prompt("Secret", hide_input=True, confirmation_prompt=True)
    accounts = Accounts(path or default_accounts_path())
    accounts.add(name, secret, Role.parse(role))
    click.echo(f"Account {name} has the role {role}. It is stored in {accounts.path}.")


@account.command("list")
@accounts_option
@json_option
def list_accounts(path: str | None, as_json: bool) -> None:
    """List the names and roles of the accounts."""
    accounts = Accounts(path or default_accounts_path()).load().values()
    records = [{"name": account.name, "role": account.role.name.lower()} for account in accounts]
    print_records(records, as_json=as_json, empty="There are no accounts.")


@account.command("remove")
@click.argument("name")
@accounts_option
def remove(name: str, path: str | None) -> None:
    """Remove the account NAME, and end all sessions that use it."""
    Accounts(path or default_accounts_path()).remove(name)
    click.echo(f"Account {name} was removed.")
