"""Who is master: single decisions, and histories of a model in which anything may happen."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import election_model
from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Entry
from sluicemq.broker.failover.election import (
    GATHER_S,
    INCOMPLETE,
    RANK_DELAY_S,
    BecomeCandidate,
    Blocked,
    Decline,
    Elect,
    Follow,
    Lead,
    Member,
    State,
    Step,
    View,
    Wait,
    next_step,
)

PREFIX = election.key_prefix("cluster", "broker-a")


def member(number: int, **values: Any) -> Member:
    before = Member(number, f"life{number}", f"disk{number}", f"h:{number}", f"h:{number}0")
    return before._replace(**values)


def view(state: State | None, *members: Member) -> View:
    return View(state, {one.id: one for one in members})


def state(master: Member, *others: Member, term: int = 3) -> State:
    return election.state_after_election(None, master, others)._replace(term=term, version=7)


OFFSETS = st.integers(-1, 2**63 - 1)
ONE, TWO, THREE = (member(i, log_term=3, log_end=100) for i in (1, 2, 3))


AGAIN = TWO._replace(run_id="another", log_term=2)


def test_the_named_run_id_leads_and_others_follow() -> None:
    seen = view(state(ONE, TWO), ONE, TWO, THREE)
    assert isinstance(next_step(seen, ONE, 0), Lead)
    assert isinstance(next_step(seen, TWO, 99), Follow)
    assert isinstance(next_step(seen, THREE, 99), Follow)


def test_a_master_that_started_again_takes_another_term_at_once() -> None:
    again = ONE._replace(run_id="another")
    seen = view(state(ONE, TWO), again, TWO)
    assert isinstance(next_step(seen, again, 0), BecomeCandidate)
    again, candidate = again._replace(candidate_term=3), TWO._replace(candidate_term=3)
    step = next_step(view(seen.state, again, candidate), again, 0)
    assert isinstance(step, Elect)
    assert (step.state.term, step.state.run_id, step.state.version) == (4, "another", 7)
    assert step.state.in_sync == {1: "disk1", 2: "disk2"}


def test_the_longest_goes_first_and_the_others_wait_their_turn() -> None:
    first, second = TWO._replace(candidate_term=3, log_end=120), THREE._replace(candidate_term=3)
    seen = view(state(ONE, TWO, THREE), first, second)
    assert isinstance(next_step(seen, first, 0), Elect)
    assert next_step(seen, second, 0) == Wait(RANK_DELAY_S, "Another replica is elected first.")
    assert isinstance(next_step(seen, second, RANK_DELAY_S), Elect)


def test_the_log_of_the_later_term_goes_first_although_it_is_shorter() -> None:
    """The end of the longer log was written by a master that was deposed, and never confirmed."""
    newer = TWO._replace(candidate_term=3)
    older = THREE._replace(candidate_term=3, log_term=2, log_end=200)
    seen = view(state(ONE, TWO, THREE), newer, older)
    assert isinstance(next_step(seen, newer, 0), Elect)
    assert next_step(seen, older, 0) == Wait(RANK_DELAY_S, "Another replica is elected first.")


def test_who_has_not_said_how_long_it_is_is_waited_for_but_not_for_ever() -> None:
    candidate = TWO._replace(candidate_term=3)
    seen = view(state(ONE, TWO, THREE), candidate, THREE)
    assert isinstance(next_step(seen, candidate, 0), Wait)
    step = next_step(seen, candidate, GATHER_S)
    assert isinstance(step, Elect)
    assert step.state.in_sync == {2: "disk2"}


@pytest.mark.parametrize(
    "outsider",
    [THREE, TWO._replace(incarnation="wiped"), TWO._replace(log_end=INCOMPLETE)],
    ids=["not in the set", "another disk", "not whole"],
)
def test_others_never_stand(outsider: Member) -> None:
    seen = view(state(ONE, TWO), outsider)
    assert isinstance(next_step(seen, outsider, 1000), Follow)


def test_a_replica_that_was_left_out_while_it_stood_does_not_come_back_into_the_set() -> None:
    """The lease of the master ended and it lived on: it confirmed more without that replica."""
    candidate, left_out = TWO._replace(candidate_term=3), THREE._replace(candidate_term=3)
    step = next_step(view(state(ONE, TWO), candidate, left_out), candidate, 0)
    assert isinstance(step, Elect)
    assert step.state.in_sync == {2: "disk2"}


def test_nobody_waits_for_a_replica_that_is_not_whole() -> None:
    candidate = TWO._replace(candidate_term=3)
    seen = view(state(ONE, TWO, THREE), candidate, THREE._replace(log_end=INCOMPLETE))
    assert isinstance(next_step(seen, candidate, 0), Elect)


def test_who_has_cut_its_log_declines_the_role_that_it_was_given() -> None:
    """A master hands over by the end that was published last. Found by history 3055 of two
    replicas: the one that led nevertheless was killed, and nobody could lead any more."""
    cut = ONE._replace(log_end=INCOMPLETE)
    step = next_step(view(state(ONE, TWO, THREE), cut, TWO, THREE._replace(log_end=120)), cut, 0)
    assert isinstance(step, Decline)
    assert (step.state.master_id, step.state.term, step.state.version) == (3, 4, 7)
    assert step.state.in_sync.keys() == {1, 2, 3}
    outsiders = TWO._replace(incarnation="wiped"), THREE._replace(log_end=INCOMPLETE)
    alone = view(state(ONE, TWO, THREE), cut, *outsiders)
    assert isinstance(next_step(alone, cut, 1000), Wait)
    unclean = alone._replace(state=state(ONE)._replace(is_unclean=True))
    assert isinstance(next_step(unclean, cut, 0), Lead), "an operator's word counts"


def test_the_first_master_has_the_longest_log() -> None:
    full, empty = member(2, log_end=500), member(1)
    assert isinstance(next_step(view(None, full, empty), full, 0), Wait)
    assert isinstance(next_step(view(None, full, empty), empty, GATHER_S), Wait)
    step = next_step(view(None, full, empty), full, GATHER_S / 4)
    assert step == Wait(GATHER_S * 3 / 4, "Another replica may have a longer log.")
    step = next_step(view(None, full, empty), full, GATHER_S)
    assert isinstance(step, Elect)
    assert (step.state.term, step.state.master_id, step.state.in_sync) == (1, 2, {2: "disk2"})
    assert step.state.version == 0


@pytest.mark.parametrize(
    ("seen", "me", "fix"),
    [
        (view(None, ONE, member(4)), member(4), "--unclean"),
        (view(state(ONE, term=2)), TWO, "--unclean"),
        (view(state(TWO, term=2), ONE), AGAIN, "replica 1 was written in term 3"),
        (view(state(ONE)), member(2, log_end=10), "empty storePathRootDir"),
    ],
    ids=["record lost", "older record", "another has a later log", "a foreign log"],
)
def test_what_a_person_has_to_decide(seen: View, me: Member, fix: str) -> None:
    step = next_step(seen, me, 1000)
    assert isinstance(step, Blocked)
    assert fix in step.reason


def test_a_first_master_that_was_killed_before_its_log_had_an_term_goes_on() -> None:
    me = member(1, log_end=10, run_id="another")
    assert isinstance(next_step(view(state(member(1), term=1), me), me, 0), BecomeCandidate)


def test_an_operator_elects_above_every_term() -> None:
    seen = view(state(ONE, term=5), TWO, THREE)
    new = election.state_after_unclean_election(seen, 2, seen.state)
    assert (new.term, new.master_id, new.in_sync, new.version) == (6, 2, {2: "disk2"}, 7)
    assert new.is_unclean
    assert not election.state_after_election(new, TWO, ()).is_unclean
    with pytest.raises(KeyError):
        election.state_after_unclean_election(seen, 1, seen.state)


@pytest.mark.parametrize(
    ("known", "read", "later"),
    [
        (None, None, THREE),
        (state(ONE, term=5), None, THREE),
        (state(ONE, term=5), state(TWO, term=4), THREE),
        (state(ONE, term=5), state(ONE, term=5)._replace(version=6), THREE),
        (state(ONE, term=5), state(ONE, term=5), THREE._replace(log_term=9)),
    ],
    ids=["no record", "lost", "older term", "older version", "later log"],
)
def test_a_term_is_not_used_twice_although_the_service_has_lost_its_number(
    known: State | None, read: State | None, later: Member
) -> None:
    """Another replica may have been the master in the terms that follow, and is not there."""
    terms = set()
    for number in range(50):
        seen = view(known, TWO._replace(run_id=f"run {number}"), later)
        new = election.state_after_unclean_election(seen, 2, read)
        assert new.version == (read.version if read else 0)
        assert new.term > max(later.log_term, known.term if known else 0)
        terms.add(new.term)
    assert len(terms) == 50
    assert max(terms) < 2**21


def test_what_is_older_is_decided_by_the_term_and_then_by_the_version() -> None:
    """A service that has lost its data counts its versions from the beginning."""
    known = state(ONE, TWO, term=5)
    is_older = election.is_older_state
    assert is_older(None, known)
    assert not is_older(None, None)
    assert not is_older(known, None)
    assert not is_older(known, known)
    assert is_older(known._replace(version=6), known)
    assert is_older(state(ONE, term=1)._replace(version=1000), known)
    assert not is_older(state(TWO, term=6)._replace(version=1), known)
    assert not is_older(known._replace(run_id="another", version=1), known)


WHOLE = state(ONE, TWO)


@pytest.mark.parametrize(
    ("seen", "me", "text"),
    [
        (view(None, ONE, TWO), THREE, ""),
        (view(WHOLE, ONE, TWO), THREE, "replica 1 at h:1 is the master"),
        (view(WHOLE, ONE, TWO), TWO, "replica 1 at h:1 is the master"),
        (view(WHOLE, TWO), THREE, "replica 2 at h:2 is in sync"),
        (view(WHOLE, TWO), TWO, ""),
        (view(WHOLE, THREE), THREE, ""),
        (view(WHOLE, TWO), ONE._replace(incarnation="wiped"), "replica 2 at h:2 is in sync"),
        (view(WHOLE, TWO), ONE._replace(log_end=INCOMPLETE), "replica 2 at h:2 is in sync"),
        (view(WHOLE, TWO._replace(incarnation="wiped"), THREE), THREE, ""),
        (view(WHOLE, TWO), THREE._replace(log_term=4), ""),
        (view(WHOLE, ONE), THREE._replace(log_term=4), "replica 1 at h:1 is the master"),
        (view(WHOLE, ONE), ONE, ""),
    ],
)
def test_an_election_that_may_lose_messages_has_to_be_necessary(
    seen: View, me: Member, text: str
) -> None:
    reason = election.explain_unnecessary(seen, me)
    assert reason.startswith(text)
    assert bool(text) == bool(reason)


def test_a_switch_keeps_the_set() -> None:
    before = state(ONE, TWO, THREE)
    after = election.state_after_switch(before, TWO)
    assert (after.term, after.master_id, after.run_id) == (4, 2, "life2")
    assert after.in_sync == before.in_sync


@given(
    st.builds(
        State, st.integers(0, 9), st.integers(0, 9), st.text(), st.text(), st.text(),
        st.dictionaries(st.integers(0, 9), st.text()), st.booleans(), st.just(5),
    ),
    st.builds(
        Member, st.integers(1, 9), st.text(), st.text(), st.text(), st.text(), OFFSETS, OFFSETS,
        OFFSETS, OFFSETS, st.just(6),
    ),
)  # fmt: skip
def test_records_are_read_as_they_were_written(record: State, one: Member) -> None:
    entries = {
        election.state_key(PREFIX): Entry(election.encode_state(record), 5),
        election.member_key(PREFIX, one.id): Entry(election.encode_member(one), 6, 1),
        f"{PREFIX}other": Entry(b"?", 1),
    }
    assert election.parse_view(PREFIX, entries) == View(record, {one.id: one})


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b"not json", b'{"inSync":[]}'])
def test_what_no_replica_wrote_is_refused(value: bytes) -> None:
    for key in ("state", "replicas/1"):
        with pytest.raises(ValueError, match=r"record|JSON|char"):
            election.parse_view(PREFIX, {PREFIX + key: Entry(value, 1)})


# ------------------------------------------------------------------------------------- histories


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**64))
@example(30924)  # a new master took in a replica that lacked what the master before had confirmed
def test_nothing_confirmed_is_ever_missing(seed: int) -> None:
    election_model.run(seed)


def test_histories_elect_and_confirm() -> None:
    worlds = [election_model.run(seed, 1500) for seed in range(60)]
    assert sum(world.elections for world in worlds) > 100
    assert sum(len(world.confirmed) for world in worlds) > 100


def _any_disk(seen: View, me: Member) -> bool:
    return seen.state is not None and me.id in seen.state.in_sync


def _any_run_id(seen: View, me: Member, waited_s: float) -> Step:
    if seen.state is not None and seen.state.master_id == me.id:
        return Lead(seen.state)
    return next_step(seen, me, waited_s)


def _forgets(world: election_model.World, replica: election_model.Replica) -> None:
    world.look(replica)
    replica.unsettled = None


def _believes_lost(confirm: Callable[..., None]) -> Callable[..., None]:
    def changed(world: election_model.World, master: election_model.Replica) -> None:
        proposed, master.unsettled = master.unsettled, None
        confirm(world, master)
        master.unsettled = proposed

    return changed


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (View, "is_in_sync", _any_disk),
        (View, "is_in_sync", lambda seen, _me: seen.state is not None),
        (election, "next_step", _any_run_id),
        (election_model.World, "settle", _forgets),
        (election_model.World, "confirm", _believes_lost(election_model.World.confirm)),
    ],
    ids=["any disk", "anybody", "any run", "answer is not waited for", "only the old set counts"],
)
def test_the_model_finds_mutants(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, mutant: object
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        election_model.run_all(2000)
