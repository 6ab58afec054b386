"""No reader touches a hole of a sparse file through a map: on a full tmpfs that is a SIGBUS."""

import asyncio
import contextlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hole_watch import PAGE, TMPFS, HoleWatch, allocated
from sluicemq.broker.trial import find_start_error
from sluicemq.config import StoreConfig
from sluicemq.errors import SluiceError
from sluicemq.filter.subscriptions import TagFilter, parse_subscription
from sluicemq.model.ids import tag_code
from sluicemq.record.codec import decode_records, encode_properties
from sluicemq.store.store import Store
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.verify import verify

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not TMPFS.is_mount(), reason="needs Linux's tmpfs in /dev/shm"
)
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
LOG_BYTES, QUEUE_BYTES = 16 * PAGE, 4 * PAGE * 5  # units of 20 bytes fill the pages
MESSAGES = 60


def config_of(root: Path) -> StoreConfig:
    return StoreConfig(
        root=str(root), commit_log_file_bytes=LOG_BYTES, consume_queue_file_bytes=QUEUE_BYTES,
        index_slots=64 * PAGE, index_entries=256 * PAGE, consume_queue_flush_pages_min=0,
    )  # fmt: skip


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=TMPFS, prefix="sluice-holes-"))
    yield directory
    shutil.rmtree(directory)


def fill(store: Store, rng: random.Random, count: int = MESSAGES) -> None:
    for number in range(count):
        tag = "ab"[number % 2]
        properties = encode_properties({"KEYS": f"k{number}", "TAGS": tag, "n": f"{number % 7}"})
        body = rng.randbytes(rng.choice([10, 100, 1500, 5000]))
        store.writer.append(
            "TS"[number % 2], number % 3, body, properties, tag_code(tag), 0, 0, 1, HOST, HOST
        )
        store.commit()


def read_all(store: Store) -> int:
    """Read every queue in every way, look up every key; returns the number of messages."""
    count = 0
    filters: list[Any] = [
        None,
        TagFilter(parse_subscription("T", "a")),
        TagFilter(parse_subscription("T", "none")),
    ]
    for key in store.queues():
        for message_filter in filters:
            offset, end = store.queue_offsets(*key)
            while offset < end:
                result = store.reader.read(*key, offset, 32, None, message_filter)
                count += len(decode_records(b"".join(result.data))) * (message_filter is None)
                offset = result.next_offset
    for number in range(MESSAGES + 5):
        for topic in "TS":
            store.keys.find(topic, f"k{number}", 9, 0, 1 << 60)
    return count


def start(root: Path, files: HoleWatch, *, kill: bool) -> int:
    store = Store.open(config_of(root), files=files)
    count = read_all(store)
    for _ in range(20):
        store.keys.catch_up(1 << 30)
        store.tick()
    store.sync()
    if kill:
        store._unlock()
    else:
        store.close()
    return count


def check(root: Path, files: HoleWatch) -> int:
    layout = StoreLayout.find(str(root))
    try:
        return verify(layout).records
    finally:
        layout.close()


def trial(root: Path, files: HoleWatch) -> int:
    assert asyncio.run(find_start_error(config_of(root))) is None
    return MESSAGES


WAYS: dict[str, Callable[[Path, HoleWatch], int]] = {
    "start and stop": lambda root, files: start(root, files, kill=False),
    "start": lambda root, files: start(root, files, kill=True),
    "verify": check,
    "trial": trial,
}


ENDS = [0, 4, PAGE - 1, PAGE - 7, PAGE - 50, PAGE // 2]


def template(root: Path, *, kill: bool, end: int) -> None:
    """Build a store whose log ends `end` bytes behind the start of a page."""
    store = Store.open(config_of(root))
    fill(store, random.Random(end), MESSAGES - 1)
    start = store.written_offset
    store.writer.append("T", 0, b"", b"", 0, 0, 0, 1, HOST, HOST)
    size = store.commit() - start
    room = (end - store.written_offset) % PAGE
    while room < size + 20:
        room += PAGE
    store.writer.append("T", 0, b"b" * (room - size), b"", 0, 0, 0, 1, HOST, HOST)
    assert store.commit() % PAGE == end
    store.tick()
    if kill:
        store._unlock()
    else:
        store.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("end", ENDS)
def test_reading_a_store_touches_no_hole(tmpfs: Path, way: str, kill: bool, end: int) -> None:
    template(tmpfs / "s", kill=kill, end=end)
    files = HoleWatch(str(tmpfs / "s"))
    assert WAYS[way](tmpfs / "s", files) in (MESSAGES, MESSAGES + 1)
    assert files.pages_from_reads() == []


@pytest.mark.parametrize("way", ["start", "start and stop"])
@pytest.mark.parametrize("entries", [9, 40], ids="{} entries".format)
def test_a_lookup_in_a_full_index_file_touches_no_hole(
    tmpfs: Path, way: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = config_of

    def config(root: Path) -> StoreConfig:
        return replace(usual(root), index_entries=entries, index_slots=300 * PAGE)

    monkeypatch.setitem(globals(), "config_of", config)
    template(tmpfs / "s", kill=False, end=PAGE // 2)
    assert len(list((tmpfs / "s" / "index").iterdir())) > 1
    files = HoleWatch(str(tmpfs / "s"))
    WAYS[way](tmpfs / "s", files)
    assert files.pages_from_reads() == []


@pytest.mark.parametrize("place", ["behind the log", "behind a blank record"])
def test_a_damaged_unit_leads_no_reader_into_a_hole(tmpfs: Path, place: str) -> None:
    template(tmpfs / "s", kill=False, end=PAGE // 2)
    store = Store.open(config_of(tmpfs / "s"))
    for pages in (8, 12):  # each needs a new file, so the last but one ends with a hole
        store.writer.append("T", 0, b"x" * pages * PAGE, b"", 0, 0, 0, 1, HOST, HOST)
        store.commit()
    store.close()
    layout = sorted((tmpfs / "s" / "commitlog").iterdir())
    log = layout[-2] if place == "behind a blank record" else layout[-1]
    last_page = max(allocated(log))
    hole = int(log.name) + (last_page + 1) * PAGE + 40
    assert hole + PAGE < int(log.name) + LOG_BYTES, "the file has a hole at its end"
    queue = tmpfs / "s" / "consumequeue" / "T" / "0" / f"{0:020d}"
    with queue.open("r+b") as file:
        file.seek(3 * 20)
        file.write(struct.pack(">qi", hole, 200))
    files = HoleWatch(str(tmpfs / "s"))
    with contextlib.suppress(SluiceError):
        start(tmpfs / "s", files, kill=True)
    assert files.pages_from_reads() == []


def test_holes_of_a_sparse_copy_are_filled_before_they_are_mapped(tmpfs: Path) -> None:
    store = Store.open(config_of(tmpfs / "s"))
    for body in (b"a", bytes(6 * PAGE), b"b", bytes(5 * PAGE)):
        store.writer.append("T", 0, body, b"", 0, 0, 0, 1, HOST, HOST)
        store.commit()
    store.close()
    subprocess.run(
        ["cp", "-r", "--sparse=always", str(tmpfs / "s"), str(tmpfs / "copy")], check=True
    )
    log = next((tmpfs / "copy" / "commitlog").iterdir())
    assert len(list(allocated(log))) < 8, "the copy is sparse"
    files = HoleWatch(str(tmpfs / "copy"))
    assert start(tmpfs / "copy", files, kill=True) == 4
    assert files.pages_from_reads() == []
