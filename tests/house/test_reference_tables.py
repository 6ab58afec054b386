"""The reference pages of options and metrics have the tables that their tools write."""

import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest

from sluicemq.client.aio.sluice import ClientOptions, Sluice
from sluicemq.client.core.consuming import ConsumeLimits, ConsumeRules, LitePullLimits
from sluicemq.client.core.messages import MessageOptions
from sluicemq.client.core.sending import ProducerOptions

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))  # for what the tools import from each other
TOOLS = {
    name: runpy.run_path(str(ROOT / "tools" / f"{name}_page.py")) for name in ("options", "metrics")
}
PAGES = {name: (ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in TOOLS}


@pytest.mark.parametrize("name", TOOLS)
def test_the_tables_are_up_to_date(name: str) -> None:
    command = f"python tools/{name}_page.py docs/reference/{name}.md"
    assert PAGES[name] == TOOLS[name]["with_tables"](PAGES[name]), f"run {command}"


@pytest.mark.parametrize("name", TOOLS)
def test_every_table_is_on_the_page(name: str) -> None:
    assert re.findall("<!-- written: (.*?) -->", PAGES[name]) == [*TOOLS[name]["TABLES"]]


@pytest.mark.parametrize(
    "options",
    [ClientOptions, ConsumeLimits, ConsumeRules, LitePullLimits, MessageOptions, ProducerOptions],
)
def test_every_declared_option_is_on_the_page(options: type) -> None:
    missing = [name for name in options.__annotations__ if f"| `{name}` |" not in PAGES["options"]]
    assert not missing


def test_every_option_of_a_client_is_on_the_page() -> None:
    parameters = inspect.signature(Sluice).parameters.values()
    names = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    assert len(names) > 10
    assert [name for name in names if f"| `{name}` |" not in PAGES["options"]] == []


def test_an_option_without_a_meaning_is_found() -> None:
    with pytest.raises(KeyError, match="described nowhere"):
        TOOLS["options"]["_find_meaning"]("no_such_option", (Sluice,))


@pytest.mark.parametrize("source", ["broker/metrics.py", "proxy/server.py"])
def test_every_metric_of_the_source_is_on_the_page(source: str) -> None:
    text = (ROOT / "src" / "sluicemq" / source).read_text()
    names = re.findall(r'"((?:rocketmq|sluicemq)_[a-z_]+)"', text)
    assert len(names) > 5
    listed = set(re.findall(r"^\| `(\w+?)(?:_total)?` \|", PAGES["metrics"], re.MULTILINE))
    assert set(names) - listed == set()
