"""Messages by position and by name, and how results look."""

import copy
import pickle
from typing import Any

import pytest

from sluicemq.client.core.requests import SendResult as CoreSendResult
from sluicemq.client.core.requests import SendStatus as CoreSendStatus
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue as CoreQueue
from sluicemq.rocketmq import (
    LocalTransactionState,
    Message,
    MessageExt,
    MessageQueue,
    PullResult,
    PullStatus,
    SendResult,
    SendStatus,
    TransactionSendResult,
)
from sluicemq.rocketmq.messages import to_model_queue

QUEUE = MessageQueue("t", "broker-a", 3)


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        (("t", b"x"), {}, ("t", None, "", 0, b"x", True)),
        (("t", "text"), {"tags": "A", "keys": ["k", "l"]}, ("t", "A", "k l", 0, b"text", True)),
        (("t",), {"body": b"x", "flag": 2}, ("t", None, "", 2, b"x", True)),
        (("t", "A", b"x"), {}, ("t", "A", "", 0, b"x", True)),
        (("t", "", b"x"), {}, ("t", None, "", 0, b"x", True)),
        (("t", "A", "k l", b"x"), {}, ("t", "A", "k l", 0, b"x", True)),
        (("t", "A", "k", 1, b"x", False), {}, ("t", "A", "k", 1, b"x", False)),
        ((), {}, ("", None, "", 0, b"", True)),
    ],
)
def test_every_constructor_of_java(
    given: tuple[Any, ...], named: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    message = Message(*given, **named)
    assert (
        message.get_topic(), message.get_tags(), message.get_keys(), message.get_flag(),
        message.get_body(), message.is_wait_store_msg_ok(),
    ) == expected  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("t", b"x", "A"), r"got b'x' as tags.*\(topic, tags, body\)"),
        (("t", "A", "x"), r"got 'x' as body.*encode"),
        (("t", "A", b"x", "k"), r"got b'x' as keys.*\(topic, tags, keys, body\)"),
        (("t", "A", "k", b"x", 1, True), r"got b'x' as flag"),
        (("t", "A", "k", 1, b"x"), "positional arguments, got 5"),
        (("t", "A", "k", True, b"x", True), "got True as flag"),
    ],
)
def test_a_wrong_order_gets_a_sentence(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Message(*given)


def test_setters_make_the_same_message() -> None:
    message = Message()
    message.set_topic("t")
    message.set_tags("A")
    message.set_keys("k l")
    message.set_flag(1)
    message.set_body("text")
    message.set_wait_store_msg_ok(False)
    message.set_delay_time_level(3)
    message.put_user_property("a", "1")
    assert message.get_user_property("a") == "1"
    assert message.get_user_property("b") is None
    frozen = message.to_model()
    assert (frozen.topic, frozen.tag, frozen.keys, frozen.flag) == ("t", "A", ("k", "l"), 1)
    assert (frozen.body, frozen.wait_store_ok, frozen.delay_level) == (b"text", False, 3)
    assert dict(frozen.properties) == {"a": "1"}
    assert copy.copy(message).to_model() == frozen
    with pytest.raises(ConfigurationError, match="'5'"):
        message.put_user_property("n", 5)  # type: ignore[arg-type]


def test_a_queue_is_equal_to_the_core_s() -> None:
    core = CoreQueue("t", "broker-a", 3)
    assert core == QUEUE == core
    assert {QUEUE: 1}[MessageQueue(*core)] == {core: 1}[MessageQueue(core)] == 1
    assert (QUEUE.get_topic(), QUEUE.get_broker_name(), QUEUE.get_queue_id()) == core
    assert QUEUE.broker_name == QUEUE.broker == "broker-a"
    assert str(QUEUE) == str(core)
    assert eval(repr(QUEUE)) == QUEUE
    assert pickle.loads(pickle.dumps(QUEUE)) == QUEUE
    assert copy.copy(QUEUE) == MessageQueue(topic="t", broker_name="broker-a", queue_id=3)
    assert sorted([QUEUE, MessageQueue("s", "b", 9)])[1] is QUEUE
    assert QUEUE not in {CoreQueue("t", "broker-a", 4), ("t", "broker-a", 3)}


def test_a_queue_is_filled_by_its_setters() -> None:
    queue = MessageQueue()
    queue.set_topic("t")
    queue.set_broker_name("broker-a")
    assert to_model_queue(queue) == ("t", "broker-a", 0)
    queue.set_queue_id(3)
    before = to_model_queue(queue)
    assert type(before) is CoreQueue
    queue.set_queue_id(4)
    assert (before.queue_id, queue.get_queue_id()) == (3, 4)
    assert to_model_queue(before) is before


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        (
            MessageQueue(),
            r"the topic of MessageQueue\('', '', 0\) must be .* not empty, got ''\. Call set_topic",
        ),
        (MessageQueue("t", "", 0), "Call set_broker_name"),
        (MessageQueue("t", "b", -1), "queue_id .* got -1. Call set_queue_id with 0 or more"),
        (MessageQueue("t", "b", "0"), "queue_id .* got '0'"),  # type: ignore[call-overload]
        (("t", "b", 0), "Pass a MessageQueue"),
    ],
)
def test_an_unfinished_queue_is_refused_where_it_is_used(queue: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        to_model_queue(queue)


@pytest.mark.parametrize(
    ("given", "named"),
    [(("t",), {}), (("t", "b"), {}), (("t", "b", 0, 1), {}), ((), {"topic": "t"}), ((), {"x": 1})],
)
def test_a_queue_has_three_values_or_none(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="set_topic, set_broker_name and set_queue_id"):
        MessageQueue(*given, **named)


def stored(body: bytes = b"x") -> StoredMessage:
    return StoredMessage(
        topic="t", queue_id=3, queue_offset=7, physical_offset=900, size_bytes=120, raw_body=body,
        properties={"TAGS": "A", "KEYS": "k l", "a": "1", "UNIQ_KEY": "ID"}, flag=1, sys_flag=0,
        born_time_ms=5, born_host=("10.0.0.1", 77), store_time_ms=6, store_host=("10.0.0.2", 88),
        reconsume_times=2, prepared_offset=0, body_crc=0, broker="broker-a",
    )  # fmt: skip


def test_a_received_message_has_java_s_getters() -> None:
    message = MessageExt(stored(), attempt=2)
    assert (message.get_topic(), message.get_tags(), message.get_keys()) == ("t", "A", "k l")
    assert (message.get_body(), message.get_flag(), message.get_msg_id()) == (b"x", 1, "ID")
    assert (message.get_broker_name(), message.get_queue_id()) == ("broker-a", 3)
    assert (message.get_queue_offset(), message.get_commit_log_offset()) == (7, 900)
    assert (message.get_born_timestamp(), message.get_store_timestamp()) == (5, 6)
    assert (message.get_reconsume_times(), message.get_store_size()) == (3, 120)
    assert message.get_transaction_id() == "ID"
    assert (message.get_property("a"), message.get_user_property("b")) == ("1", None)
    assert message.get_properties()["TAGS"] == "A"
    assert "10.0.0.1" in message.get_born_host()
    assert "10.0.0.2" in message.get_store_host()


def test_reprs_tell_the_facts() -> None:
    result = SendResult(SendStatus.SEND_OK, "ID", "OFFSET", QUEUE, 7)
    assert repr(result) == (
        "SendResult(send_status=SendStatus.SEND_OK, msg_id='ID', offset_msg_id='OFFSET', "
        "message_queue=MessageQueue('t', 'broker-a', 3), queue_offset=7, recall_handle=None)"
    )
    assert repr(MessageExt(stored(b"y" * 100))) == (
        f"MessageExt(topic='t', tags='A', keys='k l', body={b'y' * 61!r}… 100 B, msg_id='ID', "
        "broker_name='broker-a', queue_id=3, queue_offset=7, reconsume_times=2, "
        "properties={'a': '1'})"
    )
    assert repr(Message("t", "A", b"x")) == (
        "Message(topic='t', tags='A', keys='', body=b'x', properties={})"
    )
    pulled = PullResult(PullStatus.FOUND, 8, 0, 9, [])
    assert "next_begin_offset=8, min_offset=0, max_offset=9" in repr(pulled)
    assert pulled.get_pull_status() is PullStatus.FOUND
    assert (pulled.get_next_begin_offset(), pulled.get_msg_found_list()) == (8, [])


def test_a_transaction_s_result_is_a_send_s_result() -> None:
    core = CoreSendResult(CoreSendStatus(0), "ID", "OFFSET", CoreQueue(*QUEUE), 7)
    result = TransactionSendResult.from_core(
        core, transaction_id="TX", local_transaction_state=LocalTransactionState.COMMIT_MESSAGE
    )
    assert isinstance(result, SendResult)
    assert (result.get_send_status(), result.get_msg_id()) == (SendStatus.SEND_OK, "ID")
    assert (result.get_offset_msg_id(), result.get_queue_offset()) == ("OFFSET", 7)
    assert result.get_message_queue().get_broker_name() == "broker-a"
    assert result.get_transaction_id() == "TX"
    assert result.get_local_transaction_state() is LocalTransactionState.COMMIT_MESSAGE
