"""`sluice mqadmin`: RocketMQ's administration tool, with its commands and flags, without Java."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from sluicemq.cli.output import Access
from sluicemq.model.addresses import DEFAULT_NAME_SERVER

if TYPE_CHECKING:
    from sluicemq.mqadmin.commands import Session


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [FLAGS]")
@click.pass_context
def mqadmin(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Run a command of RocketMQ's mqadmin, with the same flags and output, without Java.

    `sluice mqadmin` lists the commands. `sluice mqadmin help COMMAND` lists the flags of one.
    """
    from sluicemq.mqadmin.commands import run  # noqa: PLC0415 - not for `--help`
    from sluicemq.mqadmin.table import COMMANDS  # noqa: PLC0415 - as above

    context.exit(run(COMMANDS, arguments, _write, _write_error_line, _open_session))


def _write(output: str) -> None:
    """Write output of a command to stdout, without a line end."""
    click.echo(output, nl=False)


def _write_error_line(line: str) -> None:
    """Write a line to stderr."""
    click.echo(line, err=True)


@contextmanager
def _open_session(name_servers: str | None) -> "Iterator[Session]":
    """Return a context manager that connects to a cluster; its value is a `Session`.

    `name_servers` are the addresses of its name servers. None means those of the environment
    variable NAMESRV_ADDR, or the local one. The environment also has the access key and the secret
    key.
    """
    from sluicemq.client.sync.producer import Producer  # noqa: PLC0415 - not for `--help`
    from sluicemq.mqadmin.commands import Session  # noqa: PLC0415 - as above

    addresses = name_servers or os.environ.get("NAMESRV_ADDR", DEFAULT_NAME_SERVER)
    access = Access(
        addresses,
        os.environ.get("SLUICE_ACCESS_KEY") or os.environ.get("ROCKETMQ_ACCESS_KEY"),
        os.environ.get("SLUICE_SECRET_KEY") or os.environ.get("ROCKETMQ_SECRET_KEY"),
    )

    def make_producer() -> Producer:
        return Producer(addresses, credentials=access.credentials)

    with access.admin() as admin:
        yield Session(admin, make_producer, _write)
