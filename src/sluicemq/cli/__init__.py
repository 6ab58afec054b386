"""The command `sluice`. Each group of commands is a module, which is imported when it is used.

`sluice up` must be ready within half a second and use little memory. So no module of this package
may import rich, lark or pyarrow before a command needs it. `ending` defines how commands end.
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
        f"The command sluice needs packages that are not installed. {install_extra('server')}"
    ) from None
except KeyboardInterrupt:  # `ending` handles an interrupt after these imports
    sys.stderr.write("sluice: interrupted.\n")
    raise SystemExit(130) from None


class CommandEntry(NamedTuple):
    """The location of a command, and its line in `sluice --help`."""

    module: str
    """The module below `sluicemq.cli`."""
    attribute: str
    """The name of the command in that module."""
    summary: str


COMMANDS: Final = {
    "up": CommandEntry("servers.serve", "up", "Run a name server and a broker in one process."),
    "nameserver": CommandEntry("servers.serve", "nameserver", "Run a name server."),
    "broker": CommandEntry("servers.serve", "broker", "Run a broker."),
    "proxy": CommandEntry("servers.serve", "proxy", "Run a proxy for gRPC clients."),
    "console": CommandEntry("servers.console", "console", "Serve the web console of a cluster."),
    "mcp": CommandEntry("servers.mcp", "mcp", "Serve an AI assistant (Model Context Protocol)."),
    "produce": CommandEntry("traffic", "produce", "Send messages."),
    "consume": CommandEntry("traffic", "consume", "Receive messages."),
    "message": CommandEntry("message", "message", "Find stored messages by key or id."),
    "trace": CommandEntry("message", "trace", "Show what happened to a message."),
    "transaction": CommandEntry("message", "transaction", "List and resolve open transactions."),
    "topic": CommandEntry("topic", "topic", "List, show, create, change and delete topics."),
    "group": CommandEntry("group", "group", "Manage consumer groups, their lag and their offsets."),
    "consumer": CommandEntry("group", "consumer", "Show what running consumers do now."),
    "delay": CommandEntry("message", "delay", "List and cancel delayed messages."),
    "cluster": CommandEntry(
        "cluster", "cluster", "Show brokers, wait for them, or switch the master."
    ),
    "mqadmin": CommandEntry("mqadmin", "mqadmin", "Run RocketMQ's mqadmin, without Java."),
    "sql": CommandEntry("spark", "sql", "Query topics, archives and dead letters with SQL."),
    "doctor": CommandEntry("explain", "doctor", "Diagnose a cluster, and say how to fix it."),
    "explain": CommandEntry("explain", "explain", "Explain a message, a group or an error."),
    "filter": CommandEntry("filter", "filter_group", "Check and test filter expressions."),
    "pipeline": CommandEntry("spark", "pipeline", "Run, check and list data pipelines on Spark."),
    "acl": CommandEntry("acl", "acl", "Check access rules, and show which are in force."),
    "store": CommandEntry("store", "store", "Inspect, back up or repair a store directory."),
    "quickstart": CommandEntry("quickstart", "quickstart", "Create an example project."),
    "install-names": CommandEntry(
        "servers.names", "install_names", "Install scripts named mqbroker, mqadmin and so on."
    ),
    "completion": CommandEntry("completion", "completion", "Print a shell's completion script."),
}


class LazyGroup(click.Group):
    """A group that imports the module of a command only when the command is used.

    An unknown command is reported with the most similar name.
    """

    entries: Mapping[str, CommandEntry] = {}
    """The commands of other modules, by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, without importing their modules."""
        return [*super().list_commands(ctx), *self.entries]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command; None for an unknown name."""
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
        """Return (name, command, its arguments) for a command line, as click does.

        An unknown name ends the program with an error that suggests the most similar command.
        """
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from sluicemq.hints import did_you_mean  # noqa: PLC0415 - needed for a wrong name only

            hint = did_you_mean(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}. {hint}".rstrip())
        return super().resolve_command(ctx, args)


class _Main(LazyGroup):
    entries = COMMANDS

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries of `COMMANDS` to the help, without importing any module."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run as the program `sluice`. Raises SystemExit."""
        ending.run(lambda: self.main(*args, **kwargs))

    def main(self, *args: Any, **extra: Any) -> None:  # type: ignore[override]
        """Run a command and print its error, if any. Raises SystemExit with the exit code."""
        # Names of files and topics may contain bytes that are not UTF-8.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with ending.report_errors(extra.get("prog_name") or "sluice"):
            code = super().main(*args, **extra | {"standalone_mode": False})
        raise SystemExit(code or 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and end it properly after Ctrl-C or when its output pipe is closed.

        `ending` describes both: the exit codes are 130 and 141.
        """
        with ending.translate_interrupts(ctx):
            try:
                return super().invoke(ctx)
            finally:
                # A closed pipe must be noticed here, not by the interpreter at its end.
                sys.stdout.flush()


def _print_version(ctx: click.Context, _: click.Parameter, is_requested: bool) -> None:
    """Print the version and the engine, and exit, if `--version` was given.

    This is click's callback. It does nothing while click completes a command line.
    """
    if is_requested and not ctx.resilient_parsing:
        from sluicemq import engine  # noqa: PLC0415 - only --version loads it

        click.echo(f"sluice {__version__} ({engine.NAME} engine)")
        ctx.exit()


@click.group("sluice", cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and the engine (compiled or reference), and exit.",
)
def main() -> None:
    """Run and manage SluiceMQ, a RocketMQ-compatible messaging system in Python."""
