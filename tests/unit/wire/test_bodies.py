"""Bodies beyond the recorded ones: old forms, tolerance, files, refusals."""

import copy
import json
import pickle
import struct
import zlib
from dataclasses import replace

import pytest

from sluicemq.errors import ProtocolError
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import (
    BrokerData,
    DataVersion,
    GroupConfig,
    MessageQueue,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from sluicemq.wire import bodies, registration, tables

VERSION = DataVersion(counter=3, timestamp_ms=1795226971780, state_version=1)
TOPIC = TopicConfig("T", 4, 4, 6)
QUEUE = MessageQueue("T", "b", 1)
ROUTE = TopicRoute(
    (BrokerData("b", "c", {0: "1.2.3.4:10911", 1: "1.2.3.4:10921"}, True, "east"),),
    (QueueData("b", 4, 8, 6, 1),),
    "b:4",
)


def test_a_route_has_quoted_ids_for_new_clients_and_bare_ones_for_old() -> None:
    new = bodies.encode_topic_route(ROUTE, standard=True)
    old = bodies.encode_topic_route(ROUTE, standard=False)
    assert b'"brokerAddrs":{"0":"1.2.3.4:10911","1":"1.2.3.4:10921"}' in new
    assert b'"brokerAddrs":{0:"1.2.3.4:10911",1:"1.2.3.4:10921"}' in old
    assert bodies.decode_topic_route(new) == bodies.decode_topic_route(old) == ROUTE


def test_a_registration_survives_both_forms() -> None:
    table = tables.TopicTable(
        {"T": TOPIC, "U": TopicConfig("U", 1, 2, 7, attributes={"message.type": "FIFO"})}, VERSION
    )
    body = registration.RegisterBody(table, ("10.0.0.1:1",))
    assert registration.decode_register_body(registration.encode_register_body(body)) == body
    packed = registration.encode_register_body(body, compressed=True)
    assert registration.decode_register_body(packed, compressed=True) == body
    assert registration.decode_register_body(packed, compressed=False) == body


def test_the_compressed_registration_is_laid_out_as_java_reads_it() -> None:
    body = registration.RegisterBody(tables.TopicTable({"T": TOPIC}, VERSION))
    data = zlib.decompress(registration.encode_register_body(body, compressed=True))
    size = struct.unpack_from(">i", data)[0]
    assert json.loads(data[4 : 4 + size]) == {
        "counter": 3, "stateVersion": 1, "timestamp": 1795226971780,
    }  # fmt: skip
    rest = data[4 + size :]
    text = b"T 4 4 6 SINGLE_TAG {}"
    assert rest == (
        struct.pack(">ii", 1, len(text))
        + text
        + struct.pack(">i", 2)
        + b"[]"
        + struct.pack(">i", 0)
    )


def test_an_old_registration_is_the_topic_table_alone() -> None:
    table = tables.TopicTable({"T": TOPIC}, VERSION)
    data = tables.encode_topic_table(table)
    assert registration.decode_register_body(data, version=36).table == table
    assert registration.decode_register_body(b"").table == tables.TopicTable()


@pytest.mark.parametrize(
    "data",
    [
        b"no zlib",
        zlib.compress(b""),
        zlib.compress(struct.pack(">i", 99)),
        zlib.compress(struct.pack(">i", -1)),
        zlib.compress(struct.pack(">iii", 0, 1, 3) + b"T 4"),
        zlib.compress(struct.pack(">iii", 0, 1, 9) + b"T a b 6 S"),
        zlib.compress(struct.pack(">ii", 0, 0) + struct.pack(">i", 2) + b"{}"),
        zlib.compress(b"x" * 200)[:-9],
    ],
)
def test_a_broken_compressed_registration_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        registration.decode_register_body(data, compressed=True)


def test_a_registration_that_inflates_without_end_is_refused() -> None:
    bomb = zlib.compress(struct.pack(">i", 1 << 20) + bytes(1 << 30 >> 4))
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        registration.decode_register_body(bomb, compressed=True, bytes_max=1000)
    with pytest.raises(ProtocolError, match="announces 1048576 bytes"):
        registration.decode_register_body(bomb, compressed=True, bytes_max=1 << 19)


@pytest.mark.parametrize("is_spaced", [False, True])
@pytest.mark.parametrize("is_odd", [False, True])
def test_a_large_registration_says_the_same_topic_by_topic(is_spaced: bool, is_odd: bool) -> None:
    """Above 64 KiB topics are cut out of the text one by one."""
    names = [f'T{{"}},\\"é{at}' for at in range(2000)]
    topics = {name: replace(TOPIC, name=name, attributes={"+a": '}"'}) for name in names}
    body = registration.RegisterBody(tables.TopicTable(topics, VERSION), ("1.2.3.4:5",))
    data = registration.encode_register_body(body)
    if is_spaced:
        data = json.dumps(json.loads(data), indent=1).encode()
    if is_odd:  # what only the tolerant parser reads stands beside the table
        data = data.replace(b'"topicQueueMappingInfoMap"', b'"odd":{1:{2:3}},"other"')
    assert len(data) > registration.INFLATE_BYTES
    assert registration.decode_register_body(data) == body


@pytest.mark.parametrize(
    ("begin", "value"),
    [(b'{"topicConfigSerializeWrapper":{"x":[', b"1,"), (b"{1:[", b"1,"), (b"[", b'"",'),
     (b'{"topicConfigSerializeWrapper":{"topicConfigTable":{', b'"a":[],')],
)  # fmt: skip
def test_a_large_registration_that_is_no_table_of_topics_is_refused(
    begin: bytes, value: bytes
) -> None:
    with pytest.raises(ProtocolError, match="the limit is 1048576 bytes and 262144 values"):
        registration.decode_register_body(begin + value * 1_000_000)


def test_a_registration_has_so_many_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REGISTRATION_TOPICS_MAX", 800)
    topics = {f"topic-{at:0100}": TOPIC for at in range(801)}
    body = registration.RegisterBody(tables.TopicTable(topics, VERSION))
    for compressed in (True, False):
        data = registration.encode_register_body(body, compressed=compressed)
        with pytest.raises(ProtocolError, match="more than 800 topics"):
            registration.decode_register_body(data, compressed=compressed)


@pytest.mark.parametrize("line", [b"t 4 4 6 S {1:1}", b't 4 4 6 S {"a":"' + b"x" * 5000 + b'"}'])
def test_the_attributes_of_a_topic_are_short_and_plain(line: bytes) -> None:
    data = struct.pack(">iii", 0, 1, len(line)) + line + struct.pack(">ii", 0, 0)
    with pytest.raises(ProtocolError, match="attributes of the topic 't'"):
        registration.decode_register_body(zlib.compress(data), compressed=True)


def test_topics_of_a_file_are_read_with_java_defaults() -> None:
    old = b'{"dataVersion":{"counter":1,"timestatmp":5},"topicConfigTable":{"T":{"perm":6}}}'
    table = tables.decode_topic_table(old)
    assert table.topics["T"] == TopicConfig("T", 16, 16, 6)
    assert table.data_version == DataVersion(counter=1)


def test_files_read_back() -> None:
    topics = tables.TopicTable({"T": TOPIC}, VERSION)
    assert tables.decode_topic_table_file(tables.encode_topic_table_file(topics)) == topics
    policy = {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 5000}}
    group = GroupConfig("G", retry_times_max=3, retry_policy=policy)
    groups = tables.GroupTable({"G": group}, VERSION, {"G": {"T": 2}})
    assert tables.decode_group_table_file(tables.encode_group_table_file(groups)) == groups
    offsets = tables.ConsumerOffsets({"T@G": {0: 5, 11: 6}}, VERSION)
    text = tables.encode_consumer_offsets_file(offsets)
    assert '"T@G":{0:5,11:6\n' in text
    assert tables.decode_consumer_offsets_file(text) == offsets
    config = {"ORDER_TOPIC_CONFIG": {"T": "b:4"}}
    assert tables.decode_kv_config_file(tables.encode_kv_config_file(config)) == config


def test_offsets_of_a_java_broker_are_read_with_bare_queue_ids() -> None:
    text = '{\n\t"groupTopicMap":{"G":["T"]},\n\t"offsetTable":{"T@G":{0:1,1:2\n\t\t}\n\t}\n}'
    assert tables.decode_consumer_offsets(text).offsets == {"T@G": {0: 1, 1: 2}}
    assert tables.encode_consumer_offsets(tables.ConsumerOffsets({"T@G": {1: 6, 0: 5}})) == (
        b'{"dataVersion":{"counter":0,"stateVersion":0,"timestamp":0},"offsetTable":{"T@G":{0:5,1:6}}}'
    )


def test_a_heartbeat_with_subscriptions_survives() -> None:
    heartbeat = bodies.Heartbeat(
        "c@1",
        ("P",),
        (
            bodies.ConsumerData(
                "G",
                subscriptions=(
                    Subscription("T", "A||B", "TAG", frozenset("AB"), frozenset({65, 66}), 9),
                    Subscription("U", "a > 1", SQL92, version=10),
                ),
            ),
        ),
        77,
        False,
    )
    assert bodies.decode_heartbeat(bodies.encode_heartbeat(heartbeat)) == heartbeat


def test_sets_that_a_client_sends_as_null_are_empty() -> None:
    body = (
        b'{"clientID":"c","producerDataSet":null,"consumerDataSet":[{"groupName":"G",'
        b'"subscriptionDataSet":[{"topic":"T","subString":"*","tagsSet":null,"codeSet":null}]}]}'
    )
    consumer = bodies.decode_heartbeat(body).consumers[0]
    assert consumer.consume_type == "CONSUME_PASSIVELY"
    assert consumer.subscriptions == (Subscription("T"),)


def test_queues_as_keys_are_read_raw_and_as_text() -> None:
    raw = bodies.encode_queue_offsets({QUEUE: 5})
    assert raw == b'{"offsetTable":{{"brokerName":"b","queueId":1,"topic":"T"}:5}}'
    text = json.dumps({"offsetTable": {'{"brokerName":"b","queueId":1,"topic":"T"}': 5}})
    assert bodies.decode_queue_offsets(raw) == bodies.decode_queue_offsets(text) == {QUEUE: 5}


def test_statistics_survive() -> None:
    topic = bodies.TopicStats({QUEUE: bodies.QueueStats(0, 3, 99)}, 0.5)
    assert bodies.decode_topic_stats(bodies.encode_topic_stats(topic)) == topic
    group = bodies.ConsumeStats({QUEUE: bodies.QueueProgress(9, 8, 7, 6)}, 1.5)
    assert bodies.decode_consume_stats(bodies.encode_consume_stats(group)) == group


def test_small_bodies_survive() -> None:
    assert tables.decode_data_version(tables.encode_data_version(VERSION)) == VERSION
    batch = bodies.LockBatch("G", "c", (QUEUE,), True)
    assert bodies.decode_lock_batch(bodies.encode_lock_batch(batch)) == batch
    check = bodies.CheckClientConfig("c", "G", Subscription("T", "a > 1", SQL92, version=1))
    assert bodies.decode_check_client_config(bodies.encode_check_client_config(check)) == check
    member = bodies.encode_broker_member_group("c", "b", {0: "x:1"})
    assert member == (
        b'{"brokerMemberGroup":{"brokerAddrs":{0:"x:1"},"brokerName":"b","cluster":"c"}}'
    )
    assert bodies.decode_broker_member_group(member) == BrokerData("b", "c", {0: "x:1"})
    assert bodies.encode_topic_list(["b", "a"]) == b'{"topicList":["a","b"]}'
    assert b'"brokerAddr":"h:1"' in bodies.encode_topic_list([], "h:1")
    people = bodies.encode_producer_connections([bodies.Connection("c", "h:1", "GO", 317)])
    assert bodies.decode_consumer_connections(people).connections == (
        bodies.Connection("c", "h:1", "GO", 317),
    )


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (bodies.decode_topic_route, b""),
        (bodies.decode_topic_route, b"[]"),
        (bodies.decode_topic_route, b'{"brokerDatas":{}}'),
        (bodies.decode_topic_route, b'{"brokerDatas":[5]}'),
        (bodies.decode_topic_route, b'{"brokerDatas":[{"brokerAddrs":{"x":"h:1"}}]}'),
        (bodies.decode_topic_route, b'{"queueDatas":[{"perm":"six"}]}'),
        (bodies.decode_heartbeat, b'{"consumerDataSet":[7]}'),
        (bodies.decode_heartbeat, b"{bad"),
        (bodies.decode_lock_batch, b'{"mqSet":[{"queueId":1}]}'),
        (bodies.decode_queue_offsets, b'{"offsetTable":{"x":5}}'),
        (bodies.decode_topic_stats, b'{"topicPutTps":"many"}'),
        (bodies.decode_kv_table, b'{"table":[]}'),
    ],
)
def test_a_body_of_another_shape_is_a_protocol_error(decode, data) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProtocolError):
        decode(data)


def test_bodies_are_frozen_values_that_travel_between_processes() -> None:
    stats = bodies.QueueStats(1, offset_max=2, last_time_ms=3)
    assert repr(stats) == "QueueStats(offset_min=1, offset_max=2, last_time_ms=3)"
    assert pickle.loads(pickle.dumps(stats)) == copy.copy(stats) == stats
    assert hash(stats) == hash(bodies.QueueStats(1, 2, 3))
    assert stats != bodies.QueueStats(1, 2, 4)
    first, second = tables.TopicTable(), tables.TopicTable()
    assert first == second
    assert first.topics is not second.topics
    with pytest.raises(AttributeError, match="QueueStats is frozen: offset_min cannot be set"):
        stats.offset_min = 5  # type: ignore[misc]
    with pytest.raises(TypeError, match="QueueStats requires the argument last_time_ms"):
        bodies.QueueStats(1, 2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="QueueStats has no fields size"):
        bodies.QueueStats(1, 2, 3, size=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="QueueStats takes at most 3 arguments, got 4"):
        bodies.QueueStats(1, 2, 3, 4)  # type: ignore[call-arg]
