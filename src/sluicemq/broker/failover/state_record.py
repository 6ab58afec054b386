"""Changes of the state record at the consensus service, which are repeated until they are answered.

A swap whose answer is lost may have changed the record, or may do so later. Before a replica does
anything that depends on the outcome, it must know it (design/0022, "What holds, and why", 7).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Consensus, Entries, Swap
from sluicemq.broker.failover.election import State
from sluicemq.errors import ConsensusError

# The name is published: users configure logging by it. So it does not follow the module's name.
log = logging.getLogger("sluicemq.replication")

RETRY_S: Final = 0.2
"""The pause after an error before the next attempt."""

ELECT_TIMEOUT_S: Final = 30.0
"""An unclean election is cancelled if the records cannot be read for this time. `sluice cluster
elect` waits as long for the new master."""


class StateRecord:
    """The state record of one broker name, as one replica changes it."""

    def __init__(
        self, consensus: Consensus, prefix: str, on_entries: Callable[[Entries], State | None]
    ) -> None:
        """Create the record below the key `prefix` at `consensus`.

        `on_entries(entries)` takes the entries that were read, and returns the newest known state.
        """
        self._consensus = consensus
        self._prefix = prefix
        self._on_entries = on_entries

    async def swap_until_answered(self, state: State) -> bool:
        """Replace the state record by `state`, then read all records and pass them on.

        The record must have the version `state.version`, else the service refuses the change. A
        ConsensusError is logged, and both are repeated after RETRY_S seconds. Return whether the
        record contains `state`. False means that another replica has changed the record.
        """
        change = Swap(election.state_key(self._prefix), election.encode_state(state), state.version)
        while True:
            try:
                is_swapped = await self._consensus.swap([change])
                entries = await self._consensus.read(self._prefix)
            except ConsensusError as error:
                log.warning("%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            present = self._on_entries(entries)
            if is_swapped or present is None:
                return is_swapped
            # If the swap was repeated, the first one may have succeeded without an answer. Then
            # the last one was refused, but the record contains `state`.
            return present._replace(version=state.version) == state

    async def read_for_election(self) -> Entries:
        """Read all records. Repeat that after an error, for up to ELECT_TIMEOUT_S seconds.

        Raises the ConsensusError of the last attempt.
        """
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + ELECT_TIMEOUT_S
        while True:
            try:
                return await self._consensus.read(self._prefix)
            except ConsensusError:
                if now_s() >= deadline_s:
                    raise
            await asyncio.sleep(RETRY_S)
