"""Leases of queues, over a restart and a failover."""

from simulation.stepped import ManualClock
from sluicemq.broker.consume.locks import LEASE_S, QueueLocks
from sluicemq.model.topic import MessageQueue
from sluicemq.testing.files import CrashableFiles

A, B, C = (MessageQueue("T", "broker-a", number) for number in range(3))


def started_again(table: QueueLocks, files: CrashableFiles, clock: ManualClock) -> QueueLocks:
    if table.document.changed:
        table.document.save()
    made = QueueLocks(files.kill(), "/store", clock)
    made.load()
    return made


def test_whoever_holds_a_queue_holds_it_after_a_restart_for_a_whole_lease() -> None:
    files, clock = CrashableFiles(), ManualClock()
    table = QueueLocks(files, "/store", clock)
    table.load()
    assert table.lock("g", "one", [A, B]) == {A, B}
    clock.advance(LEASE_S - 1)
    table = started_again(table, files, clock)
    assert table.lock("g", "two", [A, B, C]) == {C}
    assert table.lock("g", "one", [A]) == {A}, "its owner goes on"
    clock.advance(LEASE_S)
    assert table.lock("g", "two", [A, B]) == {A, B}


def test_what_was_given_up_or_has_expired_is_free_after_a_restart() -> None:
    files, clock = CrashableFiles(), ManualClock()
    table = QueueLocks(files, "/store", clock)
    table.lock("g", "one", [A, B])
    table.unlock("g", "one", [A])
    assert started_again(table, files, clock).lock("g", "two", [A, B]) == {A}
    clock.advance(LEASE_S)
    table.lock("g", "two", [C])
    assert started_again(table, files, clock).lock("g", "three", [A, B, C]) == {A, B}


def test_a_renewal_writes_nothing() -> None:
    files, clock = CrashableFiles(), ManualClock()
    table = QueueLocks(files, "/store", clock)
    table.lock("g", "one", [A])
    assert table.document.changed
    table.document.save()
    table.lock("g", "one", [A])
    assert not table.document.changed
    table.lock("g", "one", [A, B])
    assert table.document.changed
