"""What several brokers on one machine are worth: `sluice up --brokers 1`, 2 and 4.

    python -m benchmarks.brokers [--brokers 1,2,4] [--rounds 3] [--seconds 3] [--json FILE]

All clusters stand side by side and are loaded in turn, so that what else the machine does falls on
all of them; the best of the rounds counts. A message costs what all processes below the command
take, the name server with them. The generator is one process on the same cores: `cores` says how
many of them the brokers had, and beyond their number no rate can grow. What holds on any machine is
the CPU time a message: where it stays, N cores carry N times as much.
"""

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frames, load, measure
from benchmarks.contenders import ROOT  # finds the compatibility tests' helpers

from peer import clusters  # isort: skip

TOPIC = "BenchBrokers"
WARM_S = 0.5
CASES: dict[str, tuple[Callable[[str], frames.Ring], int, int]] = {
    "1 x 64": (frames.single_sends, 1, 64),
    "64 x 1": (frames.single_sends, 64, 1),
    "batch 32": (lambda topic: frames.batch_sends(topic, batch=32), 1, 8),
}
"""Requests, connections to each broker, and requests in flight on a connection."""


@dataclass(frozen=True)
class Figure:
    """One round: messages a second, CPU of brokers and generator a message, cores of brokers."""

    rate: float
    cpu_us: float
    generator_us: float
    cores: float


@contextlib.contextmanager
def cluster(directory: Path, brokers: int) -> Iterator[tuple[int, list[str]]]:
    """`sluice up --brokers N`; its process and the addresses of its brokers."""
    directory.mkdir()
    log = directory / "log"
    command = [
        sys.executable, "-m", "sluicemq", "up", "--brokers", str(brokers), "--nameserver-port",
        "0", "--broker-port", "0", "--store", str(directory / "store"),
    ]  # fmt: skip
    with clusters.process(command, log, {"PYTHONPATH": str(ROOT / "src")}) as running:
        clusters.await_line(running, log, "ready nameserver=")
        (line,) = re.findall("^ready .*$", log.read_text(), re.MULTILINE)
        addresses = re.findall(r"broker=(\S+)", line)
        for address in addresses:
            load.create_topic(address, TOPIC)
        yield running.pid, addresses


def one_round(pid: int, addresses: list[str], ring: frames.Ring, connections: int, window: int,
              seconds: float) -> Figure:  # fmt: skip
    span = measure.Span(pid, WARM_S, seconds)
    began_s = messages = 0.0  # of the generator, when all connections are there

    def over(counts: load.Counts) -> bool:
        nonlocal began_s, messages
        began_s, messages = began_s or time.process_time(), counts.messages
        return span.over(counts.messages)

    counts = load.send(
        ";".join(addresses), ring, connections=connections, window=window, until=over
    )
    if counts.errors:
        raise RuntimeError(f"{counts.errors} sends were refused")
    spent = (time.process_time() - began_s) / messages * 1e6
    cores = span.cost.cpu_s / span.cost.seconds
    return Figure(span.cost.per_second, span.cost.cpu_us, spent, cores)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.brokers")
    parser.add_argument("--brokers", default="1,2,4", help="how many, one cluster each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--json", help="write the figures to this file as well")
    options = parser.parse_args()
    sizes = [int(one) for one in options.brokers.split(",")]
    rows: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as scratch,
        contextlib.ExitStack() as stack,
    ):
        running = {
            size: stack.enter_context(cluster(Path(scratch) / str(size), size)) for size in sizes
        }
        for name, (make, connections, window) in CASES.items():
            ring = make(TOPIC)
            found: dict[int, list[Figure]] = {size: [] for size in sizes}
            for _ in range(options.rounds):
                for size, (pid, addresses) in running.items():
                    found[size].append(
                        one_round(pid, addresses, ring, connections * size, window, options.seconds)
                    )
            for size, figures in found.items():
                best = max(figures, key=lambda figure: figure.rate)
                cpu_us = min(figure.cpu_us for figure in figures)
                print(
                    f"{name:9} {size} broker{'s' if size > 1 else ' '} {best.rate:10,.0f}/s"
                    f" [{cpu_us:6.2f} us]  on {best.cores:4.2f} cores; generator"
                    f" {best.generator_us:5.2f} us", flush=True,
                )  # fmt: skip
                rows[f"{name}, {size}"] = {"rate": best.rate, "cpu_us": cpu_us, "cores": best.cores}
        for size, (pid, _) in running.items():
            print(f"{size} of them: {measure.own_mib(pid):.0f} MiB, with the name server's")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
