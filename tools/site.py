"""What mkdocs does not do by itself for the site (mkdocs.yml names this file as its hook).

Pages that lie outside of docs/ are pages all the same, README.md the first; the page of commands is
what they say of themselves. Links are those of the checkout: one to a page leads there on the site
too, one to another file of the repository becomes its name, and one that leads nowhere is left for
mkdocs to refuse. Lists are as lenient as viewers of repositories are: Python-Markdown wants a blank
line before them, and four spaces within.
"""

import inspect
import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import click
from mkdocs.structure.files import File, Files

from sluicemq.cli import main
from sluicemq.cli.output import client_options

ROOT: Final = Path(__file__).parents[1]
OUTSIDE: Final = {
    "README.zh.md": "README.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""File of the repository -> page."""
COMMANDS: Final = "reference/commands.md"
_PLACES: Final = {page: place for place, page in OUTSIDE.items()}
_FENCED: Final = re.compile(r"(^ *(`{3,}).*?^ *\2 *$)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_CELL: Final = re.compile("<td.*?</td>", re.DOTALL)
_ITEM: Final = re.compile(r"( *)(?:[-*+]|\d+\.) ")


def on_config(config: Any) -> None:
    """Patterns in the navigation become pages."""
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))
    pages += [COMMANDS, *(page for place, page in OUTSIDE.items() if (ROOT / place).exists())]
    named = set(_leaves(config.nav))
    config.nav = _expanded(config.nav, [page for page in pages if page not in named], pages)


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [
        leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(part)
    ]


def _expanded(nav: Any, free: list[str], pages: list[str]) -> Any:
    """What has no page is left out: a section of patterns may be empty."""
    made: list[Any] = []
    for part in nav:
        if isinstance(part, str):
            made += [page for page in free if fnmatch(page, part)] if "*" in part else [part]
        else:
            ((title, inner),) = part.items()
            inner = [inner] if isinstance(inner, str) else inner
            if found := _expanded(inner, free, pages):
                made.append({title: found})
    return [page for page in made if not isinstance(page, str) or page in pages]


def on_files(files: Files, config: Any) -> Files:
    """The pages from outside, and that of the commands."""
    files.append(File.generated(config, COMMANDS, content="\n".join(_commands())))
    for place, page in OUTSIDE.items():
        if (ROOT / place).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / place)))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Labels in docstrings of errors begin lines; a pipe in a table needs no escape any more."""
    html = _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
    return re.sub(r"\n(When|Then|Fix): ", r"<br><strong>\1:</strong> ", html)


def _commands() -> Iterator[str]:
    yield "# Commands\n\nWhat `--help` says of each; [the guide](../cli.md) has examples.\n"
    yield "## Options of all client commands\n"
    shared = click.command()(client_options(lambda **_: None)).params
    context = click.Context(main, info_name="sluice")
    yield from _options(shared, context)
    yield from _command(main, context, {one.opts[0] for one in shared})


def _command(command: click.Command, context: click.Context, shared: set[str]) -> Iterator[str]:
    yield f"{'#' * min(context.command_path.count(' ') + 2, 4)} {context.command_path}\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"{inspect.cleandoc(command.help or '')}\n\n```text\n{usage}\n```\n"
    own = [one for one in command.params if one.opts[0] not in shared]
    yield from _options(own, context)
    if len(own) < len(command.params):
        yield "And the [options of all client commands](#options-of-all-client-commands).\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _command(child, click.Context(child, context, name), shared)


def _options(params: list[click.Parameter], context: click.Context) -> Iterator[str]:
    records = [record for one in params if (record := one.get_help_record(context))]
    if records:
        yield "| option | |\n|---|---|"
        yield from (f"| `{names}` | {_cell(told)} |" for names, told in records)
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "&#124;").replace("<", "&lt;")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links and lists of one page, its code blocks left alone."""
    here = page.file.src_uri
    place = _PLACES.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target or target.startswith(("mailto:", "/")):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        for there in (path, f"{path}/README.md"):
            uri = OUTSIDE.get(
                there, there.removeprefix("docs/") if there.startswith("docs/") else ""
            )
            if uri and files.get_file_from_path(uri):
                way = posixpath.relpath(uri, posixpath.dirname(here) or ".")
                return f"{image}[{text}]({way}{anchor})"
        if not (ROOT / path).exists():
            return found[0]
        return text if path in text else f"{text} (`{path}`)"

    parts = _FENCED.split(markdown)  # text, block, its fence, text, …
    return "".join(
        _lists(_LINK.sub(link, part)) if at % 3 == 0 else part
        for at, part in enumerate(parts)
        if at % 3 != 2
    )


def _lists(text: str) -> str:
    lines: list[str] = []
    is_list = False  # of the paragraph, as far as it has been seen
    for line in text.split("\n"):
        item = _ITEM.match(line)
        if item and not is_list and lines and lines[-1].strip():
            lines.append("")
        is_list = bool(line.strip()) and (is_list or bool(item))
        nested = item and 0 < len(item[1]) < 4
        lines.append("    " + line.lstrip() if nested else line)
    return "\n".join(lines)
