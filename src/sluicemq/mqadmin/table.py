"""The commands of mqadmin 5.5.0, and of 4.9.8 those for access rules: a row each with its name, its
flags as `commands` declares them, what it does.

A row with a text instead of a function is refused with it.
"""

from typing import Final

from sluicemq.mqadmin import accounts, brokers, exports, groups, messages, topics
from sluicemq.mqadmin.commands import Command, Function, parse_flags

_WHERE: Final = "b:brokerAddr= c:clusterName="
_ONE: Final = "(b:brokerAddr=|c:clusterName=)"
_CONTROLLER: Final = (
    "SluiceMQ has no controller: replicas agree among themselves. Use sluice cluster status, "
    "sluice cluster switch, sluice cluster elect."
)
_USERS: Final = (
    "SluiceMQ keeps accounts in plain_acl.yml, not users of ACL 2.0. Use updateAclConfig, "
    "deleteAclConfig, getAclConfig, or change the file; sluice acl check says what it allows."
)
_ROCKSDB: Final = "SluiceMQ keeps nothing in RocksDB. Use exportMetadata, or sluice store verify."
_STATIC: Final = (
    "SluiceMQ has no static topics. Use updateTopic with -o true: the number of queues stays while "
    "a broker is away."
)
_LITE: Final = (
    "SluiceMQ has no lite topics. Use a topic and a filter: sluice filter check says what it costs."
)
_COLD: Final = (
    "SluiceMQ does not slow down those who read old messages: each connection has its share. Use "
    "sluice group lag to see who is behind."
)
_CONTAINER: Final = "SluiceMQ has no broker containers. Start a broker: sluice broker."


def _row(name: str, flags: str, summary: str, what: Function | str, *aliases: str) -> Command:
    run, refusal = (None, what) if isinstance(what, str) else (what, "")
    return Command(name, parse_flags(flags), summary, run, refusal, aliases)


COMMANDS: Final[tuple[Command, ...]] = (
    _row("updateTopic", f"{_ONE} a:attributes= t:topic=! r:readQueueNums= w:writeQueueNums= "
         "p:perm= o:order= u:unit= s:hasUnitSub=", "Create or change a topic.",
         topics.update_topic),
    _row("updateTopicList", f"{_ONE} f:filename=!", "Create or change the topics of a JSON file.",
         topics.update_topic_list),
    _row("deleteTopic", "t:topic=! c:clusterName=!", "Delete a topic of a cluster.",
         topics.delete_topic),
    _row("updateSubGroup", f"{_WHERE} g:groupName=! s:consumeEnable= m:consumeFromMinEnable= "
         "d:consumeBroadcastEnable= o:consumeMessageOrderly= q:retryQueueNums= r:retryMaxTimes= "
         "p:groupRetryPolicy= i:brokerId= w:whichBrokerWhenConsumeSlowly= "
         "a:notifyConsumerIdsChanged= :attributes=", "Create or change a consumer group.",
         groups.update_group),
    _row("updateSubGroupList", f"{_ONE} f:filename=!", "Create or change groups of a JSON file.",
         groups.update_group_list),
    _row("setConsumeMode", f"{_WHERE} t:topicName=! g:groupName=! m:mode=! q:popShareQueueNum=",
         "Let a group read a topic by PULL or by POP.", groups.set_consume_mode),
    _row("deleteSubGroup", f"{_WHERE} g:groupName=! r:removeOffset=", "Delete a consumer group.",
         groups.delete_group),
    _row("updateBrokerConfig", f"{_WHERE} a:updateAllBroker= k:key=! v:value=!",
         "Change a setting of brokers.", brokers.update_broker_settings),
    _row("updateTopicPerm", f"{_WHERE} t:topic=! p:perm=!", "Change the permission of a topic.",
         topics.update_topic_perm),
    _row("topicRoute", "t:topic=! l:list", "Show the brokers and queues of a topic.",
         topics.topic_route),
    _row("topicStatus", "t:topic=! c:cluster=~", "Show the offsets of a topic's queues.",
         topics.topic_status),
    _row("topicClusterList", "t:topic=!", "Show the clusters that have a topic.",
         topics.topic_cluster_list),
    _row("addBroker", "c:brokerContainerAddr=! b:brokerConfigPath=!", "Not here.", _CONTAINER),
    _row("removeBroker", "c:brokerContainerAddr=! b:brokerIdentity=!", "Not here.", _CONTAINER),
    _row("resetMasterFlushOffset", "b:brokerAddr= o:offset=", "Tell a slave its master's offset.",
         brokers.reset_flushed),
    _row("brokerStatus", _ONE, "Show all counters of brokers.", brokers.broker_status),
    _row("queryMsgById", "t:topic=! i:msgId=! g:consumerGroup= d:clientId= s:sendMessage= "
         "u:unitName=~ f:bodyFormat= c:cluster=~", "Show messages by their ids.",
         messages.query_by_id),
    _row("queryMsgByKey", "t:topic=! k:msgKey=! b:beginTimestamp= e:endTimestamp= m:maxNum= "
         "c:cluster=~ p:keyType= l:lastKey=~", "List messages by a key.", messages.query_by_key),
    _row("queryMsgByUniqueKey", "i:msgId=! g:consumerGroup= d:clientId= t:topic=! a:showAll "
         "c:cluster=~ s:startTime= e:endTime=", "Show a message by its producer's id.",
         messages.query_by_unique_key),
    _row("queryMsgByOffset", "t:topic=! b:brokerName=! i:queueId=! o:offset=! f:bodyFormat= "
         "r:routeTopic=~", "Show the message at a place.", messages.query_by_offset),
    _row("queryMsgTraceById", "i:msgId=! t:traceTopic= b:beginTimestamp= e:endTimestamp= c:maxNum=",
         "Show what clients traced of a message.", messages.query_trace),
    _row("printMsg", "t:topic=! c:charsetName= s:subExpression= b:beginTimestamp= e:endTimestamp= "
         "d:printBody= l:lmqParentTopic=~", "Print the messages of a topic.",
         messages.print_messages),
    _row("printMsgByQueue", "t:topic=! a:brokerName=! i:queueId=! c:charsetName= s:subExpression= "
         "b:beginTimestamp= e:endTimestamp= p:print_msg= d:printBody= f:calculate=",
         "Print the messages of a queue, or count their tags.", messages.print_by_queue),
    _row("sendMsgStatus", "b:brokerName=! s:messageSize= c:count=",
         "Send to a broker's own topic, and show how long it takes.", messages.send_status),
    _row("brokerConsumeStats", "b:brokerAddr=! t:timeoutMillis= l:level= o:order=",
         "Show how far all groups are at a broker.", brokers.broker_consume_stats),
    _row("producerConnection", "g:producerGroup=! t:topic=!", "Show the producers of a group.",
         groups.producer_connection),
    _row("consumerConnection", "g:consumerGroup=! b:brokerAddr=",
         "Show the members and subscriptions of a group.", groups.consumer_connection),
    _row("consumerProgress", "g:groupName= t:topicName= s:showClientIP= c:cluster=~",
         "Show how far groups are.", groups.consumer_progress),
    _row("consumerStatus", "g:consumerGroup=! i:clientId= b:brokerAddr= s:jstack",
         "Show what the members of a group do.", groups.consumer_status),
    _row("cloneGroupOffset", "s:srcGroup=! d:destGroup=! t:topic=! o:offline=",
         "Give a group the offsets of another.", groups.clone_offset),
    _row("producer", "b:broker=!", "Show all producers of a broker.", groups.producers),
    _row("clusterList", "m:moreStats i:interval= c:clusterName=", "List brokers with their rates.",
         brokers.cluster_list),
    _row("topicList", "c:clusterModel", "List all topics.", topics.topic_list),
    _row("updateKvConfig", "s:namespace=! k:key=! v:value=!", "Keep a value at the name servers.",
         brokers.put_value),
    _row("deleteKvConfig", "s:namespace=! k:key=!", "Delete a value of the name servers.",
         brokers.delete_value),
    _row("wipeWritePerm", "b:brokerName=!", "Let producers choose a broker no longer.",
         brokers.wipe_write_permission),
    _row("addWritePerm", "b:brokerName=!", "Let producers choose a broker again.",
         brokers.add_write_permission),
    _row("resetOffsetByTime", "g:group=! t:topic=! s:timestamp=! f:force= c:cluster=~ b:broker= "
         "q:queue= o:offset=", "Send a group to a time.", groups.reset_offset),
    _row("skipAccumulatedMessage", "g:group=! t:topic=! f:force= c:cluster=~",
         "Send a group behind the last message.", groups.skip_accumulated),
    _row("updateOrderConf", "t:topic=! v:orderConf= m:method=!",
         "Show, set or delete the strict order of a topic.", topics.update_order_conf),
    _row("cleanExpiredCQ", "b:brokerAddr= c:cluster=", "Delete expired files of queues.",
         brokers.clean("queues")),
    _row("deleteExpiredCommitLog", "n:namesrvAddr= b:brokerAddr= c:cluster=",
         "Delete expired files of the log.", brokers.clean("log")),
    _row("cleanUnusedTopic", "b:brokerAddr= c:cluster=", "Delete queues of topics that are gone.",
         brokers.clean("topics")),
    _row("startMonitoring", "", "Not here.",
         "SluiceMQ is watched by its metrics. Use sluice group lag, or scrape the brokers."),
    _row("statsAll", "a:activeTopic t:topic=", "Show what comes and goes by topic and group.",
         brokers.statistics),
    _row("allocateMQ", "t:topic=! i:ipList=!", "Show how consumers would share queues.",
         topics.allocate_mq),
    _row("checkMsgSendRT", "t:topic=! a:amount= s:size=", "Measure how long sends take.",
         messages.check_send_time),
    _row("clusterRT", "a:amount= s:size= c:cluster= p:print_log= m:machine_room= i:interval=",
         "Measure how long sends to each broker take, until stopped.", messages.cluster_send_time),
    _row("getNamesrvConfig", "", "Show the settings of name servers.",
         brokers.name_server_settings),
    _row("updateNamesrvConfig", "k:key=! v:value=!", "Change a setting of name servers.",
         brokers.update_name_server_settings),
    _row("getBrokerConfig", _ONE, "Show the settings of brokers.", brokers.broker_settings),
    _row("getConsumerConfig", "g:groupName=!", "Show the settings of a group.",
         groups.group_settings),
    _row("queryCq", "t:topic=! q:queue=! i:index=! c:count= b:broker= g:consumer=",
         "Show entries of a queue.", messages.query_queue),
    _row("sendMessage", "t:topic=! p:body=! k:key= c:tags= b:broker= i:qid= m:msgTraceEnable=~",
         "Send a message.", messages.send),
    _row("consumeMessage", "t:topic=! b:brokerName= i:queueId= o:offset= g:consumerGroup= "
         "s:beginTimestamp= e:endTimestamp= c:MessageNumber=", "Print the oldest messages.",
         messages.consume),
    _row("updateStaticTopic", "(c:clusters=|b:brokers=) t:topic=! qn:totalQueueNum=! mf:mapFile= "
         "fr:forceReplace=", "Not here.", _STATIC),
    _row("remappingStaticTopic", "(c:clusters=|b:brokers=) t:topic=! mf:mapFile= fr:forceReplace=",
         "Not here.", _STATIC),
    _row("exportMetadata", "c:clusterName= b:brokerAddr= f:filePath= t:topic g:subscriptionGroup "
         "s:specialTopic", "Write topics and groups into a JSON file.", exports.metadata),
    _row("exportConfigs", "c:clusterName=! f:filePath=", "Write settings into a JSON file.",
         exports.settings),
    _row("exportMetrics", "c:clusterName=! f:filePath=", "Write numbers into a JSON file.",
         exports.metrics),
    _row("exportMetadataInRocksDB", "p:path=! t:configType=! j:jsonEnable=", "Not here.", _ROCKSDB),
    _row("exportPopRecord", "c:clusterName= b:brokerAddr= d:dryRun=",
         "Bring back what is popped.", exports.pops),
    _row("haStatus", "c:clusterName= b:brokerAddr= i:interval=", "Show how slaves keep up.",
         brokers.replication),
    _row("getSyncStateSet", "a:controllerAddress=! c:clusterName= b:brokerName= i:interval=",
         "Not here.", _CONTROLLER),
    _row("getBrokerEpoch", "(c:clusterName=|b:brokerName=) i:interval=", "Not here.", _CONTROLLER),
    _row("getControllerMetaData", "a:controllerAddress=!", "Not here.", _CONTROLLER),
    _row("getControllerConfig", "a:controllerAddress=!", "Not here.", _CONTROLLER),
    _row("updateControllerConfig", "a:controllerAddress=! k:key=! v:value=!", "Not here.",
         _CONTROLLER),
    _row("electMaster", "a:controllerAddress=! b:brokerId=! bn:brokerName=! c:clusterName=!",
         "Not here.", _CONTROLLER),
    _row("cleanBrokerMetadata", "a:controllerAddress=! b:brokerControllerIdsToClean= "
         "bn:brokerName=! c:clusterName= l:cleanLivingBroker", "Not here.", _CONTROLLER),
    _row("dumpCompactionLog", "f:file=", "Not here.",
         "SluiceMQ has no compaction topics. Use sluice store dump for a store directory."),
    _row("getColdDataFlowCtrInfo", _WHERE, "Not here.", _COLD),
    _row("updateColdDataFlowCtrGroupConfig", f"{_WHERE} g:consumerGroup=! v:threshold=!",
         "Not here.", _COLD),
    _row("removeColdDataFlowCtrGroupConfig", f"{_WHERE} g:consumerGroup=!", "Not here.", _COLD),
    _row("setCommitLogReadAheadMode", f"{_WHERE} m:commitLogReadAheadMode=!", "Not here.",
         "SluiceMQ reads ahead as far as a request wants. There is nothing to set."),
    _row("createUser", f"{_ONE} u:username=! p:password=! t:userType=", "Not here.", _USERS),
    _row("updateUser", f"{_ONE} u:username=! (p:password=|t:userType=|s:userStatus=)", "Not here.",
         _USERS),
    _row("deleteUser", f"{_ONE} u:username=!", "Not here.", _USERS),
    _row("getUser", f"{_ONE} u:username=", "Not here.", _USERS),
    _row("listUser", f"{_ONE} f:filter=", "Not here.", _USERS),
    _row("copyUser", "f:fromBroker=! t:toBroker=! u:usernames=", "Not here.", _USERS),
    _row("createAcl", f"{_ONE} s:subject=! r:resources=! a:actions=! i:sourceIp= d:decision=!",
         "Not here.", _USERS),
    _row("updateAcl", f"{_ONE} s:subject=! r:resources=! a:actions=! d:decision=! i:sourceIp=",
         "Not here.", _USERS),
    _row("deleteAcl", f"{_ONE} s:subject=! r:resources=", "Not here.", _USERS),
    _row("getAcl", f"{_ONE} s:subject=", "Not here.", _USERS),
    _row("listAcl", f"{_ONE} s:subject= r:resource=", "Not here.", _USERS),
    _row("copyAcl", "f:fromBroker=! t:toBroker=! s:subjects=", "Not here.", _USERS),
    _row("rocksDBConfigToJson", "t:configType= p:configPath= e:exportFile= j:jsonEnable= "
         "n:nameserverAddr= c:cluster= b:brokerAddr=", "Not here.", _ROCKSDB),
    _row("checkRocksdbCqWriteProgress", "c:cluster=! n:nameserverAddr=! t:topic= cf:checkFrom=",
         "Not here.", _ROCKSDB),
    _row("switchTimerEngine", f"{_ONE} e:engineType=!", "Not here.",
         "SluiceMQ has one engine for timed messages. Use sluice delay list to see what waits."),
    _row("getBrokerLiteInfo", "(b:brokerAddr=|c:cluster=) d:showDetail", "Not here.", _LITE),
    _row("getParentTopicInfo", "p:parentTopic=!", "Not here.", _LITE),
    _row("getLiteTopicInfo", "p:parentTopic=! l:liteTopic=! s:showClientId", "Not here.", _LITE),
    _row("getLiteClientInfo", "p:parentTopic=! g:group=! c:clientId=! s:showDetail", "Not here.",
         _LITE),
    _row("getLiteGroupInfo", "p:parentTopic=! g:group=! l:liteTopic= k:topK=", "Not here.", _LITE),
    _row("updateAclConfig", f"{_ONE} a:accessKey=! s:secretKey=! w:whiteRemoteAddress= "
         "i:defaultTopicPerm= u:defaultGroupPerm= t:topicPerms= g:groupPerms= m:admin=",
         "Create or change an account.", accounts.update),
    _row("deleteAclConfig", f"{_ONE} a:accessKey=!", "Delete an account.", accounts.delete,
         "deleteAccessConfig"),
    _row("updateGlobalWhiteAddr", f"{_ONE} g:globalWhiteRemoteAddresses=! p:aclFileFullPath=",
         "Set who needs no signature.", accounts.white_addresses),
    _row("clusterAclConfigVersion", _ONE, "Show which edition of the rules is in force.",
         accounts.versions),
    _row("getAclConfig", _ONE, "Show all accounts, without their secrets.", accounts.show,
         "getAccessConfigSubCommand"),
    _row("triggerLiteDispatch", "p:parentTopic=! g:group=! c:clientId= b:brokerName=", "Not here.",
         _LITE),
)  # fmt: skip
