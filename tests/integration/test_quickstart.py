"""Test that the projects of `sluice quickstart` run as documented and pass type checkers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluicemq.cli.quickstart import KINDS, write_project
from waiting import limit

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a project of each kind, each in a folder of its name."""
    directory = tmp_path_factory.mktemp("projects")
    for kind in KINDS:
        write_project(kind, directory / kind)
    return directory


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run `sluice up`, and yield the environment of programs that connect to it."""
    directory = tmp_path_factory.mktemp("cluster")
    settings = directory / "broker.conf"
    settings.write_text(
        "metricsPromExporterPort=0\ntransactionTimeOut=200\ntransactionCheckInterval=200\n"
    )
    ours = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYSPARK_PYTHON": sys.executable}
    command = [
        sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port", "0",
        "--store", str(directory / "store"), "-c", str(settings),
    ]  # fmt: skip
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(command, env=ours, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    try:
        found = re.match(r"ready nameserver=(\S+)", server.stdout.readline())
        assert found, (directory / "log").read_text()
        yield {**ours, "NAMESRV_ADDR": found[1]}
    finally:
        server.send_signal(signal.SIGTERM)
        server.stdout.close()
        assert server.wait(limit(30)) == 0


class Program:
    """A running program of a project, whose output is read by lines or to its end."""

    def __init__(self, directory: Path, environment: dict[str, str], *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words], cwd=directory, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def lines_until(self, end: Callable[[list[str]], bool]) -> list[str]:
        assert self.process.stdout is not None
        lines: list[str] = []
        while not end(lines):
            line = self.process.stdout.readline()
            assert line, f"ended after {lines}"
            lines.append(line.rstrip())
        return lines

    def finish(self, number: signal.Signals | None = None, *, code: int = 0) -> list[str]:
        """Return the remaining lines, after sending the signal, if any. Check the exit code."""
        if number is not None:
            self.process.send_signal(number)
        printed, _ = self.process.communicate(timeout=limit(180))
        assert self.process.returncode == code, printed
        return printed.splitlines()


def test_the_messages_project_produces_filters_and_consumes(
    projects: Path, environment: dict[str, str]
) -> None:
    directory = projects / "messages"
    assert len(Program(directory, environment, "produce.py").finish()) == 10
    consumer = Program(directory, environment, "consume.py")
    first, *shipped = consumer.lines_until(lambda lines: len(lines) == 8)
    assert first == "shipping; Ctrl-C ends it"
    assert sorted(shipped) == sorted(f"shipped order {n} of {15 * n}" for n in range(4, 11))
    assert consumer.finish(signal.SIGINT) == ["7 orders shipped"]
    # Nothing is shipped again by the next one; a service manager ends it in order too.
    consumer = Program(directory, environment, "consume.py")
    consumer.lines_until(lambda lines: len(lines) == 1)
    Program(directory, environment, "produce.py").finish()
    assert len(consumer.lines_until(lambda lines: len(lines) == 7)) == 7
    assert consumer.finish(signal.SIGTERM) == ["7 orders shipped"]


def test_the_transactions_project_is_atomic_even_after_a_crash(
    projects: Path, environment: dict[str, str]
) -> None:
    directory = projects / "transactions"
    program = directory / "shop.py"
    program.write_text(program.read_text().replace("CHECK_AFTER_S = 15", "CHECK_AFTER_S = 1"))
    (crashed,) = Program(directory, environment, "shop.py", "--crash").finish(code=1)
    shop = Program(directory, environment, "shop.py")
    told = shop.lines_until(lambda lines: "committed" in " ".join(lines) and len(lines) == 5)
    placed = [line.split()[2] for line in told if line.startswith("placed")]
    assert len(placed) == 2
    assert "an order of -5 is refused: CHECK constraint failed: amount > 0" in told
    left = crashed.split()[1]
    assert f"asked about order {left}: committed" in told
    assert shop.finish(signal.SIGINT) == []
    shipping = Program(directory, environment, "ship.py")
    shipped = shipping.lines_until(lambda lines: len(lines) == 4)[1:]
    assert sorted(shipped) == sorted(f"shipped order {order}" for order in (*placed, left))
    assert shipping.finish(signal.SIGINT) == []


def test_the_tests_project_passes(projects: Path, environment: dict[str, str]) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    assert "4 passed" in Program(projects / "tests", environment, *words).finish()[-1]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(400)  # two JVMs, one after the other
def test_the_spark_project_reports_what_its_pipeline_wrote(
    projects: Path, environment: dict[str, str]
) -> None:
    directory = projects / "spark"
    assert Program(directory, environment, "produce.py").finish() == ["1000 flights sent"]
    pipeline = directory / "pipeline.yaml"
    address = environment["NAMESRV_ADDR"]
    pipeline.write_text(pipeline.read_text().replace("127.0.0.1:9876", address))
    words = ("-m", "sluicemq", "pipeline", "run", "pipeline.yaml")
    Program(directory, environment, *words).finish()
    printed = "\n".join(Program(directory, environment, "report.py").finish())
    delays = [(number % 4, number * 37 % 180 - 30) for number in range(1000)]
    for index, carrier in enumerate(("AA", "DL", "UA", "WN")):
        late = [delay for which, delay in delays if which == index and delay > 60]
        assert re.search(rf"\|\s*{carrier}\|\s*250\|\s*{len(late)}\|\s*{max(late)}\|", printed), (
            printed
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mypy_in_strict_mode_passes_the_programs(kind: str, projects: Path) -> None:
    rules = projects / "mypy.ini"
    rules.write_text(
        f"[mypy]\nstrict = true\nmypy_path = {ROOT / 'src'}\ncache_dir = {projects / '.mypy'}\n"
        # Half a minute for one import; pyright, below, reads it too.
        "[mypy-pyspark.*]\nfollow_imports = skip\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(rules), "."],
        cwd=projects / kind, capture_output=True, text=True, timeout=limit(110), check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_pyright_passes_the_programs(projects: Path) -> None:
    (projects / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT / "src"}"]}}')
    found = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(projects)],
        capture_output=True, text=True, timeout=limit(110), check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
