"""Single findings about messages and groups, in words: see `explaining`.

What the lanes of a group explain (docs/design/0009-lanes.md).

A message goes to the oldest lane that matches it. What a lane gets from another that is idle is
not told by the broker: so a message that some matching lane is past counts as consumed.

A lane is looked at like a group: its members read all queues between them, from its own offsets.
What a broker tells of fetched offsets is the whole group's; so what a lane's members have in hand
is what they say themselves.

Why a group has or has not got a message, and why it is idle or behind: facts in, findings out.

Pure. What was asked of brokers and members are facts; what could not be learned is None and is
said, never guessed. Everything here follows from requests that a RocketMQ broker answers too; what
only ours tells (until when a retry waits, how many messages match) makes the answer sharper.

A message's fate in a group:

    dead        its copy is in the dead letters
    retry       a copy of it waits, or is to be consumed again: the n-th time
    filtered    the group's filter does not let it through: the atoms that decide are named
    consumed    the group's offset is past it, and nothing speaks against it
    offline     it is before the group, and no member is there
    waiting     it is before the group, with the reason when there is one
    unknown     there is no such group, or nothing is known of it
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from sluicemq.client.core.explanations.facts import (
    Code,
    Copy,
    Fate,
    Finding,
    GroupExplained,
    GroupFacts,
    GroupState,
    LaneFacts,
    MemberFacts,
    MessageExplained,
    MessageFacts,
    QueueFacts,
)
from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.explain import Explanation, Outcome, deciding, explain
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.subscriptions import is_tag_kind, tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, MessageQueue
from sluicemq.wire.bodies import LaneMatching, QueueState

STUCK_MS: Final = 30_000
"""A member that has messages and has finished none for so long does not acknowledge."""


# -------------------------------------------------------------------------- what a filter says


def verdict_on(
    message: StoredMessage, said: Subscription | None
) -> tuple[Explanation | None, Finding | None]:
    """The verdict of the group's filter, and the finding when it drops the message."""
    if said is None or said.is_everything:
        return None, None
    if is_tag_kind(said.kind):
        wanted = said.tags and not tag_matches(said, message.tag)
        return None, _wrong_tag(message, said) if wanted else None
    if not compiles(said):
        return None, broken(said)
    verdict = explain(compile_sql92(said.expression), message.properties)
    if verdict.matches:
        return verdict, None
    atoms = "; ".join(shown_atom(atom) for atom in deciding(verdict))
    if verdict.outcome is Outcome.ERROR:
        what = f"The filter {said.expression} cannot be evaluated on it: {atoms}."
        cure = "`sluice filter test` shows how many messages are lost so, and what to write."
        return verdict, Finding(Code.FILTER_ERROR, what, cure)
    what = f"The filter {said.expression} is {verdict.outcome.value} on it: {atoms}."
    return verdict, Finding(Code.FILTER_FALSE, what)


def shown_atom(atom: Explanation) -> str:
    """An atom with what it saw: `price > 30 is false (price is '7', a String)`."""
    sides = ", ".join(
        f"{one.text} is {_value(one.value)}"
        for one in atom.operands
        if one.value is None or one.text != _literal(one.value)
    )
    why = atom.error.rstrip(".") or sides
    return f"{atom.text} is {atom.outcome.value}" + (f" ({why})" if why else "")


def _value(value: float | str | bool | None) -> str:
    if value is None:
        return "absent"
    return f"'{value}', a String" if isinstance(value, str) else str(value)


def _literal(value: float | str | bool) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def compiles(said: Subscription) -> bool:
    if is_tag_kind(said.kind):
        return True
    try:
        compile_sql92(said.expression)
    except FilterSyntaxError:
        return False
    return True


def ignored_text(said: Subscription | None) -> list[Finding]:
    """What of a filter a consumer of RocketMQ's wrote in vain."""
    if said is None or is_tag_kind(said.kind) or not compiles(said):
        return []
    ignored = compile_sql92(said.expression).ignored
    what = f"At the end of the filter {said.expression} of {said.topic}, {ignored} is ignored."
    return [Finding(Code.IGNORED_TEXT, what, "sluice filter check says why.")] if ignored else []


def _wrong_tag(message: StoredMessage, said: Subscription) -> Finding:
    tag = f"'{message.tag}'" if message.tag else "absent"
    return Finding(
        Code.FILTER_FALSE,
        f"The group wants the tags {said.expression}, and the tag of the message is {tag}.",
    )


def broken(said: Subscription) -> Finding:
    return Finding(
        Code.BROKEN_FILTER,
        f"The filter {said.expression} of {said.topic} does not compile: pulls are refused.",
        "sluice filter check says why.",
    )


# ---------------------------------------------------------------------------- single findings


def owner_of(queue: MessageQueue, members: Iterable[MemberFacts]) -> str | None:
    """The member that reads a queue; "" for none, None when a member does not tell its queues."""
    members = list(members)
    for member in members:
        state = (member.queues or {}).get(queue)
        if state is not None and not state.dropped:
            return member.client_id
    return None if any(member.queues is None for member in members) else ""


def matching_of(state: GroupState) -> int | None:
    """Messages before the group that its filters let through; None when a broker does not tell."""
    counts = [
        queue.matching
        for _, topic in state.matching
        if not topic.topic.startswith(RETRY_PREFIX)
        for queue in topic.queues
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def no_such_group(name: str) -> Finding:
    return Finding(
        Code.NO_SUCH_GROUP,
        f"No broker knows a group {name}: nobody has consumed as this group.",
        "sluice group list shows those that are there; sluice group create makes one.",
    )


def consuming_off(name: str) -> Finding:
    return Finding(
        Code.CONSUMING_OFF,
        f"The group {name} may not consume: consumeEnable is false.",
        "Set it with mqadmin updateSubGroup -s true.",
    )


def no_member(name: str) -> Finding:
    return Finding(
        Code.NO_MEMBER,
        f"No member of {name} is online.",
        "Start a consumer; if one runs, its log says why brokers refuse it, or it uses other name "
        "servers.",
    )


def unequal(members: Iterable[MemberFacts], topic: str, *, lanes: bool = False) -> list[Finding]:
    """Members that say different things; one that does not subscribe the topic at all is one."""
    told: dict[str, list[str]] = {}
    for member in members:
        if member.subscriptions is not None:
            said = member.subscriptions.get(topic)
            text = "nothing" if said is None else said.expression
            told.setdefault(text, []).append(member.client_id)
    if len(told) < 2:
        return []
    parts = "; ".join(f"{', '.join(ids)}: {text}" for text, ids in sorted(told.items()))
    what = f"Members subscribe {topic} differently: {parts}."
    return [Finding(Code.UNEQUAL, what, _CURE_LANES if lanes else _CURE_UNEQUAL)]


_CURE_UNEQUAL: Final = (
    "One subscription wins for the whole group on a RocketMQ broker, and messages get lost: "
    "give each subscription a group of its own."
)
_CURE_LANES: Final = (
    "Each subscription is a lane, and a message goes to the oldest lane that matches: whoever "
    "wants all of them needs a group of its own."
)


def not_subscribed(group: GroupFacts, topic: str) -> Finding:
    names = ", ".join(sorted(n for n in group.subscriptions if not n.startswith(RETRY_PREFIX)))
    return Finding(
        Code.NOT_SUBSCRIBED,
        f"The members of {group.name} do not subscribe {topic}, but {names or 'nothing'}.",
        "Subscribe it, or forget the group's offsets there.",
    )


def no_route(topic: str, brokers: Iterable[str], routed: frozenset[str] | None) -> list[Finding]:
    if routed is None:
        what = f"The name server has no route for {topic}: no consumer finds it."
        return [Finding(Code.NO_ROUTE, what, f"sluice topic create {topic}, or start its broker.")]
    missing = sorted(set(brokers) - routed)
    if not missing:
        return []
    what = (
        f"The broker {', '.join(missing)} has messages of {topic}, and the route does not name it "
        "as one to read from."
    )
    cure = "Let it register (its log), or give the topic read permission there."
    return [Finding(Code.NO_ROUTE, what, cure)]


def queue_idle(queue: MessageQueue, group: GroupFacts) -> Finding:
    return Finding(
        Code.QUEUE_IDLE,
        f"No member of {group.name} reads queue {queue.queue_id} of {queue.topic} on "
        f"{queue.broker}.",
        "Members that just joined take queues within seconds; else look at their logs, and at "
        "client ids that are used twice.",
    )


def idle_members(members: Sequence[MemberFacts]) -> list[Finding]:
    idle = [
        member.client_id
        for member in members
        if member.queues is not None
        and all(queue.topic.startswith(RETRY_PREFIX) for queue in member.queues)
    ]
    return [
        Finding(
            Code.MEMBER_IDLE,
            f"{client_id} reads no queue; {len(members)} members share what there is.",
            "A queue has one reader: give the topic more queues, or stop members.",
        )
        for client_id in idle
    ]


def offset_past(about: MessageFacts, group: GroupFacts) -> Finding:
    traced = group.traced
    if traced is not None and traced.deliveries:
        how = f"its traces tell {', '.join(traced.results)}"
    else:
        how = (
            "no trace tells whether it was handled: it was, or the group began or was sent "
            "behind it, or another filter dropped it then"
        )
    return Finding(
        Code.OFFSET_PAST,
        f"The offset of {group.name} is {group.committed}, past the message at "
        f"{about.message.queue_offset}; {how}.",
        "sluice group reset sends a group back; sluice message consume has one handled again.",
    )


def retry_pending(group: GroupFacts, copy: Copy) -> Finding:
    left_s = (copy.due_ms - group.now_ms) / 1000 if copy.due_ms is not None else None
    when = (
        f"comes again in {max(left_s, 0):.0f} s" if left_s is not None
        else "waits in the retry topic"
    )  # fmt: skip
    times_max = group.config.retry_times_max if group.config is not None else 16
    return Finding(
        Code.RETRY_PENDING,
        f"A handler of {group.name} failed on it {copy.times} times (of {times_max}); a copy "
        f"{when}.",
        "The consumer's log says why it failed.",
    )


def retries_before(name: str, count: int) -> Finding:
    return Finding(
        Code.RETRY_PENDING,
        f"{count} messages on which handlers of {name} failed are to be consumed again.",
        "The consumers' logs say why they failed.",
    )


def dead(group: GroupFacts, times: int) -> Finding:
    return Finding(
        Code.DEAD_LETTER,
        f"{group.name} gave it up after {times} retries: it is in {DLQ_PREFIX}{group.name}.",
        f"Mend the handler, then consume {DLQ_PREFIX}{group.name} or send it again.",
    )


def unacknowledged(
    queue: MessageQueue, group: GroupFacts, owner: str | None, fetched: int
) -> Finding:
    """Fetched and not committed: just in hand, or stuck."""
    state = next(
        (m.queues[queue] for m in group.members if m.queues is not None and queue in m.queues), None
    )
    quiet_ms = _quiet_ms(state, group.now_ms)
    reader = owner or "a member"
    what = (
        f"{reader} has fetched queue {queue.queue_id} of {queue.topic} on {queue.broker} up to "
        f"{fetched}, and the group has acknowledged up to {group.committed or 0}"
    )
    if quiet_ms is not None and quiet_ms < STUCK_MS:
        return Finding(Code.IN_HAND, f"{what}; it finished a message {quiet_ms // 1000} s ago.")
    since = "" if quiet_ms is None else f"; it has finished none for {quiet_ms // 1000} s"
    if state is not None and state.last_consume_ms <= 0:
        since = "; it has finished none yet"
    return Finding(Code.NOT_ACKNOWLEDGING, f"{what}{since}.", _CURE_STUCK)


_CURE_STUCK: Final = (
    "Its handler does not return, or it never acknowledges what it took: sluice consumer stack "
    "shows where it is."
)


def _quiet_ms(state: QueueState | None, now_ms: int) -> int | None:
    if state is None or not now_ms or state.last_consume_ms <= 0:
        return None
    return max(0, now_ms - state.last_consume_ms)


def stuck(group: GroupFacts, queues: Iterable[QueueFacts]) -> list[Finding]:
    """Queues of which messages were fetched and none is acknowledged."""
    found = []
    for item in queues:
        if item.lag and item.fetched is not None and item.fetched > item.committed:
            owner = owner_of(item.queue, group.members)
            here = GroupFacts(
                group.name, group.config, group.members, committed=item.committed,
                now_ms=group.now_ms,
            )  # fmt: skip
            finding = unacknowledged(item.queue, here, owner, item.fetched)
            if finding.code is Code.NOT_ACKNOWLEDGING and owner != "":
                found.append(finding)
    return found


def failures(state: GroupState) -> list[Finding]:
    """Filters that failed on messages, as brokers of ours count."""
    found = []
    for broker, topic in state.matching:
        if count := sum(topic.errors.values()):
            reason = max(topic.errors, key=lambda name: topic.errors[name])
            what = (
                f"The filter {topic.expression} failed on {count} messages of {topic.topic} on "
                f"{broker}, which were dropped; mostly: {reason}."
            )
            cure = "sluice filter test shows what to write instead."
            found.append(Finding(Code.FILTER_ERROR, what, cure))
    return found


def ahead(about: MessageFacts, group: GroupFacts, owner: str | None) -> Finding:
    begin = max(group.committed or 0, about.offset_min)
    count = max(0, about.message.queue_offset - begin)
    reader = "which member reads its queue is not known" if owner is None else f"{owner} reads it"
    return Finding(Code.BEHIND, f"{count} messages of its queue come before it; {reader}.")


def behind(state: GroupState, lag: int, matching: int | None) -> Finding:
    if matching == 0:
        what = f"All {lag} messages before the group are ones that its filters drop."
        return Finding(Code.ONLY_FILTERED, what, "Nothing is missing.")
    of_them = "" if matching is None else f", of which {matching} get through its filters"
    what = f"{lag} messages are before the group{of_them}; its members consume."
    return Finding(Code.BEHIND, what, "If that grows: more queues and members, or faster handlers.")


def lane_of(about: MessageFacts, group: GroupFacts) -> LaneFacts | None:
    """The lane that the message belongs to; None when no lane matches it."""
    wanted = [lane for lane in group.lanes if _wants(about, lane)]
    past = (lane for lane in wanted if (lane.offset or 0) > about.message.queue_offset)
    return next(past, wanted[0] if wanted else None)


def _wants(about: MessageFacts, lane: LaneFacts) -> bool:
    said = lane.subscription
    return said is not None and verdict_on(about.message, said)[1] is None


def as_lane(group: GroupFacts, lane: LaneFacts) -> GroupFacts:
    """The group as its lane sees it: its own members, subscription and offset."""
    said = lane.subscription
    return replace(
        group,
        members=[member for member in group.members if member.client_id in lane.members],
        subscriptions={} if said is None else {said.topic: said},
        committed=lane.offset,
        fetched=None,  # a broker tells it for the whole group only
    )


def in_lane(about: MessageFacts, group: GroupFacts, lane: LaneFacts) -> Finding:
    """Whose it is."""
    members = ", ".join(lane.members) or "no member"
    place = "has no offset in its queue" if lane.offset is None else f"is at {lane.offset}"
    cure = "" if lane.members else _CURE_NO_MEMBER
    return Finding(
        Code.LANE,
        f"{group.name} has {len(group.lanes)} lanes; the message at {about.message.queue_offset} "
        f"belongs to {_named(lane)}, which {place} and has {members}.",
        cure,
    )


_CURE_NO_MEMBER = (
    "Start a consumer with that subscription. After half a minute other lanes take over what they "
    "match; the rest waits for a day."
)


def no_lane(about: MessageFacts, group: GroupFacts) -> list[Finding]:
    """No member wants it: said once, and of each lane why."""
    names = "; ".join(_named(lane) for lane in group.lanes)
    what = f"None of the {len(group.lanes)} lanes of {group.name} matches it: {names}."
    cure = "Nobody is given it. A consumer of the group whose subscription matches would be."
    found = [Finding(Code.NO_LANE, what, cure)]
    for lane in group.lanes:
        why = verdict_on(about.message, lane.subscription)[1]
        if why is not None:
            found.append(replace(why, what=f"Lane {lane.lane}: {why.what}"))
    return found


def _named(lane: LaneFacts) -> str:
    said = lane.subscription
    text = "another topic" if said is None else f"{said.topic}: {said.expression}"
    return f"lane {lane.lane} ({text})"


# ------------------------------------------------------------------------------- whole groups


def laned_topics(state: GroupState) -> frozenset[str]:
    """The topics on which some broker has lanes of this group."""
    return frozenset(topic.topic for _, topic in state.matching if topic.lanes)


def behind_in_lanes(state: GroupState) -> list[Finding]:
    """What each lane still has to get, and what keeps it from that."""
    found: list[Finding] = []
    for broker, counted in state.matching:
        for lane in counted.lanes if not counted.topic.startswith(RETRY_PREFIX) else ():
            waiting = sum(queue.matching or 0 for queue in lane.queues)
            if waiting:
                found.append(_waiting(counted.topic, broker, lane, waiting))
                found += _of_members(state, counted.topic, broker, lane)
    return found


def _waiting(topic: str, broker: str, lane: LaneMatching, count: int) -> Finding:
    where = f"{count} messages of {topic} on {broker} wait for lane {lane.lane} ({lane.expression})"
    if lane.client_ids:
        return Finding(Code.LANE, f"{where}, which {', '.join(lane.client_ids)} read.")
    return Finding(Code.LANE, f"{where}, which has no member.", _CURE_NO_MEMBER)


def _of_members(
    state: GroupState, topic: str, broker: str, lane: LaneMatching
) -> Iterator[Finding]:
    """Queues that none of a lane's members reads, and members that have messages and finish none.
    Nothing while a member does not tell what it reads."""
    members = [one for one in state.facts.members if one.client_id in lane.client_ids]
    if not members or any(one.queues is None for one in members):
        return
    group = replace(state.facts, name=f"lane {lane.lane}", members=members)
    queues = []
    for one in lane.queues:
        queue = MessageQueue(topic, broker, one.queue_id)
        if one.matching and owner_of(queue, members) == "":
            yield queue_idle(queue, group)
        held = [m.queues[queue] for m in members if m.queues and queue in m.queues]
        fetched = max((own.cached_max + 1 for own in held if own.cached_count), default=None)
        queues.append(QueueFacts(queue, max(0, one.committed), one.offset_max, fetched))
    yield from stuck(group, queues)


def by_contract(state: GroupState) -> Iterator[Finding]:
    """Clients that a strict group refuses, and what brokers no longer remember of who left."""
    for told in state.contracts:
        for client_id, why in told.refused.items():
            yield Finding(Code.REFUSED, f"{told.broker} refuses {client_id}: {why}")
        for said in told.forgotten:
            yield Finding(
                Code.FORGOTTEN,
                f"{told.broker} forgot the subscription {said['subscription']}, which had no "
                f"member, because {said['why']}; at most {said['messagesMax']:,} messages waited.",
            )


def explain_message(about: MessageFacts, group: GroupFacts) -> MessageExplained:
    """The fate of a message in a group, with its causes."""
    if group.config is None:
        return MessageExplained(group.name, Fate.UNKNOWN, (no_such_group(group.name),))
    topic = about.message.topic
    if group.lanes:
        return _explain_in_lanes(about, group)
    owner = owner_of(about.queue, group.members)
    said = group.subscriptions.get(topic)
    verdict, filtering = verdict_on(about.message, said)
    common = [*ignored_text(said), *unequal(group.members, topic)]
    fate, times, found = _fate(about, group, owner, filtering)
    return MessageExplained(group.name, fate, (*found, *common), times, verdict, owner)


def _explain_in_lanes(about: MessageFacts, group: GroupFacts) -> MessageExplained:
    """By the lane it belongs to: that one's members, expression and offset."""
    lane = lane_of(about, group)
    common = unequal(group.members, about.message.topic, lanes=True)
    if lane is None:
        fate, times, found = _fate(about, replace(group, committed=None), None, None)
        if fate in {Fate.WAITING, Fate.OFFLINE}:
            fate, found = Fate.FILTERED, no_lane(about, group)
        return MessageExplained(group.name, fate, (*found, *common), times)
    common = [*ignored_text(lane.subscription), *common]
    own = as_lane(group, lane)
    owner = owner_of(about.queue, own.members)
    verdict, filtering = verdict_on(about.message, lane.subscription)
    fate, times, found = _fate(about, own, owner, filtering)
    if not lane.members and fate is Fate.OFFLINE:
        found = []  # the group may have members: the lane says what is missing
    found.insert(0 if not found else 1, in_lane(about, group, lane))
    return MessageExplained(group.name, fate, (*found, *common), times, verdict, owner)


def _fate(
    about: MessageFacts, group: GroupFacts, owner: str | None, filtering: Finding | None
) -> tuple[Fate, int, list[Finding]]:
    if group.dead:
        times = max(message.reconsume_times for message in group.dead)
        return Fate.DEAD, times, [dead(group, times)]
    last = max(group.copies, key=lambda copy: copy.times, default=None)
    if last is not None and not last.is_past:
        return Fate.RETRY, last.times, [retry_pending(group, last)]
    if last is not None or (group.traced is not None and group.traced.consumed):
        return Fate.CONSUMED, last.times if last is not None else 0, []
    if filtering is not None and filtering.code is not Code.BROKEN_FILTER:
        return Fate.FILTERED, 0, [filtering]
    offset = about.message.queue_offset
    if group.committed is not None and group.committed > offset:
        return Fate.CONSUMED, 0, [offset_past(about, group)]
    blocking = [] if filtering is None else [filtering]
    return (*_before(about, group, owner, blocking),)


def _before(
    about: MessageFacts, group: GroupFacts, owner: str | None, found: list[Finding]
) -> tuple[Fate, int, list[Finding]]:
    """The message is before the group: why has it not come?"""
    topic, broker = about.message.topic, about.message.broker
    if group.config is not None and not group.config.consume_enable:
        found.append(consuming_off(group.name))
    found += no_route(topic, [broker], about.routed)
    if not group.members:
        found.append(no_member(group.name))
        return Fate.OFFLINE, 0, found
    if topic not in group.subscriptions:
        found.append(not_subscribed(group, topic))
    if owner == "":
        found += [queue_idle(about.queue, group), *idle_members(group.members)]
    elif group.fetched is not None and group.fetched > about.message.queue_offset:
        found.append(unacknowledged(about.queue, group, owner, group.fetched))
    if not found:
        found.append(ahead(about, group, owner))
    return Fate.WAITING, 0, found


def explain_group(state: GroupState) -> GroupExplained:
    """Why a group is idle or behind."""
    group = state.facts
    lag = sum(item.lag for item in state.queues)
    matching = matching_of(state)
    if group.config is None:
        return GroupExplained(group.name, (no_such_group(group.name),), lag, matching)
    found: list[Finding] = []
    if not group.config.consume_enable:
        found.append(consuming_off(group.name))
    if not group.members:
        found.append(no_member(group.name))
    for topic in sorted({*group.subscriptions, *(item.queue.topic for item in state.queues)}):
        found += _of_topic(state, topic)
    if all(member.queues is not None for member in group.members):
        found += idle_members(group.members)
    laned = laned_topics(state)
    found += stuck(group, [item for item in state.queues if item.queue.topic not in laned])
    found += behind_in_lanes(state)
    found += by_contract(state)
    found += failures(state)
    if lag and not found:
        found.append(behind(state, lag, matching))
    return GroupExplained(group.name, tuple(found), lag, matching)


def _of_topic(state: GroupState, topic: str) -> list[Finding]:
    group = state.facts
    own = [item for item in state.queues if item.queue.topic == topic]
    if topic.startswith(RETRY_PREFIX):
        waiting = sum(item.lag for item in own)
        return [retries_before(group.name, waiting)] if waiting else []
    is_laned = topic in laned_topics(state)
    found = unequal(group.members, topic, lanes=is_laned)
    said = group.subscriptions.get(topic)
    if said is None and group.members:
        found.append(not_subscribed(group, topic))
    elif said is not None and not compiles(said):
        found.append(broken(said))
    found += ignored_text(said)
    brokers = {item.queue.broker for item in own}
    found += no_route(topic, brokers, state.routed.get(topic))
    if is_laned:  # every lane has readers of its own
        return found
    if group.members and all(member.queues is not None for member in group.members):
        idle = [item.queue for item in own if owner_of(item.queue, group.members) == ""]
        routed = state.routed.get(topic) or frozenset()
        found += [queue_idle(queue, group) for queue in idle if queue.broker in routed]
    return found
