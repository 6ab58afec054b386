"""Keys that RocketMQ knows and that set nothing here, by the reason.

They are accepted with a note, so that a broker.conf of a running system starts. A key moves from
here to `settings.py` when the feature behind it is built. Where silence would be dangerous
(somebody believes that access is controlled) the key is refused instead: `REFUSED`.
"""

from typing import Final

_REASONS: Final = {
    "cold data control is not built": """
        accessMessageInMemoryHotRatio cgColdReadThreshold coldCtrStrategyEnable
        coldDataFlowControlEnable coldDataScanEnable globalColdReadThreshold usePIDColdCtrStrategy
    """,
    "statistics and metrics have no such switch here": """
        accountStatsEnable accountStatsPrintZeroValues autoDeleteUnusedStats commercialBaseCount
        commercialSizePerMsg debugLockEnable enableDetailStat estimateAccumulation isolateLogEnable
        maxStatsIdleTimeInMinutes metricLoggingExporterIntervalInMills metricsInDelta metricsLabel
        metricsOtelCardinalityLimit printChannelGroups printChannelGroupsMinNum
        sampleCountThreshold sampleSteps
    """,
    "metrics leave by OTLP over HTTP (sluiceOtlpEndpoint), not over gRPC": """
        metricGrpcExporterTimeOutInMills metricsGrpcExporterTarget
    """,
    "what is popped is decided in memory, to the millisecond, and nothing scans for it": """
        appendAckAsync appendCkAsync enableNotifyAfterPopOrderLockRelease
        enableNotifyBeforePopCalculateLag enablePopBatchAck enablePopBufferMerge enablePopLog
        enableSkipLongAwaitingAck popCkMaxBufferSize popCkOffsetMaxQueueSize popCkStayBufferTime
        popCkStayBufferTimeOut popConsumerFSServiceInit popConsumerKVServiceEnable
        popConsumerKVServiceInit popConsumerKVServiceLog popLongPollingForceNotifyInterval
        popPollingMapSize popReviveMaxAttemptTimes popReviveMaxReturnSizePerRead reviveAckWaitMs
        reviveInterval reviveMaxSlow reviveQueueNum reviveScanTime skipWhenCKRePutReachMaxTimes
    """,
    "access control is ACL 1.0 here (aclEnable), not that of RocketMQ 5.3": """
        authConfigPath authenticationEnabled authenticationMetadataProvider authenticationProvider
        authenticationStrategy authenticationWhitelist authorizationEnabled
        authorizationMetadataProvider authorizationProvider authorizationStrategy
        authorizationWhitelist initAuthenticationUser migrateAuthFromV1Enabled
    """,
    "there are no thread pools and queues here, one loop serves everything": """
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
    "etcd decides who is master (sluiceConsensus), no controller or DLedger": """
        allAckInSyncStateSet asyncLearner brokerElectionPriority brokerNotActiveTimeoutMillis
        checkSyncStateSetPeriod controllerAddr controllerHeartBeatTimeoutMills dLegerGroup
        dLegerPeers dLegerSelfId enableControllerInNamesrv enableControllerMode
        enableDLegerCommitLog fetchControllerAddrByDnsLookup replicasPerDiskPartition
        sendHeartbeatTimeoutMillis storePathDLedgerCommitLog syncControllerMetadataPeriod
        totalReplicas
    """,
    "a slave has the whole log of its master and its state as it changes": """
        duplicationEnable isBrokerContainer isInBrokerContainer lockInStrictMode
        maxSlaveResendLength syncBrokerMetadataPeriod syncFromLastFile
        syncMasterFlushOffsetWhenStartup
    """,
    "the one loop delivers delayed and timed messages, exactly and until it succeeds": """
        delayOffsetUpdateVersionStep enableScheduleAsyncDeliver enableScheduleMessageStats
        scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked
        timerCheckMetricsWhen timerColdDataCheckIntervalMs timerEnableCheckMetrics
        timerEnableDisruptor timerEnableRetryUntilSuccess timerGetMessageThreadNum
        timerInterceptDelayLevel timerMetricSmallThreshold timerProgressLogIntervalMs
        timerPutMessageThreadNum timerSkipUnknownError timerStopDequeue timerStopEnqueue
        timerWarmEnable
    """,
    "columns replace ConsumeQueueExt, whose files are read, kept as found and not written": """
        bitMapLengthConsumeQueueExt enableConsumeQueueExt mappedFileSizeConsumeQueueExt
    """,
    "bloom filters are not used: filters are exact without them": """
        enableCalcFilterBitMap filterSupportRetry maxConsumeQueueScan maxFilterMessageSize
    """,
    "there is no RocksDB here": """
        bottomMostCompressionTypeForConsumeQueueStore cleanRocksDBDirtyCQIntervalMin
        enableRocksDBLog memTableFlushIntervalMs realTimePersistRocksDBConfig
        rocksdbCQDoubleWriteEnable rocksdbCompressionType rocksdbFlushWalFrequency
        rocksdbWalFileRollingThreshold statRocksDBCQIntervalSec storeType
    """,
    "a file is deleted at once: who reads it keeps what it has mapped": """
        cleanSwapedMapInterval correctLogicMinOffsetForceInterval correctLogicMinOffsetSleepInterval
        destroyMapedFileIntervalForcibly logicalDiskSpaceCleanForciblyThreshold
        maxBatchDeleteFilesNum redeleteHangedFileInterval
    """,
    "sockets are asyncio's here": """
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
    "compaction topics are refused, what lies in the folder compaction is kept as found": """
        compactionCqMappedFileSize compactionMappedFileSize compactionScheduleInternal
        compactionThreadNum enableCompaction maxOffsetMapSize
    """,
    "the key index is built behind the log, and is exact after a crash": """
        messageIndexSafe putMsgIndexHightWater queryMessageThreadPoolNums storePathIndex
    """,
    "lite topics and multi-dispatch are not built yet": """
        enableLmq enableLmqStats enableMultiDispatch maxLmqConsumeQueueNum
    """,
    "the end of a transaction is written at once, by the one loop": """
        checkTransactionMessageEnable endTransactionPoolQueueCapacity endTransactionThreadPoolNums
        transactionMetricFlushInterval transactionOpBatchInterval transactionOpMsgMaxSize
        waitTimeMillsInTransactionQueue
    """,
    "name servers are given by namesrvAddr": """
        fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer fetchNamesrvAddrInterval
        isScanAvailableNameSrv namesrvDomain namesrvDomainSubgroup updateNameServerAddrPeriod
    """,
    "batch consume queues are not built": """
        mapperFileSizeBatchConsumeQueue searchBcqByCacheEnable
    """,
    "the list is fixed for a broker": """
        configBlackList
    """,
    "a connection of a client ends after serverChannelMaxIdleTimeSeconds without traffic": """
        grpcClientIdleTimeMills
    """,
    "a request of a gRPC client has at most 16 MiB": """
        grpcMaxInboundMessageSize
    """,
    "what a broker asks of a gRPC client is answered after 4 s if the client does not": """
        grpcProxyRelayRequestTimeoutInSeconds
    """,
    "brokers are told to answer a receive 500 ms before the client's deadline": """
        longPollingReserveTimeInMillis
    """,
    "the proxy looks every second for messages to renew": """
        renewSchedulePeriodMillis
    """,
    "timed messages of gRPC clients are exact to the millisecond": """
        useDelayLevel
    """,
    "the proxy has one loop, and no thread pools": """
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
    "the proxy asks its cluster again after five seconds": """
        aclCacheExpiredSeconds aclCacheMaxNum aclCacheRefreshSeconds
        subscriptionGroupConfigCacheExpiredSeconds subscriptionGroupConfigCacheMaxNum
        subscriptionGroupConfigCacheRefreshSeconds topicConfigCacheExpiredSeconds
        topicConfigCacheMaxNum topicConfigCacheRefreshSeconds topicRouteServiceCacheExpiredSeconds
        topicRouteServiceCacheMaxNum topicRouteServiceCacheRefreshSeconds
        topicRouteServiceThreadPoolNums topicRouteServiceThreadPoolQueueCapacity
        userCacheExpiredSeconds userCacheMaxNum userCacheRefreshSeconds
    """,
    "proxies know nothing of each other; what a client brings along says all": """
        heartbeatSyncerThreadPoolNums heartbeatSyncerThreadPoolQueueCapacity
        heartbeatSyncerTopicClusterName heartbeatSyncerTopicName localServeAddr proxyClusterName
        proxyName transactionDataExpireMillis transactionDataExpireScanPeriodMillis
        transactionDataMaxNum transactionDataMaxWaitClearMillis
    """,
    "the proxy serves gRPC alone": """
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
    "the proxy signs what it asks whenever it has an account": """
        enableAclRpcHookForClusterMode
    """,
    "clients get the address by which they came, with its port": """
        useEndpointPortFromRequest
    """,
    "SluiceMQ has no use for it": """
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
    "replicas with automatic failover are those of `sluice up --replicas 3`, or brokers with "
    "sluiceConsensus, which etcd keeps; without it messages would have one copy"
)

REFUSED: Final = {
    "authenticationEnabled": "access control is ACL 1.0 here (aclEnable); it would be open",
    "authorizationEnabled": "access control is ACL 1.0 here (aclEnable); it would be open",
    "enableControllerMode": _BY_ETCD,
    "enableDLegerCommitLog": _BY_ETCD,
}
"""Keys that may only be false, and why."""
