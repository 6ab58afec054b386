"""What runs the pages of the documentation (tests/lib/page_sessions.py) finds differences.

The pages themselves are run by pages/test_part_*.py, and those with Spark by spark/test_pages.py.
"""

import re
from pathlib import Path

import pytest

from fences import ROOT, Fence, fences
from page_sessions import (
    PageError,
    Session,
    compare,
    list_sessions,
    share_of_sessions,
    uses_spark,
)


def console(line: int, text: str) -> Fence:
    return Fence(ROOT / "page.md", line, "console", text, "", {})


PARTS = 4
"""The number of files tests/integration/pages/test_part_*.py."""


def test_each_session_is_run_by_one_file() -> None:
    run = [name for part in range(PARTS) for name in share_of_sessions(part, PARTS)]
    run += [name for name, pages in list_sessions().items() if uses_spark(pages)]
    assert sorted(run) == sorted(list_sessions())
    files = Path(__file__).with_name("pages").glob("test_part_*.py")
    parts = [re.findall(r"share_of_sessions\((\d), (\d)\)", file.read_text()) for file in files]
    assert sorted(parts) == [[(str(part), str(PARTS))] for part in range(PARTS)]


@pytest.mark.parametrize("name", sorted(list_sessions()))
def test_a_session_has_commands_and_shows_what_they_print(name: str) -> None:
    blocks = [block for page in list_sessions()[name] for block in fences(page)]
    lines = [
        line
        for block in blocks
        if block.language == "console" and not block.reason
        for line in block.text.splitlines()
    ]
    assert any(line.startswith("$ ") for line in lines)
    assert any(line.strip("… ") and not line.startswith("$ ") for line in lines)


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
        session.use(console(1, text))
    session.close()


def test_a_command_gets_the_id_that_an_earlier_one_printed(tmp_path: Path) -> None:
    session = Session(tmp_path)
    shown, printed = "0" * 32, "A" * 32
    session.use(console(1, f"$ printf 'A%.0s' {{1..32}}\n{shown}\n"))
    session.use(console(5, f"$ echo {shown}\n{printed}\n"))
    session.close()
