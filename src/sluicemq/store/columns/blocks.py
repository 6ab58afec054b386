"""Blocks of property columns of every queue: found in memory, in files, or made from the log.

    rows of a queue   | block 0 (65,536 rows) | block 1 | … |  the tail                    |
                      |  sealed: a file       |  sealed |   |  slots of 4,096, in memory   |

A reader gets the block that holds an offset: the sealed one; else a piece of a slot that is in
memory already; else the slot's rows are decoded there and then, in some three milliseconds. A slot
at the end of a queue grows piece by piece. A reader that does not want to wait gets a `Load`, which
another thread runs while messages go on. A filtered pull does neither: it decodes what its filter
reads (`scan`). So a filter needs nothing but the log to be fast, and the files only spare the
decoding, once for all filters and after the next start.

`work` makes the files, oldest block first. It yields jobs for another thread (decoding and writing
see only what was taken hold of before) and pauses between them; in a broker a process of its own
does them. A block is sealed when all of its records are synced: what a crash can still take back is
never in a file.
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
    Head,
    Job,
    Made,
    Sealed,
    Source,
    UntrueFileError,
    seal,
    units_of,
)
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import ConsumeQueues, Queue

if TYPE_CHECKING:
    from sluicemq.store.columns.file import Sealer

Key = tuple[str, int, str, int]
"""Topic, queue id, `sealed` or `slot`, its number."""
_VALUE_BYTES: Final = 24
"""What a distinct value takes beside its place in Arrow: some 70 bytes once a filter has read its
column, which happens to few of them."""


class BlockCache:
    """At most `bytes_max` of blocks, as far as that can be reckoned. A slot holds several."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[Key, tuple[ColumnBlock, ...]] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self.size_bytes = 0

    def get(self, key: Key) -> tuple[ColumnBlock, ...]:
        """Those of the key, in order; empty without any."""
        found = self._blocks.get(key)
        if found is None:
            return ()
        self._blocks.move_to_end(key)
        return found

    def put(self, key: Key, *blocks: ColumnBlock) -> None:
        self.drop(key)
        size = sum(map(memory_bytes, blocks))
        self._blocks[key] = blocks
        self._sizes[key] = size
        self.size_bytes += size
        while self.size_bytes > self._bytes_max and len(self._blocks) > 1:
            self.drop(next(iter(self._blocks)))

    def drop(self, key: Key) -> None:
        if self._blocks.pop(key, None) is not None:
            self.size_bytes -= self._sizes.pop(key)

    def drop_before(self, offset_min: "Callable[[QueueKey], int]") -> None:
        """Drop every block whose rows all lie before the first offset of their queue, which
        `offset_min` returns."""
        for key in list(self._blocks):
            topic, queue_id, kind, number = key
            rows = SLOT_ROWS if kind == "slot" else BLOCK_ROWS
            if (number + 1) * rows <= offset_min((topic, queue_id)):
                self.drop(key)

    def drop_topic(self, topic: str) -> None:
        for key in [key for key in self._blocks if key[0] == topic]:
            self.drop(key)


def memory_bytes(block: ColumnBlock) -> int:
    """About what a block takes when all of its columns are in use."""
    if not isinstance(block.columns, ArrowColumns):
        return 0
    arrays = block.columns.arrays.values()
    return sum(array.nbytes + _VALUE_BYTES * len(array.dictionary) for array in arrays)


class Load:
    """One block that another thread is to get; its rows of the offsets [start, end) are wanted.

    `name` and `number` are those of a file.
    """

    __slots__ = ("_get", "block", "end", "error", "head", "name", "number", "queue", "start")

    def __init__(
        self,
        queue: Queue,
        start: int,
        end: int,
        get: "Callable[[], tuple[ColumnBlock | None, Head | None]]",
        name: str = "",
        number: int = -1,
    ) -> None:
        self._get = get
        self.queue: Final = queue
        self.start = start
        self.end = end
        self.name = name
        self.number = number
        self.block: ColumnBlock | None = None
        self.head: Head | None = None
        self.error: Exception | None = None

    @property
    def is_passed(self) -> bool:
        """The figures of a file alone say that nothing in it matches."""
        return self.head is not None and self.block is None

    def run(self) -> ColumnBlock | None:
        """The wanted rows; None when they cannot be had, or nothing matches. Any thread."""
        try:
            self.block, self.head = self._get()
        except (OSError, UntrueFileError) as error:
            self.error = error
        return None if self.block is None else self.block.part(self.start, self.end)


logger = logging.getLogger(__name__)

BLOCK_ROWS: Final = 1 << 16
SLOT_ROWS: Final = PROOF_ROWS
PART_ROWS: Final = 8192
"""Made into columns of one filter at once."""
HEADS_KEPT: Final = 4096
PAUSE_S: Final = 0.02
"""Between two jobs of the builder: messages go first."""
QueueKey = tuple[str, int]
Ruling = Callable[[BlockStats], bool]
"""Whether a block is wanted, by its figures."""
Step = float | Callable[[], None]
"""What `work` waits for: seconds, or a job that another thread does."""


class ColumnBlocks:
    """All blocks of a store. One thread, but for the jobs of `work`."""

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
        self._sealed_to: dict[QueueKey, int] = {}  # the first block that may have no file
        self._to_remove: list[str] = []  # files that are not true, for `work` to remove
        self._heads: dict[tuple[str, int, int], Head] = {}  # whose proofs hold
        self._proved: set[tuple[str, int, int]] = set()  # files made in this run, or checked
        self.sealer: Sealer | None = None
        """Where sealing does not happen here."""
        self.rows_decoded = 0
        self.rows_sealed = 0

    @property
    def size_bytes(self) -> int:
        """Of the files, of the queues that were in use since the start."""
        return sum(self._sizes.values())

    # --- for readers

    def made_at(self, queue: Queue, offset: int) -> ColumnBlock | None:
        """The block that holds a visible offset, when it is in memory or in a file."""
        block, number = self.at_hand(queue, offset), offset // BLOCK_ROWS
        name = self._table(queue).get(number)
        if block is not None or name is None:
            return block
        if self._cache.get((*self._key(queue), "sealed", number)):
            return None  # it begins behind the offset
        block = self._load_now(queue, number, name, None).block
        is_inside = block is not None and block.first_offset <= offset < block.end
        return block if is_inside else None

    def block_at(self, queue: Queue, offset: int) -> ColumnBlock | None:
        """The block that holds a visible offset; None when its rows cannot be had."""
        block = self.made_at(queue, offset)
        if block is not None:
            return block
        start, stop = self._missing(queue, offset)
        source = self.source(queue, start, stop) if start <= offset < stop else None
        if source is None:
            return None
        piece = source.block(self._config.columns_max)
        self.rows_decoded += piece.rows
        slot = (*self._key(queue), "slot", offset // SLOT_ROWS)
        self._cache.put(slot, *self._cache.get(slot), piece)
        return piece

    @staticmethod
    def end_of(queue: Queue, offset: int) -> int:
        """The end of the visible rows from an offset on that are, or will be, in its block."""
        return min(queue.visible_offset, offset - offset % BLOCK_ROWS + BLOCK_ROWS)

    def source(self, queue: Queue, start: int, stop: int) -> Source | None:
        """Some visible rows, to be made into columns; None when they are not all there."""
        return Source.take(self._log, queue, start, stop)

    def picked(self, units: bytes, columns_max: int) -> Callable[[], ColumnBlock]:
        """Columns of the messages of any units, to be made in any thread."""
        return partial(Source.of_units(self._log, 0, units).block, columns_max)

    def find(
        self,
        queue: Queue,
        offset: int,
        end: int,
        block_filter: BlockFilter | None,
    ) -> ColumnBlock | Load | None:
        """The rows from a visible offset on, of one block, up to `end`: or who gets them, in
        another thread, with what the filter reads. None when they cannot be had, or (without a
        filter) have yet to be made."""
        number, key = offset // BLOCK_ROWS, self._key(queue)
        known = self.at_hand(queue, offset)
        if known is not None:
            return known.part(offset, min(known.end, end))
        name = self._table(queue).get(number)
        if name is None:
            if block_filter is None:
                return None
            names = block_filter.names
            stop = min(offset + PART_ROWS, end, self.end_of(queue, offset))
            source = self.source(queue, offset, stop)
            if source is None:
                return None
            return Load(queue, offset, stop, lambda: (source.block_of(names), None))
        stop = min((number + 1) * BLOCK_ROWS, end)
        ruling = None
        if block_filter is not None and (*key, number) not in self._heads:
            ruling = block_filter.can_match
        return Load(queue, offset, stop, self._reading(queue, number, name, ruling), name, number)

    def _reading(
        self, queue: Queue, number: int, name: str, ruling: Ruling | None
    ) -> "Callable[[], tuple[ColumnBlock | None, Head | None]]":
        """Reads a file and proves it: what the proofs are reckoned from is taken now. With `ruling`
        its head first, and only the head when that says that nothing is wanted."""
        key, offset_min = self._key(queue), queue.offset_min
        place = (self._files, self._directory_of(queue), name)
        evidence: dict[int, Source | None] | None = None
        if (*key, number) not in self._proved:
            first, stop = columns_file.first_offset_of(name) or 0, (number + 1) * BLOCK_ROWS
            evidence = {
                at: Source.take(self._log, queue, at, min(at + SLOT_ROWS, stop))
                for at in range(first, stop, SLOT_ROWS)
                if at + SLOT_ROWS > offset_min
            }

        def check(found: Sealed | Head) -> None:
            if evidence is not None:
                columns_file.check(found, key, offset_min, evidence)

        def get() -> tuple[ColumnBlock | None, Head | None]:
            head = None
            if ruling is not None:
                head = columns_file.read_head(*place)
                check(head)
                if not ruling(head.stats):
                    return None, head
            sealed = columns_file.read(*place)
            if head is None:
                check(sealed)
            return sealed.block, head

        return get

    def _load_now(self, queue: Queue, number: int, name: str, ruling: Ruling | None) -> Load:
        """A file read by a reader that waits."""
        load = Load(queue, 0, 0, self._reading(queue, number, name, ruling), name, number)
        load.run()
        self.loaded(load)
        return load

    def at_hand(self, queue: Queue, offset: int) -> ColumnBlock | None:
        """The block that holds an offset, when it is in memory."""
        key = self._key(queue)
        for kind, at in (("sealed", offset // BLOCK_ROWS), ("slot", offset // SLOT_ROWS)):
            for block in self._cache.get((*key, kind, at)):
                if block.first_offset <= offset < block.end:
                    return block
        return None

    def _missing(self, queue: Queue, offset: int) -> tuple[int, int]:
        """The rows of a slot that are in memory nowhere: they follow the pieces that are."""
        slot = offset // SLOT_ROWS
        start = max(slot * SLOT_ROWS, queue.offset_min)
        for piece in self._cache.get((*self._key(queue), "slot", slot)):
            start = max(start, piece.end)
        return start, min((slot + 1) * SLOT_ROWS, queue.visible_offset)

    def loaded(self, load: Load) -> None:
        """Keep what a load has got."""
        queue, block = load.queue, load.block
        key = self._key(queue)
        if self._queues.by_key.get(key) is not queue:
            return  # its topic was deleted meanwhile
        if load.name:
            if self._table(queue).get(load.number) != load.name:
                return
            if load.error is not None:
                path = f"{self._directory_of(queue)}/{load.name}"  # it is gone, which is said once
                logger.warning("the property columns in %s are made anew: %s", path, load.error)
                del self._table(queue)[load.number]
                self._sealed_to.pop(key, None)
                self._sizes.pop(path, None)
                self._forget(queue, load.number)
                self._to_remove.append(path)
                return
            self._proved.add((*key, load.number))
            if load.head is not None:
                self._heads[(*key, load.number)] = load.head
                if len(self._heads) > HEADS_KEPT:
                    del self._heads[next(iter(self._heads))]
            if block is not None:
                self._cache.put((*key, "sealed", load.number), block)
        elif block is not None:
            self.rows_decoded += block.rows

    def head_at(self, queue: Queue, offset: int, *, only_known: bool = False) -> Head | None:
        """What is known of the sealed block that holds an offset, without reading it; None when
        there is none. `only_known`: of what was asked for before."""
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
        key = (*self._key(queue), number)
        self._heads.pop(key, None)
        self._proved.discard(key)

    # --- the files of a queue

    def _directory_of(self, queue: Queue) -> str:
        return f"{self._directory}/{queue.topic}/{queue.queue_id}"

    def _table(self, queue: Queue) -> dict[int, str]:
        key = (queue.topic, queue.queue_id)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = {}
            directory = self._directory_of(queue)
            for name in self._files.names(directory):
                first = columns_file.first_offset_of(name)
                number = -1 if first is None else first // BLOCK_ROWS
                if number < 0 or number in table:
                    self._to_remove.append(f"{directory}/{name}")
                else:
                    table[number] = name
                    with closing(self._files.open(f"{directory}/{name}")) as file:
                        self._sizes[f"{directory}/{name}"] = file.size()
        return table

    def remove_before_start(self) -> None:
        """Remove the files, and what is in memory, of messages that retention has removed. Raises
        OSError."""

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
                for number in [n for n in table if (n + 1) * BLOCK_ROWS <= queue.offset_min]:
                    self._remove(f"{self._directory_of(queue)}/{table.pop(number)}")
                    self._forget(queue, number)

    def delete(self, topic: str) -> None:
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

    # --- the builder

    def work(self, topics: Collection[str]) -> Iterator[Step]:
        """Seal what can be sealed of these topics. Raises OSError; the next call goes on."""
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
                    last = Source.take(self._log, queue, stop - 1, stop)
                    if last is None or last.end_position > self._log.synced_offset:
                        break  # a crash could still take it back
                    yield from self._seal(queue, number)
                    if number not in table:
                        break
                number += 1
                self._sealed_to[key] = number

    def _seal(self, queue: Queue, number: int) -> Iterator[Step]:
        """Make one file."""
        start, stop = max(number * BLOCK_ROWS, queue.offset_min), (number + 1) * BLOCK_ROWS
        if self.sealer is not None:
            yield from self._seal_elsewhere(self.sealer, queue, number, start, stop)
            return
        pieces: list[ColumnBlock] = []
        sources: list[Source] = []

        def decode(source: Source) -> None:
            pieces.append(source.block(self._config.columns_max))

        for at in range(start - start % SLOT_ROWS, stop, SLOT_ROWS):
            source = Source.take(self._log, queue, max(at, start), at + SLOT_ROWS)
            if source is None:
                return  # retention was faster
            sources.append(source)
            known = self._cache.get((*self._key(queue), "slot", at // SLOT_ROWS))
            if len(known) == 1 and known[0].rows == source.stop - source.start:
                pieces.append(known[0])
                continue
            yield partial(decode, source)
            yield PAUSE_S
        config, made = self._config, list[Made]()

        def run() -> None:
            limits = config.columns_max, config.columns_disk_percent
            directory, key = self._directory_of(queue), self._key(queue)
            made.append(seal(self._files, directory, key, limits, pieces, sources))

        yield run
        self._sealed_now(queue, number, made[0])
        yield PAUSE_S

    def _seal_elsewhere(
        self, sealer: "Sealer", queue: Queue, number: int, start: int, stop: int
    ) -> Iterator[Step]:
        """The same by the sealer: it only needs to know where the records lie."""
        starts, units = [], []
        for at in range(start - start % SLOT_ROWS, stop, SLOT_ROWS):
            found = units_of(queue, max(at, start), at + SLOT_ROWS)
            if found is None:
                return  # retention was faster
            starts.append(max(at, start))
            units.append(found)
            yield 0.0
        config, made = self._config, list[Made]()
        job = Job(
            self._directory_of(queue), *self._key(queue), config.columns_max,
            config.columns_disk_percent, config.commit_log_path, config.commit_log_file_bytes,
            starts, list(map(len, units)),
        )  # fmt: skip

        def run() -> None:
            made.append(Made(*sealer.seal(job, units), stop - start))

        yield run
        self._sealed_now(queue, number, made[0])

    def _sealed_now(self, queue: Queue, number: int, made: Made) -> None:
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
