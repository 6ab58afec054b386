"""The bits by which RocketMQ knows a group's SQL92 filter of a topic (spec/store.md §3.2).

With filter bitmaps switched on, a Java broker keeps for each message a Bloom filter of the groups
whose expression it matches. The places of a group's bits are part of `consumerFilter.json`; a
broker that finds another number of them there drops the whole file. So we write what it would:
murmur3 (128 bits, x64, seed 0) of `group#topic` gives two numbers, their sums give the places.
"""

import math
from typing import Final, NamedTuple

_MASK: Final = 0xFFFFFFFFFFFFFFFF
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


class BloomShape(NamedTuple):
    """How many bits there are, and how many of them a group has."""

    bit_count: int
    places: int

    def bits_of(self, group: str, topic: str) -> tuple[int, ...]:
        """The places of the group's bits, in RocketMQ's order; the same one may come twice.

        >>> bloom_shape(32, 20).bits_of("GroupA", "TopicA")
        (29, 107, 11)
        """
        code = murmur3_64(f"{group}#{topic}".encode())
        low, high = code & 0xFFFFFFFF, code >> 32
        found = []
        for number in range(1, self.places + 1):
            mixed = (low + number * high) & 0xFFFFFFFF
            if mixed & 0x80000000:
                mixed ^= 0xFFFFFFFF
            found.append(mixed % self.bit_count)
        return tuple(found)


def bloom_shape(groups: int, error_percent: int) -> BloomShape:
    """For so many groups with so many false positives, as expectConsumerNumUseFilter and
    maxErrorRateOfBloomFilter say it."""
    rate = error_percent / 100
    bits = math.ceil(groups * math.log2(1 / rate) * math.log2(math.e))
    return BloomShape(-(-bits // 8) * 8, math.ceil(math.log(rate) / math.log(0.5)))


def murmur3_64(data: bytes) -> int:
    """The first half of the 128-bit murmur3 hash (x64) with seed 0."""
    first = second = 0
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        first ^= _mixed_first(int.from_bytes(data[at : at + 8], "little"))
        first = (_rotated(first, 27) + second) * 5 + 0x52DCE729 & _MASK
        second ^= _mixed_second(int.from_bytes(data[at + 8 : at + 16], "little"))
        second = (_rotated(second, 31) + first) * 5 + 0x38495AB5 & _MASK
    first ^= _mixed_first(int.from_bytes(data[whole : whole + 8], "little"))
    second ^= _mixed_second(int.from_bytes(data[whole + 8 :], "little"))
    first ^= len(data)
    second ^= len(data)
    first = first + second & _MASK
    second = second + first & _MASK
    return _finished(first) + _finished(second) & _MASK


def _rotated(value: int, count: int) -> int:
    value &= _MASK
    return (value << count | value >> (64 - count)) & _MASK


def _mixed_first(value: int) -> int:
    return _rotated(value * _C1, 31) * _C2 & _MASK


def _mixed_second(value: int) -> int:
    return _rotated(value * _C2, 33) * _C1 & _MASK


def _finished(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33
