"""Constructors and settings, without a network."""

from datetime import datetime
from typing import Any

import pytest

from sluicemq import rocketmq as mq
from sluicemq.client.core.names import Credentials
from sluicemq.errors import ClosedError, ConfigurationError, NameServerUnreachableError
from sluicemq.rocketmq.consumers import _parse_timestamp

HOOK = mq.AclClientRPCHook(mq.SessionCredentials("key", "secret"))
CIRCLE = mq.AllocateMessageQueueAveragelyByCircle()


@pytest.mark.parametrize(
    ("given", "group", "hook", "trace", "topic"),
    [
        ((), "DEFAULT_PRODUCER", False, False, None),
        (("g",), "g", False, False, None),
        (("g", True), "g", False, True, None),
        (("g", True, "traces"), "g", False, True, "traces"),
        (("g", HOOK), "g", True, False, None),
        (("g", HOOK, True, "traces"), "g", True, True, "traces"),
        (("g", None, True, None), "g", False, True, None),
        ((HOOK,), "DEFAULT_PRODUCER", True, False, None),
    ],
)
def test_the_constructors_of_a_producer(
    given: tuple[Any, ...], group: str, hook: bool, trace: bool, topic: str | None
) -> None:
    producer = mq.DefaultMQProducer(*given, namesrv_addr="n:1")
    assert (producer.get_producer_group(), producer.get_namesrv_addr()) == (group, "n:1")
    assert (producer.enable_msg_trace, producer.customized_trace_topic) == (trace, topic)
    assert producer._credentials == (Credentials("key", "secret") if hook else None)
    assert repr(producer) == f"<DefaultMQProducer {group} not running>"


def test_the_constructors_of_a_consumer() -> None:
    consumer = mq.DefaultMQPushConsumer("g", HOOK, CIRCLE, True, "traces")
    assert consumer.allocate_message_queue_strategy is CIRCLE
    assert consumer.enable_msg_trace
    assert consumer.customized_trace_topic == "traces"
    late = mq.DefaultLitePullConsumer(HOOK)
    late.set_consumer_group("g")
    assert late.get_consumer_group() == "g"


def test_a_producer_reads_no_queues() -> None:
    with pytest.raises(AttributeError, match="allocate_message_queue_strategy"):
        mq.DefaultMQProducer("g", HOOK, CIRCLE)


class OtherHook:
    def do_before_request(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("g", OtherHook()), "no other hook is supported"),
        (("namespace", "g"), "'prod%group'"),
        (("g", True, "traces", 3), "does not accept 3"),
    ],
)
def test_what_no_constructor_takes(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        mq.DefaultMQProducer(*given)


def test_there_is_no_vip_channel() -> None:
    producer = mq.DefaultMQProducer("g")
    producer.set_vip_channel_enabled(False)
    with pytest.raises(ConfigurationError, match="VIP"):
        producer.set_vip_channel_enabled(True)


def test_a_client_that_does_not_run_says_so() -> None:
    with pytest.raises(ClosedError, match="start"):
        mq.DefaultMQProducer("g").view_message("id")
    with pytest.raises(ClosedError, match="start"):
        mq.DefaultLitePullConsumer("g").fetch_message_queues("t")


def test_a_time_to_begin_at_is_written_as_java_does() -> None:
    moment = datetime(2026, 1, 31, 23, 59).astimezone()
    assert _parse_timestamp("20260131235900") == moment.timestamp() * 1000
    with pytest.raises(ConfigurationError, match="20260131235900"):
        _parse_timestamp("yesterday")


@pytest.mark.parametrize(("least", "most"), [(5, 4), (0, 4), (None, 0)])
def test_threads_are_at_least_one_and_at_most_the_most(least: int | None, most: int) -> None:
    consumer = mq.DefaultMQPushConsumer("g")
    consumer.set_consume_thread_min(least)
    consumer.set_consume_thread_max(most)
    consumer.subscribe("t", "*")
    consumer.register_message_listener(lambda msgs: None)
    with pytest.raises(ConfigurationError, match="consume_thread_min"):
        consumer.start()


@pytest.mark.parametrize(("least", "warns"), [(None, False), (1, False), (2, True)])
def test_a_minimum_of_threads_is_warned_of(
    least: int | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = mq.DefaultMQPushConsumer("g")
    consumer.set_consume_thread_min(least)
    consumer.subscribe("t", "*")
    consumer.register_message_listener(lambda msgs: None)
    consumer.set_namesrv_addr("127.0.0.1:1")
    with pytest.raises(NameServerUnreachableError):
        consumer.start()
    assert ("consume_thread_min = 2 has no effect" in caplog.text) == warns


def test_a_listener_of_java_has_to_be_complete() -> None:
    class Nothing(mq.MessageListenerOrderly):
        pass

    with pytest.raises(TypeError, match="consume_message"):
        Nothing()  # type: ignore[abstract]


@pytest.mark.parametrize("wrong", [mq.MessageListenerOrderly, "listener", None])
def test_a_listener_is_an_object_or_a_function(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="the listener must be"):
        mq.DefaultMQPushConsumer("g").register_message_listener(wrong)


def test_the_contexts_have_java_s_setters() -> None:
    queue = mq.MessageQueue("t", "b", 0)
    orderly = mq.ConsumeOrderlyContext(queue)
    orderly.set_suspend_current_queue_time_millis(30)
    assert orderly.suspend_current_queue_time_millis == 30
    concurrently = mq.ConsumeConcurrentlyContext(queue)
    concurrently.set_ack_index(2)
    concurrently.set_delay_level_when_next_consume(-1)
    assert (concurrently.ack_index, concurrently.delay_level_when_next_consume) == (2, -1)
    assert concurrently.get_message_queue() == queue


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (mq.TransactionMQProducer("g").send_message_in_transaction, "send_message_in_transaction"),
        (mq.DefaultMQProducer("g").send_oneway, "send_oneway"),
        (mq.DefaultMQProducer("g").request, "request"),
    ],
)
@pytest.mark.parametrize(
    ("given", "fix"), [([mq.Message("t", b"x")], "Only `send` takes several"), ("t", "Pass a M")]
)
def test_what_is_no_single_message_is_refused_with_the_reason(
    call: Any, name: str, given: Any, fix: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} takes exactly one message.*{fix}"):
        call(given)


def test_an_unfinished_queue_is_refused_by_every_method_that_takes_one() -> None:
    """A queue from `MessageQueue()` that lacks its values reaches no server."""
    queue = mq.MessageQueue()
    producer, lite = mq.DefaultMQProducer("g"), mq.DefaultLitePullConsumer("g")
    pull = mq.DefaultMQPullConsumer("g")
    message = mq.Message("t", b"x")
    calls = [
        lambda: producer.send(message, queue),
        lambda: producer.send(message, queue=queue),
        lambda: producer.send_oneway(message, queue),
        lambda: lite.assign([queue]),
        lambda: lite.commit_sync({queue: 1}),
        lambda: lite.seek(queue, 0),
        lambda: lite.seek_to_begin(queue),
        lambda: lite.seek_to_end(queue),
        lambda: lite.committed(queue),
        lambda: lite.offset_for_timestamp(queue, 0),
        lambda: pull.pull(queue, "*", 0),
        lambda: pull.pull_block_if_not_found(queue, "*", 0),
        lambda: pull.fetch_consume_offset(queue),
        lambda: pull.update_consume_offset(queue, 0),
        lambda: mq.AllocateMessageQueueByConfig([queue]),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="Call set_topic"):
            call()
