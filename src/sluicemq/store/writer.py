"""Appending: many messages a turn, one write.

    append   puts the parts of the record on a list and its unit on the queue's tail; nothing is
             written, nobody can see it
    commit   joins the list and hands it to the log (one pwrite a file); the turn is over

When the write fails the turn has never been: queue offsets, tails and positions go back, the log
wipes what may have reached the file, and the next turn works again if there is room by then.

All messages of a turn bear the time of its first append: a turn is one pass over what lay in the
socket buffers. A clock that went back by less than a minute is waited for (store times of a queue
must not fall, searching by time relies on it), a larger step is followed.

`append` is the hot path: one dict look-up, one pack for the head, one for the unit, one checksum,
no object that lives on. What is not the common case (IPv6, transactions, the checksum property)
goes through the codec.
"""

import logging
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.engine.state import TurnState
from sluicemq.errors import MessageIllegalError, ProtocolError, StoreError
from sluicemq.model.ids import HOST_BYTES_IPV4
from sluicemq.model.message import BORN_HOST_IPV6, INNER_BATCH, PREPARED, STORE_HOST_IPV6
from sluicemq.record.codec import encode_record, seal, with_place
from sluicemq.record.layout import (
    BLANK,
    CRC_MASK,
    MAGIC_BLANK,
    MAGIC_V2,
    PROPERTIES_BYTES_MAX,
    RECORD_HEAD,
    Layout,
)
from sluicemq.store.index.index import KnownKeys
from sluicemq.store.log import BLANK_BYTES, ZEROS_NEVER_STORED, CommitLog
from sluicemq.store.queues import TAIL_BYTES_MAX, UNIT, UNIT_BYTES, ConsumeQueues, Queue

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import Columns
    from sluicemq.record.table import Positions

logger = logging.getLogger(__name__)

CLOCK_STEP_BACK_MAX_MS: Final = 60_000
_UNCOMMON: Final = PREPARED | INNER_BATCH | BORN_HOST_IPV6 | STORE_HOST_IPV6
_HOSTS_IPV4: Final = 2 * HOST_BYTES_IPV4
_CODE_BYTES: Final = 8
_pack_head: Final = RECORD_HEAD.struct.pack
_COMMON: Final = RECORD_HEAD.part("sys_flag", "prepared_offset")
_pack_common: Final = _COMMON.struct.pack
_pack_own: Final = Layout(
    *RECORD_HEAD.part("size", "physical_offset").fields, ("common", f"V{_COMMON.size}"),
    ("body_length", "i4"),
).struct.pack  # fmt: skip
"""The head of a record again, what all messages of a batch have in common in one piece."""
_pack_length: Final = struct.Struct(">h").pack
_pack_unit: Final = UNIT.pack
_crc32: Final = zlib.crc32

Part = tuple[int, bytes | memoryview, bytes, int]
"""One message of a batch: flag, body, properties, tag code."""


class Writer(TurnState):
    """The turn being written, and where the next record goes."""

    def __init__(
        self, log: CommitLog, queues: ConsumeQueues, config: StoreConfig, clock: Clock,
        time_ms: int, known_keys: KnownKeys,
    ) -> None:  # fmt: skip
        """`known_keys` gets the keys of batches for the index."""
        self._log = log
        self._queues = queues
        self.by_key = queues.by_key
        self._clock = clock
        self._known_keys = known_keys
        self._adds_checksum = config.checksum_property
        self.takes_columns = not config.checksum_property
        """Whether `append_columns` can be used."""
        # The length of both hosts of a common record; with checksums no record is common.
        self._common_hosts = -1 if config.checksum_property else _HOSTS_IPV4
        self.body_bytes_max = config.message_bytes_max
        self._file_bytes = config.commit_log_file_bytes
        self.parts = []
        self._pieces: list[tuple[int, bytes]] = []  # of files that the turn has filled
        self.is_following = False
        """Whether a master writes the log, and nobody else may."""
        self.move()
        self.now_ms = 0
        self.last_time_ms = time_ms
        self.touched: list[Queue] = []

    def move(self) -> None:
        """Go on where the log ends."""
        log = self._log
        self.position = self.turn_start = log.written_offset
        # A record ends before this: 8 bytes before the end of the file it begins in.
        file_end = self.position + -self.position % self._file_bytes
        if file_end == self.position and log.segments.at(self.position) is not None:
            file_end += self._file_bytes  # else: at a file's very end there is no room
        self.room_end = self._turn_room_end = file_end - BLANK_BYTES

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
        """Add a message to the turn; returns (physical offset, queue offset).

        `body` must not change before `commit`. `properties` and the hosts are encoded already;
        the host bits of `sys_flag` are set here. Raises MessageIllegalError when the message
        breaks a limit, StoreError when the store takes no writes; then nothing has changed.
        """
        queue = self.by_key.get((topic, queue_id))
        if queue is None:
            queue = self._queues.get((topic, queue_id))
        position = self.position
        if position == self.turn_start:
            self.begin()
        if sys_flag & _UNCOMMON or len(born_host) + len(store_host) != self._common_hosts:
            properties = with_place(properties) if self._adds_checksum else properties
            parts = [(flag, body, properties, tag_code)]
            positions, offset = self._append_encoded(
                queue, parts, sys_flag, born_time_ms, born_host, store_host, reconsume_times,
                prepared_offset,
            )  # fmt: skip
            return positions[0], offset
        body_bytes = len(body)
        properties_bytes = len(properties)
        size = queue.fixed_bytes + body_bytes + properties_bytes
        if (
            body_bytes > self.body_bytes_max
            or properties_bytes > PROPERTIES_BYTES_MAX
            or b"\0" in properties
        ):
            self.check(body_bytes, properties)
        if position + size > self.room_end:
            position = self._next_file(size)
        offset = queue.next_offset
        try:
            head = _pack_head(
                size, queue.magic, _crc32(body) & CRC_MASK, queue_id, flag, offset, position,
                sys_flag, born_time_ms, born_host, self.now_ms, store_host, reconsume_times,
                prepared_offset, body_bytes,
            )  # fmt: skip
            unit = _pack_unit(position, size, tag_code)
        except struct.error:
            raise _illegal_number(
                flag, sys_flag, born_time_ms, queue_id, reconsume_times, prepared_offset, tag_code
            ) from None
        self.parts += (head, body, queue.topic_part, _pack_length(properties_bytes), properties)
        queue.tail += unit
        if offset == queue.committed_offset:
            self.touched.append(queue)
        queue.next_offset = offset + 1
        self.position = position + size
        return position, offset

    def delay_last(self, topic: str, queue_id: int, delay_ms: int) -> int:
        """The message just appended to a queue is due so long after its store time: its unit says
        when, in place of a tag code (spec/delivery.md §1). Returns that time."""
        due_ms = self.now_ms + delay_ms
        tail = self.by_key[topic, queue_id].tail
        tail[-_CODE_BYTES:] = due_ms.to_bytes(_CODE_BYTES, "big")
        return due_ms

    def begin(self) -> None:
        """The first append of a turn: may we write, and what time is it?"""
        log = self._log
        if log.failure is not None or log.refusal is not None:
            log.check_room()
        if self.is_following:
            raise StoreError(
                f"The log in {log.segments.directory} is written by a master: this broker is a"
                " slave.",
                fix="Send to the master.",
            )
        now, last = self._clock.now_ms(), self.last_time_ms
        if now < last:
            if last - now <= CLOCK_STEP_BACK_MAX_MS:
                now = last
            else:
                warn_clock(now, last)
        self.now_ms = now

    def append_batch(
        self,
        topic: str,
        queue_id: int,
        parts: Sequence[Part],
        sys_flag: int,
        born_time_ms: int,
        born_host: bytes,
        store_host: bytes,
    ) -> tuple[list[int], int]:
        """Add the messages of a batch, all or none, all in one file (spec/store.md §2.5).

        Returns the physical offsets and the first queue offset. Raises as `append`.
        """
        queue = self._queues.get((topic, queue_id))
        if self._adds_checksum:
            parts = [(flag, body, with_place(own), tag) for flag, body, own, tag in parts]
        body_bytes = sum([len(part[1]) for part in parts])
        self.check(body_bytes, b"")
        if self.position == self.turn_start:
            self.begin()
        if sys_flag & _UNCOMMON or len(born_host) + len(store_host) != self._common_hosts:
            return self._append_encoded(queue, parts, sys_flag, born_time_ms, born_host, store_host)
        fixed_bytes, topic_part, magic = queue.fixed_bytes, queue.topic_part, queue.magic
        property_bytes = sum([len(part[2]) for part in parts])
        self._make_room(len(parts) * fixed_bytes + body_bytes + property_bytes)
        now_ms, position, offset = self.now_ms, self.position, queue.next_offset
        records: list[bytes | bytearray | memoryview] = []
        units: list[bytes] = []
        positions: list[int] = []
        add = records.extend
        try:
            common = _pack_common(sys_flag, born_time_ms, born_host, now_ms, store_host, 0, 0)
            for flag, body, properties, tag_code in parts:
                body_bytes = len(body)
                properties_bytes = len(properties)
                if properties_bytes > PROPERTIES_BYTES_MAX or b"\0" in properties:
                    self.check(body_bytes, properties)
                size = fixed_bytes + body_bytes + properties_bytes
                head = _pack_own(
                    size, magic, _crc32(body) & CRC_MASK, queue_id, flag, offset, position, common,
                    body_bytes,
                )  # fmt: skip
                add((head, body, topic_part, _pack_length(properties_bytes), properties))
                units.append(_pack_unit(position, size, tag_code))
                positions.append(position)
                position += size
                offset += 1
        except struct.error:
            worst = max((part[0] for part in parts), key=abs)
            raise _illegal_number(worst, sys_flag, born_time_ms, queue_id) from None
        return positions, self._extend(queue, records, b"".join(units), len(units), position)

    def _append_encoded(
        self,
        queue: Queue,
        parts: Sequence[tuple[int, bytes | bytearray | memoryview, bytes, int]],
        sys_flag: int,
        born_time_ms: int,
        born_host: bytes,
        store_host: bytes,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> tuple[list[int], int]:
        """What is not the common case, by the codec: IPv6, checksums; prepared and rolled-back
        messages, which stand in no queue (offset 0)."""
        if sys_flag & INNER_BATCH:
            raise MessageIllegalError(
                "The message is several in one record (sysFlag 0x80): they need a BatchCQ topic.",
                fix="Send a batch of ordinary messages; SluiceMQ writes no batch queues.",
            )
        is_queued = not sys_flag & PREPARED
        fixed_bytes = queue.fixed_bytes + len(born_host) + len(store_host) - _HOSTS_IPV4
        self._make_room(sum([fixed_bytes + len(part[1]) + len(part[2]) for part in parts]))
        first = queue.next_offset if is_queued else 0
        position, offset = self.position, first
        records: list[bytes] = []
        units: list[bytes] = []
        positions: list[int] = []
        try:
            for flag, body, properties, tag_code in parts:
                self.check(len(body), properties)
                record = encode_record(
                    topic=queue.topic, queue_id=queue.queue_id, queue_offset=offset,
                    physical_offset=position, body=body, properties=properties, flag=flag,
                    sys_flag=sys_flag, born_time_ms=born_time_ms, born_host=born_host,
                    store_time_ms=self.now_ms, store_host=store_host,
                    reconsume_times=reconsume_times, prepared_offset=prepared_offset,
                    version2=queue.magic == MAGIC_V2,
                )  # fmt: skip
                records.append(seal(record) if self._adds_checksum else record)
                units.append(_pack_unit(position, len(record), tag_code))
                positions.append(position)
                position += len(record)
                offset += is_queued
        except (struct.error, ProtocolError):
            worst = max((part[0] for part in parts), key=abs)
            raise _illegal_number(
                worst, sys_flag, born_time_ms, queue.queue_id, reconsume_times, prepared_offset
            ) from None
        count = len(units) if is_queued else 0
        self._extend(queue, records, b"".join(units[:count]), count, position)
        return positions, first

    def append_columns(
        self, topic: str, queue_id: int, columns: "Columns"
    ) -> tuple["Positions", int]:
        """`append_batch` for common messages (both hosts IPv4) whose parts are right and that are
        columns already (`record.batch_columns`). Raises as `append`."""
        from sluicemq.record.batch_columns import lay_out  # noqa: PLC0415 - NumPy when needed

        queue = self._queues.get((topic, queue_id))
        heads = columns.heads
        body_bytes = int(heads["body_length"].sum())
        self.check(body_bytes, b"")
        if self.position == self.turn_start:
            self.begin()
        property_bytes = int(columns.property_sizes.sum())
        self._make_room(len(heads) * queue.fixed_bytes + body_bytes + property_bytes)
        laid = lay_out(
            columns, fixed_bytes=queue.fixed_bytes, topic_part=queue.topic_part,
            magic=queue.magic, queue_id=queue.queue_id, queue_offset=queue.next_offset,
            position=self.position, stored_ms=self.now_ms,
        )  # fmt: skip
        self._known_keys.note(topic, columns, laid, self.now_ms)
        return laid.positions, self._extend(queue, laid.pieces, laid.units, len(heads), laid.end)

    def _extend(
        self, queue: Queue, records: Sequence[Any], units: bytes, count: int, end: int
    ) -> int:
        """Add what was made to the turn, which ends at `end` then; returns the first offset."""
        first = queue.next_offset
        self.parts += records
        if count:
            queue.tail += units
            if first == queue.committed_offset:
                self.touched.append(queue)
            queue.next_offset = first + count
        self.position = end
        return first

    def _make_room(self, size: int) -> None:
        if self.position + size > self.room_end:
            self._next_file(size)

    def _next_file(self, size: int) -> int:
        """Close the file with a blank record and go on in the next; returns the new position."""
        limit = self._file_bytes - BLANK_BYTES
        if size > limit:
            raise MessageIllegalError(
                f"The record would have {size} bytes, the limit is {limit}.",
                fix="Send a smaller message (or batch), or raise mappedFileSizeCommitLog.",
            )
        file_end = self.room_end + BLANK_BYTES
        room = file_end - self.position
        if room > 0:
            self.parts.append(BLANK.struct.pack(room, MAGIC_BLANK))
            data = b"".join(self.parts)
            self.parts.clear()
            self._pieces.append((self.position + BLANK_BYTES - len(data), data))
        self.position = file_end
        self.room_end = file_end + self._file_bytes - BLANK_BYTES
        return file_end

    def commit(self) -> int:
        """Write the turn; returns the end of the log. `touched` names its queues afterwards.

        Raises StoreFullError or StoreError; then the turn is undone.
        """
        end = self.position
        if end == self.turn_start:
            return end
        data = b"".join(self.parts)
        self.parts.clear()
        self._pieces.append((end - len(data), data))
        try:
            self._log.write(self._pieces, end)
        except StoreError:
            for queue in self.touched:
                del queue.tail[(queue.committed_offset - queue.tail_start) * UNIT_BYTES :]
                queue.next_offset = queue.committed_offset
            self.touched.clear()
            self._known_keys.take_back(self.turn_start)
            self.position = self.turn_start
            self.room_end = self._turn_room_end
            raise
        finally:
            self._pieces.clear()
        self.turn_start = end
        self._turn_room_end = self.room_end
        self.last_time_ms = self.now_ms
        for queue in self.touched:
            queue.committed_offset = queue.next_offset
            if len(queue.tail) >= TAIL_BYTES_MAX:
                try:
                    self._queues.note(queue)
                except OSError as error:  # the units stay in memory, `tick` tries again
                    logger.warning(
                        "writing queue %s/%d failed: %s", queue.topic, queue.queue_id, error
                    )
        return end

    def check(self, body_bytes: int, properties: bytes) -> None:
        """Raise MessageIllegalError if no record can hold a body of `body_bytes` bytes or these
        encoded properties."""
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise MessageIllegalError(
                f"The properties have {len(properties)} bytes, the limit is"
                f" {PROPERTIES_BYTES_MAX}.",
                fix="Put large values into the body.",
            )
        if body_bytes > self.body_bytes_max:
            raise MessageIllegalError(
                f"The body has {body_bytes} bytes, the limit is {self.body_bytes_max}.",
                fix="Send a smaller body, compress it, or raise maxMessageSize.",
            )
        if properties[-1:] == b"\0" or ZEROS_NEVER_STORED in properties:
            raise MessageIllegalError(
                "The properties end with a zero byte, or hold sixteen of them in a row: after a"
                " crash they could not be told from a torn write.",
                fix="Put binary values into the body, or encode them as text.",
            )


_NUMBERS: Final = Layout(
    ("flag", "i4"), ("sys_flag", "i4"), ("born_time", "i8"), ("queue_id", "i4"),
    ("reconsume_times", "i4"), ("prepared_offset", "i8"), ("tag_code", "i8"),
)  # fmt: skip
"""The numbers of a record that come from outside."""


def _illegal_number(*numbers: int) -> MessageIllegalError:
    """`numbers` are the first of `_NUMBERS`."""
    padded = (*numbers, *[0] * (len(_NUMBERS.fields) - len(numbers)))
    return MessageIllegalError(
        f"The message was not stored. {_NUMBERS.misfit(*padded)}",
        fix="Send a number in that range.",
    )


def warn_clock(now_ms: int, last_ms: int) -> None:
    """The clock says an earlier time than the newest message in the store."""
    logger.warning(
        "the clock went back: it says %d ms, the newest message was stored at %d ms;"
        " searching by time is wrong until the clock has passed that (check NTP)",
        now_ms,
        last_ms,
    )
