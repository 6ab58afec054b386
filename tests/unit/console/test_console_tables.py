"""Declarations are complete: texts in both languages, vendored files, templates, audit events."""

import hashlib
import re
from pathlib import Path

import pytest

import sluicemq.console
from sluicemq.console.sentences import LANGUAGES, choose_language, sentences, translator
from sluicemq.console.table import PAGES

HERE = Path(sluicemq.console.__file__).parent
VENDORED = {  # htmx.org 2.0.4, uplot 1.6.31
    "htmx.min.js": "e209dda5c8235479f3166defc7750e1dbcd5a5c1808b7792fc2e6733768fb447",
    "uplot.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
SAID = re.compile(r"""\bt\(["']([a-z_]+\.[a-z_]+)["'][,)]""")


@pytest.mark.parametrize("name", VENDORED)
def test_vendored_files_are_as_published_with_their_licence(name: str) -> None:
    path = HERE / "static" / name
    assert hashlib.sha256(path.read_bytes()).hexdigest() == VENDORED[name]
    assert "Permission" in (path.parent / f"{name.partition('.')[0]}.LICENSE.txt").read_text()


def test_every_sentence_is_in_every_language() -> None:
    for key, texts in sentences().items():
        assert set(texts) == set(LANGUAGES), key
        assert all(texts.values()), key
        fields = {frozenset(re.findall(r"{(\w+)}", text)) for text in texts.values()}
        assert len(fields) == 1, f"{key}: the languages fill in different values"


def test_templates_use_only_texts_of_the_table() -> None:
    texts = [path.read_text() for path in (HERE / "templates").glob("*.html")]
    said = {key for text in texts for key in SAID.findall(text)}
    assert len(said) > 100
    assert said <= sentences().keys()


def test_the_language_follows_accept_language() -> None:
    assert choose_language("zh-CN,zh;q=0.9,en;q=0.8") == "zh"
    assert choose_language("fr,de;q=0.5") == "en"
    assert translator("zh")("nav.topics") == "主题"


def test_pages_have_templates_and_changes_have_audit_events() -> None:
    for page in PAGES:
        assert page.template or page.audit_event, page.path
        if page.template:
            assert (HERE / "templates" / page.template).is_file()
        if page.entry:
            assert page.entry in sentences()


def test_nothing_is_inline_in_a_template() -> None:
    for path in (HERE / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"\son[a-z]+=|\sstyle=|<style|javascript:|\|safe", text), path.name
        assert not re.search(r"<script(?! src=)", text), path.name
