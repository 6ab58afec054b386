"""Who reads what, decided by the broker: 400 share of a client, 401 set, 402 show who pops; and by
which filter (`admit`).

Only push consumers with clientRebalance=false ask (spec/grpc.md §8); the others balance by
themselves. The queues are those of all brokers of the topic, so the name servers are asked, once
for all who want to know within loadBalancePollNameServerInterval; without name servers the topic is
this broker's alone.

    broadcasting              all queues
    PULL                      the client's share by its strategy, AVG or AVG_BY_CIRCLE
    POP                       all queues of each broker, as queue -1: members pop what is there
    POP, sharing n queues     its own share and those of the n members after it; a member of more
                              than there are queues gets one of them

No answer to keep what one has is no set at all; an empty set takes everything away. There is none
when the topic is not known, nobody of the group is online, or the strategy is another one.

A pop passes over what its filter does not want, for all members of the group; in RocketMQ the
others lose it unseen. Here the filter of the first pop of a topic holds as long as another member,
who is online, or whom a strict group waits for, subscribes to that. Who asks for another one is
refused, and told why.

How a group reads a topic is what 401 has set (`config/messageRequestMode.json`, RocketMQ's), else
defaultMessageRequestMode; retry topics are always pulled.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.contracts import STRICT
from sluicemq.broker.context import LookUp
from sluicemq.broker.documents import Document
from sluicemq.broker.group_commit import Announced, Postponed
from sluicemq.broker.lanes.rules import normal_atom, parse_key
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.files import Files
from sluicemq.model.subscription import ALL, TAG
from sluicemq.model.topic import (
    RETRY_PREFIX,
    MessageQueue,
    QueueData,
    Strategy,
    TopicRoute,
    allocate_average,
    allocate_circle,
    read_queues,
)
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.work.background import WorkItem
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.tables import POP, PULL, RequestMode

ANY_QUEUE: Final = -1
STRATEGIES: Final[dict[str, Strategy]] = {
    "AVG": allocate_average, "AVG_BY_CIRCLE": allocate_circle,
}  # fmt: skip

Queues = Sequence[MessageQueue]


def share(
    strategy: Strategy, client_id: str, queues: Queues, members: Sequence[str], mode: RequestMode
) -> Queues | None:
    """The queues of one member; [] for a stranger, None when there is nothing to share.

    >>> two = [MessageQueue("T", "b", 0), MessageQueue("T", "b", 1)]
    >>> mode = RequestMode(topic="T", group="G", mode=POP, share_queues=1)
    >>> [queue.queue_id for queue in share(allocate_average, "b", two, ["a", "b", "c"], mode) or ()]
    [1]
    """
    count = mode.share_queues
    if mode.mode == POP and not 0 < count < len(members) - 1:
        return sorted({queue._replace(queue_id=ANY_QUEUE) for queue in queues})
    if not queues:
        return None
    if mode.mode != POP:
        return strategy(client_id, queues, members)
    ids = sorted(members)
    if client_id not in ids:
        return []
    index = ids.index(client_id)
    if len(ids) > len(queues):
        return [sorted(queues)[index % len(queues)]]
    near = [ids[(index + step) % len(ids)] for step in range(count + 1)]
    return sorted({queue for one in near for queue in strategy(one, queues, members)})


class Assignments:
    """The request family of shares."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        groups: Groups,
        consumers: Consumers,
        files: Files,
        clock: Clock,
        look_up: LookUp,
    ) -> None:
        self._settings, self._topics, self._groups = settings, topics, groups
        self._consumers, self._clock, self._look_up = consumers, clock, look_up
        self._modes: dict[str, dict[str, RequestMode]] = {}
        self._known: dict[str, tuple[float, Queues]] = {}
        """Topic -> when a name server was asked (s), and its queues."""
        self._waiting: dict[str, list[Callable[[Queues | None], None]]] = {}
        self.document = Document(
            files,
            f"{settings.store.root}/config/messageRequestMode.json",
            lambda: tables.encode_request_modes_file(self._modes),
        )

    def load(self) -> None:
        """Raises StoreDamagedError."""
        self._modes = self.document.load(tables.decode_request_modes) or {}

    # ----------------------------------------------------------------------------- by which filter

    def admit(
        self, group: str, topic: str, kind: str | None, expression: str | None, peer: Peer
    ) -> None:
        """May somebody pop a topic through this filter? HOT. Raises RequestError."""
        contracts, said = self._consumers.contracts, (kind or TAG, expression or ALL)
        known = contracts.pop_filters.get((group, topic))
        if known == said and group in contracts.popping_groups:
            return
        client_id = self._consumers.client_name(group, peer)
        why = (
            contracts.refusal_reason(group, peer, client_id)
            if contracts.contract_of(group) == STRICT
            else ""
        )
        lanes = self._consumers.lanes.table.get(group)
        if lanes is not None and lanes.is_pulled(topic):
            why = (
                f"group {group} pulls {topic} in lanes, since its members subscribe to different "
                f"things, and {client_id} pops it. Give it another group."
            )
        held = normal_atom(*known) if known is not None else None
        if not why and held is not None and held != normal_atom(*said):
            for other, key in self._consumers.other_subscription_keys(group, client_id).items():
                if parse_key(key).get(topic) == held:
                    why = (
                        f"group {group} pops {topic} by {held.kind} {held.text!r}, to which "
                        f"{other} subscribes, and {client_id} asks for {said[0]} {said[1]!r}: what "
                        "one of the two does not want would be lost for the other. Give it another "
                        "group, or the same subscription."
                    )
        if why:
            contracts.record_refusal(group, client_id, why, peer)
            raise RequestError(ResponseCode.NO_PERMISSION, why)
        contracts.refusals.pop((group, client_id), None)
        self._consumers.end_lanes(group)
        contracts.popping_groups.add(group)
        contracts.pop_filters[group, topic] = said

    # ----------------------------------------------------------------------------- who reads what

    def query(self, command: Command, peer: Peer) -> Command | None:
        """400. Answered later when the name servers have to be asked."""
        asked = bodies.decode_assignment_query(command.body)
        now_s = self._clock.monotonic_s()
        if not self._settings.broker.name_server_addresses:
            return self._answer(asked, self._own_queues(asked.topic), command, peer)
        asked_s, queues = self._known.get(asked.topic, (0.0, ()))
        if queues and now_s - asked_s < self._settings.broker.route_period_ms / 1000:
            return self._answer(asked, queues, command, peer)

        def found(queues: Queues | None) -> None:
            peer.write(encode_response_to(self._answer(asked, queues, command, peer), command))

        waiting = self._waiting.setdefault(asked.topic, [])
        waiting.append(found)
        if len(waiting) == 1:
            self._look_up(asked.topic, lambda answer: self._found(asked.topic, answer))
        return None

    def _own_queues(self, topic: str) -> Queues | None:
        config = self._topics.config_of(topic)
        if config is None:
            return None
        data = QueueData(
            self._settings.broker.broker_name, config.read_queues, config.write_queues, config.perm
        )
        return read_queues(topic, TopicRoute((), (data,)))

    def _found(self, topic: str, answer: Command | None) -> None:
        """The name server's answer; without one what is known goes on."""
        if answer is not None and answer.code == ResponseCode.TOPIC_NOT_EXIST:
            self._known.pop(topic, None)
        elif answer is not None and answer.code == ResponseCode.SUCCESS:
            with suppress(ProtocolError):
                queues = read_queues(topic, bodies.decode_topic_route(answer.body))
                self._known[topic] = self._clock.monotonic_s(), queues
        known = self._known.get(topic)
        for found in self._waiting.pop(topic, ()):
            found(known and known[1])

    def _answer(
        self, asked: bodies.AssignmentQuery, queues: Queues | None, command: Command, peer: Peer
    ) -> Command:
        mode = self._mode(asked.topic, asked.group)
        found = queues
        if asked.message_model != bodies.BROADCASTING and self._settings.broker.server_balances:
            members = self._consumers.client_ids_sharing_queues(asked.group, peer, command.fields)
            strategy = STRATEGIES.get(asked.strategy)
            if queues is None or not members or strategy is None:
                found = None
            else:
                found = share(strategy, asked.client_id, queues, members, mode)
        rows = None
        if found is not None:
            rows = tuple(bodies.Assignment(queue=queue, mode=mode.mode) for queue in found)
        body = bodies.encode_assignments(bodies.AssignmentResponse(assignments=rows))
        return Command(ResponseCode.SUCCESS, body=body)

    # ----------------------------------------------------------------------------------- who pops

    def _mode(self, topic: str, group: str) -> RequestMode:
        broker = self._settings.broker
        is_retry = topic.startswith(RETRY_PREFIX)
        return self._modes.get(topic, {}).get(group) or RequestMode(
            topic=topic,
            group=group,
            mode=PULL if is_retry else broker.request_mode,
            share_queues=broker.pop_share_queues,
        )

    def set_mode(self, command: Command, peer: Peer) -> Postponed:
        """401. Answered when it is on disk, and on those of the slaves that count."""
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

        def steps() -> WorkItem[Announced]:
            write = self.document.prepare_write()
            if write is not None:
                yield write
            return Announced(Command(ResponseCode.SUCCESS))

        return Postponed(steps())

    def modes(self, command: Command, peer: Peer) -> Command:
        """402."""
        return Command(ResponseCode.SUCCESS, body=tables.encode_request_modes(self._modes))
