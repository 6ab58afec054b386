"""The general path of messages into the store, and the reading of stored records.

Every message that is not a plain send takes this path: sends with special properties, messages that
consumers send back, messages that the broker itself stores.

    MessageToStore  ->  MessageIntake.rewrites, in order  ->  Store.writer.append

A rewrite receives a message before it is appended. It leaves the message unchanged, changes its
topic and queue (prepared and delayed messages wait in system topics), or raises RequestError. Plain
sends use the fast path instead (`send.SendHandlers.send_fast_path`).

A message that the broker itself stores belongs to no request whose answer would start a group
commit. `MessageIntake.append_internal` therefore schedules the commit. Code that remembers an
offset of such a message must not persist it before `Store.synced_offset` has passed the end of the
message, because a crash may lose the message.

Most large batches (SEND_BATCH_MESSAGE, 320) are handled as columns (`record.batch_columns`),
without an object for each message. Other batches are decoded message by message. Both ways have
the same results and errors; tests/unit/broker/test_send_batch.py compares them.

`DueMessageDelivery` moves delayed messages to their real topics when they are due. It copies body,
flags, times, hosts and properties from the stored record as they are; only topic, queue and tag
code are computed. The properties DELAY, REAL_TOPIC and REAL_QID stay, as in RocketMQ
(spec/delivery.md §1, §2). It creates no dict for a message, because a hundred thousand messages
may be due in the same second.
"""

import logging
import struct
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topic
from sluicemq.clock import STEP_MS
from sluicemq.errors import MessageIllegalError, ProtocolError, RequestError, StoreFullError
from sluicemq.model.bodies import Buffer
from sluicemq.model.ids import HOST_BYTES_IPV4, offset_message_ids, tag_code
from sluicemq.model.message import (
    BORN_HOST_IPV6,
    STORE_HOST_IPV6,
    TAGS,
    TRAN_MSG,
    UNIQ_KEY,
)
from sluicemq.model.properties import ACTED_ON_SEND, REFUSED_IN_BATCH, remove_on_send
from sluicemq.model.system_names import STAGING_TOPIC, is_send_forbidden_topic
from sluicemq.model.topic import RETRY_PREFIX, RETRY_TOPIC_LENGTH_MAX
from sluicemq.numbers import natural
from sluicemq.record import codec as text
from sluicemq.record.codec import decode_batch, parse_head
from sluicemq.record.layout import MAGIC_V1, PROPERTIES_BYTES_MAX, RECORD_HEAD
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.writer import BatchPart
from sluicemq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from sluicemq.record import batch_columns
    from sluicemq.record.batch_columns import Spans

log = logging.getLogger(__name__)

ILLEGAL_MESSAGE_REMARK: Final = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit {}B, msg properties length limit 32KB."
)
"""The beginning of RocketMQ's remark for MESSAGE_ILLEGAL (13), with a place for the body limit."""
_SPECIAL_NAMES: Final = tuple(f"{name}\x01".encode() for name in sorted(ACTED_ON_SEND))
"""Names of properties that a batch must not be stored with unchecked, encoded with the separator.

A search for them also finds longer names with the same end; those are then examined exactly.
"""
COLUMNS_BYTES_MIN: Final = 4096
"""Smaller batches have too few messages for columns to be faster."""
MESSAGES_PER_STEP_MAX: Final = 1000
"""Batches of more messages that are decoded message by message are decoded in several steps."""
DELIVERED_ELSEWHERE_OFFSET: Final = -1
"""Returned instead of a queue offset for a message that another master already has."""
PLAIN_SYS_FLAG_MAX: Final = 0x3
"""The largest sys_flag of a batch that becomes columns: compressed (0x1), several tags (0x2)."""
BORN_TIME_LIMIT_MS: Final = 1 << 62
"""Born times of a batch that becomes columns are lower than this, so that they fit an int64."""
REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
_IPV6: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_CHUNK_UNITS: Final = 256
_unpack_head: Final = RECORD_HEAD.struct.unpack_from
_HEAD_BYTES: Final = RECORD_HEAD.size


def choose_response_code(error: Exception) -> int:
    """Return the response code that reports `error`, which kept a message from being stored.

    It is the code of a RequestError, MESSAGE_ILLEGAL for a MessageIllegalError,
    SERVICE_NOT_AVAILABLE for a StoreFullError, and SYSTEM_ERROR for any other exception.
    """
    if isinstance(error, RequestError):
        return error.code
    if isinstance(error, MessageIllegalError):
        return ResponseCode.MESSAGE_ILLEGAL
    is_full = isinstance(error, StoreFullError)
    return ResponseCode.SERVICE_NOT_AVAILABLE if is_full else ResponseCode.SYSTEM_ERROR


@dataclass(slots=True)
class MessageToStore:
    """A message that is about to be appended to the store. Rewrites may change it."""

    topic: str
    queue_id: int
    body: bytes | memoryview
    properties: dict[str, str]
    born_time_ms: int
    born_host: bytes
    """The host of the producer, encoded by `model.ids.encode_host`."""
    store_host: bytes
    """The host of the broker, encoded by `model.ids.encode_host`."""
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_offset: int = 0
    delay_ms: int | None = None
    """If not None, the unit of the queue contains the due time in place of the tag code. The
    message is due `delay_ms` after its store time."""
    delay_start_ms: int = 0
    """The time at which the delay begins; 0 means the store time. It counts only if it differs from
    the store time by `STEP_MS` or more, which happens after the wall clock was set back."""
    answer_fields: dict[str, str] = field(default_factory=dict)
    """Fields that are added to the answer of the send."""


class AppendResult(NamedTuple):
    """Where a message was appended."""

    physical_offset: int
    """Its position in the commit log."""
    queue_offset: int
    properties_bytes: int
    """The size of its encoded properties."""


Rewrite = Callable[[MessageToStore], None]
"""A function that may change a message before it is appended. It may raise RequestError."""
OnStaged = Callable[[int, int, "Sequence[bytes] | Spans", "Sequence[Buffer] | Spans"], None]
"""A function `(queue_id, first_offset, properties, bodies)` for a batch in the staging topic."""


class BatchFields(NamedTuple):
    """The record fields that all messages of a batch share. The hosts are encoded."""

    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_host: bytes

    @property
    def can_use_columns(self) -> bool:
        """Whether a batch with these values can be stored as columns, which is faster."""
        return (
            0 <= self.sys_flag <= PLAIN_SYS_FLAG_MAX
            and 0 <= self.born_time_ms < BORN_TIME_LIMIT_MS
            and len(self.born_host) == len(self.store_host) == HOST_BYTES_IPV4
        )


class DeliveredElsewhere:
    """Waiting messages of this broker that another master has delivered already.

    While this broker was unreachable, its acting master stored them on that master
    (`replication/acting.py`). This broker skips each of them once when it is due here.
    """

    def __init__(self) -> None:
        self.remaining: Counter[tuple[str, str]] = Counter()
        """How often a message must still be skipped, by topic and message id."""

    def take(self, topic: str, unique_id: str) -> bool:
        """Return whether a due message must be skipped, because another master has delivered it.

        Its number in `remaining` is decreased then, so it is skipped as often as it was delivered.
        `topic` is the topic to which it would be delivered.
        """
        if not self.remaining[topic, unique_id]:
            return False
        self.remaining[topic, unique_id] -= 1
        return True


class MessageIntake:
    """The general path into the store, for every message that is not a plain send."""

    def __init__(self, settings: Settings, store: Store, group_commit: GroupCommit) -> None:
        """Create an intake. Components add functions to `rewrites`, which change each message."""
        self._settings = settings
        self._writer = store.writer
        self._group_commit = group_commit
        self.rewrites: list[Rewrite] = []
        """The rewrites that each message passes, in order."""
        self.body_size_counts = [0] * 64
        """The number of messages by the number of bits of (body size - 1)."""
        self.on_staged: OnStaged = lambda *_: None
        """Called for each batch that was appended to the staging topic."""
        self.delivered_elsewhere = DeliveredElsewhere()

    def append_from_client(self, message: MessageToStore) -> AppendResult:
        """Append a message of a client, without the properties that only the broker may write.

        `model.properties` lists these properties. They are removed from `message.properties`, then
        the message is rewritten and appended.

        Raises RequestError, MessageIllegalError, StoreError.
        """
        is_retry = message.topic.startswith(RETRY_PREFIX)
        remove_on_send(message.properties, is_retry=is_retry)
        return self.rewrite_and_append(message)

    def rewrite_and_append(self, message: MessageToStore) -> AppendResult:
        """Apply the rewrites to a message and append it.

        The message is committed with the answer that the caller passes to `GroupCommit`.

        Raises RequestError, MessageIllegalError, StoreError.
        """
        for rewrite in self.rewrites:
            rewrite(message)
        return self.append(message)

    def append_internal(self, message: MessageToStore) -> AppendResult:
        """Rewrite and append a message of the broker itself, and schedule a group commit.

        Raises RequestError, MessageIllegalError, StoreError.
        """
        stored = self.rewrite_and_append(message)
        self._group_commit.commit_internal()
        return stored

    def append(self, message: MessageToStore) -> AppendResult:
        """Append a message to its queue, without rewriting it and without committing it.

        The unit (the entry of the consume queue) has the tag code, the hash of the property TAGS.
        If `delay_ms` is set, it has the due time instead. Return where the message was stored.

        Raises RequestError if its properties are too large, MessageIllegalError, or StoreError.
        """
        properties = text.format_property_text(message.properties).encode("utf-8", "replace")
        self.check_properties_size(len(properties))
        physical_offset, queue_offset = self._writer.append(
            topic=message.topic,
            queue_id=message.queue_id,
            body=message.body,
            properties=properties,
            tag_code=tag_code(message.properties.get(TAGS, "")),
            flag=message.flag,
            sys_flag=message.sys_flag,
            born_time_ms=message.born_time_ms,
            born_host=message.born_host,
            store_host=message.store_host,
            reconsume_times=message.reconsume_times,
            prepared_offset=message.prepared_offset,
        )
        if message.delay_ms is not None:
            delay_ms = message.delay_ms
            # The due time is a time of the steady clock, the store time one of the wall clock.
            clock_lead_ms = message.delay_start_ms - self._writer.now_ms
            if message.delay_start_ms and abs(clock_lead_ms) >= STEP_MS:
                delay_ms += clock_lead_ms
            self._writer.delay_last_message(message.topic, message.queue_id, delay_ms)
        return AppendResult(physical_offset, queue_offset, len(properties))

    def check_properties_size(self, size: int) -> None:
        """Raise RequestError if encoded properties of `size` bytes exceed the configured limit."""
        limit = self._settings.broker.properties_length_max
        if size > limit:
            body_limit = self._settings.store.message_bytes_max
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{ILLEGAL_MESSAGE_REMARK.format(body_limit)} The properties have {size} bytes, "
                f"the limit is {limit}. Put large values into the body.",
            )

    # -------------------------------------------------------------------------------- batches

    def prepare_batch(
        self, body: Buffer, fields: BatchFields, suffix: str
    ) -> "Generator[None, None, batch_columns.BatchColumns | list[BatchPart]]":
        """Decode the body of a batch, and complete the properties of each message.

        `suffix` are the encoded properties that the broker adds to each message. This is a
        generator. Its return value is the batch as `append_batch` takes it: columns, or a list of
        messages. It yields None between the steps in which a large batch of messages that are not
        alike is decoded. Nothing is appended.

        Raises RequestError if the batch is malformed, empty or too large, or if a message has too
        large properties or must not be in a batch, and MessageIllegalError.
        """
        bytes_max = self._settings.store.message_bytes_max
        if len(body) > bytes_max:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{ILLEGAL_MESSAGE_REMARK.format(bytes_max)} The batch has {len(body)} bytes.",
            )
        try:
            # As columns, if that is possible and faster.
            if (
                self._writer.can_append_columns
                and len(body) >= COLUMNS_BYTES_MIN
                and fields.can_use_columns
            ):
                columns = yield from self._decode_columns(bytes(body), suffix.encode())
                if columns is not None:
                    return columns
            # Otherwise message by message.
            sent_messages = decode_batch(body)
        except ProtocolError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        if not sent_messages:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "The batch has no messages.")
        messages = _complete_messages(sent_messages, suffix.encode())
        self.check_properties_size(max(len(properties) for _, _, properties, _ in messages))
        return messages

    def _decode_columns(
        self, body: bytes, suffix: bytes
    ) -> "Generator[None, None, batch_columns.BatchColumns | None]":
        """Decode a batch to columns. This is a generator, which yields None between steps.

        If the messages are not alike, or a message has too large properties, a batch of up to
        `MESSAGES_PER_STEP_MAX` messages gives None: the caller then decodes it message by message.
        A larger one is decoded in steps. `suffix` are the encoded properties that the broker adds.
        Called for each large batch: keep it cheap.

        Raises RequestError, MessageIllegalError, ProtocolError.
        """
        from sluicemq.record import batch_columns  # noqa: PLC0415 - NumPy for large batches only

        properties_max = self._settings.broker.properties_length_max
        columns = batch_columns.split_batch(body, suffix, text.tag_code_of_tag)
        if columns is not None and int(columns.property_sizes.max()) <= properties_max:
            return columns
        if not batch_columns.has_more_messages(body, MESSAGES_PER_STEP_MAX):
            return None
        added = text.parse_property_text(suffix.decode())

        def complete_and_check(sent: bytes) -> bytes:
            """Return the properties to store for a message that was sent with properties `sent`."""
            properties = _complete_properties(sent, added, suffix)
            self.check_properties_size(len(properties))
            if b"\0" in properties:
                self._writer.check_sizes(0, properties)
            return properties

        return (
            yield from batch_columns.decode_in_steps(
                body, complete_and_check, text.tag_code_of_properties
            )
        )

    def append_batch(
        self,
        topic: Topic,
        queue_id: int,
        batch: "batch_columns.BatchColumns | list[BatchPart]",
        fields: BatchFields,
        id_prefix: str,
        *,
        is_brief: bool = False,
    ) -> tuple[str, int]:
        """Append all messages of a prepared batch, or none if one of them cannot be appended.

        `batch` is the result of `prepare_batch`. `id_prefix` is the encoded store host in
        hexadecimal, with which message ids begin. Return (ids, offset): the offset message ids,
        separated by commas, and the queue offset of the first message. With `is_brief`, `ids` has
        only the id of the first message.

        The messages are counted for the topic, and `on_staged` is called for a batch in the staging
        topic. The caller commits the batch. Called for each batch: keep it cheap.

        Raises MessageIllegalError, StoreError.
        """
        ids_max = 1 if is_brief else None

        # A list of messages.
        if isinstance(batch, list):
            positions, offset = self._writer.append_batch(topic.name, queue_id, batch, *fields)
            bodies = [body for _, body, _, _ in batch]
            all_properties = [properties for _, _, properties, _ in batch]
            properties_bytes = sum(map(len, all_properties))
            self._count_messages(topic, Counter(map(len, bodies)), properties_bytes)
            if topic.name == STAGING_TOPIC:
                self.on_staged(queue_id, offset, all_properties, bodies)
            id_positions = positions[:ids_max]
            encoded_positions = struct.pack(f">{len(id_positions)}q", *id_positions)
            return offset_message_ids(id_prefix, encoded_positions), offset

        # Columns.
        heads = batch.heads
        heads["sys_flag"] = fields.sys_flag
        heads["born_time"] = fields.born_time_ms
        heads["born_host"] = fields.born_host
        heads["store_host"] = fields.store_host
        column_positions, offset = self._writer.append_columns(topic.name, queue_id, batch)
        self._count_messages(topic, batch.count_body_sizes(), int(batch.property_sizes.sum()))
        if topic.name == STAGING_TOPIC:
            self.on_staged(queue_id, offset, batch.properties, batch.bodies)
        encoded_positions = column_positions[:ids_max].astype(">i8").tobytes()
        return offset_message_ids(id_prefix, encoded_positions), offset

    def _count_messages(
        self, topic: Topic, count_by_size: Mapping[int, int], properties_bytes: int
    ) -> None:
        """Add the messages of a batch to the counters of the topic and of body sizes.

        `count_by_size` maps a body size in bytes to the number of bodies of that size.
        `properties_bytes` is the size of the properties of all messages.
        """
        for size, count in count_by_size.items():
            self.body_size_counts[(size - 1).bit_length()] += count
            topic.messages_in += count
            topic.bytes_in += count * (size + topic.record_bytes)
        topic.bytes_in += properties_bytes


def _complete_messages(sent_messages: Sequence[BatchPart], suffix: bytes) -> list[BatchPart]:
    """Return the messages of a batch with the properties to store.

    As for a message that is sent alone, properties that only the broker may write are removed. Then
    the properties of the broker, which `suffix` has in encoded form, are added.

    Raises RequestError if a message cannot be part of a batch.
    """
    # All properties are searched at once, because special names are rare.
    joined_properties = b"\x02".join([properties for _, _, properties, _ in sent_messages])
    has_special_names = any(name in joined_properties for name in _SPECIAL_NAMES)
    if has_special_names:
        added = text.parse_property_text(suffix.decode())
        return [
            (flag, body, _complete_properties(properties, added, suffix), tag_code)
            for flag, body, properties, tag_code in sent_messages
        ]
    return [
        (flag, body, _terminate(properties) + suffix, tag_code)
        for flag, body, properties, tag_code in sent_messages
    ]


def _complete_properties(sent: bytes, added: Mapping[str, str], suffix: bytes) -> bytes:
    """Return the properties that are stored for a message of a batch.

    `sent` are the encoded properties of the message. `suffix` are the encoded properties that the
    broker adds, and `added` is the same as a dict.

    Raises RequestError if the message cannot be part of a batch.
    """
    if any(name in sent for name in _SPECIAL_NAMES):
        return _clean_special_properties(sent, added, suffix)
    return _terminate(sent) + suffix


def _clean_special_properties(sent: bytes, added: Mapping[str, str], suffix: bytes) -> bytes:
    """Return the properties to store for a message that was sent with the properties `sent`.

    Properties that only the broker may write are removed. The properties `added` are added, but do
    not replace others of the same name. `suffix` is their encoding. Raises RequestError if the
    message cannot be part of a batch.
    """
    properties = text.parse_property_text(sent.decode("utf-8", "replace"))
    if ACTED_ON_SEND.isdisjoint(properties):
        return _terminate(sent) + suffix
    check_batch_properties(properties)
    remove_on_send(properties)
    for name, added_value in added.items():
        properties.setdefault(name, added_value)
    return text.format_property_text(properties).encode("utf-8", "replace")


def _terminate(properties: bytes) -> bytes:
    """Return encoded properties that are empty or end with a separator."""
    return properties if properties[-1:] in (b"", b"\x02") else properties + b"\x02"


def check_batch_properties(properties: dict[str, str]) -> None:
    """Raise RequestError if properties mark a transactional or delayed message.

    No message of a batch can be prepared or delayed (spec/store.md §2.5). Storing it as an ordinary
    message would deliver it at once.
    """
    if properties.get(TRAN_MSG, "").lower() == "true":
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            "a batch cannot be part of a transaction (property TRAN_MSG=true). The batch was not "
            "stored. Send messages of transactions one by one.",
        )
    for name in REFUSED_IN_BATCH.intersection(properties) - {TRAN_MSG}:
        if properties[name] != "0":
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a message of a batch cannot be delayed (property {name}={properties[name]}). "
                "The batch was not stored. Send delayed messages one by one.",
            )


class Record(NamedTuple):
    """The fields of a stored record.

    `topic_view` and `body` are slices of the buffer that was read, usually of the mapped log. The
    hosts and `properties` are encoded copies.
    """

    size_bytes: int
    body_crc: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    store_host: bytes
    reconsume_times: int
    topic_view: memoryview
    body: memoryview
    properties: bytes

    @property
    def topic(self) -> str:
        """The name of the topic; invalid UTF-8 is replaced."""
        return str(self.topic_view, "utf-8", "replace")

    def get_text(self, name: str) -> str:
        """Return the value of a property, or "" if the message does not have it."""
        return (text.find_property(self.properties, name.encode()) or b"").decode(
            "utf-8", "replace"
        )

    def get_number(self, name: str) -> int | None:
        """Return the value of a property as an int.

        Return None if the message does not have the property, or if its value is not a decimal
        number of at most 18 digits without a sign.
        """
        digits = text.find_property(self.properties, name.encode())
        if digits is None or not digits.isdigit() or len(digits) > 18:
            return None
        return int(digits)

    def decode_properties(self) -> dict[str, str]:
        """Return all properties as a new dict."""
        return text.parse_property_text(self.properties.decode("utf-8", "replace"))

    def copy_to(self, topic: str, queue_id: int, properties: dict[str, str]) -> MessageToStore:
        """Return a message for another queue, with this record's body, flags, times and hosts.

        The body is not copied: it stays a slice of the buffer that was read.
        """
        return MessageToStore(
            topic=topic,
            queue_id=queue_id,
            body=self.body,
            properties=properties,
            born_time_ms=self.born_time_ms,
            born_host=self.born_host,
            store_host=self.store_host,
            flag=self.flag,
            sys_flag=self.sys_flag,
            reconsume_times=self.reconsume_times,
        )


def read_record(view: memoryview | None) -> Record | None:
    """Return the record at the beginning of `view`.

    Return None if `view` is None or does not begin with a valid record. Called for each message
    that becomes due: keep it cheap.
    """
    if view is None:
        return None
    try:
        (
            size_bytes,
            magic,
            body_crc,
            _,
            flag,
            queue_offset,
            physical_offset,
            sys_flag,
            born_time_ms,
            born_host,
            store_time_ms,
            store_host,
            reconsume_times,
            _,
            body_bytes,
        ) = _unpack_head(view)
        if magic == MAGIC_V1 and not sys_flag & _IPV6:
            body_end = _HEAD_BYTES + body_bytes
            topic_end = body_end + 1 + view[body_end]
            return Record(
                size_bytes,
                body_crc,
                flag,
                queue_offset,
                physical_offset,
                sys_flag,
                born_time_ms,
                born_host,
                store_time_ms,
                store_host,
                reconsume_times,
                view[body_end + 1 : topic_end],
                view[_HEAD_BYTES:body_end],
                bytes(view[topic_end + 2 : size_bytes]),
            )
        head = parse_head(view)
    except (ProtocolError, IndexError, ValueError):
        return None
    return Record(
        size_bytes=head.size_bytes,
        body_crc=head.body_crc,
        flag=head.flag,
        queue_offset=head.queue_offset,
        physical_offset=head.physical_offset,
        sys_flag=head.sys_flag,
        born_time_ms=head.born_time_ms,
        born_host=bytes(view[head.born_host]),
        store_time_ms=head.store_time_ms,
        store_host=bytes(view[head.store_host]),
        reconsume_times=head.reconsume_times,
        topic_view=view[head.topic],
        body=view[head.body],
        properties=bytes(view[head.properties]),
    )


class QueueEntry(NamedTuple):
    """A unit of a queue, with the record that it locates."""

    offset: int
    position: int
    tag_code: int
    record: Record | None
    """None if the unit is blank, or if its record is deleted or unreadable."""


def iter_queue(
    store: Store,
    topic: str,
    queue_id: int,
    offset: int,
    units: Callable[[str, int, int, int], Buffer] | None = None,
) -> Iterator[QueueEntry]:
    """Yield the entries of a queue from `offset` to the last visible one, each with its record.

    `units(topic, queue_id, offset, count)` reads the entries; None means `store.reader.units`.
    """
    read_units = units or store.reader.units
    while len(chunk := read_units(topic, queue_id, offset, _CHUNK_UNITS)):
        # A unit is the 20-byte entry of a queue: position and size of a record, and its tag code.
        for position, size_bytes, unit_tag_code in UNIT.iter_unpack(chunk):
            record = None
            if size_bytes != BLANK_SIZE:
                record = read_record(store.reader.view_at(position))
            yield QueueEntry(offset, position, unit_tag_code, record)
            offset += 1


_decode_cached: Final = lru_cache(maxsize=4096)(partial(str, encoding="utf-8", errors="replace"))


def decode_topic_name(name: bytes) -> str:
    """Return a topic name from the bytes of a property.

    The result is cached unless the name is longer than the name of any topic can be.
    """
    if len(name) > RETRY_TOPIC_LENGTH_MAX:
        return name.decode("utf-8", "replace")
    return _decode_cached(name)


DeliveryGate = Callable[[Record], Callable[[int], object] | None]
"""A function that decides whether a due message is appended to its real topic.

It returns a callback that receives the queue offset of the message, or None to drop the message.
"""


class DueMessageDelivery:
    """Appends due messages to their real topics.

    `commit` commits what was appended and returns whether it was stored. If it was not, no message
    was delivered and the caller must try again. `gates` maps topics to their delivery gates.
    """

    def __init__(
        self,
        store: Store,
        group_commit: GroupCommit,
        delivered_elsewhere: DeliveredElsewhere | None = None,
    ) -> None:
        """Create a delivery into `store` that skips the messages in `delivered_elsewhere`.

        None means that no message is skipped. `group_commit` commits what was appended.
        """
        self._append = store.writer.append
        self._delivered_elsewhere = delivered_elsewhere or DeliveredElsewhere()
        self.commit = group_commit.commit_now
        self.gates: dict[str, DeliveryGate] = {}

    def deliver(self, record: Record, added: bytes = b"") -> str | None:
        """Append a due message to its real topic and return the name of that topic.

        The properties REAL_TOPIC and REAL_QID name the topic and queue. `added` are further encoded
        properties. If the topic has a gate, it may drop the message; otherwise its callback gets
        the queue offset. The topic is also returned if the gate drops the message or another master
        has delivered it. Return None, and log the reason, if the message can never be stored there.
        Called for each due message: keep it cheap.

        Raises StoreError if the store accepts no messages at the moment.
        """
        properties = record.properties
        encoded_topic = text.find_property(properties, REAL_TOPIC)
        queue_id = natural(text.find_property(properties, REAL_QUEUE) or b"")
        if encoded_topic is None or queue_id is None:
            log.error("skipped a due message without valid properties REAL_TOPIC and REAL_QID")
            return None
        topic = decode_topic_name(encoded_topic)
        if is_send_forbidden_topic(topic):
            log.error("skipped a due message of topic %s, which accepts no messages", topic)
            return None

        # Ask the gate of the topic, if it has one.
        on_appended = None
        gate = self.gates.get(topic)
        if gate is not None:
            on_appended = gate(record)
            if on_appended is None:  # the gate drops the message
                return topic

        offset = self.append_copy(record, topic, queue_id, added, record.reconsume_times)
        if offset is None:
            return None
        if on_appended is not None:
            on_appended(offset)
        return topic

    def append_copy(
        self, record: Record, topic: str, queue_id: int, added: bytes, reconsume_times: int
    ) -> int | None:
        """Append a copy of a message to a queue and return its queue offset.

        The copy has `reconsume_times`, and otherwise the fields of `record`. `added` are encoded
        properties that are appended to those of the message if a record has room for them.

        Return `DELIVERED_ELSEWHERE_OFFSET`, without appending, if another master has the message.
        Return None, and log the reason, if the message can never be stored there. Called for each
        due message: keep it cheap.

        Raises StoreError if the store accepts no messages at the moment.
        """
        elsewhere = self._delivered_elsewhere
        if elsewhere.remaining and elsewhere.take(topic, record.get_text(UNIQ_KEY)):
            return DELIVERED_ELSEWHERE_OFFSET

        properties = record.properties
        if added and len(properties) + len(added) < PROPERTIES_BYTES_MAX:
            if properties[-1:] != b"\x02":
                properties += b"\x02"  # the separator
            properties += added
        try:
            # Positional, because this runs for each due message.
            _, offset = self._append(
                topic,
                queue_id,
                record.body,
                properties,
                text.tag_code_of_properties(properties),
                record.flag,
                record.sys_flag,
                record.born_time_ms,
                record.born_host,
                record.store_host,
                reconsume_times,
            )
        except MessageIllegalError as error:
            log.error("cannot store a due message in topic %s: %s", topic, error)
            return None
        return offset
