"""The push consumers of the official gRPC clients: what fails comes again, in order too, and is a
dead letter in the end.

The clients, the arrangements and when which of them run: peer/official.py.
"""

from peer.drivers import Event
from peer.official import Stage, by_body, by_group, texts

CUSTOMIZED = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 2000, 3000]}}
EXPONENTIAL = {
    "type": "EXPONENTIAL",
    "exponentialRetryPolicy": {"initial": 1000, "max": 3000, "multiplier": 2},
}

CANNOT = {("", "rust"): "this client has no push consumer"}


def test_a_push_consumer_gets_what_it_wants_once(stage: Stage) -> None:
    topic, group = stage.topic("push"), stage.group("push")
    stage.send(topic, 40, tags="red,green")
    got = stage.push(topic, group, 20, tag="green")
    assert by_body(got) == {text: [1] for text in texts(40)[1::2]}


def test_what_fails_comes_again_later_and_later(stage: Stage) -> None:
    topic = stage.topic("ladder")
    group = stage.group("ladder", **retries(stage))
    stage.send(topic, 4)
    got = stage.push(topic, group, 12, fail=2)
    assert by_body(got) == {text: [1, 2, 3] for text in texts(4)}
    for text in texts(4):
        first, second, third = (event["ms"] for event in got if event["body"] == text)
        if stage.client != "node":  # it takes the seconds of the policy for milliseconds
            assert second - first >= 1000 - 50
            assert third - second >= 2000 - 50


def test_what_fails_too_often_becomes_a_dead_letter(stage: Stage) -> None:
    topic = stage.topic("dead")
    group = stage.group("dead", **retries(stage), retryMaxTimes=1)
    stage.send(topic, 4)
    got = stage.push(topic, group, 8, fail=99)
    assert by_body(got) == {text: [1, 2] for text in texts(4)}
    assert stage.dead_letters(group, 4) == texts(4)


def test_what_fails_in_order_holds_up_its_message_group(stage: Stage) -> None:
    topic = stage.topic("order", "FIFO")
    group = stage.group("order", consumeMessageOrderly=True, **retries(stage))
    stage.send(topic, 6, keyed=3)
    got = stage.push(topic, group, 12, fail=1)
    assert_in_order(stage, got)


def test_what_fails_too_often_in_order_becomes_a_dead_letter(stage: Stage) -> None:
    topic = stage.topic("given_up", "FIFO")
    config = {"consumeMessageOrderly": True, **retries(stage), "retryMaxTimes": 1}
    group = stage.group("given_up", **config)
    stage.send(topic, 6, keyed=3)
    got = stage.push(topic, group, 12, fail=99)
    assert_in_order(stage, got)
    assert stage.dead_letters(group, 6) == texts(6)


def retries(stage: Stage) -> dict[str, object]:
    """What a group says of its retries: after 1 s, after 2 s more, and so on."""
    # the Node client knows no other policy
    return {"groupRetryPolicy": EXPONENTIAL if stage.client == "node" else CUSTOMIZED}


def assert_in_order(stage: Stage, got: list[Event]) -> None:
    """Of each of three message groups two messages were delivered, each twice."""
    # the Python client does not count what it tries itself
    attempts = [1, 1] if stage.client == "python" else [1, 2]
    assert by_body(got) == dict.fromkeys(texts(6), attempts)
    if stage.client == "go":  # it goes on with the next while it waits to try again
        got = [event for event in got if event["attempt"] == 1] * 2
        assert by_group(got) == {f"group-{key}": [key, key + 3] * 2 for key in range(3)}
    else:
        assert by_group(got) == {f"group-{key}": [key, key, key + 3, key + 3] for key in range(3)}
