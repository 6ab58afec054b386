"""The product with one thing wrong, for the time of a `with`: what the simulation has to find.

Each mutant takes one rule of docs/design/0022-replication.md ("What holds, and why") out of the
production classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from sluicemq.broker.replicas.follower import Follower
from sluicemq.broker.replicas.insync import InSync
from sluicemq.broker.replicas.mirror import Applier
from sluicemq.files.incarnation import Incarnation
from sluicemq.replication.election import View
from sluicemq.store.store import Store

Mutant = Callable[[], Any]


def waits_for_nobody() -> Any:
    """Fencing and in-sync: a master confirms what it has itself."""
    return patch.object(InSync, "end_of", lambda self, member: self.own_end())


def joins_early() -> Any:
    """In-sync: whoever is connected is in the set, however far it is."""
    real = InSync._belongs

    def belongs(self: InSync, member: int, incarnation: str | None) -> bool:
        return incarnation is None or real(self, member, incarnation)

    return patch.object(InSync, "_belongs", belongs)


def anybody_is_elected() -> Any:
    """Fencing: no need to be in the set."""
    return patch.object(View, "is_in_sync", lambda self, member: True)


def same_disk() -> Any:
    """Fencing: a wiped disk goes for the one before."""
    real = Incarnation.begin

    def begin(self: Incarnation, *, is_empty: bool, is_synced: bool) -> str:
        real(self, is_empty=is_empty, is_synced=is_synced)
        self.text = "the same"
        self._write()
        return self.text

    return patch.object(Incarnation, "begin", begin)


def keeps_its_tail() -> Any:
    """Truncation: none."""
    return patch.object(Follower, "_cut", lambda self, end: None)


def cuts_at_the_master_s_end() -> Any:
    """Truncation: by length alone, as if epochs said nothing."""

    def end_of(own: Any, end: int, other: Any, other_end: int) -> int:
        return min(end, other_end)

    return patch("sluicemq.broker.replicas.follower.consistent_end", end_of)


def acknowledges_without_doing() -> Any:
    """In-sync: a slave says that it has a change, and has not."""
    return patch.object(Applier, "_do", lambda self, operation: None)


def has_no_gate() -> Any:
    """Visibility: a master shows what is written, and a start what is found."""
    real = Store.open.__func__  # type: ignore[attr-defined]

    def opened(cls: type[Store], config: Any, /, **named: Any) -> Any:
        return real(cls, config, **{**named, "is_gated": False, "confirmed": None})

    return patch.object(Store, "open", classmethod(opened))


MUTANTS: Final[Mapping[str, Mutant]] = {
    mutant.__name__: mutant
    for mutant in (
        waits_for_nobody, joins_early, acknowledges_without_doing, anybody_is_elected, same_disk,
        keeps_its_tail, cuts_at_the_master_s_end, has_no_gate,
    )
}  # fmt: skip


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The product with this one thing wrong."""
    with MUTANTS[name]():
        yield
