"""Which machine this is, in which of its boots, which processes are seen here, and who goes first.

Linux tells both; elsewhere the name of the machine has to do.
"""

import os
import sys
import threading
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
