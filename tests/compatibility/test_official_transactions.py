"""Transactions of the official gRPC clients: ended by the producer, by its answer to a check, or by
the answer of another one when it is gone.

The clients, the arrangements and when which of them run: peer/official.py.
"""

from peer.official import Stage, named


def transact(stage: Stage, topic: str, **options: object) -> dict[str, str]:
    """The ids of what was checked, by body; each exactly as it was sent."""
    events = stage("transact", topic=topic, timeout_s=60, **options)
    assert not named(events, "incomplete"), events
    sent = {event["body"]: event["id"] for event in named(events, "sent")}
    checked = {event["body"]: event["id"] for event in named(events, "checked")}
    assert all(sent.get(body, text) == text for body, text in checked.items())
    return checked


def consumed(stage: Stage, topic: str, group: str, *expect: str) -> None:
    stage.open(topic, group)
    stage.receive(expect)
    assert stage.left(topic, group) == []


def test_only_what_is_committed_is_consumed(stage: Stage) -> None:
    topic, group = stage.topic("transact", "TRANSACTION"), stage.group("transact")
    checked = transact(
        stage, topic, count=6, outcomes="commit,rollback,unknown",
        checks="rollback,rollback,commit,rollback,rollback,rollback", expect=2,
    )  # fmt: skip
    assert sorted(checked) == ["m-2", "m-5"]
    consumed(stage, topic, group, "m-0", "m-2", "m-3")


def test_a_producer_answers_for_one_that_is_gone(stage: Stage) -> None:
    topic, group = stage.topic("orphans", "TRANSACTION"), stage.group("orphans")
    assert transact(stage, topic, prefix="gone", count=3, outcomes="unknown") == {}
    checked = transact(
        stage, topic, prefix="here", count=1, checks="commit,rollback,commit", expect=3
    )
    assert sorted(checked) == ["gone-0", "gone-1", "gone-2"]
    consumed(stage, topic, group, "gone-0", "gone-2", "here-0")
