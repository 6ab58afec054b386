"""Each operation of `Admin`, cancelled at each of its awaits, leaves no task and works again.

Their arguments are found by the names of their parameters, so that a new operation is covered, or
this test asks for a value.
"""

import asyncio
import inspect
from typing import Any

import pytest

from cancelling import WAYS, coroutines_of, inject, settled
from sluicemq import Admin
from sluicemq.client.admin.operations import AdminOperations
from sluicemq.client.core.transactions import TransactionState
from sluicemq.errors import SluiceError
from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.headers import UpdateAccountRequest
from sluicemq.wire.tables import RequestMode

pytestmark = pytest.mark.slow

SHELL = {"await_value", "send_request", "sleep", "run"}
"""What carries the operations, and is none itself."""
OPERATIONS = [*sorted(name for name in vars(AdminOperations) if name[0] != "_"), "route"]


def arguments(mq: EmbeddedSluice, message_id: str) -> dict[str, Any]:
    """A value for every parameter without a default."""
    return {
        "access_key": "somebody",
        "account": UpdateAccountRequest(access_key="somebody", secret_key="12345678"),
        "address": mq.servers.broker.address,
        "addresses": "127.0.0.1",
        "allowed": True,
        "begin_ms": 0,
        "broker": "broker-a",
        "broker_id": 1,
        "changes": {},
        "client_id": mq.client_id,
        "config": None,
        "configs": [],
        "contract": "strict",
        "count": 1,
        "end_ms": 1 << 50,
        "expression": "a = 1",
        "group": "g",
        "handle": "none",
        "high": 1,
        "key": "k",
        "low": 0,
        "message_id": message_id,
        "mode": RequestMode("t", "g"),
        "name": "t",
        "namespace": "space",
        "offset": 0,
        "queue": MessageQueue("t", "broker-a", 0),
        "queue_id": 0,
        "server": mq.servers.name_server_address,
        "source": "g",
        "state": TransactionState.COMMIT,
        "take": lambda _records: True,
        "target": "h",
        "targets": ["t"],
        "time_ms": 0,
        "topic": "t",
        "topics": ["t"],
        "transaction_id": message_id,
        "value": "v",
        "what": "topics",
    }


def test_every_coroutine_of_admin_is_an_operation() -> None:
    """So none keeps anything between two requests, and what holds for `run` holds for all."""
    assert {name for _, name in coroutines_of(Admin)} == {*OPERATIONS, *SHELL}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_cancelled_operation_leaves_no_task_and_works_again(name: str) -> None:
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=1)
        await mq.admin.create_group(GroupConfig("g"))
        sent = await mq.send("t", b"x", keys="k")
        known = arguments(mq, sent.message_id)
        known["config"] = GroupConfig("g") if name == "create_group" else TopicConfig("t")
        wanted = list(inspect.signature(inspect.unwrap(getattr(Admin, name))).parameters.values())
        wanted = [one for one in wanted[1:] if one.default is one.empty]
        positional = [known[one.name] for one in wanted if one.kind is not one.KEYWORD_ONLY]
        named = {one.name: known[one.name] for one in wanted if one.kind is one.KEYWORD_ONLY}

        async def act() -> Any:
            return await getattr(mq.admin, name)(*positional, **named)

        expected = await inject(act(), 0, WAYS[0])
        assert expected.error is None or isinstance(expected.error, SluiceError)
        mq.cluster.routes.expire("t")
        before = asyncio.all_tasks()
        at = 0
        while True:
            at += 1
            outcome = await inject(act(), at, WAYS[at % len(WAYS)])
            assert await settled(lambda: not asyncio.all_tasks() - before), outcome
            again = await inject(act(), 0, WAYS[0])
            assert again.error is None or isinstance(again.error, SluiceError)
            if not outcome.was_hit:
                break
        assert at > 1, "nothing was awaited"
