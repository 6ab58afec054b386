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
from sluicemq.nameserver.reachable import ClientConnection, Origin, reachable_address
from sluicemq.nameserver.routes import TIMEOUT_MS, Registration, RouteTable, filter_zone
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
        """Read the key-values from the file at `path`, or from its `.bak` if the file is damaged.

        If neither file exists, there are no key-values yet. Raises StoreDamagedError if neither
        can be read.
        """
        self._files = files
        self._path = path
        self._namespaces: Namespaces = load_text(files, path, decode_kv_config_file) or {}

    def get(self, namespace: str, key: str) -> str | None:
        """Return the value of a key; None if the namespace or the key does not exist."""
        return self._namespaces.get(namespace, {}).get(key)

    def get_namespace(self, namespace: str) -> dict[str, str] | None:
        """Return a copy of a namespace as a dict of values by key.

        Return None if no key was ever put into the namespace. A namespace whose keys were all
        deleted is {}.
        """
        table = self._namespaces.get(namespace)
        return None if table is None else dict(table)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set the value of a key, in the file and in memory. Creates the namespace if needed.

        Raises OSError if the file cannot be written. Raises ProtocolError if the file would grow
        above KEY_VALUES_BYTES_MAX. After an error, nothing is changed.
        """
        self._replace(namespace, {**self._namespaces.get(namespace, {}), key: value})

    def delete(self, namespace: str, key: str) -> None:
        """Delete a key from the file and from memory. Do nothing if the key does not exist.

        The namespace remains, even if it is empty now. Raises OSError if the file cannot be
        written. Then nothing is changed.
        """
        table = self._namespaces.get(namespace, {})
        if key in table:
            remaining = table.copy()
            del remaining[key]
            self._replace(namespace, remaining)

    def _replace(self, namespace: str, table: dict[str, str]) -> None:
        """Replace all key-values of a namespace by `table`, in the file and then in memory.

        Raises OSError if the file cannot be written. Raises ProtocolError if the file would exceed
        KEY_VALUES_BYTES_MAX, except if keys are deleted. After an error, nothing is changed.
        """
        changed_namespaces = {**self._namespaces, namespace: table}
        file_text = encode_kv_config_file(changed_namespaces)
        # A file that is already too large can still be reduced by deletions.
        is_deletion = len(table) < len(self._namespaces.get(namespace, {}))
        if len(file_text) > KEY_VALUES_BYTES_MAX and not is_deletion:
            raise ProtocolError(
                f"The key-values would take {len(file_text)} bytes, but the limit is "
                f"{KEY_VALUES_BYTES_MAX}.",
                fix="Delete key-values that are no longer used.",
            )
        replace_text(self._files, self._path, file_text)
        self._namespaces = changed_namespaces


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


def _can_decode_inline(body: bytes) -> bool:
    """Return whether a registration's body is small enough to decode it in the event loop.

    Such a body is empty, or it is uncompressed JSON of at most INLINE_BYTES_MAX bytes and
    INLINE_VALUES_MAX values.
    """
    is_empty_or_json = body[:1] in (b"", b"{")
    if not is_empty_or_json or len(body) > INLINE_BYTES_MAX:
        return False
    return fastjson.bound_counts(body).values <= INLINE_VALUES_MAX


def _decode_registration(
    command: Command,
    header: RegisterBrokerRequest,
    bytes_max: int,
    is_wanted: Callable[[], bool],
) -> RegisterBody:
    """Decode the body of a registration, the request by which a broker registers its topics.

    `command` is the request, `header` its decoded header. `bytes_max` limits the size after
    decompression. `is_wanted()` is called while decoding, and returns False to cancel the decoding.

    Raises ProtocolError if the body is malformed or too large, if it does not match the checksum in
    the header, or if the decoding is cancelled.
    """
    # A checksum of 0 means that the broker has sent none.
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
        """Create the handlers of requests, and read the key-values from their file.

        `table` is the route table. `started_ms` is the time of the start, on the same clock as
        `RequestContext.now_ms`. Raises StoreDamagedError if the key-values cannot be read.
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
        """Return the answer to a request, after all steps of its work item are done.

        The call may block for long; the server uses `handle` instead. `peer` is the connection of
        the request, and `now_ms` the time of the monotonic clock. A malformed request gives the
        answer SYSTEM_ERROR (1).
        """
        answer = self.handle(command, peer, now_ms)
        return answer if isinstance(answer, Command) else run_now(answer)

    def handle(self, command: Command, peer: Peer, now_ms: int) -> Command | WorkItem[Command]:
        """Return the answer to a request, or a work item that ends with the answer.

        `command` is the request, whose code must be in TABLE. `peer` is the connection over which
        it came. `now_ms` is the time of the server's monotonic clock.

        A work item is a generator that does long work in steps. Its first step is done at once. It
        is returned only if more steps follow. A malformed request or a failure of the disk gives
        the answer SYSTEM_ERROR (1).
        """
        row = TABLE[command.code]
        try:
            header = row.header and decode_header(row.header, command.fields)
            answer = row.handler(self, header, RequestContext(command, peer, now_ms))
        except (ProtocolError, OSError) as error:
            return error_answer(ResponseCode.SYSTEM_ERROR, str(error))
        if isinstance(answer, Generator):
            return run_first_step(self._answer_after(answer))
        return success_answer() if answer is None else answer

    @staticmethod
    def _answer_after(steps: WorkItem[Command | None]) -> WorkItem[Command]:
        """Do the steps of a handler's work item, and return the answer to the request.

        The answer is the result of the steps. If the result is None, it is a success without
        fields. It is SYSTEM_ERROR if the steps raise ProtocolError or OSError.
        """
        try:
            answer = yield from steps
        except (ProtocolError, OSError) as error:
            return error_answer(ResponseCode.SYSTEM_ERROR, str(error))
        return success_answer() if answer is None else answer

    # ------------------------------------------------------------------------------- brokers

    def register_broker(
        self, header: RegisterBrokerRequest, call: RequestContext
    ) -> WorkItem[Command]:
        """Handle REGISTER_BROKER (103): add or renew a broker and its topics.

        A large or compressed body is decoded in another thread. The topics are then added to the
        route table in slices, so that other requests are not delayed. At the end, also after an
        error, the decoded topics are passed to `free_topics`. The answer of a slave contains the
        address of its master.
        """
        command, peer, _ = call
        decode = partial(
            _decode_registration,
            command,
            header,
            self.config.registration_bytes_max,
            lambda: not peer.is_disconnected,
        )
        body = decode() if _can_decode_inline(bytes(command.body)) else (yield decode)
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
        """Apply a decoded registration to the route table in slices, and return the answer.

        `topics` are the topics of `body`. The dict may be empty afterwards. A replica that is new,
        or that has a new address, is logged. The answer to a slave has the address of its master.
        The body of the answer has the key-values of ORDER_TOPIC_CONFIG if there are any and the
        setting `return_order_config_to_broker` is on.
        """
        known = self.table.get_broker(header.broker)
        registration = self._make_registration(header, call, body, topics)
        master = yield from self.table.register_in_slices(registration, call.now_ms)
        if known is None or known.addresses.get(header.broker_id) != header.address:
            log.info(
                "broker %s (id %d) of cluster %s registered as %s from %s",
                header.broker,
                header.broker_id,
                header.cluster,
                header.address,
                call.peer.remote,
            )

        orders = self.key_values.get_namespace(ORDER_TOPICS)
        if orders is None or not self.config.return_order_config_to_broker:
            return success_answer(encode_header(master))
        return success_answer(encode_header(master), bodies.encode_kv_table(orders))

    def _make_registration(
        self,
        header: RegisterBrokerRequest,
        call: RequestContext,
        body: RegisterBody,
        topics: dict[str, TopicConfig],
    ) -> Registration:
        """Return the registration that the route table stores for a request.

        It combines the header, the topics, the version of the topic table, and the connection.
        """
        timeout_ms = header.heartbeat_timeout_ms
        return Registration(
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
            origin=_make_origin(call.command, call.peer),
            connection=call.peer,
        )

    def unregister_broker(self, header: BrokerRequest, _call: RequestContext) -> WorkItem[None]:
        """Handle UNREGISTER_BROKER (104): remove one address of a broker.

        With its last address, the broker and its topics are removed. An unknown address is
        answered with success too.
        """
        yield from self.table.unregister_in_slices(header.cluster, header.broker, header.address)
        log.info("broker %s at %s unregistered", header.broker, header.address)

    def query_data_version(self, header: BrokerRequest, call: RequestContext) -> Command:
        """Handle QUERY_DATA_VERSION (322): say whether the broker must register again.

        The body of the request is the version of the broker's topic table. The answer has `changed`
        = true if it differs from the version of the broker's last registration. The body of the
        answer is the latter version, or empty if the broker is not registered. The request also
        renews the registration.
        """
        registered = self.table.version_of(header.cluster, header.address)
        self.table.record_heartbeat(header.cluster, header.address, call.now_ms)
        is_changed = registered is None or registered != decode_data_version(
            call.command.body or b"{}"
        )
        body = b"" if registered is None else encode_data_version(registered)
        return success_answer(encode_header(QueryDataVersionResponse(changed=is_changed)), body)

    def broker_heartbeat(self, header: BrokerHeartbeatRequest, call: RequestContext) -> None:
        """Handle BROKER_HEARTBEAT (904): renew the registration of an address.

        An address that is not registered is ignored; the answer is success too.
        """
        self.table.record_heartbeat(header.cluster, header.address, call.now_ms)

    def get_member_group(
        self, header: GetBrokerMemberGroupRequest, call: RequestContext
    ) -> Command:
        """Handle GET_BROKER_MEMBER_GROUP (901): return the addresses of a broker's replicas, by id.

        There are no addresses if the broker is unknown or belongs to another cluster.
        """
        broker = self.table.get_broker(header.broker)
        addresses: Mapping[int, str] = {}
        if broker is not None and broker.cluster == header.cluster:
            addresses = self._make_reachable(broker, call.peer).addresses
        body = bodies.encode_broker_member_group(header.cluster, header.broker, addresses)
        return success_answer(body=body)

    def wipe_write_permission(
        self, header: WritePermissionRequest, _call: RequestContext
    ) -> WorkItem[Command]:
        """Handle WIPE_WRITE_PERM_OF_BROKER (205): make the topics of a broker read-only.

        Clients then send no messages to the broker. The answer has the number of topics. See
        `RouteTable.wipe_write_permission` for how long this lasts.
        """
        count = yield from self.table.wipe_write_permission(header.broker)
        log.info("removed the write permission of broker %s from %d topics", header.broker, count)
        return success_answer(encode_header(WritePermissionWipedResponse(topic_count=count)))

    def add_write_permission(
        self, header: WritePermissionRequest, _call: RequestContext
    ) -> WorkItem[Command]:
        """Handle ADD_WRITE_PERM_OF_BROKER (327): undo WIPE_WRITE_PERM_OF_BROKER.

        All topics of the broker get read and write permission, whatever they had before. The
        answer has the number of topics.
        """
        count = yield from self.table.add_write_permission(header.broker)
        log.info("added the write permission of broker %s to %d topics", header.broker, count)
        return success_answer(encode_header(WritePermissionAddedResponse(topic_count=count)))

    def get_cluster_info(self, _header: None, call: RequestContext) -> WorkItem[Command]:
        """Handle GET_BROKER_CLUSTER_INFO (106): return all clusters and brokers.

        The ids of replicas are integers as JSON keys, for clients of every version.
        """
        brokers = {}
        for count, broker in enumerate(self.table.list_brokers(), 1):
            brokers[broker.broker] = self._make_reachable(broker, call.peer)
            if count % BROKERS_PER_STEP == 0:
                yield None
        clusters = {name: tuple(members) for name, members in self.table.list_clusters().items()}
        cluster_info = bodies.ClusterInfo(brokers, clusters)
        return success_answer(body=bodies.encode_cluster_info(cluster_info))

    def _make_reachable(self, broker: BrokerData, peer: Peer) -> BrokerData:
        """Return a copy of a broker with addresses that the client can reach.

        A registered address may be unreachable for a client, as 127.0.0.1 or a private address.
        `peer` is the client's connection. The addresses are not changed if the setting
        `reachable_addresses` is off. The first replacement of each address is logged, for at most
        LOGGED_ADDRESSES_MAX addresses.
        """
        if not self.config.reachable_addresses:
            return broker
        client = ClientConnection(peer.remote.address, peer.local.address)
        addresses = {}
        for broker_id, registered in broker.addresses.items():
            origin = self.table.origin_of(broker.cluster, registered)
            address, reason = reachable_address(registered, origin, client)
            addresses[broker_id] = address
            if reason and self._is_first_replacement(registered, address):
                log.info(
                    "broker %s registered as %s; clients that connect to %s are told %s, because "
                    "%s. Set brokerIP1 to fix the address",
                    broker.broker,
                    registered,
                    client.local_address,
                    address,
                    reason,
                )
        return replace(broker, addresses=addresses)

    def _is_first_replacement(self, registered: str, address: str) -> bool:
        """Return whether the replacement of an address must be logged, and remember it if so.

        It must not if it was logged before, or if LOGGED_ADDRESSES_MAX replacements were logged.
        """
        replacement = (registered, address)
        if replacement in self._logged_addresses:
            return False
        if len(self._logged_addresses) >= LOGGED_ADDRESSES_MAX:
            return False
        self._logged_addresses.add(replacement)
        return True

    # -------------------------------------------------------------------------------- topics

    def remaining_wait_ms(self, now_ms: int) -> int:
        """Return the time in ms for which routes are still refused after the start.

        The result is 0 if routes are served, as always without the setting needWaitForService.
        """
        if not self.config.wait_for_service:
            return 0
        return max(self._started_ms + self.config.wait_for_service_s * 1000 - now_ms, 0)

    def get_route(self, header: h.GetRouteRequest, call: RequestContext) -> Command:
        """Handle GET_ROUTEINFO_BY_TOPIC (105): return the brokers and queues of a topic.

        Addresses are replaced by ones that the client can reach. If the client asks for a zone,
        brokers of other zones are left out. The answer is SYSTEM_ERROR during the waiting time
        after the start, and TOPIC_NOT_EXIST if no broker has the topic.

        Clients from version STANDARD_JSON_VERSION_MIN on, and clients that ask for it, get standard
        JSON. Older clients get JSON of fastjson, with numbers as keys.
        """
        config = self.config
        if self.remaining_wait_ms(call.now_ms):
            return error_answer(ResponseCode.SYSTEM_ERROR, "name server not ready")

        route = self.table.find_route(header.topic, acting_master=config.acting_master_support)
        if route is None:
            remark = f"No topic route info in name server for the topic: {header.topic}{_HELP}"
            return error_answer(ResponseCode.TOPIC_NOT_EXIST, remark)
        if header.zone_mode == "true" and header.zone:
            route = filter_zone(route, header.zone)
        brokers = [self._make_reachable(broker, call.peer) for broker in route.brokers]
        order_config: str | None = None
        if config.order_message_enable:
            order_config = self.key_values.get(ORDER_TOPICS, header.topic)
        route = replace(route, brokers=tuple(brokers), order_topic_config=order_config)

        is_new_client = call.command.version >= bodies.STANDARD_JSON_VERSION_MIN
        standard = is_new_client or bool(header.standard_json_only)
        return success_answer(body=bodies.encode_topic_route(route, standard=standard))

    def register_topic(self, header: h.TopicRequest, call: RequestContext) -> None:
        """Handle REGISTER_TOPIC_IN_NAMESRV (217): add or replace queues of a topic.

        The body is a route; only its queues count. Without a body, nothing is changed. The answer
        is success even if a queue's broker is unknown (`RouteTable.register_topic`).
        """
        if call.command.body:
            queues = bodies.decode_topic_route(call.command.body).queues
            self.table.register_topic(header.topic, queues)

    def delete_topic(self, header: h.DeleteTopicInNameServerRequest, _call: RequestContext) -> None:
        """Handle DELETE_TOPIC_IN_NAMESRV (216): remove a topic from all brokers.

        If the request names a cluster, only its brokers lose the topic. An unknown topic or
        cluster is answered with success too.
        """
        self.table.delete_topic(header.topic, header.cluster or None)

    def list_topics(
        self, header: h.GetTopicsByClusterRequest | None, call: RequestContext
    ) -> WorkItem[Command]:
        """Handle the requests for names of topics.

        - GET_ALL_TOPIC_LIST_FROM_NAMESERVER (206) returns all topics.
        - GET_TOPICS_BY_CLUSTER (224) returns the topics of a cluster.
        - GET_UNIT_TOPIC_LIST (311), GET_HAS_UNIT_SUB_TOPIC_LIST (312) and
          GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST (313) return topics by their flags, with a test from
          `_UNIT_FILTERS`.

        The answer is SYSTEM_ERROR ("disable") if a setting disables the request:
        `all_topic_list_enable` for 206, and `topic_list_enable` for the others.
        """
        code = call.command.code
        if code == Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            is_enabled = self.config.all_topic_list_enable
        else:
            is_enabled = self.config.topic_list_enable
        if not is_enabled:
            return error_answer(ResponseCode.SYSTEM_ERROR, "disable")

        is_wanted = _UNIT_FILTERS.get(code)
        if header is not None:
            topics = self.table.list_topics_of_cluster(header.cluster)
        elif is_wanted is not None:
            topics = yield from self.table.find_topics_by_flags(is_wanted)
        else:
            topics = self.table.list_topics()
        return success_answer(body=bodies.encode_topic_list(topics))

    def list_system_topics(self, _header: None, call: RequestContext) -> Command:
        """Handle GET_SYSTEM_TOPIC_LIST_FROM_NS (304): return the names of all clusters and brokers.

        Each cluster and broker has a system topic of its name. The answer also has the address of
        one broker. The client asks this broker for further system topics.
        """
        names = set()
        for cluster, broker_names in self.table.list_clusters().items():
            names.add(cluster)
            names.update(broker_names)

        address: str | None = None
        brokers = self.table.list_brokers()
        if brokers:
            addresses = self._make_reachable(brokers[0], call.peer).addresses
            address = next(iter(addresses.values()), None)
        return success_answer(body=bodies.encode_topic_list(names, address))

    # ------------------------------------------------------------- key-values, configuration

    def put_kv(self, header: h.PutKvRequest, _call: RequestContext) -> None:
        """Handle PUT_KV_CONFIG (100): set the value of a key, as `KeyValues.put`."""
        self.key_values.put(header.namespace, header.key, header.value)

    def get_kv(self, header: h.KvRequest, _call: RequestContext) -> Command:
        """Handle GET_KV_CONFIG (101): return the value of a key.

        The answer is QUERY_NOT_FOUND if the key does not exist.
        """
        value = self.key_values.get(header.namespace, header.key)
        fields = encode_header(h.GetKvResponse(value=value))
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=remark)
        return success_answer(fields)

    def delete_kv(self, header: h.KvRequest, _call: RequestContext) -> None:
        """Handle DELETE_KV_CONFIG (102): delete a key. An absent key is answered with success."""
        self.key_values.delete(header.namespace, header.key)

    def list_kv(self, header: h.GetKvListRequest, _call: RequestContext) -> Command:
        """Handle GET_KVLIST_BY_NAMESPACE (219): return the keys and values of a namespace.

        The answer is QUERY_NOT_FOUND if the namespace does not exist.
        """
        table = self.key_values.get_namespace(header.namespace)
        if table is None:
            remark = f"No config item, Namespace: {header.namespace}"
            return error_answer(ResponseCode.QUERY_NOT_FOUND, remark)
        return success_answer(body=bodies.encode_kv_table(table))

    def show_config(self, _header: None, _call: RequestContext) -> Command:
        """Handle GET_NAMESRV_CONFIG (319): return the settings as lines `name=value`."""
        shown_settings = settings_text(
            {Part.NAME_SERVER: self.config}, {Part.NAME_SERVER: self.at_next_start}
        )
        return success_answer(body=shown_settings.encode())

    def reread_config(self) -> Change:
        """Apply the settings that were edited in the configuration file, and return the change.

        Settings that cannot change at run time are only recorded in `at_next_start`. A missing
        file counts as an empty one. Raises ConfigurationError if the file is not valid; then
        nothing is changed.
        """
        file_text = read_text(self._files, self.config.config_path) or ""
        in_force = {Part.NAME_SERVER: self.config}
        at_next_start = {Part.NAME_SERVER: self.at_next_start}
        change = reread_settings(in_force, at_next_start, file_text)
        self._apply(change)
        return change

    def _apply(self, change: Change) -> None:
        """Replace `config` and `at_next_start` by the settings of a change."""
        self.config = change.in_force[Part.NAME_SERVER]
        self.at_next_start = change.at_next_start[Part.NAME_SERVER]

    def change_config(self, _header: None, call: RequestContext) -> Command:
        """Handle UPDATE_NAMESRV_CONFIG (318): change the settings in the body, lines `name=value`.

        All settings are checked before they are written to the configuration file and logged. A
        setting that cannot change at run time takes effect at the next start. Then the certificates
        and access rules are loaded as a test, because they could make that start fail. The remark
        of the answer names the settings that have not taken effect.

        The answer is NO_PERMISSION if a setting is in a black list, and SYSTEM_ERROR if a setting
        is unknown or invalid. Then nothing is changed.
        """
        try:
            change = change_settings(
                {Part.NAME_SERVER: self.config},
                {Part.NAME_SERVER: self.at_next_start},
                bytes(call.command.body).decode(),
                BLACK_LIST | set(self.config.config_black_list),
            )
            if change.pending:
                self._check_next_start(change.at_next_start[Part.NAME_SERVER])
            if change.entries:
                path = self.config.config_path
                edited = edit_properties(read_text(self._files, path) or "", change.entries)
                edit_text(self._files, path, edited)
        except PermissionDeniedError as error:
            return error_answer(ResponseCode.NO_PERMISSION, error.remark)
        except (ConfigurationError, UnicodeDecodeError) as error:
            return error_answer(ResponseCode.SYSTEM_ERROR, str(error))

        changed_names = ", ".join(change.entries) or "nothing"
        log.info("%s changed the configuration: %s", call.peer.remote, changed_names)
        for warning in change.warnings:
            log.warning("the configuration was changed at run time: %s", warning)
        self._apply(change)
        return Command(ResponseCode.SUCCESS, remark=change.remark)

    def _check_next_start(self, config: NameServerConfig) -> None:
        """Load the certificates and access rules of `config`, as a test.

        Raises ConfigurationError if they would make the next start of the server fail.
        """
        load_server_context(config)
        if config.acl_enable:
            source = RuleSource.from_config(self._files, config)
            source.load(source.read_files())


def _make_origin(command: Command, peer: Peer) -> Origin:
    """Return where a registration came from, and what its fields say about the broker's address.

    The fields say whether the address is fixed by a setting, and which addresses the broker's
    machine has.
    """
    fields = command.fields or {}
    interfaces = [address.strip() for address in fields.get(INTERFACES_FIELD, "").split(",")]
    return Origin(
        source_address=peer.remote.address,
        local_address=peer.local.address,
        is_fixed=fields.get(FIXED_FIELD, "") == "true",
        interfaces=tuple(filter(None, interfaces)),
    )


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
