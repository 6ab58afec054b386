"""Changes of topics and groups: acknowledged is kept, refused is not made, the JSON follows."""

import contextlib
import errno
import random
from collections.abc import Callable

import pytest

from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.model.topic import DataVersion, GroupConfig, TopicConfig
from sluicemq.testing.files import CrashableFiles, PowerLost
from sluicemq.wire import tables
from thorough import seeds

pytestmark = pytest.mark.slow

JSON = "/store/config/topics.json"
CREATE = {
    "topic": "New", "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6,
    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false",
}  # fmt: skip
GROUP = tables.encode_group_config(GroupConfig("Readers", retry_times_max=3))
SEEDS = seeds(60, 200)


def files_of(broker: SteppedBroker, name: str) -> list[str]:
    return [one for one in broker.files.names("/store/config") if one.startswith(name)]


def journals(broker: SteppedBroker) -> list[str]:
    return [one for one in files_of(broker, "topics.json.") if "journal" in one]


def test_a_change_writes_a_line_and_not_the_table(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for number in range(500):
        client.call(17, CREATE | {"topic": f"Topic{number}"})
    broker.core.topics.document.save()
    before = len(broker.files.operations)
    client.call(17, CREATE)
    client.call(200, body=GROUP)
    written = [op for op in broker.files.operations[before:] if op.kind == "write"]
    assert [op.path.rpartition("/")[2].partition("-")[0] for op in written] == [
        "topics.json.journal", "subscriptionGroup.json.journal",
    ]  # fmt: skip
    assert sum(op.size for op in written) < 1500


def test_what_was_answered_survives_a_kill_and_the_json_follows(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.call(17, CREATE)
    client.call(200, body=GROUP)
    client.call(215, {"topic": "T"})
    assert b'"New"' not in broker.files.content(JSON)
    after = SteppedBroker(files=broker.files.kill())
    assert "New" in after.core.topics
    assert "T" not in after.core.topics
    assert after.core.groups.table["Readers"].retry_times_max == 3
    assert b'"New"' in after.files.content(JSON)
    assert journals(after) == []
    assert after.core.topics.version.counter > broker.core.topics.version.counter


def test_every_stop_leaves_the_json_right_and_no_journal(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.call(17, CREATE)
    broker.close()
    assert b'"New"' in broker.files.content(JSON)
    assert journals(broker) == []


def test_changes_of_a_moment_share_a_sync() -> None:
    broker = SteppedBroker(holds_announcements=True)
    client = broker.connect()
    client.feed(*(client.request(17, CREATE | {"topic": f"Topic{n}"}) for n in range(50)))
    broker.step()
    assert not client.answers
    before = len(broker.files.operations)
    broker.finish_announcements()
    assert [op.kind for op in broker.files.operations[before:]].count("sync") == 1
    assert len(client.answers) == 50


@pytest.mark.parametrize("written", [0, 40])
def test_a_full_disk_refuses_the_change_with_its_reason(
    broker: SteppedBroker, client: SteppedClient, written: int
) -> None:
    broker.core.topics.document.save()
    broker.files.fail_next("write", errno.ENOSPC, path_part="journal", written=written)
    answer = client.call(17, CREATE)
    assert (answer.code, "New" in broker.core.topics) == (14, False)
    assert "No space left on device. Free disk space" in (answer.remark or "")
    assert client.call(17, CREATE | {"topic": "Later"}).code == 0
    after = SteppedBroker(files=broker.files.kill())
    assert ("New" in after.core.topics, "Later" in after.core.topics) == (False, True)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda client: client.request(200, body=GROUP),
        lambda client: client.request(215, {"topic": "T"}),
        lambda client: client.request(310, send_fields("MadeBySend"), b"x"),
    ],
)
def test_so_do_groups_deletions_and_sends_that_make_a_topic(
    broker: SteppedBroker, client: SteppedClient, request_of: Callable[[SteppedClient], object]
) -> None:
    broker.files.fail_next("write", errno.ENOSPC, path_part="journal")
    before = (broker.core.topics.configs(), dict(broker.core.groups.table))
    command = request_of(client)
    client.feed(command)  # type: ignore[arg-type]
    broker.step()
    assert client.answers.popitem()[1].code == 14
    assert (broker.core.topics.configs(), dict(broker.core.groups.table)) == before


def test_what_a_broker_needs_for_itself_lives_in_memory_until_there_is_room(
    broker: SteppedBroker,
) -> None:
    broker.files.fail_next("write", errno.ENOSPC, path_part="journal")
    assert broker.core.topics.ensure("%RETRY%Readers", 1).queues == 1
    broker.core.topics.document.save()
    assert "%RETRY%Readers" in SteppedBroker(files=broker.files.kill()).core.topics


def test_a_sync_that_fails_is_said_in_the_answer_and_healed_by_the_next_edition() -> None:
    broker = SteppedBroker(holds_announcements=True)
    client = broker.connect()
    command = client.request(17, CREATE)
    client.feed(command)
    broker.files.fail_next("sync", errno.EIO, path_part="journal")
    broker.finish_announcements()
    answer = client.answers[command.opaque]
    assert answer.code == 1
    assert "may not have it after a power failure" in (answer.remark or "")
    command = client.request(17, CREATE | {"topic": "Later"})
    client.feed(command)
    broker.finish_announcements()
    assert client.answers[command.opaque].code == 0
    assert len(journals(broker)) == 2
    for seed in range(20):
        crashed = SteppedBroker(files=broker.files.crash(random.Random(seed)))
        assert "Later" in crashed.core.topics
    broker.core.topics.document.save()
    assert journals(broker) == []
    crashed = SteppedBroker(files=broker.files.crash(random.Random(1)))
    assert {"New", "Later"} <= crashed.core.topics.table.keys()


def test_a_line_cut_short_is_dropped_and_one_in_the_middle_costs_itself_alone(
    broker: SteppedBroker, client: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("One", "Two", "Three"):
        client.call(17, CREATE | {"topic": name})
    path = f"/store/config/{journals(broker)[0]}"
    whole = broker.files.content(path)
    cut = broker.files.kill()
    cut.put(path, whole[:-5])
    after = SteppedBroker(files=cut)
    assert ("Two" in after.core.topics, "Three" in after.core.topics) == (True, False)
    assert "cannot be read" not in caplog.text
    rotten = broker.files.kill()
    rotten.put(path, whole.replace(b'"Two"', b'"Tvo"'))
    after = SteppedBroker(files=rotten)
    assert {"One", "Three"} <= after.core.topics.table.keys()
    assert "Tvo" not in after.core.topics
    assert "1 lines before readable ones cannot be read" in caplog.text


def test_a_file_that_a_java_broker_wrote_since_is_not_overruled(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.call(17, CREATE)
    client.call(17, CREATE | {"topic": "T", "writeQueueNums": 9})
    table = tables.decode_topic_table_file(broker.files.content(JSON).decode())
    files = broker.files.kill()
    theirs = tables.TopicTable(
        {**table.topics, "T": TopicConfig("T", 2, 2)}, DataVersion(77, 5, 0)
    )  # fmt: skip
    files.put(JSON, tables.encode_topic_table_file(theirs).encode())
    after = SteppedBroker(files=files)
    assert "New" in after.core.topics
    assert after.core.topics.table["T"].config.write_queues == 2


class Changing:
    """Random changes by requests; `acknowledged` is what the answers said last of each name."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.broker = SteppedBroker(holds_announcements=True)
        self.client = self.broker.connect()
        self.acknowledged: dict[str, int] = {}
        self.open: dict[int, tuple[str, int]] = {}
        """Requests without an answer: name and what it is to be (0: gone)."""

    def run(self) -> None:
        while True:
            for _ in range(self.rng.randrange(1, 6)):
                self.change()
            if self.rng.random() < 0.7:
                self.broker.finish_announcements()
                self.take_answers()
            if self.rng.random() < 0.3:
                for document in self.broker.core.journaled_documents:
                    document.save()

    def change(self) -> None:
        number, queues = self.rng.randrange(8), self.rng.randrange(1, 30)
        if self.rng.random() < 0.5:
            name = f"Topic{number}"
            if self.rng.random() < 0.2:
                queues = 0
                command = self.client.request(215, {"topic": name})
            else:
                fields = CREATE | {"topic": name, "writeQueueNums": queues}
                command = self.client.request(17, fields)
        else:
            name = f"Group{number}"
            group = GroupConfig(name, retry_times_max=queues)
            command = self.client.request(200, body=tables.encode_group_config(group))
        self.open[command.opaque] = name, queues
        self.client.feed(command)
        self.broker.step()

    def take_answers(self) -> None:
        for opaque, answer in sorted(self.client.answers.items()):
            assert answer.code == 0, answer
            name, queues = self.open.pop(opaque)
            self.acknowledged[name] = queues
        self.client.answers.clear()

    def check(self, files: CrashableFiles) -> None:
        core = SteppedBroker(files=files).core
        possible = {name: {queues} for name, queues in self.acknowledged.items()}
        for name, queues in self.open.values():
            possible.setdefault(name, {0}).add(queues)
        for name, wanted in possible.items():
            topic, group = core.topics.get(name), core.groups.table.get(name)
            found = topic.config.write_queues if topic else group.retry_times_max if group else 0
            assert found in wanted, (name, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("is_power_lost", [False, True], ids=["kill -9", "power"])
@pytest.mark.parametrize("part", range(4))
def test_every_acknowledged_change_survives_every_moment(part: int, is_power_lost: bool) -> None:
    for seed in range(part, SEEDS, 4):
        world = Changing(seed)
        world.broker.files.power_fails_after = random.Random(-seed).randrange(400)
        with pytest.raises(PowerLost):
            world.run()
        world.take_answers()
        files = world.broker.files
        for life in range(4):  # starts that fail in the middle, and then one that does not
            files = files.crash(random.Random(seed)) if is_power_lost else files.kill()
            files.power_fails_after = world.rng.randrange(12) if life < 3 else None
            with contextlib.suppress(PowerLost):
                SteppedBroker(files=files)
        world.check(files.kill())
