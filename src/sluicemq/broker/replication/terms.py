"""The file `epochFileCheckpoint`: which master wrote which part of the commit log (spec/ha.md §7).

The log is divided into terms: one master writes the log during one term. RocketMQ calls a term an
epoch. The file has the same format as RocketMQ's:

    2                   number of terms
    773307083           CRC-32 of the lines below, without its sign bit; 0 means "not checked"
    7-7000              term 7 begins at position 7000
    8-8000

Two replicas have the same log up to the end of the last term that begins at the same position on
both, because a term has one master, and that master wrote one log. The file must therefore never
claim more than the log contains:

- A term is in the file, durably, before the first byte of the term is in the log.
- When the log is truncated, the bytes are removed first and the terms afterwards. When a broker
  starts, it removes the terms that begin behind the end of the log.
- A term in which nothing was written is replaced by the next term, which begins at the same
  position. Numbers and positions therefore increase from line to line. RocketMQ keeps the older
  term instead, and loses the number of the newer one.
"""

import zlib
from itertools import pairwise
from typing import Final

from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files, read_text, replace_text
from sluicemq.wire.ha import LogTerm

CRC_MASK: Final = 0x7FFFFFFF
NO_TERM: Final = LogTerm(-1, -1)
"""The term of a log without terms. Its number is lower than that of every term."""


def encode_terms(terms: tuple[LogTerm, ...]) -> str:
    """Return the text of the file for `terms`, which are in ascending order."""
    lines = "".join(f"{number}-{start}\n" for number, start in terms)
    return f"{len(terms)}\n{zlib.crc32(lines.encode()) & CRC_MASK}\n{lines}"


def decode_terms(file_text: str) -> tuple[LogTerm, ...]:
    """Parse the text of the file with the terms of the log.

    The first line is the number of terms, the second one the CRC-32 of the other lines (0 if there
    is none), and each other line is a term. Raises ValueError if a line is not a term, if the
    number of terms or the checksum is wrong, or if the numbers or the start positions of the terms
    do not increase from line to line.
    """
    count, crc, *lines = file_text.split("\n")
    terms = [_parse_term(line) for line in lines if line]
    if int(count) != len(terms):
        raise ValueError(f"the first line says {count} terms, but the file has {len(terms)}")

    # A checksum of 0 means that there is none.
    actual_crc = zlib.crc32("\n".join(lines).encode()) & CRC_MASK
    if int(crc) not in (0, actual_crc):
        raise ValueError(f"the checksum in the file is {crc}, but the terms have {actual_crc}")

    for term, next_term in pairwise(terms):
        if next_term.number <= term.number or next_term.start <= term.start:
            raise ValueError("the numbers and start positions of the terms do not increase")
    return tuple(terms)


def _parse_term(line: str) -> LogTerm:
    """Return the term in a line of the file. Raises ValueError if the line is not a term."""
    number, start = line.split("-")
    return LogTerm(int(number), int(start))


def _load_terms(files: Files, path: str) -> tuple[LogTerm, ...]:
    """Read the terms of the log from the file at `path`, or from its backup if it does not exist.

    Return () if neither exists. Raises StoreDamagedError if the file is invalid, and OSError.
    """
    read_path = path if files.exists(path) else path + ".bak"
    file_text = read_text(files, read_path)
    if file_text is None:
        return ()
    try:
        return decode_terms(file_text)
    except ValueError as error:
        raise StoreDamagedError(
            f"{path} cannot be read: {error}.",
            fix="Restore a good copy of the file, or empty the store of this replica, so that "
            "it copies everything from its master.",
        ) from error


class LogTerms:
    """The terms of one commit log, in memory and on disk.

    `entries` contains them in ascending order. Each change is durable when its method returns.
    """

    def __init__(self, files: Files, path: str, log_end: int) -> None:
        """Load the terms from the file at `path`, and remove those that begin after `log_end`.

        `log_end` is the end of the commit log. If the file does not exist, its backup `path`.bak is
        read; a term that was only in the newer file has no byte in the log then. Raises
        StoreDamagedError if the file is invalid, and OSError.
        """
        self._files = files
        self._path = path
        self.entries = _load_terms(files, path)
        self._store(tuple(term for term in self.entries if term.start <= log_end))

    @property
    def last(self) -> LogTerm:
        """The newest term, or NO_TERM if there is none."""
        return self.entries[-1] if self.entries else NO_TERM

    def append(self, term: LogTerm) -> None:
        """Add a term, and remove the terms that begin at the same position or behind it.

        Nothing was written in these. Do nothing if the number of `term` is not greater than that of
        the last term. Raises OSError.
        """
        if term.number > self.last.number:
            earlier_terms = [earlier for earlier in self.entries if earlier.start < term.start]
            self._store((*earlier_terms, term))

    def start_term(self, number: int, log_start: int, log_end: int) -> None:
        """Add the term `number` in which this replica is master, beginning at `log_end`.

        If the log has no terms yet, everything in it counts as part of this first term, which then
        begins at `log_start`. Raises OSError.
        """
        self.append(LogTerm(number, log_end if self.entries else log_start))

    def truncate(self, log_end: int) -> None:
        """Remove the terms that begin at `log_end` or behind it. Raises OSError.

        Call this after the log was truncated to `log_end`.
        """
        self._store(tuple(term for term in self.entries if term.start < log_end))

    def drop_before(self, log_start: int) -> None:
        """Remove the terms that end at `log_start` or before it. Raises OSError.

        The term that contains `log_start` remains the first one, with its own start. Call this
        after the log was deleted up to `log_start`.
        """
        started = [index for index, term in enumerate(self.entries) if term.start <= log_start]
        if started:
            self._store(self.entries[started[-1] :])

    def find(self, position: int) -> tuple[LogTerm, int | None]:
        """Return the term of the byte at `position`, and the position where the next term begins.

        The second value is None for the last term. A position before the first term counts as part
        of the first term. Without any terms, return (NO_TERM, None).
        """
        if not self.entries:
            return NO_TERM, None
        found_term = self.entries[0]
        for next_term in self.entries[1:]:
            if next_term.start > position:
                return found_term, next_term.start
            found_term = next_term
        return found_term, None

    def _store(self, entries: tuple[LogTerm, ...]) -> None:
        """Write `entries` to the file if they differ from the present ones. Raises OSError."""
        if entries == self.entries:
            return
        replace_text(self._files, self._path, encode_terms(entries))
        self.entries = entries
