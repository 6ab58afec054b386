"""Does it stay as it is? A cluster under mixed load, and what grows of it.

    python -m benchmarks.soak [--minutes 60] [--rate 300] [--report FILE]

One process is `sluice up`, whose memory, descriptors and latencies are looked at; a second broker
of the cluster is stopped and started again all the time. Producers send plain, ordered, delayed and
transactional messages; consumers take them by tags, by SQL92, in order, in batches, as broadcasts
and by pops, one in ten of which is never acknowledged and comes again. Members join and leave,
topics and groups come and go, retention deletes the files of the log behind the consumers, and
every ten minutes an archive pipeline runs on Spark.

After a warm-up of a third of the time a line is laid through each figure (least squares). What it
grows along the line, in the run or in an hour of a longer one, is *flat* when that, at the low end
of its confidence (two standard errors), stays under the figure's limit. Memory is the anonymous
memory of the process: pages of mapped files do not count. Every plain and ordered
message has to arrive; the exit code is 1 when one is missing or a figure is not flat.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.contenders import ROOT
from sluicemq import Sluice
from sluicemq.client.admin.topics import masters
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.requests import heartbeat
from sluicemq.errors import SluiceError
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import StoredMessage
from sluicemq.proxy.receiving import ack_request, decode_popped, pop_request
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

from peer import clusters  # isort: skip

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
SAMPLE_S = 2.0
WARM_SHARE = 1 / 3
POPS = "soak-pops"
POP_INVISIBLE_MS = 5_000
PLAIN, ORDERED, DELAYED, DECIDED = "SoakPlain", "SoakOrdered", "SoakDelayed", "SoakDecided"
CONF = """\
autoCreateTopicEnable=true
mappedFileSizeCommitLog=8388608
fileReservedTime=0
deleteWhen={hours}
metricsExporterType=DISABLE
brokerName={name}
"""


@dataclass(frozen=True)
class Limit:
    """What a figure may grow in the run, an hour at most: so much, or this share of its mean."""

    unit: str
    growth_max: float
    share_max: float = 0.0


LIMITS = {
    "memory_mib": Limit("MiB", 1.0),
    "descriptors": Limit("", 8.0),
    "threads": Limit("", 1.0),
    "send_p50_ms": Limit("ms", 0.3, 0.2),
    "send_p99_ms": Limit("ms", 5.0, 0.5),
    "delivery_p50_ms": Limit("ms", 1.0, 0.2),
}


@dataclass
class Figures:
    """Samples by name: time (s) and value."""

    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, at_s: float, value: float) -> None:
        self.samples.setdefault(name, []).append((at_s, value))


def line_through(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean, slope an hour and its standard error, by least squares."""
    times, values = [at for at, _ in points], [value for _, value in points]
    mean_s, mean = statistics.fmean(times), statistics.fmean(values)
    spread = sum((at - mean_s) ** 2 for at in times)
    slope = sum((at - mean_s) * (value - mean) for at, value in points) / spread
    rest = sum((value - mean - slope * (at - mean_s)) ** 2 for at, value in points)
    error = math.sqrt(rest / max(len(points) - 2, 1) / spread)
    return mean, slope * 3600, error * 3600


def verdicts(figures: Figures, begin_s: float) -> dict[str, dict[str, Any]]:
    """Each figure after the warm-up: what it was, what it grows an hour, whether that is flat."""
    found: dict[str, dict[str, Any]] = {}
    for name, limit in LIMITS.items():
        points = [point for point in figures.samples.get(name, []) if point[0] >= begin_s]
        if len(points) < 3:
            continue
        hours = min((points[-1][0] - points[0][0]) / 3600, 1.0)
        mean, slope, error = line_through(points)
        growth_max = max(limit.growth_max, limit.share_max * mean)
        found[name] = {
            "mean": round(mean, 3),
            "grows_an_hour": round(slope, 3),
            "standard_error": round(error, 3),
            "limit": round(growth_max, 3),
            "flat": (slope - 2 * error) * hours <= growth_max,
        }
    return found


class Cluster:
    """`sluice up`, and a broker beside it that comes and goes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names_port, first_port, second_port = clusters.free_ports()
        self.name_server = f"127.0.0.1:{names_port}"
        hours = ";".join(f"{hour:02}" for hour in range(24))
        for name in ("first", "second"):
            (directory / f"{name}.conf").write_text(CONF.format(name=name, hours=hours))
        up = ["up", "--nameserver-port", str(names_port), "--broker-port", str(first_port)]
        self.first = self.start("first", *up)
        self._second = [
            "broker", "--host", "127.0.0.1", "--port", str(second_port), "-n", self.name_server,
        ]  # fmt: skip
        self.second = self.start("second", *self._second)

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        conf, store, log = (self.directory / f"{name}{end}" for end in (".conf", "", ".log"))
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "sluicemq", *words, "-c", conf, "--store", store],
                stdout=output, stderr=output, env=ENVIRONMENT,
            )  # fmt: skip

    def restart(self) -> None:
        """The second broker, once by the book and once not."""
        self.second.send_signal(random.choice((signal.SIGTERM, signal.SIGKILL)))
        self.second.wait(60)
        self.second = self.start("second", *self._second)

    def close(self) -> None:
        for process in (self.second, self.first):
            process.terminate()
            process.wait(60)


@dataclass
class Traffic:
    """What was sent and what has arrived, by group."""

    sent: Counter[str] = field(default_factory=Counter)
    awaited: set[str] = field(default_factory=set)
    arrived: dict[str, set[str]] = field(default_factory=dict)
    send_ms: list[float] = field(default_factory=list)
    delivery_ms: list[float] = field(default_factory=list)
    refused: int = 0

    async def taken(self, group: str, message: StoredMessage) -> None:
        self.arrived.setdefault(group, set()).add(message.body.decode())
        if group == "soak-all":
            self.delivery_ms.append(time.time() * 1000 - float(message.properties["at"]))

    def missing(self) -> int:
        """Plain and ordered messages that were acknowledged and that their group has not seen."""
        groups = ("soak-all", "soak-ordered")
        return len(self.awaited - set().union(*(self.arrived.get(name, ()) for name in groups)))


async def sending(mq: Sluice, traffic: Traffic, rate: float, is_over: asyncio.Event) -> None:
    """All kinds of messages, so many a second."""
    number = 0
    # An agreed pace, not one that waits: a stall shows in the latencies.
    begin_s = time.monotonic()
    while not is_over.is_set():
        number += 1
        body = f"{number}"
        at = {"at": f"{time.time() * 1000}", "n": f"{number % 100}"}
        kind = number % 20
        sent_s = time.perf_counter()
        try:
            if kind == 0:
                await mq.send(DELAYED, body, delay=random.uniform(0.5, 5), properties=at)
            elif kind == 1:
                async with mq.transaction(DECIDED, body, properties=at) as transaction:
                    if number % 40 == 1:
                        transaction.rollback()
            elif kind < 5:
                key = f"k{number % 7}"
                await mq.send(ORDERED, body, sharding_key=key, properties=at)
                traffic.awaited.add(body)
            else:
                await mq.send(PLAIN, body, tag=f"t{kind % 3}", keys=f"k{number}", properties=at)
                traffic.awaited.add(body)
                traffic.send_ms.append((time.perf_counter() - sent_s) * 1000)
            traffic.sent[str(kind)] += 1
        except SluiceError:  # the second broker is away, and its queue was chosen too often
            traffic.refused += 1
        pause_s = begin_s + number / rate - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)


@contextlib.asynccontextmanager
async def consuming(mq: Sluice, traffic: Traffic) -> AsyncIterator[None]:
    """Consumers of every kind that stay."""

    def handler(group: str) -> Callable[[StoredMessage], Awaitable[None]]:
        return lambda message: traffic.taken(group, message)

    async def batch(messages: list[StoredMessage]) -> None:
        for message in messages:
            await traffic.taken("soak-batch", message)

    async with contextlib.AsyncExitStack() as stack:

        async def stay(consumer: Any, topic: str, **wish: Any) -> None:
            consumer.subscribe(topic, **wish)
            await consumer.start()
            stack.push_async_callback(consumer.close)

        await stay(mq.consumer("soak-all", handler("soak-all")), PLAIN)
        await stay(mq.consumer("soak-tags", handler("soak-tags")), PLAIN, tags="t1 || t2")
        await stay(mq.consumer("soak-sql", handler("soak-sql")), PLAIN, where="n BETWEEN 10 AND 20")
        await stay(mq.consumer("soak-ordered", handler("soak-ordered"), ordered=True), ORDERED)
        await stay(mq.consumer("soak-batch", batch, batch_max=16), DELAYED)  # type: ignore[arg-type]
        await stay(mq.consumer("soak-decided", handler("soak-decided")), DECIDED)
        await stay(mq.consumer("soak-wide", handler("soak-wide"), broadcast=True), PLAIN, tags="t0")
        yield


async def popping(mq: Sluice, traffic: Traffic, is_over: asyncio.Event) -> None:
    """Pop from every master in turn, and acknowledge all but one of ten messages."""
    wanted = parse_subscription(PLAIN)
    data = bodies.ConsumerData(POPS, subscriptions=(wanted,))
    beat = heartbeat(bodies.Heartbeat("soak-popper", (), (data,)))

    def ask(command: Command, broker: str) -> Conversation[Command]:
        address = (yield from masters(mq.admin.directory))[broker]
        return (yield Call(address, command))

    number = 0
    while not await over(is_over, 0.2):
        for broker in await mq.admin.run(masters(mq.admin.directory)):
            with contextlib.suppress(SluiceError, KeyError):
                await mq.admin.run(ask(beat, broker))
                request = pop_request(
                    POPS, wanted, broker, 32, POP_INVISIBLE_MS, 0, "", is_order=False
                )
                answer = await mq.admin.run(ask(request, broker))
                if answer.code != ResponseCode.SUCCESS:
                    continue
                for found in decode_popped(answer, broker):
                    number += 1
                    if number % 10:
                        done = ack_request(POPS, PLAIN, found.handle)
                        await mq.admin.run(ask(done, broker))
                        await traffic.taken(POPS, found.stored)


async def churning(cluster: Cluster, mq: Sluice, traffic: Traffic, is_over: asyncio.Event) -> None:
    """Members, topics, groups and the second broker come and go; filters change."""
    for number in range(1_000_000):
        if await over(is_over, 3.0):
            return
        with contextlib.suppress(SluiceError):
            topic = f"SoakShort{number % 5}"
            await mq.admin.create_topic(topic, queues=2)
            await mq.send(topic, "x")
            low = number % 50
            async with Sluice(cluster.name_server) as other:
                stream = other.subscribe(
                    PLAIN, group=f"soak-visitor-{number % 3}", where=f"n > {low}", start="last"
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        async for message in stream:
                            await message.ack()
                await stream.close()
            await mq.admin.delete_topic(topic)
        if number % 5 == 4:
            await asyncio.to_thread(cluster.restart)


async def archiving(cluster: Cluster, is_over: asyncio.Event) -> int:
    """Now and then a pipeline on Spark; returns how many ran."""
    plan = cluster.directory / "archive.yaml"
    target = cluster.directory / "archive"
    plan.write_text(
        f"use: archive\ncluster:\n  nameServers: {cluster.name_server}\n"
        f"with:\n  path: {target}\n  topics: [{PLAIN}]\n  on_gap: note\n"
    )
    count = 0
    while not await over(is_over, 600.0):
        words = [sys.executable, "-m", "sluicemq", "pipeline", "run", str(plan)]
        done = await asyncio.to_thread(
            subprocess.run, words, check=False, capture_output=True, env=ENVIRONMENT
        )
        count += done.returncode == 0
    return count


async def over(is_over: asyncio.Event, seconds: float) -> bool:
    """So long, or until the end."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(is_over.wait(), seconds)
    return is_over.is_set()


async def sampling(pid: int, traffic: Traffic, figures: Figures, is_over: asyncio.Event) -> None:
    """Every two seconds."""
    begin_s = time.monotonic()
    while not await over(is_over, SAMPLE_S):
        at_s = time.monotonic() - begin_s
        figures.add("memory_mib", at_s, measure.own_mib(pid))
        figures.add("descriptors", at_s, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        figures.add("threads", at_s, len(list(Path(f"/proc/{pid}/task").iterdir())))
        for name, values in (("send", traffic.send_ms), ("delivery", traffic.delivery_ms)):
            taken, values[:] = values[:], []
            if taken:
                figures.add(f"{name}_p50_ms", at_s, measure.percentile(taken, 0.5))
                figures.add(f"{name}_p99_ms", at_s, measure.percentile(taken, 0.99))


async def soak(cluster: Cluster, minutes: float, rate: float) -> dict[str, Any]:
    """The report."""
    traffic, figures, is_over = Traffic(), Figures(), asyncio.Event()
    async with Sluice(cluster.name_server) as mq:
        for topic in (PLAIN, ORDERED, DELAYED, DECIDED):
            await mq.admin.create_topic(topic, queues=4)
        async with consuming(mq, traffic), asyncio.TaskGroup() as group:
            group.create_task(sampling(cluster.first.pid, traffic, figures, is_over))
            group.create_task(popping(mq, traffic, is_over))
            group.create_task(churning(cluster, mq, traffic, is_over))
            archives = group.create_task(archiving(cluster, is_over))
            sender = group.create_task(sending(mq, traffic, rate, is_over))
            await asyncio.sleep(minutes * 60)
            is_over.set()
            await sender
            for _ in range(300):  # what the second broker kept comes when it is back
                if not traffic.missing():
                    break
                await asyncio.sleep(0.2)
    return {
        "minutes": minutes,
        "sent": sum(traffic.sent.values()),
        "refused": traffic.refused,
        "missing": traffic.missing(),
        "delayed": len(traffic.arrived.get("soak-batch", ())),
        "popped": len(traffic.arrived.get(POPS, ())),
        "decided": len(traffic.arrived.get("soak-decided", ())),
        "archives": archives.result(),
        "figures": verdicts(figures, minutes * 60 * WARM_SHARE),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=300, help="messages a second")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluicemq-soak-") as directory:
        cluster = Cluster(Path(directory))
        try:
            for name, process in (("first", cluster.first), ("second", cluster.second)):
                clusters.await_line(process, Path(directory) / f"{name}.log", "ready ")
            report = asyncio.run(soak(cluster, options.minutes, options.rate))
        finally:
            cluster.close()
    text = json.dumps(report, indent=1)
    print(text)
    if options.report:
        options.report.write_text(text + "\n")
    is_flat = all(figure["flat"] for figure in report["figures"].values())
    return 0 if is_flat and not report["missing"] else 1


if __name__ == "__main__":
    sys.exit(main())
