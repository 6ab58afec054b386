"""The way of one message as steps in order of time, and what became of it in each group. Pure.

A delivery is two records with one request id. The moment of storing is not in any trace; it is
known while the message itself is still stored.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from sluicemq.client.core.trace import (
    Ended,
    Finished,
    Published,
    Recalled,
    Taken,
    TraceRecord,
)
from sluicemq.model.message import StoredMessage

_ORDER: Final = {"send": 0, "store": 1, "transaction": 2, "recall": 3, "deliver": 4}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened. `cost_ms` None: it has not ended, or has no length.

    `kind`: send, store, transaction, recall, deliver. `round`: how often the message had come to
    the group before. `result`: of a delivery the outcome's name, None while nothing is known.
    """

    time_ms: int
    kind: str
    group: str | None = None
    result: str | None = None
    cost_ms: int | None = None
    round: int | None = None
    place: str | None = None
    detail: str | None = None


@dataclass(slots=True)
class GroupFate:
    """What became of the message in one consumer group. `deliveries`: those that were traced;
    `is_past`, where there are none: whether the group's committed offset is beyond the message."""

    group: str
    deliveries: int = 0
    consumed: bool = False
    results: list[str] = field(default_factory=list)
    is_past: bool | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The way of one message. `unread`: trace records nobody could understand."""

    message_id: str
    topic: str | None
    tags: str | None
    keys: str | None
    steps: list[Step]
    groups: list[GroupFate]
    unread: int


def timeline(
    message_id: str, records: Iterable[TraceRecord], stored: StoredMessage | None, unread: int = 0
) -> Timeline:
    """Puts records in order. Pure."""
    records = list(records)
    ends = {r.request_id: r for r in records if isinstance(r, Finished)}
    steps = [_step(record, ends) for record in records if not isinstance(record, Finished)]
    begun = {r.request_id for r in records if isinstance(r, Taken)}
    steps += [_lone_end(end) for request, end in ends.items() if request not in begun]
    if stored is not None:
        steps.append(_store_step(stored))
    begin_ms = min((s.time_ms for s in steps if s.kind == "send"), default=0)
    steps.sort(key=lambda step: _place_in_time(step, begin_ms))
    named = [r for r in records if isinstance(r, Published | Ended)]
    topic = next((r.topic for r in named if r.topic), stored.topic if stored else None)
    tags = next((r.tags for r in named if r.tags), stored.tag if stored else None)
    keys = next((r.keys for r in records if not isinstance(r, Recalled) and r.keys), None)
    return Timeline(message_id, topic, tags, keys, steps, _fates(steps), unread)


def _step(record: Published | Taken | Ended | Recalled, ends: dict[str | None, Finished]) -> Step:
    match record:
        case Published() as r:
            detail = f"{r.kind.name.lower()}, {r.body_length} bytes"
            return Step(
                r.time_ms, "send", r.group, _success(r.success), r.cost_ms, None, r.store_host,
                detail,
            )  # fmt: skip
        case Taken() as r:
            end = ends.get(r.request_id)
            result = end.outcome.name.lower() if end is not None else None
            cost_ms = end.cost_ms if end is not None else None
            return Step(r.time_ms, "deliver", r.group, result, cost_ms, r.retry_times)
        case Ended() as r:
            why = "after a check" if r.from_check else None
            return Step(
                r.time_ms, "transaction", r.group, (r.state or "").lower(), None, None,
                r.store_host, why,
            )  # fmt: skip
        case Recalled() as r:
            return Step(r.time_ms, "recall", r.group, _success(r.success))


def _place_in_time(step: Step, begin_ms: int) -> tuple[int, int]:
    """A message is stored after it was sent, whatever the clocks of two machines say."""
    time_ms = max(step.time_ms, begin_ms) if step.kind == "store" else step.time_ms
    return time_ms, _ORDER[step.kind]


def _lone_end(end: Finished) -> Step:
    """The beginning of this delivery is not there (yet)."""
    began_ms = (end.time_ms or 0) - end.cost_ms
    return Step(max(began_ms, 0), "deliver", end.group, end.outcome.name.lower(), end.cost_ms)


def _store_step(stored: StoredMessage) -> Step:
    place = f"{stored.broker} queue {stored.queue_id} offset {stored.queue_offset}"
    return Step(stored.store_time_ms, "store", None, None, None, None, place, f"in {stored.topic}")


def _success(success: bool) -> str:
    return "success" if success else "failed"


def _fates(steps: Iterable[Step]) -> list[GroupFate]:
    fates: dict[str, GroupFate] = {}
    for step in steps:
        if step.kind == "deliver":
            name = step.group or "?"
            fate = fates.setdefault(name, GroupFate(name))
            fate.deliveries += 1
            fate.results.append(step.result or "unknown")
            fate.consumed = fate.consumed or step.result == "success"
    return list(fates.values())
