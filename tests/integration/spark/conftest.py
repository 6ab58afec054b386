"""One real server process for all Spark tests (their session: tests/conftest.py); many topics."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyspark
import pytest

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from waiting import limit

ROOT = Path(__file__).parents[3]
TOPICS = count(1)
HAS_ADMISSION = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 2)
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """py4j leaves sockets to the garbage collector: no fault of the test that it runs in.

    A test that fails runs once more: Spark gives a Python worker 10 s to start, which is not enough
    on a machine that starts several JVMs at once. pytest reports it as flaky, with the traceback.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.flaky(reruns=1))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session", autouse=True)
def quick_java() -> None:
    """For programs of tests that start a Java of their own: half the work of a short life."""
    os.environ["JDK_JAVA_OPTIONS"] = QUICK_JAVA


@pytest.fixture
def admission() -> None:
    """For tests that bound a micro-batch."""
    if not HAS_ADMISSION:
        pytest.skip("Python sources can bound a micro-batch since Spark 4.2")


@pytest.fixture(scope="session")
def store_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the broker of `name_server` keeps its messages."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def metrics_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def bytes_out(name_server: str, metrics_port: int) -> Callable[[str], float]:
    """bytes_out(topic): the bytes of messages that have left the broker so far."""

    def total(topic: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        name = "rocketmq_throughput_out_total{"
        found = [one for one in lines if one.startswith(name) and f'topic="{topic}"' in one]
        return sum(float(one.rpartition(" ")[2]) for one in found)

    return total


@pytest.fixture(scope="session")
def name_server(store_directory: Path, metrics_port: int) -> Iterator[str]:
    """Address of the name server of a `sluice up` on free ports; stopped in order at the end."""
    settings = store_directory / "broker.conf"
    settings.write_text(f"traceTopicEnable=true\nmetricsPromExporterPort={metrics_port}\n")
    command = [
        sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port", "0",
        "--store", str(store_directory), "--log-level", "warning", "-c", str(settings),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            assert ready.startswith("ready "), ready
            yield dict(part.split("=", 1) for part in ready.split()[1:])["nameserver"]
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(limit(30)) == 0


@pytest.fixture(scope="session")
def admin(name_server: str) -> Iterator[Admin]:
    with Admin(name_server) as admin:
        yield admin


@pytest.fixture(scope="session")
def producer(name_server: str) -> Iterator[Producer]:
    with Producer(name_server) as producer:
        yield producer


@pytest.fixture
def topic(admin: Admin) -> str:
    """A new topic of two queues."""
    name = f"spark-test-{next(TOPICS)}"
    admin.create_topic(name, queues=2)
    return name


@pytest.fixture
def publish(producer: Producer, topic: str) -> Callable[..., None]:
    """publish(first, count): numbered messages, even ones to queue 0 and odd ones to queue 1."""

    def send(first: int, number: int) -> None:
        for queue in producer.write_queues(topic):
            messages = [
                message(topic, index)
                for index in range(first, first + number)
                if index % 2 == queue.queue_id
            ]
            if messages:
                producer.send_batch(messages, queue=queue)

    return send


def message(topic: str, index: int) -> Message:
    """The numbered message: tag A, B or C; a delay that is absent in every tenth, text in one."""
    properties = {"origin": ("EWR", "JFK", "LGA")[index % 3], "number": str(index)}
    if index % 10:
        properties["delay"] = "late" if index == 33 else str(index - 50)
    return Message(topic, f"body-{index}".encode(), tag="ABC"[index % 3], keys=(f"k{index}", "all"),
                   properties=properties)  # fmt: skip


@pytest.fixture
def read(spark: Any, name_server: str, topic: str) -> Callable[..., Any]:
    """A DataFrame of the topic with further options."""

    def load(**options: str) -> Any:
        given = {"nameServers": name_server, "topic": topic}
        given |= {name.replace("__", "."): value for name, value in options.items()}
        return spark.read.format("rocketmq").options(**given).load()

    return load
