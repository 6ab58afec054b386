"""The commands of docs/first-message.md, and the shell that `make first-message` gives them to."""

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TOOL = runpy.run_path(str(ROOT / "tools" / "strangers_path.py"))
COMMANDS_MAX = 12


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Any]:
    shell = TOOL["Shell"](tmp_path, dict(os.environ), tmp_path / "output")
    yield shell
    shell.close()


def test_the_page_takes_a_stranger_from_clone_to_message_in_few_commands() -> None:
    told = TOOL["commands"](TOOL["PAGE"].read_text())
    assert len(told) <= COMMANDS_MAX
    words = ("git clone", "-m venv", "pip install", "sluice up", "sluice cluster wait")
    words = (*words, "sluice produce", "sluice consume")
    places = [next(i for i, line in enumerate(told) if word in line) for word in words]
    assert places == sorted(places)
    assert told[-1].startswith("kill ")


def test_commands_share_a_shell_and_each_says_how_it_ended(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    assert [shell.run(line) for line in ("cd inner", "x=17", "false", 'echo "$x in $PWD"')] == [
        0, 0, 1, 0,
    ]  # fmt: skip
    assert shell.printed == f"17 in {tmp_path / 'inner'}\n"


def test_a_command_in_the_background_is_not_waited_for(shell: Any) -> None:
    assert shell.run("sleep 60 &") == 0
    assert shell.run("kill $!") == 0
