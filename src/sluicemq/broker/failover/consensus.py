"""The port: what replicas ask of a consensus service, whichever it is.

A few small keys, changed by compare-and-swap, watched, some of them under a lease. That is what
etcd has, what Kubernetes' objects have (`resourceVersion`), what ZooKeeper has: an adapter is a
page.

What callers may rely on, and all that safety hangs on:

- `read` sees every change that was answered before it was asked (linearizable), and all its keys at
  one moment.
- `swap` changes all of its keys or none. `False` is certain: this call has changed nothing. After
  `ConsensusError` nobody knows, and it may not even be over: the request may be under way and be
  done later, as long as the versions that it expects are there. Only a change of the key that did
  happen ends that. So who has to know asks again, until there is an answer.
- A version is never given twice to a key, also when the key was deleted in between.

Watches and leases are hints. A watch may be late, may tell a thing twice and leave out what lay
between; a lease may end while its owner works on, and live on when it does not.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from sluicemq.errors import ConsensusError


class Entry(NamedTuple):
    """A key's value, the version of its last change (above 0), the lease it ends with (0: none)."""

    value: bytes
    version: int
    lease: int = 0


class Swap(NamedTuple):
    """One key of a change: to `value` (None: away with it), if its version is `expected`.

    `expected` 0: if it is not there; None: however it is.
    """

    key: str
    value: bytes | None
    expected: int | None = None
    lease: int = 0


Entries = dict[str, Entry]
NO_CONDITION: Final[Mapping[str, int]] = {}
KEPT_OF_TTL: Final = 1 / 4
"""A lease is kept alive so often that two answers may get lost without its end."""


class Lease(Protocol):
    """Keys under it vanish some time after its owner is gone."""

    id: int

    async def close(self) -> None:
        """Ends it now, and its keys with it. What the service does not hear ends by itself."""
        ...


class Consensus(Protocol):
    """The service, as one process sees it."""

    async def read(self, prefix: str) -> Entries:
        """All keys that begin so. Raises ConsensusError."""
        ...

    async def swap(self, changes: Sequence[Swap], given: Mapping[str, int] = NO_CONDITION) -> bool:
        """All of the changes, or none of them: False. `given`: other keys, and the versions that
        they must have (0: not there). Raises ConsensusError: nobody knows."""
        ...

    def watch(self, prefix: str, on_change: Callable[[Entries], None]) -> Callable[[], None]:
        """Tells what `read` would, soon and then after every change, as long as the service can be
        reached. The result ends it."""
        ...

    async def lease(self, ttl_s: float, on_lost: Callable[[], None]) -> Lease:
        """One that ends `ttl_s` after it was last kept alive, which it is until it is closed.

        `on_lost`: the service says that it is over, or was not reached for so long. Raises
        ConsensusError.
        """
        ...

    async def close(self) -> None:
        """Ends watches and keeping alive; leases end by themselves."""
        ...


class KeptLease:
    """A lease with the task that keeps it alive, for adapters.

    `keep` asks the service: False when the lease is over; `end` tells it to end the lease.
    """

    def __init__(
        self,
        lease_id: int,
        ttl_s: float,
        on_lost: Callable[[], None],
        keep: Callable[[], Awaitable[bool]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.id = lease_id
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._keep = keep
        self._end = end
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Ends keeping alive, and the lease if the service can be told."""
        self.abandon()
        with contextlib.suppress(ConsensusError):
            await self._end()

    def abandon(self) -> None:
        """Ends keeping alive."""
        self._task.cancel()

    async def _run(self) -> None:
        time = asyncio.get_running_loop().time
        kept_s = time()
        while time() - kept_s < self._ttl_s:
            await asyncio.sleep(self._ttl_s * KEPT_OF_TTL)
            asked_s = time()
            with contextlib.suppress(ConsensusError):
                if not await self._keep():
                    break
                kept_s = asked_s
        self._on_lost()
