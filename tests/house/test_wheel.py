"""What a wheel holds: all of src but what is compiled, and nothing else. `make dist` installs and
uses wheels."""

import os
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from waiting import limit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
faults_of = runpy.run_path(str(ROOT / "tools" / "dist.py"))["faults_of"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without the compiled engine: seconds instead of half a minute."""
    folder = tmp_path_factory.mktemp("wheel")
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)],
        env={**os.environ, "SLUICE_PURE": "1"}, capture_output=True, text=True, timeout=limit(110),
        check=False,
    )  # fmt: skip
    if made.returncode and os.environ.get("CI") != "true":
        pytest.skip(f"pip has no index to get the build tools from: {made.stderr[-200:]}")
    assert made.returncode == 0, made.stderr
    (path,) = folder.iterdir()
    return path


def test_a_wheel_holds_the_source_and_nothing_else(wheel: Path) -> None:
    assert faults_of(wheel) == []


def changed(wheel: Path, into: Path, *, without: str = "", added: Mapping[str, str]) -> Path:
    target = into / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name != without:
                new.writestr(name, old.read(name))
        for name, text in added.items():
            new.writestr(name, text)
    return target


def test_planted_faults_are_found(wheel: Path, tmp_path: Path) -> None:
    damaged = changed(
        wheel, tmp_path, without="sluicemq/py.typed",
        added={"tests/test_all.py": "", "sluicemq/engine/sends.pyx": "", "sluicemq/x.so": ""},
    )  # fmt: skip
    assert faults_of(damaged) == [
        "sluicemq/py.typed is missing",
        "sluicemq/engine/sends.pyx is not of the source",
        "sluicemq/x.so is not of the source",
        "tests/test_all.py is not of the source",
    ]


def test_a_wheel_of_a_platform_has_every_module_of_the_engine(wheel: Path, tmp_path: Path) -> None:
    named = wheel.rename(wheel.with_name("sluicemq-0-cp311-cp311-linux_x86_64.whl"))
    module = "sluicemq/engine/sends.cpython-311-x86_64-linux-gnu.so"
    (fault,) = faults_of(changed(named, tmp_path, added={module: ""}))
    named.rename(wheel)
    assert fault.startswith(f"the compiled engine is ['{module}'], not ['client', ")
