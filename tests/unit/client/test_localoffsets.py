"""The offsets files of broadcasting consumers: format, crashes, lock; and prefetch limits."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.client.aio.offsets import (
    LocalOffsets,
    OffsetFiles,
    decode_local_offsets,
    encode_local_offsets,
)
from sluicemq.client.core.consuming import ConsumeOptions, InFlight
from sluicemq.errors import ConfigurationError, StoreDamagedError
from sluicemq.model.topic import MessageQueue
from sluicemq.testing.files import CrashableFiles

QUEUE = MessageQueue("t", "broker-a", 0)
tables = st.dictionaries(
    st.builds(MessageQueue, st.text(max_size=8), st.text(max_size=8), st.integers(0, 99)),
    st.integers(0, 2**62),
    max_size=6,
)


@given(table=tables)
@settings(max_examples=60)
def test_an_encoded_offsets_file_decodes_to_the_same_offsets(table):
    assert decode_local_offsets(encode_local_offsets(table)) == table


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"offsetTable":{"a":1}}', '{"offsetTable":{'])
def test_an_invalid_offsets_file_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        decode_local_offsets(text)


async def test_after_a_crash_the_file_is_one_of_those_that_were_written():
    rng = random.Random(7)
    for _ in range(50):
        files = CrashableFiles()
        offsets = LocalOffsets(files, "/o/c/g", uses_thread=False)
        written = [0]
        for offset in range(1, rng.randint(2, 5)):
            await offsets.write(QUEUE, offset)
            await offsets.flush()
            written.append(offset)
        await offsets.write(QUEUE, 99)  # never flushed
        again = LocalOffsets(files.crash(rng), "/o/c/g", uses_thread=False)
        assert await again.read(QUEUE) == written[-1]


async def test_a_damaged_file_falls_back_to_its_backup_and_two_damaged_files_are_an_error():
    files = CrashableFiles()
    offset_files = OffsetFiles("c", "/o", files, uses_thread=False)
    first = offset_files.for_group("g")
    for offset in (5, 6):
        await first.write(QUEUE, offset)
        await first.flush()
    await first.close()

    def spoil(name: str) -> None:
        file = files.open(f"/o/c/g/{name}")
        file.pwrite(b"!", 0)
        file.close()

    spoil("offsets.json")
    second = offset_files.for_group("g")
    assert await second.read(QUEUE) == 5
    await second.close()
    spoil("offsets.json.bak")
    with pytest.raises(StoreDamagedError):
        await offset_files.for_group("g").read(QUEUE)


async def test_a_second_consumer_with_the_same_file_is_refused_until_the_first_closes():
    offset_files = OffsetFiles("c", "/o", CrashableFiles(), uses_thread=False)
    first, second = offset_files.for_group("g"), offset_files.for_group("g")
    assert await first.read(QUEUE) is None
    with pytest.raises(ConfigurationError, match="instance="):
        await second.read(QUEUE)
    await first.close()
    assert await second.read(QUEUE) is None


async def test_offsets_are_kept_in_the_real_file_system(tmp_path):
    offset_files = OffsetFiles("c", str(tmp_path))
    first = offset_files.for_group("%RETRY|g")
    await first.write(QUEUE, 3)
    await first.close()
    assert (tmp_path / "c" / "%RETRY|g" / "offsets.json").read_text().startswith("{\n\t")
    assert await offset_files.for_group("%RETRY|g").read(QUEUE) == 3


def test_the_queues_of_a_topic_share_its_limits():
    options = ConsumeOptions(count_max=1000, topic_count_max=100, topic_bytes_max=8 << 20)
    assert options.queue_limits(1) == (100, 8 << 20)
    assert options.queue_limits(8) == (12, 1 << 20)
    assert options.queue_limits(1000) == (1, 8388)
    assert ConsumeOptions().queue_limits(4) == ConsumeOptions().queue_limits(1)


def test_a_wide_spread_of_unacknowledged_offsets_stops_fetching():
    in_flight = InFlight(0)
    in_flight.add([(offset, 1) for offset in (0, 1500, 2001)], 2002)
    assert in_flight.spread == 2001
    assert not in_flight.has_room(span_max=2000)
    assert in_flight.has_room(span_max=None)
    in_flight.ack(0)
    assert in_flight.has_room(span_max=2000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"span_max": 0},
        {"topic_count_max": 0},
        {"topic_bytes_max": 0},
        {"commit_period_s": 0},
        {"allocate": "unknown"},
    ],
)
def test_invalid_options_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        ConsumeOptions(**wrong)
