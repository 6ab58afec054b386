"""`make demo`, shortened: its numbers agree, and no way to end it leaves a process behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import limit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
MARK = "SLUICEMQ_DEMO_TEST"


class Demo:
    """The demo in a process group of its own; every process it starts carries a mark."""

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = directory
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "flights" / "demo.py"), "--short"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment
            | {MARK: self.mark, "TMPDIR": str(self.directory), "PYTHONUNBUFFERED": "1"},
        )

    def read_until(self, text: str) -> str:
        """Return the output up to the line with `text`.

        Start the demo again when Spark ended it because a Python worker took more than 10 s to
        start, a limit of Spark that cannot be changed, and short for a busy machine.
        """
        for _ in range(3):
            assert self.process.stdout is not None
            seen = ""
            for line in self.process.stdout:
                seen += line
                if text in line:
                    return seen
            if "Python worker failed to connect back" not in seen:
                break
            self.process.wait()
            self.process.stdout.close()
            self.start()
        raise AssertionError(f"{text!r} did not come:\n{seen}")

    def left(self) -> list[str]:
        """Command lines of processes that the demo started and that still run."""
        found = []
        wanted = f"{MARK}={self.mark}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if command:
                        found.append(f"{path.name} {command[:120]}")
            except OSError:
                continue
        return found

    def wait_until_nothing_is_left(self) -> None:
        deadline = time.monotonic() + limit(30)
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.left() == []


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    one = Demo(tmp_path)
    yield one
    if one.process.poll() is None:
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()
    assert one.process.stdout is not None
    one.process.stdout.close()


def test_every_number_agrees_with_the_truth(demo: Demo) -> None:
    output = demo.read_until("numbers agree")
    assert demo.process.wait(limit(60)) == 0, output
    assert "differs" not in output
    demo.wait_until_nothing_is_left()
    assert not list(demo.directory.glob("sluicemq-flights-*"))


@pytest.mark.parametrize("step", ["delay by carrier"])
def test_control_c_leaves_no_process(demo: Demo, step: str) -> None:
    """A step is announced when it begins or, for the long ones, when the one before is done."""
    demo.read_until(step)
    assert demo.left()
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(limit(60)) == 130
    demo.wait_until_nothing_is_left()
    assert not list(demo.directory.glob("sluicemq-flights-*"))


@pytest.mark.thorough
def test_a_killed_demo_leaves_no_process_either(demo: Demo) -> None:
    demo.read_until("start Spark")
    demo.read_until("done in")
    demo.process.kill()
    demo.process.wait()
    demo.wait_until_nothing_is_left()
