"""What property columns cost and bring, on the store alone: no network, one process.

    python -m benchmarks.columns [--messages 1000000] [--directory DIR] [--json FILE] [--flights]

A topic with eight properties in random order of values, and SQL92 filters that let 10 %, 1 % and
0.01 % through. For each: a drain by ordinary pulls (32 messages) from the first message to the
last, with columns made on demand, with the files just written, with a store opened again, and, of
the first messages only, as without columns: record by record. The same messages must come by every
way (CRC32 of all they hold). `--flights`: only what the files of the demo's 336,776 flights take.
"""

import argparse
import json
import random
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples" / "flights")]

from demo import message_of  # noqa: E402
from truth import flights  # noqa: E402

from sluicemq.config import StoreConfig  # noqa: E402
from sluicemq.filter.selector import Selector  # noqa: E402
from sluicemq.filter.subscriptions import compile_sql92  # noqa: E402
from sluicemq.model.ids import tag_code  # noqa: E402
from sluicemq.record.codec import encode_properties  # noqa: E402
from sluicemq.store.store import Store  # noqa: E402

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
TOPIC = "Orders"
TURN = 200
SLOW_MESSAGES = 100_000
EXPRESSIONS = {
    "10 %": "price BETWEEN 0 AND 999 AND region IS NOT NULL",
    "1 %": "region = 'hz' AND vip = 'true' AND price >= 9000",
    "0.01 %": "customer = 'c7' AND region IN ('hz', 'sz') AND vip = 'false'",
}


class PlainFilter:
    """The same expression without columns."""

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def __init__(self, expression: str) -> None:
        self.by_commit_log = compile_sql92(expression).matches

    def by_consume_queue(self, tag_code: int) -> bool:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.columns", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--directory", default="", help="keep the store here, or use it again")
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    parser.add_argument("--flights", action="store_true", help="only the disk share of flights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluicemq-columns-") as scratch:
        directory = options.directory or scratch
        of_flights = partial(measure_flights, directory)
        figures = of_flights() if options.flights else measure(directory, options.messages)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure(directory: str, messages: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    shutil.rmtree(f"{directory}/store/columns", ignore_errors=True)
    config = StoreConfig(root=f"{directory}/store", commit_log_file_bytes=1 << 28)
    store = Store.open(config)
    if store.queue_offsets(TOPIC, 0)[1] < messages:
        figures["send_us"] = fill(store, messages)
        show("append, without a network", figures["send_us"], "us/message")
    store.sync()
    log_bytes = store.written_offset - store.log_start
    figures["log_bytes"] = log_bytes / messages
    show("log", figures["log_bytes"], "bytes/message")
    store.columns.warm_up()
    print("\nfirst filter ever, nothing prepared:")
    sums = drain_all(store, messages, figures, "on demand", decoded=True)
    store.close()

    store = Store.open(config)
    figures |= sealed(store, log_bytes)
    store.close()

    print("\na store opened again, with files:")
    store = Store.open(config)
    store.columns.warm_up()
    assert drain_all(store, messages, figures, "files") == sums
    print("\n... and in memory, the expression not seen before:")
    assert drain_all(store, messages, figures, "memory") == sums
    print(f"\nrecord by record (the first {SLOW_MESSAGES} messages):")
    for name, expression in EXPRESSIONS.items():
        end = min(messages, SLOW_MESSAGES)
        plain = drain(store, PlainFilter(expression), end)
        fast = drain(store, compile_sql92(expression), end)
        assert plain[1:] == fast[1:]
        figures[f"records {name}"] = end / plain[0] / 1e6
        show(f"records, {name}", figures[f"records {name}"], "M messages/s")
    store.close()
    return figures


def measure_flights(directory: str) -> dict[str, float]:
    """The demo's messages, with their unique keys, and the files of their columns."""
    config = StoreConfig(root=f"{directory}/flights", commit_log_file_bytes=1 << 28)
    store = Store.open(config)
    for number, row in enumerate(flights()):
        body, tag, properties = sent(row, number)
        store.writer.append(TOPIC, 0, body, properties, tag_code(tag), 0, 0, 1, HOST, HOST)
        if number % TURN == 0:
            store.commit()
    store.commit()
    store.sync()
    log_bytes = store.written_offset - store.log_start
    figures = sealed(store, log_bytes)
    store.close()
    return figures


def sent(row: dict[str, str], number: int) -> tuple[bytes, str, bytes]:
    """Body, tag and encoded properties of a flight as the demo sends it."""
    message = message_of(row)
    all_of_it = {
        "UNIQ_KEY": f"7F000001{number:024X}", "KEYS": " ".join(message.keys), "WAIT": "true",
        "TAGS": message.tag or "", **message.properties,
    }  # fmt: skip
    return message.body, message.tag or "", encode_properties(all_of_it)


def sealed(store: Store, log_bytes: int) -> dict[str, float]:
    """Puts everything into files; what that costs and how much they take."""
    store.columns.scan_for(TOPIC)
    started = time.process_time()
    for step in store.columns.seal_blocks():
        if callable(step):
            step()
    rows = store.columns.rows_sealed
    figures = {
        "build_us": (time.process_time() - started) / max(rows, 1) * 1e6,
        "disk_percent": 100 * store.columns.size_bytes / log_bytes,
    }
    print()
    show("building the files", figures["build_us"], "us/message, CPU")
    show("size of the files", figures["disk_percent"], f"% of the log ({rows:,} messages)")
    return figures


def drain_all(
    store: Store, messages: int, figures: dict[str, float], way: str, *, decoded: bool = False
) -> list[tuple[int, int, int]]:
    sums = []
    for name, expression in EXPRESSIONS.items():
        before = store.columns.rows_decoded
        spent_s, *found = drain(store, compile_sql92(expression), messages)
        sums.append((found[0], found[1], found[2]))
        figures[f"{way} {name}"] = messages / spent_s / 1e6
        share = 100 * found[2] / (store.written_offset - store.log_start)
        made = (store.columns.rows_decoded - before) if decoded else 0
        show(
            f"{way}, {name}", messages / spent_s / 1e6,
            f"M messages/s: {found[0]} matches, {share:.3f} % of the log's bytes delivered"
            + (f", {made} messages decoded" if made else ""),
        )  # fmt: skip
    return sums


def drain(
    store: Store, message_filter: Selector | PlainFilter, end: int
) -> tuple[float, int, int, int]:
    """CPU seconds, matches, CRC32 of them, their bytes."""
    offset = matches = crc = size = 0
    read: Callable[..., object] = store.reader.read
    started = time.process_time()
    while offset < end:
        result = store.reader.read(TOPIC, 0, offset, 32, None, message_filter, end - offset)
        for data in result.data:
            crc = zlib.crc32(data, crc)
        matches += result.count
        size += result.size_bytes
        offset = result.next_offset
    del read
    return time.process_time() - started, matches, crc, size


def fill(store: Store, messages: int) -> float:
    """CPU microseconds a message of appending."""
    chance = random.Random(7)
    tags = {name: tag_code(name) for name in (f"Tag{number}" for number in range(10))}
    names = list(tags)
    body = bytes(128)
    spent_s = 0.0
    for first in range(0, messages, TURN):
        batch = []
        for number in range(first, min(first + TURN, messages)):
            tag = chance.choice(names)
            properties = (
                f"TAGS\x01{tag}\x02region\x01{chance.choice(('hz', 'bj', 'sh', 'gz', 'sz'))}\x02"
                f"price\x01{chance.randrange(10_000)}\x02level\x01{chance.randrange(5)}\x02"
                f"customer\x01c{chance.randrange(2000)}\x02"
                f"vip\x01{chance.choice(('true', 'false'))}\x02"
                f"weight\x01{chance.random() * 100:.2f}\x02kind\x01{chance.choice('abcd')}\x02"
                f"UNIQ_KEY\x017F000001{number:024X}\x02WAIT\x01true\x02"
            )
            batch.append((properties.encode(), tags[tag]))
        started = time.process_time()
        for encoded, code in batch:
            store.writer.append(TOPIC, 0, body, encoded, code, 0, 0, 1, HOST, HOST)
        store.commit()
        spent_s += time.process_time() - started
    return spent_s / messages * 1e6


def show(what: str, figure: float, unit: str) -> None:
    print(f"  {what:34} {figure:9.3f} {unit}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
