"""The asyncio producer.

Every `await send()` is independent: ten thousand of them may wait at once, they share one
connection a broker, and the frames of one loop turn leave in one write. What decides (checks,
queue choice, retries, deadline, the words of an error) is `client.core`; here is only the waiting.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.replies import Requester
from sluicemq.client.aio.transactions import Transaction, Transactions
from sluicemq.client.core import messages as batches
from sluicemq.client.core import requests
from sluicemq.client.core.answers import (
    SUCCESS,
    SendResult,
    expect_success,
    fields_of,
    send_results,
)
from sluicemq.client.core.messages import (
    COMPRESS_FROM_BYTES,
    DELAY_LEVEL_MAX,
    Outgoing,
    checked_group,
    make_message,
    prepare,
    recalled,
)
from sluicemq.client.core.names import signed
from sluicemq.client.core.replies import REPLY_TIMEOUT_S
from sluicemq.client.core.sending import (
    RETRIES,
    SEND_TIMEOUT_MS,
    Attempts,
    QueueChooser,
    Selector,
    choose_by,
    choose_by_key,
)
from sluicemq.client.core.tracing import Tracing
from sluicemq.client.core.transactions import TransactionListener, TransactionResult
from sluicemq.client.identity import MessageIds
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model.message import Message, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")

DEFAULT_GROUP = "sluicemq-producer"
OnDone = Callable[[SendResult | None, SluiceError | None], None]


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What `close` found: sends that were settled while it waited, and ids of messages of which
    nobody knows whether they are stored."""

    settled: int
    unknown: tuple[str, ...]


class Producer:
    """Sends messages of one producer group.

    Errors of every send: ConfigurationError (the message breaks a rule, nothing was sent),
    RouteNotFoundError, NameServerUnreachableError, RequestError (the broker refused it), SendError
    (not stored) and its child SendUnknownError (it may be stored; never resent by itself).
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        group: str = DEFAULT_GROUP,
        timeout_ms: int = SEND_TIMEOUT_MS,
        retries: int = RETRIES,
        retries_async: int = 0,
        compress_from_bytes: int = COMPRESS_FROM_BYTES,
        delay_level_max: int = DELAY_LEVEL_MAX,
        listener: TransactionListener | None = None,
        on_first: Callable[[str, str], None] = lambda group, topic: None,
        trace: Tracing | None = None,
        requester: Requester | None = None,
    ) -> None:
        self.group = checked_group(group)
        self.transactions = Transactions(cluster, self.group, listener)
        self.trace = self.transactions.trace = trace
        self.timeout_ms = timeout_ms
        self.retries = retries
        self.retries_async = retries_async
        self.compress_from_bytes = compress_from_bytes
        self.delay_level_max = delay_level_max
        self._cluster = cluster
        self._ids = MessageIds(cluster.clock)
        self._chooser = QueueChooser()
        self._open: set[str] = set()
        self._unknown: list[str] = []
        self._settled = asyncio.Event()
        self._closed = False
        self._callbacks: set[asyncio.Task[None]] = set()
        self._on_first = on_first
        self._requester = requester
        self._known: set[str] = set()

    async def send(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
        **rare: Any,
    ) -> SendResult:
        """Sends one message and waits until it is stored.

        `queue` fixes the queue, `selector` chooses one for each message, `sharding_key` leads to
        the same one each time; without them it goes round robin and a failed attempt goes to the
        next broker. `rare`: flag, wait_store_ok, sharding_key, and when to deliver: delay_level (1
        to 18 unless `delay_level_max` says otherwise), delay (seconds or timedelta) or deliver_at
        (datetime or ms since 1970).
        """
        message = self._message(topic, body, tag, keys, properties, rare)
        outgoing = self._prepare(message)
        if selector is not None:
            queue = choose_by(selector, await self._cluster.write_queues(message.topic), message)
        ids = (outgoing.message_id,)
        attempts = self._attempts(timeout_ms, self.retries)
        return (await self._tracked(outgoing, ids, queue, attempts))[0]

    def send_soon(
        self, on_done: OnDone, topic: str | Message, body: bytes | str | None = None, **rest: Any
    ) -> None:
        """RocketMQ's asynchronous send: returns at once, calls `on_done(result, error)` later.

        One attempt only (`retries_async`), as RocketMQ counts it. Bad messages raise here.
        """
        queue, timeout_ms = rest.pop("queue", None), rest.pop("timeout_ms", None)
        outgoing = self._prepare(make_message(topic, body, **rest))
        attempts = self._attempts(timeout_ms, self.retries_async)
        task = asyncio.get_running_loop().create_task(
            self._call_back(on_done, outgoing, queue, attempts), name="sluicemq send_soon"
        )
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def _call_back(
        self, on_done: OnDone, outgoing: Outgoing, queue: MessageQueue | None, attempts: Attempts
    ) -> None:
        try:
            results = await self._tracked(outgoing, (outgoing.message_id,), queue, attempts)
        except SluiceError as error:
            on_done(None, error)
        else:
            on_done(results[0], None)

    async def send_oneway(
        self, topic: str | Message, body: bytes | str | None = None, **rest: Any
    ) -> None:
        """Hands one message to the network and does not wait for the broker: it may get lost."""
        queue = rest.pop("queue", None)
        outgoing = self._prepare(make_message(topic, body, **rest))
        if queue is None:
            queues = await self._cluster.write_queues(outgoing.topic)
            queue = self._choose(outgoing, queues, None)
        channel = await self._cluster.channel(self._cluster.master(queue))
        channel.oneway(self._request(outgoing, queue, batch=False, oneway=True))

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendResult]:
        """Sends messages of one topic in requests of at most 1 MiB each; one result a message.

        Each request is stored all or nothing; when a later one fails, the earlier ones are stored
        and the exception's note tells how many. Raises SendError before sending when the messages
        may not be in one batch; it names the index.
        """
        batches.check_batch(messages)
        parts = [prepare(one, self._ids.next(), compress_from_bytes=0) for one in messages]
        results: list[SendResult] = []
        for run in batches.split(parts):
            joined = batches.join(run, self._ids.next())
            ids = tuple(part.message_id for part in run)
            attempts = self._attempts(timeout_ms, self.retries)
            try:
                results += await self._tracked(joined, ids, queue, attempts, batch=True)
            except SluiceError as error:
                error.add_note(f"{len(results)} of {len(parts)} messages of this batch are stored.")
                raise
        return results

    async def request(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        **options: Any,
    ) -> StoredMessage:
        """Sends a message and waits for the reply of whoever consumes it (`message.reply`).

        `options` are those of `send` but queue and selector. Raises what `send` does, and
        RequestTimeoutError without a reply: it says whether the request is stored. A late reply is
        dropped. ConfigurationError for a producer that was not made by a `Sluice`.
        """
        if self._requester is None:
            raise ConfigurationError(
                "this producer takes no replies.", cure="Make it with `Sluice.producer`."
            )
        outgoing = self._prepare(make_message(topic, body, **options))
        return await self._requester.request(self.group, outgoing, self.send_copy, timeout_s)

    def transaction(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        check_after_s: int | None = None,
        **rare: Any,
    ) -> Transaction:
        """A message that becomes visible when the block commits: see `Transaction`.

        `check_after_s`: ask this group not before so many seconds how it ended (the broker's
        transactionTimeOut without it); a commit that comes later may be refused. Delays are
        refused. Raises ConfigurationError here.
        """
        message = self._message(topic, body, tag, keys, properties, rare)

        async def send(half: Outgoing) -> SendResult:
            attempts = self._attempts(timeout_ms, self.retries)
            return (await self._tracked(half, (half.message_id,), queue, attempts))[0]

        return Transaction(self.transactions, self._prepare(message), send, check_after_s)

    async def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_after_s: int | None = None
    ) -> TransactionResult:
        """RocketMQ's form: stores the half message, lets the listener execute the local
        transaction, tells the broker how that ended. Raises as `send`, and ConfigurationError
        without a listener."""
        self.transactions.expect_listener()
        outgoing = self._prepare(message)
        place, result = await self.transactions.begin(outgoing, check_after_s, self.send_copy)
        return await self.transactions.run(place, result, message, argument)

    async def answer_checks(self, *topics: str) -> None:
        """Makes this producer known to the brokers of the topics before it sends there: they may
        ask its listener about transactions that other processes of the group have left. Without
        topics: to the brokers that create topics. Raises RouteNotFoundError.
        """
        self.transactions.expect_listener()
        for topic in topics or (DEFAULT_TOPIC,):
            await self._cluster.route(topic, create=True)
            self._on_first(self.group, topic)

    async def recall(self, handle: str) -> str:
        """Takes a timed message back by the `recall_handle` of its send; returns its message id.

        Brokers allow it with recallMessageEnable = true. Success means that the message will not be
        delivered if it was there. Raises ConfigurationError when it is no handle, RequestError when
        the broker refuses (too late, switched off).
        """
        found = recalled(handle)
        queue = MessageQueue(found.topic, found.broker, 0)
        await self._cluster.route(found.topic)
        address = self._cluster.master(queue)
        answer = await self._cluster.call(address, requests.recall(self.group, found))
        if self.trace is not None:
            is_taken = answer.code == SUCCESS
            self.trace.recalled(self.group, found.topic, found.unique_id, success=is_taken)
        return fields_of(expect_success(answer, address)).get("msgId", found.unique_id)

    async def send_copy(self, outgoing: Outgoing) -> SendResult:
        """Sends what is made ready already: the copies that consumers send to a retry topic."""
        attempts = self._attempts(None, self.retries)
        return (await self._tracked(outgoing, (outgoing.message_id,), None, attempts))[0]

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues that a message of the topic may go to. Raises RouteNotFoundError."""
        return list(await self._cluster.write_queues(topic))

    def _message(
        self,
        topic: str | Message,
        body: bytes | str | None,
        tag: str | None,
        keys: str | Sequence[str],
        properties: Mapping[str, str] | None,
        rare: Mapping[str, Any],
    ) -> Message:
        if isinstance(topic, Message) and body is None and not rare:
            return topic
        own_keys = keys if isinstance(keys, str) else tuple(keys)
        return make_message(topic, body, tag=tag, keys=own_keys, properties=properties, **rare)

    def _prepare(self, message: Message) -> Outgoing:
        if self._closed:
            raise ClosedError("this producer is closed.", cure="Make a new one.")
        return prepare(
            message,
            self._ids.next(),
            compress_from_bytes=self.compress_from_bytes,
            delay_level_max=self.delay_level_max,
        )

    def _attempts(self, timeout_ms: int | None, retries: int) -> Attempts:
        now_s = self._cluster.clock.monotonic_s()
        return Attempts(now_s, self.timeout_ms if timeout_ms is None else timeout_ms, retries)

    def _choose(
        self, outgoing: Outgoing, queues: Sequence[MessageQueue], last_broker: str | None
    ) -> MessageQueue:
        if outgoing.sharding_key:
            return choose_by_key(queues, outgoing.sharding_key)
        return self._chooser.choose(queues, self._cluster.clock.monotonic_s(), last_broker)

    async def _tracked(
        self,
        outgoing: Outgoing,
        ids: tuple[str, ...],
        queue: MessageQueue | None,
        attempts: Attempts,
        *,
        batch: bool = False,
    ) -> list[SendResult]:
        """`_deliver`, known to `close` while it runs."""
        key = outgoing.message_id
        self._open.add(key)
        try:
            return await self._deliver(outgoing, ids, queue, attempts, batch=batch)
        except SendUnknownError:
            if self._closed:
                self._unknown.extend(ids)
            raise
        finally:
            self._open.discard(key)
            if self._closed and not self._open:
                self._settled.set()

    async def _deliver(
        self,
        outgoing: Outgoing,
        ids: tuple[str, ...],
        queue: MessageQueue | None,
        attempts: Attempts,
        *,
        batch: bool,
    ) -> list[SendResult]:
        cluster, clock = self._cluster, self._cluster.clock
        while True:
            target = queue or self._choose(
                outgoing, await cluster.write_queues(outgoing.topic), attempts.last_broker
            )
            began_s, written = clock.monotonic_s(), False
            try:
                if queue is not None:
                    await cluster.route(queue.topic, create=True)
                if target.topic not in self._known:
                    self._known.add(target.topic)
                    self._on_first(self.group, target.topic)
                address = cluster.master(target)
                channel = await cluster.channel(address)
                written = True
                answer = await channel.call(
                    self._request(outgoing, target, batch=batch),
                    max(0.001, attempts.remaining_s(began_s)),
                )
                results = send_results(answer, target, ids, address)
            except (ConnectionLostError, RequestTimeoutError, RequestError) as error:
                if not self._may_retry(target, outgoing, attempts, error, written=written):
                    if self.trace is not None:
                        cost_s = clock.monotonic_s() - began_s
                        self.trace.failed(self.group, outgoing, ids, cost_s, batch=batch)
                    raise attempts.verdict(outgoing.topic, outgoing.message_id, error) from error
            else:
                done_s = clock.monotonic_s()
                cost_s = done_s - began_s
                self._chooser.answered(target.broker, cost_s, done_s)
                if self.trace is not None:
                    self.trace.sent(
                        self.group, outgoing, results, address, answer, cost_s, batch=batch
                    )
                return results

    def _may_retry(
        self,
        target: MessageQueue,
        outgoing: Outgoing,
        attempts: Attempts,
        error: SluiceError,
        *,
        written: bool,
    ) -> bool:
        now_s = self._cluster.clock.monotonic_s()
        self._chooser.failed(target.broker, now_s)
        self._cluster.routes.forget(outgoing.topic)
        again = attempts.failed(target.broker, error, now_s, written=written)
        return again and not self._closed

    def _request(
        self, outgoing: Outgoing, queue: MessageQueue, *, batch: bool, oneway: bool = False
    ) -> Command:
        command = requests.send(
            self.group,
            queue,
            outgoing.properties,
            outgoing.body,
            sys_flag=outgoing.sys_flag,
            flag=outgoing.flag,
            born_time_ms=self._cluster.clock.now_ms(),
            batch=batch,
            oneway=oneway,
            reconsume_times=outgoing.reconsume_times,
            reconsume_times_max=outgoing.reconsume_times_max,
        )
        return signed(command, self._cluster.credentials)

    async def close(self, timeout_s: float | None = None) -> CloseReport:
        """Refuses new sends, waits until the open ones are settled, reports what stays unknown.

        Waits `timeout_s`, by default as long as sends may take (each has its own deadline). Callers
        of sends that got no answer receive SendUnknownError; their ids stand in the report, as do
        the ids of those that are still open when the wait ends.
        """
        if self._callbacks:
            await asyncio.sleep(0)  # Those that were asked for just now have begun then.
        open_at_start = len(self._open)
        self._closed = True
        if self._open:
            limit_s = self.timeout_ms / 1000 + 1.0 if timeout_s is None else timeout_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._settled.wait()
        unknown = (*self._unknown, *self._open)
        if unknown:
            _log.warning(
                "producer %s closed while %d messages were unanswered; they may be stored: %s",
                self.group,
                len(unknown),
                ", ".join(unknown[:20]),
            )
        return CloseReport(open_at_start - len(self._open), unknown)
