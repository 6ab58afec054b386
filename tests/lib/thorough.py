"""How much the tests do: what `make test` leaves out to end in time runs with SLUICEMQ_TESTS=all.

Left out are other releases and clients of a kind, planted bugs that simulations have to find, long
histories, and many of the seeds of simulations. SLUICEMQ_SEEDS sets the number of seeds.
"""

import os
from typing import Final

VARIABLE: Final = "SLUICEMQ_TESTS"
ALL: Final = os.environ.get(VARIABLE) == "all"


def seeds(few: int, many: int | None = None) -> int:
    """Return how many seeds a test tries: SLUICEMQ_SEEDS if that is set, `many` if it is given and
    all tests were asked for, and `few` otherwise."""
    default = few if many is None or not ALL else many
    return int(os.environ.get("SLUICEMQ_SEEDS", default))
