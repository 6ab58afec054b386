"""Facts in, findings out: what is not known is not guessed, and the first finding is the one that
matters."""

import dataclasses

import pytest

from sluicemq.client.admin.diagnose.findings import Code, Fate, MessageExplained
from sluicemq.client.admin.diagnose.group_facts import (
    DeliveryFacts,
    GroupFacts,
    LaneFacts,
    MemberFacts,
    MessageFacts,
    RetryFacts,
)
from sluicemq.client.admin.diagnose.group_rules import explain_group
from sluicemq.client.admin.diagnose.message_rules import explain_message
from sluicemq.client.admin.groups import QueueProgress, TopicMatching
from sluicemq.client.admin.traces import GroupTrace
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.wire.bodies import (
    GroupMatching,
    InFlightMessage,
    LaneMatching,
    QueueMatching,
    QueueState,
)

QUEUE = MessageQueue("T", "b", 0)
HELD = InFlightMessage("T", 0, 5, 998_000, 1_003_000, "c1", 2)
HOST = Host("127.0.0.1", 10911)
NOW_MS = 1_000_000
SQL = Subscription("T", "price > 30 AND region = 'hz'", "SQL92")


def about(offset: int = 5, routed: frozenset[str] | None = frozenset({"b"}), **properties: str):
    message = StoredMessage(
        "T", 0, offset, 2, 3, b"x", properties, 0, 0, 4, HOST, 5, HOST, 0, 0, 0, "b"
    )
    return MessageFacts(message, 0, 10, routed)


def member(name: str = "c1", said: Subscription | None = None, **state: int) -> MemberFacts:
    said = said or parse_subscription("T")
    return MemberFacts(name, {said.topic: said}, {QUEUE: QueueState(0, **state)})


GROUP_FIELDS = {field.name for field in dataclasses.fields(GroupFacts)}


def group(**changes: object) -> GroupFacts:
    plain = GroupFacts(
        "G", GroupConfig("G"), (member(),), {"T": parse_subscription("T")}, now_ms=NOW_MS
    )
    return dataclasses.replace(plain, **changes)


def delivery(message: MessageFacts | None = None, **changes: object) -> DeliveryFacts:
    """Facts about a message in the group; `changes` of both."""
    of_group = {name: changes.pop(name) for name in [*changes] if name in GROUP_FIELDS}
    facts = DeliveryFacts(message or about(), group(**of_group), committed=0)
    return dataclasses.replace(facts, **changes)


def whole(facts: GroupFacts, queue: QueueProgress, *matching: GroupMatching) -> GroupFacts:
    """What is asked of a whole group; its topic is found at the broker."""
    counts = [TopicMatching("b", matching)] if matching else []
    readable = {"T": frozenset({"b"})}
    return dataclasses.replace(facts, progress=[queue], readable_brokers=readable, matching=counts)


def explained(message: MessageFacts | None = None, **changes: object) -> MessageExplained:
    return explain_message(delivery(message, **changes))


def told(message: MessageFacts | None = None, **changes: object):
    found = explained(message, **changes)
    return found.fate, [finding.code for finding in found.findings]


def test_a_message_behind_others_waits() -> None:
    found = explained(about(), committed=2)
    assert found.fate is Fate.WAITING
    assert found.cause is not None
    assert found.cause.what == "3 messages of its queue come before it; c1 reads it."


def test_what_members_do_not_tell_is_not_guessed() -> None:
    members = (MemberFacts("c1"),)
    found = explained(members=members)
    assert found.owner is None
    assert found.cause is not None
    assert "which member reads its queue is unknown" in found.cause.what
    state = whole(group(members=members), QueueProgress(QUEUE, 0, 10))
    assert [finding.code for finding in explain_group(state).findings] == [Code.BEHIND]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dead_letters": [about().message]}, (Fate.DEAD, [Code.DEAD_LETTER])),
        ({"retries": [RetryFacts(2, False)]}, (Fate.RETRY, [Code.RETRY_PENDING])),
        ({"retries": [RetryFacts(1, True), RetryFacts(2, False)]},
         (Fate.RETRY, [Code.RETRY_PENDING])),
        ({"retries": [RetryFacts(1, True)]}, (Fate.CONSUMED, [])),
        ({"in_flight": HELD, "committed": 9}, (Fate.IN_FLIGHT, [Code.IN_FLIGHT])),
        ({"retries": [RetryFacts(1, True, None, HELD, True)]}, (Fate.IN_FLIGHT, [Code.IN_FLIGHT])),
        ({"retries": [RetryFacts(1, False, is_popped=True)]}, (Fate.RETRY, [Code.RETRY_PENDING])),
        ({"trace": GroupTrace("G", 1, True)}, (Fate.CONSUMED, [])),
        ({"committed": 6}, (Fate.CONSUMED, [Code.OFFSET_PAST])),
        ({"committed": 11}, (Fate.WAITING, [Code.BEYOND_END])),
        ({"committed": 11, "members": ()}, (Fate.OFFLINE, [Code.BEYOND_END, Code.NO_MEMBER])),
        ({"members": ()}, (Fate.OFFLINE, [Code.NO_MEMBER])),
        ({"fetched": 6}, (Fate.WAITING, [Code.NOT_ACKNOWLEDGING])),
        ({"fetched": 6, "members": (member(last_consume_ms=NOW_MS - 1000),)},
         (Fate.WAITING, [Code.IN_HAND])),
        ({"fetched": 6, "members": (member(last_consume_ms=NOW_MS - 60_000),)},
         (Fate.WAITING, [Code.NOT_ACKNOWLEDGING])),
        ({"members": (MemberFacts("c1", {"T": parse_subscription("T")}, {}),)},
         (Fate.WAITING, [Code.QUEUE_IDLE, Code.MEMBER_IDLE])),
        ({"subscriptions": {"U": parse_subscription("U")}}, (Fate.WAITING, [Code.NOT_SUBSCRIBED])),
        ({"config": GroupConfig("G", consume_enable=False)},
         (Fate.WAITING, [Code.CONSUMING_OFF])),
        ({"subscriptions": {"T": Subscription("T", "price >", "SQL92")}},
         (Fate.WAITING, [Code.BROKEN_FILTER])),
        ({"subscriptions": {"T": Subscription("T", "price IS NULL ) x", "SQL92")}},
         (Fate.WAITING, [Code.BEHIND, Code.IGNORED_TEXT])),
        ({"members": (member(), member("c2", parse_subscription("T", "A")))},
         (Fate.WAITING, [Code.BEHIND, Code.UNEQUAL])),
    ],
)  # fmt: skip
def test_each_fact_has_its_finding(
    changes: dict[str, object], expected: tuple[Fate, list[Code]]
) -> None:
    assert told(**changes) == expected


def test_who_has_a_message_is_said_and_until_when() -> None:
    found = explained(about(), in_flight=HELD)
    assert found.cause is not None
    assert found.cause.what == (
        "c1 popped it 2 s ago (delivery 2). Unless it is acknowledged, it will be delivered again "
        "in 3 s."
    )


@pytest.mark.parametrize(
    ("queue", "code"),
    [
        (QueueProgress(QUEUE, 10, 10, in_flight=2, extra=2), Code.IN_FLIGHT),
        (QueueProgress(QUEUE, 9, 10, in_flight=2, extra=2), Code.BEHIND),
    ],
)
def test_a_group_that_has_all_in_flight_is_not_behind(queue: QueueProgress, code: Code) -> None:
    found = explain_group(whole(group(), queue)).findings
    assert [finding.code for finding in found] == [code]


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"price": "7", "region": "hz"}, "price > 30 is false (price is '7', a String)"),
        ({"price": "31", "region": "sh"}, "region = 'hz' is false (region is 'sh', a String)"),
        ({"region": "hz"}, "is null for the message: price > 30 is null (price is absent)"),
    ],
)
def test_the_atom_that_decides_is_named(properties: dict[str, str], words: str) -> None:
    found = explained(about(**properties), subscriptions={"T": SQL})
    assert found.fate is Fate.FILTERED
    assert found.cause is not None
    assert words in found.cause.what


def test_a_message_that_the_filter_drops_is_filtered_also_when_the_offset_is_past_it() -> None:
    found = told(about(price="7"), subscriptions={"T": SQL}, committed=9)
    assert found == (Fate.FILTERED, [Code.FILTER_FALSE])


def test_a_topic_without_a_route_is_said() -> None:
    for routed in (None, frozenset({"other"})):
        assert told(about(routed=routed)) == (Fate.WAITING, [Code.NO_ROUTE])


def test_a_group_that_has_only_misses_before_it_is_not_behind() -> None:
    queue = QueueMatching(0, 0, 0, 10, 0)
    matching = GroupMatching("T", "SQL92", "x = 1", (queue,))
    found = explain_group(whole(group(), QueueProgress(QUEUE, 0, 10), matching))
    assert (found.lag, found.matching) == (10, 0)
    assert [finding.code for finding in found.findings] == [Code.ONLY_FILTERED]


def test_a_group_that_is_up_to_date_has_no_findings() -> None:
    state = whole(group(), QueueProgress(QUEUE, 10, 10))
    assert explain_group(state).findings == ()


def test_a_group_is_told_what_of_its_filter_is_ignored() -> None:
    """A Java consumer may subscribe so; it is served as RocketMQ serves it."""
    said = Subscription("T", "price > 30 garbage", "SQL92")
    state = whole(group(subscriptions={"T": said}), QueueProgress(QUEUE, 10, 10))
    (found,) = explain_group(state).findings
    assert found.code is Code.IGNORED_TEXT
    assert "garbage is ignored" in found.what


OLD = LaneFacts("aaaa", Subscription("T", "price > 30", "SQL92"), ["c1"], 9)
YOUNG = LaneFacts("bbbb", parse_subscription("T", "*"), ["c2"], 2)
GONE = LaneFacts("cccc", Subscription("T", "price = 1", "SQL92"), [], 3)
OTHER = LaneFacts("dddd", None, ["c4"], None)


@pytest.mark.parametrize(
    ("lanes", "price", "expected", "words"),
    [
        ([OLD, YOUNG], "31", (Fate.CONSUMED, [Code.OFFSET_PAST, Code.LANE]), "lane aaaa"),
        ([OLD, YOUNG], "7", (Fate.WAITING, [Code.BEHIND, Code.LANE]), "is at 2 and has c2"),
        ([OLD, GONE], "1", (Fate.OFFLINE, [Code.LANE]), "has no member"),
        ([OLD, OTHER], "7", (Fate.FILTERED, [Code.NO_LANE, Code.FILTER_FALSE]), "another topic"),
    ],
)
def test_a_message_belongs_to_the_oldest_lane_that_matches_it(
    lanes: list[LaneFacts], price: str, expected: tuple[Fate, list[Code]], words: str
) -> None:
    """Whatever the group's own offset and the subscription of others say."""
    members = (MemberFacts("c1"), MemberFacts("c2"), MemberFacts("c4"))
    changes = {"lanes": lanes, "members": members, "committed": 8, "subscriptions": {"T": SQL}}
    assert told(about(price=price), **changes) == expected
    found = explained(about(price=price), **changes)
    assert words in " ".join(finding.what for finding in found.findings)


def test_a_retry_is_told_whichever_lane_it_is_of() -> None:
    found = told(about(price="31"), lanes=[OLD, YOUNG], retries=[RetryFacts(2, False)])
    assert found == (Fate.RETRY, [Code.RETRY_PENDING, Code.LANE])


def laned(members: tuple[MemberFacts, ...], *lanes: tuple[str, tuple[str, ...], int]) -> GroupFacts:
    """A group whose least lane is at 0; (id, clients, how many wait) of each lane."""
    made = tuple(
        LaneMatching(name, "TAG", name.upper(), ids, (QueueMatching(0, 4, 0, 10, waiting),))
        for name, ids, waiting in lanes
    )
    sum_of_lanes = QueueMatching(0, 0, 0, 10, sum(waiting for _, _, waiting in lanes))
    matching = GroupMatching("T", "TAG", "A", (sum_of_lanes,), lanes=made)
    return whole(group(members=members), QueueProgress(QUEUE, 0, 10, fetched=10), matching)


def tags(name: str, tag: str, **state: int) -> MemberFacts:
    return member(name, parse_subscription("T", tag), **state)


@pytest.mark.parametrize(
    ("members", "lanes", "expected"),
    [
        ((tags("c1", "A"), tags("c2", "B")), [("a", ("c1",), 3), ("b", ("c2",), 0)],
         [(Code.UNEQUAL, "differently"), (Code.LANE, "3 messages of T on b wait for lane a (A)")]),
        ((tags("c1", "A"), tags("c2", "A")), [("a", ("c1", "c2"), 0), ("b", (), 2)],
         [(Code.LANE, "lane b (B), which has no member")]),
        ((tags("c1", "A", cached_count=1, cached_max=6),), [("a", ("c1",), 1), ("b", (), 0)],
         [(Code.LANE, "lane a"), (Code.NOT_ACKNOWLEDGING, "up to offset 7, and the group has")]),
        ((tags("c1", "A", dropped=True), tags("c2", "B")), [("a", ("c1",), 1), ("b", ("c2",), 0)],
         [(Code.UNEQUAL, ""), (Code.LANE, ""), (Code.QUEUE_IDLE, "No member of lane a reads")]),
        ((tags("c1", "A"), MemberFacts("c2")), [("a", ("c1", "c2"), 1)],
         [(Code.LANE, "which c1, c2 read")]),
    ],
)  # fmt: skip
def test_a_group_with_lanes_is_explained_lane_by_lane(
    members: tuple[MemberFacts, ...],
    lanes: list[tuple[str, tuple[str, ...], int]],
    expected: list[tuple[Code, str]],
) -> None:
    """The group's own offset, which is the least of the lanes, is nobody's fault."""
    found = explain_group(laned(members, *lanes)).findings
    assert [one.code for one in found] == [code for code, _ in expected]
    for one, (_, words) in zip(found, expected, strict=True):
        assert words in one.what


def test_lanes_have_another_cure_than_one_subscription_for_all() -> None:
    members = (tags("c1", "A"), tags("c2", "B"))
    lanes = explain_group(laned(members, ("a", ("c1",), 1))).findings[0]
    one = explain_group(dataclasses.replace(laned(members), matching=())).findings[0]
    assert "oldest lane" in lanes.fix
    assert "messages get lost" in one.fix


def test_a_group_whose_offset_is_beyond_the_end_of_a_queue_is_told() -> None:
    fine = whole(group(), QueueProgress(QUEUE, 10, 10))
    assert explain_group(fine).findings == ()
    (found,) = explain_group(whole(group(), QueueProgress(QUEUE, 50, 10))).findings
    assert found.code is Code.BEYOND_END
    assert (
        f"queue {QUEUE.queue_id} of T on b is 50, beyond the end of the queue at 10" in found.what
    )
    assert "sluice group reset G --topic T --to earliest" in found.fix
