"""The file port: one contract for the real files and their crashable twin, locks, and tables."""

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import StoreDamagedError, StoreLockedError
from sluicemq.files import (
    SYSTEM_FILES,
    Access,
    Files,
    edit_text,
    exposure_warning,
    load_text,
    overwrite_text,
    read_text,
    replace_text,
)
from sluicemq.testing.files import CrashableFiles, PowerLost

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=["system", "crashable"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, str]:
    if request.param == "system":
        return SYSTEM_FILES, str(tmp_path)
    files = CrashableFiles()
    files.make_directory("/root")
    return files, "/root"


def test_written_bytes_are_read_back(port: tuple[Files, str]) -> None:
    files, root = port
    file = files.open(f"{root}/a", create=True)
    file.pwrite(b"hello", 3)
    file.pwrite(memoryview(b"xy"), 0)
    file.sync()
    assert file.pread(100, 0) == b"xy\0hello"
    assert file.pread(2, 4) == b"el"
    assert file.size() == 8
    file.close()
    assert files.open(f"{root}/a").pread(8, 0) == b"xy\0hello"


def test_grown_file_reads_as_zeros_and_knows_its_data(port: tuple[Files, str]) -> None:
    files, root = port
    file = files.open(f"{root}/a", create=True)
    file.truncate(1 << 20)
    assert file.size() == 1 << 20
    assert file.data_start(0) is None
    file.pwrite(b"x", 500_000)
    start = file.data_start(0)
    assert start is not None
    assert 0 < start <= 500_000
    assert file.data_start(600_000) is None
    file.truncate(10)
    assert file.size() == 10
    assert file.data_start(10) is None


def test_grown_file_takes_no_room(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = SYSTEM_FILES.open(str(path), create=True)
    file.truncate(1 << 30)
    file.close()
    assert path.stat().st_blocks * 512 < 1 << 20


def test_directories_are_made_listed_and_removed(port: tuple[Files, str]) -> None:
    files, root = port
    files.make_directory(f"{root}/x/y")
    files.make_directory(f"{root}/x/z", durable=False)
    files.open(f"{root}/x/a", create=True).close()
    assert files.names(f"{root}/x") == ["a", "y", "z"]
    assert files.names(f"{root}/none") == []
    files.remove(f"{root}/x/y")
    files.rename(f"{root}/x/a", f"{root}/x/b")
    files.sync_directory(f"{root}/x")
    assert files.names(f"{root}/x") == ["b", "z"]
    assert not files.exists(f"{root}/x/a")
    with pytest.raises(FileNotFoundError):
        files.remove(f"{root}/x/a")
    with pytest.raises(OSError, match="not empty"):
        files.remove(f"{root}/x")
    with pytest.raises(FileNotFoundError):
        files.open(f"{root}/x/a")


def test_the_time_of_the_last_write_is_told(port: tuple[Files, str]) -> None:
    files, root = port
    before_ms = SYSTEM_CLOCK.now_ms() - 2000  # file systems are coarse
    file = files.open(f"{root}/file", create=True)
    file.pwrite(b"x", 0)
    assert before_ms <= files.modified_ms(f"{root}/file") <= SYSTEM_CLOCK.now_ms()
    with pytest.raises(FileNotFoundError):
        files.modified_ms(f"{root}/nothing")


def test_usage_tells_total_and_free(port: tuple[Files, str]) -> None:
    files, root = port
    total, free = files.usage(root)
    assert 0 < free <= total


def test_second_lock_is_refused_until_the_first_is_released(port: tuple[Files, str]) -> None:
    files, root = port
    release = files.lock(f"{root}/lock")
    assert read_text(files, f"{root}/lock") == "lock"
    with pytest.raises(StoreLockedError, match="storePathRootDir"):
        files.lock(f"{root}/lock")
    release()
    files.lock(f"{root}/lock")()


def test_lock_of_another_process_names_it(tmp_path: Path) -> None:
    script = (
        "import sys; from sluicemq.files import SYSTEM_FILES\n"
        "release = SYSTEM_FILES.lock(sys.argv[1]); print('locked', flush=True); sys.stdin.read()"
    )
    path = str(tmp_path / "lock")
    with subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(StoreLockedError, match=f"locked by process {process.pid},"):
            SYSTEM_FILES.lock(path)
        process.kill()  # a dead process holds no lock
        process.wait()
        SYSTEM_FILES.lock(path)()


def test_file_that_may_only_be_read_is_opened_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    (tmp_path / "a").write_bytes(b"abc")
    original = os.open

    def refuse(path: str, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)  # tests may run as root, who may write everywhere
    file = SYSTEM_FILES.open(str(tmp_path / "a"))
    assert file.pread(3, 0) == b"abc"
    with pytest.raises(PermissionError, match="Permission denied"):
        file.pwrite(b"x", 0)
    file.close()
    with pytest.raises(PermissionError):
        SYSTEM_FILES.open(str(tmp_path / "b"), create=True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_file_opened_on_a_read_only_file_system_is_written_once_writing_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import os

    (tmp_path / "a").write_bytes(b"abc")
    original, is_read_only = os.open, True

    def refuse(path: str, flags: int, *rest: Any) -> int:
        if is_read_only and flags & os.O_RDWR:
            raise OSError(number, os.strerror(number), path)
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    file = SYSTEM_FILES.open(str(tmp_path / "a"))
    with pytest.raises(OSError, match=os.strerror(number)):
        file.pwrite(b"x", 0)
    with pytest.raises(OSError, match=os.strerror(number)):
        file.truncate(9)
    is_read_only = False
    file.pwrite(b"x", 0)
    file.truncate(2)
    assert file.pread(9, 0) == b"xb"
    file.close()
    is_read_only = True
    file = SYSTEM_FILES.open(str(tmp_path / "a"))
    is_read_only = False
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(tmp_path / "a")
    with pytest.raises(OSError, match="the file was replaced while it was open"):
        file.pwrite(b"y", 0)
    assert (tmp_path / "a").read_bytes() == b"new"
    file.close()


def test_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: original(fd, data[:3], at))
    file = SYSTEM_FILES.open(str(tmp_path / "a"), create=True)
    file.pwrite(b"0123456789", 5)
    assert file.pread(100, 5) == b"0123456789"
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="no more bytes"):
        file.pwrite(b"x", 0)
    file.close()


# --- tables


def test_replaced_table_keeps_the_previous_edition(port: tuple[Files, str]) -> None:
    files, root = port
    path = f"{root}/config/topics.json"
    assert load_text(files, path, json.loads) is None
    replace_text(files, path, '{"a": 1}')
    assert not files.exists(path + ".bak")
    replace_text(files, path, '{"a": 2}')
    assert load_text(files, path, json.loads) == {"a": 2}
    assert read_text(files, path + ".bak") == '{"a": 1}'
    assert files.names(f"{root}/config") == ["topics.json", "topics.json.bak"]


@pytest.mark.parametrize("rewrite", [replace_text, overwrite_text, edit_text])
def test_a_new_edition_has_the_rights_of_the_old_one(
    port: tuple[Files, str], rewrite: Callable[[Files, str, str], None]
) -> None:
    files, root = port
    path = f"{root}/broker.conf"
    file = files.open(path, create=True, access=Access(0o640))
    file.close()
    before = files.access(path)
    assert before.mode == 0o640
    files.open(path + ".tmp", create=True, access=Access(0o666)).close()  # a crash left it
    for text in ("secret=1", "secret=2"):
        rewrite(files, path, text)
        assert files.access(path) == before
    if rewrite is not overwrite_text:
        assert files.access(path + ".bak") == before


@pytest.mark.parametrize("rewrite", [replace_text, overwrite_text, edit_text])
def test_a_rewritten_file_is_there_at_every_moment(
    rewrite: Callable[[Files, str, str], None],
) -> None:
    """A process that reads at any moment, and one that starts after a crash at that moment."""
    is_cut, moment = True, 0
    while is_cut:
        files = CrashableFiles()
        files.put("/c/broker.conf", b"\xff is not UTF-8")
        rewrite(files, "/c/broker.conf", "two")
        files.power_fails_after = moment
        with contextlib.suppress(PowerLost):
            rewrite(files, "/c/broker.conf", "three")
            is_cut = False
        moment += 1
        for after in (files.kill(), *(files.crash(random.Random(seed)) for seed in range(10))):
            assert after.content("/c/broker.conf") in (b"two", b"three")
            if rewrite is not overwrite_text:
                kept = after.content("/c/broker.conf.bak")
                assert kept in (b"two", b"\xff is not UTF-8"), "an edition, and whole"
    assert moment > 4


def test_a_table_on_the_disk_can_be_read_while_it_is_replaced(tmp_path: Path) -> None:
    path, ends = str(tmp_path / "consumerOffset.json"), threading.Event()
    replace_text(SYSTEM_FILES, path, "0" * 1000)
    missing: list[str] = []

    def read() -> None:
        while not ends.is_set():
            try:
                text = read_text(SYSTEM_FILES, path)
            except FileNotFoundError:
                text = None
            if text is None or len(text) != 1000:
                missing.append(repr(text))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(30):
            replace_text(SYSTEM_FILES, path, str(number % 10) * 1000)
    finally:
        ends.set()
        reader.join()
    assert not missing


def test_a_new_file_with_secrets_is_its_owners_alone(port: tuple[Files, str]) -> None:
    files, root = port
    edit_text(files, f"{root}/new", "secret=1")
    assert files.access(f"{root}/new").mode == 0o600
    assert exposure_warning(files, f"{root}/new") is None
    files.open(f"{root}/open", create=True, access=Access(0o644)).close()
    assert "can be read by every user of this machine. Run chmod 600" in (
        exposure_warning(files, f"{root}/open") or ""
    )
    assert exposure_warning(files, f"{root}/missing") is None


def test_the_owner_stays_the_owner_when_somebody_else_rewrites(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody")
    path = tmp_path / "plain_acl.yml"
    path.write_text("old")
    path.chmod(0o640)
    os.chown(path, 12345, 54321)
    for rewrite in (replace_text, overwrite_text):
        rewrite(SYSTEM_FILES, str(path), "new")
        found = path.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 54321, 0o640)
    assert "can be read by its group" in (exposure_warning(SYSTEM_FILES, str(path)) or "")
    os.chown(path, 0, 54321)
    assert exposure_warning(SYSTEM_FILES, str(path)) is None


def test_rights_that_cannot_be_given_are_given_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    access = Access(0o660, os.getuid(), os.getgid() + 1)
    SYSTEM_FILES.open(str(tmp_path / "a"), create=True, access=access).close()
    assert SYSTEM_FILES.access(str(tmp_path / "a")).mode == 0o600


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff\xfe", b"  \n"])
def test_broken_table_falls_back_to_the_previous_edition(broken: bytes) -> None:
    files = CrashableFiles()
    files.put("/c/t.json", broken)
    files.put("/c/t.json.bak", b'{"a": 1}')
    assert load_text(files, "/c/t.json", json.loads) == {"a": 1}


def test_table_without_any_good_edition_is_damage_that_names_both() -> None:
    files = CrashableFiles()
    files.put("/c/t.json", b"{")
    files.put("/c/t.json.bak", b"]")
    with pytest.raises(StoreDamagedError, match=r"/c/t.json: .*/c/t.json.bak: .*copy"):
        load_text(files, "/c/t.json", json.loads)


def test_table_survives_every_crash_as_the_old_or_the_new_edition() -> None:
    seen = set()
    for seed in range(200):
        files = CrashableFiles()
        replace_text(files, "/c/t.json", '{"a": 1}')
        safe = len(files.operations)
        files.fail_next(random.Random(seed).choice(["write", "sync", "rename", "sync_directory"]))
        try:
            replace_text(files, "/c/t.json", '{"a": 2}')
        except OSError:
            pass
        else:
            pytest.fail("the injected error did not strike")
        assert len(files.operations) > safe
        after = files.crash(random.Random(seed))
        seen.add(load_text(after, "/c/t.json", json.loads)["a"])
    assert seen == {1, 2}


def test_replaced_table_is_durable_on_return() -> None:
    for seed in range(50):
        files = CrashableFiles()
        replace_text(files, "/c/t.json", '{"a": 1}')
        replace_text(files, "/c/t.json", '{"a": 2}')
        after = files.crash(random.Random(seed))
        assert load_text(after, "/c/t.json", json.loads) == {"a": 2}


# --- the crashable twin's own promises


def crashes(files: CrashableFiles, look: Callable[[CrashableFiles], Any]) -> set[Any]:
    return {look(files.crash(random.Random(seed))) for seed in range(60)}


def test_crash_keeps_what_was_synced_and_may_lose_what_was_not() -> None:
    files = CrashableFiles()
    files.put("/d/a", bytes(1600))
    file = files.open("/d/a")
    file.pwrite(b"1" * 10, 0)
    file.sync()
    file.pwrite(b"2" * 10, 20)
    found = crashes(files, lambda after: after.content("/d/a")[:40])
    assert {data[:10] for data in found} == {b"1" * 10}
    assert {bytes(10), b"2" * 10} < {data[20:30] for data in found}
    assert any(data[20:30] not in (bytes(10), b"2" * 10) for data in found), "some are torn"


def test_crash_may_lose_an_earlier_write_and_keep_a_later_one() -> None:
    files = CrashableFiles()
    files.put("/d/a", bytes(10))
    file = files.open("/d/a")
    file.pwrite(b"1", 0)
    file.pwrite(b"2", 5)
    assert b"\0\0\0\0\0002\0\0\0\0" in crashes(files, lambda after: after.content("/d/a"))


def test_crash_may_lose_a_name_whose_directory_was_not_synced() -> None:
    files = CrashableFiles()
    files.make_directory("/d")
    file = files.open("/d/a", create=True)
    file.pwrite(b"x", 0)
    file.sync()
    assert crashes(files, lambda after: after.exists("/d/a")) == {True, False}
    files.sync_directory("/d")
    assert crashes(files, lambda after: after.content("/d/a")) == {b"x"}


def test_kill_keeps_everything_written_but_not_synced_yet() -> None:
    files = CrashableFiles()
    files.make_directory("/d")
    files.lock("/d/lock")
    files.open("/d/a", create=True).pwrite(b"x", 0)
    after = files.kill()
    assert after.content("/d/a") == b"x"
    after.lock("/d/lock")
    assert crashes(after, lambda again: again.exists("/d/a")) == {True, False}


def test_full_disk_takes_a_part_and_has_room_again_when_a_file_goes() -> None:
    files = CrashableFiles()
    files.make_directory("/d")
    files.free_bytes = 8192
    file = files.open("/d/a", create=True)
    with pytest.raises(OSError, match="No space left"):
        file.pwrite(b"x" * 10_000, 0)
    assert file.size() == 8192
    file.pwrite(b"y", 100)  # what is there already may be overwritten
    files.remove("/d/a")
    files.open("/d/b", create=True).pwrite(b"x" * 8192, 0)


def test_injected_error_strikes_once_where_it_was_asked_for() -> None:
    files = CrashableFiles()
    files.make_directory("/d")
    files.fail_next("write", errno.EIO, path_part="b", written=2)
    files.open("/d/a", create=True).pwrite(b"abc", 0)
    with pytest.raises(OSError, match="Input/output"):
        files.open("/d/b", create=True).pwrite(b"abc", 0)
    assert files.content("/d/b") == b"ab"
    files.open("/d/b").pwrite(b"abc", 0)
    assert files.content("/d/b") == b"abc"
    with pytest.raises(OSError, match="no descriptor"):
        files.open("/d/b").fileno()
