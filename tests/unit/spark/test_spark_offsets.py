"""Ranges, shares and checkpoints."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.errors import ConfigurationError, OffsetOutOfRangeError
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.sources.checkpoints import make_checkpoint, parse_checkpoint
from sluicemq.spark.sources.offsets import QueueRange, resolve_offset_table, split_ranges
from sluicemq.spark.sources.stream import admit_offsets

pytestmark = pytest.mark.slow

A0, A1, B0 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)
QUEUES = st.builds(
    MessageQueue, st.just("t"), st.sampled_from(["a", "b"]), st.integers(0, 5)
)  # fmt: skip
RANGES = st.lists(
    st.builds(
        lambda queue, start, size: QueueRange(queue, start, start + size),
        QUEUES, st.integers(0, 1000), st.integers(0, 5000),
    ),
    max_size=6,
)  # fmt: skip


@given(RANGES, st.integers(1, 700), st.one_of(st.none(), st.integers(1, 50)))
@settings(max_examples=100, deadline=None)
def test_pieces_cover_every_range_exactly_once(
    ranges: list[QueueRange], records_max: int, partitions_min: int | None
) -> None:
    pieces = split_ranges(ranges, records_max, partitions_min)
    assert all(0 < piece.size <= records_max for piece in pieces)
    rows = sorted((piece.queue, offset) for piece in pieces
                  for offset in range(piece.start, piece.end))  # fmt: skip
    assert rows == sorted((one.queue, offset) for one in ranges
                          for offset in range(one.start, one.end))  # fmt: skip
    total = sum(one.size for one in ranges)
    assert len(pieces) >= min(partitions_min or 0, total)


def test_ranges_that_fit_stay_whole() -> None:
    ranges = [QueueRange(A0, 5, 10), QueueRange(A1, 3, 3)]
    assert split_ranges(ranges, 5, None) == [QueueRange(A0, 5, 10)]


@given(
    st.dictionaries(QUEUES, st.tuples(st.integers(0, 100), st.integers(0, 500)), max_size=6),
    st.one_of(st.none(), st.integers(1, 300)),
)
@settings(max_examples=100, deadline=None)
def test_a_trigger_takes_no_more_than_allowed_and_all_in_the_end(
    queues: dict[MessageQueue, tuple[int, int]], rows_max: int | None
) -> None:
    position = {queue: start for queue, (start, _) in queues.items()}
    latest = {queue: start + lag for queue, (start, lag) in queues.items()}
    for _ in range(10_000):
        following = admit_offsets(position, latest, rows_max)
        moved = {queue: following[queue] - position[queue] for queue in position}
        assert all(step >= 0 for step in moved.values())
        if rows_max is not None:
            assert sum(moved.values()) == min(
                rows_max, sum(latest[queue] - position[queue] for queue in position)
            )
        position = following
        if position == latest:
            break
    assert position == latest


def test_a_queue_never_goes_back() -> None:
    assert admit_offsets({A0: 10}, {A0: 4}, None) == {A0: 10}
    assert admit_offsets({A0: 10, A1: 0}, {A0: 4, A1: 8}, 3) == {A0: 10, A1: 3}


@given(st.dictionaries(QUEUES, st.integers(0, 2**60), max_size=6))
@settings(max_examples=50, deadline=None)
def test_checkpoints_give_back_the_offsets(offsets: dict[MessageQueue, int]) -> None:
    assert parse_checkpoint(make_checkpoint("t", "TAG *", offsets), "t") == offsets


def test_a_checkpoint_looks_as_documented() -> None:
    assert make_checkpoint("flights", "TAG UA||AA", {B0: 7, A1: 5, A0: 120}) == {
        "version": 1, "topic": "flights", "filter": "TAG UA||AA",
        "queues": {"a": {"0": 120, "1": 5}, "b": {"0": 7}},
    }  # fmt: skip


def test_a_checkpoint_of_another_topic_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"is of the topic 'x', but the stream reads 't'"):
        parse_checkpoint(make_checkpoint("x", "TAG *", {}), "t")


@pytest.mark.parametrize("found", [{}, {"version": 2, "queues": {}}, {"version": 1}])
def test_what_is_no_checkpoint_of_ours_is_refused(found: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="checkpoint"):
        parse_checkpoint(found, "t")


BOUNDS = {A0: (10, 20), A1: (0, 5)}


def test_chosen_offsets_resolve_words() -> None:
    assert resolve_offset_table({"a": {0: "earliest", 1: 3}}, BOUNDS, "o") == {A0: 10, A1: 3}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"a": {0: 10}}, "does not name a:1"),
        ({"a": {0: 10, 1: 0}, "b": {0: 1}}, "names b:0"),
        ({"a": {0: 21, 1: 0}}, "offset 21 of a:0"),
    ],
)
def test_chosen_offsets_that_are_not_there_are_named(
    table: dict[str, dict[int, int | str]], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        resolve_offset_table(table, BOUNDS, "startingOffsets")


def test_chosen_offsets_that_retention_has_passed_are_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table: dict[str, dict[int, int | str]] = {"a": {0: 7, 1: 0}}
    with pytest.raises(OffsetOutOfRangeError, match="offset 7 of a:0, which holds 10 to 20: 3 mes"):
        resolve_offset_table(table, BOUNDS, "startingOffsets")
    found = resolve_offset_table(table, BOUNDS, "startingOffsets", fail_on_data_loss=False)
    assert found == {A0: 10, A1: 0}
    assert "offsets 7 to 10 of a:0 are gone" in caplog.text
