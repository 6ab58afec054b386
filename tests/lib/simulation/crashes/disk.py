"""What both worlds do to a disk: power loss, kills, injected errors, damage from outside.

A restart is one or more attempts to open: the power may fail (or the process be killed) in the
middle of a recovery, and errors may strike there too. Each attempt works on what the last one left.
"""

import contextlib
import errno
import random
from collections.abc import Callable
from typing import Final

from simulation.crashes.plan import Violation
from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.testing.files import CrashableFiles, PowerLost

ATTEMPTS_MAX: Final = 6
FAULTS: Final = ("write", "write", "sync", "sync", "truncate", "create", "sync_directory", "rename")
PLACES: Final = ("commitlog", "commitlog", "consumequeue", "checkpoint", "config", "index", "")


class Disk:
    """The files of a world and what happens to them. `open` opens the product on `files`."""

    def __init__(self, files: CrashableFiles, open_product: Callable[[], None]) -> None:
        self.files = files
        self.is_troubled = False
        """Errors were injected since the last start: the product may refuse."""
        self.power_lost = False
        """The last restart came after a power loss, or had one in it."""
        self._open = open_product
        self._is_kill = False

    # --- in the middle of things

    def arm(self, rng: random.Random) -> str:
        """Power or process end after some more changes of the disk, in whatever comes next."""
        self._is_kill = rng.random() < 0.3
        self.files.power_fails_after = after = rng.choice((0, 1, 2, 3, 5, 8, 13, 30))
        return f"{'kill' if self._is_kill else 'power loss'} after {after} changes"

    def inject(self, rng: random.Random) -> str:
        """An error for an operation to come: EIO, or the disk is full; a part may be written."""
        kind, place = rng.choice(FAULTS), rng.choice(PLACES)
        number = errno.ENOSPC if rng.random() < 0.4 and kind != "sync" else errno.EIO
        after, written = rng.choice((0, 0, 1, 2, 4)), rng.choice((0, 1, 100, 600))
        self.files.fail_next(kind, number, path_part=place, after=after, written=written)
        self.is_troubled = True
        return f"{errno.errorcode[number]} in {kind} {place} after {after}, {written} bytes arrive"

    def fill(self, rng: random.Random) -> str:
        """The disk has so many free blocks left."""
        self.files.free_bytes = rng.choice((0, 4096, 8192, 20_480))
        self.is_troubled = True
        return f"{self.files.free_bytes} bytes free"

    def mend(self) -> str:
        """No more errors, and room again."""
        self.files.clear_faults()
        self.files.free_bytes = None
        return "no more errors"

    # --- the end, and the next start

    def restart(
        self,
        rng: random.Random,
        *,
        power: bool | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Power loss or kill (None: as it was armed), then start until it succeeds.

        `meanwhile` is what somebody does to the files before the first start.
        """
        self.power_lost = False
        self._lose(rng, power=not self._is_kill if power is None else power)
        if meanwhile is not None:
            meanwhile()
        if rng.random() < 0.3:
            self.arm(rng)
        if rng.random() < 0.15:
            self.inject(rng)
        for _ in range(ATTEMPTS_MAX):
            if self._try(rng):
                self._calm()
                return
            self._lose(rng, power=not self._is_kill)
            if rng.random() < 0.5:
                self.arm(rng)
        self._last_try(rng)

    def _lose(self, rng: random.Random, *, power: bool) -> None:
        self.power_lost |= power
        self.files = self.files.crash(rng) if power else self.files.kill()
        self.files.free_bytes = None
        self.is_troubled = False

    def _try(self, rng: random.Random) -> bool:
        try:
            self._open()
        except PowerLost:
            return False
        except StoreDamagedError as error:
            if not self.is_troubled:
                raise Violation(f"the store does not open: {error}") from error
            return False
        except (StoreError, OSError) as error:
            if not self.is_troubled:
                raise Violation(f"the store does not open: {error!r}") from error
            self.power_lost = True  # what a failed sync was to save is lost
            self._is_kill = rng.random() < 0.7
            return False
        return True

    def _calm(self) -> None:
        """What was armed and did not strike is over."""
        self.files.power_fails_after = None
        self.files.clear_faults()
        self.is_troubled = False

    def _last_try(self, rng: random.Random) -> None:
        self._calm()
        if not self._try(rng):
            raise Violation("the store does not open")

    # --- damage from outside, while nobody is running

    def remove_tree(self, path: str) -> None:
        """Durably."""
        for name in self.files.names(path):
            self.remove_tree(f"{path}/{name}")
        self.files.remove(path)
        self.files.sync_directory(path.rpartition("/")[0])

    def all_paths(self, directory: str) -> list[str]:
        """The files (not directories) below a directory."""
        paths = []
        for name in self.files.names(directory):
            path = f"{directory}/{name}"
            inner = self.all_paths(path)
            paths += inner
            if not inner:
                with contextlib.suppress(IsADirectoryError):
                    self.files.open(path)
                    paths.append(path)
        return paths
