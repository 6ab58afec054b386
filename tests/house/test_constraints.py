"""What an image installs is named with version and hash: deploy/constraints*.txt.

`make constraints` writes the files. A dependency that is added, or a bound that is raised, without
writing them anew fails here, not in somebody's build of the image.
"""

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
constraints = importlib.import_module("constraints")

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PIN = re.compile(r"([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
IMAGE: Any = {
    "python_version": constraints.PYTHON,
    "python_full_version": f"{constraints.PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}
"""The markers of the image."""
WANTED = {
    **{name: constraints.requirements_of(extras) for name, extras in constraints.EXTRAS.items()},
    constraints.BUILD: list(map(Requirement, constraints.project()["build-system"]["requires"])),
}


def pins_of(name: str) -> dict[str, str]:
    """Return the version of each package of a file; every line of it has to be one of a pin."""
    _, _, text = (ROOT / "deploy" / name).read_text().partition("\n")
    found = PIN.findall(text)
    assert "".join(m.group() for m in PIN.finditer(text)) == text, "nothing without a hash"
    return {package: version for package, version, _ in found}


def needed_by(one: Requirement, version: str) -> Iterator[Requirement]:
    """Yield what a version of a package needs in the image, if it is the one installed here: what
    another version needs, only pip knows."""
    try:
        if importlib.metadata.version(one.name) != version:
            return
        texts = importlib.metadata.requires(one.name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for inner in map(Requirement, texts):
        markers = [IMAGE, *(IMAGE | {"extra": extra} for extra in one.extras)]
        if inner.marker is None or any(map(inner.marker.evaluate, markers)):
            yield inner


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_file_names_every_dependency_of_its_image(name: str) -> None:
    pins, missing = pins_of(name), []
    waiting, seen = list(WANTED[name]), set[str]()
    assert waiting
    for one in waiting:
        version = pins.get(canonicalize_name(one.name))
        if version is None:
            missing.append(str(one))
        elif str(one) not in seen:
            assert one.specifier.contains(version), f"{one} and {version}: make constraints"
            seen.add(str(one))
            waiting += needed_by(one, version)
    assert not missing, f"{name} lacks {missing}: make constraints"


def test_the_image_of_spark_has_the_versions_of_the_other_one() -> None:
    small, large = pins_of("constraints.txt"), pins_of("constraints-spark.txt")
    assert small.items() <= large.items()
    assert set(small) < set(large)


def test_the_image_installs_nothing_without_a_hash() -> None:
    python = re.findall(r"^FROM python:(\d+\.\d+)", DOCKERFILE, re.MULTILINE)
    assert set(python) == {constraints.PYTHON}
    lines = re.findall(r"pip (?:install|wheel) [^&]*", DOCKERFILE.replace("\\\n", " "))
    assert len(lines) > 3
    for line in lines:
        names = re.findall(r"-r deploy/(\S+)", line)
        assert set(names) <= set(WANTED)
        assert ("--require-hashes" in line and names) or "--no-deps" in line, line
        if "wheel" in line.split()[1:2]:
            assert "--no-build-isolation" in line, "else pip fetches build tools as it likes"
    assert {name for line in lines for name in re.findall(r"deploy/(\S+)", line)} == set(WANTED)


def test_pins_have_the_hashes_of_all_processors() -> None:
    pins = {"a": ("1.0", {"f" * 64, "0" * 64}), "b-c": ("2", {"1" * 64})}
    text = constraints.written(pins)
    assert PIN.findall(text.partition("\n")[2])[0][:2] == ("a", "1.0")
    assert text.count("--hash=") == 3
    assert constraints.requirements_of(["console"]), "extras of the package itself are resolved"
    assert {one.name for one in constraints.requirements_of(["console"])} >= {"click", "starlette"}
