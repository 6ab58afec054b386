"""Running servers in this process until a signal: `run_servers`, used by all server commands.

A server command prints one line that begins with `ready` to stdout as soon as its servers accept
requests, logs to stderr or a file, closes its servers in order on SIGTERM or SIGINT, and exits with
0. If the start fails, it prints one sentence to stderr and exits with 1. On SIGHUP, the servers
read their configuration files again. Scripts depend on all of this.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from sluicemq.cli.servers.settings import log_warnings
from sluicemq.config import Change
from sluicemq.config.keys import MeasuredConfig
from sluicemq.errors import ConfigurationError, StoreError
from sluicemq.files import descriptors, machine
from sluicemq.model.addresses import format_address

if TYPE_CHECKING:
    from sluicemq.cli.servers.processes import ServerProcess

GC_OBJECTS = 20_000
"""The number of new objects after which the garbage collector runs."""
log = logging.getLogger("sluicemq.cli")


class RunningServers(contextlib.AsyncExitStack):
    """The servers of one command. Leaving the context closes them, the last one first."""

    def __init__(self) -> None:
        """Begin without servers; those that start are closed in reverse order at the end."""
        super().__init__()
        self.reload_functions: dict[str, Callable[[], Change]] = {}
        """For each configuration file, the function by which its server reads it again."""
        self.children: list[ServerProcess] = []
        """The servers in child processes."""
        self.metrics: list[str] = []
        """The parts of the `ready` line with addresses of metrics and probes.

        `metrics=host:port` is that of this process; those of its children follow.
        """
        self.stop = asyncio.Event()
        """Set by SIGTERM, SIGINT and `fail`, to close the servers in order."""
        self.failure: StoreError | None = None
        """The error with which the command ends after the servers have closed."""

    def fail(self, error: OSError) -> None:
        """Close all servers in order, and let the command end with exit code 1.

        A broker calls this if its store refuses all writes because of `error`.
        """
        self.failure = StoreError(
            f"The store refuses all writes: {error}.", fix="Check the disk, then start again."
        )
        self.stop.set()

    def announce_metrics(self, config: MeasuredConfig, port: int | None) -> None:
        """Add the address of the metrics of this process to the line `ready …`.

        `port` None means that there are no metrics, and adds nothing.
        """
        from sluicemq.telemetry.health import metrics_host  # noqa: PLC0415 - not for `--help`

        if port is not None:
            host = metrics_host(config, for_local_clients=True)
            self.metrics.insert(0, f"metrics={format_address(host, port)}")

    def reload(self) -> None:
        """Let each server, also in child processes, read its configuration file again.

        The changes are logged. If a file is invalid, that is logged and the server keeps its
        settings.
        """
        for child in self.children:
            child.reload()
        for path, reload_file in self.reload_functions.items():
            try:
                change = reload_file()
            except (ConfigurationError, OSError) as error:
                log.error("%s was not reloaded: %s", path, error)
            else:
                log.info("%s was reloaded: %s", path, ", ".join(change.entries) or "no change")
                log_warnings(path, change.warnings)


StartServers = Callable[[RunningServers], Awaitable[str]]
"""Starts servers, adds their closing to the RunningServers, and returns the text after `ready`."""


def run_servers(start: StartServers) -> None:
    """Start servers, print the line `ready …`, and serve until SIGTERM or SIGINT.

    `start(servers)` starts them, registers how they are closed, and returns the text after `ready`.
    Raises the SluiceErrors of `start`, ConfigurationError if a file prevents the start, and
    StoreError if a store refuses writes later.
    """

    async def serve() -> None:
        """Start the servers, and close them after a signal. Raises the error of `servers.fail`."""
        loop = asyncio.get_running_loop()
        async with RunningServers() as servers:
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signal_number, servers.stop.set)
            ready_text = await start(servers)
            loop.add_signal_handler(signal.SIGHUP, servers.reload)
            _tune_garbage_collector()
            machine.start_memory_trimming()
            click.echo(" ".join(["ready", ready_text, *servers.metrics]))
            await servers.stop.wait()
            log.info("closing")
        if servers.failure is not None:
            raise servers.failure

    log.info("%s", descriptors.describe_limits(descriptors.raise_limit()))
    try:
        from uvloop import new_event_loop  # noqa: PLC0415 - optional package
    except ModuleNotFoundError:
        new_event_loop = None
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fix = descriptors.FIX
        else:
            fix = "Choose another directory with --store, or give this user permission to write."
        raise ConfigurationError(
            f"{error.strerror or error}: {error.filename or 'the store'}.", fix=fix
        ) from error


def _tune_garbage_collector() -> None:
    """Let the garbage collector look rarely at young objects, and never at those that exist now.

    These live as long as the server. Requests make no reference cycles, so rare collections of
    young objects suffice.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 20, 20)
