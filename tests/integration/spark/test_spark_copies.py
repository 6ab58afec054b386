"""Every kind of message: read, written, read again, and compared; at least once, exactly once, and
as a stream. Two brokers; one job a mode copies all kinds at once."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluicemq.client.core import requests
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.requests import expect_success
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.model.topic import GroupConfig, MessageQueue
from waiting import limit

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[3]
SOURCE, GROUP = "copies-source", "copies"
TRACE, RETRY, DEAD = "RMQ_SYS_TRACE_TOPIC", f"%RETRY%{GROUP}", f"%DLQ%{GROUP}"
TOPICS = (SOURCE, RETRY, DEAD, TRACE)
COLUMNS = "topic,broker,queue_id,queue_offset,msg_id,keys,tags,properties,body,flag,reconsume_times"
LEFT_BEHIND = {
    "DELAY",
    "REAL_TOPIC",
    "REAL_QID",
    "TIMER_DELAY_MS",
    "TIMER_DELIVER_MS",
    "TIMER_OUT_MS",
    "TIMER_ENQUEUE_MS",
    "TIMER_DEQUEUE_MS",
    "TIMER_ROLL_TIMES",
    "TRAN_MSG",
    "PGROUP",
    "__transactionId__",
    "CHECK_IMMUNITY_TIME_IN_SECONDS",
}
"""Of the messages below: what their first delivery needed. docs/spark.md has the whole list."""
LARGEST = os.urandom(4 << 20)


@pytest.fixture(scope="module")
def two_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name server of a cluster of broker-a and broker-b."""
    directory = tmp_path_factory.mktemp("two")
    settings = directory / "broker.conf"
    settings.write_text("traceTopicEnable=true\n")
    command = [
        sys.executable,
        "-m",
        "sluicemq",
        "up",
        "--brokers",
        "2",
        "--nameserver-port",
        "0",
        "--broker-port",
        "0",
        "--metrics-port",
        "0",
        "--no-proxy",
        "--store",
        str(directory / "store"),
        "--log-level",
        "warning",
        "-c",
        str(settings),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            assert ready.startswith("ready "), ready
            yield dict(part.split("=", 1) for part in ready.split()[1:])["nameserver"]
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(limit(30)) == 0


def _in_transaction(producer: Producer, queue: MessageQueue) -> None:
    message = Message(SOURCE, b"transaction", properties={"kind": "transactional"})
    with producer.transaction(message, queue=queue):
        pass


KINDS: dict[str, Callable[[Producer, MessageQueue], None]] = {
    "plain": lambda it, queue: it.send(
        Message(SOURCE, b"plain", "A", ("k1", "k2"), {"kind": "plain"}, flag=-7), queue=queue
    ),
    "ordered": lambda it, queue: [
        it.send(Message(SOURCE, b"%d" % n, sharding_key="key", properties={"kind": "ordered"}),
                queue=queue)
        for n in range(5)
    ],
    "delay level": lambda it, queue: it.send(
        Message(SOURCE, b"level", properties={"kind": "delay level"}, delay_level=1), queue=queue
    ),
    "timed": lambda it, queue: it.send(
        Message(SOURCE, b"timed", properties={"kind": "timed"}, delay_ms=50), queue=queue
    ),
    "timed, a time": lambda it, queue: it.send(
        Message(SOURCE, b"at", properties={"kind": "timed, a time"},
                deliver_at_ms=int(time.time() * 1000) + 50), queue=queue
    ),
    "transactional": _in_transaction,
    "compressed": lambda it, queue: it.send(
        Message(SOURCE, b"0" * 100_000, properties={"kind": "compressed"}), queue=queue
    ),
    "empty": lambda it, queue: it.send_outgoing(
        OutgoingMessage(SOURCE, b"", "UNIQ_KEY\x01E\x02kind\x01empty\x02", "E", 0, 0, True),
        queue=queue,
    ),
    "4 MiB": lambda it, queue: it.send(
        Message(SOURCE, LARGEST, properties={"kind": "4 MiB"}), queue=queue
    ),
    "unicode": lambda it, queue: it.send(
        Message(SOURCE, "Größe 😀 中".encode(), "täg-标签", ("schlüssel", "鍵"),
                {"kind": "unicode", "naïve": "😀", "中": " a  b "}), queue=queue
    ),
}  # fmt: skip
"""Sends a message of this kind to a queue."""


@pytest.fixture(scope="module")
def rows(two_brokers: str, spark: Any) -> list[Any]:
    """The source: every kind in a queue of each broker; retries, dead letters and traces."""
    kept = {}
    with Admin(two_brokers) as admin, Producer(two_brokers, trace=True) as producer:
        for topic in {SOURCE, RETRY, DEAD} & set(admin.topics()):  # of a try before this one
            admin.delete_topic(topic)
        admin.create_topic(SOURCE, queues=2)
        admin.create_group(GroupConfig(GROUP))
        queues = [queue for queue in producer.write_queues(SOURCE) if queue.queue_id == 1]
        assert [queue.broker for queue in queues] == ["broker-a", "broker-b"]
        for queue in queues:
            for send in KINDS.values():
                send(producer, queue)
        masters = admin.masters()
        for queue in queues:  # one comes again, one is a dead letter
            for level, body in ((1, b"again"), (-1, b"dead")):
                message = Message(SOURCE, body, "A", ("k",), {"kind": body.decode()})
                result = producer.send(message, queue=queue)
                record = admin.message_by_id(result.offset_message_id)
                command = requests.send_back(GROUP, record, SOURCE, level, None)
                expect_success(admin.call(masters[queue.broker], command), "")
        expected = {SOURCE: 2 * (len(KINDS) + 4 + 2), RETRY: 2, DEAD: 2}
        for _ in range(100):
            kept = {topic: count(admin, topic) for topic in expected}
            if kept == expected:
                break
            time.sleep(0.1)
    assert kept == expected
    return list(read(spark, two_brokers, topics=",".join(TOPICS)).collect())


def count(admin: Admin, topic: str) -> int:
    """How many messages a topic has, 0 when it is not there yet."""
    if admin.find_route(topic) is None:
        return 0
    return sum(it.offset_max for it in admin.topic_offsets(topic).values())


def read(spark: Any, name_server: str, **options: str) -> Any:
    given = {"nameServers": name_server, "columns": COLUMNS} | options
    return spark.read.format("rocketmq").options(**given).load()


def content(row: Any) -> tuple[Any, ...]:
    """What has to be equal in a copy."""
    properties = {n: v for n, v in row.properties.items() if n not in LEFT_BEHIND}
    where = row.broker, row.queue_id
    return (
        *where,
        row.tags,
        row.keys,
        row.flag,
        tuple(sorted(properties.items())),
        bytes(row.body),
    )


def copied(spark: Any, name_server: str, target: str, **options: str) -> None:
    frame = read(spark, name_server, topics=",".join(TOPICS))
    given = {"nameServers": name_server, "topic": target} | options
    frame.write.format("rocketmq").options(**given).mode("append").save()


def streamed(spark: Any, name_server: str, target: str, checkpoint: str) -> None:
    source = spark.readStream.format("rocketmq").options(
        nameServers=name_server,
        topics=",".join(TOPICS),
        columns=COLUMNS,
        startingOffsets="earliest",
    )
    (
        source.load().writeStream.format("rocketmq")
        .options(nameServers=name_server, topic=target, delivery="exactly-once")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True).start().awaitTermination(200)
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["at-least-once", "exactly-once", "stream"])
def test_every_kind_of_message_can_be_written_back(
    spark: Any, two_brokers: str, rows: list[Any], mode: str, tmp_path: Path
) -> None:
    target = f"copies-{mode}"
    with Admin(two_brokers) as admin:
        admin.create_topic(target, queues=2)
    if mode == "stream":
        streamed(spark, two_brokers, target, str(tmp_path))
    else:
        copied(spark, two_brokers, target, delivery=mode)
    found = read(spark, two_brokers, topic=target).collect()
    kinds = {row.properties.get("kind") for row in rows}
    assert kinds == {*KINDS, "again", "dead", None}, "None is of the traces"
    assert {row.topic for row in rows} == {*TOPICS}
    assert Counter(map(content, found)) == Counter(map(content, rows))
    assert not LEFT_BEHIND & {name for row in found for name in row.properties}
    assert {row.reconsume_times for row in found} == {0}
    assert {row.msg_id for row in found}.isdisjoint(row.msg_id for row in rows)
    in_order = sorted(found, key=lambda row: (row.broker, row.queue_id, row.queue_offset))
    ordered = [bytes(row.body) for row in in_order if row.properties.get("kind") == "ordered"]
    assert ordered == [b"0", b"1", b"2", b"3", b"4"] * 2


def test_delayed_rows_keep_their_id_and_system_properties(spark: Any, two_brokers: str) -> None:
    frame = spark.range(6).selectExpr(
        "concat('body-', id) as body", "concat('ID', id) as message_id",
        "map('RETRY_TOPIC', concat('t', id)) as system_properties",
        "map('n', cast(id as string)) as properties",
        "if(id % 2 = 0, 'broker-a', 'broker-b') as broker", "1 as queue_id",
        "if(id < 3, 30L, null) as delay_ms",
    )  # fmt: skip
    for mode in ("at-least-once", "exactly-once"):
        target = f"later-{mode}"
        with Admin(two_brokers) as admin:
            admin.create_topic(target, queues=2)
            given = {"nameServers": two_brokers, "topic": target, "delivery": mode}
            frame.write.format("rocketmq").options(**given).mode("append").save()
            for _ in range(100):
                if count(admin, target) == 6:
                    break
                time.sleep(0.05)
        found = read(spark, two_brokers, topic=target).collect()
        assert sorted(
            (row.msg_id, bytes(row.body), row.properties["RETRY_TOPIC"], row.properties["n"],
             row.broker, row.queue_id)
            for row in found
        ) == [
            (f"ID{n}", b"body-%d" % n, f"t{n}", f"{n}", f"broker-{'ab'[n % 2]}", 1)
            for n in range(6)
        ]  # fmt: skip
