"""The interface between replicas and a consensus service.

Replicas need few operations: they keep a few small keys, change them by compare-and-swap, watch
them, and attach some of them to leases. etcd, Kubernetes objects (`resourceVersion`) and ZooKeeper
all offer these operations, so an adapter is short. `etcd.py` is the adapter in production, and
`sluicemq.testing.consensus` is one in memory.

An adapter must give these guarantees. No acknowledged message is lost as long as they hold:

- `read` is linearizable: it returns every change that was answered before the read began, and the
  values of all keys at one moment.
- `swap` changes all of its keys or none of them. If it returns False, this call has changed
  nothing. If it raises ConsensusError, the outcome is unknown. The request may even be delivered
  later, as long as the keys have the versions that it expects; only another change of these keys
  rules that out. A caller that must know the outcome repeats the swap until it gets an answer.
- A key never has the same version twice, even if it was deleted in between.

Watches and leases are only hints. A watch may report a change late or twice, and may skip
intermediate values. A lease may end while its owner is running, and may outlive its owner.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from sluicemq.errors import ConsensusError


class Entry(NamedTuple):
    """The value of one key, as a read returns it."""

    value: bytes
    version: int
    """The version of the last change of the key. It is greater than 0."""
    lease_id: int = 0
    """The lease with which the key ends; 0 if the key has no lease."""


class Swap(NamedTuple):
    """A conditional change of one key."""

    key: str
    value: bytes | None
    """The new value; None deletes the key."""
    expected_version: int | None = None
    """The version that the key must have. 0 means that the key must not exist, None that any
    version will do."""
    lease_id: int = 0
    """The lease to which the key is attached; 0 for none."""


Entries = dict[str, Entry]
"""Keys with their entries."""

NO_CONDITIONS: Final[Mapping[str, int]] = {}

KEEP_ALIVE_FRACTION: Final = 1 / 4
"""The part of its time to live after which a lease is renewed. Two renewals in a row may fail
before the lease ends."""


class Lease(Protocol):
    """A lease that is renewed in the background. Its keys are deleted when it ends."""

    id: int

    async def close(self) -> None:
        """Stop the renewal, and end the lease together with its keys.

        If the service cannot be reached, the lease ends after its time to live. Does not raise.
        """
        ...


class Consensus(Protocol):
    """The connection of one process to the consensus service."""

    async def read(self, prefix: str) -> Entries:
        """Return all entries whose keys begin with `prefix`. Raise ConsensusError on failure."""
        ...

    async def swap(
        self, changes: Sequence[Swap], conditions: Mapping[str, int] = NO_CONDITIONS
    ) -> bool:
        """Make all of `changes` if every key has its expected version, else none of them.

        `conditions` maps further keys to the versions that they must have; 0 means that the key
        must not exist. Return whether the changes were made.

        Raises ConsensusError if there is no answer. Then it is unknown whether they were made.
        """
        ...

    def watch(self, prefix: str, on_change: Callable[[Entries], object]) -> Callable[[], None]:
        """Start to call `on_change(entries)` soon, and after every change of a key with `prefix`.

        `entries` are all entries with the prefix, as `read` returns them. There are no calls while
        the service cannot be reached. Return a function without arguments that ends the watch.
        """
        ...

    async def lease(self, ttl_s: float, on_lost: Callable[[], None]) -> Lease:
        """Return a new lease that is renewed until it is closed.

        Without renewal the lease ends after `ttl_s` seconds. `on_lost` is called when the service
        reports the end of the lease, or could not be reached for `ttl_s` seconds.

        Raises ConsensusError if the service grants no lease.
        """
        ...

    async def close(self) -> None:
        """End all watches, and the renewal of leases. The leases then end by themselves."""
        ...


class KeepAliveLease:
    """A lease together with the task that renews it. Adapters return it from `lease`."""

    def __init__(
        self,
        lease_id: int,
        ttl_s: float,
        on_lost: Callable[[], None],
        renew: Callable[[], Awaitable[bool]],
        revoke: Callable[[], Awaitable[None]],
    ) -> None:
        """Start to renew lease `lease_id`, whose time to live is `ttl_s` seconds.

        `on_lost()` is called once, when the lease has ended without `close` or `abandon`.
        `renew()` renews the lease at the service and returns False if the lease has ended.
        `revoke()` ends the lease at the service. Both may raise ConsensusError. Call the
        constructor in the running event loop.
        """
        self.id = lease_id
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._renew = renew
        self._revoke = revoke
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop the renewal, and end the lease at the service if it can be reached."""
        self.abandon()
        with contextlib.suppress(ConsensusError):
            await self._revoke()

    def abandon(self) -> None:
        """Stop the renewal. The lease ends by itself after its time to live."""
        self._task.cancel()

    async def _run(self) -> None:
        """Renew the lease until it ends, and then call `on_lost`.

        A renewal is sent each time KEEP_ALIVE_FRACTION of the time to live has passed. The lease
        has ended if the service says so, or if the last successful renewal was sent longer ago than
        the time to live. A renewal that raises ConsensusError is ignored.
        """
        time = asyncio.get_running_loop().time
        renewed_s = time()
        while time() - renewed_s < self._ttl_s:
            await asyncio.sleep(self._ttl_s * KEEP_ALIVE_FRACTION)
            # The service may have renewed the lease at any time since the request was sent.
            sent_s = time()
            with contextlib.suppress(ConsensusError):
                if not await self._renew():
                    break
                renewed_s = sent_s
        self._on_lost()
