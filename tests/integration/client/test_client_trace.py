"""Traces by every face of the client, written to our own brokers and read with `sluice trace`."""

import asyncio
import json
import logging
import threading
import time
from itertools import pairwise

import pytest
from click.testing import CliRunner

from sluicemq import (
    Message,
    MessageNotFoundError,
    RetryLaterError,
    RouteNotFoundError,
    Sluice,
    TransactionState,
)
from sluicemq.cli import main
from sluicemq.client.admin.traces import GroupTrace, Timeline
from sluicemq.client.core.transactions import TransactionListener
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer, PushConsumer
from sluicemq.rocketmq import (
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    DefaultMQProducer,
    DefaultMQPushConsumer,
)
from sluicemq.rocketmq import Message as MigrantMessage
from sluicemq.testing.embedded import embedded
from waiting import limit, until

TRACED = {"traceTopicEnable": "true"}
SOON = {"messageDelayLevel": "1s 1s 1s 1s 1s 1s"}


def kinds(found: Timeline) -> list[tuple[str, str | None, str | None]]:
    return [(step.kind, step.group, step.result) for step in found.steps]


async def traced(mq: Sluice, message_id: str, steps: int, **options: str) -> Timeline:
    """The timeline, once it has so many steps: writers wait a second for more."""
    found = None
    async with asyncio.timeout(limit(20)):
        while found is None or len(found.steps) < steps:
            await asyncio.sleep(0.05)
            try:
                found = await mq.admin.trace(message_id, **options)
            except MessageNotFoundError:
                continue
    return found


# ---- asyncio


async def test_a_message_is_followed_from_its_send_to_the_last_retry():
    rounds = []

    async def handle(message):
        rounds.append(message.reconsume_times)
        if not message.reconsume_times:
            raise ValueError("the first time fails")
        if message.reconsume_times == 1:
            raise RetryLaterError("and is asked for again", delay_level=1)

    async with embedded(settings=TRACED | SOON, trace=True) as mq:
        sent = await mq.send("orders", b"12345", tag="A", keys="k")
        async with mq.consumer("billing", handle, retry_delay_level=1).subscribe("orders"):
            await until(lambda: len(rounds) == 3)
            found = await traced(mq, sent.message_id, 5)
        assert (found.topic, found.tags, found.keys) == ("orders", "A", "k")
        assert kinds(found) == [
            ("send", "sluicemq-producer", "success"),
            ("store", None, None),
            ("deliver", "billing", "exception"),
            ("deliver", "billing", "failed"),
            ("deliver", "billing", "success"),
        ]
        assert [step.round for step in found.steps[2:]] == [0, 1, 2]
        assert all(step.cost_ms is not None for step in found.steps if step.kind == "deliver")
        times = [step.time_ms for step in found.steps]
        assert all(later >= earlier - 2 for earlier, later in pairwise(times))  # two clocks' ms
        assert found.groups[0] == GroupTrace("billing", 3, True, ["exception", "failed", "success"])


async def test_the_failures_of_an_ordered_group_are_counted():
    rounds = []

    async def handle(message):
        rounds.append(message.reconsume_times)
        if message.reconsume_times < 2:
            raise ValueError("it fails twice")

    async with embedded(settings=TRACED, trace=True) as mq:
        sent = await mq.send("orders", b"12345")
        consumer = mq.consumer("billing", handle, ordered=True, suspend_s=0.01).subscribe("orders")
        async with consumer:
            await until(lambda: len(rounds) == 3)
            found = await traced(mq, sent.message_id, 5)
        assert rounds == [0, 1, 2]
        assert [step.round for step in found.steps if step.kind == "deliver"] == [0, 1, 2]


async def test_batches_streams_lite_pull_and_groups_that_tell_nothing():
    async with embedded(settings=TRACED, trace=True) as mq:
        results = await mq.send_batch([Message("orders", b"%d" % n) for n in range(3)])
        async with mq.subscribe("orders", group="stream") as stream:
            for _ in results:
                await (await stream.receive()).ack()
        lite = mq.lite_pull("lite", start="first")
        await lite.subscribe("orders")
        polled = []
        while len(polled) < 3:
            polled += await lite.poll()
        await lite.commit()
        await lite.close()
        mute = mq.servers.client()
        async with mute.subscribe("orders", group="mute") as stream:
            for _ in results:
                await (await stream.receive()).ack()
        await mute.close()
        for result in results:
            found = await traced(mq, result.message_id, 4)
            assert kinds(found)[0] == ("send", "sluicemq-producer", "success")
            deliveries = {(s.group, s.result) for s in found.steps if s.kind == "deliver"}
            assert ("stream", "success") in deliveries
            assert "lite" in {group for group, _ in deliveries}
            silent = [fate for fate in found.groups if not fate.deliveries]
            assert silent == [GroupTrace("mute", is_past=True)]


async def test_a_message_of_which_nothing_is_known_and_a_topic_that_is_not_there():
    async with embedded(settings=TRACED) as mq:
        sent = await mq.send("orders", b"1")
        with pytest.raises(MessageNotFoundError, match=r"no trace of .* though the message is in"):
            await mq.admin.trace(sent.offset_message_id)
        with pytest.raises(RouteNotFoundError, match=r"no broker has the trace topic 'nosuch'"):
            await mq.admin.trace(sent.message_id, trace_topic="nosuch")


async def test_a_topic_of_ones_own_and_the_id_of_the_broker():
    async with embedded(trace="my-traces") as mq:
        await mq.admin.create_topic("my-traces")
        sent = await mq.send("orders", b"1")
        found = await traced(mq, sent.offset_message_id, 2, trace_topic="my-traces")
        assert found.message_id == sent.message_id
        assert kinds(found) == [("send", "sluicemq-producer", "success"), ("store", None, None)]


async def test_transactions_and_recalls_are_told():
    class Checks(TransactionListener):
        def execute_local(self, message, transaction_id, argument):
            return TransactionState.UNKNOWN

        def check(self, message):
            return TransactionState.ROLLBACK

    quick = {
        "transactionTimeOut": "300",
        "transactionCheckInterval": "300",
        "recallMessageEnable": "true",
    }
    async with embedded(settings=TRACED | quick, trace=True) as mq:
        async with mq.transaction("orders", b"1", keys="k") as tx:
            pass
        found = await traced(mq, tx.transaction_id, 3)
        assert {("transaction", "commit_message"), ("send", "success")} <= {
            (step.kind, step.result) for step in found.steps
        }
        assert found.steps[0].detail == "half, 1 bytes"
        producer = mq.producer("asked", listener=Checks())
        result = await producer.send_in_transaction(Message("orders", b"2"))
        found = await traced(mq, result.transaction_id, 3)
        ends = [(s.result, s.detail) for s in found.steps if s.kind == "transaction"]
        assert ends[-1] == ("rollback_message", "after a check")
        timed = await mq.send("orders", b"3", delay=60)
        await mq.recall(timed.recall_handle)
        found = await traced(mq, timed.message_id, 2)
        assert ("recall", "sluicemq-producer", "success") in kinds(found)


async def test_a_dedicated_trace_broker_of_two_has_all_traces_and_only_traces():
    """Two brokers, traceTopicEnable on one: the trace topic's route leads there alone."""
    async with embedded(trace=True) as mq:
        await mq.servers.start_broker("broker-trace", autoCreateTopicEnable="false", **TRACED)
        route = await mq.admin.route("RMQ_SYS_TRACE_TOPIC")
        assert {data.broker for data in route.brokers} == {"broker-trace"}
        ids = [(await mq.send("orders", b"%d" % n)).message_id for n in range(20)]
        async with mq.subscribe("orders", group="g") as stream:
            for _ in ids:
                await (await stream.receive()).ack()
        for message_id in ids:
            found = await traced(mq, message_id, 3)
            assert ("deliver", "g", "success") in kinds(found)
            assert found.steps[1].place.startswith("broker-a ")
        counts = {
            name: {
                topic: await _count(mq, topic, name) for topic in ("orders", "RMQ_SYS_TRACE_TOPIC")
            }
            for name in ("broker-a", "broker-trace")
        }
        assert counts["broker-a"] == {"orders": 20, "RMQ_SYS_TRACE_TOPIC": 0}
        assert counts["broker-trace"]["orders"] == 0
        assert counts["broker-trace"]["RMQ_SYS_TRACE_TOPIC"] > 0


async def _count(mq: Sluice, topic: str, broker: str) -> int:
    total = 0
    for queue in await mq.admin.queues(topic):
        if queue.broker == broker:
            begin, end = await mq.admin.offsets(queue)
            total += end - begin
    return total


async def test_without_the_trace_topic_there_is_one_warning_and_nothing_else(caplog):
    async with embedded(settings={"autoCreateTopicEnable": "false"}, trace=True) as mq:
        await mq.admin.create_topic("orders")
        with caplog.at_level(logging.WARNING, "sluicemq.client"):
            ids = [(await mq.send("orders", b"%d" % n)).message_id for n in range(250)]
            async with mq.subscribe("orders", group="g") as stream:
                got = [await stream.receive() for _ in ids]
                assert {message.message_id for message in got} == set(ids)
                for message in got:
                    await message.ack()
            await asyncio.sleep(1.2)
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 1, warnings
        assert "traceTopicEnable=true" in warnings[0]
        caplog.clear()
        began = time.monotonic()
        with caplog.at_level(logging.WARNING, "sluicemq.client"):
            await mq.close()
        assert time.monotonic() - began < limit(3.5)
        (closing,) = [record.getMessage() for record in caplog.records]
        assert closing == "750 trace records were not written"


# ---- blocking, on sockets, and the command


@pytest.fixture
def traced_cluster(empty_cluster):
    """One name server, one broker with the trace topic."""
    empty_cluster.start_broker(**TRACED, **SOON)
    return empty_cluster


def command(cluster, *words: str) -> str:
    done = CliRunner().invoke(main, ["trace", *words, "-n", cluster.addresses[0]])
    assert done.exit_code == 0, done.output
    return done.output


def test_blocking_faces_write_traces_and_the_command_draws_them(traced_cluster):
    done = threading.Event()
    with Producer(traced_cluster.addresses, trace=True) as producer:
        sent = producer.send("orders", b"123", tag="A", keys="k-1")
        producer.send_batch([Message("others", b"1"), Message("others", b"2")])
        consumer = PushConsumer(
            traced_cluster.addresses, "threads", lambda _: done.set(), trace=True
        ).subscribe("orders")
        with consumer:
            assert done.wait(limit(20))
        with Consumer(traced_cluster.addresses, "orders", group="pulls", trace=True) as stream:
            message = next(iter(stream))
            message.ack()
    shown = command(traced_cluster, sent.message_id)
    first, *_ = shown.splitlines()
    assert first == f"Message {sent.message_id} (topic orders, tag A, keys k-1)"
    for words in (
        "send        by sluicemq-producer at 127.0.0.1:",
        "store       at broker-a queue ",
        "deliver     to threads -> success in ",
        "deliver     to pulls -> success in ",
        "Group threads consumed it: 1 delivery, success.",
    ):
        assert words in shown
    record = json.loads(command(traced_cluster, sent.offset_message_id, "--json"))
    assert record["message_id"] == sent.message_id
    assert [step["kind"] for step in record["steps"]] == ["send", "store", "deliver", "deliver"]
    with Admin(traced_cluster.addresses) as admin:
        assert admin.trace(sent.message_id).keys == "k-1"


def test_rocketmqs_names_take_javas_arguments(traced_cluster):
    done = threading.Event()
    producer = DefaultMQProducer("migrants", True)
    producer.set_namesrv_addr(traced_cluster.addresses[0])
    producer.start()
    result = producer.send(MigrantMessage("orders", b"1", tags="A", keys="k"))
    consumer = DefaultMQPushConsumer("migrant-consumers", True)
    consumer.set_namesrv_addr(traced_cluster.addresses[0])
    consumer.consume_from_where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    consumer.subscribe("orders", "*")

    def listen(messages, context):
        done.set()
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS

    consumer.register_message_listener(listen)
    consumer.start()
    assert done.wait(limit(20))
    consumer.shutdown()
    producer.shutdown()
    shown = command(traced_cluster, result.msg_id)
    assert "by migrants at" in shown
    assert "Group migrant-consumers consumed it: 1 delivery, success." in shown


def test_a_blocking_producer_without_the_trace_topic_warns_once(cluster, caplog):
    warnings = caplog.at_level(logging.WARNING, "sluicemq.client")
    with warnings, Producer(cluster.addresses, trace=True, timeout_ms=2000) as producer:
        for _ in range(3):
            producer.send("orders", b"1")
        time.sleep(1.3)
        producer.send("orders", b"1")
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if text.startswith("traces cannot be written")]) == 1
    assert texts[-1].endswith("trace records were not written")


def test_the_command_says_what_to_do_without_the_topic(cluster):
    done = CliRunner().invoke(main, ["trace", "C" * 32, "-n", cluster.addresses[0]])
    assert done.exit_code != 0
    text = str(done.exception) + done.output
    assert "traceTopicEnable=true" in text
    assert "Did you mean" not in text, "no other topic is meant"
