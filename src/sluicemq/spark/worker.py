"""What is peculiar to the Python workers of Spark, which read and write."""

import gc
from functools import cache


@cache
def keep_imports() -> None:
    """A worker collects garbage after everything it did, and looks at all that was ever imported:
    40 ms, as much as reading 100,000 rows. What is there at its first work stays, and is not looked
    at again."""
    gc.freeze()
