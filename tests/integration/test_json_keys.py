"""The keys of all JSON output are published: renaming a Python name must not change them.

`tests/golden/json_keys.json` maps each command and each tool of `sluice mcp` to the paths of the
keys that it writes for the same small cluster. A new key is added there by

    PYTHONPATH=src:tests/lib python tests/integration/test_json_keys.py

which refuses to remove one.
"""

import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

pytest.importorskip("mcp")

from mcp import Client

from sluicemq.cli import main
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.model.topic import GroupConfig
from sluicemq.operate.mcp import TOOLS, server_of
from sluicemq.testing.embedded import EmbeddedSluice, embedded

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "json_keys.json"
FILTER: Final = "origin = 'JFK' AND delay > 5"
COMMANDS: Final = (
    "topic list",
    "topic show flights",
    "group list",
    "group show billing",
    "group lag billing",
    "group reset billing -t flights --to earliest --dry-run",
    "group skip idle -t flights",
    "consumer list billing",
    "consumer status billing",
    "consumer stack billing",
    "cluster list",
    "cluster status",
    "cluster show broker-a",
    "message query -t flights -k k1",
    "message show ID -t flights",
    "delay list",
    "doctor",
    "doctor --group billing",
    "explain group billing",
    "explain group idle",
    "explain message ID --topic flights",
    "explain message ID --topic flights --group billing",
    f'filter test -t flights "{FILTER}"',
    "acl status",
)
"""Commands about a cluster; `--json` and the name server's address are added."""
OFFLINE_COMMANDS: Final = (
    "filter check \"a == 5 and b > 'x'\" --json",
    'filter check "a = 5 and b > 3 garbage" --json',
    "store ls STORE --json",
    "store info STORE --json",
    "store repair STORE --json",
    *(f"store dump STORE {part}" for part in ("log", "queue", "index", "checkpoint", "config")),
)
TOOL_CALLS: Final[dict[str, list[dict[str, Any]]]] = {
    "doctor": [{}, {"group": "billing"}, {"topic": "flights"}],
    "topic": [{"name": "flights"}],
    "group": [{"group": "billing"}],
    "group_lag": [{"group": "billing"}],
    "explain_group": [{"group": "billing"}, {"group": "idle"}],
    "explain_message": [
        {"message_id": "ID", "topic": "flights"},
        {"message_id": "ID", "topic": "flights", "group": "billing"},
    ],
    "search_messages": [{"topic": "flights", "key": "k1"}],
    "check_filter": [{"expression": "origin == 'JFK'"}, {"expression": FILTER}],
    "try_filter": [
        {"topic": "flights", "expression": FILTER},
        {"topic": "flights", "expression": "origin = 'JFK'", "group": "billing"},
    ],
}
"""The arguments of calls of the tools; one that is not here is called without arguments."""


async def collect() -> dict[str, list[str]]:
    """Return the key paths of each command and each tool for a cluster with a few messages."""
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        async with embedded(tcp=True, store=directory) as mq:
            message_id = await _fill(mq)
            address = mq.servers.name_server_address
            server = f" --json --nameserver {address}"
            for command in COMMANDS:
                text = command.replace("ID", message_id) + server
                found[command] = await asyncio.to_thread(_keys_of_command, text, directory)
            async with Client(
                server_of(lambda: Admin(mq.servers.name_server_address), SYSTEM_CLOCK)
            ) as client:
                for tool in TOOLS:
                    found[f"mcp {tool}"] = set()
                    for arguments in TOOL_CALLS.get(tool, [{}]):
                        values = {
                            name: message_id if value == "ID" else value
                            for name, value in arguments.items()
                        }
                        answer = await client.call_tool(tool, values)
                        assert not answer.is_error, (tool, answer)
                        for part in answer.content:
                            if part.type == "text":
                                found[f"mcp {tool}"].update(_paths(json.loads(part.text)))
        store = str(next(Path(directory).rglob("commitlog")).parent)
        for command in OFFLINE_COMMANDS:
            text = command.replace("STORE", shlex.quote(store))
            found[command] = await asyncio.to_thread(_keys_of_command, text, directory)
    return {name: sorted(paths) for name, paths in found.items()}


async def _fill(mq: EmbeddedSluice) -> str:
    """Send messages, let a group consume some of them, and return the id of one message."""
    await mq.admin.create_topic("flights", queues=1)
    ids = []
    for index in range(10):
        properties = {"origin": "JFK" if index % 2 else "LGA", "delay": "x"}
        result = await mq.send("flights", f"no {index}", keys=f"k{index}", properties=properties)
        ids.append(result.message_id)
    await mq.send("flights", "late", delay_level=10)
    await mq.admin.create_group(GroupConfig("idle"))
    has_message = asyncio.Event()

    async def handle(message: object) -> None:
        has_message.set()

    consumer = mq.consumer("billing", handle)
    consumer.subscribe("flights", where="origin = 'JFK'")
    await consumer.start()
    await asyncio.wait_for(has_message.wait(), 20)
    while not await mq.admin.messages_by_key("flights", "k1"):  # the index follows
        await asyncio.sleep(0.05)
    return ids[-1]


def _keys_of_command(text: str, directory: str) -> set[str]:
    result = CliRunner().invoke(main, shlex.split(text))
    assert result.stdout.strip(), (text, result.output, result.exception)
    try:
        documents = [json.loads(result.stdout)]
    except ValueError:
        documents = [json.loads(line) for line in result.stdout.splitlines()]
    return {path.replace(directory, "") for one in documents for path in _paths(one)}


def _paths(value: object, path: str = "") -> Iterator[str]:
    """Yield the path of each key. Keys that are data, such as numbers, become `*`."""
    if isinstance(value, dict):
        for name, item in value.items():
            key = f"{path}.{'*' if name.isdigit() or '@' in name else name}"
            yield key
            yield from _paths(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{path}[]")


@pytest.mark.timeout(120)
async def test_no_key_of_json_output_is_gone() -> None:
    golden: dict[str, list[str]] = json.loads(GOLDEN.read_text())
    found = await collect()
    assert set(golden) == set(found)
    gone = {name: sorted(set(paths) - set(found[name])) for name, paths in golden.items()}
    assert not {name: paths for name, paths in gone.items() if paths}


if __name__ == "__main__":
    keys = asyncio.run(collect())
    if GOLDEN.exists():
        for name, paths in json.loads(GOLDEN.read_text()).items():
            if missing := sorted(set(paths) - set(keys.get(name, ()))):
                sys.exit(f"{name} lacks {missing}. Published keys stay.")
    GOLDEN.write_text(json.dumps(keys, indent=1) + "\n")
