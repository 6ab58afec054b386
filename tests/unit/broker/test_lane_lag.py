"""The lag of lanes is that of a full scan, with and without property columns.

A lane also reads the same messages by columns and by records.
"""

import dataclasses
import random
from unittest import mock

import pytest

from simulation.lanes import ModelConsumer, Shared, Wanted, balance, work
from simulation.stepped import SMALL, SteppedBroker, send_fields
from sluicemq.broker.lanes.filters import RuleFilter, get_rule_filter
from sluicemq.broker.lanes.rules import MATCH_NOTHING, LaneRule, compute_rules
from sluicemq.broker.lanes.rules import subscription_key as key_of
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import CONTRACT, GroupConfig, TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.columns import blocks as columns_blocks
from sluicemq.store.columns import file as columns_file
from sluicemq.wire import bodies
from thorough import seeds

pytestmark = pytest.mark.slow

SEEDS = seeds(20)
WISHES: list[Wanted] = [
    {"T": (TAG, "t1 || t2")}, {"T": (TAG, "t3")}, {"T": (TAG, "*")}, {"T": (SQL92, "n > 5")},
    {"T": (SQL92, "s = 'x' OR n > 7")}, {"T": (SQL92, "TAGS = 't1' AND s IS NULL")},
]  # fmt: skip


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        mode = "off" if seed % 3 == 0 else "auto"
        self.broker = SteppedBroker(store_config=dataclasses.replace(SMALL, columns_mode=mode))
        self.broker.core.topics.put(TopicConfig("T", 2, 2))
        self.broker.core.groups.put(GroupConfig("G", attributes={CONTRACT: "lanes"}))
        self.client = self.broker.connect()
        self.shared = Shared("G")
        self.consumers: list[ModelConsumer] = []
        self.sent = 0

    def act(self) -> None:
        event = self.rng.random()
        if event < 0.15 or len(self.consumers) < 2:
            name = f"c{self.sent}-{len(self.consumers)}"
            wanted = self.rng.choice(WISHES)
            self.consumers.append(ModelConsumer(self.broker, self.shared, name, wanted, 1))
        elif event < 0.25:
            self.consumers.pop(self.rng.randrange(len(self.consumers))).leave(says_so=True)
        elif event < 0.3:
            self.broker.advance(31)
        self.send()
        balance(self.consumers)
        work(self.consumers, self.rng)
        self.broker.pass_seconds(1)
        if self.rng.random() < 0.3:
            self.seal()

    def send(self) -> None:
        for _ in range(self.rng.randrange(12)):
            self.sent += 1
            pick = self.rng.choice
            properties = {
                "UNIQ_KEY": f"U{self.sent}", "TAGS": pick(["t1", "t2", "t3", "it's", ""]),
                "n": pick(["1", "6", "9", "x", ""]), "s": pick(["x", "y", ""]),
            }  # fmt: skip
            text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items() if value)
            fields = send_fields(properties=text, e=self.rng.randrange(2))
            assert self.client.call(310, fields, b"m%d" % self.sent).code == 0

    def seal(self) -> None:
        self.broker.store.sync()
        for step in self.broker.store.columns.seal_blocks():
            if callable(step):
                step()

    def told(self) -> bodies.GroupMatching:
        answer = self.client.call(900131, {"consumerGroup": "G", "topic": "T"})
        assert answer.code == 0, answer.remark
        return bodies.decode_group_matching(answer.body)[0]

    def properties(self, queue_id: int, offset: int) -> dict[str, str]:
        data = b"".join(self.broker.store.reader.read("T", queue_id, offset, 1).data)
        return dict(decode_records(data)[0].properties)

    def found(self, lane_id: str, queue_id: int) -> int:
        """Return the lag of a lane, found by examining each message."""
        lanes = self.broker.core.lanes.table["G"].lanes.values()
        lane_queue = next(lane for lane in lanes if lane.id == lane_id).queues["T", queue_id]
        low, end = self.broker.store.queue_offsets("T", queue_id)
        return sum(
            RuleFilter(lane_queue.find_rule(offset)[0]).by_commit_log(
                self.properties(queue_id, offset)
            )
            for offset in range(max(lane_queue.current_offset, low), end)
        )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_lag_of_each_lane_is_that_of_a_full_scan(seed: int) -> None:
    with (
        mock.patch.object(columns_blocks, "BLOCK_ROWS", 16),
        mock.patch.object(columns_blocks, "SLOT_ROWS", 4),
        mock.patch.object(columns_file, "PROOF_ROWS", 4),
    ):
        world = World(seed)
        states = 0
        for _ in range(12):
            world.act()
            if "G" not in world.broker.core.lanes.table:
                continue
            states += 1
            told = world.told()
            for queue in told.queues:
                lanes = {
                    lane.lane: one
                    for lane in told.lanes
                    for one in lane.queues
                    if one.queue_id == queue.queue_id
                }
                assert {name: one.matching for name, one in lanes.items()} == {
                    name: world.found(name, queue.queue_id) for name in lanes
                }
                assert queue.matching == sum(one.matching or 0 for one in lanes.values())
                assert queue.committed == min(one.committed for one in lanes.values())
        assert states


def test_the_lag_of_a_group_counts_undelivered_messages_and_not_skipped_ones() -> None:
    world = World(1)
    wishes: list[Wanted] = [{"T": (TAG, "t1")}, {"T": (TAG, "t2")}]
    for number, wanted in enumerate(wishes):
        world.consumers.append(ModelConsumer(world.broker, world.shared, f"c{number}", wanted, 1))
    balance(world.consumers)
    for tag in ("t1", "t1", "t2", "t3"):
        fields = send_fields(properties=f"TAGS\x01{tag}\x02")
        assert world.client.call(310, fields, b"x").code == 0
    assert [queue.matching for queue in world.told().queues] == [3, 0]
    first = world.consumers[0]
    for queue in list(first.readings):
        first.pull(queue)
        first.finish(queue, len(first.readings[queue].in_hand))
    first.commit()
    told = world.told()
    assert [queue.matching for queue in told.queues] == [1, 0]
    assert [(lane.expression, lane.queues[0].matching) for lane in told.lanes] == [
        ("t1", 0),
        ("t2", 1),
    ]
    assert [lane.queues[0].committed for lane in told.lanes] == [4, 0]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_rule_takes_the_same_messages_by_columns_and_by_records(seed: int) -> None:
    with (
        mock.patch.object(columns_blocks, "BLOCK_ROWS", 16),
        mock.patch.object(columns_blocks, "SLOT_ROWS", 4),
        mock.patch.object(columns_file, "PROOF_ROWS", 4),
    ):
        world = World(3 * seed + 1)
        for _ in range(8):
            world.send()
        world.seal()
        keys = [
            key_of(
                "G",
                [parse_subscription(topic, text, kind) for topic, (kind, text) in wanted.items()],
            )
            for wanted in world.rng.sample(WISHES, 4)
        ]
        for rule in compute_rules("T", keys[:2], keys[2:]).values():
            _is_same(world, rule)
        for rule in compute_rules("%RETRY%G", keys[:2], keys[2:]).values():
            _is_same(world, rule)
        _is_same(world, MATCH_NOTHING)


def _is_same(world: World, rule: LaneRule) -> None:
    for queue_id in range(2):
        low, end = world.broker.store.queue_offsets("T", queue_id)
        offset, got = low, []
        while offset < end:
            result = world.broker.store.reader.read(
                "T", queue_id, offset, 5, None, get_rule_filter(rule)
            )
            got += [record.queue_offset for record in decode_records(b"".join(result.data))]
            offset = result.next_offset
        wanted = [at for at in range(low, end)
                  if RuleFilter(rule).by_commit_log(world.properties(queue_id, at))]  # fmt: skip
        codes_lie = [at for at in got if at not in wanted]
        assert [at for at in got if at in wanted] == wanted
        assert not codes_lie, "tags here have different codes"
