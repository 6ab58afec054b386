"""The SQL92 expressions of consumer groups and their file, config/consumerFilter.json.

An expression is kept while its group is disconnected, and across restarts, so that a RocketMQ
broker that opens the store knows it too. The rules are RocketMQ's (spec/filter.md §4, spec/store.md
§11):

    a heartbeat names it      a new expression is compiled and kept. The same expression becomes
                              alive again. Another expression with a newer version replaces it, or
                              removes it if the new one does not compile.
    a heartbeat lacks it      it becomes dead, as do all expressions of a group whose last member
                              leaves
    loaded from the file      it is dead, since 30 s before the start or since it was made
    dead for a day            it is removed (filterDataCleanTimeSpan)

Pulls do not read this table: the subscription of the group, with its compiled filter, comes from
its heartbeats (`clients.py`). Pulls that bring an expression themselves, and pops, use
`RequestFilters`.

If filter bitmaps are enabled, a Java broker stores a Bloom filter for each message, with the groups
whose expression it matches. The bit indices of a group are part of the file (spec/store.md §3.2),
and a broker that finds another number of them drops the whole file. So the file contains the
indices that a Java broker would write: murmur3 (128 bits, x64, seed 0) of `group#topic` gives two
numbers, whose sums give the indices.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from sluicemq.broker.documents import Document
from sluicemq.broker.lanes.cache import ByteCache
from sluicemq.broker.lanes.filters import RuleFilter
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import FilterError, RequestError
from sluicemq.files import Files
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import (
    is_tag_kind,
    make_filter,
    parse_subscription,
    preparation_jobs,
)
from sluicemq.model.subscription import ALL, SQL92, TAG, MessageFilter, Subscription
from sluicemq.store.gather import PostponedError, PostponedWork
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.tables import (
    ConsumerFilter,
    decode_consumer_filters_file,
    encode_consumer_filters_file,
)

log = logging.getLogger(__name__)

DEAD_BEFORE_START_MS: Final = 30_000
"""Expressions that were alive in the file are dead since this time before the start."""
FILTERS_BYTES_MAX: Final = 32 << 20
"""The limit of the compiled filters that `RequestFilters` caches, in bytes."""
TABLE_BYTES_MAX: Final = 16 << 20
"""The limit of the table of expressions in bytes, including those of disconnected groups."""
ENTRY_BYTES: Final = 500
"""The estimated bytes of one entry of the table besides its expression."""


def estimate_filter_bytes(kind: str, expression: str) -> int:
    """Return the estimated bytes of the compiled filter of an expression.

    A character of SQL92 takes between 85 bytes in conditions with long strings and 280 in the
    shortest conditions.
    """
    bytes_per_character = 4 if is_tag_kind(kind) else 200
    return bytes_per_character * len(expression)


class RequestFilters:
    """A cache of the filters whose expressions come with requests."""

    def __init__(self) -> None:
        """Create an empty cache, limited to FILTERS_BYTES_MAX."""

        def filter_of(kind: str, expression: str) -> MessageFilter | None:
            return make_filter(parse_subscription("", expression, kind))

        self._cache = ByteCache(filter_of, estimate_filter_bytes, FILTERS_BYTES_MAX)

    def get_filter(self, kind: str | None, expression: str | None) -> MessageFilter | None:
        """Return the filter of an expression, or None if every message matches.

        If `kind` is None or "", the expression is one of tags. If an expression of tags is None or
        "", every message matches. Raises RequestError if the expression does not compile. Raises
        PostponedError if it takes long to compile. The caller then runs the work of that error on
        another thread, and calls this again.
        """
        kind = kind or TAG
        if not expression:
            expression = ALL if is_tag_kind(kind) else ""
        if expression == ALL and kind == TAG:
            return None
        # There is at most one job, and none if the expression compiles quickly.
        for job in preparation_jobs(expression, kind):
            raise PostponedError(PostponedWork(job, lambda _: None))
        try:
            return self._cache(kind, expression)
        except FilterError as error:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                f"parse the consumer's subscription failed: {error}",
            ) from error


class CompiledSubscription:
    """The subscription of a group to a topic, with its compiled filter.

    `filter` is None if every message matches. `is_broken` says that the expression does not
    compile; pulls are refused then. `is_tag_type` says that it selects by tags.
    """

    __slots__ = ("filter", "is_broken", "is_tag_type", "subscription")

    def __init__(self, subscription: Subscription) -> None:
        """Compile the filter of `subscription`.

        Log a warning if it does not compile, or if its end is ignored.
        """
        self.subscription = subscription
        self.is_tag_type = is_tag_kind(subscription.kind)
        self.is_broken = False
        self.filter: MessageFilter | None = None
        try:
            if self.is_tag_type and not subscription.codes:
                # Some clients do not send the tag codes; the broker computes them.
                subscription = parse_subscription(
                    subscription.topic, subscription.expression, version=subscription.version
                )
                self.subscription = subscription
            self.filter = make_filter(subscription)
        except FilterError as error:
            self.is_broken = True
            log.warning("subscription to %s does not compile: %s", subscription.topic, error)
        else:
            if isinstance(self.filter, Selector) and self.filter.ignored_text:
                log.warning(
                    "subscription to %s: %r is ignored at the end of %r, as in RocketMQ",
                    subscription.topic,
                    self.filter.ignored_text,
                    subscription.expression,
                )

    def has_same_filter(self, subscription: Subscription) -> bool:
        """Return whether `subscription` has the same expression, kind and tag codes.

        The versions may differ.
        """
        current = self.subscription
        return (current.expression, current.kind, current.codes) == (
            subscription.expression,
            subscription.kind,
            subscription.codes,
        )


class ConsumerFilters:
    """The SQL92 expressions of all groups: group -> topic -> expression."""

    def __init__(
        self, settings: Settings, files: Files, clock: Clock, on_sql92_topic: Callable[[str], None]
    ) -> None:
        """Create an empty table for the file in the store. `load` reads the file.

        An expression is alive while a member of the group subscribes with it, and dead after that.
        `settings` has the size of Bloom filters and the time for which dead expressions are kept.
        `on_sql92_topic(topic)` is called when an expression for the topic is added or becomes
        alive.
        """
        config = settings.broker
        self._clock = clock
        self._on_sql92_topic = on_sql92_topic
        self._bloom_shape = bloom_shape(config.filter_groups_expected, config.filter_error_percent)
        self._retention_ms = config.filter_kept_ms
        self.table: dict[str, dict[str, ConsumerFilter]] = {}
        """By group and topic: the expression."""
        self.size_bytes = 0
        """The estimated bytes of the table. They are limited to TABLE_BYTES_MAX."""
        self._is_full = False
        """Whether the last new expression had no room; a warning was logged for the first one."""
        self.document = Document(
            files,
            f"{settings.store.root}/config/consumerFilter.json",
            lambda: encode_consumer_filters_file(self._iter_expressions()),
        )

    def _iter_expressions(self) -> Iterator[ConsumerFilter]:
        """Yield the expressions of all groups and topics."""
        for expression_by_topic in self.table.values():
            yield from expression_by_topic.values()

    # ------------------------------------------------------------------------------- the file

    def load(self) -> None:
        """Read the expressions from the file into the table. Raises StoreDamagedError.

        If an expression in the file was made for another size of Bloom filters, because the
        settings have changed, a warning is logged, and nothing is loaded, as in RocketMQ.

        Every loaded expression is dead until a heartbeat has it. An expression that was alive in
        the file gets a time of death DEAD_BEFORE_START_MS ago, or the time of its creation if that
        is later, and the file is saved again. Expressions that were dead keep their time.
        """
        loaded = self.document.load(decode_consumer_filters_file) or []
        for stored in loaded:
            if (stored.bit_count, len(stored.bits)) != self._bloom_shape:
                log.warning(
                    "the filters in %s were made with another expectConsumerNumUseFilter or "
                    "maxErrorRateOfBloomFilter: dropping them, as RocketMQ does; the next "
                    "heartbeats of consumers restore them",
                    self.document.path,
                )
                return

        assumed_dead_ms = self._clock.now_ms() - DEAD_BEFORE_START_MS
        for stored in loaded:
            dead_ms = stored.dead_ms
            was_alive = not dead_ms
            if was_alive:
                dead_ms = max(stored.born_ms, assumed_dead_ms)
            self._save_expression(dataclasses.replace(stored, dead_ms=dead_ms))
        # `_save_expression` has marked the document as changed. In fact it has changed only if an
        # expression became dead here.
        self.document.changed = any(not stored.dead_ms for stored in loaded)

    def remove_expired(self) -> None:
        """Remove the expressions that have been dead for longer than filterDataCleanTimeSpan."""
        latest_expired_ms = self._clock.now_ms() - self._retention_ms
        expired = [
            stored
            for stored in self._iter_expressions()
            if stored.is_dead and stored.dead_ms <= latest_expired_ms
        ]
        for stored in expired:
            self._drop_expression(stored.group, stored.topic)

    def _drop_expression(self, group: str, topic: str) -> None:
        """Remove an expression from the table, and its group if it was the last one.

        Also subtract its bytes from `size_bytes`, and mark the document as changed. The expression
        must be in the table.
        """
        expression_by_topic = self.table[group]
        dropped = expression_by_topic.pop(topic)
        self.size_bytes -= _estimate_entry_bytes(dropped)
        if not expression_by_topic:
            del self.table[group]
        self.document.changed = True

    # ---------------------------------------------------------------------------- heartbeats

    def update_group(self, group: str, subscriptions: Iterable[Subscription]) -> None:
        """Update the expressions of a group to `subscriptions`, those of all its members.

        Pass () when the last member of the group is gone. Subscriptions by tags are ignored.

        - A new expression is added, if it compiles and there is room.
        - The same expression becomes alive again.
        - Another expression with a newer version replaces the old one, or removes it if the new one
          does not compile. With an older or equal version it is ignored.
        - Expressions for topics that are not in `subscriptions` become dead.
        """
        subscribed_topics = set()
        for subscription in subscriptions:
            subscribed_topics.add(subscription.topic)
            if not is_tag_kind(subscription.kind) and subscription.expression:
                self._update_expression(group, subscription)

        for stored in list(self.table.get(group, {}).values()):
            if stored.topic not in subscribed_topics and not stored.is_dead:
                self._save_expression(dataclasses.replace(stored, dead_ms=self._clock.now_ms()))

    def _update_expression(self, group: str, subscription: Subscription) -> None:
        """Update the stored expression of a group from one of its SQL92 subscriptions.

        The cases are those of `update_group`. If the expression is new, or replaces an older one,
        it is compiled first; an invalid one is not stored.
        """
        stored = self.table.get(group, {}).get(subscription.topic)
        if stored is None:
            self._save_if_valid(group, subscription)
            return

        if subscription.version <= stored.version:
            if subscription.version == stored.version and stored.is_dead:
                self._save_expression(dataclasses.replace(stored, dead_ms=0))
            return

        is_same = (stored.expression, stored.kind) == (subscription.expression, subscription.kind)
        if is_same:
            self._save_expression(
                dataclasses.replace(stored, version=subscription.version, dead_ms=0)
            )
            return

        compiles = self._save_if_valid(group, subscription)
        if not compiles:
            self._drop_expression(group, subscription.topic)

    def _save_if_valid(self, group: str, subscription: Subscription) -> bool:
        """Add or replace an expression in the table, if it compiles and the table has room.

        Return whether it compiles. The result is True even if the table has no room.
        """
        try:
            make_filter(subscription)
        except FilterError:
            return False  # `CompiledSubscription` logs the error
        topic = subscription.topic
        has_room = self._reserve_room(subscription)
        if not has_room:
            # The members are served nevertheless. Another broker that opens the store learns the
            # expression from their heartbeats.
            return True
        self._save_expression(
            ConsumerFilter(
                topic=topic,
                group=group,
                expression=subscription.expression,
                kind=subscription.kind,
                version=subscription.version,
                born_ms=self._clock.now_ms(),
                dead_ms=0,
                bits=self._bloom_shape.bit_indices(group, topic),
                bit_count=self._bloom_shape.bit_count,
            )
        )
        return True

    def _reserve_room(self, subscription: Subscription) -> bool:
        """Return whether the table has room for the expression of `subscription`.

        If it has none, dead expressions are removed, those that have been dead for longest first,
        until the table with the new expression takes at most three quarters of its limit. If it has
        no room even then, a warning is logged, unless the last call found no room either.
        """
        entry_bytes = ENTRY_BYTES + len(subscription.expression)
        if self.size_bytes + entry_bytes > TABLE_BYTES_MAX:
            dead_filters = [stored for stored in self._iter_expressions() if stored.is_dead]
            dead_filters.sort(key=lambda stored: stored.dead_ms)
            for dead_filter in dead_filters:
                if self.size_bytes + entry_bytes <= TABLE_BYTES_MAX * 3 // 4:
                    break
                self._drop_expression(dead_filter.group, dead_filter.topic)

        has_room = self.size_bytes + entry_bytes <= TABLE_BYTES_MAX
        if not has_room and not self._is_full:
            log.warning(
                "the SQL92 expressions of groups take %d bytes, the limit is %d: further ones are "
                "used, but not saved in %s",
                self.size_bytes,
                TABLE_BYTES_MAX,
                self.document.path,
            )
        self._is_full = not has_room
        return has_room

    def _save_expression(self, consumer_filter: ConsumerFilter) -> None:
        """Add an expression to the table, or replace the one of the same group and topic.

        `size_bytes` is updated, and the document is marked as changed. `on_sql92_topic` is called
        if the expression is alive, that is, used by a connected member.
        """
        expression_by_topic = self.table.setdefault(consumer_filter.group, {})
        replaced = expression_by_topic.get(consumer_filter.topic)
        if replaced is not None:
            self.size_bytes -= _estimate_entry_bytes(replaced)
        self.size_bytes += _estimate_entry_bytes(consumer_filter)
        expression_by_topic[consumer_filter.topic] = consumer_filter
        if not consumer_filter.is_dead:
            self._on_sql92_topic(consumer_filter.topic)
        self.document.changed = True


def _estimate_entry_bytes(stored: ConsumerFilter) -> int:
    """Return the estimated bytes of an entry of the table."""
    return ENTRY_BYTES + len(stored.expression)


_MASK: Final = 0xFFFFFFFFFFFFFFFF
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


class BloomShape(NamedTuple):
    """The number of bits of a Bloom filter, and the number of bits that one group sets."""

    bit_count: int
    bits_per_group: int

    def bit_indices(self, group: str, topic: str) -> tuple[int, ...]:
        """Return the indices of the bits of a group and topic in the Bloom filter.

        They are in RocketMQ's order, and an index may occur twice.

        >>> bloom_shape(32, 20).bit_indices("GroupA", "TopicA")
        (29, 107, 11)
        """
        hash_code = murmur3_64(f"{group}#{topic}".encode())
        low = hash_code & 0xFFFFFFFF
        high = hash_code >> 32
        indices = []
        for hash_number in range(1, self.bits_per_group + 1):
            mixed = (low + hash_number * high) & 0xFFFFFFFF
            if mixed & 0x80000000:  # in Java, the sum is a negative int: its bits are inverted
                mixed ^= 0xFFFFFFFF
            indices.append(mixed % self.bit_count)
        return tuple(indices)


def bloom_shape(groups: int, error_percent: int) -> BloomShape:
    """Return the number of bits of a Bloom filter for `groups` groups, and of each group in it.

    `error_percent` is the rate of false positives in percent. The arguments are the settings
    expectConsumerNumUseFilter and maxErrorRateOfBloomFilter.
    """
    error_rate = error_percent / 100
    bits_needed = math.ceil(groups * math.log2(1 / error_rate) * math.log2(math.e))
    whole_bytes = math.ceil(bits_needed / 8)
    bits_per_group = math.ceil(math.log(error_rate) / math.log(0.5))
    return BloomShape(whole_bytes * 8, bits_per_group)


def murmur3_64(data: bytes) -> int:
    """Return the first half of the 128-bit murmur3 hash (x64) of `data` with seed 0.

    It is a number of 64 bits without sign.
    """
    first_half = second_half = 0
    for start in range(0, len(data) + 1, 16):  # the last block is shorter than 16 bytes, or empty
        is_whole_block = start + 16 <= len(data)
        low = int.from_bytes(data[start : start + 8], "little")
        high = int.from_bytes(data[start + 8 : start + 16], "little")
        first_half ^= _rotate_left(low * _C1, 31) * _C2 & _MASK
        if is_whole_block:
            first_half = (_rotate_left(first_half, 27) + second_half) * 5 + 0x52DCE729 & _MASK
        second_half ^= _rotate_left(high * _C2, 33) * _C1 & _MASK
        if is_whole_block:
            second_half = (_rotate_left(second_half, 31) + first_half) * 5 + 0x38495AB5 & _MASK
    first_half ^= len(data)
    second_half ^= len(data)
    first_half = first_half + second_half & _MASK
    second_half = second_half + first_half & _MASK
    return _finalize(first_half) + _finalize(second_half) & _MASK


def _rotate_left(number: int, count: int) -> int:
    """Return the lowest 64 bits of `number`, rotated left by `count` bits."""
    number &= _MASK
    return (number << count | number >> (64 - count)) & _MASK


def _finalize(number: int) -> int:
    """Return murmur3's finalizer fmix64 of `number`."""
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return number ^ number >> 33


def find_sql92_expressions(message_filter: MessageFilter) -> set[str]:
    """Return the SQL92 expressions of a filter.

    For the rule of a lane, only the expressions that must match are returned, not those that must
    not match. A filter by tags has none.
    """
    if isinstance(message_filter, Selector):
        return {message_filter.text}
    if not isinstance(message_filter, RuleFilter):
        return set()
    expressions: set[str] = set()
    for clause in message_filter.rule:
        expressions.update(atom.text for atom in clause.required if atom.kind == SQL92)
    return expressions


def parse_trial_subscription(topic: str, expression: str, kind: str | None) -> Subscription:
    """Return the subscription to a topic; None or "" as `kind` means tags.

    Raises RequestError if the expression does not compile.
    """
    try:
        return parse_subscription(topic, expression, kind or None)
    except FilterError as error:
        raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error
