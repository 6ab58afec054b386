"""What a broker knows of epochs: in its log, in memory, in a small file.

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
"""

import logging
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.broker.documents import Document
from sluicemq.broker.epochs.staged import StagedReader
from sluicemq.broker.produce.redelivery import Record, entries
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError
from sluicemq.files import Files
from sluicemq.store.store import Store
from sluicemq.wire import fastjson
from sluicemq.wire.declare import (
    as_object,
    load_object,
    take_integer,
    take_list,
    take_object,
    take_text,
)
from sluicemq.wire.staging import StagedRange, staged_ranges_of, staged_ranges_to

log = logging.getLogger(__name__)

EPOCH_TOPIC: Final = "rmq_sys_sluice_epochs"
KEPT_MS: Final = 30 * 86_400_000
"""How long the last epoch of a query is known after its commit."""
PROPERTIES: Final = b"WAIT\x01true\x02"


@dataclass(slots=True)
class Epoch:
    """The last recorded epoch of a query. `ranges` are those of all brokers, None when they have to
    be read again; `own` those of this broker until it is settled. `mark` is the offset of its last
    record in the epoch topic, `end` the end of the log after it, `record_end` after the first."""

    query: str
    epoch: int
    offset: int
    time_ms: int
    ranges: tuple[StagedRange, ...] | None = None
    own: tuple[StagedRange, ...] = ()
    total: int = 0
    published: int = 0
    mark: int = -1
    end: int = 0
    record_end: int = 0

    @property
    def is_done(self) -> bool:
        """Is every message of it in its topic?"""
        return self.published >= self.total


class EpochTable:
    """The last epoch of each query."""

    def __init__(self, store: Store, files: Files, clock: Clock, root: str, broker: str) -> None:
        self._store = store
        self._clock = clock
        self._broker = broker
        self._next = 0
        self._text = ""
        self.queries: dict[str, Epoch] = {}
        self.unfinished: list[Epoch] = []
        """In the order in which they were recorded."""
        self.document = Document(files, f"{root}/config/sluiceEpochs.json", self._render)

    def own(self, ranges: tuple[StagedRange, ...]) -> tuple[StagedRange, ...]:
        """Those of this broker."""
        return tuple(one for one in ranges if one.broker == self._broker)

    def recorded(
        self, query: str, epoch: int, ranges: tuple[StagedRange, ...], offset: int, time_ms: int
    ) -> Epoch:
        """An epoch record is in the log, at an offset of its topic."""
        own = self.own(ranges)
        total = sum(one.count for one in own)
        known = Epoch(query, epoch, offset, time_ms, ranges, own, total, 0, offset)
        self.queries[query] = known
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
        if not end:  # as this start has found it: recovery has synced the log
            return True
        visible_end = self._store.queue_offsets(EPOCH_TOPIC, 0)[1]
        return end <= self._store.synced_offset and offset < visible_end

    def decision(self, known: Epoch) -> tuple[StagedRange, ...]:
        """What was decided, for all brokers; () when it is not known any more."""
        if known.ranges is not None:
            return known.ranges
        entry = next(entries(self._store, EPOCH_TOPIC, 0, known.offset), None)
        values = _parsed(None if entry is None else entry.record)
        if (values.get("query"), values.get("epoch")) != (known.query, known.epoch):
            return ()
        return staged_ranges_of(take_list(values, "ranges"))

    def settle(self, known: Epoch) -> None:
        """It is done and safe: what can be read again is forgotten."""
        known.ranges = None
        known.own = ()

    # ------------------------------------------------------------------------------- the start

    def load(self, reader: StagedReader, file_bytes: int) -> None:
        """Blocking: the file, then the log from where it says."""
        found = self.document.load(_decode)
        if found is not None:
            self._next = found[0]
            self.queries = {known.query: known for known in found[1]}
            self._text = _encode(*found)
        low, high = self._store.queue_offsets(EPOCH_TOPIC, 0)
        if self._next > high:
            log.error("%s is behind its end %d: it begins there", self.document.path, high)
        last: tuple[tuple[str, int], int, int] | None = None
        begun: list[Epoch] = []
        for entry in entries(self._store, EPOCH_TOPIC, 0, min(max(self._next, low), high)):
            if entry.record is None:
                continue
            values = _parsed(entry.record)
            query, epoch = take_text(values, "query"), take_integer(values, "epoch")
            if take_text(values, "kind") == "epoch":
                ranges = staged_ranges_of(take_list(values, "ranges"))
                self.recorded(query, epoch, ranges, entry.offset, entry.record.store_time_ms)
            elif take_text(values, "kind") == "chunk":
                behind = entry.position + entry.record.size_bytes
                last = (query, epoch), take_integer(values, "first"), behind
                begun = self.unfinished.copy()
        if last is not None:
            self._resume(reader, begun, *last, file_bytes)

    def _resume(
        self,
        reader: StagedReader,
        begun: list[Epoch],
        owner: tuple[str, int],
        first: int,
        position: int,
        file_bytes: int,
    ) -> None:
        """What lies before the epoch of the last chunk, `owner`, is done; that one is as far as the
        log says."""
        if all((known.query, known.epoch) != owner for known in begun):
            return  # its record is deleted: long done
        for known in begun:
            if (known.query, known.epoch) != owner:
                self.finish(known)
                continue
            rest = reader.messages(owner, known.own, first)
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

    # -------------------------------------------------------------------------------- the file

    def _render(self) -> str:
        """As of the last moment at which nothing was half done or not on disk."""
        newest = max((known.end for known in self.queries.values()), default=0)
        if self.unfinished or newest > self._store.synced_offset:
            self.document.changed = True
            return self._text or _encode(self._next, ())
        oldest_ms = self._clock.now_ms() - KEPT_MS
        self.queries = {q: known for q, known in self.queries.items() if known.time_ms > oldest_ms}
        self._next = self._store.queue_offsets(EPOCH_TOPIC, 0)[1]
        self._text = _encode(self._next, self.queries.values())
        return self._text


def epoch_record(query: str, epoch: int, ranges: tuple[StagedRange, ...]) -> bytes:
    """The body of the record that commits an epoch."""
    return fastjson.dumps_strict(
        {"kind": "epoch", "query": query, "epoch": epoch, "ranges": staged_ranges_to(ranges)}
    )


def chunk_record(query: str, epoch: int, first: int) -> bytes:
    """The body of the record before published messages."""
    return fastjson.dumps_strict({"kind": "chunk", "query": query, "epoch": epoch, "first": first})


def _parsed(record: Record | None) -> dict[Any, Any]:
    if record is None:
        return {}
    try:
        return load_object(bytes(record.body), "epoch record")
    except ProtocolError as error:
        log.error("a record of %s cannot be read: %s", EPOCH_TOPIC, error)
        return {}


def _encode(offset: int, queries: Any) -> str:
    table = {
        known.query: {"epoch": known.epoch, "offset": known.offset, "time": known.time_ms}
        for known in queries
    }
    return fastjson.dumps_file({"next": offset, "queries": table})


def _decode(data: str) -> tuple[int, list[Epoch]]:
    values = load_object(data, "sluiceEpochs.json")
    found = []
    for query, value in take_object(values, "queries").items():
        item = as_object(value, "An epoch")
        found.append(
            Epoch(
                str(query), take_integer(item, "epoch"), take_integer(item, "offset"),
                take_integer(item, "time"),
            )
        )  # fmt: skip
    return take_integer(values, "next"), found
