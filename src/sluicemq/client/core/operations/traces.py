"""The way of one message as steps in order of time, and what became of it in each group. Pure.

A delivery is two records with one request id. The moment of storing is not in any trace; it is
known while the message itself is still stored.

Finding what was traced of a message: a conversation as those in `operations`.

Trace messages bear the id as a key. A broker gives 64 messages a request, the newest: further ones
are asked for with an earlier end until nothing new comes.

Java's producer writes one record for a batch, under one key that is all ids joined (so its send
result names it: that text can be asked for). Who knows one id cannot ask for that. So when the send
is missing and the message is there, the trace topic is read from the time of its storing on, for a
minute of traces at most. The message is known by its place then too: a broker of RocketMQ 5.3 gives
all messages of a batch of its own client the id of the batch, which no record has.

While the message is there, the groups that have told nothing are looked at too: their committed
offsets say whether they are past it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import PullStatus, pull_answer
from sluicemq.client.core.operations import messages as finding
from sluicemq.client.core.operations.topics import (
    Ask,
    Talk,
    committed_offset,
    groups_of_topic,
    offset_by_time,
    queues,
)
from sluicemq.client.core.tracing import (
    Ended,
    Finished,
    Published,
    Recalled,
    Taken,
    TraceRecord,
    decode,
)
from sluicemq.errors import (
    MessageNotFoundError,
    RequestError,
    RouteNotFoundError,
    TopicNotFoundError,
)
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records

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


_PAGES_MAX: Final = 50
_SCANS_MAX: Final = 100
_READ_GROUP: Final = "TOOLS_CONSUMER"
_SKEW_MS: Final = 2_000
_LATE_MS: Final = 60_000


def find_trace(message_id: str, trace_topic: str) -> Talk[Timeline]:
    """The timeline of a message, by the id of its producer or of its broker.

    Raises MessageNotFoundError when no trace of it is there, RouteNotFoundError without the topic.
    """
    wanted = message_id.strip()
    traces = yield from _traces(wanted, trace_topic)
    stored = None
    if not traces:
        stored = yield from _stored(wanted, None)
        if stored is not None and stored.message_id != wanted:
            wanted = stored.message_id
            traces = yield from _traces(wanted, trace_topic)
    records, unread = _records(traces, wanted, None)
    if not any(isinstance(record, Published) for record in records):
        stored = stored or (yield from _stored(wanted, None))
        if stored is not None:
            late = yield from _batch_traces(stored, trace_topic)
            records += _records(late, wanted, stored.offset_message_id)[0]
    if not records:
        raise _nothing(message_id, trace_topic, stored)
    if stored is None:
        topic = next((r.topic for r in records if isinstance(r, Published | Ended)), None)
        stored = yield from _stored(wanted, topic)
    found = timeline(wanted, records, stored, unread)
    if stored is not None:
        found.groups.extend((yield from _silent(stored, {fate.group for fate in found.groups})))
    return found


def _silent(stored: StoredMessage, told: set[str]) -> Talk[list[GroupFate]]:
    """The groups of the message's topic that have traced no delivery of it."""
    queue = MessageQueue(stored.topic, stored.broker, stored.queue_id)
    fates = []
    try:
        for group in sorted(set((yield from groups_of_topic(stored.topic))) - told):
            offset = yield from committed_offset(group, queue)
            is_past = offset is not None and offset > stored.queue_offset
            fates.append(GroupFate(group, is_past=is_past))
    except (RequestError, RouteNotFoundError):
        return fates  # an older broker, or access rules: what the traces tell is still told
    return fates


def _nothing(wanted: str, trace_topic: str, stored: StoredMessage | None) -> MessageNotFoundError:
    what = f", though the message is in {stored.topic!r}" if stored is not None else ""
    return MessageNotFoundError(
        f"the topic {trace_topic!r} has no trace of {wanted}{what}.",
        cure="Clients write traces when they are told to: Sluice(…, trace=True), in Java "
        "enableMsgTrace; a few seconds later they can be found. Traces in a topic of your own: "
        "--topic.",
    )


def _traces(message_id: str, trace_topic: str) -> Talk[list[StoredMessage]]:
    """All trace messages that bear the id, oldest first. Raises RouteNotFoundError."""
    found: dict[tuple[str, int, int], StoredMessage] = {}
    end_ms = finding.TIME_MAX_MS
    try:
        for _ in range(_PAGES_MAX):
            page = yield from finding.messages_by_key(trace_topic, message_id, 0, end_ms, 1_000_000)
            known = len(found)
            found |= {(m.broker, m.queue_id, m.queue_offset): m for m in page}
            page_end_ms = _page_end_ms(page)
            if len(found) == known or page_end_ms is None:
                break
            end_ms = page_end_ms
    except (RouteNotFoundError, TopicNotFoundError):
        raise RouteNotFoundError(
            f"no broker has the trace topic {trace_topic!r}.",
            cure="Set traceTopicEnable=true on a broker and restart it (or create the topic), then "
            "switch traces on in the clients: Sluice(…, trace=True).",
        ) from None
    return sorted(found.values(), key=lambda message: message.store_time_ms)


def _batch_traces(stored: StoredMessage, trace_topic: str) -> Talk[list[StoredMessage]]:
    """The trace messages of the time after a message was stored that tell of it, found by
    reading."""
    begin_ms, end_ms = stored.store_time_ms - _SKEW_MS, stored.store_time_ms + _LATE_MS
    names = stored.message_id.encode(), stored.offset_message_id.encode()
    everything = subscribe(trace_topic, None)
    found: list[StoredMessage] = []
    for queue in (yield from queues(trace_topic)):
        offset = yield from offset_by_time(queue, begin_ms, upper=False)
        for _ in range(_SCANS_MAX):
            command = requests.pull(_READ_GROUP, queue, offset, subscription=everything)
            answer = pull_answer((yield Ask(queue, command, must_succeed=False)), queue.broker)
            if answer.status is not PullStatus.FOUND:
                break
            page = decode_records(answer.data, broker=queue.broker)
            found += [m for m in page if any(name in m.body for name in names)]
            if page[-1].store_time_ms > end_ms:
                break
            offset = answer.next_offset
    return found


def _page_end_ms(page: list[StoredMessage]) -> int | None:
    """Where the next page ends: up to there no broker has held anything back; None: none has."""
    counts = Counter(message.broker for message in page)
    full = {broker for broker, count in counts.items() if count >= finding.COUNT_MAX}
    oldest_ms = {m.broker: m.store_time_ms for m in page if m.broker in full}  # newest come first
    return max(oldest_ms.values(), default=None)


def _stored(message_id: str, topic: str | None) -> Talk[StoredMessage | None]:
    """The message itself, if it is still there."""
    try:
        return (yield from finding.message_by_id(message_id, topic))
    except MessageNotFoundError:
        return None


def _records(
    traces: Iterable[StoredMessage], wanted: str, place: str | None
) -> tuple[list[TraceRecord], int]:
    """The records about one message, given by id and perhaps by where it lies; a trace message
    tells of many."""
    records: list[TraceRecord] = []
    unread = 0
    for message in traces:
        told, odd = decode(message.body)
        unread += odd
        records += [own for one in told if (own := _about(one, wanted, place)) is not None]
    return list(dict.fromkeys(records)), unread


def _about(record: TraceRecord, wanted: str, place: str | None) -> TraceRecord | None:
    """The record, when it is about the message; Java's record of a batch tells of several."""
    if record.message_id == wanted:
        return record
    if not isinstance(record, Published):
        return None
    ids = (record.message_id or "").split(",")
    places = (record.offset_message_id or "").split(",")
    if wanted in ids:
        index = ids.index(wanted)
    elif place in places:
        index = places.index(place)
    else:
        return None
    own = places[index] if index < len(places) else None
    return replace(record, message_id=wanted, offset_message_id=own)
