"""The consumers in RocketMQ's words: `start`, use, `shutdown`; every method blocks.

Attributes and defaults are those of the Java classes. A listener
is an object of one of the two classes, or a function (then it is a concurrent one, or an orderly
one with `orderly=True`) of the messages, or of the messages and a context:

    consumer.register_message_listener(listener)
"""

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from sluicemq.client.aio.consumer import PushConsumer
from sluicemq.client.aio.pull import LitePullConsumer, PullConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import OnUndecodable, Start
from sluicemq.errors import ConfigurationError, RetryLaterError
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import MessageQueue as Queue
from sluicemq.model.topic import Strategy
from sluicemq.rocketmq.choices import AllocateMessageQueueStrategy
from sluicemq.rocketmq.clients import Client
from sluicemq.rocketmq.messages import (
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    ConsumeOrderlyStatus,
    MessageExt,
    MessageModel,
    MessageQueue,
    MessageSelector,
    Place,
    PullResult,
    frozen_queue,
    queues_of,
)
from sluicemq.rocketmq.names import Gets, Sets, Strict

_log = logging.getLogger("sluicemq.client")

T = TypeVar("T")
G = TypeVar("G", PushConsumer, LitePullConsumer)
MIB = 1024 * 1024
_HALF_AN_HOUR_MS = 30 * 60 * 1000


@dataclass(slots=True)
class ConsumeConcurrentlyContext(Strict):
    """`delay_level_when_next_consume`: 0 the ladder, n a level of the broker, -1 dead letters.
    `ack_index`: after CONSUME_SUCCESS the index of the last message that is done; those behind it
    come again."""

    message_queue: MessageQueue
    delay_level_when_next_consume: int = 0
    ack_index: int = 2**31 - 1

    set_delay_level_when_next_consume = Sets[int]()
    set_ack_index = Sets[int]()
    get_message_queue = Gets[MessageQueue]()


@dataclass(slots=True)
class ConsumeOrderlyContext(Strict):
    """`suspend_current_queue_time_millis`: how long the queue rests; -1 as the consumer says."""

    message_queue: MessageQueue
    suspend_current_queue_time_millis: int = -1

    set_suspend_current_queue_time_millis = Sets[int]()
    get_message_queue = Gets[MessageQueue]()


class MessageListenerConcurrently(ABC):
    """Messages of a queue in any order, several at a time."""

    @abstractmethod
    def consume_message(
        self, msgs: list[MessageExt], context: ConsumeConcurrentlyContext
    ) -> ConsumeConcurrentlyStatus | None:
        """Up to `consume_message_batch_max_size` messages of one queue."""


class MessageListenerOrderly(ABC):
    """Messages of a queue one after the other."""

    @abstractmethod
    def consume_message(
        self, msgs: list[MessageExt], context: ConsumeOrderlyContext
    ) -> ConsumeOrderlyStatus | None:
        """Up to `consume_message_batch_max_size` messages of one queue, in their order."""


Listener = MessageListenerConcurrently | MessageListenerOrderly | Callable[..., Any]
_OBJECTS = MessageListenerConcurrently | MessageListenerOrderly
_AGAIN = frozenset({
    ConsumeConcurrentlyStatus.RECONSUME_LATER, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT,
})  # fmt: skip


class Listening:
    """A listener as the handler of a consumer."""

    def __init__(self, listener: Listener, *, orderly: bool) -> None:
        self.is_orderly = orderly or isinstance(listener, MessageListenerOrderly)
        if isinstance(listener, _OBJECTS):
            self._function: Callable[..., Any] = listener.consume_message
        else:
            self._function = listener
        try:
            inspect.signature(self._function).bind(None, None)
            self._takes_context = True
        except TypeError:
            self._takes_context = False

    def __call__(self, messages: list[ReceivedMessage]) -> None:
        """Raises RetryLaterError when the listener wants messages again."""
        kind = ConsumeOrderlyContext if self.is_orderly else ConsumeConcurrentlyContext
        context = kind(MessageQueue(*messages[0].queue))
        given = [MessageExt(message.record, message.attempt, message) for message in messages]
        status = self._function(given, context) if self._takes_context else self._function(given)
        if status in _AGAIN:
            raise _later(context)
        if isinstance(context, ConsumeConcurrentlyContext):
            done = max(0, context.ack_index + 1)
            if done < len(messages):
                raise _later(context, done)


def _later(
    context: ConsumeConcurrentlyContext | ConsumeOrderlyContext, done: int = 0
) -> RetryLaterError:
    if isinstance(context, ConsumeConcurrentlyContext):
        return RetryLaterError(delay_level=context.delay_level_when_next_consume, done=done)
    time_ms = context.suspend_current_queue_time_millis
    # Java's bounds: 10 ms to 30 s.
    suspend_s = None if time_ms == -1 else min(max(time_ms, 10), 30_000) / 1000
    return RetryLaterError(suspend_s=suspend_s)


class _Consumer(Client[T]):
    """What all consumers have."""

    on_undecodable: OnUndecodable = "deliver"
    """What becomes of a message whose body cannot be decoded; Java's client drops it, and those
    behind it."""
    body_bytes_max = BODY_BYTES_MAX
    """A compressed body that grows beyond it cannot be decoded."""
    set_consumer_group = Sets[str]("group")
    get_consumer_group = Gets[str]("group")

    def fetch_subscribe_message_queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic, sorted. Raises RouteNotFoundError."""
        return queues_of(self._ask(lambda admin: admin.queues(topic)))


class _GroupClient(_Consumer[G]):
    """What push and lite pull consumers share: model, strategy, thresholds, where to begin."""

    message_model = MessageModel.CLUSTERING
    """CLUSTERING: the group shares the queues. BROADCASTING: every consumer reads all."""
    allocate_message_queue_strategy: str | Strategy | AllocateMessageQueueStrategy = "average"
    """A name, an object, or a function of client id, queues and members."""
    consume_from_where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    consume_timestamp = ""
    """As Java writes it, in the time of this machine: "20260131235900"; "" is half an hour before
    the start."""
    pull_batch_size = 32
    pull_threshold_for_queue = 1000
    pull_threshold_size_for_queue = 100
    """MiB."""
    pull_threshold_for_topic = -1
    pull_threshold_size_for_topic = -1
    consume_max_span = 2000
    set_message_model = Sets[MessageModel]()
    set_allocate_message_queue_strategy = Sets[str | Strategy | AllocateMessageQueueStrategy]()
    set_consume_from_where = Sets[ConsumeFromWhere]()
    set_consume_timestamp = Sets[str]()
    set_pull_batch_size = Sets[int]()
    set_pull_threshold_for_queue = Sets[int]()
    set_pull_threshold_size_for_queue = Sets[int]()
    set_pull_threshold_for_topic = Sets[int]()
    set_pull_threshold_size_for_topic = Sets[int]()
    get_message_model = Gets[MessageModel]()
    get_consume_from_where = Gets[ConsumeFromWhere]()
    get_consume_timestamp = Gets[str]()
    get_pull_batch_size = Gets[int]()

    @functools.cached_property
    def _topics(self) -> dict[str, MessageSelector]:
        return {}

    def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more."""
        self._topics.pop(topic, None)
        if self._client is not None:
            portal, consumer = self._on_loop()
            portal.call(consumer.unsubscribe(topic))

    def _limits(self, sluice: Sluice) -> dict[str, Any]:
        topic_count, topic_size = self.pull_threshold_for_topic, self.pull_threshold_size_for_topic
        start: Start = "first"
        if self.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            start = sluice.cluster.clock.now_ms() - _HALF_AN_HOUR_MS
            if self.consume_timestamp:
                start = _time_of(self.consume_timestamp)
        elif self.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET:
            start = "last"
        allocate = self.allocate_message_queue_strategy
        if isinstance(allocate, AllocateMessageQueueStrategy):
            allocate = allocate.core(self.group)
        return {
            "start": start,
            "broadcast": self.message_model is MessageModel.BROADCASTING,
            "allocate": allocate,
            "young_from_first": True,
            "pull_count": self.pull_batch_size,
            "span_max": self.consume_max_span,
            "topic_count_max": None if topic_count == -1 else topic_count,
            "topic_bytes_max": None if topic_size == -1 else topic_size * MIB,
            "on_undecodable": self.on_undecodable,
            "body_bytes_max": self.body_bytes_max,
        }


class DefaultMQPushConsumer(_GroupClient[PushConsumer]):
    """Calls a listener with up to `consume_message_batch_max_size` messages of one queue at a time,
    on `consume_thread_max` threads.

    After RECONSUME_LATER or an exception the messages come again by way of the broker, after 10 s,
    30 s … 2 h, at most `max_reconsume_times` times (-1: 16); then they are dead letters. An orderly
    listener gets them again at once, before any other of the queue, after
    `suspend_current_queue_time_millis`; -1 means without end. With MessageModel.BROADCASTING what
    fails is logged and dropped.
    """

    consume_thread_min: int | None = None
    """At most `consume_thread_max`, as in Java; threads are made when they are needed."""
    consume_thread_max = 20
    consume_message_batch_max_size = 1
    max_reconsume_times = -1
    suspend_current_queue_time_millis = 1000
    persist_consumer_offset_interval = 5000
    set_consume_thread_min = Sets[int | None]()
    set_consume_thread_max = Sets[int]()
    set_consume_message_batch_max_size = Sets[int]()
    set_max_reconsume_times = Sets[int]()
    set_suspend_current_queue_time_millis = Sets[int]()
    set_persist_consumer_offset_interval = Sets[int]()
    set_consume_concurrently_max_span = Sets[int]("consume_max_span")
    get_consume_message_batch_max_size = Gets[int]()
    get_max_reconsume_times = Gets[int]()
    _listening: Listening | None = None

    def subscribe(self, topic: str, expression: str | MessageSelector = "*") -> None:
        """Tags ("A || B", "*") or a MessageSelector; while it runs: another expression for the
        topic, or one more topic."""
        selector = _selector(expression)
        if self._client is not None:
            self._on_loop()[0].call(self._client.change(topic, **_filter(selector)))
        self._topics[topic] = selector

    def register_message_listener(self, listener: Listener, *, orderly: bool = False) -> None:
        """A MessageListenerConcurrently or MessageListenerOrderly, or a function of the messages
        (and a context) that returns a status."""
        if isinstance(listener, type) or not (callable(listener) or isinstance(listener, _OBJECTS)):
            raise ConfigurationError(
                f"the listener would be {listener!r}.",
                fix="Give an object of a listener's class, or a function.",
            )
        self._listening = Listening(listener, orderly=orderly)

    def start(self) -> None:
        """Joins the group and begins to call the listener."""
        if self._listening is None or not self._topics:
            raise ConfigurationError(
                "the consumer has no listener, or no topic.",
                fix="Call subscribe and register_message_listener before start.",
            )
        least = 1 if self.consume_thread_min is None else self.consume_thread_min
        if not 1 <= least <= self.consume_thread_max:
            raise ConfigurationError(
                f"consume_thread_min is {self.consume_thread_min}, "
                f"consume_thread_max is {self.consume_thread_max}.",
                fix="The first one is 1 or more, the second one is not less.",
            )
        if self.consume_thread_min is not None and self.consume_thread_min > 1:
            _log.warning(
                "consume_thread_min = %d has no effect: threads are made when they are needed, up "
                "to consume_thread_max = %d.", self.consume_thread_min, self.consume_thread_max,
            )  # fmt: skip
        super().start()

    async def _make(self, sluice: Sluice) -> PushConsumer:
        assert self._listening is not None
        times_max = self.max_reconsume_times
        consumer = sluice.consumer(
            self.group,
            self._listening,
            concurrency=self.consume_thread_max,
            ordered=self._listening.is_orderly,
            max_reconsume_times=None if times_max == -1 else times_max,
            suspend_s=min(max(self.suspend_current_queue_time_millis, 10), 30_000) / 1000,
            batch_max=self.consume_message_batch_max_size,
            commit_period_s=self.persist_consumer_offset_interval / 1000,
            prefetch_count=self.pull_threshold_for_queue,
            prefetch_bytes=self.pull_threshold_size_for_queue * MIB,
            **self._limits(sluice),
        )
        for topic, selector in self._topics.items():
            consumer.subscribe(topic, **_filter(selector))
        await consumer.start()
        return consumer


class DefaultLitePullConsumer(_GroupClient[LitePullConsumer]):
    """Polls messages: subscribe or assign, start, poll. A poll returns at most `pull_batch_size`
    messages."""

    pull_batch_size = 10
    auto_commit = True
    auto_commit_interval_millis = 5000
    poll_timeout_millis = 5000
    topic_metadata_check_interval_millis = 30_000
    set_auto_commit = Sets[bool]()
    set_auto_commit_interval_millis = Sets[int]()
    set_poll_timeout_millis = Sets[int]()
    set_topic_metadata_check_interval_millis = Sets[int]()
    set_consume_max_span = Sets[int]()
    is_auto_commit = Gets[bool]("auto_commit")

    def subscribe(self, topic: str, expression: str | MessageSelector = "*") -> None:
        """Before or after start, also with another expression than before; queues are shared with
        the other members of the group."""
        self._topics[topic] = _selector(expression)
        if self._client is not None:
            portal, consumer = self._on_loop()
            portal.call(consumer.subscribe(topic, **_filter(self._topics[topic])))

    async def _make(self, sluice: Sluice) -> LitePullConsumer:
        consumer = sluice.lite_pull(
            self.group,
            auto_commit=self.auto_commit,
            commit_period_s=self.auto_commit_interval_millis / 1000,
            count_max=self.pull_threshold_for_queue,
            bytes_max=self.pull_threshold_size_for_queue * MIB,
            **self._limits(sluice),
        )
        for topic, selector in self._topics.items():
            await consumer.subscribe(topic, **_filter(selector))
        return consumer

    def is_running(self) -> bool:
        """Between start and shutdown."""
        return self._portal is not None and self._client is not None

    def assign(self, queues: Sequence[Place], expression: str | MessageSelector = "*") -> None:
        """Reads exactly these queues."""
        self._run(LitePullConsumer.assign, _frozen_queues(queues), **_filter(_selector(expression)))

    def assignment(self) -> list[MessageQueue]:
        """The queues that are read now."""
        return queues_of(self._on_loop()[1].assignment)

    def poll(self, timeout_ms: int | None = None) -> list[MessageExt]:
        """The next messages, [] when none came in time (`poll_timeout_millis`)."""
        wait_ms = self.poll_timeout_millis if timeout_ms is None else timeout_ms
        portal, consumer = self._on_loop()
        polling = consumer.poll(wait_ms / 1000, count_max=self.pull_batch_size)
        polled = portal.call(polling, take_back=consumer.put_back)
        return [MessageExt(message.record, message.attempt, message) for message in polled]

    def commit_sync(self, offsets: Mapping[Place, int] | None = None, persist: bool = True) -> None:
        """Everything polled so far, or these offsets; returns when it is stored. Raises
        ConfigurationError for `persist=False`: brokers keep offsets, or nobody does."""
        if not persist:
            raise ConfigurationError("a commit always persists.", fix="Leave persist out.")
        self._run(LitePullConsumer.commit, _frozen_offsets(offsets))

    commit = commit_sync

    def pause(self, queues: Iterable[Place]) -> None:
        """Fetch and return no messages of these queues until `resume`; they stay assigned."""
        portal, consumer = self._on_loop()
        portal.run(consumer.pause, _frozen_queues(queues))

    def resume(self, queues: Iterable[Place]) -> None:
        """Continue with the messages of queues that were paused."""
        portal, consumer = self._on_loop()
        portal.run(consumer.resume, _frozen_queues(queues))

    def seek(self, queue: Place, offset: int) -> None:
        """Continue a queue at `offset`. Raises ConfigurationError for a queue that is not read here
        and for an offset outside of what is stored."""
        self._run(LitePullConsumer.seek, frozen_queue(queue), offset)

    def seek_to_begin(self, queue: Place) -> None:
        """Continue a queue at its oldest stored message."""
        self._run(LitePullConsumer.seek_to_begin, frozen_queue(queue))

    def seek_to_end(self, queue: Place) -> None:
        """Continue a queue at the next message that will be stored."""
        self._run(LitePullConsumer.seek_to_end, frozen_queue(queue))

    def fetch_message_queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic, for `assign`."""
        return self.fetch_subscribe_message_queues(topic)

    def offset_for_timestamp(self, queue: Place, timestamp_ms: int) -> int:
        """The first offset stored at that time or later."""
        return self._run(LitePullConsumer.offset_for_time, frozen_queue(queue), timestamp_ms)

    def commit_async(self, offsets: Mapping[Place, int] | None = None) -> None:
        """The same without waiting."""
        portal, consumer = self._on_loop()
        portal.soon(consumer.commit_soon, _frozen_offsets(offsets))

    def register_topic_message_queue_change_listener(
        self, topic: str, listener: Callable[[str, list[MessageQueue]], None]
    ) -> None:
        """Calls `listener(topic, queues)`, on the client's thread, when a topic gets other queues;
        looks every `topic_metadata_check_interval_millis`."""
        portal, consumer = self._on_loop()
        period_s = self.topic_metadata_check_interval_millis / 1000

        def changed(topic: str, queues: list[Queue]) -> None:
            listener(topic, queues_of(queues))

        portal.run(consumer.watch_queues, topic, changed, period_s=period_s)

    def committed(self, queue: Place) -> int:
        """The committed offset, -1 when there is none."""
        offset = self._run(LitePullConsumer.committed, frozen_queue(queue))
        return -1 if offset is None else offset


class DefaultMQPullConsumer(_Consumer[PullConsumer]):
    """Raw pulls: the program says queue and offset, and keeps the offsets.

    `update_consume_offset` stores an offset for the group at the broker, at once.
    """

    broker_suspend_max_time_millis = 20_000
    set_broker_suspend_max_time_millis = Sets[int]()

    async def _make(self, sluice: Sluice) -> PullConsumer:
        return sluice.pull_consumer(
            self.group, on_undecodable=self.on_undecodable, body_bytes_max=self.body_bytes_max
        )

    def update_consume_offset(self, queue: Place, offset: int) -> None:
        """Store the offset of a queue for the group, at the broker."""
        self._run(PullConsumer.commit, frozen_queue(queue), offset)

    def pull(
        self,
        queue: Place,
        expression: str | MessageSelector,
        offset: int,
        max_nums: int = 32,
        *,
        wait_s: float = 0.0,
    ) -> PullResult:
        """FOUND, NO_NEW_MSG, NO_MATCHED_MSG or OFFSET_ILLEGAL, at once."""
        how: dict[str, Any] = _filter(_selector(expression))
        pull = PullConsumer.pull
        place = frozen_queue(queue)
        found = self._run(pull, place, offset, count_max=max_nums, wait_s=wait_s, **how)
        return PullResult.of(found)

    def pull_block_if_not_found(
        self,
        queue: Place,
        expression: str | MessageSelector,
        offset: int,
        max_nums: int = 32,
    ) -> PullResult:
        """The same; the broker waits up to `broker_suspend_max_time_millis` for a message."""
        wait_s = self.broker_suspend_max_time_millis / 1000
        return self.pull(queue, expression, offset, max_nums, wait_s=wait_s)

    def fetch_consume_offset(self, queue: Place) -> int:
        """What was stored, -1 when there is nothing."""
        offset = self._run(PullConsumer.committed, frozen_queue(queue))
        return -1 if offset is None else offset

    def send_message_back(self, message: MessageExt, delay_level: int = 0) -> None:
        """The group gets the message again, by its retry topic."""
        self._run(PullConsumer.send_back, message.record, delay_level)


def _frozen_queues(queues: Iterable[Place]) -> list[Queue]:
    """Return the queues as the asyncio client takes them. Raises ConfigurationError."""
    return [frozen_queue(queue) for queue in queues]


def _frozen_offsets(offsets: Mapping[Place, int] | None) -> dict[Queue, int] | None:
    if offsets is None:
        return None
    return {frozen_queue(queue): offset for queue, offset in offsets.items()}


def _time_of(text: str) -> int:
    """Milliseconds since 1970. Raises ConfigurationError."""
    try:
        return int(datetime.strptime(text, "%Y%m%d%H%M%S").timestamp() * 1000)  # noqa: DTZ007
    except ValueError:
        raise ConfigurationError(
            f"consume_timestamp is {text!r}.", fix='Write it as "20260131235900".'
        ) from None


def _selector(expression: str | MessageSelector) -> MessageSelector:
    return MessageSelector.by_tag(expression) if isinstance(expression, str) else expression


def _filter(selector: MessageSelector) -> dict[str, str]:
    name = "where" if selector.expression_type == SQL92 else "tags"
    return {name: selector.expression}
