"""State from a master that is RocketMQ's: its tables, one request each (spec/ha.md §3).

They go into the files that a restart reads, in RocketMQ's form. A table with a version is written
when that has changed; consumer offsets are merged with what is known, as RocketMQ does: the master
does not say which are gone. What no request asks for is not mirrored: filters of consumers, the
order of orderly pops, access rules. Nor does an answer say how far the log was, so what comes may
be ahead of it until the next bytes are there; who becomes master cuts offsets to its own end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError, RequestError
from sluicemq.files import Files, read_text, replace_text
from sluicemq.files.identity import IDENTITY_SUFFIX
from sluicemq.net.channel import Channel
from sluicemq.store.timers.files import CHECKPOINT_BYTES
from sluicemq.wire import tables
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.tables import ConsumerOffsets

log = logging.getLogger(__name__)

TICK_S: Final = 3.0
WAIT_S: Final = 5.0
CHECKPOINT_FIELDS_BYTES: Final = 56
Make = Callable[[str, str | None], str | None]


class Row(NamedTuple):
    """A table: how it is asked for, its file, every how many ticks, and what makes the text of the
    file (None: it stays) of an answer and the text that is there. `make` None: 56 bytes that are
    written in place."""

    code: RequestCode
    name: str
    ticks: int
    make: Make | None


def _when_newer(decode: Callable[[str], Any], encode: Callable[[Any], str]) -> Make:
    def make(new: str, old: str | None) -> str | None:
        table = decode(new)
        if old is not None and decode(old).data_version == table.data_version:
            return None
        return encode(table)

    return make


def _as_it_is(new: str, old: str | None) -> str | None:
    return new if new != old else None


def _merged(new: str, old: str | None) -> str | None:
    found = tables.decode_consumer_offsets_file(new)
    known = tables.decode_consumer_offsets_file(old) if old is not None else ConsumerOffsets()
    offsets = {**known.offsets, **found.offsets}
    if old is not None and offsets == known.offsets:
        return None
    merged = ConsumerOffsets(offsets, found.data_version, known.unknown)
    return tables.encode_consumer_offsets_file(merged)


def _modes(new: str, old: str | None) -> str | None:
    return _as_it_is(tables.encode_request_modes_file(tables.decode_request_modes(new)), old)


ROWS: Final = (
    Row(
        RequestCode.GET_ALL_TOPIC_CONFIG, "topics.json", 20,
        _when_newer(tables.decode_topic_table_file, tables.encode_topic_table_file),
    ),
    Row(RequestCode.GET_ALL_CONSUMER_OFFSET, "consumerOffset.json", 2, _merged),
    Row(RequestCode.GET_ALL_DELAY_OFFSET, "delayOffset.json", 2, _as_it_is),
    Row(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroup.json", 20,
        _when_newer(tables.decode_group_table_file, tables.encode_group_table_file),
    ),
    Row(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, "messageRequestMode.json", 20, _modes),
    Row(RequestCode.GET_TIMER_METRICS, "timermetrics", 20, _as_it_is),
    Row(RequestCode.GET_TIMER_CHECK_POINT, "timercheck", 1, None),
)  # fmt: skip
"""Offsets are asked for more often than RocketMQ's slaves do (once a minute): who becomes master
gives out again what was consumed since."""


class JavaState:
    """Follows the tables of a Java broker, into `root/config`."""

    def __init__(
        self,
        files: Files,
        root: str,
        *,
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_changed: Callable[[set[str]], None] = lambda names: None,
        signed: Callable[[Command], Command] = lambda command: command,
    ) -> None:
        self._files, self._directory = files, f"{root}/config"
        self._in_executor, self._on_changed, self._signed = in_executor, on_changed, signed
        self._refused: set[int] = set()

    async def follow(self, channel: Channel) -> None:
        """Until the connection breaks: raises SluiceError or OSError."""
        self._refused.clear()
        tick = 0
        while True:
            for row in self._due(tick):
                await self._take(row, channel)
            tick += 1
            await asyncio.sleep(TICK_S)

    def _due(self, tick: int) -> Iterator[Row]:
        yield from (row for row in ROWS if tick % row.ticks == 0 and row.code not in self._refused)

    async def _take(self, row: Row, channel: Channel) -> None:
        answer = await channel.call(self._signed(Command(row.code, {})), WAIT_S)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED or (
            answer.code == ResponseCode.SYSTEM_ERROR and row.make is None
        ):
            self._refused.add(row.code)  # an older release, or one without timers
            return
        if answer.code != ResponseCode.SUCCESS:
            raise RequestError(answer.code, answer.remark or "", address=channel.address)
        body = bytes(answer.body)
        if body and await self._in_executor(lambda: self._write(row, body)):
            self._on_changed({f"config/{row.name}"})

    def _write(self, row: Row, body: bytes) -> bool:
        """Blocking. Did something change? Raises OSError, ProtocolError."""
        path = f"{self._directory}/{row.name}"
        if row.make is None:
            return self._write_in_place(path, body)
        try:
            text = row.make(body.decode(), read_text(self._files, path))
        except (UnicodeDecodeError, ValueError) as error:
            raise ProtocolError(f"{row.name} of the master: {error}") from error
        if text is None:
            return False
        if self._files.exists(path + IDENTITY_SUFFIX):  # of an earlier term as master
            self._files.remove(path + IDENTITY_SUFFIX)
        replace_text(self._files, path, text)
        return True

    def _write_in_place(self, path: str, body: bytes) -> bool:
        """The numbers of the timer."""
        if len(body) != CHECKPOINT_FIELDS_BYTES:
            raise ProtocolError(
                f"the timer's checkpoint of the master has {len(body)} bytes and not "
                f"{CHECKPOINT_FIELDS_BYTES}."
            )
        self._files.make_directory(self._directory)
        is_new = not self._files.exists(path)
        with closing(self._files.open(path, create=True)) as file:
            if file.size() < CHECKPOINT_BYTES:
                file.truncate(CHECKPOINT_BYTES)
            if file.pread(len(body), 0) == body:
                return False
            file.pwrite(body, 0)
            file.sync()
        if is_new:
            self._files.sync_directory(self._directory)
        return True
