"""The small JSON files of a broker (store/config/*.json), their journals and identity files.

A `Document` is written as a whole; the last edition remains as .bak. The table is copied on the
loop's thread. Rendering and writing it, with the fsync, may happen on another thread. A document
that cannot be written stays marked as changed, and is written the next time.

*Journals.* Writing a file of ten thousand topics takes many milliseconds. Therefore a single change
is a line in the journal of the file, which contains the changes since the file was last written:

    config/topics.json              as RocketMQ reads it: up to date within a second, and at a stop
    config/topics.json.journal-7    one line per change: checksum and JSON

- A change is written to the journal before it is made in memory, so that a full disk refuses it. It
  is synced before it is answered.
- Writing the file starts a new journal, which begins with the version of the table at that moment.
  When the file is on disk, the older journals are removed.
- A start repeats the changes after the version that the file has. If no journal contains that
  version, another program has written the file since (a Java broker, or a restored backup). Then
  only topics or groups that the file does not contain are taken from the journal.
- An incomplete line was never answered. A power failure may also have lost a line and kept the next
  one, neither of which was answered. So every readable line counts.

*Identity files.* A document with offsets is meaningful only for the commit log beside it. Its
identity file tells a start whether the document is the one that this broker wrote last, and not an
older copy or that of another store (`Document.use_identity_file`, `Document.is_doubtful`).
"""

import contextlib
import errno
import logging
import threading
import zlib
from collections.abc import Awaitable, Callable, Container, Mapping
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
from sluicemq.net.work.background import fast_thread_switching
from sluicemq.store.store import Store
from sluicemq.wire import fastjson
from sluicemq.wire.fastjson import load_object, take_object, take_text
from sluicemq.wire.tables import data_version_from, data_version_object

log = logging.getLogger(__name__)

_CHECKSUM_CHARACTERS: Final = 8


class Change(NamedTuple):
    """A line of a journal: the change of one topic or group."""

    version: DataVersion
    """The version of the table after the change."""
    name: str
    """The name of the topic or group; "" in the first line of a journal, which has no change."""
    value: Mapping[Any, Any] | None
    """The new settings as a JSON object; None if the topic or group was deleted."""


class Journal:
    """The journals of one document.

    Its methods run on the loop's thread, except `read`, which blocks. They return the blocking part
    of their work as a function, which may run on another thread.
    """

    def __init__(self, files: Files, path: str) -> None:
        """Prepare the journals of the document at `path`, without reading or writing a file.

        The journals are files beside the document: `topics.json` has `topics.json.journal-0`,
        `topics.json.journal-1` and so on. Changes are appended to the newest one.
        """
        self._files = files
        self._directory, _, name = path.rpartition("/")
        self._prefix = f"{name}.journal-"
        self._number = 0
        """The number of the journal to which changes are appended."""
        self._base = DataVersion()
        """The version of the table at the end of that journal."""
        self._end = 0
        """The size of that journal in bytes."""
        self._present: set[int] = set()
        """The numbers of the journals that exist."""
        self._open: dict[int, File] = {}
        self._unsynced: set[int] = set()
        """Journals that were written to since the last sync."""
        self._linked: set[int] = set()
        """Journals whose directory entry is on disk."""
        self._failed: set[int] = set()
        """Journals whose sync failed. A later success proves nothing, so they are not used."""
        self._io = threading.Lock()
        """Held while a journal is synced or closed."""

    def read(self) -> list[Change]:
        """Read all journals, and return their changes in the order of the journals and lines.

        The first line of each journal is returned too. It is a Change whose name is "", which only
        records the version of the table. Damaged lines are skipped. If a readable line follows a
        damaged one, an error is logged. The journal with the highest number becomes the current
        one. Blocks. Raises OSError.
        """
        changes: list[Change] = []
        self._present = self._find_journals()
        for journal_number in sorted(self._present):
            changes += self._read_journal(journal_number)
            self._number = journal_number
        return changes

    def _find_journals(self) -> set[int]:
        """Return the numbers of the journals in the directory."""
        journal_numbers = set()
        for file_name in self._files.names(self._directory):
            suffix = file_name.removeprefix(self._prefix)
            if file_name.startswith(self._prefix) and suffix.isascii() and suffix.isdigit():
                journal_numbers.add(int(suffix))
        return journal_numbers

    def _read_journal(self, journal_number: int) -> list[Change]:
        """Return the readable changes of one journal, in order. Raises OSError."""
        path = self._path(journal_number)
        file = self._files.open(path)
        try:
            content = file.pread(file.size(), 0)
        finally:
            file.close()

        # The last piece is b"", or a line without its end because the process crashed.
        complete_lines = content.split(b"\n")[:-1]
        parsed = [_parse_line(line) for line in complete_lines]
        readable = [change for change in parsed if change is not None]
        # Damaged lines at the end of the file are normal after a power failure. If all damaged
        # lines are at the end, the readable ones are the beginning of `parsed`.
        has_gap = parsed[: len(readable)] != readable
        if has_gap:
            log.error(
                "%s: %d lines before readable ones cannot be read. Either the power failed "
                "before they were answered, or the disk is damaged and these changes are lost.",
                path,
                len(parsed) - len(readable),
            )
        return readable

    def rotate(self, version: DataVersion) -> Callable[[], None]:
        """Start a new journal for the changes after `version`, and return a function.

        The function removes the files of the older journals. It blocks. Call it only when the
        document is on disk with `version` or a later one, because it contains their changes then.
        The file of the new journal is created by the first `append`.
        """
        old_numbers = sorted(self._present)
        self._start_next(version)

        def remove_old_journals() -> None:
            with self._io:
                for journal_number in old_numbers:
                    file = self._open.pop(journal_number, None)
                    if file is not None:
                        file.close()
                    self._files.remove(self._path(journal_number))
                    self._present.discard(journal_number)

        return remove_old_journals

    def _start_next(self, version: DataVersion) -> None:
        """Let the next change begin a new journal after `version` of the table."""
        self._number += 1
        self._base = version
        self._end = 0

    def append(self, *changes: Change) -> None:
        """Append `changes` to the current journal, all or none, without an fsync.

        `changes` must not be empty. If an fsync of the current journal has failed, a new journal is
        started first. Raises OSError if the changes cannot be written. The journal then is as
        before.
        """
        if self._number in self._failed:
            self._start_next(self._base)
        file = self._open_current()
        lines = b"".join(map(_encode_line, changes))
        if not self._end:
            # The first line of a journal says after which version of the table it begins.
            lines = _encode_line(Change(self._base, "", None)) + lines
        try:
            file.pwrite(lines, self._end)
        except OSError:
            # Remove what was written of the changes, so that the journal is as before.
            with contextlib.suppress(OSError):
                file.truncate(self._end)
            raise
        self._end += len(lines)
        self._base = changes[-1].version
        self._unsynced.add(self._number)

    def _open_current(self) -> File:
        """Return the file of the current journal. Create it if it does not exist."""
        file = self._open.get(self._number)
        if file is None:
            self._files.make_directory(self._directory)
            file = self._files.open(self._path(self._number), create=True)
            self._open[self._number] = file
            self._present.add(self._number)
        return file

    def prepare_sync(self) -> Callable[[], None] | None:
        """Return a function that makes all changes appended so far durable.

        Return None if nothing was appended since the last call. The function syncs the journals to
        disk and blocks. If it raises OSError, a power failure may lose the changes. Later changes
        are then written to a new journal.
        """
        if not self._unsynced:
            return None
        written_numbers = self._unsynced
        self._unsynced = set()

        def sync_written_journals() -> None:
            with self._io:
                # Changes of journals that are closed by now are in the document.
                for journal_number in sorted(written_numbers & self._open.keys()):
                    self._sync_journal(journal_number)

        return sync_written_journals

    def _sync_journal(self, journal_number: int) -> None:
        """Make an open journal and its directory entry durable.

        If that raises OSError, the journal is marked as failed.
        """
        try:
            self._open[journal_number].sync()
            if journal_number not in self._linked:
                self._files.sync_directory(self._directory)
                self._linked.add(journal_number)
        except OSError:
            self._failed.add(journal_number)
            raise

    def _path(self, journal_number: int) -> str:
        """Return the path of a journal by its number."""
        return f"{self._directory}/{self._prefix}{journal_number}"


def _encode_line(change: Change) -> bytes:
    """Return the line of a journal that describes `change`, with its newline.

    The line has the CRC-32 of the JSON text in 8 hexadecimal digits, a space, and the JSON text:

    1f2e3d4c {"name": "T", "value": {…}, "version": {…}}
    """
    values = {
        "name": change.name,
        "value": change.value,
        "version": data_version_object(change.version),
    }
    encoded_change = fastjson.dumps(values)
    return b"%08x %b\n" % (zlib.crc32(encoded_change), encoded_change)


def _parse_line(line: bytes) -> Change | None:
    """Return the change that `line` describes, or None if the line is damaged.

    `line` is a line of a journal without its newline. It is damaged if its checksum is wrong or if
    its JSON text lacks a field.
    """
    checksum = line[:_CHECKSUM_CHARACTERS]
    encoded_change = line[_CHECKSUM_CHARACTERS + 1 :]
    if checksum != b"%08x" % zlib.crc32(encoded_change):
        return None
    try:
        values = load_object(encoded_change, "change")
        settings = None
        if values.get("value") is not None:
            settings = take_object(values, "value")
        version = data_version_from(take_object(values, "version"))
        return Change(version, take_text(values, "name"), settings)
    except ProtocolError:
        return None


T = TypeVar("T")
Text = str | Callable[[], str]
"""The text of a document, or a function that returns it. The function runs on another thread, so it
uses only values that do not change."""


class DocumentIdentity:
    """The identity file of a document: which text this broker wrote last, and for which log.

    It contains no incarnation, because slaves copy the files of their master. The first record of
    the log identifies the store instead. The identity file is written before the document, and also
    contains the checksum of the previous text. So a crash between the two writes does no harm.
    """

    def __init__(self, files: Files, path: str, store: Store) -> None:
        """Describe the identity file of the document at `path`, without reading or writing it.

        The offsets in the document belong to `store`. The identity file records that, and the
        checksum of the text that the broker wrote last.
        """
        self._file = IdentityFile(files, path, "")
        self._files = files
        self._path = path
        self._store = store
        self._written_checksum = 0
        """The checksum of the text that is on disk."""

    def check(self, content: str | None) -> FileVerdict:
        """Compare `content`, the text of the document, with the identity file.

        `content` is None if the document is missing. The result says how far the document may be
        trusted:

        - UNKNOWN: RocketMQ or an older broker wrote the document, without an identity file.
        - FOREIGN: the document belongs to another commit log.
        - CHANGED: this broker did not write this text last.
        - SEALED: this broker wrote this text last.

        The checksum of `content` is kept for the next `mark_sealed`. Raises OSError if the identity
        file cannot be read.
        """
        self._written_checksum = text_checksum(content)
        identity = read_identity(self._files, self._path)
        if identity is None or identity.state is not FileState.SEALED:
            return FileVerdict.UNKNOWN
        if not identity.matches("", self._store.record_source):
            return FileVerdict.FOREIGN
        return FileVerdict.SEALED if is_last_text(identity, content) else FileVerdict.CHANGED

    def mark_sealed(self, new_content: str) -> None:
        """Record in the identity file that the document will get the text `new_content`.

        Call this before the document is written, and `note_written` after it. The identity file is
        synced to disk. It has the checksums of the new text and of the text that is on disk now.
        So after a crash either text is recognized. Blocks. Raises OSError.
        """
        source = self._store.record_source
        # The first record of the log identifies the store, if the log has a synced record.
        has_synced_record = source.start < self._store.synced_offset
        first_position = source.start if has_synced_record else NO_RECORD
        self._file.mark_sealed(
            source,
            first_position,
            text_checksum(new_content),
            {TEXT_BEFORE: self._written_checksum},
        )

    def note_written(self, new_content: str) -> None:
        """Remember the checksum of the document's new text, for the next `mark_sealed`."""
        self._written_checksum = text_checksum(new_content)


class Document:
    """One JSON file of a broker, with an optional journal and an optional identity file."""

    __slots__ = (
        "_edition",
        "_files",
        "_identity",
        "_journal",
        "_lock",
        "_render",
        "_version",
        "_written",
        "changed",
        "path",
        "verdict",
    )

    def __init__(
        self,
        files: Files,
        path: str,
        render: Callable[[], Text],
        version: Callable[[], DataVersion] | None = None,
    ) -> None:
        """Create a document for the file at `path`.

        `render` returns the text of the table as it is now. `version` returns the version of the
        table; it is needed for a journal only.
        """
        self._files = files
        self._render = render
        self._version = version or DataVersion
        self._journal = Journal(files, path)
        self._lock = threading.Lock()
        self._edition = self._written = 0
        self.path = path
        self.changed = False
        """Whether the table differs from what was last written. Set it after each change."""
        self._identity: DocumentIdentity | None = None
        self.verdict = FileVerdict.UNKNOWN
        """How far the loaded content may be trusted; UNKNOWN without `use_identity_file`."""

    @property
    def is_doubtful(self) -> bool:
        """Whether the loaded content is not what this broker wrote last to this store."""
        return self.verdict in (FileVerdict.CHANGED, FileVerdict.FOREIGN)

    def use_identity_file(self, store: Store) -> None:
        """Keep an identity file beside the document, because its offsets are those of `store`.

        Call this before `load`, which then sets `verdict`. The document is doubtful if the file was
        removed, was replaced by an older copy or that of another store, or was written by RocketMQ
        or a person. The owner of the document decides what to do then, and logs it.
        """
        self._identity = DocumentIdentity(self._files, self.path, store)

    def load(self, parse: Callable[[str], T]) -> T | None:
        """Read the file, and return what `parse` makes of its text.

        `parse(text)` must raise ValueError or ProtocolError for a damaged text. If the file is
        damaged or missing, its backup, the file with the suffix .bak, is read instead. Return None
        if neither file exists. If the document has an identity file, `verdict` is set.

        Raises StoreDamagedError if the existing files cannot be parsed, and StoreError if one of
        them cannot be read.
        """
        # The text that was returned parsed; None if there is no file.
        parsed_content: str | None = None

        def parse_and_note(content: str) -> T:
            nonlocal parsed_content
            try:
                table = parse(content)
            except ProtocolError as error:
                raise ValueError(str(error)) from error
            parsed_content = content
            return table

        try:
            table = load_text(self._files, self.path, parse_and_note)
            if self._identity is not None:
                self.verdict = self._identity.check(parsed_content)
        except OSError as error:
            raise self._unreadable(error) from error
        return table

    def load_journal(self, names: Container[str]) -> list[Change]:
        """Read the journals, and return the changes that the loaded file does not contain.

        `names` are the names of the topics or groups in the file. The changes after the version of
        the file are returned, in order. If no change in the journals has that version, another
        program has written the file. Then only the changes of names that are not in the file are
        returned.

        A new journal is started. If the journals contain any change, `changed` is set, so that the
        file is written soon. Raises StoreError if a journal cannot be read.
        """
        try:
            changes = self._journal.read()
        except OSError as error:
            raise self._unreadable(error) from error
        if changes:
            self.changed = True
        file_version = self._version()
        self._journal.rotate(file_version)

        # Return what follows the last change that the file contains. A change without a name only
        # records a version.
        for index in reversed(range(len(changes))):
            if changes[index].version == file_version:
                return [change for change in changes[index + 1 :] if change.name]

        # Another program has written the file.
        return [change for change in changes if change.name and change.name not in names]

    def append_to_journal(
        self,
        version: DataVersion,
        values: Mapping[str, Mapping[str, Any] | None],
        *,
        is_asked: bool = True,
    ) -> None:
        """Append changes of the table to the journal. Call this before changing the table.

        `version` is the version that the table has after the changes. `values` are the new settings
        by name; None deletes the name. The changes survive a crash of this process from now on.
        They survive a power failure when the function of `prepare_sync` has run.

        If the journal cannot be written, the result depends on `is_asked`, which says that a client
        asked for the change. If it is true, StoreError is raised, and the caller must not change
        the table. If it is false, a warning is logged, and the caller may change the table: the
        changes are saved with the next write of the file.
        """
        self.changed = True
        changes = [Change(version, name, settings) for name, settings in values.items()]
        try:
            self._journal.append(*changes)
        except OSError as error:
            refusal = self._make_journal_error(error, ", ".join(values))
            if is_asked:
                raise refusal from error
            log.warning("%s It is kept in memory only.", refusal)

    def _make_journal_error(self, error: OSError, names: str) -> StoreError:
        """Return the error for changes that could not be written to the journal.

        It is a StoreFullError if the disk is full, else a StoreError. `names` are the changed
        topics or groups, separated by commas, for the text of the error.
        """
        is_disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        error_class = StoreFullError if is_disk_full else StoreError
        return error_class(
            f"Cannot write the change of {names[:200]} to the journal of {self.path}: "
            f"{error.strerror or error}.",
            fix=fix_of(error),
        )

    def prepare_sync(self) -> Callable[[], None] | None:
        """Return a function that makes the changes in the journal durable.

        Return None if nothing was written since the last call. The function blocks and may run on
        another thread. It raises StoreError if the fsync fails. Then a power failure may lose any
        of the changes, and `changed` is set, so that the file is written soon.
        """
        sync = self._journal.prepare_sync()
        if sync is None:
            return None

        def sync_or_explain() -> None:
            try:
                sync()
            except OSError as error:
                self.changed = True
                raise StoreError(
                    f"The change was made, but {self.path} may not have it after a power failure: "
                    f"{error.strerror or error}.",
                    fix=fix_of(error),
                ) from error

        return sync_or_explain

    def prepare_write(self) -> Callable[[], None] | None:
        """Return a function that writes the present content of the table to the file.

        Return None if the table has not changed since the last write. This method takes a copy of
        the content, or its text, starts a new journal, and sets `changed` to False. The returned
        function blocks and may run on another thread. It also writes the identity file and removes
        the older journals. It does nothing if the function of a later call has run already.

        The method raises what `render` raises. The function raises OSError if the file cannot be
        written. In both cases `changed` is true again, so that the write is repeated.
        """
        if not self.changed:
            return None
        self.changed = False
        self._edition += 1
        edition = self._edition
        try:
            rendered = self._render()  # it may read `edition`
        except BaseException:
            self.changed = True
            raise
        remove_old_journals = self._journal.rotate(self._version())

        def write_edition() -> None:
            with self._lock:
                if edition < self._written:  # a later edition is on disk already
                    return
                try:
                    self._replace_file(rendered)
                    # Only now, because the file contains their changes.
                    remove_old_journals()
                except BaseException:
                    self.changed = True
                    raise
                self._written = edition

        return write_edition

    def _replace_file(self, rendered: Text) -> None:
        """Replace the text of the file by `rendered`, and update the identity file. Blocks.

        `rendered` is the text, or a function that returns it. Raises OSError.
        """
        content = rendered if isinstance(rendered, str) else rendered()
        if self._identity is not None:
            self._identity.mark_sealed(content)
        replace_text(self._files, self.path, content)
        if self._identity is not None:
            self._identity.note_written(content)

    @property
    def edition(self) -> int:
        """The number of the edition that `prepare_write` returned last."""
        return self._edition

    def has_written(self, edition: int) -> bool:
        """Return whether the edition with this number, or a later one, is on disk."""
        return self._written >= edition

    def save(self) -> None:
        """Write the document if it has changed. Blocks. Raises OSError."""
        write = self.prepare_write()
        if write is not None:
            write()

    def _unreadable(self, error: OSError) -> StoreError:
        """Return the StoreError that reports a file which cannot be read."""
        return StoreError(
            f"{error.filename or self.path} cannot be read: {error.strerror or error}.",
            fix=fix_of(error),
        )


class DocumentWriter:
    """Writes documents on an executor, and logs failures without repeating them."""

    def __init__(self, in_executor: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Write by `in_executor`, which runs a blocking function on another thread."""
        self._in_executor = in_executor
        self._failures: dict[str, str] = {}
        """By path: the last failure of a document that could not be written since."""

    @property
    def unwritten_paths(self) -> list[str]:
        """The paths of the documents whose last write failed, sorted."""
        return sorted(self._failures)

    async def write(self, *documents: Document) -> None:
        """Write those of `documents` that have changed to their files, one after the other.

        The files are written on the executor. If a document cannot be written, the next ones are
        still written. The failure is logged unless it has the same text as the last failure of that
        document. The document stays marked as changed, so that a later call tries again. Nothing is
        raised.
        """
        for document in documents:
            try:
                write = document.prepare_write()
            except Exception as error:  # noqa: BLE001 - the other documents must be saved
                self._log_failure(document, error)
                continue
            if write is None:
                continue
            try:
                with fast_thread_switching():
                    await self._in_executor(write)
                self._failures.pop(document.path, None)
            except Exception as error:  # noqa: BLE001 - the other documents must be saved
                self._log_failure(document, error)

    def _log_failure(self, document: Document, error: Exception) -> None:
        """Log that a document was not written, unless its last failure has the same text."""
        failure = f"{type(error).__name__}: {error}"
        if self._failures.get(document.path) == failure:
            return
        self._failures[document.path] = failure
        if isinstance(error, OSError):
            log.error(
                "Cannot write %s (%s). Retrying. Free disk space or correct the permissions.",
                document.path,
                error,
            )
        else:
            log.error(
                "Cannot save %s (%s). The file keeps its old content; the other files are saved. "
                "This is a bug. Please report it.",
                document.path,
                failure,
                exc_info=error,
            )
