"""What a consumer asks of the proxy, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from proxied import Proxied, Speaker, proxied
from sluicemq.config.proxying import ProxyLimits
from sluicemq.model.topic import GroupConfig
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import Code
from sluicemq.testing.virtual import VirtualClock

TOPIC: Final = "orders"
GROUP: Final = "g"
Scene = Callable[[Proxied, Speaker], Awaitable[None]]


def play(scene: Scene, **settings: str) -> None:
    """The scene with a topic of two queues, on virtual time."""

    async def run() -> None:
        async with proxied(VirtualClock(), ProxyLimits(), store=None, **settings) as proxy:
            await proxy.mq.admin.create_topic(TOPIC, queues=2)
            await proxy.mq.admin.create_group(GroupConfig(GROUP))
            await scene(proxy, proxy.speaker())

    asyncio.run(run())


def receive_request(**fields: Any) -> m.ReceiveMessageRequest:
    fields.setdefault("invisible_duration", m.Duration(seconds=30))
    fields.setdefault("long_polling_timeout", m.Duration(seconds=5))
    return m.ReceiveMessageRequest(
        group=m.Resource(name=GROUP),
        message_queue=m.MessageQueue(topic=m.Resource(name=TOPIC)),
        **{"batch_size": 32, **fields},
    )


def tagged(expression: str, kind: int = 1) -> m.FilterExpression:
    return m.FilterExpression(type=kind, expression=expression)


def outcome(answers: list[m.ReceiveMessageResponse]) -> tuple[int, list[m.Message]]:
    """Status and messages; the time of delivery stands behind them."""
    first, *others, last = answers
    assert first.HasField("status")
    assert last.HasField("delivery_timestamp")
    assert all(answer.HasField("message") for answer in others)
    return first.status.code, [answer.message for answer in others]


async def receive(client: Speaker, **fields: Any) -> list[m.Message]:
    code, messages = outcome(await client.ask("ReceiveMessage", receive_request(**fields)))
    assert code == (Code.OK if messages else Code.MESSAGE_NOT_FOUND)
    return messages


def ack_request(*handles: str) -> m.AckMessageRequest:
    entries = [
        m.AckMessageEntry(message_id=f"id{i}", receipt_handle=it) for i, it in enumerate(handles)
    ]
    return m.AckMessageRequest(
        group=m.Resource(name=GROUP), topic=m.Resource(name=TOPIC), entries=entries
    )


async def ack(client: Speaker, *handles: str) -> m.AckMessageResponse:
    answer = await client.ask("AckMessage", ack_request(*handles))
    assert isinstance(answer, m.AckMessageResponse)
    assert [it.receipt_handle for it in answer.entries] == list(handles)
    return answer


def handles_of(messages: list[m.Message]) -> list[str]:
    return [message.system_properties.receipt_handle for message in messages]


def bodies(messages: list[m.Message]) -> set[bytes]:
    return {message.body for message in messages}


def change_request(handle: str, seconds: int, **fields: Any) -> m.ChangeInvisibleDurationRequest:
    return m.ChangeInvisibleDurationRequest(
        group=m.Resource(name=GROUP), topic=m.Resource(name=TOPIC), receipt_handle=handle,
        invisible_duration=m.Duration(seconds=seconds), **fields,
    )  # fmt: skip


def forward_request(handle: str) -> m.ForwardMessageToDeadLetterQueueRequest:
    return m.ForwardMessageToDeadLetterQueueRequest(
        group=m.Resource(name=GROUP), topic=m.Resource(name=TOPIC), receipt_handle=handle,
        message_id="id", delivery_attempt=1, max_delivery_attempts=1,
    )  # fmt: skip


async def dead_letters(proxy: Proxied) -> int:
    store = proxy.mq.servers.broker.store
    return store.queue_offsets(f"%DLQ%{GROUP}", 0)[1]
