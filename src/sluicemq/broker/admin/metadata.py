"""Handlers for requests of tools about topics, groups and the documents of a broker.

They answer UPDATE_AND_CREATE_TOPIC (17), UPDATE_AND_CREATE_TOPIC_LIST (18), GET_ALL_TOPIC_CONFIG
(21), GET_ALL_CONSUMER_OFFSET (43), UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200),
GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201), DELETE_SUBSCRIPTIONGROUP (207), DELETE_TOPIC_IN_BROKER
(215), UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225), GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305),
GET_TOPIC_CONFIG (351) and GET_SUBSCRIPTIONGROUP_CONFIG (352).

A change is answered when it is on disk and the name servers know it (`Announced`), so that a client
that creates a topic can send to it at once. Unknown attributes are rejected with RocketMQ's texts.
Attributes of RocketMQ that this broker does not implement are rejected too, because accepting one
would promise its effect. Unknown attributes in a document that another broker wrote stay unchanged.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Announced, Postponed, run_or_postpone
from sluicemq.broker.topics import find_group_name_fault, find_topic_name_fault
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
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.fastjson import as_object, load_object, take_list
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
"""The most read or write queues of a topic, and the most retry queues of a group."""
FILTER_TYPES: Final = (None, "", "SINGLE_TAG", "MULTI_TAG")
"""The values of topicFilterType that are accepted; Java cannot read a table with another one."""
ITEMS_PER_STEP: Final = 64
"""The number of topics or groups that are checked or stored in one step, about a millisecond."""
_INT64_MAX: Final = 2**63 - 1
_UNSUPPORTED: Final = {
    (MESSAGE_TYPE, "MIXED"): "MIXED message type is not supported.",
    (CLEANUP_POLICY, COMPACTION): (
        f"Compaction topics ({CLEANUP_POLICY}={COMPACTION}) are not supported: SluiceMQ does not "
        f"write the folder compaction. Remove the attribute, or set {CLEANUP_POLICY}=DELETE. "
        "Store the latest message of a key in a table."
    ),
    (QUEUE_TYPE, "BatchCQ"): (
        f"Batch queues ({QUEUE_TYPE}=BatchCQ) are not supported. Remove the attribute, or set "
        f"{QUEUE_TYPE}=SimpleCQ."
    ),
}
"""The remarks that reject attribute values of RocketMQ that this broker does not implement."""


class AttributeRule(NamedTuple):
    """The rule for the values of one attribute."""

    find_fault: Callable[[str], str]
    """Returns what is wrong with a value, in RocketMQ's words, or "" if it is valid."""
    is_changeable: bool = True
    """Whether an existing topic or group may get another value."""


def _require_one_of(*values: str) -> Callable[[str], str]:
    """Return a `find_fault` that accepts only `values`."""
    fault = f"value is not in set: [{', '.join(values)}]"
    return lambda attribute: "" if attribute in values else fault


def _find_fault_of_number(value: str) -> str:
    """Return an error text if `value` is not a number from -1 to 2**63 - 1, else ""."""
    try:
        parsed = int(value)
    except ValueError:
        return f'For input string: "{value}"'
    if not -1 <= parsed <= _INT64_MAX:
        return f"value is not in range(-1, {_INT64_MAX})"
    return ""


TOPIC_ATTRIBUTES: Final = {
    MESSAGE_TYPE: AttributeRule(
        _require_one_of("UNSPECIFIED", "TRANSACTION", "FIFO", "MIXED", "DELAY", "NORMAL")
    ),
    QUEUE_TYPE: AttributeRule(_require_one_of("SimpleCQ", "BatchCQ"), is_changeable=False),
    CLEANUP_POLICY: AttributeRule(_require_one_of("DELETE", COMPACTION), is_changeable=False),
    "reserve.time": AttributeRule(_find_fault_of_number),
}
"""The attributes of a topic, with their rules."""
GROUP_ATTRIBUTES: Final = {CONTRACT: AttributeRule(_require_one_of(*CONTRACTS))}
"""The attributes of a group, with their rules."""


def parse_attribute_changes(changes: str) -> Iterable[tuple[str, str | None]]:
    """Yield (change, value) for each attribute change in a text such as `+key=value,-key`.

    `+key=value` gives ("+key", "value"), `-key` gives ("-key", None). Raises RequestError for other
    forms.
    """
    for change in map(str.strip, changes.split(",")):
        if not change:
            continue
        signed_key, separator, value = change.partition("=")
        if separator:
            if not signed_key.startswith("+"):
                raise _system_error(
                    f"add/alter attribute format is wrong: {signed_key}: write +key=value."
                )
            yield signed_key, value
        else:
            if not signed_key.startswith("-"):
                raise _system_error(
                    f"delete attribute format is wrong: {signed_key}: write -key, or +key=value."
                )
            yield signed_key, None


def apply_attribute_changes(
    present: Mapping[str, str] | None,
    changes: Iterable[tuple[str, str | None]],
    rules: Mapping[str, AttributeRule],
) -> dict[str, str]:
    """Return the attributes of a topic or group after the changes of a tool.

    `present` are its present attributes, or None if it is new. `changes` are pairs: ("+key", value)
    sets an attribute, and ("-key", None) deletes it. `rules` has the rule of each known attribute
    by key.

    Raises RequestError, with RocketMQ's text and code, for a change that is not allowed.
    """
    is_new = present is None
    attributes = dict(present or {})
    changed_keys: set[str] = set()
    for signed_key, value in changes:
        key = _strip_sign(signed_key, changed_keys)
        changed_keys.add(key)
        is_deletion = signed_key.startswith("-")
        if is_deletion and is_new:
            raise _system_error(f"only add attribute is supported while creating topic. key: {key}")
        if is_deletion and key not in attributes:
            raise _system_error(f"attempt to delete a nonexistent key: {key}")

        rule = _require_rule(rules, key)
        if not is_new and not rule.is_changeable:
            raise _system_error(f"attempt to update an unchangeable attribute. key: {key}")

        if is_deletion:
            del attributes[key]
        else:
            attributes[key] = _check_value(rule, key, value or "")
    return attributes


def _require_rule(rules: Mapping[str, AttributeRule], key: str) -> AttributeRule:
    """Return the rule of an attribute. Raises RequestError if there is no such attribute."""
    rule = rules.get(key)
    if rule is None:
        names = ", ".join(sorted(rules))
        raise _system_error(f"unsupported key: {key}. The attributes are {names}.")
    return rule


def _strip_sign(signed_key: str, earlier_keys: Container[str]) -> str:
    """Return the key in `+key` or `-key`.

    Raises RequestError for any other form, and for a key in `earlier_keys`.
    """
    key = signed_key[1:]
    if not key or "+" in key or "-" in key:
        raise _system_error(
            f"kv string format wrong: {signed_key!r} is neither +key=value nor -key."
        )
    if key in earlier_keys:
        raise _system_error(f"key duplication: {signed_key}")
    if not signed_key.startswith(("+", "-")):
        raise _system_error(f"wrong format key: {signed_key}: write +key=value or -key.")
    return key


def _check_value(rule: AttributeRule, key: str, value: str) -> str:
    """Return `value` unchanged. Raises RequestError if it is invalid or not supported."""
    fault = rule.find_fault(value)
    if fault:
        raise _system_error(f"{fault} ({key}={value})")
    if (key, value) in _UNSUPPORTED:
        raise _invalid_parameter(_UNSUPPORTED[key, value])
    return value


def _require_no_fault(fault: str | None) -> None:
    """Raise RequestError with the text `fault`. Do nothing if it is None."""
    if fault is not None:
        raise _invalid_parameter(fault)


def _invalid_parameter(remark: str) -> RequestError:
    """Return an error with the code INVALID_PARAMETER."""
    return RequestError(ResponseCode.INVALID_PARAMETER, remark)


def _system_error(remark: str) -> RequestError:
    """Return an error with the code SYSTEM_ERROR, RocketMQ's code for wrong attributes."""
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)


def _decode_topics(body: bytes | memoryview) -> list[TopicConfig]:
    """Return the topics of the body of a request. Raises ProtocolError."""
    topic_objects = take_list(load_object(body, "topic list"), "topicConfigList")
    return [topic_from(as_object(topic_object, "A topic")) for topic_object in topic_objects]


def _decode_groups(body: bytes | memoryview) -> list[GroupConfig]:
    """Return the groups of the body of a request. Raises ProtocolError."""
    group_objects = take_list(load_object(body, "group list"), "groupConfigList")
    return [group_from(as_object(group_object, "A group")) for group_object in group_objects]


def _split_into_chunks(configs: list[T]) -> Iterator[list[T]]:
    """Yield topics or groups in lists of up to `ITEMS_PER_STEP`."""
    for begin in range(0, len(configs), ITEMS_PER_STEP):
        yield configs[begin : begin + ITEMS_PER_STEP]


class MetadataHandlers(BrokerComponent):
    """Request handlers for topics, groups and committed offsets.

    They answer UPDATE_AND_CREATE_TOPIC (17), UPDATE_AND_CREATE_TOPIC_LIST (18),
    GET_ALL_TOPIC_CONFIG (21), GET_ALL_CONSUMER_OFFSET (43), UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    (200), GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201), DELETE_SUBSCRIPTIONGROUP (207),
    DELETE_TOPIC_IN_BROKER (215), UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225),
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305), GET_TOPIC_CONFIG (351) and GET_SUBSCRIPTIONGROUP_CONFIG
    (352).
    """

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self.commit = context.group_commit.commit

    # -------------------------------------------------------------------------------- topics

    def create_topic(self, header: CreateTopicRequest, command: Command, peer: Peer) -> Announced:
        """Answer UPDATE_AND_CREATE_TOPIC (17): create a topic or change its configuration.

        The answer is sent when the change is saved and registered. Its remark is RocketMQ's. Raises
        RequestError if the filter type, the name, a number of queues or an attribute is invalid.
        """
        if header.filter_type not in FILTER_TYPES:
            raise _system_error(
                f"topicFilterType = [{header.filter_type}] value invalid: write SINGLE_TAG, or "
                "remove it."
            )
        config = TopicConfig(
            name=header.topic,
            read_queues=header.read_queues,
            write_queues=header.write_queues,
            perm=header.perm,
            filter_type=header.filter_type or "SINGLE_TAG",
            sys_flag=header.sys_flag or 0,
            order=header.order,
        )
        self.topics.put(
            self._complete_topic(config, parse_attribute_changes(header.attributes or ""))
        )
        return Announced(Command(ResponseCode.SUCCESS, remark="not set any response code"))

    def create_topics(self, command: Command, peer: Peer) -> Announced | Postponed:
        """Answer UPDATE_AND_CREATE_TOPIC_LIST (18): create or change several topics.

        The work is done in steps, and the answer is sent when the changes are saved and registered.
        Raises RequestError if a topic is invalid. Then no topic is changed.
        """

        def steps() -> WorkItem[Announced]:
            configs = yield from decode_body(_decode_topics, command.body)

            # Check all topics before the first one is changed. `yield None` ends a step.
            checked_configs = []
            for chunk_index, chunk in enumerate(_split_into_chunks(configs)):
                if chunk_index > 0:
                    yield None
                checked_configs += [
                    self._complete_topic(config, config.attributes.items()) for config in chunk
                ]

            for chunk_index, chunk in enumerate(_split_into_chunks(checked_configs)):
                if chunk_index > 0:
                    yield None
                self.topics.put(*chunk)
            return Announced(Command(ResponseCode.SUCCESS))

        return run_or_postpone(steps())

    def _complete_topic(
        self, config: TopicConfig, changes: Iterable[tuple[str, str | None]]
    ) -> TopicConfig:
        """Return `config` with the attributes that the topic has after `changes`.

        `changes` are pairs: ("+key", value) sets an attribute, and ("-key", None) deletes it.
        Raises RequestError if the name, a number of queues or an attribute is invalid.
        """
        _require_no_fault(find_topic_name_fault(config.name, TOPIC_LENGTH_MAX))
        self._check_not_system_topic(config.name)
        for count in (config.read_queues, config.write_queues):
            if not 0 <= count <= QUEUES_MAX:
                raise _invalid_parameter(
                    f"A topic cannot have {count} queues: the limit is {QUEUES_MAX}."
                )
        present_config = self.topics.config_of(config.name)
        present_attributes = None
        if present_config is not None:
            present_attributes = present_config.attributes
        attributes = apply_attribute_changes(present_attributes, changes, TOPIC_ATTRIBUTES)
        return replace(config, attributes=attributes)

    def _check_not_system_topic(self, name: str) -> None:
        """Raise RequestError if tools must not change the topic, because it is a system topic."""
        if self.settings.broker.validate_system_topic and self.topics.is_system(name):
            raise _invalid_parameter(f"The topic[{name}] is conflict with system topic.")

    def delete_topic(self, header: TopicRequest, command: Command, peer: Peer) -> Announced:
        """Answer DELETE_TOPIC_IN_BROKER (215): delete a topic with its queues and offsets.

        The topics for retries of its popped messages are deleted as well, if a setting allows it.
        The records stay in the commit log until retention deletes them. If the topic is created
        again, groups that had consumed it begin at its first message. If the topic does not exist,
        only offsets that are left of it are deleted.

        Raises RequestError if the topic is a system topic or its name is invalid.
        """
        name = header.topic
        self._check_not_system_topic(name)
        if name in self.topics or any(name == topic for topic, _ in self.store.queues()):
            for retry_topic in self._find_pop_retry_topics(name):
                self._delete_existing_topic(retry_topic)
            self._delete_existing_topic(name)
        else:  # Offsets may be left of a deleted topic, but never of an invalid name.
            _require_no_fault(find_topic_name_fault(name, TOPIC_LENGTH_MAX))
            self.offsets.forget(topic=name)
        return Announced(Command(ResponseCode.SUCCESS))

    def _find_pop_retry_topics(self, topic: str) -> list[str]:
        """Return the existing topics for retries of popped messages of `topic`.

        Return an empty list if a setting forbids to delete them with their topic.
        """
        if not self.settings.broker.clear_pop_retries:
            return []
        retry_topics = []
        for group in self.offsets.groups_of(topic):
            retry_topics.append(pop_retry_topic(group, topic, is_v2=False))
            retry_topics.append(pop_retry_topic(group, topic, is_v2=True))
        return [name for name in retry_topics if self.topics.get(name)]

    def _delete_existing_topic(self, name: str) -> None:
        """Delete a topic from the table, its queues from the store, and its offsets."""
        self.topics.remove(name)
        # `Store.delete_topic` commits too. Answers that wait for a commit must be released or
        # failed by their own group commit before that.
        self.commit()
        self.store.delete_topic(name)
        self.offsets.delete_topic(name)

    def list_topics(self, header: GetAllTopicsRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_ALL_TOPIC_CONFIG (21) with the configuration of all topics.

        The answer always contains all topics. A tool that asks for pages recognizes that by the
        total number of topics in the header (spec/admin.md §1).
        """
        fields = None
        if header.topic_sequence is not None:
            fields = encode_header(GetAllTopicsResponse(topic_count=len(self.topics)))
        return Command(
            ResponseCode.SUCCESS, fields, tables.encode_topic_table(self.topics.snapshot())
        )

    def get_topic(self, header: GetTopicConfigRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_TOPIC_CONFIG (351) with the configuration of one topic.

        Raises RequestError if the topic does not exist.
        """
        name = header.topic
        config = self.topics.config_of(name)
        if config is None:
            raise RequestError(
                ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}"
            )
        return Command(ResponseCode.SUCCESS, body=tables.encode_topic_config(config))

    def list_system_topics(self, command: Command, peer: Peer) -> Command:
        """Answer GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305) with the sorted names of system topics."""
        names = sorted(name for name in self.topics.table if self.topics.is_system(name))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_list(names))

    # -------------------------------------------------------------------------------- groups

    def create_group(self, command: Command, peer: Peer) -> Announced:
        """Answer UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200): create or change a group.

        Raises RequestError.
        """
        self.groups.put(*self._complete_groups([tables.decode_group_config(command.body)]))
        return Announced(Command(ResponseCode.SUCCESS))

    def create_groups(self, command: Command, peer: Peer) -> Announced | Postponed:
        """Answer UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225): create or change several groups.

        No group changes if one of them is invalid. Raises RequestError.
        """

        def steps() -> WorkItem[Announced]:
            configs = yield from decode_body(_decode_groups, command.body)

            # Check all groups before the first one is changed. `yield None` ends a step.
            checked_configs: list[GroupConfig] = []
            for chunk_index, chunk in enumerate(_split_into_chunks(configs)):
                if chunk_index > 0:
                    yield None
                checked_configs += self._complete_groups(chunk)

            for chunk_index, chunk in enumerate(_split_into_chunks(checked_configs)):
                if chunk_index > 0:
                    yield None
                self.groups.put(*chunk)
            return Announced(Command(ResponseCode.SUCCESS))

        return run_or_postpone(steps())

    def _complete_groups(self, configs: Iterable[GroupConfig]) -> list[GroupConfig]:
        """Return `configs` with the attributes that the groups have after the request.

        The attributes in `configs` are changes: "+key" sets an attribute, and "-key" deletes it.
        Raises RequestError if a name, a number of queues or an attribute is invalid.
        """
        completed_configs = []
        for config in configs:
            _require_no_fault(find_group_name_fault(config.name))
            if not 0 <= config.retry_queues <= QUEUES_MAX:
                raise _invalid_parameter(
                    f"A group cannot have {config.retry_queues} retry queues: the limit is "
                    f"{QUEUES_MAX}."
                )
            present_config = self.groups.config_of(config.name)
            present_attributes = None
            if present_config is not None:
                present_attributes = present_config.attributes
            attributes = apply_attribute_changes(
                present_attributes, config.attributes.items(), GROUP_ATTRIBUTES
            )
            completed_configs.append(replace(config, attributes=attributes))
        return completed_configs

    def delete_group(self, header: DeleteGroupRequest, command: Command, peer: Peer) -> Announced:
        """Answer DELETE_SUBSCRIPTIONGROUP (207): delete a group, and its offsets if requested."""
        self.groups.remove(header.group)
        if header.clean_offset:
            self.offsets.forget(group=header.group)
        return Announced(Command(ResponseCode.SUCCESS))

    def list_groups(self, header: GetAllGroupsRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201) with the configuration of all groups.

        The answer always contains all groups. A tool that asks for pages recognizes that by the
        total number of groups in the header.
        """
        fields = None
        if header.group_sequence is not None:
            fields = encode_header(GetAllGroupsResponse(group_count=len(self.groups)))
        return Command(
            ResponseCode.SUCCESS, fields, tables.encode_group_table(self.groups.snapshot())
        )

    def get_group(self, header: GetGroupConfigRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_SUBSCRIPTIONGROUP_CONFIG (352) with the configuration of one group.

        The group is created if the broker creates groups automatically. Raises RequestError if it
        does not exist.
        """
        name = header.group
        config = self.groups.get_or_create(name)
        if config is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"No group in this broker. group: {name}"
            )
        return Command(ResponseCode.SUCCESS, body=tables.encode_group_config(config))

    def list_offsets(self, command: Command, peer: Peer) -> Command:
        """Answer GET_ALL_CONSUMER_OFFSET (43) with the committed offsets of all groups."""
        body = tables.encode_consumer_offsets(self.offsets.snapshot())
        return Command(ResponseCode.SUCCESS, body=body)
