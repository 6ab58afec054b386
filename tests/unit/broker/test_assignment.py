"""Assignments of queues by the broker (400), and the modes of groups (401, 402)."""

import errno
import json
from collections.abc import Callable
from typing import Any

import pytest

from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.broker.pop.assignment import allocate_queues
from sluicemq.config import BrokerConfig
from sluicemq.model.topic import (
    BrokerData,
    MessageQueue,
    QueueData,
    TopicConfig,
    TopicRoute,
    allocate_average,
    allocate_circle,
)
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command
from sluicemq.wire.tables import RequestMode

QUERY, SET, SHOW = 400, 401, 402
MODES = "/store/config/messageRequestMode.json"
A_AND_B = TopicRoute(
    (BrokerData("a", "C", {0: "a:1"}), BrokerData("b", "C", {0: "b:1"})),
    (QueueData("a", 2, 2, 6), QueueData("b", 2, 2, 6)),
)
EVERY = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]

Shares = list[tuple[str, int]] | None


def join(broker: SteppedBroker, *client_ids: str, group: str = "G") -> list[SteppedClient]:
    clients = [broker.connect() for _ in client_ids]
    for client, client_id in zip(clients, client_ids, strict=True):
        heartbeat = bodies.Heartbeat(client_id, (), (bodies.ConsumerData(group),))
        client.call(34, {}, bodies.encode_heartbeat(heartbeat))
    return clients


def asking(client_id: str = "c", **changes: Any) -> bytes:
    names = {"topic": "T", "group": "G", "strategy": "AVG"} | changes
    return bodies.encode_assignment_query(bodies.AssignmentQuery(client_id=client_id, **names))


def shares_in(answer: Command) -> tuple[set[str], Shares]:
    """Return the modes, and the (broker, queue id) of each queue."""
    assert answer.code == 0
    found = bodies.decode_assignments(answer.body).assignments
    if found is None:
        assert bytes(answer.body) == b"{}"
        return set(), None
    queues = [(it.queue.broker, it.queue.queue_id) for it in found]
    return {it.mode for it in found}, queues


def ask(client: SteppedClient, client_id: str = "c", **changes: Any) -> Shares:
    return shares_in(client.call(QUERY, None, asking(client_id, **changes)))[1]


def set_mode(client: SteppedClient, **changes: Any) -> Command:
    mode = {"topic": "T", "consumerGroup": "G", "mode": "POP", "popShareQueueNum": 0} | changes
    return client.call(SET, None, json.dumps(mode).encode())


# --- who reads what


def test_a_member_gets_its_share_by_its_strategy(broker: SteppedBroker) -> None:
    one, two = join(broker, "1", "2")
    name = "broker-a"
    assert ask(one, "1") == [(name, 0), (name, 1)]
    assert ask(two, "2") == [(name, 2), (name, 3)]
    assert ask(one, "1", strategy="AVG_BY_CIRCLE") == [(name, 0), (name, 2)]
    assert shares_in(one.call(QUERY, None, asking("1")))[0] == {"PULL"}


def test_an_answer_without_a_set_keeps_the_assignments(broker: SteppedBroker) -> None:
    (client,) = join(broker, "c")
    assert ask(client, strategy="CONSISTENT_HASH") is None
    assert ask(client, topic="nosuch") is None
    assert ask(client, group="nobody") is None
    broker.core.topics.put(TopicConfig("T", 4, 4, perm=2))
    assert ask(client) is None


def test_a_client_that_is_not_a_member_gets_no_queues(broker: SteppedBroker) -> None:
    (client,) = join(broker, "c")
    assert ask(client, "stranger") == []


def test_broadcasting_is_everything(broker: SteppedBroker) -> None:
    client = broker.connect()
    found = ask(client, "x", message_model=bodies.BROADCASTING, strategy="")
    assert found == [("broker-a", queue_id) for queue_id in range(4)]
    assert ask(client, "x", message_model=bodies.BROADCASTING, topic="nosuch") is None


def test_without_balance_everybody_gets_everything(broker: SteppedBroker) -> None:
    broker.change(server_balances=False)
    assert len(ask(broker.connect(), "x") or ()) == 4


def test_members_of_a_lane_share_among_themselves(broker: SteppedBroker) -> None:
    """As with the member list (38): otherwise some queues had no reader."""
    clients = join(broker, "1", "2")
    sharing = broker.core.consumers.client_ids_sharing_queues
    assert sharing("G", clients[0].peer, None) == ["1", "2"]


def test_the_queues_of_all_brokers_are_assigned() -> None:
    broker, asked, answer = with_name_server()
    (client,) = join(broker, "c")
    assert ask(client) == EVERY
    assert ask(client) == EVERY
    assert asked == ["T"], "within the time the answer is known"
    broker.advance(31)
    answer(None)
    assert ask(client) == EVERY, "without an answer, the last route is used"
    answer(Command(1, remark="busy"))
    assert ask(client) == EVERY
    answer(Command(0, body=b"nonsense"))
    assert ask(client) == EVERY
    answer(Command(17, remark="no route"))
    assert ask(client) is None
    assert len(asked) == 5


def test_concurrent_queries_share_one_request_to_a_name_server() -> None:
    broker, _, _ = with_name_server()
    done: list[Callable[[Command | None], None]] = []
    broker.core.assignments._look_up_route = lambda _topic, then: done.append(then)
    clients = join(broker, "1", "2")
    requests = [
        client.request(QUERY, None, asking(name))
        for client, name in zip(clients, "12", strict=True)
    ]
    for client, request in zip(clients, requests, strict=True):
        client.feed(request)
        broker.step()
        assert request.opaque not in client.answers
    assert len(done) == 1
    done[0](Command(0, body=bodies.encode_topic_route(A_AND_B)))
    found = [shares_in(c.answers[r.opaque])[1] for c, r in zip(clients, requests, strict=True)]
    assert found == [EVERY[:2], EVERY[2:]]


def with_name_server() -> tuple[SteppedBroker, list[str], Callable[[Command | None], None]]:
    """Return a broker, the topics for which it asks, and a function that sets the answer."""
    config = BrokerConfig(broker_name="a", name_server_addresses=("ns:9876",), metrics_enable=False)
    broker, asked = SteppedBroker(config=config), list[str]()
    answers: list[Command | None] = [Command(0, body=bodies.encode_topic_route(A_AND_B))]

    def look_up(topic: str, done: Callable[[Command | None], None]) -> None:
        asked.append(topic)
        done(answers[-1])

    broker.core.assignments._look_up_route = look_up
    return broker, asked, answers.append


# --- who pops


def test_popping_members_read_any_queue_of_each_broker() -> None:
    broker, _, _ = with_name_server()
    broker.core.topics.put(TopicConfig("T", 2, 2))
    one, _ = join(broker, "1", "2")
    assert set_mode(one).code == 0
    assert shares_in(one.call(QUERY, None, asking("1"))) == ({"POP"}, [("a", -1), ("b", -1)])
    assert ask(one, "stranger") == [("a", -1), ("b", -1)], "the client need not identify itself"


@pytest.mark.parametrize(
    ("queues", "members", "count", "expected"),
    [
        (4, "abcd", 1, {"a": [0, 1], "d": [0, 3], "x": []}),
        (4, "abcd", 2, {"a": [0, 1, 2], "c": [0, 2, 3]}),
        (4, "abcd", 3, {"a": [-1], "x": [-1]}),  # as many as there are others
        (4, "abcd", 0, {"a": [-1]}),
        (4, "abcd", -1, {"a": [-1]}),
        (2, "abcd", 1, {"a": [0], "b": [1], "c": [0], "d": [1], "x": []}),
    ],
)
def test_popping_members_share_queues_with_the_members_after_them(
    queues: int, members: str, count: int, expected: dict[str, list[int]]
) -> None:
    mode = RequestMode(topic="T", group="G", mode="POP", share_queues=count)
    every = [MessageQueue("T", "a", queue_id) for queue_id in range(queues)]
    for strategy in (allocate_average, allocate_circle):
        for client_id, queue_ids in expected.items():
            found = allocate_queues(strategy, client_id, every, members, mode)
            assert [queue.queue_id for queue in found or ()] == queue_ids


def test_the_default_may_be_to_pop_but_never_from_a_retry_topic(broker: SteppedBroker) -> None:
    broker.change(request_mode="POP")
    (client,) = join(broker, "c")
    assert shares_in(client.call(QUERY, None, asking())) == ({"POP"}, [("broker-a", -1)])
    retry = shares_in(client.call(QUERY, None, asking(topic="%RETRY%G")))
    assert retry == ({"PULL"}, [("broker-a", 0)])


def test_a_mode_is_on_disk_before_it_is_answered_and_survives(broker: SteppedBroker) -> None:
    client = broker.connect()
    assert set_mode(client, popShareQueueNum=2).code == 0
    row = {"consumerGroup": "G", "mode": "POP", "popShareQueueNum": 2, "topic": "T"}
    expected = {"messageRequestModeMap": {"T": {"G": row}}}
    assert json.loads(broker.files.content(MODES)) == expected
    shown = SteppedBroker(files=broker.files.kill()).connect().call(SHOW)
    assert json.loads(shown.body) == expected


def test_a_mode_is_answered_when_slaves_have_it() -> None:
    broker = SteppedBroker(holds_announcements=True)
    broker.core.topics.put(TopicConfig("T", 4, 4))
    client = broker.connect()
    body = json.dumps({"topic": "T", "consumerGroup": "G", "mode": "POP", "popShareQueueNum": 0})
    client.feed(Command(SET, None, body.encode(), opaque=1))
    broker.settle()
    assert not client.answers
    assert json.loads(broker.files.content(MODES))["messageRequestModeMap"]
    broker.finish_announcements()
    assert client.answers[1].code == 0


def test_a_mode_that_cannot_be_written_is_not_answered_with_success(
    broker: SteppedBroker,
) -> None:
    broker.files.fail_next("write", errno.ENOSPC, path_part=MODES)
    client = broker.connect()
    assert set_mode(client).code == 1
    assert set_mode(client).code == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": "%RETRY%G"}, 16),
        ({"topic": "nosuch"}, 17),
        ({"consumerGroup": "not/a/name"}, 26),
        ({"mode": "PUSH"}, 29),
    ],
)
def test_an_invalid_mode_is_refused(
    broker: SteppedBroker, changes: dict[str, str], code: int
) -> None:
    client = broker.connect()
    assert set_mode(client, **changes).code == code
    assert json.loads(client.call(SHOW).body) == {"messageRequestModeMap": {}}


def test_a_group_that_may_be_made_is(broker: SteppedBroker) -> None:
    assert set_mode(broker.connect()).code == 0
    assert "G" in broker.core.groups
