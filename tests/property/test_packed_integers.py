"""Integers that are packed into fields of 16, 32 and 64 bits, at the edges of each size.

Where a number enters from outside it is either stored and read back as it was, or refused with an
error of ours that says its value and the range: never a `struct.error`, never a wrapped number.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from simulation.pops import POP, numbers, pop_fields
from simulation.stepped import SteppedBroker, pull_fields, send_fields
from sluicemq.broker.background import TimeSlice
from sluicemq.errors import SluiceError
from sluicemq.model.ids import Host, encode_host, offset_message_id, parse_host
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_batch, decode_record, encode_batch, encode_record
from sluicemq.record.layout import BATCH_HEAD, RECORD_HEAD
from sluicemq.store.timers.files import TimerCheckpoint, TimerLog
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.fastjson import as_integer
from sluicemq.wire.frames import BINARY, Command, decode, encode
from sluicemq.wire.headers import QueueRequest, UpdateConsumerOffsetRequest

EDGES: Final = sorted(
    {
        sign * (1 << bits) + more
        for bits in (0, 15, 31, 32, 63, 64)
        for sign in (1, -1)
        for more in (-1, 0, 1)
    }
)
HOST: Final = encode_host(Host("127.0.0.1", 10911))
AT_EDGES: Final = pytest.mark.parametrize("number", EDGES)


def fits(number: int, bits: int) -> bool:
    return -(1 << bits - 1) <= number < 1 << bits - 1


def refused(work: Callable[[], object], number: int) -> None:
    """It raises an error of ours that names the value."""
    with pytest.raises(SluiceError) as caught:
        work()
    assert str(number) in str(caught.value), caught.value


def record(**changes: Any) -> bytes:
    values: dict[str, Any] = {
        "topic": "T", "queue_id": 0, "queue_offset": 0, "physical_offset": 0, "body": b"x",
        "properties": b"", "flag": 0, "sys_flag": 0, "born_time_ms": 0, "born_host": HOST,
        "store_time_ms": 0, "store_host": HOST, "reconsume_times": 0, "prepared_offset": 0,
    }  # fmt: skip
    return encode_record(**values | changes)


@AT_EDGES
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("queue_id", 32), ("flag", 32), ("queue_offset", 64), ("physical_offset", 64),
        ("born_time_ms", 64), ("store_time_ms", 64), ("reconsume_times", 32),
        ("prepared_offset", 64),
    ],
)  # fmt: skip
def test_numbers_of_a_record(number: int, name: str, bits: int) -> None:
    if fits(number, bits):
        found = decode_record(record(**{name: number}))
        assert getattr(found, name, number) == number
    else:
        refused(lambda: record(**{name: number}), number)


@AT_EDGES
def test_the_flag_of_a_message_in_a_batch(number: int) -> None:
    def encoded() -> bytes:
        return encode_batch([(number, b"x", b"")])

    if fits(number, 32):
        assert decode_batch(encoded())[0][0] == number
    else:
        refused(encoded, number)


@AT_EDGES
@pytest.mark.parametrize("name", ["code", "opaque", "flag", "version"])
def test_numbers_of_a_frame(number: int, name: str) -> None:
    command = Command(1)._replace(**{name: number}) if hasattr(Command(1), "_replace") else None
    if command is None:
        command = Command(1)
        setattr(command, name, number)
    frame = encode(command)
    if fits(number, 32):
        assert getattr(decode(frame[4:]), name) == number
    else:
        with pytest.raises(SluiceError, match=f"{name} is not a 32-bit integer"):
            decode(frame[4:])
    command.serialization = BINARY
    if fits(number, 32 if name in {"opaque", "flag"} else 16):
        assert getattr(decode(encode(command)[4:]), name) == number
    else:
        with pytest.raises(SluiceError):
            encode(command)


@AT_EDGES
@pytest.mark.parametrize(("wire", "bits"), [("queueId", 32), ("commitOffset", 64)])
def test_numbers_of_a_header(number: int, wire: str, bits: int) -> None:
    fields = {"consumerGroup": "G", "topic": "T", "queueId": "0", "commitOffset": "0"}

    def header() -> dict[str, str]:
        found = decode_header(UpdateConsumerOffsetRequest, fields | {wire: str(number)})
        return encode_header(found)

    if fits(number, bits):
        assert header()[wire] == str(number)
    else:
        refused(header, number)


@pytest.mark.parametrize("text", ["1e3", "1.0", "0x1", "one", "9" * 5000, "--1", "\u00b2"])
def test_what_is_no_number_of_a_header(text: str) -> None:
    with pytest.raises(SluiceError, match="<queueId> is not an integer of 32 bits"):
        decode_header(QueueRequest, {"topic": "T", "queueId": text})


@AT_EDGES
@pytest.mark.parametrize(("wire", "bits"), [("queueId", 32), ("anything", 64)])
@pytest.mark.parametrize("make", [int, str])
def test_numbers_of_a_body(
    number: int, wire: str, bits: int, make: Callable[[int], object]
) -> None:
    if fits(number, bits):
        assert as_integer(make(number), wire) == number
    else:
        refused(lambda: as_integer(make(number), wire), number)


@AT_EDGES
def test_a_port(number: int) -> None:
    if 0 <= number <= 65_535:
        assert parse_host(f"127.0.0.1:{number}").port == number
    else:
        with pytest.raises(SluiceError, match="is not an address"):
            parse_host(f"127.0.0.1:{number}")


@AT_EDGES
def test_the_due_time_of_a_timer_unit_is_exact_whatever_its_delay(number: int) -> None:
    if not fits(number, 63):
        return
    log = TimerLog(CrashableFiles(), "/timerlog", 1 << 16)
    unit = log.unit_at(log.append(-1, 1, 1_700_000_000_000, number, 0, 100, 0))
    assert unit is not None
    assert unit.due_ms == 1_700_000_000_000 + number


@AT_EDGES
def test_numbers_of_layouts_say_what_does_not_fit(number: int) -> None:
    values = [number if name == "flag" else 0 for name, _ in BATCH_HEAD.fields]
    assert bool(BATCH_HEAD.describe_misfit(*values)) is not fits(number, 32)
    values = [b"" if kind[0] == "V" else number for _, kind in RECORD_HEAD.fields]
    assert bool(RECORD_HEAD.describe_misfit(*values)) is not fits(number, 32)


@AT_EDGES
def test_an_id_of_a_place_in_the_log(number: int) -> None:
    if fits(number, 64):
        assert int(offset_message_id(HOST, number)[16:], 16) == number % (1 << 64)
    checkpoint = TimerCheckpoint(read_ms=number)
    if fits(number, 64):
        assert len(checkpoint.encode()) == 56


# ----------------------------------------------------------------------------------- in a broker


@pytest.fixture
def broker() -> SteppedBroker:
    stepped = SteppedBroker()
    stepped.core.topics.put(TopicConfig("T", 4, 4))
    stepped.change_store(timer_delay_max_s=2**31 - 1)
    return stepped


LETTERS: Final = {"e": 32, "f": 32, "g": 64, "h": 32, "j": 32}


@pytest.mark.parametrize("letter", LETTERS)
def test_numbers_of_a_send(letter: str, broker: SteppedBroker) -> None:
    """By the compiled way and by the reference: both answer alike."""
    client = broker.connect()
    for number in EDGES:
        plain, odd = [
            client.call(310, send_fields(properties=f"UNIQ_KEY\x01A\x02{more}", **{letter: number}))
            for more in ("", "DELAY\x010\x02")
        ]
        assert (plain.code, plain.remark) == (odd.code, odd.remark), number
        if not fits(number, LETTERS[letter]):
            assert plain.code == 1
            assert f"{number}" in (plain.remark or "")
    stored = client.call(11, pull_fields(maxMsgNums=200))
    assert stored.code in (0, 19, 21)


@pytest.mark.parametrize(
    "name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "REAL_QID"]
)
def test_numbers_of_properties(name: str, broker: SteppedBroker) -> None:
    client = broker.connect()
    for number in EDGES:
        answer = client.call(
            310, send_fields(properties=f"UNIQ_KEY\x01A\x02{name}\x01{number}\x02")
        )
        assert answer.code in (0, 1, 13, 23)
        broker.core.delayed.timers.prepare(TimeSlice(broker.core.steady_clock, 1.0, 1000))
        broker.run(0.2, 0.1)
    assert not broker.core.supervisor.failures
    broker.run(3.0)
    assert not broker.core.supervisor.failures


def test_the_count_of_redeliveries_stays_at_its_limit(broker: SteppedBroker) -> None:
    client = broker.connect()
    most = 2**31 - 1
    fields = send_fields(properties="UNIQ_KEY\x01A\x02n\x011\x02", j=most)
    assert client.call(310, fields, b"x").code == 0
    assert numbers(client.call(POP, pop_fields(broker, invisibleTime=1000))) == [1]
    broker.run(4.0)
    answer = client.call(POP, pop_fields(broker))
    assert numbers(answer) == [1]
    assert not re.search("cannot be stored", answer.remark or "")
