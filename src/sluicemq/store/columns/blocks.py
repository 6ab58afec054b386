"""Blocks of property columns of every queue: from memory, from files, or made from the log.

    rows of a queue   | block 0 (65,536 rows) | block 1 | … |  the tail                    |
                      |  sealed: a file       |  sealed |   |  slots of 4,096, in memory   |

A reader gets the block that contains an offset: the sealed block, or else a piece of a slot that is
in memory already. Otherwise the rows of the slot are decoded at once, in some three milliseconds. A
slot at the end of a queue grows piece by piece. A reader that must not wait gets a `Load`, which
another thread runs while messages are processed. A filtered pull uses neither of them: it decodes
only the columns that its filter reads (`scan`). Therefore a filter is fast with the log alone. The
files only spare the decoding, once for all filters and also after a restart.

`seal_blocks` makes the files, the oldest block first. It yields jobs for another thread and pauses
between them. The jobs decode and write, and read only what was taken before. In a broker, a process
of its own does the jobs. A block is sealed when all of its records are synced, so a file never
contains what a crash can still undo.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

from sluicemq.config import StoreConfig
from sluicemq.files import Files
from sluicemq.model.subscription import BlockFilter
from sluicemq.record.arrow import ArrowColumns
from sluicemq.record.columns import BlockStats, ColumnBlock
from sluicemq.store.columns import file as columns_file
from sluicemq.store.columns.file import (
    PROOF_ROWS,
    BlockHead,
    SealedBlock,
    SealedFile,
    SealJob,
    SourceRows,
    UntrueFileError,
    read_units,
    seal_pieces,
)
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import ConsumeQueues, Queue

if TYPE_CHECKING:
    from sluicemq.store.columns.file import Sealer

CacheKey = tuple[str, int, str, int]
"""The key of a cached block: topic, queue id, "sealed" or "slot", and the number of that."""
_VALUE_BYTES: Final = 24
"""The average memory of a distinct value in addition to its bytes in Arrow.

It is some 70 bytes once a filter has read the column, which happens to few columns.
"""


class BlockCache:
    """A cache of blocks with an estimated size of at most `bytes_max`.

    A key has several blocks if it is that of a slot that grew. The key that was used least recently
    is evicted first. The cache always keeps the newest key.
    """

    def __init__(self, bytes_max: int) -> None:
        """Create an empty cache for blocks with an estimated size of `bytes_max` bytes."""
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[CacheKey, tuple[ColumnBlock, ...]] = OrderedDict()
        self._sizes: dict[CacheKey, int] = {}
        self.size_bytes = 0
        """The estimated size of all blocks in the cache."""

    def get(self, key: CacheKey) -> tuple[ColumnBlock, ...]:
        """Return the blocks of a key in the order of their offsets, () if there are none.

        The key then counts as used most recently.
        """
        blocks = self._blocks.get(key)
        if blocks is None:
            return ()
        self._blocks.move_to_end(key)
        return blocks

    def put(self, key: CacheKey, *blocks: ColumnBlock) -> None:
        """Replace the blocks of a key, and evict others if the cache is too large."""
        self.drop(key)
        size = sum(map(estimate_memory_bytes, blocks))
        self._blocks[key] = blocks
        self._sizes[key] = size
        self.size_bytes += size
        while self.size_bytes > self._bytes_max and len(self._blocks) > 1:
            self.drop(next(iter(self._blocks)))

    def drop(self, key: CacheKey) -> None:
        """Remove the blocks of a key, if there are any."""
        if self._blocks.pop(key, None) is not None:
            self.size_bytes -= self._sizes.pop(key)

    def drop_before(self, offset_min: "Callable[[QueueKey], int]") -> None:
        """Remove the blocks whose rows are all before the first offset of their queue.

        `offset_min` returns that offset for a (topic, queue id).
        """
        for key in list(self._blocks):
            topic, queue_id, kind, number = key
            rows = SLOT_ROWS if kind == "slot" else BLOCK_ROWS
            if (number + 1) * rows <= offset_min((topic, queue_id)):
                self.drop(key)

    def drop_topic(self, topic: str) -> None:
        """Remove all blocks of a topic."""
        for key in [key for key in self._blocks if key[0] == topic]:
            self.drop(key)


def estimate_memory_bytes(block: ColumnBlock) -> int:
    """Return the estimated memory of a block whose columns are all in use.

    Blocks that are not made of Arrow arrays count as 0.
    """
    if not isinstance(block.columns, ArrowColumns):
        return 0
    arrays = block.columns.arrays.values()
    return sum(array.nbytes + _VALUE_BYTES * len(array.dictionary) for array in arrays)


class Load:
    """A block that another thread loads, for a reader that needs the offsets [start, end).

    `name` and `number` are the name of its file and the number of its block; without a file they
    are "" and -1. `block`, `head` and `error` are None before `run`. Afterwards `block` is the
    whole block, `head` the head of its file if that was read first, and `error` the error of a load
    that failed.
    """

    __slots__ = ("_fetch", "block", "end", "error", "head", "name", "number", "queue", "start")

    def __init__(
        self,
        queue: Queue,
        start: int,
        end: int,
        fetch: "Callable[[], tuple[ColumnBlock | None, BlockHead | None]]",
        name: str = "",
        number: int = -1,
    ) -> None:
        """Prepare a load. `fetch()` does it, in any thread.

        It returns (block, head of the file). The block is None if it cannot match, and the head is
        None if it was not read first. It may raise OSError and UntrueFileError.
        """
        self._fetch = fetch
        self.queue: Final = queue
        self.start = start
        self.end = end
        self.name = name
        self.number = number
        self.block: ColumnBlock | None = None
        self.head: BlockHead | None = None
        self.error: Exception | None = None

    @property
    def has_no_match(self) -> bool:
        """Whether the statistics in the head of the file show that nothing in it matches."""
        return self.head is not None and self.block is None

    def run(self) -> ColumnBlock | None:
        """Load the block, and return its rows with the offsets [start, end), in any thread.

        Sets `block`, `head` and `error`. Returns None if the block cannot be read (then `error` is
        set) or if it cannot match (`has_no_match`).
        """
        try:
            self.block, self.head = self._fetch()
        except (OSError, UntrueFileError) as error:
            self.error = error
        return None if self.block is None else self.block.slice_offsets(self.start, self.end)


logger = logging.getLogger(__name__)

BLOCK_ROWS: Final = 1 << 16
"""The number of offsets in a sealed block. Block n begins at offset n * BLOCK_ROWS."""
SLOT_ROWS: Final = PROOF_ROWS
"""The number of offsets in a slot."""
PART_ROWS: Final = 8192
"""The maximum number of rows that are decoded at once for one filter."""
HEADS_CACHED_MAX: Final = 4096
"""The maximum number of heads of files in memory."""
PAUSE_S: Final = 0.02
"""The pause between two jobs of `seal_blocks`, because messages have priority."""
QueueKey = tuple[str, int]
"""A topic and a queue id."""
HeadPredicate = Callable[[BlockStats], bool]
"""A function that says by the statistics of a block whether the block is needed."""
Step = float | Callable[[], None]
"""What `seal_blocks` yields: seconds to wait, or a job for another thread."""


class ColumnBlocks:
    """All blocks of a store.

    One thread uses it. Only the jobs of `seal_blocks`, `Load.run` and the functions of
    `make_block_builder` may run in others.
    """

    def __init__(
        self, config: StoreConfig, files: Files, log: CommitLog, queues: ConsumeQueues
    ) -> None:
        self._config = config
        self._files = files
        self._log = log
        self._queues = queues
        self._directory = f"{config.root}/columns"
        self._cache = BlockCache(config.columns_memory_bytes)
        self._tables: dict[QueueKey, dict[int, str]] = {}  # block number -> file name
        self._sizes: dict[str, int] = {}  # path -> bytes
        self._sealed_to: dict[QueueKey, int] = {}  # number of the first block that may have no file
        self._to_remove: list[str] = []  # invalid files, which `seal_blocks` removes
        self._heads: dict[tuple[str, int, int], BlockHead] = {}  # whose proofs were valid
        # The blocks whose file was made or checked in this run.
        self._proved: set[tuple[str, int, int]] = set()
        self.sealer: Sealer | None = None
        """The sealer that makes the files in another process, None if this process makes them."""
        self.rows_decoded = 0
        """The number of rows that were decoded for readers."""
        self.rows_sealed = 0
        """The number of rows whose columns were written to files."""

    @property
    def size_bytes(self) -> int:
        """The size of the files of the queues that were used since the start."""
        return sum(self._sizes.values())

    # --- For readers

    def find_block(self, queue: Queue, offset: int) -> ColumnBlock | None:
        """Return the block that contains a visible offset, from memory or from its file.

        The call waits for the file, and caches its block. Return None if the block is in neither.
        """
        block = self.cached_block(queue, offset)
        number = offset // BLOCK_ROWS
        name = self._table(queue).get(number)
        if block is not None or name is None:
            return block
        if self._cache.get((*self._key(queue), "sealed", number)):
            return None  # the sealed block begins behind the offset
        block = self._load_now(queue, number, name, None).block
        is_inside = block is not None and block.first_offset <= offset < block.end
        return block if is_inside else None

    def get_block(self, queue: Queue, offset: int) -> ColumnBlock | None:
        """Return the block that contains a visible offset. Its rows are decoded if necessary.

        Then the block is a piece of a slot: its visible rows that are not in memory yet, at most
        SLOT_ROWS. The piece is cached. Return None if the rows cannot be read.
        """
        block = self.find_block(queue, offset)
        if block is not None:
            return block
        start, stop = self._missing_rows(queue, offset)
        source = self.take_rows(queue, start, stop) if start <= offset < stop else None
        if source is None:
            return None
        piece = source.all_columns(self._config.columns_max)
        self.rows_decoded += piece.rows
        slot = (*self._key(queue), "slot", offset // SLOT_ROWS)
        self._cache.put(slot, *self._cache.get(slot), piece)
        return piece

    @staticmethod
    def block_end(queue: Queue, offset: int) -> int:
        """Return the end of the visible rows in the block to which an offset belongs."""
        return min(queue.visible_offset, offset - offset % BLOCK_ROWS + BLOCK_ROWS)

    def take_rows(self, queue: Queue, start: int, stop: int) -> SourceRows | None:
        """Return the rows with the offsets [start, stop), None if some of them do not exist."""
        return SourceRows.from_queue(self._log, queue, start, stop)

    def make_block_builder(self, units: bytes, columns_max: int) -> Callable[[], ColumnBlock]:
        """Return a function that makes a block of the messages of any units, in any thread."""
        return partial(SourceRows.from_units(self._log, 0, units).all_columns, columns_max)

    def find_or_load(
        self,
        queue: Queue,
        offset: int,
        end: int,
        block_filter: BlockFilter | None,
    ) -> ColumnBlock | Load | None:
        """Return the rows of one block from a visible offset on, at most up to `end`.

        If the rows are not in memory, return a `Load` for another thread. With a filter, a load
        reads the head of a file first, and only that if the block cannot match. Rows without a file
        are decoded with only the columns that the filter reads, at most PART_ROWS. Return None if
        the rows cannot be read, or if they must be decoded and there is no filter.
        """
        number = offset // BLOCK_ROWS
        key = self._key(queue)
        cached = self.cached_block(queue, offset)
        if cached is not None:
            return cached.slice_offsets(offset, min(cached.end, end))
        name = self._table(queue).get(number)
        if name is None:
            if block_filter is None:
                return None
            names = block_filter.names
            stop = min(offset + PART_ROWS, end, self.block_end(queue, offset))
            source = self.take_rows(queue, offset, stop)
            if source is None:
                return None
            return Load(queue, offset, stop, lambda: (source.columns_of(names), None))
        stop = min((number + 1) * BLOCK_ROWS, end)
        is_needed = None
        if block_filter is not None and (*key, number) not in self._heads:
            is_needed = block_filter.can_match
        return Load(
            queue, offset, stop, self._make_fetch(queue, number, name, is_needed), name, number
        )

    def _make_fetch(
        self, queue: Queue, number: int, name: str, is_needed: HeadPredicate | None
    ) -> "Callable[[], tuple[ColumnBlock | None, BlockHead | None]]":
        """Return a function that reads a file and checks its proofs, in any thread.

        The rows that the proofs are compared with are taken now, because only this thread may read
        the queue. The proofs of a file are checked once in each run of the process. With
        `is_needed`, the function reads the head first, and nothing else if `is_needed` returns
        False for its statistics. It returns (block, head) as `Load` needs them, and raises OSError
        and UntrueFileError.
        """
        key = self._key(queue)
        offset_min = queue.offset_min
        location = (self._files, self._directory_of(queue), name)
        evidence: dict[int, SourceRows | None] | None = None
        if (*key, number) not in self._proved:
            first = columns_file.parse_first_offset(name) or 0
            stop = (number + 1) * BLOCK_ROWS
            evidence = {
                start: SourceRows.from_queue(self._log, queue, start, min(start + SLOT_ROWS, stop))
                for start in range(first, stop, SLOT_ROWS)
                if start + SLOT_ROWS > offset_min
            }

        def check(found: SealedBlock | BlockHead) -> None:
            if evidence is not None:
                columns_file.check_proofs(found, key, offset_min, evidence)

        def fetch() -> tuple[ColumnBlock | None, BlockHead | None]:
            head = None
            if is_needed is not None:
                head = columns_file.read_block_head(*location)
                check(head)
                if not is_needed(head.stats):
                    return None, head
            sealed = columns_file.read_block(*location)
            if head is None:
                check(sealed)
            return sealed.block, head

        return fetch

    def _load_now(
        self, queue: Queue, number: int, name: str, is_needed: HeadPredicate | None
    ) -> Load:
        """Read a file in this thread, cache the result, and return the finished load."""
        load = Load(queue, 0, 0, self._make_fetch(queue, number, name, is_needed), name, number)
        load.run()
        self.accept_load(load)
        return load

    def cached_block(self, queue: Queue, offset: int) -> ColumnBlock | None:
        """Return the block in memory that contains an offset, None if there is none."""
        key = self._key(queue)
        for kind, number in (("sealed", offset // BLOCK_ROWS), ("slot", offset // SLOT_ROWS)):
            for block in self._cache.get((*key, kind, number)):
                if block.first_offset <= offset < block.end:
                    return block
        return None

    def _missing_rows(self, queue: Queue, offset: int) -> tuple[int, int]:
        """Return the offsets [start, stop) of the slot of `offset` that are not in memory.

        They follow the pieces of the slot that are.
        """
        slot = offset // SLOT_ROWS
        start = max(slot * SLOT_ROWS, queue.offset_min)
        for piece in self._cache.get((*self._key(queue), "slot", slot)):
            start = max(start, piece.end)
        return start, min((slot + 1) * SLOT_ROWS, queue.visible_offset)

    def accept_load(self, load: Load) -> None:
        """Cache the result of a finished load, or forget its file if the load failed.

        A forgotten file is logged, `seal_blocks` removes it, and the block is sealed again. Does
        nothing if the topic was deleted or the file replaced meanwhile. Rows that were decoded
        without a file are only counted (`rows_decoded`), not cached.
        """
        queue = load.queue
        block = load.block
        key = self._key(queue)
        if self._queues.by_key.get(key) is not queue:
            return  # its topic was deleted meanwhile
        if load.name:
            if self._table(queue).get(load.number) != load.name:
                return
            if load.error is not None:
                path = f"{self._directory_of(queue)}/{load.name}"
                logger.warning("property columns in %s are made again: %s", path, load.error)
                del self._table(queue)[load.number]
                self._sealed_to.pop(key, None)
                self._sizes.pop(path, None)
                self._forget(queue, load.number)
                self._to_remove.append(path)
                return
            self._proved.add((*key, load.number))
            if load.head is not None:
                self._heads[(*key, load.number)] = load.head
                if len(self._heads) > HEADS_CACHED_MAX:
                    del self._heads[next(iter(self._heads))]
            if block is not None:
                self._cache.put((*key, "sealed", load.number), block)
        elif block is not None:
            self.rows_decoded += block.rows

    def head_at(self, queue: Queue, offset: int, *, only_known: bool = False) -> BlockHead | None:
        """Return the head of the sealed block that contains an offset, None if there is none.

        Only the head of the file is read, and cached. With `only_known`, no file is read: return
        the head only if it is in memory. Return None also if the file is not valid.
        """
        number = offset // BLOCK_ROWS
        key = (*self._key(queue), number)
        head = self._heads.get(key)
        if head is None:
            name = None if only_known else self._table(queue).get(number)
            if name is None:
                return None
            head = self._load_now(queue, number, name, lambda stats: False).head
            if head is None:
                return None
        return head if head.first_offset <= offset < head.end else None

    def _forget(self, queue: Queue, number: int) -> None:
        """Forget the head and the proof of a block."""
        key = (*self._key(queue), number)
        self._heads.pop(key, None)
        self._proved.discard(key)

    # --- The files of a queue

    def _directory_of(self, queue: Queue) -> str:
        return f"{self._directory}/{queue.topic}/{queue.queue_id}"

    def _table(self, queue: Queue) -> dict[int, str]:
        """Return the names of the files of a queue by the numbers of their blocks.

        The result is the table itself, not a copy. The first call for a queue lists its directory.
        Files with other names, or of a block that has a file already, are noted for removal.
        """
        key = (queue.topic, queue.queue_id)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = {}
            directory = self._directory_of(queue)
            for name in self._files.names(directory):
                first = columns_file.parse_first_offset(name)
                number = -1 if first is None else first // BLOCK_ROWS
                if number < 0 or number in table:
                    self._to_remove.append(f"{directory}/{name}")
                else:
                    table[number] = name
                    with closing(self._files.open(f"{directory}/{name}")) as file:
                        self._sizes[f"{directory}/{name}"] = file.size()
        return table

    def remove_expired(self) -> None:
        """Remove the files and cached blocks of messages that retention has removed.

        A block is removed when all its rows are before the queue's first offset. The directories of
        queues that do not exist are removed too. Raises OSError.
        """

        def offset_min(key: QueueKey) -> int:
            queue = self._queues.by_key.get(key)
            return 0 if queue is None else queue.offset_min

        self._cache.drop_before(offset_min)
        for topic in self._files.names(self._directory):
            for name in self._files.names(f"{self._directory}/{topic}"):
                queue = self._queues.by_key.get(
                    (topic, int(name) if name.isdecimal() and name.isascii() else -1)
                )
                if queue is None:
                    self._remove_directory(f"{self._directory}/{topic}/{name}")
                    continue
                table = self._table(queue)
                expired = [n for n in table if (n + 1) * BLOCK_ROWS <= queue.offset_min]
                for number in expired:
                    self._remove(f"{self._directory_of(queue)}/{table.pop(number)}")
                    self._forget(queue, number)

    def delete_topic(self, topic: str) -> None:
        """Forget the columns of a topic and remove the files. Raises OSError."""
        self._cache.drop_topic(topic)
        for key in [key for key in self._tables if key[0] == topic]:
            del self._tables[key]
            for head in [head for head in self._heads if head[:2] == key]:
                del self._heads[head]
            self._proved -= {proved for proved in self._proved if proved[:2] == key}
            self._sealed_to.pop(key, None)
        directory = f"{self._directory}/{topic}"
        for name in self._files.names(directory):
            self._remove_directory(f"{directory}/{name}")
        if self._files.exists(directory):
            self._files.remove(directory)

    @staticmethod
    def _key(queue: Queue) -> QueueKey:
        return queue.topic, queue.queue_id

    def _remove_directory(self, directory: str) -> None:
        for name in self._files.names(directory):
            self._remove(f"{directory}/{name}")
        self._files.remove(directory)

    def _remove(self, path: str) -> None:
        self._sizes.pop(path, None)
        if self._files.exists(path):
            self._files.remove(path)

    # --- Making files

    def seal_blocks(self, topics: Collection[str]) -> Iterator[Step]:
        """Write the files of all complete blocks of some topics, and remove invalid files.

        A block is complete if all its offsets are visible and its last record is synced. Yield what
        the caller must do before it resumes the generator: wait some seconds, or call a job in
        another thread. Raises OSError; the next call continues with the same block.
        """
        for key in list(self._queues.by_key):
            queue = self._queues.by_key.get(key)
            if queue is None or key[0] not in topics:
                continue
            table = self._table(queue)
            while self._to_remove:
                self._remove(self._to_remove.pop())
                yield 0.0
            number = max(queue.offset_min // BLOCK_ROWS, self._sealed_to.get(key, 0))
            while (number + 1) * BLOCK_ROWS <= queue.visible_offset:
                if self._queues.by_key.get(key) is not queue:
                    break  # its topic was deleted meanwhile
                if number not in table:
                    stop = (number + 1) * BLOCK_ROWS
                    last = SourceRows.from_queue(self._log, queue, stop - 1, stop)
                    if last is None or last.end_position > self._log.synced_offset:
                        break  # a crash could still undo it
                    yield from self._seal(queue, number)
                    if number not in table:
                        break
                number += 1
                self._sealed_to[key] = number

    def _seal(self, queue: Queue, number: int) -> Iterator[Step]:
        """Make the file of one block, and yield steps as `seal_blocks` does.

        The slots of the block are taken from the cache or decoded, one for each job, then written.
        If retention has removed some of the rows, there is no file.
        """
        start = max(number * BLOCK_ROWS, queue.offset_min)
        stop = (number + 1) * BLOCK_ROWS
        if self.sealer is not None:
            yield from self._seal_in_process(self.sealer, queue, number, start, stop)
            return
        pieces: list[ColumnBlock] = []
        sources: list[SourceRows] = []

        def decode(source: SourceRows) -> None:
            pieces.append(source.all_columns(self._config.columns_max))

        for at in range(start - start % SLOT_ROWS, stop, SLOT_ROWS):
            source = SourceRows.from_queue(self._log, queue, max(at, start), at + SLOT_ROWS)
            if source is None:
                return  # retention has removed some rows
            sources.append(source)
            known = self._cache.get((*self._key(queue), "slot", at // SLOT_ROWS))
            if len(known) == 1 and known[0].rows == source.stop - source.start:
                pieces.append(known[0])
                continue
            yield partial(decode, source)
            yield PAUSE_S
        config = self._config
        made = list[SealedFile]()

        def run() -> None:
            limits = config.columns_max, config.columns_disk_percent
            directory = self._directory_of(queue)
            key = self._key(queue)
            made.append(seal_pieces(self._files, directory, key, limits, pieces, sources))

        yield run
        self._add_sealed(queue, number, made[0])
        yield PAUSE_S

    def _seal_in_process(
        self, sealer: "Sealer", queue: Queue, number: int, start: int, stop: int
    ) -> Iterator[Step]:
        """Let the sealer make the file of the rows [start, stop), and yield steps.

        The sealer's process needs only their units. If retention has removed some of the rows,
        there is no file.
        """
        starts = []
        units = []
        for at in range(start - start % SLOT_ROWS, stop, SLOT_ROWS):
            found = read_units(queue, max(at, start), at + SLOT_ROWS)
            if found is None:
                return  # retention has removed some rows
            starts.append(max(at, start))
            units.append(found)
            yield 0.0
        config = self._config
        made = list[SealedFile]()
        job = SealJob(
            directory=self._directory_of(queue),
            topic=queue.topic,
            queue_id=queue.queue_id,
            columns_max=config.columns_max,
            disk_percent=config.columns_disk_percent,
            log_directory=config.commit_log_path,
            log_file_bytes=config.commit_log_file_bytes,
            starts=starts,
            sizes=list(map(len, units)),
        )

        def run() -> None:
            made.append(SealedFile(*sealer.seal(job, units), stop - start))

        yield run
        self._add_sealed(queue, number, made[0])

    def _add_sealed(self, queue: Queue, number: int, made: SealedFile) -> None:
        """Register a new file, and replace its slots in the cache by its block, if that is known.

        If the topic was deleted meanwhile, only note the file for removal.
        """
        path = f"{self._directory_of(queue)}/{made.name}"
        if self._queues.by_key.get(self._key(queue)) is not queue:
            self._to_remove.append(path)  # the topic was deleted meanwhile
            return
        self.rows_sealed += made.rows
        self._table(queue)[number] = made.name
        self._proved.add((*self._key(queue), number))
        self._sizes[path] = made.size_bytes
        key = self._key(queue)
        for slot in range(number * BLOCK_ROWS // SLOT_ROWS, (number + 1) * BLOCK_ROWS // SLOT_ROWS):
            self._cache.drop((*key, "slot", slot))
        if made.block is not None:
            self._cache.put((*key, "sealed", number), made.block)
