"""What a broker asks its clients: questions of tools (223 as 221, 307, 309), replies (326).

A tool asks the broker, the broker asks the client on the connection of its heartbeats, and the
answer goes back as it came. Nobody waits for it: `Questions` keeps what is open, by deadline, and
`expire` (from the sweep) and `disconnected` end what will not be answered.

Request and reply are 324 and 325, pushed on to the requester as 326 (spec/remoting.md §18). A
requester sends an ordinary message that names itself (REPLY_TO_CLIENT) and the request
(CORRELATION_ID). Who consumes it sends the reply here, to the topic CLUSTER_REPLY_TOPIC; the broker
stores it (storeReplyMessageEnable) and hands it to the requester on the connection of its
heartbeats, found by its client id among the producers. Only the push decides how the replier is
answered: 0 when the requester has taken it, else 1 and why. Nobody consumes the topic: a reply
whose requester is gone is of use to nobody but who looks for it.
"""

import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

from sluicemq.broker.consume.clients import Consumers, Member, Producers
from sluicemq.broker.produce.intake import Draft, Intake
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, RequestError, StoreError
from sluicemq.model.ids import offset_message_id, parse_offset_message_id
from sluicemq.model.properties import remove_on_send
from sluicemq.model.topic import MessageQueue
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.record import codec as text
from sluicemq.store.store import Store
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    ConsumeMessageDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    ReplyMessageRequest,
    SendMessageRequest,
)

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0  # spec/remoting.md §7.6
RUNNING_INFO_SINCE: Final = 62  # V3_1_8_SNAPSHOT, spec/remoting.md §4
OPEN_MAX: Final = 4096
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"

OnEnd = Callable[[Command | None], None]
"""Gets the answer, None when there will be none."""


class Questions:
    """What clients were asked and have not answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[Peer, dict[int, OnEnd]] = {}
        self._deadlines: list[tuple[float, int, Peer, int]] = []
        self._order = count()

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def ask(
        self, peer: Peer, command: Command, on_end: OnEnd, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Asks a client; `on_end` is called once, perhaps at once."""
        if peer.closed or len(self._deadlines) >= OPEN_MAX:
            on_end(None)
            return
        number = peer.send_request(command, lambda answer: self._end(peer, number, answer))
        self._open.setdefault(peer, {})[number] = on_end
        deadline_s = self._clock.monotonic_s() + timeout_s
        heapq.heappush(self._deadlines, (deadline_s, next(self._order), peer, number))

    def expire(self, now_s: float) -> None:
        """Ends what was not answered in time."""
        while self._deadlines:
            deadline_s, _, peer, number = self._deadlines[0]
            if deadline_s > now_s and number in self._open.get(peer, ()):
                return
            heapq.heappop(self._deadlines)
            self._end(peer, number, None)

    def disconnected(self, peer: Peer) -> None:
        """It will not answer any more."""
        for number in list(self._open.get(peer, ())):
            self._end(peer, number, None)

    def _end(self, peer: Peer, number: int, answer: Command | None) -> None:
        mine = self._open.get(peer, {})
        on_end = mine.pop(number, None)
        if not mine:
            self._open.pop(peer, None)
        if on_end is not None:
            peer.forget_request(number)
            on_end(answer)


@dataclass(slots=True, eq=False)
class Relays:
    """The request family of tools that look into consumers."""

    settings: Settings
    topics: Topics
    groups: Groups
    consumers: Consumers
    store: Store
    questions: Questions

    def running_info(
        self, header: GetConsumerRunningInfoRequest, command: Command, peer: Peer
    ) -> None:
        """307: what does a consumer do?"""
        member = self._member(header.group, header.client_id)
        if member.version < RUNNING_INFO_SINCE:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{header.client_id}> Version <{member.version}> too low to "
                "finish, please upgrade it to V3_1_8_SNAPSHOT",
            )
        request = Command(command.code, dict(command.fields or {}))
        self._relay(member, request, command, peer, header.group)

    def consume_directly(
        self, header: ConsumeMessageDirectlyRequest, command: Command, peer: Peer
    ) -> None:
        """309: handle this message now. The stored message travels as the body; a tool may bring it
        itself. Without a client any member will do."""
        member = self._member(header.group, header.client_id)
        body: bytes | None = bytes(command.body)
        if header.message_id:
            try:
                position = parse_offset_message_id(header.message_id)[1]
                body = self.store.reader.record_at(position)
            except ProtocolError:
                body = None
        if body is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"no message of this broker begins where {header.message_id} says",
            )
        topic = self.topics.config_of(header.topic or "")
        group = self.groups.config_of(header.group)
        fields = {
            **(command.fields or {}),
            "brokerName": self.settings.broker.broker_name,
            "topicSysFlag": str(topic.sys_flag if topic is not None else 0),
            "groupSysFlag": str(group.sys_flag if group is not None else 0),
        }
        self._relay(member, Command(command.code, fields, body), command, peer, header.group)

    def consumer_status(
        self, header: GetConsumerStatusRequest, command: Command, peer: Peer
    ) -> None:
        """223: how far does each member think it is? Those that do not answer are left out."""
        group = self.consumers.groups.get(header.group)
        members = [
            member
            for member in (group.members.values() if group is not None else ())
            if header.client_address in (None, "", member.client_id)
        ]
        if not members:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE if group is None else ResponseCode.SYSTEM_ERROR,
                f"No Any Consumer online in the consumer group: [{header.group}]",
            )
        found: dict[str, dict[MessageQueue, int]] = {}
        waiting = len(members)

        def ended(client_id: str, answer: Command | None) -> None:
            nonlocal waiting
            waiting -= 1
            if answer is not None and answer.code == ResponseCode.SUCCESS:
                try:
                    found[client_id] = bodies.decode_client_offsets(answer.body)
                except ProtocolError as error:
                    log.warning("client %s answers 221 oddly: %s", client_id, error)
            if not waiting:
                body = bodies.encode_offsets_by_client(found)
                peer.write(encode_response_to(Command(ResponseCode.SUCCESS, body=body), command))

        fields = encode_header(GetConsumerStatusRequest(topic=header.topic, group=header.group))
        for member in members:
            request = Command(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, dict(fields))
            self.questions.ask(member.peer, request, partial(ended, member.client_id))

    def _member(self, group: str, client_id: str | None) -> Member:
        """That client of the group, any without an id. Raises RequestError."""
        found = self.consumers.groups.get(group)
        for member in found.members.values() if found is not None else ():
            if not member.peer.closed and client_id in (None, "", member.client_id):
                return member
        raise RequestError(
            ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id or 'any'}> not online"
        )

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
            peer.write(encode_response_to(relayed, command))

        self.questions.ask(member.peer, request, ended)


@dataclass(slots=True, eq=False)
class Replies:
    """The request family of repliers."""

    settings: Settings
    topics: Topics
    producers: Producers
    intake: Intake
    questions: Questions
    clock: Clock
    pushed: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)

    def reply(self, header: SendMessageRequest, command: Command, peer: Peer) -> Command | None:
        """324, 325. The Go client sends it without a body, which is an empty reply here."""
        config = self.settings.broker
        fields = {"TRACE_ON": "true" if config.trace_on else "false", "MSG_REGION": config.region}
        topic = self.topics.get(header.topic)
        if topic is not None and topic.is_forbidden:
            remark = f"Sending message to topic[{header.topic}] is forbidden."
            return Command(ResponseCode.NO_PERMISSION, fields, remark=remark)
        if topic is None or not 0 <= header.queue_id < topic.queues:
            return Command(
                ResponseCode.TOPIC_NOT_EXIST if topic is None else ResponseCode.INVALID_PARAMETER,
                fields,
                remark=f"a reply cannot go to queue {header.queue_id} of topic {header.topic}: it "
                f"belongs to {config.cluster_name}_REPLY_TOPIC",
            )
        properties = fields | text.as_dict(header.properties or "")
        remove_on_send(properties)
        if config.store_replies:
            host = self.settings.store_host
            try:
                stored = self.intake.put(Draft(
                    header.topic, header.queue_id, command.body, dict(properties),
                    header.born_time_ms, peer.remote_bytes, host, header.flag, header.sys_flag,
                ))  # fmt: skip
            except RequestError as error:
                return Command(error.code, fields, remark=error.remark)
            except (StoreError, OSError) as error:
                return Command(ResponseCode.SYSTEM_ERROR, fields, remark=str(error))
            fields["msgId"] = offset_message_id(host, stored.physical_offset)
            fields["queueId"] = str(header.queue_id)
            fields["queueOffset"] = str(stored.queue_offset)
        return self._push(header, command, peer, properties, fields)

    def _push(
        self,
        header: SendMessageRequest,
        command: Command,
        peer: Peer,
        properties: dict[str, str],
        fields: dict[str, str],
    ) -> Command | None:
        """326."""
        client_id = properties.get(REPLY_TO_CLIENT, "")
        requester = self.producers.find_connection(client_id)
        if requester is None:
            self.failed += 1
            return Command(
                ResponseCode.SYSTEM_ERROR,
                fields,
                remark=f"push reply message fail, channel of <{client_id}> not found.",
            )

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
                peer.write(encode_response_to(made, command))

        now_ms = self.clock.now_ms()
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
            "store_host": str(self.settings.host),
            "store_time_ms": now_ms,
        }
        pushed = encode_header(ReplyMessageRequest(**values))
        request = Command(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, bytes(command.body))
        self.questions.ask(requester, request, ended)
        return None
