"""Questions that a broker passes on to its clients: 223 (as 221), 307, 309, and replies (326).

A tool asks the broker, the broker asks the client on the connection of its heartbeats, and the
answer goes back as it came. Nobody waits for it: a `Relays` keeps what is open, by deadline, and
`expire` (from the sweep) and `disconnected` end what will not be answered.

Request and reply: 324 and 325, pushed on to the requester as 326 (spec/remoting.md §18).

A requester sends an ordinary message that names itself (REPLY_TO_CLIENT) and the request
(CORRELATION_ID). Who consumes it sends the reply here, to the topic CLUSTER_REPLY_TOPIC; the broker
stores it (storeReplyMessageEnable) and hands it to the requester on the connection of its
heartbeats, found by its client id among the producers. Only the push decides how the replier is
answered: 0 when the requester has taken it, else 1 and why. Nobody consumes the topic: a reply
whose requester is gone is of use to nobody but who looks for it.
"""

import heapq
import logging
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from sluicemq.broker.consume.clients import ConsumerGroup, Consumers, Member, Producers
from sluicemq.broker.groups import Groups
from sluicemq.broker.produce.intake import Draft, Intake, Stored
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, RequestError, StoreError
from sluicemq.model.ids import Host, encode_host, offset_message_id, parse_offset_message_id
from sluicemq.model.topic import MessageQueue
from sluicemq.net.dispatch import finish_answer
from sluicemq.net.peer import Peer
from sluicemq.record import property_text as text
from sluicemq.store.store import Store
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    ConsumeMessageDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    ReplyMessageRequest,
    SendMessageRequest,
    SendMessageRequestV2,
)

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0  # spec/remoting.md §7.6
RUNNING_INFO_SINCE: Final = 62  # V3_1_8_SNAPSHOT, spec/remoting.md §4
OPEN_MAX: Final = 4096

OnEnd = Callable[[Command | None], None]
"""Gets the answer, None when there will be none."""


class _Open:
    __slots__ = ("is_done", "number", "on_end", "peer")

    def __init__(self, peer: Peer, on_end: OnEnd) -> None:
        self.peer = peer
        self.on_end = on_end
        self.is_done = False
        self.number = -1

    def end(self, answer: Command | None) -> None:
        if not self.is_done:
            self.is_done = True
            self.peer.give_up(self.number)
            self.on_end(answer)


class Questions:
    """What clients were asked and have not answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[Peer, set[_Open]] = {}
        self._deadlines: list[tuple[float, int, _Open]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def ask(
        self, peer: Peer, command: Command, on_end: OnEnd, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Asks a client; `on_end` is called once, perhaps at once."""
        if peer.closed or len(self._deadlines) >= OPEN_MAX:
            on_end(None)
            return
        entry = _Open(peer, on_end)
        self._open.setdefault(peer, set()).add(entry)
        deadline_s = self._clock.monotonic_s() + timeout_s
        heapq.heappush(self._deadlines, (deadline_s, next(self._numbers), entry))

        def answered(answer: Command) -> None:
            self._forget(entry)
            entry.end(answer)

        entry.number = peer.ask(command, answered)

    def expire(self, now_s: float) -> None:
        """Ends what was not answered in time."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_s or deadlines[0][2].is_done):
            entry = heapq.heappop(deadlines)[2]
            self._forget(entry)
            entry.end(None)

    def disconnected(self, peer: Peer) -> None:
        """It will not answer any more."""
        for entry in self._open.pop(peer, ()):
            entry.end(None)

    def _forget(self, entry: _Open) -> None:
        mine = self._open.get(entry.peer)
        if mine is not None:
            mine.discard(entry)
            if not mine:
                del self._open[entry.peer]


class Relays:
    """The request family of tools that look into consumers."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        groups: Groups,
        consumers: Consumers,
        store: Store,
        questions: Questions,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._store = store
        self._questions = questions

    def running_info(self, command: Command, peer: Peer) -> Command | None:
        """307: what does a consumer do?"""
        header = decode_header(GetConsumerRunningInfoRequest, command.fields)
        member = self._member(header.group, header.client_id)
        if member is None:
            return _not_online(header.group, header.client_id)
        if member.version < RUNNING_INFO_SINCE:
            return Command(
                ResponseCode.SYSTEM_ERROR,
                remark=f"The Consumer <{header.client_id}> Version <{member.version}> too low to "
                "finish, please upgrade it to V3_1_8_SNAPSHOT",
            )
        request = Command(command.code, dict(command.fields or {}))
        self._relay(member, request, command, peer, header.group)
        return None

    def consume_directly(self, command: Command, peer: Peer) -> Command | None:
        """309: handle this message now. The stored message travels as the body; a tool may bring it
        itself. Without a client any member will do."""
        header = decode_header(ConsumeMessageDirectlyRequest, command.fields)
        member = self._member(header.group, header.client_id)
        if member is None:
            return _not_online(header.group, header.client_id or "any")
        body = bytes(command.body)
        if header.message_id:
            found = self._record(header.message_id)
            if found is None:
                return Command(
                    ResponseCode.SYSTEM_ERROR,
                    remark=f"no message of this broker begins where {header.message_id} says",
                )
            body = found
        fields = dict(command.fields or {})
        topic = self._topics.get(header.topic or "")
        group = self._groups.table.get(header.group)
        fields["brokerName"] = self._settings.broker.broker_name
        fields["topicSysFlag"] = str(topic.config.sys_flag if topic is not None else 0)
        fields["groupSysFlag"] = str(group.sys_flag if group is not None else 0)
        request = Command(command.code, fields, body)
        self._relay(member, request, command, peer, header.group)
        return None

    def _record(self, message_id: str) -> bytes | None:
        try:
            return self._store.reader.record_at(parse_offset_message_id(message_id)[1])
        except ProtocolError:
            return None

    def consumer_status(self, command: Command, peer: Peer) -> Command | None:
        """223: how far does each member think it is? Those that do not answer are left out."""
        header = decode_header(GetConsumerStatusRequest, command.fields)
        group = self._consumers.groups.get(header.group)
        wanted = header.client_address
        members = [
            member
            for member in (group.members.values() if group is not None else ())
            if not wanted or wanted == member.client_id
        ]
        if not members:
            return Command(
                ResponseCode.CONSUMER_NOT_ONLINE if group is None else ResponseCode.SYSTEM_ERROR,
                remark=f"No Any Consumer online in the consumer group: [{header.group}]",
            )
        _Statuses(command, peer, len(members)).ask_all(self._questions, members, header)
        return None

    # ---

    def _member(self, group: str, client_id: str | None) -> Member | None:
        found: ConsumerGroup | None = self._consumers.groups.get(group)
        for member in found.members.values() if found is not None else ():
            if not member.peer.closed and client_id in (None, "", member.client_id):
                return member
        return None

    def _relay(
        self, member: Member, request: Command, command: Command, peer: Peer, group: str
    ) -> None:
        def ended(answer: Command | None) -> None:
            if answer is None:
                answer = Command(
                    ResponseCode.CONSUME_MSG_TIMEOUT,
                    remark=f"The consumer <{group}> <{member.client_id}> did not answer request "
                    f"{command.code} within {TIMEOUT_S:g} s, or has left",
                )
            relayed = Command(answer.code, answer.fields, answer.body, remark=answer.remark)
            peer.write(finish_answer(relayed, command))

        self._questions.ask(member.peer, request, ended)


class _Statuses:
    """The answers to one 223 as they come in."""

    def __init__(self, command: Command, peer: Peer, open_count: int) -> None:
        self._command = command
        self._peer = peer
        self._open = open_count
        self._found: dict[str, dict[MessageQueue, int]] = {}

    def ask_all(
        self, questions: Questions, members: list[Member], header: GetConsumerStatusRequest
    ) -> None:
        for member in members:
            fields = encode_header(GetConsumerStatusRequest(topic=header.topic, group=header.group))
            request = Command(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, fields)
            questions.ask(member.peer, request, self._noting(member.client_id))

    def _noting(self, client_id: str) -> OnEnd:
        def ended(answer: Command | None) -> None:
            self._open -= 1
            if answer is not None and answer.code == ResponseCode.SUCCESS:
                try:
                    self._found[client_id] = bodies.decode_client_offsets(answer.body)
                except ProtocolError as error:
                    log.warning("client %s answers 221 oddly: %s", client_id, error)
            if not self._open:
                body = bodies.encode_offsets_by_client(self._found)
                whole = Command(ResponseCode.SUCCESS, body=body)
                self._peer.write(finish_answer(whole, self._command))

        return ended


def _not_online(group: str, client_id: str) -> Command:
    return Command(
        ResponseCode.SYSTEM_ERROR, remark=f"The Consumer <{group}> <{client_id}> not online"
    )


REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"


class Replies:
    """The request family of repliers."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        producers: Producers,
        intake: Intake,
        questions: Questions,
        clock: Clock,
        host: Host,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._producers = producers
        self._intake = intake
        self._questions = questions
        self._clock = clock
        self.pushed = 0
        self.failed = 0
        self.move(host)

    def move(self, host: Host) -> None:
        """The host that stands in records and message ids is this one."""
        self._host = host
        self._host_bytes = encode_host(host)

    def reply_long(self, command: Command, peer: Peer) -> Command | None:
        """324: long names. The Go client sends it without a body, which is an empty reply here."""
        return self._reply(decode_header(SendMessageRequest, command.fields), command, peer)

    def reply_letters(self, command: Command, peer: Peer) -> Command | None:
        """325."""
        return self._reply(decode_header(SendMessageRequestV2, command.fields), command, peer)

    def _reply(self, header: SendMessageRequest, command: Command, peer: Peer) -> Command | None:
        config = self._settings.broker
        fields = {"TRACE_ON": "true" if config.trace_on else "false", "MSG_REGION": config.region}
        topic = self._topics.get(header.topic)
        if topic is None or not 0 <= header.queue_id < topic.queues:
            return Command(
                ResponseCode.TOPIC_NOT_EXIST if topic is None else ResponseCode.INVALID_PARAMETER,
                fields,
                remark=f"a reply cannot go to queue {header.queue_id} of topic {header.topic}: it "
                f"belongs to {config.cluster_name}_REPLY_TOPIC",
            )
        properties = text.as_dict(header.properties or "")
        properties.setdefault("MSG_REGION", config.region)
        properties.setdefault("TRACE_ON", fields["TRACE_ON"])
        try:
            fields |= self._store(header, command, peer, properties)
        except (RequestError, StoreError, OSError) as error:
            code = error.code if isinstance(error, RequestError) else ResponseCode.SYSTEM_ERROR
            return Command(code, fields, remark=str(error))
        return self._push(header, command, peer, properties, fields)

    def _store(
        self, header: SendMessageRequest, command: Command, peer: Peer, properties: dict[str, str]
    ) -> dict[str, str]:
        """What the answer says of where it lies; nothing when replies are not stored."""
        if not self._settings.broker.store_replies:
            return {}
        draft = Draft(
            header.topic, header.queue_id, command.body, dict(properties), header.born_time_ms,
            peer.remote_bytes, self._host_bytes, header.flag, header.sys_flag,
        )  # fmt: skip
        stored: Stored = self._intake.put(draft)
        return {
            "msgId": offset_message_id(self._host_bytes, stored.physical_offset),
            "queueId": str(header.queue_id),
            "queueOffset": str(stored.queue_offset),
        }

    def _push(
        self,
        header: SendMessageRequest,
        command: Command,
        peer: Peer,
        properties: dict[str, str],
        fields: dict[str, str],
    ) -> Command | None:
        client_id = properties.get(REPLY_TO_CLIENT, "")
        requester = self._producers.find(client_id)
        if requester is None:
            self.failed += 1
            return Command(
                ResponseCode.SYSTEM_ERROR,
                fields,
                remark=f"push reply message fail, channel of <{client_id}> not found.",
            )
        request = self._pushed(header, bytes(command.body), peer, properties)

        def ended(answer: Command | None) -> None:
            if answer is not None and answer.code == ResponseCode.SUCCESS:
                self.pushed += 1
                made = Command(ResponseCode.SUCCESS, fields)
            else:
                self.failed += 1
                why = "no answer" if answer is None else f"{answer.code} {answer.remark}"
                remark = f"push reply message to {client_id} fail: {why}"
                made = Command(ResponseCode.SYSTEM_ERROR, fields, remark=remark)
            if not command.is_oneway:
                peer.write(finish_answer(made, command))

        self._questions.ask(requester, request, ended)
        return None

    def _pushed(
        self, header: SendMessageRequest, body: bytes, peer: Peer, properties: dict[str, str]
    ) -> Command:
        """326."""
        now_ms = self._clock.now_ms()
        values: dict[str, Any] = {
            "group": header.group,
            "topic": header.topic,
            "default_topic": header.default_topic,
            "default_topic_queues": header.default_topic_queues,
            "queue_id": header.queue_id,
            "sys_flag": header.sys_flag,
            "born_time_ms": header.born_time_ms,
            "flag": header.flag,
            "properties": text.as_text({PUSH_REPLY_TIME: str(now_ms), **properties}),
            "reconsume_times": header.reconsume_times or 0,
            "unit_mode": bool(header.unit_mode),
            "born_host": str(peer.remote),
            "store_host": str(self._host),
            "store_time_ms": now_ms,
        }
        fields = encode_header(ReplyMessageRequest(**values))
        return Command(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, fields, body)
