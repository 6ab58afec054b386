"""What users see of wrong calls, options, settings and filters: what is wrong, and what to do."""

import re

import pytest

from wrong_calls import CASES, message_of

USAGE = re.compile(r"^See sluice .*--help\.$", re.MULTILINE)
"""The fix of a usage error of the command line."""


def test_there_are_sixty_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("title", CASES)
def test_a_wrong_call_is_refused_with_a_fix(title: str) -> None:
    text = message_of(CASES[title])
    assert text, "nothing is refused"
    sentences = re.findall(r"[.!?](?=\s|$)", text)
    assert len(sentences) >= 2 or USAGE.search(text), f"no fix: {text}"
    assert not re.search(r"<[a-z_.]+ object|\bTraceback\b", text), text
