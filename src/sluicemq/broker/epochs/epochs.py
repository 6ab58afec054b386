"""Epochs of exactly-once sinks: 900201 (ours), and publishing what was staged (docs/design/0007).

    prepare: checking -> checked          commit: (checking ->) publishing -> published

A sink stages its rows (`staged.py`), then says for all brokers at once which ranges belong to the
epoch. The broker checks that its own are there as they were sent, writes the decision into its log
(`epoch_table.py`), and copies its ranges into their topics. The same request, sent again, asks how
far that is; it never decides anew: who repeats an epoch after a crash gets the decision that was
made first and has staged in vain. With several brokers the others prepare before the first one
decides, so that a decision can always be carried out.

Work is done in slices, between which others have their turn. A state is only answered when what it
says is on disk: after a power failure nobody has acted upon what is gone. So also ASYNC_FLUSH has
two fsyncs an epoch.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

from sluicemq.broker.background import Slice, Worker
from sluicemq.broker.epochs.staged import Publisher, Staged, StagedReader
from sluicemq.broker.epochs.table import (
    EPOCH_TOPIC,
    PROPERTIES,
    Epoch,
    EpochTable,
    chunk_record,
    epoch_record,
)
from sluicemq.broker.produce.batch import OnStaged
from sluicemq.broker.produce.intake import Intake
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.turns import Announced, RunSync, Turns
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, RequestError, StoreError
from sluicemq.files import Files
from sluicemq.net.dispatch import Peer
from sluicemq.store.store import Store
from sluicemq.wire import staging
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header as encoded
from sluicemq.wire.frames import SERVER_LANGUAGE, Command
from sluicemq.wire.headers import CommitEpochRequest, CommitEpochResponse

log = logging.getLogger(__name__)

CHECKING, CHECKED, PUBLISHING, PUBLISHED = "checking", "checked", "publishing", "published"
PREPARE, COMMIT = "prepare", "commit"
SLICE_S: Final = 0.004
SLICE_MESSAGES: Final = 4096
CHUNK_MESSAGES: Final = 2000
CHUNK_BYTES: Final = 1024 * 1024
CHECKS_MAX: Final = 1000
Ranges = tuple[staging.StagedRange, ...]


@dataclass(slots=True, eq=False)
class Check:
    """A decision that is looked at before it is recorded. `error` is why it will not be; `end` is
    the end of the log when everything had been found, None before."""

    ranges: Ranges
    topics: frozenset[str]
    steps: Iterator[Staged]
    error: RequestError | None = None
    end: int | None = None
    is_wanted: bool = False

    @property
    def has_work(self) -> bool:
        return self.error is None and (self.end is None or self.is_wanted)


class Epochs:
    """The request family of exactly-once sinks, and what they have left to do."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        store: Store,
        intake: Intake,
        turns: Turns,
        *,
        files: Files,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        run_sync: RunSync | None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._store = store
        self._turns = turns
        self._clock = clock
        self._worker = Worker(self.run, clock, call_soon)
        self._run_sync = None if settings.store.flush_sync else run_sync
        self._reader = StagedReader(store)
        self._publisher = Publisher(settings, topics, store, intake)
        self.table = EpochTable(
            store, files, clock, settings.store.root, settings.broker.broker_name
        )
        self._checks: dict[tuple[str, int], Check] = {}
        self._is_syncing = False
        self.published = 0
        """Messages, since the start."""

    @property
    def on_staged(self) -> OnStaged:
        """Told of each batch that is staged."""
        return self._reader.seen.note

    def load(self) -> None:
        """Blocking: read what is recorded; what was interrupted goes on with `run`."""
        self.table.load(self._reader, self._settings.store.commit_log_file_bytes)
        self._worker.is_on = not self._settings.is_read_only

    # ------------------------------------------------------------------------------- requests

    def commit(
        self, header: CommitEpochRequest, command: Command, peer: Peer
    ) -> Command | Announced:
        """900201."""
        before, count = self._topics.version, staging.STAGING_QUEUES
        self._topics.ensure(EPOCH_TOPIC, 1)
        topic = self._topics.ensure(staging.STAGING_TOPIC, count)
        if topic.queues < count:  # one that was found in the store alone may have fewer
            self._topics.put(replace(topic.config, read_queues=count, write_queues=count))
        answer = self._answer(header, command)
        return answer if self._topics.version == before else Announced(answer)

    def _answer(self, header: CommitEpochRequest, command: Command) -> Command:
        known = self.table.queries.get(header.query)
        if known is not None and header.epoch <= known.epoch:
            return self._of_known(known, header.epoch)
        if header.step not in (PREPARE, COMMIT):
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"{header.step!r} is no step.")
        try:
            staging.check_query(header.query)
            check = self._begin(header, staging.decode_staged_ranges(command.body))
        except ProtocolError as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from None
        except RequestError as error:
            log.warning("epoch %d of %s: %s", header.epoch, header.query, error.remark)
            raise
        if header.step == COMMIT:
            check.is_wanted = True
        elif check.end is not None:
            if check.end <= self._store.synced_offset:
                return self._state(CHECKED)
            self._sync()
        if check.has_work:
            self._worker.soon()
        return self._state(CHECKING)

    def _of_known(self, known: Epoch, epoch: int) -> Command:
        if epoch < known.epoch:
            return self._state(PUBLISHED)
        table = self.table
        if not table.is_recorded(known):
            self._sync()
            return self._state(CHECKING, known)
        is_published = table.is_published(known)
        if known.is_done and not is_published:
            self._sync()
        answer = self._state(PUBLISHED if is_published else PUBLISHING, known)
        answer.body = staging.encode_staged_ranges(table.decision(known))
        if is_published:
            table.settle(known)
        return answer

    def _state(self, state: str, known: Epoch | None = None) -> Command:
        fields = CommitEpochResponse(
            state=state,
            broker=self._settings.broker.broker_name,
            messages=known.total if known is not None else 0,
            published=known.published if known is not None else 0,
            staging_topic=staging.STAGING_TOPIC,
            staging_queues=staging.STAGING_QUEUES,
        )
        return Command(ResponseCode.SUCCESS, encoded(fields), language=SERVER_LANGUAGE)

    def _begin(self, header: CommitEpochRequest, ranges: Ranges) -> Check:
        """The check of these ranges, begun when there is none; raises RequestError when it has
        failed. While one goes on for a commit, no other takes its place."""
        key = header.query, header.epoch
        check = self._checks.get(key)
        if check is not None and check.error is not None:
            del self._checks[key]
            if check.ranges == ranges:
                raise check.error
            check = None
        if check is None or (check.ranges != ranges and not check.is_wanted):
            if len(self._checks) >= CHECKS_MAX:  # whoever prepared and never came back
                del self._checks[next(iter(self._checks))]
            steps = self._reader.check(key, self.table.own(ranges))
            topics = frozenset(header.topics.split(","))
            check = self._checks[key] = Check(ranges, topics, steps)
        return check

    # ----------------------------------------------------------------------------- the work

    def run(self) -> None:
        """One slice."""
        if not self._worker.is_on or self._worker.is_paused:
            return
        table = self.table
        if table.unfinished:
            self._publish(table.unfinished[0])
        key = next((key for key, check in self._checks.items() if check.has_work), None)
        if key is not None:
            self._check(*key, self._checks[key])
        if table.unfinished or key is not None:
            self._worker.soon()

    def _check(self, query: str, epoch: int, check: Check) -> None:
        """A few messages; when all are right, the decision is recorded if that is wanted."""
        work = Slice(self._clock, SLICE_S, SLICE_MESSAGES)
        seen = None
        try:
            for staged in check.steps:
                work.done()
                if staged.stage is not seen:
                    self._publisher.check(staged, check.topics)
                    seen = staged.stage
                if work.is_over:
                    return
            if check.end is None:
                check.end = self._store.written_offset
                self._sync()
            if check.is_wanted:
                self._record(query, epoch, check)
        except RequestError as error:
            check.error = error
        except StoreError as error:
            check.error = RequestError(ResponseCode.SYSTEM_ERROR, str(error))

    def _record(self, query: str, epoch: int, check: Check) -> None:
        """The epoch is committed when this is in the log. Raises StoreError, RequestError."""
        known = self.table.queries.get(query)
        if known is None or epoch > known.epoch:
            offset = self._append(epoch_record(query, epoch, check.ranges))
            if not self._turns.end_own():
                raise RequestError(ResponseCode.SYSTEM_ERROR, "the decision was not stored.")
            known = self.table.recorded(query, epoch, check.ranges, offset, self._clock.now_ms())
            known.end = known.record_end = self._store.written_offset
            self._sync()
        del self._checks[query, epoch]

    def _append(self, body: bytes) -> int:
        """A record of ours; its offset."""
        now_ms = self._clock.now_ms()
        _, offset = self._store.writer.append(
            EPOCH_TOPIC,
            0,
            body,
            PROPERTIES,
            0,
            0,
            0,
            now_ms,
            self._settings.store_host,
            self._settings.store_host,
        )
        return offset

    def _publish(self, known: Epoch) -> None:
        """A chunk: its record and the messages behind it, in one go."""
        reached, mark = known.published, known.mark
        first, work = self._chunk(known)
        if work is None:
            log.error(
                "%d staged messages of epoch %d of query %s are deleted before they were "
                "published: they are lost",
                known.total - known.published, known.epoch, known.query,
            )  # fmt: skip
            self.table.finish(known)
            return
        try:
            mark = self._append(chunk_record(known.query, known.epoch, first))
            for ordinal in work:
                reached = ordinal
        except StoreError as error:
            self._worker.failed(f"an epoch is published later: {error}")
        if not self._turns.end_own():
            self._worker.failed("an epoch is published later: the turn failed")
            return
        if reached == known.published:
            return
        self._worker.succeeded()
        self.published += reached - known.published
        known.published, known.mark, known.end = reached, mark, self._store.written_offset
        if known.is_done:
            self.table.finish(known)
            self._sync()

    def _chunk(self, known: Epoch) -> tuple[int, Iterator[int] | None]:
        """As many messages as one write should hold; one file of the log has room for them. The
        ordinal of the first, and what appends them; nothing when none is left."""
        bytes_max = min(CHUNK_BYTES, self._settings.store.commit_log_file_bytes // 4)
        owner, first = (known.query, known.epoch), known.published

        def read(ordinal: int, count: int) -> list[Staged]:
            return list(islice(self._reader.messages(owner, known.own, ordinal), count))

        runs, messages = self._reader.chunk(owner, known.own, first, CHUNK_MESSAGES, bytes_max)
        if not runs and not messages:
            return first, None
        appending = chain(
            self._publisher.publish_runs(runs, first, read), self._publisher.publish(messages)
        )
        return first if runs else messages[0].ordinal, appending

    # ------------------------------------------------------------------------------ the disk

    def _sync(self) -> None:
        """ASYNC_FLUSH: what was recorded goes to disk now, not some time."""
        if self._run_sync is not None and not self._is_syncing:
            self._is_syncing = True
            self._run_sync(self._synced)

    def _synced(self, result: int | BaseException) -> None:
        self._is_syncing = False
        if isinstance(result, BaseException):
            log.error("an epoch is not known to be on disk: %s", result)
