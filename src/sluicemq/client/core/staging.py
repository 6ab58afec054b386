"""What one attempt of a task has staged: ranges of staging queues with their checksums.

A batch is stored at consecutive offsets of one queue. Batches that follow each other there are one
range, so a task that has a queue for itself has one range, however many rows.
"""

import zlib

from sluicemq.protocol.bodies import StagedRange
from sluicemq.record.codec import Buffer


class StagedRanges:
    """Collects them. `messages` counts."""

    def __init__(self, partition: int, attempt: int) -> None:
        self.messages = 0
        self._partition = partition
        self._attempt = attempt
        self._ranges: list[StagedRange] = []

    def add(self, broker: str, queue_id: int, offset: int, count: int, bodies: Buffer) -> None:
        """A batch of `count` messages is stored at `offset`; `bodies` are theirs, one after the
        other."""
        last = self._ranges[-1] if self._ranges else None
        checksum = 0
        self.messages += count
        if last is not None and (last.broker, last.queue_id, last.offset + last.count) == (
            broker, queue_id, offset,
        ):  # fmt: skip
            offset, count, checksum = last.offset, last.count + count, last.checksum
            self._ranges.pop()
        checksum = zlib.crc32(bodies, checksum)
        self._ranges.append(
            StagedRange(broker, queue_id, offset, count, checksum, self._partition, self._attempt)
        )

    @property
    def ranges(self) -> tuple[StagedRange, ...]:
        """In the order of the rows."""
        return tuple(self._ranges)
