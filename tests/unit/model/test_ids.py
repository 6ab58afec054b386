"""Ids that clients make tell when they were made."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from sluicemq.model.ids import DAY_MS, UniqueIds, unique_id_time_ms
from sluicemq.testing.virtual import VirtualClock

BEGIN_MS = 1_700_000_000_000


@given(st.integers(0, 400), st.integers(0, DAY_MS - 1), st.integers(0, 27))
def test_the_time_of_an_id_is_known_for_a_month(days: int, rest_ms: int, age_days: int) -> None:
    born_ms = BEGIN_MS + days * DAY_MS + rest_ms
    start = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=born_ms)
    clock = VirtualClock(start, stands_still=True)
    message_id = UniqueIds(clock, bytes(4), 1, 2).make_id()
    assert unique_id_time_ms(message_id, born_ms + age_days * DAY_MS) == clock.now_ms()


def test_another_id_tells_no_time() -> None:
    for text in ("", "x" * 32, "7F00000100002A9F0000000000000000FF"):
        assert unique_id_time_ms(text, BEGIN_MS) == 0
