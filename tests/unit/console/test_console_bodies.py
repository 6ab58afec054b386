"""The forms in which bodies are shown."""

from hypothesis import given
from hypothesis import strategies as st

from sluicemq.console import bodies


def test_json_text_and_bytes() -> None:
    assert list(bodies.find_forms(b'{"a": 1}')) == ["json", "text", "hex"]
    assert bodies.find_forms(b'{"a": 1}')["json"]() == '{\n  "a": 1\n}'
    assert bodies.find_forms("早".encode())["text"]() == "早"
    assert list(bodies.find_forms(b"\xff\x00")) == ["hex"]
    assert bodies.find_forms(b"AB")["hex"]() == f"00000000  {'41 42':<48} AB"


def test_protocol_buffers_without_a_schema() -> None:
    inner = b"\x08\x96\x01\x12\x02\xff\xfe"  # 1: 150, 2: two bytes
    body = b"\x0a\x05hello" + b"\x1a" + bytes([len(inner)]) + inner + b"\x25\x01\x00\x00\x00"
    assert bodies.format_protobuf(body) == [
        '1: "hello"', "3 {", "  1: 150", "  2: ff fe", "}", "4: 0x00000001",
    ]  # fmt: skip
    assert bodies.format_protobuf(b"\x00") is None
    assert bodies.format_protobuf(b"\x0a\x7fshort") is None


@given(st.binary(max_size=300))
def test_any_body_can_be_shown(body: bytes) -> None:
    found = bodies.find_forms(body)
    assert "hex" in found
    assert all(isinstance(text(), str) for text in found.values())


def test_text_that_is_cut_within_a_character_is_still_text() -> None:
    body = "é".encode() * bodies.SHOWN_BYTES_MAX
    assert "text" in bodies.find_forms(b"x" + body)


def test_large_or_deeply_nested_bodies_are_not_parsed() -> None:
    pairs = b"[" + b"1," * bodies.SHOWN_BYTES_MAX + b"1]"
    assert list(bodies.find_forms(pairs)) == ["text", "hex"]
    assert list(bodies.find_forms(b"\x08\x00" * bodies.SHOWN_BYTES_MAX)) == ["hex"]
    deep = b"[" * 900 + b"1," * 30_000 + b"1" + b"]" * 900  # 60 KiB: 54 MB when it is indented
    assert list(bodies.find_forms(deep)) == ["text", "hex"]
    level = b"[" * bodies.DEPTH_MAX + b"]" * bodies.DEPTH_MAX
    assert list(bodies.find_forms(level)) == ["json", "text", "hex"]
    assert list(bodies.find_forms(b"[" + level + b"]")) == ["text", "hex"]
