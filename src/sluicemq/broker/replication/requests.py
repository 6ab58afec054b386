"""What replicas and tools ask a broker about replication, and what a slave does not do.

Handlers for 900301 (a slave follows our state), 900306 (it forwards), 905 to 908 (spec/ha.md §5,
§6). And those of slaves in place of the ones that change something (`refusals`): sends are told
what RocketMQ's slave tells them, so that clients go on to the master; what RocketMQ's slave would
take and lose is refused.
"""

from collections.abc import Mapping
from typing import Final

import orjson

from sluicemq.broker.admin import readonly
from sluicemq.broker.replication.acting import encode_escaped
from sluicemq.broker.replication.insync import InSync
from sluicemq.broker.replication.sides import MasterSide, SlaveSide
from sluicemq.broker.settings import Settings
from sluicemq.errors import RequestError
from sluicemq.model.addresses import format_address
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import FastHandler, Handler, Outcome, Peer
from sluicemq.store.store import Store
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.ha import ConnectionState
from sluicemq.wire.replicas import (
    ExchangeHaInfoRequest,
    ExchangeHaInfoResponse,
    FollowStateRequest,
    ForwardedForRequest,
    MinBrokerIdChangedRequest,
)

BUSY: Final = "[REJECTREQUEST]system busy, start flow control for a while"  # RocketMQ's words
NOT_HERE: Final = "Can't modify it at a slave broker, please execute it from master broker."
SENDS: Final = frozenset(map(int, (
    Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE, Code.CONSUMER_SEND_MSG_BACK,
    Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2, Code.SLUICE_COMMIT_EPOCH,
)))  # fmt: skip
READS: Final = Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE
OWN: Final = frozenset({
    Code.UPDATE_BROKER_CONFIG, Code.DELETE_EXPIRED_COMMITLOG, Code.CLEAN_EXPIRED_CONSUMEQUEUE,
    Code.RESET_MASTER_FLUSH_OFFSET,
})  # fmt: skip
"""A slave has settings and files of its own."""


class ReplicaRequests:
    """The request family of replicas. `side` is None of a broker that shows a copy."""

    def __init__(
        self, settings: Settings, store: Store, in_sync: InSync | None,
        side: MasterSide | SlaveSide | None,
    ) -> None:  # fmt: skip
        self._settings, self._store = settings, store
        self._in_sync, self._side = in_sync, side

    def follow_state(self, header: FollowStateRequest, command: Command, peer: Peer) -> Outcome:
        """900301."""
        if not isinstance(self._side, MasterSide):
            remark = "this replica is not master, try again."
            raise RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, remark)
        return self._side.state.follow(header, command, peer)

    def smallest_id(
        self, header: MinBrokerIdChangedRequest, command: Command, peer: Peer
    ) -> Command:
        """905: a name server says who lives. A slave hears of its master sooner so."""
        if isinstance(self._side, SlaveSide):
            if header.broker_id == 0:
                self._side.told(header.address or "", header.ha_address or "")
            if self._side.acting is not None:
                self._side.acting.look()
        return Command(ResponseCode.SUCCESS)

    def hand_back(self, command: Command, peer: Peer) -> Command | None:
        """900305: what a slave has stored elsewhere while it stood in. It stands in no more."""
        acting = self._side.acting if isinstance(self._side, SlaveSide) else None
        if acting is None:
            return Command(ResponseCode.SUCCESS, body=encode_escaped([]))
        acting.answer(command, peer)
        return None

    def speak_for(self, header: ForwardedForRequest, command: Command, peer: Peer) -> Command:
        """900306: a replica forwards for a client, which is who connections show, and whose address
        messages are born at."""
        if not self._settings.is_failover:
            raise RequestError(ResponseCode.NO_PERMISSION, "no replica of this broker forwards.")
        try:
            peer.set_remote(Host(header.address, header.port))
        except ValueError as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from error
        return Command(ResponseCode.SUCCESS)

    def exchange(self, header: ExchangeHaInfoRequest, command: Command, peer: Peer) -> Command:
        """906: a master tells its slaves where it is, or is asked."""
        fields: dict[str, str] = {}
        if header.ha_address is not None:
            if isinstance(self._side, SlaveSide):
                self._side.told(header.address or "", header.ha_address)
        elif isinstance(self._side, MasterSide):
            answer = ExchangeHaInfoResponse(
                ha_address=self._side.ha_address, flushed_offset=self._store.synced_offset,
                address=format_address(*self._settings.host),
            )  # fmt: skip
            fields = encode_header(answer)
        return Command(ResponseCode.SUCCESS, fields)

    def reset_flushed(self, command: Command, peer: Peer) -> Command:
        """908: RocketMQ's slave waits with its queues for an offset that this sets; ours does not
        need it."""
        return Command(ResponseCode.SUCCESS)

    def ha_status(self, command: Command, peer: Peer) -> Command:
        """907: `mqadmin haStatus`."""
        client: dict[str, object] = {
            "isActivated": False, "lastReadTimestamp": 0, "lastWriteTimestamp": 0,
            "masterAddr": None, "masterFlushOffset": 0, "maxOffset": 0,
            "transferredByteInSecond": 0,
        }  # fmt: skip
        connections: list[dict[str, object]] = []
        if isinstance(self._side, SlaveSide):
            status = self._side.follower.status()
            client |= {
                "isActivated": status.state == ConnectionState.TRANSFER, "maxOffset": status.end,
                "lastReadTimestamp": status.read_ms, "lastWriteTimestamp": status.written_ms,
                "masterAddr": self._side.ha_master or None,
                "transferredByteInSecond": status.bytes_per_s,
            }  # fmt: skip
        elif isinstance(self._side, MasterSide) and self._in_sync is not None:
            end = self._store.written_offset
            connections = [
                {
                    "addr": str(feed.remote), "slaveAckOffset": max(feed.acknowledged, 0),
                    "diff": end - max(feed.acknowledged, 0),
                    "inSync": self._in_sync.is_in_sync(feed),
                    "transferFromWhere": feed.offset, "transferredByteInSecond": feed.rate.per_s,
                }
                for feed in self._side.feeds.all
            ]  # fmt: skip
        is_master = not self._settings.is_slave
        found = {
            "haClientRuntimeInfo": client, "haConnectionInfo": connections,
            "inSyncSlaveNums": sum(bool(one["inSync"]) for one in connections),
            "master": is_master,
            "masterCommitLogMaxOffset": self._store.written_offset if is_master else 0,
        }  # fmt: skip
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(found))


def while_enough(
    in_sync: InSync, handlers: Mapping[int, Handler], quick: Mapping[int, FastHandler]
) -> tuple[dict[int, Handler], dict[int, FastHandler]]:
    """Those of a master that stores nothing while `InSync.refusal` says why."""

    def checked(handle: Handler) -> Handler:
        def send(command: Command, peer: Peer) -> Outcome:
            if (refusal := in_sync.refusal) is not None:
                raise refusal
            return handle(command, peer)

        return send

    def checked_quick(handle: FastHandler) -> FastHandler:
        return lambda header, body, peer: in_sync.refusal is None and handle(header, body, peer)

    return (
        {**handlers, **{code: checked(handlers[code]) for code in SENDS}},
        {code: checked_quick(it) if code in SENDS else it for code, it in quick.items()},
    )


def refusals(settings: Settings, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
    """What a slave answers to requests that are for its master, or not for it now."""

    def refusing(code: int, remark: str | None) -> Handler:
        def refuse(command: Command, peer: Peer) -> Command:
            return Command(code, {}, remark=remark)

        return refuse

    def unless_read(handle: Handler) -> Handler:
        def read(command: Command, peer: Peer) -> Outcome:
            if not settings.broker.slave_read:
                return Command(ResponseCode.SYSTEM_BUSY, {}, remark=BUSY)
            return handle(command, peer)

        return read

    busy = ResponseCode.SYSTEM_BUSY, BUSY
    if settings.broker.acting_master:
        remark = "service not available now. This broker is a slave: messages go to its master."
        busy = ResponseCode.SERVICE_NOT_AVAILABLE, remark
    found: dict[int, Handler] = {
        int(code): refusing(ResponseCode.SYSTEM_ERROR, NOT_HERE)
        for code in readonly.REFUSED_CODES - OWN
    }
    found |= {code: refusing(*busy) for code in SENDS}
    found[Code.END_TRANSACTION] = refusing(ResponseCode.SLAVE_NOT_AVAILABLE, None)
    found[Code.INVOKE_BROKER_TO_RESET_OFFSET] = refusing(
        ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker"
    )
    return found | {int(code): unless_read(handlers[code]) for code in READS}
