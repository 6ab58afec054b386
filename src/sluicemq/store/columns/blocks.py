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
from collections.abc import Callable, Collection, Generator, Iterator
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

    A key names a sealed block or a slot (a range of offsets of a queue). A slot that grew has
    several blocks. The key that was used least recently is evicted first. The cache always keeps
    the newest key.
    """

    def __init__(self, bytes_max: int) -> None:
        """Create an empty cache that holds blocks of about `bytes_max` bytes in total."""
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
        """Replace the blocks of a key, and evict the least recently used if there are too many."""
        self.drop(key)
        size_bytes = sum(map(estimate_memory_bytes, blocks))
        self._blocks[key] = blocks
        self._sizes[key] = size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max and len(self._blocks) > 1:
            self.drop(next(iter(self._blocks)))

    def drop(self, key: CacheKey) -> None:
        """Remove the blocks of a key, if there are any."""
        if self._blocks.pop(key, None) is not None:
            self.size_bytes -= self._sizes.pop(key)

    def drop_before(self, first_offset_of: "Callable[[QueueKey], int]") -> None:
        """Remove the blocks whose rows are all before the first offset of their queue.

        `first_offset_of` returns that offset for a (topic, queue id).
        """
        for key in list(self._blocks):
            topic, queue_id, kind, number = key
            row_count = SLOT_ROWS if kind == "slot" else BLOCK_ROWS
            end_offset = (number + 1) * row_count
            if end_offset <= first_offset_of((topic, queue_id)):
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

    `name` and `block_number` are the name of its file and the number of its block; without a file
    they are "" and -1. `block`, `head` and `error` are None before `run`. Afterwards `block` is the
    whole block, `head` the head of its file if that was read first, and `error` the error of a load
    that failed.
    """

    __slots__ = (
        "_fetch",
        "block",
        "block_number",
        "end",
        "error",
        "head",
        "name",
        "queue",
        "start",
    )

    def __init__(
        self,
        queue: Queue,
        start: int,
        end: int,
        fetch: "Callable[[], tuple[ColumnBlock | None, BlockHead | None]]",
        name: str = "",
        block_number: int = -1,
    ) -> None:
        """Prepare a load of the rows [start, end) of a queue. `run` calls `fetch()`, in any thread.

        `fetch` returns (block, head of the file). The block is None if no row of it can match a
        filter. The head is None unless it was read before the block. `fetch` may raise OSError and
        UntrueFileError.

        `name` is the name of the block's file, and `block_number` its number. They are "" and -1 if
        the rows have no file.
        """
        self._fetch = fetch
        self.queue: Final = queue
        self.start = start
        self.end = end
        self.name = name
        self.block_number = block_number
        self.block: ColumnBlock | None = None
        self.head: BlockHead | None = None
        self.error: Exception | None = None

    @property
    def has_no_match(self) -> bool:
        """Whether the statistics in the head of the file show that nothing in it matches."""
        return self.head is not None and self.block is None

    def run(self) -> ColumnBlock | None:
        """Load the block in the calling thread, and return its rows with the offsets [start, end).

        Sets `block` and `head`. Returns None if the block cannot be read (then `error` is set), or
        if no row of it can match a filter (then `has_no_match` is True).
        """
        try:
            self.block, self.head = self._fetch()
        except (OSError, UntrueFileError) as error:
            self.error = error
        if self.block is None:
            return None
        return self.block.slice_offsets(self.start, self.end)


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
        """Create the blocks of a store, whose files are in `<config.root>/columns`.

        `log` and `queues` contain the messages. Nothing is read yet.
        """
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

        The call reads the file and caches its block if necessary. Return None if neither memory nor
        a file has the block, or if the file is not valid.
        """
        block = self.cached_block(queue, offset)
        block_number = offset // BLOCK_ROWS
        name = self._get_file_names(queue).get(block_number)
        if block is not None or name is None:
            return block
        if self._cache.get((*self._key(queue), "sealed", block_number)):
            return None  # the sealed block begins behind the offset
        block = self._load_now(queue, block_number, name, None).block
        if block is None or not block.first_offset <= offset < block.end:
            return None
        return block

    def get_block(self, queue: Queue, offset: int) -> ColumnBlock | None:
        """Return the block that contains a visible offset. Decode its rows if necessary.

        Decoded rows form a block of at most SLOT_ROWS rows: the visible rows of the slot (the
        SLOT_ROWS offsets around `offset`) that are not in memory yet. They are cached. Return None
        if the rows cannot be read.
        """
        block = self.find_block(queue, offset)
        if block is not None:
            return block
        start, stop = self._find_missing_rows(queue, offset)
        if not start <= offset < stop:
            return None
        rows = self.take_rows(queue, start, stop)
        if rows is None:
            return None
        decoded = rows.all_columns(self._config.columns_max)
        self.rows_decoded += decoded.rows
        cache_key = (*self._key(queue), "slot", offset // SLOT_ROWS)
        self._cache.put(cache_key, *self._cache.get(cache_key), decoded)
        return decoded

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
        """Return rows of one block from a visible offset up to `end`, or a `Load` that gets them.

        A block is returned if the rows are in memory. Otherwise the result is a `Load`, a task for
        another thread. It reads the file of the block: with a filter, first the head, and nothing
        else if no row can match. Without a file, it decodes at most PART_ROWS rows, with only the
        columns that the filter reads.

        Return None if the rows cannot be read, or if they must be decoded and there is no filter.
        """
        block_number = offset // BLOCK_ROWS
        key = self._key(queue)
        cached = self.cached_block(queue, offset)
        if cached is not None:
            return cached.slice_offsets(offset, min(cached.end, end))
        file_name = self._get_file_names(queue).get(block_number)
        if file_name is None:
            if block_filter is None:
                return None
            return self._prepare_decoding(queue, offset, end, block_filter.names)

        # If the head of the file is in memory, the caller has already asked it whether the block
        # can match.
        is_needed = None
        if block_filter is not None and (*key, block_number) not in self._heads:
            is_needed = block_filter.can_match
        stop = min((block_number + 1) * BLOCK_ROWS, end)
        fetch = self._make_fetch(queue, block_number, file_name, is_needed)
        return Load(queue, offset, stop, fetch, file_name, block_number)

    def _prepare_decoding(
        self, queue: Queue, offset: int, end: int, names: frozenset[str]
    ) -> Load | None:
        """Return a load that decodes the columns `names` of rows that have no file.

        The rows begin at `offset`, and end at `end` or earlier: at most PART_ROWS are decoded.
        Return None if the rows cannot be read.
        """
        stop = min(offset + PART_ROWS, end, self.block_end(queue, offset))
        rows = self.take_rows(queue, offset, stop)
        if rows is None:
            return None
        return Load(queue, offset, stop, lambda: (rows.columns_of(names), None))

    def _make_fetch(
        self, queue: Queue, block_number: int, file_name: str, is_needed: HeadPredicate | None
    ) -> "Callable[[], tuple[ColumnBlock | None, BlockHead | None]]":
        """Return a function that reads the file of a block, in any thread.

        The function returns (block, head), and raises OSError and UntrueFileError. If `is_needed`
        is not None, it reads the head first. If `is_needed` then returns False for the statistics
        in the head, it reads nothing else, and the block is None. Without `is_needed`, the head is
        None.

        The function also compares the proofs (checksums of source rows) in the file with the queue,
        unless that was done before. The rows for it are taken now, because only this thread may
        read the queue.
        """
        key = self._key(queue)
        offset_min = queue.offset_min
        location = (self._files, self._directory_of(queue), file_name)
        evidence: dict[int, SourceRows | None] | None = None
        if (*key, block_number) not in self._proved:
            first_offset = columns_file.parse_first_offset(file_name) or 0
            evidence = self._take_evidence(queue, first_offset, (block_number + 1) * BLOCK_ROWS)

        def check(read: SealedBlock | BlockHead) -> None:
            if evidence is not None:
                columns_file.check_proofs(read, key, offset_min, evidence)

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

    def _take_evidence(
        self, queue: Queue, first_offset: int, end: int
    ) -> dict[int, SourceRows | None]:
        """Return the present rows with which the proofs (checksums) of a file are compared.

        The file covers the offsets [first_offset, end) of the queue, with a proof for every
        SLOT_ROWS rows. The result maps the first offset of each proof to its rows, or to None if
        some of them do not exist. Proofs whose rows retention has removed are left out.
        """
        evidence: dict[int, SourceRows | None] = {}
        for proof_offset in range(first_offset, end, SLOT_ROWS):
            proof_end = proof_offset + SLOT_ROWS
            if proof_end > queue.offset_min:
                evidence[proof_offset] = self.take_rows(queue, proof_offset, min(proof_end, end))
        return evidence

    def _load_now(
        self, queue: Queue, block_number: int, file_name: str, is_needed: HeadPredicate | None
    ) -> Load:
        """Read a file in this thread, cache the result, and return the finished load."""
        fetch = self._make_fetch(queue, block_number, file_name, is_needed)
        load = Load(queue, 0, 0, fetch, file_name, block_number)
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

    def _find_missing_rows(self, queue: Queue, offset: int) -> tuple[int, int]:
        """Return the offsets [start, stop) of the slot of `offset` that are not in memory yet.

        A slot is a fixed group of SLOT_ROWS offsets. Its first rows may be in memory; the missing
        ones follow them, up to the last visible row. `start` may be greater than `stop`.
        """
        slot_number = offset // SLOT_ROWS
        start = max(slot_number * SLOT_ROWS, queue.offset_min)
        for cached_block in self._cache.get((*self._key(queue), "slot", slot_number)):
            start = max(start, cached_block.end)
        return start, min((slot_number + 1) * SLOT_ROWS, queue.visible_offset)

    def accept_load(self, load: Load) -> None:
        """Cache the result of a finished load. If it failed, forget its file.

        A failure is logged. `seal_blocks` then removes the file, and writes the block again. Does
        nothing if the topic was deleted or the file replaced while the load ran. Rows that were
        decoded without a file are only counted in `rows_decoded`.
        """
        queue = load.queue
        if self._queues.by_key.get(self._key(queue)) is not queue:
            return  # its topic was deleted meanwhile
        if not load.name:  # the rows have no file
            if load.block is not None:
                self.rows_decoded += load.block.rows
            return
        if self._get_file_names(queue).get(load.block_number) != load.name:
            return  # the file was replaced meanwhile
        if load.error is not None:
            self._discard_file(load)
        else:
            self._cache_load(load)

    def _discard_file(self, load: Load) -> None:
        """Log that the file of a failed load is bad, and forget it.

        `seal_blocks` later removes it and makes it again.
        """
        queue = load.queue
        path = f"{self._directory_of(queue)}/{load.name}"
        logger.warning("property columns in %s are made again: %s", path, load.error)
        del self._get_file_names(queue)[load.block_number]
        self._sealed_to.pop(self._key(queue), None)
        self._sizes.pop(path, None)
        self._forget_head(queue, load.block_number)
        self._to_remove.append(path)

    def _cache_load(self, load: Load) -> None:
        """Cache the head and the block that a successful load has read from a file."""
        key = self._key(load.queue)
        self._proved.add((*key, load.block_number))
        if load.head is not None:
            self._heads[(*key, load.block_number)] = load.head
            if len(self._heads) > HEADS_CACHED_MAX:
                oldest_key = next(iter(self._heads))
                del self._heads[oldest_key]
        if load.block is not None:
            self._cache.put((*key, "sealed", load.block_number), load.block)

    def head_at(self, queue: Queue, offset: int, *, only_known: bool = False) -> BlockHead | None:
        """Return the head of the file that contains an offset; None if there is no valid one.

        The head has the statistics of the columns. It is read without the rest of the file, and
        cached. If `only_known`, no file is read: return the head only if it is in memory.
        """
        block_number = offset // BLOCK_ROWS
        cache_key = (*self._key(queue), block_number)
        head = self._heads.get(cache_key)
        if head is None and not only_known:
            file_name = self._get_file_names(queue).get(block_number)
            if file_name is None:
                return None
            # A predicate that is always False makes the load stop after the head.
            head = self._load_now(queue, block_number, file_name, lambda stats: False).head
        if head is None or not head.first_offset <= offset < head.end:
            return None
        return head

    def _forget_head(self, queue: Queue, block_number: int) -> None:
        """Forget the head and the proof of a block."""
        key = (*self._key(queue), block_number)
        self._heads.pop(key, None)
        self._proved.discard(key)

    # --- The files of a queue

    def _directory_of(self, queue: Queue) -> str:
        """Return the directory of the files of a queue."""
        return f"{self._directory}/{queue.topic}/{queue.queue_id}"

    def _get_file_names(self, queue: Queue) -> dict[int, str]:
        """Return the names of the files of a queue by the numbers of their blocks.

        The result is the table itself, not a copy. The first call for a queue lists its directory.
        Files with other names, or of a block that has a file already, are noted for removal.
        """
        key = (queue.topic, queue.queue_id)
        names_by_number = self._tables.get(key)
        if names_by_number is not None:
            return names_by_number
        names_by_number = self._tables[key] = {}
        directory = self._directory_of(queue)
        for name in self._files.names(directory):
            path = f"{directory}/{name}"
            first_offset = columns_file.parse_first_offset(name)
            if first_offset is None or first_offset // BLOCK_ROWS in names_by_number:
                self._to_remove.append(path)
                continue
            names_by_number[first_offset // BLOCK_ROWS] = name
            with closing(self._files.open(path)) as file:
                self._sizes[path] = file.size()
        return names_by_number

    def remove_expired(self) -> None:
        """Remove the files and cached blocks of messages that retention has removed.

        A block is removed when all its rows are before the queue's first offset. The directories of
        queues that do not exist are removed too. Raises OSError.
        """

        def first_offset_of(key: QueueKey) -> int:
            queue = self._queues.by_key.get(key)
            return 0 if queue is None else queue.offset_min

        self._cache.drop_before(first_offset_of)
        for topic in self._files.names(self._directory):
            for name in self._files.names(f"{self._directory}/{topic}"):
                is_queue_id = name.isdecimal() and name.isascii()
                queue_id = int(name) if is_queue_id else -1
                queue = self._queues.by_key.get((topic, queue_id))
                if queue is None:
                    self._remove_directory(f"{self._directory}/{topic}/{name}")
                else:
                    self._remove_expired_files(queue)

    def _remove_expired_files(self, queue: Queue) -> None:
        """Remove the files of a queue whose rows are all before the queue's first offset."""
        names_by_number = self._get_file_names(queue)
        for block_number in list(names_by_number):
            end_offset = (block_number + 1) * BLOCK_ROWS
            if end_offset <= queue.offset_min:
                name = names_by_number.pop(block_number)
                self._remove_file(f"{self._directory_of(queue)}/{name}")
                self._forget_head(queue, block_number)

    def delete_topic(self, topic: str) -> None:
        """Forget the blocks of a topic, and remove its files. Raises OSError."""
        self._cache.drop_topic(topic)
        for queue_key in list(self._tables):
            if queue_key[0] == topic:
                del self._tables[queue_key]
                self._sealed_to.pop(queue_key, None)
                self._forget_heads(queue_key)
        directory = f"{self._directory}/{topic}"
        for name in self._files.names(directory):
            self._remove_directory(f"{directory}/{name}")
        if self._files.exists(directory):
            self._files.remove(directory)

    def _forget_heads(self, queue_key: QueueKey) -> None:
        """Forget the heads and the proofs of all blocks of a queue."""
        for head_key in list(self._heads):
            if head_key[:2] == queue_key:
                del self._heads[head_key]
        self._proved = {proved for proved in self._proved if proved[:2] != queue_key}

    @staticmethod
    def _key(queue: Queue) -> QueueKey:
        """Return the key of a queue in the tables of this object."""
        return queue.topic, queue.queue_id

    def _remove_directory(self, directory: str) -> None:
        """Remove a directory and the files in it."""
        for name in self._files.names(directory):
            self._remove_file(f"{directory}/{name}")
        self._files.remove(directory)

    def _remove_file(self, path: str) -> None:
        """Remove a file, and forget its size. Do nothing if the file does not exist."""
        self._sizes.pop(path, None)
        if self._files.exists(path):
            self._files.remove(path)

    # --- Making files

    def seal_blocks(self, topics: Collection[str]) -> Iterator[Step]:
        """Write the files of all complete blocks of some topics, and remove invalid files.

        A block is complete if all its offsets are visible and its last record is synced. The
        generator yields steps that the caller must do before it continues: a number is a pause in
        seconds, and a function must be called in another thread.

        Raises OSError; the next call continues with the same block.
        """
        for key in list(self._queues.by_key):
            queue = self._queues.by_key.get(key)
            if queue is None or key[0] not in topics:
                continue
            self._get_file_names(queue)  # finds invalid files at its first call
            while self._to_remove:
                self._remove_file(self._to_remove.pop())
                yield 0.0
            yield from self._seal_queue(queue, key)

    def _seal_queue(self, queue: Queue, key: QueueKey) -> Iterator[Step]:
        """Write the files of the complete blocks of one queue that have none yet.

        Yield steps for the caller: seconds to wait, or a function to call in another thread. `key`
        is the (topic, queue id) of the queue.
        """
        names_by_number = self._get_file_names(queue)
        block_number = max(queue.offset_min // BLOCK_ROWS, self._sealed_to.get(key, 0))
        while (block_number + 1) * BLOCK_ROWS <= queue.visible_offset:
            if self._queues.by_key.get(key) is not queue:
                return  # its topic was deleted meanwhile
            if block_number not in names_by_number:
                block_end = (block_number + 1) * BLOCK_ROWS
                last_row = self.take_rows(queue, block_end - 1, block_end)
                if last_row is None or last_row.end_position > self._log.synced_offset:
                    return  # a crash could still undo it
                yield from self._seal_block(queue, block_number)
                if block_number not in names_by_number:
                    return  # rows are missing, or the topic was deleted
            block_number += 1
            self._sealed_to[key] = block_number

    def _seal_block(self, queue: Queue, block_number: int) -> Iterator[Step]:
        """Write the file of one block.

        Yield steps for the caller: seconds to wait, or a function to call in another thread. The
        rows are taken from the cache or decoded, one slot of SLOT_ROWS rows for each step. No file
        is written if retention has removed some of the rows.
        """
        start = max(block_number * BLOCK_ROWS, queue.offset_min)
        end = (block_number + 1) * BLOCK_ROWS
        if self.sealer is not None:
            yield from self._seal_in_process(self.sealer, queue, block_number, start, end)
            return
        decoded = yield from self._decode_slots(queue, start, end)
        if decoded is None:
            return
        slot_blocks, slot_rows = decoded
        config = self._config
        results: list[SealedFile] = []  # `write` adds one: it runs in another thread

        def write() -> None:
            limits = config.columns_max, config.columns_disk_percent
            directory = self._directory_of(queue)
            key = self._key(queue)
            results.append(seal_pieces(self._files, directory, key, limits, slot_blocks, slot_rows))

        yield write
        self._add_sealed(queue, block_number, results[0])
        yield PAUSE_S

    def _decode_slots(
        self, queue: Queue, start: int, end: int
    ) -> Generator[Step, None, tuple[list[ColumnBlock], list[SourceRows]] | None]:
        """Take the slots of the rows [start, end) from the cache, or decode them.

        Yield steps for the caller: seconds to wait, or a function to call in another thread. At the
        end, return (blocks, rows), with one item for each slot. Return None if retention has
        removed some of the rows.
        """
        slot_blocks: list[ColumnBlock] = []
        slot_rows: list[SourceRows] = []

        def decode(rows: SourceRows) -> None:
            slot_blocks.append(rows.all_columns(self._config.columns_max))

        for slot_start in range(start - start % SLOT_ROWS, end, SLOT_ROWS):
            rows = self.take_rows(queue, max(slot_start, start), slot_start + SLOT_ROWS)
            if rows is None:
                return None
            slot_rows.append(rows)
            cached = self._cache.get((*self._key(queue), "slot", slot_start // SLOT_ROWS))
            is_whole_slot_cached = len(cached) == 1 and cached[0].rows == rows.stop - rows.start
            if is_whole_slot_cached:
                slot_blocks.append(cached[0])
            else:
                yield partial(decode, rows)
                yield PAUSE_S
        return slot_blocks, slot_rows

    def _seal_in_process(
        self, sealer: "Sealer", queue: Queue, block_number: int, start: int, end: int
    ) -> Iterator[Step]:
        """Let the sealer's process write the file of the rows [start, end).

        Yield steps for the caller: seconds to wait, or a function to call in another thread. The
        process gets the units (queue entries), and reads the log itself. No file is written if
        retention has removed some of the rows.
        """
        slot_units = yield from self._read_slot_units(queue, start, end)
        if slot_units is None:
            return
        slot_offsets, units_by_slot = slot_units
        config = self._config
        results: list[SealedFile] = []  # `seal` adds one: it runs in another thread
        job = SealJob(
            directory=self._directory_of(queue),
            topic=queue.topic,
            queue_id=queue.queue_id,
            columns_max=config.columns_max,
            disk_percent=config.columns_disk_percent,
            log_directory=config.commit_log_path,
            log_file_bytes=config.commit_log_file_bytes,
            starts=slot_offsets,
            sizes=list(map(len, units_by_slot)),
        )

        def seal() -> None:
            name, size_bytes = sealer.seal(job, units_by_slot)
            results.append(SealedFile(name, size_bytes, end - start))

        yield seal
        self._add_sealed(queue, block_number, results[0])

    @staticmethod
    def _read_slot_units(
        queue: Queue, start: int, end: int
    ) -> Generator[Step, None, tuple[list[int], list[bytes]] | None]:
        """Read the units (queue entries) of the slots in [start, end).

        Yield 0.0 after each slot, so that the caller can do other work. At the end, return (first
        offsets, units), with one item for each slot. Return None if retention has removed some of
        the rows.
        """
        slot_offsets = []
        units_by_slot = []
        for slot_start in range(start - start % SLOT_ROWS, end, SLOT_ROWS):
            first_offset = max(slot_start, start)  # the block may begin within its first slot
            units = read_units(queue, first_offset, slot_start + SLOT_ROWS)
            if units is None:
                return None
            slot_offsets.append(first_offset)
            units_by_slot.append(units)
            yield 0.0
        return slot_offsets, units_by_slot

    def _add_sealed(self, queue: Queue, block_number: int, sealed_file: SealedFile) -> None:
        """Register a new file, so that reads use it.

        The slots of the block are dropped from the cache; the merged block replaces them if
        `sealed_file` has it. If the topic was deleted while the file was written, only note the
        file for removal.
        """
        path = f"{self._directory_of(queue)}/{sealed_file.name}"
        if self._queues.by_key.get(self._key(queue)) is not queue:
            self._to_remove.append(path)  # the topic was deleted meanwhile
            return
        key = self._key(queue)
        self.rows_sealed += sealed_file.rows
        self._get_file_names(queue)[block_number] = sealed_file.name
        self._proved.add((*key, block_number))
        self._sizes[path] = sealed_file.size_bytes

        first_slot = block_number * BLOCK_ROWS // SLOT_ROWS
        slot_end = (block_number + 1) * BLOCK_ROWS // SLOT_ROWS
        for slot_number in range(first_slot, slot_end):
            self._cache.drop((*key, "slot", slot_number))
        if sealed_file.block is not None:
            self._cache.put((*key, "sealed", block_number), sealed_file.block)
