from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import try_compile


def test_a_failure_is_returned_not_raised() -> None:
    outcome = try_compile("a >")
    assert isinstance(outcome, FilterSyntaxError)
    assert outcome.position == 3


def test_a_selector_evaluates_and_matches() -> None:
    selector = try_compile("region = 'hz' AND price BETWEEN 10 AND 20")
    assert isinstance(selector, Selector)
    assert selector.evaluate({"region": "hz", "price": "15"}) is True
    assert selector.evaluate({"region": "hz"}) is None
    assert selector.matches({"region": "hz", "price": "15"})
    assert not selector.matches({"region": "hz", "price": "15.0"})
    assert selector.property_names == {"region", "price"}
