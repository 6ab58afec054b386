"""Read a range of one queue as raw records, with further pulls in progress meanwhile.

Spark and exports read this way. A reader yields concatenated stored records (spec/remoting.md §9),
which `record.arrow` decodes to columns, without an object for each message.

Without a filter, one message has one offset. So the range is divided into stripes of as many
messages as one response holds, which the first response shows. The start of every pull is then
known in advance, and `depth` pulls are in flight on one connection: the broker reads while the
caller decodes. If a response is shorter than its stripe, another pull completes the stripe, and the
responses to later pulls wait for it.

With a filter, only the response says where the next pull starts (`nextBeginOffset`). So a single
pull is sent ahead, while the caller decodes the response before it.

A SluiceMQ broker responds with up to `batch_bytes` to each pull (`sluiceBulk`), a Java broker with
up to 32 messages or 256 KiB. Chunks consist of whole records in the order of their offsets, and
contain only offsets with start <= offset < end.
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
"""The maximum size of a response in bytes, by default."""
DEPTH: Final = 3
"""The number of pulls in flight, by default."""
_COUNT_MAX: Final = 1_000_000
"""The maximum number of messages that one pull asks for."""
_SIZE_AND_OFFSET: Final = RECORD_BEGIN.struct_of("size", "queue_offset")

Chunk = bytes | memoryview


class BulkReader:
    """An iterator over the records of a range of one queue, in chunks.

        with BulkReader(address, "flights", 0, start, end) as reader:
            for chunk in reader:
                ...

    Each chunk is a buffer of whole records. It is valid until the next chunk is requested.

    `position` is the offset up to which all matching records have been yielded, `bytes_read` the
    size of the response bodies so far, and `pull_count` the number of responses.

    Iterating raises OffsetOutOfRangeError if the queue does not have the whole range (any more),
    RequestError if the broker refuses, ConnectionLostError, RequestTimeoutError, and
    ConfigurationError after a fork.
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
        """Prepare to read the messages of a queue from `start` to `end` (exclusive).

        - `broker_address` is "host:port". Nothing is connected before the first pull.
        - `subscription` filters the messages; None means all.
        - `broker` is the name of the broker, for errors.
        - `group` is the group under which it pulls. `credentials`, a pair (access key, secret key),
          sign the pulls.
        - `batch_bytes` limits each response, `depth` the pulls in flight, and `timeout_s` the wait
          for each response.
        - `tls` is True or a `Tls`; None means what the environment variable SLUICE_TLS says.
        """
        self.queue = MessageQueue(topic, broker, queue_id)
        self.position = start
        self.end = end
        self.bytes_read = 0
        self.pull_count = 0
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
        self._early_responses: dict[int, PullResponse] = {}
        self._pulls_in_flight: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        if self.position >= self.end:
            return iter(())
        return self._read_filtered_chunks() if self._filtered else self._read_striped_chunks()

    def _read_filtered_chunks(self) -> Iterator[Chunk]:
        """Yield the records of a range with a filter, as one block of bytes for each response.

        The next pull is sent before a block is yielded, so that the broker works meanwhile.
        `position` moves forward after each block. Raises OffsetOutOfRangeError and errors of the
        connection.
        """
        opaque = self._send(self.position, _COUNT_MAX)
        while True:
            response = self._receive(opaque)
            self._check_range(response)
            next_offset = response.next_offset
            if next_offset < self.end:
                opaque = self._send(next_offset, _COUNT_MAX)
            if response.status is PullStatus.FOUND:
                is_within = next_offset <= self.end
                yield response.data if is_within else _cut_at_offset(response.data, self.end)
            self.position = min(next_offset, self.end)
            if next_offset >= self.end:
                return

    def _read_striped_chunks(self) -> Iterator[Chunk]:
        """Yield the records of a range without a filter, as one block of bytes for each response.

        The range is divided into stripes, one for each pull, and `depth` pulls are in flight. The
        first response decides the length of a stripe. If a response is shorter than its stripe,
        another pull completes the stripe before later responses are used, and later stripes are
        shorter. `position` moves forward after each block. Raises OffsetOutOfRangeError and errors
        of the connection.
        """
        start = self.position
        response = self._receive(self._send(start, min(_COUNT_MAX, self.end - start)))
        self._check_range(response)
        stripe_length = max(1, response.next_offset - start)
        # If bytes limited the first response, ask for fewer messages, so that later responses
        # are probably whole stripes although their messages may be larger.
        if len(response.data) * 2 >= self._batch_bytes:
            stripe_length = max(1, stripe_length * 15 // 16)  # 6 % shorter

        # The pulls in flight are those of the offsets from `stripe_end` to `requested_end`.
        pending: deque[tuple[int, int]] = deque()  # (opaque of a pull, end of its stripe)
        stripe_end = requested_end = min(response.next_offset, self.end)
        while True:
            # Request further stripes before the caller processes this response.
            while len(pending) < self._depth and requested_end < self.end:
                next_end = min(self.end, requested_end + stripe_length)
                pending.append((self._send(requested_end, next_end - requested_end), next_end))
                requested_end = next_end
            if response.status is PullStatus.FOUND:
                yield response.data
            self.position = min(response.next_offset, self.end)

            # Complete the stripe if the response was shorter.
            missing_count = stripe_end - self.position
            if missing_count > 0:
                pending.appendleft((self._send(self.position, missing_count), stripe_end))
                stripe_length = max(1, stripe_length - missing_count)
            if not pending:
                return
            opaque, stripe_end = pending.popleft()
            response = self._receive(opaque)
            self._check_range(response)

    def _send(self, offset: int, count_max: int) -> int:
        """Send a pull of up to `count_max` messages from `offset` on, and return its opaque.

        The opaque is the number by which its response is found. The connection is opened if there
        is none.
        """
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
        self._pulls_in_flight[command.opaque] = offset, count_max
        return command.opaque

    def _receive(self, opaque: int) -> PullResponse:
        """Wait for the response to the pull with the number `opaque`, and return it.

        If the group was reset, the broker responds once with the new offset instead of messages.
        This reader has a fixed range, so it sends the same pull again, up to RESET_ATTEMPTS times.
        """
        response = self._receive_once(opaque)
        for _ in range(RESET_ATTEMPTS):
            if response.status is not PullStatus.OFFSET_ILLEGAL or response.remark != OFFSET_RESET:
                break
            opaque = self._send(*self._pulls_in_flight.pop(opaque))
            response = self._receive_once(opaque)
        self._pulls_in_flight.pop(opaque)
        return response

    def _receive_once(self, opaque: int) -> PullResponse:
        """Return the response to the pull with the number `opaque`, received now or before.

        Responses to other pulls that arrive first are kept in `_early_responses`. Their data is
        copied, because the channel reuses its buffer. Raises ConnectionLostError if the reader is
        closed.
        """
        response = self._early_responses.pop(opaque, None)
        while response is None:
            if self._channel is None:
                raise ConnectionLostError(f"the reader of {self.queue} is closed.")
            command = self._channel.receive()
            received = parse_pull_response(command, self._address)
            self.pull_count += 1
            self.bytes_read += len(command.body)
            if command.opaque == opaque:
                return received
            self._early_responses[command.opaque] = replace(received, data=bytes(received.data))
        return response

    def _check_range(self, response: PullResponse) -> None:
        """Raise OffsetOutOfRangeError if the queue lacks messages of this reader's range.

        This is so if the broker refuses the offset of a pull, or has no message at `position`.
        """
        if response.status is PullStatus.OFFSET_ILLEGAL or (
            response.status is PullStatus.NO_NEW_MSG and response.next_offset <= self.position
        ):
            raise OffsetOutOfRangeError(
                f"queue {self.queue.queue_id} of {self.queue.topic!r} does not have all offsets "
                f"from {self.position} to {self.end}: it has {response.offset_min} to "
                f"{response.offset_max}.",
                fix="Start from an offset that is there: retention deleted the messages, or the "
                "queue was reset.",
            )

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        channel = self._channel
        self._channel = None
        self._early_responses.clear()
        if channel is not None:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _cut_at_offset(chunk: Chunk, end: int) -> Chunk:
    """Return the beginning of a block of records, up to the first record at `end` or later.

    Records are in ascending order of offsets. Nothing is copied.
    """
    view = memoryview(chunk)
    position = 0
    while position < len(view):
        size, offset = _SIZE_AND_OFFSET.unpack_from(view, position)
        if offset >= end:
            break
        position += size
    return view[:position]
