"""Blocks of columns that are not in memory: got by another thread, while messages go on.

`find` in `columns_blocks` takes hold of what is needed (the units, views of the log), `Load.run`
does the rest anywhere: a file is read, proved and decoded, or rows of the log are made into
columns. `ColumnBlocks.loaded` keeps what came of it.
"""

from collections.abc import Mapping
from typing import Final

from sluicemq.files import Files
from sluicemq.model.subscription import BlockFilter
from sluicemq.record.columns import ColumnBlock
from sluicemq.store import columns_file
from sluicemq.store.columns_file import Head, UntrueFileError
from sluicemq.store.columns_source import Evidence, Source
from sluicemq.store.consumequeue import Queue


class Load:
    """One block that is to be got; its rows of the queue offsets [start, stop) are wanted."""

    __slots__ = ("block", "error", "head", "is_passed", "queue", "start", "stop")

    def __init__(self, queue: Queue, start: int, stop: int) -> None:
        self.queue: Final = queue
        self.start = start
        self.stop = stop
        self.block: ColumnBlock | None = None
        self.head: Head | None = None
        self.error: Exception | None = None
        self.is_passed = False
        """The figures alone say that nothing in it matches: there is no block then."""

    @property
    def end(self) -> int:
        """Where to go on."""
        return self.stop

    def run(self) -> ColumnBlock | None:
        """The wanted rows; None when it cannot be had, or nothing matches. Any thread."""
        try:
            self.get()
        except (OSError, UntrueFileError) as error:
            self.error = error
        return None if self.block is None else self.block.part(self.start, self.stop)

    def get(self) -> None:
        """Raises OSError, UntrueFileError."""
        raise NotImplementedError


class SliceLoad(Load):
    """Rows of the log that are made into columns."""

    __slots__ = ("_columns_max", "_source")

    def __init__(
        self, queue: Queue, source: Source, start: int, stop: int, columns_max: int
    ) -> None:
        super().__init__(queue, start, min(source.stop, stop))
        self._source = source
        self._columns_max = columns_max

    def get(self) -> None:
        self.block = self._source.block(self._columns_max)


class FileLoad(Load):
    """A file of a sealed block. `evidence`: what the proofs from each offset on are reckoned from,
    as it is now; None: the file is known to be true."""

    __slots__ = ("_directory", "_evidence", "_files", "_filter", "_offset_min", "name", "number")

    def __init__(
        self,
        queue: Queue,
        start: int,
        stop: int,
        place: tuple[Files, str, str, int],
        evidence: Mapping[int, Evidence | None] | None,
        block_filter: BlockFilter | None,
    ) -> None:
        super().__init__(queue, start, stop)
        self._files, self._directory, self.name, self.number = place
        self._evidence = evidence
        self._filter = block_filter
        self._offset_min = queue.offset_min

    def get(self) -> None:
        if self._filter is not None:
            self.head = columns_file.read_head(self._files, self._directory, self.name)
            self._check(self.head)
            if not self._filter.can_match(self.head.stats):
                self.is_passed = True
                return
        sealed = columns_file.read(self._files, self._directory, self.name)
        if self.head is None:
            self._check(sealed)
        self.block = sealed.block

    def _check(self, found: "columns_file.Sealed | Head") -> None:
        if self._evidence is None:
            return
        evidence_at = self._evidence.get

        def proof_of(start: int, _: int) -> int | None:
            evidence = evidence_at(start)
            return None if evidence is None else evidence.proof()

        key = (self.queue.topic, self.queue.queue_id)
        columns_file.check(found, key, self._offset_min, proof_of)
