"""The port by which a replica reads the state of its broker and changes the broker's role.

`Replica` only knows these operations. `broker_replica.py` implements them for a real broker.
"""

from typing import NamedTuple, Protocol

from sluicemq.broker.replication.in_sync import InSyncReplicas, Term


class LogEnd(NamedTuple):
    """The end of a replica's log, as its record publishes it."""

    term: int
    """The last term in which the log was written; 0 for none."""
    position: int
    """The position after the last byte of the log, or INCOMPLETE."""


class RoleExecutor(Protocol):
    """What a replica reads from its broker, and the operations that change the broker's role."""

    @property
    def address(self) -> str:
        """The host:port that clients connect to."""
        ...

    @property
    def ha_address(self) -> str:
        """The host:port that slaves connect to."""
        ...

    @property
    def log_end(self) -> LogEnd:
        """The end of the broker's log now."""
        ...

    @property
    def in_sync(self) -> InSyncReplicas | None:
        """The replication gate of a master; None in every other role."""
        ...

    @property
    def has_failed_disk(self) -> bool:
        """Whether the store cannot be written until the broker is restarted."""
        ...

    async def change_role(self, term: Term, run_id: str) -> None:
        """Make the broker the master of `term`, or a slave of its master.

        If `term.master_id` is 0, the broker becomes a slave without a master. When the call
        returns, the broker acknowledges nothing more to the master that it followed before.
        `run_id` is the replica's run id from now on.

        Raises BrokerClosedError if the broker could not take its role. Then it is closed.
        """
        ...

    def update_term(self, term: Term) -> None:
        """Tell the master that its record is now `term`, and that no proposal is in progress.

        The broker is the master in this term already: `change_role` has returned for it.
        """
        ...

    def depose(self, reason: str) -> None:
        """Make the master stop confirming messages and making messages visible."""
        ...

    def pause_requests(self, is_paused: bool) -> None:
        """Queue requests that need a master while `is_paused`; process them afterwards."""
        ...
