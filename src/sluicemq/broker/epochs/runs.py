"""Staged messages on their way into their topics, many at a time.

What a task stages is nearly always alike: one topic, no delay, batch after batch of the same time.
Such messages are taken from the log in one loop that makes no object for each: the tag code is the
one of the staging queue's unit, and the properties lose one beginning and get another. Where a
message is not like that the loop ends, and the careful reader (`staged.StagedReader.messages`) has
its turn. Where many are alike they stay columns (`staged_columns`): bodies, CRCs and most of the
numbers go as they are.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.model.message import UNIQ_KEY
from sluicemq.record.codec import Buffer
from sluicemq.record.layout import HOST_BITS, MAGIC_V1, RECORD_HEAD
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.writer import Part
from sluicemq.wire.staging import (
    STAGE_PROPERTY,
    STAGED_ID,
    STAGING_TOPIC,
    Owner,
    Stage,
    StagedRange,
    parse_stage,
)

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import Columns

_UNITS: Final = 2048
COLUMNS_MIN: Final = 32
"""Fewer messages are taken one by one."""
_HEAD_BYTES: Final = RECORD_HEAD.size
_STAGED_ID: Final = f"{STAGED_ID}\x01".encode()
_ID: Final = f"{UNIQ_KEY}\x01".encode()
_STAGE: Final = f"{STAGE_PROPERTY}\x01".encode()
_unpack_units: Final = UNIT.iter_unpack
_unpack_head: Final = RECORD_HEAD.only(
    "magic", "flag", "sys_flag", "born_time", "born_host", "store_host", "body_length"
).unpack_from


class Run(NamedTuple):
    """Messages that are appended together: one place, the same flags, time and hosts; as columns,
    whose heads say their times, or as parts."""

    stage: Stage
    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_host: bytes
    parts: list[Part]
    columns: "Columns | None" = None

    def __len__(self) -> int:
        return len(self.parts if self.columns is None else self.columns.bodies)

    def each(self) -> "Iterator[Run]":
        """Runs without columns: parts with the same time."""
        if self.columns is None:
            yield self
            return
        numbered = zip(self.columns.heads["born_time"].tolist(), self.columns.parts(), strict=True)
        for born_ms, group in groupby(numbered, key=itemgetter(0)):
            parts = [part for _, part in group]
            yield self._replace(born_time_ms=born_ms, parts=parts, columns=None)


class RunReader:
    """Takes so many messages of an epoch and no more."""

    def __init__(
        self, store: Store, owner: tuple[str, int], count_max: int, bytes_max: int
    ) -> None:
        self._store = store
        self._owner = owner
        self._count_left = count_max
        self._bytes_left = bytes_max
        self._runs: list[Run] = []

    def take(self, ranges: Iterable[StagedRange], first: int) -> list[Run]:
        """The messages from ordinal `first` on, as long as they are alike; none when that one is
        not."""
        index = 0
        for one in ranges:
            skipped = min(max(first - index, 0), one.count)
            index += one.count
            if skipped < one.count and not self._take_range(one, one.offset + skipped):
                break
        return self._runs

    def _take_range(self, one: StagedRange, offset: int) -> bool:
        """True when all of it was taken."""
        owner, end = Owner(*self._owner, one.partition, one.attempt), one.offset + one.count
        while offset < end:
            count = min(end - offset, _UNITS, self._count_left)
            units = self._store.reader.units(STAGING_TOPIC, one.queue_id, offset, count)
            taken = self._take_columns(units, owner) or self._take_units(units, owner)
            self._count_left -= taken
            offset += taken
            if not taken or (not self._count_left and offset < end):
                return False
        return True

    def _take_columns(self, units: Buffer, owner: Owner) -> int:
        """How many of the first were alike, lie in one file and had room; 0 when few. HOT."""
        if len(units) < COLUMNS_MIN * UNIT.size or not self._store.writer.takes_columns:
            return 0
        from sluicemq.broker.epochs import columns as staged_columns  # noqa: PLC0415 - NumPy for many only

        fitting, ends = staged_columns.fitting(units, self._bytes_left)
        base = int(fitting["position"][0]) if len(fitting) else 0
        view = self._store.reader.view_at(base) or memoryview(b"")
        count = int(ends.searchsorted(base + len(view), "right"))  # they rise
        if count < COLUMNS_MIN:
            return 0
        found = staged_columns.Found(fitting[:count], view, base)
        begin = _start(found.first_properties(), owner)
        head = found.heads[0]
        if begin is None or not _is_plain(int(head["magic"]), int(head["sys_flag"])):
            return 0
        stage, start = begin
        count = found.alike(start)
        if count < COLUMNS_MIN:
            return 0
        columns = found.columns(count, len(start), _ID)
        hosts = bytes(head["born_host"]), bytes(head["store_host"])
        run = Run(stage, int(head["sys_flag"]), int(head["born_time"]), *hosts, [], columns)
        self._runs.append(run)
        self._bytes_left -= int(ends[count - 1]) - base
        return count

    def _take_units(self, units: Buffer, owner: Owner) -> int:
        """How many were alike and had room. HOT."""
        view, base, view_end = memoryview(b""), 0, 0
        run: Run | None = None
        start, start_bytes = b"", 0
        left, taken = self._bytes_left, 0
        for position, size, tag_code in _unpack_units(units):
            left -= size
            if left < 0 and (taken or self._runs):
                break
            if not base <= position < view_end:
                view, base = self._store.reader.view_at(position) or memoryview(b""), position
                view_end = position + len(view)
            at = position - base
            if size == BLANK_SIZE or at + size > len(view):
                break
            magic, flag, sys_flag, born_ms, born, host, body_bytes = _unpack_head(view, at)
            body_end = at + _HEAD_BYTES + body_bytes
            properties = bytes(view[body_end + 3 + view[body_end] : at + size])
            if (
                run is None or magic != MAGIC_V1
                or born_ms != run.born_time_ms or sys_flag != run.sys_flag
                or born != run.born_host or host != run.store_host
                or not properties.startswith(start)
            ):  # fmt: skip
                found = _start(properties, owner) if _is_plain(magic, sys_flag) else None
                if found is None:
                    break
                start, start_bytes = found[1], len(found[1])
                run = Run(found[0], sys_flag, born_ms, born, host, [])
                self._runs.append(run)
            body = view[at + _HEAD_BYTES : body_end]
            run.parts.append((flag, body, _ID + properties[start_bytes:], tag_code))
            taken += 1
        self._bytes_left = left
        return taken


def _is_plain(magic: int, sys_flag: int) -> bool:
    return magic == MAGIC_V1 and not sys_flag & HOST_BITS


def _start(properties: bytes, owner: Owner) -> tuple[Stage, bytes] | None:
    """The stage of a message of this owner, and all that comes off before its id; None for a
    delayed one, or another's."""
    end = properties.find(b"\x02") + 1
    if not properties.startswith(_STAGE) or not properties.startswith(_STAGED_ID, end):
        return None
    try:
        stage = parse_stage(properties[len(_STAGE) : end - 1])
    except ProtocolError:
        return None
    if stage.owner != owner or stage.delay is not None:
        return None
    return stage, properties[: end + len(_STAGED_ID)]
