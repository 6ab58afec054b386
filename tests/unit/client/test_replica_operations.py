"""Which replica is master, told from what name servers and brokers say."""

import json
from typing import Any

import pytest

from sluicemq.client.admin.replicas import elect_master, replicas, switch_master
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, ConnectionLostError, RequestError
from sluicemq.model.topic import BrokerData
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.frames import Command

A, B, JAVA = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"


def said(broker_id: int, role: str, **more: Any) -> Command:
    values = {"id": broker_id, "role": role, "epoch": 7, "pid": 1, "slaves": []} | more
    return Command(0, body=json.dumps(values).encode())


def run(
    talk: Conversation[Any], brokers: dict[str, dict[int, str]], answers: dict[str, Any]
) -> Any:
    """The result of a talk; `answers` by address, or by (address, code)."""
    info = bodies.ClusterInfo(
        {name: BrokerData("c", name, addresses) for name, addresses in brokers.items()},
        {"c": tuple(brokers)},
    )
    asked = []
    try:
        step: Any = next(talk)
        while True:
            assert isinstance(step, Call)
            asked.append((step.address, step.command.code))
            if step.command.code == Code.GET_BROKER_CLUSTER_INFO:
                answer: Any = Command(0, body=bodies.encode_cluster_info(info))
            else:
                found = answers.get((step.address, step.command.code))
                answer = found or answers.get(step.address, Command(3, remark="not supported"))
            step = talk.throw(answer) if isinstance(answer, Exception) else talk.send(answer)
    except StopIteration as done:
        return done.value


def directory() -> Directory:
    return Directory("10.0.0.9:9", SYSTEM_CLOCK)


def test_the_master_says_how_far_its_slaves_are_and_who_is_in_sync() -> None:
    slaves = [{"id": 2, "lagBytes": 100, "lagMs": 5}]
    answers = {
        A: said(1, "master", inSync=[1, 2, 3], slaves=slaves, address=A, lagBytes=0, lagMs=0),
        B: said(2, "slave", address=B, lagBytes=None),
    }
    found = run(replicas(directory()), {"b": {0: A, 2: B}}, answers)
    assert [(row["id"], row["role"], row["inSync"], row["lagBytes"]) for row in found] == [
        (1, "master", True, 0), (2, "slave", True, 100), (3, "gone", True, None),
    ]  # fmt: skip


def test_of_two_that_say_they_are_master_the_newer_one_is_believed_about_the_set() -> None:
    answers = {
        A: said(1, "master", epoch=7, inSync=[1, 2], address=A),
        B: said(2, "master", epoch=8, inSync=[2], address=B),
    }
    found = run(replicas(directory()), {"b": {0: B, 1: A}}, answers)
    assert [(row["id"], row["inSync"]) for row in found] == [(1, False), (2, True)]


def test_a_replica_that_waits_says_why() -> None:
    answers = {A: said(1, "none", reason="There is no record."), B: said(2, "slave", reason="")}
    found = run(replicas(directory()), {"b": {0: A, 2: B}}, answers)
    assert [row["state"] for row in found] == ["There is no record.", "up"]


def test_without_a_master_a_slave_says_who_is_missed() -> None:
    answers = {B: said(2, "slave", epoch=7, inSync=[1], address=B)}
    found = run(replicas(directory()), {"b": {2: B}}, answers)
    assert [(row["id"], row["role"], row["inSync"]) for row in found] == [
        (1, "gone", True), (2, "slave", False),
    ]  # fmt: skip


def test_a_broker_of_rocketmq_and_one_that_is_not_there_are_shown_with_what_the_routes_say() -> (
    None
):
    answers = {A: ConnectionLostError("gone.")}
    found = run(replicas(directory()), {"b": {0: A, 1: JAVA}}, answers)
    assert [(row["id"], row["role"], row["epoch"]) for row in found] == [
        (0, "gone", None), (1, "slave", None),
    ]  # fmt: skip
    assert found[0]["state"] == "unreachable: gone"


def test_a_replica_that_waits_says_why_in_its_state() -> None:
    answers = {
        A: said(1, "none", reason="There is no record.", address=A),
        B: said(2, "slave", reason="", address=B),
    }
    found = run(replicas(directory()), {"b": {1: A, 2: B}}, answers)
    assert [row["state"] for row in found] == ["There is no record.", "up"]


def test_a_second_process_with_the_id_of_the_master_is_not_in_sync_and_cannot_be_elected() -> None:
    answers = {
        A: said(1, "master", inSync=[1], address=A, lagBytes=0),
        B: said(1, "none", reason="Replica 1 is also running.", address=B),
    }
    brokers = {"b": {0: A, 1: B}}
    found = run(replicas(directory()), brokers, answers)
    assert [(row["address"], row["inSync"], row["state"]) for row in found] == [
        (A, True, "up"), (B, False, "Replica 1 is also running."),
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match=f"is running at {A} and {B}"):
        run(elect_master(directory(), 1), brokers, answers)


def test_a_switch_is_asked_of_the_master_and_an_election_of_the_replica() -> None:
    answers = {
        A: said(1, "master", inSync=[1], address=A), B: said(2, "none", address=B),
        (A, Code.SLUICE_SWITCH_MASTER): Command(0), (B, Code.SLUICE_ELECT_MASTER): Command(0),
    }  # fmt: skip
    brokers = {"b": {0: A, 2: B}}
    assert run(switch_master(directory(), to=2), brokers, answers)["address"] == A
    assert run(elect_master(directory(), 2), brokers, answers)["address"] == B
    refused = answers | {(A, Code.SLUICE_SWITCH_MASTER): Command(1, remark="2 is not in sync.")}
    with pytest.raises(RequestError, match="2 is not in sync"):
        run(switch_master(directory(), to=2), brokers, refused)
    with pytest.raises(ConfigurationError, match="has no replica 5 that responds"):
        run(elect_master(directory(), 5), brokers, answers)
    with pytest.raises(ConfigurationError, match="no master"):
        run(switch_master(directory()), {"b": {1: JAVA}}, {})
    with pytest.raises(ConfigurationError, match="several brokers"):
        run(switch_master(directory()), brokers | {"c": {0: JAVA}}, answers)
