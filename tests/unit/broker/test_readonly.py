"""A broker over a copy: what may be asked is answered, what changes something is refused."""

import json
import struct
from typing import Any

import pytest

from simulation.stepped import SteppedBroker, pull_fields, send_fields
from sluicemq.broker.admin.readonly import REFUSED_CODES, make_refusing_handlers
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import StoreError
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.codes import RequestCode

SIZES = StoreConfig(root="/store", commit_log_file_bytes=4096, consume_queue_file_bytes=400)


@pytest.fixture(scope="module")
def written() -> CrashableFiles:
    """A store with files of other sizes than the defaults, 20 messages, one group that read 5."""
    broker = SteppedBroker(store_config=SIZES, config=BrokerConfig(broker_name="origin"))
    broker.core.topics.put(TopicConfig("T", 4, 4))
    client = broker.connect()
    for number in range(20):
        assert client.call(310, send_fields(), b"body %d" % number + bytes(300)).code == 0
    broker.core.groups.get_or_create("G")
    client.call(15, {"consumerGroup": "G", "topic": "T", "queueId": 0, "commitOffset": 5})
    for document in broker.core.documents:
        document.save()
    broker.store.close()
    return broker.files


@pytest.fixture
def copy(written: CrashableFiles) -> CrashableFiles:
    return written.kill()


def shown(files: CrashableFiles, **config: Any) -> SteppedBroker:
    """What `--read-only --store /store` makes of the files."""
    made = BrokerConfig(metrics_enable=False, **config)
    return SteppedBroker(
        files=files, config=made, store_config=StoreConfig(root="/store"), read_only=True
    )


def contents(files: CrashableFiles) -> dict[str, bytes]:
    found = {}
    todo = ["/store"]
    while todo:
        path = todo.pop()
        found[path] = files.content(path)
        todo += [f"{path}/{name}" for name in files.names(path)]
    return found


def test_messages_groups_and_offsets_are_shown_whatever_the_sizes(copy: CrashableFiles) -> None:
    broker = shown(copy)
    assert broker.settings.store.commit_log_file_bytes == 4096
    assert broker.settings.store.consume_queue_file_bytes == 400
    client = broker.connect()
    answer = client.call(11, pull_fields(maxMsgNums=3))
    assert [m.body[:6] for m in decode_records(answer.body)] == [b"body 0", b"body 1", b"body 2"]
    fields = {"consumerGroup": "G", "topic": "T", "queueId": 0}
    assert client.call(14, fields).fields == {"offset": "5"}


def test_the_broker_takes_the_names_of_the_one_that_wrote_the_store(copy: CrashableFiles) -> None:
    broker = shown(copy)
    assert broker.settings.broker.broker_name == "origin"
    assert broker.settings.broker.cluster_name == "DefaultCluster"
    assert shown(copy, broker_name="mine").settings.broker.broker_name == "mine"


def test_addresses_and_paths_of_a_copied_configuration_are_not_used(copy: CrashableFiles) -> None:
    made = BrokerConfig(broker_ip1="10.1.2.3", metrics_enable=False)
    store = StoreConfig(root="/store", commit_log_path="/data/commitlog")
    broker = SteppedBroker(files=copy, config=made, store_config=store, read_only=True)
    assert broker.settings.broker.broker_ip1 is None
    assert broker.settings.store.commit_log_path == "/store/commitlog"
    assert broker.store.queue_offsets("T", 0) == (0, 20)


def test_consuming_works_and_its_offsets_are_gone_with_the_broker(copy: CrashableFiles) -> None:
    before = contents(copy)
    broker = shown(copy)
    client = broker.connect()
    body = {
        "clientID": "c@1",
        "consumerDataSet": [
            {
                "groupName": "fresh", "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "subscriptionDataSet": [{"topic": "T", "subString": "*", "subVersion": 1}],
                "unitMode": False,
            }
        ],
    }  # fmt: skip
    assert client.call(34, {}, json.dumps(body).encode()).code == 0
    fields = {"consumerGroup": "fresh", "topic": "T", "queueId": 0}
    assert client.call(15, fields | {"commitOffset": 9}).code == 0
    for document in broker.core.documents:
        document.save()
    assert client.call(14, fields).fields == {"offset": "9"}
    broker.store.tick()
    broker.store.close()
    assert contents(copy) == before
    again = shown(copy)
    assert "fresh" not in again.core.groups
    assert again.core.offsets.committed("fresh", "T", 0) == -1


@pytest.mark.parametrize("code", sorted(REFUSED_CODES))
def test_every_change_is_refused_with_a_text_that_says_why(
    copy: CrashableFiles, code: RequestCode
) -> None:
    answer = shown(copy).connect().call(code, send_fields(), b"{}")
    assert answer.code == 16
    assert "read-only" in (answer.remark or "")
    assert "/store" in (answer.remark or "")
    assert "without --read-only" in (answer.remark or "")


READING = {
    11, 12, 14, 15, 21, 26, 28, 29, 30, 31, 32, 33, 34, 35, 38, 41, 42, 43, 45, 46, 52, 54, 60, 61,
    201, 202, 203, 204, 208, 223, 300, 303, 305, 307, 308, 309, 321, 351, 352, 361, 400, 402,
    900101, 900111, 900121, 900131, 900132, 900133, 900134, 200052, 200054, 200055, 905, 906, 907,
    900301, 900302, 900303, 900304, 900305, 900306, 315, 317, 328, 343, 345,
    # refused by every broker
    354, 355, 1007, 2003, 3004, 3005, 3009, 3010, 5001, *range(200074, 200080),
}  # fmt: skip


def test_every_request_is_known_to_change_nothing_or_is_refused(copy: CrashableFiles) -> None:
    """A new request has to be put here or into `readonly._CHANGES`."""
    codes = set(shown(copy).dispatcher.handlers)
    assert codes - set(make_refusing_handlers("/store")) <= READING, sorted(
        codes - set(REFUSED_CODES) - READING
    )


def test_topics_and_groups_that_no_table_tells_of_are_shown(copy: CrashableFiles) -> None:
    for name in ("topics.json", "subscriptionGroup.json"):
        for edition in (name, f"{name}.bak"):
            if copy.exists(f"/store/config/{edition}"):
                copy.remove(f"/store/config/{edition}")
    core = shown(copy).core
    config = core.topics.table["T"].config
    assert (config.read_queues, config.perm) == (1, 4)
    assert "G" in core.groups


@pytest.mark.parametrize("trouble", ["no queues", "crashed", "torn", "no checkpoint"])
def test_a_store_that_has_to_be_recovered_is_recovered_in_memory(
    copy: CrashableFiles, trouble: str
) -> None:
    if trouble != "no checkpoint":
        copy.put("/store/abort", b"123")
    if trouble in ("torn", "no checkpoint"):
        copy.remove("/store/checkpoint")
    if trouble == "no queues":
        for name in copy.names("/store/consumequeue/T/0"):
            copy.remove(f"/store/consumequeue/T/0/{name}")
    expected = 20
    if trouble == "torn":
        last = f"/store/commitlog/{copy.names('/store/commitlog')[-1]}"
        data = copy.content(last)
        expected -= tear(copy, last, data)
    before = contents(copy)
    broker = shown(copy)
    assert broker.store.queue_offsets("T", 0) == (0, expected)
    answer = broker.connect().call(11, pull_fields(offset=expected - 1))
    assert [m.queue_offset for m in decode_records(answer.body)] == [expected - 1]
    broker.store.close()
    assert contents(copy) == before


def tear(files: CrashableFiles, path: str, data: bytes) -> int:
    """Spoil the last record of a file; the number of records lost."""
    at = last = 0
    while (size := struct.unpack_from(">i", data, at)[0]) > 0:
        last, at = at, at + size
    file = files.open(path)
    file.pwrite(b"\xff" * 100, max(last, at - 150))
    file.sync()
    return 1


@pytest.mark.parametrize(
    ("put", "text"),
    [
        ([], "does not exist"),
        (["/store/x"], "contains commitlog"),
        (["/store/inner/commitlog/00000000000000000000"], "Specify /store/inner"),
    ],
    ids=["missing", "something else", "one level up"],
)
def test_what_is_no_store_is_refused_with_where_to_look(put: list[str], text: str) -> None:
    files = CrashableFiles()
    for path in put:
        files.put(path, bytes(4096))
    with pytest.raises(StoreError, match=r"is not a message store|does not exist") as caught:
        shown(files)
    assert text in str(caught.value)
