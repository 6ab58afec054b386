"""Headers of requests between replicas, and between replicas and name servers.

Brokers report to name servers that they are alive, and name servers report changes to replicas
(spec/ha.md §5, §6). Tools ask name servers to change the write permission of a broker. SluiceMQ's
replicas also copy each other's state other than the commit log (design/0022).
"""

from typing import Final

from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import boolean, int32, int64, text
from sluicemq.wire.headers import request, response

STATE_WAIT_MS: Final = 5000
"""The longest time for which a master parks a SLUICE_FOLLOW_STATE (900301) request, in ms."""


@request(Code.BROKER_HEARTBEAT)
class BrokerHeartbeatRequest:
    cluster: str = text("clusterName")
    address: str = text("brokerAddr")
    broker: str = text("brokerName")
    broker_id: int | None = int64("brokerId", default=None)
    epoch: int | None = int32("epoch", default=None)
    offset_max: int | None = int64("maxOffset", default=None)
    confirm_offset: int | None = int64("confirmOffset", default=None)
    heartbeat_timeout_ms: int | None = int64("heartbeatTimeoutMills", default=None)
    election_priority: int | None = int32("electionPriority", default=None)


@request(Code.RESET_MASTER_FLUSH_OFFSET)
class ResetMasterFlushOffsetRequest:
    offset: int | None = int64("masterFlushOffset", default=None)


@request(Code.GET_BROKER_MEMBER_GROUP)
class GetBrokerMemberGroupRequest:
    cluster: str = text("clusterName")
    broker: str = text("brokerName")


@request(Code.WIPE_WRITE_PERM_OF_BROKER, Code.ADD_WRITE_PERM_OF_BROKER)
class WritePermissionRequest:
    broker: str = text("brokerName")


@response(Code.WIPE_WRITE_PERM_OF_BROKER)
class WritePermissionWipedResponse:
    topic_count: int = int32("wipeTopicCount")


@response(Code.ADD_WRITE_PERM_OF_BROKER)
class WritePermissionAddedResponse:
    topic_count: int = int32("addTopicCount")


@request(Code.NOTIFY_MIN_BROKER_ID_CHANGE)
class MinBrokerIdChangedRequest:
    """The header of NOTIFY_MIN_BROKER_ID_CHANGE (905), which a name server sends to replicas.

    `broker_id` and `address` are those of the registered replica with the smallest broker id.
    `ha_address` is the HA address of a replica that registered, and `offline_address` the address
    of a replica that is gone.
    """

    broker_id: int | None = int64("minBrokerId", default=None)
    broker: str | None = text("brokerName", default=None)
    address: str | None = text("minBrokerAddr", default=None)
    offline_address: str | None = text("offlineBrokerAddr", default=None)
    ha_address: str | None = text("haBrokerAddr", default=None)


@request(Code.EXCHANGE_BROKER_HA_INFO)
class ExchangeHaInfoRequest:
    """The header of EXCHANGE_BROKER_HA_INFO (906).

    A master that starts sends it with its addresses to its slaves. A slave sends it without
    addresses to its master, to ask for them.
    """

    ha_address: str | None = text("masterHaAddress", default=None)
    flushed_offset: int | None = int64("masterFlushOffset", default=None)
    address: str | None = text("masterAddress", default=None)


@response(Code.EXCHANGE_BROKER_HA_INFO)
class ExchangeHaInfoResponse:
    ha_address: str | None = text("masterHaAddress", default=None)
    flushed_offset: int | None = int64("masterFlushOffset", default=None)
    address: str | None = text("masterAddress", default=None)


@request(Code.SLUICE_FOLLOW_STATE)
class FollowStateRequest:
    """The header of SLUICE_FOLLOW_STATE (900301), by which a slave follows its master's state log.

    `incarnation`, `run_id` and `log_end` (the end of its log) describe the slave. The slave has the
    operations up to `number` from the master's run `master_run_id`. If `wants_none` is set, the
    slave only reports this, and the master responds immediately without operations.
    """

    replica_id: int = int32("replicaId")
    incarnation: str = text("incarnation", default="")
    run_id: str = text("life", default="")
    log_end: int = int64("logEnd", default=0)
    master_run_id: str = text("masterLife", default="")
    number: int = int64("number", default=0)
    wants_none: bool = boolean("wantsNone", default=False)


@request(Code.SLUICE_SPEAK_FOR)
class ForwardedForRequest:
    """The header of SLUICE_SPEAK_FOR (900306), which a replica sends when it opens a connection.

    All later requests on the connection are forwarded requests of the client at this address.
    """

    address: str = text("address")
    port: int = int32("port")


@response(Code.SLUICE_FOLLOW_STATE)
class FollowStateResponse:
    """The header of the response to SLUICE_FOLLOW_STATE (900301).

    The operations in the body are from the run `run_id` of the master, whose log begins at
    `log_start`. `ticket` is the ticket for the master's HA port in hexadecimal; "" means that none
    is required.
    """

    run_id: str = text("life")
    log_start: int = int64("logStart")
    ticket: str = text("ticket", default="")
