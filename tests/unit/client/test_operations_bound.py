"""One text for both shells: what `Admin` offers is the same for asyncio and for threads."""

import inspect
from typing import get_args

import pytest

from sluicemq.client.aio.cluster import Admin as AsyncioAdmin
from sluicemq.client.aio.cluster import Cluster as AsyncioCluster
from sluicemq.client.core.admin import AdminOperations
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.talks import AsyncioShell, BlockingShell, Call, Talk, operation
from sluicemq.client.sync.admin import Admin as BlockingAdmin
from sluicemq.client.sync.cluster import Cluster as BlockingCluster
from sluicemq.errors import ConnectionLostError
from sluicemq.wire.frames import Command

OPERATIONS = sorted(name for name in vars(AdminOperations) if not name.startswith("_"))


def public(kind: type, *bases: type) -> set[str]:
    inherited = {name for base in bases for name in dir(base)}
    return {name for name in dir(kind) if not name.startswith("_")} - inherited


def test_neither_admin_offers_what_the_other_does_not() -> None:
    shell = {"directory"}
    assert public(AsyncioAdmin, AsyncioShell) - shell == set(OPERATIONS)
    assert public(BlockingAdmin, BlockingShell, BlockingCluster) | {"route"} == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_documented_and_typed_once(name: str) -> None:
    bound = [inspect.getattr_static(kind, name) for kind in (AsyncioAdmin, BlockingAdmin)]
    assert bound[0] is bound[1] or bound[0].__wrapped__ is bound[1].__wrapped__
    assert bound[0].__doc__
    signature = inspect.signature(bound[0])
    first, *parameters = signature.parameters.values()
    assert first.name == "self" or first.annotation is Directory
    assert all(one.annotation is not inspect.Parameter.empty for one in parameters)
    assert get_args(signature.return_annotation)[:2] == get_args(Talk[int])[:2]


def twice(directory: str, text: str) -> Talk[str]:
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
    def exchange(self, call: Call) -> Command:
        return self.answer(call)


class Tasks(Answers, AsyncioShell):
    async def exchange(self, call: Call) -> Command:
        return self.answer(call)

    alone = AsyncioCluster.alone


async def test_a_talk_runs_alike_in_both_shells() -> None:
    assert Threads().twice("x") == "there1 there3"
    assert await Tasks().twice(text="x") == "there1 there3"


async def test_an_error_that_the_talk_does_not_catch_is_the_callers() -> None:
    def lost(directory: str) -> Talk[None]:
        yield Call(directory, Command(2))

    with pytest.raises(ConnectionLostError, match="away"):
        Threads().run(lost("a"))
    with pytest.raises(ConnectionLostError, match="away"):
        await Tasks().run(lost("a"))
