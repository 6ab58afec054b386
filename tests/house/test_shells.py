"""One text for both shells: what `Admin` offers is the same for asyncio and for threads."""

import inspect
from typing import get_args

import pytest

from sluicemq.client.admin.operations import AdminOperations
from sluicemq.client.aio.cluster import Admin as AsyncioAdmin
from sluicemq.client.core.conversations import AsyncioShell, BlockingShell, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.sync.admin import Admin as BlockingAdmin
from sluicemq.client.sync.cluster import Cluster as BlockingCluster

OPERATIONS = sorted({"route", *(name for name in vars(AdminOperations) if name[0] != "_")})


def public(kind: type, *bases: type) -> set[str]:
    inherited = {name for base in bases for name in dir(base)}
    return {name for name in dir(kind) if not name.startswith("_")} - inherited


def one_sided(asyncio_admin: type, blocking_admin: type) -> set[str]:
    """What only one of the two offers, or offers by a text of its own."""
    ours = public(asyncio_admin, AsyncioShell) - {"directory"}
    theirs = public(blocking_admin, BlockingShell, BlockingCluster) | {"route"}
    return (ours ^ theirs) | {name for name in ours & theirs if name not in OPERATIONS}


def test_neither_admin_offers_what_the_other_does_not() -> None:
    assert one_sided(AsyncioAdmin, BlockingAdmin) == set()
    assert public(AsyncioAdmin, AsyncioShell) - {"directory"} == set(OPERATIONS)


def test_a_method_that_one_admin_lacks_is_found() -> None:
    class Richer(AsyncioAdmin):
        async def count_messages(self, topic: str) -> int:
            return len(topic)

    class RicherBlocking(BlockingAdmin):
        def empty_topic(self, topic: str) -> None: ...

    assert one_sided(Richer, BlockingAdmin) == {"count_messages"}
    assert one_sided(AsyncioAdmin, RicherBlocking) == {"empty_topic"}


def test_a_method_that_each_admin_writes_for_itself_is_found() -> None:
    class Own(AsyncioAdmin):
        async def count_messages(self, topic: str) -> int:
            return len(topic)

    class OwnBlocking(BlockingAdmin):
        def count_messages(self, topic: str) -> int:
            return len(topic)

    assert one_sided(Own, OwnBlocking) == {"count_messages"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_documented_and_typed_once(name: str) -> None:
    bound = [inspect.getattr_static(kind, name) for kind in (AsyncioAdmin, BlockingAdmin)]
    assert bound[0] is bound[1] or bound[0].__wrapped__ is bound[1].__wrapped__
    assert bound[0].__doc__
    signature = inspect.signature(bound[0])
    first, *parameters = signature.parameters.values()
    assert first.name == "self" or first.annotation is Directory
    assert all(one.annotation is not inspect.Parameter.empty for one in parameters)
    assert get_args(signature.return_annotation)[:2] == get_args(Conversation[int])[:2]
