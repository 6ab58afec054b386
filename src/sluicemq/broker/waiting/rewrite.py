"""Which messages wait before they are delivered, and where they lie meanwhile.

    DELAY=n                  a level of messageDelayLevel: SCHEDULE_TOPIC_XXXX, queue n - 1
    TIMER_DELAY_SEC,         a time: rmq_sys_wheel_timer, queue 0; TIMER_OUT_MS says in which slot
    TIMER_DELAY_MS,          of the wheel
    TIMER_DELIVER_MS

A level wins over a time; of the times the first of the three counts. A time that has come is no
delay at all. REAL_TOPIC and REAL_QID say where the message belongs (spec/delivery.md §1, §2).
Prepared messages wait for their commit first.
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
_NEVER: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_TOPIC})


class DelayRewrite:
    """A rewrite of the intake. `slot_count` tells how many messages a slot (ms) holds."""

    def __init__(
        self, settings: Settings, clock: SteadyClock, slot_count: Callable[[int], int]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._slot_count = slot_count
        # These two hold until the next start, whatever request 25 says.
        self._delays_ms = settings.store.delay_levels_ms
        self._precision_ms = settings.store.timer_precision_ms

    def rewrite(self, draft: MessageToStore) -> None:
        """Send a draft that has to wait to where it waits. Raises RequestError."""
        properties = draft.properties
        kind = draft.sys_flag & TRANSACTION_MASK
        is_prepared = kind != COMMITTED and properties.get(TRAN_MSG, "").lower() == "true"
        if draft.topic in _NEVER or kind not in (0, COMMITTED) or is_prepared:
            return
        level = min(_integer(properties, DELAY), len(self._delays_ms))
        if level > 0:
            properties |= {
                DELAY: str(level), REAL_TOPIC: draft.topic, REAL_QUEUE: str(draft.queue_id),
            }  # fmt: skip
            for name in TIMER_PROPERTIES:
                properties.pop(name, None)
            draft.topic, draft.queue_id = SCHEDULE_TOPIC, level - 1
            draft.delay_ms = self._delays_ms[level - 1]
            draft.delay_start_ms = self._clock.now_ms()
        elif TIMER_OUT not in properties and any(name in properties for name in TIMER_PROPERTIES):
            self._to_timer(draft)
        elif TIMER_DELETES in properties and TIMER_OUT not in properties:
            raise _illegal(
                "a message that takes back another (TIMER_DEL_UNIQKEY) has no TIMER_DELIVER_MS."
            )

    def _to_timer(self, draft: MessageToStore) -> None:
        config = self._settings.store
        if not config.timer_enable:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                "timed messages are switched off here: timerWheelEnable is false. The message was "
                "not stored; a delay level works without them.",
            )
        slot_ms = self._slot(draft.properties)
        if slot_ms is None:
            return
        if TIMER_DELETES in draft.properties:
            _check_deletion(draft.topic, draft.properties[TIMER_DELETES])
        if self._slot_count(slot_ms) >= config.timer_slot_messages_max:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"{config.timer_slot_messages_max:,} messages are due in the same second already "
                "(timerCongestNumEachSlot). The message was not stored.",
            )
        unique_id = draft.properties.get(UNIQ_KEY)
        if unique_id and not draft.topic.startswith(RETRY_PREFIX):
            # One ms later: what takes it back falls into the same slot (spec/delivery.md §2).
            broker = self._settings.broker.broker_name
            handle = RecallHandle(draft.topic, broker, slot_ms + 1, unique_id)
            draft.answer_fields["recallHandle"] = handle.encode()
        draft.properties |= {
            TIMER_OUT: str(slot_ms), REAL_TOPIC: draft.topic, REAL_QUEUE: str(draft.queue_id),
        }  # fmt: skip
        draft.topic, draft.queue_id = TIMER_TOPIC, 0

    def _slot(self, properties: Mapping[str, str]) -> int | None:
        """The slot of the time that the properties name; None when it has come."""
        delay_max_s, now_ms = self._settings.store.timer_delay_max_s, self._clock.now_ms()
        if _SECONDS in properties:
            delay_ms = 1000 * _integer(properties, _SECONDS)
        elif _MILLISECONDS in properties:
            delay_ms = _integer(properties, _MILLISECONDS)
        else:
            delay_ms = _integer(properties, _DELIVER) - (now_ms - self._clock.lead_ms)
        if delay_ms <= 0:
            if TIMER_DELETES in properties:
                raise _illegal("the message to be taken back was due already: it is delivered.")
            return None
        if delay_ms > delay_max_s * 1000:
            raise _illegal(
                f"the message is due in {delay_ms:,} ms, the delay must not be more than "
                f"{delay_max_s * 1000:,} ms (timerMaxDelaySec = {delay_max_s}). It was not stored."
            )
        return slot_for_due_time(now_ms + delay_ms, self._precision_ms)


def _integer(properties: Mapping[str, str], name: str) -> int:
    """Return the whole number that a property holds, 0 if it is not there. Raises RequestError for
    a text that is none, and for a number that is no Java long."""
    value = properties.get(name)
    if value is None:
        return 0
    digits = value[1:] if value[:1] in ("-", "+") else value
    if not (digits.isascii() and digits.isdigit()):
        raise _illegal(
            f"the property {name} is {value!r:.80}, not a number. The message was not stored."
        )
    is_negative = value[0] == "-"
    number = natural(digits.lstrip("0") or "0", LONG_MAX + is_negative)
    if number is None:
        raise _illegal(
            f"the property {name} is {value:.80}, beyond the range of 64-bit numbers, which ends "
            f"at {LONG_MAX}. The message was not stored."
        )
    return -number if is_negative else number


def _check_deletion(topic: str, target: str) -> None:
    """Raise RequestError unless the message that `target` names, as topic + id, is one of `topic`:
    whoever may write to one topic could otherwise delete the timed messages of all others."""
    if not target.startswith(f"{topic}+"):
        raise _illegal(
            f"a message to topic {topic} cannot take back {target!r} (TIMER_DEL_UNIQKEY), which is "
            "not one of that topic. It was not stored. Send it to the topic of its target."
        )


def _illegal(remark: str) -> RequestError:
    return RequestError(ResponseCode.MESSAGE_ILLEGAL, remark)
