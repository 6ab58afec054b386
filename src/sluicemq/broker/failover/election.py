"""Who is master: what a replica does next, decided from what it sees, without waiting.

Two kinds of records stand at the consensus service, below `sluicemq/CLUSTER/BROKER/`:

    state          epoch, master, in-sync set with incarnations   changed by compare-and-swap alone
    replicas/ID    a living replica: addresses, end of its log …  under a lease

A term is an epoch and a life, which is one run of a process. A broker that starts again has another
life, and takes another epoch before it takes writes, although it may be the master that the record
names: bytes behind the confirmed end may be on its slaves and lost here.

Why no acknowledged message is lost, whatever comes late or never (`tests/unit/broker/failover`):

- A master acknowledges what all of the in-sync set have, and the set only shrinks by the record.
- Who is elected stands in the record's set, in the same incarnation, so it has all of that; and the
  record has not changed since it looked, so nobody was left out or elected meanwhile.
- A new epoch begins at the end of the elected replica's own log. What it acknowledged to a deposed
  master until then is in that log, too: when that one learns of it makes no difference.

The rest is for speed and peace: who stands says how long its log is (`standing`), the longest goes
first, the others wait their turn. A lease that has ended says when to begin, no more: a master that
lives on without one is deposed by the record, not by a clock.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.broker.failover.consensus import Entries

INCOMPLETE: Final = -1
GATHER_S: Final = 1.0
"""So long others have time to say how long their logs are."""
ELECT: Final = "sluice cluster elect ID --unclean"
TURN_S: Final = 1.0
"""So much later the next longest tries, when who should have been elected does nothing."""


class State(NamedTuple):
    """The record of a broker name. `in_sync`: replica id to incarnation. `is_unclean`: on an
    operator's word, so what was confirmed may be lost. `version`: the record's."""

    epoch: int
    master_id: int
    life: str
    address: str
    ha_address: str
    in_sync: Mapping[int, str]
    is_unclean: bool = False
    version: int = 0


class Member(NamedTuple):
    """The record of a living replica.

    `epoch` and `end` tell its log: the last term that wrote there, and the position behind the last
    byte (INCOMPLETE: a replica that is not whole). `standing`: the epoch whose master it misses and
    does not follow any more (0: none).
    """

    id: int
    life: str
    incarnation: str
    address: str
    ha_address: str
    epoch: int = 0
    end: int = 0
    standing: int = 0
    pid: int = 0
    version: int = 0


class View(NamedTuple):
    """What the records of one broker name say."""

    state: State | None
    members: Mapping[int, Member]

    @property
    def master(self) -> Member | None:
        """The master that the record names, if it lives: in that life."""
        member = self.state and self.members.get(self.state.master_id)
        return member if member and self.state and member.life == self.state.life else None

    def is_in_sync(self, member: Member) -> bool:
        """It is in the set, in this life of its disk."""
        state = self.state
        return state is not None and state.in_sync.get(member.id) == member.incarnation


# ------------------------------------------------------------------------------------- what to do


class Lead(NamedTuple):
    """It is the master of this term."""

    state: State


class Follow(NamedTuple):
    """It is a slave in this term."""

    state: State


class Stand(NamedTuple):
    """The master is gone: follow nobody any more, and say how long the log is."""

    state: State


class Elect(NamedTuple):
    """Put this into the record, in place of the version seen (0: where there is none)."""

    state: State


class Decline(NamedTuple):
    """The record names this replica, which may not lead: put this into it, so that another one of
    the in-sync set does."""

    state: State


class Wait(NamedTuple):
    """As it is; look again after so long, or when something changes."""

    seconds: float
    reason: str


class Blocked(NamedTuple):
    """Neither lead nor follow; a person has to act."""

    reason: str


Step = Lead | Follow | Stand | Elect | Decline | Wait | Blocked


def next_step(view: View, me: Member, waited_s: float) -> Step:
    """What a replica does now. `me`: its own record as it should be; `waited_s`: how long the
    record has had this version with its master missing."""
    state = view.state
    if state is None:
        return _first_step(view, me, waited_s)
    if (state.master_id, state.life) == (me.id, me.life):
        may_lead = me.end != INCOMPLETE or state.is_unclean
        return Lead(state) if may_lead else _decline(view, state, me)
    if me.epoch > state.epoch:
        return Blocked(
            f"the log of replica {me.id} was written in epoch {me.epoch}, the record says "
            f"{state.epoch}: the consensus service has lost data, or is another cluster's. If it "
            f"is the right one, name the replica whose log counts: {ELECT}."
        )
    if me.end > 0 and me.epoch == 0 and not view.is_in_sync(me):
        return Blocked(
            f"replica {me.id} has a log of {me.end} bytes that no master of this cluster wrote; "
            "a slave would lose them. Start it with an empty storePathRootDir or, if this log "
            f"counts, elect it: {ELECT}."
        )
    if view.master is not None or not view.is_in_sync(me) or me.end == INCOMPLETE:
        if state.master_id != me.id:
            return Follow(state)
        return Wait(
            GATHER_S,
            "the record names this replica, whose disk is not what it was: one of the in-sync set "
            f"takes over when it lives. If none ever will: {ELECT}.",
        )
    return _stand_or_elect(view, state, me, waited_s)


def _first_step(view: View, me: Member, waited_s: float) -> Step:
    """There is no record yet: the longest log becomes the first master's."""
    members = {**view.members, me.id: me}
    written = [member for member in members.values() if member.epoch]
    if written:
        return Blocked(
            f"there is no record, and replica {written[0].id} has a log of epoch "
            f"{written[0].epoch}: the consensus service has lost its data. Name the replica whose "
            f"log counts, best the last master: {ELECT}."
        )
    turn_s = GATHER_S + TURN_S * rank(members.values(), me)
    if waited_s < turn_s:
        return Wait(turn_s - waited_s, "others may have a longer log")
    return Elect(elected(None, me, ()))


def _decline(view: View, state: State, me: Member) -> Step:
    """Name a successor, because this replica was given the role by its last published end and has
    cut its log since."""
    to = successor(view, me.id)
    if to is not None:
        return Decline(switched(state, to))
    return Wait(
        GATHER_S,
        "the record names this replica, which has cut its log and does not have all of a master's "
        f"state yet: one of the in-sync set takes over when it lives. If none ever will: {ELECT}.",
    )


def _stand_or_elect(view: View, state: State, me: Member, waited_s: float) -> Step:
    if me.standing != state.epoch:
        return Stand(state)
    members = {**view.members, me.id: me}
    able = [m for m in members.values() if view.is_in_sync(m) and m.end != INCOMPLETE]
    standing = [member for member in able if member.standing == state.epoch]
    turn_s = TURN_S * rank(standing, me) + GATHER_S * (len(standing) < len(able))
    if waited_s < turn_s:
        return Wait(turn_s - waited_s, "another one is first")
    return Elect(elected(state, me, standing))


def successor(view: View, master_id: int, to: int | None = None) -> Member | None:
    """Return the member that can take the role from `master_id` at once: it is in the in-sync set,
    alive and whole, and of several it has the longest log. Only `to` if that is given. Return None
    if there is none."""
    able = [
        member for member in view.members.values()
        if member.id != master_id and view.is_in_sync(member) and member.end != INCOMPLETE
        and to in (None, member.id)
    ]  # fmt: skip
    return min(able, key=lambda member: (-member.end, member.id), default=None)


def rank(members: Iterable[Member], me: Member) -> int:
    """How many go first: whose log has a later epoch, or is longer, or who has the smaller id."""
    key = (-me.epoch, -me.end, me.id)
    return sum((-member.epoch, -member.end, member.id) < key for member in members)


# --------------------------------------------------------------------------------- the next record


def elected(state: State | None, master: Member, standing: Iterable[Member]) -> State:
    """The next term. Who stands as well stays in the set: it has all that was acknowledged, and
    says so again for what this master's log has. Others come back when they have caught up."""
    in_sync = {member.id: member.incarnation for member in (master, *standing)}
    epoch = 1 + max(state.epoch if state else 0, master.epoch)
    return _term_of(master, epoch, in_sync, state.version if state else 0)


def switched(state: State, to: Member) -> State:
    """The next term on purpose: the set has it all, and stays."""
    return _term_of(to, state.epoch + 1, state.in_sync, state.version)


def elected_unclean(view: View, member_id: int) -> State:
    """The next term on an operator's word: this replica's log counts, whatever others had
    acknowledged. Raises KeyError when it does not live."""
    epochs = [member.epoch for member in view.members.values()]
    state, master = view.state, view.members[member_id]
    epoch = 1 + max(*epochs, state.epoch if state else 0)
    in_sync = {master.id: master.incarnation}
    version = state.version if state else 0
    return _term_of(master, epoch, in_sync, version)._replace(is_unclean=True)


def _term_of(master: Member, epoch: int, in_sync: Mapping[int, str], version: int) -> State:
    return State(
        epoch, master.id, master.life, master.address, master.ha_address, in_sync, version=version
    )


# -------------------------------------------------------------------------------------- the records


def directory(cluster: str, broker: str) -> str:
    """What the keys of one broker name begin with."""
    return f"sluicemq/{cluster}/{broker}/"


def state_key(prefix: str) -> str:
    return f"{prefix}state"


def member_key(prefix: str, member_id: int) -> str:
    return f"{prefix}replicas/{member_id}"


def parse(prefix: str, entries: Entries) -> View:
    """The records among these entries. Raises ValueError for what no replica wrote."""
    state, members = None, {}
    for key, entry in entries.items():
        try:
            if key == state_key(prefix):
                found = orjson.loads(entry.value)
                in_sync = {int(member): str(text) for member, text in found["inSync"].items()}
                fields = {field: found[name] for field, name in STATE_NAMES.items()}
                state = State(**fields, in_sync=in_sync, version=entry.version)
            elif key.startswith(f"{prefix}replicas/"):
                found = orjson.loads(entry.value)
                fields = {field: found[name] for field, name in MEMBER_NAMES.items()}
                members[found["id"]] = Member(**fields, version=entry.version)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the record {key} has no {error}") from error
    return View(state, members)


STATE_NAMES: Final = {
    "epoch": "epoch", "master_id": "master", "life": "life", "address": "address",
    "ha_address": "haAddress", "is_unclean": "unclean",
}  # fmt: skip
MEMBER_NAMES: Final = {
    "id": "id", "life": "life", "incarnation": "incarnation", "address": "address",
    "ha_address": "haAddress", "epoch": "epoch", "end": "end", "standing": "standing", "pid": "pid",
}  # fmt: skip


def encode_state(state: State) -> bytes:
    fields: dict[str, Any] = {name: getattr(state, field) for field, name in STATE_NAMES.items()}
    in_sync = {str(key): value for key, value in sorted(state.in_sync.items())}
    return orjson.dumps(fields | {"inSync": in_sync})


def encode_member(member: Member) -> bytes:
    return orjson.dumps({name: getattr(member, field) for field, name in MEMBER_NAMES.items()})
