"""The status of a replica, and requests to change its role."""

import json
import os
from typing import Any

import pytest

from sluicemq.broker.replication.in_sync import InSyncReplicas
from sluicemq.broker.replication.status import ReplicaAdmin
from sluicemq.broker.settings import Settings
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import RequestError
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Handler, Peer
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.frames import Command


class Nobody:
    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


PEER = Peer(Nobody(), Host("10.0.0.9", 9), Host("10.0.0.1", 1))


class Slave:
    """A slave's connection."""

    replica_id = 2
    offset = 0
    remote = Host("10.0.0.2", 2)

    def close(self) -> None: ...


class Seat:
    """A role controller."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def status(self) -> dict[str, Any]:
        return {"role": "none", "epoch": 4, "inSync": [1, 2]}

    def switch(self, to: int | None) -> None:
        self.asked.append(to)

    def elect(self) -> None:
        self.asked.append("elect")

    def handlers(self, local: dict[int, Handler], *, is_slave: bool) -> dict[int, Handler]:
        return local

    def disconnected(self, peer: Peer) -> None: ...


def admin(role: str, seat: Seat | None = None) -> ReplicaAdmin:
    config = BrokerConfig(broker_role=role, broker_id=3, broker_name="b")
    settings, clock = Settings(config, StoreConfig()), VirtualClock()
    in_sync = None
    if role != "SLAVE":
        in_sync = InSyncReplicas(settings, clock, lambda: 1000)
        link = Slave()
        in_sync.add_slave(link)
        in_sync.record_ack(link, 900)
    return ReplicaAdmin(settings, in_sync, seat, lambda: 1000, lambda: (70, 8))


def status(asked: ReplicaAdmin) -> dict[str, Any]:
    found = json.loads(asked.status(Command(Code.SLUICE_REPLICA_STATUS), PEER).body)
    assert isinstance(found, dict)
    return found


def test_a_master_reports_what_its_slaves_have() -> None:
    found = status(admin("SYNC_MASTER"))
    assert (found["role"], found["id"], found["lagBytes"]) == ("master", 0, 0)
    assert found["confirmed"] == 900
    assert found["slaves"] == [
        {"id": 2, "address": "10.0.0.2:2", "ackOffset": 900, "lagBytes": 100, "lagMs": 0}
    ]
    assert found["pid"] == os.getpid()


def test_a_slave_reports_its_lag_and_the_role_controller_overrides_fields() -> None:
    found = status(admin("SLAVE"))
    assert (found["role"], found["id"], found["lagBytes"], found["lagMs"]) == ("slave", 3, 70, 8)
    found = status(admin("SLAVE", Seat()))
    assert (found["role"], found["epoch"], found["inSync"]) == ("none", 4, [1, 2])


def test_a_switch_and_an_election_need_a_role_controller() -> None:
    seat = Seat()
    asked = admin("SYNC_MASTER", seat)
    asked.switch(Command(Code.SLUICE_SWITCH_MASTER, {"brokerId": "2"}), PEER)
    asked.switch(Command(Code.SLUICE_SWITCH_MASTER), PEER)
    asked.elect(Command(Code.SLUICE_ELECT_MASTER), PEER)
    assert seat.asked == [2, None, "elect"]
    with pytest.raises(RequestError, match="must be a number"):
        asked.switch(Command(Code.SLUICE_SWITCH_MASTER, {"brokerId": "-1"}), PEER)
    with pytest.raises(RequestError, match="sluiceConsensus"):
        admin("SYNC_MASTER").switch(Command(Code.SLUICE_SWITCH_MASTER), PEER)
