"""A message that a handler could not handle: how often it has come, and the copy that comes again.

Usually the broker makes the copy (36). When that fails the client sends it by itself, as an
ordinary message to %RETRY%group with what the broker would have written: where it was first read
and first lay, how often it has come, the delay level (spec/remoting.md §17). An orderly consumer
always goes that way when it gives up: the broker makes a dead letter of it.

A message that was read from a %DLQ% topic is counted from the beginning, as the broker does.
"""

import zlib
from dataclasses import dataclass
from typing import Final

from sluicemq.client.core.messages import COMPRESS_FROM_BYTES, Outgoing
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import (
    COMPRESSED,
    COMPRESSION_ZLIB,
    DELAY,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    WAIT,
    StoredMessage,
)
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX

LEVEL_FIRST: Final = 3
LEVEL_DEAD: Final = -1
"""A delay level that says: never again, dead letters."""
ORDERED_TIMES_MAX: Final = 2**31 - 1
INNER_GROUP: Final = "CLIENT_INNER_PRODUCER"
_LEFT_OUT: Final = frozenset({DELAY, WAIT, TRAN_MSG, *TIMER_PROPERTIES})
_COMPRESS_LEVEL: Final = 5


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How a group treats failures.

    `times_max` retries, then dead letters; None leaves it to the group's settings at the broker
    (16), for an ordered group it means no end. `level` is the delay of each retry: 0 the ladder
    10 s, 30 s … 2 h, n a level of the broker, -1 dead letters at once. `suspend_s` is how long an
    ordered queue rests after a failure.
    """

    times_max: int | None = None
    level: int = 0
    suspend_s: float = 1.0

    def __post_init__(self) -> None:
        if self.times_max is not None and not 0 <= self.times_max <= ORDERED_TIMES_MAX:
            raise ConfigurationError(
                f"max_reconsume_times is {self.times_max}.",
                cure=f"Use 0 to {ORDERED_TIMES_MAX}, or None for the group's own setting.",
            )
        if self.level < LEVEL_DEAD:
            raise ConfigurationError(
                f"the delay level is {self.level}.",
                cure="Use 0 (the ladder), a level of the broker (1 to 18), or -1 (dead letters).",
            )
        if not 0.01 <= self.suspend_s <= 30.0:
            raise ConfigurationError(
                f"an ordered queue would rest {self.suspend_s} s.", cure="Use 0.01 to 30 s."
            )


def times_so_far(record: StoredMessage) -> int:
    """How often the group has got the message again."""
    return 0 if record.topic.startswith(DLQ_PREFIX) else record.reconsume_times


def first_topic(record: StoredMessage) -> str:
    """The topic that the handler sees: the one it subscribed to, also after a retry."""
    if record.topic.startswith(RETRY_PREFIX):
        return record.properties.get(RETRY_TOPIC) or record.topic
    return record.topic


def retry_copy(
    record: StoredMessage, group: str, times: int, level: int, times_max: int | None
) -> Outgoing:
    """The message to %RETRY%group; `times` is how often it has come again so far."""
    properties = {name: v for name, v in record.properties.items() if name not in _LEFT_OUT}
    if record.topic.startswith(DLQ_PREFIX):
        properties[RETRY_TOPIC] = record.topic
    properties.setdefault(RETRY_TOPIC, record.topic)
    properties.setdefault(ORIGIN_MESSAGE_ID, record.offset_message_id)
    properties[DELAY] = str(level if level > 0 else LEVEL_FIRST + times)
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    body, sys_flag = record.body, 0
    if len(body) >= COMPRESS_FROM_BYTES:
        body, sys_flag = zlib.compress(body, _COMPRESS_LEVEL), COMPRESSED | COMPRESSION_ZLIB
    return Outgoing(
        RETRY_PREFIX + group, body, text, record.message_id, sys_flag, record.flag, True,
        times + 1, 0 if level < 0 else times_max,
    )  # fmt: skip
