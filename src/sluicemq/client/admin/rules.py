"""Why a group has or has not got a message, and why it is idle or behind: facts in, findings out.

Pure; `explain` asks. What was asked of brokers and members are facts; what could not be learned is
None and is said, never guessed. Everything here follows from requests that a RocketMQ broker
answers too; what only ours tells (until when a retry waits, how many messages match) makes the
answer sharper.

`SENTENCES` is what a finding says, by code and case. A message's fate in a group is the first that
holds:

    dead        its copy is in the dead letters
    in flight   it is popped, or its copy is, and not acknowledged: by whom, and until when
    retry       a copy of it waits, or is to be consumed again: the n-th time
    filtered    the group's filter does not let it through: the atoms that decide are named
    consumed    the group's offset is past it, and nothing speaks against it
    offline     it is before the group, and no member is there
    waiting     it is before the group, with the reason when there is one
    unknown     there is no such group, or nothing is known of it

Lanes (design/0009): a message goes to the oldest lane that matches it. What a lane
gets from another that is idle is not told by the broker: so a message that some matching lane is
past counts as consumed. A lane is looked at like a group: its members read all queues between them,
from its own offsets. What a broker tells of fetched offsets is the whole group's; so what a lane's
members have in hand is what they say themselves.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import itemgetter
from typing import Any, Final

from sluicemq.client.admin.groups import GroupContract, QueueProgress, TopicMatching
from sluicemq.client.admin.messages import Copy, GroupTrace, MessageFacts
from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.selector import Explanation, Outcome, deciding, explain
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind, tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.wire.bodies import GroupMatching, InFlightMessage, QueueState


class Code(StrEnum):
    """What was found; scripts may rely on these words."""

    NO_SUCH_GROUP = "no-such-group"
    CONSUMING_OFF = "consuming-is-off"
    NO_MEMBER = "no-member"
    UNEQUAL = "unequal-subscription"
    NOT_SUBSCRIBED = "not-subscribed"
    BROKEN_FILTER = "filter-does-not-compile"
    IGNORED_TEXT = "ignored-text"
    FILTER_FALSE = "filter-false"
    FILTER_ERROR = "filter-error"
    MEMBER_IDLE = "member-without-queue"
    QUEUE_IDLE = "queue-without-member"
    OFFSET_PAST = "offset-past-message"
    BEYOND_END = "offset-beyond-end"
    RETRY_PENDING = "retry-pending"
    DEAD_LETTER = "dead-letter"
    NO_ROUTE = "no-route"
    NOT_ACKNOWLEDGING = "not-acknowledging"
    IN_HAND = "in-hand"
    BEHIND = "behind"
    ONLY_FILTERED = "only-filtered-ahead"
    LANE = "lane"
    NO_LANE = "no-lane-matches"
    REFUSED = "refused-by-contract"
    FORGOTTEN = "subscription-forgotten"
    IN_FLIGHT = "in-flight"
    UNDECODABLE = "body-undecodable"


class Fate(StrEnum):
    """What became of a message in a group."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    WAITING = "waiting"
    RETRY = "retry"
    IN_FLIGHT = "in-flight"
    DEAD = "dead"
    OFFLINE = "offline"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact that explains something, and what can be done."""

    code: Code
    what: str
    instead: str = ""


# ------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A member that is online. `subscriptions` by topic and `queues` are what it says itself, None
    when it did not answer."""

    client_id: str
    subscriptions: Mapping[str, Subscription] | None = None
    queues: Mapping[MessageQueue, QueueState] | None = None


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """Members of a group with one subscription, at the broker of a message. `subscription`: to the
    message's topic, None for another topic; `offset` in its queue, None without a place there."""

    lane: str
    subscription: Subscription | None
    members: Sequence[str]
    offset: int | None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group as seen by the broker of a message (or, for a whole group, by all). `config` is None
    when no broker knows it; `subscriptions` are the brokers' view by topic; `committed` and
    `fetched` are of the message's queue, None when there is no such offset; `lanes` from the oldest
    on, none while all members want the same."""

    name: str
    config: GroupConfig | None
    members: Sequence[MemberFacts] = ()
    subscriptions: Mapping[str, Subscription] = field(default_factory=dict)
    committed: int | None = None
    fetched: int | None = None
    copies: Sequence[Copy] = ()
    dead: Sequence[StoredMessage] = ()
    traced: GroupTrace | None = None
    now_ms: int = 0
    lanes: Sequence[LaneFacts] = ()
    held: InFlightMessage | None = None
    """The message is popped."""
    queues: Sequence[QueueProgress] = ()
    """Of a whole group, as what follows."""
    routed: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """Of each topic: the brokers on which clients find it, None without a route."""
    matching: Sequence[TopicMatching] = ()
    """What brokers of ours count."""
    contracts: Sequence[GroupContract] = ()
    """Whom they refuse, and what they had to forget."""


@dataclass(frozen=True, slots=True)
class MessageExplained:
    """What became of a message in one group. `times`: of a retry, how often it has come already.
    `verdict` is the SQL92 filter on it; `owner` the member that reads its queue, "" for none, None
    when not known."""

    group: str
    fate: Fate
    findings: tuple[Finding, ...]
    times: int = 0
    verdict: Explanation | None = None
    owner: str | None = None

    @property
    def cause(self) -> Finding | None:
        """The first finding: the one to look at."""
        return self.findings[0] if self.findings else None


@dataclass(frozen=True, slots=True)
class GroupExplained:
    """Why a group is idle or behind; the first finding weighs most. None: it is up to date."""

    group: str
    findings: tuple[Finding, ...]
    lag: int
    matching: int | None


# --------------------------------------------------------------------------------- the rules

STUCK_MS: Final = 30_000
"""A member that has messages and has finished none for so long does not acknowledge."""

_LANE_WITHOUT_MEMBER: Final = (
    "Start a consumer with that subscription. After half a minute other lanes take over what they "
    "match; the rest waits for a day."
)
SENTENCES: Final[dict[tuple[Code, str], tuple[str, str]]] = {
    (Code.NO_SUCH_GROUP, ""): (
        "No broker knows a group {group}: nobody has consumed as this group.",
        "sluice group list shows those that are there; sluice group create makes one.",
    ),
    (Code.CONSUMING_OFF, ""): (
        "The group {group} may not consume: consumeEnable is false.",
        "Set it with mqadmin updateSubGroup -s true.",
    ),
    (Code.NO_MEMBER, ""): (
        "No member of {group} is online.",
        "Start a consumer; if one runs, its log says why brokers refuse it, or it uses other name "
        "servers.",
    ),
    (Code.UNEQUAL, ""): (
        "Members subscribe {topic} differently: {parts}.",
        "One subscription wins for the whole group on a RocketMQ broker, and messages get lost: "
        "give each subscription a group of its own.",
    ),
    (Code.UNEQUAL, "lanes"): (
        "Members subscribe {topic} differently: {parts}.",
        "Each subscription is a lane, and a message goes to the oldest lane that matches: whoever "
        "wants all of them needs a group of its own.",
    ),
    (Code.NOT_SUBSCRIBED, ""): (
        "The members of {group} do not subscribe {topic}, but {others}.",
        "Subscribe it, or forget the group's offsets there.",
    ),
    (Code.BROKEN_FILTER, ""): (
        "The filter {expression} of {topic} does not compile: pulls are refused.",
        "sluice filter check says why.",
    ),
    (Code.IGNORED_TEXT, ""): (
        "At the end of the filter {expression} of {topic}, {ignored} is ignored.",
        "sluice filter check says why.",
    ),
    (Code.FILTER_FALSE, ""): ("The filter {expression} is {outcome} on it: {atoms}.", ""),
    (Code.FILTER_FALSE, "tags"): (
        "The group wants the tags {expression}, and the tag of the message is {tag}.",
        "",
    ),
    (Code.FILTER_ERROR, ""): (
        "The filter {expression} cannot be evaluated on it: {atoms}.",
        "`sluice filter test` shows how many messages are lost so, and what to write.",
    ),
    (Code.NO_ROUTE, ""): (
        "The name server has no route for {topic}: no consumer finds it.",
        "sluice topic create {topic}, or start its broker.",
    ),
    (Code.NO_ROUTE, "brokers"): (
        "The broker {brokers} has messages of {topic}, and the route does not name it as one to "
        "read from.",
        "Let it register (its log), or give the topic read permission there.",
    ),
    (Code.QUEUE_IDLE, ""): (
        "No member of {group} reads queue {queue.queue_id} of {queue.topic} on {queue.broker}.",
        "Members that just joined take queues within seconds; else look at their logs, and at "
        "client ids that are used twice.",
    ),
    (Code.MEMBER_IDLE, ""): (
        "{client_id} reads no queue; {count} members share what there is.",
        "A queue has one reader: give the topic more queues, or stop members.",
    ),
    (Code.OFFSET_PAST, ""): (
        "The offset of {group} is {committed}, past the message at {offset}; {how}.",
        "sluice group reset sends a group back; sluice message consume has one handled again.",
    ),
    (Code.BEYOND_END, ""): (
        "The committed offset of {group} in queue {queue.queue_id} of {queue.topic} on "
        "{queue.broker} is {committed}, beyond the end of the queue at {end}: the topic was "
        "deleted and created again, or the broker lost messages.",
        "SluiceMQ consumers go back to the beginning of the queue when they read it; other clients "
        "skip what is there: sluice group reset {group} --topic {queue.topic} --to earliest.",
    ),
    (Code.RETRY_PENDING, ""): (
        "A handler of {group} failed on it {times} times (of {times_max}); a copy {when}.",
        "The consumer's log says why it failed.",
    ),
    (Code.RETRY_PENDING, "counted"): (
        "{count} messages on which handlers of {group} failed are to be consumed again.",
        "The consumers' logs say why they failed.",
    ),
    (Code.RETRY_PENDING, "popped"): (
        "{group} popped it {times} times and did not acknowledge it in time; a copy {when}.",
        "The consumer's log says why, or its invisible time is too short.",
    ),
    (Code.IN_FLIGHT, ""): (
        "{who} popped it {since:.0f} s ago, the {times}. time that it came: unless it is "
        "acknowledged, it comes again in {left:.0f} s.",
        "",
    ),
    (Code.IN_FLIGHT, "counted"): (
        "All {lag} messages before the group are popped and not acknowledged.",
        "If they stay: the consumers' logs say why they do not finish.",
    ),
    (Code.DEAD_LETTER, ""): (
        "{group} gave it up after {times} retries: it is in {topic}.",
        "Mend the handler, then consume {topic} or send it again.",
    ),
    (Code.NOT_ACKNOWLEDGING, ""): (
        "{fetched}{since}.",
        "Its handler does not return, or it never acknowledges what it took: sluice consumer stack "
        "shows where it is.",
    ),
    (Code.BEHIND, ""): ("{count} messages of its queue come before it; {reader}.", ""),
    (Code.BEHIND, "group"): (
        "{lag} messages are before the group{matching}; its members consume.",
        "If that grows: more queues and members, or faster handlers.",
    ),
    (Code.ONLY_FILTERED, ""): (
        "All {lag} messages before the group are ones that its filters drop.",
        "Nothing is missing.",
    ),
    (Code.UNDECODABLE, ""): ("Its body cannot be decoded: {reason}.", "{cure}"),
    (Code.NO_LANE, ""): (
        "None of the {count} lanes of {group} matches it: {lanes}.",
        "Nobody is given it. A consumer of the group whose subscription matches would be.",
    ),
}


def _finding(code: Code, case: str = "", /, **values: Any) -> Finding:
    what, fix = SENTENCES[code, case]
    return Finding(code, what.format(**values), fix.format(**values))


# -------------------------------------------------------------------------- what a filter says


def verdict_on(
    message: StoredMessage, wanted: Subscription | None
) -> tuple[Explanation | None, Finding | None]:
    """The verdict of the group's filter, and the finding when it drops the message."""
    if wanted is None or wanted.is_everything:
        return None, None
    expression = wanted.expression
    if is_tag_kind(wanted.kind):
        if not wanted.tags or tag_matches(wanted, message.tag):
            return None, None
        tag = f"'{message.tag}'" if message.tag else "absent"
        return None, _finding(Code.FILTER_FALSE, "tags", expression=expression, tag=tag)
    if broken := _broken(wanted):
        return None, broken
    verdict = explain(compile_sql92(expression), message.properties)
    if verdict.matches:
        return verdict, None
    atoms = "; ".join(shown_atom(atom) for atom in deciding(verdict))
    code = Code.FILTER_ERROR if verdict.outcome is Outcome.ERROR else Code.FILTER_FALSE
    outcome = verdict.outcome.value
    return verdict, _finding(code, expression=expression, outcome=outcome, atoms=atoms)


def shown_atom(atom: Explanation) -> str:
    """An atom with what it saw: `price > 30 is false (price is '7', a String)`."""
    sides = []
    for one in atom.operands:
        if one.value is None:
            sides.append(f"{one.text} is absent")
        elif not isinstance(one.value, str):
            sides += [f"{one.text} is {one.value}"] if one.text != str(one.value) else []
        elif one.text != "'" + one.value.replace("'", "''") + "'":
            sides.append(f"{one.text} is '{one.value}', a String")
    why = atom.error.rstrip(".") or ", ".join(sides)
    return f"{atom.text} is {atom.outcome.value}" + (f" ({why})" if why else "")


def _broken(wanted: Subscription) -> Finding | None:
    if is_tag_kind(wanted.kind):
        return None
    try:
        compile_sql92(wanted.expression)
    except FilterSyntaxError:
        return _finding(Code.BROKEN_FILTER, expression=wanted.expression, topic=wanted.topic)
    return None


def _ignored_text(wanted: Subscription | None) -> Iterator[Finding]:
    """What of a filter a consumer of RocketMQ's wrote in vain."""
    if wanted is None or is_tag_kind(wanted.kind) or _broken(wanted):
        return
    expression = wanted.expression
    if ignored := compile_sql92(expression).ignored:
        yield _finding(
            Code.IGNORED_TEXT, expression=expression, topic=wanted.topic, ignored=ignored
        )


# ---------------------------------------------------------------- members, queues, routes, hands


def owner_of(queue: MessageQueue, members: Sequence[MemberFacts]) -> str | None:
    """The member that reads a queue; "" for none, None when a member does not tell its queues."""
    for member in members:
        state = (member.queues or {}).get(queue)
        if state is not None and not state.dropped:
            return member.client_id
    return None if any(member.queues is None for member in members) else ""


def _unequal(group: GroupFacts, topic: str, *, lanes: bool = False) -> Iterator[Finding]:
    """Members that say different things; one that does not subscribe the topic at all is one."""
    ids: dict[str, list[str]] = {}
    for member in group.members:
        if member.subscriptions is not None:
            wanted = member.subscriptions.get(topic)
            text = "nothing" if wanted is None else wanted.expression
            ids.setdefault(text, []).append(member.client_id)
    if len(ids) > 1:
        parts = "; ".join(f"{', '.join(own)}: {text}" for text, own in sorted(ids.items()))
        yield _finding(Code.UNEQUAL, "lanes" if lanes else "", topic=topic, parts=parts)


def _not_subscribed(group: GroupFacts, topic: str) -> Finding:
    others = ", ".join(sorted(n for n in group.subscriptions if not n.startswith(RETRY_PREFIX)))
    return _finding(Code.NOT_SUBSCRIBED, group=group.name, topic=topic, others=others or "nothing")


def _no_route(
    topic: str, brokers: Iterable[str], routed: frozenset[str] | None
) -> Iterator[Finding]:
    if routed is None:
        yield _finding(Code.NO_ROUTE, topic=topic)
    elif missing := sorted(set(brokers) - routed):
        yield _finding(Code.NO_ROUTE, "brokers", topic=topic, brokers=", ".join(missing))


def _idle_members(group: GroupFacts) -> Iterator[Finding]:
    for member in group.members:
        if member.queues is not None and all(
            queue.topic.startswith(RETRY_PREFIX) for queue in member.queues
        ):
            yield _finding(Code.MEMBER_IDLE, client_id=member.client_id, count=len(group.members))


def _unacknowledged(group: GroupFacts, item: QueueProgress, owner: str | None) -> Finding:
    """Fetched and not committed: just in hand, or stuck."""
    queue = item.queue
    state = next((m.queues[queue] for m in group.members if m.queues and queue in m.queues), None)
    fetched = (
        f"{owner or 'a member'} has fetched queue {queue.queue_id} of {queue.topic} on "
        f"{queue.broker} up to {item.fetched}, and the group has acknowledged up to "
        f"{item.committed}"
    )
    since = ""
    if state is not None and state.last_consume_ms <= 0:
        since = "; it has finished none yet"
    elif state is not None and group.now_ms:
        quiet_ms = max(0, group.now_ms - state.last_consume_ms)
        if quiet_ms < STUCK_MS:
            finished = f"; it finished a message {quiet_ms // 1000} s ago."
            return Finding(Code.IN_HAND, fetched + finished)
        since = f"; it has finished none for {quiet_ms // 1000} s"
    return _finding(Code.NOT_ACKNOWLEDGING, fetched=fetched, since=since)


def _stuck(group: GroupFacts, queues: Iterable[QueueProgress]) -> Iterator[Finding]:
    """Queues of which messages were fetched and none is acknowledged."""
    for item in queues:
        is_popped = item.in_flight > 0  # it comes again when its time is over
        if item.lag and not is_popped and (item.fetched or 0) > item.committed:
            owner = owner_of(item.queue, group.members)
            finding = _unacknowledged(group, item, owner)
            if finding.code is Code.NOT_ACKNOWLEDGING and owner != "":
                yield finding


# ----------------------------------------------------------------------------------- a message


def explain_message(about: MessageFacts, group: GroupFacts) -> MessageExplained:
    """The fate of a message in a group, with its causes. A body that cannot be decoded is said
    behind them: it may be why a handler fails."""
    found = _explain_message(about, group)
    error = about.message.body_error
    if error is None:
        return found
    undecodable = _finding(Code.UNDECODABLE, reason=error.reason, fix=error.fix)
    return replace(found, findings=(*found.findings, undecodable))


def _explain_message(about: MessageFacts, group: GroupFacts) -> MessageExplained:
    if group.config is None:
        no_group = _finding(Code.NO_SUCH_GROUP, group=group.name)
        return MessageExplained(group.name, Fate.UNKNOWN, (no_group,))
    topic = about.message.topic
    if group.lanes:
        return _explain_in_lanes(about, group)
    owner = owner_of(about.queue, group.members)
    wanted = group.subscriptions.get(topic)
    verdict, filtering = verdict_on(about.message, wanted)
    common = [*_ignored_text(wanted), *_unequal(group, topic)]
    fate, times, found = _fate(about, group, owner, filtering)
    return MessageExplained(group.name, fate, (*found, *common), times, verdict, owner)


def _fate(
    about: MessageFacts, group: GroupFacts, owner: str | None, filtering: Finding | None
) -> tuple[Fate, int, list[Finding]]:
    if group.dead:
        times = max(message.reconsume_times for message in group.dead)
        topic = DLQ_PREFIX + group.name
        dead = _finding(Code.DEAD_LETTER, group=group.name, times=times, topic=topic)
        return Fate.DEAD, times, [dead]
    last = max(group.copies, key=lambda copy: copy.times, default=None)
    held = group.held if last is None else last.held
    if held is not None:
        flying = _finding(
            Code.IN_FLIGHT, who=held.client_id or "a client, before the broker's start,",
            since=(group.now_ms - held.popped_ms) / 1000, times=held.times,
            left=max(held.visible_ms - group.now_ms, 0) / 1000,
        )  # fmt: skip
        return Fate.IN_FLIGHT, held.times, [flying]
    if last is not None and not last.is_past:
        when = "waits in the retry topic"
        if last.due_ms is not None:
            when = f"comes again in {max((last.due_ms - group.now_ms) / 1000, 0):.0f} s"
        times_max = group.config.retry_times_max if group.config is not None else 16
        pending = _finding(
            Code.RETRY_PENDING, "popped" if last.is_popped else "", group=group.name,
            times=last.times, times_max=times_max, when=when,
        )  # fmt: skip
        return Fate.RETRY, last.times, [pending]
    if last is not None or (group.traced is not None and group.traced.consumed):
        return Fate.CONSUMED, last.times if last is not None else 0, []
    if filtering is not None and filtering.code is not Code.BROKEN_FILTER:
        return Fate.FILTERED, 0, [filtering]
    offset = about.message.queue_offset
    beyond = _beyond_end(group, about.queue, group.committed, about.offset_max)
    if group.committed is not None and group.committed > offset and not beyond:
        how = (
            "no trace tells whether it was handled: it was, or the group began or was sent "
            "behind it, or another filter dropped it then"
        )
        if group.traced is not None and group.traced.deliveries:
            how = f"its traces tell {', '.join(group.traced.results)}"
        past = _finding(
            Code.OFFSET_PAST, group=group.name, committed=group.committed, offset=offset, how=how
        )
        return Fate.CONSUMED, 0, [past]
    found = [*beyond] if filtering is None else [*beyond, filtering]
    fate = Fate.WAITING if group.members else Fate.OFFLINE
    found += _hindrances(about, group, owner)
    if not found:
        count = max(0, offset - max(group.committed or 0, about.offset_min))
        unknown = "which member reads its queue is not known"
        reads = unknown if owner is None else f"{owner} reads it"
        found.append(_finding(Code.BEHIND, count=count, reader=reads))
    return fate, 0, found


def _beyond_end(
    group: GroupFacts, queue: MessageQueue, committed: int | None, end: int
) -> list[Finding]:
    """The finding for a committed offset beyond the end of its queue."""
    if committed is None or committed <= end:
        return []
    return [_finding(Code.BEYOND_END, group=group.name, queue=queue, committed=committed, end=end)]


def _hindrances(about: MessageFacts, group: GroupFacts, owner: str | None) -> Iterator[Finding]:
    """The message is before the group: why has it not come?"""
    message = about.message
    if group.config is not None and not group.config.consume_enable:
        yield _finding(Code.CONSUMING_OFF, group=group.name)
    yield from _no_route(message.topic, [message.broker], about.routed)
    if not group.members:
        yield _finding(Code.NO_MEMBER, group=group.name)
        return
    if message.topic not in group.subscriptions:
        yield _not_subscribed(group, message.topic)
    if owner == "":
        yield _finding(Code.QUEUE_IDLE, group=group.name, queue=about.queue)
        yield from _idle_members(group)
    elif group.fetched is not None and group.fetched > message.queue_offset:
        committed, end = group.committed or 0, about.offset_max
        item = QueueProgress(about.queue, committed, end, fetched=group.fetched)
        yield _unacknowledged(group, item, owner)


def _explain_in_lanes(about: MessageFacts, group: GroupFacts) -> MessageExplained:
    """By the lane it belongs to: that one's members, expression and offset."""
    offset = about.message.queue_offset
    verdicts = {lane.lane: verdict_on(about.message, lane.subscription) for lane in group.lanes}
    matching = [
        lane
        for lane in group.lanes
        if lane.subscription is not None and verdicts[lane.lane][1] is None
    ]
    past = (lane for lane in matching if (lane.offset or 0) > offset)
    lane = next(past, matching[0] if matching else None)
    common = list(_unequal(group, about.message.topic, lanes=True))
    if lane is None:
        fate, times, found = _fate(about, replace(group, committed=None), None, None)
        if fate in {Fate.WAITING, Fate.OFFLINE}:
            lanes = "; ".join(map(_lane_text, group.lanes))
            no_lane = _finding(Code.NO_LANE, group=group.name, count=len(group.lanes), lanes=lanes)
            reasons = ((one.lane, verdicts[one.lane][1]) for one in group.lanes)
            whys = [replace(why, what=f"Lane {name}: {why.what}") for name, why in reasons if why]
            fate, found = Fate.FILTERED, [no_lane, *whys]
        return MessageExplained(group.name, fate, (*found, *common), times)
    own = replace(
        group,
        members=[member for member in group.members if member.client_id in lane.members],
        subscriptions={} if lane.subscription is None else {about.message.topic: lane.subscription},
        committed=lane.offset,
        fetched=None,  # a broker tells it for the whole group only
    )
    owner = owner_of(about.queue, own.members)
    verdict, filtering = verdicts[lane.lane]
    fate, times, found = _fate(about, own, owner, filtering)
    if not lane.members and fate is Fate.OFFLINE:
        found = []  # the group may have members: the lane says what is missing
    place = "has no offset in its queue" if lane.offset is None else f"is at {lane.offset}"
    in_lane = Finding(
        Code.LANE,
        f"{group.name} has {len(group.lanes)} lanes; the message at {offset} belongs to "
        f"{_lane_text(lane)}, which {place} and has {', '.join(lane.members) or 'no member'}.",
        "" if lane.members else _LANE_WITHOUT_MEMBER,
    )
    found.insert(0 if not found else 1, in_lane)
    common = [*_ignored_text(lane.subscription), *common]
    return MessageExplained(group.name, fate, (*found, *common), times, verdict, owner)


def _lane_text(lane: LaneFacts) -> str:
    wanted = lane.subscription
    text = "another topic" if wanted is None else f"{wanted.topic}: {wanted.expression}"
    return f"lane {lane.lane} ({text})"


# ------------------------------------------------------------------------------- a whole group


def explain_group(group: GroupFacts) -> GroupExplained:
    """Why a group is idle or behind."""
    lag = sum(item.lag for item in group.queues)
    filters = [(one.broker, topic) for one in group.matching for topic in one.topics]
    own = [(broker, one) for broker, one in filters if not one.topic.startswith(RETRY_PREFIX)]
    counts = [queue.matching for _, one in own for queue in one.queues]
    matching = sum(count or 0 for count in counts) if counts and None not in counts else None
    if group.config is None:
        no_group = _finding(Code.NO_SUCH_GROUP, group=group.name)
        return GroupExplained(group.name, (no_group,), lag, matching)
    laned = {one.topic for _, one in filters if one.lanes}
    found = []
    if not group.config.consume_enable:
        found.append(_finding(Code.CONSUMING_OFF, group=group.name))
    if not group.members:
        found.append(_finding(Code.NO_MEMBER, group=group.name))
    for topic in sorted({*group.subscriptions, *(item.queue.topic for item in group.queues)}):
        found += _of_topic(group, topic, is_laned=topic in laned)
    if all(member.queues is not None for member in group.members):
        found += _idle_members(group)
    found += _stuck(group, [item for item in group.queues if item.queue.topic not in laned])
    for broker, counted in own:
        found += _of_lanes(group, broker, counted)
    for known in group.contracts:
        found += [
            Finding(Code.REFUSED, f"{known.broker} refuses {client_id}: {why}")
            for client_id, why in known.refused.items()
        ]
        found += [
            Finding(
                Code.FORGOTTEN,
                f"{known.broker} forgot the subscription {gone['subscription']}, which had no "
                f"member, because {gone['why']}; at most {gone['messagesMax']:,} messages waited.",
            )
            for gone in known.forgotten
        ]
    found += [
        Finding(
            Code.FILTER_ERROR,
            f"The filter {one.expression} failed on {sum(one.errors.values())} messages of "
            f"{one.topic} on {broker}, which were dropped; mostly: "
            f"{max(one.errors.items(), key=itemgetter(1))[0]}.",
            "sluice filter test shows what to write instead.",
        )
        for broker, one in filters
        if any(one.errors.values())
    ]
    if lag and not found:
        of_them = "" if matching is None else f", of which {matching} get through its filters"
        case = (Code.BEHIND, "group") if matching != 0 else (Code.ONLY_FILTERED, "")
        if lag == sum(item.in_flight for item in group.queues):
            case = Code.IN_FLIGHT, "counted"
        found.append(_finding(*case, lag=lag, matching=of_them))
    return GroupExplained(group.name, tuple(found), lag, matching)


def _of_topic(group: GroupFacts, topic: str, *, is_laned: bool) -> Iterator[Finding]:
    own = [item for item in group.queues if item.queue.topic == topic]
    if topic.startswith(RETRY_PREFIX):
        if waiting := sum(item.lag - item.in_flight for item in own):
            yield _finding(Code.RETRY_PENDING, "counted", group=group.name, count=waiting)
        return
    yield from _unequal(group, topic, lanes=is_laned)
    wanted = group.subscriptions.get(topic)
    if wanted is None and group.members:
        yield _not_subscribed(group, topic)
    elif wanted is not None and (broken := _broken(wanted)):
        yield broken
    yield from _ignored_text(wanted)
    routed = group.routed.get(topic)
    yield from _no_route(topic, {item.queue.broker for item in own}, routed)
    for item in own:
        yield from _beyond_end(group, item.queue, item.committed, item.offset_max)
    if is_laned or not group.members:  # every lane has readers of its own
        return
    for item in own:
        is_idle = owner_of(item.queue, group.members) == ""
        if is_idle and item.queue.broker in (routed or ()):
            yield _finding(Code.QUEUE_IDLE, group=group.name, queue=item.queue)


def _of_lanes(facts: GroupFacts, broker: str, counted: GroupMatching) -> Iterator[Finding]:
    """What each lane still has to get of a topic; queues that none of its members reads, members
    that have messages and finish none. Nothing of these while a member does not tell its queues."""
    topic = counted.topic
    for lane in counted.lanes:
        count = sum(queue.matching or 0 for queue in lane.queues)
        if not count:
            continue
        readers = f"{', '.join(lane.client_ids)} read" if lane.client_ids else "has no member"
        yield Finding(
            Code.LANE,
            f"{count} messages of {topic} on {broker} wait for lane {lane.lane} "
            f"({lane.expression}), which {readers}.",
            "" if lane.client_ids else _LANE_WITHOUT_MEMBER,
        )
        members = [one for one in facts.members if one.client_id in lane.client_ids]
        if not members or any(one.queues is None for one in members):
            continue
        group = replace(facts, name=f"lane {lane.lane}", members=members)
        queues = []
        for one in lane.queues:
            queue = MessageQueue(topic, broker, one.queue_id)
            if one.matching and owner_of(queue, members) == "":
                yield _finding(Code.QUEUE_IDLE, group=group.name, queue=queue)
            held = [m.queues[queue] for m in members if m.queues and queue in m.queues]
            ends = (own.cached_max + 1 for own in held if own.cached_count)
            fetched = max(ends, default=None)
            committed = max(0, one.committed)
            queues.append(QueueProgress(queue, committed, one.offset_max, fetched=fetched))
        yield from _stuck(group, queues)
