"""A client refuses another process and another event loop, and says what to do instead."""

import asyncio
import os
import traceback

import pytest

from sluicemq import Sluice
from sluicemq.client.affinity import ClientAffinity, ForkCounter
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer, LitePullConsumer, PushConsumer
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq import DefaultMQProducer
from sluicemq.rocketmq import Message as JavaMessage

# ------------------------------------------------------------------------------------- forks


def in_fork(work) -> str:
    """What `work` returns or raises in a forked child of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        try:
            text = str(work())
        except BaseException as error:
            kind = type(error).__name__
            text = f"{kind}: {error} | {''.join(traceback.format_exception(error))[-300:]}"
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        found = answer.read().decode()
    os.waitpid(child, 0)
    return found


USES = {
    "a blocking producer": (
        Producer, lambda it: it.send("t", b"x"),
    ),
    "a blocking admin": (Admin, lambda it: it.topics()),
    "a bulk reader": (
        lambda ns: BulkReader("127.0.0.1:1", "t", 0, 0, 5), list,
    ),
    "a blocking consumer": (
        lambda ns: Consumer(ns, "t", group="g"), lambda it: it.receive(1),
    ),
    "a blocking handler": (
        lambda ns: PushConsumer(ns, "h", print).subscribe("t"), lambda it: it.start(),
    ),
    "a blocking polled consumer": (
        lambda ns: LitePullConsumer(ns, "l"), lambda it: it.subscribe("t"),
    ),
    "an asyncio client": (
        Sluice, lambda it: asyncio.run(_send(it)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", USES)
def test_a_client_is_refused_after_a_fork_and_goes_on_in_its_own_process(fake_thread, kind):
    fake_thread.topics["t"] = 1
    make, use = USES[kind]
    client = make(fake_thread.name_server)
    if kind == "a blocking producer":
        client.send("t", b"open connections are shared by a fork")
    told = in_fork(lambda: use(client))
    assert told.startswith("ConfigurationError: this client was created in process"), told
    assert f"process {os.getpid()}" in told
    assert "after the fork" in told
    if kind == "a blocking producer":
        client.send("t", b"still there")
    closing = client.close()
    if asyncio.iscoroutine(closing):
        asyncio.run(closing)


def test_rocketmqs_producer_is_refused_after_a_fork(fake_thread):
    fake_thread.topics["t"] = 1
    with DefaultMQProducer("g", namesrv_addr=fake_thread.name_server) as producer:
        told = in_fork(lambda: producer.send(JavaMessage("t", b"x")))
        assert "used after a fork" in told, told


def test_a_client_that_is_made_after_the_fork_works(fake_thread):
    fake_thread.topics["t"] = 1

    def send() -> str:
        with Producer(fake_thread.name_server) as producer:
            return producer.send("t", b"x").status.name

    assert in_fork(send) == "OK"


def test_a_fork_is_counted_in_the_child_alone():
    before = ForkCounter.count
    assert in_fork(lambda: ForkCounter.count) == str(before + 1)
    assert ForkCounter.count == before


# ------------------------------------------------------------------------------- event loops


async def _send(mq):
    await mq.send("t", b"x")


async def _oneway(mq):
    await mq.send_oneway("t", b"x")


async def _soon(mq):
    mq.send_soon(print, "t", b"x")


async def _join(mq):
    await mq.subscribe("t", group="other").start()


async def _receive(mq):
    await mq.stream.receive()


async def _poll(mq):
    await mq.polled.poll()


async def _subscribe(mq):
    await mq.polled.subscribe("u")


async def _pull(mq):
    await mq.pull_consumer().pull(MessageQueue("t", "broker-a", 0), 0)


async def _admin(mq):
    await mq.admin.topics()


async def _close(mq):
    await mq.close()


async def _close_stream(mq):
    await mq.stream.close()


async def _close_polled(mq):
    await mq.polled.close()


async def _close_producer(mq):
    await mq.default_producer.close()


@pytest.mark.parametrize(
    "use",
    [
        _send, _oneway, _soon, _join, _receive, _poll, _subscribe, _pull, _admin, _close,
        _close_stream, _close_polled, _close_producer,
    ],
)  # fmt: skip
def test_a_client_is_refused_in_another_event_loop(fake_thread, use):
    """It would wait for ever: what it awaits is woken in the first loop."""
    fake_thread.topics["t"] = fake_thread.topics["u"] = 1

    class Client(Sluice):
        pass

    async def begin() -> Client:
        mq = Client(fake_thread.name_server)
        await mq.send("t", b"x")
        mq.stream = mq.subscribe("t", group="g")  # type: ignore[attr-defined]
        await mq.stream.start()  # type: ignore[attr-defined]
        mq.polled = mq.lite_pull("l")  # type: ignore[attr-defined]
        await mq.polled.subscribe("t")  # type: ignore[attr-defined]
        return mq

    first = asyncio.new_event_loop()
    mq = first.run_until_complete(begin())
    try:
        with pytest.raises(ConfigurationError, match="another event loop") as error:
            asyncio.run(asyncio.wait_for(use(mq), 5))
        assert "run_coroutine_threadsafe" in str(error.value)
    finally:
        first.run_until_complete(mq.close())
        first.close()


def test_a_client_may_be_made_outside_of_a_loop_and_belongs_to_its_first_one(fake_thread):
    fake_thread.topics["t"] = 1
    mq = Sluice(fake_thread.name_server)

    async def main() -> None:
        assert mq.loop is None
        await mq.send("t", b"x")
        assert mq.loop is asyncio.get_running_loop()
        await mq.close()

    asyncio.run(main())


def test_a_home_without_a_loop_takes_the_first():
    affinity = ClientAffinity()

    async def enter() -> None:
        affinity.check_loop()

    asyncio.run(enter())
    with pytest.raises(ConfigurationError, match="which is closed"):
        asyncio.run(enter())
