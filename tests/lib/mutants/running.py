"""Copies of the repository in which mutants run, one at a time in each."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar

from mutants.patching import Mutant, patched, path_of
from thorough import VARIABLE

T = TypeVar("T")
R = TypeVar("R")
ROOT: Final = Path(__file__).parents[3]
LIMIT_S: Final = 60.0
"""A test has to catch its mutant within so many seconds of its own time."""
GRACE: Final = 4.0
"""The wall-clock limit is this many times as long: several tests share the machine."""


@dataclass(frozen=True)
class Verdict:
    """How a test ended: whether it failed, which one did, and what went wrong in another way."""

    is_caught: bool
    seconds: float
    said: str = ""
    by: str = ""

    @property
    def is_late(self) -> bool:
        """Whether the test takes longer than LIMIT_S, also on a machine with nothing else to do."""
        return self.seconds > LIMIT_S * GRACE / 2


class Copy:
    """The tracked files of the repository and the compiled engine, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.split("\0")  # fmt: skip
        engine = Path("src/sluicemq/engine")
        built = [engine / one.name for one in (ROOT / engine).glob("*.so")]
        built += [engine / one.name for one in (ROOT / engine).glob("*.built")]
        for path in [*map(Path, filter(None, listed)), *built]:
            if (ROOT / path).is_file():
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, directory / path)

    def run(self, mutant: Mutant) -> Verdict:
        """Apply a mutant, run its test, and take the mutant back. Raises StaleMutantError."""
        path = self._root / path_of(mutant.module)
        text = path.read_text()
        wrong = patched(text, path_of(mutant.module), mutant.function, mutant.old, mutant.new)
        try:
            path.write_text(wrong)
            if path.suffix == ".pyx" and (said := self._build()):
                return Verdict(False, 0.0, f"it does not compile: {said}")
            return self.test(mutant.caught_by)
        finally:
            path.write_text(text)
            if path.suffix == ".pyx":
                self._build()

    def _build(self) -> str:
        """Build the engine; return what the compiler says, "" if all is well."""
        done = subprocess.run(
            [sys.executable, "tools/native.py"], cwd=self._root, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        return (done.stderr or done.stdout)[-2000:] if done.returncode else ""

    def test(self, command: str) -> Verdict:
        """Run a test, named as `Mutant.caught_by` does, in the copy as it is."""
        first, *rest = command.split()
        if first.startswith("tests/"):
            words = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly",
                     "-o", f"timeout={LIMIT_S * GRACE:.0f}", first, *rest]  # fmt: skip
        else:
            words = [first, *rest, "--jobs", "1"]
        paths = [self._root / "src", self._root / "tests/lib"]
        environment = os.environ | {VARIABLE: "all", "PYTHONPATH": os.pathsep.join(map(str, paths))}
        begin_s = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=self._root, env=environment, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                timeout=LIMIT_S * GRACE,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Verdict(False, LIMIT_S * GRACE, "it ran out of time")
        seconds = time.monotonic() - begin_s
        # Anything else than 0 and 1 is no failed test: nothing was collected, or pytest broke.
        said = "" if done.returncode in (0, 1) else done.stdout[-2000:]
        # A module that cannot be imported. Captured logs have lines that begin with ERROR, too.
        if re.search(r"^ERROR(:| \S+\.py( |$))", done.stdout, re.MULTILINE):
            said = done.stdout[-2000:]
        failed = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.MULTILINE)
        by = failed[1] if failed else command
        return Verdict(done.returncode == 1 and not said, seconds, said, by)


class Copies:
    """Copies of the repository in which tests run side by side, one at a time in each copy."""

    def __init__(self, directory: Path, count: int) -> None:
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(count):
            self._free.put(Copy(directory / str(number)))
        self._pool = ThreadPoolExecutor(count)

    def map(self, work: Callable[[Copy, T], R], items: Iterable[T]) -> list[R]:
        """Call `work` with a free copy for each of `items`; return what it returns, in the order of
        `items`. Raises what `work` raises."""

        def borrow(item: T) -> R:
            copy = self._free.get()
            try:
                return work(copy, item)
            finally:
                self._free.put(copy)

        return [*self._pool.map(borrow, items)]

    def report_failures(self, commands: Iterable[str]) -> bool:
        """Run these tests without a mutant, print the output of those that do not pass, and return
        whether there are any. A test that fails anyway would seem to catch every mutant."""
        distinct = [*dict.fromkeys(commands)]
        failed = False
        for command, plain in zip(distinct, self.map(Copy.test, distinct), strict=True):
            if plain.is_caught or plain.said:
                print(f"WITHOUT A MUTANT this fails: {command}\n{plain.said}", flush=True)
                failed = True
        return failed
