"""Appending messages: any number of `append` calls, then one write for all of them.

    append   puts the parts of the record on a list, and its unit on the queue's tail; nothing is
             written, and no reader can see the message
    commit   joins the list and passes it to the log, which writes it with one pwrite for each file

The messages between two commits are a *commit group*. (Names that are shared with the compiled
engine say `turn`: `turn_start` is the position at which the group begins.) If the write fails, the
group never existed: queue offsets, tails and positions are reset, the log zeroes what may have
reached the file, and the next group succeeds if there is room by then.

All messages of a group have the same store time, that of the first append. If the clock goes back
by less than a minute, the store time stays the same until the clock has caught up, because store
times of a queue must not decrease: searching by time relies on it. A larger step is followed.

`append` is the hot path: one dict lookup, one pack for the head of the record and one for the unit,
one checksum, and no object that outlives the call. Records in any other form (IPv6, transactions,
the checksum property) are encoded by `record.codec`.
"""

import logging
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.engine.state import TurnState
from sluicemq.errors import MessageIllegalError, ProtocolError, StoreError
from sluicemq.model.ids import HOST_BYTES_IPV4
from sluicemq.model.message import BORN_HOST_IPV6, INNER_BATCH, PREPARED, STORE_HOST_IPV6
from sluicemq.record.codec import encode_record, fill_checksum, reserve_checksum
from sluicemq.record.layout import (
    BLANK,
    CRC_MASK,
    MAGIC_BLANK,
    MAGIC_V2,
    PROPERTIES_BYTES_MAX,
    RECORD_HEAD,
    Layout,
)
from sluicemq.store.index.known import KnownKeys
from sluicemq.store.log import BLANK_BYTES, ZEROS_NEVER_STORED, CommitLog
from sluicemq.store.queues import TAIL_BYTES_MAX, UNIT, UNIT_BYTES, ConsumeQueues, Queue

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import BatchColumns
    from sluicemq.record.table import Positions

logger = logging.getLogger(__name__)

CLOCK_STEP_BACK_MAX_MS: Final = 60_000
"""If the clock goes back by more than this, store times follow it."""
_UNCOMMON_FLAGS: Final = PREPARED | INNER_BATCH | BORN_HOST_IPV6 | STORE_HOST_IPV6
_IPV4_HOSTS_BYTES: Final = 2 * HOST_BYTES_IPV4
_TAG_CODE_BYTES: Final = 8
_pack_head: Final = RECORD_HEAD.struct.pack
_SHARED_FIELDS: Final = RECORD_HEAD.fields_between("sys_flag", "prepared_offset")
_pack_shared: Final = _SHARED_FIELDS.struct.pack
_pack_batch_head: Final = Layout(
    *RECORD_HEAD.fields_between("size", "physical_offset").fields,
    ("shared", f"V{_SHARED_FIELDS.size}"),
    ("body_length", "i4"),
).struct.pack
"""Packs the head of a record of a batch. Fields that all records share are one packed piece."""
_pack_length: Final = struct.Struct(">h").pack
_pack_unit: Final = UNIT.pack
_crc32: Final = zlib.crc32

BatchPart = tuple[int, bytes | memoryview, bytes, int]
"""One message of a batch: (flag, body, encoded properties, tag code)."""


class Writer(TurnState):
    """Appends records to the end of the log, and collects them until they are committed."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        config: StoreConfig,
        clock: Clock,
        time_ms: int,
        known_keys: KnownKeys,
    ) -> None:
        """Create a writer that appends at the end of `log`. Log and queues must be loaded.

        `time_ms` is the store time of the last record in the log (0 if there is none). `known_keys`
        receives the message keys of batches, so that the key index need not read them again.
        """
        self._log = log
        self._queues = queues
        self.by_key = queues.by_key
        self._clock = clock
        self._known_keys = known_keys
        self._adds_checksum = config.checksum_property
        self.can_append_columns = not config.checksum_property
        """Whether `append_columns` can be used."""
        # With the checksum property no record takes the fast path: no length of hosts equals -1.
        self._common_hosts_bytes = -1 if config.checksum_property else _IPV4_HOSTS_BYTES
        self.body_bytes_max = config.message_bytes_max
        self._file_bytes = config.commit_log_file_bytes
        self.parts = []
        # (position, bytes) of the files that the records of this group have filled.
        self._pieces: list[tuple[int, bytes]] = []
        self.is_following = False
        """Whether a master writes the log. The writer then refuses messages."""
        self.continue_at_log_end()
        self.now_ms = 0
        self.last_time_ms = time_ms
        self.touched: list[Queue] = []

    def continue_at_log_end(self) -> None:
        """Set the position of the next record to the log's end. Call this when the end has changed.

        Also sets `room_end`, the position in the last file behind which there is no room for
        records. All groups must have been committed.
        """
        log = self._log
        self.position = self.turn_start = log.written_offset
        # Each record ends at least 8 bytes before the end of its file.
        file_end = self.position + -self.position % self._file_bytes  # rounded up
        # At the very end of a file there is no room, unless the next file exists already.
        if file_end == self.position and log.segments.at(self.position) is not None:
            file_end += self._file_bytes
        self.room_end = self._committed_room_end = file_end - BLANK_BYTES

    def append(
        self,
        topic: str,
        queue_id: int,
        body: bytes | bytearray | memoryview,
        properties: bytes,
        tag_code: int,
        flag: int,
        sys_flag: int,
        born_time_ms: int,
        born_host: bytes,
        store_host: bytes,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> tuple[int, int]:
        """Append a message to the current commit group; return (position in the log, queue offset).

        HOT. The queue is created if it does not exist. The first message of a group begins the
        group. Nothing is written before `commit`, and `body` must not change before that.
        `properties` and the hosts must be encoded already; the bits of `sys_flag` for IPv6 hosts
        are set from the lengths of the hosts. A prepared or rolled-back message gets no unit, and
        its queue offset is 0.

        Raises MessageIllegalError if the message exceeds a limit, and StoreFullError or StoreError
        if the store accepts no writes. Then no message was appended.
        """
        queue = self.by_key.get((topic, queue_id))
        if queue is None:
            queue = self._queues.get_or_create((topic, queue_id))
        position = self.position
        if position == self.turn_start:
            self.begin_group()
        if (
            sys_flag & _UNCOMMON_FLAGS
            or len(born_host) + len(store_host) != self._common_hosts_bytes
        ):
            if self._adds_checksum:
                properties = reserve_checksum(properties)
            message = (flag, body, properties, tag_code)
            positions, offset = self._append_encoded(
                queue,
                [message],
                sys_flag,
                born_time_ms,
                born_host,
                store_host,
                reconsume_times=reconsume_times,
                prepared_offset=prepared_offset,
            )
            return positions[0], offset

        # The common case: check the sizes, and find the place of the record.
        body_bytes = len(body)
        properties_bytes = len(properties)
        size = queue.fixed_bytes + body_bytes + properties_bytes
        if (
            body_bytes > self.body_bytes_max
            or properties_bytes > PROPERTIES_BYTES_MAX
            or b"\0" in properties
        ):
            self.check_sizes(body_bytes, properties)
        if position + size > self.room_end:
            position = self._start_next_file(size)
        offset = queue.next_offset

        # Encode head and unit. Nothing has changed if a number does not fit.
        try:
            head = _pack_head(
                size, queue.magic, _crc32(body) & CRC_MASK, queue_id, flag, offset, position,
                sys_flag, born_time_ms, born_host, self.now_ms, store_host, reconsume_times,
                prepared_offset, body_bytes,
            )  # fmt: skip
            unit = _pack_unit(position, size, tag_code)
        except struct.error:
            raise _make_number_error(
                flag, sys_flag, born_time_ms, queue_id, reconsume_times, prepared_offset, tag_code
            ) from None

        # Add the record to the group, and the unit to the queue.
        self.parts += (head, body, queue.topic_part, _pack_length(properties_bytes), properties)
        queue.tail += unit
        if offset == queue.committed_offset:
            self.touched.append(queue)
        queue.next_offset = offset + 1
        self.position = position + size
        return position, offset

    def delay_last_message(self, topic: str, queue_id: int, delay_ms: int) -> int:
        """Give the message that was just appended to a queue a due time. Return the time in ms.

        It is `delay_ms` after the store time. It replaces the tag code in the message's unit (queue
        entry), which is still in memory (spec/delivery.md §1).
        """
        due_ms = self.now_ms + delay_ms
        tail = self.by_key[topic, queue_id].tail
        tail[-_TAG_CODE_BYTES:] = due_ms.to_bytes(_TAG_CODE_BYTES, "big")
        return due_ms

    def begin_group(self) -> None:
        """Begin a commit group: messages that are written together and have the same store time.

        Sets the store time, `now_ms`. It is the clock's time, or the last store time if the clock
        is up to a minute behind that. A larger step back of the clock is logged. Raises
        StoreFullError or StoreError if the log accepts no messages, and StoreError if a master
        writes it.
        """
        log = self._log
        if log.failure is not None or log.refusal is not None:
            log.check_appendable()
        if self.is_following:
            raise StoreError(
                f"The log in {log.segments.directory} is written by a master: this broker is a"
                " slave.",
                fix="Send the message to the master.",
            )
        now_ms = self._clock.now_ms()
        last_time_ms = self.last_time_ms
        if now_ms < last_time_ms:
            is_small_step = last_time_ms - now_ms <= CLOCK_STEP_BACK_MAX_MS
            if is_small_step:
                now_ms = last_time_ms
            else:
                warn_clock_went_back(now_ms, last_time_ms)
        self.now_ms = now_ms

    def append_batch(
        self,
        topic: str,
        queue_id: int,
        messages: Sequence[BatchPart],
        sys_flag: int,
        born_time_ms: int,
        born_host: bytes,
        store_host: bytes,
    ) -> tuple[list[int], int]:
        """Append all messages of a batch to the commit group, in one file (spec/store.md §2.5).

        Each of `messages` is (flag, body, encoded properties, tag code). The messages share the
        other arguments, which have the same meaning as in `append`. Returns (positions in the log,
        queue offset of the first message); the other messages have the following offsets. Raises
        the errors of `append`; then none of the messages is appended.
        """
        queue = self._queues.get_or_create((topic, queue_id))
        if self._adds_checksum:
            messages = [
                (flag, body, reserve_checksum(properties), tag_code)
                for flag, body, properties, tag_code in messages
            ]
        body_bytes = sum([len(message[1]) for message in messages])
        self.check_sizes(body_bytes, b"")
        if self.position == self.turn_start:
            self.begin_group()
        if (
            sys_flag & _UNCOMMON_FLAGS
            or len(born_host) + len(store_host) != self._common_hosts_bytes
        ):
            return self._append_encoded(
                queue, messages, sys_flag, born_time_ms, born_host, store_host
            )

        # From here on as `append`, with what all messages share computed once.
        fixed_bytes = queue.fixed_bytes
        topic_part = queue.topic_part
        magic = queue.magic
        property_bytes = sum([len(message[2]) for message in messages])
        self._make_room(len(messages) * fixed_bytes + body_bytes + property_bytes)
        now_ms = self.now_ms
        position = self.position
        offset = queue.next_offset
        records: list[bytes | bytearray | memoryview] = []
        units: list[bytes] = []
        positions: list[int] = []
        add = records.extend
        try:
            shared = _pack_shared(sys_flag, born_time_ms, born_host, now_ms, store_host, 0, 0)
            for flag, body, properties, tag_code in messages:
                body_bytes = len(body)
                properties_bytes = len(properties)
                if properties_bytes > PROPERTIES_BYTES_MAX or b"\0" in properties:
                    self.check_sizes(body_bytes, properties)
                size = fixed_bytes + body_bytes + properties_bytes
                head = _pack_batch_head(
                    size,
                    magic,
                    _crc32(body) & CRC_MASK,
                    queue_id,
                    flag,
                    offset,
                    position,
                    shared,
                    body_bytes,
                )
                add((head, body, topic_part, _pack_length(properties_bytes), properties))
                units.append(_pack_unit(position, size, tag_code))
                positions.append(position)
                position += size
                offset += 1
        except struct.error:
            largest_flag = max((message[0] for message in messages), key=abs)
            raise _make_number_error(largest_flag, sys_flag, born_time_ms, queue_id) from None
        first_offset = self._add_records(queue, records, b"".join(units), len(units), position)
        return positions, first_offset

    def _append_encoded(
        self,
        queue: Queue,
        messages: Sequence[tuple[int, bytes | bytearray | memoryview, bytes, int]],
        sys_flag: int,
        born_time_ms: int,
        born_host: bytes,
        store_host: bytes,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> tuple[list[int], int]:
        """Append messages in uncommon forms (IPv6 hosts, checksums, transactions) by the codec.

        Each of `messages` is (flag, body, encoded properties, tag code). The properties have room
        for the checksum already. Returns (positions in the log, queue offset of the first message).
        Prepared and rolled-back messages get no unit, because they are not in any queue, and their
        queue offset is 0. Raises MessageIllegalError, with nothing appended, for batch records
        (sysFlag 0x80) and for what exceeds a limit.
        """
        if sys_flag & INNER_BATCH:
            raise MessageIllegalError(
                "The record contains several messages (sysFlag 0x80), which requires a topic with"
                " batch queues (BatchCQ). SluiceMQ does not support them.",
                fix="Send a batch of ordinary messages.",
            )
        is_queued = not sys_flag & PREPARED
        fixed_bytes = queue.fixed_bytes + len(born_host) + len(store_host) - _IPV4_HOSTS_BYTES
        self._make_room(
            sum([fixed_bytes + len(message[1]) + len(message[2]) for message in messages])
        )
        encode = partial(
            encode_record,
            topic=queue.topic,
            queue_id=queue.queue_id,
            sys_flag=sys_flag,
            born_time_ms=born_time_ms,
            born_host=born_host,
            store_time_ms=self.now_ms,
            store_host=store_host,
            reconsume_times=reconsume_times,
            prepared_offset=prepared_offset,
            version2=queue.magic == MAGIC_V2,
        )
        first_offset = queue.next_offset if is_queued else 0
        position = self.position
        offset = first_offset
        records: list[bytes] = []
        units: list[bytes] = []
        positions: list[int] = []
        try:
            for flag, body, properties, tag_code in messages:
                self.check_sizes(len(body), properties)
                record = encode(
                    queue_offset=offset,
                    physical_offset=position,
                    body=body,
                    properties=properties,
                    flag=flag,
                )
                if self._adds_checksum:
                    record = fill_checksum(record)
                records.append(record)
                units.append(_pack_unit(position, len(record), tag_code))
                positions.append(position)
                position += len(record)
                offset += is_queued
        except (struct.error, ProtocolError):
            largest_flag = max((message[0] for message in messages), key=abs)
            raise _make_number_error(
                largest_flag,
                sys_flag,
                born_time_ms,
                queue.queue_id,
                reconsume_times,
                prepared_offset,
            ) from None
        unit_count = len(units) if is_queued else 0
        joined_units = b"".join(units[:unit_count])
        self._add_records(queue, records, joined_units, unit_count, position)
        return positions, first_offset

    def append_columns(
        self, topic: str, queue_id: int, columns: "BatchColumns"
    ) -> tuple["Positions", int]:
        """Append a batch whose messages are columns (NumPy arrays) already.

        All messages must have IPv4 hosts and valid properties, and `can_append_columns` must be
        True. Their keys are noted for the key index. Returns (positions in the log, queue offset of
        the first message). Raises MessageIllegalError or StoreError; then no message is appended.
        """
        from sluicemq.record.batch_columns import encode_records  # noqa: PLC0415 - imports NumPy

        queue = self._queues.get_or_create((topic, queue_id))
        heads = columns.heads
        body_bytes = int(heads["body_length"].sum())
        self.check_sizes(body_bytes, b"")
        if self.position == self.turn_start:
            self.begin_group()
        property_bytes = int(columns.property_sizes.sum())
        self._make_room(len(heads) * queue.fixed_bytes + body_bytes + property_bytes)
        encoded = encode_records(
            columns,
            fixed_bytes=queue.fixed_bytes,
            topic_part=queue.topic_part,
            magic=queue.magic,
            queue_id=queue.queue_id,
            queue_offset=queue.next_offset,
            position=self.position,
            stored_ms=self.now_ms,
        )
        self._known_keys.note_batch(topic, columns, encoded, self.now_ms)
        first_offset = self._add_records(
            queue, encoded.pieces, encoded.units, len(heads), encoded.end
        )
        return encoded.positions, first_offset

    def _add_records(
        self, queue: Queue, records: Sequence[Any], units: bytes, count: int, end: int
    ) -> int:
        """Add encoded records and their units to the commit group. Return the first queue offset.

        `records` are byte strings that form the records when joined. They end at position `end` of
        the log. `units` are `count` queue entries, joined. If `count` is 0, the queue does not
        change.
        """
        first_offset = queue.next_offset
        self.parts += records
        if count:
            queue.tail += units
            if first_offset == queue.committed_offset:
                self.touched.append(queue)
            queue.next_offset = first_offset + count
        self.position = end
        return first_offset

    def _make_room(self, size: int) -> None:
        """Continue in the next file if `size` bytes do not fit into the current one."""
        if self.position + size > self.room_end:
            self._start_next_file(size)

    def _start_next_file(self, size: int) -> int:
        """Fill the current file with a blank record. Return the position of the next file.

        If the current file is full already, there is no blank record. Raises MessageIllegalError,
        with nothing changed, if a file has no room for `size` bytes.
        """
        size_max = self._file_bytes - BLANK_BYTES
        if size > size_max:
            raise MessageIllegalError(
                f"The record would have {size} bytes, the limit is {size_max}.",
                fix="Send a smaller message (or batch), or raise mappedFileSizeCommitLog.",
            )
        file_end = self.room_end + BLANK_BYTES
        bytes_left = file_end - self.position
        if bytes_left > 0:
            self.parts.append(BLANK.struct.pack(bytes_left, MAGIC_BLANK))
            piece = b"".join(self.parts)
            self.parts.clear()
            self._pieces.append((self.position + BLANK_BYTES - len(piece), piece))
        self.position = file_end
        self.room_end = file_end + self._file_bytes - BLANK_BYTES
        return file_end

    def commit(self) -> int:
        """Write the commit group to the log. Return the new end of the log.

        If no message was appended, nothing is written. Afterwards `touched` contains the queues
        with new messages; the caller clears it. Queues with many units in memory are written to
        their files; an error of that is only logged, because the units stay in memory.

        Raises StoreFullError or StoreError if the log cannot be written. Then all messages of the
        group are discarded, and their offsets are free again.
        """
        end = self.position
        if end == self.turn_start:
            return end
        piece = b"".join(self.parts)
        self.parts.clear()
        self._pieces.append((end - len(piece), piece))
        try:
            self._log.write(self._pieces, end)
        except StoreError:
            self._discard_group()
            raise
        finally:
            self._pieces.clear()
        self.turn_start = end
        self._committed_room_end = self.room_end
        self.last_time_ms = self.now_ms
        for queue in self.touched:
            queue.committed_offset = queue.next_offset
            if len(queue.tail) >= TAIL_BYTES_MAX:
                self._write_long_tail(queue)
        return end

    def _discard_group(self) -> None:
        """Discard all messages of the commit group, and free their queue offsets."""
        for queue in self.touched:
            del queue.tail[(queue.committed_offset - queue.tail_start) * UNIT_BYTES :]
            queue.next_offset = queue.committed_offset
        self.touched.clear()
        self._known_keys.discard_from(self.turn_start)
        self.position = self.turn_start
        self.room_end = self._committed_room_end

    def _write_long_tail(self, queue: Queue) -> None:
        """Write the units of a queue that are in memory to its files. An error is only logged."""
        try:
            self._queues.mark_dirty(queue)
        except OSError as error:  # the units stay in memory, and `tick` tries again
            logger.warning("writing queue %s/%d failed: %s", queue.topic, queue.queue_id, error)

    def check_sizes(self, body_bytes: int, properties: bytes) -> None:
        """Raise MessageIllegalError if a body of this size or these properties cannot be stored.

        `properties` are encoded. They must not end with a zero byte or contain sixteen zeros in a
        row, because they would look like a torn write after a crash.
        """
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise MessageIllegalError(
                f"The properties have {len(properties)} bytes, the limit is"
                f" {PROPERTIES_BYTES_MAX}.",
                fix="Move large values to the body.",
            )
        if body_bytes > self.body_bytes_max:
            raise MessageIllegalError(
                f"The body has {body_bytes} bytes, the limit is {self.body_bytes_max}.",
                fix="Send a smaller body, compress it, or raise maxMessageSize.",
            )
        if properties[-1:] == b"\0" or ZEROS_NEVER_STORED in properties:
            raise MessageIllegalError(
                "The properties end with a zero byte, or contain sixteen zero bytes in a row. After"
                " a crash such properties cannot be distinguished from a torn write.",
                fix="Move binary values to the body, or encode them as text.",
            )


_NUMBERS: Final = Layout(
    ("flag", "i4"),
    ("sys_flag", "i4"),
    ("born_time", "i8"),
    ("queue_id", "i4"),
    ("reconsume_times", "i4"),
    ("prepared_offset", "i8"),
    ("tag_code", "i8"),
)
"""The numbers of a record that clients choose."""


def _make_number_error(*numbers: int) -> MessageIllegalError:
    """Make the error for a message with a number that does not fit its field in the record.

    It names the field and its range. `numbers` are the values of the first fields of `_NUMBERS`, in
    this order. Missing ones count as 0, which always fits.
    """
    missing_count = len(_NUMBERS.fields) - len(numbers)
    all_numbers = (*numbers, *[0] * missing_count)
    return MessageIllegalError(
        f"The message was not stored. {_NUMBERS.describe_misfit(*all_numbers)}",
        fix="Send a number within that range.",
    )


def warn_clock_went_back(now_ms: int, last_ms: int) -> None:
    """Log a warning: the clock shows `now_ms`, but the newest message was stored at `last_ms`."""
    logger.warning(
        "the clock went back to %d ms, but the newest message was stored at %d ms; searching by"
        " time gives wrong results until the clock passes that time (check NTP)",
        now_ms,
        last_ms,
    )
