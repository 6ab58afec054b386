"""`sluice filter`: check an expression, evaluate expressions in bulk; `filter_test` tries one.

`sluice filter eval FILE` is a contract for scripts (issue 3, section 9): JSON lines
`{"expr": "...", "props": {"name": "text"}}` in, one line `{"result": "..."}` out for each, in
order: true, false, null, compile_error or eval_error. It is made for files of millions of lines:
compiled expressions are kept and output is written in blocks.

Exit codes: 0 fine, 1 findings, 2 wrong usage or input.
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

from sluicemq.cli import Entry, LazyGroup
from sluicemq.cli.ending import InputError
from sluicemq.errors import FilterEvaluationError, FilterSyntaxError

if TYPE_CHECKING:
    from sluicemq.filter.findings import Finding
    from sluicemq.filter.selector import Selector

EXIT_FINDINGS = 1
BLOCK_BYTES = 1 << 18
# More than a broker keeps: a file of tests has many expressions, and each costs 0.1 ms to compile.
EXPRESSIONS_KEPT = 20_000

_RESULTS = {
    verdict: orjson.dumps({"result": name}) + b"\n"
    for verdict, name in ((True, "true"), (False, "false"), (None, "null"))
}
_COMPILE_ERROR = orjson.dumps({"result": "compile_error"}) + b"\n"
_EVALUATION_ERROR = orjson.dumps({"result": "eval_error"}) + b"\n"


class _FilterGroup(LazyGroup):
    """`test` needs a client, and is imported when it is called: `eval` starts a process each."""

    entries: Mapping[str, Entry] = {"test": Entry("explain", "test_command", "")}


@click.group("filter", cls=_FilterGroup)
def filter_group() -> None:
    """Check and try SQL92 filter expressions."""


@filter_group.command("check")
@click.argument("expression", metavar="EXPR")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def check_command(expression: str, as_json: bool) -> None:
    """Say whether EXPR compiles, what in it is not what it seems, and how it reads properties.

    Errors and warnings point at the place and say what to write instead; then for each property
    as what its text is read, which values are errors and what to write for those. Exit code 0
    when there is nothing to warn of, 1 when there are findings.
    """
    from sluicemq.filter.check import check_sql92, describe_types  # noqa: PLC0415 - only this command

    findings, types = check_sql92(expression), describe_types(expression)
    if as_json:
        report = {
            "expression": expression,
            "compiles": not any(finding.is_error for finding in findings),
            "findings": findings,
            "properties": [note._asdict() for note in types],
        }
        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    else:
        _print_findings(expression, findings)
        for note in types:
            click.echo(f"\n{note.name} is read as {note.read_as}: {note.because}.")
            click.echo(f"    It takes {note.accepts}.")
            if note.errors:
                click.echo(f"    Errors, which drop the message: {note.errors}.")
            if note.instead:
                click.echo(f"    {note.instead}")
    if findings:
        raise SystemExit(EXIT_FINDINGS)


@filter_group.command("eval")
@click.argument("file", metavar="FILE", type=click.File("rb"))
def eval_command(file: BufferedReader) -> None:
    """Evaluate the JSON lines of FILE (- is standard input).

    Each line {"expr": "a > 5", "props": {"a": "7"}} is answered by {"result": "true"}, "false",
    "null", "compile_error" or "eval_error". A property that is absent or null has no value.
    """
    # Thousands of kept trees are walked again and again by the collector, and nothing here is
    # cyclic: without it expressions compile a fifth faster.
    gc.disable()
    output, first, rest = sys.stdout.buffer, 1, b""
    try:
        # Whole lines, as many as have arrived: a script may talk to the command through pipes.
        for data in chain(iter(partial(file.read1, BLOCK_BYTES), b""), (b"\n",)):
            *lines, rest = (rest + data).split(b"\n")
            answers: list[bytes] = []
            try:
                answers.extend(
                    _answer(line) if line and not line.isspace() else b"" for line in lines
                )
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise InputError(
                    f"line {first + len(answers)} is not a case: {error}. "
                    'Write {"expr": "a > 5", "props": {"a": "7"}}; every property is a string.'
                ) from None
            finally:  # what comes before a faulty line is answered before its error
                output.write(b"".join(answers))
                output.flush()
            first += len(lines)
    finally:
        gc.enable()


def _answer(line: bytes) -> bytes:
    """Raises TypeError for a property that is no string; a null has no value."""
    try:
        case = orjson.loads(line)
    except orjson.JSONDecodeError:
        case = json.loads(line)  # half characters such as \ud83d: Java has them, orjson does not
    selector = _selector(case["expr"])
    properties = case.get("props") or {}
    for value in properties.values():
        if type(value) is not str:
            properties = {name: value for name, value in properties.items() if value is not None}
            for name, other in properties.items():
                if not isinstance(other, str):
                    raise TypeError(f"the property {name} is {other!r}, not a string")
            break
    if selector is None:
        return _COMPILE_ERROR
    try:
        return _RESULTS[selector.evaluate(properties)]
    except FilterEvaluationError:
        return _EVALUATION_ERROR


@lru_cache(maxsize=EXPRESSIONS_KEPT)
def _selector(text: str) -> "Selector | None":
    from sluicemq.filter.subscriptions import try_compile  # noqa: PLC0415 - lark, once a process

    outcome = try_compile(text)
    return None if isinstance(outcome, FilterSyntaxError) else outcome


def _print_findings(expression: str, findings: "list[Finding]") -> None:
    from sluicemq.filter.findings import caret_lines  # noqa: PLC0415 - only this command needs it

    colors = {"error": "red", "warning": "yellow"}
    for finding in findings:
        name = finding.severity.value
        line, carets = caret_lines(expression, finding.position, finding.length)
        click.secho(f"{name} at character {finding.position + 1}: {finding.what}", fg=colors[name])
        click.echo(f"    {line}\n    {carets}")
        click.echo(f"    {finding.instead}\n" if finding.instead else "")
    if not findings:
        click.echo("The expression compiles and means what it says.")
    elif any(finding.is_error for finding in findings):
        click.echo("The expression does not compile.")
    elif any(finding.code == "ignored-text" for finding in findings):
        click.echo(
            "RocketMQ reads its beginning; SluiceMQ's clients, commands and Spark refuse it."
        )
    else:
        click.echo("The expression compiles; mind the warnings.")
