"""Incarnation of a store: an id that changes whenever acknowledged data may have been lost.

`Store.open` keeps it for every store. With sluiceConsensus it identifies the disk of a member of
the in-sync set. Identity files (`files.identity`) name the incarnation in which they were written.
"""

import json
import secrets
import threading
from typing import Final

from sluicemq.files import Files, overwrite_text, read_text
from sluicemq.files.machine import boot_id

INCARNATION_FILE: Final = "replica.json"


class Incarnation:
    """The incarnation of a store, kept in the file `replica.json` in its root.

    `text`, the id, stays the same as long as every acknowledged message is still there. That is so
    after a clean shutdown, after a killed process (the kernel writes what it was given), and after
    a power loss if every message was synced before it was acknowledged. Otherwise, and when the
    file or the log is gone, `open` makes a new id. One case is not noticed: the log alone is
    deleted within a second of its first message.
    """

    def __init__(self, files: Files, root: str, *, boot: str | None = None) -> None:
        """Create the handle of the incarnation file in `root` (storePathRootDir); read nothing.

        `boot` identifies the current boot of the machine. None means that the machine is asked.
        """
        self._files = files
        self._path = f"{root}/{INCARNATION_FILE}"
        self._boot = boot_id() if boot is None else boot
        self._lock = threading.Lock()
        self._is_synced = False
        self._written: dict[str, str | bool] | None = None
        self.text = ""
        self.is_empty = False
        """Whether the store has no commit log yet. `open` and `note_log` set it."""

    def open(self, *, is_empty: bool, is_synced: bool) -> str:
        """Return the id of a store that has been opened, and write it durably.

        The id of the last run is kept if no acknowledged message can have been lost since.
        Otherwise, or for a new store, the id is a new random text. A second call in the same
        process keeps the id.

        `is_empty` means that the store has no commit log. `is_synced` means that from now on no
        message is acknowledged before it is synced. Raises OSError.
        """
        if not self.text:
            previous = _load_incarnation(self._files, self._path)
            previous_id = previous.get("incarnation")
            if isinstance(previous_id, str) and self._has_survived(previous, is_empty=is_empty):
                self.text = previous_id
            else:
                self.text = secrets.token_hex(8)
            self._written = previous
        with self._lock:
            self.is_empty = is_empty
            self._is_synced = is_synced
            self._write_if_changed()
        return self.text

    def _has_survived(self, previous: dict[str, str | bool], *, is_empty: bool) -> bool:
        """Return whether every acknowledged message of the last run is still there.

        That is so if the last run synced each message before it was acknowledged, or if the machine
        was not booted since. `previous` is what the last run has written. `is_empty` means that
        there is no log now; if there was one, its messages are lost.
        """
        has_lost_log = is_empty and previous.get("isEmpty") is not True
        if has_lost_log:
            return False
        return previous.get("isSynced") is True or previous.get("boot") == self._boot

    def note_log(self) -> None:
        """Note durably that the store has a commit log, unless that is noted already.

        Raises OSError.
        """
        with self._lock:
            if self.is_empty:
                self.is_empty = False
                self._write_if_changed()

    def note_shutdown(self) -> None:
        """Write that the store was shut down cleanly, so everything is synced. Raises OSError."""
        with self._lock:
            self._is_synced = True
            self._write_if_changed()

    def _write_if_changed(self) -> None:
        """Write the incarnation file, durably, unless it has this content already.

        The caller holds `_lock`. Raises OSError.
        """
        content: dict[str, str | bool] = {
            "incarnation": self.text,
            "boot": self._boot,
            "isSynced": self._is_synced,
            "isEmpty": self.is_empty,
        }
        if content != self._written:
            overwrite_text(self._files, self._path, json.dumps(content))
            self._written = content


def read_incarnation(files: Files, root: str) -> str:
    """Return the id of the store in `root`, or "" if its file is missing or damaged.

    Nothing is changed. Raises OSError.
    """
    text = _load_incarnation(files, f"{root}/{INCARNATION_FILE}").get("incarnation")
    return text if isinstance(text, str) else ""


def _load_incarnation(files: Files, path: str) -> dict[str, str | bool]:
    """Read an incarnation file; return {} if it is missing or damaged. Raises OSError."""
    try:
        content = json.loads(read_text(files, path) or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
