"""How far apart the messages of a filtering consumer may lie: what its pulls teach the broker."""

from collections.abc import Iterable
from itertools import pairwise

from sluicemq.broker.consume.delivery import (
    BACKOFF_MIN_S,
    DELAY_S_MAX,
    GROWTH_DELAY_S,
    SPAN_MAX,
    SPAN_MIN,
    SpanEstimator,
)
from sluicemq.store.gather import PULL_SPAN_MAX, SpanLimit
from sluicemq.store.read import ReadResult, ReadStatus

JAVA_PAUSE_S = 0.050


def given(span: int, held_from: int = 0) -> ReadResult:
    """Messages up to `held_from + span`."""
    end = held_from + span + 1
    return ReadResult(ReadStatus.FOUND, end, 0, 1 << 30, [], 5, 500, end, held_from, span)


def out_of_reach(next_offset: int) -> ReadResult:
    status = ReadStatus.NO_MATCHED_MESSAGE
    return ReadResult(status, next_offset, 0, 1 << 30, [], 0, 0, 0, is_out_of_reach=True)


def pulls(pace: SpanEstimator, gaps_s: Iterable[float], now_s: float = 100.0) -> list[int]:
    """A client that takes all it gets; after each gap it pulls again. The spans it was allowed."""
    spans = []
    for gap_s in gaps_s:
        pace.record_pull(0, now_s)
        span = pace.make_span_limit(0, 0, 0, is_parked=False).span_max
        spans.append(span)
        pace.record_answer(0, given(span), now_s)
        now_s += gap_s
    return spans


def test_begins_with_what_a_java_consumer_holds_by_default() -> None:
    assert SpanEstimator().make_span_limit(0, 50, 20, is_parked=False) == SpanLimit(
        20, PULL_SPAN_MAX, is_patient=True
    )
    assert SpanEstimator().make_span_limit(0, 50, None, is_parked=True) == SpanLimit(
        50, PULL_SPAN_MAX
    )


def test_a_client_that_keeps_up_gets_more_and_more_up_to_what_java_can_be_set_to() -> None:
    pace = SpanEstimator()
    pulls(pace, [0.001])
    pulls(pace, [0.001], 100.0 + 0.001)
    spans = pulls(pace, [0.001] * 7, 100.001 + GROWTH_DELAY_S)
    assert spans == [2000, 4000, 8000, 16_000, 32_000, 64_000, SPAN_MAX]


def test_nothing_is_tried_in_the_first_second_in_which_a_short_drain_is_over() -> None:
    assert pulls(SpanEstimator(), [0.001] * 500) == [PULL_SPAN_MAX] * 500


def test_a_client_that_pauses_gets_half_and_is_tried_again_later_and_later() -> None:
    pace, now_s, tries = SpanEstimator(), 100.0, []
    for _ in range(4000):  # its limit is Java's default: it pauses when it got more
        pace.record_pull(0, now_s)
        span = pace.make_span_limit(0, 0, 0, is_parked=False).span_max
        pace.record_answer(0, given(span), now_s)
        if span > PULL_SPAN_MAX:
            tries.append(now_s)
        now_s += JAVA_PAUSE_S if span > PULL_SPAN_MAX else 0.005
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert len(tries) < 10, "of 20 seconds it lost less than half a one"
    assert waits == sorted(waits), "later and later"
    assert waits[-1] > 10 * BACKOFF_MIN_S


def test_a_span_never_falls_below_half_of_javas() -> None:
    pace = SpanEstimator()
    for second in range(0, 1000, 70):
        pulls(pace, [JAVA_PAUSE_S, JAVA_PAUSE_S, 0.03], 100.0 + second)
    assert pace.span_max == SPAN_MIN


def test_small_answers_say_nothing_of_the_span() -> None:
    pace = SpanEstimator()
    for number in range(10):
        pace.record_pull(0, number * JAVA_PAUSE_S)
        pace.make_span_limit(0, 0, 0, is_parked=False)
        pace.record_answer(0, given(900), number * JAVA_PAUSE_S)
    assert pace.span_max == PULL_SPAN_MAX


def held(pace: SpanEstimator, now_s: float, gap_s: float) -> float:
    """A pull is held, and the next one comes `gap_s` after its answer. For how long was it held?"""
    assert pace.make_span_limit(0, 5000, 0, is_parked=False).is_patient
    pace.record_answer(0, out_of_reach(5000), now_s)
    hold_s = pace.record_delay(0)
    pace.make_span_limit(0, 5000, 0, is_parked=True)
    pace.record_answer(0, given(100, 5000), now_s + hold_s)
    pace.record_pull(0, now_s + hold_s + gap_s)
    return hold_s


def test_holds_get_shorter_when_they_are_in_vain_until_nothing_is_held() -> None:
    pace, holds = SpanEstimator(), []
    while pace.make_span_limit(0, 5000, 0, is_parked=False).is_patient:
        holds.append(held(pace, 100.0 + len(holds), JAVA_PAUSE_S))
    assert holds == [DELAY_S_MAX, DELAY_S_MAX / 2, DELAY_S_MAX / 4, DELAY_S_MAX / 8]


def test_a_hold_after_which_the_client_does_not_pause_makes_holds_long_again() -> None:
    pace = SpanEstimator()
    holds = [held(pace, 100.0 + n, gap_s) for n, gap_s in enumerate([JAVA_PAUSE_S] * 2 + [0.001])]
    assert holds == [DELAY_S_MAX, DELAY_S_MAX / 2, DELAY_S_MAX / 4]
    assert held(pace, 200.0, 0.001) == DELAY_S_MAX


def test_what_a_parked_pull_finds_is_always_given() -> None:
    assert not SpanEstimator().make_span_limit(0, 5000, 0, is_parked=True).is_patient


def test_a_client_that_has_consumed_nothing_yet_holds_what_it_got() -> None:
    pace = SpanEstimator()
    assert pace.make_span_limit(0, 0, None, is_parked=False).consumed == 0
    pace.record_answer(0, given(1900, held_from=70), 1.0)
    assert pace.make_span_limit(0, 1971, None, is_parked=False).consumed == 70
    assert pace.make_span_limit(0, 9999, None, is_parked=False).consumed == 9999, (
        "it went elsewhere"
    )
