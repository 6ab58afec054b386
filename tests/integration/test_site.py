"""The site made of docs/ is complete, and needs no network: neither to be built nor to be read."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

import sluicemq
from chromium import Missing, chromium
from sluicemq import rocketmq
from waiting import limit

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OFFLINE = """
import socket, sys
def refuse(*_): raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a link or an anchor that leads nowhere fails.

    With `--quiet`, MkDocs would not count the warnings about them.
    """
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", OFFLINE, str(made)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return made


class Page(HTMLParser):
    """What a page asks for by itself, and the places in it that links can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in ("src", "href") and tag != "a":
                self.asked.append(value or "")


def test_no_page_asks_for_anything_that_is_not_in_the_site(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 80
    for path in pages:
        for asked in Page(path).asked:
            target = asked.partition("?")[0].partition("#")[0]
            assert not re.match(r"\w+:|//", asked), f"{path}: {asked}"
            there = site / target[1:] if target.startswith("/") else path.parent / target
            assert there.exists(), f"{path}: {asked}"
        assert 'class="mermaid"' not in path.read_text(), "its program would be fetched"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text()), style


def test_every_page_of_the_docs_is_there(site: Path) -> None:
    for source in (ROOT / "docs").rglob("*.md"):
        name = "index" if source.name == "README.md" else source.stem
        assert (site / source.relative_to(ROOT / "docs").with_name(f"{name}.html")).is_file()
    assert "new to message queues" in (site / "index.html").read_text()


def test_every_heading_of_a_page_is_a_heading_on_the_site(site: Path) -> None:
    """A heading directly below a table would become a row of the table."""
    for source in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^ *```.*?^ *```$", "", source.read_text(), flags=re.MULTILINE | re.DOTALL)
        written = len(re.findall(r"^#{1,4} ", text, re.MULTILINE))
        name = "index" if source.name == "README.md" else source.stem
        page = (site / source.relative_to(ROOT / "docs").with_name(f"{name}.html")).read_text()
        body = page[page.index("<article") : page.index("</article>")]
        shown = len(re.findall(r"<h[1-4][ >]", body))
        assert shown >= written, source
        assert not re.search(r"<td>\s*#{1,4} ", body), source


def test_every_exported_name_is_on_a_reference_page(site: Path) -> None:
    ids = {one for path in site.glob("reference/*.html") for one in Page(path).ids}
    names = {
        f"sluicemq.{'errors.' * name.endswith('Error')}{name}"
        for name in sluicemq.__all__
        if not name.startswith("__")
    }
    names |= {f"sluicemq.rocketmq.{name}" for name in rocketmq.__all__}
    names |= {f"sluicemq.testing.{name}" for name in ("embedded.embedded", "virtual.VirtualClock")}
    assert not names - ids
    assert len(names) > 70


def test_every_error_has_the_anchor_that_its_name_says(site: Path) -> None:
    kinds = re.findall(r"^### (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert kinds
    assert {kind.lower() for kind in kinds} <= Page(site / "errors.html").ids


def test_every_command_has_its_options_on_the_page_of_commands(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    assert "sluice-topic-create" in Page(site / "reference" / "commands.html").ids
    assert "--queues" in page
    assert "Sentinel" not in page


def test_the_search_works_in_a_page_that_was_opened_as_a_file(site: Path) -> None:
    try:
        executable = chromium()
    except Missing as missing:
        pytest.skip(str(missing))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(limit(30) * 1000)
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("/")
        page.locator("[data-md-component=search-query]").press_sequentially("SendUnknownError")
        # The first results are those of the first letters.
        found = page.locator(".md-search-result__item", has_text="SendUnknownError")
        found.first.wait_for()
        browser.close()


# ---------------------------------------------------------------------------------------- links


@pytest.fixture
def hook() -> SimpleNamespace:
    """tools/site.py, loaded as mkdocs does: under a name that is not that of Python's module."""
    scope: dict[str, object] = {"__file__": str(ROOT / "tools" / "site.py"), "__name__": "hook"}
    exec((ROOT / "tools" / "site.py").read_text(), scope)
    return SimpleNamespace(**scope)


@pytest.mark.parametrize(
    ("here", "text", "shown"),
    [
        ("README.zh.md", "[a](docs/sending.md#several)", "[a](sending.md#several)"),
        ("design/0001.md", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("design/0001.md", "[a](../../README.md)", "a (`README.md`)"),
        ("design/0001.md", "![a](../images/spark.svg)", "![a](../images/spark.svg)"),
        (
            "sql.md",
            "[the demo](../examples/flights/demo.py)",
            "the demo (`examples/flights/demo.py`)",
        ),
        ("sql.md", "[a](https://example.org) [b](#here)", "[a](https://example.org) [b](#here)"),
        ("sql.md", "[left for mkdocs to refuse](none.md)", "[left for mkdocs to refuse](none.md)"),
        ("sql.md", "```\n[a](../Makefile)\n```", "```\n[a](../Makefile)\n```"),
        ("sql.md", "words:\n- one\n  - two\n- three", "words:\n\n- one\n    - two\n- three"),
    ],
)
def test_links_and_lists_of_the_checkout_are_made_those_of_the_site(
    hook: SimpleNamespace, here: str, text: str, shown: str
) -> None:
    files = SimpleNamespace(
        get_file_from_path=lambda uri: uri in ("sending.md", "contributing.md", "images/spark.svg")
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri=here))
    assert hook.on_page_markdown(text, page, None, files) == shown
