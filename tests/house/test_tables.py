"""A table of a document is a table on the site, and what follows it is not a part of it.

Python-Markdown takes the lines directly below a table as rows, a heading too. It shows a table
directly below a paragraph as text. Both need a blank line, which viewers of repositories do not.
"""

import re
from pathlib import Path

import pytest

from fences import DOCUMENTS, ROOT

_ROW = re.compile(r"^\s*\|")
_RULE = re.compile(r"^\s*\|[\s:|-]+\|\s*$")


def find_faults(text: str) -> list[str]:
    """Return the line numbers at which a blank line before or after a table is missing."""
    faults = []
    lines = ["", *text.splitlines(), ""]
    is_code = False
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code or not _ROW.match(line):
            continue
        after = lines[number + 1]
        if after.strip() and not _ROW.match(after):
            faults.append(f"{number + 1}: no blank line after the table: {after[:60]}")
        before = lines[number - 1]
        if _RULE.match(after) and before.strip() and not before.startswith("#"):
            faults.append(f"{number}: no blank line before the table: {before[:60]}")
    return faults


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_blank_line_is_before_and_after_each_table(document: Path) -> None:
    assert not find_faults(document.read_text())


def test_the_walk_finds_missing_blank_lines() -> None:
    text = "a\n| b |\n|---|\n| c |\n## d\n"
    assert [fault.partition(":")[0] for fault in find_faults(text)] == ["2", "5"]
    assert not find_faults("a\n\n| b |\n|---|\n| c |\n\n## d\n")
