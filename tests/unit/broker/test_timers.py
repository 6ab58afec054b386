"""Timed messages are delivered in their millisecond, over days, restarts and damage."""

import random
from typing import Any

import pytest

from simulation.stepped import START_MS, ManualClock, SteppedBroker, SteppedClient, send_fields
from sluicemq.model.ids import RecallHandle
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.record.codec import decode_records
from sluicemq.store.timers.files import NO_UNIT
from sluicemq.testing.files import CrashableFiles

HOUR_S = 3600
DAY_S = 86_400


def send(client: SteppedClient, due_ms: int, unique_id: str = "", **more: object) -> Any:
    """Send a message that is due at START_MS + `due_ms`, which is its body."""
    properties = {"UNIQ_KEY": unique_id or f"A{due_ms}", "TIMER_DELIVER_MS": START_MS + due_ms}
    text = "".join(f"{name}\x01{value}\x02" for name, value in (properties | more).items())
    return client.call(310, send_fields(properties=text), b"%d" % due_ms)


def delivered(broker: SteppedBroker) -> list[Any]:
    result = broker.store.reader.read("T", 0, 0, 100_000, 1 << 26)
    return decode_records(b"".join(result.data))


def bodies(broker: SteppedBroker) -> list[int]:
    return [int(message.body) for message in delivered(broker)]


def lateness_ms(broker: SteppedBroker) -> list[int]:
    return [m.store_time_ms - START_MS - int(m.body) for m in delivered(broker)]


def restarted(broker: SteppedBroker, files: CrashableFiles | None = None) -> SteppedBroker:
    clock = ManualClock(broker.clock.now_ms())
    return SteppedBroker(
        files=files or broker.files, clock=clock, store_config=broker.settings.store
    )


def test_each_message_is_delivered_in_its_millisecond(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    times = [1, 999, 1000, 1001, 1500, 1999, 2000, 2001, 3700]
    for due_ms in random.Random(1).sample(times, len(times)):
        send(client, due_ms)
    broker.run(4.0, step_s=0.001)
    assert bodies(broker) == times
    assert set(lateness_ms(broker)) == {0}


def test_a_relative_time_counts_from_the_store_time(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.clock.advance(0.123)
    for name, value in (("TIMER_DELAY_SEC", 3), ("TIMER_DELAY_MS", 2500)):
        client.call(310, send_fields(properties=f"UNIQ_KEY\x01A\x02{name}\x01{value}\x02"), b"x")
    broker.run(3.5, step_s=0.001)
    times = [message.store_time_ms - START_MS for message in delivered(broker)]
    assert times == [2623, 3123]


def test_the_next_wake_is_exact_once_the_second_is_near(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 60_250)
    broker.run(1.0)
    assert broker.core.delayed.next_due_ms is None
    broker.advance(58.0)
    broker.settle()
    assert broker.core.delayed.next_due_ms == START_MS + 60_250


def test_a_message_for_a_second_that_is_loaded_already_joins_it(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 900)
    broker.run(0.3)
    send(client, 700)
    send(client, 1400)
    broker.run(1.5, step_s=0.001)
    assert bodies(broker) == [700, 900, 1400]
    assert set(lateness_ms(broker)) == {0}


def test_a_message_indexed_after_its_second_is_delivered_at_once(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.run(2.0)
    send(client, 2050)
    broker.clock.advance(5)  # nobody swept meanwhile
    broker.core.sweep()
    broker.settle()
    broker.advance(0.01)
    broker.settle()
    assert bodies(broker) == [2050]


def test_delivered_messages_have_their_enqueue_and_dequeue_times(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.clock.advance(0.75)
    send(client, 2500, TAGS="x")
    broker.run(2.0, step_s=0.01)
    (message,) = delivered(broker)
    assert message.properties["TIMER_ENQUEUE_MS"] == str(START_MS)
    assert message.properties["TIMER_DEQUEUE_MS"] == str(START_MS + 2500)
    assert message.properties["TIMER_OUT_MS"] == str(START_MS + 2000)
    assert message.tag == "x"


def test_thousands_of_messages_of_one_second_do_not_block_other_work(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    text = f"UNIQ_KEY\x01A\x02TIMER_DELIVER_MS\x01{START_MS + 2500}\x02"
    for number in range(5000):
        client.feed(client.request(310, send_fields(properties=text), b"%d" % number))
    broker.settle()
    broker.run(1.0)
    broker.advance(1.5)
    assert 0 < len(delivered(broker)) < 5000
    broker.settle()
    assert bodies(broker) == list(range(5000))


# --- far away


def test_a_time_beyond_the_wheel_is_reached_by_rolling(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    due_ms = (2 * DAY_S + 10 * HOUR_S) * 1000 + 345
    send(client, due_ms, "A1")
    broker.settle()
    broker.advance(0)
    broker.settle()
    # Less than a third of the window is left after it: half a window is enough.
    assert list(slots(broker)) == [START_MS + DAY_S * 1000]
    broker.advance(DAY_S + 1)
    broker.settle()
    (_, rolled) = decode_records(
        b"".join(broker.store.reader.read(TIMER_TOPIC, 0, 0, 10, 1 << 20).data)
    )
    assert rolled.properties["TIMER_ROLL_TIMES"] == "1"
    assert list(slots(broker)) == [START_MS + due_ms // 1000 * 1000]
    broker.advance(DAY_S + 10 * HOUR_S - 2)
    broker.settle()
    assert delivered(broker) == []
    broker.run(1.5, step_s=0.001)
    assert lateness_ms(broker) == [0]


@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS"])
def test_a_relative_delay_beyond_the_wheel_counts_from_the_send_alone(
    broker: SteppedBroker, client: SteppedClient, name: str
) -> None:
    """A roll stores the message again, with a later store time and the same delay.

    A delay that counted from there would make the message late, or roll it again and again.
    """
    broker.clock.advance(0.345)
    delay_s = 2 * DAY_S + 10 * HOUR_S
    value = delay_s * (1000 if name == "TIMER_DELAY_MS" else 1)
    client.call(310, send_fields(properties=f"UNIQ_KEY\x01A\x02{name}\x01{value}\x02"), b"x")
    broker.settle()
    broker.advance(DAY_S + 1)
    for _ in range(20):
        broker.step()
        broker.advance(0.05)
    assert broker.store.queue_offsets(TIMER_TOPIC, 0) == (0, 2), "it has rolled once"
    broker.advance(DAY_S + 10 * HOUR_S - 3)
    broker.settle()
    broker.run(2.0, step_s=0.001)
    times = [message.store_time_ms - START_MS for message in delivered(broker)]
    assert times == [delay_s * 1000 + 345]


def slots(broker: SteppedBroker) -> Any:
    timers = broker.core.delayed.timers
    return timers.files.wheel.iter_occupied_ms(timers.read_ms, timers.read_ms + 8 * DAY_S * 1000)


def test_half_a_day_without_a_sweep_is_caught_up(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for hour in range(1, 6):
        send(client, hour * HOUR_S * 1000)
    broker.advance(12 * HOUR_S)
    broker.settle()
    assert bodies(broker) == [hour * HOUR_S * 1000 for hour in range(1, 6)]


# --- taking back


def recall(client: SteppedClient, handle: str, topic: str = "T") -> Any:
    fields = {"producerGroup": "P", "topic": topic, "recallHandle": handle}
    return client.call(370, fields)


def test_a_recalled_message_is_not_delivered_and_its_neighbours_are(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(recall_enable=True)
    send(client, 5000)
    handle = send(client, 5400).fields["recallHandle"]
    send(client, 5600)
    answer = recall(client, handle)
    assert (answer.code, answer.fields["msgId"]) == (0, "A5400")
    broker.run(7.0)
    assert bodies(broker) == [5000, 5600]
    assert broker.core.delayed.timers.recalled_count == 1


def test_a_recall_counts_after_a_restart(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.change(recall_enable=True)
    handle = send(client, 9400).fields["recallHandle"]
    send(client, 9500)
    recall(client, handle)
    broker.run(1.0)
    broker.close()
    broker = restarted(broker)
    broker.run(10.0)
    assert bodies(broker) == [9500]


def test_a_recall_counts_though_a_start_takes_it_in_after_the_message_is_due(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new master fills its wheel from the queue, slice by slice, while time passes.

    Found by histories 60 and 208 of three replicas, with real processes.
    """
    broker.change(recall_enable=True)
    handle = send(client, 9400).fields["recallHandle"]
    for number in range(40):
        send(client, 60_000 + number)
    recall(client, handle)
    broker.close()
    broker.files.remove("/store/timerwheel")
    again = restarted(broker)
    monkeypatch.setattr("sluicemq.broker.waiting.delivery.SLICE_MESSAGES", 8)
    again.core.delayed.run_slice()
    again.core.delayed.run_slice()  # the message is taken in, its recall is not
    assert again.core.delayed.timers.unindexed_count > 0
    again.clock.advance(10.0)
    again.run(5.0)
    assert again.core.delayed.timers.unindexed_count == 0
    assert again.core.delayed.timers.recalled_count == 1
    assert bodies(again) == []


@pytest.mark.parametrize("is_overdue", [True, False])
@pytest.mark.parametrize("is_rebuilt", [True, False])
def test_a_recall_counts_though_the_slaves_of_a_new_master_do_not_have_it_yet(
    broker: SteppedBroker, client: SteppedClient, is_overdue: bool, is_rebuilt: bool
) -> None:
    """The previous master has answered the recall.

    Records that slaves lack are hidden from the timers, too. Found by history 2081
    of two replicas.
    """
    broker.change(recall_enable=True)
    handle = send(client, 9400).fields["recallHandle"]
    broker.run(0.1)
    confirmed = broker.store.written_offset
    assert recall(client, handle).code == 0
    send(client, 9000)
    if is_rebuilt:
        broker.close()
        broker.files.remove("/store/timerwheel")
    else:
        broker.core.delayed.save()
    broker.advance(10.0 if is_overdue else 8.0)
    again = SteppedBroker(
        files=broker.files if is_rebuilt else broker.files.crash(random.Random(1)),
        clock=ManualClock(broker.clock.now_ms()),
        store_config=broker.settings.store, confirmed=confirmed,
    )  # fmt: skip
    again.run(3.0)
    timers = again.core.delayed.timers
    assert bodies(again) == []
    assert (timers.unindexed_count, timers.is_behind, timers.next_deliverable_ms) == (
        0,
        False,
        None,
    ), "no spin"
    again.store.publish(again.store.written_offset)
    again.core.delayed.run_slice()
    again.run(3.0)
    assert timers.recalled_count == 1
    again.store.publish(again.store.written_offset)
    assert bodies(again) == [9000]


def test_a_recall_of_a_message_that_rolls_waits_with_it(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(recall_enable=True)
    due_ms = 2 * DAY_S * 1000 + 5000
    handle = send(client, due_ms).fields["recallHandle"]
    send(client, due_ms + 100)
    broker.run(1.0)
    assert recall(client, handle).code == 0
    for _ in range(60):
        broker.advance(HOUR_S)
        broker.settle()
    assert bodies(broker) == [due_ms + 100]


@pytest.mark.parametrize(
    ("handle", "code", "remark"),
    [
        ("nonsense", 604, "recall handle is invalid"),
        (RecallHandle("U", "broker-a", START_MS + 5, "A").encode(), 604, "topic U"),
        (RecallHandle("T", "broker-b", START_MS + 5, "A").encode(), 604, "broker broker-b"),
        (RecallHandle("T", "broker-a", START_MS, "A").encode(), 604, "Too late"),
        (RecallHandle("T", "broker-a", START_MS + 4 * DAY_S * 1000, "A").encode(), 604, "later"),
    ],
)
def test_an_invalid_recall_is_refused(
    broker: SteppedBroker, client: SteppedClient, handle: str, code: int, remark: str
) -> None:
    broker.change(recall_enable=True)
    answer = recall(client, handle)
    assert answer.code == code
    assert remark in answer.remark


def test_recalling_is_off_until_it_is_switched_on(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    handle = send(client, 5000).fields["recallHandle"]
    answer = recall(client, handle)
    assert answer.code == 16
    assert "recallMessageEnable = true" in answer.remark
    broker.change(recall_enable=True)
    assert recall(client, handle, "unknown").code == 17


# --- restarts


def test_after_an_orderly_stop_no_message_is_lost_or_repeated(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    times = [500, 1500, 3200, 3900, 60_000]
    for due_ms in times:
        send(client, due_ms)
    broker.run(3.5)
    broker.close()
    broker = restarted(broker)
    assert broker.core.delayed.timers.unindexed_count == 0
    broker.run(57.0)
    assert bodies(broker) == times


@pytest.mark.parametrize("saves", [False, True])
def test_no_message_is_lost_after_a_kill(
    broker: SteppedBroker, client: SteppedClient, saves: bool
) -> None:
    times = list(range(2000, 6000, 40))
    for number, due_ms in enumerate(times):
        send(client, due_ms)
        if number == 50 and saves:
            broker.core.sweep()
            broker.settle()
            broker.core.delayed.save()
    broker.run(1.0)
    broker = restarted(broker, broker.files.kill())
    is_used = broker.files.exists("/store/timerwheel")  # a slave has none
    queue_behind = broker.core.delayed.timers.unindexed_count
    assert queue_behind == (0 if is_used else 100), "the log's units are used"
    broker.run(6.0)
    assert sorted(bodies(broker)) == times


def test_units_of_an_earlier_life_are_wiped(broker: SteppedBroker, client: SteppedClient) -> None:
    send(client, 5000)
    broker.run(0.2)
    broker.core.delayed.save()
    for due_ms in (6000, 7000, 8000):
        send(client, due_ms)
    broker.run(0.2)
    files = broker.files.kill()
    files.open("/store/timerlog/00000000000000000000").pwrite(b"\0" * 52, 2 * 52)
    broker = restarted(broker, files)
    timers = broker.core.delayed.timers
    assert timers.files.log.end == 2 * 52
    assert timers.unindexed_count == 2
    broker.run(9.0)
    assert bodies(broker) == [5000, 6000, 7000, 8000]


@pytest.mark.parametrize("lost", ["timerwheel", "timerlog/00000000000000000000"])
def test_lost_files_are_built_again_from_the_queue(
    broker: SteppedBroker, client: SteppedClient, lost: str
) -> None:
    send(client, 1500)
    send(client, 500_000)
    broker.run(100.0, step_s=0.5)
    broker.close()
    broker.files.remove(f"/store/{lost}")
    broker = restarted(broker)
    broker.advance(400)
    broker.settle()
    assert bodies(broker) == [1500, 500_000]


def test_a_broken_chain_is_built_again(broker: SteppedBroker, client: SteppedClient) -> None:
    for due_ms in (4100, 4200, 4300):
        send(client, due_ms)
    broker.run(0.5)
    broker.close()
    broker.files.open("/store/timerlog/00000000000000000000").pwrite(b"\xff" * 52, 52)
    broker = restarted(broker)
    broker.run(5.0)
    assert bodies(broker) == [4100, 4200, 4300]


def test_an_idle_broker_makes_no_timer_files(broker: SteppedBroker) -> None:
    broker.run(3.0)
    broker.core.delayed.save()
    names = broker.files.names("/store") + broker.files.names("/store/config")
    assert not [name for name in names if name.startswith("timer")]


def test_no_file_is_written_without_a_change(broker: SteppedBroker, client: SteppedClient) -> None:
    send(client, 500_000)
    broker.run(1.0)
    timers = broker.core.delayed.timers
    broker.core.delayed.save()
    broker.run(5.0)
    assert not list(timers.save())
    broker.advance(60)
    assert list(timers.save()), "the time is saved once a minute"


def test_a_checkpoint_that_failed_is_made_the_next_time(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 50_000)
    broker.run(0.2)
    broker.files.fail_next("write", 28, path_part="timerwheel")
    with pytest.raises(OSError, match="No space"):
        broker.core.delayed.save()
    broker.core.delayed.save()
    checkpoint = broker.core.delayed.timers.files.checkpoint
    assert (checkpoint.log_end, checkpoint.queue_offset) == (52, 1)


def test_after_a_disk_error_the_last_good_checkpoint_stays(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 50_000)
    broker.run(0.2)
    broker.files.fail_next("sync", path_part="timerwheel")
    with pytest.raises(OSError, match="Input/output"):
        broker.core.delayed.save()
    assert not list(broker.core.delayed.timers.save())


def test_a_full_disk_delays_messages_and_loses_none(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for due_ms in (2000, 2001, 2002):
        send(client, due_ms)
    broker.run(1.9)
    broker.files.fail_next("write", 28, path_part="commitlog")
    broker.run(0.5, step_s=0.01)
    assert sorted(bodies(broker)) == [2000, 2001, 2002]


def test_the_count_by_topic_follows(broker: SteppedBroker, client: SteppedClient) -> None:
    send(client, 2000)
    send(client, 9000)
    broker.run(1.0)
    assert broker.core.delayed.metrics.total_count == 2
    broker.run(2.0)
    assert '"timingCount":{"T":{"count":1,' in broker.core.delayed.metrics.encode()
    assert broker.core.delayed.get_runtime_info()["timerCongestNum"] == "1"


def test_chains_of_a_slot_count_their_messages(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for due_ms in (5001, 5500, 6000):
        send(client, due_ms)
    broker.run(0.2)
    slot = broker.core.delayed.timers.files.wheel.get(START_MS + 5000)
    assert slot is not None
    assert (slot.first_unit, slot.last_unit, slot.message_count) == (0, 104, 3)
    unit = broker.core.delayed.timers.files.log.unit_at(0)
    assert unit is not None
    assert (unit.previous, unit.write_ms, unit.delay_ms) == (NO_UNIT, START_MS, 5000)


def test_messages_loaded_late_and_not_delivered_before_another_stop_are_not_lost(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    due = [6_250, 6_750, 9_999]
    for due_ms in due:
        send(client, due_ms)
    broker.run(1.0)
    broker.close()
    broker.clock.advance(3600)
    broker = restarted(broker)
    broker.core.delayed.run_slice()  # loads the seconds that are over
    assert broker.core.delayed.timers.due_table.count == 3
    broker.close()
    broker = restarted(broker)
    broker.run(1.0)
    assert bodies(broker) == due


def test_a_stop_before_loading_remembers_what_was_delivered(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 3_400)
    send(client, 3_900)
    broker.run(3.5)
    assert bodies(broker) == [3_400]
    for _ in range(3):
        broker.close()
        broker = restarted(broker)
    broker.run(1.0)
    assert bodies(broker) == [3_400, 3_900]


def test_a_message_sent_after_weeks_of_downtime_survives_a_second_stop(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    due = [5_000 + 100 * number for number in range(5)]
    for due_ms in due:
        send(client, due_ms)
    broker.run(1.0)
    broker.close()
    broker.clock.advance(30 * DAY_S)
    broker = restarted(broker)
    later_ms = broker.clock.now_ms() - START_MS + 1_000
    send(broker.connect(), later_ms)
    broker.core.delayed.run_slice()  # loads what is over, and takes in what is new
    broker.close()
    broker = restarted(broker)
    broker.run(3.0)
    assert bodies(broker) == [*due, later_ms]


def test_a_stop_right_after_a_start_repeats_no_message(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """The slot of the last delivery is not loaded again before the broker stops."""
    due = [5_020, 60_000]
    for due_ms in due:
        send(client, due_ms)
    broker.run(5.5)
    assert bodies(broker) == due[:1]
    for _ in range(2):
        broker.close()
        broker = restarted(broker)
    broker.run(60.0)
    assert bodies(broker) == due


def test_messages_that_come_while_their_second_is_loaded_are_delivered_once(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for number in range(300):  # more than one step loads
        send(client, 60_250, f"A{number}")
    send(client, 61_250, "B")
    broker.run(1.0)
    loading = broker.core.delayed.timers._load_until(START_MS + 62_000)
    next(loading)
    for name, due_ms in (("C", 61_500), ("D", 61_600), ("E", 61_700)):
        send(client, due_ms, name)
    broker.settle()
    for _ in loading:
        pass
    broker.run(62.0)
    assert [due_ms for due_ms in bodies(broker) if due_ms > 61_000] == [
        61_250,
        61_500,
        61_600,
        61_700,
    ]
