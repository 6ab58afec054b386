"""The pages about Spark do what they show: see tests/lib/page_sessions.py."""

from pathlib import Path

import pytest

from page_sessions import list_sessions, run_session, uses_spark

NAMES = sorted(name for name, pages in list_sessions().items() if uses_spark(pages))
THOROUGH = {"audit", "spark-exactly-once", "sql"}
"""Sessions that CI leaves out, because each starts Spark many times: a minute or more."""


@pytest.mark.spark
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name in THOROUGH else [])
        for name in NAMES
    ],
)
def test_the_commands_of_a_session_print_what_its_pages_show(name: str, tmp_path: Path) -> None:
    run_session(name, tmp_path)
