"""Test `sluice up --replicas N` and `sluice cluster`, as processes."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from sluicemq.cli.servers.ports import free_ports
from sluicemq.cli.servers.processes import SupervisedProcess, is_etcd_healthy, make_etcd_process
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.proxy import messages as m
from sluicemq.proxy.service import PATH
from sluicemq.record.codec import decode_records
from waiting import limit, until

grpc: Any = pytest.importorskip("grpc")
SOURCE = Path(__file__).parents[2] / "src"
TIMEOUT_S = 60


async def test_a_killed_etcd_is_restarted_with_its_data(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    etcd = make_etcd_process(tmp_path / "etcd", port)
    await etcd.start()
    try:
        assert await is_etcd_healthy(port)
        os.kill(process_id(etcd), signal.SIGKILL)
        async with asyncio.timeout(limit(10)):
            while not await is_etcd_healthy(port):
                await asyncio.sleep(0.05)
    finally:
        await etcd.close()
    assert not await is_etcd_healthy(port)
    assert (tmp_path / "etcd" / "member").is_dir()


async def test_closing_a_restarting_child_leaves_no_process() -> None:
    begun: list[asyncio.subprocess.Process] = []
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

    async def await_ready(process: asyncio.subprocess.Process) -> None:
        begun.append(process)
        if len(begun) > 1:
            assert process.stdout is not None
            await process.stdout.readuntil(b"\n")

    child = SupervisedProcess("sleeper", ["sleep", "60"], await_ready, 0)
    await child.start()
    begun[0].kill()
    await until(lambda: len(begun) == 2)
    await child.close()
    await until(lambda: begun[1].returncode is not None)
    await asyncio.sleep(0.1)
    del child  # its tasks with it: asyncio says which ended with an error that nobody saw
    gc.collect()
    assert not said


def process_id(child: SupervisedProcess) -> int:
    process = child._process
    assert process is not None
    return process.pid


class Trial:
    """A running `sluice up --replicas 2`."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluicemq", "up", "--replicas", "2", "--nameserver-port",
                 "0", "--broker-port", "0", "--proxy-port", "0", "--store",
                 str(directory / "store")],
                stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": str(SOURCE), "NAMESRV_ADDR": ""},
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.log.read_text()
        said = dict(word.partition("=")[::2] for word in line.split())
        self.name_server, self.proxy = said["nameserver"], said["proxy"]

    def sluice(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sluicemq", *words, "-n", self.name_server],
            capture_output=True, text=True, timeout=limit(TIMEOUT_S), check=False,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{self.log.read_text()[-5000:]}"
        return done.stdout

    def status(self) -> list[dict[str, Any]]:
        found = json.loads(self.sluice("cluster", "status", "--json"))["brokers"]
        assert isinstance(found, list)
        return found

    def await_whole(self) -> dict[str, Any]:
        """Wait until both replicas are in sync. Return the record of the master."""
        end = time.monotonic() + limit(TIMEOUT_S)
        while True:
            with contextlib.suppress(AssertionError):
                rows = self.status()
                if [(row["role"], row["inSync"]) for row in rows] == [
                    ("master", True), ("slave", True),
                ]:  # fmt: skip
                    return rows[0]
            assert time.monotonic() < end, self.log.read_text()[-20_000:]
            time.sleep(0.2)

    def close(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(limit(TIMEOUT_S))
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    running = Trial(tmp_path)
    yield running
    if running.process.returncode is None:
        running.close()


def bodies(name_server: str, topic: str) -> list[bytes]:
    """Return the bodies of all messages of a topic."""
    found: list[bytes] = []
    with Admin(name_server) as admin:
        for queue in admin.queues(topic):
            first, end = admin.offsets(queue)
            address = admin.masters()[queue.broker]
            with BulkReader(address, topic, queue.queue_id, first, end) as chunks:
                for chunk in chunks:
                    found += [message.body for message in decode_records(chunk)]
    return found


def send_by_grpc(proxy: str, body: bytes) -> None:
    """Send a message as a client of RocketMQ 5 does: with retries, in one connection."""
    message = m.Message(
        topic=m.Resource(name="Trial"), body=body,
        system_properties=m.SystemProperties(message_id=body.decode(), queue_id=0),
    )  # fmt: skip
    request = m.SendMessageRequest(messages=[message])
    with grpc.insecure_channel(proxy) as channel:
        send = channel.unary_unary(
            PATH + "SendMessage",
            request_serializer=m.SendMessageRequest.SerializeToString,
            response_deserializer=m.SendMessageResponse.FromString,
        )
        end = time.monotonic() + limit(TIMEOUT_S)
        while True:
            answer = send(request, metadata=[("x-mq-client-id", "one")], timeout=limit(TIMEOUT_S))
            if answer.status.code == m.Code.OK:
                return
            assert time.monotonic() < end, answer
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_a_killed_master_a_send_is_acknowledged_within_seconds(
    trial: Trial,
) -> None:
    master = trial.await_whole()
    with Producer(trial.name_server, timeout_ms=20_000) as producer:
        sent = [b"%d" % number for number in range(200)]
        for body in sent:
            producer.send("Trial", body)
        send_by_grpc(trial.proxy, b"by-grpc")
        os.kill(master["pid"], signal.SIGKILL)
        killed_s = time.monotonic()
        producer.send("Trial", b"after")
        assert time.monotonic() - killed_s < limit(8)
        send_by_grpc(trial.proxy, b"by-grpc-after")
        new = next(row for row in trial.status() if row["role"] == "master")
        assert new["id"] != master["id"]
        assert new["epoch"] > master["epoch"]
        trial.await_whole()  # the killed one is back
        trial.sluice("cluster", "switch", "--to", str(master["id"]))
        producer.send("Trial", b"switched")
    now = trial.await_whole()
    assert now["id"] == master["id"]
    assert Counter(bodies(trial.name_server, "Trial")) == Counter(
        [*sent, b"after", b"switched", b"by-grpc", b"by-grpc-after"]
    )
    assert trial.close() == 0
    assert "Traceback" not in trial.log.read_text()
