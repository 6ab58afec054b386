"""Whether the thorough run was asked for, which repeats tests with other releases and clients."""

import os
from typing import Final

ALL: Final = os.environ.get("SLUICEMQ_COMPATIBILITY") == "all"
