"""`sluice filter check` and `eval`: check an expression, or evaluate many. `explain` has `test`.

Scripts depend on the format of `sluice filter eval FILE`: each line of FILE is a JSON object
`{"expr": "...", "props": {"name": "text"}}`. For each, in order, a line `{"result": "..."}` is
printed, which is true, false, null, compile_error or eval_error. Files may have millions of lines,
so compiled expressions are cached, and lines are read and written in blocks.

Exit codes: 0 no findings, 1 findings, 2 wrong usage or input.
"""

import gc
import json
import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from io import BufferedReader
from itertools import chain
from typing import TYPE_CHECKING

import click
import orjson

from sluicemq.cli import CommandEntry, LazyGroup
from sluicemq.cli.ending import EXIT_FINDINGS, InputError
from sluicemq.errors import FilterEvaluationError, FilterSyntaxError

if TYPE_CHECKING:
    from sluicemq.filter.check import TypeNote
    from sluicemq.filter.findings import Finding
    from sluicemq.filter.selector import Selector

READ_BYTES = 1 << 18
EXPRESSIONS_CACHED = 20_000
"""The size of the cache of compiled expressions, each of which takes 0.1 ms to compile."""

_RESULT_LINES = {
    verdict: orjson.dumps({"result": name}) + b"\n"
    for verdict, name in ((True, "true"), (False, "false"), (None, "null"))
}
_COMPILE_ERROR_LINE = orjson.dumps({"result": "compile_error"}) + b"\n"
_EVALUATION_ERROR_LINE = orjson.dumps({"result": "eval_error"}) + b"\n"


class _FilterGroup(LazyGroup):
    """A group whose command `test` is imported only when it is used, because it needs a client.

    Scripts may start a process for each `eval`, so its imports must be few.
    """

    entries: Mapping[str, CommandEntry] = {"test": CommandEntry("explain", "test_command", "")}


@click.group("filter", cls=_FilterGroup)
def filter_group() -> None:
    """Check and test SQL92 filter expressions."""


@filter_group.command("check")
@click.argument("expression", metavar="EXPR")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def check_command(expression: str, as_json: bool) -> None:
    """Check whether EXPR compiles, and warn about parts that may not mean what they seem to.

    Each error and warning shows the part of EXPR and what to write instead. Then, for each
    property, show the type as which its text is interpreted, and which values cause an error.
    Exit code 1 if there are errors or warnings.
    """
    from sluicemq.cli.output import print_json  # noqa: PLC0415 - only this command
    from sluicemq.filter.check import check_sql92, describe_types  # noqa: PLC0415 - as above

    findings = check_sql92(expression)
    types = describe_types(expression)
    if as_json:
        report = {
            "expression": expression,
            "compiles": not any(finding.is_error for finding in findings),
            "findings": findings,
            "properties": [note._asdict() for note in types],
        }
        print_json(report, is_indented=True)
    else:
        _print_findings(expression, findings)
        _print_types(types)
    if findings:
        raise SystemExit(EXIT_FINDINGS)


def _print_types(types: "tuple[TypeNote, ...]") -> None:
    """Print, for each property, as which type its text is read and which values cause an error."""
    for note in types:
        click.echo(f"\n{note.name} is read as {note.read_as}: {note.because}.")
        click.echo(f"    Accepted: {note.accepts}.")
        if note.errors:
            click.echo(f"    Errors, which drop the message: {note.errors}.")
        if note.instead:
            click.echo(f"    {note.instead}")


@filter_group.command("eval")
@click.argument("file", metavar="FILE", type=click.File("rb"))
def eval_command(file: BufferedReader) -> None:
    """Evaluate the expressions in FILE, a file of JSON lines. - means standard input.

    For each line such as {"expr": "a > 5", "props": {"a": "7"}}, print {"result": "true"}, "false",
    "null", "compile_error" or "eval_error". A property that is absent or null has no value.
    """
    # The garbage collector would traverse thousands of cached expressions again and again. They
    # have no cycles, and without the collector they compile 20 % faster.
    gc.disable()
    first_line_number = 1  # of the lines in `lines`
    unfinished_line = b""
    chunks = iter(partial(file.read1, READ_BYTES), b"")
    try:
        # All complete lines that have arrived are answered, so that a script can use pipes. The
        # last line may have no line end, so one is appended to the data.
        for chunk in chain(chunks, (b"\n",)):
            *lines, unfinished_line = (unfinished_line + chunk).split(b"\n")
            _answer_lines(lines, first_line_number)
            first_line_number += len(lines)
    finally:
        gc.enable()


def _answer_lines(lines: list[bytes], first_line_number: int) -> None:
    """Write one line to stdout for each line of input, and flush it.

    A blank line has an empty answer. `first_line_number` is the number of the first line in the
    whole input, from 1. Raises InputError for an invalid line, after the lines before it are
    answered.
    """
    answers: list[bytes] = []
    try:
        for line in lines:
            # A blank line has an empty answer, so that the number of answers is that of lines.
            is_blank = not line or line.isspace()
            answer = b"" if is_blank else _evaluate_line(line)
            answers.append(answer)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"Line {first_line_number + len(answers)} is invalid: {error}. "
            'Write {"expr": "a > 5", "props": {"a": "7"}}; every property is a string.'
        ) from None
    finally:
        sys.stdout.buffer.write(b"".join(answers))
        sys.stdout.buffer.flush()


def _evaluate_line(line: bytes) -> bytes:
    """Return the line of output, with its line end, for a line {"expr": …, "props": {…}}.

    A property that is null is absent. Raises ValueError, KeyError, AttributeError or TypeError if
    the line has another format.
    """
    try:
        input_object = orjson.loads(line)
    except orjson.JSONDecodeError:
        input_object = json.loads(line)  # accepts lone surrogates such as \ud83d, which Java writes
    selector = _compile_cached(input_object["expr"])
    properties = input_object.get("props") or {}
    # Nearly always all values are strings, so nulls are only removed when one is not.
    for value in properties.values():
        if type(value) is not str:
            properties = _drop_null_properties(properties)
            break
    if selector is None:
        return _COMPILE_ERROR_LINE
    try:
        return _RESULT_LINES[selector.evaluate(properties)]
    except FilterEvaluationError:
        return _EVALUATION_ERROR_LINE


def _drop_null_properties(properties: dict[str, object]) -> dict[str, str]:
    """Return a copy of the properties without those that are null.

    Raises TypeError if a value is neither a string nor null.
    """
    strings = {}
    for name, value in properties.items():
        if value is None:
            continue
        if not isinstance(value, str):
            raise TypeError(f"the property {name} is {value!r}, not a string")
        strings[name] = value
    return strings


@lru_cache(maxsize=EXPRESSIONS_CACHED)
def _compile_cached(expression: str) -> "Selector | None":
    """Return the compiled expression, or None if it has a syntax error."""
    from sluicemq.filter.subscriptions import try_compile  # noqa: PLC0415 - imports lark

    selector_or_error = try_compile(expression)
    return None if isinstance(selector_or_error, FilterSyntaxError) else selector_or_error


def _print_findings(expression: str, findings: "list[Finding]") -> None:
    """Print each finding with the part of the expression that it is about.

    A last line sums up, unless an error has said that the expression does not compile.
    """
    from sluicemq.filter.findings import (  # noqa: PLC0415 - only this command needs it
        EMPTY,
        caret_lines,
    )

    for index, finding in enumerate(findings):
        character = finding.position + 1
        line, carets = caret_lines(expression, finding.position, finding.length)
        explanation = f"{finding.what} {finding.instead}".rstrip()
        if index > 0:
            click.echo()
        if finding.code == EMPTY:  # there is no text to mark
            click.secho(explanation, fg="red")
            continue
        if finding.is_error:
            header = f"The SQL92 expression does not compile at character {character}:"
            click.secho(header, fg="red")
        else:
            click.secho(f"Warning at character {character}:", fg="yellow")
        click.echo(f"    {line}\n    {carets}")
        click.echo(explanation)

    has_error = any(finding.is_error for finding in findings)
    has_ignored_text = any(finding.code == "ignored-text" for finding in findings)
    if not findings:
        click.echo("The expression compiles. There are no warnings.")
    elif has_error:
        pass  # the header of the error says that the expression does not compile
    elif has_ignored_text:
        click.echo(
            "\nRocketMQ evaluates only the beginning of the expression. SluiceMQ's clients, "
            "commands and Spark refuse it."
        )
    else:
        click.echo("\nThe expression compiles, with warnings.")
