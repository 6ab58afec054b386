"""Staged messages as columns (NumPy), from the staging queues to the topics they are meant for.

The heads of the records are taken from the log in one gather; what is made anew is patched when
they are laid out again (`record.batch_columns.encode_records`). Bodies and properties are pieces of
one copy of the log, CRCs and tag codes stay as they are. Only as many messages are taken as begin
with the same stage and have the same flags and hosts: where one is different, the run ends.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.system_names import STAGING_TOPIC
from sluicemq.record.batch_columns import HEAD, HEAD_BYTES, BatchColumns, Spans, make_property_table
from sluicemq.record.layout import MAGIC_V1
from sluicemq.record.table import UNIT_COLUMNS, Positions, unaligned_view
from sluicemq.wire.staging import STAGED_ID

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
        self.heads = unaligned_view(np.frombuffer(self._data, np.uint8), HEAD)[self._starts]
        self._body_ends = self._starts + HEAD_BYTES + self.heads["body_length"]
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
        sizes = np.full(count, len(start))
        found = Spans(self._data, self._property_starts[:count], sizes).read_rows(len(start))
        return _leading((found == np.frombuffer(start, np.uint8)).all(axis=1))

    def columns(self, count: int, cut: int, before: bytes) -> BatchColumns:
        """The first `count`, `before` in place of the first `cut` bytes of their properties."""
        heads = self.heads[:count].copy()
        heads["reconsume_times"] = heads["prepared_offset"] = 0
        sizes = heads["body_length"].astype(np.int64)
        bodies = Spans(self._data, self._starts[:count] + HEAD_BYTES, sizes)
        starts = self._property_starts[:count] + cut
        properties = Spans(self._data, starts, self._ends[:count] - starts)
        stored_sizes = properties.sizes + len(before)
        made = BatchColumns(heads, bodies, properties, stored_sizes, self._codes[:count], before)
        # Of what will be published: the name of the id in the log becomes that of `before`.
        name_bytes = len(STAGED_ID) + 1
        table = make_property_table(
            Spans(self._data, properties.starts - name_bytes, properties.sizes + name_bytes)
        )
        if table is not None:
            table.names = (before[:-1], *table.names[1:])
        return made._replace(table=table)


def _leading(same: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(same) if same.all() else int(same.argmin())


def fitting(
    units: memoryview | bytes | bytearray, bytes_max: int
) -> tuple[NDArray[Any], Positions]:
    """The first units whose records have so many bytes at most, and where those end."""
    found = np.frombuffer(units, UNIT_COLUMNS)
    count = int(np.searchsorted(np.cumsum(found["size"], dtype=np.int64), bytes_max, "right"))
    found = found[:count]
    return found, found["position"].astype(np.int64) + found["size"]
