"""What the compiled engine stores and serves, and that it leaves to the reference what it must.

tests/property/test_engines.py feeds both engines with random requests and compares them. Here one
thing at a time goes wrong, and each test makes sure that the compiled engine has taken requests."""

import dataclasses
import errno
import time
import zlib
from typing import Any

import pytest

from simulation.stepped import SMALL, SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq import engine
from sluicemq.files import Files
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.log import PLACEHOLDER_CODE
from sluicemq.store.queues import UNIT, UNIT_BYTES, Unit
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

pytestmark = pytest.mark.skipif(
    engine.sends is None or engine.pulls is None, reason="the engine is not compiled: make native"
)
UNITS = "/store/consumequeue/T/0/" + "0" * 20


class Watched:
    """A broker with the topic T, one client, and the number of times that the compiled engine has
    taken something of what the client sent."""

    def __init__(self, files: CrashableFiles | None = None, **store: Any) -> None:
        self.broker = SteppedBroker(files=files, store_config=dataclasses.replace(SMALL, **store))
        self.broker.core.topics.put(TopicConfig("T", 1, 1))
        self.client: SteppedClient = self.broker.connect()
        self.taken = 0
        self._run = self.broker.dispatcher.run_engine
        self.broker.dispatcher.run_engine = self._count

    def _count(self, data: bytes, position: int, *rest: Any) -> int:
        assert self._run is not None
        end: int = self._run(data, position, *rest)
        self.taken += end > position
        return end

    @property
    def files(self) -> CrashableFiles:
        return self.broker.files

    def send(self, body: bytes, tag: str = "A") -> Command:
        properties = f"UNIQ_KEY\x01C000020203F34E0E2F2A67BA16000000\x02TAGS\x01{tag}\x02"
        return self.client.call(310, send_fields(properties=properties), body)

    def pull(self, offset: int, **changes: Any) -> tuple[list[StoredMessage], int]:
        """Return the messages, and where the next pull begins."""
        answer = self.client.call(11, pull_fields(offset=offset, **changes))
        assert answer.code == ResponseCode.SUCCESS
        assert answer.fields is not None
        return decode_records(answer.body), int(answer.fields["nextBeginOffset"])

    def bodies(self, end: int) -> list[bytes]:
        """Return what a reader finds from the first message up to offset `end`."""
        found: list[StoredMessage] = []
        while len(found) < end:
            found += self.pull(len(found))[0]
        assert [one.queue_offset for one in found] == list(range(end))
        return [one.body for one in found]


def put_unit(files: Files, offset: int, unit: Unit) -> None:
    files.open(UNITS).pwrite(UNIT.pack(*unit), offset * UNIT_BYTES)


def unit_at(files: Files, offset: int) -> Unit:
    return Unit(*UNIT.unpack(files.open(UNITS).pread(UNIT_BYTES, offset * UNIT_BYTES)))


def restarted(count: int) -> tuple[CrashableFiles, list[bytes]]:
    """Return the files of a broker that has stopped in order, and the bodies of its messages."""
    before = Watched()
    bodies = [b"body %d" % number for number in range(count)]
    for body in bodies:
        before.send(body)
    before.broker.close()
    return before.files.kill(), bodies


# --- sends


def test_each_record_has_the_crc_of_its_body() -> None:
    watched = Watched()
    bodies = [bytes(range(size)) for size in range(40)]  # what is no multiple of eight, too
    for body in bodies:
        watched.send(body)
    assert watched.taken >= 39, "the first message of a queue is not plain"
    for offset, body in enumerate(bodies):
        place = watched.pull(offset, maxMsgNums=1)[0][0].physical_offset
        stored = watched.broker.store.reader.record_at(place)
        assert stored is not None
        assert int.from_bytes(bytes(stored[8:12])) == zlib.crc32(body) & 0x7FFFFFFF
    assert Watched(watched.files.kill()).bodies(40) == bodies, "a start believes all of them"


def test_messages_of_a_queue_are_numbered_without_a_gap() -> None:
    watched, bodies = Watched(), [b"%d" % number for number in range(20)]
    offsets = [(watched.send(body).fields or {})["queueOffset"] for body in bodies]
    assert watched.taken >= 19
    assert offsets == [str(number) for number in range(20)]
    assert watched.bodies(20) == bodies


def test_a_record_that_has_no_room_in_its_file_is_left_to_the_reference() -> None:
    """It ends the file with a blank record, and goes on in the next one."""
    watched = Watched(commit_log_file_bytes=4096)
    bodies = [bytes([number]) * (200 + 13 * number) for number in range(60)]
    for body in bodies:
        assert watched.send(body).code == ResponseCode.SUCCESS
    assert 30 < watched.taken < 60
    assert watched.bodies(60) == bodies
    for name in watched.files.names("/store/commitlog"):
        assert len(watched.files.content(f"/store/commitlog/{name}")) == 4096
    again = Watched(watched.files.kill(), commit_log_file_bytes=4096)
    assert again.bodies(60) == bodies


def test_a_turn_that_cannot_be_written_leaves_nothing_in_its_queue() -> None:
    watched = Watched()
    for body in (b"first", b"second"):
        watched.send(body)
    watched.files.fail_next("write", errno.ENOSPC, path_part="commitlog")
    assert watched.send(b"refused").code != ResponseCode.SUCCESS
    assert (watched.send(b"third").fields or {})["queueOffset"] == "2"
    assert watched.taken == 3, "all but the first one"
    assert watched.bodies(3) == [b"first", b"second", b"third"]
    assert Watched(watched.files.kill()).bodies(3) == [b"first", b"second", b"third"]


# --- pulls


def test_a_message_that_a_repair_could_not_save_is_passed_over() -> None:
    files, bodies = restarted(10)
    put_unit(files, 3, unit_at(files, 3)._replace(tag_code=PLACEHOLDER_CODE))
    watched = Watched(files)
    for _ in range(3):
        assert [one.body for one in watched.pull(0)[0]] == bodies[:3] + bodies[4:]
        assert [one.body for one in watched.pull(4)[0]] == bodies[4:]
    assert watched.taken == 3, "the pulls from 4 on"


def test_a_unit_that_leads_to_another_record_is_not_believed() -> None:
    files, bodies = restarted(10)
    put_unit(files, 3, unit_at(files, 5))
    watched = Watched(files)
    watched.pull(6)
    watched.pull(6)
    assert watched.taken == 1, "such a pull has a plan by now"
    assert [one.body for one in watched.pull(0)[0]] == bodies
    assert watched.taken == 1, "the reference has looked, and has mended the unit"
    assert [one.body for one in watched.pull(0)[0]] == bodies
    assert watched.taken == 2


@pytest.mark.parametrize("expression", ["*", "A"])
def test_the_next_pull_goes_on_behind_the_last_message_that_had_room(expression: str) -> None:
    """An answer holds 256 KiB."""
    watched = Watched(commit_log_file_bytes=4 << 20)
    for number in range(40):
        watched.send(b"%02d" % number + bytes(60_000), tag="AB"[number % 2])
    before, offset, pulls, found = watched.taken, 0, 0, []
    while offset < 40:
        messages, offset = watched.pull(offset, subscription=expression, sluiceAnySpan="true")
        found += [int(one.body[:2]) for one in messages]
        pulls += 1
    assert found == list(range(0, 40, 1 if expression == "*" else 2))
    assert watched.taken - before >= pulls - 2 > 2


def test_what_is_known_of_pulls_that_nobody_repeats_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Consumers come and go, each with groups and filters of its own."""
    now_s = [time.monotonic()]
    monkeypatch.setattr(engine.pulls, "monotonic", lambda: now_s[0])
    watched = Watched()
    watched.send(b"x")
    watched.pull(0)
    watched.pull(0)
    plans = watched.broker.core.pull.compiled
    for number in range(6):
        watched.pull(0, maxMsgNums=number + 1)
        watched.pull(0)
        now_s[0] += 400
    assert len(plans) <= 3
    before = watched.taken
    watched.pull(0)
    assert watched.taken == before + 1, "the one that is repeated is known"
