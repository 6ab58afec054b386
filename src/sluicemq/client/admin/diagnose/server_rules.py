"""Rules about name servers and brokers: addresses, TLS, access, clocks, disks and replicas."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from sluicemq.client.admin.diagnose.cluster_facts import BrokerFacts, ClusterFacts
from sluicemq.client.admin.diagnose.findings import Code, Rule, Severity, Values
from sluicemq.model.reachability import Reachability
from sluicemq.model.topic import MASTER_ID, PERM_WRITE

SKEW_MS: Final = 5_000
"""Clocks that differ by more are reported. A broker reports its time in whole seconds."""
LAG_BYTES: Final = 64 << 20
"""Slaves that are further behind their master are reported."""
REQUEST_WAIT_MS: Final = 200
"""RocketMQ refuses a send that has waited longer (waitTimeMillsInSendQueue)."""

Condition = Callable[[ClusterFacts], Iterable[Values]]
_UNREACHED: Final = (Reachability.REFUSED, Reachability.UNREACHABLE, Reachability.UNRESOLVED)


def each(field_name: str, subjects: Iterable[object]) -> Iterator[Values]:
    """Yield each item as the only value of a finding's sentences, under `field_name`."""
    for subject in subjects:
        yield {field_name: subject}


# ------------------------------------------------------------ what is found at an address


def _make_reach_condition(*reaches: Reachability) -> Condition:
    """Return the condition that one of `reaches` was found at the address of a server."""
    return lambda facts: each(
        "server", (server for server in facts.servers if server.reach in reaches)
    )


def _make_name_server_reach_condition(*reaches: Reachability) -> Condition:
    """Return the condition that one of `reaches` was found at the address of a name server."""
    return lambda facts: each(
        "server", (server for server in facts.name_servers if server.reach in reaches)
    )


def _make_broker_reach_condition(*reaches: Reachability) -> Condition:
    """Return the condition that one of `reaches` was found at the address of a broker."""
    return lambda facts: each(
        "broker", (broker for broker in facts.brokers if broker.reach in reaches)
    )


def _is_broker(facts: ClusterFacts) -> Iterator[Values]:
    return each("server", (server for server in facts.name_servers if server.is_other_kind))


def _is_name_server(facts: ClusterFacts) -> Iterator[Values]:
    return each("server", (broker for broker in facts.brokers if broker.is_other_kind))


ADDRESS_RULES: Final = (
    Rule(
        Code.NAME_UNRESOLVED,
        _make_name_server_reach_condition(Reachability.UNRESOLVED),
        "The name server {server.address} cannot be resolved: {server.detail}.",
        "Check the spelling and the DNS of this machine. The name of a Docker Compose service is "
        "known only in its own network.",
    ),
    Rule(
        Code.NAME_SERVER_IS_BROKER,
        _is_broker,
        "A broker answers at {server.address}, not a name server.",
        "Use the port of the name server: 9876 unless its listenPort is set.",
    ),
    Rule(
        Code.BROKER_IS_NAME_SERVER,
        _is_name_server,
        "A name server answers at {server.address}, not a broker.",
        "Use the port of the broker: 10911 unless its listenPort is set.",
    ),
    Rule(
        Code.HTTP_SERVER,
        _make_reach_condition(Reachability.HTTP),
        "An HTTP server answers at {server.address}.",
        "This is a console, a metrics endpoint or a web server. Use the port of the remoting "
        "protocol.",
    ),
    Rule(
        Code.GRPC_SERVER,
        _make_reach_condition(Reachability.GRPC),
        "A gRPC server, such as the proxy, answers at {server.address}.",
        "Only gRPC clients use this port. Use the port of the name server: 9876 unless its "
        "listenPort is set.",
    ),
    Rule(
        Code.TLS_DEMANDED,
        _make_reach_condition(Reachability.TLS),
        "{server.address} requires TLS, but the client connected without TLS.",
        "Connect with --tls (SLUICE_TLS=true; Java: -Dtls.enable=true).",
    ),
    Rule(
        Code.TLS_NOT_SPOKEN,
        _make_reach_condition(Reachability.PLAIN),
        "{server.address} does not speak TLS, but the client connected with TLS.",
        "Connect without --tls, or set tls.server.mode = permissive on the server.",
    ),
    Rule(
        Code.CERTIFICATE_EXPIRED,
        _make_reach_condition(Reachability.EXPIRED),
        "The certificate of {server.address} has expired.",
        "Replace the file at tls.server.certPath. SluiceMQ servers read it without a restart.",
    ),
    Rule(
        Code.CERTIFICATE_WRONG_NAME,
        _make_reach_condition(Reachability.WRONG_NAME),
        "The certificate of {server.address} was issued for another name: {server.detail}.",
        "Connect to a name in the certificate, or use --tls-verify ca.",
    ),
    Rule(
        Code.CERTIFICATE_UNTRUSTED,
        _make_reach_condition(Reachability.UNTRUSTED),
        "The certificate of {server.address} is not trusted: {server.detail}.",
        "Pass the certificate of the authority that signed it with --tls-ca.",
    ),
    Rule(
        Code.CLIENT_CERTIFICATE,
        _make_reach_condition(Reachability.CLIENT_CERTIFICATE),
        "{server.address} refuses the TLS handshake: {server.detail}.",
        "Pass a client certificate that is signed by an authority of the server, with "
        "--tls-certificate and --tls-key.",
    ),
)


# --------------------------------------------------------------------------------- access

_REFUSALS: Final = (
    "protected mode|sluiceProtectedMode",
    "No accessKey|cannot be null|is blank",
    "No acl config|not found|not exist",
    "signature",
    "",
)
"""Patterns of the remarks of RocketMQ 4 and 5 and of SluiceMQ (spec/config.md, ACL).

A remark belongs to the first pattern that it contains.
"""
_PROTECTED, _NO_KEY, _UNKNOWN_KEY, _WRONG_SECRET, _OTHER = _REFUSALS


def _make_refusal_condition(pattern: str) -> Condition:
    """Return the condition that a server refused a request for one reason.

    `pattern` is one of the patterns of remarks. The condition yields {"address", "remark"}; servers
    with the same remark are reported once.
    """

    def condition(facts: ClusterFacts) -> Iterator[Values]:
        reported = set()
        for address, remark in facts.denied:
            if _classify_refusal(remark) == pattern and remark not in reported:
                reported.add(remark)
                yield {"address": address, "remark": remark}

    return condition


def _classify_refusal(remark: str) -> str:
    """Return the first pattern in `_REFUSALS` that a remark contains."""
    return next(pattern for pattern in _REFUSALS if re.search(pattern, remark, re.IGNORECASE))


ACCESS_RULES: Final = (
    Rule(
        Code.PROTECTED_MODE,
        _make_refusal_condition(_PROTECTED),
        "{address} accepts local connections only (protected mode).",
        "Set bindAddress (or --host) or aclEnable on the server.",
    ),
    Rule(
        Code.ACCESS_KEY_MISSING,
        _make_refusal_condition(_NO_KEY),
        "{address} requires authentication, but no access key was supplied: {remark}.",
        "Pass --access-key and --secret-key, or set SLUICE_ACCESS_KEY and SLUICE_SECRET_KEY.",
    ),
    Rule(
        Code.ACCESS_KEY_UNKNOWN,
        _make_refusal_condition(_UNKNOWN_KEY),
        "{address} does not know the account: {remark}.",
        "Check the spelling of the access key, and that plain_acl.yml of the server contains it.",
    ),
    Rule(
        Code.SECRET_KEY_WRONG,
        _make_refusal_condition(_WRONG_SECRET),
        "{address} knows the account, but the secret key is wrong: {remark}.",
        "Use the secret key in plain_acl.yml of the server. The signature contains no time, so a "
        "wrong clock is not the reason.",
    ),
    Rule(
        Code.RIGHT_MISSING,
        _make_refusal_condition(_OTHER),
        "{address} refuses the request: {remark}.",
        "Give the account the permission (topicPerms, groupPerms). See which rule decides with "
        '"sluice acl check".',
    ),
)


# ----------------------------------------------- servers that do not answer, wrong addresses


def _find_brokers_registered_elsewhere(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker"} for each broker that registers with none of the asked name servers.

    Only brokers whose address the user gave are checked, because name servers do not know the
    others. The dictionary has the values of the finding's text.
    """
    asked_addresses = {server.address for server in facts.name_servers}
    registered_addresses = {broker.address for broker in facts.brokers if broker.name}
    for broker in facts.brokers:
        is_registered = broker.name or broker.address in registered_addresses
        if is_registered or not broker.is_up:
            continue
        name_servers = set(broker.config.get("namesrvAddr", "").split(";")) - {""}
        if name_servers and not name_servers & asked_addresses:
            yield {"broker": broker}


def _find_missing_brokers(facts: ClusterFacts) -> Iterator[Values]:
    for server in facts.name_servers:
        if server.cluster is not None and not server.cluster.brokers:
            yield {"server": server}


def _find_lost_brokers(facts: ClusterFacts, address_kind: str) -> Iterator[BrokerFacts]:
    """Yield the brokers that clients cannot reach, because they registered a wrong kind of address.

    `address_kind` is "wildcard" (0.0.0.0), "loopback" or "private". An address of another kind is
    not considered. A loopback address is right if the name server is on this machine.
    """
    reached_networks = {server.network for server in facts.name_servers if server.is_up}
    for broker in facts.brokers:
        if not broker.name or broker.address_kind != address_kind:
            continue
        # On the machine of the name server, a loopback address is right.
        if address_kind == "loopback" and not facts.is_remote:
            continue
        if address_kind == "private":
            # An address of a network in which a name server was reached can be reached, too.
            # A machine that refuses the connection was reached.
            is_in_reached_network = broker.network in reached_networks
            if is_in_reached_network or broker.reach is Reachability.REFUSED:
                continue
        is_unreached = broker.reach in _UNREACHED or broker.is_other_broker
        if is_unreached or address_kind == "wildcard":
            yield broker


def _make_lost_broker_condition(address_kind: str) -> Condition:
    """Return the condition that a broker is not reachable at an address of this kind."""
    return lambda facts: each("broker", _find_lost_brokers(facts, address_kind))


def _find_brokers_down(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker"} for each broker that does not answer at an address that is right.

    The dictionary has the values of the finding's text.
    """
    wrongly_registered: list[BrokerFacts] = []
    for address_kind in ("wildcard", "loopback", "private"):
        wrongly_registered += _find_lost_brokers(facts, address_kind)
    for broker in facts.brokers:
        is_down = broker.reach in (Reachability.REFUSED, Reachability.UNREACHABLE)
        if is_down and broker not in wrongly_registered:
            yield {"broker": broker}


def _find_other_brokers(facts: ClusterFacts) -> Iterator[Values]:
    for broker in facts.brokers:
        if broker.is_other_broker and broker.address_kind != "loopback":
            yield {"broker": broker}


def _find_brokers_without_master(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"name"} for each broker without a master in the route or at the name servers.

    The dictionary has the values of the finding's text.
    """
    with_master = {broker.name for broker in facts.masters}
    without_master = {
        broker.name for broker in facts.brokers if broker.name and broker.name not in with_master
    }
    if facts.route is not None:
        for broker_data in facts.route.brokers:
            if MASTER_ID not in broker_data.addresses:
                without_master.add(broker_data.broker)
    return each("name", sorted(without_master))


def _find_skewed_clocks(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"machine", "ahead_s"} for each clock that is wrong by more than `SKEW_MS`.

    If the clocks of two or more brokers all differ from this machine's clock by the same time, only
    the clock of this machine is reported. The dictionary has the values of the finding's text.
    """
    differences_ms = []
    skewed = []
    for broker in facts.brokers:
        if broker.clock_ahead_ms is not None:
            differences_ms.append(broker.clock_ahead_ms)
            if abs(broker.clock_ahead_ms) > SKEW_MS:
                skewed.append((broker, broker.clock_ahead_ms))

    are_all_skewed = len(skewed) == len(differences_ms) > 1
    is_same_skew = len({round(ahead_ms / SKEW_MS) for _, ahead_ms in skewed}) == 1
    if are_all_skewed and is_same_skew:
        yield {"machine": "this machine", "ahead_s": -differences_ms[0] / 1000}
        return
    for broker, ahead_ms in skewed:
        yield {"machine": f"broker {broker.label}", "ahead_s": ahead_ms / 1000}


REACHABILITY_RULES: Final = (
    Rule(
        Code.NAME_SERVER_DOWN,
        _make_name_server_reach_condition(
            Reachability.REFUSED, Reachability.UNREACHABLE, Reachability.UNRESPONSIVE
        ),
        "The name server {server.address} does not answer: {server.reach} ({server.detail}).",
        "refused: start it, or check the port. silent: check firewalls and routes, and that the "
        "machine is on. mute: it hangs, or another program has the port.",
    ),
    Rule(
        Code.BROKER_REGISTERS_ELSEWHERE,
        _find_brokers_registered_elsewhere,
        "The broker at {broker.address} registers with {broker.config[namesrvAddr]}, but with none "
        "of the name servers that were asked.",
        "Set namesrvAddr of the broker, or use its name servers.",
    ),
    Rule(
        Code.NO_BROKER_REGISTERED,
        _find_missing_brokers,
        "No broker is registered with the name server {server.address}.",
        "Start a broker with this namesrvAddr. After a restart of the name server, brokers "
        "register "
        'again within 30 s. See where a broker registers with "--broker HOST:PORT".',
    ),
    Rule(
        Code.BROKER_ADDRESS_WILDCARD,
        _make_lost_broker_condition("wildcard"),
        "The broker {broker.name} is registered with {broker.address}, to which clients cannot "
        "connect.",
        "Set brokerIP1 to an address that clients can reach, and restart the broker.",
    ),
    Rule(
        Code.BROKER_ADDRESS_LOOPBACK,
        _make_lost_broker_condition("loopback"),
        "The broker {broker.name} is registered with {broker.address}, so each client looks for it "
        "on its own machine.",
        "Set brokerIP1 to an address that clients can reach, and restart the broker.",
    ),
    Rule(
        Code.BROKER_ADDRESS_PRIVATE,
        _make_lost_broker_condition("private"),
        "The broker {broker.name} is registered with {broker.address}, a private address that "
        "cannot be reached from here ({broker.detail}): the broker is behind NAT or in a "
        "container.",
        "Set brokerIP1 to the external address, and publish the port under the same number; or "
        "connect the clients to that network.",
    ),
    Rule(
        Code.BROKER_IS_ANOTHER,
        _find_other_brokers,
        "At {broker.address}, where {broker.name} is registered, {broker.config[brokerName]} "
        "answers.",
        "Check brokerIP1 and the ports: two brokers use one address, or NAT leads to another one.",
    ),
    Rule(
        Code.BROKER_UNRESOLVED,
        _make_broker_reach_condition(Reachability.UNRESOLVED),
        "The broker {broker.name} is registered as {broker.address}, which cannot be resolved "
        "here.",
        "Set brokerIP1 to a name or an address that clients can resolve.",
    ),
    Rule(
        Code.BROKER_DOWN,
        _find_brokers_down,
        "The broker {broker.name} (id {broker.id}) at {broker.address} does not answer: "
        "{broker.reach}.",
        "Start it, or open its port. A name server removes a dead broker after two minutes.",
    ),
    Rule(
        Code.BROKER_MUTE,
        _make_broker_reach_condition(Reachability.UNRESPONSIVE),
        "The broker {broker.name} at {broker.address} accepts connections but does not respond.",
        "Look at its log and its machine: it hangs, or another program has its port.",
    ),
    Rule(
        Code.NO_MASTER,
        _find_brokers_without_master,
        "The broker {name} has no master: its topics can be read, but not written.",
        'Start the master, or see which replica can become master with "sluice cluster status".',
    ),
    Rule(
        Code.CLOCK_SKEW,
        _find_skewed_clocks,
        "The clock of {machine} is {ahead_s:+.0f} s off.",
        "Synchronize it with a time server (chrony, systemd-timesyncd). Delays, retention and "
        "searches by time depend on it.",
    ),
)


# -------------------------------------------------------------------- stores and replicas

_DISK_USED: Final = "diskMaxUsedSpaceRatio", 75
_DISK_FORCED: Final = "diskSpaceCleanForciblyRatio", 85
_DISK_FULL: Final = "diskSpaceWarningLevelRatio", 90


def _make_disk_condition(low: tuple[str, int], high: tuple[str, int] | None) -> Condition:
    """Return the condition that a broker's disk is fuller than one limit, and not than another.

    `low` and `high` are (name of the setting with the limit, its default), in percent. None as
    `high` means no upper limit. The condition yields {"broker"}.
    """

    def condition(facts: ClusterFacts) -> Iterator[Values]:
        for broker in facts.brokers:
            is_below = high is None or broker.disk_percent <= broker.percent(*high)
            if broker.percent(*low) < broker.disk_percent and is_below:
                yield {"broker": broker}

    return condition


def _read_only(facts: ClusterFacts) -> Iterator[Values]:
    return each("broker", (broker for broker in facts.masters if not broker.is_writable))


def wiped_brokers(facts: ClusterFacts) -> Iterator[BrokerFacts]:
    """Yield the masters to which the name server forbids to send, although the broker allows it.

    An operator sets this with WIPE_WRITE_PERM_OF_BROKER (request code 205).
    """
    if facts.route is None:
        return
    permissions = {queue_data.broker: queue_data.perm for queue_data in facts.route.queues}
    for broker in facts.masters:
        if broker.topic is None or not broker.topic.perm & PERM_WRITE or not broker.is_writable:
            continue
        is_writable_in_route = permissions.get(broker.name, PERM_WRITE) & PERM_WRITE
        if not is_writable_in_route:
            yield broker


def _find_wiped_brokers(facts: ClusterFacts) -> Iterator[Values]:
    return each("broker", wiped_brokers(facts))


def _find_waiting_requests(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker", "pool", "wait_ms"} for each thread pool in which requests wait too long.

    The dictionary has the values of the finding's text.
    """
    for broker in facts.brokers:
        for pool, wait_ms in broker.request_waits_ms:
            if wait_ms > REQUEST_WAIT_MS:
                yield {"broker": broker, "pool": pool, "wait_ms": wait_ms}


def _find_brokers_with_full_parking(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker"} for each broker that has no room for another long poll.

    A broker parks a pull, which means that it answers only when a message arrives. Their number is
    limited by the setting sluiceParkedPullsMax. The dictionary has the values of the finding's
    text.
    """
    for broker in facts.brokers:
        pulls_max = broker.number("sluiceParkedPullsMax")
        if 0 < pulls_max <= broker.number("sluiceParkedPulls"):
            yield {"broker": broker}


def _find_cut_off_slaves(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker"} for each slave without a connection to its master, if the master answers.

    The dictionary has the values of the finding's text.
    """
    up = {broker.name for broker in facts.masters if broker.is_up}
    for broker in facts.brokers:
        if broker.replica.get("isLinked") is False and broker.name in up:
            yield {"broker": broker}


def _is_out_of_sync(broker: BrokerFacts) -> bool:
    return broker.replica.get("inSync") is False and broker.replica.get("role") == "slave"


def _find_slaves_out_of_sync(facts: ClusterFacts) -> Iterator[Values]:
    return each("broker", (broker for broker in facts.brokers if _is_out_of_sync(broker)))


def _find_lagging_slaves(facts: ClusterFacts) -> Iterator[Values]:
    for broker in facts.brokers:
        if not _is_out_of_sync(broker) and (broker.lag_bytes or 0) > LAG_BYTES:
            yield {"broker": broker}


def _find_small_in_sync_sets(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker", "in_sync", "required"} for each master with too few replicas in sync.

    A send needs `required` replicas, the master included, that have its whole log. The dictionary
    has the values of the finding's text.
    """
    for broker in facts.masters:
        in_sync = broker.replica.get("inSyncSize")
        required = int(broker.number("inSyncReplicas", 2 if broker.is_sync_master else 1))
        if broker.is_up and in_sync is not None and in_sync < required:
            yield {"broker": broker, "in_sync": in_sync, "required": required}


STORE_RULES: Final = (
    Rule(
        Code.DISK_FULL,
        _make_disk_condition(_DISK_FULL, None),
        "The disk of {broker.name} is {broker.disk_percent:.0f} % full, so sends are refused.",
        "Free disk space, lower fileReservedTime, or use a larger disk.",
    ),
    Rule(
        Code.DISK_FORCED,
        _make_disk_condition(_DISK_FORCED, _DISK_FULL),
        "The disk of {broker.name} is {broker.disk_percent:.0f} % full, so files are deleted "
        "before they expire, consumed or not.",
        "Free disk space, lower fileReservedTime, or use a larger disk.",
    ),
    Rule(
        Code.DISK_FILLING,
        _make_disk_condition(_DISK_USED, _DISK_FORCED),
        "The disk of {broker.name} is {broker.disk_percent:.0f} % full, so expired files are "
        "deleted at any hour.",
        "Plan for a larger disk, or lower fileReservedTime.",
        Severity.NOTE,
    ),
    Rule(
        Code.BROKER_READ_ONLY,
        _read_only,
        "The broker {broker.name} accepts no messages: brokerPermission = "
        "{broker.config[brokerPermission]}.",
        "To let it accept messages, set brokerPermission = 6 (mqadmin updateBrokerConfig).",
    ),
    Rule(
        Code.WRITE_PERM_WIPED,
        _find_wiped_brokers,
        "The name server does not let producers send to {broker.name}: the broker is being drained "
        "(wipeWritePerm).",
        'To let it accept messages again, run "mqadmin addWritePerm -b {broker.name}".',
    ),
    Rule(
        Code.REQUESTS_QUEUE,
        _find_waiting_requests,
        "Requests wait {wait_ms:.0f} ms at {broker.name} before they are processed ({pool} queue).",
        "The broker is overloaded: look at its disk and CPU, or add a broker.",
    ),
    Rule(
        Code.POLLS_FULL,
        _find_brokers_with_full_parking,
        "{broker.runtime[sluiceParkedPulls]} pulls are parked at {broker.name}, the maximum. "
        "Further pulls are answered immediately and repeated.",
        "Raise sluiceParkedPullsMax, or use fewer consumers or queues.",
    ),
    Rule(
        Code.REPLICA_CUT_OFF,
        _find_cut_off_slaves,
        "The replica {broker.id} of {broker.name} follows no master: it has no connection to the "
        "replication port of its master ({broker.replica[master]}).",
        "Check that it can reach that address (brokerIP2 and haListenPort of the master, "
        "haMasterAddress of the slave). Its log has the reason.",
    ),
    Rule(
        Code.REPLICA_NOT_IN_SYNC,
        _find_slaves_out_of_sync,
        "The replica {broker.id} of {broker.name} is not in sync: it cannot become master, and "
        "sends do not wait for it.",
        'Look at its log and its network. See how far behind it is with "sluice cluster status".',
    ),
    Rule(
        Code.REPLICAS_TOO_FEW,
        _find_small_in_sync_sets,
        "{in_sync} replicas of {broker.name} are in sync, but a send requires {required}.",
        "Start the missing replicas, or lower inSyncReplicas (its default is 2 for a SYNC_MASTER).",
    ),
    Rule(
        Code.REPLICA_BEHIND,
        _find_lagging_slaves,
        "The replica {broker.id} of {broker.name} is {broker.lag_bytes:,} bytes behind its master.",
        "Look at its disk and its network.",
    ),
)
