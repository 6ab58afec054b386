"""The order of Java's hash maps."""

from sluicemq.wire.tables import hash_map, hash_map_of_integers, hash_ordered


def test_keys_come_by_bucket_and_within_one_as_they_were_put() -> None:
    # "Aa" and "BB" have one hash code in Java.
    assert hash_ordered(["BB", "Aa", "a"]) == ["BB", "Aa", "a"]
    assert hash_ordered(["Aa", "a", "BB"]) == ["Aa", "BB", "a"]


def test_a_map_that_is_three_quarters_full_grows() -> None:
    assert hash_ordered(range(12, -1, -1), 16) == list(range(13))
    assert hash_ordered([16, 1], 16) == [16, 1]
    assert hash_ordered([16, *range(1, 13)], 16) == [*range(1, 13), 16], "32 buckets by now"


def test_high_bits_of_a_code_count() -> None:
    assert hash_ordered([0x10000, 0], 16) == [0, 0x10000]


def test_maps_keep_their_values() -> None:
    assert list(hash_map({"b": 1, "a": 2}).items()) == [("a", 2), ("b", 1)]
    assert list(hash_map_of_integers({70: 1, 3: 2, 5: 3}, 64).items()) == [(3, 2), (5, 3), (70, 1)]
    assert list(hash_map_of_integers({64: 1, 3: 2}, 64).items()) == [(64, 1), (3, 2)]
