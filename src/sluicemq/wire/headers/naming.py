"""Headers of the name server (spec/namesrv.md)."""

from sluicemq.wire.declare import boolean, header, int32, int64, text


@header
class GetRouteRequest:
    """105."""

    topic: str = text("topic")
    standard_json_only: bool | None = boolean("acceptStandardJsonOnly", default=None)
    zone_mode: str | None = text("__ZONE_MODE", default=None)
    zone: str | None = text("__ZONE_NAME", default=None)


@header
class RegisterBrokerRequest:
    """103: `body_crc32` is 0 when there is nothing to check."""

    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")
    ha_address: str = text("haServerAddr")
    broker_id: int = int64("brokerId")
    heartbeat_timeout_ms: int | None = int64("heartbeatTimeoutMillis", default=None)
    acting_master_enable: bool | None = boolean("enableActingMaster", default=None)
    compressed: bool = boolean("compressed", default=False)
    body_crc32: int = int32("bodyCrc32", default=0)
    zone: str | None = text("__ZONE_NAME", default=None)


@header
class RegisterBrokerResponse:
    """Answer to 103: both are set for a slave whose master lives."""

    ha_address: str | None = text("haServerAddr", default=None)
    master_address: str | None = text("masterAddr", default=None)


@header
class UnregisterBrokerRequest:
    """104."""

    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")
    broker_id: int = int64("brokerId")


@header
class QueryDataVersionRequest:
    """322."""

    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")
    broker_id: int = int64("brokerId")


@header
class QueryDataVersionResponse:
    """Answer to 322."""

    changed: bool = boolean("changed")


@header
class BrokerHeartbeatRequest:
    """904."""

    cluster: str = text("clusterName")
    address: str = text("brokerAddr")
    broker: str = text("brokerName")
    broker_id: int | None = int64("brokerId", default=None)
    epoch: int | None = int32("epoch", default=None)
    offset_max: int | None = int64("maxOffset", default=None)
    confirm_offset: int | None = int64("confirmOffset", default=None)
    heartbeat_timeout_ms: int | None = int64("heartbeatTimeoutMills", default=None)
    election_priority: int | None = int32("electionPriority", default=None)


@header
class GetBrokerMemberGroupRequest:
    """901."""

    cluster: str = text("clusterName")
    broker: str = text("brokerName")


@header
class RegisterTopicRequest:
    """217."""

    topic: str = text("topic")


@header
class DeleteTopicInNameServerRequest:
    """216."""

    topic: str = text("topic")
    cluster: str | None = text("clusterName", default=None)


@header
class GetTopicsByClusterRequest:
    """224."""

    cluster: str = text("cluster")


@header
class PutKvRequest:
    """100."""

    namespace: str = text("namespace")
    key: str = text("key")
    value: str = text("value")


@header
class GetKvRequest:
    """101."""

    namespace: str = text("namespace")
    key: str = text("key")


@header
class GetKvResponse:
    """Answer to 101."""

    value: str | None = text("value", default=None)


@header
class DeleteKvRequest:
    """102."""

    namespace: str = text("namespace")
    key: str = text("key")


@header
class GetKvListRequest:
    """219."""

    namespace: str = text("namespace")


@header
class WritePermissionRequest:
    """205 WIPE_WRITE_PERM_OF_BROKER, 327 ADD_WRITE_PERM_OF_BROKER."""

    broker: str = text("brokerName")


@header
class WritePermissionWipedResponse:
    """Answer to 205."""

    topic_count: int = int32("wipeTopicCount")


@header
class WritePermissionAddedResponse:
    """Answer to 327."""

    topic_count: int = int32("addTopicCount")
