"""Write the index of commands and the usage lines of docs/cli.md from the commands themselves.

    python tools/cli_page.py docs/cli.md

The index is the text between `<!-- written: commands -->` and `<!-- end -->`. It follows the
headings of the page: a heading of level 2 is a subject, and a heading such as ``### `sluice up` ``
below it is a command. The line that begins with `Usage:` below such a heading is replaced, or
added. A test compares the page.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import click
from written_tables import replace_tables, rewrite_page

from sluicemq.cli import COMMANDS, main

_HEADING: Final = re.compile(r"^(##+) (.*)$", re.MULTILINE)
_COMMAND: Final = re.compile(r"^(#+ `(sluice(?: [\w-]+)*)`\n)\n(?:Usage: `.*`\n\n)?", re.MULTILINE)


class Entry(NamedTuple):
    """A heading of the page that names a command."""

    subject: str
    """The heading of level 2 above it."""
    words: tuple[str, ...]
    """The words of the command after `sluice`."""


def with_tables(text: str) -> str:
    """Return the page with its index and its usage lines as the commands are now."""
    with_usage = _COMMAND.sub(lambda heading: heading[1] + "\n" + _usage(heading[2]), text)
    return replace_tables(with_usage, partial(_write_index, with_usage))


def _find_command(words: tuple[str, ...]) -> click.Command:
    """Return the command that these words name. Raises LookupError if there is none."""
    command: click.Command = main
    for word in words:
        child = None
        if isinstance(command, click.Group):
            child = command.get_command(click.Context(command), word)
        if child is None:
            raise LookupError(f"docs/cli.md names the command sluice {' '.join(words)}")
        command = child
    return command


def _usage(path: str) -> str:
    """Return the usage line of a command with the blank line after it; "" for a group."""
    command = _find_command(tuple(path.split()[1:]))
    if isinstance(command, click.Group):
        return ""
    pieces = command.collect_usage_pieces(click.Context(command))
    return f"Usage: `{' '.join([path, *pieces])}`\n\n"


def _list_entries(text: str) -> Iterator[Entry]:
    """Yield the commands that have a heading, in the order of the page."""
    subject = ""
    for marks, title in _HEADING.findall(text):
        if title.startswith("`sluice "):
            yield Entry(subject, tuple(title.strip("`").split()[1:]))
        elif marks == "##":
            subject = title


def _write_index(text: str, _name: str) -> str:
    """Return the index: a row for each command, with links to its own commands."""
    rows = ["| Subject | Command | Purpose |", "|---|---|---|"]
    entries = list(_list_entries(text))
    last_subject = ""
    for entry in entries:
        if len(entry.words) > 1:
            continue
        children = [one.words for one in entries if one.words[:1] == entry.words]
        links = _link("sluice " + entry.words[0], entry.words)
        children_links = [_link(" ".join(words[1:]), words) for words in children[1:]]
        if children_links:
            links += ": " + ", ".join(children_links)
        summary = COMMANDS[entry.words[0]].summary.rstrip(".")
        subject = "" if entry.subject == last_subject else entry.subject
        last_subject = entry.subject
        rows.append(f"| {subject} | {links} | {summary} |")
    return "\n".join(rows) + "\n"


def _link(label: str, words: tuple[str, ...]) -> str:
    return f"[`{label}`](#sluice-{'-'.join(words)})"


if __name__ == "__main__":
    rewrite_page(with_tables)
