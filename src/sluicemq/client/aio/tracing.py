"""Writes what an asyncio client has noted: a task that begins with the first note, sends about
once a second, and never lets an error reach whom it tells of."""

import asyncio
import contextlib
import logging
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.producer import Producer
from sluicemq.client.aio.tasks import Tasks
from sluicemq.client.core.tracing import INNER_GROUP, LINGER_S, RECORDS_MAX, Tracing
from sluicemq.errors import RouteNotFoundError

_log = logging.getLogger("sluicemq.client")
_CLOSE_S: Final = 3.0
_PAUSE_S: Final = 5.0


class TraceWriter:
    """The writer of one `Sluice`. Use it in the loop that made it."""

    def __init__(self, cluster: Cluster, tracing: Tracing, linger_s: float = LINGER_S) -> None:
        self.tracing = tracing
        self._cluster = cluster
        self._linger_s = linger_s
        self._producer = Producer(cluster, group=INNER_GROUP)
        self._work = asyncio.Event()
        self._tasks = Tasks()
        self._is_running = self._closed = self._has_warned = False
        tracing.on_work = self._wake

    def _wake(self) -> None:
        if self._closed:
            return
        if not self._is_running:
            self._is_running = True
            self._tasks.spawn(self._run(), "sluicemq trace")
        if len(self.tracing) in (1, RECORDS_MAX):
            self._work.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            if len(self.tracing) < RECORDS_MAX:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._linger_s):
                        await self._work.wait()
            if not await self.flush():
                await asyncio.sleep(_PAUSE_S)
            if self.tracing:
                self._work.set()

    async def flush(self) -> bool:
        """Sends all that is noted; False when that failed. Raises nothing."""
        while (batch := self.tracing.take()) is not None:
            try:
                await self._cluster.route(self.tracing.topic)
                await self._producer.send(batch.message)
            except Exception as error:  # noqa: BLE001 - a trace must not disturb what it tells of
                self.tracing.lost(batch.record_count)
                self._warn(error)
                return False
        return True

    def _warn(self, error: Exception) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _log.log(level, "traces cannot be written%s: %s", hint(error), error)

    async def close(self) -> None:
        """Writes what is left, for a few seconds at most."""
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                while self.tracing and await self.flush():
                    pass
        except TimeoutError:
            pass
        self.tracing.lost(len(self.tracing))
        await self._producer.close(0.1)
        if self.tracing.dropped:
            _log.warning("%d trace records were not written", self.tracing.dropped)


def hint(error: Exception) -> str:
    """What to do when no broker has the trace topic."""
    if isinstance(error, RouteNotFoundError):
        return " (set traceTopicEnable=true on a broker, or create the topic)"
    return ""
