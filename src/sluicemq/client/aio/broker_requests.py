"""Answer the requests that brokers send to a client.

The requests arrive on the heartbeat thread. Those that only read state (221, 307) are answered on
that thread at once: a consumer whose event loop is blocked by a handler can still report what it
does. The others change something or call application code, so the client's event loop answers them:

    CHECK_TRANSACTION_STATE (39)          a producer returns how a transaction ended, by a request
                                          END_TRANSACTION (37)
    NOTIFY_CONSUMER_IDS_CHANGED (40)      the members of a group changed: rebalance now
    RESET_CONSUMER_CLIENT_OFFSET (220)    an operator reset the group: continue at other offsets and
                                          commit these
    GET_CONSUMER_STATUS_FROM_CLIENT (221) up to which offsets everything is acknowledged
    GET_CONSUMER_RUNNING_INFO (307)       what a consumer is doing
    CONSUME_MESSAGE_DIRECTLY (309)        call the handler with one message that an operator chose,
                                          beside its other work, without acknowledging anything
    PUSH_REPLY_MESSAGE_TO_CLIENT (326)    the reply to a request
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.consumer import PushConsumer
from sluicemq.client.aio.members import Member
from sluicemq.client.aio.prefetch import PrefetchBuffer
from sluicemq.client.aio.producer import Producer, Requester
from sluicemq.client.aio.queue_reader import QueueReader, ReaderContext
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.core.consuming import UNDECODABLE_NOTE, ConsumeOptions
from sluicemq.client.core.replies import accept_pushed_reply
from sluicemq.client.core.transactions import parse_check_request
from sluicemq.client.heartbeat_thread import HeartbeatThread, Respond, format_stacks
from sluicemq.client.tasks import EscapedError, Tasks
from sluicemq.errors import ClosedError, ProtocolError, RetryLaterError
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_record
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    ConsumeMessageDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    ResetOffsetRequest,
)

_log = logging.getLogger("sluicemq.client")
REMARK_CHARACTERS_MAX: Final = 2000
"""The maximum length of an error text in a response."""
HANDED_OUT_SHOWN_MAX: Final = 20
"""The number of messages that the running information lists as handed out."""
LoopHandler = Callable[[Command, str], Awaitable[Command | None]]
"""A coroutine function (request, broker address) that runs on the client's event loop.

It returns the response, or None for none.
"""


class Client(Protocol):
    """The parts of a `Sluice` that answering requests needs."""

    client_id: str
    cluster: Cluster

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def member_of(self, group: str) -> Member | None: ...

    def consumers_of(self, group: str) -> Iterable[object]: ...

    def producers_of(self, group: str) -> Iterable[Producer]: ...


class BrokerRequests:
    """Answers the requests that brokers send to one client."""

    def __init__(
        self,
        client: Client,
        tasks: Tasks,
        requester: Requester,
        heartbeat_thread: HeartbeatThread,
        started_ms: int,
    ) -> None:
        """Map the request codes to handlers.

        `client` gives access to the consumers and producers of each group. `tasks` runs handlers on
        the event loop. `requester` has the requests that wait for a reply. `heartbeat_thread` sends
        the answers to transaction checks. `started_ms` is when the client was created, in
        milliseconds since 1970.
        """
        self._client = client
        self._heartbeat_thread = heartbeat_thread
        self._tasks = tasks
        self._requester = requester
        self._started_ms = started_ms
        self._thread_handlers: dict[int, Callable[[Command], Command]] = {
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self.get_consumer_status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.get_running_info,
        }
        self._loop_handlers: dict[int, LoopHandler] = {
            RequestCode.CHECK_TRANSACTION_STATE: self.check_transaction,
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self.rebalance,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self.reset_offsets,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self.accept_reply,
        }

    def handle(self, command: Command, address: str, respond: Respond) -> bool:
        """Answer a request of a broker by calling `respond(response)`, now or later.

        This is called on the heartbeat thread. Requests that only read state are answered at once
        on this thread. Others are answered by a task on the client's event loop. Some requests have
        no response, and `respond` is not called. If a handler fails, the response has the text of
        its error.

        Returns False if this client does not support the request, or has no event loop to answer
        it.
        """
        thread_handler = self._thread_handlers.get(command.code)
        if thread_handler is not None:
            try:
                respond(thread_handler(command))
            except Exception as error:  # noqa: BLE001 - reported to the broker
                respond(_make_error_response(error))
            return True

        loop_handler = self._loop_handlers.get(command.code)
        loop = self._client.loop
        if loop_handler is None or loop is None or loop.is_closed():
            return False

        def start_answering() -> None:
            answering = _answer(loop_handler, command, address, respond)
            with contextlib.suppress(ClosedError):  # the client is being closed
                self._tasks.spawn(answering, "sluicemq answer to a broker")

        loop.call_soon_threadsafe(start_answering)
        return True

    async def check_transaction(self, command: Command, address: str) -> None:
        """Answer a broker's question for the state of a transaction (CHECK_TRANSACTION_STATE, 39).

        The producers of the group are tried until one knows the state. If none does, nothing is
        sent, and the broker asks another client.
        """
        check = parse_check_request(command)
        for producer in self._client.producers_of(check.location.group):
            conversation = producer.transactions.answer_check(check, address)
            end_request = await self._client.cluster.run(conversation)
            if end_request is not None:
                self._heartbeat_thread.send_oneway(address, end_request)
                return

    async def rebalance(self, command: Command, address: str) -> None:
        """Rebalance the group, for NOTIFY_CONSUMER_IDS_CHANGED (40).

        That request has no response.
        """
        member = self._client.member_of((command.fields or {}).get("consumerGroup", ""))
        if member is not None:
            member.schedule_rebalance()

    # ----------------------------------------------------------------------------- offsets

    async def reset_offsets(self, command: Command, address: str) -> None:
        """Let the consumers of a group read on at the offsets that a broker sends (request 220).

        The request RESET_CONSUMER_CLIENT_OFFSET has no response. Does nothing if this client has no
        consumer of the group.
        """
        header = decode_header(ResetOffsetRequest, command.fields)
        member = self._client.member_of(header.group)
        if member is not None:
            await member.readers.reset_offsets(bodies.decode_queue_offsets(command.body))

    def get_consumer_status(self, command: Command) -> Command:
        """Return the response to GET_CONSUMER_STATUS_FROM_CLIENT (221).

        It has, for each queue of a topic that this client reads, the offset below which all
        messages are acknowledged.
        """
        header = decode_header(GetConsumerStatusRequest, command.fields)
        member = self._client.member_of(header.group)
        readers = [] if member is None else member.readers.all_readers()
        offsets = {
            reader.queue: reader.in_flight.committable
            for reader in readers
            if reader.queue.topic == header.topic
        }
        return Command(ResponseCode.SUCCESS, body=bodies.encode_client_offsets(offsets))

    # ------------------------------------------------------------------------- running info

    def get_running_info(self, command: Command) -> Command:
        """Return the response to GET_CONSUMER_RUNNING_INFO (307): what a group's consumers do.

        It has RocketMQ's fields, and SluiceMQ's own notes: unacknowledged messages (the oldest
        first), numbers of workers, and undecodable messages. It is an error if this client has no
        consumer of the group.
        """
        header = decode_header(GetConsumerRunningInfoRequest, command.fields)
        member = self._client.member_of(header.group)
        if member is None:
            return Command(
                ResponseCode.SYSTEM_ERROR,
                remark=f"the client {self._client.client_id} is not a member of {header.group}",
            )
        now_s = self._client.cluster.clock.monotonic_s()
        running_info = bodies.RunningInfo(
            self._collect_properties(member),
            tuple(member.subscriptions.values()),
            dict(self._list_queue_states(member)),
            {topic: stats.rates(now_s) for topic, stats in member.readers.stats.items()},
            format_stacks(self._client.loop) if header.stack_enable else None,
            self._collect_notes(member, now_s),
        )
        return Command(ResponseCode.SUCCESS, body=bodies.encode_running_info(running_info))

    def _collect_notes(self, member: Member, now_s: float) -> dict[str, str]:
        """Return SluiceMQ's own entries of the running information, as name -> text.

        "messagesOut" is the number of messages that handlers have; "out00", "out01" … describe the
        oldest of them. "workersLive" and "workersWanted" are how many workers run and should run.
        There is one entry for each topic with undecodable messages. `now_s` is in monotonic
        seconds.
        """
        readers = member.readers.all_readers()
        handed_out = [message for reader in readers for message in tuple(reader.handed_out)]
        handed_out.sort(key=lambda message: message.handed_out_s)
        notes = {"messagesOut": str(len(handed_out))}
        consumers = self._find_running_consumers(member.group)
        if consumers:
            notes["workersLive"] = str(sum(consumer.live_workers for consumer in consumers))
            notes["workersWanted"] = str(sum(consumer.concurrency for consumer in consumers))
        for index, message in enumerate(handed_out[:HANDED_OUT_SHOWN_MAX]):
            notes[f"out{index:02d}"] = _describe_handed_out(message, now_s)
        for topic, stats in member.readers.stats.items():
            if stats.undecodable_count:
                undecodable = f"{stats.undecodable_count}; {stats.last_undecodable_error}"
                notes[f"{UNDECODABLE_NOTE}{topic}"] = undecodable
        return notes

    def _find_running_consumers(self, group: str) -> list[PushConsumer]:
        """Return the running consumers of a group that have a handler; [] without any."""
        return [
            consumer
            for consumer in self._client.consumers_of(group)
            if isinstance(consumer, PushConsumer) and consumer.is_running
        ]

    def _collect_properties(self, member: Member) -> dict[str, str]:
        """Return the options and state of a group's consumers, by the names of Java's client."""
        options = member.options
        name_servers = "".join(f"{address};" for address in self._client.cluster.name_servers)
        consume_type = bodies.CONSUME_PASSIVELY if member.has_retries else bodies.CONSUME_ACTIVELY
        message_model = bodies.BROADCASTING if options.broadcast else bodies.CLUSTERING
        handler_count = 0
        for consumer in self._client.consumers_of(member.group):
            if isinstance(consumer, PushConsumer):
                handler_count += consumer.concurrency
        return {
            "PROP_NAMESERVER_ADDR": name_servers,
            "PROP_CONSUME_TYPE": consume_type,
            "PROP_CLIENT_VERSION": "V5_3_3",
            "PROP_CONSUMEORDERLY": str(options.ordered).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(handler_count),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
            "language": "PYTHON",
            "consumerGroup": member.group,
            "messageModel": message_model,
            "consumeFromWhere": options.consume_from,
            "pullBatchSize": str(options.pull_count),
            "pullThresholdForQueue": str(options.count_max),
            "pullThresholdSizeForQueue": str(options.bytes_max >> 20),
            "persistConsumerOffsetInterval": str(int(options.commit_period_s * 1000)),
            "autoCommit": str(options.auto_commit).lower(),
        }

    def _list_queue_states(
        self, member: Member
    ) -> Iterable[tuple[MessageQueue, bodies.QueueState]]:
        """Yield (queue, state) for each queue that the member reads, sorted by queue.

        This runs on the heartbeat thread, so the member may stop reading a queue meanwhile. Such a
        queue is left out.
        """
        clock = self._client.cluster.clock
        now_s = clock.monotonic_s()
        now_ms = clock.now_ms()

        def to_unix_ms(monotonic_s: float) -> int:
            """Return monotonic seconds as milliseconds since 1970, and 0 for 0."""
            if not monotonic_s:
                return 0
            return now_ms - int((now_s - monotonic_s) * 1000)

        for queue in sorted(member.readers.queues):
            reader = member.readers.get(queue)
            if reader is not None:
                is_locked = member.options.ordered and reader.may_commit
                yield queue, _make_queue_state(reader, is_locked, to_unix_ms)

    # ---------------------------------------------------------------------------- one message

    async def consume_directly(self, command: Command, address: str) -> Command:
        """Call a group's handler with the message in the request CONSUME_MESSAGE_DIRECTLY (309).

        An operator sends it to test a handler. The response says how the handler processed the
        message. Nothing is acknowledged or committed. The response is SYSTEM_ERROR (1) if this
        client has no handler for the group.
        """
        header = decode_header(ConsumeMessageDirectlyRequest, command.fields)
        consumers = self._find_running_consumers(header.group)
        if not consumers:
            return Command(
                ResponseCode.SYSTEM_ERROR,
                remark=f"the client {self._client.client_id} has no handler for {header.group}: it "
                "consumes with a stream or by polling",
            )
        consumer = consumers[0]
        record = decode_record(command.body, broker=header.broker or "")
        clock = self._client.cluster.clock
        started_s = clock.monotonic_s()
        outcome, remark = await self._call_handler(consumer, record)
        spent_ms = int((clock.monotonic_s() - started_s) * 1000)
        direct_result = bodies.DirectResult(outcome, remark, spent_ms, consumer.is_ordered)
        return Command(ResponseCode.SUCCESS, body=bodies.encode_direct_result(direct_result))

    async def _call_handler(
        self, consumer: PushConsumer, record: StoredMessage
    ) -> tuple[bodies.ConsumeResult, str | None]:
        """Call a consumer's handler with one message, and return (outcome, remark or None).

        The outcome is SUCCESS, LATER if the handler rejects the message, or EXCEPTION. The remark
        is the text of the error.
        """
        origin = DirectReader(self._client.cluster, consumer.group, record)
        message = ReceivedMessage(record, origin, origin.in_flight, record.queue_offset)
        try:
            await consumer.call_handler(message)
        except RetryLaterError as later:
            return bodies.ConsumeResult.LATER, str(later)
        except Exception as failure:  # noqa: BLE001 - a handler may raise anything
            error = failure.error if isinstance(failure, EscapedError) else failure
            remark = f"{type(error).__name__}: {error}"[:REMARK_CHARACTERS_MAX]
            return bodies.ConsumeResult.EXCEPTION, remark
        if origin.is_rejected:
            return bodies.ConsumeResult.LATER, None
        return bodies.ConsumeResult.SUCCESS, None

    async def accept_reply(self, command: Command, address: str) -> Command:
        """Pass a reply to the request that waits for it, for PUSH_REPLY_MESSAGE_TO_CLIENT (326)."""
        return accept_pushed_reply(command, self._requester.pending_replies)


def _make_queue_state(
    reader: QueueReader, is_locked: bool, to_unix_ms: Callable[[float], int]
) -> bodies.QueueState:
    """Return the state of a queue for the running information.

    `is_locked` says whether the consumer has the queue lock of an ordered group. `to_unix_ms`
    converts monotonic seconds to milliseconds since 1970.
    """
    in_flight = reader.in_flight
    first_unacknowledged = in_flight.committable
    has_messages = in_flight.count > 0
    committed = reader.committed_offset
    return bodies.QueueState(
        commit_offset=first_unacknowledged if committed is None else committed,
        cached_count=in_flight.count,
        cached_min=first_unacknowledged if has_messages else 0,
        cached_max=in_flight.position - 1 if has_messages else 0,
        cached_mib=in_flight.size_bytes >> 20,
        locked=is_locked,
        last_pull_ms=to_unix_ms(reader.last_pull_s),
        last_consume_ms=to_unix_ms(reader.stats.last_consume_s),
    )


def _describe_handed_out(message: ReceivedMessage, now_s: float) -> str:
    """Return a text with the id and place of a message, and for how long the application has it.

    `now_s` is in monotonic seconds.
    """
    record = message.record
    return (
        f"{record.message_id} of {record.topic} queue {record.queue_id} offset "
        f"{record.queue_offset}, for {now_s - message.handed_out_s:.1f} s"
    )


class DirectReader(QueueReader):
    """The origin of a message that is handled directly. It acknowledges and commits nothing.

    `is_rejected` says whether the handler rejected the message.
    """

    def __init__(self, cluster: Cluster, group: str, record: StoredMessage) -> None:
        """Create a reader that reads no queue; its only message is `record`.

        The message is handed to the handler of `group`, which may acknowledge or reject it.
        """
        queue = MessageQueue(record.topic, record.broker, record.queue_id)
        context = ReaderContext(cluster, group, ConsumeOptions())
        super().__init__(
            context, queue, Subscription(record.topic), PrefetchBuffer(), record.queue_offset
        )
        self.in_flight.add([(record.queue_offset, record.size_bytes)], record.queue_offset + 1)
        self.is_rejected: bool = False

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """Set `is_rejected`, and send nothing."""
        self.is_rejected = True
        return True


async def _answer(handler: LoopHandler, command: Command, address: str, respond: Respond) -> None:
    """Call the handler of a broker's request, and pass its result to `respond`.

    An error is logged, and becomes an error response. A handler that returns None sends no
    response.
    """
    try:
        response = await handler(command, address)
    except Exception as error:  # noqa: BLE001 - logged and reported to the broker
        _log.warning("cannot answer a request of the broker %s: %s", address, error)
        response = _make_error_response(error)
    if response is not None:
        respond(response)


def _make_error_response(error: Exception) -> Command:
    """Return the response SYSTEM_ERROR with the text of `error`, cut to `REMARK_CHARACTERS_MAX`."""
    remark = f"{type(error).__name__}: {error}"
    if isinstance(error, ProtocolError):
        remark = str(error)
    return Command(ResponseCode.SYSTEM_ERROR, remark=remark[:REMARK_CHARACTERS_MAX])
