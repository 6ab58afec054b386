"""Commands on Spark: `sluice sql QUERY`, Spark SQL over topics, archives, dead letters, retries and
traces; `sluice pipeline run|check|list`, pipelines from a file.

What names mean and what the broker decides: `spark.tables`. The first answer takes as
long as the JVM does to start, so it starts first, in a thread; the cluster is asked meanwhile.
Table and lines come one by one to this process; Parquet is written by Spark's tasks.

`pipeline run` writes progress to stderr, so stdout is free for `--json`: a line for each event, or
the plan of a dry run. `check` needs neither cluster nor Spark. Exit codes: 0 done, 1 problems in
the file or a failure, 2 wrong usage.
"""

import contextlib
import csv
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import orjson

from sluicemq.cli.ending import OptionError
from sluicemq.cli.output import (
    Access,
    client_options,
    json_option,
    parse_ago,
    print_json,
    print_records,
    print_table,
    progress_bar,
)
from sluicemq.errors import ConfigurationError, SluiceError, install_extra

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
TABLE, JSON, CSV, PARQUET = FORMATS = ("table", "json", "csv", "parquet")
CELL_CHARACTERS_MAX: Final = 200
ROWS_SHOWN: Final = 100
PROGRESS_PERIOD_S: Final = 0.2
_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "8",
    # A short-lived JVM: the second compiler would be busy until after the answer.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@click.command()
@click.argument("query")
@click.option(
    "--archive", "archives", multiple=True, metavar="[NAME=]PATH",
    help="A directory of the pipeline `archive`, or any Parquet; repeatable. Without NAME it is "
    "`archive`, and `archive.TOPIC`.",
)  # fmt: skip
@click.option(
    "--since", help="Only what was stored then or later: 6h, 7d, milliseconds, or a date."
)
@click.option("--until", help="Only what was stored before.")
@click.option(
    "--limit", type=click.IntRange(1), help=f"Most rows; a table has {ROWS_SHOWN} without it."
)
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default=TABLE, show_default=True,
    help="json: a line a row.",
)  # fmt: skip
@click.option("--output", type=click.Path(), help="A file; of parquet a directory, which is new.")
@click.option(
    "--explain", is_flag=True, help="Say what the broker decides and what Spark; run nothing."
)
@click.option("--master", default="local[*]", show_default=True, help="Spark's master.")
@client_options
def sql(
    access: Access,
    query: str,
    archives: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int | None,
    form: str,
    output: str | None,
    explain: bool,
    master: str,
) -> None:
    """Run QUERY, Spark SQL, over topics, archives, dead letters, retries and traces.

    A name is a topic; `dead_letters.GROUP`, `retries.GROUP`, `traces`, `archive.TOPIC` are others.
    """
    target = file_of(form, output)
    times = {"since_ms": moment_ms(since, "--since"), "until_ms": moment_ms(until, "--until")}
    split = (one.partition("=") for one in archives)
    named = {name if mark else "": path if mark else name for name, mark, path in split}
    connection = {"nameServers": access.name_servers, **signed(access.credentials)}
    connection |= {} if explain else {"reportPushdown": "false"}

    def topics() -> list[str]:
        with access.admin() as admin:  # imported here: the JVM starts first
            return admin.topics()

    with _session(master) as (session, asked), _first_line():
        found = asked(topics)
        from sluicemq.pipelines.tables import Tables  # noqa: PLC0415 - pyspark

        tables = Tables(session.result(), connection, found.result, archives=named, **times)
        frame = tables.query(query.rstrip().rstrip(";"))
        if explain:
            from sluicemq.spark.report import pushdown  # noqa: PLC0415 - pyspark

            decided = pushdown(frame)
            for who, what in (("broker", decided.broker), ("Spark", decided.spark)):
                click.echo(f"{who + ':':8}{', '.join(what) or 'nothing'}")
        elif form == TABLE:
            most = limit or ROWS_SHOWN
            rows = _with_progress(frame, lambda: frame.limit(most + 1).collect())
            cells = [[_cell(value, CELL_CHARACTERS_MAX) for value in row] for row in rows[:most]]
            print_table("", frame.columns, cells)
            if len(rows) > most:
                more = f"The first {most:,} rows; --limit or --format json shows more."
                click.echo(more, err=True)
        else:
            wanted = frame if limit is None else frame.limit(limit)
            count = _with_progress(wanted, lambda: write_frame(wanted, form, target))
            if target is not None:
                click.echo(f"{count:,} rows in {target}.", err=True)


Asked = Callable[[Callable[[], list[str]]], "Future[list[str]]"]


@contextmanager
def _session(master: str) -> "Iterator[tuple[Future[SparkSession], Asked]]":
    """A session that is on its way, and a way to ask something else meanwhile."""

    def start() -> "SparkSession":
        from sluicemq.spark.session import spark_session  # noqa: PLC0415 - a second

        return spark_session("sluice sql", master=master, settings=dict(_SETTINGS), log_level="off")

    with _quiet():
        pool = ThreadPoolExecutor(2)
        session: Future[SparkSession] = pool.submit(start)
        is_ended_in_order = True
        try:
            yield session, pool.submit
        except KeyboardInterrupt:  # the process ends, and the JVM with it
            is_ended_in_order = False
            raise
        finally:
            pool.shutdown(wait=is_ended_in_order)
            if is_ended_in_order and session.exception() is None:
                session.result().stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Spark's own words while it starts, pyspark's log of every error that it raises, and
    py4j's traceback of Ctrl-C, which it writes by the root logger."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    logging.getLogger("SQLQueryContextLogger").disabled = True
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    logging.root.disabled = True
    try:
        yield
    finally:
        logging.root.disabled = False


@contextmanager
def _first_line() -> Iterator[None]:
    """Errors of Spark as one sentence."""
    try:
        yield
    except ImportError as error:
        if error.name and error.name.partition(".")[0] not in ("pyspark", "py4j"):
            raise
        raise ConfigurationError("Spark is not installed.", fix=install_extra("spark")) from None
    except Exception as error:
        is_sparks = type(error).__module__.partition(".")[0] in ("pyspark", "py4j")
        if isinstance(error, SluiceError) or not is_sparks:
            raise
        from sluicemq.pipelines.plan import summarize_spark_error  # noqa: PLC0415 - it is Spark's

        raise ConfigurationError(summarize_spark_error(error)) from None


def signed(pair: tuple[str, str] | None) -> dict[str, str]:
    return {} if pair is None else {"accessKey": pair[0], "secretKey": pair[1]}


def moment_ms(text: str | None, option: str) -> int | None:
    """`6h` ago, milliseconds since 1970 or a date. Raises OptionError."""
    if text is None:
        return None
    if (ago_ms := parse_ago(text)) is not None:
        return ago_ms
    from sluicemq.spark.options import parse_timestamp  # noqa: PLC0415 - rarely asked for

    try:
        return parse_timestamp(text)
    except ValueError as error:
        raise OptionError(
            f"{option} {text!r} is no time: {error}.",
            fix="Write 30m, 6h or 7d, milliseconds since 1970, or 2026-11-21T12:00:00Z.",
        ) from None


def _with_progress(frame: "DataFrame", work: Callable[[], T]) -> T:
    """The work, with a bar of Spark's tasks beside it when stderr is a terminal."""
    if not sys.stderr.isatty():
        return work()
    bar = progress_bar("MofNCompleteColumn", "TimeElapsedColumn")
    from sluicemq.spark.classic import get_spark_context  # noqa: PLC0415 - Spark's alone

    context = get_spark_context(frame.sparkSession)
    tracker = context.statusTracker()
    with ThreadPoolExecutor(1) as pool, bar:
        task = bar.add_task("planning", total=None)
        running = pool.submit(work)
        seen: dict[int, tuple[int, int]] = {}
        try:
            while wait_for([running], timeout=PROGRESS_PERIOD_S).not_done:
                for stage in tracker.getActiveStageIds():
                    about = tracker.getStageInfo(stage)
                    if about is not None:
                        seen[int(stage)] = (about.numCompletedTasks, about.numTasks)
                done, total = (sum(pair[at] for pair in seen.values()) for at in (0, 1))
                if total:
                    bar.update(task, description="tasks", completed=done, total=total)
        except KeyboardInterrupt:  # the pool waits for its thread
            context.cancelAllJobs()
            raise
        return running.result()


# --------------------------------------------------------------------------------- rows


def file_of(form: str, output: str | None) -> str | None:
    """Where to write; None: stdout. Raises OptionError when the format does not go there."""
    if form == PARQUET and output is None:
        raise OptionError("parquet is no text.", fix="Name a directory with --output.")
    if form == TABLE and output is not None:
        raise OptionError("a table goes to the terminal.", fix="Add --format json, csv or parquet.")
    return output


def plain(value: Any) -> Any:
    """What JSON can hold: bytes as text, in hex digits where they are none; times in ISO 8601."""
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, dict):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _cell(value: Any, characters_max: int | None = None) -> Any:
    """What a table and CSV show: nested values as JSON."""
    value = plain(value)
    if isinstance(value, dict | list):
        value = orjson.dumps(value).decode()
    if characters_max and isinstance(value, str) and len(value) > characters_max:
        return value[:characters_max] + "…"
    return value


def write_frame(frame: "DataFrame", form: str, target: str | None) -> int:
    """All rows; how many. Raises ConfigurationError when the file cannot be written."""
    if form == PARQUET:
        assert target is not None
        frame.write.parquet(target)
        return int(frame.sparkSession.read.parquet(target).count())
    try:
        file = (
            contextlib.nullcontext(sys.stdout)
            if target is None
            else open(target, "w", encoding="utf-8", newline="")  # noqa: PTH123, SIM115
        )
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror}.") from None
    count = 0
    with file as lines:
        writer = csv.writer(lines, lineterminator="\n")
        if form == CSV:
            writer.writerow(frame.columns)
        for row in frame.toLocalIterator(prefetchPartitions=True):
            if form == CSV:
                writer.writerow(map(_cell, row))
            else:
                record = dict(zip(frame.columns, map(plain, row), strict=True))
                lines.write(f"{orjson.dumps(record, default=str).decode()}\n")
            count += 1
        lines.flush()
    return count


# ----------------------------------------------------------------------------- pipeline


@click.group()
def pipeline() -> None:
    """Run, check and list data pipelines on Spark."""


@pipeline.command("run")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--master", help="Spark's master, as in spark://host:7077; default local[*].")
@click.option(
    "--conf", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; repeatable."
)
@click.option(
    "--progress", type=click.Path(file_okay=False), default="", envvar="SLUICE_PIPELINES",
    help="Directory where it leaves how far it is, for `sluice console --pipelines`.",
)  # fmt: skip
@json_option
def run_command(
    file: str,
    dry_run: bool,
    master: str | None,
    settings: tuple[str, ...],
    progress: str,
    as_json: bool,
) -> None:
    """Run the pipeline of FILE.

    Ctrl-C and SIGTERM let a stream finish its micro-batch; a second one stops at once.
    """
    from sluicemq.pipelines.__main__ import run_file  # noqa: PLC0415 - pyspark

    wrong = [one for one in settings if "=" not in one]
    if wrong:
        raise click.UsageError(f"--conf is {wrong[0]!r}: write KEY=VALUE.")
    chosen = dict(one.split("=", 1) for one in settings)
    with _quiet():
        code = run_file(
            file,
            master=master,
            settings=chosen,
            dry_run=dry_run,
            as_json=as_json,
            progress=progress,
        )
    raise SystemExit(code)


@pipeline.command("check")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@json_option
@click.pass_context
def check_command(context: click.Context, file: str, as_json: bool) -> None:
    """Say what is wrong in FILE: line, key, cure. Needs no cluster and starts no Spark."""
    from sluicemq.pipelines.file import check_pipeline  # noqa: PLC0415 - pyspark

    found, problems = check_pipeline(file)
    for one in problems:
        if as_json:
            print_json({
                "file": file, "line": one.line, "key": one.key, "what": one.message,
                "cure": one.fix, "severity": "error" if one.is_error else "warning",
            })  # fmt: skip
        else:
            click.echo(one.describe(file))
    if found is None:
        context.exit(1)
    if not as_json:
        click.echo(f"{file}: the pipeline {found.name!r} is right.")


@pipeline.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the ready pipelines (`use: NAME`) and their fields."""
    from sluicemq.pipelines.ready import NAMES, REQUIRED, find_ready_pipeline  # noqa: PLC0415 - pyspark

    if not as_json:
        for name in NAMES:
            click.echo(f"{name}: {find_ready_pipeline(name).description}")
        click.echo()
    records = [
        {
            "pipeline": name,
            "field": one.name,
            "kind": " | ".join(one.choices) or one.kind,
            "default": "required" if one.default is REQUIRED else one.default,
            "what": one.description,
        }
        for name in NAMES
        for one in find_ready_pipeline(name).fields
    ]
    print_records(records, as_json=as_json)
