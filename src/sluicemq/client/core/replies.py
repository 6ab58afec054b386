"""Request and reply: what travels (spec/remoting.md §18).

    requester --310 with REPLY_TO_CLIENT, CORRELATION_ID, TTL--> broker --> who consumes it
    requester <--326-- broker <--325 to CLUSTER_REPLY_TOPIC, MSG_TYPE=reply-- who consumes it

The reply goes to the broker that has the request: the requester sent it there, so its heartbeats
reach that broker, and by its client id the broker finds its connection.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.messages import OutgoingMessage, add_properties
from sluicemq.client.core.requests import make_request
from sluicemq.errors import ConfigurationError, RequestTimeoutError
from sluicemq.model.ids import parse_host
from sluicemq.model.message import CLUSTER, UNIQ_KEY, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue
from sluicemq.record.codec import decode_properties
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ReplyMessageRequest, SendMessageRequestV2

_log = logging.getLogger("sluicemq.client")
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MSG_TYPE: Final = "MSG_TYPE"
REPLY: Final = "reply"
REPLY_TIMEOUT_S: Final = 10.0
REPLIER_GROUP: Final = "sluicemq-replier"
ANSWER_TIMEOUT_S: Final = 12.0
"""The broker waits 10 s for the requester to take a reply."""


def make_request_message(
    outgoing: OutgoingMessage, client_id: str, correlation_id: str, ttl_ms: int
) -> OutgoingMessage:
    """The message as a requester sends it. Raises ConfigurationError."""
    added = {CORRELATION_ID: correlation_id, REPLY_TO_CLIENT: client_id, TTL: str(ttl_ms)}
    return add_properties(outgoing, added, "a request")


def make_reply_request(
    record: StoredMessage, body: bytes, message_id: str, now_ms: int
) -> tuple[MessageQueue, Command]:
    """(the queue whose broker has to get it, 325). Raises ConfigurationError when nobody waits for
    a reply to that message."""
    asked = record.properties
    if not asked.get(REPLY_TO_CLIENT) or not asked.get(CORRELATION_ID):
        raise ConfigurationError(
            f"message {record.message_id} of {record.topic} asks for no reply.",
            fix="Only messages of `request` do: look for the property CORRELATION_ID.",
        )
    properties = {
        UNIQ_KEY: message_id,
        MSG_TYPE: REPLY,
        CORRELATION_ID: asked[CORRELATION_ID],
        REPLY_TO_CLIENT: asked[REPLY_TO_CLIENT],
        TTL: asked.get(TTL, ""),
    }
    header = SendMessageRequestV2(
        group=REPLIER_GROUP,
        topic=f"{asked.get(CLUSTER, 'DefaultCluster')}_REPLY_TOPIC",
        default_topic=DEFAULT_TOPIC,
        default_topic_queues=4,
        queue_id=0,
        sys_flag=0,
        born_time_ms=now_ms,
        flag=0,
        properties="".join(f"{name}\x01{value}\x02" for name, value in properties.items() if value),
        reconsume_times=0,
        unit_mode=False,
        batch=False,
        broker=record.broker or None,
    )
    command = make_request(RequestCode.SEND_REPLY_MESSAGE_V2, header, body)
    return MessageQueue(record.topic, record.broker, record.queue_id), command


def parse_pushed_reply(command: Command) -> StoredMessage:
    """326. Raises ProtocolError. The queue offset is not known: it is -1."""
    header = decode_header(ReplyMessageRequest, command.fields)
    properties: dict[str, Any] = decode_properties((header.properties or "").encode())
    body = bytes(command.body)
    return StoredMessage(
        topic=header.topic,
        queue_id=header.queue_id,
        queue_offset=-1,
        physical_offset=-1,
        size_bytes=len(body),
        raw_body=body,
        properties=properties,
        flag=header.flag,
        sys_flag=header.sys_flag,
        born_time_ms=header.born_time_ms,
        born_host=parse_host(header.born_host.removeprefix("/")),
        store_time_ms=header.store_time_ms,
        store_host=parse_host(header.store_host.removeprefix("/")),
        reconsume_times=header.reconsume_times or 0,
        prepared_offset=0,
        body_crc=0,
    )


class ReplyFuture(Protocol):
    """A future of asyncio or of threads."""

    def done(self) -> bool: ...

    def set_result(self, result: StoredMessage, /) -> None: ...


def accept_pushed_reply(command: Command, pending: Mapping[str, ReplyFuture]) -> Command:
    """326: the answer for the broker. A reply that nobody waits for is taken as well, as Java does:
    it came too late. Raises ProtocolError."""
    reply = parse_pushed_reply(command)
    future = pending.get(reply.properties.get(CORRELATION_ID, ""))
    if future is not None and not future.done():
        future.set_result(reply)
    else:
        _log.info("a reply came that nobody waits for (any more): %s", reply.message_id)
    return Command(ResponseCode.SUCCESS)


def send_reply(
    directory: Directory, record: StoredMessage, body: bytes, message_id: str
) -> Conversation[dict[str, str]]:
    """Sends a reply; returns when the requester has it. Raises ConfigurationError (nobody asked),
    RequestError (the requester is gone), ConnectionLostError, RequestTimeoutError."""
    queue, command = make_reply_request(record, body, message_id, directory.clock.now_ms())
    response = yield from directory.call_master(queue, command, ANSWER_TIMEOUT_S)
    return dict(response.fields or {})


def reply_timeout_error(
    topic: str, message_id: str, where: str, timeout_s: float
) -> RequestTimeoutError:
    """What is known when the time is over: `where` is empty before the message was stored."""
    if not where:
        return RequestTimeoutError(
            f"request {message_id} to {topic!r} was not stored within {timeout_s:g} s; it may be.",
            fix="See sluice cluster list; its handler must cope with getting it twice.",
        )
    return RequestTimeoutError(
        f"request {message_id} is stored in {where}, and no reply came within {timeout_s:g} s: it "
        "may be handled still, or is handled and its reply came too late.",
        fix=f"Is a consumer of {topic!r} online, and does it call message.reply()? "
        f"`sluice message show {message_id}` shows the request.",
    )
