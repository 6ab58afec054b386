"""Registrations of many topics: in slices, bounded, and whole whatever comes between."""

import time
from random import Random
from typing import Any

import pytest

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import DataVersion, QueueData, TopicConfig
from sluicemq.nameserver import requests, routes
from sluicemq.nameserver.requests import NameServerRequests
from sluicemq.nameserver.routes import SLICE_TOPICS, Registration, RouteTable, run_all_slices
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.frames import Command
from sluicemq.wire.registration import RegisterBody, encode_register_body
from sluicemq.wire.tables import TopicTable

MANY = 8 * SLICE_TOPICS


def configs(count: int, queues: int = 4, first: int = 0) -> dict[str, TopicConfig]:
    return {f"t{n}": TopicConfig(f"t{n}", queues, queues) for n in range(first, first + count)}


def registration(broker: str = "a", queues: int = 4, **more: Any) -> Registration:
    values: dict[str, Any] = {
        "cluster": "c", "broker_id": 0, "address": f"{broker}:1", "connection": broker,
        "topics": configs(MANY, queues), "version": DataVersion(queues),
    }  # fmt: skip
    return Registration(broker=broker, **{**values, **more})


def fields(broker: str = "a", **more: str) -> dict[str, str]:
    return {"brokerName": broker, "brokerAddr": f"{broker}:1", "clusterName": "c",
            "haServerAddr": "x:1", "brokerId": "0", **more}  # fmt: skip


def test_topics_are_taken_over_and_dropped_in_slices() -> None:
    table = RouteTable()
    sizes = [len(table.list_topics()) for _ in table.register_in_slices(registration(), 0)]
    assert sizes == [SLICE_TOPICS * n for n in range(1, 8)]
    assert table.entry_count == MANY
    assert table.find_route("t0") is not None
    left = []
    for _ in table.unregister_in_slices("c", "a", "a:1"):
        left.append(len(table.list_topics()))
        assert table.find_route("t0") is None, "the broker is gone at once"
    assert left == [SLICE_TOPICS * n for n in range(7, 0, -1)]
    assert (table.entry_count, table.list_topics()) == (0, [])


def test_the_objects_of_a_registration_are_freed_in_slices_too() -> None:
    """To free a hundred thousand at once held the loop for 90 ms."""
    table, new = RouteTable(), registration()
    sizes = [len(new.topics) for _ in table.register_in_slices(new, 0)]
    assert sizes == [MANY - SLICE_TOPICS * n for n in range(1, 8)]
    assert not new.topics


def test_a_broker_that_goes_while_its_topics_are_taken_over_leaves_none() -> None:
    table = RouteTable()
    steps = table.register_in_slices(registration(), 0)
    next(steps)
    next(steps)
    run_all_slices(table.unregister_lost(table.registered_by("a")))
    run_all_slices(steps)
    assert (table.entry_count, table.list_topics(), table.list_brokers()) == (0, [], [])


def test_a_broker_that_comes_back_while_its_topics_are_dropped_keeps_the_new_ones() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    steps = table.unregister_in_slices("c", "a", "a:1")
    next(steps)
    table.register(registration(queues=9), 1)
    run_all_slices(steps)
    assert table.entry_count == MANY
    for name in ("t0", f"t{MANY - 1}"):
        route = table.find_route(name)
        assert route is not None
        assert route.queues == (QueueData("a", 9, 9, 6, 0),)


def test_of_two_registrations_the_later_one_counts_however_their_steps_mix() -> None:
    for seed in range(20):
        rng, table = Random(seed), RouteTable()
        first = table.register_in_slices(registration(queues=1), 0)
        next(first)
        later = table.register_in_slices(registration(queues=2), 1)
        running = [first, later]
        while running:
            steps = rng.choice(running)
            if next(steps, "end") == "end":
                running.remove(steps)
        assert {table.find_route(f"t{n}").queues[0].read_queues for n in range(MANY)} == {2}  # type: ignore[union-attr]


def test_permissions_of_many_topics_change_in_slices() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    assert len(list(table.wipe_write_permission("a"))) == 8
    assert {table.find_route(f"t{n}").queues[0].perm for n in range(MANY)} == {4}  # type: ignore[union-attr]


def test_other_brokers_are_not_looked_at_when_a_connection_ends() -> None:
    table = RouteTable()
    for number in range(50):
        table.register(registration(f"b{number}", topics={}, cluster=f"c{number}"), 0)
    assert [live.broker for live in table.registered_by("b7")] == ["b7"]
    run_all_slices(table.unregister_lost(table.registered_by("b7")))
    assert table.registered_by("b7") == []
    assert len(table.list_clusters()) == 49


def test_topics_and_brokers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RouteTable(entries_max=3000)
    table.register(registration(), 0)
    with pytest.raises(ProtocolError, match="The other brokers have 2048 topics and this one has"):
        table.register(registration("b"), 0)
    table.register(registration(queues=5), 0)  # its own do not count twice
    monkeypatch.setattr(routes, "BROKERS_MAX", 2)
    table.register(registration("b", topics={}), 0)
    with pytest.raises(ProtocolError, match=r"Too many brokers are registered \(limit 2\)"):
        table.register(registration("c", topics={}), 0)
    assert [data.broker for data in table.list_brokers()] == ["a", "b"]


def test_large_registrations_are_decoded_elsewhere_and_small_ones_at_once(
    parts: NameServerRequests,
) -> None:
    class Peer:
        class remote:  # noqa: N801
            address = "127.0.0.1"

        class local:  # noqa: N801
            address = "127.0.0.1"

        is_disconnected = False

    def body(count: int) -> bytes:
        return encode_register_body(RegisterBody(TopicTable(configs(count))))

    command = Command(Code.REGISTER_BROKER, fields(), body(10))
    assert isinstance(parts.handle(command, Peer(), 0), Command)  # type: ignore[arg-type]
    for code_fields, data in ((fields(), body(1000)), (fields(compressed="true"), None)):
        packed = encode_register_body(RegisterBody(TopicTable(configs(10))), compressed=True)
        command = Command(Code.REGISTER_BROKER, code_fields, data or packed)
        steps = parts.handle(command, Peer(), 0)  # type: ignore[arg-type]
        assert not isinstance(steps, Command)
        job = next(steps)
        assert job is not None, "it is decoded by another thread"
        found = steps.send(job()) if len(data or b"") else None
        assert found is None
        steps.close()


def test_what_a_registration_could_not_take_over_is_freed(parts: NameServerRequests) -> None:
    freed: list[int] = []
    parts.free_topics = lambda topics: freed.append(len(topics))
    parts.table._entries_max = 5
    body = encode_register_body(RegisterBody(TopicTable(configs(10))))

    class Peer:
        is_disconnected = False
        remote = local = type("Host", (), {"address": "127.0.0.1"})

    answer = parts.handle_now(Command(Code.REGISTER_BROKER, fields(), body), Peer(), 0)  # type: ignore[arg-type]
    assert (answer.code, freed) == (1, [10])
    assert "the limit for all together is 5" in (answer.remark or "")


def test_key_values_are_bounded_and_can_be_deleted(
    parts: NameServerRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "KEY_VALUES_BYTES_MAX", 2000)
    for number in range(10):
        parts.key_values.put("n", f"k{number}", "x" * 170)
    with pytest.raises(ProtocolError, match="the limit is 2000"):
        parts.key_values.put("n", "k10", "x" * 170)
    assert parts.key_values.get("n", "k10") is None
    monkeypatch.setattr(requests, "KEY_VALUES_BYTES_MAX", 100)
    parts.key_values.delete("n", "k0")
    assert parts.key_values.get("n", "k0") is None


def test_a_hundred_thousand_topics_take_no_step_of_more_than_milliseconds() -> None:
    table, new = RouteTable(), registration(topics=configs(100_000))
    longest_s = 0.0
    for steps in (table.register_in_slices(new, 0), table.unregister_in_slices("c", "a", "a:1")):
        is_over = False
        while not is_over:
            begin_s = time.thread_time()
            is_over = next(steps, "end") == "end"
            longest_s = max(longest_s, time.thread_time() - begin_s)
    assert longest_s < 0.06
