"""One lane in one queue: which rule holds for which message, and what the lane may take over."""

from sluicemq.broker.lanes.places import Place, Span
from sluicemq.broker.lanes.rules import Atom, clause
from sluicemq.model.subscription import TAG

ONE, TWO = clause([Atom(TAG, "tag1")]), clause([Atom(TAG, "tag2")])


def spans(end_of_one: int) -> list[Span]:
    """ONE holds for the messages before an offset, TWO from there on."""
    (one,), (two,) = ONE, TWO
    return [Span(0, end_of_one, one), Span(end_of_one, None, two)]


def test_a_rule_holds_from_its_first_offset_up_to_the_one_before_its_end() -> None:
    place = Place(spans=spans(5))
    assert [place.rule_at(offset) for offset in (0, 4)] == [(ONE, 5)] * 2
    assert [place.rule_at(offset) for offset in (5, 9)] == [(TWO, None)] * 2


def test_the_rule_of_the_place_holds_for_everything_before_it() -> None:
    assert Place(offset=5, spans=spans(5)).rule_at(2) == (TWO, None)
    assert Place(offset=4, spans=spans(5)).rule_at(2) == (ONE, 5)


def test_a_commit_keeps_the_rule_of_the_next_message() -> None:
    place = Place(spans=spans(6))
    place.commit(5)
    assert place.rule_at(5) == (ONE, 6)
    place.commit(6)
    assert place.spans == spans(6)[1:], "what holds for committed messages alone is forgotten"


def test_a_lane_takes_no_message_that_its_reader_has_passed_while_it_has_some_in_hand() -> None:
    reading = Place(offset=3, delivered=6, scanned=6)
    assert not reading.can_take(5)
    assert reading.can_take(6)
    reading.commit(6)
    assert reading.can_take(5), "it has nothing in hand, so it can be sent back"


def test_a_lane_takes_nothing_while_it_is_unknown_where_its_reader_is() -> None:
    """After a restart of the broker, until the reader pulls."""
    assert not Place(offset=3, delivered=3).can_take(9)
