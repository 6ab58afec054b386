"""The decoder of bodies: every compression, every kind of damage, and its limits."""

import re
import subprocess
import sys
import time
import tomllib
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.errors import ClientError, UndecodableBodyError
from sluicemq.model.bodies import COMPRESSED, Undecodable, compress, decode_body
from sluicemq.model.message import StoredMessage
from sluicemq.record.codec import decode_record, encode_record
from stored_bodies import BAD, GOOD, KINDS, LIMIT, TEXT, StoredBody

pytestmark = pytest.mark.slow

MIB = 1024 * 1024


def message(stored: StoredBody, **more: Any) -> StoredMessage:
    host = b"\x0a\1\2\3\0\0\x2a\x9f"
    record = encode_record(
        topic="orders", queue_id=3, queue_offset=17, physical_offset=0, body=stored.raw,
        properties=b"UNIQ_KEY\x017F00\x02TAGS\x01paid\x02", flag=0, sys_flag=stored.sys_flag,
        born_time_ms=1, born_host=host, store_time_ms=2, store_host=host,
    )  # fmt: skip
    return decode_record(record, broker="broker-a", **more)


@pytest.mark.parametrize("stored", GOOD.values(), ids=GOOD)
def test_a_good_body_is_what_the_producer_sent(stored: StoredBody) -> None:
    assert decode_body(stored.raw, stored.sys_flag, LIMIT) == stored.body
    found = message(stored, body_bytes_max=LIMIT)
    assert (found.body, found.raw_body, found.body_error) == (stored.body, stored.raw, None)
    assert found.body_or_raw == stored.body


@pytest.mark.parametrize("stored", BAD.values(), ids=BAD)
def test_a_bad_body_is_an_error_that_names_place_reason_and_fix(stored: StoredBody) -> None:
    found = message(stored, body_bytes_max=LIMIT)
    assert "undecodable" in repr(found)
    assert (found.raw_body, found.tag, found.body_or_raw) == (stored.raw, "paid", stored.raw)
    with pytest.raises(UndecodableBodyError) as caught:
        _ = found.body
    error = caught.value
    assert isinstance(error, ClientError)
    assert str(error).startswith(
        "The body of message 7F00 cannot be decoded (topic 'orders', queue 3 of broker-a, offset "
        "17): it"
    )
    assert (error.topic, error.broker, error.queue_id, error.queue_offset) == (
        "orders", "broker-a", 3, 17
    )  # fmt: skip
    assert error.reason in str(error)
    assert error.fix
    assert str(found.body_error) == str(error)
    with pytest.raises(UndecodableBodyError):  # a message keeps its error
        _ = found.body


def test_bad_bodies_have_their_own_reasons_and_fixes() -> None:
    def told(name: str) -> Undecodable:
        found = decode_body(BAD[name].raw, BAD[name].sys_flag, LIMIT)
        assert isinstance(found, Undecodable)
        return found

    assert "incorrect header check" in told("zlib, garbage").reason
    assert told("zstd, cut").reason == "it is not valid Zstandard data: the data ends too early"
    assert "more than 1,024 frames" in told("lz4, too many frames").reason
    assert told("compression type 5").reason.startswith("its compression type 5 is unknown")
    oversized = told("lz4, oversized")
    assert oversized.reason == "it decompresses to more than 262,144 bytes"
    assert oversized.fix.startswith("Raise body_bytes_max")


@pytest.mark.parametrize(("package", "kind"), [("lz4", 0x100), ("zstandard", 0x200)])
def test_a_missing_package_is_named(
    package: str, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = compress(TEXT, kind)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    found = decode_body(raw, COMPRESSED | kind)
    assert isinstance(found, Undecodable)
    assert f"compressed with {package}, which cannot be imported" in found.reason
    assert f"pip install {package}" in found.fix


def test_the_packages_are_imported_by_the_first_body_that_needs_them() -> None:
    code = (
        "import sys, sluicemq.client.aio.sluice, sluicemq.cli\n"
        "from sluicemq.model.bodies import compress, decode_body\n"
        "assert not {'lz4', 'zstandard'} & sys.modules.keys()\n"
        "for kind in (0x100, 0x200): assert decode_body(compress(b'x', kind), 1 | kind) == b'x'\n"
        "assert {'lz4', 'zstandard'} <= sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_packages_are_in_the_base_installation() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[a-z0-9-]+", one)[0] for one in project["dependencies"]}  # type: ignore[index]
    assert {"lz4", "zstandard"} <= names
    assert project["optional-dependencies"]["compression"] == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_oversized_body_is_given_up_at_its_limit(kind: int) -> None:
    raw = compress(bytes(40 * MIB), kind)
    tracemalloc.start()
    try:
        found = decode_body(raw, COMPRESSED | kind, 2 * MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found, Undecodable)
    assert peak - len(raw) < 3.5 * MIB


def test_a_frame_with_a_large_window_takes_no_memory_for_it() -> None:
    """Zstandard reserves the window that a frame declares: 128 MiB at level 22."""
    compressor = zstandard.ZstdCompressor(level=22).compressobj()
    raw = compressor.compress(TEXT) + compressor.flush()
    assert zstandard.get_frame_parameters(raw).window_size == 128 * MIB
    code = (
        "import resource, sys\n"
        "from sluicemq.model.bodies import decode_body\n"
        "import zstandard\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "body = decode_body(bytes.fromhex(sys.argv[1]), 0x201, 1 << 20)\n"
        "print(len(body), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, raw.hex()], check=True, capture_output=True, text=True
    )
    size, grown_kib = map(int, told.stdout.split())
    assert size == len(TEXT)
    assert grown_kib < 16 * 1024


@pytest.mark.parametrize("name", ["lz4, too many frames", "zstd, too many frames"])
def test_half_a_million_empty_frames_take_no_time(name: str) -> None:
    stored = BAD[name]
    frame = stored.raw[: len(stored.raw) // 1025]
    began_s = time.process_time()
    assert isinstance(decode_body(frame * 400_000, stored.sys_flag), Undecodable)
    assert time.process_time() - began_s < 2.0


def test_an_uncompressed_body_has_no_limit() -> None:
    assert decode_body(bytes(2 * LIMIT), 0, LIMIT) == bytes(2 * LIMIT)


@pytest.mark.parametrize("size", [256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 3 * MIB + 7])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_bodies_of_several_pieces_are_whole(kind: int, size: int) -> None:
    body = b"".join(n.to_bytes(4) for n in range(size // 4 + 1))[:size]
    assert decode_body(compress(body, kind), COMPRESSED | kind) == body


@given(
    st.binary(max_size=300), st.sampled_from([*range(8)]),
    st.sampled_from(["plain", "damaged", "cut", "garbage"]), st.data(),
)  # fmt: skip
def test_whatever_the_bytes_are_the_answer_is_a_body_or_a_reason(
    body: bytes, kind: int, damage: str, data: st.DataObject
) -> None:
    raw = bytearray(compress(body, kind << 8) if kind < 4 else zlib.compress(body))
    if damage == "damaged":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    elif damage == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    elif damage == "garbage":
        raw = bytearray(body)
    found = decode_body(raw, COMPRESSED | kind << 8, 1024)
    assert isinstance(found, bytes | Undecodable)
    if damage == "plain" and kind < 4:
        assert found == body
