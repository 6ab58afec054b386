"""The pictures of the documentation are what tools/pictures.py draws, and their parts fit in."""

import importlib
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHARACTER_WIDTH = 7.6
"""The width in units of an average character at 14 px."""


sys.path.append(str(ROOT / "tools"))
TOOL = importlib.import_module("pictures")


@pytest.mark.parametrize("name", sorted(TOOL.PICTURES))
def test_a_picture_is_the_one_that_is_drawn(name: str) -> None:
    committed = (TOOL.DIRECTORY / name).read_text()
    assert committed == TOOL.PICTURES[name]().render(), "run python tools/pictures.py"


def test_no_picture_is_left_over() -> None:
    assert {path.name for path in TOOL.DIRECTORY.glob("*.svg")} == set(TOOL.PICTURES)


@pytest.mark.parametrize("name", sorted(TOOL.PICTURES))
def test_texts_are_within_the_picture(name: str) -> None:
    picture = ET.fromstring((TOOL.DIRECTORY / name).read_text())
    width, height = map(int, re.findall(r"\d+", picture.attrib["viewBox"])[2:])
    outside = []
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        length = len(text.text or "") * CHARACTER_WIDTH
        left = float(text.attrib["x"])
        left -= {"start": 0.0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
        if left < 0 or left + length > width or not 10 < float(text.attrib["y"]) < height:
            outside.append(text.text)
    assert not outside
