"""A message on its way in (`Message`) and one that a broker stored (`StoredMessage`).

Names of properties that RocketMQ reserves are constants here, because store, filter, broker and
client all speak of them (facts: spec/remoting.md §11).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sluicemq.hints import helpful
from sluicemq.model.ids import Host, encode_host, offset_message_id

KEYS = "KEYS"
TAGS = "TAGS"
WAIT = "WAIT"
DELAY = "DELAY"
UNIQ_KEY = "UNIQ_KEY"
SHARDING_KEY = "__SHARDINGKEY"
MSG_REGION = "MSG_REGION"
TRACE_ON = "TRACE_ON"
CLUSTER = "CLUSTER"
RETRY_TOPIC = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
RECONSUME_TIME = "RECONSUME_TIME"
RECONSUME_TIMES_MAX = 2**31 - 1
"""More redeliveries do not fit into a record: the count stays there."""
MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE = "REAL_QID"
TRAN_MSG = "TRAN_MSG"
PRODUCER_GROUP = "PGROUP"
CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
FIRST_POP_TIME = "1ST_POP_TIME"
POP_CK = "POP_CK"
TIMER_PROPERTIES = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")

RESERVED_PROPERTIES = frozenset({
    KEYS, TAGS, WAIT, DELAY, UNIQ_KEY, SHARDING_KEY, MSG_REGION, TRACE_ON, CLUSTER, RETRY_TOPIC,
    REAL_TOPIC, REAL_QUEUE, TRAN_MSG, PRODUCER_GROUP, ORIGIN_MESSAGE_ID, RECONSUME_TIME,
    MAX_RECONSUME_TIMES, "INSTANCE_ID", "TRANSACTION_CHECK_TIMES",
    CHECK_IMMUNITY,
    "CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "MSG_TYPE", POP_CK, "INNER_NUM", "INNER_BASE",
    *TIMER_PROPERTIES,
})  # fmt: skip


def own_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Those that the producer gave itself."""
    return {
        name: text for name, text in properties.items()
        if name not in RESERVED_PROPERTIES and not name.startswith("__RMQ.")
    }  # fmt: skip


COMPRESSED = 0x1
TRANSACTION_MASK = 0xC
PREPARED = 0x4
COMMITTED = 0x8
ROLLED_BACK = 0xC
INNER_BATCH = 0x80
UNQUEUED = PREPARED | INNER_BATCH
"""Bits of records that stand in no consume queue: half messages and those rolled back; several
messages in one record, for which RocketMQ has queue files of their own (spec/store.md §2.5)."""
BORN_HOST_IPV6 = 0x10
STORE_HOST_IPV6 = 0x20
COMPRESSION_MASK = 0x700
COMPRESSION_LZ4 = 0x100
COMPRESSION_ZSTD = 0x200
COMPRESSION_ZLIB = 0x300


_BODY_SHOWN: Final = 24


def glance(tag: str | None, keys: Sequence[str], body: bytes) -> str:
    """What a person sees of a message beside where it is: tag, keys, how the body begins."""
    begin, more = bytes(body[:_BODY_SHOWN]), "…" if len(body) > _BODY_SHOWN else ""
    words = [f" tag {tag}" if tag else "", f" keys {' '.join(keys):.60}" if keys else ""]
    return f"{''.join(words)} {begin!r}{more} {len(body):,} B"


@helpful
@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """What a producer sends. `properties` are the user's own; reserved names are refused.

    At most one of the last three says when to deliver it: a level of the brokers, ms from now, or
    ms since 1970. What breaks a rule raises ConfigurationError when it is sent.
    """

    topic: str
    body: bytes
    tag: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    flag: int = 0
    wait_store_ok: bool = True
    sharding_key: str | None = None
    delay_level: int = 0
    delay_ms: int | None = None
    deliver_at_ms: int | None = None

    def __repr__(self) -> str:
        return f"<Message to {self.topic}{glance(self.tag, self.keys, self.body)}>"


@helpful
@dataclass(frozen=True, slots=True, repr=False)
class StoredMessage:
    """One record of a commit log, decoded. `body` is decompressed when a client made it.

    Times are milliseconds since 1970; `physical_offset` is the position in the commit log;
    `queue_offset` the position in the queue; `size_bytes` that of the whole record.
    """

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size_bytes: int
    body: bytes
    properties: Mapping[str, str]
    flag: int
    sys_flag: int
    born_time_ms: int
    born_host: Host
    store_time_ms: int
    store_host: Host
    reconsume_times: int
    prepared_offset: int
    body_crc: int
    broker: str = ""

    @property
    def tag(self) -> str | None:
        return self.properties.get(TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.properties.get(KEYS, "").split())

    @property
    def offset_message_id(self) -> str:
        """Where it lies: store host and commit-log offset."""
        return offset_message_id(encode_host(self.store_host), self.physical_offset)

    @property
    def message_id(self) -> str:
        """The id the producer gave it, or where it lies when there is none."""
        return self.properties.get(UNIQ_KEY) or self.offset_message_id

    def __repr__(self) -> str:
        return (
            f"<StoredMessage {self.message_id} in {self.topic} queue {self.queue_id} of "
            f"{self.broker or '-'} offset {self.queue_offset}"
            f"{glance(self.tag, self.keys, self.body)}>"
        )
