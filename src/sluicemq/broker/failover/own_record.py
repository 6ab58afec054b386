"""The record of this replica at the consensus service: the `Member` that the other replicas read.

The record is attached to a lease, so it is deleted when this process ends or cannot reach the
service any more. The service may also lose it, or go back to an old copy. So the record counts as
published only as long as nothing else was read.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Consensus, Entries, Entry, Lease, Swap
from sluicemq.broker.failover.election import Member

PUBLISH_S: Final = 5.0
"""The shortest time between two updates of a replica's record if only its log has grown."""


class OwnRecord:
    """The record of one replica. `publish` keeps it up to date."""

    def __init__(
        self,
        consensus: Consensus,
        key: str,
        lease_s: float,
        *,
        read: Callable[[], Awaitable[Entries]],
        wake: Callable[[], None],
    ) -> None:
        """Create the record with `key` at `consensus`. Nothing is written before `publish`.

        `lease_s` is the time to live of its lease in seconds. `read()` reads the records of all
        replicas, and calls `note_read` before it returns them. `wake()` is called when the lease is
        lost, so that `publish` has to be called again.
        """
        self._consensus = consensus
        self._key = key
        self._lease_s = lease_s
        self._read = read
        self._wake = wake
        self._lease: Lease | None = None
        self._published: Member | None = None
        """The record at the service; None if it is unknown and must be read."""
        self._published_s = 0.0
        """The monotonic time of the last write of the record."""

    async def publish(self, member: Member, *, now: bool) -> None:
        """Write `member` to the consensus service, if `now` is true or it is due.

        A lease is requested first if there is none. All records are read before the write. If the
        service has the record already, with this lease, nothing is written. Otherwise every write
        would be an event for all replicas, which may make them write again.

        If the lease has ended, or the record has changed since the read, the service refuses the
        write. Then the lease is dropped, and the next call tries again.

        Raises ConsensusError if the service does not answer, and the errors of `read`.
        """
        if self._lease is None:
            self._published = None
            self._lease = await self._consensus.lease(self._lease_s, self._on_lease_lost)
        # `self._lease` may become None during the awaits below. The swap then names a lease that
        # has ended, and the service refuses it.
        lease = self._lease

        time_s = asyncio.get_running_loop().time()
        if not now and not self._is_due(member, time_s):
            return
        self._published = None
        entries = await self._read()
        present = entries.get(self._key, Entry(b"", 0))

        value = election.encode_member(member)
        is_written = (present.value, present.lease_id) == (value, lease.id)
        if not is_written:
            # An earlier swap that is delivered late expects another version, and changes nothing.
            change = Swap(self._key, value, present.version, lease.id)
            is_written = await self._consensus.swap([change])
        if is_written:
            self._published = member
            self._published_s = time_s
        else:
            self._on_lease_lost()

    def _is_due(self, member: Member, time_s: float) -> bool:
        """Return whether `member`, this replica's record as of `time_s`, must be written now.

        A record that equals the published one is not written. If only the end of the log, or its
        term, has changed, the record is written when PUBLISH_S seconds have passed since the last
        write. Every other change is written at once.
        """
        published = self._published
        if published is None:
            return True
        if published == member:
            return False

        if not election.has_only_log_grown(published, member):
            return True
        return time_s - self._published_s >= PUBLISH_S

    def note_read(self, record: Member | None) -> None:
        """Compare the record that was read, or None if there was none, with the published one.

        If it is another one, the service has lost the record or has an old copy of it, and the next
        `publish` writes it again. A watch may be late: then the read in `publish` shows that
        nothing has to be written.
        """
        if record is None or record._replace(version=0) != self._published:
            self._published = None

    def doubt(self) -> None:
        """Let the next `publish` read the records, because the service may have lost changes."""
        self._published = None

    def _on_lease_lost(self) -> None:
        """Forget the lease, so that the next `publish` requests another one."""
        self._lease = None
        self._wake()

    async def close(self) -> None:
        """End the lease, which deletes the record."""
        if self._lease is not None:
            await self._lease.close()
