"""The files of deploy/: what they name is there."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from sluicemq.broker.metrics import COUNTERS, GAUGES, OF_ACCESS_CONTROL
from sluicemq.cli import main

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b(?:rocketmq|sluicemq)_[a-z_]+")
KNOWN = {
    *(f"{family.name}_total" for family in (*COUNTERS, *OF_ACCESS_CONTROL) if not family.is_gauge),
    *(family.name for family in (*GAUGES, *OF_ACCESS_CONTROL)),
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


def words_of_services() -> Iterator[list[str]]:
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        (line,) = re.findall(r"^ExecStart=\S+/sluice (.*)$", path.read_text(), re.MULTILINE)
        yield line.split()
    for service in load("compose.yml")["services"].values():
        if service.get("image") == "sluicemq":
            yield service["command"]
    (command,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    yield json.loads(command)


@pytest.mark.parametrize("words", list(words_of_services()), ids=" ".join)
def test_what_the_services_run_is_a_command_of_ours(words: list[str]) -> None:
    context = click.Context(main)
    command = main.get_command(context, words[0])
    assert command is not None
    # Names of files are those of another machine.
    options = [word for word in words[1:] if not word.startswith("/etc/")]
    options = [word for word in options if word != "-c"]
    command.make_parser(click.Context(command)).parse_args(options)


def test_files_that_compose_mounts_are_there() -> None:
    for service in load("compose.yml")["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    assert "alerts.yml" in load("prometheus/prometheus.yml")["rule_files"]


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    for path in (DEPLOY / "systemd").glob("*.service"):
        unit = re.sub(r"/opt/sluice/bin/sluice", "/bin/true", path.read_text())
        (tmp_path / path.name).write_text(unit)
    found = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.glob("*.service"))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not [line for line in found.stderr.splitlines() if str(tmp_path) in line]


def test_the_image_builds_where_there_is_a_builder() -> None:
    docker = shutil.which("docker") or "docker-is-not-here"
    if docker == "docker-is-not-here" or subprocess.run([docker, "info"], check=False).returncode:
        pytest.skip("no builder of images is here")
    words = [docker, "build", "-q", "-f", str(DEPLOY / "Dockerfile"), str(ROOT)]
    subprocess.run(words, check=True, timeout=900)
