"""A consensus service in memory, with the faults of a real network.

    service = MemoryConsensus()
    consensus = service.client()                # the service as one process sees it
    consensus.is_disconnected = True            # no request and no event arrives
    consensus.loses_responses = True            # requests are processed, but no response arrives
    consensus.fault_rng = random.Random(7)      # some requests and responses are lost or late
    service.latency_rng = random.Random(7)      # requests and events overtake each other
    service.restore({}, 0)                      # the service has lost its data

Keys, versions and leases behave as in etcd: there is one counter of revisions, the version of a key
is the revision of its last change, and a lease that ends deletes its keys. Time is that of the
running loop, so under a `VirtualClock` it is virtual.

A fault has the effect that it has on a network: the caller waits for `timeout_s`, and then gets a
ConsensusError without knowing whether the request was processed.

A simulation may kill a process by cancelling what runs in its context (`contextvars`). So what the
service does by itself runs in a new context, and the callback of a watch runs in the context of the
process that started the watch.
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
"""The time that a request, a response or an event takes, by default."""
TIMEOUT_S: Final = 1.0
"""The time that a caller waits for a response, by default."""
FAULT_PROBABILITY: Final = 0.1
"""The probability that `fault_rng` lets a request or an event fail."""
LATE_TIMEOUTS_MAX: Final = 3.0
"""A late request is processed after up to this many time-outs."""


class Fate(enum.Enum):
    """The fate of one request."""

    PROCESSED = enum.auto()
    LOST = enum.auto()
    LATE = enum.auto()  # It is processed after the caller's time-out.
    RESPONSE_LOST = enum.auto()  # It is processed, and its response is lost.


class MemoryConsensus:
    """The service.

    `entries` are its keys with their values and versions, which tests may change with `apply`.
    `revision` is the number of changes so far, and `clients` are the results of `client`.
    `latency_rng` decides how long each request, response and event takes, up to twice the latency.
    Then a watch reads the entries after an event, as with etcd, which takes a request and a
    response more. None means that all take the same time, and that an event contains the entries.
    """

    def __init__(self, *, latency_s: float = LATENCY_S, timeout_s: float = TIMEOUT_S) -> None:
        """Create a service without keys.

        Each request, response and event takes `latency_s`. A caller waits for a response at most
        `timeout_s`.
        """
        self.entries: Entries = {}
        self.latency_rng: random.Random | None = None
        self.revision = 0
        self.latency_s = latency_s
        self.timeout_s = timeout_s
        self._is_down = False
        self.clients: list[MemoryClient] = []
        self._leases: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        self._lease_ids = itertools.count(1)

    @property
    def is_down(self) -> bool:
        """Whether no client can reach the service.

        No lease ends meanwhile, as in an etcd cluster without a majority.
        """
        return self._is_down

    @is_down.setter
    def is_down(self, is_down: bool) -> None:
        self._is_down = is_down
        self._notify_clients()

    def client(self) -> "MemoryClient":
        """Return the service as another process sees it."""
        client = MemoryClient(self)
        self.clients.append(client)
        return client

    def apply(self, changes: Sequence[Swap], conditions: Mapping[str, int] = NO_CONDITIONS) -> bool:
        """Apply all `changes`, or none if a key lacks its expected version. Return True if applied.

        `conditions` are the expected versions of further keys; 0 means that a key does not exist.
        If the lease of a change has ended, no change is applied.
        """
        if not self._can_apply(changes, conditions):
            return False
        self.revision += 1
        for change in changes:
            if change.value is None:
                self.entries.pop(change.key, None)
            else:
                self.entries[change.key] = Entry(change.value, self.revision, change.lease_id)
        self._notify_clients()
        return True

    def _can_apply(self, changes: Sequence[Swap], conditions: Mapping[str, int]) -> bool:
        """Return whether every key has its expected version, and every lease still runs."""
        expected_versions = dict(conditions)
        for change in changes:
            if change.expected_version is not None:
                expected_versions[change.key] = change.expected_version
            if change.lease_id and change.lease_id not in self._leases:
                return False
        for key, expected_version in expected_versions.items():
            entry = self.entries.get(key)
            version = 0 if entry is None else entry.version
            if version != expected_version:
                return False
        return True

    def restore(self, entries: Entries, revision: int) -> None:
        """Replace all data by `entries`, an old copy, made when `revision` was the last change.

        So the service is restored from an old copy, or has lost its data if `entries` is empty. It
        counts its changes from `revision` on. All leases end, except those of `entries` that are
        running. Entries of leases that have ended are left out.
        """
        self.entries = {
            key: entry
            for key, entry in entries.items()
            if not entry.lease_id or entry.lease_id in self._leases
        }
        self.revision = revision
        kept_leases = {entry.lease_id for entry in self.entries.values()}
        for lease_id in self._leases.keys() - kept_leases:
            _, timer = self._leases.pop(lease_id)
            timer.cancel()
        self._notify_clients()

    def draw_latency_s(self) -> float:
        """Return the time in seconds that the next request, response or event takes."""
        if self.latency_rng is None:
            return self.latency_s
        return self.latency_s * self.latency_rng.uniform(0, 2)

    def find(self, prefix: str) -> Entries:
        """Return the entries whose keys begin with `prefix`, at once."""
        return {key: entry for key, entry in self.entries.items() if key.startswith(prefix)}

    def grant_lease(self, ttl_s: float) -> int:
        """Create a lease that ends after `ttl_s` seconds, and return its id."""
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = (ttl_s, self._start_timer(lease_id, ttl_s))
        return lease_id

    def renew_lease(self, lease_id: int) -> bool:
        """Let a lease run for its full time again. Return False if it has ended."""
        if lease_id not in self._leases:
            return False
        ttl_s, timer = self._leases[lease_id]
        timer.cancel()
        self._leases[lease_id] = (ttl_s, self._start_timer(lease_id, ttl_s))
        return True

    def end_lease(self, lease_id: int) -> None:
        """End a lease, and delete its keys. While the service is down, renew the lease instead."""
        if self.is_down:
            self.renew_lease(lease_id)
            return
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        _, timer = lease
        timer.cancel()
        keys = [key for key, entry in self.entries.items() if entry.lease_id == lease_id]
        if keys:
            self.apply([Swap(key, None) for key in keys])

    def _notify_clients(self) -> None:
        """Send events to the watches of all clients."""
        for client in self.clients:
            client.notify_watches()

    def _start_timer(self, lease_id: int, ttl_s: float) -> asyncio.TimerHandle:
        """Start the timer that ends a lease, in a context that belongs to no process."""
        loop = asyncio.get_running_loop()
        return loop.call_later(ttl_s, self.end_lease, lease_id, context=contextvars.Context())


class _Watch(NamedTuple):
    """A watch, and the context of the process that started it."""

    prefix: str
    on_change: Callable[[Entries], object]
    context: contextvars.Context


class MemoryClient:
    """A `Consensus` (see `broker.failover.consensus`): the service as one process sees it.

    - `loses_responses`: requests are processed, but no response and no event arrives.
    - `fault_rng`: decides which requests and events fail; None means that none does.
    """

    def __init__(self, service: MemoryConsensus) -> None:
        """Create a client of `service` without faults. Callers use `MemoryConsensus.client`."""
        self.loses_responses = False
        self.fault_rng: random.Random | None = None
        self._is_disconnected = False
        self._service = service
        self._watches: dict[int, _Watch] = {}
        self._watch_ids = itertools.count()
        self._leases: list[KeepAliveLease] = []

    @property
    def is_disconnected(self) -> bool:
        """Whether the process is cut off: none of its requests and no event arrives."""
        return self._is_disconnected

    @is_disconnected.setter
    def is_disconnected(self, is_disconnected: bool) -> None:
        self._is_disconnected = is_disconnected
        if not is_disconnected:
            self.notify_watches()

    async def read(self, prefix: str) -> Entries:
        return await self._request(lambda: self._service.find(prefix))

    async def swap(
        self, changes: Sequence[Swap], conditions: Mapping[str, int] = NO_CONDITIONS
    ) -> bool:
        return await self._request(lambda: self._service.apply(changes, conditions))

    def watch(self, prefix: str, on_change: Callable[[Entries], object]) -> Callable[[], None]:
        """Call `on_change` with all entries below `prefix`, now and after each change.

        Return the function that ends the watch.
        """
        watch_id = next(self._watch_ids)
        self._watches[watch_id] = _Watch(prefix, on_change, contextvars.copy_context())
        self._notify_later(watch_id)

        def end() -> None:
            self._watches.pop(watch_id, None)

        return end

    async def lease(self, ttl_s: float, on_lost: Callable[[], None]) -> KeepAliveLease:
        """Return a new lease of `ttl_s` seconds, which is renewed until it is ended.

        `on_lost` is called if the lease ends otherwise. Raises ConsensusError.
        """
        lease_id = await self._request(lambda: self._service.grant_lease(ttl_s))
        lease = KeepAliveLease(
            lease_id,
            ttl_s,
            on_lost,
            renew=lambda: self._request(lambda: self._service.renew_lease(lease_id)),
            revoke=lambda: self._request(lambda: self._service.end_lease(lease_id)),
        )
        self._leases.append(lease)
        return lease

    async def close(self) -> None:
        self._watches.clear()
        for lease in self._leases:
            lease.abandon()

    def notify_watches(self) -> None:
        """Send an event to each watch, because entries have changed. Some may arrive twice."""
        for watch_id in self._watches:
            self._notify_later(watch_id)
            if self.fault_rng and self.fault_rng.random() < FAULT_PROBABILITY:
                self._notify_later(watch_id)

    def _notify_later(self, watch_id: int) -> None:
        """Call the function of a watch with the entries, after the latency.

        The event takes longer if `fault_rng` is set. With `latency_rng` of the service, a read
        follows the event. Do nothing if the service is unreachable when the event arrives, or when
        the response of the read does.
        """
        watch = self._watches[watch_id]
        service = self._service
        loop = asyncio.get_running_loop()

        def is_over() -> bool:
            return watch_id not in self._watches or self._is_unreachable or self.loses_responses

        def report(entries: Entries) -> None:
            if not is_over():
                watch.on_change(entries)

        def notify() -> None:
            if is_over():
                return
            entries = service.find(watch.prefix)
            if service.latency_rng is None:
                report(entries)
            else:
                delay_s = service.draw_latency_s()
                loop.call_later(delay_s, report, entries, context=watch.context)

        delay_s = service.draw_latency_s()
        if service.latency_rng is not None:
            delay_s += service.draw_latency_s()  # the request of the read
        if self.fault_rng:
            delay_s += self.fault_rng.random() * service.timeout_s
        loop.call_later(delay_s, notify, context=watch.context)

    @property
    def _is_unreachable(self) -> bool:
        """Whether requests of this process do not reach the service."""
        return self._is_disconnected or self._service.is_down

    async def _request(self, process: Callable[[], T]) -> T:
        """Let the service execute `process`, as by a request, and return its result.

        Raises ConsensusError after the time-out if the request or its response is lost.
        """
        fate = self._choose_fate()
        service = self._service
        await asyncio.sleep(service.draw_latency_s())
        if fate is Fate.LATE and self.fault_rng:
            self._process_later(process, self.fault_rng)
        elif not self._is_unreachable and fate is not Fate.LOST:
            response = process()
            await asyncio.sleep(service.draw_latency_s())
            if not (self._is_unreachable or self.loses_responses or fate is Fate.RESPONSE_LOST):
                return response
        await asyncio.sleep(service.timeout_s)
        raise ConsensusError(
            f"the consensus service did not respond within {service.timeout_s:g} s."
        )

    def _process_later(self, process: Callable[[], T], fault_rng: random.Random) -> None:
        """Let the service process a request after the caller's time-out.

        `fault_rng` chooses the delay. If the service is unreachable then, the request is lost.
        """

        def process_if_reachable() -> None:
            if not self._is_unreachable:
                process()

        delay_s = self._service.timeout_s * fault_rng.uniform(1, LATE_TIMEOUTS_MAX)
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, process_if_reachable, context=contextvars.Context())

    def _choose_fate(self) -> Fate:
        """Choose what becomes of the next request."""
        if self.fault_rng is None or self.fault_rng.random() >= FAULT_PROBABILITY:
            return Fate.PROCESSED
        return self.fault_rng.choice((Fate.LOST, Fate.LATE, Fate.RESPONSE_LOST))
