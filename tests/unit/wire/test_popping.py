"""Handles, checkpoints and acknowledgements of POP, byte for byte (spec/delivery.md §7)."""

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import pop_kind, pop_origin, pop_retry_topic, pop_topic
from sluicemq.wire import fastjson
from sluicemq.wire.popping import (
    Acknowledgement,
    Checkpoint,
    PopAck,
    PopKey,
    ReceiptHandle,
    decode_acknowledgement,
    decode_checkpoint,
    decode_pop_acks,
    encode_queue_info,
)

POP_MS = 1_700_000_000_000
KEY = ("T", "G", 1, 5, POP_MS, "b")
# As the classes of the real 5.3.2 print them (spec/delivery.md §7).
CK = (
    b'{"bm":0,"bn":"b","c":"G","d":[0,3],"it":60000,"n":2,"pt":1700000000000,"q":1,'
    b'"reviveTime":1700000060000,"ro":0,"so":5,"t":"T"}'
)
ACK = b'{"ao":8,"bn":"b","c":"G","pt":1700000000000,"q":1,"so":5,"t":"T"}'
BATCH = b'{"ao":-1,"aol":[5,8],"bn":"b","c":"G","pt":1700000000000,"q":1,"so":5,"t":"T"}'
CHECKPOINT = Checkpoint("T", "G", 1, "b", 5, POP_MS, 60_000, (5, 8), 3)

names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
brokers = st.text("abc-_.019", min_size=1, max_size=12)
offsets = st.integers(0, 2**50)
times = st.integers(0, 2**50)
keys = st.tuples(names, names, st.integers(0, 1000), offsets, times, brokers)


def test_the_records_are_those_of_the_real_broker() -> None:
    assert CHECKPOINT.encode() == CK
    assert Acknowledgement(KEY, (8,)).encode() == ACK
    assert Acknowledgement(KEY, (5, 8)).encode() == BATCH
    assert decode_checkpoint(CK, 3, "other") == CHECKPOINT
    suspended = CK.replace(b'"so":5,', b'"so":5,"sp":true,')  # 5.5.0
    assert CHECKPOINT._replace(is_suspended=True).encode() == suspended
    unsuspended = CK.replace(b'"so":5,', b'"so":5,"sp":false,')
    assert decode_checkpoint(unsuspended, 3, "other") == CHECKPOINT
    assert decode_acknowledgement(ACK, "other") == Acknowledgement(KEY, (8,))
    assert decode_acknowledgement(BATCH, "other") == Acknowledgement(KEY, (5, 8))


def test_the_ids_are_those_of_the_real_broker() -> None:
    assert CHECKPOINT.unique_id == f"T@1@5@G@{POP_MS}@b@ck"
    assert Acknowledgement(KEY, (8,)).unique_id == f"T@1@8@G@{POP_MS}@b@ack"
    assert Acknowledgement(KEY, (5, 8)).unique_id == f"T@1@-1@G@{POP_MS}@b@ack"
    assert [Acknowledgement(KEY, one).tag for one in ((8,), (5, 8))] == ["ack", "bAck"]


def test_what_old_brokers_and_other_names_mean() -> None:
    old = b'{"c":"G","n":3,"pt":7,"q":1,"so":5,"t":"T","it":9,"new":[1]}'
    assert decode_checkpoint(old, 0, "b") == Checkpoint("T", "G", 1, "b", 5, 7, 9, (5, 6, 7), 0)
    buffered = CK.replace(b'"bm":0', b'"bm":1')
    assert decode_checkpoint(buffered, 3, "b") == CHECKPOINT._replace(offsets=(8,))
    long = (
        b'{"ackOffset":8,"brokerName":"","consumerGroup":"G","popTime":1700000000000,"queueId":1,'
        b'"startOffset":5,"topic":"T"}'
    )
    assert decode_acknowledgement(long, "b") == Acknowledgement(KEY, (8,))
    several = long.replace(b'"ackOffset":8', b'"ackOffsetList":[5,8]')
    assert decode_acknowledgement(several, "b") == Acknowledgement(KEY, (5, 8))


@given(
    keys, st.integers(0, 2**40), st.integers(0, 100),
    st.lists(st.integers(0, 2**30), min_size=1, max_size=32, unique=True), st.booleans(),
)  # fmt: skip
def test_checkpoints_come_back(
    key: PopKey, it: int, queue: int, differences: list[int], is_suspended: bool
) -> None:
    topic, group, queue_id, start, pop_ms, broker = key
    found = tuple(start + difference for difference in differences)
    made = Checkpoint(topic, group, queue_id, broker, start, pop_ms, it, found, queue, is_suspended)
    assert decode_checkpoint(made.encode(), queue, "") == made
    assert made.key == key
    assert made.deadline_ms == fastjson.loads(made.encode())["reviveTime"]


@given(keys, st.lists(offsets, min_size=1, max_size=32))
def test_acknowledgements_come_back(key: PopKey, found: list[int]) -> None:
    made = Acknowledgement(key, tuple(found))
    assert decode_acknowledgement(made.encode(), "") == made


handles = st.builds(
    ReceiptHandle, offsets, times, times, st.integers(0, 999), st.integers(0, 2), brokers,
    st.integers(0, 1000), st.integers(-1, 2**50), st.integers(-1, 2**50),
)  # fmt: skip


@given(handles)
def test_handles_come_back(handle: ReceiptHandle) -> None:
    if handle.offset < 0:
        handle = handle._replace(physical_offset=-1)
    assert ReceiptHandle.parse(handle.encode()) == handle
    assert len(handle.encode().split(" ")) == 7 + (handle.offset >= 0) + (
        handle.physical_offset >= 0
    )


def test_a_handle_is_a_text_of_seven_to_nine_fields() -> None:
    handle = ReceiptHandle(5, POP_MS, 60_000, 3, 0, "b", 1, 8)
    assert handle.encode() == f"5 {POP_MS} 60000 3 0 b 1 8"
    assert ReceiptHandle.parse(f"5 {POP_MS} 60000 3 0 b 1") == handle._replace(offset=-1)
    assert ReceiptHandle.parse(f"{handle.encode()} 77 later") == handle._replace(physical_offset=77)
    assert handle.deadline_ms == POP_MS + 60_000
    assert not handle.is_ordered
    assert handle._replace(revive_queue=999).is_ordered


@pytest.mark.parametrize("text", ["", "5", "5 1 2 3 0 b", "5 1 2 3 0 b x", "5 1 2 3 0  1 8"])
def test_what_is_no_handle_is_named(text: str) -> None:
    with pytest.raises(ProtocolError, match="is not the receipt handle"):
        ReceiptHandle.parse(text)


@given(st.binary(max_size=40) | st.sampled_from([CK, ACK, BATCH]).map(lambda it: it[:-9] + b"}"))
def test_what_is_no_record_is_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_checkpoint(data, 0, "b")
    with contextlib.suppress(ProtocolError):
        decode_acknowledgement(data, "b")


@pytest.mark.parametrize("is_v2", [False, True])
def test_names_of_retry_topics(is_v2: bool) -> None:
    retry = pop_retry_topic("a_b", "c_d", is_v2=is_v2)
    assert retry == ("%RETRY%a_b+c_d" if is_v2 else "%RETRY%a_b_c_d")
    assert pop_origin(retry, "a_b") == "c_d"
    assert pop_kind(retry) == 1 + is_v2
    assert pop_topic("c_d", "a_b", pop_kind(retry)) == retry
    assert pop_origin("c_d", "a_b") == pop_topic("c_d", "a_b", pop_kind("c_d")) == "c_d"


BITS = {
    "b": "AQI=", "c": "G", "it": 60_000, "pt": POP_MS, "q": 1, "r": "1", "rq": 3, "so": 5, "t": "T",
}  # fmt: skip
LONG = {
    "bitSet": "AQI=", "consumerGroup": "G", "invisibleTime": 60_000, "popTime": POP_MS,
    "queueId": 1, "retry": "1", "reviveQueueId": 3, "startOffset": 5, "topic": "T",
}  # fmt: skip


@pytest.mark.parametrize("values", [BITS, LONG])
def test_a_batch_says_by_bits_which_messages_are_done(values: dict[str, object]) -> None:
    body = fastjson.dumps({"acks": [values], "brokerName": "b"})
    handle = ReceiptHandle(5, POP_MS, 60_000, 3, 1, "b", 1)
    assert decode_pop_acks(body) == [PopAck("G", "T", handle, (5, 14))]


@given(st.sets(st.integers(0, 2000), max_size=20))
def test_the_bits_are_those_of_the_offsets(differences: set[int]) -> None:
    bits = sum(1 << difference for difference in differences)
    text = base64.b64encode(bits.to_bytes(260, "little")).decode()
    (ack,) = decode_pop_acks(fastjson.dumps({"acks": [BITS | {"b": text}]}))
    assert ack.offsets == tuple(5 + difference for difference in sorted(differences))


@pytest.mark.parametrize(
    ("change", "why"),
    [({"r": "3"}, "kind"), ({"b": "*"}, "base64"), ({"b": "/" * 1024}, "more than 127")],
)
def test_a_batch_that_cannot_be_is_refused(change: dict[str, str], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode_pop_acks(fastjson.dumps({"acks": [BITS | change]}))


def test_the_texts_of_an_answer_name_kind_and_queue() -> None:
    assert encode_queue_info([]) == ""
    assert encode_queue_info([(0, 3, 17), (1, 0, "4,6")]) == "0 3 17;1 0 4,6"
    assert encode_queue_info([(0, "qo0%4", 2)]) == "0 qo0%4 2"
