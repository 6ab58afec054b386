"""Traces of messages: finding the records that clients wrote, and what they say in order of time.

Clients write a record for each send and two for each delivery, with the same request id.
Trace messages have the message id as a key. No trace contains the time at which the message was
stored; it is known while the message itself is stored. For groups without traces, the committed
offsets then show whether they have passed the message.

A Java producer writes one trace record for a batch, whose key is all message ids joined by commas.
If the record of a send is missing although the message exists, the trace topic is therefore read
from the time of storing on, for at most a minute of traces. The record is then found by message id
or by the message's position, because a broker of RocketMQ 5.3 gives all messages of a batch the id
of the batch, which no record contains.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sluicemq.client.admin.messages import (
    COUNT_MAX,
    TIME_MAX_MS,
    message_by_id,
    messages_by_key,
    read_range,
)
from sluicemq.client.admin.topics import (
    committed_offset,
    groups_of_topic,
    offset_by_time,
    queues,
)
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.errors import (
    MessageNotFoundError,
    RequestError,
    RouteNotFoundError,
    TopicNotFoundError,
)
from sluicemq.model.message import StoredMessage
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.model.topic import MessageQueue
from sluicemq.model.trace_records import (
    ConsumeTrace,
    DeliveryTrace,
    RecallTrace,
    SendTrace,
    TraceRecord,
    TransactionTrace,
    decode_trace_records,
    record_of_message,
)

_ORDER: Final = {"send": 0, "store": 1, "transaction": 2, "recall": 3, "deliver": 4}
"""The order of steps with the same time."""
_PAGES_MAX: Final = 50
_SCANS_MAX: Final = 100
_SKEW_MS: Final = 2_000
"""By how much the clocks of a broker and a client may differ."""
_LATE_MS: Final = 60_000
"""How long after the message was stored its trace may be stored."""


# ------------------------------------------------------------------------------- timelines


@dataclass(frozen=True, slots=True)
class Step:
    """One event in the trace of a message.

    `kind` is send, store, transaction, recall or deliver. `result` is the outcome of a delivery,
    None if it is unknown. `cost_ms` is None if the event has not ended, or has no duration. `round`
    is how often the message had been delivered to the group before. `place` is the queue or the
    address at which it happened.
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
class GroupTrace:
    """What happened to the message in one consumer group.

    `deliveries` counts the traced deliveries, and `results` are their outcomes. `consumed` is True
    if one of them succeeded. `is_past` is known for groups without traces: whether their committed
    offset is beyond the message.
    """

    group: str
    deliveries: int = 0
    consumed: bool = False
    results: list[str] = field(default_factory=list)
    is_past: bool | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The trace of one message.

    `unread` is the number of trace records that could not be decoded.
    """

    message_id: str
    topic: str | None
    tags: str | None
    keys: str | None
    steps: list[Step]
    groups: list[GroupTrace]
    unread: int


def timeline(
    message_id: str, records: Iterable[TraceRecord], stored: StoredMessage | None, unread: int = 0
) -> Timeline:
    """Merge the traces of a message and its storing into one timeline, sorted by time.

    `records` are what clients have traced. The beginning and the end of a delivery become one step.
    `stored` is the message; None means that it is no longer stored, and the timeline then has no
    step "store". `unread` is the number of trace records that could not be decoded.
    """
    records = list(records)
    steps = _make_steps(records)
    sent_ms = min((step.time_ms for step in steps if step.kind == "send"), default=0)
    if stored is not None:
        stored_place = f"{stored.broker} queue {stored.queue_id} offset {stored.queue_offset}"
        detail = f"in {stored.topic}"
        steps.append(Step(stored.store_time_ms, "store", place=stored_place, detail=detail))

    def sort_key(step: Step) -> tuple[int, int]:
        time_ms = step.time_ms
        if step.kind == "store":
            # A message is stored after it was sent, even if the clocks of two machines disagree.
            time_ms = max(time_ms, sent_ms)
        return time_ms, _ORDER[step.kind]

    steps.sort(key=sort_key)
    topic, tags, keys = _find_labels(records, stored)
    return Timeline(message_id, topic, tags, keys, steps, _make_group_traces(steps), unread)


def _find_labels(
    records: Sequence[TraceRecord], stored: StoredMessage | None
) -> tuple[str | None, str | None, str | None]:
    """Return (topic, tag, keys) of a message; each may be None if it is unknown.

    Each comes from the first trace record that has it. If none has the topic or tag, it comes from
    the stored message.
    """
    topic = stored.topic if stored else None
    tags = stored.tag if stored else None
    keys = None
    for record in reversed(records):  # so that the first record wins
        if isinstance(record, SendTrace | TransactionTrace):
            topic = record.topic or topic
            tags = record.tags or tags
        if not isinstance(record, RecallTrace):
            keys = record.keys or keys
    return topic, tags, keys


def _make_steps(records: Collection[TraceRecord]) -> list[Step]:
    """Return the steps of trace records, in the order of the records.

    A client traces a delivery twice, at its beginning and at its end, with the same request id.
    Both become one step. If the beginning is missing, the end becomes a step of its own. If there
    are several ends_by_id, only the last counts.
    """
    ends_by_id = {
        record.request_id: record for record in records if isinstance(record, ConsumeTrace)
    }
    begun_ids = {record.request_id for record in records if isinstance(record, DeliveryTrace)}
    steps = []
    for record in records:
        if not isinstance(record, ConsumeTrace):
            steps.append(_make_step(record, ends_by_id))
        elif record.request_id not in begun_ids and ends_by_id[record.request_id] is record:
            began_ms = max((record.time_ms or 0) - record.cost_ms, 0)
            outcome = record.outcome.name.lower()
            steps.append(Step(began_ms, "deliver", record.group, outcome, record.cost_ms))
    return steps


def _make_group_traces(steps: Iterable[Step]) -> list[GroupTrace]:
    """Summarize the deliveries to each group: their number, results, and whether one succeeded."""
    traces: dict[str, GroupTrace] = {}
    for step in steps:
        if step.kind == "deliver":
            name = step.group or "?"
            group_trace = traces.setdefault(name, GroupTrace(name))
            group_trace.deliveries += 1
            group_trace.results.append(step.result or "unknown")
            group_trace.consumed = group_trace.consumed or step.result == "success"
    return list(traces.values())


def _make_step(
    record: SendTrace | DeliveryTrace | TransactionTrace | RecallTrace,
    ends: dict[str | None, ConsumeTrace],
) -> Step:
    """Return the step of one trace record.

    `ends` maps request ids to the records of ends of deliveries. The result and the duration of a
    delivery come from its end; without an end they stay unknown.
    """
    if isinstance(record, SendTrace):
        return Step(
            record.time_ms,
            "send",
            record.group,
            "success" if record.success else "failed",
            cost_ms=record.cost_ms,
            place=record.store_host,
            detail=f"{record.kind.name.lower()}, {record.body_length} bytes",
        )
    if isinstance(record, DeliveryTrace):
        step = Step(record.time_ms, "deliver", record.group, round=record.retry_times)
        end = ends.get(record.request_id)  # None if the delivery has not ended, or was not traced
        if end is None:
            return step
        return replace(step, result=end.outcome.name.lower(), cost_ms=end.cost_ms)
    if isinstance(record, TransactionTrace):
        return Step(
            record.time_ms,
            "transaction",
            record.group,
            (record.state or "").lower(),
            place=record.store_host,
            detail="after a check" if record.from_check else None,
        )
    outcome = "success" if record.success else "failed"
    return Step(record.time_ms, "recall", record.group, outcome)


# ---------------------------------------------------------------------------------- traces


def trace(
    directory: Directory,
    message_id: str,
    *,
    trace_topic: str = TRACE_TOPIC,
    anywhere: bool = True,
) -> Conversation[Timeline]:
    """Return what happened to a message, from the traces of clients and from the brokers.

    `message_id` is the id that the producer or the broker made. If no trace contains the message's
    topic, all topics are searched for the message; with `anywhere` False they are not, which saves
    many requests.

    Raises MessageNotFoundError if no trace exists, RouteNotFoundError if the trace topic does not
    exist.
    """
    known_id = message_id.strip()
    traces = yield from _find_traces(directory, known_id, trace_topic)
    stored = None
    if not traces:
        # The id may be that of the broker, which no trace has as a key.
        stored = yield from _find_stored(directory, known_id, None, anywhere)
        if stored is not None and stored.message_id != known_id:
            known_id = stored.message_id
            traces = yield from _find_traces(directory, known_id, trace_topic)
    records, unread = _select_records(traces, known_id, None)

    if not any(isinstance(record, SendTrace) for record in records):
        # The message may have been sent in a batch.
        stored = stored or (yield from _find_stored(directory, known_id, None, anywhere))
        if stored is not None:
            batch_traces = yield from _find_batch_traces(directory, stored, trace_topic)
            records += _select_records(batch_traces, known_id, stored.offset_message_id)[0]
    if not records:
        raise _no_trace_error(message_id, trace_topic, stored)

    if stored is None:
        topic = _find_topic(records)
        stored = yield from _find_stored(directory, known_id, topic, anywhere)
    traced = timeline(known_id, records, stored, unread)
    if stored is not None:
        traced_groups = {group_trace.group for group_trace in traced.groups}
        untraced = yield from _find_untraced_groups(directory, stored, traced_groups)
        traced.groups.extend(untraced)
    return traced


def _no_trace_error(
    message_id: str, trace_topic: str, stored: StoredMessage | None
) -> MessageNotFoundError:
    """Return the error for the message `message_id`, which has no trace in `trace_topic`.

    `stored` is the message; None means that it was not found either.
    """
    hint = f", though the message is in {stored.topic!r}" if stored is not None else ""
    return MessageNotFoundError(
        f"the topic {trace_topic!r} has no trace of {message_id}{hint}.",
        fix="Enable traces in the clients: Sluice(…, trace=True), in Java enableMsgTrace. "
        "Traces are found a few seconds later. For traces in another topic, use --topic.",
    )


def _find_topic(records: Iterable[TraceRecord]) -> str | None:
    """Return the topic of the first record of a send or transaction; None without such a record."""
    for record in records:
        if isinstance(record, SendTrace | TransactionTrace):
            return record.topic
    return None


def _find_untraced_groups(
    directory: Directory, stored: StoredMessage, traced: set[str]
) -> Conversation[list[GroupTrace]]:
    """Return the groups that read the message's topic and are not in `traced`.

    Each `GroupTrace` says whether the group's committed offset is beyond the message. The result is
    incomplete or empty if a broker refuses the request.
    """
    queue = MessageQueue(stored.topic, stored.broker, stored.queue_id)
    untraced_groups: list[GroupTrace] = []
    try:
        groups = yield from groups_of_topic(directory, stored.topic)
        for group in sorted(set(groups) - traced):
            offset = yield from committed_offset(directory, group, queue)
            is_past = offset is not None and offset > stored.queue_offset
            untraced_groups.append(GroupTrace(group, is_past=is_past))
    except (RequestError, RouteNotFoundError):
        pass  # an older broker, or access rules: the timeline has the traced groups only
    return untraced_groups


def _find_traces(
    directory: Directory, message_id: str, trace_topic: str
) -> Conversation[list[StoredMessage]]:
    """Return all messages of the trace topic that have `message_id` as a key, the oldest first.

    A broker returns at most its newest `COUNT_MAX` messages. Further pages are requested with an
    earlier end of the range, until a page has nothing new. Raises RouteNotFoundError if the trace
    topic does not exist.
    """
    traces_by_place: dict[
        tuple[str, int, int], StoredMessage
    ] = {}  # by broker, queue id and offset
    end_ms = TIME_MAX_MS
    try:
        for _ in range(_PAGES_MAX):
            page = yield from messages_by_key(
                directory, trace_topic, message_id, end_ms=end_ms, count_max=1_000_000
            )
            previous_count = len(traces_by_place)
            for message in page:
                traces_by_place[message.broker, message.queue_id, message.queue_offset] = message
            next_end_ms = _find_next_end(page)
            if len(traces_by_place) == previous_count or next_end_ms is None:
                break
            end_ms = next_end_ms
    except (RouteNotFoundError, TopicNotFoundError):
        raise RouteNotFoundError(
            f"no broker has the trace topic {trace_topic!r}.",
            fix="Set traceTopicEnable=true on a broker and restart it (or create the topic). Then "
            "enable traces in the clients: Sluice(…, trace=True).",
        ) from None
    return sorted(traces_by_place.values(), key=lambda message: message.store_time_ms)


def _find_next_end(page: Sequence[StoredMessage]) -> int | None:
    """Return the end of the time range of the next page, in ms; None if there is no next page.

    `page` has messages of several brokers. A broker that returned fewer than `COUNT_MAX` messages
    has no more. A broker that returned `COUNT_MAX` may have more that are as old as its oldest one,
    or older. The latest of these oldest times is returned.
    """
    counts = Counter(message.broker for message in page)
    # The page begins with the newest message, so the last one of a broker sets its oldest time.
    oldest_ms = {
        message.broker: message.store_time_ms
        for message in page
        if counts[message.broker] >= COUNT_MAX
    }
    return max(oldest_ms.values(), default=None)


def _find_batch_traces(
    directory: Directory, stored: StoredMessage, trace_topic: str
) -> Conversation[list[StoredMessage]]:
    """Read the trace topic for traces of the batch in which a message was sent.

    The trace of a batch does not have the ids of its messages as keys, so the topic is scanned from
    shortly before the message was stored to shortly after. Returns the trace messages whose body
    contains one of the message's ids.
    """
    begin_ms = stored.store_time_ms - _SKEW_MS
    end_ms = stored.store_time_ms + _LATE_MS
    message_ids = stored.message_id.encode(), stored.offset_message_id.encode()
    traces: list[StoredMessage] = []
    scans = 0

    def mentions_message(trace: StoredMessage) -> bool:
        return any(some_id in trace.body_or_raw for some_id in message_ids)

    def take(page: list[StoredMessage]) -> bool:
        nonlocal scans
        scans += 1
        traces.extend(filter(mentions_message, page))
        return page[-1].store_time_ms <= end_ms and scans < _SCANS_MAX

    for queue in (yield from queues(directory, trace_topic)):
        scans = 0
        low = yield from offset_by_time(directory, queue, begin_ms)
        yield from read_range(directory, queue, low, TIME_MAX_MS, take)
    return traces


def _find_stored(
    directory: Directory, message_id: str, topic: str | None, anywhere: bool
) -> Conversation[StoredMessage | None]:
    """Search the message itself, and return it, None if it is not stored any more.

    `topic` is where to search; None means all topics if `anywhere` is True.
    """
    try:
        return (yield from message_by_id(directory, message_id, topic=topic, anywhere=anywhere))
    except MessageNotFoundError:
        return None


def _select_records(
    traces: Iterable[StoredMessage], message_id: str, offset_message_id: str | None
) -> tuple[list[TraceRecord], int]:
    """Decode trace messages, and return the records that are about one message.

    A trace message has records of several messages. Returns (records without duplicates, number of
    records that could not be decoded). `offset_message_id` is the id that the broker made; None
    means that it is unknown.
    """
    records: list[TraceRecord] = []
    unread_count = 0
    for message in traces:
        decoded, undecodable_count = decode_trace_records(message.body_or_raw)
        unread_count += undecodable_count
        for record in decoded:
            own_record = record_of_message(record, message_id, offset_message_id)
            if own_record is not None:
                records.append(own_record)
    return list(dict.fromkeys(records)), unread_count
