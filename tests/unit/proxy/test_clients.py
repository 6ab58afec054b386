"""Who is connected: identity, limits, streams, and what tools are shown."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("google.protobuf")

from proxied import Proxied, proxied
from sluicemq.net.grpc import StatusCode
from sluicemq.proxy import clients as module
from sluicemq.proxy import messages as m
from sluicemq.proxy.limits import StatusError
from sluicemq.proxy.messages import ClientType, Code
from sluicemq.wire.frames import VERSION

ROUTE = m.QueryRouteRequest(topic=m.Resource(name="none"))


def settings(group: str) -> m.TelemetryCommand:
    entry = m.SubscriptionEntry(
        topic=m.Resource(name="orders"), expression=m.FilterExpression(type=1, expression="a")
    )
    return m.TelemetryCommand(
        settings=m.Settings(
            client_type=ClientType.SIMPLE_CONSUMER,
            subscription=m.Subscription(group=m.Resource(name=group), subscriptions=[entry]),
        )
    )


def run(scene: Callable[[Proxied], Awaitable[None]]) -> None:
    async def play() -> None:
        async with proxied() as proxy:
            await scene(proxy)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("language", "version", "shown", "number"),
    [("GO", "5.1.4", "GO", 441), ("HTTP", "5.0.0", "HTTP", 413), ("JAVA", "v5.3.3", "JAVA", 479),
     ("KOTLIN", "", "OTHER", VERSION), ("", "6.0", "OTHER", VERSION)],
)  # fmt: skip
def test_a_client_has_a_language_and_a_version(
    language: str, version: str, shown: str, number: int
) -> None:
    async def scene(proxy: Proxied) -> None:
        headers = {"x-mq-language": language, "x-mq-client-version": version}
        await proxy.speaker("c", **headers).ask("QueryRoute", ROUTE)
        client = proxy.dispatcher.clients.by_id["c"]
        assert (client.wire_language, client.wire_version) == (shown, number)

    run(scene)


def test_clients_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(proxy: Proxied) -> None:
        monkeypatch.setattr(module, "CLIENTS_MAX", 3)
        monkeypatch.setattr(module, "CLIENTS_PER_CONNECTION_MAX", 2)
        first, second = proxy.speaker("a"), proxy.speaker("c")
        for client_id in ("a", "b", "d"):
            first.headers["x-mq-client-id"] = client_id
            answer = await first.ask("QueryRoute", ROUTE)
        assert answer.status.code == Code.TOO_MANY_REQUESTS
        await second.ask("QueryRoute", ROUTE)
        assert sorted(proxy.dispatcher.clients.by_id) == ["a", "b", "c"]
        answer = await proxy.speaker("e").ask("QueryRoute", ROUTE)
        assert answer.status.code == Code.TOO_MANY_REQUESTS
        first.close()
        assert list(proxy.dispatcher.clients.by_id) == ["c"]

    run(scene)


def test_a_client_is_its_accounts_who_may_change_its_key() -> None:
    async def scene(proxy: Proxied) -> None:
        clients = proxy.dispatcher.clients
        first, second = (proxy.speaker("c").call("QueryRoute", ROUTE) for _ in range(2))
        clients.remove(clients.by_id["c"])
        client = clients.identify(first, "alice")  # type: ignore[arg-type]
        with pytest.raises(StatusError, match="used by another account") as caught:
            clients.identify(second, "mallory")  # type: ignore[arg-type]
        assert caught.value.code == Code.FORBIDDEN
        clients.identify(first, "alice-2")  # type: ignore[arg-type]
        assert clients.identify(second, "alice-2") is client  # type: ignore[arg-type]

    run(scene)


def test_an_id_has_a_length() -> None:
    async def scene(proxy: Proxied) -> None:
        answer = await proxy.speaker("x" * 256).ask("QueryRoute", ROUTE)
        assert answer.status.code == Code.CLIENT_ID_REQUIRED

    run(scene)


def test_the_stream_that_spoke_last_counts_and_the_oldest_ends() -> None:
    async def scene(proxy: Proxied) -> None:
        speaker = proxy.speaker("c")
        streams = [speaker.call("Telemetry", settings("g"), None) for _ in range(5)]
        client = proxy.dispatcher.clients.by_id["c"]
        assert (await streams[0].ended)[0] == StatusCode.RESOURCE_EXHAUSTED
        assert client.command_stream is streams[4]
        speaker.say(streams[2], settings("g"))
        assert client.command_stream is streams[2]
        streams[2].lose()
        assert client.command_stream is streams[4]

    run(scene)


def test_the_inventory_says_who_is_there() -> None:
    async def scene(proxy: Proxied) -> None:
        await proxy.mq.admin.create_topic("orders", queues=1)
        speaker = proxy.speaker("c", **{"x-mq-client-version": "5.0.8"})
        await proxy.speaker("b").ask("QueryRoute", ROUTE)
        speaker.call("Telemetry", settings("g"), None)
        await speaker.ask("Heartbeat", m.HeartbeatRequest())
        silent, told = proxy.dispatcher.clients.list_clients()
        assert (silent.client_id, silent.kind, silent.group, silent.topics) == ("b", "", "", {})
        assert (told.client_id, told.kind) == ("c", "SIMPLE_CONSUMER")
        assert (told.language, told.version) == ("JAVA", "5.0.8")
        assert (told.group, told.topics) == ("g", {"orders": "a"})
        assert told.addresses == (str(speaker.peer.remote),)
        assert told.has_stream
        assert told.since_ms <= proxy.backend.clock.now_ms()

    run(scene)


def test_clients_are_told_to_go_elsewhere_before_their_streams_end() -> None:
    async def scene(proxy: Proxied) -> None:
        speaker = proxy.speaker("c")
        stream = speaker.call("Telemetry", settings("g"), None)
        await speaker.ask("Heartbeat", m.HeartbeatRequest())
        clients = proxy.dispatcher.clients
        clients.reconnect_all()
        assert stream.answers[-1].WhichOneof("command") == "reconnect_endpoints_command"
        clients.drain()
        assert (await stream.ended)[0] == StatusCode.UNAVAILABLE

    run(scene)
