"""What pending timers cost: storing and taking in, memory, delivering. No network, no other load.

    python -m benchmarks.timers [--count 1000000] [--spread-s 3600]

The store, the intake and the timers of a broker in one process, over real files. Half of the
messages are due within `--spread-s`, half in one and the same second at its end.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from sluicemq.broker.group_commit import GroupCommit  # noqa: E402
from sluicemq.broker.produce.intake import MessageIntake, MessageToStore  # noqa: E402
from sluicemq.broker.settings import Settings  # noqa: E402
from sluicemq.broker.waiting.delivery import DelayedDelivery  # noqa: E402
from sluicemq.config import BrokerConfig, StoreConfig  # noqa: E402
from sluicemq.files import SYSTEM_FILES  # noqa: E402
from sluicemq.store.store import Store  # noqa: E402

HOST = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
TURN = 200
BODY = b"x" * 128


class JumpingClock:
    """Wall time jumps when told, the monotonic one is real."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return time.monotonic()


class Bench:
    """A broker without sockets, stepped as fast as it goes."""

    def __init__(self, root: str) -> None:
        self.clock = JumpingClock()
        settings = Settings(BrokerConfig(broker_name="bench"), StoreConfig(root=root))
        self.store = Store.open(settings.store, files=SYSTEM_FILES, clock=self.clock)
        self._soon: list[object] = []
        self.group_commit = GroupCommit(self.store, self.clock, call_soon=self._soon.append)
        self.intake = MessageIntake(settings, self.store, self.group_commit)
        self.delayed = DelayedDelivery(
            settings, self.store, self.intake, self.group_commit, files=SYSTEM_FILES,
            clock=self.clock, call_soon=self._soon.append,
        )  # fmt: skip
        self.delayed.load()

    def settle(self) -> float:
        """Until nothing is left to do; the longest turn in seconds."""
        longest = 0.0
        while self._soon:
            works, self._soon[:] = list(self._soon), []
            for work in works:
                began = time.perf_counter()
                work()  # type: ignore[operator]
                longest = max(longest, time.perf_counter() - began)
        return longest

    def insert(self, first: int, count: int, spread_ms: int) -> float:
        """Store timed messages; seconds a message, without taking them in."""
        began = time.perf_counter()
        for number in range(first, first + count):
            due = spread_ms if number % 2 else 2000 + number * 7919 % (spread_ms - 2000)
            due_ms = self.clock.ms + due
            properties = {"UNIQ_KEY": f"7F00{number:028X}", "TIMER_DELIVER_MS": str(due_ms)}
            self.intake.rewrite_and_append(
                MessageToStore("T", number % 8, BODY, properties, self.clock.ms, HOST, HOST)
            )
            if number % TURN == TURN - 1:
                self.group_commit.commit_now()
        self.group_commit.commit_now()
        return (time.perf_counter() - began) / count


def memory_mb() -> str:
    """Of this process: all, and what no file backs."""
    text = Path("/proc/self/status").read_text()
    values = dict(line.split(":", 1) for line in text.splitlines())
    resident, anonymous = (int(values[name].split()[0]) // 1024 for name in ("VmRSS", "RssAnon"))
    return f"{resident} MB resident, {anonymous} MB anonymous"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--spread-s", type=int, default=3600)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluicemq-timers-") as root:
        bench = Bench(root)
        print(f"idle: {memory_mb()}")
        stored = taken = longest = 0.0
        step = 20_000
        for first in range(0, options.count, step):
            stored += bench.insert(first, step, options.spread_s * 1000) * step
            began = time.perf_counter()
            longest = max(longest, bench.settle())
            taken += time.perf_counter() - began
        count = options.count
        print(f"stored: {stored / count * 1e6:.1f} us a message")
        print(
            f"taken in: {taken / count * 1e6:.1f} us a message, longest turn {longest * 1e3:.1f} ms"
        )
        print(f"pending {bench.delayed.metrics.total_count:,}: {memory_mb()}")
        began = time.perf_counter()
        bench.delayed.save()
        print(f"checkpoint: {time.perf_counter() - began:.2f} s, {memory_mb()}")
        deliver(bench, options.spread_s, count)
        bench.store.close()


def deliver(bench: Bench, spread_s: int, count: int) -> None:
    """Walk to the end of the spread in steps of ten seconds, then into the full second."""
    began = time.perf_counter()
    longest = 0.0
    for _ in range(spread_s // 10):
        bench.clock.ms += 10_000
        bench.delayed.run_slice()
        longest = max(longest, bench.settle())
    bench.delayed.run_slice()
    longest = max(longest, bench.settle())
    seconds = time.perf_counter() - began
    done = bench.delayed.timers.delivered_count
    print(
        f"delivered {done:,} of {count:,}: {seconds / max(done, 1) * 1e6:.1f} us a message, "
        f"longest turn {longest * 1e3:.1f} ms, {memory_mb()}"
    )


if __name__ == "__main__":
    main()
