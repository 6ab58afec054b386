"""Incarnation: when a store is in another life of its disk."""

import contextlib

from sluicemq.files.incarnation import Incarnation, read_incarnation
from sluicemq.testing.files import CrashableFiles, PowerLost


def incarnation(files: CrashableFiles, boot: str, **values: bool) -> str:
    return Incarnation(files, "/s", boot=boot).open(
        is_empty=values.get("is_empty", False), is_synced=values.get("is_synced", False)
    )


def test_a_killed_process_is_the_same_replica() -> None:
    files = CrashableFiles()
    first = incarnation(files, "a")
    assert incarnation(files, "a") == first


def test_a_machine_that_went_down_is_another_unless_all_was_synced() -> None:
    files = CrashableFiles()
    first = incarnation(files, "a", is_synced=True)
    assert incarnation(files, "b", is_synced=False) == first
    second = incarnation(files, "c", is_synced=True)
    assert second != first
    assert incarnation(files, "d") == second


def test_a_stop_in_order_is_as_good_as_a_sync() -> None:
    files = CrashableFiles()
    stopped = Incarnation(files, "/s", boot="a")
    first = stopped.open(is_empty=False, is_synced=False)
    stopped.note_shutdown()
    assert incarnation(files, "b") == first


def test_a_wiped_log_is_another_replica() -> None:
    files = CrashableFiles()
    one = Incarnation(files, "/s", boot="a")
    first = one.open(is_empty=True, is_synced=True)
    assert incarnation(files, "a", is_empty=True) == first
    one.note_log()
    assert incarnation(files, "a", is_empty=True) != first


def test_a_file_that_cannot_be_read_is_none() -> None:
    files = CrashableFiles()
    first = incarnation(files, "a")
    for text in (b"[]", b"{", b"{}", b'{"incarnation":1,"boot":"a"}'):
        file = files.open("/s/replica.json", create=True)
        file.truncate(0)
        file.pwrite(text, 0)
        file.close()
        assert incarnation(files, "a") != first


def test_the_text_lasts_over_the_roles_of_one_process() -> None:
    files = CrashableFiles()
    one = Incarnation(files, "/s", boot="a")
    first = one.open(is_empty=True, is_synced=False)
    one.note_log()
    one.note_shutdown()
    assert one.open(is_empty=True, is_synced=False) == first, "a slave may begin its log anew"
    assert read_incarnation(files, "/s") == first


def test_nothing_is_written_when_nothing_changes() -> None:
    files = CrashableFiles()
    incarnation(files, "a")
    before = len(files.operations)
    incarnation(files, "a")
    assert len(files.operations) == before


def test_a_crash_while_the_file_is_written_leaves_the_old_one() -> None:
    files = CrashableFiles()
    first = incarnation(files, "a")
    for changes in range(6):
        torn = files.kill()
        torn.power_fails_after = changes
        stopped = Incarnation(torn, "/s", boot="a")
        with contextlib.suppress(PowerLost):
            stopped.open(is_empty=False, is_synced=True)
        assert incarnation(torn.kill(), "a") == first
