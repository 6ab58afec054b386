"""Stopped anywhere and started again: the streaming reader loses no row and repeats none.

Seeded histories with the reader's own classes and a real broker, without a JVM; SLUICEMQ_SEEDS says
how many. `Engine` does what Spark's micro-batch engine does with a Python source: it writes the end
of a micro-batch to the offset log, reads the partitions, hands the rows to a sink that takes each
micro-batch once (as Spark's file sink), writes the commit log; after a crash it plans the last
micro-batch again if the commit log lacks it. It may crash after every step. Meanwhile messages and
queues are added.
"""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.spark.schema import declared_columns, to_spark_schema
from sluicemq.spark.sources.stream import create_stream_reader
from thorough import seeds
from waiting import limit

ROOT = Path(__file__).parents[2]
SEEDS = seeds(20)
TAGS = "ABC"
CRASHES = ("after the end is known", "in the middle of reading", "before the commit log", "idle")


class CrashError(Exception):
    """The driver is gone."""


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [
        sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port", "0",
        "--store", str(tmp_path_factory.mktemp("store")), "--log-level", "warning",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            yield dict(part.split("=", 1) for part in ready.split()[1:])["nameserver"]
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(limit(30)) == 0


class World:
    """The topics of one history and every message sent to them, numbered."""

    def __init__(self, name_server: str, seed: int, names: list[str]) -> None:
        self.dice = random.Random(seed)
        self.names = names
        self.queues = 2
        self.sent = 0
        self.admin = Admin(name_server)
        self.producer = Producer(name_server)
        for name in names:
            self.admin.create_topic(name, queues=self.queues)

    def publish(self) -> None:
        topic = self.dice.choice(self.names)
        count = self.dice.randint(1, 12)
        messages = [
            Message(topic, str(number).encode() + b" " * self.dice.randint(0, 300),
                    tag=TAGS[number % 3], properties={"number": str(number)})
            for number in range(self.sent, self.sent + count)
        ]  # fmt: skip
        queue = self.dice.choice(self.producer.write_queues(topic))
        self.producer.send_batch(messages, queue=queue)
        self.sent += count

    def add_queue(self) -> None:
        self.queues += 1
        for name in self.names:
            self.admin.create_topic(name, queues=self.queues)
            self.producer.routes.expire(name)

    def close(self) -> None:
        self.admin.close()
        self.producer.close()


class Engine:
    """Spark's micro-batch engine around one checkpoint; `rows` is what the sink has."""

    def __init__(self, options: dict[str, str], world: World) -> None:
        self.options, self.world = options, world
        self.offsets: dict[int, str] = {}
        self.commits: set[int] = set()
        self.rows: dict[int, list[int]] = {}
        self.sent_before_start = 0
        self.start()

    def start(self) -> None:
        """A new driver with a new reader; what is not in the checkpoint is forgotten."""
        schema = to_spark_schema(declared_columns_of(self.options))
        self.reader = create_stream_reader(self.options, schema)
        self.initial: dict[str, Any] | None = None
        batch = max(self.offsets, default=-1)
        if batch >= 0 and batch not in self.commits:
            self.run(batch)

    def begin_of(self, batch: int) -> dict[str, Any]:
        if batch:
            begin: dict[str, Any] = json.loads(self.offsets[batch - 1])
            return begin
        if self.initial is None:
            if 0 not in self.offsets:
                self.sent_before_start = self.world.sent
            self.initial = json.loads(json.dumps(self.reader.initialOffset()))
        return self.initial

    def trigger(self, crash: str | None, *, always: bool = False) -> bool:
        """One trigger; False when there was nothing to do."""
        batch = max(self.offsets, default=-1) + 1
        begin = self.begin_of(batch)
        if self.world.dice.random() < 0.5:
            self.world.publish()  # between the two questions
        end = json.dumps(self.reader.latestOffset(begin, self.reader.getDefaultReadLimit()))
        if crash == CRASHES[0]:
            raise CrashError
        if batch and end == json.dumps(begin) and not always:
            return False
        if batch:
            self.reader.commit(begin)
        self.offsets[batch] = end
        self.run(batch, crash)
        return True

    def run(self, batch: int, crash: str | None = None) -> None:
        rows: list[int] = []
        for part in self.reader.partitions(self.begin_of(batch), json.loads(self.offsets[batch])):
            executor = pickle.loads(pickle.dumps(self.reader))
            for block in executor.read(pickle.loads(pickle.dumps(part))):
                rows += [int(body) for body in block.column("body").to_pylist()]
            if crash == CRASHES[1]:
                raise CrashError
        if batch not in self.rows:
            self.rows[batch] = rows
        else:
            assert sorted(rows) == sorted(self.rows[batch]), "a repeated micro-batch has other rows"
        if crash == CRASHES[2]:
            raise CrashError
        self.commits.add(batch)


def declared_columns_of(options: dict[str, str]) -> Any:
    from sluicemq.spark.options import parse_options

    return declared_columns(parse_options(options))


def options_of(
    dice: random.Random, name_server: str, names: list[str], seed: int
) -> dict[str, str]:
    options = {
        "nameServers": name_server, "columns": "body", "group": f"restarts-{seed}",
        "startingOffsets": dice.choice(["earliest", "latest"]),
    }  # fmt: skip
    if len(names) == 1:
        options["topic"] = names[0]
    else:
        options |= dice.choice([{"topics": ",".join(names)}, {"topicsPattern": f"s{seed}-.*"}])
    options |= dice.choice([
        {}, {"maxOffsetsPerTrigger": str(dice.randint(1, 20))},
        {"maxBytesPerTrigger": str(dice.randint(500, 9_000))},
    ])  # fmt: skip
    options |= dice.choice([{}, {"filter.tags": "A||C"}, {"filter.sql": "number > 20"}])
    return options | dice.choice([{}, {"minPartitions": "5"}, {"maxRecordsPerPartition": "3"}])


def wanted(options: dict[str, str], first: int, end: int) -> Counter[int]:
    numbers = range(first, end)
    if "filter.tags" in options:
        return Counter(number for number in numbers if number % 3 != 1)
    if "filter.sql" in options:
        return Counter(number for number in numbers if number > 20)
    return Counter(numbers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_row_is_lost_or_doubled_wherever_it_stops(name_server: str, seed: int) -> None:
    dice = random.Random(seed)
    names = [f"s{seed}-{index}" for index in range(dice.choice([1, 1, 2]))]
    world = World(name_server, seed, names)
    for _ in range(dice.randint(0, 4)):
        world.publish()
    options = options_of(dice, name_server, names, seed)
    engine = Engine(options, world)
    crashes = 0
    for _ in range(20):
        for _ in range(dice.randint(0, 2)):
            world.publish()
        if dice.random() < 0.05:
            world.add_queue()
        crash = dice.choice(CRASHES) if dice.random() < 0.4 else None
        try:
            engine.trigger(crash)
            crashed = crash == CRASHES[3]
        except CrashError:
            crashed = True
        if crashed:
            crashes += 1
            engine.reader.stop()
            engine.start()
    engine.reader.stop()
    engine.start()
    world.publish = lambda: None  # type: ignore[method-assign]
    triggers = 0
    while engine.trigger(None):
        triggers += 1
        assert triggers < 2_000, "the stream never comes to its end"
    engine.reader.commit(json.loads(engine.offsets[max(engine.offsets)]))
    found = Counter(number for rows in engine.rows.values() for number in rows)
    first = engine.sent_before_start if options["startingOffsets"] == "latest" else 0
    assert found == wanted(options, first, world.sent), f"{crashes} crashes"
    for topic in names:
        for queue in world.admin.queues(topic):
            committed = world.admin.committed_offset(options["group"], queue)
            assert committed == world.admin.offset_max(queue), "the group sees the job"
    engine.reader.stop()
    world.close()
