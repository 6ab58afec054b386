"""The group of all commands, which imports a command's module when it is called.

A module holds its click command under the name `command`. Errors of ours become one sentence with
its cure on stderr and exit code 1; wrong usage is click's exit code 2.
"""

import importlib
from typing import Any, Final, NamedTuple

import click

from sluicemq.errors import SluiceError


class Entry(NamedTuple):
    """Where a command lives, and its line in `sluice --help`."""

    module: str
    attribute: str
    summary: str


COMMANDS: Final = {
    "up": Entry("serve", "up", "Run a name server and a broker in one process."),
    "nameserver": Entry("serve", "nameserver", "Run a name server."),
    "broker": Entry("serve", "broker", "Run a broker."),
    "produce": Entry("produce", "command", "Send messages."),
    "consume": Entry("consume", "command", "Receive messages."),
    "message": Entry("message", "command", "Find stored messages by key or id."),
    "trace": Entry("trace", "command", "Show what happened to a message."),
    "transaction": Entry("transaction", "command", "Undecided transactions: list and decide them."),
    "topic": Entry("topic", "command", "List, create and show topics."),
    "group": Entry("group", "command", "List, create, show and move consumer groups."),
    "consumer": Entry("consumer", "command", "Show what consumers do now."),
    "delay": Entry("delay", "command", "List and cancel delayed messages."),
    "cluster": Entry("cluster", "command", "Show the brokers of a cluster."),
    "sql": Entry("sql", "command", "Query topics, archives, dead letters and traces with SQL."),
    "explain": Entry("explain", "command", "Say why a message or a group is where it is."),
    "filter": Entry("filter", "command", "Check and try filter expressions."),
    "pipeline": Entry("pipeline", "command", "Data pipelines on Spark: run, check, list."),
    "acl": Entry("acl", "command", "Access rules: try them, check them, see how they stand."),
    "store": Entry("store", "command", "Look into a store directory, without a broker."),
}


class LazyGroup(click.Group):
    """A group that knows the names of its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"sluicemq.cli.{entry.module}")
        command = getattr(module, entry.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SluiceError as error:
            click.echo(f"sluice: {error}", err=True)
            ctx.exit(1)


def _show_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from sluicemq import __version__  # noqa: PLC0415 - rarely asked for

        click.echo(f"sluice {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and leave.",
)  # fmt: skip
def main() -> None:
    """SluiceMQ: a RocketMQ-compatible message system in Python."""
