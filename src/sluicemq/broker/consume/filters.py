"""The SQL92 expressions of consumer groups and their file (config/consumerFilter.json).

An expression is kept while its group is away, and across restarts, so that a RocketMQ broker that
opens the store knows it too. The rules are RocketMQ's (spec/filter.md §4, spec/store.md §11):

    a heartbeat names it      new: compiled and kept, from now on; the same: alive again; another of
                              a later client: compiled anew, or forgotten when it does not compile
    a heartbeat lacks it      dead, as is everything of a group whose last member leaves
    loaded from the file      dead: since 30 s before the start, or since it was made
    dead for a day            forgotten (filterDataCleanTimeSpan)

Pulls do not ask here: the group's subscription, with its compiled filter, comes with its heartbeats
(`clients.py`). Those that name an expression themselves, and pops, get the filter of
`RequestFilters`.

With filter bitmaps switched on, a Java broker keeps for each message a Bloom filter of the groups
whose expression it matches. The places of a group's bits are part of the file (spec/store.md §3.2);
a broker that finds another number of them there drops the whole file. So we write what it would:
murmur3 (128 bits, x64, seed 0) of `group#topic` gives two numbers, their sums give the places.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from sluicemq.broker.documents import Document
from sluicemq.broker.lanes.rules import ByteCache
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import FilterError, RequestError
from sluicemq.files import Files
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import is_tag_kind, make_filter, preparation, subscribe
from sluicemq.model.subscription import ALL, TAG, MessageFilter, Subscription
from sluicemq.store.gather import PostponedError, PostponedWork
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.tables import (
    ConsumerFilter,
    decode_consumer_filters_file,
    encode_consumer_filters_file,
)

log = logging.getLogger(__name__)

DEAD_BEFORE_START_MS: Final = 30_000
FILTERS_BYTES_MAX: Final = 32 << 20
TABLE_BYTES_MAX: Final = 16 << 20
"""Of the expressions that are kept for their file, with those of groups that are away."""
ENTRY_BYTES: Final = 500


def filter_bytes(kind: str, expression: str) -> int:
    """Return about how many bytes the compiled filter of an expression takes: of SQL92 85 for each
    character of conditions with long texts, 280 of the shortest conditions."""
    return (4 if is_tag_kind(kind) else 200) * len(expression)


class RequestFilters:
    """The filters of expressions that requests bring, each time anew; compiled ones are kept."""

    def __init__(self) -> None:
        def filter_of(kind: str, expression: str) -> MessageFilter | None:
            return make_filter(subscribe("", expression, kind))

        self._kept = ByteCache(filter_of, filter_bytes, FILTERS_BYTES_MAX)

    def of(self, kind: str | None, expression: str | None) -> MessageFilter | None:
        """The filter, None when every message matches. Raises RequestError for an expression that
        does not compile, PostponedError for one that takes long."""
        kind = kind or TAG
        expression = expression or (ALL if is_tag_kind(kind) else "")
        if expression == ALL and kind == TAG:
            return None
        for job in preparation(expression, kind):
            raise PostponedError(PostponedWork(job, lambda _: None))
        try:
            return self._kept(kind, expression)
        except FilterError as error:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                f"parse the consumer's subscription failed: {error}",
            ) from error


class Watch:
    """A group's subscription to a topic with its compiled filter.

    `is_broken` says that the SQL92 expression does not compile: then pulls are refused.
    """

    __slots__ = ("filter", "is_broken", "is_by_tags", "subscription")

    def is_of(self, subscription: Subscription) -> bool:
        """Return whether this is the filter of a subscription, whatever its version."""
        mine = self.subscription
        return (mine.expression, mine.kind, mine.codes) == (
            subscription.expression, subscription.kind, subscription.codes,
        )  # fmt: skip

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.is_by_tags = is_tag_kind(subscription.kind)
        self.is_broken = False
        self.filter: MessageFilter | None = None
        try:
            if self.is_by_tags and not subscription.codes:
                # Some clients leave the codes to the broker.
                parsed = subscribe(
                    subscription.topic, subscription.expression, version=subscription.version
                )
                self.subscription = subscription = parsed
            self.filter = make_filter(subscription)
        except FilterError as error:
            self.is_broken = True
            log.warning("subscription to %s does not compile: %s", subscription.topic, error)
        else:
            if isinstance(self.filter, Selector) and self.filter.ignored:
                log.warning(
                    "subscription to %s: %r is ignored at the end of %r, as in RocketMQ",
                    subscription.topic, self.filter.ignored, subscription.expression,
                )  # fmt: skip


class ConsumerFilters:
    """Group -> topic -> filter. `on_alive` hears of each topic that members filter by SQL92."""

    def __init__(
        self, settings: Settings, files: Files, clock: Clock, on_alive: Callable[[str], None]
    ) -> None:
        config = settings.broker
        self._clock = clock
        self._on_alive = on_alive
        self._shape = bloom_shape(config.filter_groups_expected, config.filter_error_percent)
        self._kept_ms = config.filter_kept_ms
        self.table: dict[str, dict[str, ConsumerFilter]] = {}
        self.size_bytes = 0
        self._is_full = False
        self.document = Document(
            files,
            f"{settings.store.root}/config/consumerFilter.json",
            lambda: encode_consumer_filters_file(
                item for topics in self.table.values() for item in topics.values()
            ),
        )

    # ------------------------------------------------------------------------------- the file

    def load(self) -> None:
        """Reads the file. Raises StoreDamagedError."""
        found = self.document.load(decode_consumer_filters_file) or []
        for item in found:
            if (item.bit_count, len(item.bits)) != self._shape:
                log.warning(
                    "the filters in %s were made with another expectConsumerNumUseFilter or "
                    "maxErrorRateOfBloomFilter: they are dropped, as RocketMQ does; consumers "
                    "bring them again", self.document.path,
                )  # fmt: skip
                return
        limit = self._clock.now_ms() - DEAD_BEFORE_START_MS
        for item in found:
            dead_ms = item.dead_ms or max(item.born_ms, limit)
            self._put(dataclasses.replace(item, dead_ms=dead_ms))
        self.document.changed = any(not item.dead_ms for item in found)

    def clean(self) -> None:
        """Forgets what has been dead for long."""
        limit = self._clock.now_ms() - self._kept_ms
        for group, topics in list(self.table.items()):
            for item in list(topics.values()):
                if item.is_dead and item.dead_ms <= limit:
                    self._forget(group, item.topic)

    def _forget(self, group: str, topic: str) -> None:
        topics = self.table[group]
        self.size_bytes -= _size_of(topics.pop(topic))
        if not topics:
            del self.table[group]
        self.document.changed = True

    # ---------------------------------------------------------------------------- heartbeats

    def subscribed(self, group: str, subscriptions: Iterable[Subscription]) -> None:
        """What a heartbeat says that the group wants; nothing when its last member is gone."""
        named = set()
        for subscription in subscriptions:
            named.add(subscription.topic)
            if is_tag_kind(subscription.kind) or not subscription.expression:
                continue
            old = self.table.get(group, {}).get(subscription.topic)
            if old is None:
                self._make(group, subscription)
            elif subscription.version <= old.version:
                if subscription.version == old.version and old.is_dead:
                    self._put(dataclasses.replace(old, dead_ms=0))
            elif (old.expression, old.kind) == (subscription.expression, subscription.kind):
                self._put(dataclasses.replace(old, version=subscription.version, dead_ms=0))
            elif not self._make(group, subscription):
                self._forget(group, subscription.topic)
        for item in list(self.table.get(group, {}).values()):
            if item.topic not in named and not item.is_dead:
                self._put(dataclasses.replace(item, dead_ms=self._clock.now_ms()))

    def _make(self, group: str, subscription: Subscription) -> bool:
        try:
            make_filter(subscription)
        except FilterError:
            return False  # `clients.py` says so in the log
        topic = subscription.topic
        if not self._has_room(subscription):
            return True  # its members are served; another broker that opens the store asks them
        self._put(
            ConsumerFilter(
                topic, group, subscription.expression, subscription.kind, subscription.version,
                self._clock.now_ms(), 0, self._shape.bits_of(group, topic), self._shape.bit_count,
            )
        )  # fmt: skip
        return True

    def _has_room(self, subscription: Subscription) -> bool:
        """Make room for an expression: those that have been dead for longest are forgotten, as many
        as let three quarters of the room be used. Return whether there is room now."""
        size = ENTRY_BYTES + len(subscription.expression)
        if self.size_bytes + size > TABLE_BYTES_MAX:
            dead = [it for topics in self.table.values() for it in topics.values() if it.is_dead]
            dead.sort(key=lambda it: it.dead_ms)
            for item in dead:
                if self.size_bytes + size <= TABLE_BYTES_MAX * 3 // 4:
                    break
                self._forget(item.group, item.topic)
        has_room = self.size_bytes + size <= TABLE_BYTES_MAX
        if not has_room and not self._is_full:
            log.warning(
                "the SQL92 expressions of groups take %d bytes, the limit is %d: further ones are "
                "served, but not kept in %s", self.size_bytes, TABLE_BYTES_MAX, self.document.path,
            )  # fmt: skip
        self._is_full = not has_room
        return has_room

    def _put(self, item: ConsumerFilter) -> None:
        topics = self.table.setdefault(item.group, {})
        if item.topic in topics:
            self.size_bytes -= _size_of(topics[item.topic])
        self.size_bytes += _size_of(item)
        topics[item.topic] = item
        if not item.is_dead:
            self._on_alive(item.topic)
        self.document.changed = True


def _size_of(item: ConsumerFilter) -> int:
    return ENTRY_BYTES + len(item.expression)


_MASK: Final = 0xFFFFFFFFFFFFFFFF
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


class BloomShape(NamedTuple):
    """How many bits there are, and how many of them a group has."""

    bit_count: int
    places: int

    def bits_of(self, group: str, topic: str) -> tuple[int, ...]:
        """The places of the group's bits, in RocketMQ's order; the same one may come twice.

        >>> bloom_shape(32, 20).bits_of("GroupA", "TopicA")
        (29, 107, 11)
        """
        code = murmur3_64(f"{group}#{topic}".encode())
        low, high = code & 0xFFFFFFFF, code >> 32
        found = []
        for number in range(1, self.places + 1):
            mixed = (low + number * high) & 0xFFFFFFFF
            if mixed & 0x80000000:
                mixed ^= 0xFFFFFFFF
            found.append(mixed % self.bit_count)
        return tuple(found)


def bloom_shape(groups: int, error_percent: int) -> BloomShape:
    """For so many groups with so many false positives, as expectConsumerNumUseFilter and
    maxErrorRateOfBloomFilter say it."""
    rate = error_percent / 100
    bits = math.ceil(groups * math.log2(1 / rate) * math.log2(math.e))
    return BloomShape(-(-bits // 8) * 8, math.ceil(math.log(rate) / math.log(0.5)))


def murmur3_64(data: bytes) -> int:
    """The first half of the 128-bit murmur3 hash (x64) with seed 0."""
    first = second = 0
    for at in range(0, len(data) + 1, 16):  # the last block is not whole, or empty
        low = int.from_bytes(data[at : at + 8], "little")
        high = int.from_bytes(data[at + 8 : at + 16], "little")
        first ^= _rotated(low * _C1, 31) * _C2 & _MASK
        if at + 16 <= len(data):
            first = (_rotated(first, 27) + second) * 5 + 0x52DCE729 & _MASK
        second ^= _rotated(high * _C2, 33) * _C1 & _MASK
        if at + 16 <= len(data):
            second = (_rotated(second, 31) + first) * 5 + 0x38495AB5 & _MASK
    first ^= len(data)
    second ^= len(data)
    first = first + second & _MASK
    second = second + first & _MASK
    return _finished(first) + _finished(second) & _MASK


def _rotated(value: int, count: int) -> int:
    value &= _MASK
    return (value << count | value >> (64 - count)) & _MASK


def _finished(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33
