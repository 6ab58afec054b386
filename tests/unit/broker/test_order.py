"""Ordered pops: which messages may be taken, how offsets move, and what survives a restart."""

import pytest

from simulation.stepped import START_MS, ManualClock, SteppedBroker
from sluicemq.broker.pop.order import OrderedPops, RedeliveryCounts
from sluicemq.errors import RequestError
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.testing.files import CrashableFiles

G, T = "G", "T"
PATH = "/store/config/consumerOrderInfo.json"


class Queue:
    """Queue 0 of topic T for group G, with the queues that the broker woke in `woken`."""

    def __init__(self, files: CrashableFiles | None = None, now_ms: int = START_MS) -> None:
        self.broker = SteppedBroker(files=files, clock=ManualClock(now_ms))
        self.broker.core.topics.put(TopicConfig(T, 4, 4))
        self.broker.core.groups.put(GroupConfig(G))
        self.order: OrderedPops = self.broker.core.order
        self.woken: list[tuple[str, int]] = []
        self.order._wake = lambda topic, queue_id: self.woken.append((topic, queue_id))

    @property
    def now_ms(self) -> int:
        return self.broker.clock.now_ms()

    @property
    def committed(self) -> int:
        return self.broker.core.offsets.committed(G, T, 0)

    def can_pop(self, attempt_id: str | None = None) -> bool:
        return self.order.can_pop(G, T, 0, attempt_id, self.now_ms)

    def record_pop(
        self, *offsets: int, attempt: str | None = None, hidden_ms: int = 3000
    ) -> RedeliveryCounts:
        return self.order.record_pop(G, T, 0, offsets, attempt, self.now_ms, hidden_ms)

    def ack(self, offset: int, pop_ms: int | None = None) -> None:
        pop_ms = self.now_ms if pop_ms is None else pop_ms
        self.order.acknowledge(G, T, 0, offset, pop_ms)

    def change(self, offset: int, hidden_ms: int, pop_ms: int | None = None) -> None:
        pop_ms = self.now_ms if pop_ms is None else pop_ms
        self.order.set_visible_time(G, T, 0, offset, pop_ms, self.now_ms + hidden_ms)


@pytest.fixture
def queue() -> Queue:
    return Queue()


# --- who may take


def test_a_queue_without_a_pop_is_free(queue: Queue) -> None:
    assert queue.can_pop()
    assert queue.can_pop("attempt")


def test_a_queue_is_blocked_until_the_time_of_its_messages_has_passed(queue: Queue) -> None:
    queue.record_pop(1, 2, attempt="a", hidden_ms=3000)
    queue.broker.advance(2.999)
    assert not queue.can_pop()
    assert not queue.can_pop("b")
    queue.broker.advance(0.001)
    assert queue.can_pop()


def test_other_queues_groups_and_topics_are_not_blocked(queue: Queue) -> None:
    queue.record_pop(1)
    assert queue.order.can_pop(G, T, 1, None, queue.now_ms)
    assert queue.order.can_pop("other", T, 0, None, queue.now_ms)
    assert queue.order.can_pop(G, "other", 0, None, queue.now_ms)


def test_an_attempt_that_is_repeated_is_not_blocked(queue: Queue) -> None:
    queue.record_pop(1, 2, attempt="a")
    assert queue.can_pop("a")


def test_attempts_without_an_id_are_not_one_attempt(queue: Queue) -> None:
    queue.record_pop(1, attempt="")
    assert not queue.can_pop("")
    assert not queue.can_pop(None)


def test_a_queue_is_free_when_everything_is_acknowledged(queue: Queue) -> None:
    queue.record_pop(1, 2)
    queue.ack(1)
    assert not queue.can_pop()
    queue.ack(2)
    assert queue.can_pop()


def test_one_message_that_is_hidden_longer_blocks_the_queue(queue: Queue) -> None:
    queue.record_pop(1, 2, 3, hidden_ms=1)
    pop_ms = queue.now_ms
    queue.change(2, 3000)
    queue.broker.advance(1)
    assert not queue.can_pop()
    queue.ack(2, pop_ms)
    assert queue.can_pop()


def test_a_message_that_is_made_visible_early_frees_the_queue(queue: Queue) -> None:
    queue.record_pop(1, hidden_ms=60_000)
    queue.change(1, 100)
    queue.broker.advance(0.1)
    assert queue.can_pop()


def test_a_change_with_an_old_handle_or_of_another_message_has_no_effect(queue: Queue) -> None:
    queue.record_pop(1, hidden_ms=1000)
    queue.change(1, 60_000, pop_ms=queue.now_ms - 1)
    queue.change(7, 60_000)
    queue.broker.advance(1)
    assert queue.can_pop()


# --- what an acknowledgement moves


def test_the_offset_is_that_of_the_first_message_that_is_not_done(queue: Queue) -> None:
    queue.record_pop(1, 2, 5)
    queue.ack(2)
    assert queue.committed == 1
    queue.ack(1)
    assert queue.committed == 5
    queue.ack(5)
    assert queue.committed == 6


def test_an_acknowledgement_of_an_older_pop_is_dropped(queue: Queue) -> None:
    pop_ms = queue.now_ms
    queue.record_pop(1, 2, hidden_ms=10)
    queue.broker.advance(1)
    queue.record_pop(1, 2)
    queue.ack(1, pop_ms)
    assert queue.committed == -1
    assert not queue.can_pop()


def test_acknowledging_a_committed_message_has_no_effect(queue: Queue) -> None:
    queue.record_pop(1)
    queue.ack(1)
    queue.ack(1)
    queue.ack(0)
    assert queue.committed == 2


def test_a_message_that_was_not_popped_cannot_be_acknowledged(queue: Queue) -> None:
    queue.record_pop(1, 3)
    with pytest.raises(RequestError, match="key:T@G@0, old:-1, commit:2") as raised:
        queue.ack(2)
    assert raised.value.code == 13
    assert queue.committed == -1


def test_without_a_known_pop_no_message_is_skipped(queue: Queue) -> None:
    queue.broker.core.offsets.put(G, T, 0, 4)
    queue.ack(5)
    assert queue.committed == 4
    queue.ack(4)
    assert queue.committed == 5


def test_acknowledgements_do_not_undo_a_reset(queue: Queue) -> None:
    queue.record_pop(5, 6)
    queue.broker.core.offsets.reset(G, T, 0, 2)
    assert queue.can_pop(), "no message blocks the new offset of the group"
    queue.ack(5)
    queue.ack(2)
    assert queue.committed == 2
    queue.record_pop(2, 3)
    queue.ack(2)
    assert queue.committed == 3, "the pop has heard of the reset"


# --- how often a message came


def test_messages_that_come_again_are_counted(queue: Queue) -> None:
    """The counts are those of RocketMQ (spec/delivery.md §7)."""
    assert queue.record_pop(1, 2, 3) == RedeliveryCounts({}, 0)
    assert queue.record_pop(1, 2, 3) == RedeliveryCounts({1: 1, 2: 1, 3: 1}, 1)
    assert queue.record_pop(2, 3) == RedeliveryCounts({2: 2, 3: 2}, 2)
    assert queue.record_pop(3, 4) == RedeliveryCounts({3: 3}, 0), (
        "a new one came for the first time"
    )
    assert queue.record_pop(5, 6) == RedeliveryCounts({}, 0)


def test_an_attempt_that_is_repeated_does_not_count(queue: Queue) -> None:
    queue.record_pop(1, 2, attempt="a")
    assert queue.record_pop(1, 2, attempt="a") == RedeliveryCounts({}, 0)
    assert queue.record_pop(1, 2, attempt="b") == RedeliveryCounts({1: 1, 2: 1}, 1)
    assert queue.record_pop(1, 2, attempt="b") == RedeliveryCounts({1: 1, 2: 1}, 1)


# --- who waits


def test_an_acknowledgement_that_frees_the_queue_wakes(queue: Queue) -> None:
    queue.record_pop(1, 2)
    queue.ack(1)
    assert not queue.woken
    queue.ack(2)
    assert queue.woken == [(T, 0)]


def test_time_that_passes_wakes_once(queue: Queue) -> None:
    queue.record_pop(1, hidden_ms=3000)
    queue.change(1, 5000)
    queue.broker.advance(3)
    assert not queue.woken
    queue.broker.advance(2)
    assert queue.woken == [(T, 0)]
    queue.broker.advance(100)
    assert queue.woken == [(T, 0)]


def test_a_shorter_time_wakes_earlier(queue: Queue) -> None:
    queue.record_pop(1, hidden_ms=60_000)
    queue.change(1, 1000)
    queue.broker.advance(1)
    assert queue.woken == [(T, 0)]


def test_acknowledged_or_deleted_messages_wake_no_pop(queue: Queue) -> None:
    queue.record_pop(1)
    queue.ack(1)
    queue.order.record_pop(G, T, 1, [1], None, queue.now_ms, 3000)
    queue.order.forget_deleted(topic=T)
    queue.woken.clear()
    queue.broker.advance(10)
    assert not queue.woken


def test_the_timer_runs_when_the_first_queue_is_free(queue: Queue) -> None:
    calls: list[tuple[float, object]] = []

    class Alarm:
        def cancel(self) -> None:
            calls.append((-1, None))

    def call_later(pause_s: float, ring: object) -> Alarm:
        calls.append((pause_s, ring))
        return Alarm()

    queue.order._call_later = call_later
    queue.record_pop(1, hidden_ms=3000)
    queue.order.record_pop(G, T, 1, [1], None, queue.now_ms, 4000)
    queue.order.record_pop(G, T, 2, [1], None, queue.now_ms, 500)
    assert [pause_s for pause_s, _ in calls] == [3, -1, 0.5]
    queue.broker.clock.advance(0.5)
    ring = calls[-1][1]
    assert callable(ring)
    ring()
    assert queue.woken == [(T, 2)]
    assert [pause_s for pause_s, _ in calls] == [3, -1, 0.5, 2.5]
    queue.order.stop()
    assert calls[-1] == (-1, None)


# --- the file


def test_messages_in_flight_survive_a_restart(queue: Queue) -> None:
    queue.record_pop(1, 2, attempt="a", hidden_ms=60_000)
    queue.ack(2)
    queue.change(1, 5000)
    queue.broker.close()
    later = Queue(queue.broker.files, queue.now_ms + 4000)
    assert not later.can_pop()
    assert later.can_pop("a")
    later.broker.advance(1)
    assert later.woken == [(T, 0)]
    assert later.record_pop(1, 2) == RedeliveryCounts({1: 1, 2: 1}, 1)


def test_without_its_file_a_broker_begins_at_the_offsets() -> None:
    queue = Queue()
    queue.broker.core.offsets.put(G, T, 0, 1)
    queue.record_pop(1, 2)
    queue.broker.close()
    queue.broker.files.remove(PATH)
    queue.broker.files.put(f"{PATH}.bak", b'{"table":{}}')
    later = Queue(queue.broker.files, queue.now_ms + 10)
    assert later.can_pop()
    later.ack(2, queue.now_ms)
    assert later.committed == 1


def test_the_file_omits_old_and_deleted_entries(queue: Queue) -> None:
    core = queue.broker.core
    core.topics.put(TopicConfig("gone", 4, 4))
    core.groups.put(GroupConfig("gone"))
    queue.record_pop(1)
    queue.broker.advance(3600)
    for group, topic, queue_id in (("gone", T, 0), (G, "gone", 0), (G, T, 3), (G, T, 2)):
        queue.order.record_pop(group, topic, queue_id, [1], None, queue.now_ms, 3000)
    core.topics.remove("gone")
    core.groups.remove("gone")
    core.topics.put(TopicConfig(T, 3, 3))
    queue.broker.advance(23.5 * 3600)
    queue.order.document.changed = True
    queue.order.document.save()
    assert queue.order.table.keys() == {f"{T}@{G}"}
    assert queue.order.table[f"{T}@{G}"].keys() == {2}


def test_a_deleted_topic_or_group_is_forgotten_with_its_offsets(queue: Queue) -> None:
    client = queue.broker.connect()
    queue.record_pop(1)
    client.call(207, {"groupName": G, "cleanOffset": "true"})
    assert queue.can_pop()
    queue.record_pop(1)
    client.call(215, {"topic": T})
    assert queue.can_pop()
