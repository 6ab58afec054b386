"""Traces that Java clients have written: read, told as a timeline, and written again alike."""

import base64
import gzip
import json
from pathlib import Path

import pytest

from sluicemq.cli.message import timeline_lines
from sluicemq.client.admin.traces import timeline
from sluicemq.model.trace_records import (
    ConsumeTrace,
    DeliveryTrace,
    SendTrace,
    decode_trace_records,
    encode_trace_records,
    search_keys,
)
from sluicemq.record.codec import decode_properties

TRAFFIC = Path(__file__).parent / "traffic"
SEND = 310
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"


def traces(name: str) -> list[tuple[str, bytes]]:
    """KEYS and body of each trace message that the client sent."""
    with gzip.open(TRAFFIC / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        (decode_properties(fields["i"].encode())["KEYS"], base64.b64decode(record["body_b64"]))
        for record in records
        if record["dir"] == ">" and record["header"]["code"] == SEND
        if (fields := record["header"]["extFields"])["b"] == TRACE_TOPIC
    ]


@pytest.mark.parametrize("name", ["java49-trace", "java53-trace"])
def test_a_trace_is_read_in_full_and_written_again_byte_for_byte(name: str) -> None:
    (sent, received) = traces(name)
    for keys, body in (sent, received):
        records, unread = decode_trace_records(body)
        assert unread == 0
        assert encode_trace_records(records) == body
        assert set(keys.split()) == {word for one in records for word in search_keys(one)}
    (published,) = decode_trace_records(sent[1])[0]
    taken, finished = decode_trace_records(received[1])[0]
    assert isinstance(published, SendTrace)
    assert isinstance(taken, DeliveryTrace)
    assert isinstance(finished, ConsumeTrace)
    assert published.message_id == taken.message_id == finished.message_id
    assert taken.request_id == finished.request_id


def test_a_timeline_is_told_from_them() -> None:
    records = [
        record for _, body in traces("java53-trace") for record in decode_trace_records(body)[0]
    ]
    found = timeline("C000020279554E0E2F2A67B8BF0E0000", records, None)
    assert (found.topic, found.tags, found.keys) == ("T53_trace", "A", "key-trace-0")
    send, deliver = found.steps
    assert (send.kind, send.group, send.result, send.cost_ms, send.place) == (
        "send", "G53_p_trace", "success", 39, "127.0.0.1:30911"
    )  # fmt: skip
    assert (deliver.kind, deliver.group, deliver.result, deliver.cost_ms, deliver.round) == (
        "deliver", "G53_trace", "success", 14, 0
    )  # fmt: skip
    assert deliver.time_ms - send.time_ms == 1597
    lines = timeline_lines(found)
    assert "+1597 ms" in lines[3]
    assert "to G53_trace -> success in 14 ms" in lines[3]
    assert lines[-1] == "Group G53_trace consumed it: 1 delivery, success."
