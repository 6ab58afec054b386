"""The proxy at a port: a real client of gRPC, plain and over TLS; its clock; its end."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError, ConnectionLostError, RequestTimeoutError
from sluicemq.net import accept
from sluicemq.net.grpc import Call, CallError, StatusCode, call_unary
from sluicemq.net.limits import REFUSALS_MAX
from sluicemq.proxy import STATUS_METHOD, server
from sluicemq.proxy import messages as m
from sluicemq.proxy.clients import CLIENT_ID
from sluicemq.proxy.messages import Code
from sluicemq.proxy.service import PATH
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire.signature import format_call_date, sign_call
from waiting import limit

grpc: Any = pytest.importorskip("grpc")
TOPIC = "DefaultCluster_REPLY_TOPIC"  # every broker has it
HOLD = PATH + "Hold"
RECEIVE = PATH + "ReceiveMessage"


def at_a_port(scene: Callable[[EmbeddedSluice], Any], **options: Any) -> None:
    """Over real sockets."""

    async def main() -> None:
        async with embedded(tcp=True, proxy=True, **options) as mq:
            await asyncio.wait_for(scene(mq), limit(20))

    asyncio.run(main())


def route(channel: Any, topic: str = TOPIC, *metadata: tuple[str, str]) -> m.QueryRouteResponse:
    method = channel.unary_unary(
        PATH + "QueryRoute",
        request_serializer=m.QueryRouteRequest.SerializeToString,
        response_deserializer=m.QueryRouteResponse.FromString,
    )
    request = m.QueryRouteRequest(topic=m.Resource(name=topic))
    answer: m.QueryRouteResponse = method(
        request, metadata=[(CLIENT_ID, "me"), *metadata], timeout=limit(10)
    )
    return answer


def test_one_port_serves_plain_clients_and_those_that_come_with_tls() -> None:
    def plain(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            answer = route(channel)
            assert answer.status.code == Code.OK
            endpoint = answer.message_queues[0].broker.endpoints.addresses[0]
            assert f"{endpoint.host}:{endpoint.port}" == address
            assert route(channel, "none").status.code == Code.TOPIC_NOT_FOUND

    def secure(address: str) -> None:
        host, _, port = address.partition(":")
        pem = ssl.get_server_certificate((host, int(port))).encode()
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(pem)) as channel:
            assert route(channel).status.code == Code.OK

    async def scene(mq: EmbeddedSluice) -> None:
        for talk in (plain, secure):
            await asyncio.to_thread(talk, mq.servers.proxy_address)

    at_a_port(scene)


def test_a_client_is_gone_with_its_connection() -> None:
    async def scene(mq: EmbeddedSluice) -> None:
        proxy = mq.servers.proxies["broker-a"]
        channel = grpc.insecure_channel(mq.servers.proxy_address)
        await asyncio.to_thread(route, channel)
        assert list(proxy.clients.by_id) == ["me"]
        await asyncio.to_thread(channel.close)
        while proxy.clients.by_id:
            await asyncio.sleep(0.01)

    at_a_port(scene)


def test_access_control_of_the_broker_is_the_proxys(tmp_path: Any) -> None:
    rules = tmp_path / "plain_acl.yml"
    rules.write_text("accounts:\n- {accessKey: operator, secretKey: '12345678', admin: true}\n")

    async def scene(mq: EmbeddedSluice) -> None:
        with grpc.insecure_channel(mq.servers.proxy_address) as channel:
            answer = await asyncio.to_thread(route, channel)
            assert answer.status.code == Code.UNAUTHORIZED

    settings = {"aclEnable": "true", "plainAclFile": str(rules)}
    at_a_port(scene, settings=settings, store=tmp_path / "store")


# ------------------------------------------------------------------------------ what it tells


def sign(access_key: str, secret_key: str) -> tuple[tuple[str, str], ...]:
    return sign_call(access_key, secret_key, format_call_date(SYSTEM_CLOCK.now_ms()))


def samples(proxy: server.Proxy) -> dict[tuple[str, ...], float]:
    """By name and the labels that are not the proxy's own."""
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    registry.register(server.ProxyCollector(proxy))
    own = {"cluster", "node_type", "node_id", "proxy_mode"}
    return {
        (sample.name, *(it for name, it in sorted(sample.labels.items()) if name not in own)):
        sample.value
        for family in registry.collect()
        for sample in family.samples
    }  # fmt: skip


def test_calls_and_clients_are_counted() -> None:
    async def scene(mq: EmbeddedSluice) -> None:
        proxy, holding = mq.servers.proxies["broker-a"], Family()
        proxy.methods |= {RECEIVE: holding.hold}
        with grpc.insecure_channel(mq.servers.proxy_address) as channel:
            for topic in (TOPIC, TOPIC, "none"):
                await asyncio.to_thread(route, channel, topic)
            waiting = channel.unary_stream(RECEIVE)(b"", metadata=[(CLIENT_ID, "me")])
            while not holding.held:
                await asyncio.sleep(0.01)
            found = samples(proxy)
            assert found["rocketmq_proxy_up",] == 1
            assert found["rocketmq_proxy_connections",] == 1
            assert found["rocketmq_proxy_undecodable_bodies_total",] >= 0
            assert found["rocketmq_proxy_clients", "OTHER", ""] == 1
            assert found["rocketmq_proxy_calls_total", "OK", "QueryRoute"] == 2
            assert found["rocketmq_proxy_calls_total", "TOPIC_NOT_FOUND", "QueryRoute"] == 1
            assert found["rocketmq_proxy_calls_in_flight", "QueryRoute"] == 0
            assert found["rocketmq_proxy_rpc_latency_bucket", "+Inf", "QueryRoute"] == 3
            assert 0 < found["rocketmq_proxy_rpc_latency_sum", "QueryRoute"] < 20_000
            status = proxy.collect_status()
            (client,) = status["clients"]
            assert (client["client_id"], client["in_flight"], client["polls"]) == ("me", 1, 1)
            (method,) = status["methods"]
            assert method["codes"] == {"OK": 2, "TOPIC_NOT_FOUND": 1}
            waiting.cancel()
        await proxy.close()
        assert samples(proxy)["rocketmq_proxy_up",] == 0

    at_a_port(scene)


def test_its_status_is_for_administrators(tmp_path: Any) -> None:
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(
        "accounts:\n- {accessKey: operator, secretKey: '12345678', admin: true}\n"
        "- {accessKey: somebody, secretKey: '12345678'}\n"
    )

    def conversation(address: str) -> None:
        def refusal(*metadata: tuple[str, str]) -> StatusCode:
            with pytest.raises(CallError) as caught:
                call_unary(address, STATUS_METHOD, b"", metadata)
            return caught.value.code

        assert b'"clients":[]' in call_unary(
            address, STATUS_METHOD, b"", sign("operator", "12345678")
        )
        assert refusal() == StatusCode.UNAUTHENTICATED
        assert refusal(*sign("operator", "12345679")) == StatusCode.UNAUTHENTICATED
        assert refusal(*sign("somebody", "12345678")) == StatusCode.PERMISSION_DENIED

    async def scene(mq: EmbeddedSluice) -> None:
        await asyncio.to_thread(conversation, mq.servers.proxy_address)

    settings = {"aclEnable": "true", "plainAclFile": str(rules)}
    at_a_port(scene, settings=settings, store=tmp_path / "store")


def test_who_signs_wrongly_again_and_again_is_closed_and_who_signs_well_is_trusted(
    tmp_path: Any,
) -> None:
    rules = tmp_path / "plain_acl.yml"
    rules.write_text("accounts:\n- {accessKey: somebody, secretKey: '12345678'}\n")

    async def scene(mq: EmbeddedSluice) -> None:
        proxy = mq.servers.proxies["broker-a"]
        with grpc.insecure_channel(mq.servers.proxy_address) as channel:
            answer = await asyncio.to_thread(route, channel, TOPIC, *sign("somebody", ""))
            assert answer.status.code == Code.UNAUTHORIZED
            (peer,) = proxy.peers
            assert not peer.is_trusted
            for _ in range(REFUSALS_MAX - 1):
                await asyncio.to_thread(route, channel)
            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(route, channel)
            assert peer.closed
        with grpc.insecure_channel(mq.servers.proxy_address) as channel:
            signed = sign("somebody", "12345678")
            await asyncio.to_thread(route, channel, TOPIC, *signed)
            assert any(peer.is_trusted for peer in proxy.peers)

    settings = {"aclEnable": "true", "plainAclFile": str(rules)}
    at_a_port(scene, settings=settings, store=tmp_path / "store")


def test_a_stranger_is_told_what_opens_a_proxy_that_nobody_has_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accept, "is_on_this_machine", lambda peer: False)

    async def scene(mq: EmbeddedSluice) -> None:
        core = mq.servers.broker.core
        backend = mq.servers.proxies["broker-a"].backend
        proxy = server.Proxy(backend, None, core.scheduler, BrokerConfig())
        await proxy.start("127.0.0.1", 0)
        with pytest.raises(CallError, match="protected mode") as caught:
            await asyncio.to_thread(call_unary, f"127.0.0.1:{proxy.port}", STATUS_METHOD, b"")
        assert caught.value.code == StatusCode.PERMISSION_DENIED
        await proxy.close()

    at_a_port(scene)


def test_who_is_no_proxy_is_told_from_one_that_does_not_answer() -> None:
    async def scene(mq: EmbeddedSluice) -> None:
        with pytest.raises(CallError, match="is not implemented"):
            await asyncio.to_thread(call_unary, mq.servers.proxy_address, PATH + "None", b"")
        with pytest.raises(ConnectionLostError):
            await asyncio.to_thread(call_unary, mq.servers.name_server_address, STATUS_METHOD, b"")
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            with pytest.raises(RequestTimeoutError):
                await asyncio.to_thread(call_unary, address, STATUS_METHOD, b"", timeout_s=0.05)

    at_a_port(scene)


# --------------------------------------------------------------------------------------- its end


class Family:
    """Holds calls until it is drained."""

    def __init__(self) -> None:
        self.held: list[Call] = []
        self.rounds = 0

    def run(self) -> None:
        self.rounds += 1

    def drain(self) -> None:
        for call in self.held:
            call.reply(b"nothing came")

    def hold(self, _message: bytes, call: Call) -> None:
        self.held.append(call)


class Broken(Family):
    def run(self) -> None:
        raise ZeroDivisionError("a bug")

    def drain(self) -> None:
        raise ConfigurationError("It is set wrong.")


def test_a_server_that_closes_answers_who_waits_and_breaks_nothing_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def scene(mq: EmbeddedSluice) -> None:
        proxy = mq.servers.proxies["broker-a"]
        family, late = Family(), Family()
        proxy.services += [Broken(), family]
        proxy.methods |= {HOLD: family.hold, PATH + "Late": late.hold}
        with grpc.insecure_channel(mq.servers.proxy_address) as channel:
            waiting = [channel.unary_unary(name).future(b"") for name in (HOLD, PATH + "Late")]
            while not (family.held and late.held):
                await asyncio.sleep(0.01)
            proxy.run()
            assert family.rounds >= 1  # whatever another does
            closing = asyncio.create_task(proxy.close())
            assert await asyncio.to_thread(waiting[0].result, 10) == b"nothing came"
            assert not closing.done()  # an answer is on its way
            late.held[0].reply(b"done")
            assert await asyncio.to_thread(waiting[1].result, 10) == b"done"
            await closing
            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(channel.unary_unary(HOLD), b"", 1)
        await proxy.close()  # a second time there is nothing to do

    at_a_port(scene)
    assert "'run of Broken' failed; it is retried after a pause: ZeroDivisionError" in caplog.text
    assert "'drain of Broken' failed; it is retried after a pause: It is set wrong." in caplog.text


def test_who_never_answers_does_not_keep_the_server() -> None:
    async def scene(mq: EmbeddedSluice) -> None:
        proxy, silent = mq.servers.proxies["broker-a"], Family()
        proxy.methods[HOLD] = silent.hold
        with grpc.insecure_channel(mq.servers.proxy_address) as channel:
            waiting = channel.unary_unary(HOLD).future(b"")
            while not silent.held:
                await asyncio.sleep(0.01)
            proxy._drain_s = 0.05
            await proxy.close()
            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(waiting.result, 10)

    at_a_port(scene)


def test_it_runs_its_families_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TICK_S", 0.01)

    async def scene(mq: EmbeddedSluice) -> None:
        family = Family()
        mq.servers.proxies["broker-a"].services.append(family)
        while family.rounds < 3:
            await asyncio.sleep(0.01)

    at_a_port(scene)


# ----------------------------------------------------------------------------- beside a broker


def test_a_proxy_comes_back_with_its_broker_at_its_port() -> None:
    async def scene(mq: EmbeddedSluice) -> None:
        address = mq.servers.proxy_address
        await mq.servers.restart_broker()
        assert mq.servers.proxy_address == address
        with grpc.insecure_channel(address) as channel:
            assert (await asyncio.to_thread(route, channel)).status.code == Code.OK

    at_a_port(scene)


def test_in_memory_there_is_no_proxy() -> None:
    async def scene() -> None:
        with pytest.raises(ConfigurationError, match="only over TCP"):
            async with embedded(proxy=True):
                pass

    asyncio.run(scene())
