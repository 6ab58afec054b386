"""Clients of gRPC as members of a group: the one filter of those that pop, who has what."""

import pytest

pytest.importorskip("google.protobuf")

from consuming import (
    GROUP,
    TOPIC,
    ack,
    bodies,
    handles_of,
    play,
    receive,
    receive_request,
    tagged,
)
from proxied import Proxied, Speaker
from sluicemq.client.admin.diagnose.findings import Fate
from sluicemq.client.admin.groups import popped
from sluicemq.client.admin.topics import masters
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import ClientType, Code


async def member(proxy: Proxied, name: str, tags: str) -> Speaker:
    """A simple consumer whose settings are answered."""
    client = proxy.speaker(name)
    entry = m.SubscriptionEntry(topic=m.Resource(name=TOPIC), expression=tagged(tags))
    settings = m.Settings(
        client_type=ClientType.SIMPLE_CONSUMER,
        subscription=m.Subscription(group=m.Resource(name=GROUP), subscriptions=[entry]),
    )
    stream = client.call("Telemetry", m.TelemetryCommand(settings=settings), None)
    await stream.arrived.wait()
    assert stream.answers[0].status.code == Code.OK
    return client


async def refusal(client: Speaker, tags: str) -> str:
    request = receive_request(filter_expression=tagged(tags))
    status = (await client.ask("ReceiveMessage", request))[0].status
    assert status.code == Code.FORBIDDEN
    return status.message


def test_who_wants_something_else_is_refused_and_takes_nothing() -> None:
    async def scene(proxy: Proxied, _: Speaker) -> None:
        one, two = await member(proxy, "one", "a"), await member(proxy, "two", "b")
        for tag in "abab":
            await proxy.mq.send(TOPIC, tag.encode(), tag=tag)
        assert bodies(await receive(one, filter_expression=tagged("a"))) == {b"a"}
        text = await refusal(two, "b")
        assert "one" in text
        assert "two" in text
        assert await receive(two, filter_expression=tagged("a")) == []
        (contract,) = await proxy.mq.admin.contract(GROUP)
        assert contract.refused.keys() == {"two"}
        await one.ask("NotifyClientTermination", m.NotifyClientTerminationRequest())
        for tag in "ab":
            await proxy.mq.send(TOPIC, tag.encode(), tag=tag)
        assert bodies(await receive(two, filter_expression=tagged("b"))) == {b"b"}
        (contract,) = await proxy.mq.admin.contract(GROUP)
        assert not contract.refused

    play(scene)


def test_who_is_gone_is_not_waited_for() -> None:
    async def scene(proxy: Proxied, _: Speaker) -> None:
        one, two = await member(proxy, "one", "a"), await member(proxy, "two", "b")
        await receive(one, filter_expression=tagged("a"))
        one.close()
        await proxy.mq.send(TOPIC, b"b", tag="b")
        assert bodies(await receive(two, filter_expression=tagged("b"))) == {b"b"}
        await refusal(await member(proxy, "one", "a"), "a")

    play(scene)


def test_lag_and_explain_know_what_is_in_flight() -> None:
    async def scene(proxy: Proxied, _: Speaker) -> None:
        one = await member(proxy, "one", "a")
        for tag in "aab":
            await proxy.mq.send(TOPIC, tag.encode(), tag=tag)
        messages = await receive(one, filter_expression=tagged("a"))
        await ack(one, handles_of(messages)[0])
        admin = proxy.mq.admin
        queues = [item for item in await admin.lag(GROUP) if item.queue.topic == TOPIC]
        assert (sum(it.in_flight for it in queues), sum(it.matching or 0 for it in queues)) == (
            1,
            1,
        )
        (held,) = await admin.run(popped(await admin.run(masters(admin.directory)), GROUP))
        assert (held.client_id, held.visible_ms - held.popped_ms) == ("one", 30_000)
        identity = messages[1].system_properties.message_id
        _, (found,) = await admin.explain_message(identity, group=GROUP, topic=TOPIC)
        assert found.fate is Fate.IN_FLIGHT
        assert "one popped it" in (found.cause.what if found.cause else "")

    play(scene)
