"""A progress bar with rate and time left, for long work on files: on stderr, and on terminals only.

rich is imported when a bar is shown, which takes half a second of work first: short work pays
nothing and shows nothing.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sluicemq.clock import SYSTEM_CLOCK, Clock

Advance = Callable[[int, int], None]
PATIENCE_S: Final = 0.5


@contextmanager
def byte_progress(
    what: str, *, shown: bool = True, clock: Clock = SYSTEM_CLOCK
) -> Iterator[Advance]:
    """A function that is told (bytes done, bytes in all) now and then."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = _Bar(what, clock)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    """Made visible by the first call after `PATIENCE_S`."""

    def __init__(self, what: str, clock: Clock) -> None:
        self._what = what
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._bar: Any = None
        self._task: Any = None

    def advance(self, done: int, total: int) -> None:
        if self._bar is None:
            if self._clock.monotonic_s() - self._began_s < PATIENCE_S:
                return
            self._bar = _rich_bar()
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _rich_bar() -> Any:
    from rich.console import Console  # noqa: PLC0415 - 40 ms that short work does not pay
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
