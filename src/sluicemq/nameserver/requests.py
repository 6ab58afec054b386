"""The request handlers of a name server, and its key-value configuration.

`TABLE` has the header and the handler of each request code. Only the key-values are kept on disk.

Codes, remarks and bodies follow spec/namesrv.md, corrected by recorded traffic of RocketMQ. If all
fields of an answer's declared header are null, RocketMQ sends `{}`, not an absent header (traffic
README 7). Such handlers pass `fields={}`.
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
    ClientConnection,
    Origin,
    Registration,
    RouteTable,
    filter_zone,
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

UNIT_FLAG: Final = 0x1
"""RocketMQ's system flag of a topic that belongs to a unit."""

UNIT_SUBSCRIPTION_FLAG: Final = 0x2
"""RocketMQ's system flag of a topic that groups of a unit subscribe to."""

LOGGED_ADDRESSES_MAX: Final = 1000
"""The number of replaced broker addresses that are logged."""

INLINE_BYTES_MAX: Final = 16 * 1024
"""The size of a registration that is decoded on the event loop at most."""

INLINE_VALUES_MAX: Final = 2048
"""The number of JSON values of a registration that is decoded on the event loop at most. A topic
has about 25 values."""

KEY_VALUES_BYTES_MAX: Final = 1024 * 1024
"""The size of kvConfig.json at most. Each change writes the whole file. 20,000 strictly ordered
topics on two brokers take 1 MB."""

BROKERS_PER_STEP: Final = 64
"""The number of brokers that one step of GET_BROKER_CLUSTER_INFO adds to the answer."""

BLACK_LIST: Final = frozenset({"configStorePath", "kvConfigPath"})
"""Settings that UPDATE_NAMESRV_CONFIG may not change."""

_HELP = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."

Namespaces = dict[str, dict[str, str]]
"""Values by namespace and key."""


class KeyValues:
    """Namespaces of keys and values, stored in `kvConfig.json`.

    Each change is written to the file at once. The namespace ORDER_TOPIC_CONFIG has the number of
    queues on each broker for each strictly ordered topic, such as `broker-a:4;broker-b:2`.
    """

    def __init__(self, files: Files, path: str) -> None:
        """Read the file or its `.bak`. Raises StoreDamagedError if neither can be read."""
        self._files = files
        self._path = path
        self._namespaces: Namespaces = load_text(files, path, decode_kv_config_file) or {}

    def get(self, namespace: str, key: str) -> str | None:
        """Return a value, or None."""
        return self._namespaces.get(namespace, {}).get(key)

    def get_namespace(self, namespace: str) -> dict[str, str] | None:
        """Return a copy of a namespace, or None if no key was ever put into it."""
        table = self._namespaces.get(namespace)
        return None if table is None else dict(table)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a key.

        Raises OSError if the file cannot be written, and ProtocolError if it would become too
        large. Then nothing is changed.
        """
        self._replace(namespace, {**self._namespaces.get(namespace, {}), key: value})

    def delete(self, namespace: str, key: str) -> None:
        """Delete a key, if it exists. Raises OSError; then nothing is changed."""
        table = self._namespaces.get(namespace, {})
        if key in table:
            self._replace(namespace, {name: it for name, it in table.items() if name != key})

    def _replace(self, namespace: str, table: dict[str, str]) -> None:
        """Replace a namespace, in the file and then in memory. Raises OSError, ProtocolError."""
        changed = {**self._namespaces, namespace: table}
        text, known = encode_kv_config_file(changed), self._namespaces.get(namespace, {})
        if len(text) > KEY_VALUES_BYTES_MAX and len(table) >= len(known):
            raise ProtocolError(
                f"The key-values would take {len(text)} bytes, but the limit is "
                f"{KEY_VALUES_BYTES_MAX}.",
                fix="Delete key-values that are no longer used.",
            )
        replace_text(self._files, self._path, text)
        self._namespaces = changed


class RequestContext(NamedTuple):
    """A request, its connection and its time."""

    command: Command
    peer: Peer
    now_ms: int
    """The time of the request, in ms of the server's monotonic clock."""


def success_answer(fields: dict[str, str] | None = None, body: bytes = b"") -> Command:
    """Return an answer with code SUCCESS."""
    return Command(ResponseCode.SUCCESS, fields, body)


def error_answer(code: ResponseCode, remark: str) -> Command:
    """Return an answer with an error code."""
    return Command(code, remark=remark)


def _is_brief(body: bytes) -> bool:
    """Return whether a registration is plain JSON within INLINE_BYTES_MAX and INLINE_VALUES_MAX."""
    is_short = body[:1] in (b"", b"{") and len(body) <= INLINE_BYTES_MAX
    return is_short and fastjson.bound_counts(body).values <= INLINE_VALUES_MAX


def _decode_registration(
    command: Command,
    header: RegisterBrokerRequest,
    bytes_max: int,
    is_wanted: Callable[[], bool],
) -> RegisterBody:
    """Return the decoded body of a registration. Raises ProtocolError if it is malformed.

    `bytes_max` limits the decompressed size. Decoding stops when `is_wanted()` is False.
    """
    if header.body_crc32 and zlib.crc32(command.body) & 0x7FFFFFFF != header.body_crc32:
        raise ProtocolError("crc32 not match")
    return decode_register_body(
        command.body,
        compressed=header.compressed,
        version=command.version,
        bytes_max=bytes_max,
        is_wanted=is_wanted,
    )


class NameServerRequests:
    """The state of a name server, and the handlers of its requests.

    A handler returns the answer, None for a success without fields, or a work item that ends with
    one of these. A ProtocolError or OSError that it raises becomes an answer with SYSTEM_ERROR.
    """

    def __init__(
        self, config: NameServerConfig, files: Files, table: RouteTable, started_ms: int
    ) -> None:
        """Read the key-values. Raises StoreDamagedError if they cannot be read.

        `started_ms` is the time of the start, on the clock of `RequestContext.now_ms`.
        """
        self.config = config
        """The settings in force. UPDATE_NAMESRV_CONFIG and `reread_config` replace them."""
        self.at_next_start = config
        """The settings of the file, some of which take effect only at the next start."""
        self.table = table
        self.key_values = KeyValues(files, config.kv_config_path)
        self._files = files
        self._started_ms = started_ms
        self.free_topics: Callable[[dict[str, TopicConfig]], None] = dict.clear
        """Frees the topics of a registration that were not applied. The server sets a function that
        does it in slices."""
        self._logged_addresses: set[tuple[str, str]] = set()
        """The replaced addresses that were logged: (registered, told to clients)."""

    def handle_now(self, command: Command, peer: Peer, now_ms: int) -> Command:
        """Return the answer to a request, after doing all of its work; see `handle`."""
        found = self.handle(command, peer, now_ms)
        return found if isinstance(found, Command) else run_now(found)

    def handle(self, command: Command, peer: Peer, now_ms: int) -> Command | WorkItem[Command]:
        """Return the answer to a request, or a work item that returns it if that may take long.

        A malformed request or a failure of the disk is answered with SYSTEM_ERROR (1).
        """
        row = TABLE[command.code]
        try:
            header = row.header and decode_header(row.header, command.fields)
            found = row.handler(self, header, RequestContext(command, peer, now_ms))
        except (ProtocolError, OSError) as error:
            return error_answer(ResponseCode.SYSTEM_ERROR, str(error))
        if isinstance(found, Generator):
            return run_first_step(self._finishing(found))
        return success_answer() if found is None else found

    @staticmethod
    def _finishing(steps: WorkItem[Command | None]) -> WorkItem[Command]:
        """Do the work of a handler, and return its answer, success, or an error answer."""
        try:
            found = yield from steps
        except (ProtocolError, OSError) as error:
            return error_answer(ResponseCode.SYSTEM_ERROR, str(error))
        return success_answer() if found is None else found

    # ------------------------------------------------------------------------------- brokers

    def register_broker(
        self, header: RegisterBrokerRequest, call: RequestContext
    ) -> WorkItem[Command]:
        """Handle REGISTER_BROKER (103).

        A large body is decoded in another thread, and the topics are applied in slices.
        """
        command, peer, _ = call
        decode = partial(
            _decode_registration,
            command,
            header,
            self.config.registration_bytes_max,
            lambda: not peer.is_disconnected,
        )
        body = decode() if _is_brief(bytes(command.body)) else (yield decode)
        # The table belongs to this registration, so it may be emptied.
        topics = cast(dict[str, TopicConfig], body.table.topics)
        try:
            return (yield from self._apply_registration(header, call, body, topics))
        finally:
            self.free_topics(topics)

    def _apply_registration(
        self,
        header: RegisterBrokerRequest,
        call: RequestContext,
        body: RegisterBody,
        topics: dict[str, TopicConfig],
    ) -> WorkItem[Command]:
        """Apply a decoded registration to the table, and return the answer."""
        command, peer, now_ms = call
        known, timeout_ms = self.table.get_broker(header.broker), header.heartbeat_timeout_ms
        fields = command.fields or {}
        interfaces = (part.strip() for part in fields.get(INTERFACES_FIELD, "").split(","))
        master = yield from self.table.register_in_slices(
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
                    source_address=peer.remote.address,
                    local_address=peer.local.address,
                    is_fixed=fields.get(FIXED_FIELD, "") == "true",
                    interfaces=tuple(part for part in interfaces if part),
                ),
                connection=peer,
            ),
            now_ms,
        )
        if known is None or known.addresses.get(header.broker_id) != header.address:
            log.info(
                "broker %s (id %d) of cluster %s registered as %s from %s",
                header.broker,
                header.broker_id,
                header.cluster,
                header.address,
                peer.remote,
            )
        orders = self.key_values.get_namespace(ORDER_TOPICS)
        if orders is None or not self.config.return_order_config_to_broker:
            return success_answer(encode_header(master))
        return success_answer(encode_header(master), bodies.encode_kv_table(orders))

    def unregister_broker(self, header: BrokerRequest, _call: RequestContext) -> WorkItem[None]:
        """Handle UNREGISTER_BROKER (104): remove one address of a broker."""
        yield from self.table.unregister_in_slices(header.cluster, header.broker, header.address)
        log.info("broker %s at %s unregistered", header.broker, header.address)

    def query_data_version(self, header: BrokerRequest, call: RequestContext) -> Command:
        """Handle QUERY_DATA_VERSION (322): say whether the broker must register again.

        The broker sends the version of its topic table. The request also renews its registration.
        """
        held = self.table.version_of(header.cluster, header.address)
        self.table.record_heartbeat(header.cluster, header.address, call.now_ms)
        changed = held is None or held != decode_data_version(call.command.body or b"{}")
        body = b"" if held is None else encode_data_version(held)
        return success_answer(encode_header(QueryDataVersionResponse(changed=changed)), body)

    def broker_heartbeat(self, header: BrokerHeartbeatRequest, call: RequestContext) -> None:
        """Handle BROKER_HEARTBEAT (904): renew a registration."""
        self.table.record_heartbeat(header.cluster, header.address, call.now_ms)

    def get_member_group(
        self, header: GetBrokerMemberGroupRequest, call: RequestContext
    ) -> Command:
        """Handle GET_BROKER_MEMBER_GROUP (901): return the replicas of a broker, by id."""
        data = self.table.get_broker(header.broker)
        addresses: Mapping[int, str] = {}
        if data is not None and data.cluster == header.cluster:
            addresses = self._for_client(data, call.peer).addresses
        body = bodies.encode_broker_member_group(header.cluster, header.broker, addresses)
        return success_answer(body=body)

    def wipe_write_permission(
        self, header: WritePermissionRequest, _call: RequestContext
    ) -> WorkItem[Command]:
        """Handle WIPE_WRITE_PERM_OF_BROKER (205): let a broker receive no messages of clients."""
        count = yield from self.table.wipe_write_permission(header.broker)
        log.info("removed the write permission of broker %s from %d topics", header.broker, count)
        return success_answer(encode_header(WritePermissionWipedResponse(topic_count=count)))

    def add_write_permission(
        self, header: WritePermissionRequest, _call: RequestContext
    ) -> WorkItem[Command]:
        """Handle ADD_WRITE_PERM_OF_BROKER (327): undo WIPE_WRITE_PERM_OF_BROKER."""
        count = yield from self.table.add_write_permission(header.broker)
        log.info("added the write permission of broker %s to %d topics", header.broker, count)
        return success_answer(encode_header(WritePermissionAddedResponse(topic_count=count)))

    def get_cluster_info(self, _header: None, call: RequestContext) -> WorkItem[Command]:
        """Handle GET_BROKER_CLUSTER_INFO (106): return all clusters and brokers.

        The ids of replicas are integers as JSON keys, for clients of every version.
        """
        brokers = {}
        for count, data in enumerate(self.table.list_brokers(), 1):
            brokers[data.broker] = self._for_client(data, call.peer)
            if count % BROKERS_PER_STEP == 0:
                yield None
        clusters = {name: tuple(members) for name, members in self.table.list_clusters().items()}
        return success_answer(
            body=bodies.encode_cluster_info(bodies.ClusterInfo(brokers, clusters))
        )

    def _for_client(self, data: BrokerData, peer: Peer) -> BrokerData:
        """Return a broker with the addresses at which a client can reach its replicas."""
        if not self.config.reachable_addresses:
            return data
        client = ClientConnection(peer.remote.address, peer.local.address)
        addresses = {}
        for broker_id, registered in data.addresses.items():
            origin = self.table.origin_of(data.cluster, registered)
            address, reason = reachable_address(registered, origin, client)
            addresses[broker_id] = address
            pair = (registered, address)
            is_logged = pair in self._logged_addresses
            if reason and not is_logged and len(self._logged_addresses) < LOGGED_ADDRESSES_MAX:
                self._logged_addresses.add(pair)
                log.info(
                    "broker %s registered as %s; clients that connect to %s are told %s, because "
                    "%s. Set brokerIP1 to fix the address",
                    data.broker,
                    registered,
                    client.local_address,
                    address,
                    reason,
                )
        return replace(data, addresses=addresses)

    # -------------------------------------------------------------------------------- topics

    def remaining_wait_ms(self, now_ms: int) -> int:
        """Return for how many ms routes are still refused (needWaitForService), or 0."""
        if not self.config.wait_for_service:
            return 0
        return max(self._started_ms + self.config.wait_for_service_s * 1000 - now_ms, 0)

    def get_route(self, header: h.GetRouteRequest, call: RequestContext) -> Command:
        """Handle GET_ROUTEINFO_BY_TOPIC (105): return the route of a topic."""
        config = self.config
        if self.remaining_wait_ms(call.now_ms):
            return error_answer(ResponseCode.SYSTEM_ERROR, "name server not ready")
        route = self.table.find_route(header.topic, acting_master=config.acting_master_support)
        if route is None:
            remark = f"No topic route info in name server for the topic: {header.topic}{_HELP}"
            return error_answer(ResponseCode.TOPIC_NOT_EXIST, remark)
        if header.zone_mode == "true" and header.zone:
            route = filter_zone(route, header.zone)
        orders = self.key_values.get(ORDER_TOPICS, header.topic)
        route = replace(
            route,
            brokers=tuple(self._for_client(data, call.peer) for data in route.brokers),
            order_topic_config=orders if config.order_message_enable else None,
        )
        is_new = call.command.version >= bodies.STANDARD_JSON_VERSION_MIN
        standard = is_new or bool(header.standard_json_only)
        return success_answer(body=bodies.encode_topic_route(route, standard=standard))

    def register_topic(self, header: h.TopicRequest, call: RequestContext) -> None:
        """Handle REGISTER_TOPIC_IN_NAMESRV (217): add queues of a topic. It always succeeds."""
        if call.command.body:
            queues = bodies.decode_topic_route(call.command.body).queues
            self.table.register_topic(header.topic, queues)

    def delete_topic(self, header: h.DeleteTopicInNameServerRequest, _call: RequestContext) -> None:
        """Handle DELETE_TOPIC_IN_NAMESRV (216): remove a topic, from one cluster if it is named."""
        self.table.delete_topic(header.topic, header.cluster or None)

    def list_topics(
        self, header: h.GetTopicsByClusterRequest | None, call: RequestContext
    ) -> WorkItem[Command]:
        """Handle the requests for names of topics.

        GET_ALL_TOPIC_LIST_FROM_NAMESERVER (206) returns all topics, GET_TOPICS_BY_CLUSTER (224)
        those of a cluster, and GET_UNIT_TOPIC_LIST (311), GET_HAS_UNIT_SUB_TOPIC_LIST (312) and
        GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST (313) those with the unit flags of `_UNIT_FILTERS`.
        """
        config, table, code = self.config, self.table, call.command.code
        is_all = code == Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        if not (config.all_topic_list_enable if is_all else config.topic_list_enable):
            return error_answer(ResponseCode.SYSTEM_ERROR, "disable")
        if header is not None:
            topics = table.list_topics_of_cluster(header.cluster)
        else:
            is_wanted = _UNIT_FILTERS.get(code)
            topics = (
                table.list_topics()
                if is_wanted is None
                else (yield from table.find_topics_by_flags(is_wanted))
            )
        return success_answer(body=bodies.encode_topic_list(topics))

    def list_system_topics(self, _header: None, call: RequestContext) -> Command:
        """Handle GET_SYSTEM_TOPIC_LIST_FROM_NS (304): return the names of clusters and brokers.

        Each cluster and broker has a topic of its name. The answer also names the address of one
        broker, which the client asks for further system topics by
        GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305).
        """
        clusters = self.table.list_clusters()
        names = {*clusters, *(broker for members in clusters.values() for broker in members)}
        first = next(iter(self.table.list_brokers()), None)
        addresses = self._for_client(first, call.peer).addresses.values() if first else ()
        return success_answer(body=bodies.encode_topic_list(names, next(iter(addresses), None)))

    # ------------------------------------------------------------- key-values, configuration

    def put_kv(self, header: h.PutKvRequest, _call: RequestContext) -> None:
        """Handle PUT_KV_CONFIG (100)."""
        self.key_values.put(header.namespace, header.key, header.value)

    def get_kv(self, header: h.KvRequest, _call: RequestContext) -> Command:
        """Handle GET_KV_CONFIG (101). An absent value is answered with QUERY_NOT_FOUND."""
        value = self.key_values.get(header.namespace, header.key)
        fields = encode_header(h.GetKvResponse(value=value))
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=remark)
        return success_answer(fields)

    def delete_kv(self, header: h.KvRequest, _call: RequestContext) -> None:
        """Handle DELETE_KV_CONFIG (102)."""
        self.key_values.delete(header.namespace, header.key)

    def list_kv(self, header: h.GetKvListRequest, _call: RequestContext) -> Command:
        """Handle GET_KVLIST_BY_NAMESPACE (219). An unknown namespace gets QUERY_NOT_FOUND."""
        table = self.key_values.get_namespace(header.namespace)
        if table is None:
            remark = f"No config item, Namespace: {header.namespace}"
            return error_answer(ResponseCode.QUERY_NOT_FOUND, remark)
        return success_answer(body=bodies.encode_kv_table(table))

    def show_config(self, _header: None, _call: RequestContext) -> Command:
        """Handle GET_NAMESRV_CONFIG (319): return the settings as properties."""
        text = settings_text(
            {Part.NAME_SERVER: self.config}, {Part.NAME_SERVER: self.at_next_start}
        )
        return success_answer(body=text.encode())

    def reread_config(self) -> Change:
        """Apply changes of the configuration file, and return them.

        Raises ConfigurationError if the file is not valid; then nothing is changed.
        """
        text = read_text(self._files, self.config.config_path) or ""
        in_force, later = ({Part.NAME_SERVER: it} for it in (self.config, self.at_next_start))
        change = reread_settings(in_force, later, text)
        self._apply(change)
        return change

    def _apply(self, change: Change) -> None:
        """Replace the settings by those of a change."""
        self.config = change.in_force[Part.NAME_SERVER]
        self.at_next_start = change.at_next_start[Part.NAME_SERVER]

    def change_config(self, _header: None, call: RequestContext) -> Command:
        """Handle UPDATE_NAMESRV_CONFIG (318): change settings.

        All of them are checked before they are written to the file. A setting that cannot change
        at run time takes effect at the next start.
        """
        try:
            change = change_settings(
                {Part.NAME_SERVER: self.config},
                {Part.NAME_SERVER: self.at_next_start},
                bytes(call.command.body).decode(),
                BLACK_LIST | set(self.config.config_black_list),
            )
            config, path = change.at_next_start[Part.NAME_SERVER], self.config.config_path
            if change.pending:
                # Check now what would otherwise make the next start fail.
                load_server_context(config)
                if config.acl_enable:
                    source = RuleSource.from_config(self._files, config)
                    source.load(source.read_files())
            if change.entries:
                edited = edit_properties(read_text(self._files, path) or "", change.entries)
                edit_text(self._files, path, edited)
        except PermissionDeniedError as error:
            return error_answer(ResponseCode.NO_PERMISSION, error.remark)
        except (ConfigurationError, UnicodeDecodeError) as error:
            return error_answer(ResponseCode.SYSTEM_ERROR, str(error))
        changed = ", ".join(change.entries) or "nothing"
        log.info("%s changed the configuration: %s", call.peer.remote, changed)
        for warning in change.warnings:
            log.warning("the configuration was changed at run time: %s", warning)
        self._apply(change)
        return Command(ResponseCode.SUCCESS, remark=change.remark)


class Row(NamedTuple):
    """How a request code is handled."""

    header: type | None
    """The declared header; None if the request has none."""
    handler: Callable[..., Command | WorkItem[Command | None] | None]
    """A method of NameServerRequests, called with the decoded header and the RequestContext."""


TABLE: Final[dict[int, Row]] = {
    Code.REGISTER_BROKER: Row(RegisterBrokerRequest, NameServerRequests.register_broker),
    Code.UNREGISTER_BROKER: Row(BrokerRequest, NameServerRequests.unregister_broker),
    Code.QUERY_DATA_VERSION: Row(BrokerRequest, NameServerRequests.query_data_version),
    Code.BROKER_HEARTBEAT: Row(BrokerHeartbeatRequest, NameServerRequests.broker_heartbeat),
    Code.GET_BROKER_MEMBER_GROUP: Row(
        GetBrokerMemberGroupRequest, NameServerRequests.get_member_group
    ),
    Code.GET_BROKER_CLUSTER_INFO: Row(None, NameServerRequests.get_cluster_info),
    Code.WIPE_WRITE_PERM_OF_BROKER: Row(
        WritePermissionRequest, NameServerRequests.wipe_write_permission
    ),
    Code.ADD_WRITE_PERM_OF_BROKER: Row(
        WritePermissionRequest, NameServerRequests.add_write_permission
    ),
    Code.GET_ROUTEINFO_BY_TOPIC: Row(h.GetRouteRequest, NameServerRequests.get_route),
    Code.REGISTER_TOPIC_IN_NAMESRV: Row(h.TopicRequest, NameServerRequests.register_topic),
    Code.DELETE_TOPIC_IN_NAMESRV: Row(
        h.DeleteTopicInNameServerRequest, NameServerRequests.delete_topic
    ),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Row(None, NameServerRequests.list_topics),
    Code.GET_TOPICS_BY_CLUSTER: Row(h.GetTopicsByClusterRequest, NameServerRequests.list_topics),
    Code.GET_UNIT_TOPIC_LIST: Row(None, NameServerRequests.list_topics),
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST: Row(None, NameServerRequests.list_topics),
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: Row(None, NameServerRequests.list_topics),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: Row(None, NameServerRequests.list_system_topics),
    Code.PUT_KV_CONFIG: Row(h.PutKvRequest, NameServerRequests.put_kv),
    Code.GET_KV_CONFIG: Row(h.KvRequest, NameServerRequests.get_kv),
    Code.DELETE_KV_CONFIG: Row(h.KvRequest, NameServerRequests.delete_kv),
    Code.GET_KVLIST_BY_NAMESPACE: Row(h.GetKvListRequest, NameServerRequests.list_kv),
    Code.UPDATE_NAMESRV_CONFIG: Row(None, NameServerRequests.change_config),
    Code.GET_NAMESRV_CONFIG: Row(None, NameServerRequests.show_config),
}

_UNIT_FILTERS: Final[dict[int, Callable[[int], bool]]] = {
    Code.GET_UNIT_TOPIC_LIST: lambda flag: bool(flag & UNIT_FLAG),
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST: lambda flag: bool(flag & UNIT_SUBSCRIPTION_FLAG),
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: lambda flag: flag & 3 == UNIT_SUBSCRIPTION_FLAG,
}
"""For each request for topics with units: whether the system flags of a topic match."""
