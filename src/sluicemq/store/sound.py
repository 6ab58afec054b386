"""Readers do not see damage: records that bad bytes have spoilt are passed over, and told of.

An ordinary start does not read the whole log, so a disk may have spoilt what lies far back. What
this process has written itself is trusted; a record from before is looked at when it is read:

    an ordinary pull     wholly, CRC included, and whether it is the queue's: it carries 32 messages
    a bulk read          size, magic number, position, queue id and offset, in columns when many

A unit whose record is not sound becomes a blank one: the reader goes on behind it, instead of being
handed nonsense or staying in front of it for ever. Each is logged once and counted, and so many
units name the cure. Place holders of a repair (`scan.LOST_CODE`) are passed over in silence.
"""

import logging
import struct
from collections.abc import Sequence
from typing import Final

from sluicemq.record.codec import FIXED_BYTES, MAGIC_V1, MAGIC_V2
from sluicemq.store.commitlog import CommitLog
from sluicemq.store.consumequeue import BLANK_SIZE, BLANK_UNIT, UNIT, UNIT_BYTES, Queue
from sluicemq.store.damage import explain
from sluicemq.store.scan import LOST_CODE, Scanned, read_scanned

logger = logging.getLogger(__name__)

REPORTS_MAX: Final = 1000
"""So many places are logged; the rest is only counted."""
COLUMNS_MIN: Final = 256
_MAGICS: Final = (MAGIC_V1, MAGIC_V2)
_HEAD: Final = struct.Struct(">ii20xq")
Units = memoryview | bytearray | bytes


class Soundness:
    """Looks at records written before `trusted_from`; knows what it has found."""

    __slots__ = ("_found", "_log", "trusted_from")

    def __init__(self, log: CommitLog) -> None:
        self._log = log
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

    def blank_bad(
        self, units: Units, queue: Queue, offsets: Sequence[int], *, is_whole: bool
    ) -> Units:
        """The units, with blank ones for those that have no sound record.

        `offsets` are the queue offsets of the units. `is_whole` looks at whole records, else at
        their heads. Units whose records retention has removed stay: the caller knows what to do.
        """
        blanked: bytearray | None = None
        for index in self._suspects(units, queue, offsets, is_whole=is_whole):
            position, size, code = UNIT.unpack_from(units, index * UNIT_BYTES)
            if self.is_trusted(position) and code != LOST_CODE and size > 0:
                continue
            place = (queue, offsets[index])
            if self.is_sound(position, size, code, place=place, is_whole=is_whole):
                continue
            blanked = bytearray(units) if blanked is None else blanked
            blanked[index * UNIT_BYTES : (index + 1) * UNIT_BYTES] = BLANK_UNIT
        return units if blanked is None else blanked

    def _suspects(
        self, units: Units, queue: Queue, offsets: Sequence[int], *, is_whole: bool
    ) -> Sequence[int]:
        """The numbers of the units that have to be looked at singly."""
        segment = self._log.segments.at(UNIT.unpack_from(units)[0])
        if is_whole or segment is None or len(units) < COLUMNS_MIN * UNIT_BYTES:
            return range(len(units) // UNIT_BYTES)
        from sluicemq.store.sweep import unproved_heads  # noqa: PLC0415 - NumPy for bulk reads only

        return unproved_heads(segment.view(), segment.base, units, queue.queue_id, offsets)

    def is_sound(
        self,
        position: int,
        size: int,
        code: int = 0,
        *,
        is_whole: bool,
        place: tuple[Queue, int] | None = None,
    ) -> bool:
        """Whether the record may be given to a reader (of a queue, at an offset of it).

        Damage is logged and counted.
        """
        if code == LOST_CODE or size == BLANK_SIZE:
            return False
        if 0 <= position < self._log.start:
            return True  # its file was deleted: that is no damage
        segment = self._log.segments.at(position)
        if segment is None:
            return self._note(position, f"no file of the log holds byte {position}")
        view, at, base = segment.view(), position - segment.base, segment.base
        if size < FIXED_BYTES or at + size > len(view):
            return self._note(position, f"a record of {size} bytes cannot be there")
        if not is_whole:
            found, magic, where = _HEAD.unpack_from(view, at)
            is_good = found == size and magic in _MAGICS and where == position
            return is_good or self._note(position, f"{explain(view, at, base)} ({segment.path})")
        record = read_scanned(view, at, base, check_crc=True)
        if record is None or record.size_bytes != size:
            return self._note(position, f"{explain(view, at, base)} ({segment.path})")
        if place is not None and not _stands_in(record, *place):
            return self._note(position, "it says that it stands elsewhere than its queue says")
        return True

    def _note(self, position: int, reason: str) -> bool:
        if position not in self._found and len(self._found) < REPORTS_MAX:
            logger.error(
                "the record at %d of the log is damaged and is passed over: %s;"
                " stop the broker and run `sluice store repair`", position, reason,
            )  # fmt: skip
        self._found.add(position)
        return False


def _stands_in(record: Scanned, queue: Queue, offset: int) -> bool:
    key = (queue.topic, queue.queue_id)
    if (record.topic.decode(errors="replace"), record.queue_id, record.queue_offset) == (
        *key,
        offset,
    ):
        return True
    return (key, offset) in record.other_queues()
