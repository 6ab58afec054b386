"""Epochs of exactly-once sinks: SLUICE_COMMIT_EPOCH (900201), and the publication of epochs.

    prepare: checking -> checked          commit: (checking ->) publishing -> published

A sink stages its rows (`staged.py`), and then names to all brokers the ranges of the staging queues
that belong to an epoch of its query (design/0007). A broker checks that its own ranges contain what
was staged, records the decision in its log, and copies the messages of its ranges into their
topics. The sink repeats the request to ask for the state. A decision is never changed: a sink that
repeats an epoch after a crash gets the ranges that were decided first, and the rows that it has
staged again are not published. With several brokers the sink lets all others prepare before the
first one decides, so that every broker can carry a decision out.

The work is done in slices, between which the broker handles other requests. A state is reported
only when everything that it says is on disk: otherwise a sink could act upon something that a power
failure takes back. So an epoch needs two fsyncs, also under ASYNC_FLUSH.

The log has a hidden topic with one queue and two kinds of records, in JSON:

    epoch    query, epoch and the ranges of all brokers: with this record the epoch is committed
    chunk    query, epoch, first: the messages of the epoch from ordinal `first` on follow this
             record immediately, in order

A chunk and its messages are appended together, so no other record is between them. A crash leaves a
prefix of the log, so only the very last chunk can be incomplete, and the records after it show to
the message how far it came. Epochs are published one after the other, so everything before the last
chunk is complete. Therefore published messages need no additional property, and there is no stored
progress that could disagree with the log.

`config/sluiceEpochs.json` has the last epoch of each query, after its record is deleted too, and
the offset from which a start reads the epoch topic. The file is written only when everything that
it says is on disk and no epoch is partly published.

The user chooses the name of a query, so an epoch belongs to the account that committed it
(`EpochTable.find`): a query of the same name of another account has a state of its own. Without
access control there is one account, "". An epoch without an account (from an earlier release, from
a time without access control, or from a client that may do everything) is reported to any account
that may write to its topics, and no account can change it. A client that may do everything gets the
newest epoch of the name whose topics it shares, whichever account committed it. So access control
can be switched on and off between two runs of a query.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final

from sluicemq.acl.guard import Access
from sluicemq.broker.background import SliceWorker, TimeSlice
from sluicemq.broker.context import BrokerContext
from sluicemq.broker.epochs.staged import ColumnRun, Publisher, StagedMessage, StagedReader
from sluicemq.broker.epochs.table import Epoch, EpochKey, EpochTable, Ranges
from sluicemq.broker.group_commit import Announced, Postponed, RunSync, run_or_postpone
from sluicemq.broker.produce.intake import MessageIntake
from sluicemq.errors import ProtocolError, RequestError, StoreError
from sluicemq.model.system_names import EPOCH_TOPIC, STAGING_TOPIC
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem, decode_body
from sluicemq.wire import fastjson, staging
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header as encoded
from sluicemq.wire.frames import SERVER_LANGUAGE, Command
from sluicemq.wire.staging import (
    CommitEpochRequest,
    CommitEpochResponse,
    staged_ranges_to_json,
)

log = logging.getLogger(__name__)

_PROPERTIES: Final = b"WAIT\x01true\x02"
"""The properties of a record of the epoch topic."""

CHECKING = "checking"
CHECKED = "checked"
PUBLISHING = "publishing"
PUBLISHED = "published"
"""The states that an answer reports."""

PREPARE = "prepare"
COMMIT = "commit"
"""The steps that a request may name."""

SLICE_S: Final = 0.004
"""The time limit of one slice of checks, in seconds."""

SLICE_MESSAGES: Final = 4096
"""The number of messages that one slice checks at most."""

CHUNK_MESSAGES: Final = 2000
"""The number of messages in a chunk at most."""

CHUNK_BYTES: Final = 1024 * 1024
"""The size of the records in a chunk at most."""

CHECKS_MAX: Final = 1000
"""The number of checks that are kept for requests that have not committed yet."""


@dataclass(slots=True, eq=False)
class EpochCheck:
    """The check of an epoch's ranges before the epoch is committed."""

    ranges: Ranges
    """The ranges of all brokers, as the request names them."""
    topics: frozenset[str]
    """The topics that the request names."""
    messages: Iterator[StagedMessage]
    """The messages that remain to be checked."""
    error: RequestError | None = None
    """Why the check failed; None if it has not."""
    log_end: int | None = None
    """The end of the log when all messages had been checked; None before that."""
    is_commit_requested: bool = False
    """Whether the epoch is to be committed when the check succeeds."""

    @property
    def has_work(self) -> bool:
        """Whether messages remain to be checked, or the decision to be recorded."""
        return self.error is None and (self.log_end is None or self.is_commit_requested)


def _ranges_of(body: bytes | memoryview) -> Ranges:
    """Decode the body of a request: ranges of the staging queues, which hold staged messages.

    Raises RequestError (INVALID_PARAMETER) if the body is malformed.
    """
    try:
        return staging.decode_staged_ranges(body)
    except ProtocolError as error:
        raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from None


class Epochs:
    """The handler of SLUICE_COMMIT_EPOCH, and the job that checks and publishes epochs."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        intake: MessageIntake,
        run_sync: RunSync | None,
        access: Access,
    ) -> None:
        """Create the component without any epoch. Call `load` before the first request.

        An epoch is a micro-batch of a sink, which is published as a whole. `intake` will report the
        batches of staged messages that it appends. `run_sync(callback)` starts an fsync on another
        thread and calls `callback` with its result. None means that no fsync is started. It is not
        used under SYNC_FLUSH. `access` knows the account that has sent a request.
        """
        settings = context.settings
        topics = context.topics
        store = context.store
        clock = context.clock
        self._settings = settings
        self._access = access
        self._topics = topics
        self._store = store
        self._group_commit = context.group_commit
        self._clock = clock
        self._worker = SliceWorker(self.run_slice, clock, context.call_soon)
        self._run_sync = None if settings.store.flush_sync else run_sync
        self._reader = StagedReader(store)
        intake.on_staged = self._reader.ingested.note_batch
        self._publisher = Publisher(settings, topics, store, intake)
        self.table = EpochTable(
            store,
            context.files,
            clock,
            settings.store.root,
            settings.broker.broker_name,
            self._reader,
        )
        self._checks: dict[EpochKey, EpochCheck] = {}
        """The checks of epochs that are not committed, the oldest first."""
        self._is_syncing = False
        self.published_count = 0
        """The number of messages that were published since the start."""

    def load(self) -> None:
        """Read the epochs of the store. Afterwards `run_slice` continues interrupted publications.

        A read-only broker publishes nothing. The call blocks for the time of the reads.
        """
        self.table.load(self._reader, self._settings.store.commit_log_file_bytes)
        self._worker.is_enabled = not self._settings.is_read_only

    # ------------------------------------------------------------------------------- requests

    def commit_epoch(
        self, header: CommitEpochRequest, command: Command, peer: Peer
    ) -> Command | Announced | Postponed:
        """Handle SLUICE_COMMIT_EPOCH (900201): prepare or commit an epoch, or report its state.

        An epoch is a micro-batch of a sink. The body has the ranges of its staged messages. The
        answer has the state of the epoch on this broker. If the epoch is committed, the body of the
        answer has the ranges that were committed. The work continues after the answer, so the
        client repeats the request until the state is the one that it needs.

        A large body is decoded on another thread. Then a Postponed is returned. Raises RequestError
        if the request is malformed or the check of the ranges has failed.
        """
        # Read now: while the body is decoded, the broker handles requests of other accounts.
        account = self._access.account

        def steps() -> WorkItem[Command | Announced]:
            ranges = yield from decode_body(_ranges_of, command.body)
            return self._ensure_topics_and_answer(account, header, ranges)

        return run_or_postpone(steps())

    def _ensure_topics_and_answer(
        self, account: str, header: CommitEpochRequest, ranges: Ranges
    ) -> Command | Announced:
        """Create the epoch topic and the staging topic if necessary, and return the answer.

        If a topic was created or changed, the answer is wrapped in an Announced, so that it is sent
        when the topics are saved and registered.
        """
        version_before = self._topics.version
        queue_count = staging.STAGING_QUEUES
        self._topics.ensure(EPOCH_TOPIC, 1)
        staging_topic = self._topics.ensure(STAGING_TOPIC, queue_count)
        if staging_topic.queues < queue_count:
            # A topic that was found only by its directories in the store may have fewer queues.
            config = replace(
                staging_topic.config, read_queues=queue_count, write_queues=queue_count
            )
            self._topics.put(config)

        answer = self._answer(account, header, ranges)
        have_topics_changed = self._topics.version != version_before
        return Announced(answer) if have_topics_changed else answer

    def _answer(self, account: str, header: CommitEpochRequest, ranges: Ranges) -> Command:
        """Return the answer to a request with the state of the epoch, and schedule its work.

        - If this epoch or a later one is committed, `_answer_committed` makes the answer.
        - CHECKED: the step is PREPARE, all ranges are checked, and what was read is durable.
        - CHECKING: in all other cases. The check of the messages continues. With the step COMMIT,
          the epoch is committed at the end of the check.

        Raises RequestError if the step, the query name or the ranges are invalid, or if the check
        of these ranges has failed, which is logged.
        """
        # A committed epoch: report its state.
        topics = frozenset(header.topics.split(","))
        committed = self.table.find(account, header.query, topics)
        if committed is not None and header.epoch <= committed.epoch:
            return self._answer_committed(committed, header.epoch)

        # Otherwise find its check, or start it.
        if header.step not in (PREPARE, COMMIT):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"step must be {PREPARE!r} or {COMMIT!r}, got {header.step!r}.",
            )
        key = EpochKey(account, header.query, header.epoch)
        check = self._find_or_log_check(key, topics, ranges)

        # Note the commit, or report a finished check when everything that it read is durable.
        if header.step == COMMIT:
            check.is_commit_requested = True
        elif check.log_end is not None:
            durable_end = min(self._store.synced_offset, self._store.reader.visible_end)
            if check.log_end <= durable_end:
                return self._encode_state(CHECKED)
            self._sync()
        if check.has_work:
            self._worker.schedule()
        return self._encode_state(CHECKING)

    def _find_or_log_check(
        self, key: EpochKey, topics: frozenset[str], ranges: Ranges
    ) -> EpochCheck:
        """Return the check of an epoch's messages. Start it if there is none.

        Raises RequestError if the name of the query is invalid, or if the check has failed or
        cannot be started. The second case is also logged.
        """
        try:
            staging.check_query(key.query)
            return self._find_or_start_check(key, topics, ranges)
        except ProtocolError as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from None
        except RequestError as error:
            log.warning("epoch %d of query %s: %s", key.epoch, key.query, error.remark)
            raise

    def _answer_committed(self, committed: Epoch, epoch: int) -> Command:
        """Return the answer about `epoch`, if it or a later epoch is committed.

        `committed` is the last committed epoch, which is `epoch` or a later one. The state is one
        of these:

        - PUBLISHED, if `epoch` is earlier than `committed`.
        - CHECKING, until the record that commits `epoch` is durable.
        - PUBLISHING, until all its messages are durable. The body has the committed ranges.
        - PUBLISHED after that. The body has the ranges, which are then removed from memory.

        If the state waits for the disk, an fsync is started.
        """
        if epoch < committed.epoch:
            return self._encode_state(PUBLISHED)
        table = self.table
        if not table.is_record_durable(committed):
            self._sync()
            return self._encode_state(CHECKING, committed)

        is_published = table.is_durable(committed)
        if committed.is_complete and not is_published:
            self._sync()
        answer = self._encode_state(PUBLISHED if is_published else PUBLISHING, committed)
        answer.body = staging.encode_staged_ranges(table.read_ranges(committed))
        if is_published:
            # Only after the ranges were encoded.
            table.drop_ranges(committed)
        return answer

    def _encode_state(self, state: str, committed: Epoch | None = None) -> Command:
        """Return an answer with `state`, and with the progress of the epoch `committed`.

        The progress is the number of messages to publish on this broker, and the number of messages
        that have been published. Both are 0 if `committed` is None.
        """
        message_count = 0
        published_count = 0
        if committed is not None:
            message_count = committed.message_count
            published_count = committed.published_count
        fields = CommitEpochResponse(
            state=state,
            broker=self._settings.broker.broker_name,
            messages=message_count,
            published=published_count,
            staging_topic=STAGING_TOPIC,
            staging_queues=staging.STAGING_QUEUES,
        )
        return Command(ResponseCode.SUCCESS, encoded(fields), language=SERVER_LANGUAGE)

    def _find_or_start_check(
        self, key: EpochKey, topics: frozenset[str], ranges: Ranges
    ) -> EpochCheck:
        """Return the check of an epoch. Start one if there is none for these ranges.

        If a commit was requested for another check of the epoch, that one is returned, because its
        ranges will be committed. If there are too many checks, a new one replaces the oldest one.

        Raises RequestError if the check of these ranges has failed. The failed check is forgotten,
        so a later call starts a new one.
        """
        check = self._checks.get(key)
        if check is not None and check.error is not None:
            del self._checks[key]
            if check.ranges == ranges:
                raise check.error
            check = None
        if check is not None and (check.ranges == ranges or check.is_commit_requested):
            return check

        if len(self._checks) >= CHECKS_MAX:
            # The oldest one is of a sink that has prepared an epoch and never returned.
            oldest_key = next(iter(self._checks))
            del self._checks[oldest_key]
        messages = self._reader.iter_checked(key.owner, self.table.select_local(ranges))
        new_check = EpochCheck(ranges, topics, messages)
        self._checks[key] = new_check
        return new_check

    # ----------------------------------------------------------------------------- the work

    def run_slice(self) -> None:
        """Publish some messages of the first unfinished epoch, and check some messages of another.

        Another slice is scheduled if there was work to do. Do nothing before `load`, on a read-only
        broker, and while the worker pauses after a failure.
        """
        if not self._worker.is_enabled or self._worker.is_paused:
            return
        table = self.table
        if table.unfinished:
            self._publish_chunk(table.unfinished[0])
        key = next((key for key, check in self._checks.items() if check.has_work), None)
        if key is not None:
            self._continue_check(key, self._checks[key])
        if table.unfinished or key is not None:
            self._worker.schedule()

    def _continue_check(self, key: EpochKey, check: EpochCheck) -> None:
        """Check messages of an epoch for one slice. After the last one, commit it if requested.

        When the epoch is committed, the check is removed. An error of a message or of the store
        ends the check. It is kept in `check.error`, and the next request for the epoch reports it.
        """
        work = TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES)
        last_stage = None
        try:
            for staged in check.messages:
                work.count_done()
                # Consecutive messages of one task share their (cached) stage object.
                if staged.stage is not last_stage:
                    self._publisher.check_message(staged, check.topics)
                    last_stage = staged.stage
                if work.is_over:
                    return
            if check.log_end is None:
                check.log_end = self._store.written_offset
                self._sync()
            if check.is_commit_requested:
                self._commit_checked(key, check)
                del self._checks[key]
        except RequestError as error:
            check.error = error
        except StoreError as error:
            check.error = RequestError(ResponseCode.SYSTEM_ERROR, str(error))

    def _commit_checked(self, key: EpochKey, check: EpochCheck) -> None:
        """Commit an epoch whose messages are checked, and start an fsync.

        A record in the epoch topic commits the epoch. Then the epoch is added to the table, from
        which it is published. Do nothing if this epoch or a later one is committed already. Raises
        RequestError or StoreError if the record cannot be stored.
        """
        last_committed = self.table.find(key.account, key.query, check.topics)
        if last_committed is not None and key.epoch <= last_committed.epoch:
            return
        # The epoch is committed once this record is in the log.
        ranges = staged_ranges_to_json(check.ranges)
        topics = sorted(check.topics)
        offset = self._append_record("epoch", key, ranges=ranges, topics=topics)
        if not self._group_commit.commit_now():
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, "the commit of the epoch could not be stored."
            )
        committed = self.table.add(key, check.ranges, offset, self._clock.now_ms())
        committed.log_end = committed.first_record_end = self._store.written_offset
        self._sync()

    def _append_record(self, record_kind: str, key: EpochKey, **values: Any) -> int:
        """Append a record to the epoch topic, and return its offset there.

        The record is a JSON object with `record_kind` as "kind", the fields that identify the epoch
        `key`, and `values`. The caller must commit it. Raises StoreError.
        """
        body = fastjson.dumps_strict({"kind": record_kind, **key.to_json(), **values})
        host = self._settings.store_host
        _, offset = self._store.writer.append(
            EPOCH_TOPIC, 0, body, _PROPERTIES, 0, 0, 0, self._clock.now_ms(), host, host
        )
        return offset

    def _publish_chunk(self, committed: Epoch) -> None:
        """Append the next chunk of an epoch: its record and the messages after it.

        An epoch is a micro-batch of a sink. Its messages were staged in a topic that consumers do
        not see, and are appended to their own topics here. The chunk is committed before this
        method returns, and counted as published. After the last message, an fsync is started.

        If the store accepts no more messages or the commit fails, publishing pauses, and continues
        later with the first message that is not stored. If the remaining staged messages are
        deleted, they are logged as lost, and the epoch counts as complete.
        """
        chunk_start = committed.published_count
        # A chunk must be small enough for one file of the log.
        bytes_max = min(CHUNK_BYTES, self._settings.store.commit_log_file_bytes // 4)
        runs, messages = self._reader.read_chunk(
            committed.key.owner, committed.local_ranges, chunk_start, CHUNK_MESSAGES, bytes_max
        )
        if not runs and not messages:
            log.error(
                "%d staged messages of epoch %d of query %s were deleted before they were "
                "published and are lost",
                committed.message_count - chunk_start,
                committed.epoch,
                committed.query,
            )
            self.table.mark_complete(committed)
            return

        published_end, record_offset = self._append_chunk(committed, runs, messages)
        if not self._group_commit.commit_now():
            self._worker.pause_after_failure(
                "cannot publish an epoch, retrying: the group commit failed"
            )
            return
        if published_end == chunk_start:  # a StoreError came before the first message
            return

        # What was appended before a StoreError is stored, too.
        self._worker.clear_failure()
        self.published_count += published_end - chunk_start
        committed.published_count = published_end
        committed.last_record_offset = record_offset
        committed.log_end = self._store.written_offset
        if committed.is_complete:
            self.table.mark_complete(committed)
            self._sync()

    def _append_chunk(
        self, committed: Epoch, runs: list[ColumnRun], messages: list[StagedMessage]
    ) -> tuple[int, int]:
        """Append the record of a chunk to the epoch topic, and then the messages to their topics.

        Return (ordinal after the last appended message, offset of the epoch's last record). The
        ordinal of a message is its number among the messages of the epoch. After a StoreError,
        publishing pauses, and the values for what was appended before are returned.
        """
        published_end = committed.published_count
        record_offset = committed.last_record_offset
        first_ordinal = committed.published_count if runs else messages[0].ordinal

        def read_messages(ordinal: int, count: int) -> list[StagedMessage]:
            """Return up to `count` messages of the epoch from `ordinal` on."""
            remaining = self._reader.iter_messages(
                committed.key.owner, committed.local_ranges, ordinal
            )
            return list(islice(remaining, count))

        try:
            record_offset = self._append_record("chunk", committed.key, first=first_ordinal)
            for ordinal_after_append in chain(
                self._publisher.publish_runs(runs, committed.published_count, read_messages),
                self._publisher.publish_messages(messages),
            ):
                published_end = ordinal_after_append
        except StoreError as error:
            self._worker.pause_after_failure(f"cannot publish an epoch, retrying: {error}")
        return published_end, record_offset

    # ------------------------------------------------------------------------------ the disk

    def _sync(self) -> None:
        """Start an fsync of the log, unless this object has started one that is running.

        A failure is logged, and the next request starts another fsync. Do nothing under SYNC_FLUSH,
        because every group commit has an fsync then.
        """

        def handle_synced(result: int | BaseException) -> None:
            self._is_syncing = False
            if isinstance(result, BaseException):
                log.error("the fsync of an epoch failed: %s", result)

        if self._run_sync is not None and not self._is_syncing:
            self._is_syncing = True
            self._run_sync(handle_synced)
