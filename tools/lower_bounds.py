"""The lower bounds of each extra, in an environment of its own: `make lower-bounds`.

    python tools/lower_bounds.py                  every extra
    python tools/lower_bounds.py --extras mcp,ha  these ones; `base` is the package without extras
    python tools/lower_bounds.py --newest         the newest versions instead, to compare

An environment holds the lowest version of each package that pyproject.toml allows, on the oldest
Python that it allows: later Pythons have no wheels of old versions. In it (`lower_bounds_probe.py`)
every import statement of src/ whose package is installed is executed, those inside of functions
too, every module of src/ that finds its packages is imported, and every name that is read of such a
package (`pa.binary_view`) is looked up. So a bound is wrong when a version has no wheel, cannot be
installed beside the others, or lacks a module or name. What a name does is not looked at.

The environments are kept under .lower-bounds/ until the bounds change. Not part of CI. The exit
code is the number of extras that failed.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[1]
HOME: Final = ROOT / ".lower-bounds"
PROBE: Final = Path(__file__).with_name("lower_bounds_probe.py")
BASE: Final = "base"
NOT_INSTALLED: Final = frozenset({"all", "compression", "dev"})
"""`all` has no bounds of its own, and the lowest versions of two extras need not go together: pip
finds those that do. `compression` is empty. `dev` is for the newest tools."""
WITH: Final = {"grpc": "server", "ha": "server"}
"""What is used with an extra in any case, so that all modules of it can be imported."""
SOURCE_ONLY: Final = ("pyspark",)
"""Packages that have no wheels."""


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def requirements_of(extra: str, told: dict[str, Any]) -> Iterator[Requirement]:
    """Yield what the package needs with `extra` on this machine, extras of its own resolved."""
    optional = told["optional-dependencies"]
    texts = [*told["dependencies"], *([] if extra == BASE else optional[extra])]
    texts += [f"{told['name']}[{WITH[extra]}]"] if extra in WITH else []
    for text in texts:
        one = Requirement(text)
        if one.name == told["name"]:
            for inner in sorted(one.extras):
                yield from requirements_of(inner, told)
        elif one.marker is None or one.marker.evaluate():
            yield one


def lowest(one: Requirement) -> str:
    """Return the requirement pinned to its lower bound. Raises SystemExit when it has none."""
    bounds = [it.version for it in one.specifier if it.operator in (">=", "==")]
    if len(bounds) != 1:
        raise SystemExit(f"The requirement {one} has no lower bound. Write {one.name}>=VERSION.")
    extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
    return f"{one.name}{extras}=={bounds[0]}"


def pins_of(extra: str, *, newest: bool = False) -> list[str]:
    """Return what pip is asked for, sorted. Two different bounds of one package are both in it, and
    pip refuses them."""
    found = list(requirements_of(extra, project()))
    return sorted({str(it) if newest else lowest(it) for it in found})


def environment(name: str, pins: list[str]) -> Path:
    """Return the interpreter of an environment with exactly these packages; make it anew when they
    have changed. Raises SystemExit with what pip said."""
    home = HOME / name
    python = home / "bin" / "python"
    ready = home / "ready"
    wanted = hashlib.sha256("\n".join(pins).encode()).hexdigest()
    if ready.exists() and ready.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    words = [str(python), "-m", "pip", "install", "--quiet", "--timeout", "180"]
    words += ["--only-binary", ":all:", *(f"--no-binary={one}" for one in SOURCE_ONLY)]
    done = subprocess.run([*words, *pins], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip cannot install {' '.join(pins)}:\n{done.stderr.strip()}")
    ready.write_text(wanted)
    return python


def check(extra: str, *, newest: bool) -> str:
    """Install and probe one extra. Return a line for the summary, which begins with `ok` or
    `FAILED`."""
    started = time.monotonic()
    pins = pins_of(extra, newest=newest)
    print(f"--- {extra}: {' '.join(pins)}", flush=True)
    try:
        python = environment(f"{extra}-newest" if newest else extra, pins)
    except SystemExit as error:
        print(error, flush=True)
        return f"FAILED {extra}: not installed"
    names = [re.split(r"[\[=<>;~! ]", pin)[0] for pin in pins]
    done = subprocess.run([python, PROBE, ROOT / "src", *names], check=False, cwd=HOME)
    verdict = "FAILED" if done.returncode else "ok"
    return f"{verdict} {extra}: {time.monotonic() - started:.0f} s"


def main() -> int:
    told = project()
    extras = [BASE, *(it for it in told["optional-dependencies"] if it not in NOT_INSTALLED)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", default=",".join(extras), help="separated by commas")
    parser.add_argument("--newest", action="store_true", help="the newest versions instead")
    given = parser.parse_args()
    oldest = ".".join(re.findall(r"\d+", told["requires-python"])[:2])
    if not given.newest and oldest != f"{sys.version_info[0]}.{sys.version_info[1]}":
        print(
            f"This is Python {sys.version.split()[0]}; old versions have wheels for {oldest} only. "
            f"Run make lower-bounds PYTHON=python{oldest} VENV=.venv-{oldest}.",
            file=sys.stderr,
        )
        return 1
    lines = [check(extra, newest=given.newest) for extra in given.extras.split(",")]
    print("\n".join(lines), flush=True)
    return sum(line.startswith("FAILED") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
