"""`sluice mqadmin`: RocketMQ's administration tool, with its commands and flags, without Java."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click

from sluicemq.cli.output import Access
from sluicemq.model.addresses import DEFAULT_NAME_SERVER


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [FLAGS]")
@click.pass_context
def mqadmin(context: click.Context, words: tuple[str, ...]) -> None:
    """Run a command of RocketMQ's mqadmin, with the same flags and output, without Java.

    `sluice mqadmin` lists the commands. `sluice mqadmin help COMMAND` lists the flags of one.
    """
    from sluicemq.client.sync.producer import Producer  # noqa: PLC0415 - not for `--help`
    from sluicemq.mqadmin.commands import Session, run  # noqa: PLC0415 - as above
    from sluicemq.mqadmin.table import COMMANDS  # noqa: PLC0415 - as above

    def write(text: str) -> None:
        click.echo(text, nl=False)

    @contextmanager
    def open_session(name_servers: str | None) -> Iterator[Session]:
        names = name_servers or os.environ.get("NAMESRV_ADDR", DEFAULT_NAME_SERVER)
        access = Access(
            names,
            os.environ.get("SLUICE_ACCESS_KEY") or os.environ.get("ROCKETMQ_ACCESS_KEY"),
            os.environ.get("SLUICE_SECRET_KEY") or os.environ.get("ROCKETMQ_SECRET_KEY"),
        )

        def make_producer() -> Producer:
            return Producer(names, credentials=access.credentials)

        with access.admin() as admin:
            yield Session(admin, make_producer, write)

    def write_error_line(line: str) -> None:
        click.echo(line, err=True)

    context.exit(run(COMMANDS, words, write, write_error_line, open_session))
