"""A broker that is killed delivers each message of a delay level exactly once.

The log shows what was delivered; `delayOffset.json` is only saved from time to time.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest

from simulation.stepped import START_MS, ManualClock, SteppedBroker, SteppedClient, send_fields
from sluicemq.broker.waiting import logged_deliveries as module
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.testing.files import CrashableFiles

SEEDS = int(os.environ.get("SLUICEMQ_SEEDS", "0")) or 12
TOPICS = ("T", "U")


def send(client: SteppedClient, level: int, name: str, topic: str = "T", queue: int = 0) -> None:
    properties = f"UNIQ_KEY\x01{name}\x02DELAY\x01{level}\x02"
    assert client.call(310, send_fields(topic, properties, e=queue), name.encode()).code == 0


def delivered(broker: SteppedBroker) -> Counter[str]:
    found: Counter[str] = Counter()
    for topic, queue_id in broker.store.queues():
        if topic in TOPICS:
            result = broker.store.reader.read(topic, queue_id, 0, 100_000, 1 << 26)
            found.update(m.body.decode() for m in decode_records(b"".join(result.data)))
    return found


def started(files: CrashableFiles, now_ms: int) -> SteppedBroker:
    broker = SteppedBroker(files=files, clock=ManualClock(now_ms))
    for topic in TOPICS:
        if topic not in broker.core.topics:
            broker.core.topics.put(TopicConfig(topic, 2, 2))
    return broker


def killed(broker: SteppedBroker, pause_s: float = 1.0) -> SteppedBroker:
    """Return a broker on the disk of a killed process."""
    return started(broker.files.kill(), broker.clock.now_ms() + round(1000 * pause_s))


def test_eight_kills_make_no_message_come_twice() -> None:
    broker = started(CrashableFiles(), START_MS)
    client = broker.connect()
    for number in range(50):
        send(client, 1 + number % 3, f"m{number}", TOPICS[number % 2], number % 2)
    broker.run(1.1)
    for _ in range(8):
        broker = killed(broker)
        broker.run(0.1)
    broker.run(12)
    assert delivered(broker) == {f"m{number}": 1 for number in range(50)}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_history_of_kills_delivers_each_message_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, each message is delivered at least once."""
    rng, sent = random.Random(seed), list[str]()
    monkeypatch.setattr(module, "CHUNK_MESSAGES", rng.choice([1, 3, 4096]))
    fails, broker = rng.random() < 0.3, started(CrashableFiles(), START_MS)
    client: Any = broker.connect()
    for _ in range(40):
        kind = rng.random()
        if kind < 0.5:
            for _ in range(rng.randint(1, 6)):
                # Some messages are the same in all but their number.
                sent.append(rng.choice(["same", f"m{len(sent)}"]))
                send(client, rng.choice([1, 2, 3]), sent[-1], rng.choice(TOPICS), rng.randint(0, 1))
        elif kind < 0.8:
            broker.run(rng.choice([0.1, 1.0, 3.0]))
        elif kind < 0.9:
            for document in broker.core.documents:
                document.save()
        else:
            now_ms = broker.clock.now_ms() + rng.choice([0, 500, 20_000])
            if fails:
                broker.store.sync()
                broker.run(rng.choice([0.1, 2.0]))
                broker = started(broker.files.crash(rng), now_ms)
            else:
                broker = killed(broker)
            client = broker.connect()
    broker.run(15)
    found, wanted = delivered(broker), Counter(sent)
    if fails:
        assert found.keys() == wanted.keys()
        assert found >= wanted
    else:
        assert found == wanted


def test_found_deliveries_are_not_saved_before_they_are_on_disk() -> None:
    broker = started(CrashableFiles(), START_MS)
    send(broker.connect(), 1, "m")
    broker.store.sync()
    broker.run(1.1)
    broker = killed(broker)
    assert broker.core.delayed.levels.get_runtime_info() == {"scheduleMessageOffset_1": "1,1"}
    document = broker.core.delayed.levels.document
    document.save()
    for seed in range(20):
        again = started(broker.files.crash(random.Random(seed)), broker.clock.now_ms())
        again.run(1.0)
        assert delivered(again) == {"m": 1}
    broker.run(1.0)
    assert delivered(broker) == {"m": 1}


def test_a_start_reads_a_limited_number_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = started(CrashableFiles(), START_MS)
    client = broker.connect()
    for number in range(20):
        send(client, 1, f"m{number}")
    broker.run(1.1)
    monkeypatch.setattr(module, "RECORDS_MAX", 5)
    monkeypatch.setattr(module, "_CHUNK_UNITS", 4)
    broker = killed(broker)
    broker.run(1.0)
    found = delivered(broker)
    assert found.keys() == {f"m{number}" for number in range(20)}
    assert found["m0"] == 1
    assert found["m19"] == 2, "it may be repeated, and is not lost"
