"""Property columns of a store: derived data beside the queues, for filters and filtered lag.

Without columns, a filter on properties reads the record of every message. With columns
(`record.columns`) it evaluates each distinct value once and reads only the records that match.
Columns of a topic are made as soon as a consumer subscribes to it by SQL92, filters it by
properties, or requests its blocks (`sluicePropertyColumns = auto`). They can also be made for every
topic (`always`) or never (`off`). The files are not made at once. A new filter on a backlog decodes
only the few columns that it reads (`scan`). So it is finished with millions of messages before the
work that makes files of all columns competes with it for memory and processors.

This module is what the rest of the store uses. It imports neither NumPy nor pyarrow: they are
loaded when columns are first needed, and `blocks` does the work. Without pyarrow, the store works
as without columns. The files are only a cache of the log: what cannot be read is made again.
"""

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import install_extra
from sluicemq.files import Files
from sluicemq.model.subscription import BlockFilter
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import ConsumeQueues, Queue

if TYPE_CHECKING:
    from sluicemq.record.columns import ColumnBlock
    from sluicemq.store.columns.blocks import ColumnBlocks, Load, Step
    from sluicemq.store.columns.file import Sealer
    from sluicemq.store.columns.scan import ColumnScan

logger = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""The time for which nothing is sealed after a failure, because each attempt decodes a block."""


class PropertyColumns:
    """The property columns of one store.

    All methods are called by the thread that appends to the store, except those that may be called
    by any thread, and the jobs that `seal_blocks` yields.
    """

    def __init__(
        self, config: StoreConfig, files: Files, clock: Clock, log: CommitLog, queues: ConsumeQueues
    ) -> None:
        """Create the columns of a store, given its log and queues. Nothing is loaded or read yet.

        `clock` measures for how long columns have been requested, and the pause after a failure.
        """
        self._config = config
        self._files = files
        self._log = log
        self._queues = queues
        self._directory = f"{config.root}/columns"
        self._clock = clock
        self._lock = threading.Lock()
        self.scan: ColumnScan | None = None
        """The filtering by columns, None until NumPy and pyarrow are loaded."""
        self._is_missing = False
        self._start_moved = False
        self._retry_s = 0.0
        self._requested: dict[str, float] = {}  # topic -> time of the first request
        self.loads_on_first_use = True
        """Whether the first filter loads pyarrow, which takes a quarter of a second.

        If False, the owner must call `warm_up`. Until then, filters read the records.
        """
        self.sealer: Sealer | None = None
        """The sealer that makes the files in another process, None if this process makes them.

        It must be set before the first filter is used.
        """
        self.is_off = config.columns_mode == "off"

    def request_columns(self, topic: str) -> None:
        """Request the columns of a topic from now on, because it is filtered by properties.

        `seal_blocks` then makes the files of the topic. A second request changes nothing. The call
        loads nothing: the owner calls `warm_up` when `has_work` and not `is_loaded`.
        """
        self._requested.setdefault(topic, self._clock.monotonic_s())

    # --- For readers

    def scan_for(self, topic: str) -> "ColumnScan | None":
        """Return the object that filters messages of a topic by columns, or None if there is none.

        None means that the caller must read the records. That is so if columns are off, if pyarrow
        is missing, or if `warm_up` has not been called yet.

        The call also notes that the topic needs columns, and calls `warm_up` if
        `loads_on_first_use`.
        """
        if self.is_off:
            return None
        if topic not in self._requested:
            self.request_columns(topic)
        if self.scan is None and self.loads_on_first_use:
            self.warm_up()
        return self.scan

    @property
    def _blocks(self) -> "ColumnBlocks | None":
        """The blocks of the store; None until NumPy and pyarrow are loaded."""
        return None if self.scan is None else self.scan.blocks

    def iter_blocks(
        self,
        topic: str,
        queue_id: int,
        start: int,
        end: int,
        block_filter: BlockFilter | None = None,
    ) -> "Iterator[ColumnBlock] | None":
        """Return an iterator over blocks with the visible messages of a queue in [start, end).

        The blocks are in order. Each is cut to the range. Rows that are not in files are decoded,
        at most 4,096 for each block, so the caller should let other work run between two blocks.
        Rows that retention has removed are left out. With a filter, sealed blocks that cannot match
        are left out too. The iteration ends early where rows cannot be read.

        The iterator is empty if the queue does not exist. Return None instead of an iterator if
        there are no columns, because they are off or pyarrow is missing. The call requests the
        columns of the topic, and loads pyarrow.
        """
        scan = self._request_scan(topic)
        queue = self._queues.by_key.get((topic, queue_id))
        if scan is None:
            return None

        if queue is None:
            return iter(())
        return _iter_blocks(scan, queue, start, end, block_filter)

    def iter_parts(
        self, topic: str, queue_id: int, start: int, end: int, block_filter: BlockFilter
    ) -> "Iterator[ColumnBlock | Load] | None":
        """Return an iterator over the blocks of a queue in [start, end), without waiting for files.

        For rows that are not in memory, the iterator yields a `Load` (a task that makes the block)
        instead. Call its `run` in another thread, then `accept_load`. Rows that cannot match
        `block_filter` may be left out; the caller must still filter the others. The iteration ends
        early where rows cannot be read.

        Return None if there are no columns, because they are off or pyarrow is missing.
        """
        scan = self._request_scan(topic)
        queue = self._queues.by_key.get((topic, queue_id))
        if scan is None:
            return None

        if queue is None:
            return iter(())
        return _iter_parts(scan, queue, start, end, block_filter)

    def _request_scan(self, topic: str) -> "ColumnScan | None":
        """Note that a topic needs columns, load pyarrow, and return the scan.

        Return None if columns are off or pyarrow is missing.
        """
        self.request_columns(topic)
        if self.scan is None and not self.is_off:
            self.warm_up()
        return self.scan

    def find_available_part(
        self, topic: str, queue_id: int, start: int, end: int
    ) -> "ColumnBlock | Load | None":
        """Return the first rows of a queue in [start, end) as a block, or as a `Load` of a file.

        A block is returned if the rows are in memory, and a `Load` (a task for another thread) if
        they are in a file. Return None if they would have to be decoded from records, if the range
        is empty or begins before the queue, or if columns are not loaded.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if self.scan is None or queue is None or not queue.offset_min <= start < end:
            return None
        return self.scan.blocks.find_or_load(queue, start, end, None)

    def make_block_builder(self, units: bytes) -> "Callable[[], ColumnBlock] | None":
        """Return a function that makes a block of the messages of any units of a queue.

        `units` are joined stored units, which need not be adjacent in the queue. The offsets of the
        block count from 0. The function may be called in any thread. Return None if columns are not
        loaded.
        """
        if self.scan is None:
            return None
        return self.scan.blocks.make_block_builder(units, self._config.columns_max)

    def accept_load(self, load: "Load") -> None:
        """Cache the result of a `Load` of `iter_parts` or `find_available_part`."""
        if self.scan is not None:
            self.scan.blocks.accept_load(load)

    # --- Loading

    @property
    def is_loaded(self) -> bool:
        """Whether nothing is left to load: pyarrow is loaded or missing, or columns are off."""
        return self.scan is not None or self._is_missing or self.is_off

    @property
    def has_work(self) -> bool:
        """Whether `seal_blocks` may have something to do."""
        if self.is_off:
            return False
        return bool(self._requested) or self._start_moved or self._config.columns_mode == "always"

    def warm_up(self) -> None:
        """Load NumPy and pyarrow, and create `scan`. Any thread may call this.

        Do nothing if `is_loaded`. If pyarrow is missing, log that once, and never try again.
        """
        with self._lock:
            if self.is_loaded:
                return
            if importlib.util.find_spec("pyarrow") is None:
                self._is_missing = True
                logger.warning(
                    "no property columns: pyarrow is missing, filters read every record. %s",
                    install_extra("server"),
                )
                return
            from sluicemq.store.columns import scan  # noqa: PLC0415 - it imports pyarrow
            from sluicemq.store.columns.blocks import ColumnBlocks  # noqa: PLC0415 - as above

            scan.warm_up()
            blocks = ColumnBlocks(self._config, self._files, self._log, self._queues)
            blocks.sealer = self.sealer
            self.scan = scan.ColumnScan(blocks, self._clock)

    # --- Making files, and notifications of the store

    def seal_blocks(self, after_s: float = 0.0) -> "Iterator[Step]":
        """Write files for the topics that were requested at least `after_s` seconds ago.

        In mode `always`, write files for all topics. First delete the files of messages that
        retention has removed.

        Yield what the caller must do before it continues: wait a number of seconds, or call a
        function in another thread. Do nothing until columns are loaded, while the disk is too full
        for sends, and for RETRY_S after a failure. Raises OSError.
        """
        blocks = self._blocks
        if blocks is None:
            return
        if self.sealer is not None:
            self.sealer.release_unused(self._clock.monotonic_s())
        if self._start_moved:
            self._start_moved = False
            blocks.remove_expired()
        now_s = self._clock.monotonic_s()
        if not self.has_work or self._log.refusal is not None or now_s < self._retry_s:
            return
        self._retry_s = now_s + RETRY_S  # if a job fails, the generator ends here
        yield from blocks.seal_blocks(self._choose_topics(now_s, after_s))
        self._retry_s = 0.0

    def _choose_topics(self, now_s: float, after_s: float) -> set[str]:
        """Return the topics that were requested at least `after_s` before the monotonic `now_s`.

        In mode `always`, return all topics.
        """
        if self._config.columns_mode == "always":
            return {topic for topic, _ in self._queues.by_key}
        topics = set()
        for topic, requested_s in self._requested.items():
            if now_s >= requested_s + after_s:
                topics.add(topic)
        return topics

    def start_moved(self, log_start: int) -> None:
        """Note that retention has removed the first files of the log.

        The next `seal_blocks` then removes the expired files of columns, if there are any.
        `log_start`, the log's new start, is not used: the first offsets of the queues say more.
        """
        self._start_moved = self._blocks is not None or self._files.exists(self._directory)

    def close(self) -> None:
        """End the other process that makes files, if there is one."""
        if self.sealer is not None:
            self.sealer.close()

    def delete_topic(self, topic: str) -> None:
        """Forget the columns of a deleted topic and remove their files.

        An error at removing files is only logged. If there are files, pyarrow is loaded.
        """
        self._requested.pop(topic, None)
        if self.scan is not None:
            self.scan.forget_topic(topic)
        if self._blocks is None and not self._files.exists(f"{self._directory}/{topic}"):
            return
        self.warm_up()
        try:
            if self._blocks is not None:
                self._blocks.delete_topic(topic)
        except OSError as error:  # the files do no harm, because their proofs fail
            logger.warning("files of property columns cannot be removed: %s", error)

    # --- Statistics

    @property
    def rows_decoded(self) -> int:
        """The number of messages that were decoded for a waiting reader."""
        return 0 if self._blocks is None else self._blocks.rows_decoded

    @property
    def rows_sealed(self) -> int:
        """The number of messages whose columns were written to files since the start."""
        return 0 if self._blocks is None else self._blocks.rows_sealed

    @property
    def size_bytes(self) -> int:
        """The size of the files of the queues that were used since the start."""
        return 0 if self._blocks is None else self._blocks.size_bytes


def _iter_blocks(
    scan: "ColumnScan", queue: Queue, start: int, end: int, block_filter: BlockFilter | None
) -> "Iterator[ColumnBlock]":
    """Yield blocks with the visible rows of a queue in [start, end), in order.

    Blocks that cannot match `block_filter` are left out. Rows without a file are decoded. Ends
    early where rows cannot be read.
    """
    offset = max(start, queue.offset_min)
    while offset < min(end, queue.visible_offset):
        pruned_end = 0
        if block_filter:
            pruned_end = scan.pruned_end(block_filter, queue, offset)
        if pruned_end:  # nothing before it can match
            offset = max(pruned_end, queue.offset_min)
            continue
        block = scan.blocks.get_block(queue, offset)
        if block is None:
            return
        yield block.slice_offsets(offset, min(block.end, end))
        offset = max(block.end, queue.offset_min)


def _iter_parts(
    scan: "ColumnScan", queue: Queue, start: int, end: int, block_filter: BlockFilter
) -> "Iterator[ColumnBlock | Load]":
    """Yield blocks in memory, and a `Load` for other rows, of a queue in [start, end), in order.

    Blocks that cannot match `block_filter` are left out if that is known without reading a file.
    Ends early where rows cannot be read.
    """
    offset = max(start, queue.offset_min)
    while offset < min(end, queue.visible_offset):
        pruned_end = scan.pruned_end(block_filter, queue, offset, only_known=True)
        if pruned_end:  # nothing before it can match
            offset = max(pruned_end, queue.offset_min)
            continue
        part = scan.blocks.find_or_load(queue, offset, end, block_filter)
        if part is None:
            return
        part_end = part.end
        yield part
        offset = max(part_end, queue.offset_min)
