"""The blocks of code in Markdown files, their commands, and which say why they are not run.

A comment `<!-- not run: reason -->` stands before a block that no test can run.
"""

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"}
)
_FENCE = re.compile(
    r"(?P<comments>(?:^ *<!-- (?:(?!-->).)+? -->\s*\n)*)"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)
_OPTION = re.compile(r"<!-- (terminal|exit|not run): ((?:(?!-->).)+?) -->", re.DOTALL)
_SESSION = re.compile(r"^<!-- session: (.*?) -->$", re.MULTILINE)


SHELL = ("", "sh", "bash", "shell", "console")
OURS = "sluice", "make", "pip", "python", "python3", ".venv/bin/python", ".venv/bin/sluice"
_INDENTED = re.compile(r"^    (?:\$ )?(sluice .*)$", re.MULTILINE)


class Fence(NamedTuple):
    """A block: `line` is that of its first line of code, `reason` why it is not run, or "".

    `options` are those of the comments directly before it, such as `<!-- exit: 1 -->`.
    """

    document: Path
    line: int
    language: str
    text: str
    reason: str
    options: dict[str, str]

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def fences(document: Path) -> list[Fence]:
    """All blocks of a document, in order, without the indentation that they have in a list."""
    text = document.read_text(encoding="utf-8")
    found = []
    for one in _FENCE.finditer(text):
        code = re.sub(rf"^{one['indent']}", "", one["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, one.start("text")) + 1
        options = {
            name: " ".join(value.split()) for name, value in _OPTION.findall(one["comments"])
        }
        reason = options.get("not run", "")
        found.append(Fence(document, line, one["language"], code, reason, options))
    return found


def session_of(document: Path) -> str | None:
    """Return the name of the session of a page (page_sessions.py); None if it has none."""
    named = _SESSION.search(document.read_text(encoding="utf-8"))
    return named[1] if named else None


def is_session(document: Path) -> bool:
    """Return whether a page is run as a session."""
    return session_of(document) is not None


ALL = [one for document in DOCUMENTS for one in fences(document)]


def with_language(*languages: str) -> list[Fence]:
    """The blocks in these languages that are to be run."""
    return [one for one in ALL if one.language in languages and not one.reason]


class Line(NamedTuple):
    """A command as the reader types it, and where it stands."""

    place: str
    words: list[str]


def commands(block: Fence) -> Iterator[Line]:
    """Those of our programs; the rest of a block is other programs, or what is printed."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    prompted = bool(re.search(r"^\$ ", text, re.MULTILINE))
    for number, line in enumerate(text.splitlines()):
        if prompted and not line.startswith("$ "):
            continue
        yield from split(f"{block.document.relative_to(ROOT)}:{block.line + number}", line)


def split(place: str, line: str) -> Iterator[Line]:
    """The commands of ours on a line: between pipes, in $(…), behind assignments."""
    line = line.removeprefix("$ ").strip()
    inner = re.findall(r"\$\((.*?)\)", line)
    line = re.sub(r"\$\(.*?\)", "X", line)
    if not re.match(r"[\w./$]", line):
        return
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = list(lexer)
    except ValueError:
        if line.startswith(OURS):
            raise
        return  # words that are printed
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("|&;<>()"):
            while command and re.match(r"[A-Z_]+=", command[0]):
                command.pop(0)
            if command and command[0] in OURS:
                yield Line(place, command)
            command = []
        else:
            command.append(word)
    for one in inner:
        yield from split(place, one)


LINES = [line for block in with_language(*SHELL) for line in commands(block)] + [
    line
    for document in DOCUMENTS
    for command in _INDENTED.findall(document.read_text())
    for line in split(str(document.relative_to(ROOT)), command)
]


def python_pages(*, of_spark: bool) -> list[list[Fence]]:
    """The Python blocks of each document that has some: those with Spark in them, or the others.

    Without quotations of programs in examples/, which have tests of their own, without pages that
    are run as a session (page_sessions.py), and without Chinese pages, which quote English pages
    (tests/house/test_readme.py).
    """
    programs = "\n".join(path.read_text() for path in sorted(ROOT.glob("examples/**/*.py")))
    programs = _with_one_blank_line(programs)
    in_sessions = set(filter(is_session, DOCUMENTS))
    pages: dict[Path, list[Fence]] = {}
    for one in with_language("python"):
        if one.document.name.endswith(".zh.md") or one.document in in_sessions:
            continue
        if not any(
            textwrap.indent(_with_one_blank_line(one.text), " " * depth) in programs
            for depth in (0, 4)
        ):
            pages.setdefault(one.document, []).append(one)
    return [page for page in pages.values() if of_spark is any("spark" in it.text for it in page)]


def _with_one_blank_line(text: str) -> str:
    return re.sub(r"\n{2,}", "\n\n", text)


def execute(block: Fence, scope: dict[str, Any], replaced: Mapping[str, str]) -> None:
    """Runs a Python block with some of its texts replaced; errors name the line of the page."""
    text = block.text
    for shown, meant in replaced.items():
        text = text.replace(shown, meant)
    tree = ast.increment_lineno(ast.parse(text), block.line - 1)
    exec(compile(tree, str(block), "exec"), scope)


def main() -> None:
    """What is not run, and why."""
    for one in ALL:
        if one.reason:
            print(f"{one} ({one.language or 'plain'}): {one.reason}")


if __name__ == "__main__":
    main()
