"""Whatever listeners, hooks and callbacks raise is logged, and the client continues."""

import asyncio
import concurrent.futures
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from cancelling import inject
from sluicemq.client.aio.readers import Readers
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.client.heartbeat_thread import HeartbeatThread
from sluicemq.client.sync import producer as blocking
from sluicemq.client.sync.producer import Producer as BlockingProducer
from sluicemq.model.message import Message
from sluicemq.rocketmq import (
    DefaultMQProducer,
    LocalTransactionState,
    SendCallback,
    TransactionMQProducer,
)
from sluicemq.rocketmq import Message as JavaMessage
from sluicemq.rocketmq import TransactionListener as JavaListener
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.frames import Command
from waiting import wait_for

ERRORS = [
    ValueError("x"), asyncio.CancelledError(), GeneratorExit(), StopIteration(),
    concurrent.futures.CancelledError(),
]  # fmt: skip
CHECK = {"transactionTimeOut": "6000", "transactionCheckInterval": "5000"}


class Fails(TransactionListener):
    """A listener that fails to execute, and returns COMMIT for a check."""

    def __init__(self, error: BaseException, *, awaits: bool) -> None:
        self._error = error
        self._awaits = awaits
        self.checked = 0

    def execute_local(self, message: Message, transaction_id: str, argument: Any) -> Any:
        if self._awaits:
            return self._fail()
        raise self._error

    async def _fail(self) -> None:
        raise self._error

    def check(self, message: Any) -> Any:
        self.checked += 1
        if self.checked == 1:
            raise self._error
        return TransactionState.COMMIT


@pytest.mark.parametrize("awaits", [False, True], ids=["plain", "coroutine"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_a_transaction_whose_listener_fails_is_ended_by_a_later_check(error, awaits):
    async with embedded(clock=VirtualClock(), settings=CHECK) as mq:
        await mq.admin.create_topic("t", queues=1)
        listener = Fails(error, awaits=awaits)
        producer = mq.producer("p", listener=listener)
        result = await producer.send_in_transaction(Message("t", b"x"))
        assert result.state is TransactionState.UNKNOWN
        async with mq.subscribe("t", group="g") as stream:
            await mq.clock.advance(seconds=200)
            assert [one.body for one in await stream.receive_many(timeout_s=1.0)] == [b"x"]
        assert listener.checked == 2


async def test_a_transaction_whose_caller_was_cancelled_is_ended_by_a_check():
    """It once counted as running, and thus undecided, for ever."""

    class Waits(TransactionListener):
        async def execute_local(self, message: Message, transaction_id: str, argument: Any) -> Any:
            await asyncio.sleep(1)

        def check(self, message: Any) -> Any:
            return TransactionState.COMMIT

    async with embedded(clock=VirtualClock(), settings=CHECK) as mq:
        await mq.admin.create_topic("t", queues=1)
        producer = mq.producer("p", listener=Waits())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await producer.send_in_transaction(Message("t", b"x"))
        async with mq.subscribe("t", group="g") as stream:
            await mq.clock.advance(seconds=200)
            assert [one.body for one in await stream.receive_many(timeout_s=1.0)] == [b"x"]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_a_callback_of_send_soon_that_fails_is_logged(error, caplog):
    def on_done(_result, _error):
        raise error

    async with embedded(clock=VirtualClock()) as mq:
        mq.send_soon(on_done, "t", b"x")
        await mq.default_producer.close()
    assert "the listener" in caplog.text


async def test_send_soon_calls_its_callback_with_an_unexpected_error(caplog, monkeypatch):
    told = []
    async with embedded(clock=VirtualClock()) as mq:
        producer = mq.default_producer
        await producer.queues("t")
        monkeypatch.setattr(producer.sender.directory, "get_master_address", lambda _queue: 1 / 0)
        producer.send_soon(lambda *outcome: told.append(outcome), "t", b"x")
        await producer.close()
    ((result, error),) = told
    assert result is None
    assert "ZeroDivisionError" in str(error)
    assert "Traceback" in caplog.text


async def test_readers_commits_and_rebalances_continue_after_an_unexpected_error(
    caplog, monkeypatch
):
    caplog.set_level(logging.ERROR)
    failing = {"pull": 3, "commit": 3, "share": 3}

    def fail(what):
        if failing[what]:
            failing[what] -= 1
            raise RuntimeError(f"bug in {what}")

    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=1)
        stream = mq.subscribe("t", group="g", commit_period_s=1.0, balance_period_s=1.0)
        await stream.start()
        member = mq._members["g"]
        (queue,) = member.readers.queues_of_topic("t")
        reader = member.readers.get(queue)
        take, commit, members = reader._accept_response, Readers.commit, member._fetch_members

        def _accept(answer):
            fail("pull")
            take(answer)

        async def _commit(self, **named):
            fail("commit")
            await commit(self, **named)

        async def _fetch(route):
            fail("share")
            return await members(route)

        monkeypatch.setattr(reader, "_accept_response", _accept)
        monkeypatch.setattr(Readers, "commit", _commit)
        monkeypatch.setattr(member, "_fetch_members", _fetch)
        await mq.send("t", b"x")
        await mq.clock.advance(seconds=20)
        (message,) = await stream.receive_many(timeout_s=1.0)
        await message.ack()
        await mq.clock.advance(seconds=5)
        assert failing == {"pull": 0, "commit": 0, "share": 0}
        assert await mq.admin.committed_offset("g", queue) == 1
        for what in failing:
            assert caplog.text.count(f"RuntimeError: bug in {what}") >= 3


async def test_heartbeats_continue_after_an_unexpected_error(caplog, monkeypatch):
    left = [2]
    beat = HeartbeatThread._send_heartbeat

    async def fails(self, address, value):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("bug in beat")
        return await beat(self, address, value)

    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=1)
        async with mq.subscribe("t", group="g"):
            monkeypatch.setattr(HeartbeatThread, "_send_heartbeat", fails)
            await mq.clock.advance(seconds=300)
            assert mq.servers.broker.core.consumers.groups["g"].client_ids == [mq.client_id]
    assert left == [0]
    assert caplog.text.count("bug in beat") >= 2


@pytest.mark.parametrize("error", [*ERRORS, SystemExit(1)], ids=repr)
async def test_consuming_directly_reports_what_a_handler_raised(error):
    async def handle(message):
        if message.body == b"bad":
            raise error

    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=1)
        sent = await mq.send("t", b"bad")
        consumer = mq.consumer("g", (lambda message: asyncio.run(handle(message))), start="last")
        async with consumer.subscribe("t"):
            _, result = await mq.admin.consume_directly(sent.message_id, "g", topic="t")
            assert type(error).__name__ in str(result.remark) or isinstance(error, StopIteration)
            info = await mq.admin.running_info("g", mq.client_id)
            assert info.notes["workersLive"] == info.notes["workersWanted"] == "20"


async def test_a_reply_handler_that_fails_is_called_again_like_any_other():
    tried = []

    async def answer(message):
        tried.append(message.body)
        if len(tried) == 1:
            raise asyncio.CancelledError
        await message.reply(b"!")

    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=1)
        async with mq.consumer("g", answer, concurrency=1).subscribe("t"):
            asked = asyncio.get_running_loop().create_task(mq.request("t", b"?", timeout_s=60.0))
            await mq.clock.advance(seconds=20)
            assert (await asked).body == b"!"


async def test_an_error_of_a_selector_is_raised_and_leaves_no_send_open():
    async with embedded(clock=VirtualClock()) as mq:
        for error in ERRORS[:3]:

            def select(_queues, _message, error=error):
                raise error

            outcome = await inject(mq.send("t", b"x", selector=select), 0, "waiting")
            assert type(outcome.error) is type(error)
        assert not mq.default_producer.sender.open_ids
        await mq.send("t", b"x")


# ---------------------------------------------------------------------------- blocking clients


def test_a_check_of_a_blocking_producer_that_fails_is_logged(fake_thread, caplog, monkeypatch):
    producer = BlockingProducer(fake_thread.name_server, listener=Fails(ValueError(), awaits=False))
    question = SimpleNamespace(location=SimpleNamespace(group=producer.group, transaction_id="7"))
    monkeypatch.setattr(blocking, "parse_check_request", lambda _command: question)
    monkeypatch.setattr(producer.callbacks, "answer_check", lambda *_: 1 / 0)
    assert producer.callbacks._on_broker_request(Command(39), "somewhere", lambda _answer: None)
    wait_for(lambda: "transaction 7 could not be checked" in caplog.text)
    producer.close()


def test_the_trace_thread_of_a_blocking_producer_survives_an_unexpected_error(
    fake_thread, caplog, monkeypatch
):
    producer = BlockingProducer(fake_thread.name_server, trace=True)
    writer = producer._trace_writer
    assert writer is not None
    monkeypatch.setattr(producer._sender, "write_traces", lambda _notes: 1 / 0)
    writer._linger_s = 0.01
    fake_thread.topics["t"] = 1
    producer.send("t", b"x")
    wait_for(lambda: "traces cannot be written" in caplog.text)
    assert writer._thread is not None
    assert writer._thread.is_alive()
    monkeypatch.undo()
    producer.close()


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError()], ids=repr)
def test_a_send_callback_that_fails_does_not_end_the_client(fake_thread, caplog, error):
    class Callback(SendCallback):
        def on_success(self, send_result):
            raise error

        def on_exception(self, exception):
            raise exception

    fake_thread.topics["t"] = 1
    with DefaultMQProducer("g", namesrv_addr=fake_thread.name_server) as producer:
        producer.send(JavaMessage("t", b"x"), Callback())
        wait_for(lambda: "the listener" in caplog.text)
        producer.send(JavaMessage("t", b"x"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_a_failed_local_transaction_of_rocketmqs_producer_is_undecided(fake_thread, error):
    class Listener(JavaListener):
        def execute_local_transaction(self, msg, arg):
            raise error

        def check_local_transaction(self, msg):
            return LocalTransactionState.COMMIT_MESSAGE

    fake_thread.topics["t"] = fake_thread.topics["TBW102"] = 1
    producer = TransactionMQProducer("g", namesrv_addr=fake_thread.name_server)
    producer.set_transaction_listener(Listener())
    with producer:
        running = producer._threaded.client.transactions._running
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                producer.send_message_in_transaction(JavaMessage("t", b"x"))
        else:
            result = producer.send_message_in_transaction(JavaMessage("t", b"x"))
            assert result.local_transaction_state is LocalTransactionState.UNKNOW
        assert not running
