"""The small JSON files of a broker (store/config/*.json): rewritten whole, the last kept as .bak.

A table is copied on the loop's thread; rendering and writing it (with its fsync) may happen in the
executor. A file that cannot be written stays marked as changed and is tried again.

A file of ten thousand topics takes many milliseconds to write; the change of one is a line of its
journal, which keeps the changes since the file was last written:

    config/topics.json              as RocketMQ reads it: a second late at most, right at every stop
    config/topics.json.journal-7    a line a change: checksum, JSON

A change is in the journal before it is in the table, so that a full disk refuses it, and on disk
before it is answered. Whoever writes the file begins a new journal with the table's version of that
moment, and removes the older ones when the file is on disk.

At the start the changes behind the file's version are made again. A version that stands in no
journal means that somebody else has written the file since, a Java broker or a backup put back:
then only names that the file does not have are taken from the journal.

A document whose offsets mean something in this store alone has an identity file beside it
(`Document.identify`). A start learns from it whether the file is the one that this broker wrote
last (`is_doubtful`), and not an older copy or that of another store.

A line that is cut short was never answered. Power that fails may also have lost a line and kept the
next one, neither of them answered: whatever can be read counts.
"""

import contextlib
import errno
import logging
import threading
import zlib
from collections.abc import Callable, Container, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from sluicemq.errors import ProtocolError, StoreError, StoreFullError
from sluicemq.files import File, Files, fix_of, load_text, replace_text
from sluicemq.files.identity import (
    NO_RECORD,
    TEXT_BEFORE,
    FileState,
    FileVerdict,
    IdentityFile,
    is_last_text,
    read_identity,
    text_checksum,
)
from sluicemq.model.topic import DataVersion
from sluicemq.store.store import Store
from sluicemq.wire import fastjson
from sluicemq.wire.declare import load_object, take_object, take_text
from sluicemq.wire.tables import data_version_from, data_version_object

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

        def remove() -> None:
            with self._io:
                for number in old:
                    file = self._open.pop(number, None)
                    if file is not None:
                        file.close()
                    self._files.remove(self._path(number))
                    self._present.discard(number)

        return remove

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

        def sync() -> None:
            with self._io:
                for number in sorted(numbers & self._open.keys()):  # others are in the file
                    try:
                        self._open[number].sync()
                        if number not in self._named:
                            self._files.sync_directory(self._directory)
                            self._named.add(number)
                    except OSError:
                        self._failed.add(number)
                        raise

        return sync if numbers else None

    def _path(self, number: int) -> str:
        return f"{self._directory}/{self._prefix}{number}"


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


T = TypeVar("T")
Text = str | Callable[[], str]
"""What is written, or what makes it of values that do not change, where it may take its time."""


class DocumentIdentity:
    """The identity file of a document: which text this broker wrote last, and beside which log.

    It names no incarnation, since the files of a master are those of its slaves too: the first
    record of the log says which store it is. It is written before the document, with the checksum
    of the text before as well, so that a kill between the two does not matter.
    """

    def __init__(self, files: Files, path: str, store: Store) -> None:
        self._file = IdentityFile(files, path, "")
        self._files, self._path, self._store = files, path, store
        self._last = 0
        """Checksum of the text that is on disk."""

    def check(self, text: str | None) -> FileVerdict:
        """Return how far a document with this text (None: it is missing) may be trusted. UNKNOWN:
        no broker with identities has written it. Raises OSError."""
        self._last = text_checksum(text)
        found = read_identity(self._files, self._path)
        if found is None or found.state is not FileState.SEALED:
            return FileVerdict.UNKNOWN
        if not found.matches("", self._store.record_source):
            return FileVerdict.FOREIGN
        return FileVerdict.SEALED if is_last_text(found, text) else FileVerdict.CHANGED

    def mark_sealed(self, text: str) -> None:
        """Note, durably, that the document is about to become `text`. Blocking. Raises OSError."""
        source = self._store.record_source
        is_empty = source.start >= self._store.synced_offset
        position, checksum = NO_RECORD if is_empty else source.start, text_checksum(text)
        self._file.mark_sealed(source, position, checksum, {TEXT_BEFORE: self._last})

    def written(self, text: str) -> None:
        """Note that the document is `text` now: it becomes the text before the next one."""
        self._last = text_checksum(text)


class Document:
    """One file. `changed` says that the table differs from what was written last.

    `version` tells that of the table, of one with a journal.
    """

    __slots__ = (
        "_edition", "_files", "_identity", "_journal", "_lock", "_render", "_version", "_written",
        "changed", "path", "verdict",
    )  # fmt: skip

    def __init__(
        self,
        files: Files,
        path: str,
        render: Callable[[], Text],
        version: Callable[[], DataVersion] | None = None,
    ) -> None:
        self._files = files
        self._render = render
        self._version = version or DataVersion
        self._journal = Journal(files, path)
        self._lock = threading.Lock()
        self._edition = self._written = 0
        self.path = path
        self.changed = False
        self._identity: DocumentIdentity | None = None
        self.verdict = FileVerdict.UNKNOWN
        """Whether what was loaded is what this broker wrote last: see `identify`."""

    @property
    def is_doubtful(self) -> bool:
        """Whether what was loaded is not what this broker wrote last."""
        return self.verdict in (FileVerdict.CHANGED, FileVerdict.FOREIGN)

    def identify(self, store: Store) -> None:
        """Keep an identity file beside the document, whose offsets mean something in
        `store` alone. To be called before `load`, which then sets `verdict`: it is doubtful if the
        file was replaced by an older copy or that of another store, was removed, or was written by
        RocketMQ or a person. What follows from that is the owner's to say and to log."""
        self._identity = DocumentIdentity(self._files, self.path, store)

    def load(self, parse: Callable[[str], T]) -> T | None:
        """The parsed file, or its .bak when it is broken; None when there is none.

        Raises StoreDamagedError when both are broken, StoreError when one cannot be read.
        """

        read: list[str] = []

        def parsed(text: str) -> T:
            try:
                value = parse(text)
            except ProtocolError as error:
                raise ValueError(str(error)) from error
            read.append(text)
            return value

        try:
            found = load_text(self._files, self.path, parsed)
            if self._identity is not None:
                self.verdict = self._identity.check(read[-1] if read else None)
        except OSError as error:
            raise self._unreadable(error) from error
        return found

    def journaled(self, names: Container[str]) -> list[Change]:
        """The changes that the loaded file, with these names, does not have. Raises StoreError."""
        try:
            changes = self._journal.read()
        except OSError as error:
            raise self._unreadable(error) from error
        self.changed |= bool(changes)
        version = self._version()
        self._journal.begin(version)
        for index in range(len(changes) - 1, -1, -1):
            if changes[index].version == version:
                return [change for change in changes[index + 1 :] if change.name]
        return [change for change in changes if change.name and change.name not in names]

    def record(
        self,
        version: DataVersion,
        values: Mapping[str, Mapping[str, Any] | None],
        *,
        is_asked: bool = True,
    ) -> None:
        """Keep changes of the table, which has this version with them: they survive the end of
        this process from now on, that of the machine after `sync`.

        Raises StoreError: they must not be made. What nobody has asked for (`is_asked`) may be:
        it waits in memory for the next edition of the file.
        """
        self.changed = True
        try:
            self._journal.append(*(Change(version, *item) for item in values.items()))
        except OSError as error:
            names = ", ".join(values)
            failure = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
            refusal = failure(
                f"The change of {names[:200]} cannot be written beside {self.path}: "
                f"{error.strerror or error}.",
                fix=fix_of(error),
            )
            if is_asked:
                raise refusal from error
            log.warning("%s It lives in memory only.", refusal)

    def sync(self) -> Callable[[], None] | None:
        """What makes recorded changes durable, to be done elsewhere; None when they are. It raises
        StoreError: it is not known which of them a failing machine would keep."""
        sync = self._journal.sync()
        if sync is None:
            return None

        def checked() -> None:
            try:
                sync()
            except OSError as error:
                self.changed = True
                raise StoreError(
                    f"The change is made, but {self.path} may not have it after a power failure: "
                    f"{error.strerror or error}.",
                    fix=fix_of(error),
                ) from error

        return checked

    def take(self) -> Callable[[], None] | None:
        """What writes the table as it is now, to be done elsewhere, or None when nothing changed
        since the last time. It raises OSError, and the document counts as changed again, as it
        does when the table cannot be rendered, which raises here."""
        if not self.changed:
            return None
        self.changed = False
        self._edition += 1
        edition = self._edition
        try:
            text = self._render()  # which may ask for the edition
        except BaseException:
            self.changed = True
            raise
        forget = self._journal.begin(self._version())

        def write() -> None:
            with self._lock:
                if edition < self._written:  # a later one was faster
                    return
                try:
                    content = text if isinstance(text, str) else text()
                    if self._identity is not None:
                        self._identity.mark_sealed(content)
                    replace_text(self._files, self.path, content)
                    if self._identity is not None:
                        self._identity.written(content)
                    forget()
                except BaseException:
                    self.changed = True
                    raise
                self._written = edition

        return write

    @property
    def edition(self) -> int:
        """Of the table as it was taken last."""
        return self._edition

    def has_written(self, edition: int) -> bool:
        """Is this one on disk, or a later one?"""
        return self._written >= edition

    def save(self) -> None:
        """Blocking: take and write."""
        write = self.take()
        if write is not None:
            write()

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(
            f"{error.filename or self.path} cannot be read: {error.strerror or error}.",
            fix=fix_of(error),
        )
