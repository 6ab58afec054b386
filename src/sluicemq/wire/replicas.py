"""What brokers of one name and name servers tell each other of who lives (spec/ha.md §5, §6), and
what replicas of ours ask each other besides the log (design/0022)."""

from typing import Final

from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import boolean, int32, int64, text
from sluicemq.wire.headers import answer, request

STATE_WAIT_MS: Final = 5000
"""So long a master lets a slave wait for news of its state."""


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
class ResetFlushedRequest:
    offset: int | None = int64("masterFlushOffset", default=None)


@request(Code.GET_BROKER_MEMBER_GROUP)
class GetBrokerMemberGroupRequest:
    cluster: str = text("clusterName")
    broker: str = text("brokerName")


@request(Code.NOTIFY_MIN_BROKER_ID_CHANGE)
class SmallestIdChangedRequest:
    """A name server tells replicas: which one is the smallest now, the HA address of one that came,
    the address of one that is gone."""

    broker_id: int | None = int64("minBrokerId", default=None)
    broker: str | None = text("brokerName", default=None)
    address: str | None = text("minBrokerAddr", default=None)
    offline_address: str | None = text("offlineBrokerAddr", default=None)
    ha_address: str | None = text("haBrokerAddr", default=None)


@request(Code.EXCHANGE_BROKER_HA_INFO)
class ExchangeReplicaRequest:
    """A master that comes tells where it is; without, it is asked."""

    ha_address: str | None = text("masterHaAddress", default=None)
    flushed_offset: int | None = int64("masterFlushOffset", default=None)
    address: str | None = text("masterAddress", default=None)


@answer(Code.EXCHANGE_BROKER_HA_INFO)
class ExchangeReplicaResponse:
    ha_address: str | None = text("masterHaAddress", default=None)
    flushed_offset: int | None = int64("masterFlushOffset", default=None)
    address: str | None = text("masterAddress", default=None)


@request(Code.SLUICE_FOLLOW_STATE)
class FollowStateRequest:
    """Who asks: a replica in this incarnation and life, whose log ends at `log_end`. It has all
    operations of the master's life `master_life` up to `number`. `wants_none`: it only says so."""

    replica_id: int = int32("replicaId")
    incarnation: str = text("incarnation", default="")
    life: str = text("life", default="")
    log_end: int = int64("logEnd", default=0)
    master_life: str = text("masterLife", default="")
    number: int = int64("number", default=0)
    wants_none: bool = boolean("wantsNone", default=False)


@request(Code.SLUICE_SPEAK_FOR)
class SpeakForRequest:
    """What follows on this connection is forwarded, and from a client at this address."""

    address: str = text("address")
    port: int = int32("port")


@answer(Code.SLUICE_FOLLOW_STATE)
class FollowStateResponse:
    """The operations in the body are of this life of the master; its log begins at `log_start`.
    `ticket`: what opens its HA port, in hex; "": nothing has to be shown."""

    life: str = text("life")
    log_start: int = int64("logStart")
    ticket: str = text("ticket", default="")
