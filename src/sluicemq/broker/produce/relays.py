"""Requests that the broker sends to clients, on behalf of tools and of repliers.

`RelayHandlers` answers requests of tools about consumers:

    INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223)   sent to clients as 221
    GET_CONSUMER_RUNNING_INFO (307)              sent to the client as it is
    CONSUME_MESSAGE_DIRECTLY (309)               sent to the client with the stored message

The broker sends the request to the client on the connection of its heartbeats, and passes the
answer on to the tool unchanged. No code blocks until the answer arrives: `ClientRequests` keeps the
unanswered requests in the order of their deadlines. A request without an answer ends in `expire`,
which the broker calls periodically, or in `on_disconnect`.

`ReplyHandlers` answers SEND_REPLY_MESSAGE (324) and SEND_REPLY_MESSAGE_V2 (325), the second half of
request-reply (spec/remoting.md §18). A requester sends an ordinary message with its client id
(REPLY_TO_CLIENT) and the id of the request (CORRELATION_ID). The consumer of that message sends the
reply to the topic CLUSTER_REPLY_TOPIC. The broker stores the reply if storeReplyMessageEnable is
true, finds the requester by its client id among the producers, and pushes the reply to it as
PUSH_REPLY_MESSAGE_TO_CLIENT (326). The replier receives SUCCESS if the requester accepted the
reply, else SYSTEM_ERROR with the reason. No client consumes CLUSTER_REPLY_TOPIC: a stored reply
whose requester is gone is only useful to a person who queries it.
"""

import heapq
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

from sluicemq.broker.consume.clients import Consumers, Member
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.produce.intake import MessageIntake, MessageToStore
from sluicemq.broker.produce.producers import Producers
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, RequestError, StoreError
from sluicemq.model.ids import offset_message_id, parse_offset_message_id
from sluicemq.model.properties import remove_on_send
from sluicemq.model.topic import MessageQueue
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.record import codec as text
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

CLIENT_TIMEOUT_S: Final = 10.0
"""The time within which a client must answer a request of the broker (spec/remoting.md §7.6)."""
RUNNING_INFO_VERSION_MIN: Final = 62
"""The first client version that answers GET_CONSUMER_RUNNING_INFO: V3_1_8_SNAPSHOT
(spec/remoting.md §4)."""
PENDING_MAX: Final = 4096
"""The most requests to clients at the same time. Answered requests count until `expire` removes
them."""
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"

OnEnd = Callable[[Command | None], None]
"""A callback that receives the answer of a client, or None if no answer will arrive."""


class ClientRequests:
    """The requests of the broker that clients have not answered yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: dict[Peer, dict[int, OnEnd]] = {}
        """The callbacks of unanswered requests, by connection and number of the request."""
        self._deadlines: list[tuple[float, int, Peer, int]] = []
        """A heap of (deadline, tie-breaker, connection, number of the request)."""
        self._order = count()
        """The tie-breakers, so that connections in the heap are never compared."""

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return sum(map(len, self._pending.values()))

    def send(
        self, peer: Peer, command: Command, on_end: OnEnd, timeout_s: float = CLIENT_TIMEOUT_S
    ) -> None:
        """Send a request to a client, and call `on_end` exactly once, with the answer or None.

        Return at once. None means that the client has not answered within `timeout_s` seconds, or
        has disconnected. If the connection is closed already, or if `PENDING_MAX` requests are
        waiting, nothing is sent, and `on_end(None)` is called before this method returns.
        """
        if peer.closed or len(self._deadlines) >= PENDING_MAX:
            on_end(None)
            return
        request_number = peer.send_request(
            command, lambda answer: self._end(peer, request_number, answer)
        )
        self._pending.setdefault(peer, {})[request_number] = on_end
        deadline_s = self._clock.monotonic_s() + timeout_s
        heapq.heappush(self._deadlines, (deadline_s, next(self._order), peer, request_number))

    def expire(self, now_s: float) -> None:
        """End the requests whose deadline has passed, by calling their callbacks with None.

        `now_s` is the monotonic time. The deadlines of answered requests are removed when they are
        the earliest; until then they count towards PENDING_MAX.
        """
        while self._deadlines:
            deadline_s, _, peer, request_number = self._deadlines[0]
            is_unanswered = request_number in self._pending.get(peer, ())
            if deadline_s > now_s and is_unanswered:
                return
            heapq.heappop(self._deadlines)
            self._end(peer, request_number, None)

    def on_disconnect(self, peer: Peer) -> None:
        """End all requests to a client whose connection was closed: their callbacks get None."""
        for request_number in list(self._pending.get(peer, ())):
            self._end(peer, request_number, None)

    def _end(self, peer: Peer, request_number: int, answer: Command | None) -> None:
        """Remove a waiting request, and call its callback with `answer`.

        `answer` is None if the client has not answered. A later answer is ignored. Do nothing if
        the request has ended already.
        """
        callbacks = self._pending.get(peer, {})
        on_end = callbacks.pop(request_number, None)
        if not callbacks:
            self._pending.pop(peer, None)
        if on_end is not None:
            peer.forget_request(request_number)
            on_end(answer)


class RelayHandlers(BrokerComponent):
    """Request handlers for tools that inspect consumers.

    They answer INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223), GET_CONSUMER_RUNNING_INFO (307) and
    CONSUME_MESSAGE_DIRECTLY (309). Each handler returns None, because the answer is sent when the
    consumer has answered.
    """

    def __init__(
        self, context: BrokerContext, *, consumers: Consumers, client_requests: ClientRequests
    ) -> None:
        super().__init__(context)
        self.consumers = consumers
        self.client_requests = client_requests

    def get_running_info(
        self, header: GetConsumerRunningInfoRequest, command: Command, peer: Peer
    ) -> None:
        """Answer GET_CONSUMER_RUNNING_INFO (307): ask a consumer for its state, and pass it on.

        The request is forwarded to the consumer with its fields, but without a body. The consumer's
        answer is sent to the tool when it arrives. If it does not arrive in time, the code of the
        answer is CONSUME_MSG_TIMEOUT.

        Raises RequestError if the consumer is offline, or too old to answer.
        """
        member = self._find_member(header.group, header.client_id)
        if member.version < RUNNING_INFO_VERSION_MIN:
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
        """Answer CONSUME_MESSAGE_DIRECTLY (309): let a consumer process one message at once.

        The request may have a message id, which names a stored message. Its record is sent to the
        consumer as the body. Without a message id, the body of the request is sent. The request
        names the client; without a client id, any online member of the group gets the message.

        Raises RequestError if the consumer is offline or the message does not exist.
        """
        member = self._find_member(header.group, header.client_id)
        body = bytes(command.body)
        if header.message_id:
            body = self._read_message(header.message_id)
        topic = self.topics.config_of(header.topic or "")
        topic_sys_flag = topic.sys_flag if topic is not None else 0
        group = self.groups.config_of(header.group)
        group_sys_flag = group.sys_flag if group is not None else 0
        fields = {
            **(command.fields or {}),
            "brokerName": self.settings.broker.broker_name,
            "topicSysFlag": str(topic_sys_flag),
            "groupSysFlag": str(group_sys_flag),
        }
        self._relay(member, Command(command.code, fields, body), command, peer, header.group)

    def _read_message(self, message_id: str) -> bytes:
        """Return the record of the message with an offset message id, which contains its position.

        Raises RequestError if the id is invalid or there is no such message.
        """
        record = None
        with suppress(ProtocolError):
            _, position = parse_offset_message_id(message_id)
            record = self.store.reader.record_at(position)
        if record is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"this broker has no message with the offset message id {message_id}",
            )
        return record

    def get_consumer_offsets(
        self, header: GetConsumerStatusRequest, command: Command, peer: Peer
    ) -> None:
        """Answer INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223): ask the members for their offsets.

        The answer has, by client id, the offsets that each member knows for the queues of the
        topic. It is sent when all members have answered, or when their time is over. Members that
        answer too late or with an error are left out. If the request has a client address, only the
        member with that client id is asked.

        Raises RequestError if no such member is online.
        """
        members = self._find_members(header.group, header.client_address)
        offsets_by_client: dict[str, dict[MessageQueue, int]] = {}
        unanswered_count = len(members)

        def on_answer(client_id: str, member_answer: Command | None) -> None:
            """Add the answer of one member. After the last one, send the answer to the tool."""
            nonlocal unanswered_count
            unanswered_count -= 1
            offsets = _decode_client_offsets(client_id, member_answer)
            if offsets is not None:
                offsets_by_client[client_id] = offsets
            if unanswered_count == 0:
                body = bodies.encode_offsets_by_client(offsets_by_client)
                peer.write(encode_response_to(Command(ResponseCode.SUCCESS, body=body), command))

        fields = encode_header(GetConsumerStatusRequest(topic=header.topic, group=header.group))
        for member in members:
            request = Command(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, dict(fields))
            self.client_requests.send(member.peer, request, partial(on_answer, member.client_id))

    def _find_members(self, group: str, client_id: str | None) -> list[Member]:
        """Return the online members of a group, or only the one with `client_id` if it names one.

        Raises RequestError if there is no such member.
        """
        online_group = self.consumers.groups.get(group)
        remark = f"No Any Consumer online in the consumer group: [{group}]"
        if online_group is None:
            raise RequestError(ResponseCode.CONSUMER_NOT_ONLINE, remark)
        members = [
            member
            for member in online_group.members.values()
            if client_id in (None, "", member.client_id)
        ]
        if not members:
            raise RequestError(ResponseCode.SYSTEM_ERROR, remark)
        return members

    def _find_member(self, group: str, client_id: str | None) -> Member:
        """Return the online member with a client id, or any online member if it is None or "".

        Raises RequestError if there is no such member.
        """
        online_group = self.consumers.groups.get(group)
        members = online_group.members.values() if online_group is not None else ()
        for member in members:
            if not member.peer.closed and client_id in (None, "", member.client_id):
                return member
        raise RequestError(
            ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id or 'any'}> not online"
        )

    def _relay(
        self, member: Member, request: Command, command: Command, peer: Peer, group: str
    ) -> None:
        """Send `request` to a member, and pass its answer on to the tool at `peer`.

        `command` is the tool's own request, to which the answer belongs. If the member does not
        answer in time, or disconnects, the tool gets CONSUME_MSG_TIMEOUT. `group` is the member's
        group, for the text of that answer.
        """

        def on_answer(answer: Command | None) -> None:
            if answer is None:
                answer = Command(
                    ResponseCode.CONSUME_MSG_TIMEOUT,
                    remark=f"The consumer <{group}> <{member.client_id}> did not answer request "
                    f"{command.code} within {CLIENT_TIMEOUT_S:g} s, or has left",
                )
            relayed = Command(answer.code, answer.fields, answer.body, remark=answer.remark)
            peer.write(encode_response_to(relayed, command))

        self.client_requests.send(member.peer, request, on_answer)


def _decode_client_offsets(
    client_id: str, answer: Command | None
) -> dict[MessageQueue, int] | None:
    """Return the offsets in the answer of a client to GET_CONSUMER_STATUS_FROM_CLIENT (221).

    Return None if there is no answer, an error, or an answer that cannot be decoded, which is
    logged.
    """
    if answer is None or answer.code != ResponseCode.SUCCESS:
        return None
    try:
        return bodies.decode_client_offsets(answer.body)
    except ProtocolError as error:
        log.warning("client %s sent an invalid answer to request 221: %s", client_id, error)
        return None


def _make_reply_answer(
    requester_answer: Command | None, client_id: str, fields: dict[str, str]
) -> Command:
    """Return the answer to a replier: SUCCESS if the requester accepted the reply.

    `requester_answer` is the answer of the requester, whose client id is `client_id`; None if it
    did not answer. `fields` are those of the answer.
    """
    if requester_answer is None:
        reason = "no answer"
    elif requester_answer.code == ResponseCode.SUCCESS:
        return Command(ResponseCode.SUCCESS, fields)
    else:
        reason = f"{requester_answer.code} {requester_answer.remark}"
    remark = f"push reply message to {client_id} fail: {reason}"
    return Command(ResponseCode.SYSTEM_ERROR, fields, remark=remark)


@dataclass(slots=True, eq=False)
class ReplyHandlers:
    """Request handlers for the replies of request-reply.

    They answer SEND_REPLY_MESSAGE (324) and SEND_REPLY_MESSAGE_V2 (325).
    """

    settings: Settings
    topics: Topics
    producers: Producers
    intake: MessageIntake
    client_requests: ClientRequests
    clock: Clock

    def send_reply(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> Command | None:
        """Answer SEND_REPLY_MESSAGE (324, 325): store a reply and push it to the requester.

        The requester is the client that waits for the reply. The reply is stored only if
        storeReplyMessageEnable is true. Then the answer has its message id and queue offset. Return
        None if the reply was sent to the requester: the answer follows when the requester has
        answered. Otherwise return a Command with the error. A request without a body, as the Go
        client sends it, is an empty reply.
        """
        config = self.settings.broker
        fields = {"TRACE_ON": "true" if config.trace_on else "false", "MSG_REGION": config.region}
        topic = self.topics.get(header.topic)
        if topic is not None and topic.is_forbidden:
            remark = f"Sending message to topic[{header.topic}] is forbidden."
            return Command(ResponseCode.NO_PERMISSION, fields, remark=remark)
        if topic is None or not 0 <= header.queue_id < topic.queues:
            code = ResponseCode.INVALID_PARAMETER
            if topic is None:
                code = ResponseCode.TOPIC_NOT_EXIST
            remark = (
                f"a reply cannot go to queue {header.queue_id} of topic {header.topic}: "
                f"send it to {config.cluster_name}_REPLY_TOPIC"
            )
            return Command(code, fields, remark=remark)

        properties = fields | text.parse_property_text(header.properties or "")
        remove_on_send(properties)
        if config.store_replies:
            try:
                fields |= self._store_reply(header, command, peer, properties)
            except RequestError as error:
                return Command(error.code, fields, remark=error.remark)
            except (StoreError, OSError) as error:
                return Command(ResponseCode.SYSTEM_ERROR, fields, remark=str(error))
        return self._push(header, command, peer, properties, fields)

    def _store_reply(
        self,
        header: SendMessageRequest,
        command: Command,
        peer: Peer,
        properties: dict[str, str],
    ) -> dict[str, str]:
        """Store a reply, and return the fields of the answer that say where it was stored.

        These are "msgId", "queueId" and "queueOffset". `properties` are not changed. Raises
        RequestError, StoreError or OSError.
        """
        host = self.settings.store_host
        message = MessageToStore(
            topic=header.topic,
            queue_id=header.queue_id,
            body=command.body,
            properties=dict(properties),
            born_time_ms=header.born_time_ms,
            born_host=peer.remote_bytes,
            store_host=host,
            flag=header.flag,
            sys_flag=header.sys_flag,
        )
        stored = self.intake.append_internal(message)
        return {
            "msgId": offset_message_id(host, stored.physical_offset),
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
        """Send PUSH_REPLY_MESSAGE_TO_CLIENT (326) to the requester of a reply.

        `properties` are the properties of the reply, which name the requester. `fields` are the
        fields of the answer to the client that has sent the reply. Return None if that answer will
        be sent later. Return a Command with the error if the requester is not connected.
        """
        client_id = properties.get(REPLY_TO_CLIENT, "")
        requester = self.producers.find_connection(client_id)
        if requester is None:
            return Command(
                ResponseCode.SYSTEM_ERROR,
                fields,
                remark=f"push reply message fail, channel of <{client_id}> not found.",
            )

        def on_answer(requester_answer: Command | None) -> None:
            if not command.is_oneway:
                answer = _make_reply_answer(requester_answer, client_id, fields)
                peer.write(encode_response_to(answer, command))

        push_fields = encode_header(self._make_push_header(header, peer, properties))
        request = Command(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, push_fields, bytes(command.body)
        )
        self.client_requests.send(requester, request, on_answer)
        return None

    def _make_push_header(
        self, header: SendMessageRequest, peer: Peer, properties: dict[str, str]
    ) -> ReplyMessageRequest:
        """Return the header of PUSH_REPLY_MESSAGE_TO_CLIENT (326) for a reply from `peer`."""
        now_ms = self.clock.now_ms()
        pushed_properties = {PUSH_REPLY_TIME: str(now_ms), **properties}
        return ReplyMessageRequest(
            group=header.group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queues=header.default_topic_queues,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_time_ms=header.born_time_ms,
            flag=header.flag,
            properties=text.format_property_text(pushed_properties),
            reconsume_times=header.reconsume_times or 0,
            unit_mode=bool(header.unit_mode),
            born_host=str(peer.remote),
            store_host=str(self.settings.host),
            store_time_ms=now_ms,
        )
