"""Allocation strategies: every queue has exactly one reader, whatever the order of the lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.client.core.balance import (
    STRATEGY_NAMES,
    ConsistentHash,
    MachineRoomNearby,
    MachineRooms,
    allocate,
    hash_to_ring,
    strategy,
)
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue, Strategy

ROOMS = ("hz", "sh")
EXACT: dict[str, Strategy] = {
    "average": strategy("average"),
    "average_circle": strategy("average_circle"),
    "consistent_hash": strategy("consistent_hash"),
    "machine_room": strategy("machine_room", rooms=ROOMS),
    "machine_room_nearby": strategy("machine_room_nearby"),
    "nearby by hash": MachineRoomNearby(ConsistentHash(3)),
}
queues = st.sets(
    st.builds(
        MessageQueue,
        st.just("t"),
        st.sampled_from(["hz@a", "sh@b", "hz@c"]) | st.sampled_from(["hz@d-1", "sh@e-1"]),
        st.integers(0, 12),
    ),
    max_size=40,
).map(list)
members = st.sets(
    st.builds("{}-10.0.0.{}@{}".format, st.sampled_from(ROOMS), st.integers(1, 9), st.integers()),
    min_size=1,
    max_size=7,
).map(list)


@pytest.mark.parametrize("name", EXACT)
@given(all_queues=queues, ids=members, data=st.data())
@settings(max_examples=60, deadline=None)
def test_each_queue_has_one_reader_in_any_order_of_the_lists(name, all_queues, ids, data):
    chosen = EXACT[name]
    shares = {one: allocate(chosen, one, all_queues, ids) for one in ids}
    assert sorted(queue for share in shares.values() for queue in share) == sorted(all_queues)
    shuffled = data.draw(st.permutations(all_queues)), data.draw(st.permutations(ids))
    assert {one: allocate(chosen, one, *shuffled) for one in ids} == shares


@pytest.mark.parametrize("name", EXACT)
def test_a_stranger_gets_nothing(name):
    assert allocate(EXACT[name], "hz-x", [MessageQueue("t", "hz@a", 0)], ["hz-y"]) == []


@given(all_queues=queues, ids=members)
@settings(max_examples=60, deadline=None)
def test_on_the_ring_only_queues_of_the_member_that_leaves_move(all_queues, ids):
    chosen = strategy("consistent_hash")
    gone, *rest = ids
    for one in rest:
        before = set(allocate(chosen, one, all_queues, ids))
        assert before <= set(allocate(chosen, one, all_queues, rest)), gone


def test_a_room_without_members_is_shared_and_a_foreign_room_is_left_alone():
    near = [MessageQueue("t", "hz-a", n) for n in range(4)]
    far = [MessageQueue("t", "bj-b", n) for n in range(4)]
    share = allocate(strategy("MACHINE_ROOM_NEARBY"), "hz-1", near + far, ["hz-1", "sh-2"])
    assert share == sorted([*near, *far[:2]])
    rooms = MachineRooms(frozenset({"hz"}))
    assert allocate(rooms, "c", [MessageQueue("t", "bj@b", 0)], ["c"]) == []


def test_configured_queues_and_a_function_of_ones_own():
    all_queues = [MessageQueue("t", "a", n) for n in range(4)]
    mine = strategy("config", queues=[all_queues[2], MessageQueue("other", "a", 0)])
    assert allocate(mine, "c", all_queues, []) == [all_queues[2]]
    odd = lambda client_id, queues, members: [q for q in queues if q.queue_id % 2]  # noqa: E731
    assert allocate(strategy(odd), "c", all_queues, ["c"]) == all_queues[1::2]


@pytest.mark.parametrize(
    ("name", "given"),
    [("avarage", {}), ("machine_room", {}), ("config", {}), ("consistent_hash", {"nodes": 3})],
)
def test_a_wrong_strategy_is_said_with_the_cure(name, given):
    with pytest.raises(ConfigurationError, match="strategy"):
        strategy(name, **given)


def test_names_are_ours_and_javas():
    assert set(STRATEGY_NAMES) == {
        "average", "average_circle", "config", "consistent_hash", "machine_room",
        "machine_room_nearby",
    }  # fmt: skip
    assert strategy("AVG") is strategy("average")
    assert hash_to_ring("MessageQueue [topic=T, brokerName=b, queueId=0]") < 1 << 32
    with pytest.raises(ConfigurationError, match="virtual_nodes must be"):
        ConsistentHash(0)
    with pytest.raises(ConfigurationError, match="room"):
        allocate(strategy("machine_room_nearby"), "-x", [], ["-x"])
