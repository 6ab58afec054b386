"""What a wheel says of itself names no file that it lacks: description, docstrings, texts."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
described = importlib.import_module("readme").described

POINTER = re.compile(r"(?<!apache\.org/)\bdocs/|\bREADME\.md|\bCONTRIBUTING\.md|\bCHANGELOG\.md")
# Their texts are what docs/configuration.md is made of; no command shows them.
FOR_A_PAGE = {"config/keys.py", "config/replicas.py"}
LINK = re.compile(r"\]\((?!https?://|#)[^)]*\)")
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_the_description_of_the_package_links_to_no_file() -> None:
    text = described((ROOT / "README.md").read_text())
    assert not LINK.findall(text)
    assert text.startswith("# SluiceMQ\n\n*Files that are named here")


def test_links_to_the_web_stay_and_pictures_go() -> None:
    text = described("# X\n\n[a](https://a.org) [b](docs/b.md#c) [d](#e) ![f](docs/f.svg)\n")
    assert text.endswith("\n\n[a](https://a.org) b [d](#e) \n")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_no_text_of_the_source_names_a_file_of_the_repository(path: Path) -> None:
    texts = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = [(line, text) for line, text in texts if POINTER.search(text)]
    if path.name == "quickstart.py":  # its templates have one of their own
        named = [(line, text) for line, text in named if text != "README.md"]
    linked = [(line, text) for line, text in texts if re.search(r"\]\([\w/-]+\.md", text)]
    assert not named
    assert not linked or str(path.relative_to(ROOT / "src" / "sluicemq")) in FOR_A_PAGE
