"""Reserved properties, for each name and each way into the broker: what is stored, and what a
consumer receives, is the same whichever way the message took.

`FORGED` is the table of what a forger can do with a property that a broker, a proxy or a client
believes: each row says who believes it, and names the test that holds it harmless.
"""

import os
import zlib
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.pops import pop_fields
from simulation.stepped import (
    START_MS,
    SteppedBroker,
    SteppedClient,
    send_fields,
)
from sluicemq.client.core.consuming import make_retry_message
from sluicemq.config import BrokerConfig
from sluicemq.model.message import StoredMessage
from sluicemq.model.properties import RESERVED, OnSend, Reserved
from sluicemq.model.system_names import STAGING_TOPIC
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.record.batch_columns import COUNT_MIN
from sluicemq.record.codec import decode_records, encode_batch, parse_property_text
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.verify import verify
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.staging import Owner, Stage, StagedRange, encode_staged_ranges

pytestmark = pytest.mark.slow

MANY = COUNT_MIN
KEPT, REMOVED = Reserved("", OnSend.KEPT), OnSend.REMOVED
FILLED = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}


def start(*, is_compiled: bool = True, columns: bool = True) -> tuple[SteppedBroker, SteppedClient]:
    broker = SteppedBroker(
        config=BrokerConfig(
            broker_name="broker-a",
            metrics_enable=False,
            auto_create_topic=True,
        )
    )
    broker.core.topics.put(TopicConfig("T", 1, 1), TopicConfig("secret", 1, 1))
    broker.core.groups.put(GroupConfig("G", retry_queues=1))
    broker.store.writer.can_append_columns = columns
    if not is_compiled:
        broker.dispatcher.run_engine = None
        broker.core.send.compiled = None
    return broker, broker.connect()


def stored(broker: SteppedBroker, topic: str = "T") -> list[StoredMessage]:
    result = broker.store.reader.read(topic, 0, 0, 10_000, 1 << 26)
    return [m for part in result.data for m in decode_records(part)]


def text_of(name: str, value: str, number: int) -> str:
    return f"UNIQ_KEY\x01{number:032X}\x02own\x01{number % 7}\x02{name}\x01{value}\x02"


# ------------------------------------------------------------------------------- the ways in

Way = Callable[[str, str], "StoredMessage | int"]
"""Sends a message with a property; the stored message, or the code of the refusal."""


LONG: Mapping[str, str] = dict(
    zip(
        "abcdefghijkm",
        (
            "producerGroup",
            "topic",
            "defaultTopic",
            "defaultTopicQueueNums",
            "queueId",
            "sysFlag",
            "bornTimestamp",
            "flag",
            "properties",
            "reconsumeTimes",
            "unitMode",
            "batch",
        ),
        strict=True,
    )
)


def long_names(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields of SEND_MESSAGE (10) for those of SEND_MESSAGE_V2 (310)."""
    return {LONG[letter]: value for letter, value in fields.items()}


def _single(code: int, *, is_compiled: bool) -> Way:
    def send(name: str, value: str) -> StoredMessage | int:
        broker, client = start(is_compiled=is_compiled)
        fields: dict[str, object] = send_fields(properties=text_of(name, value, 1))
        if code == 10:
            fields = long_names(fields)
        answer = client.call(code, fields, b"body")
        return stored(broker)[0] if not answer.code else answer.code

    return send


def _batch(count: int, *, is_compiled: bool, columns: bool, is_alike: bool = True) -> Way:
    def send(name: str, value: str) -> StoredMessage | int:
        broker, client = start(is_compiled=is_compiled, columns=columns)
        entries = [
            (
                0,
                b"body" * 8,
                (text_of(name, value, n) if is_alike or n == 1 else f"a\x01{n}\x02").encode(),
            )
            for n in range(count)
        ]
        answer = client.call(320, send_fields(m="true"), encode_batch(entries))
        return stored(broker)[1] if not answer.code else answer.code

    return send


def _staged(*, columns: bool) -> Way:
    """A row of an exactly-once sink, as it lies in its topic after the commit."""

    def send(name: str, value: str) -> StoredMessage | int:
        broker, client = start(columns=columns)
        client.call(900201, {"query": "q", "epoch": 1, "step": "prepare", "topics": "T"})
        stage = Stage(Owner("q", 1, 0, 0), "T", 0).encode()
        entries = [
            (
                0,
                b"body",
                f"SLUICE_STAGE\x01{stage}\x02SLUICE_ID\x01{n:032X}\x02own\x01{n % 7}\x02"
                f"{name}\x01{value}\x02".encode(),
            )
            for n in range(40)
        ]
        answer = client.call(320, send_fields(STAGING_TOPIC, m="true"), encode_batch(entries))
        if answer.code:
            return answer.code
        checksum = zlib.crc32(b"body" * 40)
        body = encode_staged_ranges([StagedRange("broker-a", 0, 0, 40, checksum, 0, 0)])
        for _ in range(20):
            answer = client.call(
                900201, {"query": "q", "epoch": 1, "step": "commit", "topics": "T"}, body
            )
            broker.settle()
            if (answer.fields or {}).get("state") == "published":
                return stored(broker)[1]
        return answer.code or -1

    return send


WAYS: Mapping[str, Way] = {
    "310": _single(310, is_compiled=False),
    "310 compiled": _single(310, is_compiled=True),
    "10": _single(10, is_compiled=False),
    "320": _batch(3, is_compiled=False, columns=False),
    "320 compiled": _batch(3, is_compiled=True, columns=True),
    "320 columns": _batch(MANY + 3, is_compiled=False, columns=True),
    "320 columns, one odd": _batch(MANY + 3, is_compiled=False, columns=True, is_alike=False),
    "320 many": _batch(MANY + 3, is_compiled=False, columns=False),
    "staged": _staged(columns=False),
    "staged columns": _staged(columns=True),
}
"""The reference is the first one."""
BATCHES = [way for way in WAYS if way.startswith(("320", "staged"))]


@pytest.mark.parametrize("name", sorted(set(RESERVED) - {"UNIQ_KEY", "WAIT"}))
def test_a_reserved_property_is_stored_alike_whichever_way_it_came(name: str) -> None:
    value = {"TRAN_MSG": "true", "DELAY": "1"}.get(name, "5")
    rule = RESERVED[name].on_send
    ways = BATCHES if rule is OnSend.OBEYED else WAYS
    outcomes: dict[str, object] = {}
    for way in ways:
        found = WAYS[way](name, value)
        outcomes[way] = found if isinstance(found, int) else found.properties.get(name)
    expected = {OnSend.REMOVED: None, OnSend.OBEYED: 13}.get(rule, value)
    assert outcomes == dict.fromkeys(ways, expected)


PAIRS = st.lists(
    st.tuples(
        st.sampled_from(
            sorted(
                {name for name, it in RESERVED.items() if it.on_send is not OnSend.OBEYED}
                - {"UNIQ_KEY", "WAIT"}
                | {"own", "XPOP_CK", "POP_CKX", "a"}
            )
        ),
        st.sampled_from(["5", "x y", "POP_CK", "Ä😀"]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda pair: pair[0],
)


@settings(max_examples=int(os.environ.get("SLUICEMQ_EXAMPLES", "300")) // 15, deadline=None)
@given(PAIRS)
def test_any_reserved_properties_are_stored_alike_whichever_way_they_came(
    pairs: list[tuple[str, str]],
) -> None:
    (first, value), rest = pairs[0], pairs[1:]
    value += "".join(f"\x02{name}\x01{text}" for name, text in rest)
    sent = {name: text for name, text in pairs if RESERVED.get(name, KEPT).on_send is not REMOVED}
    for way, send in WAYS.items():
        found = send(first, value)
        assert not isinstance(found, int), way
        properties = dict(found.properties)
        del properties["UNIQ_KEY"]
        properties.setdefault("own", "")
        expected = {**FILLED, "own": properties["own"], **sent}
        assert properties == expected, way


# --------------------------------------------------------------------------------- what is forged

FORGED: Mapping[str, str] = {
    "POP_CK": "test_a_stored_handle_is_not_in_the_answer_to_a_pop",
    "INNER_MULTI_QUEUE_OFFSET": "test_a_message_enters_only_its_own_queue_at_a_rebuild",
    "__CRC32#": "test_a_wrong_checksum_of_a_sender_is_no_damage",
    "TIMER_DEL_UNIQKEY": "test_only_senders_to_its_topic_take_back_a_timed_message",
    "TRANSACTION_CHECK_TIMES": "test_a_prepared_message_cannot_pass_for_a_copy",
    "TRAN_PREPARED_QUEUE_OFFSET": "test_a_prepared_message_cannot_pass_for_a_copy",
    "SLUICE_FIRST_HALF": "test_a_prepared_message_cannot_pass_for_a_copy",
    "RETRY_TOPIC": "test_a_retry_says_where_its_message_really_lay",
    "ORIGIN_MESSAGE_ID": "test_a_retry_says_where_its_message_really_lay",
    "SLUICE_LANE": "test_a_reserved_property_is_stored_alike_whichever_way_it_came",
    "SLUICE_NEXT": "test_nobody_writes_to_the_topics_of_the_broker",
    "REAL_TOPIC": "test_where_a_waiting_message_goes_is_what_its_sender_named",
    "REAL_QID": "test_where_a_waiting_message_goes_is_what_its_sender_named",
    "TIMER_OUT_MS": "test_where_a_waiting_message_goes_is_what_its_sender_named",
    "TIMER_ROLL_TIMES": "test_where_a_waiting_message_goes_is_what_its_sender_named",
    "1ST_POP_TIME": "test_where_a_waiting_message_goes_is_what_its_sender_named",
    "__transactionId__": "test_a_prepared_message_cannot_pass_for_a_copy",
}
"""Property -> the test that forges it."""
HARMLESS: Mapping[str, str] = {
    "describe the message of their producer alone": "KEYS TAGS UNIQ_KEY WAIT __SHARDINGKEY",
    "are requests, which the broker checks": (
        "DELAY TIMER_DELAY_SEC TIMER_DELAY_MS TIMER_DELIVER_MS TRAN_MSG"
    ),
    "an end names the same group, and needs PUB": "PGROUP CHECK_IMMUNITY_TIME_IN_SECONDS",
    "are shown, and decide whether the own message is traced": "MSG_REGION TRACE_ON CLUSTER",
    "belong to clients; brokers count in the record's head": (
        "RECONSUME_TIME MAX_RECONSUME_TIMES CONSUME_START_TIME MIN_OFFSET MAX_OFFSET POP_CK_OFFSET"
    ),
    "the proxy shows them, and acts on none": (
        "DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID __BORNHOST BORN_TIMESTAMP TRACE_CONTEXT"
        " _SYS_MSG_PRIORITY_ __LITE_TOPIC"
    ),
    "a reply goes to a client that waits for that very id": (
        "CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME MSG_TYPE"
    ),
    "nothing reads them": (
        "INSTANCE_ID BUYER_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG DUP_INFO EXTEND_UNIQ_INFO"
        " ORIGIN_GROUP REDIRECT PROPERTY_FORWARD_QUEUE_ID"
    ),
    "count only beside what a broker writes": "INNER_NUM INNER_BASE INNER_MULTI_DISPATCH",
    "are written and not read": "TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_DELAY_LEVEL",
}
"""Why a forged value does no harm -> the properties."""


def test_every_reserved_property_is_forged_or_known_to_be_harmless() -> None:
    harmless = [name for names in HARMLESS.values() for name in names.split()]
    assert sorted([*FORGED, *harmless]) == sorted(RESERVED)
    assert all(callable(globals()[test]) for test in FORGED.values())


def put_raw(broker: SteppedBroker, properties: str, topic: str = "T") -> None:
    """A record as another release, or a Java broker, may have stored it."""
    host = broker.settings.store_host
    broker.store.writer.append(topic, 0, b"old", properties.encode(), 0, 0, 0, START_MS, host, host)
    broker.core.group_commit.commit_internal()
    broker.step()


@pytest.mark.parametrize("code", [200050, 200052])
def test_a_stored_handle_is_not_in_the_answer_to_a_pop(code: int) -> None:
    broker, client = start()
    put_raw(broker, "UNIQ_KEY\x01AB\x02POP_CK\x010 1 60000 0 0 broker-a 0 0\x02own\x015\x02")
    put_raw(broker, "UNIQ_KEY\x01AC\x02own\x016\x02")
    answer = client.call(code, pop_fields(broker, queueId=0))
    found = decode_records(answer.body)
    assert [dict(message.properties) for message in found] == [
        {"UNIQ_KEY": "AB", "own": "5"},
        {"UNIQ_KEY": "AC", "own": "6"},
    ]


def test_a_message_enters_only_its_own_queue_at_a_rebuild() -> None:
    files = CrashableFiles()
    broker = SteppedBroker(files=files)
    broker.core.topics.put(TopicConfig("T", 1, 1), TopicConfig("secret", 1, 1))
    client = broker.connect()
    client.call(310, send_fields("secret"), b"first")
    forged = "INNER_MULTI_DISPATCH\x01secret\x02INNER_MULTI_QUEUE_OFFSET\x011\x02"
    client.call(310, send_fields("T", f"UNIQ_KEY\x01AA\x02{forged}"), b"forged")
    batch = encode_batch([(0, b"forged", f"UNIQ_KEY\x01AB\x02{forged}".encode())] * 2)
    client.call(320, send_fields("T", m="true"), batch)
    client.call(310, send_fields("secret"), b"second")
    broker.close()
    for topic in ("T", "secret"):
        files.remove(f"/store/consumequeue/{topic}/0/{0:020d}")
    again = SteppedBroker(files=files)
    assert [message.body for message in stored(again, "secret")] == [b"first", b"second"]


def test_a_wrong_checksum_of_a_sender_is_no_damage() -> None:
    broker, client = start()
    names = "MSG_REGION\x01r\x02TRACE_ON\x01true\x02CLUSTER\x01c\x02__CRC32#\x010123456789\x02"
    client.call(310, send_fields(properties=f"UNIQ_KEY\x01AB\x02{names}"), b"x")
    client.call(320, send_fields(m="true"), encode_batch([(0, b"x", names.encode())]))
    broker.close()
    layout = StoreLayout.find("/store", files=broker.files)
    found = verify(layout)
    layout.close()
    assert found.records == 2
    assert not {kind for severity, kind in found.findings.by_kind if severity == "error"}


@pytest.mark.parametrize("topic", ["secret", "T"])
def test_only_senders_to_its_topic_take_back_a_timed_message(topic: str) -> None:
    broker, client = start()
    due_ms = broker.clock.now_ms() + 60_000
    times = f"TIMER_DELIVER_MS\x01{due_ms}\x02"
    assert client.call(310, send_fields(topic, f"UNIQ_KEY\x01AB\x02{times}"), b"x").code == 0
    forged = f"UNIQ_KEY\x01AC\x02TIMER_DEL_UNIQKEY\x01{topic}+AB\x02{times}"
    answer = client.call(310, send_fields("T", forged), b"0")
    broker.run(120, 0.5)
    is_own = topic == "T"
    assert answer.code == (0 if is_own else 13)
    assert [message.body for message in stored(broker, topic)] == ([] if is_own else [b"x"])


@pytest.mark.parametrize(
    "name",
    [
        "TRANSACTION_CHECK_TIMES",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "SLUICE_FIRST_HALF",
        "__transactionId__",
    ],
)
def test_a_prepared_message_cannot_pass_for_a_copy(name: str) -> None:
    broker, client = start()
    known = "TRAN_MSG\x01true\x02PGROUP\x01P\x02UNIQ_KEY\x01AB\x02"
    client.call(310, send_fields("T", f"{known}{name}\x0199\x02", f=4), b"forged")
    (transaction,) = broker.core.transactions.table
    assert (transaction.check_count, transaction.first_offset, transaction.key) == (0, 0, "AB")
    record = broker.core.transactions.reader.read_record(transaction.physical_offset)
    assert record is not None
    assert record.get_text("__transactionId__") == "AB"


@pytest.mark.parametrize("times", [1, 3])
def test_a_retry_says_where_its_message_really_lay(times: int) -> None:
    broker, client = start()
    forged = "UNIQ_KEY\x01AB\x02RETRY_TOPIC\x01secret\x02ORIGIN_MESSAGE_ID\x01BAD\x02"
    client.call(310, send_fields("T", forged), b"x")
    (first,) = stored(broker)
    copy = make_retry_message(first, "G", 0, 0, None)
    place, topic = first.physical_offset, "T"
    for _ in range(times):
        fields = {"offset": place, "group": "G", "delayLevel": 1, "originTopic": topic}
        assert client.call(36, fields).code == 0
        broker.run(2)
        retried = stored(broker, "%RETRY%G")[-1]
        place, topic = retried.physical_offset, retried.topic
    told = [retried.properties, parse_property_text(copy.properties)]
    origins = [(it["RETRY_TOPIC"], it["ORIGIN_MESSAGE_ID"]) for it in told]
    assert origins == [("T", first.offset_message_id)] * 2


INTERNAL = (
    "SCHEDULE_TOPIC_XXXX",
    "rmq_sys_wheel_timer",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
    "rmq_sys_sluice_epochs",
)


@pytest.mark.parametrize("topic", INTERNAL)
def test_nobody_writes_to_the_topics_of_the_broker(topic: str) -> None:
    broker, client = start()
    broker.change(store_replies=True)
    end = broker.store.written_offset
    properties = "UNIQ_KEY\x01AB\x02REAL_TOPIC\x01secret\x02REAL_QID\x010\x02SLUICE_NEXT\x019\x02"
    for code in (10, 310, 320, 324, 325):
        fields: dict[str, object] = send_fields(topic, properties, m=str(code == 320).lower())
        if code in (10, 324):
            fields = long_names(fields)
        body = encode_batch([(0, b"x", b"")]) if code == 320 else b"x"
        answer = client.call(code, fields, body)
        assert answer.code in (16, 17), (code, answer.remark)
    assert broker.store.written_offset == end


FATE = "REAL_TOPIC\x01secret\x02REAL_QID\x010\x02"


@pytest.mark.parametrize(
    "more", ["", "TIMER_ROLL_TIMES\x0199\x02", "1ST_POP_TIME\x011\x02", "TIMER_OUT_MS\x011\x02"]
)
@pytest.mark.parametrize(
    "delay",
    ["", "DELAY\x011\x02", "TIMER_DELAY_SEC\x011\x02", "TRAN_MSG\x01true\x02PGROUP\x01P\x02"],
)
def test_where_a_waiting_message_goes_is_what_its_sender_named(delay: str, more: str) -> None:
    broker, client = start()
    is_half = "TRAN_MSG" in delay
    properties = f"UNIQ_KEY\x01AB\x02{FATE}{more}{delay}"
    answer = client.call(310, send_fields("T", properties, f=4 * is_half), b"x")
    assert answer.code == 0, answer.remark
    if is_half:
        fields = answer.fields or {}
        place = int(fields["msgId"][16:], 16)
        client.call(
            37,
            {
                "producerGroup": "P",
                "tranStateTableOffset": fields["queueOffset"],
                "commitLogOffset": place,
                "commitOrRollback": 8,
                "fromTransactionCheck": "false",
                "msgId": "AB",
                "transactionId": "AB",
            },
        )
    broker.run(4)
    assert [message.body for message in stored(broker)] == [b"x"]
    assert stored(broker, "secret") == []
