"""The peculiarities of the grammar (spec/filter.md §6)."""

import contextlib
import time

import pytest

from sluicemq.filter.findings import Rejected, Token
from sluicemq.filter.nodes import And, BareProperty, Equal, Literal, Negate, Not, Or, Property
from sluicemq.filter.syntax import LENGTH_MAX, NESTING_MAX, parse

A, B, C = Property("a"), Property("b"), Property("c")
FIVE = Literal(5)


def rejected(text: str) -> Rejected:
    with pytest.raises(Rejected) as caught:
        parse(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "rest"),
    [("a = 5 garbage here", 6), ("a = 5)", 5), ("a = 5 + 3", 6), ("a = 0x5", 5), ("a = 5 b #", 6),
     ("a = 5 -- tail", 6), ("a = 5", None), ("a = 5 -- tail\n", None)],
)  # fmt: skip
def test_what_follows_a_complete_expression_is_ignored(text: str, rest: int | None) -> None:
    assert parse(text).ignored_start == rest


def test_prefix_has_the_tree_of_the_complete_expression() -> None:
    assert parse("a = 5 garbage").tree == Equal(A, FIVE)
    assert parse("a LIKE 'x'").tree == BareProperty(A)


def test_the_first_ignored_token_must_be_lexically_valid() -> None:
    assert rejected("a = 5 #").finding.position == 6
    parse("a = 5 b #")


@pytest.mark.parametrize("text", ["a = 5 AND", "a NOT x", "a IS", "a IS 5", "a IN", "a BETWEEN 1"])
def test_a_token_that_can_continue_commits(text: str) -> None:
    rejected(text)


def test_not_binds_tighter_than_everything() -> None:
    assert parse("NOT a = b").tree == Equal(Not(BareProperty(A)), B)
    assert parse("NOT (a = b)").tree == Not(Equal(A, B))


def test_and_binds_tighter_than_or() -> None:
    assert parse("a OR b AND c").tree == Or(
        (BareProperty(A), And((BareProperty(B), BareProperty(C))))
    )


def test_chains_are_flat() -> None:
    assert parse("a AND b AND c").tree == And((BareProperty(A), BareProperty(B), BareProperty(C)))
    assert len(parse(" OR ".join(["a = 'xyz'"] * 2000)).tree.parts) == 2000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    ["a=" + "-" * 32_000 + "1", "a=1 OR a=--1 " * 2500, "/*" * 16_000, "a='" + "''" * 16_000],
    ids=["signs", "comments", "open comments", "quotes"],
)
def test_the_time_of_a_parse_grows_with_the_length_only(text: str) -> None:
    """Searching the line end of each -- to the end of the text blocked a broker for a minute."""
    begin = time.process_time()
    with contextlib.suppress(Rejected):
        parse(text)
    assert time.process_time() - begin < 3


def test_a_list_of_thousands_is_read_in_one_go() -> None:
    begin = time.process_time()
    tree = parse("a IN (" + ",".join(f"'{n}'" for n in range(4000)) + ")").tree
    assert len(tree.values) == 4000  # type: ignore[union-attr]
    assert time.process_time() - begin < 1


def test_comments_end_with_their_line() -> None:
    assert parse("a = 5 -- b\n OR b = 5").tree == parse("a = 5 OR b = 5").tree
    assert parse("a = 5 -- b\r OR b = - -5").tree == parse("a = 5 OR b = - - 5").tree
    assert parse("-- x\n-- y\n a = 5").tree == Equal(A, FIVE)


def test_minus_makes_a_node_and_plus_makes_none() -> None:
    assert parse("a = - 5").tree == Equal(A, Negate(FIVE))
    assert parse("a = + + 5").tree == Equal(A, FIVE)


def test_two_minus_signs_without_a_line_end_are_not_a_comment() -> None:
    assert parse("a = --5").tree == Equal(A, Negate(Negate(FIVE)))
    assert parse("a = --5\n b").tree == Equal(A, B)


@pytest.mark.parametrize("text", ["a /* x ** y */ = 5", "a/**/=5", "a = /* ' */ 5", "a\t=\r\n5\f"])
def test_comments_and_blanks_are_skipped(text: str) -> None:
    assert parse(text).tree == Equal(A, FIVE)


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", "\x0b", "\u2028"])
def test_other_blanks_are_errors(blank: str) -> None:
    assert rejected(f"a{blank}= 5").finding.position == 1


@pytest.mark.parametrize("word", ["and", "And", "aNd"])
def test_words_have_any_case(word: str) -> None:
    assert parse(f"a {word} b").tree == And((BareProperty(A), BareProperty(B)))


def test_a_word_inside_a_name_is_a_name() -> None:
    assert parse("NOTE = IN_1").tree == Equal(Property("NOTE"), Property("IN_1"))


def test_unicode_forms_of_letters_make_no_reserved_word() -> None:
    rejected("a ſTARTSWITH 'x'")  # U+017F folds to s


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("5L", 5), ("9223372036854775807", 2**63 - 1), (".5", 0.5), ("5.", 5.0),
     ("5e0", 5.0), ("005.5", 5.5), ("4.9e-324", 5e-324), ("'it''s'", "it's"), ("''", ""),
     ("'a\nb'", "a\nb")],
)  # fmt: skip
def test_literals(text: str, value: object) -> None:
    assert parse(f"a = {text}").tree == Equal(A, Literal(value))  # type: ignore[arg-type]


def test_nesting_has_a_limit() -> None:
    parse("(" * 5000 + "a = 5" + ")" * 5000)  # parentheses make no nodes
    parse("NOT " * (NESTING_MAX - 2) + "a")
    assert rejected("NOT " * NESTING_MAX + "a").finding.code == "too-deep"
    assert rejected("a = " + "- " * 5000 + "5").finding.code == "too-deep"


def test_length_has_a_limit() -> None:
    parse("a = 5" + " " * (LENGTH_MAX - 5))
    assert rejected("a = 5" + " " * (LENGTH_MAX - 4)).finding.code == "too-long"


def test_nodes_have_the_position_of_their_token() -> None:
    assert Token("NAME", "a", 3).position == 3
    tree = parse("aa = 55 AND b > 1").tree
    assert isinstance(tree, And)
    assert tree.position == 8
    assert [part.position for part in tree.parts] == [3, 14]
