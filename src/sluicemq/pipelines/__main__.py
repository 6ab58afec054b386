"""Runs a pipeline file as a program: `sluice pipeline run`, and `python -m` for spark-submit.

Finds or makes the Spark session, sends events where they belong (text to stderr, JSON lines to
stdout), and takes SIGINT and SIGTERM for a wish to stop. Exit code 0: done, or stopped in order
with nothing left out; 1: something was left out, or a ready pipeline was asked to fail on findings.

For spark-submit: `spark-submit … sluicemq/pipelines/__main__.py FILE`, the same as `sluice
pipeline run FILE` without the command line's packages; also
`python -m sluicemq.pipelines FILE [--master M] [--conf K=V] [--dry-run] [--json]`.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

import sluicemq
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.pipelines.file import Pipeline, load_pipeline
from sluicemq.pipelines.plan import plan, sentence_of
from sluicemq.pipelines.record import recording
from sluicemq.pipelines.run import Event, Listener, Stop, run, stop_on_signals
from sluicemq.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_file(
    path: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    progress: str = "",
) -> int:
    """Runs a file, or plans it, and returns the exit code. `master`: None takes the session that
    spark-submit has set up, else all cores of this machine. `progress`: the directory where a run
    leaves how far it is, "" for none. Raises SluiceError."""
    pipeline = load_pipeline(path)
    for warning in pipeline.warnings:
        _to_stderr(warning.describe(path))
    with recording("" if dry_run else progress, pipeline) as record:
        return run_in_session(pipeline, master, settings or {}, record, dry_run, as_json)


def run_in_session(
    pipeline: Pipeline,
    master: str | None,
    settings: Mapping[str, str],
    record: Listener,
    dry_run: bool,
    as_json: bool,
) -> int:
    """The same of a pipeline that is loaded; `record` hears its events too."""
    spark = session_for(pipeline, master, settings)
    try:
        if dry_run:
            found = plan(pipeline, spark)
            _to_stdout(found.figures if as_json else found.told())
            return 0
        return run_pipeline(pipeline, spark, as_json=as_json, record=record)
    except SluiceError as error:  # as text alone, without secrets
        raise ConfigurationError(pipeline.secrets.mask(str(error))) from None
    finally:
        with suppress(Exception):
            spark.stop()


def session_for(
    pipeline: Pipeline, master: str | None, settings: Mapping[str, str]
) -> "SparkSession":
    """A session with the file's settings under `spark:` and the given ones, which win: quiet, and
    with no `spark-warehouse` where the user happens to be.

    Raises ConfigurationError when Spark does not start.
    """
    submitted: str | None = None
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has made the JVM, with its settings
        from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - takes a second

        SparkContext._ensure_initialized()
        submitted = SparkConf().get("spark.master", None)
    warehouse = str(Path(tempfile.gettempdir()) / "sluicemq-spark-warehouse")
    chosen = {"spark.sql.warehouse.dir": warehouse, **pipeline.settings, **settings}
    where = master or chosen.pop("spark.master", None) or submitted or "local[*]"
    root = Path(sluicemq.__file__).parents[1]
    if not where.startswith("local") and root.name != "site-packages":
        # So that executors on this machine find a checkout that is not installed.
        chosen = {"spark.executorEnv.PYTHONPATH": str(root)} | chosen
    try:
        return spark_session(pipeline.name, master=where, settings=chosen, log_level="warn")
    except SluiceError:
        raise
    except Exception as error:
        raise ConfigurationError(f"Spark does not start: {sentence_of(error)}") from error


def run_pipeline(
    pipeline: Pipeline,
    spark: "SparkSession",
    *,
    as_json: bool,
    record: Listener = lambda _event: None,
) -> int:
    """Runs it, prints its events, and returns the exit code."""

    def hear(event: Event) -> None:
        record(event)
        if as_json:
            _to_stdout(event.as_json())
        else:
            _to_stderr(event.text)

    stop = Stop(lambda text: hear(Event("stopping", f"{pipeline.name}: {text}")))
    with stop_on_signals(stop):
        outcome = run(pipeline, spark, listener=hear, stopping=stop)
    return 1 if outcome.left or outcome.is_failure else 0


def _to_stdout(value: Any) -> None:
    text = value.encode() + b"\n" if isinstance(value, str) else orjson.dumps(
        value, default=str, option=orjson.OPT_APPEND_NEWLINE)  # fmt: skip
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="sluicemq.pipelines", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--master", help="Spark's master; default: spark-submit's, else local[*].")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="Say what would be done.")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout.")
    parser.add_argument("--progress", default="", help="Directory for its progress.")
    given = parser.parse_args()
    settings = dict(one.split("=", 1) for one in given.conf if "=" in one)
    try:
        return run_file(given.file, master=given.master, settings=settings,
                        dry_run=given.dry_run, as_json=given.json,
                        progress=given.progress)  # fmt: skip
    except SluiceError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
