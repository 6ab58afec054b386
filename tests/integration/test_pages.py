"""The pages of the documentation do what they show: see tests/lib/page_sessions.py."""

from pathlib import Path
from typing import Any

import pytest

from page_sessions import (
    Block,
    PageError,
    Session,
    compare,
    list_sessions,
    read_blocks,
)

SESSIONS = list_sessions()


def with_marks(name: str) -> Any:
    """Return the parameter of a session, marked if its programs use Spark."""
    uses_spark = any("sluicemq.spark" in page.read_text() for page in SESSIONS[name])
    return pytest.param(name, marks=[pytest.mark.spark] if uses_spark else [])


@pytest.mark.parametrize("name", [with_marks(name) for name in sorted(SESSIONS)])
def test_the_commands_of_a_session_print_what_its_pages_show(name: str, tmp_path: Path) -> None:
    session = Session(tmp_path)
    try:
        for page in SESSIONS[name]:
            for block in read_blocks(page):
                session.use(block)
    finally:
        session.close()


@pytest.mark.parametrize(
    ("shown", "printed", "is_same"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        (["a", "…", "d"], ["a", "b", "c", "d"], True),
        (["…", "d"], ["d"], True),
        (["a … c"], ["a b c"], True),
        (["a … c"], ["a b"], False),
        (["id 0123456789ABCDEF01234567"], ["id AAAAAAAAAAAAAAAAAAAAAAAA"], True),
        (["at 2026-11-29 10:00:00"], ["at 2027-01-01 23:59:59"], True),
        (["a.c"], ["abc"], False),
    ],
)
def test_outputs_are_compared_line_by_line(
    shown: list[str], printed: list[str], is_same: bool
) -> None:
    assert (compare(shown, printed)[0] == "") is is_same


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("$ echo one\ntwo\n", "one"),
        ("$ false\n", "exit code 1"),
        ("$ echo one\n", "the page shows"),
        ("later\n", "nothing runs in the terminal"),
    ],
)
def test_a_page_that_shows_something_else_is_found(
    text: str, complaint: str, tmp_path: Path
) -> None:
    session = Session(tmp_path)
    with pytest.raises(PageError, match=complaint):
        session.use(Block("page.md:1", "console", text, {}))
    session.close()


def test_a_command_gets_the_id_that_an_earlier_one_printed(tmp_path: Path) -> None:
    session = Session(tmp_path)
    shown, printed = "0" * 32, "A" * 32
    session.use(Block("page.md:1", "console", f"$ printf 'A%.0s' {{1..32}}\n{shown}\n", {}))
    session.use(Block("page.md:5", "console", f"$ echo {shown}\n{printed}\n", {}))
    session.close()
