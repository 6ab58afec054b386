"""Messages that wait in a damaged store are delivered."""

from collections.abc import Callable

import pytest

from simulation.stepped import START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.record.codec import decode_records
from sluicemq.testing.files import CrashableFiles

COUNT = 20
DELAYED = f"/store/consumequeue/SCHEDULE_TOPIC_XXXX/9/{0:020d}"


def waiting() -> CrashableFiles:
    """Return the files of a killed broker on which COUNT messages of each kind wait."""
    broker = SteppedBroker()
    client = broker.connect()
    for number in range(COUNT):
        for kind in ("DELAY\x0110", f"TIMER_DELIVER_MS\x01{START_MS + 300_000}"):
            properties = f"UNIQ_KEY\x01U{number}\x02{kind}\x02"
            assert client.call(310, send_fields(properties=properties), b"%d" % number).code == 0
    broker.run(2)
    broker.close()
    return broker.files.kill()


def flip(files: CrashableFiles) -> None:
    data = bytearray(files.content(DELAYED))
    data[20 * 7 + 6] ^= 4
    files.put(DELAYED, bytes(data))


@pytest.mark.parametrize(
    "damage", [flip, lambda files: files.open("/store/timerwheel").truncate(0)],
    ids=["a unit of the delay queue", "an empty wheel"],
)  # fmt: skip
def test_every_message_that_waits_is_delivered(damage: Callable[[CrashableFiles], None]) -> None:
    files = waiting()
    damage(files)
    broker = SteppedBroker(files=files, clock=ManualClock(START_MS + 100_000))
    for _ in range(60):
        broker.pass_seconds(10)
    result = broker.store.reader.read("T", 0, 0, 1000, 1 << 20)
    found = [message.body for message in decode_records(b"".join(result.data))]
    assert sorted(found, key=int) == [b"%d" % (number // 2) for number in range(2 * COUNT)]
