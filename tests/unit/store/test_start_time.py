"""Starting a store costs what is new in it, not what it holds: 50 GB as 1 GB, with real files."""

import struct
import time
from pathlib import Path

import pytest

from sluicemq.config import StoreConfig
from sluicemq.files import SystemFile
from sluicemq.record.codec import encode_record
from sluicemq.record.layout import MAGIC_BLANK
from sluicemq.store.segments import Segment
from sluicemq.store.store import Store

FILE_BYTES = 1 << 30
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
STORED_MS = 1_700_000_000_000


def make_store(root: Path, gigabytes: int) -> StoreConfig:
    """Sparse files of 1 GiB with a message at each end and a blank record over what is between."""
    (root / "commitlog").mkdir(parents=True)
    for number in range(gigabytes):
        base = number * FILE_BYTES
        record = encode_record(
            topic="T", queue_id=0, queue_offset=number, physical_offset=base, body=b"x" * 100,
            properties=b"KEYS\x01k\x02", flag=0, sys_flag=0, born_time_ms=1, born_host=HOST,
            store_time_ms=STORED_MS + number, store_host=HOST,
        )  # fmt: skip
        with (root / "commitlog" / f"{base:020d}").open("wb") as file:
            file.write(record)
            if number < gigabytes - 1:
                file.write(struct.pack(">ii", FILE_BYTES - len(record), MAGIC_BLANK))
            file.truncate(FILE_BYTES)
    config = StoreConfig(root=str(root))
    store = Store.open(config)  # the queues and the index are built once
    while not store.keys.catch_up():
        pass
    assert store.queue_offsets("T", 0) == (0, gigabytes)
    store.close()
    return config


class Effort:
    """What a start maps and syncs, and its processor time."""

    def __init__(self, config: StoreConfig, patch: pytest.MonkeyPatch) -> None:
        self.mapped: set[str] = set()
        self.syncs = 0
        view, sync = Segment.view, SystemFile.sync

        def counting_view(segment: Segment) -> memoryview:
            self.mapped.add(segment.path)
            return view(segment)

        def counting_sync(file: SystemFile) -> None:
            self.syncs += 1
            sync(file)

        patch.setattr(Segment, "view", counting_view)
        patch.setattr(SystemFile, "sync", counting_sync)
        began_s = time.process_time()
        store = Store.open(config)
        self.seconds = time.process_time() - began_s
        patch.undo()
        assert store.queue_offsets("T", 0)[1] >= 1
        store.close()


@pytest.mark.parametrize("kill", [False, True])
def test_fifty_gigabytes_start_as_fast_as_one(
    tmp_path: Path, kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    efforts = []
    for gigabytes in (1, 50):
        root = tmp_path / f"{gigabytes}"
        config = make_store(root, gigabytes)
        if kill:
            (root / "abort").write_text("1")
        efforts.append(Effort(config, monkeypatch))
    small, large = efforts
    print(f"1 GB {small.seconds:.4f} s, 50 GB {large.seconds:.4f} s")
    assert len(large.mapped) <= len(small.mapped) + 1
    assert large.syncs <= small.syncs + 1
    assert large.seconds < 3 * small.seconds + 0.1
