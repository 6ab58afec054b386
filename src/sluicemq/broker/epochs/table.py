"""The table of committed epochs: what the epoch topic and `config/sluiceEpochs.json` say.

`epochs.py` explains the records of the topic and the rules by which an epoch belongs to an account.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from sluicemq.broker.documents import Document
from sluicemq.broker.epochs.staged import StagedReader
from sluicemq.broker.produce.intake import Record, iter_queue
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError
from sluicemq.files import Files
from sluicemq.files.identity import FileVerdict
from sluicemq.model.system_names import EPOCH_TOPIC
from sluicemq.store.store import Store
from sluicemq.wire import fastjson
from sluicemq.wire.fastjson import (
    as_object,
    load_object,
    take_integer,
    take_list,
    take_object,
    take_text,
)
from sluicemq.wire.staging import (
    StagedRange,
    staged_ranges_from_json,
)

log = logging.getLogger(__name__)

RETENTION_MS: Final = 30 * 86_400_000
"""The time for which the last epoch of a query is known after its commit."""

Ranges = tuple[StagedRange, ...]


class EpochKey(NamedTuple):
    """The names of an epoch."""

    account: str
    """The account that commits the epoch; "" if it is unknown."""
    query: str
    epoch: int

    @property
    def owner(self) -> tuple[str, int]:
        """The query and epoch that the stage properties of its messages name."""
        return self.query, self.epoch

    def to_json(self) -> dict[str, Any]:
        """Return the JSON fields by which a record of the epoch topic names the epoch."""
        fields = {"query": self.query, "epoch": self.epoch}
        return fields | {"account": self.account} if self.account else fields


@dataclass(slots=True)
class Epoch:
    """The last committed epoch of a query of an account, and its publication."""

    account: str
    query: str
    epoch: int
    record_offset: int
    """The offset of its epoch record in the epoch topic."""
    time_ms: int
    """The time of its commit, in ms since 1970."""
    ranges: Ranges | None = None
    """The ranges of all brokers; None if they must be read from the record."""
    local_ranges: Ranges = ()
    """The ranges of this broker, until the epoch is published."""
    message_count: int = 0
    """The number of messages to publish on this broker."""
    published_count: int = 0
    """The number of messages that have been appended to their topics."""
    last_record_offset: int = -1
    """The offset of its last record in the epoch topic."""
    log_end: int = 0
    """The end of the log after its last record and the messages after that; 0 if it was loaded
    from the file, which contains only epochs that are on disk."""
    first_record_end: int = 0
    """The end of the log after its epoch record; 0 as for `log_end`."""

    @property
    def key(self) -> "EpochKey":
        """The names of the epoch."""
        return EpochKey(self.account, self.query, self.epoch)

    @property
    def is_complete(self) -> bool:
        """Whether every message has been appended to its topic."""
        return self.published_count >= self.message_count


class EpochTable:
    """The last epoch of each query of each account, and the document that stores them."""

    def __init__(
        self,
        store: Store,
        files: Files,
        clock: Clock,
        root: str,
        broker: str,
        staged: StagedReader,
    ) -> None:
        """Create an empty table of committed epochs. No file is read before `load`.

        `root` is the directory of the store. `broker` is the name of this broker, by which ranges
        refer to it. `staged` reads staged messages, to find the topics of epochs whose records do
        not name them. `clock` is needed to forget old epochs.
        """
        self._store = store
        self._clock = clock
        self._staged = staged
        self._broker = broker
        self._next_offset = 0
        """The offset of the epoch topic from which a start reads."""
        self._text = ""
        """The document as it was written last."""
        self.queries: dict[str, dict[str, Epoch]] = {}
        """Epochs by query, then by account."""
        self.unfinished: list[Epoch] = []
        """The epochs to publish, in the order of their records."""

        self.document = Document(files, f"{root}/config/sluiceEpochs.json", self._render)

    def _render(self) -> str:
        """Return the text of the file, which must not have an unpublished epoch.

        If all epochs are published and on disk now, the text has the present epochs. Epochs older
        than RETENTION_MS are forgotten first. Otherwise the last text is returned, and the document
        stays marked as changed, so that a later save writes the new one.
        """
        log_ends = [committed.log_end for committed in self.iter_epochs()]
        if self.unfinished or max(log_ends, default=0) > self._durable_end:
            self.document.changed = True
            return self._text or _encode(self._next_offset, ())
        self._forget_until(self._clock.now_ms() - RETENTION_MS)
        _, self._next_offset = self._store.queue_offsets(EPOCH_TOPIC, 0)
        self._text = _encode(self._next_offset, self.iter_epochs())
        return self._text

    def select_local(self, ranges: Ranges) -> Ranges:
        """Return those of `ranges` that are on this broker."""
        return tuple(staged_range for staged_range in ranges if staged_range.broker == self._broker)

    def find(self, account: str, query: str, topics: Collection[str]) -> Epoch | None:
        """Return the last committed epoch of `query` for `account`, or None if there is none.

        It is the newest of these: the account's own epoch; epochs without an account; and, if
        `account` is "", the epochs of all accounts. Except for the account's own one, an epoch
        whose topics are known counts only if one of them is in `topics`.
        """
        epoch_by_account = self.queries.get(query, {})
        newest = epoch_by_account.get(account)
        for other_account, other in epoch_by_account.items():
            can_count = other_account != account and not (other_account and account)
            if not can_count:
                continue
            is_newer = newest is None or other.epoch > newest.epoch
            # Last, because it may read the log.
            if is_newer and self._has_any_topic(other, topics):
                newest = other
        return newest

    def iter_epochs(self) -> Iterator[Epoch]:
        """Yield the last epoch of each query of each account."""
        for epoch_by_account in self.queries.values():
            yield from epoch_by_account.values()

    def _put(self, committed: Epoch) -> None:
        """Make an epoch the last one of its query and account."""
        self.queries.setdefault(committed.query, {})[committed.account] = committed

    def _forget_until(self, time_ms: int) -> None:
        """Remove the epochs that were committed at `time_ms` or before."""
        old_epochs = [committed for committed in self.iter_epochs() if committed.time_ms <= time_ms]
        for committed in old_epochs:
            epoch_by_account = self.queries[committed.query]
            del epoch_by_account[committed.account]
            if not epoch_by_account:
                del self.queries[committed.query]

    def _has_any_topic(self, committed: Epoch, topics: Collection[str]) -> bool:
        """Return whether an epoch was published to one of `topics`. Return True if it is unknown.

        The record of the epoch names its topics. A record of an earlier release does not. Then the
        topics are read from the first message of each range on this broker. They are unknown if no
        such message is left.
        """
        fields = self._read_epoch_record(committed)
        named_topics = fields.get("topics")
        if isinstance(named_topics, list):
            return not set(topics).isdisjoint(named_topics)

        # A record of an earlier release.
        found_topics: set[str] = set()
        ranges = staged_ranges_from_json(fields.get("ranges") or [])
        for staged_range in self.select_local(ranges):
            range_of_first = replace(staged_range, count=1)
            for staged in self._staged.iter_messages(committed.key.owner, (range_of_first,)):
                found_topics.add(staged.stage.topic)
        return not found_topics or not found_topics.isdisjoint(topics)

    def add(self, key: EpochKey, ranges: Ranges, offset: int, time_ms: int) -> Epoch:
        """Add a committed epoch as the last one of its query and account, and return it.

        `ranges` are the ranges of its staged messages on all brokers. `offset` is the offset of its
        record in the epoch topic, and `time_ms` the time of the commit. If this broker has messages
        of the epoch, it is added to `unfinished`, to be published. The document is marked as
        changed.
        """
        local_ranges = self.select_local(ranges)
        committed = Epoch(
            account=key.account,
            query=key.query,
            epoch=key.epoch,
            record_offset=offset,
            time_ms=time_ms,
            ranges=ranges,
            local_ranges=local_ranges,
            message_count=sum(staged_range.count for staged_range in local_ranges),
            last_record_offset=offset,
        )
        self._put(committed)
        if committed.message_count:
            self.unfinished.append(committed)
        self.document.changed = True
        return committed

    def mark_complete(self, committed: Epoch) -> None:
        """Count all messages of an epoch as published, and remove it from `unfinished`.

        The document is marked as changed.
        """
        committed.published_count = committed.message_count
        if committed in self.unfinished:
            self.unfinished.remove(committed)
        self.document.changed = True

    def is_record_durable(self, committed: Epoch) -> bool:
        """Return whether the record of an epoch is on disk and visible."""
        return self._is_range_durable(committed.record_offset, committed.first_record_end)

    def is_durable(self, committed: Epoch) -> bool:
        """Return whether all messages of an epoch are on disk and visible."""
        return committed.is_complete and self._is_range_durable(
            committed.last_record_offset, committed.log_end
        )

    def _is_range_durable(self, offset: int, end: int) -> bool:
        """Return whether the log is durable up to `end`, and the record at `offset` is visible.

        `offset` is an offset of the epoch topic. If `end` is 0, the result is True.
        """
        if not end:
            # The epoch comes from the file, which contains only durable ones.
            return True
        _, visible_end = self._store.queue_offsets(EPOCH_TOPIC, 0)
        return end <= self._durable_end and offset < visible_end

    @property
    def _durable_end(self) -> int:
        """The position up to which the log is on disk, and on as many replicas as it must be."""
        return min(self._store.synced_offset, self._store.reader.visible_end)

    def read_ranges(self, committed: Epoch) -> Ranges:
        """Return the ranges of an epoch on all brokers; () if its record is deleted."""
        if committed.ranges is not None:
            return committed.ranges
        fields = self._read_epoch_record(committed)
        return staged_ranges_from_json(take_list(fields, "ranges")) if fields else ()

    def _read_epoch_record(self, committed: Epoch) -> dict[Any, Any]:
        """Return the JSON fields of the record that committed an epoch; {} if it is deleted."""
        first_entry = next(iter_queue(self._store, EPOCH_TOPIC, 0, committed.record_offset), None)
        if first_entry is None:
            return {}
        fields = _parse_record(first_entry.record)
        is_of_epoch = bool(fields) and _key_of(fields) == committed.key
        return fields if is_of_epoch else {}

    def drop_ranges(self, committed: Epoch) -> None:
        """Free the memory of a published epoch's ranges. `read_ranges` reads its record instead."""
        committed.ranges = None
        committed.local_ranges = ()

    # ------------------------------------------------------------------------------- the start

    def load(self, reader: StagedReader, file_bytes: int) -> None:
        """Read the file, and then the epoch topic from the offset that the file says. Blocking.

        If this broker did not write the file last, only those of its epochs are taken that belong
        to this store, and the whole topic is read. Afterwards, epochs that are not published
        completely are in `unfinished`, with the number of messages that are published. `reader`
        finds that number in the log. `file_bytes` is the size of the files of the log.
        """
        self._load_document()

        # An epoch record commits an epoch. Each chunk record is followed by published messages.
        last_chunk: Chunk | None = None
        begun_epochs: list[Epoch] = []
        """The epochs to publish whose records are before the last chunk record."""
        topic_start, topic_end = self._store.queue_offsets(EPOCH_TOPIC, 0)
        read_start = min(max(self._next_offset, topic_start), topic_end)
        for entry in iter_queue(self._store, EPOCH_TOPIC, 0, read_start):
            if entry.record is None:
                continue
            fields = _parse_record(entry.record)
            key = _key_of(fields)
            record_kind = take_text(fields, "kind")
            if record_kind == "epoch":
                ranges = staged_ranges_from_json(take_list(fields, "ranges"))
                committed = self.add(key, ranges, entry.offset, entry.record.store_time_ms)
                committed.log_end = committed.first_record_end = self._store.written_offset
            elif record_kind == "chunk":
                messages_start = entry.position + entry.record.size_bytes
                last_chunk = Chunk(key, take_integer(fields, "first"), messages_start)
                begun_epochs = self.unfinished.copy()
        if last_chunk is not None:
            self._resume(reader, begun_epochs, last_chunk, file_bytes)

    def _load_document(self) -> None:
        """Add the epochs in the file to the table, and set the offset from which to read the topic.

        Do nothing if there is no file. If this broker did not write it last, or if the offset is
        beyond the end of the topic, only the epochs that belong to this store are added, and the
        offset is the start of the topic.
        """
        saved = self.document.load(_decode)
        if saved is None:
            return
        next_offset, epochs = saved
        topic_start, topic_end = self._store.queue_offsets(EPOCH_TOPIC, 0)
        is_sealed = self.document.verdict is FileVerdict.SEALED
        is_beyond_log = next_offset > topic_end and not is_sealed
        if self.document.is_doubtful or is_beyond_log:
            epochs = self._select_confirmed(next_offset, epochs)
            next_offset = topic_start
        self._next_offset = next_offset
        for committed in epochs:
            self._put(committed)
        self._text = _encode(next_offset, epochs)

    def _select_confirmed(self, next_offset: int, epochs: list[Epoch]) -> list[Epoch]:
        """Return those epochs of a file that belong to this store. The file may be of another one.

        `next_offset` and `epochs` are the content of the file. An epoch whose record is in the log
        belongs to this store. If its record is deleted, it belongs to this store only if the rest
        of the file agrees with the log: the records of all other epochs are there, and
        `next_offset` is not beyond the topic. The number of other epochs is logged, and the
        document is marked as changed.
        """
        topic_start, topic_end = self._store.queue_offsets(EPOCH_TOPIC, 0)
        confirmed = []
        deleted = []
        for saved_epoch in epochs:
            if saved_epoch.record_offset < topic_start:
                deleted.append(saved_epoch)
            elif self._read_epoch_record(saved_epoch):
                confirmed.append(saved_epoch)
        has_contradiction = len(confirmed) + len(deleted) != len(epochs)
        is_of_store = next_offset <= topic_end and not has_contradiction
        foreign_count = 0 if is_of_store else len(epochs) - len(confirmed)
        log.warning(
            "%s is not what this broker wrote last: it is an older copy or of another store. "
            "Reading epochs from the log instead. %d epochs in the file are not of this store. If "
            "you replaced the file, restore the right one to keep epochs with deleted records.",
            self.document.path,
            foreign_count,
        )
        self.document.changed = True
        return [*deleted, *confirmed] if is_of_store else confirmed

    def _resume(
        self,
        reader: StagedReader,
        begun_epochs: list[Epoch],
        last_chunk: "Chunk",
        file_bytes: int,
    ) -> None:
        """Find out how far the publication of the epochs `begun_epochs` came before the stop.

        `last_chunk` is the last chunk of messages that was begun. `reader` counts its messages that
        are in the log. The epochs before the chunk's epoch are marked as complete, because epochs
        are published one after the other. Do nothing if the chunk's epoch is not in `begun_epochs`.
        """
        begun_keys = [committed.key for committed in begun_epochs]
        if last_chunk.key not in begun_keys:
            return  # Its record is deleted, so it was complete long ago.
        index = begun_keys.index(last_chunk.key)
        for earlier in begun_epochs[:index]:
            self.mark_complete(earlier)

        interrupted = begun_epochs[index]
        expected_messages = reader.iter_messages(
            interrupted.key.owner, interrupted.local_ranges, last_chunk.start
        )
        published_end = reader.find_published_end(
            last_chunk.position, expected_messages, file_bytes
        )
        interrupted.published_count = last_chunk.start if published_end is None else published_end
        if interrupted.is_complete:
            self.mark_complete(interrupted)
            return
        log.info(
            "continuing epoch %d of query %s at message %d of %d",
            interrupted.epoch,
            interrupted.query,
            interrupted.published_count,
            interrupted.message_count,
        )


class Chunk(NamedTuple):
    """A chunk of an epoch's messages, as its record describes it."""

    key: EpochKey
    start: int
    """The ordinal of its first message."""
    position: int
    """Where its messages begin in the log."""


def _parse_record(record: Record | None) -> dict[Any, Any]:
    """Return the JSON fields of a record of the epoch topic; {} if it cannot be read."""
    if record is None:
        return {}
    try:
        return load_object(bytes(record.body), "epoch record")
    except ProtocolError as error:
        log.error("cannot read a record of topic %s: %s", EPOCH_TOPIC, error)
        return {}


def _key_of(fields: dict[Any, Any]) -> EpochKey:
    """Return the names of the epoch in the fields of a record. Raises ProtocolError."""
    account = take_text(fields, "account")
    query = take_text(fields, "query")
    return EpochKey(account, query, take_integer(fields, "epoch"))


def _decode(content: str) -> tuple[int, list[Epoch]]:
    """Parse the text of the file, a result of `_encode`, and return (next offset, epochs).

    The next offset is the offset of the epoch topic from which a start reads. Raises ProtocolError
    if the text is malformed.
    """
    document = load_object(content, "sluiceEpochs.json")
    epochs = []
    for name, json_value in take_object(document, "queries").items():
        fields = as_object(json_value, "An epoch")
        _, _, query = str(name).rpartition("/")
        saved_epoch = Epoch(
            account=take_text(fields, "account"),
            query=query,
            epoch=take_integer(fields, "epoch"),
            record_offset=take_integer(fields, "offset"),
            time_ms=take_integer(fields, "time"),
        )
        epochs.append(saved_epoch)
    return take_integer(document, "next"), epochs


def _encode(next_offset: int, epochs: Iterable[Epoch]) -> str:
    """Return the text of the file with the last epochs, and the offset from which a start reads.

        {"next": 7, "queries": {"<query>": {"epoch": 3, "offset": 5, "time": <ms>, "account": …}}}

    An epoch is stored under the name of its query, or under `account/name` if a query of another
    account has that name. A name contains no `/`.
    """
    queries: dict[str, dict[str, Any]] = {}
    for saved_epoch in epochs:
        name = saved_epoch.query
        if name in queries:
            name = f"{saved_epoch.account}/{name}"
        queries[name] = {
            "epoch": saved_epoch.epoch,
            "offset": saved_epoch.record_offset,
            "time": saved_epoch.time_ms,
        }
        if saved_epoch.account:
            queries[name]["account"] = saved_epoch.account
    return fastjson.dumps_file({"next": next_offset, "queries": queries})
