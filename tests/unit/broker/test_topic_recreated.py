"""A topic that is deleted and created again: parked requests, offsets, and consumers that do not
know of it."""

import pytest

from simulation.pops import POP, fields_of, fill, numbers, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker import offsets as offsets_module
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.wire.frames import Command

CREATE, DELETE, DELETE_GROUP, NOTIFY = 17, 215, 207, 200054
QUERY_OFFSET, UPDATE_OFFSET, RESET = 14, 15, 222
NOT_EXIST, MOVED = 17, 21
NEW_TOPIC = {
    "topic": "T", "defaultTopic": "TBW102", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6,
    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false", "attributes": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def groups(broker: SteppedBroker) -> None:
    broker.core.groups.put(*map(GroupConfig, ("G", "H", "gone")))


def send(client: SteppedClient, count: int, topic: str = "T") -> None:
    for _ in range(count):
        assert client.call(310, send_fields(topic), b"x").code == 0


def commit(client: SteppedClient, offset: int, group: str = "G") -> None:
    fields = {"consumerGroup": group, "topic": "T", "queueId": 0, "commitOffset": offset}
    assert client.call(UPDATE_OFFSET, fields).code == 0


def committed(client: SteppedClient, group: str = "G", queue_id: int = 0) -> int | None:
    """What a consumer that starts now is told: its offset, None when there is none."""
    fields = {
        "consumerGroup": group, "topic": "T", "queueId": queue_id, "setZeroIfNotFound": "false",
    }  # fmt: skip
    answer = client.call(QUERY_OFFSET, fields)
    return int(fields_of(answer)["offset"]) if answer.code == 0 else None


def recreate(client: SteppedClient, *, after_deletion: int = 0) -> None:
    assert client.call(DELETE, {"topic": "T"}).code == 0
    assert client.call(CREATE, NEW_TOPIC).code == 0
    send(client, after_deletion)


def parked(client: SteppedClient, code: int, fields: dict[str, object]) -> Command:
    request = client.request(code, fields)
    client.feed(request)
    assert request.opaque not in client.answers, "it has to wait"
    return request


@pytest.mark.parametrize("kind", ["pull", "lite pull", "pop", "pop of one queue", "notification"])
def test_the_deletion_of_a_topic_answers_what_waits_for_its_messages(
    broker: SteppedBroker, client: SteppedClient, kind: str
) -> None:
    code, fields = {
        "pull": (11, pull_fields(sysFlag=6)),
        "lite pull": (361, pull_fields(sysFlag=6)),
        "pop": (POP, pop_fields(broker, pollTime=15_000)),
        "pop of one queue": (POP, pop_fields(broker, pollTime=15_000, queueId=1)),
        "notification": (NOTIFY, pop_fields(broker, pollTime=15_000)),
    }[kind]
    client.call(CREATE, NEW_TOPIC | {"topic": "U"})
    other = broker.connect()
    unrelated = parked(other, 11, pull_fields("U", sysFlag=6))
    request = parked(client, code, fields)
    operator = broker.connect()
    assert operator.call(DELETE, {"topic": "T"}).code == 0
    assert client.answers[request.opaque].code == NOT_EXIST
    assert unrelated.opaque not in other.answers
    assert len(broker.core.polls) == 1


@pytest.mark.parametrize("length", [0, 1, 5, 50, 60])
def test_a_consumer_that_knows_nothing_of_it_is_sent_to_the_first_message(
    broker: SteppedBroker, client: SteppedClient, length: int
) -> None:
    """Whatever the length of the new topic, and though the consumer commits its old position."""
    send(client, 50)
    client.call(11, pull_fields(offset=50, sysFlag=5, commitOffset=50))
    recreate(broker.connect(), after_deletion=length)
    answer = client.call(11, pull_fields(offset=50, sysFlag=5, commitOffset=50))
    assert (answer.code, answer.remark) == (MOVED, "OFFSET_RESET")
    assert fields_of(answer)["nextBeginOffset"] == "0"
    commit(client, 50)  # was on its way
    assert committed(broker.connect()) == 0
    answer = client.call(11, pull_fields(offset=0, sysFlag=5, commitOffset=0))
    assert int(fields_of(answer)["nextBeginOffset"]) == min(length, 32)
    commit(client, min(length, 32))
    assert committed(broker.connect()) == min(length, 32)


def test_a_group_that_was_away_begins_at_the_first_message_and_a_new_group_has_no_offset(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 5)
    commit(client, 5)
    recreate(client, after_deletion=9)
    assert [committed(client, queue_id=queue_id) for queue_id in (0, 1)] == [0, 0]
    assert "T@other" not in broker.core.offsets.table


def test_a_topic_that_a_send_creates_again_counts_too(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 5)
    commit(client, 5)
    client.call(DELETE, {"topic": "T"})
    send(client, 7)
    assert committed(client) == 0
    broker.core.topics.put(TopicConfig("T", 6, 6))
    assert "T" in broker.core.topics
    commit(client, 3)  # a change of the topic is no creation
    client.call(11, pull_fields(offset=0, sysFlag=4))
    client.call(11, pull_fields(offset=0, sysFlag=4))
    commit(client, 3)
    broker.core.topics.put(TopicConfig("T", 8, 8))
    assert committed(client) == 3


def test_pops_of_a_group_begin_at_the_first_message(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 50)
    assert len(numbers(client.call(POP, pop_fields(broker)))) == 32
    broker.settle()
    recreate(client)
    fill(client, 40)
    broker.settle()
    from_end = pop_fields(broker, initMode=1)
    assert numbers(client.call(POP, from_end)) == list(range(32))


def test_pulls_of_other_groups_and_queues_stay_on_the_quick_path(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset that no consumer takes up, because its group is gone for good, costs others nothing:
    neither of the quick ways hands a pull to the slow one."""
    send(client, 5)
    commit(client, 5, "gone")
    recreate(client, after_deletion=50)
    assert broker.core.offsets.resets.blocks_commits("gone", "T", 0)
    slow: list[object] = []
    pull = type(broker.core.pull).pull
    monkeypatch.setattr(
        type(broker.core.pull), "pull", lambda *args: (slow.append(args), pull(*args))[1]
    )
    for _ in range(3):
        assert client.call(11, pull_fields(offset=10)).code == 0
    assert len(slow) <= 1  # the compiled way learns a pull from the slow one
    assert client.call(11, pull_fields(offset=10, consumerGroup="gone")).code == MOVED


def test_the_reset_survives_a_crash_of_the_broker_and_an_orderly_stop(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 50)
    commit(client, 50)
    client.call(DELETE, {"topic": "T"})
    assert broker.core.offsets.must_save_now, (
        "the deletion is answered when the offsets are on disk"
    )
    broker.core.offsets.document.save()
    broker.core.offsets.resets_document.save()
    broker.finish_announcements()
    again = SteppedBroker(files=broker.files.kill())
    client = again.connect()
    client.call(CREATE, NEW_TOPIC)
    send(client, 60)
    assert committed(client) == 0
    again.core.offsets.document.save()
    again.core.offsets.resets_document.save()
    again.close()
    last = SteppedBroker(files=again.files)
    answer = last.connect().call(11, pull_fields(offset=50, sysFlag=5, commitOffset=50))
    assert (answer.code, fields_of(answer)["nextBeginOffset"]) == (MOVED, "0")


def test_offsets_that_outlived_their_topic_do_not_count_for_the_next_one(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """A crash between the deletion and the file of the offsets leaves them; so does RocketMQ 4."""
    send(client, 50)
    commit(client, 50)
    broker.core.offsets.document.save()
    broker.core.topics.remove("T")
    broker.store.delete_topic("T")
    broker.finish_announcements()
    again = SteppedBroker(files=broker.files.kill())
    client = again.connect()
    assert again.core.offsets.committed("G", "T", 0) >= 0
    client.call(CREATE, NEW_TOPIC)
    send(client, 60)
    assert committed(client) == 0


def test_a_crash_in_the_middle_of_a_creation_is_made_up_for_at_the_start(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 50)
    commit(client, 50)
    client.call(DELETE, {"topic": "T"})
    broker.core.offsets.document.save()
    broker.core.offsets.resets_document.save()
    client.call(CREATE, NEW_TOPIC)
    broker.finish_announcements()  # the topic is on disk, the offsets are not
    again = SteppedBroker(files=broker.files.kill())
    assert again.core.offsets.committed("G", "T", 1) == 0
    assert again.core.offsets.groups_by_deleted_topic == {}


def test_a_group_that_used_the_new_topic_at_another_broker_keeps_its_offsets(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """RocketMQ's broker has the store for a while: it ignores our file and creates the topic."""
    send(client, 50)
    commit(client, 50)
    client.call(DELETE, {"topic": "T"})
    broker.core.offsets.resets_document.save()
    broker.core.topics.on_created = lambda name: None
    broker.core.topics.put(TopicConfig("T", 2, 2))
    send(client, 9)
    commit(client, 9)
    broker.core.offsets.document.save()
    broker.close()
    again = SteppedBroker(files=broker.files)
    assert again.core.offsets.committed("G", "T", 0) == 9
    assert not again.core.offsets.resets


def test_a_deleted_group_and_the_oldest_deletions_are_forgotten(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets_module, "DELETED_TOPICS_MAX", 2)
    for topic in ("A", "B", "C"):
        client.call(CREATE, NEW_TOPIC | {"topic": topic})
        for group in ("G", "H"):
            fields = {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": 0}
            client.call(11, pull_fields(topic, consumerGroup=group, sysFlag=5))
            assert client.call(UPDATE_OFFSET, fields).code == 0
        client.call(DELETE, {"topic": topic})
    assert broker.core.offsets.groups_by_deleted_topic == {"B": {"G", "H"}, "C": {"G", "H"}}
    client.call(DELETE_GROUP, {"groupName": "H", "cleanOffset": "true"})
    assert broker.core.offsets.groups_by_deleted_topic == {"B": {"G"}, "C": {"G"}}


def test_an_operator_may_send_the_group_elsewhere_after_the_creation(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 50)
    client.call(11, pull_fields(offset=50, sysFlag=5, commitOffset=50))
    recreate(client, after_deletion=20)
    fields = {"topic": "T", "group": "G", "timestamp": -1, "isForce": "true", "queueId": 0,
              "offset": 15}  # fmt: skip
    assert broker.connect().call(RESET, fields).code == 0
    answer = client.call(11, pull_fields(offset=50, sysFlag=5, commitOffset=50))
    assert (answer.code, fields_of(answer)["nextBeginOffset"]) == (MOVED, "15")
