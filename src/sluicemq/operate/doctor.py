"""The walk: name server -> route -> broker -> store -> group -> client, and what of it is evidence.

Each stage asks only whom the one before it has reached. Nothing is changed by it: topics and groups
are asked about only where they are known (a broker may create what it is asked for), and whether an
account may send is asked with a queue that no topic has, which brokers refuse after its rights
(spec/config.md). So it works against RocketMQ too; what that cannot tell is said to be unseen.

The time of a broker is `bootTimestamp` and `runtime` of its counters (spec/admin.md §3): the moment
at which its store was opened, and for how many seconds it has been open.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, ParamSpec, TypeVar

from sluicemq.client.admin.groups import ConsumerClient
from sluicemq.client.admin.messages import read_range
from sluicemq.client.admin.rules import Fate
from sluicemq.client.core import requests
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.names import sign_request
from sluicemq.client.sync.admin import Admin
from sluicemq.config.load import parse_properties
from sluicemq.errors import (
    ConfigurationError,
    MessageNotFoundError,
    PermissionDeniedError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    SluiceError,
)
from sluicemq.filter.subscriptions import is_tag_kind, subscribe
from sluicemq.model.ids import unique_id_time_ms
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.system_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from sluicemq.model.topic import (
    DEFAULT_TOPIC,
    DLQ_PREFIX,
    MASTER_ID,
    RETRY_PREFIX,
    MessageQueue,
    TopicRoute,
    pop_origin,
)
from sluicemq.net.probe import probe, probe_connection
from sluicemq.operate.causes import RETRIES, Named, decide
from sluicemq.operate.evidence import (
    UNSUPPORTED,
    BrokerSeen,
    Evidence,
    FilterSeen,
    GroupSeen,
    MemberSeen,
    MessageSeen,
    NameServerSeen,
    without_master,
)
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

P = ParamSpec("P")
T = TypeVar("T")
MEMBERS_MAX: Final = 16
ROWS_MAX: Final = 10_000
"""So many of the newest messages of a topic a filter is tried on."""
TAIL: Final = 64
NO_QUEUE: Final = 999_999
_SENDER: Final = "sluice-doctor"
_NOTHING: Final = OutgoingMessage("", b"-", "", "", 0, 0, True)
_NO_ANSWER: Final = int(ResponseCode.CONSUME_MSG_TIMEOUT)
_ADMIN: Final = "Need admin permission"
_DENIED: Final = "no permission to access"
"""RocketMQ 5's users: code 16, which closed topics and brokers have as well."""
WAITING_TOPICS: Final = {
    SCHEDULE_TOPIC: "delayed",
    TIMER_TOPIC: "delayed",
    HALF_TOPIC: "half",
}
_RUNTIME: Final = re.compile(r"(\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`cause`: the one; `also`: what holds besides; `notes`: worth knowing, nothing wrong."""

    evidence: Evidence
    cause: Named | None
    also: tuple[Named, ...]
    notes: tuple[Named, ...]

    @property
    def is_healthy(self) -> bool:
        return self.cause is None


def diagnose(
    admin: Admin,
    *,
    topic: str | None = None,
    group: str | None = None,
    message_id: str | None = None,
    type: str | None = None,  # noqa: A002 - what RocketMQ calls it
    brokers: Iterable[str] = (),
) -> Diagnosis:
    """Why the cluster, a topic, a group or a message is not as it should be.

    `type` is what producers send to the topic (normal, fifo, delay, transaction); `brokers` are
    addresses to be asked besides those that are registered. Whatever is wrong is told, not raised.
    """
    walk = Walk(admin, topic)
    names = walk.name_servers()
    seen = walk.brokers(names, brokers)
    is_reached = any(one.is_up for one in names)
    known: list[str] = []
    message: MessageSeen | None = None
    about: GroupSeen | None = None
    if not is_reached:
        walk.unseen.append("brokers, topics and groups: no name server answers.")
    elif not any(one.is_up for one in seen):
        walk.unseen.append("topics and groups: no broker answers.")
    else:
        known = walk.look("the topics", admin.topics) or []
        seen = walk.replicas(seen)
        if topic is not None and any(one.knows for one in names):
            walk.rights(topic, group, seen)
        if message_id is not None:
            message = walk.message(message_id, topic, group, seen)
        if group is not None:
            about = walk.group(group, seen)
    evidence = Evidence(
        admin.clock.now_ms(), topic, type, names, seen, tuple(walk.denied), about, message,
        tuple(walk.unseen),
    )  # fmt: skip
    found = decide(evidence, known)
    wrong = [one for one in found if not one.is_note]
    notes = tuple(one for one in found if one.is_note)
    return Diagnosis(evidence, wrong[0] if wrong else None, tuple(wrong[1:]), notes)


@dataclass(slots=True)
class Walk:
    """One walk: who asks, what was refused, and what could not be seen."""

    admin: Admin
    topic: str | None
    denied: list[tuple[str, str]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    def look(
        self, what: str, question: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> T | None:
        """The answer, or None: then it is refused, or unseen."""
        try:
            return question(*args, **named)
        except PermissionDeniedError as error:
            self.refuse(error.address or what, error.remark, what)
        except SluiceError as error:
            self.unseen.append(f"{what}: {error.fact}.")
        return None

    def refuse(self, address: str, remark: str, what: str) -> None:
        """A refusal. What only an administrator may ask is unseen: a client does not need it."""
        if _ADMIN in remark:
            self.unseen.append(f"{what}: {remark}.")
        else:
            self.denied.append((address, remark))

    def ask(self, address: str, command: Command, what: str) -> Command | None:
        """An answer that succeeds; else None, and what was said is kept."""
        answer = self.look(what, self.admin.call, address, command)
        if answer is None or answer.code == requests.SUCCESS:
            return answer
        error = requests.request_error(answer, address)
        if isinstance(error, PermissionDeniedError) or requests.is_access_denied(answer):
            self.refuse(address, error.remark, what)
        elif answer.code not in (requests.TOPIC_NOT_EXIST, requests.GROUP_NOT_EXIST):
            self.unseen.append(f"{what}: {error.fact}.")
        return None

    def probed(self, address: str, command: Command) -> tuple[dict[str, Any], Command | None]:
        """What is met at an address, as the first fields of a server that was seen."""
        met = probe(address, sign_request(command, self.admin.credentials), self.admin.tls)
        answer = met.response
        values: dict[str, Any] = {
            "address": address,
            "reach": met.reachability,
            "detail": met.detail,
        }
        if answer is not None and answer.code and _ADMIN in (answer.remark or ""):
            self.unseen.append(f"{address}: {answer.remark}.")
        elif answer is not None and answer.code:
            values |= {"code": answer.code, "remark": answer.remark or ""}
            if answer.code != UNSUPPORTED:
                self.refuse(address, answer.remark or "", address)
        return values, answer if answer is not None and not answer.code else None

    # ------------------------------------------------------------------------ name servers

    def name_servers(self) -> list[NameServerSeen]:
        """Each one that was given, for itself."""
        found = []
        for address in self.admin.name_servers:
            values, answer = self.probed(address, requests.cluster_info())
            one = NameServerSeen(**values)
            if answer is not None:
                one = replace(one, cluster=bodies.decode_cluster_info(answer.body))
                if self.topic is not None:
                    route = self.route(address, self.topic)
                    creates = self.route(address, DEFAULT_TOPIC) is not None
                    one = replace(one, route=route, knows=route is not None, creates=creates)
            found.append(one)
        return found

    def route(self, address: str, topic: str) -> TopicRoute | None:
        answer = self.ask(address, requests.route(topic), f"the route of {topic} at {address}")
        return None if answer is None else bodies.decode_topic_route(answer.body)

    # ----------------------------------------------------------------------------- brokers

    def brokers(self, names: Iterable[NameServerSeen], given: Iterable[str]) -> list[BrokerSeen]:
        """Every replica that a name server knows, and those that were given."""
        places: dict[tuple[str, str], tuple[str, int]] = {}
        for server in names:
            for data in server.cluster.brokers.values() if server.cluster else ():
                for broker_id, address in data.addresses.items():
                    places[data.broker, address] = data.cluster, broker_id
        places |= {("", address): ("", MASTER_ID) for address in given}
        found = [self.broker(*key, *value) for key, value in sorted(places.items())]
        ends = {
            one.name: one.number("commitLogMaxOffset")
            for one in found
            if one.id == MASTER_ID and one.is_up
        }
        return [
            replace(one, behind_bytes=int(ends[one.name] - one.number("commitLogMaxOffset")))
            if one.id != MASTER_ID and one.is_up and one.name in ends
            else one
            for one in found
        ]

    def broker(self, name: str, address: str, cluster: str, broker_id: int) -> BrokerSeen:
        clock = self.admin.clock
        began_ms = clock.now_ms()
        values, answer = self.probed(address, requests.runtime_info())
        one = BrokerSeen(**values, name=name, cluster=cluster, id=broker_id)
        if not one.is_up:
            return one
        if answer is not None:
            middle_ms = (began_ms + clock.now_ms()) // 2
            table = bodies.decode_kv_table(answer.body)
            one = replace(one, runtime=table, skew_ms=skew_ms(table, middle_ms))
        what = f"the settings of {name or address}"
        told = self.ask(address, requests.make_request(RequestCode.GET_BROKER_CONFIG), what)
        if told is not None:
            one = replace(one, config=parse_properties(bytes(told.body).decode(errors="replace")))
        host, _, port = address.rpartition(":")
        vip = probe_connection(f"{host}:{int(port) - 2}").reachability
        one = replace(one, vip=vip)
        if self.topic is not None and not one.is_other:
            command = requests.topic_config(topic=self.topic, logical=True)
            told = self.ask(address, command, f"{self.topic} at {name or address}")
            if told is not None:
                one = replace(one, topic=tables.decode_topic_config(told.body))
        return one

    def replicas(self, seen: list[BrokerSeen]) -> list[BrokerSeen]:
        """With what brokers of ours tell of their replicas."""
        rows = self.look("replicas", self.admin.replicas) or []
        known = {(row["broker"], row["id"]): row for row in rows}
        sizes = {
            row["broker"]: len(row["said"]["inSync"])
            for row in rows
            if row["said"] and row["said"].get("inSync") and row["role"] == "master"
        }
        found = []
        for one in seen:
            row = known.pop((one.name, one.id), None)
            told = {} if row is None else {name: row[name] for name in ("inSync", "role", "state")}
            linked = self.linked(one)
            size = sizes.get(one.name, linked.pop("inSyncSize", None))
            found.append(replace(one, replica=told | linked | {"inSyncSize": size}))
        return found

    def linked(self, one: BrokerSeen) -> dict[str, Any]:
        """What a replica says of its connections (907): how many replicas are in sync, or where its
        master is and whether it follows it. Nothing of RocketMQ 4.9, and of who is alone."""
        if not one.is_up or (one.id == MASTER_ID and not one.is_sync_master):
            return {}
        try:
            told = self.admin.replication_status(one.address)
        except SluiceError:
            return {}
        if told["master"]:
            return {"inSyncSize": 1 + told["inSyncSlaveNums"]}
        client = told["haClientRuntimeInfo"]
        return {"isLinked": client["isActivated"], "master": client["masterAddr"] or "unknown"}

    # ------------------------------------------------------------------------------ rights

    def rights(self, topic: str, group: str | None, seen: Iterable[BrokerSeen]) -> None:
        """May this account send to the topic, and read it? Asked of each broker that has it; a
        request for a queue that is none ends behind the check of rights. A broker whose own table
        has not the group is not asked for it: it may create what somebody pulls with."""
        for one in seen:
            if self.admin.credentials is None or one.topic is None or one.id != MASTER_ID:
                continue
            queue = MessageQueue(topic, one.name, NO_QUEUE)
            asked = [requests.send(_SENDER, queue, _NOTHING, self.admin.clock.now_ms())]
            what = f"the groups of {one.name}"
            table = self.look(what, self.admin.group_table, one.address) if group else None
            if group is not None and table is not None and group in table.groups:
                asked.append(requests.pull(group, queue, 0, subscription=subscribe(topic, None)))
            for command in asked:
                answer = self.look("rights", self.admin.call, one.address, command)
                remark = (answer and answer.remark) or ""
                if answer is not None and (requests.is_access_denied(answer) or _DENIED in remark):
                    self.denied.append((one.address, remark))

    # ------------------------------------------------------------------------------- group

    def group(self, name: str, seen: Iterable[BrokerSeen]) -> GroupSeen | None:
        """Its settings and members, what explain finds, and what it has before it. None: who may
        know it does not answer."""
        admin = self.admin
        configs = self.look("the groups", admin.groups) or {}
        if name not in configs and (gone := without_master(seen)):
            self.unseen.append(f"the group {name}: no master of {', '.join(gone)} answers.")
            return None
        about = GroupSeen(name, configs.get(name))
        explained = self.look(f"the group {name}", admin.explain_group, name)
        about = replace(about, explained=explained)
        if about.config is None:
            return about
        clients = self.look(f"the members of {name}", admin.consumers, name) or []
        contracts = self.look(f"the contract of {name}", admin.contract, name) or []
        dead = self.dead_letters(name)
        return replace(
            about,
            lags=self.look(f"the lag of {name}", admin.lag, name) or (),
            progress=self.look(f"the progress of {name}", admin.progress, name) or (),
            members=[self.member(name, client) for client in clients[:MEMBERS_MAX]],
            models=frozenset(one.message_model for one in clients),
            dead=sum(one.offset_max - one.offset_min for one in dead),
            dead_time_ms=max((one.last_time_ms for one in dead), default=0),
            retried=self.retried(name),
            filters=self.filters(name, has_lanes=any(len(one.lanes) > 1 for one in contracts)),
            pops=frozenset(topic for one in contracts for topic in one.pops),
        )

    def member(self, group: str, client: ConsumerClient) -> MemberSeen:
        command = requests.running_info(group=group, client_id=client.client_id, stack_enable=False)
        now_ms = self.admin.clock.now_ms
        try:
            answer = self.admin.call(client.broker_address, command)
            if answer.code != requests.SUCCESS:
                is_late = answer.code == _NO_ANSWER
                return MemberSeen(client.client_id, None, is_late)
            info = bodies.decode_running_info(answer.body)
        except RequestTimeoutError:
            return MemberSeen(client.client_id, None, True)
        except (SluiceError, ProtocolError) as error:
            self.unseen.append(f"what {client.client_id} does: {error.fact}.")
            return MemberSeen(client.client_id)
        pulled_ms = max((queue.last_pull_ms for queue in info.queues.values()), default=0)
        model = info.properties.get("messageModel", "")
        ahead_ms = max(0, pulled_ms - now_ms())
        return MemberSeen(client.client_id, info, False, model, ahead_ms)

    def dead_letters(self, group: str) -> list[bodies.QueueStats]:
        """The queues of its dead letters; none without any."""
        topic = DLQ_PREFIX + group
        if topic not in (self.look("the topics", self.admin.topics) or ()):
            return []
        return list((self.look(topic, self.admin.topic_offsets, topic) or {}).values())

    def retried(self, group: str) -> dict[str, int]:
        """Messages that have failed often and come again: those at the end of the retry topics, of
        which a group that pops has one for each topic."""
        admin = self.admin
        known = set(self.look("the topics", admin.topics) or ())
        topics = {one for one in known if pop_origin(one, group) in known - {one}}
        times: dict[str, int] = {}

        def take(page: list[StoredMessage]) -> bool:
            for message in page:
                count = max(times.get(message.message_id, 0), message.reconsume_times)
                times[message.message_id] = count
            return True

        for topic in sorted(topics | known & {RETRY_PREFIX + group}):
            for queue, stats in (self.look(topic, admin.topic_offsets, topic) or {}).items():
                low = max(stats.offset_min, stats.offset_max - TAIL)
                talk = read_range(admin.directory, queue, low, stats.offset_max, take)
                self.look(topic, admin.run, talk)
        found = {}
        for message_id in [one for one, count in times.items() if count >= RETRIES][: TAIL // 8]:
            told = self.look(message_id, admin.explain_message, message_id, group=group)
            fates = {one.fate for one in told[1]} if told is not None else set()
            if fates & {Fate.RETRY, Fate.IN_FLIGHT}:
                found[message_id] = times[message_id]
        return found

    def filters(self, group: str, *, has_lanes: bool) -> list[FilterSeen]:
        """What its filters take of the newest messages, with the conditions that none meets."""
        if has_lanes:
            return []
        admin = self.admin
        wanted: dict[str, Subscription] = {}
        command = requests.consumer_connections(group=group)
        for address in (self.look("the brokers", admin.masters) or {}).values():
            answer = self.look("subscriptions", admin.call, address, command)
            if answer is not None and answer.code == requests.SUCCESS:
                wanted |= bodies.decode_consumer_connections(answer.body).subscriptions
        found = []
        for topic, one in wanted.items():
            if one.is_everything or topic.startswith(RETRY_PREFIX):
                continue
            trials = self.look(
                f"what the filter of {topic} takes",
                admin.try_filter, topic, one.expression, one.kind, count_max=ROWS_MAX,
            )  # fmt: skip
            reports = [trial.report for trial in trials or ()]
            none: set[str] = set()
            for report in reports:
                none |= {atom["text"] for atom in report["atoms"] if not atom["true"]}
            for report in reports:
                none -= {atom["text"] for atom in report["atoms"] if atom["true"]}
            atoms = () if is_tag_kind(one.kind) else tuple(sorted(none))
            rows = sum(report["rows"] for report in reports)
            matched = sum(report["matched"] for report in reports)
            found.append(FilterSeen(topic, one.expression, rows, matched, atoms))
        return found

    # ----------------------------------------------------------------------------- message

    def message(
        self, message_id: str, topic: str | None, group: str | None, seen: Iterable[BrokerSeen]
    ) -> MessageSeen | None:
        """Where it is and what became of it in the group; else where it waits. None: who may have
        it does not answer."""
        admin = self.admin
        deleting = [one for one in seen if one.is_up and one.number("commitLogMinOffset") > 0]
        earliest = [one.number("earliestMessageTimeStamp") for one in deleting]
        about = MessageSeen(
            message_id, earliest_ms=int(max(0, min(earliest, default=0))),
            born_ms=unique_id_time_ms(message_id, admin.clock.now_ms()),
        )  # fmt: skip
        try:
            stored, found = admin.explain_message(message_id, group=group, topic=topic)
        except MessageNotFoundError:
            if gone := without_master(seen):
                what = f"the message {message_id}"
                self.unseen.append(f"{what}: no master of {', '.join(gone)} answers.")
                return None
            for name, waiting in WAITING_TOPICS.items():
                try:
                    one = admin.message_by_id(message_id, topic=name)
                except (MessageNotFoundError, RequestError, ConfigurationError):
                    continue
                return replace(about, stored=one, waiting=waiting)
            return about
        except SluiceError as error:
            self.unseen.append(f"the message {message_id}: {error.fact}.")
            return about
        waiting = WAITING_TOPICS.get(stored.message.topic, "")
        return replace(
            about, stored=stored.message, offset_min=stored.offset_min, explained=found,
            waiting=waiting,
        )  # fmt: skip


def skew_ms(table: dict[str, str], now_ms: int) -> int | None:
    """By how much a broker's clock is ahead of ours, to half a second; None: it does not tell."""
    ran = _RUNTIME.search(table.get("runtime", ""))
    boot = table.get("bootTimestamp", "")
    if ran is None or not boot.isdigit():
        return None
    days, hours, minutes, seconds = map(int, ran.groups())
    open_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return int(boot) + open_s * 1000 + 500 - now_ms
