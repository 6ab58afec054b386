"""Errors of the disk: what passes is tried again, what is final says so, and each what is known."""

import errno
from typing import Any

import pytest

from sluicemq.errors import StoreError, StoreFullError, StoreTransientError, StoreUncertainError
from sluicemq.files import TRANSIENT_ERRORS

PASSING = sorted(TRANSIENT_ERRORS)


def names(numbers: Any) -> list[str]:
    return [errno.errorcode[number] for number in numbers]


@pytest.mark.parametrize("number", PASSING, ids=names(PASSING))
@pytest.mark.parametrize("kind", ["open", "write", "create"])
def test_a_passing_error_of_a_write_refuses_that_turn_alone(
    bench: Any, number: int, kind: str
) -> None:
    bench.open()
    bench.send(b"0")
    bench.store.sync()
    bench.store._log.segments.last.release()  # as after a start
    size = 3950 if kind == "create" else 10
    bench.append(b"x" * size)
    bench.files.fail_next(kind, number, path_part="commitlog")
    with pytest.raises(StoreError, match="commitlog"):
        bench.store.commit()
    bench.send(b"1")
    bench.store.sync()
    assert bench.bodies() == [b"0", b"1"]
    bench.reopen(kill=True)
    assert bench.bodies() == [b"0", b"1"]


@pytest.mark.parametrize("number", PASSING, ids=names(PASSING))
def test_a_passing_error_of_a_sync_is_tried_again(bench: Any, number: int) -> None:
    bench.open()
    bench.send(b"0")
    bench.store._log.segments.last.release()
    bench.files.fail_next("open", number, path_part="commitlog")
    with pytest.raises(StoreTransientError):
        bench.store.sync()
    assert bench.store.sync() == bench.store.written_offset
    bench.send(b"1")
    assert bench.bodies() == [b"0", b"1"]


@pytest.mark.parametrize("place", ["consumequeue", "checkpoint"])
def test_a_passing_error_of_a_checkpoint_makes_it_later(bench: Any, place: str) -> None:
    store = bench.open()
    bench.send(b"0")
    bench.clock.ms += 20_000
    store.tick()
    bench.files.fail_next("open", errno.EMFILE, path_part=place)
    with pytest.raises(StoreTransientError):
        store.sync()
    bench.send(b"1")
    store.sync()
    assert store._checkpoints.file.written is not None
    bench.reopen(kill=True)
    assert bench.bodies() == [b"0", b"1"]


def test_a_passing_error_of_deleting_a_topic_is_no_end_of_writing(bench: Any) -> None:
    store = bench.open()
    bench.send(b"0")
    bench.files.fail_next("open", errno.EMFILE, path_part="deletedTopics")
    with pytest.raises(StoreError):
        store.delete_topic("T")
    bench.send(b"1")
    assert bench.bodies() == [b"0", b"1"]
    store.delete_topic("T")
    assert not store.queue_exists("T", 0)


def test_what_cannot_be_wiped_at_once_is_wiped_before_the_next_write(bench: Any) -> None:
    bench.open()
    bench.send(b"0")
    bench.append(b"x" * 50)
    bench.files.fail_next("write", errno.EIO, path_part="commitlog", written=40)
    bench.files.fail_next("write", errno.ENOMEM, path_part="commitlog")
    with pytest.raises(StoreUncertainError, match=r"may reappear"):
        bench.store.commit()
    bench.send(b"1")
    bench.reopen(kill=True)
    assert bench.bodies() == [b"0", b"1"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_write_that_cannot_be_wiped_says_that_it_may_come_back(bench: Any, number: int) -> None:
    bench.open()
    bench.send(b"0")
    bench.append(b"x")
    bench.files.fail_next("write", number, path_part="commitlog", written=1000)
    bench.files.fail_next("write", number, path_part="commitlog")
    with pytest.raises(StoreUncertainError, match=r"may reappear"):
        bench.store.commit()
    with pytest.raises(StoreError, match="refuses writes"):
        bench.send(b"1")


def test_a_write_that_is_wiped_never_was(bench: Any) -> None:
    bench.open()
    bench.append(b"x")
    bench.files.fail_next("write", errno.EIO, path_part="commitlog", written=1000)
    with pytest.raises(StoreError, match="failed") as raised:
        bench.store.commit()
    assert not isinstance(raised.value, StoreUncertainError)
    bench.reopen(kill=True)
    assert bench.store.written_offset == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_until_there_is_room(bench: Any, number: int) -> None:
    bench.open()
    bench.append(b"x")
    bench.files.fail_next("write", number, path_part="commitlog", written=20)
    with pytest.raises(StoreFullError):
        bench.store.commit()
    bench.send(b"1")
    assert bench.bodies() == [b"1"]
