"""Offsets, times, single messages and locks."""

import pytest

from simulation.stepped import START_MS, SteppedBroker, SteppedClient, send_fields
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.wire import bodies

COMMITTED, COMMIT, MAX, MIN, BY_TIME, EARLIEST, LOCK, UNLOCK = 14, 15, 30, 31, 29, 32, 41, 42
QUEUE = {"topic": "T", "queueId": 0}
GROUP = QUEUE | {"consumerGroup": "G"}


def offset(client: SteppedClient, code: int, **fields: object) -> int:
    answer = client.call(code, QUEUE | fields)
    assert answer.code == 0
    assert answer.fields is not None
    return int(answer.fields["offset"])


def send(client: SteppedClient, count: int = 1) -> None:
    for _ in range(count):
        client.call(310, send_fields(), b"x")


def test_the_ends_of_a_queue(client: SteppedClient) -> None:
    assert (offset(client, MIN), offset(client, MAX)) == (0, 0)
    send(client, 3)
    assert (offset(client, MIN), offset(client, MAX)) == (0, 3)
    assert offset(client, MAX, queueId=9) == 0


def test_offsets_are_committed_forwards_and_backwards(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    for value in (5, 3):
        assert client.call(COMMIT, GROUP | {"commitOffset": value}).code == 0
        assert offset(client, COMMITTED, consumerGroup="G") == value


@pytest.mark.parametrize(
    ("change", "code"), [({"consumerGroup": "nosuch"}, 26), ({"topic": "nosuch"}, 17)]
)
def test_a_commit_of_an_unknown_group_or_topic_is_refused(
    broker: SteppedBroker, client: SteppedClient, change: dict[str, str], code: int
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    assert client.call(COMMIT, GROUP | {"commitOffset": 1} | change).code == code


def test_a_new_group_begins_at_zero_where_the_first_message_is_still_there(
    client: SteppedClient,
) -> None:
    missing = client.call(COMMITTED, GROUP | {"topic": "nosuch"})
    assert (missing.code, missing.fields) == (22, {})
    send(client)
    assert offset(client, COMMITTED, consumerGroup="G") == 0
    assert client.call(COMMITTED, GROUP | {"setZeroIfNotFound": "false"}).code == 22


def test_a_new_group_begins_at_the_end_of_an_empty_queue(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """A client that has to ask for the end next would skip what arrives in between."""
    assert offset(client, COMMITTED, consumerGroup="G") == 0
    assert client.call(COMMITTED, GROUP | {"setZeroIfNotFound": "false"}).code == 22
    assert client.call(COMMITTED, GROUP | {"queueId": 99}).code == 22


def test_a_new_group_decides_itself_where_the_backlog_is_larger_than_memory(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, 20)
    monkeypatch.setattr("sluicemq.broker.admin.queries.memory_bytes", lambda: 1000)
    assert client.call(COMMITTED, GROUP).code == 22


def test_offsets_by_time(broker: SteppedBroker, client: SteppedClient) -> None:
    for _ in range(3):
        send(client)
        broker.clock.advance(10)
    assert offset(client, BY_TIME, timestamp=START_MS + 10_000) == 1
    assert offset(client, BY_TIME, timestamp=START_MS + 10_001) == 2
    assert offset(client, BY_TIME, timestamp=START_MS + 10_001, boundaryType="UPPER") == 1
    assert offset(client, BY_TIME, timestamp=START_MS + 10_001, boundaryType="lower") == 2


def test_the_earliest_store_time(client: SteppedClient) -> None:
    assert (client.call(EARLIEST, QUEUE).fields or {})["timestamp"] == "-1"
    send(client)
    assert (client.call(EARLIEST, QUEUE).fields or {})["timestamp"] == str(START_MS)


QUEUES = tuple(MessageQueue("T", "broker-a", number) for number in range(3))


def lock(client: SteppedClient, name: str, *queues: MessageQueue) -> set[MessageQueue]:
    body = bodies.encode_lock_batch(bodies.LockBatch("G", name, queues))
    return set(bodies.decode_locked_queues(client.call(LOCK, {}, body).body))


def unlock(client: SteppedClient, name: str, *queues: MessageQueue) -> None:
    body = bodies.encode_lock_batch(bodies.LockBatch("G", name, queues))
    assert client.call(UNLOCK, {}, body).code == 0


def test_a_queue_is_locked_for_one_client_until_it_lets_go_or_a_minute_passes(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert lock(client, "a", *QUEUES[:2]) == set(QUEUES[:2])
    assert lock(client, "b", *QUEUES) == {QUEUES[2]}
    unlock(client, "b", QUEUES[0])
    assert lock(client, "b", QUEUES[0]) == set()
    unlock(client, "a", QUEUES[0])
    assert lock(client, "b", QUEUES[0]) == {QUEUES[0]}
    broker.advance(59)
    assert lock(client, "b", QUEUES[1]) == set()
    assert lock(client, "b", QUEUES[0]) == {QUEUES[0]}
    broker.advance(1.1)
    assert lock(client, "b", QUEUES[1]) == {QUEUES[1]}
    assert lock(client, "a", QUEUES[0]) == set()


def test_groups_lock_apart(broker: SteppedBroker) -> None:
    locks = broker.core.locks
    assert locks.lock("G", "a", QUEUES[:1])
    assert locks.lock("H", "b", QUEUES[:1])
    assert locks.is_locked("G")
    locks.unlock("G", "a", QUEUES[:1])
    assert not locks.is_locked("G")
