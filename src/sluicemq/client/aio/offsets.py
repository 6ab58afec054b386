"""Where the offsets of a group are kept: at the brokers, or in a file of this client.

A clustering group has one offset for each queue, at the queue's broker. A broadcasting client has
offsets of its own (`localoffsets`).
"""

from typing import Protocol

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.core import requests
from sluicemq.client.core.answers import QUERY_NOT_FOUND, expect_success, number
from sluicemq.model.topic import MessageQueue


class GroupOffsets(Protocol):
    """Reads and writes the offsets of one group."""

    async def read(self, queue: MessageQueue, *, zero_if_young: bool = False) -> int | None:
        """None when there is none. Raises SluiceError."""
        ...

    async def write(self, queue: MessageQueue, offset: int) -> None:
        """Raises SluiceError."""
        ...

    async def flush(self) -> None:
        """What was written is safe now, or it is logged and tried again at the next flush."""
        ...

    async def close(self) -> None: ...


class BrokerOffsets:
    """At the brokers of the queues."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group

    async def read(self, queue: MessageQueue, *, zero_if_young: bool = False) -> int | None:
        address = await self._cluster.address(queue)
        command = requests.offset_of_group(self._group, queue, zero_if_young=zero_if_young)
        answer = await self._cluster.call(address, command)
        if answer.code == QUERY_NOT_FOUND:
            return None
        offset = number(expect_success(answer, address), "offset")
        return offset if offset >= 0 else None

    async def write(self, queue: MessageQueue, offset: int) -> None:
        await self._cluster.ask(queue, requests.commit_offset(self._group, queue, offset))

    async def flush(self) -> None:
        """A broker has what it has answered."""

    async def close(self) -> None:
        """Nothing is open."""
