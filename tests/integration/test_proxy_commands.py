"""What `sluice proxy status` and `sluice group show` say of clients of gRPC."""

import asyncio
import json
import queue
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("google.protobuf")

from sluicemq.cli import main
from sluicemq.cli.output import show_version
from sluicemq.proxy import messages as m
from sluicemq.proxy.service import PATH
from sluicemq.testing.embedded import embedded

grpc: Any = pytest.importorskip("grpc")
METADATA = [
    ("x-mq-client-id", "one"), ("x-mq-language", "GO"), ("x-mq-client-version", "5.1.2"),
]  # fmt: skip


def subscribed(group: str, topic: str, tag: str) -> m.TelemetryCommand:
    wish = m.SubscriptionEntry(
        topic=m.Resource(name=topic), expression=m.FilterExpression(type=1, expression=tag)
    )
    return m.TelemetryCommand(
        settings=m.Settings(
            client_type=m.ClientType.PUSH_CONSUMER,
            user_agent=m.UA(language=m.Language.GOLANG, version="5.1.2"),
            subscription=m.Subscription(group=m.Resource(name=group), subscriptions=[wish]),
        )
    )


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(main, [*arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def conversation(name_server: str, proxy: str) -> None:
    said: queue.SimpleQueue[m.TelemetryCommand | None] = queue.SimpleQueue()
    with grpc.insecure_channel(proxy) as channel:
        telemetry = channel.stream_stream(
            PATH + "Telemetry",
            request_serializer=m.TelemetryCommand.SerializeToString,
            response_deserializer=m.TelemetryCommand.FromString,
        )
        said.put(subscribed("billing", "orders", "paid"))
        answers = telemetry(iter(said.get, None), metadata=METADATA)
        assert next(answers).HasField("settings")
        (client,) = run("proxy", "status", proxy, "--json")["clients"]
        assert (client["kind"], client["group"], client["has_stream"]) == (
            "PUSH_CONSUMER", "billing", True,
        )  # fmt: skip
        assert client["topics"] == {"orders": "paid"}
        text = run("proxy", "status", proxy)
        assert "2 connections, 1 clients, 0 waiting polls; the proxy is in its broker." in text
        options = ("group", "show", "billing", "-n", name_server, "--proxy", proxy)
        report = run(*options, "--json")
        (member,) = report["clients"]
        assert (member["client_id"], member["language"]) == ("one", "GO")
        assert show_version(member["version"]) == "5.1.2"
        (client,) = report["proxy_clients"]
        assert (client["proxy"], client["version"]) == (proxy, "5.1.2")
        text = run(*options)
        assert "GO" in text
        assert "5.1.2" in text
        assert f"Members of billing by {proxy}" in text
        assert "5.1.2" in run("consumer", "list", "billing", "-n", name_server)
        said.put(None)


async def test_members_that_come_by_grpc_are_shown() -> None:
    async with embedded(tcp=True, proxy=True) as mq:
        await mq.admin.create_topic("orders")
        addresses = mq.servers.name_server_address, mq.servers.proxy_address
        await asyncio.wait_for(asyncio.to_thread(conversation, *addresses), 30)


@pytest.mark.parametrize(
    ("number", "text"),
    [(479, "5.3.3"), (413, "5.0.0"), (412, "5.0.0-SNAPSHOT"), (399, "4.9.3"), (401, "4.9.4"),
     (232, "4.1.0-SNAPSHOT"), (121, "121")],
)  # fmt: skip
def test_versions_are_shown_as_people_know_them(number: int, text: str) -> None:
    assert show_version(number) == text
