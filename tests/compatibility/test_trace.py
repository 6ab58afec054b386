"""Traces across implementations: Java's client writes and we read, we write and mqadmin reads, on
our broker and on the real one."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from peer import clusters
from peer.clusters import Cluster
from peer.drivers import Driver

from conftest import QUICK_CHECKS, missing_tool_is_a_reason
from sluicemq import Message, MessageNotFoundError
from sluicemq.cli import main
from sluicemq.client.admin.traces import Step, Timeline
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import PushConsumer
from waiting import limit

SETTINGS = {**QUICK_CHECKS, "traceTopicEnable": "true", "messageDelayLevel": "1s 1s 1s 1s 1s 1s"}
KINDS = {
    "sluicemq": partial(clusters.sluice_cluster, **SETTINGS),
    "rocketmq": partial(clusters.rocketmq_cluster, **SETTINGS, transactionOpBatchInterval="100"),
}
APPEAR_S = 20  # Java's client writes its traces every 5 s


@pytest.fixture(
    scope="module", params=["sluicemq", pytest.param("rocketmq", marks=pytest.mark.thorough)]
)
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Our cluster, then the real one, with traceTopicEnable."""
    with ExitStack() as stack:
        with missing_tool_is_a_reason():
            directory = tmp_path_factory.mktemp(f"trace-{request.param}")
            running = stack.enter_context(KINDS[request.param](directory))
        yield running


@pytest.fixture
def java(driver: Callable[[str], Driver]) -> Driver:
    return driver("java-5.3.3")


def timeline(broker: Cluster, message_id: str, complete: Callable[[Timeline], bool]) -> Timeline:
    end = time.monotonic() + limit(APPEAR_S)
    found = None
    with Admin(broker.name_server) as admin:
        while time.monotonic() < end:
            try:
                found = admin.trace(message_id)
            except MessageNotFoundError:
                time.sleep(0.2)
                continue
            if complete(found):
                return found
            time.sleep(0.2)
    raise AssertionError(f"not complete after {APPEAR_S} s: {found}")


def steps(found: Timeline, kind: str) -> list[Step]:
    return [step for step in found.steps if step.kind == kind]


def ended(count: int) -> Callable[[Timeline], bool]:
    """Whether so many deliveries have ended."""
    return lambda found: (
        sum(bool(s.result) for s in steps(found, "deliver")) >= count and bool(steps(found, "send"))
    )


def test_we_tell_what_javas_clients_have_traced(broker: Cluster, java: Driver) -> None:
    where = {"ns": broker.name_server, "topic": "Tjava", "trace": 1}
    sent = java.call("send", count=3, mode="sync", **where)
    java.call("push", group="Gjava", expect=6, fail=1, level=1, **where)
    for event in sent:
        found = timeline(broker, str(event["msg_id"]), ended(2))
        (send,) = steps(found, "send")
        assert (send.group, send.result) == ("driver-producer", "success")
        assert (found.topic, found.tags) == ("Tjava", "A")
        assert [(s.group, s.round, s.result) for s in steps(found, "deliver")] == [
            ("Gjava", 0, "failed"),
            ("Gjava", 1, "success"),
        ]
    shown = CliRunner().invoke(
        main, ["trace", str(sent[0]["msg_id"]), "-n", broker.name_server, "--json"]
    )
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["groups"][0]["consumed"] is True


def test_we_tell_javas_batches_message_by_message(broker: Cluster, java: Driver) -> None:
    """Java writes one record with the ids of all."""
    where = {"ns": broker.name_server, "topic": "Tjavabatch", "trace": 1}
    sent = java.call("send", count=3, mode="batch", **where)
    ids = str(sent[0]["msg_id"]).split(",")
    assert len(ids) == 3
    joined = timeline(broker, str(sent[0]["msg_id"]), lambda found: bool(steps(found, "send")))
    assert joined.steps[0].detail.startswith("normal, ")
    places = str(sent[0]["offset_msg_id"]).split(",")
    # The real broker gives all three the id of the batch: they are found by where they lie.
    for message_id in places if broker.kind == "rocketmq" else [*ids, *places]:
        found = timeline(broker, message_id, lambda found: bool(steps(found, "send")))
        assert [step.kind for step in found.steps] == ["send", "store"]
        assert found.steps[1].detail == "in Tjavabatch"


def test_we_tell_the_end_of_javas_transactions(broker: Cluster, java: Driver) -> None:
    sent = java.call(
        "transact", ns=broker.name_server, topic="Tjavatx", group="Gjavatx", count=2, trace=1,
        outcomes="commit,rollback", expect=0,
    )  # fmt: skip
    results = [
        steps(timeline(broker, str(e["msg_id"]), lambda f: bool(steps(f, "transaction"))),
              "transaction")[0].result
        for e in sent if e["event"] == "sent"
    ]  # fmt: skip
    assert results == ["commit_message", "rollback_message"]


def test_mqadmin_tells_what_we_have_traced(broker: Cluster, java: Driver, tmp_path: Path) -> None:
    done: list[str] = []
    with Producer(broker.name_server, group="Gours", trace=True) as producer:
        sent = producer.send("Tours", b"12345", tag="A", keys="key-of-ours")
        batch = producer.send_batch([Message("Tours", b"1"), Message("Tours", b"2")])
    consumer = PushConsumer(
        broker.name_server, "Gours-consumers", lambda m: done.append(m.message_id), trace=True
    ).subscribe("Tours")
    with consumer:
        end = time.monotonic() + limit(APPEAR_S)
        while len(done) < 3 and time.monotonic() < end:
            time.sleep(0.05)
    for result in (sent, *batch):
        timeline(broker, result.message_id, ended(1))
        told = ""
        while "Gours-consumers" not in told:
            assert time.monotonic() < end + limit(APPEAR_S), told
            (event,) = java.call(
                "admin",
                ns=broker.name_server,
                words="\n".join(["queryMsgTraceById", "-i", result.message_id]),
            )
            told = str(event["text"])
        lines = [line.split() for line in told.splitlines()]
        assert ["Pub"] in [line[:1] for line in lines], told
        (published,) = [line for line in lines if line[:1] == ["Pub"]]
        assert published[1] == "Gours"
        assert "success" in published
        assert any("Gours-consumers" in line and "success" in told for line in lines), told
