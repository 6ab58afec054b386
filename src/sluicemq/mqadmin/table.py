"""The table of all commands of `sluice mqadmin`.

These are the commands of mqadmin 5.5.0, and those of 4.9.8 for access rules. Each row contains the
name of a command, its flags as `commands` declares them, its summary, and its function. A command
that SluiceMQ does not support has a refusal instead: the reason, and what to use instead.
"""

from typing import Final

from sluicemq.mqadmin import accounts, brokers, exports, groups, messages, topics
from sluicemq.mqadmin.commands import Command, CommandFunction, parse_flag_declarations

_TARGET: Final = "b:brokerAddr= c:clusterName="
_REQUIRED_TARGET: Final = "(b:brokerAddr=|c:clusterName=)"
_CONTROLLER: Final = (
    "SluiceMQ has no controller: replicas agree on a master without one. Use sluice cluster "
    "status, sluice cluster switch or sluice cluster elect."
)
_USERS: Final = (
    "SluiceMQ keeps accounts in plain_acl.yml, not as users of ACL 2.0. Use updateAclConfig, "
    "deleteAclConfig or getAclConfig, or edit the file. Run sluice acl check to see what it allows."
)
_ROCKSDB: Final = "SluiceMQ does not use RocksDB. Use exportMetadata or sluice store verify."
_STATIC: Final = (
    "SluiceMQ has no static topics. Use updateTopic with -o true: the number of queues then stays "
    "the same while a broker is unavailable."
)
_LITE: Final = (
    "SluiceMQ has no lite topics. Use a topic and a filter. Run sluice filter check to see what "
    "the filter costs."
)
_COLD: Final = (
    "SluiceMQ does not slow down consumers that read old messages: each connection has its share. "
    "Run sluice group lag to see which groups lag."
)
_CONTAINER: Final = "SluiceMQ has no broker containers. Start a broker with sluice broker."


def _row(
    name: str, flags: str, summary: str, run_or_refusal: CommandFunction | str, *aliases: str
) -> Command:
    """Return a command for the table, with the flags that `flags` declares.

    `run_or_refusal` is the function that runs it. A text instead says why the command is not
    supported. `aliases` are further names.
    """
    declared_flags = parse_flag_declarations(flags)
    if isinstance(run_or_refusal, str):
        refusal = run_or_refusal
        return Command(name, declared_flags, summary, None, refusal, aliases)
    return Command(name, declared_flags, summary, run_or_refusal, "", aliases)


COMMANDS: Final[tuple[Command, ...]] = (
    _row(
        "updateTopic",
        f"{_REQUIRED_TARGET} a:attributes= t:topic=! r:readQueueNums= w:writeQueueNums= "
        "p:perm= o:order= u:unit= s:hasUnitSub=",
        "Create or change a topic.",
        topics.update_topic,
    ),
    _row(
        "updateTopicList",
        f"{_REQUIRED_TARGET} f:filename=!",
        "Create or change the topics of a JSON file.",
        topics.update_topic_list,
    ),
    _row(
        "deleteTopic",
        "t:topic=! c:clusterName=!",
        "Delete a topic of a cluster.",
        topics.delete_topic,
    ),
    _row(
        "updateSubGroup",
        f"{_TARGET} g:groupName=! s:consumeEnable= m:consumeFromMinEnable= "
        "d:consumeBroadcastEnable= o:consumeMessageOrderly= q:retryQueueNums= r:retryMaxTimes= "
        "p:groupRetryPolicy= i:brokerId= w:whichBrokerWhenConsumeSlowly= "
        "a:notifyConsumerIdsChanged= :attributes=",
        "Create or change a consumer group.",
        groups.update_group,
    ),
    _row(
        "updateSubGroupList",
        f"{_REQUIRED_TARGET} f:filename=!",
        "Create or change groups of a JSON file.",
        groups.update_group_list,
    ),
    _row(
        "setConsumeMode",
        f"{_TARGET} t:topicName=! g:groupName=! m:mode=! q:popShareQueueNum=",
        "Let a group read a topic by PULL or by POP.",
        groups.set_consume_mode,
    ),
    _row(
        "deleteSubGroup",
        f"{_TARGET} g:groupName=! r:removeOffset=",
        "Delete a consumer group.",
        groups.delete_group,
    ),
    _row(
        "updateBrokerConfig",
        f"{_TARGET} a:updateAllBroker= k:key=! v:value=!",
        "Change a setting of brokers.",
        brokers.update_broker_settings,
    ),
    _row(
        "updateTopicPerm",
        f"{_TARGET} t:topic=! p:perm=!",
        "Change the permission of a topic.",
        topics.update_topic_permission,
    ),
    _row(
        "topicRoute",
        "t:topic=! l:list",
        "Show the brokers and queues of a topic.",
        topics.show_route,
    ),
    _row(
        "topicStatus",
        "t:topic=! c:cluster=~",
        "Show the offsets of a topic's queues.",
        topics.show_topic_status,
    ),
    _row(
        "topicClusterList",
        "t:topic=!",
        "Show the clusters that have a topic.",
        topics.list_topic_clusters,
    ),
    _row(
        "addBroker",
        "c:brokerContainerAddr=! b:brokerConfigPath=!",
        "Not supported by SluiceMQ.",
        _CONTAINER,
    ),
    _row(
        "removeBroker",
        "c:brokerContainerAddr=! b:brokerIdentity=!",
        "Not supported by SluiceMQ.",
        _CONTAINER,
    ),
    _row(
        "resetMasterFlushOffset",
        "b:brokerAddr= o:offset=",
        "Set the flushed offset of a master at its slave.",
        brokers.reset_flushed_position,
    ),
    _row(
        "brokerStatus",
        _REQUIRED_TARGET,
        "Show all counters of brokers.",
        brokers.show_broker_status,
    ),
    _row(
        "queryMsgById",
        "t:topic=! i:msgId=! g:consumerGroup= d:clientId= s:sendMessage= "
        "u:unitName=~ f:bodyFormat= c:cluster=~",
        "Show messages by their ids.",
        messages.query_by_id,
    ),
    _row(
        "queryMsgByKey",
        "t:topic=! k:msgKey=! b:beginTimestamp= e:endTimestamp= m:maxNum= "
        "c:cluster=~ p:keyType= l:lastKey=~",
        "List messages by a key.",
        messages.query_by_key,
    ),
    _row(
        "queryMsgByUniqueKey",
        "i:msgId=! g:consumerGroup= d:clientId= t:topic=! a:showAll "
        "c:cluster=~ s:startTime= e:endTime=",
        "Show a message by its producer's message id.",
        messages.query_by_unique_key,
    ),
    _row(
        "queryMsgByOffset",
        "t:topic=! b:brokerName=! i:queueId=! o:offset=! f:bodyFormat= r:routeTopic=~",
        "Show the message at an offset of a queue.",
        messages.query_by_offset,
    ),
    _row(
        "queryMsgTraceById",
        "i:msgId=! t:traceTopic= b:beginTimestamp= e:endTimestamp= c:maxNum=",
        "Show what clients traced of a message.",
        messages.query_trace,
    ),
    _row(
        "printMsg",
        "t:topic=! c:charsetName= s:subExpression= b:beginTimestamp= e:endTimestamp= "
        "d:printBody= l:lmqParentTopic=~",
        "Print the messages of a topic.",
        messages.print_messages,
    ),
    _row(
        "printMsgByQueue",
        "t:topic=! a:brokerName=! i:queueId=! c:charsetName= s:subExpression= "
        "b:beginTimestamp= e:endTimestamp= p:print_msg= d:printBody= f:calculate=",
        "Print the messages of a queue, or count their tags.",
        messages.print_queue_messages,
    ),
    _row(
        "sendMsgStatus",
        "b:brokerName=! s:messageSize= c:count=",
        "Send to the topic named after a broker, and show how long it takes.",
        messages.measure_broker_send_times,
    ),
    _row(
        "brokerConsumeStats",
        "b:brokerAddr=! t:timeoutMillis= l:level= o:order=",
        "Show the offsets of all groups at a broker.",
        brokers.show_broker_consume_stats,
    ),
    _row(
        "producerConnection",
        "g:producerGroup=! t:topic=!",
        "Show the producers of a group.",
        groups.show_group_producers,
    ),
    _row(
        "consumerConnection",
        "g:consumerGroup=! b:brokerAddr=",
        "Show the members and subscriptions of a group.",
        groups.show_members,
    ),
    _row(
        "consumerProgress",
        "g:groupName= t:topicName= s:showClientIP= c:cluster=~",
        "Show the offsets and lag of groups.",
        groups.show_consumer_progress,
    ),
    _row(
        "consumerStatus",
        "g:consumerGroup=! i:clientId= b:brokerAddr= s:jstack",
        "Show the state of a group's members.",
        groups.show_consumer_status,
    ),
    _row(
        "cloneGroupOffset",
        "s:srcGroup=! d:destGroup=! t:topic=! o:offline=",
        "Copy the offsets of a group to another group.",
        groups.clone_offsets,
    ),
    _row("producer", "b:broker=!", "Show all producers of a broker.", groups.show_broker_producers),
    _row(
        "clusterList",
        "m:moreStats i:interval= c:clusterName=",
        "List brokers with their rates.",
        brokers.list_brokers,
    ),
    _row("topicList", "c:clusterModel", "List all topics.", topics.list_topics),
    _row(
        "updateKvConfig",
        "s:namespace=! k:key=! v:value=!",
        "Store a value at the name servers.",
        brokers.put_kv_config,
    ),
    _row(
        "deleteKvConfig",
        "s:namespace=! k:key=!",
        "Delete a value of the name servers.",
        brokers.delete_kv_config,
    ),
    _row(
        "wipeWritePerm",
        "b:brokerName=!",
        "Stop producers from sending to a broker.",
        brokers.wipe_write_permission,
    ),
    _row(
        "addWritePerm",
        "b:brokerName=!",
        "Let producers send to a broker again.",
        brokers.add_write_permission,
    ),
    _row(
        "resetOffsetByTime",
        "g:group=! t:topic=! s:timestamp=! f:force= c:cluster=~ b:broker= q:queue= o:offset=",
        "Reset the offsets of a group to a time.",
        groups.reset_offset,
    ),
    _row(
        "skipAccumulatedMessage",
        "g:group=! t:topic=! f:force= c:cluster=~",
        "Reset the offsets of a group behind the last message.",
        groups.skip_accumulated_messages,
    ),
    _row(
        "updateOrderConf",
        "t:topic=! v:orderConf= m:method=!",
        "Show, set or delete the strict order of a topic.",
        topics.update_order_conf,
    ),
    _row(
        "cleanExpiredCQ",
        "b:brokerAddr= c:cluster=",
        "Delete expired files of queues.",
        brokers.clean_up_command("queues"),
    ),
    _row(
        "deleteExpiredCommitLog",
        "n:namesrvAddr= b:brokerAddr= c:cluster=",
        "Delete expired files of the log.",
        brokers.clean_up_command("log"),
    ),
    _row(
        "cleanUnusedTopic",
        "b:brokerAddr= c:cluster=",
        "Delete queues of deleted topics.",
        brokers.clean_up_command("topics"),
    ),
    _row(
        "startMonitoring",
        "",
        "Not supported by SluiceMQ.",
        "SluiceMQ is monitored by its metrics. Run sluice group lag, or scrape the brokers.",
    ),
    _row(
        "statsAll",
        "a:activeTopic t:topic=",
        "Show the rates of each topic and group.",
        brokers.show_statistics,
    ),
    _row(
        "allocateMQ",
        "t:topic=! i:ipList=!",
        "Show how consumers would share queues.",
        topics.allocate_queues,
    ),
    _row(
        "checkMsgSendRT",
        "t:topic=! a:amount= s:size=",
        "Measure how long sends take.",
        messages.measure_queue_send_times,
    ),
    _row(
        "clusterRT",
        "a:amount= s:size= c:cluster= p:print_log= m:machine_room= i:interval=",
        "Measure how long sends to each broker take, until stopped.",
        messages.measure_cluster_send_times,
    ),
    _row(
        "getNamesrvConfig",
        "",
        "Show the settings of name servers.",
        brokers.show_name_server_settings,
    ),
    _row(
        "updateNamesrvConfig",
        "k:key=! v:value=!",
        "Change a setting of name servers.",
        brokers.update_name_server_settings,
    ),
    _row(
        "getBrokerConfig",
        _REQUIRED_TARGET,
        "Show the settings of brokers.",
        brokers.show_broker_settings,
    ),
    _row(
        "getConsumerConfig",
        "g:groupName=!",
        "Show the settings of a group.",
        groups.show_group_settings,
    ),
    _row(
        "queryCq",
        "t:topic=! q:queue=! i:index=! c:count= b:broker= g:consumer=",
        "Show units of a consume queue.",
        messages.query_consume_queue,
    ),
    _row(
        "sendMessage",
        "t:topic=! p:body=! k:key= c:tags= b:broker= i:qid= m:msgTraceEnable=~",
        "Send a message.",
        messages.send_message,
    ),
    _row(
        "consumeMessage",
        "t:topic=! b:brokerName= i:queueId= o:offset= g:consumerGroup= "
        "s:beginTimestamp= e:endTimestamp= c:MessageNumber=",
        "Print the oldest messages.",
        messages.consume_messages,
    ),
    _row(
        "updateStaticTopic",
        "(c:clusters=|b:brokers=) t:topic=! qn:totalQueueNum=! mf:mapFile= fr:forceReplace=",
        "Not supported by SluiceMQ.",
        _STATIC,
    ),
    _row(
        "remappingStaticTopic",
        "(c:clusters=|b:brokers=) t:topic=! mf:mapFile= fr:forceReplace=",
        "Not supported by SluiceMQ.",
        _STATIC,
    ),
    _row(
        "exportMetadata",
        "c:clusterName= b:brokerAddr= f:filePath= t:topic g:subscriptionGroup s:specialTopic",
        "Write topics and groups into a JSON file.",
        exports.export_metadata,
    ),
    _row(
        "exportConfigs",
        "c:clusterName=! f:filePath=",
        "Write settings into a JSON file.",
        exports.export_settings,
    ),
    _row(
        "exportMetrics",
        "c:clusterName=! f:filePath=",
        "Write the load of brokers into a JSON file.",
        exports.export_metrics,
    ),
    _row(
        "exportMetadataInRocksDB",
        "p:path=! t:configType=! j:jsonEnable=",
        "Not supported by SluiceMQ.",
        _ROCKSDB,
    ),
    _row(
        "exportPopRecord",
        "c:clusterName= b:brokerAddr= d:dryRun=",
        "Deliver popped, unacknowledged messages again.",
        exports.roll_back_pops,
    ),
    _row(
        "haStatus",
        "c:clusterName= b:brokerAddr= i:interval=",
        "Show the replication status of brokers.",
        brokers.show_replication,
    ),
    _row(
        "getSyncStateSet",
        "a:controllerAddress=! c:clusterName= b:brokerName= i:interval=",
        "Not supported by SluiceMQ.",
        _CONTROLLER,
    ),
    _row(
        "getBrokerEpoch",
        "(c:clusterName=|b:brokerName=) i:interval=",
        "Not supported by SluiceMQ.",
        _CONTROLLER,
    ),
    _row(
        "getControllerMetaData", "a:controllerAddress=!", "Not supported by SluiceMQ.", _CONTROLLER
    ),
    _row("getControllerConfig", "a:controllerAddress=!", "Not supported by SluiceMQ.", _CONTROLLER),
    _row(
        "updateControllerConfig",
        "a:controllerAddress=! k:key=! v:value=!",
        "Not supported by SluiceMQ.",
        _CONTROLLER,
    ),
    _row(
        "electMaster",
        "a:controllerAddress=! b:brokerId=! bn:brokerName=! c:clusterName=!",
        "Not supported by SluiceMQ.",
        _CONTROLLER,
    ),
    _row(
        "cleanBrokerMetadata",
        "a:controllerAddress=! b:brokerControllerIdsToClean= "
        "bn:brokerName=! c:clusterName= l:cleanLivingBroker",
        "Not supported by SluiceMQ.",
        _CONTROLLER,
    ),
    _row(
        "dumpCompactionLog",
        "f:file=",
        "Not supported by SluiceMQ.",
        "SluiceMQ has no compaction topics. Use sluice store dump for a store directory.",
    ),
    _row("getColdDataFlowCtrInfo", _TARGET, "Not supported by SluiceMQ.", _COLD),
    _row(
        "updateColdDataFlowCtrGroupConfig",
        f"{_TARGET} g:consumerGroup=! v:threshold=!",
        "Not supported by SluiceMQ.",
        _COLD,
    ),
    _row(
        "removeColdDataFlowCtrGroupConfig",
        f"{_TARGET} g:consumerGroup=!",
        "Not supported by SluiceMQ.",
        _COLD,
    ),
    _row(
        "setCommitLogReadAheadMode",
        f"{_TARGET} m:commitLogReadAheadMode=!",
        "Not supported by SluiceMQ.",
        "SluiceMQ reads ahead as much as each request needs. No setting is necessary.",
    ),
    _row(
        "createUser",
        f"{_REQUIRED_TARGET} u:username=! p:password=! t:userType=",
        "Not supported by SluiceMQ.",
        _USERS,
    ),
    _row(
        "updateUser",
        f"{_REQUIRED_TARGET} u:username=! (p:password=|t:userType=|s:userStatus=)",
        "Not supported by SluiceMQ.",
        _USERS,
    ),
    _row("deleteUser", f"{_REQUIRED_TARGET} u:username=!", "Not supported by SluiceMQ.", _USERS),
    _row("getUser", f"{_REQUIRED_TARGET} u:username=", "Not supported by SluiceMQ.", _USERS),
    _row("listUser", f"{_REQUIRED_TARGET} f:filter=", "Not supported by SluiceMQ.", _USERS),
    _row(
        "copyUser", "f:fromBroker=! t:toBroker=! u:usernames=", "Not supported by SluiceMQ.", _USERS
    ),
    _row(
        "createAcl",
        f"{_REQUIRED_TARGET} s:subject=! r:resources=! a:actions=! i:sourceIp= d:decision=!",
        "Not supported by SluiceMQ.",
        _USERS,
    ),
    _row(
        "updateAcl",
        f"{_REQUIRED_TARGET} s:subject=! r:resources=! a:actions=! d:decision=! i:sourceIp=",
        "Not supported by SluiceMQ.",
        _USERS,
    ),
    _row(
        "deleteAcl",
        f"{_REQUIRED_TARGET} s:subject=! r:resources=",
        "Not supported by SluiceMQ.",
        _USERS,
    ),
    _row("getAcl", f"{_REQUIRED_TARGET} s:subject=", "Not supported by SluiceMQ.", _USERS),
    _row(
        "listAcl",
        f"{_REQUIRED_TARGET} s:subject= r:resource=",
        "Not supported by SluiceMQ.",
        _USERS,
    ),
    _row(
        "copyAcl", "f:fromBroker=! t:toBroker=! s:subjects=", "Not supported by SluiceMQ.", _USERS
    ),
    _row(
        "rocksDBConfigToJson",
        "t:configType= p:configPath= e:exportFile= j:jsonEnable= "
        "n:nameserverAddr= c:cluster= b:brokerAddr=",
        "Not supported by SluiceMQ.",
        _ROCKSDB,
    ),
    _row(
        "checkRocksdbCqWriteProgress",
        "c:cluster=! n:nameserverAddr=! t:topic= cf:checkFrom=",
        "Not supported by SluiceMQ.",
        _ROCKSDB,
    ),
    _row(
        "switchTimerEngine",
        f"{_REQUIRED_TARGET} e:engineType=!",
        "Not supported by SluiceMQ.",
        "SluiceMQ has one engine for timed messages. Run sluice delay list to see what it holds.",
    ),
    _row(
        "getBrokerLiteInfo",
        "(b:brokerAddr=|c:cluster=) d:showDetail",
        "Not supported by SluiceMQ.",
        _LITE,
    ),
    _row("getParentTopicInfo", "p:parentTopic=!", "Not supported by SluiceMQ.", _LITE),
    _row(
        "getLiteTopicInfo",
        "p:parentTopic=! l:liteTopic=! s:showClientId",
        "Not supported by SluiceMQ.",
        _LITE,
    ),
    _row(
        "getLiteClientInfo",
        "p:parentTopic=! g:group=! c:clientId=! s:showDetail",
        "Not supported by SluiceMQ.",
        _LITE,
    ),
    _row(
        "getLiteGroupInfo",
        "p:parentTopic=! g:group=! l:liteTopic= k:topK=",
        "Not supported by SluiceMQ.",
        _LITE,
    ),
    _row(
        "updateAclConfig",
        f"{_REQUIRED_TARGET} a:accessKey=! s:secretKey=! w:whiteRemoteAddress= "
        "i:defaultTopicPerm= u:defaultGroupPerm= t:topicPerms= g:groupPerms= m:admin=",
        "Create or change an account.",
        accounts.update_account,
    ),
    _row(
        "deleteAclConfig",
        f"{_REQUIRED_TARGET} a:accessKey=!",
        "Delete an account.",
        accounts.delete_account,
        "deleteAccessConfig",
    ),
    _row(
        "updateGlobalWhiteAddr",
        f"{_REQUIRED_TARGET} g:globalWhiteRemoteAddresses=! p:aclFileFullPath=",
        "Set the addresses that need no signature.",
        accounts.set_white_addresses,
    ),
    _row(
        "clusterAclConfigVersion",
        _REQUIRED_TARGET,
        "Show the version of the access rules.",
        accounts.show_account_versions,
    ),
    _row(
        "getAclConfig",
        _REQUIRED_TARGET,
        "Show all accounts, with masked secret keys.",
        accounts.show_accounts,
        "getAccessConfigSubCommand",
    ),
    _row(
        "triggerLiteDispatch",
        "p:parentTopic=! g:group=! c:clientId= b:brokerName=",
        "Not supported by SluiceMQ.",
        _LITE,
    ),
)
