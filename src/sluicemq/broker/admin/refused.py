"""Handlers for requests that only other brokers support.

Each answer has RocketMQ's code REQUEST_CODE_NOT_SUPPORTED (3), and a remark that says what to use
instead. POP_ROLLBACK (200056, `mqadmin exportPopRecord`) is an exception: it moves records of
popped messages out of RocksDB. This broker has no RocksDB and therefore nothing to move, so the
answer is SUCCESS, like the answer of a RocketMQ broker without RocksDB.
"""

from typing import Final

from sluicemq.net.dispatch import Peer
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

_COLD: Final = (
    "This broker does not throttle reads of cold data: all consumers share its event loop fairly. "
    "Use filters, or `sluice group lag` to see which groups lag."
)
_READ_AHEAD: Final = "The kernel decides how far the log is read ahead. The mode cannot be set."
_ROCKSDB: Final = (
    "This broker has no RocksDB: settings and offsets are JSON files in config/, queues are files. "
    "Use exportMetadata, or `sluice store verify`."
)
_CONTROLLER: Final = (
    "This broker has no controller: replicas elect their master by etcd. "
    "Use `sluice cluster status`."
)
_STATIC: Final = (
    "Static topics are not supported. Use an ordinary topic (updateTopic -c CLUSTER), which has "
    "queues on every master."
)
_TIMER: Final = "The only timer engine is the timer wheel, and it is enabled."
_USERS: Final = (
    "Users and rules of ACL 2.0 are not supported. Use accounts of plain_acl.yml: `sluice acl`, or "
    "updateAclConfig of mqadmin 4.9."
)
_LITE: Final = (
    "Lite topics are not supported. Use an ordinary topic, with a tag or a SQL92 filter in place "
    "of each lite topic."
)
ALTERNATIVES: Final[dict[int, str]] = {
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
"""The remark of the answer to each request that is not supported, by request code."""


class UnsupportedHandlers:
    """Request handlers for requests that this broker does not support.

    They answer the requests in `ALTERNATIVES`, and POP_ROLLBACK (200056).
    """

    def refuse(self, command: Command, peer: Peer) -> Command:
        """Answer with REQUEST_CODE_NOT_SUPPORTED and a remark that says what to use instead.

        The code of `command` must be a key of `ALTERNATIVES`.
        """
        remark = ALTERNATIVES[command.code]
        return Command(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, {}, remark=remark)

    def accept_pop_export(self, command: Command, peer: Peer) -> Command:
        """Answer POP_ROLLBACK (200056) with SUCCESS, because there are no records to move."""
        return Command(ResponseCode.SUCCESS)
