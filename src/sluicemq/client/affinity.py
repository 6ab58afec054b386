"""The process and the event loop that a client belongs to, and the errors for using it elsewhere.

A connection, a lock and a message id belong to one process. After a fork, parent and child would
write into one connection and send messages with equal ids. A future belongs to one event loop;
awaited in another one, it never wakes the waiter. Both mistakes look like a hang or a lost message.
So every client notes its process and its event loop, and raises an error that says what to do.

Forks are counted by `os.register_at_fork`: comparing two integers is cheaper than a system call for
the process id.
"""

import asyncio
import os
from typing import Final

from sluicemq.errors import ConfigurationError

get_running_loop_or_none: Final = asyncio._get_running_loop
"""Returns the event loop that runs in this thread, or None; None also in a forked child. HOT."""


class ForkCounter:
    """A counter of forks: `count` is the number of forks that lie between the first process and
    this one."""

    count = 0


def _count_fork() -> None:
    ForkCounter.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class ClientAffinity:
    """The process that made one client, and the event loop in which the client was used first."""

    __slots__ = ("_pid", "fork_count", "loop")

    def __init__(self) -> None:
        self.fork_count: int = ForkCounter.count
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raise ConfigurationError if the process has been forked since it made the client."""
        if self.fork_count != ForkCounter.count:
            raise ConfigurationError(
                f"this client was made in process {self._pid} and is used after a fork, in process "
                f"{os.getpid()}: both would use the same connections and message ids.",
                fix="Make a client in each process, after the fork (in the initializer of a "
                "worker), or start processes with multiprocessing's 'spawn'.",
            )

    def check_loop(self) -> None:
        """Make the running event loop the client's own if it has none yet. Raises
        ConfigurationError in a forked process, in another event loop, and outside of any event loop
        once the client has one."""
        self.check_process()
        loop = get_running_loop_or_none()
        if self.loop is None:
            self.loop = loop
        elif self.loop is not loop:
            ended = ", which is closed" if self.loop.is_closed() else ""
            raise ConfigurationError(
                f"this client belongs to another event loop{ended}: what it awaits would never be "
                "woken here.",
                fix="Make a client in each event loop (inside each asyncio.run), or run the call "
                "in the client's loop with asyncio.run_coroutine_threadsafe.",
            )
