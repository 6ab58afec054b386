"""Readers do not see damage: it is mended from the log, passed over, or refused, and always logged.

An ordinary start does not read the whole store, so a disk may have spoilt what lies far back. What
this process has written itself is trusted; a record from before is looked at when it is read:

    an ordinary pull     wholly, CRC included, and whether it is the queue's: it carries 32 messages
    a bulk read          size, magic number, position, queue id and offset, in columns when many

What does not agree is one of three things:

    the unit is wrong    the log has the message, between the records of its neighbours in the
                         queue: the unit is written anew
    the queue is wrong   its units lead to records of other queues, and so do the neighbours': it is
                         read no more, and the next start builds the queues anew (`is_doubtful`)
    the record is bad    the unit becomes a blank one: the reader goes on behind it, instead of
                         being handed nonsense or staying in front of it for ever

Each is logged once, with the cure. Place holders of a repair (`log.LOST_CODE`) are passed over in
silence. Not seen here is a changed tag code in a unit whose message a tag filter leaves out: only
`sluice store verify` compares those.
"""

import contextlib
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from sluicemq.errors import StoreDamagedError
from sluicemq.record.layout import MAGICS, RECORD_BYTES_MIN, RECORD_HEAD
from sluicemq.store.log import LOST_CODE, CommitLog
from sluicemq.store.queues import (
    BLANK_SIZE,
    BLANK_UNIT,
    GAP_MAX,
    UNIT,
    UNIT_BYTES,
    ConsumeQueues,
    Queue,
    Unit,
    Units,
)
from sluicemq.store.walk import explain, records_from

logger = logging.getLogger(__name__)

REPORTS_MAX: Final = 1000
"""So many places are logged; the rest is only counted."""
COLUMNS_MIN: Final = 256
MEND_BYTES_MAX: Final = 16 << 20
"""So much of the log is searched for the message of a wrong unit."""
_HEAD: Final = RECORD_HEAD.only("size", "magic", "queue_id", "queue_offset", "physical_offset")


class Soundness:
    """Looks at records written before `trusted_from`; knows what it has found."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, delays_ms: Sequence[int]) -> None:
        """`delays_ms` are the delays of level 1, 2, … (messageDelayLevel)."""
        self._log = log
        self._queues = queues
        self._delays_ms = delays_ms
        self._found: set[int] = set()
        self.trusted_from = log.written_offset
        """Records from here on are this process's own."""

    @property
    def damaged(self) -> int:
        """How many damaged records readers have come upon."""
        return len(self._found)

    def is_trusted(self, position: int) -> bool:
        """Whether what lies there was written by this process."""
        return self.trusted_from <= position < self._log.written_offset

    def is_sound(self, position: int, size: int, *, is_whole: bool) -> bool:
        """Whether the record may be given to a reader. Damage is logged and counted."""
        reason = self._fault(Unit(position, size, 0), None, is_whole=is_whole)
        if reason:
            self._note(position, reason)
        return reason is None

    def blank_bad(
        self, units: Units, queue: Queue, offsets: Sequence[int], *, is_whole: bool
    ) -> Units:
        """The units, mended where they are wrong, blank where they have no sound record.

        `offsets` are the queue offsets of the units. `is_whole` looks at whole records, else at
        their heads. Units whose records retention has removed stay: the caller knows what to do.
        Raises StoreDamagedError when the whole queue is wrong.
        """
        segment = self._log.segments.at(UNIT.unpack_from(units)[0])
        suspects: Sequence[int] = range(len(units) // UNIT_BYTES)
        if not is_whole and segment is not None and len(suspects) >= COLUMNS_MIN:
            from sluicemq.store.bulk import unproved_heads  # noqa: PLC0415 - NumPy: bulk reads

            suspects = unproved_heads(segment.view(), segment.base, units, queue.queue_id, offsets)
        blanked: bytearray | None = None
        for index in suspects:
            unit = Unit._make(UNIT.unpack_from(units, index * UNIT_BYTES))
            position, size, code = unit
            if self.is_trusted(position) and code != LOST_CODE and size > 0:
                continue
            reason = self._fault(unit, (queue, offsets[index]), is_whole=is_whole)
            if reason is None:
                continue
            mended = self._mended(unit, queue, offsets[index]) if reason else None
            if reason and mended is None:
                self._note(position, reason)
            blanked = bytearray(units) if blanked is None else blanked
            blanked[index * UNIT_BYTES : (index + 1) * UNIT_BYTES] = mended or BLANK_UNIT
        return units if blanked is None else blanked

    def _fault(self, unit: Unit, place: tuple[Queue, int] | None, *, is_whole: bool) -> str | None:
        """Why the record may not be given to a reader (of a queue, at an offset of it); None when
        it may, "" when there never was one."""
        position, size, code = unit
        if code == LOST_CODE or size == BLANK_SIZE:
            return ""
        if 0 <= position < self._log.start:
            return None  # its file was deleted: that is no damage
        segment = self._log.segments.at(position)
        if segment is None:
            return f"no file of the log holds byte {position}"
        view, at = segment.view(), position - segment.base
        if size < RECORD_BYTES_MIN or at + size > len(view):
            return f"a record of {size} bytes cannot be there"
        if not is_whole:
            found, magic, queue_id, offset, where = _HEAD.unpack_from(view, at)
            is_record = found == size and magic in MAGICS and where == position
            is_its = place is None or (queue_id, offset) == (place[0].queue_id, place[1])
            if is_record and is_its:
                return None
        record = self._log.counted_at(position)
        if record is None or record.size_bytes != size:
            return f"{explain(view, at, segment.base)} ({segment.path})"
        if place is not None and not record.stands_in(place[0].key, place[1]):
            return "it says that it stands elsewhere than its queue says"
        return None

    def _mended(self, unit: Unit, queue: Queue, offset: int) -> bytes | None:
        """The unit as the log says it, written to the queue; None when it is the log that is bad.

        Raises StoreDamagedError when the units around are wrong too.
        """
        before, behind = self._neighbour(queue, offset, -1), self._neighbour(queue, offset, 1)
        start = self._log.start if before is None else before.end
        end = self._log.written_offset if behind is None else behind.physical_offset
        if end - start <= MEND_BYTES_MAX:
            for record in takewhile(lambda r: r.position < end, records_from(self._log, start)):
                if record.is_queued and record.stands_in(queue.key, offset):
                    code = record.tag_code(self._delays_ms)
                    data = UNIT.pack(record.position, record.size_bytes, code)
                    logger.warning(
                        "queue %s/%d: the unit of message %d was damaged, and is what the log says"
                        " again", queue.topic, queue.queue_id, offset,
                    )  # fmt: skip
                    with contextlib.suppress(OSError):  # the reader has it, and finds it next time
                        queue.mend(offset, data)
                    return data
        if before is None and behind is None and self._log.counted_at(unit.physical_offset):
            self._queues.is_doubtful = True
            raise StoreDamagedError(
                f"The queue {queue.topic}/{queue.queue_id} in {queue.segments.directory} is damaged"
                f" at {offset}: its units lead to records of other queues.",
                cure="Stop the broker and start it again: it builds the queues anew from the log.",
            )
        return None

    def _neighbour(self, queue: Queue, offset: int, step: int) -> Unit | None:
        """The nearest unit, in one direction, that leads to its record."""
        for at in range(offset + step, offset + step * GAP_MAX, step):
            unit = queue.unit(at) if queue.offset_min <= at < queue.visible_offset else None
            if unit is None:
                return None
            if unit.is_used and self._fault(unit, (queue, at), is_whole=False) is None:
                return unit
        return None

    def _note(self, position: int, reason: str) -> None:
        if position not in self._found and len(self._found) < REPORTS_MAX:
            logger.error(
                "the record at %d of the log is damaged and is passed over: %s;"
                " stop the broker and run `sluice store repair`", position, reason,
            )  # fmt: skip
        self._found.add(position)
