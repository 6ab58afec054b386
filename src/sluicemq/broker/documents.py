"""The small JSON files of a broker (store/config/*.json): rewritten whole, the last kept as .bak.

A table is copied on the loop's thread; rendering and writing it (with its fsync) may happen in the
executor. A file that cannot be written stays marked as changed and is tried again. Where every
change counts, a journal keeps those that the file does not have yet (`journal.py`).
"""

import errno
import logging
import threading
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, TypeVar

from sluicemq.broker.journal import Change, Journal, changes_since
from sluicemq.errors import ProtocolError, StoreError, StoreFullError
from sluicemq.files import Files, cure_of, load_text, replace_text
from sluicemq.model.topic import DataVersion

log = logging.getLogger(__name__)

T = TypeVar("T")
Text = str | Callable[[], str]
"""What is written, or what makes it of values that do not change, where it may take its time."""


class Document:
    """One file. `changed` says that the table differs from what was written last.

    `version` tells that of the table, of one with a journal.
    """

    __slots__ = (
        "_edition", "_files", "_journal", "_lock", "_render", "_version", "_written", "changed",
        "path",
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

    def load(self, parse: Callable[[str], T]) -> T | None:
        """The parsed file, or its .bak when it is broken; None when there is none.

        Raises StoreDamagedError when both are broken, StoreError when one cannot be read.
        """

        def parsed(text: str) -> T:
            try:
                return parse(text)
            except ProtocolError as error:
                raise ValueError(str(error)) from error

        try:
            return load_text(self._files, self.path, parsed)
        except OSError as error:
            raise self._unreadable(error) from error

    def journaled(self, names: Container[str]) -> list[Change]:
        """The changes that the loaded file, with these names, does not have. Raises StoreError."""
        try:
            changes = self._journal.read()
        except OSError as error:
            raise self._unreadable(error) from error
        self.changed |= bool(changes)
        self._journal.begin(self._version())
        return changes_since(changes, self._version(), names)

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
                cure=cure_of(error),
            )
            if is_asked:
                raise refusal from error
            log.warning("%s It lives in memory only.", refusal)

    def sync(self) -> Callable[[], None] | None:
        """What makes recorded changes durable, to be done elsewhere; None when they are. It raises
        StoreError: it is not known which of them a failing machine would keep."""
        sync = self._journal.sync()
        return None if sync is None else partial(self._sync, sync)

    def _sync(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as error:
            self.changed = True
            raise StoreError(
                f"The change is made, but {self.path} may not have it after a power failure: "
                f"{error.strerror or error}.",
                cure=cure_of(error),
            ) from error

    def take(self) -> Callable[[], None] | None:
        """What writes the table as it is now, to be done elsewhere, or None when nothing changed
        since the last time. It raises OSError, and the document counts as changed again."""
        if not self.changed:
            return None
        self.changed = False
        self._edition += 1
        forget = self._journal.begin(self._version())
        return partial(self._write, self._render(), self._edition, forget)

    def _write(self, text: Text, edition: int, forget: Callable[[], None]) -> None:
        with self._lock:
            if edition < self._written:  # a later one was faster
                return
            try:
                replace_text(self._files, self.path, text if isinstance(text, str) else text())
                forget()
            except BaseException:
                self.changed = True
                raise
            self._written = edition

    def save(self) -> None:
        """Blocking: take and write."""
        write = self.take()
        if write is not None:
            write()

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(
            f"{error.filename or self.path} cannot be read: {error.strerror or error}.",
            cure=cure_of(error),
        )
