"""What the classes with RocketMQ's names do against our broker, overload by overload."""

import queue
import threading

import pytest

from sluicemq.errors import ConfigurationError, MessageNotFoundError
from sluicemq.rocketmq import (
    AllocateMessageQueueStrategy,
    ConsumeFromWhere,
    DefaultLitePullConsumer,
    DefaultMQProducer,
    DefaultMQPullConsumer,
    DefaultMQPushConsumer,
    Message,
    MessageQueue,
    MessageQueueSelector,
    SelectMessageQueueByHash,
    SendCallback,
    SendResult,
)
from waiting import limit, wait_for


@pytest.fixture
def producer(cluster):
    with DefaultMQProducer("P", namesrv_addr=cluster.addresses[0]) as started:
        started.create_topic("t", 4)
        yield started


class Results(SendCallback):
    def __init__(self):
        self.got = queue.Queue()

    def on_success(self, send_result):
        self.got.put(send_result)

    def on_exception(self, e):
        self.got.put(e)


class Third(MessageQueueSelector):
    def select(self, mqs, msg, arg):
        assert all(isinstance(one, MessageQueue) for one in mqs)
        return mqs[arg]


def one() -> Message:
    return Message("t", "A", "k", b"x")


def test_every_overload_of_send(producer):
    place = MessageQueue("t", "broker-a", 2)
    batch = [one(), one()]
    sent = [
        producer.send(one(), 3000),
        producer.send(one(), place),
        producer.send(one(), place, 3000),
        producer.send(one(), Third(), 2),
        producer.send(one(), Third(), 2, 3000),
        producer.send(one(), lambda mqs, msg, arg: mqs[arg], 2),
        producer.send(one(), SelectMessageQueueByHash(), 2),
        producer.send(one(), queue=place, timeout_ms=3000),
        producer.send(one(), selector=Third(), arg=2),
        producer.send(batch),
        producer.send(batch, 3000),
        producer.send(batch, place),
        producer.send(batch, place, 3000),
    ]
    assert all(isinstance(result, SendResult) for result in sent)
    chosen = [sent[index].message_queue for index in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12)]
    assert set(chosen) == {place}
    results = Results()
    for given in (
        (one(), results),
        (one(), results, 3000),
        (one(), place, results),
        (one(), place, results, 3000),
        (one(), Third(), 2, results),
        (one(), Third(), 2, results, 3000),
        (batch, results),
        (batch, results, 3000),
        (batch, place, results),
        (batch, place, results, 3000),
    ):
        assert producer.send(*given) is None
    found = [results.got.get(timeout=limit(10)) for _ in range(10)]
    assert all(isinstance(result, SendResult) for result in found)
    assert sum(result.message_queue == place for result in found) >= 6
    producer.send_oneway(one())
    producer.send_oneway(one(), place)
    producer.send_oneway(one(), Third(), 2)
    wait_for(lambda: total(producer) == 13 + 4 + 10 + 4 + 3)


def total(producer) -> int:
    places = producer.fetch_publish_message_queues("t")
    return sum(producer.max_offset(one) for one in places)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((one(), "now"), "does not accept 'now'"),
        ((one(), Third()), "a selector was passed without its argument"),
        ((one(), 3000, Results()), "SendCallback"),
        (([one()], Third(), 2), "a batch must be a list"),
        (("t", b"x"), "does not accept b'x'"),
        ((["x"],), "a batch must be a list"),
    ],
)
def test_what_send_does_not_take(producer, given, said):
    with pytest.raises(ConfigurationError, match=said):
        producer.send(*given)


def test_what_breaks_a_rule_raises_also_with_a_callback(producer):
    results = Results()
    with pytest.raises(ConfigurationError, match="the body is empty"):
        producer.send(Message("t", b""), results)
    assert results.got.empty()


def test_a_callback_hears_what_went_wrong(producer, cluster):
    results = Results()
    cluster.stop_broker()
    producer.send(one(), results, 300)
    assert not isinstance(results.got.get(timeout=limit(20)), SendResult)


def test_settings_of_a_producer_hold_from_the_next_send_on(producer):
    producer.set_send_msg_timeout(2000)
    producer.set_retry_times_when_send_failed(1)
    producer.retry_another_broker_when_not_store_ok = True
    producer.send(one())
    sender = producer._threaded.client.sender
    assert (sender.timeout_ms, sender.retries, sender.retry_unsafe) == (2000, 1, True)
    with pytest.raises(ConfigurationError, match="before start"):
        producer.set_compress_msg_body_over_howmuch(1)


def test_java_s_admin(producer):
    result = producer.send(one(), MessageQueue("t", "broker-a", 1))
    place = result.get_message_queue()
    stored = producer.view_message(result.get_offset_msg_id())
    assert (stored.get_body(), stored.get_msg_id()) == (b"x", result.get_msg_id())
    wait_for(lambda: producer.query_message("t", "k", 10, 0, 2**60).get_message_list())
    assert producer.view_message("t", result.get_msg_id()).get_queue_id() == 1
    (found,) = producer.query_message("t", "k", 10, 0, 2**60).message_list
    assert found.msg_id == result.msg_id
    assert producer.query_message("t", "none", 10, 0, 2**60).message_list == []
    assert (producer.min_offset(place), producer.max_offset(place)) == (0, 1)
    assert producer.earliest_msg_store_time(place) == stored.get_store_timestamp()
    assert producer.search_offset(place, stored.get_store_timestamp() + 1) == 1
    assert producer.earliest_msg_store_time(MessageQueue("t", "broker-a", 0)) == -1
    producer.create_topic("TBW102", "u", 3)
    assert len(producer.fetch_publish_message_queues("u")) == 3
    with pytest.raises(ConfigurationError, match="create_topic"):
        producer.create_topic("t", "v", 3)
    with pytest.raises(MessageNotFoundError):
        producer.view_message("t", "0" * 32)


class AllToTheLast(AllocateMessageQueueStrategy):
    def __init__(self):
        self.asked = threading.Event()

    def allocate(self, consumer_group, current_cid, mq_all, cid_all):
        assert consumer_group == "G"
        self.asked.set()
        return [one for one in mq_all if one.get_queue_id() > 1]


def test_a_strategy_of_one_s_own_decides(producer, cluster):
    for number in range(4):
        producer.send(Message("t", str(number)), MessageQueue("t", "broker-a", number))
    chosen, seen = AllToTheLast(), queue.Queue()
    consumer = DefaultMQPushConsumer("G", None, chosen, namesrv_addr=cluster.addresses[0])
    consumer.set_consume_from_where(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    consumer.subscribe("t", "*")
    consumer.register_message_listener(lambda msgs: seen.put(msgs[0].body))
    with consumer:
        assert sorted(seen.get(timeout=limit(10)) for _ in range(2)) == [b"2", b"3"]
        assert chosen.asked.is_set()
        with pytest.raises(ConfigurationError, match="before start"):
            consumer.set_consume_thread_max(3)
        assert len(consumer.fetch_subscribe_message_queues("t")) == 4


def test_a_lite_pull_consumer_in_java_s_words(producer, cluster):
    producer.send(one())
    with DefaultLitePullConsumer("G", namesrv_addr=cluster.addresses[0]) as consumer:
        assert consumer.is_running()
        places = consumer.fetch_message_queues("t")
        consumer.assign(places)
        assert consumer.assignment() == places
        with pytest.raises(ConfigurationError, match="persist"):
            consumer.commit_sync({places[0]: 0}, False)
    wrong = DefaultLitePullConsumer("I", namesrv_addr=cluster.addresses[0])
    wrong.consume_from_where = ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
    wrong.consume_timestamp = "yesterday"
    with pytest.raises(ConfigurationError, match="20260131235900"):
        wrong.start()


def test_raw_pulls_have_java_s_admin_too(producer, cluster):
    producer.send(one(), MessageQueue("t", "broker-a", 0))
    with DefaultMQPullConsumer("G", namesrv_addr=cluster.addresses[0]) as consumer:
        place = consumer.fetch_subscribe_message_queues("t")[0]
        assert (place.broker_name, consumer.max_offset(place)) == ("broker-a", 1)
