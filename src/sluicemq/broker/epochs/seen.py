"""What was staged here since the start, so that a commit need not read it again.

A sink says of each range: so many messages from this offset on, and the CRC-32 of their bodies. The
broker appended those messages itself, batch by batch, and can count and sum along: a range that it
saw come in, unbroken and of one owner, needs no look into the log when the epoch is checked. All
else is read (`staged.StagedReader.check`): after a restart, rows that go to several places or
later, a task whose batches alternated with another's.

A batch whose turn failed was counted too. The sink sends it again, to the same offset or a later
one, so what it says in the end differs from what stands here, and is read; if it is the same, it is
true. What retention has deleted is asked when the range is.
"""

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Final

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import Buffer
from sluicemq.store.writer import Part
from sluicemq.wire.staging import STAGE_PROPERTY, Owner, Stage, StagedRange, parse_stage

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import Spans

RUNS_MAX: Final = 10_000
"""Ranges that are remembered: those of the last tasks."""
_START: Final = f"{STAGE_PROPERTY}\x01".encode()


class Run:
    """Messages next to each other in a staging queue, of one stage, as they were appended."""

    __slots__ = ("checksum", "count", "stage")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.count = 0
        self.checksum = 0


class StagedSeen:
    """The runs by queue and first offset; the last of each queue may go on."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[int, int], Run] = OrderedDict()
        self._last: dict[int, tuple[int, Run, bytes]] = {}
        """Queue -> the offset after its last run, the run, and what its messages begin with."""

    def note(self, queue_id: int, offset: int, parts: Sequence[Part]) -> None:
        """A batch was appended to a queue."""
        self.note_all(queue_id, offset, [part[2] for part in parts], [part[1] for part in parts])

    def note_all(
        self,
        queue_id: int,
        offset: int,
        properties: "Sequence[bytes] | Spans",
        bodies: "Sequence[Buffer] | Spans",
    ) -> None:
        """The same, for its properties and bodies. HOT: each staged message."""
        first = properties[0]
        end, run, start = self._last.get(queue_id, (-1, None, b""))
        if run is None or end != offset or not first.startswith(start):
            found = _plain_stage(first)
            if found is None:
                self._last.pop(queue_id, None)
                return
            stage, start = found
            run = Run(stage)
            self._keep(queue_id, offset, run)
        if not _begin_with(properties, start):
            self._last.pop(queue_id, None)
            run.count = -1  # never what a sink says
            return
        joined = b"".join(bodies) if isinstance(bodies, Sequence) else bodies.joined()
        run.checksum = zlib.crc32(joined, run.checksum)
        run.count += len(bodies)
        self._last[queue_id] = offset + len(bodies), run, start

    def _keep(self, queue_id: int, offset: int, run: Run) -> None:
        self._runs[queue_id, offset] = run
        self._runs.move_to_end((queue_id, offset))
        if len(self._runs) > RUNS_MAX:
            self._runs.popitem(last=False)

    def stage_of(self, owner: tuple[str, int], one: StagedRange) -> Stage | None:
        """Where the whole range goes, when it is known to be what its sink says it is."""
        run = self._runs.get((one.queue_id, one.offset))
        if run is None or (run.count, run.checksum) != (one.count, one.checksum):
            return None
        return run.stage if run.stage.owner == Owner(*owner, one.partition, one.attempt) else None


def _begin_with(properties: "Sequence[bytes] | Spans", start: bytes) -> bool:
    if isinstance(properties, Sequence):
        return all(map(methodcaller("startswith", start), properties))
    return properties.begin_with(start)


def _plain_stage(properties: bytes) -> tuple[Stage, bytes] | None:
    """The stage of a message that is not delayed, and the bytes that say so."""
    if not properties.startswith(_START):
        return None
    end = properties.find(b"\x02")
    try:
        stage = parse_stage(properties[len(_START) : end])
    except ProtocolError:
        return None
    return (stage, properties[: end + 1]) if end >= 0 and stage.delay is None else None
