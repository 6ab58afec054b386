"""What is peculiar to the Python workers of Spark, in which readers and writers run."""

import gc
from functools import cache


@cache
def keep_imports() -> None:
    """A worker collects garbage after every task, and looks at all that was ever imported: 40 ms,
    as much as reading 100,000 rows. What is there when the first task begins stays, and is not
    looked at again."""
    gc.freeze()
