"""A disk that is really full: small file systems of the kernel under a broker process of its own.

Where mounting is not allowed these tests are skipped; tests/unit/store/test_store_retention.py
fills the disk of the file port instead. A process of its own, because a fault in a map (SIGBUS)
would end it: its exit code is part of what is looked at.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from simulation.stepped import pull_fields, send_fields
from sluicemq.net.channel import Channel, dial
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command
from waiting import limit

SIZE_MIB = 12
BODY_BYTES = 30_000
SERVICE_NOT_AVAILABLE = 14
CONF = """
mapedFileSizeCommitLog = 1048576
mapedFileSizeConsumeQueue = 20000
flushDiskType = SYNC_FLUSH
metricsExporterType = DISABLE
defaultTopicQueueNums = 1
cleanFileForciblyEnable = false
cleanResourceInterval = 200
flushConsumeQueueThoroughInterval = 300
"""


def run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 12 MiB, a quarter of it in the file `reserve`."""
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "tmpfs":
        mounted = run("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(place))
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(SIZE_MIB << 20)
        mounted = (
            run("which", "mkfs.ext4")
            and run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
            and run("mount", "-o", "loop", str(image), str(place))
        )
    if not mounted:
        pytest.skip(f"{request.param} cannot be mounted here")
    (place / "reserve").write_bytes(os.urandom(SIZE_MIB << 18))
    try:
        yield place
    finally:
        assert run("umount", str(place)), "something still uses the disk"


class Process:
    """`sluice broker` on a store."""

    def __init__(self, disk: Path, directory: Path) -> None:
        config = directory / "broker.conf"
        config.write_text(CONF)
        self.log = directory / "log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sluicemq", "broker", "-c", str(config), "--host",
                 "127.0.0.1", "--port", "0", "--store", str(disk / "store")],
                stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.address = line.partition("broker=")[2].partition(" ")[0] if line else ""

    def end(self, number: signal.Signals) -> int:
        if self._process.poll() is None:
            self._process.send_signal(number)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait(limit(20))


@contextlib.asynccontextmanager
async def connected(process: Process) -> AsyncIterator[Channel]:
    assert process.address, process.log.read_text()
    channel = await dial(process.address)
    try:
        yield channel
    finally:
        await channel.close()


async def call(
    channel: Channel, code: int, fields: dict[str, object], body: bytes = b""
) -> Command:
    return await channel.call(
        Command(code, {name: str(value) for name, value in fields.items()}, body), 10
    )


def body_of(number: int) -> bytes:
    return b"%06d" % number + os.urandom(BODY_BYTES)


async def send(channel: Channel, body: bytes) -> Command:
    return await call(channel, 310, send_fields(d=1), body)


async def stored(channel: Channel) -> list[bytes]:
    """The bodies that a reader finds, from the first one there is."""
    found: list[bytes] = []
    offset = 0
    while True:
        answer = await call(channel, 11, pull_fields(offset=offset, sysFlag=4))
        assert answer.fields is not None
        if answer.code not in (0, 20, 21):
            return found
        found += [record.body for record in decode_records(answer.body)]
        offset = int(answer.fields["nextBeginOffset"])


async def fill(channel: Channel, accepted: list[bytes]) -> str:
    """Sends until it is refused; returns the refusal."""
    for number in range(len(accepted), len(accepted) + 5000):
        body = body_of(number)
        answer = await send(channel, body)
        if answer.code:
            assert answer.code == SERVICE_NOT_AVAILABLE, answer.remark
            return answer.remark or ""
        accepted.append(body)
    raise AssertionError("never full")


def ballast(disk: Path) -> None:
    """Takes the rest of the disk, to the last block."""
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def make_room(disk: Path) -> None:
    """The operator finds something that is not needed."""
    (disk / "ballast").unlink()
    (disk / "reserve").unlink()


async def accepting(channel: Channel, body: bytes) -> None:
    """Sends until it is taken: the disk is looked at every second while sends are refused."""
    async with asyncio.timeout(limit(10)):
        while (await send(channel, body)).code:
            await asyncio.sleep(0.1)


async def test_full_disk_refuses_clearly_keeps_what_it_took_and_serves_again(
    disk: Path, tmp_path: Path
) -> None:
    process = Process(disk, tmp_path)
    accepted: list[bytes] = []
    try:
        async with connected(process) as channel:
            refusal = await fill(channel, accepted)
            assert str(disk) in refusal
            assert "are used" in refusal
            assert "free" in refusal
            ballast(disk)
            for _ in range(5):
                assert (await send(channel, body_of(0))).code == SERVICE_NOT_AVAILABLE
            assert await stored(channel) == accepted
            await asyncio.sleep(1.5)  # timers come by: queues, checkpoint, a look at the disk
            assert (await send(channel, body_of(0))).code == SERVICE_NOT_AVAILABLE
            assert await stored(channel) == accepted
            make_room(disk)
            body = body_of(len(accepted))
            await accepting(channel, body)
            accepted.append(body)
            assert await stored(channel) == accepted
    finally:
        assert process.end(signal.SIGTERM) == 0, process.log.read_text()


async def test_kill_on_a_full_disk_loses_nothing_that_was_acknowledged(
    disk: Path, tmp_path: Path
) -> None:
    process = Process(disk, tmp_path)
    accepted: list[bytes] = []
    try:
        async with connected(process) as channel:
            await fill(channel, accepted)
            ballast(disk)
    finally:
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    process = Process(disk, tmp_path)  # on the full disk: it serves readers, or says why not
    if process.address:
        async with connected(process) as channel:
            assert await stored(channel) == accepted
            assert (await send(channel, body_of(0))).code == SERVICE_NOT_AVAILABLE
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    else:
        assert process.end(signal.SIGKILL) == 1, process.log.read_text()
        assert "No space left" in process.log.read_text()
    make_room(disk)
    process = Process(disk, tmp_path)
    try:
        async with connected(process) as channel:
            assert await stored(channel) == accepted
            await accepting(channel, b"again")
    finally:
        assert process.end(signal.SIGTERM) == 0, process.log.read_text()
