"""Selectors and strategies as objects: ready ones compute what the core does; one's own work."""

import pytest

from sluicemq.client.core.balance import allocate, strategy
from sluicemq.errors import ConfigurationError
from sluicemq.model.ids import java_hash
from sluicemq.rocketmq import (
    AllocateMachineRoomNearby,
    AllocateMessageQueueAveragely,
    AllocateMessageQueueAveragelyByCircle,
    AllocateMessageQueueByConfig,
    AllocateMessageQueueByMachineRoom,
    AllocateMessageQueueConsistentHash,
    AllocateMessageQueueStrategy,
    MachineRoomResolver,
    Message,
    MessageQueue,
    SelectMessageQueueByHash,
    SelectMessageQueueByRandom,
)

QUEUES = [
    MessageQueue("t", broker, number) for broker in ("hz@a", "hz-b", "sh@c") for number in range(3)
]
MEMBERS = ["hz-1@7", "sh-2@8"]
MESSAGE = Message("t", b"")


@pytest.mark.parametrize(
    ("ready", "named"),
    [
        (AllocateMessageQueueAveragely(), strategy("average")),
        (AllocateMessageQueueAveragelyByCircle(), strategy("average_circle")),
        (AllocateMessageQueueConsistentHash(), strategy("consistent_hash")),
        (AllocateMessageQueueConsistentHash(50), strategy("consistent_hash", virtual_nodes=50)),
        (AllocateMessageQueueByConfig(QUEUES[:2]), strategy("config", queues=QUEUES[:2])),
        (AllocateMessageQueueByMachineRoom(["hz"]), strategy("machine_room", rooms=["hz"])),
    ],
)
@pytest.mark.parametrize("member", MEMBERS)
def test_a_ready_strategy_is_the_core_s(ready, named, member) -> None:
    expected = allocate(named, member, QUEUES, MEMBERS)
    assert allocate(ready.to_core_strategy("g"), member, QUEUES, MEMBERS) == expected
    own = ready.allocate("g", member, QUEUES, MEMBERS)
    assert own == expected
    assert all(queue.broker_name for queue in own)


def test_settings_by_setter() -> None:
    configured = AllocateMessageQueueByConfig()
    configured.set_message_queue_list(QUEUES[1:2])
    assert configured.allocate("g", "a", QUEUES, ["a"]) == QUEUES[1:2]
    rooms = AllocateMessageQueueByMachineRoom()
    rooms.set_consumeridcs({"sh"})
    assert {one.broker for one in rooms.allocate("g", "a", QUEUES, ["a"])} == {"sh@c"}


class Resolver(MachineRoomResolver):
    def broker_deploy_in(self, message_queue: MessageQueue) -> str:
        return message_queue.get_broker_name()[:2]

    def consumer_deploy_in(self, client_id: str) -> str:
        return client_id[:2]


class Groups(AllocateMessageQueueStrategy):
    def allocate(self, consumer_group, current_cid, mq_all, cid_all):
        assert consumer_group == "g"
        return mq_all if current_cid == cid_all[-1] else []


def test_nearby_by_a_resolver_of_one_s_own() -> None:
    nearby = AllocateMachineRoomNearby(AllocateMessageQueueAveragely(), Resolver())
    assert nearby.allocate("g", "sh-2@8", QUEUES, MEMBERS) == QUEUES[6:]
    assert allocate(nearby.to_core_strategy("g"), "hz-1@7", QUEUES, MEMBERS) == sorted(QUEUES[:6])
    inner = AllocateMachineRoomNearby(Groups(), Resolver())
    assert inner.allocate("g", "sh-2@8", QUEUES, MEMBERS) == QUEUES[6:]


def test_a_strategy_of_one_s_own_gets_group_and_sorted_lists() -> None:
    chosen = Groups().to_core_strategy("g")
    assert allocate(chosen, "sh-2@8", QUEUES[::-1], MEMBERS[::-1]) == sorted(QUEUES)
    assert allocate(chosen, "hz-1@7", QUEUES, MEMBERS) == []


@pytest.mark.parametrize(
    ("arg", "hashed"),
    [("key", java_hash("key")), (7, 7), (-7, -7), (2**40 + 3, 2**8 + 3), (2**63 - 1, -(2**31))],
)
def test_by_hash_as_java_hashes(arg: object, hashed: int) -> None:
    chosen = SelectMessageQueueByHash().select(QUEUES, MESSAGE, arg)
    assert chosen == QUEUES[abs(hashed) % len(QUEUES)]


def test_by_hash_of_nothing_else() -> None:
    with pytest.raises(ConfigurationError, match=r"1\.5"):
        SelectMessageQueueByHash().select(QUEUES, MESSAGE, 1.5)


def test_by_random() -> None:
    assert SelectMessageQueueByRandom().select(QUEUES, MESSAGE, None) in QUEUES
