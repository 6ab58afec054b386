"""Request and reply: 324 and 325, pushed on to the requester as 326 (spec/remoting.md §18).

A requester sends an ordinary message that names itself (REPLY_TO_CLIENT) and the request
(CORRELATION_ID). Who consumes it sends the reply here, to the topic CLUSTER_REPLY_TOPIC; the broker
stores it (storeReplyMessageEnable) and hands it to the requester on the connection of its
heartbeats, found by its client id among the producers. Only the push decides how the replier is
answered: 0 when the requester has taken it, else 1 and why. Nobody consumes the topic: a reply
whose requester is gone is of use to nobody but who looks for it.
"""

import logging
from typing import Any, Final

from sluicemq.broker import properties as text
from sluicemq.broker.consume.clients import Producers
from sluicemq.broker.intake import Draft, Intake, RefusalError, Stored
from sluicemq.broker.relays import Questions
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.errors import StoreError
from sluicemq.model.ids import Host, encode_host, offset_message_id
from sluicemq.net.dispatch import Handler, finish_answer
from sluicemq.net.peer import Peer
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ReplyMessageRequest, SendMessageRequest, SendMessageRequestV2

log = logging.getLogger(__name__)

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

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.SEND_REPLY_MESSAGE: self.reply_long,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.reply_letters,
        }

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
        except (RefusalError, StoreError, OSError) as error:
            code = error.code if isinstance(error, RefusalError) else ResponseCode.SYSTEM_ERROR
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
