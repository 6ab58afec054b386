"""Test how a command ends: its exit code and its sentence on stderr."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import click
import pytest
from click.testing import CliRunner

from interrupting import interrupted
from sluicemq.cli import main
from sluicemq.cli.ending import (
    InputError,
    OptionError,
    describe_on_interrupt,
    note_pending_change,
    report_errors,
)
from sluicemq.errors import ConfigurationError

pytestmark = pytest.mark.slow


def ended(work: Callable[[], object]) -> tuple[object, str]:
    """Return the exit code and stderr of a command that calls `work`."""

    @click.command()
    def command() -> None:
        work()

    class Root(type(main)):  # type: ignore[misc]
        entries = MappingProxyType({})

    root = Root("sluice", commands={"do": command})
    result = CliRunner().invoke(root, ["do"])
    assert result.stdout == ""
    return result.exit_code, result.stderr


def raising(error: BaseException) -> Callable[[], object]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigurationError("it is wrong.", fix="Mend it."), 1, "it is wrong. Mend it."),
        (OptionError("--x is none."), 2, "--x is none."),
        (InputError("no case"), 2, "no case"),
        (click.ClickException("none was cancelled."), 1, "none was cancelled."),
        (FileNotFoundError(2, "No such file", "/x"), 1, "/x: No such file."),
        (click.Abort(), 1, "not confirmed: nothing is changed."),
        (EOFError(), 1, "not confirmed: nothing is changed."),
        (KeyboardInterrupt(), 130, "interrupted."),
    ],
)
def test_an_error_has_one_sentence_and_an_exit_code(
    error: BaseException, code: int, text: str
) -> None:
    found, said = ended(raising(error))
    assert (found, said.strip("\n").split("\nMore: ")[0]) == (code, f"sluice: {text}")


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), report_errors("sluice"):
        raise ZeroDivisionError
    with pytest.raises(OSError, match="no file"), report_errors("sluice"):
        raise OSError("no file")


def test_a_closed_output_pipe_exits_141_silently() -> None:
    assert ended(raising(BrokenPipeError(32, "Broken pipe"))) == (141, "")


def test_ctrl_c_prints_the_progress() -> None:
    def work() -> None:
        done = 0
        describe_on_interrupt(lambda: f"{done} messages stored.")
        done = 3
        raise KeyboardInterrupt

    assert ended(work) == (130, "sluice: interrupted: 3 messages stored.\n")


def test_ctrl_c_during_a_change_names_the_command_that_shows_it() -> None:
    def work() -> None:
        note_pending_change("sluice topic show t")
        raise KeyboardInterrupt

    assert ended(work)[1] == (
        "sluice: interrupted: the change may have been made or not; `sluice topic show t` shows "
        "it.\n"
    )


def test_the_progress_of_a_command_is_not_printed_by_the_next() -> None:
    assert ended(lambda: describe_on_interrupt(lambda: "old"))[0] == 0
    assert ended(raising(KeyboardInterrupt())) == (130, "sluice: interrupted.\n")
    describe_on_interrupt(lambda: "nobody's: there is no command")


# ------------------------------------------------------------------------- a process of its own


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("click", ["topic", "list"]),
        ("sluicemq.cli.ending", ["up"]),
        ("sluicemq.cli.servers.serve", ["up"]),
        ("sluicemq.config", ["broker"]),
        ("sluicemq.config.settings", ["nameserver"]),
        ("asyncio", ["proxy"]),
        ("sluicemq.cli.servers.processes", ["up", "--brokers", "2"]),
        ("sluicemq.cli.explain", ["filter", "test", "a > 5", "-t", "t"]),
        ("sluicemq.cli.traffic", ["produce", "t", "x", "--count", "5"]),
        ("sluicemq.client.aio.sluice", ["consume", "t"]),
        ("sluicemq.client.sync.admin", ["doctor"]),
        ("sluicemq.client.admin.operations", ["group", "reset", "g", "-t", "t", "--to", "latest"]),
        ("sluicemq.store.tools.layout", ["store", "verify", "/nonexistent"]),
        ("sluicemq.store.tools.backup", ["store", "backup", "/nonexistent", "/nonexistent"]),
        ("sluicemq.pipelines.__main__", ["pipeline", "run", "/nonexistent"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_ctrl_c_during_imports_prints_one_line(
    tmp_path: Path, module: str, words: list[str]
) -> None:
    told = interrupted(tmp_path, module, *words)
    assert (told.returncode, told.stdout) == (130, "")
    assert told.stderr == "sluice: interrupted.\n"


def test_an_ignored_sigint_stays_ignored(tmp_path: Path) -> None:
    words = ("filter", "check", "a > 5")
    told = interrupted(tmp_path, "sluicemq.cli.filter", *words, handler=signal.SIG_IGN)
    assert told.returncode == 0
    assert "compiles" in told.stdout
