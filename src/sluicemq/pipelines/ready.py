"""The parts that all ready pipelines share: declared fields, tasks, reports and folders.

A ready pipeline (`ReadyPipeline`) declares its options as `Field`s. Values under `with:` in a file
and keyword arguments of a Python call are checked against them, so its code gets values of the
declared kinds, with defaults filled in. It reports progress with `Task.say` only, checks
`Task.stopping` between two steps, and returns a `Report`. The sinks of a pipeline file declare
their fields in the same way.

Pipelines that send messages again do so in steps that can be resumed: see `pipelines.sinks.steps`.

**Folders.** State is written through Hadoop's file systems, like the data that Spark writes. So a
path may be on a disk, on HDFS or in an object store. A file that decides something is first written
as a whole under another name. It is then renamed, either without replacing an existing file
(`Folder.publish`) or replacing it (`Folder.replace`). So a reader sees the old text or the new one.
"""

import importlib
import json
import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError
from sluicemq.hints import did_you_mean
from sluicemq.numbers import parse_duration_ms
from sluicemq.spark.classic import get_gateway, get_jvm, get_spark_context

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]
BATCH = "batch"
STREAMING = "streaming"
AVAILABLE_NOW: Final = "available-now"
"""The trigger of a stream that reads what is available and ends."""
CHECK_S: Final = 0.1
"""The interval at which a running query is checked."""
FINISH_S: Final = 600.0
"""The longest time that `finish_query` waits for a micro-batch."""
TEXT: Final = "text"
INTEGER: Final = "integer"
NUMBER: Final = "number"
FLAG: Final = "flag"
LIST: Final = "list"
"""A list of texts."""
DURATION: Final = "duration"
"""A text such as `90s`, `15m`, `6h` or `7d`, read as seconds (float)."""
MAPPING: Final = "mapping"
"""A mapping of texts to texts."""
_CELL_CHARACTERS_MAX: Final = 60


def parse_duration_s(text: str) -> float:
    """Return a duration such as "500ms", "90s" or "7d" in seconds.

    Raises ValueError for any other text.
    """
    duration_ms = parse_duration_ms(text.strip())
    if duration_ms is None:
        raise ValueError("write a number with a unit: 500ms, 90s, 15m, 6h or 7d")
    return duration_ms / 1_000


def parse_trigger_s(text: str) -> float | None:
    """Return the seconds between the micro-batches of a stream, or None for `AVAILABLE_NOW`.

    Raises ValueError if `text` is neither `AVAILABLE_NOW` nor a duration.
    """
    return None if text.strip() == AVAILABLE_NOW else parse_duration_s(text)


def spark_trigger(seconds: float | None) -> dict[str, Any]:
    """Return the keyword arguments of `DataStreamWriter.trigger` for an interval in seconds.

    None means that the query reads what is available now and ends.
    """
    if seconds is None:
        return {"availableNow": True}
    return {"processingTime": f"{int(seconds * 1000)} milliseconds"}


class _Required:
    """The default of a field that must be given."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True, slots=True)
class Field:
    """A declared field of a ready pipeline or of a sink.

    `kind` is one of TEXT, INTEGER, NUMBER, FLAG, LIST, DURATION and MAPPING. `description` is shown
    by `sluice pipeline list`. If `choices` is not empty, only these values are valid.
    """

    name: str
    kind: str
    description: str
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """The result of a run.

    `figures` are numbers by name, `files` the paths of written files, and `lines` texts for the
    user. If `is_failure` is True, the run has completed, and its findings are to cause exit code 1.
    Runs of a file with a source and sinks fill `rows`, the rows written by sink (for a stream, the
    rows read for it), and `skipped`, the sinks that were not written because the run was stopped.
    """

    figures: dict[str, int | float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    is_failure: bool = False
    rows: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a ready pipeline.

    `options` has a value for each declared field. `connection` are the options of the `rocketmq`
    source and sink that name the cluster and the credentials (`nameServers`, `accessKey` …). `say`
    is called with each line for the user. `stopping` returns whether the run was asked to stop.
    """

    spark: "SparkSession"
    options: Mapping[str, Any]
    connection: Mapping[str, str]
    say: Callable[[str], None] = print
    stopping: Callable[[], bool] = lambda: False

    def report_lines(self, report: Report, *lines: str) -> None:
        """Call `say` with each of the lines, and add them to the report."""
        for line in lines:
            self.say(line)
        report.lines += lines


class ReadyPipeline(ABC):
    """A pipeline that is ready to use: its name, a description of one line, and its fields."""

    name: ClassVar[str]
    description: ClassVar[str]
    fields: ClassVar[tuple[Field, ...]] = ()

    @abstractmethod
    def plan(self, task: Task) -> list[str]:
        """Return lines that say what `run` would do. Nothing is written."""

    @abstractmethod
    def run(self, task: Task) -> Report:
        """Run the task. The documentation of each pipeline names the errors that it raises."""

    def build_task(
        self,
        spark: Any,
        connection: Mapping[str, str],
        options: Mapping[str, Any],
        *,
        say: Callable[[str], None] = print,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Task:
        """Return a task with these options, and defaults for the others.

        For a LIST field, a single text is accepted as a list of one. `say(line)` is called with
        lines about the progress, and `stopping()` returns True to end the run early. Raises
        ConfigurationError if an option is unknown, is missing, or has an invalid value.
        """
        fields = {declared_field.name: declared_field for declared_field in self.fields}
        for name in options:
            if name not in fields:
                suggestion = did_you_mean(name, fields)
                raise ConfigurationError(
                    f"there is no option {name!r}.",
                    fix=f"{suggestion} The options are {', '.join(fields)}.".lstrip(),
                )

        task_options = {
            name: _check_option(declared_field, options.get(name, declared_field.default))
            for name, declared_field in fields.items()
        }
        return Task(spark, task_options, connection, say, stopping)

    def __call__(
        self,
        spark: Any,
        connection: Mapping[str, str],
        *,
        say: Callable[[str], None] = print,
        stopping: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Report:
        """Run the pipeline with these options by name, and return its report.

        Raises ConfigurationError for invalid options, as `build_task`, and the errors of `run`.
        """
        return self.run(self.build_task(spark, connection, options, say=say, stopping=stopping))


_MODULE_AND_ATTRIBUTE: Final = {
    "archive": "archive:archive",
    "replay": "archive:replay",
    "dead-letters": "deadletters:dead_letters",
    "trace": "trace:TRACE",
    "audit": "audit:AUDIT",
    "dedup": "dedup:DEDUP",
}
NAMES: Final = tuple(_MODULE_AND_ATTRIBUTE)
"""The names of the ready pipelines."""


def _check_option(declared: Field, option_value: Any) -> Any:
    """Return the value of an option, after a check.

    For a LIST field, a single text becomes a list of one. Raises ConfigurationError if the value is
    missing or is not one of the field's choices.
    """
    if option_value is REQUIRED:
        raise ConfigurationError(
            f"the option {declared.name!r} is missing.", fix=declared.description
        )
    if declared.choices and option_value not in declared.choices:
        raise ConfigurationError(
            f"the option {declared.name!r} has the invalid value {option_value!r}.",
            fix=f"It can be {' or '.join(declared.choices)}.",
        )
    is_single_text = declared.kind == LIST and isinstance(option_value, str)
    return [option_value] if is_single_text else option_value


def find_ready_pipeline(name: str) -> ReadyPipeline:
    """Import the module of the ready pipeline `name`, and return the pipeline.

    Raises KeyError for a name that is not in `NAMES`.
    """
    module, _, attribute = _MODULE_AND_ATTRIBUTE[name].partition(":")
    pipeline = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    assert isinstance(pipeline, ReadyPipeline)
    return pipeline


def load_messages(
    spark: "SparkSession", connection: Mapping[str, str], **options: str
) -> "DataFrame":
    """Return messages of topics as a DataFrame of the batch source `rocketmq`.

    `connection` are the options of the cluster. `options` are further options of the source, as
    `spark.options` declares them, and override them. No line about pushed predicates is logged.
    """
    source_options = {"reportPushdown": "false", **connection, **options}
    return spark.read.format("rocketmq").options(**source_options).load()


# ---- tables as text


def format_table(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    rows_max: int | None = None,
    location: str = "",
) -> list[str]:
    """Return the lines of a table: the title, the column names, and the rows.

    Columns of numbers are aligned to the right. At most `rows_max` rows are shown; None means all.
    If there are more, a last line says how many, followed by `location`, a text such as " in PATH".
    A table without rows is one line: `TITLE: none`.
    """
    shown_rows = rows[:rows_max]
    lines = [f"{title}: none"]
    if shown_rows:
        lines = [title, *_render_rows(names, shown_rows)]
    hidden_count = len(rows) - len(shown_rows)
    if hidden_count:
        lines.append(f"  … and {hidden_count:,} more{location}")
    return lines


def _render_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the column names and at least one row as lines of text, with aligned columns."""
    from rich.console import Console  # noqa: PLC0415 - a slow import, needed for tables only
    from rich.table import Table  # noqa: PLC0415 - as above

    table = Table(box=None, padding=(0, 0, 0, 2), header_style="")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        is_numeric = all(cell is None or type(cell) in (int, float) for cell in column)
        table.add_column(name, justify="right" if is_numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_format_cell, row))
    console = Console(width=10_000, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def _format_cell(cell: Any) -> str:
    """Return a value as one short line for a table cell.

    None is "-", numbers have commas, and a text is cut to `_CELL_CHARACTERS_MAX`.
    """
    if cell is None:
        return "-"
    if isinstance(cell, datetime):
        return f"{cell:%Y-%m-%d %H:%M}"
    if type(cell) is float:
        return f"{cell:,.1f}"
    if type(cell) is int:
        return f"{cell:,}"
    line = " ".join(str(cell).splitlines())
    if len(line) <= _CELL_CHARACTERS_MAX:
        return line
    return line[: _CELL_CHARACTERS_MAX - 1] + "…"


# ---- streaming queries


def finish_query(query: "StreamingQuery") -> None:
    """Let a streaming query finish its current micro-batch, and stop it before the next one.

    Spark's own `stop()` interrupts the micro-batch, which then has to be repeated after a restart.
    So this function sets the state of Spark's `StreamExecution` to terminated, which Spark only
    checks between micro-batches. This relies on Spark's internals. If they are not as expected, the
    query is stopped between two triggers, or interrupted after `FINISH_S` seconds. Nothing is lost
    in any case, because the checkpoint says which micro-batches are complete.
    """
    try:
        _terminate_after_micro_batch(query)
    except Exception:
        logger.debug(
            "Spark's streaming query has unexpected internals; stopping it between triggers",
            exc_info=True,
        )
    end_s = SYSTEM_CLOCK.monotonic_s() + FINISH_S
    while query.isActive and query.status["isTriggerActive"]:
        if SYSTEM_CLOCK.monotonic_s() > end_s:
            break
        threading.Event().wait(CHECK_S)
    query.stop()


def _terminate_after_micro_batch(query: "StreamingQuery") -> None:
    """Set the state of an active query to terminated, and wait until its micro-batch is complete.

    Raises an exception if Spark's internals are not as expected.
    """
    java_query: Any = query._jsq
    execution = java_query.streamingQuery()
    active_state = execution.state().get()
    state_class = active_state.getClass()
    if not state_class.getSimpleName().startswith("ACTIVE"):
        return
    terminated_name = state_class.getName().replace("ACTIVE", "TERMINATED")
    terminated_class = state_class.getClassLoader().loadClass(terminated_name)
    terminated_state = terminated_class.getField("MODULE$").get(None)
    execution.state().compareAndSet(active_state, terminated_state)
    thread = execution.queryExecutionThread()
    while thread.isAlive() and query.status["isTriggerActive"]:
        threading.Event().wait(CHECK_S)


# ---- folders


class Folder:
    """A directory on a file system of Hadoop. Names of files are relative to it. Driver only."""

    def __init__(self, spark: Any, path: str) -> None:
        """Use the directory at `path`, which need not exist.

        `path` may be a URL of any file system that Spark can access. Raises ConfigurationError if
        `path` is empty or the session is one of Spark Connect.
        """
        if not path:
            raise ConfigurationError("the path is empty.", fix="Name a directory.")
        hadoop = get_jvm(spark).org.apache.hadoop.fs
        configuration = get_spark_context(spark)._jsc.hadoopConfiguration()
        self._path_class = hadoop.Path
        root = hadoop.Path(path)
        self._file_system = root.getFileSystem(configuration)
        self._root = self._file_system.makeQualified(root)
        self._context = hadoop.FileContext.getFileContext(self._root.toUri(), configuration)
        rename = hadoop.Options.Rename
        self._no_replace = get_gateway(spark).new_array(rename, 1)
        self._no_replace[0] = rename.NONE
        self._with_replace = get_gateway(spark).new_array(rename, 1)
        self._with_replace[0] = rename.OVERWRITE
        self._to_text = get_jvm(spark).org.apache.commons.io.IOUtils.toString

    @property
    def path(self) -> str:
        """The full path of the directory, with its scheme, as Spark accepts it."""
        return str(self._root.toString())

    def full_path(self, name: str) -> str:
        """Return the full path of a file or directory in the folder, as Spark accepts it."""
        return str(self._hadoop_path(name).toString())

    def _hadoop_path(self, name: str) -> Any:
        """Return Hadoop's path of a file in the folder; "" is the folder itself."""
        return self._path_class(self._root, name) if name else self._root

    def exists(self, name: str = "") -> bool:
        """Return whether a file or directory exists; "" is the folder itself."""
        return bool(self._file_system.exists(self._hadoop_path(name)))

    def list_names(self, name: str = "") -> list[str]:
        """Return the sorted names of the entries of a directory, or [] if it does not exist."""
        if not self.exists(name):
            return []
        statuses = self._file_system.listStatus(self._hadoop_path(name))
        return sorted(str(status.getPath().getName()) for status in statuses)

    def list_files(self, name: str, suffix: str) -> list[str]:
        """Return the sorted paths of all files at any depth of a directory that end in `suffix`.

        The paths are relative to that directory. The result is [] if it does not exist.
        """
        if not self.exists(name):
            return []
        start = self._hadoop_path(name)
        prefix_length = len(str(start.toString())) + 1
        relative_paths = []
        files = self._file_system.listFiles(start, True)
        while files.hasNext():
            path = str(files.next().getPath().toString())
            if path.endswith(suffix):
                relative_paths.append(path[prefix_length:])
        return sorted(relative_paths)

    def read_json(self, name: str) -> JsonObject | None:
        """Return the JSON object in a file, or None if the file does not exist.

        Raises ConfigurationError if the file contains anything else.
        """
        if not self.exists(name):
            return None
        stream = self._file_system.open(self._hadoop_path(name))
        try:
            content = str(self._to_text(stream, "UTF-8"))
        finally:
            stream.close()
        try:
            document = json.loads(content)
        except ValueError as error:
            raise self._damaged(name, str(error)) from None
        if not isinstance(document, dict):
            raise self._damaged(name, "it is not a JSON object")
        return document

    def _damaged(self, name: str, reason: str) -> ConfigurationError:
        """Return the error for a file that cannot be read as JSON. `reason` is a phrase."""
        return ConfigurationError(
            f"{self.full_path(name)} is damaged: {reason}.",
            fix="Restore the file, or use another path.",
        )

    def publish(self, name: str, document: JsonObject) -> bool:
        """Write `document` as a new JSON file, atomically, and return True.

        If the file exists, return False and change nothing. That includes the case that another
        process creates it at this moment.
        """
        draft = self._write_draft(name, document)
        try:
            if not self.exists(name):
                self._context.rename(
                    self._hadoop_path(draft), self._hadoop_path(name), self._no_replace
                )
                return True
        except Exception as error:
            if "FileAlreadyExists" not in str(error):
                raise
        self.remove(draft)
        return False

    def replace(self, name: str, document: JsonObject) -> None:
        """Write a JSON file atomically, and replace an existing one.

        The document is written to a draft file, which is then renamed to `name`.
        """
        draft = self._write_draft(name, document)
        self._context.rename(self._hadoop_path(draft), self._hadoop_path(name), self._with_replace)

    def _write_draft(self, name: str, document: JsonObject) -> str:
        """Write a JSON object to a hidden file with a unique name, and return that name.

        The file is in the directory of `name`, so that it can be renamed to `name` later.
        """
        directory, _, base_name = name.rpartition("/")
        draft = f"{directory}/.{base_name}.{uuid.uuid4().hex}".lstrip("/")
        stream = self._file_system.create(self._hadoop_path(draft), True)
        try:
            stream.write(bytearray(json.dumps(document, indent=1).encode()))
            stream.hsync()
        finally:
            stream.close()
        return draft

    def move(self, old_name: str, new_name: str) -> None:
        """Move a file to a new path, and replace a file there. Missing directories are created.

        Do nothing if the file has been moved already, even by another process at this moment.
        """
        if self._was_moved(old_name, new_name):
            return
        target = self._hadoop_path(new_name)
        self._file_system.mkdirs(target.getParent())
        try:
            self._context.rename(self._hadoop_path(old_name), target, self._with_replace)
        except Exception:
            # Another process that moved the file first is not an error.
            if not self._was_moved(old_name, new_name):
                raise

    def _was_moved(self, old_name: str, new_name: str) -> bool:
        """Return whether only the new file exists."""
        return not self.exists(old_name) and self.exists(new_name)

    def remove(self, name: str) -> None:
        """Delete a file, or a directory with its contents. Does nothing if it does not exist."""
        self._file_system.delete(self._hadoop_path(name), True)
