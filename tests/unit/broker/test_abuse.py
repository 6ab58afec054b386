"""What clients can make a broker keep, and names that are no names: each is bounded or refused."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from simulation.stepped import ManualClock, SteppedBroker, pull_fields, send_fields
from sluicemq.broker.consume import locks, longpoll
from sluicemq.broker.produce import producers
from sluicemq.config import BrokerConfig
from sluicemq.model.topic import MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command, encode

BAD_NAMES = (
    "..", ".", "../x", "../../x", "/etc", "a/b", "a\\b", "a\0b", "\0", " ", "a b", "a.b", "a\n",
    "a:b", "é", "%RETRY%..", "%RETRY%../../x", "%RETRY%a/b", "%DLQ%..", "x" * 128,
    "%RETRY%" + "x" * 249, "x" * 70_000,
)  # fmt: skip


@pytest.fixture
def broker() -> Iterator[SteppedBroker]:
    made = SteppedBroker(
        config=BrokerConfig(
            broker_name="broker-a", metrics_enable=False, auto_topics_max=40, auto_groups_max=30
        )
    )
    yield made
    made.close()


def heartbeat(groups: list[str] = [], producers: list[str] = [], **more: Any) -> bytes:  # noqa: B006
    subscription = {"topic": "T", "subString": more.pop("text", "*"), "subVersion": 1}
    subscription["expressionType"] = "TAG"
    consumers = [{"groupName": group, "subscriptionDataSet": [subscription]} for group in groups]
    said = {"producerDataSet": [{"groupName": group} for group in producers]}
    return orjson.dumps({"clientID": "c", "consumerDataSet": consumers} | said | more)


# ------------------------------------------------------------------------------- names as paths


def requests_with(name: str) -> list[tuple[int, dict[str, object], bytes]]:
    """Every request that makes or deletes something on disk by a name in it."""
    utf8 = name.encode("utf-8", "replace").decode()
    topic = {
        "topic": utf8, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1,
        "perm": 6, "topicFilterType": "SINGLE_TAG", "order": "false",
    }  # fmt: skip
    config = {"topicName": utf8, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    group = {"groupName": utf8}
    half = f"UNIQ_KEY\x01A1\x02TRAN_MSG\x01true\x02PGROUP\x01P\x02REAL_TOPIC\x01{utf8}\x02"
    return [
        (Code.SEND_MESSAGE_V2, send_fields(utf8), b"x"),
        (Code.SEND_MESSAGE_V2, send_fields(utf8, half, f=4), b"x"),
        (Code.SEND_MESSAGE_V2, send_fields(utf8, f"DELAY\x013\x02REAL_TOPIC\x01{utf8}\x02"), b"x"),
        (Code.SEND_BATCH_MESSAGE, send_fields(utf8, m="true"), b""),
        (Code.UPDATE_AND_CREATE_TOPIC, topic, b""),
        (Code.UPDATE_AND_CREATE_TOPIC_LIST, {}, orjson.dumps({"topicConfigList": [config]})),
        (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, orjson.dumps(group)),
        (Code.DELETE_TOPIC_IN_BROKER, {"topic": utf8}, b""),
        (Code.HEART_BEAT, {}, heartbeat([utf8])),
        (Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": utf8}, b""),
        (Code.PULL_MESSAGE, pull_fields(utf8, consumerGroup=utf8, suspendTimeoutMillis=0), b""),
        (
            Code.CONSUMER_SEND_MSG_BACK,
            {"group": utf8, "offset": 0, "delayLevel": 0, "originTopic": utf8},
            b"",
        ),
    ]


def stored(broker: SteppedBroker, directory: str = "/store") -> set[str]:
    """Everything below the store but its tables."""
    found = set()
    for name in broker.files.names(directory):
        path = f"{directory}/{name}"
        if name != "config":
            found |= {path} | stored(broker, path)
    return found


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
def test_a_name_that_is_none_makes_no_file_and_no_entry(broker: SteppedBroker, name: str) -> None:
    client = broker.connect()
    broker.core.topics.document.save()
    paths = stored(broker)
    topics, groups = set(broker.core.topics.table), set(broker.core.groups.table)
    for code, fields, body in requests_with(name):
        answer = client.call(code, fields, body)
        assert answer.code != 0 or code in (Code.HEART_BEAT, Code.DELETE_TOPIC_IN_BROKER), code
    assert stored(broker) <= paths
    if not name.startswith(("%RETRY%", "%DLQ%")):  # as a group's these are names of their own
        assert set(broker.core.groups.table) == groups
    assert set(broker.core.topics.table) == topics


def test_deleting_a_topic_that_is_a_path_is_refused(broker: SteppedBroker) -> None:
    answer = broker.connect().call(Code.DELETE_TOPIC_IN_BROKER, {"topic": "../../etc"})
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "illegal characters" in str(answer.remark)


def test_a_group_that_could_not_be_written_is_refused(broker: SteppedBroker) -> None:
    """One such group would keep the file of all groups from being saved, for good."""
    client = broker.connect()
    deep = b'{"groupName":"g","groupRetryPolicy":' + b'{"a":' * 300 + b"1" + b"}" * 301
    cyclic = b'{"groupName":"g","groupRetryPolicy":{"a":{"$ref":"$"}}}'
    large = orjson.dumps({"groupName": "g", "groupRetryPolicy": {"a": "x" * 9000}})
    many = orjson.dumps({"groupName": "g", "retryQueueNums": 1 << 30})
    for body in (deep, cyclic, large, many):
        assert client.call(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body).code != 0
    assert "g" not in broker.core.groups
    policy = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 5000]}}
    body = orjson.dumps({"groupName": "g", "groupRetryPolicy": policy})
    assert client.call(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body).code == 0
    broker.core.groups.document.save()


# ------------------------------------------------------------------------- tables by clients' keys


def test_topics_are_made_by_sends_up_to_a_number(broker: SteppedBroker) -> None:
    client = broker.connect()
    codes = [client.call(Code.SEND_MESSAGE_V2, send_fields(f"N{n}"), b"x").code for n in range(60)]
    assert set(codes) == {ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST}
    assert len(broker.core.topics) == 40
    assert client.call(Code.SEND_MESSAGE_V2, send_fields("N0"), b"x").code == 0


def test_groups_are_made_by_consumers_up_to_a_number(broker: SteppedBroker) -> None:
    client = broker.connect()
    client.call(Code.HEART_BEAT, {}, heartbeat([f"g{n}" for n in range(60)]))
    assert len(broker.core.groups) == 30
    assert len(broker.core.consumers.groups) <= 30


def test_producer_groups_are_bounded_and_long_names_are_none(
    broker: SteppedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers, "PRODUCER_GROUPS_MAX", 5)
    client = broker.connect()
    names = ["x" * 256, *(f"p{n}" for n in range(9))]
    assert client.call(Code.HEART_BEAT, {}, heartbeat(producers=names)).code == 0
    assert list(broker.core.producers.groups) == ["p0", "p1", "p2", "p3", "p4"]
    client.disconnect()
    assert not broker.core.producers.groups


def test_a_client_that_changes_its_name_leaves_nothing_behind(broker: SteppedBroker) -> None:
    client = broker.connect()
    for number in range(50):
        client.call(Code.HEART_BEAT, {}, heartbeat(producers=["p"], clientID=f"c{number}"))
    assert broker.core.producers.find_connection("c49") is not None
    assert broker.core.producers.find_connection("c0") is None


def test_leases_are_bounded_and_expired_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LEASES_MAX", 10)
    clock = ManualClock()
    table = locks.QueueLocks(CrashableFiles(), "/store", clock)
    queues = [MessageQueue("T", "b", number) for number in range(20)]
    assert len(table.lock("g", "c", queues)) == 10
    assert not table.lock("h", "c", queues)
    assert len(table.lock("g", "c", queues)) == 10  # renewed
    clock.advance(locks.LEASE_S + 1)
    assert len(table.lock("h", "d", queues)) == 10
    table.unlock("h", "d", [*queues, *queues])
    assert len(table.lock("i", "", queues)) == 10


def test_a_queue_is_unlocked_twice_without_an_error(broker: SteppedBroker) -> None:
    queue = {"topic": "T", "brokerName": "b", "queueId": 0}
    for client_id in ("", "c"):
        body = orjson.dumps({"consumerGroup": "g", "clientId": client_id, "mqSet": [queue, queue]})
        assert broker.connect().call(Code.UNLOCK_BATCH_MQ, {}, body).code == 0


def test_offsets_are_kept_for_queues_that_exist(broker: SteppedBroker) -> None:
    client = broker.connect()
    client.call(Code.SEND_MESSAGE_V2, send_fields("T"), b"x")
    client.call(Code.HEART_BEAT, {}, heartbeat(["g"]))
    place = {"consumerGroup": "g", "topic": "T", "commitOffset": 1}
    assert client.call(Code.UPDATE_CONSUMER_OFFSET, place | {"queueId": 0}).code == 0
    for queue_id in (-1, 4, 1 << 30):
        answer = client.call(Code.UPDATE_CONSUMER_OFFSET, place | {"queueId": queue_id})
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert f"no queue {queue_id}" in str(answer.remark)
    assert broker.core.offsets.table["T@g"] == {0: 1}


@pytest.mark.parametrize("kind", ["WHOLE", "LANE", "1", "x"])
def test_a_kind_of_filter_that_is_none_matches_nothing_and_breaks_nobody(
    broker: SteppedBroker, kind: str
) -> None:
    """The rules of lanes have kinds of their own, which a client may not name."""
    client = broker.connect()
    client.call(Code.SEND_MESSAGE_V2, send_fields("T"), b"x")
    for number, said in enumerate(("TAG", kind)):
        data = {"topic": "T", "subString": "[]x", "subVersion": 1, "expressionType": said}
        consumer = {"groupName": "g", "subscriptionDataSet": [data]}
        body = orjson.dumps({"clientID": f"c{number}", "consumerDataSet": [consumer]})
        broker.connect().call(Code.HEART_BEAT, {}, body)
    client.call(Code.SEND_MESSAGE_V2, send_fields("T"), b"x")
    wanted = pull_fields("T", 0, consumerGroup="g", sysFlag=0)
    for member in tuple(broker.core.consumers.groups["g"].members):
        assert isinstance(member, Peer)
        _, answers = broker.dispatcher.handle_frames(
            encode(
                Command(Code.PULL_MESSAGE, {name: str(value) for name, value in wanted.items()})
            ),
            member,
        )
        assert b"Error" not in answers
    broker.core.run_every_second()


def test_one_connection_parks_so_many_pulls(
    broker: SteppedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longpoll, "PARKED_PER_CONNECTION_MAX", 5)
    client, other = broker.connect(), broker.connect()
    client.call(Code.SEND_MESSAGE_V2, send_fields("T"), b"x")
    client.call(Code.HEART_BEAT, {}, heartbeat(["G"]))
    wanted = pull_fields("T", 1, sysFlag=6)
    client.feed(*(client.request(Code.PULL_MESSAGE, wanted) for _ in range(9)))
    other.feed(other.request(Code.PULL_MESSAGE, wanted))
    broker.step()
    assert len(broker.core.polls) == 6
    assert len(client.answers) == 4
    broker.run(20, step_s=5)
    assert len(broker.core.polls) == 0
    assert len(client.answers) == 9
