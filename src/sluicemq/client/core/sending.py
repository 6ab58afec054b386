"""Send messages: choose a queue for each attempt, and send until one attempt succeeds.

`QueueChooser` goes round robin over the writable queues of a topic and avoids brokers that were
slow or unreachable. The pauses are those of RocketMQ's latency table: a broker that took 550 ms is
avoided for 2 s, and so on up to 30 s.

`Sender` contains the conversations of a producer. Whether another attempt follows a failed one is
decided in `send_attempts`.
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
    MessageDraft,
    OutgoingMessage,
    check_batch,
    check_group_cached,
    expect_recall_handle,
    join_batch,
    make_draft,
    make_outgoing,
    make_plain_outgoing,
    split_batch,
    to_message,
)
from sluicemq.client.core.names import check_number, check_queue
from sluicemq.client.core.requests import (
    NOT_AVAILABLE,
    SUCCESS,
    SendResult,
    expect_success,
    header_fields,
    parse_send_response,
)
from sluicemq.client.core.send_attempts import RETRIES, SEND_TIMEOUT_MS, SendAttempts
from sluicemq.client.core.tracing import Tracing, trace_hint
from sluicemq.client.core.transactions import TransactionListener
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model.arguments import Body
from sluicemq.model.ids import java_hash
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
DEFAULT_PRODUCER_GROUP: Final = "sluicemq-producer"
FIRST_QUEUE_BITS: Final = 31
"""The size of the random number that selects the queue of a topic's first message."""

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""A queue selector: (writable queues of the topic, message) -> the queue to send to."""

_LATENCY_STEPS_S: Final = (0.05, 0.1, 0.55, 1.8, 3.0, 5.0, 15.0)
_AVOIDANCE_STEPS_S: Final = (0.0, 0.0, 2.0, 5.0, 6.0, 10.0, 30.0)
UNREACHABLE_LATENCY_S: Final = 10.0
"""The latency that a broken connection counts as, so that the broker is avoided for 10 s."""


def avoidance_s(latency_s: float) -> float:
    """Return for how many seconds to avoid a broker whose response took `latency_s` seconds."""
    index = bisect_right(_LATENCY_STEPS_S, latency_s)
    return _AVOIDANCE_STEPS_S[index - 1] if index else 0.0


class QueueChooser:
    """Selects queues round robin for each topic, skipping brokers that are to be avoided.

    Times are monotonic seconds. `choose_first_index()` is called for the first message of a topic,
    and returns the index of its queue. Clients return a random number, as Java's client does:
    otherwise many short-lived producers would all send to the same queue.
    """

    __slots__ = ("_avoid_until_s", "_choose_first_index", "_next_index")

    def __init__(self, choose_first_index: Callable[[], int] = lambda: 1) -> None:
        self._avoid_until_s: dict[str, float] = {}
        self._choose_first_index = choose_first_index
        self._next_index: dict[str, int] = {}

    def choose(
        self,
        queues: Sequence[MessageQueue],
        now_s: float,
        last_broker: str | None = None,
        sharding_key: str | None = None,
    ) -> MessageQueue:
        """Return the queue for the next attempt to send a message. HOT.

        With `sharding_key`, this is always the same queue of `queues`. Otherwise the queues take
        turns. Queues of `last_broker`, where the last attempt failed, are skipped, and so are
        queues of slow brokers. If only these are left, a slow broker is preferred to `last_broker`.
        `now_s` is in monotonic seconds.
        """
        if sharding_key:
            return choose_by_sharding_key(queues, sharding_key)
        topic = queues[0].topic
        start_index = self._next_index.get(topic, -1)
        if start_index < 0:  # the first message of this topic
            start_index = self._choose_first_index()
        self._next_index[topic] = start_index + 1
        queue_count = len(queues)
        if not self._avoid_until_s and last_broker is None:
            return queues[start_index % queue_count]
        first_avoided = None  # used if all other brokers are to be avoided
        for step in range(queue_count):
            queue = queues[(start_index + step) % queue_count]
            if queue.broker != last_broker:
                if self._avoid_until_s.get(queue.broker, 0.0) <= now_s:
                    return queue
                first_avoided = first_avoided or queue
        return first_avoided or queues[start_index % queue_count]

    def record_latency(self, broker: str, latency_s: float, now_s: float) -> None:
        """Avoid a broker for a while if its response took long; stop avoiding it if it did not.

        `latency_s` is how long the response took. A slower response means a longer time.
        """
        if latency_s < 0.55 and broker not in self._avoid_until_s:
            return  # the usual case: nothing to change (see `avoidance_s` for the limit)
        pause = avoidance_s(latency_s)
        if pause:
            self._avoid_until_s[broker] = now_s + pause
        else:
            self._avoid_until_s.pop(broker, None)

    def record_failure(self, broker: str, now_s: float) -> None:
        """Avoid `broker`, whose connection broke or which refused the message."""
        self.record_latency(broker, UNREACHABLE_LATENCY_S, now_s)


def choose_with_selector(
    selector: Selector, queues: Sequence[MessageQueue], message: Message
) -> MessageQueue:
    """Call the application's `selector(queues, message)`, and return the queue that it chooses.

    Raises ConfigurationError if `selector` is not callable, or does not return one of `queues`.
    """
    if not callable(selector):
        raise ConfigurationError(
            f"selector must be a callable (queues, message) -> queue, got {selector!r:.60}.",
            fix="Pass a function that returns one of the queues.",
        )
    queue = selector(queues, message)
    if queue not in queues:
        raise ConfigurationError(
            f"the selector chose {queue}, which is not one of the {len(queues)} queues of "
            f"{message.topic!r}. Nothing was sent.",
            fix="Return an element of the sequence that the selector receives.",
        )
    return queue


def check_destination(
    topic: str, queue: MessageQueue | None, timeout_ms: int | None = None
) -> None:
    """Raise ConfigurationError if the queue or the time-out of a send is invalid.

    `queue` must be a queue of `topic`, and `timeout_ms` a whole number of at least 1. None is valid
    for both.
    """
    if queue is not None:
        check_queue(queue)
        if queue.topic != topic:
            raise ConfigurationError(
                f"the queue belongs to the topic {queue.topic!r}, the message to {topic!r}.",
                fix="Use one of the queues that `queues(topic)` returns.",
            )
    if timeout_ms is not None:
        check_number("timeout_ms", timeout_ms, 1)


def choose_by_sharding_key(queues: Sequence[MessageQueue], sharding_key: str) -> MessageQueue:
    """Return the queue of a sharding key.

    A Java producer selects the same queue for the key with SelectMessageQueueByHash, so producers
    in both languages keep one order. A key moves to another queue when the number of queues
    changes; order topics keep that number.
    """
    return queues[abs(java_hash(sharding_key)) % len(queues)]


class ProducerOptions(TypedDict, total=False):
    """The options of a producer; the defaults are in parentheses.

    - `timeout_ms` (10,000): the time limit of one send with all its attempts.
    - `retries` (2): the number of further attempts of a send.
    - `retries_async` (0): the number of further attempts of `send_soon`.
    - `retry_unsafe` (False): retry a send also if its broker stored the message but could not make
      it as safe as configured. Another broker may then have it as well.
    - `compress_from_bytes` (4,096): the size from which bodies are compressed; 0 means never.
    - `delay_level_max` (18): the number of the brokers' delay levels.
    - `listener` (None): executes and checks the producer's transactions.
    """

    timeout_ms: int
    retries: int
    retries_async: int
    retry_unsafe: bool
    compress_from_bytes: int
    delay_level_max: int
    listener: TransactionListener | None


def make_batch_note(
    stored_count: int, request_count: int, batch_count: int, error: SluiceError
) -> str:
    """Return the text that tells how many messages of a failed batch are stored.

    `stored_count` of the `batch_count` messages are known to be stored. `error` is the failure of
    the next request, which has `request_count` messages. If its outcome is unknown, the text says
    so.
    """
    if not isinstance(error, SendUnknownError):
        return f"{stored_count} of {batch_count} messages of this batch are stored."
    return (
        f"{stored_count} of {batch_count} messages of this batch are known to be stored. The "
        f"outcome of the last request is unknown: its {request_count} messages are all stored, or "
        "none of them."
    )


class Sender:
    """Sends the messages of one producer group.

    `on_first_send(group, topic)` is called before the first send to a topic. After `close`,
    `on_drained()` is called when no send is in progress any more. Both do nothing until the
    producer sets them.
    """

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
        """Check the options and create the sender of one producer group.

        `directory` finds routes. `next_id()` returns a new message id. `trace` records the sends;
        None means no tracing. `first_queue()` returns the index of the first queue to which
        messages of a topic go. The other options are those of `ProducerOptions`. Raises
        ConfigurationError for an invalid option.
        """
        check_number("timeout_ms", timeout_ms, 1)
        check_number("retries", retries, 0)
        check_number("compress_from_bytes", compress_from_bytes, 0)
        check_number("delay_level_max", delay_level_max, 1)
        self.directory = directory
        self.group: str = check_group_cached(group)
        self.next_id = next_id
        self.timeout_ms = timeout_ms
        self.retries = retries
        self.retry_unsafe = retry_unsafe
        self.make_outgoing: Callable[[Message | MessageDraft, str], OutgoingMessage] = partial(
            make_outgoing, compress_from_bytes=compress_from_bytes, delay_level_max=delay_level_max
        )
        """Encodes a message with a given id.

        Raises ConfigurationError, and ClosedError after `close`.
        """
        self._plain_body_bytes = min(compress_from_bytes or BODY_BYTES_MAX, BODY_BYTES_MAX)
        """Bodies of fewer bytes are neither compressed nor too large: they are sent as they are."""
        self.trace = trace
        self.on_first_send: Callable[[str, str], None] = lambda group, topic: None
        self.on_drained: Callable[[], None] = lambda: None
        self.open_ids: set[str] = set()
        """The ids of messages whose send is in progress."""
        self.unknown_ids: list[str] = []
        """Ids of messages that may be stored: their sends failed after `close`."""
        self.is_closed: bool = False
        self._chooser = QueueChooser(first_queue)
        self._announced_topics: set[str] = set()

    def assign_id(self, message: Message | MessageDraft) -> OutgoingMessage:
        """Return the message, encoded with a new id.

        Raises ConfigurationError for an invalid message, and ClosedError after `close`.
        """
        return self.make_outgoing(message, self.next_id())

    def close(self) -> None:
        """Refuse new messages, and make no further attempts for messages in progress.

        A send that is called later raises ClosedError.
        """

        def refuse(message: Message | MessageDraft, message_id: str) -> OutgoingMessage:
            raise ClosedError("this producer is closed.", fix="Create a new producer.")

        self.is_closed = True
        self.make_outgoing = refuse
        # With 0, no body takes the fast path of `send_message`, which does not call make_outgoing.
        self._plain_body_bytes = 0

    def send_outgoing(
        self,
        outgoing: OutgoingMessage,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        retries: int | None = None,
    ) -> Conversation[SendResult]:
        """Send one encoded message and return its result.

        Raises what `send_with_retries` raises.
        """
        ids = (outgoing.message_id,)
        return (yield from self.send_with_retries(outgoing, ids, queue, timeout_ms, retries))[0]

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
        """Send one message and wait until it is stored.

        `topic` is the name of a topic, with a body of at most 4 MiB; or it is a complete `Message`,
        without options of a message. `tag` is what consumers filter by; it contains no `|`. `keys`
        are strings without white space by which `sluice message query` finds the message.
        `properties` are strings by name, for SQL92 filters.

        `queue` is the queue to send to, and `selector` a function that selects it for each message.
        Messages with the same `sharding_key` go to the same queue. Without these, messages go round
        robin to all queues, and after a failed attempt to another broker.

        At most one of these delays the message: `delay_level` (1 to 18 unless the producer's
        `delay_level_max` differs), `delay` (seconds or a timedelta), `deliver_at` (a datetime with
        a time zone, or milliseconds since 1970).

        `timeout_ms` limits all attempts together; the default is the producer's 10,000. `flag` is a
        32-bit number for the application's own use. With `wait_store_ok` False the broker responds
        before the message is as safe as it is configured to keep messages.

        Raises ConfigurationError (an argument is invalid and nothing was sent), RouteNotFoundError,
        NameServerUnreachableError, RequestError (the broker refused the message), SendError (not
        stored) and its subclass SendUnknownError (it may be stored; the client never resends it),
        ClosedError.
        """
        if (
            topic.__class__ is str
            and body.__class__ is bytes
            and 0 < len(body) < self._plain_body_bytes  # never after `close`
            and tag is None
            and properties is None
            and selector is None
            and sharding_key is None
            and delay is None
            and deliver_at is None
            and not (keys or delay_level or flag)
            and wait_store_ok
        ):
            outgoing = make_plain_outgoing(topic, body, self.next_id())
        else:
            draft = make_draft(
                topic,
                body,
                tag=tag,
                keys=keys,
                properties=properties,
                flag=flag,
                wait_store_ok=wait_store_ok,
                sharding_key=sharding_key,
                delay_level=delay_level,
                delay=delay,
                deliver_at=deliver_at,
            )
            outgoing = self.make_outgoing(draft, self.next_id())
            if selector is not None:
                queues = yield from self.directory.get_write_queues(draft.topic)
                queue = choose_with_selector(selector, queues, to_message(draft))
        ids = (outgoing.message_id,)
        if queue is None and timeout_ms is None:
            return (yield from self.send_with_retries(outgoing, ids))[0]
        check_destination(outgoing.topic, queue, timeout_ms)
        return (yield from self.send_with_retries(outgoing, ids, queue, timeout_ms))[0]

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
        """Send one message without waiting for the broker's response, so it may be lost unnoticed.

        The message is given as in `send`: a topic with a body and options, or a `Message`. The
        message goes to `queue`; None means one of the topic's queues. Raises ConfigurationError,
        RouteNotFoundError, NameServerUnreachableError, ConnectionLostError, ClosedError.
        """
        draft = make_draft(
            topic,
            body,
            tag=tag,
            keys=keys,
            properties=properties,
            flag=flag,
            wait_store_ok=wait_store_ok,
            sharding_key=sharding_key,
            delay_level=delay_level,
            delay=delay,
            deliver_at=deliver_at,
        )
        outgoing = self.assign_id(draft)
        check_destination(outgoing.topic, queue)
        if queue is None:
            queues = yield from self.directory.get_write_queues(outgoing.topic)
            now_s = self.directory.clock.monotonic_s()
            queue = self._chooser.choose(queues, now_s, None, outgoing.sharding_key)
        address = self.directory.get_master_address(queue)
        born_ms = self.directory.clock.now_ms()
        command = requests.send(self.group, queue, outgoing, born_ms, oneway=True)
        yield Call(address, command)

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> Conversation[list[SendResult]]:
        """Send messages of one topic in requests of at most 1 MiB each.

        Returns one result for each message, in their order. A request is stored completely or not
        at all. If a request fails, later ones are not sent, and a note of the exception tells how
        many messages are stored. After SendUnknownError those of the failed request may be stored,
        too: the note says how many they are. All messages go to `queue`; None means one of the
        topic's queues for each request. `timeout_ms` is the time for each request.

        Raises ConfigurationError if the messages cannot be in one batch; it names the index, and
        nothing was sent. Also raises what `send` raises.
        """
        check_batch(messages)
        check_destination(messages[0].topic, queue, timeout_ms)
        encoded_messages = [
            make_outgoing(message, self.next_id(), compress_from_bytes=0) for message in messages
        ]
        send_results: list[SendResult] = []
        for request_messages in split_batch(encoded_messages):
            joined = join_batch(request_messages, self.next_id())
            ids = tuple(encoded.message_id for encoded in request_messages)
            try:
                send_results += yield from self.send_with_retries(
                    joined, ids, queue, timeout_ms, batch=True
                )
            except SluiceError as error:
                error.add_note(make_batch_note(len(send_results), len(ids), len(messages), error))
                raise
        return send_results

    def send_with_retries(
        self,
        outgoing: OutgoingMessage,
        ids: tuple[str, ...],
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        retries: int | None = None,
        *,
        batch: bool = False,
    ) -> Conversation[list[SendResult]]:
        """Send one request, with all its attempts, and return one result for each of `ids`. HOT.

        `outgoing` is the message or batch, and `ids` its message ids. Each attempt goes to `queue`;
        None means that each chooses a queue. `timeout_ms` and `retries` None mean the producer's.
        Calls `on_first_send` before the first send to a topic, and `on_drained` after `close` when
        no send is left.

        Raises RouteNotFoundError, NameServerUnreachableError, RequestError (the broker refused it),
        SendError (not stored), SendUnknownError (it may be stored).
        """
        directory = self.directory
        topic = outgoing.topic
        attempts = SendAttempts(
            directory.clock.monotonic_s(),
            self.timeout_ms if timeout_ms is None else timeout_ms,
            self.retries if retries is None else retries,
        )
        attempts.has_fixed_queue = queue is not None
        self.open_ids.add(outgoing.message_id)
        try:
            while True:
                # `_handle_failure` reads both: None in `call` says that nothing was sent.
                attempts.target = target = queue
                attempts.call = None
                try:
                    if target is not None:
                        yield from directory.get_route(topic, create=True)
                    else:
                        queues = directory.routes.fresh_write_queues(topic, attempts.started_s)
                        if not queues:
                            queues = yield from directory.get_write_queues(topic)
                            attempts.started_s = directory.clock.monotonic_s()
                        attempts.target = target = self._chooser.choose(
                            queues, attempts.started_s, attempts.last_broker, outgoing.sharding_key
                        )
                    if topic not in self._announced_topics:
                        self._announced_topics.add(topic)
                        self.on_first_send(self.group, topic)
                    address = directory.get_master_address(target)
                    command = requests.send(
                        self.group,
                        target,
                        outgoing,
                        directory.clock.now_ms(),
                        batch=batch,
                        is_brief=batch and len(ids) == 1,
                    )
                    remaining_s = max(0.001, attempts.deadline_s - attempts.started_s)
                    attempts.call = Call(address, command, remaining_s)
                    response = yield attempts.call
                    send_results = parse_send_response(response, target, ids, address)
                except (
                    ConnectionLostError,
                    RequestTimeoutError,
                    RequestError,
                    RouteNotFoundError,
                ) as error:
                    self._handle_failure(attempts, outgoing, ids, error, batch)
                    if attempts.pause_s:
                        yield Sleep(attempts.pause_s)
                        attempts.started_s = directory.clock.monotonic_s()
                else:
                    if self._finish_attempt(attempts, outgoing, send_results, response, batch):
                        return send_results
        finally:
            self.open_ids.discard(outgoing.message_id)
            if self.is_closed and not self.open_ids:
                self.on_drained()

    def _finish_attempt(
        self,
        attempts: SendAttempts,
        outgoing: OutgoingMessage,
        send_results: list[SendResult],
        response: Command,
        batch: bool,
    ) -> bool:
        """Record a successful attempt, and return whether the send is done. HOT.

        It is not done if the broker has not stored the message as safely as configured, and the
        producer then sends it to another broker as well (`retry_unsafe`). The latency of the broker
        is recorded, and a send that is done is traced.
        """
        assert attempts.target is not None
        broker = attempts.target.broker
        now_s = self.directory.clock.monotonic_s()
        cost_s = now_s - attempts.started_s
        attempts.started_s = now_s  # another attempt would begin now
        self._chooser.record_latency(broker, cost_s, now_s)
        if self.retry_unsafe and attempts.use_retry_if_unsafe(
            send_results[0].status, broker, now_s
        ):
            return False
        if self.trace is not None:
            address = attempts.call.address if attempts.call is not None else ""
            self.trace.record_send(
                self.group, outgoing, send_results, address, response, cost_s, batch=batch
            )
        return True

    def _handle_failure(
        self,
        attempts: SendAttempts,
        outgoing: OutgoingMessage,
        ids: tuple[str, ...],
        error: SluiceError,
        batch: bool,
    ) -> None:
        """Record a failed attempt, and raise the final error unless another attempt may be made.

        Before the error is raised, the send is traced. After `close`, the ids of messages that may
        be stored are added to `unknown_ids`.
        """
        now_s = self.directory.clock.monotonic_s()
        cost_s = now_s - attempts.started_s
        attempts.started_s = now_s  # another attempt would begin now
        if self._record_failed_attempt(attempts, outgoing, error, now_s):
            return

        if self.trace is not None:
            self.trace.record_failed_send(self.group, outgoing, ids, cost_s, batch=batch)
        failure = attempts.make_error(outgoing.topic, outgoing.message_id, error)
        if self.is_closed and isinstance(failure, SendUnknownError):
            self.unknown_ids.extend(ids)
        raise failure from error

    def _record_failed_attempt(
        self, attempts: SendAttempts, outgoing: OutgoingMessage, error: SluiceError, now_s: float
    ) -> bool:
        """Record a failed attempt, and return whether to make another one.

        The broker is avoided for a while, and the route of the topic is fetched again before its
        next use. If only this broker can accept the message and one of its slaves can become
        master, the next attempt waits for that. Returns False after `close`.
        """
        call = attempts.call
        broker = None if attempts.target is None else attempts.target.broker
        if broker is not None:
            self._chooser.record_failure(broker, now_s)

        # Decide this with the present route, before it expires.
        has_fixed_broker = attempts.has_fixed_queue or bool(outgoing.sharding_key)
        waits_for_master = self._can_wait_for_master(
            outgoing.topic, broker, error, has_fixed_broker=has_fixed_broker
        )
        self.directory.routes.expire(outgoing.topic)

        may_retry = attempts.record_failure(
            broker or attempts.last_broker or "-",
            error,
            now_s,
            was_written=call is not None and call.is_written,
            waits_for_master=waits_for_master,
        )
        return may_retry and not self.is_closed

    def _can_wait_for_master(
        self, topic: str, broker: str | None, error: SluiceError, *, has_fixed_broker: bool
    ) -> bool:
        """Return whether to wait until a slave of the broker that failed becomes its master.

        This is so if the error is temporary, the broker has slaves, and no other broker can accept
        the message. `has_fixed_broker` is True if the message must not go to another broker.
        `broker` None means that the route has no master at all.
        """
        is_temporary = not isinstance(error, RequestError) or error.code == NOT_AVAILABLE
        routes = self.directory.routes
        writable_queues = routes.write_queues.get(topic, ())
        other_brokers = {queue.broker for queue in writable_queues} - {broker}
        needs_this_broker = has_fixed_broker or not other_brokers
        return is_temporary and needs_this_broker and routes.has_replicas(topic, broker)

    def write_traces(self, tracing: Tracing) -> Conversation[bool]:
        """Send all trace records that `tracing` has collected.

        Returns False at the first message with records that cannot be sent. Its records are counted
        as dropped, and the failure is logged, as a warning only the first time. Never raises an
        Exception.
        """
        while (trace_message := tracing.next_message()) is not None:
            try:
                yield from self.directory.get_route(tracing.topic)
                yield from self.send_outgoing(self.assign_id(trace_message.message))
            except Exception as error:  # noqa: BLE001 - tracing must not fail a client
                tracing.count_dropped(trace_message.record_count)
                level = logging.DEBUG if tracing.has_warned else logging.WARNING
                tracing.has_warned = True
                _log.log(level, "traces cannot be written%s: %s", trace_hint(error), error)
                return False
        return True

    def recall(self, handle: str) -> Conversation[str]:
        """Recall a message that waits for its delivery time, and return its message id.

        `handle` is the `recall_handle` of its send. Success means that the message will not be
        delivered, if the broker had not delivered it before. Raises ConfigurationError for an
        invalid handle, and RequestError if the broker refuses: it is too late, or
        recallMessageEnable is not set.
        """
        decoded = expect_recall_handle(handle)
        topic = decoded.topic
        message_id = decoded.unique_id
        yield from self.directory.get_route(topic)
        address = self.directory.get_master_address(MessageQueue(topic, decoded.broker, 0))
        response = yield Call(address, requests.recall(self.group, decoded))
        if self.trace is not None:
            is_recalled = response.code == SUCCESS
            self.trace.record_recall(self.group, topic, message_id, success=is_recalled)
        return header_fields(expect_success(response, address)).get("msgId", message_id)
