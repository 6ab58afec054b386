"""File descriptors: how many this process may have, and who gets by with fewer.

A process has 1,024 of them unless somebody says otherwise (`ulimit -n`), and a map takes one as
long as it lives. What a broker needs grows with its clients and its files, so each has its part:

    a quarter   maps of store files, at most MAPS_MAX: `DescriptorPool` lets go of the least used
    RESERVE     what is open for a moment or for ever: the log's last file, a table being saved
    the rest    sockets: a server refuses connections above it, and says so

The kernel gives out the lowest free number, so a socket's own number tells how many are in use,
whoever has them. A limit of maps is a limit of address space and page tables too: 1 GiB of the log
that is wholly read takes 2 MiB of them.
"""

import resource
import threading
from collections import OrderedDict
from typing import Final, Protocol

MAPS_MAX: Final = 1024
MAPS_MIN: Final = 8
RESERVE: Final = 64
FIX: Final = (
    "Let the process have more open files: `ulimit -n`, LimitNOFILE= of a service, --ulimit nofile="
    " of a container."
)
LIMIT_MAX: Final = 1 << 20
"""More is never asked for: some systems allow 2^30, and who closes them all in a child waits."""


def limit() -> int:
    """How many descriptors this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, LIMIT_MAX)


def raise_limit() -> int:
    """Take what the system allows without asking; returns the limit that holds from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def maps_max() -> int:
    """How many files may be mapped at a time."""
    return max(MAPS_MIN, min(MAPS_MAX, limit() // 4))


def sockets_end() -> int:
    """The first descriptor number that no accepted socket may have."""
    return limit() - maps_max() - RESERVE


def shortage() -> str:
    """Why a connection is refused."""
    return (
        f"there are {sockets_end()} open files already, and the rest of the {limit()} that the"
        f" process may have is for the store. {FIX}"
    )


def explain(limit: int) -> str:
    """Who gets what, for the log of a start."""
    return (
        f"{limit} files may be open: {maps_max()} of the store that are being read, connections"
        f" as long as there are fewer than {sockets_end()} open files"
    )


class Holder(Protocol):
    """What has a descriptor, a map's as a rule. Whoever uses it sets `is_used`."""

    is_used: bool

    def let_go(self) -> None:
        """Give it up; the next use gets a new one."""
        ...


class DescriptorPool:
    """At most so many holders at a time. Any thread.

    The victim is found by second chance: being used costs no more than setting a flag.
    """

    __slots__ = ("_holders", "_lock", "_wanted", "limit")

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: None is `maps_max`, as the process may have it at the time."""
        self.limit: int | None = limit
        self._holders: OrderedDict[Holder, None] = OrderedDict()
        self._lock = threading.Lock()
        self._wanted = 0

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def room(self) -> int:
        """How many holders there may be."""
        return maps_max() if self.limit is None else self.limit

    def want(self) -> int:
        """The number of this wish for a holder: who comes again within `room` of them gets one."""
        self._wanted += 1
        return self._wanted

    def enter(self, new: Holder) -> None:
        """It has a descriptor now; others go for it. Being used once does not count: who walks
        over thousands of queues must not push out what is read all the time."""
        limit = self.room
        with self._lock:
            self._holders.pop(new, None)
            while len(self._holders) >= max(limit, 1):
                oldest, _ = self._holders.popitem(last=False)
                if oldest.is_used:
                    oldest.is_used = False
                    self._holders[oldest] = None
                else:
                    oldest.let_go()
            new.is_used = False
            self._holders[new] = None

    def leave(self, gone: Holder) -> None:
        """It gave its descriptor up for good."""
        with self._lock:
            self._holders.pop(gone, None)
