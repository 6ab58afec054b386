"""What a group got of a topic, and the ranges on which its filters may have failed."""

from sluicemq.broker.consume.delivery import FILTERS_CHARS_MAX, FILTERS_MAX, DeliveryState
from sluicemq.filter.subscriptions import compile_sql92


def test_only_so_many_characters_of_expressions_are_remembered() -> None:
    """A pull may bring another expression each time, of up to 64 KiB. Compiled, a character takes
    85 to 280 bytes."""
    delivered, names = DeliveryState({}), [f"a{number}" for number in range(40)]
    filters = [compile_sql92(f"{name} = '{'x' * 5_000}'") for name in names]
    for one in filters:
        delivered.add_range_to_check(one, 0, 0, 10)
    kept = [one for one, _ in delivered.ranges_to_check]
    assert sum(len(one.text) for one in kept) <= FILTERS_CHARS_MAX
    assert kept == filters[-len(kept) :], "the oldest are forgotten first"
    assert len(kept) > 10


def test_one_filter_on_many_queues_is_counted_once() -> None:
    delivered, one = DeliveryState({}), compile_sql92(f"a = '{'x' * 5_000}'")
    for queue_id in range(FILTERS_MAX):
        delivered.add_range_to_check(one, queue_id, 0, 10)
    assert len(delivered.ranges_to_check) == FILTERS_MAX
