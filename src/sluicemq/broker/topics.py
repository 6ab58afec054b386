"""The topics and the consumer groups of a broker: their settings, their files, how new ones come.

A `Topic` lives as long as the broker knows the name; its `config` is exchanged when it changes. It
holds what the send path needs so that a send does one dict look-up. Counters are plain integers
that `metrics.py` reads.

A topic that a send names and nobody made is created from the topic that the producer names
(TBW102 as a rule) when that one has the inherit bit (spec/remoting.md §16). A group that connects
and is not known is made with the defaults when autoCreateSubscriptionGroup=true.
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
from sluicemq.model.topic import (
    CLEANUP_POLICY,
    COMPACTION,
    DEFAULT_TOPIC,
    DLQ_PREFIX,
    GROUP_LENGTH_MAX,
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
from sluicemq.wire.tables import Texts, Unknown, group_from, group_object, topic_from, topic_object

log = logging.getLogger(__name__)

Config = TypeVar("Config", TopicConfig, GroupConfig)
Item = TypeVar("Item")

READ_WRITE: Final = PERM_READ | PERM_WRITE
UNIT_SYS_FLAG: Final = 0x1
FAQ: Final = "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
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
EPOCH_TOPIC: Final = "rmq_sys_sluice_epochs"
SYSTEM_PREFIX: Final = "rmq_sys_"
LIGHT_PREFIX: Final = "%LMQ%"  # light queues have no topic (spec/store.md §3.1)
RECORD_BYTES: Final = 91  # of a record without body, topic and properties (spec/store.md §2.1)
REVIVE_QUEUES: Final = 8  # spec/delivery.md §7
SYSTEM_GROUPS: Final = (
    "TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL", "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER", "CID_RMQ_SYS_TRANS",
)  # fmt: skip


def is_broker_only(name: str) -> bool:
    """Return whether only the broker itself writes to the topic `name`: what lies there decides
    which messages are delivered, and to whom. The revive log of POP is open to brokers that hand on
    records of another one; access control keeps accounts away from it."""
    return name in NOT_FOR_SENDS or name in (TIMER_TOPIC, EPOCH_TOPIC)


def _fault(kind: str, name: str, length_max: int) -> str | None:
    if not name.strip():
        return f"The specified {kind} is blank."
    if not _NAME.fullmatch(name):
        return f"The specified {kind} contains illegal characters, allowing only ^{_NAME.pattern}$"
    if len(name) > length_max:
        return f"The specified {kind} has {len(name)} characters; the limit is {length_max}."
    return None


def find_topic_name_fault(name: str, length_max: int) -> str | None:
    """Why a topic cannot have this name; None when it can. `length_max` in characters."""
    if name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        length_max = RETRY_TOPIC_LENGTH_MAX
    return _fault("topic", name, length_max)


def find_group_name_fault(name: str) -> str | None:
    """Why a group cannot have this name; None when it can."""
    return _fault("group", name, GROUP_LENGTH_MAX)


class Table(ABC, Generic[Config, Item]):
    """Topics or groups by name, and their file; a change is in its journal before it is made.

    `on_change(name)` is called after each change, then `on_created(name)` or `on_removed(name)` if
    the change made or deleted the topic or group. `table` holds for each name what `_item` makes of
    its settings.
    """

    def __init__(self, settings: Settings, files: Files, clock: Clock, path: str) -> None:
        self._settings = settings
        self._clock = clock
        self.table: dict[str, Item] = {}
        self.version = DataVersion()
        self.on_change: Callable[[str], None] = lambda name: None
        self.on_created: Callable[[str], None] = lambda name: None
        self.on_removed: Callable[[str], None] = lambda name: None
        self._unknown = Unknown()
        self._texts: Texts[Config] = {}
        self.document = Document(
            files,
            f"{settings.store.root}/config/{path}",
            lambda: partial(self._encode, self.snapshot(), self._texts),
            lambda: self.version,
        )

    _kind: str
    _encode: Callable[..., str]
    _write: Callable[[Config], dict[str, Any]]
    _read: Callable[[Mapping[Any, Any], str], Config]

    @abstractmethod
    def snapshot(self) -> Any:
        """The table as tools, name servers and the file carry it."""

    @abstractmethod
    def _set(self, config: Config) -> None:
        """Put into the table."""

    @abstractmethod
    def config_of(self, name: str) -> Config | None:
        """The settings of a topic or group."""

    def _load(
        self,
        known: Iterable[Config],
        system: Iterable[Config],
    ) -> None:
        """What the file says, the changes after it, and what every broker has."""
        for config in known:
            self._set(config)
        changes = self.document.load_journal(self.table)
        for change in changes:
            self.table.pop(change.name, None)
            if change.value is not None:
                self._set(self._read(change.value, change.name))
        missing = [config for config in system if config.name not in self.table]
        for config in missing:
            self._set(config)
        if changes:
            self.version = max(self.version, changes[-1].version)
        if missing or changes:
            self._bump()

    def _bump(self) -> None:
        self.version = self.version.next(self._clock.now_ms())
        self.document.changed = True

    def put(self, *configs: Config, is_asked: bool = True) -> None:
        """Creates or changes, all or none; what is just so already stays. Raises StoreError when
        that cannot be kept, unless nobody has asked for it (`Document.record`)."""
        news = [config for config in configs if self.config_of(config.name) != config]
        if not news:
            return
        self._record({config.name: self._write(config) for config in news}, is_asked=is_asked)
        for config in news:
            is_created = config.name not in self.table
            verb = "created" if is_created else "changed"
            self._set(config)
            is_news = not config.name.startswith(RETRY_PREFIX)  # its group has said it
            log.log(
                logging.INFO if is_news else logging.DEBUG, "%s %s: %s", self._kind, verb, config
            )
            self.on_change(config.name)
            if is_created:
                self.on_created(config.name)

    def remove(self, name: str) -> bool:
        """Raises StoreError when that cannot be kept."""
        if name not in self.table:
            return False
        self._record({name: None})
        del self.table[name]
        self._unknown.items.pop(name, None)
        log.info("%s %s deleted", self._kind, name)
        self.on_change(name)
        self.on_removed(name)
        return True

    def _record(
        self, values: Mapping[str, dict[str, Any] | None], *, is_asked: bool = True
    ) -> None:
        version = self.version.next(self._clock.now_ms())
        self.document.append_to_journal(version, values, is_asked=is_asked)
        self.version = version

    def __contains__(self, name: str) -> bool:
        return name in self.table

    def __iter__(self) -> Iterator[Item]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)


class Topic(TopicState):
    """One topic. `queues` is how many queue ids a send may name; sends to a special one (forbidden,
    retry, ordered) need care; `record_bytes` is a stored message without body and properties."""

    __slots__ = ("config", "is_forbidden", "name")

    def __init__(self, config: TopicConfig) -> None:
        self.name = config.name
        self.is_forbidden = is_broker_only(config.name)
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


def revive_topic_name(cluster: str) -> str:
    """Where checkpoints and acknowledgements of POP lie."""
    return f"rmq_sys_REVIVE_LOG_{cluster}"


def make_no_topic_error(name: str) -> RequestError:
    """A consumer names a topic that does not exist."""
    what = f"topic[{name}] not exist, apply first please! \n{FAQ}"
    return RequestError(ResponseCode.TOPIC_NOT_EXIST, what)


def make_no_queue_error(topic: Topic, queue_id: int, remote: Host, code: int) -> RequestError:
    """A consumer at `remote` names a queue that the topic has not."""
    return RequestError(
        code,
        f"queueId[{queue_id}] is illegal, topic:[{topic.name}] "
        f"topicConfig.readQueueNums:[{topic.config.read_queues}] consumer:[/{remote}]",
    )


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
    yield topic(revive_topic_name(cluster), REVIVE_QUEUES)
    yield topic(f"rmq_sys_SYNC_BROKER_MEMBER_{broker}", 1, PERM_INHERIT)
    yield topic(HALF_TOPIC)
    yield topic(OP_TOPIC)
    yield topic(TIMER_TOPIC)


class Topics(Table[TopicConfig, Topic]):
    """All topics by name."""

    _kind = "topic"
    _encode = staticmethod(tables.encode_topic_table_file)
    _write, _read = staticmethod(topic_object), staticmethod(topic_from)

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        super().__init__(settings, files, clock, "topics.json")
        self.deleted_topic_totals = (0, 0)
        """Messages and bytes that came into topics which are deleted: sums go on from there."""
        self._queues_default = settings.broker.default_topic_queues
        self.get = self.table.get  # one call less on the send path

    def _set(self, config: TopicConfig) -> None:
        topic = self.table.get(config.name)
        if topic is None:
            self.table[config.name] = Topic(config)
        else:
            topic.change(config)

    def remove(self, name: str) -> bool:
        """As of any table; what came in is kept in `gone`."""
        topic, (messages, size_bytes) = self.get(name), self.deleted_topic_totals
        is_removed = super().remove(name)
        if topic is not None and is_removed:
            self.deleted_topic_totals = messages + topic.messages_in, size_bytes + topic.bytes_in
        return is_removed

    def config_of(self, name: str) -> TopicConfig | None:
        topic = self.table.get(name)
        return None if topic is None else topic.config

    def snapshot(self) -> tables.TopicTable:
        """The table as 21, 103 and the file carry it."""
        return tables.TopicTable(self.configs(), self.version, self._unknown)

    def configs(self) -> dict[str, TopicConfig]:
        return {name: topic.config for name, topic in self.table.items()}

    def load(self) -> None:
        """Reads the file and adds the system topics. Raises StoreDamagedError."""
        found = self.document.load(tables.decode_topic_table_file) or tables.TopicTable()
        self.version, self._unknown = found.data_version, found.unknown
        self._load(found.topics.values(), system_topics(self._settings.broker))
        for topic in self:
            if topic.config.attributes.get(CLEANUP_POLICY) == COMPACTION:
                log.warning("topic %s: all messages are shown, none compacted", topic.name)

    def adopt_stored_topics(self, queues: Iterable[tuple[str, int]]) -> None:
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

    def require(self, name: str) -> Topic:
        """Raises RequestError for a topic that does not exist."""
        topic = self.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def ensure(self, name: str, queues: int, sys_flag: int = 0) -> Topic:
        """The topic, created with so many queues for reading and writing when it is missing."""
        if name not in self.table:
            config = TopicConfig(name, queues, queues, READ_WRITE, sys_flag=sys_flag)
            self.put(config, is_asked=False)
        return self.table[name]

    def create_for_send(self, name: str, default_topic: str, queues: int) -> Topic | None:
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

    def set_ordered_topics(self, table: Mapping[str, str]) -> None:
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


class Groups(Table[GroupConfig, GroupConfig]):
    """All consumer groups by name."""

    _kind = "group"
    _encode = staticmethod(tables.encode_group_table_file)
    _write, _read = staticmethod(group_object), staticmethod(group_from)

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        super().__init__(settings, files, clock, "subscriptionGroup.json")
        self.forbidden: dict[str, dict[str, int]] = {}

    def _set(self, config: GroupConfig) -> None:
        self.table[config.name] = config

    def config_of(self, name: str) -> GroupConfig | None:
        return self.table.get(name)

    def snapshot(self) -> tables.GroupTable:
        """The table as 201 and the file carry it."""
        return tables.GroupTable(dict(self.table), self.version, self.forbidden, self._unknown)

    def load(self) -> None:
        """Reads the file and adds RocketMQ's own groups. Raises StoreDamagedError."""
        found = self.document.load(tables.decode_group_table_file) or tables.GroupTable()
        self.version, self._unknown = found.data_version, found.unknown
        self.forbidden = {group: dict(bits) for group, bits in found.forbidden.items()}
        self._load(found.groups.values(), map(GroupConfig, SYSTEM_GROUPS))

    def check_exists(self, name: str) -> None:
        """Raises RequestError for a group that does not exist."""
        if name not in self.table:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Group {name} does not exist",
            )

    def set_forbidden(self, group: str, topic: str, *, is_forbidden: bool) -> None:
        """Keeps a group from a topic or lets it again; no journal has it, only the file."""
        bits = self.forbidden.get(group, {}).get(topic, 0) & ~PERM_READ
        changed = {**self.forbidden.get(group, {}), topic: bits | (PERM_READ * is_forbidden)}
        changed = {name: it for name, it in changed.items() if it}
        self.forbidden = {name: it for name, it in self.forbidden.items() if name != group}
        if changed:
            self.forbidden[group] = changed
        self._bump()

    def can_read(self, group: str, topic: str) -> bool:
        """Is the group not kept from the topic? (Set with RocketMQ's tools, spec/admin.md 353.)"""
        return not self.forbidden.get(group, {}).get(topic, 0) & PERM_READ

    def get_or_create(self, name: str) -> GroupConfig | None:
        """The group; made with the defaults where that is allowed; None when there is none."""
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
