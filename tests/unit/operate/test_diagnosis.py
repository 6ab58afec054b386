"""Every rule of doctor: facts for which it holds, and similar facts for which it does not hold.

docs/reference/findings.md has the same rules.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluicemq.client.admin.diagnose.cluster_facts import (
    BrokerFacts,
    ClusterFacts,
    MessageSearch,
    NameServerFacts,
)
from sluicemq.client.admin.diagnose.findings import (
    Code,
    Fate,
    Finding,
    GroupExplained,
    MessageExplained,
    Severity,
)
from sluicemq.client.admin.diagnose.group_facts import FilterFacts, GroupFacts, MemberFacts
from sluicemq.client.admin.diagnose.records import doctor_record, explain_record, group_record
from sluicemq.client.admin.diagnose.table import (
    CLUSTER_RULES,
    EXPLAIN_RULES,
    RULES,
    diagnose_cluster,
)
from sluicemq.client.admin.groups import GroupContract, QueueLag, QueueProgress
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.reachability import Reachability
from sluicemq.model.topic import (
    BrokerData,
    GroupConfig,
    MessageQueue,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from sluicemq.operate.doctor import clock_ahead_ms
from sluicemq.wire.bodies import ClusterInfo, QueueState, RunningInfo, TopicRates
from stored_bodies import BAD, GOOD, StoredBody

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
QUEUE = MessageQueue("T", "a", 0)


def route(perm: int = 6, *, order: str | None = None, addresses: Any = None) -> TopicRoute:
    places = {0: "10.0.0.2:10911"} if addresses is None else addresses
    return TopicRoute((BrokerData("a", "C", places),), (QueueData("a", 4, 4, perm),), order)


CLUSTER = ClusterInfo({"a": BrokerData("a", "C", {0: "10.0.0.2:10911"})}, {"C": ("a",)})
NAMES = NameServerFacts(
    "10.0.0.1:9876",
    Reachability.RESPONDS,
    cluster=CLUSTER,
    route=route(),
    has_route=True,
    creates_topics=True,
)
RUNTIME = {
    "sluiceVersion": "1", "commitLogDiskRatio": "0.5", "sluiceParkedPulls": "9",
    "sendThreadPoolQueueHeadWaitTimeMills": "3",
}  # fmt: skip
CONFIG = {
    "brokerName": "a", "brokerPermission": "6", "sluiceParkedPullsMax": "10",
    "fileReservedTime": "72", "namesrvAddr": "10.0.0.1:9876",
}  # fmt: skip
BROKER = BrokerFacts(
    "10.0.0.2:10911", Reachability.RESPONDS, name="a", cluster="C", vip_reach=Reachability.RESPONDS,
    runtime=RUNTIME, config=CONFIG, clock_ahead_ms=400,
    topic=TopicConfig("T", attributes={"message.type": "NORMAL"}), replica={"inSyncSize": 1},
)  # fmt: skip
LAG = QueueLag("G", QUEUE, 5, 0, 9)
RATES = TopicRates(done_per_second=1.0, failed_per_second=0.5)


def says(rates: TopicRates) -> RunningInfo:
    said = {"PROP_CONSUMEORDERLY": "true", "messageModel": "CLUSTERING"}
    return RunningInfo(said, queues={QUEUE: QueueState(5)}, rates={"T": rates})


INFO = says(RATES)
MEMBER = MemberFacts.from_info("one", INFO, 900)
GROUP = GroupFacts(
    "G", GroupConfig("G"), (MEMBER,), progress=(QueueProgress(QUEUE, 5, 9, NOW_MS - HOUR_MS),),
    lags=(LAG,), message_models=frozenset({"CLUSTERING"}),
    filters=(FilterFacts("T", "a > 1", 10, 1),),
)  # fmt: skip
EXPLAINED_GROUP = GroupExplained("G", (), 4, 4)
MESSAGE = MessageSearch("M", born_ms=NOW_MS - 10, earliest_ms=NOW_MS - HOUR_MS)
HEALTHY = ClusterFacts(
    NOW_MS, "T", "normal", (NAMES,), (BROKER,), group=GROUP, explained_group=EXPLAINED_GROUP
)


def names(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, name_servers=(replace(NAMES, **changes),))


def broker(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, brokers=(replace(BROKER, **changes),))


def group(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, group=replace(GROUP, **changes))


def member(**changes: Any) -> ClusterFacts:
    return group(members=(replace(MEMBER, **changes),))


def pops(topic: str) -> ClusterFacts:
    return group(contracts=[GroupContract("a", "lanes", pops={topic: ("TAG", "*")})])


def message(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, message=replace(MESSAGE, **changes))


def stored_with(body: StoredBody) -> StoredMessage:
    here = Host("127.0.0.1", 1)
    return StoredMessage(
        "T", 0, 7, 0, 9, body.raw, {}, 0, body.sys_flag, 0, here, 0, here, 0, 0, 0, "a"
    )


def counters(**changes: str) -> ClusterFacts:
    return broker(runtime=RUNTIME | changes)


def denied(remark: str) -> ClusterFacts:
    return replace(HEALTHY, denied=(("10.0.0.2:10911", remark),))


def no_route(**changes: Any) -> ClusterFacts:
    server = replace(NAMES, route=None, has_route=False, **changes)
    return replace(HEALTHY, name_servers=(server,), brokers=(replace(BROKER, topic=None),))


def given(told: str) -> ClusterFacts:
    stranger = replace(
        BROKER, name="", address="10.0.0.9:10911", config=CONFIG | {"namesrvAddr": told}
    )
    return replace(HEALTHY, brokers=(stranger,))


def place(address: str, reach: Reachability, **changes: Any) -> ClusterFacts:
    return broker(address=address, reach=reach, runtime={}, **changes)


def of_code(code: Code) -> ClusterFacts:
    found = GroupExplained("G", (Finding(code, "That is so.", "Do this.", SEVERITIES[code]),), 4, 4)
    return replace(HEALTHY, explained_group=found)


def slaves(**changes: Any) -> ClusterFacts:
    slave = replace(BROKER, id=1, lag_bytes=100, replica={"inSync": True, "role": "slave"})
    return replace(HEALTHY, brokers=(BROKER, replace(slave, **changes)))


CUT_OFF = {"role": "slave", "isLinked": False, "master": "10.0.0.2:10912"}
OUT = {"inSync": False, "role": "slave"}
FAILS = says(TopicRates(failed_per_second=2.0))
BROADCAST = MemberFacts.from_info("two", RunningInfo({"messageModel": "BROADCASTING"}))
ELSEWHERE = replace(NAMES, address="10.0.0.7:9876")
GONE = MESSAGE.earliest_ms - 1
SKEWS = {"a": 90_000, "b": 90_300}
SENDS_BACK = Finding(Code.DEAD_LETTER, "It was given up.", "Mend it.")

# code -> (holds, close to it and does not)
SPARSE = group(progress=(QueueProgress(QUEUE, 5, 9, NOW_MS - 70 * HOUR_MS),))
NOT_OURS = {name: text for name, text in RUNTIME.items() if name != "sluiceVersion"}
ROWS: dict[str, tuple[ClusterFacts, ClusterFacts]] = {
    "name-unresolved": (names(reach=Reachability.UNRESOLVED), names(reach=Reachability.REFUSED)),
    "name-server-is-broker": (names(code=3), names(code=1)),
    "broker-is-name-server": (broker(code=3), broker(code=1)),
    "http-server": (names(reach=Reachability.HTTP), names(reach=Reachability.UNRESPONSIVE)),
    "grpc-server": (names(reach=Reachability.GRPC), names(reach=Reachability.TLS)),
    "tls-demanded": (broker(reach=Reachability.TLS), broker(reach=Reachability.PLAIN)),
    "tls-not-spoken": (names(reach=Reachability.PLAIN), names(reach=Reachability.TLS)),
    "certificate-expired": (names(reach=Reachability.EXPIRED), names(reach=Reachability.UNTRUSTED)),
    "certificate-wrong-name": (broker(reach=Reachability.WRONG_NAME),
        broker(reach=Reachability.EXPIRED)),
    "certificate-untrusted": (names(reach=Reachability.UNTRUSTED),
        names(reach=Reachability.WRONG_NAME)),
    "client-certificate": (names(reach=Reachability.CLIENT_CERTIFICATE),
        names(reach=Reachability.UNTRUSTED)),
    "protected-mode": (denied("(protected mode), because …"), denied("signature")),
    "access-key-missing": (
        denied("AclException: No accessKey is configured"), denied("No acl config for one"),
    ),
    "access-key-unknown": (
        denied("AclException: No acl config for one"), denied("Check signature failed for one"),
    ),
    "secret-key-wrong": (
        denied("Check signature failed for accessKey=one"), denied("No permission for topic:T"),
    ),
    "right-missing": (denied("No permission for topic:T"), denied("No accessKey is configured")),
    "name-server-down": (names(reach=Reachability.UNREACHABLE),
        names(reach=Reachability.UNRESOLVED)),
    "broker-registers-elsewhere": (
        given("10.0.0.8:9876"), given("10.0.0.8:9876;10.0.0.1:9876"),
    ),
    "no-broker-registered": (names(cluster=ClusterInfo()), names(cluster=None)),
    "broker-address-wildcard": (
        place("0.0.0.0:10911", Reachability.RESPONDS), place("127.0.0.1:10911",
            Reachability.RESPONDS),
    ),
    "broker-address-loopback": (
        place("127.0.0.1:10911", Reachability.REFUSED),
        replace(place("127.0.0.1:10911", Reachability.REFUSED),
                name_servers=(replace(NAMES, address="127.0.0.1:9876"),)),
    ),
    "broker-address-private": (
        place("172.17.0.2:10911", Reachability.UNREACHABLE), place("10.0.0.2:10911",
            Reachability.UNREACHABLE),
    ),
    "broker-is-another": (
        broker(config=CONFIG | {"brokerName": "b"}), broker(config={}),
    ),
    "broker-unresolved": (
        place("inside:10911", Reachability.UNRESOLVED), place("inside:10911",
            Reachability.UNREACHABLE),
    ),
    "broker-down": (
        place("10.0.0.2:10911", Reachability.UNREACHABLE), place("172.17.0.2:10911",
            Reachability.UNREACHABLE),
    ),
    "broker-mute": (broker(reach=Reachability.UNRESPONSIVE),
        broker(reach=Reachability.UNREACHABLE)),
    "no-master": (
        names(route=route(addresses={1: "10.0.0.3:10911"})),
        names(route=route(addresses={0: "b:1"})),
    ),
    "clock-skew": (broker(clock_ahead_ms=-61_000), broker(clock_ahead_ms=None)),
    "disk-full": (counters(commitLogDiskRatio="0.95"), counters(commitLogDiskRatio="0.9")),
    "disk-forced": (counters(consumeQueueDiskRatio="0.88"), counters(commitLogDiskRatio="0.95")),
    "disk-filling": (counters(commitLogDiskRatio="0.8"), counters(commitLogDiskRatio="-1")),
    "broker-read-only": (
        broker(config=CONFIG | {"brokerPermission": "4"}), broker(config={}),
    ),
    "write-perm-wiped": (
        names(route=route(4)),
        replace(names(route=route(4)), brokers=(replace(BROKER, topic=TopicConfig("T", perm=4)),)),
    ),
    "requests-queue": (
        counters(sendThreadPoolQueueHeadWaitTimeMills="900"),
        counters(sendThreadPoolQueueHeadWaitTimeMills="90"),
    ),
    "polls-full": (counters(sluiceParkedPulls="10"), broker(runtime={"sluiceParkedPulls": ""})),
    "replica-cut-off": (slaves(replica=CUT_OFF), slaves(replica=CUT_OFF | {"isLinked": True})),
    "replica-not-in-sync": (slaves(replica=OUT), slaves()),
    "replicas-too-few": (
        broker(config=CONFIG | {"inSyncReplicas": "2"}),
        broker(config=CONFIG | {"inSyncReplicas": "2"}, replica={"inSyncSize": 2}),
    ),
    "replica-behind": (slaves(lag_bytes=1 << 30), slaves(lag_bytes=1 << 30, replica=OUT)),
    "topic-at-other-name-server": (
        replace(HEALTHY, name_servers=(NAMES, replace(ELSEWHERE, route=None, has_route=False))),
        replace(HEALTHY, name_servers=(NAMES, replace(ELSEWHERE, route=None, has_route=None))),
    ),
    "topic-not-registered": (names(route=None, has_route=False), no_route()),
    "topic-not-sent-to": (no_route(), no_route(creates_topics=False)),
    "topic-missing": (no_route(creates_topics=False), no_route()),
    "topic-closed": (names(route=route(0)), names(route=route(2))),
    "topic-not-writable": (
        replace(names(route=route(4)), brokers=(replace(BROKER, topic=TopicConfig("T", perm=4)),)),
        names(route=route(4)),
    ),
    "topic-not-readable": (names(route=route(2)), names(route=route(6))),
    "order-names-gone-broker": (
        names(route=route(order="a:4;b:4")), names(route=route(order="a:4")),
    ),
    "wrong-type": (replace(HEALTHY, type="fifo"), replace(HEALTHY, type=None)),
    "message-delayed": (message(waiting="delayed"), message(waiting="half")),
    "message-half": (message(waiting="half"), message(waiting="delayed")),
    "message-expired": (message(born_ms=GONE), message(born_ms=GONE, waiting="delayed")),
    "message-unknown": (message(), message(born_ms=GONE)),
    "message-undecodable": (
        message(stored=stored_with(BAD["zlib, garbage"])),
        message(stored=stored_with(GOOD["zlib"])),
    ),
    "client-clock-skew": (member(clock_ahead_ms=60_000), member(clock_ahead_ms=4_000)),
    "models-mixed": (
        group(members=(MEMBER, BROADCAST)), group(members=(BROADCAST,), message_models=frozenset()),
    ),
    "pop-and-pull": (pops("T"), pops("U")),
    "bodies-undecodable": (
        member(info=RunningInfo({}, notes={"undecodable.T": "3; The body of …"})),
        member(info=RunningInfo({}, notes={"messagesOut": "3"})),
    ),
    "message-poisoned": (group(failed_messages={"M": 3}), group(failed_messages={"M": 2})),
    "queue-blocked": (
        member(info=FAILS),
        replace(HEALTHY, group=replace(GROUP, members=(replace(MEMBER, info=FAILS),), lags=())),
    ),
    "retention-lost": (
        group(lags=(replace(LAG, offset_min=7),)),
        group(lags=(replace(LAG, offset_min=7, committed=0),)),
    ),
    "retention-near": (
        group(lags=(replace(LAG, messages_at_risk=3, loss_time_ms=NOW_MS + HOUR_MS),)),
        group(progress=(QueueProgress(QUEUE, 5, 9, NOW_MS - 70 * HOUR_MS),)),
    ),
    "retention-maybe-near": (
        replace(SPARSE, brokers=(replace(BROKER, runtime=NOT_OURS),)), SPARSE,
    ),
    "member-mute": (
        member(is_mute=True),
        replace(HEALTHY, group=replace(GROUP, members=(replace(MEMBER, is_mute=True),), lags=())),
    ),
    "filter-matches-nothing": (
        group(filters=(FilterFacts("T", "a > 1", 10, 0, ("a > 1",)),)),
        group(filters=(FilterFacts("T", "a > 1", 0, 0),)),
    ),
    "dead-letters": (
        group(dead_letter_count=3, dead_letter_time_ms=NOW_MS - 10),
        group(dead_letter_count=3, dead_letter_time_ms=NOW_MS - 2 * HOUR_MS),
    ),
    "vip-port": (broker(vip_reach=Reachability.REFUSED), broker(vip_reach=None)),
}  # fmt: skip
SEVERITIES = {rule.code: rule.severity for rule in EXPLAIN_RULES}
EXPLAINED = [code for code in Code if SEVERITIES.get(code, Severity.DETAIL) is not Severity.DETAIL]


def codes(e: ClusterFacts) -> list[str]:
    return [one.code for one in diagnose_cluster(e)]


def test_nothing_holds_of_a_healthy_cluster_or_without_evidence() -> None:
    assert codes(HEALTHY) == []
    assert codes(ClusterFacts(NOW_MS)) == []


def test_every_row_has_its_cases() -> None:
    assert [*ROWS] == [rule.code for rule in CLUSTER_RULES]


@pytest.mark.parametrize("code", ROWS)
def test_a_row_holds_and_does_not_hold_close_by(code: str) -> None:
    holds, close = ROWS[code]
    found = next(one for one in diagnose_cluster(holds) if one.code == code)
    assert found.what
    assert found.fix
    assert not re.search(r"[{}]|None", found.what + found.fix)
    assert code not in codes(close)


@pytest.mark.parametrize("code", EXPLAINED)
def test_what_explain_finds_is_a_cause_with_its_words(code: str) -> None:
    found = next(one for one in diagnose_cluster(of_code(Code(code))) if one.code == code)
    assert (found.what, found.fix) == ("That is so.", "Do this.")
    assert code not in codes(HEALTHY)


@pytest.mark.parametrize("fate", [Fate.DEAD, Fate.CONSUMED])
def test_what_became_of_a_message_counts_unless_it_was_consumed(fate: Fate) -> None:
    explained = (MessageExplained("G", fate, (SENDS_BACK,)),)
    found = codes(message(waiting="told", explained=explained))
    assert found == (["dead-letter"] if fate is Fate.DEAD else [])


def test_the_first_that_holds_is_the_cause_and_notes_come_last() -> None:
    both = replace(broker(clock_ahead_ms=70_000, vip_reach=Reachability.REFUSED), type="fifo")
    assert codes(both) == ["clock-skew", "wrong-type", "vip-port"]


def test_when_all_brokers_agree_it_is_this_machine_whose_clock_is_wrong() -> None:
    late = [replace(BROKER, name=name, config={}, clock_ahead_ms=ms) for name, ms in SKEWS.items()]
    e = replace(HEALTHY, brokers=late)
    assert [one.what for one in diagnose_cluster(e)] == ["The clock of this machine is -90 s off."]


def test_a_misspelt_topic_gets_a_hint() -> None:
    facts = replace(no_route(creates_topics=False), topic="ordres")
    facts = replace(facts, known_topics=["flights", "orders"])
    assert "Did you mean 'orders'?" in diagnose_cluster(facts)[0].what


def test_the_time_of_a_broker_is_when_it_opened_and_for_how_long() -> None:
    table = {
        "bootTimestamp": str(NOW_MS),
        "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]",
    }
    open_ms = (((24 + 2) * 60 + 3) * 60 + 4) * 1000
    assert clock_ahead_ms(table, NOW_MS + open_ms) == 500
    assert clock_ahead_ms({}, NOW_MS) is None


def test_the_page_has_the_tables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "findings.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)`( \(note\))? \| (.+?) \| (.+) \|$", page, re.MULTILINE)

    def shorten(text: str) -> str:
        """Return a sentence with the last part of each field's name in capitals."""
        return re.sub(
            r"\{(?:\w+\.)*(\w+)[^}]*\}",
            lambda field: field[1].upper(),
            text.replace("}{", "} {"),
        )

    def mark(severity: Severity) -> str:
        return " (note)" if severity is Severity.NOTE else ""

    explained = {
        (rule.code, mark(rule.severity), shorten(rule.what), shorten(rule.fix) or "–")
        for rule in EXPLAIN_RULES
        if rule.severity is not Severity.DETAIL
    }
    own = {(rule.code, mark(rule.severity), shorten(rule.fix)) for rule in CLUSTER_RULES}
    assert explained == {row for row in rows if row[0] in EXPLAINED}
    assert own == {(code, note, fix) for code, note, _, fix in rows if code not in EXPLAINED}
    codes = [code for code, *_ in rows]
    assert codes == sorted(codes, key=[*Code].index)


def test_every_code_has_a_rule_and_one_severity() -> None:
    severities: dict[Code, set[Severity]] = {}
    for rule in RULES:
        severities.setdefault(rule.code, set()).add(rule.severity)
    assert set(severities) == set(Code)
    assert all(len(found) == 1 for found in severities.values())


def test_the_rules_of_a_cluster_are_in_the_order_of_their_codes() -> None:
    codes = [rule.code for rule in CLUSTER_RULES]
    assert codes == [code for code in Code if code in codes]


def test_records_have_the_keys_that_scripts_read() -> None:
    finding = Finding(Code.NO_MEMBER, "That is so.", "Do this.")
    plain = {"code": "no-member", "what": "That is so."}
    assert explain_record(finding) == plain | {"instead": "Do this."}
    assert doctor_record(finding) == plain | {"cure": "Do this."}
    explained = GroupExplained("G", (finding,), 4, None)
    assert group_record(explained) == {
        "group": "G", "findings": [explain_record(finding)], "lag": 4, "matching": None,
    }  # fmt: skip
