"""The declared table of keys: one line a key, from which loading, text and documentation follow.

`field` is the name in the value of `part` (values.py), where the default stands too. `live` keys
can be changed in a running server (requests 25 and 318); the others take effect at its next start.
Keys that begin with `sluice` are ours alone. Names and ranges: spec/config.md; aliases are
spellings of older releases and of the articles in seeds 000 and 002.
"""

from enum import StrEnum
from typing import Final, NamedTuple

INT_MAX: Final = 2**31 - 1
GIB: Final = 1 << 30


class Kind(StrEnum):
    """How the text of a value is read."""

    BOOLEAN = "true or false"
    INTEGER = "whole number"
    TEXT = "text"
    PATH = "path"
    LIST = "list separated by ;"
    CHOICE = "one of a few words"


class Part(StrEnum):
    """Which settings a key belongs to."""

    BROKER = "broker"
    STORE = "store"
    NAME_SERVER = "name server"


class Key(NamedTuple):
    """One key. `choices` maps the words of a file to the value of the field."""

    part: Part
    name: str
    field: str
    kind: Kind
    doc: str
    minimum: int = 0
    maximum: int = INT_MAX
    aliases: tuple[str, ...] = ()
    choices: tuple[tuple[str, object], ...] = ()
    live: bool = False


def _key(part: Part, kind: Kind, name: str, field: str, doc: str, **rest: object) -> Key:
    return Key(part, name, field, kind, doc)._replace(**rest)  # type: ignore[arg-type]


def _words(*words: str) -> tuple[tuple[str, object], ...]:
    return tuple((word, word) for word in words)


B, S, N = Part.BROKER, Part.STORE, Part.NAME_SERVER
BOOLEAN, INTEGER, TEXT, PATH = Kind.BOOLEAN, Kind.INTEGER, Kind.TEXT, Kind.PATH
LIST, CHOICE = Kind.LIST, Kind.CHOICE

# fmt: off
_BROKER_KEYS = (
    _key(B, TEXT, "brokerName", "broker_name",
         "Name of the broker; brokers of one name are master and slaves. Default: the name of the "
         "machine."),
    _key(B, TEXT, "brokerClusterName", "cluster_name",
         "Cluster the broker belongs to."),
    _key(B, INTEGER, "brokerId", "broker_id",
         "0 is the master. Slaves are not built yet.", maximum=0),
    _key(B, CHOICE, "brokerRole", "broker_role",
         "SYNC_MASTER waits for no slave as long as replication is not built.",
         choices=_words("ASYNC_MASTER", "SYNC_MASTER")),
    _key(B, TEXT, "bindAddress", "bind_address",
         "Address to listen at; `sluice up` uses 127.0.0.1 unless this or --host says otherwise."),
    _key(B, INTEGER, "listenPort", "listen_port",
         "Port to listen at; the VIP port is two less. 0 takes a free port.", maximum=65535),
    _key(B, LIST, "namesrvAddr", "name_server_addresses",
         "Name servers, `host:port;host:port`. Default: the variable NAMESRV_ADDR."),
    _key(B, TEXT, "brokerIP1", "broker_ip1",
         "Address that clients are told. When it is set, nothing is guessed and it is never "
         "replaced."),
    _key(B, TEXT, "brokerIP2", "broker_ip2",
         "Address that slaves are told. Default: as brokerIP1."),
    _key(B, INTEGER, "brokerPermission", "broker_permission",
         "Bits: 4 read, 2 write. 4 refuses sends, 2 refuses pulls.", maximum=7, live=True),
    _key(B, INTEGER, "defaultTopicQueueNums", "default_topic_queues",
         "Queues of TBW102, which caps those of a topic that is created by its first send.",
         minimum=1, maximum=4096),
    _key(B, BOOLEAN, "autoCreateTopicEnable", "auto_create_topic",
         "A send to an unknown topic creates it.", live=True),
    _key(B, BOOLEAN, "autoCreateSubscriptionGroup", "auto_create_group",
         "An unknown consumer group is created when it connects.", live=True),
    _key(B, BOOLEAN, "clusterTopicEnable", "cluster_topic_enable",
         "The topic named like the cluster exists."),
    _key(B, BOOLEAN, "brokerTopicEnable", "broker_topic_enable",
         "The topic named like the broker exists."),
    _key(B, BOOLEAN, "validateSystemTopicWhenUpdateTopic", "validate_system_topic",
         "Creating or changing a topic with a system name is refused.", live=True),
    _key(B, INTEGER, "maxTopicLength", "topic_length_max",
         "Bytes of a topic name that sends accept.", minimum=1, maximum=127, live=True),
    _key(B, INTEGER, "sluicePropertiesLengthMax", "properties_length_max",
         "Bytes of a message's properties. RocketMQ's format has 15 bits for it.",
         minimum=64, maximum=32767, live=True),
    _key(B, BOOLEAN, "traceTopicEnable", "trace_topic_enable",
         "The topic for message traces exists."),
    _key(B, TEXT, "msgTraceTopicName", "trace_topic_name",
         "Name of the topic for message traces."),
    _key(B, BOOLEAN, "traceOn", "trace_on",
         "What the broker answers to sends: clients trace or do not.", live=True),
    _key(B, TEXT, "regionId", "region",
         "Region that is stored in messages for traces.", live=True),
    _key(B, BOOLEAN, "enablePropertyFilter", "enable_property_filter",
         "SQL92 filters are allowed. **Differs from RocketMQ, where the default is false.**",
         live=True),
    _key(B, BOOLEAN, "longPollingEnable", "long_polling_enable",
         "A pull without messages waits for them as long as the consumer says.", live=True),
    _key(B, INTEGER, "shortPollingTimeMills", "short_polling_ms",
         "How long such a pull waits when longPollingEnable is false, in ms.",
         minimum=1, live=True),
    _key(B, BOOLEAN, "notifyConsumerIdsChangedEnable", "notify_consumer_changes",
         "Consumers hear at once when one joins or leaves their group.", live=True),
    _key(B, BOOLEAN, "useServerSideResetOffset", "server_side_reset",
         "Resetting offsets is done by the broker, not by the consumers.", live=True),
    _key(B, INTEGER, "flushConsumerOffsetInterval", "consumer_offset_flush_interval_ms",
         "Consumer offsets go to disk every so many ms.", minimum=100),
    _key(B, INTEGER, "registerNameServerPeriod", "register_period_ms",
         "The broker registers with its name servers every so many ms; taken as 10000 to 60000.",
         minimum=1),
    _key(B, INTEGER, "registerBrokerTimeoutMills", "register_timeout_ms",
         "How long it waits for their answer, in ms.", minimum=100),
    _key(B, INTEGER, "serverChannelMaxIdleTimeSeconds", "idle_timeout_s",
         "A connection without traffic is closed after so many seconds.",
         minimum=1, maximum=86_400),
    _key(B, INTEGER, "channelExpiredTimeout", "client_expiry_ms",
         "A client without a heartbeat is forgotten after so many ms.", minimum=1000),
    _key(B, CHOICE, "metricsExporterType", "metrics_enable",
         "PROM serves `/metrics`. **Differs from RocketMQ, where the default is DISABLE.**",
         choices=(("PROM", True), ("DISABLE", False))),
    _key(B, TEXT, "metricsPromExporterHost", "metrics_host",
         "Address of `/metrics`. Default: bindAddress."),
    _key(B, INTEGER, "metricsPromExporterPort", "metrics_port",
         "Port of `/metrics`. 0 takes a free port.", maximum=65535),
    _key(B, INTEGER, "sluiceConnectionsMax", "connections_max",
         "More connections are closed at once.", minimum=1),
    _key(B, INTEGER, "sluiceParkedPullsMax", "parked_pulls_max",
         "Pulls that may wait for messages at the same time; further ones are answered at once.",
         minimum=1),
    _key(B, INTEGER, "sluiceWriteBufferBytesMax", "write_buffer_bytes_max",
         "A connection that lets more answers pile up is not read until it takes them, in bytes.",
         minimum=65_536),
    _key(B, INTEGER, "sluiceBulkPullBytesMax", "bulk_pull_bytes_max",
         "Bytes of one answer to a bulk reader (Spark).",
         minimum=65_536, maximum=12 * 1024 * 1024, live=True),
    _key(B, PATH, "brokerConfigPath", "config_path",
         "File that changes at run time are written to. Default: the file of `-c`, or "
         "config/broker.properties in the store."),
)

_STORE_KEYS = (
    _key(S, PATH, "storePathRootDir", "root",
         "Directory of the store. Default: store in the home directory."),
    _key(S, PATH, "storePathCommitLog", "commit_log_path",
         "Directory of the commit log. Default: commitlog below storePathRootDir."),
    _key(S, PATH, "storePathConsumeQueue", "consume_queue_path",
         "Directory of the consume queues. Default: consumequeue below storePathRootDir. RocketMQ "
         "itself ignores this key.", aliases=("storePathConsumerQueue",)),
    _key(S, INTEGER, "mappedFileSizeCommitLog", "commit_log_file_bytes",
         "Size of a commit log file; that of existing files has to be the same.",
         minimum=65_536, maximum=INT_MAX, aliases=("mapedFileSizeCommitLog",)),
    _key(S, INTEGER, "mappedFileSizeConsumeQueue", "consume_queue_file_bytes",
         "Size of a consume queue file, rounded up to whole entries of 20 bytes.",
         minimum=20, maximum=GIB, aliases=("mapedFileSizeConsumeQueue",)),
    _key(S, CHOICE, "flushDiskType", "flush_sync",
         "SYNC_FLUSH answers a send after its message is on disk, ASYNC_FLUSH before.",
         choices=(("ASYNC_FLUSH", False), ("SYNC_FLUSH", True))),
    _key(S, INTEGER, "flushIntervalCommitLog", "flush_interval_ms",
         "ASYNC_FLUSH: the commit log goes to disk every so many ms.", minimum=1),
    _key(S, INTEGER, "flushCommitLogLeastPages", "flush_pages_min",
         "... when at least so many pages of 4 KiB are new.", maximum=1_000_000),
    _key(S, INTEGER, "flushCommitLogThoroughInterval", "flush_thorough_interval_ms",
         "... and after so many ms whatever the number of pages.", minimum=1),
    _key(S, INTEGER, "flushIntervalConsumeQueue", "consume_queue_flush_interval_ms",
         "Consume queues go to disk every so many ms.", minimum=1),
    _key(S, INTEGER, "flushConsumeQueueLeastPages", "consume_queue_flush_pages_min",
         "... when at least so many pages of 4 KiB are new.", maximum=1_000_000),
    _key(S, INTEGER, "flushConsumeQueueThoroughInterval",
         "consume_queue_flush_thorough_interval_ms",
         "... and after so many ms whatever the number of pages.", minimum=1),
    _key(S, INTEGER, "syncFlushTimeout", "sync_flush_timeout_ms",
         "SYNC_FLUSH: a send that waits longer is answered FLUSH_DISK_TIMEOUT, in ms.", minimum=1),
    _key(S, INTEGER, "maxMessageSize", "message_bytes_max",
         "Bytes of a message's body.", minimum=1, maximum=15 * 1024 * 1024),
    _key(S, BOOLEAN, "checkCRCOnRecover", "check_crc_on_recover",
         "Recovery checks the checksum of each body."),
    _key(S, INTEGER, "accessMessageInMemoryMaxRatio", "memory_ratio",
         "Share of the machine's memory, in percent, up to which the end of the log is taken to "
         "be in memory.", minimum=1, maximum=100),
    _key(S, INTEGER, "maxTransferBytesOnMessageInMemory", "max_transfer_bytes_memory",
         "Bytes of one pull's answer from memory.", minimum=1, maximum=12 * 1024 * 1024),
    _key(S, INTEGER, "maxTransferCountOnMessageInMemory", "max_transfer_count_memory",
         "Messages of one pull's answer from memory.", minimum=1, maximum=100_000),
    _key(S, INTEGER, "maxTransferBytesOnMessageInDisk", "max_transfer_bytes_disk",
         "Bytes of one pull's answer from disk.", minimum=1, maximum=12 * 1024 * 1024),
    _key(S, INTEGER, "maxTransferCountOnMessageInDisk", "max_transfer_count_disk",
         "Messages of one pull's answer from disk.", minimum=1, maximum=100_000),
    _key(S, BOOLEAN, "autoMessageVersionOnTopicLen", "version_by_topic_length",
         "Topics longer than 127 bytes (retry topics) are stored in records of version 2."),
    _key(S, INTEGER, "diskMaxUsedSpaceRatio", "disk_used_ratio_max",
         "Percent of the disk from which a warning is logged.", minimum=10, maximum=99),
    _key(S, INTEGER, "diskSpaceWarningLevelRatio", "disk_warning_ratio",
         "Percent of the disk from which sends are refused.", minimum=35, maximum=100),
    _key(S, INTEGER, "sluiceFilterScanUnitsMax", "filter_scan_units_max",
         "Entries of a consume queue that one filtered pull looks at.", minimum=1024),
)

_NAME_SERVER_KEYS = (
    _key(N, TEXT, "bindAddress", "bind_address",
         "Address to listen at; `sluice up` uses 127.0.0.1 unless this or --host says otherwise."),
    _key(N, INTEGER, "listenPort", "listen_port",
         "Port to listen at. 0 takes a free port.", maximum=65535),
    _key(N, PATH, "kvConfigPath", "kv_config_path",
         "File of the key-value configuration (order topics). "
         "Default: namesrv/kvConfig.json in the home directory."),
    _key(N, PATH, "configStorePath", "config_path",
         "File that changes at run time are written to. Default: the file of `-c`."),
    _key(N, INTEGER, "scanNotActiveBrokerInterval", "scan_interval_ms",
         "Every so many ms brokers that stopped registering are removed.", minimum=100),
    _key(N, BOOLEAN, "orderMessageEnable", "order_message_enable",
         "Routes carry the strict order configuration of a topic.", live=True),
    _key(N, BOOLEAN, "returnOrderTopicConfigToBroker", "return_order_config_to_broker",
         "Brokers get the order topics as the answer to their registration.", live=True),
    _key(N, BOOLEAN, "enableAllTopicList", "all_topic_list_enable",
         "The list of all topics (request 206) is given.", live=True),
    _key(N, BOOLEAN, "enableTopicList", "topic_list_enable",
         "The lists of a cluster's, and of unit topics (224, 311-313) are given.",
         live=True),
    _key(N, BOOLEAN, "supportActingMaster", "acting_master_support",
         "A slave may stand in for its master in routes, when brokers agree.", live=True),
    _key(N, BOOLEAN, "needWaitForService", "wait_for_service",
         "Routes are refused during the first waitSecondsForService.", live=True),
    _key(N, INTEGER, "waitSecondsForService", "wait_for_service_s",
         "See needWaitForService, in seconds.", maximum=86_400, live=True),
    _key(N, BOOLEAN, "deleteTopicWithBrokerRegistration", "delete_topic_with_registration",
         "A topic missing in a registration is removed. Dangerous with Java brokers, whose "
         "incremental registrations name only what changed.", live=True),
    _key(N, INTEGER, "serverChannelMaxIdleTimeSeconds", "idle_timeout_s",
         "A connection without traffic is closed after so many seconds.",
         minimum=1, maximum=86_400),
    _key(N, INTEGER, "sluiceConnectionsMax", "connections_max",
         "More connections are closed at once.", minimum=1),
    _key(N, BOOLEAN, "sluiceReachableAddresses", "reachable_addresses",
         "Addresses in routes that the client cannot reach are replaced; see below.", live=True),
    _key(N, LIST, "configBlackList", "config_black_list",
         "Keys that request 318 may not change."),
)
# fmt: on

KEYS: Final[tuple[Key, ...]] = (*_BROKER_KEYS, *_STORE_KEYS, *_NAME_SERVER_KEYS)


def keys_of(*parts: Part) -> tuple[Key, ...]:
    """The keys of some settings, in the order of the table."""
    return tuple(key for key in KEYS if key.part in parts)
