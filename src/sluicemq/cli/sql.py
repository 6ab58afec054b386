"""`sluice sql QUERY`: Spark SQL over topics, archives, dead letters, retries and traces.

What names mean and what the broker decides: `spark.tables`, docs/sql.md. The first answer takes as
long as the JVM does to start, so it starts first, in a thread; the cluster is asked meanwhile.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from sluicemq.cli.output import client_options, credentials, print_table
from sluicemq.cli.sql_output import FORMATS, TABLE, file_of, write_frame, write_rows
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, SluiceError, install_extra

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_SHOWN: Final = 100
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
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
def command(
    query: str,
    archives: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int | None,
    form: str,
    output: str | None,
    explain: bool,
    master: str,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
) -> None:
    """Run QUERY, Spark SQL, over topics, archives, dead letters, retries and traces.

    A name is a topic; `dead_letters.GROUP`, `retries.GROUP`, `traces`, `archive.TOPIC` are others.
    """
    target = file_of(form, output)
    times = {"since_ms": moment_ms(since, "--since"), "until_ms": moment_ms(until, "--until")}
    named = dict(_archive(one) for one in archives)
    pair = credentials(access_key, secret_key)
    connection = {"nameServers": name_servers, **_signed(pair)}
    connection |= {} if explain else {"reportPushdown": "false"}

    def topics() -> list[str]:
        from sluicemq.client.sync.admin import Admin  # noqa: PLC0415 - the JVM starts first

        with Admin(name_servers, credentials=pair) as admin:
            return admin.topics()

    with _session(master) as (session, asked), _first_line():
        found = asked(topics)
        from sluicemq.spark.tables import Tables  # noqa: PLC0415 - pyspark

        tables = Tables(session.result(), connection, found.result, archives=named, **times)
        frame = tables.query(query.rstrip().rstrip(";"))
        if explain:
            _explain(frame)
        elif form == TABLE:
            _show(frame, limit or ROWS_SHOWN)
        else:
            with_limit = frame if limit is None else frame.limit(limit)
            _write(with_limit, form, target)


Asked = Callable[[Callable[[], list[str]]], "Future[list[str]]"]


@contextmanager
def _session(master: str) -> "Iterator[tuple[Future[SparkSession], Asked]]":
    """A session that is on its way, and a way to ask something else meanwhile."""

    def start() -> "SparkSession":
        from sluicemq.spark.session import spark_session  # noqa: PLC0415 - a second

        return spark_session("sluice sql", master=master, settings=dict(_SETTINGS), log_level="off")

    _mute()
    pool = ThreadPoolExecutor(2)
    session: Future[SparkSession] = pool.submit(start)
    try:
        yield session, pool.submit
    finally:
        pool.shutdown(wait=True)
        if session.exception() is None:
            session.result().stop()


def _mute() -> None:
    """Spark's own words while it starts, and pyspark's log of every error that it raises."""
    import warnings  # noqa: PLC0415

    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    logging.getLogger("SQLQueryContextLogger").disabled = True
    logging.getLogger("DataFrameQueryContextLogger").disabled = True


@contextmanager
def _first_line() -> Iterator[None]:
    """Errors of Spark as one sentence."""
    try:
        yield
    except ImportError as error:
        if error.name and error.name.partition(".")[0] not in ("pyspark", "py4j"):
            raise
        raise ConfigurationError("Spark is not installed.", cure=install_extra("spark")) from None
    except Exception as error:
        if isinstance(error, SluiceError) or not _is_sparks(error):
            raise
        from sluicemq.spark.pipelines.frames import sentence_of  # noqa: PLC0415 - it is Spark's

        raise ConfigurationError(sentence_of(error)) from None


def _is_sparks(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j")


def _signed(pair: tuple[str, str] | None) -> dict[str, str]:
    return {} if pair is None else {"accessKey": pair[0], "secretKey": pair[1]}


def _archive(text: str) -> tuple[str, str]:
    name, mark, path = text.partition("=")
    return (name, path) if mark else ("", text)


def moment_ms(text: str | None, option: str) -> int | None:
    """`6h` ago, milliseconds since 1970 or a date. Raises ConfigurationError."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS_S and number.isdecimal():
        return SYSTEM_CLOCK.now_ms() - int(number) * _UNITS_S[unit] * 1000
    from sluicemq.spark.options import moment  # noqa: PLC0415 - rarely asked for

    try:
        return moment(text)
    except ValueError:
        raise ConfigurationError(
            f"{option} {text!r} is no time.",
            cure="Write 30m, 6h or 7d, milliseconds since 1970, or 2026-11-21T12:00:00Z.",
        ) from None


def _explain(frame: "DataFrame") -> None:
    from sluicemq.spark.report import pushdown  # noqa: PLC0415 - pyspark

    found = pushdown(frame)
    for who, what in (("broker", found.broker), ("Spark", found.spark)):
        click.echo(f"{who + ':':8}{', '.join(what) or 'nothing'}")


def _show(frame: "DataFrame", limit: int) -> None:
    rows = with_progress(frame, lambda: frame.limit(limit + 1).collect())
    write_rows(frame.columns, rows[:limit], print_table)
    if len(rows) > limit:
        click.echo(f"The first {limit:,} rows; --limit or --format json shows more.", err=True)


def _write(frame: "DataFrame", form: str, target: str | None) -> None:
    count = with_progress(frame, lambda: write_frame(frame, form, target))
    if target is not None:
        click.echo(f"{count:,} rows in {target}.", err=True)


def with_progress(frame: "DataFrame", work: Callable[[], Any]) -> Any:
    """The work, with a bar of Spark's tasks beside it when stderr is a terminal."""
    if not sys.stderr.isatty():
        return work()
    from sluicemq.cli.sql_progress import task_bar  # noqa: PLC0415 - rich

    return task_bar(frame.sparkSession.sparkContext.statusTracker(), work)
