"""Ctrl-C in a blocking consumer: nothing that was received is lost, and closing completes.

The interrupt is raised at the worst moment: the caller waits for the result of the event loop, and
the event loop has it already.
"""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from sluicemq.client import threaded
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.threaded import Consumer, LitePullConsumer, Portal
from sluicemq.errors import ClosedError, ConfigurationError
from sluicemq.rocketmq import DefaultLitePullConsumer
from waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the next `count` waits of this thread raise KeyboardInterrupt.

    Each wait raises it when its result is there.
    """
    left = [0]
    real = Future.result

    def result(self: Any, timeout: float | None = None) -> Any:
        found = real(self, timeout)
        if left[0] > 0 and threading.current_thread() is threading.main_thread():
            left[0] -= 1
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Future, "result", result)

    def arm(count: int = 1) -> None:
        left[0] = count

    return arm


def test_an_interrupted_receive_loses_no_message(fake_thread, interrupt):
    fake_thread.topics["t"] = 1
    fake_thread.broker.put("t", 0, b"1")
    with Consumer(fake_thread.name_server, "t", group="g") as consumer:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            consumer.receive()
        message = consumer.receive(timeout_s=5)
        assert message is not None
        assert message.body == b"1"


def test_an_interrupted_poll_acknowledges_nothing(fake_thread, interrupt):
    fake_thread.topics["t"] = 1
    fake_thread.broker.put("t", 0, b"1")
    with LitePullConsumer(fake_thread.name_server, "g") as consumer:
        consumer.subscribe("t")
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(5)
        assert [message.body for message in consumer.poll(5)] == [b"1"]
        assert consumer.poll(0.05) == []


def test_an_interrupted_poll_of_rocketmqs_consumer_acknowledges_nothing(fake_thread, interrupt):
    fake_thread.topics["t"] = 1
    consumer = DefaultLitePullConsumer("g", namesrv_addr=fake_thread.name_server)
    consumer.subscribe("t")
    consumer.start()
    fake_thread.loop.call_soon_threadsafe(fake_thread.broker.put, "t", 0, b"1")
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(5000)
    assert [message.body for message in consumer.poll(5000)] == [b"1"]
    consumer.shutdown()


def test_an_interrupted_close_leaves_the_group(fake_thread, interrupt):
    fake_thread.topics["t"] = 1
    consumer = Consumer(fake_thread.name_server, "t", group="g")
    consumer.receive(timeout_s=0.05)
    assert fake_thread.broker.members["g"]
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        consumer.close()
    assert not fake_thread.broker.members["g"]


def test_a_blocking_call_on_the_clients_own_thread_is_refused():
    portal = Portal()

    async def inner() -> None:
        portal.run(asyncio.sleep(0))

    with pytest.raises(ConfigurationError, match="would wait for itself"):
        portal.run(inner())
    portal.close()


def test_an_event_loop_that_ends_is_logged_and_named_by_later_errors(caplog):
    portal = Portal("sluicemq test")

    def leave() -> None:
        raise SystemExit(7)

    portal.call_soon(leave)
    wait_for(lambda: not portal._thread.is_alive())
    assert "the event loop of sluicemq test ended" in caplog.text
    with pytest.raises(ClosedError, match=r"SystemExit\(7\)"):
        portal.run(asyncio.sleep(0))


def test_a_listener_that_exits_does_not_end_the_loop_of_a_blocking_client(fake_thread, caplog):
    """On a thread, SystemExit would end the event loop silently."""
    fake_thread.topics["t"] = 1
    fake_thread.broker.put("t", 0, b"1")
    fake_thread.broker.committed["g", "t", 0] = 99

    def moved(_event: object) -> None:
        raise SystemExit(1)

    portal = Portal()
    sluice = portal.call(Sluice, fake_thread.name_server, on_moved=moved)
    stream = portal.call(sluice.subscribe, "t", group="g")
    portal.run(stream.receive_many(timeout_s=0.2))
    assert "raised an error, which is ignored" in caplog.text
    assert "moved" in caplog.text
    portal.run(sluice.close())
    portal.close()
    assert portal._failure is None
    assert threaded.Portal is Portal


@pytest.mark.parametrize("is_coroutine", [False, True])
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration()], ids=repr)
def test_a_handler_of_a_blocking_consumer_ends_neither_its_worker_nor_its_loop(
    fake_thread, error, is_coroutine
):
    """The handler runs on a thread of the client, where these errors only end the thread."""
    seen = []

    def handle(message: Any) -> None:
        seen.append(message.body)
        if message.body.startswith(b"bad"):
            raise error

    async def handle_on_loop(message: Any) -> None:
        handle(message)

    fake_thread.topics["t"] = 1
    for body in (b"bad 1", b"bad 2", b"bad 3", b"good"):
        fake_thread.broker.put("t", 0, body)
    consumer = threaded.PushConsumer(
        fake_thread.name_server, "g", handle_on_loop if is_coroutine else handle, concurrency=2
    )
    with consumer.subscribe("t"):
        wait_for(lambda: fake_thread.broker.seen[36] == 3 and b"good" in seen)
        assert consumer._threaded.client.live_workers == 2
    assert consumer._portal._failure is None
