"""Buffers of prefetched messages: from the readers that pull them to the consumers that take them.

    QueueReader --put--> PrefetchBuffer --get, take--> consumer
                         (one for each topic)

A `PrefetchBuffer` is first in, first out over all queues of its topic. An `OrderedPrefetchBuffer`
has one `QueueBuffer` for each queue and hands out one message of a queue at a time. A
`PausablePrefetchBuffer` keeps the messages of paused queues back. A `RetryRouter` passes the
messages of a group's retry topic on to the buffers of the topics that they were sent to.

The buffers have no limit of their own: each reader stops pulling while too many of its messages are
unacknowledged. All methods must be called on the client's event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from sluicemq.client.aio.received import Origin, ReceivedMessage
from sluicemq.errors import UndecodableBodyError
from sluicemq.model.topic import MessageQueue


class PrefetchBuffer:
    """Prefetched messages of one topic, first in, first out.

    Consumers take messages with `get`, or with `take` if they do not want to wait. `owner` is the
    consumer that takes a message, or None; the message's origin notes it. `is_shareable` says that
    several streams may take from this buffer.
    """

    __slots__ = ("_error", "_items", "_waiters", "is_shareable")

    def __init__(self, *, is_shareable: bool = False) -> None:
        """Create an empty buffer. Several streams may take messages from it if `is_shareable`."""
        self.is_shareable: bool = is_shareable
        self._items: deque[ReceivedMessage] = deque()
        self._waiters: deque[tuple[asyncio.Future[None], object]] = deque()
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, messages: list[ReceivedMessage]) -> None:
        """Append messages, and wake as many waiting consumers."""
        self._items.extend(messages)
        self._wake(len(messages))

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Put messages that the application had received back to the front of the buffer.

        They come before the messages in the buffer, because they are older. Waiting `get` calls
        receive them.
        """
        for message in messages:
            message.origin.mark_returned(message)
        self._items.extendleft(reversed(messages))
        self._wake(len(messages))

    def put_back_later(self, message: ReceivedMessage, seconds: float) -> None:
        """Put a message that was handed out at the front again after `seconds` seconds."""
        asyncio.get_running_loop().call_later(seconds, self.put_back, [message])

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        """Remove all messages for which `unwanted(message)` returns True."""
        self._items = deque(message for message in self._items if not unwanted(message))

    def offer_next(self, origin: Origin) -> None:
        """Let a consumer take the next message of `origin`, if that is possible now.

        Called when a message of `origin` was acknowledged or returned. Only ordered buffers do
        something.
        """

    def remove_origin(self, origin: Origin) -> None:
        """Remove the messages of `origin`, which has ended. Only ordered buffers do something."""

    def fail(self, error: BaseException) -> None:
        """Let `get` raise `error` from now on, once the buffer is empty.

        Only the first error counts.
        """
        self._error = self._error or error
        self._wake(len(self._waiters))

    def fail_waiters_of(self, owner: object, error: BaseException) -> None:
        """Raise `error` in the `get` calls of `owner` that wait now.

        The `get` calls of other owners continue to wait.
        """
        for waiter, waiter_owner in self._waiters:
            if waiter_owner is owner and not waiter.done():
                waiter.set_exception(error)

    def _wake(self, count: int) -> None:
        """Wake up to `count` waiting `get` calls, the longest waiting first."""
        while count > 0 and self._waiters:
            waiter, _ = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    async def get(self, owner: object = None) -> ReceivedMessage:
        """Wait for the next message, and hand it out to `owner`, which is any object.

        Raises the error that was passed to `fail`, or to `fail_waiters_of` for this owner. Raises
        UndecodableBodyError if the body of the next message cannot be decoded and its consumer
        wants an error.
        """
        while (message := self.take(owner)) is None:
            if self._error is not None:
                raise self._error
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((waiter, owner))
            try:
                await waiter
            except asyncio.CancelledError:
                # It was woken before it was cancelled: wake the next one, a message is there.
                if waiter.done() and not waiter.cancelled():
                    self._wake(1)
                raise
        return message

    def take_batch(self, first_message: ReceivedMessage, count_max: int) -> list[ReceivedMessage]:
        """Return `first_message` and up to `count_max - 1` messages after it, without waiting.

        `first_message` must have been taken just now. Only messages of the same queue that directly
        follow it in the buffer are added. A message whose body cannot be decoded ends the batch,
        unless the consumer accepts such messages.
        """
        batch = [first_message]
        prefetched = self._items
        origin = first_message.origin
        while len(batch) < count_max and prefetched and prefetched[0].origin is origin:
            if origin.needs_body_check and prefetched[0].body_error is not None:
                break
            batch.append(prefetched.popleft())
        origin.mark_handed_out(batch[1:], None)
        return batch

    def take(self, owner: object) -> ReceivedMessage | None:
        """Hand out the next message to `owner`, or return None if the buffer is empty.

        Raises UndecodableBodyError if the body of the next message cannot be decoded and its
        consumer wants an error. The message stays, so every later call raises as well.
        """
        while self._items:
            message = self._items[0]
            is_passed = not message.origin.needs_body_check or self._check_body(message)
            self._items.popleft()
            if is_passed:
                message.origin.mark_handed_out([message], owner)
                return message
        return None

    def _check_body(self, message: ReceivedMessage) -> bool:
        """Return whether the application may receive the message; False means that it must not.

        If the body cannot be decoded, the consumer's `on_undecodable` decides: the application
        receives the message, it is stored as a dead letter, or UndecodableBodyError is raised.
        Before it is raised, all waiting `get` calls are woken, so that they raise it too.
        """
        try:
            return message.origin.check_body(message)
        except UndecodableBodyError:
            self._wake(len(self._waiters))
            raise

    def fill(self, messages: list[ReceivedMessage], count_max: int, owner: object) -> None:
        """Append messages to the list `messages` until it has `count_max`, without waiting.

        It ends before a message that would raise UndecodableBodyError; the next `take` raises it.
        """
        while len(messages) < count_max:
            try:
                message = self.take(owner)
            except UndecodableBodyError:
                return
            if message is None:
                return
            messages.append(message)


class PausablePrefetchBuffer(PrefetchBuffer):
    """A buffer that does not hand out the messages of paused queues."""

    __slots__ = ("_paused_messages", "paused_queues")

    def __init__(self) -> None:
        """Create an empty buffer with no paused queue."""
        super().__init__()
        self.paused_queues: set[MessageQueue] = set()
        """The queues whose messages are not handed out."""
        self._paused_messages: deque[ReceivedMessage] = deque()

    def pause_queue(self, queue: MessageQueue) -> None:
        """Hand out no messages of a queue until `resume_queue`, not even those in the buffer."""
        self.paused_queues.add(queue)
        # `put` keeps back the messages of paused queues.
        waiting = list(self._items)
        self._items.clear()
        self.put(waiting)

    def resume_queue(self, queue: MessageQueue) -> None:
        """Hand out the messages of a queue again, first those that were kept back."""
        self.paused_queues.discard(queue)
        paused_messages = list(self._paused_messages)
        self._paused_messages.clear()
        self.put_back(paused_messages)  # messages of other paused queues are kept back again

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Put messages back to the front; those of paused queues are kept back."""
        super().put_back(self._set_aside_paused(messages))

    def put(self, messages: list[ReceivedMessage]) -> None:
        """Append messages; those of paused queues are kept back."""
        super().put(self._set_aside_paused(messages))

    def _set_aside_paused(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Keep back those of `messages` whose queue is paused, and return the others."""
        if not self.paused_queues:
            return messages
        self._paused_messages.extend(
            message for message in messages if message.queue in self.paused_queues
        )
        return [message for message in messages if message.queue not in self.paused_queues]

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        """Remove the messages for which `unwanted` returns True, also those of paused queues."""
        super().discard(unwanted)
        self._paused_messages = deque(
            message for message in self._paused_messages if not unwanted(message)
        )


class QueueBuffer:
    """The prefetched messages of one queue that is consumed in order.

    `is_suspended` says that the queue pauses after a failed message. `is_listed` says that this
    buffer is in the list of buffers that may have a message to hand out.
    """

    __slots__ = ("is_listed", "is_suspended", "messages", "origin")

    def __init__(self, origin: Origin) -> None:
        """Create the empty buffer of one queue, whose messages come from the reader `origin`."""
        self.origin = origin
        self.messages: deque[ReceivedMessage] = deque()
        self.is_suspended: bool = False
        self.is_listed: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether its next message may be handed out now: no message of the queue is handed out."""
        origin = self.origin
        is_free = not origin.handed_out and not self.is_suspended and origin.may_hand_out
        return bool(self.messages) and is_free


class OrderedPrefetchBuffer(PrefetchBuffer):
    """A buffer that hands out one message of a queue at a time, in the order of offsets.

    The next message of a queue may leave when the previous one was acknowledged. The length is the
    number of queues that have a message to hand out.
    """

    __slots__ = ("_queue_buffers", "_ready")

    def __init__(self, *, is_shareable: bool = False) -> None:
        """Create an empty buffer. Several streams may take messages from it if `is_shareable`."""
        super().__init__(is_shareable=is_shareable)
        self._queue_buffers: dict[Origin, QueueBuffer] = {}
        self._ready: deque[QueueBuffer] = deque()
        """The buffers that may have a message to hand out, in the order in which they got one."""

    def __len__(self) -> int:
        return sum(queue_buffer.is_ready for queue_buffer in self._ready)

    def put(self, messages: list[ReceivedMessage]) -> None:
        """Append messages to the buffers of their queues, and wake consumers that wait for them."""
        for message in messages:
            self._buffer_for(message).messages.append(message)
        for queue_buffer in dict.fromkeys(self._buffer_for(message) for message in messages):
            self._list_if_ready(queue_buffer)

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Put messages that the application had received back to the front of their queues.

        Waiting `get` calls receive them.
        """
        for message in reversed(messages):
            queue_buffer = self._buffer_for(message)
            queue_buffer.messages.appendleft(message)
            message.origin.mark_returned(message)
            self._list_if_ready(queue_buffer)

    def put_back_later(self, message: ReceivedMessage, seconds: float) -> None:
        """Put a message back into the buffer of its queue, and pause the queue for `seconds`.

        The message is inserted in the order of offsets. So a failed batch can be put back message
        by message.
        """
        queue_buffer = self._buffer_for(message)
        older_count = sum(
            waiting_message.queue_offset < message.queue_offset
            for waiting_message in queue_buffer.messages
        )
        queue_buffer.messages.insert(older_count, message)
        queue_buffer.is_suspended = True

        def end_pause() -> None:
            queue_buffer.is_suspended = False
            self._list_if_ready(queue_buffer)

        asyncio.get_running_loop().call_later(seconds, end_pause)

    def _buffer_for(self, message: ReceivedMessage) -> QueueBuffer:
        """Return the buffer of the message's queue. Create it for the first message."""
        queue_buffer = self._queue_buffers.get(message.origin)
        if queue_buffer is None:
            queue_buffer = self._queue_buffers[message.origin] = QueueBuffer(message.origin)
        return queue_buffer

    def _list_if_ready(self, queue_buffer: QueueBuffer) -> None:
        """Let a consumer take the next message of a queue, unless a handler has another one of it.

        The queue is appended to the list of queues that are ready, and a consumer is woken. Nothing
        happens if the queue is paused, empty or listed already.
        """
        is_free = not queue_buffer.origin.handed_out and not queue_buffer.is_suspended
        if queue_buffer.messages and is_free and not queue_buffer.is_listed:
            queue_buffer.is_listed = True
            self._ready.append(queue_buffer)
            self._wake(1)

    def take(self, owner: object) -> ReceivedMessage | None:
        """Hand out the next message of the first queue that is ready, or return None.

        A queue is ready if it is not paused and none of its messages is handed out. Raises
        UndecodableBodyError if the body of that message cannot be decoded and its consumer wants an
        error.
        """
        while self._ready:
            queue_buffer = self._ready[0]
            is_ready = queue_buffer.is_ready
            # `_check_body` may raise: then the queue and its message stay in front.
            is_passed = is_ready and (
                not queue_buffer.origin.needs_body_check
                or self._check_body(queue_buffer.messages[0])
            )
            self._ready.popleft()
            queue_buffer.is_listed = False
            if is_ready:
                message = queue_buffer.messages.popleft()
                if is_passed:
                    queue_buffer.origin.mark_handed_out([message], owner)
                    return message
        return None

    def take_batch(self, first_message: ReceivedMessage, count_max: int) -> list[ReceivedMessage]:
        """Return `first_message` and up to `count_max - 1` next messages of its queue, at once.

        A message whose body cannot be decoded ends the batch, unless the consumer accepts such
        messages.
        """
        queue_buffer = self._buffer_for(first_message)
        batch = [first_message]
        origin = queue_buffer.origin
        while len(batch) < count_max and queue_buffer.messages and origin.may_hand_out:
            if origin.needs_body_check and queue_buffer.messages[0].body_error is not None:
                break
            batch.append(queue_buffer.messages.popleft())
        origin.mark_handed_out(batch[1:], None)
        return batch

    def offer_next(self, origin: Origin) -> None:
        """List the queue of `origin` if its next message may be handed out now."""
        queue_buffer = self._queue_buffers.get(origin)
        if queue_buffer is not None:
            self._list_if_ready(queue_buffer)

    def remove_origin(self, origin: Origin) -> None:
        """Remove the buffer of the queue of `origin` with its messages."""
        queue_buffer = self._queue_buffers.pop(origin, None)
        if queue_buffer is not None:
            queue_buffer.messages.clear()

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        """Remove the messages for which `unwanted` returns True from the buffers of all queues."""
        for queue_buffer in self._queue_buffers.values():
            queue_buffer.messages = deque(
                message for message in queue_buffer.messages if not unwanted(message)
            )

    def fail_waiters_of(self, owner: object, error: BaseException) -> None:
        """Raise `error` in the waiting `get` calls of `owner`, and release its queues.

        The messages that `owner` has received count as returned, so that other consumers can take
        the next messages of these queues.
        """
        super().fail_waiters_of(owner, error)
        for queue_buffer in tuple(self._queue_buffers.values()):
            queue_buffer.origin.release_owner(owner)
            self._list_if_ready(queue_buffer)


class RetryRouter:
    """Passes the messages of a group's retry topic on to the buffers of their original topics.

    `buffers` maps topic to buffer. A message of a topic that is not subscribed to any more goes to
    another topic's buffer. Readers use it like a buffer.
    """

    __slots__ = ("_buffers",)

    def __init__(self, buffers: Mapping[str, PrefetchBuffer]) -> None:
        self._buffers = buffers

    def _buffer_for(self, message: ReceivedMessage) -> PrefetchBuffer | None:
        """Return the buffer for a message, or None if no topic is subscribed to."""
        buffer = self._buffers.get(message.topic)  # compare with None: an empty one is false
        return next(iter(self._buffers.values()), None) if buffer is None else buffer

    def put(self, messages: list[ReceivedMessage]) -> None:
        """Put each message of the retry topic into the buffer of the topic it first came from.

        A message of a topic without a buffer is dropped.
        """
        for message in messages:
            buffer = self._buffer_for(message)
            if buffer is not None:
                buffer.put([message])

    def put_back_later(self, message: ReceivedMessage, seconds: float) -> None:
        """Put a message into its buffer again after `seconds` seconds."""
        buffer = self._buffer_for(message)
        if buffer is not None:
            buffer.put_back_later(message, seconds)

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        """Remove unwanted messages from all buffers."""
        for buffer in self._buffers.values():
            buffer.discard(unwanted)

    def fail(self, error: BaseException) -> None:
        """Let `get` of all buffers raise `error`."""
        for buffer in self._buffers.values():
            buffer.fail(error)

    def offer_next(self, origin: Origin) -> None:
        """Call `offer_next` of all buffers: the messages of `origin` may be in several."""
        for buffer in self._buffers.values():
            buffer.offer_next(origin)

    def remove_origin(self, origin: Origin) -> None:
        """Remove the messages of `origin` from all buffers."""
        for buffer in self._buffers.values():
            buffer.remove_origin(origin)
