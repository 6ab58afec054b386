"""Assignments of queues to the members of a group that the broker decides.

`Assignments` answers QUERY_ASSIGNMENT (400), SET_MESSAGE_REQUEST_MODE (401) and
GET_ALL_MESSAGE_REQUEST_MODE (402), and decides by which filter a group may pop (`admit_pop`).

Only push consumers with clientRebalance=false ask for their assignment (spec/grpc.md §8). The
others rebalance by themselves. The queues are those of all brokers of the topic, so the broker asks
the name servers. It asks once for all clients that need the answer within
loadBalancePollNameServerInterval. Without name servers, the topic has only this broker's queues.

A client gets these queues:

    broadcasting              all queues
    PULL                      the client's share by its strategy, AVG or AVG_BY_CIRCLE
    POP                       all queues of each broker, as queue -1: members pop from all of them
    POP, sharing n queues     its own share and those of the n members after it. If there are more
                              members than queues, each member gets one queue

An answer without a set means that the client keeps its assignments. It is sent if the topic does
not exist, if no member of the group is connected, or if the strategy is unknown. An empty set
removes all assignments.

A pop skips the messages that its filter rejects, for all members of the group. In RocketMQ, members
with different filters so lose each other's messages. Here the filter of the first pop of a topic is
valid while another member subscribes to it that is connected, or that a strict group waits for. A
pop with another filter is refused with an error.

SET_MESSAGE_REQUEST_MODE decides whether a group pulls or pops a topic. The modes are saved in
RocketMQ's file `config/messageRequestMode.json`. The default is defaultMessageRequestMode; retry
topics are always pulled.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.contracts import STRICT
from sluicemq.broker.context import BrokerContext, LookUp
from sluicemq.broker.documents import Document
from sluicemq.broker.group_commit import Announced, Postponed
from sluicemq.broker.lanes.rules import normalize_atom, parse_key
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.model.subscription import ALL, TAG
from sluicemq.model.topic import (
    RETRY_PREFIX,
    MessageQueue,
    QueueData,
    Strategy,
    TopicRoute,
    allocate_average,
    allocate_circle,
    readable_queues,
)
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.work.background import WorkItem
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.tables import POP, PULL, RequestMode

ANY_QUEUE: Final = -1
"""The queue id in an assignment that means all queues of a broker."""
STRATEGIES: Final[dict[str, Strategy]] = {
    "AVG": allocate_average,
    "AVG_BY_CIRCLE": allocate_circle,
}
"""The function for each strategy that a client may name."""

Queues = Sequence[MessageQueue]


def allocate_queues(
    strategy: Strategy, client_id: str, queues: Queues, members: Sequence[str], mode: RequestMode
) -> Queues | None:
    """Return the queues that the member `client_id` of a group reads.

    `queues` are all queues of the topic, and `members` are the client ids of the group. `mode` says
    whether the group pulls or pops, and how many members that pop share a queue. `strategy`
    distributes queues over members. If each member pops all queues, the result has one queue with
    the id ANY_QUEUE for each broker. Otherwise return None if `queues` is empty, and [] if
    `client_id` is not a member.

    >>> two = [MessageQueue("T", "b", 0), MessageQueue("T", "b", 1)]
    >>> mode = RequestMode(topic="T", group="G", mode=POP, share_queues=1)
    >>> allocated = allocate_queues(allocate_average, "b", two, ["a", "b", "c"], mode)
    >>> [queue.queue_id for queue in allocated or ()]
    [1]
    """
    # With n shared queues, a member also pops the shares of the n members after it. That is
    # everything if there are no more other members than that. 0 means that all pop all queues.
    sharing_count = mode.share_queues
    pops_all_queues = mode.mode == POP and not 0 < sharing_count < len(members) - 1
    if pops_all_queues:
        return sorted({queue._replace(queue_id=ANY_QUEUE) for queue in queues})
    if not queues:
        return None
    if mode.mode != POP:
        return strategy(client_id, queues, members)

    ordered_ids = sorted(members)
    if client_id not in ordered_ids:
        return []
    index = ordered_ids.index(client_id)
    if len(ordered_ids) > len(queues):
        return [sorted(queues)[index % len(queues)]]

    # The member's own share, and those of the members after it.
    popped_queues: set[MessageQueue] = set()
    for distance in range(sharing_count + 1):
        sharing_id = ordered_ids[(index + distance) % len(ordered_ids)]
        popped_queues.update(strategy(sharing_id, queues, members))
    return sorted(popped_queues)


class Assignments:
    """Decides which member of a group reads which queues, and by which filter a group pops."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        consumers: Consumers,
        look_up: LookUp,
    ) -> None:
        """Create the handlers, and an empty table of the modes (pull or pop) that tools have set.

        `load` reads the table from its file. `look_up(topic, on_response)` asks a name server for
        the route of a topic, and calls `on_response` with its response, or with None if no name
        server answers.
        """
        settings = context.settings
        self._settings = settings
        self._topics = context.topics
        self._groups = context.groups
        self._consumers = consumers
        self._clock = context.clock
        self._look_up_route = look_up
        self._modes: dict[str, dict[str, RequestMode]] = {}
        """By topic and group: the modes that were set."""
        self._routes: dict[str, tuple[float, Queues]] = {}
        """By topic: the monotonic time of a name server's answer in seconds, and the queues."""
        self._waiting: dict[str, list[Callable[[Queues | None], None]]] = {}
        """By topic: functions to call with the queues when a name server has answered."""
        self.document = Document(
            context.files,
            f"{settings.store.root}/config/messageRequestMode.json",
            lambda: tables.encode_request_modes_file(self._modes),
        )

    def load(self) -> None:
        """Load the file. Raises StoreDamagedError if it cannot be parsed."""
        self._modes = self.document.load(tables.decode_request_modes) or {}

    # ---------------------------------------------------------------------------- pops by filter

    def admit_pop(
        self, group: str, topic: str, filter_kind: str | None, expression: str | None, peer: Peer
    ) -> None:
        """Raise RequestError (NO_PERMISSION) if the group may not pop the topic with this filter.

        `filter_kind` and `expression` are the filter of the pop. None means the kind TAG and all
        messages. The pop is refused in three cases:

        - The group is strict, and refuses the client.
        - Members of the group pull the topic in lanes, because their subscriptions differ.
        - The filter differs from that of earlier pops, and another member subscribes with that one.

        A refusal is recorded for tools. If the pop is admitted, its filter is remembered for the
        group and topic, the lanes of the group end, and the group counts as popping. Called for
        each pop: keep it cheap.
        """
        contracts = self._consumers.contracts
        requested_filter = filter_kind or TAG, expression or ALL
        current_filter = contracts.pop_filters.get((group, topic))
        if current_filter == requested_filter and group in contracts.popping_groups:
            return

        client_id = self._consumers.client_name(group, peer)
        refusal_reason = self._find_refusal_reason(group, topic, requested_filter, peer, client_id)
        if refusal_reason:
            contracts.record_refusal(group, client_id, refusal_reason, peer)
            raise RequestError(ResponseCode.NO_PERMISSION, refusal_reason)

        contracts.refusals.pop((group, client_id), None)
        self._consumers.end_lanes(group)
        contracts.popping_groups.add(group)
        contracts.pop_filters[group, topic] = requested_filter

    def _find_refusal_reason(
        self,
        group: str,
        topic: str,
        requested_filter: tuple[str, str],
        peer: Peer,
        client_id: str,
    ) -> str:
        """Return a sentence that says why a client may not pop a topic, or "" if it may.

        `requested_filter` is (kind, expression) of the pop's filter. The cases are those of
        `admit_pop`.
        """
        # The members of the group pull the topic in lanes (see `lanes/group.py`).
        lanes = self._consumers.lanes.table.get(group)
        if lanes is not None and lanes.is_pulled(topic):
            return (
                f"Group {group} pulls {topic} in lanes, because its members have different "
                f"subscriptions, so {client_id} cannot pop it. Use another group for it."
            )

        # The group is strict and refuses the client.
        contracts = self._consumers.contracts
        if contracts.contract_of(group) == STRICT:
            strict_reason = contracts.refusal_reason(group, peer, client_id)
            if strict_reason:
                return strict_reason

        return self._find_filter_conflict(group, topic, requested_filter, client_id)

    def _find_filter_conflict(
        self, group: str, topic: str, requested_filter: tuple[str, str], client_id: str
    ) -> str:
        """Return a sentence that says why a pop's filter conflicts with earlier pops of the group.

        There is a conflict if the filter differs from that of earlier pops, and another member
        still subscribes to the topic with that one. Return "" if there is none.
        """
        current_filter = self._consumers.contracts.pop_filters.get((group, topic))
        if current_filter is None:
            return ""
        current_atom = normalize_atom(*current_filter)
        if current_atom == normalize_atom(*requested_filter):
            return ""
        other_keys = self._consumers.other_subscription_keys(group, client_id)
        subscribers = [
            other_id
            for other_id, other_key in other_keys.items()
            if parse_key(other_key).get(topic) == current_atom
        ]
        if not subscribers:
            return ""
        requested_kind, requested_expression = requested_filter
        return (
            f"Group {group} pops {topic} by {current_atom.kind} "
            f"{current_atom.text!r}, to which {subscribers[-1]} subscribes, but {client_id} asks "
            f"for {requested_kind} {requested_expression!r}. Each of them would lose "
            "the messages that only the other one's filter rejects. Use another group, or "
            "the same subscription."
        )

    # -------------------------------------------------------------------------------- assignments

    def query_assignment(self, command: Command, peer: Peer) -> Command | None:
        """Answer QUERY_ASSIGNMENT (400) with the queues of one client.

        If a name server has to be asked first, return None; the response is written to `peer` when
        the name server has answered.
        """
        query = bodies.decode_assignment_query(command.body)
        topic = query.topic
        if not self._settings.broker.name_server_addresses:
            queues = self._find_local_queues(topic)
            return self._encode_answer(query, queues, command, peer)
        cached_queues = self._find_cached_queues(topic)
        if cached_queues:
            return self._encode_answer(query, cached_queues, command, peer)

        def answer(queues: Queues | None) -> None:
            response = self._encode_answer(query, queues, command, peer)
            peer.write(encode_response_to(response, command))

        # One look-up answers all queries for the topic that arrive meanwhile.
        waiting_answers = self._waiting.setdefault(topic, [])
        waiting_answers.append(answer)
        if len(waiting_answers) == 1:
            self._look_up_route(topic, lambda response: self._handle_route(topic, response))
        return None

    def _find_cached_queues(self, topic: str) -> Queues:
        """Return the queues of a topic that a name server has named recently, or () if none has."""
        answered_s, queues = self._routes.get(topic, (0.0, ()))
        age_s = self._clock.monotonic_s() - answered_s
        is_recent = age_s < self._settings.broker.route_period_ms / 1000
        return queues if is_recent else ()

    def _find_local_queues(self, topic: str) -> Queues | None:
        """Return the queues that this broker has of a topic; None if the topic does not exist."""
        config = self._topics.config_of(topic)
        if config is None:
            return None
        queue_data = QueueData(
            self._settings.broker.broker_name, config.read_queues, config.write_queues, config.perm
        )
        return readable_queues(topic, TopicRoute((), (queue_data,)))

    def _handle_route(self, topic: str, response: Command | None) -> None:
        """Remember the route of a topic, and answer the queries that wait for it.

        `response` is the response of a name server, or None if none answered. If it is None, an
        error or malformed, the last known route is used. If it says that the topic does not exist,
        the route is forgotten, and the queries are answered without queues.
        """
        if response is not None and response.code == ResponseCode.TOPIC_NOT_EXIST:
            self._routes.pop(topic, None)
        elif response is not None and response.code == ResponseCode.SUCCESS:
            with suppress(ProtocolError):
                queues = readable_queues(topic, bodies.decode_topic_route(response.body))
                self._routes[topic] = self._clock.monotonic_s(), queues

        queues_or_none: Queues | None = None
        if topic in self._routes:
            _, queues_or_none = self._routes[topic]
        for answer in self._waiting.pop(topic, ()):
            answer(queues_or_none)

    def _encode_answer(
        self, query: bodies.AssignmentQuery, queues: Queues | None, command: Command, peer: Peer
    ) -> Command:
        """Return the response to QUERY_ASSIGNMENT (400) with the queues that the client reads.

        `queues` are all queues of the topic, or None if the topic is unknown. The client gets its
        share of them. It gets all of them if it is broadcasting, or if the broker is set not to
        balance. If the topic or the strategy is unknown, or no member of the group is connected,
        the response has no field for queues, and the client keeps the queues that it has.
        """
        mode = self._find_mode(query.topic, query.group)
        is_broadcasting = query.message_model == bodies.BROADCASTING
        if is_broadcasting or not self._settings.broker.server_balances:
            return _encode_assignments(queues, mode)

        # Find the client's share.
        members = self._consumers.client_ids_sharing_queues(query.group, peer, command.fields)
        strategy = STRATEGIES.get(query.strategy)
        if queues is None or not members or strategy is None:
            return _encode_assignments(None, mode)
        share = allocate_queues(strategy, query.client_id, queues, members, mode)
        return _encode_assignments(share, mode)

    # -------------------------------------------------------------------------------------- modes

    def _find_mode(self, topic: str, group: str) -> RequestMode:
        """Return how the group reads the topic: the mode that a tool has set, or the default.

        The default of a retry topic is PULL. The default of other topics is a broker setting.
        """
        mode_that_was_set = self._modes.get(topic, {}).get(group)
        if mode_that_was_set is not None:
            return mode_that_was_set
        broker = self._settings.broker
        is_retry = topic.startswith(RETRY_PREFIX)
        return RequestMode(
            topic=topic,
            group=group,
            mode=PULL if is_retry else broker.request_mode,
            share_queues=broker.pop_share_queues,
        )

    def set_mode(self, command: Command, peer: Peer) -> Postponed:
        """Set whether a group pulls or pops a topic: answer SET_MESSAGE_REQUEST_MODE (401).

        The new mode is used at once. The response is sent when it is on disk, and when the slaves
        that must have it have it. A missing group is created if that is allowed. Raises
        RequestError for a retry topic, and for an unknown mode, topic or group.
        """
        mode = tables.decode_request_mode(command.body)
        if mode.topic.startswith(RETRY_PREFIX):
            raise RequestError(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        if mode.mode not in (PULL, POP):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER, f"the mode {mode.mode[:20]} is not PULL or POP"
            )
        self._topics.require(mode.topic)
        if self._groups.get_or_create(mode.group) is None:
            self._groups.check_exists(mode.group)
        self._modes.setdefault(mode.topic, {})[mode.group] = mode
        self.document.changed = True

        def write_and_answer() -> WorkItem[Announced]:
            write_file = self.document.prepare_write()
            if write_file is not None:
                yield write_file  # run on another thread
            return Announced(Command(ResponseCode.SUCCESS))

        return Postponed(write_and_answer())

    def list_modes(self, command: Command, peer: Peer) -> Command:
        """Answer GET_ALL_MESSAGE_REQUEST_MODE (402) with all modes that were set."""
        return Command(ResponseCode.SUCCESS, body=tables.encode_request_modes(self._modes))


def _encode_assignments(queues: Queues | None, mode: RequestMode) -> Command:
    """Return the response that assigns `queues` to a client, which reads them as `mode` says.

    If `queues` is None, the response has no field for queues, and the client keeps those it has.
    """
    assignments = None
    if queues is not None:
        assignments = tuple(bodies.Assignment(queue=queue, mode=mode.mode) for queue in queues)
    body = bodies.encode_assignments(bodies.AssignmentResponse(assignments=assignments))
    return Command(ResponseCode.SUCCESS, body=body)
