"""Messages by their keys: the index as the store uses it.

The index knows hashes and seconds (`index`). What is answered here has the topic, the key itself,
and a store time within the range to the millisecond; only what readers may see is found. An answer
needs the index to be up to date: what is missing is indexed first, unless it is so much that nobody
would wait for it.

Slots and headers, which only RocketMQ reads again from the files, are written once a minute, up to
20 MB of them: by `flush_due` in the thread that waits for the disk, so that the loop does not. It
alone works beside the others; until it is done the index stands still, and a query waits.

An index that cannot be written (the disk is full) stops nothing: it falls behind, and goes on from
there as soon as it can. When it is switched off its files stay as they are, and so does its mark.
"""

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.files import Files
from sluicemq.store.directory import Checkpoint, write_index_time
from sluicemq.store.index.file import Geometry
from sluicemq.store.index.hashes import keys_of
from sluicemq.store.index.index import (
    QUERY_BACKLOG_MAX,
    SLICE_BYTES,
    IndexMark,
    KeyIndex,
    KnownKeys,
)
from sluicemq.store.log import CommitLog

logger = logging.getLogger(__name__)

FLUSH_S: Final = 60.0
"""How often slots and headers are written: only RocketMQ would miss them after a crash."""
CLOSE_BACKLOG_MAX: Final = 256 << 20
"""A stop indexes what is left, but does not wait for an index that is built anew."""
_COLUMNS: Final = "sluicemq.store.index.columns"
_SLOTS: Final = "sluicemq.store.index.columns"
CANDIDATES_MAX: Final = 4096
"""Records that one query reads: keys of equal hash are rare, hot keys are within their limit."""


class Found(NamedTuple):
    """Records, newest first. `last_time_ms` and `last_offset` are how far the index is, 0 when it
    had nothing of that hash; `behind_bytes` is how much of the log is not indexed yet, when that
    is too much to wait for: then nothing was looked up."""

    records: list[bytes]
    last_time_ms: int = 0
    last_offset: int = 0
    behind_bytes: int = 0


class Keys:
    """The key index of a store; everything but `flush_due` in the thread that appends."""

    def __init__(
        self,
        config: StoreConfig,
        files: Files,
        clock: Clock,
        log: CommitLog,
        checkpoint: Checkpoint,
        *,
        after_crash: bool,
    ) -> None:
        """Load; the log has been recovered. Raises StoreDamagedError for files of unknown sizes."""
        self._files = files
        self._clock = clock
        self._checkpoint_path = f"{config.root}/checkpoint"
        mark = checkpoint.mark
        self._mark = IndexMark() if mark is None else IndexMark(*mark[5:9])
        self._index_time_ms = checkpoint.index_time_ms
        self._flush_s = clock.monotonic_s()
        self._flush_due_ms: int | None = None
        self._lock = threading.Lock()  # to change the index or to look into it
        self._trouble = ""
        self.follows_ticks = True
        """Whether `tick` lets the index catch up; false when somebody else does it more often."""
        self._record_at: Callable[[int], bytes | None] = lambda offset: None
        self.known = KnownKeys(is_wanted=config.index_enable)
        """For the writer to fill."""
        self.index: KeyIndex | None = None
        if config.index_enable:
            geometry = Geometry(config.index_slots, config.index_entries)
            self.index = KeyIndex(files, f"{config.root}/index", log, geometry, clock)
            self.index.known = self.known
            self.index.before_full = self._vouch
            # With a mark of ours RocketMQ's field is no proof: it is written before the files.
            java_time_ms = checkpoint.index_time_ms if mark is None else 0
            self.index.load(
                self._mark, log.written_offset, after_crash=after_crash, java_time_ms=java_time_ms
            )
            if not after_crash:  # RocketMQ says this time only when a file is full
                self._index_time_ms = max(self._index_time_ms, self.index.last[0])
        self.has_news = self._index_time_ms != checkpoint.index_time_ms
        """Whether the checkpoint says less of the index than is known: RocketMQ would throw it away
        when it finds the store after a kill."""

    # --- asking

    def find(
        self,
        topic: str,
        key: str,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        *,
        is_unique: bool = False,
    ) -> Found | None:
        """Messages with this unique key or, unless `is_unique`, with this word among their keys,
        stored from `begin_ms` to `end_ms`. None when there is no index."""
        index = self.index
        if index is None:
            return None
        with self._lock:
            if not self._try(index.catch_up_for_query):
                return Found([], behind_bytes=max(index.backlog_bytes, 1))
            records: list[bytes] = []
            seen: set[int] = set()
            for offset in islice(index.query(topic, key, begin_ms, end_ms), CANDIDATES_MAX):
                if len(records) >= count_max:
                    break
                record = None if offset in seen else self._record_at(offset)
                seen.add(offset)
                if record is None:
                    continue
                found = keys_of(record)
                if (
                    found.topic == topic
                    and begin_ms <= found.store_time_ms <= end_ms
                    and (found.unique_key == key or (not is_unique and key in found.keys))
                ):
                    records.append(record)
            return Found(records, *(index.last if seen else (0, 0)))

    # --- what the store does with it

    def follow(
        self,
        consumers: list[Callable[[int, int], None]],
        on_start_moved: list[Callable[[int], None]],
        record_at: Callable[[int], bytes | None],
    ) -> None:
        """Hear of what is written and deleted, and where records are read."""
        self._record_at = record_at
        index = self.index
        if index is None:
            return
        consumers.append(index.note)

        def remove_before(log_start: int) -> None:
            with self._lock:
                self._try(lambda: index.remove_before(log_start) is not None)

        on_start_moved.append(remove_before)

    def catch_up(self, bytes_max: int = SLICE_BYTES) -> bool:
        """Index about so many bytes of the log; True when nothing is left (or nothing can be
        done)."""
        index = self.index
        if index is None or not self._lock.acquire(blocking=False):
            return True
        try:
            done = self._try(lambda: index.catch_up(bytes_max))
        finally:
            self._lock.release()
        return done or bool(self._trouble)

    @property
    def is_warm(self) -> bool:
        """Whether NumPy is there: loading it takes a tenth of a second."""
        return _COLUMNS in sys.modules

    def warm_up(self) -> None:
        """Load it. In any thread."""
        importlib.import_module(_COLUMNS)
        importlib.import_module(_SLOTS)

    @property
    def backlog_bytes(self) -> int:
        """How much of the log is not indexed yet."""
        return 0 if self.index is None else self.index.backlog_bytes

    @property
    def is_close(self) -> bool:
        """Whether only what just came is missing, not an index that is built anew."""
        return self.backlog_bytes <= QUERY_BACKLOG_MAX

    def tick(self, log_time_ms: int) -> None:
        """Now and then: a slice of work, and whether the flush for RocketMQ is due. `log_time_ms`
        is the store time of the last record."""
        if self.follows_ticks:
            self.catch_up()
        now_s = self._clock.monotonic_s()
        is_first = not self._index_time_ms and self.backlog_bytes == 0
        if is_first or now_s - self._flush_s >= FLUSH_S:
            self._flush_s = now_s
            if not self._is_flushed(log_time_ms):
                self._flush_due_ms = log_time_ms

    @property
    def is_flush_due(self) -> bool:
        """Whether `flush_due` has something to do."""
        return self._flush_due_ms is not None

    def flush_due(self) -> None:
        """Write slots and headers if it is time. In any thread."""
        due_ms, self._flush_due_ms = self._flush_due_ms, None
        index = self.index
        if due_ms is None or index is None:
            return

        def flush() -> bool:
            # What came since the flush became due may be indexed already.
            self._vouch(max(index.time_ms(due_ms), index.last[0]))
            index.flush()
            return True

        with self._lock:
            if not self._is_flushed(due_ms):
                self._try(flush)

    def finish(self, log_time_ms: int) -> None:
        """Before the last mark: everything into the files."""
        self.catch_up(CLOSE_BACKLOG_MAX)
        self._flush_due_ms = log_time_ms
        self.flush_due()

    def _is_flushed(self, log_time_ms: int) -> bool:
        index = self.index
        return index is None or (
            index.is_flushed and index.time_ms(log_time_ms) == self._index_time_ms
        )

    def _vouch(self, time_ms: int) -> None:
        """Before files say it: after a kill RocketMQ throws away those that are newer than this."""
        self._index_time_ms = time_ms
        write_index_time(self._files, self._checkpoint_path, time_ms)

    def mark(self) -> IndexMark:
        """What the next checkpoint may say when `paths_to_sync` are synced before."""
        if self.index is None:
            return self._mark
        with self._lock:
            return self.index.mark()

    @property
    def is_synced(self) -> bool:
        """Whether `paths_to_sync` has nothing to give."""
        return self.index is None or self.index.is_synced

    def paths_to_sync(self) -> list[str]:
        if self.index is None:
            return []
        with self._lock:
            return self.index.paths_to_sync()

    @property
    def index_time_ms(self) -> int:
        """RocketMQ's field of the checkpoint: as the files lie there, they are complete up to this
        store time (0: not known)."""
        return 0 if self.index is None else self._index_time_ms

    def close(self) -> None:
        if self.index is not None:
            self.index.close()

    def _try(self, work: Callable[[], bool]) -> bool:
        """False when the disk refuses; said once for each text."""
        try:
            done = work()
        except OSError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the key index falls behind: %s", error)
            return False
        self._trouble = ""
        return done
