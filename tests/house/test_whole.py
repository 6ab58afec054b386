"""Rules over the whole source tree: modules per folder, class names, unused code.

`python tests/house/test_whole.py` writes the list of class names that two packages use.
"""

import ast
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
SHARED_CLASS_NAMES = Path(__file__).parent / "shared_class_names.txt"
"""The class names that may be used in two packages. A name that is not here needs a better one, or
a reason to be added."""

MODULES_A_FOLDER_MAX = 16  # 15, and __init__.py

FILES = sorted(SOURCE.rglob("*.py"))


def test_a_folder_has_few_modules() -> None:
    folders = Counter(path.parent for path in FILES)
    folder, modules = folders.most_common(1)[0]
    assert modules <= MODULES_A_FOLDER_MAX, folder


def test_a_class_name_is_defined_once_in_a_package() -> None:
    twice = defined_twice((path.parent, ast.parse(path.read_text())) for path in FILES)
    assert not twice


def test_a_class_name_in_two_packages_is_listed() -> None:
    listed = SHARED_CLASS_NAMES.read_text().split()
    shared = shared_class_names()
    assert not set(shared) - set(listed), "choose another name, or add it to the list"
    assert not set(listed) - set(shared), "remove these from the list"
    assert listed == sorted(listed)


def test_no_code_is_unused() -> None:
    """`[tool.vulture]` in pyproject.toml names what only frameworks or formats use."""
    command = shutil.which("vulture", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("vulture is not installed")
    result = subprocess.run(
        [command, "--config", "pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in (0, 3), result.stderr
    unused = [line for line in result.stdout.splitlines() if line.startswith("src/")]
    assert not unused, "\n".join(unused)


def test_planted_breaches_are_found() -> None:
    planted = ast.parse("class Finding: ...")
    assert defined_twice([(SOURCE, planted), (SOURCE, planted)]) == ["src: Finding"]


def defined_twice(modules: Iterable[tuple[Path, ast.Module]]) -> list[str]:
    classes: dict[Path, Counter[str]] = defaultdict(Counter)
    for folder, tree in modules:
        classes[folder].update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return sorted(
        f"{folder.name}: {name}"
        for folder, names in classes.items()
        for name, count in names.items()
        if count > 1
    )


def shared_class_names() -> list[str]:
    """Return the public class names that are defined in more than one package."""
    packages: dict[str, set[Path]] = defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                packages[node.name].add(path.parent)
    return sorted(name for name, folders in packages.items() if len(folders) > 1)


if __name__ == "__main__":
    SHARED_CLASS_NAMES.write_text("\n".join(shared_class_names()) + "\n")
