"""Which machine this is, in which of its boots, and which processes are seen here.

Linux tells both; elsewhere the name of the machine has to do.
"""

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


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
