"""Asking for the facts that the rules judge: why a group has or has not got a message, or is
behind; and what a filter would do: an expression on trial.

All but two requests are RocketMQ's own, so this works against a Java broker too. Ours besides tell
until when a retry waits (900101) and how many messages match (900131); without them that is not
known. What a broker refuses or a member does not answer is a fact that is missing, not an error.

A SluiceMQ broker tries an expression itself (900132). A trial on a RocketMQ broker reads the
messages here, the newest of each queue.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from sluicemq.client.admin import rules
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
    Copy,
    GroupTrace,
    MessageFacts,
    message_by_id,
    messages_by_id,
    read_range,
    trace,
)
from sluicemq.client.admin.rules import (
    GroupExplained,
    GroupFacts,
    LaneFacts,
    MemberFacts,
    MessageExplained,
)
from sluicemq.client.admin.topics import (
    ask_each,
    committed_offset,
    groups_of_topic,
    masters,
    masters_of_topic,
    offset_by_time,
    offsets,
    queues,
)
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import (
    SUBSCRIPTION_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUCCESS,
    expect_success,
)
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    FilterSyntaxError,
    MessageNotFoundError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
    install_extra,
)
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.message import REAL_TOPIC, StoredMessage
from sluicemq.model.subscription import SQL92, Subscription
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
from sluicemq.wire.codes import ResponseCode

UNSUPPORTED: Final = int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
ROWS_MAX: Final = 1_000_000
PULLED_MAX: Final = 100_000
"""So many messages are read from a RocketMQ broker for a trial, unless more are asked for."""
_NO_MEMBER_CURE: Final = "Leave --group away, or start a member."
Progress = Callable[[int, int], None]
"""Told how many messages were read, of how many."""
MEMBERS_ASKED_MAX: Final = 16
NAME_SERVERS: Final = "PROP_NAMESERVER_ADDR"
"""What every client of remoting says of itself."""
SUBSCRIBERS_ASKED_MAX: Final = 64
SILENT_MAX: Final = 3
"""After so many members that do not answer, each for its time-out, no further one is asked."""
_NO_ANSWER: Final = (RequestError, RequestTimeoutError, ConnectionLostError, ProtocolError)
Brokers = Mapping[str, str]
"""Name and address of each master."""


def explain_message(
    directory: Directory,
    message_id: str,
    *,
    group: str | None = None,
    topic: str | None = None,
    trace_topic: str = TRACE_TOPIC,
    anywhere: bool = True,
) -> Conversation[tuple[MessageFacts, list[MessageExplained]]]:
    """Where a message is stored, and what became of it in a group (None: in each that reads its
    topic), with the causes. `anywhere` as in `message_by_id`. Raises MessageNotFoundError."""
    now_ms = directory.clock.now_ms()
    message = yield from message_by_id(directory, message_id, topic=topic, anywhere=anywhere)
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


def explain_group(directory: Directory, name: str) -> Conversation[GroupExplained]:
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
    members = _without_queues(members) if _pops(contracts) else members
    facts = GroupFacts(
        name, config, members, subscriptions, now_ms=now_ms, queues=queues, routed=routed,
        matching=counts, contracts=contracts,
    )  # fmt: skip
    return rules.explain_group(facts)


def _routed(directory: Directory, topic: str) -> Conversation[frozenset[str] | None]:
    """The brokers from which clients read a topic; None without a route."""
    try:
        route = yield from directory.get_route(topic)
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
) -> Conversation[GroupFacts]:
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
    contracts = yield from _contracts(directory, name)
    if _pops(contracts):  # its offset is known when the log is on disk
        members, committed, fetched = _without_queues(members), fetched, None
    lanes = _lanes(contracts, about.queue)
    copies = yield from _copies(directory, name, message, brokers)
    held = yield from _held(brokers, name, about.queue, message.queue_offset)
    dead = yield from messages_by_id(brokers, DLQ_PREFIX + name, message.message_id, None)
    return GroupFacts(
        name, config, members, subscriptions, committed, fetched, copies, dead, traced, now_ms,
        lanes, held,
    )  # fmt: skip


def _lanes(contracts: Iterable[GroupContract], queue: MessageQueue) -> list[LaneFacts]:
    """Those at a queue's broker, from the oldest on; none of RocketMQ's."""
    found = []
    for lane in [
        lane for known in contracts if known.broker == queue.broker for lane in known.lanes
    ]:
        said = lane["subscriptions"].get(queue.topic)
        wanted = None if said is None else subscribe(queue.topic, said[1], said[0])
        places = {(own["topic"], own["queueId"]): own["offset"] for own in lane["queues"]}
        offset = places.get((queue.topic, queue.queue_id))
        found.append(LaneFacts(lane["lane"], wanted, lane["clientIds"], offset))
    return found


def _pops(contracts: Iterable[GroupContract]) -> bool:
    """Does the group pop? Then any member may get any message, of any queue."""
    return any(known.pops for known in contracts)


def _without_queues(members: Iterable[MemberFacts]) -> list[MemberFacts]:
    return [replace(member, queues=None) for member in members]


def _held(
    brokers: Brokers, name: str, queue: MessageQueue, offset: int
) -> Conversation[bodies.InFlightMessage | None]:
    """The message of the queue, when it is popped."""
    here = {own: address for own, address in brokers.items() if own == queue.broker}
    found = yield from popped(here, name, queue.topic, queue.queue_id, offset)
    return found[0] if found else None


def _contracts(directory: Directory, name: str) -> Conversation[list[GroupContract]]:
    """None where a broker does not tell."""
    try:
        return (yield from contract(directory, name))
    except RequestError:
        return []


def _members(
    name: str, brokers: Brokers, broker: str | None = None
) -> Conversation[tuple[list[MemberFacts], dict[str, Subscription]]]:
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
            info = yield from _running(name, client_id, address)
            if info is not None:
                own_topics = {item.topic: item for item in info.subscriptions}
                # a proxy answers for a client of gRPC, which reads any queue
                queues = info.queues if NAME_SERVERS in info.properties else None
                member = MemberFacts(client_id, own_topics, queues)
        found.append(member)
    return found, subscriptions


# ---------------------------------------------------------------------- who subscribes to what


@dataclass(frozen=True, slots=True)
class GroupSubscriptions:
    """A group's subscriptions by topic. `members`: client id -> what it says itself, None when it
    did not answer; `brokers` the brokers' view; `kept` of a group that is away.

    A broker keeps one subscription for a group and topic, that of the heartbeat that came last;
    what the members themselves say shows whether they agree.
    """

    group: str
    members: Mapping[str, Mapping[str, Subscription] | None] = field(default_factory=dict)
    brokers: Mapping[str, Subscription] = field(default_factory=dict)
    kept: Mapping[str, Subscription] = field(default_factory=dict)

    @property
    def is_online(self) -> bool:
        return bool(self.members)

    @property
    def topics(self) -> frozenset[str]:
        """Subscribed topics, without the group's own retry topic."""
        names = set(self.brokers).union(self.kept, *(said or () for said in self.members.values()))
        return frozenset(name for name in names if not name.startswith(RETRY_PREFIX))

    def said(self, topic: str) -> dict[str, Subscription | None]:
        """Client id -> its subscription of a topic, None when it has none; only those that told."""
        return {
            client_id: own.get(topic) for client_id, own in self.members.items() if own is not None
        }

    def wanted(self, topic: str) -> list[Subscription]:
        """All that anybody says of a topic, each expression once."""
        known = [self.brokers.get(topic), self.kept.get(topic), *self.said(topic).values()]
        found = {(one.kind, one.expression): one for one in known if one is not None}
        return [found[key] for key in sorted(found)]


def subscriptions(
    directory: Directory, group: str, *, brokers: Brokers | None = None
) -> Conversation[GroupSubscriptions]:
    """What a group subscribes to, as masters (all, or `brokers`) and its members say. A member that
    does not answer is not known, never an error."""
    masters_asked = (yield from masters(directory)) if brokers is None else brokers
    clients: dict[str, str] = {}
    known: dict[str, Subscription] = {}
    command = requests.consumer_connections(group=group)
    for _, address, answer in (yield from ask_each(masters_asked, command, absent=None)):
        seen = bodies.decode_consumer_connections(answer.body)
        clients |= {one.client_id: address for one in seen.connections}
        known |= seen.subscriptions
    members: dict[str, Mapping[str, Subscription] | None] = {}
    silent = 0
    for client_id, address in sorted(clients.items()):
        members[client_id] = None
        if len(members) <= SUBSCRIBERS_ASKED_MAX and silent < SILENT_MAX:
            info = yield from _running(group, client_id, address)
            if info is not None:
                members[client_id] = {one.topic: one for one in info.subscriptions}
            silent += info is None
    kept: dict[str, Subscription] = {}
    with contextlib.suppress(*_NO_ANSWER):
        away = [] if members else (yield from matching(directory, group))
        kept = {
            item.topic: Subscription(item.topic, item.expression, item.kind)
            for broker in away
            for item in broker.topics
            if item.expression is not None
        }
    return GroupSubscriptions(group, members, known, kept)


def _running(group: str, client_id: str, address: str) -> Conversation[bodies.RunningInfo | None]:
    """What a member says of itself; None when it does not answer."""
    command = requests.running_info(group=group, client_id=client_id, stack_enable=False)
    with contextlib.suppress(*_NO_ANSWER):
        answer = yield Call(address, command)
        if answer.code == SUCCESS:
            return bodies.decode_running_info(answer.body)
    return None


def _copies(
    directory: Directory, name: str, message: StoredMessage, brokers: Brokers
) -> Conversation[list[Copy]]:
    """Copies that wait, and those in the retry topics."""
    topic, message_id = RETRY_PREFIX + name, message.message_id
    origin = pop_origin(message.topic, name)
    pops = [pop_retry_topic(name, origin, is_v2=it) for it in (False, True)]
    command = requests.list_delayed(topic=topic, key=message_id, cursor=None, count_max=COUNT_MAX)
    due: dict[str, int] = {}
    for broker, _, answer in (yield from ask_each(brokers, command, absent=None)):
        times = [item.due_ms for item in bodies.decode_waiting(answer.body)]
        due |= {broker: max(times)} if times else {}
    arrived: list[StoredMessage] = []
    for retries in (topic, *pops):
        arrived += yield from messages_by_id(brokers, retries, message_id, None)
    found = []
    for copy in arrived:
        offset, held = None, None
        queue = MessageQueue(copy.topic, copy.broker, copy.queue_id)
        with contextlib.suppress(RequestError, RouteNotFoundError):
            offset = yield from committed_offset(directory, name, queue)
        if copy.topic in pops:
            held = yield from _held(brokers, name, queue, copy.queue_offset)
        is_past = offset is not None and offset > copy.queue_offset
        found.append(Copy(copy.reconsume_times, is_past, None, held, copy.topic in pops))
    times_arrived = {copy.reconsume_times for copy in arrived}
    for copy in (yield from messages_by_id(brokers, SCHEDULE_TOPIC, message_id, None)):
        is_ours = copy.properties.get(REAL_TOPIC) == topic
        if is_ours and copy.reconsume_times not in times_arrived:
            found.append(Copy(copy.reconsume_times, False, due.pop(copy.broker, None)))
    newest = max((copy.times for copy in found), default=0)
    found += [Copy(newest + 1, False, time_ms) for time_ms in due.values()]
    return found


# ------------------------------------------------------------------------------------- trials


@dataclass(frozen=True, slots=True)
class BrokerTrial:
    """An expression tried on one broker: `report` is `filter.lab.Report` as a mapping, with the
    match rate and each condition's selectivity. Samples name a queue and an offset; `messages` are
    their properties by both. `stored`: messages in that time, of which `rows` were looked at."""

    broker: str
    stored: int
    report: Mapping[str, Any]
    messages: Mapping[tuple[int, int], Mapping[str, str]]
    is_read_here: bool = False

    @property
    def rows(self) -> int:
        return int(self.report["rows"])


def try_filter(
    directory: Directory,
    topic: str,
    expression: str,
    kind: str | None = SQL92,
    *,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    group: str | None = None,
    count_max: int | None = None,
    progress: Progress | None = None,
) -> Conversation[list[BrokerTrial]]:
    """What an expression would do to messages stored from `begin_ms` to `end_ms`, by broker:
    nothing is consumed. With `group` beside what that one wants now.

    At most `count_max` messages are looked at, the newest of each queue; a RocketMQ broker's
    are read here, and `progress(read, of)` is called. Raises FilterSyntaxError,
    ConfigurationError, RouteNotFoundError.
    """
    wanted = subscribe(topic, expression, kind)
    check_subscription(wanted)
    found = []
    for broker, address in (yield from masters_of_topic(directory, topic)).items():
        command = requests.try_filter(wanted, group, begin_ms, end_ms, count_max or ROWS_MAX)
        answer = yield Call(address, command)
        if answer.code == SUBSCRIPTION_PARSE_FAILED:
            raise FilterSyntaxError(answer.remark or "")
        if answer.code == SUBSCRIPTION_NOT_EXIST:
            raise ConfigurationError(answer.remark or "", fix=_NO_MEMBER_CURE)
        if answer.code != UNSUPPORTED:
            values = orjson.loads(expect_success(answer, address).body)
            messages = {
                (item["queueId"], item["queueOffset"]): item["properties"]
                for item in values["messages"]
            }
            report = _with_shares(values["report"])
            found.append(BrokerTrial(broker, values["stored"], report, messages))
            continue
        against = None
        if group is not None:
            asked = yield Call(address, requests.consumer_connections(group=group))
            if asked.code == SUCCESS:
                against = bodies.decode_consumer_connections(asked.body).subscriptions.get(topic)
            if against is None:
                raise ConfigurationError(
                    f"what the group {group} wants of {topic} is not known: no member is online "
                    "there.",
                    fix=_NO_MEMBER_CURE,
                )
        limit = count_max or PULLED_MAX
        times = begin_ms or 0, end_ms
        trial = _try_here(directory, broker, wanted, against, times, limit, progress)
        found.append((yield from trial))
    return found


def _with_shares(report: dict[str, Any]) -> dict[str, Any]:
    """The shares follow from the counts."""
    report["match_rate"] = report["matched"] / report["rows"] if report["rows"] else 0.0
    for atom in report["atoms"]:
        count = sum(atom[name] for name in ("true", "false", "null", "error"))
        atom["selectivity"] = atom["true"] / count if count else 0.0
    return report


def _try_here(
    directory: Directory,
    broker: str,
    wanted: Subscription,
    against: Subscription | None,
    times: tuple[int, int | None],
    count_max: int,
    progress: Progress | None,
) -> Conversation[BrokerTrial]:
    """Reads the messages from a broker that does not try filters."""
    try:
        from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy only when somebody asks
    except ImportError:
        raise ConfigurationError(
            "a trial on a RocketMQ broker is counted here, and NumPy is missing.",
            fix=install_extra("server"),
        ) from None
    ranges: list[tuple[MessageQueue, int, int]] = []
    begin_ms, end_ms = times
    for queue in (yield from queues(directory, wanted.topic)):
        if queue.broker == broker:
            low, high = yield from offsets(directory, queue)
            if begin_ms:
                low = yield from offset_by_time(directory, queue, begin_ms)
            if end_ms is not None:
                high = yield from offset_by_time(directory, queue, end_ms + 1)
            ranges.append((queue, low, max(low, high)))
    stored = sum(high - low for _, low, high in ranges)
    trial = Trial(wanted, against)
    messages: dict[tuple[int, int], Mapping[str, str]] = {}
    done = 0

    def take(page: list[StoredMessage]) -> bool:
        nonlocal done, messages
        rows, first = [message.properties for message in page], page[0]
        trial.add_rows(rows, first_offset=first.queue_offset, source=first.queue_id)
        messages |= {(m.queue_id, m.queue_offset): m.properties for m in page}
        report = trial.report()  # only what it shows is kept
        samples = [*report.samples, *(cause.sample for cause in report.causes)]
        if report.difference is not None:
            samples += [*report.difference.samples_here, *report.difference.samples_there]
        places = {(int(str(sample.source)), sample.offset) for sample in samples}
        messages = {place: messages[place] for place in places if place in messages}
        done += len(page)
        if progress is not None:
            progress(done, min(stored, count_max))
        return True

    for queue, start, high in ranges:
        low = start if stored <= count_max else high - max((high - start) * count_max // stored, 1)
        yield from read_range(directory, queue, low, high, take)
    report = orjson.loads(orjson.dumps(trial.report(), default=str))
    return BrokerTrial(broker, stored, _with_shares(report), messages, is_read_here=True)
