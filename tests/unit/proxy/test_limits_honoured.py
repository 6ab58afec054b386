"""Every limit of rmq-proxy.json has its effect: another value than the default, another answer."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from consuming import GROUP, TOPIC, handles_of, outcome, receive, receive_request
from proxied import Proxied, Speaker, proxied
from sluicemq.config import load_proxy_config
from sluicemq.config.inert import INERT
from sluicemq.config.proxying import BODY_BYTES_LARGEST, ProxyLimits
from sluicemq.errors import RequestTimeoutError
from sluicemq.model.topic import GroupConfig
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import ClientType, Code, MessageType
from sluicemq.proxy.receiving import Receiving
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.popping import ReceiptHandle

pytestmark = pytest.mark.slow

Scene = Callable[[Proxied, Speaker], Awaitable[Any]]


def observed(scene: Scene, limits: ProxyLimits) -> Any:
    """What a scene observes of a proxy with these limits, on virtual time."""

    async def play() -> Any:
        async with proxied(VirtualClock(), limits) as proxy:
            await proxy.mq.admin.create_topic(TOPIC, queues=2)
            for name, kind in (("later", "delay"), ("paid", "transaction"), ("ordered", "fifo")):
                await proxy.mq.admin.create_topic(name, queues=1, type=kind)
            await proxy.mq.admin.create_group(GroupConfig(GROUP))
            return await scene(proxy, proxy.speaker())

    return asyncio.run(play())


# ------------------------------------------------------------------------------------- what is seen


def sends(topic: str = TOPIC, body: bytes = b"b", **system: Any) -> Scene:
    user = system.pop("user", {})

    async def scene(proxy: Proxied, client: Speaker) -> str:
        in_s = system.pop("in_s", None)
        if in_s is not None:
            now_s = proxy.mq.clock.now_ms() // 1000
            system["delivery_timestamp"] = m.Timestamp(seconds=now_s + in_s)
        message = m.Message(
            topic=m.Resource(name=topic), body=body, user_properties=user,
            system_properties=m.SystemProperties(message_id="01AB", **system),
        )  # fmt: skip
        answer = await client.ask("SendMessage", m.SendMessageRequest(messages=[message]))
        return Code(answer.status.code).name

    return scene


def receives(seconds: int, timeout_s: float | None = None) -> Scene:
    async def scene(proxy: Proxied, client: Speaker) -> str:
        await proxy.mq.send(TOPIC, b"1")
        request = receive_request(invisible_duration=m.Duration(seconds=seconds))
        answers = await client.ask("ReceiveMessage", request, timeout_s)
        return Code(answers[0].status.code).name

    return scene


def waits(asked_s: int) -> Scene:
    """For how long a receive waits that asks for `asked_s`."""

    async def scene(proxy: Proxied, client: Speaker) -> int:
        request = receive_request(long_polling_timeout=m.Duration(seconds=asked_s))
        call = client.call("ReceiveMessage", request, None)
        for second in range(120):
            await proxy.mq.clock.advance(seconds=1)
            if call.is_closed:
                return second
        raise RequestTimeoutError("The receive does not end.")

    return scene


def told(pick: Callable[[m.Settings], Any], *, consumes: bool = False) -> Scene:
    """What a client is told at its start."""

    async def scene(proxy: Proxied, client: Speaker) -> Any:
        topic = m.Resource(name=TOPIC)
        entry = m.SubscriptionEntry(topic=topic, expression=m.FilterExpression(expression="*"))
        said = m.Settings(client_type=ClientType.PRODUCER, publishing=m.Publishing(topics=[topic]))
        if consumes:
            group = m.Resource(name=GROUP)
            wish = m.Subscription(group=group, subscriptions=[entry])
            said = m.Settings(client_type=ClientType.PUSH_CONSUMER, subscription=wish)
        stream = client.call("Telemetry", m.TelemetryCommand(settings=said), None)
        await stream.arrived.wait()
        return pick(stream.answers[0].settings)

    return scene


async def handle_of_held(proxy: Proxied, client: Speaker) -> ReceiptHandle:
    await proxy.mq.send(TOPIC, b"1")
    (handle,) = handles_of(await receive(client, auto_renew=True))
    return ReceiptHandle.parse(handle)


async def first_invisible_ms(proxy: Proxied, client: Speaker) -> int:
    return (await handle_of_held(proxy, client)).invisible_ms


async def renewed_after_s(proxy: Proxied, client: Speaker) -> list[int]:
    """When the proxy renews what a client works on, in the first five minutes; every renewal fails
    from the second one on."""
    (family,) = (it for it in proxy.proxy.services if isinstance(it, Receiving))
    change, at_s = family.renewal._change, list[int]()

    def changed(group: str, topic: str, handle: ReceiptHandle, time_ms: int) -> Any:
        at_s.append(round(proxy.mq.clock.monotonic_s() - began_s))
        if len(at_s) > 1:
            raise RequestTimeoutError("no answer")
        return change(group, topic, handle, time_ms)

    family.renewal._change = changed  # type: ignore[method-assign]
    await handle_of_held(proxy, client)
    began_s = proxy.mq.clock.monotonic_s()
    for _ in range(300):
        await proxy.mq.clock.advance(seconds=1)
        proxy.proxy.run()
    return at_s


async def comes_back_after_s(proxy: Proxied, client: Speaker) -> int:
    """After how long somebody else gets what a client held that has gone."""
    await handle_of_held(proxy, client)
    client.close()
    other = proxy.speaker("other")
    call = other.call("ReceiveMessage", receive_request(), None)
    for second in range(30):
        await proxy.mq.clock.advance(seconds=1)
        if call.is_closed and outcome(call.answers)[1]:
            return second
        if call.is_closed:
            call = other.call("ReceiveMessage", receive_request(), None)
    raise RequestTimeoutError("The message does not come.")


async def drains_for_s(proxy: Proxied, client: Speaker) -> float:
    return proxy.proxy._drain_s


async def dates_are_near(proxy: Proxied, client: Speaker) -> int:
    return proxy.dispatcher._limits.date_s_max  # test_dates.py looks at what it does


def backoff(settings: m.Settings) -> Any:
    return settings.backoff_policy.exponential_backoff


SOON = m.Duration(seconds=600)
CASES: list[tuple[str, Any, Scene, Any, Any]] = [
    ("minInvisibleTimeMillsForRecv", 1000, receives(2), "ILLEGAL_INVISIBLE_TIME", "OK"),
    ("maxInvisibleTimeMills", 20_000, receives(30), "OK", "ILLEGAL_INVISIBLE_TIME"),
    ("maxInvisibleTimeMills", 0, receives(86_400), "ILLEGAL_INVISIBLE_TIME", "OK"),
    ("defaultInvisibleTimeMills", 30_000, first_invisible_ms, 60_000, 30_000),
    ("enableProxyAutoRenew", False, renewed_after_s, [50, 100, 103, 106], []),
    ("renewAheadTimeMillis", 20_000, renewed_after_s, [50, 100, 103, 106], [40, 80, 83, 86]),
    ("renewMaxTimeMillis", 40_000, renewed_after_s, [50, 100, 103, 106], [50]),
    ("maxRenewRetryTimes", 1, renewed_after_s, [50, 100, 103, 106], [50, 100]),
    ("invisibleTimeMillisWhenClear", 6000, comes_back_after_s, 1, 6),
    ("grpcClientConsumerMinLongPollingTimeoutMillis", 1000, waits(2), 5, 2),
    ("grpcClientConsumerMaxLongPollingTimeoutMillis", 25_000, waits(25), 20, 25),
    ("grpcClientConsumerLongPollingBatchSize", 8,
     told(lambda it: it.subscription.receive_batch_size, consumes=True), 32, 8),
    ("grpcClientProducerMaxAttempts", 5, told(lambda it: it.backoff_policy.max_attempts), 3, 5),
    ("grpcClientProducerBackoffInitialMillis", 2000,
     told(lambda it: backoff(it).initial.ToMilliseconds()), 10, 2000),
    ("grpcClientProducerBackoffMaxMillis", 2000,
     told(lambda it: backoff(it).max.ToMilliseconds()), 1000, 2000),
    ("grpcClientProducerBackoffMultiplier", 3, told(lambda it: backoff(it).multiplier), 2, 3),
    ("maxMessageSize", 10, told(lambda it: it.publishing.max_body_size), 4 << 20, 10),
    ("maxMessageSize", 10, sends(body=b"12345678901"), "OK", "MESSAGE_BODY_TOO_LARGE"),
    ("maxMessageSize", -1, told(lambda it: it.publishing.max_body_size), 4 << 20,
     BODY_BYTES_LARGEST),
    ("enableMessageBodyEmptyCheck", False, sends(body=b""), "MESSAGE_BODY_EMPTY", "OK"),
    ("enableTopicMessageTypeCheck", False, sends(message_group="a"),
     "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", "OK"),
    ("enableTopicMessageTypeCheck", False,
     told(lambda it: it.publishing.validate_message_type), True, False),
    ("userPropertyMaxNum", 1, sends(user={"a": "", "b": ""}), "OK", "MESSAGE_PROPERTIES_TOO_LARGE"),
    ("maxUserPropertySize", 3, sends(user={"a": "bcd"}), "OK", "MESSAGE_PROPERTIES_TOO_LARGE"),
    ("maxUserPropertySize", 0, sends(user={"a": "b" * 17_000}), "MESSAGE_PROPERTIES_TOO_LARGE",
     "OK"),
    ("maxMessageGroupSize", 3, sends("ordered", message_group="abc"), "OK",
     "ILLEGAL_MESSAGE_GROUP"),
    ("maxMessageGroupSize", -1, sends("ordered", message_group="a" * 64),
     "ILLEGAL_MESSAGE_GROUP", "OK"),
    ("maxDelayTimeMills", 60_000, sends("later", in_s=90), "OK", "ILLEGAL_DELIVERY_TIME"),
    ("maxDelayTimeMills", 0, sends("later", in_s=2 * 86_400), "ILLEGAL_DELIVERY_TIME", "OK"),
    ("maxTransactionRecoverySecond", 60,
     sends("paid", message_type=MessageType.TRANSACTION,
           orphaned_transaction_recovery_duration=SOON), "OK", "BAD_REQUEST"),
    ("grpcShutdownTimeSeconds", 30, drains_for_s, 3, 30),
    ("sluiceGrpcDateSeconds", 300, dates_are_near, 54_000, 300),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "scene", "by_default", "changed"),
    CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)],
)  # fmt: skip
def test_a_limit_has_its_effect(
    name: str, value: Any, scene: Scene, by_default: Any, changed: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.ERROR)
    config, warnings = load_proxy_config(json.dumps({name: value}), environment={"HOME": "/h"})
    assert warnings == []
    assert observed(scene, ProxyLimits()) == by_default
    assert observed(scene, config) == changed


def test_every_limit_is_tried_and_none_is_without_effect() -> None:
    keys = {item.metadata["key"].name for item in fields(ProxyLimits)}
    assert {case[0] for case in CASES} == keys
    assert not keys & INERT.keys()
