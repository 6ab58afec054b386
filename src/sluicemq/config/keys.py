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
    NAME = "letters, digits and _ - . %"
    HOST = "address or host name"
    SERVERS = "host:port, separated by ;"
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
    is_secret: bool = False
    """Shown to nobody: request 26 answers it empty."""


def _key(part: Part, kind: Kind, name: str, field: str, doc: str, **rest: object) -> Key:
    return Key(part, name, field, kind, doc)._replace(**rest)  # type: ignore[arg-type]


def _words(*words: str) -> tuple[tuple[str, object], ...]:
    return tuple((word, word) for word in words)


B, S, N = Part.BROKER, Part.STORE, Part.NAME_SERVER
BOOLEAN, INTEGER, TEXT, PATH = Kind.BOOLEAN, Kind.INTEGER, Kind.TEXT, Kind.PATH
LIST, CHOICE = Kind.LIST, Kind.CHOICE
NAME, HOST, SERVERS = Kind.NAME, Kind.HOST, Kind.SERVERS

_BIND_ADDRESS: Final = (
    "Address to listen at. Default: every one, in protected mode; `sluice up` uses 127.0.0.1 "
    "unless this or --host says otherwise."
)
_PROTECTED_MODE: Final = (
    "Without bindAddress (or --host), aclEnable and mutual TLS (tls.server.mode = enforcing, "
    "tls.server.need.client.auth = require) only clients on this machine are served, see "
    "[security](security.md)."
)

_COMPATIBLE: Final = (
    "plain_acl.yml means what it means to RocketMQ 5, see [security](security.md). Without it what "
    "RocketMQ reads in silence as something else than it says refuses the file."
)

# fmt: off
_BROKER_KEYS = (
    _key(B, NAME, "brokerName", "broker_name",
         "Name of the broker; brokers of one name are master and slaves. Default: the name of the "
         "machine."),
    _key(B, NAME, "brokerClusterName", "cluster_name",
         "Cluster the broker belongs to."),
    _key(B, INTEGER, "brokerId", "broker_id",
         "0 is the master. Slaves are not built yet.", maximum=0),
    _key(B, CHOICE, "brokerRole", "broker_role",
         "Replication is not built yet: SYNC_MASTER waits for no slave, as a warning says at the "
         "start; SLAVE is refused.",
         choices=_words("ASYNC_MASTER", "SYNC_MASTER")),
    _key(B, HOST, "bindAddress", "bind_address", _BIND_ADDRESS),
    _key(B, BOOLEAN, "sluiceProtectedMode", "protected_mode", _PROTECTED_MODE),
    _key(B, INTEGER, "listenPort", "listen_port",
         "Port to listen at; the VIP port is two less. 0 takes a free port.", maximum=65535),
    _key(B, SERVERS, "namesrvAddr", "name_server_addresses",
         "Name servers, `host:port;host:port`. Default: the variable NAMESRV_ADDR."),
    _key(B, HOST, "brokerIP1", "broker_ip1",
         "Address that clients are told. When it is set, nothing is guessed and it is never "
         "replaced."),
    _key(B, HOST, "brokerIP2", "broker_ip2",
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
    _key(B, NAME, "msgTraceTopicName", "trace_topic_name",
         "Name of the topic for message traces."),
    _key(B, BOOLEAN, "traceOn", "trace_on",
         "What the broker answers to sends: clients trace or do not.", live=True),
    _key(B, TEXT, "regionId", "region",
         "Region that is stored in messages for traces.", live=True),
    _key(B, BOOLEAN, "enablePropertyFilter", "enable_property_filter",
         "SQL92 filters are allowed. **Differs from RocketMQ, where the default is false.**",
         live=True),
    _key(B, INTEGER, "expectConsumerNumUseFilter", "filter_groups_expected",
         "For so many groups a Java broker lays out its filter bitmaps. Only what "
         "consumerFilter.json says of them depends on it.", minimum=1, maximum=100_000),
    _key(B, INTEGER, "maxErrorRateOfBloomFilter", "filter_error_percent",
         "... and with so many percent of false positives.", minimum=1, maximum=99),
    _key(B, INTEGER, "filterDataCleanTimeSpan", "filter_kept_ms",
         "The SQL92 expression of a group that is gone is kept so many ms.", minimum=1000,
         maximum=2**63 - 1),
    _key(B, BOOLEAN, "longPollingEnable", "long_polling_enable",
         "A pull without messages waits for them as long as the consumer says.", live=True),
    _key(B, INTEGER, "shortPollingTimeMills", "short_polling_ms",
         "How long such a pull waits when longPollingEnable is false, in ms.",
         minimum=1, live=True),
    _key(B, BOOLEAN, "notifyConsumerIdsChangedEnable", "notify_consumer_changes",
         "Consumers hear at once when one joins or leaves their group.", live=True),
    _key(B, BOOLEAN, "useServerSideResetOffset", "server_side_reset",
         "Resetting offsets is done by the broker, not by the consumers.", live=True),
    _key(B, BOOLEAN, "storeReplyMessageEnable", "store_replies",
         "Replies to requests are stored in CLUSTER_REPLY_TOPIC besides being pushed.", live=True),
    _key(B, BOOLEAN, "recallMessageEnable", "recall_enable",
         "Timed messages may be taken back by their recall handle (request 370).", live=True),
    _key(B, BOOLEAN, "allowRecallWhenBrokerNotWriteable", "recall_when_read_only",
         "... also when brokerPermission allows no sends.", live=True),
    _key(B, BOOLEAN, "rejectTransactionMessage", "reject_transactions",
         "Messages of transactions are refused.", live=True),
    _key(B, INTEGER, "transactionTimeOut", "transaction_timeout_ms",
         "A transaction that is undecided for so many ms is checked: a client of its producer "
         "group is asked. A message may say its own time (CHECK_IMMUNITY_TIME_IN_SECONDS).",
         live=True, aliases=("transactionMsgTimeout", "transactionTimeout")),
    _key(B, INTEGER, "transactionCheckInterval", "transaction_check_interval_ms",
         "... and again every so many ms.", minimum=100, live=True),
    _key(B, INTEGER, "transactionCheckMax", "transaction_check_max",
         "After so many checks a transaction is given up; its message goes to "
         "TRANS_CHECK_MAX_TIME_TOPIC. Checks without a client to ask do not count, unlike "
         "RocketMQ's.", live=True),
    _key(B, INTEGER, "sluiceTransactionsOpenMax", "transactions_open_max",
         "More undecided transactions are refused; each takes about 600 bytes of memory.",
         minimum=1, live=True),
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
    _key(B, HOST, "metricsPromExporterHost", "metrics_host",
         "Address of `/metrics`. Default: bindAddress; 127.0.0.1 in protected mode."),
    _key(B, INTEGER, "metricsPromExporterPort", "metrics_port",
         "Port of `/metrics`. 0 takes a free port.", maximum=65535),
    _key(B, INTEGER, "sluiceConnectionsMax", "connections_max",
         "More connections are closed at once.", minimum=1),
    _key(B, INTEGER, "sluiceConnectionsPerAddressMax", "connections_per_address_max",
         "More connections of one address are closed at once; 0 is no limit. Loopback has none."),
    _key(B, INTEGER, "sluiceFrameTimeoutSeconds", "frame_timeout_s",
         "A connection whose frame is not complete after so many seconds is closed.",
         minimum=1, maximum=86_400),
    _key(B, INTEGER, "sluicePendingBytesMax", "pending_bytes_max",
         "Bytes of incomplete frames of all connections; with access control, connections without "
         "an allowed request share a quarter. The connection that exceeds it is closed.",
         minimum=32 * 1024 * 1024),
    _key(B, INTEGER, "sluiceAutoTopicsMax", "auto_topics_max",
         "No topic is created by a send or a consumer when there are so many.", minimum=1,
         live=True),
    _key(B, INTEGER, "sluiceAutoGroupsMax", "auto_groups_max",
         "No group is created by a consumer when there are so many.", minimum=1, live=True),
    _key(B, INTEGER, "sluiceParkedPullsMax", "parked_pulls_max",
         "Pulls that may wait for messages at the same time; further ones are answered at once.",
         minimum=1),
    _key(B, INTEGER, "sluiceWriteBufferBytesMax", "write_buffer_bytes_max",
         "A connection that lets more answers pile up is not read until it takes them, in bytes.",
         minimum=65_536),
    _key(B, INTEGER, "sluiceBulkPullBytesMax", "bulk_pull_bytes_max",
         "Bytes of one answer to a bulk reader (Spark).",
         minimum=65_536, maximum=12 * 1024 * 1024, live=True),
    _key(B, BOOLEAN, "aclEnable", "acl_enable",
         "Access control: every request needs an account of plain_acl.yml, see "
         "[security](security.md)."),
    _key(B, LIST, "plainAclFile", "acl_files",
         "The file of accounts and permissions; of several the first that is there. Default: "
         "`plain_acl.yml` beside the file of `-c`, "
         "else in `$ROCKETMQ_HOME/conf`, else in `conf` below storePathRootDir."),
    _key(B, BOOLEAN, "sluiceAclCompatible", "acl_compatible", _COMPATIBLE),
    _key(B, TEXT, "innerClientAuthenticationCredentials", "inner_credentials",
         'How the broker signs its requests to name servers: `{"accessKey":"…","secretKey":"…"}`, '
         "an admin account of theirs. Shown to nobody.", is_secret=True),
    _key(B, PATH, "brokerConfigPath", "config_path",
         "File that changes at run time are written to. Default: the file of `-c`; without one "
         "config/sluice.properties in the store, which is then read at the start."),
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
    _key(S, BOOLEAN, "enabledAppendPropCRC", "checksum_property",
         "Each message is stored with a checksum of its whole record, as its last property "
         "`__CRC32#`; takes time."),
    _key(S, BOOLEAN, "forceVerifyPropCRC", "checksum_property_required",
         "Recovery checks that checksum instead of the body's, and takes a record without it for "
         "a torn one: set it only when every message of the store was written with "
         "enabledAppendPropCRC, which has to be true too."),
    _key(S, INTEGER, "accessMessageInMemoryMaxRatio", "memory_ratio",
         "Share of the machine's memory, in percent, up to which the end of the log is taken to "
         "be in memory; 0: none of it.", minimum=0, maximum=100),
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
    _key(S, BOOLEAN, "messageIndexEnable", "index_enable",
         "Messages can be found by their keys."),
    _key(S, INTEGER, "maxHashSlotNum", "index_slots",
         "Hash slots of an index file. Default: 5000000; with log files below 64 MiB one for each "
         "200 bytes of them."),
    _key(S, INTEGER, "maxIndexNum", "index_entries",
         "Entries of an index file, which has 40 + 4 x maxHashSlotNum + 20 x maxIndexNum bytes. "
         "Default: four for each slot, that is 20000000."),
    _key(S, INTEGER, "defaultQueryMaxNum", "query_count",
         "Messages of one answer to a query by unique key.", minimum=1, live=True),
    _key(S, INTEGER, "maxMsgsNumBatch", "query_count_max",
         "Messages of one answer to a query by key, whatever the client asks for.",
         minimum=1, live=True),
    _key(S, INTEGER, "fileReservedTime", "file_reserved_hours",
         "Hours that a commit log file is kept after it was last written.", live=True),
    _key(S, LIST, "deleteWhen", "delete_hours",
         "Hours of the day, local time, in which files older than fileReservedTime are deleted: "
         "04, or 04;16.", live=True),
    _key(S, INTEGER, "diskMaxUsedSpaceRatio", "disk_used_ratio_max",
         "Percent of the disk above which files older than fileReservedTime are deleted at any "
         "hour; taken as 10 to 95.", maximum=100, live=True),
    _key(S, INTEGER, "diskSpaceCleanForciblyRatio", "disk_forced_ratio",
         "Percent of the disk above which the oldest files are deleted whatever their age; taken "
         "as 30 to 85. Also `rocketmq.broker.diskSpaceCleanForciblyRatio = 0.85`, here or with -D "
         "in the variable JAVA_OPT.", maximum=100, live=True),
    _key(S, INTEGER, "diskSpaceWarningLevelRatio", "disk_warning_ratio",
         "Percent of the disk above which sends are refused; taken as 35 to 90. Also "
         "`rocketmq.broker.diskSpaceWarningLevelRatio = 0.90`, here or with -D in the variable "
         "JAVA_OPT.", maximum=100, live=True),
    _key(S, BOOLEAN, "cleanFileForciblyEnable", "clean_forcibly",
         "Files may be deleted before their time when the disk is too full.", live=True),
    _key(S, INTEGER, "cleanResourceInterval", "clean_interval_ms",
         "The broker looks for files to delete every so many ms.", minimum=100, live=True),
    _key(S, INTEGER, "deleteFileBatchMax", "delete_files_max",
         "Commit log files that are deleted at most each time.", minimum=1, live=True),
    _key(S, INTEGER, "deleteCommitLogFilesInterval", "delete_file_interval_ms",
         "Pause between two of them, in ms.", live=True),
    _key(S, INTEGER, "deleteConsumeQueueFilesInterval", "delete_queue_file_interval_ms",
         "Pause between the deletions of consume queue files, in ms.", live=True),
    _key(S, INTEGER, "sluiceRetentionWarningPercent", "retention_warning_percent",
         "Percent of fileReservedTime from which consumer groups are warned of what they have "
         "not read.", minimum=1, maximum=100, live=True),
    _key(S, INTEGER, "sluiceFilterScanUnitsMax", "filter_scan_units_max",
         "Entries of a consume queue that one filtered pull looks at.", minimum=1024),
    _key(S, CHOICE, "sluicePropertyColumns", "columns_mode",
         "Property columns, which make SQL92 filters and filtered lag fast: `auto` makes those of "
         "a topic once somebody filters it by properties, `always` of every topic, `off` of none.",
         choices=_words("auto", "always", "off")),
    _key(S, INTEGER, "sluicePropertyColumnsMax", "columns_max",
         "Properties of 65,536 messages that become columns, the most frequent ones; the others "
         "are read from the log when a filter asks for them.", minimum=1, maximum=1024),
    _key(S, INTEGER, "sluicePropertyColumnsDiskPercent", "columns_disk_percent",
         "Bytes that columns may take on disk, in percent of the messages they are of; the largest "
         "columns are left out.", minimum=1, maximum=100),
    _key(S, INTEGER, "sluicePropertyColumnsMemoryBytes", "columns_memory_bytes",
         "Bytes of columns that are kept in memory.", minimum=1 << 20),
    _key(S, TEXT, "messageDelayLevel", "delay_levels",
         "What each delay level means, level 1 first: whole numbers with s, m, h or d. A higher "
         "level than the last is taken as the last."),
    _key(S, INTEGER, "flushDelayOffsetInterval", "delay_offset_flush_interval_ms",
         "How far delayed messages are delivered goes to disk every so many ms; what was delivered "
         "since comes again after a crash.", minimum=100),
    _key(S, BOOLEAN, "timerWheelEnable", "timer_enable",
         "Messages may be delivered at any time (timed messages). `false` refuses new ones; those "
         "that wait are delivered all the same.", live=True),
    _key(S, INTEGER, "timerMaxDelaySec", "timer_delay_max_s",
         "Timed messages that are due later than in so many seconds are refused.", live=True),
    _key(S, INTEGER, "timerPrecisionMs", "timer_precision_ms",
         "Width of a slot of the timer wheel in ms. Delivery is precise to the ms whatever it is.",
         minimum=100, maximum=60_000),
    _key(S, INTEGER, "timerRollWindowSlot", "timer_roll_window_slots",
         "Timed messages that are due later than in so many slots are stored again on the way.",
         minimum=2, maximum=7 * 86_400 - 60),
    _key(S, INTEGER, "timerCongestNumEachSlot", "timer_slot_messages_max",
         "More timed messages in one slot are refused.", minimum=1, live=True),
    _key(S, INTEGER, "timerFlushIntervalMs", "timer_flush_interval_ms",
         "Timer wheel and log go to disk every so many ms.", minimum=100),
    _key(S, INTEGER, "mappedFileSizeTimerLog", "timer_log_file_bytes",
         "Size of a timer log file; that of existing files has to be the same.",
         minimum=4096, aliases=("mapedFileSizeTimerLog",)),
)

_NAME_SERVER_KEYS = (
    _key(N, HOST, "bindAddress", "bind_address", _BIND_ADDRESS),
    _key(N, BOOLEAN, "sluiceProtectedMode", "protected_mode", _PROTECTED_MODE),
    _key(N, INTEGER, "listenPort", "listen_port",
         "Port to listen at. 0 takes a free port.", maximum=65535),
    _key(N, PATH, "kvConfigPath", "kv_config_path",
         "File of the key-value configuration (order topics). "
         "Default: namesrv/kvConfig.json in the home directory."),
    _key(N, PATH, "configStorePath", "config_path",
         "File that changes at run time are written to. Default: the file of `-c`; without one "
         "namesrv/sluice.properties in the home directory, which is then read at the start."),
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
    _key(N, INTEGER, "sluiceConnectionsPerAddressMax", "connections_per_address_max",
         "More connections of one address are closed at once; 0 is no limit. Loopback has none."),
    _key(N, INTEGER, "sluiceFrameTimeoutSeconds", "frame_timeout_s",
         "A connection whose frame is not complete after so many seconds is closed.",
         minimum=1, maximum=86_400),
    _key(N, BOOLEAN, "sluiceReachableAddresses", "reachable_addresses",
         "Addresses in routes that the client cannot reach are replaced; see below.", live=True),
    _key(N, BOOLEAN, "aclEnable", "acl_enable",
         "Access control here too, by the same rules; brokers then sign their registration "
         "(innerClientAuthenticationCredentials). RocketMQ's name server has none."),
    _key(N, LIST, "plainAclFile", "acl_files",
         "The file of accounts and permissions; of several the first that is there. Default: "
         "`plain_acl.yml` beside the file of `-c`, "
         "else in `$ROCKETMQ_HOME/conf`, else beside kvConfigPath."),
    _key(N, BOOLEAN, "sluiceAclCompatible", "acl_compatible", _COMPATIBLE),
    _key(N, LIST, "configBlackList", "config_black_list",
         "Keys that request 318 may not change."),
)


def _tls_keys(part: Part) -> tuple[Key, ...]:
    """RocketMQ takes these as system properties of Java, most of them from tls.config.file too."""
    return (
        _key(part, CHOICE, "tls.server.mode", "tls_mode",
             "`permissive` serves TLS and plain connections on the same port, `enforcing` closes "
             "plain ones, `disabled` those that speak TLS.",
             choices=_words("permissive", "enforcing", "disabled")),
        _key(part, PATH, "tls.server.certPath", "tls_certificate",
             "PEM file with the certificate and intermediate ones. Read again when it changes."),
        _key(part, PATH, "tls.server.keyPath", "tls_key",
             "PEM file with its private key. Default: the file of the certificate."),
        _key(part, TEXT, "tls.server.keyPassword", "tls_key_password",
             "Password of that key. Shown to nobody.", is_secret=True),
        _key(part, CHOICE, "tls.server.need.client.auth", "tls_client_auth",
             "`require` lets in clients with a certificate only (mutual TLS), `optional` verifies "
             "those that show one. Both need tls.server.trustCertPath, unlike RocketMQ's.",
             choices=_words("none", "optional", "require")),
        _key(part, BOOLEAN, "tls.server.authClient", "tls_auth_client",
             "RocketMQ verifies certificates of clients only with this; here they always are."),
        _key(part, PATH, "tls.server.trustCertPath", "tls_ca",
             "PEM file with the authorities that sign certificates of clients."),
        _key(part, BOOLEAN, "tls.test.mode.enable", "tls_test_mode",
             "Without a certificate one is made when the first client speaks TLS; nobody can "
             "verify it. RocketMQ ignores the certificate in this mode, here it is used."),
        _key(part, PATH, "tls.config.file", "tls_config_file",
             "Properties file with these keys, which wins over this one. Default: "
             "/etc/rocketmq/tls.properties, if it is there."),
    )


_BROKER_TLS_KEYS = (
    *_tls_keys(B),
    _key(B, CHOICE, "useTLS", "tls_dials",
         "The broker speaks TLS to name servers; `auto`: when tls.server.mode is enforcing.",
         aliases=("tls.enable",), choices=_words("auto", "true", "false")),
    _key(B, BOOLEAN, "tls.client.authServer", "tls_auth_server",
         "It verifies their certificates, by tls.client.trustCertPath."),
    _key(B, PATH, "tls.client.trustCertPath", "tls_client_ca",
         "PEM file with the authorities that sign them. Default: those of the system."),
    _key(B, PATH, "tls.client.certPath", "tls_client_certificate",
         "PEM file with the certificate that it shows to name servers."),
    _key(B, PATH, "tls.client.keyPath", "tls_client_key",
         "PEM file with the private key of it."),
    _key(B, TEXT, "tls.client.keyPassword", "tls_client_key_password",
         "Password of that key. Shown to nobody.", is_secret=True),
)
# fmt: on

KEYS: Final[tuple[Key, ...]] = (
    *_BROKER_KEYS,
    *_BROKER_TLS_KEYS,
    *_STORE_KEYS,
    *_NAME_SERVER_KEYS,
    *_tls_keys(N),
)


def keys_of(*parts: Part) -> tuple[Key, ...]:
    """The keys of some settings, in the order of the table."""
    return tuple(key for key in KEYS if key.part in parts)
