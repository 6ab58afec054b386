"""Epochs of exactly-once sinks: 900201 (ours), and publishing what was staged (design/0007).

    prepare: checking -> checked          commit: (checking ->) publishing -> published

A sink stages its rows (`staged.py`), then says for all brokers at once which ranges belong to the
epoch. The broker checks that its own are there as they were sent, writes the decision into its log,
and copies its ranges into their topics. The same request, sent again, asks how
far that is; it never decides anew: who repeats an epoch after a crash gets the decision that was
made first and has staged in vain. With several brokers the others prepare before the first one
decides, so that a decision can always be carried out.

Work is done in slices, between which others have their turn. A state is only answered when what it
says is on disk: after a power failure nobody has acted upon what is gone. So also ASYNC_FLUSH has
two fsyncs an epoch.

The log has a hidden topic of one queue with two kinds of records (JSON):

    epoch    query, epoch and the ranges of all brokers: from now on it is committed
    chunk    query, epoch, first: the messages of the epoch from ordinal `first` on lie right behind
             this record, in order

A chunk and its messages are appended in one go, so nothing of anybody else lies between them. A
crash leaves a beginning of the log: only the very last chunk can be incomplete, and what follows it
says to the message how far it came. Epochs are published one after the other, so everything before
the last chunk is done. No property has to be added to what is published, and no progress is written
that could disagree with the log.

`config/sluiceEpochs.json` keeps the last epoch of each query beyond the life of its record, and
where to begin to read. It is only written when all it says is on disk and nothing is half done.

The name of a query is chosen by its user, so an epoch belongs to the account that committed it
(`EpochTable.find`): a query of the same name of another account has a state of its own. Without
access control there is one account, "". An epoch without an account (of an earlier release, of a
time without access control, or of a client that may do everything) answers any account that may
write to its topics, and is changed by none. A client that may do everything gets the newest epoch
of the name whose topics it shares, whoever committed it; so access control can be switched on and
off between two runs of a query.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from sluicemq.acl.guard import Access
from sluicemq.broker.background import SliceWorker, TimeSlice
from sluicemq.broker.documents import Document
from sluicemq.broker.epochs.staged import Publisher, Staged, StagedReader
from sluicemq.broker.group_commit import Announced, GroupCommit, Postponed, RunSync, run_or_postpone
from sluicemq.broker.produce.intake import MessageIntake, Record, iter_queue
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, RequestError, StoreError
from sluicemq.files import Files
from sluicemq.files.identity import FileVerdict
from sluicemq.model.system_names import EPOCH_TOPIC, STAGING_TOPIC
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem, decode_body
from sluicemq.store.store import Store
from sluicemq.wire import fastjson, staging
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import (
    as_object,
    load_object,
    take_integer,
    take_list,
    take_object,
    take_text,
)
from sluicemq.wire.declare import encode_header as encoded
from sluicemq.wire.frames import SERVER_LANGUAGE, Command
from sluicemq.wire.staging import (
    CommitEpochRequest,
    CommitEpochResponse,
    StagedRange,
    staged_ranges_from_json,
    staged_ranges_to_json,
)

log = logging.getLogger(__name__)

KEPT_MS: Final = 30 * 86_400_000
"""How long the last epoch of a query is known after its commit."""
_PROPERTIES: Final = b"WAIT\x01true\x02"
CHECKING, CHECKED, PUBLISHING, PUBLISHED = "checking", "checked", "publishing", "published"
PREPARE, COMMIT = "prepare", "commit"
SLICE_S: Final = 0.004
SLICE_MESSAGES: Final = 4096
CHUNK_MESSAGES: Final = 2000
CHUNK_BYTES: Final = 1024 * 1024
CHECKS_MAX: Final = 1000
Ranges = tuple[StagedRange, ...]


class Key(NamedTuple):
    """An epoch by its names. The account is "" when nothing says which one committed it."""

    account: str
    query: str
    epoch: int

    @property
    def owner(self) -> tuple[str, int]:
        """What staged messages say of it."""
        return self.query, self.epoch

    def fields(self) -> dict[str, Any]:
        """How records of the epoch topic name it."""
        named = {"query": self.query, "epoch": self.epoch}
        return named | {"account": self.account} if self.account else named


@dataclass(slots=True)
class Epoch:
    """The last recorded epoch of a query of an account. `ranges` are those of all brokers, None
    when they have to be read again; `own` those of this broker until it is settled. `mark` is the
    offset of its last record in the epoch topic, `end` the end of the log after it, `record_end`
    after the first."""

    account: str
    query: str
    epoch: int
    offset: int
    time_ms: int
    ranges: Ranges | None = None
    own: Ranges = ()
    total: int = 0
    published: int = 0
    mark: int = -1
    end: int = 0
    record_end: int = 0

    @property
    def key(self) -> "Key":
        """Which query it is of, and which epoch."""
        return Key(self.account, self.query, self.epoch)

    @property
    def is_done(self) -> bool:
        """Is every message of it in its topic?"""
        return self.published >= self.total


class EpochTable:
    """The last epoch of each query of each account."""

    def __init__(
        self,
        store: Store,
        files: Files,
        clock: Clock,
        root: str,
        broker: str,
        staged: StagedReader,
    ) -> None:
        self._store = store
        self._staged = staged
        self._broker = broker
        self._next = 0
        self._text = ""
        self.queries: dict[str, dict[str, Epoch]] = {}
        """By query, and by account."""
        self.unfinished: list[Epoch] = []
        """In the order in which they were recorded."""

        def render() -> str:
            """As of the last moment at which nothing was half done or not on disk."""
            newest = max((known.end for known in self.all()), default=0)
            if self.unfinished or newest > self._safe_end:
                self.document.changed = True
                return self._text or _encode(self._next, ())
            oldest_ms = clock.now_ms() - KEPT_MS
            for known in [known for known in self.all() if known.time_ms <= oldest_ms]:
                self._forget(known)
            self._next = store.queue_offsets(EPOCH_TOPIC, 0)[1]
            self._text = _encode(self._next, self.all())
            return self._text

        self.document = Document(files, f"{root}/config/sluiceEpochs.json", render)

    def own(self, ranges: Ranges) -> Ranges:
        """Those of this broker."""
        return tuple(one for one in ranges if one.broker == self._broker)

    def find(self, account: str, query: str, topics: Collection[str]) -> Epoch | None:
        """Return the epoch that answers for a query of an account; None when there is none.

        That is the newest of the account's own epoch and those of others which count for it: an
        epoch without an account counts for all, and every epoch for a client without one, unless
        its topics are known and have none of `topics`.
        """
        known_by = self.queries.get(query, {})
        newest = known_by.get(account)
        for owner, known in known_by.items():
            if (
                owner != account
                and not (owner and account)
                and (newest is None or known.epoch > newest.epoch)
                and self._shares(known, topics)
            ):
                newest = known
        return newest

    def all(self) -> Iterator[Epoch]:
        """The last epochs of all queries."""
        for known_by in self.queries.values():
            yield from known_by.values()

    def _put(self, known: Epoch) -> None:
        self.queries.setdefault(known.query, {})[known.account] = known

    def _forget(self, known: Epoch) -> None:
        known_by = self.queries[known.query]
        del known_by[known.account]
        if not known_by:
            del self.queries[known.query]

    def _shares(self, known: Epoch, topics: Collection[str]) -> bool:
        """Whether an epoch went to one of the topics, as far as the log says."""
        values = self._record(known)
        named = values.get("topics")
        if isinstance(named, list):
            return not set(topics).isdisjoint(named)
        staged = [
            message
            for one in self.own(staged_ranges_from_json(values.get("ranges") or []))
            for message in self._staged.messages(
                (known.query, known.epoch), (replace(one, count=1),)
            )
        ]
        return not staged or any(message.stage.topic in topics for message in staged)

    def recorded(self, key: Key, ranges: Ranges, offset: int, time_ms: int) -> Epoch:
        """An epoch record is in the log, at an offset of its topic."""
        own = self.own(ranges)
        total = sum(one.count for one in own)
        known = Epoch(
            key.account, key.query, key.epoch, offset, time_ms, ranges, own, total, 0, offset
        )
        self._put(known)
        if total:
            self.unfinished.append(known)
        self.document.changed = True
        return known

    def finish(self, known: Epoch) -> None:
        """Its last message is in the log."""
        known.published = known.total
        if known in self.unfinished:
            self.unfinished.remove(known)
        self.document.changed = True

    def is_recorded(self, known: Epoch) -> bool:
        """Is the record of the epoch on disk, and can be seen?"""
        return self._is_safe(known.offset, known.record_end)

    def is_published(self, known: Epoch) -> bool:
        """And all its messages?"""
        return known.is_done and self._is_safe(known.mark, known.end)

    def _is_safe(self, offset: int, end: int) -> bool:
        if not end:  # of the file, where only such are
            return True
        visible_end = self._store.queue_offsets(EPOCH_TOPIC, 0)[1]
        return end <= self._safe_end and offset < visible_end

    @property
    def _safe_end(self) -> int:
        """What is before it in the log is on disk, and on all replicas that have to have it."""
        return min(self._store.synced_offset, self._store.reader.visible_end)

    def decision(self, known: Epoch) -> Ranges:
        """What was decided, for all brokers; () when it is not known any more."""
        if known.ranges is not None:
            return known.ranges
        values = self._record(known)
        return staged_ranges_from_json(take_list(values, "ranges")) if values else ()

    def _record(self, known: Epoch) -> dict[Any, Any]:
        """What the record of an epoch says; {} when it is deleted."""
        entry = next(iter_queue(self._store, EPOCH_TOPIC, 0, known.offset), None)
        values = _parsed(None if entry is None else entry.record)
        return values if values and _key_of(values) == known.key else {}

    def settle(self, known: Epoch) -> None:
        """It is done and safe: what can be read again is forgotten."""
        known.ranges = None
        known.own = ()

    # ------------------------------------------------------------------------------- the start

    def load(self, reader: StagedReader, file_bytes: int) -> None:
        """Blocking: the file, then the log from where it says."""
        found = self.document.load(_decode)
        low, high = self._store.queue_offsets(EPOCH_TOPIC, 0)
        is_own = self.document.verdict is FileVerdict.SEALED
        if found is not None and (self.document.is_doubtful or (found[0] > high and not is_own)):
            found = low, self._confirmed(*found)
        if found is not None:
            self._next = found[0]
            for known in found[1]:
                self._put(known)
            self._text = _encode(*found)
        last: tuple[Key, int, int] | None = None
        begun: list[Epoch] = []
        for entry in iter_queue(self._store, EPOCH_TOPIC, 0, min(max(self._next, low), high)):
            if entry.record is None:
                continue
            values = _parsed(entry.record)
            key = _key_of(values)
            if take_text(values, "kind") == "epoch":
                ranges = staged_ranges_from_json(take_list(values, "ranges"))
                known = self.recorded(key, ranges, entry.offset, entry.record.store_time_ms)
                known.end = known.record_end = self._store.written_offset
            elif take_text(values, "kind") == "chunk":
                behind = entry.position + entry.record.size_bytes
                last = key, take_integer(values, "first"), behind
                begun = self.unfinished.copy()
        if last is not None:
            self._resume(reader, begun, *last, file_bytes)

    def _confirmed(self, next_offset: int, found: list[Epoch]) -> list[Epoch]:
        """Return the epochs of a doubtful file that may be of this store: those whose records are
        in the log, and if no other one contradicts it, those whose records are deleted."""
        low, high = self._store.queue_offsets(EPOCH_TOPIC, 0)
        confirmed = [known for known in found if known.offset >= low and self._record(known)]
        deleted = [known for known in found if known.offset < low]
        is_of_store = next_offset <= high and len(confirmed) + len(deleted) == len(found)
        log.warning(
            "%s is not what this broker wrote last (an older copy, or of another store): epochs are"
            " read from the log. %d epochs in it are not of this store. If you replaced the file,"
            " put back the right one to know epochs whose records are deleted.",
            self.document.path, 0 if is_of_store else len(found) - len(confirmed),
        )  # fmt: skip
        self.document.changed = True
        return [*deleted, *confirmed] if is_of_store else confirmed

    def _resume(
        self,
        reader: StagedReader,
        begun: list[Epoch],
        key: Key,
        first: int,
        position: int,
        file_bytes: int,
    ) -> None:
        """What lies before the epoch of the last chunk, `key`, is done; that one is as far as the
        log says."""
        if all(known.key != key for known in begun):
            return  # its record is deleted: long done
        for known in begun:
            if known.key != key:
                self.finish(known)
                continue
            rest = reader.messages(key.owner, known.own, first)
            reached = reader.following(position, rest, file_bytes)
            known.published = first if reached is None else reached
            if known.is_done:
                self.finish(known)
            else:
                log.info(
                    "epoch %d of query %s goes on at message %d of %d",
                    known.epoch, known.query, known.published, known.total,
                )  # fmt: skip
            return


def _parsed(record: Record | None) -> dict[Any, Any]:
    if record is None:
        return {}
    try:
        return load_object(bytes(record.body), "epoch record")
    except ProtocolError as error:
        log.error("a record of %s cannot be read: %s", EPOCH_TOPIC, error)
        return {}


def _key_of(values: dict[Any, Any]) -> Key:
    """Which epoch a record is of. Raises ProtocolError."""
    account, query = take_text(values, "account"), take_text(values, "query")
    return Key(account, query, take_integer(values, "epoch"))


def _decode(data: str) -> tuple[int, list[Epoch]]:
    """The inverse of `_encode`. Raises ProtocolError."""
    values = load_object(data, "sluiceEpochs.json")
    found = []
    for name, value in take_object(values, "queries").items():
        item = as_object(value, "An epoch")
        epoch, offset, time_ms = (take_integer(item, n) for n in ("epoch", "offset", "time"))
        query = str(name).rpartition("/")[2]
        found.append(Epoch(take_text(item, "account"), query, epoch, offset, time_ms))
    return take_integer(values, "next"), found


def _encode(offset: int, queries: Iterable[Epoch]) -> str:
    """The document: queries by their names, those of a name that another account has too by
    `account/name`. A name has no `/`."""
    table: dict[str, dict[str, Any]] = {}
    for known in queries:
        name = known.query if known.query not in table else f"{known.account}/{known.query}"
        table[name] = {"epoch": known.epoch, "offset": known.offset, "time": known.time_ms}
        if known.account:
            table[name]["account"] = known.account
    return fastjson.dumps_file({"next": offset, "queries": table})


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


def _ranges_of(body: bytes | memoryview) -> Ranges:
    """Return the ranges of a request. Raises RequestError."""
    try:
        return staging.decode_staged_ranges(body)
    except ProtocolError as error:
        raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from None


class Epochs:
    """The request family of exactly-once sinks, and what they have left to do."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        store: Store,
        intake: MessageIntake,
        group_commit: GroupCommit,
        *,
        files: Files,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        run_sync: RunSync | None,
        access: Access,
    ) -> None:
        self._settings = settings
        self._access = access
        self._topics = topics
        self._store = store
        self._group_commit = group_commit
        self._clock = clock
        self._worker = SliceWorker(self.run, clock, call_soon)
        self._run_sync = None if settings.store.flush_sync else run_sync
        self._reader = StagedReader(store)
        intake.on_staged = self._reader.seen.note
        self._publisher = Publisher(settings, topics, store, intake)
        self.table = EpochTable(
            store, files, clock, settings.store.root, settings.broker.broker_name, self._reader
        )
        self._checks: dict[Key, Check] = {}
        self._is_syncing = False
        self.published = 0
        """Messages, since the start."""

    def load(self) -> None:
        """Blocking: read what is recorded; what was interrupted goes on with `run`."""
        self.table.load(self._reader, self._settings.store.commit_log_file_bytes)
        self._worker.is_enabled = not self._settings.is_read_only

    # ------------------------------------------------------------------------------- requests

    def commit(
        self, header: CommitEpochRequest, command: Command, peer: Peer
    ) -> Command | Announced | Postponed:
        """Answer COMMIT_EPOCH (900201). The ranges of a million rows are decoded in another
        thread."""
        account = self._access.account  # of this request: other requests come meanwhile

        def steps() -> WorkItem[Command | Announced]:
            ranges = yield from decode_body(_ranges_of, command.body)
            return self._decided(account, header, ranges)

        return run_or_postpone(steps())

    def _decided(
        self, account: str, header: CommitEpochRequest, ranges: Ranges
    ) -> Command | Announced:
        before, count = self._topics.version, staging.STAGING_QUEUES
        self._topics.ensure(EPOCH_TOPIC, 1)
        topic = self._topics.ensure(STAGING_TOPIC, count)
        if topic.queues < count:  # one that was found in the store alone may have fewer
            self._topics.put(replace(topic.config, read_queues=count, write_queues=count))
        answer = self._answer(account, header, ranges)
        return answer if self._topics.version == before else Announced(answer)

    def _answer(self, account: str, header: CommitEpochRequest, ranges: Ranges) -> Command:
        topics = frozenset(header.topics.split(","))
        known = self.table.find(account, header.query, topics)
        if known is not None and header.epoch <= known.epoch:
            return self._of_known(known, header.epoch)
        if header.step not in (PREPARE, COMMIT):
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"{header.step!r} is no step.")
        try:
            staging.check_query(header.query)
            key = Key(account, header.query, header.epoch)
            check = self._begin(key, topics, ranges)
        except ProtocolError as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from None
        except RequestError as error:
            log.warning("epoch %d of %s: %s", header.epoch, header.query, error.remark)
            raise
        if header.step == COMMIT:
            check.is_wanted = True
        elif check.end is not None:
            if check.end <= min(self._store.synced_offset, self._store.reader.visible_end):
                return self._state(CHECKED)
            self._sync()
        if check.has_work:
            self._worker.schedule()
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
            staging_topic=STAGING_TOPIC,
            staging_queues=staging.STAGING_QUEUES,
        )
        return Command(ResponseCode.SUCCESS, encoded(fields), language=SERVER_LANGUAGE)

    def _begin(self, key: Key, topics: frozenset[str], ranges: Ranges) -> Check:
        """The check of these ranges, begun when there is none; raises RequestError when it has
        failed. While one goes on for a commit, no other takes its place."""
        check = self._checks.get(key)
        if check is not None and check.error is not None:
            del self._checks[key]
            if check.ranges == ranges:
                raise check.error
            check = None
        if check is None or (check.ranges != ranges and not check.is_wanted):
            if len(self._checks) >= CHECKS_MAX:  # whoever prepared and never came back
                del self._checks[next(iter(self._checks))]
            steps = self._reader.check(key.owner, self.table.own(ranges))
            check = self._checks[key] = Check(ranges, topics, steps)
        return check

    # ----------------------------------------------------------------------------- the work

    def run(self) -> None:
        """One slice."""
        if not self._worker.is_enabled or self._worker.is_paused:
            return
        table = self.table
        if table.unfinished:
            self._publish(table.unfinished[0])
        key = next((key for key, check in self._checks.items() if check.has_work), None)
        if key is not None:
            self._check(key, self._checks[key])
        if table.unfinished or key is not None:
            self._worker.schedule()

    def _check(self, key: Key, check: Check) -> None:
        """A few messages; when all are right, the decision is recorded if that is wanted."""
        work = TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES)
        seen = None
        try:
            for staged in check.steps:
                work.count_done()
                if staged.stage is not seen:
                    self._publisher.check(staged, check.topics)
                    seen = staged.stage
                if work.is_over:
                    return
            if check.end is None:
                check.end = self._store.written_offset
                self._sync()
            if not check.is_wanted:
                return
            known = self.table.find(key.account, key.query, check.topics)
            if known is None or key.epoch > known.epoch:  # committed when this is in the log
                ranges, topics = staged_ranges_to_json(check.ranges), sorted(check.topics)
                offset = self._append("epoch", key, ranges=ranges, topics=topics)
                if not self._group_commit.commit_now():
                    check.error = RequestError(
                        ResponseCode.SYSTEM_ERROR, "the decision was not stored."
                    )
                    return
                now_ms = self._clock.now_ms()
                known = self.table.recorded(key, check.ranges, offset, now_ms)
                known.end = known.record_end = self._store.written_offset
                self._sync()
            del self._checks[key]
        except RequestError as error:
            check.error = error
        except StoreError as error:
            check.error = RequestError(ResponseCode.SYSTEM_ERROR, str(error))

    def _append(self, kind: str, key: Key, **values: Any) -> int:
        """Append a record to the epoch topic; returns its offset. Raises StoreError."""
        body = fastjson.dumps_strict({"kind": kind, **key.fields(), **values})
        host = self._settings.store_host
        _, offset = self._store.writer.append(
            EPOCH_TOPIC, 0, body, _PROPERTIES, 0, 0, 0, self._clock.now_ms(), host, host
        )
        return offset

    def _publish(self, known: Epoch) -> None:
        """A chunk: its record and as many messages behind it as one write should hold, in one go;
        one file of the log has room for them."""
        owner, first = known.key.owner, known.published
        bytes_max = min(CHUNK_BYTES, self._settings.store.commit_log_file_bytes // 4)
        runs, messages = self._reader.chunk(owner, known.own, first, CHUNK_MESSAGES, bytes_max)
        if not runs and not messages:
            log.error(
                "%d staged messages of epoch %d of query %s are deleted before they were "
                "published: they are lost",
                known.total - first, known.epoch, known.query,
            )  # fmt: skip
            self.table.finish(known)
            return

        def read(ordinal: int, count: int) -> list[Staged]:
            return list(islice(self._reader.messages(owner, known.own, ordinal), count))

        reached, mark = first, known.mark
        begin = first if runs else messages[0].ordinal
        try:
            mark = self._append("chunk", known.key, first=begin)
            for ordinal in chain(
                self._publisher.publish_runs(runs, first, read), self._publisher.publish(messages)
            ):
                reached = ordinal
        except StoreError as error:
            self._worker.pause_after_failure(f"an epoch is published later: {error}")
        if not self._group_commit.commit_now():
            self._worker.pause_after_failure("an epoch is published later: the turn failed")
            return
        if reached == first:
            return
        self._worker.clear_failure()
        self.published += reached - first
        known.published, known.mark, known.end = reached, mark, self._store.written_offset
        if known.is_done:
            self.table.finish(known)
            self._sync()

    # ------------------------------------------------------------------------------ the disk

    def _sync(self) -> None:
        """ASYNC_FLUSH: what was recorded goes to disk now, not some time."""

        def synced(result: int | BaseException) -> None:
            self._is_syncing = False
            if isinstance(result, BaseException):
                log.error("an epoch is not known to be on disk: %s", result)

        if self._run_sync is not None and not self._is_syncing:
            self._is_syncing = True
            self._run_sync(synced)
