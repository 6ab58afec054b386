"""How the official gRPC clients receive when they ask themselves: filters, batches, invisible time.

The clients, the arrangements and when which of them run: peer/official.py.
"""

import pytest
from peer.official import Stage, texts

from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message

CANNOT = {
    ("hidden", "rust"): "this client cannot change the invisible time",
    ("compressed", "node-java"): "behind the real proxy this client takes zlib for gzip",
    ("compressed", "rust-java"): "behind the real proxy this client gets it as it is stored",
}


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"tag": "red || blue"}, lambda n: n % 3 != 1),
        ({"sql": "n >= 4 AND TAGS = 'red'"}, lambda n: n >= 4 and n % 3 == 0),
    ],
    ids=["tags", "sql92"],
)
def test_filters(stage: Stage, how: dict[str, str], wanted: object) -> None:
    assert callable(wanted)
    (kind,) = how
    topic, group = stage.topic(f"filter_{kind}"), stage.group(f"filter_{kind}")
    stage.send(topic, 12, tags="red,green,blue")
    stage.open(topic, group, **how)
    got = stage.receive([f"m-{n}" for n in range(12) if wanted(n)])
    assert {event["attempt"] for event in got} == {1}


def test_a_batch_has_32(stage: Stage) -> None:
    topic, group = stage.topic("batch", queues=1), stage.group("batch")
    stage.send(topic, 40)
    stage.open(topic, group)
    first = stage("receive", name="c", batch=32)
    assert [event["body"] for event in first] == texts(32)
    stage("ack", name="c", bodies=",".join(texts(32)))
    stage.receive(texts(40)[32:])
    assert stage.left(topic, group) == []


def test_what_is_not_acknowledged_comes_again_when_its_time_is_over(stage: Stage) -> None:
    topic, group = stage.topic("again", queues=1), stage.group("again")
    stage.send(topic, 4)
    stage.open(topic, group)
    first = stage("receive", name="c", hide_s=10)
    assert [event["body"] for event in first] == texts(4)
    stage("ack", name="c", bodies="m-1,m-3")
    got = stage.receive(["m-0", "m-2"], within_s=40)
    assert {event["attempt"] for event in got} == {2}
    assert min(event["ms"] for event in got) >= first[0]["ms"] + 9_000
    assert {event["id"] for event in got} == {first[n]["id"] for n in (0, 2)}
    assert stage.left(topic, group) == []


def test_what_is_hidden_for_less_comes_earlier(stage: Stage) -> None:
    topic, group = stage.topic("hide", queues=1), stage.group("hide")
    stage.send(topic, 4)
    stage.open(topic, group)
    first = stage("receive", name="c", hide_s=300)
    assert [event["body"] for event in first] == texts(4)
    stage("hide", name="c", body="m-1", hide_s=1)
    stage("hide", name="c", body="m-2", hide_s=2)
    stage("hide", name="c", body="m-3", hide_s=600)
    got = stage.receive(["m-1", "m-2"])
    assert {event["attempt"] for event in got} == {2}
    stage("ack", name="c", bodies="m-0,m-3")  # the handle that the change gave
    assert stage.left(topic, group) == []


def test_what_a_remoting_producer_compressed_is_readable(stage: Stage) -> None:
    topic, group = stage.topic("compressed"), stage.group("compressed")
    body = "long " * 2000
    with Producer(stage.name_server) as producer:
        producer.send(Message(topic, body.encode()))
    stage.open(topic, group)
    (got,) = stage("receive", name="c")
    assert got["body"] == body
