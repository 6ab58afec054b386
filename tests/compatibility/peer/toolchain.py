"""Pinned jars, the pinned Go module and our compiled drivers, fetched once into a cache.

The versions are in java/*.xml (Maven) and go/go.mod; their transitive dependencies follow from
those, the Go ones with checksums in go.sum. The cache is `SLUICEMQ_CACHE`, else
`$XDG_CACHE_HOME/sluicemq`, else `~/.cache/sluicemq`; the names in it hold a digest of what they
were made from, so a changed pin or driver makes a new entry and an old one is never stale. A
missing tool raises `MissingTool`, which the tests turn into a skip, or into a failure when CI=true.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parents[1]
FETCH_TIMEOUT_S = 600


class MissingTool(Exception):  # noqa: N818  (it is a reason to skip, not an error of the program)
    """A tool of the machine is not there, or could not fetch what it should."""


def cache_directory() -> Path:
    chosen = os.environ.get("SLUICEMQ_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(chosen) if chosen else Path(base) / "sluicemq"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingTool(f"{name} is not on the PATH")
    return found


def jars(name: str) -> Path:
    """The directory with all jars of java/NAME.xml, e.g. "client-4.9.8"."""
    pom = HERE / "java" / f"{name}.xml"

    def fetch(target: Path) -> None:
        goal = [
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
            f"-DoutputDirectory={target}",
        ]
        run([tool("mvn"), "-q", "-B", "-f", str(pom), *goal], cwd=target)

    return made(f"jars-{name}", [pom], fetch)


def java_classes(name: str, sources: Sequence[Path]) -> str:
    """The class path of our driver compiled against the jars of java/NAME.xml."""
    libraries = jars(name)

    def compile_into(target: Path) -> None:
        command = [
            tool("javac"),
            "-nowarn",
            "-Xlint:none",
            "-cp",
            f"{libraries}/*",
            "-d",
            str(target),
        ]
        run([*command, *map(str, sources)], cwd=target)

    classes = made(
        f"{sources[0].stem.lower()}-{name}", [HERE / "java" / f"{name}.xml", *sources], compile_into
    )
    return f"{classes}{os.pathsep}{libraries}/*"


def go_driver(source: Path = HERE / "go", name: str = "go-driver") -> Path:
    """A compiled Go driver."""

    def build(target: Path) -> None:
        run([tool("go"), "build", "-o", str(target / "driver"), "."], cwd=source)

    return made(name, sorted(source.iterdir()), build) / "driver"


def made(name: str, inputs: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """The cache entry made from `inputs`; made now, by one process, when it is not there."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()[:12]
    entry = cache_directory() / f"{name}-{digest}"
    if entry.is_dir():
        return entry
    with locked(cache_directory() / f"{name}.lock"):
        if not entry.is_dir():
            with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
                target = Path(scratch) / "entry"
                target.mkdir()
                make(target)
                target.rename(entry)
    return entry


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str], *, cwd: Path) -> None:
    try:
        result = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise MissingTool(f"{command[0]} took longer than {FETCH_TIMEOUT_S} s") from late
    if result.returncode:
        raise MissingTool(f"{' '.join(command)} failed:\n{(result.stdout + result.stderr)[-2000:]}")
