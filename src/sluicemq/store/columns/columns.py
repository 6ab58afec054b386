"""Property columns as the store uses them: derived data beside the queues, for filters and lag.

A filter over properties reads the log for every message when it has nothing else. With columns
(`record.columns`) it looks at each distinct value once and reads the log for matches alone. Columns
are made of a topic's messages as soon as a consumer subscribes to it by SQL92, filters it by
properties, or asks for its blocks (`sluicePropertyColumns = auto`); of every topic (`always`); or
never (`off`). The files wait a little: a filter that comes first to a backlog makes the few columns
that it reads by itself (`scan`), and is through with millions of messages before it has to share
memory and cores with what makes all columns of them.

Here is what the rest of the store sees, without NumPy and pyarrow: those are loaded when columns
are first wanted, `blocks` does the work. Without pyarrow everything is as without columns.
Whatever happens to the files, the log is the truth: what cannot be read is made again.
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
"""So long nothing is sealed after it failed: each attempt decodes a block."""


class PropertyColumns:
    """The columns of one store. Everything but the jobs of `work` happens in the thread that
    appends."""

    def __init__(
        self, config: StoreConfig, files: Files, clock: Clock, log: CommitLog, queues: ConsumeQueues
    ) -> None:
        self._config = config
        self._files = files
        self._log = log
        self._queues = queues
        self._directory = f"{config.root}/columns"
        self._clock = clock
        self._lock = threading.Lock()
        self.scan: ColumnScan | None = None
        """What filters by columns, once it is loaded."""
        self._is_missing = False
        self._start_moved = False
        self._retry_s = 0.0
        self._wanted: dict[str, float] = {}
        self.loads_at_once = True
        """Whether the first filter loads pyarrow, a quarter of a second; False when somebody else
        does it by `warm_up`: until then records are read."""
        self.sealer: Sealer | None = None
        """Who makes the files when not this process; to be set before the first filter."""
        self.is_off = config.columns_mode == "off"

    def want(self, topic: str) -> None:
        """Somebody filters the topic by properties, or is about to: its columns follow the log from
        now on, and what they need is loaded by `work`'s caller."""
        self._wanted.setdefault(topic, self._clock.monotonic_s())

    # --- for readers

    def ready_for(self, topic: str) -> "ColumnScan | None":
        """For a filter on a topic's properties; None: read the records."""
        if self.is_off:
            return None
        if topic not in self._wanted:
            self.want(topic)
        if self.scan is None and self.loads_at_once:
            self.warm_up()
        return self.scan

    @property
    def _blocks(self) -> "ColumnBlocks | None":
        return None if self.scan is None else self.scan.blocks

    def blocks(
        self,
        topic: str,
        queue_id: int,
        start: int,
        end: int,
        block_filter: BlockFilter | None = None,
    ) -> "Iterator[ColumnBlock] | None":
        """Blocks that together are the visible messages with offsets [start, end) of a queue, in
        order; None without columns (off, or no pyarrow). What is not in files is decoded, 4,096
        rows a block: let others have their turn between two. Rows that are gone are left out, and
        with a filter those of sealed blocks of which it is known that none matches."""
        scan, queue = self._warm_scan(topic), self._queues.by_key.get((topic, queue_id))
        if scan is None:
            return None

        def between(scan: "ColumnScan", queue: Queue) -> "Iterator[ColumnBlock]":
            offset = start
            while (offset := max(offset, queue.offset_min)) < min(end, queue.visible_offset):
                if block_filter and (passed := scan.pruned_to(block_filter, queue, offset)):
                    offset = passed
                    continue
                block = scan.blocks.block_at(queue, offset)
                if block is None:
                    return
                yield block.part(offset, min(block.end, end))
                offset = block.end

        return iter(()) if queue is None else between(scan, queue)

    def parts(
        self, topic: str, queue_id: int, start: int, end: int, block_filter: BlockFilter
    ) -> "Iterator[ColumnBlock | Load] | None":
        """As `blocks` with a filter, but what is not in memory is not waited for: another thread
        may `run` it, and then `loaded` is to be called. It ends early where rows cannot be had."""
        scan, queue = self._warm_scan(topic), self._queues.by_key.get((topic, queue_id))
        if scan is None:
            return None

        def parts(scan: "ColumnScan", queue: Queue) -> "Iterator[ColumnBlock | Load]":
            offset = start
            while (offset := max(offset, queue.offset_min)) < min(end, queue.visible_offset):
                if passed := scan.pruned_to(block_filter, queue, offset, only_known=True):
                    offset = passed
                    continue
                found = scan.blocks.find(queue, offset, end, block_filter)
                if found is None:
                    return
                offset = found.end
                yield found

        return iter(()) if queue is None else parts(scan, queue)

    def _warm_scan(self, topic: str) -> "ColumnScan | None":
        self.want(topic)
        if self.scan is None and not self.is_off:
            self.warm_up()
        return self.scan

    def part_made(
        self, topic: str, queue_id: int, start: int, end: int
    ) -> "ColumnBlock | Load | None":
        """The first of the `parts` when it is in memory or in a file."""
        queue = self._queues.by_key.get((topic, queue_id))
        if self.scan is None or queue is None or not queue.offset_min <= start < end:
            return None
        return self.scan.blocks.find(queue, start, end, None)

    def picked(self, units: bytes) -> "Callable[[], ColumnBlock] | None":
        """Makes columns of the messages of any units, in any thread; None without columns."""
        if self.scan is None:
            return None
        return self.scan.blocks.picked(units, self._config.columns_max)

    def loaded(self, load: "Load") -> None:
        """See `parts`."""
        if self.scan is not None:
            self.scan.blocks.loaded(load)

    # --- loading

    @property
    def is_warm(self) -> bool:
        """Whether there is nothing left to load."""
        return self.scan is not None or self._is_missing or self.is_off

    @property
    def is_wanted(self) -> bool:
        """Whether `work` may have something to do."""
        if self.is_off:
            return False
        return bool(self._wanted) or self._start_moved or self._config.columns_mode == "always"

    def warm_up(self) -> None:
        """Load NumPy and pyarrow. Any thread."""
        with self._lock:
            if self.is_warm:
                return
            if importlib.util.find_spec("pyarrow") is None:
                self._is_missing = True
                logger.warning(
                    "no property columns: pyarrow is missing, filters read every record. %s",
                    install_extra("server"),
                )
                return
            from sluicemq.store.columns import scan  # noqa: PLC0415
            from sluicemq.store.columns.blocks import ColumnBlocks  # noqa: PLC0415

            scan.warm_up()
            blocks = ColumnBlocks(self._config, self._files, self._log, self._queues)
            blocks.sealer = self.sealer
            self.scan = scan.ColumnScan(blocks, self._clock)

    # --- the builder, and what the store tells

    def work(self, after_s: float = 0.0) -> "Iterator[Step]":
        """Seal blocks of the topics that have been wanted for so long: see `ColumnBlocks.work`.
        Raises OSError."""
        blocks = self._blocks
        if blocks is None:
            return
        if self.sealer is not None:
            self.sealer.rest(self._clock.monotonic_s())
        if self._start_moved:
            self._start_moved = False
            blocks.remove_before_start()
        now_s = self._clock.monotonic_s()
        if not self.is_wanted or self._log.refusal is not None or now_s < self._retry_s:
            return
        topics = {topic for topic, at_s in self._wanted.items() if now_s >= at_s + after_s}
        if self._config.columns_mode == "always":
            topics = {topic for topic, _ in self._queues.by_key}
        self._retry_s = now_s + RETRY_S  # a job that fails ends this generator here
        yield from blocks.work(topics)
        self._retry_s = 0.0

    def start_moved(self, log_start: int) -> None:
        """Retention has removed the first files of the log: `work` follows."""
        self._start_moved = self._blocks is not None or self._files.exists(self._directory)

    def close(self) -> None:
        """End the process that makes files."""
        if self.sealer is not None:
            self.sealer.close()

    def delete(self, topic: str) -> None:
        """The topic is deleted."""
        self._wanted.pop(topic, None)
        if self.scan is not None:
            self.scan.forget(topic)
        if self._blocks is None and not self._files.exists(f"{self._directory}/{topic}"):
            return
        self.warm_up()
        try:
            if self._blocks is not None:
                self._blocks.delete(topic)
        except OSError as error:  # no harm: their proofs fail
            logger.warning("files of property columns cannot be removed: %s", error)

    # --- figures

    @property
    def rows_decoded(self) -> int:
        """Messages made into columns for a reader that waited."""
        return 0 if self._blocks is None else self._blocks.rows_decoded

    @property
    def rows_sealed(self) -> int:
        """Messages whose columns were put into files since the start."""
        return 0 if self._blocks is None else self._blocks.rows_sealed

    @property
    def size_bytes(self) -> int:
        """Of the files on disk, of the queues in use since the start."""
        return 0 if self._blocks is None else self._blocks.size_bytes
