"""RocketMQ's names: setters, getters, and what is said of a name that is not there."""

import pytest

from sluicemq import rocketmq as mq
from sluicemq.errors import ConfigurationError
from sluicemq.rocketmq.names import PositionalArguments, to_snake_case

QUEUE = mq.MessageQueue("t", "broker-a", 0)


@pytest.mark.parametrize(
    ("java", "ours"),
    [
        ("setNamesrvAddr", "set_namesrv_addr"),
        ("setRetryAnotherBrokerWhenNotStoreOK", "set_retry_another_broker_when_not_store_ok"),
        ("setUseTLS", "set_use_tls"),
        ("isAutoCommit", "is_auto_commit"),
        ("poll", "poll"),
    ],
)
def test_java_s_name_in_snake_case(java: str, ours: str) -> None:
    assert to_snake_case(java) == ours


@pytest.mark.parametrize(
    ("made", "name", "said"),
    [
        (mq.DefaultMQProducer("g"), "setNamesrvAddr", "set_namesrv_addr"),
        (mq.DefaultMQProducer("g"), "set_send_msg_time_out", "Did you mean 'set_send_msg_timeout'"),
        (mq.DefaultMQProducer("g"), "set_namespace", "prod%"),
        (mq.DefaultMQProducer("g"), "producer_group", "Use the attribute group"),
        (mq.DefaultMQProducer("g"), "xyzzy", "help(DefaultMQProducer)"),
        (mq.DefaultMQPushConsumer("g"), "suspend", "Unsubscribe and subscribe"),
        (mq.DefaultMQPushConsumer("g"), "getConsumeThreadMax", "Read the attribute"),
        (mq.DefaultMQPushConsumer("g"), "setOffsetsDirectory", "Set the attribute offsets_dir"),
        (mq.DefaultLitePullConsumer("g"), "fetchMessageQueues", "fetch_message_queues"),
        (mq.Message("t", b""), "putUserProperties", "Did you mean 'put_user_property'"),
        (QUEUE, "setQueueId", "set_queue_id"),
        (QUEUE, "getBrokerName", "get_broker_name"),
        (
            mq.ConsumeOrderlyContext(QUEUE),
            "suspend_current_queue_millis",
            "suspend_current_queue_time_millis",
        ),
    ],
)
def test_a_name_that_is_not_there_says_which_was_meant(made: object, name: str, said: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(made, name)
    assert said in str(caught.value)
    assert type(made).__name__ in str(caught.value)
    assert not hasattr(made, name)
    with pytest.raises(AttributeError):
        setattr(made, name, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consume_thread_max", "3"),
        ("consume_thread_max", True),
        ("message_model", "BROADCASTING"),
        ("consume_from_where", "first"),
        ("set_consume_thread_max", 3),
        ("subscribe", "orders"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: object) -> None:
    consumer = mq.DefaultMQPushConsumer("g")
    with pytest.raises(ConfigurationError, match=name):
        setattr(consumer, name, value)


def setters() -> list[tuple[str, str]]:
    return [
        (kind, name)
        for kind in ("DefaultMQProducer", "TransactionMQProducer", "DefaultMQPushConsumer",
                     "DefaultLitePullConsumer", "DefaultMQPullConsumer")
        for name in dir(getattr(mq, kind))
        if name.startswith("set_") and type(vars_of(getattr(mq, kind), name)).__name__ == "Setter"
    ]  # fmt: skip


def vars_of(kind: type, name: str) -> object:
    return next(vars(base)[name] for base in kind.__mro__ if name in vars(base))


@pytest.mark.parametrize(("kind", "name"), setters())
def test_a_setter_sets_an_attribute_that_is_there(kind: str, name: str) -> None:
    made = getattr(mq, kind)("g")
    attribute = vars_of(type(made), name)._attribute  # type: ignore[attr-defined]
    value = getattr(made, attribute)
    getattr(made, name)(value)
    assert vars(made)[attribute] == value


def test_the_setters_of_the_articles_are_there() -> None:
    producer = """set_namesrv_addr set_send_msg_timeout set_retry_times_when_send_failed
        set_retry_times_when_send_async_failed set_retry_another_broker_when_not_store_ok
        set_vip_channel_enabled set_instance_name set_unit_name set_producer_group"""
    consumer = """set_consume_message_batch_max_size set_consume_timestamp set_consume_from_where
        set_consume_thread_min set_consume_thread_max set_message_model set_pull_batch_size
        set_allocate_message_queue_strategy set_max_reconsume_times set_consumer_group
        set_suspend_current_queue_time_millis"""
    assert {name for name in producer.split() if not hasattr(mq.DefaultMQProducer, name)} == set()
    assert {
        name for name in consumer.split() if not hasattr(mq.DefaultMQPushConsumer, name)
    } == set()


def test_a_subclass_may_have_attributes_of_its_own() -> None:
    class Mine(mq.DefaultMQProducer):
        def __init__(self) -> None:
            super().__init__("g")
            self.desk = 7

    mine = Mine()
    assert mine.desk == 7
    with pytest.raises(AttributeError, match="Mine has no attribute 'dsk'"):
        _ = mine.dsk  # type: ignore[attr-defined]


def test_arguments_are_taken_in_order_by_what_they_are() -> None:
    given = PositionalArguments("a", None, 3)
    assert given.take(int) is None
    assert given.take(str) == "a"
    assert given.take(bool) is None, "Java's null"
    assert given.take(int) == 3
    given.expect_end("f", "")
    with pytest.raises(ConfigurationError, match="without its argument"):
        PositionalArguments(len).take_pair("a selector", "its argument")
    with pytest.raises(ConfigurationError, match="f does not accept 4 at this position"):
        PositionalArguments(4).expect_end("f", "")
