"""Which machine this is, in which of its boots, which processes are seen here, who goes first, and
memory that the process does not need any more.

Linux tells both; elsewhere the name of the machine has to do.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")
LOWER_BY: Final = 10
"""A tenth of the processor beside a thread of usual priority."""


def boot_id() -> str:
    """Another text after each boot of the machine; its name where the system does not tell."""
    try:
        return _BOOT.read_text("ascii").strip()
    except OSError:
        return os.uname().nodename


def process_space() -> str:
    """The same text for all that see each other's process ids."""
    try:
        return f"{boot_id()}:{_PROCESSES.readlink().name}"
    except OSError:
        return boot_id()


class Priority:
    """Of the thread that calls; the usual one is that of who makes this. Linux alone has one for
    each thread, which those that it begins inherit; and only who may raise it again lowers it
    (CAP_SYS_NICE, RLIMIT_NICE): a thread of its own finds that out."""

    def __init__(self) -> None:
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._may_change = False
        if sys.platform == "linux":
            probe = threading.Thread(target=self._probe)
            probe.start()
            probe.join()

    def _probe(self) -> None:
        try:
            for niceness in (self._usual + 1, self._usual):
                os.setpriority(os.PRIO_PROCESS, 0, niceness)
        except PermissionError:
            return
        self._may_change = True

    def lower(self, is_low: bool = True) -> None:
        """Others go first; or as usual again."""
        if self._may_change:
            niceness = self._usual + LOWER_BY if is_low else self._usual
            os.setpriority(os.PRIO_PROCESS, 0, niceness)


@cache
def priority() -> Priority:
    """The process's, to be asked for before anything is lowered: later that would be the usual."""
    return Priority()


FREE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Free memory that the C library may keep for the process."""
TRIM_S: Final = 2.0


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _allocator() -> tuple[Callable[[], int], Callable[[], None]] | None:
    """Return how many free bytes the C library keeps, and what gives them to the system; None where
    it has neither."""
    try:
        library = ctypes.CDLL(None)
        usage, trim = library.mallinfo2, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    usage.restype = _Usage
    return lambda: int(usage().fordblks), lambda: trim(0)


def give_back_memory() -> int:
    """Give the memory to the system that the C library keeps for the process, if it is more than
    FREE_BYTES_MAX. Return how many bytes were free. What one client made large would stay so
    otherwise, for a single small object above it. Other threads go on meanwhile."""
    found = _allocator()
    if found is None:
        return 0
    free_bytes, trim = found
    size = free_bytes()
    if size > FREE_BYTES_MAX:
        trim()
    return size


def keep_memory_small() -> None:
    """Start a thread that gives back memory every TRIM_S, for as long as the process lives."""

    never = threading.Event()

    def run() -> None:
        while not never.wait(TRIM_S):
            give_back_memory()

    if _allocator() is not None:
        threading.Thread(target=run, name="sluice-memory", daemon=True).start()
