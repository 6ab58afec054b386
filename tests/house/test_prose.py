"""Lines of prose in the documentation are at most 100 characters long.

Not counted are tables, code, comments, pages in Chinese, and lines that cannot be broken, because a
link or a piece of code is that long.
"""

import re
from pathlib import Path

import pytest

from fences import DOCUMENTS, ROOT

LENGTH_MAX = 100
_LINK_OR_CODE = re.compile(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`")
PROSE = [path for path in DOCUMENTS if not path.name.endswith(".zh.md")]


def find_long_lines(text: str) -> list[str]:
    """Return the lines of prose that are too long and could be broken, with their numbers."""
    long_lines = []
    is_code = is_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        start = line.lstrip()
        if start.startswith("```"):
            is_code = not is_code
        is_comment = (is_comment or start.startswith("<!--")) and "-->" not in line
        is_indented_code = line.startswith("    ") and not re.match(r"\s+[-*\d]", line)
        if is_code or is_comment or is_indented_code or start.startswith(("|", "#", "<!--", "<")):
            continue
        if len(line) <= LENGTH_MAX:
            continue
        # What must stay together counts as one long word. A line of few words cannot be broken.
        words = _LINK_OR_CODE.sub(lambda match: "x" * len(match[0]), line)
        if " " in words[:LENGTH_MAX].lstrip().lstrip("-*0123456789. "):
            long_lines.append(f"{number}: {line[:80]}")
    return long_lines


@pytest.mark.parametrize("document", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_prose_are_short(document: Path) -> None:
    assert not find_long_lines(document.read_text())


def test_the_walk_finds_a_long_line() -> None:
    prose = "word " * 30
    assert find_long_lines(prose)
    assert find_long_lines(f"- {prose}")
    assert not find_long_lines(f"| {prose} |\n```\n{prose}\n```\n<!-- {prose} -->\n    {prose}")
    assert not find_long_lines(f"[{'a' * 120}](page.md)")
