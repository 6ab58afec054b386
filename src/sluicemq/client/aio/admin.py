"""Administration for asyncio: the operations of `core.admin`, awaited."""

from contextlib import AbstractAsyncContextManager

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.core.admin import AdminOperations
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.talks import AsyncioShell, Call
from sluicemq.wire.frames import Command


class Admin(AdminOperations, AsyncioShell):
    """Administration over the connections of a `Sluice`. Raises the errors of `sluicemq.errors`."""

    directory: Directory

    def __init__(self, cluster: Cluster) -> None:
        self.directory = cluster.directory
        self._cluster = cluster

    async def exchange(self, call: Call) -> Command:
        """One request over the connections of the `Sluice`."""
        return await self._cluster.exchange(call)

    def alone(self, key: str) -> AbstractAsyncContextManager[object]:
        """As its `Sluice` does."""
        return self._cluster.alone(key)
