"""The proxy before a cluster: what it asks for itself, and clients with their own connections."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from proxied import Proxied, proxied_cluster
from sluicemq.broker.lanes.rules import subscription_key
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.names import Credentials
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import ProxyConfig
from sluicemq.errors import ConnectionLostError, NameServerUnreachableError, PermissionDeniedError
from sluicemq.model.ids import Host
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import GroupConfig, TopicRoute
from sluicemq.net.grpc import call_unary
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import ClientSession, ConversationRunner, OnRequest
from sluicemq.proxy.cluster import (
    FRESHNESS_S,
    MISSING_ROUTE_GRACE_S,
    ClusterBackend,
    SubscriptionConflicts,
    serve_cluster_proxy,
)
from sluicemq.proxy.messages import Code, MessageType
from sluicemq.proxy.service import PATH
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.bodies import ConsumerData, Heartbeat
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command
from sluicemq.wire.signature import format_call_date, sign_call
from waiting import until

HOME = Host("127.0.0.1", 1)
ROUTE = m.QueryRouteRequest(topic=m.Resource(name="orders"))


def link_of(
    proxy: Proxied, on_request: OnRequest = lambda _command, _answer: None
) -> ClientSession:
    return proxy.backend.open_session(HOME, HOME, on_request)


async def asked(
    link: ClientSession, address: str, command: Command, timeout_s: float = 5.0
) -> Command:
    """The answer that a client of the proxy gets. Raises what it is told."""
    future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()

    def answered(answer: Command | Exception) -> None:
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    link.send(Call(address, command, timeout_s), answered)
    return await future


async def told(talk: Conversation[Any]) -> Any:
    """The result of a talk that asks as the proxy itself."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ConversationRunner(talk, lambda call, answered: pytest.fail(str(call)), future.set_result)
    result = await future
    if isinstance(result, Exception):
        raise result
    return result


def beat(client_id: str, group: str, expression: str = "*") -> Heartbeat:
    subscription = Subscription("orders", expression)
    return Heartbeat(client_id, consumers=(ConsumerData(group, subscriptions=(subscription,)),))


# ---- routes and settings


def test_a_route_has_the_queues_of_all_brokers() -> None:
    async def scene() -> None:
        async with proxied_cluster() as [proxy]:
            await proxy.mq.admin.create_topic("orders", queues=2)
            answer = await proxy.speaker().ask("QueryRoute", ROUTE)
            found = [(it.broker.name, it.id) for it in answer.message_queues]
            assert sorted(found) == [(f"broker-{name}", n) for name in "ab" for n in (0, 1)]

    asyncio.run(scene())


def test_clients_that_ask_at_once_cost_one_question_to_the_name_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        async with proxied_cluster() as [proxy]:
            await proxy.mq.admin.create_topic("orders", queues=1)
            backend, asked = proxy.backend, list[str]()
            assert isinstance(backend, ClusterBackend)
            find = backend.directory.fetch_route

            def find_route(topic: str) -> Conversation[TopicRoute | None]:
                asked.append(topic)
                return find(topic)

            monkeypatch.setattr(backend.directory, "fetch_route", find_route)
            speakers = [proxy.speaker(f"c{n}") for n in range(20)]
            answers = await asyncio.gather(*(it.ask("QueryRoute", ROUTE) for it in speakers))
            assert {it.status.code for it in answers} == {Code.OK}
            assert asked == ["orders"]

    asyncio.run(scene())


def test_a_setting_that_changed_counts_after_some_seconds() -> None:
    async def types(proxy: Proxied) -> list[MessageType]:
        answer = await proxy.speaker().ask("QueryRoute", ROUTE)
        return list(answer.message_queues[0].accept_message_types)

    async def scene() -> None:
        clock = VirtualClock()
        async with proxied_cluster(clock) as [proxy]:
            await proxy.mq.admin.create_topic("orders", queues=1)
            assert await types(proxy) == [MessageType.NORMAL]
            await proxy.mq.admin.create_topic("orders", queues=1, type="fifo")
            assert await types(proxy) == [MessageType.NORMAL]
            await clock.advance(FRESHNESS_S)
            assert await types(proxy) == [MessageType.FIFO]

    asyncio.run(scene())


def test_a_group_is_found_at_whichever_broker_has_it() -> None:
    async def scene() -> None:
        async with proxied_cluster(autoCreateSubscriptionGroup="false") as [proxy]:
            assert await told(proxy.backend.fetch_group_config("g")) is None
            command = requests.update_group(GroupConfig("h", consume_message_orderly=True))
            broker = proxy.mq.servers.brokers["broker-b"].address
            assert (await asked(link_of(proxy), broker, command)).code == 0
            config = await told(proxy.backend.fetch_group_config("h"))
            assert config.consume_message_orderly

    asyncio.run(scene())


def test_a_topic_whose_brokers_are_away_stands_for_a_minute() -> None:
    async def scene() -> None:
        clock = VirtualClock()
        async with proxied_cluster(clock) as [proxy]:
            await proxy.mq.admin.create_topic("orders", queues=1)
            speaker, codes = proxy.speaker(), []
            for away_s in (0, FRESHNESS_S, MISSING_ROUTE_GRACE_S):
                await clock.advance(away_s)
                codes.append((await speaker.ask("QueryRoute", ROUTE)).status.code)
                for name in list(proxy.mq.servers.brokers):
                    await proxy.mq.servers.stop_broker(name)
            assert codes == [Code.OK, Code.OK, Code.TOPIC_NOT_FOUND]

    asyncio.run(scene())


def test_without_a_name_server_what_is_known_stands() -> None:
    async def scene() -> None:
        clock = VirtualClock()
        async with proxied_cluster(clock) as [proxy]:
            await proxy.mq.admin.create_topic("orders", queues=1)
            assert await told(proxy.backend.fetch_topic_config("orders"))
            await proxy.mq.servers.stop_name_server()
            await clock.advance(10 * MISSING_ROUTE_GRACE_S)
            route = await told(proxy.backend.fetch_route("orders"))
            assert [data.broker for data in route.brokers] == ["broker-a", "broker-b"]
            assert await told(proxy.backend.fetch_topic_config("orders"))
            with pytest.raises(NameServerUnreachableError):
                await told(proxy.backend.fetch_route("others"))
            await proxy.mq.servers.start_name_server()

    asyncio.run(scene())


# ---- links


def test_what_a_broker_keeps_by_connection_is_the_clients() -> None:
    """Two clients in one group: the first is told that the second came, and that it went."""

    async def scene() -> None:
        async with proxied_cluster() as [proxy]:
            broker = proxy.mq.servers.broker
            heard: list[int] = []
            one = link_of(proxy, lambda command, _answer: heard.append(command.code))
            two = link_of(proxy)
            for name, link in (("one", one), ("two", two)):
                answer = await asked(link, broker.address, requests.heartbeat(beat(name, "g")))
                assert answer.code == 0
            group = broker.core.consumers.groups["g"]
            assert sorted(it.client_id for it in group.members.values()) == ["one", "two"]
            before = len(heard)
            two.close()
            await until(lambda: len(group.members) == 1)
            await until(lambda: len(heard) > before)
            assert set(heard) == {RequestCode.NOTIFY_CONSUMER_IDS_CHANGED}
            assert [it.client_id for it in group.members.values()] == ["one"]
            with pytest.raises(ConnectionLostError):
                await asked(two, broker.address, requests.runtime_info())

    asyncio.run(scene())


def test_a_link_that_is_closed_ends_what_waits() -> None:
    async def scene() -> None:
        async with proxied_cluster() as [proxy]:
            link = link_of(proxy)
            address = proxy.mq.servers.broker.address
            waits = asyncio.ensure_future(asked(link, address, requests.runtime_info()))
            await asyncio.sleep(0)
            link.close()
            with pytest.raises(ConnectionLostError):
                await waits

    asyncio.run(scene())


def test_a_broker_that_is_gone_is_a_lost_connection() -> None:
    async def scene() -> None:
        async with proxied_cluster() as [proxy]:
            link, broker = link_of(proxy), proxy.mq.servers.brokers["broker-b"]
            assert (await asked(link, broker.address, requests.runtime_info())).code == 0
            await proxy.mq.servers.stop_broker("broker-b")
            with pytest.raises(ConnectionLostError):
                await asked(link, broker.address, requests.runtime_info())

    asyncio.run(scene())


def test_what_the_proxy_asks_is_signed_with_its_own_account(tmp_path: Path) -> None:
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(
        "accounts:\n- accessKey: proxyAccount\n  secretKey: proxySecret\n  admin: true\n"
    )
    account = Credentials("proxyAccount", "proxySecret")
    settings = {"aclEnable": "true", "plainAclFile": str(rules)}

    async def scene() -> None:
        async with proxied_cluster(credentials=account, store=tmp_path, **settings) as [proxy]:
            await proxy.mq.admin.create_topic("orders", queues=1)
            assert (await proxy.speaker().ask("QueryRoute", ROUTE)).status.code == Code.OK
            proxy.backend.credentials = None  # type: ignore[attr-defined]
            with pytest.raises(PermissionDeniedError):
                await told(proxy.backend.fetch_group_config("g"))

    asyncio.run(scene())


# ---- groups whose members disagree


def key_of(expression: str) -> str:
    return subscription_key("g", [Subscription("orders", expression)])


def test_members_that_want_different_things_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, one, two = SubscriptionConflicts(), object(), object()
    hear: Any = found.record
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            hear("g", one, "one", key_of("a || b"))
            hear("g", two, "two", key_of("b||a"))
        assert not found.warnings
        for _ in range(3):
            hear("g", two, "two", key_of("c"))
    assert len(caplog.records) == 1
    assert "one and two of the group g" in found.warnings["g"]
    gone: Any = found.remove_session
    gone(two)
    assert not found.warnings


def test_a_member_that_came_in_elsewhere_is_known_by_what_the_broker_heard() -> None:
    found, one = SubscriptionConflicts(), object()
    hear: Any = found.record
    assert found.start_check_if_due("g", 100.0)
    assert not found.start_check_if_due("g", 110.0)
    hear("g", one, "one", key_of("a"))
    hear("g", "b:10911", "a member at b:10911", key_of("b"))
    assert "one and a member at b:10911 of the group g" in found.warnings["g"]
    hear("g", "b:10911", "a member at b:10911", key_of("a"))
    assert not found.warnings
    hear("g", "b:10911", "a member at b:10911", key_of("b"))
    gone: Any = found.remove_session
    gone(one)
    assert not found.warnings
    hear("g", "b:10911", "a member at b:10911", key_of("b"))
    assert found.start_check_if_due("g", 110.0), "nothing is left of the group"


def test_a_broker_of_ours_looks_itself() -> None:
    async def scene() -> None:
        async with proxied_cluster() as [proxy]:
            address = proxy.mq.servers.broker.address
            for name, expression in (("one", "a"), ("two", "b")):
                command = requests.heartbeat(beat(name, "g", expression))
                assert (await asked(link_of(proxy), address, command)).code == 0
            assert proxy.proxy.collect_status()["warnings"] == []
            backend: Any = proxy.backend
            for name, link in (("a", object()), ("b", object())):
                backend.subscription_conflicts.record("h", link, name, key_of(name))
            (warning,) = proxy.proxy.collect_status()["warnings"]
            assert "a and b of the group h" in warning

    asyncio.run(scene())


# ---- clients as members


def test_brokers_know_a_client_and_ask_it() -> None:
    async def scene() -> None:
        clock = VirtualClock()
        async with proxied_cluster(clock) as [proxy]:
            mq, client = proxy.mq, proxy.speaker("c")
            await mq.admin.create_topic("orders", queues=1, type="transaction")
            settings = m.Settings(publishing=m.Publishing(topics=[m.Resource(name="orders")]))
            said = m.TelemetryCommand(settings=settings)
            stream = client.call("Telemetry", said, None)
            await until(lambda: len(stream.answers) == 1)
            producers = [it.core.producers.groups for it in mq.servers.brokers.values()]
            assert [list(groups) for groups in producers] == [["orders"], ["orders"]]
            half = m.SystemProperties(message_id="01AB", message_type=MessageType.TRANSACTION)
            message = m.Message(topic=settings.publishing.topics[0], body=b"1")
            message.system_properties.CopyFrom(half)
            await client.ask("SendMessage", m.SendMessageRequest(messages=[message]))
            await clock.advance(seconds=70)
            command = stream.answers[1].recover_orphaned_transaction_command
            answer = await client.ask(
                "EndTransaction",
                m.EndTransactionRequest(
                    topic=message.topic, message_id="01AB",
                    transaction_id=command.transaction_id, resolution=1, source=2,
                ),
            )  # fmt: skip
            assert answer.status.code == Code.OK
            transactions = [it.core.transactions for it in mq.servers.brokers.values()]
            await until(lambda: [it.committed for it in transactions].count({"orders": 1}) == 1)
            await client.ask("NotifyClientTermination", m.NotifyClientTerminationRequest())
            assert producers == [{}, {}]

    asyncio.run(scene())


# ---- alone

RULES = """accounts:
- accessKey: sender-key
  secretKey: sender-secret
  topicPerms: [orders=PUB]
- accessKey: reader-key
  secretKey: reader-secret
  topicPerms: [orders=SUB]
"""


def test_a_proxy_that_stands_alone_has_rules_of_its_own(tmp_path: Path) -> None:
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(RULES)
    config = ProxyConfig(
        bind_address="127.0.0.1", listen_port=0, acl_enable=True, acl_files=(str(rules),),
        metrics_enable=False,
    )  # fmt: skip
    properties = m.SystemProperties(message_id="id")
    message = m.Message(topic=ROUTE.topic, body=b"1", system_properties=properties)
    request = m.SendMessageRequest(messages=[message]).SerializeToString()

    async def scene() -> None:
        async with (
            embedded(tcp=True) as mq,
            serve_cluster_proxy(config, mq.servers.name_server_address, None) as proxy,
        ):
            await mq.admin.create_topic("orders", queues=1)

            async def send(*account: str) -> int:
                metadata = [("x-mq-client-id", f"client of {account}")]
                metadata += (
                    sign_call(*account, format_call_date(SYSTEM_CLOCK.now_ms())) if account else []
                )
                address = f"127.0.0.1:{proxy.port}"
                answer = await asyncio.to_thread(
                    call_unary, address, PATH + "SendMessage", request, metadata
                )
                return m.SendMessageResponse.FromString(answer).status.code

            assert await send() == Code.UNAUTHORIZED
            assert await send("sender-key", "wrong") == Code.UNAUTHORIZED
            assert await send("reader-key", "reader-secret") == Code.FORBIDDEN
            assert await send("sender-key", "sender-secret") == Code.OK
            rules.write_text(RULES.replace("=SUB", "=PUB"))
            codes = []
            while Code.OK not in codes:
                codes.append(await send("reader-key", "reader-secret"))
                await asyncio.sleep(0.1)

    asyncio.run(scene())
