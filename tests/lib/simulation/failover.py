"""A slave behind a stepped broker: `files.kill()` is a failover.

With `failovers(monkeypatch)` whatever a test does with a stepped broker happens a second time on
another disk: the log by its bytes (`store/follow.py`), the state by operations on files
(`broker/replication/state_log.py`). `files.kill()`, by which tests get what a killed broker leaves,
then is the disk of the slave, so each test of a restart is one of a failover.
"""

import functools
import itertools
from typing import Any

import pytest

from simulation.stepped import SMALL, SteppedBroker
from sluicemq.broker.replication.state_applier import DiscardingFiles, StateApplier
from sluicemq.broker.replication.state_log import RecordingFiles, ReplicatedPaths, StateLog
from sluicemq.config import StoreConfig
from sluicemq.files import Access, File
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

PUMP_BYTES = 5000
_lives = itertools.count(1)


class Slave:
    """Another disk that has what the master's has, as of the last `pump`."""

    def __init__(self, master: CrashableFiles, config: StoreConfig) -> None:
        self.places = places = ReplicatedPaths(
            {"config": f"{config.root}/config", "acl/main": f"{config.root}/plain_acl.yml"}
        )
        self.disk = CrashableFiles()
        self.state_log = StateLog(places, run_id=str(next(_lives)))
        self.recording_files = RecordingFiles(_Below(master), self.state_log)
        self.applier = StateApplier(self.disk, places)
        self.held = DiscardingFiles(self.disk, places)
        self.config = config
        self.store: Store | None = None
        self.broker: SteppedBroker | None = None
        self.is_cut_off = False
        """Nothing arrives but what the test lets through."""

    def follow(self, broker: SteppedBroker) -> None:
        """The master has started."""
        self.broker, self.disk.clock = broker, broker.clock
        self.state_log.log_end = lambda: broker.store.written_offset
        self.store = store = Store.open(self.config, files=self.held, clock=broker.clock)
        self.following = store.start_following()
        self.state_log.expired_queues = broker.store.expired_queues
        self.applier = StateApplier(self.disk, self.places, store.begin_queue)
        self.pump()

    def pump(self) -> None:
        """The slave catches up with the master, in log and state."""
        if self.broker is None or self.store is None:
            return
        self.pump_log()
        while self.pump_state():
            pass

    def pump_log(self, end: int | None = None) -> None:
        """The log, as far as it is written, or up to `end`."""
        assert self.broker is not None
        following, master = self.following, self.broker.store
        at = following.end if not following.is_empty else max(master.log_start, following.end)
        end = master.written_offset if end is None else end
        while at < end and (data := master.view_log(at, min(PUMP_BYTES, end - at))):
            following.append(at, data)
            following.dispatch()
            at += len(data)

    def pump_state(self) -> bool:
        """One request for state; False: it had nothing new."""
        state_log, applier = self.state_log, self.applier
        state_log.record_progress(1, applier.run_id, applier.applied_number, 0.0)
        found = state_log.operations_after(applier.run_id, applier.applied_number)
        if found is None:
            found = state_log.make_snapshot(self.broker.files)  # type: ignore[union-attr]
        applier.enqueue(state_log.run_id, found)
        applier.apply(self.following.end)
        return bool(found) and applier.next_log_end is None

    def kill(self) -> CrashableFiles:
        """The master's machine is gone: what the slave has."""
        disk = self.disk.kill()
        StateApplier(disk, self.places).finish_snapshot()
        return disk


class _Below:
    """A disk as it is, for who is called by its patched face."""

    def __init__(self, files: CrashableFiles) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        plain = PLAIN.get(name)
        return (
            getattr(self._files, name) if plain is None else functools.partial(plain, self._files)
        )


PLAIN: dict[str, Any] = {
    name: getattr(CrashableFiles, name) for name in ("open", "rename", "remove", "kill")
}
SLAVES: dict[int, Slave] = {}
"""By the id of the master's disk."""


def slave_of(files: CrashableFiles) -> Slave:
    return SLAVES[id(files)]


def _opened(
    self: CrashableFiles, path: str, *, create: bool = False, access: Access | None = None
) -> File:
    slave = SLAVES.get(id(self))
    if slave is None:
        return PLAIN["open"](self, path, create=create, access=access)  # type: ignore[no-any-return]
    return slave.recording_files.open(path, create=create, access=access)


def _renamed(self: CrashableFiles, old: str, new: str) -> None:
    slave = SLAVES.get(id(self))
    PLAIN["rename"](self, old, new) if slave is None else slave.recording_files.rename(old, new)


def _removed(self: CrashableFiles, path: str) -> None:
    slave = SLAVES.get(id(self))
    PLAIN["remove"](self, path) if slave is None else slave.recording_files.remove(path)


def _killed(self: CrashableFiles) -> CrashableFiles:
    slave = SLAVES.get(id(self))
    if slave is None or slave.broker is None:  # nobody follows who has not started
        return PLAIN["kill"](self)  # type: ignore[no-any-return]
    if not slave.is_cut_off:
        slave.pump()
    return slave.kill()


def failovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every stepped broker has a slave, and `kill` is a failover to it."""
    SLAVES.clear()
    start, step = SteppedBroker.__init__, SteppedBroker.step

    def started(self: SteppedBroker, **options: Any) -> None:
        slave = None
        if not options.get("read_only"):
            files = options["files"] = options.get("files") or CrashableFiles()
            slave = SLAVES[id(files)] = Slave(files, options.get("store_config") or SMALL)
        start(self, **options)
        if slave is not None:
            slave.follow(self)

    def stepped(self: SteppedBroker) -> None:
        step(self)
        slave = SLAVES.get(id(self.files))
        if slave is not None and slave.broker is self and not slave.is_cut_off:
            slave.pump()

    monkeypatch.setattr(SteppedBroker, "__init__", started)
    monkeypatch.setattr(SteppedBroker, "step", stepped)
    faces = {"open": _opened, "rename": _renamed, "remove": _removed, "kill": _killed}
    for name, face in faces.items():
        monkeypatch.setattr(CrashableFiles, name, face)
