"""Handlers for requests that store messages.

`SendHandlers` answers SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).

`SendHandlers.send_fast_path` handles plain sends: it reads the single-letter fields of the decoded
JSON header, looks up the topic, appends the message and formats the answer. For every other send
(unknown topic, retry topic, batch, special property, invalid field) it returns False, and the
general path `SendHandlers.send` handles the request. Both paths have the same results;
tests/unit/broker/test_send.py compares them.

A batch that contains a prepared or delayed message is rejected, because it would be stored as an
ordinary message.
"""

import logging
import re
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import orjson

from sluicemq import engine
from sluicemq.broker.context import BrokerContext
from sluicemq.broker.group_commit import Durable, Postponed, run_or_postpone
from sluicemq.broker.produce.intake import (
    ILLEGAL_MESSAGE_REMARK,
    BatchFields,
    MessageIntake,
    MessageToStore,
    check_batch_properties,
    choose_response_code,
)
from sluicemq.broker.produce.send_back import SendBackHandlers, max_retries
from sluicemq.broker.topics import (
    FAQ,
    Topic,
    find_topic_name_fault,
)
from sluicemq.errors import MessageIllegalError, RequestError, StoreError, StoreFullError
from sluicemq.model.ids import UniqueIds
from sluicemq.model.message import (
    PREPARED,
    TRAN_MSG,
    TRANSACTION_MASK,
)
from sluicemq.model.properties import ACTED_ON_SEND
from sluicemq.model.system_names import HALF_TOPIC, is_broker_written_topic
from sluicemq.model.topic import PERM_WRITE, RETRY_PREFIX
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem
from sluicemq.record import codec as text
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import (
    FLAG_ONEWAY,
    FRAME_BYTES_MAX,
    SERVER_LANGUAGE,
    VERSION,
    Command,
)
from sluicemq.wire.headers import BRIEF_FIELD, SendMessageRequest

log = logging.getLogger(__name__)

_pack_frame_prefix: Final = struct.Struct(">II").pack
_REQUEST_FLAGS: Final = (0, FLAG_ONEWAY)
_OPAQUE_MAX: Final = 0x7FFFFFFF
"""The largest number of a request that the fast path handles."""
_find_special_property: Final = re.compile(
    f"\x02(?:(?:{'|'.join(map(re.escape, sorted(ACTED_ON_SEND)))}|__SHARDINGKEY)\x01"
    "|WAIT\x01(?!true\x02))"
).search
"""Searches encoded properties, each after a separator, for one that the fast path cannot handle."""
_PLACEHOLDER: Final = re.compile(rb"(?<!%)%[bd]")
"""A placeholder in an answer template."""
_INVALID_HEADER_ERRORS: Final = KeyError, TypeError, ValueError, AttributeError
"""What the fast path raises for a header with missing or invalid fields."""
_APPEND_ERRORS: Final = StoreError, OSError, OverflowError, struct.error
"""What the store raises if it is full, or if a number does not fit its field of the record.

Any other error of the fast path is a bug. It is reported as one, because the general path would
hide it.
"""
_SEND_ERRORS: Final = RequestError, MessageIllegalError, StoreError, OSError
_NO_FIELDS: Final[Mapping[str, str]] = MappingProxyType({})


class SendHandlers:
    """Request handlers for messages of producers.

    They answer SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).
    """

    def __init__(
        self,
        context: BrokerContext,
        *,
        retries: SendBackHandlers,
        intake: MessageIntake,
        unique_ids: UniqueIds,
    ) -> None:
        """Create the handlers, and the compiled fast path if it is available.

        Plain messages are appended directly to the store. `intake` appends all others, such as
        delayed messages. `retries` has the rules for messages to retry topics. `unique_ids` makes
        ids for messages without one.
        """
        settings = context.settings
        topics = context.topics
        store = context.store
        group_commit = context.group_commit
        self._settings = settings
        self._topics = topics
        self._by_name = topics.table
        self._retries = retries
        self._append = store.writer.append
        self._intake = intake
        self._send_after_commit = group_commit.send_after_commit
        self._unique_ids = unique_ids
        self._next_queue = 0
        self.failure_count = 0
        """The number of sends that were answered with an error."""
        self.body_size_counts = intake.body_size_counts
        self.fifo_counts: dict[str, int] = {}
        """The number of messages with a sharding key, by topic."""
        self.compiled = None
        """The compiled fast path (`sluicemq.engine`), or None if it is not available."""
        if engine.sends is not None and store.writer.can_append_columns:
            self.compiled = engine.sends.Sends(
                store.writer,
                topics.table,
                store.writer.by_key,
                self.body_size_counts,
                store.writer.begin_group,
                group_commit.send_all_after_commit,
                store.writer.body_bytes_max,
            )
        settings.add_listener(self.apply_settings)
        self.apply_settings()

    def apply_settings(self) -> None:
        """Prepare the properties that are added to each message, and the templates of answers.

        They depend on settings, so this is called at the start and after each change of a setting.
        """
        config = self._settings.broker
        self.store_host = self._settings.store_host
        self._id_prefix = self.store_host.hex().upper()
        self._region = config.region
        self._properties_max = config.properties_length_max
        self._trace = "true" if config.trace_on else "false"
        self._added = {
            "MSG_REGION": config.region,
            "TRACE_ON": self._trace,
            "CLUSTER": config.cluster_name,
        }
        self._suffix = text.format_property_text(self._added)
        self._prepare_answer_templates()
        if self.compiled is not None:
            # The constant parts of the template, between its placeholders.
            template_parts = [
                constant.replace(b"%%", b"%")
                for constant in _PLACEHOLDER.split(self._answer_template)
            ]
            self.compiled.prepare(
                self._suffix.encode(),
                self.store_host,
                self._id_prefix.encode(),
                template_parts,
                self._properties_max,
                FRAME_BYTES_MAX,
            )

    def _prepare_answer_templates(self) -> None:
        """Set the two templates of the header of a successful answer.

        One is for the fast path, and one for all other sends. They are bytes, because formatting
        bytes takes 60 % of the time of formatting text.
        """
        escaped_region = orjson.dumps(self._region).decode().replace("%", "%%")
        template_start = '{"code":0,"extFields":{"queueId":"%d",'
        template_end = (
            f'"TRACE_ON":"{self._trace}","MSG_REGION":{escaped_region},"queueOffset":"%d"}},'
            f'"flag":1,"language":"{SERVER_LANGUAGE}","opaque":%d,'
            f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
        )
        with_unique_id = f'"transactionId":"%b","msgId":"{self._id_prefix}%016X",'
        fast_template = template_start + with_unique_id + template_end
        self._fast_answer_template = fast_template.encode()
        self._answer_template = f'{template_start}%b"msgId":"%b",{template_end}'.encode()

    # -------------------------------------------------------------------------- the fast path

    def send_fast_path(self, header: dict[str, Any], body: bytes, peer: Peer) -> bool:
        """Handle a SEND_MESSAGE_V2 (310) of one plain message.

        `header` is the decoded JSON header. Return True if the message was appended and counted;
        the answer is sent to `peer` after the group commit. Return False, with nothing changed, for
        every request that `send` has to handle, also if the store refuses the message. Called for
        each send: keep it cheap.
        """
        try:
            # m: whether the message is a batch; j: how often it was retried.
            fields = header["extFields"]
            topic = self._by_name[fields["b"]]
            properties = fields["i"]
            queue_id = int(fields["e"])
            if properties[-1:] != "\x02":
                properties += "\x02"
            separated = "\x02" + properties  # Each property follows a separator.
            if (
                topic.is_special
                or not 0 <= queue_id < topic.queues
                or _find_special_property(separated)
                or fields.get("m", "false") != "false"
                or fields.get("j", "0") != "0"
            ):
                return False
            stored = (properties + self._suffix).encode("utf-8", "replace")
            name_start = separated.rfind("\x02UNIQ_KEY\x01")  # 10 characters
            unique_id = separated[name_start + 10 : separated.find("\x02", name_start + 10)].encode(
                "utf-8", "replace"
            )
            # Ids are letters and digits; an id with other characters might need escapes in JSON.
            if name_start < 0 or not unique_id.isalnum() or len(stored) > self._properties_max:
                return False
            tag_code = text.tag_code_of_text(properties) if "TAGS\x01" in properties else 0
            sys_flag = fields["f"]
            sys_flag = 0 if sys_flag == "0" else int(sys_flag)
            flag = fields["h"]
            flag = 0 if flag == "0" else int(flag)
            born_time_ms = int(fields["g"])
            opaque = header["opaque"]
            request_flag = header["flag"]
            is_number = 0 <= opaque <= _OPAQUE_MAX
            if request_flag not in _REQUEST_FLAGS or sys_flag & TRANSACTION_MASK or not is_number:
                return False
        except _INVALID_HEADER_ERRORS:
            return False
        try:
            # Positional, because this runs for each send.
            physical_offset, queue_offset = self._append(
                topic.name,
                queue_id,
                body,
                stored,
                tag_code,
                flag,
                sys_flag,
                born_time_ms,
                peer.remote_bytes,
                self.store_host,
            )
        except _APPEND_ERRORS:
            return False
        body_bytes = len(body)
        topic.messages_in += 1
        topic.bytes_in += body_bytes + len(stored) + topic.record_bytes
        self.body_size_counts[(body_bytes - 1).bit_length()] += 1
        if request_flag == FLAG_ONEWAY:
            self._send_after_commit(peer, b"")
            return True
        answer = self._fast_answer_template % (
            queue_id,
            unique_id,
            physical_offset,
            queue_offset,
            opaque,
        )
        header_bytes = len(answer)
        self._send_after_commit(peer, _pack_frame_prefix(header_bytes + 4, header_bytes) + answer)
        return True

    # ----------------------------------------------------------------------- the general path

    def send(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> Durable | Command | Postponed:
        """Answer SEND_MESSAGE (10) and SEND_MESSAGE_V2 (310): store a message or a batch.

        The two requests differ only in the names of their header fields. The topic is created if
        that is allowed. A message to a retry topic may become a dead letter instead. The message
        and the topic are counted.

        Return the answer as Durable, or a Command with an error code if the message cannot be
        stored. A batch is handled by `send_batch`.
        """
        if header.batch:
            return self.send_batch(header, command, peer)
        try:
            topic_count_before = len(self._topics)
            topic = self._find_or_create_topic(header, peer)
            queue_id = self._choose_queue(topic, header.queue_id, peer)
            properties = text.parse_property_text(header.properties or "")
            _check_transaction_flags(properties, header.sys_flag)
            retry_group = None
            if header.topic.startswith(RETRY_PREFIX):
                # A consumer sends to the retry topic itself if CONSUMER_SEND_MSG_BACK fails.
                retry_group = header.topic.removeprefix(RETRY_PREFIX)
                if self._is_dead_letter(retry_group, header, command.version):
                    topic = self._retries.make_dead_letter(retry_group, properties)
                    queue_id = 0

            # Append the message.
            for added_name, added_value in self._added.items():
                properties.setdefault(added_name, added_value)
            if "UNIQ_KEY" not in properties:
                properties["UNIQ_KEY"] = self._unique_ids.make_id()
            message = MessageToStore(
                topic=topic.name,
                queue_id=queue_id,
                body=command.body,
                properties=properties,
                born_time_ms=header.born_time_ms,
                born_host=peer.remote_bytes,
                store_host=self.store_host,
                flag=header.flag,
                sys_flag=header.sys_flag,
                reconsume_times=header.reconsume_times or 0,
            )
            stored = self._intake.append_from_client(message)

            # Count it. A prepared message counts for its own topic only when it is committed.
            if retry_group is not None:
                self._retries.count_stored(
                    retry_group, topic, properties["UNIQ_KEY"], message.reconsume_times
                )
            counted_topic = topic
            if message.topic == HALF_TOPIC:
                counted_topic = self._by_name.get(HALF_TOPIC, topic)
            body_bytes = len(command.body)
            counted_topic.messages_in += 1
            counted_topic.bytes_in += (
                body_bytes + stored.properties_bytes + counted_topic.record_bytes
            )
            self.body_size_counts[(body_bytes - 1).bit_length()] += 1
            if "__SHARDINGKEY" in properties:
                counted_name = counted_topic.name
                self.fifo_counts[counted_name] = self.fifo_counts.get(counted_name, 0) + 1

            return self._encode_success(
                command=command,
                queue_id=queue_id,
                queue_offset=stored.queue_offset,
                message_ids=f"{self._id_prefix}{stored.physical_offset:016X}",
                unique_id=properties["UNIQ_KEY"],
                waits_for_sync=_waits_for_sync(properties),
                topic=topic,
                is_known_topic=len(self._topics) == topic_count_before,
                added_fields=message.answer_fields,
            )
        except _SEND_ERRORS as error:
            return self._make_refusal(error)

    def _is_dead_letter(self, group: str, header: SendMessageRequest, version: int) -> bool:
        """Return whether a message that a consumer sends to a retry topic becomes a dead letter.

        It does if no retry is left. It also does if the group consumes in order, because such
        consumers retry by themselves first (spec/remoting.md §17). `version` is the version of the
        client. Raises RequestError if the group does not exist.
        """
        config = self._retries.require_group(group)
        retries_max = max_retries(config, header.reconsume_times_max, version)
        is_ordered = self._retries.locks.is_locked(group)
        return is_ordered or (header.reconsume_times or 0) > retries_max

    def send_batch(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> Durable | Command | Postponed:
        """Answer SEND_BATCH_MESSAGE (320): store each message of a batch as a record.

        The properties of the request (WAIT, an id) are not added to the messages. RocketMQ 5.3.3
        adds them, so that every message of a batch has the id of the batch.

        Return the answer as Durable, or a Command with an error code if no message was stored. For
        a large batch, return Postponed.
        """
        return run_or_postpone(self._send_batch_in_steps(header, command, peer))

    def _send_batch_in_steps(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> WorkItem[Durable | Command]:
        """Store the messages of a batch, and return a Durable answer, or a Command with an error.

        This is a generator, which yields None between the steps of decoding, so that other requests
        can be handled.
        """
        try:
            if header.topic.startswith(RETRY_PREFIX):
                remark = "batch request does not support retry group"
                return self._make_refusal(RequestError(ResponseCode.MESSAGE_ILLEGAL, remark))

            # Check the request as a whole.
            is_known_topic = header.topic in self._topics
            topic = self._find_or_create_topic(header, peer)
            queue_id = self._choose_queue(topic, header.queue_id, peer)
            batch_properties = text.parse_property_text(header.properties or "")
            check_batch_properties(batch_properties)
            _check_transaction_flags(batch_properties, header.sys_flag)

            # Decode the messages, and append them.
            fields = BatchFields(
                header.sys_flag, header.born_time_ms, peer.remote_bytes, self.store_host
            )
            batch = yield from self._intake.prepare_batch(command.body, fields, self._suffix)
            # The broker served other requests between the steps: the topic may be deleted.
            is_topic_gone = self._topics.get(topic.name) is not topic
            if is_topic_gone:
                topic = self._find_or_create_topic(header, peer)
                queue_id = self._choose_queue(topic, header.queue_id, peer)
            message_ids, queue_offset = self._intake.append_batch(
                topic,
                queue_id,
                batch,
                fields,
                self._id_prefix,
                is_brief=BRIEF_FIELD in (command.fields or {}),
            )
            return self._encode_success(
                command=command,
                queue_id=queue_id,
                queue_offset=queue_offset,
                message_ids=message_ids,
                unique_id=batch_properties.get("UNIQ_KEY", ""),
                waits_for_sync=_waits_for_sync(batch_properties),
                topic=topic,
                is_known_topic=is_known_topic,
            )
        except _SEND_ERRORS as error:
            return self._make_refusal(error)

    def _make_refusal(self, error: Exception) -> Command:
        """Count a failed send, and return its answer with a code and remark that report `error`.

        Like RocketMQ's, the answer has the region of the broker, and whether messages are traced
        (spec/traffic item 11).
        """
        if isinstance(error, RequestError):
            remark = error.remark
        elif isinstance(error, MessageIllegalError):
            body_limit = self._settings.store.message_bytes_max
            remark = f"{ILLEGAL_MESSAGE_REMARK.format(body_limit)} {error}"
        else:
            is_full = isinstance(error, StoreFullError)
            remark = str(error) if is_full else f"{type(error).__name__}: {error}"
        self.failure_count += 1
        fields = {"TRACE_ON": self._trace, "MSG_REGION": self._region}
        return Command(choose_response_code(error), fields, remark=remark)

    # -------------------------------------------------------------------- topics and queues

    def _find_or_create_topic(self, header: SendMessageRequest, peer: Peer) -> Topic:
        """Return the topic of a send; create it if that is allowed.

        Raises RequestError if the topic does not exist and cannot be created, if only the broker
        writes to it, or if it is in strict order and the broker accepts no messages.
        """
        name = header.topic
        if is_broker_written_topic(name):
            raise RequestError(
                ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden."
            )
        topic = self._topics.get(name)
        if topic is None:
            topic = self._create_topic(header)
        # Routes already direct producers to other brokers. Only a topic in strict order has to be
        # refused here (spec/remoting.md §16).
        if topic.config.order and not self._settings.broker.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._settings.broker.broker_name}] sending message is forbidden",
            )
        return topic

    def _create_topic(self, header: SendMessageRequest) -> Topic:
        """Create the topic of a send, and return it.

        Raises RequestError if its name is invalid or the broker does not create topics for sends.
        """
        name = header.topic
        fault = find_topic_name_fault(name, self._settings.broker.topic_length_max)
        if fault is not None:
            raise RequestError(ResponseCode.INVALID_PARAMETER, fault)
        topic = self._topics.create_for_send(
            name, header.default_topic, header.default_topic_queues
        )
        if topic is None:
            raise RequestError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{name}] not exist, apply first please!\n{FAQ}",
            )
        return topic

    def _choose_queue(self, topic: Topic, queue_id: int, peer: Peer) -> int:
        """Return `queue_id`, or the id of the next write queue in turn if `queue_id` is negative.

        Raises RequestError if the topic has no such queue.
        """
        if queue_id < 0 and topic.config.write_queues > 0:
            self._next_queue += 1
            return self._next_queue % topic.config.write_queues
        if not 0 <= queue_id < topic.queues:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{queue_id}] is illegal, {topic} Producer: {peer.remote}",
            )
        return queue_id

    # -------------------------------------------------------------------------------- answers

    def _encode_success(
        self,
        *,
        command: Command,
        queue_id: int,
        queue_offset: int,
        message_ids: str,
        unique_id: str,
        waits_for_sync: bool,
        topic: Topic,
        is_known_topic: bool,
        added_fields: Mapping[str, str] = _NO_FIELDS,
    ) -> Durable:
        """Return the answer to a send that was stored.

        `message_ids` are the offset message ids, separated by commas. `unique_id` is the id that
        the producer has chosen, or "". `waits_for_sync` says whether the answer waits for the
        fsync. `is_known_topic` says whether the topic existed before the send: if not, the answer
        waits until the topic is registered. `added_fields` are further fields of the answer.
        """
        if command.is_oneway:
            return Durable(b"", waits_for_sync)
        encoded_fields = b""  # fields of the answer as JSON, each with a comma
        if unique_id:
            # A lone surrogate, which orjson refuses, becomes "?".
            valid_id = unique_id.encode("utf-8", "replace").decode()
            encoded_fields = b'"transactionId":%b,' % orjson.dumps(valid_id)
        if added_fields:
            encoded_fields += orjson.dumps(added_fields)[1:-1] + b","  # without the braces
        header = self._answer_template % (
            queue_id,
            encoded_fields,
            message_ids.encode(),
            queue_offset,
            command.opaque,
        )
        # The length of the frame includes the 4 bytes of the header's length.
        answer = _pack_frame_prefix(len(header) + 4, len(header)) + header
        creates_topic = not is_known_topic and topic.name in self._topics
        return Durable(answer, waits_for_sync, creates_topic=creates_topic)


def _waits_for_sync(properties: dict[str, str]) -> bool:
    """Return whether the producer wants the answer only after the fsync.

    As in Java's Boolean parsing, every value of WAIT except "true" means no. Without WAIT, the
    producer waits.
    """
    return properties.get("WAIT", "true").lower() == "true"


def _check_transaction_flags(properties: dict[str, str], sys_flag: int) -> None:
    """Raise RequestError if `sys_flag` and the property TRAN_MSG contradict each other.

    Otherwise the message might stay invisible forever, because it is stored as prepared without a
    transaction, or be visible at once although its transaction is open.
    """
    transaction_type = sys_flag & TRANSACTION_MASK
    is_prepared = properties.get(TRAN_MSG, "").lower() == "true"
    if transaction_type not in (0, PREPARED) or (transaction_type and not is_prepared):
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the sysFlag {sys_flag:#x} contradicts the property TRAN_MSG="
            f"{properties.get(TRAN_MSG)}. The message was not stored.",
        )
