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

import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from sluicemq.record.layout import CRC_MASK
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.log import is_torn
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
from sluicemq.store.tools.columns import Columns, Mask, gather
from sluicemq.store.tools.layout import BATCH_UNIT, StoreLayout, UnitFile, is_used
from sluicemq.store.tools.walk import Damage, LogWalk
from sluicemq.store.walk import SEARCH_BYTES_MAX

CRC_PROPERTY: Final = b"__CRC32#\x01"
CRC_PROPERTY_BYTES: Final = 20
_PROPERTY_END: Final = 2
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
        self._damages: list[Damage] = []
        self._bad_bodies: list[tuple[int, int]] = []
        self._records = 0
        self._last_time = 0

    def run(self, progress: Progress) -> Verified:
        layout, findings, log = self._layout, self._findings, self._layout.log
        check_series(layout, findings)
        walk = LogWalk(log)
        total = max(self._queues.log_end - log.start, 1)
        for found in walk:
            if isinstance(found, Damage):
                self._damage(found)
            elif isinstance(found, Columns):
                self._records_of(found)
            progress(walk.position - log.start, max(total, walk.position - log.start))
        self._finish_log(walk)
        self._queues.finish(log.start, walk.end, self._damages)
        self._index.finish(log.start, walk.end)
        self._check_batches(walk.end)
        check_checkpoint(layout, findings, walk.position, self._last_time)
        check_documents(layout, findings, self._queues.ends())
        return Verified(
            findings, self._records, self._queues.units, self._index.entries, log.start, walk.end
        )

    def _damage(self, damage: Damage) -> None:
        self._damages.append(damage)
        size = damage.end - damage.start
        severity, text = ERROR, f"are no records: {damage.reason}"
        if damage.is_gap:
            text = "are not there: a file is missing"
        elif damage.start >= self._durable and self._is_lost(damage.start, damage.end):
            severity = WARNING
            text += "; behind the durable mark, so the next start cuts the log here"
        text = f"{size} bytes, up to {damage.end}, {text}"
        self._findings.add(severity, "damage", f"commitlog {damage.start}", text)
        self._index.damage(damage)

    def _is_lost(self, start: int, end: int) -> bool:
        """Whether a power loss may have taken what was there (`recover.is_lost_write`)."""
        data = self._layout.log.read(start, min(end - start, SEARCH_BYTES_MAX))
        items = self._layout.log.items
        return is_lost_write(data, start, ends_file=any(item.base == end for item in items))

    def _records_of(self, columns: Columns) -> None:
        self._records += len(columns)
        self._last_time = max(self._last_time, int(columns.store_time.max()))
        self._check_bodies(columns)
        self._check_properties(columns)
        self._check_torn(columns)
        self._queues.records(columns)
        self._index.records(columns)

    def _check_bodies(self, columns: Columns) -> None:
        for row in np.flatnonzero(~bodies_agree(columns)).tolist():
            position = int(columns.positions[row])
            self._bad_bodies.append((position, position + int(columns.sizes[row])))

    def _check_properties(self, columns: Columns) -> None:
        """The CRC over the whole record, where it has one (spec/store.md §2.4)."""
        places = np.maximum(columns.ends - CRC_PROPERTY_BYTES, 0)
        there = gather(columns.raw, places, f"V{len(CRC_PROPERTY)}") == np.void(CRC_PROPERTY)
        there &= columns.property_lengths >= CRC_PROPERTY_BYTES
        for row in np.flatnonzero(there).tolist():
            record = columns.record(row)
            digits = bytes(record[-11:-1])[::-1]
            crc = zlib.crc32(record[:-CRC_PROPERTY_BYTES]) & CRC_MASK
            if not digits.isdigit() or int(digits) != crc or record[-1] != _PROPERTY_END:
                self._findings.add(
                    ERROR, "record-crc", f"commitlog {columns.positions[row]}",
                    f"the record's CRC property is not that of its bytes ({_name(columns, row)})",
                )  # fmt: skip

    def _check_torn(self, columns: Columns) -> None:
        """Zeros where a write did not arrive; the CRC does not cover topic and properties."""
        _, topics = columns.topics
        suspects = any(b"\0" in topic or not topic for topic in topics)
        if not suspects and not columns.texts.has_zeros:
            return
        for row in range(len(columns)):
            if is_torn(columns.part(row, "topic"), columns.part(row, "properties")):
                self._findings.add(
                    ERROR, "torn-record", f"commitlog {columns.positions[row]}",
                    "its topic or its properties hold zeros where a write did not arrive"
                    f" ({_name(columns, row)})",
                )  # fmt: skip

    def _finish_log(self, walk: LogWalk) -> None:
        for position, end in self._bad_bodies:
            is_tail = self._interrupted and (
                end == walk.end or (position >= self._durable and self._is_lost(position, end))
            )
            self._findings.add(
                WARNING if is_tail else ERROR, "body-crc", f"commitlog {position}",
                "the body is not what its CRC says: a torn tail, which the next start cuts off"
                if is_tail
                else f"the body of the record of {end - position} bytes is not what its CRC says",
            )  # fmt: skip
        tail = walk.tail
        if tail is None:
            return
        known = self._queues.log_end
        if not self._interrupted and known >= tail.start:
            severity, what = ERROR, f"a queue knows a message at {known}"
        else:
            severity, what = WARNING, "the next start cuts them off"
        self._findings.add(
            severity, "tail", f"commitlog {tail.start}",
            f"behind the last record there are bytes up to {tail.end}, {tail.reason}; {what}",
        )  # fmt: skip

    def _check_batches(self, log_end: int) -> None:
        """Units of BatchCQ: each leads to a record of its size."""
        for (topic, queue_id), series in sorted(self._layout.batch_queues.items()):
            for number, units in UnitFile(series, BATCH_UNIT).pieces():
                good = is_used(units) & (units["position"] >= self._layout.log.start)
                for at in np.flatnonzero(good).tolist():
                    position, size = int(units["position"][at]), int(units["size"][at])
                    head = self._layout.log.read(position, 36)
                    is_there = head[:4] == size.to_bytes(4, "big") and head[28:36] == (
                        position.to_bytes(8, "big")
                    )
                    if position + size > log_end or not is_there:
                        self._findings.add(
                            ERROR, "unit", f"{topic}/{queue_id} batch {number + at}",
                            f"no record of {size} bytes is at {position}, where its unit says",
                        )  # fmt: skip


def bodies_agree(columns: Columns) -> Mask:
    """Which bodies are what their CRC says. HOT: a step a record, most of it in zlib."""
    view, crc = columns.raw.data, zlib.crc32
    places = zip(columns.body_starts.tolist(), columns.body_ends.tolist(), strict=True)
    found = np.array([crc(view[a:b]) for a, b in places], np.int64)
    return np.asarray((found & CRC_MASK) == columns.crc)


def _name(columns: Columns, row: int) -> str:
    topic = columns.part(row, "topic").decode("utf-8", "replace")
    return f"{topic}/{columns.queue_id[row]} offset {columns.queue_offset[row]}"
