"""A message as a producer sends it (`Message`) and as a broker stores it (`StoredMessage`).

Names of properties that RocketMQ reserves are constants here, because the store, filters, brokers
and clients use them (spec/remoting.md §11). `model.properties` has the rules for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from sluicemq.errors import ConfigurationError, UndecodableBodyError
from sluicemq.hints import with_hints
from sluicemq.model.arguments import (
    Body,
    encode_body,
    parse_delay_ms,
    parse_deliver_at_ms,
    to_key_tuple,
)
from sluicemq.model.bodies import BODY_BYTES_MAX, COMPRESSED, Undecodable, decode_body
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
"""The largest number of redeliveries that a record can store. The count stays there."""
MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE = "REAL_QID"
TRAN_MSG = "TRAN_MSG"
PRODUCER_GROUP = "PGROUP"
CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
FIRST_POP_TIME = "1ST_POP_TIME"
POP_CK = "POP_CK"
TIMER_PROPERTIES = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")

TRANSACTION_MASK = 0xC
PREPARED = 0x4
COMMITTED = 0x8
ROLLED_BACK = 0xC
INNER_BATCH = 0x80
UNQUEUED = PREPARED | INNER_BATCH
"""Bits of records that have no unit in a consume queue.

They are prepared messages, messages that were rolled back, and several messages in one record, for
which RocketMQ has other queue files (spec/store.md §2.5).
"""
BORN_HOST_IPV6 = 0x10
STORE_HOST_IPV6 = 0x20


_BODY_SHOWN: Final = 24
_set: Final = object.__setattr__


def summarize(tag: str | None, keys: Sequence[str], body: bytes) -> str:
    """Return a short text about a message: tag, keys, the start of the body and its size."""
    summary = ""
    if tag:
        summary += f" tag {tag}"
    if keys:
        summary += f" keys {' '.join(keys):.60}"

    body_start = bytes(body[:_BODY_SHOWN])
    ellipsis = "…" if len(body) > _BODY_SHOWN else ""
    return f"{summary} {body_start!r}{ellipsis} {len(body):,} B"


def _choose_time(name: str, given_ms: int, other_ms: int | None) -> int:
    """Return a time that is given as the argument `name`, in milliseconds.

    Raises ConfigurationError if the same argument with `_ms` is given too.
    """
    if other_ms is not None:
        raise ConfigurationError(
            f"{name} and {name}_ms cannot be combined.", fix=f"Use only {name}."
        )
    return given_ms


@with_hints
@dataclass(frozen=True, slots=True, repr=False, init=False)
class Message:
    """A message as a producer sends it: the arguments of `send` in one object.

    `delay_ms` and `deliver_at_ms` are what `delay` and `deliver_at` of the constructor became.
    """

    topic: str
    body: bytes
    tag: str | None
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    flag: int
    wait_store_ok: bool
    sharding_key: str | None
    delay_level: int
    delay_ms: int | None
    deliver_at_ms: int | None

    def __init__(
        self,
        topic: str,
        body: Body,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        wait_store_ok: bool = True,
        sharding_key: str | None = None,
        delay_level: int = 0,
        delay_ms: int | None = None,
        deliver_at_ms: int | None = None,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
    ) -> None:
        """Create a message from the arguments that `send` takes.

        - `body`: a string is sent as UTF-8.
        - `tag`: what consumers filter by.
        - `keys`: a string, or several, by which the message can be found.
        - `properties`: strings by name, without names that RocketMQ reserves.
        - `flag`: a 32-bit number for the application's own use.
        - `wait_store_ok`: if False, the broker responds before the message is as safe as it is
          configured to keep messages.
        - `sharding_key`: messages with the same key go to the same queue.
        - At most one of the others says when the message is delivered: `delay_level` by a level of
          the broker, `delay` after some seconds or a timedelta, `deliver_at` at a datetime with a
          time zone, or in milliseconds since 1970. `delay_ms` and `deliver_at_ms` are the same in
          milliseconds.

        Raises ConfigurationError for a body, keys or times of a wrong type. All other rules are
        checked when the message is sent.
        """
        if delay is not None:
            delay_ms = _choose_time("delay", parse_delay_ms(delay), delay_ms)
        if deliver_at is not None:
            deliver_at_ms = _choose_time(
                "deliver_at", parse_deliver_at_ms(deliver_at), deliver_at_ms
            )
        # The class is frozen.
        _set(self, "topic", topic)
        _set(self, "body", body if isinstance(body, bytes) else encode_body(body))
        _set(self, "tag", tag)
        _set(self, "keys", keys if isinstance(keys, tuple) else to_key_tuple(keys))
        _set(self, "properties", {} if properties is None else properties)
        _set(self, "flag", flag)
        _set(self, "wait_store_ok", wait_store_ok)
        _set(self, "sharding_key", sharding_key)
        _set(self, "delay_level", delay_level)
        _set(self, "delay_ms", delay_ms)
        _set(self, "deliver_at_ms", deliver_at_ms)

    def __repr__(self) -> str:
        return f"<Message to {self.topic}{summarize(self.tag, self.keys, self.body)}>"


@with_hints
@dataclass(frozen=True, slots=True, repr=False)
class StoredMessage:
    """One record of a commit log, decoded. Its body is decoded when it is first read.

    `raw_body` is the body as it is stored, possibly compressed, and `body` is what the producer
    sent. Times are milliseconds since 1970. `physical_offset` is the position of the record in the
    commit log in bytes, `queue_offset` the number of the message in its queue, and `size_bytes` the
    size of the whole record. A compressed body that has more than `body_bytes_max` bytes when it is
    decompressed is not decoded.
    """

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size_bytes: int
    raw_body: bytes
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
    body_bytes_max: int = field(default=BODY_BYTES_MAX, compare=False)
    _decoded: bytes | Undecodable | None = field(default=None, init=False, compare=False)
    """The result of decoding a compressed body, or None before `body` is first read."""

    @property
    def body(self) -> bytes:
        """The body that the producer sent.

        Raises UndecodableBodyError if it cannot be decoded. `raw_body` can be read even then.
        """
        if not self.sys_flag & COMPRESSED:
            return self.raw_body
        decoded = self._read_body()
        if isinstance(decoded, bytes):
            return decoded
        raise self._make_body_error(decoded)

    @property
    def body_error(self) -> UndecodableBodyError | None:
        """The error that reading `body` raises, or None if the body can be read."""
        if not self.sys_flag & COMPRESSED:
            return None
        decoded = self._read_body()
        return None if isinstance(decoded, bytes) else self._make_body_error(decoded)

    @property
    def body_or_raw(self) -> bytes:
        """The body that the producer sent, or the stored bytes if it cannot be decoded."""
        return self.raw_body if self.body_error is not None else self.body

    def _read_body(self) -> bytes | Undecodable:
        """Return the decoded body, or the reason why it cannot be decoded.

        The body is decoded at the first call, and the result is stored.
        """
        decoded = self._decoded
        if decoded is None:
            decoded = decode_body(self.raw_body, self.sys_flag, self.body_bytes_max)
            object.__setattr__(self, "_decoded", decoded)  # the class is frozen
        return decoded

    def _make_body_error(self, undecodable: Undecodable) -> UndecodableBodyError:
        """Return the error that reading `body` raises, for the reason in `undecodable`."""
        return UndecodableBodyError(
            self.message_id,
            self.topic,
            self.broker,
            self.queue_id,
            self.queue_offset,
            reason=undecodable.reason,
            fix=undecodable.fix,
        )

    @property
    def tag(self) -> str | None:
        """The tag, or None if the message has no tag."""
        return self.properties.get(TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys by which the message can be queried."""
        return tuple(self.properties.get(KEYS, "").split())

    @property
    def offset_message_id(self) -> str:
        """The id that contains the host of the broker and the position in its commit log."""
        return offset_message_id(encode_host(self.store_host), self.physical_offset)

    @property
    def message_id(self) -> str:
        """The id that the producer gave the message, or `offset_message_id` if it gave none."""
        return self.properties.get(UNIQ_KEY) or self.offset_message_id

    def __repr__(self) -> str:
        return (
            f"<StoredMessage {self.message_id} in {self.topic} queue {self.queue_id} of "
            f"{self.broker or '-'} offset {self.queue_offset}{self.summary()}>"
        )

    def summary(self) -> str:
        """Return `summarize` of this message, with the stored bytes of an undecodable body."""
        bad = "" if self.body_error is None else " undecodable"
        return summarize(self.tag, self.keys, self.body_or_raw) + bad
