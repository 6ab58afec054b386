"""Quiet, for simulations: the product logs what it finds after each of thousands of faults."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Within it nothing is logged by anybody."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
