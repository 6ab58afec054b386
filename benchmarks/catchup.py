"""`make bench-catch-up`: an empty slave behind a full master, beside a plain copy with fsync.

    python -m benchmarks.catchup [--gib N]

The master has N GiB (default: the least of 10 GiB and a quarter of the free disk) of 1 KiB
messages with two keys each. The slave is level when it has the whole log and finds the last message
by its key, so queues and index are there. Meanwhile messages go through the master at a slow rate:
their 99th percentile from sender to consumer is compared with that of the time before, and of the
time after. Whoever asks the slave asks seldom: it takes a processor from the senders. Ten GiB take
four minutes.
"""

import argparse
import contextlib
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks import frames, load, measure
from benchmarks.replicas import ROLES, ROOT, SLAVE, broker, clusters

from sluicemq.config import StoreConfig  # isort: skip
from sluicemq.record.codec import encode_properties  # isort: skip
from sluicemq.store.store import Store  # isort: skip

TOPIC, PROBE = "BenchFull", "BenchProbe"
GIB = 1 << 30
BODY_BYTES = 1000
TURN = 400
RATE = 500
HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
RUNTIME, QUERY = 28, 12
LEVEL_S = 1800
QUIET_S = 10
ASK_S = 0.25


def fill(root: Path, size: int) -> tuple[int, int]:
    """Writes a store; (its end, how many messages)."""
    store = Store.open(StoreConfig(root=str(root)))
    body, number = os.urandom(BODY_BYTES), 0
    while store.written_offset < size:
        for _ in range(TURN):
            properties = {"UNIQ_KEY": f"{number:032d}", "KEYS": f"k{number}"}
            store.writer.append(
                f"{TOPIC}{number % 4}", number % 8, body, encode_properties(properties), 0, 0, 0,
                1, HOST, HOST,
            )  # fmt: skip
            number += 1
        store.commit()
        store.tick()
        store.keys.catch_up(4 << 20)
    store.sync()
    end = store.written_offset
    store.close()
    return end, number


def copy(source: Path, target: Path) -> float:
    """Bytes a second of a copy of the log, on disk in the end."""
    target.mkdir()
    began, size = time.perf_counter(), 0
    for path in sorted(source.iterdir()):
        with path.open("rb") as old, (target / path.name).open("wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
            size += new.tell()
    spent = time.perf_counter() - began
    shutil.rmtree(target)
    return size / spent


class Watch(threading.Thread):
    """Asks the slave whether it is level."""

    def __init__(self, address: str, end: int, last: int) -> None:
        super().__init__(daemon=True)
        self._address, self._end, self._last = address, end, last
        self.has_log_s = self.level_s = 0.0

    def run(self) -> None:
        until = time.perf_counter() + LEVEL_S
        while time.perf_counter() < until and not self.level_s:
            time.sleep(ASK_S)
            with contextlib.suppress(OSError, AssertionError):
                connection = load.Connection(self._address)
                with contextlib.closing(connection):
                    answer = connection.call(frames.frame(RUNTIME, {}, 1))
                    _, body = load.header_and_body(memoryview(answer))
                    found = re.search(rb'"commitLogMaxOffset":"(\d+)"', bytes(body))
                    if found is None or int(found[1]) < self._end:
                        continue
                    self.has_log_s = self.has_log_s or time.perf_counter()
                    fields = {
                        "topic": f"{TOPIC}{self._last % 4}", "key": f"k{self._last}",
                        "maxNum": "1", "beginTimestamp": "0", "endTimestamp": str(1 << 60),
                    }  # fmt: skip
                    answer = connection.call(frames.frame(QUERY, fields, 2))
                    header, _ = load.header_and_body(memoryview(answer))
                    if load.code_of(header) == 0:
                        self.level_s = time.perf_counter()


def latencies_ms(address: str, seconds: float) -> list[float]:
    found = load.latency(address, PROBE, rate=RATE, seconds=seconds)
    return [one * 1000 for one in found.latencies_s]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.catchup")
    parser.add_argument("--gib", type=float, help="size of the log")
    parser.add_argument("--directory", help="where, on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluicemq-bench-", dir=options.directory) as scratch:
        place = Path(scratch)
        free = shutil.disk_usage(place).free
        size = int(options.gib * GIB) if options.gib else min(10 * GIB, free // 4)
        end, count = fill(place / "full", size)
        rate = copy(place / "full" / "commitlog", place / "copy")
        os.sync()  # nothing of this is written while the master is measured
        print(f"log of {end / GIB:.2f} GiB, {count:,} messages; copy {rate / 2**20:,.0f} MiB/s")
        names, master, _ = clusters.free_ports()
        _, slave, _ = clusters.free_ports()
        settings = {"listenPort": str(names), "bindAddress": "127.0.0.1"}
        path = clusters.write_properties(place / "namesrv.conf", settings)
        command = [sys.executable, "-m", "sluicemq", "nameserver", "-c", str(path)]
        python_path = {"PYTHONPATH": str(ROOT / "src")}
        with contextlib.ExitStack() as stack:
            log = place / "namesrv.log"
            running = stack.enter_context(clusters.process(command, log, python_path))
            clusters.await_port(running, names, log)
            full = ROLES["async"] | {"storePathRootDir": str(place / "full")}
            full["storePathCommitLog"] = f"{place}/full/commitlog"
            stack.enter_context(broker("ours", place / "master", master, names, **full))
            load.create_topic(f"127.0.0.1:{master}", PROBE)
            before = latencies_ms(f"127.0.0.1:{master}", QUIET_S)
            watch, began = Watch(f"127.0.0.1:{slave}", end, count - 1), time.perf_counter()
            slave_pid = stack.enter_context(broker("ours", place / "slave", slave, names, **SLAVE))
            watch.start()
            during: list[float] = []
            while watch.is_alive():
                during += latencies_ms(f"127.0.0.1:{master}", 1)
            assert watch.level_s, "the slave is not level"
            cpu_s = measure.exact_cpu_s(slave_pid) / (end / GIB)
            after = latencies_ms(f"127.0.0.1:{master}", QUIET_S)
            spent = watch.level_s - began
            print(
                f"slave: log after {watch.has_log_s - began:.1f} s, index"
                f" {watch.level_s - watch.has_log_s:.1f} s later: {end / spent / 2**20:,.0f} MiB/s,"
                f" {end / spent / rate:.2f} of the copy's; its CPU {cpu_s:.1f} s a GiB"
            )
            for name, found in (("before", before), ("meanwhile", during), ("after", after)):
                shares = [measure.percentile(found, share) for share in (0.5, 0.9, 0.99, 0.999)]
                print(f"messages at the master {name}: median {shares[0]:.2f} ms, 90 %"
                      f" {shares[1]:.2f}, p99 {shares[2]:.2f}, 99.9 % {shares[3]:.2f},"
                      f" longest {max(found):.1f} ({len(found):,})")  # fmt: skip
            quiet, busy = measure.percentile(before, 0.99), measure.percentile(during, 0.99)
            print(f"p99 meanwhile is {busy / quiet:.1f} x that of before; load"
                  f" {os.getloadavg()[0]:.1f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
