"""Epochs of exactly-once sinks at one broker, request by request. Crashes: tests/crash."""

import json
import zlib

import pytest

from simulation.stepped import SMALL, SteppedBroker, SteppedClient, send_fields
from sluicemq.broker.epochs.epochs import CHUNK_MESSAGES, EPOCH_TOPIC, KEPT_MS
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records, encode_batch
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import (
    STAGING_QUEUES,
    STAGING_TOPIC,
    Owner,
    Stage,
    StagedRange,
    decode_staged_ranges,
    encode_staged_ranges,
)

COMMIT_EPOCH = 900201


@pytest.fixture
def broker() -> SteppedBroker:
    broker = SteppedBroker()
    broker.core.topics.put(TopicConfig("T", 2, 2, 6))
    ask(broker.connect(), "probe", 0)
    return broker


@pytest.fixture
def client(broker: SteppedBroker) -> SteppedClient:
    return broker.connect()


def ask(
    client: SteppedClient, query: str, epoch: int, *ranges: StagedRange, step: str = "prepare",
    topics: str = "T",
) -> Command:  # fmt: skip
    fields = {"query": query, "epoch": epoch, "step": step, "topics": topics}
    return client.call(COMMIT_EPOCH, fields, encode_staged_ranges(ranges))


def stage(
    client: SteppedClient, bodies: list[bytes], *, query: str = "q", epoch: int = 0,
    attempt: int = 0, topic: str = "T", queue_id: int | None = 0, delay: str | None = None,
) -> StagedRange:  # fmt: skip
    """Stages a batch; what the commit has to say of it."""
    value = Stage(Owner(query, epoch, 0, attempt), topic, queue_id, delay).encode()
    batch = [
        (0, body, f"SLUICE_STAGE\x01{value}\x02UNIQ_KEY\x01{id(body)}{n}\x02TAGS\x01t\x02".encode())
        for n, body in enumerate(bodies)
    ]
    answer = client.call(320, send_fields(STAGING_TOPIC, m="true"), encode_batch(batch))
    assert answer.code == 0
    assert answer.fields is not None
    offset = int(answer.fields["queueOffset"])
    checksum = zlib.crc32(b"".join(bodies))
    return StagedRange("broker-a", 0, offset, len(bodies), checksum, 0, attempt)


def commit(
    broker: SteppedBroker, client: SteppedClient, *ranges: StagedRange, epoch: int = 0,
    topics: str = "T",
) -> Command:  # fmt: skip
    """As a sink does: until it is published."""
    for _ in range(100):
        answer = ask(client, "q", epoch, *ranges, step="commit", topics=topics)
        if answer.code or state(answer) == "published":
            return answer
        broker.settle()
    raise AssertionError("it is never published")


def state(answer: Command) -> str:
    assert answer.fields is not None
    return answer.fields["state"]


def messages(broker: SteppedBroker, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    found: list[bytes] = []
    offset = 0
    while offset < broker.store.queue_offsets(topic, queue_id)[1]:
        read = broker.store.reader.read(topic, queue_id, offset, 100_000, 1 << 24)
        found += [record.body for record in decode_records(b"".join(read.data))]
        offset = read.next_offset
    return found


def test_a_probe_makes_the_two_hidden_topics(broker: SteppedBroker) -> None:
    topics = broker.core.topics
    assert topics.table[STAGING_TOPIC].queues == STAGING_QUEUES
    assert topics.is_system(STAGING_TOPIC)
    assert topics.is_system(EPOCH_TOPIC)


def test_staged_messages_appear_when_they_are_committed_without_what_staged_them(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    staged = stage(client, [b"a", b"b"])
    other = stage(client, [b"of an attempt that failed"], attempt=1)
    assert other.offset == 2
    assert messages(broker) == []
    assert state(commit(broker, client, staged)) == "published"
    read = broker.store.reader.read("T", 0, 0, 10, 1 << 20)
    records = decode_records(b"".join(read.data))
    assert [record.body for record in records] == [b"a", b"b"]
    assert [record.properties["TAGS"] for record in records] == ["t", "t"]
    assert all("SLUICE_STAGE" not in record.properties for record in records)


def test_states_are_told_when_they_are_on_disk() -> None:
    """Under ASYNC_FLUSH too: an fsync follows the decision, and another one the last message."""
    broker = SteppedBroker()
    broker.core.topics.put(TopicConfig("T", 2, 2, 6))
    client = broker.connect()
    ask(client, "probe", 0)
    staged = stage(client, [b"a"])
    assert state(ask(client, "q", 0, staged, step="prepare")) == "checking"
    assert broker.syncs_waiting == 1
    assert state(ask(client, "q", 0, staged, step="prepare")) == "checking"
    broker.finish_sync()
    assert state(ask(client, "q", 0, staged, step="prepare")) == "checked"
    assert messages(broker) == []
    assert state(ask(client, "q", 0, staged, step="commit")) == "checking"
    assert state(ask(client, "q", 0, staged, step="commit")) == "checking"
    assert messages(broker) == [b"a"]
    broker.settle()
    assert state(ask(client, "q", 0, staged, step="commit")) == "published"


def test_a_second_commit_has_no_effect_and_is_told_the_first_decision(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    first = stage(client, [b"a"])
    commit(broker, client, first)
    again = stage(client, [b"a"], attempt=7)
    answer = commit(broker, client, again)
    assert decode_staged_ranges(answer.body) == (first,)
    assert messages(broker) == [b"a"]
    following = stage(client, [b"b"], epoch=1)
    commit(broker, client, following, epoch=1)
    assert messages(broker) == [b"a", b"b"]
    assert commit(broker, client, again).body == b"", "older than the last: done long ago"
    assert messages(broker) == [b"a", b"b"]


def test_what_is_not_there_as_it_was_sent_is_refused_before_anything_is_decided(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    staged = stage(client, [b"a", b"b"])
    changes = (
        {"checksum": 1}, {"count": 3}, {"offset": 1}, {"attempt": 1}, {"queue_id": 5},
    )  # fmt: skip
    for change in changes:
        wrong = StagedRange(**{**{n: getattr(staged, n) for n in staged.__slots__}, **change})
        answer = commit(broker, client, wrong)
        assert answer.code == 604, change
        assert "Nothing of the epoch was published" in (answer.remark or "")
    assert messages(broker) == []
    commit(broker, client, staged)
    assert messages(broker) == [b"a", b"b"]


@pytest.mark.parametrize("topic", ["U", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"])
def test_a_topic_that_is_not_named_or_is_the_brokers_own_is_refused(
    broker: SteppedBroker, client: SteppedClient, topic: str
) -> None:
    staged = stage(client, [b"a"], topic=topic)
    answer = commit(broker, client, staged, topics="T" if topic == "U" else topic)
    assert answer.code == 16


def test_a_bad_request_is_refused(client: SteppedClient) -> None:
    fields = {"query": "q", "epoch": "1", "step": "commit"}
    assert client.call(COMMIT_EPOCH, fields | {"step": "dance"}).code != 0
    assert client.call(COMMIT_EPOCH, fields | {"query": "a/b"}).code != 0
    assert client.call(COMMIT_EPOCH, fields, b'{"ranges":[{"brokerName":""}]}').code != 0
    assert client.call(COMMIT_EPOCH, fields, b"no JSON").code != 0


def test_delays_are_kept(broker: SteppedBroker, client: SteppedClient) -> None:
    ranges = [
        stage(client, [delay.encode()], delay=delay)
        for delay in ("L1", "M2000", f"T{broker.clock.now_ms() + 3000}")
    ]
    commit(broker, client, *ranges)
    assert messages(broker) == []
    broker.run(1.2)
    assert messages(broker) == [b"L1"]
    broker.run(3.0)
    assert messages(broker)[:2] == [b"L1", b"M2000"]
    assert len(messages(broker)) == 3


def test_a_large_epoch_is_published_in_order_over_many_files_and_chunks(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    bodies = [b"%d" % number for number in range(3 * CHUNK_MESSAGES)]
    parts = range(0, len(bodies), 500)
    ranges = [stage(client, bodies[first : first + 500]) for first in parts]
    commit(broker, client, *ranges)
    assert messages(broker) == bodies
    assert broker.store.queue_offsets(EPOCH_TOPIC, 0)[1] >= 4


def test_the_last_epoch_of_a_query_is_known_after_its_record_is_deleted(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    staged = stage(client, [b"a"])
    commit(broker, client, staged)
    broker.close()
    path = "/store/config/sluiceEpochs.json"
    table = json.loads(broker.files.content(path))
    assert table["queries"]["q"]["epoch"] == 0
    broker.files.remove("/store/config/sluiceEpochs.json")
    again = SteppedBroker(files=broker.files.kill(), clock=broker.clock)
    assert again.core.epochs.table.queries["q"].epoch == 0, "from the log"
    broker.files.put(path, json.dumps(table).encode())
    again = SteppedBroker(files=broker.files.kill(), clock=broker.clock)
    again.store.delete_topic(EPOCH_TOPIC)
    last = SteppedBroker(files=again.files.kill(), clock=broker.clock)
    answer = commit(last, last.connect(), staged)
    assert state(answer) == "published"
    assert messages(last) == [b"a"]


def test_queries_are_forgotten_after_a_month(broker: SteppedBroker, client: SteppedClient) -> None:
    commit(broker, client, stage(client, [b"a"]))
    broker.clock.advance(KEPT_MS / 1000 + 1)
    broker.core.epochs.table.document.save()
    table = json.loads(broker.files.content("/store/config/sluiceEpochs.json"))
    assert table["queries"] == {}


def test_a_full_disk_delays_a_publication(broker: SteppedBroker, client: SteppedClient) -> None:
    staged = stage(client, [b"a"])
    ask(client, "q", 0, staged, step="commit")
    broker.files.fail_next("write", 28, path_part="commitlog", after=1)
    for _ in range(6):
        broker.step()
    broker.settle()
    broker.advance(0.2)
    broker.settle()
    commit(broker, client, staged)
    assert messages(broker) == [b"a"]


def test_a_topic_that_is_deleted_in_between_is_made_anew(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    staged = stage(client, [b"a"])
    ask(client, "q", 0, staged, step="commit")  # checked and recorded in its turn
    known = broker.core.epochs.table.queries.get("q")
    assert known is not None
    assert not known.is_done
    broker.core.topics.remove("T")
    commit(broker, client, staged)
    assert messages(broker) == [b"a"]
    assert "T" in broker.core.topics


def test_a_read_only_broker_commits_nothing(broker: SteppedBroker, client: SteppedClient) -> None:
    stage(client, [b"a"])
    broker.close()
    copy = SteppedBroker(files=broker.files.kill(), store_config=SMALL, read_only=True)
    answer = copy.connect().call(COMMIT_EPOCH, {"query": "q", "epoch": "0", "step": "prepare"})
    assert answer.code == 16
    assert "read-only" in (answer.remark or "")
