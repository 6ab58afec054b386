"""A Talk runs alike in both shells."""

import pytest

from sluicemq.client.aio.cluster import Cluster as AsyncioCluster
from sluicemq.client.core.conversations import (
    AsyncioShell,
    BlockingShell,
    Call,
    Conversation,
    Sleep,
    operation,
)
from sluicemq.errors import ConnectionLostError
from sluicemq.wire.frames import Command


def twice(directory: str, text: str) -> Conversation[str]:
    """Both answers, one after the other; a lost connection is asked for again."""
    first = yield Call(directory, Command(1, {"text": text}))
    try:
        second = yield Call(directory, Command(2))
    except ConnectionLostError:
        second = yield Call(directory, Command(3))
    return f"{first.remark} {second.remark}"


class Answers:
    directory = "there"

    def answer(self, call: Call) -> Command:
        if call.command.code == 2:
            raise ConnectionLostError("away.")
        return Command(0, remark=f"{call.address}{call.command.code}")

    twice = operation(twice)


class Threads(Answers, BlockingShell):
    def send_request(self, call: Call) -> Command:
        return self.answer(call)

    def sleep(self, seconds: float) -> None:
        self.rested_s = seconds


class Tasks(Answers, AsyncioShell):
    async def send_request(self, call: Call) -> Command:
        return self.answer(call)

    async def sleep(self, seconds: float) -> None:
        self.rested_s = seconds

    exclusive = AsyncioCluster.exclusive


async def test_a_talk_runs_alike_in_both_shells() -> None:
    assert Threads().twice("x") == "there1 there3"
    assert await Tasks().twice(text="x") == "there1 there3"


async def test_a_talk_rests_in_both_shells() -> None:
    def late(directory: str) -> Conversation[str]:
        yield Sleep(1.5)
        return directory

    threads, tasks = Threads(), Tasks()
    assert (threads.run(late("x")), await tasks.run(late("x"))) == ("x", "x")
    assert (threads.rested_s, tasks.rested_s) == (1.5, 1.5)


async def test_an_error_that_the_talk_does_not_catch_is_the_callers() -> None:
    def lost(directory: str) -> Conversation[None]:
        yield Call(directory, Command(2))

    with pytest.raises(ConnectionLostError, match="away"):
        Threads().run(lost("a"))
    with pytest.raises(ConnectionLostError, match="away"):
        await Tasks().run(lost("a"))
