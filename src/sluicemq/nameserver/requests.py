"""The requests of a name server: `HANDLERS` says which function answers a code; its header is that
of the code in `wire.headers`. The one thing kept on disk are the key-values.

Codes, remarks and bodies: spec/namesrv.md, corrected by the recorded traffic. A typed answer
header whose fields are all null is `{}`, not absent (traffic README 7): `fields={}` here.
"""

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

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
from sluicemq.model.topic import ORDER_TOPICS, BrokerData
from sluicemq.nameserver.reachable import Origin, Way, reachable_address
from sluicemq.nameserver.routes import TIMEOUT_MS, Registration, RouteTable, in_zone
from sluicemq.net.tls import server_tls
from sluicemq.wire import bodies, headers
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.tables import (
    decode_data_version,
    decode_kv_config_file,
    decode_register_body,
    encode_data_version,
    encode_kv_config_file,
)

log = logging.getLogger("sluicemq.nameserver")

UNIT: Final = 0x1
UNIT_SUBSCRIPTION: Final = 0x2
LOGGED_MAX: Final = 1000
BLACK_LIST: Final = frozenset({"configStorePath", "kvConfigPath"})
_HELP = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."

Namespaces = dict[str, dict[str, str]]


class KeyValues:
    """Namespaces of keys and values (`kvConfig.json`), each change of which goes to the file at
    once. ORDER_TOPIC_CONFIG holds, for each strictly ordered topic, which brokers have how many
    queues (`broker-a:4;broker-b:2`)."""

    def __init__(self, files: Files, path: str) -> None:
        """Reads the file, or its `.bak`. Raises StoreDamagedError when neither can be read."""
        self._files = files
        self._path = path
        self._namespaces: Namespaces = load_text(files, path, _namespaces_of) or {}

    def get(self, namespace: str, key: str) -> str | None:
        return self._namespaces.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """A copy, or None when it was never written to."""
        table = self._namespaces.get(namespace)
        return None if table is None else dict(table)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Raises OSError when the file cannot be written; then nothing has changed."""
        self._replace(namespace, {**self._namespaces.get(namespace, {}), key: value})

    def delete(self, namespace: str, key: str) -> None:
        """A key that is not there is no error."""
        table = self._namespaces.get(namespace, {})
        if key in table:
            self._replace(namespace, {name: it for name, it in table.items() if name != key})

    def _replace(self, namespace: str, table: dict[str, str]) -> None:
        changed = {**self._namespaces, namespace: table}
        replace_text(self._files, self._path, encode_kv_config_file(changed))
        self._namespaces = changed


def _namespaces_of(text: str) -> Namespaces:
    try:
        return decode_kv_config_file(text)
    except ProtocolError as error:
        raise ValueError(str(error)) from error


class Caller(Protocol):
    """What handlers use of a connection (net.peer.Peer)."""

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
    logged: set[tuple[str, str]] = field(default_factory=set)
    """Replaced addresses that are logged already."""
    changed_config: NameServerConfig | None = None
    """What a start would take now, once request 318 has changed something."""

    @property
    def at_next_start(self) -> NameServerConfig:
        return self.changed_config or self.config


class Call(NamedTuple):
    """Who asks, what, and when."""

    command: Command
    peer: Caller
    now_ms: int


Handler = Callable[[Parts, Any, Call], Command | None]
"""(parts, header, call) -> the answer; None: all is well."""


def answer(parts: Parts, command: Command, peer: Caller, now_ms: int) -> Command:
    """The answer to a request. A body that cannot be read, or a disk that does not write, is an
    answer too: code 1."""
    declared = headers.REQUEST_HEADERS.get(command.code)
    try:
        header = None if declared is None else decode_header(declared, command.fields)
        found = HANDLERS[command.code](parts, header, Call(command, peer, now_ms))
    except (ProtocolError, OSError) as error:
        return failure(ResponseCode.SYSTEM_ERROR, str(error))
    return success() if found is None else found


def success(fields: dict[str, str] | None = None, body: bytes = b"") -> Command:
    """The answer that all is well."""
    return Command(ResponseCode.SUCCESS, fields, body)


def failure(code: ResponseCode, remark: str) -> Command:
    """The answer that it is not."""
    return Command(code, remark=remark)


# ----------------------------------------------------------------------------------- brokers


def register_broker(
    parts: Parts, header: headers.RegisterBrokerRequest, call: Call
) -> Command | None:
    command, peer, now_ms = call
    if header.body_crc32 and zlib.crc32(command.body) & 0x7FFFFFFF != header.body_crc32:
        return failure(ResponseCode.SYSTEM_ERROR, "crc32 not match")
    body = decode_register_body(command.body, compressed=header.compressed, version=command.version)
    known, timeout_ms = parts.table.broker(header.broker), header.heartbeat_timeout_ms
    fields = command.fields or {}
    interfaces = (part.strip() for part in fields.get(INTERFACES_FIELD, "").split(","))
    master = parts.table.register(
        Registration(
            cluster=header.cluster,
            broker=header.broker,
            broker_id=header.broker_id,
            address=header.address,
            ha_address=header.ha_address,
            timeout_ms=TIMEOUT_MS if timeout_ms is None else timeout_ms,
            acting_master_enable=header.acting_master_enable,
            zone=header.zone,
            topics=body.table.topics,
            is_complete=parts.config.delete_topic_with_registration,
            version=body.table.data_version,
            origin=Origin(
                source=peer.remote.address,
                reached=peer.local.address,
                fixed=fields.get(FIXED_FIELD, "") == "true",
                interfaces=tuple(part for part in interfaces if part),
            ),
            connection=peer,
        ),
        now_ms,
    )
    if known is None or known.addresses.get(header.broker_id) != header.address:
        log.info(
            "broker %s (id %d) of %s registers as %s from %s",
            header.broker, header.broker_id, header.cluster, header.address, peer.remote,
        )  # fmt: skip
    told = encode_header(
        headers.RegisterBrokerResponse(ha_address=master.ha_address, master_address=master.address)
    )
    orders = parts.key_values.namespace(ORDER_TOPICS)
    if orders is None or not parts.config.return_order_config_to_broker:
        return success(told)
    return success(told, bodies.encode_kv_table(orders))


def unregister_broker(parts: Parts, header: headers.BrokerRequest, _call: Call) -> None:
    parts.table.unregister(header.cluster, header.broker, header.address)
    log.info("broker %s at %s unregisters", header.broker, header.address)


def query_data_version(parts: Parts, header: headers.BrokerRequest, call: Call) -> Command:
    """322: may the broker skip its registration?"""
    held = parts.table.version_of(header.cluster, header.address)
    parts.table.refresh(header.cluster, header.address, call.now_ms)
    changed = held is None or held != decode_data_version(call.command.body or b"{}")
    body = b"" if held is None else encode_data_version(held)
    return success(encode_header(headers.QueryDataVersionResponse(changed=changed)), body)


def broker_heartbeat(parts: Parts, header: headers.BrokerHeartbeatRequest, call: Call) -> None:
    parts.table.refresh(header.cluster, header.address, call.now_ms)


def get_broker_member_group(
    parts: Parts, header: headers.GetBrokerMemberGroupRequest, call: Call
) -> Command:
    data = parts.table.broker(header.broker)
    addresses: Mapping[int, str] = {}
    if data is not None and data.cluster == header.cluster:
        addresses = _for_client(data, call.peer, parts).addresses
    body = bodies.encode_broker_member_group(header.cluster, header.broker, addresses)
    return success(body=body)


def wipe_write_permission(
    parts: Parts, header: headers.WritePermissionRequest, _call: Call
) -> Command:
    count = parts.table.wipe_write_permission(header.broker)
    log.info("write permission of broker %s taken from %d topics", header.broker, count)
    return success(encode_header(headers.WritePermissionWipedResponse(topic_count=count)))


def add_write_permission(
    parts: Parts, header: headers.WritePermissionRequest, _call: Call
) -> Command:
    count = parts.table.add_write_permission(header.broker)
    log.info("write permission of broker %s given to %d topics", header.broker, count)
    return success(encode_header(headers.WritePermissionAddedResponse(topic_count=count)))


def get_cluster_info(parts: Parts, _header: None, call: Call) -> Command:
    """106: integer keys for every version."""
    brokers = {data.broker: _for_client(data, call.peer, parts) for data in parts.table.brokers()}
    clusters = {name: tuple(members) for name, members in parts.table.clusters().items()}
    return success(body=bodies.encode_cluster_info(bodies.ClusterInfo(brokers, clusters)))


def _for_client(data: BrokerData, peer: Caller, parts: Parts) -> BrokerData:
    """A broker's addresses as this client reaches them."""
    if not parts.config.reachable_addresses:
        return data
    way = Way(peer.remote.address, peer.local.address)
    addresses = {}
    for broker_id, registered in data.addresses.items():
        origin = parts.table.origin_of(data.cluster, registered)
        address, reason = reachable_address(registered, origin, way)
        addresses[broker_id] = address
        pair = (registered, address)
        if reason and pair not in parts.logged and len(parts.logged) < LOGGED_MAX:
            parts.logged.add(pair)
            log.info(
                "broker %s registered as %s; clients that come to %s are told %s, because %s; "
                "set brokerIP1 to fix its address",
                data.broker, registered, way.local, address, reason,
            )  # fmt: skip
    return replace(data, addresses=addresses)


# ----------------------------------------------------------------------------------- topics


def get_route(parts: Parts, header: headers.GetRouteRequest, call: Call) -> Command:
    config, peer = parts.config, call.peer
    waited_ms = call.now_ms - parts.started_ms
    if config.wait_for_service and waited_ms < config.wait_for_service_s * 1000:
        return failure(ResponseCode.SYSTEM_ERROR, "name server not ready")
    route = parts.table.route(header.topic, acting_master=config.acting_master_support)
    if route is None:
        remark = f"No topic route info in name server for the topic: {header.topic}{_HELP}"
        return failure(ResponseCode.TOPIC_NOT_EXIST, remark)
    if header.zone_mode == "true" and header.zone:
        route = in_zone(route, header.zone)
    orders = parts.key_values.get(ORDER_TOPICS, header.topic)
    route = replace(
        route,
        brokers=tuple(_for_client(data, peer, parts) for data in route.brokers),
        order_topic_config=orders if config.order_message_enable else None,
    )
    is_new = call.command.version >= bodies.STANDARD_JSON_VERSION_MIN
    standard = is_new or bool(header.standard_json_only)
    return success(body=bodies.encode_topic_route(route, standard=standard))


def register_topic(parts: Parts, header: headers.TopicRequest, call: Call) -> None:
    """217: always success."""
    if call.command.body:
        queues = bodies.decode_topic_route(call.command.body).queues
        parts.table.register_topic(header.topic, queues)


def delete_topic(parts: Parts, header: headers.DeleteTopicInNameServerRequest, _call: Call) -> None:
    parts.table.delete_topic(header.topic, header.cluster or None)


def get_all_topics(parts: Parts, _header: None, _call: Call) -> Command:
    return _topic_list(parts.config.all_topic_list_enable, parts.table.topics)


def get_topics_of_cluster(
    parts: Parts, header: headers.GetTopicsByClusterRequest, _call: Call
) -> Command:
    return _topic_list(
        parts.config.topic_list_enable, lambda: parts.table.topics_of_cluster(header.cluster)
    )


def _unit_topics(wanted: Callable[[int], bool]) -> Handler:
    return lambda parts, _header, _call: _topic_list(
        parts.config.topic_list_enable, lambda: parts.table.topics_with_flags(wanted)
    )


def _topic_list(is_enabled: bool, topics: Callable[[], list[str]]) -> Command:
    if not is_enabled:
        return failure(ResponseCode.SYSTEM_ERROR, "disable")
    return success(body=bodies.encode_topic_list(topics()))


def get_system_topics(parts: Parts, _header: None, call: Call) -> Command:
    """304: clusters and brokers have topics of their names; the broker's address is for 305."""
    clusters = parts.table.clusters()
    names = {*clusters, *(broker for members in clusters.values() for broker in members)}
    addresses = [
        address
        for data in parts.table.brokers()
        for address in _for_client(data, call.peer, parts).addresses.values()
    ]
    return success(body=bodies.encode_topic_list(names, addresses[0] if addresses else None))


# ----------------------------------------------------------------- key-values, configuration


def put_kv(parts: Parts, header: headers.PutKvRequest, _call: Call) -> None:
    parts.key_values.put(header.namespace, header.key, header.value)


def get_kv(parts: Parts, header: headers.KvRequest, _call: Call) -> Command:
    value = parts.key_values.get(header.namespace, header.key)
    fields = encode_header(headers.GetKvResponse(value=value))
    if value is None:
        remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
        return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=remark)
    return success(fields)


def delete_kv(parts: Parts, header: headers.KvRequest, _call: Call) -> None:
    parts.key_values.delete(header.namespace, header.key)


def get_kv_list(parts: Parts, header: headers.GetKvListRequest, _call: Call) -> Command:
    table = parts.key_values.namespace(header.namespace)
    if table is None:
        remark = f"No config item, Namespace: {header.namespace}"
        return failure(ResponseCode.QUERY_NOT_FOUND, remark)
    return success(body=bodies.encode_kv_table(table))


def get_config(parts: Parts, _header: None, _call: Call) -> Command:
    text = settings_text({Part.NAME_SERVER: parts.config}, {Part.NAME_SERVER: parts.at_next_start})
    return success(body=text.encode())


def update_config(parts: Parts, _header: None, call: Call) -> Command:
    """318: checked as a whole, written to the file, then in force or kept for the next start."""
    try:
        change = change_settings(
            {Part.NAME_SERVER: parts.config},
            {Part.NAME_SERVER: parts.at_next_start},
            bytes(call.command.body).decode(),
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
    except (ConfigurationError, UnicodeDecodeError) as error:
        return failure(ResponseCode.SYSTEM_ERROR, str(error))
    changed = ", ".join(change.entries) or "nothing"
    log.info("%s changed the configuration: %s", call.peer.remote, changed)
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
