"""deploy/constraints*.txt: versions and hashes of everything that an image installs.

    python tools/constraints.py               the newest versions of today (make constraints)
    python tools/constraints.py --keep        the versions that the files name; only what is missing

Three files, each complete by itself, so that `pip install --require-hashes -r` takes it:

    constraints.txt         what the servers, the proxy and the console need
    constraints-spark.txt   that, and what jobs on Spark need (`--target spark`)
    constraints-build.txt   what builds the package; it stays behind in a stage of the image

pip resolves them for the Python and the processors of the image, whatever runs this. A package has
the hash of its wheel for each processor. Only pyspark has no wheels: it has the hash of its source
distribution. Extras and versions are those of pyproject.toml.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
DEPLOY: Final = ROOT / "deploy"
PYTHON: Final = "3.12"
ARCHITECTURES: Final = ("x86_64", "aarch64")
GLIBC_MIN, GLIBC_MAX = 17, 36
"""The minor versions of glibc 2 whose wheels are taken; the image has 36 or later."""
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "constraints-spark.txt": ("server", "grpc", "console", "spark", "sql"),
    "constraints.txt": ("server", "grpc", "console"),
}
"""By file, what is installed of ours; the larger one is resolved first, and its versions are the
other's."""
BUILD: Final = "constraints-build.txt"
SOURCE_ONLY: Final = ("pyspark",)
HEAD: Final = """\
# Written by tools/constraints.py (make constraints). For Python {python} on Linux with glibc.
"""

Pins = dict[str, tuple[str, set[str]]]
"""By name, the version and the SHA-256 hashes of its files."""


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements_of(extras: Iterable[str]) -> list[Requirement]:
    """Return what the package needs with these extras, extras of its own resolved; for Linux."""
    told = project()["project"]
    texts = list(told["dependencies"])
    for extra in extras:
        texts += told["optional-dependencies"][extra]
    found: list[Requirement] = []
    for one in map(Requirement, texts):
        if one.name == told["name"]:
            found += requirements_of(sorted(one.extras))
        elif one.marker is None or one.marker.evaluate({"sys_platform": "linux"}):
            found.append(one)
    return list({str(one): one for one in found}.values())


def report(words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what pip would install, from its installation report. Raises SystemExit with what pip
    said."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--target", folder, "--report", str(into), *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise SystemExit(f"pip cannot resolve {' '.join(words)}:\n{done.stderr.strip()}")
        yield from json.loads(into.read_text())["install"]


def pin_of(item: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the name, version and hash of an item of a report."""
    archive = item["download_info"]["archive_info"]
    sha256 = archive.get("hashes", {}).get("sha256") or archive["hash"].removeprefix("sha256=")
    metadata = item["metadata"]
    return canonicalize_name(metadata["name"]), metadata["version"], sha256


def resolved(wanted: Iterable[Requirement], known: Mapping[str, str]) -> Pins:
    """Return the packages that fulfil `wanted`, in the versions that `known` names. Raises
    SystemExit, also when the processors would get different versions."""
    pins: Pins = {}
    wheels: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "known.txt"
        constraints.write_text("".join(f"{name}=={it}\n" for name, it in known.items()))
        limits = ["--constraint", str(constraints)]
        for one in wanted:
            if one.name not in SOURCE_ONLY:
                wheels.append(str(one))
                continue
            for item in report(["--no-deps", *limits, str(one)]):
                name, version, sha256 = pin_of(item)
                pins[name] = (version, {sha256})
                needed = map(Requirement, item["metadata"].get("requires_dist", ()))
                wheels += [str(it) for it in needed if it.marker is None]
        for architecture in ARCHITECTURES:
            platforms = [
                f"--platform=manylinux_2_{minor}_{architecture}"
                for minor in range(GLIBC_MAX, GLIBC_MIN - 1, -1)
            ]
            platforms.append(f"--platform=manylinux2014_{architecture}")
            words = [*platforms, "--python-version", PYTHON, "--implementation", "cp"]
            for item in report([*words, "--only-binary", ":all:", *limits, *wheels]):
                name, version, sha256 = pin_of(item)
                before, hashes = pins.setdefault(name, (version, set()))
                if before != version:
                    raise SystemExit(f"{name} is {before} on one processor, {version} on another.")
                hashes.add(sha256)
    return pins


def written(pins: Pins) -> str:
    """Return the text of a file."""
    lines = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{it}" for it in sorted(hashes))])
        for name, (version, hashes) in sorted(pins.items())
    ]
    return HEAD.format(python=PYTHON) + "\n".join(lines) + "\n"


def versions_in(path: Path) -> dict[str, str]:
    """Return the versions that a file names, by package; none of a file that is not there."""
    text = path.read_text() if path.exists() else ""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep the versions of the files")
    keep = parser.parse_args().keep
    known = versions_in(DEPLOY / "constraints-spark.txt") if keep else {}
    for name, extras in EXTRAS.items():
        pins = resolved(requirements_of(extras), known)
        (DEPLOY / name).write_text(written(pins))
        known = {package: version for package, (version, _) in pins.items()}
        print(f"{name}: {len(pins)} packages", flush=True)
    builders = [Requirement(text) for text in project()["build-system"]["requires"]]
    pins = resolved(builders, versions_in(DEPLOY / BUILD) if keep else {})
    (DEPLOY / BUILD).write_text(written(pins))
    print(f"{BUILD}: {len(pins)} packages", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
