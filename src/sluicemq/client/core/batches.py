"""Batches: what may travel together, and in how many parts.

A batch is one request and is stored all or nothing. So its messages must agree in everything that
the request says once: topic and WAIT; and RocketMQ does not support delay or retry topics in it
(spec/remoting.md §9). We refuse before sending and name the index at fault. Parts are at most 1
MiB, the size that RocketMQ recommends; a single larger message travels alone.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from sluicemq.client.core.delays import is_delayed
from sluicemq.client.core.messages import Outgoing
from sluicemq.errors import SendError
from sluicemq.model.message import WAIT, Message
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.record.batch import encode_batch

BATCH_BYTES_MAX: Final = 1024 * 1024
_FIXED_BYTES: Final = 22


def check_batch(messages: Sequence[Message]) -> None:
    """Raises SendError that names the first message which may not be in this batch."""
    if not messages:
        raise SendError("the batch is empty.", cure="Give at least one message.")
    first = messages[0]
    for index, message in enumerate(messages):
        if message.topic != first.topic:
            _refuse(
                index,
                f"goes to the topic {message.topic!r}, message 0 to {first.topic!r}",
                "Send a batch for each topic.",
            )
        if message.wait_store_ok != first.wait_store_ok:
            _refuse(
                index,
                f"has wait_store_ok={message.wait_store_ok}, message 0 {first.wait_store_ok}",
                "Give all messages of a batch the same.",
            )
        if is_delayed(message):
            _refuse(
                index,
                "is delayed",
                "Send delayed messages one by one.",
            )
        if message.sharding_key != first.sharding_key:
            _refuse(
                index,
                f"has the sharding key {message.sharding_key!r}, message 0 {first.sharding_key!r}",
                "A batch goes to one queue: send one for each key.",
            )
        if message.topic.startswith(RETRY_PREFIX):
            _refuse(
                index,
                f"goes to the retry topic {message.topic!r}",
                "Send it to the group's own topic.",
            )


def _refuse(index: int, what: str, cure: str) -> None:
    raise SendError(f"message {index} of the batch {what}. Nothing was sent.", cure=cure)


def split(parts: Sequence[Outgoing], bytes_max: int = BATCH_BYTES_MAX) -> Iterator[list[Outgoing]]:
    """Consecutive runs of at most `bytes_max` bytes as encoded; order is kept."""
    run: list[Outgoing] = []
    size = 0
    for part in parts:
        own = _FIXED_BYTES + len(part.body) + len(part.properties.encode())
        if run and size + own > bytes_max:
            yield run
            run, size = [], 0
        run.append(part)
        size += own
    if run:
        yield run


def join(parts: Sequence[Outgoing], batch_id: str) -> Outgoing:
    """One request body for a run; `batch_id` names it here alone.

    As a property of the batch it would be harmful: a broker of RocketMQ 5.3.3 appends those to the
    properties of every message, and all would have the id of the batch (seen; its own client's do).
    """
    body = encode_batch((part.flag, part.body, part.properties.encode()) for part in parts)
    wait = parts[0].wait_store_ok
    properties = f"{WAIT}\x01{'true' if wait else 'false'}\x02"
    key = parts[0].sharding_key
    return Outgoing(parts[0].topic, body, properties, batch_id, 0, 0, wait, sharding_key=key)
