"""Progress files of runs: numbers, steps, the final state, and processes that have ended."""

from pathlib import Path

import orjson
import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES, SystemFiles
from sluicemq.pipelines import __main__ as program
from sluicemq.pipelines import record
from sluicemq.pipelines.file import Pipeline
from sluicemq.pipelines.ready import Report
from sluicemq.pipelines.record import Recorder, read_runs, record_progress
from sluicemq.pipelines.run import Event, Listener
from sluicemq.spark.errors import Secrets


class HandClock:
    """A clock that the test moves."""

    at_ms = 1_000_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_s(self) -> float:
        return self.at_ms / 1000


def batch(rows: int, lag: int, sink: str = "parquet") -> Event:
    figures = {
        "sink": sink, "rows": rows, "rows_per_second": rows / 2, "lag": lag, "eta_s": lag / 100,
    }  # fmt: skip
    return Event("batch", f"late {sink}: {rows} rows", figures)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def recorder(tmp_path: Path, clock: HandClock) -> Recorder:
    return Recorder(str(tmp_path / "runs"), "late/flights", "late.yaml", "streaming", clock=clock)


def test_progress_is_recorded_during_a_run(recorder: Recorder, clock: HandClock) -> None:
    recorder.record_event(Event("started", "late: a stream", {"pipeline": "late"}))
    for rows, lag in ((100, 900), (150, 750)):
        clock.at_ms += 2000
        recorder.record_event(batch(rows, lag))
    clock.at_ms += 2000
    recorder.record_event(batch(10, 40, "table"))
    run = read_runs([recorder.directory], clock=clock)["late/flights"]
    assert (run.kind, run.state, run.rows, run.rows_left) == ("streaming", "running", 260, 790)
    assert run.rows_per_second == 75 + 5
    assert run.eta_ms == 7500
    assert run.last_step == "late table: 10 rows"
    assert len(run.steps) == 4


def test_the_file_is_written_at_most_once_a_second(recorder: Recorder, clock: HandClock) -> None:
    recorder.refresh()
    for _ in range(5):
        clock.at_ms += 100
        recorder.record_event(batch(1, 0))
    assert read_runs([recorder.directory], clock=clock)["late/flights"].rows == 0
    recorder.refresh()
    assert read_runs([recorder.directory], clock=clock)["late/flights"].rows == 5


def test_rows_of_stages_are_totals(recorder: Recorder, clock: HandClock) -> None:
    for rows in (1000, 3000):
        figures = {"sink": "table", "rows": rows, "rows_per_second": 500.0, "eta_s": 4.0}
        recorder.record_event(Event("stage", "stage 1", figures))
    recorder.refresh()
    run = read_runs([recorder.directory], clock=clock)["late/flights"]
    assert (run.rows, run.rows_left, run.eta_ms) == (3000, None, 4000)
    recorder.record_event(Event("written", "done", {"sink": "table", "rows": 2500}))
    recorder.finish()
    run = read_runs([recorder.directory], clock=clock)["late/flights"]
    assert (run.rows, run.rows_left, run.state) == (2500, 0, "finished")


def test_the_state_of_a_run_that_ends_or_stalls(recorder: Recorder, clock: HandClock) -> None:
    def state() -> tuple[str, str]:
        run = read_runs([recorder.directory], clock=clock)["late/flights"]
        return run.state, run.reason

    recorder.record_event(batch(10, 5))
    clock.at_ms += record.DEAD_AFTER_MS + 1
    assert state()[0] == "stalled"
    assert "the process has ended" in state()[1]
    recorder.refresh()
    assert state() == ("running", "")
    clock.at_ms += record.STALLED_AFTER_MS
    recorder.refresh()
    assert state()[0] == "stalled"
    assert "made no progress" in state()[1]
    recorder.record_event(Event("stopping", "late: stopping"))
    recorder.finish()
    clock.at_ms += record.STALLED_AFTER_MS
    assert state() == ("stopped", "")
    recorder.finish("it broke")
    assert state() == ("failed", "")


def test_invalid_progress_files_have_a_reason(tmp_path: Path, clock: HandClock) -> None:
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"sinks": 1}'), ("d", "")):
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "other.txt").write_text("x")
    runs = read_runs([str(tmp_path), str(tmp_path / "not there yet")], clock=clock)
    assert list(runs) == ["a", "b", "c", "d"]
    assert all("not a valid progress file of a pipeline" in one.reason for one in runs.values())

    class Closed(SystemFiles):
        def names(self, directory: str) -> list[str]:
            raise PermissionError(13, "Permission denied", directory)

    assert "cannot be read: Permission denied" in read_runs(["/closed"], Closed())["/closed"].reason


def test_a_directory_that_cannot_be_written_does_not_stop_a_run(clock: HandClock) -> None:
    recorder = Recorder("/dev/null/runs", "late", "late.yaml", "batch", clock=clock)
    recorder.record_event(batch(1, 1))
    recorder.finish()


def pipeline(secret: str = "") -> Pipeline:
    made = Pipeline("late.yaml", "late", {}, secrets=Secrets())
    made.secrets.add(secret)
    return made


def test_an_error_is_recorded_without_secrets(tmp_path: Path) -> None:
    def fail() -> None:
        with record_progress(f"{tmp_path}/", pipeline("hunter2")) as hear:
            hear(batch(3, 1))
            raise ConfigurationError("the password hunter2 is wrong.")

    with pytest.raises(ConfigurationError):
        fail()
    text = (tmp_path / "late.json").read_text()
    assert "hunter2" not in text
    assert orjson.loads(text)["state"] == "failed"
    run = record.read_run(str(tmp_path / "late.json"), SYSTEM_FILES, 0)
    assert run.error.startswith("the password")
    with record_progress("", pipeline()) as hear:
        hear(batch(1, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["late.json"]


def test_the_program_records_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is replaced: there is no session, and the run emits one event."""
    monkeypatch.setattr(program, "load_pipeline", lambda _path: pipeline())
    monkeypatch.setattr(program, "create_session", lambda *_given: None)

    def run(*_given: object, listener: Listener, **_options: object) -> object:
        listener(batch(7, 0))
        return Report()

    monkeypatch.setattr(program, "run", run)
    assert program.run_file("late.yaml", progress=str(tmp_path)) == 0
    told = read_runs([str(tmp_path)])["late"]
    assert (told.state, told.rows, told.rows_left) == ("finished", 7, 0)
