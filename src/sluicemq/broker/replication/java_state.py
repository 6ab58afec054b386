"""The state of a Java master: its tables, each with a request of its own (spec/ha.md §3).

The answers are written to the files that a broker reads when it starts, in RocketMQ's format. A
table with a version is written when its version has changed. Consumer offsets are merged with those
that are known, as RocketMQ does, because the master does not say which offsets were deleted.

What no request asks for is not copied: filters of consumers, the order of ordered pops, access
rules. Nor does an answer say where the master's log ended. A table may therefore be ahead of the
log until more of the log arrives. A slave that becomes master limits offsets to the end of its own
queues.
"""

import asyncio
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

TICK_S: Final = 3.0
"""The pause between two rounds of requests, in seconds."""
WAIT_S: Final = 5.0
"""The timeout of a request, in seconds."""
CHECKPOINT_FIELDS_BYTES: Final = 56
"""The size of the timer checkpoint in an answer."""
MergeText = Callable[[str, str | None], str | None]
"""Returns the new text of a file, from an answer and the present text (None: there is no file).
None means that the file does not change."""


class TableRequest(NamedTuple):
    """A table of the master, and how it is copied.

    - `name` is the name of its file in the directory `config`.
    - `period_ticks` says how often it is requested: every TICK_S * `period_ticks` seconds.
    - `merge_text` makes the text of the file. None marks the timer checkpoint, whose
      CHECKPOINT_FIELDS_BYTES bytes are written in place.
    """

    code: RequestCode
    name: str
    period_ticks: int
    merge_text: MergeText | None


def _replace_other_version(decode: Callable[[str], Any], encode: Callable[[Any], str]) -> MergeText:
    """Return a function that chooses the new text of a file by the version of its table.

    The function gets the text of the master's answer and the present text of the file (None if
    there is no file). It returns the table of the answer, encoded for the file. It returns None if
    the file has a table of the same version, so need not be written. `decode` and `encode` convert
    a text to a table and back.
    """

    def merge(answer_text: str, file_text: str | None) -> str | None:
        received_table = decode(answer_text)
        if file_text is not None:
            present_table = decode(file_text)
            if present_table.data_version == received_table.data_version:
                return None
        return encode(received_table)

    return merge


def _unchanged_text(answer_text: str, file_text: str | None) -> str | None:
    """Return the text of an answer as it is, or None if the file has it already."""
    if answer_text == file_text:
        return None
    return answer_text


def _merge_offsets(answer_text: str, file_text: str | None) -> str | None:
    """Return the new text of the file `consumerOffset.json`, with the offsets of a master's answer.

    `answer_text` is the answer and `file_text` the present text of the file, or None if there is
    no file. All texts have the format of the file. For each topic and group in the answer, the
    offsets of the answer replace those of the file. Other offsets of the file are kept. Return None
    if no offset changes. Raises ValueError if a text is invalid.
    """
    received = tables.decode_consumer_offsets_file(answer_text)
    present = ConsumerOffsets()
    if file_text is not None:
        present = tables.decode_consumer_offsets_file(file_text)
    offsets = {**present.offsets, **received.offsets}
    if file_text is not None and offsets == present.offsets:
        return None
    merged = ConsumerOffsets(offsets, received.data_version, present.unknown)
    return tables.encode_consumer_offsets_file(merged)


def _convert_request_modes(answer_text: str, file_text: str | None) -> str | None:
    """Return the request modes of a master's answer in the format of the file.

    Return None if the file has this text already.
    """
    modes = tables.decode_request_modes(answer_text)
    return _unchanged_text(tables.encode_request_modes_file(modes), file_text)


TABLE_REQUESTS: Final = (
    TableRequest(
        RequestCode.GET_ALL_TOPIC_CONFIG,
        "topics.json",
        20,
        _replace_other_version(tables.decode_topic_table_file, tables.encode_topic_table_file),
    ),
    TableRequest(RequestCode.GET_ALL_CONSUMER_OFFSET, "consumerOffset.json", 2, _merge_offsets),
    TableRequest(RequestCode.GET_ALL_DELAY_OFFSET, "delayOffset.json", 2, _unchanged_text),
    TableRequest(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        "subscriptionGroup.json",
        20,
        _replace_other_version(tables.decode_group_table_file, tables.encode_group_table_file),
    ),
    TableRequest(
        RequestCode.GET_ALL_MESSAGE_REQUEST_MODE,
        "messageRequestMode.json",
        20,
        _convert_request_modes,
    ),
    TableRequest(RequestCode.GET_TIMER_METRICS, "timermetrics", 20, _unchanged_text),
    TableRequest(RequestCode.GET_TIMER_CHECK_POINT, "timercheck", 1, None),
)
"""All tables. Offsets are requested more often than by RocketMQ's slaves (once a minute), because a
slave that becomes master delivers again what was consumed since."""


class JavaStateReceiver:
    """Copies the tables of a Java broker to the directory `root`/config."""

    def __init__(
        self,
        files: Files,
        root: str,
        *,
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_changed: Callable[[set[str]], None] = lambda names: None,
        sign: Callable[[Command], Command] = lambda command: command,
    ) -> None:
        """Create the receiver, which writes the tables to `root`/config in `files`.

        - `in_executor` runs a blocking function on another thread.
        - `on_changed(names)` is called in the event loop with the names of the files that have
          changed, such as {"config/topics.json"}.
        - `sign` signs a request.
        """
        self._files = files
        self._directory = f"{root}/config"
        self._in_executor = in_executor
        self._on_changed = on_changed
        self._sign = sign
        self._unsupported: set[int] = set()

    async def follow(self, channel: Channel) -> None:
        """Copy the tables of the master at the other end of `channel` repeatedly, until an error.

        Each table is requested with its own period. A table that the master does not support is not
        requested again over this channel. Raises SluiceError or OSError.
        """
        self._unsupported.clear()
        tick = 0
        while True:
            for table in self._due_tables(tick):
                await self._copy_table(table, channel)
            tick += 1
            await asyncio.sleep(TICK_S)

    def _due_tables(self, tick: int) -> Iterator[TableRequest]:
        """Yield the tables to request in round `tick`, except those that are not supported."""
        for table in TABLE_REQUESTS:
            if tick % table.period_ticks == 0 and table.code not in self._unsupported:
                yield table

    async def _copy_table(self, table: TableRequest, channel: Channel) -> None:
        """Request one table from the master, and write its file if it has changed.

        Then `on_changed` is called with the name of the file. If the master does not support the
        table, it is added to `_unsupported`, so that it is not requested again over this channel.
        An empty answer changes nothing.

        Raises RequestError if the master answers with another error, ProtocolError if the answer is
        invalid, SluiceError if there is no answer, and OSError.
        """
        answer = await channel.call(self._sign(Command(table.code, {})), WAIT_S)
        # An older release does not know the request. A broker without timers answers the request
        # for the timer checkpoint with SYSTEM_ERROR.
        is_checkpoint = table.merge_text is None
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED or (
            answer.code == ResponseCode.SYSTEM_ERROR and is_checkpoint
        ):
            self._unsupported.add(table.code)
            return
        if answer.code != ResponseCode.SUCCESS:
            raise RequestError(answer.code, answer.remark or "", address=channel.address)
        body = bytes(answer.body)
        if body and await self._in_executor(lambda: self._write(table, body)):
            self._on_changed({f"config/{table.name}"})

    def _write(self, table: TableRequest, body: bytes) -> bool:
        """Write the table in `body`, a master's answer, to its file, and return whether it changed.

        If the file changes, its identity file is removed, which described the text that this broker
        wrote when it was master itself. Blocks. Raises OSError, and ProtocolError if the answer is
        invalid.
        """
        path = f"{self._directory}/{table.name}"
        if table.merge_text is None:
            return self._write_checkpoint(path, body)
        try:
            new_text = table.merge_text(body.decode(), read_text(self._files, path))
        except (UnicodeDecodeError, ValueError) as error:
            raise ProtocolError(f"The master sent an invalid {table.name}: {error}") from error
        if new_text is None:
            return False
        if self._files.exists(path + IDENTITY_SUFFIX):
            self._files.remove(path + IDENTITY_SUFFIX)
        replace_text(self._files, path, new_text)
        return True

    def _write_checkpoint(self, path: str, body: bytes) -> bool:
        """Overwrite the beginning of the timer checkpoint file, and return whether it has changed.

        `body` has the new fields. A missing file is created with its full size. The change is
        synced to disk. Raises ProtocolError if `body` has the wrong size, and OSError.
        """
        if len(body) != CHECKPOINT_FIELDS_BYTES:
            raise ProtocolError(
                f"The master sent a timer checkpoint of {len(body)} bytes; it must have "
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
