"""p99 of single sends while a backlog is put into files of columns: windows in turn.

    python -m benchmarks.sealing [--windows 20] [--json FILE]

A load that comes and goes on the machine moves the p99 more than any work of the broker, so two
long runs cannot be compared. Here are many short windows: in the first of a pair there are only
sends, in the second, as long, the broker makes files of a topic that was filled before and that a
filter asks for now. The figure is the median of the ratios of the pairs.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [*(str(ROOT / name) for name in ("tests/compatibility", "tests/lib", "src"))]

from benchmarks import backlog, frames, load  # noqa: E402
from benchmarks.orders import BATCH, Orders  # noqa: E402

BLOCKS = 2
WINDOW_S = 2.0
FILES_TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sealing", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--windows", type=int, default=20, help="pairs of windows: 20")
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="sluicemq-sealing-") as scratch,
        contextlib.ExitStack() as stack,
    ):
        server = backlog.ours(Path(scratch))[-1]
        server.start()
        stack.callback(server.stop)
        pairs = windows(server, options.windows)
    ratios = [beside / alone for alone, beside in pairs]
    found = {
        "alone_ms": statistics.median(alone for alone, _ in pairs),
        "beside_ms": statistics.median(beside for _, beside in pairs),
        "ratio": statistics.median(ratios),
        "pairs": pairs,
    }
    print(f"p99 of sends, median of {len(pairs)} windows: {found['alone_ms']:.2f} ms alone, "
          f"{found['beside_ms']:.2f} ms while columns are made; median of the ratios "
          f"{found['ratio']:.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


def windows(server: backlog.Server, count: int) -> list[tuple[float, float]]:
    """p99 in ms without and with files being made, pair by pair. The first pair does not count."""
    broker = server.cluster.broker
    load.create_topic(broker, backlog.SENDS_TOPIC)
    orders = Orders(BLOCKS * (backlog.BLOCK_ROWS + BATCH))  # each queue has a whole block
    pairs = []
    for number in range(count + 1):
        topic = f"Backlog{number}"
        fill(broker, topic, orders)
        backlog.paced_sends(broker, backlog.for_seconds(0.5))
        alone = backlog.paced_sends(broker, backlog.for_seconds(WINDOW_S))
        is_over = ask_for_columns(server, topic)
        beside = backlog.paced_sends(broker, is_over)
        pairs.append((alone, beside))
    return pairs[1:]


def fill(broker: str, topic: str, orders: Orders) -> None:
    """So many blocks of one queue each."""
    load.create_topic(broker, topic)
    with contextlib.closing(load.Connection(broker)) as connection:
        sent = answered = 0
        for frame in orders.sends(topic, BLOCKS):
            connection.socket.sendall(frame)
            sent += 1
            while sent - answered >= backlog.WINDOW:
                answered += sum(1 for _ in connection.answers())
        while answered < sent:
            answered += sum(1 for _ in connection.answers())


def ask_for_columns(server: backlog.Server, topic: str) -> Callable[[float], bool]:
    """Whether its files are there; from now on they are made."""
    begin_s = time.monotonic()
    with contextlib.closing(load.Connection(server.cluster.broker)) as connection:
        connection.call(frames.pull(topic, 0, 0, 1, expression="price > 9998", kind="SQL92"))
    made = threading.Event()

    def look() -> None:
        directory = server.store / "columns" / topic
        while len(list(directory.glob("*/*.arrow"))) < BLOCKS:
            if time.monotonic() > begin_s + FILES_TIMEOUT_S:
                break
            time.sleep(0.05)
        made.set()

    threading.Thread(target=look, daemon=True).start()
    return lambda passed_s: made.is_set() and passed_s > 0.5


if __name__ == "__main__":
    sys.exit(main())
