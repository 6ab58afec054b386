"""The backlog of `benchmarks.backlog`: orders with eight properties and a tag, values at random.

Nothing is sorted and nothing follows from anything else, so no block of messages can be left out
and no guess of a broker comes true. Message `i` has its number in the first eight bytes of the
body; what a filter must bring is known from the drawn values alone, without any broker: the sum of
a hash of each number, which a lost, doubled or wrong message changes.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks import frames

REGIONS = ("hz", "bj", "sh", "gz", "sz")
KINDS = ("book", "food", "tool", "toy")
CUSTOMERS, SHOPS, PRICES, LEVELS, TAGS = 2000, 200, 10_000, 5, 100
BATCH = 100
BODY_BYTES = 128
_PART = struct.Struct(">IIIIIQ")
_LENGTH = struct.Struct(">H")


@dataclass(frozen=True)
class Question:
    """A filter, and what it must bring. `share` is how much it lets through."""

    share: str
    kind: str
    expression: str
    count: int
    sum: int


class Orders:
    """So many orders, drawn from a seed."""

    def __init__(self, count: int, seed: int = 7, body_bytes: int = BODY_BYTES) -> None:
        chance = np.random.default_rng(seed)
        self.count = count
        self._pad = bytes(body_bytes - 8)  # behind the number

        def drawn(values: int, kind: type) -> NDArray[np.integer]:
            return chance.integers(0, values, count, kind)

        self.region = drawn(len(REGIONS), np.uint8)
        self.vip = drawn(2, np.uint8)
        self.price = drawn(PRICES, np.uint16)
        self.level = drawn(LEVELS, np.uint8)
        self.customer = drawn(CUSTOMERS, np.uint16)
        self.shop = drawn(SHOPS, np.uint8)
        self.weight = drawn(10_000, np.uint16)
        self.kind = drawn(len(KINDS), np.uint8)
        self.tag = drawn(TAGS, np.uint8)
        self._chance = np.random.default_rng(seed + 1)

    # --- what is asked

    def question(self, share: str) -> Question:
        """One that was not asked before, of a share in SHARES."""
        return SHARES[share](self, share)

    def _number(self, end: int) -> int:
        return int(self._chance.integers(0, end))

    def _tenth(self, share: str) -> Question:
        low = self._number(PRICES - 1000)
        mask = (self.price >= low) & (self.price < low + 1000)
        return self._asked(
            share, "SQL92", f"price BETWEEN {low} AND {low + 999} AND region IS NOT NULL", mask
        )

    def _hundredth(self, share: str) -> Question:
        low, region = self._number(PRICES - 1000), self._number(len(REGIONS))
        mask = (self.region == region) & (self.vip == 1)
        mask &= (self.price >= low) & (self.price < low + 1000)
        text = f"region = '{REGIONS[region]}' AND vip = 'true'"
        return self._asked(
            share, "SQL92", f"{text} AND price >= {low} AND price < {low + 1000}", mask
        )

    def _rare(self, share: str) -> Question:
        customer, first = self._number(CUSTOMERS), self._number(len(REGIONS) - 1)
        mask = (self.customer == customer) & (self.vip == 0)
        mask &= (self.region == first) | (self.region == first + 1)
        regions = f"'{REGIONS[first]}', '{REGIONS[first + 1]}'"
        text = f"customer = 'c{customer}' AND region IN ({regions}) AND vip = 'false'"
        return self._asked(share, "SQL92", text, mask)

    def _tagged(self, share: str) -> Question:
        tag = self._number(TAGS)
        return self._asked(share, "TAG", f"T{tag:02d}", self.tag == tag)

    def _asked(self, share: str, kind: str, text: str, mask: NDArray[np.bool_]) -> Question:
        found = np.flatnonzero(mask)
        return Question(share, kind, text, len(found), sum_of(found))

    # --- how it is sent

    def sends(self, topic: str, queues: int) -> Iterator[bytes]:
        """Frames of SEND_BATCH_MESSAGE, BATCH messages each, queue after queue in turn."""
        for number, first in enumerate(range(0, self.count, BATCH)):
            parts = b"".join(self._parts(first, min(first + BATCH, self.count)))
            yield frames.batch_send(topic, number, number % queues, parts)

    def record_bytes(self, topic: str) -> float:
        """Of a stored message on average (spec/store.md §2.1)."""
        parts = list(self._parts(0, min(self.count, 10_000)))
        return sum(map(len, parts)) / len(parts) - 22 + 91 + len(topic)

    def _parts(self, first: int, end: int) -> Iterator[bytes]:
        rows = slice(first, end)
        columns = (
            self.tag, self.region, self.vip, self.price, self.level, self.customer, self.shop,
            self.weight, self.kind,
        )  # fmt: skip
        values = zip(*(column[rows].tolist() for column in columns), strict=True)
        for number, (tag, region, vip, price, level, customer, shop, weight, kind) in enumerate(
            values, first
        ):
            properties = (
                f"UNIQ_KEY\x017F0000010001251A69D73C5E{number:08X}\x02WAIT\x01true\x02"
                f"TAGS\x01T{tag:02d}\x02region\x01{REGIONS[region]}\x02"
                f"vip\x01{'true' if vip else 'false'}\x02price\x01{price}\x02"
                f"level\x01{level}\x02customer\x01c{customer}\x02shop\x01s{shop}\x02"
                f"weight\x01{weight / 100}\x02kind\x01{KINDS[kind]}\x02"
            ).encode()
            body_bytes = 8 + len(self._pad)
            size = 4 * 5 + body_bytes + 2 + len(properties)
            head = _PART.pack(size, 0, 0, 0, body_bytes, number)
            yield b"".join((head, self._pad, _LENGTH.pack(len(properties)), properties))


SHARES = {
    "10 %": Orders._tenth,
    "1 %": Orders._hundredth,
    "0.01 %": Orders._rare,
    "tag 1 %": Orders._tagged,
}


def sum_of(numbers: NDArray[np.integer]) -> int:
    """The sum of splitmix64 of the numbers, modulo 2^64: the same as Load.java's."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))
