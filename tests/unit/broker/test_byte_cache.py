"""A byte cache is limited in bytes, and removes the least recently used entry first."""

from sluicemq.broker.lanes.cache import ENTRY_BYTES, ByteCache, cache_by_size


def counted(bytes_max: int) -> tuple[ByteCache[str], list[str]]:
    """Return a cache of texts in capitals, and the texts that it had to compute."""
    made: list[str] = []

    @cache_by_size(len, bytes_max=bytes_max)
    def capitals(text: str) -> str:
        """Return a text in capitals."""
        made.append(text)
        return text.upper()

    return capitals, made


def test_a_cached_result_is_not_computed_again() -> None:
    capitals, made = counted(10 * ENTRY_BYTES)
    assert [capitals(text) for text in ("a", "b", "a")] == ["A", "B", "A"]
    assert made == ["a", "b"]
    assert capitals.__doc__ == "Return a text in capitals."


def test_the_least_recently_used_entry_is_removed_first() -> None:
    capitals, made = counted(2 * (ENTRY_BYTES + 1))
    for text in ("a", "b", "a", "c"):  # b goes
        capitals(text)
    made.clear()
    for text in ("a", "c", "b"):
        capitals(text)
    assert made == ["b"]


def test_a_result_that_is_too_large_is_not_cached() -> None:
    capitals, made = counted(2 * ENTRY_BYTES)
    capitals("a")
    long = "x" * (2 * ENTRY_BYTES)
    assert capitals(long) == capitals(long) == long.upper()
    assert capitals("a") == "A"
    assert made == ["a", long, long]


def test_the_size_is_that_of_the_cached_entries() -> None:
    capitals, _ = counted(3 * ENTRY_BYTES)
    for number in range(100):
        capitals("x" * (number % 40))
        assert capitals.size_bytes <= 3 * ENTRY_BYTES
    assert len(capitals) == 2
    assert capitals.size_bytes == sum(ENTRY_BYTES + number % 40 for number in (98, 99))
