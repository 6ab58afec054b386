"""The half and op queues that a real 5.3.2 broker left behind when it died (store golden3).

Three records of one transaction lie there: its half and two copies that checks have made; the op of
its rollback was lost with the real broker's buffer, so it is undecided. The other transaction was
committed, and its op says so. RocketMQ 4 writes ops in another form: that is made here.
"""

import tarfile
from pathlib import Path

import pytest

from simulation.stepped import ManualClock, SteppedBroker, SteppedClient, pull_fields
from sluicemq.broker.transactions.prepared import OP_PROPERTIES, parse_op
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.model.system_names import HALF_TOPIC, OP_TOPIC, TRANSACTION_GROUP
from sluicemq.record.codec import decode_record, decode_records
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.bodies import Heartbeat, encode_heartbeat
from sluicemq.wire.frames import FLAG_ONEWAY, Command

ARCHIVE = Path(__file__).parent / "store" / "golden3_trans.tar.gz"
DIED_MS = 1_795_227_859_500
UNIQUE_ID = "7F000001000000000000000000000001"


def golden_files(*, without: str = "timerwheel") -> CrashableFiles:
    files = CrashableFiles()
    with tarfile.open(ARCHIVE) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member) if member.isfile() else None
            name = member.name.removeprefix("golden3/")
            if content is None or without in name:
                continue
            files.make_directory("/" + name.rpartition("/")[0])
            files.put("/" + name, content.read())
    return files


def opened(files: CrashableFiles) -> SteppedBroker:
    return SteppedBroker(
        config=BrokerConfig(
            broker_name="golden-a", cluster_name="GoldenCluster", metrics_enable=False
        ),
        store_config=StoreConfig(
            root="/store", commit_log_file_bytes=16 * 1024, consume_queue_file_bytes=2000
        ),
        files=files,
        clock=ManualClock(DIED_MS),
    )


def producer(broker: SteppedBroker) -> SteppedClient:
    client = broker.connect()
    client.feed(Command(34, {}, encode_heartbeat(Heartbeat("c", ("PG",), ()))))
    broker.settle()
    return client


def test_what_a_real_broker_left_undecided_is_found_and_decided() -> None:
    broker = opened(golden_files())
    [transaction] = broker.core.transactions.table
    assert (transaction.unique_id, transaction.offset, transaction.check_count) == (UNIQUE_ID, 3, 2)
    client = producer(broker)
    broker.run(31, 1.0)
    [asked] = [request for request in client.requests if request.code == 39]
    message = decode_record(asked.body)
    assert (message.topic, message.queue_id, message.body) == ("TopicA", 2, b"tx1")
    assert message.properties["TRANSACTION_CHECK_TIMES"] == "3"
    fields = asked.fields or {}
    end = {
        "producerGroup": "PG", "tranStateTableOffset": fields["tranStateTableOffset"],
        "commitLogOffset": fields["commitLogOffset"], "commitOrRollback": "8",
        "fromTransactionCheck": "true", "msgId": UNIQUE_ID,
    }  # fmt: skip
    client.feed(Command(37, end, flag=FLAG_ONEWAY))
    broker.run(120, 1.0)
    answer = broker.connect().call(11, pull_fields("TopicA") | {"queueId": 2})
    assert [m.body for m in decode_records(answer.body)] == [b"tx0", b"tx1"]
    assert len(client.requests) == 1


def test_a_half_that_the_real_broker_has_superseded_still_ends_its_transaction() -> None:
    """The producer names the first half: it was slow."""
    broker = opened(golden_files())
    client = producer(broker)
    end = {
        "producerGroup": "PG", "tranStateTableOffset": 1, "commitLogOffset": 530,
        "commitOrRollback": 12, "fromTransactionCheck": "false", "msgId": UNIQUE_ID,
    }  # fmt: skip
    assert client.call(37, end).code == 0
    broker.run(120, 1.0)
    assert client.requests == []
    assert len(broker.core.transactions.table) == 0


def test_without_offsets_everything_is_read_and_copies_are_one_transaction() -> None:
    broker = opened(golden_files(without="consumerOffset"))
    [transaction] = broker.core.transactions.table
    assert (transaction.unique_id, transaction.offset, transaction.check_count) == (UNIQUE_ID, 3, 2)


@pytest.mark.parametrize("op", [b"3", b"3,", b"1,2,3,"], ids=["4.x", "5.x", "5.x batch"])
def test_ops_of_every_release_are_read(op: bytes) -> None:
    broker = opened(golden_files())
    host = bytes(4) + bytes(4)
    broker.store.writer.append(OP_TOPIC, 0, op, OP_PROPERTIES, 100, 0, 0, 0, host, host)
    broker.store.commit()
    again = opened(broker.files.kill())
    assert len(again.core.transactions.table) == 0


@pytest.mark.parametrize(
    ("body", "offsets"),
    [(b"12", [12]), (b"12,15,", [12, 15]), (b"", []), (b"x,7,-1", [7])],
)
def test_what_is_no_offset_in_an_op_is_passed_over(body: bytes, offsets: list[int]) -> None:
    assert parse_op(memoryview(body)) == offsets


def test_offsets_beyond_the_queues_begin_at_their_ends() -> None:
    broker = opened(golden_files())
    for topic in (HALF_TOPIC, OP_TOPIC):
        broker.core.offsets.commit(TRANSACTION_GROUP, topic, 0, 99)
    broker.core.offsets.document.save()
    assert len(opened(broker.files.kill()).core.transactions.table) == 0
