"""With damaged timer files, a start delivers each waiting timed message exactly once.

Whichever of wheel, log, checkpoint or identity is damaged, the start logs in one line that it
rebuilds the files, and `store verify` reports the damage before.
"""

import dataclasses
import logging
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import pytest

from simulation.small_wheel import SLOTS, make_wheel_small
from simulation.stepped import SMALL, START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.timers.files import SLOT
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.verify import verify
from sluicemq.testing.files import CrashableFiles

pytestmark = pytest.mark.slow

WHEEL: Final = "/store/timerwheel"
LOG: Final = "/store/timerlog/00000000000000000000"
CHECK: Final = "/store/config/timercheck"
IDENTITY: Final = "/store/timerwheel.identity"
DELIVERED: Final = [500, 1500, 2400]
WAITING: Final = [9300, 9700, 10_000, 12_345, 20_000, 20_001, 45_000]
REBUILT: Final = "are rebuilt from the commit log"


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel_small(monkeypatch)


def send(broker: SteppedBroker, due_ms: int) -> Any:
    text = f"UNIQ_KEY\x01A{due_ms}\x02TIMER_DELIVER_MS\x01{START_MS + due_ms}\x02"
    return broker.connect().call(310, send_fields(properties=text), b"%d" % due_ms)


def bodies(broker: SteppedBroker) -> list[int]:
    result = broker.store.reader.read("T", 0, 0, 100_000, 1 << 26)
    return [int(message.body) for message in decode_records(b"".join(result.data))]


class Built(NamedTuple):
    """A store with delivered and waiting messages, and copies of its earlier timer files."""

    files: CrashableFiles
    older: dict[str, bytes]
    end_ms: int


def begin() -> SteppedBroker:
    broker = SteppedBroker()
    broker.core.topics.put(TopicConfig("T", 4, 4))
    broker.change(recall_enable=True)
    return broker


@cache
def built(is_killed: bool) -> Built:
    broker = begin()
    for due_ms in DELIVERED + WAITING[:3]:
        send(broker, due_ms)
    broker.run(2.0)
    broker.core.delayed.save()
    paths = (WHEEL, LOG, CHECK)
    older = {path: broker.files.content(path) for path in paths}
    for due_ms in WAITING[3:]:
        send(broker, due_ms)
    handle = send(broker, 10_300).fields["recallHandle"]
    fields = {"producerGroup": "P", "topic": "T", "recallHandle": handle}
    assert broker.connect().call(370, fields).code == 0
    broker.run(1.0)
    broker.core.delayed.save()
    assert bodies(broker) == DELIVERED
    if not is_killed:
        broker.close()
    return Built(broker.files.kill(), older, broker.clock.now_ms())


@cache
def elsewhere() -> dict[str, bytes]:
    """Return the timer files of another store with as many messages."""
    broker = begin()
    for due_ms in DELIVERED + WAITING + [11_000]:
        send(broker, due_ms + 3000)
    broker.run(1.0)
    broker.close()
    return {path: broker.files.content(path) for path in (WHEEL, LOG, CHECK, IDENTITY)}


Damage = Callable[[CrashableFiles, Built], None]


def put(contents: Callable[[CrashableFiles, Built], dict[str, bytes]], *paths: str) -> Damage:
    def do(files: CrashableFiles, store: Built) -> None:
        found = contents(files, store)
        for path in paths:
            files.put(path, found[path])

    return do


def zero(*paths: str) -> Damage:
    return put(lambda files, _: {path: bytes(len(files.content(path))) for path in paths}, *paths)


def older(*paths: str) -> Damage:
    return put(lambda _, store: store.older, *paths)


def foreign(*paths: str) -> Damage:
    return put(lambda *_: elsewhere(), *paths)


def missing(*paths: str) -> Damage:
    def do(files: CrashableFiles, _: Built) -> None:
        for path in paths:
            files.remove(path)

    return do


def cut(path: str, size: int) -> Damage:
    return lambda files, _: files.open(path).truncate(size)


def flip(path: str, at: int) -> Damage:
    def do(files: CrashableFiles, _: Built) -> None:
        file = files.open(path)
        file.pwrite(bytes([file.pread(1, at)[0] ^ 0x10]), at)

    return do


def slot_at(due_ms: int) -> int:
    """Return the position in the wheel file of the slot for START_MS + `due_ms`."""
    return (START_MS + due_ms - 1) // 1000 % SLOTS * SLOT.size


DAMAGE: Final = {
    "wheel zeroed": zero(WHEEL),
    "wheel older": older(WHEEL),
    "wheel flipped in a time": flip(WHEEL, slot_at(20_000) + 5),
    "wheel flipped in a last unit": flip(WHEEL, slot_at(9300) + 23),
    "wheel flipped in an empty slot": flip(WHEEL, slot_at(30_000) + 7),
    "wheel truncated": cut(WHEEL, 4096),
    "wheel missing": missing(WHEEL),
    "wheel of another store": foreign(WHEEL),
    "log zeroed": zero(LOG),
    "log older": older(LOG),
    "log flipped in a position": flip(LOG, 4 * 52 + 34),
    "log flipped in a time": flip(LOG, 5 * 52 + 27),
    "log flipped in a chain": flip(LOG, 4 * 52 + 11),
    "log flipped in a magic": flip(LOG, 6 * 52 + 14),
    "log truncated": cut(LOG, 300),
    "log missing": missing(LOG),
    "log of another store": foreign(LOG),
    "wheel and log zeroed": zero(WHEEL, LOG),
    "wheel and log older": older(WHEEL, LOG),
    "wheel and log missing": missing(WHEEL, LOG),
    "wheel and log of another store": foreign(WHEEL, LOG),
    "all of another store": foreign(WHEEL, LOG, IDENTITY),
    "all of another store, with its checkpoint": foreign(WHEEL, LOG, IDENTITY, CHECK),
    "checkpoint zeroed": zero(CHECK),
    "checkpoint older": older(CHECK),
    "all older but the identity": older(WHEEL, LOG, CHECK),
    "checkpoint flipped": flip(CHECK, 6),
    "checkpoint flipped in our part": flip(CHECK, 70),
    "checkpoint missing": missing(CHECK),
    "checkpoint of another store": foreign(CHECK),
    "identity missing": missing(IDENTITY),
    "identity torn": cut(IDENTITY, 30),
    "identity of another store": foreign(IDENTITY),
    "all missing": missing(WHEEL, LOG, CHECK, IDENTITY),
}
UNSEEN_AFTER_A_KILL: Final = {
    # No checksum holds then, and these say the same: a slot that nothing refers to; an older
    # checkpoint or an older state of the same incarnation, which a kill could have left as well.
    "wheel flipped in an empty slot",
    "checkpoint older",
    "all older but the identity",
}
"""After a kill nothing tells these from what a kill may leave."""
WITHOUT_CHECKS: Final = {"log flipped in a position"}
"""After a kill this is found when the second is loaded: chains and times are right."""


def damaged(name: str, *, is_killed: bool) -> CrashableFiles:
    files = built(is_killed).files.kill()
    if name:
        DAMAGE[name](files, built(is_killed))
    return files


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("name", ["", *DAMAGE])
def test_a_start_delivers_waiting_messages_exactly_once(
    name: str, is_killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = damaged(name, is_killed=is_killed)
    caplog.clear()
    broker = SteppedBroker(files=files, clock=ManualClock(built(is_killed).end_ms))
    broker.run(50.0, step_s=0.25)
    assert sorted(bodies(broker)) == sorted(DELIVERED + WAITING)
    lines = [text for text in caplog.messages if REBUILT in text]
    is_seen = name and not (is_killed and name in UNSEEN_AFTER_A_KILL)
    assert len(lines) == (1 if is_seen else 0), caplog.messages
    found = bodies(broker)
    broker.close()
    caplog.clear()
    again = SteppedBroker(files=broker.files.kill(), clock=ManualClock(broker.clock.now_ms()))
    again.run(2.0)
    assert not [text for text in caplog.messages if REBUILT in text], "built once"
    assert bodies(again) == found


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("name", ["", *DAMAGE])
def test_a_start_after_all_were_due_delivers_the_rest(name: str, is_killed: bool) -> None:
    files = damaged(name, is_killed=is_killed)
    broker = SteppedBroker(files=files, clock=ManualClock(START_MS + 3_600_000))
    broker.run(3.0)
    assert sorted(bodies(broker)) == sorted(DELIVERED + WAITING)


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("name", ["", *DAMAGE])
def test_verify_reports_the_damage(name: str, is_killed: bool) -> None:
    files = damaged(name, is_killed=is_killed)
    before = {path: files.content(path) for path in (WHEEL, LOG, CHECK) if files.exists(path)}
    findings = verify(StoreLayout.find("/store", files=files)).findings
    kinds = {finding.kind for finding in findings.listed if finding.kind.startswith("timer")}
    unseen = UNSEEN_AFTER_A_KILL | WITHOUT_CHECKS
    is_quiet = not name or name == "all missing" or (is_killed and name in unseen)
    if name == "log flipped in a position":
        assert kinds, "the message is in no chain"
    elif is_quiet:
        assert not kinds, findings.listed
    else:
        assert kinds, findings.listed
    assert {path: files.content(path) for path in before} == before, "verify changes nothing"


# --- stores without identities: RocketMQ's, and those of versions before


def as_before(files: CrashableFiles) -> None:
    """Make the store one of commit 9f893bdc, without an identity file."""
    files.remove(IDENTITY)
    fields = files.content(CHECK)[:56]
    time_ms, counter = struct.unpack_from(">2q", fields, 40)
    queue_offset, read_ms = (
        struct.unpack_from(">q", fields, 16)[0],
        struct.unpack(">q", fields[:8])[0],
    )
    own = struct.pack(">8s4q", b"sluice2\0", time_ms, counter, read_ms, queue_offset)
    files.put(CHECK, (fields + own).ljust(4096, b"\0"))


@pytest.mark.parametrize("is_foreign", [False, True], ids=["9f893bdc", "rocketmq"])
@pytest.mark.parametrize("was_lost", [False, True])
def test_the_first_start_finds_timers_that_were_lost_before(
    is_foreign: bool, was_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`was_lost`: an older wheel was trusted, and time has passed its missing messages."""
    files = built(False).files.kill()
    now_ms = built(False).end_ms
    if was_lost:
        zero(WHEEL)(files, built(False))
        now_ms = START_MS + 15_000
        fields = bytearray(files.content(CHECK))
        fields[:8] = struct.pack(">q", now_ms)
        files.put(CHECK, bytes(fields))
    as_before(files)
    if is_foreign:
        files.put(CHECK, files.content(CHECK)[:56].ljust(4096, b"\0"))
    findings = verify(StoreLayout.find("/store", files=files)).findings
    missing = [finding for finding in findings.listed if finding.kind == "timer-missing"]
    assert len(missing) == (len(WAITING) if was_lost else 0)
    broker = SteppedBroker(files=files, clock=ManualClock(now_ms))
    assert len([text for text in caplog.messages if REBUILT in text]) == 1
    broker.run(1.0)
    assert sorted(bodies(broker)) == sorted(DELIVERED + (WAITING[:4] if was_lost else []))
    broker.run(50.0, step_s=0.25)
    assert sorted(bodies(broker)) == sorted(DELIVERED + WAITING)


def test_a_message_without_an_id_is_distinguished_from_an_equal_one() -> None:
    """One of two equal messages is delivered; the other one must still be."""
    broker = begin()
    text = f"TIMER_DELIVER_MS\x01{START_MS + 1500}\x02"
    for _ in range(3):
        broker.connect().call(310, send_fields(properties=text), b"7")
    broker.run(1.6, step_s=0.1)
    assert bodies(broker) == [7, 7, 7]
    broker.close()
    files = broker.files.kill()
    as_before(files)
    again = SteppedBroker(files=files, clock=ManualClock(broker.clock.now_ms()))
    again.run(3.0)
    assert bodies(again) == [7, 7, 7]


def test_messages_whose_records_are_gone_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the wheel has to reach farther
    config = dataclasses.replace(
        SMALL, commit_log_file_bytes=1 << 14, file_reserved_hours=0,
        delete_hours=tuple(map(str, range(24))),
    )  # fmt: skip
    broker = SteppedBroker(store_config=config)
    broker.core.topics.put(TopicConfig("T", 4, 4))
    send(broker, 40_000_000)
    broker.run(0.2)
    for _ in range(100):
        broker.connect().call(310, send_fields(e=1), b"x" * 500)
    for _ in range(3):
        broker.advance(3600)
        broker.store.tick()
        broker.store.sync()
        broker.clean()
    assert broker.store.log_start > 0
    broker.close()
    files = broker.files.kill()
    findings = verify(StoreLayout.find("/store", files=files)).findings
    assert [finding.kind for finding in findings.listed] == ["timer-gone"]
    zero(WHEEL)(files, built(False))
    SteppedBroker(files=files, clock=ManualClock(broker.clock.now_ms()), store_config=config)
    (line,) = [text for text in caplog.messages if "1 timed messages are lost" in text]
    assert f"due from {START_MS + 39_999_000}" in line
    assert "at commit log positions 0 and later" in line
