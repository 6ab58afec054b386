"""Transactions by every face of the client, against our own servers on sockets."""

import asyncio
import json
import threading
from contextlib import AsyncExitStack

import pytest
from click.testing import CliRunner

from sluicemq import ConfigurationError, Message, RequestError, Sluice, TransactionState
from sluicemq.cli import main
from sluicemq.client.core.transactions import TransactionListener
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import StoredMessage
from sluicemq.record.codec import decode_records
from sluicemq.rocketmq import LocalTransactionState, TransactionMQProducer
from sluicemq.rocketmq import Message as MigrantMessage
from sluicemq.rocketmq import TransactionListener as MigrantListener
from waiting import wait_for

COMMIT, ROLLBACK, UNKNOWN = (
    TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
)  # fmt: skip
QUICK = {"transactionTimeOut": "300", "transactionCheckInterval": "300"}


@pytest.fixture
def quick(empty_cluster):
    """One name server, one broker that asks soon."""
    empty_cluster.start_broker(**QUICK)
    return empty_cluster


def stored(cluster, topic: str = "t") -> list[str]:
    """The bodies of all messages of a topic that can be seen."""
    found = []
    with Admin(cluster.addresses) as admin:
        for queue in admin.queues(topic):
            start, end = admin.offsets(queue)
            reader = BulkReader(
                admin.address(queue), queue.topic, queue.queue_id, start, end, None,
                broker=queue.broker,
            )  # fmt: skip
            with reader:
                for chunk in reader:
                    found += [record.body.decode() for record in decode_records(chunk)]
    return sorted(found)


class Ledger(TransactionListener):
    """Local transactions that end as the argument says, and checks as the table says."""

    def __init__(self, checks: TransactionState = COMMIT) -> None:
        self.checks = checks
        self.executed: list[str] = []
        self.checked: list[str] = []

    def execute_local(self, message, transaction_id, argument):
        self.executed.append(transaction_id)
        if isinstance(argument, Exception):
            raise argument
        return argument

    def check(self, message: StoredMessage) -> TransactionState:
        self.checked.append(message.body.decode())
        return self.checks


class AsyncLedger(Ledger):
    async def execute_local(self, message, transaction_id, argument):
        await asyncio.sleep(0)
        return super().execute_local(message, transaction_id, argument)

    async def check(self, message):
        await asyncio.sleep(0)
        return super().check(message)


# --- asyncio


async def test_a_block_commits_when_it_is_left_and_rolls_back_when_it_raises(cluster):
    async with Sluice(cluster.addresses) as mq:
        async with mq.transaction("t", b"good", tag="A", keys="k") as tx:
            assert await asyncio.to_thread(stored, cluster) == []
        assert (tx.state, tx.is_acknowledged) == (COMMIT, True)
        assert tx.send_result.message_id == tx.transaction_id
        with pytest.raises(KeyError):
            async with mq.transaction("t", b"bad") as tx:
                raise KeyError("local transaction")
        assert (tx.state, tx.is_acknowledged) == (ROLLBACK, True)
        async with mq.transaction("t", b"given back") as tx:
            tx.rollback()
        assert await asyncio.to_thread(stored, cluster) == ["good"]


async def test_a_cancelled_block_rolls_back(cluster):
    async with Sluice(cluster.addresses) as mq:
        entered = asyncio.Event()

        async def work():
            async with mq.transaction("t", b"cancelled"):
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with Admin(cluster.addresses) as admin:
            assert [len(items) for items in admin.transactions().values()] == [0]


async def test_a_committed_message_is_found_where_it_was_delivered(cluster):
    """Its half message has the same id."""
    async with Sluice(cluster.addresses) as mq, mq.transaction("t", b"x") as tx:
        pass
    with Admin(cluster.addresses) as admin:
        assert admin.message_by_id(tx.transaction_id).topic == "t"


async def test_a_block_that_leaves_it_open_is_asked_about(quick):
    """Nothing in this process knows: the listener decides."""
    ledger = AsyncLedger()
    async with Sluice(quick.addresses) as mq:
        producer = mq.producer("G", listener=ledger)
        async with producer.transaction("t", b"open") as tx:
            tx.unknown()
        assert not tx.is_acknowledged
        await asyncio.to_thread(wait_for, lambda: stored(quick) == ["open"])
    assert ledger.checked == ["open"]


@pytest.mark.parametrize("ledger", [Ledger, AsyncLedger])
async def test_a_listener_executes_and_is_asked(quick, ledger):
    listener = ledger()
    async with Sluice(quick.addresses) as mq:
        producer = mq.producer("G", listener=listener)
        results = [
            await producer.send_in_transaction(Message("t", body), state)
            for body, state in (
                (b"commit", COMMIT), (b"rollback", ROLLBACK), (b"unknown", UNKNOWN),
                (b"none", None), (b"raises", ValueError("local")),
            )
        ]  # fmt: skip
        states = [COMMIT, ROLLBACK, UNKNOWN, UNKNOWN, UNKNOWN]
        assert [result.state for result in results] == states
        assert [result.is_acknowledged for result in results] == [True, True, False, False, False]
        assert listener.executed == [result.transaction_id for result in results]
        expected = ["commit", "none", "raises", "unknown"]
        await asyncio.to_thread(wait_for, lambda: stored(quick) == expected)
    # On a busy machine the broker asks again before an answer has come.
    assert sorted(set(listener.checked)) == ["none", "raises", "unknown"]


async def test_a_running_transaction_is_not_for_the_listener_to_judge(quick):
    """The broker asks while the block still runs: what the listener would find is half done."""
    ledger = Ledger(checks=ROLLBACK)
    async with Sluice(quick.addresses) as mq:
        producer = mq.producer("G", listener=ledger)
        async with producer.transaction("t", b"slow"):
            broker = quick.brokers["broker-a"].core
            await asyncio.to_thread(wait_for, lambda: broker.transactions.checker.sent_count >= 2)
        await asyncio.to_thread(wait_for, lambda: stored(quick) == ["slow"])
    assert ledger.checked == []


async def test_another_client_of_the_group_answers_for_one_that_is_gone(quick):
    ledger = Ledger()
    async with Sluice(quick.addresses) as other:
        survivor = other.producer("G", listener=ledger)
        async with Sluice(quick.addresses) as dying:
            producer = dying.producer("G", listener=Ledger(checks=UNKNOWN))
            await producer.send_in_transaction(Message("t", b"orphan"), UNKNOWN)
        await survivor.answer_checks("t")
        await asyncio.to_thread(wait_for, lambda: stored(quick) == ["orphan"])
    assert ledger.checked == ["orphan"]


async def test_a_producer_answers_checks_of_a_topic_that_its_first_send_will_create(quick):
    async with Sluice(quick.addresses) as mq:
        producer = mq.producer("G", listener=Ledger())
        await producer.answer_checks("not-there-yet")
        async with producer.transaction("not-there-yet", b"first"):
            pass
    assert stored(quick, "not-there-yet") == ["first"]


async def test_delays_and_missing_listeners_are_refused_before_anything_is_sent(cluster):
    async with Sluice(cluster.addresses) as mq:
        for when in ({"delay_level": 3}, {"delay": 5}):
            with pytest.raises(ConfigurationError, match="cannot be delayed"):
                async with mq.transaction("t", b"x", **when):
                    pass
        with pytest.raises(ConfigurationError, match="TransactionListener"):
            await mq.producer("G").send_in_transaction(Message("t", b"x"))
        with pytest.raises(ConfigurationError, match="check_after_s"):
            async with mq.transaction("t", b"x", check_after_s=-1):
                pass
    assert cluster.brokers["broker-a"].core.store.queue_offsets("RMQ_SYS_TRANS_HALF_TOPIC", 0) == (
        0, 0,
    )  # fmt: skip


async def test_what_the_broker_refuses_does_not_begin(empty_cluster):
    empty_cluster.start_broker(rejectTransactionMessage="true")
    begun = False
    async with Sluice(empty_cluster.addresses) as mq:
        with pytest.raises(RequestError, match="rejectTransactionMessage"):
            async with mq.transaction("t", b"x"):
                begun = True
    assert not begun


async def test_a_commit_that_the_broker_never_hears_is_asked_about(empty_cluster):
    """The broker restarts between half and commit: the commit fails, the check brings it."""
    port = empty_cluster.start_broker(**QUICK).port
    async with Sluice(empty_cluster.addresses) as mq:
        async with mq.transaction("t", b"late") as tx:
            await asyncio.to_thread(empty_cluster.stop_broker)
        assert (tx.state, tx.is_acknowledged) == (COMMIT, False)
        await asyncio.to_thread(empty_cluster.start_broker, port=port, **QUICK)
        await asyncio.to_thread(wait_for, lambda: stored(empty_cluster) == ["late"])


# --- blocking


def test_the_blocking_block_commits_and_rolls_back(cluster):
    with Producer(cluster.addresses, group="G") as producer:
        with producer.transaction("t", b"good") as tx:
            assert stored(cluster) == []
        assert (tx.state, tx.is_acknowledged) == (COMMIT, True)
        with pytest.raises(KeyError), producer.transaction("t", b"bad"):
            raise KeyError("local transaction")
        assert stored(cluster) == ["good"]


def test_the_blocking_listener_executes_and_is_asked(quick):
    ledger = Ledger()
    with Producer(quick.addresses, group="G", listener=ledger) as producer:
        results = [
            producer.send_in_transaction(Message("t", state.name.encode()), state)
            for state in (COMMIT, ROLLBACK, UNKNOWN)
        ]
        assert [result.state for result in results] == [COMMIT, ROLLBACK, UNKNOWN]
        wait_for(lambda: stored(quick) == ["COMMIT", "UNKNOWN"])
    assert ledger.checked == ["UNKNOWN"]


def test_a_blocking_producer_without_transactions_has_no_thread(cluster):
    def ours():  # servers and libraries may begin and end threads of theirs meanwhile
        return {it for it in threading.enumerate() if it.name.startswith("sluicemq")}

    before = ours()
    with Producer(cluster.addresses) as producer:
        producer.send("t", b"plain")
        assert ours() <= before


# --- RocketMQ's names


class Migrant(MigrantListener):
    def __init__(self) -> None:
        self.ids: list[str | None] = []
        self.checked: list[tuple[str, str, str | None]] = []

    def execute_local_transaction(self, message, arg):
        self.ids.append(message.transaction_id)
        if arg == "raise":
            raise ValueError(arg)
        return arg

    def check_local_transaction(self, message):
        self.checked.append((message.transaction_id, message.topic, message.tags))
        return LocalTransactionState.COMMIT_MESSAGE


def test_rocketmq_s_own_names_work(quick):
    listener = Migrant()
    producer = TransactionMQProducer("G", namesrv_addr=";".join(quick.addresses))
    with pytest.raises(ConfigurationError, match="set_transaction_listener"):
        producer.start()
    producer.set_transaction_listener(listener)
    with producer:
        results = [
            producer.send_message_in_transaction(MigrantMessage("t", body, tags="TagA"), arg)
            for body, arg in (
                (b"commit", LocalTransactionState.COMMIT_MESSAGE),
                (b"rollback", LocalTransactionState.ROLLBACK_MESSAGE),
                (b"unknown", LocalTransactionState.UNKNOW),
                (b"raises", "raise"),
            )
        ]
        assert [result.local_transaction_state.name for result in results] == [
            "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW", "UNKNOW",
        ]  # fmt: skip
        assert listener.ids == [result.transaction_id for result in results]
        wait_for(lambda: stored(quick) == ["commit", "raises", "unknown"])
    expected = {(results[index].transaction_id, "t", "TagA") for index in (2, 3)}
    assert set(listener.checked) == expected


# --- by hand


async def test_a_block_hears_that_its_transaction_was_decided_otherwise_meanwhile(cluster):
    async with Sluice(cluster.addresses) as mq, AsyncExitStack() as stack:
        tx = await stack.enter_async_context(mq.transaction("t", b"too late"))
        with Admin(cluster.addresses) as admin:
            assert admin.resolve_transaction(tx.transaction_id, ROLLBACK) is not None
        with pytest.raises(RequestError, match="was rolled back before"):
            await stack.aclose()
        assert not tx.is_acknowledged
    assert await asyncio.to_thread(stored, cluster) == []


def test_undecided_transactions_are_listed_and_decided_by_hand(cluster):
    def sluice(*arguments: str):
        environment = {"NAMESRV_ADDR": ";".join(cluster.addresses), "COLUMNS": "250"}
        return CliRunner().invoke(main, ["transaction", *arguments], env=environment)

    assert sluice("list").output == "There are no open transactions.\n"
    ids = []
    with Producer(cluster.addresses, group="G") as producer:
        for body in (b"one", b"two", b"three"):
            with producer.transaction("t", body, keys="order-7") as tx:
                tx.unknown()
            ids.append(tx.transaction_id)
    listed = [json.loads(line) for line in sluice("list", "--json").stdout.splitlines()]
    assert [record["id"] for record in listed] == ids
    assert {(r["group"], r["topic"], r["keys"], r["checks"]) for r in listed} == {
        ("G", "t", "order-7", 0)
    }
    assert all(0 <= record["age_s"] < 60 for record in listed)
    assert ids[0] in sluice("list", "--group", "G").output
    assert ids[0] not in sluice("list", "--group", "H").output
    assert sluice("resolve", ids[0], "--commit").exit_code == 0
    assert sluice("resolve", ids[1], "--rollback").exit_code == 0
    again = sluice("resolve", ids[0], "--commit")
    assert (again.exit_code, "no broker has" in again.stderr) == (1, True)
    assert sluice("resolve", ids[2]).exit_code == 2
    assert stored(cluster) == ["one"]
    left = [json.loads(line)["id"] for line in sluice("list", "--json").stdout.splitlines()]
    assert left == ids[2:]
