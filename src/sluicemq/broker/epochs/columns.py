"""Staged messages as NumPy columns, on their way from the staging queues to their topics.

`StagedColumns` reads many records of a staging queue with one access to the log. Their heads become
columns, in which the fields that differ in the published records are replaced. The rest is written
by `record.batch_columns.encode_records`. Bodies and properties are pieces of one copy of the log;
CRCs and tag codes do not change. A run contains only messages that begin with the same stage
property and have the same flags and hosts. It ends before the first message that differs.
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
"""The bytes between body and properties: topic length, topic, and length of the properties."""


class StagedColumns:
    """Consecutive records of a staging queue that are all in one file of the log."""

    def __init__(self, units: NDArray[Any], rest_of_file: memoryview, file_position: int) -> None:
        """Copy the records that `units` locate from one file of the commit log.

        `units` are entries of a consume queue, each with the position and size of a record, as an
        array with the fields of UNIT_COLUMNS and at least one row. `rest_of_file` has the bytes of
        the file from the position `file_position` of the commit log on.
        """
        self._codes = units["code"].astype(np.int64)
        starts = units["position"].astype(np.int64) - file_position
        ends = starts + units["size"]
        copied_start = int(starts[0])
        self._data = bytes(rest_of_file[copied_start : int(ends[-1])])
        self._starts = starts - copied_start
        self._ends = ends - copied_start
        self.heads = unaligned_view(np.frombuffer(self._data, np.uint8), HEAD)[self._starts]
        """The fixed fields of each record, in the fields of HEAD."""
        body_ends = self._starts + HEAD_BYTES + self.heads["body_length"]
        self._property_starts = body_ends + _TOPIC_BYTES

    def size_of_first(self, count: int) -> int:
        """Return the size of the first `count` records in bytes."""
        return int(self._ends[count - 1])

    def first_properties(self) -> bytes:
        """Return the properties of the first record."""
        return self._data[int(self._property_starts[0]) : int(self._ends[0])]

    def count_alike(self, common_start: bytes) -> int:
        """Return how many of the first records can be published together.

        The count ends before the first record that differs. A record must have the format MAGIC_V1,
        the same flags and hosts as the first record, and properties that begin with `common_start`
        and are longer. The count is 0 if the first record does not meet this itself.
        """
        heads = self.heads
        first_head = self.heads[0]
        is_same = (heads["magic"] == MAGIC_V1) & (heads["sys_flag"] == first_head["sys_flag"])
        for name in ("born_host", "store_host"):
            hosts = np.ascontiguousarray(heads[name]).view("<u8")
            is_same &= hosts == hosts[0]
        is_same &= self._property_starts + len(common_start) < self._ends

        # Of these records, compare the beginnings of their properties, byte by byte.
        count = _count_leading(is_same)
        sizes = np.full(count, len(common_start))
        beginnings = Spans(self._data, self._property_starts[:count], sizes)
        beginning_rows = beginnings.read_rows(len(common_start))
        common_row = np.frombuffer(common_start, np.uint8)
        return _count_leading((beginning_rows == common_row).all(axis=1))

    def to_columns(self, count: int, cut_bytes: int, new_beginning: bytes) -> BatchColumns:
        """Return the first `count` records as columns, with which the store can append them.

        In the properties of each record, the first `cut_bytes` bytes are replaced by
        `new_beginning`, the name of the property with the message id, and its separator. The fields
        `reconsume_times` and `prepared_offset` are 0 in the result.
        """
        heads = self.heads[:count].copy()
        heads["reconsume_times"] = heads["prepared_offset"] = 0
        body_sizes = heads["body_length"].astype(np.int64)
        bodies = Spans(self._data, self._starts[:count] + HEAD_BYTES, body_sizes)
        kept_starts = self._property_starts[:count] + cut_bytes
        properties = Spans(self._data, kept_starts, self._ends[:count] - kept_starts)
        stored_sizes = properties.sizes + len(new_beginning)
        columns = BatchColumns(
            heads, bodies, properties, stored_sizes, self._codes[:count], new_beginning
        )

        # The property table describes the properties as they are published. The log still has the
        # id under the name STAGED_ID, so that name is replaced by the one in `new_beginning`.
        name_bytes = len(STAGED_ID) + 1
        table = make_property_table(
            Spans(self._data, properties.starts - name_bytes, properties.sizes + name_bytes)
        )
        if table is not None:
            table.names = (new_beginning[:-1], *table.names[1:])
        return columns._replace(table=table)


def _count_leading(flags: NDArray[np.bool_]) -> int:
    """Return how many elements are true before the first false one; all if none is false."""
    return len(flags) if flags.all() else int(flags.argmin())


def select_fitting_units(
    units: memoryview | bytes | bytearray, bytes_max: int
) -> tuple[NDArray[Any], Positions]:
    """Select the first units of a queue whose records fit into `bytes_max` bytes together.

    `units` are encoded entries of a consume queue. Return (units, ends). The first value is an
    array with the fields of UNIT_COLUMNS; it is empty if not even the first record fits. `ends` has
    the position in the commit log at which each of these records ends.
    """
    rows = np.frombuffer(units, UNIT_COLUMNS)
    sizes_so_far = np.cumsum(rows["size"], dtype=np.int64)
    fitting_count = int(np.searchsorted(sizes_so_far, bytes_max, "right"))
    fitting_units = rows[:fitting_count]
    record_ends = fitting_units["position"].astype(np.int64) + fitting_units["size"]
    return fitting_units, record_ends
