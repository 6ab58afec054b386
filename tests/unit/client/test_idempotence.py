"""`@idempotent` and its ledger on SQLite; with a broker: tests/integration/idempotence."""

import asyncio
import logging
import sqlite3
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.ext.asyncio import create_async_engine

import sluicemq.client
from sluicemq import ConfigurationError, MessageKeyMissingError, idempotent
from sluicemq.client.idempotence import message_key
from sluicemq.client.ledger import (
    AsyncLedger,
    Ledger,
    _Statements,
    consumed_table,
    make_blocking_engine,
    to_exact_key,
)
from sluicemq.clock import SYSTEM_CLOCK
from waiting import limit

metadata = sa.MetaData()
effects = sa.Table("effects", metadata, sa.Column("text", sa.String))


@dataclass
class Received:
    """As much of a message as is looked at."""

    message_id: str = "id-1"
    group: str = "billing"
    topic: str = "orders"
    body: bytes = b"1"
    properties: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "effects.db"
    engine = sa.create_engine(f"sqlite:///{found}", poolclass=sa.NullPool)
    metadata.create_all(engine)
    return found


def texts(path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [text for (text,) in connection.execute("SELECT text FROM effects ORDER BY text")]
    finally:
        connection.close()


@pytest.fixture
def ledger(path):
    found = Ledger(path)
    yield found
    found.close()


def write(connection: sa.Connection, text: str) -> None:
    connection.execute(sa.insert(effects).values(text=text))


# ---- what a handler sees


def test_a_message_that_comes_again_is_acknowledged_without_a_call(ledger, path):
    @idempotent(ledger)
    def handle(message, connection):
        """Books."""
        write(connection, message.message_id)
        return "booked"

    assert handle(Received()) == "booked"
    assert handle(Received()) is None
    handle(Received("id-2"))
    assert texts(path) == ["id-1", "id-2"]
    assert (handle.__name__, handle.__doc__) == ("handle", "Books.")


async def test_a_coroutine_function_gets_an_asynchronous_connection(path):
    @idempotent(path)
    async def handle(message, connection):
        await connection.execute(sa.insert(effects).values(text=message.message_id))
        return "booked"

    assert asyncio.iscoroutinefunction(handle)
    assert await asyncio.gather(*(handle(Received()) for _ in range(5))) == [
        "booked", None, None, None, None
    ]  # fmt: skip
    assert texts(path) == ["id-1"]


def test_a_method_gets_its_object_too(ledger, path):
    class Booking:
        @idempotent(ledger)
        def handle(self, message, connection):
            write(connection, f"{type(self).__name__} {message.message_id}")

    Booking().handle(Received())
    assert texts(path) == ["Booking id-1"]


async def test_a_handler_of_batches_gets_those_that_are_new_in_one_transaction(path):
    got = []

    @idempotent(path, key="k")
    async def on_loop(messages, connection):
        got.append([message.message_id for message in messages])

    @idempotent(path, key="k")
    def blocking(messages, connection):
        got.append([message.message_id for message in messages])
        for message in messages:
            write(connection, message.message_id)
        if len(messages) > 1:
            raise ValueError("as a whole")

    def batch(*ids):
        return [Received(f"id-{index}", properties={"k": k}) for index, k in enumerate(ids)]

    with pytest.raises(ValueError, match="as a whole"):
        blocking(batch("b", "a"))
    assert texts(path) == []
    await on_loop(batch("b", "a", "b"))
    blocking(batch("a", "c", "b"))
    await on_loop(batch("c", "a"))
    assert got == [["id-0", "id-1"], ["id-0", "id-1"], ["id-1"]]
    assert texts(path) == ["id-1"]


def test_a_handler_that_raises_leaves_neither_effect_nor_key(ledger, path):
    attempts = []

    @idempotent(ledger)
    def handle(message, connection):
        write(connection, "effect")
        attempts.append(message)
        if len(attempts) == 1:
            raise KeyError("no such article")

    with pytest.raises(KeyError):
        handle(Received())
    assert texts(path) == []
    handle(Received())
    assert texts(path) == ["effect"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_handler_must_not_end_the_transaction_itself(ledger, end):
    @idempotent(ledger)
    def handle(message, connection):
        getattr(connection, end)()

    with pytest.raises(ConfigurationError, match=r"ended the transaction.*Do not call commit"):
        handle(Received())


def test_a_handler_that_commits_and_then_raises_has_its_own_error_and_a_line_in_the_log(
    ledger, caplog
):
    @idempotent(ledger)
    def handle(message, connection):
        connection.commit()
        raise KeyError("after")

    with pytest.raises(KeyError), caplog.at_level(logging.ERROR):
        handle(Received())
    assert "no longer exactly once" in caplog.text


def test_threads_with_the_same_message_at_once_do_its_work_once(ledger, path):
    begin = threading.Barrier(6)

    @idempotent(ledger)
    def handle(message, connection):
        write(connection, message.message_id)

    def deliver():
        begin.wait()
        for index in range(20):
            handle(Received(f"id-{index}"))

    threads = [threading.Thread(target=deliver) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(30))
    assert texts(path) == sorted(f"id-{index}" for index in range(20))


def test_ledgers_of_two_processes_make_the_table_at_the_same_time(path):
    ledgers = [Ledger(path) for _ in range(8)]
    begin = threading.Barrier(8)
    claimed = []

    def claim(ledger):
        begin.wait()
        with ledger.transaction() as connection:
            claimed.append(ledger.claim(connection, "c", "t", "k"))

    threads = [threading.Thread(target=claim, args=(one,)) for one in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(30))
    assert sorted(claimed) == [False] * 7 + [True]
    for one in ledgers:
        one.close()


def test_a_ledger_opens_while_another_process_writes_in_the_former_journal_mode(path):
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin immediate")
    other.execute("create table theirs (n)")
    engine = make_blocking_engine(path)
    with engine.connect() as connection:
        assert connection.execute(sa.text("select 1")).scalar() == 1
    engine.dispose()
    other.close()


# ---- keys


def test_the_key_is_the_producers_id_and_never_the_brokers():
    def id_of(message):
        return message_key(message).split(":")[0]

    assert id_of(Received("broker's", properties={"UNIQ_KEY": "producer's"})) == "producer's"
    retried = Received("broker's 2", properties={"ORIGIN_MESSAGE_ID": "broker's 1"})
    assert id_of(retried) == "broker's 1"
    assert id_of(Received("broker's")) == "broker's"


def test_messages_of_a_java_batch_that_share_the_id_of_the_batch_are_kept_apart():
    """What a broker of 5.3.3 makes of them (seen with its own client)."""
    one = Received(properties={"UNIQ_KEY": "batch"}, body=b"1")
    others = [
        Received(properties={"UNIQ_KEY": "batch"}, body=b"2"),
        Received(properties={"UNIQ_KEY": "batch", "TAGS": "A"}, body=b"1"),
        Received(properties={"UNIQ_KEY": "batch", "KEYS": "A"}, body=b"1"),
    ]
    assert len({message_key(message) for message in [one, *others]}) == 4
    again = Received("retried", properties={"UNIQ_KEY": "batch", "DELAY": "3"}, body=b"1")
    assert message_key(again) == message_key(one)


def test_the_key_may_be_a_property_or_a_function():
    message = Received(properties={"order_id": "7"})
    assert message_key(message, "order_id") == "7"
    assert message_key(message, lambda one: int(one.properties["order_id"]) * 2) == "14"


@pytest.mark.parametrize("key", ["order_id", lambda message: None, lambda message: ""])
def test_a_message_without_the_key_is_an_error(ledger, key):
    @idempotent(ledger, key=key)
    def handle(message, connection):
        raise AssertionError

    with pytest.raises(MessageKeyMissingError, match="consumed before"):
        handle(Received())


def test_groups_and_topics_have_keys_of_their_own_and_a_consumer_name_joins_groups(ledger, path):
    @idempotent(ledger, key="order_id")
    def handle(message, connection):
        write(connection, f"{message.group} {message.topic}")

    @idempotent(ledger, key="order_id", consumer="joint")
    def joint(message, connection):
        write(connection, "joint")

    for _ in range(2):
        for group in ("billing", "shipping"):
            for topic in ("orders", "payments"):
                handle(Received(group=group, topic=topic, properties={"order_id": "7"}))
            joint(Received(group=group, properties={"order_id": "7"}))
    assert texts(path) == [
        "billing orders", "billing payments", "joint", "shipping orders", "shipping payments"
    ]  # fmt: skip


def test_a_message_of_no_group_needs_a_consumer(ledger):
    @idempotent(ledger)
    def handle(message, connection):
        raise AssertionError

    with pytest.raises(ConfigurationError, match="consumer='…'"):
        handle(Received(group=""))


def test_keys_that_a_database_would_not_keep_apart_are_kept_apart():
    long = "x" * 256
    odd = ["a ", " a", "a\0", long, long + "y", "a\ud800"]
    kept = [to_exact_key(text) for text in odd]
    assert len(set(kept)) == len(odd)
    assert all(len(text) <= 255 for text in kept)
    assert to_exact_key("Order-7 Ä") == "Order-7 Ä"
    assert to_exact_key("x" * 255) == "x" * 255


# ---- the table


class Clock:
    def __init__(self):
        self.seconds = 1_000_000.0

    def now_ms(self):
        return round(self.seconds * 1000)

    def monotonic_s(self):
        return self.seconds


def ids(path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("SELECT message_key FROM sluicemq_consumed").fetchall()
        return sorted(key.split(":")[0] for (key,) in rows)
    finally:
        connection.close()


def test_old_keys_are_forgotten_about_once_an_hour(path):
    clock = Clock()
    ledger = Ledger(path, keep=timedelta(days=1), clock=clock)

    @idempotent(ledger)
    def handle(message, connection):
        pass

    handle(Received("old"))
    clock.seconds += 24 * 3600 - 1
    handle(Received("young"))  # cleans; a day has not passed
    assert ids(path) == ["old", "young"]
    clock.seconds += 1800
    handle(Received("half an hour later"))
    assert "old" in ids(path)
    clock.seconds += 1801
    handle(Received("an hour later"))
    assert "old" not in ids(path)
    assert "young" in ids(path)
    ledger.close()


async def test_old_keys_are_forgotten_on_request(path):
    clock = Clock()
    ledger = AsyncLedger(path, keep=None, clock=clock)
    async with ledger.transaction() as connection:
        assert await ledger.claim(connection, "c", "t", "k")
    clock.seconds += 10
    assert await ledger.clean() == 0
    assert await ledger.clean(timedelta(seconds=11)) == 0
    assert await ledger.clean(timedelta(seconds=9)) == 1
    async with ledger.transaction() as connection:
        assert await ledger.claim(connection, "c", "t", "k")
    await ledger.close()


def test_a_table_of_ones_own_migrations_is_used_and_not_made(path):
    ledger = Ledger(path, table="seen", create=False)
    missing = pytest.raises(sa.exc.OperationalError, match="no such table: seen")
    with missing, ledger.transaction() as connection:
        ledger.claim(connection, "c", "t", "k")
    mine = sa.MetaData()
    consumed_table(mine, "seen")
    mine.create_all(ledger.engine)
    with ledger.transaction() as connection:
        assert ledger.claim(connection, "c", "t", "k")
    ledger.close()


def test_mysql_ignores_and_compares_exactly():
    statements = _Statements("mysql", "seen", None, True, SYSTEM_CLOCK)
    said = str(statements.insert("c", "t", "k").compile(dialect=mysql.dialect()))
    assert said.startswith("INSERT IGNORE INTO seen")
    table = str(sa.schema.CreateTable(statements.table).compile(dialect=mysql.dialect()))
    assert table.count("COLLATE utf8mb4_bin") == 3
    plain = str(sa.schema.CreateTable(statements.table).compile(dialect=postgresql.dialect()))
    assert "COLLATE" not in plain


# ---- what cannot be


@pytest.mark.parametrize(
    ("database", "message"),
    [
        (":memory:", "loses"),
        ("sqlite://", "loses"),
        ("", "must be a path, a URL or an engine"),
        (7, "must be a path, a URL or an engine"),
        ("oracle+oracledb://host/name", "driver for 'oracle|does not know"),
        ("nosuch://host/name", "cannot be used"),
        ("://", "is not valid"),
    ],
)
def test_what_is_no_database_is_said_when_the_handler_is_defined(database, message):
    with pytest.raises(ConfigurationError, match=message):

        @idempotent(database)
        def handle(message, connection): ...


def test_a_database_of_another_kind_is_refused():
    with pytest.raises(ConfigurationError, match="does not support the database 'mssql'"):
        _Statements("mssql", "t", None, True, SYSTEM_CLOCK)


def test_handler_and_engine_have_to_be_of_one_kind(path):
    plain = sa.create_engine(f"sqlite:///{path}")
    asynchronous = create_async_engine(f"sqlite+aiosqlite:///{path}")
    with pytest.raises(ConfigurationError, match="needs an engine of create_async_engine"):

        @idempotent(plain)
        async def on_loop(message, connection): ...

    with pytest.raises(ConfigurationError, match="needs an engine of create_engine"):

        @idempotent(asynchronous)
        def blocking(message, connection): ...

    with pytest.raises(ConfigurationError, match="needs an engine of create_async_engine"):

        @idempotent(Ledger(plain))
        async def with_ledger(message, connection): ...


def test_an_engine_without_transactions_is_refused(path):
    engine = sa.create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")

    @idempotent(engine)
    def handle(message, connection): ...

    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        handle(Received())
    engine.dispose()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": ""}, "got ''"),
        ({"key": 7}, "got 7"),
        ({"keep": timedelta(0)}, "keep must be a positive timedelta, got 0:00:00"),
    ],
)
def test_wrong_options_are_said(path, options, message):
    with pytest.raises(ConfigurationError, match=message):

        @idempotent(path, **options)
        def handle(message, connection): ...


def test_options_belong_to_the_one_who_makes_the_ledger(ledger):
    with pytest.raises(ConfigurationError, match="where the ledger is created"):

        @idempotent(ledger, table="other")
        def handle(message, connection): ...


def test_without_sqlalchemy_the_extra_is_named(path, monkeypatch):
    monkeypatch.delitem(sys.modules, "sluicemq.client.ledger")
    monkeypatch.delattr(sluicemq.client, "ledger")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[sql\]'"):

        @idempotent(path)
        def handle(message, connection): ...
