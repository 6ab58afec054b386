"""What a call may say: each limit of spec/grpc.md §3, at it and beyond."""

import contextlib
import gzip
import zlib
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from hypothesis import given
from hypothesis import strategies as st

from cost import cpu_s
from sluicemq.config.proxying import ProxyLimits
from sluicemq.model.bodies import COMPRESSED
from sluicemq.model.properties import HIDDEN_PROPERTIES
from sluicemq.proxy import limits
from sluicemq.proxy import messages as m
from sluicemq.proxy.limits import (
    StatusError,
    check_delivery_time,
    check_lite_topic,
    check_message_texts,
    check_recovery_time,
    check_type,
    checked_group,
    checked_topic,
    to_stored_body,
)
from sluicemq.proxy.messages import Code

LIMITS = ProxyLimits()
BODY_BYTES_MAX = LIMITS.body_bytes_max
CONTROLS = [chr(number) for number in (*range(0x20), *range(0x7F, 0xA0))]


def code_of(check: Any, *arguments: object) -> Code | None:
    """What a check refuses with; None: nothing."""
    try:
        check(*arguments)
    except StatusError as error:
        return error.code
    return None


def texts(user: Mapping[str, str] | None = None, **fields: Any) -> Code | None:
    fields.setdefault("message_id", "01ABC")
    return code_of(check_message_texts, user or {}, m.SystemProperties(**fields), LIMITS)


@pytest.mark.parametrize(
    ("user", "fields", "code"),
    [
        ({}, {}, None),
        ({"region": "a b", "漢": "😀"}, {"tag": "a b", "keys": ["k 1"]}, None),
        ({"empty": ""}, {"keys": [""]}, None),
        ({"__SHARDINGKEY": "as a consumer got it"}, {}, None),
        ({}, {"message_id": ""}, Code.ILLEGAL_MESSAGE_ID),
        ({}, {"message_id": " "}, Code.ILLEGAL_MESSAGE_ID),
        ({}, {"message_id": "a\x02TRAN_MSG\x01true"}, Code.ILLEGAL_MESSAGE_ID),
        ({}, {"tag": "a|b"}, Code.ILLEGAL_MESSAGE_TAG),
        ({}, {"tag": "  "}, Code.ILLEGAL_MESSAGE_TAG),
        ({}, {"keys": ["good", " "]}, Code.ILLEGAL_MESSAGE_KEY),
        ({}, {"message_group": " "}, Code.ILLEGAL_MESSAGE_GROUP),
        ({}, {"message_group": "x" * 63}, None),
        ({}, {"message_group": "x" * 64}, Code.ILLEGAL_MESSAGE_GROUP),
        ({}, {"message_group": "漢" * 21}, None),
        ({}, {"message_group": "漢" * 22}, Code.ILLEGAL_MESSAGE_GROUP),
        ({}, {"trace_context": "a\x02b"}, Code.BAD_REQUEST),
        ({}, {"born_host": "a\x02b"}, Code.BAD_REQUEST),
        ({"TAGS": "x"}, {}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ({"": "x"}, {}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ({"a\nb": "x"}, {}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ({"a": "x\ny"}, {}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ({str(number): "x" for number in range(128)}, {}, None),
        ({str(number): "x" for number in range(129)}, {}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
        ({"a": "x" * 16_382}, {"tag": "t"}, None),
        ({"a": "x" * 16_382}, {"tag": "tt"}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
        ({"a": "漢" * 5_461}, {"keys": ["漢"]}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
    ],
)  # fmt: skip
def test_texts_of_a_message(
    user: dict[str, str], fields: dict[str, Any], code: Code | None
) -> None:
    assert texts(user, **fields) == code


@pytest.mark.parametrize("name", sorted(HIDDEN_PROPERTIES))
def test_a_property_of_the_system_is_not_the_users(name: str) -> None:
    assert texts({name: "x"}) == Code.ILLEGAL_MESSAGE_PROPERTY_KEY


WORDS = st.text(max_size=20)
FIELDS = "tag", "message_id", "message_group", "born_host", "trace_context", "lite_topic"


@given(
    st.dictionaries(WORDS, WORDS, max_size=4),
    st.dictionaries(st.sampled_from(FIELDS), WORDS, max_size=6),
    st.lists(WORDS, max_size=3),
)
def test_nothing_that_controls_passes(
    user: dict[str, str], fields: dict[str, str], keys: list[str]
) -> None:
    """Nor anything that would be taken apart into other properties."""
    if texts(user, keys=keys, **fields) is None:
        written = [*user, *user.values(), *fields.values(), *keys]
        assert not any(control in text for control in CONTROLS for text in written)
        assert "" not in user
        assert not user.keys() & HIDDEN_PROPERTIES


@given(st.sampled_from(CONTROLS), st.sampled_from(FIELDS), WORDS)
def test_each_control_is_refused_in_each_field(control: str, field: str, text: str) -> None:
    assert texts(**{field: text + control}) is not None
    assert texts(keys=[text + control]) == Code.ILLEGAL_MESSAGE_KEY
    assert texts({"name": text + control}) == Code.ILLEGAL_MESSAGE_PROPERTY_KEY


def body(data: bytes, encoding: int = m.Encoding.IDENTITY) -> bytes:
    return to_stored_body(data, encoding, LIMITS)[0]


@given(st.binary(min_size=1, max_size=200))
def test_a_body_is_stored_plain(data: bytes) -> None:
    """RocketMQ's consumers take the flag of a compressed body for zlib."""
    assert body(data) == data
    assert body(gzip.compress(data), m.Encoding.GZIP) == data
    assert body(zlib.compress(data), m.Encoding.GZIP) == data


@pytest.mark.parametrize(
    ("data", "encoding", "code"),
    [
        (b"", m.Encoding.IDENTITY, Code.MESSAGE_BODY_EMPTY),
        (bytes(BODY_BYTES_MAX), m.Encoding.IDENTITY, None),
        (bytes(BODY_BYTES_MAX + 1), m.Encoding.IDENTITY, Code.MESSAGE_BODY_TOO_LARGE),
        (gzip.compress(bytes(BODY_BYTES_MAX)), m.Encoding.GZIP, None),
        (gzip.compress(bytes(BODY_BYTES_MAX + 1)), m.Encoding.GZIP, Code.MESSAGE_BODY_TOO_LARGE),
        (gzip.compress(bytes(1 << 26)), m.Encoding.GZIP, Code.MESSAGE_BODY_TOO_LARGE),
        (gzip.compress(b""), m.Encoding.GZIP, Code.MESSAGE_BODY_EMPTY),
        (b"", m.Encoding.GZIP, Code.MESSAGE_BODY_EMPTY),
        (b"not gzip" + bytes(BODY_BYTES_MAX), m.Encoding.GZIP, Code.MESSAGE_BODY_TOO_LARGE),
    ],
    ids=["empty", "largest", "too large", "largest in gzip", "too large in gzip", "far too large",
         "empty in gzip", "nothing", "not gzip and too large"],
)  # fmt: skip
def test_bodies_that_are_refused(data: bytes, encoding: int, code: Code | None) -> None:
    assert code_of(body, data, encoding) == code


@given(
    st.one_of(
        st.binary(min_size=1, max_size=200),
        st.tuples(st.binary(max_size=200), st.integers(min_value=1, max_value=19)).map(
            lambda pair: gzip.compress(pair[0], mtime=0)[: -pair[1]]
        ),
    )
)
def test_a_body_called_gzip_is_stored_plain_or_as_it_came(data: bytes) -> None:
    """Whatever cannot be decompressed is stored with the flag, as by RocketMQ's proxy."""
    stored, flag = to_stored_body(data, m.Encoding.GZIP, LIMITS)
    inflater = zlib.decompressobj(47)
    plain = None
    with contextlib.suppress(zlib.error):
        plain = inflater.decompress(data)
    if plain and inflater.eof:
        assert (stored, flag) == (plain, 0)
    else:
        assert (stored, flag) == (data, COMPRESSED)


def test_times() -> None:
    day_ms = 24 * 3600 * 1000
    assert code_of(check_delivery_time, day_ms + 5, 5, LIMITS) is None
    assert code_of(check_delivery_time, 0, 5, LIMITS) is None
    assert code_of(check_delivery_time, day_ms + 6, 5, LIMITS) == Code.ILLEGAL_DELIVERY_TIME
    assert code_of(check_recovery_time, 3600, LIMITS) is None
    assert code_of(check_recovery_time, 3601, LIMITS) == Code.BAD_REQUEST


def test_a_topic_takes_its_type() -> None:
    assert code_of(check_type, "FIFO", "FIFO") is None
    assert code_of(check_type, "MIXED", "DELAY") is None
    assert code_of(check_type, "MIXED", "LITE") == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    with pytest.raises(StatusError) as caught:
        check_type("NORMAL", "FIFO")
    assert str(caught.value) == (
        "TopicMessageType validate failed, the expected type is NORMAL, but actual type is FIFO"
    )


def test_names() -> None:
    assert code_of(checked_topic, m.Resource(name="t" * 127)) is None
    assert code_of(checked_topic, m.Resource(name="t" * 128)) == Code.ILLEGAL_TOPIC
    assert code_of(checked_group, m.Resource(name="g" * 120)) is None
    assert code_of(checked_group, m.Resource(name="g" * 121)) == Code.ILLEGAL_CONSUMER_GROUP
    assert code_of(checked_group, m.Resource(name="CID_RMQ_SYS_x")) == Code.ILLEGAL_CONSUMER_GROUP
    assert code_of(check_lite_topic, "l" * 64) is None
    assert code_of(check_lite_topic, "l" * 65) == Code.ILLEGAL_LITE_TOPIC


# ------------------------------------------------------------------------- what decoding may cost


def sent(*messages: m.Message) -> bytes:
    return m.SendMessageRequest(messages=messages).SerializeToString()


def with_properties(number: int, size: int = 1) -> m.Message:
    message = m.Message(topic=m.Resource(name="t"))
    message.user_properties.update({f"k{at}": "v" * size for at in range(number)})
    return message


def with_keys(number: int) -> m.Message:
    message = m.Message(topic=m.Resource(name="t"))
    message.system_properties.keys.extend([""] * number)
    return message


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x00" * 8_000_000, sent(with_properties(10_000)), sent(*[with_keys(60_000)] * 20),
     sent(*[with_properties(128, 16_000)])],
    ids=["messages", "properties", "keys", "large properties"],
)  # fmt: skip
def test_a_request_of_millions_of_fields_is_refused_before_it_is_decoded(data: bytes) -> None:
    with pytest.raises(StatusError) as caught:
        limits.check_shape(data, has_bodies=True)
    assert caught.value.code == Code.PAYLOAD_TOO_LARGE
    assert cpu_s(refused, lambda: data) < 0.1


def refused(data: bytes) -> None:
    with contextlib.suppress(StatusError):
        limits.check_shape(data, has_bodies=True)


@pytest.mark.parametrize(
    "data",
    [sent(m.Message(body=bytes(4_000_000))), sent(*[with_properties(127, 100)] * 60), b"",
     b"\xff" * 10_000, b"\x0a\xff\xff\xff\x7f" + bytes(10_000), sent(with_keys(1000))],
    ids=["a large body", "many properties", "nothing", "no protobuf", "cut off", "keys"],
)  # fmt: skip
def test_what_clients_send_and_what_is_no_protobuf_passes(data: bytes) -> None:
    limits.check_shape(data, has_bodies=True)


def test_the_number_of_the_body_is_that_of_the_protocol() -> None:
    fields = m.Message.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]
    assert fields["body"].number == limits._BODY_FIELD


def test_a_request_without_bodies_is_small() -> None:
    limits.check_shape(bytes(limits.REQUEST_BYTES_MAX), has_bodies=False)
    with pytest.raises(StatusError, match="has 262145 bytes, the limit is 262144"):
        limits.check_shape(bytes(limits.REQUEST_BYTES_MAX + 1), has_bodies=False)
