"""Decoded pieces of a queue, put together into one sealed block and its file (`columns_file`)."""

import numpy as np

from sluicemq.files import Files
from sluicemq.record.columns import ColumnBlock
from sluicemq.record.columns_build import ArrowColumns, merged_arrays
from sluicemq.store import columns_file
from sluicemq.store.columns_file import Sealed
from sluicemq.store.columns_source import Source


class Sealing:
    """Pieces into one file; `run` may be in any thread or process."""

    def __init__(
        self,
        files: Files,
        directory: str,
        key: tuple[str, int],
        columns_max: int,
        disk_percent: int,
    ) -> None:
        self._files = files
        self._directory = directory
        self._key = key
        self._columns_max = columns_max
        self._disk_percent = disk_percent
        self.name = ""
        self.size_bytes = 0
        self.rows = 0
        self.block: ColumnBlock | None = None

    def run(self, pieces: list[ColumnBlock], sources: list[Source]) -> None:
        """Raises OSError; then there is no file."""
        block = merged(pieces, self._columns_max)
        log_bytes = sum(source.log_bytes for source in sources)
        assert isinstance(block.columns, ArrowColumns)
        bytes_max = log_bytes * self._disk_percent // 100
        arrays, dropped = columns_file.fit_columns(block.columns.arrays, bytes_max)
        block = block._replace(columns=ArrowColumns(arrays), excluded=block.excluded | dropped)
        proofs = [source.proof() for source in sources]
        data = columns_file.encode(Sealed(*self._key, block, proofs))
        self.name = columns_file.write(self._files, self._directory, block.first_offset, data)
        self.size_bytes, self.rows, self.block = len(data), block.rows, block


def merged(pieces: list[ColumnBlock], columns_max: int) -> ColumnBlock:
    """Consecutive blocks as one."""
    arrays, excluded = merged_arrays(pieces)
    names = sorted(arrays, key=lambda name: arrays[name].null_count)
    over = frozenset(names[columns_max:])
    first = pieces[0].first_offset
    odd = np.concatenate([piece.odd + (piece.first_offset - first) for piece in pieces])
    kept = {name: array for name, array in arrays.items() if name not in over}
    return ColumnBlock(
        first, sum(piece.rows for piece in pieces), ArrowColumns(kept), excluded | over, odd
    )
