"""The Python examples of all documents run, page by page in their order, against a cluster.

The blocks of a page share their names, as in a session of a reader. A block is executed; then each
`async def` at its top whose parameters are known here is awaited for up to LONG_S: consumers go on
for ever. An error, raised or logged by the client, fails. Names that a page leaves to the reader
(`database`) and what it expects to be there (topics) are in STAND_INS and `seeded`;
pages for Spark run in tests/integration/spark/test_spark_documents.py.
"""

import asyncio
import contextlib
import inspect
import logging
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import sluicemq
from fences import LINES, ROOT, Fence, Line, execute, is_session, python_pages
from page_sessions import list_sessions
from sluicemq import Message, Sluice
from sluicemq.cli import main

LONG_S = 0.6
NAME_SERVER = "127.0.0.1:9876"


BY_OTHERS = {
    "java-examples.md": "tests/integration/client/test_java_examples.py",
    "testing.md": "tests/integration/test_testing_plugin.py",
}
"""Pages that a test of their own runs."""
PROGRAMS = [page for page in python_pages(of_spark=False) if page[0].document.name not in BY_OTHERS]


async def for_a_while(work: Any) -> Any:
    """What it returns; None of what goes on."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(work, LONG_S)


STAND_INS: dict[str, Any] = {
    **{name: getattr(sluicemq, name) for name in sluicemq.__all__},
    "asyncio": asyncio, "time": time, "datetime": datetime, "timedelta": timedelta, "UTC": UTC,
    "for_a_while": for_a_while,
}  # fmt: skip
"""What pages do not define: names of ours that an earlier page imported, and the reader's own."""

REPLACED = {
    "asyncio.run(main())": "asyncio.run(for_a_while(main()))",
    '"mq.example:9876", tls=tls': f'"{NAME_SERVER}"',  # TLS: tests/integration/test_tls_served.py
}


@pytest.fixture
def seeded(empty_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a cluster with orders and flights, in a folder of its own."""
    empty_cluster.start_broker(traceTopicEnable="true", metricsExporterType="DISABLE")
    (address,) = empty_cluster.addresses
    monkeypatch.chdir(tmp_path)

    async def seed() -> None:
        async with Sluice(address) as mq:
            properties = {"order_id": "17", "amount": "120", "price": "31", "region": "hz"}
            flight = {"origin": "JFK", "dep_delay": "101"}
            await mq.send("orders", b"120", tag="paid", keys=["k-1"], properties=properties)
            await mq.send("flights", b"flight 1", tag="UA", properties=flight)
            for group, topic, where in (
                ("late", "flights", None),
                ("billing", "orders", "price > 1"),
            ):
                async for message in mq.subscribe(topic, group=group, where=where):
                    await message.ack()
                    break

    asyncio.run(seed())
    return address


@pytest.mark.parametrize(
    "page",
    PROGRAMS,
    ids=lambda page: str(page[0].document.relative_to(ROOT)),
)
def test_the_examples_of_a_page_run(
    page: list[Fence],
    seeded: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scope = dict(STAND_INS)
    for block in page:
        before = dict(scope)
        execute(block, scope, REPLACED | {NAME_SERVER: seeded})
        ours = [name for name, value in scope.items() if before.get(name) is not value]
        asyncio.run(awaited([scope[name] for name in ours], seeded))
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert not errors, [one.getMessage() for one in errors]


async def awaited(values: list[Any], address: str) -> None:
    """Calls the coroutine functions among the values that take nothing, or a client and what else
    is known."""
    for function in filter(inspect.iscoroutinefunction, values):
        wanted = list(inspect.signature(function).parameters)
        if set(wanted) <= PARAMETERS.keys() and (not wanted or "mq" in wanted):
            async with Sluice(address) as mq:
                given = [PARAMETERS[name](mq) for name in wanted]
                given = [await one if inspect.iscoroutine(one) else one for one in given]
                await for_a_while(function(*given))


PARAMETERS: dict[str, Any] = {
    "mq": lambda mq: mq,
    "message": lambda mq: Message("orders", b"17 apples"),
}


def test_pages_were_found() -> None:
    for name, test in BY_OTHERS.items():
        assert f'"{name}"' in (ROOT / test).read_text()
    assert len(PROGRAMS) + len(list_sessions()) >= 30


# ------------------------------------------------------------------------------------- commands

QUICK = "topic", "group", "message", "consumer", "filter", "explain", "cluster", "delay", "doctor"
ELSEWHERE = re.compile(r"(?:^| )(?:-n|--proxy|--brokers?)(?: |$)|\d+\.\d+\.\d+\.\d+:")
RUN = [
    line
    for line in LINES
    if line.words[0] == "sluice"
    and line.words[1] in QUICK
    and not is_session(ROOT / line.place.partition(":")[0])
    and not ELSEWHERE.search(" ".join(line.words))
]


def test_the_quick_commands_of_all_pages_run(seeded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may say that a message or a group is not there, but not that they are wrong."""
    monkeypatch.setenv("NAMESRV_ADDR", seeded)
    assert len(RUN) > 40
    wrong = [(line.place, found) for line in RUN if (found := said(line))]
    assert not wrong


def said(line: Line) -> str:
    """What is wrong with a command when it is run."""
    done = CliRunner().invoke(main, line.words[1:])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return repr(done.exception)
    return done.output if done.exit_code not in (0, 1) else ""
