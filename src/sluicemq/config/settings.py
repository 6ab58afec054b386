"""The settings of each server. Each setting is declared once, as a field of a frozen dataclass.

The code reads the field. The declaration also has RocketMQ's key for it, the range, and the text of
the page on configuration. `KEYS` collects the declarations, and loading, changes at run time and
the documentation use it. A field without a key cannot be set from a file. A change at run time
creates a new object.

*Live* keys can be changed while the server runs (UPDATE_BROKER_CONFIG, 25, and
UPDATE_NAMESRV_CONFIG, 318). Changes of other keys take effect when the server starts again. Keys
with the prefix `sluice` exist only in SluiceMQ. Names and ranges are those of RocketMQ
(spec/config.md). Aliases are spellings in older releases and in articles.
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
"""The file for changes at run time if there is no `-c`. It is read at the next start."""
CONSUME_QUEUE_UNIT_BYTES: Final = 20
INDEX_SLOTS: Final = 5_000_000
INDEX_ENTRIES_PER_SLOT: Final = 4
SMALL_LOG_FILE_BYTES: Final = 64 * 1024 * 1024
"""Only tests have smaller commit log files. Index files of 420 MB would be too large for them."""

_DERIVED: Final = ("commit_log_path", "consume_queue_path", "index_slots", "index_entries")
"""Fields of `StoreConfig` that are derived from other fields if they are empty."""

# ------------------------------------------------------------------------------ delay levels

DEFAULT_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_DELAY_MAX_MS: Final = 40 * 86_400_000


@lru_cache(maxsize=16)
def parse_delay_levels(levels_text: str) -> tuple[int, ...]:
    """Return the delay of each level in milliseconds, in order.

    `"1s 5m"` becomes (1000, 300000). The delays are whole numbers with the unit s, m, h or d.

    Raises ConfigurationError if a delay has another form (as `500ms`) or is more than 40 days, or
    if the text has no level. RocketMQ does not accept these either.
    """
    levels = []
    for delay_text in levels_text.split():
        delay_ms = parse_duration_ms(delay_text)
        if not isinstance(delay_ms, int) or delay_text.endswith("ms"):
            is_unit_missing = delay_text.isascii() and delay_text.isdigit()
            fault = "has no unit" if is_unit_missing else "is not a valid delay"
            raise _invalid_levels(levels_text, f"{delay_text:.80} {fault}")
        if delay_ms > _DELAY_MAX_MS:
            raise _invalid_levels(levels_text, f"{delay_text} is more than 40 days")
        levels.append(delay_ms)
    if not levels:
        raise _invalid_levels(levels_text, "it has no level")
    return tuple(levels)


def _invalid_levels(levels_text: str, reason: str) -> ConfigurationError:
    """Return the error for an invalid value of `messageDelayLevel`. `reason` is a phrase."""
    return ConfigurationError(
        f"messageDelayLevel = {levels_text} is not valid: {reason}.",
        fix="Write whole numbers, each followed by s, m, h or d, separated by spaces, as in "
        "1s 5s 10s 1m 2h.",
    )


def _default_index_slots(commit_log_file_bytes: int) -> int:
    """Return the number of slots of an index file that is not configured.

    It is INDEX_SLOTS, or less if the files of the commit log are small, as in tests.
    """
    if commit_log_file_bytes < SMALL_LOG_FILE_BYTES:
        return max(commit_log_file_bytes // 200, 100)
    return INDEX_SLOTS


def host_name() -> str:
    """Return the host name of this machine, which is the default name of a broker."""
    return os.uname().nodename or "broker"


SUPERVISED: Final = "SLUICE_SUPERVISED"
"""The environment variable that tells a process that a supervisor restarts it when it ends."""


def is_supervised() -> bool:
    """Return whether a supervisor restarts this process when it ends (`SLUICE_SUPERVISED=1`).

    Set by `sluice up --brokers` and `--replicas` for their child processes, by the systemd units
    and by the image.
    """
    return os.environ.get(SUPERVISED) == "1"


def _under_home(*parts: str) -> str:
    """Return a path in the home directory of the user."""
    return os.path.join(os.path.expanduser("~"), *parts)  # noqa: PTH111, PTH118 - text, not Path


# fmt: off
@dataclass(frozen=True, slots=True)
class BrokerConfig(ReplicaConfig):
    """The settings of a broker, except those of its store."""

    broker_name: str = setting("brokerName", host_name,
        "Name of the broker. Brokers with the same name are one master and its slaves. Default: "
        "the host name of the machine.", kind=NAME)
    cluster_name: str = setting("brokerClusterName", "DefaultCluster",
        "Name of the cluster that the broker belongs to.", kind=NAME)
    listen_port: int = setting("listenPort", 10911,
        "Port to listen on. The VIP port is two less. 0 takes a free port.", maximum=65_535)
    proxy_port: int | None = setting("grpcServerPort", None,
        "Port of the gRPC proxy in the broker's process, if one is started. 0 takes a free port. "
        "Default: 8081; if that port is taken, `sluice up` continues without a proxy.",
        kind=INTEGER, maximum=65_535)
    name_server_addresses: tuple[str, ...] = setting("namesrvAddr", (),
        "Name servers, `host:port;host:port`. Default: the environment variable NAMESRV_ADDR.",
        kind=SERVERS)
    broker_ip1: str | None = setting("brokerIP1", None,
        "Address that the broker advertises to clients. If it is set, the broker does not look "
        "for an address, and name servers never replace it.", kind=HOST)
    broker_permission: int = setting("brokerPermission", 6,
        "Bits: 4 allows reading, 2 allows writing. 4 alone refuses sends, 2 alone refuses pulls.",
        maximum=7, live=True)
    default_topic_queues: int = setting("defaultTopicQueueNums", 8,
        "Maximum number of queues of a topic that is created by its first send. The client asks "
        "for a number, by default 4. RocketMQ keeps the maximum as the queues of the topic TBW102.",
        minimum=1, maximum=4096)
    auto_create_topic: bool = setting("autoCreateTopicEnable", True,
        "Sending to an unknown topic creates it.", live=True)
    auto_create_group: bool = setting("autoCreateSubscriptionGroup", True,
        "An unknown consumer group is created when its first member connects.", live=True)
    cluster_topic_enable: bool = setting("clusterTopicEnable", True,
        "The broker has a topic with the name of its cluster.")
    broker_topic_enable: bool = setting("brokerTopicEnable", True,
        "The broker has a topic with its own name.")
    validate_system_topic: bool = setting("validateSystemTopicWhenUpdateTopic", True,
        "Creating or changing a topic with the name of a system topic is refused.", live=True)
    topic_length_max: int = setting("maxTopicLength", 127,
        "Maximum length of the name of a topic in sends, in bytes.",
        minimum=1, maximum=127, live=True)
    properties_length_max: int = setting("sluicePropertiesLengthMax", 32767,
        "Maximum size of the properties of a message, in bytes. RocketMQ's format stores the size "
        "in 15 bits.",
        minimum=64, maximum=32_767, live=True)
    exit_on_store_failure: bool = setting("exitOnFatalStoreError", is_supervised,
        "End the process with exit code 1 if a disk error, such as a failed fsync, makes the "
        "store refuse all writes until a restart. Default: true if `SLUICE_SUPERVISED=1` is in "
        "the environment, as set by `--replicas`, `--brokers`, the systemd units and the image. "
        "Otherwise the broker keeps running and serves readers.", kind=BOOLEAN, live=True)
    slow_request_ms: int = setting("sluiceSlowRequestMs", 1000,
        "Requests that take longer than this, in ms, are logged (logger `sluicemq.slow`). 0 turns "
        "this off.",
        live=True)
    trace_topic_enable: bool = setting("traceTopicEnable", False,
        "The broker has the topic for message traces.")
    trace_topic_name: str = setting("msgTraceTopicName", TRACE_TOPIC,
        "Name of the topic for message traces.", kind=NAME)
    trace_on: bool = setting("traceOn", True,
        "Responses to sends tell clients whether to write traces.", live=True)
    region: str = setting("regionId", "DefaultRegion",
        "Region that is stored in messages for traces.", live=True)
    enable_property_filter: bool = setting("enablePropertyFilter", True,
        "SQL92 filters are allowed. **Differs from RocketMQ, where the default is false.**",
        live=True)
    filter_groups_expected: int = setting("expectConsumerNumUseFilter", 32,
        "Number of groups for which RocketMQ's brokers dimension their filter bitmaps. It affects "
        "only what the broker writes to consumerFilter.json.", minimum=1, maximum=100_000)
    filter_error_percent: int = setting("maxErrorRateOfBloomFilter", 20,
        "Percentage of false positives for which RocketMQ's brokers dimension their filter "
        "bitmaps. It affects only what the broker writes to consumerFilter.json.",
        minimum=1, maximum=99)
    filter_kept_ms: int = setting("filterDataCleanTimeSpan", 24 * 3600 * 1000,
        "Time for which the SQL92 expression of a group is kept after the group is gone, in ms.",
        minimum=1000, maximum=2**63 - 1)
    long_polling_enable: bool = setting("longPollingEnable", True,
        "A pull that finds no messages waits for them for as long as the consumer requests.",
        live=True)
    short_polling_ms: int = setting("shortPollingTimeMills", 1000,
        "Time for which a pull that finds no messages waits if longPollingEnable is false, in ms.",
        minimum=1, live=True)
    pop_polling_max: int = setting("popPollingSize", 1024,
        "Maximum number of pops of one group that wait for one queue, or for any queue of one "
        "topic. Further pops get the response POLLING_FULL (209) at once.", minimum=1, live=True)
    pop_polling_total_max: int = setting("maxPopPollingSize", 100_000,
        "Maximum number of waiting pops of all groups together. Further pops get the response "
        "POLLING_FULL (209) at once.", minimum=1, live=True)
    pop_retry_percent: int = setting("popFromRetryProbability", 20,
        "Percentage of pops that read retries before other messages. The other pops read retries "
        "last.",
        maximum=100, live=True)
    pop_retry_v2: bool = setting("enableRetryTopicV2", False,
        "The retry topic for POP is `%RETRY%group+topic`. If false, it is `%RETRY%group_topic`.",
        live=True)
    pop_retry_v1_read: bool = setting("retrieveMessageFromPopRetryTopicV1", True,
        "With enableRetryTopicV2, messages that are left in `%RETRY%group_topic` are read too.",
        live=True)
    pop_actual_retry_topic: bool = setting("popResponseReturnActualRetryTopic", False,
        "Popped retries show their retry topic. If false, they show the topic to which they were "
        "sent.",
        live=True)
    pop_from_first_when_near: bool = setting("initPopOffsetByCheckMsgInMem", True,
        "A new group that is to begin at the newest message of a queue begins at the first one "
        "instead, if the whole queue is probably in memory.", live=True)
    pop_in_flight_limited: bool = setting("enablePopMessageThreshold", False,
        "A group gets no more messages of a queue while too many are in flight "
        "(popInflightMessageThreshold).",
        live=True)
    pop_in_flight_max: int = setting("popInflightMessageThreshold", 10_000,
        "Maximum number of messages in flight in one queue for one group, if "
        "enablePopMessageThreshold is true.", live=True)
    clear_pop_retries: bool = setting("clearRetryTopicWhenDeleteTopic", True,
        "Deleting a topic also deletes the retry topics of its messages for groups that pop.",
        live=True)
    notify_consumer_changes: bool = setting("notifyConsumerIdsChangedEnable", True,
        "Consumers are notified at once when a member joins or leaves their group.", live=True)
    server_balances: bool = setting("serverLoadBalancerEnable", True,
        "The broker distributes queues to consumers that do not balance themselves "
        "(clientRebalance=false). If false, each of them gets all queues.", live=True)
    request_mode: str = setting("defaultMessageRequestMode", "PULL",
        "How consumers that do not balance themselves read, unless SET_MESSAGE_REQUEST_MODE (401) "
        "has set a mode for their topic and group.", choices=("PULL", "POP"), live=True)
    pop_share_queues: int = setting("defaultPopShareQueueNum", -1,
        "With POP, each of these consumers reads its own queues and those of as many members "
        "after it. 0 or less means the queues of all members.", minimum=-1, live=True)
    route_period_ms: int = setting("loadBalancePollNameServerInterval", 30_000,
        "Time for which the broker uses the queues of a topic that a name server has returned, in "
        "ms.",
        minimum=1, live=True)
    server_side_reset: bool = setting("useServerSideResetOffset", True,
        "The broker itself resets offsets, instead of asking the consumers to do so.", live=True)
    store_replies: bool = setting("storeReplyMessageEnable", True,
        "Replies to requests are stored in CLUSTER_REPLY_TOPIC, in addition to being pushed.",
        live=True)
    recall_enable: bool = setting("recallMessageEnable", False,
        "Timed messages can be recalled by their recall handle (RECALL_MESSAGE, 370).", live=True)
    recall_when_read_only: bool = setting("allowRecallWhenBrokerNotWriteable", True,
        "Timed messages can be recalled even if brokerPermission does not allow sends.", live=True)
    reject_transactions: bool = setting("rejectTransactionMessage", False,
        "Transactions are refused.", live=True)
    transaction_timeout_ms: int = setting("transactionTimeOut", 6000,
        "Age at which an undecided transaction is first checked, in ms: the broker asks a client "
        "of its producer group for the outcome. A message can set its own time "
        "(CHECK_IMMUNITY_TIME_IN_SECONDS).",
        aliases=("transactionMsgTimeout", "transactionTimeout",), live=True)
    transaction_check_interval_ms: int = setting("transactionCheckInterval", 30_000,
        "Interval between two checks of a transaction, in ms.", minimum=100, live=True)
    transaction_check_max: int = setting("transactionCheckMax", 15,
        "Maximum number of checks of a transaction. After that its message is moved to "
        "TRANS_CHECK_MAX_TIME_TOPIC. Unlike in RocketMQ, a check counts only if there is a client "
        "to ask.", live=True)
    transactions_open_max: int = setting("sluiceTransactionsOpenMax", 250_000,
        "Maximum number of undecided transactions. Further ones are refused. Each takes about 600 "
        "bytes of memory.",
        minimum=1, live=True)
    consumer_offset_flush_interval_ms: int = setting("flushConsumerOffsetInterval", 5000,
        "Interval at which committed offsets are saved, in ms.", minimum=100)
    register_period_ms: int = setting("registerNameServerPeriod", 30_000,
        "Interval at which the broker registers with its name servers, in ms. Values outside of "
        "10000 to 60000 are taken as the nearest of these.",
        minimum=1)
    client_expiry_ms: int = setting("channelExpiredTimeout", 120_000,
        "Time after which a client without a heartbeat is removed, in ms.", minimum=1000)
    pending_bytes_max: int = setting("sluicePendingBytesMax", 256 * 1024 * 1024,
        "Maximum size of incomplete frames of all connections together, in bytes. With access "
        "control, connections that have not had an allowed request share a quarter of it. The "
        "connection that exceeds the limit is closed.",
        minimum=33_554_432)
    client_bytes_max: int = setting("sluiceClientBytesMax", 16 * 1024 * 1024,
        "Approximate maximum memory for the groups and subscriptions of one connection, in bytes. "
        "1,000 topics with 10 tags each take 3 MB. A heartbeat that exceeds the limit is refused.",
        minimum=1024 * 1024, live=True)
    clients_bytes_max: int = setting("sluiceClientsBytesMax", 256 * 1024 * 1024,
        "Approximate maximum memory for the groups and subscriptions of all connections together, "
        "in bytes.", minimum=1024 * 1024, live=True)
    auto_topics_max: int = setting("sluiceAutoTopicsMax", 50_000,
        "Sends and consumers create no topic if the broker already has this number of topics.",
        minimum=1, live=True)
    auto_groups_max: int = setting("sluiceAutoGroupsMax", 50_000,
        "Consumers create no group if the broker already has this number of groups.",
        minimum=1, live=True)
    parked_pulls_max: int = setting("sluiceParkedPullsMax", 100_000,
        "Maximum number of pulls that wait for messages at the same time. Further pulls get a "
        "response at once.",
        minimum=1)
    write_buffer_bytes_max: int = setting("sluiceWriteBufferBytesMax", 4 * 1024 * 1024,
        "Maximum size of the responses that one connection has not received yet, in bytes. Above "
        "it the broker reads no further requests from the connection until it has received some.",
        minimum=65_536)
    bulk_pull_bytes_max: int = setting("sluiceBulkPullBytesMax", 8 * 1024 * 1024,
        "Maximum size of one response to a bulk reader (Spark), in bytes.",
        minimum=65_536, maximum=12_582_912, live=True)
    config_path: str = setting("brokerConfigPath", "",
        "File to which changes at run time are written. Default: the file given by `-c`. Without "
        "one it is config/sluice.properties in the store, which is then read at the start.",
        kind=PATH)
    inner_credentials: str = setting("innerClientAuthenticationCredentials", "",
        "Account with which the broker signs its requests to name servers: "
        '`{"accessKey":"…","secretKey":"…"}`. It must be an admin account of the name servers. '
        "Never shown.", is_secret=True)
    tls_dials: str = setting("useTLS", "auto",
        "The broker uses TLS to connect to name servers. `auto` means: if tls.server.mode is "
        "enforcing.",
        choices=("auto", "true", "false"), aliases=("tls.enable",))
    tls_auth_server: bool = setting("tls.client.authServer", False,
        "The broker verifies the certificates of name servers (tls.client.trustCertPath).")
    tls_client_ca: str = setting("tls.client.trustCertPath", "",
        "PEM file with the authorities that sign the certificates of name servers. Default: the "
        "authorities of the system.", kind=PATH)
    tls_client_certificate: str = setting("tls.client.certPath", "",
        "PEM file with the certificate that the broker presents to name servers.", kind=PATH)
    tls_client_key: str = setting("tls.client.keyPath", "",
        "PEM file with the private key for tls.client.certPath.", kind=PATH)
    tls_client_key_password: str = setting("tls.client.keyPassword", "",
        "Password of tls.client.keyPath. Never shown.", is_secret=True)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The settings of a store. Empty paths are replaced by paths below `root`."""

    root: str = setting("storePathRootDir", partial(_under_home, "store"),
        "Directory of the store. Default: store in the home directory.", kind=PATH)
    commit_log_path: str = setting("storePathCommitLog", "",
        "Directory of the commit log. Default: commitlog below storePathRootDir.", kind=PATH)
    consume_queue_path: str = setting("storePathConsumeQueue", "",
        "Directory of the consume queues. Default: consumequeue below storePathRootDir. RocketMQ "
        "ignores this key.", kind=PATH, aliases=("storePathConsumerQueue",))
    commit_log_file_bytes: int = setting("mappedFileSizeCommitLog", 1 << 30,
        "Size of a commit log file, in bytes. Existing files must have the same size.",
        minimum=65_536, aliases=("mapedFileSizeCommitLog",))
    consume_queue_file_bytes: int = setting("mappedFileSizeConsumeQueue", 6_000_000,
        "Size of a consume queue file, in bytes, rounded up to whole units of 20 bytes.",
        minimum=20, maximum=GIB, aliases=("mapedFileSizeConsumeQueue",))
    flush_sync: bool = setting("flushDiskType", False,
        "SYNC_FLUSH responds to a send after its message is on disk, ASYNC_FLUSH before.",
        choices={"ASYNC_FLUSH": False, "SYNC_FLUSH": True})
    flush_interval_ms: int = setting("flushIntervalCommitLog", 500,
        "ASYNC_FLUSH: interval at which the commit log is synced to disk, in ms, if at least "
        "flushCommitLogLeastPages are new.", minimum=1)
    flush_pages_min: int = setting("flushCommitLogLeastPages", 4,
        "ASYNC_FLUSH: minimum number of new pages of 4 KiB for which the commit log is synced "
        "after flushIntervalCommitLog.", maximum=1_000_000)
    flush_thorough_interval_ms: int = setting("flushCommitLogThoroughInterval", 10_000,
        "ASYNC_FLUSH: interval after which the commit log is synced to disk whatever the number "
        "of new pages, in ms.", minimum=1)
    consume_queue_flush_interval_ms: int = setting("flushIntervalConsumeQueue", 1000,
        "Interval at which consume queues are synced to disk, in ms, if at least "
        "flushConsumeQueueLeastPages are new.", minimum=1)
    consume_queue_flush_pages_min: int = setting("flushConsumeQueueLeastPages", 2,
        "Minimum number of new pages of 4 KiB for which consume queues are synced after "
        "flushIntervalConsumeQueue.", maximum=1_000_000)
    consume_queue_flush_thorough_interval_ms: int = setting(
        "flushConsumeQueueThoroughInterval", 60_000,
        "Interval after which consume queues are synced to disk whatever the number of new pages, "
        "in ms.", minimum=1)
    sync_flush_timeout_ms: int = setting("syncFlushTimeout", 5000,
        "SYNC_FLUSH: maximum time that a send waits for the disk, in ms. After that the response "
        "is FLUSH_DISK_TIMEOUT.", minimum=1)
    message_bytes_max: int = setting("maxMessageSize", 4 * 1024 * 1024,
        "Maximum size of the body of a message, in bytes.", minimum=1, maximum=15_728_640)
    check_crc_on_recover: bool = setting("checkCRCOnRecover", True,
        "Recovery verifies the checksum of each body.")
    checksum_property: bool = setting("enabledAppendPropCRC", False,
        "Each message is stored with a checksum of its whole record, in its last property "
        "`__CRC32#`. This takes time.")
    checksum_property_required: bool = setting("forceVerifyPropCRC", False,
        "Recovery verifies the checksum of `enabledAppendPropCRC` instead of that of the body, "
        "and treats a record without it as torn. Set it only if every message of the store was "
        "written with enabledAppendPropCRC, which must also be true.")
    memory_ratio: int = setting("accessMessageInMemoryMaxRatio", 40,
        "The broker assumes that the end of the commit log is in memory, up to this percentage of "
        "the memory of the machine. 0 means that nothing is in memory.", maximum=100)
    max_transfer_bytes_memory: int = setting("maxTransferBytesOnMessageInMemory", 262_144,
        "Maximum size of the response to a pull that is served from memory, in bytes.",
        minimum=1, maximum=12_582_912)
    max_transfer_count_memory: int = setting("maxTransferCountOnMessageInMemory", 32,
        "Maximum number of messages in the response to a pull that is served from memory.",
        minimum=1, maximum=100_000)
    max_transfer_bytes_disk: int = setting("maxTransferBytesOnMessageInDisk", 65_536,
        "Maximum size of the response to a pull that is served from disk, in bytes.",
        minimum=1, maximum=12_582_912)
    max_transfer_count_disk: int = setting("maxTransferCountOnMessageInDisk", 8,
        "Maximum number of messages in the response to a pull that is served from disk.",
        minimum=1, maximum=100_000)
    pull_count_max: int = setting("sluicePullCountMax", 256,
        "Maximum number of messages in the response to a pull of a SluiceMQ client that is served "
        "from memory. Such clients are known by the field sluiceAnySpan. If "
        "maxTransferCountOnMessageInMemory is larger, it applies instead, so 0 gives SluiceMQ "
        "clients the same limit as others. Other clients never get more than "
        "maxTransferCountOnMessageInMemory.", maximum=256)
    version_by_topic_length: bool = setting("autoMessageVersionOnTopicLen", True,
        "Messages of topics with names of more than 127 bytes (retry topics) are stored in "
        "records of version 2.")
    index_enable: bool = setting("messageIndexEnable", True,
        "Messages can be queried by their keys.")
    index_slots: int = setting("maxHashSlotNum", 0,
        "Number of hash slots in an index file. Default: 5000000. With commit log files below 64 "
        "MiB it is one for each 200 bytes of such a file.")
    index_entries: int = setting("maxIndexNum", 0,
        "Number of entries in an index file. A file has 40 + 4 x maxHashSlotNum + 20 x "
        "maxIndexNum bytes. Default: four for each slot, that is 20000000.")
    query_count: int = setting("defaultQueryMaxNum", 32,
        "Maximum number of messages in the response to a query by unique id.", minimum=1, live=True)
    query_count_max: int = setting("maxMsgsNumBatch", 64,
        "Maximum number of messages in the response to a query by key, whatever the client "
        "requests.",
        minimum=1, live=True)
    file_reserved_hours: int = setting("fileReservedTime", 72,
        "Time for which a commit log file is kept after it was last written, in hours.", live=True)
    delete_hours: tuple[str, ...] = setting("deleteWhen", ("04",),
        "Hours of the day, in local time, in which files older than fileReservedTime are deleted, "
        "for example 04, or 04;16.", live=True)
    disk_used_ratio_max: int = setting("diskMaxUsedSpaceRatio", 75,
        "Disk usage in percent above which files older than fileReservedTime are deleted at any "
        "hour. Values outside of 10 to 95 are taken as the nearest of these.",
        maximum=100, live=True, clamped_to=(10, 95))
    disk_forced_ratio: int = setting("diskSpaceCleanForciblyRatio", 85,
        "Disk usage in percent above which the oldest files are deleted whatever their age. "
        "Values outside of 30 to 85 are taken as the nearest of these. Can also be set as "
        "`rocketmq.broker.diskSpaceCleanForciblyRatio = 0.85`, in this file or with -D in the "
        "environment variable JAVA_OPT.", maximum=100, live=True, clamped_to=(30, 85))
    disk_warning_ratio: int = setting("diskSpaceWarningLevelRatio", 90,
        "Disk usage in percent above which sends are refused. Values outside of 35 to 90 are "
        "taken as the nearest of these. Can also be set as "
        "`rocketmq.broker.diskSpaceWarningLevelRatio = 0.90`, in this file or with -D in the "
        "environment variable JAVA_OPT.", maximum=100, live=True, clamped_to=(35, 90))
    clean_forcibly: bool = setting("cleanFileForciblyEnable", True,
        "Files may be deleted before fileReservedTime if the disk is too full.", live=True)
    clean_interval_ms: int = setting("cleanResourceInterval", 10_000,
        "Interval at which the broker looks for files to delete, in ms.", minimum=100, live=True)
    delete_files_max: int = setting("deleteFileBatchMax", 10,
        "Maximum number of commit log files that are deleted each time.", minimum=1, live=True)
    delete_file_interval_ms: int = setting("deleteCommitLogFilesInterval", 100,
        "Pause between the deletions of two commit log files, in ms.", live=True)
    delete_queue_file_interval_ms: int = setting("deleteConsumeQueueFilesInterval", 100,
        "Pause between the deletions of two consume queue files, in ms.", live=True)
    retention_warning_percent: int = setting("sluiceRetentionWarningPercent", 80,
        "The broker warns about unread messages of a consumer group when their age reaches this "
        "percentage of fileReservedTime.", minimum=1, maximum=100, live=True)
    filter_scan_units_max: int = setting("sluiceFilterScanUnitsMax", 1_000_000,
        "Maximum number of consume queue units that one filtered pull examines.", minimum=1024)
    columns_mode: str = setting("sluicePropertyColumns", "auto",
        "Property columns make SQL92 filters and filtered lag fast. `auto` creates them for a "
        "topic once a consumer filters it by properties, `always` for every topic, `off` for "
        "none.",
        choices=("auto", "always", "off"))
    columns_max: int = setting("sluicePropertyColumnsMax", 64,
        "Maximum number of properties that become columns for each block of 65,536 messages: the "
        "most frequent ones. Other properties are read from the commit log when a filter needs "
        "them.", minimum=1, maximum=1024)
    columns_disk_percent: int = setting("sluicePropertyColumnsDiskPercent", 10,
        "Maximum size of the columns on disk, in percent of the size of their messages. The "
        "largest columns are left out.", minimum=1, maximum=100)
    columns_memory_bytes: int = setting("sluicePropertyColumnsMemoryBytes", 256 * 1024 * 1024,
        "Maximum size of the columns that are kept in memory, in bytes.", minimum=1_048_576)
    delay_levels: str = setting("messageDelayLevel", DEFAULT_LEVELS,
        "The delay of each delay level, starting with level 1: whole numbers with s, m, h or d. A "
        "level above the last is taken as the last.")
    delay_offset_flush_interval_ms: int = setting("flushDelayOffsetInterval", 10_000,
        "Interval at which the progress of the delay levels is saved, in ms. After a crash the "
        "broker finds in the commit log what was delivered since then.", minimum=100)
    timer_enable: bool = setting("timerWheelEnable", True,
        "Messages can be delivered at any time (timed messages). If false, new ones are refused, "
        "and those that already wait are still delivered.", live=True)
    timer_delay_max_s: int = setting("timerMaxDelaySec", 259_200,
        "Maximum delay of a timed message, in seconds. Messages that are due later are refused.",
        live=True)
    timer_precision_ms: int = setting("timerPrecisionMs", 1000,
        "Width of a slot of the timer wheel, in ms. Delivery is precise to the millisecond for "
        "every width.",
        minimum=100, maximum=60_000)
    timer_roll_window_slots: int = setting("timerRollWindowSlot", 172_800,
        "Timed messages that are due after more slots than this are stored again in between.",
        minimum=2, maximum=604_740)
    timer_slot_messages_max: int = setting("timerCongestNumEachSlot", 2**31 - 1,
        "Maximum number of timed messages in one slot. Further ones are refused.",
        minimum=1, live=True)
    timer_flush_interval_ms: int = setting("timerFlushIntervalMs", 1000,
        "Interval at which the timer wheel and the timer log are synced to disk, in ms.",
        minimum=100)
    timer_log_file_bytes: int = setting("mappedFileSizeTimerLog", 100 * 1024 * 1024,
        "Size of a timer log file, in bytes. Existing files must have the same size.",
        minimum=4096, aliases=("mapedFileSizeTimerLog",))
    origin: Origin = field(default=Origin(), compare=False, repr=False)

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delays of level 1, 2 and so on, in milliseconds."""
        return parse_delay_levels(self.delay_levels)

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy of the settings with some fields changed.

        Some fields (`_DERIVED`) are computed from others if they are not set, such as a path from
        the root directory. A derived field that still has its computed value is computed again from
        the new values, unless `changes` sets it.
        """
        # The empty value of a field's type means "not set".
        empty_values: dict[str, Any] = {
            name: type(getattr(self, name))() for name in _DERIVED if name not in changes
        }
        all_derived = replace(self, **empty_values)
        fields_to_derive = {
            name: empty
            for name, empty in empty_values.items()
            if getattr(all_derived, name) == getattr(self, name)
        }
        return replace(self, **fields_to_derive, **changes)

    def __post_init__(self) -> None:
        """Check the values, derive those that are not set, and clamp those that RocketMQ clamps.

        Raises ConfigurationError for values that are invalid or contradict each other.
        """
        root = self.root.rstrip("/") or "/"
        put = object.__setattr__  # the dataclass is frozen
        put(self, "root", root)
        self._check_values()
        put(self, "commit_log_path", self.commit_log_path or f"{root}/commitlog")
        put(self, "consume_queue_path", self.consume_queue_path or f"{root}/consumequeue")
        # Rounded up to whole units, as RocketMQ does (spec/config.md). `-(-a // b)` rounds up.
        unit = CONSUME_QUEUE_UNIT_BYTES
        put(self, "consume_queue_file_bytes", -(-self.consume_queue_file_bytes // unit) * unit)
        if not self.index_slots:
            put(self, "index_slots", _default_index_slots(self.commit_log_file_bytes))
        if not self.index_entries:
            put(self, "index_entries", INDEX_ENTRIES_PER_SLOT * self.index_slots)
        for key in keys_of(Part.STORE):
            if key.clamped_to is not None:
                low, high = key.clamped_to
                put(self, key.field, min(max(getattr(self, key.field), low), high))

    def _check_values(self) -> None:
        """Raise ConfigurationError if a value is invalid or two values contradict each other."""
        parse_delay_levels(self.delay_levels)
        if "," in self.commit_log_path:
            raise ConfigurationError(
                f"storePathCommitLog = {self.commit_log_path} names several directories.",
                fix="Name one directory. A commit log in several directories is not supported.",
            )
        if self.checksum_property_required and not self.checksum_property:
            raise ConfigurationError(
                "forceVerifyPropCRC = true needs enabledAppendPropCRC = true: otherwise a recovery"
                " would discard every message that is stored from now on.",
                fix="Set enabledAppendPropCRC = true too.",
            )
        for hour in self.delete_hours:
            is_hour = hour.isascii() and hour.isdigit() and int(hour) < 24
            if not is_hour:
                raise ConfigurationError(
                    f"deleteWhen = {';'.join(self.delete_hours)} is not valid:"
                    f" {hour} is not an hour.",
                    fix="Write hours from 00 to 23, separated by semicolons, as in 04;16.",
                )


@dataclass(frozen=True, slots=True)
class NameServerConfig(MeasuredConfig):
    """The settings of a name server."""

    listen_port: int = setting("listenPort", NAME_SERVER_PORT,
        "Port to listen on. 0 takes a free port.", maximum=65_535)
    metrics_enable: bool = setting("metricsExporterType", True,
        "PROM serves the probes `/health` and `/ready`. A name server has no metrics. In `sluice "
        "up` the setting of the broker applies.", choices={"PROM": True, "DISABLE": False})
    metrics_host: str = setting("metricsPromExporterHost", "",
        "Address of the probes. Default: bindAddress, or 127.0.0.1 in protected mode.", kind=HOST)
    metrics_port: int = setting("metricsPromExporterPort", 5556,
        "Port of the probes. It must differ from the metrics port of a broker on the same "
        "machine. 0 takes a free port.",
        maximum=65_535)
    kv_config_path: str = setting("kvConfigPath", partial(_under_home, "namesrv", "kvConfig.json"),
        "File of the key-value configuration (order topics). Default: namesrv/kvConfig.json in "
        "the home directory.", kind=PATH)
    config_path: str = setting("configStorePath", partial(_under_home, "namesrv", CHANGES_FILE),
        "File to which changes at run time are written. Default: the file given by `-c`. Without "
        "one it is namesrv/sluice.properties in the home directory, which is then read at the "
        "start.",
        kind=PATH)
    scan_interval_ms: int = setting("scanNotActiveBrokerInterval", 5000,
        "Interval at which brokers that have stopped registering are removed, in ms.", minimum=100)
    order_message_enable: bool = setting("orderMessageEnable", False,
        "Routes contain the strict order configuration of a topic.", live=True)
    return_order_config_to_broker: bool = setting("returnOrderTopicConfigToBroker", True,
        "The response to the registration of a broker contains the order topics.", live=True)
    all_topic_list_enable: bool = setting("enableAllTopicList", True,
        "The list of all topics (GET_ALL_TOPIC_LIST_FROM_NAMESERVER, 206) is served.", live=True)
    topic_list_enable: bool = setting("enableTopicList", True,
        "The lists of the topics of a cluster (224) and of unit topics (311 to 313) are served.",
        live=True)
    acting_master_support: bool = setting("supportActingMaster", False,
        "A slave can represent its master in routes, if the brokers agree.", live=True)
    notify_smallest_id: bool = setting("notifyMinBrokerIdChanged", False,
        "The replicas of a broker are notified when the lowest id of the live ones changes "
        "(NOTIFY_MIN_BROKER_ID_CHANGE, 905).", live=True)
    wait_for_service: bool = setting("needWaitForService", False,
        "Requests for routes are refused during the first waitSecondsForService seconds.",
        live=True)
    wait_for_service_s: int = setting("waitSecondsForService", 45,
        "Time for which needWaitForService refuses requests, in seconds.",
        maximum=86_400, live=True)
    delete_topic_with_registration: bool = setting("deleteTopicWithBrokerRegistration", False,
        "A topic that is missing in the registration of a broker is removed. Dangerous with "
        "RocketMQ's brokers, whose incremental registrations contain only what changed.", live=True)
    acl_enable: bool = setting("aclEnable", False,
        "Access control by the same rules as at brokers. Brokers must then sign their "
        "registration (innerClientAuthenticationCredentials). RocketMQ's name server has no "
        "access control.")
    acl_files: tuple[str, ...] = setting("plainAclFile", (),
        "Files with accounts and permissions, of which the first that exists is used. Default: "
        "`plain_acl.yml` in the directory of the file given by `-c`, then in "
        "`$ROCKETMQ_HOME/conf`, then in the directory of kvConfigPath.")
    registration_bytes_max: int = setting("sluiceRegistrationBytesMax", 32 * 1024 * 1024,
        "Maximum size of the registration of a broker after decompression, in bytes. 100,000 "
        "topics take 20 MB with names of 127 characters and attributes, and 5 MB with usual "
        "names.",
        minimum=1024 * 1024, live=True)
    registered_topics_max: int = setting("sluiceRegisteredTopicsMax", 1_000_000,
        "Maximum number of topics of all brokers together. A topic on two brokers counts twice. "
        "Each takes about 600 bytes. A registration that exceeds the limit is refused.",
        minimum=1000)
    reachable_addresses: bool = setting("sluiceReachableAddresses", True,
        "Addresses in routes that the client cannot reach are replaced, see below.", live=True)
    config_black_list: tuple[str, ...] = setting(
        "configBlackList", ("configBlackList", "configStorePath", "kvConfigPath"),
        "Keys that UPDATE_NAMESRV_CONFIG (318) must not change.")


@dataclass(frozen=True, slots=True)
class ProxyConfig(PushedConfig, ProxyLimits):
    """The settings of a separate proxy."""

    listen_port: int = setting("grpcServerPort", 8081,
        "Port to listen on. 0 takes a free port.", maximum=65_535)
    name_server_addresses: tuple[str, ...] = setting("namesrvAddr", (),
        "Name servers, `host:port;host:port`. Default: the same as for client commands.",
        kind=SERVERS)
    cluster: str | None = setting("rocketMQClusterName", None,
        "The proxy asks the brokers of this cluster for the settings of groups. Default: the "
        "brokers of all clusters.", kind=NAME)
    mode: str = setting("proxyMode", "CLUSTER",
        "A proxy in the process of a broker is started by `sluice broker --enable-proxy`.",
        choices=("CLUSTER",))
# fmt: on


_CONFIGS: Final = BrokerConfig, StoreConfig, NameServerConfig, ProxyConfig


def _declared_keys() -> Iterator[Key]:
    """Yield the key of each field of all classes of settings, class by class.

    Within a class, the keys of fields that it declares itself come before those that it inherits.
    """
    for part, config_class in zip(Part, _CONFIGS, strict=True):
        inherited_names = set()
        for base_class in config_class.__bases__:
            if base_class is not object:
                inherited_names |= {inherited.name for inherited in fields(base_class)}
        declared_fields: list[Field[Any]] = [
            declared for declared in fields(config_class) if "key" in declared.metadata
        ]
        # A stable sort: fields of the class itself (False) before inherited ones (True).
        declared_fields.sort(key=lambda declared: declared.name in inherited_names)
        for declared in declared_fields:
            yield declared.metadata["key"]._replace(part=part, field=declared.name)


KEYS: Final = tuple(_declared_keys())


def keys_of(*parts: Part) -> tuple[Key, ...]:
    """Return the keys of the given parts, in the order in which they are declared."""
    return tuple(key for key in KEYS if key.part in parts)
