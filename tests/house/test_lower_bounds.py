"""The tool behind `make lower-bounds` sees what it is for; the run itself is not part of CI."""

import importlib
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
bounds = importlib.import_module("lower_bounds")
probe = importlib.import_module("lower_bounds_probe")

EXTRAS = sorted(set(bounds.project()["optional-dependencies"]) - bounds.NOT_INSTALLED)


@pytest.mark.parametrize("extra", [bounds.BASE, *EXTRAS])
def test_every_dependency_has_one_lower_bound(extra: str) -> None:
    pins = bounds.pins_of(extra)
    names = [Requirement(pin).name for pin in pins]
    assert len(names) == len(set(names)), "two bounds of one package"
    assert {"lark", "orjson"} <= set(names), "what the package needs in any case"
    assert all(pin.count("==") == 1 for pin in pins)


def test_a_requirement_without_a_lower_bound_is_refused() -> None:
    assert bounds.lowest(Requirement("a[x]>=1.2,<3")) == "a[x]==1.2"
    assert bounds.lowest(Requirement("a==0.0.3")) == "a==0.0.3"
    for text in ("a", "a<2", "a!=1"):
        with pytest.raises(SystemExit, match="no lower bound"):
            bounds.lowest(Requirement(text))


SOURCE = """
from typing import TYPE_CHECKING

from orjson import loads
import not_installed_anywhere

if TYPE_CHECKING:
    from orjson import only_for_types
try:
    from orjson import newer
except ImportError:
    newer = None

def later() -> None:
    from orjson import missing_name
"""


def test_a_name_that_a_version_lacks_is_found_wherever_it_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    used: set[str] = set()
    (failure,) = probe.statement_failures([path], used)
    assert f"{path}:15: " in failure
    assert "missing_name" in failure
    assert used == {"orjson"}


def test_a_name_that_is_read_of_a_package_has_to_be_there(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import orjson as o\nimport json\n\no.dumps(o.nothing_there)\njson.nothing\n")
    assert list(probe.attribute_failures([path])) == [f"{path}:4: orjson has no nothing_there"]


def test_a_module_that_fails_is_told_and_one_that_lacks_a_package_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    lacking, broken = tmp_path / "probed_lacking.py", tmp_path / "probed_broken.py"
    lacking.write_text("import importlib\nimportlib.import_module('not_installed_anywhere')\n")
    broken.write_text("import json\njson.nothing_of_this_name\n")
    (failure,) = probe.module_failures(tmp_path, [lacking, broken])
    assert failure.startswith("import probed_broken: ")
    assert "nothing_of_this_name" in failure
