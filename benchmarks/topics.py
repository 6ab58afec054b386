"""What topics cost a broker by their number: creating one more, and nothing at all.

    python -m benchmarks.topics [--counts 1000,10000] [--idle-s 40] [--json FILE]

A name server and a broker, each a process of its own. Per number of topics (four queues each):
the time and the broker's CPU for one more, created one after the other on one connection; the same
for a send that makes its topic; the CPU of both while nobody asks for anything, over more than one
period of the registration (30 s); and the share of queues that hold a message is 1 in 100, so
that chores have something to walk.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from benchmarks.measure import exact_cpu_s, percentile, rss_mib  # noqa: E402
from sluicemq.net.blocking import BlockingChannel  # noqa: E402
from sluicemq.protocol.codes import RequestCode  # noqa: E402
from sluicemq.protocol.command import Command  # noqa: E402

QUEUES = 4
CREATED = 50
SETTLE_S = 5.0


def started(stack: contextlib.ExitStack, *arguments: str) -> tuple[int, str]:
    """A server's process id and address."""
    server = subprocess.Popen(
        [sys.executable, "-m", "sluicemq", *arguments, "--log-level", "warning"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(server.wait)
    stack.callback(server.terminate)
    assert server.stdout is not None
    line = server.stdout.readline()
    return server.pid, next(word for word in line.split() if ":" in word).rpartition("=")[2]


def call(broker: BlockingChannel, command: Command) -> None:
    answer = broker.call(command)
    if answer.code:
        raise SystemExit(f"request {command.code}: answer {answer.code}: {answer.remark}")


def topic_fields(name: str) -> dict[str, str]:
    return {
        "topic": name, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES),
        "writeQueueNums": str(QUEUES), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip


def send(broker: BlockingChannel, topic: str, queue_id: int) -> None:
    fields = {
        "a": "P", "b": topic, "c": "TBW102", "d": str(QUEUES), "e": str(queue_id), "f": "0",
        "g": str(int(time.time() * 1000)), "h": "0", "i": "", "j": "0", "k": "false", "m": "false",
    }  # fmt: skip
    call(broker, Command(RequestCode.SEND_MESSAGE_V2, fields, b"x" * 100))


def fill(broker: BlockingChannel, first: int, end: int) -> None:
    """The topics `first` to `end`, and messages in some."""
    for start in range(first, end, 1000):
        configs = [
            {"topicName": f"Topic{number}", "readQueueNums": QUEUES, "writeQueueNums": QUEUES,
             "perm": 6, "attributes": {}}
            for number in range(start, min(start + 1000, end))
        ]  # fmt: skip
        body = json.dumps({"topicConfigList": configs}).encode()
        call(broker, Command(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body))
    for number in range(first, end):
        for queue_id in range(QUEUES):
            send(broker, f"Topic{number}", queue_id)


def timed(broker: BlockingChannel, pid: int, commands: list[Command]) -> tuple[list[float], float]:
    """Milliseconds of each call, and the broker's CPU for one."""
    times, cpu = [], exact_cpu_s(pid)
    for command in commands:
        begin_s = time.perf_counter()
        call(broker, command)
        times.append((time.perf_counter() - begin_s) * 1000)
    return times, (exact_cpu_s(pid) - cpu) * 1000 / len(commands)


def measured(count: int, idle_s: float) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory(prefix="sluicemq-topics-") as root,
        contextlib.ExitStack() as stack,
    ):
        names_pid, names = started(stack, "nameserver", "--host", "127.0.0.1", "--port", "0")
        configuration = Path(root, "broker.conf")
        configuration.write_text("listenPort = 0\nmetricsExporterType = DISABLE\n")
        broker_pid, address = started(
            stack, "broker", "-c", str(configuration), "-n", names, "--host", "127.0.0.1",
            "--store", f"{root}/store",
        )  # fmt: skip
        broker = stack.enter_context(BlockingChannel(address, 60.0))
        fill(broker, 0, count)
        time.sleep(SETTLE_S)
        created = [
            Command(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(f"More{number}"))
            for number in range(CREATED)
        ]
        times, cpu_ms = timed(broker, broker_pid, created)
        time.sleep(SETTLE_S)
        begin_s, cpu, names_cpu = (
            time.perf_counter(),
            exact_cpu_s(broker_pid),
            exact_cpu_s(names_pid),
        )
        time.sleep(idle_s)
        passed_s = time.perf_counter() - begin_s
        return {
            "topics": count,
            "create_ms": statistics.median(times),
            "create_p99_ms": percentile(times, 0.99),
            "create_cpu_ms": cpu_ms,
            "idle_percent": 100 * (exact_cpu_s(broker_pid) - cpu) / passed_s,
            "idle_name_server_percent": 100 * (exact_cpu_s(names_pid) - names_cpu) / passed_s,
            "memory_mib": rss_mib(broker_pid),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topics", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--counts", default="1000,10000", help="numbers of topics: 1000,10000")
    parser.add_argument("--idle-s", type=float, default=40.0, help="how long nothing is asked: 40")
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
