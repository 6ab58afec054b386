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
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, MessageQueue
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
    """Return the messages of a topic that have a key or a producer's message id, the newest first.

    Only messages stored from `begin_ms` to `end_ms`, both inclusive, are returned, and at most
    `count_max` of them.

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
    """Raise ConfigurationError if a search by key is invalid.

    A key is not empty and has no space. `begin_ms` must not be after `end_ms`, and `count_max` must
    be at least 1.
    """
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
    ignored_codes: Collection[int] | None = (QUERY_NOT_FOUND,),
) -> Conversation[list[StoredMessage]]:
    """Send a request to each broker, and return the messages of all responses.

    `brokers` maps names to addresses. Brokers that answer with a code in `ignored_codes` have no
    messages; None means any code. Raises RequestError for other codes.
    """
    messages = []
    for broker, _, answer in (yield from ask_each(brokers, command, ignored_codes=ignored_codes)):
        messages += decode_records(answer.body, broker=broker)
    return messages


def messages_by_id(
    brokers: Mapping[str, str],
    topic: str,
    message_id: str,
    ignored_codes: Collection[int] | None = (QUERY_NOT_FOUND,),
) -> Conversation[list[StoredMessage]]:
    """Return the messages of a topic that have a message id of a producer.

    `brokers` maps the names of the brokers to ask to their addresses. Brokers that answer with a
    code in `ignored_codes` have no messages; None means any code. A message that was sent twice has
    the same id twice.
    """
    command = requests.messages_by_key(topic, message_id, 0, TIME_MAX_MS, COUNT_MAX, is_unique=True)
    indexed_messages = yield from _query_messages(brokers, command, ignored_codes)
    return [
        message
        for message in indexed_messages
        if message.topic == topic and message.message_id == message_id
    ]


def messages_with_id(
    directory: Directory, topic: str, message_id: str
) -> Conversation[list[StoredMessage]]:
    """Return all messages of a topic that have a message id of a producer.

    Raises RouteNotFoundError if the topic does not exist.
    """
    brokers = yield from masters_of_topic(directory, topic)
    return (yield from messages_by_id(brokers, topic, message_id))


def message_by_id(
    directory: Directory, message_id: str, *, topic: str | None = None, anywhere: bool = True
) -> Conversation[StoredMessage]:
    """Return the message with an id, which its producer or its broker made.

    An id of a broker contains the message's position. An id of a producer is searched in `topic`,
    or in all topics if `topic` is None and `anywhere` is True. A server that asks for its users
    passes False, because such a search sends many requests.

    Raises MessageNotFoundError if the message is not found.
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
    for name in sorted(names, key=_search_rank):
        messages = yield from messages_by_id(brokers, name, stripped_id)
        if messages:
            return messages[0]
    in_topic = f" in {topic}" if topic is not None else ""
    raise MessageNotFoundError(
        f"no message with the ID {stripped_id!r} was found{in_topic}.",
        fix="Check the ID and the cluster; the message may also have been deleted.",
    )


def _search_rank(topic: str) -> int:
    """Return when to search a topic for an id: topics of users first, system topics last.

    Retry and dead-letter topics are between them. They have copies with the id of the original.
    """
    if is_send_forbidden_topic(topic):
        return 2
    return 1 if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) else 0


def _find_by_broker_id(
    brokers: Mapping[str, str], message_id: str
) -> Conversation[StoredMessage | None]:
    """Return the message with an id that a broker made, None if it is not found.

    Such an id contains the broker's address and the message's position in the commit log. An id of
    a producer gives None. `brokers` maps names to addresses.
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
    """Read the messages of a queue from `low` to `high` (exclusive), and pass them to `take`.

    `take(messages)` is called for each page, never with an empty list. Reading ends early when it
    returns False. Messages that are no longer stored are left out.
    """
    everything = parse_subscription(queue.topic, None)
    while low < high:
        count = min(PULL_MAX, high - low)
        command = requests.pull(
            TOOLS_GROUP, queue, low, count_max=count, subscription=everything, bulk=True
        )
        address = yield from directory.get_read_address(queue)
        response = yield Call(address, command)
        answer = parse_pull_response(response, queue.broker)
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
    """Return the messages of a topic that were stored in a range of time and match an expression.

    The range is from `begin_ms` to `end_ms`, both inclusive. `where` is an SQL92 expression; ""
    matches all messages. The expression is evaluated in this process, so it works with any broker.
    At most `read_max` messages are read, the newest of each queue in equal shares. At most
    `count_max` are returned, the newest first. `Scan.read` is the number of messages read.

    Raises FilterSyntaxError, RouteNotFoundError.
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
    """Read a range of a queue backwards, page by page, until `count_max` messages match.

    `offset_range` is (first offset, offset after the last). Returns the newest messages for which
    `is_match` is True, the newest first, and the number of messages that were read.
    """
    start, end = offset_range
    matching: list[StoredMessage] = []
    read_count = 0
    while end > start and len(matching) < count_max:
        page: list[StoredMessage] = []

        # The default argument binds the page of this round.
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
    """Return broker address -> messages that wait for their delivery time, the earliest first.

    `topic`, `key` (a key or a message id) and `address` (of one broker) select messages; None means
    all. At most `count_max` messages of each broker are returned. Only SluiceMQ brokers answer.
    Raises RequestError.
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
    """Request a list from brokers page by page, and return broker address -> its items.

    `make_page_request(cursor, count)` makes the request for the next `count` items after a cursor;
    None is the beginning of the list. A response has the cursor of the next page in its field
    `cursor_field`, and no such field on the last page. At most `count_max` items of a broker are
    returned. `only_address` is the address of the only broker to ask; None means every master.
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
    """Return broker address -> transactions that are still open there, the oldest first.

    An open transaction is neither committed nor rolled back. `group` (the producer group), `topic`
    and `address` (of one broker) select transactions; None means all. At most `count_max` of each
    broker are returned. Only SluiceMQ brokers answer. Raises RequestError.
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
    """Commit or roll back an open transaction, and return the address of the broker that did it.

    Only the first broker that knows the transaction is told. It can be open at two brokers if its
    send was retried; then call this function again. `address` limits this to one broker; None means
    every master. Returns None if no broker has the transaction open. Only SluiceMQ brokers answer.
    Raises RequestError.
    """
    if address:
        addresses = [address]
    else:
        masters_by_name = yield from masters(directory)
        addresses = list(masters_by_name.values())
    for broker in addresses:
        command = requests.resolve_transaction(transaction_id=transaction_id, outcome=int(state))
        answer = yield Call(broker, command)
        if answer.code != QUERY_NOT_FOUND:
            expect_success(answer, broker)
            return broker
    return None
