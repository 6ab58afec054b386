"""Rewrites sent messages that must wait before they are delivered.

The properties of a message say how it waits, and in which topic it is stored meanwhile:

    DELAY=n                  a level of messageDelayLevel: SCHEDULE_TOPIC_XXXX, queue n - 1
    TIMER_DELAY_SEC,         a time: rmq_sys_wheel_timer, queue 0. TIMER_OUT_MS is set to the slot
    TIMER_DELAY_MS,          of the timer wheel
    TIMER_DELIVER_MS

A message with a level and a time waits for the level. If it has several times, the first of these
three counts. A message whose time has come is not delayed. REAL_TOPIC and REAL_QID are set to the
topic and queue of the message (spec/delivery.md §1, §2). Prepared messages of transactions are not
rewritten before their commit.
"""

from collections.abc import Callable, Mapping
from typing import Final

from sluicemq.broker.produce.intake import MessageToStore
from sluicemq.broker.settings import Settings
from sluicemq.clock import SteadyClock
from sluicemq.errors import RequestError
from sluicemq.model.ids import RecallHandle
from sluicemq.model.message import (
    COMMITTED,
    DELAY,
    REAL_QUEUE,
    REAL_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.model.system_names import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.numbers import LONG_MAX, natural
from sluicemq.store.timers.placing import TIMER_DELETES, TIMER_OUT, slot_for_due_time
from sluicemq.wire.codes import ResponseCode

_SECONDS, _MILLISECONDS, _DELIVER = TIMER_PROPERTIES
_UNCHANGED_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_TOPIC})
"""Messages of these topics are never rewritten."""


class DelayRewriter:
    """Rewrites messages for the intake: one with a delay is stored in the topic where it waits."""

    def __init__(
        self, settings: Settings, clock: SteadyClock, slot_count: Callable[[int], int]
    ) -> None:
        """Create a rewriter with the delays and the timer precision that are in `settings` now.

        `slot_count(slot_ms)` returns the number of messages in a slot of the timer wheel. A message
        for a full slot is refused (timerCongestNumEachSlot).
        """
        self._settings = settings
        self._clock = clock
        self._slot_count = slot_count
        # These two change at a start only, not when UPDATE_BROKER_CONFIG (25) sets them.
        self._delays_ms = settings.store.delay_levels_ms
        self._precision_ms = settings.store.timer_precision_ms

    def rewrite(self, draft: MessageToStore) -> None:
        """Redirect a message with a delay to the topic where it waits, by changing `draft`.

        Its topic, queue and properties are changed. A message with a delay level also gets
        `delay_ms` and `delay_start_ms`, from which its due time is computed. A message with a time
        also gets a recall handle in the fields of the answer.

        `draft` stays unchanged if it has no delay, if its time has come, if it is a prepared
        message or the rollback of a transaction, or if it is in a topic for waiting messages
        already.

        Raises RequestError if the delay is invalid, if timed messages are not enabled, or if too
        many messages are due in the same slot.
        """
        properties = draft.properties
        transaction_type = draft.sys_flag & TRANSACTION_MASK
        is_marked = properties.get(TRAN_MSG, "").lower() == "true"
        is_prepared = is_marked and transaction_type != COMMITTED
        may_wait = transaction_type in (0, COMMITTED) and not is_prepared
        if not may_wait or draft.topic in _UNCHANGED_TOPICS:
            return

        level = min(_parse_integer(properties, DELAY), len(self._delays_ms))
        if level > 0:
            self._rewrite_for_level(draft, level)
        elif TIMER_OUT not in properties and any(name in properties for name in TIMER_PROPERTIES):
            self._rewrite_timed(draft)
        elif TIMER_DELETES in properties and TIMER_OUT not in properties:
            raise _illegal(
                "A message that recalls another one (TIMER_DEL_UNIQKEY) must have the property "
                "TIMER_DELIVER_MS."
            )

    def _rewrite_for_level(self, draft: MessageToStore, level: int) -> None:
        """Redirect `draft` to the queue of a delay level in the topic SCHEDULE_TOPIC.

        Its own topic and queue are kept in the properties REAL_TOPIC and REAL_QID. Properties of
        timed messages are removed. `delay_ms` and `delay_start_ms` of `draft` are set.
        """
        draft.properties |= {
            DELAY: str(level),
            REAL_TOPIC: draft.topic,
            REAL_QUEUE: str(draft.queue_id),
        }
        for name in TIMER_PROPERTIES:
            draft.properties.pop(name, None)
        draft.topic = SCHEDULE_TOPIC
        draft.queue_id = level - 1
        draft.delay_ms = self._delays_ms[level - 1]
        draft.delay_start_ms = self._clock.now_ms()

    def _rewrite_timed(self, draft: MessageToStore) -> None:
        """Redirect `draft`, which has a time, to the timer queue. Do nothing if its time has come.

        Its own topic and queue are kept in the properties REAL_TOPIC and REAL_QID, and its slot in
        TIMER_OUT_MS. If it has a message id and is not a retry, a handle to recall it is added to
        the fields of the answer.

        Raises RequestError if timed messages are disabled, if the time is too late or the slot is
        full, or if a recall marker names a message of another topic.
        """
        config = self._settings.store
        if not config.timer_enable:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                "Timed messages are disabled on this broker (timerWheelEnable = false). The "
                "message was not stored. Use a delay level instead, or enable the setting.",
            )
        slot_ms = self._find_slot_ms(draft.properties)
        if slot_ms is None:
            return

        if TIMER_DELETES in draft.properties:
            _check_recall_target(draft.topic, draft.properties[TIMER_DELETES])
        if self._slot_count(slot_ms) >= config.timer_slot_messages_max:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"{config.timer_slot_messages_max:,} messages are due in the same second already "
                "(timerCongestNumEachSlot). The message was not stored.",
            )

        self._add_recall_handle(draft, slot_ms)
        draft.properties |= {
            TIMER_OUT: str(slot_ms),
            REAL_TOPIC: draft.topic,
            REAL_QUEUE: str(draft.queue_id),
        }
        draft.topic = TIMER_TOPIC
        draft.queue_id = 0

    def _add_recall_handle(self, draft: MessageToStore, slot_ms: int) -> None:
        """Add a handle to recall the timed message `draft` to the fields of its answer.

        `slot_ms` is the start of its slot in the timer wheel. Do nothing if the message has no
        message id, or is a retry.
        """
        unique_id = draft.properties.get(UNIQ_KEY)
        if unique_id and not draft.topic.startswith(RETRY_PREFIX):
            # One ms later: the recall marker is placed in the same slot (spec/delivery.md §2).
            broker = self._settings.broker.broker_name
            handle = RecallHandle(draft.topic, broker, slot_ms + 1, unique_id)
            draft.answer_fields["recallHandle"] = handle.encode()

    def _find_slot_ms(self, properties: Mapping[str, str]) -> int | None:
        """Return the start of the slot, in ms since 1970, for the time in `properties`.

        Return None if the time has come. The properties TIMER_DELAY_SEC and TIMER_DELAY_MS are
        delays from now. TIMER_DELIVER_MS is a time of the wall clock. Slots are times of the steady
        clock.

        Raises RequestError for a delay of more than timerMaxDelaySec, and for a recall marker whose
        time has come.
        """
        delay_max_s = self._settings.store.timer_delay_max_s
        now_ms = self._clock.now_ms()
        if _SECONDS in properties:
            delay_ms = 1000 * _parse_integer(properties, _SECONDS)
        elif _MILLISECONDS in properties:
            delay_ms = _parse_integer(properties, _MILLISECONDS)
        else:
            delay_ms = _parse_integer(properties, _DELIVER) - (now_ms - self._clock.lead_ms)
        if delay_ms <= 0:
            if TIMER_DELETES in properties:
                raise _illegal("The message to recall was due already. It has been delivered.")
            return None
        if delay_ms > delay_max_s * 1000:
            raise _illegal(
                f"the message is due in {delay_ms:,} ms, the delay must not be more than "
                f"{delay_max_s * 1000:,} ms (timerMaxDelaySec = {delay_max_s}). It was not stored."
            )
        return slot_for_due_time(now_ms + delay_ms, self._precision_ms)


def _parse_integer(properties: Mapping[str, str], name: str) -> int:
    """Return the integer that a property contains, 0 if the property is absent.

    Raises RequestError if its value is not an integer, or out of the range of 64-bit integers.
    """
    signed_digits = properties.get(name)
    if signed_digits is None:
        return 0
    has_sign = signed_digits[:1] in ("-", "+")
    digits = signed_digits[1:] if has_sign else signed_digits
    if not (digits.isascii() and digits.isdigit()):
        raise _illegal(
            f"the property {name} is {signed_digits!r:.80}, not a number. The message was not "
            "stored."
        )
    is_negative = signed_digits[0] == "-"
    number = natural(digits.lstrip("0") or "0", LONG_MAX + is_negative)
    if number is None:
        raise _illegal(
            f"the property {name} is {signed_digits:.80}, beyond the range of 64-bit numbers, "
            f"which ends at {LONG_MAX}. The message was not stored."
        )
    return -number if is_negative else number


def _check_recall_target(topic: str, target: str) -> None:
    """Raise RequestError unless `target` names a message of `topic`.

    `target` is "<topic>+<message id>", the property of a recall marker. Without this check, a
    client that may write to one topic could delete the timed messages of all others.
    """
    if not target.startswith(f"{topic}+"):
        raise _illegal(
            f"A message to topic {topic} cannot recall {target!r} (TIMER_DEL_UNIQKEY), which is not"
            " in that topic. The message was not stored. Send it to the topic of the message to "
            "recall."
        )


def _illegal(remark: str) -> RequestError:
    """Return an error with the code MESSAGE_ILLEGAL."""
    return RequestError(ResponseCode.MESSAGE_ILLEGAL, remark)
