"""A broker with one thing wrong, for `--mutant NAME`: what histories with a sink have to find.

python -m histories.mutants NAME broker -c …      as `python -m sluicemq broker -c …`
"""

import sys
from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

from sluicemq.broker.epochs.epochs import Epochs
from sluicemq.broker.epochs.table import EpochTable
from sluicemq.cli import main


def forgets_epochs() -> Any:
    """What epochs there are is not state that fails over: each master begins without."""
    return patch.object(Epochs, "load", lambda self: setattr(self._worker, "is_enabled", True))


def resumes_from_the_start() -> Any:
    """Progress does not fail over: what is unfinished is published anew."""
    return patch.object(EpochTable, "_resume", lambda self, *_: None)


MUTANTS: Final[dict[str, Callable[[], Any]]] = {
    one.__name__: one for one in (forgets_epochs, resumes_from_the_start)
}

if __name__ == "__main__":
    with MUTANTS[sys.argv.pop(1)]():
        main(prog_name="sluice")
