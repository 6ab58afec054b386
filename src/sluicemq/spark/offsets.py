"""Ranges of queue offsets: split into partitions, shared out over triggers, kept in checkpoints.

Pure. What a stream's checkpoint holds, as JSON (Spark stores it, version 1):

    {"version": 1, "topic": "flights", "filter": "TAG UA||AA", "queues": {"broker-a": {"0": 120}}}

`queues` holds for each queue the offset of the next message to read. The topic is there so that a
checkpoint of another topic is refused instead of read; the filter so that a later version can tell
when it changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue

CHECKPOINT_VERSION: Final = 1

Offsets = dict[MessageQueue, int]


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Offsets start <= offset < end of one queue."""

    queue: MessageQueue
    start: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.start)


def split_ranges(
    ranges: Sequence[QueueRange], records_max: int, partitions_min: int | None
) -> list[QueueRange]:
    """Cuts ranges into pieces of nearly equal size, none larger than `records_max`.

    When that gives fewer than `partitions_min`, larger ranges are cut further, by their share.
    Empty ranges are dropped.
    """
    some = [one for one in ranges if one.size]
    pieces = [-(-one.size // records_max) for one in some]
    if partitions_min is not None and sum(pieces) < partitions_min:
        total = sum(one.size for one in some)
        pieces = [
            min(one.size, max(count, -(-one.size * partitions_min // total)))
            for one, count in zip(some, pieces, strict=True)
        ]
    return [piece for one, count in zip(some, pieces, strict=True) for piece in _pieces(one, count)]


def _pieces(one: QueueRange, count: int) -> list[QueueRange]:
    cuts = [one.start + one.size * turn // count for turn in range(count + 1)]
    return [QueueRange(one.queue, start, end) for start, end in pairwise(cuts)]


def admit(start: Mapping[MessageQueue, int], latest: Offsets, rows_max: int | None) -> Offsets:
    """The end of the next micro-batch: `latest`, or as much of it as `rows_max` allows.

    The limit is shared by lag (largest remainders), so every queue with a lag moves over time and
    the sum never exceeds it. A queue never goes back.
    """
    lags = {queue: max(0, end - start.get(queue, 0)) for queue, end in latest.items()}
    total = sum(lags.values())
    if rows_max is None or total <= rows_max:
        return {queue: start.get(queue, 0) + lag for queue, lag in lags.items()}
    shares = {queue: rows_max * lag // total for queue, lag in lags.items()}
    left = rows_max - sum(shares.values())
    by_remainder = sorted(lags, key=lambda queue: (-(rows_max * lags[queue] % total), queue))
    for queue in by_remainder[:left]:
        shares[queue] += 1
    return {queue: start.get(queue, 0) + share for queue, share in shares.items()}


def to_checkpoint(
    topic: str, expression: str, offsets: Mapping[MessageQueue, int]
) -> dict[str, Any]:
    """Offsets as the JSON of the module's docstring."""
    queues: dict[str, dict[str, int]] = {}
    for queue, offset in sorted(offsets.items()):
        queues.setdefault(queue.broker, {})[str(queue.queue_id)] = offset
    return {
        "version": CHECKPOINT_VERSION, "topic": topic, "filter": expression, "queues": queues
    }  # fmt: skip


def from_checkpoint(found: Mapping[str, Any], topic: str) -> Offsets:
    """The inverse. Raises ConfigurationError for another topic, or what is no such JSON."""
    version = found.get("version")
    if version != CHECKPOINT_VERSION or not isinstance(found.get("queues"), dict):
        raise ConfigurationError(
            f"the checkpoint holds an offset of version {version!r}, not {CHECKPOINT_VERSION}.",
            cure="It is another source's or a newer SluiceMQ's: use another checkpointLocation.",
        )
    if found.get("topic") != topic:
        raise ConfigurationError(
            f"the checkpoint is of the topic {found.get('topic')!r}, the stream reads {topic!r}.",
            cure="Use another checkpointLocation for another topic.",
        )
    return {
        MessageQueue(topic, broker, int(queue_id)): int(offset)
        for broker, queues in found["queues"].items()
        for queue_id, offset in queues.items()
    }


def chosen_offsets(
    table: Mapping[str, Mapping[int, int | str]],
    bounds: Mapping[MessageQueue, tuple[int, int]],
    option: str,
) -> Offsets:
    """Offsets that a user gave by broker and queue, words resolved.

    Raises ConfigurationError when a queue is missing, unknown, or its offset outside the queue.
    """
    given = {
        MessageQueue(queue.topic, broker, queue_id): value
        for queue in list(bounds)[:1]
        for broker, queues in table.items()
        for queue_id, value in queues.items()
    }
    _check_names(given, bounds, option)
    offsets = {}
    for queue, (lowest, highest) in bounds.items():
        value = given[queue]
        offset = (
            {"earliest": lowest, "latest": highest}.get(value) if isinstance(value, str) else value
        )
        assert offset is not None
        if not lowest <= offset <= highest:
            raise ConfigurationError(
                f"the option {option!r} asks for offset {offset} of {place(queue)}, which holds"
                f" {lowest} to {highest}.",
                cure="Choose one that is there, or earliest or latest.",
            )
        offsets[queue] = offset
    return offsets


def _check_names(
    given: Mapping[MessageQueue, Any], bounds: Mapping[MessageQueue, Any], option: str
) -> None:
    for wrong, what, cure in (
        (sorted(set(given) - set(bounds)), "names", "It is not in the topic's route."),
        (sorted(set(bounds) - set(given)), "does not name", "Every queue needs an offset."),
    ):
        if wrong:
            listed = ", ".join(place(queue) for queue in wrong[:5])
            raise ConfigurationError(f"the option {option!r} {what} {listed}.", cure=cure)


def place(queue: MessageQueue) -> str:
    """`broker-a:3`, as messages name a queue."""
    return f"{queue.broker}:{queue.queue_id}"
