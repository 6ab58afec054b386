"""Pure parts of operating consumers: rates, replies, what a reset changes."""

import pytest

from sluicemq.client.admin.group_offsets import OffsetChange
from sluicemq.client.core.consuming import TopicConsumeStats
from sluicemq.client.core.messages import make_outgoing
from sluicemq.client.core.replies import (
    make_reply_request,
    make_request_message,
    parse_pushed_reply,
)
from sluicemq.errors import ConfigurationError
from sluicemq.model.ids import Host
from sluicemq.model.message import Message, StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_properties
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command

QUEUE = MessageQueue("T", "b", 0)


def stored(properties: dict[str, str]) -> StoredMessage:
    host = Host("127.0.0.1", 10911)
    return StoredMessage("T", 0, 1, 2, 3, b"ping", properties, 0, 0, 4, host, 5, host, 0, 0, 0, "b")


def test_rates_are_of_the_last_minute() -> None:
    counts = TopicConsumeStats()
    counts.record_pull(0.5, 100)
    for second in range(10, 40):
        counts.record_acks(float(second), 0.002)
    counts.record_failure(41.0, 0.012)
    rates = counts.rates(61.0)
    assert rates.pulls_per_second == 0, "too long ago"
    assert rates.done_per_second == 30 / 60
    assert rates.failed_per_second == 1 / 60
    assert rates.consume_ms == pytest.approx((30 * 2 + 12) / 31)
    assert counts.rates(200.0) == bodies.TopicRates(failures=1)
    assert counts.rates(4000.0) == bodies.TopicRates()


def test_counts_do_not_grow() -> None:
    counts = TopicConsumeStats()
    for second in range(20_000):
        counts.record_acks(float(second), 0.0)
        counts.record_failure(float(second), 0.0)
    assert len(counts._cells) <= 60
    assert len(counts._failure_cells) <= 61


def test_a_request_names_the_client_and_the_request() -> None:
    outgoing = make_request_message(make_outgoing(Message("T", b"ping"), "ID"), "me@1", "42", 3000)
    properties = decode_properties(outgoing.properties.encode())
    assert properties["CORRELATION_ID"] == "42"
    assert properties["REPLY_TO_CLIENT"] == "me@1"
    assert properties["TTL"] == "3000"


def test_a_request_with_too_many_properties_is_refused() -> None:
    message = Message("T", b"ping", properties={"big": "x" * 32_600})
    with pytest.raises(ConfigurationError, match="32,767"):
        make_request_message(make_outgoing(message, "ID"), "me@1", "4" * 200, 3000)


def test_a_reply_goes_to_the_reply_topic_of_the_requests_cluster() -> None:
    asked = {"CORRELATION_ID": "42", "REPLY_TO_CLIENT": "me@1", "TTL": "3000", "CLUSTER": "East"}
    queue, command = make_reply_request(stored(asked), b"pong", "IDR", 7)
    fields = command.fields or {}
    assert queue == QUEUE, "whose broker has the requester's heartbeats"
    assert fields["b"] == "East_REPLY_TOPIC"
    assert decode_properties(fields["i"].encode()) == {
        "UNIQ_KEY": "IDR", "MSG_TYPE": "reply", "CORRELATION_ID": "42", "REPLY_TO_CLIENT": "me@1",
        "TTL": "3000",
    }  # fmt: skip


def test_a_reply_that_java_sent_is_read() -> None:
    """The fields of a recorded frame (spec/traffic java53-request-reply), one host as Java writes
    socket addresses."""
    fields = {
        "queueId": "0", "flag": "0", "sysFlag": "0", "reconsumeTimes": "0",
        "storeTimestamp": "1795231902376", "unitMode": "false", "defaultTopic": "TBW102",
        "bornHost": "/127.0.0.1:33620", "defaultTopicQueueNums": "4", "producerGroup": "P",
        "topic": "DefaultCluster_REPLY_TOPIC", "bornTimestamp": "1795231902371",
        "storeHost": "127.0.0.1:30911",
        "properties": "CORRELATION_ID\x010bde842a\x02MSG_TYPE\x01reply\x02",
    }  # fmt: skip
    reply = parse_pushed_reply(Command(326, fields, b"pong"))
    assert (reply.body, reply.properties["CORRELATION_ID"]) == (b"pong", "0bde842a")
    assert reply.born_host == Host("127.0.0.1", 33620)


@pytest.mark.parametrize(
    ("old", "new", "again", "skipped"),
    [(6, 0, 4, 0), (6, 10, 0, 4), (None, 10, 0, 8), (1, 10, 0, 8), (6, 6, 0, 0), (None, 2, 0, 0)],
)
def test_a_change_counts_what_comes_again_and_what_is_skipped(
    old: int | None, new: int, again: int, skipped: int
) -> None:
    """The queue holds 2 to 10."""
    change = OffsetChange(QUEUE, old, new, 2, 10)
    assert (change.again, change.skipped) == (again, skipped)


def test_running_information_of_any_client_is_read() -> None:
    """A Java consumer's map may refer to a key it has written before."""
    text = (
        b'{"mqTable":{{"$ref":"$.nowhere"}:{"commitOffset":1},{"brokerName":"b","queueId":0,'
        b'"topic":"T"}:{"cachedMsgCount":2,"commitOffset":3,"droped":true}},"properties":{"a":"b"},'
        b'"statusTable":{"T":{"consumeRT":1.5}},"subscriptionSet":[{"topic":"T"}]}'
    )
    info = bodies.decode_running_info(text)
    assert info.queues[QUEUE] == bodies.QueueState(3, cached_count=2, dropped=True)
    assert info.rates["T"].consume_ms == 1.5
    assert bodies.decode_running_info(bodies.encode_running_info(info)) == info
