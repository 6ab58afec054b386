"""Searching in the text of properties gives what taking them apart gives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.model.ids import tag_code
from sluicemq.record.codec import (
    decode_properties,
    format_property_text,
    parse_property_text,
    tag_code_of_properties,
)

names = st.sampled_from(["TAGS", "KEYS", "MYTAGS", "UNIQ_KEY", "TAG", "S"])
words = st.text(alphabet="ABTGSKEY中 =", max_size=6)
pairs = st.lists(st.tuples(names, words), max_size=6)


def written(found: list[tuple[str, str]], *, ends: bool = True) -> str:
    text = "".join(f"{name}\x01{value}\x02" for name, value in found)
    return text if ends else text.removesuffix("\x02")


@settings(max_examples=100, deadline=None)
@given(pairs, st.booleans())
def test_the_tag_is_that_of_the_dict(found: list[tuple[str, str]], ends: bool) -> None:
    text = written([(name, value) for name, value in found if value], ends=ends)
    assert tag_code_of_properties(text.encode()) == tag_code(
        parse_property_text(text).get("TAGS", "")
    )


@settings(max_examples=100, deadline=None)
@given(pairs, st.booleans())
def test_the_dict_is_that_of_the_stored_record(found: list[tuple[str, str]], ends: bool) -> None:
    text = written(found, ends=ends)
    assert parse_property_text(text) == decode_properties(text.encode())


@given(st.dictionaries(names, words.filter(bool)))
def test_text_and_dict_are_inverse(properties: dict[str, str]) -> None:
    assert parse_property_text(format_property_text(properties)) == properties
