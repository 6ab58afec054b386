"""The progress of runs as small JSON files, one for each pipeline, written from the run's events.

    sluice pipeline run late.yaml --progress DIRECTORY      writes DIRECTORY/late-flights.json
    sluice console --pipelines DIRECTORY                    shows it

The file is replaced as a whole: after an event, at most once in `WRITE_INTERVAL_MS`, and every
`REFRESH_S` seconds if there are no events. So if a file has the state "running" and is older than
`DEAD_AFTER_MS`, the process was killed or its machine is down. The file contains the last events
("steps"), the numbers of each sink, and the error that ended the run. Secrets of the pipeline's
file are masked. This module does not need Spark.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import orjson

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import SluiceError
from sluicemq.files import SYSTEM_FILES, Files, overwrite_text, process_id

if TYPE_CHECKING:
    from sluicemq.pipelines.file import Pipeline
    from sluicemq.pipelines.run import Event

logger = logging.getLogger(__name__)

RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
STALLED = "stalled"
STATES: Final = (RUNNING, FINISHED, STOPPED, FAILED, STALLED)
"""The states of a run. A file never contains STALLED; `parse_progress` derives it."""
STEPS_MAX: Final = 200
"""The file contains this number of events at most, the newest ones."""
WRITE_INTERVAL_MS: Final = 1000
"""The shortest time between two writes that are caused by events."""
REFRESH_S: Final = 10.0
"""The interval at which the file is written without events."""
DEAD_AFTER_MS: Final = 60_000
"""A running process whose file is older than this has ended without notice."""
STALLED_AFTER_MS: Final = 300_000
"""A run that has rows left and no event for this time is stalled."""
SUFFIX: Final = ".json"
FILE_BYTES_MAX: Final = 4 << 20
"""Larger files are not read."""


@dataclass(slots=True)
class Recorder:
    """Writes the progress file of one run, DIRECTORY/PIPELINE.json.

    `file` is the path of the pipeline file. `kind` is "batch", "streaming" or the name of a ready
    pipeline. `record_event` may be called from several threads. If the progress file cannot be
    written, a warning is logged and the run continues.
    """

    directory: str
    pipeline: str
    file: str
    kind: str
    files: Files = SYSTEM_FILES
    clock: Clock = SYSTEM_CLOCK
    state: str = field(default=RUNNING, init=False)
    error: str = field(default="", init=False)
    started_ms: int = field(init=False)
    last_event_ms: int = field(init=False)
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    steps: deque[dict[str, Any]] = field(
        default_factory=lambda: deque(maxlen=STEPS_MAX), init=False
    )
    written_ms: int = field(default=0, init=False)
    is_stopping: bool = field(default=False, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.started_ms = self.last_event_ms = self.clock.now_ms()

    def record_event(self, event: "Event") -> None:
        """Add an event to the list of steps, and update the numbers of its sink.

        The file is written too, unless it was written less than `WRITE_INTERVAL_MS` ago.
        """
        now_ms = self.clock.now_ms()
        figures = event.figures
        with self.lock:
            self.last_event_ms = now_ms
            self.is_stopping |= event.kind == "stopping" or bool(figures.get("left"))
            sink = figures.get("sink")
            if sink is not None:
                self._update_sink(sink, event)
            self.steps.append(
                {
                    "time_ms": now_ms,
                    "kind": event.kind,
                    "sink": sink,
                    "text": event.text,
                    "rows_per_second": figures.get("rows_per_second"),
                    "left": figures.get("lag"),
                }
            )
            if now_ms - self.written_ms >= WRITE_INTERVAL_MS:
                self.write_file()

    def _update_sink(self, sink: str, event: "Event") -> None:
        """Update the numbers of a sink by the figures of an event.

        An event of the kind "batch" has the rows of one micro-batch, which are added. Any other
        event has the total number of rows.
        """
        figures = event.figures
        sink_numbers = self.sinks.setdefault(sink, {"rows": 0})
        row_count = int(figures.get("rows", 0))
        if event.kind == "batch":
            sink_numbers["rows"] += row_count
        else:
            sink_numbers["rows"] = row_count
        sink_numbers["rows_per_second"] = figures.get("rows_per_second")
        is_written = event.kind == "written"
        sink_numbers["left"] = 0 if is_written else figures.get("lag")
        sink_numbers["eta_s"] = 0 if is_written else figures.get("eta_s")

    def refresh(self) -> None:
        """Write the file without a new event, to show that the process is alive."""
        with self.lock:
            self.write_file()

    def finish(self, error: str = "") -> None:
        """Write the file with the final state of the run: failed, stopped or finished.

        `error` is the text of the error that ended the run; "" if there was none.
        """
        with self.lock:
            self.error = error
            if error:
                self.state = FAILED
            elif self.is_stopping:
                self.state = STOPPED
            else:
                self.state = FINISHED
            self.write_file()

    def write_file(self) -> None:
        """Replace the file with the present state. The caller holds the lock.

        The directory is created if it is missing. If writing fails, a warning is logged.
        """
        self.written_ms = self.clock.now_ms()
        document = {
            "pipeline": self.pipeline,
            "file": self.file,
            "kind": self.kind,
            "state": self.state,
            "error": self.error,
            "process": process_id(),
            "begun_ms": self.started_ms,
            "seen_ms": self.written_ms,
            "stepped_ms": self.last_event_ms,
            "sinks": self.sinks,
            "steps": list(self.steps),
        }
        file_name = quote(self.pipeline, safe="") + SUFFIX
        try:
            self.files.make_directory(self.directory, durable=False)
            content = orjson.dumps(document, default=str).decode()
            overwrite_text(self.files, f"{self.directory}/{file_name}", content)
        except (OSError, SluiceError):
            logger.warning("cannot write the progress of %s", self.pipeline, exc_info=True)


@contextmanager
def record_progress(directory: str, pipeline: "Pipeline") -> Iterator[Callable[["Event"], None]]:
    """Return a context manager that records the progress of a run in a file of `directory`.

    Its value is the function that is called with each event. The file is written while the context
    is open, and at its end with the final state. An exception that ends the context is recorded and
    raised. If `directory` is "", nothing is recorded.
    """
    if not directory:
        yield lambda _event: None
        return
    recorder = Recorder(
        directory.rstrip("/"),
        pipeline.name,
        pipeline.path,
        kind=pipeline.use or pipeline.mode,
    )
    is_over = threading.Event()

    def refresh_periodically() -> None:
        """Write the file every `REFRESH_S`, to show that the process is alive."""
        while not is_over.wait(REFRESH_S):
            recorder.refresh()

    thread = threading.Thread(
        target=refresh_periodically, name="progress of a pipeline", daemon=True
    )
    recorder.refresh()
    thread.start()
    error = ""
    try:
        yield recorder.record_event
    except BaseException as failure:
        error = pipeline.secrets.mask(str(failure)) or type(failure).__name__
        raise
    finally:
        # The thread ends before the final state is written, so that it cannot overwrite it.
        is_over.set()
        thread.join()
        recorder.finish(error)


# ---- reading the files


@dataclass(frozen=True, slots=True)
class Progress:
    """The last run of a pipeline, as its file describes it.

    `rows` is the number of rows that are complete. `rows_left` is the number of the others, and
    `eta_ms` the estimated time until they are complete; None means unknown. `sinks` and `steps`
    have the keys of the file. If the run is stalled or the file cannot be read, `reason` says why;
    otherwise it is empty. `kind` is empty if the file cannot be read.
    """

    name: str
    kind: str = ""
    file: str = ""
    state: str = STALLED
    error: str = ""
    reason: str = ""
    started_ms: int = 0
    last_event_ms: int = 0
    rows: int = 0
    rows_left: int | None = None
    rows_per_second: float | None = None
    eta_ms: float | None = None
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()

    @property
    def last_step(self) -> str:
        """The text of the newest event, or "" if there is none."""
        return str(self.steps[-1]["text"]) if self.steps else ""


def read_runs(
    directories: Iterable[str], files: Files = SYSTEM_FILES, clock: Clock = SYSTEM_CLOCK
) -> dict[str, Progress]:
    """Return the runs that are recorded in the directories, sorted by the names of their pipelines.

    If several runs have the same name, the run that started last is returned. A directory that
    cannot be read is returned as a run with its path as name, and with a `reason`.
    """
    newest_runs: dict[str, Progress] = {}
    for directory in directories:
        try:
            file_names = sorted(files.names(directory))
        except OSError as error:
            reason = f"the directory cannot be read: {error.strerror}"
            newest_runs[directory] = Progress(directory, reason=reason)
            continue
        for file_name in file_names:
            if not file_name.endswith(SUFFIX):
                continue
            progress = read_run(f"{directory}/{file_name}", files, clock.now_ms())
            previous = newest_runs.get(progress.name)
            if previous is None or progress.started_ms > previous.started_ms:
                newest_runs[progress.name] = progress
    return dict(sorted(newest_runs.items()))


def read_run(path: str, files: Files, now_ms: int) -> Progress:
    """Return the run that the file at `path` describes.

    If the file cannot be read or is invalid, the result has a `reason` and no kind.
    """
    try:
        file = files.open(path)
        try:
            size = file.size()
            if size > FILE_BYTES_MAX:
                raise ValueError(f"it has {size:,} bytes, the limit is {FILE_BYTES_MAX:,}")
            document = orjson.loads(file.pread(size, 0))
        finally:
            file.close()
        return parse_progress(document, now_ms)
    except (
        OSError,
        SluiceError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:
        # A name of a file may contain bytes that are not UTF-8.
        printable_path = path.encode(errors="replace").decode()
        pipeline_name = printable_path.rpartition("/")[2].removesuffix(SUFFIX)
        reason = f"{printable_path} is not a valid progress file of a pipeline: {error}"
        return Progress(pipeline_name, reason=reason)


def parse_progress(document: Mapping[str, Any], now_ms: int) -> Progress:
    """Return the run that the JSON object of a progress file describes.

    The state of a running process becomes STALLED if its file is too old, or if rows are left and
    there is no recent event. Raises KeyError, TypeError, ValueError, AttributeError or
    OverflowError if the object is not a valid progress file.
    """
    sinks = {str(name): _parse_sink(sink) for name, sink in document["sinks"].items()}
    steps = tuple(_parse_step(step) for step in document["steps"])
    if document["state"] not in STATES:
        raise ValueError(f"{document['state']!r} is not a valid state")

    rates = [sink["rows_per_second"] for sink in sinks.values() if sink.get("rows_per_second")]
    etas_s = [sink["eta_s"] for sink in sinks.values() if sink.get("eta_s") is not None]
    rows_left = _sum_rows_left(sinks.values())
    state, reason = _derive_state(document, rows_left, now_ms)
    return Progress(
        name=str(document["pipeline"]),
        kind=str(document["kind"]),
        file=str(document["file"]),
        state=state,
        error=str(document["error"]),
        reason=reason,
        started_ms=int(document["begun_ms"]),
        last_event_ms=int(document["stepped_ms"]),
        rows=sum(int(sink["rows"]) for sink in sinks.values()),
        rows_left=rows_left,
        rows_per_second=sum(rates) if rates else None,
        eta_ms=max(etas_s) * 1000 if etas_s else None,
        sinks=sinks,
        steps=steps,
    )


def _parse_sink(sink: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a sink in a progress file, converted to the right types.

    Raises KeyError, TypeError or ValueError if one of them is missing or wrong.
    """
    return {
        **sink,
        "rows": int(sink["rows"]),
        "left": parse_number(sink.get("left")),
        "rows_per_second": parse_number(sink.get("rows_per_second")),
        "eta_s": parse_number(sink.get("eta_s")),
    }


def _parse_step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event in a progress file, with its values converted to the right types.

    Raises KeyError, TypeError or ValueError if one of them is missing or wrong.
    """
    return {
        **step,
        "text": str(step["text"]),
        "sink": step.get("sink"),
        "time_ms": int(step["time_ms"]),
        "left": parse_number(step.get("left")),
        "rows_per_second": parse_number(step.get("rows_per_second")),
    }


def _sum_rows_left(sinks: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the number of rows that are left in a run.

    Return None if there are no sinks, or if the number is unknown for one of them.
    """
    rows_left_by_sink = [sink["left"] for sink in sinks]
    if not rows_left_by_sink or None in rows_left_by_sink:
        return None
    return sum(map(int, rows_left_by_sink))


def _derive_state(
    document: Mapping[str, Any], rows_left: int | None, now_ms: int
) -> tuple[str, str]:
    """Return (state, reason) of a run. The reason is "" unless the state is STALLED.

    `document` is the JSON object of the progress file, and `rows_left` is None if unknown.
    """
    state = str(document["state"])
    if state != RUNNING:
        return state, ""
    if now_ms - document["seen_ms"] > DEAD_AFTER_MS:
        return STALLED, "the process has ended: it was killed, or its machine is down"
    if rows_left and now_ms - document["stepped_ms"] > STALLED_AFTER_MS:
        return STALLED, "it is running, but has made no progress although rows are left"
    return state, ""


def parse_number(number: Any) -> float | None:
    """Return a finite number of a progress file unchanged; None stays None.

    Raises TypeError or ValueError for anything else.
    """
    if number is None or isinstance(number, int):
        return number
    if isinstance(number, str) or not math.isfinite(number):
        raise ValueError(f"{number!r} is not a number")
    return float(number)
