"""The dates that gRPC calls sign: a recorded signature is of use for a bounded time."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf")

from proxied import Proxied, Speaker, proxied
from sluicemq.config.proxying import ProxyLimits
from sluicemq.net.grpc import StatusCode
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import ClientType, Code
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.signature import format_call_date, parse_call_date, sign_call

ACCOUNT = "operator", "12345678"
TOPIC = "DefaultCluster_REPLY_TOPIC"  # every broker has it
ROUTE = m.QueryRouteRequest(topic=m.Resource(name=TOPIC))
HOUR = 3600


def play(
    scene: Callable[[Proxied, Speaker], Awaitable[None]], folder: Path, limits: ProxyLimits
) -> None:
    rules = folder / "plain_acl.yml"
    rules.write_text("accounts:\n- {accessKey: operator, secretKey: '12345678', admin: true}\n")

    async def run() -> None:
        settings = {"aclEnable": "true", "plainAclFile": str(rules)}
        async with proxied(VirtualClock(), limits, store=folder / "store", **settings) as proxy:
            await scene(proxy, proxy.speaker())

    asyncio.run(run())


def signed(client: Speaker, date: str) -> None:
    client.headers.update(sign_call(*ACCOUNT, date))


@pytest.mark.parametrize(
    ("limit_s", "offset_s", "code"),
    [
        (54_000, 0, Code.OK),
        (54_000, 14 * HOUR, Code.OK),
        (54_000, -12 * HOUR, Code.OK),
        (54_000, 15 * HOUR + 1, Code.UNAUTHORIZED),
        (54_000, -15 * HOUR - 1, Code.UNAUTHORIZED),
        (300, -299, Code.OK),
        (300, -302, Code.UNAUTHORIZED),
        (0, -1000 * 24 * HOUR, Code.OK),
    ],
)
def test_a_signature_is_of_use_for_a_bounded_time(
    limit_s: int, offset_s: int, code: Code, tmp_path: Path
) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        signed(client, format_call_date(proxy.mq.clock.now_ms() + offset_s * 1000))
        answer = await client.ask("QueryRoute", ROUTE)
        assert answer.status.code == code
        if code != Code.OK:
            assert "sluiceGrpcDateSeconds" in answer.status.message
            assert f"the limit is {limit_s} s" in answer.status.message

    play(scene, tmp_path, ProxyLimits(date_s_max=limit_s))


def test_a_recorded_call_is_refused_later(tmp_path: Path) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        signed(client, format_call_date(proxy.mq.clock.now_ms()))
        assert (await client.ask("QueryRoute", ROUTE)).status.code == Code.OK
        await proxy.mq.clock.advance(seconds=301)
        thief = proxy.speaker("thief", **{name: client.headers[name] for name in client.headers})
        assert (await thief.ask("QueryRoute", ROUTE)).status.code == Code.UNAUTHORIZED

    play(scene, tmp_path, ProxyLimits(date_s_max=300))


@pytest.mark.parametrize("date", ["now", "", "20261323T000000Z", "2026-11-28T09:45:00", "9" * 500])
def test_what_is_no_date_is_refused(date: str, tmp_path: Path) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        signed(client, date)
        answer = await client.ask("QueryRoute", ROUTE)
        assert answer.status.code == Code.UNAUTHORIZED
        assert "is not a date: write it as 20261128T094500Z" in answer.status.message

    play(scene, tmp_path, ProxyLimits())


def test_a_telemetry_stream_outlives_the_date_of_its_beginning(tmp_path: Path) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        signed(client, format_call_date(proxy.mq.clock.now_ms()))
        topics = m.Publishing(topics=[ROUTE.topic])
        said = m.TelemetryCommand(
            settings=m.Settings(client_type=ClientType.PRODUCER, publishing=topics)
        )
        stream = client.call("Telemetry", said, None)
        for minutes in range(1, 8):
            await proxy.mq.clock.advance(seconds=60)
            stream.age_s = minutes * 60
            client.say(stream, said)
            await asyncio.sleep(0)
            assert not stream.is_closed, stream.ended
        another = client.call("Telemetry", said, None)
        code, text = await another.ended
        assert (code, "sluiceGrpcDateSeconds" in text) == (StatusCode.UNAUTHENTICATED, True)

    play(scene, tmp_path, ProxyLimits(date_s_max=300))


def test_dates_are_read_as_the_official_clients_write_them() -> None:
    ms = 1_795_858_000_000
    assert parse_call_date(format_call_date(ms)) == ms
    assert format_call_date(ms) == "20261128T092640Z"
    for text in (
        "2026-11-28T09:26:40Z", "2026-11-28T17:26:40.000000123+08:00", "2026-11-28T09:26:40+00:00"
    ):  # fmt: skip
        assert parse_call_date(text) == ms
