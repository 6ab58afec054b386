"""Test `sluice console` as a process, its account commands, and the console of `sluice up`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from waiting import limit

SOURCE = Path(__file__).parents[3] / "src"
TIMEOUT_S = 60
Start = Callable[..., subprocess.Popen[str]]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sluicemq", *words]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []
    environment = {
        **os.environ, "PYTHONPATH": str(SOURCE), "NAMESRV_ADDR": "127.0.0.1:1",
        "XDG_CONFIG_HOME": str(tmp_path),
    }  # fmt: skip

    def begin(*words: str) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            command(*words), text=True, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        running.append(made)
        return made

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def link_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"console=(\S+)", line)
    assert found, line or process.communicate()[1]
    return found[1]


def test_the_link_works_once_and_a_missing_cluster_is_one_sentence(start: Start) -> None:
    process = start("console", "--port", "0")
    link = link_of(process)
    with httpx.Client(timeout=limit(TIMEOUT_S)) as browser:
        assert browser.get(link).headers["location"] == "/"
        answer = browser.get(link.partition("/enter")[0] + "/topics")
        assert answer.status_code == 502
        assert "Traceback" not in answer.text
        assert browser.get(link).status_code == 403
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit(TIMEOUT_S)) == 0


def test_a_public_address_requires_console_accounts(start: Start, tmp_path: Path) -> None:
    refused = start("console", "--host", "0.0.0.0", "--port", "0")
    _, errors = refused.communicate(timeout=limit(TIMEOUT_S))
    assert refused.returncode == 1
    assert "without accounts" in errors
    words = "console", "account", "add", "ann", "--role", "operate", "--secret-stdin"
    added = start(*words)
    text, _ = added.communicate("a long enough secret\n", timeout=limit(TIMEOUT_S))
    assert "ann has the role operate" in text
    assert (tmp_path / "sluicemq" / "console.json").stat().st_mode & 0o777 == 0o600
    listed, _ = start("console", "account", "list", "--json").communicate(timeout=limit(TIMEOUT_S))
    assert listed == '{"name":"ann","role":"operate"}\n'
    address = link_of(start("console", "--host", "0.0.0.0", "--port", "0"))
    assert "token" not in address
    start("console", "account", "remove", "ann").communicate(timeout=limit(TIMEOUT_S))
    listed, _ = start("console", "account", "list", "--json").communicate(timeout=limit(TIMEOUT_S))
    assert listed == ""


def test_up_starts_the_console(start: Start, tmp_path: Path) -> None:
    process = start(
        "up", "--nameserver-port", "0", "--broker-port", "0", "--store", str(tmp_path / "store"),
        "--console",
    )  # fmt: skip
    with httpx.Client(timeout=limit(TIMEOUT_S), follow_redirects=True) as browser:
        answer = browser.get(link_of(process))
        assert "DefaultCluster" in answer.text
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit(TIMEOUT_S)) == 0
