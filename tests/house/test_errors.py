"""Every error says where its page is, the page is there, and the source says its example."""

import ast
import importlib
import inspect
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.errors import RequestError, SendError, SluiceError
from sluicemq.wire.codes import ResponseCode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()

sys.path.append(str(ROOT / "tools"))
errors_page = importlib.import_module("errors_page")
PUBLISHED = (Path(__file__).parent / "error_pages.txt").read_text().split()
"""The names of all error pages; a name that is here stays."""
KINDS: list[type[SluiceError]] = errors_page.kinds()


def test_the_page_is_made_of_the_docstrings() -> None:
    assert errors_page.written(PAGE) == PAGE, "run python tools/errors_page.py docs/errors.md"
    assert len(KINDS) > 35


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_link_in_the_text_of_an_error_reaches_its_page(kind: type[SluiceError]) -> None:
    error = kind.__new__(kind)
    printed = "".join(traceback.format_exception_only(error))
    link = re.search(r"^More: sluice (explain error \S+)$", printed, re.MULTILINE)
    assert link, printed
    told = CliRunner().invoke(main, shlex.split(link[1]))
    text = inspect.getdoc(kind)
    assert text
    assert (told.exit_code, told.output) == (0, f"{kind.__name__}\n\n{text}\n")
    assert re.findall(r"^(When|Then|Fix): ", text, re.MULTILINE) == ["When", "Then", "Fix"]
    assert PAGE.count(f"\n### {kind.__name__}\n") == 1, "the heading is the anchor on the site"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_page_keeps_its_name(name: str) -> None:
    shown = CliRunner().invoke(main, ["explain", "error", name])
    assert shown.exit_code == 0, f"add the class that is now {name!r} to PUBLISHED_PAGES"
    assert shown.output.startswith(f"{name.rpartition('.')[2]}\n")


def test_the_list_of_published_pages_is_complete() -> None:
    pages = [kind.page() for kind in KINDS]
    assert len(set(pages)) == len(pages), "a page shows a bare class name, so these are unique"
    assert sorted(pages) == sorted(name for name in PUBLISHED if "." not in name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_found_by_its_class_name_and_is_in_the_tree(kind: type[SluiceError]) -> None:
    shown = CliRunner().invoke(main, ["explain", "error", kind.__name__])
    assert (shown.exit_code, shown.output.partition("\n")[0]) == (0, kind.__name__)
    tree = CliRunner().invoke(main, ["explain", "error"]).output
    assert re.search(rf"^ +[│├└─ ]*{kind.__name__}\b", tree, re.MULTILINE)


def test_a_command_shows_the_way_below_the_text() -> None:
    told = CliRunner().invoke(main, ["topic", "create", "my orders"])
    assert told.exit_code == 1
    assert told.stderr.splitlines() == [
        "sluice: the topic name 'my orders' contains a space. Use only ASCII letters, digits and "
        "the characters % | - and _.",
        "More: sluice explain error ConfigurationError",
    ]


def test_what_compares_texts_sees_the_text_alone() -> None:
    error = SendError("no answer.", fix="Look.")
    error.add_note("message 7 of 9")
    assert str(error) == "no answer. Look."
    assert error.__notes__ == ["More: sluice explain error SendError", "message 7 of 9"]
    assert RequestError(17, "no such topic").__notes__ == [
        "More: sluice explain error RequestError"
    ]


def test_the_page_explains_every_response_code() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [
        (int(code), code.name) for code in sorted(ResponseCode)
    ]


# ------------------------------------------------------------------------------------- examples

EXAMPLES = {
    kind.__name__: " ".join(block.split())
    for kind in KINDS
    for block in re.findall(r"\n\n((?:    .+(?:\n|$))+)\Z", inspect.getdoc(kind) or "")
}


def pattern(node: ast.expr | None) -> str:
    """What the text may look like that the expression makes."""
    match node:
        case None:
            return ""
        case ast.Constant(str(text)):
            return re.escape(text)
        case ast.JoinedStr(parts):
            return "".join(map(pattern, parts))
        case ast.BinOp(left, ast.Add(), right):
            return pattern(left) + pattern(right)
        case _:
            return ".*"


def texts() -> Iterator[str]:
    """Patterns of what errors say, with their cures."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                fix = next((one.value for one in node.keywords if one.arg == "fix"), None)
                for text in node.args[:2]:
                    made = pattern(text)
                    if len(made.replace(".*", "")) >= 12:
                        yield made if fix is None else f"{made} {pattern(fix)}"


def test_examples_are_what_the_source_says() -> None:
    said = [re.compile(text) for text in {*texts()}]
    unsaid = [
        f"{name}: {text}"
        for name, text in EXAMPLES.items()
        if not text.startswith("answered by ") and not any(one.fullmatch(text) for one in said)
    ]
    assert not unsaid, "\n".join(unsaid)
    assert len(EXAMPLES) > 25
