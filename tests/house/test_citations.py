"""Every citation leads somewhere: `spec/NAME.md §N` to a section, `docs/design/NNNN` to a note.

Comments and docstrings cite facts by page and section. A page is a file of docs/spec; a section is
a heading that begins with its number; `spec/traffic item N` is a numbered item of that page.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "docs" / "spec"
DESIGN = ROOT / "docs" / "design"

# A citation may be broken over two lines of a comment or docstring.
GAP = r"[,.;]?(?:\s*#)?\s+"
PAGE = re.compile(
    rf"spec/([a-z0-9.-]+?)(?:\.md)?(?:{GAP}(§|item)\s*([0-9]+(?:\.[0-9]+)?))?(?![\w-])"
)
NOTE = re.compile(r"design/([0-9]{4})")
SOURCES = sorted(
    path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def sections(page: str) -> set[str] | None:
    """`§ N` for each numbered heading of a page, `item N` for each item; None without the page."""
    path = SPEC / f"{page}.md"
    if not path.is_file():
        return None
    text = path.read_text()
    headings = re.findall(r"(?m)^#+ (\d+(?:\.\d+)?)\.? ", text)
    items = re.findall(r"(?m)^(\d+)\. ", text)
    return {f"§ {number}" for number in headings} | {f"item {number}" for number in items}


def dead(text: str) -> Iterator[str]:
    for found in PAGE.finditer(text):
        page, kind, number = found.groups()
        known = sections(page)
        if known is None:
            yield f"spec/{page}: no such page in docs/spec"
        elif number is not None and f"{kind} {number}" not in known:
            yield f"spec/{page} {kind} {number}: no such section"
    for found in NOTE.finditer(text):
        if not list(DESIGN.glob(f"{found[1]}-*.md")):
            yield f"design/{found[1]}: no such note"
    if "architecture, decision" in text:
        yield "architecture, decision …: cite a note of docs/design"


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_every_citation_resolves(folder: str) -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {breach}"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder) and path != Path(__file__)
        for breach in dead(path.read_text())
    ]
    assert not breaches, "\n".join(breaches)


def test_planted_citations_are_found_dead() -> None:
    assert list(dead("(spec/store.md §2.1), spec/traffic, item 23, docs/design/0002")) == []
    assert list(dead("# as in spec/nowhere.md §1")) == ["spec/nowhere: no such page in docs/spec"]
    assert list(dead("spec/store.md\n    §99 and design/9999")) == [
        "spec/store § 99: no such section",
        "design/9999: no such note",
    ]
