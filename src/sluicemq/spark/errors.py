"""Errors as a Spark user meets them: their text first, not a Python traceback.

Spark puts what a Python worker raised into the JVM exception's message, traceback first, so that
"the topic does not exist" stands forty lines down. Its worker leaves the traceback out when the
environment variable below is set in that process, which ends after the error. So our own errors,
whose text says everything, set it; all others keep their traceback.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sluicemq.errors import SluiceError

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""Read by pyspark.util.handle_worker_exception (pyspark 4.0 and later)."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Within it, an error of SluiceMQ reaches the user as its text alone."""
    try:
        yield
    except SluiceError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise
