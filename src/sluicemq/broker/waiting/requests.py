"""Messages that wait: taken back by handle (370), listed and cancelled by tools of ours, and what
slaves ask for (45 60 61).

A timed message is taken back by a mark: a message of its own that stands in the same slot of the
wheel and says whom it means (spec/delivery.md §2); RocketMQ's clients do so by the handle that the
send's answer gave them. A delayed one is taken back by remembering its offset.

Lists come in pages, each a few ms of work: a cursor says where the next one begins. `L:2:17` is
offset 17 of the queue of level 3, `T:…:52` the unit at 52 of a second.
"""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sluicemq.broker.background import TimeSlice
from sluicemq.broker.group_commit import Announced, Durable
from sluicemq.broker.produce.intake import MessageIntake, MessageToStore
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.waiting.delivery import Delayed
from sluicemq.broker.waiting.timers import FROM_END, Waiting
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

PAGE_MAX: Final = 1000
_PAGE_S: Final = 0.005
_RECALL_TAG: Final = "_RECALL_TAG_"
_OWN_VERSION: Final = "d1"


@dataclass(slots=True, eq=False)
class DelayRequests:
    """The request family of messages that wait."""

    settings: Settings
    topics: Topics
    delayed: Delayed
    intake: MessageIntake
    clock: SteadyClock

    # --- taking back

    def recall(self, header: RecallMessageRequest, command: Command, peer: Peer) -> Durable:
        """370. Succeeds whether the message exists or not, as RocketMQ's."""
        config = self.settings.broker
        if not config.recall_enable:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                "taking messages back is switched off: set recallMessageEnable = true on the "
                "broker, or use `sluice delay cancel`.",
            )
        if not config.broker_permission & PERM_WRITE and not config.recall_when_read_only:
            raise RequestError(
                ResponseCode.SERVICE_NOT_AVAILABLE, "the broker takes no messages at the moment."
            )
        if header.topic not in self.topics:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"the topic[{header.topic}] not exist")
        handle = parse_recall_handle(header.recall_handle)
        if handle is None:
            raise _illegal("recall handle is invalid")
        if handle.topic != header.topic:
            raise _illegal(f"the handle is one of topic {handle.topic}, not of {header.topic}.")
        return self._take_back(handle, command, peer)

    def _take_back(self, handle: RecallHandle, command: Command, peer: Peer) -> Durable:
        broker = self.settings.broker.broker_name
        if handle.broker != broker:
            raise _illegal(f"the handle is one of broker {handle.broker}; this is {broker}.")
        left_ms = handle.time_ms - self.clock.now_ms()
        if not 0 < left_ms < self.settings.store.timer_delay_max_s * 1000:
            raise _illegal(
                "it is too late: the message is delivered, or about to be."
                if left_ms <= 0
                else "the handle's time is later than any message may be due (timerMaxDelaySec)."
            )
        marks = {
            TAGS: _RECALL_TAG,
            TIMER_DELETES: f"{handle.topic}+{handle.unique_id}",
            UNIQ_KEY: handle.unique_id,
            "TIMER_DELIVER_MS": str(handle.time_ms - self.clock.lead_ms),
        }
        draft = MessageToStore(
            handle.topic, 0, b"0", marks, self.clock.now_ms(), peer.remote_bytes,
            self.settings.store_host,
        )  # fmt: skip
        self.intake.rewrite_and_append(draft)
        region = self.settings.broker.region
        fields = encode_header(SendMessageResponse(message_id=handle.unique_id, region=region))
        return Durable(encode_response(command, ResponseCode.SUCCESS, fields))

    def cancel(
        self, header: CancelDelayedRequest, command: Command, peer: Peer
    ) -> Announced | Durable:
        """Answer SLUICE_CANCEL_DELAYED (900102): never deliver the message whose handle `header`
        has from the list. The answer leaves when the replicas know it, too.

        Raises RequestError when the handle is not one of this broker, or the message is due.
        """
        timed = parse_recall_handle(header.handle)
        if timed is not None:
            return self._take_back(timed, command, peer)
        place = _parse_place(header.handle)
        if place is None:
            raise _illegal(f"{header.handle!r} is no handle: take it from `sluice delay list`.")
        queue_id, offset, unique_id = place
        waiting = self.delayed.levels.find(queue_id, offset)
        if waiting is None or waiting.due_ms <= self.clock.now_ms():
            raise _illegal("it is too late: the message is delivered, cancelled, or about to be.")
        if waiting.record is None or waiting.record.get_text(UNIQ_KEY) != unique_id:
            raise _illegal("the handle is of another broker or store.")
        self.delayed.levels.cancel(queue_id, offset)
        fields = encode_header(SendMessageResponse(message_id=unique_id))
        return Announced(Command(ResponseCode.SUCCESS, fields))

    # --- what waits

    def listed(self, header: ListDelayedRequest, command: Command, peer: Peer) -> Command:
        """900101: ours; a page of what waits, of a topic, with a key, or all."""
        count_max = min(max(header.count_max or PAGE_MAX, 1), PAGE_MAX)
        work = TimeSlice(self.clock, _PAGE_S, 10 * PAGE_MAX)
        found: list[bodies.WaitingMessage] = []
        cursor: str | None = None
        for waiting in self._from(header.cursor or "L:0:0"):
            work.count_done()
            message = self._shown(waiting)
            if (
                message is not None
                and header.topic in (None, "", message.topic)
                and header.key in (None, "", message.unique_id, *message.keys.split())
            ):
                found.append(message)
            if work.is_over or len(found) == count_max:
                cursor = waiting.cursor
                break
        fields = encode_header(ListDelayedResponse(cursor=cursor))
        return Command(ResponseCode.SUCCESS, fields, bodies.encode_waiting(found))

    def _from(self, cursor: str) -> Iterator[Waiting]:
        """Yield what waits from a cursor on: messages of levels, then timed messages that are in
        the queue alone, then those in the wheel. Raises RequestError for a wrong cursor."""
        timers = self.delayed.timers
        kind, first, second, taken_in = _parse_cursor(cursor)
        if kind == "L":
            levels = self.delayed.levels
            for queue_id in (one for one in levels.queue_ids if one >= first):
                yield from levels.pending(queue_id, second if queue_id == first else 0)
            kind, first, taken_in = "Q", 0, timers.files.queue_offset
        if kind == "Q":
            yield from timers.not_taken_in(first, taken_in)
            first, second = 0, FROM_END
        yield from timers.pending(first, second, taken_in)

    def _shown(self, waiting: Waiting) -> bodies.WaitingMessage | None:
        """None when it does not wait any more."""
        record = waiting.record
        if record is None or waiting.due_ms <= self.clock.now_ms():
            return None
        topic, unique_id = record.get_text(REAL_TOPIC), record.get_text(UNIQ_KEY)
        if waiting.level:
            place = f"{_OWN_VERSION} {waiting.level - 1} {waiting.queue_offset} {unique_id}"
            handle = base64.urlsafe_b64encode(place.encode()).decode()
        else:
            slot_ms, broker = record.get_number(TIMER_OUT) or 0, self.settings.broker.broker_name
            handle = RecallHandle(topic, broker, slot_ms + 1, unique_id).encode()
        wall_due_ms = waiting.due_ms - self.clock.lead_ms
        return bodies.WaitingMessage(
            topic,
            record.get_number(REAL_QUEUE) or 0,
            unique_id,
            record.get_text(KEYS),
            record.get_text(TAGS),
            waiting.level,
            wall_due_ms,
            record.store_time_ms,
            len(record.body),
            handle,
        )

    # --- what slaves ask for

    def delay_offsets(self, command: Command, peer: Peer) -> Command:
        """45: the text of delayOffset.json."""
        return Command(ResponseCode.SUCCESS, body=self.delayed.levels.table().encode())

    def timer_checkpoint(self, command: Command, peer: Peer) -> Command:
        """60: the 56 bytes of timercheck."""
        return Command(ResponseCode.SUCCESS, body=self.delayed.timers.files.checkpoint.encode())

    def timer_metrics(self, command: Command, peer: Peer) -> Command:
        """61: the text of timermetrics."""
        return Command(ResponseCode.SUCCESS, body=self.delayed.metrics.text().encode())


def _parse_cursor(cursor: str) -> tuple[str, int, int, int]:
    """Return where a list of what waits goes on: L, Q or T for the part of it, two numbers whose
    meaning depends on the part, and the offset of the timer queue up to which messages were in the
    wheel when the list began. Raises RequestError."""
    kind, *texts = cursor.split(":")
    numbers = [natural(text.removeprefix("-")) for text in texts]
    if kind not in ("L", "Q", "T") or len(numbers) != 3 - (kind == "L") or None in numbers:
        remark = f"{cursor!r} is no cursor of a list."
        raise RequestError(ResponseCode.INVALID_PARAMETER, remark)
    first, second, *rest = (
        -(number or 0) if text.startswith("-") else number or 0
        for text, number in zip(texts, numbers, strict=True)
    )
    return kind, first, second, rest[0] if rest else 0


def _parse_place(handle: str) -> tuple[int, int, str] | None:
    try:
        plain = base64.b64decode(handle.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    parts = plain.split(" ", 3)
    if len(parts) != 4 or parts[0] != _OWN_VERSION:
        return None
    position, size = natural(parts[1]), natural(parts[2])
    return None if position is None or size is None else (position, size, parts[3])


def _illegal(remark: str) -> RequestError:
    return RequestError(ResponseCode.ILLEGAL_OPERATION, remark)
