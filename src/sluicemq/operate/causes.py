"""The one cause: evidence in, causes with their cures out. Pure; the page on doctor has the table.

A row holds for each thing that its function finds in the evidence; the sentence and the cure show
it as `it`, the evidence as `e`. The order is that of the walk, and within a stage the most specific
row comes first: the first that holds is the cause, the others follow from it or stand beside it. A
row whose evidence is missing does not hold. A note is worth knowing, and nothing that is wrong.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from sluicemq.client.admin.rules import Code, Fate, Finding
from sluicemq.client.core.consuming import UNDECODABLE_NOTE
from sluicemq.hints import did_you_mean
from sluicemq.model.topic import MASTER_ID, PERM_WRITE, MessageQueue
from sluicemq.net.probe import Reachability
from sluicemq.operate.evidence import HOUR_MS, UNSUPPORTED, BrokerSeen, Evidence, ServerSeen

SKEW_MS: Final = 5_000
"""Clocks that differ by more are wrong; a broker tells its time in whole seconds."""
BEHIND_BYTES: Final = 64 << 20
WAITED_MS: Final = 200
"""RocketMQ refuses a send that has waited so long (waitTimeMillsInSendQueue)."""
RETRIES: Final = 3
"""A message that failed so often fails by itself, and not by chance."""
ANY_TYPE: Final = frozenset({"", "MIXED", "UNSPECIFIED"})


class Cause(NamedTuple):
    """A row. `found`: what of the evidence it holds for; `what` and `cure`: format texts."""

    code: str
    found: Callable[[Evidence], Iterable[Any]]
    what: str
    fix: str
    is_note: bool = False


class Named(NamedTuple):
    """A cause that holds."""

    code: str
    what: str
    fix: str
    is_note: bool = False


def met(*reaches: Reachability) -> Callable[[Evidence], Iterable[ServerSeen]]:
    """Servers at whose address this is met."""
    return lambda e: [one for one in (*e.names, *e.brokers) if one.reach in reaches]


def refused_as(pattern: str) -> Callable[[Evidence], Iterable[tuple[str, str]]]:
    """Refusals that say so. Each names who refuses, and what it says."""

    def found(e: Evidence) -> Iterator[tuple[str, str]]:
        seen = set()
        for address, remark in e.denied:
            kind = next(one for one in _REFUSALS if re.search(one, remark, re.IGNORECASE))
            if pattern == kind and remark not in seen:
                seen.add(remark)
                yield address, remark

    return found


_REFUSALS: Final = (
    "protected mode|sluiceProtectedMode",
    "No accessKey|cannot be null|is blank",
    "No acl config|not found|not exist",
    "signature",
    "",
)
"""What remarks of refusals say: those of RocketMQ 4 and 5, and ours (spec/config.md, ACL)."""


def down(e: Evidence) -> Iterator[BrokerSeen]:
    """Those whose address is not to blame."""
    blamed = [one for kind in ("wildcard", "loopback", "private") for one in lost_at(kind)(e)]
    for one in e.brokers:
        if one.reach in (Reachability.REFUSED, Reachability.UNREACHABLE) and one not in blamed:
            yield one


def lost_at(place: str) -> Callable[[Evidence], Iterable[BrokerSeen]]:
    """Brokers that are not reached at an address of this kind."""
    unreached = Reachability.REFUSED, Reachability.UNREACHABLE, Reachability.UNRESOLVED

    def found(e: Evidence) -> Iterator[BrokerSeen]:
        nets = {one.host.rpartition(".")[0] for one in e.names if one.is_up}
        for one in e.brokers:
            kind = one.place if one.name else "given"
            if kind == "private" and one.host.rpartition(".")[0] in nets:
                kind = ""  # its network is reached: the name server is there
            if kind == "loopback" and not e.is_remote:
                kind = ""
            if kind in ("public", "given") or (
                kind == "private" and one.reach is Reachability.REFUSED
            ):
                kind = ""
            is_lost = one.reach in unreached or one.is_other or kind == "wildcard"
            if kind == place and is_lost:
                yield one

    return found


def registered_elsewhere(e: Evidence) -> Iterator[BrokerSeen]:
    """Brokers that were given by address, and register with none of these name servers."""
    asked = {one.address for one in e.names}
    for one in e.brokers:
        told = set(one.config.get("namesrvAddr", "").split(";")) - {""}
        is_listed = any(one.address == other.address for other in e.brokers if other.name)
        if not one.name and one.is_up and not is_listed and told and not told & asked:
            yield one


def disk_between(low: tuple[str, int] | float, high: tuple[str, int] | float) -> Callable[..., Any]:
    """Masters whose disk is between two ratios."""

    def limit(one: BrokerSeen, ratio: tuple[str, int] | float) -> float:
        return one.percent(*ratio) if isinstance(ratio, tuple) else ratio

    return lambda e: [
        one for one in e.brokers if limit(one, low) < one.disk_percent <= limit(one, high)
    ]


_USED: Final = "diskMaxUsedSpaceRatio", 75
_FORCED: Final = "diskSpaceCleanForciblyRatio", 85
_FULL: Final = "diskSpaceWarningLevelRatio", 90


def skewed(e: Evidence) -> Iterator[tuple[str, float]]:
    """Who is wrong: one broker, or this machine when all of several brokers agree that it is."""
    known = [one for one in e.brokers if one.skew_ms is not None]
    wrong = [one for one in known if abs(one.skew_ms or 0) > SKEW_MS]
    spread = {round((one.skew_ms or 0) / SKEW_MS) for one in wrong}
    if len(known) > 1 and len(wrong) == len(known) and len(spread) == 1:
        yield "this machine", -(wrong[0].skew_ms or 0) / 1000
        return
    for one in wrong:
        yield f"broker {one.name or one.address}", (one.skew_ms or 0) / 1000


def skewed_clients(e: Evidence) -> Iterator[tuple[str, float]]:
    for member in e.group.members if e.group else ():
        if member.ahead_ms > SKEW_MS:
            yield member.client_id, member.ahead_ms / 1000
    stored = e.message and e.message.stored
    if stored and stored.born_time_ms - stored.store_time_ms > SKEW_MS:
        ahead_s = (stored.born_time_ms - stored.store_time_ms) / 1000
        yield f"the producer at {stored.born_host}", ahead_s


def missing_topic(*, exists: bool, creates: bool) -> Callable[[Evidence], Iterable[str]]:
    """The topic that no name server has a route of: does a broker have it, are any created?"""

    def found(e: Evidence) -> Iterator[str]:
        has = [one.name or one.address for one in e.brokers if one.topic is not None]
        may = {one.config.get("autoCreateTopicEnable", "true") for one in e.masters if one.is_up}
        makes = any(one.creates for one in e.names) and may != {"false"}
        is_gone = e.is_known is False and any(one.is_up for one in e.brokers)
        if is_gone and bool(has) == exists and (exists or makes == creates):
            yield ", ".join(sorted(set(has)))

    return found


def topic_lacks(right: str) -> Callable[[Evidence], Iterable[str]]:
    return lambda e: [right] if e.is_known and not e.has_right(right) else []


def wiped(e: Evidence) -> Iterator[BrokerSeen]:
    """The route forbids to write what the broker itself does not forbid (205)."""
    perms = {data.broker: data.perm for data in e.route.queues} if e.route else {}
    for one in e.masters:
        own = one.topic.perm if one.topic is not None else 0
        is_open = own & PERM_WRITE and int(one.number("brokerPermission", 6)) & PERM_WRITE
        if is_open and not perms.get(one.name, PERM_WRITE) & PERM_WRITE:
            yield one


def masterless(e: Evidence) -> list[str]:
    """Brokers that are registered, or in the route, without a master's address."""
    routed = e.route.brokers if e.route else ()
    names = {data.broker for data in routed if MASTER_ID not in data.addresses}
    registered = {one.name for one in e.brokers if one.name}
    return sorted(names | registered - {one.name for one in e.masters})


def wrong_types(e: Evidence) -> Iterator[str]:
    kinds = {one.topic.attributes.get("message.type", "") for one in e.brokers if one.topic}
    for kind in sorted(kinds - ANY_TYPE) if e.type else ():
        if kind != (e.type or "").upper():
            yield kind


def lagging(state: str) -> Callable[[Evidence], Iterable[BrokerSeen]]:
    """Slaves that are far behind, or not in the set that acknowledges."""

    def found(e: Evidence) -> Iterator[BrokerSeen]:
        for one in e.brokers:
            is_out = one.replica.get("inSync") is False and one.replica.get("role") == "slave"
            is_behind = not is_out and (one.behind_bytes or 0) > BEHIND_BYTES
            if is_out if state == "out" else is_behind:
                yield one

    return found


def short_sets(e: Evidence) -> Iterator[tuple[BrokerSeen, int, int]]:
    """Masters whose in-sync set is smaller than what a send needs."""
    for one in e.masters:
        in_sync = one.replica.get("inSyncSize")
        wanted = int(one.number("inSyncReplicas", 2 if one.is_sync_master else 1))
        if one.is_up and in_sync is not None and in_sync < wanted:
            yield one, in_sync, wanted


def cut_off(e: Evidence) -> Iterator[BrokerSeen]:
    """Slaves that have no connection to their master, though that one answers."""
    up = {one.name for one in e.masters if one.is_up}
    for one in e.brokers:
        if one.replica.get("isLinked") is False and one.name in up:
            yield one


def mixed_models(e: Evidence) -> Iterator[str]:
    if e.group is not None:
        models = {one.model for one in e.group.members if one.model} | e.group.models
        if len(models) > 1:
            yield " and ".join(sorted(models)).lower()


def pops_and_pulls(e: Evidence) -> Iterator[tuple[str, str]]:
    for member in e.group.members if e.group and e.group.pops else ():
        topics = {queue.topic for queue in member.info.queues} if member.info else set()
        for topic in sorted(topics & (e.group.pops if e.group else set())):
            yield member.client_id, topic


def undecodable_bodies(e: Evidence) -> Iterator[tuple[str, str, str, str]]:
    """Yield client id, count, topic and the newest error of members that met such bodies."""
    for member in e.group.members if e.group else ():
        for name, told in (member.info.notes if member.info is not None else {}).items():
            if name.startswith(UNDECODABLE_NOTE):
                count, _, newest = told.partition("; ")
                yield member.client_id, count, name.removeprefix(UNDECODABLE_NOTE), newest


def blocked_queues(e: Evidence) -> Iterator[tuple[str, MessageQueue, int, float]]:
    """Queues of which an ordered consumer fails on the first message again and again."""
    lags = {item.queue: item for item in e.group.own_lags if item.lag} if e.group else {}
    for member in e.group.members if e.group else ():
        failing = member.failing
        held = member.info.queues if member.info else {}
        for queue in held:
            item = lags.get(queue)
            if item is not None and queue.topic in failing:
                yield member.client_id, queue, item.committed, failing[queue.topic]


def expiring(e: Evidence) -> Iterator[tuple[MessageQueue, int, float]]:
    """Queues whose unread messages go with the next files, as brokers of ours count them."""
    for item in e.group.own_lags if e.group else ():
        if item.messages_at_risk:
            left_h = (item.loss_time_ms - e.now_ms) / HOUR_MS if item.loss_time_ms else 0
            yield item.queue, item.messages_at_risk, max(left_h, 0)


def maybe_expiring(e: Evidence) -> Iterator[tuple[MessageQueue, int, float]]:
    """Queues of other brokers with unread messages whose last read one is nearly as old as
    fileReservedTime: in a topic with few messages the unread ones may be much younger."""
    hours = {
        one.name: one.number("fileReservedTime", 0)
        for one in e.masters
        if "sluiceVersion" not in one.runtime
    }
    for reached in e.group.progress if e.group else ():
        kept_h = hours.get(reached.queue.broker, 0)
        age_h = (e.now_ms - reached.last_time_ms) / HOUR_MS
        is_old = reached.last_time_ms > 0 and kept_h > 0 and age_h > 0.9 * kept_h
        if is_old and reached.lag:
            yield reached.queue, reached.lag, age_h


def explained_as(code: Code) -> Callable[[Evidence], Iterable[Finding]]:
    """What explain found of the group, or of the message in it unless that is consumed."""

    def found(e: Evidence) -> list[Finding]:
        of_group = e.group.explained.findings if e.group and e.group.explained else ()
        told = e.message.explained if e.message is not None else ()
        missing = [item for item in told if item.fate is not Fate.CONSUMED]
        fates = [one for item in missing for one in item.findings]
        both = [one for one in (*fates, *of_group) if one.code is code]
        return list(dict.fromkeys(both))

    return found


def of_message(test: Callable[[Any, Evidence], bool]) -> Callable[[Evidence], Iterable[Any]]:
    return lambda e: [e.message] if e.message is not None and test(e.message, e) else []


def similar(name: str, known: Iterable[str]) -> str:
    """A hint at a name that is spelt nearly so; else ""."""
    hint = did_you_mean(name, known, cutoff=0.8)
    return f" {hint}" if hint else ""


CAUSES: Final[tuple[Cause, ...]] = (
    # --- name servers, and what is met at any address
    Cause("name-unresolved", lambda e: [one for one in e.names
        if one.reach is Reachability.UNRESOLVED],
        "The name server {it.address} cannot be looked up: {it.detail}.",
        "Check the spelling, and the DNS of this machine (a name of a compose file is known in its "
        "network alone)."),
    Cause("name-server-is-broker",
        lambda e: [o for o in e.names
            if o.reach is Reachability.RESPONDS and o.code == UNSUPPORTED],
        "A broker answers at {it.address}, and no name server.",
        "Give the name server's port: 9876 unless its listenPort says otherwise."),
    Cause("broker-is-name-server",
        lambda e: [o for o in e.brokers
            if o.reach is Reachability.RESPONDS and o.code == UNSUPPORTED],
        "A name server answers at {it.address}, where a broker was expected.",
        "Give the broker's port: 10911 unless its listenPort says otherwise."),
    Cause("http-server", met(Reachability.HTTP),
        "An HTTP server answers at {it.address}.",
        "That is a console, metrics or a web server: give the port of the remoting protocol."),
    Cause("grpc-server", met(Reachability.GRPC),
        "A server of gRPC answers at {it.address}, such as the proxy.",
        "Clients of gRPC use that port; give the name server's, 9876 unless configured otherwise."),
    Cause("tls-demanded", met(Reachability.TLS),
        "{it.address} speaks TLS alone, and was asked without.",
        "Ask with --tls (SLUICE_TLS=true; Java: -Dtls.enable=true)."),
    Cause("tls-not-spoken", met(Reachability.PLAIN),
        "{it.address} speaks no TLS, and was asked with it.",
        "Ask without --tls, or set tls.server.mode = permissive there."),
    Cause("certificate-expired", met(Reachability.EXPIRED),
        "The certificate of {it.address} has expired.",
        "Put a new one at tls.server.certPath; ours reads it without a restart."),
    Cause("certificate-wrong-name", met(Reachability.WRONG_NAME),
        "The certificate of {it.address} is for another name: {it.detail}.",
        "Use a name that it bears, or --tls-verify ca."),
    Cause("certificate-untrusted", met(Reachability.UNTRUSTED),
        "The certificate of {it.address} is not trusted: {it.detail}.",
        "Give the authority that signed it: --tls-ca."),
    Cause("client-certificate", met(Reachability.CLIENT_CERTIFICATE),
        "{it.address} refuses the handshake: {it.detail}.",
        "It wants a certificate of the client that its authority signed: --tls-certificate and "
        "--tls-key."),
    # --- rights
    Cause("protected-mode", refused_as(_REFUSALS[0]),
        "{it[0]} serves its own machine alone: nobody has opened it.",
        "Set bindAddress (or --host) or aclEnable there."),
    Cause("access-key-missing", refused_as(_REFUSALS[1]),
        "{it[0]} wants to know who asks, and no access key was given: {it[1]}.",
        "Give --access-key and --secret-key, or SLUICE_ACCESS_KEY and SLUICE_SECRET_KEY."),
    Cause("access-key-unknown", refused_as(_REFUSALS[2]),
        "{it[0]} knows no such account: {it[1]}.",
        "Check the access key's spelling, and that plain_acl.yml of that server has it."),
    Cause("secret-key-wrong", refused_as(_REFUSALS[3]),
        "{it[0]} knows the account, and the secret key is not its: {it[1]}.",
        "Use the secret key of that server's plain_acl.yml. The time is not in the signature: no "
        "clock is to blame."),
    Cause("right-missing", refused_as(_REFUSALS[4]),
        "{it[0]} refuses: {it[1]}.",
        "Give the account that right (topicPerms, groupPerms); `sluice acl check` says which rule "
        "decides."),
    # --- nobody there
    Cause("name-server-down",
        lambda e: [o for o in e.names if o.reach in (Reachability.REFUSED,
            Reachability.UNREACHABLE, Reachability.UNRESPONSIVE)],
        "The name server {it.address} does not answer: {it.reach} ({it.detail}).",
        "refused: start it, or check the port. silent: a firewall, a route, or the machine is off. "
        "mute: it hangs, or is no name server."),
    Cause("broker-registers-elsewhere", registered_elsewhere,
        "The broker at {it.address} registers with {it.config[namesrvAddr]}, and with none of the "
        "name servers asked.",
        "Set namesrvAddr there, or ask those name servers."),
    Cause("no-broker-registered",
        lambda e: [one for one in e.names if one.cluster is not None and not one.cluster.brokers],
        "No broker is registered with the name server {it.address}.",
        "Start a broker with this namesrvAddr. After a restart a name server is empty until "
        "brokers register again, within 30 s. `--broker HOST:PORT` asks one where it registers."),
    # --- addresses of brokers
    Cause("broker-address-wildcard", lost_at("wildcard"),
        "The broker {it.name} is registered with {it.address}, which is no address to dial.",
        "Set brokerIP1 to what clients reach, and restart it."),
    Cause("broker-address-loopback", lost_at("loopback"),
        "The broker {it.name} is registered with {it.address}: each client looks for it on its own "
        "machine.",
        "Set brokerIP1 to an address that clients reach, and restart it."),
    Cause("broker-address-private", lost_at("private"),
        "The broker {it.name} is registered with {it.address}, a private address that is not "
        "reached from here ({it.detail}): behind NAT or in a container.",
        "Set brokerIP1 to the outer address, with the port published as the same number; or let "
        "clients into that network."),
    Cause("broker-is-another",
        lambda e: [one for one in e.brokers if one.is_other and one.place != "loopback"],
        "At {it.address}, where {it.name} is registered, {it.config[brokerName]} answers.",
        "Two brokers use one address, or NAT leads to another one: check brokerIP1 and ports."),
    Cause("broker-unresolved", lambda e: [o for o in e.brokers
        if o.reach is Reachability.UNRESOLVED],
        "The broker {it.name} is registered as {it.address}, which cannot be looked up here.",
        "Set brokerIP1 to a name or an address that clients know."),
    Cause("broker-down", down,
        "The broker {it.name} (id {it.id}) at {it.address} does not answer: {it.reach}.",
        "Start it, or open its port. A name server forgets a dead broker after two minutes."),
    Cause("broker-mute", lambda e: [one for one in e.brokers
        if one.reach is Reachability.UNRESPONSIVE],
        "The broker {it.name} at {it.address} takes connections and answers nothing.",
        "It hangs, or another program has its port: look at its log and its machine."),
    Cause("no-master", masterless,
        "The broker {it} has no master now: its topics can be read, and not written.",
        "Start the master, or see `sluice cluster status` for who could become it."),
    Cause("clock-skew", skewed,
        "The clock of {it[0]} is {it[1]:+.0f} s off.",
        "Let it follow a time server (chrony, systemd-timesyncd): delays, retention and searches "
        "by time depend on it."),
    # --- stores
    Cause("disk-full", disk_between(_FULL, 1e9),
        "The disk of {it.name} is {it.disk_percent:.0f} % full: sends are refused.",
        "Free space, lower fileReservedTime, or give it a larger disk."),
    Cause("disk-forced", disk_between(_FORCED, _FULL),
        "The disk of {it.name} is {it.disk_percent:.0f} % full: files are deleted whatever their "
        "age, read or not.",
        "Free space, lower fileReservedTime, or give it a larger disk."),
    Cause("disk-filling", disk_between(_USED, _FORCED),
        "The disk of {it.name} is {it.disk_percent:.0f} % full: expired files go at any hour.",
        "Plan for a larger disk, or lower fileReservedTime.", is_note=True),
    Cause("broker-read-only",
        lambda e: [one for one in e.masters
                   if not int(one.number("brokerPermission", 6)) & PERM_WRITE],
        "The broker {it.name} takes no messages: brokerPermission = {it.config[brokerPermission]}.",
        "Set brokerPermission = 6 there (mqadmin updateBrokerConfig) when it shall."),
    Cause("write-perm-wiped", wiped,
        "The name server forbids to write to {it.name}: it is being drained (wipeWritePerm).",
        "mqadmin addWritePerm -b {it.name} when it shall take messages again."),
    Cause("requests-queue",
        lambda e: [(one, pool, ms) for one in e.brokers for pool, ms in one.congested
                   if ms > WAITED_MS],
        "Requests wait {it[2]:.0f} ms at {it[0].name} before it begins ({it[1]} queue).",
        "The broker is overloaded: look at its disk and processor, or add a broker."),
    Cause("polls-full",
        lambda e: [one for one in e.brokers if 0 < one.number("sluiceParkedPullsMax")
                   <= one.number("sluiceParkedPulls")],
        "{it.runtime[sluiceParkedPulls]} pulls wait at {it.name}, as many as it keeps: others come "
        "back at once and ask again.",
        "Raise sluiceParkedPullsMax, or use fewer consumers or queues."),
    Cause("replica-cut-off", cut_off,
        "The replica {it.id} of {it.name} follows nobody: no connection to its master's "
        "replication port ({it.replica[master]}).",
        "Look whether it reaches that address (brokerIP2 and haListenPort of the master, "
        "haMasterAddress of the slave); its log says why."),
    Cause("replica-not-in-sync", lagging("out"),
        "The replica {it.id} of {it.name} is not in sync: it cannot take over, and sends do not "
        "wait for it.",
        "Look at its log and its network; `sluice cluster status` shows how far behind it is."),
    Cause("replicas-too-few", short_sets,
        "{it[1]} replicas of {it[0].name} are in sync, and a send needs {it[2]}.",
        "Start the missing replicas, or lower inSyncReplicas (a SYNC_MASTER needs 2 unless it is "
        "written)."),
    Cause("replica-behind", lagging("behind"),
        "The replica {it.id} of {it.name} is {it.behind_bytes:,} bytes behind its master.",
        "Look at its disk and its network."),
    # --- the topic
    Cause("topic-at-other-name-server",
        lambda e: [one for one in e.names if one.knows is False and e.is_known],
        "The name server {it.address} has no route of {e.topic}; another one that was asked has.",
        "Let brokers register with all of them: namesrvAddr = a:9876;b:9876. Just after a restart, "
        "wait 30 s."),
    Cause("topic-not-registered", missing_topic(exists=True, creates=False),
        "{it} has the topic {e.topic}, and no name server has its route.",
        "Wait for its registration (30 s); else its log says why that fails, or its namesrvAddr "
        "names others."),
    Cause("topic-not-sent-to", missing_topic(exists=False, creates=True),
        "No topic {e.topic} is there yet: the first send will create it, a consumer does not."
        "{hint}",
        "Send to it, or: sluice topic create {e.topic}."),
    Cause("topic-missing", missing_topic(exists=False, creates=False),
        "No topic {e.topic} is there, and no broker creates topics by itself "
        "(autoCreateTopicEnable).{hint}",
        "sluice topic create {e.topic}"),
    Cause("topic-closed", lambda e: [e.topic] if e.is_known and not (
            e.has_right("read") or e.has_right("write")) else [],
        "The topic {e.topic} may be neither read nor written: its permission is none.",
        "mqadmin updateTopicPerm -t {e.topic} -p 6"),
    Cause("topic-not-writable", lambda e: [] if list(wiped(e)) else topic_lacks("write")(e),
        "No queue of {e.topic} may be written: its permission, or that of its brokers, is read.",
        "mqadmin updateTopicPerm -t {e.topic} -p 6, or brokerPermission = 6."),
    Cause("topic-not-readable", topic_lacks("read"),
        "No queue of {e.topic} may be read: its permission, or that of its brokers, is write.",
        "mqadmin updateTopicPerm -t {e.topic} -p 6, or brokerPermission = 6."),
    Cause("order-names-gone-broker",
        lambda e: sorted(e.ordered_brokers - {data.broker for data in e.route.brokers})
        if e.route else [],
        "The order configuration of {e.topic} names the broker {it}, which is not there: sends to "
        "its queues fail.",
        "Start it, or take it out: mqadmin updateOrderConf."),
    Cause("wrong-type", wrong_types,
        "{e.topic} takes messages of type {it}, and {e.type} ones are sent.",
        "Send to a topic of that type, or change message.type (mqadmin updateTopic -a)."),
    # --- the message
    Cause("message-delayed", of_message(lambda m, e: m.waiting == "delayed"),
        "The message {it.message_id} is delayed: it has not been delivered yet.",
        "Wait until it is due; `sluice delay list` shows when, on brokers of ours."),
    Cause("message-half", of_message(lambda m, e: m.waiting == "half"),
        "The message {it.message_id} is the half of a transaction, undecided or rolled back.",
        "The producer has to commit it; `sluice transaction list` shows those that are open."),
    Cause("message-expired", of_message(
            lambda m, e: not m.waiting and (0 < m.born_ms < m.earliest_ms if m.stored is None
                                            else m.stored.queue_offset < m.offset_min)),
        "The message {it.message_id} is older than what the brokers keep: it was deleted.",
        "Raise fileReservedTime, if its disk allows, for what comes."),
    Cause("message-unknown", of_message(
            lambda m, e: m.stored is None and not m.waiting
            and not 0 < m.born_ms < m.earliest_ms),
        "No broker has a message {it.message_id}.",
        "Check the id and the cluster; the send may have failed."),
    Cause("message-undecodable", of_message(
            lambda m, e: m.stored is not None and m.stored.body_error is not None),
        "The body of the message {it.message_id} cannot be decoded: {it.stored.body_error.reason}.",
        "{it.stored.body_error.fix}"),
    # --- the group and its clients
    Cause("client-clock-skew", skewed_clients,
        "The clock of {it[0]} is at least {it[1]:.0f} s ahead.",
        "Let it follow a time server: it decides what is stuck, and when messages are due."),
    Cause("models-mixed", mixed_models,
        "Members of {e.group.name} consume as {it}: each broker believes whoever spoke last.",
        "Give those that broadcast a group of their own."),
    Cause("pop-and-pull", pops_and_pulls,
        "{it[0]} pulls {it[1]}, which other members of {e.group.name} pop: both get the messages.",
        "Let all members use one way: mqadmin setConsumeMode, or a group for each."),
    Cause("bodies-undecodable", undecodable_bodies,
        "{it[0]} cannot decode the bodies of {it[1]} messages of {it[2]}. The newest: {it[3]}",
        "Do what that says; on_undecodable decides what becomes of such messages meanwhile."),
    Cause("message-poisoned",
        lambda e: [(message_id, times) for message_id, times in e.group.retried.items()
                   if times >= RETRIES] if e.group else [],
        "The message {it[0]} has failed {it[1]} times in {e.group.name}, and comes again.",
        "Mend the handler, or let it put such messages aside; `sluice explain message {it[0]}`."),
    Cause("queue-blocked", blocked_queues,
        "{it[0]} fails on offset {it[2]} of {it[1].topic} queue {it[1].queue_id} "
        "on {it[1].broker} again and again: what is behind it waits.",
        "Mend the handler, or limit maxReconsumeTimes; `sluice group reset` skips it."),
    Cause("retention-lost",
        lambda e: [one for one in e.group.own_lags if one.lost] if e.group else [],
        "{it.lost:,} messages of {it.queue.topic} queue {it.queue.queue_id} on {it.queue.broker} "
        "were deleted before {it.group} had them.",
        "Raise fileReservedTime, or consume faster; nothing brings them back."),
    Cause("retention-near", expiring,
        "{it[1]:,} unread messages of {it[0].topic} queue {it[0].queue_id} on {it[0].broker} are "
        "deleted in about {it[2]:.1f} h.",
        "Consume faster (more queues and members), or raise fileReservedTime now."),
    Cause("retention-maybe-near", maybe_expiring,
        "What was read last of {it[0].topic} queue {it[0].queue_id} on {it[0].broker} is "
        "{it[2]:.1f} h old: if the {it[1]:,} unread messages are as old, they are deleted soon.",
        "Look how old the first unread one is; if so, consume faster.",
        is_note=True),
    Cause("member-mute",
        lambda e: [one for one in e.group.members if one.is_mute
                   and any(item.lag for item in e.group.own_lags)] if e.group else [],
        "{it.client_id} is connected and does not answer; messages wait.",
        "The process hangs or is stopped: look at its machine, restart it."),
    Cause("filter-matches-nothing",
        lambda e: [one for one in e.group.filters if one.rows and not one.matched]
        if e.group else [],
        "The filter {it.expression} takes none of the last {it.rows:,} messages of {it.topic}"
        "{atoms}.",
        "Try another one: sluice filter test, which shows what messages have."),
    *(
        Cause(str(code), explained_as(code), "{it.what}", "{it.instead}", is_note)
        for code, is_note in (
            (Code.NO_SUCH_GROUP, False), (Code.CONSUMING_OFF, False), (Code.REFUSED, False),
            (Code.UNEQUAL, False), (Code.BROKEN_FILTER, False), (Code.NO_MEMBER, False),
            (Code.NOT_SUBSCRIBED, False), (Code.BEYOND_END, False), (Code.NOT_ACKNOWLEDGING, False),
            (Code.DEAD_LETTER, False), (Code.FILTER_FALSE, False), (Code.FILTER_ERROR, False),
            (Code.NO_LANE, False), (Code.NO_ROUTE, False), (Code.MEMBER_IDLE, False),
            (Code.QUEUE_IDLE, False), (Code.IGNORED_TEXT, True), (Code.FORGOTTEN, True),
            (Code.RETRY_PENDING, True), (Code.BEHIND, True),
        )
    ),
    Cause("dead-letters",
        lambda e: [e.group] if e.group and e.group.dead
        and e.now_ms - e.group.dead_time_ms < HOUR_MS else [],
        "Within the last hour {it.name} gave messages up: %DLQ%{it.name} has {it.dead:,}.",
        "Look at them (consume %DLQ%{it.name}, or a pipeline of dead letters), mend the handler."),
    Cause("vip-port", lambda e: [one for one in e.brokers if one.is_up and one.name
                               and one.vip not in (None, Reachability.RESPONDS)],
        "The VIP port of {it.name}, two below {it.address}, is not reached.",
        "Only clients with vipChannelEnabled (Java before 4.5.1 by default) need it: publish it "
        "too, or set com.rocketmq.sendMessageWithVIPChannel=false.", is_note=True),
)  # fmt: skip
"""Most specific first within each stage of the walk."""


def decide(e: Evidence, topics: Iterable[str] = ()) -> list[Named]:
    """What holds: the cause first, then what stands beside it, then notes. `topics`: names that are
    known, to hint at one that was misspelt."""
    hint = similar(e.topic or "", topics)
    found = []
    for row in CAUSES:
        for it in row.found(e):
            atoms = getattr(it, "atoms", ())
            values = {
                "it": it, "e": e, "hint": hint,
                "atoms": f": {'; '.join(atoms)} is true of none" if atoms else "",
            }  # fmt: skip
            what, fix = row.what.format(**values), row.fix.format(**values)
            found.append(Named(row.code, what, fix, row.is_note))
    return sorted(dict.fromkeys(found), key=lambda one: one.is_note)
