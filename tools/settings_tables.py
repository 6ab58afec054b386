"""Write the tables of settings from the declarations of the keys.

    python tools/settings_tables.py docs/configuration.md
    python tools/settings_tables.py docs/reference/ignored-settings.md

The text between `<!-- written: NAME -->` and `<!-- end -->` is replaced. NAME is a part and a
subject, as in `broker: traces`; `all servers` for the keys that brokers, name servers and proxies
have in common; or `refused` or `inert`. `SUBJECTS` says which keys belong to a subject. A test
compares the pages.
"""

import textwrap
from typing import Final

from written_tables import replace_tables, rewrite_page

from sluicemq.config.inert import INERT, REFUSED
from sluicemq.config.keys import INT_MAX, Key, Kind, Part, value_text
from sluicemq.config.settings import keys_of

ALL_SERVERS: Final = "all servers"
OTHERS: Final = "others"
"""The subject of the keys of a part that have no subject in `SUBJECTS`."""
SUBJECTS: Final = {
    Part.BROKER: {
        "names and addresses": "brokerName brokerClusterName namesrvAddr brokerIP1 listenPort "
        "grpcServerPort registerNameServerPeriod brokerConfigPath",
        "topics and groups": "autoCreateTopicEnable autoCreateSubscriptionGroup "
        "defaultTopicQueueNums brokerPermission maxTopicLength sluiceAutoTopicsMax "
        "sluiceAutoGroupsMax clusterTopicEnable brokerTopicEnable "
        "validateSystemTopicWhenUpdateTopic",
        "sending and transactions": "sluicePropertiesLengthMax exitOnFatalStoreError "
        "sluiceSlowRequestMs storeReplyMessageEnable recallMessageEnable "
        "allowRecallWhenBrokerNotWriteable rejectTransactionMessage transactionTimeOut "
        "transactionCheckInterval transactionCheckMax sluiceTransactionsOpenMax",
        "consuming": "longPollingEnable shortPollingTimeMills enablePropertyFilter "
        "filterDataCleanTimeSpan flushConsumerOffsetInterval useServerSideResetOffset "
        "channelExpiredTimeout notifyConsumerIdsChangedEnable expectConsumerNumUseFilter "
        "maxErrorRateOfBloomFilter",
        "pop": "serverLoadBalancerEnable defaultMessageRequestMode defaultPopShareQueueNum "
        "loadBalancePollNameServerInterval popPollingSize maxPopPollingSize "
        "popFromRetryProbability enablePopMessageThreshold popInflightMessageThreshold "
        "initPopOffsetByCheckMsgInMem enableRetryTopicV2 retrieveMessageFromPopRetryTopicV1 "
        "popResponseReturnActualRetryTopic clearRetryTopicWhenDeleteTopic",
        "traces": "traceTopicEnable msgTraceTopicName traceOn regionId",
        "memory": "sluicePendingBytesMax sluiceClientBytesMax sluiceClientsBytesMax "
        "sluiceParkedPullsMax sluiceWriteBufferBytesMax sluiceBulkPullBytesMax",
        "connections to name servers": "innerClientAuthenticationCredentials useTLS "
        "tls.client.authServer tls.client.trustCertPath tls.client.certPath tls.client.keyPath "
        "tls.client.keyPassword",
        "replication": "brokerId brokerRole inSyncReplicas minInSyncReplicas slaveTimeout "
        "enableAutoInSyncReplicas haMaxGapNotInSync brokerIP2 haListenPort haMasterAddress "
        "sluiceReplicaPeers haSendHeartbeatInterval haHousekeepingInterval haTransferBatchSize "
        "haFlowControlEnable maxHaTransferByteInSecond slaveReadEnable offsetCheckInSlave",
        "failover": "sluiceConsensus sluiceConsensusUser sluiceConsensusPassword "
        "sluiceConsensusTrustCertPath sluiceConsensusCertPath sluiceConsensusKeyPath "
        "haMaxTimeSlaveNotCatchup enableSlaveActingMaster enableRemoteEscape skipPreOnline "
        "brokerHeartbeatInterval syncBrokerMemberGroupPeriod storePathEpochFile",
    },
    Part.STORE: {
        "files": "storePathRootDir storePathCommitLog storePathConsumeQueue "
        "mappedFileSizeCommitLog mappedFileSizeConsumeQueue mappedFileSizeTimerLog",
        "deletion": "fileReservedTime deleteWhen diskMaxUsedSpaceRatio "
        "diskSpaceCleanForciblyRatio diskSpaceWarningLevelRatio cleanFileForciblyEnable "
        "sluiceRetentionWarningPercent cleanResourceInterval deleteFileBatchMax "
        "deleteCommitLogFilesInterval deleteConsumeQueueFilesInterval",
        "writes to disk": "flushDiskType syncFlushTimeout flushIntervalCommitLog "
        "flushCommitLogLeastPages flushCommitLogThoroughInterval flushIntervalConsumeQueue "
        "flushConsumeQueueLeastPages flushConsumeQueueThoroughInterval",
        "messages": "maxMessageSize checkCRCOnRecover enabledAppendPropCRC forceVerifyPropCRC "
        "autoMessageVersionOnTopicLen",
        "responses to pulls": "accessMessageInMemoryMaxRatio maxTransferBytesOnMessageInMemory "
        "maxTransferCountOnMessageInMemory maxTransferBytesOnMessageInDisk "
        "maxTransferCountOnMessageInDisk sluicePullCountMax",
        "queries by key": "messageIndexEnable maxHashSlotNum maxIndexNum defaultQueryMaxNum "
        "maxMsgsNumBatch",
        "filters": "sluiceFilterScanUnitsMax sluicePropertyColumns sluicePropertyColumnsMax "
        "sluicePropertyColumnsDiskPercent sluicePropertyColumnsMemoryBytes",
        "delayed messages": "messageDelayLevel timerWheelEnable timerMaxDelaySec "
        "flushDelayOffsetInterval timerPrecisionMs timerRollWindowSlot timerCongestNumEachSlot "
        "timerFlushIntervalMs",
    },
    Part.PROXY: {
        "cluster": "namesrvAddr rocketMQClusterName proxyMode grpcServerPort "
        "grpcShutdownTimeSeconds",
        "receiving": "grpcClientConsumerMinLongPollingTimeoutMillis "
        "grpcClientConsumerMaxLongPollingTimeoutMillis grpcClientConsumerLongPollingBatchSize "
        "minInvisibleTimeMillsForRecv maxInvisibleTimeMills defaultInvisibleTimeMills "
        "enableProxyAutoRenew renewAheadTimeMillis renewMaxTimeMillis maxRenewRetryTimes "
        "invisibleTimeMillisWhenClear",
        "sending": "maxMessageSize enableMessageBodyEmptyCheck enableTopicMessageTypeCheck "
        "userPropertyMaxNum maxUserPropertySize maxMessageGroupSize maxDelayTimeMills "
        "maxTransactionRecoverySecond grpcClientProducerMaxAttempts "
        "grpcClientProducerBackoffInitialMillis grpcClientProducerBackoffMaxMillis "
        "grpcClientProducerBackoffMultiplier",
    },
}
"""For each part and subject: the names of the keys, in the order of the table."""


def with_tables(text: str) -> str:
    """Return a page with its tables as the keys are now."""
    return replace_tables(text, _write_table)


def _write_table(name: str) -> str:
    if name == "refused":
        return "".join(_item(f"`{key}`: {reason}.") for key, reason in REFUSED.items())
    if name == "inert":
        by_reason: dict[str, list[str]] = {}
        for key, reason in INERT.items():
            by_reason.setdefault(reason, []).append(f"`{key}`")
        return "".join(_item(f"{reason}: {', '.join(keys)}") for reason, keys in by_reason.items())
    head = "| key | default | values | meaning |\n|---|---|---|---|\n"
    return head + "".join(map(_row, _list_keys(name)))


def _list_keys(name: str) -> list[Key]:
    """Return the keys of a table. Raises KeyError for a subject or key that does not exist."""
    if name == ALL_SERVERS:
        return _list_shared_keys()
    part_name, _, subject = name.partition(": ")
    part = Part(part_name)
    key_by_name = {key.name: key for key in keys_of(part)}
    if subject != OTHERS:
        return [key_by_name[name] for name in SUBJECTS[part][subject].split()]
    placed = set(" ".join(SUBJECTS.get(part, {}).values()).split())
    placed.update(key.name for key in _list_shared_keys())
    return [key for key in key_by_name.values() if key.name not in placed]


def _list_shared_keys() -> list[Key]:
    """Return the keys that brokers, name servers and proxies have with the same meaning."""
    rows = [{_row(key) for key in keys_of(part)} for part in (Part.NAME_SERVER, Part.PROXY)]
    return [key for key in keys_of(Part.BROKER) if all(_row(key) in table for table in rows)]


def _item(text: str) -> str:
    """Return an item of a list, wrapped at 100 characters."""
    lines = textwrap.wrap(
        text, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    also = f" Also written {', '.join(f'`{alias}`' for alias in key.aliases)}." * bool(key.aliases)
    default = "" if callable(key.default) else value_text(key, key.default)
    shown = f"`{default}`" if default else "–"
    live = " *live*" * key.live
    return f"| `{key.name}` | {shown} | {_values(key)} | {key.doc}{also}{live} |\n"


def _values(key: Key) -> str:
    match key.kind:
        case Kind.INTEGER if key.maximum == INT_MAX:
            return f"{key.minimum} or more"
        case Kind.INTEGER if key.minimum == key.maximum:
            return f"{key.minimum}"
        case Kind.INTEGER:
            return f"{key.minimum} to {key.maximum}"
        case Kind.CHOICE:
            return ", ".join(f"`{word}`" for word, _value in key.choices)
        case _:
            return key.kind.value


if __name__ == "__main__":
    rewrite_page(with_tables)
