"""Chromium, and the checker of accessibility that runs in it: found, or fetched once.

In CI as root a Chromium that is not there is installed. `Missing` is a reason to skip, in CI to
fail.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome"
AXE = "axe-core@4.10.3"
AXE_SHA256 = "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb"
FETCH_S = 300


class Missing(Exception):  # noqa: N818  (it is a reason to skip, not an error of the program)
    """Something of this machine is not there, or could not be fetched."""


def run(*command: str, cwd: str | None = None) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=FETCH_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise Missing(f"{' '.join(command)}: {error}") from error


def chromium() -> str:
    """Its path."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("CI") == "true" and os.geteuid() == 0:
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium")
        found = shutil.which("chromium")
    if found is None:
        raise Missing(f"none of {', '.join(NAMES)} is on the PATH")
    return found


def axe() -> str:
    """The script of axe-core, as npm has it."""
    base = os.environ.get("SLUICEMQ_CACHE") or Path.home() / ".cache" / "sluicemq"
    kept = Path(base) / f"{AXE}.js"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            run("npm", "pack", "--silent", AXE, cwd=scratch)
            archive = next(Path(scratch).glob("*.tgz"))
            run("tar", "xzf", archive.name, "package/axe.min.js", cwd=scratch)
            (Path(scratch) / "package" / "axe.min.js").rename(kept)
    text = kept.read_bytes()
    if hashlib.sha256(text).hexdigest() != AXE_SHA256:
        raise Missing(f"{kept} is not the {AXE} that was pinned")
    return text.decode()
