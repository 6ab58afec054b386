"""A broker with more queues than descriptors, soft and hard: it starts, serves all of them, and is
back after kill -9."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from simulation.stepped import pull_fields, send_fields
from sluicemq.errors import ConnectionLostError
from sluicemq.net.blocking import BlockingChannel
from sluicemq.wire.frames import Command
from waiting import limit, wait_for

DESCRIPTORS = 512
TOPIC, QUEUES = "BenchmarkTest", 1024  # the broker makes it


class Broker:
    """`sluice broker` as a process of its own that cannot raise its limit."""

    def __init__(self, directory: Path) -> None:
        config, self._errors = directory / "broker.conf", directory / "errors"
        config.write_text("metricsExporterType=DISABLE\nmappedFileSizeCommitLog=4194304\n")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh",
                 sys.executable, "-m", "sluicemq", "broker", "--host", "127.0.0.1", "--port", "0",
                 "--store", str(directory / "store"), "-c", str(config)],
                stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready "), self.errors()
        self.address = line.split("broker=")[1].split()[0]

    def errors(self) -> str:
        return self._errors.read_text()

    def stop(self, number: int) -> int:
        self._process.send_signal(number)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait(limit(30))

    def send(self) -> None:
        answers = self._call(310, [send_fields(TOPIC, e=queue) for queue in range(QUEUES)])
        assert {answer.code for answer in answers} == {0}

    def counts(self) -> set[str]:
        """How many messages the queues have: pulled from each of them."""
        fields = [pull_fields(TOPIC, queueId=queue) for queue in range(QUEUES)]
        answers = self._call(11, fields)
        assert {answer.code for answer in answers} == {0}
        return {(answer.fields or {})["nextBeginOffset"] for answer in answers}

    def _call(self, code: int, fields: list[dict[str, object]]) -> list[Command]:
        with closing(BlockingChannel(self.address, 30.0)) as channel:
            for one in fields:
                texts = {name: str(value) for name, value in one.items()}
                channel.send(Command(code, texts, b"body" if code == 310 else b""))
            return [channel.receive() for _ in fields]


def test_broker_with_more_queues_than_descriptors_is_back_after_each_end(tmp_path: Path) -> None:
    for count, end in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGKILL), 1):
        broker = Broker(tmp_path)
        broker.send()
        assert broker.counts() == {str(count)}, broker.errors()
        broker.stop(end)
    broker = Broker(tmp_path)
    assert broker.counts() == {"3"}
    assert broker.stop(signal.SIGTERM) == 0
    assert "too many open files" not in broker.errors().lower()


def test_connections_too_many_leave_the_store_its_descriptors(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.send()
    host, port = broker.address.split(":")
    idle = [socket.create_connection((host, int(port)), 30) for _ in range(DESCRIPTORS)]
    with contextlib.suppress(ConnectionResetError):
        assert idle[-1].recv(1) == b""
    for one in idle:
        one.close()

    def is_served() -> bool:  # the broker has to see first that they are gone
        try:
            return broker.counts() == {"1"}
        except (ConnectionLostError, OSError):
            return False

    wait_for(is_served)
    assert broker.stop(signal.SIGTERM) == 0
    assert "ulimit -n" in broker.errors()
