"""The database engine of an idempotent handler, made from a path or a URL.

A path is SQLite. A URL without a driver gets the one that the extra `sql` and the database's usual
package bring: psycopg for PostgreSQL (blocking and asyncio), PyMySQL or aiomysql for MySQL.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

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


def blocking_engine(database: Database) -> sa.Engine:
    """An engine for a path or URL. Raises ConfigurationError."""
    url = _url(database, _DRIVERS)
    with _made_clear(url):
        if url.get_backend_name() != "sqlite":
            return sa.create_engine(url, pool_pre_ping=True)
        engine = sa.create_engine(url, connect_args={"timeout": SQLITE_WAIT_S})
        sa.event.listen(engine, "connect", _write_ahead)
        return engine


def async_engine(database: Database) -> AsyncEngine:
    """The same for asyncio. SQLite opens a connection for each transaction: an idle one would hold
    a thread, and belong to one event loop."""
    url = _url(database, _ASYNC_DRIVERS)
    with _made_clear(url):
        if url.get_backend_name() != "sqlite":
            return create_async_engine(url, pool_pre_ping=True)
        engine = create_async_engine(
            url, connect_args={"timeout": SQLITE_WAIT_S}, poolclass=NullPool
        )
        sa.event.listen(engine.sync_engine, "connect", _write_ahead)
        return engine


def _url(database: Database, drivers: dict[str, str]) -> sa.URL:
    if isinstance(database, str) and "://" in database:
        try:
            url = sa.make_url(database)
        except (sa.exc.ArgumentError, ValueError) as error:
            raise ConfigurationError(
                f"the database URL cannot be read: {error}.", cure="postgresql://user@host/name"
            ) from None
    elif isinstance(database, sa.URL):
        url = database
    elif isinstance(database, str | Path) and str(database):
        url = sa.URL.create("sqlite", database=str(database))
    else:
        raise ConfigurationError(
            f"{database!r} is no database.", cure="Give a path, a URL or a SQLAlchemy engine."
        )
    backend = url.get_backend_name()
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigurationError(
            "a SQLite database in memory forgets what was consumed.", cure="Give a path of a file."
        )
    return url.set(drivername=drivers[backend]) if url.drivername in drivers else url


@contextlib.contextmanager
def _made_clear(url: sa.URL) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"the driver for {url.drivername!r} is not installed: {error}.",
            cure="Install it (the extra sql brings those for SQLite), or give an engine that uses "
            "another driver.",
        ) from error
    except sa.exc.SQLAlchemyError as error:
        raise ConfigurationError(
            f"{url.render_as_string(hide_password=True)} is no database for this handler: {error}."
        ) from error


def _write_ahead(connection: Any, _: object) -> None:
    """WAL: readers and the writer do not wait for each other. The mode belongs to the file: while
    another process sets it, or writes in the former mode, SQLite refuses at once, without waiting.
    """
    cursor = connection.cursor()
    with contextlib.suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()
