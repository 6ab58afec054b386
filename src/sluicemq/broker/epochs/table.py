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
        """Create an empty table without reading a file; `load` reads it.

        `root` is the directory of the store, `broker` the name of this broker, by which ranges name
        it. `staged` reads the topics of epochs whose records do not name them. `clock` decides when
        an epoch is old enough to be forgotten.
        """
        self._store = store
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

        def render() -> str:
            """Return the document as of the last time when all epochs were complete and on disk.

            If that is not the case now, return the last text, and let a later save write the new
            one. Otherwise forget epochs that are older than RETENTION_MS.
            """
            highest_log_end = max((known.log_end for known in self.iter_epochs()), default=0)
            if self.unfinished or highest_log_end > self._durable_end:
                self.document.changed = True
                return self._text or _encode(self._next_offset, ())
            oldest_ms = clock.now_ms() - RETENTION_MS
            for known in [known for known in self.iter_epochs() if known.time_ms <= oldest_ms]:
                self._forget(known)
            self._next_offset = store.queue_offsets(EPOCH_TOPIC, 0)[1]
            self._text = _encode(self._next_offset, self.iter_epochs())
            return self._text

        self.document = Document(files, f"{root}/config/sluiceEpochs.json", render)

    def select_local(self, ranges: Ranges) -> Ranges:
        """Return those of `ranges` that are on this broker."""
        return tuple(one for one in ranges if one.broker == self._broker)

    def find(self, account: str, query: str, topics: Collection[str]) -> Epoch | None:
        """Return the last epoch of a query, as an account sees it; None if there is none.

        That is the newest of the account's own epoch and of others that count for it. An epoch
        without an account counts for every account, and every epoch counts for the account "". But
        another epoch whose topics are known counts only if one of them is in `topics`.
        """
        known_by_account = self.queries.get(query, {})
        newest = known_by_account.get(account)
        for owner, known in known_by_account.items():
            can_count = owner != account and not (owner and account)
            if (
                can_count
                and (newest is None or known.epoch > newest.epoch)
                and self._shares(known, topics)
            ):
                newest = known
        return newest

    def iter_epochs(self) -> Iterator[Epoch]:
        """Yield the last epoch of each query of each account."""
        for known_by in self.queries.values():
            yield from known_by.values()

    def _put(self, known: Epoch) -> None:
        """Make an epoch the last one of its query and account."""
        self.queries.setdefault(known.query, {})[known.account] = known

    def _forget(self, known: Epoch) -> None:
        """Remove the last epoch of a query and account."""
        known_by = self.queries[known.query]
        del known_by[known.account]
        if not known_by:
            del self.queries[known.query]

    def _shares(self, known: Epoch, topics: Collection[str]) -> bool:
        """Return whether an epoch was published to one of `topics`, or whether that is unknown.

        Its record names the topics. A record of an earlier release does not: then the topic of the
        first message of each range of this broker is read. It is unknown if no such message is
        left, and the result is True.
        """
        values = self._record(known)
        named_topics = values.get("topics")
        if isinstance(named_topics, list):
            return not set(topics).isdisjoint(named_topics)
        staged = [
            message
            for one in self.select_local(staged_ranges_from_json(values.get("ranges") or []))
            for message in self._staged.iter_messages(
                (known.query, known.epoch), (replace(one, count=1),)
            )
        ]
        return not staged or any(message.stage.topic in topics for message in staged)

    def add(self, key: EpochKey, ranges: Ranges, offset: int, time_ms: int) -> Epoch:
        """Add an epoch as the last one of its query and account, and return it.

        `ranges` are those of all brokers, `offset` is that of its record in the epoch topic, and
        `time_ms` is the time of the commit. If this broker has messages of the epoch, it is added
        to `unfinished`, to be published. The document is marked as changed.
        """
        local_ranges = self.select_local(ranges)
        known = Epoch(
            account=key.account,
            query=key.query,
            epoch=key.epoch,
            record_offset=offset,
            time_ms=time_ms,
            ranges=ranges,
            local_ranges=local_ranges,
            message_count=sum(one.count for one in local_ranges),
            last_record_offset=offset,
        )
        self._put(known)
        if known.message_count:
            self.unfinished.append(known)
        self.document.changed = True
        return known

    def mark_complete(self, known: Epoch) -> None:
        """Count all messages of an epoch as published, and remove it from `unfinished`.

        The document is marked as changed.
        """
        known.published_count = known.message_count
        if known in self.unfinished:
            self.unfinished.remove(known)
        self.document.changed = True

    def is_record_durable(self, known: Epoch) -> bool:
        """Return whether the record of an epoch is on disk and visible."""
        return self._is_range_durable(known.record_offset, known.first_record_end)

    def is_durable(self, known: Epoch) -> bool:
        """Return whether all messages of an epoch are on disk and visible."""
        return known.is_complete and self._is_range_durable(known.last_record_offset, known.log_end)

    def _is_range_durable(self, offset: int, end: int) -> bool:
        """Return whether the log is durable up to `end`, and the record at `offset` visible."""
        if not end:
            # The epoch comes from the file, which contains only durable ones.
            return True
        visible_end = self._store.queue_offsets(EPOCH_TOPIC, 0)[1]
        return end <= self._durable_end and offset < visible_end

    @property
    def _durable_end(self) -> int:
        """The position up to which the log is on disk, and on as many replicas as it must be."""
        return min(self._store.synced_offset, self._store.reader.visible_end)

    def read_ranges(self, known: Epoch) -> Ranges:
        """Return the ranges of an epoch on all brokers; () if its record is deleted."""
        if known.ranges is not None:
            return known.ranges
        values = self._record(known)
        return staged_ranges_from_json(take_list(values, "ranges")) if values else ()

    def _record(self, known: Epoch) -> dict[Any, Any]:
        """Return the fields of an epoch's record; {} if it is deleted."""
        entry = next(iter_queue(self._store, EPOCH_TOPIC, 0, known.record_offset), None)
        values = _parse_record(None if entry is None else entry.record)
        return values if values and _key_of(values) == known.key else {}

    def drop_ranges(self, known: Epoch) -> None:
        """Free the memory of a published epoch's ranges. `read_ranges` reads its record instead."""
        known.ranges = None
        known.local_ranges = ()

    # ------------------------------------------------------------------------------- the start

    def load(self, reader: StagedReader, file_bytes: int) -> None:
        """Read the document, and then the epoch topic from the offset that the document says.

        Of a document that this broker did not write last, only the epochs that belong to this store
        are taken, and the whole topic is read. Epochs that are not published completely are in
        `unfinished` afterwards. `reader` finds out how far the last publication came.

        `file_bytes` is the size of the files of the log. The call blocks for the time of the reads.
        """
        saved = self.document.load(_decode)
        low, high = self._store.queue_offsets(EPOCH_TOPIC, 0)
        if saved is not None:
            next_offset, epochs = saved
            is_sealed = self.document.verdict is FileVerdict.SEALED
            is_beyond_log = next_offset > high and not is_sealed
            if self.document.is_doubtful or is_beyond_log:
                next_offset, epochs = low, self._confirmed(next_offset, epochs)
            self._next_offset = next_offset
            for known in epochs:
                self._put(known)
            self._text = _encode(next_offset, epochs)
        last_chunk: tuple[EpochKey, int, int] | None = None
        """The epoch of the last chunk record, its first ordinal, and where its messages begin."""
        begun: list[Epoch] = []
        """The epochs to publish whose records are before the last chunk record."""
        for entry in iter_queue(
            self._store, EPOCH_TOPIC, 0, min(max(self._next_offset, low), high)
        ):
            if entry.record is None:
                continue
            values = _parse_record(entry.record)
            key = _key_of(values)
            if take_text(values, "kind") == "epoch":
                ranges = staged_ranges_from_json(take_list(values, "ranges"))
                known = self.add(key, ranges, entry.offset, entry.record.store_time_ms)
                known.log_end = known.first_record_end = self._store.written_offset
            elif take_text(values, "kind") == "chunk":
                messages_start = entry.position + entry.record.size_bytes
                last_chunk = key, take_integer(values, "first"), messages_start
                begun = self.unfinished.copy()
        if last_chunk is not None:
            self._resume(reader, begun, *last_chunk, file_bytes)

    def _confirmed(self, next_offset: int, epochs: list[Epoch]) -> list[Epoch]:
        """Return the epochs of a doubtful document that belong to this store.

        `next_offset` and `epochs` are the content of the document. An epoch whose record is in the
        log belongs to this store. An epoch whose record is deleted belongs to it only if neither
        `next_offset` nor another epoch contradicts the log. The number of other epochs is logged,
        and the document is marked as changed.
        """
        low, high = self._store.queue_offsets(EPOCH_TOPIC, 0)
        confirmed = [
            known for known in epochs if known.record_offset >= low and self._record(known)
        ]
        deleted = [known for known in epochs if known.record_offset < low]
        is_of_store = next_offset <= high and len(confirmed) + len(deleted) == len(epochs)
        log.warning(
            "%s is not what this broker wrote last: it is an older copy or of another store. "
            "Reading epochs from the log instead. %d epochs in the file are not of this store. If "
            "you replaced the file, restore the right one to keep epochs with deleted records.",
            self.document.path,
            0 if is_of_store else len(epochs) - len(confirmed),
        )
        self.document.changed = True
        return [*deleted, *confirmed] if is_of_store else confirmed

    def _resume(
        self,
        reader: StagedReader,
        begun: list[Epoch],
        key: EpochKey,
        first: int,
        position: int,
        file_bytes: int,
    ) -> None:
        """Set how far the epochs `begun` have been published, from the last chunk record.

        The last chunk is of epoch `key` and begins with ordinal `first`. Its messages begin at
        `position` of the log, where `reader` counts those that are there. The epochs before `key`
        are complete, because epochs are published one after the other. Those after it stay as they
        are. Do nothing if `key` is not in `begun`.
        """
        if all(known.key != key for known in begun):
            return  # Its record is deleted, so it was complete long ago.
        for known in begun:
            if known.key != key:
                self.mark_complete(known)
                continue
            rest = reader.iter_messages(key.owner, known.local_ranges, first)
            reached = reader.find_published_end(position, rest, file_bytes)
            known.published_count = first if reached is None else reached
            if known.is_complete:
                self.mark_complete(known)
            else:
                log.info(
                    "continuing epoch %d of query %s at message %d of %d",
                    known.epoch,
                    known.query,
                    known.published_count,
                    known.message_count,
                )
            return


def _parse_record(record: Record | None) -> dict[Any, Any]:
    """Return the JSON fields of a record of the epoch topic; {} if it cannot be read."""
    if record is None:
        return {}
    try:
        return load_object(bytes(record.body), "epoch record")
    except ProtocolError as error:
        log.error("cannot read a record of topic %s: %s", EPOCH_TOPIC, error)
        return {}


def _key_of(values: dict[Any, Any]) -> EpochKey:
    """Return the names of the epoch in the fields of a record. Raises ProtocolError."""
    account = take_text(values, "account")
    query = take_text(values, "query")
    return EpochKey(account, query, take_integer(values, "epoch"))


def _decode(data: str) -> tuple[int, list[Epoch]]:
    """Return (next offset, epochs) from the text of a document.

    The next offset is that of the epoch topic from which a start reads. `_encode` explains the
    text. Raises ProtocolError if it is malformed.
    """
    values = load_object(data, "sluiceEpochs.json")
    epochs = []
    for name, value in take_object(values, "queries").items():
        item = as_object(value, "An epoch")
        epoch, offset, time_ms = (take_integer(item, n) for n in ("epoch", "offset", "time"))
        query = str(name).rpartition("/")[2]
        epochs.append(Epoch(take_text(item, "account"), query, epoch, offset, time_ms))
    return take_integer(values, "next"), epochs


def _encode(offset: int, queries: Iterable[Epoch]) -> str:
    """Return the document with the next offset of the epoch topic and the last epochs.

        {"next": 7, "queries": {"<query>": {"epoch": 3, "offset": 5, "time": <ms>, "account": …}}}

    An epoch is stored under the name of its query, or under `account/name` if a query of another
    account has that name. A name contains no `/`.
    """
    table: dict[str, dict[str, Any]] = {}
    for known in queries:
        name = known.query if known.query not in table else f"{known.account}/{known.query}"
        table[name] = {"epoch": known.epoch, "offset": known.record_offset, "time": known.time_ms}
        if known.account:
            table[name]["account"] = known.account
    return fastjson.dumps_file({"next": offset, "queries": table})
