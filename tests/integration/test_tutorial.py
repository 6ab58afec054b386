"""docs/tutorial and its program, examples/orders: the pages quote the program, the program's own
tests pass, and the commands of the pages do what they show."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from sluicemq.testing.embedded import embedded
from waiting import limit, wait_for

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
PROGRAM = ROOT / "examples" / "orders"
SOURCE = "\n".join(path.read_text() for path in sorted(PROGRAM.rglob("*.py")))
SOURCE = re.sub(r"\n{2,}", "\n\n", SOURCE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^\$ (.*)\n((?:[^`$].*\n)*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_is_the_programs(page: Path) -> None:
    for block in BLOCK.findall(re.sub(r"\n{2,}", "\n\n", page.read_text())):
        assert any(textwrap.indent(block, " " * depth) in SOURCE for depth in (0, 4)), block


def test_the_pages_quote_most_of_the_program() -> None:
    quoted = "".join(block for page in PAGES for block in BLOCK.findall(page.read_text()))
    assert quoted.count("\n") > 150


def test_the_tests_of_the_program_pass(tmp_path: Path) -> None:
    plugin = () if _has_entry_point() else ("-p", "sluicemq.testing.plugin")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *plugin,
         "--basetemp", str(tmp_path / "tests")],
        cwd=PROGRAM, env=_environment(), capture_output=True, text=True, check=False,
        timeout=limit(100),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\b9 passed", done.stdout), done.stdout[-300:]


def _has_entry_point() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == "sluicemq.testing.plugin" for point in entry_points(group="pytest11"))


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(PROGRAM)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "400", **more}


class Shop:
    """Commands, in a directory with a database of its own."""

    def __init__(self, directory: Path, name_server: str) -> None:
        self._directory = directory
        self._environment = _environment(NAMESRV_ADDR=name_server)
        self._running: list[subprocess.Popen[str]] = []

    def run(self, words: Sequence[str]) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self._directory, env=self._environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, timeout=limit(60),
        )  # fmt: skip
        return done.stdout

    def start(self, command: str) -> IO[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "shop", command],
            cwd=self._directory, env=self._environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._running.append(process)
        assert process.stdout is not None
        return process.stdout

    def close(self) -> None:
        """As by Ctrl-C."""
        while self._running:
            process = self._running.pop()
            process.send_signal(signal.SIGINT)
            assert process.wait(limit(30)) == 0
            assert process.stdout is not None
            process.stdout.close()


async def test_the_commands_of_the_pages_do_what_they_show(tmp_path: Path) -> None:
    async with embedded(tcp=True) as mq:
        shop = Shop(tmp_path, mq.servers.name_server_address)
        try:
            await asyncio.to_thread(_visit, shop)
        finally:
            await asyncio.to_thread(shop.close)


def _visit(shop: Shop) -> None:
    opened = shop.start("open")
    assert opened.readline() == "open\n"
    looked = shop.start("review")
    for command in ("place 17 north 2500", "place 18 north 240000", "pay 17 north 2500"):
        assert not shop.run(["shop", *command.split()])
    assert opened.readline() == "order 17 leaves for north\n"
    assert looked.readline() == "look at order 18: 2400.00\n"
    find = ["sluicemq", "message", "query", "--topic", "orders", "--key", "17"]
    wait_for(lambda: "shipped" in shop.run(find))
    message_id = next(
        one["message_id"]
        for one in map(json.loads, shop.run([*find, "--json"]).splitlines())
        if one["tag"] == "placed"
    )
    lag = ["sluicemq", "group", "lag", "books"]
    wait_for(lambda: "0 messages match" in shop.run(lag))  # offsets are committed every 5 s
    sessions = SESSION.findall((ROOT / "docs/tutorial/7-operation.md").read_text())
    assert len(sessions) == 6
    for command, shown in sessions:
        if "doctor" in command:
            shop.close()
        _, *words = shlex.split(command.replace("ID", message_id))
        printed = shop.run(["sluicemq", *words])
        for line in shown.splitlines():
            assert line in printed, printed
