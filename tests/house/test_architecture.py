"""docs/architecture.md is true: its folders, its files, and which module answers which code.

`python tests/house/test_architecture.py` prints the table of codes as the page should have it.
"""

import re
from collections import defaultdict
from pathlib import Path

from sluicemq.broker.table import TABLE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sluicemq"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")} - {Path()}


def test_the_tree_shows_every_folder_and_no_other() -> None:
    tree = PAGE.partition("```\nsrc/sluicemq/")[2].partition("```")[0]
    shown = set()
    for line in tree.splitlines():
        names = line.strip().split("  ")[0].split(" | ")
        shown |= {Path(name.rstrip("/")) for name in names if name.endswith("/")}
    assert shown == PACKAGES | {Path("cli/templates")}  # no package: what users get to write on


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", PAGE))
    missing = [
        name for name in named if not (SOURCE / name).is_file() and not (ROOT / name).is_file()
    ]
    assert not missing


def test_the_table_of_codes_is_the_brokers() -> None:
    assert codes() in PAGE


def codes() -> str:
    by_module: dict[str, list[int]] = defaultdict(list)
    for code, row in TABLE.items():
        module = row.handler.__module__.removeprefix("sluicemq.").replace(".", "/")
        by_module[f"`{module}.py`"].append(int(code))
    rows = (
        f"| {module} | {' '.join(map(str, sorted(found)))} |"
        for module, found in sorted(by_module.items())
    )
    return "\n".join(["| module | codes |", "|---|---|", *rows])


if __name__ == "__main__":
    print(codes())
