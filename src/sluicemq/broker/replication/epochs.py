"""Who wrote what of the log: `epochFileCheckpoint`, as RocketMQ writes it (spec/ha.md §7).

    2                   entries
    773307083           CRC-32 of the lines below, without its sign bit; 0: not checked
    7-7000              epoch 7 begins at 7000
    8-8000

Two replicas agree up to the end of the last epoch that began at one place on both: an epoch has one
master, who wrote one log. So what a file says must never be more than what the log holds:

- an epoch is in the file, durably, before its first byte is in the log;
- of a log that is cut, the bytes go first and the epochs after; a start drops what the log lacks;
- an epoch in which nothing was written gives way to the next one at the same place, so that
  both numbers grow from line to line (RocketMQ's keeps the first, and forgets the new one).
"""

import zlib
from itertools import pairwise
from typing import Final

from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files, read_text, replace_text
from sluicemq.wire.ha import LogTerm

CRC_MASK: Final = 0x7FFFFFFF
NONE: Final = LogTerm(-1, -1)


def render_epochs(epochs: tuple[LogTerm, ...]) -> str:
    """The text of the file."""
    lines = "".join(f"{number}-{start}\n" for number, start in epochs)
    return f"{len(epochs)}\n{zlib.crc32(lines.encode()) & CRC_MASK}\n{lines}"


def parse_epochs(text: str) -> tuple[LogTerm, ...]:
    """What the file says. Raises ValueError."""
    count, crc, *lines = text.split("\n")
    pairs = (line.split("-") for line in lines if line)
    epochs = tuple(LogTerm(int(number), int(start)) for number, start in pairs)
    if int(count) != len(epochs):
        raise ValueError(f"{count} entries are announced, there are {len(epochs)}")
    found = zlib.crc32("\n".join(lines).encode()) & CRC_MASK
    if int(crc) not in (0, found):
        raise ValueError(f"the checksum is {found}, {crc} is announced")
    if any(new.number <= old.number or new.start <= old.start for old, new in pairwise(epochs)):
        raise ValueError("epochs and their begins do not grow")
    return epochs


class Epochs:
    """The epochs of one log, on disk."""

    def __init__(self, files: Files, path: str, log_end: int) -> None:
        """What begins behind the end of the log is forgotten. Raises StoreDamagedError.

        The edition before counts only when the last one is missing: then no byte of a newer epoch
        is in the log yet.
        """
        self._files = files
        self._path = path
        text = read_text(files, path if files.exists(path) else path + ".bak")
        try:
            self.entries = () if text is None else parse_epochs(text)
        except ValueError as error:
            raise StoreDamagedError(
                f"{path} cannot be read: {error}.",
                fix="Put back a good copy, or empty this replica's store, so that it begins anew.",
            ) from error
        self._keep(tuple(epoch for epoch in self.entries if epoch.start <= log_end))

    @property
    def last(self) -> LogTerm:
        """NONE without any."""
        return self.entries[-1] if self.entries else NONE

    def begin(self, epoch: LogTerm) -> None:
        """A master writes from here on; durable on return. Of a number that is known or older
        nothing changes. Raises OSError."""
        if epoch.number > self.last.number:
            self._keep((*(old for old in self.entries if old.start < epoch.start), epoch))

    def reign(self, number: int, log_start: int, log_end: int) -> None:
        """This replica is master from now on, and writes behind `log_end`; durable on return. What
        a log without epochs holds is counted to its first one. Raises OSError."""
        self.begin(LogTerm(number, log_end if self.entries else log_start))

    def truncate(self, log_end: int) -> None:
        """The log has been cut there: epochs that would begin there or behind it are gone."""
        self._keep(tuple(epoch for epoch in self.entries if epoch.start < log_end))

    def forget(self, log_start: int) -> None:
        """The log begins later now: epochs that ended there or before are gone."""
        behind = [at for at, epoch in enumerate(self.entries) if epoch.start <= log_start]
        if behind:
            self._keep(self.entries[behind[-1] :])

    def at(self, position: int) -> tuple[LogTerm, int | None]:
        """Who wrote what lies there, and where the next epoch begins; the first one for what is
        older than all."""
        found = [at for at, epoch in enumerate(self.entries) if epoch.start <= position]
        here = found[-1] if found else 0
        later = self.entries[here + 1 : here + 2]
        return (self.entries[here] if self.entries else NONE, later[0].start if later else None)

    def _keep(self, entries: tuple[LogTerm, ...]) -> None:
        if entries == self.entries:
            return
        replace_text(self._files, self._path, render_epochs(entries))
        self.entries = entries
