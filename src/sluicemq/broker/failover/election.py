"""Election: what a replica does next, given the records at the consensus service.

The consensus service keeps two kinds of records below `sluicemq/CLUSTER/BROKER/`:

    state          term, master, in-sync set with incarnations    changed by compare-and-swap only
    replicas/ID    a live replica: addresses, end of its log, …   attached to a lease

A term belongs to one run of a process. A broker that restarts has a new run id, and must begin a
new term before it accepts messages, even if the state record names it as master. The reason: its
slaves may have bytes behind the confirmed end that this broker lost in the crash.

No acknowledged message is lost, even if requests, answers and watches are late or lost
(`tests/unit/broker/failover` checks this on a model):

- A master acknowledges a message only when every replica of the in-sync set has it, and the set
  shrinks only by a change of the state record.
- Only a replica that is in the set, with the same incarnation, may be elected. So it has every
  acknowledged message. Its swap expects the version of the record that it has seen, so no other
  replica was elected or left out in between.
- A new term begins at the end of the elected replica's own log. That log contains all that this
  replica acknowledged to a deposed master, no matter when the deposed master learns of the term.

Everything else only makes an election fast and orderly. Candidates publish the ends of their logs;
the one with the longest log tries first and the others wait for their turn. The end of a lease
only says when to begin an election: the record deposes a master, never a clock.

In the JSON records a term is called `epoch`, a run id `life`, and the term of a candidacy
`standing`.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.broker.failover.consensus import Entries, Entry

INCOMPLETE: Final = -1
"""The end of a log that lacks messages or state, because the replica truncated or lost a part."""

GATHER_S: Final = 1.0
"""The time for which an election waits for other replicas to publish the ends of their logs."""

RANK_DELAY_S: Final = 1.0
"""The time for which a candidate waits for each candidate with a longer log."""

SKIPPED_TERMS_MAX: Final = 1 << 20
"""The most term numbers that an unclean election skips if the record was lost. A term is written as
a signed number of 32 bits, so there is room for two thousand such elections."""

ELECT_COMMAND: Final = "sluice cluster elect ID --unclean"

ROLLED_BACK: Final = (
    "The consensus service has an older record than before: its data was lost, or restored from an "
    "old copy while this replica was running. No replica is elected, and the in-sync set stays as "
    "it is. Restore its newest data, or elect the present master again; if there is none, elect "
    f"the last one: {ELECT_COMMAND}."
)
"""Why no replica is elected if the consensus service has lost changes of the state record."""


class State(NamedTuple):
    """The state record of a broker name: its term, its master and its in-sync set."""

    term: int
    """The number of the term. It grows with each change of the master."""
    master_id: int
    """The id of the master; 0 if there is none."""
    run_id: str
    """The run id of the master's process in this term."""
    address: str
    """The host:port at which clients connect to the master."""
    ha_address: str
    """The host:port at which slaves connect to the master."""
    in_sync: Mapping[int, str]
    """The id and incarnation of each replica that has every acknowledged message."""
    is_unclean: bool = False
    """Whether an operator forced the election, so that acknowledged messages may be lost."""
    version: int = 0
    """The version of the record at the consensus service; 0 if there is no record yet."""


class Member(NamedTuple):
    """The record of one live replica."""

    id: int
    run_id: str
    incarnation: str
    address: str
    """The host:port at which clients connect."""
    ha_address: str
    """The host:port at which slaves would connect."""
    log_term: int = 0
    """The last term in which the log of the replica was written; 0 if it is in no term."""
    log_end: int = 0
    """The position after the last byte of the log, or INCOMPLETE."""
    candidate_term: int = 0
    """The term whose master the replica has stopped following, to be elected; 0 for none."""
    pid: int = 0
    version: int = 0
    """The version of the record at the consensus service."""


class View(NamedTuple):
    """The records of one broker name, as a replica last read them."""

    state: State | None
    members: Mapping[int, Member]

    @property
    def master(self) -> Member | None:
        """The record of the master that the state names, or None if that master is not running.

        None also means that there is no state record, or that the process of the master was started
        again since its election (it has another run id).
        """
        if self.state is None:
            return None
        member = self.members.get(self.state.master_id)
        is_alive = member is not None and member.run_id == self.state.run_id
        return member if is_alive else None

    def is_in_sync(self, member: Member) -> bool:
        """Return whether the in-sync set contains the member with its present incarnation."""
        state = self.state
        return state is not None and state.in_sync.get(member.id) == member.incarnation


# ------------------------------------------------------------------------------------- what to do


class Lead(NamedTuple):
    """The replica is the master of this term."""

    state: State


class Follow(NamedTuple):
    """The replica is a slave in this term."""

    state: State


class BecomeCandidate(NamedTuple):
    """The master is gone: follow no master, and publish the end of the log."""

    state: State


class Elect(NamedTuple):
    """Swap this state into the record, in place of the version that it has (0: no record)."""

    state: State


class Decline(NamedTuple):
    """The record names this replica, which may not lead. Swap in this state to elect another."""

    state: State


class Wait(NamedTuple):
    """Change nothing. Decide again after `seconds`, or when a record changes."""

    seconds: float
    reason: str


class Blocked(NamedTuple):
    """Neither lead nor follow, because an operator must decide."""

    reason: str


Step = Lead | Follow | BecomeCandidate | Elect | Decline | Wait | Blocked


def next_step(view: View, me: Member, waited_s: float) -> Step:
    """Return what a replica must do now, by the records at the consensus service.

    `view` has the records: the state record, which names the master and the in-sync set (the
    replicas with every acknowledged message), and the record of each running replica. `me` is the
    replica's own record as it is now, published or not. `waited_s` is the time in seconds since
    the version of the state record, or whether its master is running, last changed.

    The first step whose condition holds is returned:

    - Without a state record: Blocked, Wait or Elect, by `_next_step_without_record`.
    - Lead: the state record names this run of the replica. If its log is incomplete, and no
      operator has forced the election, the step is Decline, or Wait if no other replica can lead.
    - Blocked: the log is of a later term than the record, or no master of this cluster wrote the
      log. As a slave the replica would lose that log.
    - BecomeCandidate, Wait or Elect, by `_next_step_of_candidate`: the master is not running, and
      this replica is in the in-sync set with a complete log. But the step is Blocked if the log of
      another running replica is of a later term than the record: the in-sync set in the record is
      outdated then.
    - Follow: the state record names another replica.
    - Wait: the state record names this replica, but another run of it.
    """
    state = view.state
    if state is None:
        return _next_step_without_record(view, me, waited_s)

    if (state.master_id, state.run_id) == (me.id, me.run_id):
        # An incomplete log must not become the log of the cluster, unless an operator wants it.
        may_lead = me.log_end != INCOMPLETE or state.is_unclean
        return Lead(state) if may_lead else _decline(view, state, me)

    blocked = _check_log_belongs(view, state, me)
    if blocked is not None:
        return blocked

    may_be_elected = view.is_in_sync(me) and me.log_end != INCOMPLETE
    if view.master is None and may_be_elected:
        later_log = _find_later_log(view, state, me)
        if later_log is not None:
            return _block_by_later_log(later_log, state)
        return _next_step_of_candidate(view, state, me, waited_s)
    if state.master_id != me.id:
        return Follow(state)
    return Wait(
        GATHER_S,
        "The record names this replica, but its disk has changed since: a replica of the "
        f"in-sync set takes over when it is running. If none will ever run: {ELECT_COMMAND}.",
    )


def _check_log_belongs(view: View, state: State, me: Member) -> Blocked | None:
    """Return None if the replica's log belongs to the history of this cluster, else Blocked.

    The log does not belong to it in two cases: its last term is later than the term of the state
    record, or it has data but no term, and the replica is not in the in-sync set. In the second
    case no master of this cluster wrote the log.
    """
    if me.log_term > state.term:
        return _block_by_later_log(me, state)

    if me.log_end > 0 and me.log_term == 0 and not view.is_in_sync(me):
        return Blocked(
            f"Replica {me.id} has a log of {me.log_end} bytes that no master of this cluster "
            "wrote; as a slave it would lose them. Start it with an empty storePathRootDir or, if "
            f"this log counts, elect it: {ELECT_COMMAND}."
        )
    return None


def _find_later_log(view: View, state: State, me: Member) -> Member | None:
    """Return a running replica whose log was written in a later term than that of `state`, or None.

    A log is written in a term only after the record says so. So if there is such a replica, the
    consensus service has lost the record of that term. `me` is considered first.
    """
    for member in (me, *view.members.values()):
        if member.log_term > state.term:
            return member
    return None


def _block_by_later_log(member: Member, state: State) -> Blocked:
    """Return the step that asks for an operator, because of the log of `member`.

    The log was written in a later term than that of `state`, the state record.
    """
    return Blocked(
        f"The log of replica {member.id} was written in term {member.log_term}, but the record "
        f"says {state.term}: the consensus service has lost data, or belongs to another cluster. "
        f"If it is the right one, elect the replica whose log counts: {ELECT_COMMAND}."
    )


def _next_step_without_record(view: View, me: Member, waited_s: float) -> Step:
    """Return the step of a replica while there is no state record at the consensus service.

    If the log of any replica has a term, the record was lost, and the step is Blocked. Otherwise
    the step is Wait until GATHER_S seconds, and RANK_DELAY_S more for each replica with a longer
    log, have passed. Then it is Elect. So the replica with the longest log elects itself first, and
    the others only if it does not.
    """
    members = {**view.members, me.id: me}
    # A log has a term only if there was a record of that term.
    member_with_term = next((member for member in members.values() if member.log_term), None)
    if member_with_term is not None:
        return Blocked(
            f"There is no record, but replica {member_with_term.id} has a log of term "
            f"{member_with_term.log_term}: the consensus service has lost its data. Elect the "
            f"replica whose log counts, preferably the last master: {ELECT_COMMAND}."
        )

    delay_s = GATHER_S + RANK_DELAY_S * count_ahead(members.values(), me)
    if waited_s < delay_s:
        return Wait(delay_s - waited_s, "Another replica may have a longer log.")
    return Elect(state_after_election(None, me, ()))


def _decline(view: View, state: State, me: Member) -> Step:
    """Return the step of a replica that the state record names as master, but cannot lead.

    Its log is incomplete: the replica has cut off the end of its log since it published the end by
    which it was elected. The step is Decline, which makes the replica with the longest complete log
    the master, or Wait if no other replica can lead.
    """
    successor = find_successor(view, me.id)
    if successor is not None:
        return Decline(state_after_switch(state, successor))
    return Wait(
        GATHER_S,
        "The record names this replica, which has truncated its log and does not have all of a "
        "master's state yet: a replica of the in-sync set takes over when it is running. If none "
        f"will ever run: {ELECT_COMMAND}.",
    )


def _next_step_of_candidate(view: View, state: State, me: Member, waited_s: float) -> Step:
    """Return the step of a replica that may be elected, while the master is not running.

    A candidate is a replica that has stopped following the master of the present term and has
    published that, so its log does not change any more.

    1. The step is BecomeCandidate until this replica is a candidate.
    2. Then it is Wait, for RANK_DELAY_S seconds for each candidate with a longer log, and for
       GATHER_S more while another replica that may be elected is not a candidate yet. That replica
       may have a longer log, and only candidates become members of the new in-sync set.
    3. Then it is Elect: this replica becomes the master, and the candidates are the in-sync set.
    """
    if me.candidate_term != state.term:
        return BecomeCandidate(state)

    members = {**view.members, me.id: me}
    candidates: list[Member] = []
    is_candidate_missing = False
    for member in members.values():
        may_be_elected = view.is_in_sync(member) and member.log_end != INCOMPLETE
        if may_be_elected and member.candidate_term == state.term:
            candidates.append(member)
        elif may_be_elected:
            is_candidate_missing = True

    delay_s = RANK_DELAY_S * count_ahead(candidates, me)
    if is_candidate_missing:
        delay_s += GATHER_S

    if waited_s < delay_s:
        return Wait(delay_s - waited_s, "Another replica is elected first.")
    return Elect(state_after_election(state, me, candidates))


def is_older_state(state: State | None, known_state: State | None) -> bool:
    """Return whether `state` was the record before `known_state`, or is missing though one exists.

    None as `known_state` means that no state is known: then nothing is older.

    The term is compared first, and the version only if both states belong to the same run of the
    same master. A service that has lost its data counts its versions from the beginning, so the
    version alone does not say which of two records is the later one. A later term is always the
    result of a later election. If a term has two runs, the service was restored from an old copy,
    and a replica that did not know the later record was elected. Then `state`, which the service
    has now, is not older: it deposes the master that it does not name.
    """
    if known_state is None:
        return False
    if state is None:
        return True
    if state.term != known_state.term:
        return state.term < known_state.term
    is_same_run = (state.master_id, state.run_id) == (known_state.master_id, known_state.run_id)
    return is_same_run and state.version < known_state.version


def has_only_log_grown(published: Member, member: Member) -> bool:
    """Return whether a replica's record differs from the published one only in its log.

    The result is False if the log has become complete or incomplete.
    """
    was_incomplete = published.log_end == INCOMPLETE
    is_incomplete = member.log_end == INCOMPLETE
    published_with_new_log = published._replace(log_end=member.log_end, log_term=member.log_term)
    return published_with_new_log == member and was_incomplete == is_incomplete


def describe_master(state: State) -> str:
    """Return the reason for which another master is deposed."""
    return f"term {state.term} has replica {state.master_id} as its master"


def find_successor(view: View, master_id: int, only_id: int | None = None) -> Member | None:
    """Return the replica that can replace the master `master_id` at once, or None if none can.

    The replica must be running and in the in-sync set, and its log must be complete. If several
    can, the one with the longest log is returned. If their logs are equal, it is the one with the
    smallest id. If `only_id` is given, only the replica with that id is considered.
    """
    successors = [
        member
        for member in view.members.values()
        if member.id != master_id
        and view.is_in_sync(member)
        and member.log_end != INCOMPLETE
        and only_id in (None, member.id)
    ]
    # The length is negated, so that the minimum has the longest log, and then the smallest id.
    return min(successors, key=lambda member: (-member.log_end, member.id), default=None)


def explain_unnecessary(view: View, me: Member) -> str:
    """Return why an operator must not elect `me`, or "" if an unclean election is necessary.

    An unclean election may lose acknowledged messages. It is unnecessary in two cases:

    - The master that the state record names is running.
    - Another replica of the in-sync set is running and has a complete log, and `me` is not such a
      replica. It has every acknowledged message.

    The second case does not count if a log is of a later term than the record, because the service
    has lost the newest in-sync set. Then only an operator knows which log counts. If there is no
    record, every election is necessary.
    """
    state = view.state
    if state is None:
        return ""
    master = view.master
    if master is not None and master.id != me.id:
        return _explain_better(master, "the master")

    is_outdated = _find_later_log(view, state, me) is not None
    can_lead = view.is_in_sync(me) and me.log_end != INCOMPLETE
    successor = None if is_outdated or can_lead else find_successor(view, me.id)
    return "" if successor is None else _explain_better(successor, "in sync")


def _explain_better(better: Member, role: str) -> str:
    """Return why no other replica must be elected while `better`, which is `role`, is running."""
    return (
        f"replica {better.id} at {better.address} is {role} and is running, or was a moment ago. "
        "The election of another replica could lose acknowledged messages. If replica "
        f"{better.id} cannot be used, stop it first."
    )


def count_ahead(members: Iterable[Member], me: Member) -> int:
    """Return how many of `members` are preferred to `me` in an election.

    A log with a later term is preferred, then the longer log, then the smaller id.
    """
    key = (-me.log_term, -me.log_end, me.id)
    return sum((-member.log_term, -member.log_end, member.id) < key for member in members)


# --------------------------------------------------------------------------------- the next record


def _term_and_version(state: State | None) -> tuple[int, int]:
    """Return the term and the version of the present record; 0 and 0 if there is none."""
    return (0, 0) if state is None else (state.term, state.version)


def state_after_election(
    state: State | None, master: Member, candidates: Iterable[Member]
) -> State:
    """Return the state of a new term with `master` as its master.

    `state` is the present state; None if there is none yet. The number of the new term is greater
    than that of the present term and that of the master's log. The in-sync set consists of `master`
    and `candidates`, the replicas that have every acknowledged message and follow no older master.
    Other replicas join the set again when they have the whole log.
    """
    in_sync = {member.id: member.incarnation for member in (master, *candidates)}
    present_term, version = _term_and_version(state)
    term = 1 + max(present_term, master.log_term)
    return _new_state(master, term, in_sync, version)


def state_after_switch(state: State, successor: Member) -> State:
    """Return the state of the next term, with `successor` as master and the same in-sync set."""
    return _new_state(successor, state.term + 1, state.in_sync, state.version)


def state_without_member(state: State, member_id: int) -> State:
    """Return the state without a member in its in-sync set."""
    remaining = dict(state.in_sync)
    remaining.pop(member_id, None)
    return state._replace(in_sync=remaining)


def state_after_unclean_election(view: View, member_id: int, read_state: State | None) -> State:
    """Return the state of a new term that an operator forces, with `member_id` as its master.

    `view` has the newest records that the replica knows. `read_state` is the state record that the
    service has now, which the new state replaces: it is older than that of `view`, or None, if the
    service has lost data.

    The number of the term is greater than those of all known states and of all logs in `view`. If
    the service has lost data, a replica that is not running may have been the master of a later
    term, and may even be running without reaching the service. Two masters must never have the same
    term, so up to SKIPPED_TERMS_MAX numbers are skipped. How many depends on the new master's run
    id, which is random.

    The in-sync set contains only the replica `member_id`. Its log replaces the logs of the other
    replicas, so acknowledged messages may be lost. `is_unclean` is true in the result.

    Raises KeyError if `view` has no member with this id.
    """
    master = view.members[member_id]
    read_term, version = _term_and_version(read_state)
    known_term, _ = _term_and_version(view.state)
    last_term = max(known_term, *(member.log_term for member in view.members.values()))

    term = 1 + max(read_term, last_term)
    is_record_lost = read_term < last_term or is_older_state(read_state, view.state)
    if read_state is None or is_record_lost:
        term += zlib.crc32(master.run_id.encode()) % SKIPPED_TERMS_MAX
    in_sync = {master.id: master.incarnation}
    new_state = _new_state(master, term, in_sync, version)
    return new_state._replace(is_unclean=True)


def _new_state(master: Member, term: int, in_sync: Mapping[int, str], version: int) -> State:
    """Return the state of `term`, with the id, addresses and run id of `master`.

    `in_sync` gives the incarnation (the id of the disk content) of each replica in the in-sync set
    by its id. `version` is the version of the record that the state will replace.
    """
    return State(
        term=term,
        master_id=master.id,
        run_id=master.run_id,
        address=master.address,
        ha_address=master.ha_address,
        in_sync=in_sync,
        version=version,
    )


# -------------------------------------------------------------------------------------- the records

STATE_JSON_KEYS: Final = {
    "term": "epoch",
    "master_id": "master",
    "run_id": "life",
    "address": "address",
    "ha_address": "haAddress",
    "is_unclean": "unclean",
}
"""The JSON key of each field of a state record, except the in-sync set and the version."""

MEMBER_JSON_KEYS: Final = {
    "id": "id",
    "run_id": "life",
    "incarnation": "incarnation",
    "address": "address",
    "ha_address": "haAddress",
    "log_term": "epoch",
    "log_end": "end",
    "candidate_term": "standing",
    "pid": "pid",
}
"""The JSON key of each field of a member's record, except the version."""


def key_prefix(cluster: str, broker: str) -> str:
    """Return the prefix of all keys of one broker name."""
    return f"sluicemq/{cluster}/{broker}/"


def state_key(prefix: str) -> str:
    """Return the key of the state record."""
    return f"{prefix}state"


def member_key(prefix: str, member_id: int) -> str:
    """Return the key of the record of one replica."""
    return f"{prefix}replicas/{member_id}"


def parse_view(prefix: str, entries: Entries) -> View:
    """Parse the state record and the records of the replicas in `entries`.

    `entries` are the values at the consensus service by key. `prefix` is the beginning of the keys
    of one broker name, which `key_prefix` returns. Other keys are ignored. The state of the
    returned View is None if there is no state record.

    Raises ValueError if a record is not a JSON object of the expected shape.
    """
    state: State | None = None
    members: dict[int, Member] = {}
    for key, entry in entries.items():
        try:
            if key == state_key(prefix):
                state = _parse_state(entry)
            elif key.startswith(f"{prefix}replicas/"):
                member = _parse_member(entry)
                members[member.id] = member
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the record {key} has no {error}") from error
    return View(state, members)


def _parse_state(entry: Entry) -> State:
    """Parse the JSON of the state record in `entry`.

    The version of the State is that of the entry. Raises KeyError, TypeError, AttributeError or
    ValueError if the JSON has another shape.
    """
    record = orjson.loads(entry.value)
    in_sync = {
        int(member_id): str(incarnation) for member_id, incarnation in record["inSync"].items()
    }
    fields = {field: record[json_key] for field, json_key in STATE_JSON_KEYS.items()}
    return State(**fields, in_sync=in_sync, version=entry.version)


def _parse_member(entry: Entry) -> Member:
    """Return the member's record in an entry. Raise the errors of `_parse_state`."""
    record = orjson.loads(entry.value)
    fields = {field: record[json_key] for field, json_key in MEMBER_JSON_KEYS.items()}
    return Member(**fields, version=entry.version)


def encode_state(state: State) -> bytes:
    """Return the state record as JSON, with the keys of STATE_JSON_KEYS and `inSync`.

    `inSync` maps each id, as a string, to its incarnation. The version is not part of the JSON.
    """
    record: dict[str, Any] = {
        json_key: getattr(state, field) for field, json_key in STATE_JSON_KEYS.items()
    }
    record["inSync"] = {
        str(member_id): incarnation for member_id, incarnation in sorted(state.in_sync.items())
    }
    return orjson.dumps(record)


def encode_member(member: Member) -> bytes:
    """Return the record of a replica as JSON with the keys of MEMBER_JSON_KEYS."""
    record = {json_key: getattr(member, field) for field, json_key in MEMBER_JSON_KEYS.items()}
    return orjson.dumps(record)
