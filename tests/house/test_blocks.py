"""Every block of code in Markdown is right, as far as that is seen without a server.

Commands are those that `sluice` has, with options and values that it takes; `make`, `pip` and
`python -m` name what is there; files of settings, rules and pipelines are read by what reads them.
Python blocks run in tests/integration/client/test_documents.py, those for Spark in
tests/integration/spark/test_spark_documents.py. What is not run says why: `python
tests/lib/fences.py` lists it.
"""

import json
import re
import sqlite3
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import yaml

from fences import ALL, DOCUMENTS, LINES, ROOT, SHELL, Fence, Line, fences, split, with_language
from sluicemq.acl.loading import load_rules
from sluicemq.cli import main
from sluicemq.config import load_broker_config
from sluicemq.pipelines.file import parse_pipeline

CHECKED = {*SHELL, "python", "yaml", "toml", "json", "properties", "conf", "ini", "sql", "text"}
NOT_RUN_MAX = 24
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def named(blocks: list[Fence]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks, ids=map(str, blocks))


def test_what_is_not_run_says_why() -> None:
    silent = [one for one in ALL if one.language not in CHECKED and not one.reason]
    assert not silent, "\n".join(
        f"{one}: {one.language}, and no `<!-- not run: … -->`" for one in silent
    )
    reasons = [one for one in ALL if one.reason]
    assert all(len(one.reason.split()) >= 4 for one in reasons)
    assert len(reasons) <= NOT_RUN_MAX, "\n".join(f"{one}: {one.reason}" for one in reasons)


def test_the_walk_finds_blocks_and_their_reasons(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "- item\n\n  ```python\n  if True:\n      pass\n  ```\n\n"
        "<!-- not run: needs a\nJava that is old -->\n\n```java\nx\n```\n"
    )
    first, second = fences(page)
    assert (first.language, first.line, first.text) == ("python", 4, "if True:\n    pass\n")
    assert (second.language, second.reason) == ("java", "needs a Java that is old")


# ------------------------------------------------------------------------------------- commands
FOLDERS = [ROOT, *ROOT.glob("examples/*"), *ROOT.glob("src/sluicemq/cli/templates/*")]
"""Where a reader stands who types a command."""


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.place} {' '.join(line.words[:4])}")
def test_a_command_is_one_that_there_is(line: Line) -> None:
    program, *words = line.words
    match program.rpartition("/")[2]:
        case "sluice":
            parse(main, words, click.Context(main, info_name="sluice"))
        case "make":
            assert {one for one in words if "=" not in one} <= TARGETS
        case "pip":
            assert words[0] in ("install", "wheel")
            for extras in re.findall(r"\.\[(.*?)\]", " ".join(words)):
                assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
        case _ if words[0] == "-m":
            names = {words[1].replace(".", "/"), words[1].replace(".", "/") + ".py"}
            assert any((one / name).exists() for one in FOLDERS for name in names) or find_spec(
                words[1]
            )
        case _ if words[0].endswith(".py"):
            page = ROOT / line.place.partition(":")[0]
            is_saved = f"```python\n# {words[0]}\n" in page.read_text()
            assert is_saved or any((one / words[0]).is_file() for one in FOLDERS)


def test_commands_were_found() -> None:
    assert len([line for line in LINES if line.words[0] == "sluice"]) > 80


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("sluice tpoic list", "No such command"),
        ("sluice topic list --al", "No such option"),
        ("sluice topic create", "Missing parameter"),
        ("sluice consume t --max many", "not a valid integer"),
        ("cat x | sluice produce", "Missing parameter"),
    ],
)
def test_wrong_commands_are_found(wrong: str, says: str) -> None:
    (line,) = split("here", wrong)
    with pytest.raises(click.UsageError, match=says):
        parse(main, line.words[1:], click.Context(main, info_name="sluice"))


def parse(command: click.Command, words: list[str], context: click.Context) -> None:
    """Raises click.UsageError for what click would refuse; files need not be there."""
    if isinstance(command, click.Group) and type(command).parse_args is not click.Group.parse_args:
        command.parse_args(context, words)  # it may put the name of a command before what it gets
        words = [*context._protected_args, *context.args]
    parser = command.make_parser(context)
    values, rest, _ = parser.parse_args(list(words))
    for parameter in command.params:
        value = values.get(parameter.name)
        is_given = value is not None and value != () and "UNSET" not in repr(value)
        is_told = any(word in ("--help", "-h", "--version") for word in words)
        if not is_given and parameter.required and not is_told:
            raise click.MissingParameter(ctx=context, param=parameter)
        if is_given and not isinstance(parameter.type, click.Path | click.File):
            parameter.type_cast_value(context, value)
    if isinstance(command, click.Group) and rest:
        name, child, words = command.resolve_command(context, rest)
        assert child is not None
        parse(child, words, click.Context(child, context, name, **child.context_settings))


def test_commands_that_a_sentence_names_are_there() -> None:
    named = {
        (str(document.relative_to(ROOT)), words)
        for document in DOCUMENTS
        for words in re.findall(r"`sluice\s([a-z][^`]*)`", document.read_text())
    }
    unknown = [f"{place}: sluice {words}" for place, words in named if not is_known(words.split())]
    assert len(named) > 100
    assert not unknown, "\n".join(sorted(unknown))


def is_known(words: list[str]) -> bool:
    """Does each word that would be a command name one?"""
    command: click.Command = main
    for word in words:
        if not isinstance(command, click.Group) or not re.fullmatch("[a-z-]+", word):
            break
        found = command.get_command(click.Context(command), word)
        if found is None:
            return word.startswith("-")
        command = found
    return True


@named([one for one in with_language("sh", "bash", "shell") if one.text])
def test_a_script_is_one_that_a_shell_reads(block: Fence) -> None:
    done = subprocess.run(
        ["sh", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{block}: {done.stderr}"


# ---------------------------------------------------------------------------------------- files


@named(with_language("yaml"))
def test_a_yaml_file_is_read_by_what_reads_it(block: Fence) -> None:
    value = yaml.safe_load(block.text)
    assert value, block
    if "accounts" in value:
        assert not load_rules(block.text, "plain_acl.yml").warnings
    elif value.keys() & {"use", "sinks", "transform"}:
        pipeline, problems = parse_pipeline(block.text, "page.yaml", {})
        assert pipeline, [str(one) for one in problems]
        assert not problems
    else:
        assert value.keys() & {"services", "groups", "scrape_configs", "jobs", "apiVersion"}, block


@named(with_language("properties", "conf"))
def test_settings_are_settings_of_ours(block: Fence) -> None:
    text = re.sub(r"\s+#.*", "", block.text)
    *_, warnings = load_broker_config(text, environment={})
    assert not warnings, block


@named(with_language("json"))
def test_json_is_json(block: Fence) -> None:
    assert json.loads(block.text)


@named(with_language("toml"))
def test_toml_is_toml(block: Fence) -> None:
    assert tomllib.loads(block.text)


@named(with_language("sql"))
def test_sql_runs_in_a_database(block: Fence) -> None:
    with sqlite3.connect(":memory:") as database:
        database.execute("create table flights (carrier text)")
        database.executescript(block.text)
