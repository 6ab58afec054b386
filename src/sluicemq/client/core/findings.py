"""Single findings about messages and groups, in words: see `explaining`."""

from collections.abc import Iterable, Sequence
from typing import Final

from sluicemq.client.core.facts import (
    Code,
    Copy,
    Finding,
    GroupFacts,
    GroupState,
    MemberFacts,
    MessageFacts,
    QueueFacts,
)
from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.explain import Explanation, Outcome, deciding, explain
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.tags import is_tag_kind, tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, MessageQueue
from sluicemq.protocol.bodies import QueueState

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
