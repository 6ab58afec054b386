"""What a user can ask for is documented: settings, commands, options, request codes, names of the
Python API.

Method (after datasette's test_docs): the program is the truth, the page has to name all of it and
nothing else.
"""

import ast
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import sluicemq
from sluicemq.cli import main
from sluicemq.config import KEYS
from sluicemq.wire.codes import RequestCode

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sluicemq"
PART = re.MULTILINE | re.DOTALL
ROW = re.compile(r"^\| (\d+) \| (\w+) \|", re.MULTILINE)
sys.path.append(str(ROOT / "tools"))  # for what the tools import from each other
CLI_PAGE = runpy.run_path(str(ROOT / "tools" / "cli_page.py"))
PAGES = {"Broker": SOURCE / "broker", "Name server": SOURCE / "nameserver"}


def document(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


# ---- configuration


def test_every_configuration_key_is_documented() -> None:
    page = document("configuration.md")
    missing = [key.name for key in KEYS if f"`{key.name}`" not in page]
    assert not missing, f"docs/configuration.md lacks {missing}"


# ---- command line


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that lead to it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, f"{name} is listed and not there"
            yield from commands(child, (*path, name))


COMMANDS = list(commands(main))


@pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=[" ".join(path) or "sluice" for path, _ in COMMANDS]
)
def test_every_command_and_option_is_documented(
    path: tuple[str, ...], command: click.Command
) -> None:
    words = " ".join(("sluice", *path))
    section = cli_section(words) + shared_options()
    assert command.help, f"`{words}` has no help text"
    for parameter in command.params:
        if (
            isinstance(parameter, click.Option)
            and "--help" not in parameter.opts
            and "--version" not in parameter.opts
        ):
            assert any(f"`{name}" in section for name in parameter.opts), (
                f"docs/cli.md, {words}: {parameter.opts}"
            )
            assert parameter.help, f"`{words} {parameter.opts[0]}` has no help text"


def cli_section(words: str) -> str:
    """The part of docs/cli.md below the heading of the command, up to the next heading."""
    found = re.search(rf"^#+ `{re.escape(words)}`\n(.*?)(?=^#+ |\Z)", document("cli.md"), PART)
    assert found, f"docs/cli.md has no heading for `{words}`"
    return found[1]


def shared_options() -> str:
    """The sections about the options that many commands have."""
    return "".join(re.findall(r"^## Options of all \w+.*?\n(?=## )", document("cli.md"), PART))


def test_the_index_and_the_usage_of_commands_are_up_to_date() -> None:
    page = document("cli.md")
    assert page == CLI_PAGE["with_tables"](page), "run python tools/cli_page.py docs/cli.md"
    index = page.partition("<!-- written: commands -->")[2].partition("<!-- end -->")[0]
    links = [f"(#{'-'.join(('sluice', *path))})" for path, _ in COMMANDS if path]
    assert [link for link in links if link not in index] == []


# ---- request codes


def answered(directory: Path) -> set[int]:
    """Codes that are keys of a dispatch table in the folder: `RequestCode.X: handler`."""
    return {
        int(RequestCode[key.attr])
        for path in directory.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Attribute) and ast.unparse(key.value) in ("RequestCode", "Code")
    }


@pytest.mark.parametrize("heading", PAGES)
def test_every_request_code_is_documented(heading: str) -> None:
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", document("requests.md"), PART)
    assert section
    rows = {int(code): name for code, name in ROW.findall(section[1])}
    codes = answered(PAGES[heading])
    assert len(codes) > 15, "the tables were found"
    assert set(rows) == codes, (
        f"missing {sorted(codes - set(rows))}, too many {sorted(set(rows) - codes)}"
    )
    assert rows == {code: RequestCode(code).name for code in codes}


# ---- Python API


@pytest.mark.parametrize("name", sorted(sluicemq.__all__))
def test_every_exported_name_has_a_docstring(name: str) -> None:
    value = getattr(sluicemq, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return
    assert inspect.getdoc(value), f"sluicemq.{name} says nothing about itself"
    for member, function in inspect.getmembers(value, inspect.isfunction):
        if not member.startswith("_") and function.__module__.startswith("sluicemq"):
            assert inspect.getdoc(function), f"sluicemq.{name}.{member} says nothing about itself"


def test_exported_names_are_there_and_complete() -> None:
    for module in ("sluicemq",):
        exported = importlib.import_module(module)
        assert all(hasattr(exported, name) for name in exported.__all__)
