"""docs/limits.md says the values of the source, every one of them, and what one really reads."""

import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

from sluicemq.config.keys import Kind
from sluicemq.config.settings import KEYS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))  # for what the tools import from each other
TOOL = runpy.run_path(str(ROOT / "tools" / "limits_page.py"))
ROWS = [row for rows in TOOL["PAGE"].values() for row in rows]
SAID = sorted({row.said for row in ROWS if row.said[0]})
NOT_MET = {
    "deleteFileBatchMax",
    "grpcClientProducerBackoffMaxMillis",
    "grpcClientProducerMaxAttempts",
    "haTransferBatchSize",
    "maxTopicLength",
    "registerBrokerTimeoutMills",
}
"""Bounds of settings that are no limit for a user, or stand beside another one."""
MODULES = {
    "model.topic": set(),
    "filter.syntax": {"FLOAT_MAX", "LONG_MAX"},
    "net.limits": {
        "LOG_KINDS_MAX",
        "EXTENDED_JSON_BYTES_MAX",
        "EXTENDED_JSON_VALUES_MAX",
        "REFERENCED_VALUES_MAX",
        "RUNS_PER_ROUND_MAX",
        "WORK_WEIGHT_MAX",
    },
    "proxy.limits": set(),
    "wire.frames": {"HEADER_VALUES_MAX", "UNJOINED_PIECES_MAX"},
    "console.sessions": {"REMEMBERED_MAX"},
}
"""Modules whose `*_MAX` are on the page, and those of them that nobody meets."""


def test_the_page_is_up_to_date() -> None:
    text = (ROOT / "docs" / "limits.md").read_text()
    assert text == TOOL["written"](text), "run python tools/limits_page.py docs/limits.md"


def test_a_changed_value_would_be_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "limits.md").read_text()
    monkeypatch.setattr("sluicemq.model.topic.TOPIC_LENGTH_MAX", 128)
    assert text != TOOL["written"](text)


@pytest.mark.parametrize(("words", "path"), SAID)
def test_what_the_page_quotes_is_said(words: str, path: str) -> None:
    text = (ROOT / "src" / "sluicemq" / path).read_text()
    joined = re.sub(r'"\s*\n\s*f?"', "", text)  # a sentence over several lines
    assert words in joined


def test_every_setting_that_limits_is_on_the_page() -> None:
    listed = {row.of for row in ROWS} | NOT_MET
    limits = {
        key.name
        for key in KEYS
        if key.kind is Kind.INTEGER and re.search("_max|timeout|_bytes$", key.field)
    }
    assert not limits - listed


@pytest.mark.parametrize("module", MODULES)
def test_every_constant_that_limits_is_on_the_page(module: str) -> None:
    source = import_module(f"sluicemq.{module}")
    listed = {row.of.removeprefix(f"{module}:") for row in ROWS if row.of.startswith(f"{module}:")}
    found = {name for name in vars(source) if re.fullmatch(r"[A-Z][A-Z_]*_MAX", name)}
    assert found - listed == MODULES[module]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("X_BYTES_MAX", 6_000_000, "5.722 MiB (6,000,000)"),
        ("X_BYTES", 63, "63 B"),
        ("wait_ms", 500, "500 ms"),
        ("WAIT_S_MAX", 7200, "2 h"),
        ("count_max", 65_536, "65,536"),
    ],
)
def test_values_have_their_units(name: str, value: int, text: str) -> None:
    assert TOOL["shown"](name, value) == text
