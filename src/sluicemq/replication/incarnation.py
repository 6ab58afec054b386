"""Which life of its disk a replica is in, and how it knows."""

import secrets
from typing import Final

import orjson

from sluicemq.files import Files, read_text, replace_text
from sluicemq.files.machine import boot_id

INCARNATION_FILE: Final = "replica.json"


class Incarnation:
    """Which life of its disk a replica is in: the file `replica.json` beside its log.

    It is the same one as long as everything that was acknowledged is still there: after a stop in
    order, after a killed process (what was written is the kernel's), and after a machine that went
    down only if everything had been synced before it was acknowledged. Else, and when the file or
    the log is gone, it is another one, which is in nobody's in-sync set. (A log that is wiped
    alone, within a second of its first message, is not noticed.)
    """

    def __init__(self, files: Files, root: str, *, boot: str | None = None) -> None:
        """`root`: storePathRootDir. `boot`: the machine's, another one after each of its starts."""
        self._files = files
        self._path = f"{root}/{INCARNATION_FILE}"
        self._boot = boot_id() if boot is None else boot
        self.text = ""
        self._is_empty = self._is_synced = False

    def begin(self, *, is_empty: bool, is_synced: bool) -> str:
        """The incarnation of a store that has been opened; durable on return. `is_empty`: it has no
        log. `is_synced`: nothing will be acknowledged before it is synced. Raises OSError."""
        try:
            found = orjson.loads(read_text(self._files, self._path) or "{}")
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            found = {}
        survived = found.get("isSynced") is True or found.get("boot") == self._boot
        if is_empty and found.get("isEmpty") is not True:
            survived = False
        text = found.get("incarnation")
        self.text = text if survived and isinstance(text, str) else secrets.token_hex(8)
        self._is_empty, self._is_synced = is_empty, is_synced
        self._write()
        return self.text

    def grown(self) -> None:
        """There is a log. Raises OSError."""
        if self._is_empty:
            self._is_empty = False
            self._write()

    def end(self) -> None:
        """The store has been closed in order, so everything is synced. Raises OSError."""
        self._is_synced = True
        self._write()

    def _write(self) -> None:
        found = {
            "incarnation": self.text, "boot": self._boot, "isSynced": self._is_synced,
            "isEmpty": self._is_empty,
        }  # fmt: skip
        replace_text(self._files, self._path, orjson.dumps(found).decode())
