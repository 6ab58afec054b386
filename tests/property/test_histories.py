"""The checker of histories: right ones pass, each kind of wrong one is told."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from histories.checker import check
from histories.history import (
    Change,
    End,
    Epoch,
    Filtered,
    History,
    Left,
    Listed,
    Outcome,
    Queue,
    Seen,
    Send,
    TermSeen,
    Timed,
)

Q: Queue = ("t", 0)
S: Queue = ("sink", 0)


def right(count: int = 4) -> History:
    """Messages one after the other, all acknowledged, seen, and on both replicas."""
    history = History()
    for at in range(count):
        send = Send(f"v{at}", Q, float(at))
        send.acknowledge(Q, at, at + 0.5, epoch=1 + at // 2)
        history.sends.append(send)
        history.seen.append(Seen(Q, at, f"v{at}", at + 0.6))
        history.ends.append(End(Q, at + 1, at + 0.6, at + 0.7, 1 + at // 2))
    values = {at: f"v{at}" for at in range(count)}
    history.terms += [TermSeen(1, 1, "a", {1: "x", 2: "y"}), TermSeen(2, 2, "b", {2: "y"})]
    history.changes.append(Change("topic", Outcome.OK))
    history.epochs += [
        Epoch("q/0", set("abcdef"), [frozenset("ab"), frozenset("cd"), frozenset("ef")], 2),
        Epoch("q/1", set("gh"), [frozenset("gh")]),
        Epoch("aborted/0", set("ij")),
    ]
    for name in "ab":
        rows = dict(enumerate("cd"))
        left = Left(name, {Q: dict(values), S: rows}, frozenset({"topic"}), tuple(values))
        history.left.append(left)
    return history


def kinds(history: History) -> set[str]:
    return {text.partition(":")[0] for text in check(history)}


def test_a_right_history_passes() -> None:
    assert not check(right())


def test_an_unsure_send_may_be_there_or_not() -> None:
    history = right()
    history.sends += [Send("u", Q, 0.2), Send("w", Q, 0.2)]
    for left in history.left:
        left.queues[Q][4] = "u"
    assert not check(history)


def test_an_unsure_commit_is_whole_or_nothing() -> None:
    history = right()
    history.left[0].queues[S].update({2: "g", 3: "h"})
    assert not check(history)


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("lost", lambda h: h.left[0].queues[Q].pop(2)),
        ("twice", lambda h: h.seen.append(Seen(Q, 1, "v3", 9.0))),
        ("taken back", lambda h: h.seen.append(Seen(Q, 7, "v3", 9.0))),
        ("missed", lambda h: h.filtered.append(
            Filtered(Q, 0, 4, frozenset({"v1"}), "odd", lambda value: value in ("v1", "v3")))),
        ("phantom", lambda h: h.left[0].queues[Q].update({4: "never sent"})),
        ("phantom", lambda h: h.left[0].queues[Q].update({4: "v1"})),
        ("phantom", lambda h: setattr(h.sends[3], "outcome", Outcome.REFUSED)),
        ("backwards", lambda h: h.ends.append(End(Q, 3, 9.0, 9.1, 2))),
        ("split", lambda h: h.terms.append(TermSeen(2, 1, "c", {1: "x"}))),
        ("split", lambda h: h.terms.append(TermSeen(3, 1, "c", {1: "x"}))),
        ("split", lambda h: h.terms.append(TermSeen(3, 2, "c", {2: "wiped"}))),
        ("split", lambda h: setattr(h.sends[0], "epoch", 9)),
        ("epoch", lambda h: h.left[0].queues[S].pop(1)),
        ("epoch", lambda h: h.left[0].queues[S].clear()),
        ("epoch", lambda h: h.left[0].queues[S].update({2: "c"})),
        ("epoch", lambda h: h.left[0].queues[S].update({2: "a"})),
        ("epoch", lambda h: h.left[0].queues[S].update({0: "e", 1: "f"})),
        ("epoch", lambda h: h.left[0].queues[S].update({2: "g"})),
        ("epoch", lambda h: h.left[0].queues[S].update({2: "i", 3: "j"})),
        ("phantom", lambda h: h.left[0].queues[S].update({2: "of no epoch"})),
        ("taken back", lambda h: h.seen.append(Seen(S, 2, "g", 9.0))),
        ("forgotten", lambda h: h.changes.append(Change("offset", Outcome.OK))),
        ("apart", lambda h: setattr(h.left[1], "log", (0, 1, 3))),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(kind: str, spoil: object) -> None:
    history = right()
    assert callable(spoil)
    spoil(history)
    assert kind in kinds(history)


def test_a_master_of_an_older_epoch_may_show_less() -> None:
    history = right()
    history.ends.append(End(Q, 2, 9.0, 9.1, 1))
    assert not check(history)


@given(st.permutations(range(5)))
def test_real_time_decides_the_order(order: list[int]) -> None:
    """Sends that follow each other have to stand so; any order of sends at once is right."""
    history = History(left=[Left("a", {Q: {at: f"v{value}" for at, value in enumerate(order)}})])
    for value in range(5):
        send = Send(f"v{value}", Q, float(value))
        send.acknowledge(Q, order.index(value), value + 0.5)
        history.sends.append(send)
    assert kinds(history) == (set() if order == sorted(order) else {"order"})
    history.sends = [replace(send, called_s=0.0) for send in history.sends]
    assert not check(history)


def timed_history() -> History:
    """A message that is due after 10 s, delivered once, and one that is taken back. The second
    master is elected 20 s after the message was due, and the third later."""
    history = right()
    history.timed += [
        Timed("t", Q, 10_000.0, "DELAY", Outcome.OK),
        Timed("gone", Q, 10_000.0, "TIMER_DELAY_MS", Outcome.OK, Outcome.OK),
    ]
    history.left[0].queues[Q][4] = "t"
    history.seen.append(Seen(Q, 4, "t", 10.2, stored_ms=10_001))
    history.terms = [
        TermSeen(1, 1, "a", {1: "x"}, at_ms=0),
        TermSeen(2, 1, "b", {1: "x"}, at_ms=30_000),
        TermSeen(3, 1, "c", {1: "x"}, at_ms=40_000),
    ]
    history.listed.append(Listed(1000.0, frozenset({"t"})))
    return history


def test_timed_messages_that_are_delivered_once_pass() -> None:
    assert not check(timed_history())


def deliver(history: History, value: str, copies: int) -> None:
    queue = history.left[0].queues[Q]
    for _ in range(copies):
        queue[len(queue)] = value


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_each_later_master_may_deliver_once_more(copies: int) -> None:
    history = timed_history()
    deliver(history, "t", copies)
    assert not check(history)


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("undelivered", lambda h: h.timed.append(Timed("u", Q, 10.0, "DELAY", Outcome.OK))),
        ("recalled", lambda h: deliver(h, "gone", 1)),
        ("repeated", lambda h: deliver(h, "t", 3)),
        ("early", lambda h: h.seen.append(Seen(Q, 4, "t", 10.2, stored_ms=9_998))),
        ("early", lambda h: h.seen.append(Seen(Q, 4, "t", 9.9, stored_ms=10_001))),
        ("unlisted", lambda h: h.listed.append(Listed(2000.0, frozenset()))),
    ],
)
def test_what_is_wrong_with_a_timed_message_is_told(
    kind: str, spoil: Callable[[History], object]
) -> None:
    history = timed_history()
    spoil(history)
    assert kinds(history) == {kind}


def test_nothing_is_early_or_repeated_by_a_clock_that_was_wrong() -> None:
    history = timed_history()
    history.seen.append(Seen(Q, 4, "t", 1.0, stored_ms=5))
    deliver(history, "t", 2)
    history.has_true_clocks = False
    assert not check(history)


def test_a_timer_comes_once_where_that_is_promised() -> None:
    history = timed_history()
    deliver(history, "t", 1)
    history.timers_come_once = True
    assert not check(history), "a delay level may be repeated"
    history.timed[0].kind = "TIMER_DELAY_MS"
    assert kinds(history) == {"repeated"}
