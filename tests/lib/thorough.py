"""Whether all tests were asked for, also those that `make test` leaves out to end in time: other
releases and clients of a kind, planted bugs that simulations have to find, and long histories."""

import os
from typing import Final

VARIABLE: Final = "SLUICEMQ_TESTS"
ALL: Final = os.environ.get(VARIABLE) == "all"
