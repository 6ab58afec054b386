"""Bind a client to the process and the event loop that it belongs to.

A connection, a lock and a message id belong to one process. After a fork, parent and child would
write to the same connection and send messages with equal ids. A future belongs to one event loop:
awaited in another one, it never wakes its waiter. Both mistakes look like a hang or a lost message.
So every client remembers its process and its event loop, and raises an error with a fix if it is
used elsewhere.

`os.register_at_fork` counts forks, because comparing two integers is cheaper than a system call for
the process id.
"""

import asyncio
import os
from typing import Final

from sluicemq.errors import ConfigurationError

get_running_loop_or_none: Final = asyncio._get_running_loop
"""Returns the event loop that runs in this thread, or None.

In a forked child it returns None. HOT.
"""


class ForkCounter:
    """A counter of forks.

    `count` is the number of forks between the first process and this one.
    """

    count = 0


def _count_fork() -> None:
    """Count a fork. Called in the child process."""
    ForkCounter.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class ClientAffinity:
    """The process that created a client, and the event loop in which the client was first used."""

    __slots__ = ("_pid", "fork_count", "loop")

    def __init__(self) -> None:
        self.fork_count: int = ForkCounter.count
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raise ConfigurationError if the process was forked after it created the client."""
        if self.fork_count != ForkCounter.count:
            raise ConfigurationError(
                f"this client was created in process {self._pid} and is used after a fork, in "
                f"process {os.getpid()}: both would use the same connections and message ids.",
                fix="Create a client in each process, after the fork (in the initializer of a "
                "worker), or start processes with multiprocessing's 'spawn'.",
            )

    def check_loop(self) -> None:
        """Bind the client to the running event loop at the first call, and check it at later ones.

        Raises ConfigurationError in a forked process, in another event loop, and outside of any
        event loop if the client is bound to one.
        """
        self.check_process()
        loop = get_running_loop_or_none()
        if self.loop is None:
            self.loop = loop
        elif self.loop is not loop:
            ended = ", which is closed" if self.loop.is_closed() else ""
            raise ConfigurationError(
                f"this client belongs to another event loop{ended}: its futures would never wake "
                "a task of this one.",
                fix="Create a client in each event loop (inside each asyncio.run), or run the call "
                "in the client's loop with asyncio.run_coroutine_threadsafe.",
            )
