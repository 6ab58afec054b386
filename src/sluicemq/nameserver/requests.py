"""The requests of a name server: `TABLE` says which function answers a code, and with which header.
The one thing kept on disk are the key-values.

Codes, remarks and bodies: spec/namesrv.md, corrected by the recorded traffic. A typed answer
header whose fields are all null is `{}`, not absent (traffic README 7): `fields={}` here.
"""

import logging
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, cast

from sluicemq.acl.loading import RuleSource
from sluicemq.config import (
    Change,
    NameServerConfig,
    Part,
    change_settings,
    edit_properties,
    reread_settings,
    settings_text,
)
from sluicemq.errors import ConfigurationError, PermissionDeniedError, ProtocolError
from sluicemq.files import Files, edit_text, load_text, read_text, replace_text
from sluicemq.model.addresses import FIXED_FIELD, INTERFACES_FIELD
from sluicemq.model.topic import ORDER_TOPICS, BrokerData, TopicConfig
from sluicemq.nameserver.routes import (
    TIMEOUT_MS,
    Origin,
    Registration,
    RouteTable,
    Way,
    in_zone,
    reachable_address,
)
from sluicemq.net.dispatch import Peer
from sluicemq.net.openssl import load_server_context
from sluicemq.net.work.background import WorkItem, run_first_step, run_now
from sluicemq.wire import bodies, fastjson
from sluicemq.wire import headers as h
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.registration import (
    BrokerRequest,
    QueryDataVersionResponse,
    RegisterBody,
    RegisterBrokerRequest,
    decode_register_body,
)
from sluicemq.wire.replicas import (
    BrokerHeartbeatRequest,
    GetBrokerMemberGroupRequest,
    WritePermissionAddedResponse,
    WritePermissionRequest,
    WritePermissionWipedResponse,
)
from sluicemq.wire.tables import (
    decode_data_version,
    decode_kv_config_file,
    encode_data_version,
    encode_kv_config_file,
)

log = logging.getLogger("sluicemq.nameserver")

UNIT: Final = 0x1
UNIT_SUBSCRIPTION: Final = 0x2
LOGGED_MAX: Final = 1000
INLINE_BYTES: Final = 16 * 1024
INLINE_VALUES: Final = 2048
"""A registration in JSON up to this size, 80 topics, is decoded at once."""
KEY_VALUES_BYTES_MAX: Final = 1024 * 1024
"""The most bytes of kvConfig.json, which is written anew with each change. 20,000 strictly ordered
topics on two brokers take 1 MB."""
BROKERS_A_STEP: Final = 64
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
        self._namespaces: Namespaces = load_text(files, path, decode_kv_config_file) or {}

    def get(self, namespace: str, key: str) -> str | None:
        return self._namespaces.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """A copy, or None when it was never written to."""
        table = self._namespaces.get(namespace)
        return None if table is None else dict(table)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a key. Raises OSError when the file cannot be written, ProtocolError when it would
        become too large; then nothing has changed."""
        self._replace(namespace, {**self._namespaces.get(namespace, {}), key: value})

    def delete(self, namespace: str, key: str) -> None:
        """A key that is not there is no error."""
        table = self._namespaces.get(namespace, {})
        if key in table:
            self._replace(namespace, {name: it for name, it in table.items() if name != key})

    def _replace(self, namespace: str, table: dict[str, str]) -> None:
        changed = {**self._namespaces, namespace: table}
        text, known = encode_kv_config_file(changed), self._namespaces.get(namespace, {})
        if len(text) > KEY_VALUES_BYTES_MAX and len(table) >= len(known):
            raise ProtocolError(
                f"The key-values would have {len(text)} bytes, at most {KEY_VALUES_BYTES_MAX} are "
                "kept.",
                fix="Delete key-values that are not used any more.",
            )
        replace_text(self._files, self._path, text)
        self._namespaces = changed


class Call(NamedTuple):
    """Who asks, what, and when."""

    command: Command
    peer: Peer
    now_ms: int


def success(fields: dict[str, str] | None = None, body: bytes = b"") -> Command:
    """The answer that all is well."""
    return Command(ResponseCode.SUCCESS, fields, body)


def failure(code: ResponseCode, remark: str) -> Command:
    """The answer that it is not."""
    return Command(code, remark=remark)


def _is_brief(body: bytes) -> bool:
    """Return whether a registration is plain JSON of so few values that it can be decoded here."""
    is_short = body[:1] in (b"", b"{") and len(body) <= INLINE_BYTES
    return is_short and fastjson.bound_counts(body).values <= INLINE_VALUES


def _decode_registration(
    command: Command,
    header: RegisterBrokerRequest,
    bytes_max: int,
    is_wanted: Callable[[], bool],
) -> RegisterBody:
    """Return what a broker registers. Raises ProtocolError."""
    if header.body_crc32 and zlib.crc32(command.body) & 0x7FFFFFFF != header.body_crc32:
        raise ProtocolError("crc32 not match")
    return decode_register_body(
        command.body, compressed=header.compressed, version=command.version, bytes_max=bytes_max,
        is_wanted=is_wanted,
    )  # fmt: skip


class Requests:
    """What a name server knows, and how it answers. A handler without an answer says that all is
    well."""

    def __init__(
        self, config: NameServerConfig, files: Files, table: RouteTable, started_ms: int
    ) -> None:
        """Reads the key-values. Raises StoreDamagedError when they are broken."""
        self.config = config  # replaced by request 318
        self.at_next_start = config
        self.table = table
        self.key_values = KeyValues(files, config.kv_config_path)
        self._files = files
        self._started_ms = started_ms
        self.drop: Callable[[dict[str, TopicConfig]], None] = dict.clear
        """Frees topics that were not taken over: a server does it in slices."""
        self._logged: set[tuple[str, str]] = set()  # replaced addresses

    def answer(self, command: Command, peer: Peer, now_ms: int) -> Command:
        """Return the answer to a request, after all of its work. See `begin`."""
        found = self.begin(command, peer, now_ms)
        return found if isinstance(found, Command) else run_now(found)

    def begin(self, command: Command, peer: Peer, now_ms: int) -> Command | WorkItem[Command]:
        """Return the answer to a request, or the work that ends with it, where that may take long.
        A body that cannot be read, or a disk that does not write, is an answer too: code 1."""
        row = TABLE[command.code]
        try:
            header = row.header and decode_header(row.header, command.fields)
            found = row.handler(self, header, Call(command, peer, now_ms))
        except (ProtocolError, OSError) as error:
            return failure(ResponseCode.SYSTEM_ERROR, str(error))
        if isinstance(found, Generator):
            return run_first_step(self._finishing(found))
        return success() if found is None else found

    @staticmethod
    def _finishing(steps: WorkItem[Command | None]) -> WorkItem[Command]:
        try:
            found = yield from steps
        except (ProtocolError, OSError) as error:
            return failure(ResponseCode.SYSTEM_ERROR, str(error))
        return success() if found is None else found

    # ------------------------------------------------------------------------------- brokers

    def register_broker(self, header: RegisterBrokerRequest, call: Call) -> WorkItem[Command]:
        """103. A broker's topics are decoded in another thread and taken over in slices."""
        command, peer, _ = call
        decode = partial(
            _decode_registration, command, header, self.config.registration_bytes_max,
            lambda: not peer.is_disconnected,
        )  # fmt: skip
        body = decode() if _is_brief(bytes(command.body)) else (yield decode)
        topics = cast(dict[str, TopicConfig], body.table.topics)  # of this registration alone
        try:
            return (yield from self._take_over(header, call, body, topics))
        finally:
            self.drop(topics)

    def _take_over(
        self,
        header: RegisterBrokerRequest,
        call: Call,
        body: RegisterBody,
        topics: dict[str, TopicConfig],
    ) -> WorkItem[Command]:
        command, peer, now_ms = call
        known, timeout_ms = self.table.broker(header.broker), header.heartbeat_timeout_ms
        fields = command.fields or {}
        interfaces = (part.strip() for part in fields.get(INTERFACES_FIELD, "").split(","))
        master = yield from self.table.registering(
            Registration(
                cluster=header.cluster,
                broker=header.broker,
                broker_id=header.broker_id,
                address=header.address,
                ha_address=header.ha_address,
                timeout_ms=TIMEOUT_MS if timeout_ms is None else timeout_ms,
                acting_master_enable=header.acting_master_enable,
                zone=header.zone,
                topics=topics,
                is_complete=self.config.delete_topic_with_registration,
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
        orders = self.key_values.namespace(ORDER_TOPICS)
        if orders is None or not self.config.return_order_config_to_broker:
            return success(encode_header(master))
        return success(encode_header(master), bodies.encode_kv_table(orders))

    def unregister_broker(self, header: BrokerRequest, _call: Call) -> WorkItem[None]:
        yield from self.table.unregistering(header.cluster, header.broker, header.address)
        log.info("broker %s at %s unregisters", header.broker, header.address)

    def query_data_version(self, header: BrokerRequest, call: Call) -> Command:
        """322: may the broker skip its registration?"""
        held = self.table.version_of(header.cluster, header.address)
        self.table.refresh(header.cluster, header.address, call.now_ms)
        changed = held is None or held != decode_data_version(call.command.body or b"{}")
        body = b"" if held is None else encode_data_version(held)
        return success(encode_header(QueryDataVersionResponse(changed=changed)), body)

    def broker_heartbeat(self, header: BrokerHeartbeatRequest, call: Call) -> None:
        self.table.refresh(header.cluster, header.address, call.now_ms)

    def member_group(self, header: GetBrokerMemberGroupRequest, call: Call) -> Command:
        data = self.table.broker(header.broker)
        addresses: Mapping[int, str] = {}
        if data is not None and data.cluster == header.cluster:
            addresses = self._for_client(data, call.peer).addresses
        body = bodies.encode_broker_member_group(header.cluster, header.broker, addresses)
        return success(body=body)

    def wipe_write_permission(
        self, header: WritePermissionRequest, _call: Call
    ) -> WorkItem[Command]:
        count = yield from self.table.wiping_write_permission(header.broker)
        log.info("write permission of broker %s taken from %d topics", header.broker, count)
        return success(encode_header(WritePermissionWipedResponse(topic_count=count)))

    def add_write_permission(
        self, header: WritePermissionRequest, _call: Call
    ) -> WorkItem[Command]:
        count = yield from self.table.adding_write_permission(header.broker)
        log.info("write permission of broker %s given to %d topics", header.broker, count)
        return success(encode_header(WritePermissionAddedResponse(topic_count=count)))

    def cluster_info(self, _header: None, call: Call) -> WorkItem[Command]:
        """106: integer keys for every version."""
        brokers = {}
        for count, data in enumerate(self.table.brokers(), 1):
            brokers[data.broker] = self._for_client(data, call.peer)
            if count % BROKERS_A_STEP == 0:
                yield None
        clusters = {name: tuple(members) for name, members in self.table.clusters().items()}
        return success(body=bodies.encode_cluster_info(bodies.ClusterInfo(brokers, clusters)))

    def _for_client(self, data: BrokerData, peer: Peer) -> BrokerData:
        """A broker's addresses as this client reaches them."""
        if not self.config.reachable_addresses:
            return data
        way = Way(peer.remote.address, peer.local.address)
        addresses = {}
        for broker_id, registered in data.addresses.items():
            origin = self.table.origin_of(data.cluster, registered)
            address, reason = reachable_address(registered, origin, way)
            addresses[broker_id] = address
            pair = (registered, address)
            if reason and pair not in self._logged and len(self._logged) < LOGGED_MAX:
                self._logged.add(pair)
                log.info(
                    "broker %s registered as %s; clients that come to %s are told %s, because %s; "
                    "set brokerIP1 to fix its address",
                    data.broker, registered, way.local, address, reason,
                )  # fmt: skip
        return replace(data, addresses=addresses)

    # -------------------------------------------------------------------------------- topics

    def wait_ms(self, now_ms: int) -> int:
        """For how long routes are refused yet, in ms (needWaitForService)."""
        if not self.config.wait_for_service:
            return 0
        return max(self._started_ms + self.config.wait_for_service_s * 1000 - now_ms, 0)

    def route(self, header: h.GetRouteRequest, call: Call) -> Command:
        config = self.config
        if self.wait_ms(call.now_ms):
            return failure(ResponseCode.SYSTEM_ERROR, "name server not ready")
        route = self.table.route(header.topic, acting_master=config.acting_master_support)
        if route is None:
            remark = f"No topic route info in name server for the topic: {header.topic}{_HELP}"
            return failure(ResponseCode.TOPIC_NOT_EXIST, remark)
        if header.zone_mode == "true" and header.zone:
            route = in_zone(route, header.zone)
        orders = self.key_values.get(ORDER_TOPICS, header.topic)
        route = replace(
            route,
            brokers=tuple(self._for_client(data, call.peer) for data in route.brokers),
            order_topic_config=orders if config.order_message_enable else None,
        )
        is_new = call.command.version >= bodies.STANDARD_JSON_VERSION_MIN
        standard = is_new or bool(header.standard_json_only)
        return success(body=bodies.encode_topic_route(route, standard=standard))

    def register_topic(self, header: h.TopicRequest, call: Call) -> None:
        """217: always success."""
        if call.command.body:
            queues = bodies.decode_topic_route(call.command.body).queues
            self.table.register_topic(header.topic, queues)

    def delete_topic(self, header: h.DeleteTopicInNameServerRequest, _call: Call) -> None:
        self.table.delete_topic(header.topic, header.cluster or None)

    def topic_list(
        self, header: h.GetTopicsByClusterRequest | None, call: Call
    ) -> WorkItem[Command]:
        """206: all; 224: of a cluster; 311 to 313: with units, of which the broker knows."""
        config, table, code = self.config, self.table, call.command.code
        is_all = code == Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        if not (config.all_topic_list_enable if is_all else config.topic_list_enable):
            return failure(ResponseCode.SYSTEM_ERROR, "disable")
        if header is not None:
            topics = table.topics_of_cluster(header.cluster)
        else:
            is_wanted = _UNITS.get(code)
            topics = (
                table.topics()
                if is_wanted is None
                else (yield from table.looking_for_flags(is_wanted))
            )
        return success(body=bodies.encode_topic_list(topics))

    def system_topics(self, _header: None, call: Call) -> Command:
        """304: clusters and brokers have topics of their names; the broker's address is for 305."""
        clusters = self.table.clusters()
        names = {*clusters, *(broker for members in clusters.values() for broker in members)}
        first = next(iter(self.table.brokers()), None)
        addresses = self._for_client(first, call.peer).addresses.values() if first else ()
        return success(body=bodies.encode_topic_list(names, next(iter(addresses), None)))

    # ------------------------------------------------------------- key-values, configuration

    def put_kv(self, header: h.PutKvRequest, _call: Call) -> None:
        self.key_values.put(header.namespace, header.key, header.value)

    def get_kv(self, header: h.KvRequest, _call: Call) -> Command:
        value = self.key_values.get(header.namespace, header.key)
        fields = encode_header(h.GetKvResponse(value=value))
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=remark)
        return success(fields)

    def delete_kv(self, header: h.KvRequest, _call: Call) -> None:
        self.key_values.delete(header.namespace, header.key)

    def kv_list(self, header: h.GetKvListRequest, _call: Call) -> Command:
        table = self.key_values.namespace(header.namespace)
        if table is None:
            remark = f"No config item, Namespace: {header.namespace}"
            return failure(ResponseCode.QUERY_NOT_FOUND, remark)
        return success(body=bodies.encode_kv_table(table))

    def show_config(self, _header: None, _call: Call) -> Command:
        text = settings_text(
            {Part.NAME_SERVER: self.config}, {Part.NAME_SERVER: self.at_next_start}
        )
        return success(body=text.encode())

    def reread_config(self) -> Change:
        """Takes up what was edited in the file. Raises ConfigurationError, and then nothing has
        changed."""
        text = read_text(self._files, self.config.config_path) or ""
        in_force, later = ({Part.NAME_SERVER: it} for it in (self.config, self.at_next_start))
        change = reread_settings(in_force, later, text)
        self._apply(change)
        return change

    def _apply(self, change: Change) -> None:
        self.config = change.in_force[Part.NAME_SERVER]
        self.at_next_start = change.at_next_start[Part.NAME_SERVER]

    def change_config(self, _header: None, call: Call) -> Command:
        """318: checked as a whole, written to the file, in force or kept for the next start."""
        try:
            change = change_settings(
                {Part.NAME_SERVER: self.config},
                {Part.NAME_SERVER: self.at_next_start},
                bytes(call.command.body).decode(),
                BLACK_LIST | set(self.config.config_black_list),
            )
            config, path = change.at_next_start[Part.NAME_SERVER], self.config.config_path
            if change.pending:  # what the next start would stumble over
                load_server_context(config)
                if config.acl_enable:
                    source = RuleSource.from_config(self._files, config)
                    source.load(source.read_files())
            if change.entries:
                edited = edit_properties(read_text(self._files, path) or "", change.entries)
                edit_text(self._files, path, edited)
        except PermissionDeniedError as error:
            return failure(ResponseCode.NO_PERMISSION, error.remark)
        except (ConfigurationError, UnicodeDecodeError) as error:
            return failure(ResponseCode.SYSTEM_ERROR, str(error))
        changed = ", ".join(change.entries) or "nothing"
        log.info("%s changed the configuration: %s", call.peer.remote, changed)
        for warning in change.warnings:
            log.warning("configuration changed at run time: %s", warning)
        self._apply(change)
        return Command(ResponseCode.SUCCESS, remark=change.remark)


class Row(NamedTuple):
    """Where a request goes, and its header."""

    header: type | None
    handler: Callable[..., Command | WorkItem[Command | None] | None]


TABLE: Final[dict[int, Row]] = {
    Code.REGISTER_BROKER: Row(RegisterBrokerRequest, Requests.register_broker),
    Code.UNREGISTER_BROKER: Row(BrokerRequest, Requests.unregister_broker),
    Code.QUERY_DATA_VERSION: Row(BrokerRequest, Requests.query_data_version),
    Code.BROKER_HEARTBEAT: Row(BrokerHeartbeatRequest, Requests.broker_heartbeat),
    Code.GET_BROKER_MEMBER_GROUP: Row(GetBrokerMemberGroupRequest, Requests.member_group),
    Code.GET_BROKER_CLUSTER_INFO: Row(None, Requests.cluster_info),
    Code.WIPE_WRITE_PERM_OF_BROKER: Row(WritePermissionRequest, Requests.wipe_write_permission),
    Code.ADD_WRITE_PERM_OF_BROKER: Row(WritePermissionRequest, Requests.add_write_permission),
    Code.GET_ROUTEINFO_BY_TOPIC: Row(h.GetRouteRequest, Requests.route),
    Code.REGISTER_TOPIC_IN_NAMESRV: Row(h.TopicRequest, Requests.register_topic),
    Code.DELETE_TOPIC_IN_NAMESRV: Row(h.DeleteTopicInNameServerRequest, Requests.delete_topic),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Row(None, Requests.topic_list),
    Code.GET_TOPICS_BY_CLUSTER: Row(h.GetTopicsByClusterRequest, Requests.topic_list),
    Code.GET_UNIT_TOPIC_LIST: Row(None, Requests.topic_list),
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST: Row(None, Requests.topic_list),
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: Row(None, Requests.topic_list),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: Row(None, Requests.system_topics),
    Code.PUT_KV_CONFIG: Row(h.PutKvRequest, Requests.put_kv),
    Code.GET_KV_CONFIG: Row(h.KvRequest, Requests.get_kv),
    Code.DELETE_KV_CONFIG: Row(h.KvRequest, Requests.delete_kv),
    Code.GET_KVLIST_BY_NAMESPACE: Row(h.GetKvListRequest, Requests.kv_list),
    Code.UPDATE_NAMESRV_CONFIG: Row(None, Requests.change_config),
    Code.GET_NAMESRV_CONFIG: Row(None, Requests.show_config),
}
_UNITS: Final[dict[int, Callable[[int], bool]]] = {
    Code.GET_UNIT_TOPIC_LIST: lambda flag: bool(flag & UNIT),
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST: lambda flag: bool(flag & UNIT_SUBSCRIPTION),
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: lambda flag: flag & 3 == UNIT_SUBSCRIPTION,
}
