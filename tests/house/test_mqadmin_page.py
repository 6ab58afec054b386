"""Checks that docs/mqadmin.md is generated from tests/compatibility/peer/mqadmin.py."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "compatibility" / "peer" / "mqadmin.py"
COMMAND = "PYTHONPATH=tests/lib:tests/compatibility python tests/compatibility/peer/mqadmin.py"


def test_the_page_is_the_table() -> None:
    printed = subprocess.run(
        [sys.executable, str(TABLE)],
        env={"PYTHONPATH": f"{ROOT}/tests/lib:{ROOT}/tests/compatibility"},
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / "mqadmin.md").read_text()
    assert page == printed.stdout, f"Generate the page again: {COMMAND} > docs/mqadmin.md"
