"""What clients work on stays invisible."""

import asyncio

import pytest

pytest.importorskip("google.protobuf")

from consuming import (
    TOPIC,
    ack,
    ack_request,
    bodies,
    change_request,
    dead_letters,
    forward_request,
    handles_of,
    outcome,
    play,
    receive,
    receive_request,
)
from proxied import Proxied, Speaker
from sluicemq.client.core.conversations import Await
from sluicemq.errors import RequestError
from sluicemq.proxy import messages as m
from sluicemq.proxy import renewal
from sluicemq.proxy.messages import Code
from sluicemq.proxy.receiving import Receiving
from sluicemq.wire.popping import ReceiptHandle

pytestmark = pytest.mark.slow


def receiving(proxy: Proxied) -> Receiving:
    """The family, whose clock the test is."""
    return next(it for it in proxy.proxy.services if isinstance(it, Receiving))


async def passes(proxy: Proxied, minutes: float) -> None:
    """Time, second by second."""
    for _ in range(int(minutes * 60)):
        await proxy.mq.clock.advance(seconds=1)
        proxy.proxy.run()


async def take(proxy: Proxied, client: Speaker) -> str:
    """A message that the client works on: its handle."""
    await proxy.mq.send(TOPIC, b"1")
    (handle,) = handles_of(await receive(client, auto_renew=True))
    return handle


def test_what_a_client_works_on_comes_to_nobody_else() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = await take(proxy, client)
        assert ReceiptHandle.parse(handle).invisible_ms == 60_000
        await passes(proxy, 30)
        assert await receive(proxy.speaker("other")) == []
        assert (await ack(client, handle)).status.code == Code.OK
        assert receiving(proxy).renewal.count == 0
        await passes(proxy, 40)
        assert await receive(proxy.speaker("other")) == []

    play(scene)


def test_times_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        family, times_ms = receiving(proxy), []
        change = family.renewal._change

        def changed(group: str, topic: str, handle: ReceiptHandle, time_ms: int) -> object:
            times_ms.append((handle.deadline_ms - proxy.mq.clock.now_ms(), time_ms))
            return change(group, topic, handle, time_ms)

        monkeypatch.setattr(family.renewal, "_change", changed)
        await take(proxy, client)
        await passes(proxy, 235)
        assert [time_ms // 60_000 for _, time_ms in times_ms] == [1, 3, 5, 10, 30, 60, 60, 60, 0]
        assert all(9_000 <= left_ms <= 11_000 for left_ms, _ in times_ms)
        assert times_ms[-1][1] == renewal.DEFAULT_BACKOFF_MS
        assert family.renewal.count == 0

    play(scene)


def test_after_three_hours_a_message_comes_again() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = await take(proxy, client)
        await passes(proxy, 4 * 60)
        assert bodies(await receive(proxy.speaker("other"))) == {b"1"}
        assert (await ack(client, handle)).status.code == Code.INVALID_RECEIPT_HANDLE

    play(scene)


def test_a_change_ends_renewal() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = await take(proxy, client)
        await passes(proxy, 2)
        answer = await client.ask("ChangeInvisibleDuration", change_request(handle, 0))
        assert answer.status.code == Code.OK
        assert receiving(proxy).renewal.count == 0
        assert bodies(await receive(client)) == {b"1"}

    play(scene)


def test_dead_letters_end_renewal() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = await take(proxy, client)
        await passes(proxy, 2)
        answer = await client.ask("ForwardMessageToDeadLetterQueue", forward_request(handle))
        assert answer.status.code == Code.OK
        assert (receiving(proxy).renewal.count, await dead_letters(proxy)) == (0, 1)
        await passes(proxy, 5)
        assert await receive(client) == []

    play(scene)


@pytest.mark.parametrize("minutes", [0, 2])
def test_a_client_that_is_gone_leaves_its_messages(minutes: int) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await take(proxy, client)
        await passes(proxy, minutes)
        client.close()
        begin_s = proxy.mq.clock.monotonic_s()
        assert bodies(await receive(proxy.speaker("other"))) == {b"1"}
        assert proxy.mq.clock.monotonic_s() - begin_s < 1.5
        assert receiving(proxy).renewal.count == 0

    play(scene)


def test_an_acknowledgement_waits_for_the_renewal_under_way() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = await take(proxy, client)
        await proxy.mq.clock.advance(seconds=55)
        proxy.proxy.run()  # asked, not answered
        answer = await ack(client, handle)
        assert answer.status.code == Code.OK
        await passes(proxy, 5)
        assert await receive(proxy.speaker("other")) == []

    play(scene)


def test_a_client_that_goes_while_a_renewal_is_under_way() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await take(proxy, client)
        await proxy.mq.clock.advance(seconds=55)
        proxy.proxy.run()
        client.close()
        begin_s = proxy.mq.clock.monotonic_s()
        assert bodies(await receive(proxy.speaker("other"))) == {b"1"}
        assert proxy.mq.clock.monotonic_s() - begin_s < 1.5

    play(scene)


@pytest.mark.parametrize("failures", [2, 3])
def test_a_renewal_is_tried_three_times(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        kept, left = receiving(proxy).renewal, [failures]
        change = kept._change

        def changed(group: str, topic: str, handle: ReceiptHandle, time_ms: int) -> object:
            if left[0]:
                left[0] -= 1
                raise RequestError(2, "busy")
            return change(group, topic, handle, time_ms)

        monkeypatch.setattr(kept, "_change", changed)
        await take(proxy, client)
        await passes(proxy, 1.5)
        assert kept.count == (failures < 3)

    play(scene)


def test_there_is_an_end_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        monkeypatch.setattr(renewal, "CLIENT_IN_FLIGHT_MAX", 1)
        handle = await take(proxy, client)
        await proxy.mq.send(TOPIC, b"2")
        answers = await client.ask("ReceiveMessage", receive_request(auto_renew=True))
        assert [it.status.code for it in answers] == [Code.TOO_MANY_REQUESTS]
        await ack(client, handle)
        code, messages = outcome(
            await client.ask("ReceiveMessage", receive_request(auto_renew=True))
        )
        assert (code, bodies(messages)) == (Code.OK, {b"2"})

    play(scene)


def test_a_failed_acknowledgement_does_not_end_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = await take(proxy, client)
        family = receiving(proxy)
        monkeypatch.setattr(family, "_acknowledge_at_broker", failing)
        assert (await ack(client, handle)).status.code == Code.PROXY_TIMEOUT
        assert family.renewal.count == 1

    play(scene)


def failing(address: str, command: object) -> object:
    yield from ()
    return m.Status(code=Code.PROXY_TIMEOUT)


def test_many_are_renewed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "REQUESTS_MAX", 3)

    async def scene(proxy: Proxied, client: Speaker) -> None:
        for number in range(20):
            await proxy.mq.send(TOPIC, b"%d" % number)
        assert len(await receive(client, auto_renew=True)) == 20
        kept, most = receiving(proxy).renewal, 0
        await proxy.mq.clock.advance(seconds=55)
        proxy.proxy.run()
        while kept._running_count:
            most = max(most, kept._running_count)
            await asyncio.sleep(0)
        assert most == 3
        assert {it.renewals for it in next(iter(kept._in_flight.values())).values()} == {1}
        client.close()
        await proxy.mq.clock.advance(seconds=2)
        assert len(await receive(proxy.speaker("other"))) == 20

    play(scene)


@pytest.mark.parametrize(
    ("policy", "wait_ms"),
    [(m.RetryPolicy(), renewal.DEFAULT_BACKOFF_MS),
     (m.RetryPolicy(customized_backoff=m.CustomizedBackoff(
         next=[m.Duration(seconds=it) for it in (1, 5, 10, 30)])), 30_000),
     (m.RetryPolicy(exponential_backoff=m.ExponentialBackoff(
         initial=m.Duration(seconds=5), max=m.Duration(seconds=7200), multiplier=2)), 40_000)],
)  # fmt: skip
def test_the_group_says_when_it_comes_again(policy: m.RetryPolicy, wait_ms: int) -> None:
    class Client:
        settings = m.Settings(backoff_policy=policy)

    held = renewal.InFlightMessage(
        Client(), "g", TOPIC, "", ReceiptHandle(0, 0, 0, 0, 0, "b", 0), 3, 0, 0
    )  # type: ignore[arg-type]
    assert renewal.backoff_ms(held) == wait_ms


def test_a_client_that_goes_while_its_acknowledgement_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = await take(proxy, client)
        family, ended = receiving(proxy), asyncio.get_running_loop().create_future()

        def asked(address: str, command: object) -> object:
            yield Await(ended)
            return m.Status(code=Code.PROXY_TIMEOUT)

        monkeypatch.setattr(family, "_acknowledge_at_broker", asked)
        client.call("AckMessage", ack_request(handle))
        client.close()
        ended.set_result(None)
        begin_s = proxy.mq.clock.monotonic_s()
        assert bodies(await receive(proxy.speaker("other"))) == {b"1"}
        assert proxy.mq.clock.monotonic_s() - begin_s < 1.5
        assert family.renewal.count == 0

    play(scene)
