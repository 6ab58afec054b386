"""What a process gives its broker, and what the components of a broker share.

    BrokerEnvironment --BrokerState--> BrokerContext --> BrokerComponent

`BrokerEnvironment` has what is different in a server, a test and a simulation: files, clocks, the
event loop and other threads. `BrokerState` makes a `BrokerContext` of it, with the tables that most
components read. A component gets the context and, by name, the other components that it uses.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sluicemq.broker.group_commit import GroupCommit, RunSync
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock, SteadyClock
from sluicemq.files import Files
from sluicemq.model.ids import Host, UniqueIds
from sluicemq.net.dispatch import Peer
from sluicemq.net.limits import FairScheduler
from sluicemq.net.work.background import Background, CallLater, Offload, offload_inline
from sluicemq.store.store import Store
from sluicemq.supervision import Supervisor
from sluicemq.wire.frames import Command

LookUp = Callable[[str, Callable[[Command | None], None]], None]
"""A function `(topic, done)` that asks a name server for the route of a topic. It calls `done` with
the answer, or with None if no name server answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEnvironment:
    """What a process gives a broker for one role. Fields that outlive the role may be reused."""

    files: Files
    """The files to which tables are written."""
    clock: Clock
    host: Host
    """The address in stored records and message ids."""
    unique_ids: UniqueIds
    """Makes the ids of messages that were sent without one."""
    call_soon: Callable[[Callable[[], None]], object]
    """Calls a function in the next iteration of the event loop."""
    call_later: CallLater | None = None
    """Calls a function after a delay in seconds. None: what would wait is done by `sweep`."""
    run_sync: RunSync | None = None
    """Starts an fsync on another thread. None makes SYNC_FLUSH impossible."""
    announce: Callable[[Peer, bytes], None] = Peer.write
    """Sends an answer once the changes so far are saved and registered; by default, at once."""
    look_up: LookUp = lambda topic, done: done(None)
    offload: Offload = offload_inline
    """Runs blocking work on another thread."""
    compute: Offload | None = None
    """Runs what filters compute. None means that they compute on the event loop's thread."""
    scheduler: FairScheduler | None = None
    """Divides the event loop's time among connections. It outlives the role; None makes one."""
    steady_clock: SteadyClock | None = None
    """The clock that never goes back. It outlives the role; None makes one."""
    supervisor: Supervisor | None = None
    """Restarts failed jobs. It outlives the role; None makes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerContext:
    """The tables and services of one broker in one role that most of its components use."""

    settings: Settings
    store: Store
    topics: Topics
    groups: Groups
    offsets: Offsets
    group_commit: GroupCommit
    background: Background
    scheduler: FairScheduler
    files: Files
    clock: Clock
    steady_clock: SteadyClock
    """The clock for deadlines of waiting messages; it never goes back."""
    call_soon: Callable[[Callable[[], None]], object]
    """Calls a function in the next iteration of the event loop."""
    call_later: CallLater | None
    """Calls a function after a delay in seconds; None in a test that steps the broker."""


class BrokerComponent:
    """A component of a broker, with the most used members of the context as attributes."""

    def __init__(self, context: BrokerContext) -> None:
        """Take the members that most components use from the context. `self.context` is not set."""
        self.settings = context.settings
        self.store = context.store
        self.topics = context.topics
        self.groups = context.groups
        self.offsets = context.offsets
        self.clock = context.clock
