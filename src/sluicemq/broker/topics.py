"""The topics and the consumer groups of a broker: settings, files, and automatic creation.

A `Topic` exists as long as the broker has a topic of that name; its `config` is replaced when the
settings change. It contains what the send path needs, so that a send does one dict look-up. Its
counters are plain integers that `metrics.py` reads.

A send to a topic that does not exist creates it from the default topic that the producer names
(usually TBW102), if that topic has the inherit permission (spec/remoting.md §16). A group that does
not exist is created with the defaults when a consumer of it connects, if
autoCreateSubscriptionGroup is true.
"""

import dataclasses
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Generic, TypeVar

from sluicemq.broker.documents import Document
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.config import BrokerConfig
from sluicemq.engine.state import TopicState
from sluicemq.errors import RequestError
from sluicemq.files import Files
from sluicemq.model.ids import Host
from sluicemq.model.system_names import (
    BENCHMARK_TOPIC,
    BROKER_GROUPS,
    HALF_TOPIC,
    OFFSET_MOVED_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    SELF_TEST_TOPIC,
    TIMER_TOPIC,
    is_broker_written_topic,
    is_group_topic,
    is_rocketmq_system_topic,
    reply_topic,
    revive_topic,
    sync_member_topic,
)
from sluicemq.model.topic import (
    CLEANUP_POLICY,
    COMPACTION,
    DEFAULT_TOPIC,
    GROUP_LENGTH_MAX,
    LMQ_PREFIX,
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    RETRY_PREFIX,
    RETRY_TOPIC_LENGTH_MAX,
    DataVersion,
    GroupConfig,
    TopicConfig,
)
from sluicemq.wire import tables
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.tables import (
    RenderedItems,
    UnknownFields,
    group_from,
    group_object,
    topic_from,
    topic_object,
)

log = logging.getLogger(__name__)

Config = TypeVar("Config", TopicConfig, GroupConfig)
Item = TypeVar("Item")

READ_WRITE: Final = PERM_READ | PERM_WRITE
UNIT_SYS_FLAG: Final = 0x1
"""The bit of a topic's sysFlag that RocketMQ's unit mode sets."""
FAQ: Final = "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")

RECORD_BYTES: Final = 91
"""The size of a record without body, topic and properties (spec/store.md §2.1)."""
REVIVE_QUEUES: Final = 8
"""The number of queues of the revive topic (spec/delivery.md §7)."""


def _find_fault(what: str, name: str, length_max: int) -> str | None:
    """Return a sentence of RocketMQ that says why `name` is invalid, or None if it is valid.

    A name is invalid if it is blank, has illegal characters, or has more than `length_max`
    characters. `what` is "topic" or "group", for the sentence.
    """
    if not name.strip():
        return f"The specified {what} is blank."
    if not _NAME.fullmatch(name):
        return f"The specified {what} contains illegal characters, allowing only ^{_NAME.pattern}$"
    if len(name) > length_max:
        return f"The specified {what} has {len(name)} characters; the limit is {length_max}."
    return None


def find_topic_name_fault(name: str, length_max: int) -> str | None:
    """Return why a topic cannot have this name, as a sentence, or None if it can.

    `length_max` is in characters. It does not apply to retry and dead-letter topics, which may have
    RETRY_TOPIC_LENGTH_MAX characters.
    """
    if is_group_topic(name):
        length_max = RETRY_TOPIC_LENGTH_MAX
    return _find_fault("topic", name, length_max)


def find_group_name_fault(name: str) -> str | None:
    """Return why a group cannot have this name, as a sentence, or None if it can."""
    return _find_fault("group", name, GROUP_LENGTH_MAX)


class Table(ABC, Generic[Config, Item]):
    """Topics or groups by name, with their file and its journal.

    A change is written to the journal before it is made in memory. It is durable after
    `document.prepare_sync`.
    """

    def __init__(self, settings: Settings, files: Files, clock: Clock, path: str) -> None:
        """Create an empty table, whose file is `config/` + `path` below the root of the store.

        No file is read or written.
        """
        self._settings = settings
        self._clock = clock
        self.table: dict[str, Item] = {}
        """By name: the topic, or the settings of the group."""
        self.version = DataVersion()
        self.on_change: Callable[[str], None] = lambda name: None
        """Called with the name after each change."""
        self.on_created: Callable[[str], None] = lambda name: None
        """Called after `on_change` if the topic or group was created."""
        self.on_removed: Callable[[str], None] = lambda name: None
        """Called after `on_change` if the topic or group was deleted."""
        self._unknown = UnknownFields()
        self._texts: RenderedItems[Config] = {}
        self.document = Document(
            files,
            f"{settings.store.root}/config/{path}",
            lambda: partial(self._encode, self.snapshot(), self._texts),
            lambda: self.version,
        )

    _kind: str
    """"topic" or "group", for log lines."""
    _encode: Callable[..., str]
    """Returns the text of the file for a snapshot."""
    _write: Callable[[Config], dict[str, Any]]
    """Returns the settings as a JSON object, for the journal."""
    _read: Callable[[Mapping[Any, Any], str], Config]
    """Returns the settings from a JSON object and a name: the inverse of `_write`."""

    @abstractmethod
    def snapshot(self) -> Any:
        """Return the table as tools, name servers and the file contain it."""

    @abstractmethod
    def _set(self, config: Config) -> None:
        """Add or replace the entry of `config.name` in the table."""

    @abstractmethod
    def config_of(self, name: str) -> Config | None:
        """Return the settings of the topic or group, or None if it does not exist."""

    def _load(self, saved: Iterable[Config], system: Iterable[Config]) -> None:
        """Fill the table from its file, from the journal, and with system items.

        `saved` are the settings in the file. The changes in the journal, which are later, are made
        after that. Then the items of `system` that are missing are added. The version of the table
        increases if the journal had a change or a system item was missing. Raises StoreError if the
        journal cannot be read.
        """
        for config in saved:
            self._set(config)

        journal_changes = self.document.load_journal(self.table)
        for change in journal_changes:
            self.table.pop(change.name, None)
            if change.value is not None:
                self._set(self._read(change.value, change.name))

        # Selected before the first is added: if two have one name, the settings of the last count.
        missing_configs = [config for config in system if config.name not in self.table]
        for config in missing_configs:
            self._set(config)

        if journal_changes:
            self.version = max(self.version, journal_changes[-1].version)
        if missing_configs or journal_changes:
            self._bump()

    def _bump(self) -> None:
        """Increment the version of the table, and mark the document as changed."""
        self.version = self.version.incremented(self._clock.now_ms())
        self.document.changed = True

    def put(self, *configs: Config, is_asked: bool = True) -> None:
        """Create or change the topics or groups that `configs` describe, all or none.

        Settings that equal the present ones are skipped. The changes are written to the journal,
        then made in memory and logged. `on_change` is called with the name of each, and then
        `on_created` if it is new.

        `is_asked` says that a client asked for the change. If the journal cannot be written then,
        nothing is changed, and StoreError is raised. Without `is_asked`, the change is made in
        memory even if the journal cannot be written. It is saved with the next write of the file.
        """
        changed_configs = [config for config in configs if self.config_of(config.name) != config]
        if not changed_configs:
            return
        # In the journal before any of them is made in memory.
        settings_by_name = {config.name: self._write(config) for config in changed_configs}
        self._append_to_journal(settings_by_name, is_asked=is_asked)
        for config in changed_configs:
            is_created = config.name not in self.table
            self._set(config)
            self._log_put(config, is_created=is_created)
            self.on_change(config.name)
            if is_created:
                self.on_created(config.name)

    def _log_put(self, config: Config, *, is_created: bool) -> None:
        """Log that the topic or group of `config` was created or changed."""
        verb = "created" if is_created else "changed"
        # The creation of the group is logged already when its retry topic is created.
        level = logging.DEBUG if config.name.startswith(RETRY_PREFIX) else logging.INFO
        log.log(level, "%s %s: %s", self._kind, verb, config)

    def remove(self, name: str) -> bool:
        """Delete a topic or group, and return whether it existed.

        The deletion is written to the journal first. Then `on_change` and `on_removed` are called
        with the name. If the journal cannot be written, nothing is changed, and StoreError is
        raised. If the topic or group does not exist, nothing happens.
        """
        if name not in self.table:
            return False
        self._append_to_journal({name: None})
        del self.table[name]
        self._unknown.items.pop(name, None)
        log.info("%s %s deleted", self._kind, name)
        self.on_change(name)
        self.on_removed(name)
        return True

    def _append_to_journal(
        self, values: Mapping[str, dict[str, Any] | None], *, is_asked: bool = True
    ) -> None:
        """Write changes to the journal, and increment the version of the table.

        `values` are the new settings by name; None deletes the name. `is_asked` is explained at
        `put`. Raises StoreError.
        """
        version = self.version.incremented(self._clock.now_ms())
        self.document.append_to_journal(version, values, is_asked=is_asked)
        self.version = version

    def __contains__(self, name: str) -> bool:
        return name in self.table

    def __iter__(self) -> Iterator[Item]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)


class Topic(TopicState):
    """One topic, with what a send must know about it.

    The base class, which may be compiled, declares:

    - `queues`: queue ids below this number are valid in a send.
    - `is_special`: whether a send needs the general path, because the topic is forbidden, ordered
      or a retry topic.
    - `record_bytes`: the size of a record of this topic without body and properties.
    - `messages_in`, `bytes_in`: messages and their bytes that were stored since the start.
    """

    __slots__ = ("config", "is_forbidden", "name")

    def __init__(self, config: TopicConfig) -> None:
        """Create the entry of a topic with these settings. Its counters start at 0."""
        self.name = config.name
        self.is_forbidden = is_broker_written_topic(config.name)
        self.record_bytes = RECORD_BYTES + len(config.name)
        self.messages_in = 0
        self.bytes_in = 0
        self.change(config)

    def change(self, config: TopicConfig) -> None:
        """Replace the settings, and compute `queues` and `is_special` from them.

        The counters stay as they are.
        """
        self.config = config
        self.queues = max(config.read_queues, config.write_queues)
        self.is_special = self.is_forbidden or config.order or config.name.startswith(RETRY_PREFIX)

    @property
    def is_readable(self) -> bool:
        """Whether consumers may read the topic."""
        return bool(self.config.perm & PERM_READ)

    def __str__(self) -> str:
        """Return the description of the topic as RocketMQ's answers contain it."""
        config = self.config
        perm = "R" if config.perm & PERM_READ else "-"
        perm += "W" if config.perm & PERM_WRITE else "-"
        perm += "X" if config.perm & PERM_INHERIT else "-"
        attributes = ", ".join(f"{key}={setting}" for key, setting in config.attributes.items())
        return (
            f"TopicConfig [topicName={config.name}, readQueueNums={config.read_queues}, "
            f"writeQueueNums={config.write_queues}, perm={perm}, "
            f"topicFilterType={config.filter_type}, topicSysFlag={config.sys_flag}, "
            f"order={str(config.order).lower()}, attributes={{{attributes}}}]"
        )


def make_no_topic_error(name: str) -> RequestError:
    """Return the error for a consumer that names a topic that does not exist."""
    remark = f"topic[{name}] not exist, apply first please! \n{FAQ}"
    return RequestError(ResponseCode.TOPIC_NOT_EXIST, remark)


def make_no_queue_error(topic: Topic, queue_id: int, remote: Host, code: int) -> RequestError:
    """Return the error for a request of a consumer about a queue that the topic does not have.

    `remote` is the address of the consumer and `code` is the response code. The text is RocketMQ's.
    """
    return RequestError(
        code,
        f"queueId[{queue_id}] is illegal, topic:[{topic.name}] "
        f"topicConfig.readQueueNums:[{topic.config.read_queues}] consumer:[/{remote}]",
    )


def system_topics(config: BrokerConfig) -> Iterator[TopicConfig]:
    """Yield the settings of the topics that RocketMQ's tools expect on each broker.

    Their names, numbers of queues and permissions depend on `config` (spec/store.md §11).
    """
    cluster_name = config.cluster_name
    broker_name = config.broker_name
    inheritable = READ_WRITE | PERM_INHERIT
    cluster_perm = inheritable if config.cluster_topic_enable else PERM_INHERIT
    broker_perm = inheritable if config.broker_topic_enable else PERM_INHERIT
    yield _topic_config(SELF_TEST_TOPIC)
    if config.auto_create_topic:
        yield _topic_config(DEFAULT_TOPIC, config.default_topic_queues, inheritable)
    yield _topic_config(BENCHMARK_TOPIC, 1024)
    yield _topic_config(cluster_name, 16, cluster_perm)
    yield _topic_config(broker_name, 1, broker_perm)
    yield _topic_config(OFFSET_MOVED_TOPIC)
    yield _topic_config(SCHEDULE_TOPIC, 18)
    if config.trace_topic_enable:
        yield _topic_config(config.trace_topic_name)
    yield _topic_config(reply_topic(cluster_name))
    yield _topic_config(revive_topic(cluster_name), REVIVE_QUEUES)
    yield _topic_config(sync_member_topic(broker_name), 1, PERM_INHERIT)
    yield _topic_config(HALF_TOPIC)
    yield _topic_config(OP_TOPIC)
    yield _topic_config(TIMER_TOPIC)


def _topic_config(name: str, queues: int = 1, perm: int = READ_WRITE) -> TopicConfig:
    """Return the settings of a topic with `queues` queues for reading and as many for writing."""
    return TopicConfig(name, queues, queues, perm)


class Topics(Table[TopicConfig, Topic]):
    """The topics of a broker."""

    _kind = "topic"
    _encode = staticmethod(tables.encode_topic_table_file)
    _write = staticmethod(topic_object)
    _read = staticmethod(topic_from)

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        super().__init__(settings, files, clock, "topics.json")
        self.deleted_topic_totals = (0, 0)
        """(messages, bytes) that were stored in topics which are deleted now. Totals count them."""
        self._queues_default = settings.broker.default_topic_queues
        self.get = self.table.get
        """Returns the topic of a name, or None. It is the dict's own method, to save a call."""

    def _set(self, config: TopicConfig) -> None:
        """Put a topic into the table, or replace its settings if it is there."""
        topic = self.table.get(config.name)
        if topic is None:
            self.table[config.name] = Topic(config)
        else:
            topic.change(config)

    def remove(self, name: str) -> bool:
        """Delete a topic, and return whether it existed.

        The numbers of messages and bytes that were stored in it are added to
        `deleted_topic_totals`. Callbacks and errors are those of `Table.remove`: `on_change` and
        `on_removed` are called with the name, and StoreError is raised if the journal cannot be
        written.
        """
        topic = self.get(name)
        message_count, size_bytes = self.deleted_topic_totals
        is_removed = super().remove(name)
        if topic is not None and is_removed:
            message_count += topic.messages_in
            size_bytes += topic.bytes_in
            self.deleted_topic_totals = message_count, size_bytes
        return is_removed

    def config_of(self, name: str) -> TopicConfig | None:
        """Return the settings of a topic, or None if it does not exist."""
        topic = self.table.get(name)
        return None if topic is None else topic.config

    def snapshot(self) -> tables.TopicTable:
        """Return the table as the file, and the answer to GET_ALL_TOPIC_CONFIG (21), contain it."""
        return tables.TopicTable(self.configs(), self.version, self._unknown)

    def configs(self) -> dict[str, TopicConfig]:
        """Return a new dict of the settings of all topics, by name."""
        return {name: topic.config for name, topic in self.table.items()}

    def load(self) -> None:
        """Read the topics from their file and its journal, and add the missing system topics.

        A warning is logged for each topic with the cleanup policy COMPACTION, which is not
        supported. Raises StoreDamagedError if the file and its backup are damaged, and StoreError
        if a file cannot be read.
        """
        saved = self.document.load(tables.decode_topic_table_file) or tables.TopicTable()
        self.version = saved.data_version
        self._unknown = saved.unknown
        self._load(saved.topics.values(), system_topics(self._settings.broker))
        for topic in self:
            if topic.config.attributes.get(CLEANUP_POLICY) == COMPACTION:
                log.warning(
                    "Topic %s has cleanup policy COMPACTION, which is not supported. All of its "
                    "messages are delivered.",
                    topic.name,
                )

    def adopt_stored_topics(self, queues: Iterable[tuple[str, int]]) -> None:
        """Add a topic to the table for each stored queue whose topic is missing in it.

        `queues` are pairs (topic, queue id) of the queues in the store. A topic is missing if a
        send created it and the power failed before the table was saved. Adding it makes its
        messages readable again. It gets the default number of queues, or more if a stored queue id
        needs that. Light queues, whose names start with LMQ_PREFIX, need no topic.
        """
        used_counts: dict[str, int] = {}  # by topic: the number of queues up to the highest id
        for name, queue_id in queues:
            if name not in self.table and not name.startswith(LMQ_PREFIX):
                used_counts[name] = max(used_counts.get(name, 0), queue_id + 1)
        for name, used_count in used_counts.items():
            default_count = 1 if name.startswith(RETRY_PREFIX) else self._queues_default
            queue_count = max(used_count, default_count)
            log.warning(
                "Topic %s has messages but is not in %s. It is added with %d queues.",
                name,
                self.document.path,
                queue_count,
            )
            self.table[name] = Topic(_topic_config(name, queue_count))
        if used_counts:
            self._bump()

    def require(self, name: str) -> Topic:
        """Return the topic with this name. Raise RequestError (TOPIC_NOT_EXIST) if it is missing.

        The text of the error is RocketMQ's.
        """
        topic = self.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def ensure(self, name: str, queues: int, sys_flag: int = 0) -> Topic:
        """Return the topic with this name. Create it first if it does not exist.

        An existing topic is not changed. A new topic can be read and written. It has `queues`
        queues for reading and as many for writing, and the flags `sys_flag`. If the journal cannot
        be written, nothing is raised: the new topic is saved with the next write of the file.
        """
        if name not in self.table:
            config = TopicConfig(name, queues, queues, READ_WRITE, sys_flag=sys_flag)
            self.put(config, is_asked=False)
        return self.table[name]

    def create_for_send(self, name: str, default_topic: str, queues: int) -> Topic | None:
        """Create the topic for a send to the unknown topic `name`, and return it.

        The new topic gets the permissions and flags of `default_topic`, an existing topic that the
        producer names. `queues` is the number of queues that the producer asks for. The new topic
        does not get more than `default_topic` has.

        Return None, without creating a topic, in three cases:

        - `default_topic` does not exist, or lacks the permission PERM_INHERIT.
        - `default_topic` is DEFAULT_TOPIC, and autoCreateTopicEnable is false.
        - The broker has the maximum number of topics already.

        A retry topic is created in any case, with one queue. Raises StoreError if the change cannot
        be written to the journal.
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

    def set_ordered_topics(self, table: Mapping[str, str]) -> None:
        """Mark the topics whose names are keys of `table` as ordered, and all others as not.

        `table` is the order configuration that a name server returned for a registration. Its
        values are not used. The version of the table increases with each topic that changes.
        """
        for name, topic in self.table.items():
            is_ordered = name in table
            if topic.config.order != is_ordered:
                topic.change(dataclasses.replace(topic.config, order=is_ordered))
                self._bump()

    def is_system(self, name: str) -> bool:
        """Return whether `name` is a system topic, as RocketMQ's `isSystemTopic` decides.

        System topics are those of every RocketMQ broker, and those that the configuration names:
        the topics with the name of the broker and of its cluster, the topic for replies of the
        cluster, and the topic for traces.
        """
        config = self._settings.broker
        return is_rocketmq_system_topic(name) or name in {
            config.cluster_name,
            config.broker_name,
            config.trace_topic_name,
            reply_topic(config.cluster_name),
        }


class Groups(Table[GroupConfig, GroupConfig]):
    """The consumer groups of a broker."""

    _kind = "group"
    _encode = staticmethod(tables.encode_group_table_file)
    _write = staticmethod(group_object)
    _read = staticmethod(group_from)

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        super().__init__(settings, files, clock, "subscriptionGroup.json")
        self.forbidden: dict[str, dict[str, int]] = {}
        """By group and topic: the permissions (PERM_READ) that were taken from the group."""

    def _set(self, config: GroupConfig) -> None:
        """Put a group into the table, or replace its settings if it is there."""
        self.table[config.name] = config

    def config_of(self, name: str) -> GroupConfig | None:
        """Return the settings of a group, or None if it does not exist."""
        return self.table.get(name)

    def snapshot(self) -> tables.GroupTable:
        """Return the table as the file contains it.

        The answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201) contains it as well.
        """
        return tables.GroupTable(dict(self.table), self.version, self.forbidden, self._unknown)

    def load(self) -> None:
        """Read the groups from their file and its journal, and add the missing system groups.

        Raises StoreDamagedError if the file and its backup are damaged, and StoreError if a file
        cannot be read.
        """
        saved = self.document.load(tables.decode_group_table_file) or tables.GroupTable()
        self.version = saved.data_version
        self._unknown = saved.unknown
        self.forbidden = {group: dict(bits) for group, bits in saved.forbidden.items()}
        self._load(saved.groups.values(), map(GroupConfig, BROKER_GROUPS))

    def check_exists(self, name: str) -> None:
        """Raise RequestError (SUBSCRIPTION_GROUP_NOT_EXIST) if the group does not exist."""
        if name not in self.table:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Group {name} does not exist",
            )

    def set_forbidden(self, group: str, topic: str, *, is_forbidden: bool) -> None:
        """Forbid the group to read the topic, or allow it again if `is_forbidden` is false.

        The change is not written to the journal. It is saved with the next write of the file.
        """
        # `forbidden` has a set of permission bits for each group and topic. Change copies of the
        # dicts, because a snapshot shares the old ones.
        forbidden = dict(self.forbidden)
        bits_by_topic = dict(forbidden.pop(group, {}))
        bits = bits_by_topic.get(topic, 0) & ~PERM_READ
        if is_forbidden:
            bits |= PERM_READ
        bits_by_topic[topic] = bits
        remaining = {name: name_bits for name, name_bits in bits_by_topic.items() if name_bits}
        if remaining:
            forbidden[group] = remaining
        self.forbidden = forbidden
        self._bump()

    def can_read(self, group: str, topic: str) -> bool:
        """Return whether the group may read the topic.

        RocketMQ's tools can forbid it (UPDATE_AND_GET_GROUP_FORBIDDEN, 353).
        """
        return not self.forbidden.get(group, {}).get(topic, 0) & PERM_READ

    def get_or_create(self, name: str) -> GroupConfig | None:
        """Return the settings of the group. Create the group first if it does not exist.

        A new group has the default settings. Return None if the group does not exist and must not
        be created: autoCreateSubscriptionGroup is false, the name is invalid, or the broker has the
        maximum number of groups. If the journal cannot be written, nothing is raised: the new group
        is saved with the next write of the file.
        """
        config = self.table.get(name)
        broker = self._settings.broker
        if (
            config is None
            and broker.auto_create_group
            and len(self.table) < broker.auto_groups_max
            and not find_group_name_fault(name)
        ):
            config = GroupConfig(name)
            self.put(config, is_asked=False)
        return config
