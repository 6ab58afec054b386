"""How a command ends: one sentence on stderr, and the exit code.

    0    The command did its work. A server or a stream also ends with 0 after Ctrl-C or SIGTERM.
    1    The command failed, or it has findings.
    2    Wrong usage, or the input has the wrong format.
    130  Ctrl-C interrupted the work. The sentence says how far the work was, if the command has
         called `describe_on_interrupt`.
    141  The reader of the output has closed the pipe (`| head`).

Shells use the last two codes for programs that SIGINT and SIGPIPE ended.

While modules are imported, no work has begun, and a KeyboardInterrupt could surface in any of
them. So in the process of `sluice`, Ctrl-C exits at once during imports (`importing`) and after
the command (`run`). A process that only calls commands, such as a test, keeps its own handlers.
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

EXIT_FAILURE: Final = 1
EXIT_FINDINGS: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
_PROGRESS_KEY: Final = "sluicemq.cli.progress"
"""The key in click's context of the function that describes the work done so far."""
_NoArguments: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())  # exists since click 8.2


class InputError(click.ClickException):
    """The input of a command has the wrong format. The exit code is 2, as for wrong usage."""

    exit_code = EXIT_USAGE


class OptionError(ConfigurationError):
    """The value of an option of a command is invalid.

    When: a command is given a value that it cannot read; its exit code is 2.
    Then: nothing was done.
    Fix: write the value as the text says; `--help` shows the options.

        --property 'colour' is not NAME=VALUE. For example: -p origin=JFK.
    """


class Interrupted(click.ClickException):
    """Ctrl-C interrupted a command. The message says what was done until then, or is empty."""

    exit_code = EXIT_INTERRUPTED


def describe_on_interrupt(describe: Callable[[], str]) -> None:
    """Set the function whose text is printed if Ctrl-C interrupts the running command.

    `describe()` is called at the interrupt, and returns a sentence that says what was done until
    then. A later call replaces the function. Outside of a command nothing is set.
    """
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_PROGRESS_KEY] = describe


def note_pending_change(command: str) -> None:
    """Declare that a change is being requested, whose outcome Ctrl-C would leave unknown.

    `command` is the command line that shows the user whether the change was made.
    """
    describe_on_interrupt(lambda: f"the change may have been made or not; `{command}` shows it.")


@contextlib.contextmanager
def translate_interrupts(context: click.Context) -> Iterator[None]:
    """Return a context manager that turns Ctrl-C into Interrupted.

    The exception has the text that `describe_on_interrupt` registered, which says how far the
    command got; without one it is "". A closed output pipe becomes click's Exit with the code 141.
    """
    try:
        yield
    except KeyboardInterrupt:
        describe = context.meta.get(_PROGRESS_KEY, lambda: "")
        raise Interrupted(describe()) from None
    except BrokenPipeError:
        raise click.exceptions.Exit(EXIT_BROKEN_PIPE) from None


@contextlib.contextmanager
def report_errors(program: str) -> Iterator[None]:
    """Return a context manager that prints an error as one sentence, and raises SystemExit.

    The sentence is printed to stderr, after the name `program`. The link to the error's page
    follows on its own line. SluiceError, errors of click, and an OSError that names a file are
    treated like this. Any other exception is a bug, and passes with its traceback.
    """
    try:
        yield
    except _NoArguments as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (SluiceError, click.ClickException, click.Abort, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        sentence, exit_code = describe_error(error)
        click.echo(f"{program}: {sentence}", err=True)
        for note in getattr(error, "__notes__", ()):  # a SluiceError notes the link to its page
            click.echo(click.style(note, dim=True), err=True)
        raise SystemExit(exit_code) from None


def describe_error(error: Exception) -> tuple[str, int]:
    """Return (text to print, exit code) for an error.

    `error` is a SluiceError, an error of click, or an OSError that names a file.
    """
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}.", EXIT_FAILURE
    if isinstance(error, Interrupted):
        return _describe_interrupt(error.message), EXIT_INTERRUPTED
    if isinstance(error, click.Abort):  # a question was answered with no, Ctrl-C or end of file
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return _describe_interrupt(""), EXIT_INTERRUPTED
        return "not confirmed: nothing is changed.", EXIT_FAILURE
    if isinstance(error, click.ClickException):
        return _describe_click_error(error), error.exit_code
    exit_code = EXIT_USAGE if isinstance(error, OptionError) else EXIT_FAILURE
    return str(error), exit_code


def _describe_click_error(error: click.ClickException) -> str:
    """Return the sentence for an error of click, which begins with a small letter.

    For wrong usage, a line that names the command's help follows.
    """
    sentence = error.format_message()
    begins_with_word = sentence[1:2].islower()  # otherwise with an acronym or an option
    if begins_with_word:
        # Errors of click begin with a capital, ours do not.
        sentence = sentence[0].lower() + sentence[1:]
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return sentence
    return f"{sentence}\nSee {context.command_path} --help."


def _describe_interrupt(progress: str) -> str:
    """Return the sentence for an interrupt; on a terminal, first end the line that shows ^C."""
    if sys.stderr.isatty():
        click.echo(err=True)
    return f"interrupted: {progress}" if progress else "interrupted."


# -------------------------------------------------------------------- the process of `sluice`


def _exit_on_sigint(_signal_number: int, _frame: FrameType | None) -> None:
    """Handle SIGINT: write one line to stderr, and end the process at once with code 130."""
    _exit_interrupted("sluice: interrupted.\n")


def _exit_interrupted(last_line: str = "") -> NoReturn:
    """Write `last_line` to stderr and end the process with 130, without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream may be closed, or just being flushed
            stream.flush()
    os.write(2, last_line.encode())
    os._exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Return a context manager for imports, during which Ctrl-C ends the process at once.

    After the block, Ctrl-C raises KeyboardInterrupt. Nothing changes unless `run` has installed its
    handler, because the process then is not `sluice`.
    """
    has_handler = signal.getsignal(signal.SIGINT) is _exit_on_sigint
    try:
        yield
    finally:
        if has_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run(command: Callable[[], object]) -> None:
    """Call `command`, the only work of this process, and handle Ctrl-C before and after it.

    Ctrl-C then ends the process at once, as it does while modules are imported. Another handler of
    SIGINT, or SIGINT ignored by nohup, stays as it is. Raises SystemExit with the exit code of the
    command, or ends the process after an interrupt.
    """
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_default_handler:
        signal.signal(signal.SIGINT, _exit_on_sigint)
    try:
        command()
    except SystemExit as error:
        if error.code == EXIT_INTERRUPTED:
            _exit_interrupted()
        if error.code == EXIT_BROKEN_PIPE:
            # The interpreter flushes stdout when it ends, and must not write to the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    finally:
        if has_default_handler:
            signal.signal(signal.SIGINT, _exit_on_sigint)
