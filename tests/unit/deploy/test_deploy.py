"""The files of deploy/ and the workflows: what they name is there, and what they run is ours."""

import fnmatch
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from sluicemq.broker.metrics import ACCESS_METRICS, COUNTERS, GAUGES
from sluicemq.cli import main
from sluicemq.pipelines.file import check_pipeline
from waiting import limit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COPIES = [line.split()[1:] for line in DOCKERFILE.splitlines() if re.match(r"COPY (?!--)", line)]
"""Of each COPY from the project: what, and the folder that it goes to."""
METRIC = re.compile(r"\b(?:rocketmq|sluicemq)_[a-z_]+")
KNOWN = {
    *(f"{family.name}_total" for family in (*COUNTERS, *ACCESS_METRICS) if not family.is_gauge),
    *(family.name for family in (*GAUGES, *ACCESS_METRICS)),
    "sluicemq_send_latency_seconds_bucket",
}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def test_every_metric_of_the_dashboard_and_of_the_alerts_exists() -> None:
    dashboard = (DEPLOY / "grafana" / "sluicemq.json").read_text()
    expressions = [
        target["expr"]
        for panel in json.loads(dashboard)["panels"]
        for target in panel.get("targets", ())
    ]
    expressions += [rule["expr"] for rule in rules()]
    assert len(expressions) > 30
    unknown = {name for text in expressions for name in METRIC.findall(text)} - KNOWN
    assert not unknown


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert {"summary", "action"} == set(rule["annotations"]), rule["alert"]


def test_alerts_on_counters_fire_for_the_first_event() -> None:
    """The series of a labelled counter begins with its first event, so `increase` is 0 then."""
    counters = [
        (rule["expr"], name)
        for rule in rules()
        for name in re.findall(r"increase\((\w+)\[", rule["expr"])
    ]
    assert counters
    for expression, name in counters:
        assert f"or ({name} > 0 unless {name} offset " in expression


def words_of_services() -> Iterator[list[str]]:
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        (line,) = re.findall(r"^ExecStart=\S+/sluice (.*)$", path.read_text(), re.MULTILINE)
        yield line.split()
    for service in load("compose.yml")["services"].values():
        if "entrypoint" in service:
            for line in service["entrypoint"][-1].splitlines():
                yield shlex.split(line.partition("sluice ")[2])
        elif "sluicemq" in service["image"]:
            yield service["command"]
    for command in re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE):
        yield json.loads(command)


CONTEXT = click.Context(main)


@pytest.mark.parametrize("words", list(words_of_services()), ids=" ".join)
def test_what_the_services_run_is_a_command_of_ours(words: list[str]) -> None:
    command: click.Command = main
    while isinstance(command, click.Group) and (words[0] in command.list_commands(CONTEXT)):
        found = command.get_command(CONTEXT, words[0])
        assert found is not None
        command, words = found, words[1:]
    # Names of files are those of another machine.
    options = [word for word in words if not word.startswith(("/etc/", "/pipelines/"))]
    options = [word for word in options if word != "-c"]
    _, rest, _ = command.make_parser(click.Context(command)).parse_args(options)
    assert command is not main
    assert not rest or isinstance(command, click.Group) or command.name == "add"


def test_files_that_compose_mounts_are_there() -> None:
    for service in load("compose.yml")["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    assert "alerts.yml" in load("prometheus/prometheus.yml")["rule_files"]


def test_compose_has_a_whole_cluster_and_a_job() -> None:
    services = load("compose.yml")["services"]
    assert {"nameserver", "broker", "proxy", "console", "spark"} <= set(services)
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for name, service in services.items():
        for other in service.get("depends_on", ()):
            assert other in services, name
    mounted = services["spark"]["command"][-1].removeprefix("/")
    _, problems = check_pipeline(str(DEPLOY / mounted), services["spark"]["environment"])
    assert not problems


def ignored(path: str) -> bool:
    """What deploy/Dockerfile.dockerignore keeps out of an image, by its name anywhere."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    return any(fnmatch.fnmatch(part, one) for part in path.split("/") for one in patterns)


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for *sources, _ in COPIES:
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in lines, source
    assert ignored("src/sluicemq/engine/sends.cpython-311.so")
    assert not ignored("src/sluicemq/engine/sends.pyx")


def test_the_package_builds_from_what_the_image_copies(tmp_path: Path) -> None:
    context = tmp_path / "source"
    for *sources, folder in COPIES:
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, context / folder,
                    ignore=lambda _, names: [name for name in names if ignored(name)],
                )  # fmt: skip
            else:
                (context / folder).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, context / folder)
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."],
        cwd=context, env={**os.environ, "SLUICE_PURE": "1"}, capture_output=True, text=True,
        timeout=limit(110), check=False,
    )  # fmt: skip
    if made.returncode and os.environ.get("CI") != "true" and "No matching" in made.stderr:
        pytest.skip("pip has no index to get the build tools from")
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert runpy.run_path(str(ROOT / "tools" / "dist.py"))["faults_of"](wheel) == []


def test_the_image_is_nobodys_and_says_how_it_is() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    for stage in (stages[-1], next(one for one in stages if one.startswith("base AS spark"))):
        assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE)[-1] == "3000"
    exposed = re.findall(r"^EXPOSE (.+)$", stages[-1], re.MULTILINE)[-1].split()
    asked = re.findall(r"HEALTHCHECK.*\n.*127\.0\.0\.1:(\d+)/health", stages[-1])
    assert set(asked) <= set(exposed)
    assert asked


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_only_and_names_what_it_uses(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        for step in job["steps"]:
            assert "uses" not in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step


def test_the_workflows_run_what_is_run_here() -> None:
    told = {path.name: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
    tests = told["ci.yml"]["jobs"]["tests"]
    assert ".ci/run" in [step.get("run") for step in tests["steps"]]
    builds = PROJECT["tool"]["cibuildwheel"]["build"]
    assert [
        f"cp{one.replace('.', '')}-*" for one in tests["strategy"]["matrix"]["python"]
    ] == builds
    makes = [
        step["run"].split()[1]
        for workflow in told.values()
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if step.get("run", "").startswith("make ")
    ]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makes
    assert set(makes) <= set(targets)


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    for path in (DEPLOY / "systemd").glob("*.service"):
        unit = re.sub(r"/opt/sluice/bin/sluice", "/bin/true", path.read_text())
        (tmp_path / path.name).write_text(unit)
    found = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.glob("*.service"))],
        capture_output=True, text=True, timeout=limit(60), check=False,
    )  # fmt: skip
    assert not [line for line in found.stderr.splitlines() if str(tmp_path) in line]


@pytest.mark.timeout(900)
def test_the_image_builds_where_there_is_a_builder() -> None:
    docker = shutil.which("docker") or "docker-is-not-here"
    if docker == "docker-is-not-here" or subprocess.run([docker, "info"], check=False).returncode:
        pytest.skip("no builder of images is here")
    words = [docker, "build", "-q", "-f", str(DEPLOY / "Dockerfile"), str(ROOT)]
    subprocess.run(words, check=True, timeout=limit(900))
