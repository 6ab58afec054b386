"""The journal of a table: its changes since its file was last written.

A file of ten thousand topics takes many milliseconds to write; the change of one is a line:

    config/topics.json              as RocketMQ reads it: a second late at most, right at every stop
    config/topics.json.journal-7    a line a change: checksum, JSON

A change is in the journal before it is in the table, so that a full disk refuses it, and on disk
before it is answered. Whoever writes the file begins a new journal with the table's version of that
moment, and removes the older ones when the file is on disk.

At the start the changes behind the file's version are made again. A version that stands in no
journal means that somebody else has written the file since, a Java broker or a backup put back:
then only names that the file does not have are taken from the journal.

A line that is cut short was never answered. Power that fails may also have lost a line and kept the
next one, neither of them answered: whatever can be read counts.
"""

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.files import File, Files
from sluicemq.model.topic import DataVersion
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import load_object, take_object, take_text
from sluicemq.wire.bodies.topics import data_version_from, data_version_object

log = logging.getLogger(__name__)

_CHECKSUM_CHARACTERS: Final = 8


class Change(NamedTuple):
    """An item of a table from a version on; `value` is None when it was removed. Without a name:
    where a journal begins."""

    version: DataVersion
    name: str
    value: Mapping[Any, Any] | None


class Journal:
    """The journals of one file. Methods belong to the loop's thread and return what blocks."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._directory, _, name = path.rpartition("/")
        self._prefix = f"{name}.journal-"
        self._number = 0
        self._base = DataVersion()
        self._end = 0
        self._present: set[int] = set()
        self._open: dict[int, File] = {}
        self._unsynced: set[int] = set()
        self._named: set[int] = set()
        """Those whose names are on disk."""
        self._failed: set[int] = set()
        """Those of which a sync failed: never trust a later success."""
        self._io = threading.Lock()
        """No file is closed while it is synced."""

    def read(self) -> list[Change]:
        """Blocking: every change that can be read, in order. Raises OSError."""
        changes: list[Change] = []
        names = self._files.names(self._directory)
        ends = [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]
        self._present = {int(end) for end in ends if end.isascii() and end.isdigit()}
        for number in sorted(self._present):
            file = self._files.open(self._path(number))
            try:
                content = file.pread(file.size(), 0)
            finally:
                file.close()
            lines = content.split(b"\n")
            found = [_parsed(line) for line in lines[:-1]]
            good = [change for change in found if change is not None]
            if found[: len(good)] != good:
                log.error(
                    "%s: %d lines before good ones cannot be read: the power failed before they "
                    "were answered, or the disk is damaged and these changes are lost",
                    self._path(number), len(found) - len(good),
                )  # fmt: skip
            changes += good
            self._number = number
        return changes

    def begin(self, version: DataVersion) -> Callable[[], None]:
        """Later changes go to a new journal. Returns what removes the older ones (blocking)."""
        old = sorted(self._present)
        self._next(version)
        return partial(self._remove, old)

    def _next(self, version: DataVersion) -> None:
        self._number += 1
        self._base = version
        self._end = 0

    def append(self, *changes: Change) -> None:
        """Write changes, all or none. Raises OSError."""
        if self._number in self._failed:
            self._next(self._base)
        number = self._number
        file = self._open.get(number)
        if file is None:
            self._files.make_directory(self._directory)
            file = self._files.open(self._path(number), create=True)
            self._open[number] = file
            self._present.add(number)
        data = b"".join(map(_line, changes))
        if not self._end:
            data = _line(Change(self._base, "", None)) + data
        try:
            file.pwrite(data, self._end)
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(self._end)
            raise
        self._end += len(data)
        self._base = changes[-1].version
        self._unsynced.add(number)

    def sync(self) -> Callable[[], None] | None:
        """What makes every change so far durable (blocking, raises OSError); None: they are."""
        numbers, self._unsynced = self._unsynced, set()
        return partial(self._sync, numbers) if numbers else None

    def _sync(self, numbers: set[int]) -> None:
        with self._io:
            for number in sorted(numbers & self._open.keys()):  # the rest is in the table's file
                try:
                    self._open[number].sync()
                    if number not in self._named:
                        self._files.sync_directory(self._directory)
                        self._named.add(number)
                except OSError:
                    self._failed.add(number)
                    raise

    def _remove(self, numbers: list[int]) -> None:
        with self._io:
            for number in numbers:
                file = self._open.pop(number, None)
                if file is not None:
                    file.close()
                self._files.remove(self._path(number))
                self._present.discard(number)

    def _path(self, number: int) -> str:
        return f"{self._directory}/{self._prefix}{number}"


def changes_since(
    changes: list[Change], version: DataVersion, names: Container[str]
) -> list[Change]:
    """Those that a file of this version, with these names, does not have."""
    for index in range(len(changes) - 1, -1, -1):
        if changes[index].version == version:
            return [change for change in changes[index + 1 :] if change.name]
    return [change for change in changes if change.name and change.name not in names]


def _line(change: Change) -> bytes:
    values = {
        "name": change.name, "value": change.value, "version": data_version_object(change.version)
    }  # fmt: skip
    text = fastjson.dumps(values)
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _parsed(line: bytes) -> Change | None:
    checksum, text = line[:_CHECKSUM_CHARACTERS], line[_CHECKSUM_CHARACTERS + 1 :]
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        values = load_object(text, "change")
        value = None if values.get("value") is None else take_object(values, "value")
        return Change(
            data_version_from(take_object(values, "version")), take_text(values, "name"), value
        )
    except ProtocolError:
        return None
