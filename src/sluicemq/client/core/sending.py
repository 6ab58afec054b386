"""Sending: which queue next, whether to try again, what to say when it failed.

`QueueChooser` goes round robin over the write queues and avoids brokers that were slow or away:
RocketMQ's latency table, by which a broker that took 550 ms is left alone for 2 s, and so on up to
30 s. `Attempts` owns one send: its deadline over all attempts, the retries left, and what the final
error says of each. A time-out is never retried, because the message may be stored. Where no other
broker can take the message and the one that failed has replicas, the send waits, within its time,
for the one of them that becomes master: a failover takes seconds, three attempts milliseconds.
`Sender` has the conversations of a producer.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypedDict

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation, Sleep
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.messages import (
    BODY_BYTES_MAX,
    COMPRESS_FROM_BYTES,
    DELAY_LEVEL_MAX,
    Body,
    Draft,
    Outgoing,
    as_message,
    bare,
    check_batch,
    checked_group,
    join,
    make_draft,
    prepare,
    recalled,
    split,
)
from sluicemq.client.core.names import check_number, check_queue
from sluicemq.client.core.requests import (
    NOT_AVAILABLE,
    SUCCESS,
    SendResult,
    SendStatus,
    expect_success,
    fields_of,
    send_results,
)
from sluicemq.client.core.tracing import Tracing, trace_hint
from sluicemq.client.core.transactions import TransactionListener
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
    SendError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model.ids import java_hash
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
DEFAULT_PRODUCER_GROUP: Final = "sluicemq-producer"
SEND_TIMEOUT_MS: Final = 10_000
RETRIES: Final = 2
FIRST_BITS: Final = 31
"""Of the random number that says which queue is the first one."""
RETRY_CODES: Final = frozenset({17, 14, 1, 2, 16, 204, 205, 1500})
"""spec/remoting.md §7.3: the answers after which another broker may do better."""

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""A user's choice: the write queues of the topic and the message -> one of the queues."""

_LATENCY_S: Final = (0.05, 0.1, 0.55, 1.8, 3.0, 5.0, 15.0)
_AVOID_S: Final = (0.0, 0.0, 2.0, 5.0, 6.0, 10.0, 30.0)
PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 0.5
"""From one look for a new master to the next."""
UNREACHABLE_LATENCY_S: Final = 10.0
"""What a broken connection counts as: 10 s of latency, so the broker is avoided for 10 s."""


def avoid_s(latency_s: float) -> float:
    """How long to leave a broker alone after an answer that took `latency_s` seconds."""
    index = bisect_right(_LATENCY_S, latency_s)
    return _AVOID_S[index - 1] if index else 0.0


class QueueChooser:
    """Round robin over the queues of each topic, past the brokers to be avoided. Times are
    monotonic seconds.

    `first()` is the number of the queue that the first message of a topic goes to. It is random in
    a client, as in Java's: many short-lived producers would else all send to one queue.
    """

    __slots__ = ("_avoid_until_s", "_first", "_next")

    def __init__(self, first: Callable[[], int] = lambda: 1) -> None:
        self._avoid_until_s: dict[str, float] = {}
        self._first = first
        self._next: dict[str, int] = {}

    def choose(
        self,
        queues: Sequence[MessageQueue],
        now_s: float,
        last_broker: str | None = None,
        sharding_key: str | None = None,
    ) -> MessageQueue:
        """The next queue, or that of the key; `last_broker` (of a failed attempt) only when there
        is no other. HOT."""
        if sharding_key:
            return choose_by_key(queues, sharding_key)
        topic = queues[0].topic
        start = self._next.get(topic, -1)
        if start < 0:
            start = self._first()
        self._next[topic] = start + 1
        count = len(queues)
        if not self._avoid_until_s and last_broker is None:
            return queues[start % count]
        others = None
        for step in range(count):
            queue = queues[(start + step) % count]
            if queue.broker != last_broker:
                if self._avoid_until_s.get(queue.broker, 0.0) <= now_s:
                    return queue
                others = others or queue
        return others or queues[start % count]

    def answered(self, broker: str, latency_s: float, now_s: float) -> None:
        """Takes note of how long a broker took."""
        if latency_s < 0.55 and broker not in self._avoid_until_s:
            return
        pause = avoid_s(latency_s)
        if pause:
            self._avoid_until_s[broker] = now_s + pause
        else:
            self._avoid_until_s.pop(broker, None)

    def failed(self, broker: str, now_s: float) -> None:
        """The connection to a broker broke, or it refused the message."""
        self.answered(broker, UNREACHABLE_LATENCY_S, now_s)


def choose_by(selector: Selector, queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """The user's choice, checked. Raises SendError when it is not one of the queues."""
    if not callable(selector):
        raise ConfigurationError(
            f"the selector is {selector!r:.60}.",
            fix="Give a function: (queues, message) -> queue.",
        )
    queue = selector(queues, message)
    if queue not in queues:
        raise SendError(
            f"the selector chose {queue}, which is not one of the {len(queues)} queues of "
            f"{message.topic!r}. Nothing was sent.",
            fix="Return one element of the sequence it is given.",
        )
    return queue


def check_way(topic: str, queue: MessageQueue | None, timeout_ms: int | None = None) -> None:
    """Where a message shall go and within how many ms. Raises ConfigurationError."""
    if queue is not None:
        check_queue(queue)
        if queue.topic != topic:
            raise ConfigurationError(
                f"the message goes to {topic!r}, the queue is one of {queue.topic!r}.",
                fix="Give one of `queues(topic)`.",
            )
    if timeout_ms is not None:
        check_number("timeout_ms", timeout_ms, 1)


def choose_by_key(queues: Sequence[MessageQueue], sharding_key: str) -> MessageQueue:
    """The queue of a key: the one that a Java producer's SelectMessageQueueByHash chooses for this
    text, so that producers of both kinds keep one order. It is another queue as soon as the number
    of queues changes: strict order topics keep it."""
    return queues[abs(java_hash(sharding_key)) % len(queues)]


class Attempts:
    """One send from the first attempt to the verdict. Times are monotonic seconds. The attempt that
    is made now began at `began_s`, at the queue `target`, with `call` once that is made."""

    __slots__ = (
        "_failures", "_left", "_may_retry", "_timeout_ms", "_unknown", "began_s", "call",
        "deadline_s", "is_fixed", "last_broker", "pause_s", "target",
    )  # fmt: skip

    def __init__(self, now_s: float, timeout_ms: int = SEND_TIMEOUT_MS, retries: int = RETRIES):
        self.began_s = now_s
        self.deadline_s = now_s + timeout_ms / 1000
        self.target: MessageQueue | None = None
        self.call: Call | None = None
        self.is_fixed = False
        """Only one queue will do."""
        self._timeout_ms = timeout_ms
        self._left = retries
        self._may_retry = retries > 0
        self._failures: tuple[str, ...] = ()
        self._unknown = False
        self.last_broker: str | None = None
        self.pause_s = 0.0
        """How long to wait before the next attempt."""

    def failed(
        self, broker: str, error: SluiceError, now_s: float, *, written: bool, awaits: bool = False
    ) -> bool:
        """Notes a failed attempt; True when the next one may be made.

        `written` says that the request was (or may have been) handed to the network: then a broken
        connection leaves the outcome open. `awaits`: a new master is waited for, whatever number of
        retries that takes.
        """
        self.last_broker = broker
        if (failure := f"{broker}: {error.fact}") not in self._failures:
            self._failures += (failure,)
        if written and isinstance(error, ConnectionLostError | RequestTimeoutError):
            self._unknown = True
        if isinstance(error, RequestTimeoutError) and written:
            return False
        if isinstance(error, RequestError) and error.code not in RETRY_CODES:
            return False
        if now_s >= self.deadline_s or (isinstance(error, RouteNotFoundError) and not awaits):
            return False
        if awaits and self._may_retry:
            self.pause_s = min(max(2 * self.pause_s, PAUSE_S_MIN), PAUSE_S_MAX)
            return True
        if self._left <= 0:
            return False
        self._left -= 1
        self.pause_s = 0.0
        return True

    def goes_on(self, status: SendStatus, broker: str, now_s: float) -> bool:
        """Whether to try another broker, for one that stored the message and promises less."""
        is_over = status is SendStatus.OK or self._left <= 0 or now_s >= self.deadline_s
        if not is_over:
            self._left, self.last_broker = self._left - 1, broker
        return not is_over

    def verdict(self, topic: str, message_id: str, error: SluiceError) -> SluiceError:
        """The exception to raise after the last attempt; chain it with `from error`."""
        failures = "; ".join(self._failures)
        if self._unknown:
            return SendUnknownError(
                f"no answer for message {message_id} to {topic!r} (time for all attempts "
                f"{self._timeout_ms} ms): it may be stored or not [{failures}].",
                fix="Do not simply send it again unless consumers tolerate duplicates; look it "
                "up by its id first.",
            )
        if isinstance(error, RequestError | RouteNotFoundError):
            return error
        return SendError(
            f"message {message_id} to {topic!r} was not stored [{failures}].",
            fix="See sluice cluster list, and whether the brokers' addresses are reachable.",
        )


class ProducerOptions(TypedDict, total=False):
    """The settings of a producer; without them those of `Producer`.

    `timeout_ms` (10,000): for one send with all its attempts. `retries` (2): how often it is tried
    again; `retries_async` (0): by `send_soon`. `retry_unsafe`: also when it is stored and its
    broker could not keep all it promised, so that another one may have it as well.
    `compress_from_bytes` (4,096): from how many bytes on bodies are compressed, 0 never.
    `delay_level_max` (18): how many delay levels the brokers have. `listener`: who runs and checks
    its transactions.
    """

    timeout_ms: int
    retries: int
    retries_async: int
    retry_unsafe: bool
    compress_from_bytes: int
    delay_level_max: int
    listener: TransactionListener | None


class Sender:
    """The sends of one producer group. `on_first(group, topic)` is called before the first send to
    a topic, `on_settled` when the last open send has ended after `is_closed`."""

    def __init__(
        self,
        directory: Directory,
        group: str,
        next_id: Callable[[], str],
        *,
        timeout_ms: int = SEND_TIMEOUT_MS,
        retries: int = RETRIES,
        retry_unsafe: bool = False,
        compress_from_bytes: int = COMPRESS_FROM_BYTES,
        delay_level_max: int = DELAY_LEVEL_MAX,
        trace: Tracing | None = None,
        first_queue: Callable[[], int] = lambda: 1,
    ) -> None:
        """`first_queue`: see `QueueChooser`."""
        check_number("timeout_ms", timeout_ms, 1)
        check_number("retries", retries, 0)
        check_number("compress_from_bytes", compress_from_bytes, 0)
        check_number("delay_level_max", delay_level_max, 1)
        self.directory = directory
        self.group: str = checked_group(group)
        self.next_id = next_id
        self.timeout_ms = timeout_ms
        self.retries = retries
        self.retry_unsafe = retry_unsafe
        self.prepare: Callable[[Message | Draft, str], Outgoing] = partial(
            prepare, compress_from_bytes=compress_from_bytes, delay_level_max=delay_level_max
        )
        """A message made ready, with an id. Raises ConfigurationError."""
        self._bare_below = min(compress_from_bytes or BODY_BYTES_MAX, BODY_BYTES_MAX)
        """Bodies of fewer bytes stay as they are."""
        self.trace = trace
        self.on_first: Callable[[str, str], None] = lambda group, topic: None
        self.on_settled: Callable[[], None] = lambda: None
        self.open: set[str] = set()
        self.unknown: list[str] = []
        """Of sends that ended after `is_closed`: what may be stored or not."""
        self.is_closed: bool = False
        self._chooser = QueueChooser(first_queue)
        self._topics: set[str] = set()

    def ready(self, message: Message | Draft) -> Outgoing:
        """A message made ready, with an id of its own. Raises ConfigurationError, ClosedError."""
        return self.prepare(message, self.next_id())

    def close(self) -> None:
        """Makes no message ready any more, and tries none again."""

        def refuse(message: Message | Draft, message_id: str) -> Outgoing:
            raise ClosedError("this producer is closed.", fix="Make a new one.")

        self.is_closed, self.prepare, self._bare_below = True, refuse, 0

    def send(
        self,
        outgoing: Outgoing,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        retries: int | None = None,
    ) -> Conversation[SendResult]:
        """Stores one message that is made ready."""
        ids = (outgoing.message_id,)
        return (yield from self.deliver(outgoing, ids, queue, timeout_ms, retries))[0]

    def send_message(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
        flag: int = 0,
        wait_store_ok: bool = True,
    ) -> Conversation[SendResult]:
        """Sends one message and waits until it is stored.

        `topic`: its name with a body of at most 4 MiB, or a whole `Message` and no option of one.
        `tag`: what consumers choose by, no `|` in it. `keys`: what `sluice message query` finds it
        by, without white space. `properties`: texts by name, for SQL92 conditions.

        `queue` fixes the queue, `selector` chooses one for each message, `sharding_key` leads to
        the same one each time; without them it goes round robin and a failed attempt goes to the
        next broker.

        At most one says when to deliver it: `delay_level` (1 to 18 unless the producer's
        `delay_level_max` says otherwise), `delay` (seconds or a timedelta), `deliver_at` (a
        datetime with a time zone, or ms since 1970).

        `timeout_ms`: for all attempts together, by default the producer's 10,000. `flag`: a number
        of yours (32 bits). `wait_store_ok` False: do not wait until it is as safe as the broker
        keeps messages.

        Raises ConfigurationError (it breaks a rule, nothing was sent), RouteNotFoundError,
        NameServerUnreachableError, RequestError (the broker refused it), SendError (not stored) and
        its child SendUnknownError (it may be stored; never resent by itself), ClosedError.
        """
        if (
            topic.__class__ is str
            and body.__class__ is bytes
            and 0 < len(body) < self._bare_below
            and tag is None
            and properties is None
            and selector is None
            and sharding_key is None
            and delay is None
            and deliver_at is None
            and not (keys or delay_level or flag)
            and wait_store_ok
        ):
            outgoing = bare(topic, body, self.next_id())
        else:
            draft = make_draft(
                topic, body, tag=tag, keys=keys, properties=properties, flag=flag,
                wait_store_ok=wait_store_ok, sharding_key=sharding_key, delay_level=delay_level,
                delay=delay, deliver_at=deliver_at,
            )  # fmt: skip
            outgoing = self.prepare(draft, self.next_id())
            if selector is not None:
                queues = yield from self.directory.write_queues(draft.topic)
                queue = choose_by(selector, queues, as_message(draft))
        ids = (outgoing.message_id,)
        if queue is None and timeout_ms is None:
            return (yield from self.deliver(outgoing, ids))[0]
        check_way(outgoing.topic, queue, timeout_ms)
        return (yield from self.deliver(outgoing, ids, queue, timeout_ms))[0]

    def send_oneway(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        queue: MessageQueue | None = None,
        flag: int = 0,
        wait_store_ok: bool = True,
    ) -> Conversation[None]:
        """Hands one message to the network and does not wait for the broker: it may get lost.

        The options are those of `send`. Raises ConfigurationError, RouteNotFoundError,
        NameServerUnreachableError, ConnectionLostError, ClosedError.
        """
        draft = make_draft(
            topic, body, tag=tag, keys=keys, properties=properties, flag=flag,
            wait_store_ok=wait_store_ok, sharding_key=sharding_key, delay_level=delay_level,
            delay=delay, deliver_at=deliver_at,
        )  # fmt: skip
        outgoing = self.ready(draft)
        check_way(outgoing.topic, queue)
        if queue is None:
            queues = yield from self.directory.write_queues(outgoing.topic)
            now_s = self.directory.clock.monotonic_s()
            queue = self._chooser.choose(queues, now_s, None, outgoing.sharding_key)
        address, born_ms = self.directory.master(queue), self.directory.clock.now_ms()
        yield Call(address, requests.send(self.group, queue, outgoing, born_ms, oneway=True))

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> Conversation[list[SendResult]]:
        """Sends messages of one topic in requests of at most 1 MiB each; one result a message.

        Each request is stored all or nothing; when a later one fails, the earlier ones are stored
        and the exception's note tells how many. `queue` and `timeout_ms` are those of `send`, each
        request has that time. Raises SendError before sending when the messages may not be in one
        batch (it names the index), and what `send` raises.
        """
        check_batch(messages)
        check_way(messages[0].topic, queue, timeout_ms)
        parts = [prepare(one, self.next_id(), compress_from_bytes=0) for one in messages]
        results: list[SendResult] = []
        for run in split(parts):
            joined = join(run, self.next_id())
            ids = tuple(part.message_id for part in run)
            try:
                results += yield from self.deliver(joined, ids, queue, timeout_ms, batch=True)
            except SluiceError as error:
                error.add_note(f"{len(results)} of {len(parts)} messages of this batch are stored.")
                raise
        return results

    def deliver(
        self,
        outgoing: Outgoing,
        ids: tuple[str, ...],
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        retries: int | None = None,
        *,
        batch: bool = False,
    ) -> Conversation[list[SendResult]]:
        """One result for each of `ids`; in `queue`, or in one that is chosen for each attempt. HOT.

        Raises RouteNotFoundError, NameServerUnreachableError, RequestError (the broker refused it),
        SendError (not stored), SendUnknownError (it may be stored).
        """
        directory, topic = self.directory, outgoing.topic
        attempts = Attempts(
            directory.clock.monotonic_s(),
            self.timeout_ms if timeout_ms is None else timeout_ms,
            self.retries if retries is None else retries,
        )
        attempts.is_fixed = queue is not None
        self.open.add(outgoing.message_id)
        try:
            while True:
                attempts.target, attempts.call, target = queue, None, queue
                try:
                    if target is not None:
                        yield from directory.route(topic, create=True)
                    else:
                        queues = directory.routes.fresh_writers(topic, attempts.began_s)
                        if not queues:
                            queues = yield from directory.write_queues(topic)
                            attempts.began_s = directory.clock.monotonic_s()
                        attempts.target = target = self._chooser.choose(
                            queues, attempts.began_s, attempts.last_broker, outgoing.sharding_key
                        )
                    if topic not in self._topics:
                        self._topics.add(topic)
                        self.on_first(self.group, topic)
                    address = directory.master(target)
                    command = requests.send(
                        self.group, target, outgoing, directory.clock.now_ms(),
                        batch=batch, is_brief=batch and len(ids) == 1,
                    )  # fmt: skip
                    left_s = max(0.001, attempts.deadline_s - attempts.began_s)
                    attempts.call = Call(address, command, left_s)
                    answer = yield attempts.call
                    results = send_results(answer, target, ids, address)
                except (
                    ConnectionLostError, RequestTimeoutError, RequestError, RouteNotFoundError,
                ) as error:  # fmt: skip
                    self._failed(attempts, outgoing, ids, error, batch)
                    if attempts.pause_s:
                        yield Sleep(attempts.pause_s)
                        attempts.began_s = directory.clock.monotonic_s()
                else:
                    if self._is_enough(attempts, outgoing, results, answer, batch):
                        return results
        finally:
            self.open.discard(outgoing.message_id)
            if self.is_closed and not self.open:
                self.on_settled()

    def _is_enough(
        self,
        attempts: Attempts,
        outgoing: Outgoing,
        results: list[SendResult],
        answer: Command,
        batch: bool,
    ) -> bool:
        """It is stored: False when another broker may promise more. HOT."""
        assert attempts.target is not None
        broker, now_s = attempts.target.broker, self.directory.clock.monotonic_s()
        cost_s, attempts.began_s = now_s - attempts.began_s, now_s
        self._chooser.answered(broker, cost_s, now_s)
        if self.retry_unsafe and attempts.goes_on(results[0].status, broker, now_s):
            return False
        if self.trace is not None:
            address = attempts.call.address if attempts.call is not None else ""
            self.trace.sent(self.group, outgoing, results, address, answer, cost_s, batch=batch)
        return True

    def _failed(
        self,
        attempts: Attempts,
        outgoing: Outgoing,
        ids: tuple[str, ...],
        error: SluiceError,
        batch: bool,
    ) -> None:
        """Raises the verdict when that was the last attempt."""
        now_s = self.directory.clock.monotonic_s()
        cost_s, attempts.began_s = now_s - attempts.began_s, now_s
        if not self._may_go_on(attempts, outgoing, error, now_s):
            if self.trace is not None:
                self.trace.failed(self.group, outgoing, ids, cost_s, batch=batch)
            verdict = attempts.verdict(outgoing.topic, outgoing.message_id, error)
            if self.is_closed and isinstance(verdict, SendUnknownError):
                self.unknown.extend(ids)
            raise verdict from error

    def _may_go_on(
        self, attempts: Attempts, outgoing: Outgoing, error: SluiceError, now_s: float
    ) -> bool:
        """Whether there is another attempt, after a rest where a new master has to be waited for:
        no other broker can take the message, and this one has replicas."""
        directory, topic, call = self.directory, outgoing.topic, attempts.call
        broker = None if attempts.target is None else attempts.target.broker
        if broker is not None:
            self._chooser.failed(broker, now_s)
        is_bound = attempts.is_fixed or bool(outgoing.sharding_key)
        others = {one.broker for one in directory.routes.writers.get(topic, ())} - {broker}
        may_pass = not isinstance(error, RequestError) or error.code == NOT_AVAILABLE
        awaits = (
            may_pass and directory.routes.has_replicas(topic, broker) and (is_bound or not others)
        )
        directory.routes.forget(topic)
        written = call is not None and call.is_written
        again = attempts.failed(
            broker or attempts.last_broker or "-", error, now_s, written=written, awaits=awaits
        )
        return again and not self.is_closed

    def write_traces(self, notes: Tracing) -> Conversation[bool]:
        """Sends all that is noted; False when that failed. Raises nothing."""
        while (batch := notes.take()) is not None:
            try:
                yield from self.directory.route(notes.topic)
                yield from self.send(self.ready(batch.message))
            except Exception as error:  # noqa: BLE001 - a trace must not disturb what it tells of
                notes.lost(batch.record_count)
                level = logging.DEBUG if notes.has_warned else logging.WARNING
                notes.has_warned = True
                _log.log(level, "traces cannot be written%s: %s", trace_hint(error), error)
                return False
        return True

    def recall(self, handle: str) -> Conversation[str]:
        """Takes a timed message back by the `recall_handle` of its send; returns its message id.

        Brokers allow it with recallMessageEnable = true. Success means that the message will not be
        delivered if it was there. Raises ConfigurationError when it is no handle, RequestError when
        the broker refuses (too late, switched off).
        """
        found = recalled(handle)
        yield from self.directory.route(found.topic)
        address = self.directory.master(MessageQueue(found.topic, found.broker, 0))
        answer = yield Call(address, requests.recall(self.group, found))
        if self.trace is not None:
            is_taken = answer.code == SUCCESS
            self.trace.recalled(self.group, found.topic, found.unique_id, success=is_taken)
        return fields_of(expect_success(answer, address)).get("msgId", found.unique_id)
