"""A broker that goes away for a second or two ends neither a stream nor a sink.

Seeded histories of the source's and the sink's own classes, without a JVM: sinks write
micro-batches, a stream reads them, and meanwhile name server and broker are killed or stopped and
started again at any moment. Nothing is lost; at least once may repeat, exactly once does not.
SLUICEMQ_SEEDS says how many histories.
"""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
import pyarrow as pa
from pyspark.sql.types import BinaryType, StructType

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ClientError, ConnectionLostError, RequestError, RouteNotFoundError
from sluicemq.spark import errors as outage
from sluicemq.spark import senders as sink_send
from sluicemq.spark import source as sink
from sluicemq.spark.bad_rows import BadRowHandler
from sluicemq.spark.errors import retry_during_outage
from sluicemq.spark.options import WRITE, parse_options
from sluicemq.spark.schema import declared_columns, to_spark_schema
from sluicemq.spark.sources.stream import create_stream_reader
from thorough import seeds
from waiting import limit, slowness

ROOT = Path(__file__).parents[2]
SEEDS = seeds(2)
ROWS, RESTARTS = 40, 4


class Site:
    """`sluice up` on fixed ports, which a thread kills or stops and starts again."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.dice = random.Random(f"site {seed}")
        self.ports = free_ports()
        self.restarts = 0
        self._is_over = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._disturb)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def _start(self) -> "subprocess.Popen[str]":
        names, broker = self.ports
        settings = self.directory / "broker.conf"
        settings.write_text("metricsExporterType=DISABLE\n")
        command = [
            sys.executable, "-m", "sluicemq", "up", "--nameserver-port", str(names),
            "--broker-port", str(broker), "--store", str(self.directory / "store"),
            "-c", str(settings), "--log-level", "error",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        return process

    def _disturb(self) -> None:
        while self.restarts < RESTARTS and not self._is_over.wait(self.dice.uniform(0.02, 0.6)):
            self._end(self.dice.choice([signal.SIGKILL, signal.SIGTERM]))
            time.sleep(self.dice.uniform(0, 1.5))
            self._process = self._start()
            self.restarts += 1

    def _end(self, number: signal.Signals) -> None:
        assert self._process.stdout is not None
        self._process.send_signal(number)
        self._process.wait(limit(30))
        self._process.stdout.close()

    def __enter__(self) -> "Site":
        with Admin(self.address) as admin:
            for topic in ("t", "t-exact"):
                admin.create_topic(topic, queues=2)
        self._thread.start()
        return self

    def calm(self) -> None:
        """No disturbance from here on."""
        self._is_over.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.calm()
        self._end(signal.SIGTERM)


def free_ports() -> tuple[int, int]:
    """Below the ports that the machine gives to connections: nobody takes them meanwhile."""
    import socket

    while True:
        names, broker = random.sample(range(20_000, 32_000), 2)
        try:
            for port in (names, broker, broker - 2):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return names, broker


def sinks(site: Site, topic: str) -> Callable[[int], None]:
    """write(epoch): the rows of one micro-batch, at least once to `topic`, exactly once to
    `topic`-exact; as Spark calls the classes, in processes that know nothing of each other."""
    schema = StructType().add("value", BinaryType())
    given = {"nameServers": site.address, "timeoutMs": str(round(30_000 * slowness()))}
    plain = parse_options(given | {"topic": topic}, WRITE)
    exact = parse_options(given | {"topic": f"{topic}-exact", "delivery": "exactly-once"}, WRITE)

    def write(epoch: int) -> None:
        numbers = range(epoch * ROWS, (epoch + 1) * ROWS)
        batch = pa.record_batch({"value": [str(number).encode() for number in numbers]})
        direct = sink.StreamSink(plain, schema, overwrite=False)
        direct.commit([direct.write(iter([batch]))], epoch)
        staged = sink.StreamSink(exact, schema, overwrite=False)
        with sink_send.create_producer(exact) as producer:
            task = sink_send.TaskAttempt("outage", epoch, 0, 0)
            sender = sink_send.StagingSender(producer, 16, task, staged.brokers)
            sorter = BadRowHandler(staged.roles, f"{topic}-exact", "fail", sender)
            sink_send.send_all(sorter.prepare_rows(iter([batch])), sender)
        ranges = sender.staged_ranges.ranges
        done = sink.SinkCommitMessage(
            ROWS, sorter.bad_count, task.query_id, epoch, (f"{topic}-exact",), ranges
        )
        staged.commit([done], epoch)

    return write


class Stream:
    """Micro-batches of a streaming read, as Spark's engine asks for them."""

    def __init__(self, site: Site, topic: str, *, timeout_s: float = 60) -> None:
        options = {
            "nameServers": site.address, "topic": topic, "columns": "body",
            "startingOffsets": "earliest", "maxOffsetsPerTrigger": "60", "group": "readers",
            "timeoutMs": str(round(30_000 * slowness())),
        }  # fmt: skip
        self.reader = create_stream_reader(
            options, to_spark_schema(declared_columns(parse_options(options)))
        )
        self.at: dict[str, Any] = json.loads(
            json.dumps(retry_during_outage(self.reader.initialOffset, timeout_s))
        )
        self.rows: list[int] = []

    def trigger(self) -> bool:
        end = self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())
        end = json.loads(json.dumps(end))
        if end == self.at:
            return False
        for part in self.reader.partitions(self.at, end):
            executor = pickle.loads(pickle.dumps(self.reader))
            for block in executor.read(part):
                self.rows += [int(body) for body in block.column("body").to_pylist()]
        self.reader.commit(end)
        self.at = end
        return True


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, request.param) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("site", range(SEEDS), indirect=True)
def test_streams_and_sinks_go_on_through_restarts_of_the_broker(site: Site) -> None:
    write = sinks(site, "t")
    streams = [Stream(site, "t"), Stream(site, "t-exact")]
    epochs = 0
    while site.restarts < RESTARTS:
        write(epochs)
        epochs += 1
        for stream in streams:
            stream.trigger()
    site.calm()
    for stream in streams:
        while stream.trigger():
            pass
        stream.reader.stop()
    once, exactly = (Counter(stream.rows) for stream in streams)
    assert {*once} == {*range(epochs * ROWS)}
    assert exactly == Counter(range(epochs * ROWS))


def test_an_outage_ends_with_its_own_error_when_it_lasts_too_long() -> None:
    tries: list[float] = []

    def fail() -> None:
        tries.append(time.monotonic())
        raise ConnectionLostError("away")

    with pytest.raises(ConnectionLostError, match="away"):
        retry_during_outage(fail, 0.5)
    assert len(tries) == 3  # after 0.1 and 0.2 s; another 0.4 would be too late


@pytest.mark.parametrize("error", [RequestError(13, "too large"), ClientError("closed")])
def test_what_another_try_cannot_mend_is_raised_at_once(error: ClientError) -> None:
    def fail() -> None:
        raise error

    began = time.monotonic()
    with pytest.raises(type(error)):
        retry_during_outage(fail, 60)
    assert time.monotonic() - began < outage.PAUSE_FIRST_S


def test_a_stream_whose_topic_was_never_there_fails_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, 0)
    try:
        with pytest.raises(RouteNotFoundError, match="nowhere"):
            Stream(site, "nowhere", timeout_s=0)
    finally:
        site._end(signal.SIGTERM)
