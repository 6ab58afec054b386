"""The tools of `sluice mcp` before a cluster, as an assistant uses them."""

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters

from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.model.topic import GroupConfig
from sluicemq.operate.mcp import BODY_BYTES_MAX, TOOLS, server_of
from sluicemq.testing.embedded import EmbeddedSluice, embedded

CHANGES = ("create", "delete", "update", "reset", "send", "set")


class Assistant:
    def __init__(self, mq: EmbeddedSluice, client: Client) -> None:
        self.mq, self.client = mq, client

    async def __call__(self, tool: str, /, **arguments: Any) -> Any:
        answer = await self.client.call_tool(tool, arguments)
        text = "".join(one.text for one in answer.content if one.type == "text")
        if answer.is_error:
            return text
        found = [json.loads(one.text) for one in answer.content if one.type == "text"]
        return found[0] if len(found) == 1 else found


@contextlib.asynccontextmanager
async def asking() -> AsyncIterator[Assistant]:
    async with embedded(tcp=True) as mq:
        await mq.admin.create_topic("flights", queues=1)
        for index in range(10):
            origin = "JFK" if index % 2 else "LGA"
            await mq.send("flights", f"no {index}", keys=f"k{index}", properties={"origin": origin})
        address = mq.servers.name_server_address
        async with Client(server_of(lambda: Admin(address), SYSTEM_CLOCK)) as client:
            yield Assistant(mq, client)


async def test_tools_only_look_and_say_what_they_are_for() -> None:
    async with asking() as assistant:
        tools = (await assistant.client.list_tools()).tools
        assert {tool.name for tool in tools} == set(TOOLS)
        for tool in tools:
            assert tool.annotations is not None
            assert tool.annotations.read_only_hint is True, tool.name
            assert tool.description
            assert not tool.name.startswith(CHANGES)


async def test_what_is_there_is_listed_and_searched() -> None:
    async with asking() as assistant:
        assert "flights" in (await assistant("topics", contains="FLI"))["names"]
        told = await assistant("topic", name="flights")
        assert told["queues"][0]["offsets"]["offset_max"] == 10
        found = await assistant("search_messages", topic="flights", key="k3")
        assert (found["body_of_the_sender"], found["offset"]) == ("no 3", 3)
        by_id = await assistant("search_messages", topic="flights", message_id=found["id"])
        assert by_id == found
        assert "either" in await assistant("search_messages", topic="flights")


async def test_filters_are_checked_and_tried_on_what_is_stored() -> None:
    async with asking() as assistant:
        tried = await assistant("try_filter", topic="flights", expression="origin = 'JFK'")
        assert tried["rows"] == 10
        assert tried["report"]["matched"] == 5
        checked = await assistant("check_filter", expression="origin = 'JFK' AND delay > 5")
        assert {one["name"] for one in checked["properties"]} == {"origin", "delay"}
        wrong = await assistant("check_filter", expression="origin == 'JFK'")
        assert wrong["findings"][0]["what"]


async def test_an_error_is_a_sentence_with_its_cure() -> None:
    async with asking() as assistant:
        told = await assistant("topic", name="nowhere")
        assert "nowhere" in told
        assert "Traceback" not in told


async def test_a_group_and_a_message_are_explained_and_the_cluster_is_healthy() -> None:
    async with asking() as assistant:
        await assistant.mq.admin.create_group(GroupConfig("billing"))
        stored = await assistant("search_messages", topic="flights", key="k1")
        told = await assistant("explain_message", message_id=stored["id"], topic="flights")
        assert told["message"]["topic"] == "flights"
        for tool in ("explain_message", "doctor"):  # without a topic all of them would be walked
            assert "topic" in await assistant(tool, message_id=stored["id"])
        assert await assistant("explain_group", group="billing") is not None
        assert (await assistant("doctor"))["healthy"] is True


async def test_a_long_body_is_cut_and_an_odd_one_is_text() -> None:
    async with asking() as assistant:
        await assistant.mq.send("flights", b"\xff\x00" * BODY_BYTES_MAX, keys="odd")
        found = await assistant("search_messages", topic="flights", key="odd")
        assert found["body_of_the_sender"].startswith("\\xff")
        assert found["body_bytes"] == 2 * BODY_BYTES_MAX


async def test_the_command_serves_an_assistant_over_its_input() -> None:
    async with embedded(tcp=True) as mq:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "sluicemq", "mcp", "-n", mq.servers.name_server_address],
        )
        async with Client(server) as client:
            answer = await client.call_tool("cluster", {})
            assert not answer.is_error
            assert "broker-a" in str(answer.content)
