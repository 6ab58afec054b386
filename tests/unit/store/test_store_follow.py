"""A store whose log a master writes: bytes in any pieces, queues up to what is confirmed."""

import random
from typing import Any

import pytest

from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.store.follow import Following
from sluicemq.store.store import Store

TOPICS = ["T", "A", "B"]


def fill(bench: Any, count: int, seed: int = 1) -> None:
    """Messages of several queues, of all sizes, with keys, over several files."""
    rng = random.Random(seed)
    for number in range(count):
        body = rng.randbytes(rng.randrange(300))
        keys = {"KEYS": f"k{number}"} if rng.random() < 0.5 else {}
        bench.append(body, topic=rng.choice(TOPICS), queue_id=rng.randrange(3), properties=keys)
        if rng.random() < 0.5:
            bench.clock.ms += rng.randrange(100)
            assert bench.store is not None
            bench.store.commit()
    assert bench.store is not None
    bench.store.commit()


def follower(bench: Any, **changes: Any) -> tuple[Any, Following]:
    slave = type(bench)()
    return slave, slave.open(**changes).following()


def feed(master: Store, following: Following, end: int | None = None, step: int = 700) -> None:
    """What a link does: the log's bytes in pieces, each within one file."""
    end = master.written_offset if end is None else end
    while following.end < end:
        data = master.raw(following.end, min(step, end - following.end))
        following.append(following.end, data)


def content(bench: Any, part: str) -> dict[str, bytes]:
    """The files below a directory of the store, by their paths."""

    def below(path: str) -> list[str]:
        names = bench.files.names(path)
        return [path] if not names else [found for n in names for found in below(f"{path}/{n}")]

    return {path: bench.files.content(path) for path in below(f"/store/{part}")}


@pytest.mark.parametrize("step", [1, 100, 700, 100_000])
def test_a_follower_builds_what_the_master_wrote(bench: Any, step: int) -> None:
    master = bench.open()
    fill(bench, 200)
    slave, following = follower(bench)
    slave.clock = bench.clock
    rng = random.Random(step)
    while following.end < master.written_offset:
        feed(master, following, min(following.end + step, master.written_offset), step)
        if rng.random() < 0.3 or step > 100:
            following.dispatch(following.end - rng.randrange(50))
    following.dispatch(None)
    assert slave.store is not None
    for topic in TOPICS:
        for queue_id in range(3):
            assert slave.bodies(topic, queue_id) == bench.bodies(topic, queue_id)
    master.close()
    slave.store.close()
    assert content(slave, "commitlog") == content(bench, "commitlog")
    assert content(slave, "consumequeue") == content(bench, "consumequeue")


def test_nothing_is_visible_before_it_is_dispatched(bench: Any) -> None:
    master = bench.open()
    (first, _), (second, _) = bench.send(b"1", b"2")
    slave, following = follower(bench)
    feed(master, following)
    assert slave.store is not None
    assert slave.store.queue_offsets("T", 0) == (0, 0)
    following.dispatch(second + 5)
    assert slave.bodies() == [b"1"]
    assert slave.store.reader.record_at(second) is None
    following.dispatch(None)
    assert slave.bodies() == [b"1", b"2"]
    assert slave.store.reader.record_at(first) is not None


def test_nobody_else_writes_a_followed_log(bench: Any) -> None:
    store = bench.open()
    store.following()
    with pytest.raises(StoreError, match="slave"):
        bench.send(b"x")


def test_bytes_of_another_place_are_refused(bench: Any) -> None:
    master = bench.open()
    bench.send(b"1")
    _, following = follower(bench)
    feed(master, following)
    for position in (0, 5, 4096):
        with pytest.raises(StoreError, match="ends at"):
            following.append(position, b"x")


def test_bytes_that_are_no_record_are_said(bench: Any) -> None:
    bench.open()
    _, following = follower(bench)
    following.append(0, b"\1" * 300)
    with pytest.raises(StoreDamagedError, match="no record"):
        following.dispatch(None)
