"""SYNC_FLUSH over the recording file port: no answer leaves, and no reader sees a message, before
the fsync that covers its record. And what was answered survives a crash.

Each test is also run against a planted bug, which it has to find.
"""

import dataclasses
import random

import pytest

from simulation.stepped import SMALL, SteppedBroker, pull_fields, send_fields
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.log import CommitLog
from sluicemq.testing.files import CrashableFiles

SYNC = dataclasses.replace(SMALL, flush_sync=True)
FOUND, NOT_FOUND = 0, 19


def sync_broker(files: CrashableFiles | None = None) -> SteppedBroker:
    broker = SteppedBroker(store_config=SYNC, files=files)
    broker.core.topics.put(TopicConfig("T", 1, 1))
    return broker


def is_log(path: str) -> bool:
    return "/commitlog/" in path


def check_order(broker: SteppedBroker) -> int:
    """Every answer to a send comes after an fsync of the log that came after the writes before
    it. Returns how many answers were checked."""
    checked = 0
    unsynced = 0
    for operation in broker.files.operations:
        if operation.kind == "write" and is_log(operation.path):
            unsynced += 1
        elif operation.kind == "sync" and is_log(operation.path):
            unsynced = 0
        elif operation.kind.startswith("answer"):
            assert unsynced == 0, "an answer left before the fsync of its record"
            checked += 1
    return checked


def send_some(broker: SteppedBroker) -> int:
    """Several turns, several connections, fsyncs that end late. Returns the number of sends."""
    clients = [broker.connect() for _ in range(3)]
    rng = random.Random(7)
    sends = 0
    for _ in range(30):
        for client in clients:
            client.feed(client.request(310, send_fields(), b"body"))
            sends += 1
        broker.step()
        while broker.syncs_waiting:
            broker.finish_sync()
            if rng.random() < 0.5:
                break
    while broker.syncs_waiting:
        broker.finish_sync()
    return sends


def test_no_answer_leaves_before_the_fsync_of_its_record() -> None:
    broker = sync_broker()
    assert check_order(broker) == 0
    sends = send_some(broker)
    assert check_order(broker) == sends


def test_without_the_fsync_that_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = sync_broker()
    monkeypatch.setattr(CommitLog, "sync", lambda log: log.written_offset)
    send_some(broker)
    with pytest.raises(AssertionError, match="before the fsync"):
        check_order(broker)


def test_no_reader_sees_a_message_before_its_fsync() -> None:
    broker = sync_broker()
    producer, consumer = broker.connect(), broker.connect()
    waiting = consumer.request(11, pull_fields(sysFlag=6))
    consumer.feed(waiting)
    producer.feed(producer.request(310, send_fields(), b"body"))
    broker.step()

    assert consumer.call(11, pull_fields()).code == NOT_FOUND
    assert consumer.call(30, {"topic": "T", "queueId": 0}).fields == {"offset": "0"}
    assert waiting.opaque not in consumer.answers
    assert producer.answers == {}

    broker.finish_sync()

    assert consumer.answers[waiting.opaque].code == FOUND
    assert consumer.call(11, pull_fields()).code == FOUND
    assert [answer.code for answer in producer.answers.values()] == [0]


def crash_and_look(seed: int, *, syncs_lie: bool) -> tuple[list[bytes], list[bytes]]:
    """Sends until a random moment, cuts the power; returns what was answered and what is there."""
    rng = random.Random(seed)
    broker = sync_broker()
    broker.files.syncs_lie = syncs_lie
    client = broker.connect()
    bodies: dict[int, bytes] = {}
    for number in range(rng.randrange(5, 40)):
        request = client.request(310, send_fields(), f"message {number}".encode())
        bodies[request.opaque] = request.body
        client.feed(request)
        if rng.random() < 0.6:
            broker.step()
        if broker.syncs_waiting and rng.random() < 0.6:
            broker.finish_sync()
    answered = [bodies[opaque] for opaque in sorted(client.answers)]
    after = sync_broker(broker.files.crash(rng))
    found = []
    reader = after.connect()
    while True:
        answer = reader.call(11, pull_fields(offset=len(found)))
        if answer.code != FOUND:
            return answered, found
        found += [message.body for message in decode_records(answer.body)]


@pytest.mark.parametrize("seed", range(40))
def test_what_was_answered_is_there_in_order_after_a_crash(seed: int) -> None:
    answered, found = crash_and_look(seed, syncs_lie=False)
    assert found[: len(answered)] == answered


def test_a_disk_that_lies_about_fsync_is_noticed_by_that_test() -> None:
    runs = (crash_and_look(seed, syncs_lie=True) for seed in range(40))
    assert any(found[: len(answered)] != answered for answered, found in runs)


def test_a_full_disk_refuses_the_turn_and_the_next_one_succeeds_when_there_is_room() -> None:
    broker = SteppedBroker()
    broker.core.topics.put(TopicConfig("T", 1, 1))
    client = broker.connect()
    assert client.call(310, send_fields(), b"first").code == 0
    broker.files.fail_next("write", 28, path_part="commitlog")
    refused = client.call(310, send_fields(), b"second")
    assert refused.code == 14
    assert "not stored" in (refused.remark or "")
    third = client.call(310, send_fields(), b"third")
    assert third.fields is not None
    assert (third.code, third.fields["queueOffset"]) == (0, "1")
    answer = client.call(11, pull_fields())
    assert [m.body for m in decode_records(answer.body)] == [b"first", b"third"]
