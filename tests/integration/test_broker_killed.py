"""kill -9 of the real process during sends: every acknowledged message is there, in order.

Each seed starts `python -m sluicemq up` on one store, sends over two connections, kills the process
at a random moment, starts it again and reads all queues back.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.stepped import pull_fields, send_fields
from sluicemq.errors import SluiceError
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command
from waiting import limit

SEEDS = 20
QUEUES = 2
WINDOW = 16
CONFIGURATION = """
brokerName=broker-a
mappedFileSizeCommitLog=1048576
metricsExporterType=DISABLE
flushDiskType={flush}
"""


class Server:
    """`sluice up` as a process of its own."""

    def __init__(self, directory: Path, flush: str) -> None:
        config = directory / "broker.conf"
        config.write_text(CONFIGURATION.format(flush=flush))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port",
             "0", "--store", str(directory / "store"), "-c", str(config)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line
        parts = dict(part.split("=", 1) for part in line.split()[1:])
        self.address = parts["broker"]

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(limit(20))
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    servers: list[Server] = []

    def started(flush: str) -> Server:
        servers.append(Server(tmp_path, flush))
        return servers[-1]

    yield started
    for server in servers:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def request(code: int, fields: dict[str, object], body: bytes = b"") -> Command:
    texts = {name: str(value) for name, value in fields.items()}
    return Command(code, texts, body)


class Sender(threading.Thread):
    """Sends numbered messages to one queue, a window of them at a time, until the server dies."""

    def __init__(self, address: str, queue_id: int, first: int) -> None:
        super().__init__()
        self._address = address
        self._queue_id = queue_id
        self._next = first
        self.acknowledged: list[tuple[int, bytes]] = []

    def run(self) -> None:
        channel = BlockingChannel(self._address, 10.0)
        try:
            while True:
                bodies = [b"%d" % (self._next + index) for index in range(WINDOW)]
                self._next += WINDOW
                sent = {}
                for body in bodies:
                    command = request(310, send_fields("BenchmarkTest", e=self._queue_id), body)
                    channel.send(command)
                    sent[command.opaque] = body
                for _ in bodies:
                    answer = channel.receive()
                    assert answer.code == 0, answer.remark
                    offset = int((answer.fields or {})["queueOffset"])
                    self.acknowledged.append((offset, sent[answer.opaque]))
        except (SluiceError, OSError):
            pass
        finally:
            channel.close()


def read_queue(address: str, queue_id: int) -> list[bytes]:
    channel = BlockingChannel(address, 10.0)
    found: list[bytes] = []
    try:
        while True:
            fields = pull_fields("BenchmarkTest", offset=len(found), queueId=queue_id)
            answer = channel.call(request(11, fields))
            if answer.code != 0:
                assert answer.code == 19, answer.remark
                return found
            found += [message.body for message in decode_records(answer.body)]
    finally:
        channel.close()


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_every_acknowledged_message_survives_kill_9(start, flush: str) -> None:  # type: ignore[no-untyped-def]
    acknowledged: dict[int, list[tuple[int, bytes]]] = {number: [] for number in range(QUEUES)}
    for seed in range(SEEDS // 2):
        rng = random.Random(f"{flush} {seed}")
        server = start(flush)
        senders = [Sender(server.address, q, seed * 10_000_000) for q in range(QUEUES)]
        for sender in senders:
            sender.start()
        for _ in range(1000):  # on a busy machine the first answers take their time
            if all(sender.acknowledged for sender in senders):
                break
            senders[0].join(0.01)
        senders[0].join(rng.uniform(0.01, 0.2))
        server.stop(signal.SIGKILL)
        for number, sender in enumerate(senders):
            sender.join(limit(20))
            acknowledged[number] += sender.acknowledged
        assert all(sender.acknowledged for sender in senders)
    server = start(flush)
    for number in range(QUEUES):
        found = read_queue(server.address, number)
        for offset, body in acknowledged[number]:
            assert found[offset] == body
        assert [int(body) for body in found] == sorted({int(body) for body in found})
    assert server.stop(signal.SIGTERM) == 0
