"""Popped messages that are not acknowledged are revived at their deadline, exactly once."""

import errno
import random
from dataclasses import replace

import pytest

from simulation.popping import Popper, messages_of
from simulation.stepped import SMALL, START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.broker.pop import checkpoints as module
from sluicemq.broker.pop import popped as popped_module
from sluicemq.errors import RequestError
from sluicemq.model.system_names import REVIVE_GROUP, TIMER_TOPIC
from sluicemq.model.topic import TopicConfig
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.codes import ResponseCode

REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"
RETRY = "%RETRY%G_T"


def send(broker: SteppedBroker, *bodies: bytes, properties: str = "") -> None:
    client = broker.connect()
    for body in bodies:
        text = f"UNIQ_KEY\x01{body.decode()}\x02{properties}"
        assert client.call(310, send_fields(properties=text), body).code == 0


def started(config: object = SMALL, files: CrashableFiles | None = None) -> SteppedBroker:
    broker = SteppedBroker(store_config=config, files=files)  # type: ignore[arg-type]
    broker.core.topics.put(TopicConfig("T", 4, 4))
    return broker


@pytest.fixture
def broker() -> SteppedBroker:
    stepped = started()
    send(stepped, b"a", b"b", b"c")
    return stepped


@pytest.fixture
def popper(broker: SteppedBroker) -> Popper:
    return Popper(broker)


def restarted(
    broker: SteppedBroker, files: CrashableFiles | None = None, passed_s: float = 0.0
) -> Popper:
    """Return a popper of a restarted broker, on the files of a kill or on `files`."""
    files = files or broker.files.kill()
    clock = ManualClock(broker.clock.now_ms() + round(passed_s * 1000))
    again = SteppedBroker(files=files, clock=clock, store_config=broker.settings.store)
    return Popper(again)


def came_back(broker: SteppedBroker, topic: str = RETRY) -> list[bytes]:
    return [message.body for message in messages_of(broker, topic)]


def save(broker: SteppedBroker) -> None:
    """Save the documents as the broker does it every few seconds."""
    broker.store.sync()
    broker.advance(0.0)
    broker.settle()
    for _ in range(2):
        broker.core.offsets.document.save()
        broker.core.checkpoints.document.save()


# --- one pop


def test_the_next_pop_continues_behind_the_last_one(popper: Popper) -> None:
    first = popper.pop(count=2)
    assert [one.body for one in first] == [b"a", b"b"]
    assert [one.body for one in popper.pop()] == [b"c"]
    assert popper.pop() == []
    assert popper.broker.core.checkpoints.count_in_flight("G", "T") == 3
    assert Popper(popper.broker, "H").pop(count=1)[0].body == b"a"


def test_an_unacknowledged_message_is_revived_in_the_millisecond_of_its_deadline(
    broker: SteppedBroker, popper: Popper
) -> None:
    a, _, c = popper.pop(invisible_ms=2500)
    broker.settle()
    popper.acknowledge(a)
    broker.settle()
    popper.acknowledge(c)
    broker.run(3.0, step_s=0.001)
    (message,) = messages_of(broker, RETRY)
    assert (message.body, message.store_time_ms) == (b"b", START_MS + 2500)
    assert message.reconsume_times == 1
    assert message.properties["1ST_POP_TIME"] == str(START_MS)
    assert message.properties["UNIQ_KEY"] == "b"
    checkpoints = broker.core.checkpoints
    assert checkpoints.count_in_flight("G", "T") == 0
    assert checkpoints.revived_counts.total() == 1
    broker.run(20.0)
    assert came_back(broker) == [b"b"]


def test_the_retry_topic_has_one_queue_and_is_read_from_its_first_message(
    broker: SteppedBroker, popper: Popper
) -> None:
    popper.pop()
    broker.run(11.0)
    config = broker.core.topics.config_of(RETRY)
    assert config is not None
    assert (config.read_queues, config.write_queues, config.perm) == (1, 1, 6)
    assert broker.core.offsets.committed("G", RETRY, 0) == 0


def test_retries_of_retries_stay_in_their_topic_and_keep_the_first_pop(
    broker: SteppedBroker, popper: Popper
) -> None:
    popper.pop()
    broker.run(11.0)
    assert len(popper.pop_retries()) == 3
    broker.run(11.0)
    again = popper.pop_retries()
    assert [one.body for one in again] == [b"a", b"b", b"c"]
    assert {one.message.reconsume_times for one in again} == {2}
    assert {one.message.properties["1ST_POP_TIME"] for one in again} == {str(START_MS)}
    assert {one.handle.kind for one in again} == {1}


def test_a_setting_selects_the_second_form_of_the_retry_topic(
    broker: SteppedBroker, popper: Popper
) -> None:
    broker.change(pop_retry_v2=True)
    popper.pop()
    broker.run(11.0)
    assert came_back(broker, "%RETRY%G+T") == [b"a", b"b", b"c"]


def test_a_delay_or_time_of_the_message_does_not_delay_it_again(
    broker: SteppedBroker, popper: Popper
) -> None:
    send(broker, b"d", properties="DELAY\x012\x02")
    send(broker, b"e", properties="TIMER_DELAY_SEC\x013\x02")
    broker.run(6.0)
    assert len(popper.pop(invisible_ms=2000)) == 5
    broker.run(2.05)
    assert came_back(broker) == [b"a", b"b", b"c", b"e", b"d"]


def test_a_message_that_was_deleted_is_not_revived(
    broker: SteppedBroker, popper: Popper, caplog: pytest.LogCaptureFixture
) -> None:
    popper.pop()
    broker.settle()
    broker.store.delete_topic("T")
    broker.run(11.0)
    assert came_back(broker) == []
    assert "message 0 of T:0 was deleted" in caplog.text
    assert not broker.core.checkpoints.open_checkpoints


@pytest.mark.parametrize("name", ["topic", "group"])
def test_a_deleted_topic_or_group_is_forgotten(popper: Popper, name: str) -> None:
    popper.pop()
    checkpoints = popper.broker.core.checkpoints
    checkpoints.forget_deleted(**{name: "other"})
    assert checkpoints.count_in_flight("G", "T", 0) == 3
    checkpoints.forget_deleted(**{name: {"topic": "T", "group": "G"}[name]})
    assert checkpoints.count_in_flight("G", "T", 0) == 0
    assert checkpoints.resolve_next_offset("G", "T", 0) == -1


# --- acknowledging, changing


def test_acknowledging_twice_or_too_late_has_no_effect(
    broker: SteppedBroker, popper: Popper
) -> None:
    a, b, c = popper.pop()
    broker.settle()
    popper.acknowledge(a, b)
    end = broker.store.writer.position
    popper.acknowledge(a)
    popper.acknowledge(a._replace(handle=a.handle._replace(pop_ms=1)))
    assert broker.store.writer.position == end
    broker.run(11.0)
    popper.acknowledge(c)
    assert came_back(broker) == [b"c"]


def test_a_changed_time_counts_from_now_and_with_the_new_handle(
    broker: SteppedBroker, popper: Popper
) -> None:
    a, b, c = popper.pop()
    broker.settle()
    popper.acknowledge(c)
    broker.run(5.0)
    later = popper.change(a, 20_000)
    at_once = popper.change(b, 0)
    assert later.handle.encode() == f"0 {START_MS + 5000} 20000 0 0 broker-a 0 0"
    assert at_once.handle.start_offset == 1
    broker.settle()
    assert came_back(broker) == [b"b"]
    popper.acknowledge(a)  # by the old handle: it means nothing now
    broker.run(19.9)
    assert came_back(broker) == [b"b"]
    broker.run(0.2)
    assert came_back(broker) == [b"b", b"a"]


def test_two_changes_within_a_millisecond_are_two_handles(
    broker: SteppedBroker, popper: Popper
) -> None:
    (a,) = popper.pop(count=1)
    first = popper.change(a, 1000)
    second = popper.change(first, 2000)
    assert len({one.handle.pop_ms for one in (a, first, second)}) == 3
    popper.acknowledge(second)
    broker.run(15.0)
    assert came_back(broker) == []


def test_a_message_that_is_not_in_flight_cannot_be_changed(
    broker: SteppedBroker, popper: Popper
) -> None:
    (a,) = popper.pop(count=1)
    popper.acknowledge(a)
    with pytest.raises(RequestError, match="no longer in flight") as error:
        popper.change(a, 1000)
    assert error.value.code == ResponseCode.NO_MESSAGE


# --- what stands in the log


def records(broker: SteppedBroker, topic: str, queue_id: int = 0) -> list[str | None]:
    return [message.tag for message in messages_of(broker, topic, queue_id)]


def test_records_of_a_closed_checkpoint_are_dropped(broker: SteppedBroker, popper: Popper) -> None:
    popper.acknowledge(*popper.pop())
    broker.run(11.0)
    assert records(broker, TIMER_TOPIC) == ["ck", "bAck"]
    assert records(broker, REVIVE) == []
    assert broker.core.offsets.committed(REVIVE_GROUP, REVIVE, 0) == -1


def test_a_delivered_checkpoint_is_followed_by_its_acknowledgements(
    broker: SteppedBroker, popper: Popper
) -> None:
    a, b, c = popper.pop()
    broker.settle()
    popper.acknowledge(a)
    broker.run(9.5)
    assert records(broker, REVIVE) == ["ck"]
    popper.acknowledge(b)
    broker.settle()
    assert records(broker, REVIVE) == ["ck", "ack"]
    save(broker)
    assert broker.core.offsets.committed(REVIVE_GROUP, REVIVE, 0) == -1
    popper.acknowledge(c)
    broker.settle()
    assert messages_of(broker, REVIVE)[2].body.startswith(b'{"ao":-1,"aol":[0,1,2],')
    save(broker)
    assert broker.core.offsets.committed(REVIVE_GROUP, REVIVE, 0) == 2
    broker.run(2.0)
    assert records(broker, REVIVE) == ["ck", "ack", "bAck"]
    assert came_back(broker) == []


def test_the_offset_of_the_revive_group_stops_before_an_open_checkpoint(
    broker: SteppedBroker, popper: Popper
) -> None:
    first, *_ = popper.pop(count=1, invisible_ms=3000)
    broker.settle()
    second, *_ = popper.pop(count=1, invisible_ms=2500)
    broker.run(2.2)
    popper.acknowledge(first)
    broker.settle()
    save(broker)
    assert records(broker, REVIVE) == ["ck", "ck", "ack"]
    assert broker.core.offsets.committed(REVIVE_GROUP, REVIVE, 0) == -1
    popper.acknowledge(second)
    broker.settle()
    save(broker)
    assert broker.core.offsets.committed(REVIVE_GROUP, REVIVE, 0) == 3


def test_a_record_of_another_broker_is_passed_on(broker: SteppedBroker) -> None:
    client = broker.connect()
    due = f"TIMER_DELIVER_MS\x01{START_MS + 500}\x02UNIQ_KEY\x01X\x02TAGS\x01"
    for tag, body in (
        ("ck", b'{"bn":"broker-b","c":"G","d":[0],"it":9,"n":1,"pt":7,"q":0,"so":5,"t":"T"}'),
        ("ack", b'{"ao":5,"bn":"broker-b","c":"G","pt":7,"q":0,"so":5,"t":"T"}'),
        ("ck", b"no json"),
        ("ack", b'{"ao":5,"bn":"broker-a","c":"G","pt":7,"q":0,"so":5,"t":"T"}'),
    ):
        client.call(310, send_fields(REVIVE, properties=f"{due}{tag}\x02"), body)
    broker.run(1.0)
    assert records(broker, REVIVE) == ["ck", "ack", "ck"]


# --- when a turn fails, or the disk is full


def fail_the_turn(broker: SteppedBroker) -> None:
    broker.files.fail_next("write", errno.ENOSPC, path_part="commitlog")
    broker.core.group_commit.commit()


def test_a_pop_is_undone_if_its_commit_fails(broker: SteppedBroker, popper: Popper) -> None:
    popper.pop(count=1)
    broker.settle()
    popper.pop(count=1)
    popper.pop(count=1)
    fail_the_turn(broker)
    checkpoints = broker.core.checkpoints
    assert checkpoints.count_in_flight("G", "T", 0) == 1
    assert checkpoints.resolve_next_offset("G", "T", 0) == 1
    assert [one.body for one in popper.pop()] == [b"b", b"c"]


def test_an_acknowledgement_is_undone_if_its_commit_fails(
    broker: SteppedBroker, popper: Popper
) -> None:
    a, b, c = popper.pop()
    broker.settle()
    popper.acknowledge(a)
    broker.settle()
    popper.acknowledge(b)
    popper.acknowledge(c)
    popper.pop()
    fail_the_turn(broker)
    assert broker.core.checkpoints.count_in_flight("G", "T", 0) == 2
    broker.run(11.0)
    assert came_back(broker) == [b"b", b"c"]


def test_acknowledgements_are_undone_if_their_commit_fails_after_the_heap_was_cleaned(
    broker: SteppedBroker, popper: Popper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long heap of deadlines is cleaned of closed checkpoints.

    The failed commit reopens them, so they must be scheduled again.
    """
    monkeypatch.setattr(popped_module, "SWEEP_MIN", 0)
    held = [one for _ in range(3) for one in popper.pop(count=1)]
    send(broker, b"d")
    for one in held:
        popper.acknowledge(one)
    popper.pop()
    assert len(broker.core.checkpoints.open_checkpoints._deadlines) == 1, (
        "the pop has swept the heap"
    )
    fail_the_turn(broker)
    assert broker.core.checkpoints.count_in_flight("G", "T", 0) == 3
    broker.run(11.0)
    assert sorted(came_back(broker)) == [b"a", b"b", b"c"]


def test_a_change_is_undone_if_its_commit_fails(broker: SteppedBroker, popper: Popper) -> None:
    (a,) = popper.pop(count=1)
    broker.settle()
    popper.change(a, 60_000)
    fail_the_turn(broker)
    popper.acknowledge(a)
    broker.run(80.0)
    assert came_back(broker) == []


def test_a_failed_delivery_is_tried_again(broker: SteppedBroker, popper: Popper) -> None:
    popper.pop(invisible_ms=500)
    broker.run(0.45)
    broker.files.fail_next("write", errno.ENOSPC, path_part="commitlog")
    broker.run(0.1)
    assert came_back(broker) == []
    assert broker.core.checkpoints.count_in_flight("G", "T", 0) == 3
    broker.run(0.5)
    assert came_back(broker) == [b"a", b"b", b"c"]


# --- offsets, resets


def test_the_offset_is_committed_when_its_checkpoint_is_on_disk(
    broker: SteppedBroker, popper: Popper
) -> None:
    offsets = broker.core.offsets
    popper.pop(count=2)
    broker.run(1.0)
    assert offsets.committed("G", "T", 0) == -1
    assert broker.core.checkpoints.resolve_next_offset("G", "T", 0) == 2
    broker.store.sync()
    popper.pop()
    broker.run(1.0)
    assert offsets.committed("G", "T", 0) == 2
    broker.store.sync()
    broker.run(1.0)
    assert offsets.committed("G", "T", 0) == 3


def test_skipped_messages_are_committed_in_order(broker: SteppedBroker, popper: Popper) -> None:
    checkpoints, offsets = broker.core.checkpoints, broker.core.offsets
    checkpoints.skip_to("G", "T", 0, 1)
    assert offsets.committed("G", "T", 0) == 1
    assert popper.pop(count=1)[0].body == b"b"
    checkpoints.skip_to("G", "T", 0, 3)
    assert checkpoints.resolve_next_offset("G", "T", 0) == 3
    broker.run(1.0)
    assert offsets.committed("G", "T", 0) == 1
    broker.store.sync()
    broker.run(1.0)
    assert offsets.committed("G", "T", 0) == 3


def reset(broker: SteppedBroker, offset: int) -> None:
    fields = {"topic": "T", "group": "G", "timestamp": 0, "isForce": "true", "queueId": 0}
    broker.core.groups.get_or_create("G")
    assert broker.connect().call(222, {**fields, "offset": offset}).code == 0


def test_a_reset_while_messages_are_in_flight(broker: SteppedBroker, popper: Popper) -> None:
    popper.pop(count=2)
    broker.settle()
    reset(broker, 1)
    broker.store.sync()
    broker.run(1.0)
    assert [one.body for one in popper.pop()] == [b"b", b"c"]
    broker.run(11.0)
    assert sorted(came_back(broker)) == [b"a", b"b", b"b", b"c"]


def test_two_pops_of_one_millisecond_with_a_reset_between_are_one(
    broker: SteppedBroker, popper: Popper
) -> None:
    popper.pop(count=2)
    reset(broker, 0)
    again = popper.pop(count=3)
    broker.settle()
    assert broker.core.checkpoints.count_in_flight("G", "T") == 3
    popper.acknowledge(*again)
    broker.run(11.0)
    assert came_back(broker) == []
    assert broker.core.checkpoints.count_in_flight("G", "T") == 0


# --- starts


def test_messages_in_flight_survive_a_kill(broker: SteppedBroker, popper: Popper) -> None:
    a, _, _ = popper.pop(count=3)
    broker.settle()
    popper.acknowledge(a)
    broker.run(3.0)
    again = restarted(broker)
    assert again.broker.core.checkpoints.count_in_flight("G", "T") == 2
    assert again.pop() == []
    again.broker.run(6.9)
    assert came_back(again.broker) == []
    again.broker.run(0.2)
    assert came_back(again.broker) == [b"b", b"c"]


def test_an_overdue_message_is_revived_at_once_after_a_start(
    broker: SteppedBroker, popper: Popper
) -> None:
    popper.pop()
    broker.settle()
    again = restarted(broker, passed_s=100)
    again.broker.advance(0.0)
    again.broker.settle()
    assert came_back(again.broker) == [b"a", b"b", b"c"]
    third = restarted(again.broker)
    third.broker.run(20)
    assert came_back(third.broker) == [b"a", b"b", b"c"]


def test_handles_of_before_a_kill_are_good(broker: SteppedBroker, popper: Popper) -> None:
    a, b, c = popper.pop()
    broker.settle()
    again = restarted(broker)
    again.acknowledge(a, c)
    later = again.change(b, 20_000)
    again.broker.settle()
    third = restarted(again.broker)
    third.acknowledge(later)
    third.broker.settle()
    fourth = restarted(third.broker)
    fourth.broker.run(40)
    assert came_back(fourth.broker) == []


def test_an_acknowledged_message_stays_acknowledged_though_its_offset_was_not_saved(
    broker: SteppedBroker, popper: Popper
) -> None:
    save(broker)
    popper.acknowledge(*popper.pop(count=2))
    broker.settle()
    again = restarted(broker)
    assert [one.body for one in again.pop()] == [b"c"]


def test_a_reset_is_not_undone_by_a_kill(broker: SteppedBroker, popper: Popper) -> None:
    popper.acknowledge(*popper.pop())
    broker.settle()
    reset(broker, 0)
    save(broker)
    again = restarted(broker)
    assert [one.body for one in again.pop()] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("seed", range(20))
def test_power_loss_takes_pop_and_offset_together(
    broker: SteppedBroker, popper: Popper, seed: int
) -> None:
    save(broker)
    popper.pop(count=2)
    broker.run(0.4)
    broker.core.offsets.document.save()
    broker.core.checkpoints.document.save()
    again = restarted(broker, broker.files.crash(random.Random(seed)))
    found = [one.body for one in again.pop(invisible_ms=100_000)]
    again.broker.run(11.0)
    assert found + came_back(again.broker) in ([b"a", b"b", b"c"], [b"c", b"a", b"b"])


def test_old_checkpoints_are_listed_in_the_file_so_that_a_start_reads_little(
    broker: SteppedBroker, popper: Popper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LISTED_CHECKPOINTS_MAX", 2)
    send(broker, *(b"m%d" % number for number in range(20)))
    old = [popper.pop(count=1, invisible_ms=3_600_000)[0] for _ in range(2)]
    broker.settle()
    rest = [popper.pop(count=3, invisible_ms=3_600_000) for _ in range(5)]
    broker.settle()
    for held in rest[:3]:
        popper.acknowledge(*held)
    popper.acknowledge(rest[3][1])
    broker.settle()
    save(broker)
    saved = module.SavedPops.parse(
        broker.files.open("/store/config/sluicePop.json").pread(9999, 0).decode()
    )
    assert [one.offsets for one in saved.open_checkpoints] == [(0,), (1,)]
    assert saved.timer_start == 5
    again = restarted(broker)
    assert again.broker.core.checkpoints.count_in_flight("G", "T") == 2 + 2 + 3
    again.acknowledge(old[1])
    again.acknowledge(rest[3][0])
    again.broker.settle()
    save(again.broker)
    third = restarted(again.broker, passed_s=4000)
    third.broker.run(1.0)
    assert sorted(came_back(third.broker)) == sorted(
        one.body for one in (old[0], rest[3][2], *rest[4])
    )


@pytest.mark.parametrize("damage", [b"", b"no json", b'{"open": 5}'])
def test_the_edition_before_a_broken_file_is_used(
    broker: SteppedBroker, popper: Popper, damage: bytes
) -> None:
    popper.pop()
    broker.settle()
    save(broker)
    popper.pop()
    save(broker)
    file = broker.files.open("/store/config/sluicePop.json")
    file.truncate(0)
    file.pwrite(damage, 0)
    again = restarted(broker)
    again.broker.run(11)
    assert came_back(again.broker) == [b"a", b"b", b"c"]


def test_a_checkpoint_that_is_delivered_twice_after_a_crash_is_open(
    broker: SteppedBroker, popper: Popper
) -> None:
    save(broker)
    popper.pop(invisible_ms=1000)
    broker.run(0.3)
    for copies in (2, 3):
        popper = restarted(popper.broker)
        popper.broker.run(0.2)
        save(popper.broker)
        assert records(popper.broker, REVIVE) == ["ck"] * copies
        assert popper.broker.core.offsets.committed(REVIVE_GROUP, REVIVE, 0) == -1
    popper = restarted(popper.broker)
    popper.broker.run(1.0)
    assert came_back(popper.broker) == [b"a", b"b", b"c"]


# --- a store that another broker has left


def without_our_file(broker: SteppedBroker, popper: Popper, passed_s: float = 0.0) -> Popper:
    files = broker.files.kill()
    for name in ("sluicePop.json", "sluicePop.json.bak"):
        if files.exists(f"/store/config/{name}"):
            files.remove(f"/store/config/{name}")
    return restarted(broker, files, passed_s)


def test_without_our_file_the_log_says_it_all(broker: SteppedBroker, popper: Popper) -> None:
    a, b, _ = popper.pop()
    broker.settle()
    popper.acknowledge(a)
    broker.run(5.0)
    again = without_our_file(broker, popper)
    again.acknowledge(b)
    again.broker.run(6.0)
    assert came_back(again.broker) == [b"c"]
    third = restarted(again.broker)
    third.broker.run(20)
    assert came_back(third.broker) == [b"c"]


@pytest.mark.parametrize("kept", [(), ("timercheck", "timercheck.sluice")])
def test_pops_come_back_that_fell_due_while_the_broker_was_away_and_its_files_are_gone(
    broker: SteppedBroker, popper: Popper, kept: tuple[str, ...]
) -> None:
    popper.acknowledge(popper.pop()[0])
    broker.settle()
    save(broker)
    files = broker.files.kill()
    for name in files.names("/store/config"):
        if name.startswith(("sluicePop", "timercheck")) and name not in kept:
            files.remove(f"/store/config/{name}")
    again = restarted(broker, files, passed_s=60)
    again.broker.run(5.0)
    assert came_back(again.broker) == [b"b", b"c"]


def test_a_power_loss_does_not_make_the_file_doubtful(
    broker: SteppedBroker, popper: Popper, caplog: pytest.LogCaptureFixture
) -> None:
    """Records behind the last fsync are lost, so the file must not include them."""
    a, _, _ = popper.pop(invisible_ms=30_000)
    broker.settle()
    save(broker)
    popper.acknowledge(a)
    broker.settle()
    for offset in (1, 2):  # without an fsync
        broker.core.offsets.commit("other", "T", 0, offset)
        broker.core.offsets.document.save()
        broker.core.checkpoints.document.save()
    saved = module.SavedPops.parse(broker.files.content("/store/config/sluicePop.json").decode())
    assert saved.covered_end == 1, "the acknowledgement is not on disk"
    for seed in range(10):
        caplog.clear()
        again = restarted(broker, broker.files.crash(random.Random(seed)))
        assert "is not what this broker wrote last" not in caplog.text
        assert again.broker.core.checkpoints.count_in_flight("G", "T") in (2, 3)


def test_delivered_checkpoints_count_from_the_offset_of_the_scan(
    broker: SteppedBroker, popper: Popper
) -> None:
    popper.pop(count=1, invisible_ms=3000)
    broker.settle()
    popper.pop(count=1, invisible_ms=3600)
    broker.run(2.65)
    assert records(broker, REVIVE) == ["ck", "ck"]
    broker.core.offsets.put(REVIVE_GROUP, REVIVE, 0, 0)  # the first one is given back, it says
    save(broker)
    broker.core.delayed.save()
    again = without_our_file(broker, popper)
    again.broker.run(2.0)
    assert came_back(again.broker) == [b"b"]


def test_checkpoints_that_another_broker_has_scanned_are_closed(
    broker: SteppedBroker, popper: Popper
) -> None:
    popper.pop(count=1, invisible_ms=3000)
    broker.settle()
    save(broker)
    broker.run(2.5)
    assert records(broker, REVIVE) == ["ck"]
    broker.core.offsets.put(REVIVE_GROUP, REVIVE, 0, 0)
    broker.core.offsets.document.save()
    again = restarted(broker)
    again.broker.run(5.0)
    assert came_back(again.broker) == []


# --- SYNC_FLUSH


def test_a_revived_message_is_visible_when_it_is_synced() -> None:
    broker = started(replace(SMALL, flush_sync=True))
    client = broker.connect()
    client.feed(client.request(310, send_fields(), b"a"))
    broker.settle()
    popper = Popper(broker)
    assert len(popper.pop(invisible_ms=1000)) == 1
    broker.settle()
    assert broker.core.checkpoints.resolve_next_offset("G", "T", 0) == 1
    broker.run(1.1)
    assert came_back(broker) == [b"a"]
    assert broker.core.offsets.committed("G", "T", 0) == 1
