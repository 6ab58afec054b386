"""A store whose log a master writes: bytes in any pieces, queues up to what is confirmed."""

import random
from typing import Any

import pytest

from sluicemq.errors import StoreDamagedError, StoreError, StoreFullError
from sluicemq.store.follow import LogFollower
from sluicemq.store.queues import expired_units
from sluicemq.store.store import Store
from sluicemq.testing.files import PowerLost

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


def follower(bench: Any, **changes: Any) -> tuple[Any, LogFollower]:
    slave = type(bench)()
    return slave, slave.open(**changes).start_following()


def feed(master: Store, following: LogFollower, end: int | None = None, step: int = 700) -> None:
    """What a link does: the log's bytes in pieces, each within one file."""
    end = master.written_offset if end is None else end
    while following.end < end:
        data = master.view_log(following.end, min(step, end - following.end))
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
    store.start_following()
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
    with pytest.raises(StoreDamagedError, match="not a valid record"):
        following.dispatch(None)


# --- where it begins, and begins anew


def test_an_empty_store_begins_at_any_file(bench: Any) -> None:
    master = bench.open()
    fill(bench, 200)
    start = master.written_offset // 4096 * 4096
    slave, following = follower(bench)
    assert following.is_empty
    with pytest.raises(StoreError, match="ends at 0"):
        following.append(start + 5, b"x")
    following.append(start, master.read_log(start, 300))
    assert (slave.store.log_start, following.end, following.is_empty) == (
        start,
        start + 300,
        False,
    )
    feed(master, following)
    following.dispatch(None)
    for topic in TOPICS:
        for queue_id in range(3):
            mine, theirs = slave.messages(topic, queue_id), bench.messages(topic, queue_id)
            assert mine == [m for m in theirs if m.physical_offset >= start]
    for kill in (False, True):
        store = slave.reopen(kill=kill)
        assert (store.log_start, store.written_offset) == (start, master.written_offset)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, 6, 8, 12, 20])
def test_power_may_fail_while_a_store_begins_somewhere(bench: Any, after: int) -> None:
    bench.open()
    fill(bench, 100)
    slave, following = follower(bench)
    feed(bench.store, following, 500)
    slave.store.close()
    following = slave.open().start_following()
    slave.files.power_fails_after = after
    try:
        following.truncate(0)
        following.append(8192, bench.store.view_log(8192, 100))
        slave.store.sync()
    except PowerLost:
        pass
    for seed in range(20):
        other = type(bench)()
        other.files = slave.files.crash(random.Random(seed))
        store = other.open()
        following = store.start_following()
        assert following.end in (0, 8192) or (store.log_start == 0 and following.end <= 500)
        following.truncate(0)
        feed(bench.store, following)
        following.dispatch(None)
        assert other.bodies() == bench.bodies()


def test_a_truncated_store_is_empty_and_begins_again(bench: Any) -> None:
    master = bench.open()
    fill(bench, 200)
    slave, following = follower(bench)
    feed(master, following)
    following.dispatch(None)
    following.truncate(0)
    assert (following.end, following.is_empty, slave.store.queues()) == (0, True, [])
    following.append(4096, master.read_log(4096, 4096))
    following.truncate(4096)
    assert following.is_empty
    following.append(8192, master.read_log(8192, 4096))
    following.dispatch(None)
    store = slave.reopen(kill=True)
    assert (store.log_start, store.written_offset) == (8192, 12288)


def test_truncation_reaches_into_every_derived_file(bench: Any) -> None:
    """Queues of several files, an index of several files, columns in memory."""
    config = {"index_slots": 7, "index_entries": 20}
    master = bench.open(**config)
    fill(bench, 60)
    place = master.written_offset
    fill(bench, 140, seed=2)
    slave, following = follower(bench, **config)
    feed(master, following)
    following.dispatch(None)
    store = slave.store
    store.keys.catch_up(1 << 30)
    store.tick()
    store.sync()
    cut = {key: store.queue_offsets(*key)[1] for key in store.queues()}
    following.truncate(place)
    assert following.end == store.reader.visible_end == place
    for key, end in cut.items():
        _, high = store.queue_offsets(*key)
        assert high < end
        for message in slave.messages(*key):
            assert message.physical_offset < place
    for number in range(140):
        found = [store.keys.find(topic, f"k{number}", 9, 0, 1 << 60).records for topic in TOPICS]
        for record in (record for records in found for record in records):
            assert int.from_bytes(record[28:36]) < place
    feed(master, following)
    following.dispatch(None)
    master.close()
    slave.store.close()
    assert content(slave, "consumequeue") == content(bench, "consumequeue")


def test_truncation_within_a_record_waits_for_its_rest(bench: Any) -> None:
    master = bench.open()
    (_, _), (second, _) = bench.send(b"1", b"2" * 100)
    slave, following = follower(bench)
    feed(master, following)
    following.dispatch(None)
    following.truncate(second + 50)
    assert (slave.bodies(), following.end) == ([b"1"], second + 50)
    feed(master, following)
    following.dispatch(None)
    assert slave.bodies() == bench.bodies()


def test_a_stop_in_the_middle_of_a_record_drops_its_beginning(bench: Any) -> None:
    master = bench.open()
    (_, _), (second, _) = bench.send(b"1", b"2" * 100)
    slave, following = follower(bench)
    feed(master, following, second + 50)
    following.dispatch(0)
    slave.store.close()
    assert not any(slave.files.content("/store/commitlog/" + "0" * 20)[second:])
    following = slave.open(confirmed=0).start_following()
    assert (following.end, slave.bodies()) == (second, [])
    following.dispatch(None)
    assert slave.bodies() == [b"1"]


def test_retention_works_under_a_follower(bench: Any) -> None:
    master = bench.open()
    fill(bench, 200)
    slave, following = follower(bench, file_reserved_hours=1, delete_hours=("0",))
    slave.files.clock = slave.clock
    feed(master, following)
    following.dispatch(None)
    slave.clock.ms += 20_000
    slave.store.tick()
    slave.store.sync()
    slave.clock.ms += 100 * 3_600_000
    slave.store.retention.request_manual_run()
    for step in slave.store.retention.clean():
        if callable(step):
            step()
    start = slave.store.log_start
    assert start > 0
    end = following.end
    bench.send(b"more")
    feed(master, following)
    following.dispatch(None)
    following.truncate(end)
    assert (slave.store.log_start, following.end) == (start, end)
    store = slave.reopen(kill=True)
    assert (store.log_start, store.written_offset) == (start, end)


def test_a_full_disk_refuses_bytes_and_takes_them_later(bench: Any) -> None:
    master = bench.open()
    fill(bench, 100)
    slave, following = follower(bench)
    slave.files.free_bytes = 8192
    with pytest.raises(StoreFullError):
        feed(master, following)
    end = following.end
    assert end < master.written_offset
    slave.files.free_bytes = None
    feed(master, following)
    following.dispatch(None)
    assert slave.bodies() == bench.bodies()


@pytest.mark.parametrize("kill", [False, True])
def test_a_queue_whose_messages_have_expired_goes_on_at_a_slave(bench: Any, kill: bool) -> None:
    """No offset is given twice: the log says nothing of such a queue, its last unit does."""
    bench.expire("Old")
    master = bench.open()
    units = expired_units(bench.files, "/store/consumequeue", 400, master.log_start)
    assert [unit[:3] for unit in units] == [("Old", 0, 9)]
    slave, following = follower(bench)
    following.append(master.log_start, master.read_log(master.log_start, 100))
    for unit in units:
        slave.store.begin_queue(*unit)
        slave.store.begin_queue(*unit)
    feed(master, following)
    following.dispatch(None)
    slave.clock.ms += 20_000
    slave.store.tick()
    slave.store.sync()
    for store in (slave.store, slave.reopen(kill=kill)):
        assert store.queue_offsets("Old", 0) == (10, 10)
        assert slave.bodies() == bench.bodies()


# --- the gate, and what a start hides


def test_behind_a_gate_nothing_is_visible_before_it_is_confirmed(bench: Any) -> None:
    store = bench.open(is_gated=True)
    woken: list[Any] = []
    store.on_visible = woken.append
    bench.send(b"1")
    first = store.written_offset
    bench.send(b"2")
    assert (bench.bodies(), woken) == ([], [])
    store.confirm(first)
    assert (bench.bodies(), woken) == ([b"1"], [[("T", 0, 1)]])
    store.confirm(store.written_offset)
    assert bench.bodies() == [b"1", b"2"]


@pytest.mark.parametrize("kill", [False, True])
def test_a_start_hides_what_was_not_confirmed(bench: Any, kill: bool) -> None:
    bench.open()
    places = [bench.send(body)[0][0] for body in (b"1", b"2", b"3")]
    bench.send(b"other", topic="A")
    end = bench.store.written_offset
    store = bench.reopen(kill=kill, is_gated=True, confirmed=places[2])
    assert (bench.bodies(), bench.bodies("A")) == ([b"1", b"2"], [])
    assert store.reader.record_at(places[2]) is None
    bench.send(b"4")
    store.confirm(places[2] + 7)
    assert bench.bodies() == [b"1", b"2"]
    woken: list[Any] = []
    store.on_visible = woken.append
    store.confirm(end)
    assert (bench.bodies(), bench.bodies("A")) == ([b"1", b"2", b"3"], [b"other"])
    assert [sorted(queues) for queues in woken] == [[("A", 0, 1), ("T", 0, 3)]]
    store.confirm(store.written_offset)
    assert bench.bodies() == [b"1", b"2", b"3", b"4"]


def test_raw_gives_what_is_written_within_one_file(bench: Any) -> None:
    store = bench.open(is_gated=True)
    fill(bench, 100)
    end = store.written_offset
    assert len(store.view_log(4000, 1000)) == 96
    assert bytes(store.view_log(end - 5, 1000)) == bytes(store._log.record_view(end - 5, 5) or b"")
    assert len(store.view_log(end, 10)) == 0
    assert store.read_log(4000, 1000) == bytes(store.view_log(4000, 1000))
    assert store.read_log(end, 10) == b""
    for position in (-1, end + 1, 1 << 40):
        with pytest.raises(StoreError, match="contains the positions"):
            store.read_log(position, 10)


# --- what is derived


@pytest.mark.parametrize("step", [700, 100_000])
def test_a_followers_index_is_the_masters(bench: Any, step: int) -> None:
    """Byte for byte: entries, slots and headers of several files. Only their names are times."""
    config = {"index_slots": 7, "index_entries": 40, "commit_log_file_bytes": 65_536}
    master = bench.open(**config)
    fill(bench, 300)
    slave, following = follower(bench, **config)
    slave.clock = bench.clock
    while following.end < master.written_offset:
        feed(master, following, min(following.end + 3 * step, master.written_offset), step)
        following.dispatch(None)
        slave.store.keys.catch_up()
    for one in (bench, slave):
        one.store.close()
    mine, theirs = (list(content(one, "index").values()) for one in (slave, bench))
    assert len(mine) > 3
    assert mine == theirs
