"""The suites of RocketMQ that are run, and how each of them is compiled and started.

Two suites come from a checkout of RocketMQ's end-to-end tests, which is not part of this project.
The tests of RocketMQ's broker come as a jar from the package index; they start brokers of their
own, unless our class BaseConf stands before theirs on the class path.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from peer.toolchain import jars, made, run, tool

HERE: Final = Path(__file__).parent
JAVA: Final = HERE.parent / "java"
SUITE_TIMEOUT_S: Final = 3600


@dataclass(frozen=True)
class Suite:
    """A suite of tests. `pom` names the file in tests/compatibility/java with its libraries.

    `source` is the directory of the suite within the checkout of end-to-end tests; empty for tests
    that come as a jar. `classes` are the classes to run; none: all that `source` holds. `brokers`
    is the number of brokers that the tests expect.
    """

    title: str
    pom: str
    source: str = ""
    classes: Sequence[str] = ()
    brokers: int = 1
    has_proxy: bool = False


POP: Final = "org.apache.rocketmq.test.client.consumer.pop"
SUITES: Final = (
    Suite("gRPC, client 5.0.3", "suite-grpc-5.0.3", "java/e2e", has_proxy=True),
    Suite("gRPC, client 5.2.0", "suite-grpc-5.2.0", "java/e2e", has_proxy=True),
    Suite("remoting, client 4.9.3", "suite-remoting-4.9.3", "java/e2e-v4"),
    Suite(
        "NotificationIT of rocketmq-test 5.5.0",
        "suite-broker-5.5.0",
        classes=[f"{POP}.NotificationIT"],
        brokers=3,
    ),
)


@dataclass
class Result:
    """How the tests of a suite ended, by name; `seconds` is how long they took."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """All tests."""
        return len(self.passed) + len(self.failed) + len(self.skipped)


def compiled(suite: Suite, checkout: Path | None) -> Path:
    """Return the directory of the suite's compiled classes. Raises MissingTool."""
    libraries = jars(suite.pom)
    sources, resources = _sources(suite, checkout)

    def compile_into(target: Path) -> None:
        options = ["-nowarn", "-Xlint:none", "-encoding", "UTF-8", "-cp", f"{libraries}/*"]
        listed = target.parent / "sources"
        listed.write_text("\n".join(map(str, sources)))
        run([tool("javac"), *options, "-d", str(target), f"@{listed}"], cwd=target)
        for name, path in resources:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(path.read_bytes())

    inputs = [JAVA / f"{suite.pom}.xml", *sources, *(path for _, path in resources)]
    return made(f"{suite.pom}-classes", inputs, compile_into)


def _sources(suite: Suite, checkout: Path | None) -> tuple[list[Path], list[tuple[str, Path]]]:
    if not suite.source:
        return sorted((HERE / "java").glob("*.java")), []
    assert checkout is not None
    root = checkout / suite.source
    resources = root / "src" / "test" / "resources"
    found = [path for path in sorted(resources.rglob("*")) if path.is_file()]
    return (
        sorted((root / "src").rglob("*.java")),
        [(str(path.relative_to(resources)), path) for path in found],
    )


def start(
    suite: Suite, classes: Path, directory: Path, checkout: Path | None, told: Mapping[str, str]
) -> Result:
    """Run the tests and return how they ended. `told` are system properties. Raises RuntimeError
    when no report is written."""
    selected = [f"--select-class={name}" for name in suite.classes] or [
        f"--scan-class-path={classes}",
        "--include-classname=.*Test.*",
    ]
    report = directory / "report"
    command = [
        tool("java"), "-Xmx512m", *(f"-D{name}={value}" for name, value in told.items()),
        "-cp", class_path(suite, classes),
        "org.junit.platform.console.ConsoleLauncher", *selected, f"--reports-dir={report}",
        "--disable-ansi-colors", "--details=tree",
    ]  # fmt: skip
    where = directory if checkout is None else checkout / suite.source
    with (directory / "tests.log").open("wb") as log:
        subprocess.run(
            command, cwd=where, stdout=log, stderr=subprocess.STDOUT, timeout=SUITE_TIMEOUT_S,
            check=False, env={**os.environ, "cluster": "DefaultCluster"},
        )  # fmt: skip
    result = Result()
    for path in sorted(report.glob("TEST-*.xml")):
        _read(path, result)
    if not result.count:
        text = (directory / "tests.log").read_text(errors="replace")
        raise RuntimeError(f"{suite.title} has run no test:\n{text[-3000:]}")
    return result


def class_path(suite: Suite, classes: Path) -> str:
    """Return the class path of a suite. The gRPC client comes first among the libraries, as in the
    suite's own project: it has changed copies of classes that other libraries have, too."""
    found = sorted(
        jars(suite.pom).glob("*.jar"),
        key=lambda path: (not path.name.startswith("rocketmq-client-java"), path.name),
    )
    return os.pathsep.join(map(str, [classes, *found]))


def _read(path: Path, result: Result) -> None:
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name', '')}"
        wrong = next((it for it in case if it.tag in ("failure", "error")), None)
        left_out = case.find("skipped")
        if wrong is not None:
            text = (wrong.get("message") or wrong.text or "").strip() or wrong.get("type", "")
            result.failed[name] = text.splitlines()[0] if text else "?"
        elif left_out is not None:
            result.skipped[name] = (left_out.text or "").strip()
        else:
            result.passed.append(name)
