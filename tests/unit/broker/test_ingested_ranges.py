"""What a broker remembers of what was staged, so that it need not read it again."""

import zlib
from dataclasses import replace

from sluicemq.broker.epochs import staged
from sluicemq.broker.epochs.staged import IngestedRanges
from sluicemq.store.writer import BatchPart
from sluicemq.wire.staging import Owner, Stage, StagedRange

OWNER = Owner("q", 7, 3, 0)
PLAIN = Stage(OWNER, "T")


def batch(stage: Stage, *bodies: bytes) -> list[BatchPart]:
    start = f"SLUICE_STAGE\x01{stage.encode()}\x02SLUICE_ID\x01".encode()
    return [(0, body, start + b"X%d\x02" % number, 0) for number, body in enumerate(bodies)]


def note(seen: IngestedRanges, queue_id: int, offset: int, parts: list[BatchPart]) -> None:
    seen.note_batch(queue_id, offset, [part[2] for part in parts], [part[1] for part in parts])


def told(offset: int, *bodies: bytes) -> StagedRange:
    """What a sink says of its range."""
    return StagedRange("b", 5, offset, len(bodies), zlib.crc32(b"".join(bodies)), 3, 0)


def test_batches_behind_each_other_are_one_range() -> None:
    seen = IngestedRanges()
    note(seen, 5, 10, batch(PLAIN, b"a", b"bb"))
    note(seen, 5, 12, batch(PLAIN, b"ccc"))
    assert seen.find_stage(("q", 7), told(10, b"a", b"bb", b"ccc")) == PLAIN


def test_another_count_checksum_owner_or_place_is_not_known() -> None:
    seen = IngestedRanges()
    note(seen, 5, 10, batch(PLAIN, b"a", b"bb"))
    right = told(10, b"a", b"bb")
    assert seen.find_stage(("q", 7), right) == PLAIN
    for wrong in (
        told(10, b"a", b"bc"), told(10, b"a"), told(11, b"a", b"bb"), replace(right, queue_id=4),
        replace(right, attempt=1), replace(right, partition=2),
    ):  # fmt: skip
        assert seen.find_stage(("q", 7), wrong) is None
    assert seen.find_stage(("q", 8), right) is None
    assert seen.find_stage(("r", 7), right) is None


def test_a_batch_that_is_sent_again_after_a_failed_turn_begins_a_new_range() -> None:
    seen = IngestedRanges()
    note(seen, 5, 10, batch(PLAIN, b"a"))
    note(seen, 5, 11, batch(PLAIN, b"lost"))  # taken back: the next one lies at its offset
    note(seen, 5, 11, batch(PLAIN, b"b"))
    assert seen.find_stage(("q", 7), told(10, b"a", b"b")) is None, "it has to be read"
    assert seen.find_stage(("q", 7), told(11, b"b")) == PLAIN


def test_rows_of_different_places_or_with_a_delay_have_to_be_read() -> None:
    seen = IngestedRanges()
    other = Stage(OWNER, "U")
    note(seen, 5, 10, batch(PLAIN, b"a") + batch(other, b"b"))
    assert seen.find_stage(("q", 7), told(10, b"a", b"b")) is None
    note(seen, 5, 12, batch(Stage(OWNER, "T", None, "L3"), b"c"))
    assert seen.find_stage(("q", 7), told(12, b"c")) is None
    note(seen, 5, 13, batch(other, b"d"))
    assert seen.find_stage(("q", 7), told(13, b"d")) == other


def test_what_does_not_say_where_it_belongs_is_not_known() -> None:
    seen = IngestedRanges()
    note(seen, 5, 10, [(0, b"a", b"TAGS\x01t\x02", 0)])
    note(seen, 5, 11, [(0, b"a", b"SLUICE_STAGE\x01nonsense\x02", 0)])
    assert seen.find_stage(("q", 7), told(10, b"a")) is None
    assert seen.find_stage(("q", 7), told(11, b"a")) is None


def test_no_more_ranges_are_remembered_than_there_is_room_for() -> None:
    seen = IngestedRanges()
    for number in range(staged.INGESTED_MAX + 1):
        note(seen, 5, 10 * number, batch(PLAIN, b"a"))
    assert seen.find_stage(("q", 7), told(0, b"a")) is None
    assert seen.find_stage(("q", 7), told(10, b"a")) == PLAIN
