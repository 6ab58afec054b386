"""Requests of the tools for what only other brokers have: what to use here instead.

RocketMQ's code for them is the one for "not supported" (3), the sentence is ours. 200056 is
different: it moves what is popped out of RocksDB (`mqadmin exportPopRecord`). There is none here,
so there is nothing to move and all is well, as in a RocketMQ broker without it.
"""

from typing import Final

from sluicemq.net.dispatch import Peer
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

_COLD: Final = (
    "Reads of cold data are not throttled here: whoever reads much waits for its share of the "
    "loop. Use filters, or `sluice topic` to see who lags."
)
_READ_AHEAD: Final = "The log is read as the kernel reads ahead. There is no mode to set."
_ROCKSDB: Final = (
    "There is no RocksDB here: settings and offsets are JSON files in config/, queues are files. "
    "Use exportMetadata, or `sluice store verify`."
)
_CONTROLLER: Final = (
    "There is no controller here: replicas elect their master by etcd. Use `sluice cluster status`."
)
_STATIC: Final = (
    "Static topics are not supported. Use an ordinary topic, updateTopic -c CLUSTER, which has its "
    "queues on every master."
)
_TIMER: Final = "There is one engine of timers, the file wheel, and it is on."
_USERS: Final = (
    "Users and rules of ACL 2.0 are not supported. Use accounts of plain_acl.yml: `sluice acl`, or "
    "updateAclConfig of mqadmin 4.9."
)
_LITE: Final = (
    "Lite topics are not supported. Use an ordinary topic and a filter: a tag or SQL92 for what a "
    "lite topic would be."
)
SENTENCES: Final[dict[int, str]] = {
    Code.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _ROCKSDB,
    Code.EXPORT_ROCKSDB_CONFIG_TO_JSON: _ROCKSDB,
    Code.UPDATE_AND_CREATE_STATIC_TOPIC: _STATIC,
    Code.GET_BROKER_EPOCH_CACHE: _CONTROLLER,
    Code.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: _COLD,
    Code.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: _COLD,
    Code.GET_COLD_DATA_FLOW_CTR_INFO: _COLD,
    Code.SET_COMMITLOG_READ_MODE: _READ_AHEAD,
    Code.AUTH_CREATE_USER: _USERS,
    Code.AUTH_UPDATE_USER: _USERS,
    Code.AUTH_DELETE_USER: _USERS,
    Code.AUTH_GET_USER: _USERS,
    Code.AUTH_LIST_USER: _USERS,
    Code.AUTH_CREATE_ACL: _USERS,
    Code.AUTH_UPDATE_ACL: _USERS,
    Code.AUTH_DELETE_ACL: _USERS,
    Code.AUTH_GET_ACL: _USERS,
    Code.AUTH_LIST_ACL: _USERS,
    Code.SWITCH_TIMER_ENGINE: _TIMER,
    Code.GET_BROKER_LITE_INFO: _LITE,
    Code.GET_PARENT_TOPIC_INFO: _LITE,
    Code.GET_LITE_TOPIC_INFO: _LITE,
    Code.GET_LITE_CLIENT_INFO: _LITE,
    Code.GET_LITE_GROUP_INFO: _LITE,
    Code.TRIGGER_LITE_DISPATCH: _LITE,
}


class Refused:
    """The request family."""

    def refuse(self, command: Command, peer: Peer) -> Command:
        """Says what to use instead."""
        remark = SENTENCES[command.code]
        return Command(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, {}, remark=remark)

    def nothing_to_move(self, command: Command, peer: Peer) -> Command:
        """200056."""
        return Command(ResponseCode.SUCCESS)
