"""Delayed and timed messages over power losses: each acknowledged one comes, and none too early.

Each seed runs the production broker core under SYNC_FLUSH over crashable files: sends with levels
and times, lets time pass, saves tables and checkpoints at odd moments, and loses power in the
middle of it, several times. Messages must not be missing. Those of a delay level may come again
after a crash; a timed one comes once, since the log knows what is delivered.
"""

import contextlib
import random
from collections import Counter
from dataclasses import replace

import pytest

from simulation.stepped import SMALL, START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.testing.files import CrashableFiles, PowerLost

LEVELS_MS = (1000, 5000, 10_000, 30_000)
CONFIG = replace(SMALL, flush_sync=True, commit_log_file_bytes=1 << 17)
LIVES = 4
SEEDS = 25


class Run:
    """One seed: what was acknowledged, through several lives of the broker."""

    def __init__(self, seed: int, config: object = CONFIG) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.clock = ManualClock()
        self.files = CrashableFiles()
        self.due: dict[bytes, int] = {}
        self.acknowledged: set[bytes] = set()
        self.timed: set[bytes] = set()
        self.number = 0

    def live(self) -> None:
        """From a start to a power loss."""
        files = self.files
        files.power_fails_after = self.rng.randrange(20, 1500)
        with contextlib.suppress(PowerLost):
            self._work(files)
        files.power_fails_after = None
        self.files = files.crash(self.rng)

    def _work(self, files: CrashableFiles) -> None:
        broker = self._start(files)
        client = broker.connect()
        for _ in range(self.rng.randrange(10, 60)):
            chance = self.rng.random()
            if chance < 0.6:
                self._send(broker, client)
            elif chance < 0.9:
                broker.run(self.rng.choice((0.1, 0.7, 3.0)), step_s=0.1)
            elif chance < 0.95:
                broker.core.delayed.save()
                broker.store.tick()
            else:
                if self.rng.random() < 0.5:  # deliveries are written whose fsync has not begun
                    broker.advance(self.rng.choice((0.7, 3.0)))
                for document in broker.core.delayed.documents:
                    document.save()

    def _start(self, files: CrashableFiles) -> SteppedBroker:
        broker = SteppedBroker(files=files, clock=self.clock, store_config=self.config)  # type: ignore[arg-type]
        broker.core.topics.put(TopicConfig("T", 1, 1))
        return broker

    def _send(self, broker: SteppedBroker, client: object) -> None:
        self.number += 1
        body = b"%d" % self.number
        now_ms = self.clock.now_ms()
        if self.rng.random() < 0.5:
            level = self.rng.randrange(4)
            text, wait_ms = f"DELAY\x01{level + 1}\x02", LEVELS_MS[level]
        else:
            wait_ms = self.rng.randrange(1, 20_000)
            text = f"TIMER_DELIVER_MS\x01{now_ms + wait_ms}\x02"
            self.timed.add(body)
        request = client.request(  # type: ignore[attr-defined]
            310, send_fields(properties=f"UNIQ_KEY\x01A{self.number}\x02{text}"), body
        )
        self.due[body] = now_ms + wait_ms
        client.feed(request)  # type: ignore[attr-defined]
        broker.settle()
        if client.answers.pop(request.opaque).code == 0:  # type: ignore[attr-defined]
            self.acknowledged.add(body)

    def finish(self) -> "Counter[bytes]":
        """Start once more, wait long enough, and count what was delivered."""
        broker = self._start(self.files)
        broker.run(40.0, step_s=0.25)
        result = broker.store.reader.read("T", 0, 0, 1_000_000, 1 << 30)
        found = decode_records(b"".join(result.data))
        early = [m.body for m in found if m.store_time_ms < self.due.get(m.body, START_MS)]
        assert not early, f"delivered before their time: {early}"
        return Counter(message.body for message in found)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_acknowledged_message_comes_and_none_too_early(seed: int) -> None:
    run = Run(seed)
    for _ in range(LIVES):
        run.live()
    delivered = run.finish()
    missing = run.acknowledged - delivered.keys()
    assert not missing, f"{len(missing)} of {len(run.acknowledged)} never came: {missing}"
    assert delivered.keys() <= run.due.keys()
    twice = {body for body in run.timed if delivered[body] > 1}
    assert not twice, f"{len(twice)} of {len(run.timed)} came twice: {twice}"


def test_a_disk_that_lies_about_its_syncs_is_found_out() -> None:
    """The planted bug: without syncs messages are lost, and this test would see it."""
    lost = 0
    for seed in range(12):
        run = Run(seed)
        run.files.syncs_lie = True
        run.live()
        try:
            lost += bool(run.acknowledged - run.finish().keys())
        except Exception:
            lost += 1
    assert lost > 0
