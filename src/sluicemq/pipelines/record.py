"""What a run leaves for others to read: a small JSON file a pipeline, made of its events.

    sluice pipeline run late.yaml --progress DIRECTORY      writes DIRECTORY/late-flights.json
    sluice console --pipelines DIRECTORY                    shows it

It is replaced as a whole: when something happens, at most once a second, and every ten seconds
while nothing does. So a run whose file says "running" and is a minute old has been killed, or its
machine is gone. The last steps are kept, the numbers of each sink, and the error that ended it;
secrets of the pipeline's file are hidden. Nothing here needs Spark.
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
RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"
FAILED, STALLED = "failed", "stalled"
STEPS_MAX: Final = 200
WRITE_MS: Final = 1000
BEAT_S: Final = 10.0
SILENT_MS: Final = 60_000
STALL_MS: Final = 300_000
SUFFIX: Final = ".json"
STATES: Final = (RUNNING, FINISHED, STOPPED, FAILED, STALLED)
FILE_BYTES_MAX: Final = 4 << 20


@dataclass(slots=True)
class Recorder:
    """Keeps the file of one run; `kind`: batch, streaming or the name of a ready pipeline. It may
    hear events from several threads. That the file cannot be written stops no run."""

    directory: str
    pipeline: str
    file: str
    kind: str
    files: Files = SYSTEM_FILES
    clock: Clock = SYSTEM_CLOCK
    state: str = field(default=RUNNING, init=False)
    error: str = field(default="", init=False)
    begun_ms: int = field(init=False)
    stepped_ms: int = field(init=False)
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    steps: deque[dict[str, Any]] = field(
        default_factory=lambda: deque(maxlen=STEPS_MAX), init=False
    )
    written_ms: int = field(default=0, init=False)
    is_stopping: bool = field(default=False, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.begun_ms = self.stepped_ms = self.clock.now_ms()

    def hear(self, event: "Event") -> None:
        """An event of the run."""
        now_ms, figures = self.clock.now_ms(), event.figures
        with self.lock:
            self.stepped_ms = now_ms
            self.is_stopping |= event.kind == "stopping" or bool(figures.get("left"))
            sink = figures.get("sink")
            if sink is not None:
                known = self.sinks.setdefault(sink, {"rows": 0})
                rows = int(figures.get("rows", 0))
                known["rows"] = known["rows"] + rows if event.kind == "batch" else rows
                known["rows_per_second"] = figures.get("rows_per_second")
                is_written = event.kind == "written"
                known["left"] = 0 if is_written else figures.get("lag")
                known["eta_s"] = 0 if is_written else figures.get("eta_s")
            self.steps.append({
                "time_ms": now_ms, "kind": event.kind, "sink": sink, "text": event.text,
                "rows_per_second": figures.get("rows_per_second"), "left": figures.get("lag"),
            })  # fmt: skip
            if now_ms - self.written_ms >= WRITE_MS:
                self.write()

    def beat(self) -> None:
        """It still runs."""
        with self.lock:
            self.write()

    def end(self, error: str = "") -> None:
        """How it ended; "": well, or stopped in order."""
        with self.lock:
            self.error = error
            self.state = FAILED if error else STOPPED if self.is_stopping else FINISHED
            self.write()

    def write(self) -> None:
        """The file as it is now."""
        self.written_ms = self.clock.now_ms()
        values = {
            "pipeline": self.pipeline, "file": self.file, "kind": self.kind, "state": self.state,
            "error": self.error, "process": process_id(), "begun_ms": self.begun_ms,
            "seen_ms": self.written_ms, "stepped_ms": self.stepped_ms, "sinks": self.sinks,
            "steps": list(self.steps),
        }  # fmt: skip
        name = quote(self.pipeline, safe="") + SUFFIX
        try:
            self.files.make_directory(self.directory, durable=False)
            text = orjson.dumps(values, default=str).decode()
            overwrite_text(self.files, f"{self.directory}/{name}", text)
        except (OSError, SluiceError):
            logger.warning("the progress of %s cannot be written", self.pipeline, exc_info=True)


@contextmanager
def recording(directory: str, pipeline: "Pipeline") -> Iterator[Callable[["Event"], None]]:
    """Within it events that are heard stand in the directory's file; "": in none."""
    if not directory:
        yield lambda _event: None
        return
    kind = pipeline.use or pipeline.mode
    recorder = Recorder(directory.rstrip("/"), pipeline.name, pipeline.path, kind)
    over = threading.Event()

    def beat_on() -> None:
        while not over.wait(BEAT_S):
            recorder.beat()

    thread = threading.Thread(target=beat_on, name="progress of a pipeline", daemon=True)
    recorder.beat()
    thread.start()
    error = ""
    try:
        yield recorder.hear
    except BaseException as failure:
        error = pipeline.secrets.mask(str(failure)) or type(failure).__name__
        raise
    finally:
        over.set()
        thread.join()
        recorder.end(error)


# --------------------------------------------------------------------------- read by others


@dataclass(frozen=True, slots=True)
class Progress:
    """The last run of a pipeline as its file tells. `rows` are done, `left` are not (None: nobody
    knows), `eta_ms` until then; `why` says why it is stalled or cannot be read."""

    name: str
    kind: str = ""
    file: str = ""
    state: str = STALLED
    error: str = ""
    why: str = ""
    begun_ms: int = 0
    stepped_ms: int = 0
    rows: int = 0
    left: int | None = None
    rows_per_second: float | None = None
    eta_ms: float | None = None
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()

    @property
    def last_step(self) -> str:
        return str(self.steps[-1]["text"]) if self.steps else ""


def runs_of(
    directories: Iterable[str], files: Files = SYSTEM_FILES, clock: Clock = SYSTEM_CLOCK
) -> dict[str, Progress]:
    """The runs that these directories know, by name; of one name that which began last."""
    found: dict[str, Progress] = {}
    for directory in directories:
        try:
            names = sorted(files.names(directory))
        except OSError as error:
            found[directory] = Progress(
                directory, why=f"the directory cannot be read: {error.strerror}"
            )
            continue
        for name in names:
            if name.endswith(SUFFIX):
                run = run_of(f"{directory}/{name}", files, clock.now_ms())
                if run.name not in found or run.begun_ms > found[run.name].begun_ms:
                    found[run.name] = run
    return dict(sorted(found.items()))


def run_of(path: str, files: Files, now_ms: int) -> Progress:
    """One file; `Progress.why` for one that is none."""
    try:
        file = files.open(path)
        try:
            if (size := file.size()) > FILE_BYTES_MAX:
                raise ValueError(f"it has {size:,} bytes, the limit is {FILE_BYTES_MAX:,}")
            told = orjson.loads(file.pread(size, 0))
        finally:
            file.close()
        return made(told, now_ms)
    except (
        OSError, SluiceError, ValueError, KeyError, TypeError, AttributeError, OverflowError
    ) as error:  # fmt: skip
        name = path.rpartition("/")[2].removesuffix(SUFFIX).encode(errors="replace").decode()
        path = path.encode(errors="replace").decode()
        return Progress(name, why=f"{path} is no progress of a pipeline: {error}")


def made(told: Mapping[str, Any], now_ms: int) -> Progress:
    """Of the values in a file. Raises KeyError, TypeError and ValueError for others."""
    sinks = {
        str(name): {
            **one, "rows": int(one["rows"]),
            **{key: number(one.get(key)) for key in ("left", "rows_per_second", "eta_s")},
        }
        for name, one in told["sinks"].items()
    }  # fmt: skip
    steps = tuple(
        {
            **one, "text": str(one["text"]), "sink": one.get("sink"),
            "time_ms": int(one["time_ms"]), "left": number(one.get("left")),
            "rows_per_second": number(one.get("rows_per_second")),
        }
        for one in told["steps"]
    )  # fmt: skip
    if told["state"] not in STATES:
        raise ValueError(f"{told['state']!r} is no state")
    lefts = [one.get("left") for one in sinks.values()]
    paces = [one["rows_per_second"] for one in sinks.values() if one.get("rows_per_second")]
    etas = [one["eta_s"] for one in sinks.values() if one.get("eta_s") is not None]
    known = [int(one) for one in lefts if one is not None]
    left = sum(known) if known and len(known) == len(lefts) else None
    state, why = str(told["state"]), ""
    if state == RUNNING and now_ms - told["seen_ms"] > SILENT_MS:
        state, why = STALLED, "its process is gone: it was killed, or its machine is away"
    elif state == RUNNING and left and now_ms - told["stepped_ms"] > STALL_MS:
        state, why = STALLED, "it runs, and has done no step for a while though something is left"
    return Progress(
        str(told["pipeline"]), str(told["kind"]), str(told["file"]), state, str(told["error"]),
        why, int(told["begun_ms"]), int(told["stepped_ms"]),
        sum(int(one["rows"]) for one in sinks.values()), left,
        sum(paces) if paces else None, max(etas) * 1000 if etas else None,
        sinks, steps,
    )  # fmt: skip


def number(value: Any) -> float | None:
    """Of a file: whole where it is. Raises TypeError and ValueError."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)
