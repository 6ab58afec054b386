"""Topics, groups and the broker's tables, as the tools change and read them: 17 18 21 43 200 201
207 215 225 305 351 352.

Changes are answered when they are on disk and the name servers know them (`Announced`): who creates
a topic and sends to it finds it. An attribute that is not known is refused with RocketMQ's words,
and so is what a broker cannot keep: an attribute that is taken is a promise. Those of a table that
another broker wrote stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from sluicemq.broker.group_commit import Announced, Postponed, run_or_postpone
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics, find_group_name_fault, find_topic_name_fault
from sluicemq.errors import RequestError
from sluicemq.model.topic import (
    CLEANUP_POLICY,
    COMPACTION,
    CONTRACT,
    CONTRACTS,
    MESSAGE_TYPE,
    QUEUE_TYPE,
    TOPIC_LENGTH_MAX,
    GroupConfig,
    TopicConfig,
    pop_retry_topic,
)
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem, decode_body
from sluicemq.store.store import Store
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import as_object, encode_header, load_object, take_list
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    CreateTopicRequest,
    DeleteGroupRequest,
    GetAllGroupsRequest,
    GetAllGroupsResponse,
    GetAllTopicsRequest,
    GetAllTopicsResponse,
    GetGroupConfigRequest,
    GetTopicConfigRequest,
    TopicRequest,
)
from sluicemq.wire.tables import group_from, topic_from

T = TypeVar("T")
QUEUES_MAX: Final = 65_536
FILTER_TYPES: Final = (None, "", "SINGLE_TAG", "MULTI_TAG")
"""The values of topicFilterType that are accepted; Java cannot read a table with another one."""
_INT64_MAX: Final = 2**63 - 1
_UNSUPPORTED: Final = {
    (MESSAGE_TYPE, "MIXED"): "MIXED message type is not supported.",
    (CLEANUP_POLICY, COMPACTION): (
        f"Compaction topics ({CLEANUP_POLICY}={COMPACTION}) are not supported: SluiceMQ does not "
        f"write the folder compaction. Leave the attribute out, or write {CLEANUP_POLICY}=DELETE; "
        "to keep the latest message of a key, keep it in a table."
    ),
    (QUEUE_TYPE, "BatchCQ"): (
        f"Queues of batches ({QUEUE_TYPE}=BatchCQ) are not supported: leave the attribute out, or "
        f"write {QUEUE_TYPE}=SimpleCQ."
    ),
}
"""RocketMQ's values that cannot be had here."""


class Attribute(NamedTuple):
    """`fault_of` says what is wrong with a value, "" if nothing is."""

    fault_of: Callable[[str], str]
    is_changeable: bool = True


def _one_of(*values: str) -> Callable[[str], str]:
    text = f"value is not in set: [{', '.join(values)}]"
    return lambda value: "" if value in values else text


def _from_minus_one(value: str) -> str:
    try:
        number = int(value)
    except ValueError:
        return f'For input string: "{value}"'
    return "" if -1 <= number <= _INT64_MAX else f"value is not in range(-1, {_INT64_MAX})"


OF_TOPICS: Final = {
    MESSAGE_TYPE: Attribute(
        _one_of("UNSPECIFIED", "TRANSACTION", "FIFO", "MIXED", "DELAY", "NORMAL")
    ),
    QUEUE_TYPE: Attribute(_one_of("SimpleCQ", "BatchCQ"), is_changeable=False),
    CLEANUP_POLICY: Attribute(_one_of("DELETE", COMPACTION), is_changeable=False),
    "reserve.time": Attribute(_from_minus_one),
}
OF_GROUPS: Final = {CONTRACT: Attribute(_one_of(*CONTRACTS))}


def parsed_changes(text: str) -> Iterable[tuple[str, str | None]]:
    """`+key=value,-key` -> ("+key", "value"), ("-key", None). Raises RequestError."""
    for change in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = change.partition("=")
        if separator and not key.startswith("+"):
            raise _wrong(f"add/alter attribute format is wrong: {key}: write +key=value.")
        if not separator and not key.startswith("-"):
            raise _wrong(f"delete attribute format is wrong: {key}: write -key, or +key=value.")
        yield key, value if separator else None


def changed_attributes(
    old: Mapping[str, str] | None,
    changes: Iterable[tuple[str, str | None]],
    known: Mapping[str, Attribute],
) -> dict[str, str]:
    """Attributes after the changes of a tool, +key and value or -key; `old` None: of what is new.

    Raises RequestError with RocketMQ's words and, where it differs, code.
    """
    attributes = dict(old or {})
    seen: set[str] = set()
    for change, value in changes:
        sign, key = change[:1], change[1:]
        if not key or "+" in key or "-" in key:
            raise _wrong(f"kv string format wrong: {change!r} is neither +key=value nor -key.")
        if key in seen:
            raise _wrong(f"key duplication: {change}")
        seen.add(key)
        if sign not in "+-":
            raise _wrong(f"wrong format key: {change}: write +key=value or -key.")
        if sign == "-" and old is None:
            raise _wrong(f"only add attribute is supported while creating topic. key: {key}")
        if sign == "-" and key not in attributes:
            raise _wrong(f"attempt to delete a nonexistent key: {key}")
        attribute = known.get(key)
        if attribute is None:
            names = ", ".join(sorted(known))
            raise _wrong(f"unsupported key: {key}. The attributes are {names}.")
        if old is not None and not attribute.is_changeable:
            raise _wrong(f"attempt to update an unchangeable attribute. key: {key}")
        if sign == "-":
            del attributes[key]
        else:
            attributes[key] = _checked(attribute, key, value or "")
    return attributes


def _checked(attribute: Attribute, key: str, value: str) -> str:
    fault = attribute.fault_of(value)
    if fault:
        raise _wrong(f"{fault} ({key}={value})")
    if (key, value) in _UNSUPPORTED:
        raise _invalid(_UNSUPPORTED[key, value])
    return value


def _require(fault: str | None) -> None:
    if fault is not None:
        raise _invalid(fault)


def _invalid(remark: str) -> RequestError:
    return RequestError(ResponseCode.INVALID_PARAMETER, remark)


def _wrong(remark: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)


ITEMS_A_STEP: Final = 64


def _topics_of(body: bytes | memoryview) -> list[TopicConfig]:
    items = take_list(load_object(body, "topic list"), "topicConfigList")
    return [topic_from(as_object(item, "A topic")) for item in items]


def _groups_of(body: bytes | memoryview) -> list[GroupConfig]:
    items = take_list(load_object(body, "group list"), "groupConfigList")
    return [group_from(as_object(item, "A group")) for item in items]


def _portions(items: list[T]) -> Iterator[list[T]]:
    """Yield the items in portions, each of which takes a millisecond."""
    for begin in range(0, len(items), ITEMS_A_STEP):
        yield items[begin : begin + ITEMS_A_STEP]


@dataclass(slots=True, eq=False)
class Metadata:
    """The request family about topics and groups."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    store: Store
    end_turn: Callable[[], None]

    # -------------------------------------------------------------------------------- topics

    def create_topic(self, header: CreateTopicRequest, command: Command, peer: Peer) -> Announced:
        """17: creates or changes. The remark is what the real broker answers."""
        if header.filter_type not in FILTER_TYPES:
            raise _wrong(
                f"topicFilterType = [{header.filter_type}] value invalid: write SINGLE_TAG, or "
                "leave it out."
            )
        config = TopicConfig(
            header.topic, header.read_queues, header.write_queues, header.perm,
            header.filter_type or "SINGLE_TAG", header.sys_flag or 0, header.order,
        )  # fmt: skip
        self.topics.put(self._topic(config, parsed_changes(header.attributes or "")))
        return Announced(Command(ResponseCode.SUCCESS, remark="not set any response code"))

    def create_topics(self, command: Command, peer: Peer) -> Announced | Postponed:
        """18: nothing changes if one of them cannot be."""

        def steps() -> WorkItem[Announced]:
            configs = yield from decode_body(_topics_of, command.body)
            checked = []
            for number, portion in enumerate(_portions(configs)):
                if number:
                    yield None
                checked += [self._topic(one, one.attributes.items()) for one in portion]
            for number, portion in enumerate(_portions(checked)):
                if number:
                    yield None
                self.topics.put(*portion)
            return Announced(Command(ResponseCode.SUCCESS))

        return run_or_postpone(steps())

    def _topic(self, config: TopicConfig, changes: Iterable[tuple[str, str | None]]) -> TopicConfig:
        """What a topic becomes. Raises RequestError for what it cannot be."""
        _require(find_topic_name_fault(config.name, TOPIC_LENGTH_MAX))
        self._check_system(config.name)
        for count in (config.read_queues, config.write_queues):
            if not 0 <= count <= QUEUES_MAX:
                raise _invalid(f"A topic cannot have {count} queues: the limit is {QUEUES_MAX}.")
        old = self.topics.config_of(config.name)
        attributes = changed_attributes(None if old is None else old.attributes, changes, OF_TOPICS)
        return replace(config, attributes=attributes)

    def _check_system(self, name: str) -> None:
        if self.settings.broker.validate_system_topic and self.topics.is_system(name):
            raise _invalid(f"The topic[{name}] is conflict with system topic.")

    def delete_topic(self, header: TopicRequest, command: Command, peer: Peer) -> Announced:
        """Answer DELETE_TOPIC_IN_BROKER (215): delete the topic with its queues, its offsets and
        the topics in which its messages come again to groups that pop. The records stay in the log
        until it is cleaned. Groups that had consumed the topic begin at its first message if it is
        created again (`Offsets.topic_deleted`)."""
        name = header.topic
        self._check_system(name)
        retries = []
        if self.settings.broker.clear_pop_retries:
            retries = [
                pop_retry_topic(group, name, is_v2=is_v2)
                for group in self.offsets.groups_of(name)
                for is_v2 in (False, True)
            ]
        if name in self.topics or any(name == topic for topic, _ in self.store.queues()):
            for gone in (*filter(self.topics.get, retries), name):
                self.topics.remove(gone)
                # The store commits before it deletes: answers that wait for a commit have to be
                # settled by their own one, which may fail.
                self.end_turn()
                self.store.delete_topic(gone)
                self.offsets.delete_topic(gone)
        else:  # a name that no topic can have is no path either
            _require(find_topic_name_fault(name, TOPIC_LENGTH_MAX))
            self.offsets.forget(topic=name)
        return Announced(Command(ResponseCode.SUCCESS))

    def all_topics(self, header: GetAllTopicsRequest, command: Command, peer: Peer) -> Command:
        """21: everything at once; tools that page are told so by the total (spec/admin.md §1)."""
        fields = None
        if header.topic_sequence is not None:
            fields = encode_header(GetAllTopicsResponse(topic_count=len(self.topics)))
        return Command(
            ResponseCode.SUCCESS, fields, tables.encode_topic_table(self.topics.snapshot())
        )

    def topic(self, header: GetTopicConfigRequest, command: Command, peer: Peer) -> Command:
        """351."""
        name = header.topic
        config = self.topics.config_of(name)
        if config is None:
            raise RequestError(
                ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}"
            )
        return Command(ResponseCode.SUCCESS, body=tables.encode_topic_config(config))

    def system_topics(self, command: Command, peer: Peer) -> Command:
        """305."""
        names = sorted(name for name in self.topics.table if self.topics.is_system(name))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_list(names))

    # -------------------------------------------------------------------------------- groups

    def create_group(self, command: Command, peer: Peer) -> Announced:
        """200: creates or changes."""
        self.groups.put(*self._checked([tables.decode_group_config(command.body)]))
        return Announced(Command(ResponseCode.SUCCESS))

    def create_groups(self, command: Command, peer: Peer) -> Announced | Postponed:
        """225: nothing changes if one of them cannot be."""

        def steps() -> WorkItem[Announced]:
            configs = yield from decode_body(_groups_of, command.body)
            checked: list[GroupConfig] = []
            for number, portion in enumerate(_portions(configs)):
                if number:
                    yield None
                checked += self._checked(portion)
            for number, portion in enumerate(_portions(checked)):
                if number:
                    yield None
                self.groups.put(*portion)
            return Announced(Command(ResponseCode.SUCCESS))

        return run_or_postpone(steps())

    def _checked(self, configs: Iterable[GroupConfig]) -> list[GroupConfig]:
        """Return what groups become. Raises RequestError for what they cannot be."""
        checked = []
        for config in configs:
            _require(find_group_name_fault(config.name))
            if not 0 <= config.retry_queues <= QUEUES_MAX:
                raise _invalid(
                    f"A group cannot have {config.retry_queues} retry queues: the limit is "
                    f"{QUEUES_MAX}."
                )
            old = self.groups.config_of(config.name)
            attributes = changed_attributes(
                None if old is None else old.attributes, config.attributes.items(), OF_GROUPS
            )
            checked.append(replace(config, attributes=attributes))
        return checked

    def delete_group(self, header: DeleteGroupRequest, command: Command, peer: Peer) -> Announced:
        """207. Its offsets stay unless the tool says otherwise."""
        self.groups.remove(header.group)
        if header.clean_offset:
            self.offsets.forget(group=header.group)
        return Announced(Command(ResponseCode.SUCCESS))

    def all_groups(self, header: GetAllGroupsRequest, command: Command, peer: Peer) -> Command:
        """201, as 21."""
        fields = None
        if header.group_sequence is not None:
            fields = encode_header(GetAllGroupsResponse(group_count=len(self.groups)))
        return Command(
            ResponseCode.SUCCESS, fields, tables.encode_group_table(self.groups.snapshot())
        )

    def group(self, header: GetGroupConfigRequest, command: Command, peer: Peer) -> Command:
        """352: makes the group where groups are made on their own."""
        name = header.group
        config = self.groups.get_or_create(name)
        if config is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"No group in this broker. group: {name}"
            )
        return Command(ResponseCode.SUCCESS, body=tables.encode_group_config(config))

    def all_offsets(self, command: Command, peer: Peer) -> Command:
        """43."""
        body = tables.encode_consumer_offsets(self.offsets.snapshot())
        return Command(ResponseCode.SUCCESS, body=body)
