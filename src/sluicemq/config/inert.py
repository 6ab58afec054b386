"""Keys of RocketMQ that have no effect in SluiceMQ, grouped by the reason.

They are accepted with a warning, so that a server starts with the configuration file of a running
RocketMQ. A key moves to `settings.py` when its feature is implemented. If ignoring a key would be
dangerous, because a user would believe that access is controlled, the key is refused (`REFUSED`).

A reason completes the sentence "… has no effect, because …".
"""

from typing import Final

_REASONS: Final = {
    "cold data control is not implemented": """
        accessMessageInMemoryHotRatio cgColdReadThreshold coldCtrStrategyEnable
        coldDataFlowControlEnable coldDataScanEnable globalColdReadThreshold usePIDColdCtrStrategy
    """,
    "the statistics and metrics of SluiceMQ have no such option": """
        accountStatsEnable accountStatsPrintZeroValues autoDeleteUnusedStats commercialBaseCount
        commercialSizePerMsg debugLockEnable enableDetailStat estimateAccumulation isolateLogEnable
        maxStatsIdleTimeInMinutes metricLoggingExporterIntervalInMills metricsInDelta metricsLabel
        metricsOtelCardinalityLimit printChannelGroups printChannelGroupsMinNum
        sampleCountThreshold sampleSteps
    """,
    "metrics are pushed by OTLP over HTTP (sluiceOtlpEndpoint), not over gRPC": """
        metricGrpcExporterTimeOutInMills metricsGrpcExporterTarget
    """,
    "popped messages are tracked in memory to the millisecond, without scanning": """
        appendAckAsync appendCkAsync enableNotifyAfterPopOrderLockRelease
        enableNotifyBeforePopCalculateLag enablePopBatchAck enablePopBufferMerge enablePopLog
        enableSkipLongAwaitingAck popCkMaxBufferSize popCkOffsetMaxQueueSize popCkStayBufferTime
        popCkStayBufferTimeOut popConsumerFSServiceInit popConsumerKVServiceEnable
        popConsumerKVServiceInit popConsumerKVServiceLog popLongPollingForceNotifyInterval
        popPollingMapSize popReviveMaxAttemptTimes popReviveMaxReturnSizePerRead reviveAckWaitMs
        reviveInterval reviveMaxSlow reviveQueueNum reviveScanTime skipWhenCKRePutReachMaxTimes
    """,
    "access control is ACL 1.0 (aclEnable), not that of RocketMQ 5.3": """
        authConfigPath authenticationEnabled authenticationMetadataProvider authenticationProvider
        authenticationStrategy authenticationWhitelist authorizationEnabled
        authorizationMetadataProvider authorizationProvider authorizationStrategy
        authorizationWhitelist initAuthenticationUser migrateAuthFromV1Enabled
    """,
    "one event loop serves all requests, without thread pools and their queues": """
        ackMessageThreadPoolNums ackThreadPoolQueueCapacity adminBrokerThreadPoolNums
        adminBrokerThreadPoolQueueCapacity batchDispatchRequestThreadPoolNums
        brokerFastFailureEnable clientAsyncSemaphoreValue clientCallbackExecutorThreads
        clientManagerThreadPoolQueueCapacity clientManageThreadPoolNums clientOnewaySemaphoreValue
        clientRequestThreadPoolNums clientWorkerThreads consumerManagerThreadPoolQueueCapacity
        consumerManageThreadPoolNums defaultThreadPoolNums disableCallbackExecutor
        disableNettyWorkerGroup dispatchCqThreads dispatchFromSenderThread
        enableFastChannelEventProcess heartbeatThreadPoolNums heartbeatThreadPoolQueueCapacity
        litePullMessageThreadPoolNums litePullThreadPoolQueueCapacity
        loadBalanceProcessorThreadPoolNums loadBalanceThreadPoolQueueCapacity
        processReplyMessageThreadPoolNums pullMessageThreadPoolNums pullThreadPoolQueueCapacity
        putMessageFutureThreadPoolNums putThreadPoolQueueCapacity queryThreadPoolQueueCapacity
        recoverThreadPoolNums replyThreadPoolQueueCapacity sendMessageThreadPoolNums
        sendThreadPoolQueueCapacity serverAsyncSemaphoreValue serverCallbackExecutorThreads
        serverNettyWorkerGroupEnable serverOnewaySemaphoreValue serverSelectorThreads
        serverWorkerThreads unRegisterBrokerQueueCapacity waitTimeMillsInAckQueue
        waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue waitTimeMillsInLitePullQueue
        waitTimeMillsInPullQueue waitTimeMillsInSendQueue
    """,
    "etcd decides who is master (sluiceConsensus), not a controller or DLedger": """
        allAckInSyncStateSet asyncLearner brokerElectionPriority brokerNotActiveTimeoutMillis
        checkSyncStateSetPeriod controllerAddr controllerHeartBeatTimeoutMills dLegerGroup
        dLegerPeers dLegerSelfId enableControllerInNamesrv enableControllerMode
        enableDLegerCommitLog fetchControllerAddrByDnsLookup replicasPerDiskPartition
        sendHeartbeatTimeoutMillis storePathDLedgerCommitLog syncControllerMetadataPeriod
        totalReplicas
    """,
    "a slave always receives the whole log and every change of the state of its master": """
        duplicationEnable isBrokerContainer isInBrokerContainer lockInStrictMode
        maxSlaveResendLength syncBrokerMetadataPeriod syncFromLastFile
        syncMasterFlushOffsetWhenStartup
    """,
    "the event loop delivers delayed and timed messages exactly, and retries until it succeeds": """
        delayOffsetUpdateVersionStep enableScheduleAsyncDeliver enableScheduleMessageStats
        scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked
        timerCheckMetricsWhen timerColdDataCheckIntervalMs timerEnableCheckMetrics
        timerEnableDisruptor timerEnableRetryUntilSuccess timerGetMessageThreadNum
        timerInterceptDelayLevel timerMetricSmallThreshold timerProgressLogIntervalMs
        timerPutMessageThreadNum timerSkipUnknownError timerStopDequeue timerStopEnqueue
        timerWarmEnable
    """,
    "property columns replace ConsumeQueueExt, whose files are kept and not written": """
        bitMapLengthConsumeQueueExt enableConsumeQueueExt mappedFileSizeConsumeQueueExt
    """,
    "filters are exact and do not use bloom filters": """
        enableCalcFilterBitMap filterSupportRetry maxConsumeQueueScan maxFilterMessageSize
    """,
    "SluiceMQ does not use RocksDB": """
        bottomMostCompressionTypeForConsumeQueueStore cleanRocksDBDirtyCQIntervalMin
        enableRocksDBLog memTableFlushIntervalMs realTimePersistRocksDBConfig
        rocksdbCQDoubleWriteEnable rocksdbCompressionType rocksdbFlushWalFrequency
        rocksdbWalFileRollingThreshold statRocksDBCQIntervalSec storeType
    """,
    "a file is deleted at once, and its readers keep their mapping": """
        cleanSwapedMapInterval correctLogicMinOffsetForceInterval correctLogicMinOffsetSleepInterval
        destroyMapedFileIntervalForcibly logicalDiskSpaceCleanForciblyThreshold
        maxBatchDeleteFilesNum redeleteHangedFileInterval
    """,
    "asyncio manages the sockets": """
        clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout
        clientPooledByteBufAllocatorEnable clientSocketRcvBufSize clientSocketSndBufSize
        connectTimeoutMillis enableReconnectForGoAway
        maxReconnectIntervalTimeSeconds serverPooledByteBufAllocatorEnable
        serverSocketBacklog serverSocketRcvBufSize serverSocketSndBufSize socksProxyConfig
        useEpollNativeSelector writeBufferHighWaterMark writeBufferLowWaterMark
    """,
    "the log is written with pwrite and mapped for reading only": """
        abortFile commitCommitLogLeastPages commitCommitLogThoroughInterval commitIntervalCommitLog
        commitLogForceSwapMapInterval commitLogSwapMapInterval commitLogSwapMapReserveFileNum
        dataReadAheadEnable diskFallRecorded dispatchCqCacheNum enableAsyncReput
        fastFailIfNoBufferInStorePool flushCommitLogTimed flushLeastPagesWhenWarmMapedFile
        logicQueueForceSwapMapInterval logicQueueSwapMapInterval logicQueueSwapMapReserveFileNum
        mappedFileSwapEnable maxAsyncPutMessageRequests maxRecoveryCommitlogFiles
        osPageCacheBusyTimeOutMills putConsumeQueueDataByFileChannel putMessageTimeout
        recheckReputOffsetFromCq recoverConcurrently spinLockCollisionRetreatOptimalDegree
        storeCheckpoint topicQueueLockNum transferMsgByHeap transientStorePoolEnable
        transientStorePoolSize travelCqFileNumWhenGetMessage useABSLock
        useReentrantLockWhenPutMessage wakeCommitWhenPutMessage wakeFlushWhenPutMessage
        warmMapedFileEnable
    """,
    "compaction topics are refused, and files in the directory compaction are kept unchanged": """
        compactionCqMappedFileSize compactionMappedFileSize compactionScheduleInternal
        compactionThreadNum enableCompaction maxOffsetMapSize
    """,
    "the key index is built from the commit log, and is exact after a crash": """
        messageIndexSafe putMsgIndexHightWater queryMessageThreadPoolNums storePathIndex
    """,
    "lite topics and multi-dispatch are not implemented": """
        enableLmq enableLmqStats enableMultiDispatch maxLmqConsumeQueueNum
    """,
    "the event loop writes the end of a transaction at once": """
        checkTransactionMessageEnable endTransactionPoolQueueCapacity endTransactionThreadPoolNums
        transactionMetricFlushInterval transactionOpBatchInterval transactionOpMsgMaxSize
        waitTimeMillsInTransactionQueue
    """,
    "name servers are configured only by namesrvAddr": """
        fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer fetchNamesrvAddrInterval
        isScanAvailableNameSrv namesrvDomain namesrvDomainSubgroup updateNameServerAddrPeriod
    """,
    "batch consume queues are not implemented": """
        mapperFileSizeBatchConsumeQueue searchBcqByCacheEnable
    """,
    "the list is fixed for a broker": """
        configBlackList
    """,
    "a connection is closed after serverChannelMaxIdleTimeSeconds without traffic": """
        grpcClientIdleTimeMills
    """,
    "a request of a gRPC client has at most 16 MiB": """
        grpcMaxInboundMessageSize
    """,
    "if a gRPC client does not respond to a request of a broker, the proxy does after 4 s": """
        grpcProxyRelayRequestTimeoutInSeconds
    """,
    "the proxy requests that brokers respond to a receive 500 ms before the client's deadline": """
        longPollingReserveTimeInMillis
    """,
    "the proxy looks every second for messages to renew": """
        renewSchedulePeriodMillis
    """,
    "timed messages of gRPC clients are exact to the millisecond": """
        useDelayLevel
    """,
    "the proxy has one event loop and no thread pools": """
        channelExpiredInSeconds contextExpiredInSeconds detectInterval detectTimeout enableBatchAck
        enableGrpcEpoll enablePrintJstack grpcBossLoopNum grpcClientManagerThreadPoolNums
        grpcClientManagerThreadQueueCapacity grpcConsumerThreadPoolNums
        grpcConsumerThreadQueueCapacity grpcProducerThreadPoolNums grpcProducerThreadQueueCapacity
        grpcRouteThreadPoolNums grpcRouteThreadQueueCapacity grpcThreadPoolNums
        grpcThreadPoolQueueCapacity grpcTransactionThreadPoolNums
        grpcTransactionThreadQueueCapacity grpcWorkerLoopNum lockTimeoutMsInHandleGroup
        metadataThreadPoolNums metadataThreadPoolQueueCapacity printJstackInMillis
        printThreadPoolStatusInMillis producerProcessorThreadPoolNums
        producerProcessorThreadPoolQueueCapacity consumerProcessorThreadPoolNums
        consumerProcessorThreadPoolQueueCapacity renewMaxThreadPoolNums renewThreadPoolNums
        renewThreadPoolQueueCapacity rocketmqMQClientNum sendLatencyEnable startDetectorEnable
        tlsCertWatchIntervalMs transactionHeartbeatBatchNum transactionHeartbeatPeriodSecond
        transactionHeartbeatThreadPoolNums transactionHeartbeatThreadPoolQueueCapacity
    """,
    "the proxy refreshes what it knows of its cluster after five seconds": """
        aclCacheExpiredSeconds aclCacheMaxNum aclCacheRefreshSeconds
        subscriptionGroupConfigCacheExpiredSeconds subscriptionGroupConfigCacheMaxNum
        subscriptionGroupConfigCacheRefreshSeconds topicConfigCacheExpiredSeconds
        topicConfigCacheMaxNum topicConfigCacheRefreshSeconds topicRouteServiceCacheExpiredSeconds
        topicRouteServiceCacheMaxNum topicRouteServiceCacheRefreshSeconds
        topicRouteServiceThreadPoolNums topicRouteServiceThreadPoolQueueCapacity
        userCacheExpiredSeconds userCacheMaxNum userCacheRefreshSeconds
    """,
    "proxies do not exchange data: every call of a client contains all that is needed": """
        heartbeatSyncerThreadPoolNums heartbeatSyncerThreadPoolQueueCapacity
        heartbeatSyncerTopicClusterName heartbeatSyncerTopicName localServeAddr proxyClusterName
        proxyName transactionDataExpireMillis transactionDataExpireScanPeriodMillis
        transactionDataMaxNum transactionDataMaxWaitClearMillis
    """,
    "the proxy serves only gRPC": """
        enableRemotingLocalProxyGrpc localProxyConnectTimeoutMs remotingAccessAddr
        remotingDefaultThreadPoolNums remotingDefaultThreadPoolQueueCapacity
        remotingHeartbeatThreadPoolNums remotingHeartbeatThreadPoolQueueCapacity
        remotingListenPort remotingPullMessageThreadPoolNums remotingPullThreadPoolQueueCapacity
        remotingSendMessageThreadPoolNums remotingSendThreadPoolQueueCapacity
        remotingTopicRouteThreadPoolNums remotingTopicRouteThreadPoolQueueCapacity
        remotingUpdateOffsetThreadPoolNums remotingUpdateOffsetThreadPoolQueueCapacity
        remotingWaitTimeMillsInDefaultQueue remotingWaitTimeMillsInHeartbeatQueue
        remotingWaitTimeMillsInPullQueue remotingWaitTimeMillsInSendQueue
        remotingWaitTimeMillsInTopicRouteQueue remotingWaitTimeMillsInUpdateOffsetQueue
    """,
    "the proxy signs its requests whenever it has an account": """
        enableAclRpcHookForClusterMode
    """,
    "clients get the address and port by which they have connected": """
        useEndpointPortFromRequest
    """,
    "a registration waits for 3 s at most, so that tools that change a topic do not time out": """
        registerBrokerTimeoutMills
    """,
    "SluiceMQ does not need it": """
        asyncSendEnable broadcastOffsetExpireMaxSecond broadcastOffsetExpireSecond
        channelNotActiveInterval cleanOfflineBrokerInterval clusterTest compatibleWithOldNameSrv
        compressedRegister configManagerVersion consumerFallbehindThreshold
        consumerOffsetUpdateVersionStep
        disableConsumeIfConsumerReadSlowly disappearTimeAfterStart enableBatchPush
        enableCleanExpiredOffset enableBroadcastOffsetStore enableBuildConsumeQueueConcurrently
        enableCreateSysGroup enableMixedMessageType enableNetWorkFlowControl enableRegisterProducer
        enableSharedConsumeQueue enableShutdownGracefully enableSingleTopicRegister
        enableSplitRegistration flushConsumerOffsetHistoryInterval forceRegister forwardTimeout
        highSpeedMode litePullMessageEnable maxChecksumRange messageStorePlugIn productEnvName
        pullBatchMaxMessageCount readUnCommitted realTimeNotifyConsumerChange
        rejectPullConsumerEnable rocketmqHome shutdownWaitTimeSeconds splitRegistrationSize
        startAcceptSendRequestTimeStamp subscriptionExpiredTimeout useStaticSubscription zoneMode
        zoneName
    """,
}

INERT: Final = {name: reason for reason, names in _REASONS.items() for name in names.split()}

_BY_ETCD: Final = (
    "automatic failover needs `sluice up --replicas 3`, or brokers with sluiceConsensus; without "
    "that, messages would have only one copy"
)

_BY_ACL: Final = "access control is ACL 1.0 (aclEnable); this key would leave the broker open"

REFUSED: Final = {
    "authenticationEnabled": _BY_ACL,
    "authorizationEnabled": _BY_ACL,
    "enableControllerMode": _BY_ETCD,
    "enableDLegerCommitLog": _BY_ETCD,
}
"""Keys that must not be set to anything but false, each with the reason."""
