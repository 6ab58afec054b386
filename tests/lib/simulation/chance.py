"""Everything that the product takes from chance, taken from a seed instead.

A seed of a simulation is worth something only when it means the same history in every process.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

PID = 4711


@contextmanager
def seeded(seed: str) -> Iterator[None]:
    """Let `secrets`, `Random()` and the id of the process depend on nothing but `seed`.

    A module of the product that is imported later than this begins is not covered.
    """
    source = Random(seed)

    class Seeded(Random):
        """`Random()` without an argument begins at the next number of the source."""

        def __new__(cls, *values: Any) -> Any:
            return Random.__new__(cls)

        def __init__(self, *values: Any) -> None:
            super().__init__(*(values or (source.getrandbits(64),)))

    replaced: dict[str, Any] = {
        "randbelow": source.randrange,
        "randbits": source.getrandbits,
        "token_bytes": lambda count=32: source.randbytes(count),
        "token_hex": lambda count=32: source.randbytes(count).hex(),
    }
    with ExitStack() as patches:
        patches.enter_context(patch.multiple(secrets, **replaced))
        patches.enter_context(patch.object(os, "getpid", lambda: PID))
        for name, module in list(sys.modules.items()):
            if name.startswith("sluicemq.") and getattr(module, "Random", None) is Random:
                patches.enter_context(patch.object(module, "Random", Seeded))
        yield
