"""Warnings about a property that is read in two ways, and notes on the types of properties."""

import pytest

from sluicemq.filter.check import check_sql92, describe_types

SURPRISING = [
    ("price > 30 AND price < 99.5", "30", "mixed-numbers", "30.0"),
    ("price >= 0 AND price < 99.5", "0", "mixed-numbers", "> -4.9e-324"),
    ("a BETWEEN 1 AND 2.5", "1", "mixed-numbers", "1.0"),
    ("a > 5 AND a < 3000000000", "5", "mixed-numbers", "5.0"),
    ("a = '5' OR a > 7", "'5'", "number-in-quotes", "5 without quotes"),
    ("a > 5 OR a = 'n/a'", "'n/a'", "string-behind-number", "first"),
    ("a > 5 OR b = 1 OR a IN ('n/a')", "IN ('", "string-behind-number", "first"),
    ("tags = 'TagA'", "tags", "tag-name", "TAGS"),
]


@pytest.mark.parametrize(
    ("text", "place", "code", "fix"), SURPRISING, ids=[row[0] for row in SURPRISING]
)
def test_reading_a_property_in_two_ways_gets_one_warning(
    text: str, place: str, code: str, fix: str
) -> None:
    (finding,) = check_sql92(text)
    assert not finding.is_error
    assert text[finding.position :].startswith(place)
    assert finding.code == code
    assert fix in finding.instead


@pytest.mark.parametrize(
    "text",
    ["a = 'n/a' OR a > 5", "a > 5 OR b = 'n/a'", "a > 5 OR a = '7.0' AND b = 1",
     "a <> 'x' AND a > 5",
     "a > 5 AND b < 1.5", "a = '5' OR b > 7", "a > 1 AND a < 9", "TAGS = 'A'", "a > 5 OR a <> 'x'"],
)  # fmt: skip
def test_expressions_that_read_a_property_in_one_way_have_no_findings(text: str) -> None:
    assert [finding for finding in check_sql92(text) if finding.code != "number-in-quotes"] == []


def test_type_notes_say_how_each_property_is_read_and_what_fails() -> None:
    notes = describe_types(
        "price > 30 AND rate < 1.5 AND region = 'hz' AND vip = TRUE AND id = 3000000000"
    )
    assert [(note.name, note.read_as) for note in notes] == [
        ("price", "Integer"),
        ("rate", "Double"),
        ("region", "String"),
        ("vip", "Boolean"),
        ("id", "Long"),
    ]
    assert "30.5" in notes[0].errors
    assert "30.0" in notes[0].instead
    assert describe_types("a >= 0")[0].instead.count("4.9e-324") == 4
    assert {note.read_as for note in describe_types("a > b AND 5 > c")} == {"Double", "Integer"}
    assert describe_types(
        "a BETWEEN b AND 5 AND d STARTSWITH 'x' AND e IN ('y') AND -a = 5 AND f = g"
    )
    assert describe_types("a >") == ()
