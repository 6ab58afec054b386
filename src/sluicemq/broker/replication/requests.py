"""The requests of replicas and tools about replication, and the handlers that differ on a slave.

`ReplicaRequests` answers SLUICE_FOLLOW_STATE (900301), SLUICE_HAND_BACK (900305), SLUICE_SPEAK_FOR
(900306), and requests 905 to 908 of RocketMQ (spec/ha.md §5, §6).

`make_slave_handlers` replaces the handlers of requests that change something. A slave answers sends
as RocketMQ's slaves do, so that clients go on to the master. It refuses requests that a RocketMQ
slave would accept and lose.
"""

from collections.abc import Mapping
from typing import Final

import orjson

from sluicemq.broker.admin import readonly
from sluicemq.broker.replication.acting import encode_escaped
from sluicemq.broker.replication.in_sync import InSyncReplicas
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

BUSY: Final = "[REJECTREQUEST]system busy, start flow control for a while"
"""The remark with which RocketMQ refuses a request for now."""
NOT_HERE: Final = "Can't modify it at a slave broker, please execute it from master broker."
SEND_CODES: Final = frozenset(
    map(
        int,
        (
            Code.SEND_MESSAGE,
            Code.SEND_MESSAGE_V2,
            Code.SEND_BATCH_MESSAGE,
            Code.CONSUMER_SEND_MSG_BACK,
            Code.SEND_REPLY_MESSAGE,
            Code.SEND_REPLY_MESSAGE_V2,
            Code.SLUICE_COMMIT_EPOCH,
        ),
    )
)
"""Requests that store messages."""
READ_CODES: Final = Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE
"""Requests that a slave answers only if `slaveReadEnable` is true."""
LOCAL_CODES: Final = frozenset(
    {
        Code.UPDATE_BROKER_CONFIG,
        Code.DELETE_EXPIRED_COMMITLOG,
        Code.CLEAN_EXPIRED_CONSUMEQUEUE,
        Code.RESET_MASTER_FLUSH_OFFSET,
    }
)
"""Requests that change something which a slave has for itself: its configuration and its files."""


class ReplicaRequests:
    """Handlers of requests about replication."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        in_sync: InSyncReplicas | None,
        side: MasterSide | SlaveSide | None,
    ) -> None:
        """Create the handlers of a broker in its present role.

        `in_sync` tracks the slaves of a master; it is None on a slave. `side` is the side of the
        replication that runs in this broker: a MasterSide, a SlaveSide, or None on a read-only
        broker.
        """
        self._settings = settings
        self._store = store
        self._in_sync = in_sync
        self._side = side

    def follow_state(self, header: FollowStateRequest, command: Command, peer: Peer) -> Outcome:
        """Answer SLUICE_FOLLOW_STATE (900301), by which a slave copies the master's tables.

        The answer has the changes of tables after those that the slave has. If there are none, it
        is sent later. Raises RequestError (SERVICE_NOT_AVAILABLE) if this broker is not a master.
        """
        if not isinstance(self._side, MasterSide):
            remark = "this replica is not master, try again."
            raise RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, remark)
        return self._side.state_sender.follow_state(header, command, peer)

    def change_min_broker_id(
        self, header: MinBrokerIdChangedRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer NOTIFY_MIN_BROKER_ID_CHANGE (905) of a name server.

        The lowest id of the live brokers with this broker name has changed. If it is 0, the master
        is alive, and a slave uses the addresses in `header` from now on. A slave that may act for
        its master checks soon whether it has to start or stop that. A master does nothing.
        """
        if isinstance(self._side, SlaveSide):
            if header.broker_id == 0:
                self._side.set_master_addresses(header.address or "", header.ha_address or "")
            if self._side.acting_master is not None:
                self._side.acting_master.check_soon()
        return Command(ResponseCode.SUCCESS)

    def hand_back(self, command: Command, peer: Peer) -> Command | None:
        """Answer SLUICE_HAND_BACK (900305) of a master that has come back.

        The answer lists the messages that this slave has sent to other masters in the meantime. If
        this broker cannot act for a master, an answer with an empty list is returned. Otherwise
        None is returned, and the answer is written to `peer` when the slave has stopped acting.
        """
        acting = self._side.acting_master if isinstance(self._side, SlaveSide) else None
        if acting is None:
            return Command(ResponseCode.SUCCESS, body=encode_escaped([]))
        acting.answer_hand_back(command, peer)
        return None

    def set_forwarded_client(
        self, header: ForwardedForRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer SLUICE_SPEAK_FOR (900306) of a replica that forwards requests of a client.

        From now on, the connection `peer` has the address of the client in `header`. It appears in
        lists of connections, and in messages as their birth host. Raises RequestError if this
        broker has no failover, or if the address is invalid.
        """
        if not self._settings.is_failover:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                "Forwarded requests are accepted only from replicas with failover.",
            )
        try:
            peer.set_remote(Host(header.address, header.port))
        except ValueError as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from error
        return Command(ResponseCode.SUCCESS)

    def exchange_ha_info(
        self, header: ExchangeHaInfoRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer EXCHANGE_BROKER_HA_INFO (906), by which master and slave exchange addresses.

        - A master sends it with its addresses. A slave uses them from now on, and answers without
          fields.
        - A slave sends it without an HA address (the address for slaves). A master answers with its
          two addresses and the end of the synced log.
        - In every other case the answer has no fields.
        """
        fields: dict[str, str] = {}
        if header.ha_address is not None:
            if isinstance(self._side, SlaveSide):
                self._side.set_master_addresses(header.address or "", header.ha_address)
        elif isinstance(self._side, MasterSide):
            answer = ExchangeHaInfoResponse(
                ha_address=self._side.ha_address,
                flushed_offset=self._store.synced_offset,
                address=format_address(*self._settings.host),
            )
            fields = encode_header(answer)
        return Command(ResponseCode.SUCCESS, fields)

    def reset_flushed_offset(self, command: Command, peer: Peer) -> Command:
        """Answer RESET_MASTER_FLUSH_OFFSET (908), and do nothing.

        A slave of RocketMQ fills its queues only up to the offset that this request sets. SluiceMQ
        does not need it.
        """
        return Command(ResponseCode.SUCCESS)

    def ha_status(self, command: Command, peer: Peer) -> Command:
        """Answer GET_BROKER_HA_STATUS (907), which `mqadmin haStatus` sends, with JSON.

        The JSON keys are RocketMQ's. `haClientRuntimeInfo` is filled in by a slave only,
        `haConnectionInfo`, `inSyncSlaveNums` and `masterCommitLogMaxOffset` by a master only.
        """
        connections: list[dict[str, object]] = []
        if isinstance(self._side, MasterSide) and self._in_sync is not None:
            connections = self._describe_slaves(self._side, self._in_sync)
        in_sync_count = sum(bool(connection["inSync"]) for connection in connections)
        is_master = not self._settings.is_slave
        ha_status = {
            "haClientRuntimeInfo": self._describe_master_connection(),
            "haConnectionInfo": connections,
            "inSyncSlaveNums": in_sync_count,
            "master": is_master,
            "masterCommitLogMaxOffset": self._store.written_offset if is_master else 0,
        }
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(ha_status))

    def _describe_master_connection(self) -> dict[str, object]:
        """Return the JSON object `haClientRuntimeInfo`, which describes a slave's connection.

        On a master, all its values are 0, False or None.
        """
        connection: dict[str, object] = {
            "isActivated": False,
            "lastReadTimestamp": 0,
            "lastWriteTimestamp": 0,
            "masterAddr": None,
            "masterFlushOffset": 0,
            "maxOffset": 0,
            "transferredByteInSecond": 0,
        }
        if isinstance(self._side, SlaveSide):
            status = self._side.log_receiver.status()
            connection |= {
                "isActivated": status.state == ConnectionState.TRANSFER,
                "maxOffset": status.end,
                "lastReadTimestamp": status.read_ms,
                "lastWriteTimestamp": status.written_ms,
                "masterAddr": self._side.ha_master or None,
                "transferredByteInSecond": status.bytes_per_s,
            }
        return connection

    def _describe_slaves(
        self, side: MasterSide, in_sync: InSyncReplicas
    ) -> list[dict[str, object]]:
        """Return the field `haConnectionInfo`: one JSON object for each connected slave."""
        end = self._store.written_offset
        return [
            {
                "addr": str(sender.remote),
                "slaveAckOffset": max(sender.acked_end, 0),
                "diff": end - max(sender.acked_end, 0),
                "inSync": in_sync.is_in_sync(sender),
                "transferFromWhere": sender.sent_end,
                "transferredByteInSecond": sender.rate.per_s,
            }
            for sender in side.log_senders.senders
        ]


def refuse_unsafe_sends(
    in_sync: InSyncReplicas,
    handlers: Mapping[int, Handler],
    fast_handlers: Mapping[int, FastHandler],
) -> tuple[dict[int, Handler], dict[int, FastHandler]]:
    """Return copies of both dicts, in which sends are refused while too few replicas are in sync.

    `handlers` and `fast_handlers` are handlers by request code. The handlers of SEND_CODES are
    replaced. While `in_sync.refusal` is an error, the new handlers raise it instead of storing
    messages, and the new fast handlers return False, so that the handler is called. The handlers of
    all other codes are unchanged.
    """
    checked_handlers = dict(handlers)
    checked_fast_handlers = dict(fast_handlers)
    for code in SEND_CODES:
        checked_handlers[code] = _check_refusal(in_sync, handlers[code])
        if code in fast_handlers:
            checked_fast_handlers[code] = _check_refusal_fast(in_sync, fast_handlers[code])
    return checked_handlers, checked_fast_handlers


def _check_refusal(in_sync: InSyncReplicas, handle: Handler) -> Handler:
    """Return a handler that raises the refusal of `in_sync`, or else calls `handle`."""

    def send(command: Command, peer: Peer) -> Outcome:
        refusal = in_sync.refusal
        if refusal is not None:
            raise refusal
        return handle(command, peer)

    return send


def _check_refusal_fast(in_sync: InSyncReplicas, handle: FastHandler) -> FastHandler:
    """Return a fast handler that returns False if `in_sync` refuses, or else calls `handle`."""
    return lambda header, body, peer: in_sync.refusal is None and handle(header, body, peer)


def make_slave_handlers(settings: Settings, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
    """Return the handlers by request code that a slave must use in place of those in `handlers`.

    - Requests that store messages are refused with SYSTEM_BUSY, or with SERVICE_NOT_AVAILABLE if
      `enableSlaveActingMaster` is true.
    - Requests that change something else, except LOCAL_CODES, are refused with SYSTEM_ERROR.
    - Pulls are refused with SYSTEM_BUSY while `slaveReadEnable` is false. Otherwise the handler in
      `handlers` is called.
    - END_TRANSACTION is refused with SLAVE_NOT_AVAILABLE, and INVOKE_BROKER_TO_RESET_OFFSET with
      SYSTEM_ERROR.

    All other codes are missing in the result, because a slave handles them like a master.
    """
    send_code = ResponseCode.SYSTEM_BUSY
    send_remark = BUSY
    if settings.broker.acting_master:
        send_code = ResponseCode.SERVICE_NOT_AVAILABLE
        send_remark = (
            "service not available now. This broker is a slave: messages go to its master."
        )

    slave_handlers: dict[int, Handler] = {}
    for changing_code in readonly.REFUSED_CODES - LOCAL_CODES:
        slave_handlers[int(changing_code)] = _refuse_with(ResponseCode.SYSTEM_ERROR, NOT_HERE)
    for code in SEND_CODES:
        slave_handlers[code] = _refuse_with(send_code, send_remark)
    slave_handlers[Code.END_TRANSACTION] = _refuse_with(ResponseCode.SLAVE_NOT_AVAILABLE, None)
    slave_handlers[Code.INVOKE_BROKER_TO_RESET_OFFSET] = _refuse_with(
        ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker"
    )
    for read_code in READ_CODES:
        slave_handlers[int(read_code)] = _check_readable(settings, handlers[read_code])
    return slave_handlers


def _refuse_with(code: int, remark: str | None) -> Handler:
    """Return a handler that answers every request with this code and remark."""

    def refuse(command: Command, peer: Peer) -> Command:
        return Command(code, {}, remark=remark)

    return refuse


def _check_readable(settings: Settings, handle: Handler) -> Handler:
    """Return a handler that calls `handle` while `slaveReadEnable` is true.

    Otherwise it answers with SYSTEM_BUSY.
    """

    def read(command: Command, peer: Peer) -> Outcome:
        if not settings.broker.slave_read:
            return Command(ResponseCode.SYSTEM_BUSY, {}, remark=BUSY)
        return handle(command, peer)

    return read
