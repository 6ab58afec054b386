"""The small JSON files of a broker (store/config/*.json): rewritten whole, the last kept as .bak.

Text is made on the loop's thread from live tables; writing it (with its fsync) may happen in the
executor. A file that cannot be written stays marked as changed and is tried again.
"""

from collections.abc import Callable
from typing import TypeVar

from sluicemq.errors import ProtocolError, StoreError
from sluicemq.files import Files, cure_of, load_text, replace_text

T = TypeVar("T")


class Document:
    """One file. `changed` says that the table differs from what was written last."""

    __slots__ = ("_files", "_render", "changed", "path")

    def __init__(self, files: Files, path: str, render: Callable[[], str]) -> None:
        self._files = files
        self._render = render
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
            raise StoreError(
                f"{error.filename or self.path} cannot be read: {error.strerror or error}.",
                cure=cure_of(error),
            ) from error

    def take(self) -> str | None:
        """The text to write, or None when nothing changed since the last time."""
        if not self.changed:
            return None
        self.changed = False
        return self._render()

    def write(self, text: str) -> None:
        """Blocking: writes and fsyncs. Raises OSError, and the document counts as changed again."""
        try:
            replace_text(self._files, self.path, text)
        except OSError:
            self.changed = True
            raise

    def save(self) -> None:
        """Blocking: take and write."""
        text = self.take()
        if text is not None:
            self.write(text)
