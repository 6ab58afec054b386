"""Where the offsets of a group are kept: at the brokers, or in a file of this client.

A clustering group has one offset for each queue, at the queue's broker. Each client of a
broadcasting group reads every queue and keeps its own offsets in a file, in the form of the Java
client's:

    <directory>/<client>/<group>/offsets.json      and the edition before it in offsets.json.bak
    {"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}

The directory is ~/.rocketmq_offsets, the client `<address>@DEFAULT`: no process number in it, so
that a program that starts again finds its offsets, and a Java program's file is taken over.

Beside it lies `anchors.json`, in a form of our own, which Java's client does not read. For each
queue it holds a message that was read there (`core.identity`), so that a program that starts again
notices a topic that was deleted and created meanwhile:

    [{"brokerName":"b","queueId":0,"topic":"T","offset":4,"storeTime":1795363635210,"position":81}]

The files are read at the first use, written by `flush` every few seconds and at close, and belong
to one consumer in the meantime: two with one file would take turns in forgetting what the other has
read. A crash repeats what was not written.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import AsyncioShell, Call
from sluicemq.client.core.identity import Anchor
from sluicemq.client.core.requests import QUERY_NOT_FOUND, expect_success, int_field
from sluicemq.client.tasks import run_to_end
from sluicemq.errors import ConfigurationError, ProtocolError, StoreDamagedError, StoreLockedError
from sluicemq.files import SYSTEM_FILES, Files, load_text, replace_text
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import fastjson

OFFSETS_FILE_NAME: Final = "offsets.json"
ANCHORS_FILE_NAME: Final = "anchors.json"
LOCK_FILE_NAME: Final = "offsets.lock"
DIRECTORY_NAME: Final = ".rocketmq_offsets"
DEFAULT_INSTANCE: Final = "DEFAULT"


def encode_local_offsets(offsets: Mapping[MessageQueue, int]) -> str:
    """The file's text, with tabs and breaks where Java's fastjson has them."""
    entries = ",".join(
        f'{{\n\t\t\t"brokerName":{_quote(queue.broker)},'
        f'\n\t\t\t"queueId":{queue.queue_id},'
        f'\n\t\t\t"topic":{_quote(queue.topic)}\n\t\t}}:{offset}'
        for queue, offset in sorted(offsets.items())
    )
    return f'{{\n\t"offsetTable":{{{entries}\n\t}}\n}}'


def _quote(text: str) -> str:
    return fastjson.dumps(text).decode()


def decode_local_offsets(text: str) -> dict[MessageQueue, int]:
    """Raises ValueError when it is another thing, as `files.load_text` wants it."""
    try:
        value = fastjson.loads(text)
    except ProtocolError as error:
        raise ValueError(error.fact) from error
    table = value.get("offsetTable") if isinstance(value, dict) else None
    if not isinstance(table, dict):
        raise ValueError("it has no offsetTable")  # noqa: TRY004 - what load_text wants
    found: dict[MessageQueue, int] = {}
    for key, offset in table.items():
        try:
            parts = dict(key)
            queue = MessageQueue(parts["topic"], parts["brokerName"], int(parts["queueId"]))
            found[queue] = int(offset)
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"it has the strange entry {key!r}: {offset!r}") from None
    return found


def encode_anchors(anchors: Mapping[MessageQueue, Anchor]) -> str:
    """Render the file of anchors, sorted by queue."""
    return fastjson.dumps([
        {
            "brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic,
            "offset": anchor.offset, "storeTime": anchor.stored_ms, "position": anchor.position,
        }
        for queue, anchor in sorted(anchors.items())
    ]).decode()  # fmt: skip


def decode_anchors(text: str) -> dict[MessageQueue, Anchor]:
    """Read the file of anchors, in which a null is left out. Raises ValueError, KeyError, TypeError
    or ProtocolError for another thing, as `files.load_text` wants it."""
    return {
        MessageQueue(item["topic"], item["brokerName"], int(item["queueId"])): Anchor(
            int(item["offset"]), item.get("storeTime"), item.get("position")
        )
        for item in fastjson.loads(text)
    }


_log = logging.getLogger("sluicemq.client")
T = TypeVar("T")


class BrokerOffsets:
    """Reads and writes the offsets of one group, at the brokers of the queues."""

    def __init__(self, shell: AsyncioShell, group: str) -> None:
        self._shell = shell
        self._group = group

    async def read(self, queue: MessageQueue, *, zero_if_young: bool = False) -> int | None:
        """None when there is none. Raises SluiceError."""
        directory = self._shell.directory
        command = requests.offset_of_group(self._group, queue, zero_if_young=zero_if_young)
        address = await self._shell.run(directory.get_read_address(queue))
        response = await self._shell.send_request(Call(address, command))
        if response.code == QUERY_NOT_FOUND:
            return None
        offset = int_field(expect_success(response, address), "offset")
        return offset if offset >= 0 else None

    def anchors_of(self, queue: MessageQueue) -> tuple[Anchor, ...]:
        """None: a broker keeps an offset and nothing else."""
        return ()

    async def write(self, queue: MessageQueue, offset: int, anchor: Anchor | None = None) -> None:
        """Raises SluiceError."""
        command = requests.commit_offset(self._group, queue, offset)
        await self._shell.run(self._shell.directory.call(queue, command))

    async def flush(self) -> None:
        """What was written is safe now: a broker has what it has answered."""

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class OffsetFiles:
    """Where broadcasting groups of one client have their files. `client` is a name that stays when
    the program starts again; `in_thread`: writing blocks a thread of its own, not the loop."""

    client: str
    directory: str | None = None
    files: Files = SYSTEM_FILES
    uses_thread: bool = True

    def for_group(self, group: str) -> "LocalOffsets":
        """The offsets of one group."""
        root = self.directory or str(Path.home() / DIRECTORY_NAME)
        return LocalOffsets(
            self.files, f"{root}/{self.client}/{group}", uses_thread=self.uses_thread
        )


class LocalOffsets:
    """In a file that only this consumer has, from the first use until `close`."""

    def __init__(self, files: Files, directory: str, *, uses_thread: bool = True) -> None:
        self._files = files
        self._directory = directory
        self._in_thread = uses_thread
        self._table: dict[MessageQueue, int] | None = None
        self._anchors: dict[MessageQueue, Anchor] = {}
        self._is_dirty = False
        self._lock = asyncio.Lock()
        self._release_lock: Callable[[], None] = lambda: None

    async def _open(self) -> dict[MessageQueue, int]:
        async with self._lock:
            if self._table is None:
                await self._run_blocking(self._load)
            assert self._table is not None
            return self._table

    def _load(self) -> None:
        """Raises ConfigurationError when another consumer has the file, StoreDamagedError."""
        self._files.make_directory(self._directory)
        try:
            self._release_lock = self._files.lock(f"{self._directory}/{LOCK_FILE_NAME}")
        except StoreLockedError as error:
            raise ConfigurationError(
                f"another broadcasting consumer keeps its offsets in {self._directory} "
                f"[{error.fact}]",
                fix="Give this client a name of its own: Sluice(..., instance='second').",
            ) from error
        try:
            self._anchors = self._load_anchors()
            path = f"{self._directory}/{OFFSETS_FILE_NAME}"
            self._table = load_text(self._files, path, decode_local_offsets) or {}
        except BaseException:
            self._release_lock()
            raise

    def _load_anchors(self) -> dict[MessageQueue, Anchor]:
        """Anchors help to notice what is rare: a damaged file of them is no reason not to read."""
        try:
            path = f"{self._directory}/{ANCHORS_FILE_NAME}"
            return load_text(self._files, path, decode_anchors) or {}
        except StoreDamagedError as error:
            _log.warning("%s is ignored: %s", ANCHORS_FILE_NAME, error.fact)
            return {}

    async def read(self, queue: MessageQueue, *, zero_if_young: bool = False) -> int | None:
        del zero_if_young  # a broker's rule
        return (await self._open()).get(queue)

    def anchors_of(self, queue: MessageQueue) -> tuple[Anchor, ...]:
        """The message of the queue that was noted with its offset, once `read` has returned."""
        anchor = self._anchors.get(queue)
        return () if anchor is None else (anchor,)

    async def write(self, queue: MessageQueue, offset: int, anchor: Anchor | None = None) -> None:
        """Note the offset, and a message of the queue by which it is known again."""
        (await self._open())[queue] = offset
        self._anchors.pop(queue, None)
        if anchor is not None:
            self._anchors[queue] = anchor
        self._is_dirty = True

    async def flush(self) -> None:
        async with self._lock:
            if self._table is None or not self._is_dirty:
                return
            self._is_dirty = False
            text, anchors = encode_local_offsets(self._table), encode_anchors(self._anchors)
            try:
                await self._run_blocking(lambda: self._write(text, anchors))
            except OSError as error:
                _log.warning(
                    "offsets cannot be written to %s, will try again: %s", self._directory, error
                )

    def _write(self, offsets: str, anchors: str) -> None:
        """Write both files. Raises OSError, and then the next flush writes them again."""
        try:
            replace_text(self._files, f"{self._directory}/{OFFSETS_FILE_NAME}", offsets)
            replace_text(self._files, f"{self._directory}/{ANCHORS_FILE_NAME}", anchors)
        except OSError:
            self._is_dirty = True
            raise

    async def _run_blocking(self, work: Callable[[], T]) -> T:
        """Run `work`, which a thread cannot be kept from ending: a caller that is cancelled waits
        for it."""
        return await run_to_end(asyncio.to_thread(work)) if self._in_thread else work()

    async def close(self) -> None:
        try:
            await self.flush()
        finally:
            unlock, self._release_lock = self._release_lock, lambda: None
            self._table = None
            with contextlib.suppress(OSError):
                unlock()


GroupOffsets = BrokerOffsets | LocalOffsets
