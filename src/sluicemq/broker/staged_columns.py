"""Staged messages as columns (NumPy): what `staged_runs` does, a thousandfold.

The heads of the records are taken from the log in one gather; what is made anew is patched when
they are laid out again (`record.batch_columns.lay_out`). Bodies and properties are slices of one
copy of the log, CRCs and tag codes stay as they are. Only as many messages are taken as begin with
the same stage and have the same flags and hosts: where one is different, the run ends.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.protocol.bodies.epochs import STAGING_TOPIC
from sluicemq.record.batch_columns import HEAD, HEAD_BYTES, UNIT, Columns, Integers, slices
from sluicemq.record.codec import MAGIC_V1

_TOPIC_BYTES: Final = 1 + len(STAGING_TOPIC) + 2


class Found:
    """Staged records next to each other in a queue, all in one file of the log."""

    def __init__(self, units: NDArray[Any], view: memoryview, base: int) -> None:
        self._codes = units["code"].astype(np.int64)
        starts = units["position"].astype(np.int64) - base
        self._ends = starts + units["size"]
        self._at = int(starts[0])
        data = view[self._at : int(self._ends[-1])]
        self._data = bytes(data)
        self._starts = starts - self._at
        self._ends -= self._at
        raw = np.frombuffer(self._data, np.uint8)
        places = max(len(raw) - HEAD_BYTES + 1, 0)
        self._raw = raw
        self.heads = np.ndarray((places,), HEAD, self._data, strides=(1,))[self._starts]
        self._body_ends = self._starts + HEAD_BYTES + self.heads["body_bytes"]
        self._property_starts = self._body_ends + _TOPIC_BYTES

    def first_properties(self) -> bytes:
        """Those of the first message."""
        return self._data[int(self._property_starts[0]) : int(self._ends[0])]

    def alike(self, start: bytes) -> int:
        """How many have the flags and hosts of the first, and properties that begin so."""
        heads, first = self.heads, self.heads[0]
        same = (heads["magic"] == MAGIC_V1) & (heads["sys_flag"] == first["sys_flag"])
        for name in ("born_host", "store_host"):
            hosts = np.ascontiguousarray(heads[name]).view("<u8")
            same &= hosts == hosts[0]
        same &= self._property_starts + len(start) < self._ends
        count = _leading(same)
        starts = self._property_starts[:count]
        places = np.ndarray(
            (max(len(self._raw) - len(start) + 1, 0),), f"V{len(start)}", self._data, strides=(1,)
        )
        found = places[starts].view(np.uint8).reshape(-1, len(start))
        return _leading((found == np.frombuffer(start, np.uint8)).all(axis=1))

    def columns(self, count: int, cut: int, before: bytes) -> Columns:
        """The first `count`, `before` in place of the first `cut` bytes of their properties."""
        heads = self.heads[:count].copy()
        heads["reconsumed"] = heads["prepared"] = 0
        starts, ends = self._property_starts[:count] + cut, self._ends[:count]
        return Columns(
            heads,
            slices(self._data, self._starts[:count] + HEAD_BYTES, self._body_ends[:count]),
            slices(self._data, starts, ends),
            ends - starts + len(before),
            self._codes[:count],
            before,
        )


def _leading(same: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(same) if same.all() else int(same.argmin())


def fitting(units: memoryview | bytes | bytearray, bytes_max: int) -> tuple[NDArray[Any], Integers]:
    """The first units whose records have so many bytes at most, and where those end."""
    found = np.frombuffer(units, UNIT)
    count = int(np.searchsorted(np.cumsum(found["size"], dtype=np.int64), bytes_max, "right"))
    found = found[:count]
    return found, found["position"].astype(np.int64) + found["size"]
