"""Commands on Spark: `sluice sql` runs one query, and `sluice pipeline` runs pipelines of a file.

`pipelines.tables` defines the tables of a query, and which predicates the broker evaluates. The
first result of `sql` takes as long as the JVM takes to start. So the JVM starts first, in a thread,
and the cluster is queried in the meantime. The rows of a table, of JSON and of CSV are fetched to
this process one by one; Parquet is written by Spark's tasks. JSON and CSV are kept in memory, or in
a temporary file, until the query has ended. So a query that fails prints no rows.

`pipeline run` prints its progress to stderr, so that stdout contains only what `--json` prints: a
line for each event, or the plan of a dry run. `pipeline check` needs neither cluster nor Spark.
"""

import contextlib
import csv
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

import click
import orjson

from sluicemq.cli.ending import EXIT_FINDINGS, OptionError
from sluicemq.cli.output import (
    Access,
    client_options,
    json_option,
    make_progress_bar,
    parse_ago,
    print_json,
    print_records,
    print_table,
)
from sluicemq.errors import ConfigurationError, SluiceError, install_extra

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sluicemq.spark.errors import FileProblem

T = TypeVar("T")
TABLE: Final = "table"
JSON: Final = "json"
CSV: Final = "csv"
PARQUET: Final = "parquet"
FORMATS: Final = (TABLE, JSON, CSV, PARQUET)
CELL_CHARACTERS_MAX: Final = 200
"""Longer cells of a table are cut."""
TABLE_ROWS_MAX: Final = 100
"""The number of rows in a table without `--limit`."""
PROGRESS_PERIOD_S: Final = 0.2
SPOOL_BYTES_MAX: Final = 64 << 20
"""A larger result in JSON or CSV is kept in a temporary file until it is complete."""
_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "8",
    # The JVM ends soon: the optimizing compiler would still be busy after the result.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@click.command()
@click.argument("query")
@click.option(
    "--archive",
    "archives",
    multiple=True,
    metavar="[NAME=]PATH",
    help="Directory written by the pipeline `archive`, or any Parquet directory, as table NAME. "
    "Without NAME, its tables are `archive` and `archive.TOPIC`. Repeat for more.",
)
@click.option(
    "--since",
    help="Read only messages stored at or after this time: 6h or 7d ago, a Unix timestamp in "
    "milliseconds, or a date.",
)
@click.option("--until", help="Read only messages stored before this time.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    help=f"Maximum number of rows. Default: {TABLE_ROWS_MAX} for a table, else no limit.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default=TABLE,
    show_default=True,
    help="Format of the result. json is one line for each row.",
)
@click.option(
    "--output",
    type=click.Path(),
    help="File for the result. For parquet, a directory that does not exist. Default: standard "
    "output.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Show which predicates the broker evaluates and which Spark, without running the query.",
)
@click.option(
    "--master", default="local[*]", show_default=True, help="Master URL of the Spark cluster."
)
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
    """Run QUERY in Spark SQL over topics, archives, dead letters, retries and traces.

    Each topic is a table. Other tables are `dead_letters.GROUP`, `retries.GROUP`, `traces` and
    `archive.TOPIC`.
    """
    target = check_output(form, output)
    since_ms = parse_moment(since, "--since")
    until_ms = parse_moment(until, "--until")
    archive_paths = _parse_archives(archives)
    connection = {"nameServers": access.name_servers, **credential_options(access.credentials)}
    if not explain:
        connection["reportPushdown"] = "false"

    def list_topics() -> list[str]:
        """Return the names of all topics. This imports the client, while the JVM starts."""
        with access.admin() as admin:
            return admin.topics()

    with _start_session(master) as (session, submit), _shorten_spark_errors():
        topics_future = submit(list_topics)
        from sluicemq.pipelines.tables import Tables  # noqa: PLC0415 - pyspark

        tables = Tables(
            session.result(),
            connection,
            topics_future.result,
            archives=archive_paths,
            since_ms=since_ms,
            until_ms=until_ms,
        )
        frame = tables.query(query.rstrip().rstrip(";"))
        if explain:
            _print_pushdown(frame)
        elif form == TABLE:
            _print_frame(frame, limit or TABLE_ROWS_MAX)
        else:
            _export_frame(frame if limit is None else frame.limit(limit), form, target)


def _parse_archives(archives: Iterable[str]) -> dict[str, str]:
    """Return name -> path of archives.

    Each text is NAME=PATH, or a path alone, whose name is "".
    """
    path_by_name = {}
    for archive in archives:
        name, separator, path = archive.partition("=")
        if separator:
            path_by_name[name] = path
        else:
            path_by_name[""] = archive
    return path_by_name


def _print_pushdown(frame: "DataFrame") -> None:
    """Print which conditions of a query the broker evaluates and which Spark."""
    from sluicemq.spark.report import pushdown  # noqa: PLC0415 - pyspark

    predicates = pushdown(frame)
    click.echo(f"broker: {', '.join(predicates.broker) or 'nothing'}")
    click.echo(f"Spark:  {', '.join(predicates.spark) or 'nothing'}")


def _print_frame(frame: "DataFrame", rows_max: int) -> None:
    """Print the first `rows_max` rows as a table, and say on stderr if there are more."""
    # One row more than is shown, to know whether there are more.
    rows = _with_progress(frame, lambda: frame.limit(rows_max + 1).collect())
    cell_rows = [
        [_format_cell(value, CELL_CHARACTERS_MAX) for value in row] for row in rows[:rows_max]
    ]
    print_table("", frame.columns, cell_rows)
    if len(rows) > rows_max:
        click.echo(
            f"Only the first {rows_max:,} rows are shown. Use --limit or --format json for more.",
            err=True,
        )


def _export_frame(frame: "DataFrame", form: str, target: str | None) -> None:
    """Write all rows to `target`, and print their number to stderr; None means to stdout."""
    row_count = _with_progress(frame, lambda: write_frame(frame, form, target))
    if target is not None:
        click.echo(f"{row_count:,} rows in {target}.", err=True)


Submit = Callable[[Callable[[], list[str]]], "Future[list[str]]"]
"""Runs a function in a thread, and returns its future."""


@contextmanager
def _start_session(master: str) -> "Iterator[tuple[Future[SparkSession], Submit]]":
    """Return a context manager that starts a Spark session in a thread, and stops it at the end.

    Its value is (future of the session, function that runs other work in a thread). After Ctrl-C
    nothing is awaited, because the process ends at once.
    """

    def start() -> "SparkSession":
        from sluicemq.spark.session import spark_session  # noqa: PLC0415 - a second

        return spark_session("sluice sql", master=master, settings=dict(_SETTINGS), log_level="off")

    with _silence_spark():
        pool = ThreadPoolExecutor(2)
        session: Future[SparkSession] = pool.submit(start)
        is_interrupted = False
        try:
            yield session, pool.submit
        except KeyboardInterrupt:  # the process ends at once, and the JVM with it
            is_interrupted = True
            raise
        finally:
            pool.shutdown(wait=not is_interrupted)
            if not is_interrupted and session.exception() is None:
                session.result().stop()


@contextmanager
def _silence_spark() -> Iterator[None]:
    """Return a context manager in which Spark's Python packages print and log nothing.

    pyspark would log every error that it raises, and py4j the traceback of Ctrl-C.
    """
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
def _shorten_spark_errors() -> Iterator[None]:
    """Return a context manager that turns an error of Spark into a ConfigurationError.

    Its text is one sentence, or says how to install pyspark if that is missing. Other errors pass
    unchanged.
    """
    try:
        yield
    except ImportError as error:
        if error.name and error.name.partition(".")[0] not in ("pyspark", "py4j"):
            raise
        raise ConfigurationError("Spark is not installed.", fix=install_extra("spark")) from None
    except Exception as error:
        is_of_spark = type(error).__module__.partition(".")[0] in ("pyspark", "py4j")
        if isinstance(error, SluiceError) or not is_of_spark:
            raise
        from sluicemq.spark.errors import summarize_spark_error  # noqa: PLC0415 - imports pyspark

        raise ConfigurationError(summarize_spark_error(error)) from None


def credential_options(credentials: tuple[str, str] | None) -> dict[str, str]:
    """Return access key and secret key as options of the Spark source; an empty dict for None."""
    if credentials is None:
        return {}
    access_key, secret_key = credentials
    return {"accessKey": access_key, "secretKey": secret_key}


def parse_moment(moment: str | None, option: str) -> int | None:
    """Return a time in milliseconds since 1970, None for None.

    `moment` is a duration before now such as "6h", milliseconds since 1970, or a date, which is UTC
    unless it has a time zone. `option` is the option's name for the error. Raises OptionError for
    other texts.
    """
    if moment is None:
        return None
    if (time_ms := parse_ago(moment)) is not None:
        return time_ms
    from sluicemq.spark.options import parse_timestamp  # noqa: PLC0415 - imported if needed

    try:
        return parse_timestamp(moment)
    except ValueError as error:
        raise OptionError(
            f"{option} {moment!r} is not a time: {error}.",
            fix="Use an age such as 6h (six hours ago), a Unix timestamp in milliseconds, or a "
            "date and time such as 2026-11-21T12:00:00Z.",
        ) from None


def _with_progress(frame: "DataFrame", work: Callable[[], T]) -> T:
    """Call `work()` and return its result; meanwhile show the progress of Spark's tasks.

    Nothing is shown if stderr is not a terminal. `frame` only tells which session's tasks are
    shown. After Ctrl-C, all jobs of the session are cancelled, and KeyboardInterrupt is raised.
    """
    if not sys.stderr.isatty():
        return work()
    bar = make_progress_bar("MofNCompleteColumn", "TimeElapsedColumn")
    from sluicemq.spark.classic import get_spark_context  # noqa: PLC0415 - pyspark

    spark_context = get_spark_context(frame.sparkSession)
    counter = _TaskCounter(spark_context.statusTracker())
    with ThreadPoolExecutor(1) as pool, bar:
        bar_id = bar.add_task("planning", total=None)
        result = pool.submit(work)
        try:
            while wait_for([result], timeout=PROGRESS_PERIOD_S).not_done:
                counter.update()
                if counter.tasks:
                    bar.update(
                        bar_id,
                        description="tasks",
                        completed=counter.completed_tasks,
                        total=counter.tasks,
                    )
        except KeyboardInterrupt:
            # The pool waits for its thread, which ends when the jobs are cancelled.
            spark_context.cancelAllJobs()
            raise
        return result.result()


class _TaskCounter:
    """Counts the tasks of all stages of Spark that were active at one of its updates."""

    def __init__(self, tracker: Any) -> None:
        """Count no tasks yet. `tracker` is the StatusTracker of a SparkContext."""
        self._tracker = tracker
        self._stages: dict[int, tuple[int, int]] = {}  # id -> (completed tasks, all tasks)

    def update(self) -> None:
        """Ask Spark how many tasks of the active stages are completed, and remember the numbers."""
        for stage_id in self._tracker.getActiveStageIds():
            stage_info = self._tracker.getStageInfo(stage_id)
            if stage_info is not None:
                task_counts = (stage_info.numCompletedTasks, stage_info.numTasks)
                self._stages[int(stage_id)] = task_counts

    @property
    def completed_tasks(self) -> int:
        """The number of completed tasks."""
        return sum(completed for completed, _ in self._stages.values())

    @property
    def tasks(self) -> int:
        """The number of all tasks."""
        return sum(count for _, count in self._stages.values())


# --------------------------------------------------------------------------------- rows


def check_output(form: str, output: str | None) -> str | None:
    """Return `output`, the path for the result; None means standard output.

    Raises OptionError if the format `form` cannot be written there: Parquet needs a directory, and
    a table cannot be written to a file.
    """
    if form == PARQUET and output is None:
        raise OptionError(
            "--format parquet cannot be printed.", fix="Name a directory with --output."
        )
    if form == TABLE and output is not None:
        raise OptionError(
            "--format table cannot be written to a file.", fix="Add --format json, csv or parquet."
        )
    return output


def to_json_value(value: Any) -> Any:
    """Convert a value of a row to a type of JSON.

    Bytes become text, or hexadecimal digits if they are not UTF-8. Times become text in ISO 8601,
    rows dicts, and values of other types their text.
    """
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
        return {str(to_json_value(key)): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _format_cell(value: Any, characters_max: int | None = None) -> Any:
    """Return a value for a cell of a table or of CSV.

    Lists and dictionaries become JSON text. A text longer than `characters_max` is cut and gets
    "…"; None means no limit.
    """
    value = to_json_value(value)
    if isinstance(value, dict | list):
        value = orjson.dumps(value).decode()
    if characters_max and isinstance(value, str) and len(value) > characters_max:
        return value[:characters_max] + "…"
    return value


def write_frame(frame: "DataFrame", form: str, target: str | None) -> int:
    """Write all rows to `target`, and return their number. None means standard output.

    `form` is JSON lines, CSV or Parquet, whose target is a directory. JSON and CSV are written only
    when all rows have been computed. Raises ConfigurationError if the file cannot be written, and
    Spark's errors.
    """
    if form == PARQUET:
        assert target is not None
        frame.write.parquet(target)
        return int(frame.sparkSession.read.parquet(target).count())
    row_count = 0
    with (
        _open_target(target) as file,
        tempfile.SpooledTemporaryFile(SPOOL_BYTES_MAX, "w+", encoding="utf-8", newline="") as spool,
    ):
        csv_writer = csv.writer(spool, lineterminator="\n")
        if form == CSV:
            csv_writer.writerow(frame.columns)
        for row in frame.toLocalIterator(prefetchPartitions=True):
            if form == CSV:
                csv_writer.writerow(map(_format_cell, row))
            else:
                record = dict(zip(frame.columns, map(to_json_value, row), strict=True))
                spool.write(f"{orjson.dumps(record, default=str).decode()}\n")
            row_count += 1
        spool.seek(0)
        shutil.copyfileobj(spool, file)
        file.flush()
    return row_count


def _open_target(target: str | None) -> contextlib.AbstractContextManager[TextIO]:
    """Return a context manager whose value is the file at `target`, or stdout if that is None.

    The file is closed at the end, stdout is not. Raises ConfigurationError if the file cannot be
    written.
    """
    if target is None:
        return contextlib.nullcontext(sys.stdout)
    try:
        return Path(target).open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror}.") from None


# ----------------------------------------------------------------------------- pipeline


@click.group()
def pipeline() -> None:
    """Run, check and list data pipelines on Spark."""


@pipeline.command("run")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.option(
    "--master",
    help="Master URL of the Spark cluster, such as spark://host:7077. Default: local[*].",
)
@click.option(
    "--conf",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting of Spark. It overrides the file. Repeat for more settings.",
)
@click.option(
    "--progress",
    type=click.Path(file_okay=False),
    default="",
    envvar="SLUICE_PIPELINES",
    help="Directory in which the run records its progress, for `sluice console --pipelines`.",
)
@json_option
def run_command(
    file: str,
    dry_run: bool,
    master: str | None,
    settings: tuple[str, ...],
    progress: str,
    as_json: bool,
) -> None:
    """Run the pipeline that FILE declares.

    After Ctrl-C or SIGTERM, a stream finishes its micro-batch. A second one stops it at once.
    """
    from sluicemq.pipelines.__main__ import run_file  # noqa: PLC0415 - pyspark

    spark_settings = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise click.UsageError(f"--conf must be KEY=VALUE, got {setting!r}.")
        spark_settings[key] = value
    with _silence_spark():
        exit_code = run_file(
            file,
            master=master,
            settings=spark_settings,
            dry_run=dry_run,
            as_json=as_json,
            progress=progress,
        )
    raise SystemExit(exit_code)


@pipeline.command("check")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@json_option
@click.pass_context
def check_command(context: click.Context, file: str, as_json: bool) -> None:
    """Check the pipeline in FILE, without a cluster and without Spark.

    Print the line and key of each problem, and how to fix it. Exit code 1 if there are errors.
    """
    from sluicemq.pipelines.file import check_pipeline  # noqa: PLC0415 - pyspark

    pipeline, problems = check_pipeline(file)
    for problem in problems:
        if as_json:
            print_json({"file": file, **_make_problem_record(problem)})
        else:
            click.echo(problem.describe(file))
    if pipeline is None:
        context.exit(EXIT_FINDINGS)
    if not as_json:
        click.echo(f"{file}: the pipeline {pipeline.name!r} is valid.")


def _make_problem_record(problem: "FileProblem") -> dict[str, Any]:
    """Return a problem of a pipeline's file as `pipeline check --json` prints it."""
    return {
        "line": problem.line,
        "key": problem.key,
        "what": problem.message,
        "cure": problem.fix,
        "severity": "error" if problem.is_error else "warning",
    }


@pipeline.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the predefined pipelines (`use: NAME`) and their fields."""
    from sluicemq.pipelines.ready import NAMES, REQUIRED, find_ready_pipeline  # noqa: PLC0415 - pyspark

    if not as_json:
        for name in NAMES:
            click.echo(f"{name}: {find_ready_pipeline(name).description}")
        click.echo()
    records = []
    for name in NAMES:
        for field in find_ready_pipeline(name).fields:
            choices = " | ".join(field.choices)
            default = "required" if field.default is REQUIRED else field.default
            records.append(
                {
                    "pipeline": name,
                    "field": field.name,
                    "kind": choices or field.kind,
                    "default": default,
                    "what": field.description,
                }
            )
    print_records(records, as_json=as_json)
