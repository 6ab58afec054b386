"""Which messages have had their effects: a table beside the effects, in the same database.

    BEGIN; INSERT consumer, topic, key, or nothing when that is there; the handler's work; COMMIT

RocketMQ delivers at least once. A row that is written in the transaction of the work makes the
effects exactly once: before the commit there is neither, after it the row turns every further
delivery away. Two deliveries at the same time meet at the row: the database lets the second insert
wait until the first transaction has ended. So there is no state here but the table, and processes
may share it.

How "insert or nothing" is said: SQLite and PostgreSQL ON CONFLICT DO NOTHING, MySQL and MariaDB
INSERT IGNORE. Comparison has to be exact, as a key taken for another one loses a message: MySQL
gets a binary collation, and what databases do not keep apart (spaces at the end, NUL) or is longer
than the column stands there as its SHA-256.

SQLite has one writer at a time, and its waiting is unfair: here the threads (or tasks) of a process
wait in line for it. A file of ours is in WAL mode and waits 30 s for other processes.

The database is an engine of SQLAlchemy, or a path (SQLite) or URL from which one is made. A URL
without a driver gets the one that the extra `sql` and the database's usual package bring: psycopg
for PostgreSQL (blocking and asyncio), PyMySQL or aiomysql for MySQL.

`sqlalchemy` is an extra of its own (`sql`): this module is loaded by who uses it.
"""

import asyncio
import contextlib
import hashlib
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Generic, TypedDict, TypeVar, Unpack

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ConfigurationError

SQLITE_WAIT_S: Final = 30
_ASYNC_DRIVERS: Final = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+aiomysql",
    "mariadb": "mariadb+aiomysql",
}
_DRIVERS: Final = {
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
Database = str | Path | sa.URL
E = TypeVar("E", sa.Engine, AsyncEngine)


def make_blocking_engine(database: Database) -> sa.Engine:
    """An engine for a path or URL. Raises ConfigurationError."""
    url = _parse_database_url(database, _DRIVERS)
    with _explain_engine_errors(url):
        if url.get_backend_name() != "sqlite":
            return sa.create_engine(url, pool_pre_ping=True)
        engine = sa.create_engine(url, connect_args={"timeout": SQLITE_WAIT_S})
        sa.event.listen(engine, "connect", _enable_write_ahead_log)
        return engine


def make_asyncio_engine(database: Database) -> AsyncEngine:
    """The same for asyncio. SQLite opens a connection for each transaction: an idle one would hold
    a thread, and belong to one event loop."""
    url = _parse_database_url(database, _ASYNC_DRIVERS)
    with _explain_engine_errors(url):
        if url.get_backend_name() != "sqlite":
            return create_async_engine(url, pool_pre_ping=True)
        engine = create_async_engine(
            url, connect_args={"timeout": SQLITE_WAIT_S}, poolclass=NullPool
        )
        sa.event.listen(engine.sync_engine, "connect", _enable_write_ahead_log)
        return engine


def _parse_database_url(database: Database, drivers: dict[str, str]) -> sa.URL:
    if isinstance(database, str) and "://" in database:
        try:
            url = sa.make_url(database)
        except (sa.exc.ArgumentError, ValueError) as error:
            raise ConfigurationError(
                f"the database URL cannot be read: {error}.", fix="postgresql://user@host/name"
            ) from None
    elif isinstance(database, sa.URL):
        url = database
    elif isinstance(database, str | Path) and str(database):
        url = sa.URL.create("sqlite", database=str(database))
    else:
        raise ConfigurationError(
            f"{database!r} is no database.", fix="Give a path, a URL or a SQLAlchemy engine."
        )
    backend = url.get_backend_name()
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigurationError(
            "a SQLite database in memory forgets what was consumed.", fix="Give a path of a file."
        )
    return url.set(drivername=drivers[backend]) if url.drivername in drivers else url


@contextlib.contextmanager
def _explain_engine_errors(url: sa.URL) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"the driver for {url.drivername!r} is not installed: {error}.",
            fix="Install it (the extra sql brings those for SQLite), or give an engine that uses "
            "another driver.",
        ) from error
    except sa.exc.SQLAlchemyError as error:
        raise ConfigurationError(
            f"{url.render_as_string(hide_password=True)} is no database for this handler: {error}."
        ) from error


def _enable_write_ahead_log(connection: Any, _: object) -> None:
    """WAL: readers and the writer do not wait for each other. The mode belongs to the file: while
    another process sets it, or writes in the former mode, SQLite refuses at once, without waiting.
    """
    cursor = connection.cursor()
    with contextlib.suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


_log = logging.getLogger("sluicemq.client")

DEFAULT_TABLE: Final = "sluicemq_consumed"
DEFAULT_KEEP: Final = timedelta(days=30)
CLEAN_EVERY_S: Final = 3600.0
KEY_CHARACTERS_MAX: Final = 255
_TOPIC_CHARACTERS_MAX: Final = 127
_INSERT_IGNORE_DIALECTS: Final = frozenset({"mysql", "mariadb"})
_INSERT_FUNCTIONS: Final[dict[str, Callable[[sa.Table], sqlite.Insert | postgresql.Insert]]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def consumed_table(metadata: sa.MetaData, name: str = DEFAULT_TABLE) -> sa.Table:
    """The table in your own metadata, for a project that keeps its schema by migrations."""

    def text(length: int) -> sa.types.TypeEngine[str]:
        exact = mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin")
        return sa.String(length).with_variant(exact, "mysql", "mariadb")

    return sa.Table(
        name,
        metadata,
        sa.Column("consumer", text(KEY_CHARACTERS_MAX), primary_key=True),
        sa.Column("topic", text(_TOPIC_CHARACTERS_MAX), primary_key=True),
        sa.Column("message_key", text(KEY_CHARACTERS_MAX), primary_key=True),
        sa.Column("consumed_ms", sa.BigInteger, nullable=False),
        sa.Index(f"{name}_by_time", "consumed_ms"),
    )


def to_exact_key(text: str, length_max: int = KEY_CHARACTERS_MAX) -> str:
    """What stands in a column for a text: itself, or its SHA-256 (see the module)."""
    if len(text) <= length_max and text == text.strip() and "\0" not in text:
        return text
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


class _Statements:
    """What is said to the database, for one dialect. Raises ConfigurationError for an unknown
    one."""

    def __init__(
        self, dialect: str, table: str, keep: timedelta | None, create: bool, clock: Clock
    ) -> None:
        if dialect not in _INSERT_FUNCTIONS and dialect not in _INSERT_IGNORE_DIALECTS:
            raise ConfigurationError(
                f"idempotent consuming does not know the database {dialect!r}.",
                fix="Use SQLite, PostgreSQL, MySQL or MariaDB.",
            )
        if keep is not None and keep <= timedelta(0):
            raise ConfigurationError(
                f"keep is {keep}: no key would be kept.",
                fix="Use a timedelta above zero, or None.",
            )
        self.metadata = sa.MetaData()
        self.table = consumed_table(self.metadata, table)
        self.dialect = dialect
        self._create = create
        self._keep = keep
        self._clock = clock
        self._clean_s = clock.monotonic_s() + CLEAN_EVERY_S

    def insert(self, consumer: str, topic: str, key: str) -> sa.Insert:
        """Leaves a row that is there as it is."""
        row = {
            "consumer": to_exact_key(consumer),
            "topic": to_exact_key(topic, _TOPIC_CHARACTERS_MAX),
            "message_key": to_exact_key(key),
            "consumed_ms": self._clock.now_ms(),
        }
        statement: sa.Insert = (
            mysql.insert(self.table).prefix_with("IGNORE").values(row)
            if self.dialect in _INSERT_IGNORE_DIALECTS
            else _INSERT_FUNCTIONS[self.dialect](self.table).values(row).on_conflict_do_nothing()
        )
        return statement.execution_options(preserve_rowcount=True)  # else an insert may not have it

    def claim(self, connection: sa.Connection, consumer: str, topic: str, key: str) -> bool:
        """Whether the row went in. Raises ConfigurationError for a driver that does not say so: no
        answer must be taken for "was there before", which would lose the message."""
        count = connection.execute(self.insert(consumer, topic, key)).rowcount
        if count not in (0, 1):
            raise ConfigurationError(
                f"the database driver says that {count} rows were inserted, not 0 or 1.",
                fix="Use another driver: psycopg, sqlite3, PyMySQL.",
            )
        return count == 1

    def clean(self, connection: sa.Connection, older_than: timedelta | None) -> int:
        """Forgets old keys, unless they are kept for ever; how many."""
        age = older_than if older_than is not None else self._keep
        if age is None:
            return 0
        end_ms = self._clock.now_ms() - round(age.total_seconds() * 1000)
        statement = sa.delete(self.table).where(self.table.c.consumed_ms < end_ms)
        return connection.execute(statement).rowcount

    @property
    def is_cleaning_due(self) -> bool:
        """Whether it is time; then not for a while."""
        now_s = self._clock.monotonic_s()
        if self._keep is None or now_s < self._clean_s:
            return False
        self._clean_s = now_s + CLEAN_EVERY_S
        return True

    def create_table(self, connection: sa.Connection) -> None:
        """Makes the table. Raises ConfigurationError for a connection without transactions."""
        is_loose = getattr(connection.dialect, "detect_autocommit_setting", lambda _: False)
        if is_loose(connection.connection.dbapi_connection):
            raise ConfigurationError(
                "the engine commits every statement by itself (AUTOCOMMIT): a key and the work "
                "for it could not be one transaction.",
                fix="Give an engine with the isolation level of its database.",
            )
        if self._create:
            self.metadata.create_all(connection)

    def has_table(self, connection: sa.Connection) -> bool:
        return sa.inspect(connection).has_table(self.table.name)


class LedgerOptions(TypedDict, total=False):
    """What a ledger may be told beside its database."""

    table: str
    keep: timedelta | None
    create: bool
    clock: Clock


class _Ledger(Generic[E]):
    """What both ledgers are made of: an engine, the statements of its dialect, a line."""

    def __init__(
        self,
        engine: E,
        lock: Callable[[], Any],
        *,
        table: str = DEFAULT_TABLE,
        keep: timedelta | None = DEFAULT_KEEP,
        create: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.engine: E = engine
        dialect = engine.dialect.name
        self._statements = _Statements(dialect, table, keep, create, clock)
        self._is_ready = False
        self._prepare_lock = lock()
        # Where the transactions of this process wait for their turn.
        self._sqlite_lock = lock() if dialect == "sqlite" else contextlib.nullcontext()


class Ledger(_Ledger[sa.Engine]):
    """The table for handlers that are plain functions.

    `database`: a path (SQLite), a URL or an `Engine`. `table`: its name, made when it is not there
    unless `create` is False. `keep`: how long keys are remembered; None for ever. Safe to share
    between threads. Raises ConfigurationError for what cannot be a database.
    """

    def __init__(self, database: Database | sa.Engine, **options: Unpack[LedgerOptions]) -> None:
        engine = database if isinstance(database, sa.Engine) else make_blocking_engine(database)
        super().__init__(engine, threading.Lock, **options)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A connection in a transaction: committed at the end of the block, rolled back when it
        raises. For a handler's work beside `claim`."""
        self._prepare()
        with (
            self._sqlite_lock,
            self.engine.begin() as connection,
            _expect_open_transaction(connection),
        ):
            yield connection
        if self._statements.is_cleaning_due:
            with _log_clean_failure():
                self.clean()

    def claim(self, connection: sa.Connection, consumer: str, topic: str, key: str) -> bool:
        """Whether this key is new to the consumer: then it is noted, in the transaction of the
        connection. Waits while another transaction that has noted it is open."""
        return self._statements.claim(connection, consumer, topic, key)

    def clean(self, older_than: timedelta | None = None) -> int:
        """Forgets keys that are older than `keep` (or the age given); how many. Happens by itself
        about once an hour."""
        self._prepare()
        with self._sqlite_lock, self.engine.begin() as connection:
            return self._statements.clean(connection, older_than)

    def close(self) -> None:
        """Closes the engine's idle connections."""
        self.engine.dispose()

    def _prepare(self) -> None:
        if self._is_ready:
            return
        with self._prepare_lock:
            try:
                with self.engine.begin() as connection:
                    self._statements.create_table(connection)
            except sa.exc.DBAPIError:  # another process may have been faster
                with self.engine.connect() as connection:
                    if not self._statements.has_table(connection):
                        raise
            self._is_ready = True


class AsyncLedger(_Ledger[AsyncEngine]):
    """The table for handlers that are coroutine functions; otherwise as `Ledger`, with an
    `AsyncEngine`."""

    def __init__(self, database: Database | AsyncEngine, **options: Unpack[LedgerOptions]) -> None:
        engine = database if isinstance(database, AsyncEngine) else make_asyncio_engine(database)
        super().__init__(engine, asyncio.Lock, **options)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """As `Ledger.transaction`."""
        await self._prepare()
        async with self._sqlite_lock, self.engine.begin() as connection:
            with _expect_open_transaction(connection.sync_connection):
                yield connection
        if self._statements.is_cleaning_due:
            with _log_clean_failure():
                await self.clean()

    async def claim(self, connection: AsyncConnection, consumer: str, topic: str, key: str) -> bool:
        """As `Ledger.claim`."""
        return await connection.run_sync(self._statements.claim, consumer, topic, key)

    async def clean(self, older_than: timedelta | None = None) -> int:
        """As `Ledger.clean`."""
        await self._prepare()
        async with self._sqlite_lock, self.engine.begin() as connection:
            return await connection.run_sync(self._statements.clean, older_than)

    async def close(self) -> None:
        """Closes the engine's idle connections."""
        await self.engine.dispose()

    async def _prepare(self) -> None:
        if self._is_ready:
            return
        async with self._prepare_lock:
            try:
                async with self.engine.begin() as connection:
                    await connection.run_sync(self._statements.create_table)
            except sa.exc.DBAPIError:  # another process may have been faster
                async with self.engine.connect() as connection:
                    if not await connection.run_sync(self._statements.has_table):
                        raise
            self._is_ready = True


LEDGER_KINDS: Final = ((AsyncLedger, AsyncEngine), (Ledger, sa.Engine))
"""For coroutine functions, for plain functions: the ledger and the engine."""


@contextlib.contextmanager
def _log_clean_failure() -> Iterator[None]:
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        _log.warning("old keys of consumed messages could not be removed: %s", error)


@contextlib.contextmanager
def _expect_open_transaction(connection: sa.Connection | None) -> Iterator[None]:
    """Raises ConfigurationError when a handler has ended the transaction that is not its own; a
    handler that fails beside that has its error, and this one is logged."""
    assert connection is not None
    transaction = connection.get_transaction()
    try:
        yield
    except Exception:
        if transaction is None or not transaction.is_active:
            _log.error("%s", _transaction_ended_error())
        raise
    if transaction is None or not transaction.is_active:
        raise _transaction_ended_error()


def _transaction_ended_error() -> ConfigurationError:
    return ConfigurationError(
        "the handler has ended the transaction of its message itself: its effects are no longer "
        "exactly once.",
        fix="Do not call commit or rollback on the connection; raise to roll back.",
    )
