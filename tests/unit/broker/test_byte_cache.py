"""What is kept is bounded by bytes, and what was asked for longest ago goes first."""

from sluicemq.broker.lanes.cache import ENTRY_BYTES, ByteCache, cache_by_size


def counted(bytes_max: int) -> tuple[ByteCache[str], list[str]]:
    """A cache of texts in capitals, and the texts that it had to make."""
    made: list[str] = []

    @cache_by_size(len, bytes_max=bytes_max)
    def capitals(text: str) -> str:
        """In capitals."""
        made.append(text)
        return text.upper()

    return capitals, made


def test_what_is_known_is_not_made_again() -> None:
    capitals, made = counted(10 * ENTRY_BYTES)
    assert [capitals(text) for text in ("a", "b", "a")] == ["A", "B", "A"]
    assert made == ["a", "b"]
    assert capitals.__doc__ == "In capitals."


def test_what_was_not_asked_for_longest_goes_first() -> None:
    capitals, made = counted(2 * (ENTRY_BYTES + 1))
    for text in ("a", "b", "a", "c"):  # b goes
        capitals(text)
    made.clear()
    for text in ("a", "c", "b"):
        capitals(text)
    assert made == ["b"]


def test_what_is_larger_than_all_of_it_is_made_and_drives_nothing_out() -> None:
    capitals, made = counted(2 * ENTRY_BYTES)
    capitals("a")
    long = "x" * (2 * ENTRY_BYTES)
    assert capitals(long) == capitals(long) == long.upper()
    assert capitals("a") == "A"
    assert made == ["a", long, long]


def test_the_size_is_that_of_what_is_kept() -> None:
    capitals, _ = counted(3 * ENTRY_BYTES)
    for number in range(100):
        capitals("x" * (number % 40))
        assert capitals.size_bytes <= 3 * ENTRY_BYTES
    assert len(capitals) == 2
    assert capitals.size_bytes == sum(ENTRY_BYTES + number % 40 for number in (98, 99))
