"""What a row that was read from a topic means when it is written: property by property, and to
which queue it goes. The whole way, with brokers: tests/integration/spark/test_spark_copies.py."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.requests import SendResult, SendStatus
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.model.properties import RESERVED, is_copied
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_batch, parse_property_text
from sluicemq.spark.rows import (
    adapt_replayed_columns,
    convert_flags,
    encode_properties,
    encode_rows,
)
from sluicemq.spark.schema import AUTOMATIC_PROPERTIES
from sluicemq.spark.senders import (
    DEDUP_PROPERTY,
    Destination,
    DirectSender,
    PreparedRows,
    StagingSender,
    TaskAttempt,
    select_queue_by_id,
    send_all,
)
from sluicemq.wire.staging import STAGE_PROPERTY, Owner, Stage, parse_stage

NOW_MS = 1_700_000_000_000
MAP = pa.map_(pa.string(), pa.string())

COPIED = [
    "RETRY_TOPIC",
    "ORIGIN_MESSAGE_ID",
    "DLQ_ORIGIN_TOPIC",
    "DLQ_ORIGIN_MESSAGE_ID",
    "__BORNHOST",
    "BORN_TIMESTAMP",
    "TRACE_CONTEXT",
    "_SYS_MSG_PRIORITY_",
    "__LITE_TOPIC",
    "INSTANCE_ID",
    "CORRELATION_ID",
    "BUYER_ID",
    "ORIGIN_GROUP",
    "EXTEND_UNIQ_INFO",
]
COLUMNS_OF_THEIR_OWN = [
    "KEYS",
    "TAGS",
    "UNIQ_KEY",
    "WAIT",
    "MSG_REGION",
    "TRACE_ON",
    "CLUSTER",
    "__SHARDINGKEY",
]
REQUESTS = [
    "DELAY",
    "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS",
    "TIMER_DELIVER_MS",
    "TIMER_DEL_UNIQKEY",
    "TRAN_MSG",
]
LEFT_OUT = sorted({*RESERVED} - {*COPIED, *COLUMNS_OF_THEIR_OWN, *REQUESTS})


def written(*rows: Mapping[str, str | None] | None, **columns: Any) -> list[dict[str, str]]:
    """The properties of the messages that rows with these maps become."""
    maps = pa.array([None if row is None else list(row.items()) for row in rows], MAP)
    values, _ = adapt_replayed_columns({"properties": maps, **columns}, NOW_MS)
    found = encode_properties(values, len(rows)).to_pylist()
    made = [parse_property_text(one.decode()) for one in found]
    for one in made:
        assert one.pop("WAIT") == "true"
    return made


@pytest.mark.parametrize("name", COPIED)
def test_content_and_origin_are_copied(name: str) -> None:
    assert written({"own": "1", name: "x"}) == [{"own": "1", name: "x"}]
    assert is_copied(name)


@pytest.mark.parametrize("name", [*LEFT_OUT, "__RMQ.TRANSIENT.x"])
def test_what_the_first_delivery_needed_is_left_out_and_named(name: str) -> None:
    rows = [{"own": "1", name: "x"}, {"own": "2"}, None]
    maps = pa.array([None if row is None else list(row.items()) for row in rows], MAP)
    assert written(*rows) == [{"own": "1"}, {"own": "2"}, {}]
    assert adapt_replayed_columns({"properties": maps}, NOW_MS)[1] == {name}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_delay_or_transaction_that_was_carried_out_is_left_out(name: str) -> None:
    value = "true" if name == "TRAN_MSG" else "5"
    done = {"own": "1", name: value, "REAL_TOPIC": "T", "REAL_QID": "0"}
    assert written({"own": "0"}, done) == [{"own": "0"}, {"own": "1"}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DELAY", "0"),
        ("DELAY", "-1"),
        ("TIMER_DELAY_SEC", "0"),
        ("TIMER_DELAY_MS", "-5"),
        ("TIMER_DELIVER_MS", str(NOW_MS)),
        ("TRAN_MSG", "false"),
    ],
)
def test_a_request_for_nothing_is_left_out(name: str, value: str) -> None:
    assert written({"own": "1", name: value}) == [{"own": "1"}]


@pytest.mark.parametrize(
    ("name", "value", "column"),
    [
        ("DELAY", "3", "delay_level"),
        ("TIMER_DELAY_SEC", "5", "delay_ms"),
        ("TIMER_DELAY_MS", "5", "delay_ms"),
        ("TIMER_DELIVER_MS", str(NOW_MS + 1), "deliver_at"),
        ("TIMER_DELIVER_MS", "soon", "deliver_at"),
        ("TRAN_MSG", "true", "Remove the property"),
    ],
)
def test_a_request_that_was_not_carried_out_is_refused(name: str, value: str, column: str) -> None:
    others = {"own": "1", "DELAY": "3", "REAL_TOPIC": "T"}
    with pytest.raises(ConfigurationError, match=rf"{name}.*reserved.*{column}"):
        written(others, {"own": "2", name: value})


def test_the_sharding_key_of_a_stored_message_is_that_of_the_row() -> None:
    rows = [{"__SHARDINGKEY": "a"}, {"x": "1"}, {"__SHARDINGKEY": "b", "y": "2"}, None]
    assert [one.get("__SHARDINGKEY") for one in written(*rows)] == ["a", None, "b", None]
    given = pa.array(["c", "d", None, ""], pa.string())
    found = written(*rows, sharding_key=given)
    assert [one.get("__SHARDINGKEY") for one in found] == ["c", "d", "b", None]
    assert [one.get("y") for one in found] == [None, None, "2", None]


NAMES = st.sampled_from(
    [
        "own",
        "a",
        "DELAY",
        "TRAN_MSG",
        "REAL_TOPIC",
        "RETRY_TOPIC",
        "PGROUP",
        "POP_CK",
        "TTL",
        "__SHARDINGKEY",
        "KEYS",
        "__RMQ.x",
    ]
)
MAPS = st.lists(
    st.none() | st.dictionaries(NAMES, st.none() | st.sampled_from(["5", "0", "Ä"])),
    min_size=1,
    max_size=5,
)


def expected(row: Mapping[str, str | None] | None) -> dict[str, str] | None:
    """A message by the rules, one row at a time; None when the row is refused."""
    own = {name: text for name, text in (row or {}).items() if text is not None}
    if "REAL_TOPIC" not in (row or {}) and own.get("DELAY", "0") != "0":
        return None
    kept = (*COPIED, "__SHARDINGKEY")
    return {
        name: text
        for name, text in own.items()
        if name in kept or (name not in RESERVED and not name.startswith("__RMQ."))
    }


@given(MAPS)
def test_columns_say_what_the_rules_say_row_by_row(
    rows: list[dict[str, str | None] | None],
) -> None:
    wanted = [expected(row) for row in rows]
    if None in wanted:
        with pytest.raises(ConfigurationError, match="DELAY"):
            written(*rows)
    else:
        assert written(*rows) == wanted


def test_slices_are_taken_as_they_are() -> None:
    rows = [{"n": str(number), "DELAY": "1", "REAL_TOPIC": "T"} for number in range(6)]
    whole = pa.array([list(row.items()) for row in rows], MAP)
    values, _ = adapt_replayed_columns({"properties": whole[2:4]}, NOW_MS)
    assert values["properties"].to_pylist() == [[("n", "2")], [("n", "3")]]


def test_properties_that_need_no_look_are_the_same_column() -> None:
    column = pa.array([[("a", "1")], None], MAP)
    values = {"properties": column}
    assert adapt_replayed_columns(values, NOW_MS) == (values, frozenset())
    assert {*COLUMNS_OF_THEIR_OWN} >= AUTOMATIC_PROPERTIES


QUEUES = [MessageQueue("T", f"broker-{name}", number) for name in "abc" for number in range(2)]


@pytest.mark.parametrize("broker", ["broker-a", "broker-b", "broker-c"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_row_goes_to_the_queue_of_its_own_broker(broker: str, number: int) -> None:
    expected = MessageQueue("T", broker, number)
    assert select_queue_by_id(QUEUES, Destination("T", number, None, broker)) == expected


def test_rows_of_a_broker_of_another_cluster_stay_together_and_do_not_all_go_to_one() -> None:
    brokers = [f"other-{number}" for number in range(30)]
    found = [select_queue_by_id(QUEUES, Destination("T", 1, None, it)).broker for it in brokers]
    assert found == [
        select_queue_by_id(QUEUES, Destination("T", 1, None, it)).broker for it in brokers
    ]
    assert set(found) == {"broker-a", "broker-b", "broker-c"}
    assert select_queue_by_id(QUEUES, Destination("T", 1)).broker == "broker-a"
    with pytest.raises(
        RouteNotFoundError, match=r"has no writable queue 7.*writable queues are: 0, 1"
    ):
        select_queue_by_id(QUEUES, Destination("T", 7, None, "broker-a"))


def test_flags_are_those_of_the_column() -> None:
    flags = convert_flags(pa.array([1, None, -2147483648], pa.int64()))
    made = encode_rows(pa.array([b"a", b"b", b""]), pa.array([b"", b"", b""]), flags=flags)
    found = [(flag, bytes(body)) for flag, body, _, _ in decode_batch(made.request_body(0, 3))]
    assert found == [(1, b"a"), (0, b"b"), (-2147483648, b"")]
    with pytest.raises(ConfigurationError, match="32 bits"):
        convert_flags(pa.array([1 << 31], pa.int64()))


class Producer:
    """What senders ask of one: it keeps what is sent, message by message."""

    timeout_ms = 1000

    def __init__(self) -> None:
        self.alone: list[tuple[OutgoingMessage, MessageQueue | None]] = []
        self.batches: list[bytes] = []

    def write_queues(self, topic: str) -> list[MessageQueue]:
        return [queue for queue in QUEUES if queue.topic == topic]

    def send_outgoing(
        self, outgoing: OutgoingMessage, *, queue: MessageQueue | None = None
    ) -> SendResult:
        self.alone.append((outgoing, queue))
        return self._result(queue)

    def send_encoded(
        self, topic: str, body: memoryview, *, queue: MessageQueue | None = None
    ) -> SendResult:
        self.batches.append(bytes(body))
        return self._result(queue)

    def _result(self, queue: MessageQueue | None) -> SendResult:
        return SendResult(SendStatus.OK, "ID", "OFF", queue or QUEUES[0], 0)


def sent(sender: Any, **columns: Any) -> None:
    batch = pa.record_batch(columns)
    try:
        sender.send(PreparedRows(batch, {name: name for name in columns}, "T"))
        sender.send_thread.flush()
    finally:
        sender.send_thread.close()


def test_a_delayed_row_keeps_everything_that_another_row_has() -> None:
    producer: Any = Producer()
    sent(
        DirectSender(producer, 10),
        body=pa.array([b"now", b"later", b"at"]),
        message_id=pa.array(["ID0", "ID1", None]),
        system_properties=pa.array([[("RETRY_TOPIC", "x")]] * 3, MAP),
        properties=pa.array([[("own", "1"), ("__SHARDINGKEY", "k")]] * 3, MAP),
        flag=pa.array([1, 2, None], pa.int32()),
        queue_id=pa.array([1, 1, 0], pa.int32()),
        broker=pa.array(["broker-c", "broker-b", "broker-a"]),
        delay_level=pa.array([None, 3, None], pa.int32()),
        delay_ms=pa.array([None, None, 500], pa.int64()),
    )
    (batch,) = producer.batches
    ((flag, body, properties, _),) = decode_batch(batch)
    rows = [(flag, bytes(body), parse_property_text(properties.decode()))]
    rows += [(it.flag, it.body, parse_property_text(it.properties)) for it, _ in producer.alone]
    common = {"WAIT": "true", "RETRY_TOPIC": "x", "own": "1", "__SHARDINGKEY": "k"}
    made_id = rows[2][2]["UNIQ_KEY"]
    assert rows == [
        (1, b"now", {"UNIQ_KEY": "ID0", **common}),
        (2, b"later", {"UNIQ_KEY": "ID1", **common, "DELAY": "3"}),
        (0, b"at", {"UNIQ_KEY": made_id, **common, "TIMER_DELAY_MS": "500"}),
    ]
    assert [queue for _, queue in producer.alone] == [QUEUES[3], QUEUES[0]]
    assert len(made_id) == 32


def test_a_row_that_is_too_large_for_a_batch_goes_alone() -> None:
    body = b"x" * (4 << 20)
    for sender_of in (
        lambda producer: DirectSender(producer, 10),
        lambda producer: StagingSender(producer, 10, TaskAttempt("q", 1, 0, 0), ("broker-a",)),
    ):
        producer: Any = Producer()
        sent(
            sender_of(producer),
            body=pa.array([b"a", body, b"c"]),
            message_id=pa.array(["A", "B", "C"]),
        )
        assert [len(one) < 1000 for one in producer.batches] == [True, True]
        ((outgoing, _),) = producer.alone
        assert outgoing.body == body
        assert parse_property_text(outgoing.properties)["UNIQ_KEY"] == outgoing.message_id == "B"


def properties_of(batch: bytes) -> list[dict[str, str]]:
    return [parse_property_text(properties.decode()) for _, _, properties, _ in decode_batch(batch)]


def test_each_row_of_a_task_has_its_own_key_and_the_same_one_when_the_task_runs_again() -> None:
    def keys(attempt: int) -> list[str]:
        producer: Any = Producer()
        sender = DirectSender(producer, 10, TaskAttempt("q", 3, 1, attempt))
        columns = [{"body": pa.array([b"a", b"b"])}, {"body": pa.array([b"c", b"d", b"e"])}]
        batches = [pa.record_batch(column) for column in columns]
        send_all((PreparedRows(one, {"body": "body"}, "T") for one in batches), sender)
        return [one[DEDUP_PROPERTY] for batch in producer.batches for one in properties_of(batch)]

    assert keys(attempt=0) == [f"q/3/1/{number}" for number in range(5)]
    assert keys(attempt=1) == keys(attempt=0)


def test_a_staged_row_says_its_topic_its_queue_and_its_delay() -> None:
    producer: Any = Producer()
    task = TaskAttempt("q", 3, 1, 0)
    sent(
        StagingSender(producer, 10, task, ("broker-a", "broker-b", "broker-c")),
        body=pa.array([b"a", b"b", b"c"]),
        queue_id=pa.array([1, None, 0], pa.int32()),
        broker=pa.array(["broker-b", None, "broker-b"]),
        delay_level=pa.array([None, 3, 2], pa.int32()),
    )
    stages = {
        parse_stage(properties[STAGE_PROPERTY].encode())
        for batch in producer.batches
        for properties in properties_of(batch)
    }
    owner = Owner("q", 3, 1, 0)
    assert stages == {Stage(owner, "T", 1), Stage(owner, "T", None, "L3"),
                      Stage(owner, "T", 0, "L2")}  # fmt: skip
