"""The key-value configuration of a name server: the one thing it keeps on disk.

    {"configTable": {"namespace": {"key": "value"}}}        kvConfig.json

The namespace ORDER_TOPIC_CONFIG holds, for each strictly ordered topic, which brokers have how many
queues (`broker-a:4;broker-b:2`). A change is answered after the file is written.

The requests of a name server, one plain function each: (command, peer, parts, now) -> answer.

Codes, remarks and bodies: spec/namesrv.md, corrected by the recorded traffic. A typed answer
header whose fields are all null is `{}`, not absent (traffic README 7): `fields={}` here.
"""

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from sluicemq.acl.loading import Source
from sluicemq.config import (
    NameServerConfig,
    Part,
    change_settings,
    edit_properties,
    settings_text,
)
from sluicemq.errors import ConfigurationError, PermissionDeniedError, ProtocolError
from sluicemq.files import Files, edit_text, load_text, read_text, replace_text
from sluicemq.model.addresses import FIXED_FIELD, INTERFACES_FIELD
from sluicemq.model.ids import Host
from sluicemq.model.topic import BrokerData
from sluicemq.nameserver.reachable import Origin, Way, reachable_address
from sluicemq.nameserver.routes import MasterAddresses, Registration, RouteTable, in_zone
from sluicemq.net.tls import server_tls
from sluicemq.wire.bodies import (
    STANDARD_JSON_VERSION_MIN,
    ClusterInfo,
    decode_topic_route,
    encode_broker_member_group,
    encode_cluster_info,
    encode_kv_table,
    encode_topic_list,
    encode_topic_route,
)
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    BrokerHeartbeatRequest,
    BrokerRequest,
    DeleteTopicInNameServerRequest,
    GetBrokerMemberGroupRequest,
    GetKvListRequest,
    GetKvResponse,
    GetRouteRequest,
    GetTopicsByClusterRequest,
    KvRequest,
    PutKvRequest,
    QueryDataVersionResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    TopicRequest,
    WritePermissionAddedResponse,
    WritePermissionRequest,
    WritePermissionWipedResponse,
)
from sluicemq.wire.registration import decode_register_body
from sluicemq.wire.tables import (
    decode_data_version,
    decode_kv_config_file,
    encode_data_version,
    encode_kv_config_file,
)

ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"

Namespaces = dict[str, dict[str, str]]


class KeyValues:
    """Namespaces of keys and values, each change of which goes to the file at once."""

    def __init__(self, files: Files, path: str) -> None:
        """Reads the file, or its `.bak`. Raises StoreDamagedError when neither can be read."""
        self._files = files
        self._path = path
        self._namespaces: Namespaces = load_text(files, path, _parse) or {}

    def get(self, namespace: str, key: str) -> str | None:
        return self._namespaces.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """A copy, or None when it was never written to."""
        table = self._namespaces.get(namespace)
        return None if table is None else dict(table)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Raises OSError when the file cannot be written; then nothing has changed."""
        changed = self._copy()
        changed.setdefault(namespace, {})[key] = value
        self._replace(changed)

    def delete(self, namespace: str, key: str) -> None:
        """A key that is not there is no error."""
        if self.get(namespace, key) is not None:
            changed = self._copy()
            del changed[namespace][key]
            self._replace(changed)

    def _copy(self) -> Namespaces:
        return {name: dict(table) for name, table in self._namespaces.items()}

    def _replace(self, namespaces: Namespaces) -> None:
        replace_text(self._files, self._path, encode_kv_config_file(namespaces))
        self._namespaces = namespaces


def _parse(text: str) -> Namespaces:
    try:
        return decode_kv_config_file(text)
    except ProtocolError as error:
        raise ValueError(str(error)) from error


log = logging.getLogger("sluicemq.nameserver")

UNIT: Final = 0x1
UNIT_SUBSCRIPTION: Final = 0x2
ZLIB_FIRST_BYTE: Final = b"\x78"
TOLD_MAX: Final = 1000
BLACK_LIST: Final = frozenset({"configStorePath", "kvConfigPath"})
_HELP = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."


class Caller(Protocol):
    """What handlers use of a connection (net.server.Peer)."""

    @property
    def remote(self) -> Host: ...

    @property
    def local(self) -> Host: ...


@dataclass(slots=True)
class Parts:
    """What a name server is made of. `config` is replaced by request 318."""

    config: NameServerConfig
    table: RouteTable
    key_values: KeyValues
    files: Files
    started_ms: int
    told: set[tuple[str, str]] = field(default_factory=set)
    """Replaced addresses that are logged already."""
    changed_config: NameServerConfig | None = None
    """What a start would take now, once request 318 has changed something."""

    @property
    def at_next_start(self) -> NameServerConfig:
        return self.changed_config or self.config


Handler = Callable[[Command, Caller, Parts, int], Command]


def success(fields: dict[str, str] | None = None, body: bytes = b"") -> Command:
    """The answer that all is well."""
    return Command(ResponseCode.SUCCESS, fields, body)


def failure(code: ResponseCode, remark: str) -> Command:
    """The answer that it is not."""
    return Command(code, remark=remark)


# ----------------------------------------------------------------------------------- brokers


def register_broker(command: Command, peer: Caller, parts: Parts, now_ms: int) -> Command:
    """103. Java brokers say `compressed=false` even when they compressed: the body tells."""
    request = decode_header(RegisterBrokerRequest, command.fields)
    if request.body_crc32 and zlib.crc32(command.body) & 0x7FFFFFFF != request.body_crc32:
        return failure(ResponseCode.SYSTEM_ERROR, "crc32 not match")
    compressed = request.compressed or bytes(command.body[:1]) == ZLIB_FIRST_BYTE
    body = decode_register_body(command.body, compressed=compressed, version=command.version)
    known = parts.table.broker(request.broker)
    master = parts.table.register(
        Registration(
            cluster=request.cluster,
            broker=request.broker,
            broker_id=request.broker_id,
            address=request.address,
            ha_address=request.ha_address,
            timeout_ms=request.heartbeat_timeout_ms,
            acting_master_enable=request.acting_master_enable,
            zone=request.zone,
            topics=body.table.topics,
            is_complete=parts.config.delete_topic_with_registration,
            version=body.table.data_version,
            origin=_origin(command.fields or {}, peer),
            connection=peer,
        ),
        now_ms,
    )
    if known is None or known.addresses.get(request.broker_id) != request.address:
        log.info(
            "broker %s (id %d) of %s registers as %s from %s",
            request.broker, request.broker_id, request.cluster, request.address, peer.remote,
        )  # fmt: skip
    return _registered(master, parts)


def _registered(master: MasterAddresses, parts: Parts) -> Command:
    fields = encode_header(
        RegisterBrokerResponse(ha_address=master.ha_address, master_address=master.address)
    )
    orders = parts.key_values.namespace(ORDER_TOPICS)
    if orders is None or not parts.config.return_order_config_to_broker:
        return success(fields)
    return success(fields, encode_kv_table(orders))


def _origin(fields: Mapping[str, str], peer: Caller) -> Origin:
    interfaces = fields.get(INTERFACES_FIELD, "")
    return Origin(
        source=peer.remote.address,
        reached=peer.local.address,
        fixed=fields.get(FIXED_FIELD, "") == "true",
        interfaces=tuple(part.strip() for part in interfaces.split(",") if part.strip()),
    )


def unregister_broker(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """104."""
    request = decode_header(BrokerRequest, command.fields)
    parts.table.unregister(request.cluster, request.broker, request.address)
    log.info("broker %s at %s unregisters", request.broker, request.address)
    return success()


def query_data_version(command: Command, _peer: Caller, parts: Parts, now_ms: int) -> Command:
    """322: may the broker skip its registration?"""
    request = decode_header(BrokerRequest, command.fields)
    held = parts.table.version_of(request.cluster, request.address)
    parts.table.refresh(request.cluster, request.address, now_ms)
    changed = held is None or held != decode_data_version(command.body or b"{}")
    body = b"" if held is None else encode_data_version(held)
    return success(encode_header(QueryDataVersionResponse(changed=changed)), body)


def broker_heartbeat(command: Command, _peer: Caller, parts: Parts, now_ms: int) -> Command:
    """904."""
    request = decode_header(BrokerHeartbeatRequest, command.fields)
    parts.table.refresh(request.cluster, request.address, now_ms)
    return success()


def get_broker_member_group(command: Command, peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """901."""
    request = decode_header(GetBrokerMemberGroupRequest, command.fields)
    data = parts.table.broker(request.broker)
    if data is None or data.cluster != request.cluster:
        addresses: Mapping[int, str] = {}
    else:
        addresses = _for_client(data, peer, parts).addresses
    return success(body=encode_broker_member_group(request.cluster, request.broker, addresses))


def wipe_write_permission(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """205."""
    broker = decode_header(WritePermissionRequest, command.fields).broker
    count = parts.table.wipe_write_permission(broker)
    log.info("write permission of broker %s taken from %d topics", broker, count)
    return success(encode_header(WritePermissionWipedResponse(topic_count=count)))


def add_write_permission(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """327."""
    broker = decode_header(WritePermissionRequest, command.fields).broker
    count = parts.table.add_write_permission(broker)
    log.info("write permission of broker %s given to %d topics", broker, count)
    return success(encode_header(WritePermissionAddedResponse(topic_count=count)))


def get_cluster_info(_command: Command, peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """106: integer keys for every version."""
    brokers = {data.broker: _for_client(data, peer, parts) for data in parts.table.brokers()}
    clusters = {name: tuple(members) for name, members in parts.table.clusters().items()}
    return success(body=encode_cluster_info(ClusterInfo(brokers, clusters)))


# ----------------------------------------------------------------------------------- topics


def get_route(command: Command, peer: Caller, parts: Parts, now_ms: int) -> Command:
    """105."""
    request = decode_header(GetRouteRequest, command.fields)
    config = parts.config
    if config.wait_for_service and now_ms - parts.started_ms < config.wait_for_service_s * 1000:
        return failure(ResponseCode.SYSTEM_ERROR, "name server not ready")
    route = parts.table.route(request.topic, acting_master=config.acting_master_support)
    if route is None:
        remark = f"No topic route info in name server for the topic: {request.topic}{_HELP}"
        return failure(ResponseCode.TOPIC_NOT_EXIST, remark)
    if request.zone_mode == "true" and request.zone:
        route = in_zone(route, request.zone)
    orders = parts.key_values.get(ORDER_TOPICS, request.topic)
    route = replace(
        route,
        brokers=tuple(_for_client(data, peer, parts) for data in route.brokers),
        order_topic_config=orders if config.order_message_enable else None,
    )
    standard = command.version >= STANDARD_JSON_VERSION_MIN or bool(request.standard_json_only)
    return success(body=encode_topic_route(route, standard=standard))


def register_topic(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """217: always success."""
    topic = decode_header(TopicRequest, command.fields).topic
    if command.body:
        parts.table.register_topic(topic, decode_topic_route(command.body).queues)
    return success()


def delete_topic(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """216."""
    request = decode_header(DeleteTopicInNameServerRequest, command.fields)
    parts.table.delete_topic(request.topic, request.cluster or None)
    return success()


def get_all_topics(_command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """206."""
    if not parts.config.all_topic_list_enable:
        return failure(ResponseCode.SYSTEM_ERROR, "disable")
    return success(body=encode_topic_list(parts.table.topics()))


def get_topics_of_cluster(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """224."""
    cluster = decode_header(GetTopicsByClusterRequest, command.fields).cluster
    if not parts.config.topic_list_enable:
        return failure(ResponseCode.SYSTEM_ERROR, "disable")
    return success(body=encode_topic_list(parts.table.topics_of_cluster(cluster)))


def get_system_topics(_command: Command, peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """304: clusters and brokers have topics of their names; the broker's address is for 305."""
    clusters = parts.table.clusters()
    names = {*clusters, *(broker for members in clusters.values() for broker in members)}
    addresses = [
        address
        for data in parts.table.brokers()
        for address in _for_client(data, peer, parts).addresses.values()
    ]
    return success(body=encode_topic_list(names, addresses[0] if addresses else None))


def _unit_topics(wanted: Callable[[int], bool]) -> Handler:
    def handler(_command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
        if not parts.config.topic_list_enable:
            return failure(ResponseCode.SYSTEM_ERROR, "disable")
        return success(body=encode_topic_list(parts.table.topics_with_flags(wanted)))

    return handler


def _for_client(data: BrokerData, peer: Caller, parts: Parts) -> BrokerData:
    """A broker's addresses as this client reaches them."""
    if not parts.config.reachable_addresses:
        return data
    way = Way(peer.remote.address, peer.local.address)
    addresses = {}
    for broker_id, registered in data.addresses.items():
        origin = parts.table.origin_of(data.cluster, registered)
        addresses[broker_id], reason = reachable_address(registered, origin, way)
        told = (registered, addresses[broker_id])
        if reason and told not in parts.told and len(parts.told) < TOLD_MAX:
            parts.told.add(told)
            log.info(
                "broker %s registered as %s; clients that come to %s are told %s, because %s; "
                "set brokerIP1 to fix its address",
                data.broker, registered, way.local, addresses[broker_id], reason,
            )  # fmt: skip
    return replace(data, addresses=addresses)


# ----------------------------------------------------------------- key-values, configuration


def put_kv(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """100."""
    request = decode_header(PutKvRequest, command.fields)
    parts.key_values.put(request.namespace, request.key, request.value)
    return success()


def get_kv(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """101."""
    request = decode_header(KvRequest, command.fields)
    value = parts.key_values.get(request.namespace, request.key)
    fields = encode_header(GetKvResponse(value=value))
    if value is None:
        remark = f"No config item, Namespace: {request.namespace} Key: {request.key}"
        return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=remark)
    return success(fields)


def delete_kv(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """102."""
    request = decode_header(KvRequest, command.fields)
    parts.key_values.delete(request.namespace, request.key)
    return success()


def get_kv_list(command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """219."""
    namespace = decode_header(GetKvListRequest, command.fields).namespace
    table = parts.key_values.namespace(namespace)
    if table is None:
        return failure(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
    return success(body=encode_kv_table(table))


def get_config(_command: Command, _peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """319."""
    text = settings_text({Part.NAME_SERVER: parts.config}, {Part.NAME_SERVER: parts.at_next_start})
    return success(body=text.encode())


def update_config(command: Command, peer: Caller, parts: Parts, _now_ms: int) -> Command:
    """318: checked as a whole, written to the file, then in force or kept for the next start."""
    try:
        change = change_settings(
            {Part.NAME_SERVER: parts.config},
            {Part.NAME_SERVER: parts.at_next_start},
            bytes(command.body).decode(),
            BLACK_LIST | set(parts.config.config_black_list),
        )
        if change.pending:
            _check_start(change.at_next_start[Part.NAME_SERVER], parts.files)
        path = parts.config.config_path
        if change.entries:
            edited = edit_properties(read_text(parts.files, path) or "", change.entries)
            edit_text(parts.files, path, edited)
    except PermissionDeniedError as error:
        return failure(ResponseCode.NO_PERMISSION, error.remark)
    except (ConfigurationError, UnicodeDecodeError, OSError) as error:
        return failure(ResponseCode.SYSTEM_ERROR, str(error))
    log.info(
        "%s changed the configuration: %s", peer.remote, ", ".join(change.entries) or "nothing"
    )
    for warning in change.warnings:
        log.warning("configuration changed at run time: %s", warning)
    parts.config = change.in_force[Part.NAME_SERVER]
    parts.changed_config = change.at_next_start[Part.NAME_SERVER]
    waits = f"kept for the next start: {', '.join(change.pending)}" if change.pending else None
    return Command(ResponseCode.SUCCESS, remark=waits)


def _check_start(config: NameServerConfig, files: Files) -> None:
    """Raises ConfigurationError for what the next start would stumble over."""
    from sluicemq.net.tls_contexts import server_contexts  # noqa: PLC0415 - needs OpenSSL

    server_contexts(server_tls(config))
    if config.acl_enable:
        source = Source.of(files, config)
        source.read(source.texts())


def tolerant(handler: Handler) -> Handler:
    """A body that cannot be read, or a disk that does not write, is an answer: code 1."""

    def answer(command: Command, peer: Caller, parts: Parts, now_ms: int) -> Command:
        try:
            return handler(command, peer, parts, now_ms)
        except (ProtocolError, OSError) as error:
            return failure(ResponseCode.SYSTEM_ERROR, str(error))

    return answer


HANDLERS: Final[Mapping[int, Handler]] = {
    RequestCode.PUT_KV_CONFIG: put_kv,
    RequestCode.GET_KV_CONFIG: get_kv,
    RequestCode.DELETE_KV_CONFIG: delete_kv,
    RequestCode.REGISTER_BROKER: register_broker,
    RequestCode.UNREGISTER_BROKER: unregister_broker,
    RequestCode.GET_ROUTEINFO_BY_TOPIC: get_route,
    RequestCode.GET_BROKER_CLUSTER_INFO: get_cluster_info,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: wipe_write_permission,
    RequestCode.ADD_WRITE_PERM_OF_BROKER: add_write_permission,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: get_all_topics,
    RequestCode.DELETE_TOPIC_IN_NAMESRV: delete_topic,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: register_topic,
    RequestCode.GET_KVLIST_BY_NAMESPACE: get_kv_list,
    RequestCode.GET_TOPICS_BY_CLUSTER: get_topics_of_cluster,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: get_system_topics,
    RequestCode.GET_UNIT_TOPIC_LIST: _unit_topics(lambda flag: bool(flag & UNIT)),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: _unit_topics(
        lambda flag: bool(flag & UNIT_SUBSCRIPTION)
    ),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _unit_topics(
        lambda flag: bool(flag & UNIT_SUBSCRIPTION) and not flag & UNIT
    ),
    RequestCode.UPDATE_NAMESRV_CONFIG: update_config,
    RequestCode.GET_NAMESRV_CONFIG: get_config,
    RequestCode.QUERY_DATA_VERSION: query_data_version,
    RequestCode.GET_BROKER_MEMBER_GROUP: get_broker_member_group,
    RequestCode.BROKER_HEARTBEAT: broker_heartbeat,
}
