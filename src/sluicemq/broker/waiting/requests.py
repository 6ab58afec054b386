"""Handlers for requests about messages that wait: recall, cancel, list, and copies for slaves.

`DelayHandlers` answers RECALL_MESSAGE (370), SLUICE_LIST_DELAYED (900101) and
SLUICE_CANCEL_DELAYED (900102). For slaves it answers GET_ALL_DELAY_OFFSET (45),
GET_TIMER_CHECK_POINT (60) and GET_TIMER_METRICS (61).

A timed message is recalled by a *recall marker*: a message in the same slot of the timer wheel that
names the message to recall (spec/delivery.md §2). RocketMQ's clients do so by the handle that they
received in the response to the send. A message of a delay level is cancelled by saving its offset.

Lists have pages, each a few ms of work. A cursor says where the next page begins: `L:2:17` is
offset 17 of the queue of level 3, `T:…:52` the unit at position 52 of the timer log, in a slot.
"""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sluicemq.broker.background import TimeSlice
from sluicemq.broker.group_commit import Announced, Durable
from sluicemq.broker.produce.intake import MessageIntake, MessageToStore, Record
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.waiting.delivery import DelayedDelivery
from sluicemq.broker.waiting.listing import NEWEST_UNIT, WaitingEntry
from sluicemq.clock import SteadyClock
from sluicemq.errors import RequestError
from sluicemq.model.ids import RecallHandle, parse_recall_handle
from sluicemq.model.message import KEYS, REAL_QUEUE, REAL_TOPIC, TAGS, UNIQ_KEY
from sluicemq.model.topic import PERM_WRITE
from sluicemq.net.dispatch import Peer
from sluicemq.numbers import natural
from sluicemq.store.timers.placing import TIMER_DELETES, TIMER_OUT
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.headers import (
    CancelDelayedRequest,
    ListDelayedRequest,
    ListDelayedResponse,
    RecallMessageRequest,
    SendMessageResponse,
)

PAGE_MESSAGES_MAX: Final = 1000
"""The most messages of a page."""
_PAGE_S: Final = 0.005
"""The time in seconds after which a page ends."""
_RECALL_TAG: Final = "_RECALL_TAG_"
_LEVEL_HANDLE_VERSION: Final = "d1"
"""The first part of the handle of a message that waits for a delay level."""


@dataclass(slots=True, eq=False)
class DelayHandlers:
    """Handlers for requests about messages that wait for a delay level or a time."""

    settings: Settings
    topics: Topics
    delayed: DelayedDelivery
    intake: MessageIntake
    clock: SteadyClock

    # --- recall and cancel

    def recall(self, header: RecallMessageRequest, command: Command, peer: Peer) -> Durable:
        """Answer RECALL_MESSAGE (370): prevent the delivery of a timed message.

        `header` has the handle of the message, which the answer to its send contained. A recall
        marker is appended to the store: a message that makes the broker drop the timed message. The
        returned answer contains the message id, and is sent when the marker is durable. As in
        RocketMQ, this succeeds whether the message exists or not.

        Raises RequestError if recalls are disabled, the broker or the topic does not allow them,
        the handle is invalid, or the message is due already.
        """
        config = self.settings.broker
        if not config.recall_enable:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                "Recalling messages is disabled on this broker. Set recallMessageEnable = true, or "
                "use `sluice delay cancel`.",
            )
        if not config.broker_permission & PERM_WRITE and not config.recall_when_read_only:
            raise RequestError(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                "The broker does not accept messages at the moment. Try again later.",
            )
        if header.topic not in self.topics:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"the topic[{header.topic}] not exist")
        handle = parse_recall_handle(header.recall_handle)
        if handle is None:
            raise _illegal("recall handle is invalid")
        if handle.topic != header.topic:
            raise _illegal(f"The handle is for topic {handle.topic}, not for {header.topic}.")
        return self._store_recall_marker(handle, command, peer)

    def _store_recall_marker(self, handle: RecallHandle, command: Command, peer: Peer) -> Durable:
        """Append the recall marker for a timed message, and return the answer to the request.

        The answer contains the id of the recalled message, and is sent when the marker is durable.

        Raises RequestError if the handle is for another broker, if the message is due already, or
        if the time in the handle is later than any message may be due.
        """
        self._check_recall_handle(handle)
        properties = {
            TAGS: _RECALL_TAG,
            TIMER_DELETES: f"{handle.topic}+{handle.unique_id}",
            UNIQ_KEY: handle.unique_id,
            "TIMER_DELIVER_MS": str(handle.time_ms - self.clock.lead_ms),
        }
        marker = MessageToStore(
            topic=handle.topic,
            queue_id=0,
            body=b"0",
            properties=properties,
            born_time_ms=self.clock.now_ms(),
            born_host=peer.remote_bytes,
            store_host=self.settings.store_host,
        )
        self.intake.rewrite_and_append(marker)
        region = self.settings.broker.region
        fields = encode_header(SendMessageResponse(message_id=handle.unique_id, region=region))
        return Durable(encode_response(command, ResponseCode.SUCCESS, fields))

    def _check_recall_handle(self, handle: RecallHandle) -> None:
        """Raise RequestError if the message of a handle cannot be recalled.

        The handle may be for another broker, or its time may have come, or be later than
        timerMaxDelaySec allows.
        """
        broker = self.settings.broker.broker_name
        if handle.broker != broker:
            raise _illegal(f"The handle is for broker {handle.broker}, but this is {broker}.")
        wait_ms = handle.time_ms - self.clock.now_ms()
        if wait_ms <= 0:
            raise _illegal("Too late: the message has been delivered, or is about to be.")
        if wait_ms >= self.settings.store.timer_delay_max_s * 1000:
            raise _illegal(
                "The time in the handle is later than any message may be due (timerMaxDelaySec)."
            )

    def cancel(
        self, header: CancelDelayedRequest, command: Command, peer: Peer
    ) -> Announced | Durable:
        """Answer SLUICE_CANCEL_DELAYED (900102): prevent the delivery of a waiting message.

        `header` has the handle of the message, which `list_waiting` returned. For a timed message a
        recall marker is stored, and a Durable is returned: the answer is sent when the marker is
        durable. For a message of a delay level its offset is written to a file, which blocks
        shortly, and an Announced is returned: the answer is sent when the slaves have the file.

        Raises RequestError if the handle is invalid or for another broker, or if the message is due
        already, and OSError if the file cannot be written.
        """
        recall_handle = parse_recall_handle(header.handle)
        if recall_handle is not None:
            return self._store_recall_marker(recall_handle, command, peer)

        unique_id = self._cancel_level_message(header.handle)
        fields = encode_header(SendMessageResponse(message_id=unique_id))
        return Announced(Command(ResponseCode.SUCCESS, fields))

    def _cancel_level_message(self, handle: str) -> str:
        """Cancel the message of a delay level that `handle` names, and return its message id.

        Raises RequestError if the handle is invalid or for another store, or if the message is due
        already, and OSError if the cancellation cannot be written.
        """
        level_handle = _parse_level_handle(handle)
        if level_handle is None:
            raise _illegal(
                f"{handle!r} is not a valid handle. Use one that `sluice delay list` shows."
            )
        queue_id, offset, unique_id = level_handle
        waiting = self.delayed.levels.find_waiting(queue_id, offset)
        if waiting is None or waiting.due_ms <= self.clock.now_ms():
            raise _illegal(
                "Too late: the message has been delivered or cancelled, or is about to be."
            )
        if waiting.record is None or waiting.record.get_text(UNIQ_KEY) != unique_id:
            raise _illegal("The handle is for another broker or store.")
        self.delayed.levels.cancel(queue_id, offset)
        return unique_id

    # --- lists

    def list_waiting(self, header: ListDelayedRequest, command: Command, peer: Peer) -> Command:
        """Answer SLUICE_LIST_DELAYED (900101) with a page of the messages that wait.

        `header` may select a topic, and a key or message id. A page ends after `header.count_max`
        messages or after a few ms, so it may be empty although more messages wait. The response
        has the cursor of the next page, or none if this is the last one.

        Raises RequestError for an invalid cursor.
        """
        count_max = min(max(header.count_max or PAGE_MESSAGES_MAX, 1), PAGE_MESSAGES_MAX)
        work = TimeSlice(self.clock, _PAGE_S, 10 * PAGE_MESSAGES_MAX)
        page: list[bodies.WaitingMessage] = []
        next_cursor: str | None = None
        for entry in self._iter_waiting(header.cursor or "L:0:0"):
            work.count_done()
            message = self._describe_message(entry)
            if message is not None and _is_selected(message, header):
                page.append(message)
            if work.is_over or len(page) == count_max:
                next_cursor = entry.cursor
                break
        fields = encode_header(ListDelayedResponse(cursor=next_cursor))
        return Command(ResponseCode.SUCCESS, fields, bodies.encode_waiting(page))

    def _iter_waiting(self, cursor: str) -> Iterator[WaitingEntry]:
        """Yield the entries from a cursor on.

        First come the messages of delay levels, then the timed messages that are only in the timer
        queue, then those in the timer wheel. Raises RequestError for an invalid cursor.
        """
        listing = self.delayed.timer_listing
        # `first` and `second` are a queue id and offset (L), an offset and 0 (Q), or the time of a
        # slot and the position of a unit (T).
        kind, first, second, indexed_end = _parse_cursor(cursor)
        if kind == "L":
            yield from self._iter_levels(first, second)
            kind = "Q"
            first = 0
            indexed_end = self.delayed.timers.files.queue_offset
        if kind == "Q":
            yield from listing.iter_queue(first, indexed_end)
            first = 0
            second = NEWEST_UNIT
        yield from listing.iter_wheel(first, second, indexed_end)

    def _iter_levels(self, first_queue_id: int, first_offset: int) -> Iterator[WaitingEntry]:
        """Yield the waiting messages of the delay levels, in the order of queue ids and offsets.

        They begin at `first_offset` of the queue `first_queue_id`.
        """
        levels = self.delayed.levels
        for queue_id in levels.queue_ids:
            if queue_id >= first_queue_id:
                start = first_offset if queue_id == first_queue_id else 0
                yield from levels.iter_waiting(queue_id, start)

    def _describe_message(self, entry: WaitingEntry) -> bodies.WaitingMessage | None:
        """Return the message of `entry` as a tool shows it, with a handle to cancel it.

        Return None if the entry has no record, or if its message is due already. The due time in
        the result is a time of the wall clock.
        """
        record = entry.record
        if record is None or entry.due_ms <= self.clock.now_ms():
            return None
        wall_due_ms = entry.due_ms - self.clock.lead_ms
        return bodies.WaitingMessage(
            topic=record.get_text(REAL_TOPIC),
            queue_id=record.get_number(REAL_QUEUE) or 0,
            unique_id=record.get_text(UNIQ_KEY),
            keys=record.get_text(KEYS),
            tag=record.get_text(TAGS),
            level=entry.level,
            due_ms=wall_due_ms,
            stored_ms=record.store_time_ms,
            body_bytes=len(record.body),
            handle=self._make_handle(entry, record),
        )

    def _make_handle(self, entry: WaitingEntry, record: Record) -> str:
        """Return the handle with which `cancel` cancels the message of an entry."""
        unique_id = record.get_text(UNIQ_KEY)
        if entry.level:
            return _encode_level_handle(entry.level - 1, entry.queue_offset, unique_id)
        slot_ms = record.get_number(TIMER_OUT) or 0
        topic = record.get_text(REAL_TOPIC)
        broker = self.settings.broker.broker_name
        return RecallHandle(topic, broker, slot_ms + 1, unique_id).encode()

    # --- copies for slaves

    def get_delay_offsets(self, command: Command, peer: Peer) -> Command:
        """Answer GET_ALL_DELAY_OFFSET (45) with the text of delayOffset.json."""
        return Command(ResponseCode.SUCCESS, body=self.delayed.levels.encode_offsets().encode())

    def get_timer_checkpoint(self, command: Command, peer: Peer) -> Command:
        """Answer GET_TIMER_CHECK_POINT (60) with the 56 bytes of timercheck."""
        return Command(ResponseCode.SUCCESS, body=self.delayed.timers.files.checkpoint.encode())

    def get_timer_metrics(self, command: Command, peer: Peer) -> Command:
        """Answer GET_TIMER_METRICS (61) with the text of timermetrics."""
        return Command(ResponseCode.SUCCESS, body=self.delayed.metrics.encode().encode())


def _is_selected(message: bodies.WaitingMessage, header: ListDelayedRequest) -> bool:
    """Return whether a message has the topic, and the key or message id, that a request names."""
    has_topic = header.topic in (None, "", message.topic)
    has_key = header.key in (None, "", message.unique_id, *message.keys.split())
    return has_topic and has_key


def _parse_cursor(cursor: str) -> tuple[str, int, int, int]:
    """Return the parts of a cursor as (kind, first, second, indexed_end).

        L:<queue id>:<offset>                   a message of a delay level
        Q:<offset>:0:<indexed_end>              a message that is only in the timer queue
        T:<slot in ms>:<unit>:<indexed_end>     a message in the timer wheel

    `first` and `second` are the first two numbers, which may be negative. `indexed_end` is the
    offset of the timer queue up to which messages were in the wheel when the list began, 0 in a
    cursor of the kind L.

    Raises RequestError if the cursor is invalid.
    """
    kind, *fields = cursor.split(":")
    numbers = list(map(_parse_signed, fields))
    match kind, numbers:
        case "L", [int(first), int(second)]:
            return kind, first, second, 0
        case "Q" | "T", [int(first), int(second), int(indexed_end)]:
            return kind, first, second, indexed_end
        case _:
            remark = f"{cursor!r} is not a valid cursor. Use the one that the last page returned."
            raise RequestError(ResponseCode.INVALID_PARAMETER, remark)


def _parse_signed(digits: str) -> int | None:
    """Return the integer in `digits`, which may begin with "-", or None if it is not an integer."""
    magnitude = natural(digits.removeprefix("-"))
    if magnitude is not None and digits.startswith("-"):
        return -magnitude
    return magnitude


def _encode_level_handle(queue_id: int, offset: int, unique_id: str) -> str:
    """Return the handle of a message that waits for a delay level.

    The handle is `d1 <queue id> <offset> <message id>` in URL-safe base64.
    """
    plain = f"{_LEVEL_HANDLE_VERSION} {queue_id} {offset} {unique_id}"
    return base64.urlsafe_b64encode(plain.encode()).decode()


def _parse_level_handle(handle: str) -> tuple[int, int, str] | None:
    """Return the queue id, offset and message id in a handle of `_encode_level_handle`.

    Return None if `handle` is anything else.
    """
    try:
        plain = base64.b64decode(handle.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    fields = plain.split(" ", 3)
    if len(fields) != 4:
        return None
    version, queue_id_text, offset_text, unique_id = fields
    queue_id = natural(queue_id_text)
    offset = natural(offset_text)
    if version != _LEVEL_HANDLE_VERSION or queue_id is None or offset is None:
        return None
    return queue_id, offset, unique_id


def _illegal(remark: str) -> RequestError:
    """Return an error with the code ILLEGAL_OPERATION."""
    return RequestError(ResponseCode.ILLEGAL_OPERATION, remark)
