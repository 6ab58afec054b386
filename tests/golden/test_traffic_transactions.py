"""Transactions that real producers made with a real broker, made again with ours.

Their requests are fed byte for byte, except that the places of half messages in an end (37) are
those that our broker has answered. Compared: the answers, the broker's question (39) with its
message, and what becomes visible.
"""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulation.stepped import ManualClock, SteppedBroker, SteppedClient, pull_fields
from sluicemq.config import BrokerConfig
from sluicemq.record.codec import decode_record, decode_records
from sluicemq.wire.frames import Command, decode, encode

TRAFFIC = Path(__file__).parent / "traffic"
FED = {10, 310, 34, 35, 37}
PLACES = ("tranStateTableOffset", "commitLogOffset", "offsetMsgId")
Record = dict[str, Any]


def records(name: str) -> list[Record]:
    with gzip.open(TRAFFIC / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [r for r in map(json.loads, lines) if r["peer"].endswith("→broker")]


class Replay:
    """Our broker, the clients of the recording, and where the half messages lie with us."""

    def __init__(self, name: str) -> None:
        self.records = records(name)
        born = [r["header"]["extFields"] for r in self.records if r["header"]["code"] in (10, 310)]
        began_ms = int(born[0].get("g") or born[0]["bornTimestamp"])
        self.broker = SteppedBroker(
            config=BrokerConfig(
                broker_name="broker-g", metrics_enable=False, transaction_timeout_ms=5000,
                transaction_check_interval_ms=3000,
            ),
            clock=ManualClock(began_ms),
        )  # fmt: skip
        self.clients: dict[int, SteppedClient] = {}
        self.places: dict[str, tuple[str, str]] = {}
        self.topic = str(born[0].get("b") or born[0]["topic"])

    def client(self, record: Record) -> SteppedClient:
        return self.clients.setdefault(record["conn"], self.broker.connect())

    def ask(self, record: Record) -> Command | None:
        """Feed a recorded request; our answer, if there is one."""
        command = decode(base64.b64decode(record["frame_b64"])[4:])
        client = self.client(record)
        if command.code == 37:
            fields = command.fields or {}
            offset, physical = self.places[fields["msgId"]]
            command.fields = fields | dict(zip(PLACES, (offset, physical), strict=False))
        client.feed_bytes(encode(command))
        self.broker.settle()
        answer = client.answers.get(command.opaque)
        if command.code in (10, 310) and answer is not None:
            found = answer.fields or {}
            place = (found["queueOffset"], str(int(found["msgId"][16:], 16)))
            self.places[found["transactionId"]] = place
        return answer

    def question(self, record: Record) -> Command:
        """Our question to the same client, after as much time as it may take."""
        client = self.client(record)
        for _ in range(100):
            asked = [r for r in client.requests if r.code == 39]
            if asked:
                client.requests.clear()
                fields = asked[0].fields or {}
                place = (fields["tranStateTableOffset"], fields["commitLogOffset"])
                self.places[fields["msgId"]] = place
                return asked[0]
            self.broker.run(0.1)
        raise AssertionError("it was not asked")


def without_places(fields: dict[str, str] | None) -> dict[str, str]:
    return {k: "" if k in PLACES else v for k, v in (fields or {}).items()}


@pytest.mark.parametrize("name", ["java53-transaction", "java49-transaction", "go-transaction"])
def test_recorded_transactions_end_with_us_as_they_did_there(name: str) -> None:
    replay = Replay(name)
    answers: dict[int, Command | None] = {}
    questions = 0
    for record in replay.records:
        header = record["header"]
        if record["dir"] == ">" and header["code"] in FED:
            answers[record["n"]] = replay.ask(record)
        elif record["dir"] == "<" and header["code"] == 39 and "req_code" not in record:
            questions += 1
            theirs = decode(base64.b64decode(record["frame_b64"])[4:])
            ours = replay.question(record)
            assert without_places(ours.fields) == without_places(theirs.fields)
            assert set(ours.fields or {}) == set(theirs.fields or {})
            assert ours.is_oneway
            assert same(ours) == same(theirs)
        elif record.get("req_code") == 37:
            answer = answers[record["re"]]
            assert answer is not None
            assert (answer.code, answer.remark) == (header["code"], header.get("remark"))
            assert answer.fields == header.get("extFields")
    assert questions == 1
    answer = replay.broker.connect().call(11, pull_fields(replay.topic))
    found = decode_records(answer.body)
    assert [message.body for message in found] == [b"hello tran 0", b"hello tran 2"]
    assert [message.sys_flag & 0xC for message in found] == [8, 8]
    assert len(replay.broker.core.transactions.table) == 0


def same(question: Command) -> tuple[object, ...]:
    """What of a question's message does not depend on its place and time."""
    message = decode_record(question.body)
    properties = dict(message.properties)
    properties.pop("WAIT", None)  # the real broker writes false here, whatever the producer said
    properties.pop("SLUICE_FIRST_HALF", None)
    return (
        message.topic, message.queue_id, message.body, properties, message.sys_flag,
        message.born_time_ms, message.reconsume_times,
    )  # fmt: skip
