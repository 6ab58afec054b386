"""The command `sluice`: one module a group of commands, imported when it is used.

`sluice up` has to be ready in half a second and to stay small, so nothing here may import rich,
lark or pyarrow before a command needs it. How commands end: `ending`.
"""

import importlib
import io
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

try:
    import click

    from sluicemq import __version__
    from sluicemq.cli import ending
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    from sluicemq.errors import install_extra

    raise SystemExit(
        f"The command sluice needs more than the client. {install_extra('server')}"
    ) from None
except KeyboardInterrupt:  # `ending` handles those that come later
    sys.stderr.write("sluice: interrupted.\n")
    raise SystemExit(130) from None


class Entry(NamedTuple):
    """Where a command lives, and its line in `sluice --help`."""

    module: str
    attribute: str
    summary: str


COMMANDS: Final = {
    "up": Entry("servers.serve", "up", "Run a name server and a broker in one process."),
    "nameserver": Entry("servers.serve", "nameserver", "Run a name server."),
    "broker": Entry("servers.serve", "broker", "Run a broker."),
    "proxy": Entry("servers.serve", "proxy", "Run a proxy for gRPC clients; look at one."),
    "console": Entry("servers.console", "console", "Show a cluster in the browser."),
    "mcp": Entry("servers.mcp", "mcp", "Answer an assistant's questions (Model Context Protocol)."),
    "produce": Entry("traffic", "produce", "Send messages."),
    "consume": Entry("traffic", "consume", "Receive messages."),
    "message": Entry("message", "message", "Find stored messages by key or id."),
    "trace": Entry("message", "trace", "Show what happened to a message."),
    "transaction": Entry("message", "transaction", "List and decide undecided transactions."),
    "topic": Entry("topic", "topic", "List, create and show topics."),
    "group": Entry("group", "group", "List, create, show and move consumer groups."),
    "consumer": Entry("group", "consumer", "Show what consumers do now."),
    "delay": Entry("message", "delay", "List and cancel delayed messages."),
    "cluster": Entry("cluster", "cluster", "Show brokers and their replicas; switch the master."),
    "mqadmin": Entry("mqadmin", "mqadmin", "Run RocketMQ's mqadmin, without Java."),
    "sql": Entry("spark", "sql", "Query topics, archives, dead letters and traces with SQL."),
    "doctor": Entry("explain", "doctor", "Say what is wrong with a cluster, and what cures it."),
    "explain": Entry("explain", "explain", "Say why a message or a group is where it is."),
    "filter": Entry("filter", "filter_group", "Check and try filter expressions."),
    "pipeline": Entry("spark", "pipeline", "Run, check and list data pipelines on Spark."),
    "acl": Entry("acl", "acl", "Try and check access rules; see how they stand."),
    "store": Entry("store", "store", "Look into a store directory, without a broker."),
    "quickstart": Entry("quickstart", "quickstart", "Write a project that runs, to begin with."),
    "install-names": Entry(
        "servers.names", "install_names", "Write mqbroker, mqadmin and the like."
    ),
    "completion": Entry("completion", "completion", "Print what completes commands in a shell."),
}


class LazyGroup(click.Group):
    """A group that knows the names of its commands in other modules without importing these."""

    entries: Mapping[str, Entry] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.entries]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        with ending.importing():
            module = importlib.import_module(f"sluicemq.cli.{entry.module}")
        command = getattr(module, entry.attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from sluicemq.hints import did_you_mean  # noqa: PLC0415 - only a wrong name needs it

            hint = did_you_mean(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}. {hint}".rstrip())
        return super().resolve_command(ctx, args)


class _Main(LazyGroup):
    entries = COMMANDS

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """As a program, which Ctrl-C ends in order."""
        ending.run(lambda: self.main(*args, **kwargs))

    def main(self, *args: Any, **extra: Any) -> None:  # type: ignore[override]
        """Raises SystemExit."""
        for stream in (sys.stdout, sys.stderr):  # names of files and topics can be no UTF-8
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with ending.speaking(extra.get("prog_name") or "sluice"):
            code = super().main(*args, **extra | {"standalone_mode": False})
        raise SystemExit(code or 0)

    def invoke(self, ctx: click.Context) -> Any:
        with ending.interruptible(ctx):
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # else the interpreter finds that nobody reads it


def _say_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        from sluicemq import engine  # noqa: PLC0415 - only who asks loads it

        click.echo(f"sluice {__version__} ({engine.NAME} engine)")
        ctx.exit()


@click.group("sluice", cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_say_version,
    help="Show the version and the engine of the hot path, and leave.",
)  # fmt: skip
def main() -> None:
    """SluiceMQ: a RocketMQ-compatible message system in Python."""
