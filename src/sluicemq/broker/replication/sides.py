"""What runs in a broker for its replicas: one side or the other, made anew with each role.

    MasterSide   serves its log at the HA port (`feed.py`) and its state by 900301 (`state.py`)
    SlaveSide    follows both of one master (`follower.py`, `state.py`); its confirmed end

`server.py` starts and ends them. Where the confirmed end of the log is kept: `Confirmed`.
"""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Protocol

from sluicemq.acl.guard import Guard
from sluicemq.broker.documents import Document
from sluicemq.broker.group_commit import GroupCommit, RunSync
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.replication.acting import Acting
from sluicemq.broker.replication.admission import Doorkeeper
from sluicemq.broker.replication.epochs import Epochs
from sluicemq.broker.replication.feed import Admission, Feeds
from sluicemq.broker.replication.follower import Follower, follow
from sluicemq.broker.replication.insync import InSync, Term
from sluicemq.broker.replication.java_state import JavaState
from sluicemq.broker.replication.mirror import Applier, Mirror, Places
from sluicemq.broker.replication.state import Claim, StateFollower, StateRequests, refresh
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import ConfigurationError, StoreUncertainError
from sluicemq.files import Files, replace_text
from sluicemq.files.machine import priority
from sluicemq.net.channel import ChannelPool
from sluicemq.net.limits import ServerLimits
from sluicemq.net.network import Network, StreamListener
from sluicemq.net.stream import ByteStream, StreamProtocol
from sluicemq.net.work.background import Offload
from sluicemq.store.follow import LogFollower
from sluicemq.store.store import Store
from sluicemq.wire.declare import load_object, take_integer
from sluicemq.wire.ha import TICKET_BYTES, ConnectionState

log = logging.getLogger("sluicemq.broker")

INCOMPLETE_NAME: Final = "replica.incomplete"
NOBODY: Final = Term(0, 0)
CONFIRMED_NAME: Final = "sluiceReplicas.json"
SILENT_S: Final = 10.0
"""A slave that has not asked for so long is not waited for in a plain pair."""


class Parts(Protocol):
    """What both sides need of their broker: `state.BrokerState`."""

    settings: Settings
    store: Store
    clock: Clock
    in_sync: InSync | None
    guard: Guard | None
    group_commit: GroupCommit
    topics: Topics
    groups: Groups
    offsets: Offsets


def places_of(settings: Settings, files: Files) -> Places:
    """What is mirrored between replicas, wherever each of them has it."""
    rules = settings.broker.acl_files if settings.broker.acl_enable else ()
    return Places.of(files, settings.store.root, rules)


class Confirmed:
    """The end of what this replica knows to be confirmed, kept over a restart; None: never."""

    def __init__(self, files: Files, settings: Settings) -> None:
        self._files, path = files, f"{settings.store.root}/config/{CONFIRMED_NAME}"
        self.document = Document(files, path, lambda: json.dumps({"confirmed": self.end}))
        self.end: int | None = self.document.load(
            lambda text: take_integer(load_object(text, CONFIRMED_NAME), "confirmed")
        )

    def forget(self) -> None:
        """A slave by its file shows whatever comes. Should it be master again, an end that it knew
        once would hide what it has shown since. Raises OSError."""
        self.end = None
        for path in (f"{self.document.path}.bak", self.document.path):  # the older one must not win
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(path)

    def moved(self, end: int) -> None:
        self.end = end
        self.document.changed = True

    def bound(self, log_end: int) -> None:
        """Under ASYNC_FLUSH a failing power takes from a master what was confirmed. What is stored
        in its place is not."""
        if self.end is not None and self.end > log_end:
            self.moved(log_end)


class MasterSide:
    """What a master has for its slaves. With `epochs` they speak the protocol of failover."""

    def __init__(
        self, core: Parts, mirror: Mirror, files: Files, epochs: Epochs | None,
        network: Network, *, call_soon: Callable[[Callable[[], None]], object], offload: Offload,
    ) -> None:  # fmt: skip
        assert core.in_sync is not None, "a master counts its slaves"
        settings, store, clock = core.settings, core.store, core.clock
        self._core, self._mirror, self._files, self._network = core, mirror, files, network
        self._settings, self._clock = settings, clock
        self._listener: StreamListener | None = None
        # An operator may have elected a replica that had cut its log: from now on its log counts.
        with contextlib.suppress(FileNotFoundError):
            files.remove(f"{settings.store.root}/{INCOMPLETE_NAME}")
        self.ha_address = ""
        """host:port that slaves are told."""
        self._ticket = secrets.token_bytes(TICKET_BYTES) if core.guard is not None else b""
        self.feeds = Feeds(
            store, core.in_sync, epochs, settings, clock, call_soon=call_soon, offload=offload,
            admission=Admission(settings),
        )  # fmt: skip
        self.state = StateRequests(
            mirror, core.in_sync, files, clock, lambda: store.log_start, self._ticket
        )
        core.in_sync.on_confirmed.append(lambda end: self.feeds.grown())

    async def open(self, before: int) -> int:
        """Listens for slaves, at the port of `before` if that is not 0; returns the port, 0 when
        there is none. One above that for clients, unless the file says otherwise; a free one beside
        a free one.

        Raises ConfigurationError when the port cannot be had, and somebody counts on it.
        """
        config = self._settings.broker
        port = config.listen_port + 1 if config.listen_port else 0
        port = before or (port if config.ha_port is None else config.ha_port)
        listener = self._network.stream_listener(
            self._accept, limits=ServerLimits.from_config(config)
        )
        try:
            await listener.start(config.listen_address, [port])
        except ConfigurationError as error:
            if config.ha_port is not None or config.consensus or config.in_sync_replicas > 1:
                raise
            log.warning("no port for slaves: %s", error)
            return 0
        self._listener = listener
        return listener.ports[0]

    def _accept(self, stream: ByteStream) -> StreamProtocol:
        self._core.group_commit.on_commit = self.feeds.grown
        is_named = bool(self._settings.broker.ha_peers)
        return Doorkeeper(stream, self.feeds.accept, b"" if is_named else self._ticket)

    def run(self) -> None:
        """A few times a second."""
        if not self.feeds.all:  # a master without slaves sends as if there were none
            self._core.group_commit.on_commit = None
        self.feeds.run()
        self.state.run(self._clock.monotonic_s())

    async def kept(self) -> None:
        """Waits until the state as it is now is kept where it has to be, as a SYNC_MASTER's sends
        are: by the members of the in-sync set, or by the slaves of ours that are there. Raises
        StoreUncertainError after slaveTimeout."""
        in_sync, mirror = self._core.in_sync, self._mirror
        assert in_sync is not None, "a master counts its slaves"
        if not in_sync.holds_answers or not self._settings.is_gated:
            return
        kept = asyncio.Event()

        def who() -> Collection[int]:
            if in_sync.term is not None:
                return in_sync.members() - {in_sync.own_id}
            return mirror.askers(self._clock.monotonic_s(), SILENT_S)

        mirror.kept(who, kept.set)
        try:
            async with asyncio.timeout(in_sync.timeout_s):
                await kept.wait()
        except TimeoutError:
            raise StoreUncertainError(
                "The change is made here, and not all slaves that count have it after "
                f"{in_sync.timeout_s:g} s: who becomes master may not know it.",
                fix="Look at `sluice cluster status`, and ask again.",
            ) from None
        standing: list[int | BaseException] = []
        in_sync.wait(0, standing.append)  # at once: whether this broker is master still
        if isinstance(standing[0], BaseException):
            raise standing[0]

    def look(self) -> None:
        """Blocking, now and then: access rules that somebody has edited."""
        self._mirror.look(self._files)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()


class SlaveSide:
    """What a slave has of its master. `term` says who that is; without, name servers tell, or
    haMasterAddress (`told`)."""

    def __init__(
        self, core: Parts, following: LogFollower, files: Files, epochs: Epochs | None,
        confirmed: Confirmed, term: Term | None, claim: Claim, *, run_sync: RunSync,
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        signed: Callable[[Any], Any], begin_queue: Callable[[str, int, int, bytes], object],
    ) -> None:  # fmt: skip
        """`files` are those of the disk; `begin_queue` may be called in any thread."""
        self._core, self._term, self._following = core, term, following
        self._run_sync, self._is_syncing = run_sync, False
        self._told = ("", "")
        core.store.on_visible = core.group_commit.on_follower_append
        self.acting: Acting | None = None
        """What stands in for the master, where that is wanted."""
        self.applier = Applier(files, places_of(core.settings, files), begin_queue)
        self.follower = follower = Follower(
            core.store, following, epochs, core.settings, core.clock
        )
        follower.replica_id = claim.replica_id
        follower.confirmed = confirmed.end or 0
        follower.is_unclean = term is not None and term.is_unclean
        follower.on_confirmed = confirmed.moved
        follower.on_appended = self.appended
        follower.on_incomplete = self.cut
        follower.on_pace = priority().set_low  # who serves on this machine goes first
        self._files, self._mark_path = files, f"{core.settings.store.root}/{INCOMPLETE_NAME}"
        self._is_marked = files.exists(self._mark_path)

        def changed(names: set[str]) -> None:
            refresh(core.topics, core.groups, core.offsets, names)

        java = JavaState(
            files, core.settings.store.root, in_executor=in_executor, on_changed=changed,
            signed=signed,
        )  # fmt: skip
        self.state = StateFollower(
            self.applier, claim, log_end=lambda: following.end, sync=core.store.sync,
            in_executor=in_executor, signed=signed, on_changed=changed, java=java.follow,
        )  # fmt: skip

    def check_whole(self) -> bool:
        """False of a log that was cut, and has not reached since what the master has confirmed,
        with a whole state of this master: such a replica may not become master (design/0022).
        The mark that says so over a restart is taken away here. Raises OSError."""
        applier = self.applier
        is_level = self.follower.is_level and applier.is_whole and applier.waits_for is None
        if self._is_marked and is_level:
            self._files.remove(self._mark_path)
            self._is_marked = False
        return not self._is_marked

    def cut(self) -> None:
        """Called before the log is cut."""
        self._is_marked = True
        told = "The log was cut: no master before it has followed one.\n"
        replace_text(self._files, self._mark_path, told)

    def leave(self) -> None:
        """Follows nobody from now on, and acknowledges nothing more."""
        self._term = NOBODY
        self.follower.leave()

    def told(self, address: str, ha_address: str) -> None:
        """A name server says where the master is."""
        if address and ha_address:
            self._told = address, ha_address

    @property
    def master(self) -> str | None:
        """Its host:port for clients; None while nobody knows."""
        return (self._term.address if self._term is not None else self._told[0]) or None

    @property
    def ha_master(self) -> str:
        """Where its log is to be had; "" while nobody knows, or what kind of master it is."""
        fixed = self._core.settings.broker.ha_master
        is_ours = self.state.master_log_start >= 0
        self.follower.master_is_ours, self.follower.ticket = is_ours, self.state.ticket
        if self._term is not None:
            return self._term.ha_address if is_ours else ""
        if self.master is not None and not (is_ours or self.state.is_java):
            return ""  # an empty slave begins differently behind the one and the other
        return fixed[0] if fixed else self._told[1]

    def tasks(
        self, network: Network, pool: ChannelPool
    ) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the background jobs of a slave by name; each runs until it is cancelled."""
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "following the log": lambda: follow(network, self.follower, lambda: self.ha_master),
            "following the state": lambda: self.state.run(pool, lambda: self.master),
        }
        if self.acting is not None:
            tasks["acting master"] = self.acting.run
        return tasks

    def follows(self) -> bool:
        """Is it connected to a master?"""
        return self.follower.state is ConnectionState.TRANSFER

    def lag(self) -> tuple[int | None, int | None]:
        """How far it is behind, in bytes and ms; None: the master alone knows."""
        return (0, 0) if self.follower.is_level else (None, None)

    def appended(self) -> None:
        """Under SYNC_FLUSH the master waits for our disk."""
        core = self._core
        if (
            core.settings.store.flush_sync
            and not self._is_syncing
            and (core.store.synced_offset < self._following.end)
        ):
            self._is_syncing = True
            self._run_sync(self.synced)

    def synced(self, result: int | BaseException) -> None:
        self._is_syncing = False
        if isinstance(result, BaseException):
            log.error("fsync of the commit log failed: %s", result)
            return
        self.follower.synced()
        self.appended()
