"""Reading a topic into Spark: ours, the ceiling of any Python source, and Spark's Kafka connector.

    python benchmarks/spark_read.py [--messages 2000000] [--repeat 3] [--kafka]

Same rows, same columns, same Spark session, in one run: 128 B bodies and three properties of the
user in four queues (or partitions), local[2]. What is timed:

    body      all columns read, sum(length(body))   (a count would not need the bodies)
    noop      all columns, to Spark's noop sink
    parquet   all columns, to Parquet
    tag 1 %   the broker's tag filter; also what came over the socket

*Ceiling* is a Python source that has the decoded rows in memory before it is asked: Spark's own
cost for these rows. Each is repeated and the best is shown: the machine's noise
only adds. With --kafka the same rows go through a Kafka broker and Spark's connector, with headers;
its jars come from Maven Central by `mvn`, and without that the comparison is skipped, with the
reason.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from sluicemq.client.sync.admin import Admin  # noqa: E402
from sluicemq.client.sync.bulk import BulkReader  # noqa: E402
from sluicemq.client.sync.producer import Producer  # noqa: E402
from sluicemq.filter.subscriptions import parse_subscription  # noqa: E402
from sluicemq.model.message import Message  # noqa: E402
from sluicemq.model.subscription import Subscription  # noqa: E402
from sluicemq.spark.references import load_where  # noqa: E402
from sluicemq.spark.session import spark_session  # noqa: E402

TOPIC = "bench"
QUEUES = 4
BODY_BYTES = 128
HIT_EVERY = 100
CEILING_ROWS = 65_536
REGIONS = ("hz", "sh", "bj")


def rows(first: int, count: int) -> Iterator[tuple[bytes, str, dict[str, str]]]:
    """(body, tag, properties) of the numbered messages: the same for every system."""
    for index in range(first, first + count):
        body = index.to_bytes(8, "big") * (BODY_BYTES // 8)
        yield body, "hit" if index % HIT_EVERY == 0 else "miss", {
            "region": REGIONS[index % 3], "price": str(index % 10_007), "kind": "order",
        }  # fmt: skip


class Cluster:
    """`sluice up` on free ports with its store in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        command = [
            sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port", "0",
            "--store", str(directory), "--log-level", "warning",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline().split()
        self.name_server = dict(part.split("=", 1) for part in ready[1:])["nameserver"]

    def cpu_s(self) -> float:
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def publish(name_server: str, messages: int) -> float:
    """Sends the rows in batches, queue by queue in turn; seconds it took."""
    with Admin(name_server) as admin:
        admin.create_topic(TOPIC, queues=QUEUES)
    started = time.perf_counter()
    with Producer(name_server) as producer:
        queues = producer.write_queues(TOPIC)
        for turn, first in enumerate(range(0, messages, 2_000)):
            batch = [
                Message(TOPIC, body, tag=tag, properties=properties)
                for body, tag, properties in rows(first, min(2_000, messages - first))
            ]
            producer.send_batch(batch, queue=queues[turn % QUEUES])
    return time.perf_counter() - started


def socket_bytes(name_server: str, subscription: Subscription) -> int:
    """What a read of the whole topic takes off the socket."""
    total = 0
    with Admin(name_server) as admin:
        for queue in admin.queues(TOPIC):
            start, end = admin.offsets(queue)
            with BulkReader(
                admin.address(queue), TOPIC, queue.queue_id, start, end, subscription
            ) as reader:
                for _ in reader:
                    pass
                total += reader.bytes_read
    return total


def ours(spark: Any, name_server: str, **options: str) -> Any:
    reader = spark.read.format("rocketmq").option("nameServers", name_server).option("topic", TOPIC)
    return reader.options(**options).load()


def ceiling(spark: Any, name_server: str, messages: int, directory: Path) -> Any:
    """A frame of the same rows, which a Python source holds in memory."""
    import spark_ceiling

    frame = ours(spark, name_server)
    path = directory / "rows.arrow"
    if not path.exists():
        save_rows(spark, name_server, frame.schema, messages, path)
    spark.dataSource.register(spark_ceiling.Ceiling)
    return (
        spark.read.format("ceiling")
        .option("path", str(path))
        .option("schema", frame.schema.json())
        .option("partitions", str(QUEUES))
        .option("rows", str(messages))
        .load()
    )


def save_rows(spark: Any, name_server: str, columns: Any, messages: int, path: Path) -> None:
    """The rows in batches as large as those of a topic, as Spark wants them of a Python source."""
    import pyarrow as pa
    import spark_ceiling

    schema = spark_ceiling.arrow_schema(columns)
    step = CEILING_ROWS // QUEUES
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        saved = 0
        for first in range(0, messages, step):
            if saved == messages:
                break
            bounds = f"queue_offset >= {first} and queue_offset < {first + step}"
            piece = load_where(spark, bounds, nameServers=name_server, topic=TOPIC)
            table = piece.toArrow().cast(schema).combine_chunks()
            for batch in table.to_batches():
                writer.write_batch(batch)
                saved += batch.num_rows
    assert saved == messages, (saved, messages)


class Timing(NamedTuple):
    """Wall seconds, and CPU seconds of every process that took part."""

    wall_s: float
    cpu_s: float


def best(repeat: int, work: Callable[[], object]) -> Timing:
    """The fastest run, and the middle one by CPU (a process that ends can hide what it used)."""
    timings = []
    for _ in range(repeat):
        cpu, started = tree_cpu_s(), time.perf_counter()
        work()
        timings.append(Timing(time.perf_counter() - started, tree_cpu_s() - cpu))
    return Timing(
        min(one.wall_s for one in timings), statistics.median(one.cpu_s for one in timings)
    )


def tree_cpu_s() -> float:
    """CPU time of this process' descendants so far: servers, JVM, Python workers, also ended ones.

    On a machine that has other things to do it says more than the clock.
    """
    parents, times = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.name)] = int(fields[1])
        times[int(path.name)] = sum(map(int, fields[11:15]))
    mine = os.getpid()
    return sum(
        ticks for process, ticks in times.items() if process != mine and descends(process, parents)
    ) / os.sysconf("SC_CLK_TCK")


def descends(process: int, parents: dict[int, int]) -> bool:
    while process > 1:
        process = parents.get(process, 0)
        if process == os.getpid():
            return True
    return False


def sum_of_bodies(frame: Any, column: str = "body") -> int:
    from pyspark.sql import functions

    return int(frame.select(functions.sum(functions.length(column))).first()[0])


def measure(
    frame: Any, repeat: int, directory: Path, expected: int, column: str = "body"
) -> dict[str, Timing]:
    """Timings by name. Raises when rows are missing."""
    target = str(directory / "parquet")

    def body() -> None:
        found = sum_of_bodies(frame, column)
        assert found == expected * BODY_BYTES, (found, expected * BODY_BYTES)

    return {
        "body": best(repeat, body),
        "noop": best(repeat, lambda: frame.write.format("noop").mode("overwrite").save()),
        "parquet": best(repeat, lambda: frame.write.mode("overwrite").parquet(target)),
    }


def show(title: str, messages: int, times: dict[str, Timing], against: dict[str, Timing]) -> None:
    cells = []
    for name, timing in times.items():
        share = f" ({against[name].wall_s / timing.wall_s:4.2f})" if name in against else ""
        cpu_us = timing.cpu_s / messages * 1e6
        cells.append(f"{name} {messages / timing.wall_s / 1000:6.0f}{share:7s} [{cpu_us:5.2f}]")
    print(f"{title:16s}" + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kafka", action="store_true", help="compare with Kafka (needs mvn)")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as text:
        directory = Path(text)
        cluster = Cluster(directory / "store")
        try:
            figures = run(arguments, cluster, directory)
        finally:
            cluster.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2))


def run(arguments: argparse.Namespace, cluster: Cluster, directory: Path) -> dict[str, Any]:
    messages, repeat = arguments.messages, arguments.repeat
    seconds = publish(cluster.name_server, messages)
    print(f"published {messages:,} in {seconds:.1f} s", flush=True)
    kafka = None
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), str(ROOT / "src")))
    settings = {"spark.driver.memory": "4g", "spark.log.level": "ERROR"}
    if arguments.kafka:
        import spark_kafka

        kafka = spark_kafka.start(directory)
        if isinstance(kafka, str):
            print(f"Kafka is skipped: {kafka}")
        else:
            settings["spark.jars"] = kafka.connector_jars
    spark = spark_session("bench", master="local[2]", settings=settings)
    try:
        return compared(spark, cluster, directory, messages, repeat, kafka)
    finally:
        spark.stop()
        if kafka is not None and not isinstance(kafka, str):
            kafka.close()


def compared(
    spark: Any, cluster: Cluster, directory: Path, messages: int, repeat: int, kafka: Any
) -> dict[str, Any]:
    print(
        f"thousand rows/s (share of the ceiling) [CPU µs a row, all processes], {messages:,} rows,"
        f" best of {repeat}"
    )
    top = ceiling(spark, cluster.name_server, messages, directory)
    sum_of_bodies(top)  # warm
    figures: dict[str, Any] = {"ceiling": measure(top, repeat, directory, messages)}
    show("ceiling", messages, figures["ceiling"], {})
    sum_of_bodies(ours(spark, cluster.name_server))
    before = cluster.cpu_s()
    frame = ours(spark, cluster.name_server)
    figures["ours"] = measure(frame, repeat, directory, messages)
    broker_us = (cluster.cpu_s() - before) / (3 * repeat * messages) * 1e6
    show("ours", messages, figures["ours"], figures["ceiling"])
    print(f"{'':16s}broker CPU {broker_us:.2f} µs a message")
    filtered = ours(spark, cluster.name_server, **{"filter.tags": "hit"})
    hits = -(-messages // HIT_EVERY)
    figures["tag 1 %"] = measure(filtered, repeat, directory, hits)
    show("ours, tag 1 %", messages, figures["tag 1 %"], {})
    part = socket_bytes(cluster.name_server, parse_subscription(TOPIC, "hit")) / socket_bytes(
        cluster.name_server, parse_subscription(TOPIC, "*")
    )
    figures["socket share"] = part
    print(f"{'':16s}bytes on the socket: {part:.2%} of the topic's")
    if kafka is not None and not isinstance(kafka, str):
        written = best(1, lambda: kafka.publish(frame))
        print(f"written to Kafka by Spark in {written.wall_s:.1f} s", flush=True)

        def timed(other: Any, expected: int, column: str) -> dict[str, Timing]:
            return measure(other, repeat, directory, expected, column)

        for title, times in kafka.measure(spark, timed, messages, hits).items():
            figures[title] = times
            show(title, messages, times, figures["ceiling"] if title == "kafka" else {})
    return figures


if __name__ == "__main__":
    main()
