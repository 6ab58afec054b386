"""RocketMQ's consumer classes: batches with an ack index, broadcasting, raw pulls, lite pull."""

import threading

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq import (
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    DefaultLitePullConsumer,
    DefaultMQPullConsumer,
    DefaultMQPushConsumer,
    MessageModel,
    MessageSelector,
    PullStatus,
)
from waiting import limit

QUEUE = MessageQueue("t", "broker-a", 0)


def fill(fake, count: int, *, queues: int = 1, tag: str = "A") -> None:
    def put() -> None:
        fake.topics["t"] = queues
        for number in range(count):
            fake.broker.put("t", number % queues, b"%d" % number, TAGS=tag)
        done.set()

    done = threading.Event()
    fake.loop.call_soon_threadsafe(put)
    assert done.wait(limit(5))


def test_messages_behind_the_ack_index_are_sent_back(fake_thread):
    fill(fake_thread, 4)
    seen, done = [], threading.Event()

    def listener(messages, context):
        seen.append([message.body for message in messages])
        context.ack_index = 1
        if sum(map(len, seen)) == 4:
            done.set()
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS

    consumer = DefaultMQPushConsumer("g", namesrv_addr=fake_thread.name_server)
    consumer.set_consume_from_where(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    consumer.set_consume_message_batch_max_size(4)
    consumer.subscribe("t", "*")
    consumer.register_message_listener(listener)
    with consumer:
        assert done.wait(limit(5))
    back = [int(fields["offset"]) // 1000 for code, fields in fake_thread.broker.log if code == 36]
    assert seen == [[b"0", b"1", b"2", b"3"]]
    assert back == [2, 3]
    assert fake_thread.broker.committed["g", "t", 0] == 4


def test_a_broadcasting_consumer_keeps_local_offsets_and_sends_nothing_back(fake_thread, tmp_path):
    fill(fake_thread, 6, queues=2)
    seen: list[bytes] = []

    def run(count: int) -> None:
        done = threading.Event()

        def listener(messages):
            seen.extend(message.body for message in messages)
            if len(seen) == count:
                done.set()
            return ConsumeConcurrentlyStatus.RECONSUME_LATER

        consumer = DefaultMQPushConsumer("g", namesrv_addr=fake_thread.name_server)
        consumer.set_message_model(MessageModel.BROADCASTING)
        consumer.set_consume_from_where(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
        consumer.offsets_directory = str(tmp_path)
        consumer.subscribe("t", "*")
        consumer.register_message_listener(listener)
        with consumer:
            assert done.wait(limit(5))

    run(6)
    fill(fake_thread, 2, queues=2)
    run(8)
    assert len(seen) == 8
    assert fake_thread.broker.seen[36] == fake_thread.broker.seen[15] == 0
    (file,) = tmp_path.glob("*@DEFAULT/g/offsets.json")
    assert '"topic":"t"\n\t\t}:4' in file.read_text()


def test_a_pull_of_rocketmqs_consumer_has_four_outcomes(fake_thread):
    fill(fake_thread, 3)
    consumer = DefaultMQPullConsumer("g", namesrv_addr=fake_thread.name_server)
    with consumer:
        assert consumer.fetch_subscribe_message_queues("t") == [QUEUE]
        found = consumer.pull(QUEUE, "*", 0, 2)
        assert found.pull_status is PullStatus.FOUND
        assert [message.body for message in found.msg_found_list] == [b"0", b"1"]
        assert (found.next_begin_offset, found.min_offset, found.max_offset) == (2, 0, 3)
        assert consumer.pull(QUEUE, "*", 3).pull_status is PullStatus.NO_NEW_MSG
        other = consumer.pull(QUEUE, MessageSelector.by_tag("B"), 0)
        assert (other.pull_status, other.next_begin_offset) == (PullStatus.NO_MATCHED_MSG, 3)
        illegal = consumer.pull(QUEUE, "*", 77)
        assert (illegal.pull_status, illegal.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, 3)
        assert consumer.fetch_consume_offset(QUEUE) == -1
        consumer.update_consume_offset(QUEUE, 2)
        assert consumer.fetch_consume_offset(QUEUE) == 2
        assert (consumer.min_offset(QUEUE), consumer.max_offset(QUEUE)) == (0, 3)
        assert consumer.search_offset(QUEUE, 1001) == 1
        consumer.send_message_back(found.msg_found_list[1], 3)
    assert [f["delayLevel"] for code, f in fake_thread.broker.log if code == 36] == ["3"]


def test_the_lite_pull_consumer_is_complete(fake_thread):
    fill(fake_thread, 6, queues=2)
    consumer = DefaultLitePullConsumer("g", namesrv_addr=fake_thread.name_server)
    consumer.set_auto_commit(False)
    consumer.consume_from_where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    assert not consumer.is_running()
    with consumer:
        queues = consumer.fetch_message_queues("t")
        consumer.assign(queues)
        consumer.pause(queues[:1])
        bodies = [message.body for message in poll(consumer, 3)]
        assert bodies == [b"1", b"3", b"5"]
        consumer.commit_sync()
        assert [consumer.committed(queue) for queue in queues] == [0, 3]
        consumer.resume(queues[:1])
        assert [message.body for message in poll(consumer, 3)] == [b"0", b"2", b"4"]
        consumer.commit({queues[0]: 2})
        assert consumer.committed(queues[0]) == 2
        consumer.seek(queues[0], 1)
        assert [message.body for message in poll(consumer, 2)] == [b"2", b"4"]
        with pytest.raises(ConfigurationError):
            consumer.seek(queues[0], 9)
        assert consumer.is_running()
        assert consumer.assignment() == queues


def poll(consumer, count):
    found = []
    while len(found) < count:
        messages = consumer.poll(2000)
        assert messages, "nothing came in 2 s"
        found += messages
    return found
