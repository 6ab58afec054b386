"""The process and the event loop that a client belongs to, and how it refuses any other.

A connection, a lock and an id belong to one process: after a fork, parent and child would write
into one connection, and send messages with equal ids. A future belongs to one event loop: awaited
in another one it is never woken. Both look like a hang or a lost message, so every client notes
where it is at home and raises an error that says what to do.

Forks are counted by a hook of the interpreter: comparing a number costs next to nothing where
asking for the process id is a system call.
"""

import asyncio
import os
from typing import Final

from sluicemq.errors import ConfigurationError

running_loop: Final = asyncio._get_running_loop
"""The event loop of this thread, or None. Of a forked child it is None. HOT."""


class Forks:
    """`count` is the number of forks between the first process and this one."""

    count = 0


def _forked() -> None:
    Forks.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Home:
    """Where one client was made, and the event loop that uses it first."""

    __slots__ = ("_pid", "forks", "loop")

    def __init__(self) -> None:
        self.forks: int = Forks.count
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raises ConfigurationError in another process than that which made the client."""
        if self.forks != Forks.count:
            raise ConfigurationError(
                f"this client was made in process {self._pid} and is used after a fork, in process "
                f"{os.getpid()}: both would use the same connections and message ids.",
                cure="Make a client in each process, after the fork (in the initializer of a "
                "worker), or start processes with multiprocessing's 'spawn'.",
            )

    def enter(self) -> None:
        """Make the running event loop the client's own if it has none yet. Raises
        ConfigurationError in another process and in another event loop."""
        self.check_process()
        loop = running_loop()
        if self.loop is None:
            self.loop = loop
        elif self.loop is not loop:
            ended = ", which is closed" if self.loop.is_closed() else ""
            raise ConfigurationError(
                f"this client belongs to another event loop{ended}: what it awaits would never be "
                "woken here.",
                cure="Make a client in each event loop (inside each asyncio.run), or run the call "
                "in the client's loop with asyncio.run_coroutine_threadsafe.",
            )
