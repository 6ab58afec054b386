"""The consumers with RocketMQ's names. Every method blocks.

Settings and their defaults are those of the Java classes. A listener is an object of
`MessageListenerConcurrently` or `MessageListenerOrderly`, or a function with the parameters of its
`consume_message`; the context may be left out. Functions are concurrent listeners, or orderly ones
with `orderly=True`:

    consumer.register_message_listener(listener)
"""

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

from sluicemq.client.aio.consumer import PushConsumer
from sluicemq.client.aio.pull import LitePullConsumer, PullConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import OnUndecodable, Start
from sluicemq.errors import ConfigurationError, RetryLaterError
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import MessageQueue as ModelQueue
from sluicemq.model.topic import Strategy
from sluicemq.rocketmq.choices import AllocateMessageQueueStrategy
from sluicemq.rocketmq.clients import Client
from sluicemq.rocketmq.messages import (
    AnyMessageQueue,
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    ConsumeOrderlyStatus,
    MessageExt,
    MessageModel,
    MessageQueue,
    MessageSelector,
    PullResult,
    to_model_queue,
    to_rocketmq_queues,
)
from sluicemq.rocketmq.names import Getter, Setter, StrictAttributes

_log = logging.getLogger("sluicemq.client")

C = TypeVar("C")
G = TypeVar("G", PushConsumer, LitePullConsumer)
MIB: Final = 1024 * 1024
_DEFAULT_LOOKBACK_MS: Final = 30 * 60 * 1000
"""The time before the start at which CONSUME_FROM_TIMESTAMP begins, by default."""
_SUSPEND_MIN_MS: Final = 10
_SUSPEND_MAX_MS: Final = 30_000
"""The limits of the pause of an orderly consumer. They are those of Java's client."""


@dataclass(slots=True)
class ConsumeConcurrentlyContext(StrictAttributes):
    """The context with which a concurrent listener is called, and in which it can answer.

    - `message_queue`: the queue of the messages.
    - `delay_level_when_next_consume`: when messages are delivered again. 0 means after the group's
      delay for this retry (10 s, 30 s … 2 h), n after delay level n of the broker, and -1 never:
      the messages become dead letters.
    - `ack_index`: the index of the last message that was processed, if the listener returns
      CONSUME_SUCCESS. The messages behind it are delivered again.
    """

    message_queue: MessageQueue
    delay_level_when_next_consume: int = 0
    ack_index: int = 2**31 - 1

    set_delay_level_when_next_consume = Setter[int]()
    set_ack_index = Setter[int]()
    get_message_queue = Getter[MessageQueue]()


@dataclass(slots=True)
class ConsumeOrderlyContext(StrictAttributes):
    """The context with which an orderly listener is called, and in which it can answer.

    - `message_queue`: the queue of the messages.
    - `suspend_current_queue_time_millis`: how long the queue pauses before its messages are
      delivered again, 10 to 30,000 ms. -1 means as the consumer is configured.
    """

    message_queue: MessageQueue
    suspend_current_queue_time_millis: int = -1

    set_suspend_current_queue_time_millis = Setter[int]()
    get_message_queue = Getter[MessageQueue]()


class MessageListenerConcurrently(ABC):
    """A listener that processes the messages of a queue in any order, on several threads."""

    @abstractmethod
    def consume_message(
        self, msgs: list[MessageExt], context: ConsumeConcurrentlyContext
    ) -> ConsumeConcurrentlyStatus | None:
        """Process up to `consume_message_batch_max_size` messages of one queue.

        Return whether they were processed; None means success. If the method raises, they are
        delivered again.
        """


class MessageListenerOrderly(ABC):
    """A listener that processes the messages of a queue one after the other."""

    @abstractmethod
    def consume_message(
        self, msgs: list[MessageExt], context: ConsumeOrderlyContext
    ) -> ConsumeOrderlyStatus | None:
        """Process up to `consume_message_batch_max_size` messages of one queue, in their order.

        Return whether they were processed; None means success. If the method raises, they are
        delivered again, before any later message of the queue.
        """


Listener = MessageListenerConcurrently | MessageListenerOrderly | Callable[..., Any]
_LISTENER_TYPES = MessageListenerConcurrently | MessageListenerOrderly
_RETRY_STATUSES: Final = frozenset(
    {
        ConsumeConcurrentlyStatus.RECONSUME_LATER,
        ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT,
    }
)


class ListenerHandler:
    """A listener in the form of a handler of the asyncio `PushConsumer`.

    `is_orderly` says whether it must be called in the order of each queue.
    """

    def __init__(self, listener: Listener, *, orderly: bool) -> None:
        """Wrap `listener`, an object or a function; `orderly` matters only for a function.

        A function may take one argument, the messages, or two, the messages and a context.
        """
        self.is_orderly = orderly or isinstance(listener, MessageListenerOrderly)
        if isinstance(listener, _LISTENER_TYPES):
            self._function: Callable[..., Any] = listener.consume_message
        else:
            self._function = listener
        # A function that accepts two arguments gets the context, too.
        try:
            inspect.signature(self._function).bind(None, None)
            self._takes_context = True
        except TypeError:
            self._takes_context = False

    def __call__(self, messages: list[ReceivedMessage]) -> None:
        """Call the listener with messages of one queue. Returning means that they are processed.

        Raises RetryLaterError if the listener returns a status that asks for another delivery, or
        if it sets `ack_index` to an index before the last message. The error says which messages
        are delivered again, and after which delay. Raises what the listener raises.
        """
        context_class = ConsumeOrderlyContext if self.is_orderly else ConsumeConcurrentlyContext
        context = context_class(MessageQueue(*messages[0].queue))
        listener_messages = [
            MessageExt(message.record, message.attempt, message) for message in messages
        ]
        if self._takes_context:
            status = self._function(listener_messages, context)
        else:
            status = self._function(listener_messages)
        if status in _RETRY_STATUSES:
            raise _make_retry_error(context)
        if isinstance(context, ConsumeConcurrentlyContext):
            processed_count = max(0, context.ack_index + 1)
            if processed_count < len(messages):
                raise _make_retry_error(context, processed_count)


def _make_retry_error(
    context: ConsumeConcurrentlyContext | ConsumeOrderlyContext, processed_count: int = 0
) -> RetryLaterError:
    """Return the error with which a handler has its messages delivered again.

    The delay comes from `context`. The first `processed_count` messages of the list are not
    delivered again. In an ordered group all of them are.
    """
    if isinstance(context, ConsumeConcurrentlyContext):
        return RetryLaterError(
            delay_level=context.delay_level_when_next_consume, done=processed_count
        )
    time_ms = context.suspend_current_queue_time_millis  # -1 means the consumer's setting
    return RetryLaterError(suspend_s=None if time_ms == -1 else _suspend_s(time_ms))


def _suspend_s(time_ms: int) -> float:
    """Return a pause of an orderly consumer in seconds, within the limits."""
    return min(max(time_ms, _SUSPEND_MIN_MS), _SUSPEND_MAX_MS) / 1000


class _Consumer(Client[C]):
    """The base class of all consumers."""

    on_undecodable: OnUndecodable = "deliver"
    """The treatment of a message whose body cannot be decoded: "deliver", "raise", "dead_letter".

    See `sluicemq.client.core.consuming.OnUndecodable`. Java's client drops such a message and the
    messages behind it.
    """
    body_bytes_max = BODY_BYTES_MAX
    """The maximum size of a compressed body after decompression; a larger one is undecodable."""
    set_consumer_group = Setter[str]("group")
    get_consumer_group = Getter[str]("group")

    def fetch_subscribe_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues of a topic, sorted. Raises RouteNotFoundError."""
        return to_rocketmq_queues(self._call_admin(lambda admin: admin.queues(topic)))


class _GroupConsumer(_Consumer[G]):
    """The base class of push and lite pull consumers, which share queues within their group.

    - `pull_batch_size`: the number of messages that one request asks for.
    - `pull_threshold_for_queue`, `pull_threshold_size_for_queue`: the maximum number and size (in
      MiB) of the unacknowledged messages of a queue. At the limit, the queue is not read further.
    - `pull_threshold_for_topic`, `pull_threshold_size_for_topic`: the same for a topic, whose
      queues share it evenly. -1 means no limit.
    - `consume_max_span`: the maximum difference between the first and the last unacknowledged
      offset of a queue.
    """

    message_model = MessageModel.CLUSTERING
    """CLUSTERING: the members of the group share the queues. BROADCASTING: each reads all."""
    allocate_message_queue_strategy: str | Strategy | AllocateMessageQueueStrategy = "average"
    """The strategy that assigns queues to members.

    It is a name ("average", "average_circle" …), an `AllocateMessageQueueStrategy`, or a function
    (client id, queues, members) -> queues.
    """
    consume_from_where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    """The point at which a group without a committed offset begins."""
    consume_timestamp = ""
    """The time of CONSUME_FROM_TIMESTAMP, in Java's format and the local time zone.

    An example is "20260131235900". "" means half an hour before the start of the consumer.
    """
    pull_batch_size = 32
    pull_threshold_for_queue = 1000
    pull_threshold_size_for_queue = 100
    pull_threshold_for_topic = -1
    pull_threshold_size_for_topic = -1
    consume_max_span = 2000
    set_message_model = Setter[MessageModel]()
    set_allocate_message_queue_strategy = Setter[str | Strategy | AllocateMessageQueueStrategy]()
    set_consume_from_where = Setter[ConsumeFromWhere]()
    set_consume_timestamp = Setter[str]()
    set_pull_batch_size = Setter[int]()
    set_pull_threshold_for_queue = Setter[int]()
    set_pull_threshold_size_for_queue = Setter[int]()
    set_pull_threshold_for_topic = Setter[int]()
    set_pull_threshold_size_for_topic = Setter[int]()
    get_message_model = Getter[MessageModel]()
    get_consume_from_where = Getter[ConsumeFromWhere]()
    get_consume_timestamp = Getter[str]()
    get_pull_batch_size = Getter[int]()

    @functools.cached_property
    def _topics(self) -> dict[str, MessageSelector]:
        """The subscribed topics with their filters."""
        return {}

    def unsubscribe(self, topic: str) -> None:
        """Stop reading a topic, so that other members of the group read its queues.

        Before `start`, the topic is only removed from those to subscribe to. Raises ClosedError
        after `shutdown`.
        """
        self._topics.pop(topic, None)
        if self._threaded is not None:
            threaded = self._expect_running()
            threaded.portal.run(threaded.client.unsubscribe(topic))

    def _consume_options(self, sluice: Sluice) -> dict[str, Any]:
        """Return the settings of this consumer as keyword arguments of `Sluice.consumer`.

        `Sluice.lite_pull` takes them, too. Raises ConfigurationError for an invalid
        `consume_timestamp`.
        """
        topic_count = self.pull_threshold_for_topic
        topic_mib = self.pull_threshold_size_for_topic
        allocate = self.allocate_message_queue_strategy
        if isinstance(allocate, AllocateMessageQueueStrategy):
            allocate = allocate.to_core_strategy(self.group)
        return {
            "start": self._start_option(sluice),
            "broadcast": self.message_model is MessageModel.BROADCASTING,
            "allocate": allocate,
            "young_from_first": True,
            "pull_count": self.pull_batch_size,
            "span_max": self.consume_max_span,
            "topic_count_max": None if topic_count == -1 else topic_count,
            "topic_bytes_max": None if topic_mib == -1 else topic_mib * MIB,
            "on_undecodable": self.on_undecodable,
            "body_bytes_max": self.body_bytes_max,
        }

    def _start_option(self, sluice: Sluice) -> Start:
        """Return where a group without offsets begins: "first", "last", or ms since 1970.

        CONSUME_FROM_TIMESTAMP without `consume_timestamp` begins `_DEFAULT_LOOKBACK_MS` before now.
        """
        if self.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET:
            return "last"
        if self.consume_from_where is not ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            return "first"
        if self.consume_timestamp:
            return _parse_timestamp(self.consume_timestamp)
        return sluice.cluster.clock.now_ms() - _DEFAULT_LOOKBACK_MS


class DefaultMQPushConsumer(_GroupConsumer[PushConsumer]):
    """A consumer that calls a listener with messages, on up to `consume_thread_max` threads.

    Each call has up to `consume_message_batch_max_size` messages of one queue.

    If a concurrent listener returns RECONSUME_LATER or raises, the messages are delivered again by
    the broker after 10 s, 30 s … 2 h, and at most `max_reconsume_times` times (-1 means 16). Then
    they become dead letters.

    If an orderly listener returns SUSPEND_CURRENT_QUEUE_A_MOMENT or raises, its messages are
    delivered again after `suspend_current_queue_time_millis`, before any later message of the
    queue. A `max_reconsume_times` of -1 then means without limit.

    With MessageModel.BROADCASTING, messages that cannot be processed are logged and dropped.
    """

    consume_thread_min: int | None = None
    """Accepted for compatibility, 1 to `consume_thread_max`. Threads are started when needed."""
    consume_thread_max = 20
    consume_message_batch_max_size = 1
    max_reconsume_times = -1
    suspend_current_queue_time_millis = 1000
    persist_consumer_offset_interval = 5000
    """The interval in milliseconds between commits of offsets."""
    set_consume_thread_min = Setter[int | None]()
    set_consume_thread_max = Setter[int]()
    set_consume_message_batch_max_size = Setter[int]()
    set_max_reconsume_times = Setter[int]()
    set_suspend_current_queue_time_millis = Setter[int]()
    set_persist_consumer_offset_interval = Setter[int]()
    set_consume_concurrently_max_span = Setter[int]("consume_max_span")
    get_consume_message_batch_max_size = Getter[int]()
    get_max_reconsume_times = Getter[int]()
    _handler: ListenerHandler | None = None

    def subscribe(self, topic: str, expression: str | MessageSelector = "*") -> None:
        """Subscribe to a topic, with a filter by tags ("A || B", "*") or a `MessageSelector`.

        After `start`, this adds a topic, or changes the filter of a topic in all of its queues.
        """
        selector = _to_selector(expression)
        if self._threaded is not None:
            self._call(PushConsumer.change, topic, **_filter_option(selector))
        self._topics[topic] = selector

    def register_message_listener(self, listener: Listener, *, orderly: bool = False) -> None:
        """Set the listener that is called with messages. Call this before `start`.

        `listener` is a `MessageListenerConcurrently`, a `MessageListenerOrderly`, or a function
        that takes the messages, or the messages and a context, and returns a status. A function is
        called in the order of the queue if `orderly` is True. Raises ConfigurationError for
        anything else.
        """
        if isinstance(listener, type) or not (
            callable(listener) or isinstance(listener, _LISTENER_TYPES)
        ):
            raise ConfigurationError(
                f"the listener must be an object or a function, got {listener!r}.",
                fix="Pass an instance of a listener class, or a function.",
            )
        self._handler = ListenerHandler(listener, orderly=orderly)

    def start(self) -> None:
        """Join the group and start to call the listener.

        Raises ConfigurationError if there is no listener or no topic, if a setting is invalid, and
        if the consumer is running. Raises RouteNotFoundError if a topic does not exist, and what
        `MessageStream.start` raises. If this raises, everything is closed again.
        """
        if self._handler is None or not self._topics:
            raise ConfigurationError(
                "the consumer has no listener, or no topic.",
                fix="Call subscribe and register_message_listener before start.",
            )
        thread_min = 1 if self.consume_thread_min is None else self.consume_thread_min
        if not 1 <= thread_min <= self.consume_thread_max:
            raise ConfigurationError(
                "consume_thread_min must be 1 to consume_thread_max, got "
                f"{self.consume_thread_min} and {self.consume_thread_max}.",
                fix="Set consume_thread_max to 1 or more, and consume_thread_min to at most that.",
            )
        if self.consume_thread_min is not None and self.consume_thread_min > 1:
            _log.warning(
                "consume_thread_min = %d has no effect: threads are started when they are needed, "
                "up to consume_thread_max = %d.",
                self.consume_thread_min,
                self.consume_thread_max,
            )
        super().start()

    async def _make_client(self, sluice: Sluice) -> PushConsumer:
        """Return a started push consumer of the asyncio client `sluice`, with these settings."""
        assert self._handler is not None
        has_default_retries = self.max_reconsume_times == -1
        consumer = sluice.consumer(
            self.group,
            self._handler,
            concurrency=self.consume_thread_max,
            ordered=self._handler.is_orderly,
            max_reconsume_times=None if has_default_retries else self.max_reconsume_times,
            suspend_s=_suspend_s(self.suspend_current_queue_time_millis),
            batch_max=self.consume_message_batch_max_size,
            commit_period_s=self.persist_consumer_offset_interval / 1000,
            prefetch_count=self.pull_threshold_for_queue,
            prefetch_bytes=self.pull_threshold_size_for_queue * MIB,
            **self._consume_options(sluice),
        )
        for topic, selector in self._topics.items():
            consumer.subscribe(topic, **_filter_option(selector))
        await consumer.start()
        return consumer


class DefaultLitePullConsumer(_GroupConsumer[LitePullConsumer]):
    """A consumer that the application polls for messages.

    Call `subscribe` and `start`, or `start` and `assign`; then `poll`.

    - `pull_batch_size`: the maximum number of messages that `poll` returns.
    - `auto_commit`: whether the offsets of messages that earlier polls returned are committed every
      `auto_commit_interval_millis` ms. Without it, call `commit_sync` or `commit_async`.
    - `poll_timeout_millis`: how long `poll` waits if it is called without a time.
    - `topic_metadata_check_interval_millis`: how often the queues of topics with a listener (see
      `register_topic_message_queue_change_listener`) are fetched.
    """

    pull_batch_size = 10
    auto_commit = True
    auto_commit_interval_millis = 5000
    poll_timeout_millis = 5000
    topic_metadata_check_interval_millis = 30_000
    set_auto_commit = Setter[bool]()
    set_auto_commit_interval_millis = Setter[int]()
    set_poll_timeout_millis = Setter[int]()
    set_topic_metadata_check_interval_millis = Setter[int]()
    set_consume_max_span = Setter[int]()
    is_auto_commit = Getter[bool]("auto_commit")

    def subscribe(self, topic: str, expression: str | MessageSelector = "*") -> None:
        """Subscribe to a topic, with a filter by tags ("A || B", "*") or a `MessageSelector`.

        The queues of the topic are shared with the other members of the group. This may be called
        before or after `start`, and again to change the filter of a topic.
        """
        self._topics[topic] = _to_selector(expression)
        if self._threaded is not None:
            self._call(LitePullConsumer.subscribe, topic, **_filter_option(self._topics[topic]))

    async def _make_client(self, sluice: Sluice) -> LitePullConsumer:
        """Return a lite pull consumer of the asyncio client `sluice`, with these settings."""
        consumer = sluice.lite_pull(
            self.group,
            auto_commit=self.auto_commit,
            commit_period_s=self.auto_commit_interval_millis / 1000,
            count_max=self.pull_threshold_for_queue,
            bytes_max=self.pull_threshold_size_for_queue * MIB,
            **self._consume_options(sluice),
        )
        for topic, selector in self._topics.items():
            await consumer.subscribe(topic, **_filter_option(selector))
        return consumer

    def is_running(self) -> bool:
        """Return whether the consumer was started and is not shut down."""
        return self._is_running

    def assign(
        self, queues: Sequence[AnyMessageQueue], expression: str | MessageSelector = "*"
    ) -> None:
        """Read exactly these queues, from the committed offsets of the group.

        A second call replaces the queues of the first. Raises ConfigurationError if the consumer
        has subscribed to a topic.
        """
        self._call(
            LitePullConsumer.assign,
            _to_model_queues(queues),
            **_filter_option(_to_selector(expression)),
        )

    def assignment(self) -> list[MessageQueue]:
        """Return the queues that this consumer reads now, sorted."""
        return to_rocketmq_queues(self._expect_running().client.assignment)

    def poll(self, timeout_ms: int | None = None) -> list[MessageExt]:
        """Wait for messages, and return a list of up to `pull_batch_size` of them.

        The list is empty if none arrived within `timeout_ms`; None means `poll_timeout_millis`. The
        messages that earlier calls returned count as processed from now on.
        """
        wait_ms = self.poll_timeout_millis if timeout_ms is None else timeout_ms
        threaded = self._expect_running()
        consumer = threaded.client
        polling = consumer.poll(wait_ms / 1000, count_max=self.pull_batch_size)
        messages = threaded.portal.run(polling, on_undelivered=consumer.put_back)
        return [MessageExt(message.record, message.attempt, message) for message in messages]

    def commit_sync(
        self, offsets: Mapping[AnyMessageQueue, int] | None = None, persist: bool = True
    ) -> None:
        """Commit offsets, and return when the brokers have stored them.

        `offsets` maps queues to offsets. None means that all messages polled so far are processed.
        Raises SluiceError if a broker has not stored an offset, and ConfigurationError if `persist`
        is False, because a commit is always stored.
        """
        if not persist:
            raise ConfigurationError(
                "persist=False is not supported: a commit is always stored.",
                fix="Remove persist.",
            )
        self._call(LitePullConsumer.commit, _to_model_offsets(offsets))

    commit = commit_sync

    def pause(self, queues: Iterable[AnyMessageQueue]) -> None:
        """Fetch and return no messages of these queues until `resume`. They stay assigned."""
        self._call(LitePullConsumer.pause, _to_model_queues(queues))

    def resume(self, queues: Iterable[AnyMessageQueue]) -> None:
        """Continue with the messages of queues that were paused."""
        self._call(LitePullConsumer.resume, _to_model_queues(queues))

    def seek(self, queue: AnyMessageQueue, offset: int) -> None:
        """Have the next polls return the messages of a queue from `offset` on.

        Raises ConfigurationError if this consumer does not read the queue, and if the queue does
        not have the offset.
        """
        self._call(LitePullConsumer.seek, to_model_queue(queue), offset)

    def seek_to_begin(self, queue: AnyMessageQueue) -> None:
        """Have the next polls return the messages of a queue from its oldest stored message on."""
        self._call(LitePullConsumer.seek_to_begin, to_model_queue(queue))

    def seek_to_end(self, queue: AnyMessageQueue) -> None:
        """Have the next polls return only messages of a queue that are stored from now on."""
        self._call(LitePullConsumer.seek_to_end, to_model_queue(queue))

    def fetch_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues of a topic, for `assign`. Raises RouteNotFoundError."""
        return self.fetch_subscribe_message_queues(topic)

    def offset_for_timestamp(self, queue: AnyMessageQueue, timestamp_ms: int) -> int:
        """Return the offset of a queue's first message that was stored at `timestamp_ms` or later.

        `timestamp_ms` is in milliseconds since 1970.
        """
        return self._call(LitePullConsumer.offset_for_time, to_model_queue(queue), timestamp_ms)

    def commit_async(self, offsets: Mapping[AnyMessageQueue, int] | None = None) -> None:
        """Commit as `commit_sync` does, but return at once. Errors are logged."""
        threaded = self._expect_running()
        threaded.portal.call_soon(threaded.client.commit_soon, _to_model_offsets(offsets))

    def register_topic_message_queue_change_listener(
        self, topic: str, listener: Callable[[str, list[MessageQueue]], None]
    ) -> None:
        """Call `listener(topic, queues)` when the queues of a topic change.

        The queues are fetched every `topic_metadata_check_interval_millis`. The listener is called
        on the thread of the client's event loop, so it must return quickly.
        """

        def on_change(topic: str, queues: list[ModelQueue]) -> None:
            listener(topic, to_rocketmq_queues(queues))

        self._call(
            LitePullConsumer.watch_queues,
            topic,
            on_change,
            period_s=self.topic_metadata_check_interval_millis / 1000,
        )

    def committed(self, queue: AnyMessageQueue) -> int:
        """Return the committed offset of the group in a queue, -1 if there is none."""
        offset = self._call(LitePullConsumer.committed, to_model_queue(queue))
        return -1 if offset is None else offset


class DefaultMQPullConsumer(_Consumer[PullConsumer]):
    """A consumer whose application passes the queue and the offset to each pull.

    It commits nothing by itself: `update_consume_offset` stores an offset at the broker.
    """

    broker_suspend_max_time_millis = 20_000
    """The time, in milliseconds, that the broker waits in `pull_block_if_not_found`."""
    set_broker_suspend_max_time_millis = Setter[int]()

    async def _make_client(self, sluice: Sluice) -> PullConsumer:
        return sluice.pull_consumer(
            self.group, on_undecodable=self.on_undecodable, body_bytes_max=self.body_bytes_max
        )

    def update_consume_offset(self, queue: AnyMessageQueue, offset: int) -> None:
        """Store the committed offset of the group in a queue, at the broker."""
        self._call(PullConsumer.commit, to_model_queue(queue), offset)

    def pull(
        self,
        queue: AnyMessageQueue,
        expression: str | MessageSelector,
        offset: int,
        max_nums: int = 32,
        *,
        wait_s: float = 0.0,
    ) -> PullResult:
        """Return up to `max_nums` messages of a queue from `offset` on that match `expression`.

        The status of the result is FOUND, NO_NEW_MSG, NO_MATCHED_MSG or OFFSET_ILLEGAL, which means
        that the queue does not have the offset. The broker waits up to `wait_s` seconds for a
        message; 0 means that it responds at once. Raises FilterSyntaxError, RouteNotFoundError,
        RequestError, ConnectionLostError and RequestTimeoutError.
        """
        pull_result = self._call(
            PullConsumer.pull,
            to_model_queue(queue),
            offset,
            count_max=max_nums,
            wait_s=wait_s,
            **_filter_option(_to_selector(expression)),
        )
        return PullResult.from_core(pull_result)

    def pull_block_if_not_found(
        self,
        queue: AnyMessageQueue,
        expression: str | MessageSelector,
        offset: int,
        max_nums: int = 32,
    ) -> PullResult:
        """Pull as `pull` does, and wait up to `broker_suspend_max_time_millis` for a message."""
        wait_s = self.broker_suspend_max_time_millis / 1000
        return self.pull(queue, expression, offset, max_nums, wait_s=wait_s)

    def fetch_consume_offset(self, queue: AnyMessageQueue) -> int:
        """Return the committed offset of the group in a queue, -1 if there is none."""
        offset = self._call(PullConsumer.committed, to_model_queue(queue))
        return -1 if offset is None else offset

    def send_message_back(self, message: MessageExt, delay_level: int = 0) -> None:
        """Have a message delivered to the group again, by its retry topic.

        `delay_level` is 0 for the group's delay for this retry, n for delay level n of the broker,
        and -1 to make the message a dead letter.
        """
        self._call(PullConsumer.send_back, message.record, delay_level)


def _to_model_queues(queues: Iterable[AnyMessageQueue]) -> list[ModelQueue]:
    """Return queues as the asyncio client takes them. Raises as `to_model_queue` does."""
    return [to_model_queue(queue) for queue in queues]


def _to_model_offsets(
    offsets: Mapping[AnyMessageQueue, int] | None,
) -> dict[ModelQueue, int] | None:
    """Return offsets by queue as the asyncio client takes them. None is returned unchanged."""
    if offsets is None:
        return None
    return {to_model_queue(queue): offset for queue, offset in offsets.items()}


def _parse_timestamp(timestamp: str) -> int:
    """Return a local time such as "20260131235900", which is Java's format, in ms since 1970.

    Raises ConfigurationError if it has another format.
    """
    try:
        moment = datetime.strptime(timestamp, "%Y%m%d%H%M%S")  # noqa: DTZ007 - local time, as in Java
        return int(moment.timestamp() * 1000)
    except ValueError:
        raise ConfigurationError(
            f"consume_timestamp must have the format YYYYMMDDhhmmss, got {timestamp!r}.",
            fix='Write it as "20260131235900".',
        ) from None


def _to_selector(expression: str | MessageSelector) -> MessageSelector:
    """Return a filter as a `MessageSelector`. A string selects by tags."""
    return MessageSelector.by_tag(expression) if isinstance(expression, str) else expression


def _filter_option(selector: MessageSelector) -> dict[str, Any]:
    """Return a filter as the keyword option `where` or `tags` of the asyncio client."""
    name = "where" if selector.expression_type == SQL92 else "tags"
    return {name: selector.expression}
