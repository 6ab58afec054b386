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
from dataclasses import replace
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
PREPARE = "prepare"
COMMIT = "commit"
CHECKING = "checking"
PUBLISHED = "published"
PAUSE_FIRST_S: Final = 0.002
"""The first pause in seconds between two requests about a step; it doubles each time."""
PAUSE_LAST_S: Final = 0.05


class EpochState(NamedTuple):
    """The state of an epoch at a broker.

    `state` is "checking", "checked", "publishing" or "published", in this order. `ranges` are the
    ranges that are recorded for the epoch, empty before that. `published` is the number of
    published messages. `staging_topic` and `staging_queues` are the topic for staged rows and the
    number of its queues.
    """

    state: str
    ranges: Ranges
    published: int
    staging_topic: str
    staging_queues: int


def make_commit_request(
    query: str, epoch: int, ranges: Ranges = (), topics: Iterable[str] = (), *, step: str = PREPARE
) -> Command:
    """Return the request that moves an epoch of a streaming query one step on, at one broker.

    The rows of an epoch are staged first, that is, stored where no consumer reads them. `query` and
    `epoch` identify the epoch. `ranges` are its staged rows, and `topics` the topics to which they
    belong. `step` is PREPARE, to check and record the ranges, or COMMIT, to publish the rows.
    Without ranges, the request asks whether the broker supports epochs. The request code is
    SLUICE_COMMIT_EPOCH (900201).
    """
    joined_topics = ",".join(sorted(topics))
    header = CommitEpochRequest(query=query, epoch=epoch, step=step, topics=joined_topics)
    return make_request(
        RequestCode.SLUICE_COMMIT_EPOCH, header, staging.encode_staged_ranges(ranges)
    )


def parse_epoch_state(response: Command, address: str = "") -> EpochState:
    """Decode the response of a broker to a request about an epoch of a streaming query.

    `address` is the broker's, for errors. Raises RequestError if the response is not a success,
    ProtocolError if a field is missing.
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
    """Return whether `error` says that the broker does not know the request for epochs.

    RocketMQ brokers do not know it.
    """
    return error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


class EpochCommitter:
    """Commits epochs of one streaming query or batch write."""

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
        """Create a committer for the epochs of one streaming query.

        `call(broker, request)` sends a request to the master of a broker and returns the response.
        `brokers` are the names of all masters, `query` is the id of the query, and `topics` are the
        topics to which the query writes. `pause(seconds)` blocks, and `monotonic_s()` returns the
        time. A step fails if it makes no progress for `timeout_s` seconds.
        """
        self._call = call
        self._brokers = sorted(brokers)
        self._query = query
        self._topics = sorted(topics)
        self._pause = pause
        self._monotonic_s = monotonic_s
        self._timeout_s = timeout_s

    def commit(self, epoch: int, ranges: Ranges) -> Ranges:
        """Publish the rows of an epoch at all brokers, and return the ranges that were published.

        `ranges` are the rows that the tasks have staged, that is, stored where no consumer reads
        them. If an earlier attempt has recorded other ranges for the epoch, those are published and
        returned instead. All rows are published when this method returns.

        Raises RequestError if a broker refuses: then nothing is published, unless the epoch was
        recorded before. After RequestTimeoutError or ConnectionLostError, call this method again
        with the same epoch.
        """
        # The first broker decides. All others must have checked the epoch before.
        deciding_broker, *other_brokers = self._brokers
        for other_broker in other_brokers:
            state = self._poll_step(other_broker, epoch, ranges, PREPARE)
            if state.ranges:  # recorded in an earlier attempt
                ranges = state.ranges

        decided_ranges = self._poll_step(deciding_broker, epoch, ranges, COMMIT).ranges

        # Ask all brokers to publish first, and wait for them afterwards, so that they work at the
        # same time.
        brokers_with_ranges = {staged_range.broker for staged_range in decided_ranges}
        publishing_brokers = sorted(brokers_with_ranges - {deciding_broker})
        for publishing_broker in publishing_brokers:
            self._request_step(publishing_broker, epoch, decided_ranges, COMMIT)
        for broker in (deciding_broker, *publishing_brokers):
            self._poll_step(
                broker, epoch, decided_ranges or ranges, COMMIT, waits_for_publication=True
            )
        return decided_ranges

    def _request_step(self, broker: str, epoch: int, ranges: Ranges, step: str) -> EpochState:
        """Send one request for `step` (PREPARE or COMMIT), and return the epoch's state.

        The broker may go on with the step after the response. Raises RequestError if the broker
        refuses, and the errors of `call`.
        """
        request = make_commit_request(self._query, epoch, ranges, self._topics, step=step)
        return parse_epoch_state(self._call(broker, request), broker)

    def _poll_step(
        self,
        broker: str,
        epoch: int,
        ranges: Ranges,
        step: str,
        *,
        waits_for_publication: bool = False,
    ) -> EpochState:
        """Repeat the request for a step until the broker has done it, and return its last state.

        The step is done when the broker has checked the epoch, or published it if
        `waits_for_publication`. The pause between two requests doubles up to `PAUSE_LAST_S`.

        Raises RequestTimeoutError if no further message is published for `timeout_s` seconds,
        RequestError if the broker refuses, and the errors of `call`.
        """
        deadline_s = self._monotonic_s() + self._timeout_s
        pause_s = PAUSE_FIRST_S
        published_count = -1
        while True:
            state = self._request_step(broker, epoch, ranges, step)
            is_checked = state.state != CHECKING
            if state.state == PUBLISHED or (is_checked and not waits_for_publication):
                return state
            if state.published != published_count:  # progress extends the deadline
                published_count = state.published
                deadline_s = self._monotonic_s() + self._timeout_s
            if self._monotonic_s() >= deadline_s:
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
        """Create an empty list for one attempt of the task that writes `partition`.

        `attempt` is the number of the attempt.
        """
        self.message_count: int = 0
        self._partition = partition
        self._attempt = attempt
        self._ranges: list[StagedRange] = []

    def add(self, broker: str, queue_id: int, offset: int, count: int, bodies: Buffer) -> None:
        """Add `count` messages that are stored from `offset` on in a queue of the staging topic.

        If they directly follow the last range, that range grows. `bodies` are the bodies of the
        messages, one after the other. They go into the checksum of the range.
        """
        self.message_count += count
        if self._ranges and self._is_end_of(self._ranges[-1], broker, queue_id, offset):
            last_range = self._ranges.pop()
            grown_range = replace(
                last_range,
                count=last_range.count + count,
                checksum=zlib.crc32(bodies, last_range.checksum),
            )
            self._ranges.append(grown_range)
            return
        checksum = zlib.crc32(bodies)
        self._ranges.append(
            StagedRange(broker, queue_id, offset, count, checksum, self._partition, self._attempt)
        )

    @staticmethod
    def _is_end_of(staged_range: StagedRange, broker: str, queue_id: int, offset: int) -> bool:
        """Return whether a range ends at `offset` in this queue."""
        is_same_queue = staged_range.broker == broker and staged_range.queue_id == queue_id
        return is_same_queue and staged_range.offset + staged_range.count == offset

    @property
    def ranges(self) -> tuple[StagedRange, ...]:
        """The staged ranges, in the order of the rows."""
        return tuple(self._ranges)
