"""Is every byte of a store as it must be? One walk over the log answers for log, queues and index.

    log          lengths, places, CRC of every body, the CRC property where records have one, no
                 lost sectors in topic and properties; bytes that are no records; missing files
    queues       every unit against its record and every record against its unit, order, ends,
                 extensions; batch queues too
    index        chains, headers, every entry against a key of its message, keys without entry
    the rest     sizes and names of files, checkpoint and mark, documents

Nothing protects flags, hosts, born time, reconsume times and most properties of a record, unless
records carry the CRC property (enabledAppendPropCRC): a byte changed there is not found.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from sluicemq.record.codec import (
    CHECKSUM_BYTES,
    CHECKSUM_START,
    body_crc_agrees,
    is_sealed,
    parse_head,
)
from sluicemq.record.layout import RECORD_HEAD
from sluicemq.record.table import Records, equal_rows, rows_at
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.recover import is_lost_write
from sluicemq.store.tools.check_files import (
    ERROR,
    KEPT_PER_KIND,
    WARNING,
    Findings,
    check_checkpoint,
    check_documents,
    check_series,
    known_topics,
)
from sluicemq.store.tools.check_index import IndexCheck
from sluicemq.store.tools.check_queues import QueueCheck
from sluicemq.store.tools.layout import BATCH_UNIT, StoreLayout, UnitFile, is_used
from sluicemq.store.tools.walk import Hole, LogWalk, Run, last_data, record_at
from sluicemq.store.walk import SEARCH_BYTES_MAX

_BEGIN: Final = RECORD_HEAD.only("size", "physical_offset")
Progress = Callable[[int, int], None]
"""Called with the bytes of the log that are done, and about how many there are."""


class Verified(NamedTuple):
    """What was looked at, and what was found."""

    findings: Findings
    records: int
    units: int
    entries: int
    log_start: int
    log_end: int


def verify(
    layout: StoreLayout,
    progress: Progress = lambda done, total: None,
    kept_per_kind: int = KEPT_PER_KIND,
) -> Verified:
    """Reads everything, writes nothing. Raises OSError where a disk cannot read."""
    return _Verification(layout, Findings(kept_per_kind)).run(progress)


class _Verification:
    """One run: the walk and what it collects."""

    def __init__(self, layout: StoreLayout, findings: Findings) -> None:
        self._layout = layout
        self._findings = findings
        self._interrupted = layout.was_interrupted
        mark = read_checkpoint(layout.files, layout.checkpoint_path).mark
        self._durable = 1 << 63 if mark is None or not self._interrupted else mark.log_offset
        self._queues = QueueCheck(layout, findings, known_topics(layout))
        self._index = IndexCheck(layout, findings, mark)
        self._holes: list[Hole] = []
        self._records = 0
        self._last_time = 0

    def run(self, progress: Progress) -> Verified:
        layout, findings, log = self._layout, self._findings, self._layout.log
        check_series(layout, findings)
        walk = LogWalk(log)
        total = max(self._queues.log_end - log.start, 1)
        waiting: list[Hole] = []  # damage when something follows, else the tail
        for found in walk:
            progress(walk.position - log.start, max(total, walk.position - log.start))
            if isinstance(found, Hole) and not found.is_record:
                waiting.append(found)
                continue
            for hole in waiting:
                self._damage(hole)
            waiting.clear()
            if isinstance(found, Hole):
                self._holes.append(found)
                self._index.damage(found)
            elif isinstance(found, Run):
                self._records_of(found)
        log_end = walk.whole_end
        for hole in self._holes:
            if hole.is_record:
                self._bad_record(hole, log_end)
        self._check_tail(waiting)
        self._queues.finish(log.start, log_end, self._holes)
        self._index.finish(log.start, log_end)
        self._check_batches(log_end)
        end = waiting[0].start if waiting else walk.position
        check_checkpoint(layout, findings, end, self._last_time)
        check_documents(layout, findings, self._queues.ends())
        return Verified(
            findings, self._records, self._queues.units, self._index.entries, log.start, log_end
        )

    def _damage(self, hole: Hole) -> None:
        self._holes.append(hole)
        severity, text = ERROR, f"are no records: {hole.reason}"
        if hole.is_missing:
            text = "are not there: a file is missing"
        elif self._was_unsafe(hole):
            severity = WARNING
            text += "; behind the durable mark, so the next start cuts the log here"
        text = f"{hole.end - hole.start} bytes, up to {hole.end}, {text}"
        self._findings.add(severity, "damage", f"commitlog {hole.start}", text)
        self._index.damage(hole)

    def _was_unsafe(self, hole: Hole) -> bool:
        """Whether a power loss may have taken what was there (`damage.is_lost_write`)."""
        start, end = hole.start, hole.end
        if start < self._durable:
            return False
        data = self._layout.log.read(start, min(end - start, SEARCH_BYTES_MAX))
        items = self._layout.log.items
        return is_lost_write(data, start, ends_file=any(item.base == end for item in items))

    def _records_of(self, run: Run) -> None:
        self._records += len(run)
        self._last_time = max(self._last_time, int(run.records.number("store_time").max()))
        self._check_checksums(run.records)
        self._queues.add(run)
        self._index.add(run)

    def _check_checksums(self, records: Records) -> None:
        """The CRC over the whole record, where it has one (spec/store.md §2.4)."""
        places = np.maximum(records.ends - CHECKSUM_BYTES, 0)
        there = equal_rows(rows_at(records.raw, places, len(CHECKSUM_START)), CHECKSUM_START)
        there &= records.property_lengths >= CHECKSUM_BYTES
        for row in np.flatnonzero(there).tolist():
            if not is_sealed(records.record(row)):
                position = records.base + int(records.starts[row])
                self._findings.add(
                    ERROR, "record-crc", f"commitlog {position}",
                    "the record's CRC property is not that of its bytes",
                )  # fmt: skip

    def _bad_record(self, hole: Hole, log_end: int) -> None:
        """One whose lengths and place alone are right."""
        record = record_at(self._layout.log, hole.start, hole.end - hole.start)
        assert record is not None  # the walk has just read it
        self._check_checksums(record)
        head = parse_head(record.raw.data)
        kind = "torn-record" if body_crc_agrees(record.raw.data, head) else "body-crc"
        is_tail = self._interrupted and (hole.end == log_end or self._was_unsafe(hole))
        text = (
            f"of the record of {hole.end - hole.start} bytes there,"
            f" {record.topics[0][0].decode(errors='replace')}/{head.queue_id} offset"
            f" {head.queue_offset}, not all is left: {hole.reason}"
        )
        if is_tail:
            text += "; a torn tail, which the next start cuts off"
        severity = WARNING if is_tail else ERROR
        self._findings.add(severity, kind, f"commitlog {hole.start}", text)

    def _check_tail(self, holes: list[Hole]) -> None:
        """What lies behind the last record."""
        end = last_data(self._layout.log, holes[0].start) if holes else None
        if end is None:
            return
        start, known = holes[0].start, self._queues.log_end
        if not self._interrupted and known >= start:
            severity, what = ERROR, f"a queue knows a message at {known}"
        else:
            severity, what = WARNING, "the next start cuts them off"
        self._findings.add(
            severity, "tail", f"commitlog {start}",
            f"behind the last record there are bytes up to {end}, {holes[0].reason}; {what}",
        )  # fmt: skip

    def _check_batches(self, log_end: int) -> None:
        """Units of BatchCQ: each leads to a record of its size."""
        for (topic, queue_id), series in sorted(self._layout.batch_queues.items()):
            for number, units in UnitFile(series, BATCH_UNIT).pieces():
                good = is_used(units) & (units["position"] >= self._layout.log.start)
                for at in np.flatnonzero(good).tolist():
                    position, size = int(units["position"][at]), int(units["size"][at])
                    head = self._layout.log.read(position, _BEGIN.size)
                    is_there = len(head) == _BEGIN.size and _BEGIN.unpack(head) == (size, position)
                    if position + size > log_end or not is_there:
                        self._findings.add(
                            ERROR, "unit", f"{topic}/{queue_id} batch {number + at}",
                            f"no record of {size} bytes is at {position}, where its unit says",
                        )  # fmt: skip
