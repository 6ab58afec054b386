"""Single messages: by the keys they bear, by their id, by offset; those that wait, and open
transactions; the way of one: what clients have traced of it, and what became of it in each group.

A broker's index knows hashes only, and a Java broker hands out what its index says: whether a
message really bears the key is checked here once more.

An id is 32 or 56 hexadecimal digits and may be of either kind: made by the producer (unique key),
or by the broker (address and place in its log). The second is tried first: it is right only when
the message that lies there says so itself.

In a trace a delivery is two records with one request id. The moment of storing is not in any trace;
it is known while the message itself is still stored. While it is, the groups that have traced
nothing are looked at too: their committed offsets say whether they are past it.

Trace messages bear the id as a key. A broker gives 64 messages a request, the newest: further ones
are asked for with an earlier end until nothing new comes.

Java's producer writes one record for a batch, under one key that is all ids joined (so its send
result names it: that text can be asked for). Who knows one id cannot ask for that. So when the send
is missing and the message is there, the trace topic is read from the time of its storing on, for a
minute of traces at most. The message is known by its place then too: a broker of RocketMQ 5.3 gives
all messages of a batch of its own client the id of the batch, which no record has.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from sluicemq.client.admin.topics import (
    ask_each,
    committed_offset,
    groups_of_topic,
    masters,
    masters_of_topic,
    offset_by_time,
    queues,
    topics,
)
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import (
    QUERY_NOT_FOUND,
    PullStatus,
    expect_success,
    parse_pull_response,
)
from sluicemq.client.core.tracing import (
    ConsumeTrace,
    DeliveryTrace,
    RecallTrace,
    SendTrace,
    TraceRecord,
    TransactionTrace,
    decode_trace_records,
)
from sluicemq.client.core.transactions import TransactionState
from sluicemq.errors import (
    ConfigurationError,
    MessageNotFoundError,
    ProtocolError,
    RequestError,
    RouteNotFoundError,
    TopicNotFoundError,
)
from sluicemq.filter.selector import explain
from sluicemq.filter.subscriptions import compile_sql92, subscribe
from sluicemq.model.ids import parse_offset_message_id
from sluicemq.model.message import StoredMessage
from sluicemq.model.system_names import TOOLS_GROUP, TRACE_TOPIC, is_send_forbidden_topic
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command

T = TypeVar("T")
TIME_MAX_MS: Final = (1 << 63) - 1
COUNT_MAX: Final = 64
"""What a broker gives at most, unless its maxMsgsNumBatch says otherwise."""
PAGE_MAX: Final = 1000
LISTED_MAX: Final = 10_000
PULL_MAX: Final = 1024
READ_MAX: Final = 20_000
SCAN_PAGE: Final = 256
"""A group that every broker knows, also with automatic creation off (spec/admin.md §2)."""
_ORDER: Final = {"send": 0, "store": 1, "transaction": 2, "recall": 3, "deliver": 4}
_PAGES_MAX: Final = 50
_SCANS_MAX: Final = 100
_SKEW_MS: Final = 2_000
_LATE_MS: Final = 60_000


def messages_by_key(
    directory: Directory,
    topic: str,
    key: str,
    *,
    begin_ms: int = 0,
    end_ms: int = TIME_MAX_MS,
    count_max: int = COUNT_MAX,
) -> Conversation[list[StoredMessage]]:
    """Messages of a topic that bear a key, stored from `begin_ms` to `end_ms`, newest first.

    Raises RequestError when a broker keeps no index, or is still building it.
    """
    if not key or " " in key:
        raise ConfigurationError(
            f"{key!r} is not a key.", fix="A key is one word: keys are separated by spaces."
        )
    if begin_ms > end_ms:
        raise ConfigurationError(
            f"the range of time begins at {begin_ms} ms and ends before, at {end_ms}.",
            fix="Exchange them.",
        )
    if count_max < 1:
        raise ConfigurationError(f"{count_max} messages are asked for.", fix="Ask for one.")
    brokers = yield from masters_of_topic(directory, topic)
    command = requests.messages_by_key(topic, key, begin_ms, end_ms, count_max, is_unique=False)
    bearing = [
        message
        for message in (yield from _messages(brokers, command))
        if message.topic == topic and (key in message.keys or message.message_id == key)
    ]
    bearing.sort(key=lambda message: message.store_time_ms, reverse=True)
    return bearing[:count_max]


def _messages(
    brokers: Mapping[str, str],
    command: Command,
    absent: Collection[int] | None = (QUERY_NOT_FOUND,),
) -> Conversation[list[StoredMessage]]:
    """The messages that brokers answer with."""
    answers = yield from ask_each(brokers, command, absent=absent)
    return [one for name, _, answer in answers for one in decode_records(answer.body, broker=name)]


def messages_by_id(
    brokers: Mapping[str, str],
    topic: str,
    message_id: str,
    absent: Collection[int] | None = (QUERY_NOT_FOUND,),
) -> Conversation[list[StoredMessage]]:
    """Messages of a topic with this id of their producer, of brokers given by name and address.
    `absent` as in `ask_each`."""
    command = requests.messages_by_key(topic, message_id, 0, TIME_MAX_MS, COUNT_MAX, is_unique=True)
    found = yield from _messages(brokers, command, absent)
    return [one for one in found if one.topic == topic and one.message_id == message_id]


def messages_with_id(
    directory: Directory, topic: str, message_id: str
) -> Conversation[list[StoredMessage]]:
    """All messages of a topic with this id of their producer."""
    return (
        yield from messages_by_id(
            (yield from masters_of_topic(directory, topic)), topic, message_id
        )
    )


def message_by_id(
    directory: Directory, message_id: str, *, topic: str | None = None, anywhere: bool = True
) -> Conversation[StoredMessage]:
    """The message with this id, that of its producer or that of its broker.

    Without `topic` the first kind is looked for in all topics of all brokers, unless `anywhere` is
    False: of who asks for others that is too much. Raises MessageNotFoundError.
    """
    text = message_id.strip()
    brokers = yield from masters(directory)
    try:
        host, offset = parse_offset_message_id(text)
    except (ProtocolError, ValueError):
        host, offset = None, -1
    # The address may be one that this client cannot reach: each master is asked, that one first.
    nearest = sorted(brokers.items(), key=lambda item: item[1] != str(host))
    command = requests.message_at(topic="", physical_offset=offset)
    for broker in nearest if offset >= 0 else ():
        for message in (yield from _messages(dict([broker]), command, None)):
            if message.offset_message_id == text.upper():
                return message
    if topic is None and not anywhere:
        raise MessageNotFoundError(
            f"no broker has a message at {text}.",
            fix="Name its topic: the id that a producer made is looked for in one.",
        )
    names = [topic] if topic is not None else (yield from topics(directory))
    for name in sorted(names, key=is_send_forbidden_topic):  # what was delivered, first
        for message in (yield from messages_by_id(brokers, name, text)):
            return message
    raise MessageNotFoundError(
        f"no message has the id {text}{f' in {topic}' if topic is not None else ''}.",
        fix="It may be deleted already, or the id is of another cluster.",
    )


# ------------------------------------------------------------------------- by offset


def read_range(
    directory: Directory,
    queue: MessageQueue,
    low: int,
    high: int,
    take: Callable[[list[StoredMessage]], bool],
) -> Conversation[None]:
    """Hands the messages with offsets [low, high) to `take`, a page at a time, while it returns
    True."""
    everything = subscribe(queue.topic, None)
    while low < high:
        count = min(PULL_MAX, high - low)
        command = requests.pull(
            TOOLS_GROUP, queue, low, count_max=count, subscription=everything, bulk=True
        )
        address = yield from directory.get_read_address(queue)
        answer = parse_pull_response((yield Call(address, command)), queue.broker)
        if answer.status is PullStatus.FOUND:
            page = decode_records(answer.data, broker=queue.broker)
            wanted = [message for message in page if message.queue_offset < high]
            if wanted and not take(wanted):
                return
        elif answer.next_offset <= low:
            return
        low = answer.next_offset


@dataclass(frozen=True, slots=True)
class Scan:
    """Messages that were found, the newest first, of so many that were read."""

    messages: list[StoredMessage]
    read: int


def messages_between(
    directory: Directory,
    topic: str,
    begin_ms: int,
    end_ms: int,
    *,
    where: str = "",
    count_max: int = COUNT_MAX,
    read_max: int = READ_MAX,
) -> Conversation[Scan]:
    """Messages of a topic stored from `begin_ms` to `end_ms` that an SQL92 expression takes ("":
    all), read from the newest of each queue on; evaluated here, so before any broker. At most
    `read_max` are read. Raises FilterSyntaxError, RouteNotFoundError."""
    wanted = compile_sql92(where) if where else None
    ranges = []
    for queue in (yield from queues(directory, topic)):
        low = yield from offset_by_time(directory, queue, begin_ms)
        high = yield from offset_by_time(directory, queue, end_ms + 1)
        ranges.append((queue, low, high))
    found: list[StoredMessage] = []
    read = 0
    share = max(1, read_max // max(1, len(ranges)))
    for queue, low, high in ranges:
        own: list[StoredMessage] = []
        end, last = high, max(low, high - share)
        while end > last and len(own) < count_max:
            page: list[StoredMessage] = []

            def take(messages: list[StoredMessage], page: list[StoredMessage] = page) -> bool:
                page += messages
                return True

            begin = max(last, end - SCAN_PAGE)
            yield from read_range(directory, queue, begin, end, take)
            read, end = read + len(page), begin
            own += [
                one
                for one in reversed(page)
                if begin_ms <= one.store_time_ms <= end_ms
                and (wanted is None or explain(wanted, one.properties).matches)
            ]
        found += own[:count_max]
    found.sort(key=lambda message: message.store_time_ms, reverse=True)
    return Scan(found[:count_max], read)


# ----------------------------------------------------------- what waits on SluiceMQ brokers


def delayed(
    directory: Directory,
    topic: str | None = None,
    *,
    key: str | None = None,
    count_max: int = LISTED_MAX,
    address: str | None = None,
) -> Conversation[dict[str, list[bodies.WaitingMessage]]]:
    """Messages that wait for their delivery, by broker address and time; of a topic, with a
    key or message id, or all; of one broker, or of every master. Only SluiceMQ brokers answer."""

    def page(cursor: str | None, count: int) -> Command:
        return requests.list_delayed(topic=topic, key=key, cursor=cursor, count_max=count)

    decode = bodies.decode_waiting
    found = yield from _listed(directory, page, "cursor", decode, count_max, address)
    return {at: sorted(own, key=lambda item: item.due_ms) for at, own in found.items()}


def _listed(
    directory: Directory,
    page: Callable[[str | None, int], Command],
    cursor_field: str,
    decode: Callable[[bytes | memoryview], list[T]],
    count_max: int,
    only: str | None,
) -> Conversation[dict[str, list[T]]]:
    """What every master, or `only` the one there, lists in pages, by address. `page`: the request
    from a cursor on for so many; the answer's `cursor_field` says where to go on."""
    found: dict[str, list[T]] = {}
    for address in [only] if only else (yield from masters(directory)).values():
        mine: list[T] = []
        cursor: str | None = None
        while len(mine) < count_max:
            command = page(cursor, min(count_max - len(mine), PAGE_MAX))
            answer = yield from directory.call(address, command)
            mine += decode(answer.body)
            cursor = (answer.fields or {}).get(cursor_field)
            if not cursor:
                break
        found[address] = mine
    return found


def cancel_delayed(directory: Directory, address: str, handle: str) -> Conversation[None]:
    """Never deliver a message that `delayed` lists. Raises RequestError when it is too late."""
    yield from directory.call(address, requests.cancel_delayed(handle=handle))


def transactions(
    directory: Directory,
    *,
    group: str | None = None,
    topic: str | None = None,
    count_max: int = LISTED_MAX,
    address: str | None = None,
) -> Conversation[dict[str, list[bodies.OpenTransaction]]]:
    """Undecided transactions by broker address, the oldest half messages first; of a producer
    group, of a topic, or all; of one broker, or of every master. Only SluiceMQ brokers answer."""

    def page(after: str | None, count: int) -> Command:
        return requests.list_transactions(
            group=group, topic=topic, after=int(after) if after else None, count_max=count
        )

    decode = bodies.decode_open_transactions
    return (yield from _listed(directory, page, "after", decode, count_max, address))


def resolve_transaction(
    directory: Directory,
    transaction_id: str,
    state: TransactionState,
    *,
    address: str | None = None,
) -> Conversation[str | None]:
    """Commit or roll back by hand, at one broker or at the first master that knows it; the broker's
    address, None when it is undecided nowhere. A send that was tried again at another broker has
    its id at both.

    Only SluiceMQ brokers answer. Raises RequestError.
    """
    asked = [address] if address else list((yield from masters(directory)).values())
    for at in asked:
        command = requests.resolve_transaction(transaction_id=transaction_id, outcome=int(state))
        answer = yield Call(at, command)
        if answer.code != QUERY_NOT_FOUND:
            expect_success(answer, at)
            return at
    return None


# ------------------------------------------------------------------------- the way of one


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
class GroupTrace:
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
    groups: list[GroupTrace]
    unread: int


def timeline(
    message_id: str, records: Iterable[TraceRecord], stored: StoredMessage | None, unread: int = 0
) -> Timeline:
    """Puts records in order. Pure."""
    records = list(records)
    ends = {r.request_id: r for r in records if isinstance(r, ConsumeTrace)}
    begun = {r.request_id for r in records if isinstance(r, DeliveryTrace)}
    steps = []
    for record in records:
        if not isinstance(record, ConsumeTrace):
            steps.append(_step(record, ends))
        elif record.request_id not in begun and ends[record.request_id] is record:
            began_ms = max((record.time_ms or 0) - record.cost_ms, 0)
            result = record.outcome.name.lower()
            steps.append(Step(began_ms, "deliver", record.group, result, record.cost_ms))
    begin_ms = min((step.time_ms for step in steps if step.kind == "send"), default=0)
    if stored is not None:
        place = f"{stored.broker} queue {stored.queue_id} offset {stored.queue_offset}"
        detail = f"in {stored.topic}"
        steps.append(Step(stored.store_time_ms, "store", place=place, detail=detail))

    def order(step: Step) -> tuple[int, int]:
        """A message is stored after it was sent, whatever the clocks of two machines say."""
        is_store = step.kind == "store"
        return max(step.time_ms, begin_ms) if is_store else step.time_ms, _ORDER[step.kind]

    steps.sort(key=order)
    named = [r for r in records if isinstance(r, SendTrace | TransactionTrace)]
    topic = next((r.topic for r in named if r.topic), stored.topic if stored else None)
    tags = next((r.tags for r in named if r.tags), stored.tag if stored else None)
    keys = next((r.keys for r in records if not isinstance(r, RecallTrace) and r.keys), None)
    groups: dict[str, GroupTrace] = {}
    for step in steps:
        if step.kind == "deliver":
            group = groups.setdefault(step.group or "?", GroupTrace(step.group or "?"))
            group.deliveries += 1
            group.results.append(step.result or "unknown")
            group.consumed = group.consumed or step.result == "success"
    return Timeline(message_id, topic, tags, keys, steps, list(groups.values()), unread)


def _step(
    record: SendTrace | DeliveryTrace | TransactionTrace | RecallTrace,
    ends: dict[str | None, ConsumeTrace],
) -> Step:
    match record:
        case SendTrace() as r:
            detail = f"{r.kind.name.lower()}, {r.body_length} bytes"
            result = "success" if r.success else "failed"
            return Step(r.time_ms, "send", r.group, result, r.cost_ms, None, r.store_host, detail)
        case DeliveryTrace() as r:
            end = ends.get(r.request_id)
            outcome = end.outcome.name.lower() if end is not None else None
            cost_ms = end.cost_ms if end is not None else None
            return Step(r.time_ms, "deliver", r.group, outcome, cost_ms, r.retry_times)
        case TransactionTrace() as r:
            why = "after a check" if r.from_check else None
            state = (r.state or "").lower()
            return Step(r.time_ms, "transaction", r.group, state, place=r.store_host, detail=why)
        case RecallTrace() as r:
            return Step(r.time_ms, "recall", r.group, "success" if r.success else "failed")


# ----------------------------------------------------------------------- what was traced


def trace(
    directory: Directory,
    message_id: str,
    *,
    trace_topic: str = TRACE_TOPIC,
    anywhere: bool = True,
) -> Conversation[Timeline]:
    """What happened to a message, as far as clients have traced it; by the id of its producer or of
    its broker. `anywhere` as in `message_by_id`, for one whose topic no trace names.

    Raises MessageNotFoundError without a trace, RouteNotFoundError without the topic.
    """
    wanted = message_id.strip()
    traces = yield from _traces(directory, wanted, trace_topic)
    stored = None
    if not traces:
        stored = yield from _stored(directory, wanted, None, anywhere)
        if stored is not None and stored.message_id != wanted:
            wanted = stored.message_id
            traces = yield from _traces(directory, wanted, trace_topic)
    records, unread = _records(traces, wanted, None)
    if not any(isinstance(record, SendTrace) for record in records):
        stored = stored or (yield from _stored(directory, wanted, None, anywhere))
        if stored is not None:
            late = yield from _batch_traces(directory, stored, trace_topic)
            records += _records(late, wanted, stored.offset_message_id)[0]
    if not records:
        where = f", though the message is in {stored.topic!r}" if stored is not None else ""
        raise MessageNotFoundError(
            f"the topic {trace_topic!r} has no trace of {message_id}{where}.",
            fix="Clients write traces when they are told to: Sluice(…, trace=True), in Java "
            "enableMsgTrace; a few seconds later they can be found. Traces in a topic of your own: "
            "--topic.",
        )
    if stored is None:
        topic = next(
            (r.topic for r in records if isinstance(r, SendTrace | TransactionTrace)), None
        )
        stored = yield from _stored(directory, wanted, topic, anywhere)
    found = timeline(wanted, records, stored, unread)
    if stored is not None:
        known = {group.group for group in found.groups}
        found.groups.extend((yield from _untraced_groups(directory, stored, known)))
    return found


def _untraced_groups(
    directory: Directory, stored: StoredMessage, traced: set[str]
) -> Conversation[list[GroupTrace]]:
    """The groups of the message's topic that have traced no delivery of it."""
    queue = MessageQueue(stored.topic, stored.broker, stored.queue_id)
    found: list[GroupTrace] = []
    try:
        for group in sorted(set((yield from groups_of_topic(directory, stored.topic))) - traced):
            offset = yield from committed_offset(directory, group, queue)
            is_past = offset is not None and offset > stored.queue_offset
            found.append(GroupTrace(group, is_past=is_past))
    except (RequestError, RouteNotFoundError):
        pass  # an older broker, or access rules: what the traces tell is still told
    return found


def _traces(
    directory: Directory, message_id: str, trace_topic: str
) -> Conversation[list[StoredMessage]]:
    """All trace messages that bear the id, oldest first. Raises RouteNotFoundError."""
    found: dict[tuple[str, int, int], StoredMessage] = {}
    end_ms = TIME_MAX_MS
    try:
        for _ in range(_PAGES_MAX):
            page = yield from messages_by_key(
                directory, trace_topic, message_id, end_ms=end_ms, count_max=1_000_000
            )
            known = len(found)
            found |= {(m.broker, m.queue_id, m.queue_offset): m for m in page}
            # The next page ends where no broker has held anything back; newest come first.
            counts = Counter(message.broker for message in page)
            full = {broker for broker, count in counts.items() if count >= COUNT_MAX}
            oldest_ms = {m.broker: m.store_time_ms for m in page if m.broker in full}
            if len(found) == known or not oldest_ms:
                break
            end_ms = max(oldest_ms.values())
    except (RouteNotFoundError, TopicNotFoundError):
        raise RouteNotFoundError(
            f"no broker has the trace topic {trace_topic!r}.",
            fix="Set traceTopicEnable=true on a broker and restart it (or create the topic), then "
            "switch traces on in the clients: Sluice(…, trace=True).",
        ) from None
    return sorted(found.values(), key=lambda message: message.store_time_ms)


def _batch_traces(
    directory: Directory, stored: StoredMessage, trace_topic: str
) -> Conversation[list[StoredMessage]]:
    """The trace messages of the time after a message was stored that tell of it, found by
    reading."""
    begin_ms, end_ms = stored.store_time_ms - _SKEW_MS, stored.store_time_ms + _LATE_MS
    names = stored.message_id.encode(), stored.offset_message_id.encode()
    found: list[StoredMessage] = []
    scans = 0

    def take(page: list[StoredMessage]) -> bool:
        nonlocal scans
        scans += 1
        found.extend(m for m in page if any(name in m.body_or_raw for name in names))
        return page[-1].store_time_ms <= end_ms and scans < _SCANS_MAX

    for queue in (yield from queues(directory, trace_topic)):
        scans, low = 0, (yield from offset_by_time(directory, queue, begin_ms))
        yield from read_range(directory, queue, low, TIME_MAX_MS, take)
    return found


def _stored(
    directory: Directory, message_id: str, topic: str | None, anywhere: bool
) -> Conversation[StoredMessage | None]:
    """The message itself, if it is still there."""
    try:
        return (yield from message_by_id(directory, message_id, topic=topic, anywhere=anywhere))
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
        decoded, odd = decode_trace_records(message.body_or_raw)
        unread += odd
        records += [own for one in decoded if (own := record_about(one, wanted, place)) is not None]
    return list(dict.fromkeys(records)), unread


def record_about(record: TraceRecord, wanted: str, place: str | None) -> TraceRecord | None:
    """The record, when it is about the message; Java's record of a batch tells of several."""
    if record.message_id == wanted:
        return record
    if not isinstance(record, SendTrace):
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


# --------------------------------------------------------------------- facts of its fate


@dataclass(frozen=True, slots=True)
class MessageFacts:
    """A stored message and its queue, which holds [offset_min, offset_max). `routed` are the
    brokers on which clients find its topic to read, None without a route."""

    message: StoredMessage
    offset_min: int
    offset_max: int
    routed: frozenset[str] | None

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.message.topic, self.message.broker, self.message.queue_id)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a message in a group's retry topic or on its way there. `is_past`: the group's
    offset is beyond it; `due_ms`: until when it waits, None when it does not or is not known;
    `held`: it is popped; `is_popped`: so was the message before."""

    times: int
    is_past: bool
    due_ms: int | None = None
    held: bodies.InFlightMessage | None = None
    is_popped: bool = False
