"""The heartbeat thread against a scripted broker, and the identity of a client."""

import threading
from concurrent.futures import Future

import pytest

from sluicemq.client.heartbeat_thread import HeartbeatThread, make_client_id, make_unique_ids
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ClosedError, ConnectionLostError
from sluicemq.model.subscription import Subscription
from sluicemq.wire.bodies import ConsumerData
from waiting import limit, wait_for


class FixedClock:
    def __init__(self, now_ms):
        self.ms = now_ms

    def now_ms(self):
        return self.ms

    def monotonic_s(self):
        return self.ms / 1000


@pytest.fixture
def heartbeats():
    noticed = []

    def on_request(command, address, answer):
        if command.code == 40:
            noticed.append((address, command.fields["consumerGroup"]))
        return command.code == 40

    heartbeats = HeartbeatThread("me@1", on_request=on_request, period_s=0.1)
    heartbeats.noticed = noticed
    yield heartbeats
    heartbeats.close()


def test_a_heartbeat_registers_the_groups_and_the_change_is_noticed(fake_thread, heartbeats):
    heartbeats.set_consumer_group(ConsumerData("g", subscriptions=(Subscription("t"),)))
    heartbeats.update_addresses([fake_thread.broker.address])
    assert heartbeats.send_heartbeats().result(limit(5)) == {fake_thread.broker.address: None}
    assert list(fake_thread.broker.members["g"]) == ["me@1"]
    assert list(fake_thread.broker.subscriptions["g"]) == ["t"]
    wait_for(lambda: heartbeats.noticed == [(fake_thread.broker.address, "g")])


def test_heartbeats_go_on_by_themselves(fake_thread, heartbeats):
    heartbeats.add_producer_group("p")
    heartbeats.update_addresses([fake_thread.broker.address])
    heartbeats.send_heartbeats().result(limit(5))
    before = fake_thread.broker.seen[34]
    wait_for(lambda: fake_thread.broker.seen[34] >= before + 3)


def test_nothing_is_sent_before_there_is_a_group():
    heartbeats = HeartbeatThread("me@1", period_s=0.01)
    assert heartbeats._thread is None
    heartbeats.close()


def test_a_broker_that_is_away_is_told_and_does_not_hinder_the_others(fake_thread, heartbeats):
    heartbeats.add_producer_group("p")
    heartbeats.update_addresses(["127.0.0.1:1", fake_thread.broker.address])
    outcome = heartbeats.send_heartbeats().result(limit(5))
    assert isinstance(outcome["127.0.0.1:1"], ConnectionLostError)
    assert outcome[fake_thread.broker.address] is None


def test_closing_unregisters_every_group_and_ends_the_thread(fake_thread):
    heartbeats = HeartbeatThread("me@1")
    heartbeats.set_consumer_group(ConsumerData("g"))
    heartbeats.add_producer_group("p")
    heartbeats.update_addresses([fake_thread.broker.address])
    heartbeats.send_heartbeats().result(limit(5))
    thread = heartbeats._thread
    heartbeats.close()
    assert not thread.is_alive()
    assert fake_thread.broker.seen[35] == 2
    assert not fake_thread.broker.members["g"]
    with pytest.raises(ClosedError):
        heartbeats.send_heartbeats()
    heartbeats.close()


def test_leaving_takes_a_group_out_of_later_heartbeats(fake_thread, heartbeats):
    heartbeats.set_consumer_group(ConsumerData("g"))
    heartbeats.set_consumer_group(ConsumerData("h"))
    heartbeats.update_addresses([fake_thread.broker.address])
    heartbeats.send_heartbeats().result(limit(5))
    heartbeats.remove_group(consumer="g").result(limit(5))
    heartbeats.send_heartbeats().result(limit(5))
    assert not fake_thread.broker.members["g"]
    assert fake_thread.broker.members["h"]


def test_a_request_that_this_client_does_not_serve_gets_the_standard_answer(
    fake_thread, heartbeats
):
    from sluicemq.wire.frames import Command

    heartbeats.set_consumer_group(ConsumerData("g"))
    heartbeats.update_addresses([fake_thread.broker.address])
    heartbeats.send_heartbeats().result(limit(5))
    (peer,) = fake_thread.broker.members["g"].values()
    asking: Future[Command] = Future()
    fake_thread.loop.call_soon_threadsafe(peer.send_request, Command(307, {}), asking.set_result)
    answer = asking.result(limit(5))
    assert answer.code == 3
    assert answer.remark == " request type 307 not supported"


def test_client_ids_differ():
    ids = {make_client_id(SYSTEM_CLOCK) for _ in range(50)}
    assert len(ids) == 50
    assert "@" in next(iter(ids))


def test_message_ids_are_unique_among_threads_and_count_from_the_month():
    ids = make_unique_ids(SYSTEM_CLOCK)
    made: list[str] = []

    def make() -> None:
        made.extend([ids.make_id() for _ in range(500)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 2000
    assert {len(one) for one in made} == {32}
    december = make_unique_ids(FixedClock(1_388_448_000_000))  # 2013-12-31T00:00Z: 30 days into it
    assert int(december.make_id()[20:28], 16) == 30 * 86_400_000


def test_a_broker_that_is_gone_for_good_is_forgotten(fake_thread, heartbeats):
    gone, here = "127.0.0.1:1", fake_thread.broker.address
    heartbeats.add_producer_group("p")
    heartbeats.update_addresses([gone, here])
    assert heartbeats.send_heartbeats().result(limit(5)).keys() == {gone, here}
    heartbeats.update_addresses([here], {here, gone})
    assert heartbeats.send_heartbeats().result(limit(5)).keys() == {gone, here}, (
        "a route has it: it may come back"
    )
    heartbeats.update_addresses([here], {here})
    assert heartbeats.send_heartbeats().result(limit(5)).keys() == {here}
    heartbeats.update_addresses([gone], {here, gone})
    assert heartbeats.send_heartbeats().result(limit(5)).keys() == {gone, here}
