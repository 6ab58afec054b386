"""The commit log: every record of every topic, one after the other, in files of a fixed size.

Written once a turn, one pwrite per file touched; a file that has no room for the next record and
8 bytes more is closed by a blank record (spec/store.md §2.2). Three positions, left to right:

    synced_offset <= written_offset        (and the writer's own, which the log does not know)
    on disk          in the kernel

`sync` may run in another thread than everything else. It covers what was written when it began
(a group commit), in file order, and touches nothing that the writing thread changes: it reads
`written_offset` once and writes `synced_offset`.

A failed write is wiped: what may have reached the file is overwritten with zeros and synced, or a
later recovery would find records that nobody was told of. Three kinds of errors:

    passing   no descriptor or no memory: the turn is refused, the next one may succeed; a sync, and
              a wipe, is made up for before the next write
    full      the turn is refused, and so is every other one until there is room
    final     a failed sync, or a failed wipe: the kernel may have thrown the pages away, so the log
              takes no more writes, and what was not synced may come back after a restart or not
"""

import threading
from collections.abc import Sequence
from typing import Final

from sluicemq.errors import (
    StoreError,
    StoreFullError,
    StoreTransientError,
    StoreUncertainError,
)
from sluicemq.files import FULL_ERRORS, PASSING_ERRORS, Files, cure_of
from sluicemq.store.segments import Segment, SegmentFiles

SIZE_KEY: Final = "mappedFileSizeCommitLog"
BLANK_BYTES: Final = 8


class CommitLog:
    """The files and how far they are written and synced. See the module for threads and errors."""

    def __init__(
        self, files: Files, directory: str, file_bytes: int, *, requires_checksum: bool = False
    ) -> None:
        self.segments = SegmentFiles(files, directory, file_bytes, SIZE_KEY, cuts_in_order=True)
        self.requires_checksum = requires_checksum
        """A record counts only with its checksum property (`record.checksum`)."""
        self.written_offset = 0
        self.synced_offset = 0
        self.failure: OSError | None = None
        self.refusal: StoreFullError | None = None
        """Why nothing may be appended for the time being: the disk is too full (`retention`)."""
        self._sync_lock = threading.Lock()
        self._unwiped: list[tuple[int, int]] = []  # (position, size) of what a write has begun

    @property
    def start(self) -> int:
        """The first position that is still there."""
        return self.segments.start

    def set_end(self, offset: int) -> None:
        """What recovery found: everything before is on disk, appending goes on from there."""
        self.written_offset = self.synced_offset = offset

    def check(self) -> None:
        """Raises StoreError when the log takes no more writes."""
        if self.failure is not None:
            raise StoreError(
                f"The commit log in {self.segments.directory} refuses writes: {self.failure}.",
                cure="Check the disk, then start the broker again: it recovers what is safe.",
            )

    def check_room(self) -> None:
        """Raises StoreError or StoreFullError when nothing may be appended."""
        self.check()
        if self.refusal is not None:
            raise StoreFullError(self.refusal.fact + ".", cure=self.refusal.cure)

    def write(self, pieces: Sequence[tuple[int, bytes]], end: int) -> None:
        """Write (position, bytes) pieces, each within one file, and let the log end at `end`.

        Raises StoreFullError or StoreError; then nothing was written, as far as anyone can tell,
        but with StoreUncertainError: then it may come back after a restart.
        """
        begun = self._unwiped
        try:
            self._wipe()
            for position, data in pieces:
                segment = self.segments.at(position) or self.add_file(position)
                segment.file()  # without a descriptor nothing has begun
                begun.append((position, len(data)))
                segment.write(data, position)
        except OSError as error:
            try:
                self._wipe()
            except (OSError, StoreError):
                raise self._uncertain(error) from error
            raise self._write_error(error) from error
        begun.clear()
        self.written_offset = end

    def add_file(self, position: int) -> Segment:
        """Create the file that holds `position`; its name and size are durable on return."""
        segments = self.segments
        if not segments.files.exists(segments.directory):
            segments.files.make_directory(segments.directory)
        segment = segments.add(position - position % segments.file_bytes)
        try:
            segment.file().sync()
            segments.files.sync_directory(segments.directory)
        except OSError:
            segments.drop_last()  # nothing may be written where no later sync saves the name
            raise
        return segment

    def prepare_next(self) -> None:
        """Create the next file ahead of need when the last one is three quarters full."""
        last = self.segments.last
        if last is not None and self.written_offset > last.end - last.size // 4:
            self.add_file(last.end)

    def _wipe(self) -> None:
        """Zero what failed writes have begun. Raises OSError, StoreError when that is final."""
        while self._unwiped:
            position, size = self._unwiped[-1]
            segment = self.segments.at(position)
            try:
                if segment is not None and segment.zero_from(position, position + size):
                    self._sync_segment(segment)
            except OSError as error:
                if error.errno not in PASSING_ERRORS | FULL_ERRORS:
                    self.failure = error
                raise
            self._unwiped.pop()

    def _uncertain(self, error: OSError) -> StoreUncertainError:
        return StoreUncertainError(
            f"Writing the commit log in {self.segments.directory} failed half-way: {error}. The"
            " message may come back when the broker is started again.",
            cure=cure_of(error),
        )

    def _write_error(self, error: OSError) -> StoreError:
        directory = self.segments.directory
        if error.errno in PASSING_ERRORS:
            return StoreTransientError(
                f"The commit log in {directory} cannot be written for the moment: {error}.",
                cure=cure_of(error),
            )
        if error.errno not in FULL_ERRORS:
            return StoreError(
                f"Writing the commit log in {directory} failed: {error}.", cure=cure_of(error)
            )
        total, free = self.segments.files.usage(directory)
        return StoreFullError(
            f"There is no room for the commit log in {directory}: {total - free} of {total} bytes"
            f" are used, {free} are free.",
            cure="Make room; sending works again at once.",
        )

    def sync(self) -> int:
        """Make durable what was written when this began; returns the end of that.

        Any thread. Raises StoreError when it fails, now and from then on, and StoreTransientError
        when it may be tried again.
        """
        with self._sync_lock:
            self.check()
            target = self.written_offset
            position = self.synced_offset
            while position < target:
                segment = self.segments.at(position)
                if segment is None:  # the position is a file's end, the next file begins there
                    break
                self._sync_segment(segment)
                position = segment.end
                if position <= target:  # full: nobody writes it any more
                    segment.release()
            self.synced_offset = target
            return target

    def _sync_segment(self, segment: Segment) -> None:
        try:
            file = segment.file()
        except OSError as error:
            if error.errno in PASSING_ERRORS:
                raise self._write_error(error) from error
            self.failure = error
            self.check()
        else:
            try:
                file.sync()
            except OSError as error:
                self.failure = error
                self.check()

    def record(self, position: int, size: int) -> memoryview | None:
        """The bytes [position, + size) without copying; None when no file holds them all."""
        segment = self.segments.at(position)
        if segment is None or position + size > segment.end:
            return None
        begin = position - segment.base
        return segment.view()[begin : begin + size]

    def close(self) -> None:
        self.segments.close()
