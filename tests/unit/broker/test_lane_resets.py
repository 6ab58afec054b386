"""Which client is redirected when a lane goes back, and which may read a group with lanes."""

import pytest

from simulation.lanes import ModelConsumer, Shared, Wanted, balance, read_all
from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.broker.offsets import REDIRECTS_MAX, Resets
from sluicemq.model.subscription import TAG
from sluicemq.testing.virtual import RESOLUTION_S, VirtualClock
from sluicemq.wire import bodies


def test_a_parked_pull_does_not_prove_that_its_reader_knows_the_reset() -> None:
    resets = Resets()
    resets.add("lane", "T", 0, 3)
    assert resets.redirect("lane", "T", 0, 8, "c1", is_parked=True) == 3
    # Another pull of the same client, from before its connection broke, stands at that offset.
    assert resets.redirect("lane", "T", 0, 3, "c1", is_parked=True) == 3
    for _ in range(2 * REDIRECTS_MAX):
        assert resets.redirect("lane", "T", 0, 8, "c1", is_parked=True) == 3
    assert resets.blocks_commits("lane", "T", 0)


def test_the_client_that_reads_the_queue_now_is_redirected() -> None:
    resets = Resets()
    resets.add("lane", "T", 0, 7)
    assert resets.redirect("lane", "T", 0, 12, "gone") == 7
    assert resets.redirect("lane", "T", 0, 12, "reader") == 7  # it was not redirected
    assert resets.blocks_commits("lane", "T", 0)
    assert resets.redirect("lane", "T", 0, 7, "reader") is None
    assert not resets


def test_a_reset_of_a_group_without_lanes_is_known_with_the_next_pull() -> None:
    resets = Resets()
    resets.add("G", "T", 0, 5)
    assert resets.redirect("G", "T", 0, 9) == 5
    assert resets.redirect("G", "T", 0, 5) is None
    assert not resets.blocks_commits("G", "T", 0)


def test_virtual_time_passes_however_near_the_timer_is() -> None:
    clock = VirtualClock()
    clock._let_pass(184.537369)
    before = clock.monotonic_s()
    clock._let_pass(1e-10)
    assert before < clock.monotonic_s() <= before + 2 * RESOLUTION_S


def _takes_all(broker: SteppedBroker, shared: Shared) -> list[ModelConsumer]:
    """Return two consumers: one subscribes to all messages, the other to tag1."""
    wishes: list[Wanted] = [{"T": (TAG, "*")}, {"T": (TAG, "tag1")}]
    return [ModelConsumer(broker, shared, f"c{n}", wanted, 1) for n, wanted in enumerate(wishes)]


def _produce(client: SteppedClient, *names: str) -> None:
    for name in names:
        fields = send_fields("T", f"UNIQ_KEY\x01{name}\x02TAGS\x01{name[:4]}\x02", e=0)
        assert client.call(310, fields, name.encode()).code == 0


def _read(*consumers: ModelConsumer) -> None:
    read_all(list(consumers), 4)


def test_a_new_lane_is_not_sent_where_the_one_of_its_subscription_was_before_it(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """Found by seed 41 of the split cluster: a lane ended before its reader knew of a redirect."""
    shared = Shared("G")
    late: Wanted = {"T": (TAG, "tag3")}
    stay = _takes_all(broker, shared)
    gone = ModelConsumer(broker, shared, "gone", late, 1)
    _produce(client, "tag3-0", "tag2-1")
    _read(*stay, gone)
    lanes = broker.core.lanes.table["G"]
    gone.leave(says_so=True)
    key = next(key for key, lane in lanes.lanes.items() if not lane.members)
    lanes.resets.add(key, "T", 0, 0)
    broker.pass_seconds(31)
    broker.pass_seconds(1)
    assert len(lanes.lanes) == 2, "the lane has ended: others want all its messages"
    assert not lanes.resets
    new = ModelConsumer(broker, shared, "new", late, 1)
    _read(*stay, new)
    assert set(shared.deliveries.values()) == {1}


def test_a_member_that_asked_for_its_offset_before_its_heartbeat_begins_at_the_offset_of_its_lane(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """It received the group's committed offset, the lowest of all lanes; its lane is further on."""
    shared = Shared("G")
    stay = _takes_all(broker, shared)
    _produce(client, "tag1-0", "tag1-1", "tag3-2")
    _read(stay[0])  # the other lane has not read
    queue = next(queue for queue in stay[0].readings if queue.topic == "T")
    fields = {"consumerGroup": "G", "topic": "T", "queueId": queue.queue_id}
    answer = client.call(14, fields)
    offset = int((answer.fields or {})["offset"])
    stay[0].leave(says_so=True)
    late = ModelConsumer(broker, shared, "late", stay[0].wanted, 1)
    late.begin_at(queue, offset)
    for _ in range(3):
        late.pull(queue)
    assert offset == 0
    assert shared.deliveries == {"tag1-0": 1, "tag1-1": 1, "tag3-2": 1}


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "not-noticed"])
def test_a_client_that_changes_over_a_new_connection_does_not_read_on_where_it_was_before(
    broker: SteppedBroker, client: SteppedClient, is_noticed: bool
) -> None:
    """Found by seed 203 of the split cluster.

    The old connection may exist for two minutes after it broke. The subscription on it no longer
    says for which lane the client pulls.
    """
    shared = Shared("G")
    narrow: Wanted = {"T": (TAG, "tag1")}
    one = ModelConsumer(broker, shared, "one", narrow, 1)
    two = ModelConsumer(broker, shared, "two", {"T": (TAG, "*")}, 1)
    balance([one, two])
    _produce(client, "tag1-0", "tag2-1")
    for each in (queue for queue in two.readings if queue.topic == "T"):
        two.pull(each)
    one.connection.call(35, {"clientID": "one", "consumerGroup": "G"})
    if is_noticed:
        two.connection.disconnect()
    two.wanted, two.version = narrow, 2
    two.connect(broker)  # it reads on: it does not know that it is in another lane
    members = bodies.decode_consumer_list(client.call(38, {"consumerGroup": "G"}).body)
    assert set(members) == {"two"}
    lanes = broker.core.lanes.table["G"].lanes
    assert sum("two" in lane.members for lane in lanes.values()) == 1
    for _ in range(3):
        _read(two)
    assert shared.deliveries == {"tag1-0": 1, "tag2-1": 1}


def test_a_lane_that_moved_on_by_itself_is_not_sent_behind_that(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """Found by seed 94 of the split cluster: no member was connected to follow the reset."""
    resets = Resets()
    resets.add("lane", "T", 0, 5)
    resets.raise_offset("lane", "T", 0, 10)
    resets.raise_offset("lane", "T", 1, 10)
    assert resets.redirect("lane", "T", 0, 14, "c") == 10
    resets.raise_offset("lane", "T", 0, 3)
    assert resets.redirect("lane", "T", 0, 14, "c") == 10
    assert len(resets) == 1
    shared = Shared("G")
    stay = _takes_all(broker, shared)
    late: Wanted = {"T": (TAG, "tag3")}
    gone = ModelConsumer(broker, shared, "gone", late, 1)
    _produce(client, "tag3-0", "tag2-1")
    _read(*stay, gone)
    lanes = broker.core.lanes.table["G"]
    places = next(iter(lanes.lanes.values())).queues
    queue = next(queue for queue, place in places.items() if place.current_offset == 2)
    gone.leave(says_so=True)
    key = next(key for key, lane in lanes.lanes.items() if not lane.members)
    lanes.resets.add(key, *queue, 0)
    back = ModelConsumer(broker, shared, "back", late, 1)
    _read(*stay, back)
    assert set(shared.deliveries.values()) == {1}
    assert not lanes.resets
