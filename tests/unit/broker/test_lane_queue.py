"""The state of one lane in one queue: which rule holds where, and when the lane may go back."""

from sluicemq.broker.lanes.lane_queue import LaneQueue, Span
from sluicemq.broker.lanes.rules import Atom, create_rule
from sluicemq.model.subscription import TAG

ONE, TWO = create_rule([Atom(TAG, "tag1")]), create_rule([Atom(TAG, "tag2")])


def spans(end_of_one: int) -> list[Span]:
    """Return spans by which ONE holds before an offset, and TWO from there on."""
    (one,), (two,) = ONE, TWO
    return [Span(0, end_of_one, one), Span(end_of_one, None, two)]


def test_a_rule_holds_from_its_first_offset_to_the_one_before_its_end() -> None:
    place = LaneQueue(spans=spans(5))
    assert [place.find_rule(offset) for offset in (0, 4)] == [(ONE, 5)] * 2
    assert [place.find_rule(offset) for offset in (5, 9)] == [(TWO, None)] * 2


def test_the_rule_at_the_current_offset_holds_for_all_messages_before_it() -> None:
    assert LaneQueue(committed_offset=5, spans=spans(5)).find_rule(2) == (TWO, None)
    assert LaneQueue(committed_offset=4, spans=spans(5)).find_rule(2) == (ONE, 5)


def test_a_commit_keeps_the_rule_of_the_next_message() -> None:
    place = LaneQueue(spans=spans(6))
    place.commit(5)
    assert place.find_rule(5) == (ONE, 6)
    place.commit(6)
    assert place.spans == spans(6)[1:], "what holds for committed messages alone is forgotten"


def test_a_lane_with_messages_in_flight_cannot_go_back_before_its_reader() -> None:
    reading = LaneQueue(committed_offset=3, delivered_end=6, read_end=6)
    assert not reading.can_go_back_to(5)
    assert reading.can_go_back_to(6)
    reading.commit(6)
    assert reading.can_go_back_to(5), "it has no messages in flight, so it can go back"


def test_a_lane_cannot_go_back_while_the_offset_of_its_reader_is_unknown() -> None:
    """That is so after a restart of the broker, until the reader pulls."""
    assert not LaneQueue(committed_offset=3, delivered_end=3).can_go_back_to(9)
