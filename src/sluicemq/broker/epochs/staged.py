"""Staged messages: reading them as they lie, and storing them where they were meant to go.

A sink that writes exactly once sends its rows to the staging topic first (docs/design/0007). Each
is an ordinary stored message whose first property says whose it is and where it belongs; the rest
of its properties, its body, flags, times and hosts are what will be published. Messages that follow
each other and go to the same place are appended as a batch.
"""

import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final, NamedTuple

from sluicemq.broker.epochs.runs import Run, RunReader
from sluicemq.broker.epochs.seen import StagedSeen
from sluicemq.broker.produce.intake import Draft, Intake, RefusalError
from sluicemq.broker.produce.redelivery import Record, read_record
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import NOT_FOR_SENDS, Topic, Topics
from sluicemq.errors import MessageIllegalError, ProtocolError
from sluicemq.model.message import UNIQ_KEY
from sluicemq.model.topic import DEFAULT_TOPIC
from sluicemq.record import property_text as text
from sluicemq.record.layout import MAGIC_BLANK, RECORD_HEAD
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.writer import Part
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.staging import (
    STAGE_PROPERTY,
    STAGED_ID,
    STAGING_TOPIC,
    Owner,
    Stage,
    StagedRange,
    parse_stage,
)

log = logging.getLogger(__name__)

_CHUNK_UNITS: Final = 512
_STAGED_ID: Final = f"{STAGED_ID}\x01".encode()
_ID: Final = f"{UNIQ_KEY}\x01".encode()
_VALUE_START: Final = len(STAGE_PROPERTY) + 1
_UNIQ_KEY: Final = UNIQ_KEY.encode()
_unpack_units: Final = UNIT.iter_unpack


class Staged(NamedTuple):
    """A staged message; `ordinal` counts the messages of its epoch on this broker, `properties` are
    those to publish."""

    ordinal: int
    record: Record
    stage: Stage
    properties: bytes


class StagedReader:
    """The staging queues as they can be seen."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.seen = StagedSeen()

    def messages(
        self, owner: tuple[str, int], ranges: Iterable[StagedRange], first: int = 0
    ) -> Iterator[Staged]:
        """The messages of an epoch (query, epoch) from ordinal `first` on; what is not there,
        or is another's, is left out. HOT."""
        index = 0
        for one in ranges:
            skipped = min(max(first - index, 0), one.count)
            index += skipped
            if skipped < one.count:
                expected = Owner(*owner, one.partition, one.attempt)
                yield from self._of_range(one, skipped, index, expected)
                index += one.count - skipped

    def _of_range(
        self, one: StagedRange, skipped: int, ordinal: int, expected: Owner
    ) -> Iterator[Staged]:
        """HOT: the view of a file is asked for once, not for each message."""
        offset, end = one.offset + skipped, one.offset + one.count
        start = f"{STAGE_PROPERTY}\x01{expected.prefix}".encode()
        view, base, view_end = memoryview(b""), 0, 0
        while offset < end:
            units = self._store.reader.units(
                STAGING_TOPIC, one.queue_id, offset, min(end - offset, _CHUNK_UNITS)
            )
            if not len(units):
                return
            offset += len(units) // UNIT.size
            for position, size, _ in _unpack_units(bytes(units)):
                if not base <= position < view_end:
                    found = self._store.reader.view_at(position)
                    view, base = found or memoryview(b""), position
                    view_end = position + len(view)
                at = position - base
                record = read_record(view[at : at + size]) if size != BLANK_SIZE else None
                if record is not None and record.properties.startswith(start):
                    value_end = record.properties.find(b"\x02")
                    stage = _stage(record.properties[_VALUE_START:value_end])
                    if stage is not None:
                        rest = record.properties[value_end + 1 :]
                        if rest.startswith(_STAGED_ID):
                            rest = _ID + rest[len(_STAGED_ID) :]
                        yield Staged(ordinal, record, stage, rest)
                ordinal += 1

    def check(self, owner: tuple[str, int], ranges: Sequence[StagedRange]) -> Iterator[Staged]:
        """Every message, one by one, or the first one of a range that was seen to come in; raises
        RefusalError when a range is not what was staged."""
        for one in ranges:
            first = self._first_of_seen(owner, one)
            if first is not None:
                yield first
                continue
            count, checksum = 0, 0
            for staged in self.messages(owner, (one,)):
                count += 1
                checksum = zlib.crc32(staged.record.body, checksum)
                yield staged
            if (count, checksum) != (one.count, one.checksum):
                raise RefusalError(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"what was staged is not there any more: of {one.count} messages from offset "
                    f"{one.offset} of {STAGING_TOPIC}, queue {one.queue_id}, {count} were found"
                    f"{', with other bodies' if count == one.count else ''}. They have expired, or "
                    "were lost in a power failure (ASYNC_FLUSH). Nothing of the epoch was "
                    "published here: run it again.",
                )

    def _first_of_seen(self, owner: tuple[str, int], one: StagedRange) -> Staged | None:
        """None when the range has to be read: it is not known, or retention has reached it."""
        stage = self.seen.stage_of(owner, one)
        last = one.offset + one.count - 1
        if stage is None or not self._store.reader.units(STAGING_TOPIC, one.queue_id, last, 1):
            return None
        first = next(self.messages(owner, (replace(one, count=1),)), None)
        return first if first is not None and first.stage == stage else None

    def runs(
        self,
        owner: tuple[str, int],
        ranges: Iterable[StagedRange],
        first: int,
        count_max: int,
        bytes_max: int,
    ) -> list[Run]:
        """As `messages`, but as long as they are alike (`staged_runs`), and so many at most."""
        return RunReader(self._store, owner, count_max, bytes_max).take(ranges, first)

    def following(self, position: int, expected: Iterable[Staged], file_bytes: int) -> int | None:
        """How far an interrupted publication came: the ordinal after the last of `expected` that
        lies, in order and next to each other, from `position` of the log on; None for none."""
        reached = None
        for staged in expected:
            position, record = self._record_at(position, file_bytes)
            if record is None or text.value_of(record.properties, _UNIQ_KEY) != text.value_of(
                staged.properties, _UNIQ_KEY
            ):
                break
            position += record.size_bytes
            reached = staged.ordinal + 1
        return reached

    def _record_at(self, position: int, file_bytes: int) -> tuple[int, Record | None]:
        """The record there, or the first of the next file when this one ends there."""
        view = self._store.reader.view_at(position)
        if view is not None and (
            len(view) < RECORD_HEAD.size or int.from_bytes(view[4:8], "big", signed=True)
            == MAGIC_BLANK
        ):  # fmt: skip
            position += file_bytes - position % file_bytes
            view = self._store.reader.view_at(position)
        return position, None if view is None else read_record(view)


class Publisher:
    """Appends staged messages to their topics, within the turn."""

    def __init__(self, settings: Settings, topics: Topics, store: Store, intake: Intake) -> None:
        self._settings = settings
        self._topics = topics
        self._append_batch = store.writer.append_batch
        self._append_columns = store.writer.append_columns
        self._intake = intake
        self._turn = 0

    def check(self, staged: Staged, topics: Collection[str]) -> None:
        """Can it be published? The topic is made where a send may make it. Raises RefusalError."""
        name = staged.stage.topic
        if name not in topics:
            raise RefusalError(
                ResponseCode.NO_PERMISSION,
                f"a staged message goes to the topic {name}, which the request does not name.",
            )
        if name in NOT_FOR_SENDS or self._topics.is_system(name):
            raise RefusalError(
                ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden."
            )
        if name not in self._topics and (
            self._topics.create_by_send(
                name, DEFAULT_TOPIC, self._settings.broker.default_topic_queues
            )
            is None
        ):
            raise RefusalError(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!"
            )
        if staged.stage.delay is not None:
            draft = self._draft(staged, 0)
            for rewrite in self._intake.rewrites:
                rewrite(draft)

    def publish(self, messages: Sequence[Staged]) -> Iterator[int]:
        """Appends in order; yields the ordinal after what was appended each time.

        Raises StoreError; what was yielded before is in the turn.
        """
        for _, group in groupby(enumerate(messages), key=_place):
            some = [staged for _, staged in group]
            stage, record = some[0].stage, some[0].record
            if stage.delay is None:
                parts = [_part(staged) for staged in some]
                run = Run(
                    stage, record.sys_flag, record.born_time_ms, record.born_host,
                    record.store_host, parts,
                )  # fmt: skip
                yield from self.publish_runs([run], some[0].ordinal)
                continue
            topic = self._topic(stage.topic)
            queue_id = self._queue_id(topic, stage.queue_id)
            for staged in some:
                self._one(staged, topic, queue_id)
                yield staged.ordinal + 1

    def publish_runs(self, runs: Iterable[Run], ordinal: int) -> Iterator[int]:
        """The same for runs, whose first message has this ordinal."""
        for run in runs:
            topic = self._topic(run.stage.topic)
            queue_id = self._queue_id(topic, run.stage.queue_id)
            try:
                self._append(topic, queue_id, run)
            except MessageIllegalError:  # they have to be taken one by one
                for staged in _one_by_one(run, ordinal):
                    self._one(staged, topic, queue_id)
                    yield staged.ordinal + 1
            else:
                yield ordinal + len(run)
            ordinal += len(run)

    def _append(self, topic: Topic, queue_id: int, run: Run) -> None:
        """Raises MessageIllegalError when a message of it breaks a limit; StoreError."""
        if run.columns is None:
            self._append_batch(topic.name, queue_id, run.parts, *run[1:5])
            self._count(topic, run.parts)
            return
        self._append_columns(topic.name, queue_id, run.columns)
        heads, sizes = run.columns.heads, run.columns.property_sizes
        topic.messages_in += len(heads)
        topic.bytes_in += int(heads["body_length"].sum()) + int(sizes.sum())
        topic.bytes_in += len(heads) * topic.record_bytes

    def _one(self, staged: Staged, topic: Topic, queue_id: int) -> None:
        draft = self._draft(staged, queue_id)
        try:
            try:
                self._intake.accept(draft)
            except RefusalError as refusal:
                log.error("a message of an epoch is not delayed: %s", refusal.remark)
                self._intake.append(self._draft(staged, queue_id, is_delayed=False))
        except (MessageIllegalError, RefusalError) as error:
            log.error("a message of an epoch cannot be stored in %s: %s", topic.name, error)
            return
        self._count(topic, (_part(staged),))

    def _draft(self, staged: Staged, queue_id: int, *, is_delayed: bool = True) -> Draft:
        record = staged.record
        properties = text.as_dict(staged.properties.decode("utf-8", "replace"))
        if is_delayed:
            properties |= staged.stage.delay_properties()
        return Draft(
            staged.stage.topic, queue_id, record.body, properties, record.born_time_ms,
            record.born_host, record.store_host, record.flag, record.sys_flag,
        )  # fmt: skip

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            log.warning("topic %s was deleted before an epoch was published: made anew", name)
            topic = self._topics.ensure(name, self._settings.broker.default_topic_queues)
        return topic

    def _queue_id(self, topic: Topic, wanted: int | None) -> int:
        count = max(topic.queues, 1)
        if wanted is not None:
            return wanted % count
        self._turn += 1
        return self._turn % max(topic.config.write_queues, 1)

    def _count(self, topic: Topic, parts: Sequence[Part]) -> None:
        topic.messages_in += len(parts)
        topic.bytes_in += sum([len(part[1]) + len(part[2]) for part in parts])
        topic.bytes_in += len(parts) * topic.record_bytes


def _part(staged: Staged) -> Part:
    record, own = staged.record, staged.properties
    return record.flag, record.body, own, text.tag_code_of(own)


def _one_by_one(run: Run, ordinal: int) -> Iterator[Staged]:
    for some in run.each():
        for flag, body, own, _ in some.parts:
            record = Record(
                0, flag, some.sys_flag, some.born_time_ms, some.born_host, 0, some.store_host, 0,
                memoryview(body), own,
            )  # fmt: skip
            yield Staged(ordinal, record, some.stage, own)
            ordinal += 1


def _stage(value: bytes) -> Stage | None:
    try:
        return parse_stage(value)
    except ProtocolError:
        return None


def _place(numbered: tuple[int, Staged]) -> tuple[Stage, int, int, bytes, bytes, int]:
    """Messages with the same are appended together: none between them is missing."""
    number, staged = numbered
    record = staged.record
    return (
        staged.stage, record.sys_flag, record.born_time_ms, record.born_host, record.store_host,
        staged.ordinal - number,
    )  # fmt: skip
