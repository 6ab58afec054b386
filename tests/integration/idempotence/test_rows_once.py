"""The rows of the pipeline `dedup` on real databases: two attempts of one task at the same time."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

pytest.importorskip("pyspark")

from sluicemq.client.ledger import make_blocking_engine
from sluicemq.pipelines.sinks.databases import Target, insert_chunks, prepare_table
from waiting import limit

COUNT = 500


@pytest.fixture
def target(database: sa.URL) -> Target:
    found = Target(
        database.render_as_string(hide_password=False), "orders", ("sluice_key",),
        (("sluice_key", "string"), ("number", "int"), ("at", "timestamp"), ("raw", "binary")),
        chunk_rows=50,
    )  # fmt: skip
    prepare_table(found, create=True)
    prepare_table(found, create=False)
    return found


def chunks() -> Any:
    rows = [
        {"sluice_key": f"k{number:04}", "number": number, "at": None, "raw": b"\x00"}
        for number in range(COUNT)
    ]
    return [rows[start : start + 50] for start in range(0, COUNT, 50)]


def test_two_attempts_at_once_write_each_row_once(target: Target) -> None:
    """As many as four zombies of one task, the same rows in the same order."""
    done: list[tuple[int, int]] = []

    def attempt() -> None:
        engine = make_blocking_engine(target.url)
        try:
            done.append(insert_chunks(engine, target, chunks()))
        finally:
            engine.dispose()

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(60))
    assert sorted(done) == [(COUNT, 0)] * 3 + [(COUNT, COUNT)]
    engine = make_blocking_engine(target.url)
    with engine.connect() as connection:
        assert connection.execute(sa.text("select count(*) from orders")).scalar_one() == COUNT
    engine.dispose()
