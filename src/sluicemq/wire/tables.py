"""Codecs for the tables of servers, as bodies of requests and as files of `config/`.

    topics             21, 351         `topics.json`
    groups             200, 201, 352   `subscriptionGroup.json`
    committed offsets  43              `consumerOffset.json`
    SQL92 filters                      `consumerFilter.json`
    ordered pops                       `consumerOrderInfo.json`
    request modes      401, 402        `messageRequestMode.json`
    key-value config                   `kvConfig.json` (of a name server)

Most of them also contain a data version.

Files are written exactly as RocketMQ writes them, byte for byte (spec/store.md §11), in the order
in which Java's hash maps iterate. The order has no meaning, but it lets tests compare files, and a
user who compares two files sees only real changes.

Releases of RocketMQ differ in the fields of these files, and one store may be opened by several
releases. Therefore the fields of a file that SluiceMQ does not use are preserved (`UnknownFields`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import orjson

from sluicemq.errors import ProtocolError
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import DataVersion, GroupConfig, TopicConfig
from sluicemq.wire import fastjson
from sluicemq.wire.declare import (
    OBJECT_CODECS,
    body,
    body_codec,
    declare_object,
    json_field,
    member_codec,
)
from sluicemq.wire.fastjson import (
    as_integer,
    as_list,
    as_object,
    load_object,
    take_integer,
    take_list,
    take_object,
)

K = TypeVar("K", str, int)
T = TypeVar("T")
V = TypeVar("V")
RenderedItems = dict[str, tuple[T, str]]
"""For each item of a table by name: the item and its text when the file was last written.

Few items of a table change between two writes, so the text of the others is reused.
"""

# The numbers of buckets of RocketMQ's hash maps, which determine the order in files.
TABLE_BUCKETS = 2048  # topics; groups
KEY_BUCKETS = 1024  # topic@group keys of offsets
QUEUE_BUCKETS = 64  # the queues of a topic@group key
GROUP_BUCKETS = 128  # groups in groupTopicMap
TOPIC_SET_BUCKETS = 8  # the topics of a group in groupTopicMap
FILTER_BUCKETS = 512  # topics with filters
FORBIDDEN_BUCKETS = 8  # groups with forbidden topics
ORDER_BUCKETS = 256  # topic@group keys of ordered pops
ORDER_QUEUE_BUCKETS = 32  # the queues of ordered pops
DEFAULT_BUCKETS: Final = 16  # attributes and all other maps
TOPIC_QUEUES_DEFAULT: Final = 16
"""The number of queues of a topic whose JSON does not contain it, as in Java."""
STANDARD_RETRIES: Final = {"type": "CUSTOMIZED"}
"""The JSON of the standard retry policy, which uses RocketMQ's intervals."""
POLICY_BYTES_MAX: Final = 4096
"""The most bytes of a group's retry policy as JSON."""
SEPARATOR: Final = "@"
"""What separates topic and group in a key `topic@group`."""
NO_VERSION: Final = DataVersion()

# ------------------------------------------------------------------------ the order of Java's maps


def sort_keys_as_java(keys: Iterable[K], buckets: int = DEFAULT_BUCKETS) -> list[K]:
    """Return keys in the order in which a Java HashMap iterates over them.

    `buckets`, a power of two, is the initial capacity of the map. As in Java, the map grows when it
    is three quarters full.

    >>> sort_keys_as_java([17, 3, 16])
    [16, 17, 3]
    """
    key_list = list(keys)
    if len(key_list) < 2:
        return key_list
    while len(key_list) * 4 > buckets * 3:
        buckets *= 2

    # Keys in the same bucket keep their order, as the sort is stable.
    return sorted(key_list, key=lambda key: _spread_hash(key) & (buckets - 1))


def _spread_hash(key: str | int) -> int:
    """Return the hash of a key after Java's HashMap has mixed its upper bits into the lower ones.

    `tag_code` caches the hashes of strings.
    """
    code = (tag_code(key) if isinstance(key, str) else key) & 0xFFFFFFFF
    return code ^ code >> 16


def sort_map_as_java(mapping: Mapping[str, V], buckets: int = DEFAULT_BUCKETS) -> dict[str, V]:
    """Return a copy of a mapping with string keys, ordered as `sort_keys_as_java` orders them."""
    return {key: mapping[key] for key in sort_keys_as_java(mapping, buckets)}


def sort_integer_map_as_java(mapping: Mapping[int, Any], buckets: int) -> dict[int, Any]:
    """Return a copy of a mapping with integer keys, in the order of a Java HashMap.

    `buckets`, a power of two, is the initial capacity of Java's map.
    """
    # The hash of a small integer is the integer itself.
    has_each_key_its_own_bucket = all(0 <= key < buckets for key in mapping)
    if has_each_key_its_own_bucket and len(mapping) * 4 <= buckets * 3:
        return dict(sorted(mapping.items()))  # the same order, faster
    return {key: mapping[key] for key in sort_keys_as_java(mapping, buckets)}


# -------------------------------------------------------------------------------- unknown fields


@dataclass(slots=True)
class UnknownFields:
    """The fields of a file that SluiceMQ does not use, and preserves when it writes the file.

    `fields` are fields of the file's top-level object. `items` are the fields of each item of its
    table, by the name of the item.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    def render_table(
        self,
        table: Mapping[str, T],
        texts: RenderedItems[T],
        values_of: Callable[[T], dict[str, Any]],
    ) -> fastjson.PrettyText:
        """Return the text of a table in a file, with the unknown fields of its items.

        `table` has the items by name, in the order in which they are written. `values_of(item)`
        returns an item as a JSON object.

        `texts` is a cache from earlier calls: for each name, the item and its text. The text is
        reused if the item is still the same object. The function updates `texts`, which then
        contains exactly the items of `table`.
        """
        for name in texts.keys() - table.keys():
            del texts[name]
        for name, item in table.items():
            is_text_current = name in texts and texts[name][0] is item
            if not is_text_current:
                item_fields = merge_sorted(values_of(item), self.items.get(name, {}))
                object_text = fastjson.dumps_pretty({name: item_fields}, 1)
                # Only the member, without the braces and the last newline of the object around it.
                texts[name] = item, object_text[1 : object_text.rindex("\n")]

        members = ",".join([texts[name][1] for name in table])
        if not members:
            return fastjson.PrettyText("{}")
        return fastjson.PrettyText(f"{{{members}\n\t}}")


def select_unknown_fields(
    json_object: Mapping[Any, Any], known_names: Collection[str]
) -> dict[str, Any]:
    """Return the fields of a JSON object whose names are strings that are not in `known_names`."""
    return {
        name: field_value
        for name, field_value in json_object.items()
        if isinstance(name, str) and name not in known_names
    }


def merge_sorted(
    known_fields: Mapping[str, Any], unknown_fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a JSON object with the fields of both mappings, sorted by name as Java writes beans.

    If both have a field, the value in `known_fields` wins.
    """
    all_fields = {**unknown_fields, **known_fields}
    return {key: all_fields[key] for key in sorted(all_fields)}


def _read_file(
    cls: type[T], file_text: str, file_name: str, table_name: str, item_cls: type[Any]
) -> T:
    """Decode the text of a file to an instance of `cls`, and store its unknown fields.

    The file is a JSON object with a table of `item_cls` under `table_name`. Fields that `cls` or
    `item_cls` do not declare are stored in the instance's attribute `unknown`. `file_name` is the
    name of the file in errors. Raises ProtocolError if the text is not a JSON object, or a field
    has another type.
    """
    json_object = load_object(file_text, file_name)
    table: Any = OBJECT_CODECS[cls].read(json_object)
    table.unknown.fields.update(select_unknown_fields(json_object, OBJECT_CODECS[cls].names))
    for name, json_item in take_object(json_object, table_name).items():
        if fields := select_unknown_fields(
            as_object(json_item, table_name), OBJECT_CODECS[item_cls].names
        ):
            table.unknown.items[fastjson.to_text(name)] = fields
    return table  # type: ignore[no-any-return]


def _render_file(table: Any, **known_fields: Any) -> str:
    """Return the text of a file, whose fields are sorted by name.

    They are the fields `known_fields`, the data version of `table`, and the unknown fields of the
    file.
    """
    known_fields["dataVersion"] = data_version_object(table.data_version)
    return fastjson.dumps_pretty(merge_sorted(known_fields, table.unknown.fields))


def _item_to_json(topic_or_group: Any) -> dict[str, Any]:
    """Return a topic or a group as the JSON object that its file contains.

    The fields are sorted by name. The attributes have the order in which Java's hash map iterates,
    because RocketMQ writes them so.
    """
    return {
        **OBJECT_CODECS[type(topic_or_group)].write(topic_or_group),
        "attributes": sort_map_as_java(topic_or_group.attributes),
    }


# ------------------------------------------------------------------------------ topics, versions

DATA_VERSION_CODEC = declare_object(
    DataVersion, counter="counter", timestamp_ms="timestamp", state_version="stateVersion"
)
data_version_object = DATA_VERSION_CODEC.write
data_version_from = DATA_VERSION_CODEC.read
decode_data_version = body_codec(DataVersion, "data version")[1]


def encode_data_version(version: DataVersion) -> bytes:
    """Encode a data version.

    It is the body of QUERY_DATA_VERSION (322) and a header field in the response to
    GET_BROKER_CONFIG (26).
    """
    return fastjson.dumps_strict(data_version_object(version))


TOPIC_CODEC = declare_object(
    TopicConfig,
    key="name",
    name="topicName",
    read_queues=json_field("readQueueNums", absent=TOPIC_QUEUES_DEFAULT),
    write_queues=json_field("writeQueueNums", absent=TOPIC_QUEUES_DEFAULT),
    perm="perm",
    filter_type="topicFilterType",
    sys_flag="topicSysFlag",
    order="order",
    attributes="attributes",
)
topic_object = TOPIC_CODEC.write
topic_from = TOPIC_CODEC.read
encode_topic_config, decode_topic_config = body_codec(TopicConfig, "topic")


@body
class TopicTable:
    """All topics of a broker by name, Java's TopicConfigSerializeWrapper."""

    topics: Mapping[str, TopicConfig] = json_field("topicConfigTable", default_factory=dict)
    data_version: DataVersion = json_field("dataVersion", default=NO_VERSION)
    unknown: UnknownFields = json_field("", default_factory=UnknownFields)


def topic_table_object(table: TopicTable) -> dict[str, Any]:
    """Return a topic table as JSON for GET_ALL_TOPIC_CONFIG (21) and REGISTER_BROKER (103).

    The maps of static topics are empty, because SluiceMQ has no static topics.
    """
    return {
        **OBJECT_CODECS[TopicTable].write(table),
        "mappingDataVersion": data_version_object(table.data_version),
        "topicQueueMappingDetailMap": {},
        "topicQueueMappingInfoMap": {},
    }


def encode_topic_table(table: TopicTable) -> bytes:
    """Encode the body of the response to GET_ALL_TOPIC_CONFIG (21)."""
    return fastjson.dumps(topic_table_object(table))


decode_topic_table = body_codec(TopicTable, "topic table")[1]


def encode_topic_table_file(
    table: TopicTable, texts: RenderedItems[TopicConfig] | None = None
) -> str:
    """Return the text of `topics.json`.

    `texts` is a cache of the texts of single topics. The caller passes the same dict again at the
    next call, so that topics that have not changed are not encoded again. None means no cache.
    """
    topics = table.unknown.render_table(
        sort_map_as_java(table.topics, TABLE_BUCKETS), {} if texts is None else texts, _item_to_json
    )
    return _render_file(table, topicConfigTable=topics)


def decode_topic_table_file(file_text: str) -> TopicTable:
    """Return the topics in the text of `topics.json`, as any release of RocketMQ writes it.

    Fields that SluiceMQ does not know are preserved in `unknown`. Raises ProtocolError if the text
    is not a JSON object, or a known field has another type.
    """
    return _read_file(TopicTable, file_text, "topic table", "topicConfigTable", TopicConfig)


# ---------------------------------------------------------------------------------------- groups


def _read_retry_policy(json_value: Any, value_name: str) -> dict[Any, Any] | None:
    """Return the retry policy in a group's JSON, None if it is empty or the standard policy.

    The policy is an object, which is not interpreted. Raises ProtocolError if it is not an object
    that can be written as standard JSON, or if it has more than POLICY_BYTES_MAX bytes.
    """
    policy = as_object(json_value, value_name)
    try:
        policy_bytes = len(orjson.dumps(policy))
    except TypeError as error:  # also raised if it is nested too deeply
        raise ProtocolError(f"The {value_name} is not standard JSON.") from error
    if policy_bytes > POLICY_BYTES_MAX:
        raise ProtocolError(
            f"The {value_name} has {policy_bytes} bytes; the limit is {POLICY_BYTES_MAX}."
        )
    return None if policy in ({}, STANDARD_RETRIES) else policy


GROUP_CODEC = declare_object(
    GroupConfig,
    key="name",
    name="groupName",
    consume_enable="consumeEnable",
    consume_from_min_enable="consumeFromMinEnable",
    consume_broadcast_enable="consumeBroadcastEnable",
    consume_message_orderly="consumeMessageOrderly",
    retry_queues="retryQueueNums",
    retry_times_max="retryMaxTimes",
    broker_id="brokerId",
    broker_id_when_slow="whichBrokerWhenConsumeSlowly",
    notify_changes_enable="notifyConsumerIdsChangedEnable",
    sys_flag="groupSysFlag",
    consume_timeout_minutes="consumeTimeoutMinute",
    attributes="attributes",
    retry_policy=json_field(
        "groupRetryPolicy",
        read=_read_retry_policy,
        write=lambda policy: dict(policy or STANDARD_RETRIES),
    ),
)
group_object = GROUP_CODEC.write
group_from = GROUP_CODEC.read
encode_group_config, decode_group_config = body_codec(GroupConfig, "group")


@body
class GroupTable:
    """All groups of a broker by name.

    `forbidden` has, for a group and a topic, the bits that forbid the group to read the topic.
    """

    groups: Mapping[str, GroupConfig] = json_field("subscriptionGroupTable", default_factory=dict)
    data_version: DataVersion = json_field("dataVersion", default=NO_VERSION)
    forbidden: Mapping[str, Mapping[str, int]] = json_field("forbiddenTable", default_factory=dict)
    unknown: UnknownFields = json_field("", default_factory=UnknownFields)


encode_group_table, decode_group_table = body_codec(GroupTable, "group table")


def encode_group_table_file(
    table: GroupTable, texts: RenderedItems[GroupConfig] | None = None
) -> str:
    """Return the text of `subscriptionGroup.json`.

    `texts` is a cache of the texts of single groups. The caller passes the same dict again at the
    next call, so that groups that have not changed are not encoded again. None means no cache.
    """
    forbidden = sort_map_as_java(table.forbidden, FORBIDDEN_BUCKETS)
    groups = table.unknown.render_table(
        sort_map_as_java(table.groups, TABLE_BUCKETS), {} if texts is None else texts, _item_to_json
    )
    return _render_file(
        table,
        forbiddenTable={name: sort_map_as_java(bits) for name, bits in forbidden.items()},
        subscriptionGroupTable=groups,
    )


def decode_group_table_file(file_text: str) -> GroupTable:
    """Return the groups in the text of `subscriptionGroup.json`, written by any RocketMQ release.

    Fields that SluiceMQ does not know are preserved in `unknown`. Raises ProtocolError if the text
    is not a JSON object, or a known field has another type.
    """
    return _read_file(GroupTable, file_text, "group table", "subscriptionGroupTable", GroupConfig)


# --------------------------------------------------------------------------------------- offsets


@body
class ConsumerOffsets:
    """The committed offsets of a broker. `offsets` maps `topic@group` and queue id to an offset."""

    offsets: Mapping[str, Mapping[int, int]] = json_field("offsetTable", default_factory=dict)
    data_version: DataVersion = json_field("dataVersion", default=NO_VERSION)
    unknown: UnknownFields = json_field("", default_factory=UnknownFields)


encode_consumer_offsets, decode_consumer_offsets = body_codec(ConsumerOffsets, "consumer offsets")


def encode_consumer_offsets_file(offsets: ConsumerOffsets) -> str:
    """Return the text of `consumerOffset.json`.

    Its member `offsetTable` has the offsets by `topic@group` and queue. Its member `groupTopicMap`
    has the topics of each group, only for people who read the file. There, keys that are not of the
    form `topic@group` are left out.
    """
    offset_table = {
        key: sort_integer_map_as_java(offset_by_queue, QUEUE_BUCKETS)
        for key, offset_by_queue in sort_map_as_java(offsets.offsets, KEY_BUCKETS).items()
    }
    topics_by_group = _group_topics(offset_table)
    return _render_file(offsets, groupTopicMap=topics_by_group, offsetTable=offset_table)


def _group_topics(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the topics of each group, from keys of the form `topic@group`.

    Other keys are ignored. Groups and topics are in the order in which Java's hash maps iterate.
    """
    topics_by_group: dict[str, list[str]] = {}
    for key in keys:
        topic, _, group = key.partition(SEPARATOR)
        if topic and group and SEPARATOR not in group:
            topics_by_group.setdefault(group, []).append(topic)
    return {
        group: tuple(sort_keys_as_java(topics, TOPIC_SET_BUCKETS))
        for group, topics in sort_map_as_java(topics_by_group, GROUP_BUCKETS).items()
    }


def decode_consumer_offsets_file(file_text: str) -> ConsumerOffsets:
    """Return the offsets in the text of `consumerOffset.json`, written by any RocketMQ release.

    `lmqConsumerOffset.json` is accepted too. Its table `lmqOffsetTable`, of light queues, maps
    `topic@group` to the offset of the only queue, which gets the queue id 0. Unknown fields are
    stored in `unknown`. Raises ProtocolError if the text is not a JSON object, or a known field has
    another type.
    """
    json_object = load_object(file_text, "consumer offsets")
    offsets = OBJECT_CODECS[ConsumerOffsets].read(json_object)
    light_offsets = {
        fastjson.to_text(key): {0: as_integer(offset, "An offset")}
        for key, offset in take_object(json_object, "lmqOffsetTable").items()
    }
    known_names = ("dataVersion", "groupTopicMap", "offsetTable", "lmqOffsetTable")
    return ConsumerOffsets(
        {**offsets.offsets, **light_offsets},
        offsets.data_version,
        UnknownFields(select_unknown_fields(json_object, known_names)),
    )


# ------------------------------------------------------------------------------------------- pop


@dataclass(frozen=True, slots=True)
class OrderInfo:
    """The messages that the last ordered pop took from a queue.

    `offsets` are their offsets, `pop_ms` is the time of the pop (ms since 1970), and `invisible_ms`
    their invisible time. Bit i of `done` is set if message i is acknowledged. `visible_ms` maps an
    offset to the time when the message becomes visible, for messages whose invisible time was
    changed. `counts` maps an offset to the number of earlier deliveries; None means that no message
    was delivered before.
    """

    offsets: tuple[int, ...]
    pop_ms: int
    invisible_ms: int
    taken_ms: int
    attempt_id: str | None = None
    done: int = 0
    visible_ms: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[int, int] | None = None


def _read_offsets(json_value: Any, value_name: str) -> tuple[int, ...]:
    """Return the offsets in a JSON list: `[100, 1, 5]` becomes (100, 101, 105).

    The first number is the first offset, and the others are differences to the first offset. Raises
    ProtocolError if the value is not a list of integers.
    """
    numbers = [as_integer(number, value_name) for number in as_list(json_value, value_name)]
    if not numbers:
        return ()
    first_offset, *differences = numbers
    return (first_offset, *(first_offset + difference for difference in differences))


def _write_offsets(offsets: Sequence[int]) -> list[int]:
    """Return offsets as a list for JSON: (100, 101, 105) becomes [100, 1, 5].

    The first number is the first offset, and the others are differences to it.
    """
    if not offsets:
        return []
    first_offset, *other_offsets = offsets
    return [first_offset, *(offset - first_offset for offset in other_offsets)]


def _write_counts(counts: Mapping[int, int] | None) -> dict[int, int] | None:
    """Return `OrderInfo.counts` in the order in which Java's hash map iterates."""
    if counts is None:
        return None
    return sort_integer_map_as_java(counts, DEFAULT_BUCKETS)


ORDER_CODEC = declare_object(
    OrderInfo,
    offsets=json_field("o", read=_read_offsets, write=_write_offsets),
    pop_ms="popTime",
    invisible_ms="i",
    taken_ms="l",
    attempt_id="a",
    done="cm",
    visible_ms=json_field(
        "ot", write=lambda times: sort_integer_map_as_java(times, DEFAULT_BUCKETS) or None
    ),
    counts=json_field("oc", write=_write_counts),
)
OrderTable = Mapping[str, Mapping[int, OrderInfo]]
"""The last ordered pop by `topic@group` and queue id."""


def encode_order_file(table: OrderTable) -> str:
    """Return the text of `consumerOrderInfo.json`.

    Its tables have the order in which Java's hash maps iterate.
    """
    json_table = {
        key: {
            queue_id: ORDER_CODEC.write(order_info)
            for queue_id, order_info in sort_integer_map_as_java(
                queues, ORDER_QUEUE_BUCKETS
            ).items()
        }
        for key, queues in sort_map_as_java(table, ORDER_BUCKETS).items()
    }
    return fastjson.dumps_pretty({"table": json_table})


decode_order_file = member_codec("table", dict[str, dict[int, OrderInfo]], "order of pops")[1]
PULL = "PULL"
POP = "POP"


@body
class RequestMode:
    """Whether a group reads a topic by PULL or by POP, as SET_MESSAGE_REQUEST_MODE (401) sets it.

    If `share_queues` is 0, all members that pop share all queues of a broker. If it is n > 0, each
    member pops from its own queues, and from those of the n members after it.
    """

    topic: str = json_field("topic")
    group: str = json_field("consumerGroup")
    mode: str = json_field("mode", default=PULL)
    share_queues: int = json_field("popShareQueueNum", default=0)


RequestModes = Mapping[str, Mapping[str, RequestMode]]
"""The request mode by topic and group."""
encode_request_mode, decode_request_mode = body_codec(RequestMode, "mode")
# The response to GET_ALL_MESSAGE_REQUEST_MODE (402). The decoder also reads the file.
encode_request_modes: Callable[[RequestModes], bytes]
encode_request_modes, decode_request_modes = member_codec(
    "messageRequestModeMap", dict[str, dict[str, RequestMode]], "modes"
)


def encode_request_modes_file(modes: RequestModes) -> str:
    """Return the text of `messageRequestMode.json`: the request mode of each topic and group."""
    write = OBJECT_CODECS[RequestMode].write
    written = {
        topic: {group: write(mode) for group, mode in sort_map_as_java(groups).items()}
        for topic, groups in sort_map_as_java(modes).items()
    }
    return fastjson.dumps_pretty({"messageRequestModeMap": written})


# --------------------------------------------------------------------------- filters, key-values


@dataclass(frozen=True, slots=True)
class ConsumerFilter:
    """The SQL92 filter of a group for a topic, as `consumerFilter.json` has it.

    Times are ms since 1970. A filter is dead from the time when the last member of the group
    dropped its subscription. `bits` are the positions of the filter in RocketMQ's filter bitmaps,
    which have `bit_count` bits. `version` is the time when the client made the subscription.
    """

    topic: str
    group: str
    expression: str
    kind: str = SQL92
    version: int = 0
    born_ms: int = 0
    dead_ms: int = 0
    bits: tuple[int, ...] = ()
    bit_count: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether no member of the group has this filter any longer."""
        return self.dead_ms >= self.born_ms


FILTER_CODEC = declare_object(
    ConsumerFilter,
    topic="topic",
    group="consumerGroup",
    expression="expression",
    kind="expressionType",
    version="clientVersion",
    born_ms="bornTime",
    dead_ms="deadTime",
)


def encode_consumer_filters_file(filters: Iterable[ConsumerFilter]) -> str:
    """Return the text of the store's file `consumerFilter.json`, in the order of Java's maps.

    The file has the filters by topic and group. `bloomFilterData` is null for a filter that has no
    bits in the Bloom filter of the queues.
    """
    by_topic: dict[str, dict[str, Any]] = {}
    for consumer_filter in filters:
        bloom_bits = None
        if consumer_filter.bit_count:
            bloom_bits = {"bitNum": consumer_filter.bit_count, "bitPos": consumer_filter.bits}
        filters_of_topic = by_topic.setdefault(consumer_filter.topic, {})
        filters_of_topic[consumer_filter.group] = merge_sorted(
            FILTER_CODEC.write(consumer_filter),
            {"bloomFilterData": bloom_bits, "dead": consumer_filter.is_dead},
        )
    topics = {
        topic: {"groupFilterData": sort_map_as_java(groups), "topic": topic}
        for topic, groups in sort_map_as_java(by_topic, FILTER_BUCKETS).items()
    }
    return fastjson.dumps_pretty({"filterDataByTopic": topics})


def decode_consumer_filters_file(file_text: str) -> list[ConsumerFilter]:
    """Return the filters in the text of `consumerFilter.json`.

    The topic and the group of a filter are the keys under which it is stored. Its own fields for
    them are ignored. Raises ProtocolError if the text is not a JSON object, or a known field has
    another type.
    """
    filters = []
    topics = take_object(load_object(file_text, "consumer filters"), "filterDataByTopic")
    for topic, json_topic in topics.items():
        json_filters = take_object(as_object(json_topic, "A topic"), "groupFilterData")
        for group, json_filter in json_filters.items():
            json_values = as_object(json_filter, "A filter")
            filters.append(_read_consumer_filter(topic, group, json_values))
    return filters


def _read_consumer_filter(topic: Any, group: Any, json_filter: Mapping[Any, Any]) -> ConsumerFilter:
    """Return the filter that the JSON object `json_filter` contains.

    `topic` and `group` replace the topic and group in the object.
    """
    bloom_bits = take_object(json_filter, "bloomFilterData")
    stored = FILTER_CODEC.read({**json_filter, "topic": topic, "consumerGroup": group})
    bits = tuple(as_integer(bit, "bitPos") for bit in take_list(bloom_bits, "bitPos"))
    return replace(stored, bits=bits, bit_count=take_integer(bloom_bits, "bitNum"))


def encode_kv_config_file(namespaces: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of a name server's `kvConfig.json`: the values by namespace and key."""
    return fastjson.dumps_file(
        {"configTable": {name: dict(table) for name, table in namespaces.items()}}
    )


decode_kv_config_file = member_codec("configTable", dict[str, dict[str, str]], "kvConfig.json")[1]
