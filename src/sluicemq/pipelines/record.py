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
        """Add an event to the steps, and update the numbers of its sink.

        The file is written unless it was written within the last `WRITE_INTERVAL_MS`.
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

        The rows of a "batch" event are added. Those of any other event are the new total.
        """
        figures = event.figures
        known = self.sinks.setdefault(sink, {"rows": 0})
        rows = int(figures.get("rows", 0))
        known["rows"] = known["rows"] + rows if event.kind == "batch" else rows
        known["rows_per_second"] = figures.get("rows_per_second")
        is_written = event.kind == "written"
        known["left"] = 0 if is_written else figures.get("lag")
        known["eta_s"] = 0 if is_written else figures.get("eta_s")

    def refresh(self) -> None:
        """Write the file without a new event, to show that the process is alive."""
        with self.lock:
            self.write_file()

    def finish(self, error: str = "") -> None:
        """Write the file with the final state: failed, stopped or finished.

        `error` is the text of the error that ended the run; it is empty if the run completed or
        stopped.
        """
        with self.lock:
            self.error = error
            self.state = FAILED if error else STOPPED if self.is_stopping else FINISHED
            self.write_file()

    def write_file(self) -> None:
        """Replace the file with the present state. The caller holds the lock.

        The directory is created if it is missing. If writing fails, a warning is logged.
        """
        self.written_ms = self.clock.now_ms()
        values = {
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
        name = quote(self.pipeline, safe="") + SUFFIX
        try:
            self.files.make_directory(self.directory, durable=False)
            text = orjson.dumps(values, default=str).decode()
            overwrite_text(self.files, f"{self.directory}/{name}", text)
        except (OSError, SluiceError):
            logger.warning("cannot write the progress of %s", self.pipeline, exc_info=True)


@contextmanager
def record_progress(directory: str, pipeline: "Pipeline") -> Iterator[Callable[["Event"], None]]:
    """Return a context manager that records a run; its value is the function to call with events.

    The file in `directory` is written while the context is open, and at its end with the final
    state. An exception that ends the context is recorded and raised. If `directory` is empty,
    nothing is recorded.
    """
    if not directory:
        yield lambda _event: None
        return
    kind = pipeline.use or pipeline.mode
    recorder = Recorder(directory.rstrip("/"), pipeline.name, pipeline.path, kind)
    is_over = threading.Event()

    def refresh_periodically() -> None:
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
    """Return the runs in the directories by the names of their pipelines, sorted.

    If several runs have the same name, the one that started last is returned. A directory that
    cannot be read appears under its own path, with a `reason`.
    """
    found: dict[str, Progress] = {}
    for directory in directories:
        try:
            names = sorted(files.names(directory))
        except OSError as error:
            reason = f"the directory cannot be read: {error.strerror}"
            found[directory] = Progress(directory, reason=reason)
            continue
        for name in names:
            if name.endswith(SUFFIX):
                run = read_run(f"{directory}/{name}", files, clock.now_ms())
                if run.name not in found or run.started_ms > found[run.name].started_ms:
                    found[run.name] = run
    return dict(sorted(found.items()))


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
            values = orjson.loads(file.pread(size, 0))
        finally:
            file.close()
        return parse_progress(values, now_ms)
    except (
        OSError,
        SluiceError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:
        name = path.rpartition("/")[2].removesuffix(SUFFIX).encode(errors="replace").decode()
        path = path.encode(errors="replace").decode()
        reason = f"{path} is not a valid progress file of a pipeline: {error}"
        return Progress(name, reason=reason)


def parse_progress(values: Mapping[str, Any], now_ms: int) -> Progress:
    """Return the run that the values of a file describe.

    A running process whose file is too old, or that has rows left and no recent event, becomes
    STALLED. Raises KeyError, TypeError, ValueError, AttributeError or OverflowError if the values
    are not those of a progress file.
    """
    sinks = {
        str(name): {
            **sink,
            "rows": int(sink["rows"]),
            **{key: parse_number(sink.get(key)) for key in ("left", "rows_per_second", "eta_s")},
        }
        for name, sink in values["sinks"].items()
    }
    steps = tuple(
        {
            **step,
            "text": str(step["text"]),
            "sink": step.get("sink"),
            "time_ms": int(step["time_ms"]),
            "left": parse_number(step.get("left")),
            "rows_per_second": parse_number(step.get("rows_per_second")),
        }
        for step in values["steps"]
    )
    if values["state"] not in STATES:
        raise ValueError(f"{values['state']!r} is not a valid state")

    rates = [sink["rows_per_second"] for sink in sinks.values() if sink.get("rows_per_second")]
    etas_s = [sink["eta_s"] for sink in sinks.values() if sink.get("eta_s") is not None]
    # The rows that are left in the run are known only if they are known for every sink.
    known_left = [int(sink["left"]) for sink in sinks.values() if sink.get("left") is not None]
    rows_left = sum(known_left) if known_left and len(known_left) == len(sinks) else None

    state = str(values["state"])
    reason = ""
    if state == RUNNING and now_ms - values["seen_ms"] > DEAD_AFTER_MS:
        state = STALLED
        reason = "the process has ended: it was killed, or its machine is down"
    elif state == RUNNING and rows_left and now_ms - values["stepped_ms"] > STALLED_AFTER_MS:
        state = STALLED
        reason = "it is running, but has made no progress although rows are left"
    return Progress(
        name=str(values["pipeline"]),
        kind=str(values["kind"]),
        file=str(values["file"]),
        state=state,
        error=str(values["error"]),
        reason=reason,
        started_ms=int(values["begun_ms"]),
        last_event_ms=int(values["stepped_ms"]),
        rows=sum(int(sink["rows"]) for sink in sinks.values()),
        rows_left=rows_left,
        rows_per_second=sum(rates) if rates else None,
        eta_ms=max(etas_s) * 1000 if etas_s else None,
        sinks=sinks,
        steps=steps,
    )


def parse_number(value: Any) -> float | None:
    """Return a finite number of a file as it is, or None for null. Integers stay integers.

    Raises TypeError or ValueError for anything else.
    """
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
