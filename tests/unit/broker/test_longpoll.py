"""The list of parked pulls, with pulls that only count."""

from collections.abc import Callable

from simulation.stepped import ManualClock
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.group_commit import Parked
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Peer
from sluicemq.net.limits import ROUND_BUDGET_S, FairScheduler
from sluicemq.wire.frames import Command, decode


class Wire:
    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


def new_peer() -> Peer:
    return Peer(Wire(), Host("127.0.0.1", 1), Host("127.0.0.1", 2))


class Polls:
    def __init__(self, size_max: int = 10_000) -> None:
        self.written: list[tuple[Peer, bytes]] = []
        self.looks = 0
        self.held: list[bytes] = []
        self.polls = LongPolls(
            lambda peer, frame: self.written.append((peer, frame)),
            lambda peer, answer, *_: self.held.append(answer),
            lambda: None,
            size_max,
            FairScheduler(ManualClock().monotonic_s, lambda run: None),
        )

    def park(self, peer: Peer, *, deadline_s: float = 15.0, wants: bool = True) -> Parked:
        def look(parked: Parked, is_last: bool) -> bytes | None:
            self.looks += 1
            return b"last" if is_last else b"found" if wants else None

        parked = Parked(Command(11), (("T", 0),), 5, deadline_s, look)
        assert self.polls.park(parked, peer)
        return parked


def test_a_queue_wakes_its_own_pulls_alone_and_each_once() -> None:
    polls = Polls()
    peer = new_peer()
    polls.park(peer)
    polls.polls.wake("T", 1, 6)
    polls.polls.wake("U", 0, 6)
    assert polls.looks == 0
    polls.polls.wake("T", 0, 6)
    polls.polls.wake("T", 0, 7)
    assert polls.written == [(peer, b"found")]
    polls.polls.expire(100.0)
    assert polls.looks == 1


def test_a_crowd_looks_in_slices_behind_answers_and_who_has_used_least_first() -> None:
    clock, log, soon = ManualClock(), list[Peer | str](), list[Callable[[], None]]()
    polls = LongPolls(
        lambda peer, frame: None, lambda *_: None, lambda: log.append("answers"), 1000,
        FairScheduler(clock.monotonic_s, soon.append),
    )  # fmt: skip
    greedy, others = new_peer(), [new_peer() for _ in range(100)]
    for peer in [greedy] * 100 + others:

        def look(parked: Parked, is_last: bool, peer: Peer = peer) -> bytes:
            clock.advance(0.0001)
            log.append(peer)
            return b"found"

        polls.park(Parked(Command(11), (("T", 0),), 5, 15.0, look), peer)
    polls.wake("T", 0, 6)
    longest_s = clock.monotonic_s()
    while soon:
        begin_s, coming, soon[:] = clock.monotonic_s(), soon[:], []
        for run in coming:
            run()
        longest_s = max(longest_s, clock.monotonic_s() - begin_s)
    assert longest_s <= ROUND_BUDGET_S + 0.0002
    assert log[0] == "answers"
    assert [log.count(peer) for peer in (greedy, *others)] == [100] + [1] * 100
    assert max(log.index(peer) for peer in others) < 130


def test_a_pull_that_has_seen_so_far_is_not_asked_again() -> None:
    polls = Polls()
    polls.park(new_peer())
    polls.polls.wake("T", 0, 5)
    assert polls.looks == 0


def test_a_look_that_fails_is_an_error_for_that_pull_alone() -> None:
    polls = Polls()
    bad, good = new_peer(), new_peer()

    def look(parked: Parked, is_last: bool) -> bytes | None:
        raise OSError(5, "bad sector")

    assert polls.polls.park(Parked(Command(11, opaque=9), (("T", 0),), 5, 15.0, look), bad)
    polls.park(good)
    polls.polls.wake("T", 0, 6)
    (bad_answer, good_answer) = polls.written
    answer = decode(bad_answer[1][4:])
    assert (bad_answer[0], answer.code, answer.opaque) == (bad, 1, 9)
    assert good_answer == (good, b"found")
    assert len(polls.polls) == 0


def test_deadlines_are_kept_in_order_whatever_the_order_of_parking() -> None:
    polls = Polls()
    late, early = new_peer(), new_peer()
    polls.park(late, deadline_s=20.0)
    polls.park(early, deadline_s=10.0)
    polls.polls.expire(10.0)
    assert polls.written == [(early, b"last")]
    polls.polls.expire(20.0)
    assert polls.written == [(early, b"last"), (late, b"last")]
    assert len(polls.polls) == 0


def test_answered_pulls_do_not_pile_up_until_their_deadline() -> None:
    polls = Polls()
    peer = new_peer()
    for _ in range(1000):
        polls.park(peer)
        polls.polls.wake("T", 0, 6)
    assert len(polls.polls._deadlines) < 100


def test_a_connection_that_breaks_takes_its_pulls_with_it() -> None:
    polls = Polls()
    gone, there = new_peer(), new_peer()
    for _ in range(3):
        polls.park(gone)
    polls.park(there)
    polls.polls.remove_connection(gone)
    assert len(polls.polls) == 1
    polls.polls.wake("T", 0, 6)
    assert polls.written == [(there, b"found")]
