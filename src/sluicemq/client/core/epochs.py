"""How a sink that writes exactly once commits an epoch (design/0007). Pure but for `call`.

    one broker        commit, again and again until it says `published`
    several           prepare at all but the first; commit at the first; what it has recorded (now,
                      or before a crash: then other ranges than ours) is committed at the others

The first broker by name decides. Every answer says what is recorded, so a repetition never decides
twice, and what another broker has recorded already goes before what we have staged.

What one attempt of a task has staged: ranges of staging queues with their checksums.

A batch is stored at consecutive offsets of one queue. Batches that follow each other there are one
range, so a task that has a queue for itself has one range, however many rows.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from sluicemq.client.core.requests import expect_success, header_fields, int_field, make_request
from sluicemq.errors import RequestError, RequestTimeoutError
from sluicemq.model.bodies import Buffer
from sluicemq.wire import headers, staging
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import StagedRange

CallBroker = Callable[[str, Command], Command]
"""Asks a broker by name. Raises ConnectionLostError, RequestTimeoutError."""
Ranges = tuple[StagedRange, ...]
PREPARE, COMMIT = "prepare", "commit"
CHECKING, PUBLISHED = "checking", "published"
PAUSE_FIRST_S: Final = 0.002
PAUSE_LAST_S: Final = 0.05


class EpochState(NamedTuple):
    """What a broker says of an epoch; `ranges` are what is recorded."""

    state: str
    ranges: Ranges
    published: int
    staging_topic: str
    staging_queues: int


def make_commit_request(
    query: str, epoch: int, ranges: Ranges = (), topics: Iterable[str] = (), *, step: str = PREPARE
) -> Command:
    """900201. Without ranges it asks whether the broker has epochs at all."""
    listed = ",".join(sorted(topics))
    header = headers.CommitEpochRequest(query=query, epoch=epoch, step=step, topics=listed)
    return make_request(
        RequestCode.SLUICE_COMMIT_EPOCH, header, staging.encode_staged_ranges(ranges)
    )


def parse_epoch_state(response: Command, address: str = "") -> EpochState:
    """The answer to 900201. Raises RequestError."""
    fields = header_fields(expect_success(response, address))
    return EpochState(
        fields.get("state", ""),
        staging.decode_staged_ranges(response.body),
        int_field(response, "published"),
        fields.get("stagingTopic", ""),
        int_field(response, "stagingQueues"),
    )


def is_unknown_request(error: RequestError) -> bool:
    """Is it a broker that has no epochs: RocketMQ's own, or an older one of ours?"""
    return error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


class EpochCommitter:
    """Commits epochs of one query. `brokers` are the names of all masters, `topics` those
    that the rows go to."""

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
        """Returns when the epoch is published at all brokers: what was recorded for it, which are
        other ranges than these when it was committed before.

        Raises RequestError when a broker refuses: nothing is published then, unless the epoch was
        recorded before. RequestTimeoutError, ConnectionLostError: try again with the same epoch.
        """
        first, *others = self._brokers
        for other in others:
            state = self._poll_step(other, epoch, ranges, PREPARE)
            if state.ranges:
                ranges = state.ranges
        decided = self._poll_step(first, epoch, ranges, COMMIT).ranges
        involved = sorted({one.broker for one in decided} - {first})
        for other in involved:  # all begin before one is waited for
            self._request_step(other, epoch, decided, COMMIT)
        for broker in (first, *involved):
            self._poll_step(broker, epoch, decided or ranges, COMMIT, is_last=True)
        return decided

    def _request_step(self, broker: str, epoch: int, ranges: Ranges, step: str) -> EpochState:
        request = make_commit_request(self._query, epoch, ranges, self._topics, step=step)
        return parse_epoch_state(self._call(broker, request), broker)

    def _poll_step(
        self, broker: str, epoch: int, ranges: Ranges, step: str, *, is_last: bool = False
    ) -> EpochState:
        """Asks until the step is safe, or, at last, everything is published."""
        end_s, pause_s = self._monotonic_s() + self._timeout_s, PAUSE_FIRST_S
        reached = -1
        while True:
            state = self._request_step(broker, epoch, ranges, step)
            if state.state == PUBLISHED or (state.state != CHECKING and not is_last):
                return state
            if state.published != reached:  # it goes on
                reached = state.published
                end_s = self._monotonic_s() + self._timeout_s
            if self._monotonic_s() >= end_s:
                raise RequestTimeoutError(
                    f"the broker {broker!r} has not committed epoch {epoch} of {self._query} "
                    f"within {self._timeout_s:g} s: it says {state.state!r}.",
                    fix="Run it again: it is committed once. Or raise timeoutMs.",
                )
            self._pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_LAST_S)


class StagedRangeList:
    """Collects them. `messages` counts."""

    def __init__(self, partition: int, attempt: int) -> None:
        self.message_count: int = 0
        self._partition = partition
        self._attempt = attempt
        self._ranges: list[StagedRange] = []

    def add(self, broker: str, queue_id: int, offset: int, count: int, bodies: Buffer) -> None:
        """A batch of `count` messages is stored at `offset`; `bodies` are theirs, one after the
        other."""
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
        """In the order of the rows."""
        return tuple(self._ranges)
