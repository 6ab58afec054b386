"""The route table, rule by rule (spec/namesrv.md §2-§5)."""

import dataclasses

import pytest

from sluicemq.model.topic import BrokerData, DataVersion, QueueData, TopicConfig
from sluicemq.nameserver.routes import (
    TIMEOUT_MS,
    Registration,
    RouteTable,
    SmallestIdChange,
    filter_zone,
    run_all_slices,
)
from sluicemq.wire.registration import RegisterBrokerResponse


def topics(
    *names: str, perm: int = 6, queues: int = 4, sys_flag: int = 0
) -> dict[str, TopicConfig]:
    return {name: TopicConfig(name, queues, queues, perm, sys_flag=sys_flag) for name in names}


def master(broker: str = "a", **changes: object) -> Registration:
    made = Registration(
        cluster="c",
        broker=broker,
        broker_id=0,
        address=f"{broker}:1",
        ha_address=f"{broker}:2",
        acting_master_enable=False,
        topics=topics("T", "U"),
        version=DataVersion(1, 100),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def slave(broker: str = "a", **changes: object) -> Registration:
    own = {"broker_id": 1, "address": f"{broker}:9", "ha_address": "", "topics": {}}
    return master(broker, **(own | changes))


def expired(table: RouteTable, now_ms: int) -> list[Registration]:
    gone = table.find_expired(now_ms)
    run_all_slices(table.unregister_lost(gone))
    return gone


def lost(table: RouteTable, connection: object) -> list[Registration]:
    gone = table.registered_by(connection)
    run_all_slices(table.unregister_lost(gone))
    return gone


@pytest.fixture
def table() -> RouteTable:
    return RouteTable()


def test_a_master_brings_its_topics(table: RouteTable) -> None:
    assert table.register(master(), 0) == RegisterBrokerResponse()
    route = table.find_route("T")
    assert route is not None
    assert route.brokers == (BrokerData("a", "c", {0: "a:1"}),)
    assert route.queues == (QueueData("a", 4, 4, 6),)
    assert table.list_clusters() == {"c": ["a"]}
    assert table.find_route("nope") is None


def test_a_broker_whose_whole_table_is_one_topic_can_register(table: RouteTable) -> None:
    table.register(master(topics=topics("only")), 0)
    assert table.find_route("only") is not None


def test_a_topic_on_two_brokers_is_sorted_by_broker(table: RouteTable) -> None:
    table.register(master("b"), 0)
    table.register(master("a"), 0)
    route = table.find_route("T")
    assert route is not None
    assert [queue.broker for queue in route.queues] == ["a", "b"]
    assert [data.broker for data in route.brokers] == ["a", "b"]


def test_the_same_edition_changes_nothing_but_adds_what_is_missing(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(master(topics=topics("T", "V", queues=9)), 1)
    assert [table.find_route(topic).queues[0].read_queues for topic in "TUV"] == [4, 4, 9]  # type: ignore[union-attr]


def test_another_edition_replaces_what_it_names_and_keeps_the_rest(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(master(topics=topics("T", queues=9), version=DataVersion(2, 100)), 1)
    assert [table.find_route(topic).queues[0].read_queues for topic in "TU"] == [9, 4]  # type: ignore[union-attr]


def test_a_complete_registration_forgets_the_topics_it_lacks(table: RouteTable) -> None:
    table.register(master("b"), 0)
    table.register(master(), 0)
    table.register(master(topics=topics("T"), is_complete=True), 1)
    assert sorted(table.list_topics()) == ["T", "U"]
    assert [queue.broker for queue in table.find_route("U").queues] == ["b"]  # type: ignore[union-attr]


def test_a_slave_is_told_its_master_and_brings_no_topics(table: RouteTable) -> None:
    table.register(master(), 0)
    answer = table.register(slave(topics=topics("S")), 0)
    assert answer == RegisterBrokerResponse(ha_address="a:2", master_address="a:1")
    assert table.find_route("S") is None
    assert table.get_broker("a") == BrokerData("a", "c", {0: "a:1", 1: "a:9"})


def test_a_slave_of_a_dead_master_is_told_nothing(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(slave(), 0)
    table.unregister("c", "a", "a:1")
    assert table.register(slave(), 1) == RegisterBrokerResponse()


def test_a_slave_that_becomes_master_has_one_id(table: RouteTable) -> None:
    table.register(slave(), 0)
    table.register(slave(broker_id=0), 1)
    assert table.get_broker("a") == BrokerData("a", "c", {0: "a:9"})


def test_a_slave_that_becomes_master_brings_its_topics_though_its_edition_is_known(
    table: RouteTable,
) -> None:
    table.register(master(), 0)
    edition = DataVersion(7, 7)
    table.register(slave(topics=topics("T", queues=9), version=edition), 0)
    table.unregister("c", "a", "a:1")
    table.register(slave(broker_id=0, topics=topics("T", queues=9), version=edition), 1)
    assert table.find_route("T").queues[0].read_queues == 9  # type: ignore[union-attr]


def test_a_broker_before_version_5_is_no_prime_slave(table: RouteTable) -> None:
    table.register(slave(topics=topics("S"), acting_master_enable=None), 0)
    assert table.find_route("S") is None


def test_the_prime_slave_brings_topics_nobody_may_write_to(table: RouteTable) -> None:
    table.register(slave(topics=topics("S"), acting_master_enable=True), 0)
    assert table.find_route("S").queues[0].perm == 4  # type: ignore[union-attr]
    table.register(slave("b", topics=topics("R"), acting_master_enable=False), 0)
    assert table.find_route("R").queues[0].perm == 6  # type: ignore[union-attr]


def test_an_older_state_cannot_take_the_id_of_a_living_broker(table: RouteTable) -> None:
    table.register(master(version=DataVersion(0, 0, 5)), 0)
    usurper = master(address="x:1", version=DataVersion(9, 9, 4), topics=topics("X"))
    assert table.register(usurper, 1) == RegisterBrokerResponse()
    assert table.get_broker("a") == BrokerData("a", "c", {0: "a:1"})
    assert table.find_route("X") is None
    assert table.version_of("c", "x:1") is None


def test_the_same_state_takes_over_the_id(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(master(address="x:1"), 1)
    assert table.get_broker("a") == BrokerData("a", "c", {0: "x:1"})


def test_unregistering_the_last_address_forgets_broker_topics_and_cluster(
    table: RouteTable,
) -> None:
    table.register(master(), 0)
    table.register(master("b", topics=topics("T")), 0)
    table.unregister("c", "a", "a:1")
    assert table.list_topics() == ["T"]
    assert [data.broker for data in table.list_brokers()] == ["b"]
    table.unregister("c", "b", "b:1")
    assert (table.list_topics(), table.list_clusters(), table.list_brokers()) == ([], {}, [])


def test_unregistering_what_is_not_there_is_no_error(table: RouteTable) -> None:
    table.unregister("c", "a", "a:1")
    table.register(master(), 0)
    table.unregister("c", "a", "other:1")
    assert table.find_route("T") is not None


def test_without_its_master_a_broker_with_slaves_keeps_its_topics(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(slave(), 0)
    table.unregister("c", "a", "a:1")
    route = table.find_route("T")
    assert route is not None
    assert route.brokers[0].addresses == {1: "a:9"}
    assert route.queues[0].perm == 6


def test_without_its_master_an_acting_broker_is_read_only(table: RouteTable) -> None:
    table.register(master(acting_master_enable=True), 0)
    table.register(slave(acting_master_enable=True), 0)
    table.unregister("c", "a", "a:1")
    assert table.find_route("T").queues[0].perm == 4  # type: ignore[union-attr]
    plain = table.find_route("T")
    acting = table.find_route("T", acting_master=True)
    assert plain is not None
    assert acting is not None
    assert plain.brokers[0].addresses == {1: "a:9"}
    assert acting.brokers[0].addresses == {0: "a:9"}


def test_no_slave_acts_for_the_topics_that_tell_brokers_of_each_other(table: RouteTable) -> None:
    name = "rmq_sys_SYNC_BROKER_MEMBER_a"
    table.register(slave(topics=topics(name), acting_master_enable=True), 0)
    assert table.find_route(name, acting_master=True).brokers[0].addresses == {1: "a:9"}  # type: ignore[union-attr]


def test_a_silent_broker_expires_after_its_own_timeout(table: RouteTable) -> None:
    table.register(master(), 1000)
    table.register(master("b", timeout_ms=10_000), 1000)
    assert expired(table, 11_000) == []
    assert [live.broker for live in expired(table, 11_001)] == ["b"]
    assert [live.broker for live in expired(table, 1000 + TIMEOUT_MS)] == []
    assert [live.broker for live in expired(table, 1001 + TIMEOUT_MS)] == ["a"]
    assert table.list_topics() == []


def test_a_heartbeat_keeps_a_broker_alive(table: RouteTable) -> None:
    table.register(master(timeout_ms=10), 0)
    table.record_heartbeat("c", "a:1", 10)
    table.record_heartbeat("c", "unknown:1", 10)
    assert expired(table, 20) == []


def test_a_lost_connection_takes_its_brokers_along(table: RouteTable) -> None:
    first, second = object(), object()
    table.register(master(connection=first), 0)
    table.register(master("b", connection=second), 0)
    assert [live.broker for live in lost(table, first)] == ["a"]
    assert [data.broker for data in table.list_brokers()] == ["b"]


def test_a_broker_that_came_back_survives_the_end_of_its_old_connection(table: RouteTable) -> None:
    first, second = object(), object()
    table.register(master(connection=first), 0)
    table.register(master(connection=second), 1)
    assert lost(table, first) == []
    assert table.find_route("T") is not None


def test_write_permission_is_wiped_until_it_is_given_back_or_the_broker_comes_anew(
    table: RouteTable,
) -> None:
    def perm(topic: str = "T") -> int:
        return table.find_route(topic).queues[0].perm  # type: ignore[union-attr]

    table.register(master(), 0)
    table.register(master("b"), 0)
    assert run_all_slices(table.wipe_write_permission("a")) == 2
    assert [queue.perm for queue in table.find_route("T").queues] == [4, 6]  # type: ignore[union-attr]
    table.register(master(), 1)
    assert table.find_route("T").queues[0].perm == 4  # type: ignore[union-attr]
    table.register(master(version=DataVersion(2, 100), topics=topics("T", "new")), 2)
    table.register_topic("late", [QueueData("a", 4, 4, 6)])
    assert (perm(), perm("new"), perm("late")) == (4, 4, 4)
    table.unregister("c", "a", "a:1")
    table.register(master(), 3)
    assert perm() == 6
    run_all_slices(table.wipe_write_permission("a"))
    run_all_slices(table.add_write_permission("a"))
    table.register(master(version=DataVersion(3, 100)), 4)
    assert perm() == 6


def test_a_wipe_holds_while_a_slave_is_left_until_the_master_is_back(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(slave(), 0)
    run_all_slices(table.wipe_write_permission("a"))
    table.unregister("c", "a", "a:1")
    assert table.find_route("T").queues[0].perm == 4  # type: ignore[union-attr]
    table.register(master(), 1)
    assert table.find_route("T").queues[0].perm == 6  # type: ignore[union-attr]


# ------------------------------------------------------------------------------ who is smallest


def test_replicas_hear_who_is_the_smallest(table: RouteTable) -> None:
    heard: list[SmallestIdChange] = []
    table.on_smallest_changed = heard.append
    acting = {"acting_master_enable": True}
    table.register(slave(broker_id=2, **acting), 0)
    table.register(slave(address="a:5", broker_id=3, **acting), 0)
    assert heard == [], "nobody was there, or it is not the smallest"
    table.register(master(**acting), 0)
    assert heard.pop() == SmallestIdChange(0, "a:1", "a:2", None, ("a:9", "a:5"))
    table.register(master(**acting), 1)
    table.unregister("c", "a", "a:5")
    assert heard == []
    table.unregister("c", "a", "a:1")
    assert heard.pop() == SmallestIdChange(2, "a:9", None, "a:1", ("a:9",))
    table.register(slave(broker_id=0, version=DataVersion(0, 0, 1), **acting), 2)
    assert heard.pop() == SmallestIdChange(0, "a:9", "", None, ("a:9",)), "it has become the master"


def test_nobody_is_told_that_a_broker_without_acting_masters_has_lost_its_own(
    table: RouteTable,
) -> None:
    heard: list[SmallestIdChange] = []
    table.on_smallest_changed = heard.append
    table.register(master(), 0)
    table.register(slave(), 0)
    table.unregister("c", "a", "a:1")
    assert heard == []


# ---------------------------------------------------------------------------------- a failover


def test_a_failover_seen_by_a_name_server(table: RouteTable) -> None:
    """Of two that say they are the master the one of the later epoch is, whoever speaks last."""

    def epoch(number: int, **changes: object) -> Registration:
        return master(version=DataVersion(5, 100, number), **changes)

    def registered() -> dict[int, str]:
        data = table.get_broker("a")
        return {} if data is None else dict(data.addresses)

    table.register(epoch(1), 0)
    table.register(epoch(1, broker_id=2, address="a:9"), 0)
    table.register(epoch(2, address="a:9"), 1)
    assert registered() == {0: "a:9"}
    assert table.register(epoch(1), 2) == RegisterBrokerResponse(), "the deposed one comes too late"
    assert registered() == {0: "a:9"}
    table.register(epoch(2, broker_id=1, address="a:1"), 3)
    assert registered() == {0: "a:9", 1: "a:1"}, "and is a slave"
    table.record_heartbeat("c", "a:1", 4)
    assert [queue.perm for queue in table.find_route("T").queues] == [6]  # type: ignore[union-attr]
    fresh = RouteTable()  # a name server that was restarted hears the deposed one first
    fresh.register(epoch(1), 0)
    fresh.register(epoch(2, address="a:9"), 0)
    assert fresh.get_broker("a").addresses == {0: "a:9"}  # type: ignore[union-attr]


def test_a_slave_that_takes_over_brings_the_topics_of_its_own_log(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(slave(version=DataVersion(1, 100)), 0)
    table.unregister("c", "a", "a:1")
    table.register(
        slave(broker_id=0, version=DataVersion(1, 100, 2), topics=topics("T", queues=8)), 1
    )
    assert table.find_route("T").queues[0].write_queues == 8  # type: ignore[union-attr]


def test_adding_write_permission_gives_both(table: RouteTable) -> None:
    table.register(master(topics=topics("T", perm=1)), 0)
    assert run_all_slices(table.add_write_permission("a")) == 1
    assert table.find_route("T").queues[0].perm == 6  # type: ignore[union-attr]
    assert run_all_slices(table.wipe_write_permission("nobody")) == 0


def test_a_topic_registered_alone_stops_at_an_unknown_broker(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register_topic("N", [QueueData("a", 1, 1, 6), QueueData("x", 1, 1, 6)])
    assert table.find_route("N").queues == (QueueData("a", 1, 1, 6),)  # type: ignore[union-attr]
    table.register_topic("M", [QueueData("x", 1, 1, 6), QueueData("a", 1, 1, 6)])
    assert table.find_route("M") is None


def test_a_topic_is_deleted_everywhere_or_on_one_cluster(table: RouteTable) -> None:
    table.register(master(), 0)
    table.register(master("b", cluster="d"), 0)
    table.delete_topic("T", "d")
    assert [queue.broker for queue in table.find_route("T").queues] == ["a"]  # type: ignore[union-attr]
    table.delete_topic("U")
    assert table.list_topics() == ["T"]
    table.delete_topic("T", "c")
    table.delete_topic("nope", "nope")
    assert table.list_topics() == []


def test_topics_are_listed_by_cluster_and_by_flags(table: RouteTable) -> None:
    table.register(master(topics=topics("T", "U")), 0)
    table.register(master("b", cluster="d", topics=topics("V", sys_flag=3)), 0)
    assert sorted(table.list_topics_of_cluster("c")) == ["T", "U"]
    assert table.list_topics_of_cluster("nope") == []
    assert run_all_slices(table.find_topics_by_flags(lambda flag: bool(flag & 2))) == ["V"]


def test_a_zone_sees_its_own_brokers_and_those_without_a_master(table: RouteTable) -> None:
    table.register(master("a", zone="North"), 0)
    table.register(master("b", zone="south"), 0)
    table.register(slave("s", zone="south", topics=topics("T")), 0)
    route = table.find_route("T")
    assert route is not None
    north = filter_zone(route, "NORTH")
    assert [data.broker for data in north.brokers] == ["a", "s"]
    assert [queue.broker for queue in north.queues] == ["a", "s"]
