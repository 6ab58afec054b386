"""The compiled side of the client against its reference: frames of sends, answers, pulled records.

What the compiled module takes must be what the reference makes of the same bytes; what it leaves
must be left whole. Plain input has to be taken, or nothing here would be tested.
"""

import json
import os
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq import engine
from sluicemq.client.core import messages
from sluicemq.client.core.messages import OutgoingMessage, SendRequest, encode_send_start
from sluicemq.client.core.requests import parse_send_response
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.model.bodies import COMPRESSED
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import (
    decode_record,
    decode_records,
    encode_record,
    raw_body_of,
    split_records,
    tag_of,
)
from sluicemq.wire.frames import FLAG_ONEWAY, Command, decode, encode, encode_start

native = pytest.mark.skipif(
    engine.client is None and os.environ.get("CI") != "true",
    reason="the engine is not compiled: make native",
)
QUEUE = MessageQueue("T", "broker-a", 3)
TEXTS = st.text() | st.lists(
    st.sampled_from(
        ["UNIQ_KEY\x01AB\x02", "TAGS\x01A\x02", "k\x01ä中😀\x02", '"', "\\", "\n", "\x7f"]
    )
).map("".join)
LONE = "\ud800"

# ------------------------------------------------------------------------------------------ sends


@given(
    properties=TEXTS | st.just(LONE), body=st.binary(max_size=50), group=st.text(max_size=5),
    broker=st.text(max_size=5), born_ms=st.integers(0, 1 << 45), opaque=st.integers(0, 2**31 - 1),
    flag=st.sampled_from([0, FLAG_ONEWAY]),
)  # fmt: skip
def test_a_plain_send_is_the_frame_that_the_general_way_writes(
    properties: str, body: bytes, group: str, broker: str, born_ms: int, opaque: int, flag: int
) -> None:
    outgoing = OutgoingMessage("T", body, properties, "ID", 0, 0, True)
    request = SendRequest(group, QUEUE._replace(broker=broker), outgoing, born_ms, flag)
    request.opaque = opaque
    written = encode_start(request)
    fields = request.fields  # from here on they count
    general = encode_start(Command(request.code, fields, body, opaque, flag))
    assert written == general == encode_start(request)


@native
@given(TEXTS | st.just(LONE), st.integers(0, 1 << 45), st.integers(0, 2**31 - 1))
def test_the_compiled_start_is_that_of_the_reference(
    properties: str, born_ms: int, opaque: int
) -> None:
    around = messages._make_frame_template("g", QUEUE, 0)
    found = engine.client.start(around, born_ms, properties, opaque, 99)
    assert found in (None, encode_send_start(around, born_ms, properties, opaque, 99))
    if not set(properties) & {*map(chr, range(32)), '"', "\\", LONE} - {"\x01", "\x02"}:
        assert found is not None


@pytest.mark.parametrize(
    "start", [encode_send_start, pytest.param(getattr(engine.client, "start", None), marks=native)]
)
def test_a_frame_above_the_limit_is_left_to_the_general_way(start: Any) -> None:
    assert start(messages._make_frame_template("g", QUEUE, 0), 1, "", 1, 1 << 24) is None


# ---------------------------------------------------------------------------------------- answers

NUMBERS = st.sampled_from(["0", "3", "12345", "-1", "007", "", " 1", "1_0", "x", "9" * 25])
PLAIN = {"msgId": "7F00000100002A9F0000000000000000", "queueId": "3", "queueOffset": "12345"}


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Of an answer: usual, or with one or two things odd about it."""
    fields: dict[str, Any] = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", **PLAIN}
    values: dict[str, Any] = {
        "code": 0, "extFields": fields, "flag": 1, "language": "JAVA", "opaque": 7,
        "serializeTypeCurrentRPC": "JSON", "version": 479,
    }  # fmt: skip
    for _ in range(draw(st.integers(0, 2))):
        odd = draw(st.sampled_from([*values, *fields, "remark", "recallHandle", "none"]))
        if odd in ("queueId", "queueOffset"):
            fields[odd] = draw(NUMBERS)
        elif odd in ("msgId", "recallHandle"):
            fields[odd] = draw(st.sampled_from(["a,b", "", "ä", 'q"', "AB\\", "AB"]))
        elif odd in ("code", "flag", "opaque", "version"):
            values[odd] = draw(st.sampled_from([0, 1, 3, 7, 10, -1, 1.5, "7", None, 1 << 31]))
        elif odd == "extFields":
            values[odd] = draw(
                st.sampled_from([None, {}, [], fields | {"n": 5}, fields | {"m": {}}])
            )
        elif odd == "none":
            values.pop(draw(st.sampled_from([*values])))
        else:
            values[odd] = draw(st.sampled_from(["x", "JAVA", "PYTHON", None, 5]))
    items = draw(st.permutations(list(values.items())))
    separators = draw(st.sampled_from([(",", ":"), (",", ":"), (", ", ":"), (",", ": ")]))
    text = json.dumps(dict(items), separators=separators, ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 4)) == 0:  # a key twice
        text = text.replace('"msgId"', '"queueId":"4","msgId"').replace("{", '{"code":0,', 1)
    return text.encode()


class Waiting:
    """A future."""

    def __init__(self) -> None:
        self.answer: Any = None

    def done(self) -> bool:
        return self.answer is not None

    def set_result(self, answer: Any) -> None:
        self.answer = answer


def framed(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def outcome(answer: Any) -> object:
    try:
        return parse_send_response(answer, QUEUE, ("ID",), "a:1")
    except (RequestError, ProtocolError, ValueError) as error:
        return type(error), str(error)


@native
@given(
    headers(), st.sampled_from([b"", b"", b"body"]), st.sampled_from([310, 310, 11]), st.booleans()
)
def test_an_answer_that_is_taken_is_the_one_that_the_reference_reads(
    header: bytes, body: bytes, code: int, is_cut: bool
) -> None:
    frame = framed(header, body)
    waiting = Waiting()
    calls = dict.fromkeys((0, 1, 3, 7, 10), (waiting, code, 1.0, 1.0))
    data = frame[:-1] if is_cut else frame + b"\0\0"
    taken = engine.client.settle(data, calls)
    if not taken:
        assert not waiting.done()
        assert len(calls) == 5
        return
    assert (taken, code, is_cut) == (len(frame), 310, False)
    reference, answer = decode(frame, 4), waiting.answer
    assert reference.opaque not in calls
    for name in (
        "code", "fields", "body", "opaque", "flag", "remark", "language", "version",
        "serialization", "is_response", "is_oneway",
    ):  # fmt: skip
        assert getattr(answer, name) == getattr(reference, name), name
    assert outcome(answer) == outcome(reference)


@native
def test_the_answers_of_our_broker_and_of_a_java_one_are_taken() -> None:
    ours = encode(Command(0, {"MSG_REGION": "r", **PLAIN}, b"", 7, 1, None, "JAVA"))
    java = (
        b'{"code":0,"extFields":{"queueId":"4","TRACE_ON":"true","MSG_REGION":"DefaultRegion",'
        b'"msgId":"C0","queueOffset":"0","recallHandle":"h"},"flag":1,"language":"JAVA",'
        b'"opaque":8,"serializeTypeCurrentRPC":"JSON","version":477}'
    )
    both = ours + framed(java)
    calls = {7: (Waiting(), 310, 1.0, 1.0), 8: (Waiting(), 310, 1.0, 1.0)}
    waiting = [call[0] for call in calls.values()]
    assert engine.client.settle(both + ours, calls) == len(both), "the third has no call any more"
    (first,), (second,) = (outcome(one.answer) for one in waiting)
    assert (first.queue, first.queue_offset, first.recall_handle) == (QUEUE, 12345, None)
    assert (second.queue.queue_id, second.offset_message_id) == (4, "C0")
    assert second.recall_handle == "h"


# ---------------------------------------------------------------------------------------- records

PROPERTIES = st.lists(
    st.sampled_from([
        b"UNIQ_KEY\x01AB\x02", b"TAGS\x01A\x02", b"TAGS\x01\x02", b"TAGS\x01B", b"\x02",
        b"no value\x02", b"a\x01b\x01c\x02", "k\x01ä中😀\x02".encode(), b"bad\x01\xe4\xb8\x02",
        b"\xff\x01\xf0\x9f\x02",
    ])
).map(b"".join) | st.binary(max_size=30)  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> bytes:
    hosts = st.sampled_from([b"\x7f\0\0\1\0\0\x2a\x9f", b"\x7f\0\0\1\0\0\x2a\x9f", bytes(20)])
    return encode_record(
        topic=draw(st.sampled_from(["T", "Ä", "t" * 127, "t" * 128])),
        queue_id=draw(st.integers(0, 9)),
        queue_offset=draw(st.integers(0, 2**62)),
        physical_offset=draw(st.integers(0, 2**62)),
        body=draw(st.binary(max_size=40)),
        properties=draw(PROPERTIES),
        flag=draw(st.integers(-(2**31), 2**31 - 1)),
        sys_flag=draw(st.sampled_from([0, 0, 0, 8, COMPRESSED, -(2**31)])),
        born_time_ms=draw(st.integers(0, 2**60)),
        born_host=draw(hosts),
        store_time_ms=draw(st.integers(0, 2**60)),
        store_host=draw(hosts),
        reconsume_times=draw(st.integers(0, 20)),
        prepared_offset=draw(st.integers(0, 2**60)),
    )


@st.composite
def pulled(draw: st.DrawFn) -> bytes:
    """What a pull brings, now and then damaged or cut."""
    data = bytearray(b"".join(draw(st.lists(records(), max_size=4))))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        if data:
            at = draw(st.integers(0, len(data) - 1))
            if draw(st.booleans()):
                data[at] = draw(st.integers(0, 255))
            else:
                del data[at:]
    return bytes(data)


def whole(data: bytes) -> list[tuple[int, int, StoredMessage]] | None:
    """All of it decoded, in the form of `split_records`; None when that fails."""
    try:
        return [(it.queue_offset, it.size_bytes, it) for it in decode_records(data, broker="b")]
    except ProtocolError:
        return None


@given(pulled())
def test_records_that_are_split_are_those_that_are_decoded_at_once(data: bytes) -> None:
    try:
        found = split_records(data, "b")
    except ProtocolError:
        assert whole(data) is None
        return
    decoded = [
        (offset, size, decode_record(it, broker="b") if isinstance(it, bytes) else it)
        for offset, size, it in found
    ]
    assert decoded == whole(data)
    for (*_, some), (*_, record) in zip(found, decoded, strict=True):
        assert (raw_body_of(some), tag_of(some)) == (record.raw_body, record.tag)


@native
@given(pulled())
def test_the_compiled_decode_is_that_of_the_reference(data: bytes) -> None:
    found = engine.client.decode(data, "b")
    if found is not None:
        assert [(found.queue_offset, found.size_bytes, found)] == whole(data)


@native
@given(records())
def test_a_plain_record_is_decoded_compiled(data: bytes) -> None:
    record = decode_record(data)
    is_plain = len(record.topic.encode()) < 128 and not record.sys_flag & 0x31
    assert (engine.client.decode(data, "") is not None) == is_plain
