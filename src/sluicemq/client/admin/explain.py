"""Collect the facts about a group or message that the rules in `diagnose` judge.

Nearly all requests are RocketMQ's own, so this works with RocketMQ brokers, too. SluiceMQ brokers
also report until when a retry is delayed (900101), how many messages match a filter (900131), and
the lanes of a group (900133); from RocketMQ brokers these facts are unknown. A request that a
broker refuses, or that a member does not answer, is a missing fact and not an error.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

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
from sluicemq.client.admin.messages import COUNT_MAX, message_by_id, messages_by_id
from sluicemq.client.admin.subscriptions import Brokers, ask_member, connections_at
from sluicemq.client.admin.topics import (
    ask_each,
    committed_offset,
    groups_of_topic,
    masters,
    offsets,
)
from sluicemq.client.admin.traces import GroupTrace, trace
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
    """Return where a message is stored, and what happened to it in each consumer group, and why.

    Returns (facts about the message, one explanation per group). `group` limits this to one group;
    None means every group that reads the message's topic. `topic` is where to search for the
    message; None means all topics if `anywhere` is True. `trace_topic` is the topic with the traces
    of clients.

    Raises MessageNotFoundError if the message does not exist.
    """
    now_ms = directory.clock.now_ms()
    message = yield from message_by_id(directory, message_id, topic=topic, anywhere=anywhere)
    brokers = yield from masters(directory)
    message_facts = yield from _collect_message_facts(directory, message)
    traces = yield from _fetch_traces(directory, message, trace_topic)
    configs = yield from groups(directory)
    names = [] if group is None else [group]
    if group is None:
        with contextlib.suppress(RouteNotFoundError, RequestError):
            names = yield from groups_of_topic(directory, message.topic)
    explained = []
    for name in names:
        facts = DeliveryFacts(message_facts, GroupFacts(name))
        config = configs.get(name)
        if config is not None:
            facts = yield from _collect_delivery_facts(
                directory, config, message_facts, brokers, now_ms
            )
            facts = replace(facts, trace=traces.get(name))
        explained.append(judge_message(facts))
    return message_facts, explained


def _collect_message_facts(
    directory: Directory, message: StoredMessage
) -> Conversation[MessageFacts]:
    """Return the message, its readable brokers, and the offset range of its queue.

    If consumers cannot read the broker of the queue, the range contains only the message itself.
    """
    readable_brokers = yield from _find_readable_brokers(directory, message.topic)
    offset_min = message.queue_offset
    offset_max = message.queue_offset + 1
    if readable_brokers is not None and message.broker in readable_brokers:
        queue = MessageQueue(message.topic, message.broker, message.queue_id)
        offset_min, offset_max = yield from offsets(directory, queue)
    return MessageFacts(message, offset_min, offset_max, readable_brokers)


def _fetch_traces(
    directory: Directory, message: StoredMessage, trace_topic: str
) -> Conversation[dict[str, GroupTrace]]:
    """Return group -> what clients have traced of the message there, {} if nothing was traced."""
    with contextlib.suppress(MessageNotFoundError, RouteNotFoundError, RequestError):
        timeline = yield from trace(directory, message.message_id, trace_topic=trace_topic)
        return {group_trace.group: group_trace for group_trace in timeline.groups}
    return {}


def explain_group(directory: Directory, name: str) -> Conversation[GroupExplained]:
    """Return the findings that explain why a group is idle or behind.

    There are no findings if the group is neither. An unknown group gives the finding that no broker
    knows it.
    """
    now_ms = directory.clock.now_ms()
    configs = yield from groups(directory)
    config = configs.get(name)
    if config is None:
        return judge_group(GroupFacts(name))

    brokers = yield from masters(directory)
    members, subscriptions = yield from _ask_members(name, brokers)
    progress = yield from progress_at(brokers, name, ignored_codes=None)
    facts = GroupFacts(name, config, subscriptions=subscriptions, progress=progress, now_ms=now_ms)
    readable = {}
    for topic in facts.topics:
        if not topic.startswith(RETRY_PREFIX):
            readable[topic] = yield from _find_readable_brokers(directory, topic)
    counts = yield from matching(directory, name)
    contracts = yield from _fetch_contracts(directory, name)
    if _is_popping(contracts):
        members = _forget_queues(members)
    facts = replace(
        facts,
        members=members,
        readable_brokers=readable,
        matching=counts,
        contracts=contracts,
    )
    return judge_group(facts)


def _find_readable_brokers(directory: Directory, topic: str) -> Conversation[frozenset[str] | None]:
    """Return the names of the brokers from which clients read a topic, None if it has no route.

    Such a broker has a master, and queues of the topic that may be read.
    """
    try:
        route = yield from directory.get_route(topic)
    except RouteNotFoundError:
        return None
    with_readable_queues = {
        queue_data.broker
        for queue_data in route.queues
        if queue_data.perm & PERM_READ and queue_data.read_queues
    }
    with_master = {
        broker_data.broker for broker_data in route.brokers if MASTER_ID in broker_data.addresses
    }
    return frozenset(with_readable_queues & with_master)


def _collect_delivery_facts(
    directory: Directory,
    config: GroupConfig,
    message_facts: MessageFacts,
    brokers: Brokers,
    now_ms: int,
) -> Conversation[DeliveryFacts]:
    """Collect what brokers and members know about a message in one group, except its traces.

    `config` is the configuration of the group, so it exists. `brokers` maps broker names to
    addresses.
    """
    name = config.name
    message = message_facts.message
    queue = message_facts.queue
    members, subscriptions = yield from _ask_members(name, brokers, message.broker)
    if message.topic not in subscriptions:
        remembered = yield from _find_remembered_subscription(directory, name, message)
        if remembered is not None:
            subscriptions[message.topic] = remembered

    committed, fetched = yield from _fetch_offsets(brokers, name, queue)
    contracts = yield from _fetch_contracts(directory, name)
    if _is_popping(contracts):
        # Members that pop have no queues of their own. The broker commits an offset only when its
        # checkpoints are on disk, so the fetched offset tells the progress.
        members = _forget_queues(members)
        committed = fetched
        fetched = None

    retries = yield from _collect_retries(directory, name, message, brokers)
    in_flight = yield from _find_delivery(brokers, name, queue, message.queue_offset)
    dead_letters = yield from messages_by_id(brokers, DLQ_PREFIX + name, message.message_id, None)
    return DeliveryFacts(
        message_facts,
        GroupFacts(name, config, members, subscriptions, now_ms=now_ms),
        committed=committed,
        fetched=fetched,
        retries=retries,
        dead_letters=dead_letters,
        lanes=_collect_lanes(contracts, queue),
        in_flight=in_flight,
    )


def _fetch_offsets(
    brokers: Brokers, name: str, queue: MessageQueue
) -> Conversation[tuple[int | None, int | None]]:
    """Return (committed offset, offset up to which members have fetched) for a group in a queue.

    `brokers` maps names to addresses. An offset is None if the broker does not know it, or if the
    queue's broker is not in `brokers`.
    """
    address = brokers.get(queue.broker)
    if address is None:
        return None, None
    committed = None
    answer = yield Call(address, requests.offset_of_group(name, queue))
    if answer.code == SUCCESS:
        committed = int((answer.fields or {})["offset"])
    fetched = None
    broker = {queue.broker: address}
    for progress in (yield from progress_at(broker, name, queue.topic, ignored_codes=None)):
        if progress.queue == queue:
            fetched = progress.fetched
    return committed, fetched


def _find_remembered_subscription(
    directory: Directory, group: str, message: StoredMessage
) -> Conversation[Subscription | None]:
    """Return the subscription of a group without members, None if the broker does not remember it.

    A SluiceMQ broker remembers the SQL92 expressions of a group for a day after its last member
    left. Only the broker that stores the message is considered.
    """
    for broker_counts in (yield from matching(directory, group, message.topic)):
        if broker_counts.broker != message.broker:
            continue
        for counts in broker_counts.topics:
            if counts.expression is not None:
                return Subscription(message.topic, counts.expression, counts.kind)
    return None


def _collect_lanes(contracts: Iterable[GroupContract], queue: MessageQueue) -> list[LaneFacts]:
    """Return the lanes of a group at the broker of `queue`, the oldest lane first.

    A lane is a subgroup of members with the same filter, with offsets of its own. RocketMQ brokers
    have no lanes, so the result is empty there.
    """
    lanes = []
    for group_contract in contracts:
        if group_contract.broker == queue.broker:
            lanes += [_make_lane_facts(lane, queue) for lane in group_contract.lanes]
    return lanes


def _make_lane_facts(lane: Mapping[str, Any], queue: MessageQueue) -> LaneFacts:
    """Return the facts about one lane of a group in the topic of `queue`.

    A lane is a subgroup of members with the same filter; `lane` describes it as the broker does.
    The subscription is None if the lane does not subscribe to the topic, and the offset None if it
    has none in the queue.
    """
    subscription = None
    kind_and_expression = lane["subscriptions"].get(queue.topic)
    if kind_and_expression is not None:
        expression_kind, expression = kind_and_expression[:2]
        subscription = parse_subscription(queue.topic, expression, expression_kind)
    offset = None
    for lane_queue in lane["queues"]:
        if lane_queue["topic"] == queue.topic and lane_queue["queueId"] == queue.queue_id:
            offset = lane_queue["offset"]
    return LaneFacts(lane["lane"], subscription, lane["clientIds"], offset)


def _is_popping(contracts: Iterable[GroupContract]) -> bool:
    """Return whether the group pops, so that any member may receive messages of any queue."""
    return any(contract.pops for contract in contracts)


def _forget_queues(members: Iterable[MemberFacts]) -> list[MemberFacts]:
    """Return the members of a group that pops as if their queues were unknown."""
    return [replace(member, queues=None) for member in members]


def _find_delivery(
    brokers: Brokers, name: str, queue: MessageQueue, offset: int
) -> Conversation[bodies.InFlightMessage | None]:
    """Return the delivery of a message that is popped and not acknowledged yet, None without one.

    The message is the one at `offset` in `queue`. The result is also None if the broker of the
    queue is not in `brokers`, which maps names to addresses.
    """
    if queue.broker not in brokers:
        return None
    broker = {queue.broker: brokers[queue.broker]}
    deliveries = yield from popped(broker, name, queue.topic, queue.queue_id, offset)
    return deliveries[0] if deliveries else None


def _fetch_contracts(directory: Directory, name: str) -> Conversation[list[GroupContract]]:
    """Return the contract of a group at each broker; [] if a broker refuses the request."""
    try:
        return (yield from contract(directory, name))
    except RequestError:
        return []


def _ask_members(
    name: str, brokers: Brokers, broker: str | None = None
) -> Conversation[tuple[list[MemberFacts], dict[str, Subscription]]]:
    """Return the members that are online, and topic -> subscription of the group.

    `brokers` maps names to addresses. Each member is asked for a report about itself, up to
    `MEMBERS_ASKED_MAX` of them. The subscriptions are those that the broker called `broker`
    reports; None means all brokers.
    """
    clients, subscriptions_by_broker = yield from connections_at(brokers, name)
    subscriptions: dict[str, Subscription] = {}
    for broker_name, subscriptions_at_broker in subscriptions_by_broker.items():
        if broker in (None, broker_name):
            subscriptions |= subscriptions_at_broker

    members: list[MemberFacts] = []
    for client_id, address in sorted(clients.items()):
        member = MemberFacts(client_id)
        if len(members) < MEMBERS_ASKED_MAX:
            running_info = yield from ask_member(name, client_id, address)
            if running_info is not None:
                member = MemberFacts.from_info(client_id, running_info)
        members.append(member)
    return members, subscriptions


def _collect_retries(
    directory: Directory, name: str, message: StoredMessage, brokers: Brokers
) -> Conversation[list[RetryFacts]]:
    """Return the copies of a message that were made to retry it in the group `name`.

    A copy waits for its time, or it is in a retry topic of the group already. A `RetryFacts` of a
    waiting copy has the time at which the copy is due, if a broker knows it.
    """
    topic = RETRY_PREFIX + name
    message_id = message.message_id
    origin = pop_origin(message.topic, name)
    pop_topics = [pop_retry_topic(name, origin, is_v2=is_v2) for is_v2 in (False, True)]
    due_ms_by_broker = yield from _fetch_due_times(brokers, topic, message_id)

    # Copies that are in a retry topic already.
    arrived: list[StoredMessage] = []
    for retry_topic in (topic, *pop_topics):
        arrived += yield from messages_by_id(brokers, retry_topic, message_id, None)
    retries = []
    for copy in arrived:
        is_popped = copy.topic in pop_topics
        retry = yield from _describe_arrived_retry(
            directory, name, copy, brokers, is_popped=is_popped
        )
        retries.append(retry)

    # Copies that wait in the schedule topic. It also contains the ones that have arrived.
    arrived_times = {copy.reconsume_times for copy in arrived}
    for copy in (yield from messages_by_id(brokers, SCHEDULE_TOPIC, message_id, None)):
        is_retry = copy.properties.get(REAL_TOPIC) == topic
        if is_retry and copy.reconsume_times not in arrived_times:
            due_ms = due_ms_by_broker.pop(copy.broker, None)
            retries.append(RetryFacts(copy.reconsume_times, False, due_ms))

    # Copies that only the brokers' lists of delayed messages contain.
    next_times = max((retry.times for retry in retries), default=0) + 1
    retries += [RetryFacts(next_times, False, due_ms) for due_ms in due_ms_by_broker.values()]
    return retries


def _fetch_due_times(
    brokers: Brokers, retry_topic: str, message_id: str
) -> Conversation[dict[str, int]]:
    """Return broker name -> time in ms when the last delayed copy of a message is due there.

    A copy is made to retry the message. Brokers without one are left out, and so are RocketMQ
    brokers, which do not report it.
    """
    command = requests.list_delayed(
        topic=retry_topic, key=message_id, cursor=None, count_max=COUNT_MAX
    )
    due_ms_by_broker = {}
    for broker, _, answer in (yield from ask_each(brokers, command, ignored_codes=None)):
        copies = bodies.decode_waiting(answer.body)
        if copies:
            due_ms_by_broker[broker] = max(copy.due_ms for copy in copies)
    return due_ms_by_broker


def _describe_arrived_retry(
    directory: Directory, name: str, copy: StoredMessage, brokers: Brokers, *, is_popped: bool
) -> Conversation[RetryFacts]:
    """Return whether the group `name` has passed a copy of a message that is in a retry topic.

    The copy is passed if the group's committed offset is beyond it. `is_popped` is True if members
    pop from this retry topic; then the result also has the delivery that is not acknowledged yet.
    """
    queue = MessageQueue(copy.topic, copy.broker, copy.queue_id)
    committed = None
    with contextlib.suppress(RequestError, RouteNotFoundError):
        committed = yield from committed_offset(directory, name, queue)
    in_flight = None
    if is_popped:
        in_flight = yield from _find_delivery(brokers, name, queue, copy.queue_offset)
    is_past = committed is not None and committed > copy.queue_offset
    return RetryFacts(copy.reconsume_times, is_past, in_flight=in_flight, is_popped=is_popped)
