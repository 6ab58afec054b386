"""The consensus service in memory, with the faults that a real one's network has.

    service = MemoryConsensus()
    consensus = service.client()            # what one process has; any number of them
    consensus.is_cut = True                 # nothing arrives there, nothing is heard of it
    consensus.is_deaf = True                # what it asks is done, but no answer arrives
    consensus.unlucky = random.Random(7)    # some requests and answers are lost, some come late

Keys, versions and leases are as in etcd: one count of revisions, a key's version is that of its
last change, leases end with their keys. Time is the running loop's, so under a `VirtualClock` it is
the test's. What the service does by itself belongs to no process (a context of its own), what it
tells to a watch to who asked for it: whoever kills processes by their contexts hits the right ones.
A fault shows as it does on a network: the caller waits for `timeout_s`, and then knows
nothing (`ConsensusError`).
"""

import asyncio
import contextvars
import enum
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from sluicemq.broker.failover.consensus import NO_CONDITIONS, Entries, Entry, KeepAliveLease, Swap
from sluicemq.errors import ConsensusError

T = TypeVar("T")
LATENCY_S: Final = 0.001
TIMEOUT_S: Final = 1.0
BAD_LUCK: Final = 0.1
LATE_TIMEOUTS_MAX: Final = 3.0


class Fate(enum.Enum):
    """What becomes of one request."""

    WELL = enum.auto()
    LOST = enum.auto()
    LATE = enum.auto()  # done when nobody waits for it any more
    UNHEARD = enum.auto()  # done, and the answer is lost


class MemoryConsensus:
    """The service. `entries` is what it knows; it may be changed by tests through `apply`."""

    def __init__(self, *, latency_s: float = LATENCY_S, timeout_s: float = TIMEOUT_S) -> None:
        self.entries: Entries = {}
        self.revision = 0
        self.latency_s = latency_s
        self.timeout_s = timeout_s
        self._is_down = False
        self.clients: list[MemoryClient] = []
        self._leases: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        self._lease_ids = itertools.count(1)

    @property
    def is_down(self) -> bool:
        """Nobody reaches it, and leases do not end meanwhile (as in etcd without its majority)."""
        return self._is_down

    @is_down.setter
    def is_down(self, value: bool) -> None:
        self._is_down = value
        self._ring()

    def client(self) -> "MemoryClient":
        """The service as another process sees it."""
        client = MemoryClient(self)
        self.clients.append(client)
        return client

    def apply(self, changes: Sequence[Swap], conditions: Mapping[str, int] = NO_CONDITIONS) -> bool:
        """The swap, at this moment."""
        conditions = {
            **conditions,
            **{c.key: c.expected_version for c in changes if c.expected_version is not None},
        }
        for key, version in conditions.items():
            entry = self.entries.get(key)
            if (entry.version if entry else 0) != version:
                return False
        if any(change.lease_id and change.lease_id not in self._leases for change in changes):
            return False
        self.revision += 1
        for key, value, _, lease in changes:
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = Entry(value, self.revision, lease)
        self._ring()
        return True

    def found(self, prefix: str) -> Entries:
        """What a read tells, at this moment."""
        return {key: entry for key, entry in self.entries.items() if key.startswith(prefix)}

    def grant(self, ttl_s: float) -> int:
        """A new lease."""
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = (ttl_s, self._timer(lease_id, ttl_s))
        return lease_id

    def keep(self, lease_id: int) -> bool:
        """A lease lives on, if it is there."""
        if lease_id not in self._leases:
            return False
        ttl_s, timer = self._leases[lease_id]
        timer.cancel()
        self._leases[lease_id] = (ttl_s, self._timer(lease_id, ttl_s))
        return True

    def end(self, lease_id: int) -> None:
        """A lease ends, with its keys."""
        if self.is_down:
            self.keep(lease_id)
        elif found := self._leases.pop(lease_id, None):
            found[1].cancel()
            ended = [Swap(key, None) for key, e in self.entries.items() if e.lease_id == lease_id]
            if ended:
                self.apply(ended)

    def _ring(self) -> None:
        for client in self.clients:
            client.rung()

    def _timer(self, lease_id: int, ttl_s: float) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(ttl_s, self.end, lease_id, context=contextvars.Context())


class _Watch(NamedTuple):
    prefix: str
    on_change: Callable[[Entries], None]
    context: contextvars.Context


class MemoryClient:
    """A `Consensus`: the service, through this process' network."""

    def __init__(self, service: MemoryConsensus) -> None:
        self.is_deaf = False
        self.unlucky: random.Random | None = None
        self._is_cut = False
        self._service = service
        self._watches: dict[int, _Watch] = {}
        self._watch_ids = itertools.count()
        self._leases: list[KeepAliveLease] = []

    @property
    def is_cut(self) -> bool:
        """Nothing arrives there, nothing is heard of it."""
        return self._is_cut

    @is_cut.setter
    def is_cut(self, value: bool) -> None:
        self._is_cut = value
        if not value:
            self.rung()

    async def read(self, prefix: str) -> Entries:
        return await self._ask(lambda: self._service.found(prefix))

    async def swap(
        self, changes: Sequence[Swap], conditions: Mapping[str, int] = NO_CONDITIONS
    ) -> bool:
        return await self._ask(lambda: self._service.apply(changes, conditions))

    def watch(self, prefix: str, on_change: Callable[[Entries], None]) -> Callable[[], None]:
        number = next(self._watch_ids)
        self._watches[number] = _Watch(prefix, on_change, contextvars.copy_context())
        self._tell_later(number)

        def end() -> None:
            self._watches.pop(number, None)

        return end

    async def lease(self, ttl_s: float, on_lost: Callable[[], None]) -> KeepAliveLease:
        lease_id = await self._ask(lambda: self._service.grant(ttl_s))
        lease = KeepAliveLease(
            lease_id, ttl_s, on_lost,
            renew=lambda: self._ask(lambda: self._service.keep(lease_id)),
            revoke=lambda: self._ask(lambda: self._service.end(lease_id)),
        )  # fmt: skip
        self._leases.append(lease)
        return lease

    async def close(self) -> None:
        self._watches.clear()
        for lease in self._leases:
            lease.abandon()

    def rung(self) -> None:
        """Something has changed, or the service may be reached again."""
        for number in self._watches:
            self._tell_later(number)
            if self.unlucky and self.unlucky.random() < BAD_LUCK:
                self._tell_later(number)

    def _tell_later(self, number: int) -> None:
        watch = self._watches[number]

        def tell() -> None:
            if number in self._watches and not (self._is_unreachable or self.is_deaf):
                watch.on_change(self._service.found(watch.prefix))

        delay_s = self._service.latency_s
        if self.unlucky:
            delay_s += self.unlucky.random() * self._service.timeout_s
        asyncio.get_running_loop().call_later(delay_s, tell, context=watch.context)

    @property
    def _is_unreachable(self) -> bool:
        return self._is_cut or self._service.is_down

    async def _ask(self, work: Callable[[], T]) -> T:
        fate, service = self._fate(), self._service
        await asyncio.sleep(service.latency_s)
        if fate is Fate.LATE and self.unlucky:
            late_s = service.timeout_s * self.unlucky.uniform(1, LATE_TIMEOUTS_MAX)

            def work_late() -> None:
                if not self._is_unreachable:
                    work()

            loop = asyncio.get_running_loop()
            loop.call_later(late_s, work_late, context=contextvars.Context())
        elif not self._is_unreachable and fate is not Fate.LOST:
            answer = work()
            await asyncio.sleep(service.latency_s)
            if not (self._is_unreachable or self.is_deaf or fate is Fate.UNHEARD):
                return answer
        await asyncio.sleep(service.timeout_s)
        raise ConsensusError(f"the consensus service has not answered for {service.timeout_s:g} s.")

    def _fate(self) -> Fate:
        if self.unlucky is None or self.unlucky.random() >= BAD_LUCK:
            return Fate.WELL
        return self.unlucky.choice((Fate.LOST, Fate.LATE, Fate.UNHEARD))
