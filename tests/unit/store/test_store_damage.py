"""Damage that a start or a reader notices: told from a power loss, mended, or refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from sluicemq import engine
from sluicemq.errors import StoreDamagedError
from sluicemq.model.ids import tag_code
from sluicemq.store import gather as sound
from sluicemq.store.log import PLACEHOLDER_CODE, parse_log_record

LOG = "/store/commitlog/" + "0" * 20


def flip(bench: Any, path: str, at: int) -> None:
    data = bytearray(bench.files.content(path))
    data[at] ^= 4
    bench.files.put(path, bytes(data))


def test_a_flipped_bit_behind_the_mark_is_damage_when_good_records_follow(bench: Any) -> None:
    bench.open()
    places = bench.send(*[b"%d" % n * 50 for n in range(5)], tag="t")
    for position, _ in places[:-1]:
        for at in (0, 4, 20, 28, 60, 95):  # size, magic, offset, position, time, body
            files, bench.files = bench.files, bench.files.kill()
            flip(bench, LOG, position + at)
            if parse_log_record(memoryview(bench.files.content(LOG)), position, 0, check_crc=True):
                bench.files = files
                continue  # no checksum covers that place
            with pytest.raises(StoreDamagedError, match=r"damaged at \d+ .*sluice store repair"):
                bench.open()
            bench.files = files
    bench.files = bench.files.kill()
    flip(bench, LOG, places[-1][0] + 95)  # the last one may be a torn write
    bench.open()
    assert len(bench.bodies()) == 4


@pytest.mark.parametrize("at", [0, 512, 1024])
def test_a_sector_that_a_power_loss_took_is_cut_off_and_told(
    bench: Any, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench.open()
    bench.send(*[b"%d" % n * 300 for n in range(6)], tag="t")
    bench.files = bench.files.kill()
    data = bytearray(bench.files.content(LOG))
    data[at : at + 512] = bytes(512)
    bench.files.put(LOG, bytes(data))
    bench.open()
    assert len(bench.bodies()) == at // 512
    assert "a power loss has destroyed what was written there" in caplog.text


def test_first_file_of_the_log_that_is_missing_is_told_from_one_that_retention_removed(
    bench: Any,
) -> None:
    store = bench.open()
    bench.send(*[b"x" * 1000] * 12)
    store.close()
    store = bench.open()
    bench.send(b"x")
    bench.clock.ms += 20_000
    store.tick()
    store.sync()
    store._checkpoints.file.set_log_start(4096)
    store.close()
    bench.files.remove(LOG)
    bench.open()  # as retention does it
    bench.store.close()
    bench.files.remove(f"/store/commitlog/{4096:020d}")
    with pytest.raises(
        StoreDamagedError, match=r"retention has not deleted .*store repair /store --write"
    ):
        bench.open()


@pytest.mark.parametrize("kill", [True, False])
def test_queue_without_its_first_file_is_built_anew(bench: Any, kill: bool) -> None:
    bench.open()
    bodies = [b"%d" % n for n in range(50)]
    bench.send(*bodies)
    bench.store.close()
    bench.files.remove("/store/consumequeue/T/0/" + "0" * 20)
    if kill:
        bench.files.put("/store/abort", b"1")
    assert bench.open().recovered.is_rebuilt
    assert bench.bodies() == bodies


def test_wrong_unit_is_mended_from_the_log_for_good(bench: Any, caplog: Any) -> None:
    bench.open()
    bodies = [b"%d" % n for n in range(15)]
    bench.send(*bodies, tag="t")
    path = "/store/consumequeue/T/0/" + "0" * 20
    bench.store.close()
    before = bench.files.content(path)
    for unit in (0, 7, 13):
        for at in (6, 11):  # position, size
            flip(bench, path, 20 * unit + at)
    bench.files.put("/store/abort", b"1")  # else the last unit is looked at, and all built anew
    bench.open()
    assert bench.bodies() == bodies
    assert bench.files.content(path) == before
    assert "the unit of message 7 was damaged, and has been rebuilt from the log" in caplog.text


def test_queue_with_the_units_of_another_one_is_refused_and_built_anew_by_the_next_start(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sound, "UNIT_SEARCH_BYTES_MAX", 4096)  # as in a store of gigabytes
    bench.open()
    for queue_id in (0, 1):
        bench.send(*[b"%d-%d" % (queue_id, n) for n in range(200)], queue_id=queue_id)
    bench.store.close()
    for base in range(400, 3600, 400):  # of 20 units each: the ends could be mended one by one
        first, second = (f"/store/consumequeue/T/{queue_id}/{base:020d}" for queue_id in (0, 1))
        files = bench.files.content(second), bench.files.content(first)
        bench.files.put(first, files[0])
        bench.files.put(second, files[1])
    bench.open()
    with pytest.raises(StoreDamagedError, match=r"queue T/0 .*damaged at .*Restart the broker"):
        bench.bodies()
    bench.reopen()
    assert bench.store.recovered.is_rebuilt
    assert bench.bodies(queue_id=1) == [b"1-%d" % n for n in range(200)]


def test_what_is_common_and_whole_is_seen_at_once_and_nothing_else(bench: Any) -> None:
    store = bench.open()
    bench.send(b"body" * 9, b"other", tag="t")
    queue = store.reader._by_key["T", 0]
    units, log = bytes(queue.units(0, 2)), bench.files.content(LOG)
    position, size, _ = sound.UNIT.unpack_from(units, 20)
    looks = [sound.are_whole] + ([] if engine.pulls is None else [engine.pulls.are_whole])

    def verdict(
        data: bytes, units: bytes = units, at: int = 0, lost_code: int = PLACEHOLDER_CODE
    ) -> bool:
        segment = SimpleNamespace(base=0, data_view=lambda end: memoryview(data))
        found = {look(units, [at, at + 1], segment, queue, lost_code) for look in looks}
        assert len(found) == 1, "both engines say the same"
        return found.pop()

    assert verdict(log)
    assert not verdict(log, at=1)
    assert not verdict(log, lost_code=tag_code("t"))
    assert not verdict(log[: position + size - 1])
    for at in range(20, 32):
        changed = bytearray(units)
        changed[at] ^= 1
        assert not verdict(log, bytes(changed))
    for at in range(size):
        for byte in (log[position + at] ^ 4, 0, 255):
            data = bytearray(log)
            data[position + at] = byte
            is_seen = parse_log_record(memoryview(data), position, 0, check_crc=True) is not None
            assert is_seen or not verdict(bytes(data)), at
