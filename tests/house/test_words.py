"""The text of the source is written for strangers: no private phrases, no private names.

`BANNED` lists phrases that readers of the code had to read twice, with what to write instead. It is
searched in docstrings, comments and string literals of all of the source.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sluicemq"

BANNED = {
    r"so (many|long)\b(?! as)": "say the number and its unit",
    r"\bwhoever\b": "name the caller, client or server",
    r"\b(no|some)body\b": "name the client, caller or member",
    r"\banew\b": "again",
    r"\bonce more\b": "again",
    r"\bgives? (it )?up\b": "moves to the dead-letter topic; stops retrying; cancels",
    r"\b(hears|told|tells) of\b": "is notified of; is called with",
    r"\bof ours\b": "of SluiceMQ",
    r"\bmends?\b|\bmended\b": "repair; fix",
    r"(?<!\")\bcures?\b(?!\")": "fix",  # in quotes it is a key of JSON output
    r"\bquick (twin|way)\b": "fast path",
    r"\bcannot be had\b": "is not available",
    r"\bLeave it away\b": "remove it",
    r"(?<![Tt]here )\bis no (?!longer\b|more\b|such\b)[a-z]+\b": "is not a …",
    r"\b(a|the) life of\b": "incarnation; run; lifetime",
    r"\bfar as that goes\b": "as far as possible",
    r"\bWho\b [a-z]+s\b": "begin with the thing that acts",
}


def test_the_source_has_none_of_the_banned_phrases() -> None:
    breaches = [
        f"{path.relative_to(SOURCE)}:{line}: {found!r}: {instead}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, found, instead in banned_phrases(path.read_text())
    ]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize(
    "text",
    [
        '"""Wait for so many seconds."""\n',
        "# Whoever asks is told of it.\n",
        'raise ValueError(f"{name} is no address")\n',
    ],
)
def test_a_planted_phrase_is_found(text: str) -> None:
    assert banned_phrases(text)


def test_code_is_not_searched() -> None:
    assert not banned_phrases("nobody = mends\n")


def banned_phrases(text: str) -> list[tuple[int, str, str]]:
    """Return line, phrase and replacement of each banned phrase in prose of a module."""
    return [
        (line + prose[: found.start()].count("\n"), found[0], instead)
        for line, prose in _prose(text)
        for pattern, instead in BANNED.items()
        for found in re.finditer(pattern, prose)
    ]


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment and string literal."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string
