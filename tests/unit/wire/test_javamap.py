"""The order of Java's hash maps."""

from sluicemq.wire.tables import sort_integer_map_as_java, sort_keys_as_java, sort_map_as_java


def test_keys_come_by_bucket_and_within_one_as_they_were_put() -> None:
    # "Aa" and "BB" have one hash code in Java.
    assert sort_keys_as_java(["BB", "Aa", "a"]) == ["BB", "Aa", "a"]
    assert sort_keys_as_java(["Aa", "a", "BB"]) == ["Aa", "BB", "a"]


def test_a_map_that_is_three_quarters_full_grows() -> None:
    assert sort_keys_as_java(range(12, -1, -1), 16) == list(range(13))
    assert sort_keys_as_java([16, 1], 16) == [16, 1]
    assert sort_keys_as_java([16, *range(1, 13)], 16) == [*range(1, 13), 16], "32 buckets by now"


def test_high_bits_of_a_code_count() -> None:
    assert sort_keys_as_java([0x10000, 0], 16) == [0, 0x10000]


def test_maps_keep_their_values() -> None:
    assert list(sort_map_as_java({"b": 1, "a": 2}).items()) == [("a", 2), ("b", 1)]
    assert list(sort_integer_map_as_java({70: 1, 3: 2, 5: 3}, 64).items()) == [
        (3, 2),
        (5, 3),
        (70, 1),
    ]
    assert list(sort_integer_map_as_java({64: 1, 3: 2}, 64).items()) == [(64, 1), (3, 2)]
