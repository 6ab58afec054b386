"""Staged messages: the rows of an exactly-once sink, from staging to their topics.

A sink that writes exactly once first sends its rows to the staging topic (design/0007). Each is an
ordinary stored message. Its first property, the *stage property*, contains the *stage* of the
message: its owner (query, epoch, task and attempt of the sink), the topic in which it is published,
and the queue and delay there, if any. The rest of the properties, the body, flags, times and hosts
are those of the message that is published.

- `IngestedRanges` remembers what arrived, so that a commit need not read it again.
- `StagedReader` reads and checks the staged messages of an epoch.
- `Publisher` appends them to their topics.

The messages of one task are nearly always alike: one topic, no delay. Such messages are copied in
*runs* (consecutive messages of one stage), as columns (`columns.py`). All other messages are read
one by one. A *unit* is the 20-byte entry of a queue that locates the record of one message.
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
from sluicemq.store.writer import BatchPart
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.staging import STAGE_PROPERTY, STAGED_ID, Owner, Stage, StagedRange, parse_stage

if TYPE_CHECKING:
    from sluicemq.broker.epochs.columns import StagedColumns
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
"""How the stage property begins: with its name and the separator before its value."""
_STAGED_ID: Final = f"{STAGED_ID}\x01".encode()
"""How the property with the message id begins while the message is staged."""
_ID: Final = f"{UNIQ_KEY}\x01".encode()
"""How the property with the message id begins in the published message."""


def _parse_stage_property(properties: bytes) -> tuple[Stage, bytes] | None:
    """Parse the first of encoded properties, which says what a staged message belongs to.

    Return (stage, property): the parsed value, and the beginning of `properties` with this property
    and the separator after it. Return None if the first property is not a valid stage property.
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
        self._last_runs: dict[int, tuple[int, IngestedRun, bytes]] = {}
        """By queue: the offset after its last run, the run, and the run's stage property."""

    # Hot path: called for each batch that is staged.
    def note_batch(
        self,
        queue_id: int,
        offset: int,
        properties: "Sequence[bytes] | Spans",
        bodies: "Sequence[Buffer] | Spans",
    ) -> None:
        """Add a batch of messages, appended to a staging queue from `offset` on, to a run.

        A run is a sequence of messages with the same stage, whose count and checksum are kept. The
        batch continues the last run of the queue if it follows immediately and has the same stage.
        Otherwise it begins a new run, and the oldest run may be forgotten. A batch without a valid
        stage, or with a delay, belongs to no run. If the messages of the batch have different
        stages, its run is marked as useless.

        `properties` and `bodies` have one element for each message of the batch, at least one.
        """
        # Find the run of the batch: the last run of its queue, or a new one.
        run_end, run, stage_property = self._last_runs.get(queue_id, (-1, None, b""))
        if run is None or run_end != offset or not properties[0].startswith(stage_property):
            parsed = _parse_stage_property(properties[0])
            if parsed is None or parsed[0].delay is not None:
                self._last_runs.pop(queue_id, None)
                return
            stage, stage_property = parsed
            run = IngestedRun(stage)
            self._runs[queue_id, offset] = run
            self._runs.move_to_end((queue_id, offset))
            if len(self._runs) > INGESTED_MAX:
                self._runs.popitem(last=False)

        # Check that all messages of the batch have the stage of the run.
        if isinstance(properties, Sequence):
            have_same_stage = all(map(methodcaller("startswith", stage_property), properties))
        else:
            have_same_stage = properties.all_begin_with(stage_property)
        if not have_same_stage:
            self._last_runs.pop(queue_id, None)
            run.count = -1  # No sink describes such a range.
            return

        # Add the batch to the run.
        joined_bodies = b"".join(bodies) if isinstance(bodies, Sequence) else bodies.join()
        run.checksum = zlib.crc32(joined_bodies, run.checksum)
        run.count += len(bodies)
        self._last_runs[queue_id] = offset + len(bodies), run, stage_property

    def find_stage(self, owner: tuple[str, int], staged_range: StagedRange) -> Stage | None:
        """Return the stage of all messages of a range, if their arrival was seen, else None.

        `owner` is (query, epoch), and `staged_range` is the sink's description of the range. None
        means that the range must be read to check it. That is the case if no run that was seen
        begins at its offset, or if the run has another owner, number of messages or checksum.
        """
        run = self._runs.get((staged_range.queue_id, staged_range.offset))
        if run is None or run.stage.owner != _owner_of_range(owner, staged_range):
            return None
        is_as_described = run.count == staged_range.count and run.checksum == staged_range.checksum
        return run.stage if is_as_described else None


def _owner_of_range(owner: tuple[str, int], staged_range: StagedRange) -> Owner:
    """Return the owner that the messages of a range must have. `owner` is (query, epoch)."""
    query, epoch = owner
    return Owner(query, epoch, staged_range.partition, staged_range.attempt)


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
    size_bytes: int
    """The size of the staged records."""

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
        self, owner: tuple[str, int], ranges: Iterable[StagedRange], first_ordinal: int = 0
    ) -> Iterator[StagedMessage]:
        """Yield the messages of an epoch from ordinal `first_ordinal` on.

        The ordinal of a message is its number, from 0 on, among all messages in `ranges`. Messages
        that are missing, or that belong to another epoch or another task of the sink, are skipped.
        In the yielded properties, the stage property is removed, and the message id has its usual
        name.
        """
        range_ordinal = 0  # the ordinal of the first message of the range
        for staged_range in ranges:
            expected_owner = _owner_of_range(owner, staged_range)
            # The messages of this range before `first_ordinal` are skipped, which may be all.
            skipped = min(max(first_ordinal - range_ordinal, 0), staged_range.count)
            queue_entries = iter_queue(
                self._store,
                STAGING_TOPIC,
                staged_range.queue_id,
                staged_range.offset + skipped,
            )
            for queue_entry in islice(queue_entries, staged_range.count - skipped):
                if queue_entry.record is None:
                    continue
                ordinal = range_ordinal + queue_entry.offset - staged_range.offset
                staged = _parse_staged_message(queue_entry.record, ordinal)
                if staged is not None and staged.stage.owner == expected_owner:
                    yield staged
            range_ordinal += staged_range.count

    def iter_checked(
        self, owner: tuple[str, int], ranges: Sequence[StagedRange]
    ) -> Iterator[StagedMessage]:
        """Check that the ranges contain what the sink has staged, and yield their messages.

        If the checksum of a range is known from the arrival of its messages, the range is not read.
        Only its first message is yielded, because all others have the same stage. All messages of
        other ranges are read and yielded.

        Raises RequestError after the messages of a range whose number or checksum is wrong.
        """
        for staged_range in ranges:
            first_message = self._find_first_of_ingested(owner, staged_range)
            if first_message is not None:
                yield first_message
                continue

            count = 0
            checksum = 0
            for staged in self.iter_messages(owner, (staged_range,)):
                count += 1
                checksum = zlib.crc32(staged.record.body, checksum)
                yield staged
            if count != staged_range.count or checksum != staged_range.checksum:
                raise _make_missing_error(staged_range, count)

    def _find_first_of_ingested(
        self, owner: tuple[str, int], staged_range: StagedRange
    ) -> StagedMessage | None:
        """Return the first message of a range that need not be read, or None if it must be read.

        It need not be read if its checksum is known from the arrival of the messages, and if its
        first and last messages still exist.
        """
        stage = self.ingested.find_stage(owner, staged_range)
        if stage is None:
            return None
        # If the last unit is missing, retention has deleted the range. Reading it then reports
        # what is missing.
        last_offset = staged_range.offset + staged_range.count - 1
        if not self._store.reader.units(STAGING_TOPIC, staged_range.queue_id, last_offset, 1):
            return None
        range_of_first = replace(staged_range, count=1)
        first_message = next(self.iter_messages(owner, (range_of_first,)), None)
        if first_message is None or first_message.stage != stage:
            return None
        return first_message

    def read_chunk(
        self,
        owner: tuple[str, int],
        ranges: Sequence[StagedRange],
        first_ordinal: int,
        count_max: int,
        bytes_max: int,
    ) -> tuple[list[ColumnRun], list[StagedMessage]]:
        """Return the next messages of an epoch to publish, from ordinal `first_ordinal` on.

        The ordinal of a message is its number among all messages in `ranges`. The result is (runs,
        messages). A run has many messages that are alike and can be appended together. `messages`
        follow the last run, and are appended one by one. Both lists are empty if all messages from
        `first_ordinal` on are missing.

        Together they have at most `count_max` messages and `bytes_max` bytes. But one message is
        returned even if it is larger.
        """
        # First runs, as long as the next messages are alike.
        runs = self._read_runs(owner, ranges, first_ordinal, count_max, bytes_max)
        run_count = sum(map(len, runs))
        bytes_left = bytes_max - sum(run.size_bytes for run in runs)

        # Then the messages that follow, one by one.
        messages: list[StagedMessage] = []
        following = self.iter_messages(owner, ranges, first_ordinal + run_count)
        for staged in islice(following, count_max - run_count):
            bytes_left -= staged.record.size_bytes
            if bytes_left < 0 and (runs or messages):
                break
            messages.append(staged)
        return runs, messages

    def _read_runs(
        self,
        owner: tuple[str, int],
        ranges: Sequence[StagedRange],
        first_ordinal: int,
        count_max: int,
        bytes_max: int,
    ) -> list[ColumnRun]:
        """Return runs of messages that are alike, from `first_ordinal` on, without gaps.

        The list ends before the first messages that cannot be in a run. The arguments are those of
        `read_chunk`.
        """
        next_ordinal = first_ordinal
        count_left = count_max
        bytes_left = bytes_max
        runs: list[ColumnRun] = []
        range_ordinal = 0  # the ordinal of the first message of the range
        for staged_range in ranges:
            expected_owner = _owner_of_range(owner, staged_range)
            range_end_ordinal = range_ordinal + staged_range.count
            while range_ordinal <= next_ordinal < range_end_ordinal:
                count = min(range_end_ordinal - next_ordinal, COLUMNS_MAX, count_left)
                offset = staged_range.offset + next_ordinal - range_ordinal
                units = self._store.reader.units(
                    STAGING_TOPIC, staged_range.queue_id, offset, count
                )
                run = self._read_run(units, expected_owner, bytes_left)
                if run is None:
                    break  # no later range contains `next_ordinal`, so this ends the list
                runs.append(run)
                next_ordinal += len(run)
                count_left -= len(run)
                bytes_left -= run.size_bytes
            range_ordinal = range_end_ordinal
        return runs

    # Hot path: it copies every message that is published as a part of a run.
    def _read_run(self, units: Buffer, owner: Owner, bytes_max: int) -> ColumnRun | None:
        """Return a run of the first messages of `units`, which are alike.

        `units` are encoded entries of a staging queue, which locate the messages. The messages of
        the run belong to `owner`, have the same stage and no delay, are in one file of the log, and
        have at most `bytes_max` bytes together. The run ends before the first message that differs.
        Return None if it has fewer than COLUMNS_MIN messages, which are then read one by one.
        """
        if len(units) < COLUMNS_MIN * UNIT.size or not self._store.writer.can_append_columns:
            return None
        staged = self._copy_fitting_records(units, bytes_max)
        if staged is None:
            return None

        # The first record decides whether there is a run, and of which stage.
        parsed = _parse_start_of_run(staged)
        if parsed is None or parsed[0].owner != owner:
            return None
        stage, stage_property = parsed

        # The run ends before the first record that differs.
        common_start = stage_property + _STAGED_ID
        run_count = staged.count_alike(common_start)
        if run_count < COLUMNS_MIN:
            return None
        # In the published messages, the name of the message id replaces the common start.
        columns = staged.to_columns(run_count, len(common_start), _ID)
        return ColumnRun(stage, columns, staged.size_of_first(run_count))

    def _copy_fitting_records(self, units: Buffer, bytes_max: int) -> "StagedColumns | None":
        """Copy the first records of `units` that fit into `bytes_max` and are in one file.

        Return None if these are fewer than COLUMNS_MIN records.
        """
        # NumPy is imported only if a sink is used.
        from sluicemq.broker.epochs import columns  # noqa: PLC0415 - see above

        fitting_units, record_ends = columns.select_fitting_units(units, bytes_max)
        if len(fitting_units) < COLUMNS_MIN:
            return None

        # Of these, select the records that are in the same file of the log as the first one.
        first_position = int(fitting_units["position"][0])
        rest_of_file = self._store.reader.view_at(first_position)
        if rest_of_file is None:  # the visible part of the log does not contain it
            return None
        file_end = first_position + len(rest_of_file)
        count_in_file = int(record_ends.searchsorted(file_end, "right"))
        if count_in_file < COLUMNS_MIN:
            return None
        units_in_file = fitting_units[:count_in_file]
        return columns.StagedColumns(units_in_file, rest_of_file, first_position)

    def find_published_end(
        self, position: int, expected: Iterable[StagedMessage], file_bytes: int
    ) -> int | None:
        """Find out how far a publication came before a crash.

        The records in the log from `position` on are compared with the messages `expected`, in
        order, by their message ids. The comparison ends at the first record that is missing or
        different. Return the ordinal after the last equal message, or None if the first message is
        not there.

        `file_bytes` is the size of the files of the log. If a record does not fit into a file, the
        rest of the file is blank, and the record is in the next file.
        """
        published_end = None
        for staged in expected:
            view = self._store.reader.view_at(position)
            if view is not None and _is_blank(view):
                # The next record is at the start of the next file.
                position += file_bytes - position % file_bytes
                view = self._store.reader.view_at(position)

            record = read_record(view)
            if record is None:
                break
            expected_id = text.find_property(staged.properties, UNIQ_KEY.encode())
            if record.get_text(UNIQ_KEY).encode() != expected_id:
                break
            position += record.size_bytes
            published_end = staged.ordinal + 1
        return published_end


def _parse_staged_message(record: Record, ordinal: int) -> StagedMessage | None:
    """Return a staged message, or None if the record has no valid stage property.

    Its properties are those to publish: the stage property is removed, and the message id has its
    usual name.
    """
    parsed = _parse_stage_property(record.properties)
    if parsed is None:
        return None
    stage, stage_property = parsed
    properties = record.properties[len(stage_property) :]
    if properties.startswith(_STAGED_ID):
        properties = _ID + properties[len(_STAGED_ID) :]
    return StagedMessage(ordinal, record, stage, properties)


def _parse_start_of_run(staged: "StagedColumns") -> tuple[Stage, bytes] | None:
    """Return (stage, stage property) of the first record, if a run can begin with it, else None.

    A run cannot begin with a record that has no valid stage, a delay, no message id after the stage
    property, an IPv6 address, or another format than MAGIC_V1.
    """
    first_properties = staged.first_properties()
    first_head = staged.heads[0]
    parsed = _parse_stage_property(first_properties)
    if parsed is None:
        return None
    stage, stage_property = parsed
    can_begin_run = (
        stage.delay is None
        and first_properties.startswith(_STAGED_ID, len(stage_property))
        and int(first_head["magic"]) == MAGIC_V1
        and not int(first_head["sys_flag"]) & _IPV6
    )
    return parsed if can_begin_run else None


def _is_blank(rest_of_file: memoryview) -> bool:
    """Return whether no record begins at the start of `rest_of_file`, because the rest is blank."""
    if len(rest_of_file) < RECORD_HEAD.size:
        return True
    return int.from_bytes(rest_of_file[4:8], "big", signed=True) == MAGIC_BLANK


def _make_missing_error(staged_range: StagedRange, found_count: int) -> RequestError:
    """Return the error for a range that does not contain what the sink has staged.

    `found_count` is the number of messages that were found in it.
    """
    difference = ", with other bodies" if found_count == staged_range.count else ""
    return RequestError(
        ResponseCode.ILLEGAL_OPERATION,
        f"staged messages are missing: of {staged_range.count} messages from offset "
        f"{staged_range.offset} of {STAGING_TOPIC}, queue {staged_range.queue_id}, {found_count} "
        f"were found{difference}. They have expired, or were lost in a power failure "
        "(ASYNC_FLUSH). Nothing of the epoch was published on this broker. Run the epoch again.",
    )


class Publisher:
    """Appends staged messages to their topics. The caller commits them."""

    def __init__(
        self, settings: Settings, topics: Topics, store: Store, intake: MessageIntake
    ) -> None:
        """Create a publisher that appends to `store`; single messages through `intake`."""
        self._settings = settings
        self._topics = topics
        self._append_batch = store.writer.append_batch
        self._append_columns = store.writer.append_columns
        self._intake = intake
        self._queue_counter = 0
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
        if name not in self._topics:
            queue_count = self._settings.broker.default_topic_queues
            if not self._topics.create_for_send(name, DEFAULT_TOPIC, queue_count):
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
        first_ordinal: int,
        read_messages: Callable[[int, int], Sequence[StagedMessage]],
    ) -> Iterator[int]:
        """Append runs of messages to their topics, in order, and count them for the topics.

        `first_ordinal` is the ordinal of the first message, its number in the epoch. After each
        append, yield the ordinal after the last appended message. If a run cannot be appended as a
        whole, `read_messages(ordinal, count)` is called to get its messages, which are then
        appended one by one.

        Raises StoreError. The messages before the last yielded ordinal are appended then.
        """
        ordinal = first_ordinal
        for run in runs:
            topic = self._get_or_create_topic(run.stage.topic)
            queue_id = self._select_queue_id(topic, run.stage)
            columns = run.columns
            try:
                self._append_columns(topic.name, queue_id, columns)
            except MessageIllegalError:
                yield from self.publish_messages(read_messages(ordinal, len(run)))
            else:
                size_bytes = columns.heads["body_length"].sum() + columns.property_sizes.sum()
                _count_published(topic, len(run), int(size_bytes))
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
        for _, numbered_batch in groupby(enumerate(messages), key=_batch_key):
            batch = [staged for _, staged in numbered_batch]
            stage = batch[0].stage
            topic = self._get_or_create_topic(stage.topic)
            queue_id = self._select_queue_id(topic, stage)
            if stage.delay is None and self._append_together(topic, queue_id, batch):
                yield batch[-1].ordinal + 1
                continue
            for staged in batch:
                self._append_alone(topic, queue_id, staged)
                yield staged.ordinal + 1

    def _append_alone(self, topic: Topic, queue_id: int, staged: StagedMessage) -> None:
        """Append one message, with its delay if that is valid, and count it for the topic.

        An invalid delay is logged, and a message that cannot be stored is logged and skipped.
        Raises StoreError.
        """
        try:
            try:
                self._intake.rewrite_and_append(_to_message(staged, queue_id))
            except RequestError as error:
                log.error("publishing a message of an epoch without its delay: %s", error.remark)
                self._intake.append(_to_message(staged, queue_id, is_delayed=False))
        except (MessageIllegalError, RequestError) as error:
            log.error("cannot store a message of an epoch in topic %s: %s", topic.name, error)
        else:
            _count_published(topic, 1, len(staged.record.body) + len(staged.properties))

    def _append_together(self, topic: Topic, queue_id: int, batch: list[StagedMessage]) -> bool:
        """Append messages of one stage with one call, and count them for the topic.

        Return False, with nothing appended, if a message of the batch is illegal: then the caller
        must append them one by one. Raises StoreError.
        """
        batch_parts = [_to_batch_part(staged) for staged in batch]
        # All messages of the batch have the same flags, times and hosts (`_batch_key`).
        first_record = batch[0].record
        try:
            self._append_batch(
                topic.name,
                queue_id,
                batch_parts,
                first_record.sys_flag,
                first_record.born_time_ms,
                first_record.born_host,
                first_record.store_host,
            )
        except MessageIllegalError:
            return False
        size_bytes = sum([len(body) + len(properties) for _, body, properties, _ in batch_parts])
        _count_published(topic, len(batch_parts), size_bytes)
        return True

    def _get_or_create_topic(self, name: str) -> Topic:
        """Return the topic with this name. Create it if it was deleted after the check.

        Messages are published to topics that existed when they were checked. Creating it is logged.
        """
        topic = self._topics.get(name)
        if topic is None:
            log.warning(
                "topic %s was deleted before an epoch was published; creating it again", name
            )
            topic = self._topics.ensure(name, self._settings.broker.default_topic_queues)
        return topic

    def _select_queue_id(self, topic: Topic, stage: Stage) -> int:
        """Return the id of the queue to which messages of a stage are published.

        If the stage names a queue, it is that id modulo the number of queues of the topic.
        Otherwise each call returns the next writable queue in turn.
        """
        if stage.queue_id is not None:
            return stage.queue_id % max(topic.queues, 1)
        self._queue_counter += 1
        return self._queue_counter % max(topic.config.write_queues, 1)


def _batch_key(numbered: tuple[int, StagedMessage]) -> tuple[object, ...]:
    """Return a key that is equal for messages that can be appended in one batch.

    They have the same stage, flags, time and hosts, and no gap between them. `numbered` is (index
    of the message in a list, message).
    """
    index, (ordinal, record, stage, _) = numbered
    # Without a gap between two messages, their indexes differ as much as their ordinals.
    return (
        stage,
        record.sys_flag,
        record.born_time_ms,
        record.born_host,
        record.store_host,
        ordinal - index,
    )


def _to_batch_part(staged: StagedMessage) -> BatchPart:
    """Return a message as the writer of the store takes it: flag, body, properties, tag code."""
    return (
        staged.record.flag,
        staged.record.body,
        staged.properties,
        text.tag_code_of_properties(staged.properties),
    )


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


def _count_published(topic: Topic, count: int, size_bytes: int) -> None:
    """Add `count` messages to the counters of a topic.

    `size_bytes` is the size of their bodies and properties; the fixed size of their records is
    added here.
    """
    topic.messages_in += count
    topic.bytes_in += size_bytes + count * topic.record_bytes
