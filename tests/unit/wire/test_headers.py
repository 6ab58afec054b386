"""Declared headers and their one codec."""

import pytest

from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import HeaderError, decode_header, encode_header, wire_names
from sluicemq.wire.headers import (
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    CreateTopicRequest,
    GetMaxOffsetRequest,
    OffsetResponse,
    PullMessageRequest,
    SendMessageRequest,
    SendMessageRequestV2,
    SendMessageResponse,
    UpdateConsumerOffsetRequest,
)

SEND = {
    "a": "G", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1700000000000",
    "h": "-1",
}  # fmt: skip


def test_letters_and_long_names_are_the_same_python_fields() -> None:
    letters = decode_header(SendMessageRequestV2, {**SEND, "k": "false", "m": "TRUE", "n": "b"})
    assert letters.born_time_ms == 1_700_000_000_000
    assert (letters.unit_mode, letters.batch, letters.broker) == (False, True, "b")
    assert letters.properties is None
    assert isinstance(letters, SendMessageRequest)
    long_names = SendMessageRequest(
        group="G", topic="T", default_topic="TBW102", default_topic_queues=4, queue_id=1,
        sys_flag=0, born_time_ms=5, flag=0,
    )  # fmt: skip
    assert encode_header(long_names) == {
        "producerGroup": "G", "topic": "T", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
        "queueId": "1", "sysFlag": "0", "bornTimestamp": "5", "flag": "0",
    }  # fmt: skip


def test_values_are_written_as_java_writes_them() -> None:
    header = CreateTopicRequest(topic="T", read_queues=1, write_queues=2, perm=6, order=True)
    assert encode_header(header) == {
        "topic": "T", "readQueueNums": "1", "writeQueueNums": "2", "perm": "6", "order": "true",
    }  # fmt: skip
    assert encode_header(OffsetResponse()) == {}
    assert encode_header(SendMessageResponse(region="DefaultRegion", trace_on=False)) == {
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "false",
    }


@pytest.mark.parametrize("missing", "abcdefgh")
def test_a_missing_required_field_is_named(missing: str) -> None:
    fields = {name: value for name, value in SEND.items() if name != missing}
    with pytest.raises(HeaderError, match=f"<{missing}> is null"):
        decode_header(SendMessageRequestV2, fields)


def test_no_fields_at_all_names_the_first() -> None:
    with pytest.raises(HeaderError, match="<consumerGroup> is null"):
        decode_header(UpdateConsumerOffsetRequest, None)


@pytest.mark.parametrize("value", ["x", "1.5", "2147483648", "-2147483649", "9" * 5000])
def test_a_bad_32_bit_number_is_named(value: str) -> None:
    with pytest.raises(HeaderError, match="<queueId> is not an integer of 32 bits"):
        decode_header(GetMaxOffsetRequest, {"topic": "T", "queueId": value})


def test_64_bit_numbers_have_their_own_range() -> None:
    fields = {**SEND, "g": str(2**63 - 1)}
    assert decode_header(SendMessageRequestV2, fields).born_time_ms == 2**63 - 1
    with pytest.raises(HeaderError, match="64 bits"):
        decode_header(SendMessageRequestV2, {**SEND, "g": str(2**63)})


def test_an_empty_number_counts_as_absent() -> None:
    assert decode_header(SendMessageRequestV2, {**SEND, "j": ""}).reconsume_times is None
    with pytest.raises(HeaderError, match="<e> is null"):
        decode_header(SendMessageRequestV2, {**SEND, "e": ""})


def test_defaults_stand_for_what_is_absent_and_unknown_fields_are_ignored() -> None:
    header = decode_header(GetMaxOffsetRequest, {"topic": "T", "queueId": "3", "ReqT": "0"})
    assert header == GetMaxOffsetRequest(topic="T", queue_id=3, committed=True, broker=None)


def test_the_pull_header_has_our_own_fields_last() -> None:
    assert wire_names(PullMessageRequest)[-3:] == ("sluiceBulk", "sluiceAnySpan", "sluiceLook")


def test_every_table_entry_is_a_known_code_and_a_declared_header() -> None:
    for table in (REQUEST_HEADERS, RESPONSE_HEADERS):
        for code, declared in table.items():
            assert code in set(RequestCode)
            assert wire_names(declared)
            assert declared.__doc__


def test_headers_are_frozen() -> None:
    with pytest.raises(AttributeError):
        OffsetResponse(offset=1).offset = 2  # type: ignore[misc]


def test_a_header_refuses_names_that_it_has_not_and_misses_none() -> None:
    with pytest.raises(TypeError, match="GetMaxOffsetRequest requires the argument queue_id"):
        GetMaxOffsetRequest(topic="T")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="OffsetResponse has no fields offsets"):
        OffsetResponse(offsets=1)  # type: ignore[call-arg]


def test_headers_are_values() -> None:
    one, same = (GetMaxOffsetRequest(topic="T", queue_id=3) for _ in range(2))
    assert (one, hash(one)) == (same, hash(same))
    assert one != GetMaxOffsetRequest(topic="T", queue_id=4)
    assert repr(OffsetResponse(offset=7)) == "OffsetResponse(offset=7)"
