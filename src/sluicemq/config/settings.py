"""The settings of each server: one declaration a setting.

A field of a frozen dataclass is what the rest of the code reads: whole words, unit last. The same
line says RocketMQ's key for it, the range and the sentence of the page on configuration; loading,
changes at run time and the documentation follow from that (`KEYS`). A field without a key cannot be
set from a file. A change at run time makes a new value, nobody changes one.

*Live* keys can be changed in a running server (requests 25 and 318); the others take effect at its
next start. Keys that begin with `sluice` are ours alone. Names and ranges: spec/config.md; aliases
are spellings of older releases and of articles.
"""

import os
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, Final, Self

from sluicemq.config.keys import (
    BOOLEAN,
    HOST,
    INTEGER,
    NAME,
    PATH,
    SERVERS,
    Key,
    MeasuredConfig,
    Origin,
    Part,
    PushedConfig,
    setting,
)
from sluicemq.config.proxying import ProxyLimits
from sluicemq.config.replicas import ReplicaConfig
from sluicemq.errors import ConfigurationError
from sluicemq.model.addresses import NAME_SERVER_PORT
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.numbers import parse_duration_ms

GIB: Final = 1 << 30
CHANGES_FILE: Final = "sluice.properties"
"""Where changes at run time go without `-c`; read at the next start."""
CONSUME_QUEUE_UNIT_BYTES: Final = 20
INDEX_SLOTS: Final = 5_000_000
INDEX_ENTRIES_PER_SLOT: Final = 4
SMALL_LOG_FILE_BYTES: Final = 64 * 1024 * 1024
"""Log files below this size are those of tests: index files of 420 MB would be too much there."""

_DERIVED: Final = ("commit_log_path", "consume_queue_path", "index_slots", "index_entries")
"""Fields of the store that are filled in from others when they are empty."""

# ------------------------------------------------------------------------------ delay levels

DEFAULT_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_DELAY_MAX_MS: Final = 40 * 86_400_000


@lru_cache(maxsize=16)
def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delay of each level in milliseconds. Raises ConfigurationError.

    Like RocketMQ this accepts only whole numbers, and neither milliseconds nor an empty text.
    """
    levels = []
    for word in text.split():
        delay_ms = parse_duration_ms(word)
        if not isinstance(delay_ms, int) or word.endswith("ms"):
            raise _wrong(text, f"{word:.80} is not a duration")
        if delay_ms > _DELAY_MAX_MS:
            raise _wrong(text, f"{word} is more than 40 days")
        levels.append(delay_ms)
    if not levels:
        raise _wrong(text, "it has no level")
    return tuple(levels)


def _wrong(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"messageDelayLevel = {text} is not valid: {why}.",
        fix="Write whole numbers with s, m, h or d, separated by a blank, as in 1s 5s 10s 1m 2h.",
    )


def host_name() -> str:
    """The name of this machine, which names a broker that has no name."""
    return os.uname().nodename or "broker"


SUPERVISED: Final = "SLUICE_SUPERVISED"
"""Environment variable with which a supervisor says that it restarts the process when it ends."""


def is_supervised() -> bool:
    """Return whether a supervisor restarts this process when it ends (`SLUICE_SUPERVISED=1`).

    Set by `sluice up --brokers` and `--replicas` for their child processes, by the systemd units
    and by the image.
    """
    return os.environ.get(SUPERVISED) == "1"


def _under_home(*parts: str) -> str:
    return os.path.join(os.path.expanduser("~"), *parts)  # noqa: PTH111, PTH118 - text, not Path


# fmt: off
@dataclass(frozen=True, slots=True)
class BrokerConfig(ReplicaConfig):
    """The settings of a broker without its store."""

    broker_name: str = setting("brokerName", host_name,
        "Name of the broker; brokers of one name are master and slaves. Default: the name of the "
        "machine.", kind=NAME)
    cluster_name: str = setting("brokerClusterName", "DefaultCluster",
        "Cluster the broker belongs to.", kind=NAME)
    listen_port: int = setting("listenPort", 10911,
        "Port to listen at; the VIP port is two less. 0 takes a free port.", maximum=65_535)
    proxy_port: int | None = setting("grpcServerPort", None,
        "Port of the proxy for gRPC clients, where one is started; 0 takes a free port. Default: "
        "8081, and `sluice up` goes on without a proxy when that is taken.",
        kind=INTEGER, maximum=65_535)
    name_server_addresses: tuple[str, ...] = setting("namesrvAddr", (),
        "Name servers, `host:port;host:port`. Default: the variable NAMESRV_ADDR.", kind=SERVERS)
    broker_ip1: str | None = setting("brokerIP1", None,
        "Address that clients are told. When it is set, nothing is guessed and it is never "
        "replaced.", kind=HOST)
    broker_permission: int = setting("brokerPermission", 6,
        "Bits: 4 read, 2 write. 4 refuses sends, 2 refuses pulls.", maximum=7, live=True)
    default_topic_queues: int = setting("defaultTopicQueueNums", 8,
        "Queues of TBW102, which caps those of a topic that is created by its first send.",
        minimum=1, maximum=4096)
    auto_create_topic: bool = setting("autoCreateTopicEnable", True,
        "A send to an unknown topic creates it.", live=True)
    auto_create_group: bool = setting("autoCreateSubscriptionGroup", True,
        "An unknown consumer group is created when it connects.", live=True)
    cluster_topic_enable: bool = setting("clusterTopicEnable", True,
        "The topic named like the cluster exists.")
    broker_topic_enable: bool = setting("brokerTopicEnable", True,
        "The topic named like the broker exists.")
    validate_system_topic: bool = setting("validateSystemTopicWhenUpdateTopic", True,
        "Creating or changing a topic with a system name is refused.", live=True)
    topic_length_max: int = setting("maxTopicLength", 127,
        "Bytes of a topic name that sends accept.", minimum=1, maximum=127, live=True)
    properties_length_max: int = setting("sluicePropertiesLengthMax", 32767,
        "Bytes of a message's properties. RocketMQ's format has 15 bits for it.",
        minimum=64, maximum=32_767, live=True)
    exit_on_store_failure: bool = setting("exitOnFatalStoreError", is_supervised,
        "End the process with exit code 1 when an error of the disk, such as a failed fsync, makes "
        "the store refuse all writes until a restart. Default: true if `SLUICE_SUPERVISED=1` is in "
        "the environment, as `--replicas`, `--brokers`, the systemd units and the image set it; "
        "otherwise the broker stays and serves readers.", kind=BOOLEAN, live=True)
    slow_request_ms: int = setting("sluiceSlowRequestMs", 1000,
        "A request that takes longer is a line of the log (`sluicemq.slow`), in ms. 0: none.",
        live=True)
    trace_topic_enable: bool = setting("traceTopicEnable", False,
        "The topic for message traces exists.")
    trace_topic_name: str = setting("msgTraceTopicName", TRACE_TOPIC,
        "Name of the topic for message traces.", kind=NAME)
    trace_on: bool = setting("traceOn", True,
        "What the broker answers to sends: clients trace or do not.", live=True)
    region: str = setting("regionId", "DefaultRegion",
        "Region that is stored in messages for traces.", live=True)
    enable_property_filter: bool = setting("enablePropertyFilter", True,
        "SQL92 filters are allowed. **Differs from RocketMQ, where the default is false.**",
        live=True)
    filter_groups_expected: int = setting("expectConsumerNumUseFilter", 32,
        "For so many groups a Java broker lays out its filter bitmaps. Only what "
        "consumerFilter.json says of them depends on it.", minimum=1, maximum=100_000)
    filter_error_percent: int = setting("maxErrorRateOfBloomFilter", 20,
        "... and with so many percent of false positives.", minimum=1, maximum=99)
    filter_kept_ms: int = setting("filterDataCleanTimeSpan", 24 * 3600 * 1000,
        "The SQL92 expression of a group that is gone is kept so many ms.",
        minimum=1000, maximum=2**63 - 1)
    long_polling_enable: bool = setting("longPollingEnable", True,
        "A pull without messages waits for them as long as the consumer says.", live=True)
    short_polling_ms: int = setting("shortPollingTimeMills", 1000,
        "How long such a pull waits when longPollingEnable is false, in ms.", minimum=1, live=True)
    pop_polling_max: int = setting("popPollingSize", 1024,
        "More pops of a group than this that wait for one queue, or for any of the topic, are "
        "answered at once (209).", minimum=1, live=True)
    pop_polling_total_max: int = setting("maxPopPollingSize", 100_000,
        "... and more pops than this of all groups.", minimum=1, live=True)
    pop_retry_percent: int = setting("popFromRetryProbability", 20,
        "In so many percent of pops messages that come again go first; else last.",
        maximum=100, live=True)
    pop_retry_v2: bool = setting("enableRetryTopicV2", False,
        "Popped messages that come again do so by `%RETRY%group+topic`; false: by "
        "`%RETRY%group_topic`.", live=True)
    pop_retry_v1_read: bool = setting("retrieveMessageFromPopRetryTopicV1", True,
        "With enableRetryTopicV2 what is left in the other topic is read as well.", live=True)
    pop_actual_retry_topic: bool = setting("popResponseReturnActualRetryTopic", False,
        "Messages that come again show their retry topic instead of the one they were sent to.",
        live=True)
    pop_from_first_when_near: bool = setting("initPopOffsetByCheckMsgInMem", True,
        "A group that pops for the first time, from the newest message on, begins with the first "
        "one after all where the whole queue is likely in memory.", live=True)
    pop_in_flight_limited: bool = setting("enablePopMessageThreshold", False,
        "A queue gives a group nothing while too much of it is popped and not acknowledged.",
        live=True)
    pop_in_flight_max: int = setting("popInflightMessageThreshold", 10_000,
        "... which is more messages than this.", live=True)
    clear_pop_retries: bool = setting("clearRetryTopicWhenDeleteTopic", True,
        "With a topic goes what of it was to come again to groups that pop.", live=True)
    notify_consumer_changes: bool = setting("notifyConsumerIdsChangedEnable", True,
        "Consumers hear at once when one joins or leaves their group.", live=True)
    server_balances: bool = setting("serverLoadBalancerEnable", True,
        "Consumers that do not balance by themselves (clientRebalance=false) get shares; false "
        "gives all queues to each.", live=True)
    request_mode: str = setting("defaultMessageRequestMode", "PULL",
        "How they read where request 401 has not said it.", choices=("PULL", "POP"), live=True)
    pop_share_queues: int = setting("defaultPopShareQueueNum", -1,
        "... by POP: each has its own queues and those of so many members after it; 0 and less: "
        "all.", minimum=-1, live=True)
    route_period_ms: int = setting("loadBalancePollNameServerInterval", 30_000,
        "For so many ms the queues of a topic are those that a name server told.",
        minimum=1, live=True)
    server_side_reset: bool = setting("useServerSideResetOffset", True,
        "Resetting offsets is done by the broker, not by the consumers.", live=True)
    store_replies: bool = setting("storeReplyMessageEnable", True,
        "Replies to requests are stored in CLUSTER_REPLY_TOPIC besides being pushed.", live=True)
    recall_enable: bool = setting("recallMessageEnable", False,
        "Timed messages may be taken back by their recall handle (request 370).", live=True)
    recall_when_read_only: bool = setting("allowRecallWhenBrokerNotWriteable", True,
        "... also when brokerPermission allows no sends.", live=True)
    reject_transactions: bool = setting("rejectTransactionMessage", False,
        "Messages of transactions are refused.", live=True)
    transaction_timeout_ms: int = setting("transactionTimeOut", 6000,
        "A transaction that is undecided for so many ms is checked: a client of its producer "
        "group is asked. A message may say its own time (CHECK_IMMUNITY_TIME_IN_SECONDS).",
        aliases=("transactionMsgTimeout", "transactionTimeout",), live=True)
    transaction_check_interval_ms: int = setting("transactionCheckInterval", 30_000,
        "... and again every so many ms.", minimum=100, live=True)
    transaction_check_max: int = setting("transactionCheckMax", 15,
        "After so many checks a transaction is given up; its message goes to "
        "TRANS_CHECK_MAX_TIME_TOPIC. Checks without a client to ask do not count, unlike "
        "RocketMQ's.", live=True)
    transactions_open_max: int = setting("sluiceTransactionsOpenMax", 250_000,
        "More undecided transactions are refused; each takes about 600 bytes of memory.",
        minimum=1, live=True)
    consumer_offset_flush_interval_ms: int = setting("flushConsumerOffsetInterval", 5000,
        "Consumer offsets go to disk every so many ms.", minimum=100)
    register_period_ms: int = setting("registerNameServerPeriod", 30_000,
        "The broker registers with its name servers every so many ms; taken as 10000 to 60000.",
        minimum=1)
    register_timeout_ms: int = setting("registerBrokerTimeoutMills", 24_000,
        "How long it waits for their answer, in ms.", minimum=100)
    client_expiry_ms: int = setting("channelExpiredTimeout", 120_000,
        "A client without a heartbeat is forgotten after so many ms.", minimum=1000)
    pending_bytes_max: int = setting("sluicePendingBytesMax", 256 * 1024 * 1024,
        "Bytes of incomplete frames of all connections; with access control, connections without "
        "an allowed request share a quarter. The connection that exceeds it is closed.",
        minimum=33_554_432)
    client_bytes_max: int = setting("sluiceClientBytesMax", 16 * 1024 * 1024,
        "About how many bytes the groups and subscriptions of one connection may take in memory; "
        "1,000 topics with 10 tags each take 3 MB. A heartbeat above it is refused.",
        minimum=1024 * 1024, live=True)
    clients_bytes_max: int = setting("sluiceClientsBytesMax", 256 * 1024 * 1024,
        "The same of all connections together.", minimum=1024 * 1024, live=True)
    auto_topics_max: int = setting("sluiceAutoTopicsMax", 50_000,
        "No topic is created by a send or a consumer when there are so many.",
        minimum=1, live=True)
    auto_groups_max: int = setting("sluiceAutoGroupsMax", 50_000,
        "No group is created by a consumer when there are so many.", minimum=1, live=True)
    parked_pulls_max: int = setting("sluiceParkedPullsMax", 100_000,
        "Pulls that may wait for messages at the same time; further ones are answered at once.",
        minimum=1)
    write_buffer_bytes_max: int = setting("sluiceWriteBufferBytesMax", 4 * 1024 * 1024,
        "A connection that lets more answers pile up is not read until it takes them, in bytes.",
        minimum=65_536)
    bulk_pull_bytes_max: int = setting("sluiceBulkPullBytesMax", 8 * 1024 * 1024,
        "Bytes of one answer to a bulk reader (Spark).",
        minimum=65_536, maximum=12_582_912, live=True)
    config_path: str = setting("brokerConfigPath", "",
        "File that changes at run time are written to. Default: the file of `-c`; without one "
        "config/sluice.properties in the store, which is then read at the start.", kind=PATH)
    inner_credentials: str = setting("innerClientAuthenticationCredentials", "",
        'How the broker signs its requests to name servers: `{"accessKey":"…","secretKey":"…"}`, '
        "an admin account of theirs. Shown to nobody.", is_secret=True)
    tls_dials: str = setting("useTLS", "auto",
        "The broker speaks TLS to name servers; `auto`: when tls.server.mode is enforcing.",
        choices=("auto", "true", "false"), aliases=("tls.enable",))
    tls_auth_server: bool = setting("tls.client.authServer", False,
        "It verifies their certificates, by tls.client.trustCertPath.")
    tls_client_ca: str = setting("tls.client.trustCertPath", "",
        "PEM file with the authorities that sign them. Default: those of the system.", kind=PATH)
    tls_client_certificate: str = setting("tls.client.certPath", "",
        "PEM file with the certificate that it shows to name servers.", kind=PATH)
    tls_client_key: str = setting("tls.client.keyPath", "",
        "PEM file with the private key of it.", kind=PATH)
    tls_client_key_password: str = setting("tls.client.keyPassword", "",
        "Password of that key. Shown to nobody.", is_secret=True)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The settings of the message store. Empty paths are filled in below `root`."""

    root: str = setting("storePathRootDir", partial(_under_home, "store"),
        "Directory of the store. Default: store in the home directory.", kind=PATH)
    commit_log_path: str = setting("storePathCommitLog", "",
        "Directory of the commit log. Default: commitlog below storePathRootDir.", kind=PATH)
    consume_queue_path: str = setting("storePathConsumeQueue", "",
        "Directory of the consume queues. Default: consumequeue below storePathRootDir. RocketMQ "
        "itself ignores this key.", kind=PATH, aliases=("storePathConsumerQueue",))
    commit_log_file_bytes: int = setting("mappedFileSizeCommitLog", 1 << 30,
        "Size of a commit log file; that of existing files has to be the same.",
        minimum=65_536, aliases=("mapedFileSizeCommitLog",))
    consume_queue_file_bytes: int = setting("mappedFileSizeConsumeQueue", 6_000_000,
        "Size of a consume queue file, rounded up to whole entries of 20 bytes.",
        minimum=20, maximum=GIB, aliases=("mapedFileSizeConsumeQueue",))
    flush_sync: bool = setting("flushDiskType", False,
        "SYNC_FLUSH answers a send after its message is on disk, ASYNC_FLUSH before.",
        choices={"ASYNC_FLUSH": False, "SYNC_FLUSH": True})
    flush_interval_ms: int = setting("flushIntervalCommitLog", 500,
        "ASYNC_FLUSH: the commit log goes to disk every so many ms.", minimum=1)
    flush_pages_min: int = setting("flushCommitLogLeastPages", 4,
        "... when at least so many pages of 4 KiB are new.", maximum=1_000_000)
    flush_thorough_interval_ms: int = setting("flushCommitLogThoroughInterval", 10_000,
        "... and after so many ms whatever the number of pages.", minimum=1)
    consume_queue_flush_interval_ms: int = setting("flushIntervalConsumeQueue", 1000,
        "Consume queues go to disk every so many ms.", minimum=1)
    consume_queue_flush_pages_min: int = setting("flushConsumeQueueLeastPages", 2,
        "... when at least so many pages of 4 KiB are new.", maximum=1_000_000)
    consume_queue_flush_thorough_interval_ms: int = setting(
        "flushConsumeQueueThoroughInterval", 60_000,
        "... and after so many ms whatever the number of pages.", minimum=1)
    sync_flush_timeout_ms: int = setting("syncFlushTimeout", 5000,
        "SYNC_FLUSH: a send that waits longer is answered FLUSH_DISK_TIMEOUT, in ms.", minimum=1)
    message_bytes_max: int = setting("maxMessageSize", 4 * 1024 * 1024,
        "Bytes of a message's body.", minimum=1, maximum=15_728_640)
    check_crc_on_recover: bool = setting("checkCRCOnRecover", True,
        "Recovery checks the checksum of each body.")
    checksum_property: bool = setting("enabledAppendPropCRC", False,
        "Each message is stored with a checksum of its whole record, as its last property "
        "`__CRC32#`; takes time.")
    checksum_property_required: bool = setting("forceVerifyPropCRC", False,
        "Recovery checks that checksum instead of the body's, and takes a record without it for a "
        "torn one: set it only when every message of the store was written with "
        "enabledAppendPropCRC, which has to be true too.")
    memory_ratio: int = setting("accessMessageInMemoryMaxRatio", 40,
        "Share of the machine's memory, in percent, up to which the end of the log is taken to be "
        "in memory; 0: none of it.", maximum=100)
    max_transfer_bytes_memory: int = setting("maxTransferBytesOnMessageInMemory", 262_144,
        "Bytes of one pull's answer from memory.", minimum=1, maximum=12_582_912)
    max_transfer_count_memory: int = setting("maxTransferCountOnMessageInMemory", 32,
        "Messages of one pull's answer from memory.", minimum=1, maximum=100_000)
    max_transfer_bytes_disk: int = setting("maxTransferBytesOnMessageInDisk", 65_536,
        "Bytes of one pull's answer from disk.", minimum=1, maximum=12_582_912)
    max_transfer_count_disk: int = setting("maxTransferCountOnMessageInDisk", 8,
        "Messages of one pull's answer from disk.", minimum=1, maximum=100_000)
    pull_count_max: int = setting("sluicePullCountMax", 256,
        "The most messages of one pull's answer from memory to a SluiceMQ client, which announces "
        "itself by the field sluiceAnySpan. Other clients never get more than "
        "maxTransferCountOnMessageInMemory. The larger of the two limits applies to SluiceMQ "
        "clients; 0 applies that limit to them too.", maximum=256)
    version_by_topic_length: bool = setting("autoMessageVersionOnTopicLen", True,
        "Topics longer than 127 bytes (retry topics) are stored in records of version 2.")
    index_enable: bool = setting("messageIndexEnable", True,
        "Messages can be found by their keys.")
    index_slots: int = setting("maxHashSlotNum", 0,
        "Hash slots of an index file. Default: 5000000; with log files below 64 MiB one for each "
        "200 bytes of them.")
    index_entries: int = setting("maxIndexNum", 0,
        "Entries of an index file, which has 40 + 4 x maxHashSlotNum + 20 x maxIndexNum bytes. "
        "Default: four for each slot, that is 20000000.")
    query_count: int = setting("defaultQueryMaxNum", 32,
        "Messages of one answer to a query by unique key.", minimum=1, live=True)
    query_count_max: int = setting("maxMsgsNumBatch", 64,
        "Messages of one answer to a query by key, whatever the client asks for.",
        minimum=1, live=True)
    file_reserved_hours: int = setting("fileReservedTime", 72,
        "Hours that a commit log file is kept after it was last written.", live=True)
    delete_hours: tuple[str, ...] = setting("deleteWhen", ("04",),
        "Hours of the day, local time, in which files older than fileReservedTime are deleted: "
        "04, or 04;16.", live=True)
    disk_used_ratio_max: int = setting("diskMaxUsedSpaceRatio", 75,
        "Percent of the disk above which files older than fileReservedTime are deleted at any "
        "hour; taken as 10 to 95.", maximum=100, live=True, taken_as=(10, 95))
    disk_forced_ratio: int = setting("diskSpaceCleanForciblyRatio", 85,
        "Percent of the disk above which the oldest files are deleted whatever their age; taken "
        "as 30 to 85. Also `rocketmq.broker.diskSpaceCleanForciblyRatio = 0.85`, here or with -D "
        "in the variable JAVA_OPT.", maximum=100, live=True, taken_as=(30, 85))
    disk_warning_ratio: int = setting("diskSpaceWarningLevelRatio", 90,
        "Percent of the disk above which sends are refused; taken as 35 to 90. Also "
        "`rocketmq.broker.diskSpaceWarningLevelRatio = 0.90`, here or with -D in the variable "
        "JAVA_OPT.", maximum=100, live=True, taken_as=(35, 90))
    clean_forcibly: bool = setting("cleanFileForciblyEnable", True,
        "Files may be deleted before their time when the disk is too full.", live=True)
    clean_interval_ms: int = setting("cleanResourceInterval", 10_000,
        "The broker looks for files to delete every so many ms.", minimum=100, live=True)
    delete_files_max: int = setting("deleteFileBatchMax", 10,
        "Commit log files that are deleted at most each time.", minimum=1, live=True)
    delete_file_interval_ms: int = setting("deleteCommitLogFilesInterval", 100,
        "Pause between two of them, in ms.", live=True)
    delete_queue_file_interval_ms: int = setting("deleteConsumeQueueFilesInterval", 100,
        "Pause between the deletions of consume queue files, in ms.", live=True)
    retention_warning_percent: int = setting("sluiceRetentionWarningPercent", 80,
        "Percent of fileReservedTime from which consumer groups are warned of what they have not "
        "read.", minimum=1, maximum=100, live=True)
    filter_scan_units_max: int = setting("sluiceFilterScanUnitsMax", 1_000_000,
        "Entries of a consume queue that one filtered pull looks at.", minimum=1024)
    columns_mode: str = setting("sluicePropertyColumns", "auto",
        "Property columns, which make SQL92 filters and filtered lag fast: `auto` makes those of "
        "a topic once somebody filters it by properties, `always` of every topic, `off` of none.",
        choices=("auto", "always", "off"))
    columns_max: int = setting("sluicePropertyColumnsMax", 64,
        "Properties of 65,536 messages that become columns, the most frequent ones; the others "
        "are read from the log when a filter asks for them.", minimum=1, maximum=1024)
    columns_disk_percent: int = setting("sluicePropertyColumnsDiskPercent", 10,
        "Bytes that columns may take on disk, in percent of the messages they are of; the largest "
        "columns are left out.", minimum=1, maximum=100)
    columns_memory_bytes: int = setting("sluicePropertyColumnsMemoryBytes", 256 * 1024 * 1024,
        "Bytes of columns that are kept in memory.", minimum=1_048_576)
    delay_levels: str = setting("messageDelayLevel", DEFAULT_LEVELS,
        "What each delay level means, level 1 first: whole numbers with s, m, h or d. A higher "
        "level than the last is taken as the last.")
    delay_offset_flush_interval_ms: int = setting("flushDelayOffsetInterval", 10_000,
        "Interval at which the progress of the delay levels is saved, in ms. What was delivered "
        "since is found in the log after a crash.", minimum=100)
    timer_enable: bool = setting("timerWheelEnable", True,
        "Messages may be delivered at any time (timed messages). `false` refuses new ones; those "
        "that wait are delivered all the same.", live=True)
    timer_delay_max_s: int = setting("timerMaxDelaySec", 259_200,
        "Timed messages that are due later than in so many seconds are refused.", live=True)
    timer_precision_ms: int = setting("timerPrecisionMs", 1000,
        "Width of a slot of the timer wheel in ms. Delivery is precise to the ms whatever it is.",
        minimum=100, maximum=60_000)
    timer_roll_window_slots: int = setting("timerRollWindowSlot", 172_800,
        "Timed messages that are due later than in so many slots are stored again on the way.",
        minimum=2, maximum=604_740)
    timer_slot_messages_max: int = setting("timerCongestNumEachSlot", 2**31 - 1,
        "More timed messages in one slot are refused.", minimum=1, live=True)
    timer_flush_interval_ms: int = setting("timerFlushIntervalMs", 1000,
        "Timer wheel and log go to disk every so many ms.", minimum=100)
    timer_log_file_bytes: int = setting("mappedFileSizeTimerLog", 100 * 1024 * 1024,
        "Size of a timer log file; that of existing files has to be the same.",
        minimum=4096, aliases=("mapedFileSizeTimerLog",))
    origin: Origin = field(default=Origin(), compare=False, repr=False)

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delay of level 1, 2, …"""
        return parse_delay_levels(self.delay_levels)

    def changed(self, **changes: Any) -> Self:
        """With other settings; what was not given but follows from them follows anew."""
        unset: dict[str, Any] = {
            name: type(getattr(self, name))() for name in _DERIVED if name not in changes
        }
        derived = replace(self, **unset)
        follows = {
            name: empty
            for name, empty in unset.items()
            if getattr(derived, name) == getattr(self, name)
        }
        return replace(self, **follows, **changes)

    def __post_init__(self) -> None:
        root = self.root.rstrip("/") or "/"
        unit = CONSUME_QUEUE_UNIT_BYTES
        put = object.__setattr__
        put(self, "root", root)
        parse_delay_levels(self.delay_levels)
        if "," in self.commit_log_path:
            raise ConfigurationError(
                f"storePathCommitLog={self.commit_log_path} names several directories.",
                fix="Name one: a log over several paths is not supported.",
            )
        if self.checksum_property_required and not self.checksum_property:
            raise ConfigurationError(
                "forceVerifyPropCRC = true without enabledAppendPropCRC = true: a recovery would"
                " throw away every message that is stored from now on.",
                fix="Set enabledAppendPropCRC = true too.",
            )
        put(self, "commit_log_path", self.commit_log_path or f"{root}/commitlog")
        put(self, "consume_queue_path", self.consume_queue_path or f"{root}/consumequeue")
        # Rounded up to whole units, as the real one does (spec/config.md).
        put(self, "consume_queue_file_bytes", -(-self.consume_queue_file_bytes // unit) * unit)
        if not self.index_slots:
            log_bytes = self.commit_log_file_bytes
            small = max(log_bytes // 200, 100)
            put(self, "index_slots", small if log_bytes < SMALL_LOG_FILE_BYTES else INDEX_SLOTS)
        if not self.index_entries:
            put(self, "index_entries", INDEX_ENTRIES_PER_SLOT * self.index_slots)
        for key in keys_of(Part.STORE):
            if key.taken_as is not None:
                low, high = key.taken_as
                put(self, key.field, min(max(getattr(self, key.field), low), high))
        for hour in self.delete_hours:
            if not (hour.isascii() and hour.isdigit() and int(hour) < 24):
                raise ConfigurationError(
                    f"deleteWhen = {';'.join(self.delete_hours)} is not valid: {hour} is no hour.",
                    fix="Write hours from 00 to 23, separated by ; as in 04;16.",
                )


@dataclass(frozen=True, slots=True)
class NameServerConfig(MeasuredConfig):
    """The settings of a name server."""

    listen_port: int = setting("listenPort", NAME_SERVER_PORT,
        "Port to listen at. 0 takes a free port.", maximum=65_535)
    metrics_enable: bool = setting("metricsExporterType", True,
        "PROM serves the probes `/health` and `/ready`; a name server has no metrics. In "
        "`sluice up` the broker's setting counts.", choices={"PROM": True, "DISABLE": False})
    metrics_host: str = setting("metricsPromExporterHost", "",
        "Address of the probes. Default: bindAddress; 127.0.0.1 in protected mode.", kind=HOST)
    metrics_port: int = setting("metricsPromExporterPort", 5556,
        "Port of the probes, not that of a broker on the same machine. 0 takes a free port.",
        maximum=65_535)
    kv_config_path: str = setting("kvConfigPath", partial(_under_home, "namesrv", "kvConfig.json"),
        "File of the key-value configuration (order topics). Default: namesrv/kvConfig.json in "
        "the home directory.", kind=PATH)
    config_path: str = setting("configStorePath", partial(_under_home, "namesrv", CHANGES_FILE),
        "File that changes at run time are written to. Default: the file of `-c`; without one "
        "namesrv/sluice.properties in the home directory, which is then read at the start.",
        kind=PATH)
    scan_interval_ms: int = setting("scanNotActiveBrokerInterval", 5000,
        "Every so many ms brokers that stopped registering are removed.", minimum=100)
    order_message_enable: bool = setting("orderMessageEnable", False,
        "Routes carry the strict order configuration of a topic.", live=True)
    return_order_config_to_broker: bool = setting("returnOrderTopicConfigToBroker", True,
        "Brokers get the order topics as the answer to their registration.", live=True)
    all_topic_list_enable: bool = setting("enableAllTopicList", True,
        "The list of all topics (request 206) is given.", live=True)
    topic_list_enable: bool = setting("enableTopicList", True,
        "The lists of a cluster's, and of unit topics (224, 311-313) are given.", live=True)
    acting_master_support: bool = setting("supportActingMaster", False,
        "A slave may stand in for its master in routes, when brokers agree.", live=True)
    notify_smallest_id: bool = setting("notifyMinBrokerIdChanged", False,
        "The replicas of a broker are told when the smallest id of those that live changes "
        "(request 905).", live=True)
    wait_for_service: bool = setting("needWaitForService", False,
        "Routes are refused during the first waitSecondsForService.", live=True)
    wait_for_service_s: int = setting("waitSecondsForService", 45,
        "See needWaitForService, in seconds.", maximum=86_400, live=True)
    delete_topic_with_registration: bool = setting("deleteTopicWithBrokerRegistration", False,
        "A topic missing in a registration is removed. Dangerous with Java brokers, whose "
        "incremental registrations name only what changed.", live=True)
    acl_enable: bool = setting("aclEnable", False,
        "Access control here too, by the same rules; brokers then sign their registration "
        "(innerClientAuthenticationCredentials). RocketMQ's name server has none.")
    acl_files: tuple[str, ...] = setting("plainAclFile", (),
        "The file of accounts and permissions; of several the first that is there. Default: "
        "`plain_acl.yml` beside the file of `-c`, else in `$ROCKETMQ_HOME/conf`, else beside "
        "kvConfigPath.")
    registration_bytes_max: int = setting("sluiceRegistrationBytesMax", 32 * 1024 * 1024,
        "The most bytes of a broker's registration after decompression. 100,000 topics with names "
        "of 127 characters and attributes take 20 MB, with usual names 5 MB.",
        minimum=1024 * 1024, live=True)
    registered_topics_max: int = setting("sluiceRegisteredTopicsMax", 1_000_000,
        "The most topics of all brokers together; a topic that two brokers serve counts twice. "
        "Each takes about 600 bytes. A registration above the limit is refused.", minimum=1000)
    reachable_addresses: bool = setting("sluiceReachableAddresses", True,
        "Addresses in routes that the client cannot reach are replaced; see below.", live=True)
    config_black_list: tuple[str, ...] = setting(
        "configBlackList", ("configBlackList", "configStorePath", "kvConfigPath"),
        "Keys that request 318 may not change.")


@dataclass(frozen=True, slots=True)
class ProxyConfig(PushedConfig, ProxyLimits):
    """The settings of a proxy that stands alone."""

    listen_port: int = setting("grpcServerPort", 8081, "Port. 0 takes a free one.", maximum=65_535)
    name_server_addresses: tuple[str, ...] = setting("namesrvAddr", (),
        "Name servers, `host:port;host:port`. Default: as for client commands.", kind=SERVERS)
    cluster: str | None = setting("rocketMQClusterName", None,
        "Settings of groups are asked of the brokers of this cluster. Default: of all.", kind=NAME)
    mode: str = setting("proxyMode", "CLUSTER",
        "The proxy in a broker's process is `sluice broker --enable-proxy`.", choices=("CLUSTER",))
# fmt: on


_CONFIGS: Final = BrokerConfig, StoreConfig, NameServerConfig, ProxyConfig


def _declared() -> Iterator[Key]:
    """Those of a class before those that it shares."""
    for part, config in zip(Part, _CONFIGS, strict=True):
        own: list[Field[Any]] = [item for item in fields(config) if "key" in item.metadata]
        base = {item.name for one in config.__bases__ if one is not object for item in fields(one)}
        for item in sorted(own, key=lambda item: item.name in base):
            yield item.metadata["key"]._replace(part=part, field=item.name)


KEYS: Final = tuple(_declared())


def keys_of(*parts: Part) -> tuple[Key, ...]:
    """The keys of some settings, in the order of the table."""
    return tuple(key for key in KEYS if key.part in parts)
