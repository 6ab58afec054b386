"""Asking for the facts that `explaining` judges: conversations as in `operations`.

All but two requests are RocketMQ's own, so this works against a Java broker too. Ours besides tell
until when a retry waits (900101) and how many messages match (900131); without them that is not
known. What a broker refuses or a member does not answer is a fact that is missing, not an error.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import SUCCESS
from sluicemq.client.core.explanations.facts import (
    Copy,
    GroupExplained,
    GroupFacts,
    GroupState,
    LaneFacts,
    MemberFacts,
    MessageExplained,
    MessageFacts,
    QueueFacts,
)
from sluicemq.client.core.explanations.rules import explain_group, explain_message
from sluicemq.client.core.operations import contracts
from sluicemq.client.core.operations.filters import matching
from sluicemq.client.core.operations.messages import COUNT_MAX, TIME_MAX_MS, message_by_id
from sluicemq.client.core.operations.topics import (
    Ask,
    RouteOf,
    Talk,
    committed_offset,
    groups,
    groups_of_topic,
    masters,
    offset_max,
    offset_min,
)
from sluicemq.client.core.operations.traces import GroupFate, find_trace
from sluicemq.errors import (
    ConnectionLostError,
    MessageNotFoundError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
)
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.message import REAL_TOPIC, StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import (
    DLQ_PREFIX,
    MASTER_ID,
    PERM_READ,
    RETRY_PREFIX,
    GroupConfig,
    MessageQueue,
    TopicRoute,
)
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies

DELAYED_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
MEMBERS_ASKED_MAX: Final = 16
_NO_ANSWER: Final = (RequestError, RequestTimeoutError, ConnectionLostError, ProtocolError)
Known = Sequence[tuple[str, str]]
"""Masters: name and address."""


def inquire_message(
    message_id: str, group: str | None, topic: str | None, trace_topic: str, now_ms: int
) -> Talk[tuple[MessageFacts, list[MessageExplained]]]:
    """What became of a message in one group, or in each that reads its topic. Raises
    MessageNotFoundError."""
    message = yield from message_by_id(message_id, topic)
    known = list((yield from masters()).items())
    about = yield from _about(message)
    traced = yield from _traced(message, trace_topic)
    configs = yield from groups()
    names = [group] if group is not None else (yield from _readers(message.topic))
    found = []
    for name in names:
        facts = yield from _group_facts(name, configs.get(name), about, known, now_ms)
        fate = next((one for one in traced if one.group == name), None)
        found.append(explain_message(about, replace(facts, traced=fate)))
    return about, found


def inquire_group(name: str, now_ms: int) -> Talk[GroupExplained]:
    """Why a group is idle or behind."""
    config = (yield from groups()).get(name)
    if config is None:
        return explain_group(GroupState(GroupFacts(name, None)))
    known = list((yield from masters()).items())
    members, subscriptions = yield from _members(name, known)
    queues: list[QueueFacts] = []
    for _, address in known:
        queues += yield from _queues(name, address)
    routed = {}
    for topic in sorted({item.queue.topic for item in queues} | set(subscriptions)):
        if not topic.startswith(RETRY_PREFIX):
            routed[topic] = yield from _routed(topic)
    told = yield from matching(name)
    counted = [(item.broker, topic) for item in told for topic in item.topics]
    facts = GroupFacts(name, config, members, subscriptions, now_ms=now_ms)
    said = yield from _contracts(name)
    return explain_group(GroupState(facts, queues, routed, counted, said))


# ----------------------------------------------------------------------------------- messages


def _about(message: StoredMessage) -> Talk[MessageFacts]:
    queue = MessageQueue(message.topic, message.broker, message.queue_id)
    routed = yield from _routed(message.topic)
    low, high = message.queue_offset, message.queue_offset + 1
    if routed is not None and message.broker in routed:
        low = yield from offset_min(queue)
        high = yield from offset_max(queue)
    return MessageFacts(message, low, high, routed)


def _routed(topic: str) -> Talk[frozenset[str] | None]:
    """The brokers from which clients read a topic; None without a route."""
    try:
        route: TopicRoute = yield RouteOf(topic)
    except RouteNotFoundError:
        return None
    readable = {data.broker for data in route.queues if data.perm & PERM_READ and data.read_queues}
    online = {data.broker for data in route.brokers if MASTER_ID in data.addresses}
    return frozenset(readable & online)


def _readers(topic: str) -> Talk[list[str]]:
    try:
        return (yield from groups_of_topic(topic))
    except (RouteNotFoundError, RequestError):
        return []


def _traced(message: StoredMessage, trace_topic: str) -> Talk[list[GroupFate]]:
    """What clients have traced of it; nothing when none does."""
    try:
        found = yield from find_trace(message.message_id, trace_topic)
    except (MessageNotFoundError, RouteNotFoundError, RequestError):
        return []
    return found.groups


# ------------------------------------------------------------------------------------- groups


def _group_facts(
    name: str, config: GroupConfig | None, about: MessageFacts, known: Known, now_ms: int
) -> Talk[GroupFacts]:
    if config is None:
        return GroupFacts(name, None)
    message = about.message
    members, subscriptions = yield from _members(name, known, message.broker)
    if message.topic not in subscriptions:
        kept = yield from _kept_subscription(name, message.topic, message.broker)
        subscriptions |= kept
    committed = fetched = None
    address = dict(known).get(message.broker)
    if address is not None:
        answer = yield Ask(address, requests.offset_of_group(name, about.queue), must_succeed=False)
        committed = int((answer.fields or {})["offset"]) if answer.code == SUCCESS else None
        for item in (yield from _queues(name, address, message.topic)):
            if item.queue == about.queue:
                fetched = item.fetched
    lanes = yield from _lanes(name, about)
    copies = yield from _copies(name, message, known)
    dead = yield from _stored_as(DLQ_PREFIX + name, message, known)
    return GroupFacts(
        name, config, members, subscriptions, committed, fetched, copies, dead, None, now_ms, lanes
    )


def _contracts(name: str) -> Talk[list[contracts.GroupContract]]:
    """None where a broker does not tell."""
    try:
        return (yield from contracts.show(name))
    except RequestError:
        return []


def _lanes(name: str, about: MessageFacts) -> Talk[list[LaneFacts]]:
    """The lanes of a group at the message's broker, from the oldest on; none of RocketMQ's."""
    told = yield from _contracts(name)
    topic, found = about.message.topic, []
    for lane in (
        lane for item in told if item.broker == about.message.broker for lane in item.lanes
    ):
        said = lane["subscriptions"].get(topic)
        places = {(item["topic"], item["queueId"]): item["offset"] for item in lane["queues"]}
        found.append(
            LaneFacts(
                lane["lane"],
                None if said is None else subscribe(topic, said[1], said[0]),
                lane["clientIds"],
                places.get((topic, about.message.queue_id)),
            )
        )
    return found


def _members(
    name: str, known: Known, broker: str | None = None
) -> Talk[tuple[list[MemberFacts], dict[str, Subscription]]]:
    """Who is online, and what the group subscribes to, as a broker says (or all do)."""
    clients: dict[str, str] = {}
    subscriptions: dict[str, Subscription] = {}
    for own, address in known:
        answer = yield Ask(address, requests.consumer_connections(name), must_succeed=False)
        if answer.code != SUCCESS:
            continue
        told = bodies.decode_consumer_connections(answer.body)
        clients |= {one.client_id: address for one in told.connections}
        if broker in (None, own):
            subscriptions |= told.subscriptions
    found: list[MemberFacts] = []
    for client_id, address in sorted(clients.items()):
        info = None
        if len(found) < MEMBERS_ASKED_MAX:
            info = yield from _running(name, client_id, address)
        if info is None:
            found.append(MemberFacts(client_id))
        else:
            own_topics = {item.topic: item for item in info.subscriptions}
            found.append(MemberFacts(client_id, own_topics, info.queues))
    return found, subscriptions


def _running(name: str, client_id: str, address: str) -> Talk[bodies.RunningInfo | None]:
    try:
        command = requests.running_info(name, client_id, stack=False)
        answer = yield Ask(address, command, must_succeed=False)
        return bodies.decode_running_info(answer.body) if answer.code == SUCCESS else None
    except _NO_ANSWER:
        return None


def _kept_subscription(name: str, topic: str, broker: str) -> Talk[dict[str, Subscription]]:
    """Of a group that is away: a broker of ours keeps SQL92 expressions for a day."""
    for item in (yield from matching(name, topic)):
        for told in item.topics if item.broker == broker else ():
            if told.expression is not None:
                return {topic: Subscription(topic, told.expression, told.kind)}
    return {}


def _queues(name: str, address: str, topic: str | None = None) -> Talk[list[QueueFacts]]:
    answer = yield Ask(address, requests.consume_stats(name, topic), must_succeed=False)
    if answer.code != SUCCESS:
        return []
    told = bodies.decode_consume_stats(answer.body).queues
    return [
        QueueFacts(queue, item.consumer_offset, item.broker_offset, item.pull_offset or None)
        for queue, item in sorted(told.items())
    ]


# ------------------------------------------------------------------------------------ retries


def _copies(name: str, message: StoredMessage, known: Known) -> Talk[list[Copy]]:
    """Copies that wait, and those in the retry topic."""
    topic = RETRY_PREFIX + name
    due: dict[str, int] = {}
    for broker, address in known:
        command = requests.list_delayed(topic, message.message_id, None, COUNT_MAX)
        answer = yield Ask(address, command, must_succeed=False)
        if answer.code == SUCCESS:
            times = [item.due_ms for item in bodies.decode_waiting(answer.body)]
            due |= {broker: max(times)} if times else {}
    arrived = yield from _stored_as(topic, message, known)
    found = []
    for copy in arrived:
        queue = MessageQueue(topic, copy.broker, copy.queue_id)
        offset = None
        with contextlib.suppress(RequestError, RouteNotFoundError):
            offset = yield from committed_offset(name, queue)
        is_past = offset is not None and offset > copy.queue_offset
        found.append(Copy(copy.reconsume_times, is_past))
    times_arrived = {copy.reconsume_times for copy in arrived}
    waiting = yield from _stored_as(DELAYED_TOPIC, message, known)
    for copy in waiting:
        is_ours = copy.properties.get(REAL_TOPIC) == topic
        if is_ours and copy.reconsume_times not in times_arrived:
            found.append(Copy(copy.reconsume_times, False, due.pop(copy.broker, None)))
    newest = max((copy.times for copy in found), default=0)
    found += [Copy(newest + 1, False, time_ms) for time_ms in due.values()]
    return found


def _stored_as(topic: str, message: StoredMessage, known: Known) -> Talk[list[StoredMessage]]:
    """Copies of a message in a topic: they bear the id of its producer."""
    command = requests.messages_by_key(
        topic, message.message_id, 0, TIME_MAX_MS, COUNT_MAX, is_unique=True
    )
    found: list[StoredMessage] = []
    for broker, address in known:
        answer = yield Ask(address, command, must_succeed=False)
        if answer.code == SUCCESS:
            page = decode_records(answer.body, broker=broker)
            found += [m for m in page if m.topic == topic and m.message_id == message.message_id]
    return found
