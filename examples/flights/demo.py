"""The main job on real input: a year of flights through broker, filters and Spark, then checked.

    make demo                                   the whole year, about a minute
    python examples/flights/demo.py --short     every 17th flight

A name server and a broker on a real store are started on free ports. Every flight is a message:
tag = carrier, key = tail number, properties = origin, dest, dep_delay, arr_delay, distance, month.

    1  publish all flights
    2  one consumer group takes the tags UA||AA, another one a SQL92 selector, both at once
    3  Spark Structured Streaming with a filter at the broker -> Parquet
    4  Spark batch with predicates pushed down -> delay by carrier -> a topic -> read again

At the end each number stands beside the truth, which `truth.py` computes from the CSV without this
package. The exit code is 1 when one differs. Nothing is left behind: no process, no file.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import truth
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from sluicemq import Sluice  # noqa: E402 - from a checkout that is not installed, too
from sluicemq.client.sync.admin import Admin  # noqa: E402
from sluicemq.client.sync.producer import Producer  # noqa: E402
from sluicemq.model.message import Message  # noqa: E402
from sluicemq.spark.references import load_where  # noqa: E402
from sluicemq.spark.session import spark_session  # noqa: E402

TOPIC, REPORT = "flights", "delay-by-carrier"
QUEUES = 4
BATCH = 500
PROPERTIES = ("origin", "dest", "dep_delay", "arr_delay", "distance", "month")
SHORT_EVERY = 17
QUIET_S, PATIENCE_S = 1.0, 15.0
"""How long no message has to come until a group is done: short once it has what is expected."""

# The server ends when its standard input does, so it cannot outlive this process, however it dies.
SERVER = """
import os, signal, sys, threading
def end_with_parent():
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end_with_parent, daemon=True).start()
from sluicemq.cli import main
main(prog_name="sluice")
"""
QUIET_LOG = """
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c{1}: %m%n
"""
T = TypeVar("T")
console = Console()


# ------------------------------------------------------------------------------- servers


@contextlib.contextmanager
def cluster(store: Path) -> Iterator[str]:
    """A name server and a broker in a process of their own; yields the name server's address."""
    command = [
        sys.executable, "-c", SERVER, "up", "--nameserver-port", "0", "--broker-port", "0",
        "--store", str(store), "--log-level", "warning",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready.startswith("ready "):
            raise SystemExit("The servers did not start; see what they wrote above.")
        yield dict(part.split("=", 1) for part in ready.split()[1:])["nameserver"]
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def spark(directory: Path) -> Iterator[Any]:
    """A Spark session that only logs errors and whose JVM has ended when the block is left."""
    logging = directory / "log4j2.properties"
    logging.write_text(QUIET_LOG)
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # pyspark on the newest pandas, which is not used
    interrupt = signal.getsignal(signal.SIGINT)
    session = spark_session(
        "flights",
        settings={
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{logging}",
        },
    )
    # Spark's handler asks the JVM to cancel its jobs before it raises, and can fail at that.
    signal.signal(signal.SIGINT, interrupt)
    gateway = session.sparkContext._gateway
    try:
        yield session
    finally:
        try:
            session.stop()
        finally:
            gateway.shutdown()
            _end(gateway.proc)


# --------------------------------------------------------------------------------- steps


def message_of(row: truth.Row) -> Message:
    """A flight as a message; a missing value is an absent property."""
    return Message(
        TOPIC,
        json.dumps(row).encode(),
        tag=row["carrier"],
        keys=(row["tailnum"],) if "tailnum" in row else (),
        properties={name: row[name] for name in PROPERTIES if name in row},
    )


def publish(name_server: str, rows: Iterator[truth.Row], total: int) -> int:
    """Sends every flight; returns what the broker's queues hold then."""
    columns = (
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:>9,.0f}/s"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with (
        Admin(name_server) as admin,
        Producer(name_server) as producer,
        Progress(*columns, console=console) as progress,
    ):
        admin.create_topic(TOPIC, queues=QUEUES)
        task = progress.add_task("flights", total=total, rate=0.0)
        while batch := [message_of(row) for row in islice(rows, BATCH)]:
            producer.send_batch(batch)
            progress.update(task, advance=len(batch), rate=progress.tasks[task].speed or 0.0)
        return sum(highest - lowest for lowest, highest in map(admin.offsets, admin.queues(TOPIC)))


async def consume(name_server: str, wanted: truth.Truth) -> tuple[Counter[str], int]:
    """Both groups at once: (deliveries by carrier, deliveries of the selector)."""
    async with Sluice(name_server) as mq, asyncio.TaskGroup() as group:
        tagged = group.create_task(
            delivered(mq, wanted.by_tag.total(), group="united-american", tags=truth.TAGS)
        )
        late = group.create_task(
            delivered(mq, wanted.late_at_jfk, group="late-at-jfk", where=truth.LATE_AT_JFK)
        )
        by_tag, by_selector = await asyncio.gather(tagged, late)
    return by_tag, by_selector.total()


async def delivered(mq: Sluice, expected: int, **subscription: str) -> Counter[str]:
    """What a group gets, by tag, until nothing comes any more."""
    counts: Counter[str] = Counter()
    async with mq.subscribe(TOPIC, **subscription) as stream:  # type: ignore[arg-type]
        while True:
            quiet_s = QUIET_S if counts.total() >= expected else PATIENCE_S
            messages = await stream.receive_many(1000, timeout_s=quiet_s)
            if not messages:
                return counts
            for message in messages:
                counts[message.tag or ""] += 1
                await message.ack()


def source(reader: Any, name_server: str, topic: str) -> Any:
    """The `rocketmq` source, batch or streaming."""
    return reader.format("rocketmq").option("nameServers", name_server).option("topic", topic)


def stream_to_parquet(session: Any, name_server: str, directory: Path) -> tuple[int, int]:
    """Late and far flights, filtered at the broker, into Parquet: (rows, sum of arr_delay)."""
    frame = (
        source(session.readStream, name_server, TOPIC)
        .option("startingOffsets", "earliest")
        .option("filter.sql", truth.LATE_AND_FAR)
        .option("maxOffsetsPerTrigger", "150000")
        .option("columns", "tags,queue_id,queue_offset,store_time,body,prop:arr_delay:int")
        .load()
    )
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(directory / "late"))
    )
    query.awaitTermination()
    found = session.read.parquet(str(directory / "late")).selectExpr(
        "count(*) as rows", "coalesce(sum(arr_delay), 0) as minutes"
    )
    row = found.first()
    return row.rows, row.minutes


def delays_by_carrier(session: Any, name_server: str) -> dict[str, tuple[int, int]]:
    """Summer flights by carrier, through a topic of their own: carrier -> (flights, minutes).

    The predicate on `month` is evaluated at the broker; `dep_delay is not null` by Spark, because
    a property can be there and still be no number.
    """
    flights = load_where(
        session,
        f"month >= {truth.SUMMER[0]} and month <= {truth.SUMMER[-1]}",
        nameServers=name_server,
        topic=TOPIC,
        columns="tags,prop:month:int,prop:dep_delay:int",
    )
    table = (
        flights.where("dep_delay is not null")
        .groupBy("tags")
        .agg({"*": "count", "dep_delay": "sum"})
        .toDF("carrier", "flights", "minutes")
    )
    report = table.selectExpr("carrier as tag", "to_json(struct(*)) as value")
    sink = report.write.format("rocketmq").option("nameServers", name_server)
    sink.option("topic", REPORT).mode("append").save()
    rows = (
        source(session.read, name_server, REPORT)
        .load()
        .selectExpr("from_json(cast(body as string), 'carrier string, flights int, minutes int') r")
        .selectExpr("r.*")
        .collect()
    )
    return {row.carrier: (row.flights, row.minutes) for row in sorted(rows)}


# --------------------------------------------------------------------------------- whole


class Steps:
    """Runs the steps one after another and says what each one takes."""

    def __init__(self) -> None:
        self._number = 0

    def run(self, title: str, work: Callable[[], T]) -> T:
        self._number += 1
        console.print(f"[bold]{self._number}[/bold] {title}")
        started = time.monotonic()
        result = work()
        console.print(f"  done in {time.monotonic() - started:.1f} s")
        return result


Line = tuple[str, object, object]


def lines(every: int) -> list[Line]:
    """Does everything; (what, found, truth) of each number."""
    steps = Steps()
    wanted = steps.run(
        "the truth, from the CSV in plain Python", lambda: truth.truth_of(truth.flights(every))
    )
    with tempfile.TemporaryDirectory(prefix="sluicemq-flights-") as text:
        directory = Path(text)
        with cluster(directory / "store") as name_server:
            published = steps.run(
                f"publish {wanted.published:,} flights",
                lambda: publish(name_server, truth.flights(every), wanted.published),
            )
            by_tag, by_selector = steps.run(
                f"consume: tags {truth.TAGS}, and {truth.LATE_AT_JFK}",
                lambda: asyncio.run(consume(name_server, wanted)),
            )
            with contextlib.ExitStack() as stack:
                session = steps.run("start Spark", lambda: stack.enter_context(spark(directory)))
                rows, minutes = steps.run(
                    f"stream into Parquet with Spark: {truth.LATE_AND_FAR}",
                    lambda: stream_to_parquet(session, name_server, directory),
                )
                carriers = steps.run(
                    "delay by carrier with Spark, written to a topic and read again",
                    lambda: delays_by_carrier(session, name_server),
                )
    tags = sorted(wanted.by_tag | by_tag)
    return [
        ("published", published, wanted.published),
        *((f"delivered by tag {tag}", by_tag[tag], wanted.by_tag[tag]) for tag in tags),
        ("delivered by SQL92", by_selector, wanted.late_at_jfk),
        ("rows in Parquet", rows, wanted.late_and_far),
        ("minutes of delay in them", minutes, wanted.late_and_far_minutes),
        ("carriers read back", len(carriers), len(wanted.carriers)),
        ("their summer flights", *totals(carriers, wanted, 0)),
        ("their minutes of delay", *totals(carriers, wanted, 1)),
        ("carriers that differ", differing(carriers, wanted.carriers), "none"),
    ]


def totals(found: dict[str, tuple[int, int]], wanted: truth.Truth, place: int) -> tuple[int, int]:
    """Sum over carriers, as found and in truth."""
    return (
        sum(pair[place] for pair in found.values()),
        sum(pair[place] for pair in wanted.carriers.values()),
    )


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The carriers whose pair is not the truth's."""
    names = sorted(set(found) | set(wanted))
    return ", ".join(name for name in names if found.get(name) != wanted.get(name)) or "none"


def show(found: list[Line], seconds: float) -> bool:
    """Prints the table and the verdict; true when everything agrees."""
    table = Table(title="New York 2013, through SluiceMQ and Spark")
    for name, justify in (("", "left"), ("found", "right"), ("truth", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for what, is_, ought in found:
        verdict = "[green]agrees[/green]" if is_ == ought else "[red]differs[/red]"
        table.add_row(what, _text(is_), _text(ought), verdict)
    console.print(table)
    wrong = sum(is_ != ought for _, is_, ought in found)
    if wrong:
        console.print(
            f"[bold red]{wrong} of {len(found)} numbers differ from the truth.[/bold red]"
        )
    else:
        console.print(f"[bold green]All {len(found)} numbers agree[/bold green] ({seconds:.0f} s).")
    return not wrong


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _terminated(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help=f"only every {SHORT_EVERY}th flight")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    interrupts: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    started = time.monotonic()
    try:
        found = lines(SHORT_EVERY if arguments.short else 1)
    except BaseException:
        if not interrupts:  # Control-C reaches Spark's workers too: what breaks then is no news
            raise
        console.print("interrupted; servers and Spark are closed.")
        return 130
    return 0 if show(found, time.monotonic() - started) else 1


if __name__ == "__main__":
    sys.exit(main())
