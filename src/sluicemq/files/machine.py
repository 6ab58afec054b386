"""Facts about the machine, thread priorities, and returning free memory to the system.

Linux provides ids of the boot and of the process namespace. On other systems the host name is used
for both.
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
"""The niceness that is added: such a thread gets a tenth of the CPU that a usual one gets."""


def boot_id() -> str:
    """Return a text that is different after each boot; the host name if the system has none."""
    try:
        return _BOOT.read_text("ascii").strip()
    except OSError:
        return os.uname().nodename


def process_space() -> str:
    """Return a text that is the same for all processes that share their process ids.

    Processes in another container (process id namespace) get another text.
    """
    try:
        return f"{boot_id()}:{_PROCESSES.readlink().name}"
    except OSError:
        return boot_id()


class Priority:
    """The priority of the calling thread, which can be lowered and restored.

    The usual priority is that of the thread that creates the object. Only Linux has a priority for
    each thread; new threads inherit it. Raising a priority again needs a permission (CAP_SYS_NICE
    or RLIMIT_NICE). A separate thread tests for it, and without it priorities are not changed.
    """

    def __init__(self) -> None:
        """Note the calling thread's priority as the usual one, and test whether it can change."""
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._may_change = False
        if sys.platform == "linux":
            probe = threading.Thread(target=self._try_to_change)
            probe.start()
            probe.join()

    def _try_to_change(self) -> None:
        """Lower the priority of this thread and raise it again, to find out if that is allowed.

        Sets `_may_change`.
        """
        try:
            for niceness in (self._usual + 1, self._usual):
                os.setpriority(os.PRIO_PROCESS, 0, niceness)
        except PermissionError:
            return
        self._may_change = True

    def set_low(self, is_low: bool = True) -> None:
        """Lower the priority of the calling thread, or restore it if not `is_low`.

        Do nothing if this process may not raise a priority again.
        """
        if self._may_change:
            niceness = self._usual + LOWER_BY if is_low else self._usual
            os.setpriority(os.PRIO_PROCESS, 0, niceness)


@cache
def priority() -> Priority:
    """Return the `Priority` of the process.

    The first call must come before any priority is lowered, because it determines the usual one.
    """
    return Priority()


FREE_BYTES_MAX: Final = 32 * 1024 * 1024
"""The amount of free memory that the C library may keep for the process."""
TRIM_S: Final = 2.0


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@cache
def _find_allocator() -> tuple[Callable[[], int], Callable[[], None]] | None:
    """Return two functions of the C library: (count_free_bytes, trim).

    `count_free_bytes()` returns how many bytes the C library keeps free, and `trim()` returns them
    to the system. Return None if the C library does not have these functions.
    """
    try:
        library = ctypes.CDLL(None)
        usage = library.mallinfo2
        trim = library.malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    usage.restype = _Usage
    return lambda: int(usage().fordblks), lambda: trim(0)


def trim_memory() -> int:
    """Return free memory of the C library to the system, if it is more than FREE_BYTES_MAX.

    The C library does not do so itself if a single small object lies above the free memory. Return
    the number of bytes that were free before; 0 if the C library does not say. Other threads
    continue meanwhile.
    """
    allocator = _find_allocator()
    if allocator is None:
        return 0
    count_free_bytes, trim = allocator
    free_bytes = count_free_bytes()
    if free_bytes > FREE_BYTES_MAX:
        trim()
    return free_bytes


def start_memory_trimming() -> None:
    """Start a thread that calls `trim_memory` every TRIM_S seconds until the process ends.

    Do nothing if the C library has no functions for that.
    """
    never = threading.Event()

    def run() -> None:
        while not never.wait(TRIM_S):
            trim_memory()

    if _find_allocator() is not None:
        threading.Thread(target=run, name="sluice-memory", daemon=True).start()
