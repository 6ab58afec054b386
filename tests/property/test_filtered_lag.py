"""Lag through a filter is what a look at every message finds, whatever happened before: random
messages, commits, resets, filters, deletions and questions, on a stepped broker."""

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from simulation.stepped import SMALL, SteppedBroker, pull_fields, send_fields
from sluicemq.broker.consume import matching
from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.subscriptions import compile_sql92, parse_subscription, tag_matches
from sluicemq.model.ids import java_hash
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.columns import blocks as columns_blocks
from sluicemq.store.columns import file as columns_file
from sluicemq.wire import bodies

pytestmark = pytest.mark.slow

FILTERS = [
    ("*", "TAG"), ("t1", "TAG"), ("t1 || t2", "TAG"), ("Aa", "TAG"), ("Aa || t2", "TAG"),
    ("none", "TAG"), (" || ", "TAG"), ("n > 5", "SQL92"), ("n > 5 OR s = 'x'", "SQL92"),
    ("s = 'x' OR n > 5", "SQL92"), ("s IS NULL", "SQL92"), ("NOT (n < 7)", "SQL92"),
    ("UNIQ_KEY = 'U3' OR TAGS = 't1'", "SQL92"), ("KEYS > 4 AND s = 'x'", "SQL92"),
    ("n BETWEEN 2 AND 8 AND TAGS <> 'BB'", "SQL92"), ("FALSE", "SQL92"),
]  # fmt: skip
TAGS = ["t1", "t2", "Aa", "BB", ""]  # Aa and BB have one hash
QUEUES = 2
assert java_hash("Aa") == java_hash("BB")


@contextmanager
def small_steps() -> Iterator[None]:
    with (
        mock.patch.object(columns_blocks, "BLOCK_ROWS", 16),
        mock.patch.object(columns_blocks, "SLOT_ROWS", 4),
        mock.patch.object(columns_file, "PROOF_ROWS", 4),
        mock.patch.object(matching, "TAG_UNITS", 8),
        mock.patch.object(matching, "ROWS_INLINE", 2),
        mock.patch.object(matching, "RECORDS_PER_STEP", 3),
    ):
        yield


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        mode = "off" if seed % 5 == 0 else "auto"
        self.broker = SteppedBroker(store_config=dataclasses.replace(SMALL, columns_mode=mode))
        self.broker.core.topics.put(TopicConfig("T", QUEUES, QUEUES))
        self.broker.core.groups.put(GroupConfig("G"))
        self.client = self.broker.connect()
        self.filter = self.random.choice(FILTERS)
        self.sent = 0

    def act(self) -> None:
        self.random.choices(
            [self.send, self.commit, self.change, self.pull, self.seal, self.recreate],
            [6, 4, 1, 3, 2, 0.2],
        )[0]()

    def send(self) -> None:
        for _ in range(self.random.randrange(1, 12)):
            self.sent += 1
            pick = self.random.choice
            properties = {
                "UNIQ_KEY": f"U{self.sent}", "TAGS": pick(TAGS), "KEYS": pick(["1", "9", "k"]),
                "n": pick(["1", "6", "9", "7.5", "x", ""]), "s": pick(["x", "y", ""]),
            }  # fmt: skip
            text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items() if value)
            fields = send_fields(properties=text, e=self.random.randrange(QUEUES))
            assert self.client.call(310, fields, b"x").code == 0

    def commit(self) -> None:
        queue_id = self.random.randrange(QUEUES)
        end = self.broker.store.queue_offsets("T", queue_id)[1]
        self.broker.core.offsets.commit("G", "T", queue_id, self.random.randint(0, end + 1))

    def change(self) -> None:
        self.filter = self.random.choice(FILTERS)

    def pull(self) -> None:
        expression, kind = self.filter
        fields = pull_fields(
            offset=0, subscription=expression, expressionType=kind, maxMsgNums=5,
            queueId=self.random.randrange(QUEUES),
        )  # fmt: skip
        self.client.call(11, fields)

    def seal(self) -> None:
        self.broker.store.sync()
        for step in self.broker.store.columns.seal_blocks():
            if callable(step):
                step()

    def recreate(self) -> None:
        self.broker.store.delete_topic("T")
        self.broker.core.offsets.forget(topic="T")

    def told(self) -> bodies.GroupMatching:
        expression, kind = self.filter
        fields = {
            "consumerGroup": "G", "topic": "T", "subscription": expression, "expressionType": kind,
        }  # fmt: skip
        answer = self.client.call(900131, fields)
        assert answer.code == 0, answer.remark
        return bodies.decode_group_matching(answer.body)[0]

    def found(self, queue_id: int) -> int:
        """By a look at every message."""
        first, end = self.broker.store.queue_offsets("T", queue_id)
        start = min(max(self.broker.core.offsets.committed("G", "T", queue_id), first), end)
        expression, kind = self.filter
        said = parse_subscription("T", expression, kind)
        count = 0
        for offset in range(start, end):
            data = b"".join(self.broker.store.reader.read("T", queue_id, offset, 1).data)
            message = decode_records(data)[0]
            if kind == "TAG":
                is_wanted = said.is_everything or java_hash(message.tag or "") in said.codes
                count += is_wanted and tag_matches(said, message.tag)
                continue
            try:
                count += compile_sql92(expression).evaluate(message.properties) is True
            except FilterEvaluationError:
                continue
        return count


@pytest.mark.parametrize("seed", range(50))
def test_filtered_lag_is_what_a_look_at_every_message_finds(seed: int) -> None:
    with small_steps():
        world = World(seed)
        for state in range(20):
            for _ in range(4):
                world.act()
            told = world.told()
            assert told.expression == world.filter[0]
            for queue in told.queues:
                assert queue.matching == world.found(queue.queue_id), (
                    seed, state, world.filter, queue,
                )  # fmt: skip
