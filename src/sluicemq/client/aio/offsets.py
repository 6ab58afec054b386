"""Where the committed offsets of a group are stored: at the brokers, or in a local file.

A clustering group has one offset for each queue, at the queue's broker. A broadcasting group has
none there: each of its clients reads every queue and keeps its own offsets in a file. That file has
the format of the Java client, which keeps the previous version in `offsets.json.bak`:

    <directory>/<client>/<group>/offsets.json
    {"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}

The default directory is ~/.rocketmq_offsets, and `<client>` is `<address>@DEFAULT`. It contains no
process id, so that a restarted program finds its offsets, and a Python program can continue with
the file of a Java program.

The file `anchors.json` beside it is SluiceMQ's own; the Java client ignores it. It contains one
message of each queue that was read there (`core.identity`), so that a restarted program notices a
topic that was deleted and created again meanwhile:

    [{"brokerName":"b","queueId":0,"topic":"T","offset":4,"storeTime":1795363635210,"position":81}]

The files are read at first use, and written by `flush` every few seconds and by `close`. In
between, a lock file reserves them for one consumer; two consumers with one file would overwrite
each other's offsets. After a crash, messages whose offsets were not written are read again.
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

_log = logging.getLogger("sluicemq.client")
T = TypeVar("T")

OFFSETS_FILE_NAME: Final = "offsets.json"
ANCHORS_FILE_NAME: Final = "anchors.json"
LOCK_FILE_NAME: Final = "offsets.lock"
DIRECTORY_NAME: Final = ".rocketmq_offsets"
"""The default directory of the files, below the home directory of the user."""
DEFAULT_INSTANCE: Final = "DEFAULT"
"""The default of the second part of a client's name, after its address."""


def encode_local_offsets(offsets: Mapping[MessageQueue, int]) -> str:
    """Return the text of an offsets file, with tabs and line breaks like Java's fastjson."""
    members = ",".join(
        f'{{\n\t\t\t"brokerName":{_quote(queue.broker)},'
        f'\n\t\t\t"queueId":{queue.queue_id},'
        f'\n\t\t\t"topic":{_quote(queue.topic)}\n\t\t}}:{offset}'
        for queue, offset in sorted(offsets.items())
    )
    return f'{{\n\t"offsetTable":{{{members}\n\t}}\n}}'


def _quote(string: str) -> str:
    """Return `string` as a JSON string."""
    return fastjson.dumps(string).decode()


def decode_local_offsets(file_text: str) -> dict[MessageQueue, int]:
    """Return the offsets in the text of an offsets file.

        {"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}

    That is not JSON: Java's fastjson writes an object as the key of each offset. `fastjson.loads`
    returns such a key as a tuple of its (name, value) pairs. Raises ValueError for any other text,
    as `files.load_text` requires.
    """
    try:
        document = fastjson.loads(file_text)
    except ProtocolError as error:
        raise ValueError(error.fact) from error
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ValueError("it has no offsetTable")  # noqa: TRY004 - load_text requires it
    offsets: dict[MessageQueue, int] = {}
    for key, offset in table.items():
        try:
            fields = dict(key)
            queue = MessageQueue(fields["topic"], fields["brokerName"], int(fields["queueId"]))
            offsets[queue] = int(offset)
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"it has the invalid entry {key!r}: {offset!r}") from None
    return offsets


def encode_anchors(anchors: Mapping[MessageQueue, Anchor]) -> str:
    """Return the text of an anchors file: a JSON list with one object for each queue, sorted."""
    json_anchors = [
        {
            "brokerName": queue.broker,
            "queueId": queue.queue_id,
            "topic": queue.topic,
            "offset": anchor.offset,
            "storeTime": anchor.stored_ms,
            "position": anchor.position,
        }
        for queue, anchor in sorted(anchors.items())
    ]
    return fastjson.dumps(json_anchors).decode()


def decode_anchors(file_text: str) -> dict[MessageQueue, Anchor]:
    """Return queue -> anchor (a message by which the queue is recognised) from an anchors file.

    A missing "storeTime" or "position" becomes None. Raises ValueError, KeyError, TypeError or
    ProtocolError if the text is damaged; `files.load_text` expects these.
    """
    anchors = {}
    for fields in fastjson.loads(file_text):
        queue = MessageQueue(fields["topic"], fields["brokerName"], int(fields["queueId"]))
        offset = int(fields["offset"])
        anchors[queue] = Anchor(offset, fields.get("storeTime"), fields.get("position"))
    return anchors


class BrokerOffsets:
    """The offsets of one group at the brokers of the queues."""

    def __init__(self, shell: AsyncioShell, group: str) -> None:
        self._shell = shell
        self._group = group

    async def read(self, queue: MessageQueue, *, zero_if_young: bool = False) -> int | None:
        """Return the committed offset of the group in a queue, None if it has none.

        With `zero_if_young`, a broker whose queue has not lost a message yet may return 0 instead
        of None. Raises SluiceError if the request fails.
        """
        directory = self._shell.directory
        command = requests.offset_of_group(self._group, queue, zero_if_young=zero_if_young)
        address = await self._shell.run(directory.get_read_address(queue))
        response = await self._shell.send_request(Call(address, command))
        if response.code == QUERY_NOT_FOUND:
            return None
        offset = int_field(expect_success(response, address), "offset")
        return offset if offset >= 0 else None

    def anchors_of(self, queue: MessageQueue) -> tuple[Anchor, ...]:
        """Return no anchors: a broker only stores an offset."""
        return ()

    async def write(self, queue: MessageQueue, offset: int, anchor: Anchor | None = None) -> None:
        """Commit the offset of a queue.

        `anchor` is ignored. Raises SluiceError if the request fails.
        """
        command = requests.commit_offset(self._group, queue, offset)
        await self._shell.run(self._shell.directory.call(queue, command))

    async def flush(self) -> None:
        """Do nothing: the brokers have stored what they have confirmed."""

    async def close(self) -> None:
        """Do nothing: there are no open files."""


@dataclass(frozen=True, slots=True)
class OffsetFiles:
    """Where the broadcasting groups of one client keep their offsets.

    - `client`: the name of the client's subdirectory. It stays the same when the program restarts.
    - `directory`: the directory of all clients; None means `DIRECTORY_NAME` in the home directory.
    - `files`: the file system.
    - `uses_thread`: read and write on a thread, so that the event loop is not blocked.
    """

    client: str
    directory: str | None = None
    files: Files = SYSTEM_FILES
    uses_thread: bool = True

    def for_group(self, group: str) -> "LocalOffsets":
        """Return an object for the offsets of one group, which opens no file yet."""
        root = self.directory or str(Path.home() / DIRECTORY_NAME)
        return LocalOffsets(
            self.files, f"{root}/{self.client}/{group}", uses_thread=self.uses_thread
        )


class LocalOffsets:
    """The offsets of one broadcasting group in the files of one directory.

    No other consumer can use the files from the first `read` or `write` until `close`.
    """

    def __init__(self, files: Files, directory: str, *, uses_thread: bool = True) -> None:
        """Prepare the offsets in the folder `directory`, which is not read yet.

        With `uses_thread`, files are read and written on a thread, so that the event loop does not
        wait.
        """
        self._files = files
        self._directory = directory
        self._uses_thread = uses_thread
        self._table: dict[MessageQueue, int] | None = None
        self._anchors: dict[MessageQueue, Anchor] = {}
        self._is_dirty = False
        self._lock = asyncio.Lock()
        self._release_lock: Callable[[], None] = lambda: None

    async def _open(self) -> dict[MessageQueue, int]:
        """Return queue -> offset. The first call locks the directory and reads the files.

        Raises what `_load` raises.
        """
        async with self._lock:
            if self._table is None:
                await self._run_blocking(self._load)
            assert self._table is not None
            return self._table

    def _load(self) -> None:
        """Lock the directory of the offsets, and read its two files into memory.

        Raises ConfigurationError if another consumer uses the directory, and StoreDamagedError if
        the offsets file is damaged. The directory is then unlocked again.
        """
        self._files.make_directory(self._directory)
        try:
            self._release_lock = self._files.lock(f"{self._directory}/{LOCK_FILE_NAME}")
        except StoreLockedError as error:
            raise ConfigurationError(
                f"another broadcasting consumer keeps its offsets in {self._directory} "
                f"[{error.fact}]",
                fix="Use a different name for this client: Sluice(..., instance='second').",
            ) from error
        try:
            self._anchors = self._load_anchors()
            path = f"{self._directory}/{OFFSETS_FILE_NAME}"
            self._table = load_text(self._files, path, decode_local_offsets) or {}
        except BaseException:
            self._release_lock()
            raise

    def _load_anchors(self) -> dict[MessageQueue, Anchor]:
        """Return queue -> message by which the queue is recognised, from the anchors file.

        The result is {} if there is no file. A damaged file is logged and ignored, because the
        offsets are valid without it.
        """
        try:
            path = f"{self._directory}/{ANCHORS_FILE_NAME}"
            return load_text(self._files, path, decode_anchors) or {}
        except StoreDamagedError as error:
            _log.warning("ignoring the damaged file %s: %s", ANCHORS_FILE_NAME, error.fact)
            return {}

    async def read(self, queue: MessageQueue, *, zero_if_young: bool = False) -> int | None:
        """Return the offset of a queue, or None if there is none. `zero_if_young` is ignored.

        Raises ConfigurationError if another consumer uses the directory, and StoreDamagedError if
        the offsets file is damaged.
        """
        del zero_if_young  # only brokers have that rule
        return (await self._open()).get(queue)

    def anchors_of(self, queue: MessageQueue) -> tuple[Anchor, ...]:
        """Return the anchor that was stored with the offset of a queue, as a tuple of at most one.

        Call `read` first, which loads the file.
        """
        anchor = self._anchors.get(queue)
        return () if anchor is None else (anchor,)

    async def write(self, queue: MessageQueue, offset: int, anchor: Anchor | None = None) -> None:
        """Set the offset of a queue in memory, to be written by `flush` or `close`.

        `anchor` is a message by which the queue is recognised later; None removes the present one.
        Raises what `read` raises.
        """
        (await self._open())[queue] = offset
        self._anchors.pop(queue, None)
        if anchor is not None:
            self._anchors[queue] = anchor
        self._is_dirty = True

    async def flush(self) -> None:
        """Write the offsets file and the anchors file if an offset has changed since the last call.

        An OSError is logged, and the next call tries again.
        """
        async with self._lock:
            if self._table is None or not self._is_dirty:
                return
            self._is_dirty = False
            offsets_text = encode_local_offsets(self._table)
            anchors_text = encode_anchors(self._anchors)
            try:
                await self._run_blocking(lambda: self._write_files(offsets_text, anchors_text))
            except OSError as error:
                _log.warning(
                    "cannot write offsets to %s: %s. Retrying; free disk space or fix permissions.",
                    self._directory,
                    error,
                )

    def _write_files(self, offsets_text: str, anchors_text: str) -> None:
        """Replace the offsets file and the anchors file by these texts.

        After an OSError, which is raised, the next `flush` writes them again.
        """
        try:
            replace_text(self._files, f"{self._directory}/{OFFSETS_FILE_NAME}", offsets_text)
            replace_text(self._files, f"{self._directory}/{ANCHORS_FILE_NAME}", anchors_text)
        except OSError:
            self._is_dirty = True
            raise

    async def _run_blocking(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result, on a thread if `uses_thread` was given.

        A thread cannot be stopped, so a caller that is cancelled waits until `work` has ended.
        """
        if not self._uses_thread:
            return work()
        return await run_to_end(asyncio.to_thread(work))

    async def close(self) -> None:
        """Write both files if necessary, and unlock their directory."""
        try:
            await self.flush()
        finally:
            unlock = self._release_lock
            self._release_lock = lambda: None
            self._table = None
            with contextlib.suppress(OSError):
                unlock()


GroupOffsets = BrokerOffsets | LocalOffsets
"""The offsets of one group, at the brokers or in local files."""
