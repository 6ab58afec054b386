"""kill -9 of the broker and of the producer amid transactions: messages and local work agree.

A producer process writes each local transaction into a ledger (a file, synced) inside its `async
with`, and rolls every fifth back. Broker and producer are killed at random moments and started
again. In the end every ledger entry has its message exactly once, and nothing else is visible.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import SluiceError
from sluicemq.model.message import StoredMessage
from sluicemq.record.codec import decode_records
from waiting import limit

CONFIGURATION = """
brokerName=broker-a
mappedFileSizeCommitLog=1048576
metricsExporterType=DISABLE
flushDiskType=SYNC_FLUSH
transactionTimeOut=300
transactionCheckInterval=300
transactionCheckMax=1000
"""
PRODUCER = """
import asyncio, os, sys
from sluicemq import Sluice
from sluicemq.errors import SluiceError

async def main(name_server, ledger, name):
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = 0
    async with Sluice(name_server, send_timeout_ms=1000) as mq:
        producer = mq.producer("G", timeout_ms=1000)
        while True:
            number += 1
            body = f"{name}-{number}"
            try:
                async with producer.transaction("t", body) as tx:
                    if number % 5 == 0:
                        raise KeyError
                    os.write(file, f"{tx.transaction_id} {body}\\n".encode())
                    os.fsync(file)
                print(body, flush=True)
            except KeyError:
                pass
            except SluiceError:
                await asyncio.sleep(0.05)

asyncio.run(main(*sys.argv[1:]))
"""
ROUNDS = 4


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


class World:
    """The processes, and the ledger."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = free_ports()
        self.name_server = f"127.0.0.1:{self.ports[0]}"
        self.ledger = directory / "ledger"
        self.ledger.touch()
        (directory / "broker.conf").write_text(CONFIGURATION)
        (directory / "producer.py").write_text(PRODUCER)
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        with (self.directory / "log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=subprocess.PIPE, stderr=log, text=True,
                env=self.environment,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_broker(self) -> subprocess.Popen[str]:
        process = self.start(
            "-m", "sluicemq", "up", "--nameserver-port", str(self.ports[0]), "--broker-port",
            str(self.ports[1]), "--store", str(self.directory / "store"), "-c",
            str(self.directory / "broker.conf"),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        return process

    def start_producer(self, name: str) -> subprocess.Popen[str]:
        script = str(self.directory / "producer.py")
        process = self.start(script, self.name_server, str(self.ledger), name)
        assert process.stdout is not None
        assert process.stdout.readline()  # its first transaction
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(limit(20))
        assert process.stdout is not None
        process.stdout.close()
        self.processes.remove(process)

    def entries(self) -> dict[str, str]:
        """Transaction id -> body."""
        return dict(line.split() for line in self.ledger.read_text().splitlines())

    def visible(self) -> Counter[str]:
        found: Counter[str] = Counter()
        with Admin(self.name_server) as admin:
            for queue in admin.queues("t"):
                start, end = admin.offsets(queue)
                reader = BulkReader(
                    admin.address(queue), "t", queue.queue_id, start, end, None,
                    broker=queue.broker,
                )  # fmt: skip
                with reader:
                    for chunk in reader:
                        found.update(record.body.decode() for record in decode_records(chunk))
        return found


class LedgerListener(TransactionListener):
    """What another process of the group can know."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.checked = 0

    def check(self, message: StoredMessage) -> TransactionState:
        self.checked += 1
        known = message.properties["UNIQ_KEY"] in self._world.entries()
        return TransactionState.COMMIT if known else TransactionState.ROLLBACK


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for process in list(made.processes):
        made.kill(process)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(2))
def test_ledger_and_messages_agree_after_kills_of_broker_and_producer(
    world: World, seed: int
) -> None:
    chance = random.Random(seed)
    broker = world.start_broker()
    for number in range(ROUNDS):
        producer = world.start_producer(f"p{number}")
        time.sleep(chance.uniform(0.05, 0.4))  # the moment of the blow
        victims = [broker, producer] if chance.random() < 0.5 else [producer, broker]
        for victim in victims:
            world.kill(victim)
            time.sleep(chance.uniform(0, 0.1))
        broker = world.start_broker()
    listener = LedgerListener(world)
    with Producer(world.name_server, group="G", listener=listener) as judge:
        judge.answer_checks("t")
        await_nothing_open(world)
    wanted = Counter(world.entries().values())
    assert len(wanted) > ROUNDS
    assert world.visible() == wanted


def await_nothing_open(world: World) -> None:
    end = time.monotonic() + limit(30)
    while time.monotonic() < end:
        try:
            with Admin(world.name_server) as admin:
                if not any(admin.transactions().values()):
                    return
        except SluiceError:
            pass
        time.sleep(0.1)
    pytest.fail("transactions stay undecided")
