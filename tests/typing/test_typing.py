"""Programs as users write them before mypy and pyright, both strict: those in `right` get no
complaint, in `wrong` each line marked `# wrong: …` gets one from both, and no other line does.

The folders are copied out of the tree first, as an installed package would be used: nothing of the
project's own settings but the place of the sources reaches the checkers.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import sluicemq
from sluicemq import Sluice
from waiting import limit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = sorted(HERE.glob("*/*.py"))
MARKED = {
    (path.name, number)
    for path in PROGRAMS
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if "  # wrong: " in line
}
WRONG_MIN = 30
TIMEOUT_S = 280
pytestmark = pytest.mark.timeout(300)
NET = {"sluicemq.client.aio.sluice.Sluice", "sluicemq.client.aio.sluice.Sluice.__init__"}
"""Of `network=`, which is for clusters in one process, some types are inferred."""
Complaints = Mapping[tuple[str, int], str]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typing")
    for path in PROGRAMS:
        shutil.copy(path, folder / path.name)
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", readme(), re.DOTALL)):
        if "from sluicemq import" in block:
            typed = block.replace("def main():", "def main() -> None:")
            (folder / f"readme_{number}.py").write_text(typed)
    settings = {
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "strict",
        "pythonVersion": f"{sys.version_info[0]}.{sys.version_info[1]}",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return folder


def readme() -> str:
    return (ROOT / "README.md").read_text()


def run(project: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env={**os.environ, "MYPYPATH": str(ROOT / "src"), "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(TIMEOUT_S),
    )


def by_mypy(project: Path) -> Complaints:
    cache = ROOT / ".mypy_cache" / "typing"
    done = run(project, "mypy", "--strict", f"--cache-dir={cache}", "--show-error-codes", ".")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^([\w.]+):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return {(name, int(number)): text for name, number, text in found}


def pyright(project: Path, *options: str) -> Any:
    done = run(project, "pyright", "--outputjson", "--pythonpath", sys.executable, *options)
    try:
        return json.loads(done.stdout)
    except ValueError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"pyright does not run here: {(done.stderr or done.stdout).strip()[-200:]}")


def by_pyright(project: Path) -> Complaints:
    report = pyright(project)
    return {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"]
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    }


@pytest.mark.slow
@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_right_programs_pass_and_each_wrong_line_is_flagged(project, checker) -> None:
    found = checker(project)
    unmarked = {place: text for place, text in found.items() if place not in MARKED}
    assert not unmarked
    assert MARKED - found.keys() == set()


@pytest.mark.slow
def test_what_the_package_exports_has_its_types_written_down(project) -> None:
    """An inferred type may be another one in another checker."""
    exported = {
        f"{home}.{name}"
        for home, names in sluicemq._EXPORTS_BY_MODULE.items()
        for name in names
        if isinstance(getattr(sluicemq, name), type)
    }
    options = ("--verifytypes", "sluicemq", "--ignoreexternal")
    report = pyright(project, *options)
    of_ours = [
        symbol
        for symbol in report["typeCompleteness"]["symbols"]
        if symbol["name"] in exported or symbol["name"].rpartition(".")[0] in exported
    ]
    inferred = {one["name"] for one in of_ours if not one["isTypeKnown"]}
    assert len(of_ours) > 350
    assert inferred <= NET


def test_there_is_a_program_of_every_kind() -> None:
    assert len(MARKED) > WRONG_MIN
    assert len(list(HERE.glob("right/*.py"))) >= 10
    used = "".join(path.read_text() for path in HERE.glob("right/*.py"))
    left_out = {"loop", "member_of", "consumers_of", "producers_of", "sender", "default_producer"}
    for name in dir(Sluice):
        if not name.startswith("_") and hasattr(Sluice, name) and name not in left_out:
            assert f".{name}" in used, name
    errors = {name for name in sluicemq.__all__ if name.endswith("Error")}
    for name in set(sluicemq.__all__) - errors:
        assert name in used, name
