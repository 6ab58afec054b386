"""The limit of file descriptors of this process, and how it is divided between files and sockets.

The usual limit is 1,024 (`ulimit -n`), and a map takes a descriptor for as long as it exists. A
broker needs more with more clients and more files, so the limit is divided:

    a quarter   maps of store files, at most MAPS_MAX: `DescriptorPool` closes those not used lately
    RESERVE     files that are open briefly or permanently, such as the last file of the commit log
    the rest    sockets: a server refuses further connections, and logs that

The kernel assigns the lowest free number to a new descriptor, so the number of a new socket says
how many descriptors are in use. Limiting maps also limits address space and page tables: 1 GiB of
the commit log that is read completely takes 2 MiB of page tables.
"""

import resource
import threading
from collections import OrderedDict
from typing import Final, Protocol

MAPS_MAX: Final = 1024
MAPS_MIN: Final = 8
RESERVE: Final = 64
FIX: Final = (
    "Raise the limit of open files: `ulimit -n`, LimitNOFILE= of a service, or --ulimit nofile= of"
    " a container."
)
LIMIT_MAX: Final = 1 << 20
"""The limit is never raised above this. Some systems allow 2^30, and closing all descriptors in a
child process would take long."""


def limit() -> int:
    """Return the number of descriptors that this process can have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, LIMIT_MAX)


def raise_limit() -> int:
    """Raise the limit of open files to what the system allows. Return the new limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised_limit = LIMIT_MAX
    if hard_limit != resource.RLIM_INFINITY:
        raised_limit = min(hard_limit, LIMIT_MAX)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < raised_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised_limit, hard_limit))
    return limit()


def maps_max() -> int:
    """Return the number of files that may be mapped at a time."""
    return max(MAPS_MIN, min(MAPS_MAX, limit() // 4))


def socket_descriptor_end() -> int:
    """Return the first descriptor number that is too high for an accepted socket."""
    return limit() - maps_max() - RESERVE


def shortage_text() -> str:
    """Return the text with which a connection is refused because too many files are open."""
    return (
        f"{socket_descriptor_end()} files are open, and the rest of the limit of {limit()} open"
        f" files is reserved for the store. {FIX}"
    )


def describe_limits(limit: int) -> str:
    """Describe for the log how a limit of open files is divided."""
    return (
        f"limit of open files: {limit}, of which {maps_max()} for reading the store; connections"
        f" are accepted while fewer than {socket_descriptor_end()} files are open"
    )


class DescriptorHolder(Protocol):
    """An object that has a descriptor, usually a map. It sets `is_used` whenever it is used."""

    is_used: bool

    def release_descriptor(self) -> None:
        """Close the descriptor. The holder opens a new one when it is used again."""
        ...


class DescriptorPool:
    """A limited set of descriptor holders. Methods may be called from any thread.

    When the pool is full, the second-chance algorithm chooses the holder that must release its
    descriptor. It needs no more than a flag that each use sets.
    """

    __slots__ = ("_holders", "_lock", "_wanted", "limit")

    def __init__(self, limit: int | None = None) -> None:
        """Create a pool of at most `limit` holders of descriptors.

        None means `maps_max()`, evaluated at each use.
        """
        self.limit: int | None = limit
        self._holders: OrderedDict[DescriptorHolder, None] = OrderedDict()
        self._lock = threading.Lock()
        self._wanted = 0

    def __len__(self) -> int:
        """Return the number of holders in the pool."""
        return len(self._holders)

    @property
    def capacity(self) -> int:
        """The maximum number of holders."""
        return maps_max() if self.limit is None else self.limit

    def next_request(self) -> int:
        """Count a request for a descriptor, and return the number of requests so far.

        A caller can thereby see how many other requests there were since its last one. A file that
        is requested again within `capacity` requests is worth a descriptor.
        """
        self._wanted += 1
        return self._wanted

    def add(self, holder: DescriptorHolder) -> None:
        """Add a holder that has opened a descriptor. If the pool is full, others close theirs.

        The holders that were not used since they were last examined are closed first. The first use
        of a holder does not count as a use, so a reader that walks over thousands of queues once
        does not displace files that are read all the time.
        """
        limit = self.capacity
        with self._lock:
            self._holders.pop(holder, None)
            while len(self._holders) >= max(limit, 1):
                oldest, _ = self._holders.popitem(last=False)
                if oldest.is_used:  # a second chance: it stays until the others were looked at
                    oldest.is_used = False
                    self._holders[oldest] = None
                else:
                    oldest.release_descriptor()
            holder.is_used = False
            self._holders[holder] = None

    def remove(self, holder: DescriptorHolder) -> None:
        """Remove a holder that has closed its descriptor for good."""
        with self._lock:
            self._holders.pop(holder, None)
