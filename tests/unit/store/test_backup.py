"""A store that is being written is backed up, and restored up to the last or any position."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.files import SYSTEM_FILES, clone, link, overwrite_text
from sluicemq.store.store import Store
from sluicemq.store.tools import backup as backups
from sluicemq.store.tools.backup import BackupReport, RestoreReport, back_up, restore
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.testing.files import CrashableFiles, PowerLost


def put(files: Any, path: str, text: str) -> None:
    files.make_directory(path.rpartition("/")[0])
    overwrite_text(files, path, text)


def backed_up(bench: Any, **options: Any) -> BackupReport:
    return back_up("/store", "/backup", files=bench.files, clock=bench.clock, shares=(), **options)


def restored(bench: Any, **options: Any) -> tuple[RestoreReport, Any]:
    """Restore the backup and open the store. Return the report and the bench of that store."""
    result = restore("/backup", "/new", files=bench.files, clock=bench.clock, shares=(), **options)
    other = type(bench)()
    other.files, other.clock = bench.files, bench.clock
    sizes = json.loads(bench.files.content("/backup/backup.json"))
    other.open(
        root="/new", commit_log_path="/new/commitlog", consume_queue_path="/new/consumequeue",
        consume_queue_file_bytes=sizes["queueFileBytes"],
    )  # fmt: skip
    return result, other


def test_a_restored_store_is_what_was_backed_up(bench: Any) -> None:
    bench.open()
    bench.send(*(bytes([n]) * 200 for n in range(100)), properties={"KEYS": "k"})
    bench.send(b"other", topic="A", queue_id=3, tag="x")
    put(bench.files, "/store/config/topics.json", "tables")
    found = backed_up(bench)
    assert (found.start, found.end) == (0, bench.store.written_offset)
    bench.send(b"later")
    result, other = restored(bench)
    assert (result.end, result.messages) == (found.end, 101)
    assert not other.store.recovered.is_rebuilt
    assert other.bodies() == bench.bodies()[:-1]
    assert other.bodies("A", 3) == [b"other"]
    assert len(other.store.keys.find("T", "k", 1000, 0, 1 << 60).records) == 100
    assert bench.files.content("/new/config/topics.json") == b"tables"


def test_the_offline_tools_refuse_a_backup_and_name_the_way(bench: Any) -> None:
    bench.open()
    bench.send(b"message")
    backed_up(bench)
    with pytest.raises(StoreError, match=r"/backup is a backup.*sluice store restore /backup DIR"):
        StoreLayout.find("/backup", files=bench.files)
    restored(bench)
    assert len(StoreLayout.find("/new", files=bench.files).log) == 1


def test_the_next_run_continues_where_the_backup_ends(bench: Any) -> None:
    bench.open()
    reports = []
    rng = random.Random(1)
    for number in range(12):
        bench.send(*(rng.randbytes(rng.randrange(400)) for _ in range(rng.randrange(15))))
        put(bench.files, "/store/config/consumerOffset.json", str(number))
        if number % 4 == 3:  # retention takes its first file, the backup keeps it
            bench.store._log.segments.detach_first()
            name = bench.files.names("/store/commitlog")[0]
            bench.files.remove(f"/store/commitlog/{name}")
        reports.append(backed_up(bench))
        bench.clock.ms += 1000
    assert all(one.new_bytes == one.copied_bytes for one in reports)
    assert sum(one.new_bytes for one in reports) == reports[-1].end
    assert reports[-1].start == 0
    for number, report in enumerate(reports):
        if report.end == reports[min(number + 1, 11)].end:
            continue  # replaced by a newer moment of the same position
        result, other = restored(bench, at=report.end)
        assert result.end == result.moment.end == report.end
        assert bench.files.content("/new/config/consumerOffset.json") == str(number).encode()
        other.store.close()
        backups.remove_tree(bench.files, "/new")


def test_any_position_can_be_restored(bench: Any) -> None:
    bench.open()
    bench.send(b"1")
    put(bench.files, "/store/config/x.json", "first")
    first = backed_up(bench).end
    positions = [bench.send(b"%d" % n)[0][0] for n in range(2, 40)]
    put(bench.files, "/store/config/x.json", "second")
    last = backed_up(bench).end
    for at, count in ((first, 1), (positions[0] + 5, 1), (positions[10], 11), (last, 39)):
        result, other = restored(bench, at=at)
        assert len(other.bodies()) == result.messages == count
        expected = b"second" if at == last else b"first"
        assert bench.files.content("/new/config/x.json") == expected
        other.send(b"goes on")
        other.store.close()
        backups.remove_tree(bench.files, "/new")
    for at in (-1, last + 1):
        with pytest.raises(StoreError, match=f"from 0 to {last}"):
            restored(bench, at=at)


def test_queues_whose_messages_have_expired_continue_at_their_offset(bench: Any) -> None:
    bench.expire("Old")
    store = bench.open()
    assert store.queue_offsets("Old", 0) == (10, 10)
    backed_up(bench)
    _, other = restored(bench)
    assert other.store.queue_offsets("Old", 0) == (10, 10)
    assert other.send(b"new", topic="Old")[0][1] == 10
    assert other.bodies() == bench.bodies()


def test_only_the_confirmed_log_of_a_replica_is_backed_up(bench: Any) -> None:
    bench.open()
    positions = [bench.send(b"%d" % n)[0][0] for n in range(5)]
    put(
        bench.files,
        "/store/config/sluiceReplicas.json",
        json.dumps({"confirmed": positions[3] + 1}),
    )
    assert backed_up(bench).end == positions[3]
    _, other = restored(bench)
    assert len(other.bodies()) == 3
    assert not bench.files.exists("/new/config/sluiceReplicas.json")


def test_a_directory_that_does_not_fit_is_refused(bench: Any) -> None:
    store = bench.open()
    bench.send(b"1" * 2000, b"2" * 2000)
    backed_up(bench)
    with pytest.raises(StoreError, match="not a backup"):
        restore("/store", "/new", files=bench.files)
    with pytest.raises(StoreError, match="not empty"):
        restore("/backup", "/store", files=bench.files)
    with pytest.raises(StoreError, match="not a backup"):
        back_up("/store", "/store", files=bench.files)
    following = store.start_following()
    following.truncate(2120)
    with pytest.raises(StoreError, match=r"was truncated|has other bytes"):
        backed_up(bench)


def test_a_store_that_begins_behind_its_backup_needs_a_new_backup(bench: Any) -> None:
    bench.open()
    bench.send(b"1")
    backed_up(bench)
    bench.send(*(b"x" * 1000 for _ in range(10)))
    for name in bench.files.names("/store/commitlog")[:2]:
        bench.files.remove(f"/store/commitlog/{name}")
    with pytest.raises(StoreError, match="begins at 8192"):
        backed_up(bench)


def test_damage_is_not_backed_up(bench: Any) -> None:
    store = bench.open()
    bench.send(*(b"x" * 500 for _ in range(5)))
    bench.clock.ms += 20_000
    store.tick()
    store.sync()
    bench.files.rot("/store/commitlog/" + "0" * 20, random.Random(1), 200, 201)
    with pytest.raises(StoreDamagedError, match="no whole record"):
        backed_up(bench)
    assert not bench.files.exists("/backup/backup.json")


def test_documents_that_change_while_they_are_read_are_read_again(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open()
    bench.send(b"1")
    for name in ("a", "b"):
        put(bench.files, f"/store/config/{name}", "0")
    original, reads = backups.iter_files, []

    def change_and_iter_files(files: CrashableFiles, path: str) -> Any:
        reads.append(path)
        for found in original(files, path):
            yield found
            if len(reads) < 4:  # both change between two reads
                for name in ("a", "b"):
                    files.put(f"/store/config/{name}", str(len(reads)).encode())

    monkeypatch.setattr(backups, "iter_files", change_and_iter_files)
    backed_up(bench)
    directory = f"/backup/state/{bench.store.written_offset:020d}/config"
    assert [bench.files.content(f"{directory}/{name}") for name in ("a", "b")] == [b"3", b"3"]
    assert len(reads) == 5


@pytest.mark.parametrize("seed", range(30))
def test_an_interrupted_backup_keeps_the_last_one(bench: Any, seed: int) -> None:
    rng = random.Random(seed)
    bench.open()
    bench.send(*(rng.randbytes(rng.randrange(900)) for _ in range(rng.randrange(1, 20))))
    put(bench.files, "/store/config/x.json", "1")
    bench.store.sync()
    first = backed_up(bench).end
    count = len(bench.bodies())
    bench.send(*(rng.randbytes(rng.randrange(900)) for _ in range(20)))
    bench.store.sync()
    bench.files.power_fails_after = rng.randrange(40)
    with contextlib.suppress(PowerLost):
        for _ in range(9):
            bench.store.sync()
            backed_up(bench)
            bench.send(b"more")
    bench.files.power_fails_after = None
    bench.files = bench.files.crash(rng)
    bench.open()
    result, other = restored(bench)
    assert result.end >= first
    assert other.bodies()[:count] == bench.bodies()[:count]
    other.store.close()
    backups.remove_tree(bench.files, "/new")
    assert backed_up(bench).end == bench.store.written_offset
    _, other = restored(bench)
    assert other.bodies() == bench.bodies()


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_an_interrupted_restore_is_not_a_store_and_can_be_repeated(bench: Any, after: int) -> None:
    bench.open()
    bench.send(*(b"x" * 700 for _ in range(20)))
    put(bench.files, "/store/config/x.json", "1")
    backed_up(bench)
    bench.files.power_fails_after = after
    with contextlib.suppress(PowerLost):
        restored(bench)
    bench.files.power_fails_after = None
    bench.files = bench.files.crash(random.Random(after))
    has_begun = bench.files.exists("/new/restoring")
    if has_begun:
        with pytest.raises(StoreError, match="interrupted"):
            type(bench).open(bench, root="/new", commit_log_path="/new/commitlog")
    if has_begun or not bench.files.names("/new"):
        result, other = restored(bench)
        assert (result.messages, len(other.bodies())) == (20, 20)


@pytest.mark.parametrize("share", [clone, link])
def test_complete_files_share_blocks_if_the_file_system_supports_it(
    tmp_path: Path, share: Any
) -> None:
    root, target = f"{tmp_path}/store", f"{tmp_path}/backup"
    config = StoreConfig(root=root, commit_log_file_bytes=65_536)
    store = Store.open(config)
    for number in range(300):
        store.writer.append("T", 0, b"x" * 1000, b"", 0, 0, 0, 1, bytes(8), bytes(8))
        if number == 200:
            store.commit()
            back_up(root, target, shares=(share,))
    store.commit()
    found = back_up(root, target, shares=(share,))
    files = sorted((tmp_path / "backup" / "commitlog").iterdir())
    if share is link:
        shared = [path for path in files if path.stat().st_nlink == 2]
        assert len(shared) == len(files) - 2  # the newest, and the newest of the first run
        assert found.copied_bytes < 2 * 65_536
    result = restore(target, f"{tmp_path}/new")
    assert (result.end, result.messages) == (store.written_offset, 300)
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "new" / "commitlog").iterdir())
    store.close()
    assert "restoring" not in SYSTEM_FILES.names(f"{tmp_path}/new")
