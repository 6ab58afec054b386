"""The keys of a record, and the number by which the index knows each (spec/store.md §4).

A message is found by its unique key (UNIQ_KEY) and by each word of its KEYS, always together with
its topic: what is hashed is the text `topic#key`. The order is that of RocketMQ: unique key first.
Rolled-back messages are not indexed, prepared ones are, under the topic in which they lie.

This is the plain form, one record at a time; `columns` does the same for thousands at once,
and leaves to this one what is not common.
"""

from typing import Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.model.ids import java_hash
from sluicemq.model.message import KEYS, UNIQ_KEY
from sluicemq.record.codec import decode_properties, parse_head

HASH_MIN: Final = -(1 << 31)
ROLLBACK: Final = 0xC
"""The two bits of the sys flag that say what kind of transactional message it is; both: this."""


class Keyed(NamedTuple):
    """What a record says for the index: its topic, its store time (ms) and its keys in order."""

    topic: str
    store_time_ms: int
    unique_key: str
    keys: list[str]


def key_hash(topic: str, key: str) -> int:
    """0 to 2^31 - 1."""
    value = java_hash(f"{topic}#{key}")
    return 0 if value == HASH_MIN else abs(value)


def keys_of(data: bytes | memoryview, offset: int = 0) -> Keyed:
    """The keys of the record at `offset`. Raises ProtocolError when no whole record is there."""
    head = parse_head(data, offset)
    topic = str(data[head.topic], "utf-8", "replace")
    if head.sys_flag & ROLLBACK == ROLLBACK:
        return Keyed(topic, head.store_time_ms, "", [])
    properties = decode_properties(data[head.properties])
    unique_key = properties.get(UNIQ_KEY, "")
    words = [word for word in properties.get(KEYS, "").split(" ") if word]
    return Keyed(topic, head.store_time_ms, unique_key, words)


class KeyedHashes(NamedTuple):
    """The hashes of a record in the order in which they are indexed, and its store time (ms)."""

    hashes: list[int]
    store_time_ms: int


def keyed_hashes(data: bytes | memoryview, offset: int = 0) -> KeyedHashes:
    """What the index keeps of the record at `offset`: nothing when its lengths do not make up its
    size."""
    try:
        found = keys_of(data, offset)
    except ProtocolError:
        return KeyedHashes([], 0)
    keys = [found.unique_key, *found.keys] if found.unique_key else found.keys
    return KeyedHashes([key_hash(found.topic, key) for key in keys], found.store_time_ms)
