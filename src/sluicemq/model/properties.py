"""The table of reserved properties, which brokers, clients and the proxy share.

RocketMQ stores the properties of producers and of brokers in one map, so a producer could set a
property that a broker, a proxy or a client later trusts. For each reserved name this table says
what a broker does with the property of a message that it receives:

    KEPT      stored as sent: the value affects nothing but the message itself
    REMOVED   never stored: only a broker may write it, because readers trust it
    FILLED    stored as sent, or added by the broker if it is missing
    OBEYED    asks the broker for a delay, a recall or a transaction; refused in a batch

The rule is the same for every request that stores a message: SEND_MESSAGE (10),
SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320), staged rows of an exactly-once sink, replies
(324, 325), and CONSUMER_SEND_MSG_BACK (36). Three more rules depend on the topic of the message,
because clients have good reasons to send these names:

- `LANE` stays in a message to a retry topic, where a client of the group may set it.
- RETRY_TOPIC and ORIGIN_MESSAGE_ID say where a failed message came from. They are trusted only in
  retry and dead-letter topics, where only members of the group write (`forget_origin`).
- PREPARED_COPY_PROPERTIES are what a broker writes into copies of a prepared message. They are
  removed from a message that begins a transaction.

When Spark writes a stored message again as a new message, the copy keeps the reserved properties
that describe the message and its origin (`COPIED`), but not those that only its first delivery
needed.

Names and their meaning: spec/remoting.md §11.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from sluicemq.model.message import (
    CHECK_IMMUNITY,
    CLUSTER,
    DELAY,
    FIRST_POP_TIME,
    KEYS,
    MAX_RECONSUME_TIMES,
    MSG_REGION,
    ORIGIN_MESSAGE_ID,
    POP_CK,
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    RECONSUME_TIME,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    TIMER_PROPERTIES,
    TRACE_ON,
    TRAN_MSG,
    UNIQ_KEY,
    WAIT,
)
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX

CHECKSUM: Final = "__CRC32#"
TIMER_OUT: Final = "TIMER_OUT_MS"
TIMER_DELETES: Final = "TIMER_DEL_UNIQKEY"
CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
PREPARED_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
FIRST_HALF_OFFSET: Final = "SLUICE_FIRST_HALF"
"""SluiceMQ's, in copies of a prepared message: the queue offset of the original."""
POP_NEXT_OFFSET: Final = "SLUICE_NEXT"
"""SluiceMQ's, in checkpoints of POP: the offset at which the group continues, or 0."""
LANE: Final = "SLUICE_LANE"
"""SluiceMQ's, in retry topics: the lane that sent the message back."""
MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
MULTI_OFFSETS: Final = "INNER_MULTI_QUEUE_OFFSET"
BORN_HOST: Final = "__BORNHOST"
BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
PRIORITY: Final = "_SYS_MSG_PRIORITY_"
LITE_TOPIC: Final = "__LITE_TOPIC"
TRACE_CONTEXT: Final = "TRACE_CONTEXT"
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
TRANSIENT_PREFIX: Final = "__RMQ."


class OnSend(Enum):
    """What a broker does with a reserved property of a message that it receives."""

    KEPT = "kept"
    REMOVED = "removed"
    FILLED = "filled"
    OBEYED = "obeyed"


class Reserved(NamedTuple):
    """A reserved name and how it is treated.

    `on_send` says what a broker does with it, and `is_refused` whether SluiceMQ's clients refuse
    it among the properties of a user. If `is_hidden`, the proxy refuses it from gRPC clients and
    does not show it to them.
    """

    name: str
    on_send: OnSend = OnSend.KEPT
    is_refused: bool = False
    is_hidden: bool = True


_KEPT, _REMOVED, _FILLED, _OBEYED = OnSend
_BOTH: Final = (
    KEYS,
    TAGS,
    WAIT,
    UNIQ_KEY,
    RETRY_TOPIC,
    ORIGIN_MESSAGE_ID,
    RECONSUME_TIME,
    MAX_RECONSUME_TIMES,
    REAL_TOPIC,
    REAL_QUEUE,
    PRODUCER_GROUP,
    "INSTANCE_ID",
    "CORRELATION_ID",
    "REPLY_TO_CLIENT",
    "TTL",
    "MSG_TYPE",
)
_HIDDEN: Final = (
    FIRST_POP_TIME,
    "POP_CK_OFFSET",
    TIMER_OUT,
    "TIMER_ENQUEUE_MS",
    "TIMER_DEQUEUE_MS",
    "TIMER_ROLL_TIMES",
    "TIMER_DELAY_LEVEL",
    PREPARED_OFFSET,
    "MIN_OFFSET",
    "MAX_OFFSET",
    "BUYER_ID",
    "TRANSFER_FLAG",
    "CORRECTION_FLAG",
    "MQ2_FLAG",
    "CONSUME_START_TIME",
    "DUP_INFO",
    "EXTEND_UNIQ_INFO",
    "ARRIVE_TIME",
    "PUSH_REPLY_TIME",
    "ORIGIN_GROUP",
    BORN_HOST,
    BORN_TIMESTAMP,
    DLQ_ORIGIN_TOPIC,
    DLQ_ORIGIN_MESSAGE_ID,
    PRIORITY,
    LITE_TOPIC,
)
_SHOWN: Final = (SHARDING_KEY, CHECK_TIMES, CHECK_IMMUNITY, "INNER_NUM", "INNER_BASE")
"""RocketMQ's proxy shows these to consumers, so consumers may send them again in new messages."""
RESERVED: Final[Mapping[str, Reserved]] = {
    it.name: it
    for it in (
        *(
            Reserved(name, _REMOVED, is_refused=True)
            for name in (
                POP_CK,
                MULTI_OFFSETS,
                CHECKSUM,
                FIRST_HALF_OFFSET,
                POP_NEXT_OFFSET,
                LANE,
            )
        ),
        *(Reserved(name, _FILLED, is_refused=True) for name in (MSG_REGION, TRACE_ON, CLUSTER)),
        *(
            Reserved(name, _OBEYED, is_refused=True)
            for name in (
                DELAY,
                *TIMER_PROPERTIES,
                TRAN_MSG,
            )
        ),
        Reserved(TIMER_DELETES, _OBEYED),
        *(Reserved(name, is_refused=True) for name in _BOTH),
        *(Reserved(name) for name in _HIDDEN),
        *(Reserved(name, is_refused=True, is_hidden=False) for name in _SHOWN),
        *(
            Reserved(name, is_hidden=False)
            for name in (
                TRACE_CONTEXT,
                "__transactionId__",
                MULTI_DISPATCH,
                "REDIRECT",
                "PROPERTY_FORWARD_QUEUE_ID",
            )
        ),
    )
}
"""All reserved properties by name."""


def _names_of(*on_send_kinds: OnSend) -> frozenset[str]:
    """Return the names of the reserved properties that are treated in these ways on a send."""
    return frozenset(
        reserved.name for reserved in RESERVED.values() if reserved.on_send in on_send_kinds
    )


REMOVED_ON_SEND: Final = _names_of(_REMOVED)
REFUSED_IN_BATCH: Final = _names_of(_OBEYED)
ACTED_ON_SEND: Final = _names_of(_REMOVED, _FILLED, _OBEYED)
"""If a message has one of these, the fast paths of sending pass it to the general path."""
COPIED: Final = frozenset(
    {
        SHARDING_KEY,
        RETRY_TOPIC,
        ORIGIN_MESSAGE_ID,
        DLQ_ORIGIN_TOPIC,
        DLQ_ORIGIN_MESSAGE_ID,
        BORN_HOST,
        BORN_TIMESTAMP,
        TRACE_CONTEXT,
        PRIORITY,
        LITE_TOPIC,
        "INSTANCE_ID",
        "CORRELATION_ID",
        "BUYER_ID",
        "ORIGIN_GROUP",
        "EXTEND_UNIQ_INFO",
    }
)
"""Reserved properties that a copy of a stored message keeps."""
PREPARED_COPY_PROPERTIES: Final = (CHECK_TIMES, PREPARED_OFFSET)
"""Names that a broker writes into copies of a prepared message."""
REFUSED_PROPERTIES: Final = frozenset(
    reserved.name for reserved in RESERVED.values() if reserved.is_refused
)
"""Names that SluiceMQ's clients refuse among the properties of a user."""
HIDDEN_PROPERTIES: Final = frozenset(
    reserved.name for reserved in RESERVED.values() if reserved.is_hidden
)
"""Names that gRPC clients can neither send nor see among the properties of a user."""


def is_refused_property(name: str) -> bool:
    """Return whether SluiceMQ's clients refuse `name` among the properties of a user.

    They refuse names in REFUSED_PROPERTIES and names with the prefix TRANSIENT_PREFIX. Other names
    in RESERVED give False.
    """
    return name in REFUSED_PROPERTIES or name.startswith(TRANSIENT_PREFIX)


def is_copied(name: str) -> bool:
    """Return whether a copy of a stored message keeps the property `name`.

    It keeps the names in COPIED, and all names that are neither reserved nor have the prefix
    TRANSIENT_PREFIX.
    """
    if name in RESERVED:
        return name in COPIED
    return not name.startswith(TRANSIENT_PREFIX)


def settable_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that a user may set: those for which `is_refused_property` is False.

    Names in RESERVED that clients do not refuse, such as TIMER_OUT_MS, are among them.
    """
    return {name: content for name, content in properties.items() if not is_refused_property(name)}


def remove_on_send(properties: dict[str, str], *, is_retry: bool = False) -> None:
    """Remove from `properties`, in place, the names that only a broker may write (REMOVED_ON_SEND).

    If `is_retry`, the message is for a retry topic, and LANE stays, because a client of the group
    may set it there.
    """
    for name in REMOVED_ON_SEND.intersection(properties):
        if name != LANE or not is_retry:
            del properties[name]


def forget_origin(properties: dict[str, str], topic: str, group: str) -> None:
    """Remove RETRY_TOPIC and ORIGIN_MESSAGE_ID from `properties`, in place, if not trusted.

    Called before `group` sends back a message of `topic`. The properties are trusted, and stay, if
    `topic` is a dead-letter topic or the retry topic of `group`, where only members of a group
    write.
    """
    if not topic.startswith(DLQ_PREFIX) and topic != RETRY_PREFIX + group:
        properties.pop(RETRY_TOPIC, None)
        properties.pop(ORIGIN_MESSAGE_ID, None)
