"""The SQL92 expressions of consumer groups and their file (config/consumerFilter.json).

An expression is kept while its group is away, and across restarts, so that a RocketMQ broker that
opens the store knows it too. The rules are RocketMQ's (spec/filter.md §4, spec/store.md §11):

    a heartbeat names it      new: compiled and kept, from now on; the same: alive again; another of
                              a later client: compiled anew, or forgotten when it does not compile
    a heartbeat lacks it      dead, as is everything of a group whose last member leaves
    loaded from the file      dead: since 30 s before the start, or since it was made
    dead for a day            forgotten (filterDataCleanTimeSpan)

Pulls do not ask here: the group's subscription, with its compiled filter, comes with its heartbeats
(`clients.py`).
"""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import FilterError
from sluicemq.files import Files
from sluicemq.filter.bloom import bloom_shape
from sluicemq.filter.subscriptions import is_tag_kind, make_filter
from sluicemq.model.subscription import Subscription
from sluicemq.wire.tables import (
    ConsumerFilter,
    decode_consumer_filters_file,
    encode_consumer_filters_file,
)

log = logging.getLogger(__name__)

DEAD_BEFORE_START_MS: Final = 30_000


class ConsumerFilters:
    """Group -> topic -> filter."""

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        config = settings.broker
        self._clock = clock
        self._shape = bloom_shape(config.filter_groups_expected, config.filter_error_percent)
        self._kept_ms = config.filter_kept_ms
        self.table: dict[str, dict[str, ConsumerFilter]] = {}
        self.document = Document(
            files, f"{settings.store.root}/config/consumerFilter.json", self._render
        )

    # ------------------------------------------------------------------------------- the file

    def load(self) -> None:
        """Reads the file. Raises StoreDamagedError."""
        found = self.document.load(decode_consumer_filters_file) or []
        for item in found:
            if not self._has_our_bits(item):
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

    def _has_our_bits(self, item: ConsumerFilter) -> bool:
        return (item.bit_count, len(item.bits)) == self._shape

    def _render(self) -> str:
        return encode_consumer_filters_file(
            item for topics in self.table.values() for item in topics.values()
        )

    def clean(self) -> None:
        """Forgets what has been dead for long."""
        limit = self._clock.now_ms() - self._kept_ms
        for group, topics in list(self.table.items()):
            for item in list(topics.values()):
                if item.is_dead and item.dead_ms <= limit:
                    self._forget(group, item.topic)

    def _forget(self, group: str, topic: str) -> None:
        topics = self.table[group]
        del topics[topic]
        if not topics:
            del self.table[group]
        self.document.changed = True

    # ---------------------------------------------------------------------------- heartbeats

    def subscribed(self, group: str, subscriptions: Iterable[Subscription]) -> None:
        """What a heartbeat says that the group wants; nothing when its last member is gone."""
        named = set()
        for subscription in subscriptions:
            named.add(subscription.topic)
            if not is_tag_kind(subscription.kind) and subscription.expression:
                self._register(group, subscription)
        for item in list(self.table.get(group, {}).values()):
            if item.topic not in named and not item.is_dead:
                self._put(dataclasses.replace(item, dead_ms=self._clock.now_ms()))

    def _register(self, group: str, subscription: Subscription) -> None:
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

    def _make(self, group: str, subscription: Subscription) -> bool:
        try:
            make_filter(subscription)
        except FilterError:
            return False  # `clients.py` says so in the log
        topic = subscription.topic
        self._put(
            ConsumerFilter(
                topic, group, subscription.expression, subscription.kind, subscription.version,
                self._clock.now_ms(), 0, self._shape.bits_of(group, topic), self._shape.bit_count,
            )
        )  # fmt: skip
        return True

    def _put(self, item: ConsumerFilter) -> None:
        self.table.setdefault(item.group, {})[item.topic] = item
        self.document.changed = True
