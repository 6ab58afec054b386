"""How a command ends: one sentence on stderr, and the exit code.

    0    done; so ends what runs until it is told to, by Ctrl-C too
    1    it could not be done, or there are findings
    2    wrong usage, or input that is not what the command reads
    130  Ctrl-C in the middle of the work: the sentence says what was done (`when_interrupted`)
    141  nobody reads the output any more (`| head`)

The last two are what shells give for a program that SIGINT or SIGPIPE ended. While modules are
imported nothing is done yet, and an exception would surface anywhere: there Ctrl-C leaves at once
(`importing`). So it does when all is over. None of that in a process that only borrows commands.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

import click

from sluicemq.errors import ConfigurationError, SluiceError

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
UNREAD: Final = 141
_SUM: Final = "sluicemq.cli.sum"
_NoArguments: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())  # none before click 8.2


class InputError(click.ClickException):
    """What the command reads is not what it can read: exit code 2, as for wrong usage."""

    exit_code = USAGE


class OptionError(ConfigurationError):
    """The value of an option of a command cannot be one.

    When: a command is given a value that it cannot read; its exit code is 2.
    Then: nothing was done.
    Fix: write the value as the text says; `--help` shows the options.

        --property 'colour' is not NAME=VALUE. For example: -p origin=JFK.
    """


class Interrupted(click.ClickException):
    """Ctrl-C came before the work was done; the text says what was."""

    exit_code = INTERRUPTED


def when_interrupted(tell: Callable[[], str]) -> None:
    """What to say was done when Ctrl-C ends the command that runs: asked then."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_SUM] = tell


def undecided(command: str) -> None:
    """Ctrl-C while a change is under way: nobody knows, but `command` shows it."""
    when_interrupted(lambda: f"what was asked for may be done or not; `{command}` shows it.")


@contextlib.contextmanager
def interruptible(context: click.Context) -> Iterator[None]:
    """Ctrl-C, and a reader who is gone, as what `speaking` tells."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(context.meta.get(_SUM, lambda: "")()) from None
    except BrokenPipeError:
        raise click.exceptions.Exit(UNREAD) from None


@contextlib.contextmanager
def speaking(program: str) -> Iterator[None]:
    """Errors become one sentence on stderr, with the way to their page, and SystemExit."""
    try:
        yield
    except _NoArguments as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (SluiceError, click.ClickException, click.Abort, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        text, code = told(error)
        click.echo(f"{program}: {text}", err=True)
        for note in getattr(error, "__notes__", ()):  # the way to the page of the error
            click.echo(click.style(note, dim=True), err=True)
        raise SystemExit(code) from None


def told(error: Exception) -> tuple[str, int]:
    """Text and exit code."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}.", FAILED
    if isinstance(error, Interrupted):
        return _interrupted(error.message), INTERRUPTED
    if isinstance(error, click.Abort):  # of a question
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return _interrupted(""), INTERRUPTED
        return "not confirmed: nothing is changed.", FAILED
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"\nSee {context.command_path} --help." if context is not None else ""
        return error.format_message() + hint, error.exit_code
    return str(error), USAGE if isinstance(error, OptionError) else FAILED


def _interrupted(text: str) -> str:
    """On a line of its own behind the terminal's ^C."""
    if sys.stderr.isatty():
        click.echo(err=True)
    return f"interrupted: {text}" if text else "interrupted."


# ---------------------------------------------------------------------- a process of its own


def _leave(_number: int, _frame: FrameType | None) -> None:
    _exit("sluice: interrupted.\n")


def _exit(text: str = "") -> NoReturn:
    """Threads that wait, and whatever else an exit runs, are not waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, gone, or in the middle of a flush
            stream.flush()
    os.write(2, text.encode())
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C leaves at once meanwhile, if it is this process's own (`run`)."""
    is_ours = signal.getsignal(signal.SIGINT) is _leave
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run(command: Callable[[], object]) -> None:
    """The command as the one work of this process. Raises SystemExit, or ends it."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not nohup's, say
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    try:
        command()
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            _exit()
        if leaving.code == UNREAD:  # nothing is written into it while the interpreter ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, _leave)
