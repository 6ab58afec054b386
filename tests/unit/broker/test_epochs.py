"""Epochs of exactly-once sinks at one broker, request by request. Crashes: tests/crash."""

import json
import zlib

import pytest

from simulation.stepped import (
    SMALL,
    START_MS,
    ManualClock,
    SteppedBroker,
    SteppedClient,
    send_fields,
)
from sluicemq.broker.epochs.epochs import CHUNK_MESSAGES
from sluicemq.broker.epochs.table import RETENTION_MS
from sluicemq.config import BrokerConfig
from sluicemq.files import overwrite_text
from sluicemq.model.system_names import EPOCH_TOPIC, STAGING_TOPIC
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records, encode_batch, parse_head
from sluicemq.record.layout import CRC_MASK, RECORD_HEAD
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.frames import Command
from sluicemq.wire.signature import sign_command
from sluicemq.wire.staging import (
    STAGING_QUEUES,
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
    content = broker.files.content(path)
    assert json.loads(content)["queries"]["q"]["epoch"] == 0
    broker.files.remove("/store/config/sluiceEpochs.json")
    again = SteppedBroker(files=broker.files.kill(), clock=broker.clock)
    assert again.core.epochs.table.queries["q"][""].epoch == 0, "from the log"
    broker.files.put(path, content)
    again = SteppedBroker(files=broker.files.kill(), clock=broker.clock)
    again.store.delete_topic(EPOCH_TOPIC)
    last = SteppedBroker(files=again.files.kill(), clock=broker.clock)
    answer = commit(last, last.connect(), staged)
    assert state(answer) == "published"
    assert messages(last) == [b"a"]


def test_queries_are_forgotten_after_a_month(broker: SteppedBroker, client: SteppedClient) -> None:
    commit(broker, client, stage(client, [b"a"]))
    broker.clock.advance(RETENTION_MS / 1000 + 1)
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
    known = broker.core.epochs.table.queries["q"][""]
    assert not known.is_complete
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


# --------------------------------------------------------------------------------------- accounts

ACL_PATH = "/store/conf/plain_acl.yml"
ACCOUNTS = """\
globalWhiteRemoteAddresses: [10.9.9.9]
accounts:
- accessKey: owner001
  secretKey: secret-of-owner001
  topicPerms: [T=PUB]
- accessKey: other001
  secretKey: secret-of-other001
  topicPerms: [U=PUB]
- accessKey: shared01
  secretKey: secret-of-shared01
  topicPerms: [T=PUB, U=PUB]
- accessKey: admin001
  secretKey: secret-of-admin001
  admin: true
"""
KEYS = ("owner001", "other001", "shared01", "admin001")


class Guarded:
    """A broker whose access control can be switched between two lives of it."""

    def __init__(self) -> None:
        self.files = CrashableFiles()
        self.clock = ManualClock()
        self.start(acl=True)
        self.broker.core.topics.put(TopicConfig("T", 1, 1, 6), TopicConfig("U", 1, 1, 6))

    def start(self, *, acl: bool) -> None:
        if not self.files.exists(ACL_PATH):
            self.files.make_directory("/store/conf")
            self.files.open(ACL_PATH, create=True).close()
            overwrite_text(self.files, ACL_PATH, ACCOUNTS)
        config = BrokerConfig(
            broker_name="broker-a", metrics_enable=False, acl_enable=acl, acl_files=(ACL_PATH,)
        )
        self.broker = SteppedBroker(config=config, files=self.files, clock=self.clock)

    def restart(self, *, acl: bool) -> None:
        self.broker.close()
        self.start(acl=acl)

    def call(
        self, account: str, code: int, fields: dict[str, object], body: bytes = b""
    ) -> Command:
        """`account` "" is a client that may do everything: by its address, or without rules."""
        client = self.broker.connect("10.9.9.9" if not account else "10.0.0.7")
        texts = {name: str(value) for name, value in fields.items()}
        command = Command(code, texts, body, 7)
        if account:
            sign_command(command, account, f"secret-of-{account}")
        client.feed(command)
        self.broker.settle()
        return client.answers[7]

    def stage(self, account: str, body: bytes, topic: str, epoch: int) -> StagedRange:
        value = Stage(Owner("nightly", epoch, 0, 0), topic, 0).encode()
        names = f"SLUICE_STAGE\x01{value}\x02UNIQ_KEY\x01{account}{epoch}X\x02"
        batch = encode_batch([(0, body, names.encode())])
        self.call(account, COMMIT_EPOCH, {"query": "probe", "epoch": 0, "step": "prepare"})
        answer = self.call(account, 320, send_fields(STAGING_TOPIC, m="true"), batch)
        assert answer.code == 0, answer.remark
        offset = int((answer.fields or {})["queueOffset"])
        return StagedRange("broker-a", 0, offset, 1, zlib.crc32(body), 0, 0)

    def commit(self, account: str, topic: str, epoch: int, body: bytes) -> str:
        """A run of an epoch of the query `nightly`; its state in the end."""
        ranges = encode_staged_ranges([self.stage(account, body, topic, epoch)])
        fields = {"query": "nightly", "epoch": epoch, "step": "commit", "topics": topic}
        for _ in range(20):
            answer = self.call(account, COMMIT_EPOCH, fields, ranges)
            if answer.code or state(answer) == "published":
                break
        assert answer.code == 0, answer.remark
        return state(answer)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("attacker", ["other001", "shared01", "admin001"])
def test_an_account_does_not_decide_the_epochs_of_another(
    attacker: str, is_restarted: bool
) -> None:
    guarded = Guarded()
    assert guarded.commit("owner001", "T", 3, b"first") == "published"
    assert guarded.commit(attacker, "U", 1 << 60, b"other") == "published"
    if is_restarted:
        guarded.restart(acl=True)
    for epoch in (4, 5):
        assert guarded.commit("owner001", "T", epoch, b"%d" % epoch) == "published"
    assert guarded.commit(attacker, "U", 1 << 60, b"again") == "published"
    assert messages(guarded.broker, "T") == [b"first", b"4", b"5"]
    assert messages(guarded.broker, "U") == [b"other"]


def test_an_account_does_not_read_the_epochs_of_another() -> None:
    guarded = Guarded()
    guarded.commit("owner001", "T", 3, b"first")
    for account in ("other001", "shared01"):
        for epoch in (0, 3):
            fields = {"query": "nightly", "epoch": epoch, "step": "prepare", "topics": "U"}
            answer = guarded.call(account, COMMIT_EPOCH, fields)
            assert (state(answer), answer.body) == ("checking", b"")
    assert guarded.commit("shared01", "U", 3, b"own") == "published"
    assert messages(guarded.broker, "U") == [b"own"]


def test_an_account_publishes_no_row_to_a_topic_that_it_may_not_write_to() -> None:
    guarded = Guarded()
    ranges = encode_staged_ranges([guarded.stage("other001", b"forged", "T", 0)])
    for topics in ("T", "T,U", "U,T"):
        fields = {"query": "nightly", "epoch": 0, "step": "commit", "topics": topics}
        for _ in range(5):  # a commit that is taken is published after some of them
            answer = guarded.call("other001", COMMIT_EPOCH, fields, ranges)
            assert answer.code == 1
            assert "No default permission for topic:T" in (answer.remark or "")
    assert messages(guarded.broker, "T") == []


def test_two_accounts_resume_epochs_of_one_name_after_a_crash() -> None:
    guarded = Guarded()
    staged = {
        it: guarded.stage(it[0], it[1].encode(), it[1], 7)
        for it in (("owner001", "T"), ("other001", "U"))
    }
    for (account, topic), one in staged.items():
        fields = {"query": "nightly", "epoch": 7, "step": "commit", "topics": topic}
        guarded.call(account, COMMIT_EPOCH, fields, encode_staged_ranges([one]))
    guarded.files = guarded.broker.files.kill()
    guarded.start(acl=True)
    guarded.broker.settle()
    assert guarded.commit("owner001", "T", 7, b"again") == "published"
    assert guarded.commit("other001", "U", 7, b"again") == "published"
    assert (messages(guarded.broker, "T"), messages(guarded.broker, "U")) == ([b"T"], [b"U"])


LIVES = [
    (("", False), ("owner001", True), ("", False), ("owner001", True)),
    (("owner001", True), ("", True), ("owner001", True), ("", False)),
    (("", False), ("shared01", True), ("", True), ("shared01", True)),
]
"""Who runs the query in each life of the broker, and whether access control is on."""


@pytest.mark.parametrize("lives", LIVES)
def test_an_epoch_is_published_once_when_access_control_comes_and_goes(
    lives: tuple[tuple[str, bool], ...],
) -> None:
    guarded = Guarded()
    for number, (account, acl) in enumerate(lives):
        guarded.restart(acl=acl)
        if number:  # the last epoch is repeated, as after a crash of the query
            assert guarded.commit(account, "T", number - 1, b"repeated") == "published"
        assert guarded.commit(account, "T", number, b"%d" % number) == "published"
    assert messages(guarded.broker, "T") == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("topics_are_known", [False, True])
def test_epochs_of_earlier_releases_answer_those_who_may_write_to_their_topics(
    topics_are_known: bool,
) -> None:
    """Neither their records nor `sluiceEpochs.json` name an account, or topics; the staged
    messages do as long as they are there."""
    guarded = Guarded()
    guarded.restart(acl=False)
    guarded.commit("", "T", 5, b"old")
    record = b'"topics":["T"]'
    path = f"/store/commitlog/{0:020d}"
    guarded.broker.close()
    log = guarded.files.content(path)
    assert log.count(record) == 1
    at = log.index(record)
    guarded.files.put(path, log.replace(record, b'"formerly":"x"'))
    guarded.files.put(path, patched(guarded.files.content(path), at))
    guarded.files.remove("/store/config/sluiceEpochs.json.identity")
    if not topics_are_known:
        table = json.loads(guarded.files.content("/store/config/sluiceEpochs.json"))
        assert table["queries"] == {"nightly": {"epoch": 5, "offset": 0, "time": START_MS}}
        table["queries"]["nightly"]["offset"] = 99  # its record is deleted
        guarded.files.put("/store/config/sluiceEpochs.json", json.dumps(table).encode())
    guarded.start(acl=True)
    assert guarded.commit("owner001", "T", 5, b"repeated") == "published"
    assert guarded.commit("owner001", "T", 6, b"new") == "published"
    assert guarded.commit("other001", "U", 5, b"5") == "published"
    assert guarded.commit("other001", "U", 6, b"6") == "published"
    assert messages(guarded.broker, "T") == [b"old", b"new"]
    expected = [b"5", b"6"] if topics_are_known else [b"6"]
    assert messages(guarded.broker, "U") == expected


def patched(log: bytes, at: int) -> bytes:
    """The log with the checksum of the record that holds the byte at `at` made right."""
    position = 0
    while True:
        head = parse_head(log, position)
        if position <= at < position + head.size_bytes:
            crc = zlib.crc32(log[head.body]) & CRC_MASK
            place = position + RECORD_HEAD.at("body_crc")
            return log[:place] + crc.to_bytes(4, "big") + log[place + 4 :]
        position += head.size_bytes
