"""Collect the facts about a group or message that the rules in `diagnose` judge.

Nearly all requests are RocketMQ's own, so this works with RocketMQ brokers, too. SluiceMQ brokers
also report until when a retry is delayed (900101), how many messages match a filter (900131), and
the lanes of a group (900133); from RocketMQ brokers these facts are unknown. A request that a
broker refuses, or that a member does not answer, is a missing fact and not an error.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from sluicemq.client.admin.diagnose.findings import GroupExplained, MessageExplained
from sluicemq.client.admin.diagnose.group_facts import (
    DeliveryFacts,
    GroupFacts,
    LaneFacts,
    MemberFacts,
    MessageFacts,
    RetryFacts,
)
from sluicemq.client.admin.diagnose.group_rules import explain_group as judge_group
from sluicemq.client.admin.diagnose.message_rules import explain_message as judge_message
from sluicemq.client.admin.groups import (
    GroupContract,
    contract,
    groups,
    matching,
    popped,
    progress_at,
)
from sluicemq.client.admin.messages import (
    COUNT_MAX,
    GroupTrace,
    message_by_id,
    messages_by_id,
    trace,
)
from sluicemq.client.admin.subscriptions import Brokers, ask_member, connections_at
from sluicemq.client.admin.topics import (
    ask_each,
    committed_offset,
    groups_of_topic,
    masters,
    offsets,
)
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import SUCCESS
from sluicemq.errors import MessageNotFoundError, RequestError, RouteNotFoundError
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import REAL_TOPIC, StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.system_names import SCHEDULE_TOPIC, TRACE_TOPIC
from sluicemq.model.topic import (
    DLQ_PREFIX,
    MASTER_ID,
    PERM_READ,
    RETRY_PREFIX,
    GroupConfig,
    MessageQueue,
    pop_origin,
    pop_retry_topic,
)
from sluicemq.wire import bodies

MEMBERS_ASKED_MAX: Final = 16


def explain_message(
    directory: Directory,
    message_id: str,
    *,
    group: str | None = None,
    topic: str | None = None,
    trace_topic: str = TRACE_TOPIC,
    anywhere: bool = True,
) -> Conversation[tuple[MessageFacts, list[MessageExplained]]]:
    """Return where a message is stored, and what happened to it in a group, and why.

    If `group` is None, every group that reads the message's topic is explained. `topic` and
    `anywhere` are those of `message_by_id`. Raises MessageNotFoundError if the message does not
    exist.
    """
    now_ms = directory.clock.now_ms()
    message = yield from message_by_id(directory, message_id, topic=topic, anywhere=anywhere)
    brokers = yield from masters(directory)
    readable = yield from _readable_brokers(directory, message.topic)
    queue = MessageQueue(message.topic, message.broker, message.queue_id)
    low = message.queue_offset
    high = message.queue_offset + 1
    if readable is not None and message.broker in readable:
        low, high = yield from offsets(directory, queue)
    about = MessageFacts(message, low, high, readable)

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
        facts = DeliveryFacts(about, GroupFacts(name))
        config = configs.get(name)
        if config is not None:
            own_trace = next((one for one in traced if one.group == name), None)
            facts = yield from _delivery_facts(directory, config, about, brokers, now_ms)
            facts = replace(facts, trace=own_trace)
        found.append(judge_message(facts))
    return about, found


def explain_group(directory: Directory, name: str) -> Conversation[GroupExplained]:
    """Return why a group is idle or behind. The result has no findings if it is neither."""
    now_ms = directory.clock.now_ms()
    config = (yield from groups(directory)).get(name)
    if config is None:
        return judge_group(GroupFacts(name))

    brokers = yield from masters(directory)
    members, subscriptions = yield from _members(name, brokers)
    progress = yield from progress_at(brokers, name, absent=None)
    facts = GroupFacts(name, config, subscriptions=subscriptions, progress=progress, now_ms=now_ms)
    readable = {}
    for topic in facts.topics:
        if not topic.startswith(RETRY_PREFIX):
            readable[topic] = yield from _readable_brokers(directory, topic)
    counts = yield from matching(directory, name)
    contracts = yield from _contracts(directory, name)
    facts = replace(
        facts,
        members=_without_queues(members) if _pops(contracts) else members,
        readable_brokers=readable,
        matching=counts,
        contracts=contracts,
    )
    return judge_group(facts)


def _readable_brokers(directory: Directory, topic: str) -> Conversation[frozenset[str] | None]:
    """Return the brokers from which clients read a topic, None if it has no route."""
    try:
        route = yield from directory.get_route(topic)
    except RouteNotFoundError:
        return None
    readable = {data.broker for data in route.queues if data.perm & PERM_READ and data.read_queues}
    online = {data.broker for data in route.brokers if MASTER_ID in data.addresses}
    return frozenset(readable & online)


def _delivery_facts(
    directory: Directory,
    config: GroupConfig,
    about: MessageFacts,
    brokers: Brokers,
    now_ms: int,
) -> Conversation[DeliveryFacts]:
    """Return what is known of a message in a group that exists, without its traces."""
    name = config.name
    message = about.message
    members, subscriptions = yield from _members(name, brokers, message.broker)
    if message.topic not in subscriptions:
        remembered = yield from _remembered_subscription(directory, name, message)
        if remembered is not None:
            subscriptions[message.topic] = remembered

    committed = fetched = None
    address = brokers.get(message.broker)
    if address is not None:
        answer = yield Call(address, requests.offset_of_group(name, about.queue))
        committed = int((answer.fields or {})["offset"]) if answer.code == SUCCESS else None
        broker = {message.broker: address}
        for item in (yield from progress_at(broker, name, message.topic, absent=None)):
            if item.queue == about.queue:
                fetched = item.fetched
    contracts = yield from _contracts(directory, name)
    if _pops(contracts):
        # A broker commits what is popped only when its checkpoints are on disk.
        members = _without_queues(members)
        committed = fetched
        fetched = None

    retries = yield from _retries(directory, name, message, brokers)
    in_flight = yield from _in_flight(brokers, name, about.queue, message.queue_offset)
    dead = yield from messages_by_id(brokers, DLQ_PREFIX + name, message.message_id, None)
    return DeliveryFacts(
        about,
        GroupFacts(name, config, members, subscriptions, now_ms=now_ms),
        committed=committed,
        fetched=fetched,
        retries=retries,
        dead_letters=dead,
        lanes=_lanes(contracts, about.queue),
        in_flight=in_flight,
    )


def _remembered_subscription(
    directory: Directory, group: str, message: StoredMessage
) -> Conversation[Subscription | None]:
    """Return the subscription that the message's broker remembers, None without one.

    A SluiceMQ broker remembers the SQL92 expressions of a group without members for a day.
    """
    for item in (yield from matching(directory, group, message.topic)):
        for counts in item.topics if item.broker == message.broker else ():
            if counts.expression is not None:
                return Subscription(message.topic, counts.expression, counts.kind)
    return None


def _lanes(contracts: Iterable[GroupContract], queue: MessageQueue) -> list[LaneFacts]:
    """Return the group's lanes at the broker of a queue, from the oldest on.

    RocketMQ brokers have no lanes.
    """
    found = []
    lanes = [lane for one in contracts if one.broker == queue.broker for lane in one.lanes]
    for lane in lanes:
        known = lane["subscriptions"].get(queue.topic)
        subscription = None
        if known is not None:
            kind = known[0]
            expression = known[1]
            subscription = parse_subscription(queue.topic, expression, kind)
        offsets_by_queue = {(own["topic"], own["queueId"]): own["offset"] for own in lane["queues"]}
        offset = offsets_by_queue.get((queue.topic, queue.queue_id))
        found.append(LaneFacts(lane["lane"], subscription, lane["clientIds"], offset))
    return found


def _pops(contracts: Iterable[GroupContract]) -> bool:
    """Return whether the group pops, so that any member may receive messages of any queue."""
    return any(contract.pops for contract in contracts)


def _without_queues(members: Iterable[MemberFacts]) -> list[MemberFacts]:
    return [replace(member, queues=None) for member in members]


def _in_flight(
    brokers: Brokers, name: str, queue: MessageQueue, offset: int
) -> Conversation[bodies.InFlightMessage | None]:
    """Return the delivery of the message at an offset if it is popped and not acknowledged."""
    broker = {own: address for own, address in brokers.items() if own == queue.broker}
    found = yield from popped(broker, name, queue.topic, queue.queue_id, offset)
    return found[0] if found else None


def _contracts(directory: Directory, name: str) -> Conversation[list[GroupContract]]:
    """Return the contracts of a group by broker, none if a broker refuses the request."""
    try:
        return (yield from contract(directory, name))
    except RequestError:
        return []


def _members(
    name: str, brokers: Brokers, broker: str | None = None
) -> Conversation[tuple[list[MemberFacts], dict[str, Subscription]]]:
    """Return the members that are online, and the group's subscriptions by topic.

    The subscriptions are those that `broker` reports; None means all brokers. At most
    `MEMBERS_ASKED_MAX` members are asked about themselves.
    """
    clients, by_broker = yield from connections_at(brokers, name)
    subscriptions: dict[str, Subscription] = {}
    for own_name, own in by_broker.items():
        if broker in (None, own_name):
            subscriptions |= own

    found: list[MemberFacts] = []
    for client_id, address in sorted(clients.items()):
        member = MemberFacts(client_id)
        if len(found) < MEMBERS_ASKED_MAX:
            info = yield from ask_member(name, client_id, address)
            if info is not None:
                member = MemberFacts.from_info(client_id, info)
        found.append(member)
    return found, subscriptions


def _retries(
    directory: Directory, name: str, message: StoredMessage, brokers: Brokers
) -> Conversation[list[RetryFacts]]:
    """Return the copies of a message that wait for a retry, or are in a retry topic already."""
    topic = RETRY_PREFIX + name
    message_id = message.message_id
    origin = pop_origin(message.topic, name)
    pop_topics = [pop_retry_topic(name, origin, is_v2=is_v2) for is_v2 in (False, True)]

    # SluiceMQ brokers report when a delayed copy is due.
    command = requests.list_delayed(topic=topic, key=message_id, cursor=None, count_max=COUNT_MAX)
    due_ms: dict[str, int] = {}
    for broker, _, answer in (yield from ask_each(brokers, command, absent=None)):
        times = [item.due_ms for item in bodies.decode_waiting(answer.body)]
        if times:
            due_ms[broker] = max(times)

    arrived: list[StoredMessage] = []
    for retry_topic in (topic, *pop_topics):
        arrived += yield from messages_by_id(brokers, retry_topic, message_id, None)
    found = []
    for copy in arrived:
        offset = None
        in_flight = None
        queue = MessageQueue(copy.topic, copy.broker, copy.queue_id)
        with contextlib.suppress(RequestError, RouteNotFoundError):
            offset = yield from committed_offset(directory, name, queue)
        is_popped = copy.topic in pop_topics
        if is_popped:
            in_flight = yield from _in_flight(brokers, name, queue, copy.queue_offset)
        is_past = offset is not None and offset > copy.queue_offset
        found.append(
            RetryFacts(copy.reconsume_times, is_past, in_flight=in_flight, is_popped=is_popped)
        )

    times_arrived = {copy.reconsume_times for copy in arrived}
    for copy in (yield from messages_by_id(brokers, SCHEDULE_TOPIC, message_id, None)):
        is_retry = copy.properties.get(REAL_TOPIC) == topic
        if is_retry and copy.reconsume_times not in times_arrived:
            time_ms = due_ms.pop(copy.broker, None)
            found.append(RetryFacts(copy.reconsume_times, False, time_ms))
    newest = max((copy.times for copy in found), default=0)
    found += [RetryFacts(newest + 1, False, time_ms) for time_ms in due_ms.values()]
    return found
