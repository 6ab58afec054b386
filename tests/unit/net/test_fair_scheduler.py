"""The order in which the scheduler runs owners, on a clock that their work advances."""

from collections.abc import Callable

import pytest

from simulation.stepped import ManualClock, SteppedBroker
from sluicemq.net.dispatch import Dispatcher
from sluicemq.net.limits import ROUND_BUDGET_S, WORK_WEIGHT_MAX, FairScheduler
from sluicemq.wire.frames import Command, decode, encode


class Loop:
    """An event loop that a test iterates, with a scheduler on it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._soon: list[Callable[[], None]] = []
        self.scheduler = FairScheduler(self.clock.monotonic_s, self._soon.append)
        self.log: list[str] = []

    def turn(self) -> float:
        """Run one scheduling round, which takes two iterations. Return its duration in seconds."""
        begin_s = self.clock.monotonic_s()
        for _ in range(2):
            soon, self._soon[:] = self._soon[:], []
            for run in soon:
                run()
        return self.clock.monotonic_s() - begin_s

    def work(self, who: str, seconds: float, again: bool = True) -> Callable[[], None]:
        """Return a slice that takes `seconds`, logs `who`, and schedules itself if `again`."""

        def run() -> None:
            self.clock.advance(seconds)
            self.log.append(who)
            if again:
                self.scheduler.schedule_slice(who, run)

        return run


def test_a_turn_ends_when_its_budget_is_used_up_however_many_wait() -> None:
    loop = Loop()
    for number in range(100):
        who = f"abuser {number}"
        loop.scheduler.schedule_slice(who, loop.work(who, 0.001))
    assert max(loop.turn() for _ in range(200)) <= ROUND_BUDGET_S + 0.001


def test_the_time_is_shared_by_what_is_used_not_by_how_often_somebody_asks() -> None:
    loop = Loop()
    loop.scheduler.schedule_slice("long", loop.work("long", 0.004))
    loop.scheduler.schedule_slice("short", loop.work("short", 0.001))
    for _ in range(400):
        loop.turn()
    assert loop.log.count("short") == pytest.approx(4 * loop.log.count("long"), rel=0.05)


def test_who_comes_later_waits_for_one_slice_of_another_and_has_saved_nothing() -> None:
    loop = Loop()
    for number in range(50):
        loop.scheduler.schedule_slice(f"abuser {number}", loop.work(f"abuser {number}", 0.002))
    for _ in range(500):
        loop.turn()
    loop.scheduler.schedule_slice("late", loop.work("late", 0.002))
    del loop.log[:]
    loop.turn()
    assert loop.log == ["late"]
    for _ in range(101):
        loop.turn()
    assert loop.log.count("late") <= 6, "it does not make up for the time when it asked nothing"


def test_nobody_waits_while_there_is_little_to_do() -> None:
    loop = Loop()
    for _ in range(10):
        begin_s = loop.clock.monotonic_s()
        loop.clock.advance(ROUND_BUDGET_S / 20)
        loop.scheduler.spent("one", begin_s)
    assert not loop.scheduler.is_tight


def test_the_answers_of_sends_leave_before_the_slices_of_a_turn() -> None:
    loop = Loop()
    loop.scheduler.before_round = lambda: loop.log.append("answers")
    loop.scheduler.schedule_slice("one", loop.work("slice", 0.001, again=False))
    loop.turn()
    assert loop.log == ["answers", "slice"]


def test_a_connection_with_too_many_works_is_read_on_when_one_ends() -> None:
    loop = Loop()
    for _ in range(WORK_WEIGHT_MAX):
        loop.scheduler.begin_work("one")
    assert loop.scheduler.has_to_wait("one")
    assert not loop.scheduler.has_to_wait("other")
    loop.scheduler.schedule_read("one", lambda: loop.log.append("read on"))
    loop.turn()
    assert not loop.log
    loop.scheduler.end_work("one")
    loop.turn()
    assert loop.log == ["read on"]


def test_what_fails_takes_nobody_with_it(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()

    def fails() -> None:
        raise ValueError("no")

    loop.scheduler.schedule_slice("one", fails)
    loop.scheduler.schedule_slice("other", loop.work("other", 0.0, again=False))
    loop.turn()
    assert loop.log == ["other"]
    assert "a deferred request failed" in caplog.text


def test_nothing_is_kept_of_who_is_gone() -> None:
    loop = Loop()
    loop.scheduler.charge("one", 1.0)
    loop.scheduler.begin_work("one")
    loop.scheduler.remove("one")
    loop.scheduler.end_work("one")
    assert not loop.scheduler._owners


def test_requests_of_one_chunk_stop_at_the_end_of_the_budget_and_sends_do_not() -> None:
    loop, handled = Loop(), []

    def handle(command: Command, peer: object) -> Command:
        handled.append(command.code)
        loop.clock.advance(ROUND_BUDGET_S / 2)
        return Command(0)

    def quick(header: dict[str, object], body: bytes, peer: object) -> bool:
        handled.append(310)
        return True

    dispatcher = Dispatcher({11: handle}, fast_handlers={310: quick}, scheduler=loop.scheduler)
    peer = SteppedBroker().connect().peer
    frames = [encode(Command(code, {}, b"", 1)) for code in (11, 11, 310, 310, 11, 310)]
    used, answers = dispatcher.handle_frames(b"".join(frames), peer, loop.scheduler)
    assert handled == [11, 11, 310, 310]
    assert used == len(b"".join(frames[:4]))
    assert decode(answers[4:]).code == 0
    loop.turn()
    dispatcher.handle_frames(b"".join(frames[4:]), peer, loop.scheduler)
    assert handled == [11, 11, 310, 310, 11, 310]
