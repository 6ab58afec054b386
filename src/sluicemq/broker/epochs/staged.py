"""Staged messages: known as they come in, read as they lie, stored where they were meant to go.

A sink that writes exactly once sends its rows to the staging topic first (design/0007). Each
is an ordinary stored message whose first property says whose it is and where it belongs; the rest
of its properties, its body, flags, times and hosts are what will be published.

What a task stages is nearly always alike: one topic, no delay. Such messages are copied many at a
time as columns (`columns.py`); where one is not like that, messages are read one by one.
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
"""Fewer messages are read one by one."""
COLUMNS_MAX: Final = 2048
SEEN_MAX: Final = 10_000
"""Ranges that are remembered: those of the last tasks."""
_IPV6: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_STAGE: Final = f"{STAGE_PROPERTY}\x01".encode()
_STAGED_ID: Final = f"{STAGED_ID}\x01".encode()
_ID: Final = f"{UNIQ_KEY}\x01".encode()


def _staged(properties: bytes) -> tuple[Stage, bytes] | None:
    """The stage that properties begin with, and the bytes that say it; None without one."""
    end = properties.find(b"\x02") + 1
    if not end or not properties.startswith(_STAGE):
        return None
    try:
        return parse_stage(properties[len(_STAGE) : end - 1]), properties[:end]
    except ProtocolError:
        return None


@dataclass(slots=True)
class SeenRun:
    """Messages next to each other in a staging queue, of one stage, as they were appended."""

    stage: Stage
    count: int = 0
    checksum: int = 0


class StagedSeen:
    """What was staged here since the start, so that a commit need not read it again.

    A sink says of each range: so many messages from this offset on, and the CRC-32 of their bodies.
    The broker appended those messages itself, batch by batch, and can count and sum along: a range
    that it saw come in, unbroken and of one owner, needs no look into the log when the epoch is
    checked. All else is read (`StagedReader.check`): after a restart, rows that go to several
    places or later, a task whose batches alternated with another's.

    A batch whose turn failed was counted too. The sink sends it again, to the same offset or a
    later one, so what it says in the end differs from what is known here, and is read; if it is the
    same, it is true. Whether retention has deleted it is asked at the commit.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[int, int], SeenRun] = OrderedDict()
        """By queue and first offset; the last of each queue may go on."""
        self._last: dict[int, tuple[int, SeenRun, bytes]] = {}
        """Queue -> the offset after its last run, the run, and what its messages begin with."""

    def note(
        self,
        queue_id: int,
        offset: int,
        properties: "Sequence[bytes] | Spans",
        bodies: "Sequence[Buffer] | Spans",
    ) -> None:
        """A batch was appended to a queue. HOT: each staged message."""
        end, run, start = self._last.get(queue_id, (-1, None, b""))
        if run is None or end != offset or not properties[0].startswith(start):
            found = _staged(properties[0])
            if found is None or found[0].delay is not None:
                self._last.pop(queue_id, None)
                return
            run, start = SeenRun(found[0]), found[1]
            self._runs[queue_id, offset] = run
            self._runs.move_to_end((queue_id, offset))
            if len(self._runs) > SEEN_MAX:
                self._runs.popitem(last=False)
        if isinstance(properties, Sequence):
            is_alike = all(map(methodcaller("startswith", start), properties))
        else:
            is_alike = properties.all_begin_with(start)
        if not is_alike:
            self._last.pop(queue_id, None)
            run.count = -1  # never what a sink says
            return
        joined = b"".join(bodies) if isinstance(bodies, Sequence) else bodies.join()
        run.checksum = zlib.crc32(joined, run.checksum)
        run.count += len(bodies)
        self._last[queue_id] = offset + len(bodies), run, start

    def stage_of(self, owner: tuple[str, int], one: StagedRange) -> Stage | None:
        """Where the whole range goes, when it is known to be what its sink says it is."""
        run = self._runs.get((one.queue_id, one.offset))
        if run is None or (run.count, run.checksum) != (one.count, one.checksum):
            return None
        return run.stage if run.stage.owner == Owner(*owner, one.partition, one.attempt) else None


class Staged(NamedTuple):
    """A staged message; `ordinal` counts the messages of its epoch on this broker, `properties` are
    those to publish."""

    ordinal: int
    record: Record
    stage: Stage
    properties: bytes


class Run(NamedTuple):
    """Messages that are appended together, as columns."""

    stage: Stage
    columns: "BatchColumns"

    def __len__(self) -> int:
        return len(self.columns.bodies)


class StagedReader:
    """The staging queues as they can be seen."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.seen = StagedSeen()

    def messages(
        self, owner: tuple[str, int], ranges: Iterable[StagedRange], first: int = 0
    ) -> Iterator[Staged]:
        """The messages of an epoch (query, epoch) from ordinal `first` on; what is not there,
        or is another's, is left out."""
        ordinal = 0
        for one in ranges:
            skipped = min(max(first - ordinal, 0), one.count)
            expected = Owner(*owner, one.partition, one.attempt)
            units = iter_queue(self._store, STAGING_TOPIC, one.queue_id, one.offset + skipped)
            for entry in islice(units, one.count - skipped):
                found = entry.record and _staged(entry.record.properties)
                if entry.record is not None and found and found[0].owner == expected:
                    rest = entry.record.properties[len(found[1]) :]
                    if rest.startswith(_STAGED_ID):
                        rest = _ID + rest[len(_STAGED_ID) :]
                    at = ordinal + entry.offset - one.offset
                    yield Staged(at, entry.record, found[0], rest)
            ordinal += one.count

    def check(self, owner: tuple[str, int], ranges: Sequence[StagedRange]) -> Iterator[Staged]:
        """Every message, one by one, or the first one of a range that was seen to come in; raises
        RequestError when a range is not what was staged."""
        for one in ranges:
            stage, last = self.seen.stage_of(owner, one), one.offset + one.count - 1
            # Else it has to be read: it is not known, or retention has reached it.
            if stage and self._store.reader.units(STAGING_TOPIC, one.queue_id, last, 1):
                first = next(self.messages(owner, (replace(one, count=1),)), None)
                if first is not None and first.stage == stage:
                    yield first
                    continue
            count, checksum = 0, 0
            for staged in self.messages(owner, (one,)):
                count += 1
                checksum = zlib.crc32(staged.record.body, checksum)
                yield staged
            if (count, checksum) != (one.count, one.checksum):
                raise RequestError(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"what was staged is not there any more: of {one.count} messages from offset "
                    f"{one.offset} of {STAGING_TOPIC}, queue {one.queue_id}, {count} were found"
                    f"{', with other bodies' if count == one.count else ''}. They have expired, or "
                    "were lost in a power failure (ASYNC_FLUSH). Nothing of the epoch was "
                    "published here: run it again.",
                )

    def chunk(
        self,
        owner: tuple[str, int],
        ranges: Sequence[StagedRange],
        first: int,
        count_max: int,
        bytes_max: int,
    ) -> tuple[list[Run], list[Staged]]:
        """So many messages from ordinal `first` on: as columns as long as many of them are alike,
        the rest one by one."""
        runs: list[Run] = []
        ordinal = 0
        for one in ranges:
            expected = Owner(*owner, one.partition, one.attempt)
            while ordinal <= first < ordinal + one.count:
                count = min(ordinal + one.count - first, COLUMNS_MAX, count_max)
                offset = one.offset + first - ordinal
                units = self._store.reader.units(STAGING_TOPIC, one.queue_id, offset, count)
                run, size_bytes = self._run(units, expected, bytes_max)
                if run is None:
                    break
                runs.append(run)
                first, count_max, bytes_max = (
                    first + len(run), count_max - len(run), bytes_max - size_bytes
                )  # fmt: skip
            ordinal += one.count
        messages: list[Staged] = []
        for staged in islice(self.messages(owner, ranges, first), count_max):
            bytes_max -= staged.record.size_bytes
            if bytes_max < 0 and (runs or messages):
                break
            messages.append(staged)
        return runs, messages

    def _run(self, units: Buffer, owner: Owner, bytes_max: int) -> tuple[Run | None, int]:
        """As many of the first as are alike, lie in one file and have room, and their bytes; None
        when few. HOT."""
        if len(units) < COLUMNS_MIN * UNIT.size or not self._store.writer.can_append_columns:
            return None, 0
        from sluicemq.broker.epochs import columns  # noqa: PLC0415 - NumPy for many only

        fitting, ends = columns.fitting(units, bytes_max)
        base = int(fitting["position"][0]) if len(fitting) else 0
        view = self._store.reader.view_at(base) or memoryview(b"")
        count = int(ends.searchsorted(base + len(view), "right"))  # they rise
        if count < COLUMNS_MIN:
            return None, 0
        found = columns.Found(fitting[:count], view, base)
        properties, head = found.first_properties(), found.heads[0]
        staged = _staged(properties)
        if (
            staged is None or staged[0].owner != owner or staged[0].delay is not None
            or not properties.startswith(_STAGED_ID, len(staged[1]))
            or int(head["magic"]) != MAGIC_V1 or int(head["sys_flag"]) & _IPV6
        ):  # fmt: skip
            return None, 0
        start = staged[1] + _STAGED_ID
        count = found.alike(start)
        if count < COLUMNS_MIN:
            return None, 0
        run = Run(staged[0], found.columns(count, len(start), _ID))
        return run, int(ends[count - 1]) - base

    def following(self, position: int, expected: Iterable[Staged], file_bytes: int) -> int | None:
        """How far an interrupted publication came: the ordinal after the last of `expected` that
        lies, in order and next to each other, from `position` of the log on; None for none."""
        reached = None
        for staged in expected:
            view = self._store.reader.view_at(position)
            if view is not None and (
                len(view) < RECORD_HEAD.size
                or int.from_bytes(view[4:8], "big", signed=True) == MAGIC_BLANK
            ):  # the file ends there
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
    """Appends staged messages to their topics, within the turn."""

    def __init__(
        self, settings: Settings, topics: Topics, store: Store, intake: MessageIntake
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._append_batch = store.writer.append_batch
        self._append_columns = store.writer.append_columns
        self._intake = intake
        self._turn = 0

    def check(self, staged: Staged, topics: Collection[str]) -> None:
        """Can it be published? The topic is made where a send may make it. Raises RequestError."""
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
            draft = _draft(staged, 0)
            for rewrite in self._intake.rewrites:
                rewrite(draft)

    def publish_runs(
        self, runs: Iterable[Run], ordinal: int, read: Callable[[int, int], Sequence[Staged]]
    ) -> Iterator[int]:
        """Appends in order, from this ordinal on; yields the ordinal after what was appended each
        time. What cannot be appended together is read, from an ordinal on so many, one by one.

        Raises StoreError; what was yielded before is in the turn.
        """
        for run in runs:
            topic = self._topic(run.stage.topic)
            columns = run.columns
            try:
                self._append_columns(topic.name, self._queue_id(topic, run.stage), columns)
            except MessageIllegalError:
                yield from self.publish(read(ordinal, len(run)))
            else:
                size_bytes = columns.heads["body_length"].sum() + columns.property_sizes.sum()
                _count(topic, len(run), int(size_bytes))
                yield ordinal + len(run)
            ordinal += len(run)

    def publish(self, messages: Sequence[Staged]) -> Iterator[int]:
        """The same for messages."""

        def place(numbered: tuple[int, Staged]) -> tuple[object, ...]:
            """Messages with the same are appended together: none between them is missing."""
            number, (ordinal, record, stage, _) = numbered
            return (
                stage, record.sys_flag, record.born_time_ms, record.born_host, record.store_host,
                ordinal - number,
            )  # fmt: skip

        for _, group in groupby(enumerate(messages), key=place):
            some = [staged for _, staged in group]
            topic = self._topic(some[0].stage.topic)
            queue_id = self._queue_id(topic, some[0].stage)
            if some[0].stage.delay is None and self._batch(topic, queue_id, some):
                yield some[-1].ordinal + 1
                continue
            for staged in some:
                try:
                    try:
                        self._intake.rewrite_and_append(_draft(staged, queue_id))
                    except RequestError as error:
                        log.error("a message of an epoch is not delayed: %s", error.remark)
                        self._intake.append(_draft(staged, queue_id, is_delayed=False))
                except (MessageIllegalError, RequestError) as error:
                    log.error("a message of an epoch cannot be stored in %s: %s", topic.name, error)
                else:
                    _count(topic, 1, len(staged.record.body) + len(staged.properties))
                yield staged.ordinal + 1

    def _batch(self, topic: Topic, queue_id: int, some: list[Staged]) -> bool:
        """False when they have to be taken one by one."""
        parts = [
            (
                one.record.flag,
                one.record.body,
                one.properties,
                text.tag_code_of_properties(one.properties),
            )
            for one in some
        ]
        first = some[0].record
        try:
            self._append_batch(
                topic.name, queue_id, parts, first.sys_flag, first.born_time_ms, first.born_host,
                first.store_host,
            )  # fmt: skip
        except MessageIllegalError:
            return False
        _count(topic, len(parts), sum([len(body) + len(own) for _, body, own, _ in parts]))
        return True

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            log.warning("topic %s was deleted before an epoch was published: made anew", name)
            topic = self._topics.ensure(name, self._settings.broker.default_topic_queues)
        return topic

    def _queue_id(self, topic: Topic, stage: Stage) -> int:
        if stage.queue_id is not None:
            return stage.queue_id % max(topic.queues, 1)
        self._turn += 1
        return self._turn % max(topic.config.write_queues, 1)


def _draft(staged: Staged, queue_id: int, *, is_delayed: bool = True) -> MessageToStore:
    properties = text.parse_property_text(staged.properties.decode("utf-8", "replace"))
    if is_delayed:
        properties |= staged.stage.delay_properties()
    draft = staged.record.copy_to(staged.stage.topic, queue_id, properties)
    draft.reconsume_times = 0
    return draft


def _count(topic: Topic, count: int, size_bytes: int) -> None:
    topic.messages_in += count
    topic.bytes_in += size_bytes + count * topic.record_bytes
