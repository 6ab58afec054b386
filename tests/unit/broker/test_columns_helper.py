"""The process that makes the files of columns: the same files as made here, and its end."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluicemq.broker.consume.columns_helper import SealingProcess
from sluicemq.config import StoreConfig
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.store.columns import blocks as columns_blocks
from sluicemq.store.store import Store
from waiting import limit

ROWS = 4096
HOST = bytes([127, 0, 0, 1, 0, 0, 0, 1])
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_blocks, "BLOCK_ROWS", ROWS)


@contextlib.contextmanager
def opened(root: Path, *, elsewhere: bool) -> Iterator[Store]:
    config = StoreConfig(root=str(root), commit_log_file_bytes=1 << 19)
    store = Store.open(config)
    try:
        store.columns.sealer = SealingProcess(nice=0) if elsewhere else None
        yield store
    finally:
        store.close()


def fill(store: Store, count: int) -> None:
    for number in range(count):
        properties = f"n\x01{number % 7}\x02UNIQ_KEY\x01{number:032d}\x02".encode()
        store.writer.append("T", 0, b"body", properties, 0, 0, 0, 1, HOST, HOST)
    store.commit()
    store.sync()


def seal(store: Store) -> None:
    store.columns.scan_for("T")
    for step in store.columns.seal_blocks():
        if callable(step):
            step()


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "columns").glob("T/0/*")}


@pytest.mark.slow
def test_the_helper_makes_the_files_that_are_made_here(tmp_path: Path) -> None:
    with opened(tmp_path, elsewhere=False) as store:
        fill(store, 3 * ROWS + 5)
        seal(store)
    here = files(tmp_path)
    assert len(here) == 3
    for path in (tmp_path / "columns" / "T" / "0").iterdir():
        path.unlink()
    with opened(tmp_path, elsewhere=True) as store:
        seal(store)
        assert files(tmp_path) == here
        assert store.columns.rows_sealed == 3 * ROWS
        blocks = store.columns.iter_blocks("T", 0, 0, 3 * ROWS)
        assert blocks is not None
        values = compile_sql92("n = 3").vectorised
        matches = sum(int((values.verdicts(block) == 1).sum()) for block in blocks)
        assert matches == len(range(3, 3 * ROWS, 7))
        assert store.columns.rows_decoded == 0


@pytest.mark.slow
def test_a_helper_that_ends_fails_the_job_and_the_next_one_has_another(tmp_path: Path) -> None:
    with opened(tmp_path, elsewhere=True) as store:
        fill(store, 2 * ROWS)
        seal(store)
        helper = store.columns.sealer
        assert isinstance(helper, SealingProcess)
        first = helper._process
        assert first is not None
        first.kill()
        first.wait()
        fill(store, ROWS)
        with pytest.raises(OSError, match=r"ended|Broken pipe"):
            seal(store)
        store.columns._retry_s = 0.0
        seal(store)
        assert len(files(tmp_path)) == 3
        pid = helper._process.pid  # type: ignore[union-attr]
    end = time.monotonic() + limit(WAIT_S)
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "it ends with the store"
        time.sleep(0.01)
    assert pid != os.getpid()
