"""Waiting messages can be listed and cancelled, and slaves can copy the state."""

from typing import Any

import pytest

from simulation.stepped import START_MS, ManualClock, SteppedBroker, SteppedClient, send_fields
from sluicemq.record.codec import decode_records
from sluicemq.wire.bodies import WaitingMessage, decode_waiting
from sluicemq.wire.codes import RequestCode

LIST, CANCEL = RequestCode.SLUICE_LIST_DELAYED, RequestCode.SLUICE_CANCEL_DELAYED


def send(client: SteppedClient, unique_id: str, **more: object) -> Any:
    properties = {"UNIQ_KEY": unique_id, **more}
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    return client.call(310, send_fields(properties=text), unique_id.encode())


def listed(client: SteppedClient, page: int = 1000, **fields: object) -> list[WaitingMessage]:
    found: list[WaitingMessage] = []
    cursor: dict[str, str] = {}
    for _ in range(1000):
        answer = client.call(LIST, {"maxMsgNums": page, **fields, **cursor})
        assert answer.code == 0
        found += decode_waiting(answer.body)
        if "cursor" not in (answer.fields or {}):
            return found
        cursor = {"cursor": answer.fields["cursor"]}
    raise AssertionError("the list has no end")


def delivered(broker: SteppedBroker) -> list[bytes]:
    result = broker.store.reader.read("T", 0, 0, 10_000, 1 << 24)
    return [message.body for message in decode_records(b"".join(result.data))]


@pytest.fixture
def waiting(broker: SteppedBroker, client: SteppedClient) -> SteppedBroker:
    send(client, "L3", DELAY=3, KEYS="red blue", TAGS="x")
    send(client, "L4", DELAY=4)
    send(client, "T20", TIMER_DELAY_SEC=20, KEYS="blue")
    send(client, "T2D", TIMER_DELAY_SEC=2 * 86_400)
    broker.run(0.2)
    return broker


def test_everything_that_waits_is_listed_with_its_time(
    waiting: SteppedBroker, client: SteppedClient
) -> None:
    found = {item.unique_id: item for item in listed(client)}
    assert {name: item.due_ms - START_MS for name, item in found.items()} == {
        "L3": 10_000, "L4": 30_000, "T20": 20_000, "T2D": 172_800_000,
    }  # fmt: skip
    first = found["L3"]
    assert (first.topic, first.queue_id, first.level, first.keys) == ("T", 0, 3, "red blue")
    assert (first.tag, first.stored_ms, first.body_bytes) == ("x", START_MS, 2)
    assert found["T20"].level == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"key": "blue"}, {"L3", "T20"}),
        ({"key": "L4"}, {"L4"}),
        ({"key": "bl"}, set()),
        ({"topic": "U"}, set()),
        ({"topic": "T", "key": "red"}, {"L3"}),
    ],
)
def test_a_list_can_be_narrowed(
    waiting: SteppedBroker, client: SteppedClient, fields: dict[str, str], expected: set[str]
) -> None:
    assert {item.unique_id for item in listed(client, **fields)} == expected


@pytest.mark.parametrize("page", [1, 2, 7])
def test_pages_join_without_gap_or_repetition(
    broker: SteppedBroker, client: SteppedClient, page: int
) -> None:
    names = []
    for number in range(12):
        names.append(f"T{number}")
        send(client, names[-1], TIMER_DELAY_SEC=30 + number // 4)
        names.append(f"L{number}")
        send(client, names[-1], DELAY=4 + number % 2)
    broker.run(0.2)
    found = [item.unique_id for item in listed(client, page)]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_messages_that_are_not_indexed_yet_are_listed_once(
    waiting: SteppedBroker, client: SteppedClient, page: int
) -> None:
    """A new master, for example, fills its wheel from the log.

    The broker indexes a message between two pages of a list, which contains it once.
    """
    for number in range(4):
        send(client, f"N{number}", TIMER_DELAY_SEC=15 + 5 * number)
    found, cursor = [], {}
    while True:
        answer = client.call(LIST, {"maxMsgNums": page, **cursor})
        found += [item.unique_id for item in decode_waiting(answer.body)]
        if "cursor" not in (answer.fields or {}):
            break
        cursor = {"cursor": answer.fields["cursor"]}
        if len(found) > 3:
            waiting.run(0.2)
    assert sorted(found) == ["L3", "L4", "N0", "N1", "N2", "N3", "T20", "T2D"]


@pytest.mark.parametrize("cursor", ["", "X:1:2", "L:1", "L:1:2:3", "T:1:2", "Q:1:x:3", "T:1:-x:0"])
def test_a_wrong_cursor_is_refused(client: SteppedClient, cursor: str) -> None:
    answer = client.call(LIST, {"cursor": cursor or ":"})
    assert answer.remark.startswith(f"{cursor or ':'!r} is not a valid cursor.")


def test_delivered_messages_are_not_listed(waiting: SteppedBroker, client: SteppedClient) -> None:
    waiting.run(21.0)
    assert {item.unique_id for item in listed(client)} == {"L4", "T2D"}


@pytest.mark.parametrize("name", ["L3", "L4", "T20"])
def test_a_cancelled_message_is_gone_and_the_others_come(
    waiting: SteppedBroker, client: SteppedClient, name: str
) -> None:
    (item,) = listed(client, key=name)
    answer = client.call(CANCEL, {"handle": item.handle})
    assert (answer.code, answer.fields["msgId"]) == (0, name)
    waiting.run(0.2)
    assert name not in {item.unique_id for item in listed(client)}
    waiting.run(31.0)
    assert set(delivered(waiting)) == {b"L3", b"L4", b"T20"} - {name.encode()}


@pytest.mark.parametrize("name", ["L3", "T20"])
def test_a_cancellation_is_on_disk_when_it_is_answered(
    waiting: SteppedBroker, client: SteppedClient, name: str
) -> None:
    waiting.store.sync()
    waiting.core.delayed.save()
    (item,) = listed(client, key=name)
    client.call(CANCEL, {"handle": item.handle})
    files, clock = waiting.files.kill(), ManualClock(waiting.clock.now_ms())
    broker = SteppedBroker(files=files, clock=clock)
    broker.run(31.0)
    assert name.encode() not in delivered(broker)
    assert len(delivered(broker)) == 2


def test_a_message_cannot_be_cancelled_twice_or_too_late(
    waiting: SteppedBroker, client: SteppedClient
) -> None:
    (item,) = listed(client, key="L3")
    (timed,) = listed(client, key="T20")
    assert client.call(CANCEL, {"handle": item.handle}).code == 0
    assert client.call(CANCEL, {"handle": item.handle}).code == 604
    waiting.run(21.0)
    answer = client.call(CANCEL, {"handle": timed.handle})
    assert answer.code == 604
    assert "Too late" in answer.remark


@pytest.mark.parametrize("handle", ["", "nonsense", "ZDEgMSAy", "é"])
def test_an_invalid_handle_is_refused(client: SteppedClient, handle: str) -> None:
    answer = client.call(CANCEL, {"handle": handle})
    assert answer.code in (1, 604)
    assert answer.remark


def test_a_handle_of_another_store_is_refused(
    waiting: SteppedBroker, client: SteppedClient
) -> None:
    (item,) = listed(client, key="L3")
    other = SteppedBroker()
    stranger = other.connect()
    send(stranger, "other", DELAY=3)
    answer = stranger.call(CANCEL, {"handle": item.handle})
    assert answer.code == 604
    assert "another broker" in answer.remark


def test_a_cursor_that_is_none_is_refused(client: SteppedClient) -> None:
    assert client.call(LIST, {"cursor": "X:1"}).code == 29


def test_a_cancellation_is_forgotten_when_even_a_crash_cannot_bring_the_message_back(
    waiting: SteppedBroker, client: SteppedClient
) -> None:
    (item,) = listed(client, key="L3")
    client.call(CANCEL, {"handle": item.handle})
    schedule = waiting.core.delayed.levels
    waiting.run(10.0)
    for _ in range(3):
        waiting.store.sync()
        schedule.document.save()
        schedule.cancellations.save()
        schedule.document.changed = True
    file = waiting.files.open("/store/config/sluiceDelayCancelled.json")
    assert file.pread(100, 0) == b"{}"


def test_slaves_get_the_three_tables(waiting: SteppedBroker, client: SteppedClient) -> None:
    waiting.core.delayed.save()
    assert b'"offsetTable"' in client.call(45).body
    checkpoint = client.call(60).body
    assert len(checkpoint) == 56
    assert int.from_bytes(bytes(checkpoint[8:16])) == 104
    assert b'"timingCount":{"T":{"count":2' in client.call(61).body
