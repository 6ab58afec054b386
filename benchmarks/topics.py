"""What topics cost a broker by their number: creating one more, and nothing at all.

    python -m benchmarks.topics [--counts 1000,10000] [--idle-s 60] [--json FILE]

A name server and a broker, each a process of its own, over a store with so many topics of four
queues, in one of which lies a message. After a restart of the broker: the time and the
broker's CPU for one topic more, created one after the other on one connection, with what the broker
does for them in the second behind it; and the CPU of both while nobody asks for anything, over two
periods of the registration (30 s).
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from benchmarks.measure import exact_cpu_s, percentile, rss_mib  # noqa: E402
from sluicemq.net.blocking import BlockingChannel  # noqa: E402
from sluicemq.wire.codes import RequestCode  # noqa: E402
from sluicemq.wire.frames import Command  # noqa: E402

QUEUES = 4
CREATED = 50
SETTLE_S = 5.0


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[tuple[int, str]]:
    """A server's process id and address."""
    server = subprocess.Popen(
        [sys.executable, "-m", "sluicemq", *arguments, "--log-level", "warning"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        yield server.pid, next(word for word in line.split() if ":" in word).rpartition("=")[2]
    finally:
        server.terminate()
        server.wait()


def call(broker: BlockingChannel, command: Command) -> None:
    answer = broker.call(command)
    if answer.code:
        raise SystemExit(f"request {command.code}: answer {answer.code}: {answer.remark}")


def topic(name: str) -> Command:
    """The request that creates it."""
    fields = {
        "topic": name, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES),
        "writeQueueNums": str(QUEUES), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    return Command(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)


def send(broker: BlockingChannel, topic: str) -> None:
    fields = {
        "a": "P", "b": topic, "c": "TBW102", "d": str(QUEUES), "e": "0", "f": "0",
        "g": str(int(time.time() * 1000)), "h": "0", "i": "", "j": "0", "k": "false", "m": "false",
    }  # fmt: skip
    call(broker, Command(RequestCode.SEND_MESSAGE_V2, fields, b"x" * 100))


def fill(broker: BlockingChannel, count: int) -> None:
    """So many topics, and a message in one queue of each."""
    for start in range(0, count, 1000):
        configs = [
            {"topicName": f"Topic{number}", "readQueueNums": QUEUES, "writeQueueNums": QUEUES,
             "perm": 6, "attributes": {}}
            for number in range(start, min(start + 1000, count))
        ]  # fmt: skip
        body = json.dumps({"topicConfigList": configs}).encode()
        call(broker, Command(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body))
    for number in range(count):
        send(broker, f"Topic{number}")


def created(broker: BlockingChannel, pid: int) -> tuple[list[float], float]:
    """Milliseconds of each creation, and the broker's CPU for one."""
    times, cpu = [], exact_cpu_s(pid)
    for number in range(CREATED):
        command = topic(f"More{number}")
        begin_s = time.perf_counter()
        call(broker, command)
        times.append((time.perf_counter() - begin_s) * 1000)
    time.sleep(1.0)
    return times, (exact_cpu_s(pid) - cpu) * 1000 / CREATED


def measured(count: int, idle_s: float) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory(prefix="sluicemq-topics-") as root,
        running("nameserver", "--host", "127.0.0.1", "--port", "0") as (names_pid, names),
    ):
        configuration = Path(root, "broker.conf")
        configuration.write_text("metricsExporterType = DISABLE\n")
        arguments = (
            "broker", "-c", str(configuration), "-n", names, "--host", "127.0.0.1", "--port", "0",
            "--store", f"{root}/store",
        )  # fmt: skip
        with running(*arguments) as (_, address), closing(BlockingChannel(address, 60.0)) as broker:
            fill(broker, count)
        with (
            running(*arguments) as (pid, address),
            closing(BlockingChannel(address, 60.0)) as broker,
        ):
            call(broker, topic("First"))  # renders the whole table once
            time.sleep(SETTLE_S)
            times, cpu_ms = created(broker, pid)
            time.sleep(SETTLE_S)
            begin_s, cpu, names_cpu = time.perf_counter(), exact_cpu_s(pid), exact_cpu_s(names_pid)
            time.sleep(idle_s)
            passed_s = time.perf_counter() - begin_s
            return {
                "topics": count,
                "create_ms": statistics.median(times),
                "create_p99_ms": percentile(times, 0.99),
                "create_cpu_ms": cpu_ms,
                "idle_percent": 100 * (exact_cpu_s(pid) - cpu) / passed_s,
                "idle_name_server_percent": 100 * (exact_cpu_s(names_pid) - names_cpu) / passed_s,
                "memory_mib": rss_mib(pid),
            }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topics", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--counts", default="1000,10000", help="numbers of topics: 1000,10000")
    parser.add_argument("--idle-s", type=float, default=60.0, help="how long nothing is asked: 60")
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    options = parser.parse_args()
    found = []
    for count in map(int, options.counts.split(",")):
        one = measured(count, options.idle_s)
        found.append(one)
        print("  ".join(f"{name} {value:.2f}" for name, value in one.items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
