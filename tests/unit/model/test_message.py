"""A `Message` takes what `send` takes, and stays what it is when it is copied."""

import copy
import inspect
import pickle
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sluicemq.client.core.messages import MessageOptions, make_message
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import Message

NOON = datetime(2030, 7, 1, 12, tzinfo=UTC)
ALL: dict[str, Any] = {
    "tag": "A",
    "keys": ["k1", "k2"],
    "properties": {"a": "1"},
    "flag": 3,
    "wait_store_ok": False,
    "sharding_key": "s",
    "delay_level": 2,
    "delay": timedelta(seconds=90),
    "deliver_at": NOON,
}


def test_a_message_takes_every_option_of_send() -> None:
    assert set(ALL) == set(MessageOptions.__annotations__)
    assert set(ALL) <= set(inspect.signature(Message).parameters)
    assert Message("t", "x", **ALL) == make_message("t", "x", **ALL)
    for name, option in ALL.items():
        assert Message("t", b"x", **{name: option}) == make_message("t", b"x", **{name: option})


def test_the_parts_are_what_consumers_see() -> None:
    message = Message("t", bytearray(b"x"), keys="k", properties=None, delay=0.5)
    assert (message.body, message.keys, message.properties) == (b"x", ("k",), {})
    assert message.delay_ms == 500
    assert Message("t", "ä").body == b"\xc3\xa4"
    assert Message("t", b"x", deliver_at=NOON).deliver_at_ms == NOON.timestamp() * 1000


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"body": 5}, "the body must be bytes or a string, got 5"),
        ({"keys": 5}, "keys must be a string or a list of strings, got 5"),
        ({"delay": "5s"}, "delay must be a number of seconds or a timedelta"),
        ({"deliver_at": NOON.replace(tzinfo=None)}, "deliver_at must have a time zone"),
        ({"delay": 5, "delay_ms": 5}, "delay and delay_ms cannot be combined"),
        ({"deliver_at": NOON, "deliver_at_ms": 5}, "deliver_at and deliver_at_ms cannot"),
    ],
)
def test_a_wrong_type_is_refused_where_it_is_written(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigurationError, match=fact):
        Message(**({"topic": "t", "body": b"x"} | options))


def test_other_words_are_answered_with_the_options_of_send() -> None:
    with pytest.raises(TypeError, match=r"Message\(\) .* Did you mean 'delay' \(seconds or a"):
        Message("t", b"x", delay_seconds=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Did you mean 'deliver_at' \("):
        Message("t", b"x", eta=5)  # type: ignore[call-arg]


def test_copies_are_equal() -> None:
    message = Message("t", b"x", keys="k", delay=5)
    assert copy.copy(message) == copy.deepcopy(message) == message
    assert pickle.loads(pickle.dumps(message)) == message
    assert replace(message, topic="u").delay_ms == 5000
    with pytest.raises(AttributeError):
        message.topic = "u"  # type: ignore[misc]
