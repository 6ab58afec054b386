"""The blocks of code in Markdown files, and which of them say why they are not run.

A comment `<!-- not run: reason -->` stands before a block that no test can run.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"}
)
_FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>(?:(?!-->).)+?) -->\s*\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)


class Fence(NamedTuple):
    """A block: `line` is that of its first line of code, `reason` why it is not run, or ""."""

    document: Path
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def fences(document: Path) -> list[Fence]:
    """All blocks of a document, in order, without the indentation that they have in a list."""
    text = document.read_text(encoding="utf-8")
    found = []
    for one in _FENCE.finditer(text):
        code = re.sub(rf"^{one['indent']}", "", one["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, one.start("text")) + 1
        reason = " ".join((one["reason"] or "").split())
        found.append(Fence(document, line, one["language"], code, reason))
    return found


ALL = [one for document in DOCUMENTS for one in fences(document)]


def with_language(*languages: str) -> list[Fence]:
    """The blocks in these languages that are to be run."""
    return [one for one in ALL if one.language in languages and not one.reason]


def main() -> None:
    """What is not run, and why."""
    for one in ALL:
        if one.reason:
            print(f"{one} ({one.language or 'plain'}): {one.reason}")


if __name__ == "__main__":
    main()
