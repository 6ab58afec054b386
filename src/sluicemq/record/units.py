"""The units of consume queues (spec/store.md §3) as columns: position, size and code of a tag."""

from typing import Final

import numpy as np

UNIT_COLUMNS: Final = np.dtype([("position", ">i8"), ("size", ">i4"), ("code", ">i8")])
