"""What the pages say, in each language: `sentences.toml`, one row a sentence.

A row has its English and its Chinese text; `{name}` in them is filled in. What servers say (errors,
names) is shown as they say it.
"""

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

LANGUAGES: Final = {"en": "English", "zh": "中文"}


@cache
def sentences() -> dict[str, dict[str, str]]:
    """Key -> language -> text."""
    text = Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
    return {
        f"{part}.{key}": dict(zip(LANGUAGES, texts, strict=True))
        for part, rows in tomllib.loads(text).items()
        for key, texts in rows.items()
    }


def language_of(accepted: str) -> str:
    """The first language of Accept-Language that is there, else English."""
    for one in accepted.lower().split(","):
        name = one.partition(";")[0].strip().partition("-")[0]
        if name in LANGUAGES:
            return name
    return next(iter(LANGUAGES))


def noted(what: str) -> str:
    """The key of the sentence that says it is done; "" for a word that is none of them."""
    key = f"done.{what}"
    return key if key in sentences() else ""


def translator(language: str) -> Callable[..., str]:
    """(key, values) -> the sentence. Raises KeyError for one that is not in the table."""

    def translate(key: str, **values: Any) -> str:
        text = sentences()[key][language]
        return text.format(**values) if values else text

    return translate
