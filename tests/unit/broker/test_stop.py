"""An orderly stop saves whatever can be saved, and names what cannot."""

import logging
from pathlib import Path

import pytest

from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock


def broken(*_: object) -> str:
    raise TypeError("Integer exceeds 64-bit range")


async def test_a_table_that_cannot_be_rendered_keeps_no_other_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(QueueLocks, "_render_leases", broken)
    clock = VirtualClock()
    async with embedded(clock=clock, store=str(tmp_path)) as mq:
        await mq.admin.create_topic("t", queues=1)
        await mq.send("t", b"later", delay=30)
        core = mq.servers.brokers["broker-a"].core
        await clock.advance(seconds=2)
        core.locks.document.changed = True
        core.offsets.commit("g", "t", 0, 777)
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [one.exc_info is not None for one in errors] == [True, False]
    assert "sluiceLocks.json (TypeError" in errors[0].getMessage()
    assert (
        errors[1]
        .getMessage()
        .startswith("The broker is stopping, but these files could not be saved:")
    )
    assert errors[1].getMessage().endswith("config/sluiceLocks.json")
    monkeypatch.undo()
    async with embedded(clock=VirtualClock(), store=str(tmp_path)) as mq:
        core = mq.servers.brokers["broker-a"].core
        assert core.offsets.committed("g", "t", 0) == 777
        await mq.clock.advance(seconds=40)
        assert core.store.queue_offsets("t", 0)[1] == 1


async def test_each_step_of_a_stop_is_done_though_the_one_before_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with embedded(clock=VirtualClock(), store=str(tmp_path)) as mq:
        await mq.admin.create_topic("t", queues=1)
        core = mq.servers.brokers["broker-a"].core
        core.offsets.commit("g", "t", 0, 777)
        monkeypatch.setattr(type(core.group_commit), "commit", broken)
        monkeypatch.setattr(type(core.delayed), "save", broken)
    names = ("stop, held answers", "stop, delivery state")
    assert all(f"Background job '{name}' failed: TypeError" in caplog.text for name in names)
    monkeypatch.undo()
    (offsets,) = tmp_path.rglob("consumerOffset.json")
    assert '"t@g"' in offsets.read_text()
    assert not [*tmp_path.rglob("abort")]
