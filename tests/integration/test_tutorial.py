"""docs/tutorial and its program, examples/orders: the pages quote the program, the program's own
tests pass, and pages/test_part_*.py run the commands of the pages."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from waiting import limit

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
PROGRAM = ROOT / "examples" / "orders"
SOURCE = "\n".join(path.read_text() for path in sorted(PROGRAM.rglob("*.py")))
SOURCE = re.sub(r"\n{2,}", "\n\n", SOURCE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^\$ (.*)\n((?:[^`$].*\n)*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_is_the_programs(page: Path) -> None:
    for block in BLOCK.findall(re.sub(r"\n{2,}", "\n\n", page.read_text())):
        assert any(textwrap.indent(block, " " * depth) in SOURCE for depth in (0, 4)), block


def test_the_pages_quote_most_of_the_program() -> None:
    quoted = "".join(block for page in PAGES for block in BLOCK.findall(page.read_text()))
    assert quoted.count("\n") > 150


def test_the_tests_of_the_program_pass(tmp_path: Path) -> None:
    plugin = () if _has_entry_point() else ("-p", "sluicemq.testing.plugin")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *plugin,
         "--basetemp", str(tmp_path / "tests")],
        cwd=PROGRAM, env=_environment(), capture_output=True, text=True, check=False,
        timeout=limit(100),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\b9 passed", done.stdout), done.stdout[-300:]


@pytest.mark.parametrize("command", ["", "--help", "place 17", "open now", "carrier gone"])
def test_a_command_that_does_not_exist_is_answered_with_the_commands(
    command: str, tmp_path: Path
) -> None:
    done = _run_shop(tmp_path, command)
    assert done.returncode == 1
    assert done.stderr.startswith("Run the shop from a shell.\n\n    python -m shop open  ")
    assert "Traceback" not in done.stderr


def test_a_price_that_is_not_a_number_of_cents_is_refused(tmp_path: Path) -> None:
    done = _run_shop(tmp_path, "pay 17 north 25.00")
    assert done.stderr == "The price must be a whole number of cents, got '25.00'.\n"


@pytest.mark.parametrize(
    "name", ["shop-store/lock", "examples/orders/shop.db", "examples/orders/carrier-is-away"]
)
def test_git_ignores_the_files_that_the_tutorial_leaves_in_the_checkout(name: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    check = subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT, check=False)
    assert check.returncode == 0


def _run_shop(directory: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shop", *command.split()],
        cwd=directory, env=_environment(), capture_output=True, text=True, check=False,
        timeout=limit(30),
    )  # fmt: skip


def _has_entry_point() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == "sluicemq.testing.plugin" for point in entry_points(group="pytest11"))


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(PROGRAM)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "400", **more}
