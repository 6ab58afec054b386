# ruff: noqa: SIM117 - nested blocks show the order of events
"""The blocking shell: producer, admin, bulk reader, consumers, and RocketMQ's names over them."""

import threading
import time

import pytest

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer, LitePullConsumer, PushConsumer
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    FilterSyntaxError,
    NameServerUnreachableError,
    OffsetOutOfRangeError,
    RequestError,
    RouteNotFoundError,
    SendUnknownError,
)
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records
from sluicemq.rocketmq import (
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    DefaultLitePullConsumer,
    DefaultMQProducer,
    DefaultMQPushConsumer,
    MessageSelector,
    SendCallback,
    SendStatus,
)
from sluicemq.rocketmq import Message as RocketMessage
from sluicemq.wire.frames import Command
from waiting import limit, wait_for


def stored(fake, topic):
    return [
        record
        for (name, _), queue in sorted(fake.broker.queues.items())
        if name == topic
        for record in decode_records(b"".join(queue))
    ]


# ------------------------------------------------------------------------------ producer


def test_a_blocking_send_waits_for_its_result(fake_thread):
    fake_thread.topics["t"] = 2
    with Producer(fake_thread.name_server) as producer:
        results = [producer.send("t", b"%d" % n, tag="A") for n in range(4)]
        producer.send_oneway("t", b"no answer")
        batch = producer.send_batch([Message("t", b"x"), Message("t", b"y")])
    assert len({result.message_id for result in results}) == 4
    assert batch[1].queue_offset == batch[0].queue_offset + 1
    assert len(stored(fake_thread, "t")) == 7


def test_threads_may_share_a_producer(fake_thread):
    fake_thread.topics["t"] = 4
    with Producer(fake_thread.name_server) as producer:
        threads = [
            threading.Thread(target=lambda: [producer.send("t", b"x") for _ in range(25)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit(10))
    records = stored(fake_thread, "t")
    assert len(records) == len({record.message_id for record in records}) == 100


def test_blocking_sends_fail_with_the_same_errors(fake_thread):
    fake_thread.topics["t"] = 1
    with Producer(fake_thread.name_server, timeout_ms=200) as producer:
        fake_thread.broker.script[310] = lambda command, peer: Command(13, remark="illegal")
        with pytest.raises(RequestError, match="illegal"):
            producer.send("t", b"x")
        fake_thread.broker.script[310] = lambda command, peer: None
        with pytest.raises(SendUnknownError):
            producer.send("t", b"x")
        with pytest.raises(ConfigurationError, match="message 1"):
            producer.send_batch([Message("t", b"x"), Message("u", b"y")])
    with pytest.raises(ClosedError):
        producer.send("t", b"x")
    with Producer("127.0.0.1:1") as producer, pytest.raises(NameServerUnreachableError):
        producer.send("t", b"x")


def test_a_connection_that_the_server_closed_is_opened_again(fake_thread):
    fake_thread.topics["t"] = 1
    with Producer(fake_thread.name_server) as producer:
        producer.send("t", b"x")
        fake_thread.loop.call_soon_threadsafe(
            lambda: [peer.close() for peer in fake_thread.broker.server.peers]
        )
        time.sleep(0.1)
        producer.send("t", b"y")
    assert len(stored(fake_thread, "t")) >= 2


# --------------------------------------------------------------------------------- admin


def test_blocking_administration(fake_thread):
    with Admin(fake_thread.name_server) as admin:
        admin.create_topic("t", queues=2)
        (first, second) = admin.queues("t")
        fake_thread.broker.put("t", 0, b"x")
        assert admin.offsets(first) == (0, 1)
        assert admin.offsets(second) == (0, 0)
        assert admin.offset_by_time(first, 1000) == 0
        admin.commit_offset("g", first, 1)
        assert admin.committed_offset("g", first) == 1
        assert admin.committed_offset("g", second) is None
        assert admin.topics() == ["t"]
        with pytest.raises(RouteNotFoundError):
            admin.queues("nosuch")


# ---------------------------------------------------------------------------------- bulk


def reader(fake, start, end, subscription=None, **options):
    return BulkReader(
        fake.broker.address, "t", 0, start, end, subscription, broker="broker-a", **options
    )


def offsets(chunks):
    return [record.queue_offset for chunk in chunks for record in decode_records(chunk)]


def fill(fake, count):
    fake.topics["t"] = 1
    for index in range(count):
        fake.broker.put("t", 0, b"%d" % index, TAGS="A" if index % 10 else "B")


def capped(fake, count_max):
    """A broker that gives at most so many messages a pull, like a Java one."""
    answer = fake.broker.answer_pull

    def pull(command, peer):
        command.fields["maxMsgNums"] = str(min(count_max, int(command.fields["maxMsgNums"])))
        return answer(command)

    fake.broker.script[11] = pull


@pytest.mark.parametrize("count_max", [1, 7, 32, 1000])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_range_comes_whole_and_in_order_whatever_an_answer_holds(fake_thread, count_max, depth):
    fill(fake_thread, 200)
    capped(fake_thread, count_max)
    with reader(fake_thread, 5, 190, depth=depth) as bulk:
        assert offsets(bytes(chunk) for chunk in bulk) == list(range(5, 190))
        assert bulk.position == 190


def test_answers_that_become_shorter_on_the_way_are_completed(fake_thread):
    fill(fake_thread, 300)
    sizes = iter([50, 50, 3, 50, 10] + [1, 40] * 100)
    answer = fake_thread.broker.answer_pull

    def pull(command, peer):
        command.fields["maxMsgNums"] = str(min(next(sizes), int(command.fields["maxMsgNums"])))
        return answer(command)

    fake_thread.broker.script[11] = pull
    with reader(fake_thread, 0, 300) as bulk:
        assert offsets(bytes(chunk) for chunk in bulk) == list(range(300))


def test_a_filtered_range_holds_the_matches_below_its_end_only(fake_thread):
    fill(fake_thread, 200)
    capped(fake_thread, 3)
    with reader(fake_thread, 0, 151, parse_subscription("t", "B")) as bulk:
        assert offsets(bytes(chunk) for chunk in bulk) == list(range(0, 151, 10))
        assert bulk.position == 151
    with reader(fake_thread, 0, 145, parse_subscription("t", "B")) as bulk:
        assert offsets(bytes(chunk) for chunk in bulk) == list(range(0, 145, 10))


def test_several_pulls_are_in_flight(fake_thread):
    fill(fake_thread, 100)
    capped(fake_thread, 10)
    with reader(fake_thread, 0, 100, depth=4) as bulk:
        chunks = iter(bulk)
        next(chunks)
        wait_for(lambda: fake_thread.broker.seen[11] == 5)
        assert offsets(bytes(chunk) for chunk in chunks) == list(range(10, 100))


def test_an_empty_range_asks_nothing(fake_thread):
    fill(fake_thread, 1)
    with reader(fake_thread, 1, 1) as bulk:
        assert list(bulk) == []
    assert not fake_thread.broker.seen[11]


def test_a_range_that_is_gone_or_not_there_yet_is_an_error(fake_thread):
    fill(fake_thread, 10)
    with reader(fake_thread, 5, 20) as bulk, pytest.raises(OffsetOutOfRangeError, match="0 to 10"):
        list(bulk)
    fake_thread.broker.first["t", 0] = 100
    with reader(fake_thread, 5, 8) as bulk, pytest.raises(OffsetOutOfRangeError, match="retention"):
        list(bulk)
    with reader(fake_thread, 5, 8, parse_subscription("t", "B")) as bulk:
        with pytest.raises(OffsetOutOfRangeError):
            list(bulk)


def test_a_broken_connection_ends_the_reading(fake_thread):
    fill(fake_thread, 10)
    fake_thread.broker.script[11] = lambda command, peer: peer.close()
    with reader(fake_thread, 0, 10) as bulk, pytest.raises(ConnectionLostError):
        list(bulk)


def test_the_bulk_wish_travels_with_each_pull(fake_thread):
    fill(fake_thread, 1)
    with reader(fake_thread, 0, 1, batch_bytes=12345) as bulk:
        list(bulk)
    fields = next(fields for code, fields in fake_thread.broker.log if code == 11)
    assert fields["sluiceBulk"] == "true"
    assert fields["maxMsgBytes"] == "12345"
    assert fields["consumerGroup"] == "TOOLS_CONSUMER"


# ----------------------------------------------------------------------------- consumers


def test_a_blocking_loop_acknowledges_without_await(fake_thread):
    fill(fake_thread, 20)
    seen = []
    with Consumer(fake_thread.name_server, "t", group="g", tags="A") as messages:
        for message in messages:
            seen.append(int(message.body))
            message.ack()
            if len(seen) == 18:
                break
        assert messages.receive(0.1) is None
    assert seen == [n for n in range(20) if n % 10]
    assert fake_thread.broker.committed["g", "t", 0] == 20


def test_a_bad_filter_is_raised_where_it_is_written():
    with pytest.raises(FilterSyntaxError):
        Consumer("127.0.0.1:1", "t", group="g", where="n >")


def test_handlers_run_on_threads(fake_thread):
    fill(fake_thread, 10)
    seen, threads = [], set()

    def handler(message):
        threads.add(threading.current_thread().name)
        seen.append(message.body)

    with PushConsumer(fake_thread.name_server, "g", handler, concurrency=3).subscribe("t"):
        wait_for(lambda: len(seen) == 10)
    assert all(name.startswith("sluicemq g") for name in threads)
    assert fake_thread.broker.committed["g", "t", 0] == 10


def test_blocking_lite_pull(fake_thread):
    fill(fake_thread, 10)
    with LitePullConsumer(fake_thread.name_server, "g", auto_commit=False) as consumer:
        (queue,) = consumer.queues("t")
        consumer.assign([queue])
        assert len(consumer.poll(2.0)) == 10
        consumer.commit()
        assert consumer.committed(queue) == 10
        consumer.seek(queue, 8)
        assert [message.queue_offset for message in consumer.poll(2.0)] == [8, 9]
        consumer.seek_to_begin(queue)
        assert consumer.poll(2.0)[0].queue_offset == 0
        consumer.seek_to_end(queue)
        assert consumer.poll(0.1) == []
        assert consumer.offset_for_time(queue, 1003) == 3
        assert consumer.assignment == [queue]


# ------------------------------------------------------------------------ RocketMQ's names


class Callback(SendCallback):
    def __init__(self, done):
        self.done = done

    def on_success(self, send_result):
        self.done.set()

    def on_exception(self, e):
        raise e


def test_migrants_find_their_producer(fake_thread):
    fake_thread.topics["t"] = 4
    producer = DefaultMQProducer("p")
    producer.set_namesrv_addr(fake_thread.name_server)
    with pytest.raises(ClosedError, match="start"):
        producer.send(RocketMessage("t", "x"))
    producer.start()
    message = RocketMessage("t", "hello", tags="A", keys="k1 k2")
    message.put_user_property("a", "1")
    result = producer.send(message)
    assert result.send_status is SendStatus.SEND_OK
    chosen = producer.send(message, selector=lambda queues, one, arg: queues[arg], arg=2)
    assert chosen.message_queue.queue_id == 2
    done = threading.Event()
    producer.send(message, Callback(done))
    assert done.wait(limit(5))
    producer.send_oneway(message)
    producer.send([RocketMessage("t", "a"), RocketMessage("t", "b")])
    assert len(producer.fetch_publish_message_queues("t")) == 4
    wait_for(lambda: len(stored(fake_thread, "t")) == 6)
    producer.shutdown()
    producer.shutdown()
    (record,) = [one for one in stored(fake_thread, "t") if one.message_id == result.msg_id]
    assert (record.body, record.tag, record.keys) == (b"hello", "A", ("k1", "k2"))


def test_migrants_find_their_push_consumer(fake_thread):
    fill(fake_thread, 10)
    seen = []

    def listener(messages):
        seen.extend(messages)
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS

    consumer = DefaultMQPushConsumer("g", namesrv_addr=fake_thread.name_server)
    with pytest.raises(ConfigurationError, match="no listener"):
        consumer.start()
    consumer.set_consume_from_where(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    consumer.subscribe("t", MessageSelector.by_sql("TAGS = 'A'"))
    consumer.register_message_listener(listener)
    with consumer:
        wait_for(lambda: len(seen) == 9)
    assert {message.tags for message in seen} == {"A"}
    assert seen[0].topic == "t"
    assert fake_thread.broker.committed["g", "t", 0] == 10


def test_reconsume_later_sends_the_message_back_with_the_level_of_the_context(fake_thread):
    fill(fake_thread, 3)
    seen = []

    def listener(messages, context):
        seen.append(messages[0].reconsume_times)
        context.delay_level_when_next_consume = 5
        return ConsumeConcurrentlyStatus.RECONSUME_LATER

    consumer = DefaultMQPushConsumer("g", namesrv_addr=fake_thread.name_server)
    consumer.consume_from_where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    consumer.set_max_reconsume_times(7)
    consumer.subscribe("t", "*")
    consumer.register_message_listener(listener)
    with consumer:
        wait_for(lambda: fake_thread.broker.seen[36] == 3)
    backs = [fields for code, fields in fake_thread.broker.log if code == 36]
    assert [back["delayLevel"] for back in backs] == ["5"] * 3
    assert {back["maxReconsumeTimes"] for back in backs} == {"7"}
    assert fake_thread.broker.committed["g", "t", 0] == 3
    assert seen == [0, 0, 0]


def test_migrants_find_their_lite_pull_consumer(fake_thread):
    fill(fake_thread, 5)
    consumer = DefaultLitePullConsumer("g", namesrv_addr=fake_thread.name_server)
    consumer.set_auto_commit(False)
    consumer.consume_from_where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    consumer.subscribe("t", "A || B")
    with consumer:
        assert len(consumer.poll(2000)) == 5
        (queue,) = consumer.fetch_message_queues("t")
        assert consumer.committed(queue) == -1
        consumer.commit()
        assert consumer.committed(queue) == 5
        consumer.seek(queue, 4)
        assert consumer.poll(2000)[0].queue_offset == 4
        consumer.seek_to_begin(queue)
        assert consumer.offset_for_timestamp(queue, 1001) == 1
        assert queue == MessageQueue("t", "broker-a", 0)
