"""A script of mqadmin commands, and a table of the expected differences of their output.

The script is run in three ways: RocketMQ's tool against a Java broker, RocketMQ's tool against
SluiceMQ, and `sluice mqadmin` against SluiceMQ. Each run begins with the same cluster: the topic
`Tscript` with four queues contains `MESSAGES` messages, a producer of the group `Pscript` stays
connected, and a push consumer of `Gscript`, which also stays connected, has consumed the messages.
Then the lines of `COMMANDS` are run in their order. A command may change what later commands print.
Words in braces are replaced by the values in `Places`.
"""

import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from peer.clusters import Cluster, java_home
from peer.drivers import JVM_FLAGS, Driver, java_driver
from peer.toolchain import HERE

TOPIC: Final = "Tscript"
GROUP: Final = "Gscript"
MESSAGES: Final = 12


@dataclass(frozen=True)
class Places:
    """The values of the words in braces. `id` and `offset_id` are the two ids of one message."""

    name_server: str
    broker: str
    directory: str
    id: str
    offset_id: str


FILES: Final = {
    "topics.json": '[{"topicName":"Tlist1","readQueueNums":3,"writeQueueNums":3,"perm":6},'
    '{"topicName":"Tlist2","readQueueNums":2,"writeQueueNums":2,"perm":6}]',
    "groups.json": '[{"groupName":"Glist1","retryMaxTimes":3},{"groupName":"Glist2"}]',
}
"""The files in {directory}: name -> content."""

COMMANDS: Final = tuple("""
updateTopic -b {broker} -t Tbroker -r 3 -w 3
updateTopic -c DefaultCluster -t Tcluster -r 2 -w 2 -p 6
updateTopic -c DefaultCluster -t Tfifo -r 2 -w 2 -a +message.type=FIFO
updateTopic -b {broker} -t Torder -r 4 -w 4 -o true
updateTopic -b {broker} -t Tbad -r 1 -w 1 -a +no.such=1
updateTopic -b {broker} -t a/b -r 1 -w 1
updateTopic -b {broker}
updateTopicList -b {broker} -f {directory}/topics.json
updateTopicPerm -c DefaultCluster -t Tcluster -p 4
updateTopicPerm -b {broker} -t Tcluster -p 6
updateTopicPerm -b {broker} -t Tcluster -p 6
topicList
topicList -c
topicRoute -t Tscript
topicRoute -t Tscript -l
topicRoute -t Tnowhere
topicClusterList -t Tscript
topicStatus -t Tscript
topicStatus -t Tfifo
topicStatus -t Tnowhere
updateOrderConf -t Torder -m get
updateOrderConf -t Torder -v broker-a:4 -m put
updateOrderConf -t Torder -m get
updateOrderConf -t Torder -m delete
allocateMQ -t Tscript -i 10.0.0.1,10.0.0.2
updateSubGroup -b {broker} -g Gbroker -r 3
updateSubGroup -c DefaultCluster -g Gcluster -s true -m true -d true -o true -q 1 -r 5
updateSubGroup -b {broker} -g Gpolicy -p {{"type":"EXPONENTIAL"}}
updateSubGroupList -b {broker} -f {directory}/groups.json
setConsumeMode -c DefaultCluster -t Tscript -g Gmode -m POP -q 2
setConsumeMode -b {broker} -t Tscript -g Gmode -m PULL
getConsumerConfig -g Gcluster
getConsumerConfig -g Gnowhere
clusterList
clusterList -m
clusterList -c DefaultCluster
brokerStatus -b {broker}
brokerStatus -c DefaultCluster
brokerConsumeStats -b {broker}
brokerConsumeStats -b {broker} -o true
brokerConsumeStats -b {broker} -l 100
statsAll
statsAll -a
statsAll -t Tscript
consumerProgress
consumerProgress -g Gscript
consumerProgress -g Gscript -s true
consumerProgress -g Gscript -t Tscript
consumerProgress -g Gnowhere
consumerStatus -g Gscript
consumerStatus -g Gscript -i 127.0.0.1@script
consumerStatus -g Gnowhere
consumerConnection -g Gscript
consumerConnection -g Gscript -b {broker}
consumerConnection -g Gnowhere
producerConnection -g Pscript -t Tscript
producerConnection -g Pnowhere -t Tscript
producer -b {broker}
getBrokerConfig -b {broker}
getBrokerConfig -c DefaultCluster
updateBrokerConfig -b {broker} -k fileReservedTime -v 48
updateBrokerConfig -c DefaultCluster -k fileReservedTime -v 72
updateBrokerConfig -b {broker} -k brokerConfigPath -v /tmp/x
updateBrokerConfig -b {broker} -k fileReservedTime -v soon
getNamesrvConfig
updateNamesrvConfig -k enableTopicList -v true
updateNamesrvConfig -k kvConfigPath -v /tmp/x
updateNamesrvConfig -k configStorePath -v /tmp/x
updateKvConfig -s Nscript -k key -v value
deleteKvConfig -s Nscript -k key
wipeWritePerm -b broker-a
addWritePerm -b broker-a
wipeWritePerm -b broker-nowhere
queryMsgById -t Tscript -i {offset_id}
queryMsgById -t Tscript -i {offset_id} -g Gscript -d 127.0.0.1@script
queryMsgById -t Tscript -i {id}
queryMsgByKey -t Tscript -k key3
queryMsgByKey -t Tscript -k nowhere
queryMsgByUniqueKey -t Tscript -i {id}
queryMsgByUniqueKey -t Tscript -i {id} -a
queryMsgByUniqueKey -t Tscript -i {id} -g Gscript -d 127.0.0.1@script
queryMsgByOffset -t Tscript -b broker-a -i 0 -o 0
queryMsgByOffset -t Tscript -b broker-a -i 0 -o 4711
queryMsgTraceById -i {id}
printMsg -t Tscript -d true
printMsg -t Tscript -s tag0
printMsgByQueue -t Tscript -a broker-a -i 1 -p true -d true
printMsgByQueue -t Tscript -a broker-a -i 1 -f true
queryCq -t Tscript -q 0 -i 0 -c 3 -b {broker}
queryCq -t Tscript -q 0 -i 0 -c 3 -b {broker} -g Gscript
queryCq -t Tscript -q 0 -i 0 -c 3 -b {broker} -g Gnowhere
consumeMessage -t Tscript -b broker-a -i 2 -o 0 -g Gpeek -c 3
consumeMessage -t Tscript -g Gpeek -c 4
sendMessage -t Tbroker -p hello -k one -c tag -b broker-a -i 0
sendMessage -t Tbroker -p hello
sendMsgStatus -b broker-a -s 16 -c 2
checkMsgSendRT -t Tbroker -a 3 -s 16
resetOffsetByTime -g Goffline -t Tscript -s -1
resetOffsetByTime -g Goffline -t Tscript -s 0
resetOffsetByTime -g Goffline -t Tscript -s now -f true
resetOffsetByTime -g Goffline -t Tscript -s -1 -b broker-a -q 0 -o 1
resetOffsetByTime -g Goffline -t Tnowhere -s -1
resetOffsetByTime -g Gscript -t Tscript -s 0
skipAccumulatedMessage -g Goffline -t Tscript
cloneGroupOffset -s Gscript -d Gbroker -t Tscript -o true
cleanExpiredCQ -b {broker}
cleanExpiredCQ -c DefaultCluster
cleanUnusedTopic -b {broker}
cleanUnusedTopic -c DefaultCluster
deleteExpiredCommitLog -b {broker}
deleteExpiredCommitLog -c DefaultCluster
exportMetadata -c DefaultCluster -f {directory}
exportMetadata -b {broker} -t -f {directory}
exportMetadata -b {broker} -g -f {directory}
exportConfigs -c DefaultCluster -f {directory}
exportMetrics -c DefaultCluster -f {directory}
exportPopRecord -b {broker} -d true
exportMetadataInRocksDB -p {directory}/nothing -t topics
rocksDBConfigToJson -b {broker} -t topics
checkRocksdbCqWriteProgress -c DefaultCluster -n {name_server} -t Tscript
haStatus -b {broker}
haStatus -c DefaultCluster
getBrokerEpoch -b broker-a
getBrokerEpoch -c DefaultCluster
getSyncStateSet -a {name_server} -b broker-a
getControllerMetaData -a {name_server}
getControllerConfig -a {name_server}
updateControllerConfig -a {name_server} -k a -v b
electMaster -a {name_server} -b 0 -bn broker-a -c DefaultCluster
cleanBrokerMetadata -a {name_server} -bn broker-a -c DefaultCluster -l
resetMasterFlushOffset -b {broker} -o 0
addBroker -c {broker} -b {directory}/broker.conf
removeBroker -c {broker} -b DefaultCluster:broker-a:0
dumpCompactionLog -f {directory}/nothing
getColdDataFlowCtrInfo -b {broker}
updateColdDataFlowCtrGroupConfig -b {broker} -g Gscript -v 1048576
removeColdDataFlowCtrGroupConfig -b {broker} -g Gscript
setCommitLogReadAheadMode -b {broker} -m 1
switchTimerEngine -b {broker} -e F
createUser -b {broker} -u alice -p secret -t Normal
updateUser -b {broker} -u alice -p secret2
getUser -b {broker} -u alice
listUser -b {broker}
deleteUser -b {broker} -u alice
copyUser -f {broker} -t {broker} -u alice
createAcl -b {broker} -s User:alice -r Topic:Tscript -a Pub -d Allow
updateAcl -b {broker} -s User:alice -r Topic:Tscript -a Sub -d Allow
getAcl -b {broker} -s User:alice
listAcl -b {broker}
deleteAcl -b {broker} -s User:alice
copyAcl -f {broker} -t {broker} -s User:alice
clusterAclConfigVersion -b {broker}
getAclConfig -b {broker}
updateAclConfig -b {broker} -a account9 -s secret9999
deleteAclConfig -b {broker} -a account9
updateGlobalWhiteAddr -b {broker} -g 10.0.0.9
getBrokerLiteInfo -b {broker}
getParentTopicInfo -p Tscript
getLiteTopicInfo -p Tscript -l lite1
getLiteClientInfo -p Tscript -g Gscript -c 127.0.0.1@script
getLiteGroupInfo -p Tscript -g Gscript
triggerLiteDispatch -p Tscript -g Gscript
updateStaticTopic -t Tstatic -qn 4 -b broker-a
remappingStaticTopic -t Tstatic -b broker-a
deleteTopic -c DefaultCluster -t Tcluster
deleteTopic -c DefaultCluster -t Tnowhere
deleteSubGroup -b {broker} -g Gbroker -r true
deleteSubGroup -c DefaultCluster -g Gcluster
topicList
noSuchCommand
""".strip().splitlines())  # fmt: skip

LEFT_OUT: Final = {
    "clusterRT": "sends until it is interrupted; checkMsgSendRT sends in the same way",
    "startMonitoring": "runs until it is interrupted, and calls consumerStatus and the like",
}
UNORDERED: Final = {
    "topicList", "statsAll", "brokerConsumeStats", "getBrokerConfig", "getNamesrvConfig",
    "producer", "consumerProgress", "consumerStatus", "brokerStatus", "allocateMQ",
    "checkMsgSendRT", "printMsg", "resetOffsetByTime",
}  # fmt: skip
"""Commands whose lines have the order of a hash table. They are sorted before they are compared."""

_NORMAL: Final = tuple(
    (re.compile(pattern, re.MULTILINE | re.IGNORECASE), name)
    for pattern, name in (
        # the lines of a stack trace in the tool
        (r"^\s+(at .*|\.\.\. \d+ (more|common frames omitted))\n", ""),
        (r"@[0-9a-f]{6,8}\b", "@HASH"),
        (r"\$\$Lambda\$?\d*/(0x)?[0-9a-f]+", "$$Lambda"),
        (r"\d{4}-\d\d-\d\d[ T,]\d\d:\d\d:\d\d(?:[.,:]\d+)?", "TIME"),
        (r"\b(20\d{12,15}|1[5-9]\d{11})\b", "TIME"),
        (r"\b([0-9A-F]{32}|[0-9A-F]{56})\b", "ID"),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"\b\d+ ?(ms|us)\b", r"DURATION \1"),
        (r"\b(true|false) +\d+ *$", r"\1 DURATION"),
        (r"(CommitLogMaxOffset\W+)\d+", r"\1SIZE"),
        (r"(?<![\d.])\d+\.\d+(e-?\d+)?(?![\d.])", "RATE"),
        (r"[ \t]+", " "),
        (r"^broker-a \d+ SEND_OK", "broker-a QUEUE SEND_OK"),  # the sender selects the queue
        (r"spentTimeMills=\d+", "spentTimeMills=DURATION"),
        (r"\b\d+-\d+\((?=RATEw)", "BEHIND("),  # the lag of the timer at this moment
        # a group has its retry topic's offsets some seconds after it has joined
        (r"^%RETRY%\S+ broker-a .*\n?", ""),
        (r" *\n+", "\n"),
    )
)


def words_of(line: str, places: Places) -> list[str]:
    """Return the arguments of a line of the script."""
    return shlex.split(line.format(**asdict(places)).replace('"', '\\"'))


def normalised(text: str, directory: str = "") -> str:
    """Return the output without addresses, times, rates, ids and widths of columns.

    They differ from run to run. The path `directory` is replaced, too.
    """
    if directory:
        text = text.replace(directory, "DIRECTORY")
    for pattern, name in _NORMAL:
        text = pattern.sub(name, text)
    return text.strip()


class Excuse(NamedTuple):
    """The allowed differences of a call's output, and their reason. All else is compared.

    `lines` matches whole lines that are ignored. Of the texts that a pattern of `values` matches,
    only the groups of the pattern are compared. With `is_keyed`, lines have the form `name = value`
    or `name : value`, and only names that are on both sides are compared.
    """

    reason: str
    lines: str = "(?!)"
    values: tuple[str, ...] = ()
    is_keyed: bool = False

    def reduced(self, text: str, other: str) -> str:
        """Return the part of `text` to compare with `other`, the output of the other side."""
        names = {_name_of(line) for line in other.splitlines()}
        kept = [
            line
            for line in text.splitlines()
            if not re.fullmatch(self.lines, line) and (not self.is_keyed or _name_of(line) in names)
        ]
        text = "\n".join(kept)
        for pattern in self.values:
            text = re.sub(
                pattern, lambda found: "…".join(map(str, found.groups())), text, flags=re.MULTILINE
            )
        return text


def _name_of(line: str) -> str:
    return re.split(r" ?[=:]", line)[0]


_OWN_TOPICS = "RocketMQ 5.5 has system topics for RocksDB; SluiceMQ has no static topics"
_TOPIC_LINES = r"(DefaultCluster )?(RMQ_SYS_ROCKSDB_TRANS_(OP_)?HALF_TOPIC|Tstatic)( .*)?"
_TOPICS = Excuse(_OWN_TOPICS, _TOPIC_LINES)
_COUNTED = (
    "counts at that moment: they are sampled every 10 s, and traces follow their messages later"
)
_TRACES = "RMQ_SYS_TRACE_TOPIC .*"
_SENT_READ = (r"^(Tscript Gscript 0 RATE RATE) \d+ \d+$",)
_VERSION = Excuse(
    "the version whose protocol the broker supports; counts and sizes at that moment", values=(
        r"\bV5_\d_\d\b", r"^(DefaultCluster broker-a \d+ \d+) \d+ \d+$",
    ),
)  # fmt: skip
_RUNTIME = Excuse(
    "the version whose protocol the broker supports; each broker has some counters that the other "
    "has not; times, rates and sizes at that moment", is_keyed=True, values=(
        r"\bV5_\d_\d\b",
        r"((?:get\w+|put)Tps :) RATE(?: RATE RATE)?$",  # three when it has run for a while
        r"((?:put|get)MessageEntireTimeMax :) \d+$",
        r"(putMessageDistributeTime :) .*$",  # null before the first of its periods is over
        r"((?:msg(?:Put|Get)TotalTodayNow|putMessageTimesTotal|putMessageSizeTotal) :) \d+$",
        r"(remainHowManyDataToFlush :) .*$",
        r"(\w+Queue(?:Size|HeadWaitTimeMills) :) \d+$",
        r"(timer(?:(?:Read|Offset)Behind|CongestNum) :) \d+$",
        r"(runtime :) \[ 0 days, 0 hours, \d minutes, \d+ seconds \]$",
    ),
)  # fmt: skip
_SETTINGS = Excuse(
    "each server shows its own settings; [these of RocketMQ](reference/ignored-settings.md) have "
    "no effect in SluiceMQ. These differ in both: ports, paths, options of the test, a lower "
    "diskMaxUsedSpaceRatio, a shorter haMaxTimeSlaveNotCatchup, TLS only if configured, and values "
    "that are not configured, which are empty in SluiceMQ",
    is_keyed=True, values=(
        r"^(listenPort|metricsPromExporterPort|configStorePath|kvConfigPath|diskMaxUsedSpaceRatio|"
        r"mappedFileSizeCommitLog|metricsExporterType|timerFlushIntervalMs|useTLS|brokerIP[12]|"
        r"haListenPort|inSyncReplicas|haMaxTimeSlaveNotCatchup) =.*$",
    ),
)  # fmt: skip
EXPLAINED: Final[Mapping[str, Excuse]] = {
    "updateTopic -b {broker} -t Tbad": Excuse(
        "the same code; SluiceMQ adds the list of attributes",
        values=(r"(unsupported key: no\.such)(?:\. The attributes are [a-z., ]+\.)?$",),
    ),
    "updateTopic -b {broker} -t a/b": Excuse(
        "5.5.0 names the topic in the error, 5.3.3 does not",
        values=(r"(The specified topic)(?:: a/b,)? contains",),
    ),
    "topicList": _TOPICS,
    "clusterList": _VERSION,
    "brokerStatus": _RUNTIME,
    "statsAll$": Excuse(
        f"{_OWN_TOPICS}; {_COUNTED}", rf"{_TOPIC_LINES}|{_TRACES}", values=_SENT_READ
    ),
    "statsAll -a": Excuse(_COUNTED, rf"{_TRACES}|Tscript Gscript 0 RATE RATE \d+ \d+"),
    "statsAll -t": Excuse(_COUNTED, values=_SENT_READ),
    "consumerProgress$": Excuse(
        _COUNTED, values=(r"^(Gscript 1 V\d_\d_\d PUSH CLUSTERING) \d+ (\d+)$",)
    ),
    "getBrokerConfig": _SETTINGS,
    "getNamesrvConfig": _SETTINGS,
    "updateBrokerConfig -b {broker} -k fileReservedTime -v soon": Excuse(
        "RocketMQ reports success and changes nothing; SluiceMQ rejects an invalid value",
        r"update broker config success, ADDRESS|.*UpdateBrokerConfigSubCommand command failed|"
        r"Caused by: .* CODE: 1 DESC: fileReservedTime = soon is not valid\. .*|For more .*",
    ),
    "wipeWritePerm -b broker-a": _TOPICS._replace(values=(r"( OK,) \d+$",)),
    "addWritePerm": _TOPICS._replace(values=(r"( OK,) \d+$",)),
    "queryCq": Excuse(
        "eval says whether the filter matches the message; RocketMQ evaluates it only with bit "
        "maps, else it shows false", values=(r"\beval=(?:true|false)",),
    ),
    "remappingStaticTopic": Excuse(
        "SluiceMQ has no static topics, so none can be remapped",
        r"The old mapping data is written to file .*|.*RemappingStaticTopicSubCommand command "
        r"failed|Caused by: .* No topic route to do the remapping",
    ),
}  # fmt: skip
"""The beginnings of lines of `COMMANDS` whose outcome may differ -> the allowed differences.

A `$` is the end of a line.
"""
_GROUPS_OF_TOPIC = Excuse(
    "5.3.3 lists the topic itself among the groups of a topic (300)",
    r"(DefaultCluster )?Tscript Tscript( .*)?",
    values=(r"\n?MessageTrack \[consumerGroup=Tscript,.*\nSee https://.*",),
)
_MESSAGES = Excuse(
    "brokers of 5.x store TRACE_ON, MSG_REGION and WAIT with a message, which makes it longer",
    values=(
        r"\b(CommitLog Offset: |storeSize=|commitLogOffset=|physicOffset=|physicSize=)\d+",
        r"\b(?:TRACE_ON=true|MSG_REGION=DefaultRegion|WAIT=true)(?:, )?",
        r"(, )(?=\})",
    ),
)  # fmt: skip
_NEW_TOPICS = Excuse(
    "5.x has more system topics, and lists those of transactions",
    r"(DefaultCluster )?(RMQ_SYS_TRANS_(OP_)?HALF_TOPIC|rmq_sys_\w+(-a)?)( .*)?",
)
_CODE_4 = "4.9 has other codes and texts"
_NO_GROUP_4 = Excuse(
    _CODE_4, values=(
        r"CODE: (?:1 DESC: THe consumer group <Goffline> not exist|26 DESC: Group Goffline does not"
        r" exist)",
    ),
)  # fmt: skip
_NO_RULES_4 = Excuse(
    "without aclEnable 4.9 fails or does not answer; SluiceMQ says why",
    r"Caused by: .*|For more .*",
)
OLDER: Final[Mapping[str, Mapping[str, Excuse]]] = {
    "5.3.3": dict.fromkeys(("topicList -c", "statsAll", "queryMsgBy"), _GROUPS_OF_TOPIC),
    "4.9.7": {
        "": Excuse(
            "the pages that an error points to have moved",
            values=(r"See https?://\S+ for further details", r"visit the url, https?://\S+"),
        ),
        "topicList": _NEW_TOPICS,
        "statsAll": _NEW_TOPICS,
        "updateTopic -b {broker} -t a/b": Excuse(
            _CODE_4, values=(r"CODE: (?:1|29) (DESC: The specified topic)",)
        ),
        "clusterList": Excuse("versions", values=(r"\bV\d_\d_\d\b",)),
        "brokerStatus": Excuse(
            "versions; 5.x reports the earliest message at once", values=(
                r"\bV\d_\d_\d\b", r"(brokerVersion :) \d+",
                r"(earliestMessageTimeStamp :) (?:-1|TIME)", r"(putTps :).*",
            ),
        ),
        "getBrokerConfig": Excuse(
            "5.x has other defaults", values=(
                r"^(registerBrokerTimeoutMills|transactionCheckInterval) = \d+",
            ),
        ),
        "updateBrokerConfig -b {broker} -k brokerConfigPath": Excuse(
            "in 4.9 a tool may change every setting",
            r"update broker config success, ADDRESS|.*UpdateBrokerConfigSubCommand command failed|"
            r"Caused by: .* CODE: 16 DESC: Can not update config in black list\. .*|For more .*",
        ),
        "updateNamesrvConfig -k": Excuse(
            _CODE_4, values=(r"(Can not update config )(?:path|in black list\.)",)
        ),
        **dict.fromkeys(("queryMsgBy", "printMsg", "consumeMessage", "queryCq"), _MESSAGES),
        "resetOffsetByTime -g Goffline": _NO_GROUP_4,
        "skipAccumulatedMessage": _NO_GROUP_4,
        **dict.fromkeys(
            ("clusterAclConfigVersion", "getAclConfig", "updateAclConfig", "deleteAclConfig",
             "updateGlobalWhiteAddr"),
            _NO_RULES_4,
        ),
    },
}  # fmt: skip
"""Further differences for older tools: release -> beginning of a line -> the allowed differences.

Such a tool is run against a Java broker of its own release and against SluiceMQ.
"""
REFUSAL: Final = " CODE: 3 DESC: "
_USERS = "no users and rules of ACL 2.0; use accounts of plain_acl.yml (`sluice acl`)"
_COLD = "reads of cold data are not throttled"
_ROCKSDB = "no RocksDB; use exportMetadata"
_STATIC = "no static topics; use an ordinary topic with updateTopic -c"
REFUSED: Final[Mapping[str, str]] = {
    "rocksDBConfigToJson": _ROCKSDB,
    "checkRocksdbCqWriteProgress": _ROCKSDB,
    "getBrokerEpoch": "no controller; use `sluice cluster status`",
    "getColdDataFlowCtrInfo": _COLD,
    "updateColdDataFlowCtrGroupConfig": _COLD,
    "removeColdDataFlowCtrGroupConfig": _COLD,
    "setCommitLogReadAheadMode": "the kernel decides how far to read ahead",
    "switchTimerEngine": "there is one timer engine, the timer wheel in files",
    **dict.fromkeys(
        ("createUser", "updateUser", "deleteUser", "getUser", "listUser", "copyUser", "createAcl",
         "updateAcl -", "deleteAcl -", "getAcl -", "listAcl", "copyAcl"),
        _USERS,
    ),
    "getBrokerLiteInfo": "no lite topics; use an ordinary topic and a filter",
    "updateStaticTopic": _STATIC,
}  # fmt: skip
"""The beginnings of lines that a broker of SluiceMQ refuses with an error -> the reason."""


class Outcome(NamedTuple):
    """The normalised output and the exit code of a call."""

    text: str
    code: int


def verdict(line: str) -> tuple[str, str]:
    """Return ("same", "explained" or "refused", reason) for a line. "same" has an empty reason."""
    for beginning, reason in REFUSED.items():
        if line.startswith(beginning):
            return "refused", reason
    excuse = excuse_of(line)
    return ("same", "") if excuse is None else ("explained", excuse.reason)


def excuse_of(line: str) -> Excuse | None:
    """Return the allowed differences of a line, or None if it must have the same outcome."""
    return next(iter(_excuses(EXPLAINED, line)), None)


def _excuses(table: Mapping[str, Excuse], line: str) -> list[Excuse]:
    return [it for beginning, it in table.items() if f"{line}$".startswith(beginning)]


def differs(
    line: str, theirs: Outcome, mine: Outcome, release: str = "5.5.0"
) -> tuple[str, str] | None:
    """Return the differences of two outcomes that the tables do not allow, or None.

    `theirs` is the outcome with a Java broker and `mine` that with SluiceMQ. `release` is the
    release of the tool and of the Java broker. The result is (theirs, mine), reduced to what is
    compared.
    """
    if theirs.code != mine.code:
        return f"code {theirs.code}", f"code {mine.code}"
    if theirs.text == mine.text:
        return None
    kind, _ = verdict(line)
    if kind == "refused":
        return None if REFUSAL in mine.text else ("a refusal", mine.text)
    texts = theirs.text, mine.text
    for excuse in [*_excuses(EXPLAINED, line)[:1], *_excuses(OLDER.get(release, {}), line)]:
        texts = excuse.reduced(*texts), excuse.reduced(texts[1], texts[0])
    return None if texts[0] == texts[1] else texts


_PAGE_WORDS: Final = {"same": "same", "explained": "differs", "refused": "rejected"}


def page() -> str:
    """Return the text of docs/mqadmin.md."""
    verdicts = [verdict(line) for line in COMMANDS]
    counts = {kind: sum(kind == it for it, _ in verdicts) for kind in _PAGE_WORDS}
    calls = [line.replace("{{", "{").replace("}}", "}") for line in COMMANDS]
    rows = [
        f"| `{call}` | {_PAGE_WORDS[kind]} |"
        for call, (kind, _) in zip(calls, verdicts, strict=True)
    ]
    left_out = [f"| `{name}` | {reason} |" for name, reason in LEFT_OUT.items()]
    older = [
        f"| {release} | {f'`{beginning}`' if beginning else 'all'} | {excuse.reason} |"
        for release, table in OLDER.items()
        for beginning, excuse in table.items()
    ]
    return _PAGE.format(
        count=len(COMMANDS),
        **counts,
        rejected=_rows_by_reason("refused", [call.split()[0] for call in calls], verdicts),
        differs=_rows_by_reason("explained", calls, verdicts),
        rows="\n".join(rows),
        left_out="\n".join(left_out),
        older="\n".join(older),
    )


def _rows_by_reason(kind: str, names: list[str], verdicts: list[tuple[str, str]]) -> str:
    """Return a table row for each reason of a kind of verdict, with its names, each once."""
    names_by_reason: dict[str, dict[str, None]] = {}
    for name, (it, reason) in zip(names, verdicts, strict=True):
        if it == kind:
            names_by_reason.setdefault(reason, {})[name] = None
    return "\n".join(
        f"| {', '.join(f'`{name}`' for name in found)} | {reason} |"
        for reason, found in names_by_reason.items()
    )


_PAGE = """# mqadmin with SluiceMQ

You can administer SluiceMQ with RocketMQ's `mqadmin`, or with `sluice mqadmin`, which needs no
Java. This page lists the commands that are rejected, the commands whose output differs from that of
a Java broker, and all calls that were compared.

Start `sluice up`, and pass the address of its name server:

```
sh bin/mqadmin topicList -n 127.0.0.1:9876
sluice mqadmin topicList -n 127.0.0.1:9876
```

`sluice mqadmin` takes the same commands and flags, and prints the same lines and columns. It reads
`NAMESRV_ADDR` if `-n` is not given. `sluice mqadmin help COMMAND` shows the flags of a command.
Access keys, TLS and exit codes are described in [the command line](cli.md#sluice-mqadmin).

## Commands that are rejected

SluiceMQ does not have what these commands administer. A broker answers RocketMQ's tool with code 3
and an error that says what to use instead. `sluice mqadmin` prints the error and ends with exit
code 1.

| command | reason, and what to use instead |
|---|---|
{rejected}

## Output that differs

Only what the second column names differs from a Java broker. All other lines and words are equal.

| call | difference |
|---|---|
{differs}

## All compared calls

mqadmin 5.5.0 made each call to a Java broker 5.5.0 and to SluiceMQ, {count} calls in total:

| result | calls | meaning |
|---|---|---|
| same | {same} | Lines, columns and exit code are equal |
| differs | {explained} | Something differs that the previous section names |
| rejected | {refused} | SluiceMQ answers with code 3 |

Not compared are addresses, times, rates, ids and the order of hash tables.

Words in braces stand for addresses, ids and directories. The topic `Tscript` exists and has
messages, and `Gscript` is a group with a connected consumer. A call may depend on earlier ones.

| call | result |
|---|---|
{rows}

These commands were not compared:

| command | reason |
|---|---|
{left_out}

## Older versions of mqadmin

mqadmin 5.3.3 and 4.9.7 made the same calls to a Java broker of their own version and to SluiceMQ.
Exit codes are equal in all calls. A command that a version does not have fails in both cases. The
output is equal except for the differences above and these:

| version | calls that begin with | difference |
|---|---|---|
{older}

## Next

- [Coming from RocketMQ](coming-from-rocketmq.md)
- [The command line of SluiceMQ](cli.md)
"""


def tool(release: str, directory: Path) -> Driver:
    """Start RocketMQ's tool of java/RELEASE.xml, for example "client-5.5.0"."""
    source = HERE / "java" / "Mqadmin.java"
    home = java_home(directory)
    flags = (*JVM_FLAGS, "-Djava.security.manager=allow", f"-Drocketmq.home.dir={home}")
    return java_driver(release, directory, source=source, flags=flags)


def played(driver: Driver, cluster: Cluster, directory: Path) -> dict[str, Outcome]:
    """Prepare the cluster, run each line of the script by RocketMQ's tool. Return the outcomes."""
    for name, text in FILES.items():
        (directory / name).write_text(text)
    where = {"ns": cluster.name_server, "limit_ms": 30_000, "timeout_s": 240}
    driver.call(
        "script", lines=f"updateTopic\t-b\t{cluster.broker}\t-t\t{TOPIC}\t-r\t4\t-w\t4", **where
    )
    time.sleep(1)  # a Java broker registers a moment after it has answered
    sent = driver.call("prepare", ns=cluster.name_server, topic=TOPIC, group=GROUP, count=MESSAGES)
    places = Places(
        cluster.name_server, cluster.broker, str(directory), sent[3]["id"], sent[3]["offset_id"]
    )
    lines = "\n".join("\t".join(words_of(line, places)) for line in COMMANDS)
    events = driver.call("script", lines=lines, **where)
    driver.call("close")
    found = {}
    for line, event in zip(COMMANDS, events, strict=True):
        text = normalised(event["text"], str(directory))
        if line.split()[0] in UNORDERED:
            text = "\n".join(sorted(text.splitlines()))
        found[line] = Outcome(text, int(event["code"]))
    return found


if __name__ == "__main__":
    print(page(), end="")
