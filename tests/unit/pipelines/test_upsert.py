"""Upserts: a row that is written again exists once, and newer rows remain."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.sinks import databases as upsert

COLUMNS = (("id", "string"), ("n", "bigint"), ("at", "bigint"), ("more", "map<string,string>"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/t.db"


def aim(url: str, **given: Any) -> upsert.Target:
    return upsert.Target(url, "t", ("id",), COLUMNS, **given)


def row(name: str, n: int, at: int = 0) -> dict[str, Any]:
    return {"id": name, "n": n, "at": at, "more": {"a": "b"}}


def contents(engine: sa.Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [
            tuple(one) for one in connection.execute(sa.text("select id, n, at from t order by id"))
        ]


@pytest.fixture(params=["native", "portable"])
def engine(url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SQLite, once with ON CONFLICT and once like databases without it."""
    if request.param == "portable":
        monkeypatch.setattr(upsert, "NATIVE", ())
    engine = upsert.create_engine(url)
    upsert.create_table(engine, aim(url))
    yield engine
    engine.dispose()


def test_a_row_that_is_written_twice_exists_once(engine: sa.Engine, url: str) -> None:
    rows = [row("a", 1), row("b", 2), row("a", 3)]
    for _ in range(2):
        assert upsert.upsert_rows(engine, aim(url, chunk_rows=2), rows) == 3
        assert contents(engine) == [("a", 3, 0), ("b", 2, 0)]


def test_an_older_version_does_not_replace_a_newer_one(engine: sa.Engine, url: str) -> None:
    target = aim(url, version="at")
    upsert.upsert_rows(engine, target, [row("a", 2, at=20), row("a", 1, at=10), row("b", 1, at=5)])
    assert contents(engine) == [("a", 2, 20), ("b", 1, 5)]
    upsert.upsert_rows(engine, target, [row("a", 1, at=10), row("b", 3, at=5)])
    assert contents(engine) == [("a", 2, 20), ("b", 3, 5)]


def test_a_table_of_key_columns_only_has_each_row_once(url: str) -> None:
    target = upsert.Target(url, "t", ("id",), (("id", "string"),))
    engine = upsert.create_engine(url)
    upsert.create_table(engine, target)
    upsert.upsert_rows(engine, target, [{"id": "a"}, {"id": "a"}])
    upsert.upsert_rows(engine, target, [{"id": "a"}])
    with engine.connect() as connection:
        assert connection.execute(sa.text("select count(*) from t")).scalar() == 1
    engine.dispose()


def test_a_row_without_a_key_is_refused(engine: sa.Engine, url: str) -> None:
    with pytest.raises(ConfigurationError, match="no value in the key column 'id'"):
        upsert.upsert_rows(engine, aim(url), [row("a", 1) | {"id": None}])


def test_a_table_without_a_unique_key_or_a_column_is_refused(url: str) -> None:
    engine = upsert.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("create table t (id text, n bigint, at bigint)"))
    with pytest.raises(ConfigurationError, match="has no column more"):
        upsert.check_table(engine, aim(url))
    with engine.begin() as connection:
        connection.execute(sa.text("alter table t add column more text"))
    with pytest.raises(ConfigurationError, match="no primary key or unique constraint of id"):
        upsert.check_table(engine, aim(url))
    with engine.begin() as connection:
        connection.execute(sa.text("create unique index u on t (id)"))
    upsert.check_table(engine, aim(url))
    engine.dispose()


def test_a_spark_type_without_a_column_type_is_refused(url: str) -> None:
    target = upsert.Target(url, "t", ("id",), (("id", "string"), ("x", "interval day")))
    with pytest.raises(ConfigurationError, match="interval day"):
        upsert.build_table(target, "sqlite")


@pytest.mark.parametrize("text", ["sqlite://", "sqlite:///:memory:", "nonsense", ""])
def test_a_url_of_a_database_in_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        upsert.check_url(text)
