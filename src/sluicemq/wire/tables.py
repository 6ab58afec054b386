"""The tables that servers keep, as bodies of requests and as files of `config/`: topics (21, 351,
`topics.json`), groups (200, 201, 352, `subscriptionGroup.json`), offsets (43,
`consumerOffset.json`), SQL92 filters (`consumerFilter.json`), what orderly pops have taken
(`consumerOrderInfo.json`), who pops (401, 402, `messageRequestMode.json`), key-values
(`kvConfig.json`), and the edition that they carry.

Files are written as RocketMQ writes them, to the byte (spec/store.md §11): in the order in which
Java's hash maps hand out what they hold. It means nothing, but a test can compare, and a user sees
no changes in a diff that are none. Releases of RocketMQ differ in their fields, and a store goes
from one to another: what a file says and we have no use for is kept and written again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import orjson

from sluicemq.errors import ProtocolError
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import DataVersion, GroupConfig, TopicConfig
from sluicemq.wire import fastjson
from sluicemq.wire.declare import (
    FORMS,
    as_integer,
    as_list,
    as_object,
    body,
    body_codec,
    form,
    json,
    load_object,
    member_codec,
    take_integer,
    take_list,
    take_object,
)

K = TypeVar("K", str, int)
T = TypeVar("T")
V = TypeVar("V")
Texts = dict[str, tuple[T, str]]
"""Items of a table as they were last written: of a thousand few change between two editions."""

# RocketMQ's maps, for the order in files: topics and groups, topic@group keys, a key's queues,
# groups and their topics beside the offsets, topics with filters, forbidden groups, topic@group
# keys and queues of orderly pops, attributes.
TABLE_BUCKETS, KEY_BUCKETS, QUEUE_BUCKETS = 2048, 1024, 64
GROUP_BUCKETS, TOPIC_SET_BUCKETS, FILTER_BUCKETS, FORBIDDEN_BUCKETS = 128, 8, 512, 8
ORDER_BUCKETS, ORDER_QUEUE_BUCKETS = 256, 32
DEFAULT_BUCKETS: Final = 16
TOPIC_QUEUES_DEFAULT: Final = 16
"""What Java takes for the number of queues that a topic's JSON does not name."""
STANDARD_RETRIES: Final = {"type": "CUSTOMIZED"}
"""The retry policy of a group that has none of its own: RocketMQ's intervals."""
POLICY_BYTES_MAX: Final = 4096
SEPARATOR: Final = "@"
NO_VERSION: Final = DataVersion()

# ------------------------------------------------------------------------ the order of Java's maps


def hash_ordered(keys: Iterable[K], buckets: int = DEFAULT_BUCKETS) -> list[K]:
    """The keys as a hash map hands them out that was made with so many buckets (a power of two).

    >>> hash_ordered([17, 3, 16])
    [16, 17, 3]
    """
    found = list(keys)
    if len(found) < 2:
        return found
    while len(found) * 4 > buckets * 3:  # a map grows at three quarters
        buckets *= 2

    return sorted(found, key=lambda key: _spread(key) & (buckets - 1))


def _spread(key: str | int) -> int:
    """Return how a Java map spreads the hash of a key. Texts are hashed once, see `tag_code`."""
    code = (tag_code(key) if isinstance(key, str) else key) & 0xFFFFFFFF
    return code ^ code >> 16


def hash_map(values: Mapping[str, V], buckets: int = DEFAULT_BUCKETS) -> dict[str, V]:
    """The same mapping in that order."""
    return {key: values[key] for key in hash_ordered(values, buckets)}


def hash_map_of_integers(values: Mapping[int, Any], buckets: int) -> dict[int, Any]:
    """As `hash_map`, for integer keys."""
    if all(0 <= key < buckets for key in values) and len(values) * 4 <= buckets * 3:
        return dict(sorted(values.items()))
    return {key: values[key] for key in hash_ordered(values, buckets)}


# -------------------------------------------------------------------------------- unknown fields


@dataclass(slots=True)
class Unknown:
    """What a file says besides: fields of the whole, and of items of its table by their name."""

    fields: dict[str, Any] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    def rendered(
        self, table: Mapping[str, T], texts: Texts[T], values_of: Callable[[T], dict[str, Any]]
    ) -> fastjson.Pretty:
        """A table as it stands in a file, its items with what was remembered of them. Those that
        are still the same objects are taken from `texts`, which is brought up to date."""
        for name in texts.keys() - table.keys():
            del texts[name]
        for name, item in table.items():
            if name not in texts or texts[name][0] is not item:
                values = completed(values_of(item), self.items.get(name, {}))
                text = fastjson.dumps_pretty({name: values}, 1)
                texts[name] = item, text[1 : text.rindex("\n")]
        items = ",".join([texts[name][1] for name in table])
        return fastjson.Pretty(f"{{{items}\n\t}}" if items else "{}")


def unknown_fields(values: Mapping[Any, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of an object whose names are not known."""
    return {
        key: value for key, value in values.items() if isinstance(key, str) and key not in known
    }


def completed(values: Mapping[str, Any], unknown: Mapping[str, Any]) -> dict[str, Any]:
    """An object with unknown fields added, in alphabetical order as Java writes beans."""
    fields = {**unknown, **values}
    return {key: fields[key] for key in sorted(fields)}


def _read_file(cls: type[T], text: str, what: str, key: str, item_cls: type[Any]) -> T:
    """A file with a table under `key` and a field `unknown`."""
    values = load_object(text, what)
    table: Any = FORMS[cls].read(values)
    table.unknown.fields.update(unknown_fields(values, FORMS[cls].names))
    for name, item in take_object(values, key).items():
        if fields := unknown_fields(as_object(item, key), FORMS[item_cls].names):
            table.unknown.items[fastjson.text(name)] = fields
    return table  # type: ignore[no-any-return]


def _file_text(table: Any, **known: Any) -> str:
    """The text of a file: the edition, what is known, and what else it said."""
    known["dataVersion"] = data_version_object(table.data_version)
    return fastjson.dumps_pretty(completed(known, table.unknown.fields))


def _item_values(item: Any) -> dict[str, Any]:
    """A topic or a group for its file."""
    return {**FORMS[type(item)].write(item), "attributes": hash_map(item.attributes)}


# ------------------------------------------------------------------------------ topics, versions

DATA_VERSION = form(
    DataVersion, counter="counter", timestamp_ms="timestamp", state_version="stateVersion"
)
data_version_object, data_version_from = DATA_VERSION.write, DATA_VERSION.read
decode_data_version = body_codec(DataVersion, "data version")[1]


def encode_data_version(version: DataVersion) -> bytes:
    """322's body, 26's header field."""
    return fastjson.dumps_strict(data_version_object(version))


TOPIC = form(
    TopicConfig,
    key="name",
    name="topicName",
    read_queues=json("readQueueNums", absent=TOPIC_QUEUES_DEFAULT),
    write_queues=json("writeQueueNums", absent=TOPIC_QUEUES_DEFAULT),
    perm="perm",
    filter_type="topicFilterType",
    sys_flag="topicSysFlag",
    order="order",
    attributes="attributes",
)
topic_object, topic_from = TOPIC.write, TOPIC.read
encode_topic_config, decode_topic_config = body_codec(TopicConfig, "topic")


@body
class TopicTable:
    """All topics of a broker by name (TopicConfigSerializeWrapper)."""

    topics: Mapping[str, TopicConfig] = json("topicConfigTable", default_factory=dict)
    data_version: DataVersion = json("dataVersion", default=NO_VERSION)
    unknown: Unknown = json("", default_factory=Unknown)


def topic_table_object(table: TopicTable) -> dict[str, Any]:
    """A topic table as 21 and 103 carry it. Static topics are not there: their maps are empty."""
    return {
        **FORMS[TopicTable].write(table),
        "mappingDataVersion": data_version_object(table.data_version),
        "topicQueueMappingDetailMap": {},
        "topicQueueMappingInfoMap": {},
    }


def encode_topic_table(table: TopicTable) -> bytes:
    """21's answer."""
    return fastjson.dumps(topic_table_object(table))


decode_topic_table = body_codec(TopicTable, "topic table")[1]


def encode_topic_table_file(table: TopicTable, texts: Texts[TopicConfig] | None = None) -> str:
    """The text of `topics.json`. `texts` keeps what did not change for the next time."""
    topics = table.unknown.rendered(
        hash_map(table.topics, TABLE_BUCKETS), {} if texts is None else texts, _item_values
    )
    return _file_text(table, topicConfigTable=topics)


def decode_topic_table_file(text: str) -> TopicTable:
    """The inverse, of any release; fields that we do not know stay."""
    return _read_file(TopicTable, text, "topic table", "topicConfigTable", TopicConfig)


# ---------------------------------------------------------------------------------------- groups


def _policy(value: Any, what: str) -> dict[Any, Any] | None:
    """Kept as it is, so it has to be something that can be written. Raises ProtocolError."""
    policy = as_object(value, what)
    try:
        size = len(orjson.dumps(policy))
    except TypeError as error:  # also: nested too deeply
        raise ProtocolError(f"The {what} is not plain JSON.") from error
    if size > POLICY_BYTES_MAX:
        raise ProtocolError(f"The {what} has {size} bytes, the limit is {POLICY_BYTES_MAX}.")
    return None if policy in ({}, STANDARD_RETRIES) else policy


GROUP = form(
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
    retry_policy=json(
        "groupRetryPolicy", read=_policy, write=lambda it: dict(it or STANDARD_RETRIES)
    ),
)
group_object, group_from = GROUP.write, GROUP.read
encode_group_config, decode_group_config = body_codec(GroupConfig, "group")


@body
class GroupTable:
    """All groups of a broker by name; `forbidden` is group -> topic -> bits."""

    groups: Mapping[str, GroupConfig] = json("subscriptionGroupTable", default_factory=dict)
    data_version: DataVersion = json("dataVersion", default=NO_VERSION)
    forbidden: Mapping[str, Mapping[str, int]] = json("forbiddenTable", default_factory=dict)
    unknown: Unknown = json("", default_factory=Unknown)


encode_group_table, decode_group_table = body_codec(GroupTable, "group table")


def encode_group_table_file(table: GroupTable, texts: Texts[GroupConfig] | None = None) -> str:
    """The text of `subscriptionGroup.json`. `texts` keeps what did not change for the next time."""
    forbidden = hash_map(table.forbidden, FORBIDDEN_BUCKETS)
    groups = table.unknown.rendered(
        hash_map(table.groups, TABLE_BUCKETS), {} if texts is None else texts, _item_values
    )
    return _file_text(
        table,
        forbiddenTable={name: hash_map(bits) for name, bits in forbidden.items()},
        subscriptionGroupTable=groups,
    )


def decode_group_table_file(text: str) -> GroupTable:
    """The inverse, of any release; fields that we do not know stay."""
    return _read_file(GroupTable, text, "group table", "subscriptionGroupTable", GroupConfig)


# --------------------------------------------------------------------------------------- offsets


@body
class ConsumerOffsets:
    """Committed offsets: `topic@group` -> queue id -> offset."""

    offsets: Mapping[str, Mapping[int, int]] = json("offsetTable", default_factory=dict)
    data_version: DataVersion = json("dataVersion", default=NO_VERSION)
    unknown: Unknown = json("", default_factory=Unknown)


encode_consumer_offsets, decode_consumer_offsets = body_codec(ConsumerOffsets, "consumer offsets")


def encode_consumer_offsets_file(offsets: ConsumerOffsets) -> str:
    """The text of `consumerOffset.json`; `groupTopicMap` is derived, for people who read it."""
    table = {
        key: hash_map_of_integers(queues, QUEUE_BUCKETS)
        for key, queues in hash_map(offsets.offsets, KEY_BUCKETS).items()
    }
    topics_of: dict[str, list[str]] = {}
    for key in table:
        topic, _, group = key.partition(SEPARATOR)
        if topic and group and SEPARATOR not in group:
            topics_of.setdefault(group, []).append(topic)
    groups = {
        group: tuple(hash_ordered(topics, TOPIC_SET_BUCKETS))
        for group, topics in hash_map(topics_of, GROUP_BUCKETS).items()
    }
    return _file_text(offsets, groupTopicMap=groups, offsetTable=table)


def decode_consumer_offsets_file(text: str) -> ConsumerOffsets:
    """The inverse, of any release, with what it says besides.

    Also of `lmqConsumerOffset.json`, where light queues have a table of their own: topic@group to
    the offset of their only queue.
    """
    values = load_object(text, "consumer offsets")
    offsets = FORMS[ConsumerOffsets].read(values)
    light = take_object(values, "lmqOffsetTable").items()
    table = {fastjson.text(key): {0: as_integer(offset, "An offset")} for key, offset in light}
    known = ("dataVersion", "groupTopicMap", "offsetTable", "lmqOffsetTable")
    return ConsumerOffsets(
        {**offsets.offsets, **table},
        offsets.data_version,
        Unknown(unknown_fields(values, known)),
    )


# ------------------------------------------------------------------------------------------- pop


@dataclass(frozen=True, slots=True)
class OrderInfo:
    """What the last orderly pop took of a queue: offsets, when (ms), and for how long it hides
    them. Bit i of `done`: the i-th is acknowledged. `visible_ms` has those whose time was changed,
    `counts` how often one came before; None: nothing came before at all."""

    offsets: tuple[int, ...]
    pop_ms: int
    invisible_ms: int
    taken_ms: int
    attempt_id: str | None = None
    done: int = 0
    visible_ms: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[int, int] | None = None


def _offsets_from(value: Any, what: str) -> tuple[int, ...]:
    """The first, then how far the others are from it."""
    found = [as_integer(one, what) for one in as_list(value, what)]
    return tuple(one + found[0] if index else one for index, one in enumerate(found))


ORDER = form(
    OrderInfo,
    offsets=json(
        "o",
        read=_offsets_from,
        write=lambda it: [one - it[0] if index else one for index, one in enumerate(it)],
    ),
    pop_ms="popTime",
    invisible_ms="i",
    taken_ms="l",
    attempt_id="a",
    done="cm",
    visible_ms=json("ot", write=lambda it: hash_map_of_integers(it, DEFAULT_BUCKETS) or None),
    counts=json(
        "oc",
        write=lambda it: None if it is None else hash_map_of_integers(it, DEFAULT_BUCKETS),
    ),
)
OrderTable = Mapping[str, Mapping[int, OrderInfo]]
"""`topic@group` -> queue id -> what was taken."""


def encode_order_file(table: OrderTable) -> str:
    """The text of `consumerOrderInfo.json`."""
    written = {
        key: {
            queue_id: ORDER.write(info)
            for queue_id, info in hash_map_of_integers(queues, ORDER_QUEUE_BUCKETS).items()
        }
        for key, queues in hash_map(table, ORDER_BUCKETS).items()
    }
    return fastjson.dumps_pretty({"table": written})


decode_order_file = member_codec("table", dict[str, dict[int, OrderInfo]], "order of pops")[1]
PULL, POP = "PULL", "POP"


@body
class RequestMode:
    """How a group reads a topic, as 401 sets it: by PULL, or by POP. Those who pop share all queues
    of a broker, or, with `share_queues` > 0, each has its own and those of so many members after
    it."""

    topic: str = json("topic")
    group: str = json("consumerGroup")
    mode: str = json("mode", default=PULL)
    share_queues: int = json("popShareQueueNum", default=0)


Modes = Mapping[str, Mapping[str, RequestMode]]
"""Topic -> group -> mode."""
encode_request_mode, decode_request_mode = body_codec(RequestMode, "mode")
# 402's answer; and the inverse, of the file too.
encode_request_modes: Callable[[Modes], bytes]
encode_request_modes, decode_request_modes = member_codec(
    "messageRequestModeMap", dict[str, dict[str, RequestMode]], "modes"
)


def encode_request_modes_file(modes: Modes) -> str:
    """The text of `messageRequestMode.json`."""
    write = FORMS[RequestMode].write
    written = {
        topic: {group: write(mode) for group, mode in hash_map(groups).items()}
        for topic, groups in hash_map(modes).items()
    }
    return fastjson.dumps_pretty({"messageRequestModeMap": written})


# --------------------------------------------------------------------------- filters, key-values


@dataclass(frozen=True, slots=True)
class ConsumerFilter:
    """What a group wants of a topic. Times are ms since 1970; it is dead when nobody of the group
    subscribed to it any more. `bits` of `bit_count` are its places in RocketMQ's filter bitmaps;
    `version` is when the client made the subscription."""

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
        return self.dead_ms >= self.born_ms


FILTER = form(
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
    """The text of `consumerFilter.json`."""
    by_topic: dict[str, dict[str, Any]] = {}
    for item in filters:
        bloom = {"bitNum": item.bit_count, "bitPos": item.bits} if item.bit_count else None
        by_topic.setdefault(item.topic, {})[item.group] = completed(
            FILTER.write(item), {"bloomFilterData": bloom, "dead": item.is_dead}
        )
    topics = {
        topic: {"groupFilterData": hash_map(groups), "topic": topic}
        for topic, groups in hash_map(by_topic, FILTER_BUCKETS).items()
    }
    return fastjson.dumps_pretty({"filterDataByTopic": topics})


def decode_consumer_filters_file(text: str) -> list[ConsumerFilter]:
    """The inverse. Raises ProtocolError."""
    found = []
    topics = take_object(load_object(text, "consumer filters"), "filterDataByTopic")
    for topic, entry in topics.items():
        for group, item in take_object(as_object(entry, "A topic"), "groupFilterData").items():
            values = as_object(item, "A filter")
            bloom = take_object(values, "bloomFilterData")
            named = {**values, "topic": topic, "consumerGroup": group}
            one = FILTER.read(named)
            bits = tuple(as_integer(bit, "bitPos") for bit in take_list(bloom, "bitPos"))
            found.append(replace(one, bits=bits, bit_count=take_integer(bloom, "bitNum")))
    return found


def encode_kv_config_file(namespaces: Mapping[str, Mapping[str, str]]) -> str:
    """The text of a name server's `kvConfig.json`."""
    return fastjson.dumps_file(
        {"configTable": {name: dict(table) for name, table in namespaces.items()}}
    )


decode_kv_config_file = member_codec("configTable", dict[str, dict[str, str]], "kvConfig.json")[1]
