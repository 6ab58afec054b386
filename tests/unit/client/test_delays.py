"""When a message is delivered, in the words of `send`: what they become, and what is refused."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from sluicemq.client.core.messages import (
    check_batch,
    expect_recall_handle,
    make_message,
    make_outgoing,
)
from sluicemq.client.core.requests import parse_send_response, request_error
from sluicemq.errors import ConfigurationError, RequestError
from sluicemq.model.ids import RecallHandle, parse_recall_handle
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_properties
from sluicemq.rocketmq import Message as MigrantMessage
from sluicemq.wire.frames import Command

NOON = datetime(2026, 7, 1, 12, 0, 0, 250_000, tzinfo=UTC)
NOON_MS = 1_782_907_200_250


def properties(**words: Any) -> dict[str, str]:
    found = decode_properties(
        make_outgoing(make_message("t", b"x", **words), "ID").properties.encode()
    )
    return {name: value for name, value in found.items() if name not in ("UNIQ_KEY", "WAIT")}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, {}),
        ({"delay_level": 0}, {}),
        ({"delay_level": 3}, {"DELAY": "3"}),
        ({"delay": 90}, {"TIMER_DELAY_MS": "90000"}),
        ({"delay": 0.0015}, {"TIMER_DELAY_MS": "2"}),
        ({"delay": timedelta(hours=5)}, {"TIMER_DELAY_MS": "18000000"}),
        ({"delay": 0}, {"TIMER_DELAY_MS": "0"}),
        ({"deliver_at": NOON}, {"TIMER_DELIVER_MS": str(NOON_MS)}),
        ({"deliver_at": NOON_MS}, {"TIMER_DELIVER_MS": str(NOON_MS)}),
        (
            {"deliver_at": NOON.astimezone(timezone(timedelta(hours=8)))},
            {"TIMER_DELIVER_MS": str(NOON_MS)},
        ),
    ],
)
def test_the_words_become_rocketmqs_properties(
    words: dict[str, Any], expected: dict[str, str]
) -> None:
    assert properties(**words) == expected


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ({"delay_level": 19}, "the delay level must be a whole number from 0 to 18, got 19"),
        ({"delay_level": -1}, "the delay level must be a whole number from 0 to 18, got -1"),
        ({"delay": -0.5}, "got -0.5 s"),
        ({"delay": timedelta(days=-1)}, "got -86,400"),
        ({"delay": float("nan")}, "got nan"),
        ({"delay": "5s"}, "got .5s"),
        ({"delay": True}, "got True"),
        ({"deliver_at": datetime(2026, 7, 1)}, "must have a time zone"),  # noqa: DTZ001
        ({"deliver_at": 1_782_907_200}, "is before 1973"),
        ({"deliver_at": -1}, "is before 1973"),
        ({"deliver_at": 1.5}, "deliver_at must be a datetime or milliseconds, got 1.5"),
        ({"delay": 5, "delay_level": 2}, "delay_level=2 and delay=5.0 s cannot be combined"),
        ({"delay": 5, "deliver_at": NOON}, "delay=5.0 s and deliver_at="),
    ],
)
def test_what_cannot_be_meant_is_refused_before_it_is_sent(
    words: dict[str, Any], fact: str
) -> None:
    with pytest.raises(ConfigurationError, match=fact) as caught:
        properties(**words)
    assert caught.value.fix


def test_brokers_with_more_levels_can_be_used() -> None:
    outgoing = make_outgoing(Message("t", b"x", delay_level=25), "ID", delay_level_max=30)
    assert "DELAY\x0125\x02" in outgoing.properties


@pytest.mark.parametrize("words", [{"delay_level": 1}, {"delay": 0}, {"deliver_at": NOON}])
def test_a_batch_is_not_delayed(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="message 1 of the batch is delayed"):
        check_batch([make_message("t", b"x"), make_message("t", b"x", **words)])


def test_the_result_has_the_recall_handle() -> None:
    queue = MessageQueue("t", "b", 0)
    fields = {"msgId": "M", "queueId": "0", "queueOffset": "7", "recallHandle": "H"}
    (result,) = parse_send_response(Command(0, fields), queue, ("ID",), "a:1")
    assert result.recall_handle == "H"
    del fields["recallHandle"]
    (result,) = parse_send_response(Command(0, fields), queue, ("ID",), "a:1")
    assert result.recall_handle is None


@pytest.mark.parametrize(
    "remark",
    [
        "the message is due in 400,000,000 ms, the delay must not be more than 259,200,000 ms",
        "timer message illegal, the delay time should not be bigger than the max delay 259200000ms",
    ],
)
def test_too_long_a_delay_is_an_error_with_the_right_cure(remark: str) -> None:
    queue = MessageQueue("t", "b", 0)
    with pytest.raises(RequestError) as caught:
        parse_send_response(Command(13, {}, b"", 0, 1, remark), queue, ("ID",), "a:1")
    assert "timerMaxDelaySec" in str(caught.value.fix)


def test_a_recall_that_is_disabled_is_not_a_question_of_permissions() -> None:
    remark = "Recalling messages is disabled on this broker. Set recallMessageEnable = true."
    assert str(request_error(Command(16, {}, b"", 0, 1, remark))) == (
        f"answered with code 16: {remark}"
    )


def test_a_handle_is_read_as_it_was_written() -> None:
    handle = RecallHandle("t-opic", "broker-a", NOON_MS, "7F00000A")
    assert parse_recall_handle(handle.encode()) == handle
    # As Java's encoder writes it: URL alphabet, with padding.
    assert RecallHandle("T", "b", 1, "A").encode() == "djEgVCBiIDEgQQ=="


@pytest.mark.parametrize("text", ["", "é", "djEg", "djEgVCBiIDEgQQ", "djIgVCBiIDEgQQ==", "%%%%"])
def test_what_is_no_handle_is_an_error(text: str) -> None:
    assert parse_recall_handle(text) is None
    with pytest.raises(ConfigurationError, match="not a valid recall handle"):
        expect_recall_handle(text)


def test_a_migrants_message_says_it_in_rocketmqs_words() -> None:
    message = MigrantMessage("t", b"x")
    message.set_delay_time_sec(5)
    assert message.to_model().delay_ms == 5000
    message.set_delay_time_ms(250)
    assert message.to_model().delay_ms == 250
    other = MigrantMessage("t", b"x")
    other.set_deliver_time_ms(NOON_MS)
    assert other.to_model().deliver_at_ms == NOON_MS
