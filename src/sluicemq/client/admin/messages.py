"""Operations on messages: finding, reading, waiting messages and transactions.

A broker's index contains hashes of keys, so each message that it finds is checked here for the key.
A message id is 32 or 56 hexadecimal digits and may be made by the producer (the unique key), or by
the broker (its address and the position in its log). The second kind is tried first: it is right
only if the message at that position has this id.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from sluicemq.client.admin.topics import (
    ask_each,
    masters,
    masters_of_topic,
    offset_by_time,
    queues,
    topics,
)
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import (
    QUERY_NOT_FOUND,
    PullStatus,
    expect_success,
    parse_pull_response,
)
from sluicemq.client.core.transactions import TransactionState
from sluicemq.errors import (
    ConfigurationError,
    MessageNotFoundError,
    ProtocolError,
)
from sluicemq.filter.selector import explain
from sluicemq.filter.subscriptions import compile_sql92, parse_subscription
from sluicemq.model.ids import parse_offset_message_id
from sluicemq.model.message import StoredMessage
from sluicemq.model.system_names import TOOLS_GROUP, is_send_forbidden_topic
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command

T = TypeVar("T")
TIME_MAX_MS: Final = (1 << 63) - 1
COUNT_MAX: Final = 64
"""The number of messages that a broker returns at most, unless maxMsgsNumBatch is set."""
PAGE_MAX: Final = 1000
LISTED_MAX: Final = 10_000
PULL_MAX: Final = 1024
READ_MAX: Final = 20_000
SCAN_PAGE: Final = 256
"""The number of messages that `messages_between` reads at once."""


def messages_by_key(
    directory: Directory,
    topic: str,
    key: str,
    *,
    begin_ms: int = 0,
    end_ms: int = TIME_MAX_MS,
    count_max: int = COUNT_MAX,
) -> Conversation[list[StoredMessage]]:
    """Return messages of a topic with a key, the newest first.

    They were stored from `begin_ms` to `end_ms`. At most `count_max` are returned.

    Raises ConfigurationError for an invalid key, range or count, RouteNotFoundError if the topic
    does not exist, RequestError if a broker has no key index, or is still building it.
    """
    _check_key_query(key, begin_ms, end_ms, count_max)
    brokers = yield from masters_of_topic(directory, topic)
    command = requests.messages_by_key(topic, key, begin_ms, end_ms, count_max, is_unique=False)
    matching_messages = [
        message
        for message in (yield from _query_messages(brokers, command))
        if message.topic == topic and (key in message.keys or message.message_id == key)
    ]
    matching_messages.sort(key=lambda message: message.store_time_ms, reverse=True)
    return matching_messages[:count_max]


def _check_key_query(key: str, begin_ms: int, end_ms: int, count_max: int) -> None:
    """Raise ConfigurationError for an invalid key, range of time or count."""
    if not key or " " in key:
        raise ConfigurationError(
            f"{key!r} is not a valid key.", fix="Use one word: keys are separated by spaces."
        )
    if begin_ms > end_ms:
        raise ConfigurationError(
            f"the range of time begins at {begin_ms} ms, after its end at {end_ms} ms.",
            fix="Exchange the two times.",
        )
    if count_max < 1:
        raise ConfigurationError(
            f"count_max must be at least 1, got {count_max}.", fix="Use 1 or more."
        )


def _query_messages(
    brokers: Mapping[str, str],
    command: Command,
    absent: Collection[int] | None = (QUERY_NOT_FOUND,),
) -> Conversation[list[StoredMessage]]:
    """Return the messages with which brokers answer a request. See `ask_each`."""
    messages = []
    for broker, _, answer in (yield from ask_each(brokers, command, absent=absent)):
        messages += decode_records(answer.body, broker=broker)
    return messages


def messages_by_id(
    brokers: Mapping[str, str],
    topic: str,
    message_id: str,
    absent: Collection[int] | None = (QUERY_NOT_FOUND,),
) -> Conversation[list[StoredMessage]]:
    """Return messages of a topic with a producer's message id, of brokers given as name -> address.

    `absent` is that of `ask_each`.
    """
    command = requests.messages_by_key(topic, message_id, 0, TIME_MAX_MS, COUNT_MAX, is_unique=True)
    indexed_messages = yield from _query_messages(brokers, command, absent)
    return [
        message
        for message in indexed_messages
        if message.topic == topic and message.message_id == message_id
    ]


def messages_with_id(
    directory: Directory, topic: str, message_id: str
) -> Conversation[list[StoredMessage]]:
    """Return all messages of a topic with a producer's message id. Raises RouteNotFoundError."""
    return (
        yield from messages_by_id(
            (yield from masters_of_topic(directory, topic)), topic, message_id
        )
    )


def message_by_id(
    directory: Directory, message_id: str, *, topic: str | None = None, anywhere: bool = True
) -> Conversation[StoredMessage]:
    """Return the message with an id that its producer or its broker made.

    Without `topic`, an id of a producer is searched in all topics of all brokers, unless `anywhere`
    is False: a server that asks on behalf of others should not send that many requests. Raises
    MessageNotFoundError.
    """
    stripped_id = message_id.strip()
    brokers = yield from masters(directory)
    message = yield from _find_by_broker_id(brokers, stripped_id)
    if message is not None:
        return message
    if topic is None and not anywhere:
        raise MessageNotFoundError(
            f"no broker has a message at {stripped_id}.",
            fix="Name its topic. The id of a producer can only be found in a topic.",
        )
    names = [topic] if topic is not None else (yield from topics(directory))
    for name in sorted(names, key=is_send_forbidden_topic):  # system topics last
        for message in (yield from messages_by_id(brokers, name, stripped_id)):
            return message
    in_topic = f" in {topic}" if topic is not None else ""
    raise MessageNotFoundError(
        f"no message with the ID {stripped_id!r} was found{in_topic}.",
        fix="Check the ID and the cluster; the message may also have been deleted.",
    )


def _find_by_broker_id(
    brokers: Mapping[str, str], message_id: str
) -> Conversation[StoredMessage | None]:
    """Return the message with an id that its broker made, None if it is not found.

    Such an id contains the broker's address and the message's position in the commit log.
    """
    try:
        host, physical_offset = parse_offset_message_id(message_id)
    except (ProtocolError, ValueError):  # an id that a producer made
        return None
    if physical_offset < 0:
        return None
    command = requests.message_at(topic="", physical_offset=physical_offset)
    # The client may not reach the address in the id, so each master is asked, that one first.
    for name, address in sorted(brokers.items(), key=lambda broker: broker[1] != str(host)):
        for message in (yield from _query_messages({name: address}, command, None)):
            if message.offset_message_id == message_id.upper():
                return message
    return None


# ------------------------------------------------------------------------- by offset


def read_range(
    directory: Directory,
    queue: MessageQueue,
    low: int,
    high: int,
    take: Callable[[list[StoredMessage]], bool],
) -> Conversation[None]:
    """Read the messages [low, high) of a queue, and call `take(page)` while it returns True.

    Messages that are no longer stored are left out.
    """
    everything = parse_subscription(queue.topic, None)
    while low < high:
        count = min(PULL_MAX, high - low)
        command = requests.pull(
            TOOLS_GROUP, queue, low, count_max=count, subscription=everything, bulk=True
        )
        address = yield from directory.get_read_address(queue)
        answer = parse_pull_response((yield Call(address, command)), queue.broker)
        if answer.status is PullStatus.FOUND:
            page = decode_records(answer.data, broker=queue.broker)
            messages = [message for message in page if message.queue_offset < high]
            if messages and not take(messages):
                return
        elif answer.next_offset <= low:
            return
        low = answer.next_offset


@dataclass(frozen=True, slots=True)
class Scan:
    """The matching messages of a topic, newest first, and how many messages were read."""

    messages: list[StoredMessage]
    read: int


def messages_between(
    directory: Directory,
    topic: str,
    begin_ms: int,
    end_ms: int,
    *,
    where: str = "",
    count_max: int = COUNT_MAX,
    read_max: int = READ_MAX,
) -> Conversation[Scan]:
    """Return messages of a topic stored from `begin_ms` to `end_ms` that match an SQL92 expression.

    "" as `where` matches all messages. The newest messages of each queue are read, and the
    expression is evaluated here, so it works with any broker. At most `read_max` messages are read,
    and `count_max` returned. Raises FilterSyntaxError, RouteNotFoundError.
    """
    selector = compile_sql92(where) if where else None

    def is_match(message: StoredMessage) -> bool:
        if not begin_ms <= message.store_time_ms <= end_ms:
            return False
        return selector is None or explain(selector, message.properties).matches

    ranges = []
    for queue in (yield from queues(directory, topic)):
        start = yield from offset_by_time(directory, queue, begin_ms)
        end = yield from offset_by_time(directory, queue, end_ms + 1)
        ranges.append((queue, start, end))
    read_max_per_queue = max(1, read_max // max(1, len(ranges)))
    newest: list[StoredMessage] = []
    read_count = 0
    for queue, start, end in ranges:
        offset_range = max(start, end - read_max_per_queue), end
        scan = yield from _scan_newest(directory, queue, offset_range, is_match, count_max)
        newest += scan.messages
        read_count += scan.read
    newest.sort(key=lambda message: message.store_time_ms, reverse=True)
    return Scan(newest[:count_max], read_count)


def _scan_newest(
    directory: Directory,
    queue: MessageQueue,
    offset_range: tuple[int, int],
    is_match: Callable[[StoredMessage], bool],
    count_max: int,
) -> Conversation[Scan]:
    """Read the messages [start, end) of a queue backwards, page by page.

    Return the newest messages for which `is_match` is True. Stop reading when there are `count_max`
    of them.
    """
    start, end = offset_range
    matching: list[StoredMessage] = []
    read_count = 0
    while end > start and len(matching) < count_max:
        page: list[StoredMessage] = []

        def take(messages: list[StoredMessage], page: list[StoredMessage] = page) -> bool:
            page += messages
            return True

        page_start = max(start, end - SCAN_PAGE)
        yield from read_range(directory, queue, page_start, end, take)
        end = page_start
        read_count += len(page)
        matching += [message for message in reversed(page) if is_match(message)]
    return Scan(matching[:count_max], read_count)


# ------------------------------------------------- waiting messages on SluiceMQ brokers


def delayed(
    directory: Directory,
    topic: str | None = None,
    *,
    key: str | None = None,
    count_max: int = LISTED_MAX,
    address: str | None = None,
) -> Conversation[dict[str, list[bodies.WaitingMessage]]]:
    """Return messages that wait for their delivery, by broker address, sorted by time.

    `topic` and `key`, which may be a message id, select messages; `address` selects one broker.
    None means all. Only SluiceMQ brokers answer. Raises RequestError.
    """

    def make_page_request(cursor: str | None, count: int) -> Command:
        return requests.list_delayed(topic=topic, key=key, cursor=cursor, count_max=count)

    decode = bodies.decode_waiting
    waiting_by_broker = yield from _list_pages(
        directory, make_page_request, "cursor", decode, count_max, address
    )
    for waiting in waiting_by_broker.values():
        waiting.sort(key=lambda message: message.due_ms)
    return waiting_by_broker


def _list_pages(
    directory: Directory,
    make_page_request: Callable[[str | None, int], Command],
    cursor_field: str,
    decode: Callable[[bytes | memoryview], list[T]],
    count_max: int,
    only_address: str | None,
) -> Conversation[dict[str, list[T]]]:
    """Return what brokers list in pages, by broker address.

    `make_page_request(cursor, count)` makes the request for `count` items from a cursor on, where
    None is the beginning. The field `cursor_field` of a response contains the cursor of the next
    page. `only_address` is the address of the only broker to ask; None means every master.
    """
    brokers = {"": only_address} if only_address else (yield from masters(directory))
    items_by_broker: dict[str, list[T]] = {}
    for address in brokers.values():
        listed: list[T] = []
        cursor: str | None = None
        while len(listed) < count_max:
            command = make_page_request(cursor, min(count_max - len(listed), PAGE_MAX))
            answer = yield from directory.call(address, command)
            listed += decode(answer.body)
            cursor = (answer.fields or {}).get(cursor_field)
            if not cursor:
                break
        items_by_broker[address] = listed
    return items_by_broker


def cancel_delayed(directory: Directory, address: str, handle: str) -> Conversation[None]:
    """Cancel the delivery of a message that `delayed` lists.

    Raises RequestError if it is too late.
    """
    yield from directory.call(address, requests.cancel_delayed(handle=handle))


def transactions(
    directory: Directory,
    *,
    group: str | None = None,
    topic: str | None = None,
    count_max: int = LISTED_MAX,
    address: str | None = None,
) -> Conversation[dict[str, list[bodies.OpenTransaction]]]:
    """Return open transactions by broker address, those with the oldest prepared messages first.

    `group`, the producer group, and `topic` select transactions; `address` selects one broker. None
    means all. Only SluiceMQ brokers answer. Raises RequestError.
    """

    def make_page_request(after: str | None, count: int) -> Command:
        return requests.list_transactions(
            group=group, topic=topic, after=int(after) if after else None, count_max=count
        )

    decode = bodies.decode_open_transactions
    return (
        yield from _list_pages(directory, make_page_request, "after", decode, count_max, address)
    )


def resolve_transaction(
    directory: Directory,
    transaction_id: str,
    state: TransactionState,
    *,
    address: str | None = None,
) -> Conversation[str | None]:
    """Commit or roll back an open transaction, at one broker or at the first master that knows it.

    Return the broker's address, None if no broker has it open. A send that was retried at another
    broker has a transaction with this id at both. Only SluiceMQ brokers answer. Raises
    RequestError.
    """
    brokers = [address] if address else list((yield from masters(directory)).values())
    for broker in brokers:
        command = requests.resolve_transaction(transaction_id=transaction_id, outcome=int(state))
        answer = yield Call(broker, command)
        if answer.code != QUERY_NOT_FOUND:
            expect_success(answer, broker)
            return broker
    return None
