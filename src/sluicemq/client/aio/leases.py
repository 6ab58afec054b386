"""Which queues this client may consume in order: leases at their brokers (41, 42).

A broker gives a queue of a group to one client for 60 s. We ask again every 20 s, and hand nothing
out when the last confirmation was asked for more than 30 s ago: another client cannot have the
queue before its 60 s are over, by whichever clock. A broker that says no means that the queue is
lost; one that does not answer is asked again every second.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.core import requests
from sluicemq.client.core.answers import expect_success
from sluicemq.errors import SluiceError
from sluicemq.model.topic import MessageQueue
from sluicemq.protocol.bodies import decode_locked_queues

_log = logging.getLogger("sluicemq.client")
LEASE_S: Final = 60.0
"""How long a broker keeps a queue for its client (spec/remoting.md §15)."""
TRUSTED_S: Final = 30.0
RENEW_S: Final = 20.0
RENEW_AGAIN_S: Final = 1.0


class Leases:
    """The leases of one group in this process.

    `on_lost(queue)` is called when another client has it, or may have had it; `on_held(queue)` when
    a lease that was not trusted any more is confirmed again.
    """

    def __init__(
        self,
        cluster: Cluster,
        client_id: str,
        group: str,
        *,
        on_lost: Callable[[MessageQueue], None],
        on_held: Callable[[MessageQueue], None],
    ) -> None:
        self._cluster = cluster
        self._client_id = client_id
        self._group = group
        self._on_lost = on_lost
        self._on_held = on_held
        self._asked_s: dict[MessageQueue, float] = {}

    def is_held(self, queue: MessageQueue) -> bool:
        """May messages of the queue be handed out now?"""
        asked_s = self._asked_s.get(queue)
        return asked_s is not None and self._now_s() - asked_s < TRUSTED_S

    def _now_s(self) -> float:
        return self._cluster.clock.monotonic_s()

    async def acquire(self, queue: MessageQueue) -> bool:
        """Takes a queue; False when another client has it. Raises SluiceError."""
        asked_s = self._now_s()
        if queue not in await self._lock([queue]):
            return False
        self._asked_s[queue] = asked_s
        return True

    async def _lock(self, queues: list[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Queues of one broker -> those of them that we hold now."""
        address = await self._master(queues[0])
        command = requests.lock_queues(self._group, self._client_id, queues)
        answer = expect_success(await self._cluster.call(address, command), address)
        return decode_locked_queues(answer.body)

    async def _master(self, queue: MessageQueue) -> str:
        await self._cluster.route(queue.topic)
        return self._cluster.master(queue)

    async def release(self, queue: MessageQueue) -> None:
        """Gives a queue to whoever wants it; a broker that is away forgets by itself."""
        if self._asked_s.pop(queue, None) is None:
            return
        with contextlib.suppress(SluiceError):
            address = await self._master(queue)
            command = requests.unlock_queues(self._group, self._client_id, [queue])
            await self._cluster.call(address, command)

    def forget(self, queue: MessageQueue) -> None:
        """Does not renew it any more, and does not give it up before its time either."""
        self._asked_s.pop(queue, None)

    async def renew(self) -> bool:
        """Asks for all of them again; False when a broker did not answer."""
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in self._asked_s:
            by_broker.setdefault(queue.broker, []).append(queue)
        outcomes = await asyncio.gather(*map(self._renew, by_broker.items()))
        return all(outcomes)

    async def _renew(self, item: tuple[str, Iterable[MessageQueue]]) -> bool:
        broker, queues = item[0], sorted(item[1])
        asked_s = self._now_s()
        try:
            held = set(await self._lock(queues))
        except SluiceError as error:
            _log.debug("leases of %s at %s are not renewed: %s", self._group, broker, error)
            return False
        for queue in queues:
            self._renewed(queue, asked_s, is_held=queue in held)
        return True

    def _renewed(self, queue: MessageQueue, asked_s: float, *, is_held: bool) -> None:
        before_s = self._asked_s.get(queue)
        if before_s is None:  # released meanwhile
            return
        if is_held and asked_s - before_s < LEASE_S:
            self._asked_s[queue] = asked_s
            if asked_s - before_s >= TRUSTED_S:
                self._on_held(queue)
            return
        # Not ours, or ours again after a time in which another one may have had it.
        del self._asked_s[queue]
        self._on_lost(queue)

    async def renew_forever(self) -> None:
        """Every 20 s; every second while a broker does not answer."""
        is_done = True
        while True:
            await asyncio.sleep(RENEW_S if is_done else RENEW_AGAIN_S)
            is_done = await self.renew()

    def __len__(self) -> int:
        return len(self._asked_s)


class NoLeases:
    """For a broadcasting group: every client reads every queue, nobody is kept out."""

    def is_held(self, queue: MessageQueue) -> bool:
        """Always."""
        del queue
        return True

    async def acquire(self, queue: MessageQueue) -> bool:
        """Always."""
        del queue
        return True

    async def release(self, queue: MessageQueue) -> None:
        """Nobody waits for it."""

    async def renew_forever(self) -> None:
        """Nothing ends."""
