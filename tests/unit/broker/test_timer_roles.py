"""Timed messages over role changes: a master that returns delivers like one that stayed.

Two disks have a whole broker core each: one is the master, the other copies its log and state.
Roles change in order (planned switches, or a pair whose files swap brokerRole), or the master is
killed.
"""

import itertools
import logging
import random

import pytest

from simulation.roles import CHANGES, Pair
from simulation.small_wheel import make_wheel_small
from simulation.stepped import SteppedBroker
from sluicemq.store.timers import state
from sluicemq.testing.files import CrashableFiles

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel_small(monkeypatch)


WAYS = [way for count in (1, 2, 3) for way in itertools.product(CHANGES, repeat=count)]


@pytest.mark.parametrize("discards", [True, False], ids=["", "undiscarded"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_master_that_returns_delivers_every_message_once(
    way: tuple[str, ...],
    discards: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The scripts replicas/timer_lost_*.sh do the same with processes.

    They are timer_lost_after_switch_back.sh, timer_lost_after_two_kills.sh and
    timer_lost_roles_of_file.sh. If the slave did not discard its files, only the checkpoint of the
    other replica would say that the wheel is not valid.
    """
    if not discards:
        monkeypatch.setattr("sluicemq.broker.state.discard_timer_files", lambda *_: None)
    pair = Pair()
    pair.send(1000)  # the first master makes its wheel
    pair.run(3.0)
    sent = [1000]
    for change in way:
        CHANGES[change](pair)
        for _ in range(8):
            due_ms = pair.now_ms + 20_000 + 700 * len(sent)
            pair.send(due_ms)
            sent.append(due_ms)
        pair.send(pair.now_ms + 500)
        sent.append(pair.now_ms + 500)
        pair.run(2.0)
    pair.run(45.0)
    assert sorted(pair.bodies()) == sorted(sent)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING] or (
        not discards
    )


@pytest.mark.parametrize("way", ["switched", "killed"])
def test_a_slave_has_no_timer_files(way: str) -> None:
    pair = Pair()
    pair.send(50_000)
    pair.run(2.0)
    CHANGES[way](pair)
    names = pair.disks[1 - pair.leader].names("/store")
    assert "timerwheel" not in names
    assert pair.disks[1 - pair.leader].names("/store/timerlog") == []
    assert "timerwheel.identity" in names, "it says so"
    pair.run(1.0)
    assert pair.master.files.exists("/store/timerwheel")


def test_messages_that_the_killed_master_delivered_are_not_repeated() -> None:
    """The log shows the deliveries, but not the checkpoint: it is two seconds old."""
    pair = Pair()
    for due_ms in range(1000, 5000, 100):
        pair.send(due_ms)
    pair.run(2.0)
    delivered = pair.bodies()
    pair.master.run(1.55, step_s=0.05)
    assert len(pair.bodies()) > len(delivered)
    pair.fail_over()
    pair.run(3.0)
    assert sorted(pair.bodies()) == list(range(1000, 5000, 100))


def test_a_recalled_message_stays_recalled_over_roles() -> None:
    pair = Pair()
    pair.master.change(recall_enable=True)
    handle = pair.send(9400).fields["recallHandle"]
    pair.send(9500)
    fields = {"producerGroup": "P", "topic": "T", "recallHandle": handle}
    assert pair.master.connect().call(370, fields).code == 0
    pair.run(1.0)
    for change in ("killed", "switched", "killed"):
        CHANGES[change](pair)
        pair.run(0.5)
    pair.run(10.0)
    assert pair.bodies() == [9500]


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_roles_delivers_every_message_once(seed: int) -> None:
    """This includes messages that roll, that are late for their slot, or due without a master."""
    rng = random.Random(seed)
    pair = Pair(timer_roll_window_slots=20)
    sent: list[int] = []
    for _ in range(rng.randint(3, 5)):
        for _ in range(rng.randint(1, 8)):
            due_ms = pair.now_ms + rng.choice([50, 900, 3000, 25_000, 70_000]) + rng.randrange(1000)
            if due_ms not in sent:
                pair.send(due_ms)
                sent.append(due_ms)
            if rng.random() < 0.2:
                pair.clock.advance(rng.random() * 10)  # nobody sweeps meanwhile
            pair.run(rng.random() * 3, saves_s=rng.choice([0.3, 1.0, 5.0]))
        if rng.random() < 0.3:
            pair.clock.advance(rng.random() * 20)
        CHANGES[rng.choice(sorted(CHANGES))](pair)
    pair.run(100.0, saves_s=5.0)
    assert sorted(pair.bodies()) == sorted(sent), seed


def test_a_slave_discards_files_of_any_size() -> None:
    disk = CrashableFiles()
    broker = SteppedBroker(files=disk)
    disk.make_directory("/store/timerlog")
    for name in ("timerwheel", "timerlog/00000000000000000000", "timerlog/5"):
        disk.open(f"/store/{name}", create=True).truncate(77)
    state.discard_timer_files(broker.store, disk, "/store")
    assert not disk.exists("/store/timerwheel")
    assert disk.names("/store/timerlog") == []
