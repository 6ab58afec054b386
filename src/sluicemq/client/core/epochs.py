"""Commit the epochs of a sink that writes exactly once (design/0007).

    one broker        repeat the commit until the broker reports `published`
    several brokers   prepare at all but the first; commit at the first; then commit at the others
                      the ranges that the first has recorded

The first broker by name decides. It may have recorded other ranges in an earlier attempt, before a
crash. Every response contains the recorded ranges, so a repetition never decides twice: ranges that
another broker has recorded already take precedence over the newly staged ones.

Nothing here does I/O except through the `call` that is passed in.

`StagedRangeList` collects what one attempt of a task has staged: ranges of staging queues with
their checksums. A batch is stored at consecutive offsets of one queue. Consecutive batches form one
range, so a task with a queue of its own has one range, however many rows it writes.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from sluicemq.client.core.requests import expect_success, header_fields, int_field, make_request
from sluicemq.errors import RequestError, RequestTimeoutError
from sluicemq.model.bodies import Buffer
from sluicemq.wire import staging
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import CommitEpochRequest, StagedRange

CallBroker = Callable[[str, Command], Command]
"""Sends a request to a broker by name. Raises ConnectionLostError, RequestTimeoutError."""
Ranges = tuple[StagedRange, ...]
PREPARE, COMMIT = "prepare", "commit"
CHECKING, PUBLISHED = "checking", "published"
PAUSE_FIRST_S: Final = 0.002
"""The first pause in seconds between two requests about a step; it doubles each time."""
PAUSE_LAST_S: Final = 0.05


class EpochState(NamedTuple):
    """The state of an epoch at a broker.

    `state` is "checking", "checked", "publishing" or "published". `ranges` are the recorded ranges,
    `published` is the number of published messages. `staging_topic` and `staging_queues` are the
    topic for staged rows and the number of its queues.
    """

    state: str
    ranges: Ranges
    published: int
    staging_topic: str
    staging_queues: int


def make_commit_request(
    query: str, epoch: int, ranges: Ranges = (), topics: Iterable[str] = (), *, step: str = PREPARE
) -> Command:
    """Return the request SLUICE_COMMIT_EPOCH (900201).

    Without ranges it asks whether the broker supports epochs.
    """
    listed = ",".join(sorted(topics))
    header = CommitEpochRequest(query=query, epoch=epoch, step=step, topics=listed)
    return make_request(
        RequestCode.SLUICE_COMMIT_EPOCH, header, staging.encode_staged_ranges(ranges)
    )


def parse_epoch_state(response: Command, address: str = "") -> EpochState:
    """Parse the response to SLUICE_COMMIT_EPOCH (900201).

    Raise RequestError if it is not a success.
    """
    fields = header_fields(expect_success(response, address))
    return EpochState(
        fields.get("state", ""),
        staging.decode_staged_ranges(response.body),
        int_field(response, "published"),
        fields.get("stagingTopic", ""),
        int_field(response, "stagingQueues"),
    )


def is_unknown_request(error: RequestError) -> bool:
    """Return whether the broker does not support epochs, such as a RocketMQ broker."""
    return error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


class EpochCommitter:
    """Commits epochs of one streaming query.

    `brokers` are the names of all masters, `topics` those to which the rows are written. `pause`
    sleeps for a number of seconds. A step fails if it makes no progress for `timeout_s` seconds.
    """

    def __init__(
        self,
        call: CallBroker,
        brokers: Sequence[str],
        query: str,
        topics: Iterable[str],
        *,
        pause: Callable[[float], None],
        monotonic_s: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self._call = call
        self._brokers = sorted(brokers)
        self._query = query
        self._topics = sorted(topics)
        self._pause = pause
        self._monotonic_s = monotonic_s
        self._timeout_s = timeout_s

    def commit(self, epoch: int, ranges: Ranges) -> Ranges:
        """Commit an epoch at all brokers and return the ranges that were recorded for it.

        These are other ranges than the given ones if the epoch was committed before. Raises
        RequestError if a broker refuses: then nothing is published unless the epoch was recorded
        before. After RequestTimeoutError or ConnectionLostError, try again with the same epoch.
        """
        first, *others = self._brokers
        for other in others:
            state = self._poll_step(other, epoch, ranges, PREPARE)
            if state.ranges:
                ranges = state.ranges
        decided = self._poll_step(first, epoch, ranges, COMMIT).ranges
        involved = sorted({one.broker for one in decided} - {first})
        for other in involved:  # start them all before waiting for one
            self._request_step(other, epoch, decided, COMMIT)
        for broker in (first, *involved):
            self._poll_step(broker, epoch, decided or ranges, COMMIT, is_last=True)
        return decided

    def _request_step(self, broker: str, epoch: int, ranges: Ranges, step: str) -> EpochState:
        """Request one step of a broker once and return the state."""
        request = make_commit_request(self._query, epoch, ranges, self._topics, step=step)
        return parse_epoch_state(self._call(broker, request), broker)

    def _poll_step(
        self, broker: str, epoch: int, ranges: Ranges, step: str, *, is_last: bool = False
    ) -> EpochState:
        """Request a step of a broker repeatedly until it is done.

        That is when the broker has checked the epoch or, with `is_last`, published it. Raises
        RequestTimeoutError if the broker makes no progress for `timeout_s` seconds.
        """
        end_s, pause_s = self._monotonic_s() + self._timeout_s, PAUSE_FIRST_S
        reached = -1
        while True:
            state = self._request_step(broker, epoch, ranges, step)
            if state.state == PUBLISHED or (state.state != CHECKING and not is_last):
                return state
            if state.published != reached:  # progress extends the deadline
                reached = state.published
                end_s = self._monotonic_s() + self._timeout_s
            if self._monotonic_s() >= end_s:
                raise RequestTimeoutError(
                    f"the broker {broker!r} has not committed epoch {epoch} of {self._query} "
                    f"within {self._timeout_s:g} s: its state is {state.state!r}.",
                    fix="Run the query again, which commits the epoch only once, or raise "
                    "timeoutMs.",
                )
            self._pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_LAST_S)


class StagedRangeList:
    """The ranges that one attempt of a task has staged. `message_count` counts their messages."""

    def __init__(self, partition: int, attempt: int) -> None:
        self.message_count: int = 0
        self._partition = partition
        self._attempt = attempt
        self._ranges: list[StagedRange] = []

    def add(self, broker: str, queue_id: int, offset: int, count: int, bodies: Buffer) -> None:
        """Add a batch of `count` messages that is stored at `offset`.

        `bodies` are the bodies of the messages, one after the other; they go into the checksum.
        """
        last = self._ranges[-1] if self._ranges else None
        checksum = 0
        self.message_count += count
        if last is not None and (last.broker, last.queue_id, last.offset + last.count) == (
            broker,
            queue_id,
            offset,
        ):
            offset, count, checksum = last.offset, last.count + count, last.checksum
            self._ranges.pop()
        checksum = zlib.crc32(bodies, checksum)
        self._ranges.append(
            StagedRange(broker, queue_id, offset, count, checksum, self._partition, self._attempt)
        )

    @property
    def ranges(self) -> tuple[StagedRange, ...]:
        """The staged ranges, in the order of the rows."""
        return tuple(self._ranges)
