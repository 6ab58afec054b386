"""What brokers ask of a client that consumes or sends: 39, 40, 220, 221, 307, 309, 326.

The questions come on the keeper's thread. Who only looks (221, 307) is answered there at once, so a
consumer whose loop is blocked by a handler can be asked what it does. Who changes or calls
something is answered by the client's own loop:

    39    how a transaction ended; 37 says it
    40    the members of a group changed: balance now
    220   a reset: the queues that are read here go on at other offsets, which are committed
    309   handle this message now: the handler is called beside its other work, and nothing is
          acknowledged by it
    326   a reply has come
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
HANDED_OUT_SHOWN_MAX: Final = 20
LoopHandler = Callable[[Command, str], Awaitable[Command | None]]


class Client(Protocol):
    """What this needs of a `Sluice`."""

    client_id: str
    cluster: Cluster

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def member_of(self, group: str) -> Member | None: ...

    def consumers_of(self, group: str) -> Iterable[object]: ...

    def producers_of(self, group: str) -> Iterable[Producer]: ...


class BrokerRequests:
    """Answers the brokers of one client."""

    def __init__(
        self,
        client: Client,
        tasks: Tasks,
        requester: Requester,
        heartbeat_thread: HeartbeatThread,
        started_ms: int,
    ) -> None:
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
        """Called on the keeper's thread; False when it is not one of these questions."""
        here = self._thread_handlers.get(command.code)
        if here is not None:
            try:
                respond(here(command))
            except Exception as error:  # noqa: BLE001 -- whatever it is, the broker hears of it
                respond(_error_response(error))
            return True
        work = self._loop_handlers.get(command.code)
        loop = self._client.loop
        if work is None or loop is None or loop.is_closed():
            return False

        async def run() -> None:
            try:
                found = await work(command, address)
            except Exception as error:  # noqa: BLE001
                _log.warning(
                    "a question of the broker %s could not be answered: %s", address, error
                )
                found = _error_response(error)
            if found is not None:
                respond(found)

        def begin() -> None:
            with contextlib.suppress(ClosedError):  # the client closes
                self._tasks.spawn(run(), "sluicemq answer to a broker")

        loop.call_soon_threadsafe(begin)
        return True

    async def check_transaction(self, command: Command, address: str) -> None:
        """39, by the first producer of the group that knows; by nobody, and the broker asks another
        client."""
        question = parse_check_request(command)
        for producer in self._client.producers_of(question.location.group):
            talk = producer.transactions.answer_check(question, address)
            found = await self._client.cluster.run(talk)
            if found is not None:
                self._heartbeat_thread.send_oneway(address, found)
                return

    async def rebalance(self, command: Command, address: str) -> None:
        """40, one-way."""
        member = self._client.member_of((command.fields or {}).get("consumerGroup", ""))
        if member is not None:
            member.schedule_rebalance()

    # ----------------------------------------------------------------------------- offsets

    async def reset_offsets(self, command: Command, address: str) -> None:
        """220, one-way."""
        header = decode_header(ResetOffsetRequest, command.fields)
        member = self._client.member_of(header.group)
        if member is not None:
            await member.readers.reset_offsets(bodies.decode_queue_offsets(command.body))

    def get_consumer_status(self, command: Command) -> Command:
        """221: up to where everything is acknowledged here."""
        header = decode_header(GetConsumerStatusRequest, command.fields)
        member = self._client.member_of(header.group)
        readers = [] if member is None else member.readers.all_readers()
        own = [reader for reader in readers if reader.queue.topic == header.topic]
        found = {reader.queue: reader.in_flight.committable for reader in own}
        return Command(ResponseCode.SUCCESS, body=bodies.encode_client_offsets(found))

    # ------------------------------------------------------------------------- running info

    def get_running_info(self, command: Command) -> Command:
        """307."""
        header = decode_header(GetConsumerRunningInfoRequest, command.fields)
        member = self._client.member_of(header.group)
        if member is None:
            return Command(
                ResponseCode.SYSTEM_ERROR,
                remark=f"the client {self._client.client_id} is not a member of {header.group}",
            )
        now_s = self._client.cluster.clock.monotonic_s()
        # Which messages the application has now, the oldest first.
        out = [one for reader in member.readers.all_readers() for one in tuple(reader.handed_out)]
        out.sort(key=lambda message: message.handed_out_s)
        workers = [one for one in self._client.consumers_of(header.group)
                   if isinstance(one, PushConsumer) and one.is_running]  # fmt: skip
        notes = {"messagesOut": str(len(out))}
        if workers:
            notes["workersLive"] = str(sum(one.live_workers for one in workers))
            notes["workersWanted"] = str(sum(one.concurrency for one in workers))
        for number, message in enumerate(out[:HANDED_OUT_SHOWN_MAX]):
            record = message.record
            notes[f"out{number:02d}"] = (
                f"{record.message_id} of {record.topic} queue {record.queue_id} offset "
                f"{record.queue_offset}, for {now_s - message.handed_out_s:.1f} s"
            )
        for topic, counts in member.readers.stats.items():
            if counts.undecodable_count:
                notes[f"{UNDECODABLE_NOTE}{topic}"] = (
                    f"{counts.undecodable_count}; {counts.last_undecodable_error}"
                )
        info = bodies.RunningInfo(
            self._properties(member),
            tuple(member.subscriptions.values()),
            dict(self._queues(member)),
            {topic: counts.rates(now_s) for topic, counts in member.readers.stats.items()},
            format_stacks(self._client.loop) if header.stack_enable else None,
            notes,
        )
        return Command(ResponseCode.SUCCESS, body=bodies.encode_running_info(info))

    def _properties(self, member: Member) -> dict[str, str]:
        options = member.options
        consumers = list(self._client.consumers_of(member.group))
        threads = [one.concurrency for one in consumers if isinstance(one, PushConsumer)]
        return {
            "PROP_NAMESERVER_ADDR": "".join(f"{it};" for it in self._client.cluster.name_servers),
            "PROP_CONSUME_TYPE": (
                bodies.CONSUME_PASSIVELY if member.has_retries else bodies.CONSUME_ACTIVELY
            ),
            "PROP_CLIENT_VERSION": "V5_3_3",
            "PROP_CONSUMEORDERLY": str(options.ordered).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(sum(threads)),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
            "language": "PYTHON",
            "consumerGroup": member.group,
            "messageModel": bodies.BROADCASTING if options.broadcast else bodies.CLUSTERING,
            "consumeFromWhere": options.consume_from,
            "pullBatchSize": str(options.pull_count),
            "pullThresholdForQueue": str(options.count_max),
            "pullThresholdSizeForQueue": str(options.bytes_max >> 20),
            "persistConsumerOffsetInterval": str(int(options.commit_period_s * 1000)),
            "autoCommit": str(options.auto_commit).lower(),
        }

    def _queues(self, member: Member) -> Iterable[tuple[MessageQueue, bodies.QueueState]]:
        now_s, now_ms = (
            self._client.cluster.clock.monotonic_s(),
            self._client.cluster.clock.now_ms(),
        )

        def time_ms(at_s: float) -> int:
            return now_ms - int((now_s - at_s) * 1000) if at_s else 0

        for queue in sorted(member.readers.queues):
            reader = member.readers.get(queue)
            if reader is None:
                continue
            flight = reader.in_flight
            first, behind = flight.committable, flight.position
            yield (
                queue,
                bodies.QueueState(
                    first if reader.committed_offset is None else reader.committed_offset,
                    flight.count,
                    first if flight.count else 0,
                    behind - 1 if flight.count else 0,
                    flight.size_bytes >> 20,
                    locked=member.options.ordered and reader.may_commit,
                    last_pull_ms=time_ms(reader.last_pull_s),
                    last_consume_ms=time_ms(reader.stats.last_consume_s),
                ),
            )

    # ---------------------------------------------------------------------------- one message

    async def consume_directly(self, command: Command, address: str) -> Command:
        """309."""
        header = decode_header(ConsumeMessageDirectlyRequest, command.fields)
        handlers = (
            one
            for one in self._client.consumers_of(header.group)
            if isinstance(one, PushConsumer) and one.is_running
        )
        consumer = next(handlers, None)
        if consumer is None:
            return Command(
                ResponseCode.SYSTEM_ERROR,
                remark=f"the client {self._client.client_id} has no handler for {header.group}: it "
                "takes messages by itself, from a stream or by polling",
            )
        record = decode_record(command.body, broker=header.broker or "")
        origin = DirectReader(self._client.cluster, consumer.group, record)
        began_s = self._client.cluster.clock.monotonic_s()
        kind, remark = bodies.ConsumeResult.SUCCESS, None
        try:
            await consumer.call_handler(
                ReceivedMessage(record, origin, origin.in_flight, record.queue_offset)
            )
            if origin.is_rejected:
                kind = bodies.ConsumeResult.LATER
        except RetryLaterError as later:
            kind, remark = bodies.ConsumeResult.LATER, str(later)
        except Exception as failure:  # noqa: BLE001 - a handler may raise anything
            error = failure.error if isinstance(failure, EscapedError) else failure
            kind = bodies.ConsumeResult.EXCEPTION
            remark = f"{type(error).__name__}: {error}"[:REMARK_CHARACTERS_MAX]
        spent_ms = int((self._client.cluster.clock.monotonic_s() - began_s) * 1000)
        result = bodies.DirectResult(kind, remark, spent_ms, consumer.is_ordered)
        return Command(ResponseCode.SUCCESS, body=bodies.encode_direct_result(result))

    async def accept_reply(self, command: Command, address: str) -> Command:
        """326."""
        return accept_pushed_reply(command, self._requester.pending_replies)


class DirectReader(QueueReader):
    """The origin of a message that is handled on request: nothing follows from what becomes of
    it."""

    def __init__(self, cluster: Cluster, group: str, record: StoredMessage) -> None:
        queue = MessageQueue(record.topic, record.broker, record.queue_id)
        reading = ReaderContext(cluster, group, ConsumeOptions())
        super().__init__(
            reading, queue, Subscription(record.topic), PrefetchBuffer(), record.queue_offset
        )
        self.in_flight.add([(record.queue_offset, record.size_bytes)], record.queue_offset + 1)
        self.is_rejected: bool = False

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        self.is_rejected = True
        return True


def _error_response(error: Exception) -> Command:
    """An answer that says what went wrong here."""
    text = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
    return Command(ResponseCode.SYSTEM_ERROR, remark=text[:REMARK_CHARACTERS_MAX])
