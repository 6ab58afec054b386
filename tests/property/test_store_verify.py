"""`verify` detects a change of each protected byte of a store that RocketMQ's broker wrote.

`RULES` computes from the layouts (spec/store.md §2.1, §2.4, §3, §4), with a parser of its own,
which bytes of a file are protected. A change of another byte may remain undetected, but verify must
still end. The files are in memory and cannot be written.
"""

import os
import struct
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.errors import StoreError
from sluicemq.files.descriptors import DescriptorPool
from sluicemq.store.tools.dump import (
    Selection,
    describe,
    dump_documents,
    dump_index,
    dump_log,
    dump_queues,
)
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.verify import verify

STORES = Path(__file__).parents[1] / "golden" / "store"
ROOTS = {"golden1": "golden1/store", "golden2": "golden2/store", "golden3_trans": "golden3/store"}
EXAMPLES = int(os.environ.get("SLUICEMQ_EXAMPLES", "150"))
SLOTS = 100
PROTECTED_PROPERTIES = (b"TAGS", b"UNIQ_KEY", b"KEYS")
V1, V2, BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194


class MemoryFile:
    """A read-only file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def pread(self, size: int, offset: int) -> bytes:
        return self._data[offset : offset + size]

    def size(self) -> int:
        return len(self._data)

    def data_start(self, offset: int) -> int | None:
        return offset if offset < len(self._data) else None

    def close(self) -> None:
        pass


class MemoryFiles:
    """The reading methods of `Files`, over contents in memory."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.pool = DescriptorPool(8)

    def open(self, path: str, *, create: bool = False) -> Any:
        assert not create
        if path not in self.contents:
            raise FileNotFoundError(path)
        return MemoryFile(self.contents[path])

    def exists(self, path: str) -> bool:
        return path in self.contents or any(p.startswith(path + "/") for p in self.contents)

    def names(self, directory: str) -> list[str]:
        start = directory + "/"
        return sorted(
            {p[len(start) :].partition("/")[0] for p in self.contents if p.startswith(start)}
        )


@cache
def contents(name: str) -> dict[str, bytes]:
    found = {}
    with tarfile.open(STORES / f"{name}.tar.gz") as tar:
        for member in tar.getmembers():
            # The wheel is large, and without it the log of timers and their checkpoint are wrong.
            is_timers = any(
                name in member.name for name in ("timerwheel", "timerlog", "timercheck")
            )
            if member.isfile() and not is_timers:
                file = tar.extractfile(member)
                assert file is not None
                path = member.name.removeprefix("./").removeprefix(ROOTS[name])
                found["/s" + path] = file.read()
    return found


def layout_of(files: dict[str, bytes]) -> StoreLayout:
    return StoreLayout.find("/s", files=MemoryFiles(files))  # type: ignore[arg-type]


# --- which bytes are protected


Ranges = list[tuple[int, int]]


def log_ranges(data: bytes) -> Ranges:
    """Return the ranges of a log file whose bytes are protected by a checksum or a rule."""
    ranges: Ranges = []
    at = 0
    while True:
        size, magic = struct.unpack_from(">iI", data, at)
        if magic == BLANK:
            return [*ranges, (at, at + 8)]
        if magic not in (V1, V2):
            return [*ranges, (at, len(data))]
        ranges += record_ranges(data, at, size)
        at += size


def record_ranges(data: bytes, at: int, size: int) -> Ranges:
    flag = struct.unpack_from(">i", data, at + 36)[0]
    is_queued = not flag & 4
    body_length_at = at + 84 + (12 if flag & 0x10 else 0) + (12 if flag & 0x20 else 0)
    body = body_length_at + 4 + struct.unpack_from(">i", data, body_length_at)[0]
    topic = body + (2 if data[at + 7] == 0xAB else 1)
    length = struct.unpack_from(">h", data, body)[0] if topic - body == 2 else data[body]
    properties = topic + length + 2
    text = data[properties : at + size]
    if text[-20:-11] == b"__CRC32#\x01":
        return [(at, at + size - 20), (at + size - 11, at + size)]
    ranges = [(at, at + 12), (at + 28, at + 36), (body_length_at, properties)]
    if is_queued:
        ranges += [(at + 12, at + 16), (at + 20, at + 28)]
    # The unit of a delayed message contains its due time instead of its tag code.
    protected_names = (
        PROTECTED_PROPERTIES[1:]
        if data[topic : topic + length] == b"SCHEDULE_TOPIC_XXXX"
        else PROTECTED_PROPERTIES
    )
    start = properties
    for piece in text.split(b"\x02"):
        name = piece.partition(b"\x01")[0]
        if name in protected_names and (is_queued or name != b"TAGS"):
            ranges.append((start, start + len(piece)))
        start += len(piece) + 1
    return ranges


def queue_ranges(data: bytes) -> Ranges:
    return [(0, len(data))]


def extension_ranges(data: bytes) -> Ranges:
    ranges: Ranges = []
    at = 0
    while (size := struct.unpack_from(">h", data, at)[0]) > 0:
        ranges.append((at, at + 20))
        at += size
    return ranges


def index_ranges(data: bytes) -> Ranges:
    """Return the protected ranges of an index file.

    The time of the first entry is not protected: it may be counted from an earlier file, which is
    missing here.
    """
    (count,) = struct.unpack_from(">i", data, 36)
    first = 40 + 4 * SLOTS + 20
    return [
        (0, 40 + 4 * SLOTS),
        (first, first + 12),
        (first + 16, first + 20 * (count - 1)),
    ]


RULES: dict[str, Callable[[bytes], Ranges]] = {
    "/s/commitlog/": log_ranges,
    "/s/consumequeue/": queue_ranges,
    "/s/consumequeue_ext/": extension_ranges,
    "/s/index/": index_ranges,
}


@cache
def protected(name: str) -> list[tuple[str, int]]:
    """Return (path, position) of protected bytes.

    Only some bytes of long runs of zeros are included; otherwise nearly all would be zeros.
    """
    return [
        (path, at)
        for path, data in contents(name).items()
        for start, rule in RULES.items()
        if path.startswith(start)
        for low, high in rule(data)
        for at in range(low, high)
        if at % 64 == 0 or any(data[max(at - 40, 0) : at + 40])
    ]


def flipped(name: str, path: str, at: int, bits: int) -> dict[str, bytes]:
    data = bytearray(contents(name)[path])
    data[at] ^= bits
    return {**contents(name), path: bytes(data)}


@pytest.mark.parametrize("name", ROOTS)
def test_stores_of_the_real_broker_are_clean(name: str) -> None:
    result = verify(layout_of(contents(name)))
    assert result.findings.listed == []
    assert result.records > 5


@pytest.mark.parametrize("name", ROOTS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), bits=st.integers(1, 255))
def test_a_flipped_bit_of_a_protected_byte_is_found(
    name: str, data: st.DataObject, bits: int
) -> None:
    places = protected(name)
    path, at = places[data.draw(st.integers(0, len(places) - 1))]
    result = verify(layout_of(flipped(name, path, at, bits)))
    assert not result.findings.is_clean, f"{path} byte {at} ^ {bits:#x}"


@pytest.mark.parametrize("name", ROOTS)
@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(data=st.data())
def test_tools_end_on_any_damage(name: str, data: st.DataObject) -> None:
    files = dict(contents(name))
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(sorted(files)))
        content = bytearray(files[path])
        kind = data.draw(st.sampled_from(["flip", "cut", "zero", "noise", "remove"]))
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        if kind == "remove":
            del files[path]
        elif kind == "cut":
            files[path] = bytes(content[:at])
        elif content:
            size = 1 if kind == "flip" else data.draw(st.integers(1, 5000))
            fill = bytes(size) if kind == "zero" else data.draw(st.binary(min_size=1)) * size
            content[at : at + size] = fill[: len(content[at : at + size])]
            files[path] = bytes(content)
    if not any(data for path, data in files.items() if path.startswith("/s/commitlog/")):
        with pytest.raises(StoreError, match="commit log"):
            layout_of(files)
        return
    layout = layout_of(files)
    verify(layout)
    describe(layout)
    everything = Selection()
    for dump in (dump_log, dump_queues, dump_index):
        list(dump(layout, everything))
    list(dump_documents(layout))
