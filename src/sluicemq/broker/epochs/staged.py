"""Staged messages: the rows of an exactly-once sink, from staging to their topics.

A sink that writes exactly once first sends its rows to the staging topic (design/0007). Each is an
ordinary stored message. Its first property, the *stage property*, names the owner of the message
and the topic to which it belongs. The rest of the properties, the body, flags, times and hosts are
those of the message that is published.

- `IngestedRanges` remembers what arrived, so that a commit need not read it again.
- `StagedReader` reads and checks the staged messages of an epoch.
- `Publisher` appends them to their topics.

The messages of one task are nearly always alike: one topic, no delay. Such messages are copied in
runs, as columns (`columns.py`). All other messages are read one by one.
"""

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import methodcaller
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.broker.produce.intake import (
    MessageIntake,
    MessageToStore,
    Record,
    iter_queue,
    read_record,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topic, Topics
from sluicemq.errors import MessageIllegalError, ProtocolError, RequestError
from sluicemq.model.bodies import Buffer
from sluicemq.model.message import BORN_HOST_IPV6, STORE_HOST_IPV6, UNIQ_KEY
from sluicemq.model.system_names import STAGING_TOPIC, is_send_forbidden_topic
from sluicemq.model.topic import DEFAULT_TOPIC
from sluicemq.record import codec as text
from sluicemq.record.layout import MAGIC_BLANK, MAGIC_V1, RECORD_HEAD
from sluicemq.store.queues import UNIT
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.staging import STAGE_PROPERTY, STAGED_ID, Owner, Stage, StagedRange, parse_stage

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import BatchColumns, Spans

log = logging.getLogger(__name__)

COLUMNS_MIN: Final = 32
"""The number of messages from which on a run is copied as columns."""

COLUMNS_MAX: Final = 2048
"""The number of messages in a run at most."""

INGESTED_MAX: Final = 10_000
"""The number of ranges that are remembered: those of the last tasks."""

_IPV6: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_STAGE: Final = f"{STAGE_PROPERTY}\x01".encode()
_STAGED_ID: Final = f"{STAGED_ID}\x01".encode()
_ID: Final = f"{UNIQ_KEY}\x01".encode()


def _parse_stage_property(properties: bytes) -> tuple[Stage, bytes] | None:
    """Return the stage in the first property, and that property itself.

    The second result is the beginning of `properties`, including the separator after the property.
    Return None if the first property is not a valid stage property.
    """
    end = properties.find(b"\x02") + 1
    if not end or not properties.startswith(_STAGE):
        return None
    try:
        return parse_stage(properties[len(_STAGE) : end - 1]), properties[:end]
    except ProtocolError:
        return None


@dataclass(slots=True)
class IngestedRun:
    """Consecutive messages of one stage in a staging queue, as they were appended."""

    stage: Stage
    count: int = 0
    """The number of messages; -1 if a message of another stage follows within a batch."""
    checksum: int = 0
    """The CRC-32 of the concatenated bodies."""


class IngestedRanges:
    """The ranges that were staged on this broker since its start, with their checksums.

    A sink describes each range by its first offset, the number of messages and the CRC-32 of their
    bodies. The broker appends these messages batch by batch, and can count them and compute the
    checksum meanwhile. So a range that arrived without interruption, from one owner, need not be
    read from the log when its epoch is checked. Every other range is read
    (`StagedReader.iter_checked`): after a restart of the broker, if rows go to several topics or
    are delayed, or if the batches of two tasks alternated in a queue.

    A batch whose group commit failed is counted too. The sink sends it again, at the same or a
    later offset. If its description of the range then differs from the remembered one, the range is
    read; if it is equal, it is correct. Whether retention has deleted the range meanwhile is
    checked at the commit.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[int, int], IngestedRun] = OrderedDict()
        """Runs by queue and first offset. The last one of each queue may still grow."""
        self._last: dict[int, tuple[int, IngestedRun, bytes]] = {}
        """By queue: the offset after its last run, the run, and the run's stage property."""

    # Hot path: called for each batch that is staged.
    def note_batch(
        self,
        queue_id: int,
        offset: int,
        properties: "Sequence[bytes] | Spans",
        bodies: "Sequence[Buffer] | Spans",
    ) -> None:
        """Add a batch that was appended to a staging queue from `offset` on to a run.

        The batch continues the last run of the queue if it follows immediately and has the same
        stage. Otherwise it begins a new run, and the oldest run may be forgotten. A batch without a
        valid stage, or with a delay, belongs to no run. If the messages of the batch have different
        stages, its run is marked as useless.

        `properties` and `bodies` have an element for each message of the batch, and at least one.
        """
        end, run, start = self._last.get(queue_id, (-1, None, b""))
        if run is None or end != offset or not properties[0].startswith(start):
            parsed = _parse_stage_property(properties[0])
            if parsed is None or parsed[0].delay is not None:
                self._last.pop(queue_id, None)
                return
            stage, start = parsed
            run = IngestedRun(stage)
            self._runs[queue_id, offset] = run
            self._runs.move_to_end((queue_id, offset))
            if len(self._runs) > INGESTED_MAX:
                self._runs.popitem(last=False)
        if isinstance(properties, Sequence):
            is_alike = all(map(methodcaller("startswith", start), properties))
        else:
            is_alike = properties.all_begin_with(start)
        if not is_alike:
            self._last.pop(queue_id, None)
            run.count = -1  # No sink describes such a range.
            return
        joined = b"".join(bodies) if isinstance(bodies, Sequence) else bodies.join()
        run.checksum = zlib.crc32(joined, run.checksum)
        run.count += len(bodies)
        self._last[queue_id] = offset + len(bodies), run, start

    def find_stage(self, owner: tuple[str, int], one: StagedRange) -> Stage | None:
        """Return the stage of all messages of a range, or None if the range must be read.

        `owner` is (query, epoch), and `one` is the sink's description of the range. The range must
        be read if no run begins at its offset, or if the run has another owner, another number of
        messages or another checksum.
        """
        run = self._runs.get((one.queue_id, one.offset))
        if run is None or (run.count, run.checksum) != (one.count, one.checksum):
            return None
        return run.stage if run.stage.owner == Owner(*owner, one.partition, one.attempt) else None


class StagedMessage(NamedTuple):
    """A message in a staging queue that belongs to an epoch."""

    ordinal: int
    """The number of the message among those of the epoch on this broker, from 0."""
    record: Record
    stage: Stage
    properties: bytes
    """The properties to publish."""


class ColumnRun(NamedTuple):
    """Messages of one stage that are appended together, as columns."""

    stage: Stage
    columns: "BatchColumns"

    def __len__(self) -> int:
        return len(self.columns.bodies)


class StagedReader:
    """Reads the visible messages of the staging queues.

    In its methods `owner` is (query, epoch), and `ranges` are those of this broker that belong to
    the epoch, in order. The ordinal of a message is its number within these ranges.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ingested = IngestedRanges()

    def iter_messages(
        self, owner: tuple[str, int], ranges: Iterable[StagedRange], first: int = 0
    ) -> Iterator[StagedMessage]:
        """Yield the messages of an epoch from ordinal `first` on.

        Messages that are missing, or have another owner than the epoch and the task of their range,
        are skipped. The yielded properties have no stage property, and the message id has its
        ordinary name.
        """
        ordinal = 0
        for one in ranges:
            skipped = min(max(first - ordinal, 0), one.count)
            expected = Owner(*owner, one.partition, one.attempt)
            units = iter_queue(self._store, STAGING_TOPIC, one.queue_id, one.offset + skipped)
            for entry in islice(units, one.count - skipped):
                parsed = entry.record and _parse_stage_property(entry.record.properties)
                if entry.record is not None and parsed and parsed[0].owner == expected:
                    stage, stage_property = parsed
                    rest = entry.record.properties[len(stage_property) :]
                    if rest.startswith(_STAGED_ID):
                        rest = _ID + rest[len(_STAGED_ID) :]
                    own_ordinal = ordinal + entry.offset - one.offset
                    yield StagedMessage(own_ordinal, entry.record, stage, rest)
            ordinal += one.count

    def iter_checked(
        self, owner: tuple[str, int], ranges: Sequence[StagedRange]
    ) -> Iterator[StagedMessage]:
        """Check that the ranges contain what was staged, and yield messages for further checks.

        A range whose checksum is known from its arrival is not read: only its first message is
        yielded, and all others have the same stage. Of any other range, every message is read and
        yielded.

        Raises RequestError after the messages of a range that do not have its count and checksum.
        """
        for one in ranges:
            stage, last = self.ingested.find_stage(owner, one), one.offset + one.count - 1
            # If the last unit is missing, retention has deleted the range. Reading it then reports
            # what is missing.
            if stage and self._store.reader.units(STAGING_TOPIC, one.queue_id, last, 1):
                first = next(self.iter_messages(owner, (replace(one, count=1),)), None)
                if first is not None and first.stage == stage:
                    yield first
                    continue
            count, checksum = 0, 0
            for staged in self.iter_messages(owner, (one,)):
                count += 1
                checksum = zlib.crc32(staged.record.body, checksum)
                yield staged
            if (count, checksum) != (one.count, one.checksum):
                raise RequestError(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"staged messages are missing: of {one.count} messages from offset "
                    f"{one.offset} of {STAGING_TOPIC}, queue {one.queue_id}, {count} were found"
                    f"{', with other bodies' if count == one.count else ''}. They have expired, or "
                    "were lost in a power failure (ASYNC_FLUSH). Nothing of the epoch was "
                    "published on this broker. Run the epoch again.",
                )

    def read_chunk(
        self,
        owner: tuple[str, int],
        ranges: Sequence[StagedRange],
        first: int,
        count_max: int,
        bytes_max: int,
    ) -> tuple[list[ColumnRun], list[StagedMessage]]:
        """Return the next messages of an epoch to publish, from ordinal `first` on.

        The result is (runs, messages): first runs of messages that are alike, then messages to
        append one by one, which follow the last run. Both lists are empty if all messages from
        `first` on are missing.

        Together they have up to `count_max` messages and `bytes_max` bytes of records. But at least
        one message is returned if there is any, even if it is larger.
        """
        runs: list[ColumnRun] = []
        ordinal = 0
        for one in ranges:
            expected = Owner(*owner, one.partition, one.attempt)
            while ordinal <= first < ordinal + one.count:
                count = min(ordinal + one.count - first, COLUMNS_MAX, count_max)
                offset = one.offset + first - ordinal
                units = self._store.reader.units(STAGING_TOPIC, one.queue_id, offset, count)
                run, size_bytes = self._read_run(units, expected, bytes_max)
                if run is None:
                    break
                runs.append(run)
                first += len(run)
                count_max -= len(run)
                bytes_max -= size_bytes
            ordinal += one.count
        messages: list[StagedMessage] = []
        for staged in islice(self.iter_messages(owner, ranges, first), count_max):
            bytes_max -= staged.record.size_bytes
            if bytes_max < 0 and (runs or messages):
                break
            messages.append(staged)
        return runs, messages

    # Hot path: it copies every message that is published as a part of a run.
    def _read_run(
        self, units: Buffer, owner: Owner, bytes_max: int
    ) -> tuple[ColumnRun | None, int]:
        """Return (run, size of its records in bytes) for the first messages of `units`.

        The messages of the run belong to `owner` and have the same stage, without a delay. They are
        in one file of the log, and have up to `bytes_max` bytes together. The run ends before the
        first message that differs. Return (None, 0) if fewer than COLUMNS_MIN messages meet this.
        """
        if len(units) < COLUMNS_MIN * UNIT.size or not self._store.writer.can_append_columns:
            return None, 0
        # NumPy is imported only if a sink is used.
        from sluicemq.broker.epochs import columns  # noqa: PLC0415 - see above

        fitting, ends = columns.select_fitting_units(units, bytes_max)
        base = int(fitting["position"][0]) if len(fitting) else 0
        view = self._store.reader.view_at(base) or memoryview(b"")
        # The view ends with its file; the ends of the records rise.
        count = int(ends.searchsorted(base + len(view), "right"))
        if count < COLUMNS_MIN:
            return None, 0

        staged = columns.StagedColumns(fitting[:count], view, base)
        properties, head = staged.first_properties(), staged.heads[0]
        parsed = _parse_stage_property(properties)
        if parsed is None:
            return None, 0
        stage, stage_property = parsed
        if (
            stage.owner != owner
            or stage.delay is not None
            or not properties.startswith(_STAGED_ID, len(stage_property))
            or int(head["magic"]) != MAGIC_V1
            or int(head["sys_flag"]) & _IPV6
        ):
            return None, 0

        start = stage_property + _STAGED_ID
        count = staged.count_alike(start)
        if count < COLUMNS_MIN:
            return None, 0
        run = ColumnRun(stage, staged.to_columns(count, len(start), _ID))
        return run, int(ends[count - 1]) - base

    def find_published_end(
        self, position: int, expected: Iterable[StagedMessage], file_bytes: int
    ) -> int | None:
        """Return how far a publication came that a crash interrupted.

        The log from `position` on is compared with the messages `expected`, in order, by their
        message ids. The comparison ends at the first record that is missing or different. Return
        the ordinal after the last equal message; None if the first message is not there.

        `file_bytes` is the size of the files of the log. A record is never split between two files:
        if it does not fit, the rest of the file is blank.
        """
        reached = None
        for staged in expected:
            view = self._store.reader.view_at(position)
            if view is not None and (
                len(view) < RECORD_HEAD.size
                or int.from_bytes(view[4:8], "big", signed=True) == MAGIC_BLANK
            ):
                # The rest of the file is blank: the next record is in the next file.
                position += file_bytes - position % file_bytes
                view = self._store.reader.view_at(position)
            record = read_record(view)
            if record is None or record.get_text(UNIQ_KEY).encode() != text.find_property(
                staged.properties, UNIQ_KEY.encode()
            ):
                break
            position += record.size_bytes
            reached = staged.ordinal + 1
        return reached


class Publisher:
    """Appends staged messages to their topics. The caller commits them."""

    def __init__(
        self, settings: Settings, topics: Topics, store: Store, intake: MessageIntake
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._append_batch = store.writer.append_batch
        self._append_columns = store.writer.append_columns
        self._intake = intake
        self._next_queue = 0
        """A counter that distributes messages without a queue over the queues of their topic."""

    def check_message(self, staged: StagedMessage, topics: Collection[str]) -> None:
        """Raise RequestError if a message cannot be published.

        `topics` are the topics that the request names, and for which access was checked. A message
        of another topic, of a system topic or with an invalid delay cannot be published. The
        message's topic is created if it does not exist and a send would create it.
        """
        name = staged.stage.topic
        if name not in topics:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"a staged message goes to the topic {name}, which the request does not name.",
            )
        if is_send_forbidden_topic(name) or self._topics.is_system(name):
            raise RequestError(
                ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden."
            )
        queues = self._settings.broker.default_topic_queues
        if name not in self._topics and not self._topics.create_for_send(
            name, DEFAULT_TOPIC, queues
        ):
            raise RequestError(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!"
            )
        if staged.stage.delay is not None:
            # The rewrites raise RequestError if the delay is invalid. The message is not appended.
            message = _to_message(staged, 0)
            for rewrite in self._intake.rewrites:
                rewrite(message)

    def publish_runs(
        self,
        runs: Iterable[ColumnRun],
        ordinal: int,
        read: Callable[[int, int], Sequence[StagedMessage]],
    ) -> Iterator[int]:
        """Append runs of messages to their topics, in order, and count them for the topics.

        `ordinal` is that of the first message. After each append, yield the ordinal after the last
        appended message. If a run cannot be appended as a whole, `read(ordinal, count)` is called;
        it must return the messages of the run, which are then appended one by one.

        Raises StoreError. Then the messages before the last yielded ordinal are appended.
        """
        for run in runs:
            topic = self._topic(run.stage.topic)
            columns = run.columns
            try:
                self._append_columns(topic.name, self._queue_id(topic, run.stage), columns)
            except MessageIllegalError:
                yield from self.publish_messages(read(ordinal, len(run)))
            else:
                size_bytes = columns.heads["body_length"].sum() + columns.property_sizes.sum()
                _count(topic, len(run), int(size_bytes))
                yield ordinal + len(run)
            ordinal += len(run)

    def publish_messages(self, messages: Sequence[StagedMessage]) -> Iterator[int]:
        """Append messages to their topics, in order, and count them for the topics.

        Consecutive messages that are alike and not delayed are appended with one call. After each
        append, yield the ordinal after the last appended message. A message whose delay is no
        longer valid is logged and published without the delay. A message that cannot be stored is
        logged and skipped.

        Raises StoreError. Then the messages before the last yielded ordinal are appended.
        """

        def batch_key(numbered: tuple[int, StagedMessage]) -> tuple[object, ...]:
            """Return equal keys for messages of one batch, which have no gap between them."""
            number, (ordinal, record, stage, _) = numbered
            return (
                stage,
                record.sys_flag,
                record.born_time_ms,
                record.born_host,
                record.store_host,
                ordinal - number,
            )

        for _, group in groupby(enumerate(messages), key=batch_key):
            batch = [staged for _, staged in group]
            topic = self._topic(batch[0].stage.topic)
            queue_id = self._queue_id(topic, batch[0].stage)
            if batch[0].stage.delay is None and self._append_together(topic, queue_id, batch):
                yield batch[-1].ordinal + 1
                continue
            for staged in batch:
                try:
                    try:
                        self._intake.rewrite_and_append(_to_message(staged, queue_id))
                    except RequestError as error:
                        log.error(
                            "publishing a message of an epoch without its delay: %s", error.remark
                        )
                        self._intake.append(_to_message(staged, queue_id, is_delayed=False))
                except (MessageIllegalError, RequestError) as error:
                    log.error(
                        "cannot store a message of an epoch in topic %s: %s", topic.name, error
                    )
                else:
                    _count(topic, 1, len(staged.record.body) + len(staged.properties))
                yield staged.ordinal + 1

    def _append_together(self, topic: Topic, queue_id: int, batch: list[StagedMessage]) -> bool:
        """Append messages of one stage with one call, and count them for the topic.

        Return False, with nothing appended, if a message of the batch is illegal: then the caller
        must append them one by one. Raises StoreError.
        """
        parts = [
            (
                one.record.flag,
                one.record.body,
                one.properties,
                text.tag_code_of_properties(one.properties),
            )
            for one in batch
        ]
        first = batch[0].record
        try:
            self._append_batch(
                topic.name,
                queue_id,
                parts,
                first.sys_flag,
                first.born_time_ms,
                first.born_host,
                first.store_host,
            )
        except MessageIllegalError:
            return False
        size_bytes = sum([len(body) + len(properties) for _, body, properties, _ in parts])
        _count(topic, len(parts), size_bytes)
        return True

    def _topic(self, name: str) -> Topic:
        """Return a topic. If it was deleted since its messages were checked, create and log it."""
        topic = self._topics.get(name)
        if topic is None:
            log.warning(
                "topic %s was deleted before an epoch was published; creating it again", name
            )
            topic = self._topics.ensure(name, self._settings.broker.default_topic_queues)
        return topic

    def _queue_id(self, topic: Topic, stage: Stage) -> int:
        """Return the id of the queue to which messages of a stage are published.

        That is the queue that the stage names, modulo the number of queues of the topic. If it
        names none, each call returns the next writable queue.
        """
        if stage.queue_id is not None:
            return stage.queue_id % max(topic.queues, 1)
        self._next_queue += 1
        return self._next_queue % max(topic.config.write_queues, 1)


def _to_message(staged: StagedMessage, queue_id: int, *, is_delayed: bool = True) -> MessageToStore:
    """Return the message to publish in a queue, with the delay of its stage if `is_delayed`.

    `reconsume_times` is 0: the message is a new one for its consumers.
    """
    properties = text.parse_property_text(staged.properties.decode("utf-8", "replace"))
    if is_delayed:
        properties |= staged.stage.delay_properties()
    message = staged.record.copy_to(staged.stage.topic, queue_id, properties)
    message.reconsume_times = 0
    return message


def _count(topic: Topic, count: int, size_bytes: int) -> None:
    """Add `count` messages to the counters of a topic.

    `size_bytes` is the size of their bodies and properties; the fixed size of their records is
    added here.
    """
    topic.messages_in += count
    topic.bytes_in += size_bytes + count * topic.record_bytes
