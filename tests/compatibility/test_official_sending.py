"""What the official gRPC clients send: normal, in order, delayed, taken back.

The clients, the arrangements and when which of them run: peer/official.py.
"""

from peer.official import Stage, by_group, texts

COUNT = 12
EARLY_MS = 1000
"""RocketMQ's timer counts in seconds."""

CANNOT = {("recalled", "rust"): "this client cannot take a message back"}


def test_what_is_sent_is_received_with_all_that_belongs_to_it(stage: Stage) -> None:
    topic, group = stage.topic("normal"), stage.group("normal")
    sent = stage.send(topic, COUNT, tags="a,b,c")
    stage.open(topic, group)
    got = stage.receive(texts(COUNT))
    assert {(event["body"], event["id"]) for event in got} == {
        (event["body"], event["id"]) for event in sent
    }
    for event in got:
        number = int(event["n"])
        assert event["key"] == event["body"] == f"m-{number}"
        assert (event["tag"], event["topic"]) == ("abc"[number % 3], topic)
        assert (event["attempt"], event["group"]) == (1, None)
    assert stage.left(topic, group) == []


def test_messages_of_a_message_group_keep_their_order(stage: Stage) -> None:
    topic = stage.topic("fifo", "FIFO")
    group = stage.group("fifo", consumeMessageOrderly=True)
    stage.send(topic, COUNT, keyed=3)
    stage.open(topic, group)
    got = stage.receive(texts(COUNT), batch=2)
    assert by_group(got) == {f"group-{key}": list(range(key, COUNT, 3)) for key in range(3)}


def test_a_delayed_message_comes_when_its_time_has_come(stage: Stage) -> None:
    topic, group = stage.topic("delay", "DELAY"), stage.group("delay")
    stage.open(topic, group)
    due = {event["body"]: event["ms"] + 3000 for event in stage.send(topic, 4, delay_ms=3000)}
    assert stage.left(topic, group) == []
    got = stage.receive(texts(4))
    assert all(event["ms"] >= due[event["body"]] - EARLY_MS for event in got)


def test_what_is_recalled_does_not_come(stage: Stage) -> None:
    topic, group = stage.topic("recall", "DELAY"), stage.group("recall")
    sent = stage.send(topic, 3, delay_ms=6000)
    (recalled,) = stage("recall", topic=topic, handle=sent[1]["handle"])
    assert recalled["id"] == sent[1]["id"]
    stage.open(topic, group)
    stage.receive(["m-0", "m-2"])
    assert stage.left(topic, group) == []
