"""Asking for the facts that the rules judge.

All but two requests are RocketMQ's own, so this works against a Java broker too. Ours besides tell
until when a retry waits (900101) and how many messages match (900131); without them that is not
known. What a broker refuses or a member does not answer is a fact that is missing, not an error.
"""

import contextlib
from collections.abc import Mapping
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import SUCCESS
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.operations import rules
from sluicemq.client.core.operations.filters import matching
from sluicemq.client.core.operations.groups import GroupContract, contract, groups, progress_at
from sluicemq.client.core.operations.messages import (
    COUNT_MAX,
    GroupTrace,
    message_by_id,
    messages_by_id,
    trace,
)
from sluicemq.client.core.operations.rules import (
    Copy,
    GroupExplained,
    GroupFacts,
    LaneFacts,
    MemberFacts,
    MessageExplained,
    MessageFacts,
)
from sluicemq.client.core.operations.topics import (
    ask_each,
    committed_offset,
    groups_of_topic,
    masters,
    offsets,
)
from sluicemq.client.core.talks import Call, Talk
from sluicemq.client.core.tracing import DEFAULT_TRACE_TOPIC
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
)
from sluicemq.wire import bodies

DELAYED_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
MEMBERS_ASKED_MAX: Final = 16
Brokers = Mapping[str, str]
"""Name and address of each master."""


def explain_message(
    directory: Directory,
    message_id: str,
    *,
    group: str | None = None,
    topic: str | None = None,
    trace_topic: str = DEFAULT_TRACE_TOPIC,
) -> Talk[tuple[MessageFacts, list[MessageExplained]]]:
    """Where a message is stored, and what became of it in a group (None: in each that reads its
    topic), with the causes. Raises MessageNotFoundError."""
    now_ms = directory.clock.now_ms()
    message = yield from message_by_id(directory, message_id, topic=topic)
    brokers = yield from masters(directory)
    routed = yield from _routed(directory, message.topic)
    queue = MessageQueue(message.topic, message.broker, message.queue_id)
    low, high = message.queue_offset, message.queue_offset + 1
    if routed is not None and message.broker in routed:
        low, high = yield from offsets(directory, queue)
    about = MessageFacts(message, low, high, routed)
    traced: list[GroupTrace] = []
    with contextlib.suppress(MessageNotFoundError, RouteNotFoundError, RequestError):
        timeline = yield from trace(directory, message.message_id, trace_topic=trace_topic)
        traced = timeline.groups
    configs = yield from groups(directory)
    names = [] if group is None else [group]
    if group is None:
        with contextlib.suppress(RouteNotFoundError, RequestError):
            names = yield from groups_of_topic(directory, message.topic)
    found = []
    for name in names:
        own_trace = next((one for one in traced if one.group == name), None)
        config = configs.get(name)
        facts = GroupFacts(name, None)
        if config is not None:
            facts = yield from _group_facts(directory, config, about, brokers, own_trace, now_ms)
        found.append(rules.explain_message(about, facts))
    return about, found


def explain_group(directory: Directory, name: str) -> Talk[GroupExplained]:
    """Why a group is idle or behind; no findings when it is neither."""
    now_ms = directory.clock.now_ms()
    config = (yield from groups(directory)).get(name)
    if config is None:
        return rules.explain_group(GroupFacts(name, None))
    brokers = yield from masters(directory)
    members, subscriptions = yield from _members(name, brokers)
    queues = yield from progress_at(brokers, name, absent=None)
    routed = {}
    for topic in sorted({item.queue.topic for item in queues} | set(subscriptions)):
        if not topic.startswith(RETRY_PREFIX):
            routed[topic] = yield from _routed(directory, topic)
    counts = yield from matching(directory, name)
    contracts = yield from _contracts(directory, name)
    facts = GroupFacts(
        name, config, members, subscriptions, now_ms=now_ms, queues=queues, routed=routed,
        matching=counts, contracts=contracts,
    )  # fmt: skip
    return rules.explain_group(facts)


def _routed(directory: Directory, topic: str) -> Talk[frozenset[str] | None]:
    """The brokers from which clients read a topic; None without a route."""
    try:
        route = yield from directory.route(topic)
    except RouteNotFoundError:
        return None
    readable = {data.broker for data in route.queues if data.perm & PERM_READ and data.read_queues}
    online = {data.broker for data in route.brokers if MASTER_ID in data.addresses}
    return frozenset(readable & online)


def _group_facts(
    directory: Directory,
    config: GroupConfig,
    about: MessageFacts,
    brokers: Brokers,
    traced: GroupTrace | None,
    now_ms: int,
) -> Talk[GroupFacts]:
    name, message = config.name, about.message
    members, subscriptions = yield from _members(name, brokers, message.broker)
    if message.topic not in subscriptions:
        # Of a group that is away: a broker of ours keeps SQL92 expressions for a day.
        for item in (yield from matching(directory, name, message.topic)):
            for kept in item.topics if item.broker == message.broker else ():
                if kept.expression is not None and message.topic not in subscriptions:
                    expression = Subscription(message.topic, kept.expression, kept.kind)
                    subscriptions[message.topic] = expression
    committed = fetched = None
    address = brokers.get(message.broker)
    if address is not None:
        answer = yield Call(address, requests.offset_of_group(name, about.queue))
        committed = int((answer.fields or {})["offset"]) if answer.code == SUCCESS else None
        here = {message.broker: address}
        for own in (yield from progress_at(here, name, message.topic, absent=None)):
            if own.queue == about.queue:
                fetched = own.fetched
    lanes = []  # at the message's broker, from the oldest on; none of RocketMQ's
    for known in (yield from _contracts(directory, name)):
        for lane in known.lanes if known.broker == message.broker else ():
            said = lane["subscriptions"].get(message.topic)
            wanted = None if said is None else subscribe(message.topic, said[1], said[0])
            places = {(own["topic"], own["queueId"]): own["offset"] for own in lane["queues"]}
            offset = places.get((message.topic, message.queue_id))
            lanes.append(LaneFacts(lane["lane"], wanted, lane["clientIds"], offset))
    copies = yield from _copies(directory, name, message, brokers)
    dead = yield from messages_by_id(brokers, DLQ_PREFIX + name, message.message_id, None)
    return GroupFacts(
        name, config, members, subscriptions, committed, fetched, copies, dead, traced, now_ms,
        lanes,
    )  # fmt: skip


def _contracts(directory: Directory, name: str) -> Talk[list[GroupContract]]:
    """None where a broker does not tell."""
    try:
        return (yield from contract(directory, name))
    except RequestError:
        return []


def _members(
    name: str, brokers: Brokers, broker: str | None = None
) -> Talk[tuple[list[MemberFacts], dict[str, Subscription]]]:
    """Who is online, and what the group subscribes to, as a broker says (or all do)."""
    clients: dict[str, str] = {}
    subscriptions: dict[str, Subscription] = {}
    command = requests.consumer_connections(group=name)
    for own, address, answer in (yield from ask_each(brokers, command, absent=None)):
        connected = bodies.decode_consumer_connections(answer.body)
        clients |= {one.client_id: address for one in connected.connections}
        if broker in (None, own):
            subscriptions |= connected.subscriptions
    found: list[MemberFacts] = []
    for client_id, address in sorted(clients.items()):
        member = MemberFacts(client_id)
        if len(found) < MEMBERS_ASKED_MAX:
            no_answer = (RequestError, RequestTimeoutError, ConnectionLostError, ProtocolError)
            with contextlib.suppress(*no_answer):
                command = requests.running_info(group=name, client_id=client_id, stack_enable=False)
                answer = yield Call(address, command)
                if answer.code == SUCCESS:
                    info = bodies.decode_running_info(answer.body)
                    own_topics = {item.topic: item for item in info.subscriptions}
                    member = MemberFacts(client_id, own_topics, info.queues)
        found.append(member)
    return found, subscriptions


def _copies(
    directory: Directory, name: str, message: StoredMessage, brokers: Brokers
) -> Talk[list[Copy]]:
    """Copies that wait, and those in the retry topic."""
    topic, message_id = RETRY_PREFIX + name, message.message_id
    command = requests.list_delayed(topic=topic, key=message_id, cursor=None, count_max=COUNT_MAX)
    due: dict[str, int] = {}
    for broker, _, answer in (yield from ask_each(brokers, command, absent=None)):
        times = [item.due_ms for item in bodies.decode_waiting(answer.body)]
        due |= {broker: max(times)} if times else {}
    arrived = yield from messages_by_id(brokers, topic, message_id, None)
    found = []
    for copy in arrived:
        offset = None
        with contextlib.suppress(RequestError, RouteNotFoundError):
            queue = MessageQueue(topic, copy.broker, copy.queue_id)
            offset = yield from committed_offset(directory, name, queue)
        is_past = offset is not None and offset > copy.queue_offset
        found.append(Copy(copy.reconsume_times, is_past))
    times_arrived = {copy.reconsume_times for copy in arrived}
    for copy in (yield from messages_by_id(brokers, DELAYED_TOPIC, message_id, None)):
        is_ours = copy.properties.get(REAL_TOPIC) == topic
        if is_ours and copy.reconsume_times not in times_arrived:
            found.append(Copy(copy.reconsume_times, False, due.pop(copy.broker, None)))
    newest = max((copy.times for copy in found), default=0)
    found += [Copy(newest + 1, False, time_ms) for time_ms in due.values()]
    return found
