"""Record which messages have had their effects, in a table of the same database.

    BEGIN; INSERT consumer, topic, key, or nothing if the row exists; the handler's work; COMMIT

RocketMQ delivers at least once. A row that is written in the transaction of the work makes its
effects happen exactly once: before the commit there is neither row nor effect, after it the row
makes every further delivery be skipped. If a message is delivered twice at the same time, both
transactions insert the same row, and the database makes the second insert wait until the first
transaction has ended. So the table is the only state, and several processes may share it.

SQLite and PostgreSQL insert with ON CONFLICT DO NOTHING, MySQL and MariaDB with INSERT IGNORE. Keys
must be compared exactly, because a key that is mistaken for another one loses a message. So MySQL
gets a binary collation, and a text that databases may not distinguish (spaces at the end, NUL) or
that is longer than the column is stored as its SHA-256.

SQLite allows one writer at a time, and its waiting is unfair: the threads (or tasks) of one process
therefore take turns by a lock. The file is in WAL mode, and a connection waits `SQLITE_WAIT_S` for
other processes.

The database is a SQLAlchemy engine, or a path (SQLite) or URL from which one is created. A URL
without a driver gets the driver that the extra `sql` or the usual package of the database installs:
psycopg for PostgreSQL (blocking and asyncio), PyMySQL or aiomysql for MySQL.

SQLAlchemy belongs to the extra `sql`, so this module is only imported where it is used.
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
"""How many seconds a SQLite connection waits for a lock of another process."""
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
    """Create a SQLAlchemy engine for a path (SQLite) or a URL.

    Raises ConfigurationError if that is impossible, for example because the driver is missing.
    """
    url = _parse_database_url(database, _DRIVERS)
    with _explain_engine_errors(url):
        if url.get_backend_name() != "sqlite":
            return sa.create_engine(url, pool_pre_ping=True)
        engine = sa.create_engine(url, connect_args={"timeout": SQLITE_WAIT_S})
        sa.event.listen(engine, "connect", _enable_write_ahead_log)
        return engine


def make_asyncio_engine(database: Database) -> AsyncEngine:
    """Create an asyncio engine for a path (SQLite) or a URL.

    A SQLite engine opens a connection for each transaction, because an idle connection would occupy
    a thread and belong to one event loop. Raises ConfigurationError if that is impossible.
    """
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
    """Return a path or URL as a SQLAlchemy URL with a driver.

    A path means SQLite. A URL without a driver gets the one of its database in `drivers`. Raises
    ConfigurationError for anything else, and for a SQLite database in memory.
    """
    if isinstance(database, str) and "://" in database:
        try:
            url = sa.make_url(database)
        except (sa.exc.ArgumentError, ValueError) as error:
            raise ConfigurationError(
                f"the database URL is not valid: {error}.",
                fix="Use a URL such as postgresql://user@host/name.",
            ) from None
    elif isinstance(database, sa.URL):
        url = database
    elif isinstance(database, str | Path) and str(database):
        url = sa.URL.create("sqlite", database=str(database))
    else:
        raise ConfigurationError(
            f"the database must be a path, a URL or an engine, got {database!r}.",
            fix="Pass a path, a URL or a SQLAlchemy engine.",
        )
    backend = url.get_backend_name()
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigurationError(
            "a SQLite database in memory loses what was consumed.", fix="Pass the path of a file."
        )
    has_no_driver = url.drivername in drivers  # such as "postgresql", not "postgresql+psycopg"
    return url.set(drivername=drivers[backend]) if has_no_driver else url


@contextlib.contextmanager
def _explain_engine_errors(url: sa.URL) -> Iterator[None]:
    """Return a context manager that converts errors of making an engine to ConfigurationError."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"the driver for {url.drivername!r} is not installed: {error}.",
            fix="Install it (the extra sql installs those for SQLite), or pass an engine with "
            "another driver.",
        ) from error
    except sa.exc.SQLAlchemyError as error:
        raise ConfigurationError(
            f"{url.render_as_string(hide_password=True)} cannot be used by this handler: {error}."
        ) from error


def _enable_write_ahead_log(connection: Any, _: object) -> None:
    """Switch a SQLite database to WAL mode, in which readers do not block the writer.

    It is called with each new connection, and the mode belongs to the file. While another process
    sets it, or writes in the old mode, SQLite refuses at once; that error is ignored.
    """
    cursor = connection.cursor()
    with contextlib.suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


_log = logging.getLogger("sluicemq.client")

DEFAULT_TABLE: Final = "sluicemq_consumed"
"""The name of the table."""
DEFAULT_KEEP: Final = timedelta(days=30)
"""How long keys are kept."""
CLEAN_EVERY_S: Final = 3600.0
"""The interval in seconds at which a ledger removes old keys."""
KEY_CHARACTERS_MAX: Final = 255
_TOPIC_CHARACTERS_MAX: Final = 127
_INSERT_IGNORE_DIALECTS: Final = frozenset({"mysql", "mariadb"})
_INSERT_FUNCTIONS: Final[dict[str, Callable[[sa.Table], sqlite.Insert | postgresql.Insert]]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
"""The insert statement with ON CONFLICT of each dialect that has one."""


def consumed_table(metadata: sa.MetaData, name: str = DEFAULT_TABLE) -> sa.Table:
    """Add the table of consumed messages to `metadata`, and return it.

    This is for applications that create their tables with schema migrations.
    """

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


def to_exact_key(key: str, length_max: int = KEY_CHARACTERS_MAX) -> str:
    """Return what a column stores for a text: the text itself, or its SHA-256.

    A text is hashed if it is longer than `length_max`, begins or ends with white space, or contains
    NUL (see the module docstring).
    """
    if len(key) <= length_max and key == key.strip() and "\0" not in key:
        return key
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


class _Statements:
    """The SQL statements of a ledger in one dialect.

    Raises ConfigurationError for an unknown dialect and for a `keep` that is not positive.
    """

    def __init__(
        self, dialect: str, table: str, keep: timedelta | None, create: bool, clock: Clock
    ) -> None:
        """Prepare the statements for a table in the SQL dialect `dialect`.

        Keys older than `keep` are removed; None keeps them forever. `create` says whether to create
        the table. Raises ConfigurationError for an unsupported database or a `keep` that is not
        positive.
        """
        if dialect not in _INSERT_FUNCTIONS and dialect not in _INSERT_IGNORE_DIALECTS:
            raise ConfigurationError(
                f"idempotent consuming does not support the database {dialect!r}.",
                fix="Use SQLite, PostgreSQL, MySQL or MariaDB.",
            )
        if keep is not None and keep <= timedelta(0):
            raise ConfigurationError(
                f"keep must be a positive timedelta, got {keep}.",
                fix="Use a timedelta above zero, or None to keep keys forever.",
            )
        self.metadata = sa.MetaData()
        self.table = consumed_table(self.metadata, table)
        self.dialect = dialect
        self._create = create
        self._keep = keep
        self._clock = clock
        self._clean_s = clock.monotonic_s() + CLEAN_EVERY_S

    def insert(self, consumer: str, topic: str, key: str) -> sa.Insert:
        """Return the statement that inserts a row for a message, unless there is one.

        The row has the consumer, the topic and the key of the message, and the present time. A text
        that a column cannot store exactly is replaced by its SHA-256.
        """
        row = {
            "consumer": to_exact_key(consumer),
            "topic": to_exact_key(topic, _TOPIC_CHARACTERS_MAX),
            "message_key": to_exact_key(key),
            "consumed_ms": self._clock.now_ms(),
        }
        statement: sa.Insert
        if self.dialect in _INSERT_IGNORE_DIALECTS:
            statement = mysql.insert(self.table).prefix_with("IGNORE").values(row)
        else:
            insert = _INSERT_FUNCTIONS[self.dialect]
            statement = insert(self.table).values(row).on_conflict_do_nothing()
        # Without this option an insert may have no rowcount.
        return statement.execution_options(preserve_rowcount=True)

    def claim(self, connection: sa.Connection, consumer: str, topic: str, key: str) -> bool:
        """Insert a row for a message, and return whether the message is new.

        Raises ConfigurationError if the driver does not report the number of inserted rows: to
        assume 0 would lose the message.
        """
        count = connection.execute(self.insert(consumer, topic, key)).rowcount
        if count not in (0, 1):
            raise ConfigurationError(
                f"the database driver reports {count} inserted rows, not 0 or 1.",
                fix="Use another driver: psycopg, sqlite3, PyMySQL.",
            )
        return count == 1

    def clean(self, connection: sa.Connection, older_than: timedelta | None) -> int:
        """Delete rows that are older than `older_than`, and return their number.

        None means the age `keep` of the constructor. If that is None too, nothing is deleted.
        """
        age = older_than if older_than is not None else self._keep
        if age is None:
            return 0
        end_ms = self._clock.now_ms() - round(age.total_seconds() * 1000)
        statement = sa.delete(self.table).where(self.table.c.consumed_ms < end_ms)
        return connection.execute(statement).rowcount

    @property
    def is_cleaning_due(self) -> bool:
        """Whether old rows must be deleted now.

        Reading True sets the time of the next cleaning, so the next read is False.
        """
        now_s = self._clock.monotonic_s()
        if self._keep is None or now_s < self._clean_s:
            return False
        self._clean_s = now_s + CLEAN_EVERY_S
        return True

    def create_table(self, connection: sa.Connection) -> None:
        """Create the table if it is missing, unless `create` is False.

        Raises ConfigurationError if the connection commits every statement by itself, because a key
        and the handler's work could then not be one transaction.
        """
        # A dialect without this function counts as not in autocommit mode.
        is_autocommit = getattr(connection.dialect, "detect_autocommit_setting", lambda _: False)
        if is_autocommit(connection.connection.dbapi_connection):
            raise ConfigurationError(
                "the engine commits every statement by itself (AUTOCOMMIT): a key and the work "
                "for it could not be one transaction.",
                fix="Pass an engine with the default isolation level of its database.",
            )
        if self._create:
            self.metadata.create_all(connection)

    def has_table(self, connection: sa.Connection) -> bool:
        """Return whether the table exists."""
        return sa.inspect(connection).has_table(self.table.name)


class LedgerOptions(TypedDict, total=False):
    """The options of a ledger besides its database; see `Ledger`."""

    table: str
    keep: timedelta | None
    create: bool
    clock: Clock


class _Ledger(Generic[E]):
    """The common part of both ledgers: an engine and the statements of its dialect.

    `lock` creates a lock of threads or of asyncio.
    """

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
        """Prepare a ledger in the database of `engine`; the table is created at the first use.

        `lock()` makes a lock. Keys older than `keep` are removed; None keeps them forever. `create`
        False means that the application has created the table.
        """
        self.engine: E = engine
        dialect = engine.dialect.name
        self._statements = _Statements(dialect, table, keep, create, clock)
        self._is_ready = False
        self._prepare_lock = lock()
        # SQLite has one writer: the transactions of this process take turns.
        self._sqlite_lock = lock() if dialect == "sqlite" else contextlib.nullcontext()


class Ledger(_Ledger[sa.Engine]):
    """The table of consumed messages, for handlers that are plain functions.

    `database` is a path (SQLite), a URL or an `Engine`. `table` is the name of the table, which is
    created if it does not exist, unless `create` is False. `keep` is how long keys are kept; None
    means forever. Safe to share between threads. Raises ConfigurationError for an invalid database
    or option.
    """

    def __init__(self, database: Database | sa.Engine, **options: Unpack[LedgerOptions]) -> None:
        engine = database if isinstance(database, sa.Engine) else make_blocking_engine(database)
        super().__init__(engine, threading.Lock, **options)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Return a context manager for a connection in a transaction.

        The transaction is committed at the end of the block, and rolled back if the block raises.
        The block calls `claim` and does the handler's work. Raises ConfigurationError if the block
        itself ends the transaction.
        """
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
        """Insert a key in the connection's transaction. Return whether it is new for the consumer.

        Waits while another open transaction has inserted the same key.
        """
        return self._statements.claim(connection, consumer, topic, key)

    def clean(self, older_than: timedelta | None = None) -> int:
        """Delete keys that are older than `keep`, or than `older_than`.

        Return how many were deleted. `transaction` does that itself about once an hour.
        """
        self._prepare()
        with self._sqlite_lock, self.engine.begin() as connection:
            return self._statements.clean(connection, older_than)

    def close(self) -> None:
        """Close the engine's idle connections."""
        self.engine.dispose()

    def _prepare(self) -> None:
        """Create the table if it is missing, at the first call only."""
        if self._is_ready:
            return
        with self._prepare_lock:
            try:
                with self.engine.begin() as connection:
                    self._statements.create_table(connection)
            except sa.exc.DBAPIError:  # another process may have created it meanwhile
                with self.engine.connect() as connection:
                    if not self._statements.has_table(connection):
                        raise
            self._is_ready = True


class AsyncLedger(_Ledger[AsyncEngine]):
    """The table of consumed messages, for handlers that are coroutine functions.

    Like `Ledger`, with an `AsyncEngine`.
    """

    def __init__(self, database: Database | AsyncEngine, **options: Unpack[LedgerOptions]) -> None:
        engine = database if isinstance(database, AsyncEngine) else make_asyncio_engine(database)
        super().__init__(engine, asyncio.Lock, **options)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Return an async context manager for a connection in a transaction.

        The transaction is committed at the end of the block, and rolled back if the block raises.
        Raises ConfigurationError if the block itself ends the transaction.
        """
        await self._prepare()
        async with self._sqlite_lock, self.engine.begin() as connection:
            with _expect_open_transaction(connection.sync_connection):
                yield connection
        if self._statements.is_cleaning_due:
            with _log_clean_failure():
                await self.clean()

    async def claim(self, connection: AsyncConnection, consumer: str, topic: str, key: str) -> bool:
        """Insert a key and return whether it is new; see `Ledger.claim`."""
        return await connection.run_sync(self._statements.claim, consumer, topic, key)

    async def clean(self, older_than: timedelta | None = None) -> int:
        """Delete old keys and return how many were deleted; see `Ledger.clean`."""
        await self._prepare()
        async with self._sqlite_lock, self.engine.begin() as connection:
            return await connection.run_sync(self._statements.clean, older_than)

    async def close(self) -> None:
        """Close the engine's idle connections."""
        await self.engine.dispose()

    async def _prepare(self) -> None:
        """Create the table if it is missing, at the first call only."""
        if self._is_ready:
            return
        async with self._prepare_lock:
            try:
                async with self.engine.begin() as connection:
                    await connection.run_sync(self._statements.create_table)
            except sa.exc.DBAPIError:  # another process may have created it meanwhile
                async with self.engine.connect() as connection:
                    if not await connection.run_sync(self._statements.has_table):
                        raise
            self._is_ready = True


LEDGER_KINDS: Final = ((AsyncLedger, AsyncEngine), (Ledger, sa.Engine))
"""The ledger and the engine for coroutine functions, and for plain functions."""


@contextlib.contextmanager
def _log_clean_failure() -> Iterator[None]:
    """Return a context manager that logs a database error of removing old keys."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        _log.warning("cannot remove old keys of consumed messages: %s", error)


@contextlib.contextmanager
def _expect_open_transaction(connection: sa.Connection | None) -> Iterator[None]:
    """Return a context manager that raises an error if its block ends the transaction.

    The error is a ConfigurationError. If the block raises an exception too, that one is raised and
    the ConfigurationError is only logged.
    """
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
    """Return the error for a handler that ended the transaction of its message."""
    return ConfigurationError(
        "the handler ended the transaction of its message itself, so its effects are no longer "
        "exactly once.",
        fix="Do not call commit or rollback on the connection; raise to roll back.",
    )
