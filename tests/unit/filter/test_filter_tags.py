"""Tag subscriptions (spec/filter.md §1)."""

import pytest

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.subscriptions import TagFilter, parse_subscription, parse_tags, tag_matches
from sluicemq.model.subscription import SQL92, Subscription


@pytest.mark.parametrize("expression", [None, "", "*"])
def test_nothing_and_star_mean_everything(expression: str | None) -> None:
    assert parse_tags(expression) == ("*", frozenset(), frozenset())
    assert parse_subscription("T", expression).is_everything


def test_tags_are_split_trimmed_and_hashed_as_java_does() -> None:
    text, tags, codes = parse_tags(" TagA ||\tTagB|| ||")

    assert text == " TagA ||\tTagB|| ||"
    assert tags == {"TagA", "TagB"}
    assert codes == {2598919, 2598920}  # "TagA".hashCode(), as recorded from the Java client


@pytest.mark.parametrize(
    ("tag", "code"),
    [
        ("order-created-in-hangzhou", -1149065142),
        ("支付", 823177),
        ("😀", 1772899),
        ("Aa", 2112),
        ("BB", 2112),
    ],
)
def test_code_is_the_signed_hash_over_utf16_units(tag: str, code: int) -> None:
    assert parse_tags(tag)[2] == {code}


@pytest.mark.parametrize("expression", ["||", "||||"])
def test_separators_alone_are_refused_with_a_fix(expression: str) -> None:
    with pytest.raises(FilterSyntaxError, match="no tag") as caught:
        parse_tags(expression)
    assert "TagA || TagB" in caught.value.fix


@pytest.mark.parametrize("expression", [" || ", "   ", "|| "])
def test_blanks_between_separators_match_nothing(expression: str) -> None:
    subscription = parse_subscription("T", expression)
    assert not subscription.is_everything
    assert TagFilter(subscription).tag_codes == frozenset()


def test_star_among_tags_and_a_single_bar_are_ordinary_characters() -> None:
    assert parse_tags("a||*")[1] == {"a", "*"}
    assert parse_tags("a|b")[1] == {"a|b"}
    assert parse_tags("a|||b")[1] == {"a", "|b"}  # split from the left


def test_only_what_java_trims_is_trimmed() -> None:
    assert parse_tags("\x00 a\x1f||\u00a0b")[1] == {"a", "\u00a0b"}


def test_subscription_keeps_topic_version_and_kind() -> None:
    assert parse_subscription("T", "a", None, 7) == Subscription(
        "T", "a", "TAG", frozenset({"a"}), frozenset({97}), 7
    )
    assert parse_subscription("T", "a > 5", SQL92, 7) == Subscription(
        "T", "a > 5", SQL92, version=7
    )


def test_subscription_to_a_bad_sql92_expression_is_refused() -> None:
    with pytest.raises(FilterSyntaxError, match="Unexpected end of expression"):
        parse_subscription("T", "a >", SQL92)
    with pytest.raises(FilterSyntaxError, match="empty"):
        parse_subscription("T", None, SQL92)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(
        FilterSyntaxError, match=r"'XPATH' is not a kind of filter\. Use TAG or SQL92"
    ):
        parse_subscription("T", "a", "XPATH")


def test_filter_compares_codes_and_never_reads_the_log() -> None:
    tag_filter = TagFilter(parse_subscription("T", "a||b"))
    assert [code for code in (0, 97, 98, 99) if tag_filter.by_consume_queue(code)] == [97, 98]
    assert tag_filter.by_commit_log({}) is True
    assert tag_filter.reads_properties is False


def test_colliding_tag_passes_the_broker_and_not_the_client() -> None:
    subscription = parse_subscription("T", "Aa")  # "Aa" and "BB" have one hash in Java
    assert TagFilter(subscription).by_consume_queue(2112)
    assert tag_matches(subscription, "Aa")
    assert not tag_matches(subscription, "BB")
    assert not tag_matches(subscription, None)


def test_client_accepts_any_tag_of_everything_and_of_sql92() -> None:
    assert tag_matches(parse_subscription("T", "*"), None)
    assert tag_matches(parse_subscription("T", "a > 5", SQL92), "x")


def test_filter_of_everything_has_no_set_of_codes() -> None:
    everything = TagFilter(parse_subscription("T", "*"))
    assert everything.tag_codes is None
    assert everything.by_consume_queue(12345)
