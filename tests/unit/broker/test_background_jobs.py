"""A background job that fails, whichever it is, stops none of the others: an injector breaks each
in turn."""

import logging
from collections.abc import Callable
from typing import Any, Final

import pytest

from simulation.pops import POP, numbers, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker.state import BrokerState
from sluicemq.record.codec import decode_records

BREAKS: Final[dict[str, tuple[Callable[[BrokerState], Any], str]]] = {
    "parked pulls": (lambda b: b.polls, "expire"),
    "held answers": (lambda b: b.group_commit, "expire"),
    "requests to clients": (lambda b: b.client_requests, "expire"),
    "ordered pops": (lambda b: b.order, "wake_free_queues"),
    "epochs": (lambda b: b.epochs, "run_slice"),
    "transaction checks": (lambda b: b.transactions, "run_slice"),
    "filter watch": (lambda b: b.filter_watch, "survey_if_due"),
    "delay levels": (lambda b: b.delayed.levels, "deliver"),
    "delay level 2": (lambda b: b.delayed.levels, "_deliver_chunk"),
    "timed messages": (lambda b: b.delayed.timers, "deliver"),
    "timer files": (lambda b: b.delayed.timers, "prepare"),
    "POP revival": (lambda b: b.checkpoints, "deliver"),
    "lanes": (lambda b: b.lanes, "run_periodic_work"),
}
"""Job -> what to break."""
ITS_OWN: Final = {
    "delay levels": {"level"},
    "delay level 2": {"level"},
    "timed messages": {"timed", "popped"},
    "timer files": {"timed", "popped"},
    "POP revival": {"popped"},
    "parked pulls": {"parked"},
}
"""What a broken job may hold up. Popped messages come back by the timer too."""


def works(broker: SteppedBroker, client: SteppedClient) -> set[str]:
    """Send, pop and wait for everything that background jobs do; return what happened."""
    client.call(310, send_fields(e=1, properties="UNIQ_KEY\x01P\x02n\x017\x02"), b"popped")
    assert numbers(client.call(POP, pop_fields(broker, queueId=1, invisibleTime=2000))) == [7]
    client.call(310, send_fields(properties="UNIQ_KEY\x01L\x02DELAY\x012\x02"), b"level")
    client.call(310, send_fields(properties="UNIQ_KEY\x01T\x02TIMER_DELAY_SEC\x013\x02"), b"timed")
    parked = client.request(
        11, pull_fields("Other", consumerGroup="other", sysFlag=6, suspendTimeoutMillis=1000)
    )
    client.feed(parked)
    for _ in range(16):
        broker.run(0.5)
        broker.core.run_every_second()
    found = broker.store.reader.read("T", 0, 0, 100, 1 << 20)
    happened = {message.body.decode() for message in decode_records(b"".join(found.data))}
    if parked.opaque in client.answers:
        happened.add("parked")
    answer = client.call(POP, pop_fields(broker, queueId=1))
    if answer.body and numbers(answer) == [7]:
        happened.add("popped")
    return happened


@pytest.fixture
def prepared(broker: SteppedBroker, client: SteppedClient) -> SteppedBroker:
    client.call(310, send_fields("Other", "UNIQ_KEY\x01O\x02"), b"x")
    return broker


ALL: Final = {"level", "timed", "parked", "popped"}


def test_all_happens_when_nothing_is_broken(prepared: SteppedBroker, client: SteppedClient) -> None:
    assert works(prepared, client) == ALL
    assert not prepared.core.supervisor.failures


@pytest.mark.parametrize("job", BREAKS)
def test_a_broken_job_stops_no_other_and_works_when_it_is_mended(
    job: str,
    prepared: SteppedBroker,
    client: SteppedClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    find, name = BREAKS[job]
    part = find(prepared.core)
    tries = 0

    def broken(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        raise ZeroDivisionError("a bug")

    cls = type(part)
    monkeypatch.setattr(cls, name, broken)
    assert works(prepared, client) >= ALL - ITS_OWN.get(job, set())
    assert 1 < tries <= 40, "it is retried, more and more rarely"
    assert prepared.core.supervisor.failures[job] == tries
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [one.exc_info is not None for one in errors] == [True], "logged once, with traceback"
    monkeypatch.undo()
    for _ in range(12):
        prepared.run(0.5)
        prepared.core.run_every_second()
    found = prepared.store.reader.read("T", 0, 0, 100, 1 << 20)
    assert {m.body for m in decode_records(b"".join(found.data))} == {b"level", b"timed"}
