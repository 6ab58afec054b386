"""The topics of a broker: their settings, their file, and how a send makes a new one.

A `Topic` lives as long as the broker knows the name; its `config` is exchanged when it changes. It
holds what the send path needs so that a send does one dict look-up. Counters are plain integers
that `metrics.py` reads.

A topic that a send names and nobody made is created from the topic that the producer names
(TBW102 as a rule) when that one has the inherit bit (spec/remoting.md §16).
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from sluicemq.broker.documents import Document
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.config import BrokerConfig
from sluicemq.files import Files
from sluicemq.model.topic import (
    CLEANUP_POLICY,
    COMPACTION,
    DEFAULT_TOPIC,
    DLQ_PREFIX,
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    RETRY_PREFIX,
    RETRY_TOPIC_LENGTH_MAX,
    DataVersion,
    TopicConfig,
)
from sluicemq.wire import tables
from sluicemq.wire.tables import Texts, Unknown, topic_from, topic_object

log = logging.getLogger(__name__)

READ_WRITE: Final = PERM_READ | PERM_WRITE
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
LIMIT_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
# What a client may not send to: the broker's own book-keeping lies there (spec/remoting.md §16).
NOT_FOR_SENDS: Final = frozenset({
    SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, LIMIT_TOPIC, "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT",
})  # fmt: skip
_SYSTEM_NAMES: Final = NOT_FOR_SENDS | {DEFAULT_TOPIC, "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC"}
SYSTEM_PREFIX: Final = "rmq_sys_"
LIGHT_PREFIX: Final = "%LMQ%"  # light queues have no topic (spec/store.md §3.1)
RECORD_BYTES: Final = 91  # of a record without body, topic and properties (spec/store.md §2.1)


class Topic:
    """One topic. `queues` is how many queue ids a send may name; sends to a special one (forbidden,
    retry, ordered) need care; `record_bytes` is a stored message without body and properties."""

    __slots__ = (
        "bytes_in", "config", "is_forbidden", "is_special", "messages_in", "name", "queues",
        "record_bytes",
    )  # fmt: skip

    def __init__(self, config: TopicConfig) -> None:
        self.name = config.name
        self.is_forbidden = config.name in NOT_FOR_SENDS
        self.record_bytes = RECORD_BYTES + len(config.name)
        self.messages_in = 0
        self.bytes_in = 0
        self.change(config)

    def change(self, config: TopicConfig) -> None:
        self.config = config
        self.queues = max(config.read_queues, config.write_queues)
        self.is_special = self.is_forbidden or config.order or config.name.startswith(RETRY_PREFIX)

    @property
    def is_readable(self) -> bool:
        return bool(self.config.perm & PERM_READ)

    def __str__(self) -> str:
        """As RocketMQ's own answers describe a topic."""
        config = self.config
        bits = zip((PERM_READ, PERM_WRITE, PERM_INHERIT), "RWX", strict=True)
        perm = "".join(letter if config.perm & bit else "-" for bit, letter in bits)
        attributes = ", ".join(f"{key}={value}" for key, value in config.attributes.items())
        return (
            f"TopicConfig [topicName={config.name}, readQueueNums={config.read_queues}, "
            f"writeQueueNums={config.write_queues}, perm={perm}, "
            f"topicFilterType={config.filter_type}, topicSysFlag={config.sys_flag}, "
            f"order={str(config.order).lower()}, attributes={{{attributes}}}]"
        )


def name_fault(name: str, length_max: int) -> str | None:
    """Why a topic cannot have this name; None when it can. `length_max` in characters."""
    if not name.strip():
        return "The specified topic is blank."
    if not _NAME.fullmatch(name):
        return "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        length_max = RETRY_TOPIC_LENGTH_MAX
    if len(name) > length_max:
        return f"The specified topic has {len(name)} characters; the limit is {length_max}."
    return None


def system_topics(config: BrokerConfig) -> Iterator[TopicConfig]:
    """The topics every broker has, as RocketMQ's tools expect them (spec/store.md §11)."""

    def topic(name: str, queues: int = 1, perm: int = READ_WRITE) -> TopicConfig:
        return TopicConfig(name, queues, queues, perm)

    cluster, broker = config.cluster_name, config.broker_name
    inherited = READ_WRITE | PERM_INHERIT
    yield topic("SELF_TEST_TOPIC")
    if config.auto_create_topic:
        yield topic(DEFAULT_TOPIC, config.default_topic_queues, inherited)
    yield topic("BenchmarkTest", 1024)
    yield topic(cluster, 16, inherited if config.cluster_topic_enable else PERM_INHERIT)
    yield topic(broker, 1, inherited if config.broker_topic_enable else PERM_INHERIT)
    yield topic("OFFSET_MOVED_EVENT")
    yield topic(SCHEDULE_TOPIC, 18)
    if config.trace_topic_enable:
        yield topic(config.trace_topic_name)
    yield topic(f"{cluster}_REPLY_TOPIC")
    yield topic(f"rmq_sys_REVIVE_LOG_{cluster}", 8)
    yield topic(f"rmq_sys_SYNC_BROKER_MEMBER_{broker}", 1, PERM_INHERIT)
    yield topic(HALF_TOPIC)
    yield topic(OP_TOPIC)
    yield topic(TIMER_TOPIC)


class Topics:
    """All topics by name. `on_change(topic name)` is called after each change."""

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        self._settings = settings
        self._queues_default = settings.broker.default_topic_queues
        self._clock = clock
        self.table: dict[str, Topic] = {}
        self.get = self.table.get  # one call less on the send path
        self.version = DataVersion()
        self._unknown = Unknown()
        self.on_change: Callable[[str], None] = lambda name: None
        self._texts: Texts[TopicConfig] = {}
        self.document = Document(
            files, f"{settings.store.root}/config/topics.json", self._render, lambda: self.version
        )

    # ------------------------------------------------------------------------------- the file

    def load(self) -> None:
        """Reads the file and adds the system topics. Raises StoreDamagedError."""
        found = self.document.load(tables.decode_topic_table_file)
        if found is not None:
            self.version, self._unknown = found.data_version, found.unknown
            for config in found.topics.values():
                self.table[config.name] = Topic(config)
        changes = self.document.journaled(self.table)
        for change in changes:
            self.table.pop(change.name, None)
            if change.value is not None:
                self.table[change.name] = Topic(topic_from(change.value, change.name))
        for topic in self.table.values():
            if topic.config.attributes.get(CLEANUP_POLICY) == COMPACTION:
                log.warning("topic %s: all messages are shown, none compacted", topic.name)
        missing = [t for t in system_topics(self._settings.broker) if t.name not in self.table]
        for config in missing:
            self.table[config.name] = Topic(config)
        if changes:
            self.version = max(self.version, changes[-1].version)
        if missing or changes:
            self._bump()

    def adopt(self, queues: Iterable[tuple[str, int]]) -> None:
        """Add the topics that only the store knows, from its (topic, queue id).

        A send had made them, and the power failed before the table was saved: what was
        acknowledged there stays readable.
        """
        counts: dict[str, int] = {}
        for name, queue_id in queues:
            if name not in self.table and not name.startswith(LIGHT_PREFIX):
                counts[name] = max(counts.get(name, 0), queue_id + 1)
        for name, used in counts.items():
            default = 1 if name.startswith(RETRY_PREFIX) else self._queues_default
            count = max(used, default)
            log.warning(
                "topic %s has messages and is not in %s: added with %d queues",
                name, self.document.path, count,
            )  # fmt: skip
            self.table[name] = Topic(TopicConfig(name, count, count, READ_WRITE))
        if counts:
            self._bump()

    def _render(self) -> Callable[[], str]:
        return partial(tables.encode_topic_table_file, self.snapshot(), self._texts)

    def snapshot(self) -> tables.TopicTable:
        """The table as 21, 103 and the file carry it."""
        return tables.TopicTable(self.configs(), self.version, self._unknown)

    def configs(self) -> dict[str, TopicConfig]:
        return {name: topic.config for name, topic in self.table.items()}

    def _bump(self) -> None:
        self.version = self.version.next(self._clock.now_ms())
        self.document.changed = True

    # -------------------------------------------------------------------------------- changes

    def put(self, *configs: TopicConfig, is_asked: bool = True) -> None:
        """Creates or changes topics, all or none; what is just so already stays. Raises StoreError
        when that cannot be kept, unless nobody has asked for it (`Document.record`)."""
        found = [(self.table.get(config.name), config) for config in configs]
        news = [(old, config) for old, config in found if old is None or old.config != config]
        if not news:
            return
        values = {config.name: topic_object(config) for _, config in news}
        self._record(values, is_asked=is_asked)
        for topic, config in news:
            if topic is None:
                self.table[config.name] = Topic(config)
            else:
                topic.change(config)
            log.info("topic %s: %s", "created" if topic is None else "changed", config)
            self.on_change(config.name)

    def remove(self, name: str) -> bool:
        """Raises StoreError when that cannot be kept."""
        if name not in self.table:
            return False
        self._record({name: None})
        del self.table[name]
        self._unknown.items.pop(name, None)
        log.info("topic %s deleted", name)
        self.on_change(name)
        return True

    def _record(
        self, values: Mapping[str, dict[str, Any] | None], *, is_asked: bool = True
    ) -> None:
        version = self.version.next(self._clock.now_ms())
        self.document.record(version, values, is_asked=is_asked)
        self.version = version

    def ensure(self, name: str, queues: int, sys_flag: int = 0) -> Topic:
        """The topic, created with so many queues for reading and writing when it is missing."""
        if name not in self.table:
            config = TopicConfig(name, queues, queues, READ_WRITE, sys_flag=sys_flag)
            self.put(config, is_asked=False)
        return self.table[name]

    def create_by_send(self, name: str, default_topic: str, queues: int) -> Topic | None:
        """The topic that a send to an unknown name makes; None when it must not make one.

        `queues` is what the producer asks for; the default topic has the last word.
        """
        if name.startswith(RETRY_PREFIX):
            return self.ensure(name, 1)
        model = self.table.get(default_topic)
        if model is None or not model.config.perm & PERM_INHERIT:
            return None
        if default_topic == DEFAULT_TOPIC and not self._settings.broker.auto_create_topic:
            return None
        if len(self.table) >= self._settings.broker.auto_topics_max:
            return None
        count = max(min(queues, model.config.write_queues), 0)
        perm = model.config.perm & ~PERM_INHERIT
        self.put(TopicConfig(name, count, count, perm, sys_flag=model.config.sys_flag))
        return self.table[name]

    def mark_order(self, table: Mapping[str, str]) -> None:
        """What a name server answers to a registration: exactly these topics are ordered."""
        for name, topic in self.table.items():
            order = name in table
            if topic.config.order != order:
                topic.change(dataclasses.replace(topic.config, order=order))
                self._bump()

    # ------------------------------------------------------------------------------ questions

    def is_system(self, name: str) -> bool:
        """Does the broker itself own the name?"""
        config = self._settings.broker
        return (
            name in _SYSTEM_NAMES
            or name.startswith(SYSTEM_PREFIX)
            or name in {config.cluster_name, config.broker_name, config.trace_topic_name}
            or name == f"{config.cluster_name}_REPLY_TOPIC"
        )

    def __contains__(self, name: str) -> bool:
        return name in self.table

    def __iter__(self) -> Iterator[Topic]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)
