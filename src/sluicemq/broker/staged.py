"""Staged messages: reading them as they lie, and storing them where they were meant to go.

A sink that writes exactly once sends its rows to the staging topic first (docs/design/0007). Each
is an ordinary stored message whose first property says whose it is and where it belongs; the rest
of its properties, its body, flags, times and hosts are what will be published. Messages that follow
each other and go to the same place are appended as a batch.
"""

import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from sluicemq.broker import properties as text
from sluicemq.broker.intake import Draft, Intake, RefusalError
from sluicemq.broker.redelivery import Record, read_record
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import NOT_FOR_SENDS, Topic, Topics
from sluicemq.errors import MessageIllegalError, ProtocolError
from sluicemq.model.message import UNIQ_KEY
from sluicemq.model.topic import DEFAULT_TOPIC
from sluicemq.protocol.bodies.epochs import (
    STAGE_PROPERTY,
    STAGED_ID,
    STAGING_TOPIC,
    Owner,
    Stage,
    StagedRange,
    parse_stage,
)
from sluicemq.protocol.codes import ResponseCode
from sluicemq.record.codec import MAGIC_BLANK, RECORD_HEAD
from sluicemq.store.consumequeue import BLANK_SIZE, UNIT
from sluicemq.store.store import Store

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
            units = self._store.units(
                STAGING_TOPIC, one.queue_id, offset, min(end - offset, _CHUNK_UNITS)
            )
            if not len(units):
                return
            offset += len(units) // UNIT.size
            for position, size, _ in _unpack_units(bytes(units)):
                if not base <= position < view_end:
                    found = self._store.view_at(position)
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
        """Every message, one by one; raises RefusalError when a range is not what was staged."""
        for one in ranges:
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
        view = self._store.view_at(position)
        if view is not None and (
            len(view) < RECORD_HEAD.size or int.from_bytes(view[4:8], "big", signed=True)
            == MAGIC_BLANK
        ):  # fmt: skip
            position += file_bytes - position % file_bytes
            view = self._store.view_at(position)
        return position, None if view is None else read_record(view)


class Publisher:
    """Appends staged messages to their topics, within the turn."""

    def __init__(self, settings: Settings, topics: Topics, store: Store, intake: Intake) -> None:
        self._settings = settings
        self._topics = topics
        self._append_batch = store.append_batch
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
        for key, group in groupby(messages, key=_place):
            run = list(group)
            topic = self._topic(run[0].stage.topic)
            queue_id = self._queue_id(topic, run[0].stage.queue_id)
            if run[0].stage.delay is None and self._together(run, topic, queue_id, key[1:]):
                yield run[-1].ordinal + 1
                continue
            for staged in run:
                self._one(staged, topic, queue_id)
                yield staged.ordinal + 1

    def _together(
        self, run: list[Staged], topic: Topic, queue_id: int, rest: tuple[int, int, bytes, bytes]
    ) -> bool:
        """As one batch; False when they have to be taken one by one."""
        parts = [
            (
                staged.record.flag, staged.record.body, staged.properties,
                text.tag_code_of(staged.properties),
            )
            for staged in run
        ]  # fmt: skip
        try:
            self._append_batch(topic.name, queue_id, parts, *rest)
        except MessageIllegalError:
            return False
        self._count(topic, run)
        return True

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
        self._count(topic, (staged,))

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

    def _count(self, topic: Topic, run: Sequence[Staged]) -> None:
        topic.messages_in += len(run)
        topic.bytes_in += sum(len(one.record.body) + len(one.properties) for one in run)
        topic.bytes_in += len(run) * topic.record_bytes


def _stage(value: bytes) -> Stage | None:
    try:
        return parse_stage(value)
    except ProtocolError:
        return None


def _place(staged: Staged) -> tuple[Stage, int, int, bytes, bytes]:
    """Messages with the same are appended together."""
    record = staged.record
    return (
        staged.stage, record.sys_flag, record.born_time_ms, record.born_host, record.store_host
    )  # fmt: skip
