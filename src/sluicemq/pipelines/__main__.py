"""Run a pipeline file as a program: `sluice pipeline run`, and `python -m` for spark-submit.

The program uses the Spark session of spark-submit, or creates one. It prints events as text to
stderr, or as JSON lines to stdout, and handles SIGINT and SIGTERM as requests to stop. The exit
code is 0 if the run completed, or stopped with nothing skipped. It is 1 if a sink was skipped, or a
ready pipeline was asked to fail on findings and has some.

For spark-submit: `spark-submit … sluicemq/pipelines/__main__.py FILE`. That is the same as `sluice
pipeline run FILE`, but needs none of the packages of the command line. It is also `python -m
sluicemq.pipelines FILE [--master M] [--conf K=V] [--dry-run] [--json]`.
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
from sluicemq.pipelines.plan import plan
from sluicemq.pipelines.record import record_progress
from sluicemq.pipelines.run import Event, Listener, StopRequest, run, stop_on_signals
from sluicemq.spark.errors import summarize_spark_error
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
    """Run the pipeline of a file, or with `dry_run` print its plan. Return the exit code.

    Warnings about the file are printed to stderr. `master` is Spark's master. None means the master
    in the settings or of spark-submit, or else all cores of this machine. `settings` are Spark
    settings, which override the file's settings. With `as_json`, events or the plan are printed as
    JSON to stdout. `progress` is the directory for the progress file; "" means no file. Raises
    SluiceError.
    """
    pipeline = load_pipeline(path)
    for warning in pipeline.warnings:
        _print_to_stderr(warning.describe(path))
    with record_progress("" if dry_run else progress, pipeline) as record:
        return run_in_session(pipeline, master, settings or {}, record, dry_run, as_json)


def run_in_session(
    pipeline: Pipeline,
    master: str | None,
    settings: Mapping[str, str],
    record: Listener,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Create a Spark session, run a pipeline or print its plan in it, and stop the session.

    Return the exit code. `master` and `settings` are for the session. `record` is called with each
    event. With `dry_run`, the plan is printed. With `as_json`, the output is JSON. Raises
    SluiceError, without secrets in its text.
    """
    spark = create_session(pipeline, master, settings)
    try:
        if dry_run:
            planned = plan(pipeline, spark)
            _print_to_stdout(planned.figures if as_json else planned.describe())
            return 0
        return run_pipeline(pipeline, spark, as_json=as_json, record=record)
    except SluiceError as error:
        # Attributes and causes of the error may contain secrets, so only its text is passed on.
        raise ConfigurationError(pipeline.secrets.mask(str(error))) from None
    finally:
        with suppress(Exception):
            spark.stop()


def create_session(
    pipeline: Pipeline, master: str | None, settings: Mapping[str, str]
) -> "SparkSession":
    """Return a Spark session with the file's Spark settings, overridden by `settings`.

    The session logs warnings and errors only. Its warehouse directory is in the directory for
    temporary files, so that none appears in the working directory. Raises ConfigurationError if
    Spark does not start.
    """
    submitted_master = _find_submitted_master()
    warehouse = str(Path(tempfile.gettempdir()) / "sluicemq-spark-warehouse")
    all_settings = {"spark.sql.warehouse.dir": warehouse, **pipeline.spark_settings, **settings}
    chosen_master = master
    if not chosen_master:
        configured_master = all_settings.pop("spark.master", None)
        chosen_master = configured_master or submitted_master or "local[*]"

    root = Path(sluicemq.__file__).parents[1]
    is_installed = root.name == "site-packages"
    if not chosen_master.startswith("local") and not is_installed:
        # Executors on this machine must find a checkout that is not installed.
        all_settings.setdefault("spark.executorEnv.PYTHONPATH", str(root))
    try:
        return spark_session(
            pipeline.name, master=chosen_master, settings=all_settings, log_level="warn"
        )
    except SluiceError:
        raise
    except Exception as error:
        raise ConfigurationError(f"Spark does not start: {summarize_spark_error(error)}") from error


def _find_submitted_master() -> str | None:
    """Return the master that was given to spark-submit.

    Return None if spark-submit is not used, or got no master.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    # spark-submit has started the JVM, with its settings.
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - a slow import

    SparkContext._ensure_initialized()
    submitted_master: str | None = SparkConf().get("spark.master", None)
    return submitted_master


def run_pipeline(
    pipeline: Pipeline,
    spark: "SparkSession",
    *,
    as_json: bool,
    record: Listener = lambda _event: None,
) -> int:
    """Run a pipeline until it ends or a signal stops it, and return the exit code.

    The exit code is 1 if sinks were skipped or the report is a failure, else 0. Events are printed,
    as JSON lines to stdout if `as_json` is True, else as text to stderr. `record` is called with
    each event.
    """

    def handle_event(event: Event) -> None:
        """Record and print one event."""
        record(event)
        if as_json:
            _print_to_stdout(event.as_json())
        else:
            _print_to_stderr(event.text)

    def announce_stop(text: str) -> None:
        """Handle the event that the run is being stopped."""
        handle_event(Event("stopping", f"{pipeline.name}: {text}"))

    stop = StopRequest(announce_stop)
    with stop_on_signals(stop):
        report = run(pipeline, spark, listener=handle_event, stopping=stop)
    has_failed = report.skipped or report.is_failure
    return 1 if has_failed else 0


def _print_to_stdout(output: Any) -> None:
    """Print a text as it is, and any other value as one line of JSON."""
    if isinstance(output, str):
        line = output.encode() + b"\n"
    else:
        line = orjson.dumps(output, default=str, option=orjson.OPT_APPEND_NEWLINE)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _print_to_stderr(line: str) -> None:
    """Print one line to stderr, and flush it."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main() -> int:
    """Parse the command line, run the file, and return the exit code.

    A SluiceError is printed to stderr, and the exit code is 1.
    """
    parser = argparse.ArgumentParser(prog="sluicemq.pipelines", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--master", help="Spark's master; default: spark-submit's, else local[*].")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="Print what a run would do.")
    parser.add_argument("--json", action="store_true", help="Print JSON lines to stdout.")
    parser.add_argument("--progress", default="", help="Directory for the progress file.")
    arguments = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in arguments.conf if "=" in setting)
    try:
        return run_file(
            arguments.file,
            master=arguments.master,
            settings=settings,
            dry_run=arguments.dry_run,
            as_json=arguments.json,
            progress=arguments.progress,
        )
    except SluiceError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
