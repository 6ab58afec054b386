"""A real process on the real file system is killed with -9 while it appends.

What it had told (the number of messages in committed turns) must be there afterwards, in order,
with nothing invented; and queues and log must agree.
"""

import random
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sluicemq.config import StoreConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.store import Store

SCRIPT = """
import struct, sys
from sluicemq.config import StoreConfig
from sluicemq.store.store import Store
host = bytes([127, 0, 0, 1]) + struct.pack(">i", 1)
config = StoreConfig(root=sys.argv[1], commit_log_file_bytes=1 << 16,
                     consume_queue_file_bytes=4000, consume_queue_flush_interval_ms=1,
                     flush_thorough_interval_ms=20)
store = Store.open(config)
number = sum(store.queue_offsets("T", queue)[1] for queue in range(3))
while True:
    for _ in range(7):
        body = struct.pack(">i", number) * 50
        store.writer.append("T", number % 3, body, b"", 0, 0, 0, 1, host, host)
        number += 1
    store.commit()
    print(number, flush=True)
    if store.tick():
        store.sync()
"""


@pytest.mark.parametrize("seed", range(6))
def test_everything_told_before_the_kill_is_there(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2):  # the second run recovers from the first
        told = run_and_kill(tmp_path, rng.uniform(0.02, 0.2))
        store = Store.open(
            StoreConfig(
                root=str(tmp_path), commit_log_file_bytes=1 << 16, consume_queue_file_bytes=4000
            )
        )
        numbers = sorted(number for queue in range(3) for number in read(store, queue))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= told > 0
        if rng.random() < 0.5:
            store.close()
        else:
            store._unlock()  # leave it as it is: the next start is one after a crash


def run_and_kill(root: Path, seconds: float) -> int:
    """Let it append for a while after its first turn; returns the last number it told."""
    command = [sys.executable, "-c", SCRIPT, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = int(process.stdout.readline())
        select.select([], [], [], seconds)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split(b"\n")[:-1]
    return int(rest[-1]) if rest else told


def read(store: Store, queue: int) -> list[int]:
    low, high = store.queue_offsets("T", queue)
    messages = []
    while low + len(messages) < high:
        result = store.reader.read("T", queue, low + len(messages), 1 << 20, 1 << 20)
        assert result.count
        messages += decode_records(b"".join(result.data))
    numbers = [struct.unpack_from(">i", message.body)[0] for message in messages]
    assert numbers == list(range(queue, 3 * len(numbers), 3))
    return numbers
