import pytest

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import (
    SQL92_DISABLED,
    TagFilter,
    make_filter,
    parse_subscription,
)
from sluicemq.model.subscription import SQL92, MessageFilter, Subscription


def test_everything_needs_no_filter() -> None:
    assert make_filter(parse_subscription("T", "*")) is None


def test_tags_are_decided_by_the_consume_queue() -> None:
    made = make_filter(parse_subscription("T", "a"))
    assert isinstance(made, TagFilter)
    assert made.tag_codes == {97}


def test_codes_are_taken_as_the_client_sent_them() -> None:
    made = make_filter(Subscription("T", "a", "", frozenset({"a"}), frozenset({1})))
    assert made is not None
    assert made.tag_codes == {1}


def test_sql92_is_decided_by_the_properties() -> None:
    made: MessageFilter | None = make_filter(Subscription("T", "a > 5", SQL92))
    assert isinstance(made, Selector)
    assert made.tag_codes is None
    assert made.reads_properties
    assert made.by_consume_queue(0)
    assert made.by_commit_log({"a": "6"})
    assert not made.by_commit_log({"a": "5"})
    assert not made.by_commit_log({"a": "x"})
    assert not made.by_commit_log({})


def test_bad_subscriptions_are_refused() -> None:
    with pytest.raises(FilterSyntaxError):
        make_filter(Subscription("T", "a >", SQL92))
    with pytest.raises(FilterSyntaxError, match="kind of filter"):
        make_filter(Subscription("T", "a", "XPATH"))


def test_refusal_begins_with_the_text_of_rocketmq_and_names_the_setting() -> None:
    assert SQL92_DISABLED.startswith(
        "The broker does not support consumer to filter message by SQL92"
    )
    assert "enablePropertyFilter=true" in SQL92_DISABLED
