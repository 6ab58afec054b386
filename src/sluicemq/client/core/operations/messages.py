"""Finding single messages: by the keys they bear, by the id of their producer, by where they lie.

Conversations as in `operations`. A broker's index knows hashes only, and a Java broker hands out
what its index says: whether a message really bears the key is checked here once more.

An id is 32 or 56 hexadecimal digits and may be of either kind: made by the producer (unique key),
or by the broker (address and place in its log). The second is tried first: it is right only when
the message that lies there says so itself.
"""

from collections.abc import Iterable
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import QUERY_NOT_FOUND, SUCCESS, request_error
from sluicemq.client.core.operations.topics import Ask, RouteOf, Talk, masters, topics
from sluicemq.errors import ConfigurationError, MessageNotFoundError, ProtocolError
from sluicemq.model.ids import parse_offset_message_id
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MASTER_ID, TopicRoute
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command

TIME_MAX_MS: Final = (1 << 63) - 1
COUNT_MAX: Final = 64
"""What a broker gives at most, unless its maxMsgsNumBatch says otherwise."""


def messages_by_key(
    topic: str, key: str, begin_ms: int, end_ms: int, count_max: int, *, is_unique: bool = False
) -> Talk[list[StoredMessage]]:
    """Messages of a topic with a key (or, `is_unique`, with that id of their producer), stored from
    `begin_ms` to `end_ms`, newest first."""
    _check(key, begin_ms, end_ms, count_max)
    route: TopicRoute = yield RouteOf(topic)
    known = [
        (data.broker, data.addresses[MASTER_ID])
        for data in route.brokers
        if MASTER_ID in data.addresses
    ]
    command = requests.messages_by_key(topic, key, begin_ms, end_ms, count_max, is_unique=is_unique)
    found = yield from _ask(known, command)
    bearing = [m for m in found if m.topic == topic and _bears(m, key, is_unique=is_unique)]
    bearing.sort(key=lambda message: message.store_time_ms, reverse=True)
    return bearing[:count_max]


def _ask(known: Iterable[tuple[str, str]], command: Command) -> Talk[list[StoredMessage]]:
    """The same of several brokers, given by name and address."""
    found: list[StoredMessage] = []
    for broker, address in known:
        answer = yield Ask(address, command, must_succeed=False)
        if answer.code == SUCCESS:
            found += decode_records(answer.body, broker=broker)
        elif answer.code != QUERY_NOT_FOUND:
            raise request_error(answer, address)
    return found


def _check(key: str, begin_ms: int, end_ms: int, count_max: int) -> None:
    if not key or " " in key:
        raise ConfigurationError(
            f"{key!r} is not a key.", cure="A key is one word: keys are separated by spaces."
        )
    if begin_ms > end_ms:
        raise ConfigurationError(
            f"the range of time begins at {begin_ms} ms and ends before, at {end_ms}.",
            cure="Exchange them.",
        )
    if count_max < 1:
        raise ConfigurationError(f"{count_max} messages are asked for.", cure="Ask for one.")


def _bears(message: StoredMessage, key: str, *, is_unique: bool) -> bool:
    if is_unique:
        return message.message_id == key
    return key in message.keys or message.message_id == key


def message_by_id(message_id: str, topic: str | None) -> Talk[StoredMessage]:
    """The message with this id, of a broker or of its producer; without a topic the second kind is
    looked for in all of them. Raises MessageNotFoundError."""
    text = message_id.strip()
    found = yield from _message_at(text)
    if found is not None:
        return found
    known = list((yield from masters()).items())
    for name in [topic] if topic is not None else (yield from topics()):
        command = requests.messages_by_key(name, text, 0, TIME_MAX_MS, COUNT_MAX, is_unique=True)
        for message in (yield from _ask(known, command)):
            if message.topic == name and message.message_id == text:
                return message
    raise MessageNotFoundError(
        f"no message has the id {text}{f' in {topic}' if topic is not None else ''}.",
        cure="It may be deleted already, or the id is of another cluster.",
    )


def _message_at(message_id: str) -> Talk[StoredMessage | None]:
    """By address and place. The address may be one that this client cannot reach: each master is
    asked, the one of that address first."""
    try:
        host, offset = parse_offset_message_id(message_id)
    except (ProtocolError, ValueError):
        return None
    if offset < 0:
        return None
    known = yield from masters()
    for name, address in sorted(known.items(), key=lambda item: item[1] != str(host)):
        answer = yield Ask(address, requests.message_at("", offset), must_succeed=False)
        if answer.code == SUCCESS:
            for message in decode_records(answer.body, broker=name):
                if message.offset_message_id == message_id.upper():
                    return message
    return None
