"""HPACK: the examples of RFC 7541, what must be refused, and round trips."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http2_client import HeaderWriter, coded, number
from sluicemq.wire.hpack import (
    DYNAMIC_TABLE_BYTES_MAX,
    HEADER_LIST_BYTES_MAX,
    STATIC_TABLE,
    HeaderDecoder,
    encode_headers,
)
from sluicemq.wire.http2 import ErrorCode, Http2Error

LATIN = st.text(st.characters(max_codepoint=255), max_size=40)
NAMES = (
    st.sampled_from(["x-mq-client-id", "authorization", ":path", "te", "user-agent", "x"]) | LATIN
)

REQUESTS = [
    {":method": "GET", ":scheme": "http", ":path": "/", ":authority": "www.example.com"},
    {":method": "GET", ":scheme": "http", ":path": "/", ":authority": "www.example.com",
     "cache-control": "no-cache"},
    {":method": "GET", ":scheme": "https", ":path": "/index.html",
     ":authority": "www.example.com", "custom-key": "custom-value"},
]  # fmt: skip
PLAIN = [
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
]
CODED = [
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
]


@pytest.mark.parametrize("blocks", [PLAIN, CODED], ids=["C.3", "C.4"])
def test_the_requests_of_the_standard(blocks: list[str]) -> None:
    reader = HeaderDecoder()
    assert [reader.decode(bytes.fromhex(block)) for block in blocks] == REQUESTS


def test_the_static_table_has_61_entries() -> None:
    assert len(STATIC_TABLE) == 62
    assert (STATIC_TABLE[1], STATIC_TABLE[61]) == ((":authority", ""), ("www-authenticate", ""))
    assert STATIC_TABLE[16] == ("accept-encoding", "gzip, deflate")


@given(st.lists(st.tuples(NAMES, LATIN), max_size=12), st.sampled_from([0x40, 0, 0x10]))
def test_what_another_writer_writes_is_read(fields: list[tuple[str, str]], form: int) -> None:
    writer, reader = HeaderWriter(), HeaderDecoder()
    for _ in range(3):  # what the table holds by then is named by number
        assert reader.decode(writer.write(fields, form=form)) == dict(fields)


def test_of_several_values_of_a_name_the_last_is_read() -> None:
    """The Go client adds to the metadata of its first attempt what it says in the second."""
    fields = [("authorization", "first"), ("x-mq-client-id", "c"), ("authorization", "second")]
    found = HeaderDecoder().decode(HeaderWriter().write(fields))
    assert found == {"authorization": "second", "x-mq-client-id": "c"}


@given(st.lists(st.tuples(NAMES, LATIN), max_size=12, unique_by=lambda field: field[0]))
def test_what_is_written_is_read(fields: list[tuple[str, str]]) -> None:
    assert HeaderDecoder().decode(encode_headers(fields)) == dict(fields)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_block_raise_and_nothing_else(block: bytes) -> None:
    with contextlib.suppress(Http2Error):
        HeaderDecoder().decode(block)


def test_old_entries_leave_the_table() -> None:
    writer, reader = HeaderWriter(), HeaderDecoder()
    for count in range(300):
        field = (f"x-{count}", "v" * 50)
        assert reader.decode(writer.write([field])) == dict([field])
    assert sum(len(n) + len(v) + 32 for n, v in writer.entries) <= DYNAMIC_TABLE_BYTES_MAX
    name, value = writer.entries[-1]
    assert reader.decode(writer.write([(name, value)])) == {name: value}


def test_a_table_of_size_0_keeps_nothing() -> None:
    reader = HeaderDecoder()
    assert reader.decode(b"\x20" + bytes.fromhex(PLAIN[0])) == REQUESTS[0]
    with pytest.raises(Http2Error, match="have no entry 62"):
        reader.decode(b"\xbe")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("80", "have no entry 0"),
        ("c0", "have no entry 64"),
        ("0085", "ends early"),
        ("00", "ends early"),
        ("ffffffffff0f", "too large"),
        ("ff8080808080808001", "too large"),
        ("3fe21f", "is not allowed"),  # 4097
        ("8220", "is not allowed"),  # behind a field
        ("0001610184ffffff", None),
    ],
)
def test_a_broken_block_ends_the_connection(block: str, text: str | None) -> None:
    with pytest.raises(Http2Error, match=text):
        HeaderDecoder().decode(bytes.fromhex(block) + (b"" if text else b"\xff"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff\xff\xff\xff", "contains the symbol EOS"),  # the symbol that marks the end
        (b"\x1f\xff", "within a symbol"),  # a, and more than seven ones
        (b"\x18", "within a symbol"),  # a, and padding of zeros
    ],
)
def test_a_text_in_a_broken_code_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(Http2Error, match=text):
        HeaderDecoder().decode(b"\x00\x01x" + number(len(data), 0x7F, 0x80) + data)


def test_a_small_block_may_not_become_a_large_list() -> None:
    reader, field = HeaderDecoder(), ("x", "v" * 4000)
    block = HeaderWriter().write([field]) + b"\xbe" * (HEADER_LIST_BYTES_MAX // 4000)
    with pytest.raises(Http2Error, match="limit of 65536") as caught:
        reader.decode(block)
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_long_text_is_read_without_being_remembered() -> None:
    text = "a path that is long" * 100
    assert HeaderDecoder().decode(b"\x04" + coded(text)) == {":path": text}
