"""The product with one thing wrong, for the time of a `with`: what the simulation has to find.

Each mutant takes one rule of docs/design/0022-replication.md ("What holds, and why") out of the
production classes.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from unittest.mock import patch

from sluicemq.broker.failover.election import State, View, state_after_unclean_election
from sluicemq.broker.failover.replica import Replica
from sluicemq.broker.group_commit import Announced
from sluicemq.broker.registration import Announcements
from sluicemq.broker.replication.in_sync import InSyncReplicas
from sluicemq.broker.replication.log_receiver import LogReceiver
from sluicemq.broker.replication.state_applier import StateApplier
from sluicemq.broker.table import TABLE
from sluicemq.broker.waiting.requests import DelayHandlers
from sluicemq.files.incarnation import Incarnation
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.store.store import Store
from sluicemq.store.timers.files import TimerCheckpoint
from sluicemq.store.timers.state import TimerFiles
from sluicemq.wire.codes import RequestCode

Mutant = Callable[[], Any]


def waits_for_nobody() -> Any:
    """Fencing and in-sync: a master confirms what it has itself."""
    return patch.object(InSyncReplicas, "log_end_of", lambda self, member: self.local_end())


def joins_early() -> Any:
    """In-sync: whoever is connected is in the set, however far it is."""
    real = InSyncReplicas._should_be_member

    def belongs(self: InSyncReplicas, member: int, incarnation: str | None) -> bool:
        return incarnation is None or real(self, member, incarnation)

    return patch.object(InSyncReplicas, "_should_be_member", belongs)


def anybody_is_elected() -> Any:
    """Fencing: no need to be in the set."""
    return patch.object(View, "is_in_sync", lambda self, member: True)


def same_disk() -> Any:
    """Fencing: a wiped disk goes for the one before."""
    real = Incarnation.open

    def opened(self: Incarnation, *, is_empty: bool, is_synced: bool) -> str:
        real(self, is_empty=is_empty, is_synced=is_synced)
        self.text = "the same"
        self._write_if_changed()
        return self.text

    return patch.object(Incarnation, "open", opened)


def keeps_its_tail() -> Any:
    """Truncation: none."""
    return patch.object(LogReceiver, "_truncate", lambda self, end: None)


def cuts_at_the_master_s_end() -> Any:
    """Truncation: by length alone, as if epochs said nothing."""

    def end_of(own: Any, end: int, other: Any, other_end: int) -> int:
        return min(end, other_end)

    return patch("sluicemq.broker.replication.log_receiver.common_end", end_of)


def acknowledges_without_doing() -> Any:
    """In-sync: a slave says that it has a change, and has not."""
    return patch.object(StateApplier, "_execute", lambda self, operation: None)


def has_no_gate() -> Any:
    """Visibility: a master shows what is written, and a start what is found."""
    real = Store.open.__func__  # type: ignore[attr-defined]

    def opened(cls: type[Store], config: Any, /, **named: Any) -> Any:
        return real(cls, config, **{**named, "is_gated": False, "confirmed": None})

    return patch.object(Store, "open", classmethod(opened))


def notes_a_role_that_it_has_not_taken() -> Any:
    """Roles: a replica that an operator elects believes to be the master as soon as the record says
    so, and the broker never hears of it."""
    return patch.object(Replica, "_is_master_in", Replica._is_named_master)


def elects_over_the_master() -> Any:
    """An operator's election is never unnecessary."""
    return patch("sluicemq.broker.failover.election.explain_unnecessary", lambda view, me: "")


def expects_the_record_that_was_lost() -> Any:
    """An operator's election replaces the record that the replica knows, not the one that is
    there."""
    real = state_after_unclean_election

    def state_after(view: View, member_id: int, read_state: State | None) -> State:
        return real(view, member_id, view.state)

    return patch("sluicemq.broker.failover.election.state_after_unclean_election", state_after)


MUTANTS: Final[Mapping[str, Mutant]] = {
    mutant.__name__: mutant
    for mutant in (
        waits_for_nobody, joins_early, acknowledges_without_doing, anybody_is_elected, same_disk,
        keeps_its_tail, cuts_at_the_master_s_end, has_no_gate, elects_over_the_master,
        notes_a_role_that_it_has_not_taken, expects_the_record_that_was_lost,
    )
}  # fmt: skip


def trusts_stale_timer_files() -> Any:
    """A start believes a wheel and a log that look complete, whoever wrote them (issue 27, 1.1)."""
    real = TimerFiles._load_files

    def load(self: TimerFiles, known: TimerCheckpoint, *, is_exact: bool) -> tuple[str, bool]:
        reason, is_settled = real(self, known, is_exact=is_exact)
        self.log.load(known.log_end)
        is_complete = self.log.end == known.log_end and (self.wheel.exists or not known.log_end)
        return ("", False) if known.time_ms and is_complete else (reason, is_settled)

    patches = contextlib.ExitStack()
    patches.enter_context(patch.object(TimerFiles, "_load_files", load))
    patches.enter_context(patch.object(TimerFiles, "_disagreement", lambda self: ""))
    patches.enter_context(patch("sluicemq.broker.state.discard_timer_files", lambda *_: None))
    return patches


def takes_in_new_ones_alone() -> Any:
    """A master whose timer files are gone takes in what comes, and not what waits already."""
    real = TimerFiles.start_rebuild

    def start_rebuild(self: TimerFiles, reason: str, *, is_exact: bool = True) -> None:
        real(self, reason, is_exact=is_exact)
        self.queue_offset = self._store.queue_offsets(TIMER_TOPIC, 0)[1]

    return patch.object(TimerFiles, "start_rebuild", start_rebuild)


def cancels_here_alone() -> Any:
    """A cancelled delay is answered before the slaves know of it."""
    real = DelayHandlers.cancel

    def cancel(self: DelayHandlers, header: Any, command: Any, peer: Any) -> Any:
        outcome = real(self, header, command, peer)
        return outcome.answer if isinstance(outcome, Announced) else outcome

    cancel.__qualname__ = real.__qualname__  # by which the table finds the object it belongs to
    row = TABLE[RequestCode.SLUICE_CANCEL_DELAYED]
    changed = {RequestCode.SLUICE_CANCEL_DELAYED: row._replace(handler=cancel)}
    return patch.dict(TABLE, changed)


def answers_held_changes() -> Any:
    """A master that loses its role answers what the next one may not know."""
    real = Announcements.release
    return patch.object(Announcements, "release", lambda self, error=None: real(self))


TIMED_MUTANTS: Final[Mapping[str, Mutant]] = {
    mutant.__name__: mutant
    for mutant in (
        trusts_stale_timer_files, takes_in_new_ones_alone, cancels_here_alone,
        answers_held_changes,
    )
}  # fmt: skip
"""What histories of whole brokers with timed messages have to find."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The product with this one thing wrong."""
    with {**MUTANTS, **TIMED_MUTANTS}[name]():
        yield
