"""A broker whose disk is full: a start says its reason, a stop is in order, nothing is doubted."""

import dataclasses

import pytest

from simulation.stepped import SMALL, START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.errors import StoreError
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.verify import verify
from sluicemq.testing.files import BLOCK_BYTES, CrashableFiles

CONFIG = dataclasses.replace(
    SMALL, commit_log_file_bytes=4096, consume_queue_file_bytes=200, index_slots=11,
    index_entries=44,
)  # fmt: skip


def start(files: CrashableFiles, seconds: int) -> SteppedBroker:
    return SteppedBroker(
        store_config=CONFIG, files=files, clock=ManualClock(START_MS + 1000 * seconds)
    )


def used() -> CrashableFiles:
    broker = start(CrashableFiles(), 0)
    client = broker.connect()
    for number in range(30):
        properties = f"UNIQ_KEY\x01U{number}\x02KEYS\x01k{number}\x02"
        assert client.call(310, send_fields(properties=properties), b"x" * 200).code == 0
    broker.close()
    return broker.files.kill()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_start_without_room_serves_or_names_path_and_cure(is_new: bool) -> None:
    template = CrashableFiles() if is_new else used()
    refused: list[StoreError] = []
    for blocks in range(8):
        files = template.kill()
        files.free_bytes = blocks * BLOCK_BYTES
        try:
            start(files, 100).close()
        except StoreError as error:
            refused.append(error)
    assert 0 < len(refused) < 8
    for error in refused:
        assert "No space left on device (/store/" in str(error)
        assert error.fix == "Free disk space."


@pytest.mark.parametrize("blocks", range(12))
def test_a_stop_on_a_full_disk_leaves_a_store_that_verify_finds_in_order(blocks: int) -> None:
    files = used()
    broker = start(files, 100)
    client = broker.connect()
    files.free_bytes = blocks * BLOCK_BYTES
    accepted = 0
    for number in range(40):
        properties = f"UNIQ_KEY\x01V{number}\x02KEYS\x01v{number}\x02"
        answer = client.call(310, send_fields(properties=properties), b"y" * 500)
        accepted += answer.code == 0
        broker.clock.advance(4)
        if broker.store.tick():
            broker.store.sync()
    broker.close()
    assert accepted < 40
    files = files.kill()
    found = verify(StoreLayout.find("/store", files=files)).findings.listed
    assert [finding for finding in found if finding.severity != "note"] == []
    files.free_bytes = None
    assert start(files, 1000).store.queue_offsets("T", 0) == (0, 30 + accepted)
