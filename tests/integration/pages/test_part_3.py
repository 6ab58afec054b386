"""A quarter of the pages of the documentation: see tests/lib/page_sessions.py."""

from pathlib import Path

import pytest

from page_sessions import run_session, share_of_sessions


@pytest.mark.parametrize("name", share_of_sessions(2, 4))
def test_the_commands_of_a_session_print_what_its_pages_show(name: str, tmp_path: Path) -> None:
    run_session(name, tmp_path)
