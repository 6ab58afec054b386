"""Single messages: by the keys they bear, by their id; those that wait, and open transactions.

A broker's index knows hashes only, and a Java broker hands out what its index says: whether a
message really bears the key is checked here once more.

An id is 32 or 56 hexadecimal digits and may be of either kind: made by the producer (unique key),
or by the broker (address and place in its log). The second is tried first: it is right only when
the message that lies there says so itself.
"""

from collections.abc import Mapping
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import QUERY_NOT_FOUND, SUCCESS, expect_success
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.operations.topics import ask_each, masters, masters_of_topic, topics
from sluicemq.client.core.talks import Call, Talk
from sluicemq.client.core.transactions import TransactionState
from sluicemq.errors import ConfigurationError, MessageNotFoundError, ProtocolError
from sluicemq.model.ids import parse_offset_message_id
from sluicemq.model.message import StoredMessage
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies

TIME_MAX_MS: Final = (1 << 63) - 1
COUNT_MAX: Final = 64
"""What a broker gives at most, unless its maxMsgsNumBatch says otherwise."""
PAGE_MAX: Final = 1000


def messages_by_key(
    directory: Directory,
    topic: str,
    key: str,
    *,
    begin_ms: int = 0,
    end_ms: int = TIME_MAX_MS,
    count_max: int = COUNT_MAX,
) -> Talk[list[StoredMessage]]:
    """Messages of a topic that bear a key, stored from `begin_ms` to `end_ms`, newest first.

    Raises RequestError when a broker keeps no index, or is still building it.
    """
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
    brokers = masters_of_topic((yield from directory.route(topic)))
    command = requests.messages_by_key(topic, key, begin_ms, end_ms, count_max, is_unique=False)
    answers = yield from ask_each(brokers, command, absent={QUERY_NOT_FOUND})
    bearing = [
        message
        for broker, _, answer in answers
        for message in decode_records(answer.body, broker=broker)
        if message.topic == topic and (key in message.keys or message.message_id == key)
    ]
    bearing.sort(key=lambda message: message.store_time_ms, reverse=True)
    return bearing[:count_max]


def messages_by_id(
    brokers: Mapping[str, str], topic: str, message_id: str
) -> Talk[list[StoredMessage]]:
    """Messages of a topic with this id of their producer, of brokers given by name and address."""
    command = requests.messages_by_key(topic, message_id, 0, TIME_MAX_MS, COUNT_MAX, is_unique=True)
    answers = yield from ask_each(brokers, command, absent={QUERY_NOT_FOUND})
    return [
        message
        for broker, _, answer in answers
        for message in decode_records(answer.body, broker=broker)
        if message.topic == topic and message.message_id == message_id
    ]


def message_by_id(
    directory: Directory, message_id: str, *, topic: str | None = None
) -> Talk[StoredMessage]:
    """The message with this id, that of its producer or that of its broker.

    Without `topic` the first kind is looked for in all topics. Raises MessageNotFoundError.
    """
    text = message_id.strip()
    found = yield from _message_at(directory, text)
    if found is not None:
        return found
    brokers = yield from masters(directory)
    for name in [topic] if topic is not None else (yield from topics(directory)):
        for message in (yield from messages_by_id(brokers, name, text)):
            return message
    raise MessageNotFoundError(
        f"no message has the id {text}{f' in {topic}' if topic is not None else ''}.",
        cure="It may be deleted already, or the id is of another cluster.",
    )


def _message_at(directory: Directory, message_id: str) -> Talk[StoredMessage | None]:
    """By address and place. The address may be one that this client cannot reach: each master is
    asked, the one of that address first."""
    try:
        host, offset = parse_offset_message_id(message_id)
    except (ProtocolError, ValueError):
        return None
    if offset < 0:
        return None
    known = yield from masters(directory)
    for name, address in sorted(known.items(), key=lambda item: item[1] != str(host)):
        answer = yield Call(address, requests.message_at(topic="", physical_offset=offset))
        if answer.code == SUCCESS:
            for message in decode_records(answer.body, broker=name):
                if message.offset_message_id == message_id.upper():
                    return message
    return None


# ----------------------------------------------------------- what waits on SluiceMQ brokers


def delayed(
    directory: Directory,
    topic: str | None = None,
    *,
    key: str | None = None,
    count_max: int = 10_000,
) -> Talk[dict[str, list[bodies.WaitingMessage]]]:
    """Messages that wait for their delivery, by broker address and time; of a topic, with a
    key or message id, or all. Only SluiceMQ brokers answer."""
    found: dict[str, list[bodies.WaitingMessage]] = {}
    for address in (yield from masters(directory)).values():
        mine: list[bodies.WaitingMessage] = []
        cursor: str | None = None
        while len(mine) < count_max:
            page = min(count_max - len(mine), PAGE_MAX)
            command = requests.list_delayed(topic=topic, key=key, cursor=cursor, count_max=page)
            answer = yield from directory.ask(address, command)
            mine += bodies.decode_waiting(answer.body)
            cursor = (answer.fields or {}).get("cursor")
            if not cursor:
                break
        found[address] = sorted(mine, key=lambda item: item.due_ms)
    return found


def cancel_delayed(directory: Directory, address: str, handle: str) -> Talk[None]:
    """Never deliver a message that `delayed` lists. Raises RequestError when it is too late."""
    yield from directory.ask(address, requests.cancel_delayed(handle=handle))


def transactions(
    directory: Directory,
    *,
    group: str | None = None,
    topic: str | None = None,
    count_max: int = 10_000,
) -> Talk[dict[str, list[bodies.OpenTransaction]]]:
    """Undecided transactions by broker address, the oldest half messages first; of a producer
    group, of a topic, or all. Only SluiceMQ brokers answer."""
    found: dict[str, list[bodies.OpenTransaction]] = {}
    for address in (yield from masters(directory)).values():
        mine: list[bodies.OpenTransaction] = []
        after: int | None = None
        while len(mine) < count_max:
            page = min(count_max - len(mine), PAGE_MAX)
            command = requests.list_transactions(
                group=group, topic=topic, after=after, count_max=page
            )
            answer = yield from directory.ask(address, command)
            mine += bodies.decode_open_transactions(answer.body)
            text = (answer.fields or {}).get("after")
            if not text:
                break
            after = int(text)
        found[address] = mine
    return found


def resolve_transaction(
    directory: Directory, transaction_id: str, state: TransactionState
) -> Talk[str | None]:
    """Commit or roll back by hand; the broker's address, None when it is undecided nowhere.

    Only SluiceMQ brokers answer. Raises RequestError.
    """
    for address in (yield from masters(directory)).values():
        command = requests.resolve_transaction(transaction_id=transaction_id, outcome=int(state))
        answer = yield Call(address, command)
        if answer.code != QUERY_NOT_FOUND:
            expect_success(answer, address)
            return address
    return None
