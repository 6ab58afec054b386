"""`sluice trace export`: spans of sends, deliveries and transactions at a collector over HTTP."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from otlp_receiver import Receiver, attributes_of
from sluicemq import Message, MessageNotFoundError, Sluice
from sluicemq.cli import main
from sluicemq.testing.embedded import embedded
from waiting import limit

SETTINGS = {"traceTopicEnable": "true", "messageDelayLevel": "1s 1s 1s 1s"}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().running() as found:
        yield found


async def exported(mq: Any, receiver: Receiver, *options: str) -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke, main,
        ["trace", "export", "-n", mq.servers.name_server_address, "--otlp", receiver.url,
         "--timeout", "1", "--json", *options],
    )  # fmt: skip


def spans_in(receiver: Receiver) -> list[tuple[str, Any, dict[str, Any]]]:
    """Service, span and attributes of all that came."""
    found = []
    while not receiver.received.empty():
        _, _, request = receiver.take()
        for one in request.resource_spans:
            service = attributes_of(one.resource.attributes)["service.name"]
            spans = one.scope_spans[0].spans
            found += [(service, span, attributes_of(span.attributes)) for span in spans]
    return found


async def traced(mq: Sluice, message_id: str, steps: int) -> None:
    """Waits until the writers have written so much of a message."""
    async with asyncio.timeout(limit(20)):
        while True:
            await asyncio.sleep(0.05)
            try:
                if len((await mq.admin.trace(message_id)).steps) >= steps:
                    return
            except MessageNotFoundError:
                continue


async def test_spans_of_a_message_that_fails_once_and_of_a_transaction(receiver: Receiver) -> None:
    rounds = []

    async def handle(message: Any) -> None:
        rounds.append(message.reconsume_times)
        if not message.reconsume_times:
            raise ValueError("the first time fails")

    async with embedded(settings=SETTINGS, trace=True, tcp=True) as mq:
        sent = await mq.send(
            Message("orders", b"1", tag="A", keys=("k",), properties={"traceparent": PARENT})
        )
        async with mq.consumer("billing", handle, retry_delay_level=1).subscribe("orders"):
            async with mq.transaction("payments", b"2") as tx:
                pass
            await traced(mq, sent.message_id, 4)
        await traced(mq, tx.transaction_id, 3)
        result = await exported(mq, receiver)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        found = spans_in(receiver)
        assert told["spans"] == len(found)
        assert (told["unread"], told["unfinished"]) == (0, 0)
        assert json.loads((await exported(mq, receiver)).stdout)["spans"] == 0, "committed"

        own = [it for it in found if it[1].trace_id.hex() == sent.message_id.lower()]
        send = next(span for _, span, _ in own if span.name == "send orders")
        assert send.kind == send.SPAN_KIND_PRODUCER
        rounds_told = sorted(
            (it for it in own if it[1].name == "process orders"),
            key=lambda it: it[1].start_time_unix_nano,
        )
        assert [service for service, _, _ in rounds_told] == ["billing", "billing"]
        assert [span.status.code for _, span, _ in rounds_told] == [2, 0]
        assert [more.get("error.type") for _, _, more in rounds_told] == ["exception", None]
        assert all(span.parent_span_id == send.span_id for _, span, _ in rounds_told)
        ends = [it for it in found if it[1].trace_id.hex() == tx.transaction_id.lower()]
        assert {span.name for _, span, _ in ends} == {"send payments", "commit payments"}

        again = await exported(mq, receiver, "--group", "others", "--parents")
        assert again.exit_code == 0, again.output
        spans = {span.name: span for _, span, _ in spans_in(receiver)}
        assert spans["send orders"].trace_id.hex() == PARENT[3:35]
        assert spans["send orders"].parent_span_id.hex() == PARENT[36:52]
        assert spans["process orders"].trace_id.hex() == PARENT[3:35]
        assert spans["process orders"].parent_span_id == send.span_id


async def test_what_the_endpoint_does_not_take_is_tried_again_and_not_committed(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluicemq.cli.message.EXPORT_RETRY_S", 0.02)
    receiver.answers[0] = 400
    async with embedded(settings=SETTINGS, trace=True, tcp=True) as mq:
        sent = await mq.send("orders", b"1")
        await traced(mq, sent.message_id, 2)
        running = asyncio.create_task(exported(mq, receiver))
        for _ in range(3):
            await asyncio.to_thread(receiver.refused.get, timeout=limit(20))
        receiver.answers[0] = 200
        result = await running
        assert json.loads(result.stdout)["spans"] == 1
        assert result.stderr.count("retrying") == 1
        assert "400" in result.stderr


def test_the_short_form_shows_one_message() -> None:
    runner = CliRunner()
    assert "MESSAGE_ID" in runner.invoke(main, ["trace", "show", "--help"]).output
    assert "export" in runner.invoke(main, ["trace", "--help"]).output
    asked = runner.invoke(main, ["trace", "-t", "x", "ID", "-n", "127.0.0.1:1"])
    assert asked.exit_code == 1
    assert "127.0.0.1:1" in asked.stderr
