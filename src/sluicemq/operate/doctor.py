"""Diagnose a cluster: collect facts from its servers and clients, and judge them.

The walk goes from the name servers to the brokers, their stores, the group and its clients. Each
stage asks only servers that an earlier stage reached. Nothing in the cluster is changed:

- Topics and groups are asked about only where they are known, because a broker may create a topic
  that it is asked about.
- Whether an account may send is asked with a queue that no topic has. Brokers check permissions
  before they refuse such a queue (spec/config.md).

All requests but a few are RocketMQ's own, so this works with RocketMQ clusters, too. A fact that
could not be learned is reported as unseen.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, ParamSpec, TypeVar

from sluicemq.client.admin.diagnose.cluster_facts import (
    UNSUPPORTED,
    BrokerFacts,
    ClusterFacts,
    MessageSearch,
    NameServerFacts,
    brokers_without_master,
)
from sluicemq.client.admin.diagnose.cluster_rules import RETRIES_MIN
from sluicemq.client.admin.diagnose.findings import Fate, Finding, GroupExplained
from sluicemq.client.admin.diagnose.group_facts import FilterFacts, GroupFacts, MemberFacts
from sluicemq.client.admin.diagnose.table import diagnose_cluster
from sluicemq.client.admin.groups import ConsumerClient
from sluicemq.client.admin.messages import read_range
from sluicemq.client.core import requests
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.names import sign_request
from sluicemq.client.sync.admin import Admin
from sluicemq.config.properties import parse_properties
from sluicemq.errors import (
    ConfigurationError,
    MessageNotFoundError,
    PermissionDeniedError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    SluiceError,
)
from sluicemq.filter.subscriptions import is_tag_kind, parse_subscription
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
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

P = ParamSpec("P")
T = TypeVar("T")
MEMBERS_MAX: Final = 16
"""The maximum number of members of a group that are asked about themselves."""
ROWS_MAX: Final = 10_000
"""The number of newest messages of a topic on which a filter is tried."""
RETRIES_READ_MAX: Final = 64
"""The number of newest messages that are read of each queue of a retry topic."""
RETRIES_EXPLAINED_MAX: Final = 8
NO_QUEUE: Final = 999_999
"""A queue number that no topic has."""
_SENDER: Final = "sluice-doctor"
_EMPTY_MESSAGE: Final = OutgoingMessage("", b"-", "", "", 0, 0, True)
_NO_ANSWER: Final = int(ResponseCode.CONSUME_MSG_TIMEOUT)
_ADMIN_ONLY: Final = "Need admin permission"
_DENIED: Final = "no permission to access"
"""The remark with which RocketMQ 5 denies a user a request, under the same code (16) with which it
reports closed topics and brokers."""
WAITING_TOPICS: Final = {
    SCHEDULE_TOPIC: "delayed",
    TIMER_TOPIC: "delayed",
    HALF_TOPIC: "half",
}
"""System topic -> why a message waits in it."""
_UPTIME: Final = re.compile(r"(\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a cluster, and the facts from which that was concluded.

    `cause` is the most important problem, None if the cluster is healthy. `also` are the other
    problems, and `notes` are findings that an operator should know although nothing is wrong.
    """

    facts: ClusterFacts
    cause: Finding | None
    also: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether no problem was found."""
        return self.cause is None


def diagnose(
    admin: Admin,
    *,
    topic: str | None = None,
    group: str | None = None,
    message_id: str | None = None,
    type: str | None = None,  # noqa: A002 - RocketMQ's name for it
    brokers: Iterable[str] = (),
) -> Diagnosis:
    """Find out what is wrong with a cluster, or with one of its topics, groups or messages.

    `type` is the type of the messages that producers send to the topic: normal, fifo, delay or
    transaction. `brokers` are addresses of brokers to ask besides the registered ones. The result
    has the most important problem as its cause. A server that does not respond or refuses a request
    becomes a finding; it raises no error.
    """
    facts = _collect_facts(Walk(admin, topic), type, group, message_id, brokers)

    problems = []
    notes = []
    for finding in diagnose_cluster(facts):
        if finding.is_note:
            notes.append(finding)
        else:
            problems.append(finding)
    cause = problems[0] if problems else None  # the findings begin with the most important one
    return Diagnosis(facts, cause, tuple(problems[1:]), tuple(notes))


def _collect_facts(
    walk: "Walk",
    message_type: str | None,
    group: str | None,
    message_id: str | None,
    extra_brokers: Iterable[str],
) -> ClusterFacts:
    """Ask all servers, one stage after the other, and return the facts that they report.

    The arguments are those of `diagnose`. If no name server or no broker responds, the later stages
    are left out and recorded as unseen.
    """
    admin = walk.admin
    topic = walk.topic
    name_servers = walk.collect_name_servers()
    brokers = walk.collect_brokers(name_servers, extra_brokers)
    facts = ClusterFacts(0, topic, message_type, name_servers)
    if not any(server.is_up for server in name_servers):
        walk.unseen.append("brokers, topics and groups: no name server answers.")
    elif not any(broker.is_up for broker in brokers):
        walk.unseen.append("topics and groups: no broker answers.")
    else:
        known_topics = walk.ask_admin("the topics", admin.topics) or []
        brokers = walk.add_replication_status(brokers)
        if topic is not None and any(server.has_route for server in name_servers):
            walk.check_permissions(topic, group, brokers)
        if message_id is not None:
            message_search = walk.search_message(message_id, topic, group, brokers)
            facts = replace(facts, message=message_search)
        if group is not None:
            group_facts, explained_group = walk.collect_group(group, brokers)
            facts = replace(facts, group=group_facts, explained_group=explained_group)
        facts = replace(facts, known_topics=known_topics)

    # The last step, because each stage adds to `denied` and `unseen`.
    return replace(
        facts,
        now_ms=admin.clock.now_ms(),
        brokers=brokers,
        denied=tuple(walk.denied),
        unseen=tuple(walk.unseen),
    )


@dataclass(slots=True)
class Walk:
    """One walk through a cluster on behalf of one account.

    `topic` is the topic that is diagnosed, None without one. `denied` collects the refusals as
    (address, remark), and `unseen` a sentence for each fact that could not be learned.
    """

    admin: Admin
    topic: str | None
    denied: list[tuple[str, str]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    # -------------------------------------------------------------------- asking servers

    def ask_admin(
        self, description: str, question: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> T | None:
        """Call `question`, a function of the admin client, and return its result, None if it fails.

        An error is recorded: in `denied` if access control refused the request, else in `unseen`.
        `description` names what was asked, for example "the topics".
        """
        try:
            return question(*args, **named)
        except PermissionDeniedError as error:
            self.add_refusal(error.address or description, error.remark, description)
        except SluiceError as error:
            self.unseen.append(f"{description}: {error.fact}.")
        return None

    def add_refusal(self, address: str, remark: str, description: str) -> None:
        """Record that access control of a server refused a request.

        It goes to `denied`, because clients of the account will fail, too. A request that only
        administrators may send goes to `unseen`: clients do not need it. `description` names what
        was asked.
        """
        if _ADMIN_ONLY in remark:
            self.unseen.append(f"{description}: {remark}.")
        else:
            self.denied.append((address, remark))

    def ask(self, address: str, command: Command, description: str) -> Command | None:
        """Send a request, and return the response if it is a success, else None.

        The failure is recorded in `denied` or `unseen`, except if the topic or group does not
        exist.
        """
        answer = self.ask_admin(description, self.admin.call, address, command)
        if answer is None or answer.code == requests.SUCCESS:
            return answer
        error = requests.request_error(answer, address)
        if isinstance(error, PermissionDeniedError) or requests.is_access_denied(answer):
            self.add_refusal(address, error.remark, description)
        elif answer.code not in (requests.TOPIC_NOT_EXIST, requests.GROUP_NOT_EXIST):
            self.unseen.append(f"{description}: {error.fact}.")
        return None

    def probe(self, address: str, command: Command) -> tuple[dict[str, Any], Command | None]:
        """Send a request to an address, and find out what answers there.

        Returns (fields for `ServerFacts`, response). The response is None if there is none or if it
        is an error; the fields then have its code and remark. A refusal is recorded.
        """
        probed = probe(address, sign_request(command, self.admin.credentials), self.admin.tls)
        answer = probed.response
        probed_fields: dict[str, Any] = {
            "address": address,
            "reach": probed.reachability,
            "detail": probed.detail,
        }
        if answer is None or not answer.code:
            return probed_fields, answer
        remark = answer.remark or ""
        if _ADMIN_ONLY in remark:
            self.unseen.append(f"{address}: {remark}.")
        else:
            probed_fields |= {"code": answer.code, "remark": remark}
            if answer.code != UNSUPPORTED:
                self.add_refusal(address, remark, address)
        return probed_fields, None

    # ---------------------------------------------------------------------- name servers

    def collect_name_servers(self) -> list[NameServerFacts]:
        """Return the facts about each name server, also about one that cannot be reached.

        If a topic is diagnosed, they include its route there, and whether topics are created
        automatically (the name server then has a route of DEFAULT_TOPIC).
        """
        servers = []
        for address in self.admin.name_servers:
            probed_fields, answer = self.probe(address, requests.cluster_info())
            server = NameServerFacts(**probed_fields)
            if answer is not None:
                server = replace(server, cluster=bodies.decode_cluster_info(answer.body))
                if self.topic is not None:
                    server = self._add_routes(server, address, self.topic)
            servers.append(server)
        return servers

    def _add_routes(self, server: NameServerFacts, address: str, topic: str) -> NameServerFacts:
        """Return `server` with its route of `topic`, and whether topics are created on demand.

        `address` is the name server's. Topics are created on demand if it has a route of
        DEFAULT_TOPIC.
        """
        route = self.fetch_route(address, topic)
        default_route = self.fetch_route(address, DEFAULT_TOPIC)
        return replace(
            server,
            route=route,
            has_route=route is not None,
            creates_topics=default_route is not None,
        )

    def fetch_route(self, address: str, topic: str) -> TopicRoute | None:
        """Return the route that a name server has of a topic, None if it has none."""
        answer = self.ask(address, requests.route(topic), f"the route of {topic} at {address}")
        return None if answer is None else bodies.decode_topic_route(answer.body)

    # --------------------------------------------------------------------------- brokers

    def collect_brokers(
        self, name_servers: Iterable[NameServerFacts], extra_addresses: Iterable[str]
    ) -> list[BrokerFacts]:
        """Return the facts about each registered replica and each at an address of the user.

        `extra_addresses` are those of the user; such a replica has the name and cluster "". If a
        master responds, the facts about its slaves include how far they lag.
        """
        replicas = _list_registered_replicas(name_servers)
        for address in extra_addresses:
            replicas["", address] = ("", MASTER_ID)
        brokers = []
        log_ends = {}
        for (name, address), (cluster, broker_id) in sorted(replicas.items()):
            broker = self.collect_broker(name, address, cluster, broker_id)
            brokers.append(broker)
            if broker.is_master and broker.is_up:
                log_ends[broker.name] = broker.number("commitLogMaxOffset")
        return [_with_lag(broker, log_ends) for broker in brokers]

    def collect_broker(self, name: str, address: str, cluster: str, broker_id: int) -> BrokerFacts:
        """Return the facts about the replica at one address.

        If it responds, they include its counters, settings, clock and configuration of the
        diagnosed topic, and whether its VIP port (its port minus 2) accepts connections. Failed
        requests are recorded in `denied` or `unseen`.
        """
        clock = self.admin.clock
        began_ms = clock.now_ms()
        probed_fields, answer = self.probe(address, requests.runtime_info())
        broker = BrokerFacts(**probed_fields, name=name, cluster=cluster, id=broker_id)
        if not broker.is_up:
            return broker

        if answer is not None:
            # The broker read its clock about halfway between the request and the answer.
            middle_ms = (began_ms + clock.now_ms()) // 2
            counters = bodies.decode_kv_table(answer.body)
            ahead_ms = clock_ahead_ms(counters, middle_ms)
            broker = replace(broker, runtime=counters, clock_ahead_ms=ahead_ms)
        broker = self._add_settings(broker)

        host, _, port = address.rpartition(":")
        vip_address = f"{host}:{int(port) - 2}"
        broker = replace(broker, vip_reach=probe_connection(vip_address).reachability)

        if self.topic is not None and not broker.is_other_broker:
            broker = self._add_topic_config(broker, self.topic)
        return broker

    def _add_settings(self, broker: BrokerFacts) -> BrokerFacts:
        """Return `broker` with its settings, or unchanged if it does not report them."""
        command = requests.make_request(RequestCode.GET_BROKER_CONFIG)
        description = f"the settings of {broker.name or broker.address}"
        answer = self.ask(broker.address, command, description)
        if answer is None:
            return broker
        settings_text = bytes(answer.body).decode(errors="replace")
        return replace(broker, config=parse_properties(settings_text))

    def _add_topic_config(self, broker: BrokerFacts, topic: str) -> BrokerFacts:
        """Return `broker` with its settings of a topic, or unchanged if it reports none."""
        command = requests.topic_config(topic=topic, logical=True)
        description = f"{topic} at {broker.name or broker.address}"
        answer = self.ask(broker.address, command, description)
        if answer is None:
            return broker
        return replace(broker, topic=tables.decode_topic_config(answer.body))

    def add_replication_status(self, brokers: list[BrokerFacts]) -> list[BrokerFacts]:
        """Return the brokers with what they report about their replication in `replica`.

        `replica` has some of the keys inSync, role, state, isLinked, master and inSyncSize.
        """
        rows = self.ask_admin("replicas", self.admin.replicas) or []
        rows_by_id = {(row["broker"], row["id"]): row for row in rows}
        in_sync_sizes = _count_in_sync(rows)
        brokers_with_status = []
        for broker in brokers:
            status = {}
            # Each row is used once, also if two addresses have the same name and id.
            broker_row = rows_by_id.pop((broker.name, broker.id), None)
            if broker_row is not None:
                status = {name: broker_row[name] for name in ("inSync", "role", "state")}
            connection = self.fetch_replication_status(broker)
            connected_size = connection.pop("inSyncSize", None)
            in_sync_size = in_sync_sizes.get(broker.name, connected_size)
            replica = status | connection | {"inSyncSize": in_sync_size}
            brokers_with_status.append(replace(broker, replica=replica))
        return brokers_with_status

    def fetch_replication_status(self, broker: BrokerFacts) -> dict[str, Any]:
        """Return what a replica reports about its connections for replication (request code 907).

        For a master this is {"inSyncSize": number of replicas in sync}. For a slave it is
        {"isLinked": whether it is connected, "master": address}. The result is {} for a broker
        without replicas and for RocketMQ 4.9.
        """
        if not broker.is_up or (broker.is_master and not broker.is_sync_master):
            return {}
        try:
            status = self.admin.replication_status(broker.address)
        except SluiceError:
            return {}
        if status["master"]:
            return {"inSyncSize": 1 + status["inSyncSlaveNums"]}
        client = status["haClientRuntimeInfo"]
        return {"isLinked": client["isActivated"], "master": client["masterAddr"] or "unknown"}

    # ----------------------------------------------------------------------- permissions

    def check_permissions(
        self, topic: str, group: str | None, brokers: Iterable[BrokerFacts]
    ) -> None:
        """Record each broker at which the account may not send to the topic or read from it.

        Each master that has the topic gets requests for a queue that does not exist, so that
        nothing is stored or read. Reading is tried only if the broker knows the group, because a
        pull could create the group.
        """
        for broker in brokers:
            if self.admin.credentials is None or broker.topic is None or not broker.is_master:
                continue
            queue = MessageQueue(topic, broker.name, NO_QUEUE)
            now_ms = self.admin.clock.now_ms()
            commands = [requests.send(_SENDER, queue, _EMPTY_MESSAGE, now_ms)]
            if group is not None and self._has_group(broker, group):
                everything = parse_subscription(topic, None)
                commands.append(requests.pull(group, queue, 0, subscription=everything))
            for command in commands:
                self._check_permission(broker.address, command)

    def _has_group(self, broker: BrokerFacts, group: str) -> bool:
        """Return whether a broker has a group; False if it does not answer."""
        description = f"the groups of {broker.name}"
        table = self.ask_admin(description, self.admin.group_table, broker.address)
        return table is not None and group in table.groups

    def _check_permission(self, address: str, command: Command) -> None:
        """Send a request to a broker, and record in `denied` if access control refuses it."""
        answer = self.ask_admin("rights", self.admin.call, address, command)
        if answer is None:
            return
        remark = answer.remark or ""
        if requests.is_access_denied(answer) or _DENIED in remark:
            self.denied.append((address, remark))

    # ----------------------------------------------------------------------------- group

    def collect_group(
        self, name: str, brokers: Iterable[BrokerFacts]
    ) -> tuple[GroupFacts | None, GroupExplained | None]:
        """Return the facts about a group, and what explains its state.

        If no broker knows the group, but not all brokers respond, both results are None.
        """
        admin = self.admin
        configs = self.ask_admin("the groups", admin.groups) or {}
        if name not in configs and (down := brokers_without_master(brokers)):
            self.unseen.append(f"the group {name}: no master of {', '.join(down)} answers.")
            return None, None
        explained = self.ask_admin(f"the group {name}", admin.explain_group, name)
        facts = GroupFacts(name, configs.get(name))
        if facts.config is None:
            return facts, explained

        return self._add_group_details(facts), explained

    def _add_group_details(self, facts: GroupFacts) -> GroupFacts:
        """Return the facts about a group with members, lag, failed messages and filters added."""
        admin = self.admin
        name = facts.name
        clients = self.ask_admin(f"the members of {name}", admin.consumers, name) or []
        contracts = self.ask_admin(f"the contract of {name}", admin.contract, name) or []
        dead_letter_queues = self.fetch_dead_letter_queues(name)
        dead_letter_times_ms = [queue.last_time_ms for queue in dead_letter_queues]
        has_lanes = any(len(contract.lanes) > 1 for contract in contracts)
        return replace(
            facts,
            contracts=contracts,
            lags=self.ask_admin(f"the lag of {name}", admin.lag, name) or (),
            progress=self.ask_admin(f"the progress of {name}", admin.progress, name) or (),
            members=[self.ask_member(name, client) for client in clients[:MEMBERS_MAX]],
            message_models=frozenset(client.message_model for client in clients),
            dead_letter_count=sum(
                queue.offset_max - queue.offset_min for queue in dead_letter_queues
            ),
            dead_letter_time_ms=max(dead_letter_times_ms, default=0),
            failed_messages=self.find_failed_messages(name),
            # Each lane has a filter of its own, so no single filter can be tried.
            filters=[] if has_lanes else self.try_filters(name),
        )

    def ask_member(self, group: str, client: ConsumerClient) -> MemberFacts:
        """Ask a member of a group for a report about itself, and return the facts from it.

        `is_mute` is True if the member does not answer its broker. A report that cannot be decoded,
        or another failure, is recorded in `unseen`.
        """
        client_id = client.client_id
        command = requests.running_info(group=group, client_id=client_id, stack_enable=False)
        try:
            answer = self.admin.call(client.broker_address, command)
            if answer.code != requests.SUCCESS:
                return MemberFacts(client_id, is_mute=answer.code == _NO_ANSWER)
            running_info = bodies.decode_running_info(answer.body)
        except RequestTimeoutError:
            return MemberFacts(client_id, is_mute=True)
        except (SluiceError, ProtocolError) as error:
            self.unseen.append(f"what {client_id} does: {error.fact}.")
            return MemberFacts(client_id)
        pull_times_ms = [queue.last_pull_ms for queue in running_info.queues.values()]
        # The member's clock is ahead if it says that it pulled in the future.
        ahead_ms = max(0, max(pull_times_ms, default=0) - self.admin.clock.now_ms())
        return MemberFacts.from_info(client_id, running_info, ahead_ms)

    def fetch_dead_letter_queues(self, group: str) -> list[bodies.QueueStats]:
        """Return the offsets of the queues of the group's dead-letter topic, [] without one."""
        topic = DLQ_PREFIX + group
        if topic not in (self.ask_admin("the topics", self.admin.topics) or ()):
            return []
        offsets = self.ask_admin(topic, self.admin.topic_offsets, topic) or {}
        return list(offsets.values())

    def find_failed_messages(self, group: str) -> dict[str, int]:
        """Return message id -> number of failures, for messages that fail again and again.

        They have failed at least `RETRIES_MIN` times and will be delivered again. Only the newest
        messages of the retry topics are considered.
        """
        failure_counts: dict[str, int] = {}
        for retry_topic in self._list_retry_topics(group):
            self._count_failures(retry_topic, failure_counts)

        repeated = [
            message_id for message_id, count in failure_counts.items() if count >= RETRIES_MIN
        ]
        failing = {}
        for message_id in repeated[:RETRIES_EXPLAINED_MAX]:
            if self._will_be_delivered_again(message_id, group):
                failing[message_id] = failure_counts[message_id]
        return failing

    def _list_retry_topics(self, group: str) -> list[str]:
        """Return the retry topics of a group that exist, sorted.

        A group has one retry topic, and another one for each topic that it pops.
        """
        known_topics = set(self.ask_admin("the topics", self.admin.topics) or ())
        retry_topics = []
        for topic in sorted(known_topics):
            popped_topic = pop_origin(topic, group)
            is_pop_retry = popped_topic != topic and popped_topic in known_topics
            if is_pop_retry or topic == RETRY_PREFIX + group:
                retry_topics.append(topic)
        return retry_topics

    def _count_failures(self, retry_topic: str, failure_counts: dict[str, int]) -> None:
        """Read the newest messages of a retry topic, and put their retries into `failure_counts`.

        It maps message ids to the highest number of retries, and is changed in place.
        """
        admin = self.admin

        def count_page(page: list[StoredMessage]) -> bool:
            for message in page:
                earlier_count = failure_counts.get(message.message_id, 0)
                failure_counts[message.message_id] = max(earlier_count, message.reconsume_times)
            return True

        offsets = self.ask_admin(retry_topic, admin.topic_offsets, retry_topic) or {}
        for queue, stats in offsets.items():
            low = max(stats.offset_min, stats.offset_max - RETRIES_READ_MAX)
            conversation = read_range(admin.directory, queue, low, stats.offset_max, count_page)
            self.ask_admin(retry_topic, admin.run, conversation)

    def _will_be_delivered_again(self, message_id: str, group: str) -> bool:
        """Return whether the group waits for a retry of the message, or is processing it."""
        answer = self.ask_admin(message_id, self.admin.explain_message, message_id, group=group)
        if answer is None:
            return False
        _, explanations = answer
        return any(explanation.fate in {Fate.RETRY, Fate.IN_FLIGHT} for explanation in explanations)

    def try_filters(self, group: str) -> list[FilterFacts]:
        """Try each filter of a group on the newest messages of its topic."""
        tried_filters = []
        for topic, subscription in self._fetch_subscriptions(group).items():
            if not subscription.is_everything and not topic.startswith(RETRY_PREFIX):
                tried_filters.append(self._try_filter(topic, subscription))
        return tried_filters

    def _fetch_subscriptions(self, group: str) -> dict[str, Subscription]:
        """Return topic -> subscription of a group, as the masters know them.

        Masters that fail are left out.
        """
        subscriptions: dict[str, Subscription] = {}
        command = requests.consumer_connections(group=group)
        masters = self.ask_admin("the brokers", self.admin.masters) or {}
        for address in masters.values():
            answer = self.ask_admin("subscriptions", self.admin.call, address, command)
            if answer is not None and answer.code == requests.SUCCESS:
                subscriptions |= bodies.decode_consumer_connections(answer.body).subscriptions
        return subscriptions

    def _try_filter(self, topic: str, subscription: Subscription) -> FilterFacts:
        """Return how many of the newest messages of a topic match the filter of a subscription.

        For SQL92, the result names the comparisons of the filter that are true for no message.
        """
        expression = subscription.expression
        kind = subscription.kind
        trials = self.ask_admin(
            f"what the filter of {topic} takes",
            self.admin.try_filter,
            topic,
            expression,
            kind,
            count_max=ROWS_MAX,
        )
        reports = [trial.report for trial in trials or ()]  # one for each broker
        return FilterFacts(
            topic,
            expression,
            rows=sum(report["rows"] for report in reports),
            matched=sum(report["matched"] for report in reports),
            never_true=() if is_tag_kind(kind) else _find_never_true(reports),
        )

    # --------------------------------------------------------------------------- message

    def search_message(
        self,
        message_id: str,
        topic: str | None,
        group: str | None,
        brokers: Iterable[BrokerFacts],
    ) -> MessageSearch | None:
        """Search a message, and explain what happened to it in the group.

        A message may also wait in a system topic, for example until its delivery time. Returns None
        if no broker has the message, but not all brokers respond.
        """
        admin = self.admin
        search = MessageSearch(
            message_id,
            earliest_ms=_find_earliest_stored_ms(brokers),
            born_ms=unique_id_time_ms(message_id, admin.clock.now_ms()),
        )
        try:
            stored, explained = admin.explain_message(message_id, group=group, topic=topic)
        except MessageNotFoundError:
            if down := brokers_without_master(brokers):
                self.unseen.append(
                    f"the message {message_id}: no master of {', '.join(down)} answers."
                )
                return None
            return self.find_waiting_message(search)
        except SluiceError as error:
            self.unseen.append(f"the message {message_id}: {error.fact}.")
            return search
        return replace(
            search,
            stored=stored.message,
            offset_min=stored.offset_min,
            explained=explained,
            waiting=WAITING_TOPICS.get(stored.message.topic, ""),
        )

    def find_waiting_message(self, search: MessageSearch) -> MessageSearch:
        """Search the message in the system topics where messages wait, and add it to `search`.

        Returns `search` unchanged if it is not found.
        """
        for topic, waiting in WAITING_TOPICS.items():
            try:
                message = self.admin.message_by_id(search.message_id, topic=topic)
            except (MessageNotFoundError, RequestError, ConfigurationError):
                continue
            return replace(search, stored=message, waiting=waiting)
        return search


def _list_registered_replicas(
    name_servers: Iterable[NameServerFacts],
) -> dict[tuple[str, str], tuple[str, int]]:
    """Return (broker name, address) -> (cluster, broker id) of each registered replica."""
    replicas = {}
    for server in name_servers:
        if not server.cluster:
            continue
        for broker_data in server.cluster.brokers.values():
            for broker_id, address in broker_data.addresses.items():
                replicas[broker_data.broker, address] = (broker_data.cluster, broker_id)
    return replicas


def _count_in_sync(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return broker name -> number of replicas that its master reports as in sync.

    `rows` come from `Admin.replicas`. A master that does not report this is left out.
    """
    in_sync_sizes = {}
    for row in rows:
        reported = row["said"]
        if row["role"] == "master" and reported and reported.get("inSync"):
            in_sync_sizes[row["broker"]] = len(reported["inSync"])
    return in_sync_sizes


def _find_never_true(reports: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the comparisons of a filter that are true for no message at any broker, sorted."""
    atom_texts = set()
    true_texts = set()
    for report in reports:
        for atom in report["atoms"]:
            atom_texts.add(atom["text"])
            if atom["true"]:
                true_texts.add(atom["text"])
    return tuple(sorted(atom_texts - true_texts))


def _find_earliest_stored_ms(brokers: Iterable[BrokerFacts]) -> int:
    """Return the time of the oldest stored message, in milliseconds since 1970.

    Only brokers that have deleted messages count; without them the result is 0.
    """
    store_times_ms = []
    for broker in brokers:
        has_deleted = broker.is_up and broker.number("commitLogMinOffset") > 0
        if has_deleted:
            store_times_ms.append(broker.number("earliestMessageTimeStamp"))
    return int(max(0, min(store_times_ms, default=0)))


def _with_lag(broker: BrokerFacts, log_ends: dict[str, float]) -> BrokerFacts:
    """Return a slave with the number of bytes that it is behind its master.

    `log_ends` maps broker names to the end of the master's log. A master, a slave that is down and
    one without a known master are returned unchanged.
    """
    if broker.is_master or not broker.is_up or broker.name not in log_ends:
        return broker
    lag_bytes = int(log_ends[broker.name] - broker.number("commitLogMaxOffset"))
    return replace(broker, lag_bytes=lag_bytes)


def clock_ahead_ms(counters: dict[str, str], now_ms: int) -> int | None:
    """Return how far a broker's clock is ahead of this machine's in ms, exact to half a second.

    It is computed from two counters: `bootTimestamp`, when the broker opened its store, and
    `runtime`, for how long it has been open (spec/admin.md §3). `now_ms` is this machine's time.
    Returns None if the broker does not report them.
    """
    uptime = _UPTIME.search(counters.get("runtime", ""))
    boot = counters.get("bootTimestamp", "")
    if uptime is None or not boot.isdigit():
        return None
    days, hours, minutes, seconds = map(int, uptime.groups())
    open_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return int(boot) + open_s * 1000 + 500 - now_ms
