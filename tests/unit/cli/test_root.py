"""Test the command group `sluice`: it lists commands without imports, and reports errors."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sluicemq import __version__, engine
from sluicemq.cli import COMMANDS, main
from sluicemq.cli.servers.serve import make_name_server_config
from sluicemq.config import BrokerConfig, StoreConfig
from waiting import limit

SOURCE = Path(__file__).parents[3] / "src"


HEAVY = {
    "asyncio",
    "logging",
    "numpy",
    "orjson",
    "prometheus_client",
    "pyarrow",
    "pyspark",
    "rich",
    "ssl",
    "uvloop",
    "yaml",
}


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys\nfrom sluicemq.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=limit(30),
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    for name, entry in COMMANDS.items():
        assert f"  {name} " in found.stdout
        assert entry.summary in found.stdout
    imported = set(ast.literal_eval(found.stdout.splitlines()[-1]))
    ours = {name for name in imported if name.startswith("sluicemq")}
    assert ours == {"sluicemq", "sluicemq.cli", "sluicemq.cli.ending", "sluicemq.errors"}
    assert not imported & HEAVY


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["topci"], "'topic'"), (["group", "delte"], "'delete'"), (["consum"], "'consume'")],
)
def test_a_misspelt_command_suggests_a_similar_one(words: list[str], meant: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    said, help_line = result.stderr.splitlines()
    assert said.startswith(f"sluice: no such command {words[-1]!r}. Did you mean ")
    assert meant in said
    assert help_line == f"See {' '.join(['sluice', *words[:-1]])} --help."


def test_a_misspelt_option_suggests_a_similar_one() -> None:
    result = CliRunner().invoke(main, ["topic", "create", "t", "--queus", "3"])
    assert (result.exit_code, "'--queues'" in result.stderr) == (2, True)


def test_an_unknown_command_exits_2_under_any_program_name() -> None:
    with pytest.raises(SystemExit) as leaving:
        main.main(["bogus"], prog_name="mqbroker")
    assert leaving.value.code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert (result.exit_code, "_SLUICE_COMPLETE" in result.output) == (0, True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_with_the_script(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(CliRunner().invoke(main, ["completion", "bash"]).output)
    program = tmp_path / "sluice"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sluicemq "$@"\n')
    program.chmod(0o755)
    ask = (
        f"source {script}; COMP_WORDS=(sluice topic cr); COMP_CWORD=2; "
        f"_sluice_completion {program}; echo ${{COMPREPLY[@]}}"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    told = subprocess.run(
        ["bash", "-c", f"bash -n {script} && {ask}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=limit(60),
        env=environment,
    )
    assert told.stdout == "create\n", told.stderr


@pytest.mark.parametrize("name", ["up", "nameserver", "broker"])
def test_a_command_is_imported_when_it_is_used(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert "SIGTERM or Ctrl-C" in result.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_entry_names_a_command(name: str) -> None:
    entry = COMMANDS[name]
    module = importlib.import_module(f"sluicemq.cli.{entry.module}")
    assert isinstance(getattr(module, entry.attribute), click.Command)


def test_an_unknown_command_is_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["bogus"])
    assert result.exit_code == 2
    assert "no such command" in result.output


def test_an_error_is_one_sentence_with_the_name_of_its_page() -> None:
    result = CliRunner().invoke(main, ["nameserver", "-c", "/nonexistent/namesrv.conf"])
    assert result.exit_code == 1
    assert result.output == (
        "sluice: /nonexistent/namesrv.conf cannot be read: No such file or directory. "
        "Name a readable file with -c.\n"
        "More: sluice explain error ConfigurationError\n"
    )


def test_version_prints_the_version_and_the_engine() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"sluice {__version__} ({engine.NAME} engine)\n"


def test_the_name_server_of_up_has_its_files_in_the_store_directory() -> None:
    config = make_name_server_config(
        BrokerConfig(bind_address="127.0.0.1"), StoreConfig(root="/data"), 9876
    )
    assert (config.bind_address, config.listen_port) == ("127.0.0.1", 9876)
    assert config.kv_config_path == "/data/namesrv/kvConfig.json"
    assert config.config_path == "/data/namesrv/sluice.properties"
    assert not config.metrics_enable, "the broker's port speaks for both"


def test_a_name_server_alone_in_its_process_has_the_metrics_port() -> None:
    broker = BrokerConfig(bind_address="127.0.0.1", metrics_port=7001, metrics_host="127.0.0.2")
    config = make_name_server_config(broker, StoreConfig(root="/data"), 9876, is_alone=True)
    assert (config.metrics_host, config.metrics_port) == ("127.0.0.2", 7001)
    assert config.metrics_enable
