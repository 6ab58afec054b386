"""The check of commit subjects finds one that is too long, and no other."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
commit_subjects = importlib.import_module("commit_subjects")


def test_a_subject_may_have_72_characters_and_no_more() -> None:
    lines = [f"abc1234 {'x' * 72}", f"def5678 {'x' * 73}"]
    assert commit_subjects.too_long(lines) == [(lines[1], 73)]
