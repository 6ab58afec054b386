"""Frames that no recording has: odd JSON, binary corners, limits."""

import struct

import orjson
import pytest

from sluicemq.errors import ProtocolError
from sluicemq.wire.frames import (
    BINARY,
    FRAME_BYTES_MAX,
    JSON,
    Command,
    decode,
    encode,
    encode_response,
    encode_start,
)


def json_frame(header: bytes, body: bytes = b"") -> bytes:
    """A frame without its total."""
    return struct.pack(">I", len(header)) + header + body


def test_a_command_survives_json() -> None:
    command = Command(310, {"a": "g", "i": "k\x01v\x02"}, b"body", 7, 2, "why", "GO", 317)
    frame_ = encode(command)
    assert int.from_bytes(frame_[:4], "big") == len(frame_) - 4
    again = decode(frame_[4:])
    assert (again.code, again.fields, again.body) == (310, {"a": "g", "i": "k\x01v\x02"}, b"body")
    assert (again.opaque, again.flag, again.remark) == (7, 2, "why")
    assert (again.language, again.version, again.serialization) == ("GO", 317, JSON)


def test_json_keys_are_written_as_java_does() -> None:
    data = encode(Command(0, {"offset": "1"}, b"", 3, 1, "ok", "JAVA", 479))
    assert data[8:] == (
        b'{"code":0,"extFields":{"offset":"1"},"flag":1,"language":"JAVA","opaque":3,'
        b'"remark":"ok","serializeTypeCurrentRPC":"JSON","version":479}'
    )


def test_nulls_are_left_out_and_empty_fields_are_kept() -> None:
    assert b"extFields" not in encode(Command(0))
    assert b"remark" not in encode(Command(0))
    assert b'"extFields":{}' in encode(Command(0, {}))


def test_a_memoryview_body_is_not_copied() -> None:
    data = bytearray(encode(Command(0, None, b"0123456789"))[4:])
    command = decode(memoryview(data))
    assert isinstance(command.body, memoryview)
    data[-1:] = b"X"
    assert bytes(command.body) == b"012345678X"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 5}, {"n": "5"}),
        ({"n": True, "m": False}, {"n": "true", "m": "false"}),
        ({"n": None, "m": "x"}, {"m": "x"}),
        ({"n": 1.5}, {"n": "1.5"}),
        ({"n": {"a": [1]}}, {"n": '{"a":[1]}'}),
        (None, None),
        ({}, {}),
    ],
)
def test_field_values_are_text_after_decoding(
    fields: dict[str, object] | None, expected: dict[str, str] | None
) -> None:
    header = orjson.dumps({
        "code": 1, "language": "GO", "version": 0, "opaque": 1, "flag": 0, "extFields": fields,
    })  # fmt: skip
    assert decode(json_frame(header)).fields == expected


@pytest.mark.parametrize(
    ("language", "expected"),
    [("JAVA", "JAVA"), (9, "GO"), (99, "OTHER"), (None, "OTHER"), ("KLINGON", "KLINGON")],
)
def test_languages_are_names_or_numbers(language: object, expected: str) -> None:
    header = orjson.dumps({"code": 1, "language": language, "version": 0, "opaque": 1, "flag": 0})
    assert decode(json_frame(header)).language == expected


def test_absent_numbers_are_zero_and_text_numbers_are_read() -> None:
    command = decode(json_frame(b'{"code":"105","opaque":"7"}'))
    assert (command.code, command.opaque, command.flag, command.version) == (105, 7, 0, 0)


def test_a_header_that_is_not_quite_json_is_read_as_fastjson_reads_it() -> None:
    command = decode(json_frame(b'{code":1}'.replace(b"code", b'"code') + b" "))
    assert command.code == 1
    odd = decode(json_frame(b'{"code":1,"extFields":{"a":"\\ud800"}}'))
    assert odd.fields == {"a": "\ud800"}
    assert decode(json_frame(b'{"code":1,"remark":"\xff"}')).remark == "�"


def test_a_lone_surrogate_travels_as_an_escape() -> None:
    assert decode(encode(Command(0, {"a": "\ud800"}))[4:]).fields == {"a": "\ud800"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",
        struct.pack(">I", 5) + b"{}",
        json_frame(b""),
        json_frame(b"nonsense"),
        json_frame(b"[]"),
        json_frame(b'"text"'),
        json_frame(b'{"code":1'),
        json_frame(b'{"code":"x"}'),
        json_frame(b'{"code":99999999999}'),
        json_frame(b'{"code":1,"opaque":1e999}'),
        json_frame(b'{"code":1,"extFields":[]}'),
        json_frame(b"{" * 5000),
        struct.pack(">I", 2 << 24 | 2) + b"{}",
        struct.pack(">I", 1 << 24 | 5) + b"short",
        struct.pack(">I", 1 << 24 | 21) + struct.pack(">hBhiii", 1, 0, 0, 1, 0, 99) + b"\0\0\0\0",
        struct.pack(">I", 1 << 24 | 21) + struct.pack(">hBhiii", 1, 0, 0, 1, 0, -1) + b"\0\0\0\0",
        struct.pack(">I", 1 << 24 | 21) + struct.pack(">hBhiii", 1, 0, 0, 1, 0, 0) + b"\0\0\0\x09",
    ],
)
def test_what_is_not_a_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_binary_drops_empty_values_and_keeps_order() -> None:
    command = Command(14, {"b": "1", "empty": "", "a": "ü"}, b"x", 5, 0, "", "PYTHON", 479, BINARY)
    again = decode(encode(command)[4:])
    assert again.fields == {"b": "1", "a": "ü"}
    assert list(again.fields) == ["b", "a"]
    assert (again.remark, again.language, again.body) == (None, "PYTHON", b"x")


def test_a_code_above_16_bits_does_not_travel_in_binary() -> None:
    with pytest.raises(ProtocolError, match="JSON"):
        encode(Command(200050, serialization=BINARY))


def test_an_unknown_language_travels_as_other_in_binary() -> None:
    assert decode(encode(Command(1, language="KLINGON", serialization=BINARY))[4:]).language == (
        "OTHER"
    )
    data = bytearray(encode(Command(1, serialization=BINARY))[4:])
    data[6] = 200
    assert decode(bytes(data)).language == "OTHER"


def test_the_largest_frame_travels_and_one_byte_more_does_not() -> None:
    body = bytes(FRAME_BYTES_MAX + 4 - len(encode(Command(7))))
    assert len(encode(Command(7, None, body))) == FRAME_BYTES_MAX + 4
    with pytest.raises(ProtocolError, match="16777217"):
        encode(Command(7, None, body + b"x"))


def test_an_answer_is_json_whatever_the_request_was() -> None:
    request = Command(14, opaque=9, serialization=BINARY, language="GO")
    answer = decode(encode_response(request, 22, {}, b"", "none")[4:])
    assert (answer.code, answer.opaque, answer.flag, answer.fields) == (22, 9, 1, {})
    assert (answer.serialization, answer.language, answer.version) == (JSON, "JAVA", 479)


@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_the_start_of_a_frame_is_the_frame_without_its_body(serialization: int) -> None:
    body = bytes(100_000)
    command = Command(320, {"a": "b"}, body, serialization=serialization)
    assert encode_start(command) + body == encode(command)
    with pytest.raises(ProtocolError):
        encode_start(Command(320, None, memoryview(bytes(FRAME_BYTES_MAX)), 1, 0))
