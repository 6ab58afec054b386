"""What brokers of one name and name servers tell each other of who lives (spec/ha.md §5, §6)."""

from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import int32, int64, text
from sluicemq.wire.headers import request


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
