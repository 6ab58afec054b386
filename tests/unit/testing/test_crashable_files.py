"""What a power loss may do to `CrashableFiles`, and what it may not."""

import errno
import random
from collections.abc import Callable

import pytest

from sluicemq.files import replace_text
from sluicemq.testing.files import CrashableFiles, PowerLost


def outcomes(files: CrashableFiles, look: Callable[[CrashableFiles], object]) -> set[object]:
    return {look(files.crash(random.Random(seed))) for seed in range(300)}


def one_file(content: bytes = b"old" * 500) -> CrashableFiles:
    files = CrashableFiles()
    files.put("/d/f", content)
    return files


def test_unsynced_write_is_kept_dropped_torn_inside_a_page_or_scattered() -> None:
    files = one_file(b"o" * 1500)
    files.open("/d/f").pwrite(b"n" * 1500, 0)
    found = {bytes(content) for content in outcomes(files, lambda f: f.content("/d/f"))}  # type: ignore[call-overload]
    assert {b"n" * 1500, b"o" * 1500} <= found
    assert any(content.count(b"n") % 512 for content in found), "torn at any byte"
    assert any(content[:512] == b"o" * 512 and b"n" in content for content in found), "scattered"


def test_later_write_may_survive_an_earlier_one() -> None:
    files = one_file(b"--")
    file = files.open("/d/f")
    file.pwrite(b"1", 0)
    file.pwrite(b"2", 1)
    assert outcomes(files, lambda f: f.content("/d/f")) == {b"--", b"1-", b"-2", b"12"}


def test_synced_write_always_survives_and_the_name_only_with_its_directory() -> None:
    files = CrashableFiles()
    files.make_directory("/d")
    file = files.open("/d/f", create=True)
    file.pwrite(b"x", 0)
    file.sync()
    assert outcomes(files, lambda f: f.exists("/d/f")) == {True, False}
    files.sync_directory("/d")
    assert outcomes(files, lambda f: f.content("/d/f")) == {b"x"}


def test_names_change_out_of_order_unless_they_touch_the_same_name() -> None:
    files = CrashableFiles()
    for name in ("a", "b"):
        files.put(f"/d/{name}", name.encode())
    files.remove("/d/a")
    files.remove("/d/b")
    assert outcomes(files, lambda f: tuple(f.names("/d"))) == {
        (), ("a",), ("b",), ("a", "b"),
    }  # fmt: skip
    files = CrashableFiles()
    files.put("/d/a", b"")
    files.rename("/d/a", "/d/b")
    files.rename("/d/b", "/d/c")
    assert outcomes(files, lambda f: tuple(f.names("/d"))) == {("a",), ("b",), ("c",)}


def test_directory_that_was_removed_and_made_again_holds_nothing_of_before() -> None:
    files = CrashableFiles()
    files.put("/r/d/old", b"x")
    files.remove("/r/d/old")
    files.remove("/r/d")
    files.make_directory("/r/d")
    assert outcomes(files, lambda f: tuple(f.names("/r/d"))) == {()}


def test_removal_of_a_directory_that_is_undone_brings_back_what_was_in_it() -> None:
    files = CrashableFiles()
    files.put("/r/d/old", b"x")
    files.remove("/r/d/old")
    files.remove("/r/d")
    assert outcomes(files, lambda f: (f.exists("/r/d"), *f.names("/r/d"))) == {
        (False,), (True,), (True, "old"),
    }  # fmt: skip


def test_replaced_table_is_there_in_its_new_or_its_old_edition() -> None:
    files = CrashableFiles()
    replace_text(files, "/c/t.json", "old")
    for after in range(7):
        now = files.kill()
        now.power_fails_after = after
        with pytest.raises(PowerLost):
            replace_text(now, "/c/t.json", "new")
        for seed in range(40):
            crashed = now.crash(random.Random(seed))
            path = "/c/t.json" if crashed.exists("/c/t.json") else "/c/t.json.bak"
            assert crashed.content(path) in (b"old", b"new")


def test_failed_sync_has_lost_its_writes_whatever_a_later_one_says() -> None:
    files = one_file(b"old")
    file = files.open("/d/f")
    file.pwrite(b"new", 0)
    files.fail_next("sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    assert files.content("/d/f") == b"new", "the process reads it still"
    file.sync()
    assert outcomes(files, lambda f: f.content("/d/f")) == {b"old"}
    assert files.kill().content("/d/f") == b"old"


def test_power_fails_after_so_many_changes_and_stays_off() -> None:
    files = one_file(b"--")
    file = files.open("/d/f")
    files.power_fails_after = 1
    file.pwrite(b"1", 0)
    with pytest.raises(PowerLost):
        file.pwrite(b"2", 1)
    for change in (file.sync, lambda: files.remove("/d/f"), lambda: file.truncate(9)):
        with pytest.raises(PowerLost):
            change()
    assert outcomes(files, lambda f: f.content("/d/f")) == {b"--", b"1-", b"-2", b"12"}


def test_error_strikes_after_so_many_operations_and_lets_a_part_arrive() -> None:
    files = one_file(b"-----")
    file = files.open("/d/f")
    files.fail_next("write", errno.ENOSPC, after=1, written=2)
    file.pwrite(b"a", 0)
    with pytest.raises(OSError, match="No space"):
        file.pwrite(b"bbbb", 1)
    assert files.content("/d/f") == b"abb--"


def test_rotten_bit_is_there_for_every_reader_and_for_good() -> None:
    files = one_file(bytes(100))
    view = files.open("/d/f").read_view()  # type: ignore[attr-defined]
    at = files.rot("/d/f", random.Random(1), 10, 20)
    assert 10 <= at < 20
    assert view[at].bit_count() == 1
    assert outcomes(files, lambda f: f.content("/d/f")) == {bytes(view)}
    with pytest.raises(IsADirectoryError):
        files.rot("/d", random.Random(1))
