"""kill -9 with ten thousand messages pending: after a restart each of them comes, none too early.

The real process over the real disk. Half of the messages have a level, half a time; the process is
killed while some are being delivered and started again.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.stepped import pull_fields, send_fields
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command
from waiting import limit, slowness

PENDING = 10_000
WINDOW = 200
WAIT_S = 60.0
LEVEL_S = 10  # level 3


class Server:
    """`sluice up` as a process of its own."""

    def __init__(self, directory: Path) -> None:
        config = directory / "broker.conf"
        config.write_text("brokerName=broker-a\nmetricsExporterType=DISABLE\n")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port",
             "0", "--store", str(directory / "store"), "-c", str(config)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line
        self.address = dict(part.split("=", 1) for part in line.split()[1:])["broker"]

    def stop(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(limit(20))
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def call(channel: BlockingChannel, code: int, fields: dict[str, object], body: bytes) -> Command:
    return Command(code, {name: str(value) for name, value in fields.items()}, body)


def send_all(address: str, due_ms: int) -> dict[bytes, int]:
    """Bodies and when they are due: half at a level, half at one of 3,000 ms from `due_ms` on."""
    channel = BlockingChannel(address, 10.0)
    due: dict[bytes, int] = {}
    waiting = 0
    for number in range(PENDING):
        at_ms = due_ms + number * 3000 // PENDING
        text = "DELAY\x013\x02" if number % 2 else f"TIMER_DELIVER_MS\x01{at_ms}\x02"
        fields = send_fields("T", f"UNIQ_KEY\x01A{number}\x02{text}")
        body = b"%d" % number
        due[body] = at_ms if number % 2 == 0 else round(time.time() * 1000) + LEVEL_S * 1000
        channel.send(call(channel, 310, fields, body))
        waiting += 1
        if waiting == WINDOW:
            assert all(channel.receive().code == 0 for _ in range(waiting))
            waiting = 0
    assert all(channel.receive().code == 0 for _ in range(waiting))
    channel.close()
    return due


def delivered(address: str) -> dict[bytes, int]:
    """Body -> when it was stored in its topic, the first time."""
    channel = BlockingChannel(address, 10.0)
    found: dict[bytes, int] = {}
    offset = 0
    while True:
        fields = pull_fields("T", offset, maxMsgNums=10_000, maxMsgBytes=8 << 20, sluiceBulk="true")
        answer = channel.call(call(channel, 11, fields, b""))
        if answer.code != 0:
            channel.close()
            return found
        records = decode_records(answer.body)
        for record in records:
            found.setdefault(record.body, record.store_time_ms)
        offset = records[-1].queue_offset + 1


@pytest.mark.parametrize("phase_s", [-2.0, 1.5])
def test_ten_thousand_pending_survive_a_kill(
    tmp_path: Path, servers: list[Server], phase_s: float
) -> None:
    """`phase_s`: how long after the first one is due the process is killed."""
    servers.append(Server(tmp_path))
    due_ms = round(time.time() * 1000) + 8000
    due = send_all(servers[0].address, due_ms)
    time.sleep(max(due_ms / 1000 + phase_s - time.time(), 0))
    servers[0].stop(signal.SIGKILL)
    servers.append(Server(tmp_path))
    end = time.monotonic() + limit(WAIT_S)
    while len(found := delivered(servers[1].address)) < PENDING and time.monotonic() < end:
        time.sleep(0.2)
    missing = due.keys() - found.keys()
    assert not missing, f"{len(missing)} of {PENDING} are lost"
    # A level counts from the store time: that of the broker's turn, which on a busy machine may
    # have begun a moment before the request was made.
    turn_ms = 1 + 20 * (slowness() - 1)
    early = [body for body, at_ms in found.items() if at_ms < due[body] - turn_ms]
    assert not early, f"{len(early)} came too early"
    servers[1].stop(signal.SIGTERM)
    state = (tmp_path / "store" / "timerwheel").stat()
    assert state.st_size == 38_707_200
    assert state.st_blocks * 512 < 4_000_000, "the wheel is sparse"
