"""Identity of derived files: whether a start may trust a file that the commit log can rebuild.

A derived file (the timer wheel, the key index, property columns, …) contains nothing that the
commit log or a table does not contain too. It can look complete and still be wrong: zeroed, older
than the log, copied from another store, or left behind by an earlier term as master. Therefore each
derived file has an *identity file* beside it, `<path>.identity`, a JSON document that only SluiceMQ
uses:

    incarnation   the `Incarnation` of the store in which the file was built
    position      physical offset of the last record that the file covers; -1 if it covers none
    recordCrc     CRC-32 of that record, so that another log of the same length is noticed
    state         open: the process may be changing the file
                  sealed: the store was shut down cleanly, and `checksum` is valid
                  discarded: the owner has discarded the file, and it has to be built
    checksum      CRC-32 of the file's content, as its owner computes it (`content_checksum`)
    details       facts of the owner, for example the version of a table that belongs to the file

The document contains a CRC of itself; a damaged one counts as missing. RocketMQ never reads it: for
a directory whose files RocketMQ lists (`timerlog/`, `index/`, `consumequeue/`) the identity file
lies beside the directory, never inside.

How the owner of a derived file uses its identity:

    start         `check` returns a `FileVerdict`. SEALED: trust the file. OPEN: the process was
                  killed; check the file's structure from the last durable point on. UNKNOWN:
                  written by RocketMQ or by a version without identities; verify the file against
                  its source. DISCARDED, FOREIGN, CHANGED: do not read the file; `mark_discarded`
                  and build it.
    first change  `mark_open`, before the first byte of the file changes. Later calls cost nothing.
    shutdown      `mark_sealed`, when the file is synced, with its checksum.
    slave         `mark_discarded`, then remove the file: it must not be used with the log of
                  another master.
    offline       `read_identity` and `read_incarnation` change nothing.

`Store.open` keeps the incarnation of every store (`files.incarnation`).
"""

import enum
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final, NamedTuple

from sluicemq.files import File, Files, overwrite_text, read_text

IDENTITY_SUFFIX: Final = ".identity"
NO_RECORD: Final = -1
"""The position of a derived file that covers no record."""
TEXT_BEFORE: Final = "before"
"""The detail that contains the checksum of a document's previous text."""
CHECKSUM_BLOCK_BYTES: Final = 1 << 16
_SIZE_BYTES: Final = 4
_RECORD_BYTES_MAX: Final = 1 << 26
_ZERO_BLOCK: Final = bytes(CHECKSUM_BLOCK_BYTES)


class RecordSource(NamedTuple):
    """The commit log as identities read it.

    `start` is the first position that the log still has. `read(position, size)` returns fewer
    bytes, or none, where the log ends.
    """

    start: int
    read: Callable[[int, int], bytes]

    def record_crc(self, position: int) -> int | None:
        """Return the CRC-32 of the record at `position`; None if no whole record is there."""
        size = int.from_bytes(self.read(position, _SIZE_BYTES))
        if not _SIZE_BYTES <= size <= _RECORD_BYTES_MAX:
            return None
        record = self.read(position, size)
        return zlib.crc32(record) if len(record) == size else None


class FileState(enum.Enum):
    """What the owner of a derived file last noted about it."""

    OPEN = "open"
    SEALED = "sealed"
    DISCARDED = "discarded"


class FileVerdict(enum.Enum):
    """How far a derived file may be trusted at a start."""

    SEALED = enum.auto()
    """Sealed by this store at a clean shutdown, and its content has not changed since."""
    OPEN = enum.auto()
    """Belongs to this store, and was in use when the process ended."""
    UNKNOWN = enum.auto()
    """Has no readable identity."""
    DISCARDED = enum.auto()
    """Marked as discarded by its owner, for example by a slave."""
    FOREIGN = enum.auto()
    """From another incarnation, or the log lacks the record up to which the file was built."""
    CHANGED = enum.auto()
    """Sealed at a clean shutdown, but its content has changed since."""


class Identity(NamedTuple):
    """The content of an identity file. The module describes the fields."""

    incarnation: str
    state: FileState
    position: int = NO_RECORD
    record_crc: int = 0
    checksum: int = 0
    details: Mapping[str, int | str] = {}

    def to_text(self) -> str:
        """Encode the identity as the JSON text of its file, with a CRC."""
        content = {
            "incarnation": self.incarnation,
            "state": self.state.value,
            "position": self.position,
            "recordCrc": self.record_crc,
            "checksum": self.checksum,
            "details": dict(self.details),
        }
        return json.dumps({"crc": _compute_crc(content), "identity": content}, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Identity":
        """Parse the JSON text of an identity file.

        Raises ValueError, KeyError or TypeError if it is damaged.
        """
        document = json.loads(text)
        content = document["identity"]
        if document["crc"] != _compute_crc(content):
            raise ValueError("the CRC does not match")
        return cls(
            content["incarnation"],
            FileState(content["state"]),
            content["position"],
            content["recordCrc"],
            content["checksum"],
            content["details"],
        )

    def matches(self, incarnation: str, log: RecordSource) -> bool:
        """Return whether a file with this identity was built from this log, by this store.

        `incarnation` is the present id of the store. The identity names the last record that the
        file covers; the log must still have this record, with the same CRC. A record that retention
        has removed counts as present.
        """
        if self.incarnation != incarnation:
            return False
        if self.position == NO_RECORD or self.position < log.start:
            return True
        return log.record_crc(self.position) == self.record_crc


class IdentityFile:
    """The identity of one derived file, or of several that are only valid together."""

    def __init__(self, files: Files, path: str, incarnation: str) -> None:
        """Create the handle of the identity file of the derived file at `path`.

        The identity file is `<path>.identity`. `incarnation` is the id of the store.
        """
        self._files = files
        self._path = path + IDENTITY_SUFFIX
        self._incarnation = incarnation
        self.identity: Identity | None = None
        """The content of the file after the last `check` or change; None if there is none."""

    def check(self, log: RecordSource, compute_checksum: Callable[[], int]) -> FileVerdict:
        """Read the identity file, and return how far the derived file may be trusted.

        A derived file can be built again from the log. `compute_checksum()` returns the checksum of
        its present content. It is called only if the derived file is sealed (closed completely) and
        of this store. Sets `identity` to the content of the identity file. Raises OSError.
        """
        path = self._path.removesuffix(IDENTITY_SUFFIX)
        self.identity = identity = read_identity(self._files, path)
        if identity is None:
            return FileVerdict.UNKNOWN
        if identity.state is FileState.DISCARDED:
            return FileVerdict.DISCARDED
        if not identity.matches(self._incarnation, log):
            return FileVerdict.FOREIGN
        if identity.state is FileState.OPEN:
            return FileVerdict.OPEN
        if compute_checksum() != identity.checksum:
            return FileVerdict.CHANGED
        return FileVerdict.SEALED

    def mark_open(self) -> None:
        """Mark the derived file as open, durably, before its content changes.

        Does nothing if it is open already. Keeps the position of the last record if the identity is
        of this incarnation (id of the store). Raises OSError.
        """
        old = self.identity
        if old is None or old.incarnation != self._incarnation:
            self._write_identity(Identity(self._incarnation, FileState.OPEN))
        elif old.state is not FileState.OPEN:
            self._write_identity(
                Identity(self._incarnation, FileState.OPEN, old.position, old.record_crc)
            )

    def mark_sealed(
        self,
        log: RecordSource,
        position: int,
        checksum: int,
        details: Mapping[str, int | str] | None = None,
    ) -> None:
        """Mark the derived file as sealed, durably: it is complete and synced.

        `checksum` is the checksum of its content. It covers the log up to and including the record
        at `position` (NO_RECORD if it covers none). If the log has no record there, NO_RECORD is
        written. `details` are further values that the owner wants to compare later. Raises OSError.
        """
        crc = log.record_crc(position) if position != NO_RECORD else 0
        if crc is None:  # no record is there: nothing could confirm the file later
            position = NO_RECORD
            crc = 0
        self._write_identity(
            Identity(self._incarnation, FileState.SEALED, position, crc, checksum, details or {})
        )

    def mark_discarded(self) -> None:
        """Mark the derived file as discarded, durably: it must not be read any more.

        Call this before the file is removed, and before it is built again. The next `mark_open`
        replaces the mark. Raises OSError.
        """
        if self.identity is None or self.identity.state is not FileState.DISCARDED:
            self._write_identity(Identity(self._incarnation, FileState.DISCARDED))

    def _write_identity(self, identity: Identity) -> None:
        """Write `identity` into the identity file, durably, and keep it as `self.identity`.

        Raises OSError.
        """
        overwrite_text(self._files, self._path, identity.to_text())
        self.identity = identity


def read_identity(files: Files, path: str) -> Identity | None:
    """Read the identity of the derived file at `path`.

    Return None if its identity file is missing or damaged. Raises OSError.
    """
    try:
        text = read_text(files, path + IDENTITY_SUFFIX)
        if text is None:
            return None
        return Identity.from_text(text)
    except (ValueError, KeyError, TypeError):
        return None


def text_checksum(text: str | None) -> int:
    """Return the checksum of a document's text; 0 if the document is missing."""
    if text is None:
        return 0
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def is_last_text(identity: Identity, text: str | None) -> bool:
    """Return whether `text` is the document that SluiceMQ wrote last, according to `identity`.

    The process may have been killed after writing the identity and before the document. So the text
    before the last one is accepted too. Return False if `text` is None, because the document is
    missing.
    """
    if text is None:
        return False
    checksum = text_checksum(text)
    return checksum == identity.checksum or checksum == identity.details.get(TEXT_BEFORE)


def content_checksum(file: File, start: int = 0, end: int | None = None, crc: int = 0) -> int:
    """Return a CRC-32 of the bytes [start, end) of a file, by default of the whole file.

    Blocks of zeros and holes give the same checksum, and cost next to nothing. The bytes are read
    with `pread`, because a mapped hole could need a page that a full tmpfs does not have. `crc` is
    the checksum to continue from.
    """
    file_end = file.size()
    end = file_end if end is None else min(end, file_end)
    block_start = start
    while block_start < end:
        # Skip the blocks of a hole. Blocks begin at multiples of their size behind `start`.
        data_start = file.data_start(block_start)
        if data_start is None or data_start >= end:
            break
        first_block_of_data = data_start - (data_start - start) % CHECKSUM_BLOCK_BYTES
        block_start = max(block_start, first_block_of_data)

        block = file.pread(min(CHECKSUM_BLOCK_BYTES, end - block_start), block_start)
        if not block:
            break
        if block != _ZERO_BLOCK[: len(block)]:
            # The CRC covers the position too, because blocks of zeros are left out.
            crc = zlib.crc32(block, zlib.crc32(block_start.to_bytes(8), crc))
        block_start += CHECKSUM_BLOCK_BYTES
    return crc


def file_checksum(files: Files, path: str, crc: int = 0) -> int:
    """Return a CRC-32 of the size and the content of the file at `path`.

    `crc` is the checksum to continue from; it is returned if the file is missing. Raises OSError.
    """
    if not files.exists(path):
        return crc
    with closing(files.open(path)) as file:
        return content_checksum(file, crc=zlib.crc32(file.size().to_bytes(8), crc))


def _compute_crc(content: Mapping[str, object]) -> int:
    """Return the CRC-32 of the fields of an identity file."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
