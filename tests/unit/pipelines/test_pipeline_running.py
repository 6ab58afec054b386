"""Running a ready pipeline: its lines, its exit code, and signals."""

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("pyspark")

from sluicemq.pipelines import __main__ as program
from sluicemq.pipelines import run as running
from sluicemq.pipelines.file import Pipeline, parse_pipeline
from sluicemq.pipelines.ready import ReadyPipeline, Report, Task
from sluicemq.pipelines.run import StopRequest
from waiting import limit

WAITING = """
import time
from sluicemq.pipelines.run import StopRequest, stop_on_signals

stop = StopRequest(lambda text: print(text, flush=True))
with stop_on_signals(stop):
    print("ready", flush=True)
    while True:
        time.sleep(1)
"""


@pytest.fixture
def audit() -> Pipeline:
    text = 'use: audit\ncluster: {nameServers: "127.0.0.1:1"}\nwith: {fail_on_findings: true}\n'
    pipeline, problems = parse_pipeline(text, "a.yaml", {})
    assert pipeline is not None, problems
    assert pipeline.use_options["fail_on_findings"] is True
    return pipeline


@pytest.mark.parametrize("is_failure", [False, True])
def test_a_line_is_printed_once_and_findings_can_set_the_exit_code(
    audit: Pipeline, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    is_failure: bool,
) -> None:  # fmt: skip
    class Found(ReadyPipeline):
        def plan(self, task: Task) -> list[str]:
            return []

        def run(self, task: Task) -> Report:
            task.say("told at once")
            return Report({"findings": 1}, [], ["told at once", "told at the end"], is_failure)

    monkeypatch.setattr(running, "find_ready_pipeline", lambda name: Found())
    spark: Any = None
    assert program.run_pipeline(audit, spark, as_json=False) == int(is_failure)
    told = capfd.readouterr().err
    assert told.count("told at once") == told.count("told at the end") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(number: signal.Signals) -> None:
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline().startswith("stopping: ")
            assert process.poll() is None
            process.send_signal(number)
            assert process.stdout.readline() == "stopped at once\n"
            assert process.wait(limit(60)) == 128 + number
        finally:
            process.kill()


def test_a_signal_handler_prints_in_another_thread() -> None:
    """The signal may interrupt a print, and Python's output cannot be entered again."""
    tellers: list[threading.Thread] = []
    StopRequest(lambda text: tellers.append(threading.current_thread())).handle_signal()
    assert len(tellers) == 1
    assert tellers[0] is not threading.main_thread()
