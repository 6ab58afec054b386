"""Send requests that expect a reply, and the replies to them (spec/remoting.md §18).

    requester --SEND_MESSAGE_V2 (310) with REPLY_TO_CLIENT, CORRELATION_ID, TTL--> broker
    broker --message--> consumer
    consumer --SEND_REPLY_MESSAGE_V2 (325) to CLUSTER_REPLY_TOPIC, MSG_TYPE=reply--> broker
    broker --PUSH_REPLY_MESSAGE_TO_CLIENT (326)--> requester

The reply goes to the broker that stores the request. The requester sent the request there, so it
sends heartbeats to that broker, which finds the requester's connection by its client id.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.messages import OutgoingMessage, add_properties
from sluicemq.client.core.requests import make_request
from sluicemq.errors import ConfigurationError, RequestError, RequestTimeoutError
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
"""The producer group of replies."""
SEND_REPLY_TIMEOUT_S: Final = 12.0
"""The time limit for sending a reply: the broker waits 10 s for the requester to accept it."""


def make_request_message(
    outgoing: OutgoingMessage, client_id: str, correlation_id: str, ttl_ms: int
) -> OutgoingMessage:
    """Return a copy of the message as a request, with the properties that a reply needs.

    `client_id` is the requester, and `correlation_id` identifies the request. `ttl_ms` is how long
    the requester waits, in milliseconds. Raises ConfigurationError if the properties become too
    large.
    """
    added = {CORRELATION_ID: correlation_id, REPLY_TO_CLIENT: client_id, TTL: str(ttl_ms)}
    return add_properties(outgoing, added, "a request")


def make_reply_request(
    record: StoredMessage, body: bytes, message_id: str, now_ms: int
) -> tuple[MessageQueue, Command]:
    """Return (queue, request) to send a reply to the message `record`.

    The request (code 325) must go to the broker of the queue, which is the queue of `record`.
    `body` is the body of the reply and `message_id` its id. Raises ConfigurationError if `record`
    does not ask for a reply.
    """
    request_properties = record.properties
    if not request_properties.get(REPLY_TO_CLIENT) or not request_properties.get(CORRELATION_ID):
        raise ConfigurationError(
            f"message {record.message_id} of {record.topic} does not ask for a reply.",
            fix="Reply only to messages that `request` sent: they have the property "
            "CORRELATION_ID.",
        )
    cluster = request_properties.get(CLUSTER, "DefaultCluster")
    header = SendMessageRequestV2(
        group=REPLIER_GROUP,
        topic=f"{cluster}_REPLY_TOPIC",
        default_topic=DEFAULT_TOPIC,
        default_topic_queues=4,
        queue_id=0,
        sys_flag=0,
        born_time_ms=now_ms,
        flag=0,
        properties=_encode_reply_properties(request_properties, message_id),
        reconsume_times=0,
        unit_mode=False,
        batch=False,
        broker=record.broker or None,
    )
    command = make_request(RequestCode.SEND_REPLY_MESSAGE_V2, header, body)
    return MessageQueue(record.topic, record.broker, record.queue_id), command


def _encode_reply_properties(request_properties: Mapping[str, str], message_id: str) -> str:
    """Return the encoded properties of a reply, from which the broker finds the requester.

    Encoded, a property is `name U+0001 value U+0002`.
    """
    properties = {
        UNIQ_KEY: message_id,
        MSG_TYPE: REPLY,
        CORRELATION_ID: request_properties[CORRELATION_ID],
        REPLY_TO_CLIENT: request_properties[REPLY_TO_CLIENT],
        TTL: request_properties.get(TTL, ""),
    }
    # Only properties with a value are sent: a request of another client may lack the TTL.
    return "".join(f"{name}\x01{text}\x02" for name, text in properties.items() if text)


def parse_pushed_reply(command: Command) -> StoredMessage:
    """Decode a reply that a broker pushes to the client which sent the request (code 326).

    The offsets of the result are -1, because the broker does not send them. Raises ProtocolError if
    the header cannot be decoded.
    """
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
    """A future, of asyncio or of concurrent.futures, that a requester waits for."""

    def done(self) -> bool: ...

    def set_result(self, result: StoredMessage, /) -> None: ...


def accept_pushed_reply(command: Command, pending: Mapping[str, ReplyFuture]) -> Command:
    """Set the result of the future that waits for a pushed reply, and return the response (326).

    `pending` maps correlation ids to futures. A reply for which no future waits any more is logged
    and dropped. The response is a success in both cases, as with Java's client. Raises
    ProtocolError if the reply cannot be decoded.
    """
    reply = parse_pushed_reply(command)
    future = pending.get(reply.properties.get(CORRELATION_ID, ""))
    if future is not None and not future.done():
        future.set_result(reply)
    else:
        _log.info("ignored a reply without a waiting request: %s", reply.message_id)
    return Command(ResponseCode.SUCCESS)


def send_reply(
    directory: Directory, record: StoredMessage, body: bytes, message_id: str
) -> Conversation[dict[str, str]]:
    """Send a reply to `record`, and wait until the requester has it.

    Return the header fields of the response. `body` and `message_id` are those of the reply. Raises
    ConfigurationError if `record` does not ask for a reply, RequestError if the requester is no
    longer connected, ConnectionLostError and RequestTimeoutError.
    """
    queue, command = make_reply_request(record, body, message_id, directory.clock.now_ms())
    try:
        response = yield from directory.call_master(queue, command, SEND_REPLY_TIMEOUT_S)
    except RequestError as error:
        if error.code != ResponseCode.SYSTEM_ERROR or error.fix:
            raise
        raise RequestError(
            error.code,
            error.remark,
            address=error.address,
            fix="If the requester has gone, catch this error in the handler, so that "
            "the message is not delivered again.",
        ) from error
    return dict(response.fields or {})


def reply_timeout_error(
    topic: str, message_id: str, stored_in: str, timeout_s: float
) -> RequestTimeoutError:
    """Return the error for a request that got no reply within `timeout_s` seconds.

    `stored_in` is the queue where the request is stored, as text. "" means that the broker has not
    confirmed to have stored it.
    """
    if not stored_in:
        return RequestTimeoutError(
            f"request {message_id} to {topic!r} was not stored within {timeout_s:g} s; it may be.",
            fix="Check sluice cluster list. If you resend it, its handler may receive it twice.",
        )
    return RequestTimeoutError(
        f"request {message_id} is stored in {stored_in}, but no reply came within {timeout_s:g} s: "
        "it may still be processed, or its reply came too late.",
        fix=f"Check that a consumer of {topic!r} is online and calls message.reply(). "
        f"`sluice message show {message_id}` shows the request.",
    )
