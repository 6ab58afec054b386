"""The examples of docs/sending.md run, in their order, against a cluster in this process."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sluicemq import Message, SendError, SendUnknownError, Sluice

PAGE = Path(__file__).parents[3] / "docs" / "sending.md"
EXAMPLE = re.compile(r"^```python\n(async def (\w+).*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = {name: text for text, name in EXAMPLE.findall(PAGE.read_text())}
NAMES: dict[str, Any] = {
    "asyncio": asyncio, "datetime": datetime, "timedelta": timedelta, "UTC": UTC,
    "Message": Message, "SendError": SendError, "SendUnknownError": SendUnknownError,
}  # fmt: skip


def test_the_page_shows_every_way_to_send() -> None:
    assert {*EXAMPLES} == {
        "one", "as_a_value", "many", "side_by_side", "without_waiting", "with_back_pressure",
        "to_the_end", "later", "in_order", "with_care",
    }  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_of_the_page_runs(
    name: str, cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = dict(NAMES)
    exec(EXAMPLES[name], scope)
    async with Sluice(cluster.addresses) as mq:
        await scope[name](mq)
    printed = capsys.readouterr().out
    assert "is not there" not in printed
    assert "may be there" not in printed
