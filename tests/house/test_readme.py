"""The Python examples of README.md and docs are programs.

All compile, and README's two run, in order, against a cluster started as README says.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import limit

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("README*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
]
CHINESE = [page for page in DOCUMENTS if page.name.endswith(".zh.md")]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAME_SERVER = "127.0.0.1:9876"


def examples(document: Path) -> list[str]:
    return EXAMPLE.findall(document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_examples_compile(document: Path) -> None:
    for number, text in enumerate(examples(document)):
        compile(text, f"{document.name}, example {number}", "exec")


def test_readme_shows_produce_consume_and_spark() -> None:
    messages, spark = examples(ROOT / "README.md")
    assert ".send(" in messages
    assert "where=" in messages
    assert 'format("rocketmq")' in spark


def test_readme_is_a_landing_page() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


@pytest.mark.parametrize("page", CHINESE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_chinese_pages_show_what_runs_in_tests(page: Path) -> None:
    """Their programs, commands and outputs are those of English pages or of examples/."""
    sources = [*set(DOCUMENTS).difference(CHINESE), *(ROOT / "examples").rglob("*.py")]
    run = with_one_blank_line("\n".join(path.read_text() for path in sources))
    text = page.read_text().replace("<仓库地址>", "<address of the repository>")
    unknown = [
        block
        for block in map(with_one_blank_line, BLOCK.findall(text))
        # Methods that are shown by themselves are laid out as functions are.
        if not any(textwrap.indent(block, " " * depth) in run for depth in (0, 4))
    ]
    assert not unknown, "Copy these blocks from an English page:\n" + "\n".join(unknown)


def test_the_chinese_pages_are_found() -> None:
    names = {str(page.relative_to(ROOT)) for page in CHINESE}
    assert {"README.zh.md", "docs/quickstart.zh.md", "docs/tutorial/index.zh.md"} <= names
    assert sum(len(examples(page)) for page in CHINESE) > 10


def with_one_blank_line(text: str) -> str:
    return re.sub(r"\n{2,}", "\n\n", text)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the name server of `sluice up`, started as README says."""
    directory = tmp_path_factory.mktemp("readme")
    name_server, broker, metrics = free_ports()
    configuration = directory / "broker.conf"
    configuration.write_text(f"metricsPromExporterPort={metrics}\n")
    command = [
        sys.executable,
        "-m",
        "sluicemq",
        "up",
        "--store",
        str(directory / "store"),
        "-c",
        str(configuration),
    ]
    command += ["--nameserver-port", str(name_server), "--broker-port", str(broker)]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready"), (directory / "log").read_text()
        yield f"127.0.0.1:{name_server}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        assert process.wait(limit(20)) == 0


def test_readme_examples_run(cluster: str) -> None:
    messages, _ = readme(cluster, topic="flights")
    assert run(messages) == "flight 1 853\n"


@pytest.mark.parametrize(
    "name",
    ["README.md", "README.zh.md", "docs/first-message.zh.md"],
)
def test_the_first_message_goes_from_the_shell(cluster: str, name: str) -> None:
    block = re.search(
        r"^sluice produce (.*)\nsluice consume (.*)$", (ROOT / name).read_text(), re.MULTILINE
    )
    assert block
    printed = [
        subprocess.run(
            [sys.executable, "-m", "sluicemq", command, "-n", cluster, *shlex.split(words)],
            env=environment(), capture_output=True, text=True, timeout=limit(60), check=True,
        ).stdout
        for command, words in (("produce", block[1]), ("consume", block[2]))
    ]  # fmt: skip
    assert "OK" in printed[0]
    assert "lamp" in printed[1]


@pytest.mark.spark
@pytest.mark.slow
def test_readme_spark_example_runs(cluster: str) -> None:
    messages, spark = readme(cluster, topic="flights2")
    run(messages)
    printed = run(spark)
    assert re.search(r"\|\s*UA\|\s*853\.0\|", printed), printed


def readme(cluster: str, *, topic: str) -> list[str]:
    """The examples, pointed at the cluster and, as the tests share it, at a topic of their own."""
    return [
        text.replace(NAME_SERVER, cluster).replace('"flights"', f'"{topic}"')
        for text in examples(ROOT / "README.md")
    ]


def environment() -> dict[str, str]:
    """As in an activated virtual environment: Spark would start any `python3` of the PATH."""
    ours = {
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "PYSPARK_PYTHON": sys.executable,
    }
    return {**os.environ, **ours}


def run(text: str) -> str:
    command = [sys.executable, "-c", text]
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=limit(110), check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for one in (first, second, third):
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in (first, second, third)]
