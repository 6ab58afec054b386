"""Bulk reading: a range of one queue as raw records, with the next pulls already on their way.

For Spark and exports: what comes out is concatenated stored records (spec/remoting.md §9), which
`record.arrow` decodes in columns; no object a message is made here.

Without a filter the range is cut into stripes of as many messages as one answer holds (learnt from
the first answer), so the start of the next pulls is known before the present one is answered, and
`depth` pulls are in flight on one connection: the broker reads while we decode. An answer shorter
than its stripe is completed by another pull; later answers wait meanwhile. With a filter the next
start is only known from the answer (`nextBeginOffset`), so one pull is sent ahead: it travels while
the caller decodes the last one.

A SluiceMQ broker answers up to `batch_bytes` a pull (`sluiceBulk`), a Java broker 32 messages or
256 KiB. Bytes come out in offset order, whole records, offsets start <= offset < end.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Self

from sluicemq.client.affinity import ClientAffinity
from sluicemq.client.core import requests
from sluicemq.client.core.identity import OFFSET_RESET, RESET_ATTEMPTS
from sluicemq.client.core.names import Credentials, sign_request
from sluicemq.client.core.requests import PullResponse, PullStatus, parse_pull_response
from sluicemq.errors import ConnectionLostError, OffsetOutOfRangeError
from sluicemq.model.subscription import ALL, Subscription
from sluicemq.model.system_names import TOOLS_GROUP
from sluicemq.model.topic import MessageQueue
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.tls import Tls
from sluicemq.record.layout import RECORD_BEGIN

BATCH_BYTES: Final = 4 * 1024 * 1024
DEPTH: Final = 3
_COUNT_MAX: Final = 1_000_000
_SIZE_AND_OFFSET: Final = RECORD_BEGIN.only("size", "queue_offset")

Chunk = bytes | memoryview


class BulkReader:
    """Iterates over chunks of records of one queue range. Use it in a `with` statement.

    A chunk is valid until the next one is asked for. `position` is the offset up to which all
    matching messages have been handed out; `bytes_read` counts body bytes off the socket; `pulls`
    the requests answered. Raises OffsetOutOfRangeError when the range is not (or no longer) in the
    queue, RequestError when the broker refuses, ConnectionLostError and RequestTimeoutError.
    """

    def __init__(
        self,
        broker_address: str,
        topic: str,
        queue_id: int,
        start: int,
        end: int,
        subscription: Subscription | None = None,
        *,
        broker: str = "",
        group: str = TOOLS_GROUP,
        credentials: Credentials | tuple[str, str] | None = None,
        batch_bytes: int = BATCH_BYTES,
        depth: int = DEPTH,
        timeout_s: float = 30.0,
        tls: Tls | bool | None = None,
    ) -> None:
        self.queue = MessageQueue(topic, broker, queue_id)
        self.position = start
        self.end = end
        self.bytes_read = 0
        self.pulls = 0
        self._address = broker_address
        self._filtered = subscription is not None and not subscription.is_everything
        self._subscription = subscription or Subscription(topic, ALL)
        self._group = group
        self._credentials = Credentials.from_value(credentials)
        self._batch_bytes = batch_bytes
        self._depth = depth
        self._timeout_s = timeout_s
        self._tls = Tls.resolve(tls)
        self._affinity = ClientAffinity()
        self._channel: BlockingChannel | None = None
        self._held: dict[int, PullResponse] = {}
        self._asked: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        if self.position >= self.end:
            return iter(())
        return self._filtered_chunks() if self._filtered else self._striped_chunks()

    def _filtered_chunks(self) -> Iterator[Chunk]:
        wanted = self._send(self.position, _COUNT_MAX)
        while True:
            answer = self._receive(wanted)
            self._check(answer)
            following = answer.next_offset
            if following < self.end:
                wanted = self._send(following, _COUNT_MAX)
            if answer.status is PullStatus.FOUND:
                yield answer.data if following <= self.end else _before(answer.data, self.end)
            self.position = min(following, self.end)
            if following >= self.end:
                return

    def _striped_chunks(self) -> Iterator[Chunk]:
        first_start = self.position
        first = self._receive(self._send(first_start, min(_COUNT_MAX, self.end - first_start)))
        self._check(first)
        # A little less than one answer held, when its bytes were the limit.
        stripe = max(1, first.next_offset - first_start)
        if len(first.data) * 2 >= self._batch_bytes:
            stripe = max(1, stripe * 15 // 16)
        sent_to = min(first.next_offset, self.end)
        pending: deque[tuple[int, int]] = deque()
        answer, until = first, sent_to
        while True:
            while len(pending) < self._depth and sent_to < self.end:
                stop = min(self.end, sent_to + stripe)
                pending.append((self._send(sent_to, stop - sent_to), stop))
                sent_to = stop
            if answer.status is PullStatus.FOUND:
                yield answer.data
            self.position = min(answer.next_offset, self.end)
            if self.position < until:
                pending.appendleft((self._send(self.position, until - self.position), until))
                stripe = max(1, min(stripe, stripe - (until - self.position)))
            if not pending:
                return
            opaque, until = pending.popleft()
            answer = self._receive(opaque)
            self._check(answer)

    def _send(self, offset: int, count_max: int) -> int:
        self._affinity.check_process()
        command = requests.pull(
            self._group,
            self.queue,
            offset,
            count_max=count_max,
            bytes_max=self._batch_bytes,
            subscription=self._subscription,
            bulk=True,
        )
        if self._channel is None:
            self._channel = BlockingChannel(self._address, self._timeout_s, self._tls)
        self._channel.send(sign_request(command, self._credentials))
        self._asked[command.opaque] = offset, count_max
        return command.opaque

    def _receive(self, opaque: int) -> PullResponse:
        """The answer to one request. A reset of the group is none: the range is given, so the
        request is sent again, which tells the broker that the reset was heard."""
        answer = self._next(opaque)
        for _ in range(RESET_ATTEMPTS):
            if answer.status is not PullStatus.OFFSET_ILLEGAL or answer.remark != OFFSET_RESET:
                break
            opaque = self._send(*self._asked.pop(opaque))
            answer = self._next(opaque)
        self._asked.pop(opaque)
        return answer

    def _next(self, opaque: int) -> PullResponse:
        """What was answered to one request; answers to others that come first are held, copied."""
        held = self._held.pop(opaque, None)
        while held is None:
            if self._channel is None:
                raise ConnectionLostError(f"the reader of {self.queue} is closed.")
            command = self._channel.receive()
            answer = parse_pull_response(command, self._address)
            self.pulls += 1
            self.bytes_read += len(command.body)
            if command.opaque == opaque:
                return answer
            self._held[command.opaque] = replace(answer, data=bytes(answer.data))
        return held

    def _check(self, answer: PullResponse) -> None:
        if answer.status is PullStatus.OFFSET_ILLEGAL or (
            answer.status is PullStatus.NO_NEW_MSG and answer.next_offset <= self.position
        ):
            raise OffsetOutOfRangeError(
                f"offsets {self.position} to {self.end} of queue {self.queue.queue_id} of "
                f"{self.queue.topic!r} are not all there: it holds {answer.offset_min} to "
                f"{answer.offset_max}.",
                fix="Retention deleted them, or the queue was reset: start from what is there.",
            )

    def close(self) -> None:
        """Closes the connection."""
        channel, self._channel = self._channel, None
        self._held.clear()
        if channel is not None:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _before(data: Chunk, end: int) -> Chunk:
    """The records whose queue offset is below `end`; only the last chunk of a range needs this."""
    view, at = memoryview(data), 0
    while at < len(view):
        size, offset = _SIZE_AND_OFFSET.unpack_from(view, at)
        if offset >= end:
            break
        at += size
    return view[:at]
