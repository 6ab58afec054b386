"""The texts of the pages in each language, from `sentences.toml`.

A row there has an English and a Chinese text; `{name}` in them is a placeholder. Texts of servers
(errors, names) are shown unchanged.
"""

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

LANGUAGES: Final = {"en": "English", "zh": "中文"}


@cache
def sentences() -> dict[str, dict[str, str]]:
    """Return key -> language -> text, for all texts of the console. A key is "nav.topics"."""
    toml_text = Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
    text_by_key = {}
    for section, rows in tomllib.loads(toml_text).items():
        for key, translations in rows.items():
            text_by_key[f"{section}.{key}"] = dict(zip(LANGUAGES, translations, strict=True))
    return text_by_key


def choose_language(accepted: str) -> str:
    """Return the first language in an Accept-Language header that the console has.

    The default is English. "fr, zh-CN;q=0.9" becomes "zh".
    """
    for entry in accepted.lower().split(","):
        # An entry is such as "zh-CN;q=0.9": language, country, weight.
        locale = entry.partition(";")[0].strip()
        language = locale.partition("-")[0]
        if language in LANGUAGES:
            return language
    return next(iter(LANGUAGES))


def notice_key(action: str) -> str:
    """Return the key of the text that says an action is done, or "" for an unknown action."""
    key = f"done.{action}"
    return key if key in sentences() else ""


def translator(language: str) -> Callable[..., str]:
    """Return a function that translates a key to the text in one language.

    Keyword arguments are filled into the text. The function raises KeyError for an unknown key.
    """

    def translate(key: str, **values: Any) -> str:
        sentence = sentences()[key][language]
        return sentence.format(**values) if values else sentence

    return translate
