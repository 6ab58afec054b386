"""Parked pops and notifications: which are woken, how often, and when they are answered."""

import pytest

from simulation.pops import POP, ack, fields_of, fill, handles, numbers, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.broker.pop.pop import PendingPop, PopHandlers, PopResult

NOTIFY, POLLING = 200054, 200055
FULL, TIMEOUT = 209, 210


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the group of each pop that reads the queues."""
    found: list[str] = []
    look = PopHandlers._take_messages

    def counted(pop: PopHandlers, popping: PendingPop) -> PopResult:
        found.append(popping.header.group)
        return look(pop, popping)

    monkeypatch.setattr(PopHandlers, "_take_messages", counted)
    return found


class Waiting:
    """A parked pop on a connection of its own."""

    def __init__(self, broker: SteppedBroker, code: int = POP, **changes: object) -> None:
        self.client = broker.connect()
        fields = pop_fields(broker, pollTime=15_000, **changes)
        self.request = self.client.request(code, fields)
        self.client.feed(self.request)
        broker.step()

    @property
    def answer(self):  # type: ignore[no-untyped-def]
        return self.client.answers.get(self.request.opaque)


def polling(broker: SteppedBroker, **changes: object) -> int:
    answer = broker.connect().call(POLLING, pop_fields(broker, **changes))
    return int(fields_of(answer)["pollingNum"])


def test_a_pop_waits_for_a_message_of_any_queue(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = Waiting(broker)
    assert (waiting.answer, polling(broker)) == (None, 1)
    fill(client, 1, queue_id=3)
    broker.settle()
    assert numbers(waiting.answer) == [0]
    assert (polling(broker), len(broker.core.polls)) == (0, 0)


def test_a_pop_of_one_queue_waits_for_that(broker: SteppedBroker, client: SteppedClient) -> None:
    waiting = Waiting(broker, queueId=2)
    fill(client, 1, queue_id=1)
    broker.settle()
    assert (waiting.answer, polling(broker), polling(broker, queueId=2)) == (None, 0, 1)
    fill(client, 1, queue_id=2)
    broker.settle()
    assert numbers(waiting.answer) == [0]


def test_one_message_causes_one_read_for_a_thousand_parked_pops(
    broker: SteppedBroker, client: SteppedClient, looks: list[str]
) -> None:
    waiting = [Waiting(broker) for _ in range(1000)]
    looks.clear()
    fill(client, 1)
    broker.settle()
    assert len(looks) == 1
    assert [one.answer is not None for one in waiting] == [True] + [False] * 999
    fill(client, 1)
    broker.settle()
    assert len(looks) == 2
    assert numbers(waiting[1].answer) == [0]


def test_each_group_gets_the_message(
    broker: SteppedBroker, client: SteppedClient, looks: list[str]
) -> None:
    waiting = [Waiting(broker, consumerGroup=group) for group in "GHGH"]
    looks.clear()
    fill(client, 1)
    broker.settle()
    assert sorted(looks) == ["G", "H"]
    assert [one.answer is not None for one in waiting] == [True, True, False, False]


def test_messages_that_a_pop_leaves_are_offered_to_the_next_one(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = [Waiting(broker, maxMsgNums=2) for _ in range(4)]
    many = [
        client.request(310, send_fields(properties=f"n\x01{number}\x02")) for number in range(5)
    ]
    client.feed(*many)
    broker.settle()
    assert [numbers(one.answer) for one in waiting[:3]] == [[0, 1], [2, 3], [4]]
    assert waiting[3].answer is None


def test_a_pop_for_no_messages_does_not_block_others(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = [Waiting(broker, maxMsgNums=count) for count in (0, 1)]
    fill(client, 1)
    broker.settle()
    assert [one.answer is not None for one in waiting] == [False, True]


def test_a_redelivered_message_wakes_a_parked_pop(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)
    client.call(POP, pop_fields(broker, invisibleTime=5000))
    waiting = Waiting(broker)
    broker.run(4.9)
    assert waiting.answer is None
    broker.run(0.2)
    assert numbers(waiting.answer) == [0]
    assert fields_of(waiting.answer)["msgOffsetInfo"] == "1 0 0"


def test_a_filter_of_those_that_wait_is_asked_once_for_the_group(
    broker: SteppedBroker, client: SteppedClient, looks: list[str]
) -> None:
    waiting = [Waiting(broker, exp="B", expType="TAG") for _ in range(3)]
    looks.clear()
    fill(client, 1)
    broker.settle()
    assert (len(looks), broker.core.offsets.committed("G", "T", 0)) == (1, 1)
    fill(client, 1, tags="B")
    broker.settle()
    assert [one.answer is not None for one in waiting] == [True, False, False]


def test_a_long_backlog_does_not_delay_other_clients(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """A parked pop examines many messages in steps."""
    broker.change_store(filter_scan_units_max=10)
    waiting = [Waiting(broker, exp="B", expType="TAG") for _ in range(2)]
    requests = [
        client.request(310, send_fields(properties=f"TAGS\x01{tag}\x02n\x01{number}\x02"))
        for number, tag in enumerate("A" * 35 + "B" * 2)
    ]
    client.feed(*requests)
    broker.settle()
    assert [numbers(one.answer) for one in waiting if one.answer] == [[35, 36]]


def test_a_parked_pop_is_answered_at_its_deadline(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = Waiting(broker)
    broker.run(14.9)
    assert waiting.answer is None
    broker.run(0.05)
    answer = waiting.answer
    assert (answer.code, answer.remark) == (TIMEOUT, "NO_MESSAGE_IN_QUEUE")
    assert answer.fields == {
        "popTime": str(broker.clock.now_ms()), "invisibleTime": "60000", "reviveQid": "0",
        "restNum": "0", "startOffsetInfo": "", "msgOffsetInfo": "",
    }  # fmt: skip
    fill(client, 1)
    assert numbers(client.call(POP, pop_fields(broker))) == [0]


def test_the_time_counts_from_when_the_client_asked(broker: SteppedBroker) -> None:
    asked_ms = broker.clock.now_ms() - 10_000
    waiting = Waiting(broker, bornTime=asked_ms)
    broker.run(5)
    assert waiting.answer.code == TIMEOUT


def test_only_so_many_wait_for_a_queue(broker: SteppedBroker) -> None:
    broker.change(pop_polling_max=2)
    waiting = [Waiting(broker) for _ in range(4)]
    assert [one.answer and one.answer.code for one in waiting] == [None, None, None, FULL]
    assert Waiting(broker, queueId=1).answer is None
    assert Waiting(broker, consumerGroup="H").answer is None


def test_only_so_many_wait_in_all(broker: SteppedBroker) -> None:
    broker.change(pop_polling_total_max=2)
    waiting = [Waiting(broker, consumerGroup=group) for group in "GHI"]
    assert [one.answer and one.answer.code for one in waiting] == [None, None, FULL]


def test_a_pop_that_cannot_be_parked_is_answered_polling_full(broker: SteppedBroker) -> None:
    broker.core.polls.parked_max = 1
    waiting = [Waiting(broker, consumerGroup=group) for group in "GH"]
    assert [one.answer and one.answer.code for one in waiting] == [None, FULL]
    assert fields_of(Waiting(broker, NOTIFY).answer)["pollingFull"] == "true"


def test_a_pop_of_a_closed_connection_takes_no_messages(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = [Waiting(broker) for _ in range(3)]
    waiting[0].client.disconnect()
    waiting[1].client.peer.connection_lost()  # the broker has not heard of it
    fill(client, 1)
    broker.settle()
    assert numbers(waiting[2].answer) == [0]


def test_the_offer_to_a_closed_connection_passes_to_the_next_pop(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [Waiting(broker) for _ in range(3)]
    shares = broker.core.scheduler
    busy = True
    monkeypatch.setattr(type(shares), "has_to_wait", lambda _, peer: busy)
    fill(client, 1)
    assert waiting[0].answer is None
    busy = False
    waiting[0].client.disconnect()
    broker.settle()
    assert [one.answer is not None for one in waiting] == [False, True, False]


@pytest.mark.parametrize("messages", [1, 2])
def test_a_delayed_attempt_runs_at_the_deadline_and_passes_on_the_rest(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch, messages: int
) -> None:
    first = Waiting(broker, maxMsgNums=1)
    broker.run(10)
    second = Waiting(broker)
    shares = broker.core.scheduler
    monkeypatch.setattr(type(shares), "has_to_wait", lambda _, peer: peer is first.client.peer)
    monkeypatch.setattr(type(shares), "schedule_slice", lambda _, who, run: None)
    fill(client, messages)
    assert (first.answer, second.answer) == (None, None)
    broker.run(5)
    assert numbers(first.answer) == [0]
    assert (second.answer and numbers(second.answer)) == (None if messages == 1 else [1])
    broker.run(10)
    assert second.answer.code == (TIMEOUT if messages == 1 else 0)


def test_a_pop_whose_last_attempt_finds_no_messages_passes_its_offer_on(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Waiting(broker)
    broker.run(10)
    second = Waiting(broker)
    shares, look = broker.core.scheduler, PopHandlers._take_messages
    monkeypatch.setattr(type(shares), "has_to_wait", lambda _, peer: peer is first.client.peer)
    monkeypatch.setattr(type(shares), "schedule_slice", lambda _, who, run: None)

    def has_no_time(pop: PopHandlers, popping: PendingPop) -> PopResult:
        is_first = popping.peer is first.client.peer
        return PopResult(pop.clock.now_ms(), 0.0) if is_first else look(pop, popping)

    monkeypatch.setattr(PopHandlers, "_take_messages", has_no_time)
    fill(client, 1)
    broker.run(5)
    assert first.answer.code == TIMEOUT
    assert numbers(second.answer) == [0]


def test_messages_that_became_available_without_an_offer_are_found_at_the_deadline(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """Raising the limit of messages in flight makes a message available, but wakes no pop."""
    broker.change(pop_in_flight_limited=True, pop_in_flight_max=0)
    fill(client, 1)
    assert numbers(client.call(POP, pop_fields(broker))) == [0]
    waiting = Waiting(broker)
    fill(client, 2)
    broker.settle()
    broker.change(pop_in_flight_limited=False)
    broker.run(14.9)
    assert waiting.answer is None
    broker.run(0.1)
    assert numbers(waiting.answer) == [0, 1]


def test_a_topic_that_is_deleted_meanwhile(broker: SteppedBroker, client: SteppedClient) -> None:
    waiting = Waiting(broker)
    client.call(215, {"topic": "T"})
    broker.run(15)
    assert (waiting.answer.code, fields_of(waiting.answer)["popTime"]) == (17, "0")


def test_a_reset_wakes(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 3)
    first = client.call(POP, pop_fields(broker))
    for handle in handles(first).values():
        ack(client, handle)
    waiting = Waiting(broker)
    client.call(222, {"topic": "T", "group": "G", "timestamp": -1, "isForce": "true",
                      "queueId": 0, "offset": 1})  # fmt: skip
    broker.settle()
    assert numbers(waiting.answer) == [1, 2]


# ---------------------------------------------------------------------------------- notifications


def test_one_message_wakes_one_notification_of_a_group(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = [Waiting(broker, NOTIFY) for _ in range(3)]
    assert polling(broker) == 0
    fill(client, 1)
    broker.settle()
    assert [one.answer is not None for one in waiting] == [True, False, False]
    assert waiting[0].answer.fields == {"hasMsg": "true", "pollingFull": "false"}


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_other_notifications_are_tried_again_at_their_deadline(
    broker: SteppedBroker, client: SteppedClient, is_taken: bool
) -> None:
    waiting = [Waiting(broker, NOTIFY) for _ in range(3)]
    fill(client, 1)
    broker.settle()
    if is_taken:
        assert numbers(client.call(POP, pop_fields(broker))) == [0]
    broker.run(14.9)
    assert waiting[1].answer is None
    broker.run(0.1)
    told = [fields_of(one.answer)["hasMsg"] for one in waiting]
    assert told == ["true", *["false" if is_taken else "true"] * 2]


def test_a_notification_ignores_messages_that_its_filter_rejects(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = Waiting(broker, NOTIFY, exp="B", expType="TAG")
    fill(client, 2)
    broker.settle()
    assert waiting.answer is None
    fill(client, 1, tags="B")
    broker.settle()
    assert fields_of(waiting.answer)["hasMsg"] == "true"


def test_notifications_with_other_filters_are_asked_too(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    waiting = [Waiting(broker, NOTIFY, exp=tag, expType="TAG") for tag in "AB"]
    fill(client, 1, tags="B")
    broker.settle()
    assert [one.answer is not None for one in waiting] == [False, True]


def test_too_many_notifications_say_so(broker: SteppedBroker) -> None:
    broker.change(pop_polling_total_max=1)
    waiting = [Waiting(broker, NOTIFY) for _ in range(2)]
    assert waiting[1].answer.fields == {"hasMsg": "false", "pollingFull": "true"}
